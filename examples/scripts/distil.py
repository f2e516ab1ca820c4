"""Distillation: a student learns the probabilities of a larger, frozen teacher under the same device mesh.

Of each position the batch carries the most probable tokens of the teacher, which takes 12 TOP bytes a token, not the
whole vocabulary. Source: Hinton et al., arXiv:1503.02531, at temperature 1.

    python -m megaloom.examples.scripts.distil    # trains a teacher, then the student on two ranks under three layouts
"""

import inspect
from math import prod
from pathlib import Path
from typing import Any

from megaloom.dsl import Model, freeze
from megaloom.dsl.catalog import find
from megaloom.examples.llama3 import llama
from megaloom.planner import Plan, Precision, Workload, cluster, plan

TOP = 16  # tokens of the teacher for each position
SHARE = 0.5  # of the loss that is the teacher's; the rest is the cross-entropy of the text
STEPS = 6
WORK = Workload(seq=64, batch=4, precision=Precision.FP32)


def student() -> Model:
    """Return a small Llama of bytes."""
    return llama("student", layers=2, heads=4, kv_heads=2, embed=32, ff=64, vocab=256, rope=10_000)


def teacher() -> Model:
    """Return a larger Llama of bytes."""
    return llama("teacher", layers=3, heads=4, kv_heads=4, embed=64, ff=128, vocab=256, rope=10_000)


def frozen_teacher() -> Model:
    """Return the teacher for a plan without gradients and optimizer."""
    return freeze(teacher())


def batch_of(step: int) -> dict[str, Any]:
    """Return the global batch of a step: source text of the standard library, [batch, seq]."""
    import torch

    text = torch.tensor(list(inspect.getsource(inspect).encode()))
    rows = text[WORK.seq * WORK.batch * step :].unfold(0, WORK.seq + 1, WORK.seq)[: WORK.batch]
    return {"tokens": rows[:, :-1], "labels": rows[:, 1:]}


def of_teacher(outputs: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return the most probable tokens of each position and their log-probabilities, [batch, seq, TOP]."""
    logits = outputs.gathered("unembed.0").float()  # of one micro-batch, without gradients
    best = logits.log_softmax(-1).topk(TOP)
    return {"best": best.indices, "teacher": best.values}


class Distillation:
    """The step of the student."""

    def training_step(self, forward: Any, batch: dict[str, Any]) -> Any:
        """Return the sums of a micro-batch, and a report of both parts. Only the last stage has outputs."""
        from megaloom.runtime import token_log_probs

        outputs = forward(batch)
        if outputs is None:
            return None
        known, tokens = batch["teacher"], outputs.weight_sum
        divergence = (known.exp() * (known - token_log_probs(outputs, batch["best"]))).sum()
        report = {"divergence": (divergence, tokens), "cross-entropy": (outputs.loss_sum, tokens)}
        return SHARE * divergence + (1 - SHARE) * outputs.loss_sum, tokens, report


def learn(made: Plan, of_larger: Plan, weights: Path, steps: int = STEPS) -> list[Any]:
    """Train the student on this rank, and return the result of each step.

    of_larger: the plan of the teacher. weights: the folder of a run or of Hugging Face with its weights.
    """
    from megaloom.runtime import Recipe, read_weights, shard, shard_frozen

    recipe = Recipe(steps=steps, lr=1e-2, warmup=0, schedule="constant")
    engine = shard(find(made.model)[0], made, recipe, steps=Distillation())
    larger, share = find(of_larger.model)[0], WORK.batch // made.layout.dp
    frozen = shard_frozen(larger, of_larger, read_weights(weights, larger))
    results = []
    for step in range(steps):
        own = {name: x[engine.groups.dp_rank * share :][:share] for name, x in batch_of(step).items()}
        results.append(engine.step(frozen.extend(own, of_teacher)))
    return results


def teach(made: Plan, run: Path, steps: int = 60) -> None:
    """Train the teacher on this rank, and write a run."""
    from megaloom.runtime import Recipe, save_run, shard

    recipe = Recipe(steps=steps, lr=3e-3)
    engine = shard(teacher(), made, recipe)
    for step in range(engine.load(run), steps):
        engine.step(batch_of(step))
    engine.save(run)
    save_run(run, made, teacher(), recipe)


def planned(name: str, mesh: dict[str, int]) -> Plan:
    """Return the plan of one of these models. Plans of models of one process have equal degrees."""
    ref = f"{Path(__file__).resolve()}:{name}"
    return plan(find(ref)[0], cluster(f"{prod(mesh.values())}xCPU"), WORK, ref=ref, fixed=mesh).best


def main(**fixed: int) -> None:
    """Train the student under a layout, such as tp=2, and print each step."""
    from megaloom.runtime.launch import launcher

    mesh, run = {"tp": 1, "pp": 1, "cp": 1, "dp": 1, "vpp": 1, **fixed}, Path("runs/teacher")
    launcher.run(teach, (planned("teacher", dict.fromkeys(mesh, 1)), run), 1, timeout=300)
    made, of_larger = planned("student", mesh), planned("frozen_teacher", mesh)
    print(f"{made.layout}\nstep      loss  gradient norm  divergence  cross-entropy")
    for step, r in enumerate(launcher.run(learn, (made, of_larger, run), made.layout, timeout=120)[0], 1):
        both = f"{r.report['divergence']:10.5f}  {r.report['cross-entropy']:13.5f}"
        print(f"{step:4}  {r.loss:8.5f}  {r.grad_norm:13.5f}  {both}")


if __name__ == "__main__":
    for axis in ("tp", "pp", "cp"):
        main(**{axis: 2})
