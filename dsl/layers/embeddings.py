"""Embeddings and the output projection: tokens, positions, image patches, logits."""

from __future__ import annotations

from attrs import field, frozen

from megaloom.dsl.dims import Dim
from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.documents import DocumentPositions
from megaloom.dsl.ops.dot import dot
from megaloom.dsl.ops.shape import Patches
from megaloom.dsl.ops.weight import Lookup, PositionLookup, weight
from megaloom.dsl.value import Value, apply

from .linear import project


@frozen
class Embed(Layer):
    """The row of a table [vocab embed] for each token id: [batch seq] to [batch seq embed]."""

    table: Value

    def body(self, x: Value, /, **side: Value) -> Value:
        return apply(Lookup("vocab"), x, self.table)


@frozen
class PatchEmbed(Layer):
    """A linear projection of each patch of `size` by `size` pixels: an image to [batch patches embed].

    Source: Dosovitskiy et al., arXiv:2010.11929.
    """

    size: int
    embed: Dim
    bias: bool = True

    def body(self, x: Value, /, **side: Value) -> Value:
        return project("patch", apply(Patches(self.size), x), self.embed, over=("pixels",), bias=self.bias)


@frozen
class Positions(Layer):
    """x plus a learned vector for each position: row i + offset of a table [position embed] at position i.

    With the side input `documents`, positions restart at each document, unless `restart` is False.
    """

    table: Value
    offset: int = 0
    restart: bool = field(default=True, kw_only=True)

    def body(self, x: Value, /, documents: Value | None = None, **side: Value) -> Value:
        if documents is None or not self.restart:
            return x + apply(PositionLookup("position", self.offset), x, self.table)
        return x + apply(
            Lookup("position"),
            apply(DocumentPositions(documents.shape.dims[1].name, self.offset), documents),
            self.table,
        )


@frozen
class Unembed(Layer):
    """The logits [batch seq vocab]: x times a table [vocab embed]. Give it the table of `Embed` to tie the two."""

    table: Value
    bias: bool = False

    def body(self, x: Value, /, **side: Value) -> Value:
        y = dot(x, self.table, "embed")
        return y + weight("bias", self.table["vocab"], std=0.0) if self.bias else y
