"""A model that points: its losses are cross-entropies over the positions of a source."""

from attrs import frozen

from megaloom.dsl import (
    CrossEntropy,
    Dim,
    Embed,
    Layer,
    Model,
    RMSNorm,
    Sum,
    Value,
    apply,
    dot,
    ids,
    labels,
    loss_sums,
    model,
    weight,
    weighted_sum,
)

POSITIONS = 24


@frozen
class Pointed(Layer):
    """The cross-entropy of the position of the source that fits a vector."""

    memory: Value
    labels: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return loss_sums(apply(CrossEntropy("source"), dot(x, self.memory, "embed"), self.labels))


@frozen
class Pooled(Layer):
    """The sum of the vectors of all positions."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Sum(("seq",)), x) * 0.1


def pointer() -> Model:
    """Return a model of two losses: one position for each sequence, and one for each token."""
    table = weight("wte", Dim("vocab", 97), Dim("embed", 16))
    memory = ids("source_tokens", seq=Dim("source", POSITIONS)) >> Embed(table) >> RMSNorm()
    x = ids() >> Embed(table) >> RMSNorm()
    of_tokens = x >> Pointed(memory, labels("pointed"))
    return model("pointer", weighted_sum((1.0, x >> Pooled() >> Pointed(memory, labels(seq=None))), (0.5, of_tokens)))
