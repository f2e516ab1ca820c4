"""Transformers as an oracle: the loss of a batch and its gradients, by the declared names of the weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from attrs import frozen
from safetensors.torch import load_file
from torch import Tensor

from megaloom.dsl import Model

HF = "transformers:"  # before the name of a config in tests/configs/small
NAMES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "mixtral", "gemma2", "gemma3", "deepseek-v2"),
    "qwen3-next",
    *(
        "deepseek-v3",
        "mamba2",
        "nemotron-h",
        "qwen3-next",
        "nemotron",
        "gpt2",
        "bloom",
        "starcoder",
        "bert",
        "t5",
        "bart",
        "vit",
    ),
)
_GPT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
WITHOUT_DROPOUT: dict[str, dict[str, float]] = {
    "gpt2": _GPT,
    "starcoder": _GPT,
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
    "bart": {"dropout": 0.0},
}
"""Fields of configs whose default is dropout, which transformers would draw by another source."""


@frozen(eq=False)
class OfConfig:
    """A model of transformers with random weights, and the model and the weights that are read from its config."""

    theirs: Any
    model: Model
    names: Any
    weights: dict[str, Tensor]


@cache
def of_config(name: str) -> OfConfig:
    """Return the model of a config, by HF + its name."""
    from megaloom.dsl.hf.architectures import open_config, reader
    from megaloom.dsl.hf.state_dict import from_checkpoint
    from tests.support.models.hugging_face import SMALL, UNUSED, built

    file = name.removeprefix(HF)
    torch.manual_seed(0)
    changes = WITHOUT_DROPOUT.get(file, {})
    theirs = built(file, **changes)
    with TemporaryDirectory() as folder:
        (path := Path(folder) / f"{file}.json").write_text(json.dumps(json.loads(SMALL[file].read_text()) | changes))
        config, called = open_config(str(path))
    read = reader(config)
    model = read(config, called)
    stored = _stored(theirs, _tensors(theirs), UNUSED)
    return OfConfig(theirs, model, read.names, from_checkpoint(read.names, model, stored, torch.cat))


def _stored(theirs: Any, tensors: Mapping[str, Tensor], unused: tuple[str, ...]) -> dict[str, Tensor]:
    """Return tensors of a model as a checkpoint has them: transformers renames some, and splits experts."""
    with TemporaryDirectory() as folder:
        theirs.save_pretrained(folder, state_dict={n: x.detach().clone() for n, x in tensors.items()})
        return {n: x for n, x in load_file(Path(folder) / "model.safetensors").items() if not n.startswith(unused)}


def _tensors(theirs: Any) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model, shared ones once."""
    once, all_of_them = dict(theirs.named_parameters()), dict(theirs.named_parameters(remove_duplicate=False))
    return once | {n: b for n, b in theirs.state_dict().items() if n not in all_of_them}


def transformers_step(name: str, batch: Mapping[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss of a batch, and its gradients by the declared names of the weights."""
    from tests.support.models.hugging_face import named

    it = of_config(name)
    it.theirs.zero_grad()
    inputs = {n: batch[n] for n in ("tokens", "source_tokens", "types", "image") if n in batch}
    logits = it.theirs(**named(inputs)).logits
    labels = batch["labels"]
    each = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none").view(labels.shape)
    mask = batch["mask"].float() if "mask" in batch else torch.ones_like(each)
    loss = (each * mask).sum() / mask.sum()
    loss.backward()
    return loss.item(), gradients_of(it.theirs, it.names, it.model)


def gradients_of(theirs: Any, names: Any, model: Model) -> dict[str, Tensor]:
    """Return the gradients of a model of transformers by the declared names of the weights."""
    from megaloom.dsl.hf.state_dict import from_checkpoint
    from tests.support.models.hugging_face import UNUSED

    gradients = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in _tensors(theirs).items()}
    return from_checkpoint(names, model, _stored(theirs, gradients, UNUSED), torch.cat)
