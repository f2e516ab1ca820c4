"""A small T5 trained over four pipeline stages, beside one process: the loss of each step is the same.

Stages of the decoder receive the output of the encoder with the decoder's own hidden states. One table, on three
stages, embeds both sequences and makes the logits.

    python -m megaloom.examples.scripts.t5_over_stages    # takes a minute on two cores
"""

from functools import partial
from pathlib import Path

from megaloom.dsl import Model, SwiGLU
from megaloom.examples.t5 import t5
from megaloom.planner import Plan, Precision, Workload, cluster, plan

STEPS = 30
WORK = Workload(seq=32, batch=8, precision=Precision.FP32)


def small_t5() -> Model:
    """Return a T5 of four and three layers for bytes; its ids above 255 stand for removed spans."""
    return t5("small-t5", 4, 4, 64, SwiGLU(96), head_dim=16, vocab=272, buckets=8, distance=16, decoder_layers=3)


def losses(made: Plan, steps: int) -> list[float]:
    """Train on this rank, on numbers that count in threes, and return the loss of each step."""
    import torch

    from megaloom.runtime import Recipe
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.samples.samples import SampleMaker

    engine = Engine.build(made, small_t5(), Recipe(steps=steps, lr=5e-3, warmup=3))
    maker = SampleMaker.of(engine.graph, made.workload.seq)

    def sample(step: int, i: int) -> dict[str, torch.Tensor]:
        number = WORK.batch * step + i
        return maker.make((7 * number + 3 * torch.arange(maker.length)) % 60, number, 1)

    return [engine.step(partial(sample, step)).loss for step in range(steps)]


def main(pp: int = 4, steps: int = STEPS) -> list[tuple[float, float]]:
    """Train on `pp` stages and in one process. Print and return the losses of both by step."""
    from megaloom.runtime.launch import launcher

    ref = f"{Path(__file__).resolve()}:small_t5"
    plans = [plan(small_t5(), cluster(f"{n}xCPU"), WORK, ref=ref, fixed={"pp": n, "vpp": 1}).best for n in (pp, 1)]
    curves = [launcher.run(losses, (made, steps), made.layout, timeout=300)[0] for made in plans]
    print(f"step  {pp} stages   1 process   difference")
    for step, (staged, whole) in enumerate(zip(*curves, strict=True), 1):
        print(f"{step:4}  {staged:.6f}   {whole:.6f}    {abs(staged - whole):.1e}")
    return list(zip(*curves, strict=True))


if __name__ == "__main__":
    main()
