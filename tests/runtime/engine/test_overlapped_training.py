"""Training with each overlap computes the result of training without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime import Recipe
from megaloom.runtime.launch import launcher
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT
from tests.support.models.examples import model_named
from tests.support.paths import TEST_MODELS

RECIPE = Recipe(steps=10, lr=1e-2, warmup=0)
SHARES = Layout(dp=2, shard="optimizer")
PIECE = 1000  # elements of what is exchanged at once: a piece or more for each weight, as of a large model
SWITCHES = ((), (Overlap.GRADIENTS,), (Overlap.GRADIENTS, Overlap.WEIGHTS))
CASES = {  # tied weights, chunks that are asked for in turn, experts' own shares, blocks made again, bodies
    "tied": ("tiny_gpt", SHARES),
    "chunks": ("deep_llama", evolve(SHARES, pp=2, vpp=2)),
    "experts": ("tiny_mixtral", evolve(SHARES, ep=2, recompute="full")),
    "bodies": (f"{TEST_MODELS / 'own_layers.py'}:balanced", SHARES),
}


def sample(i: int) -> dict[str, torch.Tensor]:
    return next_token(random_text(i, 127, 32))


def curves(plans: list[Plan]) -> list[tuple[list[float], bool]]:
    """On each rank, one plan after the other: see `curve`."""
    from megatron.core import parallel_state

    results = []
    for plan in plans:
        results.append(curve(plan))
        parallel_state.destroy_model_parallel()
    return results


def curve(plan: Plan) -> tuple[list[float], bool]:
    """Losses of three steps and of an evaluation after each; whether modules wait for their weights."""
    from megaloom.runtime.engine.engine import Engine

    recipe = evolve(RECIPE, ddp_bucket_size=PIECE) if plan.layout.has_overlap(Overlap.GRADIENTS) else RECIPE
    engine = Engine.build(plan, model_named(plan.model), recipe)
    first, *others = [[len(b.buckets) for b in chunk.buffers] for chunk in engine.state.chunks]
    divided = plan.layout.has_overlap(Overlap.GRADIENTS) and engine.groups.pp_rank == 0
    assert (sum(first) > 2) is divided
    assert all(set(each) == {1} for each in (others if divided else [first, *others]))  # nothing waits for these
    losses = []
    for step in range(3):
        losses.append(engine.step(lambda i, step=step: sample(4 * step + i)).loss)
        losses.append(engine.evaluate_samples(sample, 4).loss)
    return losses, all(chunk.use_forward_hook for chunk in engine.state.chunks)


@pytest.mark.parametrize("case", CASES)
def test_training_computes_the_same(case: str, plan_of: Any) -> None:
    name, layout = CASES[case]
    plans = [plan_of(name, evolve(layout, overlaps=on)) for on in SWITCHES]
    results = launcher.run(curves, (plans,), layout.world, timeout=LIMIT)[0]
    assert [waits for _, waits in results] == [False, False, True]
    none, gradients, weights = (losses for losses, _ in results)
    assert gradients == pytest.approx(none, rel=1e-6)  # the norm of gradients adds up their pieces in another order
    assert weights == gradients
    assert len(set(none)) == 6


def address(x: torch.Tensor) -> int:
    """Return where the storage of a tensor begins."""
    return x.untyped_storage().data_ptr()


def wrapped(plan: Plan) -> set[str]:
    """On each rank: use the methods of the chunk's wrapper, and return the names of persistent buffers in its state."""
    from megatron.core.distributed import DistributedDataParallel

    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), RECIPE)
    (chunk,) = engine.state.chunks
    assert type(chunk) is DistributedDataParallel and chunk.module is engine.model_chunks[0]
    assert chunk.config is engine.model_chunks[0].config and chunk.dp_cp_group.size() == plan.layout.dp
    parameters = dict(chunk.module.named_parameters())
    buffers = {address(b.grad_data) for b in (*chunk.buffers, *chunk.expert_parallel_buffers)}
    assert len(buffers) == 2 < len(parameters)
    for p in parameters.values():
        assert (p.dtype, p.main_grad.dtype) == (torch.bfloat16, torch.float32)
        assert address(p.main_grad) in buffers
    check_synchronisation(chunk, next(iter(parameters.values())), engine.groups.dp_rank)
    state = chunk.state_dict()
    assert state.keys() == chunk.state_dict_for_save_checkpoint().keys() > parameters.keys()
    chunk.load_state_dict({n: torch.zeros_like(x) if n in parameters else x for n, x in state.items()}, strict=True)
    assert not any(p.any() for p in parameters.values())
    with pytest.raises(RuntimeError, match="Missing key"):
        chunk.load_state_dict({}, strict=True)
    return {name for name, _ in chunk.module.named_buffers()} & state.keys()


def check_synchronisation(chunk: Any, p: torch.nn.Parameter, rank: int) -> None:
    """Compare gradients and values of a parameter with those of other ranks, before and after they are synchronised."""
    p.main_grad.fill_(rank + 1.0)
    with chunk.no_sync():
        assert not any(group.is_last_microbatch for group in chunk.bucket_groups)
    assert torch.equal(p.main_grad, torch.full_like(p.main_grad, rank + 1.0))
    chunk.start_grad_sync()
    chunk.finish_grad_sync()
    assert len(p.main_grad.unique()) == 1
    assert p.main_grad.view(-1)[0] != rank + 1.0
    chunk.zero_grad_buffer()
    assert not p.main_grad.any()
    with torch.no_grad():
        p.fill_(rank + 1.0)
    chunk.broadcast_params()
    assert torch.equal(p, torch.ones_like(p))


def test_the_wrapper_is_that_of_megatron_core(plan_of: Any) -> None:
    """Its methods do what its documentation says. Persistent buffers are in its state."""
    plan = plan_of(f"{TEST_MODELS / 'own_layers.py'}:buffers", Layout(dp=2), precision="bf16")
    first, second = launcher.run(wrapped, (plan,), 2, timeout=LIMIT)
    assert first == second != set()


def test_buckets_need_an_overlap() -> None:
    recipe = Recipe(ddp_bucket_size=PIECE)
    with pytest.raises(UserError, match="--ddp-bucket-size 1000 has no effect: under this layout"):
        recipe.check_layout(evolve(SHARES, overlaps=()))
    recipe.check_layout(evolve(SHARES, overlaps=(Overlap.GRADIENTS,)))
