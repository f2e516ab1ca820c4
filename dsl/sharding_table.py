"""How a program divides over devices: one table of dims to axes, and what else follows.

Protocol: `cut` says which dims of a tensor are divided, `Local` is the sizes that one device then sees. Two dims of one
tensor never share an axis, a dim sits on one axis (Shazeer et al., arXiv:1811.02084). With sequence parallel, what
carries no dim on tp has its seq on tp as well (Korthikanti et al., arXiv:2205.05198). What does not divide rounds up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import ceil, prod

from attrs import Attribute, field, frozen

from .dims import Dim, Shape, Sizes
from .errors import UserError

# A layer with a dim of its own adds to this: `splits = {"channels": "tp"}`.
SPLITS: Mapping[str, str] = {
    "batch": "dp",  # a micro-batch is what one device has already
    "seq": "cp",
    "source": "cp",  # the sequence that an encoder reads
    "experts": "ep",
    "heads": "tp",
    "kv_heads": "tp",
    "groups": "tp",
    "ff": "tp",
    "vocab": "tp",
}
CUTTING = ("tp", "cp", "ep", "etp")  # the axes that cut tensors
SEQUENCES = frozenset(name for name, axis in SPLITS.items() if axis == "cp")


def sequential(shape: Shape) -> bool:
    """Whether a tensor has a part for each position of a sequence."""
    return any(d.name in SEQUENCES for d in shape)


def _degree(_: object, attribute: Attribute[int], n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UserError(f"{attribute.name} of {n!r}: a degree is a whole number of devices, at least 1")


@frozen(kw_only=True, cache_hash=True)
class Split:
    """The degrees of the axes that cut tensors. etp takes tp's place among the experts."""

    tp: int = field(default=1, validator=_degree)
    cp: int = field(default=1, validator=_degree)
    ep: int = field(default=1, validator=_degree)
    etp: int = field(default=1, validator=_degree)
    sequence_parallel: bool = False

    def degree(self, axis: str) -> int:
        """The number of devices along an axis."""
        return getattr(self, axis) if axis in CUTTING else 1


WHOLE = Split()


def among_experts(table: Mapping[str, str], outer: Iterable[Dim]) -> bool:
    """Whether these dims of copies are experts."""
    return any(table.get(d.name) == "ep" for d in outer)


def cut(table: Mapping[str, str], outer: tuple[Dim, ...], *tensors: Iterable[Dim]) -> dict[str, str]:
    """The dims of these tensors that are divided, and the axis of each; `outer` are the copies around them.

    Experts are divided where they are copies, or dispatched to: not beside batch and seq, whose devices ep is made of.
    """
    inside = among_experts(table, outer)
    out: dict[str, str] = {}
    for tensor in tensors:
        dims, taken = (*outer, *tensor), set()
        apart = inside or any(d.of for d in dims)
        for d in dims:
            axis = table.get(d.name)
            if axis is None or axis in taken or (axis == "ep" and not apart):
                continue
            taken.add(axis)
            out[d.name] = "etp" if axis == "tp" and inside else axis
    return out


class Local(Sizes):
    """The sizes that one device sees of tensors divided like this.

    Slots, a device's share of dispatched tokens, follow its own tokens: as many as those times top_k, over all its
    experts, which takes balanced routing. Among the experts every device of etp sees the slots of all of them.
    """

    def __init__(self, sizes: Mapping[str, int], split: Split, axes: Mapping[str, str], inside: bool = False) -> None:
        super().__init__(sizes)
        self.split, self.axes, self.inside = split, axes, inside
        self.sharded = split.sequence_parallel and "tp" not in axes.values()  # seq lies on tp as well

    def of(self, d: Dim) -> int:
        """The size of one dim here."""
        return ceil(self._exact(d))

    def __call__(self, dims: Iterable[Dim]) -> int:
        """The number of elements here of a tensor of these dims."""
        return ceil(prod(map(self._exact, dims)))

    def _exact(self, d: Dim) -> int | Fraction:
        if d.of:
            tokens = Local(self, self.split, dict.fromkeys(SEQUENCES, "cp"))
            copies = self.split.ep * (self.split.etp if self.inside else 1)
            return tokens(d.of) * d.share * copies
        axis, size = self.axes.get(d.name), super().of(d) if d.size is None else d.size
        if axis is None:
            return size
        degree = self.split.degree(axis) * (self.split.tp if axis == "cp" and self.sharded else 1)
        return -(-size // degree)
