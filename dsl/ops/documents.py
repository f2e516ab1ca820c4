"""Packed sequences: several documents in one sequence, which do not read one another."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from megaloom.dsl.base_ops import AlongSequence
from megaloom.dsl.dims import BATCH, SEQ, Dim, DType, Shape
from megaloom.dsl.errors import ShapeError, caller
from megaloom.dsl.op import ALONE, Decoding
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import WorkKind

from .weight import Input


@frozen
class DocumentIndices(Input):
    """The index of the document to which each token belongs, [batch seq]. It does not decrease along a sequence."""


@frozen
class DocumentPositions(AlongSequence):
    """The position of each token in its document: document indices [batch seq] to ids [batch seq].

    The first token of each document has position `first`.
    """

    along: str = "seq"
    first: int = 0
    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY
    arity: ClassVar[int] = 1

    def shape(self, *args: Shape) -> Shape:
        args[0][self.along]
        return args[0]

    def dtype(self, *args: DType) -> DType:
        if args[0] is not DType.INDEX:
            raise ShapeError(f"{self} needs document indices, an input such as documents()")
        return DType.INDEX

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()

    def decoding(self, out: Value, along: str) -> Decoding:
        return Decoding(position=True) if along == self.along else ALONE  # it writes one document

    def mixes_documents(self, out: Value) -> bool:
        return False


def documents(name: str = "documents", seq: Dim = SEQ) -> Value:
    """Return an input of document indices [batch seq], for `layer.given(documents=documents())`.

    Attention inside that layer reads tokens of the same document only. Tokens of one document follow one another, so
    indices do not decrease along a sequence. Padding at the end is a document of its own.
    """
    return Value(DocumentIndices(name), (), Shape((BATCH, seq)), dtype=DType.INDEX, at=caller())


def reads_documents(v: Value) -> bool:
    """Return True if document indices are among the arguments of a value."""
    return any(isinstance(a.source.op, DocumentIndices) for a in v.args)
