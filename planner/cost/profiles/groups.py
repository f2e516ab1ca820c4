"""The groups of settings that make up a framework profile: kernels, attention, optimizer, and so on.

A layout says how a model is distributed. A framework profile says how a framework runs it. The default of every
setting is that of a framework with fused kernels and without Transformer Engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from attrs import evolve, field, fields, fields_dict, frozen

from megaloom.planner.contract.choices import GradReduce, N, Overlap
from megaloom.planner.contract.workload import Precision

from .figures import Figure, FigureKind, setting

Passes = Mapping[str, tuple[float, float]]
"""Passes over memory of a kind of kernel, forward and backward, per pass that the facts count."""
ONE_PASS = (1.0, 1.0)
_NBYTES = {GradReduce.FP32: 4, GradReduce.BF16: 2}  # of a gradient


class ContextCommunication(StrEnum):
    """Communication of context-parallel attention: Megatron-LM's --cp-comm-type."""

    ALL_GATHER = "all-gather"
    P2P = "p2p"
    ALL_TO_ALL = "all-to-all"


@frozen(kw_only=True)
class KernelSettings:
    """Kernels of everything but attention and experts."""

    memory_passes: Passes = field(
        default=MappingProxyType({}),
        hash=False,
        metadata={
            "meaning": "times that a memory-bound kernel passes over memory, where the facts count one fused kernel",
            "unit": "passes (forward, backward)",
            "figure": Figure({}, FigureKind.CODE, "one fused kernel each"),
        },
    )
    loss_moved_nbytes: int = setting(
        14,
        "moved by the loss and its gradient",
        unit="bytes per logit",
        kind=FigureKind.ASSUMED,
        source="14 = logits read twice, an fp32 copy written and read, and a 16-bit gradient written",
    )
    loss_saved_nbytes: int = setting(
        4,
        "that the loss saves of each 16-bit logit",
        unit="bytes per logit",
        source="megatron-core, tensor_parallel/cross_entropy.py: an fp32 copy",
    )
    only_swiglu_fused: bool = setting(False, "SwiGLU is the only gated unit with a fused kernel")
    wgrad_fusion: bool = setting(
        False, "products that make weight gradients add them to main gradients, where the runtime can (`Execution`)"
    )


@frozen(kw_only=True)
class HostSettings:
    """Launches of kernels by the host, and its work between two steps."""

    launch_factor: float = setting(
        1.0,
        "host time per kernel, in kernel launches of the device",
        unit="launches per kernel",
        source="the device's launch time alone",
    )
    step_launches: float = setting(
        0.0,
        "host time between two steps in which a GPU has nothing to do, in kernel launches of the device",
        unit="launches per step",
    )
    cuda_graphs: bool = setting(False, "kernels are launched by CUDA graphs and wait for no host")
    blocking_launches: bool = setting(False, "a kernel is launched when the one before it has ended")

    @property
    def launches(self) -> float:
        """Return the host time per kernel, in kernel launches of the device; CUDA graphs need none."""
        return 0.0 if self.cuda_graphs else self.launch_factor


@frozen(kw_only=True)
class AttentionSettings:
    """Attention: fused or not, what it saves, and its context-parallel communication."""

    fused: bool = setting(True, "attention is one fused kernel, which stores no scores")
    score_nbytes: int = setting(
        2 + 1 + 2,
        "saved of each attention score where attention is not fused",
        unit="bytes per score",
        source="Korthikanti et al., arXiv:2205.05198, section 4.1: softmax output, dropout mask, dropout output",
    )
    context_communication: ContextCommunication = setting(  # noqa: RUF009
        ContextCommunication.ALL_GATHER, "context-parallel communication of keys and values"
    )
    speed: float = setting(1.0, "speed of fused attention over long sequences", unit="share of the device's")
    output_copied: bool = setting(False, "the output is saved a second time, in sequence-first order")
    repeats_keys: bool = setting(
        False, "keys and values are repeated for all heads of queries before context-parallel ranks exchange them"
    )
    values_share_qkv: bool = setting(False, "values stay a view of the QKV tensor, which is therefore saved whole")


@frozen(kw_only=True)
class OptimizerSettings:
    """Weights, gradients and optimizer state: what they hold, and what a step of the optimizer moves."""

    step_moved_nbytes: int = setting(
        4 + 8 + 28,
        "moved in an optimizer step, without zeroing gradients",
        unit="bytes per element of the optimizer's shard",
        source="gradient norm reads 4, scaling moves 8; fused AdamW reads gradient, weight and two moments and writes "
        "all but the gradient",
    )
    step_held_nbytes: int = setting(
        0, "held during the optimizer step", unit="bytes per element of the optimizer's shard"
    )
    moment_nbytes: int = setting(4, "held by each of Adam's two moments", unit="bytes per element")
    extra_shard_nbytes: int = setting(
        0, "held all the time beside the optimizer state", unit="bytes per element of the optimizer's shard"
    )
    gradient_nbytes: int = setting(
        4, "held by the main gradient where the layout does not reduce it in bf16", unit="bytes per element"
    )
    weight_nbytes: int = setting(0, "held by a weight; 0: as wide as the precision", unit="bytes per element")
    extra_weight_nbytes: int = setting(0, "held all the time beside weight and main gradient", unit="bytes per element")
    copies_bf16_gradients: bool = setting(
        True,
        "the step makes an fp32 copy of the bf16 gradients of its shard",
        source="megatron-core 0.16.1, optimizer/distrib_optimizer.py:2419 and optimizer/optimizer.py:759: .float()",
    )

    def main_gradient_nbytes(self, grad_reduce: N) -> N:
        """Return the bytes of an element of the main gradient, for this format or for a column of formats."""
        return GradReduce.look_up(
            grad_reduce, {GradReduce.FP32: self.gradient_nbytes, GradReduce.BF16: _NBYTES[GradReduce.BF16]}
        )

    def held_in_step_nbytes(self, grad_reduce: N) -> N:
        """Return the bytes that a step of the optimizer holds, per element of its shard."""
        copy = self.step_held_nbytes + _NBYTES[GradReduce.FP32] * self.copies_bf16_gradients
        return GradReduce.look_up(grad_reduce, {GradReduce.FP32: self.step_held_nbytes, GradReduce.BF16: copy})

    def moved_in_step_nbytes(self, grad_reduce: N) -> N:
        """Return the bytes that a step of the optimizer moves, per element of its shard."""
        copy = self.step_moved_nbytes + sum(_NBYTES.values()) * self.copies_bf16_gradients
        return GradReduce.look_up(grad_reduce, {GradReduce.FP32: self.step_moved_nbytes, GradReduce.BF16: copy})


@frozen(kw_only=True)
class ShardedWeightSettings:
    """Weights that are sharded over data-parallel ranks: their shards, their gathers and what hides these."""

    hidden: float = setting(
        1.0,
        "computation of a unit that can hide its gathers and reductions",
        unit="share",
        kind=FigureKind.ASSUMED,
        source="they have streams of their own",
    )
    gather_copies: float = setting(
        2.0,
        "passes over memory of a gathered weight, from the buffer of the all-gather to the tensor that products read",
        unit="passes",
        source="torch 2.13, fully_shard/_fsdp_collectives.py: split_with_sizes_copy reads and writes it once",
    )
    lost_speed: float | None = setting(
        None,
        "speed that computation since Hopper loses beside gathers and reductions; none: that of their multiprocessors",
        unit="share",
    )
    stretch: float = setting(
        1.0, "seconds of a gather or reduction beside computation since Hopper, of its seconds alone", unit="times"
    )
    frees_gradients: bool = setting(
        False, "gradients of whole weights are cast into the buffer that is reduced, and freed; none are zeroed"
    )
    keeps_gradients: bool = setting(False, "shards of gradients stay from one step to the next")
    holds_first_unit: bool = setting(False, "gradients of the first unit are counted at the end of the backward pass")


@frozen(kw_only=True)
class BufferSettings:
    """Memory that the framework and its libraries hold beside weights, optimizer and activations."""

    cublas_workspaces: int = setting(
        2, "cuBLAS workspaces", unit="workspaces", source="one for each thread that calls cuBLAS: forward and backward"
    )
    engine_workspace: bool = setting(False, "Transformer Engine holds a workspace of its own")
    grouped_streams: int = setting(
        0, "streams of grouped expert GEMMs, each with a workspace of Transformer Engine", unit="streams"
    )
    tensor_overlap_buffers: bool = setting(
        True, "with tensor-parallel overlap, GEMMs have communication buffers of their own"
    )
    kept_stand_ins: bool = setting(
        True,
        "where products add weight gradients, a tensor for each shape of weight stands for its own gradient",
        source="transformer_engine/pytorch/module/base.py: get_dummy_wgrad",
    )
    bucket_nbytes: int = setting(0, "held by buckets of fixed size", unit="bytes")
    graph_pool_share: float = setting(
        0.0, "extra memory of CUDA-graph pools, as a share of the saved activations", unit="share"
    )


@frozen(kw_only=True)
class ExpertSettings:
    """Mixture of experts: dispatch of tokens, and how experts' kernels are launched."""

    separate_casts: float = setting(
        1.0, "share of the casts of experts' operands that are kernels of their own", unit="share"
    )
    deduplicated_dispatch: bool = setting(
        False, "a token is sent once to each node that has experts for it, and copied there"
    )
    padded_tokens: bool = setting(
        False, "each expert gets equally many tokens, so that the host never waits for token counts"
    )
    dispatch_seconds: float = setting(
        0.0, "that a layer of experts waits for the host, in each pass", unit="seconds per layer"
    )
    launch_seconds: float = setting(
        0.0,
        "that a layer waits for the host to launch each expert in the forward pass; twice that in the backward pass",
        unit="seconds per expert",
    )
    grouped_launch_seconds: float | None = setting(
        None, "launch_seconds of small experts, if they are computed together", unit="seconds per expert"
    )


@frozen(kw_only=True)
class NarrowSettings:
    """Matrix products of fewer than 16 bits, and the shards of weights beside those in fp32."""

    product_speed: float = setting(1.0, "speed of such a product", unit="share of the device's")
    cast_moved_nbytes: int = setting(
        2 + 1 + 1,
        "moved as an operand is cast, unless the kernel before it does that",
        unit="bytes per element",
        source="Transformer Engine's cast-transpose: an operand is read once more and written twice, as it is and "
        "transposed, 1 byte each",
    )
    cast_before_gathers: bool = setting(
        False, "operands are cast before they are gathered over tensor-parallel ranks, once for all products"
    )
    keeps_weight_copies: bool = setting(
        False, "linear layers in fp8 keep the copies of their weights in 8 bits from step to step"
    )
    narrow_shard_nbytes: int = setting(
        0, "held by the shard of a weight beside its fp32 shard, where weights are sharded", unit="bytes per element"
    )
    gathers_8_bits: bool = setting(
        False, "where products have 8 bits, sharded weights of blocks are gathered in 8 bits too"
    )

    def in_8_bits(self, precision: Precision) -> bool:
        """Return True if sharded weights of blocks are gathered in 8 bits."""
        return self.gathers_8_bits and precision in (Precision.FP8, Precision.MXFP8)

    def gathered_nbytes(self, precision: Precision) -> int:
        """Return the bytes of an element of a sharded weight of a block, as it is gathered for one pass."""
        return 1 if self.in_8_bits(precision) else precision.nbytes

    def shard_nbytes(self, precision: Precision) -> int:
        """Return the bytes of an element of the shard of a weight beside its fp32 shard.

        In 8 bits it is one byte, in MXFP8 one for rows and one for columns.
        """
        if not self.in_8_bits(precision) or not self.narrow_shard_nbytes:
            return self.narrow_shard_nbytes
        return 2 if precision is Precision.MXFP8 else 1


@frozen(kw_only=True)
class SavedSettings:
    """Activations that are saved where others are not."""

    stage_output: bool = setting(False, "each micro-batch in flight also saves the output of its stage")
    gathered_inputs: bool = setting(
        False, "inputs that are gathered over tensor-parallel ranks are saved, not gathered again in the backward pass"
    )
    every_second_product: bool = setting(
        False, "full recompute saves the results of attention, of every second product of a node and of reduce-scatters"
    )


@frozen(kw_only=True)
class OverlapSettings:
    """Communication: what can overlap with computation, how much of it that hides, and p2p sends."""

    supported: tuple[Overlap, ...] = setting((), "communication of a micro-batch that can overlap with computation")
    tensor_hidden: float = setting(
        0.8,
        "tensor-parallel communication that Transformer Engine's overlap hides, less the slowdown of the GEMMs",
        unit="share",
        kind=FigureKind.FITTED,
        source="published runs that overlap",
    )
    experts_hidden: float = setting(
        0.55,
        "expert-parallel all-to-all that the overlap with another micro-batch hides; it also takes SMs",
        unit="share",
        kind=FigureKind.FITTED,
        source="published runs that overlap",
    )
    scattered_sends: bool = setting(
        False, "each tensor-parallel rank sends a part of the hidden states to the next pipeline stage"
    )


Changes = Mapping[str, Figure | Mapping[str, Figure]]
"""New figures of a group by setting. `memory_passes` takes a figure for each kind of kernel."""
UNCHANGED: Changes = MappingProxyType({})


@frozen(kw_only=True)
class Feature:
    """A named part of a framework's behaviour, as the figures that it changes in each group."""

    name: str
    kernels: Changes = field(default=UNCHANGED, hash=False)
    host: Changes = field(default=UNCHANGED, hash=False)
    attention: Changes = field(default=UNCHANGED, hash=False)
    optimizer: Changes = field(default=UNCHANGED, hash=False)
    sharded_weights: Changes = field(default=UNCHANGED, hash=False)
    buffers: Changes = field(default=UNCHANGED, hash=False)
    experts: Changes = field(default=UNCHANGED, hash=False)
    overlap: Changes = field(default=UNCHANGED, hash=False)
    narrow: Changes = field(default=UNCHANGED, hash=False)
    saved: Changes = field(default=UNCHANGED, hash=False)


@frozen(kw_only=True)
class FrameworkProfile:
    """Settings of a framework, by group: its kernels, buffers and overlap under any layout."""

    name: str
    kernels: KernelSettings = KernelSettings()
    host: HostSettings = HostSettings()
    attention: AttentionSettings = AttentionSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    sharded_weights: ShardedWeightSettings = ShardedWeightSettings()
    buffers: BufferSettings = BufferSettings()
    experts: ExpertSettings = ExpertSettings()
    overlap: OverlapSettings = OverlapSettings()
    narrow: NarrowSettings = NarrowSettings()
    saved: SavedSettings = SavedSettings()
    features: tuple[Feature, ...] = field(default=(), eq=False)  # in the order in which they were applied


GROUPS = tuple(group.name for group in fields(Feature) if group.name != "name")


def compose(name: str, features: Iterable[Feature], base: FrameworkProfile | None = None) -> FrameworkProfile:
    """Return the base profile with these features applied in order, under a new name."""
    profile = base or FrameworkProfile(name=name)
    for feature in features:
        groups = {group: _changed(getattr(profile, group), getattr(feature, group)) for group in GROUPS}
        profile = evolve(profile, features=(*profile.features, feature), **groups)
    return evolve(profile, name=name)


def _changed(group: Any, changes: Changes) -> Any:
    """Return a group with these figures. A mapping of figures is merged with the mapping that is there."""
    if unknown := set(changes) - set(fields_dict(type(group))):
        raise TypeError(f"{type(group).__name__} has no {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {}
    for key, figure in changes.items():
        if isinstance(figure, Figure):
            values[key] = figure.value
        else:
            new = {name: one.value for name, one in figure.items()}
            values[key] = MappingProxyType({**getattr(group, key), **new})
    return evolve(group, **values) if values else group


@frozen
class ProfileFigure:
    """One value of a profile, as a row of a table."""

    group: str
    setting: str  # of memory passes, with the kind of kernel: "memory_passes gate"
    value: Any
    unit: str
    meaning: str
    kind: FigureKind
    source: str


def profile_figures(profile: FrameworkProfile) -> list[ProfileFigure]:
    """Return every value of a profile with its unit, kind and source: the last feature that sets it, or the default."""
    figures = []
    for group in GROUPS:
        for setting_ in fields(type(getattr(profile, group))):
            meta = setting_.metadata
            for name, figure in _origins(profile, group, setting_.name, meta["figure"]).items():
                path = f"{setting_.name} {name}".strip()
                row = (group, path, figure.value, meta["unit"], meta["meaning"], figure.kind, figure.source)
                figures.append(ProfileFigure(*row))
    return figures


def _origins(profile: FrameworkProfile, group: str, setting_: str, default: Figure) -> dict[str, Figure]:
    """Return the figure of a setting, or those of each kind of kernel."""
    found: dict[str, Figure] = {"": default}
    for feature in profile.features:
        change = getattr(feature, group).get(setting_, {})
        found |= {"": change} if isinstance(change, Figure) else change
    if len(found) > 1:
        del found[""]
    return found
