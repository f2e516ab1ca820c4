"""Every kind of parallelism of BioNeMo's guide, for an encoder with a downstream layer and a loss of one's own.

A small BERT reads windows of Python's own source text, in which some bytes are masked. It predicts these bytes, and, by
a layer that reads the hidden states of the whole sequence, which share of a window is letters. Such a property needs
communication under sequence and context parallelism, which follows from the layer's body. Logits, losses and gradient
norms must be those of transformers and AdamW on one process.

    python -m megaloom.examples.scripts.parallelism    # exit code 1 if a number differs
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM, logging

from megaloom.dsl import (
    Layer,
    Model,
    Sum,
    Value,
    apply,
    dot,
    graph,
    loss_sums,
    model,
    token_weights,
    weight,
    weighted_sum,
)
from megaloom.dsl.catalog import find
from megaloom.examples.scripts import plain_torch
from megaloom.planner import Plan, Precision, Workload, cluster, plan
from megaloom.runtime import Recipe, read_weights, shard
from megaloom.runtime.launch import launcher

BATCH, SEQ, STEPS, LAYERS, EMBED = 8, 64, 3, 4, 32
MASK, MASKED = 1, 0.15  # the byte that replaces others, and their share; transformers does not train byte 0, padding
SHARE = 0.5  # how much the property counts
RECIPE = Recipe(steps=STEPS, lr=1e-3, warmup=0, schedule="constant")
ROWS: dict[str, dict[str, Any]] = {
    "data": {"dp": 2, "shard": "none"},
    "data, optimizer sharded": {"dp": 2, "shard": "optimizer"},
    "tensor": {"tp": 2, "sequence_parallel": False},
    "tensor and sequence": {"tp": 2, "sequence_parallel": True},
    "context": {"cp": 2},
    "pipeline": {"pp": 2, "vpp": 1},
    "pipeline, interleaved": {"pp": 2, "vpp": 2},
    "tensor x pipeline": {"tp": 2, "pp": 2, "vpp": 1},
}


@frozen
class Property(Layer):
    """A number for each sequence, and its squared error: hidden states [batch seq embed] to [sums=2].

    The number is the mean over the sequence of a linear function of the states, and is to be the mean of `wanted`.
    """

    wanted: Value = field(factory=lambda: token_weights("letters"), repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        found = dot(x, weight("property", x["embed"]), "embed")
        error = apply(Sum(("seq",)), found - self.wanted) / float(SEQ)
        return loss_sums(error * error)


def with_property(folder: str) -> Model:
    """Return the encoder of a Hugging Face folder with both losses."""
    base = find(folder)[0]
    states = graph(base).value(f"layer_norm.{2 * LAYERS}")
    return model("with-property", weighted_sum((1.0, base.outputs[0]), (SHARE, states >> Property())))


def data() -> list[plain_torch.Batch]:
    """Return the global batches, [batch, seq]: tokens, labels, mask, token types, and 1 at letters."""
    random, found = torch.Generator().manual_seed(0), []
    for batch in plain_torch.batches(STEPS, BATCH, SEQ):
        text = batch["tokens"]
        masked = torch.rand(text.shape, generator=random) < MASKED
        is_letter = (text | 32 >= ord("a")) & (text | 32 <= ord("z"))
        tensors = {"tokens": text.masked_fill(masked, MASK), "labels": text, "mask": masked}
        found.append({**tensors, "types": torch.zeros_like(text), "letters": is_letter.float()})
    return found


class WithProperty(torch.nn.Module):  # type: ignore[misc]
    """The encoder of transformers, and the weight of the downstream layer, which begins with ones."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder, self.property = encoder, torch.nn.Parameter(torch.ones(EMBED) / EMBED)


def both_losses(it: WithProperty, batch: plain_torch.Batch) -> Tensor:
    """Return the mean loss of masked bytes, and a share of the mean squared error of the property."""
    out = it.encoder(input_ids=batch["tokens"], token_type_ids=batch["types"], output_hidden_states=True)
    found = (out.hidden_states[-1] @ it.property).mean(1)
    masked = cross_entropy(out.logits[batch["mask"]], batch["labels"][batch["mask"]])
    return masked + SHARE * (found - batch["letters"].mean(1)).square().mean()


@frozen
class Found:
    """The numbers of a rank: its parameters, the logits if it has them, loss and gradient norm of each step."""

    parameters: int
    logits: Tensor | None
    steps: list[plain_torch.Step]


def train(made: Plan, folder: Path) -> Found:
    """Train on this rank."""
    declared = find(made.model)[0]
    weights = {**read_weights(folder, find(str(folder))[0]), "property.0.property": torch.ones(EMBED) / EMBED}
    engine = shard(declared, made, RECIPE, weights=weights)
    mine = [plain_torch.share(batch, engine.groups.dp_rank, made.layout.dp) for batch in data()]
    logits = engine.gathered_over_dp(engine.logits(mine[0]))
    steps = [(result.loss, result.grad_norm) for result in map(engine.step, mine)]
    return Found(sum(p.numel() for chunk in engine.model_chunks for p in chunk.parameters()), logits, steps)


def make_model(folder: Path) -> Any:
    """Write a BERT with random weights and without dropout into a folder, and return it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": EMBED, "intermediate_size": 64, "num_hidden_layers": LAYERS}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    it = BertForMaskedLM(BertConfig(**sizes, **rates, num_attention_heads=4, max_position_embeddings=SEQ))
    it.save_pretrained(folder)
    return it


def compare(name: str, found: list[Found], logits: Tensor, expected: list[plain_torch.Step]) -> bool:
    """Print a row of the table, and return whether its numbers agree."""
    far = max(float((x.logits - logits).abs().max()) for x in found if x.logits is not None)
    differ = max(plain_torch.differ(x.steps, expected) for x in found)
    loss, norm = found[0].steps[-1]
    parameters = "  ".join(f"{x.parameters:,}" for x in found)
    print(f"{name:25}{loss:9.5f}  {norm:9.5f}  {far:9.1e}  {differ:9.1e}   {parameters}")
    return far < 1e-5 and differ < 1e-4


def main(*names: str) -> bool:
    """Train under each layout, or under those of these names, and return whether all agree with one process."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        it = WithProperty(make_model(folder))
        with torch.no_grad():
            logits = it.encoder(input_ids=data()[0]["tokens"], token_type_ids=data()[0]["types"]).logits
        expected = plain_torch.train(it, data(), RECIPE, both_losses)
        print(f"{'':25}last loss  last norm     logits      steps   parameters of each rank")
        print(f"{'transformers, AdamW':25}{expected[-1][0]:9.5f}  {expected[-1][1]:9.5f}")
        declared, ref = find(f"{Path(__file__).resolve()}:with_property", {"folder": str(folder)})
        agree, work = [], Workload(seq=SEQ, batch=BATCH, precision=Precision.FP32)
        for name in names or ROWS:
            world = 4 if "x" in name.split() else 2
            made = plan(declared, cluster(f"{world}xCPU"), work, ref=ref, fixed=ROWS[name]).best
            agree.append(compare(name, launcher.run(train, (made, folder), world), logits, expected))
        best = plan(declared, cluster("8xH100"), work, ref=ref).best
        print(f"The model fits one device, so for 8xH100 plan chooses {best.layout}")
    return all(agree)


if __name__ == "__main__":
    sys.exit(0 if main(*sys.argv[1:]) else 1)
