"""Steps of your own: the data step adds a mask, the forward step sees batch and outputs, the loss reduction is theirs.

Training does not count the first tokens of a sequence, which have little context. Any of the methods may be left out.

    python -m megaloom.examples.scripts.own_steps    # trains two processes under two layouts, and prints the losses
"""

from math import prod
from pathlib import Path

from megaloom.dsl import (
    Attention,
    Dim,
    Embed,
    Model,
    NextToken,
    RMSNorm,
    SwiGLU,
    Unembed,
    ids,
    mask,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.planner import Plan, Precision, Workload, cluster, plan

SKIPPED = 4  # positions at the start of each sequence that do not count


class SkipFirstTokens:
    """A plain class: what it has replaces the steps of the same name."""

    def data_step(self, maker, text, i, seed):  # type: ignore[no-untyped-def]
        """Return the named tensors of sample i, with 0 in the mask of the first positions."""
        sample = maker.make(text, i, seed)
        sample["mask"][:SKIPPED] = False
        return sample

    def training_step(self, forward, batch):  # type: ignore[no-untyped-def]
        """Return the sums of a micro-batch, with a loss on large logits. Only the last stage has outputs."""
        outputs = forward(batch)
        if outputs is None:
            return None
        logits = outputs.gathered("unembed.0")  # [batch, seq, vocab], whole under any layout
        return outputs.loss_sum + 0.01 * logits.float().square().sum(), outputs.weight_sum

    def validation_step(self, forward, batch):  # type: ignore[no-untyped-def]
        """Return the sums of a micro-batch of held-out text."""
        outputs = forward(batch)
        return None if outputs is None else (outputs.loss_sum, outputs.weight_sum)


def decoder() -> Model:
    """Return a small decoder of bytes, whose loss has a mask."""
    d, v = Dim("embed", 64), Dim("vocab", 257)
    block = residual(RMSNorm(), Attention(heads=4, rope=10_000)) >> residual(RMSNorm(), SwiGLU(96))
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(2, block) >> RMSNorm() >> Unembed(weight("head", v, d))
    return model("decoder", x >> NextToken(mask=mask()))


def losses(best: Plan) -> list[float]:
    """Return the losses of three steps on this rank."""
    import torch

    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.optimizer.recipe import Recipe
    from megaloom.runtime.samples.samples import SampleMaker

    engine = Engine.build(best, decoder(), Recipe(steps=10, warmup=0), steps=SkipFirstTokens())
    maker = SampleMaker.of(engine.graph, best.workload.seq)

    def sample(i: int) -> dict[str, torch.Tensor]:
        text = torch.randint(maker.ids, (maker.length,), generator=torch.Generator().manual_seed(i))
        return engine.steps.data_step(maker, text, i, 1)

    size = best.workload.batch
    return [engine.step(lambda i, first=k * size: sample(first + i)).loss for k in range(3)]  # type: ignore[misc]


def main(**fixed: int) -> list[float]:
    """Train three steps under a layout, such as pp=2, and print and return the losses."""
    from megaloom.runtime.launch import launcher

    workload = Workload(seq=32, batch=4, precision=Precision.FP32)
    ref = f"{Path(__file__).resolve()}:decoder"
    ranks = prod(fixed.values())
    found = plan(decoder(), cluster(f"{ranks}xCPU"), workload, ref=ref, fixed=fixed)
    out = launcher.run(losses, (found.best,), ranks, timeout=120)[0]
    print(", ".join(f"{loss:.5f}" for loss in out))
    return out


if __name__ == "__main__":
    main(pp=2)
    main(tp=2)
