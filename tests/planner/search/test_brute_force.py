"""The search finds what pricing every legal layout finds, on small instances drawn at random.

`make parity` draws MEGALOOM_INSTANCES=500 of each test.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import combinations

import numpy as np
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.accuracy.models.decoder import Decoder
from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Model,
    NextToken,
    RMSNorm,
    SwiGLU,
    Unembed,
    ids,
    residual,
    weight,
)
from megaloom.dsl import model as declared
from megaloom.dsl.graph import Graph, graph
from megaloom.examples.gpt2 import gpt
from megaloom.examples.llama3 import llama
from megaloom.examples.mixtral import mixtral
from megaloom.planner.bounds.interleaved_memory import too_many_partitions
from megaloom.planner.bounds.lower_bounds import LowerBounds
from megaloom.planner.contract.choices import Recompute, Shard
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Runtime, Workload
from megaloom.planner.cost.profiles.frameworks import PROFILES
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.partition.memory_limit import HEADROOM
from megaloom.planner.partition.whole_blocks import with_cut_points_of
from megaloom.planner.rules.rules import violations
from megaloom.planner.search.branch_and_bound import search
from megaloom.planner.search.candidates import Candidates
from megaloom.planner.search.device_meshes import (
    TIE_RATIO,
    DeviceMesh,
    device_mesh,
)
from megaloom.planner.search.pricing import Pricer
from megaloom.planner.search.simple_first import NEAR_RATIO, preferred, simplicity_order
from megaloom.planner.simulate.price import Priced

INSTANCES = int(os.environ.get("MEGALOOM_INSTANCES", "12"))
OF_BLOCKS = ["dense", "tied", "sparse", "ahead"]
KINDS = [*OF_BLOCKS, "flat"]  # a model without repeated blocks


@cache
def model(kind: str, layers: int) -> Graph:
    match kind:
        case "tied":
            return graph(gpt("tied", layers=layers, heads=4, embed=64, vocab=512, seq=64))
        case "sparse":
            return graph(mixtral("sparse", layers=layers, heads=4, kv_heads=2, embed=64, ff=96, experts=4, vocab=512))
        case "ahead":
            return graph(
                Decoder(layers=layers, hidden=96, heads=6, kv_heads=3, ffn=192, vocab=512, mtp_layers=1).model()
            )
        case "flat":
            return graph(without_repeat(layers))
    return graph(llama("dense", layers=layers, heads=6, kv_heads=3, embed=96, ff=192, vocab=512))


def without_repeat(layers: int) -> Model:
    """A model whose layers are written one after the other, without `repeat`."""
    wte, head = (weight(name, Dim("vocab", 512), Dim("embed", 96)) for name in ("wte", "head"))
    program = ids() >> Embed(wte)
    for _ in range(layers):
        program = program >> residual(RMSNorm(), Attention(heads=6, kv_heads=3)) >> residual(RMSNorm(), SwiGLU(192))
    return declared("flat", program >> RMSNorm() >> Unembed(head) >> NextToken())


def machine(count: int, kib: int) -> Cluster:
    """Devices with just so much memory for tensors."""
    named = cluster(f"{count}xH100")
    device = evolve(named.device, name="small", nbytes=kib * 2**10, context_nbytes=0, library_nbytes=0)
    return evolve(
        named,
        device=device,
        **{s: evolve(getattr(named, s), group_nbytes=0, peer_nbytes=0) for s in ("intra", "inter")},
    )


@st.composite
def instances(draw: st.DrawFn) -> tuple[Graph, Cluster, Workload]:
    kind, layers = draw(st.sampled_from(KINDS)), draw(st.integers(1, 4))
    count = draw(st.integers(1, 6))
    batch = count * draw(st.integers(1, 4))
    work = Workload(seq=draw(st.sampled_from([24, 48, 64])), batch=batch)
    return model(kind, layers), machine(count, draw(st.integers(2000, 40000))), work


def legal(candidates: Candidates) -> list[Layout]:
    """Every layout of the search's space, by its rules alone: with all the overlap that may be, and with less."""
    lower_bounds = LowerBounds(candidates.base_layouts, candidates.pricer.cost_cache)
    every_base = np.arange(len(candidates.base_layouts))
    result, base = candidates.space.variants(candidates.base_layouts, lower_bounds.module_sets(every_base))
    worth = lower_bounds.worth_recomputing(result, base)
    assert len(result) == candidates.count == len({result[i] for i in range(len(result))})
    tried = [result[i] for i in range(len(result)) if worth[i]]
    most = [x for x in tried if not x.fsdp or not fits_with_less_sharded(candidates.pricer, x)]
    return [y for x in most for y in (x, *candidates.pricer.fewer_overlaps(candidates.pricer.even(x)))]


def fits_with_less_sharded(pricer: Pricer, x: Layout) -> bool:
    """Return whether the balanced stages of a layout fit if one holder less of its state is sharded.

    The search does not try the layout then.
    """
    return pricer.even(evolve(x, shard=Shard(x.shard - 1))).fits


@settings(max_examples=INSTANCES)
@given(instances(), st.integers(1, 8), st.integers(1, 100), st.sampled_from(Runtime))
def test_the_search_equals_brute_force(
    case: tuple[Graph, Cluster, Workload], sure: int, many: int, runtime: Runtime
) -> None:
    g, devices, work = case
    candidates, apart = (
        Pricer(g, devices, work, PROFILES[runtime]) for _ in range(2)
    )  # which know nothing of each other
    candidates = Candidates(candidates, {})
    every = legal(Candidates(apart, {}))
    assert not any(violations(x, g, work, devices) for x in every)
    priced = sorted((p for x in every if (p := apart.price(x)).partition.fits), key=lambda p: p.seconds)
    result = search(candidates, sure, many)
    assert [p.seconds for p in result] == sorted(p.seconds for p in result)
    assert min(many, len(priced)) <= len({p.layout for p in result}) == len(result)
    ours, theirs = quickest(result), quickest(priced)
    assert sorted(ours.values())[:sure] == sorted(theirs.values())[:sure]
    for one in sorted(theirs, key=theirs.__getitem__)[:sure]:  # of each all that are as quick
        as_quick = {p.layout for p in priced if device_mesh(p.layout) == one and p.seconds < theirs[one] * TIE_RATIO}
        assert as_quick <= {p.layout for p in result} or list(theirs.values()).count(theirs[one]) > 1
    for ratio in (TIE_RATIO, NEAR_RATIO) if priced else ():
        ours, theirs = (simplicity_order(preferred(found, ratio).layout, devices) for found in (result, priced))
        assert ours == theirs


@st.composite
def chunked(draw: st.DrawFn) -> tuple[Graph, Cluster, Workload, dict[str, int], Runtime]:
    """Pipelines of interleaved chunks of a model of many blocks, with about as much memory as the plain one takes."""
    runtime = draw(st.sampled_from(Runtime))
    g = with_cut_points_of(model(draw(st.sampled_from(OF_BLOCKS)), draw(st.integers(12, 14))), runtime)
    pp, vpp = draw(st.sampled_from([(2, 3), (2, 4), (3, 2), (4, 2)]))
    x = Layout(pp=pp, vpp=vpp, dp=draw(st.integers(1, 2)))
    work = Workload(seq=draw(st.sampled_from([24, 48, 64])), batch=x.dp * pp * draw(st.integers(2, 6)))
    plain = Pricer(g, machine(x.world, 10**9), work, PROFILES[runtime]).price(x)
    room = draw(st.floats(0.85, 1.3)) * max(plain.partition.peaks) / (1 - HEADROOM)
    return g, machine(x.world, int(room) >> 10), work, {"pp": pp, "vpp": vpp, "tp": 1, "cp": 1}, runtime


def equal(g: Graph, devices: Cluster, work: Workload, fixed: dict[str, int], runtime: Runtime) -> None:
    """The search finds what pricing every layout finds."""
    candidates, apart = (Pricer(g, devices, work, PROFILES[runtime]) for _ in range(2))
    candidates, other = Candidates(candidates, fixed), Candidates(apart, fixed)
    every = legal(other) if len(other.base_layouts) else []
    assert too_many_partitions(len(apart.structure.cut_points) - 1)[fixed["pp"] * fixed["vpp"]]
    priced = sorted((p for x in every if (p := apart.price(x)).partition.fits), key=lambda p: p.seconds)
    result = search(candidates, 1, 1) if len(candidates.base_layouts) else []
    assert [p.seconds for p in result][:1] == [p.seconds for p in priced][:1]
    if priced:
        assert {p.layout for p in priced if p.seconds < priced[0].seconds * TIE_RATIO} <= {p.layout for p in result}


@settings(max_examples=INSTANCES)
@given(chunked())
def test_it_does_where_chunks_can_be_cut_in_many_ways(
    case: tuple[Graph, Cluster, Workload, dict[str, int], Runtime],
) -> None:
    equal(*case)


def test_a_weight_that_chunks_share_is_there_once() -> None:
    """Counted once per chunk, the weight would not fit; the balanced partition does not fit either way."""
    g = with_cut_points_of(model("ahead", 12), Runtime.MEGATRON)
    equal(g, machine(2, 49233), Workload(seq=48, batch=4), {"pp": 2, "vpp": 3, "tp": 1, "cp": 1}, Runtime.MEGATRON)


def quickest(result: list[Priced]) -> dict[DeviceMesh, float]:
    """The seconds of the best of each way; the quickest is first."""
    return {device_mesh(p.layout): p.seconds for p in reversed(result)}


@settings(max_examples=INSTANCES // 3)
@given(instances())
def test_less_overlap_is_no_quicker(case: tuple[Graph, Cluster, Workload]) -> None:
    g, devices, work = case
    pricer = Pricer(g, devices, work, PROFILES[Runtime.MEGATRON])
    candidates = Candidates(pricer, {})
    less = [
        evolve(x, overlaps=some)
        for x in legal(candidates)
        if x.microbatch_overlap_bits
        for some in combinations(x.overlaps, 2)
    ]
    priced = [p.seconds for x in less if (p := pricer.price(x)).partition.fits]
    assert not priced or search(candidates, 1, 1)[0].seconds <= min(priced) * (1 + 1e-9)


@st.composite
def interleaved(draw: st.DrawFn) -> tuple[Graph, Layout, Workload, float]:
    """An interleaved layout of a model of many blocks, and a memory limit relative to its balanced partition."""
    g = model(draw(st.sampled_from(OF_BLOCKS)), draw(st.integers(9, 16)))
    pp, vpp = draw(st.sampled_from([(2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2), (4, 4)]))
    m = pp * draw(st.integers(1, 4))
    again = draw(st.sampled_from([("none", 0), ("selective", 0), ("full", 0), ("full", 1)]))
    x = Layout(
        pp=pp,
        vpp=vpp,
        dp=draw(st.integers(1, 2)),
        recompute=Recompute(again[0]),
        recompute_layers=again[1],
        shard=draw(st.sampled_from(["none", "optimizer"])),
        microbatch_group=draw(st.sampled_from([0, m])) if m > pp else 0,
    )
    seq = draw(st.sampled_from([64, 256, 1024])) if "positions" not in g.weights else 64
    return g, x, Workload(seq=seq, batch=m * x.dp), draw(st.floats(0.7, 1.1))


@settings(max_examples=INSTANCES)
@given(interleaved())
def test_no_bound_rules_out_what_fits(case: tuple[Graph, Layout, Workload, float]) -> None:
    g, x, work, share = case
    roomy = Pricer(g, machine(x.world, 10**9), work).price(x)
    tight = Pricer(g, machine(x.world, int(share * max(roomy.partition.peaks) / (1 - HEADROOM)) >> 10), work)
    priced = tight.price(x)
    seconds, nbytes = tight.bound(x)
    assert seconds <= min(priced.seconds, roomy.seconds) * (1 + 1e-9)
    assert nbytes <= max(roomy.partition.peaks) * (1 + 1e-6)
    if priced.partition.fits:
        assert nbytes <= tight.capacity
        assert tight.refined(tight.even(x)) is not None
