"""Checkpoints from before megatron-core are read: the files here have the layouts of 2020 to 2024."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megaloom.dsl import UserError, graph
from megaloom.runtime.training.initial_weights import open_weights
from tests.support.models.megatron_lm import LAYERS, MODELS

TP = PP = 2
Weights = Mapping[str, Tensor]
Flat = dict[str, Tensor]


def rank_rows(parts: list[Tensor], version: int, tp: int) -> Tensor:
    """Return the rows of one rank of projections [heads channels …], in the order of a checkpoint_version."""
    mine = torch.stack([x.chunk(TP)[tp] for x in parts])  # [projections heads channels …]
    order = {0: (0, 1, 2), 1: (1, 2, 0), 2: (1, 0, 2), 3: (1, 0, 2)}[version]
    return mine.permute(*order, *range(3, mine.ndim)).flatten(0, 2)


def attention(w: Weights, name: str, version: int, tp: int) -> Flat:
    """Return the tensors of a rank of an attention layer. Cross-attention has a matrix of queries for itself."""
    q, k, v = (w[f"{name}.{x}"].permute(1, 2, 0) for x in "qkv")
    biases = [w[f"{name}.{x}_bias"] for x in "qkv"]
    out = {"dense.weight": w[f"{name}.o"].chunk(TP)[tp].flatten(0, 1).T, "dense.bias": w[f"{name}.o_bias"]}
    if name.startswith("cross"):
        out |= {"query.weight": rank_rows([q], 2, tp), "query.bias": rank_rows(biases[:1], 2, tp)}
        key_value = {"weight": [k, v], "bias": biases[1:]}
        return out | {f"key_value.{x}": rank_rows(parts, version, tp) for x, parts in key_value.items()}
    return out | {
        f"query_key_value.{x}": rank_rows(parts, version, tp) for x, parts in (("weight", [q, k, v]), ("bias", biases))
    }


def norm(w: Weights, name: str) -> Flat:
    return {"weight": w[f"{name}.scale"], "bias": w[f"{name}.shift"]}


def stack(w: Weights, version: int, tp: int, pp: int, layers: range, norms: int, *, crosses: bool) -> Flat:
    """Return the tensors of a pipeline rank of an encoder or decoder: its layers, whose first norm is `norms`."""
    end = "norm" if version == 3 else "layernorm"
    of_itself = "attention" if version == 0 else "self_attention"
    own = layers[pp * len(layers) // PP : (pp + 1) * len(layers) // PP]
    out: dict[str, Flat] = {}
    for local, i in enumerate(own):
        at, per = f"layers.{local}", 3 if crosses else 2
        first = norms + (i - layers.start) * per
        out[f"{at}.input_{end}"] = norm(w, f"layer_norm.{first}")
        out[f"{at}.{of_itself}"] = attention(w, f"attention.{i}", version, tp)
        out[f"{at}.post_attention_{end}"] = norm(w, f"layer_norm.{first + 1}")
        if crosses:
            out[f"{at}.inter_attention"] = attention(w, f"cross_attention.{i - layers.start}", version, tp)
            out[f"{at}.post_inter_attention_{end}"] = norm(w, f"layer_norm.{first + 2}")
        up, down = w[f"mlp.{i}.up"].T.chunk(TP)[tp], w[f"mlp.{i}.down"].T.chunk(TP, 1)[tp]
        out[f"{at}.mlp.dense_h_to_4h"] = {"weight": up, "bias": w[f"mlp.{i}.up_bias"].chunk(TP)[tp]}
        out[f"{at}.mlp.dense_4h_to_h"] = {"weight": down, "bias": w[f"mlp.{i}.down_bias"]}
    if pp == PP - 1:
        out[f"final_{end}"] = norm(w, f"layer_norm.{norms + len(layers) * (3 if crosses else 2)}")
    return {f"{name}.{x}": value for name, found in out.items() for x, value in found.items()}


def model_of_rank(kind: str, w: Weights, version: int, tp: int, pp: int) -> dict[str, Any]:
    """Return the key "model" of the file of a rank."""
    words, end = {"weight": w["wte"].chunk(TP)[tp]}, "norm" if version == 3 else "layernorm"
    name = "transformer" if version == 0 and kind != "t5" else "encoder"
    inside: dict[str, Any] = {name: stack(w, version, tp, pp, range(LAYERS), 0, crosses=False)}
    if kind == "t5":
        inside["decoder"] = stack(w, version, tp, pp, range(LAYERS, 2 * LAYERS), 2 * LAYERS + 1, crosses=True)
    if pp == 0:
        inside["embedding"] = {"word_embeddings": words, "position_embeddings": {"weight": w["wpe"]}}
        if kind == "bert":
            inside["embedding"]["tokentype_embeddings"] = {"weight": w["types"]}
        return {"language_model": inside}
    out: dict[str, Any] = {"language_model": inside, "word_embeddings_for_head": words}
    if kind != "gpt":
        out["lm_head"] = {"bias": w["unembed.0.bias"].chunk(TP)[tp]}
    if kind == "bert":
        inside["pooler"] = {"dense.weight": torch.ones(32, 32), "dense.bias": torch.ones(32)}
        dense, head_norm = (f"transform.0.{x}" for x in ("dense", "norm"))
        out["lm_head"] |= {"dense.weight": w[f"{dense}.weight"].T, "dense.bias": w[f"{dense}.bias"]}
        out["lm_head"] |= {f"{end}.{x}": value for x, value in norm(w, head_norm).items()}
        out["binary_head"] = {"weight": torch.ones(2, 32), "bias": torch.ones(2)}
    return out


def written(folder: Path, kind: str, w: Weights, version: int) -> Path:
    """Write the files of all ranks, with the random numbers that Megatron-LM saves beside them."""
    random = {"np_rng_state": np.random.RandomState(1).get_state(), "torch_rng_state": torch.get_rng_state()}
    for tp in range(TP):
        for pp in range(PP):
            state: dict[str, Any] = {"model": model_of_rank(kind, w, version, tp, pp), "rng_state": [random]}
            state |= {"args": Namespace(tensor_model_parallel_size=TP), "iteration": 7}
            state |= {"checkpoint_version": float(version)} if version else {}
            rank = folder / "release" / f"mp_rank_{tp:02d}_{pp:03d}"
            rank.mkdir(parents=True)
            torch.save(state, rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    return folder


@pytest.mark.parametrize("version", range(4))
@pytest.mark.parametrize("kind", MODELS)
def test_a_checkpoint_of_megatron_lms_own_layers_is_read(tmp_path: Path, kind: str, version: int) -> None:
    model = MODELS[kind]()
    random = torch.Generator().manual_seed(5)
    w = {
        name: torch.rand([d.known for d in slot.dims], generator=random) for name, slot in graph(model).weights.items()
    }
    initial = open_weights(written(tmp_path, kind, w, version))
    initial.check(model)
    found = initial.of(model)
    assert found.keys() == w.keys()
    assert [name for name, x in w.items() if not torch.equal(found[name].read(), x)] == []


def test_unknown_versions_names_and_rows_are_refused(tmp_path: Path) -> None:
    model = MODELS["gpt"]()
    w = {name: torch.zeros([d.known for d in slot.dims]) for name, slot in graph(model).weights.items()}
    files = sorted(written(tmp_path, "gpt", w, 1).glob("release/*/model_optim_rng.pt"))
    states = [torch.load(path, weights_only=False) for path in files]

    def refusal(change: Any) -> str:
        for path, state in zip(files, states, strict=True):
            torch.save({**state, **change(state)}, path)
        with pytest.raises(UserError) as caught:
            open_weights(tmp_path).check(model)
        return str(caught.value)

    assert "checkpoint_version 4 is not known" in refusal(lambda state: {"checkpoint_version": 4})

    def renamed(state: dict[str, Any]) -> dict[str, Any]:
        inside = state["model"]["language_model"]
        return {"model": {"language_model": {**inside, "other": {"weight": torch.ones(1)}}}}

    assert "unknown: language_model.other.weight" in refusal(renamed)
    experts = {
        "model": {"language_model": {"encoder": {"layers.0.mlp.local_experts.0.dense_h_to_4h.weight": w["wte"]}}}
    }
    assert "local_experts.0.dense_h_to_4h.weight is of a mixture of experts" in refusal(lambda state: experts)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("newest")
    with pytest.raises(UserError, match="'newest', which is not an iteration"):
        open_weights(tmp_path).check(model)
