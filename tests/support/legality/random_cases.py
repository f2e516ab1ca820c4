"""Random layouts of random decoders that megatron-core can build too. About half of them are legal."""

from __future__ import annotations

from functools import cache
from random import Random

from attrs import evolve, frozen

from megaloom.dsl import (
    MLA,
    MLP,
    Attention,
    Dim,
    Embed,
    Graph,
    LayerNorm,
    MoE,
    Positions,
    Rope,
    SwiGLU,
    Unembed,
    chain,
    graph,
    ids,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.planner.contract.choices import Module, Overlap, Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Precision, Workload

HIDDEN, HEAD_DIM, KV_RANK, ROPE = 16, 4, 8, 4
WORLD = 64  # most devices of a case; larger meshes break the same rules and take longer


@frozen(kw_only=True)
class Decoder:
    """The sizes of a decoder. Megaloom and megatron-core can both build it."""

    layers: int
    heads: int
    kv_heads: int
    ff: int
    gated: bool = True
    latent: bool = False  # MLA
    positions: int = 0  # learned ones
    experts: int = 0
    expert_ff: int = 0
    shared_ff: int = 0
    dense_layers: int = 0  # before the layers with experts
    biased: bool = False  # experts have biases
    multi_token: bool = False  # one more layer, for multi-token prediction


@frozen(kw_only=True)
class Case:
    """A layout of a decoder, with the workload, the number of devices and the rank on which it is tried."""

    decoder: Decoder
    layout: Layout
    workload: Workload
    world: int
    rank: int  # modulo world


@cache
def declared(d: Decoder) -> Graph:
    """Return the graph of a decoder as megaloom declares it."""
    embed = Dim("embed", HIDDEN)
    wte = weight("wte", Dim("vocab", 64), embed)
    x = ids() >> Embed(wte)
    if d.positions:
        x = x >> Positions(weight("wpe", Dim("position", d.positions), embed))
    mix = (
        MLA(heads=d.heads, q_rank=None, kv_rank=KV_RANK, nope=HEAD_DIM, rope=ROPE, v=HEAD_DIM, positions=Rope(10_000))
        if d.latent
        else Attention(heads=d.heads, kv_heads=d.kv_heads, head_dim=HEAD_DIM)
    )
    dense = SwiGLU(d.ff) if d.gated else MLP(d.ff, "gelu", bias=False)
    expert = MLP(d.expert_ff, "gelu", bias=True) if d.biased else SwiGLU(d.expert_ff)
    shared = SwiGLU(d.shared_ff) if d.shared_ff else None
    moe = MoE(expert, d.experts, 2, shared=shared) if d.experts else dense
    first = d.dense_layers if d.experts else 0
    for times, ff in ((first, dense), (d.layers - first, moe)):
        if times:
            x = x >> repeat(times, residual(LayerNorm(), mix), residual(LayerNorm(), ff))
    outputs = [x >> LayerNorm() >> Unembed(wte)]
    if d.multi_token:
        outputs.append(x >> chain(residual(LayerNorm(), mix), residual(LayerNorm(), moe)) >> Unembed(wte))
    return graph(model("drawn", *outputs))


def drawn(count: int, seed: int) -> list[Case]:
    """Return `count` cases, determined by the seed. Most degrees are likely to be legal."""
    draw = Random(seed)
    decoders = [_decoder(draw) for _ in range(64)]
    return [_case(draw, draw.choice(decoders)) for _ in range(count)]


def _decoder(draw: Random) -> Decoder:
    heads = draw.choice([4, 6, 8, 12, 16])
    latent = draw.random() < 0.2
    experts = draw.choice([0, 0, 4, 6, 8, 16])
    biased = bool(experts) and draw.random() < 0.2
    return Decoder(
        layers=(layers := draw.choice([2, 3, 4, 7, 12])),
        heads=heads,
        kv_heads=heads if latent else draw.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        ff=draw.choice([12, 16, 24, 30, 48]),
        gated=draw.random() < 0.7,
        latent=latent,
        positions=draw.choice([0, 0, 0, 64, 96]),
        experts=experts,
        expert_ff=draw.choice([6, 8, 12, 20]) if experts else 0,
        shared_ff=draw.choice([0, 8, 12]) if experts and not biased else 0,
        dense_layers=draw.choice([0, 0, 1, layers - 1]) if experts else 0,
        biased=biased,
        multi_token=draw.random() < 0.15,
    )


def _modules(draw: Random, recompute: Recompute) -> list[Module]:
    some = draw.random() < (0.5 if recompute is Recompute.SELECTIVE else 0.05)
    return draw.sample(list(Module), draw.randint(1, 3)) if some else []


def _overlaps(draw: Random, x: Layout) -> list[Overlap]:
    """Return overlaps, most of them where they are legal."""
    chunks = x.ep > 1 and (x.pp == 1 or x.vpp > 1) and not x.full_recompute
    likely = {
        Overlap.GRADIENTS: 0.95,
        Overlap.WEIGHTS: 0.5 if x.distributed_optimizer else 0.02,
        Overlap.TENSOR: 0.5 if x.sequence_parallel else 0.02,
        Overlap.EXPERTS: 0.5 if chunks else 0.1 if x.ep > 1 else 0.02,
    }
    return [o for o, share in likely.items() if draw.random() < share]


def _case(draw: Random, d: Decoder) -> Case:
    likely = [1, 1, 1, 1, 2, 2, 3, 4]

    def one(*works: int) -> int:
        return draw.choice(works) if works and draw.random() < 0.8 else draw.choice([1, 1, 2, 3, 4, 5, 6, 8])

    def dividing(n: int, *sizes: int) -> list[int]:
        return [k for k in range(1, n + 1) if n % k == 0 and all(size % k == 0 for size in sizes)]

    while True:
        tp, pp = one(*dividing(d.heads, d.ff)), one(1, 1, 2, 2, 3, 4)
        cp, dp = one(1, 1, 1, 2), draw.choice([*likely, 5, 6, 8])
        if tp * pp * cp * dp <= WORLD:
            break
    inside = tp * cp * dp
    etp = one(*dividing(inside, d.expert_ff), 1, 1) if d.experts else one(1)
    ep = one(*dividing(max(1, inside // etp), d.experts)) if d.experts else one(1, 1, 1)
    vpp = one(1, 2, 2, 3) if pp > 1 else one(1, 1, 1, 1)
    micro, m = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 4, 6, 7, 8, 12])
    m = m * pp if draw.random() < 0.7 else m
    recompute = draw.choice(list(Recompute))
    layout = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        vpp=vpp,
        cp=cp,
        ep=ep,
        etp=etp,
        sequence_parallel=draw.random() < (0.9 if tp > 1 and d.experts else 0.6 if tp > 1 else 0.05),
        micro_batch=micro,
        recompute=recompute,
        recompute_modules=_modules(draw, recompute),
        recompute_layers=draw.choice([0, 1, 2]) if recompute is Recompute.FULL else draw.choice([0] * 15 + [1]),
        microbatch_group=draw.choice([0, 0, pp, pp + 1, 2 * pp, 3]) if vpp > 1 else draw.choice([0] * 15 + [pp]),
        shard="optimizer" if draw.random() < 0.5 else "none",
    )
    layout = evolve(layout, overlaps=_overlaps(draw, layout))
    seq = 2 * cp * tp * draw.randint(1, 4) if draw.random() < 0.7 else draw.randint(1, 96)
    batch = dp * micro * m if draw.random() < 0.9 else dp * micro * m + draw.randint(1, 5)
    world = layout.world if draw.random() < 0.93 else draw.randint(1, WORLD)
    work = Workload(
        seq=seq, batch=batch, precision=draw.choice([Precision.BF16] * 18 + [Precision.FP16] * 2 + [Precision.FP32])
    )
    return Case(decoder=d, layout=layout, workload=work, world=world, rank=draw.randrange(WORLD))
