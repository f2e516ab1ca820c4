"""Low-rank adapters: what is trained, what is saved and computed, and which targets are refused."""

import json
from math import sqrt

import pytest

from megaloom.dsl import (
    Adapted,
    Attention,
    Model,
    Split,
    SwiGLU,
    UserError,
    costs,
    fingerprint,
    flops,
    graph,
    lora,
    packed,
    params,
    saved,
)
from megaloom.dsl.catalog import find
from megaloom.dsl.facts.parameters import parameters_text
from megaloom.dsl.files.model_file import model_from_json, model_to_json

LLAMA = {"q_proj": 4096 + 4096, "k_proj": 4096 + 1024, "o_proj": 4096 + 4096, "down_proj": 14336 + 4096}


def made(name: str) -> Model:
    return find(name)[0]


@pytest.mark.parametrize("rank", [1, 16])
@pytest.mark.parametrize("target", LLAMA)
def test_trained_parameters_are_rank_times_inputs_and_outputs(target: str, rank: int) -> None:
    base = made("llama3-8b")
    m = lora(base, rank, targets=[target])
    assert params(m, trained=True) == 32 * rank * LLAMA[target]
    assert params(m) == params(base) + params(m, trained=True)
    assert params(m, trained=False) == params(base)


def test_the_default_is_what_peft_adapts() -> None:
    """Queries and values; in GPT-2 the one matrix that has both, whose parts share A."""
    assert lora(made("llama3-8b")).lora.targets == ("q_proj", "v_proj")  # type: ignore[union-attr]
    gpt = lora(made("gpt2"), 8)
    assert gpt.lora is not None
    assert gpt.lora.targets == ("c_attn",)
    assert gpt.lora.alpha == 16
    assert params(gpt, trained=True) == 12 * 8 * (768 + 3 * 768)
    assert parameters_text(gpt) == "124,734,720 parameters (294,912 trained)"


def test_nodes_and_weights_keep_their_names() -> None:
    base, m = made("llama3-1b"), lora(made("llama3-1b"), 4)
    assert [n.name for n in graph(m).nodes] == [n.name for n in graph(base).nodes]
    more = graph(m).weights.keys() - graph(base).weights.keys()
    assert more == {f"attention.{i}.{w}_lora_{side}" for i in range(16) for w in "qv" for side in "ab"}
    assert graph(base).weights.keys() <= graph(m).weights.keys()
    a, b = (graph(m).weights[f"attention.0.q_lora_{side}"] for side in "ab")
    assert a.value.op.uniform  # type: ignore[attr-defined]
    assert sqrt(3) * a.std == pytest.approx(1 / sqrt(2048))  # PEFT: kaiming_uniform_(a=sqrt(5))
    assert b.std == 0


def test_frozen_weights_have_no_gradients() -> None:
    """Weight gradients are those of the adapters; a product by a frozen weight does not save its input."""
    base, m = made("llama3-1b"), lora(made("llama3-1b"), 4)
    of, base_of = (flops(x, batch=1, seq=64) for x in (m, base))
    adapters = 2 * 64 * params(m, trained=True)
    assert of.wgrad == adapters
    assert of.forward == base_of.forward + adapters
    assert of.dgrad == base_of.dgrad + adapters
    stored, base_stored = (sum(s.elements for s in saved(graph(x).nodes, batch=1, seq=64)) for x in (m, base))
    assert stored < base_stored
    (ff,) = [n for n in graph(m).nodes if n.name == "swiglu.0"]
    inputs = [s for s in costs(ff, batch=1, seq=64).saved if s.what == "input"]
    assert not inputs  # only the gradients of `gate` and `up` would read it


@pytest.mark.parametrize("split", [Split(tp=4), Split(tp=4, sequence_parallel=True)], ids=str)
def test_one_factor_is_sharded_over_tp(split: Split) -> None:
    """B has the heads of queries, A those of the output. Vectors of `rank` are exchanged besides."""
    m = lora(made("llama3-1b"), 4, targets=["q_proj", "o_proj"])
    node = graph(m).nodes[graph(m).index["attention.0"]]
    whole, part = (costs(node, batch=1, seq=64, split=s) for s in (Split(), split))
    assert whole.params == 4 * 4 * 2048
    assert part.params == 2 * 4 * 2048 + 2 * 4 * 2048 // 4
    assert whole.frozen_params == 4 * part.frozen_params
    assert {c.elements for c in part.collectives} == {64 * 2048, 64 * 4}


def test_a_layer_can_have_adapters_by_itself() -> None:
    from megaloom.dsl import Dim, Embed, ids, model, weight

    table = weight("table", Dim("vocab", 50), Dim("embed", 16))
    m = model("m", ids() >> Embed(table) >> Adapted(SwiGLU(32), 2, 2.0, (("down",),)))
    assert params(m, trained=True) == 50 * 16 + 2 * (16 + 32)


def test_a_saved_model_keeps_its_adapters() -> None:
    m = lora(made("t5-small"), 4, 3, of=Attention)
    again = model_from_json(json.loads(json.dumps(model_to_json(m))), "model.json")
    assert fingerprint(again) == fingerprint(m) != fingerprint(made("t5-small"))
    assert again.lora == m.lora
    assert fingerprint(again.without_adapters) == fingerprint(made("t5-small"))
    assert fingerprint(lora(made("t5-small"), 4, 5, of=Attention)) != fingerprint(m)  # another alpha


def test_a_packed_model_keeps_its_adapters() -> None:
    m = lora(made("llama3-1b"), 4)
    assert fingerprint(packed(m)) == fingerprint(lora(packed(made("llama3-1b")), 4))
    assert params(packed(m), trained=True) == params(m, trained=True)


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("llama3-8b", ("qproj",), "no matrix 'qproj': did you mean q_proj"),
        ("mixtral-8x7b", ("q_proj", "w1"), "target w1 is also the name of matrices of experts"),
        ("deepseek-v3", ("gate_proj",), "target gate_proj is also the name of matrices of experts"),
        ("mamba2-130m", None, "has no attention with queries and values"),
        ("llama3-8b", ("embed_tokens",), "no matrix 'embed_tokens'"),
    ],
)
def test_wrong_targets_are_named(name: str, targets: tuple[str, ...] | None, message: str) -> None:
    with pytest.raises(UserError) as raised:
        lora(made(name), targets=targets)
    assert message in str(raised.value)


@pytest.mark.parametrize(("rank", "alpha"), [(0, 1.0), (-1, 1.0), (4, 0.0), (4, float("nan"))])
def test_wrong_numbers_are_refused(rank: int, alpha: float) -> None:
    with pytest.raises(UserError, match="of adapters must be"):
        lora(made("llama3-1b"), rank, alpha)


def test_adapters_are_added_once() -> None:
    with pytest.raises(UserError, match="has adapters already"):
        lora(lora(made("llama3-1b")))
