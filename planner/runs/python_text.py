"""Parsing of a Python file that is read and never run."""

from __future__ import annotations

import ast
import warnings

from megaloom.dsl.errors import UserError


def parsed_python(text: str, path: str) -> ast.Module:
    """Return the syntax tree of a text. Raise UserError with the line that is not Python, which is never shown.

    What Python refuses only when it compiles is refused too: an argument that is given twice.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(text.removeprefix("\ufeff"))
            compile(tree, "run", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path}:{getattr(error, 'lineno', None) or 1}: this line is not Python") from None
    return tree
