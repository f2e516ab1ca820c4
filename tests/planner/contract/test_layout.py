"""Rules on layouts: each refuses the layouts that it should, its fix is legal, and no other layout is refused."""

from __future__ import annotations

import random
from functools import cache
from math import gcd

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from megaloom.dsl import (
    MLP,
    Attention,
    Dim,
    Embed,
    Layer,
    LayerNorm,
    Mamba2,
    MoE,
    NextToken,
    Sharded,
    Split,
    Unembed,
    Value,
    dot,
    fn,
    ids,
    model,
    residual,
    weight,
)
from megaloom.dsl.catalog import find
from megaloom.dsl.graph import Graph, graph
from megaloom.planner.contract.choices import OverlapSet, Recompute
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.module_kinds import runs_as_module
from megaloom.planner.contract.workload import Precision, Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.divisors import divisors
from megaloom.planner.rules.export_rules import export_violations
from megaloom.planner.rules.rule import Case, legal
from megaloom.planner.rules.rules import RANGE_RULES, RULES, violations


@cache
def example(name: str) -> Graph:
    return graph(find(name)[0])


def broken(name: str, layout: Layout, seq: int = 1024, batch: int = 64, gpus: int | None = None) -> dict[str, str]:
    """The rules that a layout breaks, and their fixes."""
    count = gpus or max(1, layout.world)
    machine = evolve(cluster("1xH100"), count=count, per_node=gcd(8, count))
    refusals = violations(layout, example(name), Workload(seq=seq, batch=batch), machine)
    return {v.rule: v.fix for v in refusals}


SHARES = {"dp": 2, "shard": "optimizer"}
FSDP = {"dp": 2, "shard": "weights"}
WEIGHTS = ("gradients", "weights")
OWN_SHARD = {"dp": 4, "shard": "weights", "expert_shard": "optimizer"}
APART = {"tp": 16, "sequence_parallel": True, "overlaps": ("tensor",)}
EXPERTS = {"dp": 2, "ep": 2, "overlaps": ("experts",)}

CASES = [  # model, layout, workload and devices, the rule it breaks, its fix, and what mends it
    ("gpt2", {"tp": 0}, {}, "positive", "use 1 or more", {"tp": 1}),
    ("gpt2", {"micro_batch": -1}, {}, "positive", "use 1 or more", {"micro_batch": 1}),
    (
        "gpt2",
        {"recompute": Recompute.FULL, "recompute_layers": -1},
        {},
        "positive",
        "use 0 or more",
        {"recompute_layers": 1},
    ),
    ("gpt2", {"microbatch_group": -2}, {}, "positive", "use 0 or more", {"microbatch_group": 0}),
    ("gpt2", {}, {"batch": 10**9}, "plausible", "use 1,048,576 or less", {}),
    ("gpt2", {}, {"seq": 10**26}, "plausible", "use 134,217,728 or less", {}),
    ("gpt2", {"tp": 10**26}, {"gpus": 8}, "plausible", "use 1,048,576 or less", {"tp": 2, "dp": 4}),
    ("gpt2", FSDP | {"replicas": 10**26}, {}, "plausible", "use 1,048,576 or less", {"replicas": 1}),
    ("gpt2", {"micro_batch": 10**26}, {}, "plausible", "use 1,048,576 or less", {"micro_batch": 1}),
    ("gpt2", {"tp": 2}, {"gpus": 8}, "world", "use dp 4", {"dp": 4}),
    (
        "gpt2",
        {"pp": 3},
        {"gpus": 8},
        "world",
        "= 2 or 4, which divide 8, or 24 devices",
        {"pp": 4, "dp": 2},
    ),
    ("gpt2", {"tp": 8}, {}, "tp-heads", "use tp 4", {"tp": 4}),
    ("gpt2-xl", {"tp": 2}, {}, "tp-heads", "use tp 1", {"tp": 5}),
    ("llama3-8b", {"tp": 16}, {}, "", "", {}),  # 8 key/value heads, each on two ranks
    ("mixtral-8x7b", {"ep": 3, "dp": 3}, {"batch": 63}, "ep-experts", "use ep 1", {"ep": 1}),
    ("mixtral-8x7b", {"ep": 8, "dp": 4}, {}, "expert-grid", "use ep 4, or 8 devices", {"ep": 4}),
    ("llama3-8b", {"ep": 2, "dp": 2}, {}, "no-experts", "use ep 1", {"ep": 1}),
    ("llama3-8b", {"etp": 2, "tp": 2}, {}, "etp-experts", "use etp 1", {"etp": 1}),
    ("gpt2", {"sequence_parallel": True}, {}, "sp-tp", "use tp 2 or more, or", {"sequence_parallel": False}),
    (
        "mixtral-8x7b",
        {"tp": 2, "dp": 2, "ep": 2},
        {},
        "moe-sp",
        "add --sequence-parallel",
        {"sequence_parallel": True},
    ),
    ("gpt2", {"vpp": 2}, {}, "vpp-pp", "use vpp 1, or pp 2 or more", {"vpp": 1}),
    ("gpt2", {"pp": 4, "vpp": 20}, {}, "stages", "use vpp 7", {"vpp": 7}),
    ("gpt2", {"pp": 64}, {}, "stages", "use pp 28 with vpp 1", {"pp": 28}),
    ("gpt2", {"dp": 3}, {}, "batch", "use --batch 63 or 66", {}),
    ("gpt2", {"micro_batch": 3}, {}, "batch", "or --micro-batch 2 or 4", {"micro_batch": 4}),
    (
        "gpt2",
        {"pp": 3, "vpp": 2},
        {},
        "vpp-microbatches",
        "--microbatch-group 64, or --batch 63",
        {"vpp": 1},
    ),
    ("gpt2", {"pp": 3, "vpp": 2}, {}, "vpp-microbatches", "use vpp 1", {"microbatch_group": 64}),
    (
        "gpt2",
        {"pp": 4, "vpp": 2, "microbatch_group": 3},
        {},
        "microbatch-group",
        "--microbatch-group 4",
        {"microbatch_group": 4},
    ),
    ("gpt2", {"pp": 4, "vpp": 2, "microbatch_group": 7}, {}, "microbatch-group", "6 or 8", {"microbatch_group": 6}),
    ("gpt2", {"pp": 4, "microbatch_group": 4}, {}, "group-vpp", "use --microbatch-group 0", {"microbatch_group": 0}),
    ("gpt2", {"recompute_layers": 1}, {}, "recompute-none", "use --recompute full", {"recompute": Recompute.FULL}),
    ("gpt2", {"recompute": Recompute.SELECTIVE, "recompute_layers": 1}, {}, "recompute-layers", "--recompute full", {}),
    (
        "gpt2",
        {"recompute": Recompute.SELECTIVE, "recompute_modules": ("mla_up_proj", "mlp")},
        {},
        "recompute-parts",
        "any of core_attn, layernorm, mlp",
        {"recompute_modules": ("mlp",)},
    ),
    (
        "gpt2",
        {"recompute_modules": ("mlp",)},
        {},
        "recompute-modules",
        "with any of",
        {"recompute": Recompute.SELECTIVE},
    ),
    (
        "gpt2",
        {"recompute": Recompute.SELECTIVE, "recompute_modules": ("moe",)},
        {},
        "recompute-modules",
        "any of core_attn, layernorm, mlp, or --recompute none",
        {"recompute_modules": ("layernorm",)},
    ),
    ("gpt2", {"pp": 4, "vpp": 2}, {"batch": 2}, "vpp-microbatches", "or --batch 4", {"vpp": 1}),
    ("gpt2", {"cp": 4}, {"seq": 1020}, "seq", "use --seq 1016 or 1024", {"cp": 2}),
    ("gpt2", {"cp": 4, "tp": 4, "sequence_parallel": True}, {"seq": 1000}, "seq", "--seq 992 or 1008", {"cp": 1}),
    ("gpt2", {"tp": 4, "sequence_parallel": True}, {"seq": 1002}, "seq", "--seq 1000 or 1004", {"tp": 2}),
    ("gpt2", {}, {"seq": 1025}, "positions", "1024 or less", {}),
    (
        "gpt2",
        {"dp": 2, "overlaps": WEIGHTS},
        {},
        "overlap-weights",
        "use --shard optimizer",
        {"shard": "optimizer"},
    ),
    ("gpt2", SHARES | {"overlaps": WEIGHTS[1:]}, {}, "overlap-weights", "add gradients", {"overlaps": WEIGHTS}),
    ("gpt2", FSDP | {"dp": 1}, {}, "fsdp-ranks", "use dp 2 or more", {"dp": 2}),
    ("gpt2", {"dp": 2, "reshard": "step"}, {}, "fsdp-reshard", "use --shard weights", {"shard": "weights"}),
    ("gpt2", {"dp": 4, "replicas": 2}, {}, "fsdp-replicas", "use --replicas 1", {"replicas": 1}),
    ("gpt2", FSDP | {"dp": 4, "replicas": 4}, {}, "fsdp-replicas", "use --replicas 2", {"replicas": 2}),
    ("gpt2", OWN_SHARD, {}, "expert-shard-copies", "use --expert-shard same", {"expert_shard": "same"}),
    ("mixtral-8x7b", OWN_SHARD | {"ep": 4}, {}, "expert-shard-copies", "use a smaller ep", {"ep": 2}),
    (
        "mixtral-8x7b",
        OWN_SHARD | {"expert_shard": "none"},
        {},
        "expert-shard-unsharded",
        "or optimizer beside gradients or weights",
        {"expert_shard": "optimizer"},
    ),
    (
        "mixtral-8x7b",
        {"dp": 4, "expert_shard": "optimizer"},
        {},
        "expert-shard-unsharded",
        "use --expert-shard same",
        {"expert_shard": "same"},
    ),
    (
        "mixtral-8x7b",
        OWN_SHARD | {"reshard": "step"},
        {},
        "expert-shard-step",
        "use --reshard micro-batch",
        {"reshard": "micro-batch"},
    ),
    ("gpt2", FSDP | {"overlaps": ()}, {}, "fsdp-overlap", "add gradients and weights", {"overlaps": WEIGHTS}),
    (
        "mixtral-8x7b",
        FSDP | {"ep": 2, "overlaps": (*WEIGHTS, "experts")},
        {},
        "fsdp-overlap-experts",
        "leave experts out",
        {"overlaps": WEIGHTS},
    ),
    ("t5-small", FSDP | {"pp": 2, "vpp": 2}, {}, "fsdp-shared", "use vpp 1", {"vpp": 1}),
    (
        "gpt2",
        {"tp": 2, "overlaps": ("tensor",)},
        {},
        "overlap-tensor",
        "add --sequence-parallel",
        {"sequence_parallel": True},
    ),
    ("llama3-8b", APART, {}, "overlap-tensor-node", "use tp that divides 8", {"tp": 8}),
    ("mixtral-8x7b", {"overlaps": ("experts",)}, {}, "overlap-experts", "use ep 2 or more", {"ep": 2, "dp": 2}),
    ("mixtral-8x7b", EXPERTS | {"pp": 2}, {}, "overlap-experts-vpp", "use vpp 2 or more", {"vpp": 2}),
    (
        "mixtral-8x7b",
        EXPERTS | {"recompute": Recompute.FULL},
        {},
        "overlap-experts-recompute",
        "none or selective",
        {"recompute": Recompute.SELECTIVE},
    ),
    ("deepseek-v3-mtp", EXPERTS, {}, "overlap-experts-mtp", "use pp 2 or more", {"pp": 2, "vpp": 2}),
]


@pytest.mark.parametrize(("name", "layout", "given", "rule", "fix", "mend"), CASES)
def test_a_rule_refuses_and_its_fix_works(
    name: str, layout: dict[str, int], given: dict[str, int], rule: str, fix: str, mend: dict[str, int]
) -> None:
    refusals = broken(name, Layout(**layout), **given)
    assert list(refusals) == ([rule] if rule else [])
    assert fix in refusals.get(rule, "")
    if mend:
        assert broken(name, Layout(**layout | mend), **given) == {}


def test_every_rule_is_shown_to_refuse() -> None:
    elsewhere = {"tp-kv-heads", "tp-width", "recompute-blocks", "precision"}
    elsewhere |= {
        "expert-shard-frozen",
        "fsdp-precision",
        "fsdp-rows",
        "grad-reduce",
        "overlap-experts-precision",
        "sequence-pairs",
    }
    assert {case[3] for case in CASES if case[3]} | elsewhere == {rule.id for rule in (*RANGE_RULES, *RULES)}


def test_a_mended_batch_or_sequence_works() -> None:
    assert all(broken("gpt2", Layout(dp=3), batch=batch) == {} for batch in (63, 66))
    assert all(broken("gpt2", Layout(pp=3, vpp=2), batch=batch) == {} for batch in (63, 66))
    assert all(broken("gpt2", Layout(cp=4), seq=seq) == {} for seq in (1016, 1024))


def test_a_message_says_what_and_where() -> None:
    layout, machine = Layout(tp=8), cluster("8xH100")
    (refusals,) = violations(layout, example("gpt2"), Workload(seq=1024, batch=8), machine)
    assert str(refusals) == "tp 8 does not divide heads=12 [tp-heads]\nuse tp 4"


@pytest.mark.parametrize(
    ("kv", "tp", "rule"),
    [(6, 4, "tp-kv-heads"), (6, 3, ""), (3, 6, ""), (2, 12, ""), (2, 4, ""), (4, 6, "tp-kv-heads")],
)
def test_key_value_heads_divide_or_repeat(kv: int, tp: int, rule: str) -> None:
    """megatron-core also wants tp to divide their channels, where the runtime computes a layer by its body."""
    wte = weight("wte", Dim("vocab", 64), Dim("embed", 48))
    m = model("gqa", ids() >> Embed(wte) >> residual(Attention(heads=12, kv_heads=kv)) >> Unembed(wte) >> NextToken())
    machine = evolve(cluster("1xH100"), count=tp)
    refusals = [v.rule for v in violations(Layout(tp=tp), graph(m), Workload(seq=64, batch=8), machine)]
    assert refusals == ([rule] if rule else [])
    channels = 2 * kv * 4 % tp != 0
    exported = export_violations(Layout(tp=tp), graph(m), Workload(seq=64, batch=8), machine)
    assert [v.rule for v in exported] == (["tp-keys"] if channels else [])
    (attention,) = (n for n in graph(m).nodes if isinstance(n.op, Attention))
    assert runs_as_module(attention, Split(tp=tp)) != channels


@pytest.mark.parametrize(("groups", "tp", "rule"), [(1, 2, ""), (3, 2, "tp-kv-heads"), (2, 4, ""), (4, 2, "")])
def test_the_groups_of_a_scan_divide_or_repeat(groups: int, tp: int, rule: str) -> None:
    g, work, machine = four_devices(Mamba2(heads=12, head_dim=4, state=4, groups=groups))
    layout = Layout(tp=tp, dp=4 // tp)
    assert [v.rule for v in violations(layout, g, work, machine)] == ([rule] if rule else [])
    assert ["own-width"] == [v.rule for v in export_violations(layout, g, work, machine)] or groups % tp == 0


class Wide(Layer):
    """A layer of the user's own, with a dim of its own on tp."""

    splits = {"channels": "tp"}  # noqa: RUF012 - as a user would write it

    def body(self, x: Value, /, **side: Value) -> Value:
        c = Dim("channels", 10)
        return dot(fn("relu", dot(x, weight("in", x["embed"], c), "embed")), weight("out", c, x["embed"]), "channels")


def four_devices(layer: Layer) -> tuple[Graph, Workload, Cluster]:
    wte = weight("wte", Dim("vocab", 64), Dim("embed", 48))
    m = model("own", ids() >> Embed(wte) >> layer >> LayerNorm() >> Unembed(wte) >> NextToken())
    return graph(m), Workload(seq=64, batch=8), evolve(cluster("1xH100"), count=4)


class Even(Layer):
    """Its inner dim is one of the built-in table, which tp must divide."""

    def body(self, x: Value, /, **side: Value) -> Value:
        f = Dim("ff", 14)
        return dot(dot(x, weight("in", x["embed"], f), "embed"), weight("out", f, x["embed"]), "ff")


class Kept(Even):
    """A feed-forward layer with the entry of `splits` that the message of tp-width names."""

    splits = {"ff": Sharded("tp", "whole")}  # noqa: RUF012 - as a user would write it


def test_the_width_of_an_own_layer_is_refused_with_the_entry_that_would_keep_it_whole() -> None:
    layout = Layout(tp=4, sequence_parallel=True)
    (refusal,) = violations(layout, *four_devices(Even()))
    entry = 'Even.splits = {"ff": Sharded("tp", "whole")}'
    assert refusal.message == f"tp 4 does not divide ff=14 ({entry} would keep it whole)"
    assert violations(layout, *four_devices(Kept())) == ()


@pytest.mark.parametrize("layer", [Wide(), MoE(Wide(), experts=4, top_k=1)])
def test_a_dim_of_an_own_layer_need_not_divide(layer: Layer) -> None:
    """Our runtime does not shard such a dim; megatron-core refuses it."""
    moe = isinstance(layer, MoE)
    for tp in (1, 2, 4):
        layout = Layout(tp=tp, dp=4 // tp, etp=tp if moe else 1, sequence_parallel=tp > 1)
        assert violations(layout, *four_devices(layer)) == ()
        refused = [(v.rule, v.fix) for v in export_violations(layout, *four_devices(layer))]
        assert refused == ([("own-width", f"use {'etp' if moe else 'tp'} 2")] if tp == 4 else [])


def test_experts_with_biases_lie_on_etp_for_our_runtime_alone() -> None:
    layout, workload = Layout(tp=2, etp=2, sequence_parallel=True), Workload(seq=64, batch=8)
    g, machine = example("gpt-oss-20b"), evolve(cluster("1xH100"), count=2)
    assert violations(layout, g, workload, machine) == ()
    assert [v.rule for v in export_violations(layout, g, workload, machine)] == ["expert-bias"]


def test_tp_divides_the_width_of_a_dense_layer() -> None:
    g, workload, machine = four_devices(MLP(14))
    (refusals,) = violations(Layout(tp=4), g, workload, machine)
    assert (refusals.rule, refusals.fix) == ("tp-width", "use tp 2")
    assert refusals.message == "tp 4 does not divide ff=14"
    assert "recompute-blocks" in [v.rule for v in violations(Layout(recompute=Recompute.FULL), g, workload, machine)]


def test_megatron_lm_alone_refuses_experts_on_ep_in_fp16() -> None:
    g, machine = example("mixtral-8x7b"), cluster("8xH100")
    for precision, result in ((Precision.FP16, ["ep-fp16"]), (Precision.BF16, [])):
        case = Layout(dp=8, ep=8), g, Workload(seq=1024, batch=8, precision=precision), machine
        assert violations(*case) == ()
        assert [v.rule for v in export_violations(*case)] == result


def test_megatron_core_alone_refuses_experts_that_etp_does_not_divide() -> None:
    """The runtime pads them, and computes them by the body of the layer."""
    g, machine = example("mixtral-8x7b"), evolve(cluster("1xH100"), count=6)
    case = Layout(ep=2, etp=3, dp=6), g, Workload(seq=1024, batch=60), machine
    assert violations(*case) == ()
    assert [(v.rule, v.fix) for v in export_violations(*case)] == [("etp-width", "use etp 2")]
    mixture = next(n for n in g.nodes if isinstance(n.op, MoE))
    assert [runs_as_module(mixture, Split(etp=etp)) for etp in (2, 3)] == [True, False]


def test_the_exchange_of_experts_overlaps_in_16_bits_alone() -> None:
    g, machine, x = example("mixtral-8x7b"), cluster("8xH100"), Layout(dp=8, ep=8, overlaps=("experts",))
    for precision, result in ((Precision.FP32, ["overlap-experts-precision"]), (Precision.BF16, [])):
        assert [v.rule for v in violations(x, g, Workload(seq=1024, batch=8, precision=precision), machine)] == result


def test_what_overlaps_if_nothing_is_said_costs_nothing() -> None:
    assert Layout().overlaps == Layout(overlaps=("gradients",)).overlaps
    assert Layout(shard="optimizer").overlaps == OverlapSet(("gradients", "weights"))
    assert str(Layout(dp=2, shard="optimizer")) == "dp2 mbs1 dist-opt"
    assert str(Layout(dp=2, ep=2, overlaps=("experts",))) == "dp2 ep2 mbs1 overlap experts no overlap of gradients"


def test_a_precision_without_a_figure() -> None:
    machine = cluster("1xH100")
    machine = evolve(machine, device=evolve(machine.device, flops={"bf16": 1e15}))
    workload = Workload(seq=64, batch=8, precision=Precision.FP32)
    assert [v.rule for v in violations(Layout(), example("gpt2"), workload, machine)] == ["precision"]


@pytest.mark.parametrize("name", ["gpt2", "mixtral-8x7b", "llama3-8b"])
def test_the_rules_say_the_same_of_many_layouts(name: str) -> None:
    draw = random.Random(name)
    degrees = [1, 2, 3, 4, 6, 8, 12, 16]
    layouts = [
        Layout(
            **{axis: draw.choice(degrees) for axis in ("dp", "tp", "pp", "vpp", "cp", "ep", "etp", "micro_batch")},
            sequence_parallel=draw.random() < 0.5,
            recompute=draw.choice(list(Recompute)),
            recompute_modules=draw.choice([(), (), ("layernorm",), ("mlp", "core_attn"), ("moe_act", "layernorm")]),
            recompute_layers=draw.choice([0, 0, 1, 2]),
            microbatch_group=draw.choice([0, 0, 2, 4, 6]),
        )
        for _ in range(500)
    ]
    layouts += [evolve(Layout(), **{axis: n}) for axis in ("dp", "tp", "pp", "cp") for n in degrees]
    for count in (1, 8, 12, 16):
        machine, work = evolve(cluster("1xH100"), count=count), Workload(seq=1024, batch=48)
        allowed = legal((*RANGE_RULES, *RULES), Case(Layouts.of(layouts), example(name), work, machine))
        assert allowed.tolist() == [not violations(x, example(name), work, machine) for x in layouts]
        assert allowed.any()


@given(st.data())
def test_what_is_built_by_the_rules_is_legal(data: st.DataObject) -> None:
    """A layout made of divisors alone, from the published shape of Mixtral: 32 heads, 8 key/value heads, 8 experts."""
    tp, pp, cp = (data.draw(st.sampled_from([1, 2, 4, 8])) for _ in range(3))
    dp, vpp = data.draw(st.integers(1, 12)), data.draw(st.sampled_from([1, 2, 4])) if pp > 1 else 1
    etp = data.draw(st.sampled_from(divisors(dp * tp * cp, 14336)))
    ep = data.draw(st.sampled_from([e for e in divisors(8) if dp * tp * cp % (e * etp) == 0]))
    assume(ep > 1 or tp == etp == 1)
    micro, groups = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    layout = Layout(dp=dp, tp=tp, pp=pp, vpp=vpp, cp=cp, ep=ep, etp=etp, sequence_parallel=tp > 1, micro_batch=micro)
    seq = 2 * cp * tp * data.draw(st.integers(1, 100))
    assert broken("mixtral-8x7b", layout, seq=seq, batch=dp * micro * groups * pp) == {}


@given(st.lists(st.integers(1, 500), min_size=1, max_size=3))
def test_divisors_are_all_common_ones(numbers: list[int]) -> None:
    assert divisors(*numbers) == tuple(d for d in range(1, min(numbers) + 1) if all(n % d == 0 for n in numbers))
