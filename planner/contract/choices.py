"""Values of layout fields: recompute, sharding of state, gradients, modules, overlaps; `LayoutField` reads them.

The names of recompute modes and modules are those of `megaloom.dsl.facts.recompute`, which says what each of them
recomputes. This file does not import the dsl, so that `plan --help` starts at once. Each value is an integer, so that
it can stand in an array of layouts. `ModuleSet` and `OverlapSet` are bit masks that iterate over their members:
`Overlap.GRADIENTS in OverlapSet(["gradients", "weights"])`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from attrs import frozen

if TYPE_CHECKING:
    from numpy import int64
    from numpy.typing import NDArray

    Column = NDArray[int64]

N = TypeVar("N", int, "Column")
"""A layout field: a number in one layout, a column of numbers in many. True is 1; choices and sets are numbers too."""

C = TypeVar("C", bound="Choice")


class Choice(IntEnum):
    """One of several named values; `Recompute("full")` is `Recompute.FULL`, and `str` gives the name back."""

    @classmethod
    def _missing_(cls, value: object) -> Choice | None:
        return cls.__members__.get(value.upper().replace("-", "_")) if isinstance(value, str) else None

    @classmethod
    def look_up(cls: type[C], choice: N, table: Mapping[C, int]) -> N:
        """Return the number that a table has for a choice, or for each of a column. Raise KeyError if it lacks any."""
        if isinstance(choice, cls):
            if choice not in table:
                raise KeyError(f"a table by {cls.__name__} has no {choice}")
            return table[choice]
        if len(table) < len(cls):
            missing = ", ".join(str(known) for known in cls if known not in table)
            raise KeyError(f"a table by {cls.__name__} has no {missing}")
        import numpy as np  # only a search has columns

        numbers: N = np.array([table[known] for known in cls])[choice - min(cls)]
        return numbers

    def __str__(self) -> str:
        return self.name.lower().replace("_", "-")

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class Member(StrEnum):
    """Member of a set that is stored as a bit mask."""

    bit: int

    def __init__(self, _: str) -> None:
        self.bit = 1 << len(type(self).__members__)


class Recompute(Choice):
    """Activations that the backward pass recomputes: none, those of some modules, or all of each block."""

    NONE = 0
    SELECTIVE = 1
    FULL = 2


class Module(Member):
    """Part of a block that selective recompute can name. The order is that of the dsl."""

    CORE_ATTN = "core_attn"
    LAYERNORM = "layernorm"
    MLA_UP_PROJ = "mla_up_proj"
    MLP = "mlp"
    MOE_ACT = "moe_act"
    SHARED_EXPERTS = "shared_experts"
    MOE = "moe"


class Shard(Choice):
    """State that is sharded over data-parallel ranks. Each value shards more of it than the one before."""

    NONE = 0
    OPTIMIZER = 1  # megatron-core's distributed optimizer, ZeRO 1
    GRADIENTS = 2  # and gradients, ZeRO 2: weights are gathered once a step
    WEIGHTS = 3  # and weights, ZeRO 3 or FSDP: see `Reshard`


class ExpertShard(Choice):
    """State of experts that is sharded over the devices that have copies of them."""

    SAME = 0  # as `Shard` says for all other weights
    NONE = 1  # the values of `Shard`, each one more than there
    OPTIMIZER = 2
    GRADIENTS = 3
    WEIGHTS = 4


class Reshard(Choice):
    """The time for which sharded weights stay gathered: one pass of a micro-batch, or the whole step."""

    MICRO_BATCH = 0
    STEP = 1  # gradients are whole too, until the last micro-batch


class GradReduce(Choice):
    """Number format in which gradients are added up over micro-batches and reduced over ranks."""

    FP32 = 0
    BF16 = 1  # megatron-core's grad_reduce_in_fp32=False under bf16: as wide as the weights


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
    gradients = Overlap.GRADIENTS.bit
    both = gradients + Overlap.WEIGHTS.bit
    return Shard.look_up(
        shard, {Shard.NONE: gradients, Shard.OPTIMIZER: both, Shard.GRADIENTS: both, Shard.WEIGHTS: both}
    )


@frozen
class LayoutField:
    """Description of one field of a layout."""

    name: str
    kind: type[int]  # of its value in one layout: int, bool, or one of the classes above
    minimum: int
    maximum: int
    flag: str  # on the command line
    title: str  # of its column in reports
    help: str

    def parse(self, value: Any) -> int:
        """Return the value that a user or a file gives for this field. Raises ValueError that says what is wrong."""
        if self.kind in (int, bool):
            if type(value) is not self.kind:
                due = "true or false" if self.kind is bool else "a whole number"
                raise ValueError(f"must be {due}, got {value!r:.40}")
            return value
        known, single = choice_names(self.kind), issubclass(self.kind, Choice)
        if not single and (isinstance(value, str) or not isinstance(value, Iterable)):
            raise ValueError(f"must be a list of {', '.join(known)}; got {value!r:.40}")
        for name in [value] if single else value:
            if str(name) not in known:
                none = ", or none" if self.kind is OverlapSet else ""
                due = f"one of {', '.join(known)}" if single else f"some of {', '.join(known)}{none}"
                raise ValueError(f"must be {due}; got {str(name)!r:.40}")
        number: int = self.kind(value)
        return number

    def plain(self, value: int) -> int | str | list[str]:
        """Return the value of one layout as JSON has it."""
        if isinstance(value, Choice):
            return str(value)
        return [str(one) for one in value] if isinstance(value, ModuleSet | OverlapSet) else self.kind(value)
