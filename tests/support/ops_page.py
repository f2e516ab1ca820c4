"""Tables of docs/reference/ops.md: the ops with what they state, the elementwise functions, and the sharded dims."""

from __future__ import annotations

import inspect

from megaloom.dsl.files.built_in import built_in_kinds
from megaloom.dsl.layer import Layer
from megaloom.dsl.op import Op
from megaloom.dsl.sharding_table import SHARDING
from megaloom.dsl.value import COMPARISONS, NUMBER_WORDS, NUMBERS_OF_ARGUMENTS, UNARY

POLICIES = {
    "even": "the layout is illegal",
    "pad": "the dim is padded",
    "whole": "each device holds the whole dim",
}
OTHERS = {"add": "the sum", "mul": "the product", "div": "the quotient", "min": "the smaller", "max": "the larger"}
FORMULAS = {"quick_gelu": "x · sigmoid(1.702 x)", "relu2": "relu(x)²", "reciprocal": "1 / x"}


def ops() -> str:
    """Return the table of all ops, by module: work, base class, first sentence."""
    rows = ["| op | kind of work | base class | |", "|---|---|---|---|"]
    for kind in sorted(built_in_kinds().values(), key=lambda k: (k.__module__, k.__name__)):
        if not issubclass(kind, Op) or issubclass(kind, Layer) or "base_class" in vars(kind):
            continue
        base = next(b.__name__ for b in kind.__mro__[1:] if "base_class" in vars(b) and issubclass(b, Op))
        first = (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        rows.append(f"| `{kind.__name__}` | {kind.work_kind.name.lower().replace('_', ' ')} | `{base}` | {first} |")
    return "\n".join(rows)


def functions() -> str:
    """Return the table of the elementwise functions, by their number of arguments."""
    rows = ["| function | arguments | |", "|---|---|---|"]
    for name in sorted(UNARY):
        rows.append(f"| `{name}` | one argument | {FORMULAS.get(name, '')} |")
    for name, result in OTHERS.items():
        rows.append(f"| `{name}` | {NUMBER_WORDS[NUMBERS_OF_ARGUMENTS.get(name)]} | {result} |")
    for name in sorted(COMPARISONS):
        rows.append(f"| `{name}` | two arguments | 1 where it holds, else 0; a mask without a gradient |")
    rows.append("| `where` | three arguments | the second where the first, a mask, is 1, else the third |")
    return "\n".join(rows)


def sharded_dims() -> str:
    """Return the built-in sharding table."""
    rows = ["| dim | axis | where the axis does not divide its size |", "|---|---|---|"]
    rows += [f"| `{name}` | {s.axis} | {POLICIES[s.policy]} |" for name, s in SHARDING.items()]
    return "\n".join(rows)
