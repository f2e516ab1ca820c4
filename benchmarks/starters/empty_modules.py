"""Empty modules in place of packages that a program imports and that arguments do not need: kernels, loggers, readers.

A program that reads its arguments imports all of itself. Without a GPU some of what it imports cannot be installed.
Only packages that are not installed are replaced, and never one of the program that judges the arguments.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

KERNELS = """transformer_engine apex triton flash_attn mamba_ssm causal_conv1d fla flashinfer fast_hadamard_transform
modelopt nvidia_resiliency_ext megatron.energon grouped_gemm deep_ep"""
OTHERS = """wandb mlflow comet_ml tensorboard datasets peft diffusers timm qwen_vl_utils sentencepiece mistral_common
open_clip tiktoken"""


class _Value:
    """A value of an empty module: any attribute, and a decorator that changes nothing."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> _Value:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class _Kind(type):
    """A name of an empty module, which may be a base class, a decorator, a function or a submodule."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _kind(name)

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not options else _Value()


def _kind(name: str) -> type:
    return _Kind(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return "99.0"
        if name.startswith("__"):
            raise AttributeError(name)
        made = _kind(name)
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of these names, and every module below them, as empty ones."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = _Module(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is empty."""


def install_empty_modules() -> list[str]:
    """Replace the packages that are not installed; return their names."""

    def installed(name: str) -> bool:
        try:
            return importlib.util.find_spec(name) is not None
        except ImportError:
            return False

    missing = [name for name in (*KERNELS.split(), *OTHERS.split()) if not installed(name)]
    sys.meta_path.append(_Finder(missing))
    return missing


def hopper() -> None:
    """Let torch say that the device is an H100: some arguments are checked against its generation."""
    import torch

    torch.cuda.get_device_capability = lambda *_: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0)  # type: ignore[assignment]
