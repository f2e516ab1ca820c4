"""The installed packages are the folders of the repository, under the one name megaloom."""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.support.limits import LIMIT
from tests.support.paths import ROOT

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = tuple(sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))


def python(*args: str, cwd: Path, path: Path | None = None) -> str:
    """Return the output of this Python, run in `cwd` with `path` before the installed packages."""
    env = {**os.environ, "PYTHONPATH": str(path or "")}
    done = subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def sources(root: Path, folders: Iterable[str]) -> set[str]:
    """The Python files, type markers, data and what web pages are made of, under these folders of `root`."""
    files = (path for name in folders for path in (root / name).rglob("*") if "__pycache__" not in path.parts)
    kinds = (".py", ".js", ".css", ".jsonl", ".typed")
    return {path.relative_to(root).as_posix() for path in files if path.suffix in kinds}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel installed in it, built from a copy so that this tree does not change."""
    copy, installed = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("installed")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-q")
    python("-m", "pip", "install", *offline, "--target", str(installed), str(copy), cwd=copy)
    return installed


def test_each_folder_with_modules_is_a_package() -> None:
    modules = (path for top in FOLDERS for path in (ROOT / top).rglob("*.py"))
    assert {path.parent for path in modules if not (path.parent / "__init__.py").is_file()} == set()


def test_a_new_folder_needs_no_entry(tmp_path: Path) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    for name in ("dsl", "runtime", "runtime/new", "runtime/new/below", "benchmarks"):  # the last one is not installed
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    show = "import setuptools; setuptools.setup = lambda packages: print(*sorted(packages)); import setup"
    listed = python("-c", show, cwd=tmp_path).split()
    assert listed == ["megaloom.dsl", "megaloom.runtime", "megaloom.runtime.new", "megaloom.runtime.new.below"]


def test_type_checkers_see_the_same_packages() -> None:
    links = PYPROJECT["tool"]["mypy"]["mypy_path"].removeprefix("$MYPY_CONFIG_FILE_DIR/") + "/megaloom"
    only_links = ("make", "-s", "-o", ".venv/.ready", links)  # the installation stays, also where it is an old one
    subprocess.run(only_links, cwd=ROOT, check=True, timeout=LIMIT)
    assert {link.name: link.resolve() for link in (ROOT / links).iterdir()} == {name: ROOT / name for name in FOLDERS}
    assert all((ROOT / name / "py.typed").is_file() for name in FOLDERS)


def test_the_wheel_holds_all_sources_and_nothing_else(installed: Path) -> None:
    tops = {path.name for path in installed.iterdir()} - {
        f"megaloom-{PYPROJECT['project']['version']}.dist-info",
        "bin",
    }
    assert tops == {"megaloom"}
    assert {path.name for path in (installed / "megaloom").iterdir()} == set(FOLDERS)  # a namespace: no __init__
    assert sources(installed / "megaloom", FOLDERS) == sources(ROOT, FOLDERS)


def test_the_wheel_is_imported_under_its_own_name(installed: Path, tmp_path: Path) -> None:
    show = "import importlib, sys; [print(importlib.import_module('megaloom.' + n).__file__) for n in sys.argv[1:]]"
    result = python("-c", show, *FOLDERS, cwd=tmp_path, path=installed).split()
    assert result == [str(installed / "megaloom" / name / "__init__.py") for name in FOLDERS]


def test_models_of_the_examples_are_found_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    show = "import sys; from megaloom.dsl.catalog import find; [print(find(name)[0].name) for name in sys.argv[1:]]"
    names = ["gpt2", "llama3-8b", "mixtral-8x7b", "stdlib-gpt"]
    assert python("-c", show, *names, cwd=tmp_path, path=installed).split() == names


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_second_identity_is_refused(folder: str) -> None:
    with pytest.raises(AssertionError, match=f"import megaloom.{folder}, not {folder}"):
        python("-c", f"import {folder}", cwd=ROOT)  # the folder lies on the path here


@pytest.mark.parametrize("script", sorted(PYPROJECT["project"]["scripts"]))
def test_the_commands_are_installed(script: str, installed: Path, tmp_path: Path) -> None:
    assert "Usage" in python(str(installed / "bin" / script), "--help", cwd=tmp_path, path=installed)
