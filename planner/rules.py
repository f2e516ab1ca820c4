"""Which layouts are legal: a list of small rules, each with an id, a sentence, and what would work instead.

Protocol: `violations` is empty exactly when the runtime can train this graph under this layout and compute what one
process computes. What the rules ask of the model they read off the dims of its weights. megatron-core 0.16.1 checks few
of them itself: the others end in its asserts, in dropped layers, or in wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import gcd, isqrt
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from megaloom.dsl.graph import Graph
from megaloom.dsl.positions import longest
from megaloom.dsl.splits import SPLITS, cut

from .cluster import Cluster
from .columns import Layouts
from .layout import Layout, Workload

MOST = 2**20  # sequences a step: more than any model was trained with, and few enough to replay them


@frozen
class Violation:
    """A rule that a layout breaks: what is wrong, and the nearest that works."""

    rule: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message} [{self.rule}]\n{self.fix}"


@frozen
class Needs:
    """What a graph asks of a layout: the sizes that an axis must divide, by (axis, dim), and where it can be cut."""

    sizes: dict[tuple[str, str], tuple[int, ...]]
    positions: tuple[int, ...]  # how long learned tables let sequences be
    stages: int  # at most
    blocks: int  # iterations of its repeats

    def of(self, axis: str, *but: str) -> list[tuple[str, int]]:
        """The (dim, size) that an axis divides, but for some dims."""
        return [
            (dim, size) for (on, dim), sizes in self.sizes.items() if on == axis and dim not in but for size in sizes
        ]

    @property
    def experts(self) -> bool:
        """Whether there are any."""
        return ("ep", "experts") in self.sizes


@frozen
class Case:
    """All that a rule may look at: one layout, or many in columns."""

    layout: Any  # Layout | Layouts, of which a rule asks the same
    needs: Needs
    workload: Workload
    cluster: Cluster


Truth = Any  # a bool, or of layouts in columns an array of them
Words = tuple[str, str]  # the message, and the fix


@frozen
class Rule:
    """Something that every legal layout meets: `holds` says of one, or of each of many, `told` of one that does not."""

    id: str
    sentence: str
    holds: Callable[[Case], Truth]
    told: Callable[[Case], Words]


def legal(layouts: Layouts, graph: Graph, workload: Workload, cluster: Cluster) -> NDArray[np.bool_]:
    """Which of these layouts break no rule."""
    case = Case(layouts, needs(graph), workload, cluster)
    out = np.ones(len(layouts), dtype=bool)
    for rule in (*SENSE, *RULES):
        out &= rule.holds(case)
    return out


def violations(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """Every rule that this layout breaks. When a degree is no degree at all, only those are looked at."""
    case = Case(layout, needs(graph), workload, cluster)
    return _broken(SENSE, case) or _broken(RULES, case)


def senseless(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """The rules without which no other can be asked: every degree and amount is at least 1, and plausible."""
    return _broken(SENSE, Case(layout, needs(graph), workload, cluster))


def _broken(rules: Iterable[Rule], case: Case) -> tuple[Violation, ...]:
    return tuple(Violation(rule.id, *rule.told(case)) for rule in rules if not rule.holds(case))


@lru_cache(maxsize=64)
def needs(graph: Graph) -> Needs:
    """What this graph asks of any layout."""
    sizes: dict[tuple[str, str], set[int]] = {}
    for node in graph.nodes:
        table = {**SPLITS, **getattr(node.op, "splits", {})}
        for slot in node.weights:
            for dim, axis in cut(table, slot.outer, slot.value.shape.dims).items():
                size = next(d.size for d in slot.dims if d.name == dim)
                if size is not None:
                    sizes.setdefault((axis, dim), set()).add(size)
    return Needs(
        sizes={key: tuple(sorted(found)) for key, found in sizes.items()},
        positions=tuple(sorted(longest(graph).values())),
        stages=len(graph.cuts) + 1,
        blocks=len({node.block for node in graph.nodes} - {None}),
    )


def nearest(value: int, works: Iterable[int]) -> str:
    """The greatest of `works` below `value` and the least above it, in words."""
    below = max((w for w in works if w < value), default=None)
    above = min((w for w in works if w > value), default=None)
    return " or ".join(str(w) for w in (below, above) if w is not None)


@lru_cache(maxsize=1024)
def divisors(*numbers: int) -> tuple[int, ...]:
    """The common divisors of positive numbers, least first."""
    common = gcd(*numbers)
    small = [d for d in range(1, isqrt(common) + 1) if common % d == 0]
    return tuple(sorted({*small, *(common // d for d in small)}))


def multiples(value: int, unit: int) -> str:
    """The multiples of `unit` next to `value`, in words."""
    return nearest(value, [m for m in (value // unit * unit, -(-value // unit) * unit) if m > 0])


def _every(truths: Iterable[Truth]) -> Truth:
    out = True
    for truth in truths:
        out = out & truth
    return out


def _amounts(case: Case) -> dict[str, Any]:
    return {**case.layout.degrees, "seq": case.workload.seq, "batch": case.workload.batch}


def _positive(case: Case) -> Truth:
    return _every(amount >= 1 for amount in _amounts(case).values())


def _positive_told(case: Case) -> Words:
    name, amount = next((name, amount) for name, amount in _amounts(case).items() if amount < 1)
    return f"{name} is {amount}: that is none at all", f"{name} is at least 1"


def _plausible(case: Case) -> Truth:
    return case.workload.batch <= MOST


def _plausible_told(case: Case) -> Words:
    return f"a batch of {case.workload.batch} is not plausible", f"{MOST:,} sequences or less"


def _world(case: Case) -> Truth:
    return case.layout.world == case.cluster.count


def _world_told(case: Case) -> Words:
    x, count = case.layout, case.cluster.count
    inner = x.tp * x.pp * x.cp
    message = f"dp {x.dp} x tp {x.tp} x pp {x.pp} x cp {x.cp} takes {x.world} devices, and {case.cluster} has {count}"
    if count % inner == 0:
        return message, f"dp {count // inner} takes them all"
    return message, f"tp x pp x cp = {inner} must divide {count}: {nearest(inner, divisors(count))} would"


def _expert_grid(case: Case) -> Truth:
    x = case.layout
    return x.world % (x.etp * x.ep * x.pp) == 0


def _expert_grid_told(case: Case) -> Words:
    x = case.layout
    inside = x.world // x.pp
    message = f"experts on ep {x.ep} x etp {x.etp} x pp {x.pp} do not divide {x.world} devices"
    return (
        message,
        f"ep x etp must divide the {inside} devices of a stage: {nearest(x.ep * x.etp, divisors(inside))} would",
    )


def _no_experts(case: Case) -> Truth:
    x = case.layout
    return (x.ep * x.etp == 1) | case.needs.experts


def _no_experts_told(case: Case) -> Words:
    x = case.layout
    return f"ep {x.ep} and etp {x.etp} divide experts, and the model has none", "ep 1 and etp 1"


def _divides(id: str, sentence: str, axis: str, sized: Callable[[Needs], list[tuple[str, int]]]) -> Rule:
    """The rule that the degree of an axis divides some dims."""

    def holds(case: Case) -> Truth:
        degree = getattr(case.layout, axis)
        return _every(size % degree == 0 for _, size in sized(case.needs))

    def told(case: Case) -> Words:
        degree, every = getattr(case.layout, axis), sized(case.needs)
        dim, size = next((dim, size) for dim, size in every if size % degree)
        works = nearest(degree, divisors(*(n for _, n in every)))
        return f"{axis} {degree} does not divide {dim}={size}", f"{axis} {works} would"

    return Rule(id, sentence, holds, told)


def _heads(needs: Needs) -> list[tuple[str, int]]:
    return needs.of("tp", *({dim for _, dim in needs.sizes} - {"heads"}))


def _width(needs: Needs) -> list[tuple[str, int]]:
    return needs.of("tp", "heads", "kv_heads", "vocab")  # the vocabulary is padded by the runtime


def _uneven_heads(case: Case) -> list[tuple[int, Truth]]:
    """The numbers of key/value heads, each with whether tp divides or is divided by it."""
    tp, heads = case.layout.tp, case.needs.sizes.get(("tp", "heads"), ())
    sizes = case.needs.sizes.get(("tp", "kv_heads"), ())
    return [(n, (n % tp == 0) | (tp % n == 0)) for n in sizes if n not in heads]  # else the rule of the heads says it


def _kv_heads(case: Case) -> Truth:
    return _every(truth for _, truth in _uneven_heads(case))


def _kv_heads_told(case: Case) -> Words:
    tp, size = case.layout.tp, next(n for n, truth in _uneven_heads(case) if not truth)
    works = [d for d in range(1, 4 * max(size, tp)) if size % d == 0 or d % size == 0]
    return f"tp {tp} neither divides kv_heads={size} nor is divided by it", f"tp {nearest(tp, works)} would"


def _sequence_parallel(case: Case) -> Truth:
    return (case.layout.tp > 1) | (case.layout.sequence_parallel == 0)


def _sequence_parallel_told(case: Case) -> Words:
    return "sequence parallelism divides over tp, and tp is 1", "tp at least 2, or sequence_parallel off"


def _moe_sequence_parallel(case: Case) -> Truth:
    return (not case.needs.experts) | (case.layout.tp == 1) | (case.layout.sequence_parallel == 1)


def _moe_sequence_parallel_told(case: Case) -> Words:
    return f"experts under tp {case.layout.tp} need sequence parallelism", "sequence_parallel on, or tp 1"


def _vpp(case: Case) -> Truth:
    return (case.layout.vpp == 1) | (case.layout.pp > 1)


def _vpp_told(case: Case) -> Words:
    return f"vpp {case.layout.vpp} interleaves the chunks of pipeline ranks, and pp is 1", "vpp 1, or pp at least 2"


def _stages(case: Case) -> Truth:
    return case.layout.pp * case.layout.vpp <= case.needs.stages


def _stages_told(case: Case) -> Words:
    x, most = case.layout, case.needs.stages
    message = f"pp {x.pp} x vpp {x.vpp} is {x.pp * x.vpp} stages, and the model can be cut into {most} at most"
    return message, f"vpp {most // x.pp} would" if x.pp <= most else f"pp {most} would, with vpp 1"


def _batch(case: Case) -> Truth:
    return case.workload.batch % (case.layout.dp * case.layout.micro_batch) == 0


def _batch_told(case: Case) -> Words:
    x, batch = case.layout, case.workload.batch
    unit = x.dp * x.micro_batch
    fix = f"a batch of {multiples(batch, unit)} would"
    if batch % x.dp == 0:
        fix += f", or a micro-batch of {nearest(x.micro_batch, divisors(batch // x.dp))}"
    return f"a batch of {batch} does not divide over dp {x.dp} x micro-batch {x.micro_batch} = {unit}", fix


def _grouped(case: Case, group: Any) -> Truth:
    """Whether micro-batches can be run in such groups: each, the last too, keeps all pipeline ranks busy."""
    x, m = case.layout, case.layout.microbatches(case.workload.batch)
    rest = m % np.maximum(1, group)
    return (group >= x.pp) & (group <= m) & ((rest == 0) | (rest >= x.pp))


def _vpp_microbatches(case: Case) -> Truth:
    x = case.layout
    return (x.vpp == 1) | (x.microbatch_group != 0) | (_batch(case) == 0) | _grouped(case, x.pp)


def _vpp_microbatches_told(case: Case) -> Words:
    x, batch = case.layout, case.workload.batch
    unit, m = x.dp * x.micro_batch, x.microbatches(batch)
    message = f"vpp {x.vpp} runs micro-batches in groups of pp {x.pp}, and there are {m} of them"
    other = f", a microbatch_group of {m}" if m > x.pp else ""
    return message, f"vpp 1 would{other}, or a batch of {multiples(batch, unit * x.pp)}"


def _microbatch_group(case: Case) -> Truth:
    x = case.layout
    allowed = (x.vpp > 1) & ((_batch(case) == 0) | _grouped(case, x.microbatch_group))
    return (x.microbatch_group == 0) | allowed


def _microbatch_group_told(case: Case) -> Words:
    x, m = case.layout, case.layout.microbatches(case.workload.batch)
    if x.vpp == 1:
        return f"micro-batches go in groups of {x.microbatch_group} where chunks take turns, and vpp is 1", "0 would"
    works = [n for n in range(x.pp, m + 1) if _grouped(case, n)]
    message = f"of {m} micro-batches, groups of {x.microbatch_group} are not from pp {x.pp} on, the last one included"
    return message, f"a microbatch_group of {nearest(x.microbatch_group, works)} would" if works else "vpp 1 would"


def _unit(case: Case) -> Any:
    """What a sequence is divided by."""
    x = case.layout
    return np.where(x.cp > 1, 2 * x.cp, 1) * np.where(x.sequence_parallel, x.tp, 1)


def _seq(case: Case) -> Truth:
    return case.workload.seq % _unit(case) == 0


def _seq_told(case: Case) -> Words:
    x, seq = case.layout, case.workload.seq
    said = " x ".join([*(["2", f"cp {x.cp}"] if x.cp > 1 else []), *([f"tp {x.tp}"] if x.sequence_parallel else [])])
    works = multiples(seq, int(_unit(case)))
    return f"a sequence of {seq} does not divide over {said}", f"a sequence of {works} would"


def _positions(case: Case) -> Truth:
    return all(case.workload.seq <= rows for rows in case.needs.positions)


def _positions_told(case: Case) -> Words:
    rows = min(case.needs.positions)
    return f"a sequence of {case.workload.seq} is longer than the {rows} learned positions", f"{rows} or less"


def _recompute(case: Case) -> Truth:
    return (case.needs.blocks > 0) | (case.layout.full == 0)


def _recompute_told(case: Case) -> Words:
    return "full recompute computes blocks again, and the model repeats none", "recompute none or selective"


def _recompute_layers(case: Case) -> Truth:
    x = case.layout
    return (x.recompute_layers == 0) | ((x.full == 1) & (x.recompute_layers > 0))


def _recompute_layers_told(case: Case) -> Words:
    n = case.layout.recompute_layers
    return f"recompute_layers {n} counts the blocks of full recompute", "recompute full with 1 or more, or 0 for all"


def _precision(case: Case) -> Truth:
    return case.workload.precision in case.cluster.device.flops


def _precision_told(case: Case) -> Words:
    device, precision = case.cluster.device, case.workload.precision
    return f"no figure says how fast a {device.name} computes in {precision}", f"{' or '.join(device.flops)} would"


SENSE = (
    Rule(
        "positive",
        "Every degree, the micro-batch, the sequence and the batch are at least 1.",
        _positive,
        _positive_told,
    ),
    Rule("plausible", "The batch is no larger than any that was ever trained on.", _plausible, _plausible_told),
)
RULES = (
    Rule("world", "dp x tp x pp x cp is the number of devices.", _world, _world_told),
    Rule("expert-grid", "etp x ep x pp divides the number of devices.", _expert_grid, _expert_grid_told),
    Rule("no-experts", "ep and etp are 1 without experts.", _no_experts, _no_experts_told),
    _divides("tp-heads", "tp divides the attention heads.", "tp", _heads),
    Rule(
        "tp-kv-heads",
        "tp divides the key/value heads, or is divided by them (they are then repeated).",
        _kv_heads,
        _kv_heads_told,
    ),
    _divides("tp-width", "tp divides the inner width of each dense layer.", "tp", _width),
    _divides("etp-width", "etp divides the inner width of each expert.", "etp", lambda needs: needs.of("etp")),
    _divides("ep-experts", "ep divides the experts.", "ep", lambda needs: needs.of("ep")),
    Rule("sp-tp", "Sequence parallelism needs tp.", _sequence_parallel, _sequence_parallel_told),
    Rule(
        "moe-sp",
        "Experts under tp need sequence parallelism (megatron-core, moe_layer.py:380).",
        _moe_sequence_parallel,
        _moe_sequence_parallel_told,
    ),
    Rule("vpp-pp", "vpp needs pp.", _vpp, _vpp_told),
    Rule("stages", "Each of the pp x vpp stages holds a part of the model.", _stages, _stages_told),
    Rule("batch", "dp x micro-batch divides the batch.", _batch, _batch_told),
    Rule(
        "vpp-microbatches",
        "With vpp, pp divides the number of micro-batches, or they go in groups of another size.",
        _vpp_microbatches,
        _vpp_microbatches_told,
    ),
    Rule(
        "microbatch-group",
        "A group of micro-batches, the last one too, is no smaller than pp (megatron-core, schedules.py:903).",
        _microbatch_group,
        _microbatch_group_told,
    ),
    Rule("seq", "2 x cp (with cp) x tp (with sequence parallelism) divides the sequence.", _seq, _seq_told),
    Rule("positions", "Learned positions reach as far as the sequence.", _positions, _positions_told),
    Rule("recompute-blocks", "Full recompute needs a repeated block.", _recompute, _recompute_told),
    Rule(
        "recompute-layers", "How many blocks is asked under full recompute.", _recompute_layers, _recompute_layers_told
    ),
    Rule("precision", "The device has a figure for the precision.", _precision, _precision_told),
)
