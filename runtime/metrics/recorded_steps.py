"""Steps of a run whose times are recorded: an early one for the summary, those that compare ranks, the profiled one."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from attrs import define, field

from megaloom.runtime.engine.engine import Engine

from .slow_ranks import FIRST_STEP, SlowRanks
from .stage_time import StageTime
from .step_times import StepRecorder, gathered_units, stage_times
from .trace_file import trace_path, write_trace


@define
class RecordedSteps:
    """The times of recorded steps. All ranks take the same decisions, by step counts."""

    engine: Engine
    folder: Path  # takes the trace
    last_step: int  # of the run
    profile: int | None  # the step whose trace is written
    start_step: int = field(init=False)
    slow_ranks: SlowRanks = field(init=False)
    stage_times: tuple[StageTime, ...] = field(default=(), init=False)
    trace: Path | None = field(default=None, init=False)

    @start_step.default
    def _start_step(self) -> int:
        return self.engine.done

    @slow_ranks.default
    def _slow_ranks(self) -> SlowRanks:
        return SlowRanks(self.engine.groups.pp_rank)

    def recorder(self) -> StepRecorder | None:
        """Return a recorder for the next step, or None if that step is not recorded."""
        step, profiled = self.engine.done + 1, self.engine.done + 1 == self.profile
        early = step == min(self.start_step + FIRST_STEP, self.last_step)
        recorded = profiled or early or self.slow_ranks.compares(step - self.start_step)
        return StepRecorder(self.engine, nodes=profiled) if recorded else None

    def take(self, recorder: StepRecorder) -> list[str]:
        """Keep the times of the step that was recorded; return lines that name slow ranks and the trace, if written."""
        lines, step = [], self.engine.done
        if self.slow_ranks.compares(step - self.start_step) and (line := self.slow_ranks.take(recorder.units())):
            lines.append(line)
        if self.stage_times and step != self.profile:
            return lines
        ranks = gathered_units(recorder)
        self.stage_times = self.stage_times or stage_times(ranks)
        if step == self.profile:
            self.trace = trace_path(self.folder, step)
            if dist.get_rank() == 0:
                write_trace(self.folder, self.engine.plan, step, ranks)
            lines.append(f"step {step}  trace {self.trace}")
        return lines
