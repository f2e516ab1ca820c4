"""Options of the commands that train or prepare training: train, data, verify, measure.

Each imports its code when it runs: `megaloom --help` must be quick, and only some commands need torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from megaloom.planner.cli.adapter_options import ADAPTERS, NO_ADAPTERS, AdapterOptions
from megaloom.planner.cli.arguments import SEARCH_ALL, TrainedLayout, unwrap_help
from megaloom.planner.cli.settings import SetOption, SettingsOption, model_arguments
from megaloom.planner.contract.workload import Backend
from megaloom.runtime.training.run_options import RunOptions

from .command_groups import DATASET, DatasetOptions
from .option_groups import DEFAULT_OPTIONS, DEFAULT_WORKLOAD, OPTIONS_OF_RUN, PlanOptions, WorkloadOptions
from .packages import require_training_packages


@unwrap_help
def train_by_plan(
    model: str | None = None,
    /,
    *,
    options: Annotated[RunOptions, OPTIONS_OF_RUN] = DEFAULT_OPTIONS,
    words: SetOption = [],  # noqa: B006
    settings: SettingsOption = None,
    workload: Annotated[WorkloadOptions, Parameter(name="*")] = DEFAULT_WORKLOAD,
    adapters: Annotated[AdapterOptions, ADAPTERS] = NO_ADAPTERS,
    fixed: TrainedLayout = SEARCH_ALL,
) -> int:
    """Plan a model for this machine, or take a plan, and train it on text. Repeat the command to continue the run.

    Parameters
    ----------
    model
        The folder of a run, which continues; a plan.json; or a model: file.py:name, a file.py with one model,
        package.module:name, one of the examples, or a Hugging Face config.json. [default: that of --from, else
        stdlib-gpt]
    """
    require_training_packages("train")
    from .commands.train_command import run_train

    return run_train(model, model_arguments(words, settings), PlanOptions(workload, fixed, adapters), options)


@unwrap_help
def make_dataset(
    sources: Annotated[tuple[str, ...], Parameter(name="source", negative="")],
    /,
    *,
    output: Annotated[Path, Parameter(name=["-o", "--output"])],
    options: Annotated[DatasetOptions, Parameter(name="*")] = DATASET,
) -> None:
    """Tokenize text into an indexed dataset, OUTPUT.bin and OUTPUT.idx, that `megaloom train --data OUTPUT` reads.

    After an interruption, repeat the command: it continues where it stopped.

    Parameters
    ----------
    sources
        Text files, JSONL, Parquet, folders of them, folders that the library `datasets` has saved, or "stdlib".
    output
        Prefix of the dataset. Its tokenizer is saved as OUTPUT-tokenizer.
    """
    require_training_packages("data")
    from .commands.data_command import run_data

    run_data(sources, output, options)


@unwrap_help
def verify(plan: Path, /, *, steps: int = 3, seed: int = 1234, backend: Backend = Backend.AUTO) -> int:
    """Run a plan and a single process on identical tokens, and compare losses. Exit code 1 if they differ.

    Parameters
    ----------
    plan
        A plan.json.
    steps
        Optimizer steps.
    seed
        Seed of the initial weights and the tokens.
    backend
        Backend of the plan's layers, as of `megaloom train`. The single process computes by torch.
    """
    require_training_packages("verify")
    from .commands.train_command import run_verify

    return run_verify(plan, steps, seed, backend)


@unwrap_help
def measure(
    *,
    gpus: int | None = None,
    output: Annotated[Path, Parameter(name=["-o", "--output"])] = Path("profile.json"),
) -> None:
    """Measure matrix products, attention, memory and collectives on this machine, and write a device profile.

    `plan MODEL --gpus profile.json` plans with it; 64xprofile.json stands for 64 such devices.

    Parameters
    ----------
    gpus
        Number of devices, which all work at once. [default: all GPUs; on CPU a process for each core]
    output
        The file for the profile.
    """
    require_training_packages("measure")
    from .commands.measure_command import run_measure

    run_measure(gpus, output)


TRAINING_COMMANDS: dict[str, Callable[..., object]] = {
    "train": train_by_plan,
    "data": make_dataset,
    "verify": verify,
    "measure": measure,
}
