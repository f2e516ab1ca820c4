"""Losses: the last layer of a model that trains, as in `… >> Unembed(head) >> NextToken()`.

A loss is a layer whose body ends in `loss_sums(losses, weights)`. To write one, declare a class with a body, as for any
layer. It reads the values that training gives as inputs: `labels()`, `mask()`, `token_weights()`.
"""

from __future__ import annotations

from typing import ClassVar

from attrs import field, frozen

from megaloom.dsl.layer import Layer, is_layer
from megaloom.dsl.ops import weight as inputs
from megaloom.dsl.ops.loss import CrossEntropy, StackLosses, loss_sums
from megaloom.dsl.ops.sequence import Inside, Shift
from megaloom.dsl.value import Value, apply, fn, not_a_layer


@frozen
class NextToken(Layer):
    """The cross-entropy of the next token: logits [batch seq vocab] to [sums=2].

    labels: the token after each position. mask: 1 for positions that count, 0 for others. weights: of each position.
    offset: predict the token this many positions after the next one; positions near the end, whose token is beyond the
    sequence, do not count (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, equation 24).
    """

    labels: Value = field(factory=inputs.labels, repr=False)
    offset: int = field(default=0, kw_only=True)
    mask: Value | None = field(default=None, kw_only=True, repr=False)
    weights: Value | None = field(default=None, kw_only=True, repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        labels, given = self.labels, [w for w in (self.mask, self.weights) if w is not None]
        if self.offset:
            labels = apply(Shift("seq", self.offset), labels)
            given.append(apply(Inside("seq", self.offset), labels))
        weights = fn("mul", *given) if len(given) > 1 else given[0] if given else None
        return loss_sums(apply(CrossEntropy("vocab"), x, labels), weights)


@frozen
class MaskedToken(Layer):
    """The cross-entropy of the tokens that the data has masked: logits [batch seq vocab] to [sums=2].

    labels: the tokens before masking. mask: 1 at positions to predict. Source: Devlin et al., arXiv:1810.04805.
    """

    labels: Value = field(factory=inputs.labels, repr=False)
    mask: Value = field(factory=inputs.mask, repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        return loss_sums(apply(CrossEntropy("vocab"), x, self.labels), self.mask)


@frozen
class SequenceToSequence(Layer):
    """The cross-entropy of the tokens that a decoder writes for its source: logits [batch seq vocab] to [sums=2].

    labels: the token after each position of the target. mask: 0 at positions after the end of the target. start: the
    token that the decoder reads first. padding: the token at positions after the end of the target. infilling: where
    the source has document indices, which mark its padding, text without pairs is BART's text infilling, whose target
    is all of the text (Lewis et al., arXiv:1910.13461, section 2.2); else it is T5's span corruption.
    """

    labels: Value = field(factory=inputs.labels, repr=False)
    mask: Value = field(factory=inputs.mask, repr=False)
    start: int = field(default=0, kw_only=True)
    padding: int = field(default=0, kw_only=True)
    infilling: bool = field(default=False, kw_only=True)

    def body(self, x: Value, /, **side: Value) -> Value:
        return loss_sums(apply(CrossEntropy("vocab"), x, self.labels), self.mask)


@frozen
class Classification(Layer):
    """The cross-entropy of one class for each sequence or image: logits [batch vocab] to [sums=2]."""

    labels: Value = field(factory=lambda: inputs.labels(seq=None), repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        return loss_sums(apply(CrossEntropy("vocab"), x, self.labels))


@frozen
class SentenceOrder(Layer):
    """The cross-entropy of the order of two texts in a sequence: logits [batch vocab=2] to [sums=2].

    labels: 0 if the second text follows the first, 1 if the data has swapped them. Source: Devlin et al.,
    arXiv:1810.04805, section 3.1; swapped texts are those of Megatron-LM and of ALBERT (arXiv:1909.11942, section 3.1).
    """

    labels: Value = field(factory=lambda: inputs.labels("next_sentence_label", seq=None), repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        return loss_sums(apply(CrossEntropy("vocab"), x, self.labels))


@frozen
class TokenClassification(Layer):
    """The cross-entropy of one class for each token: logits [batch seq vocab] to [sums=2].

    mask: 0 at tokens without a class, such as padding.
    """

    labels: Value = field(factory=inputs.labels, repr=False)
    mask: Value = field(factory=inputs.mask, repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        return loss_sums(apply(CrossEntropy("vocab"), x, self.labels), self.mask)


@frozen
class Stacked(Layer):
    """The sums of several losses, of which training minimises the weighted sum: [sums=2] to [losses sums=2]."""

    coefficients: tuple[float, ...]
    others: tuple[Value, ...] = field(repr=False)

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(StackLosses(self.coefficients), x, *self.others)


@frozen(init=False)
class WeightedSum(Layer):
    """Several losses of one value, as in `WeightedSum((1.0, NextToken(y)), (1e-4, ZLoss()))`.

    Training minimises sum(coefficient * mean of the loss), and reports each mean. For losses of different values use
    `weighted_sum`.
    """

    terms: tuple[tuple[float, Layer], ...]
    transparent: ClassVar[bool] = True

    def __init__(self, *terms: tuple[float, Layer]) -> None:
        for _, layer in terms:
            is_layer(None, None, layer)
        self.__attrs_init__(terms)

    def body(self, x: Value, /, **side: Value) -> Value:
        return weighted_sum(*((coefficient, layer(x, **side)) for coefficient, layer in self.terms))


def weighted_sum(*terms: tuple[float, Value]) -> Value:
    """Return the end of a model with several losses: training minimises sum(coefficient * mean of the loss).

    terms: (coefficient, value that ends in a loss). Raises ShapeError if a value does not end in a loss.
    """
    for _, v in terms:
        if not isinstance(v, Value):
            raise not_a_layer(v)
    coefficients, (first, *others) = tuple(float(c) for c, _ in terms), [v for _, v in terms]
    return first >> Stacked(coefficients, tuple(others))
