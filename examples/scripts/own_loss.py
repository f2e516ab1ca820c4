"""Three losses of your own. Each is one class with one body, and trains on every layout, sharded logits included.

plan examples/scripts/own_loss.py:with_z_loss --gpus 2xCPU --tp 2
python -m megaloom.examples.scripts.own_loss    # compares two processes with one
"""

from pathlib import Path

from attrs import field, frozen

from megaloom.dsl import (
    Attention,
    CrossEntropy,
    Dim,
    Embed,
    Equals,
    Layer,
    LogSumExp,
    Model,
    NextToken,
    RMSNorm,
    Sum,
    SwiGLU,
    Unembed,
    Value,
    WeightedSum,
    apply,
    ids,
    labels,
    loss_sums,
    model,
    repeat,
    residual,
    weight,
)
from megaloom.planner import Precision, Workload, cluster, plan


@frozen
class ZLoss(Layer):
    """The square of log(sum(exp(logits))), which keeps logits small. Source: PaLM, arXiv:2204.02311, section 5."""

    def body(self, x: Value, /, **side: Value) -> Value:
        z = apply(LogSumExp("vocab"), x)
        return loss_sums(z * z)


@frozen
class LabelSmoothing(Layer):
    """Cross-entropy with (1 - smoothing) of the label and `smoothing` of all tokens alike.

    Source: Szegedy et al., arXiv:1512.00567, section 7.
    """

    smoothing: float
    labels: Value = field(factory=labels, repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        uniform = apply(LogSumExp("vocab"), x) - apply(Sum(("vocab",)), x) / x["vocab"].known
        token = apply(CrossEntropy("vocab"), x, self.labels)
        return loss_sums((1 - self.smoothing) * token + self.smoothing * uniform)


@frozen
class WeightedById(Layer):
    """Cross-entropy in which each label with one id counts `factor` times, such as the end of a line."""

    index: int
    factor: float
    labels: Value = field(factory=labels, repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        weights = 1.0 + (self.factor - 1.0) * apply(Equals(self.index), self.labels)
        return loss_sums(apply(CrossEntropy("vocab"), x, self.labels), weights)


def decoder() -> Value:
    """Return the logits of a small decoder of bytes."""
    d, v = Dim("embed", 64), Dim("vocab", 257)
    block = residual(RMSNorm(), Attention(heads=4, rope=10_000)) >> residual(RMSNorm(), SwiGLU(96))
    return ids() >> Embed(weight("wte", v, d)) >> repeat(2, block) >> RMSNorm() >> Unembed(weight("head", v, d))


def with_z_loss() -> Model:
    """Next token, and a little of the z-loss; each is reported by itself."""
    return model("with-z-loss", decoder() >> WeightedSum((1.0, NextToken()), (1e-4, ZLoss())))


def with_label_smoothing() -> Model:
    return model("with-label-smoothing", decoder() >> LabelSmoothing(0.1))


def with_weighted_lines() -> Model:
    return model("with-weighted-lines", decoder() >> WeightedById(ord("\n"), 5.0))


def main() -> None:
    """Print the difference between two processes that share the logits and one process, for each loss."""
    from megaloom.runtime.training import verify  # not at the top: planning these models needs no torch

    workload = Workload(seq=32, batch=4, precision=Precision.FP32)
    for make in (with_z_loss, with_label_smoothing, with_weighted_lines):
        ref = f"{Path(__file__).resolve()}:{make.__name__}"
        found = plan(make(), cluster("2xCPU"), workload, ref=ref, fixed={"tp": 2})
        print(f"{make.__name__}: losses differ by {verify.compare(found.best).loss_error:.1e}")


if __name__ == "__main__":
    main()
