"""The laws that the facts of every layer meet, over layers drawn at random with all their options."""

from collections import Counter
from math import prod

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl import (
    BATCH,
    MLA,
    MLP,
    SEQ,
    Attention,
    CrossAttention,
    Dim,
    Dropout,
    DType,
    GeGLU,
    Layer,
    LayerNorm,
    Linear,
    LinearScaling,
    Mamba2,
    MoE,
    RelativeBuckets,
    RMSNorm,
    Rope,
    Scale,
    Shape,
    Softcap,
    Split,
    SwiGLU,
    Value,
    chain,
    costs,
    fingerprint,
    flops,
    graph,
    model,
    params,
    repeat,
    residual,
    saved,
    weight,
)
from megaloom.dsl.base_ops import GivenTensor

EMBED, HEADS = Dim("embed", 64), 8
HIDDEN = Value(GivenTensor(), (), Shape((BATCH, SEQ, EMBED)))  # from nowhere; no data, which would have no gradient
MEMORY = Value(GivenTensor(), (), Shape((BATCH, Dim("source"), EMBED)))
TABLE = weight("biases", Dim("buckets", 32), Dim("heads", HEADS))
NBYTES = {DType.COMPUTE: 2, DType.FLOAT32: 4, DType.INDEX: 8, DType.MASK: 1}

# Layers, with sizes that 4 devices divide evenly

yes = st.booleans()
ropes = st.sampled_from([None, 1e4, Rope(5e5, channels=8), Rope(1e4, interleaved=True, scaling=LinearScaling(4))])
cores = st.fixed_dictionaries({}, optional={"softcap": st.just(50.0), "scale": st.just(0.1), "sink": yes, "alibi": yes})
cores |= st.just({"window": 8}) | st.just({"causal": False})
attentions = st.builds(
    lambda core, **kw: Attention(heads=HEADS, **core, **kw),
    cores,
    kv_heads=st.sampled_from([None, 4, 8]),
    head_dim=st.sampled_from([None, 16]),
    rope=ropes,
    bias=yes,
    qkv_bias=yes,
    dropout=st.sampled_from([0.0, 0.1]),
    qk_norm=st.sampled_from([None, RMSNorm(over="head_dim"), LayerNorm(over="head_dim", bias=False)]),
)
biased = st.just(Attention(heads=HEADS, relative=RelativeBuckets(), table=TABLE))  # a weight that many layers share
crossed = st.builds(CrossAttention, heads=st.just(HEADS), kv_heads=st.sampled_from([None, 4]), bias=yes)
latent = st.builds(
    MLA,
    heads=st.just(HEADS),
    q_rank=st.sampled_from([None, 24]),
    kv_rank=st.just(20),
    nope=st.just(8),
    rope=st.just(4),
    v=st.sampled_from([8, 12]),
    positions=st.just(Rope(1e4)),
)
scans = st.builds(
    Mamba2,
    heads=st.just(HEADS),
    head_dim=st.just(16),
    state=st.just(8),
    groups=st.sampled_from([4, 8]),
    norm_groups=st.sampled_from([4, 8]),
    bias=yes,
    conv_bias=yes,
)
feeds = (
    st.builds(MLP, st.sampled_from([8, 32]), st.sampled_from(["gelu", "relu2", "silu"]), yes)
    | st.builds(SwiGLU, st.sampled_from([8, 32]))
    | st.builds(GeGLU, st.just(16))
)
mixtures = st.builds(
    lambda choice, **kw: MoE(experts=8, **choice, **kw),
    st.sampled_from([{"top_k": 1}, {"top_k": 2, "score": "sigmoid", "groups": 4, "top_groups": 2, "corrected": True}]),
    expert=feeds,
    shared=st.none() | feeds,
    scale=st.sampled_from([1.0, 2.5]),
)
norms = st.builds(RMSNorm, plus_one=yes) | st.builds(LayerNorm, plus_one=yes, bias=yes)
plain = st.sampled_from([Dropout(0.1), Scale(3.0), Softcap(30.0), Linear(EMBED), Linear(EMBED, bias=True)])
dense = attentions | latent | scans | feeds | norms | plain
alone = dense | mixtures
together = crossed.map(lambda layer: layer.given(memory=MEMORY)) | biased | alone


def combined(one: st.SearchStrategy[Layer]) -> st.SearchStrategy[Layer]:
    def grown(inner: st.SearchStrategy[Layer]) -> st.SearchStrategy[Layer]:
        return (
            st.builds(residual, inner)
            | st.builds(repeat, st.integers(1, 2), inner)
            | st.builds(lambda a, b: a >> b, inner, inner)
        )

    return st.recursive(one, grown, max_leaves=4)


def facts(layer: Layer, split: Split) -> list[object]:
    nodes = graph(model("m", HIDDEN >> layer)).nodes
    return [(n.name, costs(n, batch=2, seq=16, split=split)) for n in nodes]


def saved_elements(value: Value, **how: object) -> int:
    return sum(s.elements * NBYTES[s.dtype] for s in saved(graph(model("m", value)).nodes, batch=2, seq=16, **how))


# Composition


@given(layer=combined(alone), n=st.integers(1, 4))
def test_a_repeat_multiplies_every_fact(layer, n):
    one, many = HIDDEN >> layer, HIDDEN >> repeat(n, layer)
    assert params(many) == n * params(one)
    a, b = (flops(model("m", v), batch=2, seq=8) for v in (one, many))
    assert (b.forward, b.dgrad, b.wgrad) == (n * a.forward, n * a.dgrad, n * a.wgrad)
    assert [saved_elements(many, recompute=r) for r in ("none", "selective")] == [
        n * saved_elements(one, recompute=r) for r in ("none", "selective")
    ]
    assert saved_elements(many, recompute="full") == n * 2 * prod((2, 16, 64))  # what enters each iteration
    assert flops(model("m", many), batch=2, seq=8, recompute="full").recompute == b.forward


@given(a=combined(together), b=together, c=together, sequence_parallel=yes)
def test_grouping_changes_no_fact(a, b, c, sequence_parallel):
    split = Split(tp=2, cp=2, ep=2, sequence_parallel=sequence_parallel)
    grouped = [(a >> b) >> c, a >> (b >> c), chain(a, b, c)]
    first, *others = (facts(layer, split) for layer in grouped)
    assert all(other == first for other in others)
    assert len({fingerprint(model("m", HIDDEN >> layer)) for layer in grouped}) == 1


@given(layers=st.lists(together, min_size=1, max_size=4))
def test_a_model_costs_what_its_nodes_cost(layers):
    m = model("m", HIDDEN >> chain(*layers))
    each = [w for n in graph(m).nodes for w in costs(n, batch=2, seq=16).work]
    assert flops(m, batch=2, seq=16).total == sum(w.flops + w.dgrad + w.wgrad for w in each)
    again = flops(m, batch=2, seq=16, recompute="selective")
    assert again.hardware - again.total == sum(w.flops for w in each if "core_attn" in w.recomputed_by)
    shared = sum(params(n) for n in graph(m).nodes) - params(m)
    uses = sum(isinstance(n.op, Attention) and n.op.table is TABLE for n in graph(m).nodes)
    assert shared == max(0, uses - 1) * 32 * HEADS


@given(layers=st.lists(together, min_size=1, max_size=4), cp=st.sampled_from([1, 2]))
def test_recompute_keeps_less_and_less(layers, cp):
    v, split = HIDDEN >> repeat(2, *layers), Split(cp=cp)
    none, selective, full = (saved_elements(v, recompute=r, split=split) for r in ("none", "selective", "full"))
    assert selective <= none
    memory = any(isinstance(n.op, CrossAttention) for n in graph(model("m", v)).nodes)
    assert full == (2 + memory) * 2 * prod((2, 16 // cp, 64))


# Splits

degrees = st.sampled_from([1, 2, 4])
splits = st.builds(Split, tp=degrees, cp=st.sampled_from([1, 2]), ep=degrees, etp=degrees)
DIVIDED = {"heads", "kv_heads", "groups", "ff"}


def both(layer: Layer, split: Split):
    for n in graph(model("m", HIDDEN >> layer)).nodes:
        if not n.is_input:
            yield n, costs(n, batch=2, seq=32), costs(n, batch=2, seq=32, split=split)


@given(layer=together, split=splits, sequence_parallel=yes)
def test_a_device_has_its_share_of_the_weights(layer, split, sequence_parallel):
    for n, _, part in both(layer, evolve(split, sequence_parallel=sequence_parallel)):
        dense = experts = 0
        for s in filter(lambda s: s.trained, n.weights):
            size, divided = prod(d.size for d in s.dims), DIVIDED & {d.name for d in s.dims}
            if s.outer:
                experts += size // split.ep // (split.etp if divided else 1)
            else:
                dense += size // (split.tp if divided else 1)
        assert (part.params, part.expert_params) == (dense, experts)


@given(layer=together, split=splits)
def test_the_shares_of_all_devices_add_up(layer, split):
    """With sequence parallelism no work and no saved tensor is repeated, except by devices that share an expert."""
    devices = split.tp * split.cp
    for n, whole, part in both(layer, evolve(split, sequence_parallel=True)):
        for one, share in zip(whole.work, part.work, strict=True):
            assert (one.path, one.flops) == (share.path, devices * share.flops), n.name
            assert (one.dgrad, one.wgrad) == (devices * share.dgrad, devices * share.wgrad)
            weights = split.ep * split.etp if one.path.startswith("experts.") else 1
            assert one.elements <= devices * weights * share.elements
        mine = [s for s in part.saved if s.what != "keys and values of other devices"]
        for one, share in zip(whole.saved, mine, strict=True):
            if one.what != "affine":  # the decay of a state space, which has no positions
                copies = split.etp if one.what == "experts.select" else 1
                assert one.elements * copies == devices * share.elements, (n.name, one.what)


@given(layer=together, split=splits, sequence_parallel=yes)
def test_a_product_moves_its_two_factors_and_itself(layer, split, sequence_parallel):
    """count · (m k + k n + m n) elements, for 2 count · m n k FLOPs, under any split."""
    for _, *result in both(layer, evolve(split, sequence_parallel=sequence_parallel)):
        for w in (w for cost in result for w in cost.work if w.kind == "dot"):
            assert w.flops == 2 * w.count * w.m * w.n * w.k
            assert w.elements == w.count * (w.m * w.k + w.k * w.n + w.m * w.n)


@given(layer=norms, split=splits)
def test_a_norm_moves_its_input_and_its_output(layer, split):
    for n, _, part in both(layer, evolve(split, sequence_parallel=True)):
        weights = sum(prod(d.size for d in s.dims) for s in n.weights)
        for w in (w for w in part.work if w.kind == "normalize"):
            assert w.elements == 2 * prod((2, 32, 64)) // (split.tp * split.cp) + weights


@given(layer=dense | crossed.map(lambda layer: layer.given(memory=MEMORY)), split=splits)
def test_sequence_parallel_divides_what_tensor_parallel_does_alike(layer, split):
    for n, _, part in both(layer, split):
        spread = costs(n, batch=2, seq=32, split=evolve(split, sequence_parallel=True))
        for one, share in zip(part.work, spread.work, strict=True):
            assert one.flops in (share.flops, split.tp * share.flops)
        saved_tensors = zip(part.saved, spread.saved, strict=True)
        assert all(a.elements in (b.elements, split.tp * b.elements) for a, b in saved_tensors)


@given(layer=dense | crossed.map(lambda layer: layer.given(memory=MEMORY)), split=splits)
def test_sequence_parallel_sends_no_more_over_tp(layer, split):
    """An all-reduce is a reduce-scatter and an all-gather. What was gathered is gathered again for the gradients of
    weights rather than kept. Source: Korthikanti et al., arXiv:2205.05198, section 4.2.2.
    """
    for n, _, part in both(layer, split):
        spread = costs(n, batch=2, seq=32, split=evolve(split, sequence_parallel=True)).collectives
        gathered = Counter((c.what, c.elements) for c in spread if c.kind == "all_gather" and not c.backward)
        back = Counter((c.what, c.elements) for c in spread if c.kind == "all_gather" and c.backward)
        again = back & gathered
        sent = {
            name: sum(c.elements * (2 if c.kind == "all_reduce" else 1) for c in cs if c.axis == "tp")
            for name, cs in {"tp": part.collectives, "sp": spread}.items()
        }
        assert sent["sp"] - sum(elements * count for (_, elements), count in again.items()) == sent["tp"], n.name


@given(layer=together, split=splits, sequence_parallel=yes)
def test_one_device_exchanges_nothing_and_more_do(layer, split, sequence_parallel):
    split = evolve(split, sequence_parallel=sequence_parallel)
    for _, whole, part in both(layer, split):
        assert whole.collectives == ()
        assert {c.axis for c in part.collectives} <= {a for a in ("tp", "cp", "ep", "etp") if split.degree(a) > 1}
