"""A reward model: a number for each answer, learned from pairs of answers (Bradley and Terry, 1952).

A row holds both answers of a pair as packed documents. The score of an answer is a product of the hidden state of its
last token. The loss is declared, so that plans count it and every layout computes it.
Source: Ouyang et al., arXiv:2203.02155, equation 1.

    python -m megaloom.examples.scripts.reward    # trains two ranks under three layouts, and prints each step
"""

from math import prod
from pathlib import Path
from typing import Any

from attrs import field, frozen

from megaloom.dsl import (
    Layer,
    Model,
    Sum,
    Unembed,
    Value,
    apply,
    dot,
    fn,
    graph,
    loss_sums,
    mask,
    model,
    packed,
    weight,
)
from megaloom.dsl.catalog import find
from megaloom.examples.scripts.dpo import PAIRS, STEPS, pairs, policy
from megaloom.planner import Plan, Precision, Workload, cluster, plan

WORK = Workload(seq=256, batch=PAIRS, precision=Precision.FP32)


@frozen
class Score(Layer):
    """A number for each position: hidden states [batch seq embed] to [batch seq]."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return dot(x, weight("score", x["embed"]), "embed")


@frozen
class BradleyTerry(Layer):
    """-log(sigmoid(score of the chosen answer - score of the rejected one)): scores [batch seq] to [sums=2].

    chosen, rejected: 1 at the last token of either answer.
    """

    chosen: Value = field(factory=lambda: mask("chosen"), repr=False)
    rejected: Value = field(factory=lambda: mask("rejected"), repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        chosen, rejected = (apply(Sum(("seq",)), x * at) for at in (self.chosen, self.rejected))
        return loss_sums(fn("softplus", rejected - chosen))


def scored(base: Model) -> Model:
    """Return a language model with scores in the place of logits."""
    g = graph(packed(base))
    head = next(node for node in g.nodes if isinstance(node.op, Unembed))
    return model("reward", g.value(head.inputs[0]) >> Score() >> BradleyTerry())


def reward() -> Model:
    """Return a reward model made of the small Llama of `dpo`."""
    return scored(policy())


def batch_of(step: int) -> dict[str, Any]:
    """Return the global batch of a step, [batch, seq]: both answers of each pair, each after its prompt."""
    import torch

    names = {"tokens": torch.int64, "documents": torch.int64, "chosen": torch.bool, "rejected": torch.bool}
    batch = {name: torch.zeros(PAIRS, WORK.seq, dtype=dtype) for name, dtype in names.items()}
    batch["documents"] += 2  # padding
    for row, (prompt, *both) in enumerate(pairs(step)):
        first = 0
        for document, (name, written) in enumerate(zip(("chosen", "rejected"), both, strict=True)):
            ids = (prompt + written)[: WORK.seq // 2]
            here = slice(first, first := first + len(ids))
            batch["tokens"][row, here] = torch.tensor(list(ids))
            batch["documents"][row, here] = document
            batch[name][row, first - 1] = True
    return batch


class Report:
    """The declared loss, and the share of pairs in which the chosen answer has the larger score."""

    def training_step(self, forward: Any, batch: dict[str, Any]) -> Any:
        """Return the sums of a micro-batch, and the report. Only the last stage has outputs."""
        outputs = forward(batch)
        if outputs is None:
            return None
        scores = outputs.gathered("score.0")  # [batch, seq], whole under any layout
        chosen, rejected = ((scores * batch[name]).sum(1) for name in ("chosen", "rejected"))
        return outputs.loss_sum, outputs.weight_sum, {"right": ((chosen > rejected).sum(), len(chosen))}


def learn(made: Plan, weights: Any = None, steps: int = STEPS) -> list[Any]:
    """Train on this rank, and return the result of each step. weights: by name; else they are random."""
    from megaloom.runtime import Recipe, shard

    recipe = Recipe(steps=steps, lr=1e-3, warmup=0, schedule="constant")
    engine = shard(find(made.model)[0], made, recipe, steps=Report(), weights=weights)
    first, share = engine.groups.dp_rank * WORK.batch // made.layout.dp, WORK.batch // made.layout.dp
    batches = [{name: x[first : first + share] for name, x in batch_of(i).items()} for i in range(steps)]
    return [engine.step(own) for own in batches]


def main(**fixed: int) -> None:
    """Train under a layout, such as tp=2, and print each step."""
    from megaloom.runtime.launch import launcher

    ref, ranks = f"{Path(__file__).resolve()}:reward", prod(fixed.values())
    made = plan(reward(), cluster(f"{ranks}xCPU"), WORK, ref=ref, fixed=fixed).best
    print(f"{made.layout}\nstep      loss  gradient norm  right")
    for step, r in enumerate(launcher.run(learn, (made,), ranks, timeout=120)[0], 1):
        print(f"{step:4}  {r.loss:.6f}  {r.grad_norm:13.5f}  {r.report['right']:5.2f}")


if __name__ == "__main__":
    for axis in ("tp", "pp", "cp"):
        main(**{axis: 2})
