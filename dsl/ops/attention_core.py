"""The attention core: softmax(q kᵀ) v, with masks, windows and biases."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from megaloom.dsl.dims import (
    BATCH,
    Dim,
    DType,
    Shape,
    Sizes,
)
from megaloom.dsl.errors import ShapeError, divisors
from megaloom.dsl.op import PLAIN, Decoding, Op, Reads
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import Extents, WorkKind


@frozen
class RelativeBuckets:
    """The buckets of T5's relative position bias: each distance between key and query maps to one row of a table.

    Half of the buckets hold one distance each, starting from 0. The others hold ranges that grow logarithmically up to
    `max_distance`; the last one also holds everything beyond. bidirectional: half of the buckets are for keys after
    the query. Source: Raffel et al., arXiv:1910.10683.
    """

    buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True

    def __attrs_post_init__(self) -> None:
        exact = self.buckets // (4 if self.bidirectional else 2)  # distances with a bucket each
        if exact < 1 or (self.bidirectional and self.buckets % 2):
            needed = "an even number of at least 4" if self.bidirectional else "at least 2"
            raise ShapeError(f"buckets must be {needed}, got {self.buckets}")
        if self.max_distance <= exact:
            raise ShapeError(
                f"max_distance {self.max_distance} is too small: {self.buckets} buckets hold {exact} distances "
                f"exactly, so it must be more than {exact}"
            )


@frozen(kw_only=True)
class Attend(Op):
    """Softmax attention of queries [.. heads head_dim] to keys and values [.. kv_heads head_dim].

    Query head i reads key/value head i * kv_heads / heads. The scores are never stored: the kernel saves the
    log-sum-exp of each row (Dao et al., arXiv:2205.14135). Arguments: q, k, v, then sinks [heads] with `sink`, then a
    table [buckets heads] with `relative`, then the document indices of queries and of keys with `documents`.

    causal: no position reads a later one. window: a position reads itself and the window - 1 positions before it
    (Beltagy et al., arXiv:2004.05150). scale: of the scores; None is head_dim^-0.5. softcap: scores become
    softcap * tanh(scores / softcap) (Gemma 2, arXiv:2408.00118). alibi: subtract slope * distance, one slope per head
    (Press et al., arXiv:2108.12409). sink: a learned score per head that takes probability but has no value (Xiao et
    al., arXiv:2309.17453). relative: add a learned bias by distance. documents: a query reads keys of its own document
    only. Facts count the scores of all documents, as if a sequence were one: that is an upper bound.
    """

    causal: bool = True
    dropout: float = 0.0
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sink: bool = False
    relative: RelativeBuckets | None = None
    documents: bool = False
    work_kind: ClassVar[WorkKind] = WorkKind.ATTENTION

    def __attrs_post_init__(self) -> None:
        if self.window is not None and (self.window < 1 or not isinstance(self.window, int)):
            raise ShapeError(f"window must be a whole number of at least 1, got {self.window}")
        if self.window is not None and not self.causal:
            raise ShapeError(f"window={self.window} needs causal attention: set causal=True, or window=None")
        if self.softcap is not None and self.softcap <= 0:
            raise ShapeError(f"softcap must be more than 0, got {self.softcap}")

    def shape(self, *args: Shape) -> Shape:
        q, k, v, *others = args
        sequence_dim(q), sequence_dim(k)
        n, g = q["heads"].known, k["kv_heads"].known
        if n % g:
            raise ShapeError(f"{n} query heads cannot share {g} key/value heads evenly\nkv_heads can be {divisors(n)}")
        if q["head_dim"] != k["head_dim"]:
            raise ShapeError(f"queries {q} do not fit keys {k}: {q['head_dim']} is not {k['head_dim']}")
        if set(k.without("head_dim")) != set(v.without("head_dim")):
            raise ShapeError(f"keys {k} do not fit values {v}: they may differ in head_dim only")
        wanted = [("a sink", Shape((q["heads"],)))] * self.sink
        if self.relative is not None:
            wanted.append(("a table of biases", Shape((Dim("buckets", self.relative.buckets), q["heads"]))))
        if self.documents:
            wanted += [("document indices", Shape((BATCH, sequence_dim(x)))) for x in (q, k)]
        if [shape for _, shape in wanted] != others:
            want = ", ".join(f"{what} {shape}" for what, shape in wanted) or "nothing"
            have = ", ".join(map(str, others)) or "nothing"
            raise ShapeError(f"after queries, keys and values attention needs {want}, got {have}")
        return Shape((*q.without("head_dim"), v["head_dim"]))

    def dtype(self, *args: DType) -> DType:
        others = args[:-2] if self.documents else args
        if self.documents and any(a is not DType.INDEX for a in args[-2:]):
            raise ShapeError("attention in documents needs their indices, an input such as documents()")
        return super().dtype(*others)

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        """Return the FLOPs of q kᵀ and of probabilities times v; masked pairs of a causal mask or window don't count.

        With s keys and window w, a row reads w keys on average less the triangle at the start: (2 s w - w²) / 2s.
        """
        q, k = args[:2]
        keys = size.of(sequence_dim(k))
        per_key = 2 * (size(q) + size(out))
        if not self.causal:
            return per_key * keys
        seen = keys if self.window is None else min(keys, self.window)
        return per_key * (2 * keys * seen - seen * seen) // (2 * keys)

    def extents(self, out: Value) -> Extents:
        q, k = (a.shape for a in out.args[:2])
        return Extents(
            tuple(d for d in q if d.name in ("batch", "heads")),
            tuple(q.without("batch", "heads", "head_dim")),
            tuple(k.without("batch", "kv_heads", "head_dim")),
            (q["head_dim"],),
        )

    def reads(self, out: Value) -> tuple[Reads, ...]:
        """Queries read all keys and values; masks and biases depend on the positions of both."""
        q, k, *_ = (a.shape for a in out.args)
        places = self.causal or self.alibi or self.relative is not None or self.documents
        queries = Reads(offset=frozenset({sequence_dim(q).name} if places else ()), located=True)
        whole = frozenset({sequence_dim(k).name})
        keys = Reads(whole, keys=True, heads=("kv_heads", q["heads"].known))
        indices = (queries, Reads(whole, keys=True)) if self.documents else ()
        others = len(out.args) - 3 - len(indices)
        return queries, keys, keys, *(PLAIN for _ in range(others)), *indices

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return (*out.args, out)

    def saved_buffers(self, out: Value) -> tuple[tuple[str, Shape, DType], ...]:
        return (("log-sum-exp", out.shape.without("head_dim"), DType.FLOAT32),)

    def decoding(self, out: Value, along: str) -> Decoding:
        queries, keys = (sequence_dim(a.shape).name for a in out.args[:2])
        if along not in (queries, keys):
            return Decoding(refusal="attends to all tokens at once")
        if queries == keys:  # it is causal: `decoding_graph` refuses others
            return Decoding(state=True)
        if queries != along:
            return Decoding(refusal="reads the written tokens from another sequence")
        if self.causal or self.alibi or self.relative is not None:
            return Decoding(refusal="attends by the distance between two sequences")
        return Decoding(state=True)

    def mixes_documents(self, out: Value) -> bool:
        return not self.documents


def sequence_dim(x: Shape) -> Dim:
    """Return the sequence dim of queries, keys or values. Raises ShapeError if there is not exactly one."""
    return x.positions("heads", "kv_heads", "head_dim")
