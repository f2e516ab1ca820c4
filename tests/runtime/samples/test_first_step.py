"""The first step from a Hugging Face folder: loss and gradients of transformers, from the labels alone.

Transformers makes decoder inputs, token types, shifted labels and balancing losses itself, as its defaults are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megaloom.dsl import Model, graph
from megaloom.dsl.catalog import find
from megaloom.dsl.hf.architectures import open_config, reader
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe, shard
from megaloom.runtime.data.token_ids import TokenIds
from megaloom.runtime.samples.samples import SampleMaker
from megaloom.runtime.weights.hugging_face_weights import open_folder
from tests.support.first_step import check_first_step
from tests.support.models.examples import model_named
from tests.support.models.hugging_face import built
from tests.support.parity.hf_oracle import WITHOUT_DROPOUT, gradients_of
from tests.support.parity.layouts import Results, under_layouts
from tests.support.parity.oracle import stacked

SEED, BATCH, SEQ = 7, 4, 24
IDS = TokenIds(40, eos=7, name="of 40 ids")  # of the 61 of the models: others are for sentinels and the mask
PADDING, START = 1, 2
RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
CHANGES: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "bert": WITHOUT_DROPOUT["bert"],
    "bart": WITHOUT_DROPOUT["bart"] | {"decoder_start_token_id": START, "pad_token_id": PADDING},
    "t5": WITHOUT_DROPOUT["t5"] | {"decoder_start_token_id": 0, "pad_token_id": 0},
    "nemotron-h": {},
}
OTHERWISE: dict[str, dict[str, Any]] = {  # fields that change the loss, so that equal losses say something of them
    "mixtral": {"output_router_logits": True},  # adds a balancing loss
    "bart": {"decoder_start_token_id": 0},
    "nemotron-h": {"time_step_min": 1e-9},  # clamps no step
}


def batch_of(model: Model) -> dict[str, Tensor]:
    """Return samples of made-up text for a model, as a run makes them.

    The text has no padding, so torch's `padding_idx`, for which an embedding gets no gradient, makes no difference:
    a decoder reads padding only after its target, where nothing counts.
    """
    maker = SampleMaker.of(graph(model), SEQ, IDS)

    def sample(i: int) -> dict[str, Tensor]:
        text = 10 + torch.randint(30, (maker.length,), generator=torch.Generator().manual_seed(i))
        return maker.make(text, i, SEED)

    return stacked(sample, range(BATCH))


def first_step(plan: Plan) -> tuple[float, dict[str, Tensor]]:
    """Return the loss of the first step from a folder, and its gradients."""
    model = model_named(plan.model)
    engine = shard(model, plan, RECIPE, weights=open_folder(Path(plan.model).parent).of(model))
    batch = batch_of(model)
    gradients = engine.gradients(batch)
    assert gradients is not None
    return engine.step(batch).loss, {n: g.value for n, g in gradients.items()}


def theirs(folder: Path, dtype: torch.dtype, **changes: Any) -> tuple[float, dict[str, Tensor]]:
    """Return the loss that transformers computes of the same text and positions, and its gradients."""
    transformers = pytest.importorskip("transformers")
    config, name = open_config(str(folder))
    read = reader(config)
    model = read(config, name)
    experts = {"experts_implementation": "eager"} if config.fields["model_type"] == "mixtral" else {}
    it = getattr(transformers, config.fields["architectures"][0]).from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", **experts, **changes
    )
    batch = batch_of(model)
    labels = batch["labels"]
    counted = labels.masked_fill(~batch["mask"], -100) if "mask" in batch else labels
    if "source_tokens" in batch:
        inputs, counted = batch["source_tokens"], counted
    elif "types" in batch:
        inputs = batch["tokens"]
    else:  # it shifts the labels of a decoder itself
        inputs = torch.cat([batch["tokens"], labels[:, -1:]], 1)
        counted = inputs
    loss = it.eval()(input_ids=inputs, labels=counted).loss
    loss.backward()
    return loss.item(), gradients_of(it, read.names, model)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    """Write small models with random weights."""
    out = {name: tmp_path_factory.mktemp("folders") / name for name in CHANGES}
    for name, folder in out.items():
        torch.manual_seed(0)
        built(name, **CHANGES[name]).save_pretrained(folder)
    return out


@pytest.fixture(scope="module")
def results(folders: dict[str, Path], plan_of: Any) -> Results:
    plans = {
        name: plan_of(str(folder), Layout(micro_batch=2), batch=BATCH, seq=SEQ) for name, folder in folders.items()
    }
    return under_layouts(first_step, plans)


@pytest.mark.parametrize("name", CHANGES)
def test_the_first_step_from_a_folder_is_that_of_transformers(
    name: str, folders: dict[str, Path], results: Results
) -> None:
    ((loss, gradients),) = results[name]
    check_first_step((loss, gradients), theirs(folders[name], torch.float64), theirs(folders[name], torch.float32))
    if name in OTHERWISE:
        assert abs(theirs(folders[name], torch.float32, **OTHERWISE[name])[0] - loss) > 1e-4 * loss


def test_the_target_of_t5_ends_with_a_sentinel_and_the_end(folders: dict[str, Path]) -> None:
    batch = batch_of(find(str(folders["t5"]))[0])
    targets = [labels[mask].tolist() for labels, mask in zip(batch["labels"], batch["mask"], strict=True)]
    assert all(target[-1] == IDS.eos and target[-2] >= IDS.vocab for target in targets)
