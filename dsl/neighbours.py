"""The modules beside a model's file, which it may import as a program would that Python runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import dirname, realpath

_LOADED: dict[str, str] = {}  # the folder of each module that was imported from beside a model's file


@contextmanager
def neighbours_of(file: str | None) -> Iterator[None]:
    """Find modules in the folder of a file first, as `python file.py` does.

    Modules of equal names that came from the folders of other models are imported anew.
    """
    if file is None:
        yield
        return
    folder = dirname(realpath(file))
    for name in [name for name, where in _LOADED.items() if where != folder]:
        sys.modules.pop(name, None)
        del _LOADED[name]
    before = set(sys.modules)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        for name in set(sys.modules) - before:
            if dirname(realpath(getattr(sys.modules[name], "__file__", None) or "")) == folder:
                _LOADED[name] = folder
