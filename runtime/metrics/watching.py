"""Options of a run for its observers: the trace of a step, and trackers."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from megaloom.dsl.errors import UserError


@frozen(kw_only=True)
class Watching:
    """The options --profile, --tensorboard and --wandb."""

    profile: int | None = None  # the step whose trace is written
    tensorboard: Path | None = None  # folder of its event files
    wandb: str | None = None  # project

    def check_steps(self, done: int, steps: int) -> None:
        """Raise UserError unless the step to profile is one that a run from step `done` to `steps` does."""
        if self.profile is not None and not done < self.profile <= steps:
            raise UserError(
                f"--profile {self.profile} is not a step of this run\ngive a step from {done + 1} to {steps}"
            )
