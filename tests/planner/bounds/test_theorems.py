"""Every lower bound is at most the simulated value, on random models, layouts and clusters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import numpy as np
from attrs import evolve, frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from megaloom.dsl.graph import Graph, graph
from megaloom.dsl.layers.mlp import SwiGLU
from megaloom.dsl.layers.moe import MoE
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama
from megaloom.examples.mixtral import mixtral
from megaloom.examples.qwen3 import qwen3
from megaloom.planner import bounds
from megaloom.planner.bounds import interleaved_memory, lower_bounds, pipeline
from megaloom.planner.bounds.balanced_partition import balanced_bounds
from megaloom.planner.bounds.chained_layouts import ChainedLayouts
from megaloom.planner.bounds.end_of_step import end_of_step_bound
from megaloom.planner.bounds.lower_bounds import LowerBounds
from megaloom.planner.bounds.one_stage import one_stage_seconds
from megaloom.planner.bounds.rank_memory import in_flight_means, least_rank_memory
from megaloom.planner.bounds.simulated_step import step_lower_bound
from megaloom.planner.bounds.time_cap import capped_bounds
from megaloom.planner.contract.choices import Recompute, Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.model.structure import model_structure
from megaloom.planner.partition.partitioner import partition
from megaloom.planner.pipeline import schedules
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.simulate.price import Priced, simulate

ABOVE = 1 + 1e-9  # rounding of sums


@cache
def model(kind: str, layers: int) -> Graph:
    match kind:
        case "tied":
            return graph(gpt("tied", layers=layers, heads=4, embed=64, vocab=512, seq=64))
        case "counting":  # a pass before the step counts the load of experts
            experts = MoE(SwiGLU(96), 4, 2, balance=0.01, balance_over="batch")
            return graph(qwen3("counting", layers, 4, 2, 64, experts))
        case "sparse":
            return graph(mixtral("sparse", layers=layers, heads=4, kv_heads=2, embed=64, ff=96, experts=4, vocab=512))
    return graph(llama("dense", layers=layers, heads=6, kv_heads=3, embed=96, ff=192, vocab=512))


@frozen(eq=False, repr=False)
class Case:
    """A layout, its bounds' inputs, and its simulation."""

    pricer: Pricer
    layout: Layout
    bounds: LowerBounds
    priced: Priced

    def __repr__(self) -> str:  # hypothesis prints a failing case by it
        return f"{self.pricer.graph.name}: {self.layout}, {self.m} micro-batches"

    @property
    def one(self) -> Layouts:
        return Layouts.of([self.layout])

    @property
    def base(self) -> np.ndarray:
        return np.zeros(1, dtype=np.int64)

    @property
    def m(self) -> int:
        return self.layout.microbatches(self.pricer.workload.batch)

    @property
    def passes(self) -> float:
        """Seconds of the simulated step up to the last backward pass."""
        return max(self.priced.timeline.ends)

    @property
    def peak(self) -> int:
        return max(self.priced.partition.peaks)

    @property
    def through(self) -> float:
        """Seconds of one micro-batch through all stages."""
        return sum(s.forward_seconds + s.backward_seconds for s in self.priced.stages)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["dense", "tied", "sparse", "counting"]))
    g = model(kind, draw(st.integers(9, 13)))
    pp, vpp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2), (4, 2)]))
    m = pp * draw(st.integers(1, 4)) if vpp > 1 else draw(st.integers(1, 4 * pp))
    mode, layers = draw(st.sampled_from([("none", 0), ("selective", 0), ("full", 0), ("full", 1), ("full", 2)]))
    dp = draw(st.sampled_from([1, 2] if pp == 3 else [1, 2, 4]))
    full = ["gradients", "weights"] if dp > 1 and (pp == 1 or not model_structure(g).shared_weights) else []
    shard = draw(st.sampled_from(["none", "optimizer", *full]))
    reshard = draw(st.sampled_from(["micro-batch", "step"])) if shard == "weights" else "micro-batch"
    own = ["optimizer", "gradients", "weights"] * (kind in ("sparse", "counting") and reshard == "micro-batch")
    x = Layout(
        pp=pp,
        vpp=vpp,
        dp=dp,
        recompute=mode,
        recompute_layers=layers,
        shard=shard,
        reshard=reshard,
        replicas=draw(st.sampled_from([1, 2])) if dp == 4 and shard in full else 1,
        expert_shard=draw(st.sampled_from(["same", *(own if full and shard != "none" else [])])),
        micro_batch=draw(st.sampled_from([1, 2, 3])),
        microbatch_group=draw(st.sampled_from([0, m])) if m > pp and vpp > 1 else 0,
    )
    work = Workload(seq=64, batch=m * x.dp * x.micro_batch)
    pricer = Pricer(g, cluster(f"{x.world}xH100"), work)
    return Case(pricer, x, LowerBounds(Layouts.of([x]), pricer.cost_cache), pricer.price(x))


def _finish(c: Case) -> bool:
    stages, x = c.priced.stages, c.layout
    times = (
        [s.forward_seconds for s in stages],
        [s.backward_seconds for s in stages],
        [*c.priced.partition.send_seconds, 0.0],
    )
    ends = pipeline.finish_bounds(*times, x.pp, c.m, x.microbatch_group)
    return bool((ends <= np.array(c.priced.timeline.ends) * ABOVE).all())


def _columns(c: Case) -> tuple[np.ndarray, ...]:
    x = c.layout
    return tuple(np.array([n], dtype=float) for n in (x.pp, c.m, min(x.microbatch_group_size, c.m)))


def _one_chunk(c: Case) -> bool:
    pp, m, _ = _columns(c)
    return c.layout.vpp > 1 or float(pipeline.one_chunk_multiple(pp, m)[0]) * c.through <= c.passes * ABOVE


def _passes(c: Case) -> bool:
    pp, m, group = _columns(c)
    count, sends = pipeline.pass_multiples(pp, np.array([c.layout.vpp]), m, group)
    send = min(c.priced.partition.send_seconds, default=0.0)
    return float(count[0]) * c.through + float(sends[0]) * send <= c.passes * ABOVE


def _interleaved(c: Case) -> bool:
    x = c.layout
    if x.vpp == 1:
        return True
    count, sends = pipeline.interleaved_multiples(x.pp, x.vpp, c.m, min(x.microbatch_group_size, c.m))
    return count * c.through + sends * min(c.priced.partition.send_seconds) <= c.passes * ABOVE


def _end_of_step(c: Case) -> bool:
    costs = c.bounds.costs
    after, reduction = end_of_step_bound(c.one, c.base, costs.params, costs.expert_params, c.pricer.cost_cache, {})[0]
    ends = c.priced.ends_of_step
    most = max(end.optimizer + end.gathering for end in ends), max(end.reduction for end in ends)
    return after <= most[0] * ABOVE and reduction <= most[1] * ABOVE


def _bound(c: Case) -> bool:
    result = c.bounds.bound(c.one, c.base)
    # What shards more state takes no less than the seconds of passes.
    others = [evolve(c.layout, shard=shard) for shard in list(Shard)[c.layout.shard :]]
    sharded = c.bounds.bound(Layouts.of(others), np.zeros(len(others), dtype=np.int64)).seconds
    least = result.passes[0] <= sharded.min() * ABOVE
    return least and result.seconds[0] <= c.priced.seconds * ABOVE and result.nbytes[0] <= c.peak * (1 + 1e-6)


def _ideal(c: Case) -> bool:
    seconds, nbytes = c.bounds.ideal()
    return seconds[0] <= c.priced.seconds * ABOVE and nbytes[0] <= c.peak * (1 + 1e-6)


def _large_batch(c: Case) -> bool:
    least = lower_bounds.large_batch_seconds(c.one, c.pricer.cost_cache)[0]
    return least <= c.bounds.ideal()[0][0] * ABOVE and least <= c.priced.seconds * ABOVE


def _balanced(c: Case) -> bool:
    chained = ChainedLayouts.of(c.bounds.bound(c.one, c.base), c.pricer.chain_costs)
    through = capped_bounds(c.pricer.balanced_example, c.bounds, chained).through
    bounds = balanced_bounds(c.pricer.balance_all, c.bounds, chained, through)
    return bool(bounds.seconds[0] <= c.priced.seconds * ABOVE)


def _capped(c: Case) -> bool:
    """The bound holds for the cap of any partition: of the balanced one, and of one with a long last stage."""
    chained, count = ChainedLayouts.of(c.bounds.bound(c.one, c.base), c.pricer.chain_costs), c.layout.pp * c.layout.vpp
    last = len(c.pricer.structure.cut_points) - 1
    for example in (c.pricer.balanced_example, lambda *_: np.array([*range(count), last])):
        bounds = capped_bounds(example, c.bounds, chained)
        if bounds.nbytes[0] > c.peak * (1 + 1e-6) or bounds.through[0] > c.through * ABOVE:
            return False
    return True


def _one_stage(c: Case) -> bool:
    """The bound holds for the planner's partition within less memory than the one without a limit takes."""
    if c.layout.vpp > 1 or c.layout.pp == 1:
        return True
    chained = ChainedLayouts.of(c.bounds.bound(c.one, c.base), c.pricer.chain_costs)
    for share in (1.0, 0.95, 0.9, 0.8, 0.6):
        problem = evolve(c.priced.partition.problem, memory_limit=int(share * c.peak))
        within = partition(problem)
        least = one_stage_seconds(c.bounds, chained, problem.memory_limit)[0]
        if within.fits and least > simulate(within).seconds * ABOVE:
            return False
    return True


def _capped_activations(c: Case) -> bool:
    x, stages = c.layout, c.priced.partition.stages
    if x.vpp == 1 or x.recompute_layers:
        return True
    moments = schedules.memory_moments(x.pp, x.vpp, c.m, x.microbatch_group)
    saved = np.array([s.saved for s in stages], dtype=float)
    in_flight = moments.in_flight[:, moments.backward]
    saved_nbytes = (in_flight @ saved.reshape(x.vpp, x.pp).T[..., None]).max(axis=(1, 2)).sum()
    columns = (np.array([n]) for n in (saved.sum(), saved.max(), 0.0))
    group = np.array([x.microbatch_group])
    least = interleaved_memory.capped_activations(*columns, x.pp, x.vpp, np.array([c.m]), group)
    return bool(least[0] <= saved_nbytes * ABOVE)


def _whole_model(c: Case) -> tuple[np.ndarray, np.ndarray]:
    costs = c.bounds.costs
    saved = costs.saved_nbytes[:, 1 if c.layout.full_recompute else 0]
    if c.layout.recompute is Recompute.SELECTIVE or c.layout.recompute_layers:
        saved = np.minimum(saved, costs.saved_nbytes[:, 2])
        saved = np.minimum(saved, costs.saved_nbytes[:, 1])
    return costs.state_nbytes[:, int(c.layout.shard)], saved


def _least_rank(c: Case) -> bool:
    x = c.layout
    means = in_flight_means(x.pp, x.vpp > 1, min(x.microbatch_group_size, 2 * x.pp), min(c.m, x.pp))
    least = least_rank_memory(*_whole_model(c), np.array([float(x.pp)]), tuple(np.array([n]) for n in means))
    return float(least[0]) <= c.peak * (1 + 1e-6)


def _interleaved_nbytes(c: Case) -> bool:
    x = c.layout
    if x.vpp == 1 or not c.bounds.many[x.pp * x.vpp]:
        return True
    state, saved = _whole_model(c)
    group = np.array([min(x.microbatch_group_size, c.m)])
    least = interleaved_memory.interleaved_nbytes(state, saved, saved, np.array([x.pp]), np.array([x.vpp]), group)
    return float(least[0]) <= c.peak * (1 + 1e-6)


THEOREMS: dict[str, Callable[[Case], bool]] = {
    "finish_bounds": _finish,
    "one_chunk_multiple": _one_chunk,
    "pass_multiples": _passes,
    "interleaved_multiples": _interleaved,
    "end_of_step_bound": _end_of_step,
    "large_batch_seconds": _large_batch,
    "LowerBounds.bound": _bound,
    "LowerBounds.ideal": _ideal,
    "balanced_bounds": _balanced,
    "capped_bounds": _capped,
    "one_stage_seconds": _one_stage,
    "least_rank_memory": _least_rank,
    "interleaved_nbytes": _interleaved_nbytes,
    "capped_activations": _capped_activations,
    "step_lower_bound": lambda c: step_lower_bound(c.priced.partition) <= c.priced.seconds * ABOVE,
}
# What bounds are made of.
NO_BOUNDS = {"price_base_layouts", "too_many_partitions", "in_flight_means", "ends_later", "known_of"}
STRUCTURE = {f"LowerBounds.{name}" for name in ("extend", "module_sets", "worth_recomputing")}


def _public() -> Iterator[str]:
    """Yield the public functions of planner/bounds, and the public methods of `LowerBounds`."""
    for info in iter_modules(bounds.__path__):
        module = import_module(f"{bounds.__name__}.{info.name}")
        for name, function in inspect.getmembers(module, callable):
            if getattr(function, "__module__", "") == module.__name__ and not name.startswith("_"):
                if inspect.isclass(function):
                    continue
                yield name
    for name, _ in inspect.getmembers(LowerBounds, inspect.isfunction):
        if not name.startswith("_"):
            yield f"LowerBounds.{name}"


def test_every_bound_has_a_case() -> None:
    assert {*_public()} - NO_BOUNDS - STRUCTURE == {*THEOREMS}


@settings(max_examples=60)
@given(cases())
def test_no_bound_exceeds_the_simulation(case: Case) -> None:
    failed = [name for name, holds in THEOREMS.items() if not holds(case)]
    assert not failed
