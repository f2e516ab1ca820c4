"""Layout of a model over the devices, as one table of fields.

`LayoutFields` is the table: each field has its type, range, command-line flag, help and column title. `Layout` holds
one value for each field, `layouts.Layouts` an array; what follows from the fields is defined here once for both.
Rules, command-line options, report columns and plan.json read the table through `FIELDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic

from attrs import Converter, Factory, field, fields, frozen

from .choices import (
    DEFAULT_MODULES,
    MICROBATCH_OVERLAPS,
    ExpertShard,
    GradReduce,
    LayoutField,
    Module,
    ModuleSet,
    N,
    Overlap,
    OverlapSet,
    Recompute,
    Reshard,
    Shard,
    default_overlaps,
    module_set,
)

if TYPE_CHECKING:
    from megaloom.dsl.sharding_table import Split

# Whether optimizer state alone is sharded, and whether gradients or weights are.
DISTRIBUTED = {Shard.NONE: 0, Shard.OPTIMIZER: 1, Shard.GRADIENTS: 0, Shard.WEIGHTS: 0}
SHARED = {Shard.NONE: 0, Shard.OPTIMIZER: 1, Shard.GRADIENTS: 1, Shard.WEIGHTS: 1}
FULLY_SHARDED = {Shard.NONE: 0, Shard.OPTIMIZER: 0, Shard.GRADIENTS: 1, Shard.WEIGHTS: 1}
VOCAB_MULTIPLE = 128  # as Megatron-LM's --make-vocab-size-divisible-by: matrix products over an odd size are slow
MOST = 2**20  # of any degree or count: more than any published run had, and few enough to simulate


def _field(
    kind: type[int],
    title: str,
    help: str,
    *,
    default: Any = None,
    minimum: int = 0,
    flag: str = "",
    convert: Callable[[Any], int] | Converter[Any, int] | None = None,
) -> Any:
    """Return one row of the table. Numbers are not converted, for speed; neither are columns of numbers."""
    known: dict[int, Any] = {}  # values of the numbers that a search converts often
    make: Any = convert or kind

    def converted(value: Any) -> Any:
        if type(value) is int:
            return known[value] if value in known else known.setdefault(value, make(value))
        return value if hasattr(value, "dtype") or (convert is None and isinstance(value, kind)) else make(value)

    converter: Any = convert if isinstance(convert, Converter) else converted
    return field(
        default=kind(minimum) if default is None else default,
        converter=None if kind is int else converter,
        metadata={"kind": kind, "minimum": minimum, "title": title, "help": help, "flag": flag},
    )


def _named_modules(names: int | Iterable[str]) -> ModuleSet:
    """Return the modules that a layout names; the default ones are the same as none."""
    found = module_set(names)
    return ModuleSet() if found == DEFAULT_MODULES else found


def _own_value(value: Any, layout: Any) -> Any:
    """Return the value of experts; one that all other weights have too is the same as none of their own."""
    if hasattr(value, "dtype"):
        return value
    return ExpertShard.SAME if layout.shard + 1 == ExpertShard(value) else ExpertShard(value)


def _degree(title: str, help: str) -> Any:
    return _field(int, title, help, minimum=1)


@frozen(kw_only=True, eq=False)
class LayoutFields(Generic[N]):
    """Fields of a layout, of one (`Layout`) or of many (`layouts.Layouts`), and what follows from them.

    Dense layers see the device mesh dp x pp x cp x tp, experts the mesh edp x pp x ep x etp over the same devices.
    """

    dp: N = _degree("DP", "Data-parallel ranks.")
    tp: N = _degree("TP", "Tensor-parallel ranks.")
    pp: N = _degree("PP", "Pipeline ranks.")
    vpp: N = _degree("VP", "Model chunks of each pipeline rank (interleaved schedule).")
    cp: N = _degree("CP", "Context-parallel ranks, which share each sequence.")
    ep: N = _degree("EP", "Expert-parallel ranks.")
    etp: N = _degree("ETP", "Tensor-parallel ranks of each expert.")
    sequence_parallel: N = _field(bool, "SP", "Shard over tp, by sequence, the activations that tp would replicate.")
    micro_batch: N = _degree("MBS", "Sequences of one micro-batch.")
    recompute: N = _field(Recompute, "recompute", "Activations that the backward pass recomputes.")
    shard: N = _field(
        Shard,
        "shard",
        "State that is sharded over data-parallel ranks, each value with those before it: optimizer (the distributed "
        "optimizer, ZeRO 1), gradients (ZeRO 2), weights (ZeRO 3, FSDP); or none.",
    )
    recompute_modules: N = _field(
        ModuleSet,
        "modules",
        "Modules that selective recompute recomputes, by megatron-core's names: layernorm moe_act. "
        "The search chooses them if none are given.",
        convert=_named_modules,
    )
    recompute_layers: N = _field(int, "layers", "Blocks of each stage that full recompute recomputes; 0: all.")
    microbatch_group: N = _field(
        int, "group", "Micro-batches that one model chunk runs before the next chunk runs; 0: as many as pp."
    )
    overlaps: N = _field(
        OverlapSet,
        "overlap",
        "Communication that runs while devices compute: gradients, weights, tensor, experts; or none.",
        default=Factory(lambda self: default_overlaps(self.shard), takes_self=True),
        flag="--overlap",
    )
    vocab_multiple: N = _field(
        int,
        "vocab",
        "Pad the vocabulary of each tensor-parallel rank to a multiple of this number; 1: no further than tp needs. "
        "Default: 128.",
        default=VOCAB_MULTIPLE,
        minimum=1,
    )
    grad_reduce: N = _field(
        GradReduce,
        "grad-reduce",
        "Number format in which gradients are added up and reduced. bf16 takes half the memory and is less exact, so "
        "the search never chooses it. Default: fp32.",
    )
    reshard: N = _field(
        Reshard,
        "reshard",
        "With --shard weights: time after which gathered weights are freed, micro-batch or step. A step takes fewer "
        "gathers, and as much memory as --shard optimizer. Default: micro-batch.",
    )
    replicas: N = _field(
        int,
        "replicas",
        "With --shard gradients or weights: groups of data-parallel ranks that have all of the state each, and share "
        "it within the group (HSDP). The search never chooses several. Default: 1.",
        minimum=1,
    )
    expert_shard: N = _field(
        ExpertShard,
        "experts' shard",
        "State of experts that is sharded over the ranks that have copies of them, if not the same as --shard says: "
        "optimizer, gradients or weights. Only with --shard or --expert-shard gradients or weights. The search never "
        "chooses another one than same. Default: same.",
        convert=Converter(_own_value, takes_self=True),
    )

    @property
    def degrees(self) -> dict[str, N]:
        """Return the degree of each axis, and the micro-batch size."""
        return {axis: getattr(self, axis) for axis in (*AXES, "micro_batch")}

    @property
    def world(self) -> N:
        """Return the number of devices."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def edp(self) -> N:
        """Return the number of copies of each expert."""
        return self.world // (self.pp * self.ep * self.etp)

    @property
    def microbatch_group_size(self) -> N:
        """Return the number of micro-batches that one model chunk runs before the next chunk runs."""
        size: N = self.microbatch_group + self.pp * (self.microbatch_group == 0)
        return size

    def microbatches(self, batch: int) -> N:
        """Return the number of micro-batches of each data-parallel rank, for a global batch of `batch` sequences."""
        return batch // (self.dp * self.micro_batch)

    @property
    def distributed_optimizer(self) -> N:
        """True where Megatron's distributed optimizer runs."""
        switched: N = (Shard.look_up(self.shard, DISTRIBUTED) == 1) & (self.expert_shard < ExpertShard.GRADIENTS)
        return switched

    @property
    def fsdp(self) -> N:
        """True where weights, or at least gradients, are sharded over data-parallel ranks, of experts or of others."""
        sharded: N = (Shard.look_up(self.shard, FULLY_SHARDED) == 1) | (self.expert_shard >= ExpertShard.GRADIENTS)
        return sharded

    @property
    def shard_of_experts(self) -> N:
        """Return the value of `shard` that holds for experts."""
        number: N = self.shard * (self.expert_shard == 0) + (self.expert_shard - 1) * (self.expert_shard > 0)
        return number

    def in_replica(self, copies: N) -> N:
        """Return how many of these devices, which have copies of a weight, share its state: those of one replica."""
        whole: N = copies // self.replicas
        share: N = whole + (whole == 0)  # none in layouts that no rule has looked at yet
        return share

    @property
    def dense_shards(self) -> N:
        """Return the number of devices that share the optimizer's state of a dense weight."""
        return _sharers(self.shard, self.in_replica(self.dp * self.cp))

    @property
    def expert_shards(self) -> N:
        """Return the number of devices that share the optimizer's state of an expert weight."""
        return _sharers(self.shard_of_experts, self.in_replica(self.edp))

    @property
    def full_recompute(self) -> N:
        """True where blocks are recomputed."""
        full: N = self.recompute == Recompute.FULL
        return full

    @property
    def selective_recompute(self) -> N:
        """True where modules are recomputed."""
        selective: N = self.recompute == Recompute.SELECTIVE
        return selective

    @property
    def recomputed_module_bits(self) -> N:
        """Return the mask of the modules that are recomputed; 0 without selective recompute."""
        named = self.recompute_modules + int(DEFAULT_MODULES) * (self.recompute_modules == 0)
        mask: N = named * (self.recompute == Recompute.SELECTIVE)
        return mask

    @property
    def unused_modules(self) -> N:
        """True where modules are named, but recompute is not selective."""
        unused: N = (self.recompute_modules > 0) & (self.recompute != Recompute.SELECTIVE)
        return unused

    def has_overlap(self, overlap: Overlap) -> N:
        """True where this communication runs while the devices compute."""
        overlapped: N = (self.overlaps & overlap.bit) != 0
        return overlapped

    @property
    def microbatch_overlap_bits(self) -> N:
        """Return the mask of the overlaps within a micro-batch, which change the cost of nodes."""
        mask: N = self.overlaps & int(MICROBATCH_OVERLAPS)
        return mask


def _sharers(shard: N, copies: N) -> N:
    """Return how many of the devices that have copies of a weight share its optimizer state."""
    shared: N = Shard.look_up(shard, SHARED)
    return 1 + (copies - 1) * shared


AXES = ("dp", "tp", "pp", "vpp", "cp", "ep", "etp")
FIELDS: Mapping[str, LayoutField] = {
    f.name: LayoutField(
        name=f.name,
        maximum=MOST,
        **{**f.metadata, "flag": f.metadata["flag"] or "--" + f.name.replace("_", "-")},
    )
    for f in fields(LayoutFields)
}
"""The table of layout fields, by name, in the order of plan.json."""
LEFT_OUT_OF_PLANS: Mapping[str, int] = {"expert_shard": ExpertShard.SAME}
"""Fields that plan.json has only where they have another value than this one: plans from before have none of them."""


def flag_of(name: str) -> str:
    """Return the command-line flag of an option, such as a layout field, by its name."""
    return FIELDS[name].flag if name in FIELDS else "--" + name.replace("_", "-")


def switch(name: str, value: int) -> str:
    """Return the word of an option that is on or off: `--sequence-parallel`, `--no-sequence-parallel`."""
    return flag_of(name) if value else flag_of(name).replace("--", "--no-", 1)


@frozen(kw_only=True)
class Layout(LayoutFields[int]):
    """Degree of each mesh axis, micro-batch, recompute, sharding and overlap. `Layout()` is one process."""

    if TYPE_CHECKING:  # the numbers of these fields are of classes that say more
        sequence_parallel: bool
        recompute: Recompute
        shard: Shard
        reshard: Reshard
        expert_shard: ExpertShard
        grad_reduce: GradReduce
        recompute_modules: ModuleSet
        overlaps: OverlapSet

        @property
        def distributed_optimizer(self) -> bool: ...
        @property
        def fsdp(self) -> bool: ...
        @property
        def full_recompute(self) -> bool: ...
        @property
        def selective_recompute(self) -> bool: ...
        @property
        def unused_modules(self) -> bool: ...
        def has_overlap(self, overlap: Overlap) -> bool: ...

    @property
    def split(self) -> Split:
        """Return the axes that shard tensors."""
        return _split(self.tp, self.cp, self.ep, self.etp, self.sequence_parallel, self.vocab_multiple)

    @property
    def shard_of_experts(self) -> Shard:
        """Return the value of `shard` that holds for experts."""
        return Shard(self.expert_shard - 1) if self.expert_shard else self.shard

    @property
    def recomputed_modules(self) -> tuple[Module, ...]:
        """Return the modules that selective recompute recomputes; none under another mode."""
        return tuple(ModuleSet(self.recomputed_module_bits))

    @property
    def recompute_text(self) -> str:
        """Return what is recomputed, in words: `selective: core_attn`, `full, first 3 blocks of each stage`."""
        if self.selective_recompute:
            return f"{self.recompute}: {', '.join(self.recomputed_modules)}"
        count = self.recompute_layers
        blocks = f", first {f'{count} blocks' if count > 1 else 'block'} of each stage" if count else ""
        return f"{self.recompute}{blocks}"

    @property
    def shard_text(self) -> str:
        """Return what is sharded over data-parallel ranks, as people write it: `dist-opt`, `shard weights`."""
        if self.distributed_optimizer:
            return "dist-opt"
        experts = f", of experts {self.expert_shard}" if self.expert_shard else ""
        return f"shard {self.shard}{experts}" + (", reshard each step" if self.reshard is Reshard.STEP else "")

    def __str__(self) -> str:
        """Return the fields that are not at their default, as people write them: `tp2 pp4 mbs1 dist-opt`."""
        words = [f"{axis}{degree}" for axis, degree in self.degrees.items() if degree > 1 and axis in AXES]
        words += [f"mbs{self.micro_batch}"]
        words += ["sp"] if self.sequence_parallel else []
        words += [self.shard_text] if self.shard or self.expert_shard else []
        words += [f"replicas{self.replicas}"] if self.replicas > 1 else []
        words += [f"group {self.microbatch_group}"] if self.microbatch_group else []
        words += [f"recompute {self.recompute_text}"] if self.recompute is not Recompute.NONE else []
        usual, now = {*OverlapSet(default_overlaps(self.shard))}, {*self.overlaps}
        words += [f"overlap {'+'.join(o for o in self.overlaps if o not in usual)}"] if now - usual else []
        words += [f"no overlap of {'+'.join(o for o in Overlap if o in usual - now)}"] if usual - now else []
        words += [f"vocab multiple {self.vocab_multiple}"] if self.vocab_multiple != VOCAB_MULTIPLE else []
        words += [f"{self.grad_reduce} gradients"] if self.grad_reduce is not GradReduce.FP32 else []
        return " ".join(words)


@lru_cache(maxsize=1 << 12)
def _split(tp: int, cp: int, ep: int, etp: int, sequence_parallel: bool, vocab_multiple: int) -> Split:
    """Return a split; one of equal degrees is made once."""
    from megaloom.dsl.sharding_table import Split

    return Split(tp=tp, cp=cp, ep=ep, etp=etp, sequence_parallel=sequence_parallel, vocab_multiple=vocab_multiple)
