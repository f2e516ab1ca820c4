"""Requirements of a primitive on sharded arguments, beyond the shard that a device holds."""

from __future__ import annotations

from attrs import frozen

from megaloom.dsl.ops.attention_core import Attend, sequence_dim
from megaloom.dsl.ops.documents import DocumentPositions
from megaloom.dsl.ops.loss import CrossEntropy
from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.rope import Rope
from megaloom.dsl.ops.sequence import Conv, Inside, Scan, Shift
from megaloom.dsl.ops.shape import Concat, MaskedScatter, Rename, Select, Slice
from megaloom.dsl.ops.weight import PositionLookup
from megaloom.dsl.sharding_table import SEQUENCES, Split
from megaloom.dsl.value import Value

from .primitives import Step


@frozen
class ReadRequirement:
    """Requirements of a primitive on one argument, beyond the shard that a device holds.

    full_dims: dims of which it reads every index.
    offset_dims: dims of which it must know the index at which the shard begins.
    heads: the dim of which several heads share one index, and the number of these heads.
    """

    full_dims: frozenset[str] = frozenset()
    offset_dims: frozenset[str] = frozenset()
    heads: tuple[str, int] | None = None

    @property
    def dims(self) -> frozenset[str]:
        """Return the dims of `full_dims` and of `offset_dims`."""
        return self.full_dims | self.offset_dims

    def __bool__(self) -> bool:
        return bool(self.dims)


def read_requirements(step: Step, split: Split) -> tuple[ReadRequirement, ...]:
    """Return the requirements of a primitive on each of its arguments."""
    v = step.value
    match v.op:
        case Attend():
            return _attention(v, v.op)
        case Scan(along):
            n = v.shape["heads"].known
            return tuple(
                ReadRequirement(frozenset({along}), heads=("groups", n) if "groups" in a.shape else None)
                for a in v.args
            )
        case Conv(along) | Shift(along) | Slice(along) | Concat(along) | DocumentPositions(along):
            return tuple(ReadRequirement(frozenset({along})) for _ in v.args)
        case Select(dim, index) if index is not None:
            return (ReadRequirement(frozenset({dim})),)
        case Rename(old, new) if step.table.axis(v.args[0].shape[old]) != step.table.axis(v.shape[new]):
            return (ReadRequirement(frozenset({old})),)
        case CrossEntropy(over) if over in SEQUENCES:  # a label is the index of a position, which a shard does not know
            return ReadRequirement(frozenset({over})), ReadRequirement()
        case Rope() | PositionLookup() | Inside():
            return (ReadRequirement(offset_dims=SEQUENCES), *(ReadRequirement() for _ in v.args[1:]))
        case MaskedScatter():
            return ReadRequirement(offset_dims=SEQUENCES), ReadRequirement(SEQUENCES), ReadRequirement(SEQUENCES)
        case Normalize(over) if v.op.groups > 1 and not _has_whole_groups(v.op, step, split):
            return tuple(ReadRequirement(frozenset(over)) for _ in v.args)
    return tuple(ReadRequirement() for _ in v.args)


def _has_whole_groups(op: Normalize, step: Step, split: Split) -> bool:
    """Return whether each device has whole groups: only the first dim is sharded, into a divisor of their number."""
    first, *others = (split.degree(step.axes.get(name, "")) for name in op.over)
    return op.groups % first == 0 and max(others, default=1) == 1 and not SEQUENCES.intersection(op.over)


def _attention(v: Value, op: Attend) -> tuple[ReadRequirement, ...]:
    """Return the requirements of attention: queries read all keys and values, masks depend on their positions."""
    q, k, *_ = v.args
    located = op.causal or op.alibi or op.relative or op.documents
    positions = {sequence_dim(q.shape).name} if located else set()
    keys = ReadRequirement(frozenset({sequence_dim(k.shape).name}), heads=("kv_heads", q.shape["heads"].known))
    queries = ReadRequirement(offset_dims=frozenset(positions))
    indices = (queries, ReadRequirement(keys.full_dims)) if op.documents else ()
    others = v.args[3 : len(v.args) - len(indices)]
    return queries, keys, keys, *(ReadRequirement() for _ in others), *indices
