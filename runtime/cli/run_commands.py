"""Options of the commands that use a run or a model: evaluate, generate, convert, report, show, pack, unpack.

Each imports its code when it runs: `megaloom --help` must be quick, and only some commands need torch.
"""

from __future__ import annotations

from collections.abc import Callable
from os.path import realpath
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.outputs import check_output_file, check_output_folder
from megaloom.planner.cli.arguments import NOTHING_SHARDED, ShownLayout, fixed_fields, unwrap_help
from megaloom.planner.cli.settings import SetOption, SettingsOption, model_arguments
from megaloom.planner.contract.layout import flag_of
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.generation.settings import GenerationSettings

from .command_groups import EVALUATE, GENERATE, SHOW, EvaluateOptions, GenerateOptions, ShowOptions
from .defaults import DEFAULT_GENERATION, TrainedPrecision
from .packages import require_training_packages


@unwrap_help
def evaluate_last_checkpoint(
    run: Path, /, *, options: Annotated[EvaluateOptions, Parameter(name="*")] = EVALUATE
) -> None:
    """Print the loss and perplexity of the last checkpoint of a run on each source of data.

    Parameters
    ----------
    run
        The folder that `megaloom train` wrote, or a file of `megaloom pack`.
    """
    require_training_packages("evaluate")
    from .commands.evaluate_command import run_evaluate

    run_evaluate(run, options)


@unwrap_help
def generate_text(
    run: Path,
    /,
    *,
    options: Annotated[GenerateOptions, Parameter(name="*")] = GENERATE,
    settings: Annotated[GenerationSettings, Parameter(name="*", group="Generation")] = DEFAULT_GENERATION,
) -> None:
    """Write text with a trained model. Without --prompt and --prompt-file, the prompt is standard input.

    Parameters
    ----------
    run
        The folder that `megaloom train` wrote, a file of `megaloom pack`, or a Hugging Face folder.
    """
    require_training_packages("generate")
    from .commands.generate_command import run_generate

    run_generate(run, options, settings)


@unwrap_help
def convert(
    run: Path,
    /,
    *,
    to: Literal["hf", "peft", "megatron"],
    output: Annotated[Path, Parameter(name=["-o", "--output"])],
    config: Path | None = None,
    precision: TrainedPrecision | None = None,
    max_shard_size: str | None = None,
    averaged: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Write the weights of a run for other programs: as a Hugging Face folder, for Megatron-LM, or its adapters.

    Parameters
    ----------
    run
        The folder of a run, or a file of `megaloom pack`, whose last checkpoint is converted; a checkpoint of
        Megatron-LM, with --config; or a Hugging Face folder, with --to megatron.
    to
        The form: hf, a Hugging Face folder with config.json, safetensors and tokenizer, adapters merged; megatron, a
        torch_dist checkpoint of Megatron-LM's GPTModel with its arguments; or peft, the adapters alone, as PEFT loads
        them.
    output
        The folder to write. It must not exist.
    config
        The config.json that describes the model, or a folder with one. [default: that from which the run started]
    precision
        Precision of the tensors. [default: that of the run]
    max_shard_size
        Largest size of a file of tensors, unless one tensor is larger: 500MB, 2GiB. [default: 5GB]
    averaged
        Write the averaged weights that a training loop of your own has kept.
    """
    require_training_packages("convert")
    from .commands.convert_command import run_convert

    check_output_folder(output, "-o")
    chosen = None if precision is None else Precision(precision)
    run_convert(run, to, output, config, chosen, max_shard_size, averaged=averaged)


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
    check_output_file(output, "-o")
    write_file(run_page(run), str(path))
    print(f"wrote {path}")


@unwrap_help
def show(
    model: str,
    /,
    *,
    words: SetOption = [],  # noqa: B006
    settings: SettingsOption = None,
    options: Annotated[ShowOptions, Parameter(name="*")] = SHOW,
    layout: ShownLayout = NOTHING_SHARDED,
) -> None:
    """Print a model as a tree, repeats folded, with the shape, parameters, FLOPs and saved activations of each layer.

    Parameters
    ----------
    model
        file.py:name, a file.py with one model, package.module:name, one of the examples (llama3-8b), or a Hugging Face
        config.json.
    """
    axes = fixed_fields(layout)
    if axes and not options.placements:
        raise UserError(f"{', '.join(map(flag_of, axes))}: only --placements reads it\nadd --placements, or omit it")
    if options.tensors:
        require_training_packages("show --tensors")
        from .commands.tensors_command import run_tensors

        given = {"--set": words, "--settings": settings, "--seq": options.seq, "--source": options.source}
        given |= {"--svg": options.svg, "--html": options.html, "--placements": options.placements}
        if flag := next((name for name, value in given.items() if value), None):
            raise UserError(f"{flag} has no effect with --tensors, which lists a checkpoint\nomit one of the two")
        run_tensors(Path(model))
        return
    from .commands.show_command import run_placements, run_show

    if options.placements:
        if not axes:
            raise UserError("--placements needs the axes that shard the model\nadd --tp 2, for example")
        unread = (("--svg", options.svg), ("--html", options.html), ("--seq", options.seq))
        if flag := next((name for name, value in unread if value), None):
            raise UserError(f"{flag} has no effect with --placements, which do not depend on it\nomit one of the two")
        run_placements(model, model_arguments(words, settings), axes)
        return
    check_output_file(options.svg, "--svg")
    check_output_file(options.html, "--html")
    run_show(model, model_arguments(words, settings), options)


@unwrap_help
def pack_run(run: Path, /, *, output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None) -> None:
    """Write a run into one file: model, plan, options and newest checkpoint.

    Parameters
    ----------
    run
        The folder of a run.
    output
        The file. It must not exist. [default: RUN.megaloom]
    """
    require_training_packages("pack")
    from megaloom.runtime.training.artefact import pack

    check_output_file(output, "-o")
    path = pack(run, output or Path(f"{realpath(run)}.megaloom"), print)
    print(f"wrote {path}. Next: megaloom unpack {path}")


@unwrap_help
def unpack_run(artefact: Path, /, *, output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None) -> None:
    """Unpack a file that `megaloom pack` wrote into a new run folder.

    Parameters
    ----------
    artefact
        The file.
    output
        The folder, new or empty. [default: runs/NAME]
    """
    require_training_packages("unpack")
    from megaloom.runtime.training.artefact import unpack

    check_output_folder(output, "-o")
    folder = unpack(artefact, output or Path("runs") / artefact.stem)
    print(f"wrote {folder}. Next: megaloom train {folder}")


RUN_COMMANDS: dict[str, Callable[..., object]] = {
    "evaluate": evaluate_last_checkpoint,
    "generate": generate_text,
    "convert": convert,
    "report": report,
    "show": show,
    "pack": pack_run,
    "unpack": unpack_run,
}
