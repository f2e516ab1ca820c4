"""Layers, counts and bytes as people write them."""

from __future__ import annotations

from enum import StrEnum
from re import findall

from attrs import NOTHING, fields, has

from megaloom.dsl.dims import Dim
from megaloom.dsl.facts.primitives import program
from megaloom.dsl.graph import Node
from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.routing import Route
from megaloom.dsl.ops.sequence import Scan
from megaloom.dsl.ops.shape import Patches
from megaloom.dsl.ops.weight import Input, Lookup, PositionLookup
from megaloom.dsl.value import Op, Value

COUNTS = (" k", " M", " B", " T", " P", " E")
OPERATIONS = (" k", " M", " G", " T", " P", " E")
BINARY = (" KiB", " MiB", " GiB", " TiB", " PiB")


class Family(StrEnum):
    """What a node is, by the primitive that tells most of it."""

    INPUT = "input"
    TABLE = "table"
    ATTENTION = "attention"
    EXPERTS = "experts"
    SCAN = "scan"
    DENSE = "dense"
    NORM = "norm"
    OTHER = "other"


TELLS: tuple[tuple[type[Op], Family], ...] = (
    (Input, Family.INPUT),
    (Route, Family.EXPERTS),
    (Scan, Family.SCAN),
    (Attend, Family.ATTENTION),
    (Lookup, Family.TABLE),
    (PositionLookup, Family.TABLE),
    (Patches, Family.TABLE),
    (Dot, Family.DENSE),
    (Normalize, Family.NORM),
)


def family(node: Node) -> Family:
    """The family of a node; logits are of the tables."""
    if "vocab" in node.shape:
        return Family.TABLE
    kinds = {type(step.value.op) for step in program(node).steps}
    return next((found for kind, found in TELLS if kind in kinds), Family.OTHER)


def written(it: object) -> str:
    """A layer as it was written: Attention(heads=32, rope=500000). What is as usual is left out; values have names."""
    if isinstance(it, Value):
        return str(it.op)
    if isinstance(it, Dim):
        return str(it.size or it.name)
    if isinstance(it, float):
        return str(int(it)) if it.is_integer() and abs(it) >= 1000 else f"{it:.6g}"
    kind: type = type(it)
    if not has(kind) or kind.__str__ not in (Layer.__str__, object.__str__):
        return str(it)
    given = ((f, getattr(it, f.name)) for f in fields(kind) if f.repr and f.init)
    said = (f"{f.name}={written(v)}" for f, v in given if f.default is NOTHING or v != f.default)
    return f"{kind.__name__}({', '.join(said)})"


def folded(said: str, room: int) -> list[str]:
    """The lines of a layer as it was written, broken behind spaces, or else brackets, such that they fit.

    >>> folded("Attention(heads=32, rope=500000)", 20)
    ['Attention(heads=32,', 'rope=500000)']
    """
    out = [""]
    parts = findall(r".+?(?: |$)", said)
    for piece in (p for part in parts for p in ([part] if len(part) <= room else findall(r".+?(?:\(|$)", part))):
        if out[-1] and len(out[-1]) + len(piece.rstrip()) > room:
            out.append("")
        out[-1] += piece
    return [line.rstrip() for line in out]


def count(n: int, units: tuple[str, ...] = COUNTS) -> str:
    """A count to three digits: 999, 1.23 k, 45.6 M.

    >>> count(999), count(1234), count(999_999), count(8_030_261_248)
    ('999', '1.23 k', '1.00 M', '8.03 B')
    """
    return _scaled(n, 1000, units)


def nbytes(n: int) -> str:
    """So many bytes, to three digits.

    >>> nbytes(1000), nbytes(1 << 20)
    ('1000 B', '1.00 MiB')
    """
    return f"{n} B" if n < 1024 else _scaled(n, 1024, BINARY)


def _scaled(n: int, base: int, units: tuple[str, ...]) -> str:
    """Rounded once, to the unit in which it is less than the next one's 1."""
    if n < base:
        return str(n)
    for i, unit in enumerate(units, 1):
        x = n / base**i
        digits = 2 if x < 9.995 else 1 if x < 99.95 else 0
        said = f"{x:.{digits}f}"
        if float(said) < base or i == len(units):
            return said + unit
    raise AssertionError(units)
