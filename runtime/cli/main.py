"""The `megaloom` command: train, generate, convert, verify, plan, show, measure, validate, explain, export.

The options of each command are declared here. Its code is in a file of its own, which is imported when the command
runs: `megaloom --help` must be quick, and only some commands need torch.

Exit codes: 0; 1 for a failed verification or a failed rank; 2 for errors that the user can correct; 130 and 143 when
stopped by SIGINT and SIGTERM. Errors go to stderr, once and without a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, ArgumentCollection, CycloptsError, Parameter
from cyclopts.argument import update_argument_collection

from megaloom.dsl.errors import UserError, full_message
from megaloom.planner.cli.adapter_options import ADAPTERS, NO_ADAPTERS, AdapterOptions
from megaloom.planner.cli.arguments import SEARCH_ALL, TrainedLayout, reject_fractions, unwrap_help, usage_error
from megaloom.planner.cli.compare import compare
from megaloom.planner.cli.explain import explain
from megaloom.planner.cli.export import export
from megaloom.planner.cli.main import app as planning
from megaloom.planner.cli.process import run_and_flush
from megaloom.planner.cli.settings import SetOption, SettingsOption, model_arguments, options_of_settings
from megaloom.planner.cli.validate import validate
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.generation.settings import GenerationSettings
from megaloom.runtime.metrics.watching import Watching
from megaloom.runtime.optimizer.recipe import Recipe

from .defaults import (
    DEFAULT_GENERATION,
    DEFAULT_MODEL,
    DEFAULT_RECIPE,
    NO_WATCHING,
    STANDARD_LIBRARY,
    TrainedPrecision,
)
from .printing import fail


def options_of_run(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give `megaloom train RUN` the options with which the run was started, where the command line gives none."""
    first = next((argument.tokens for argument in arguments if argument.index == 0), [])
    if commands != ("train",) or not first or not Path(first[0].value, "run.json").is_file():
        return
    from megaloom.runtime.training.run_folder import load_options

    folder = Path(first[0].value)
    config = {name.replace("_", "-"): value for name, value in load_options(folder).items()}
    update_argument_collection(config, str(folder / "run.json"), arguments, (), root_keys=(), allow_unknown=True)


app = App(
    name="megaloom",
    help="Declare a model, plan how to lay it over devices, train it that way.",
    version_flags=[],
    help_format="plaintext",
    suppress_keyboard_interrupt=False,  # `main` prints it
    config=[options_of_settings, options_of_run, reject_fractions],
)
app["--help"].group = "Parameters"
app.command(planning, name="plan")
for command in (validate, explain, export, compare):
    app.command(unwrap_help(command))

TRAINING_PACKAGES = ("torch", "megatron.core", "psutil")  # of the extra `train` in pyproject.toml


@app.command(name="train")
@unwrap_help
def train_by_plan(
    model: str | None = None,
    /,
    *,
    data: Annotated[list[str], Parameter(consume_multiple=True)] = [STANDARD_LIBRARY],  # noqa: B006
    split: str | None = None,
    epochs: float | None = None,
    weights: Annotated[Path | None, Parameter(name="--from")] = None,
    words: SetOption = [],  # noqa: B006
    settings: SettingsOption = None,
    seq: int | None = None,
    batch: int | None = None,
    precision: TrainedPrecision | None = None,
    devices: int | None = None,
    out: Path | None = None,
    save_every: int = 100,
    evaluate_every: int = 100,
    keep_last: int = 2,
    keep_best: int = 0,
    async_save: bool | None = None,
    distributed_timeout_minutes: float = 10.0,
    watching: Annotated[Watching, Parameter(name="*", group="Watching")] = NO_WATCHING,
    recipe: Annotated[Recipe, Parameter(name="*", group="Recipe")] = DEFAULT_RECIPE,
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
    data
        "stdlib" (the text of Python's standard library), a file or a folder of text, or prefixes of indexed datasets:
        A B, or with weights 0.3 A 0.7 B.
    split
        Shares of training, validation and test of indexed datasets. [default: 969,30,1]
    epochs
        Train for so many visits of the training text, instead of --steps.
    weights
        A Hugging Face folder with the initial weights: config.json and safetensors. [default: random weights]
    seq
        Tokens per sequence. [default: 128]
    batch
        Sequences per step, over all devices. [default: 32]
    precision
        Precision of activations and matrix products. [default: bf16 on GPUs, fp32 on CPU]
    devices
        Number of devices. [default: all GPUs; 4 processes on CPU]
    out
        Folder for checkpoints and metrics. [default: the run's, or runs/MODEL]
    save_every
        Steps between checkpoints.
    evaluate_every
        Steps between evaluations on held-out text.
    keep_last
        Newest checkpoints that are kept.
    keep_best
        Checkpoints with the least validation loss that are kept as well. Each is evaluated when it is saved, and its
        folder is named after the loss.
    async_save
        Train on while a checkpoint is written, from a copy in host memory. [default: on GPUs]
    distributed_timeout_minutes
        Minutes that ranks wait for one another before the run ends with an error.
    """
    require_training_packages("train")
    from .train_command import run_train

    load = {"seq": seq, "batch": batch, "precision": precision, "devices": devices}
    options = {"data": tuple(data), "split": split, "epochs": epochs, "out": out, "weights": weights}
    options |= {"save_every": save_every, "evaluate_every": evaluate_every}
    options |= {"keep_last": keep_last, "keep_best": keep_best, "async_save": async_save}
    options["distributed_timeout_minutes"] = distributed_timeout_minutes
    arguments = model_arguments(words, settings)
    model = model or (DEFAULT_MODEL if weights is None else str(weights))
    return run_train(model, arguments, load, {**options, "watching": watching}, recipe, fixed, adapters)


@app.command(name="pack")
@unwrap_help
def pack_run(run: Path, /, *, output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None) -> None:
    """Write a run into one file: model, plan, options and newest checkpoint.

    Parameters
    ----------
    run
        The folder of a run.
    output
        The file. [default: RUN.megaloom]
    """
    require_training_packages("pack")
    from megaloom.runtime.training.artefact import pack

    path = pack(run, output or run.with_name(f"{run.resolve().name}.megaloom"))
    print(f"wrote {path}. Next: megaloom unpack {path}")


@app.command(name="unpack")
@unwrap_help
def unpack_run(artefact: Path, /, *, output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None) -> None:
    """Write the run in a file that `megaloom pack` wrote into a new folder.

    Parameters
    ----------
    artefact
        The file.
    output
        The folder. [default: runs/NAME]
    """
    require_training_packages("unpack")
    from megaloom.runtime.training.artefact import unpack

    folder = unpack(artefact, output or Path("runs") / artefact.stem)
    print(f"wrote {folder}. Next: megaloom train {folder}")


@app.command(name="data")
@unwrap_help
def make_dataset(
    sources: Annotated[tuple[str, ...], Parameter(name="source", negative="")],
    /,
    *,
    output: Annotated[Path, Parameter(name=["-o", "--output"])],
    tokenizer: str | None = None,
    train_vocab: int | None = None,
    key: str = "text",
    workers: int | None = None,
    append_eos: bool = False,
) -> None:
    """Tokenize text into an indexed dataset, OUTPUT.bin and OUTPUT.idx, that `megaloom train --data OUTPUT` reads.

    A command that was stopped goes on where it was when it is repeated.

    Parameters
    ----------
    sources
        Text files, JSONL, Parquet, folders of them, folders that the library `datasets` has saved, or "stdlib".
    output
        Prefix of the dataset. Its tokenizer is saved as OUTPUT-tokenizer.
    tokenizer
        A tokenizer.json, a SentencePiece *.model, a Hugging Face folder, or "bytes".
    train_vocab
        Train a BPE tokenizer of so many tokens on the sources.
    key
        Key of the text, or of the messages of a conversation, in JSONL, Parquet and datasets.
    workers
        Processes. [default: the number of cores]
    append_eos
        End each document with the tokenizer's end-of-text token.
    """
    require_training_packages("data")
    from .data_command import run_data

    run_data(sources, output, tokenizer, train_vocab, key, workers, append_eos)


@app.command(name="evaluate")
@unwrap_help
def evaluate_last_checkpoint(
    run: Path,
    /,
    *,
    data: Annotated[list[str], Parameter(consume_multiple=True)],
    part: Literal["all", "training", "validation", "test"] = "all",
    split: str | None = None,
) -> None:
    """Print the loss and perplexity of the last checkpoint of a run on each source of data.

    Parameters
    ----------
    run
        The folder that `megaloom train` wrote.
    data
        Files or folders of text, "stdlib", or prefixes of indexed datasets.
    part
        The part of the data.
    split
        Shares of training, validation and test of indexed datasets. [default: 969,30,1]
    """
    require_training_packages("evaluate")
    from .evaluate_command import run_evaluate

    run_evaluate(run, data, part, split)


@app.command(name="generate")
@unwrap_help
def generate_text(
    run: Path,
    /,
    *,
    prompt: Annotated[list[str], Parameter(negative="", show_default=False)] = [],  # noqa: B006
    prompt_file: Path | None = None,
    chat: Annotated[bool, Parameter(negative="")] = False,
    tp: int | None = None,
    pp: int | None = None,
    batch_size: int = 16,
    precision: TrainedPrecision | None = None,
    tokenizer: str | None = None,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    settings: Annotated[GenerationSettings, Parameter(name="*", group="Generation")] = DEFAULT_GENERATION,
) -> None:
    """Write text with a trained model. Without --prompt and --prompt-file, the prompt is standard input.

    Parameters
    ----------
    run
        The folder that `megaloom train` wrote, or a Hugging Face folder.
    prompt
        What the text begins with, or what an encoder reads. Repeat it for several prompts.
    prompt_file
        A file with one more prompt.
    chat
        A prompt is what the user says, in the chat template of the tokenizer.
    tp
        Tensor-parallel ranks. [default: as few devices as the model fits on]
    pp
        Pipeline ranks. [default: as few devices as the model fits on]
    batch_size
        Prompts that are written together.
    precision
        Precision of weights and activations. [default: that of the run]
    tokenizer
        A tokenizer.json, a SentencePiece *.model, a Hugging Face folder, or "bytes". [default: that of the run]
    as_json
        Print a JSON object for each sequence: prompt, text, tokens, reason, score.
    """
    require_training_packages("generate")
    from .generate_command import run_generate

    chosen = None if precision is None else Precision(precision)
    files = (list(prompt), prompt_file)
    run_generate(run, *files, settings, (tp, pp), chosen, tokenizer, batch_size, chat=chat, as_json=as_json)


@app.command
@unwrap_help
def verify(plan: Path, /, *, steps: int = 3, seed: int = 1234) -> int:
    """Run a plan and a single process on identical tokens, and compare losses. Exit code 1 if they differ.

    Parameters
    ----------
    plan
        A plan.json.
    steps
        Optimizer steps.
    seed
        Seed of the initial weights and the tokens.
    """
    require_training_packages("verify")
    from .train_command import run_verify

    return run_verify(plan, steps, seed)


@app.command
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
        Number of devices, which all work at once. [default: all GPUs; 4 processes on CPU]
    output
        The file for the profile.
    """
    require_training_packages("measure")
    from .measure_command import run_measure

    run_measure(gpus, output)


@app.command
@unwrap_help
def show(
    model: str,
    /,
    *,
    words: SetOption = [],  # noqa: B006
    settings: SettingsOption = None,
    seq: int | None = None,
    batch: int = 1,
    source: int | None = None,
    precision: Precision = Precision.BF16,
    svg: Path | None = None,
    html: Path | None = None,
) -> None:
    """Print a model as a tree, repeats folded, with the shape, parameters, FLOPs and saved activations of each layer.

    Parameters
    ----------
    model
        file.py:name, a file.py with one model, package.module:name, one of the examples (llama3-8b), or a Hugging Face
        config.json.
    seq
        Tokens per sequence. [default: 4096, or the model's learned positions if fewer]
    batch
        Sequences.
    source
        Tokens per sequence of an encoder. [default: --seq]
    precision
        Precision of activations.
    svg
        A file for a drawing of the model.
    html
        A file for a page with the drawing and the table.
    """
    from .show_command import run_show

    run_show(model, model_arguments(words, settings), seq, batch, source, precision, svg, html)


@app.command
@unwrap_help
def report(run: Path, /, *, output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None) -> None:
    """Draw the curves of a run as a web page: loss, learning rate, gradient norm, speed, memory, skipped steps.

    Parameters
    ----------
    run
        The folder of a run.
    output
        The file. [default: RUN/report.html]
    """
    require_training_packages("report")
    from megaloom.planner.report.chrome_trace import write_file

    from .run_page import run_page

    path = output or run / "report.html"
    write_file(run_page(run), str(path))
    print(f"wrote {path}")


@app.command
@unwrap_help
def convert(
    run: Path,
    /,
    *,
    to: Literal["hf", "peft"],
    output: Annotated[Path, Parameter(name=["-o", "--output"])],
    config: Path | None = None,
    precision: TrainedPrecision | None = None,
) -> None:
    """Write the weights of a run as a Hugging Face folder: config.json, safetensors, tokenizer; or its adapters.

    Parameters
    ----------
    run
        The folder of a run, whose last checkpoint is converted; or a checkpoint of Megatron-LM, with --config.
    to
        The form: hf, a Hugging Face folder, with adapters merged; or peft, the adapters alone, as PEFT loads them.
    output
        The folder to write. It must not exist.
    config
        The config.json that describes the model, or a folder with one. [default: that from which the run started]
    precision
        Precision of the tensors. [default: that of the run]
    """
    require_training_packages("convert")
    from .convert_command import run_convert

    run_convert(run, to, output, config, None if precision is None else Precision(precision))


def require_training_packages(command_name: str) -> None:
    """Raise UserError if torch or megatron-core is not installed."""
    missing = [name for name in TRAINING_PACKAGES if not _is_installed(name)]
    if missing:
        raise UserError(
            f"`megaloom {command_name}` needs packages that are not installed: {', '.join(missing)}\n"
            "install them with: pip install 'megaloom[train]'"
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of the parent package
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    try:
        return run_and_flush(lambda: app(argv, exit_on_error=False, print_error=False, result_action="return_value"))
    except CycloptsError as error:
        chain = " ".join(("megaloom", *(error.command_chain or ())))
        listed = "options" if error.command_chain else "commands"
        return fail(f"{usage_error(error)}\n`{chain} --help` lists the {listed}")
    except UserError as error:
        return fail(full_message(error))
    except KeyboardInterrupt:
        return fail("interrupted", 130)
    except RuntimeError as error:
        if type(error).__name__ != "RankError":  # by name: its module imports torch
            raise
        return fail(str(error), 1)


if __name__ == "__main__":
    sys.exit(main())
