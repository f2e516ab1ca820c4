"""examples/scripts/finetune.sh from its first line to its last, with a package of the standard library as text."""

import email
import re
from pathlib import Path

from tests.support.forked_shell import run_script
from tests.support.paths import ROOT

SIZES = {"VOCAB": "512", "LAYERS": "2", "EMBED": "64", "SEQ": "64", "STEPS": "24", "STOP": "5"}


def test_the_script_of_the_guide(tmp_path: Path) -> None:
    environment = {**SIZES, "SOURCE": str(Path(email.__file__).parent)}
    script = ["bash", str(ROOT / "examples" / "scripts" / "finetune.sh"), "out"]
    done = run_script(script, tmp_path, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    stopped = re.search(r"stopped; out/run/step-(\d{6}) is saved", (tmp_path / "out" / "first.log").read_text())
    resumed = re.search(r"resumed from step (\d+) of 24", done.stdout)
    assert stopped and resumed and int(stopped[1]) == int(resumed[1]) < 24
    assert re.search(r"layout: saved under tp2 pp2 .*, now dp4", done.stdout)
    assert re.search(r"out/text +\d\.\d+ +nats per token", done.stdout)  # evaluate
    assert "24 tokens in" in done.stderr  # generate
    differ = re.search(r"of transformers differ by at most (\S+);", done.stdout)
    assert differ and float(differ[1]) < 1e-4
    again = run_script(script, tmp_path, environment)
    assert (again.returncode, again.stderr) == (2, "finetune.sh: out exists; give a new folder\n")
