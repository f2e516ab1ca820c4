"""Checkpoints that Megatron-LM has written, as views of whole tensors by the names of GPTModel on one rank.

    ROOT/latest_checkpointed_iteration.txt
    ROOT/iter_0000100/.metadata, *.distcp                                 torch_dist
    ROOT/iter_0000100/mp_rank_TT[_PPP]/model_optim_rng.pt                 one file a rank

Only weights are read, and no code is run. Layers are numbered over all pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megaloom.dsl.errors import UserError
from megaloom.runtime.weights.safe_pickle import METADATA, load_tensors
from megaloom.runtime.weights.views import Box, View, concatenated, source

from .checkpoint_views import tensor_views

LATEST = "latest_checkpointed_iteration.txt"
RANK_FILE, RANK_FOLDERS = "model_optim_rng.pt", "mp_rank_*"
LAYERS = "decoder.layers."
NOT_WEIGHTS = ("optimizer.", "rng_state", "rerun_state_machine_state")
BY_ROWS = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias", "linear_qkv.weight", "linear_qkv.bias")
IN_HALVES = ("linear_fc1.weight", "linear_fc1.bias")  # of a gated unit: each rank has rows of the gate, then of `up`
BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
# Transformer Engine's layers hold the norm in front of them.
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def is_megatron(path: Path) -> bool:
    """Return True for the folder of a checkpoint of Megatron-LM, or the folder with several."""
    return (path / LATEST).is_file() or (path / METADATA).is_file() or any(path.glob(RANK_FOLDERS))


def megatron_tensors(path: Path, *, gated: bool) -> dict[str, View]:
    """Return the weights of a checkpoint as whole tensors. Raise UserError if it cannot be read.

    gated: the feed-forward layers are gated units, whose first matrix has two halves.
    """
    folder = _newest(path)
    if (folder / METADATA).is_file():
        found = dict(_unstacked(tensor_views(folder)))
    else:
        found = _joined_ranks(folder, gated=gated)
    return {_plain(name): view for name, view in found.items() if not name.endswith("_extra_state")}


def _newest(path: Path) -> Path:
    """Return the folder of the newest checkpoint, or the path itself if it is one."""
    if not (path / LATEST).is_file():
        return path
    step = (path / LATEST).read_text(encoding="utf-8").strip()
    if not step.isdigit():
        raise UserError(
            f"{path / LATEST} has no number of an iteration, but {step!r:.40}\ngive one of the iter_ folders"
        )
    return path / f"iter_{int(step):07d}"


def _plain(name: str) -> str:
    """Return the name that a tensor has without Transformer Engine."""
    for fused, plain in NORMS.items():
        before, found, last = name.partition(fused)
        if found:
            return before + plain + last
    return name


def _unstacked(tensors: Mapping[str, View]) -> Iterator[tuple[str, View]]:
    """Yield the weights of a torch_dist checkpoint, one tensor for each layer."""
    for name, view in tensors.items():
        if name.startswith(NOT_WEIGHTS):
            continue
        rest = name.removeprefix(LAYERS)
        if rest == name or rest.partition(".")[0].isdigit():
            yield name, view
        else:  # of equal layers, one tensor for all
            yield from ((f"{LAYERS}{i}.{rest}", view.select(0, i)) for i in range(view.shape[0]))


def _joined_ranks(folder: Path, *, gated: bool) -> dict[str, View]:
    """Return the weights of the files of all ranks, joined over tensor-parallel ranks."""
    out: dict[str, View] = {}
    layers = 0
    for stage in _stages(folder):
        numbers = [int(name.removeprefix(LAYERS).partition(".")[0]) for name in stage[0] if name.startswith(LAYERS)]
        for name in stage[0]:
            if any(name not in rank for rank in stage):
                raise UserError(f"{folder}: {name} is missing in the file of a tensor-parallel rank\ncopy it again")
            number, _, rest = name.removeprefix(LAYERS).partition(".")
            whole = f"{LAYERS}{layers + int(number)}.{rest}" if name.startswith(LAYERS) else name
            out.setdefault(whole, _joined([_view(rank[name]) for rank in stage], name, gated=gated))
        layers += max(numbers, default=-1) + 1
    return out


def _stages(folder: Path) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the weights of each model chunk in the order of the layers, by tensor-parallel rank."""
    files: dict[int, dict[int, dict[str, Any]]] = {}
    for path in sorted(folder.glob(RANK_FOLDERS)):
        numbers = path.name.removeprefix("mp_rank_").split("_")
        if len(numbers) > 2 or not all(map(str.isdigit, numbers)):
            raise UserError(
                f"{path} is of an expert-parallel rank: such checkpoints are not read\nsave it as torch_dist"
            )
        tp, pp = int(numbers[0]), int(numbers[1]) if len(numbers) > 1 else 0
        files.setdefault(pp, {})[tp] = load_tensors(path / RANK_FILE)
    if not files:
        raise UserError(f"{folder} is no checkpoint of Megatron-LM: it has neither {METADATA} nor {RANK_FOLDERS}")
    chunks = sorted(key for key in files[0][0] if key == "model" or key.removeprefix("model").isdigit())
    for chunk in chunks:
        for pp in sorted(files):
            ranks = [files[pp][tp].get(chunk) for tp in sorted(files[pp])]
            if not ranks or any(not isinstance(rank, Mapping) for rank in ranks):
                raise UserError(f"{folder} has no weights {chunk!r} of pipeline rank {pp}\ncopy the checkpoint again")
            yield [{k: v for k, v in rank.items() if isinstance(v, Tensor)} for rank in ranks if rank is not None]


def _view(tensor: Tensor) -> View:
    def reader(box: Box) -> Tensor:
        return tensor[tuple(slice(r.start, r.stop) for r in box)]

    return source(tuple(tensor.shape), tensor.dtype, reader)


def _joined(parts: Sequence[View], name: str, *, gated: bool) -> View:
    """Return a whole tensor from the parts of tensor-parallel ranks."""
    if len(parts) == 1:
        return parts[0]
    if name.endswith(IN_HALVES) and gated:
        rows = parts[0].shape[0] // 2
        return concatenated([part.narrow(0, half * rows, rows) for half in (0, 1) for part in parts], 0)
    if name.endswith((*BY_ROWS, *IN_HALVES)):
        return concatenated(list(parts), 0)
    return concatenated(list(parts), 1) if name.endswith(BY_COLUMNS) else parts[0]
