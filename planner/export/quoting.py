"""Names inside of exported files: in a comment, as a job's name, and in a command that Kubernetes starts.

Words of shell commands are quoted by `dsl.quoting.shell_word`. All other values in an export are numbers, keys of ours,
or written by `json`.
"""

from __future__ import annotations

import json

from megaloom.dsl.quoting import printable, shell_word
from megaloom.planner.contract.plans import Plan

LONGEST_JOB_NAME = 64


def comment(text: str) -> str:
    """Return a line of a comment in a shell script, YAML or TOML."""
    return f"# {printable(text)}\n"


def title(plan: Plan, name: str) -> str:
    """Return the comment that says what a file is for: model, cluster and layout."""
    return comment(f"{name} on {plan.cluster}: {plan.layout}")


def job_name(name: str) -> str:
    """Return a name for a job and its log file, of letters, digits, dots, dashes and underscores.

    Slurm reads an #SBATCH line as words with quotes of its own, and `%` in the name of a file as a pattern.
    """
    letters = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)
    return letters[:LONGEST_JOB_NAME].strip("-.") or "megaloom"


def pod_command(script: str) -> str:
    """Return a shell script as a JSON string for the `command` of a pod.

    Kubernetes replaces `$(NAME)` in it, and writes `$$(` as `$(`.
    """
    return json.dumps(script.replace("$(", "$$("))


__all__ = ["comment", "job_name", "pod_command", "shell_word", "title"]
