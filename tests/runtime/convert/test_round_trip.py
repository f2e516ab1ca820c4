"""Small Hugging Face models of all families through the runtime: in, logits, a checkpoint, and out again.

Logits equal those of transformers, and the folder that is written has the bits of the one that was read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from attrs import frozen
from safetensors.torch import load_file
from torch import Tensor

from megaloom.dsl import fingerprint, graph
from megaloom.dsl.hf.architectures import open_config, read, reader
from megaloom.dsl.hf.tensor_check import unknown_tensors
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.rules.capabilities import untrainable
from megaloom.runtime.checkpoints.checkpoint_folder import latest
from megaloom.runtime.convert.hugging_face import describe, write_folder
from megaloom.runtime.convert.run_weights import checkpoint_weights
from megaloom.runtime.launch import launcher
from megaloom.runtime.weights import tensor_folder
from megaloom.runtime.weights.hugging_face_weights import open_folder
from tests.support.limits import LIMIT
from tests.support.models.hugging_face import ORDERS, SMALL, UNUSED, built, complete, drawn, named, transformers

SEQ = 24


@frozen
class Case:
    """A folder that transformers has written, a plan for its model, inputs, and transformers' logits."""

    folder: Path
    plan: Plan
    inputs: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]  # the inputs, and what the loss reads
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
    plan = plan_of(str(folder / "config.json"), layout, batch=2, seq=SEQ)
    return Case(folder, plan, inputs, complete(graph(m), inputs), logits)


@frozen
class Outcome:
    """Logits of an engine on one rank, or None, and bytes: read from files, the largest read, held in weights."""

    logits: Tensor | None
    read: int
    largest_read: int
    held: int


def outcomes_of(cases: list[Case]) -> list[Outcome]:
    """On each rank: start engines from the folders, and save them."""
    from megatron.core import parallel_state

    from megaloom.runtime import Recipe, shard

    out = []
    for it in cases:
        m = read(it.folder)
        with counted_reads() as nbytes:
            engine = shard(m, it.plan, Recipe(steps=1), weights=open_folder(it.folder).of(m))
        held = {id(x): x.nbytes for chunk in engine.model_chunks for x in chunk.parameters()}
        engine.save(it.folder / "run")
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


def written(it: Case) -> Path:
    """Convert the checkpoint of a case into a folder."""
    m = read(it.folder)
    checkpoint = latest(it.folder / "run", fingerprint=fingerprint(m))
    assert checkpoint is not None
    weights = checkpoint_weights(graph(m), checkpoint)
    out = it.folder / "out"
    write_folder(describe(it.folder), m, weights, out, torch.float32)
    return out


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def check_round_trip(it: Case) -> None:
    """The folder that is written has the tensors that were read, but for unused ones; transformers loads them all."""
    folder = written(it)
    before, after = tensors_of(it.folder), tensors_of(folder)
    assert {name for name, x in before.items() if name not in after or not torch.equal(x, after[name])} <= {
        name for name in before if name.startswith(UNUSED)
    }
    dropped = before.keys() - after.keys()
    assert not unknown_tensors(reader(open_config(it.folder)[0]).names, after, dict.fromkeys(dropped))
    fields = json.loads((folder / "config.json").read_text())
    assert fields["dtype"] == "float32"
    theirs_class = getattr(transformers, fields["architectures"][0])
    theirs, info = theirs_class.from_pretrained(folder, output_loading_info=True, attn_implementation="eager")
    assert not info["unexpected_keys"]
    assert set(info["missing_keys"]) <= {f"{theirs.base_model_prefix}.{name}" for name in dropped}
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(**named(it.inputs)).logits, it.logits, rtol=0, atol=1e-6)


def test_each_family_goes_in_and_out(plan_of: Any, tmp_path: Path) -> None:
    built_cases = [case(name, tmp_path / name, plan_of, Layout()) for name in SMALL if name not in ORDERS]
    cases = [it for it in built_cases if it is not None]
    assert len(cases) > 20
    (outcomes,) = launcher.run(outcomes_of, (cases,), 1, timeout=LIMIT)
    assert not {name: x for name, x in differences(cases, outcomes).items() if not x < 1}
    for it in cases:
        check_round_trip(it)


def test_a_layout_reads_its_shards_and_goes_in_and_out(plan_of: Any, tmp_path: Path) -> None:
    """Every rank reads no more than it holds; of gates that are interleaved with other rows, both."""
    layout = Layout(tp=2, pp=2, sequence_parallel=True, vocab_multiple=1)
    built_cases = [case(name, tmp_path / name, plan_of, layout) for name in ("llama", "gpt-oss")]
    cases = [it for it in built_cases if it is not None]
    ranks = launcher.run(outcomes_of, (cases,), 4, timeout=LIMIT)
    assert max(differences(cases, ranks[-1]).values()) < 1
    for llama, gpt_oss in ranks:
        assert llama.read in (llama.held, llama.held - 32 * 4)  # the last row of the vocabulary is padding
        assert gpt_oss.held / 2 < gpt_oss.read < 2 * gpt_oss.held
        assert llama.largest_read <= 64 * 32 * 4
    for it in cases:
        check_round_trip(it)
