"""Steps of the user's own: values, log-probabilities and sums that do not depend on the layout, or are refused."""

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe, shard, token_log_probs
from megaloom.runtime.engine.own_sums import StepSums, check_names
from megaloom.runtime.megatron.process_groups import create_process_groups
from tests.support.models.examples import model_named
from tests.support.parity.layouts import Results, under_layouts
from tests.support.paths import TEST_MODELS

MODEL = f"{TEST_MODELS / 'scored.py'}:scored"
BATCH, SEQ, VOCAB, STEPS = 4, 32, 127, 2
LOGITS, SCORES, REPORTED = "softcap.0", "score.0", "declared loss"
RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
LAYOUTS = {
    "DP1": Layout(micro_batch=2),
    "TP2": Layout(tp=2, micro_batch=2, vocab_multiple=16),
    "TP2 SP": Layout(tp=2, sequence_parallel=True, micro_batch=2, vocab_multiple=128),
    "PP2": Layout(pp=2, micro_batch=2),
    "DP2": Layout(dp=2, micro_batch=2),
    "DP2 sharded weights": Layout(dp=2, micro_batch=2, shard="weights"),
    "CP2": Layout(cp=2, micro_batch=2),
    "CP2 TP2 SP": Layout(cp=2, tp=2, sequence_parallel=True, micro_batch=2, vocab_multiple=1),
}
GATHERS_SEQUENCES = ("CP2", "CP2 TP2 SP")


def rows(step: int) -> dict[str, Tensor]:
    """Return a global batch of pairs: rows 0 and 1, and rows 2 and 3, begin alike. `reference` is no input."""
    g = torch.Generator().manual_seed(step)
    text = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=g)
    text[1::2, :8] = text[0::2, :8]
    counted = torch.ones(BATCH, SEQ, dtype=torch.bool)
    counted[:, :7] = False
    counted[1::2, 20:] = False
    reference = torch.rand(BATCH, generator=g) - 130
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "mask": counted, "reference": reference}


def large_logits(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The declared loss and the squares of all logits, which are not small beside it."""
    logits = outputs.gathered(LOGITS)
    assert logits.shape[1:] == (SEQ, VOCAB)
    return outputs.loss_sum + 0.1 * logits.float().square().sum(), outputs.weight_sum


def key_tokens(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The mean loss of each sequence, which counts more the more of some tokens it has; with a report."""
    each = -token_log_probs(outputs, batch["labels"])
    weights = 1 + 0.25 * (batch["tokens"] < 40).float().sum(1)
    counted = batch["mask"].float()
    report = {
        REPORTED: ((each * counted).sum(), counted.sum()),
        "weight": torch.stack([weights.sum(), torch.tensor(float(len(weights)))]),  # as Megatron-LM's loss functions
        "never": (0.0, 0),
    }
    return (each.mean(1) * weights).sum(), torch.tensor(float(len(weights))), report


def key_tokens_by_torch(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sums of `key_tokens`, computed by torch functions of whole logits."""
    log_probs = torch.log_softmax(outputs.gathered(LOGITS).float(), -1)
    losses = -log_probs.gather(-1, batch["labels"][..., None])[..., 0].mean(1)
    weights = 1 + 0.25 * (batch["tokens"] < 40).float().sum(1)
    return (losses * weights).sum(), torch.tensor(float(len(losses)))


def key_tokens_by_megatron(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the sums of `key_tokens`, by megatron-core's function of this rank's columns of logits."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = outputs.values[LOGITS].float().contiguous()
    losses = vocab_parallel_cross_entropy(logits, batch["labels"].T.contiguous()).T.mean(1)
    weights = 1 + 0.25 * (batch["tokens"] < 40).float().sum(1)
    return (losses * weights).sum(), torch.tensor(float(len(losses)))


def preferences(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """DPO of the pairs, with the log-probabilities of a reference in the batch."""
    log_probs = (token_log_probs(outputs, batch["labels"]) * batch["mask"]).sum(1) - batch["reference"]
    losses = -torch.nn.functional.logsigmoid(0.1 * (log_probs[0::2] - log_probs[1::2]))
    return losses.sum(), torch.tensor(float(len(losses)))


def rewards(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The pairwise loss of the score of the last position that counts."""
    last = SEQ - 1 - batch["mask"].flip(1).long().argmax(1)
    scores = outputs.gathered(SCORES).gather(1, last[:, None])[:, 0]
    losses = -torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2])
    return losses.sum(), torch.tensor(float(len(losses)))


def terms(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The sums of the declared losses by their nodes, and a weight that counts whole sequences."""
    sums = outputs.gathered("next_token.0")[0] + 0.5 * outputs.gathered("square.0")[0]
    return sums, torch.tensor(float(batch["labels"].numel()))


KEY_TOKENS = (key_tokens, key_tokens_by_torch, key_tokens_by_megatron)
OBJECTIVES = {f.__name__: f for f in (large_logits, *KEY_TOKENS, preferences, rewards, terms)}
OF_PAIRS = ("preferences", "rewards")


class Objective:
    """The steps of one objective."""

    def __init__(self, name: str) -> None:
        self.sums = OBJECTIVES[name]

    def training_step(self, forward: Any, batch: dict[str, Tensor]) -> Any:
        outputs = forward(batch)
        return None if outputs is None else self.sums(outputs, batch)


def losses_of(plan: Plan) -> dict[str, list[float]]:
    """On each rank: losses and gradient norms of each objective, and the loss of an evaluation."""
    out = {}
    for name in OBJECTIVES:
        if name == "key_tokens_by_megatron" and plan.layout.cp > 1:
            continue
        engine = shard(model_named(plan.model), plan, RECIPE, steps=Objective(name))
        dp_rank, size = engine.groups.dp_rank, BATCH // plan.layout.dp
        own = [{k: x[dp_rank * size :][:size] for k, x in rows(step).items()} for step in range(STEPS)]
        steps = [engine.step(batch) for batch in own]
        out[name] = [value for r in steps for value in (r.loss, r.grad_norm)]
        held_out = engine.evaluate(own[:1], micro_batch=2 if name in OF_PAIRS else 1)
        out[name].append(held_out.loss)
        if name == "key_tokens":
            for r in (*steps, held_out):
                assert r.report[REPORTED] == pytest.approx(r.terms["next_token.0"], rel=1e-5)
                assert math.isnan(r.report["never"])
            out[name] += [r.report["weight"] for r in steps]
        else:
            assert not any(r.report for r in steps)
    return out


@pytest.fixture(scope="module")
def plans(plan_of: Any) -> dict[str, Plan]:
    return {name: plan_of(MODEL, layout, batch=BATCH, seq=SEQ) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def results(plans: dict[str, Plan]) -> Results:
    return under_layouts(losses_of, plans)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "DP1"])
def test_a_step_computes_under_a_layout_what_it_computes_in_one_process(layout: str, results: Results) -> None:
    expected = results["DP1"][0]
    for rank in results[layout]:
        assert rank.keys() == expected.keys() - ({"key_tokens_by_megatron"} if LAYOUTS[layout].cp > 1 else set())
        for objective, values in rank.items():
            assert values == pytest.approx(expected[objective], rel=1e-5), objective
            assert len(set(values)) == len(values)


def test_log_probabilities_are_those_of_torch_and_of_megatron_core(results: Results) -> None:
    ours, by_torch, by_megatron = (results["DP1"][0][f.__name__][: 2 * STEPS + 1] for f in KEY_TOKENS)
    assert ours == pytest.approx(by_torch, rel=1e-5)
    assert by_megatron == pytest.approx(by_torch, rel=1e-5)


class Returning:
    """A step that returns what a function makes of outputs and batch."""

    def __init__(self, sums: Any) -> None:
        self.sums = sums

    def training_step(self, forward: Any, batch: dict[str, Tensor]) -> Any:
        outputs = forward(batch)
        return None if outputs is None else self.sums(outputs, batch)


def own_columns(outputs: Any, batch: Any) -> Any:
    """Sum over this rank's columns alone."""
    return outputs.loss_sum + 0.1 * outputs.values[LOGITS][..., :8].square().sum(), outputs.weight_sum


def own_weight(outputs: Any, batch: Any) -> Any:
    """A weight of another size on each rank."""
    return outputs.loss_sum, outputs.weight_sum + torch.distributed.get_rank()


def own_report(outputs: Any, batch: Any) -> Any:
    """A report with another number on each rank."""
    return outputs.loss_sum, outputs.weight_sum, {"rank": (torch.distributed.get_rank(), 1)}


def of_labels(change: Any) -> Any:
    """A loss of changed labels."""
    return lambda outputs, batch: (
        token_log_probs(outputs, change(batch["labels"])).sum(),
        outputs.weight_sum,
    )


REFUSED = {
    "columns": own_columns,
    "weight": own_weight,
    "report": own_report,
    "ignored labels": of_labels(lambda labels: torch.where(labels < 60, -100, labels)),
    "half of the labels": of_labels(lambda labels: labels[:, : SEQ // 2]),
    "unknown": lambda outputs, batch: (outputs.gathered("unembed.7").sum(), outputs.weight_sum),
    "parts": lambda outputs, batch: (outputs.values[SCORES].sum(), outputs.weight_sum),
    "sums of a loss": lambda outputs, batch: tuple(outputs.values["next_token.0"]),
}


def refusals(plan: Plan) -> dict[str, str]:
    """On each rank: the message of each step that is refused."""
    out = {}
    batch = rows(0)
    for name, sums in REFUSED.items():
        engine = shard(model_named(plan.model), plan, RECIPE, steps=Returning(sums))
        try:
            engine.step(batch)
            out[name] = ""
        except UserError as error:
            out[name] = str(error)
    of_pairs = shard(model_named(plan.model), plan, RECIPE, steps=Objective("preferences"))
    with pytest.raises(UserError, match=r"nothing was evaluated: the weight_sum of all calls of .*_step is 0"):
        of_pairs.evaluate([batch])
    engine = shard(model_named(plan.model), plan, RECIPE)
    with pytest.raises(UserError) as raised:
        engine.step(batch)
    return {**out, "extra": str(raised.value)}


def test_what_depends_on_the_layout_is_refused(plans: dict[str, Plan]) -> None:
    found = under_layouts(refusals, {name: plans[name] for name in ("DP1", "TP2 SP", "CP2")})
    (one,), shards, parts = found.values()
    for rank in (one, *shards, *parts):
        assert rank["ignored labels"].startswith("labels have ids from -100 to ")
        assert rank["half of the labels"].startswith("labels have the shape [2, 16]: the logits softcap.0 need [2, 32]")
        assert rank["unknown"].startswith("a step has no output 'unembed.7': it has ")
        assert rank["extra"].startswith("a sample has reference; scored has the inputs tokens, labels, mask only\n")
    assert not (one["columns"] or one["weight"] or one["report"] or one["parts"] or one["sums of a loss"])
    assert not shards[0]["sums of a loss"]
    for rank in shards:
        assert "returned different sums on the tensor- and context-parallel ranks" in rank["columns"]
        assert rank["columns"] == shards[0]["columns"]
        assert ": weight_sum from " in rank["weight"]
        assert ": the sum of 'rank' from 0 to 1\n" in rank["report"]
        assert rank["parts"].startswith("this rank has only its part of score.0, which is sharded over tp\n")
    for rank in parts:
        assert (
            "has only its part of softcap.0, which is sharded over cp\noutputs.gathered('softcap.0')" in rank["columns"]
        )
        assert ": weight_sum from " in rank["weight"]
        assert rank["sums of a loss"].startswith("this rank has only its part of next_token.0")


ONE = torch.ones(())
MALFORMED = {
    "nothing": (
        None,
        "training_step returned nothing\nreturn (loss_sum, weight_sum), or (loss_sum, weight_sum, report)",
    ),
    "loss alone": (ONE, "returned a tensor of shape []\n"),
    "as Accelerate's": ((ONE, {"lm loss": ONE}), "returned {'lm loss': tensor(1.)} as weight_sum\n"),
    "not summed": ((torch.ones(3), ONE), "returned a tensor of shape [3] as loss_sum\n"),
    "a number": ((0.5, ONE), "returned 0.5 as loss_sum, which is no tensor and so has no gradient\n"),
    "no dict": ((ONE, 1, [ONE, ONE]), "as report\n"),
    "name": ((ONE, 1, {"a\nb": (1, 1)}), "a report with the name 'a\\nb', which is no line of text\n"),
    "a mean": (
        (ONE, 1, {"accuracy": 0.5}),
        "a report with 0.5 as 'accuracy'\ngive (sum, weight), such as (right, count)",
    ),
    "a tensor": ((ONE, 1, {"accuracy": torch.ones(3)}), "a report with a tensor of shape [3] as 'accuracy'\n"),
    "a pair of texts": ((ONE, 1, {"accuracy": ("a", 1)}), "a report with ('a', 1) as 'accuracy'\n"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_no_pair_of_sums_is_refused(case: str) -> None:
    value, message = MALFORMED[case]
    with pytest.raises(UserError) as raised:
        StepSums.of(Objective.training_step, value, torch.device("cpu"))
    assert message in str(raised.value)


def test_a_step_reports_the_same_names_for_each_micro_batch() -> None:
    with pytest.raises(UserError) as raised:
        check_names(Objective.training_step, ("accuracy",), ())
    assert str(raised.value) == (
        "Objective.training_step returned a report of 'accuracy', and before one of nothing\n"
        "return the same names for each micro-batch, with the weight 0 where there is nothing to count"
    )


def two_engines(plan: Plan) -> tuple[list[float], list[float], str]:
    """On each rank: losses of an engine alone, and beside another; and the refusal of one of another mesh."""
    model, batch = model_named(plan.model), rows(0)
    batch.pop("reference")
    share = BATCH // plan.layout.dp
    own = {k: x[:share] for k, x in batch.items()}
    alone = shard(model, plan, RECIPE)
    losses = [alone.step(own).loss for _ in range(3)]
    student, teacher = shard(model, plan, RECIPE), shard(model, plan, Recipe(seed=7))
    beside = []
    for _ in range(3):
        logits = teacher.logits(own)
        assert logits is None or not torch.equal(logits, student.logits(own) if plan.layout.pp == 1 else 0 * logits)
        beside.append(student.step(own).loss)
    other = evolve(plan, layout=evolve(plan.layout, tp=plan.layout.pp, pp=plan.layout.tp))
    with pytest.raises(UserError) as raised:
        create_process_groups(other.layout)
    return losses, beside, str(raised.value)


def test_a_process_has_several_engines_of_one_mesh(plans: dict[str, Plan]) -> None:
    for ranks in under_layouts(two_engines, {"PP2": plans["PP2"]}).values():
        for alone, beside, message in ranks:
            assert beside == alone
            assert message.startswith("this process has an engine of another device mesh: tp ")
