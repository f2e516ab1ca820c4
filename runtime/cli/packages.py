"""The packages that training needs, which `pip install megaloom` does not bring."""

from __future__ import annotations

from importlib.util import find_spec

from megaloom.dsl.errors import UserError

TRAINING_PACKAGES = ("torch", "megatron.core", "psutil")  # of the extra `train` in pyproject.toml


def require_training_packages(command_name: str) -> None:
    """Raise UserError if torch or megatron-core is not installed."""
    missing = [name for name in TRAINING_PACKAGES if not _is_installed(name)]
    if missing:
        raise UserError(
            f"`megaloom {command_name}` needs packages that are not installed: {', '.join(missing)}\n"
            "install them with: pip install 'megaloom[train]'"
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the parent package
        return False
