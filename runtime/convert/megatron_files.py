"""Checkpoints that Megatron-LM has written, as views of whole tensors by the names of its model on one rank.

    ROOT/latest_checkpointed_iteration.txt
    ROOT/iter_0000100/.metadata, *.distcp                                 torch_dist
    ROOT/iter_0000100/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt           one file a rank, its experts in EEE

Files of ranks may have the names from before megatron-core (`legacy_names`). Only weights are read, and no code is run.
Layers are numbered over all pipeline ranks and model chunks, experts over all expert-parallel ranks.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from megaloom.dsl.errors import UserError
from megaloom.runtime.checkpoints.checkpoint_views import tensor_views
from megaloom.runtime.weights.safe_pickle import METADATA, load_tensors
from megaloom.runtime.weights.views import View, concatenated, held

from .legacy_names import LEGACY, LegacyModel, is_legacy, tensors_of_rank

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # stands for an iteration in checkpoints of others' models
RANK_FILE, RANK_FOLDERS = "model_optim_rng.pt", "mp_rank_*"
# In torch_dist, equal layers are one tensor without a number, and so are experts.
LAYER = re.compile(r"(?P<before>(?:de|en)coder\.layers\.)(?:(?P<number>\d+)\.)?(?P<rest>.+)")
EXPERT = re.compile(r"(?P<before>.*\bmlp\.experts\.(?:local_)?experts\.)(?:(?P<number>\d+)\.)?(?P<rest>.+)")
GROUPED = re.compile(r"(.*\bexperts\.)(linear_fc[12]\.(?:weight|bias))(\d+)")  # Transformer Engine's experts
NOT_WEIGHTS = ("optimizer.", "rng_state", "rerun_state_machine_state")
BY_ROWS = (
    *("word_embeddings.weight", "output_layer.weight", "output_layer.bias"),
    *(f"{name}.{kind}" for name in ("linear_qkv", "linear_q", "linear_kv") for kind in ("weight", "bias")),
)
IN_HALVES = ("linear_fc1.weight", "linear_fc1.bias")  # of a gated unit: each rank has rows of the gate, then of `up`
BY_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
RENAMED = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",  # Transformer Engine: norm and matrix in one layer
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    ".experts.experts.": ".experts.local_experts.",  # in torch_dist
}
STACKS = ("encoder", "decoder")  # whose layers are numbered from 0 on each pipeline rank
ChunkWeights = list[list[dict[str, Tensor]]]
"""Weights of one model chunk by expert-parallel rank and tensor-parallel rank."""


def megatron_tensors(path: Path, *, gated: bool, legacy: LegacyModel | None = None) -> dict[str, View]:
    """Return the weights of a checkpoint as whole tensors. Raise UserError if it cannot be read.

    gated: the feed-forward layers are gated units, whose first matrix has two halves. legacy: the model, which names
    from before megatron-core need; without it, a checkpoint that has them is refused.
    """
    folder = _newest(path)
    if (folder / METADATA).is_file():
        found = dict(_unstacked(tensor_views(folder)))
    else:
        found = _joined_ranks(folder, gated=gated, legacy=legacy)
    return {_plain(name): view for name, view in found.items() if not name.endswith("_extra_state")}


def _newest(path: Path) -> Path:
    """Return the folder of the newest checkpoint, or the path itself if it is one."""
    if not (path / LATEST).is_file():
        return path
    step = (path / LATEST).read_text(encoding="utf-8").strip()
    if step == RELEASE:
        return path / RELEASE
    if not step.isdigit():
        raise UserError(
            f"{path / LATEST} names {step!r:.40}, which is not an iteration\ngive the folder of the checkpoint itself"
        )
    return path / f"iter_{int(step):07d}"


def _plain(name: str) -> str:
    """Return the name that a tensor has in the files of ranks, without Transformer Engine."""
    for other, plain in RENAMED.items():
        name = name.replace(other, plain)
    return name


def _unstacked(tensors: Mapping[str, View]) -> Iterator[tuple[str, View]]:
    """Yield the weights of a torch_dist checkpoint, one tensor for each layer and expert."""
    for name, view in tensors.items():
        if not name.startswith(NOT_WEIGHTS):
            for of_layer, one in _each(LAYER, name, view):
                yield from _each(EXPERT, of_layer, one)


def _each(numbered: re.Pattern[str], name: str, view: View) -> Iterator[tuple[str, View]]:
    """Yield the tensors of the layers, or of the experts, that a tensor holds; any other tensor as it is."""
    found = numbered.fullmatch(name)
    if not found or found["number"]:
        yield name, view
    else:
        for i in range(view.shape[0]):
            yield f"{found['before']}{i}.{found['rest']}", view.select(0, i)


def _joined_ranks(folder: Path, *, gated: bool, legacy: LegacyModel | None) -> dict[str, View]:
    """Return the weights of the files of all ranks, joined over tensor-parallel ranks."""
    out: dict[str, View] = {}
    layers = dict.fromkeys(STACKS, 0)
    for by_expert in _stages(folder, legacy):
        for ep, ranks in enumerate(by_expert):
            experts = _count(EXPERT, ranks[0])
            for name in ranks[0]:
                if any(name not in rank for rank in ranks):
                    raise UserError(f"{folder}: {name} is missing in the file of a tensor-parallel rank\ncopy it again")
                whole = _moved(EXPERT, _moved(LAYER, name, layers.get(name.partition(".")[0], 0)), ep * experts)
                if whole not in out:  # what is no expert is equal on all expert-parallel ranks
                    out[whole] = _joined([held(rank[name]) for rank in ranks], name, gated=gated)
        for stack in STACKS:
            layers[stack] += _count(LAYER, (name for name in by_expert[0][0] if name.startswith(f"{stack}.")))
    return out


def _count(numbered: re.Pattern[str], names: Iterable[str]) -> int:
    """Return the number of layers, or of experts, that these names belong to."""
    found = (numbered.fullmatch(name) for name in names)
    return max((int(m["number"]) for m in found if m and m["number"]), default=-1) + 1


def _moved(numbered: re.Pattern[str], name: str, by: int) -> str:
    """Return a name with the number of its layer, or of its expert, increased."""
    found = numbered.fullmatch(name)
    return f"{found['before']}{int(found['number']) + by}.{found['rest']}" if found and found["number"] else name


def _stages(folder: Path, legacy: LegacyModel | None) -> Iterator[ChunkWeights]:
    """Yield the weights of each model chunk, in the order of the layers."""
    files = _rank_files(folder)
    tp, pp, ep = (range(max(place[i] for place in files) + 1) for i in range(3))
    if absent := next((place for place in product(tp, pp, ep) if place not in files), None):
        ranks = ", ".join(f"{name}={n}" for name, n in zip(("tp", "pp", "ep"), absent, strict=True))
        raise UserError(
            f"{folder} has no {RANK_FILE} of rank {ranks}\ncopy the checkpoint again, or save it as torch_dist"
        )
    chunks = sorted(key for key in files[0, 0, 0] if key == "model" or key.removeprefix("model").isdigit())
    for chunk, stage in product(chunks, pp):
        contents = [[files[t, stage, e] for t in tp] for e in ep]
        yield [[_weights(folder, each, chunk, stage, legacy, len(tp)) for each in ranks] for ranks in contents]


def _rank_files(folder: Path) -> dict[tuple[int, int, int], Mapping[str, Any]]:
    """Return the contents of the files of ranks by tensor-, pipeline- and expert-parallel rank."""
    files: dict[tuple[int, int, int], Mapping[str, Any]] = {}
    for path in sorted(folder.glob(RANK_FOLDERS)):
        numbers = path.name.removeprefix("mp_rank_").split("_")
        if len(numbers) > 3 or not all(map(str.isdigit, numbers)):
            raise UserError(f"{path} is not the folder of a rank\nsave the checkpoint as torch_dist")
        contents = load_tensors(path / RANK_FILE)
        if not isinstance(contents, Mapping):
            raise UserError(f"{path / RANK_FILE} has no weights\ncopy the checkpoint again")
        args = contents.get("args")
        sizes = vars(args) if isinstance(args, Namespace) else {}
        tensor = sizes.get("tensor_model_parallel_size")
        if (sizes.get("expert_tensor_parallel_size") or tensor) != tensor:
            raise UserError(f"{folder}: experts whose etp differs from tp are not read\nsave it as torch_dist")
        tp, *others = map(int, numbers)
        only_ep = len(others) == 1 and sizes.get("pipeline_model_parallel_size") == 1
        pp, ep = [0, *others] if only_ep else [*others, 0, 0][:2]
        files[tp, pp, ep] = contents
    if not files:
        raise UserError(f"{folder} is not a checkpoint of Megatron-LM: it has neither {METADATA} nor {RANK_FOLDERS}")
    return files


def _weights(
    folder: Path, contents: Mapping[str, Any], chunk: str, stage: int, legacy: LegacyModel | None, tp: int
) -> dict[str, Tensor]:
    """Return the weights of a model chunk in the file of a rank."""
    weights = contents.get(chunk)
    if isinstance(weights, Mapping) and is_legacy(weights):
        if legacy is None:
            raise UserError(
                f"{folder} has the names from before megatron-core ({chunk}.{LEGACY}), which depend on the model\n"
                "give its config.json: megaloom convert FOLDER --to hf --config config.json"
            )
        try:
            return tensors_of_rank(weights, contents.get("checkpoint_version", 0), legacy, tp)
        except UserError as error:
            raise UserError(f"{folder}: {error}") from None
    if not isinstance(weights, Mapping):
        raise UserError(f"{folder} has no weights {chunk!r} of pipeline rank {stage}\ncopy the checkpoint again")
    return {GROUPED.sub(r"\1local_experts.\3.\2", k): v for k, v in weights.items() if isinstance(v, Tensor)}


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
