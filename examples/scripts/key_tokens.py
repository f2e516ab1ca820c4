"""The key-token loss of Accelerate's Megatron-LM plugin and the Hugging Face course, as steps and as a layer.

The loss of a sequence is the mean over its mask, times 1 + alpha * (its number of key tokens); training minimises the
mean over sequences. Both forms have one loss under every layout.

    cd examples/scripts
    megaloom train key_tokens.py:decoder --steps-from 'key_tokens.py:KeyTokenSteps(alpha=0.25)'
    megaloom train key_tokens.py:with_key_tokens
    python -m megaloom.examples.scripts.key_tokens    # compares both forms under three layouts
"""

from math import prod
from pathlib import Path

from attrs import field, frozen

from megaloom.dsl import (
    Attention,
    CrossEntropy,
    Dim,
    Embed,
    Equals,
    Layer,
    Model,
    NextToken,
    RMSNorm,
    Sum,
    SwiGLU,
    Unembed,
    Value,
    apply,
    fn,
    ids,
    labels,
    loss_sums,
    mask,
    model,
    repeat,
    residual,
    weight,
    without_loss,
)
from megaloom.planner import Plan, Precision, Workload, cluster, plan

KEY_TOKENS = tuple(b"(=")  # of a tokenizer of words, the ids of "plt", "pd", "sk", "fit", "predict"


class KeyTokenSteps:
    """The loss as steps. alpha: the weight of each key token in a sequence."""

    def __init__(self, key_tokens: tuple[int, ...] = KEY_TOKENS, alpha: float = 0.25) -> None:
        self.key_tokens, self.alpha = key_tokens, alpha

    def training_step(self, forward, batch):  # type: ignore[no-untyped-def]
        """Return the sums over the sequences of a micro-batch, and the loss of the tokens as a report."""
        import torch  # not at the top: planning these models needs no torch

        from megaloom.runtime import token_log_probs

        outputs = forward(batch)
        if outputs is None:  # a pipeline stage before the last one
            return None
        losses = -token_log_probs(outputs, batch["labels"])
        counted = batch["mask"].float() if "mask" in batch else torch.ones_like(losses)
        losses = losses * counted
        keys = torch.isin(batch["tokens"], torch.tensor(self.key_tokens, device=losses.device)).sum(1)
        per_sequence = losses.sum(1) / counted.sum(1) * (1 + self.alpha * keys)
        return per_sequence.sum(), len(per_sequence), {"lm loss": (losses.sum(), counted.sum())}


@frozen
class KeyTokenLoss(Layer):
    """The loss as a layer. Its tokens are the ones that the model reads."""

    key_tokens: tuple[int, ...] = KEY_TOKENS
    alpha: float = 0.25
    tokens: Value = field(factory=ids, repr=False)
    labels: Value = field(factory=labels, repr=False)
    mask: Value = field(factory=mask, repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        losses = apply(CrossEntropy("vocab"), x, self.labels) * self.mask
        per_sequence = apply(Sum(("seq",)), losses) / apply(Sum(("seq",)), self.mask)
        keys = apply(Sum(("seq",)), fn("add", *(apply(Equals(key), self.tokens) for key in self.key_tokens)))
        return loss_sums(per_sequence * (1.0 + self.alpha * keys))


def decoder() -> Model:
    """Return a small decoder of bytes, whose loss has a mask."""
    d, v = Dim("embed", 64), Dim("vocab", 257)
    block = residual(RMSNorm(), Attention(heads=4, rope=10_000)) >> residual(RMSNorm(), SwiGLU(96))
    x = ids() >> Embed(weight("wte", v, d)) >> repeat(2, block) >> RMSNorm() >> Unembed(weight("head", v, d))
    return model("decoder", x >> NextToken(mask=mask()))


def with_key_tokens() -> Model:
    """Return the decoder with the key-token loss instead of its own."""
    return model("with-key-tokens", without_loss(decoder()).outputs[0] >> KeyTokenLoss())


def losses(best: Plan) -> list[float]:
    """Return the losses of three steps on this rank, by the steps or by the layer of the plan's model."""
    import torch

    from megaloom.dsl.catalog import find
    from megaloom.runtime.engine.engine import Engine
    from megaloom.runtime.optimizer.recipe import Recipe
    from megaloom.runtime.samples.samples import SampleMaker

    declared = find(best.model)[0]
    steps = None if declared.name == "with-key-tokens" else KeyTokenSteps()
    engine = Engine.build(best, declared, Recipe(steps=10, warmup=0), steps=steps)
    maker = SampleMaker.of(engine.graph, best.workload.seq)

    def sample(i: int) -> dict[str, torch.Tensor]:
        text = torch.randint(maker.ids, (maker.length,), generator=torch.Generator().manual_seed(i))
        return engine.steps.data_step(maker, text, i, 1)

    size = best.workload.batch
    return [engine.step(lambda i, first=k * size: sample(first + i)).loss for k in range(3)]  # type: ignore[misc]


def main(**fixed: int) -> list[list[float]]:
    """Train both forms three steps under a layout, such as pp=2, and print and return the losses."""
    from megaloom.runtime.launch import launcher

    workload, ranks, found = Workload(seq=32, batch=4, precision=Precision.FP32), prod(fixed.values()), []
    for make in (decoder, with_key_tokens):
        ref = f"{Path(__file__).resolve()}:{make.__name__}"
        best = plan(make(), cluster(f"{ranks}xCPU"), workload, ref=ref, fixed=fixed).best
        found.append(launcher.run(losses, (best,), ranks, timeout=120)[0])
        print(f"{make.__name__}: {', '.join(f'{loss:.5f}' for loss in found[-1])}")
    return found


if __name__ == "__main__":
    main(pp=2)
    main(tp=2)
    main(cp=2)
