"""The text of `--version`: the versions of Megaloom, of Python, and of the packages that plans and runs depend on."""

from __future__ import annotations

import platform

PACKAGES = (
    "megaloom",
    "numpy",
    "torch",
    "megatron-core",
    "transformer-engine",
    "transformers",
    "datasets",
    "safetensors",
)
VERSION_HELP = "Print the versions of Megaloom, Python, torch, megatron-core and others, and exit."


def installed_versions() -> str:
    """Return a line for each package, by its metadata: none of them is imported. The first line is Megaloom's."""
    megaloom, *others = (f"{name} {_version(name)}" for name in PACKAGES)
    return "\n".join((megaloom, f"Python {platform.python_version()}", *others))


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
