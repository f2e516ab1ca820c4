"""Direct preference optimization (DPO): a model learns from pairs of answers, beside a frozen copy of what it was.

The prompts are functions of the standard library. The chosen answer is the first line of the function's own
documentation, the rejected one that of another function. Rows of a batch alternate between chosen and rejected answers.
Source: Rafailov et al., arXiv:2305.18290, equation 7.

    python -m megaloom.examples.scripts.dpo    # trains two ranks under three layouts, and prints each step
"""

import inspect
from collections.abc import Iterator
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any

from megaloom.dsl import Model
from megaloom.dsl.catalog import find
from megaloom.examples.llama3 import llama
from megaloom.planner import Plan, Precision, Workload, cluster, plan

BETA = 0.1  # how much a reward counts
MODULES = ("shutil", "statistics", "textwrap", "tokenize", "inspect", "random", "ast", "shlex")
STEPS = 6
PAIRS = 4  # of a step
WORK = Workload(seq=128, batch=2 * PAIRS, precision=Precision.FP32)


def policy() -> Model:
    """Return a small Llama of bytes."""
    return llama("policy", layers=2, heads=4, kv_heads=2, embed=64, ff=128, vocab=256, rope=10_000)


def documented() -> Iterator[tuple[str, str]]:
    """Yield functions of the standard library as prompts, each with the first line of its documentation."""
    for name in MODULES:
        for called, function in inspect.getmembers(import_module(name), inspect.isfunction):
            line = (function.__doc__ or "").strip().partition("\n")[0]
            if line and not called.startswith("_"):
                yield f"{name}.{called}: ", line


def pairs(step: int) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield the pairs of a step: prompt, chosen and rejected answer."""
    functions = [(prompt.encode(), line.encode()) for prompt, line in documented()]
    for i in range(PAIRS * step, PAIRS * (step + 1)):
        (prompt, chosen), (_, rejected) = (functions[k % len(functions)] for k in (i, i + 1))
        yield prompt, chosen, rejected


def batch_of(step: int) -> dict[str, Any]:
    """Return the global batch of a step, [batch, seq]: tokens, labels, and `answer`, True at labels of an answer."""
    import torch

    text = torch.zeros(2 * PAIRS, WORK.seq + 1, dtype=torch.int64)
    answer = torch.zeros(2 * PAIRS, WORK.seq, dtype=torch.bool)
    rows = [(prompt, written) for prompt, *both in pairs(step) for written in both]
    for row, (prompt, written) in enumerate(rows):
        ids = (prompt + written)[: WORK.seq + 1]
        text[row, : len(ids)] = torch.tensor(list(ids))
        answer[row, len(prompt) - 1 : len(ids) - 1] = True
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "answer": answer}


def answer_log_probs(outputs: Any, batch: dict[str, Any]) -> Any:
    """Return the log-probability of each answer, [batch]."""
    from megaloom.runtime import token_log_probs

    return (token_log_probs(outputs, batch["labels"]) * batch["answer"]).sum(1)


def of_reference(outputs: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Return what a batch needs of the reference, for a micro-batch."""
    return {"reference": answer_log_probs(outputs, batch)}


class Preferences:
    """The step of DPO, on micro-batches of whole pairs."""

    def training_step(self, forward: Any, batch: dict[str, Any]) -> Any:
        """Return the sums of a micro-batch, and a report of the rewards. Only the last stage has outputs."""
        import torch

        outputs = forward(batch)
        if outputs is None:
            return None
        rewards = BETA * (answer_log_probs(outputs, batch) - batch["reference"])
        chosen, rejected = rewards.view(-1, 2).unbind(1)  # an odd number of rows is refused
        losses, count = -torch.nn.functional.logsigmoid(chosen - rejected), len(chosen)
        report = {"chosen": (chosen.sum(), count), "rejected": (rejected.sum(), count)}
        return losses.sum(), torch.tensor(float(count)), report


def learn(made: Plan, weights: Path | None = None, steps: int = STEPS) -> list[Any]:
    """Train on this rank, and return the result of each step.

    weights: the folder of a run or of Hugging Face with the weights of model and reference; else they are random.
    """
    from megaloom.runtime import FrozenModel, Recipe, read_weights, shard

    model, recipe = find(made.model)[0], Recipe(steps=steps, lr=1e-3, warmup=0, schedule="constant")
    given = None if weights is None else read_weights(weights, model)
    engine = shard(model, made, recipe, steps=Preferences(), weights=given)
    reference, share = FrozenModel.of(engine), made.workload.batch // made.layout.dp
    results = []
    for step in range(steps):
        own = {name: x[engine.groups.dp_rank * share :][:share] for name, x in batch_of(step).items()}
        results.append(engine.step(reference.extend(own, of_reference)))
    return results


def main(**fixed: int) -> None:
    """Train under a layout, such as tp=2, and print each step."""
    from megaloom.runtime.launch import launcher

    ref, ranks = f"{Path(__file__).resolve()}:policy", prod(fixed.values())
    made = plan(policy(), cluster(f"{ranks}xCPU"), WORK, ref=ref, fixed={"micro_batch": 2, **fixed}).best
    print(f"{made.layout}\nstep      loss  gradient norm    chosen  rejected")
    for step, r in enumerate(launcher.run(learn, (made,), ranks, timeout=120)[0], 1):
        print(f"{step:4}  {r.loss:.6f}  {r.grad_norm:13.5f}  {r.report['chosen']:+.5f}  {r.report['rejected']:+.5f}")


if __name__ == "__main__":
    for axis in ("tp", "pp", "cp"):
        main(**{axis: 2})
