"""Weights: trained ones, and their elements on a device if an axis does not divide a dim."""

import pytest

from megaloom.dsl import Dim, Embed, MoE, Split, SwiGLU, costs, graph, ids, model, params, weight
from megaloom.dsl.sharding_table import SHARDING, Sharded
from megaloom.examples.own_module import SquaredReLU


def test_the_facts_know_which_weights_are_trained():
    moe = MoE(SwiGLU(32), 8, 2, corrected=True, score="sigmoid")
    wte = weight("wte", Dim("vocab", 64), Dim("embed", 16), trained=False)
    m = model("frozen table", ids() >> Embed(wte) >> moe)
    assert params(m, trained=False) == 64 * 16 + 8
    assert params(m) == 8 * 16 + 8 * 3 * 16 * 32


@pytest.mark.parametrize(
    ("tp", "etp", "experts"), [(4, 4, 1_044_480), (1, 4, 1_044_480), (2, 2, 522_240), (4, 1, 1_044_480)]
)
def test_a_dim_of_an_expert_is_whole_where_etp_does_not_divide_it(tp, etp, experts):
    x = ids() >> Embed(weight("wte", Dim("vocab", 64), Dim("embed", 128)))
    m = model("m", x >> MoE(SquaredReLU(510), experts=8, top_k=2))
    result = costs(graph(m).nodes[-1], batch=1, seq=16, split=Split(tp=tp, etp=etp, sequence_parallel=tp > 1))
    assert result.expert_params == experts


def test_the_vocabulary_is_padded():
    vocab = SHARDING["vocab"]
    assert (vocab.local(127, 2), vocab.physical(127, 2), vocab.physical(127, 1)) == (64, 128, 127)
    multiple = Sharded("tp", "pad", multiple=128)
    assert (multiple.local(50_257, 8), multiple.physical(50_257, 8)) == (6_400, 51_200)
    whole = Sharded("tp", "whole")
    assert (whole.local(510, 4), whole.local(510, 2), whole.physical(510, 4)) == (510, 255, 510)
