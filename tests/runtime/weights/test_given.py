"""Hugging Face folders into the runtime: logits equal transformers' on small models of all families, under layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from attrs import frozen
from safetensors.torch import load_file, save_file
from torch import Tensor

from megaloom.dsl import Graph, UserError, graph
from megaloom.dsl.dims import DType
from megaloom.dsl.hf.architectures import read
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.capabilities import untrainable
from megaloom.runtime.launch import launcher
from megaloom.runtime.weights import tensor_folder
from megaloom.runtime.weights.given import open_folder
from tests.support.hugging_face import SMALL, built, drawn, named

SEQ = 24


@frozen
class Case:
    """A folder that transformers has written, a plan for its model, inputs, and transformers' logits."""

    folder: Path
    plan: Plan
    batch: Mapping[str, Tensor]
    logits: Tensor


def case(name: str, folder: Path, plan_of: Callable[..., Plan], layout: Layout) -> Case | None:
    """Return a case, or None if the runtime does not train the family."""
    torch.manual_seed(0)
    theirs = built(name)
    theirs.save_pretrained(folder, max_shard_size="20KB")
    m = read(folder)
    if untrainable(graph(m)):
        return None
    inputs = drawn(m, SEQ, SEQ)
    with torch.no_grad():
        logits = theirs(**named(inputs)).logits
    return Case(
        folder, plan_of(str(folder / "config.json"), layout, batch=2, seq=SEQ), complete(graph(m), inputs), logits
    )


def complete(g: Graph, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return inputs, with ones for those that only a loss reads."""
    batch, seq = 2, inputs["tokens"].shape[1] if "tokens" in inputs else SEQ
    out = dict(inputs)
    for n in g.nodes:
        if n.is_input and n.name not in out:
            sizes = [{"batch": batch, "seq": seq, "source": seq}.get(d.name) or d.known for d in n.shape]
            out[n.name] = torch.ones(sizes, dtype=torch.int64 if n.value.dtype is DType.INDEX else torch.float32)
    return out


@frozen
class Outcome:
    """Logits of an engine on one rank, or None, and bytes: read from files, the largest read, held in weights."""

    logits: Tensor | None
    read: int
    largest_read: int
    held: int


def outcomes_of(cases: list[Case]) -> list[Outcome]:
    """On each rank: start engines from the folders."""
    from megatron.core import parallel_state

    from megaloom.runtime import Recipe, shard

    out = []
    for it in cases:
        m = read(it.folder)
        with counted_reads() as nbytes:
            engine = shard(m, it.plan, Recipe(steps=1), weights=open_folder(it.folder).of(m))
        held = {id(x): x.nbytes for chunk in engine.model_chunks for x in chunk.parameters()}
        out.append(Outcome(engine.logits(it.batch), sum(nbytes), max(nbytes), sum(held.values())))
        parallel_state.destroy_model_parallel()
    return out


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Collect the bytes of each slice that is read from a safetensors file."""
    nbytes: list[int] = []
    open_file = tensor_folder._open

    def counted(file: Path) -> Any:
        opened = open_file(file)

        class Slice:
            def __init__(self, name: str) -> None:
                self.slice = opened.get_slice(name)
                self.get_shape, self.get_dtype = self.slice.get_shape, self.slice.get_dtype

            def __getitem__(self, key: Any) -> Any:
                x = self.slice[key]
                nbytes.append(x.nbytes)
                return x

        return SimpleNamespace(get_slice=Slice, keys=opened.keys)

    with mock.patch.object(tensor_folder, "_open", counted):
        yield nbytes


def differences(cases: list[Case], outcomes: list[Outcome]) -> dict[str, float]:
    """Return for each family the largest difference from transformers' logits, over what float32 may differ by."""
    found = {}
    for ours, it in zip(outcomes, cases, strict=True):
        assert ours.logits is not None
        near = 1e-5 * max(1.0, float(it.logits.std()))
        found[it.folder.name] = float((ours.logits - it.logits).abs().max()) / near
    return found


def test_the_logits_of_each_family_are_theirs(plan_of: Any, tmp_path: Path) -> None:
    built_cases = [case(name, tmp_path / name, plan_of, Layout()) for name in SMALL]
    cases = [it for it in built_cases if it is not None]
    assert len(cases) > 20
    (outcomes,) = launcher.run(outcomes_of, (cases,), 1, timeout=300)
    assert not {name: x for name, x in differences(cases, outcomes).items() if not x < 1}


def test_a_layout_reads_its_shards_and_computes_their_logits(plan_of: Any, tmp_path: Path) -> None:
    """Every rank reads no more than it holds; of gates that are interleaved with other rows, both."""
    layout = Layout(tp=2, pp=2, sequence_parallel=True, vocab_multiple=1)
    built_cases = [case(name, tmp_path / name, plan_of, layout) for name in ("llama", "gpt-oss")]
    cases = [it for it in built_cases if it is not None]
    ranks = launcher.run(outcomes_of, (cases,), 4, timeout=300)
    assert max(differences(cases, ranks[-1]).values()) < 1
    for llama, gpt_oss in ranks:
        assert llama.read in (llama.held, llama.held - 32 * 4)  # the last row of the vocabulary is padding
        assert gpt_oss.held / 2 < gpt_oss.read < 2 * gpt_oss.held
        assert llama.largest_read <= 64 * 32 * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small Llama in one file."""
    built("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def refusal(folder: Path) -> str:
    """Return the message with which the weights of a folder are refused."""
    with pytest.raises(UserError) as raised:
        open_folder(folder).check(read(folder))
    return str(raised.value)


def test_wrong_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.upproj.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors["model.norm.weight"] = torch.ones(7)
    save_file(tensors, folder / "model.safetensors")
    assert refusal(folder).splitlines() == [
        f"--from {folder}: the tensors of the checkpoint are not those of model 'llama'",
        "missing: model.layers.0.mlp.up_proj.weight [48, 32], which holds swiglu.0.up; "
        "the nearest is model.layers.0.mlp.upproj.weight",
        "model.norm.weight has shape [7], not [32]",
        "unknown: model.layers.0.mlp.upproj.weight [48, 32]; the nearest is model.layers.0.mlp.up_proj.weight",
    ]


def test_a_second_table_must_equal_the_first(tmp_path: Path) -> None:
    built("llama-tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    open_folder(tmp_path).check(read(tmp_path))
    tensors["lm_head.weight"][-1, -1] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lm_head.weight differs from its model.embed_tokens.weight" in refusal(tmp_path)


def test_files_that_cannot_be_read(folder: Path) -> None:
    file, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert refusal(folder).startswith(f"cannot read {file}: ")
    file.rename(folder / "pytorch_model.bin")
    assert "pickled weights are not read" in refusal(folder)
    (folder / "pytorch_model.bin").unlink()
    assert refusal(folder).startswith(f"{folder} has no model.safetensors\n")
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert refusal(folder).startswith(f"{folder} has no one.safetensors and 1 more files\n")
    index.write_text(json.dumps({"weight_map": {"a": "../one.safetensors"}}))
    assert "names '../one.safetensors', which is not a file of its folder" in refusal(folder)
    index.write_text("[]")
    assert refusal(folder).startswith(f"{index} is not an index of safetensors files")
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="no such folder"):
        open_folder(folder)
