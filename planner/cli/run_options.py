"""Options of `plan --from`: the file of a run, what is not in it, and the files to write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from attrs import frozen
from cyclopts import Parameter

if TYPE_CHECKING:
    from megaloom.planner.runs.read import RunInputs

GROUP = "Second opinion on a run that exists"


@Parameter(name="*", group=GROUP)
@frozen(kw_only=True)
class RunOptions:
    """The file of a run and what a user adds to it."""

    path: Annotated[str | None, Parameter(name="--from")] = None
    """File of a run: a log of Megatron-LM, the script or settings file that starts it, or a plan. It is never run."""
    env: Annotated[tuple[str, ...], Parameter(name="--env", negative="", show_default=False)] = ()
    """Variable of the script, NAME=VALUE; repeat it for more. Arguments of the script stand after --."""
    vocab: int | None = None
    """Tokens of the vocabulary before padding, where the file names a tokenizer that is not known."""
    version_of: str | None = None
    """Release of Megatron-LM whose defaults hold, such as 0.12.0. [default: 0.16.1, or the first with all flags]"""
    ignore_flag: Annotated[tuple[str, ...], Parameter(name="--ignore-flag", negative="", show_default=False)] = ()
    """Flag of the file that is read as if it were not there; repeat it for more."""
    command: str | None = None
    """Number of the training command that is read, or name of a Python function, where the file has several."""
    measured: str | None = None
    """Measured time of a step, such as 12.3s or 850ms."""
    patch: str | None = None
    """File for a patch of the run's file, with the changes that matter."""

    def check_none(self) -> None:
        """Raise UserError if an option is given that belongs to --from."""
        from megaloom.dsl.errors import UserError

        names = {"env": "--env", "vocab": "--vocab", "version_of": "--version-of", "ignore_flag": "--ignore-flag"}
        names |= {"command": "--command"}
        for name, flag in {**names, "measured": "--measured", "patch": "--patch"}.items():
            if getattr(self, name):
                raise UserError(f"{flag} has no effect without --from\ngive the file of a run: --from run.sh")

    def given(self, positional: tuple[str, ...], gpus: str | None, flags: Sequence[str]) -> RunInputs:
        """Return what the user gives with the file. Raise UserError for a variable without a value.

        flags: flags of the program that replace those of the file, as NAME=VALUE, or NAME for a switch.
        """
        from megaloom.dsl.errors import UserError
        from megaloom.planner.runs.megatron.read import Hints
        from megaloom.planner.runs.read import RunInputs
        from megaloom.planner.runs.words import Origin, Word

        pairs = [text.partition("=") for text in self.env]
        for name, equals, _ in pairs:
            if not equals or not name.isidentifier():
                raise UserError(f"--env must be NAME=VALUE, got {name!r:.40}")
        count = "" if gpus is None else gpus.strip().lower().partition("x")[0].strip()
        return RunInputs(
            environment={name: value for name, _, value in pairs},
            positional=positional,
            devices=int(count) if count.isdigit() else None,
            flags=tuple(Word("--" + flag.lstrip("-"), Origin("--set", n)) for n, flag in enumerate(flags, 1)),
            command=self.command,
            hints=Hints(vocab=self.vocab, version=self.version_of, ignored=self.ignore_flag),
        )

    def seconds(self) -> float | None:
        """Return the measured time of a step in seconds, if it is given."""
        from megaloom.dsl.errors import UserError

        if self.measured is None:
            return None
        text = self.measured.strip().lower()
        number, size = (text[:-2], 1e-3) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
        try:
            seconds = float(number) * size
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < 1e6:
            raise UserError(f"--measured must be a time such as 12.3s or 850ms, got {self.measured!r:.40}")
        return seconds


NO_RUN = RunOptions()
