"""Options of a run for its observers: the trace of a step, and trackers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.runtime.options.option import option


def _path(path: Path | None) -> Path | None:
    """Return a path, which a file has as text."""
    return None if path is None else Path(path)


@frozen(kw_only=True)
class Monitoring:
    """Trace of a step, and trackers that take the metrics of a run."""

    profile: int | None = option(None, kept=False, repeated=False)
    """Record the times of this step on all ranks in RUN/trace-step-N.json.gz, which `megaloom compare` reads."""
    tensorboard: bool = option(False, noted=False)
    """Write metrics for TensorBoard, into RUN/tensorboard."""
    tensorboard_dir: Path | None = option(None, convert=_path, noted=False)
    """Write metrics for TensorBoard into this folder."""
    wandb: str | None = option(None, noted=False)
    """Project of Weights & Biases that takes the metrics; WANDB_MODE=offline writes them into RUN/wandb."""

    def tensorboard_folder(self, run: Path) -> Path | None:
        """Return the folder for TensorBoard's files, or None."""
        return self.tensorboard_dir or (run / "tensorboard" if self.tensorboard else None)

    def check_packages(self) -> None:
        """Raise UserError if the package of a tracker is not installed."""
        trackers = (("tensorboard", self.tensorboard or self.tensorboard_dir), ("wandb", self.wandb))
        for package, wanted in trackers:
            if wanted and find_spec(package) is None:
                raise UserError(
                    f"--{package} needs the package {package}\ninstall it: pip install 'megaloom[{package}]'"
                )

    def check_steps(self, done: int, steps: int) -> None:
        """Raise UserError unless the step to profile is one that a run from step `done` to `steps` does."""
        if self.profile is None or done < self.profile <= steps:
            return
        fix = f"give a step from {done + 1} to {steps}" if done < steps else f"give more --steps than {steps}"
        raise UserError(f"--profile {self.profile} is not a step of this run, which has done {done} steps\n{fix}")
