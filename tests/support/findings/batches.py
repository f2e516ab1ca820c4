"""Findings on batches that ranks pass, and on steps of the user's own."""

from __future__ import annotations

import warnings
from math import prod
from pathlib import Path
from typing import Any

import torch

from megaloom.dsl import graph, model, without_loss
from megaloom.dsl.catalog import find
from megaloom.dsl.errors import UserError
from megaloom.examples.scripts.key_tokens import KeyTokenLoss
from megaloom.planner import Plan, Precision, Workload, cluster, plan
from megaloom.runtime import Recipe, shard, token_log_probs
from megaloom.runtime.launch import launcher
from tests.support.findings.finding import Verdict, finding, megaloom, passes
from tests.support.findings.finding import plan as plan_command
from tests.support.paths import ROOT, TEST_MODELS

SCORED = f"{TEST_MODELS / 'scored.py'}:scored"
SEQ, BATCH, VOCAB = 32, 4, 127
RECIPE = Recipe(steps=5, lr=1e-3, warmup=0)
WORLDS: tuple[dict[str, int], ...] = ({"dp": 1}, {"pp": 2}, {"tp": 2}, {"dp": 2}, {"cp": 2})


def ranks(run: Any, *arguments: Any, ref: str = SCORED, **fixed: int) -> list[Any]:
    """Return what a function of a plan returns on each rank."""
    count = prod(fixed.values())
    workload = Workload(seq=SEQ, batch=BATCH, precision=Precision.FP32)
    found = plan(
        find(ref)[0], cluster(f"{count}xCPU"), workload, ref=ref, fixed={"micro_batch": min(2, BATCH // 2), **fixed}
    )
    return launcher.run(run, (found.best, *arguments), count, timeout=120)


def rows(made: Plan, dp_rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the rows of a data-parallel rank."""
    text = torch.randint(VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(seed))
    counted = torch.ones(BATCH, SEQ, dtype=torch.bool)
    counted[1::2, 20:] = False
    share = BATCH // made.layout.dp
    whole = {"tokens": text[:, :-1], "labels": text[:, 1:], "mask": counted}
    return {name: x[dp_rank * share :][:share] for name, x in whole.items()}


class Own:
    """Steps with the sums of one function."""

    def __init__(self, sums: Any) -> None:
        self.sums = sums

    def training_step(self, forward: Any, batch: dict[str, torch.Tensor]) -> Any:
        outputs = forward(batch)
        return None if outputs is None else self.sums(outputs, batch)


def loss_of(made: Plan, sums: Any, extra: dict[str, torch.Tensor]) -> float | str:
    """On each rank: the loss of a second step, or the message with which it is refused."""
    engine = shard(find(made.model)[0], made, RECIPE, steps=Own(sums))
    try:
        return [engine.step(rows(made, engine.groups.dp_rank, s) | extra).loss for s in (0, 1)][1]
    except UserError as error:
        return str(error)


def equal_losses(sums: Any, *worlds: dict[str, int], **extra: torch.Tensor) -> str:
    """Assert that steps have the same loss in all worlds, and return them."""
    losses = [ranks(loss_of, sums, extra, **world)[-1] for world in worlds]
    assert all(isinstance(x, float) and abs(x - losses[0]) < 1e-5 * losses[0] for x in losses), losses
    return f"{losses[0]:.5f} on " + ", ".join(" ".join(f"{k}{n}" for k, n in world.items()) for world in worlds)


def random_per_rank(made: Plan, kind: str) -> list[str]:
    """On each rank: what a step says of other tokens on each rank, or of ranks that pass nothing."""
    engine = shard(find(made.model)[0], made, RECIPE)
    first = torch.distributed.get_rank() == 0
    batch: Any = {"other": rows(made, 0, seed=7 * (not first)), "none": rows(made, 0) if first else {}}[kind]
    try:
        return [f"loss {engine.step(batch).loss:.5f}"]
    except UserError as error:
        return [str(error)]


def unsharded_loader(made: Plan) -> list[str]:
    """On each rank: the warnings of a step on rows of a DataLoader that knows of no ranks."""
    engine = shard(find(made.model)[0], made, RECIPE)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            engine.step({k: x[:2] for k, x in rows(made, 0).items()})
    return [str(w.message) for w in found if w.category.__name__ == "RepeatedRows"]


@finding("spotcheck N3", "Ranks of one data-parallel rank train on different batches", Verdict.MENDED)
def different_batches(folder: Path) -> str:
    for fixed in ({"tp": 2}, {"pp": 2}, {"cp": 2}):
        other = ranks(random_per_rank, "other", **fixed)
        assert other[0] == other[1] and "has another batch than rank 0" in other[0][0], other
        none, alone = ranks(random_per_rank, "none", **fixed), ranks(random_per_rank, "none", dp=1)
        assert none[0] == none[1] and abs(float(none[0][0][5:]) - float(alone[0][0][5:])) < 2e-5, (none, alone)
    said, others = ranks(unsharded_loader, dp=2)
    assert len(said) == 1 and not others and "DistributedSampler" in said[0]
    return f"{other[0][0].splitlines()[0]}; with {{}}: {none[0][0]}"


def own_columns(outputs: Any, batch: Any) -> Any:
    """A sum over this rank's columns alone."""
    return outputs.loss_sum + 0.01 * outputs.values["unembed.0"].float()[..., :8].square().sum(), outputs.weight_sum


def all_columns(outputs: Any, batch: Any) -> Any:
    """A sum over the whole logits."""
    return outputs.loss_sum + 0.01 * outputs.gathered("unembed.0").float().square().sum(), outputs.weight_sum


@finding("spotcheck N4", "The loss that a step of one's own reports depends on the layout", Verdict.MENDED)
def squares_of_logits(folder: Path) -> str:
    llama = f"{TEST_MODELS / 'small.py'}:byte_llama"
    losses = [ranks(plain_loss, all_columns, ref=llama, **world)[-1] for world in WORLDS]
    assert max(losses) - min(losses) < 1e-5 * losses[0], losses
    refused = ranks(plain_loss, own_columns, ref=llama, tp=2)
    assert "returned different sums" in refused[0] and refused[0] == refused[1], refused
    return f"{losses[0]:.5f} under five layouts; a sum over one rank's columns is refused"


def plain_loss(made: Plan, sums: Any) -> float | str:
    """On each rank: the loss of a step without a mask, or the message with which it is refused."""
    engine = shard(find(made.model)[0], made, RECIPE, steps=Own(sums))
    batch = rows(made, engine.groups.dp_rank)
    try:
        return engine.step({name: batch[name] for name in ("tokens", "labels")}).loss
    except UserError as error:
        return str(error)


@finding("spotcheck N5a", "No page says how to reach the ids of a model that is read", Verdict.MENDED)
def reach_inputs(folder: Path) -> str:
    tuned = graph(model("tuned", without_loss(find("gpt2")[0]).outputs[0] >> KeyTokenLoss()))
    assert [n.name for n in tuned.nodes if n.is_input] == ["tokens", "labels", "mask"]
    guide = (ROOT / "docs/guide/losses.md").read_text()
    assert "`ids()` here is the model's own" in guide and 'graph(published).value("types")' in guide
    return "a loss creates ids() again, which is the model's own input; others by graph(m).value, in losses.md"


@finding("spotcheck N5c", "The key-token loss cannot divide the loss of a sequence by its mask", Verdict.MENDED)
def quotient_of_values(folder: Path) -> str:
    script = ROOT / "examples/scripts/key_tokens.py"
    size = ("--seq", "32", "--batch", "4", "--precision", "fp32")
    layout = ("--gpus", "4xCPU", "--tp", "2", "--cp", "2")
    passes(plan_command(folder, f"{script}:with_key_tokens", *layout, *size, "-o", "p.json"))
    return passes(megaloom(folder, "verify", "p.json"), "passed: losses differ by at most")


def key_tokens_of_megatron(outputs: Any, batch: Any) -> Any:
    """The loss of features D9: megatron-core's cross-entropy of this rank's columns, weighted by key tokens."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = outputs.values["softcap.0"].float().contiguous()
    losses = vocab_parallel_cross_entropy(logits, batch["labels"].T.contiguous()).T.mean(1)
    return (losses * key_weights(batch)).sum(), torch.tensor(float(len(losses)))


def key_tokens(outputs: Any, batch: Any) -> Any:
    """That loss by `token_log_probs`."""
    losses = -token_log_probs(outputs, batch["labels"]).mean(1)
    return (losses * key_weights(batch)).sum(), torch.tensor(float(len(losses)))


def key_weights(batch: Any) -> torch.Tensor:
    return 1 + 0.25 * torch.stack([batch["tokens"] == k for k in (65, 66, 101)]).float().sum((0, 2))


@finding("features D9", "megatron-core's cross-entropy is wrong on unequal shards of the vocabulary", Verdict.MENDED)
def megatron_cross_entropy(folder: Path) -> str:
    by_megatron = equal_losses(key_tokens_of_megatron, *WORLDS[:-1])
    ours = equal_losses(key_tokens, *WORLDS)
    assert by_megatron.split()[0] == ours.split()[0]
    return ours


@finding("users 6", "A second engine in one process ends in megatron-core's assertion", Verdict.MENDED)
def second_engine(folder: Path) -> str:
    for fixed in ({"dp": 1}, {"tp": 2}, {"pp": 2}):
        for alone, beside in ranks(two_engines, **fixed):
            assert alone == beside
    return f"losses of an engine are the same beside another: {alone[0]:.5f}, {alone[1]:.5f}"


def two_engines(made: Plan) -> tuple[list[float], list[float]]:
    """On each rank: the losses of an engine alone, and beside another one."""
    m = find(made.model)[0]
    alone = shard(m, made, RECIPE)
    losses = [alone.step(rows(made, 0, s)).loss for s in (0, 1)]
    one, other = shard(m, made, RECIPE), shard(m, made, Recipe(seed=7))
    beside = []
    for s in (0, 1):
        other.evaluate([rows(made, 0, s)])
        beside.append(one.step(rows(made, 0, s)).loss)
    return losses, beside


def preferences(outputs: Any, batch: Any) -> Any:
    """DPO with the log-probabilities of a reference in the batch."""
    log_probs = (token_log_probs(outputs, batch["labels"]) * batch["mask"]).sum(1) - batch["ref_logp"]
    losses = -torch.nn.functional.logsigmoid(0.1 * (log_probs[0::2] - log_probs[1::2]))
    return losses.sum(), torch.tensor(float(len(losses)))


def rewards(outputs: Any, batch: Any) -> Any:
    """The pairwise loss of the score of the last position."""
    last = SEQ - 1 - batch["mask"].flip(1).long().argmax(1)
    scores = outputs.gathered("score.0").gather(1, last[:, None])[:, 0]
    losses = -torch.nn.functional.logsigmoid(scores[0::2] - scores[1::2])
    return losses.sum(), torch.tensor(float(len(losses)))


@finding("users 7", "A batch cannot carry more than the declared inputs", Verdict.MENDED)
def reference_in_the_batch(folder: Path) -> str:
    return equal_losses(preferences, {"dp": 1}, {"pp": 2}, {"tp": 2}, ref_logp=torch.tensor([-100.0, -90, -95, -101]))


def own_positions(outputs: Any, batch: Any) -> Any:
    """A sum over the positions of this rank alone."""
    return outputs.values["score.0"].sum(), outputs.weight_sum


@finding("users 8", "Values of a step are laid out as no page says, and differ silently under cp", Verdict.MENDED)
def steps_of_pairs(folder: Path) -> str:
    worlds = ({"dp": 1}, {"cp": 2}, {"tp": 2})
    dpo = equal_losses(preferences, *worlds, ref_logp=torch.tensor([-100.0, -90, -95, -101]))
    reward = equal_losses(rewards, *worlds)
    refused = ranks(loss_of, own_positions, {}, cp=2)
    assert all("has only its part of score.0" in message for message in refused), refused
    assert "[seq, batch, vocab / tp]" in (ROOT / "docs/guide/losses.md").read_text()
    return f"DPO {dpo}; reward {reward}"


@finding("spotcheck N9 gradients", "own-loop.md does not say what engine.gradients returns", Verdict.MENDED)
def gradients_are_described(folder: Path) -> str:
    text = (ROOT / "docs/guide/own-loop.md").read_text()
    assert "`disagreement`" in text and "DistributedSampler" in text
    return "own-loop.md names value and disagreement"


OF_SAMPLES = """
from attrs import field, frozen
from megaloom.dsl import *
from megaloom.dsl import CrossEntropy, Sum

@frozen
class OfSamples(Layer):
    labels: Value = field(factory=labels)

    def body(self, x, /, **side):
        return loss_sums(apply(Sum(("seq",)), apply(CrossEntropy("vocab"), x, self.labels)))

def own():
    d, v = Dim("embed", 64), Dim("vocab", 257)
    block = residual(RMSNorm(), Attention(heads=4, rope=10_000)) >> residual(RMSNorm(), SwiGLU(96))
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(2, block) >> RMSNorm() >> Unembed(weight("head", v, d))
    return model("own", x >> OfSamples())
"""


@finding("spotcheck N9 verify", "verify compares a loss of 344 absolutely, and fails", Verdict.MENDED)
def verify_large_loss(folder: Path) -> str:
    (folder / "own.py").write_text(OF_SAMPLES)
    size = ("--seq", "64", "--batch", "8", "--precision", "fp32")
    passes(plan_command(folder, "own.py:own", "--gpus", "4xCPU", *size, "--cp", "2", "--dp", "2", "-o", "p.json"))
    return passes(megaloom(folder, "verify", "p.json"), "passed: losses differ by at most")


@finding("newcomer A7", "Lines on a loss of one's own have holes, and count samples as tokens", Verdict.MENDED)
def own_loss_in_words(folder: Path) -> str:
    (folder / "own.py").write_text(OF_SAMPLES)
    size = ("--seq", "32", "--batch", "4", "--steps", "2", "--devices", "1")
    ended = megaloom(folder, "train", "own.py:own", *size, "--data", str(ROOT / "docs"), "--out", "r")
    said = passes(ended, " samples)")
    assert "unigram entropy" not in ended.text and " tokens)" not in said, ended.text
    return said
