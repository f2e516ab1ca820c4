"""Checkpoints that megatron-core's GPTModel has saved become Hugging Face folders with its logits."""

from __future__ import annotations

import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaloom.runtime.cli.main import main
from megaloom.runtime.launch import launcher
from tests.support.hugging_face import built, transformers

VOCAB, SEQ = 128, 16
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKENS = torch.arange(2 * SEQ).view(2, SEQ) * 7 % VOCAB


def gpt_model(tp: int, pp: int) -> Any:
    """Return this rank's part of megatron-core's GPTModel."""
    import torch.distributed as dist
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel(tp, pp)
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=4,
        num_query_groups=2,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.1,
    )
    stage = dist.get_rank() // tp
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        VOCAB,
        SEQ,
        pre_process=stage == 0,
        post_process=stage == pp - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


def saved_whole(folder: Path) -> Tensor:
    """In one process: save a GPTModel as torch_dist, and return its logits."""
    from megatron.core import dist_checkpointing

    model = gpt_model(1, 1).eval()
    folder.mkdir(parents=True)
    dist_checkpointing.save(model.sharded_state_dict(), str(folder))
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        logits: Tensor = model(TOKENS, torch.arange(SEQ).expand(2, SEQ), mask)
    return logits


def saved_by_ranks(source: Path, folder: Path) -> None:
    """On each of four ranks: load the model under TP2 PP2, and save the rank's weights as Megatron-LM did."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    model = gpt_model(2, 2)
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(source)), strict=False)
    rank = folder / f"mp_rank_{dist.get_rank() % 2:02d}_{dist.get_rank() // 2:03d}"
    rank.mkdir(parents=True)
    state = {"args": Namespace(num_layers=4), "checkpoint_version": 3.0, "iteration": 100, "model": model.state_dict()}
    torch.save(state, rank / "model_optim_rng.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A folder with both forms and a config.json, and the logits of the GPTModel."""
    root = tmp_path_factory.mktemp("megatron")
    (logits,) = launcher.run(saved_whole, (root / "dist" / "iter_0000100",), 1, timeout=100)
    launcher.run(saved_by_ranks, (root / "dist" / "iter_0000100", root / "legacy" / "iter_0000100"), 4, timeout=100)
    for form in ("dist", "legacy"):
        (root / form / "latest_checkpointed_iteration.txt").write_text("100")
    config = built("llama", vocab_size=VOCAB, rms_norm_eps=1e-6, tie_word_embeddings=False, **SIZES, **HEADS).config
    config.save_pretrained(root / "config")
    return root, logits


@pytest.mark.parametrize("form", ["dist", "legacy", "legacy/iter_0000100"])
def test_a_hugging_face_folder_has_the_logits_of_gpt_model(
    saved: tuple[Path, Tensor], form: str, tmp_path: Path, capsys: Any
) -> None:
    root, logits = saved
    out = tmp_path / "out"
    words = ["convert", str(root / form), "--to", "hf", "--config", str(root / "config"), "-o", str(out)]
    assert main(words) in (None, 0), capsys.readouterr().err
    assert "39 tensors of float32. Next: megaloom train --from" in capsys.readouterr().out
    theirs = transformers.LlamaForCausalLM.from_pretrained(out, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(TOKENS).logits, logits, rtol=0, atol=2e-5)


def refusal(path: Path, config: Path, tmp_path: Path, capsys: Any) -> str:
    assert main(["convert", str(path), "--to", "hf", "--config", str(config), "-o", str(tmp_path / "out")]) == 2
    assert not (tmp_path / "out").exists()
    return str(capsys.readouterr().err)


def test_wrong_tensors_are_named(saved: tuple[Path, Tensor], tmp_path: Path, capsys: Any) -> None:
    root, _ = saved
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


def test_other_models_and_unsafe_files_are_refused(saved: tuple[Path, Tensor], tmp_path: Path, capsys: Any) -> None:
    root, _ = saved
    mixture = built("mixtral").config
    mixture.save_pretrained(tmp_path / "mixtral")
    assert "is no layer of Megatron-LM's GPTModel" in refusal(root / "dist", tmp_path / "mixtral", tmp_path, capsys)
    folder = shutil.copytree(root / "legacy" / "iter_0000100", tmp_path / "unsafe")
    torch.save({"model": Path.touch}, folder / "mp_rank_00_000" / "model_optim_rng.pt")
    assert "which could run code" in refusal(folder, root / "config", tmp_path, capsys)
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "latest_checkpointed_iteration.txt").write_text("../x")
    assert "has no number" in refusal(tmp_path / "latest", root / "config", tmp_path, capsys)


def test_a_config_is_needed(saved: tuple[Path, Tensor], tmp_path: Path, capsys: Any) -> None:
    words = ["convert", str(saved[0] / "dist"), "--to", "hf", "-o", str(tmp_path / "out")]
    assert main(words) == 2
    assert "with --config" in capsys.readouterr().err
