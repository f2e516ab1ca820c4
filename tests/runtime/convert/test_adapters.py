"""Adapters of small Hugging Face models: logits are those of PEFT with the written adapters, and of merged weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve, frozen
from safetensors.torch import load_file
from torch import Tensor

from megaloom.dsl import Model, UserError, fingerprint, graph, lora, read
from megaloom.dsl.hf.architectures import open_config, reader
from megaloom.dsl.transforms.adapters import adapter_slots
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.checkpoints.checkpoint_folder import latest
from megaloom.runtime.convert.adapters import with_merged_adapters, write_adapters
from megaloom.runtime.convert.hugging_face import describe, write_folder
from megaloom.runtime.convert.run_weights import checkpoint_weights
from megaloom.runtime.launch import launcher
from megaloom.runtime.weights.hugging_face_weights import open_folder
from tests.support.limits import LIMIT
from tests.support.models.hugging_face import built, complete, drawn, named, transformers

peft = pytest.importorskip("peft", reason="`make unit` installs it")

SEQ = 24
TARGETS: Mapping[str, tuple[str, ...] | None] = {
    "llama": ("q_proj", "v_proj", "o_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj"),  # inputs first; three matrices in one
    "bloom": None,  # the three matrices lie in it head by head
    "t5": ("q", "v", "wo"),
    "deepseek-v2": ("q_b_proj", "kv_b_proj", "o_proj"),  # beside experts
}


@frozen
class Case:
    """A folder that transformers has written, a plan for its model, and inputs."""

    name: str
    folder: Path
    plan: Plan
    inputs: Mapping[str, Tensor]

    def model(self) -> Model:
        """Return the model with adapters."""
        return lora(read(self.folder), 4, 6, targets=TARGETS[self.name])


def case(name: str, folder: Path, plan_of: Callable[..., Plan], layout: Layout) -> Case:
    torch.manual_seed(0)
    built(name).save_pretrained(folder)
    it = Case(name, folder, plan_of(str(folder / "config.json"), layout, batch=2, seq=SEQ), {})
    m = it.model()
    plan = evolve(it.plan, fingerprint=fingerprint(m), lora=m.lora)
    return evolve(it, plan=plan, inputs=drawn(read(folder), SEQ, SEQ))


def logits_of(cases: list[Case]) -> list[Tensor | None]:
    """On each rank: engines from the folders with random adapters, saved after their logits."""
    from megatron.core import parallel_state

    from megaloom.runtime import Recipe, shard

    out = []
    for it in cases:
        m, generator = it.model(), torch.Generator().manual_seed(1)
        slots = [s for found in adapter_slots(m) for s in (found.a, *found.b)]
        drawn = {s.name: torch.randn([d.known for d in s.dims], generator=generator) / 4 for s in slots}
        engine = shard(m, it.plan, Recipe(steps=1), weights={**open_folder(it.folder).of(m), **drawn})
        out.append(engine.logits(complete(graph(m), it.inputs)))
        engine.save(it.folder / "run")
        parallel_state.destroy_model_parallel()
    return out


def initial_logits_of(it: Case) -> Tensor | None:
    """On each rank: the logits of an engine from the folder, whose adapters have their initial values."""
    from megaloom.runtime import Recipe, shard

    engine = shard(it.model(), it.plan, Recipe(steps=1), weights=open_folder(it.folder).of(it.model()))
    return engine.logits(complete(graph(it.model()), it.inputs))


def test_initial_adapters_change_nothing(plan_of: Any, tmp_path: Path) -> None:
    """A is random and B zero, so the logits are those of the folder."""
    it = case("llama", tmp_path / "llama", plan_of, Layout())
    (ours,) = launcher.run(initial_logits_of, (it,), 1, timeout=LIMIT)
    theirs = transformers.LlamaForCausalLM.from_pretrained(it.folder, attn_implementation="eager").eval()
    with torch.no_grad():
        torch.testing.assert_close(theirs(**named(it.inputs)).logits, ours, rtol=0, atol=2e-5)


def check(it: Case, ours: Tensor) -> None:
    """PEFT and transformers compute the engine's logits from the converted files, and others without the adapters."""
    m, names = it.model(), reader(open_config(it.folder)[0]).names
    checkpoint = latest(it.folder / "run", fingerprint=it.plan.fingerprint)
    assert checkpoint is not None
    weights = checkpoint_weights(graph(m), checkpoint)
    count = write_adapters(names, m, weights, it.folder / "peft", torch.float32, str(it.folder))
    write_folder(
        describe(it.folder), m.without_adapters, with_merged_adapters(m, weights), it.folder / "hf", torch.float32
    )
    fields = json.loads((it.folder / "peft" / "adapter_config.json").read_text())
    theirs_class = getattr(transformers, json.loads((it.folder / "config.json").read_text())["architectures"][0])
    base = theirs_class.from_pretrained(it.folder, attn_implementation="eager").eval()
    near = 2e-5 * max(1.0, float(ours.std()))
    with torch.no_grad():
        assert float((base(**named(it.inputs)).logits - ours).abs().max()) > 100 * near
        with_all = theirs_class.from_pretrained(it.folder / "hf", attn_implementation="eager").eval()
        assert float((with_all(**named(it.inputs)).logits - ours).abs().max()) < near
        theirs = loaded(base, it.folder / "peft", mixture=it.name == "deepseek-v2").eval()
        assert float((theirs(**named(it.inputs)).logits - ours).abs().max()) < near
    adapters = peft.get_peft_model_state_dict(theirs)
    written = load_file(it.folder / "peft" / "adapter_model.safetensors")
    assert adapters.keys() == written.keys()
    assert len(written) == count
    assert fields["r"] == 4
    assert fields["lora_alpha"] == 6
    assert fields["target_modules"] == list(TARGETS[it.name] or ["query_key_value"])


def loaded(base: Any, folder: Path, *, mixture: bool) -> Any:
    """Return the model with adapters. PEFT 0.19.1 itself cannot load those of mixtures into transformers 5."""
    if not mixture:
        return peft.PeftModel.from_pretrained(base, folder)
    theirs = peft.get_peft_model(base, peft.LoraConfig.from_pretrained(folder))
    tensors = load_file(folder / "adapter_model.safetensors")
    state = {f"{name.removesuffix('.weight')}.default.weight": x for name, x in tensors.items()}
    assert not theirs.load_state_dict(state, strict=False).unexpected_keys
    return theirs


def test_logits_are_those_of_peft_and_of_merged_weights(plan_of: Any, tmp_path: Path) -> None:
    cases = [case(name, tmp_path / name, plan_of, Layout()) for name in TARGETS]
    (found,) = launcher.run(logits_of, (cases,), 1, timeout=LIMIT)
    for it, logits in zip(cases, found, strict=True):
        check(it, logits)


def test_a_layout_writes_the_adapters_of_all_its_ranks(plan_of: Any, tmp_path: Path) -> None:
    it = case("llama", tmp_path / "llama", plan_of, Layout(tp=2, pp=2, sequence_parallel=True, vocab_multiple=1))
    ranks = launcher.run(logits_of, ([it],), 4, timeout=LIMIT)
    check(it, ranks[-1][0])


def test_a_model_without_adapters_has_none_for_peft(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no low-rank adapters.*\nuse --to hf"):
        write_adapters(None, read(built_config(tmp_path)), {}, tmp_path / "out", torch.float32, None)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def built_config(folder: Path) -> Path:
    built("llama").config.save_pretrained(folder)
    return folder
