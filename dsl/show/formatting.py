"""Text for layers, counts and bytes, and the family of a node."""

from __future__ import annotations

from enum import StrEnum
from re import findall

from attrs import NOTHING, fields, has

from megaloom.dsl.dims import Dim
from megaloom.dsl.facts.primitives import program
from megaloom.dsl.layer import Layer
from megaloom.dsl.node import Node
from megaloom.dsl.op import Op
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.ops.dot import Dot
from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.routing import Route
from megaloom.dsl.ops.sequence import Scan
from megaloom.dsl.ops.shape import Patches
from megaloom.dsl.ops.weight import Input, Lookup, PositionLookup
from megaloom.dsl.value import Value

COUNTS = (" k", " M", " B", " T", " P", " E")
OPERATIONS = (" k", " M", " G", " T", " P", " E")
BINARY = (" KiB", " MiB", " GiB", " TiB", " PiB")


class Family(StrEnum):
    """Category of a node, by its most characteristic op: `FAMILY_OF_OP` lists them in order of precedence."""

    INPUT = "input"
    TABLE = "table"
    ATTENTION = "attention"
    EXPERTS = "experts"
    SCAN = "scan"
    DENSE = "dense"
    NORM = "norm"
    OTHER = "other"


FAMILY_OF_OP: tuple[tuple[type[Op], Family], ...] = (
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
    """Return the family of a node. Logits belong to the tables."""
    if "vocab" in node.shape:
        return Family.TABLE
    kinds = {type(step.value.op) for step in program(node).steps}
    return next((group for kind, group in FAMILY_OF_OP if kind in kinds), Family.OTHER)


def declared(value: object) -> str:
    """Return a layer as it is declared, without default arguments: `Attention(heads=32, rope=500000)`."""
    if isinstance(value, Value):
        return str(value.op)
    if isinstance(value, Dim):
        return str(value.size or value.name)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) >= 1000 else f"{value:.6g}"
    kind: type = type(value)
    if not has(kind) or kind.__str__ not in (Layer.__str__, object.__str__):
        return str(value)
    arguments = ((f, getattr(value, f.name)) for f in fields(kind) if f.repr and f.init)
    text = (f"{f.name}={declared(v)}" for f, v in arguments if f.default is NOTHING or v != f.default)
    return f"{kind.__name__}({', '.join(text)})"


def wrap_text(text: str, width: int) -> list[str]:
    """Return a declaration as lines of at most `width` characters, broken after spaces, or else after brackets.

    >>> wrap_text("Attention(heads=32, rope=500000)", 20)
    ['Attention(heads=32,', 'rope=500000)']
    """
    out = [""]
    parts = findall(r".+?(?: |$)", text)
    for piece in (p for part in parts for p in ([part] if len(part) <= width else findall(r".+?(?:\(|$)", part))):
        if out[-1] and len(out[-1]) + len(piece.rstrip()) > width:
            out.append("")
        out[-1] += piece
    return [line.rstrip() for line in out]


def format_count(n: int, units: tuple[str, ...] = COUNTS) -> str:
    """Return a count with three digits: 999, 1.23 k, 45.6 M.

    >>> format_count(999), format_count(1234), format_count(999_999), format_count(8_030_261_248)
    ('999', '1.23 k', '1.00 M', '8.03 B')
    """
    return _scaled(n, 1000, units)


def format_bytes(n: int) -> str:
    """Return a number of bytes with three digits.

    >>> format_bytes(1000), format_bytes(1 << 20)
    ('1000 B', '1.00 MiB')
    """
    return f"{n} B" if n < 1024 else _scaled(n, 1024, BINARY)


def _scaled(n: int, base: int, units: tuple[str, ...]) -> str:
    """Return n in the smallest unit in which it rounds to less than one of the next unit."""
    if n < base:
        return str(n)
    for i, unit in enumerate(units, 1):
        x = n / base**i
        digits = 2 if x < 9.995 else 1 if x < 99.95 else 0
        text = f"{x:.{digits}f}"
        if float(text) < base or i == len(units):
            return text + unit
    raise AssertionError(units)
