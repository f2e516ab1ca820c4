"""Checkpoints that megatron-core's GPTModel and BertModel have saved become Hugging Face folders with their logits."""

from __future__ import annotations

import json
import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaloom.dsl import UserError
from megaloom.dsl.hf.architectures import read
from megaloom.examples.bert import bert
from megaloom.runtime.cli.main import main
from megaloom.runtime.convert.megatron_files import megatron_tensors
from megaloom.runtime.launch import launcher
from megaloom.runtime.training.initial_weights import open_weights
from tests.support.limits import LIMIT
from tests.support.models.hugging_face import built, transformers

VOCAB, SEQ = 128, 16
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4}
DECODER = {"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("llama", DECODER),
    "experts": ("mixtral", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 1e4}),
    "bert": ("megatron_bert", {"layer_norm_eps": 1e-6, "max_position_embeddings": SEQ}),
}
LAYOUTS = {"gpt": (2, 2, 1, 1), "experts": (2, 1, 1, 2), "bert": (2, 2, 2, 1)}
"""Tensor, pipeline, virtual pipeline and expert parallelism of the four ranks."""

TOKENS = torch.arange(2 * SEQ).view(2, SEQ) * 7 % VOCAB
TYPES = torch.arange(2 * SEQ).view(2, SEQ) % 2


def chunks_of(kind: str, tp: int, pp: int, vpp: int, ep: int) -> list[Any]:
    """Return this rank's parts of megatron-core's GPTModel or BertModel."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.destroy_model_parallel()
    virtual = vpp if vpp > 1 else None
    parallel_state.initialize_model_parallel(tp, pp, virtual, expert_model_parallel_size=ep)
    tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    bert, experts = kind == "bert", kind == "experts"
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=4 if bert else 2,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=ep,
        num_moe_experts=4 if experts else None,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        pipeline_dtype=torch.float32,
        normalization="LayerNorm" if bert else "RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=not bert,
        activation_func=torch.nn.functional.gelu if bert else torch.nn.functional.silu,
        add_bias_linear=bert,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.1,
    )
    rank = dist.get_rank() // tp % pp
    out = []
    for chunk in range(vpp):
        ends = {"pre_process": rank == chunk == 0, "post_process": rank == pp - 1 and chunk == vpp - 1}
        ends |= {"vp_stage": chunk if virtual else None}
        if bert:
            out.append(
                BertModel(
                    config, 2, bert_layer_local_spec, VOCAB, SEQ, share_embeddings_and_output_weights=True, **ends
                )
            )
        else:
            spec = get_gpt_layer_local_spec(num_experts=4 if experts else None, normalization="RMSNorm")
            out.append(
                GPTModel(
                    config,
                    spec,
                    VOCAB,
                    SEQ,
                    share_embeddings_and_output_weights=False,
                    position_embedding_type="rope",
                    **ends,
                )
            )
    return out


def saved_whole(root: Path) -> dict[str, Tensor]:
    """In one process: save each model as torch_dist, and return its logits."""
    from megatron.core import dist_checkpointing

    logits = {}
    for kind in CONFIGS:
        (model,) = chunks_of(kind, 1, 1, 1, 1)
        folder = root / kind / "dist" / "iter_0000100"
        folder.mkdir(parents=True)
        dist_checkpointing.save(model.sharded_state_dict(), str(folder))
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)[None, None]
        with torch.no_grad():
            if kind == "bert":
                logits[kind] = model.eval()(TOKENS, torch.ones(2, SEQ), TYPES)[0]
            else:
                logits[kind] = model.eval()(TOKENS, torch.arange(SEQ).expand(2, SEQ), mask)
    return logits


def saved_by_ranks(root: Path) -> None:
    """On each of four ranks: load the models under their layouts, and save the rank's weights as Megatron-LM did."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    for kind, (tp, pp, vpp, ep) in LAYOUTS.items():
        chunks = chunks_of(kind, tp, pp, vpp, ep)
        names = [f"model{i}" for i in range(vpp)] if vpp > 1 else ["model"]
        wanted = {name: chunk.sharded_state_dict() for name, chunk in zip(names, chunks, strict=True)}
        state = dist_checkpointing.load(wanted, str(root / kind / "dist" / "iter_0000100"))
        numbers = dist.get_rank() // tp
        rank = root / kind / "legacy" / "iter_0000100" / f"mp_rank_{dist.get_rank() % tp:02d}_{numbers:03d}"
        rank.mkdir(parents=True)
        args = Namespace(num_layers=4, tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
        for name, chunk in zip(names, chunks, strict=True):
            chunk.load_state_dict(state[name], strict=False)
        state = {name: chunk.state_dict() for name, chunk in zip(names, chunks, strict=True)}
        state |= {"args": args, "checkpoint_version": 3.0, "iteration": 100}
        torch.save(state, rank / "model_optim_rng.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A folder with both forms of each model and its config.json, and the logits."""
    root = tmp_path_factory.mktemp("megatron")
    (logits,) = launcher.run(saved_whole, (root,), 1, timeout=LIMIT)
    launcher.run(saved_by_ranks, (root,), 4, timeout=LIMIT)
    for kind, (name, options) in CONFIGS.items():
        for form in ("dist", "legacy"):
            (root / kind / form / "latest_checkpointed_iteration.txt").write_text("100")
        built(name, vocab_size=VOCAB, **SIZES, **options).config.save_pretrained(root / kind / "config")
    return root, logits


@pytest.mark.parametrize("form", ["dist", "legacy", "legacy/iter_0000100"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_hugging_face_folder_has_the_logits(
    saved: tuple[Path, dict[str, Tensor]], kind: str, form: str, tmp_path: Path, capsys: Any
) -> None:
    root, out = saved[0] / kind, tmp_path / "out"
    words = ["convert", str(root / form), "--to", "hf", "--config", str(root / "config"), "-o", str(out)]
    assert main(words) in (None, 0), capsys.readouterr().err
    assert "tensors of float32. Next: megaloom train --from" in capsys.readouterr().out
    name = json.loads((out / "config.json").read_text())["architectures"][0]
    theirs = getattr(transformers, name).from_pretrained(out, attn_implementation="eager").eval()
    inputs = {"token_type_ids": TYPES} if kind == "bert" else {}
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS, **inputs).logits, saved[1][kind], rtol=0, atol=2e-5)


def refusal(path: Path, config: Path, tmp_path: Path, capsys: Any) -> str:
    assert main(["convert", str(path), "--to", "hf", "--config", str(config), "-o", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    return str(capsys.readouterr().err)


def test_wrong_tensors_are_named(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: Any) -> None:
    root = saved[0] / "gpt"
    folder = shutil.copytree(root / "legacy" / "iter_0000100", tmp_path / "changed")
    for path in folder.glob("mp_rank_*_000/model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        layers = state["model"]
        layers["decoder.layers.0.mlp.linear_fc9.weight"] = layers.pop("decoder.layers.0.mlp.linear_fc1.weight")
        layers["decoder.layers.1.mlp.linear_fc2.weight"] = torch.ones(64, 7)
        torch.save(state, path)
    message = refusal(folder, root / "config", tmp_path, capsys)
    assert "missing: decoder.layers.0.mlp.linear_fc1.weight; the nearest is decoder.layers.0.mlp.linear_fc9" in message
    assert "unknown: decoder.layers.0.mlp.linear_fc9.weight; the nearest is decoder.layers.0.mlp.linear_fc1" in message
    assert "decoder.layers.1.mlp.linear_fc2.weight has shape [64, 14], not [64, 96]" in message


def test_other_models_and_unsafe_files_are_refused(
    saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: Any
) -> None:
    root = saved[0] / "gpt"
    other = built("gemma2").config
    other.save_pretrained(tmp_path / "gemma2")
    assert "is not a layer of Megatron-LM's GPTModel" in refusal(root / "dist", tmp_path / "gemma2", tmp_path, capsys)
    folder = shutil.copytree(root / "legacy" / "iter_0000100", tmp_path / "unsafe")
    torch.save({"model": Path.touch}, folder / "mp_rank_00_000" / "model_optim_rng.pt")
    assert "which could run code" in refusal(folder, root / "config", tmp_path, capsys)
    torch.save({"model": {"language_model": {}}}, folder / "mp_rank_00_000" / "model_optim_rng.pt")
    with pytest.raises(UserError, match="has the names from before megatron-core"):
        megatron_tensors(folder, gated=False)
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "latest_checkpointed_iteration.txt").write_text("../x")
    assert "which is not an iteration" in refusal(tmp_path / "latest", root / "config", tmp_path, capsys)


def test_a_config_is_needed(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: Any) -> None:
    words = ["convert", str(saved[0] / "gpt" / "dist"), "--to", "hf", "-o", str(tmp_path / "out")]
    assert main(words) == 2
    assert "with --config" in capsys.readouterr().err


def test_a_run_starts_from_a_checkpoint(saved: tuple[Path, dict[str, Tensor]]) -> None:
    folder = saved[0] / "bert" / "legacy"
    model = read(saved[0] / "bert" / "config")
    initial = open_weights(folder)
    initial.check(model)
    table = initial.of(model)["wte"]
    embedding = torch.load(folder / "iter_0000100/mp_rank_01_000/model_optim_rng.pt", weights_only=False)["model0"]
    torch.testing.assert_close(table.read()[VOCAB // 2 :], embedding["embedding.word_embeddings.weight"])
    with pytest.raises(UserError, match=r"^--from .*\nmissing: encoder.layers.4.input_layernorm.weight"):
        initial.check(bert("deeper", 5, 4, 64, 96, vocab=VOCAB, seq=SEQ, pre_norm=True))


def test_files_of_experts(saved: tuple[Path, dict[str, Tensor]], tmp_path: Path, capsys: Any) -> None:
    """Transformer Engine numbers the matrices of experts. A rank whose file is missing is named."""
    source = saved[0] / "experts" / "legacy" / "iter_0000100"
    folder = shutil.copytree(source, tmp_path / "changed")
    for path in folder.glob("mp_rank_*/model_optim_rng.pt"):
        state = torch.load(path, weights_only=False)
        state["model"] = {re.sub(r"local_experts\.(\d+)\.(.*)", r"\2\1", name): x for name, x in state["model"].items()}
        torch.save(state, path)
    before, after = (megatron_tensors(path, gated=True) for path in (source, folder))
    assert before.keys() == after.keys()
    name = "decoder.layers.3.mlp.experts.local_experts.3.linear_fc1.weight"
    assert torch.equal(before[name].read(), after[name].read())
    shutil.rmtree(folder / "mp_rank_01_000")
    message = refusal(folder, saved[0] / "experts" / "config", tmp_path, capsys)
    assert "has no model_optim_rng.pt of rank tp=1, pp=0, ep=0" in message
