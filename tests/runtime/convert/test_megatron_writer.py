"""Checkpoints that `convert --to megatron` writes have the model's logits in megatron-core's own models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor

from megaloom.dsl import Model, MoE, SwiGLU, UserError, graph
from megaloom.dsl.graph import without_loss
from megaloom.dsl.hf.architectures import read
from megaloom.examples.bert import bert
from megaloom.examples.t5 import t5_small
from megaloom.runtime.cli.commands.convert_command import arguments_of
from megaloom.runtime.cli.main import main
from megaloom.runtime.convert.megatron_writer import MegatronCheckpoint, write_megatron
from megaloom.runtime.launch import launcher
from megaloom.runtime.reference.interpret import interpret
from megaloom.runtime.training.initial_weights import open_weights
from megaloom.runtime.weights.hugging_face_weights import open_folder
from megaloom.runtime.weights.views import held
from tests.support.limits import LIMIT
from tests.support.models.hugging_face import built
from tests.support.models.megatron_core import CoreLayout, loaded_logits
from tests.support.models.megatron_lm import MODELS, SEQ, VOCAB, megatron_experts

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
INPUTS = {
    "tokens": torch.arange(2 * SEQ).view(2, SEQ) * 7 % VOCAB,
    "source_tokens": torch.arange(2 * SEQ).view(2, SEQ) * 5 % VOCAB,
    "types": torch.arange(2 * SEQ).view(2, SEQ) % 2,
}
MIXTRAL = MoE(SwiGLU(24), experts=4, top_k=2)
DEEPSEEK = MoE(
    SwiGLU(24), experts=4, top_k=2, shared=SwiGLU(16), score="sigmoid", corrected=True, scale=2.5, balance=0.01
)
CASES: dict[str, tuple[str, Model, tuple[CoreLayout, ...]]] = {
    "gpt": ("gpt", MODELS["gpt"](), (CoreLayout(tp=2, pp=2),)),
    "bert": ("bert", MODELS["bert"](), (CoreLayout(tp=2, pp=2), CoreLayout(pp=4))),
    "t5": ("t5", MODELS["t5"](), (CoreLayout(tp=2), CoreLayout(tp=4))),  # Megatron-LM has no pipelines of T5
    "mixtral": ("gpt", megatron_experts(MIXTRAL), (CoreLayout(tp=2, ep=2), CoreLayout(pp=2, ep=2))),
    "deepseek": ("gpt", megatron_experts(DEEPSEEK, dense=1), (CoreLayout(tp=2, ep=2), CoreLayout(pp=2, ep=2))),
}
"""The kind of model in megatron-core, the model, and the layouts under which it is read, of four ranks."""


def random_weights(model: Model) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    slots = graph(model).weights.items()
    return {name: torch.randn([d.known for d in slot.dims], generator=random) * 0.2 for name, slot in slots}


def logits_of(model: Model, weights: dict[str, Tensor]) -> Tensor:
    g = graph(without_loss(model))
    inputs = {n.name: INPUTS[n.name] for n in g.nodes if n.is_input}
    (logits,) = interpret(without_loss(model), weights, inputs)
    return logits


@pytest.mark.timeout(LIMIT)
def test_megatron_core_reads_what_is_written(tmp_path: Path, capsys: Any) -> None:
    """Models with random weights, and a Llama's folder by the command line; its own models have the logits of ours."""
    folder = tmp_path / "llama"
    built("llama", vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=False, **LLAMA).save_pretrained(folder)
    assert main(["convert", str(folder), "--to", "megatron", "-o", str(tmp_path / "core")]) in (None, 0)
    said = capsys.readouterr().out
    assert "Megatron-LM reads them, and its arguments, with --load" in said
    assert "arguments that it does not read from a checkpoint: --norm-epsilon 1e-06" in said
    llama = read(folder)
    places = [("gpt", tmp_path / "core" / "release", CoreLayout(tp=2, pp=2))]
    expected = [logits_of(llama, {name: view.read() for name, view in open_folder(folder).of(llama).items()})]
    for name, (kind, model, layouts) in CASES.items():
        weights, arguments = random_weights(model), arguments_of(model, SEQ, 24).stored
        assert arguments["padded_vocab_size"] == 72
        views = {name: held(x) for name, x in weights.items()}
        write_megatron(model, views, tmp_path / name, torch.float32, MegatronCheckpoint(arguments, 100))
        places += [(kind, tmp_path / name / "iter_0000100", layout) for layout in layouts]
        expected += [logits_of(model, weights)] * len(layouts)
        again = open_weights(tmp_path / name).of(model)
        assert [w for w, x in weights.items() if not torch.equal(again[w].read(), x)] == []
    last = launcher.run(loaded_logits, (places, INPUTS), 4, timeout=LIMIT)[-1]
    for (_, where, layout), found, logits in zip(places, last, expected, strict=True):
        assert found is not None
        print(where.parent.name, layout, float((found - logits).abs().max()))
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (bert("post-norm", 1, 2, 16, 16), r"add\.1.* of layer_norm\.0 and attention\.0: in its BertModel it reads"),
        (bert("classes", 1, 2, 16, 16, pre_norm=True, classes=3), r"pooler\.0, .*: its BertModel has MaskedHead"),
        (bert("types", 1, 2, 16, 16, pre_norm=True, types=3), "3 token types: its BertModel has 2"),
        (t5_small(), r"attention\.0 with relative position biases and scale=1: its T5Model multiplies scores"),
        (megatron_experts(evolve(MIXTRAL, bias=True)), "biases in experts or routers"),
    ],
)
def test_what_megatron_models_do_not_have_is_refused_by_name(model: Model, message: str) -> None:
    with pytest.raises(UserError, match=message):
        arguments_of(model, SEQ, 128)
