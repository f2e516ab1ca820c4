"""One batch for all ranks of a data-parallel rank: that of the first, where others pass none; others are refused."""

import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe, shard
from megaloom.runtime.engine.shared_batches import COMPARED_EVERY, COMPARED_FIRST, RepeatedRows
from tests.support.batches import next_token, random_text
from tests.support.models.examples import model_named
from tests.support.parity.layouts import Results, under_layouts

BATCH, SEQ = 4, 32
RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
LAYOUTS = {
    "TP2": Layout(tp=2, sequence_parallel=True),
    "PP2": Layout(pp=2),
    "CP2": Layout(cp=2),
    "DP2 TP2": Layout(dp=2, tp=2, sequence_parallel=True),
    "DP2": Layout(dp=2),
}
SHARED = [name for name in LAYOUTS if name != "DP2"]


def rows(step: int, dp_rank: int, dp: int) -> dict[str, Tensor]:
    """Return the rows of one data-parallel rank of a step."""
    own = range(dp_rank * BATCH // dp, (dp_rank + 1) * BATCH // dp)
    return next_token(torch.stack([random_text(100 * step + i, 127, SEQ) for i in own]))


def refusal(call: Any) -> str:
    """Return the message with which a call is refused."""
    with pytest.raises(UserError) as raised:
        call()
    return str(raised.value)


def refusals_of_kinds(engine: Any, batch: dict[str, Tensor], first: bool) -> list[str]:
    """Return the refusals of functions and counts that are wrong, or that ranks do not share."""

    def sample(i: int) -> dict[str, Tensor]:
        return {name: x[i % len(x)] for name, x in batch.items()}

    return [
        refusal(lambda: engine.step(sample if first else None)),
        refusal(lambda: engine.gradients(batch if first else sample)),
        refusal(lambda: engine.step(sample, BATCH if first else 2 * BATCH)),
        refusal(lambda: engine.step(sample, None if first else 0)),
        refusal(lambda: engine.step(sample, 1.5)),
        refusal(lambda: engine.step(batch, BATCH)),
        refusal(lambda: engine.evaluate([sample] if first else None)),
    ]


def told(call: Any) -> list[str]:
    """Return the warnings that a call gives of repeated rows."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in found if w.category is RepeatedRows]


def loop(plan: Plan) -> dict[str, Any]:
    """On each rank: what follows from equal batches, from none, and from other batches."""
    out: dict[str, Any] = {}
    groups = None
    for given in ("all", "None", "{}"):
        engine = shard(model_named(plan.model), plan, RECIPE)
        groups = engine.groups
        others = {"all": True, "None": None, "{}": {}}[given]

        def own(step: int, groups: Any = groups, others: Any = others) -> Any:
            has = others is True or groups.tp_rank == groups.cp_rank == groups.pp_rank == 0
            return rows(step, groups.dp_rank, plan.layout.dp) if has else others

        losses = [engine.step(own(step)).loss for step in range(COMPARED_FIRST + 2)]
        logits = engine.logits(own(0))
        losses += [engine.evaluate([own(0), own(1)] if own(0) else None).loss]
        out[given] = (losses, None if logits is None else float(logits.sum()))
    first = groups.tp_rank == groups.cp_rank == groups.pp_rank == 0
    mine, other = rows(7, groups.dp_rank, plan.layout.dp), rows(8, groups.dp_rank, plan.layout.dp)
    other = {"tokens": mine["tokens"], "labels": other["labels"]}
    engine.shared.calls = COMPARED_EVERY
    out["differ"] = [refusal(lambda: engine.step(mine if first else other))]
    engine.shared.calls = COMPARED_EVERY
    out["differ"] += [refusal(lambda: engine.evaluate([mine if first else other]))]
    out["first has none"] = refusal(lambda: engine.step(None if first else mine))
    out["nobody has one"] = refusal(lambda: engine.step({}))
    out["kinds"] = refusals_of_kinds(engine, mine, first)
    out["goes on"] = engine.step(mine).loss
    return out


def repeated(plan: Plan) -> list[list[str]]:
    """On each rank: the warnings of three steps, of which the last two have equal rows on all data-parallel ranks."""
    engine = shard(model_named(plan.model), plan, RECIPE)
    share = BATCH // plan.layout.dp
    other, equal = rows(0, engine.groups.dp_rank, plan.layout.dp), rows(0, 0, plan.layout.dp)
    assert len(equal["tokens"]) == share
    return [told(lambda batch=batch: engine.step(batch)) for batch in (other, equal, equal)]  # type: ignore[misc]


@pytest.fixture(scope="module")
def plans(plan_of: Any) -> dict[str, Plan]:
    return {name: plan_of("tiny_llama", layout) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def results(plans: dict[str, Plan]) -> Results:
    return under_layouts(loop, {name: plans[name] for name in SHARED})


@pytest.mark.parametrize("layout", SHARED)
def test_ranks_without_a_batch_get_that_of_the_first(layout: str, results: Results) -> None:
    for rank in results[layout]:
        assert rank["None"] == rank["{}"] == rank["all"]
        assert rank["all"][0] == results[layout][0]["all"][0]


@pytest.mark.parametrize("layout", SHARED)
def test_other_batches_are_refused_on_all_ranks(layout: str, results: Results) -> None:
    ranks = results[layout]
    for kind in ("differ", "goes on"):
        assert all(rank[kind] == ranks[0][kind] for rank in ranks)
    for rank in ranks:
        mixed, others, counts, none, half, beside, evaluated = rank["kinds"]
        assert re.match(r"rank 1 \(.*\) differs from rank 0 \(.*\): batch is tensors or None, not a function\n", mixed)
        assert ": batch is a function, not tensors or None\n" in others
        assert f": count is {2 * BATCH}, not {BATCH}\n" in counts
        assert "count is 0: it must be a whole number, at least 1\n" in none
        assert half.startswith("count is 1.5: it must be a whole number, ")
        assert beside.startswith(f"count is {BATCH}, but the batch is no function from i to sample i")
        assert "a batch of an evaluation or of logits is tensors, not a function" in evaluated
    step, evaluation = ranks[0]["differ"]
    assert step == evaluation
    assert " has another batch than rank 0 (" in step
    assert "data-parallel rank 0: labels differs\n" in step
    assert "has a batch that the first of them does not have\n" in ranks[0]["first has none"]
    assert "data-parallel rank 0 has no batch: its first rank passed None" in ranks[0]["nobody has one"]


def test_rows_that_data_parallel_ranks_repeat_are_told_once(plans: dict[str, Plan]) -> None:
    found = under_layouts(repeated, {name: plans[name] for name in ("DP2", "DP2 TP2")})
    for first, *others in found.values():
        assert [len(messages) for messages in first] == [0, 1, 0]
        assert first[1][0].startswith(
            "data-parallel ranks 0, 1 have the same batch, so a step trains on each of its rows 2"
        )
        assert others == [[[], [], []]] * len(others)
