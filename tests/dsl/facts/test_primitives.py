"""The primitives of a node, and the chains of pointwise ops in them."""

from __future__ import annotations

from attrs import frozen

from megaloom.dsl import Dim, Embed, Layer, Value, fn, graph, ids, model, saved, weight
from megaloom.dsl.node import primitives


def test_a_value_used_twice_does_not_double_the_work() -> None:
    """60 doublings have 2^60 paths to the first value, and 3,000 additions are deeper than Python's stack."""

    @frozen
    class Deep(Layer):
        doublings: int
        additions: int

        def body(self, x: Value, /, **side: Value) -> Value:
            y = fn("silu", x)
            for _ in range(self.doublings):
                y = y + y
            for _ in range(self.additions):
                y = y + 1.0
            return y

    wte = weight("wte", Dim("vocab", 11), Dim("embed", 8))
    for layer in (Deep(60, 0), Deep(0, 3000)):
        g = graph(model("m", ids() >> Embed(wte) >> layer))
        deep = g.nodes[-1]
        assert len(list(primitives(deep.value))) == 1 + layer.doublings + layer.additions
        assert [s.what for s in saved([deep], batch=1, seq=4)] == ["input"]
