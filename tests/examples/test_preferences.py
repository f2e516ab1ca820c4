"""DPO, distillation and the reward model of examples/scripts: transformers' numbers on one process and on two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attrs import frozen
from torch import Tensor

from megaloom.dsl import Model, graph
from megaloom.dsl.hf.state_dict import to_checkpoint
from megaloom.examples.llama3 import ATTENTION, NORMS, SWIGLU, decoder
from megaloom.examples.scripts import distil, dpo, reward
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.modules.initial_weights import initial_weight
from tests.support.parity.layouts import Results, under_layouts
from tests.support.paths import ROOT

SCRIPTS = ROOT / "examples" / "scripts"
LAYOUTS = {
    "one process": Layout(micro_batch=2),
    "TP2": Layout(tp=2, sequence_parallel=True, micro_batch=2),
    "PP2": Layout(pp=2, micro_batch=2),
    "CP2": Layout(cp=2, micro_batch=2),
}
STEPS = 3
NAMES = decoder(NORMS | ATTENTION | SWIGLU)
Step = tuple[Tensor, dict[str, Tensor]]  # the loss of a step, and its report


@frozen
class Plans:
    """The plans of all three scripts under a layout, and the folder of the teacher."""

    policy: Plan
    student: Plan
    teacher: Plan
    reward: Plan
    folder: Path

    @property
    def layout(self) -> Layout:
        return self.policy.layout


def learned(plans: Plans) -> dict[str, list[Any]]:
    """On each rank: the results of the steps of each script."""
    return {
        "dpo": dpo.learn(plans.policy, steps=STEPS),
        "distil": distil.learn(plans.student, plans.teacher, plans.folder, STEPS),
        "reward": reward.learn(plans.reward, steps=STEPS),
    }


def initial(model: Model) -> dict[str, Tensor]:
    return {name: initial_weight(slot, Recipe().seed).read() for name, slot in graph(model).weights.items()}


def theirs(model: Model, kind: str = "LlamaForCausalLM", **state: Tensor) -> Any:
    """Return the Llama of transformers with the initial weights of a model. state: tensors instead of the head's."""
    import transformers

    sizes = {name: [d.known for d in slot.dims] for name, slot in graph(model).weights.items()}
    config = transformers.LlamaConfig(
        vocab_size=sizes["wte"][0],
        hidden_size=sizes["wte"][1],
        intermediate_size=sizes["swiglu.0.gate"][1],
        num_hidden_layers=sum(name.endswith(".q") for name in sizes),
        num_attention_heads=sizes["attention.0.q"][1],
        num_key_value_heads=sizes["attention.0.k"][1],
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        num_labels=1,
    )
    it = getattr(transformers, kind)._from_config(config, attn_implementation="eager")
    tensors = to_checkpoint(NAMES, model, initial(model), torch.cat)
    if state:
        del tensors["lm_head.weight"]
    it.load_state_dict(tensors | state)
    return it


def trained(it: Any, loss_of: Callable[[int], Step], lr: float) -> list[dict[str, float]]:
    """Return loss, gradient norm and report of each step of AdamW, with the default recipe of Megaloom."""
    recipe = Recipe()
    flat = [p for name, p in it.named_parameters() if p.ndim == 1 or name == "score.weight"]
    groups = [
        {"params": [p for p in it.parameters() if all(p is not other for other in flat)]},
        {"params": flat, "weight_decay": 0.0},
    ]
    betas = (recipe.beta1, recipe.beta2)
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=recipe.eps, weight_decay=recipe.weight_decay)
    out = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, report = loss_of(step)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(it.parameters(), recipe.clip_grad)
        optimizer.step()
        values = {"loss": loss, "norm": norm, **report}
        out.append({name: float(x.detach()) for name, x in values.items()})
    return out


def dpo_by_transformers() -> list[dict[str, float]]:
    it, reference = (theirs(dpo.policy()).double() for _ in range(2))  # it has sums of large terms

    def of_answers(model: Any, batch: dict[str, Tensor]) -> Tensor:
        log_probs = model(input_ids=batch["tokens"]).logits.log_softmax(-1)
        return (log_probs.gather(-1, batch["labels"][..., None])[..., 0] * batch["answer"]).sum(1)

    def loss_of(step: int) -> Step:
        batch = dpo.batch_of(step)
        with torch.no_grad():
            known = of_answers(reference, batch)
        chosen, rejected = (dpo.BETA * (of_answers(it, batch) - known)).view(-1, 2).T
        return -F.logsigmoid(chosen - rejected).mean(), {"chosen": chosen.mean(), "rejected": rejected.mean()}

    return trained(it, loss_of, lr=1e-3)


def distil_by_transformers(folder: Path) -> list[dict[str, float]]:
    from transformers import LlamaForCausalLM

    it, teacher = theirs(distil.student()), LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager")

    def loss_of(step: int) -> Step:
        batch = distil.batch_of(step)
        log_probs = it(input_ids=batch["tokens"]).logits.log_softmax(-1)
        with torch.no_grad():
            known = teacher(input_ids=batch["tokens"]).logits.log_softmax(-1)
        kept = known >= known.topk(distil.TOP).values[..., -1:]
        divergence = torch.where(kept, known.exp() * (known - log_probs), 0).sum(-1).mean()
        entropy = F.nll_loss(log_probs.flatten(0, 1), batch["labels"].flatten())
        report = {"divergence": divergence, "cross-entropy": entropy}
        return distil.SHARE * divergence + (1 - distil.SHARE) * entropy, report

    return trained(it, loss_of, lr=1e-2)


def reward_by_transformers() -> list[dict[str, float]]:
    head = {"score.weight": initial(reward.reward())["score.0.score"][None]}
    it = theirs(dpo.policy(), "LlamaForSequenceClassification", **head)

    def score(answer: bytes) -> Tensor:
        return it(input_ids=torch.tensor([list(answer)])).logits[0, 0]

    def loss_of(step: int) -> Step:
        both = [(score(prompt + chosen), score(prompt + rejected)) for prompt, chosen, rejected in dpo.pairs(step)]
        chosen, rejected = (torch.stack(each) for each in zip(*both, strict=True))
        return -F.logsigmoid(chosen - rejected).mean(), {"right": (chosen > rejected).double().mean()}

    return trained(it, loss_of, lr=1e-3)


def plan_at(plan_of: Any, script: Any, name: str, layout: Layout) -> Plan:
    work = script.WORK
    found: Plan = plan_of(
        f"{SCRIPTS / script.__name__.rpartition('.')[2]}.py:{name}", layout, batch=work.batch, seq=work.seq
    )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of the teacher, with larger weights than initial ones."""
    path = tmp_path_factory.mktemp("teacher")
    it = theirs(distil.teacher())
    with torch.no_grad():
        for p in it.parameters():
            p.mul_(3.0)
    it.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def results(plan_of: Any, folder: Path) -> Results:
    def plans(layout: Layout) -> Any:
        models = ((dpo, "policy"), (distil, "student"), (distil, "frozen_teacher"), (reward, "reward"))
        return Plans(*(plan_at(plan_of, script, name, layout) for script, name in models), folder)

    return under_layouts(learned, {name: plans(layout) for name, layout in LAYOUTS.items()})


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[dict[str, float]]]:
    return {
        "dpo": dpo_by_transformers(),
        "distil": distil_by_transformers(folder),
        "reward": reward_by_transformers(),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("script", ["dpo", "distil", "reward"])
def test_each_step_has_the_numbers_of_transformers(script: str, layout: str, results: Results, expected: Any) -> None:
    for rank in results[layout]:
        for ours, wanted in zip(rank[script], expected[script], strict=True):
            found = {"loss": ours.loss, "norm": ours.grad_norm, **ours.report}
            assert found == pytest.approx(wanted, rel=1e-5, abs=2e-6)
