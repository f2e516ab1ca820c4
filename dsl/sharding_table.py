"""The sharding table: which dims a layout shards over which axis, and what happens where an axis does not divide a dim.

`SHARDING` holds the dims of the built-in layers; a layer declares dims of its own in `Layer.splits`. Facts, rules, the
cost model and the runtime all read `ShardingTable`. An axis shards at most one dim of a tensor, and a dim lies on one
axis (Shazeer et al., arXiv:1811.02084). With sequence parallelism a tensor without a dim on tp has its sequence on tp
as well (Korthikanti et al., arXiv:2205.05198).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from math import ceil, prod
from typing import Literal

from attrs import Attribute, evolve, field, frozen

from .dims import Dim, Shape, Sizes
from .errors import ShapeError, UserError, did_you_mean

# The shard policy of a dim says what happens where the axis does not divide its size:
# even: no legal layout does that. pad: the dim is padded to a multiple. whole: each device holds the whole dim.
Policy = Literal["even", "pad", "whole"]


@frozen
class Sharded:
    """A dim's entry in the sharding table: its axis, its shard policy and, for padding, the multiple of each part.

    A multiple of None is the layout's to choose: `Split.vocab_multiple`.
    """

    axis: str
    policy: Policy = "even"
    multiple: int | None = 1

    def divides(self, size: int, degree: int) -> bool:
        """Return whether a dim of this size is sharded over `degree` devices, rather than held whole by each."""
        return self.policy != "whole" or size % degree == 0

    def local(self, size: int, degree: int, split: Split) -> int:
        """Return the size on one of `degree` devices, with padding. An uneven share of an `even` dim is rounded up."""
        if not self.divides(size, degree):
            return size
        multiple = split.vocab_multiple if self.multiple is None else self.multiple
        return -(-size // (degree * multiple)) * multiple

    def physical(self, size: int, degree: int, split: Split) -> int:
        """Return the size of the whole dim as devices store it: `size`, with the padding if the policy is to pad."""
        return self.local(size, degree, split) * degree if self.policy == "pad" else size


SHARDING: Mapping[str, Sharded] = {
    "batch": Sharded("dp"),  # a micro-batch is one device's share already
    "seq": Sharded("cp"),
    "source": Sharded("cp"),  # the sequence that an encoder reads
    "experts": Sharded("ep"),
    "heads": Sharded("tp"),
    "kv_heads": Sharded("tp"),
    "groups": Sharded("tp", "whole"),  # of Mamba-2: a device computes all of them where there are fewer than devices
    "ff": Sharded("tp"),
    "vocab": Sharded("tp", "pad", None),  # Megatron-LM: --make-vocab-size-divisible-by
}
AXES_OF_TENSORS = ("tp", "cp", "ep", "etp")
SEQUENCES = frozenset(name for name, sharded in SHARDING.items() if sharded.axis == "cp")
SHARED_BY_HEADS = frozenset({"kv_heads"})  # dims of which several heads share one index, and devices the weights


def sequential(shape: Shape) -> bool:
    """Return whether a tensor has a part for each position of a sequence."""
    return any(d.name in SEQUENCES for d in shape)


def _check_degree(_: object, attribute: Attribute[int], n: int) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise UserError(f"{attribute.name} must be a whole number of devices, at least 1, got {n!r}")


@frozen(kw_only=True, cache_hash=True)
class Split:
    """The degrees of the axes that shard tensors. Inside experts, etp takes the place of tp.

    vocab_multiple: the number that the vocabulary on each device is padded to a multiple of.
    """

    tp: int = field(default=1, validator=_check_degree)
    cp: int = field(default=1, validator=_check_degree)
    ep: int = field(default=1, validator=_check_degree)
    etp: int = field(default=1, validator=_check_degree)
    sequence_parallel: bool = False
    vocab_multiple: int = 1

    def degree(self, axis: str) -> int:
        """Return the number of devices along an axis; 1 for an axis that shards no tensor."""
        return getattr(self, axis) if axis in AXES_OF_TENSORS else 1


WHOLE = Split()


def padded_vocabulary(size: int, split: Split) -> int:
    """Return the size of a vocabulary as devices store it: a multiple of `vocab_multiple` x tp."""
    return SHARDING["vocab"].physical(size, split.tp, split)


@frozen
class ShardingTable:
    """The entries of the dims of one graph node.

    Under a `split`, a dim of policy `whole` that its axis does not divide is not sharded. Without one, every dim is
    taken to divide.
    """

    dims: Mapping[str, Sharded]
    split: Split | None = None

    @classmethod
    def of(cls, *declared: Mapping[str, str | Sharded]) -> ShardingTable:
        """Return the built-in table with the declarations of layers added. A bare axis means `whole` (ep: `even`)."""
        dims = dict(SHARDING)
        for name, entry in (item for layer in declared for item in layer.items()):
            if isinstance(entry, Sharded):
                dims[name] = entry
            elif name not in dims or dims[name].axis != entry:
                dims[name] = Sharded(entry, "even" if entry == "ep" else "whole")
        return cls(dims)

    def at(self, split: Split, whole: Iterable[str] = ()) -> ShardingTable:
        """Return the table under a split. The dims named in `whole` have the policy `whole`."""
        dims = {n: evolve(entry, policy="whole") if n in whole else entry for n, entry in self.dims.items()}
        return ShardingTable(dims, split)

    def axis(self, d: Dim, inside: bool = False) -> str | None:
        """Return the axis that shards a dim, if one does; `inside` experts etp takes the place of tp."""
        entry = self.dims.get(d.name)
        if entry is None:
            return None
        axis = "etp" if inside and entry.axis == "tp" else entry.axis
        uneven = self.split and d.size is not None and not entry.divides(d.size, self.split.degree(axis))
        return None if uneven else axis

    def among_experts(self, outer: Iterable[Dim]) -> bool:
        """Return whether one of these dims, those of the copies around a tensor, is that of the experts."""
        return any(self.axis(d) == "ep" for d in outer)

    def axes(self, outer: tuple[Dim, ...], *tensors: Iterable[Dim]) -> dict[str, str]:
        """Return the sharded dims of some tensors, with the axis of each; `outer` are the dims of copies around them.

        The experts dim is sharded if it is a dim of copies, or of a tensor with dispatched tokens. In a tensor with
        batch and seq, such as the gate, it is not, since ep takes its devices from those of dp and cp.
        """
        inside = self.among_experts(outer)
        out: dict[str, str] = {}
        for tensor in tensors:
            dims, used = (*outer, *tensor), set()
            apart = inside or any(d.of for d in dims)
            for d in dims:
                axis = self.axis(d, inside)
                if axis is None or axis in used or (axis == "ep" and not apart):
                    continue
                used.add(axis)
                out[d.name] = axis
        return out

    def local(self, sizes: Mapping[str, int], split: Split, axes: Mapping[str, str], inside: bool = False) -> Local:
        """Return the sizes on one device of tensors whose dims lie on these axes."""
        return Local(sizes, split, axes, self.dims, inside)


def check_splits(layer: str, splits: Mapping[str, str | Sharded]) -> None:
    """Check what a layer declares of its dims. Raises ShapeError for an axis that shards no tensor."""
    known = sorted({entry.axis for entry in SHARDING.values()})
    for dim, entry in splits.items():
        axis = entry.axis if isinstance(entry, Sharded) else entry
        if axis not in known:
            what = f"{layer} cannot shard {dim} over {axis!r}{did_you_mean(axis, known)}"
            raise ShapeError(f"{what}the axes are {', '.join(known)}")


class Local(Sizes):
    """The sizes on one device of tensors whose dims lie on given axes.

    A device has tokens x top_k slots for dispatched tokens over all of its experts, with its own number of tokens and
    balanced routing. Inside experts every device of etp has the slots of the whole etp group.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        split: Split,
        axes: Mapping[str, str],
        dims: Mapping[str, Sharded] = SHARDING,
        inside: bool = False,
    ) -> None:
        super().__init__(sizes)
        self.split, self.axes, self.dims, self.inside = split, axes, dims, inside
        self.sharded = split.sequence_parallel and "tp" not in axes.values()  # seq lies on tp as well

    def of(self, d: Dim) -> int:
        """Return the local size of one dim."""
        return ceil(self._exact(d))

    def __call__(self, dims: Iterable[Dim]) -> int:
        """Return the number of local elements of a tensor of these dims."""
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
        return self.dims[d.name].local(size, degree, self.split)
