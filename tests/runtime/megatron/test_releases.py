"""Each difference between releases of megatron-core is needed: without it, the installed release fails or warns."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.launch import launcher
from megaloom.runtime.megatron import device
from tests.support.batches import next_token, random_text
from tests.support.limits import LIMIT

device.prepare()

from megatron.core.tensor_parallel import random  # noqa: E402

from megaloom.runtime.megatron import build_context, releases  # noqa: E402
from megaloom.runtime.modules import layers, permutation  # noqa: E402
from tests.support.models.examples import model_named  # noqa: E402

RECOMPUTED = Layout(recompute=Recompute.SELECTIVE, recompute_modules=("layernorm",))
OLD = releases.INSTALLED < (0, 17)
OTHER = (0, 19) if OLD else (0, 16)


def of_other_release(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of `releases` as it is under a release on the other side of its differences."""

    def run(*args: Any, **options: Any) -> Any:
        installed, releases.INSTALLED = releases.INSTALLED, OTHER
        try:
            return function(*args, **options)
        finally:
            releases.INSTALLED = installed

    return run


def without_the_gates_name(patch: pytest.MonkeyPatch) -> None:
    """Leave the module that gates experts as megatron-core has written it."""
    if OLD:
        patch.delattr("megatron.core.transformer.moe.moe_utils.te_general_gemm")


def with_megatron_cores_extension(patch: pytest.MonkeyPatch) -> None:
    """Let megatron-core build its extension that shares the memory of recomputed outputs, without a compiler."""
    if not OLD:
        patch.setattr(random, "_share_storage_ext", None)
        patch.setattr(random, "load_inline", no_compiler)


def no_compiler(**_: Any) -> None:
    raise RuntimeError("Ninja is required to load C++ extensions")


BYPASSES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "results_of_permute": (
        lambda patch: patch.setattr(permutation, "results_of_permute", of_other_release(releases.results_of_permute)),
        "ValueError: too many values to unpack" if OLD else "ValueError: not enough values to unpack",
    ),
    "no_cuda_graphs": (
        lambda patch: patch.setattr(build_context, "no_cuda_graphs", of_other_release(releases.no_cuda_graphs)),
        "TypeError: TransformerConfig.__init__() got an unexpected keyword argument 'cuda_graph_modules'"
        if OLD
        else "DeprecationWarning: cuda_graph_scope is deprecated"
        if releases.INSTALLED >= (0, 18)
        else "no error",  # 0.17 has the field of 0.16
    ),
    "define_missing_names": (
        without_the_gates_name,
        "NameError: name 'te_general_gemm' is not defined" if OLD else "no error",
    ),
    "avoid_compiler": (
        with_megatron_cores_extension,
        "no error" if OLD else "RuntimeError: Ninja is required to load C++ extensions",
    ),
    # Not in `releases`: identities are given to all releases, because one of them needs them.
    "identities as norms of queries and keys": (
        lambda patch: patch.setattr(layers, "IdentityOp", None),
        "ValueError: qk_layernorm requires Transformer Engine" if releases.INSTALLED >= (0, 18) else "no error",
    ),
}


def test_each_difference_is_bypassed_here() -> None:
    functions = (f for f in vars(releases).values() if inspect.isfunction(f) and f.__module__ == releases.__name__)
    assert {f.__name__ for f in functions if not f.__name__.startswith("_")} == {
        *(name for name in BYPASSES if name.isidentifier()),
        "weight_gather",
    }


def gathers(plan: Plan) -> dict[str, bool]:
    """On the only rank: whether the optimizer's step gathers weights by each of the two methods."""
    from megaloom.runtime import Recipe
    from megaloom.runtime.engine.engine import Engine

    engine = Engine.build(plan, model_named(plan.model), Recipe(steps=1))
    (chunk,) = engine.state.chunks
    called = {"start_param_sync": False, "_start_bucket_group_param_sync": False}
    for name in called:
        if original := getattr(chunk, name, None):

            def count(*args: Any, name: str = name, original: Any = original, **options: Any) -> Any:
                called[name] = True
                return original(*args, **options)

            setattr(chunk, name, count)
    engine.step(lambda i: next_token(random_text(i, 127, 32)))
    return called


def test_weights_are_gathered_by_one_of_two_methods(plan_of: Any) -> None:
    plan = plan_of("tiny_llama4", Layout(shard="optimizer"))
    called = launcher.run(gathers, (plan,), 1, timeout=LIMIT)[0]
    assert [name for name, is_called in called.items() if is_called] == [releases.weight_gather()]


def outcomes(plan: Plan) -> dict[str, str]:
    """On the only rank: the error or warning of one step without each difference."""
    return {name: outcome(plan, bypass) for name, (bypass, _) in BYPASSES.items()} | {
        "none": outcome(plan, lambda patch: None)
    }


def outcome(plan: Plan, bypass: Callable[[pytest.MonkeyPatch], None]) -> str:
    """Return the error or the warning of one step with a bypass."""
    from megaloom.runtime import Recipe
    from megaloom.runtime.engine.engine import Engine

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.filterwarnings("error", "cuda_graph_scope|full scope")
        bypass(patch)
        try:
            engine = Engine.build(plan, model_named(plan.model), Recipe(steps=1))
            engine.step(lambda i: next_token(random_text(i, 127, 32)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.fixture(scope="module")
def found(plan_of: Any) -> dict[str, str]:
    return launcher.run(outcomes, (plan_of("tiny_llama4", RECOMPUTED),), 1, timeout=LIMIT)[0]


@pytest.mark.parametrize("name", BYPASSES)
def test_it_is_needed(name: str, found: dict[str, str]) -> None:
    assert found[name].startswith(BYPASSES[name][1])


def test_with_all_of_them_a_step_runs(found: dict[str, str]) -> None:
    assert found["none"] == "no error"
