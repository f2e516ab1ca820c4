"""The packages that training needs, which `pip install megaloom` does not bring."""

from __future__ import annotations

from importlib.util import find_spec

from megaloom.dsl.errors import UserError

TRAINING_PACKAGES = {
    "torch": "torch",
    "megatron-core": "megatron.core",
    "psutil": "psutil",
    "safetensors": "safetensors",
}
"""Module of each package that every run imports. The extra `train` also has those of single formats."""


def require_training_packages(command_name: str) -> None:
    """Raise UserError that names the missing packages, if one of TRAINING_PACKAGES is not installed."""
    missing = [package for package, module in TRAINING_PACKAGES.items() if not _is_installed(module)]
    if missing:
        raise UserError(
            f"`megaloom {command_name}` needs packages that are not installed: {', '.join(missing)}\n"
            "install them with: pip install 'megaloom[train]'"
        )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of the parent package
        return False
