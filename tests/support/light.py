"""Tries the installation of those who only plan: `pip install megaloom`, without torch.

`python -m tests.support.light [PYTHON ...]` builds the wheel, installs it with its dependencies into a fresh
environment of this Python and of each other one, and runs the commands that need no torch there, and one that does.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.support.paths import ROOT

CONSTRAINTS = ROOT / "constraints.txt"
PLAN = ("llama3-8b", "--gpus", "8xH100")


def main() -> None:
    """Build, install and try; raise RuntimeError with the output of the first command that does not do as expected."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = _wheel(folder)
        for i, python in enumerate((sys.executable, *sys.argv[1:])):
            started = time.monotonic()
            programs = _installed(wheel, python, folder / f"env-{i}")
            seconds, version = time.monotonic() - started, _run(str(programs / "python"), "--version").strip()
            _try(programs, folder)
            print(f"{version}: {wheel.name} in {seconds:.0f} s; plan, show and export work without torch", flush=True)


def _installed(wheel: Path, python: str, environment: Path) -> Path:
    """Install the wheel into an environment of a Python, and return the folder of its programs."""
    _run(python, "-m", "venv", "--without-pip", str(environment))
    programs = environment / "bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python"), "install", "-q"]
    _run(*pip, "--disable-pip-version-check", "--no-compile", "-c", str(CONSTRAINTS), str(wheel))
    return programs


def _wheel(folder: Path) -> Path:
    """Build the wheel from a copy of the files that git does not ignore, and return its path."""
    copy = folder / "copy"
    listed = _run("git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    for file in (ROOT / name for name in listed if name):
        if file.is_file():
            target = copy / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    build = ["wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    _run(sys.executable, "-m", "pip", *build, str(copy))
    (wheel,) = folder.glob("megaloom-*.whl")
    return wheel


def _try(programs: Path, folder: Path) -> None:
    """Run the commands: planning works without torch, training says how to install what it needs."""
    installed = _run(str(programs / "python"), "-c", "import importlib.util as u; print(u.find_spec('torch'))")
    if installed.strip() != "None":
        raise RuntimeError("torch is installed in the light environment; [project.dependencies] must not bring it")
    _run(str(programs / "plan"), *PLAN, "-o", "plan.json", cwd=folder)
    _run(str(programs / "megaloom"), "show", "llama3-8b", cwd=folder)
    _run(str(programs / "megaloom"), "export", "plan.json", "--to", "slurm", cwd=folder)
    done = subprocess.run(
        [str(programs / "megaloom"), "train", "stdlib-gpt"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    if done.returncode != 2 or "pip install 'megaloom[train]'" not in done.stderr:
        raise RuntimeError(f"megaloom train without torch ended with {done.returncode} and printed:\n{done.stderr}")


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()
