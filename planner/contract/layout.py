"""A layout: how many devices each axis takes, and what each of them keeps."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from functools import lru_cache
from typing import Any

from attrs import field, frozen


class Recompute(StrEnum):
    """What the backward pass computes again instead of keeping."""

    NONE = "none"
    SELECTIVE = "selective"  # some modules of each block
    FULL = "full"  # everything but the input of each block


class Module(StrEnum):
    """What selective recompute may compute again: `megaloom.dsl.facts.recompute` says what each is."""

    CORE_ATTN = "core_attn"
    LAYERNORM = "layernorm"
    MLA_UP_PROJ = "mla_up_proj"
    MLP = "mlp"
    MOE_ACT = "moe_act"
    SHARED_EXPERTS = "shared_experts"
    MOE = "moe"

    @property
    def bit(self) -> int:
        """Its place in a number that stands for several."""
        return 1 << list(Module).index(self)


class Overlap(StrEnum):
    """What is exchanged while devices compute, rather than while they wait."""

    GRADIENTS = "gradients"  # reduced during the last backward: --overlap-grad-reduce
    WEIGHTS = "weights"  # gathered from the optimizer's shares during the first forward: --overlap-param-gather
    TENSOR = "tensor"  # of a layer's parts over tp, piece by piece with its products: --tp-comm-overlap
    EXPERTS = "experts"  # tokens, during another micro-batch's way back: --overlap-moe-expert-parallel-comm

    @property
    def bit(self) -> int:
        """Its place in a number that stands for several."""
        return 1 << list(Overlap).index(self)


INNER = (Overlap.TENSOR, Overlap.EXPERTS)  # of what a micro-batch exchanges, and so what its nodes cost
CORE = (Module.CORE_ATTN,)
PARTS_OF_MOE = {Module.MOE_ACT, Module.SHARED_EXPERTS}  # which it computes again anyway


def modules(names: Iterable[str]) -> tuple[Module, ...]:
    """These modules in their order, each once, and none that another computes again anyway."""
    return _modules(tuple(names))


@lru_cache(maxsize=1024)  # a search makes layouts by the thousand
def _modules(names: tuple[str, ...]) -> tuple[Module, ...]:
    given = {Module(name) for name in names}
    return tuple(m for m in Module if m in given - (PARTS_OF_MOE if Module.MOE in given else set()))


def bits(names: Iterable[Module | Overlap]) -> int:
    """Modules, or overlaps, as the bits of a number."""
    return sum(name.bit for name in names)


@lru_cache(maxsize=1024)
def named(number: int) -> tuple[Module, ...]:
    """The modules that the bits of a number stand for."""
    return modules(module for module in Module if number & module.bit)


def overlaps(names: Iterable[str]) -> tuple[Overlap, ...]:
    """These overlaps in their order, each once."""
    return _overlaps(tuple(names))


@lru_cache(maxsize=64)
def _overlaps(names: tuple[str, ...]) -> tuple[Overlap, ...]:
    given = {Overlap(name) for name in names}
    return tuple(o for o in Overlap if o in given)


@lru_cache(maxsize=64)
def _inner(names: tuple[Overlap, ...]) -> int:
    return bits(o for o in names if o in INNER)


@lru_cache(maxsize=64)
def switched(number: int) -> tuple[Overlap, ...]:
    """The overlaps that the bits of a number stand for."""
    return overlaps(o for o in Overlap if number & o.bit)


def free(distributed_optimizer: Any) -> Any:
    """The overlaps that cost nothing, as bits: of one layout, or of many in columns."""
    return Overlap.GRADIENTS.bit + Overlap.WEIGHTS.bit * distributed_optimizer


class Precision(StrEnum):
    """The type that matrix products are computed in; master weights are fp32.

    Below 16 bits it is that of the products inside the blocks alone: all else is bf16.
    """

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP8 = "fp8"  # scaled by tensor
    MXFP8 = "mxfp8"  # scaled by 32 elements
    NVFP4 = "nvfp4"  # scaled by 16 elements

    @property
    def nbytes(self) -> int:
        """Bytes of an element of an activation, or of a weight as it is computed with."""
        return 4 if self is Precision.FP32 else 2

    @property
    def narrow(self) -> bool:
        """Whether operands of products are cast to fewer than 16 bits."""
        return self in (Precision.FP8, Precision.MXFP8, Precision.NVFP4)

    @property
    def wide(self) -> Precision:
        """What is computed in beside those products."""
        return Precision.BF16 if self.narrow else self


class Runtime(StrEnum):
    """What runs a plan: it decides what is fused, and so what a layout costs."""

    MEGALOOM = "megaloom"  # our own, on megatron-core without Transformer Engine
    MEGATRON = "megatron"  # Megatron-LM and those built like it, with Transformer Engine


@frozen(kw_only=True)
class Workload:
    """What one optimizer step must do, whatever the layout."""

    seq: int  # tokens a sequence
    batch: int  # sequences a step, over all devices (the global batch)
    precision: Precision = Precision.BF16

    @property
    def tokens(self) -> int:
        """Tokens a step."""
        return self.seq * self.batch

    def __str__(self) -> str:
        """What a step is of; a model without a sequence, as one of images, has inputs of one."""
        return f"{self.batch:,} " + (f"sequences of {self.seq:,} tokens" if self.seq > 1 else "inputs")


def _beside_default(names: Iterable[str]) -> tuple[Module, ...]:
    found = modules(names)
    return () if found == CORE else found


AXES = ("dp", "tp", "pp", "vpp", "cp", "ep", "etp")


@frozen(kw_only=True)
class Layout:
    """The degree of each axis of the device mesh. `Layout()` is one process.

    Dense layers see the grid dp x pp x cp x tp, experts the grid edp x pp x ep x etp over the same devices.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    vpp: int = 1  # model chunks a pipeline rank
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    micro_batch: int = 1  # sequences
    recompute: Recompute = Recompute.NONE
    distributed_optimizer: bool = False
    # Under selective recompute, what is computed again; none named: the core of attention.
    recompute_modules: tuple[Module, ...] = field(default=(), converter=_beside_default)
    recompute_layers: int = 0  # under full recompute, how many blocks of each stage, from its first on; 0: all
    microbatch_group: int = 0  # micro-batches that a chunk runs before the next one does; 0: as many as pp
    overlaps: tuple[Overlap, ...] = field(converter=overlaps)

    @overlaps.default
    def _free(self) -> tuple[Overlap, ...]:
        return switched(free(self.distributed_optimizer))

    def hides(self, overlap: Overlap) -> bool:
        """Whether this is exchanged while devices compute."""
        return overlap in self.overlaps

    @property
    def inner(self) -> int:
        """The overlaps that change what a node costs, as bits."""
        return _inner(self.overlaps)

    @property
    def group(self) -> int:
        """Micro-batches that a chunk runs before the next one does."""
        return self.microbatch_group or self.pp

    @property
    def again(self) -> str:
        """What is computed again, in words."""
        if self.selective:
            return f"{self.recompute}: {', '.join(self.modules)}"
        return str(self.recompute) + (f", {self.recompute_layers} a stage" if self.recompute_layers else "")

    @property
    def modules(self) -> tuple[Module, ...]:
        """The modules that selective recompute computes again; none under another."""
        return (self.recompute_modules or CORE) if self.selective else ()

    @property
    def module_bits(self) -> int:
        """The same, as the bits of a number."""
        return bits(self.modules)

    @property
    def misnamed(self) -> bool:
        """Whether it names modules, and does not compute modules again."""
        return bool(self.recompute_modules) and not self.selective

    @property
    def full(self) -> bool:
        """Whether blocks are computed again."""
        return self.recompute is Recompute.FULL

    @property
    def selective(self) -> bool:
        """Whether modules are."""
        return self.recompute is Recompute.SELECTIVE

    @property
    def degrees(self) -> dict[str, int]:
        """The degree of each axis, and the micro-batch size."""
        return {axis: getattr(self, axis) for axis in (*AXES, "micro_batch")}

    @property
    def world(self) -> int:
        """Devices in all."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def edp(self) -> int:
        """Copies of each expert."""
        return self.world // (self.pp * self.ep * self.etp)

    def __str__(self) -> str:
        """The layout as people write it: what is not 1 or off."""
        said = [f"{axis}{degree}" for axis, degree in self.degrees.items() if degree > 1 and axis in AXES]
        said += [f"mbs{self.micro_batch}"]
        said += ["sp"] if self.sequence_parallel else []
        said += ["dist-opt"] if self.distributed_optimizer else []
        said += [f"group {self.microbatch_group}"] if self.microbatch_group else []
        said += [f"recompute {self.again}"] if self.recompute is not Recompute.NONE else []
        usual, now = {*switched(free(self.distributed_optimizer))}, {*self.overlaps}
        said += [f"overlap {'+'.join(o for o in self.overlaps if o not in usual)}"] if now - usual else []
        said += [f"no overlap of {'+'.join(o for o in Overlap if o in usual - now)}"] if usual - now else []
        return " ".join(said)

    def microbatches(self, batch: int) -> int:
        """Micro-batches that each data-parallel rank runs for a global batch of `batch` sequences."""
        return batch // (self.dp * self.micro_batch)
