"""Memory of a layout: laws, published measurements, and the lower bounds that exclude layouts from the search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attrs import evolve, fields, frozen
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.accuracy.scoring import evenly
from megaloom.dsl.catalog import find
from megaloom.dsl.combine import residual
from megaloom.dsl.dims import Dim
from megaloom.dsl.facts.parameters import params
from megaloom.dsl.graph import graph, model
from megaloom.dsl.layer import Layer
from megaloom.dsl.layers.attention import Attention
from megaloom.dsl.layers.embeddings import Embed, Unembed
from megaloom.dsl.layers.linear import project
from megaloom.dsl.layers.mlp import GeGLU
from megaloom.dsl.layers.moe import MoE
from megaloom.dsl.layers.norms import RMSNorm
from megaloom.dsl.ops.attention_core import Attend
from megaloom.dsl.ops.rope import Rope
from megaloom.dsl.ops.weight import ids, weight
from megaloom.dsl.transforms.repetition import repeat
from megaloom.dsl.value import Value, apply, fn
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama
from megaloom.examples.mixtral import mixtral
from megaloom.planner.bounds.lower_bounds import LowerBounds
from megaloom.planner.contract.calibration import Calibration
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.devices import GiB
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.cost import measured_memory, memory
from megaloom.planner.cost.job import Job
from megaloom.planner.cost.profiles.frameworks import MEGATRON, OWN
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.model.structure import model_structure
from megaloom.planner.partition.partitioner import Partition, PartitionProblem
from megaloom.planner.pipeline import schedules, timeline
from megaloom.planner.search.candidate_space import CandidateSpace
from megaloom.planner.search.pricing import Pricer, price
from tests.support.profiles import changed

N = st.integers(0, 10**9)
MODELS = {
    "dense": llama("tiny-llama", layers=4, heads=8, kv_heads=4, embed=128, ff=256, vocab=512),
    "tied": gpt("tiny-gpt", layers=4, heads=4, embed=64, vocab=512, seq=64),
    "sparse": mixtral("tiny-mixtral", layers=4, heads=8, kv_heads=4, embed=128, ff=256, experts=4, vocab=512),
}
WORK = Workload(seq=64, batch=16)
JOB = Job(model_structure(graph(MODELS["dense"])), WORK, cluster("8xH100"), OWN)


@given(N, N)
def test_bytes_of_a_parameter(dense: int, experts: int) -> None:
    """18 in bf16, 6 and 12 divided with the distributed optimizer; 16 in fp32 (megatron-core's buffers)."""
    plain = memory.state_bytes(dense, experts, Layout(dp=8), Precision.BF16)
    assert plain.total == 18 * (dense + experts)
    assert memory.state_bytes(dense, experts, Layout(), Precision.FP32).total == 16 * (dense + experts)
    layout = Layout(dp=4, cp=2, ep=4, shard="optimizer")
    divided = memory.state_bytes(dense, experts, layout, Precision.BF16)
    assert divided.optimizer == -(-12 * dense // 8) - (-12 * experts // 2)
    assert divided.total <= plain.total


def test_states_add_up_in_every_field() -> None:
    """A state holds what its dense and its expert weights hold, each for itself; the fields are those of the class."""
    names = [f.name for f in fields(memory.StateBytes)]
    one, other = (memory.StateBytes(*range(start, start + len(names))) for start in (1, 100))
    assert [getattr(one + other, name) for name in names] == [101 + 2 * i for i in range(len(names))]
    x = Layout(dp=4, ep=2, shard="weights", grad_reduce="bf16")
    parts = (memory.state_bytes(*count, x, Precision.BF16) for count in ((1001, 0), (0, 777)))
    assert sum(parts, start=memory.StateBytes(*(0 for _ in names))) == memory.state_bytes(1001, 777, x, Precision.BF16)


@given(N, N, st.integers(1, 64))
def test_more_copies_never_hold_more(dense: int, experts: int, dp: int) -> None:
    few, many = (Layout(dp=n, shard="optimizer") for n in (dp, 2 * dp))
    for precision in Precision:
        a, b = (memory.state_bytes(dense, experts, x, precision).total for x in (few, many))
        assert b <= a


@pytest.mark.parametrize(
    ("device", "precision", "profile", "copies"),
    [("H100", "fp8", OWN, 2), ("B200", "fp8", OWN, 1), ("H100", "bf16", OWN, 0), ("H100", "fp8", MEGATRON, 0)],
)
def test_copies_of_weights_in_8_bits(device: str, precision: str, profile: Any, copies: int) -> None:
    """Of the linear layers in blocks: one byte for rows, and one for columns before Blackwell."""
    work = evolve(WORK, precision=Precision(precision))
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256  # queries and output, keys and values, SwiGLU
    for tp in (1, 2):
        pricer = Pricer(graph(MODELS["dense"]), cluster(f"{tp}x{device}"), work, profile)
        found = pricer.partition(Layout(tp=tp))
        assert sum(stage.narrow_copies for stage in found.stages) == copies * 4 * layer // tp
        without = memory.rank_state(found.stages[0].params, 0, found.layout, found.problem.job)
        assert found.rank_peaks[0].held["weights"] == without.weights + copies * 4 * layer // tp


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 6), st.data())
def test_activations_are_those_of_the_fullest_moment(pp: int, vpp: int, rounds: int, data: st.DataObject) -> None:
    vpp = vpp if pp > 1 else 1
    m, layout = pp * rounds, Layout(pp=pp, vpp=vpp)
    rank = data.draw(st.integers(0, pp - 1))
    sizes = data.draw(st.lists(st.integers(0, 10**6), min_size=vpp, max_size=vpp))
    stages = np.zeros((vpp, pp, 7), dtype=np.int64)
    stages[:, rank, 4] = sizes
    moments = schedules.memory_moments(pp, vpp, m)
    nbytes = most = 0
    for step in timeline.rank_order(rank, pp, vpp, m):
        nbytes += sizes[step.stage // pp] * (-1 if step.backward else 1)
        most = max(most, nbytes)
    peaks = memory.rank_peaks(stages.reshape(-1, 7), 0, 0, moments, layout, JOB).each
    assert peaks[rank].held["activations"] == most


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 5), st.data())
def test_the_peak_is_the_fullest_of_all_moments(pp: int, vpp: int, rounds: int, data: st.DataObject) -> None:
    """The peak is the largest memory over all steps of the schedule, and the named moment is one at which it occurs."""
    vpp = vpp if pp > 1 else 1
    rank, size = data.draw(st.integers(0, pp - 1)), st.integers(0, 10**6)
    group = data.draw(st.sampled_from([0, pp + 1])) if vpp > 1 else 0
    m = (group or pp) * rounds + data.draw(st.integers(0, pp - 1)) * (vpp == 1)
    layout = Layout(pp=pp, vpp=vpp, microbatch_group=group)
    saved = data.draw(st.lists(size, min_size=vpp, max_size=vpp))
    library, workspace, loss, ending = (data.draw(size) for _ in range(4))
    stages = np.zeros((vpp, pp, 7), dtype=np.int64)
    stages[:, rank] = [(1, 0, 0, 0, n, library, ending) for n in saved]
    in_flight, alive = 0, {"optimizer step": library + vpp * OWN.optimizer.step_held_nbytes + ending}
    for step in timeline.rank_order(rank, pp, vpp, m, group):
        name = f"micro-batch {step.microbatch}"
        if step.backward:
            chunk = step.stage // pp
            numbers = name + (f", model chunk {chunk}" if vpp > 1 else "")
            first = (step.microbatch, chunk) == (0, vpp - 1)
            moment = f"first backward pass ({numbers})" if first else f"backward pass of {numbers}"
            alive[f"start of the {moment}"] = in_flight + workspace + library
            in_flight -= saved[step.stage // pp]
        else:
            in_flight += saved[step.stage // pp]
            if step.stage == pp * vpp - 1:
                alive[f"loss of {name}"] = in_flight + loss + library
    moments = schedules.memory_moments(pp, vpp, m, group)
    result = memory.rank_peaks(stages.reshape(-1, 7), workspace, loss, moments, layout, JOB).each[rank]
    passing = sum(result.held[what] for what in ("activations", "workspace", "logits"))
    assert passing == max(alive.values()) == alive[result.moment]


def legal(name: str) -> tuple[Pricer, list[Layout]]:
    pricer = Pricer(graph(MODELS[name]), cluster("8xH100"), WORK)
    space = CandidateSpace(pricer.graph, pricer.cluster, WORK, {})
    at = space.base_layouts()
    family = LowerBounds(at, pricer.cost_cache).module_sets(np.arange(len(at)))
    result, _ = space.variants(at, family)
    return pricer, [result[i] for i in range(len(result))]


@pytest.mark.parametrize("name", MODELS)
def test_no_price_is_below_its_bound(name: str) -> None:
    pricer, layouts = legal(name)
    assert len(layouts) > 200
    for layout in layouts[::29]:
        seconds, nbytes = pricer.bound(layout)
        priced = pricer.price(layout)
        assert seconds <= priced.seconds * (1 + 1e-9)
        assert nbytes <= max(priced.partition.peaks) + 1000  # what rounding up to whole bytes adds
        assert min(priced.partition.peaks) > 0


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_on_some_rank(name: str) -> None:
    machine = cluster("4xH100")
    for layout in (Layout(pp=4), Layout(pp=2, dp=2), Layout(pp=2, dp=2, vpp=2)):
        priced = price(graph(MODELS[name]), layout, machine, WORK)
        copy = 512 * 64 if name == "tied" else 0  # the last stage has a copy of the first one's table
        assert sum(s.params for s in priced.stages) == params(MODELS[name]) + copy
    assert price(graph(MODELS[name]), Layout(dp=4), machine, WORK).stages[0].params == params(MODELS[name])


def test_recompute_frees_what_it_computes_again() -> None:
    g, machine = graph(MODELS["dense"]), cluster("1xH100")
    none, selective, full = (
        price(g, Layout(recompute=mode, micro_batch=16), machine, WORK).prediction.nbytes[0] for mode in Recompute
    )
    assert full["activations"] < selective["activations"] < none["activations"]
    blocks = 4 * 16 * 64 * 128 * 2  # the inputs of four blocks, in bf16
    outside = 16 * 64 * (128 * 2 * 2 + 8)  # what the last norm and the head read, and the tokens
    assert full["activations"] == blocks + outside


def test_products_in_eight_bits_keep_what_they_have_cast() -> None:
    """Of what enters attention and feed-forward, and of the gated product, one byte rather than two; of what attention
    gives, and reads, one more."""
    g, machine = graph(MODELS["dense"]), cluster("1xH100")
    layout, work = Layout(micro_batch=16), evolve(WORK, precision=Precision.FP8)
    wide, narrow = (price(g, layout, machine, w).prediction.nbytes[0]["activations"] for w in (WORK, work))
    assert wide - narrow == 4 * 16 * 64 * (128 + 128 + 256 - 128)


# Llama-3-70B's layer twelve times on 8 B200, bf16, sequences of 4096, micro-batch 1, nothing recomputed: GiB that torch
# had allocated at most (SimuMax v1.2, its published B200 runs).
ALLOCATED: list[tuple[dict[str, Any], int, float]] = [
    ({"dp": 4, "pp": 2}, 4096, 66.55),
    ({"dp": 4, "tp": 2, "sequence_parallel": True}, 4096, 60.68),
    ({"dp": 2, "tp": 4, "sequence_parallel": True}, 4096, 39.07),
    ({"tp": 8, "sequence_parallel": True}, 4096, 28.29),
    ({"cp": 8}, 32768, 104.51),
]


@pytest.mark.parametrize(("axes", "seq", "gib"), ALLOCATED, ids=lambda x: str(x))
def test_memory_as_measured(axes: dict[str, Any], seq: int, gib: float) -> None:
    g = graph(llama("twelve", layers=12, heads=64, kv_heads=8, embed=8192, ff=28672, vocab=128256))
    layout = Layout(**axes, shard="optimizer")
    profile = changed(MEGATRON, kernels={"loss_saved_nbytes": 0})  # Transformer Engine's loss works in place
    pricer = Pricer(g, cluster("8xB200"), Workload(seq=seq, batch=layout.dp * 4), profile)
    fit = PartitionProblem(layout, pricer.cost_table(layout), pricer.capacity)
    result = Partition(fit, evenly(g, layout.pp) or fit.balanced)
    tensors = max(peak.nbytes - peak.held["runtime"] - peak.held["allocator"] for peak in result.rank_peaks)
    assert abs(tensors / GiB / gib - 1) < 0.01


# What torch allocated at most as our runtime trained these on an H200 (benchmarks/steps.py; torch 2.11, no Transformer
# Engine): the model, sequences of so many tokens, in a step, in a micro-batch; GiB.
TRAINED: list[tuple[str, int, int, Layout, float]] = [
    ("gpt2", 1024, 64, Layout(micro_batch=64), 32.7),
    ("gpt3-1-3b", 2048, 16, Layout(micro_batch=16), 76.6),
    ("llama3-1b", 4096, 16, Layout(micro_batch=8), 76.3),
    ("llama3-1b", 4096, 4, Layout(micro_batch=1), 27.7),
    ("llama3-1b", 4096, 16, Layout(micro_batch=16, recompute=Recompute.FULL), 56.6),
    ("llama-8b", 8192, 4, Layout(micro_batch=4), 83.2),
    ("llama-70b", 4096, 4, Layout(micro_batch=4), 48.9),
    ("mixtral", 4096, 8, Layout(micro_batch=8), 72.9),
]
CUT = {  # fewer layers, of their own widths
    "llama-8b": llama("llama-8b", layers=6, heads=32, kv_heads=8, embed=4096, ff=14336),
    "llama-70b": llama("llama-70b", layers=2, heads=64, kv_heads=8, embed=8192, ff=28672, vocab=32000),
    "mixtral": mixtral("mixtral", layers=2, heads=32, kv_heads=8, embed=4096, ff=14336),
}


@pytest.mark.parametrize(("name", "seq", "batch", "layout", "gib"), TRAINED, ids=lambda x: str(x))
def test_memory_as_our_runtime_takes_it(name: str, seq: int, batch: int, layout: Layout, gib: float) -> None:
    model = CUT[name] if name in CUT else find(name)[0]
    result = price(graph(model), layout, cluster("1xH200"), Workload(seq=seq, batch=batch))
    predicted = measured_memory.held_bytes(result.prediction.nbytes[0], "allocated") / GiB
    assert result.prediction.moments == ("loss of micro-batch 0",)
    assert abs(predicted / gib - 1) < 0.003


def test_the_fast_form_is_the_peak() -> None:
    """The arrays of a search give the peak of each rank, but for rounding; they count a shared weight in each stage."""
    for name in MODELS:
        legal_pricer, layouts = legal(name)
        for profile in (OWN, changed(MEGATRON, optimizer={"step_held_nbytes": 16})):
            pricer = Pricer(legal_pricer.graph, legal_pricer.cluster, WORK, profile)
            fits = (PartitionProblem(x, pricer.cost_table(x), pricer.capacity) for x in layouts[::17])
            for placed in (Partition(fit, fit.balanced) for fit in fits):
                cuts = placed.problem.cut_points.searchsorted(placed.bounds)
                peaks = placed.problem.limits.rank_peaks(cuts[None])[0]
                if placed.problem.table.shared_elements:
                    assert (peaks >= np.array(placed.peaks) - 100).all()
                else:
                    assert peaks == pytest.approx(placed.peaks, abs=100)


@frozen
class OtherNames(Layer):
    """`Attention` of 8 heads with rotary positions and norms on queries and keys, under other names of weights."""

    normed: bool = False

    def body(self, x: Value, /, **side: Value) -> Value:
        h, g, c = Dim("heads", 8), Dim("kv_heads", 4), Dim("head_dim", 16)
        query, key, value = (project(name, x, d, c) for name, d in (("to_query", h), ("to_key", g), ("to_value", g)))
        if self.normed:
            norm = RMSNorm(over="head_dim")
            query, key = query >> norm.named("of_queries"), key >> norm.named("of_keys")
        read = apply(Rope(10_000), query), apply(Rope(10_000), key), value
        return project("out", apply(Attend(), *read), x["embed"], over=("heads", "head_dim"))


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("setting", ["values_share_qkv", "output_copied"])
def test_names_of_weights_do_not_change_the_memory_of_attention(setting: str, normed: bool) -> None:
    norm = RMSNorm(over="head_dim") if normed else None
    e, v = Dim("embed", 128), Dim("vocab", 512)
    saved = []
    for layer in (Attention(heads=8, kv_heads=4, rope=10_000, qk_norm=norm), OtherNames(normed=normed)):
        table = weight("wte", v, e)
        g = graph(model("own", ids() >> Embed(table) >> repeat(2, residual(RMSNorm(), layer)) >> Unembed(table)))
        for value in (False, True):
            profile = changed(OWN, attention={setting: value})
            pricer = Pricer(g, cluster("1xH100"), WORK, profile)
            saved.append(pricer.price(Layout(micro_batch=2)).prediction.nbytes[0]["activations"])
    assert saved[:2] == saved[2:]
    assert (saved[0] < saved[1]) is not (setting == "values_share_qkv" and normed)


@frozen
class OwnGate(Layer):
    """`GeGLU` of 256 channels with a gate of its own, maybe one that says nothing of tensors in eager mode."""

    eager_tensors: int

    def body(self, x: Value, /, **side: Value) -> Value:
        gate, up = (project(name, x, Dim("ff", 256)) for name in ("first", "second"))
        h = fn("mul", fn("gelu_tanh", gate), up, fusion="gate", eager_tensors=self.eager_tensors)
        return project("third", h, x["embed"], over=("ff",))


@pytest.mark.parametrize("experts", [False, True])
def test_the_memory_of_a_gate_is_a_fact_of_its_op(experts: bool) -> None:
    """A framework that fuses SwiGLU only saves more of other gates, also of those in a user's layer."""
    e, v = Dim("embed", 128), Dim("vocab", 512)
    saved = []
    for unit in (GeGLU(256), OwnGate(eager_tensors=2), OwnGate(eager_tensors=0)):
        layer = MoE(unit, 4, 2) if experts else unit
        table = weight("wte", v, e)
        g = graph(model("own", ids() >> Embed(table) >> repeat(2, residual(RMSNorm(), layer)) >> Unembed(table)))
        profile = changed(OWN, kernels={"only_swiglu_fused": True})
        pricer = Pricer(g, cluster("1xH100"), WORK, profile)
        saved.append(pricer.price(Layout(micro_batch=16)).prediction.nbytes[0]["activations"])
    assert saved[0] == saved[1] > saved[2]


def test_more_copies_hold_less_of_the_optimizer() -> None:
    g = graph(MODELS["dense"])
    totals = []
    for dp in (1, 2, 4, 8):
        layout = Layout(dp=dp, shard="optimizer")
        nbytes = price(g, layout, cluster(f"{dp}xH100"), evolve(WORK, batch=16 * dp)).prediction.nbytes[0]
        totals.append(sum(nbytes.values()) - nbytes["runtime"])
    assert totals == sorted(totals, reverse=True)


@given(
    st.dictionaries(
        st.sampled_from(["weights", "gradients", "activations", "allocator", "runtime"]), st.integers(0, 1 << 40)
    )
)
def test_the_upper_bound_is_above_the_tensors_and_grows_with_them(nbytes: dict[str, int]) -> None:
    tensors = sum(n for what, n in nbytes.items() if what not in ("allocator", "runtime"))
    assert measured_memory.upper_bytes(nbytes) >= tensors + nbytes.get("runtime", 0)
    assert measured_memory.upper_bytes({**nbytes, "logits": 1 << 20}) > measured_memory.upper_bytes(nbytes)
    assert (
        measured_memory.upper_bytes(nbytes, "allocated")
        <= measured_memory.upper_bytes(nbytes, "reserved")
        <= measured_memory.upper_bytes(nbytes)
    )
    assert measured_memory.upper_bytes(nbytes) <= measured_memory.upper_bytes(nbytes, graphed=True)
    assert (
        measured_memory.held_bytes(nbytes, "allocated")
        <= measured_memory.required_bytes(nbytes)
        <= measured_memory.held_bytes(nbytes)
    )


@given(
    st.dictionaries(
        st.sampled_from(["weights", "gradients", "activations", "allocator", "runtime"]), st.integers(1 << 20, 1 << 36)
    ).filter(lambda held: "weights" in held),
    st.floats(1.02, 1.5),
)
def test_a_device_of_the_needed_bytes_suffices_in_19_of_20_runs(held: dict[str, int], high: float) -> None:
    need = measured_memory.needed_bytes(held, high)
    assert measured_memory.required_bytes(held) <= need
    assert measured_memory.overflow_chance(held, need, high) == pytest.approx(0.05, abs=0.002)
    chances = [measured_memory.overflow_chance(held, int(share * need), high) for share in (0, 0.7, 0.9, 1, 1.1, 2)]
    assert chances == sorted(chances, reverse=True) and chances[0] == 1.0 and chances[-1] < 1e-3
    assert measured_memory.needed_bytes({**held, "allocator": 1 << 40}, high) == need  # torch gives its reserve back


def test_the_upper_end_is_that_of_the_class_or_of_the_calibration() -> None:
    highs = {}
    for name in ("dense", "sparse"):
        g = graph(MODELS[name])
        job = Pricer(g, cluster("1xH100"), WORK, MEGATRON).cost_cache.job
        highs[name] = job.memory_high
        calibration = Calibration(runs=4, classes=(job.run_class,), step=(0.9, 1.1), memory_high=1.02)
        machine = evolve(cluster("1xH100"), calibration=calibration)
        assert Pricer(g, machine, WORK, MEGATRON).cost_cache.job.memory_high == 1.02
        assert Pricer(g, machine, WORK, OWN).cost_cache.job.memory_high == job.memory_high
    assert highs == {"dense": measured_memory.TENSORS_HIGH[False], "sparse": measured_memory.TENSORS_HIGH[True]}


def test_a_plan_has_the_chance_that_its_memory_does_not_suffice() -> None:
    g = graph(MODELS["dense"])
    full = Pricer(g, cluster("1xH100"), WORK, MEGATRON).price(Layout()).prediction
    assert full.nbytes_high is not None and full.overflow is not None and full.overflow < 1e-6
    device = evolve(cluster("1xH100").device, name="small", nbytes=int(full.nbytes_high))
    small = Pricer(g, evolve(cluster("1xH100"), device=device), WORK, MEGATRON).price(Layout()).prediction
    assert small.overflow == pytest.approx(0.05, abs=0.001)
