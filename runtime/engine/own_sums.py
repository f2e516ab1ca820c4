"""The sums that steps of the user's own return: equal on all ranks that share a micro-batch, else refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megaloom.dsl.errors import UserError
from megaloom.runtime.launch.agreement import agreed
from megaloom.runtime.megatron.process_groups import ProcessGroups

from .loss_totals import LossTotals
from .results import EvaluationResult

EQUAL = 1e-5  # relative: ranks that compute with equal numbers in another order differ by less


def check_equal_sums(step: Callable[..., Any], returned: Sequence[Tensor], groups: ProcessGroups) -> None:
    """Raise UserError on all ranks unless the tp and cp ranks of each micro-batch have returned equal sums.

    returned: (loss_sum, weight_sum) of each micro-batch that this rank has run, float64 [2]. Every rank calls it.
    """
    if groups.layout.tp * groups.layout.cp > 1:
        agreed(lambda: _check(step, returned, groups), names_rank=False)


def _check(step: Callable[..., Any], returned: Sequence[Tensor], groups: ProcessGroups) -> None:
    if not returned:  # a pipeline stage before the last one
        return
    sums = torch.stack(list(returned)).nan_to_num(nan=torch.inf)  # what all ranks have is found later, by name
    bounds = torch.cat([sums, -sums])
    for group in (groups.collection.tp, groups.collection.cp):
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    most, least = bounds[: len(sums)], -bounds[len(sums) :]
    differ = most - least > EQUAL * torch.minimum(most.abs(), least.abs())
    for i, name in enumerate(("loss_sum", "weight_sum")):
        if bool(differ[:, i].any()):
            k = int(differ[:, i].int().argmax())
            raise UserError(
                f"{step.__qualname__} returned different sums on the tensor- and context-parallel ranks of one "
                f"micro-batch: {name} from {float(least[k, i]):.6g} to {float(most[k, i]):.6g}\n"
                "return sums over whole sequences and the whole vocabulary: take values by outputs.gathered(NAME) or "
                "token_log_probs(outputs, labels)"
            )


def check_counted(totals: LossTotals, step: Callable[..., Any]) -> None:
    """Raise UserError if the weights of a step add up to 0, so that its loss is no number."""
    if not float(totals.sums[1]):
        raise UserError(
            f"nothing was trained on: the weight_sum of all calls of {step.__qualname__} is 0\n"
            "a step gets one micro-batch at a time: for a loss of pairs, plan with an even --micro-batch"
        )


def evaluated(totals: LossTotals, step: Callable[..., Any]) -> EvaluationResult:
    """Return the result of an evaluation. Raise UserError if nothing was evaluated, which has no mean."""
    if not float(totals.sums[1]):
        raise UserError(
            f"nothing was evaluated: the weight_sum of all calls of {step.__qualname__} is 0\n"
            "give at least one batch; an evaluation runs micro-batches of one sequence: for a loss of pairs, call "
            "evaluate(…, micro_batch=2), or write a validation_step"
        )
    return totals.evaluation
