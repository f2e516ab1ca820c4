"""The command `megaloom calibrate`, which fits a few factors of a cluster to logs of runs. It never loads torch."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from attrs import asdict, frozen
from cyclopts import Parameter


@Parameter(name="*")
@frozen(kw_only=True)
class LogOptions:
    """Facts that the files of runs do not state."""

    env: Annotated[tuple[str, ...], Parameter(name="--env", negative="", show_default=False)] = ()
    """Variable of the scripts that started the runs, NAME=VALUE; repeat it for more."""
    vocab: int | None = None
    """Tokens of the vocabulary before padding, where the files name a tokenizer that is not known."""
    version_of: str | None = None
    """Release of Megatron-LM whose defaults hold, such as 0.12.0. [default: 0.16.1]"""
    ignore_flag: Annotated[tuple[str, ...], Parameter(name="--ignore-flag", negative="", show_default=False)] = ()
    """Flag of the files that is read as if it were not there; repeat it for more."""
    command: int | None = None
    """Number of the training command in files that have several, counted from 1."""


NOTHING_ADDED = LogOptions()


def calibrate(
    *logs: str,
    gpus: str,
    output: Annotated[Path, Parameter(name=["-o", "--output"])],
    options: LogOptions = NOTHING_ADDED,
) -> None:
    """Fit a few factors of a cluster to logs of runs on it, and write a cluster file with leave-one-out errors.

    The factors multiply the times of matrix products, of the fabric within and between nodes, and of launches by the
    host, as far as the runs separate them. The errors of runs that were left out are the interval of plans there.

    Parameters
    ----------
    logs
        At least two logs of Megatron-LM, which state their runs; or RUN=LOG, the file that started a run and its log,
        which may be of Megatron-Bridge, NeMo or torchtitan too. RUN is read as by `plan --from`, and never run.
    gpus
        Kind of GPU of all runs, such as H100, or a cluster file. A number, as in 64xH100, is for files that state none.
    output
        The cluster file to write, such as ours.toml.
    """
    from megaloom.dsl.errors import UserError
    from megaloom.dsl.files.outputs import check_output_file
    from megaloom.planner.calibrate.calibrated import calibrated
    from megaloom.planner.calibrate.cluster_toml import calibrated_toml
    from megaloom.planner.calibrate.logs import node_size, read_logs
    from megaloom.planner.calibrate.report import report_text
    from megaloom.planner.hardware.cluster_names import cluster

    from .run_options import RunOptions
    from .second_opinion import cluster_of

    if output.suffix != ".toml":
        raise UserError(f"-o must be a file that ends in .toml, got {str(output)!r}")
    check_output_file(output, "-o")
    count, times, kind = gpus.strip().partition("x")
    kind = kind if times and count.strip().isdigit() else gpus
    added = RunOptions(**asdict(options))
    logged = read_logs(logs, added.given((), gpus, ()), lambda run: cluster_of(run, kind))
    found = calibrated([one.observed for one in logged])
    command = shlex.join(["megaloom", "calibrate", *logs, "--gpus", gpus, "-o", str(output)])
    text = calibrated_toml(found, cluster(kind), command, node_size(logged))
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}\ngive a path in a folder that exists") from None
    most = max(one.observed.cluster.count for one in logged)
    planned = shlex.quote(f"{most}x{output}")
    print(f"{report_text(found, logged)}\nwrote {output}. Next: plan MODEL --gpus {planned} --runtime megatron")
