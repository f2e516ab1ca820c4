"""Losses are layers: their shapes, facts and sharding, what graphs know of them, and messages."""

from __future__ import annotations

import pytest
import torch
from attrs import field, frozen

from megaloom.dsl import (
    Attention,
    Classification,
    CrossEntropy,
    Dim,
    DType,
    Embed,
    Equals,
    Layer,
    LayerNorm,
    LogSumExp,
    MaskedToken,
    Model,
    NextToken,
    RMSNorm,
    ShapeError,
    Split,
    Sum,
    Unembed,
    Value,
    WeightedSum,
    apply,
    costs,
    fingerprint,
    fn,
    graph,
    ids,
    labels,
    loss_sums,
    mask,
    model,
    repeat,
    residual,
    token_weights,
    weight,
    weighted_sum,
    without_loss,
)
from megaloom.dsl.catalog import examples, find
from megaloom.planner.rules.capabilities import untrainable
from megaloom.runtime.reference.interpret import interpret
from tests.support.models.examples import example

VOCAB, EMBED = Dim("vocab", 12), Dim("embed", 8)
WTE = weight("wte", VOCAB, EMBED)
LOGITS = {"tokens": torch.arange(10).reshape(2, 5), "labels": torch.arange(10).reshape(2, 5).flip(1)}


def logits(causal: bool = True) -> Value:
    """Return the logits of a model of one block."""
    block = residual(RMSNorm(), Attention(heads=2, causal=causal))
    return ids() >> Embed(WTE) >> repeat(1, block) >> LayerNorm() >> Unembed(WTE)


def weights(m: Model) -> dict[str, torch.Tensor]:
    """Return random weights of a model."""
    source = torch.Generator().manual_seed(0)
    return {k: torch.randn([d.known for d in s.dims], generator=source) for k, s in graph(m).weights.items()}


def mean(m: Model, **batch: torch.Tensor) -> float:
    """Return the loss of a model by its body."""
    ((total, count),) = interpret(m, weights(m), LOGITS | batch)
    return float(total / count)


def test_every_example_ends_in_a_loss_and_its_logits_are_reachable() -> None:
    for name in examples():
        m = example(name)
        g = graph(m)
        (end,) = (g.nodes[g.index[name]] for name in g.outputs)
        assert end.is_loss
        assert "vocab" in g.nodes[g.index[g.predictions[0]]].shape
        assert not any(n.is_loss for n in graph(without_loss(m)).nodes)
        assert fingerprint(m) == fingerprint(without_loss(m))


def test_next_token_is_the_mean_cross_entropy() -> None:
    m = model("m", logits() >> NextToken())
    (x,) = interpret(without_loss(m), weights(m), LOGITS)
    want = torch.nn.functional.cross_entropy(x.flatten(0, 1), LOGITS["labels"].flatten())
    assert mean(m) == pytest.approx(want.item(), rel=1e-6)


def test_masks_and_weights_multiply() -> None:
    y = labels()
    m = model("m", logits() >> NextToken(y, mask=mask(), weights=token_weights()))
    keep = torch.tensor([[1, 1, 0, 0, 1], [0, 1, 1, 1, 0]]).bool()
    factor = torch.arange(10).reshape(2, 5).float()
    (x,) = interpret(without_loss(m), weights(m), LOGITS)
    each = torch.nn.functional.cross_entropy(x.movedim(-1, 1), LOGITS["labels"], reduction="none")
    want = (each * keep * factor).sum() / (keep * factor).sum()
    assert mean(m, mask=keep, weights=factor) == pytest.approx(want.item(), rel=1e-6)


def test_an_offset_predicts_further_ahead() -> None:
    m = model("m", logits() >> NextToken(offset=2))
    (x,) = interpret(without_loss(m), weights(m), LOGITS)
    want = torch.nn.functional.cross_entropy(x[:, :3].flatten(0, 1), LOGITS["labels"][:, 2:].flatten())
    assert mean(m) == pytest.approx(want.item(), rel=1e-6)


def test_several_losses_are_stacked() -> None:
    y = labels()
    x = logits()
    m = model("m", x >> WeightedSum((1.0, NextToken(y)), (0.5, NextToken(y, mask=mask()))))
    ((first, second),) = interpret(m, weights(m), LOGITS | {"mask": torch.ones(2, 5)})
    assert torch.equal(first, second)
    both = model("m", weighted_sum((1.0, x >> NextToken(y)), (0.5, x >> NextToken(y, mask=mask()))))
    ends = (graph(it).nodes[-1].value.source.op for it in (m, both))
    assert [op.coefficients for op in ends] == [(1.0, 0.5)] * 2  # type: ignore[attr-defined]


def test_ops_of_losses() -> None:
    x = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(1))
    y = LOGITS["labels"]
    given = Value(ids("x").op, (), logits().shape)
    total = apply(Sum(("vocab",)), fn("exp", given))
    cases = {
        "log-sum-exp": (apply(LogSumExp("vocab"), given), x.logsumexp(-1)),
        "sum": (apply(Sum(("vocab",)), given), x.sum(-1)),
        "equals": (apply(Equals(3), labels()), y == 3),
        "counted": (fn("add", apply(Equals(3), labels()), apply(Equals(3), labels())), 2.0 * (y == 3)),
        "quotient": (fn("exp", given) / total, x.softmax(-1)),
        "reciprocal": (2.0 / total, 2 / x.exp().sum(-1)),
        "logarithm": (fn("log", total), x.logsumexp(-1)),
    }
    found = interpret(model("m", *(value for value, _ in cases.values())), {}, {"x": x, "labels": y})
    for got, (_, want) in zip(found, cases.values(), strict=True):
        torch.testing.assert_close(got, want)


def test_inputs_of_one_name_and_shape_are_one_input() -> None:
    @frozen
    class AfterToken(Layer):
        tokens: Value = field(factory=ids)
        labels: Value = field(factory=labels)

        def body(self, x: Value, /, **side: Value) -> Value:
            return loss_sums(apply(CrossEntropy("vocab"), x, self.labels), apply(Equals(3), self.tokens))

    m = model("m", logits() >> WeightedSum((1.0, NextToken()), (0.5, AfterToken())))
    assert [n.name for n in graph(m).nodes if n.is_input] == ["tokens", "labels"]
    x, y = ids(), labels()
    block = residual(RMSNorm(), Attention(heads=2))
    out = x >> Embed(WTE) >> repeat(1, block) >> LayerNorm() >> Unembed(WTE)
    once = model("m", out >> WeightedSum((1.0, NextToken(y)), (0.5, AfterToken(x, y))))
    assert fingerprint(m) == fingerprint(once)
    with pytest.raises(ShapeError, match=r"two inputs are named 'labels', index \[batch seq\] and index \[batch\]"):
        graph(model("m", logits() >> NextToken(), labels(seq=None)))


@pytest.mark.parametrize(
    "split", [Split(), Split(tp=4), Split(tp=4, sequence_parallel=True), Split(cp=2, tp=2)], ids=str
)
def test_a_sharded_vocabulary_exchanges_three_numbers_a_token(split: Split) -> None:
    node = graph(model("m", logits() >> NextToken())).nodes[-1]
    facts = costs(node, batch=2, seq=16, split=split)
    tokens = 2 * 16 // split.cp
    found = [(c.kind, c.axis, c.elements, c.backward) for c in facts.collectives]
    assert found == [("all_reduce", "tp", tokens, False)] * (3 * (split.tp > 1))
    saved = {s.port: s.elements for s in facts.saved if s.dtype is not DType.INDEX}
    assert saved == {0: tokens * 12 // split.tp}


def test_labels_do_not_change_where_a_stage_may_begin() -> None:
    with_loss, without = (graph(m) for m in (find("gpt2")[0], without_loss(find("gpt2")[0])))
    assert with_loss.cut_points == without.cut_points
    assert [n.name for n in with_loss.nodes[: len(without.nodes)]] == [n.name for n in without.nodes]
    assert with_loss.only_for_losses == {"labels", "next_token.0"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: logits() >> NextToken(labels(seq=None)), r"labels \[batch\] do not fit logits"),
        (lambda: logits() >> NextToken(mask("y")), "labels of a cross-entropy must be ids"),
        (lambda: logits() >> Classification(), r"labels \[batch\] do not fit logits \[batch seq vocab=12\]"),
        (lambda: loss_sums(apply(LogSumExp("vocab"), logits()), logits()), "weights .* do not fit losses"),
        (lambda: apply(Equals(3), logits()), "needs ids, an input such as labels"),
        (lambda: apply(CrossEntropy("classes"), logits(), labels()), "has no dim 'classes'"),
        (lambda: weighted_sum((1.0, logits())), r"cannot add \[batch seq vocab=12\] to a sum of losses"),
        (lambda: logits() >> WeightedSum((1.0, NextToken)), "NextToken is a class, not a layer"),
    ],
)
def test_messages(make: object, message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        make()  # type: ignore[operator]


def test_next_token_needs_causal_attention() -> None:
    assert untrainable(graph(model("m", logits() >> NextToken()))) is None
    assert untrainable(graph(model("m", logits(causal=False) >> MaskedToken()))) is None
    message, fix = untrainable(graph(model("m", logits(causal=False) >> NextToken()))) or ("", "")
    assert message == (
        "attention.0 of m is not causal, so each position reads the token that next_token.0 asks it to predict"
    )
    assert fix == "set causal=True, or end the model in another loss, such as MaskedToken()"
    norms = apply(LogSumExp("vocab"), logits(causal=False))
    numbers = model("m", loss_sums(norms * token_weights()))  # predicts no token that the model reads
    assert untrainable(graph(numbers)) is None
    assert "not in a loss" in (untrainable(graph(model("m", logits()))) or "")[0]
