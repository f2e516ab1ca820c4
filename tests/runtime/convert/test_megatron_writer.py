"""Checkpoints that `convert --to megatron` writes have the model's logits in megatron-core's GPTModel, tp 2 x pp 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaloom.dsl import Model, UserError, graph
from megaloom.dsl.graph import without_loss
from megaloom.dsl.hf.architectures import read
from megaloom.planner.export.megatron_arguments import megatron_arguments
from megaloom.runtime.cli.main import main
from megaloom.runtime.convert.megatron_writer import MegatronCheckpoint, write_megatron
from megaloom.runtime.launch import launcher
from megaloom.runtime.reference.interpret import interpret
from megaloom.runtime.training.initial_weights import open_weights
from megaloom.runtime.weights.given import open_folder
from megaloom.runtime.weights.views import held
from tests.support.limits import LIMIT
from tests.support.models.hugging_face import built
from tests.support.models.megatron_lm import MODELS, SEQ, VOCAB

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
TOKENS = torch.arange(2 * SEQ).view(2, SEQ) * 7 % VOCAB


def gpt_model(args: Any, tp: int, pp: int, rank: int) -> Any:
    """Return this rank's part of megatron-core's GPTModel, as the arguments in a checkpoint describe it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        kv_channels=args.kv_channels,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_dtype=torch.float32,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization=args.normalization),
        -(-args.vocab_size // (args.make_vocab_size_divisible_by * tp)) * args.make_vocab_size_divisible_by * tp,
        args.max_position_embeddings,
        pre_process=rank == 0,
        post_process=rank == pp - 1,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_base=getattr(args, "rotary_base", 10000),
        parallel_output=False,
    )


def loaded_logits(folders: list[Path], tp: int, pp: int) -> list[Tensor | None]:
    """On each rank: load each checkpoint, run it stage after stage, and return the logits on the last stage."""
    import torch.distributed as dist
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(tp, pp)
    tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    rank, out = dist.get_rank() // tp, []
    for folder in folders:
        args = dist_checkpointing.load_common_state_dict(str(folder))["args"]
        model = gpt_model(args, tp, pp, rank).eval()
        model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(folder)), strict=False)
        hidden = torch.empty(SEQ, 2, args.hidden_size)
        if rank:
            dist.recv(hidden, dist.get_rank() - tp)
            model.set_input_tensor([hidden])
        mask = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)[None, None]
        with torch.no_grad():
            result = model(TOKENS, torch.arange(SEQ).expand(2, SEQ), mask)
        if rank < pp - 1:
            dist.send(result.contiguous(), dist.get_rank() + tp)
        out.append(result[..., :VOCAB] if rank == pp - 1 else None)
    return out


def logits_of(model: Model, weights: dict[str, Tensor]) -> Tensor:
    (logits,) = interpret(without_loss(model), weights, {"tokens": TOKENS})
    return logits


@pytest.mark.timeout(LIMIT)
def test_gpt_model_reads_what_is_written(tmp_path: Path, capsys: Any) -> None:
    """A GPT-2 with random weights, and a Llama's folder by the command line, each under another layout."""
    model, random = MODELS["gpt"](), torch.Generator().manual_seed(3)
    slots = graph(model).weights.items()
    weights = {name: torch.randn([d.known for d in slot.dims], generator=random) * 0.2 for name, slot in slots}
    arguments = megatron_arguments(graph(model), seq=SEQ, vocab_multiple=24)
    assert (arguments["padded_vocab_size"], arguments["add_bias_linear"], arguments["swiglu"]) == (72, True, False)
    about = MegatronCheckpoint(arguments, 100)
    views = {name: held(x) for name, x in weights.items()}
    assert write_megatron(model, views, tmp_path / "gpt", torch.float32, about) == 16
    folder = tmp_path / "llama"
    built("llama", vocab_size=VOCAB, num_key_value_heads=2, tie_word_embeddings=False, **LLAMA).save_pretrained(folder)
    assert main(["convert", str(folder), "--to", "megatron", "-o", str(tmp_path / "core")]) in (None, 0)
    assert "Megatron-LM reads them, and its arguments, with --load" in capsys.readouterr().out
    llama = read(folder)
    expected = [
        logits_of(model, weights),
        logits_of(llama, {name: view.read() for name, view in open_folder(folder).of(llama).items()}),
    ]
    places = [tmp_path / "gpt" / "iter_0000100", tmp_path / "core" / "release"]
    last = launcher.run(loaded_logits, (places, 2, 2), 4, timeout=LIMIT)[-1]
    for found, logits in zip(last, expected, strict=True):
        assert found is not None
        torch.testing.assert_close(found, logits, rtol=0, atol=1e-5)
    again = open_weights(tmp_path / "core").of(llama)
    assert all(torch.equal(view.read(), again[name].read()) for name, view in open_folder(folder).of(llama).items())


def test_models_that_are_no_dense_decoder_are_refused(tmp_path: Path) -> None:
    for kind in ("bert", "t5"):
        with pytest.raises(UserError, match=r"writes dense decoders \(GPTModel\) only"):
            write_megatron(MODELS[kind](), {}, tmp_path / "out", torch.float32, MegatronCheckpoint({}, 1))
    assert not (tmp_path / "out").exists()
