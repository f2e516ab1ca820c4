"""Which layouts are legal: a list of small rules, each with an id, a sentence, and what would work instead.

Protocol: `violations` is empty exactly when the runtime can train this graph under this layout and compute what one
process computes. What the rules ask of the model they read off the dims of its weights. megatron-core 0.16.1 checks few
of them itself: the others end in its asserts, in dropped layers, or in wrong numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from math import gcd, isqrt

from attrs import frozen

from megaloom.dsl.graph import Graph
from megaloom.dsl.positions import longest
from megaloom.dsl.splits import SPLITS, cut

from .cluster import Cluster
from .layout import Layout, Recompute, Workload

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
    """All that a rule may look at."""

    layout: Layout
    needs: Needs
    workload: Workload
    cluster: Cluster


Broken = tuple[str, str] | None  # the message, and the fix


@frozen
class Rule:
    """Something that every legal layout meets."""

    id: str
    sentence: str
    check: Callable[[Case], Broken]


def violations(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """Every rule that this layout breaks. When a degree is no degree at all, only those are looked at."""
    case = Case(layout, needs(graph), workload, cluster)
    return _broken(SENSE, case) or _broken(RULES, case)


def senseless(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """The rules without which no other can be asked: every degree and amount is at least 1, and plausible."""
    return _broken(SENSE, Case(layout, needs(graph), workload, cluster))


def _broken(rules: Iterable[Rule], case: Case) -> tuple[Violation, ...]:
    found = ((rule.id, rule.check(case)) for rule in rules)
    return tuple(Violation(name, *broken) for name, broken in found if broken)


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


def _positive(case: Case) -> Broken:
    amounts = {**case.layout.degrees, "seq": case.workload.seq, "batch": case.workload.batch}
    for name, amount in amounts.items():
        if amount < 1:
            return f"{name} is {amount}: that is none at all", f"{name} is at least 1"
    return None


def _plausible(case: Case) -> Broken:
    batch = case.workload.batch
    return (f"a batch of {batch} is not plausible", f"{MOST:,} sequences or less") if batch > MOST else None


def _world(case: Case) -> Broken:
    x, count = case.layout, case.cluster.count
    if x.world == count:
        return None
    inner = x.tp * x.pp * x.cp
    message = f"dp {x.dp} x tp {x.tp} x pp {x.pp} x cp {x.cp} takes {x.world} devices, and {case.cluster} has {count}"
    if count % inner == 0:
        return message, f"dp {count // inner} takes them all"
    return message, f"tp x pp x cp = {inner} must divide {count}: {nearest(inner, divisors(count))} would"


def _expert_grid(case: Case) -> Broken:
    x = case.layout
    if x.world % (x.etp * x.ep * x.pp) == 0:
        return None
    inside = x.world // x.pp
    message = f"experts on ep {x.ep} x etp {x.etp} x pp {x.pp} do not divide {x.world} devices"
    return (
        message,
        f"ep x etp must divide the {inside} devices of a stage: {nearest(x.ep * x.etp, divisors(inside))} would",
    )


def _no_experts(case: Case) -> Broken:
    x = case.layout
    if case.needs.experts or x.ep * x.etp == 1:
        return None
    return f"ep {x.ep} and etp {x.etp} divide experts, and the model has none", "ep 1 and etp 1"


def _divides(axis: str, case: Case, *but: str) -> Broken:
    """Whether the degree of an axis divides every dim that sits on it, but for some."""
    degree = getattr(case.layout, axis)
    every = case.needs.of(axis, *but)
    for dim, size in every:
        if size % degree:
            works = nearest(degree, divisors(*(n for _, n in every)))
            return f"{axis} {degree} does not divide {dim}={size}", f"{axis} {works} would"
    return None


def _heads(case: Case) -> Broken:
    return _divides("tp", case, *({dim for _, dim in case.needs.sizes} - {"heads"}))


def _width(case: Case) -> Broken:
    return _divides("tp", case, "heads", "kv_heads", "vocab")  # the vocabulary is padded by the runtime


def _expert_width(case: Case) -> Broken:
    return _divides("etp", case)


def _experts(case: Case) -> Broken:
    return _divides("ep", case)


def _kv_heads(case: Case) -> Broken:
    tp = case.layout.tp
    heads = case.needs.sizes.get(("tp", "heads"), ())
    for size in case.needs.sizes.get(("tp", "kv_heads"), ()):
        if size % tp and tp % size and size not in heads:  # where they are the same, the rule of the heads says it
            works = [d for d in range(1, 4 * max(size, tp)) if size % d == 0 or d % size == 0]
            return f"tp {tp} neither divides kv_heads={size} nor is divided by it", f"tp {nearest(tp, works)} would"
    return None


def _sequence_parallel(case: Case) -> Broken:
    if case.layout.sequence_parallel and case.layout.tp == 1:
        return "sequence parallelism divides over tp, and tp is 1", "tp at least 2, or sequence_parallel off"
    return None


def _moe_sequence_parallel(case: Case) -> Broken:
    if case.needs.experts and case.layout.tp > 1 and not case.layout.sequence_parallel:
        return f"experts under tp {case.layout.tp} need sequence parallelism", "sequence_parallel on, or tp 1"
    return None


def _vpp(case: Case) -> Broken:
    if case.layout.vpp > 1 and case.layout.pp == 1:
        return f"vpp {case.layout.vpp} interleaves the chunks of pipeline ranks, and pp is 1", "vpp 1, or pp at least 2"
    return None


def _stages(case: Case) -> Broken:
    x, most = case.layout, case.needs.stages
    if x.pp * x.vpp <= most:
        return None
    message = f"pp {x.pp} x vpp {x.vpp} is {x.pp * x.vpp} stages, and the model can be cut into {most} at most"
    return message, f"vpp {most // x.pp} would" if x.pp <= most else f"pp {most} would, with vpp 1"


def _batch(case: Case) -> Broken:
    x, batch = case.layout, case.workload.batch
    unit = x.dp * x.micro_batch
    if batch % unit == 0:
        return None
    fix = f"a batch of {multiples(batch, unit)} would"
    if batch % x.dp == 0:
        fix += f", or a micro-batch of {nearest(x.micro_batch, divisors(batch // x.dp))}"
    return f"a batch of {batch} does not divide over dp {x.dp} x micro-batch {x.micro_batch} = {unit}", fix


def _vpp_microbatches(case: Case) -> Broken:
    x, batch = case.layout, case.workload.batch
    unit = x.dp * x.micro_batch
    if x.vpp == 1 or batch % unit or (batch // unit) % x.pp == 0:
        return None
    message = f"vpp {x.vpp} runs micro-batches in groups of pp {x.pp}, and there are {batch // unit} of them"
    return message, f"vpp 1 would, or a batch of {multiples(batch, unit * x.pp)}"


def _seq(case: Case) -> Broken:
    x, seq = case.layout, case.workload.seq
    unit = (2 * x.cp if x.cp > 1 else 1) * (x.tp if x.sequence_parallel else 1)
    if seq % unit == 0:
        return None
    said = " x ".join([*(["2", f"cp {x.cp}"] if x.cp > 1 else []), *([f"tp {x.tp}"] if x.sequence_parallel else [])])
    return f"a sequence of {seq} does not divide over {said}", f"a sequence of {multiples(seq, unit)} would"


def _positions(case: Case) -> Broken:
    for rows in case.needs.positions:
        if case.workload.seq > rows:
            return f"a sequence of {case.workload.seq} is longer than the {rows} learned positions", f"{rows} or less"
    return None


def _recompute(case: Case) -> Broken:
    if case.layout.recompute is Recompute.FULL and not case.needs.blocks:
        return "full recompute computes blocks again, and the model repeats none", "recompute none or selective"
    return None


def _precision(case: Case) -> Broken:
    device, precision = case.cluster.device, case.workload.precision
    if precision not in device.flops:
        return f"no figure says how fast a {device.name} computes in {precision}", f"{' or '.join(device.flops)} would"
    return None


SENSE = (
    Rule("positive", "Every degree, the micro-batch, the sequence and the batch are at least 1.", _positive),
    Rule("plausible", "The batch is no larger than any that was ever trained on.", _plausible),
)
RULES = (
    Rule("world", "dp x tp x pp x cp is the number of devices.", _world),
    Rule("expert-grid", "etp x ep x pp divides the number of devices.", _expert_grid),
    Rule("no-experts", "ep and etp are 1 without experts.", _no_experts),
    Rule("tp-heads", "tp divides the attention heads.", _heads),
    Rule("tp-kv-heads", "tp divides the key/value heads, or is divided by them (they are then repeated).", _kv_heads),
    Rule("tp-width", "tp divides the inner width of each dense layer.", _width),
    Rule("etp-width", "etp divides the inner width of each expert.", _expert_width),
    Rule("ep-experts", "ep divides the experts.", _experts),
    Rule("sp-tp", "Sequence parallelism needs tp.", _sequence_parallel),
    Rule(
        "moe-sp",
        "Experts under tp need sequence parallelism (megatron-core, moe_layer.py:380).",
        _moe_sequence_parallel,
    ),
    Rule("vpp-pp", "vpp needs pp.", _vpp),
    Rule("stages", "Each of the pp x vpp stages holds a part of the model.", _stages),
    Rule("batch", "dp x micro-batch divides the batch.", _batch),
    Rule("vpp-microbatches", "With vpp, pp divides the number of micro-batches.", _vpp_microbatches),
    Rule("seq", "2 x cp (with cp) x tp (with sequence parallelism) divides the sequence.", _seq),
    Rule("positions", "Learned positions reach as far as the sequence.", _positions),
    Rule("recompute-blocks", "Full recompute needs a repeated block.", _recompute),
    Rule("precision", "The device has a figure for the precision.", _precision),
)
