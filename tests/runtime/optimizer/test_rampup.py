"""A growing batch has megatron-core's sizes, and wrong options are refused."""

import pytest

from megaloom.dsl.errors import UserError
from megaloom.runtime import Recipe
from megaloom.runtime.megatron import device

device.prepare()

from megatron.core import num_microbatches_calculator as calculators  # noqa: E402

REMOVED = "megatron-core 0.18 has removed this growth of the batch"


@pytest.mark.skipif(not hasattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator"), reason=REMOVED)
@pytest.mark.parametrize(("first", "increment", "samples", "batch"), [(2, 2, 100, 16), (4, 12, 37, 64), (1, 31, 9, 32)])
def test_batches_grow_as_megatron_cores(first: int, increment: int, samples: int, batch: int) -> None:
    theirs = calculators.RampupBatchsizeNumMicroBatchesCalculator(batch, 1, 1, False, 0, first, increment, samples)
    recipe = Recipe(rampup_batch=first, rampup_increment=increment, rampup_samples=samples)
    sizes = []
    for consumed in range(samples + batch):
        theirs.update(consumed, consistency_check=True)
        sizes.append(recipe.batch_at(consumed, batch))
        assert sizes[-1] == theirs.get_current_global_batch_size()
    assert (sizes[0], sizes[-1]) == (first, batch)


def test_without_options_the_batch_is_whole() -> None:
    assert Recipe().batch_at(0, 32) == 32


@pytest.mark.parametrize(("first", "increment"), [(64, None), (20, None), (8, 7)])
def test_a_batch_that_does_not_grow_to_its_size_is_refused(first: int, increment: int | None) -> None:
    recipe = Recipe(rampup_batch=first, rampup_increment=increment, rampup_samples=10)
    with pytest.raises(UserError, match=rf"--rampup-batch {first} does not grow to a batch of 32 in steps of .*\ngive"):
        recipe.batch_at(0, 32)


def test_both_options_are_needed() -> None:
    with pytest.raises(UserError, match=r"--rampup-batch and --rampup-samples belong together\ngive both, or neither"):
        Recipe(rampup_batch=4)
