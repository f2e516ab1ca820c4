"""Enumerated values of layout fields: recompute mode, optimizer sharding, recomputed modules, overlaps.

Each value is an integer, so that it can stand in an array of layouts. `ModuleSet` and `OverlapSet` are bit masks that
iterate over their members: `Overlap.GRADIENTS in OverlapSet(["gradients", "weights"])`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from megaloom.dsl.choices import Choice, Member
from megaloom.dsl.facts.recompute import Module as Module
from megaloom.dsl.facts.recompute import Recompute as Recompute

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    Column = NDArray[int64]

N = TypeVar("N", int, "Column")


class Shard(Choice):
    """State that is sharded over data-parallel ranks."""

    NONE = 0
    OPTIMIZER = 1  # megatron-core's distributed optimizer, ZeRO 1


class Overlap(Member):
    """Communication that runs while the devices compute."""

    GRADIENTS = "gradients"  # their reduction, during the last backward pass: --overlap-grad-reduce
    WEIGHTS = "weights"  # their gather after the optimizer, during the first forward pass: --overlap-param-gather
    TENSOR = "tensor"  # tensor-parallel collectives, with the matrix products beside them: --tp-comm-overlap
    EXPERTS = "experts"  # all-to-all of tokens, with another micro-batch: --overlap-moe-expert-parallel-comm


M = TypeVar("M", bound=Member)


class _MemberSet(int, Generic[M]):
    """Set of members of one enumeration, as a bit mask that iterates in the order of the enumeration."""

    members: ClassVar[type[Member]]

    def __new__(cls, names: int | Iterable[str] = 0) -> _MemberSet[M]:
        """Take a mask, or the names of the members. Raises ValueError for an unknown name."""
        if not isinstance(names, int):
            names = sum({cls.members(name).bit for name in names})
        return super().__new__(cls, names)

    def __iter__(self) -> Iterator[M]:
        return iter(_members(type(self).members, int(self)))

    def __contains__(self, name: str) -> bool:
        return bool(self & type(self).members(name).bit)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[str(m) for m in self]})"


@lru_cache(maxsize=1024)
def _members(members: type[M], mask: int) -> tuple[M, ...]:
    return tuple(m for m in members if mask & m.bit)


class ModuleSet(_MemberSet[Module]):
    """Set of modules that selective recompute names."""

    members = Module


class OverlapSet(_MemberSet[Overlap]):
    """Set of overlaps."""

    members = Overlap


def choice_names(kind: type[int]) -> tuple[str, ...]:
    """Return the names that a field of this class takes: of an enumeration, or of the members of a set."""
    if issubclass(kind, Choice):
        return tuple(str(choice) for choice in kind)
    return tuple(str(member) for member in kind.members) if issubclass(kind, _MemberSet) else ()


DEFAULT_MODULES = ModuleSet([Module.CORE_ATTN])  # recomputed where no module is named
MODULES_OF_MOE = ModuleSet([Module.MOE_ACT, Module.SHARED_EXPERTS])  # recomputing `moe` recomputes them too
MICROBATCH_OVERLAPS = OverlapSet([Overlap.TENSOR, Overlap.EXPERTS])  # within a micro-batch, so they change node costs


def module_set(names: int | Iterable[str]) -> ModuleSet:
    """Return these modules, without those that `moe` contains if it is among them."""
    found = ModuleSet(names)
    return ModuleSet(found & ~MODULES_OF_MOE) if found & Module.MOE.bit else found


def default_overlaps(shard: N) -> N:
    """Return the mask of the overlaps that cost nothing, which a layout has unless it says otherwise."""
    mask: N = Overlap.GRADIENTS.bit + Overlap.WEIGHTS.bit * (shard == Shard.OPTIMIZER)
    return mask
