"""The programs that a plan can be exported to, and the error for what a program cannot express."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import NoReturn

from attrs import frozen

TRAIN_INSTEAD = "`megaloom train` runs the plan as it is"


class Target(StrEnum):
    """A program that a plan can be exported to, as `megaloom export --to` names it."""

    MEGATRON_LM = "megatron-lm"
    MEGATRON_BRIDGE = "megatron-bridge"
    ACCELERATE = "accelerate"
    TORCHTITAN = "torchtitan"
    TORCHTITAN_0_3 = "torchtitan-0-3"
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    SKYPILOT = "skypilot"

    @property
    def program(self) -> str:
        """The program's own name, as messages and file headers write it."""
        return _TITLES[self]


LAUNCH_FILES = frozenset({Target.SLURM, Target.KUBERNETES, Target.SKYPILOT})
"""Files that start `megaloom train` with the plan itself."""

TORCHTITANS = frozenset({Target.TORCHTITAN, Target.TORCHTITAN_0_3})
"""Releases of torchtitan: TOML up to 0.2.2, a Python configuration in 0.3."""

ON_MEGATRON_CORE = frozenset({Target.MEGATRON_LM, Target.MEGATRON_BRIDGE, Target.ACCELERATE})
"""Programs that run a plan on Megatron-core with Transformer Engine: those of `plan --runtime megatron`."""

_TITLES = {
    Target.MEGATRON_LM: "Megatron-LM",
    Target.MEGATRON_BRIDGE: "Megatron-Bridge",
    Target.ACCELERATE: "Accelerate",
    Target.TORCHTITAN: "torchtitan",
    Target.TORCHTITAN_0_3: "torchtitan 0.3",
    Target.SLURM: "Slurm",
    Target.KUBERNETES: "Kubernetes",
    Target.SKYPILOT: "SkyPilot",
}


@frozen
class Inexpressible:
    """A part of a plan that a program cannot express, and the line that says what to do instead."""

    what: str
    instead: str = TRAIN_INSTEAD


def refuse(target: Target, what: str, instead: str = TRAIN_INSTEAD) -> NoReturn:
    """Raise UserError: `target` cannot express `what`; the second line is `instead`."""
    from megaloom.dsl.errors import UserError

    raise UserError(f"{target.program} cannot express {what}\n{instead}")


def refuse_all(target: Target, found: Iterable[Inexpressible]) -> None:
    """Raise UserError that names all parts of a plan that `target` cannot express, each with what to do instead."""
    from megaloom.dsl.errors import UserError

    parts = list(found)
    if len(parts) > 1:
        lines = [f"- {part.what}\n  {part.instead}" for part in parts]
        raise UserError("\n".join((f"{target.program} cannot express", *lines)))
    for part in parts:
        refuse(target, part.what, part.instead)
