"""Legality of a layout according to the installed megatron-core itself.

`refusal(case)` runs the first step of one rank with megatron-core's own code on torch's fake process group:
parallel_state, the micro-batch calculator, TransformerConfig with its pipeline layout, attention, MLP and experts, DDP
buffers, the split of the batch over cp, and the schedule with all its micro-batches and chunks. The first exception is
the refusal. Only the first micro-batch passes layers (see `megatron_model`). `validate` repeats the checks of
Megatron-LM's argument parser.
"""

from __future__ import annotations

import ast
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen

from megaloom.planner.contract.choices import Overlap
from megaloom.planner.contract.workload import Precision
from tests.support.legality.megatron_model import chunk
from tests.support.legality.random_cases import Case


@frozen
class Refusal:
    """An exception of megatron-core or of a check of its callers: where it is raised, and its message."""

    where: str  # layers.py:1166
    message: str


def refusal(case: Case) -> Refusal | None:
    """Return the refusal of a case by megatron-core, or None if it is legal."""
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=case.rank % case.world, world_size=case.world)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _start(case)
    except LegalError:
        pass
    except OtherError as error:
        return Refusal("parallel_state.py:743", str(error))
    except (AssertionError, ValueError, RuntimeError, IndexError) as error:
        return Refusal(_where(error), str(error).partition("\n")[0])
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    return None


class LegalError(Exception):
    """Ends the run after the last statement that could refuse the layout."""


class OtherError(Exception):
    """The process groups of megatron-core have other sizes than the layout."""


def _where(error: BaseException) -> str:
    """Return the innermost line in megatron-core outside its divisibility helpers, or CALLERS if there is none."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/megatron/core/" in frame.filename and frame.name not in ("divide", "ensure_divisibility")
    ]
    return _statement(frames[-1].filename, frames[-1].lineno or 0) if frames else CALLERS


def _statement(file: str, line: int) -> str:
    """Return file:line of the first line of the statement at this line."""
    first = max(start for start, end in _statements(file) if start <= line <= end)
    return f"{Path(file).name}:{first}"


@cache
def _statements(file: str) -> tuple[tuple[int, int], ...]:
    """Return (first line, last line) of each statement of a file."""
    nodes = (node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.stmt))
    return tuple((node.lineno, node.end_lineno or node.lineno) for node in nodes)


CALLERS = "Megatron-LM's validate_args"
CALLS = 24  # schedules with up to this many forward steps run to their end


def _start(case: Case) -> None:
    """Run one rank to the end of its first step or, if the step has many micro-batches, to the first one."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    x, d, work = case.layout, case.decoder, case.workload
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=x.tp,
        pipeline_model_parallel_size=x.pp,
        virtual_pipeline_model_parallel_size=x.vpp if x.vpp > 1 else None,
        context_parallel_size=x.cp,
        expert_model_parallel_size=x.ep,
        expert_tensor_parallel_size=x.etp,
        create_gloo_process_groups=False,
    )
    dp, edp = parallel_state.get_data_parallel_world_size(), parallel_state.get_expert_data_parallel_world_size()
    if (dp, edp) != (x.dp, x.edp):
        raise OtherError(f"the groups have dp {dp} and edp {edp}")
    validate(case)
    model_parallel_cuda_manual_seed(0)
    calculator = ConstantNumMicroBatchesCalculator(work.batch, x.micro_batch, dp, False, rank=1)
    built = chunk(d, x, work.precision)
    get_forward_backward_func(x.pp, x.vpp if x.vpp > 1 else None)(
        forward_step_func=_step(case, built),
        data_iterator=[iter(())] * x.vpp,
        model=[built] * x.vpp,
        num_microbatches=calculator.get(),
        seq_length=work.seq,
        micro_batch_size=x.micro_batch,
    )


def validate(case: Case) -> None:
    """Raise AssertionError where Megatron-LM's arguments.py does; megatron-core itself does not check these."""
    positions, fp16 = case.decoder.positions, case.workload.precision is Precision.FP16
    assert case.layout.ep == 1 or not fp16, "Expert parallelism is not supported with fp16 training."
    x = case.layout
    if x.has_overlap(Overlap.WEIGHTS):
        assert x.distributed_optimizer, "--overlap-param-gather only supported with distributed optimizer"
        assert x.has_overlap(Overlap.GRADIENTS), "Must use --overlap-param-gather with --overlap-grad-reduce"
    assert x.sequence_parallel or not x.has_overlap(Overlap.TENSOR), "overlap can happen only with sequence parallelism"
    assert not positions or positions >= case.workload.seq, "max_position_embeddings must be at least seq_length"


def _step(case: Case, built: Any) -> Callable[..., Any]:
    """Return a forward step. The first micro-batch passes the layers; the others have the shape of its output."""
    anchor, shapes = torch.zeros((), requires_grad=True), list[torch.Size]()

    def step(*_: Any) -> Any:
        if not shapes:
            shapes.append(_first(case, built.module.layers))
            if calls(case) > CALLS:
                raise LegalError
        received = built.module.received
        h = torch.zeros(shapes[0]) if received is None else received
        assert h.shape == shapes[0], f"{[*h.shape]} is sent between stages, but layers return {[*shapes[0]]}"
        return h + anchor, lambda out: (out.sum(), {})

    return step


def calls(case: Case) -> int:
    """Return the number of forward steps of a rank."""
    x = case.layout
    return x.vpp * x.microbatches(case.workload.batch)


def _first(case: Case, layers: Any) -> torch.Size:
    """Run the first micro-batch through one layer of each kind; return the shape of its hidden states."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = parallel_state.get_context_parallel_group()
    later = {"is_hybrid_cp": False} if "is_hybrid_cp" in signature(get_batch_on_this_cp_rank).parameters else {}
    tokens = torch.zeros(case.layout.micro_batch, case.workload.seq, dtype=torch.int64)
    mine = get_batch_on_this_cp_rank({"tokens": tokens}, cp_group=group, **later)["tokens"]
    h = layers["embedding"](mine, torch.zeros_like(mine))
    if "mix" in layers:
        h = layers["mix"](h, None)[0]
    if "dense" in layers:
        h = layers["dense"](h)[0]
    if "experts" in layers:
        layers["experts"].router.forward = _routed  # fake ranks send no tokens
        with suppress(LegalError):
            layers["experts"](h)
    return h.shape


def _routed(*_: Any, **__: Any) -> Any:
    raise LegalError
