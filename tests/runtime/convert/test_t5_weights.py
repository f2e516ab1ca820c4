"""A checkpoint that megatron-core's T5Model has saved has its logits in the declared model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megaloom.dsl.graph import without_loss
from megaloom.runtime.launch import launcher
from megaloom.runtime.reference.interpret import interpret
from megaloom.runtime.training.initial_weights import open_weights
from tests.support.limits import LIMIT
from tests.support.models.megatron_lm import EMBED, FF, HEADS, LAYERS, MODELS, SEQ, VOCAB

SOURCE = torch.arange(2 * SEQ).view(2, SEQ) * 5 % VOCAB
TOKENS = torch.arange(2 * SEQ).view(2, SEQ) * 7 % VOCAB


def saved_t5(folder: Path) -> Tensor:
    """Save a T5Model as torch_dist and as the file of one rank, and return its logits."""
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import decoder_model_with_local_spec, encoder_model_with_local_spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=EMBED,
        ffn_hidden_size=FF,
        num_attention_heads=HEADS,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.1,
    )
    layers = encoder_model_with_local_spec(), decoder_model_with_local_spec()
    specs = [TransformerBlockSubmodules([layer] * LAYERS, layer_norm=WrappedTorchNorm) for layer in layers]
    model = T5Model(config, config, *specs, VOCAB, SEQ, share_embeddings_and_output_weights=True, parallel_output=False)
    random = torch.Generator().manual_seed(2)
    for p in model.parameters():  # biases too, which start at 0
        p.data += torch.randn(p.shape, generator=random) * 0.1
    (folder / "dist").mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(folder / "dist"))
    rank = folder / "ranks" / "mp_rank_00"
    rank.mkdir(parents=True)
    torch.save({"model": model.state_dict(), "checkpoint_version": 3.0}, rank / "model_optim_rng.pt")
    seen = torch.zeros(2, 1, SEQ, SEQ, dtype=torch.bool)
    causal = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1).expand(2, 1, SEQ, SEQ)
    with torch.no_grad():
        return model.eval()(SOURCE, TOKENS, seen, causal, seen)


@pytest.mark.timeout(LIMIT)
def test_a_t5_model_is_read(tmp_path: Path) -> None:
    (logits,) = launcher.run(saved_t5, (tmp_path,), 1, timeout=LIMIT)
    model = MODELS["t5"]()
    for form in ("dist", "ranks"):
        initial = open_weights(tmp_path / form)
        initial.check(model)
        weights = {name: view.read() for name, view in initial.of(model).items()}
        (found,) = interpret(without_loss(model), weights, {"source_tokens": SOURCE, "tokens": TOKENS})
        torch.testing.assert_close(found, logits, rtol=0, atol=2e-5)
