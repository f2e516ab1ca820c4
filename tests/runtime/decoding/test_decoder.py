"""Token by token, a decoder computes what the oracle computes on whole sequences, for each family and layout.

Rows of unequal lengths are written together, repeated and reordered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from attrs import frozen
from torch import Tensor

from megaloom.dsl import (
    AlongSequence,
    Attention,
    Decoding,
    Dim,
    DocumentIndices,
    Embed,
    Layer,
    Model,
    NextToken,
    PositionLookup,
    RMSNorm,
    Shape,
    Shift,
    Unembed,
    Value,
    WorkKind,
    apply,
    fn,
    graph,
    ids,
    model,
    packed,
    repeat,
    residual,
    weight,
)
from megaloom.dsl.graph import without_loss
from megaloom.dsl.hf.lora_targets import lora
from megaloom.examples.own_layer import TokenShift
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.launch import launcher
from megaloom.runtime.modules.initial_weights import initial_weight
from megaloom.runtime.ops import first_state, next_position, whole
from megaloom.runtime.ops.kv_cache import FixedState, OpState, Rows
from megaloom.runtime.ops.local_op import LocalOp
from megaloom.runtime.ops.registry import NextPosition
from megaloom.runtime.reference.interpret import interpret
from tests.support.limits import LIMIT
from tests.support.parity.families import FAMILIES, VOCAB

LENGTHS, SOURCES = (5, 2, 5, 11), (3, 6, 6, 4)
STEPS = 12 if torch.cuda.is_available() else 4  # on a GPU, steps become CUDA graphs before and after the reordering
REORDERED = (2, 0, 1, 1)  # rows after half of the steps


@frozen
class Difference:
    """The largest difference of logits from the oracle's, over their standard deviation."""

    family: str
    layout: str
    relative: float


def model_of(name: str) -> Model:
    return OTHERS[name]() if name in OTHERS else FAMILIES[name].make(0.0)


def own_layers() -> Model:
    """A model of layers of the user's own, which read earlier tokens."""
    d = Dim("embed", 24)
    wte, wpe = weight("wte", Dim("vocab", VOCAB), d), weight("wpe", Dim("position", 40), d)
    blocks = residual(RMSNorm(), TokenShift(36)) >> residual(RMSNorm(), PositionedAttention(4, wpe))
    return model("own-layers", ids() >> Embed(wte) >> repeat(2, blocks) >> Unembed(wte) >> NextToken())


@frozen
class PositionedAttention(Layer):
    """Attention with ALiBi in a window, after a function of learned positions two tokens before is added."""

    heads: int
    table: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        located = fn("tanh", apply(PositionLookup("position", 1), x, self.table) * x)
        y = x + 2.0 * apply(Shift("seq", -2), located)
        return y >> Attention(heads=self.heads, alibi=True, window=6)


@frozen
class RunningSum(AlongSequence):
    """An op of the user's own: the sum of all positions so far."""

    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY

    def shape(self, *args: Shape) -> Shape:
        return args[0]

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()

    def decoding(self, out: Value, along: str) -> Decoding:
        return Decoding(state=along == self.along)


@whole.register
def _(op: RunningSum, out: Value, *args: Tensor) -> Tensor:
    return args[0].cumsum(out.shape.names.index(op.along))


@first_state.register
def _(op: RunningSum, out: Value, args: tuple[Tensor, ...]) -> OpState:
    return FixedState(args[0].sum(1, keepdim=True))


@next_position.register
def _(op: RunningSum, here: LocalOp) -> NextPosition:
    def step(rows: Rows, state: OpState | None, args: tuple[Tensor, ...]) -> Tensor:
        assert isinstance(state, FixedState)
        state.write(state.values + args[0])
        return state.values

    return step


@frozen
class Sums(Layer):
    """A layer of `RunningSum`."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(RunningSum("seq"), fn("tanh", x))


def own_op() -> Model:
    """A model with an op of the user's own, which keeps a state."""
    wte = weight("wte", Dim("vocab", VOCAB), Dim("embed", 24))
    blocks = residual(RMSNorm(), Sums()) >> residual(RMSNorm(), Attention(heads=4))
    return model("own-op", ids() >> Embed(wte) >> repeat(2, blocks) >> Unembed(wte) >> NextToken())


OTHERS = {
    "own layers": own_layers,
    "own op": own_op,
    "packed": lambda: packed(FAMILIES["gpt2"].make(0.0)),
    "packed t5": lambda: packed(FAMILIES["t5"].make(0.0)),
    "packed bart": lambda: packed(FAMILIES["bart"].make(0.0)),
    "adapters": lambda: lora(FAMILIES["llama"].make(0.0), 3),
}


def weights_of(m: Model) -> dict[str, Tensor]:
    """Random weights; biases and scales are not constant."""
    out = {}
    for name, slot in graph(m).weights.items():
        torch.manual_seed(sum(map(ord, name)))
        x = initial_weight(slot, 7).read()
        out[name] = x + 0.1 * torch.randn_like(x)
    return out


def oracle(m: Model, weights: Mapping[str, Tensor], tokens: list[int], source: list[int]) -> Tensor:
    """The logits after the last token of one sequence, by evaluation of all its positions."""
    g = graph(m)
    inputs = {}
    for n in g.nodes:
        if n.is_input and n.name not in g.only_for_losses:
            given = torch.tensor([source if "source" in n.shape else tokens])
            inputs[n.name] = torch.zeros_like(given) if isinstance(n.op, DocumentIndices) else given
    (logits, *_) = interpret(without_loss(m), weights, inputs)
    return logits[0, -1]


def differences(cases: list[tuple[str, int, int]]) -> list[Difference]:
    """On each rank: write tokens under tp and pp, and compare logits on the rank that has them."""
    from megatron.core import parallel_state

    from megaloom.runtime.generation.generate import generate_on_rank  # noqa: F401 (prepares megatron-core)

    out = []
    for name, tp, pp in cases:
        found = difference(name, tp, pp)
        if found is not None:
            out.append(Difference(name, f"tp{tp} pp{pp}", found))
        parallel_state.destroy_model_parallel()
    return out


def difference(name: str, tp: int, pp: int) -> float | None:
    from megaloom.runtime.decoding.decoder import Decoder
    from megaloom.runtime.decoding.decoding_graph import check_decoding, decoding_graph, first_after_mixing
    from megaloom.runtime.decoding.decoding_layout import generation_layout, stage_bounds
    from megaloom.runtime.generation.batches import Prompt, prefill_batch
    from megaloom.runtime.megatron import device
    from megaloom.runtime.megatron.process_groups import create_process_groups

    m = model_of(name)
    weights, layout = weights_of(m), generation_layout(tp, pp)
    g, groups = decoding_graph(graph(m)), create_process_groups(layout)
    check_decoding(g)
    bounds = stage_bounds(g, layout)
    decoder = Decoder.build(g, bounds, first_after_mixing(g), groups, Precision.FP32, weights)
    torch.manual_seed(1)
    written = [torch.randint(VOCAB, (n,)).tolist() for n in LENGTHS]
    sources = [torch.randint(VOCAB, (n,)).tolist() if g.source else [] for n in SOURCES]
    prompts = [Prompt(tuple(t), tuple(s) if g.source else None) for t, s in zip(written, sources, strict=True)]
    worst = 0.0
    with torch.no_grad():
        logits, rows = prefill_batch(decoder, prompts, 1)
        for step in range(STEPS):
            if logits is not None:
                expected = torch.stack([oracle(m, weights, t, s) for t, s in zip(written, sources, strict=True)])
                worst = max(worst, float((logits.cpu() - expected).abs().max() / expected.std()))
            if step == STEPS // 2:
                rows = rows.select(torch.tensor(REORDERED, device=device.current()))
                written, sources = [list(written[i]) for i in REORDERED], [sources[i] for i in REORDERED]
            new = torch.randint(VOCAB, (len(LENGTHS),))
            for t, token in zip(written, new.tolist(), strict=True):
                t.append(token)
            logits = decoder.step(new, rows)
    return worst if logits is not None else None


WRITERS = [*OTHERS, *(name for name in FAMILIES if not name.startswith(("bert", "vit", "llava")))]


def test_each_family_goes_on_token_by_token() -> None:
    (found,) = launcher.run(differences, ([(name, 1, 1) for name in WRITERS],), 1, timeout=LIMIT)
    assert len(found) == len(WRITERS)
    assert not [x for x in found if not x.relative < 1e-4]


LAYOUTS = [
    *((name, 2, 2) for name in ("gpt-oss", "deepseek-v3", "nemotron-h", "qwen3-next", "gemma2", "bart")),
    ("t5", 1, 4),
    ("bloom", 4, 1),
    ("own layers", 2, 2),
    ("own op", 2, 2),
    ("adapters", 2, 2),
]


def test_each_layout_goes_on_token_by_token() -> None:
    ranks = launcher.run(differences, (LAYOUTS,), 4, timeout=LIMIT)
    assert len(ranks[-1]) == len(LAYOUTS)
    assert not [x for found in ranks for x in found if not x.relative < 1e-4]
