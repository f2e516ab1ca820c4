"""Compare the logits of a run, under its own plan, with those of the Hugging Face folder that it was written to.

python -m megaloom.examples.scripts.compare_logits RUN FOLDER    # exit code 1 if they differ
"""

import sys
from pathlib import Path
from typing import Any

TOLERANCE = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}  # of the largest logit


def logits_on_rank(run: str) -> tuple[Any, Any] | None:
    """Return token ids [sequences, seq + 1] and the logits of all but the last, on ranks of the last stage."""
    import torch

    from megaloom.planner.contract.planned_model import planned_model
    from megaloom.runtime import Recipe, load_run
    from megaloom.runtime.engine.engine import Engine

    loaded = load_run(run)
    engine = Engine.build(loaded.plan, planned_model(loaded.plan), Recipe())
    engine.load(Path(run))
    vocab = loaded.graph.weights["wte"].dims[0].known
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab, (2, loaded.plan.workload.seq + 1), generator=generator)
    logits = engine.logits(tokens)
    return None if logits is None else (tokens.numpy(), logits.float().cpu().numpy())


def difference(run: str, folder: str) -> tuple[float, float]:
    """Return the largest difference of a logit, and the largest logit."""
    import torch
    from transformers import AutoModelForCausalLM

    from megaloom.runtime import load_run
    from megaloom.runtime.launch import launcher

    ranks = launcher.run(logits_on_rank, (run,), load_run(run).plan.layout)
    tokens, ours = next(found for found in ranks if found is not None)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens[:, :-1])).logits.numpy()
    return float(abs(ours - theirs).max()), float(abs(theirs).max())


def main(run: str, folder: str) -> int:
    """Print the difference, and return exit code 1 if it is above the tolerance of the run's precision."""
    from megaloom.runtime import load_run

    most, largest = difference(run, folder)
    precision = load_run(run).plan.workload.precision
    print(f"logits of {run} and of transformers differ by at most {most:.1e}; the largest is {largest:.1f}")
    return 0 if most <= TOLERANCE[precision] * max(1.0, largest) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
