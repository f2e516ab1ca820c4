"""Weights: trained ones, and their elements on a device if an axis does not divide a dim."""

import pytest

from megaloom.dsl import Dim, Embed, MoE, Split, SwiGLU, Unembed, costs, graph, ids, model, params, weight
from megaloom.dsl.sharding_table import Sharded, padded_vocabulary
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
    assert [padded_vocabulary(127, Split(tp=tp)) for tp in (1, 2)] == [127, 128]
    assert [padded_vocabulary(50_257, Split(tp=tp, vocab_multiple=128)) for tp in (1, 2, 8)] == [50_304, 50_432, 51_200]
    padded, split = Sharded("tp", "pad", multiple=128), Split(tp=8, vocab_multiple=64)
    assert (padded.local(50_257, 8, split), padded.physical(50_257, 8, split)) == (6_400, 51_200)
    whole = Sharded("tp", "whole")
    assert (whole.local(510, 4, split), whole.local(510, 2, split), whole.physical(510, 4, split)) == (510, 255, 510)


def test_padding_of_the_vocabulary_counts_in_the_facts_of_a_device():
    wte = weight("wte", Dim("vocab", 50_257), Dim("embed", 16))
    g = graph(model("m", ids() >> Embed(wte) >> Unembed(wte)))
    for tp, vocab in ((1, 50_304), (2, 50_432), (4, 50_688)):
        logits = costs(g.nodes[-1], batch=1, seq=8, split=Split(tp=tp, vocab_multiple=128))
        assert logits.params == 16 * vocab // tp
        assert sum(w.flops for w in logits.work) == 2 * 8 * 16 * vocab // tp
