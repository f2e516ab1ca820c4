"""A model that points: its loss is a cross-entropy over the positions of a source."""

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


def pointer(*, each: bool = False) -> Model:
    """Return a model that points to one position for each sequence; with `each`, also to one for each token."""
    table = weight("wte", Dim("vocab", 97), Dim("embed", 16))
    memory = ids("source_tokens", seq=Dim("source", POSITIONS)) >> Embed(table) >> RMSNorm()
    x = ids() >> Embed(table) >> RMSNorm()
    of_sequence = x >> Pooled() >> Pointed(memory, labels(seq=None))
    if not each:
        return model("pointer", of_sequence)
    return model("pointer", weighted_sum((1.0, of_sequence), (0.5, x >> Pointed(memory, labels("pointed")))))
