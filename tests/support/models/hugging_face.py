"""Small Hugging Face models with random weights, from the config.json files in configs/small/, and inputs for them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from tests.support.paths import TESTS

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported: nothing here needs the network

import pytest
import torch
from torch import Tensor

from megaloom.dsl import DType, Graph, Model, graph

transformers = pytest.importorskip("transformers", reason="`make unit` installs it")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SMALL = {path.stem: path for path in sorted(TESTS.glob("configs/small/*.json"))}
VOCAB = 61  # of all of them
ORDERS = "bert-order", "megatron_bert-order"  # two logits: of masked tokens, and of the order of sentences

# What no output depends on: the layers of an image encoder after the one that is read, a bias that is always zero.
UNUSED = ("vision_tower.encoder.layers.2.", "vision_tower.post_layernorm.", "final_logits_bias")


def built(name: str, **changes: object) -> Any:
    """Hugging Face's model of a small config, with changes, and random weights, biases and buffers."""
    fields = json.loads(SMALL[name].read_text()) | changes
    theirs_class = getattr(transformers, fields["architectures"][0])
    theirs = theirs_class._from_config(theirs_class.config_class.from_dict(fields), attn_implementation="eager").eval()
    if fields.get("tie_word_embeddings") is False:  # T5 makes two tables one, until it loads two that differ
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.detach().clone())
    noise = 0.1 if "t5" in name else 0.2  # T5 does not scale its scores, so that they grow with all weights
    with torch.no_grad():
        for at, x in theirs.state_dict().items():
            if at != "final_logits_bias":
                x.add_(torch.randn_like(x) * noise)
    return theirs


def drawn(model: Model, seq: int = 23, source: int = 29) -> dict[str, Tensor]:
    """Random inputs for a model; where it reads an image, 16 of the tokens stand for its patches."""
    wanted = {str(n.op) for n in graph(model).nodes if n.is_input}
    inputs = {
        "tokens": torch.randint(VOCAB - 1, (2, seq)),
        "source_tokens": torch.randint(VOCAB, (2, source)),
        "types": torch.randint(2, (2, seq)),
        "image": torch.randn(2, 3, 16, 16),
        "documents": torch.zeros(2, seq, dtype=torch.int64),  # no padding
    }
    if "image" in wanted:
        at = torch.stack([torch.randperm(seq)[:16] for _ in range(2)])
        inputs["tokens"] = inputs["tokens"].scatter(1, at, VOCAB - 1)
    return {name: x for name, x in inputs.items() if name in wanted}


def named(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs by Hugging Face's names, which has no document indices."""
    theirs = {"tokens": "input_ids", "types": "token_type_ids", "image": "pixel_values"}
    if "source_tokens" in inputs:
        theirs = {"tokens": "decoder_input_ids", "source_tokens": "input_ids"}
    return {theirs[name]: x for name, x in inputs.items() if name != "documents"}


def complete(g: Graph, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return inputs, with ones for those that only a loss reads."""
    batch, seq = 2, inputs["tokens"].shape[1] if "tokens" in inputs else 1
    out = dict(inputs)
    for n in g.nodes:
        if n.is_input and n.name not in out:
            sizes = [{"batch": batch, "seq": seq, "source": seq}.get(d.name) or d.known for d in n.shape]
            out[n.name] = torch.ones(sizes, dtype=torch.int64 if n.value.dtype is DType.INDEX else torch.float32)
    return out
