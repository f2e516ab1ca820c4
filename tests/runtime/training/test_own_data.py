"""Data in a loop of the user's own: the reader of --data, a DataLoader divided over dp, Megatron's batches, gathers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, default_collate

from megaloom.dsl import Model
from megaloom.dsl.errors import UserError
from megaloom.dsl.hf.conversations import for_conversations
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import DataReader, EndOfDocument, Recipe, read_data, shard, shard_loader
from megaloom.runtime.data.preprocess import preprocess
from megaloom.runtime.data.preprocess_options import Preprocessing
from megaloom.runtime.training.check import check_run
from megaloom.runtime.training.loop import train_on_rank
from megaloom.runtime.training.prepare import prepare_run
from megaloom.runtime.training.run_options import RunOptions
from megaloom.runtime.training.training_run import TrainingRun
from tests.support.models.examples import model_named
from tests.support.models.small import byte_gpt
from tests.support.parity.layouts import Results, under_layouts

RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
ENDS = EndOfDocument(reset_position_ids=True, reset_attention_mask=True, eod_mask_loss=True)
LAYOUTS = {
    "one": Layout(),
    "DP2 TP2": Layout(dp=2, tp=2, sequence_parallel=True),
    "PP2": Layout(pp=2),
}
BATCH, ROWS = 4, 10


def packed_gpt() -> Model:
    return for_conversations(byte_gpt())


class Stream(IterableDataset[Any]):
    """Rows that have no length."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


class Fixed(Sampler[int]):
    """A sampler without a generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))

    def __len__(self) -> int:
        return ROWS


def as_megatron(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of the packed model as Megatron-LM's loader makes it."""
    documents = batch["documents"]
    reads = (documents[:, None, :, None] == documents[:, None, None]).tril()
    starts = torch.cat([torch.ones_like(documents[:, :1]), documents.diff()], 1).bool()
    at = torch.arange(documents.shape[1]).expand_as(documents)
    positions = at - at.where(starts, 0).cummax(1).values
    masks = {"attention_mask": ~reads, "position_ids": positions, "loss_mask": batch["mask"].float()}
    return {"tokens": batch["tokens"], "labels": batch["labels"], **masks}


def drawn(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate rows, and draw what is counted: other ranks would draw other numbers."""
    batch = default_collate(rows)
    return {**batch, "mask": batch["mask"] & (torch.rand(batch["mask"].shape) < 0.5)}


def refusal(call: Any) -> str:
    """Return the message with which a call is refused."""
    with pytest.raises(UserError) as raised:
        call()
    return str(raised.value)


def losses_of_run(run: TrainingRun, plan: Plan) -> tuple[list[float], list[float]]:
    """Return the losses of the steps of a run and of its evaluation, and those of an own loop over its data."""
    held_out = train_on_rank(run).held_out
    assert held_out
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    engine = shard(model_named(plan.model), plan, run.recipe)
    data = read_data(engine, [str(run.corpus.train.ranges[0].dataset.prefix)], split="80,15,5", ends=ENDS)
    own = [engine.step(batch).loss for batch in islice(data.training(), run.recipe.steps)]
    return (
        [*(line["loss"] for line in lines if line["event"] == "step"), held_out.loss],
        [*own, engine.evaluate(data.validation()).loss],
    )


def own_data(prefix: str, run: TrainingRun, plan: Plan) -> dict[str, Any]:
    """On each rank: losses of data that are read, batches of loaders, what is gathered, and what is refused."""
    engine = shard(model_named(plan.model), plan, RECIPE)
    groups, out = engine.groups, dict[str, Any]()
    first = groups.tp_rank == groups.cp_rank == groups.pp_rank == 0
    data = read_data(engine, prefix, split="80,15,5", ends=ENDS)
    batches = list(islice(data.training(), 3))
    (again,) = islice(data.training(step=2), 1)
    out["resumes"] = all(torch.equal(x, batches[2][name]) for name, x in again.items())
    out["losses"] = [engine.evaluate([batch]).loss for batch in batches]
    megatron = [as_megatron(batch) for batch in batches]
    out["megatron"] = [engine.evaluate([batch] if first else None).loss for batch in megatron]
    out["held out"] = [engine.evaluate(data.validation()).loss, engine.evaluate(data.test(1)).loss, data.sizes]
    samples = [{name: x[0] for name, x in as_megatron(default_collate([data.sample(i)])).items()} for i in range(BATCH)]
    out["steps"] = [engine.step(samples.__getitem__).loss, engine.step(megatron[1] if first else {}).loss]
    logits = engine.logits(batches[0])
    whole = engine.gathered_over_dp(logits)
    out["gathered"] = None if whole is None else (list(whole.shape), float(whole.sum()))
    own = torch.full((1 + groups.dp_rank,), float(groups.dp_rank))
    joined = engine.gathered_over_dp(own)
    out["uneven"] = None if joined is None else joined.tolist()
    few = DataLoader([data.sample(i) for i in range(ROWS)], batch_size=3) if first else None
    out["losses"] += [engine.evaluate(shard_loader(engine, few, evaluates=True)).loss]
    rows = [{**data.sample(i), "number": torch.tensor(i)} for i in range(ROWS)]
    out["loaders"] = loaders(engine, rows, first)
    out["refused"] = refusals(engine, data, rows, first)
    out["run"] = losses_of_run(run, plan) if plan.layout.world == 1 else None
    return out


def loaders(engine: Any, rows: list[dict[str, Tensor]], first: bool) -> dict[str, Any]:
    """Return the numbers of the rows that this rank gets of loaders, and digests of drawn masks."""

    def given(data: Any, **options: Any) -> Any:
        return DataLoader(data, collate_fn=drawn, **options) if first else None

    share = BATCH // engine.plan.layout.dp
    mixed = shard_loader(engine, given(rows, batch_size=BATCH, shuffle=True, drop_last=True))
    epochs = [list(mixed), list(mixed)]
    later = list(islice(mixed.from_step(3), 2))
    ordered = list(shard_loader(engine, given(rows, batch_size=share, drop_last=True)))
    stream = list(shard_loader(engine, given(Stream(rows), batch_size=BATCH, drop_last=True, num_workers=0)))
    held_out = list(shard_loader(engine, given(rows, batch_size=2), evaluates=True))
    numbers = {"mixed": epochs[0] + epochs[1], "later": later, "ordered": ordered, "stream": stream}
    found = {name: [b["number"].tolist() for b in some] for name, some in {**numbers, "held out": held_out}.items()}
    return {**found, "drawn": [int((b["mask"] * torch.arange(32)).sum()) for b in ordered], "length": len(mixed)}


def refusals(engine: Any, data: Any, rows: list[Any], first: bool) -> list[str]:
    """Return the refusals of loaders that cannot be divided, and of data that are not there."""

    def wrong(*arguments: Any, **options: Any) -> str:
        loader = DataLoader(*arguments, **options) if first else None
        return refusal(lambda: shard_loader(engine, loader))

    uneven = shard_loader(engine, DataLoader(Stream(rows), batch_size=BATCH) if first else None)
    prefix = str(data.corpus.train.ranges[0].dataset.prefix)
    return [
        wrong(rows, batch_size=3, drop_last=True),
        wrong(rows, batch_size=BATCH),
        wrong(rows[:3], batch_size=BATCH),
        wrong(rows, batch_size=BATCH, sampler=Fixed(), drop_last=True),
        wrong(rows, batch_size=None),
        wrong(rows, batch_size=BATCH, sampler=DistributedSampler(rows, 2, 0)),
        wrong(Stream(rows), batch_size=BATCH, num_workers=2),
        refusal(lambda: shard_loader(engine, None)),
        refusal(lambda: list(uneven)),
        refusal(lambda: next(uneven.from_step(1))),
        refusal(lambda: data.validation(0)),
        refusal(lambda: engine.gathered_over_dp(torch.zeros(()))),
        refusal(lambda: read_data(engine, "stdlib")),
        refusal(lambda: read_data(engine, prefix, ends=evolve(ENDS, eod_token=255))),
        refusal(lambda: read_data(engine, prefix, split="100", ends=ENDS).test()),
    ]


REFUSED = (
    "the loader has batch_size=3\ngive 4, the batch of the plan",
    "the loader has 10 rows, so its last batch has 2, and a step needs 4\ngive DataLoader(…, drop_last=True)",
    "the loader has 3 rows, fewer than the batch of the plan, 4\n",
    "the loader's sampler Fixed has no generator, so its order may differ between ranks\ngive shuffle=True, or",
    "the loader makes batches by a sampler of its own\n",
    "the loader has a DistributedSampler, so it is divided already\n",
    "the loader of an IterableDataset has 2 workers, each of which reads all of it\n",
    "there is no loader: the first rank of each data-parallel rank",
    "the last batch of the loader has 2 rows, and a step needs 4\ngive DataLoader(…, drop_last=True)",
    "a loader of an IterableDataset cannot begin at a step: it has no length\n",
    "batches must be at least 1, got 0",
    "data-parallel ranks have tensors that cannot be joined: torch.float32 []",
    "stdlib is copied before it is read, and there is no folder for it\ngive read_data(…, folder=RUN)",
    "--eod-mask-loss: the training text has no end-of-document token 255\nmake the data with --append-eos",
    "the test part of --split 100 is empty\n",
)


@pytest.fixture(scope="module")
def results(plan_of: Any, tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("data")
    texts = ["".join(chr(97 + (i * k) % 23) for k in range(9 + 5 * (i % 7))) for i in range(120)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    source = (str(folder / "texts.jsonl"),)
    preprocess(
        Preprocessing(sources=source, prefix=folder / "texts", tokenizer="bytes", append_eos=True),
        lambda text, done, total: None,
    )
    plans = {name: plan_of(f"{__file__}:packed_gpt", layout, batch=BATCH) for name, layout in LAYOUTS.items()}
    recipe = evolve(RECIPE, steps=2)
    options = RunOptions(recipe=recipe, ends=ENDS).changed(data=str(folder / "texts"), split="80,15,5")
    options = options.changed(out=folder / "run", save_every=2, evaluate_every=2, evaluate_all=True)
    run = prepare_run(plans["one"], options, check_run(plans["one"], options))
    return under_layouts(partial(own_data, str(folder / "texts"), run), plans)


def test_a_run_with_the_options_reads_the_same_samples(results: Results) -> None:
    trained, own = results["one"][0]["run"]
    assert trained == pytest.approx(own, abs=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_one_process(layout: str, results: Results) -> None:
    one = results["one"][0]
    for rank in results[layout]:
        assert rank["resumes"]
        for name in ("losses", "megatron", "steps"):
            assert rank[name] == pytest.approx(one[name], abs=1e-5)
        assert rank["megatron"] == pytest.approx(rank["losses"][:3], abs=1e-6)
        assert rank["held out"][:2] == pytest.approx(one["held out"][:2], abs=1e-5)
        assert rank["held out"][2] == one["held out"][2]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_loaders_give_each_data_parallel_rank_its_rows(layout: str, results: Results) -> None:
    dp, ranks = LAYOUTS[layout].dp, [rank["loaders"] for rank in results[layout]]
    order = [torch.randperm(ROWS, generator=torch.Generator().manual_seed(RECIPE.seed + k)).tolist() for k in (0, 1, 2)]
    batches = [epoch[i : i + BATCH] for epoch in order for i in (0, BATCH)]
    plain = [[*range(BATCH)], [*range(BATCH, 2 * BATCH)]]
    per_rank = len(ranks) // dp  # ranks of one data-parallel rank follow one another
    for r, rank in enumerate(ranks):
        own, of_dp = r // per_rank, ranks[r - r % per_rank]
        assert rank == of_dp
        assert rank["mixed"] == [batch[own::dp] for batch in batches[:4]]
        assert rank["later"] == [batch[own::dp] for batch in batches[3:5]]
        assert rank["ordered"] == rank["stream"] == [batch[own::dp] for batch in plain]
        assert [*chain(*rank["held out"])] == [*range(own, ROWS, dp)]
        assert rank["length"] == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_are_gathered_and_wrong_loaders_refused(layout: str, results: Results) -> None:
    dp, pp, one = LAYOUTS[layout].dp, LAYOUTS[layout].pp, results["one"][0]
    whole = [rank["gathered"] for rank in results[layout] if rank["gathered"] is not None]
    assert len(whole) == len(results[layout]) // pp
    for shape, total in whole:
        assert shape == one["gathered"][0]
        assert total == pytest.approx(one["gathered"][1], rel=1e-5)
    for rank in results[layout]:
        assert rank["uneven"] == [float(r) for r in range(dp) for _ in range(1 + r)]
        for found, words in zip(rank["refused"], REFUSED, strict=True):
            assert words in found


def test_a_batch_that_grows_is_read_by_number() -> None:
    engine: Any = SimpleNamespace(plan=None, recipe=evolve(RECIPE, rampup_batch=4, rampup_samples=8))
    reader: Any = DataReader(engine, *(None,) * 3)  # type: ignore[arg-type]
    assert refusal(reader.training).startswith("rampup_batch=4 of the recipe: batches of an iterator are those of")
