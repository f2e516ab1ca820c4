"""Requirements of a primitive on sharded arguments, beyond the shard that a device holds."""

from __future__ import annotations

from attrs import frozen

from megaloom.dsl.ops.attention_core import Attend, sequence_dim
from megaloom.dsl.ops.norm import Normalize
from megaloom.dsl.ops.rope import Rope
from megaloom.dsl.ops.sequence import Conv, Scan, Shift
from megaloom.dsl.ops.shape import Concat, MaskedScatter, Rename, Select, Slice
from megaloom.dsl.ops.weight import PositionLookup
from megaloom.dsl.sharding_table import SEQUENCES, Split
from megaloom.dsl.value import Value

from .primitives import Step


@frozen
class Reach:
    """Requirements of a primitive on one argument, beyond the shard that a device holds.

    whole: the dims of which it reads every index. placed: those of which it must know at which index it is. heads: the
    dim of what several heads share, and the number of those heads.
    """

    whole: frozenset[str] = frozenset()
    placed: frozenset[str] = frozenset()
    heads: tuple[str, int] | None = None

    @property
    def dims(self) -> frozenset[str]:
        """Return the dims of `whole` and of `placed`."""
        return self.whole | self.placed

    def __bool__(self) -> bool:
        return bool(self.dims)


def reach_of(step: Step, split: Split) -> tuple[Reach, ...]:
    """Return the reach of a primitive for each of its arguments."""
    v = step.value
    match v.op:
        case Attend():
            return _attention(v, v.op)
        case Scan(along):
            n = v.shape["heads"].known
            return tuple(
                Reach(frozenset({along}), heads=("groups", n) if "groups" in a.shape else None) for a in v.args
            )
        case Conv(along) | Shift(along) | Slice(along) | Concat(along):
            return tuple(Reach(frozenset({along})) for _ in v.args)
        case Select(dim, index) if index is not None:
            return (Reach(frozenset({dim})),)
        case Rename(old, new) if step.table.axis(v.args[0].shape[old]) != step.table.axis(v.shape[new]):
            return (Reach(frozenset({old})),)
        case Rope() | PositionLookup():
            return (Reach(placed=SEQUENCES), *(Reach() for _ in v.args[1:]))
        case MaskedScatter():
            return Reach(placed=SEQUENCES), Reach(SEQUENCES), Reach(SEQUENCES)
        case Normalize(over) if v.op.groups > 1 and not _apart(v.op, step, split):
            return tuple(Reach(frozenset(over)) for _ in v.args)
    return tuple(Reach() for _ in v.args)


def _apart(op: Normalize, step: Step, split: Split) -> bool:
    """Whether each device has whole groups: the first dim alone may be divided, and into no more than there are."""
    first, *others = (split.degree(step.axes.get(name, "")) for name in op.over)
    return op.groups % first == 0 and max(others, default=1) == 1 and not SEQUENCES.intersection(op.over)


def _attention(v: Value, op: Attend) -> tuple[Reach, ...]:
    """Queries read all keys and values; a bias is known by the head it is for."""
    q, k, *_ = v.args
    here = {sequence_dim(q.shape).name} if op.causal or op.alibi or op.relative else set()
    heads = {"heads", "kv_heads"} if op.alibi else set()
    keys = Reach(
        frozenset({sequence_dim(k.shape).name}),
        frozenset(heads),
        None if op.alibi else ("kv_heads", q.shape["heads"].known),
    )
    return Reach(placed=frozenset(here | heads)), keys, keys, *(Reach(placed=frozenset(heads)) for _ in v.args[3:])
