"""MegatronStrategy and MegatronParallel of NeMo: three steps of one's own, and layouts that change between checkpoints.

A small Llama trains on Python's own source text. The data step masks spaces out of the loss; training, validation and
test have a step each. The run begins under NeMo's layout, tensor_model_parallel_size=2 and
pipeline_model_parallel_size=2, goes on with context, sequence and virtual pipeline parallelism, and ends in bf16 with
data parallelism alone. Each step must have the loss and gradient norm of transformers and AdamW on one process.

    python -m megaloom.examples.scripts.strategy        # 8 processes; exit code 1 if a number differs
    python -m megaloom.examples.scripts.strategy 4      # 4 processes
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, logging

from megaloom.dsl import Model, NextToken, mask, model, without_loss
from megaloom.dsl.catalog import find
from megaloom.examples.scripts import plain_torch
from megaloom.planner import Plan, Precision, Workload, cluster, plan
from megaloom.runtime import Recipe, read_weights, shard, token_log_probs
from megaloom.runtime.launch import launcher

BATCH, SEQ, STEPS = 8, 32, 6
HELD_OUT = 13  # sequences: no multiple of the data-parallel ranks, and none is left out
SPACE = ord(" ")
RECIPE = Recipe(steps=STEPS, lr=1e-3, warmup=0, schedule="constant")


@frozen
class Phase:
    """A part of the run: the options of a strategy, the last step, and the relative difference that it may have."""

    layout: dict[str, Any]
    last: int
    precision: Precision = Precision.FP32
    tolerance: float = 1e-4


def phases(devices: int) -> tuple[Phase, ...]:
    """Return the parts of the run on so many devices, a multiple of 4."""
    nemo = {"tp": 2, "pp": 2, "vpp": 1, "cp": 1, "sequence_parallel": False, "ep": 1, "dp": devices // 4}
    other = {"tp": devices // 4, "cp": 2, "pp": 2, "vpp": 2, "sequence_parallel": devices > 4}
    return Phase(nemo, 2), Phase(other, 4), Phase({"dp": devices}, STEPS, Precision.BF16, tolerance=0.03)


def masked(folder: str) -> Model:
    """Return the model of a Hugging Face folder, whose loss has a mask."""
    return model("masked", without_loss(find(folder)[0]).outputs[0] >> NextToken(mask=mask()))


class Steps:
    """The data step, and the steps of training, validation and test."""

    def data_step(self, maker: Any, text: Tensor, i: int, seed: int) -> dict[str, Tensor]:
        """Return the named tensors of a sample. Spaces do not count in its loss."""
        sample: dict[str, Tensor] = maker.make(text, i, seed)
        return {**sample, "mask": sample["labels"] != SPACE}

    def training_step(self, forward: Any, batch: dict[str, Tensor]) -> Any:
        """Return the sums of the masked loss. Only the last stage has outputs."""
        outputs = forward(batch)
        return None if outputs is None else (outputs.loss_sum, outputs.weight_sum)

    def validation_step(self, forward: Any, batch: dict[str, Tensor]) -> Any:
        """Return the sums of the loss with spaces."""
        outputs = forward(batch)
        if outputs is None:
            return None
        losses = -token_log_probs(outputs, batch["labels"])
        return losses.sum(), losses.numel()

    def test_step(self, forward: Any, batch: dict[str, Tensor]) -> Any:
        """Return the number of bytes that are not predicted, and the number of all bytes."""
        outputs = forward(batch)
        if outputs is None:
            return None
        wrong = outputs.gathered("unembed.0").argmax(-1) != batch["labels"]
        return wrong.sum().float(), wrong.numel()


def texts() -> tuple[list[Tensor], Tensor]:
    """Return the global batches of text, [batch, seq + 1], and the held-out sequences."""
    data = plain_torch.batches(STEPS + 2, BATCH, SEQ)
    rows = [torch.cat([batch["tokens"], batch["labels"][:, -1:]], dim=1) for batch in data]
    return rows[:STEPS], torch.cat(rows[STEPS:])[:HELD_OUT]


def train(made: Plan, folder: Path, last: int) -> tuple[list[plain_torch.Step], plain_torch.Step]:
    """Continue on this rank to a step, and save. Return loss and norm of each step, and validation and test losses."""
    declared, run = find(made.model)[0], folder / "run"
    weights = None if run.exists() else read_weights(folder, declared)
    engine = shard(declared, made, RECIPE, steps=Steps(), weights=weights)
    first, dp_rank, dp = engine.load(run), engine.groups.dp_rank, made.layout.dp
    trained, held_out = texts()
    results = [engine.step(text.chunk(dp)[dp_rank]) for text in trained[first:last]]
    engine.save(run)
    evaluated = [engine.evaluate([held_out[dp_rank::dp]], step=step).loss for step in ("validation", "test")]
    return [(result.loss, result.grad_norm) for result in results], (evaluated[0], evaluated[1])


def make_model(folder: Path) -> Any:
    """Write a Llama with random weights into a folder, and return it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    it = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    it.save_pretrained(folder)
    return it


def masked_loss(it: Any, batch: plain_torch.Batch) -> Tensor:
    """Return the mean loss of bytes that are not spaces, by transformers."""
    labels = batch["labels"].masked_fill(batch["labels"] == SPACE, -100)
    return cross_entropy(it(input_ids=batch["tokens"]).logits.flatten(0, 1), labels.flatten())


def by_transformers(it: Any) -> plain_torch.Step:
    """Return validation and test losses of a model."""
    held_out = texts()[1]
    with torch.no_grad():
        logits, labels = it(input_ids=held_out[:, :-1]).logits, held_out[:, 1:]
    wrong = (logits.argmax(-1) != labels).float().mean()
    return cross_entropy(logits.flatten(0, 1), labels.flatten()).item(), wrong.item()


def compare(phase: Phase, made: Plan, found: list[plain_torch.Step], expected: list[plain_torch.Step]) -> bool:
    """Print the numbers of a phase, the steps and then the held-out losses. Return whether they agree."""
    print(f"{made.layout}, {phase.precision}")
    names = [
        *(f"step {step}: loss, norm" for step in range(phase.last - len(found) + 2, phase.last + 1)),
        "validation, test",
    ]
    for name, ours, theirs in zip(names, found, expected, strict=True):
        print(f"  {name:20}{ours[0]:9.5f} {ours[1]:9.5f}   transformers {theirs[0]:9.5f} {theirs[1]:9.5f}")
    return plain_torch.differ(found, expected) < phase.tolerance


def main(devices: int = 8, count: int = 3) -> bool:
    """Train in so many phases, and return whether the numbers of each are those of one process."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    agree, first = [], 0
    data = plain_torch.batches(STEPS, BATCH, SEQ)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        it = make_model(folder)
        optimizer = plain_torch.adamw(it, RECIPE)
        declared, ref = find(f"{Path(__file__).resolve()}:masked", {"folder": str(folder)})
        for phase in phases(devices)[:count]:
            work = Workload(seq=SEQ, batch=BATCH, precision=phase.precision)
            made = plan(declared, cluster(f"{devices}xCPU"), work, ref=ref, fixed=phase.layout).best
            results, held_out = launcher.run(train, (made, folder, phase.last), devices)[0]
            steps = plain_torch.train(it, data[first : phase.last], RECIPE, masked_loss, optimizer)
            agree.append(compare(phase, made, [*results, held_out], [*steps, by_transformers(it)]))
            first = phase.last
    return all(agree)


if __name__ == "__main__":
    sys.exit(0 if main(*map(int, sys.argv[1:])) else 1)
