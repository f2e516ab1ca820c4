"""The candidate space: all base layouts, and the variants of each, as arrays.

`CandidateSpace.base_layouts` lists the legal device meshes with every micro-batch size; `variants` adds model chunks,
microbatch group, recompute and sharding of the optimizer. Every rule binds one of the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import combinations

import numpy as np
from attrs import evolve, frozen

from megaloom.dsl.graph import Graph
from megaloom.planner.contract.choices import (
    MICROBATCH_OVERLAPS,
    ExpertShard,
    GradReduce,
    Overlap,
    OverlapSet,
    Reshard,
    Shard,
    default_overlaps,
    module_set,
)
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import FULLY_SHARDED, VOCAB_MULTIPLE, Layout
from megaloom.planner.contract.layouts import NAMES, Column, Layouts, alike
from megaloom.planner.contract.workload import Workload
from megaloom.planner.model.requirements import ModelRequirements, model_requirements
from megaloom.planner.rules import export_rules, rules
from megaloom.planner.rules.divisors import divisors
from megaloom.planner.rules.expert_shard import EXPERT_SHARD_RULES
from megaloom.planner.rules.fsdp import FSDP_RULES, OWN_GRADIENTS
from megaloom.planner.rules.overlaps import may_overlap_experts, within_node
from megaloom.planner.rules.rule import Case, Rule, Truth, fields_read, legal

from .variant_choices import (
    ALL_VARIANTS,
    OTHER_VARIANTS,
    OVERLAPPED_EXPERTS,
    FixedAxes,
    FixedValues,
    chunk_counts,
    column,
    field_choices,
    implied,
    micro_batch_sizes,
    module_set_choices,
    recompute_choices,
    schedules,
    shard_choices,
)

VARIANT_FIELDS = (
    "vpp", "microbatch_group", "recompute", "recompute_modules", "recompute_layers", "shard", "overlaps",
)  # fmt: skip
# Rules that all variants of a base layout keep if its plain variant does: `variant_choices` offers no others.
KEPT_BY_CHOICES = frozenset((
    "positive", "plausible", "vpp-pp", "stages", "vpp-microbatches", "microbatch-group", "group-vpp",
    "recompute-blocks", "recompute-layers", "recompute-none", "recompute-parts", "recompute-modules",
    "overlap-weights", "overlap-tensor", "overlap-tensor-node", "overlap-experts", "overlap-experts-vpp",
    "overlap-experts-recompute", "overlap-experts-precision", "overlap-experts-mtp",
))  # fmt: skip
# Rules that variants keep too, unless experts have a value of `shard` of their own.
KEPT_WITH_ONE_SHARD = frozenset((
    *(rule.id for rule in FSDP_RULES), OWN_GRADIENTS.id, export_rules.MEGATRON_FSDP.id, "expert-shard-unsharded",
))  # fmt: skip
COUNTED_AT_ONCE = 1024  # base layouts whose variants are counted together

InnerOverlaps = tuple[Overlap, ...]  # overlaps within a micro-batch


@frozen(eq=False, slots=False)
class CandidateSpace:
    """The legal layouts of a model on a cluster that have the fixed fields.

    `inner` are the overlaps within a micro-batch that the search tries: on wherever they are legal. If plans are to be
    `exported`, the rules of exports to megatron-core bind too, else that of our runtime about reduced gradients.
    """

    graph: Graph
    cluster: Cluster
    workload: Workload
    fixed: FixedAxes
    inner: InnerOverlaps = ()
    exported: bool = False

    @property
    def _rules(self) -> tuple[Rule, ...]:
        return (*rules.RANGE_RULES, *rules.RULES, *(export_rules.EXPORT_RULES if self.exported else (OWN_GRADIENTS,)))

    @cached_property
    def _variant_rules(self) -> tuple[tuple[Rule, frozenset[str]], ...]:
        """Return the rules that each variant is asked about, and the fields that each rule reads."""
        case = self._case(Layouts.of([Layout()]))
        kept = KEPT_BY_CHOICES if self.fixed.get("expert_shard") else KEPT_BY_CHOICES | KEPT_WITH_ONE_SHARD
        read = [(rule, fields_read(rule, case)) for rule in self._rules if rule.id not in kept]
        return tuple((rule, names) for rule, names in read if names.intersection(VARIANT_FIELDS))

    @cached_property
    def all_module_sets(self) -> Column:
        """Return every set of modules for selective recompute, as bits, if a rule reads them; else an empty array."""
        modules = self._requirements.modules
        if not any("recompute_modules" in names for _, names in self._variant_rules):
            return np.zeros(0, dtype=np.int64)
        subsets = (subset for n in range(len(modules)) for subset in combinations(modules, n + 1))
        return np.array(sorted({int(module_set(subset)) for subset in subsets}), dtype=np.int64)

    def _case(self, layouts: Layouts) -> Case[Layouts]:
        return Case(layouts, self.graph, self.workload, self.cluster)

    @property
    def _requirements(self) -> ModelRequirements:
        return model_requirements(self.graph)

    def base_layouts(self) -> Layouts:
        """Return the legal base layouts: device mesh, micro-batch, sequence parallelism, overlaps within a micro-batch.

        The fields that `variants` chooses are those of a plain layout. Layouts that overlap experts are base layouts
        of their own.
        """
        base = self._unchecked_base_layouts()
        plain = self._settled(evolve(base, shard=np.full(len(base), shard_choices(False, self.fixed)[0])))
        plain = evolve(plain, overlaps=self._overlaps(plain) & ~Overlap.EXPERTS.bit)  # expert overlap needs chunks
        of_variants = {rule.id for rule, _ in self._variant_rules}
        mask = legal((rule for rule in self._rules if rule.id not in of_variants), self._case(plain))
        overlapped = self._may_overlap_experts(base) & (not FULLY_SHARDED[implied(self.fixed).get("shard", Shard.NONE)])
        if self.fixed.get("expert_shard"):
            mask &= base.edp > 1  # else experts have no copies that could share their state
        return base.take(mask & (~base.has_overlap(Overlap.EXPERTS) | overlapped))

    def unchecked_layouts(self) -> Iterator[Layout]:
        """Yield every layout that uses all devices and leaves no remainder in any degree, legal or not."""
        fixed = implied(self.fixed)
        chosen = {name: value for name, value in fixed.items() if name in VARIANT_FIELDS}
        chosen.setdefault("overlaps", OverlapSet(default_overlaps(fixed.get("shard", Shard.NONE))))
        layouts = evolve(self, inner=())._unchecked_base_layouts()
        for base in (layouts[i] for i in range(len(layouts))):
            needs = self._requirements
            for vpp in field_choices("vpp", fixed, chunk_counts(base.pp, needs.blocks, needs.max_stages)):
                yield evolve(base, **chosen | {"vpp": vpp})

    def _unchecked_base_layouts(self) -> Layouts:
        """Return every base layout that uses all devices, legal or not: all divisors, powers of two or not."""
        rows = np.array(list(self._degrees()), dtype=np.int64).reshape(-1, 7)
        zeros, ones = np.zeros(len(rows), dtype=np.int64), np.ones(len(rows), dtype=np.int64)
        columns = dict(zip(("tp", "pp", "cp", "dp", "etp", "ep", "sequence_parallel"), rows.T, strict=True))
        plain = {name: ones if name in ("vpp", "micro_batch") else zeros for name in NAMES}
        plain["vocab_multiple"] = ones * self.fixed.get("vocab_multiple", VOCAB_MULTIPLE)
        plain["grad_reduce"] = ones * self.fixed.get("grad_reduce", GradReduce.FP32)
        plain["reshard"] = ones * self.fixed.get("reshard", Reshard.MICRO_BATCH)
        plain["replicas"] = ones * self.fixed.get("replicas", 1)
        plain["expert_shard"] = ones * self.fixed.get("expert_shard", ExpertShard.SAME)
        degrees = Layouts(**plain | columns)
        first, which = alike(degrees.sequence_parallel, degrees.tp, degrees.ep)
        overlaps = [column("overlaps", self._inner_overlaps(degrees[int(i)])) for i in first]
        degrees = degrees.spread(overlaps, which)
        first, which = alike(degrees.dp)
        sizes = [column("micro_batch", micro_batch_sizes(int(degrees.dp[i]), self.workload, self.fixed)) for i in first]
        return degrees.spread(sizes, which)

    def _degrees(self) -> Iterator[tuple[int, ...]]:
        """Yield tp, pp, cp, dp, etp, ep and sequence parallelism of every base layout."""
        world, moe = self.cluster.count, self._requirements.experts

        def choices(name: str, free: Iterable[int]) -> tuple[int, ...]:
            return field_choices(name, self.fixed, free)

        for tp in choices("tp", divisors(world)):
            for pp in choices("pp", divisors(max(1, world // tp))):
                for cp in choices("cp", divisors(max(1, world // (tp * pp)))):
                    for dp in choices("dp", (max(1, world // (tp * pp * cp)),)):
                        for etp in choices("etp", sorted({1, tp}) if moe else (1,)):
                            for ep in choices("ep", divisors(max(1, dp * cp * tp // etp)) if moe else (1,)):
                                for sp in choices("sequence_parallel", (False, True) if tp > 1 else (False,)):
                                    yield tp, pp, cp, dp, etp, ep, sp

    def _inner_overlaps(self, axes: Layout) -> tuple[int, ...]:
        """Return the sets of overlaps within a micro-batch that the search tries."""
        if "overlaps" in self.fixed:
            return (int(self.fixed["overlaps"] & MICROBATCH_OVERLAPS),)
        on = Overlap.TENSOR in self.inner and axes.sequence_parallel and within_node(axes.tp, self.cluster)
        first = Overlap.TENSOR.bit if on else 0
        return (first, first + Overlap.EXPERTS.bit) if Overlap.EXPERTS in self.inner and axes.ep > 1 else (first,)

    def _may_overlap_experts(self, base: Layouts) -> Truth:
        return may_overlap_experts(base, self._requirements.multi_token, self.workload)

    def distributed(self, layouts: Layouts) -> Layouts:
        """Return the layouts with the distributed optimizer, and the overlaps that the search then tries."""
        other = self._settled(evolve(layouts, shard=np.full(len(layouts), int(Shard.OPTIMIZER))))
        return evolve(other, overlaps=self._overlaps(other))

    def _settled(self, layouts: Layouts) -> Layouts:
        """Return the layouts with the fixed value of experts; without it where all other weights have it too."""
        value = self.fixed.get("expert_shard")
        if not (value and self._requirements.experts):
            return layouts
        return evolve(layouts, expert_shard=value * (layouts.shard + 1 != value))

    def more_sharded(self, layouts: Layouts) -> tuple[Layouts, Column]:
        """Return layouts that shard gradients instead of the optimizer's state alone, or weights instead of gradients.

        Only legal ones that the search tries, each with the index of the layout that it comes from.
        """
        which = np.flatnonzero(self.may_shard_more(layouts))
        which = which[self._may_shard_fully(layouts.take(which))]
        more = layouts.take(which)
        return self._settled(evolve(more, shard=more.shard + 1)), which

    def may_shard_more(self, layouts: Layouts) -> Truth:
        """Return where the search tries the next value of `shard`, if it is legal: gradients, or weights."""
        offered = [x - 1 for x in shard_choices(True, self.fixed) if FULLY_SHARDED[Shard(x)]]
        return np.isin(layouts.shard, offered)

    def _may_shard_fully(self, layouts: Layouts) -> Truth:
        """Return where the rules of `--shard weights` hold with default overlaps."""
        full = int(Shard.WEIGHTS) + 0 * layouts.dp
        overlaps = self.fixed.get("overlaps", layouts.overlaps | default_overlaps(full))
        of_runtime = export_rules.MEGATRON_FSDP if self.exported else OWN_GRADIENTS
        sharded = self._settled(evolve(layouts, shard=full, overlaps=overlaps + 0 * full))
        return legal((*FSDP_RULES, *EXPERT_SHARD_RULES, of_runtime), self._case(sharded))

    def _subsets(self, base: Layouts) -> Column:
        """Return which variants each base layout has: ALL_VARIANTS, OVERLAPPED_EXPERTS or OTHER_VARIANTS."""
        overlapped = base.has_overlap(Overlap.EXPERTS)
        subsets: Column = np.where(overlapped, OVERLAPPED_EXPERTS, ALL_VARIANTS)
        if Overlap.EXPERTS in self.inner and "overlaps" not in self.fixed:
            subsets = np.where(~overlapped & self._may_overlap_experts(base), OTHER_VARIANTS, subsets)
        return subsets

    def variants(self, base: Layouts, family: Column, fully: bool = True) -> tuple[Layouts, Column]:
        """Return the legal layouts of these base layouts, and the number of the base layout of each.

        fully: with those that shard gradients or weights, where the user has not fixed `shard`.

        family: the sets of modules that selective recompute may have, as bits: [base layouts, sets]. It does not
        matter if there are `all_module_sets`.
        """
        if not self._variant_rules:
            return self._unchecked_variants(base, family, fully)
        if len(self.all_module_sets):
            family = np.tile(self.all_module_sets, (len(base), 1))
        layouts, numbers = self._unchecked_variants(base, family, fully)
        mask = legal((rule for rule, _ in self._variant_rules), self._case(layouts))
        return layouts.take(mask), numbers[mask]

    def _unchecked_variants(self, base: Layouts, family: Column, fully: bool) -> tuple[Layouts, Column]:
        """Return what `variants` does, without asking its rules."""
        needs, numbers, m = self._requirements, np.arange(len(base)), base.microbatches(self.workload.batch)
        subsets, key = self._subsets(base), self._variant_key
        first, which = alike(base.pp, m, subsets)
        rows = zip(base.pp[first].tolist(), m[first].tolist(), subsets[first].tolist(), strict=True)
        pairs = [schedules(pp, count, needs.blocks, needs.max_stages, subset, key) for pp, count, subset in rows]
        layouts, numbers = base.spread(pairs, which), _repeat(numbers, pairs, which)
        subsets = subsets[numbers]
        first, which = alike(layouts.pp, layouts.vpp, subsets)
        sets = module_set_choices(needs.modules, family.shape[1], self.fixed)
        rows = zip(layouts.pp[first].tolist(), layouts.vpp[first].tolist(), subsets[first].tolist(), strict=True)
        recompute = [recompute_choices(needs.blocks, pp, vpp, sets, subset, key) for pp, vpp, subset in rows]
        layouts, numbers = layouts.spread(recompute, which), _repeat(numbers, recompute, which)
        if not self.fixed.get("recompute_modules"):
            modules = np.concatenate([np.zeros((len(base), 1), dtype=np.int64), family], axis=1)
            layouts = evolve(layouts, recompute_modules=modules[numbers, layouts.recompute_modules])
        several: Column = (layouts.dp * layouts.cp > 1).astype(np.int64)
        several += several & self._may_shard_fully(layouts) if fully else 0
        shards = [column("shard", shard_choices(on > 0, self.fixed, on > 1)) for on in range(3)]
        layouts, numbers = layouts.spread(shards, several), _repeat(numbers, shards, several)
        return self._settled(evolve(layouts, overlaps=self._overlaps(layouts))), numbers

    def variant_counts(self, base: Layouts) -> Column:
        """Return the number of variants of each base layout.

        Of base layouts that differ in nothing that their variants depend on, one is counted.
        """
        m, several = base.microbatches(self.workload.batch), base.dp * base.cp > 1
        read = {name for _, names in self._variant_rules for name in names}
        first, which = alike(base.pp, m, self._subsets(base), several, *(getattr(base, name) for name in sorted(read)))
        counts = [np.zeros(0, dtype=np.int64)]
        for start in range(0, len(first), COUNTED_AT_ONCE):
            some = base.take(first[start : start + COUNTED_AT_ONCE])
            _, numbers = self.variants(some, np.zeros((len(some), len(self._requirements.modules)), dtype=np.int64))
            counts.append(np.bincount(numbers, minlength=len(some)))
        return np.concatenate(counts)[which]

    def _overlaps(self, layouts: Layouts) -> Column:
        """Return the overlaps as bits. Unless the user fixes them, gradients and weights always overlap.

        A step never takes longer with them: only what is hidden takes a share of the device, and the share is below 1.
        Memory does not change.
        """
        if "overlaps" in self.fixed:
            return np.full(len(layouts), int(self.fixed["overlaps"]))
        overlaps: Column = layouts.overlaps | default_overlaps(layouts.shard)
        return overlaps

    @property
    def _variant_key(self) -> FixedValues:
        """Return the fixed fields that `variants` chooses, hashable."""
        return tuple(sorted((name, value) for name, value in self.fixed.items() if name in VARIANT_FIELDS))


def _repeat(rows: Column, options: list[dict[str, Column]], which: Column) -> Column:
    counts = np.array([len(next(iter(option.values()))) for option in options], dtype=np.int64)[which]
    return np.repeat(rows, counts)
