"""The sums that steps of the user's own return: equal on all ranks that share a micro-batch, else refused.

A step returns (loss_sum, weight_sum), and optionally a report: a dict of more sums and weights by name. All are added
over the micro-batches and data-parallel ranks of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from megaloom.dsl.errors import UserError, safe_repr
from megaloom.dsl.quoting import is_printable
from megaloom.runtime.launch.agreement import agreed, gathered
from megaloom.runtime.megatron.process_groups import ProcessGroups

from .loss_totals import LossTotals
from .results import EvaluationResult

EQUAL = 1e-5  # relative: ranks that compute with equal numbers in another order differ by less
FORM = "return (loss_sum, weight_sum), or (loss_sum, weight_sum, report) with report {name: (sum, weight), …}"


@frozen(eq=False)
class StepSums:
    """The sums that a step has returned for a micro-batch: that of the loss with its gradient, and all without one."""

    loss_sum: Tensor  # no dims
    sums: Tensor  # float64 [1 + names, 2]: loss sum and weight sum, then sum and weight of each name of the report
    names: tuple[str, ...]

    @classmethod
    def of(cls, step: Callable[..., Any], value: Any, device: torch.device) -> StepSums:
        """Return the sums in what a step has returned. Raise UserError if it has another form."""
        if not isinstance(value, tuple | list) or len(value) not in (2, 3):
            raise _malformed(step, "nothing" if value is None else _shown(value))
        loss_sum, weight_sum, *rest = value
        for name, x in (("loss_sum", loss_sum), ("weight_sum", weight_sum)):
            if not _is_number(x):
                raise _malformed(step, f"{_shown(x)} as {name}")
        if not isinstance(loss_sum, Tensor):
            raise _malformed(step, f"{_shown(loss_sum)} as loss_sum, which is no tensor and so has no gradient")
        report = rest[0] if rest else {}
        if not isinstance(report, Mapping):
            raise _malformed(step, f"{_shown(report)} as report")
        pairs = [(loss_sum, weight_sum), *(_pair(step, name, x) for name, x in report.items())]
        numbers = [_on_device(x, device) for pair in pairs for x in pair]
        return cls(loss_sum.reshape(()), torch.stack(numbers).view(-1, 2), tuple(report))


def _pair(step: Callable[..., Any], name: Any, value: Any) -> Sequence[Any]:
    """Return sum and weight of a name of a report. Megatron-LM's loss functions return them as one tensor, [2]."""
    if not isinstance(name, str) or not name.strip() or not is_printable(name):
        raise _malformed(step, f"a report with the name {safe_repr(name)}, which is no line of text")
    pair = list(value.reshape(-1)) if isinstance(value, Tensor) else value
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(map(_is_number, pair)):
        raise UserError(
            f"{step.__qualname__} returned a report with {_shown(value)} as {name!r}\n"
            "give (sum, weight), such as (right, count): the result is the sum of the sums / the sum of the weights of "
            "all micro-batches and ranks"
        )
    return pair


def _on_device(x: Any, device: torch.device) -> Tensor:
    """Return a number as float64 without dims on a device. The host does not wait for the device's work."""
    if isinstance(x, Tensor):
        return x.detach().to(device, torch.float64, non_blocking=True).reshape(())
    return torch.full((), x, dtype=torch.float64, device=device)


def _is_number(x: Any) -> bool:
    return x.numel() == 1 and not x.is_complex() if isinstance(x, Tensor) else isinstance(x, int | float)


def _shown(x: Any) -> str:
    """Return a value in words: tensors by their shape."""
    return f"a tensor of shape {list(x.shape)}" if isinstance(x, Tensor) else safe_repr(x)


def _malformed(step: Callable[..., Any], what: str) -> UserError:
    return UserError(f"{step.__qualname__} returned {what}\n{FORM}")


def check_names(step: Callable[..., Any], names: tuple[str, ...], before: tuple[str, ...]) -> None:
    """Raise UserError unless a step returns the names of a report that it has returned before."""
    if names != before:
        raise UserError(
            f"{step.__qualname__} returned a report of {_listed(names)}, and before one of {_listed(before)}\n"
            "return the same names for each micro-batch, with the weight 0 where there is nothing to count"
        )


def common_names(step: Callable[..., Any], returned: Sequence[StepSums]) -> tuple[str, ...]:
    """Return the names of the report of a step. Raise UserError if ranks have others. Every rank calls it."""
    first, *others = (names for names in gathered(returned[0].names if returned else None) if names is not None)
    for names in others:
        check_names(step, names, first)
    return first


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def check_equal_sums(step: Callable[..., Any], returned: Sequence[StepSums], groups: ProcessGroups) -> None:
    """Raise UserError on all ranks unless the tp and cp ranks of each micro-batch have returned equal sums.

    returned: for each micro-batch that this rank has run. Every rank calls it.
    """
    if groups.layout.tp * groups.layout.cp > 1:
        agreed(lambda: _check(step, returned, groups), names_rank=False)


def _check(step: Callable[..., Any], returned: Sequence[StepSums], groups: ProcessGroups) -> None:
    if not returned:  # a pipeline stage before the last one
        return
    sums = torch.stack([each.sums.flatten() for each in returned])
    sums = sums.nan_to_num(nan=torch.inf)  # what all ranks have is found later, by name
    bounds = torch.cat([sums, -sums])
    for group in (groups.collection.tp, groups.collection.cp):
        dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    most, least = bounds[: len(sums)], -bounds[len(sums) :]
    differ = most - least > EQUAL * torch.minimum(most.abs(), least.abs())
    of_report = (f"{what} of {name!r}" for name in returned[0].names for what in ("the sum", "the weight"))
    for i, name in enumerate(("loss_sum", "weight_sum", *of_report)):
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
