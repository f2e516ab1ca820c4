"""Weights that are one number have no rows to shard."""

from __future__ import annotations

import pytest
from attrs import frozen

from megaloom.dsl import Dim, Embed, Layer, Model, NextToken, RMSNorm, Unembed, Value, graph, ids, model, weight
from megaloom.dsl.errors import UserError
from megaloom.planner.contract.choices import Shard
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.workload import Workload
from megaloom.planner.hardware.cluster_names import cluster
from megaloom.planner.rules.rules import violations
from megaloom.planner.search.search import plan


@frozen
class Gain(Layer):
    """x times one number."""

    def body(self, x: Value, /, **side: Value) -> Value:
        return x * weight("gain", mean=1.0)


def scaled() -> Model:
    wte, head = (weight(name, Dim("vocab", 128), Dim("embed", 64)) for name in ("wte", "head"))
    return model("scaled", ids() >> Embed(wte) >> Gain() >> RMSNorm() >> Unembed(head) >> NextToken())


def test_rows_are_sharded_of_weights_with_dims() -> None:
    work, machine = Workload(seq=32, batch=4), cluster("2xH100")
    (found,) = violations(Layout(dp=2, shard=Shard.WEIGHTS), graph(scaled()), work, machine)
    assert str(found) == (
        "`--shard weights` shards rows, and the weight 'gain.0.gain' is one number [fsdp-rows]\n"
        "give that weight a dim of size 1, or use --shard optimizer"
    )
    assert violations(Layout(dp=2, shard=Shard.OPTIMIZER), graph(scaled()), work, machine) == ()


def test_a_search_with_that_wish_is_refused() -> None:
    with pytest.raises(UserError, match=r"'gain\.0\.gain' is one number"):
        plan(scaled(), cluster("2xH100"), Workload(seq=32, batch=4), ref="scaled", fixed={"shard": Shard.WEIGHTS})
