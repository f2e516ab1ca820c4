"""Times of one optimizer step on this rank: passes of micro-batches, sends, the end of the step, and graph nodes.

`StepRecorder` measures while `Engine.step` runs. Units have the names of the predicted trace
(`planner.report.chrome_trace`). On GPUs, moments are CUDA events in the stream that computes.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve, field, frozen
from megatron.core.pipeline_parallel import schedules
from torch import Tensor, nn

from megaloom.runtime.engine import engine as engine_module
from megaloom.runtime.engine import pipeline_run
from megaloom.runtime.engine.engine import Engine
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.releases import weight_gather
from megaloom.runtime.megatron.stage_communicator import StageCommunicator
from megaloom.runtime.modules.shared_weights import SharedGradients
from megaloom.runtime.optimizer import weight_update

from .stage_time import StageTime

COMPUTE, SEND, NODE = "compute", "send", "node"
FORWARD, BACKWARD, RECOMPUTE, COUNTING = "forward", "backward", "recompute", "load of experts"
REDUCTION, TIED, NORM, OPTIMIZER, GATHER = (
    "gradient reduction",
    "tied gradients",
    "gradient norm",
    "optimizer",
    "weight gather",
)


@frozen
class Unit:
    """One unit of a step, in seconds since all ranks began it. `kind` is compute, send or node."""

    name: str
    kind: str
    start: float
    end: float
    args: Mapping[str, int | str] = field(factory=dict)

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.end - self.start


@frozen
class _Mark:
    """A unit whose moments are not yet seconds."""

    name: str
    kind: str
    start: Any
    end: Any
    args: Mapping[str, int | str]


class StepRecorder:
    """Records the units of a step on this rank. With `nodes`, each graph node too, which takes hooks on all modules."""

    def __init__(self, engine: Engine, *, nodes: bool) -> None:
        self.engine, self.nodes = engine, nodes
        self.marks: list[_Mark] = []
        self.passes: Counter[tuple[str, int]] = Counter()  # by name and chunk
        self.outputs: dict[int, dict[str, int | str]] = {}  # a pass by the id of its output
        self.current: dict[str, int | str] = {}  # the pass that runs
        self.running = FORWARD  # what a forward pass is for
        self.is_backward = False
        self.begun: dict[str, Any] = {}  # graph nodes whose forward pass runs
        self.boundaries: list[tuple[str, str, Any]] = []  # of nodes, in the backward pass that runs
        self.base: Any = None  # when the step began
        self.last: Any = None
        self.normed: Any = None  # when the gradient norm was known

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the step that runs inside. All ranks begin together."""
        with ExitStack() as stack:
            self._install(stack)
            dist.all_reduce(torch.zeros(1, device=device.current()))
            if device.gpu_count():
                torch.cuda.synchronize()
            self.base = _now()
            yield
            self.last = _now()

    def units(self) -> tuple[Unit, ...]:
        """Return the units of the recorded step, by their start. The unit `step` is all of it."""
        if device.gpu_count():
            torch.cuda.synchronize()
        marks = [_Mark("step", "step", self.base, self.last, {}), *self.marks]
        made = [
            Unit(m.name, m.kind, _seconds(self.base, m.start), _seconds(self.base, m.end), dict(m.args)) for m in marks
        ]
        gathers = [unit.start for unit in made if unit.name == GATHER]
        return tuple(
            evolve(unit, end=min(unit.end, *gathers)) if unit.name == OPTIMIZER and gathers else unit
            for unit in sorted(made, key=lambda u: (u.start, -u.end))
        )

    def _install(self, stack: ExitStack) -> None:
        """Replace the functions that run units by ones that record them, until the stack closes."""
        for owner, name, wrapper in (
            (schedules, "forward_step", self._forward),
            (schedules, "backward_step", self._backward),
            (StageCommunicator, "_communicate", self._communicate),
            (pipeline_run, "finalize_model_grads", partial(self._timed, REDUCTION)),
            (SharedGradients, "sum", partial(self._timed, TIED)),
            (weight_update, "_all_ranks", self._after_norm),
            (engine_module, "update_weights", self._update),
        ):
            original = getattr(owner, name)
            setattr(owner, name, _wrapped(wrapper, original))
            stack.callback(setattr, owner, name, original)
        for chunk in self.engine.state.chunks:
            gather = weight_gather()
            setattr(chunk, gather, partial(self._timed, GATHER, getattr(chunk, gather)))
            stack.callback(delattr, chunk, gather)
        for chunk in self.engine.model_chunks if self.nodes else ():
            for node, module in chunk.node_modules():
                hooks = (
                    module.register_forward_pre_hook(partial(self._begin_node, node.name)),
                    module.register_forward_hook(partial(self._end_node, node.name)),
                )
                for hook in hooks:
                    stack.callback(hook.remove)

    def _timed(self, name: str, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        start = _now()
        result = run(*args, **options)
        self.marks.append(_Mark(name, COMPUTE, start, _now(), {}))
        return result

    def _forward(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run one micro-batch forward through a chunk; `args` are those of megatron-core's `forward_step`."""
        chunk = next(i for i, each in enumerate(self.engine.state.chunks) if each is args[2])
        self.running = FORWARD if torch.is_grad_enabled() else COUNTING
        stage = chunk * self.engine.plan.layout.pp + self.engine.groups.pp_rank
        self.current = {"microbatch": self.passes[self.running, chunk], "chunk": chunk, "stage": stage}
        self.passes[self.running, chunk] += 1
        start = _now()
        result = run(*args, **options)
        self.marks.append(_Mark(self.running, COMPUTE, start, _now(), self.current))
        if self.running == FORWARD:
            self.outputs[id(_tensor(result[0]))] = self.current
        return result

    def _backward(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run one micro-batch backward; the second argument is the output of its forward pass."""
        self.current, self.is_backward, self.boundaries = self.outputs.pop(id(_tensor(args[1]))), True, []
        start = _now()
        result = run(*args, **options)
        end = _now()
        self.is_backward = False
        self.marks.append(_Mark(BACKWARD, COMPUTE, start, end, self.current))
        for (name, what, at), (_, _, until) in pairwise([*self.boundaries, ("", "", end)]):
            self.marks.append(_Mark(name, NODE, at, until, {**self.current, "pass": what}))
        return result

    def _communicate(self, run: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Send and receive between stages. A unit that only receives is named so; its sender's has the data."""
        sends = [
            name
            for name, key in (("send activation", "tensor_send_next"), ("send gradient", "tensor_send_prev"))
            if options[key] is not None
        ]
        receives = "receive activation" if options["recv_prev"] else "receive gradient"
        start = _now()
        result = run(*args, **options)
        self.marks.append(_Mark(sends[0] if sends else receives, SEND, start, _now(), {}))
        return result

    def _after_norm(self, run: Callable[..., Any], *args: Any) -> Any:
        result = run(*args)
        self.normed = _now()
        return result

    def _update(self, run: Callable[..., Any], *args: Any) -> Any:
        """Update the weights: the gradient norm, which waits for all ranks, then the optimizer."""
        start = _now()
        result = run(*args)
        self.marks.append(_Mark(NORM, COMPUTE, start, self.normed, {}))
        self.marks.append(_Mark(OPTIMIZER, COMPUTE, self.normed, _now(), {}))
        return result

    def _begin_node(self, name: str, module: nn.Module, args: Any) -> None:
        if self.is_backward:
            self.boundaries.append((name, RECOMPUTE, _now()))
        else:
            self.begun[name] = _now()

    def _end_node(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if not self.is_backward:
            self.marks.append(_Mark(name, NODE, self.begun.pop(name), _now(), {**self.current, "pass": self.running}))
        if isinstance(output, Tensor) and output.requires_grad:
            output.register_hook(lambda _: self.boundaries.append((name, BACKWARD, _now())))


def gathered_units(recorder: StepRecorder) -> list[tuple[int, tuple[Unit, ...]]]:
    """Return (pipeline rank, units) of each rank, on all ranks. Every rank calls it."""
    own = recorder.engine.groups.pp_rank, recorder.units()
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def stage_times(ranks: Sequence[tuple[int, tuple[Unit, ...]]]) -> tuple[StageTime, ...]:
    """Return the times of each stage, in order, from the units of all ranks."""
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for _, units in ranks:
        for unit in units:
            if unit.kind == COMPUTE and unit.name in (FORWARD, BACKWARD):
                seconds[int(unit.args["stage"]), unit.name].append(unit.seconds)
    stages = sorted({stage for stage, _ in seconds})
    return tuple(StageTime(s, fmean(seconds[s, FORWARD]), fmean(seconds[s, BACKWARD])) for s in stages)


def _wrapped(wrapper: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, which also serves as a method, that runs the original through the wrapper."""

    def run(*args: Any, **options: Any) -> Any:
        return wrapper(original, *args, **options)

    return run


def _tensor(output: Any) -> Any:
    return output[0] if isinstance(output, list) else output


def _now() -> Any:
    """Return this moment: a CUDA event in the current stream, or seconds."""
    if not device.gpu_count():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds(base: Any, moment: Any) -> float:
    return moment - base if isinstance(base, float) else base.elapsed_time(moment) / 1e3
