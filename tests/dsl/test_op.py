"""An op states all that is known of it: what it leaves out is an error, and facts follow from what it says."""

from __future__ import annotations

from typing import ClassVar

import pytest
from attrs import frozen

from megaloom.dsl import (
    MLP,
    AlongSequence,
    Attention,
    Decoding,
    Dim,
    Elementwise,
    Extents,
    Linear,
    Op,
    Reads,
    RMSNorm,
    Shape,
    Sizes,
    Split,
    Value,
    WorkKind,
    apply,
    costs,
    dot,
    flops,
    graph,
    ids,
    model,
    parallel,
    residual,
    weight,
)
from megaloom.dsl.errors import ShapeError
from megaloom.dsl.files.built_in import built_in_kinds
from megaloom.dsl.layer import Layer
from megaloom.dsl.ops.weight import Lookup

VOCAB, EMBED = Dim("vocab", 16), Dim("embed", 8)


@frozen
class RunningSum(AlongSequence):
    """The sum of all positions so far."""

    work_kind: ClassVar[WorkKind] = WorkKind.MEMORY

    def shape(self, *args: Shape) -> Shape:
        return args[0]

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return ()


@frozen
class Outer(Op):
    """Products of all pairs of channels: [.. embed], [.. other] to [.. embed other]."""

    work_kind: ClassVar[WorkKind] = WorkKind.PRODUCT
    arity: ClassVar[int] = 2

    def shape(self, *args: Shape) -> Shape:
        return Shape((*args[0], args[1]["other"]))

    def reads(self, out: Value) -> tuple[Reads, ...]:
        return Reads(), Reads()

    def flops(self, out: Shape, args: tuple[Shape, ...], size: Sizes) -> int:
        return 2 * size(out)

    def extents(self, out: Value) -> Extents:
        x, y = (a.shape for a in out.args)
        return Extents(tuple(d for d in x if d.name in y), (x["embed"],), (y["other"],))

    def saved_values(self, out: Value) -> tuple[Value, ...]:
        return out.args


def embedded() -> Value:
    return apply(Lookup("vocab"), ids(), weight("table", VOCAB, EMBED))


def test_a_class_that_leaves_a_statement_out_is_refused() -> None:
    with pytest.raises(ShapeError, match="Silent does not state reads, work_kind, saved_values: an op says along"):

        @frozen
        class Silent(Op):
            def shape(self, *args: Shape) -> Shape:
                return args[0]

    with pytest.raises(ShapeError, match=r"Free does not state saved_values.*\n.*Elementwise"):

        class Free(Elementwise):
            pass

    with pytest.raises(ShapeError, match="Fast does not state flops, extents"):

        class Fast(RunningSum):
            work_kind: ClassVar[WorkKind] = WorkKind.SCAN


def test_every_op_that_is_built_in_states_what_it_reads_of_each_argument() -> None:
    kinds = [k for k in built_in_kinds().values() if issubclass(k, Op) and not issubclass(k, Layer)]
    stated = [k for k in kinds if "base_class" not in vars(k)]
    assert len(stated) > 25
    assert all(k.reads is not Op.reads and isinstance(k.work_kind, WorkKind) for k in stated)


def test_context_parallelism_gathers_what_is_read_along_the_sequence() -> None:
    node = graph(model("m", apply(RunningSum("seq"), embedded()))).nodes[-1]
    exchanged = costs(node, batch=2, seq=8, split=Split(cp=2)).collectives
    assert [(c.kind, c.axis, c.backward, c.elements) for c in exchanged] == [
        ("all_gather", "cp", False, 2 * 8 * 8),
        ("reduce_scatter", "cp", True, 2 * 8 * 8),
    ]


def test_its_product_counts_forward_and_for_each_gradient() -> None:
    x = embedded()
    m = model("m", apply(Outer(), x, dot(x, weight("w", EMBED, Dim("other", 4)), "embed")))
    node = next(n for n in graph(m).nodes if isinstance(n.op, Outer))
    (work,) = costs(node, batch=2, seq=8).work
    assert (work.count, work.m, work.n, work.k) == (2 * 8, 8, 4, 1)
    assert work.flops == work.dgrad // 2 == 2 * 2 * 8 * 8 * 4
    assert flops(m, batch=2, seq=8).total == sum(
        w.flops + w.dgrad + w.wgrad for n in graph(m).nodes for w in costs(n, batch=2, seq=8).work
    )


def test_layers_side_by_side_are_nodes_of_their_own() -> None:
    m = model("m", embedded() >> residual(RMSNorm(), parallel(Attention(heads=2), MLP(16))))
    assert [n.name for n in graph(m).nodes][-5:] == ["rms_norm.0", "attention.0", "mlp.0", "add.0", "add.1"]
    assert parallel(MLP(16)) == MLP(16)
    with pytest.raises(ShapeError, match=r"layers side by side must have results of one shape, got \[.*\] and \["):
        model("m", embedded() >> parallel(MLP(16), Linear(Dim("embed", 4))))


def test_what_reads_along_the_written_tokens_is_not_decoded_unless_it_says_how() -> None:
    v = apply(RunningSum("seq"), embedded())
    assert v.op.decoding(v, "seq") == Decoding(refusal="reads all tokens at once")
    assert v.op.decoding(v, "source") == Decoding()
    assert v.op.mixes_documents(v)
