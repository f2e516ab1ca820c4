"""`--version` of both commands."""

import platform
import subprocess
import sys
from importlib.metadata import version

import pytest

from megaloom.planner.cli import versions
from tests.support.limits import LIMIT


@pytest.mark.parametrize("module", ["megaloom.planner.cli.main", "megaloom.runtime.cli.main"])
def test_both_commands_print_versions_without_importing_torch(module: str) -> None:
    code = f"import sys; from {module} import main; print(main(['--version'])); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True)
    *printed, status, torch_imported = done.stdout.splitlines()
    assert printed[:2] == [f"megaloom {version('megaloom')}", f"Python {platform.python_version()}"]
    assert {f"{name} {version(name)}" for name in ("torch", "megatron-core", "transformers")} <= set(printed)
    assert (status, torch_imported) == ("0", "False")


def test_a_package_that_is_absent_is_said_to_be_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "PACKAGES", ("megaloom", "no-such-package"))
    assert versions.installed_versions().splitlines()[2:] == ["no-such-package not installed"]
