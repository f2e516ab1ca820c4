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

from .defaults import (
    DEFAULT_GENERATION,
    TrainedPrecision,
)
from .packages import require_training_packages


@unwrap_help
def evaluate_last_checkpoint(
    run: Path,
    /,
    *,
    data: Annotated[list[str], Parameter(consume_multiple=True, negative="", show_default=False)] = [],  # noqa: B006
    part: Literal["all", "training", "validation", "test"] | None = None,
    split: str | None = None,
    batches: int | None = None,
    micro_batch: int | None = None,
    averaged: Annotated[bool, Parameter(negative="")] = False,
    steps_from: str | None = None,
) -> None:
    """Print the loss and perplexity of the last checkpoint of a run on each source of data.

    Parameters
    ----------
    run
        The folder that `megaloom train` wrote, or a file of `megaloom pack`.
    data
        Files or folders of text, "stdlib", "synthetic", or prefixes of indexed datasets. [default: those of the run]
    part
        The part of the data. [default: validation of the run's own data, all of others]
    split
        Shares of training, validation and test of indexed datasets. [default: those of the run]
    batches
        Global batches to read of each source, spread over all of it. [default: all]
    micro_batch
        Sequences per micro-batch. [default: that of the run]
    averaged
        Use the averaged weights that a training loop of your own has kept.
    steps_from
        A class with steps of your own, file.py:Class: its test_step reads the test part, its validation_step others.
        "none" is the loss of the model. [default: that of the run]
    """
    require_training_packages("evaluate")
    from .commands.evaluate_command import run_evaluate

    run_evaluate(run, data, part, split, batches, micro_batch, averaged=averaged, steps=steps_from)


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
    tokenizer_type: str | None = None,
    add_bos: Annotated[bool, Parameter(negative="")] = False,
    averaged: Annotated[bool, Parameter(negative="")] = False,
    as_json: Annotated[bool, Parameter(name="--json", negative="")] = False,
    settings: Annotated[GenerationSettings, Parameter(name="*", group="Generation")] = DEFAULT_GENERATION,
) -> None:
    """Write text with a trained model. Without --prompt and --prompt-file, the prompt is standard input.

    Parameters
    ----------
    run
        The folder that `megaloom train` wrote, a file of `megaloom pack`, or a Hugging Face folder.
    prompt
        What the text begins with, or what an encoder reads. Repeat it for several prompts.
    prompt_file
        A file with one more prompt.
    chat
        Put each prompt into the tokenizer's chat template, as the message of a user.
    tp
        Tensor-parallel ranks. [default: as few devices as the model fits on]
    pp
        Pipeline ranks. [default: as few devices as the model fits on]
    batch_size
        Prompts that are written together.
    precision
        Precision of weights and activations. [default: that of the run]
    tokenizer
        A tokenizer as in `megaloom data`: a folder, a file, a name on the Hugging Face hub, or "bytes". [default: that
        of the run]
    tokenizer_type
        How a bare vocab.txt or vocab.json is used: BertWordPieceLowerCase, BertWordPieceCase, GPT2BPETokenizer, or a
        tokenizer class of transformers.
    add_bos
        Begin each prompt with the tokenizer's beginning-of-text token, unless it has it already.
    averaged
        Use the averaged weights that a training loop of your own has kept.
    as_json
        Print a JSON object for each sequence: prompt, text, tokens, reason, score.
    """
    require_training_packages("generate")
    from megaloom.runtime.generation.generate import Asked

    from .commands.generate_command import run_generate

    chosen = None if precision is None else Precision(precision)
    files = (list(prompt), prompt_file)
    asked = Asked(tp, pp, chosen, tokenizer, tokenizer_type, chat, add_bos, batch_size, averaged=averaged)
    run_generate(run, *files, settings, asked, as_json=as_json)


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
    seq: int | None = None,
    batch: int = 1,
    source: int | None = None,
    precision: Precision = Precision.BF16,
    svg: Path | None = None,
    html: Path | None = None,
    tensors: Annotated[bool, Parameter(negative="")] = False,
    placements: Annotated[bool, Parameter(negative="")] = False,
    layout: ShownLayout = NOTHING_SHARDED,
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
    tensors
        List the tensors of a checkpoint instead: name, shape, type. MODEL is a run, one of its step-… folders, a packed
        run, a Hugging Face folder, or a checkpoint of Megatron-LM.
    placements
        List the transitions between placements instead: which values change theirs over the axes below, by which
        collective, forward and backward. It matters which degrees are above 1, and which above the key/value heads.
    """
    axes = fixed_fields(layout)
    if axes and not placements:
        raise UserError(f"{', '.join(map(flag_of, axes))}: only --placements reads it\nadd --placements, or omit it")
    if tensors:
        require_training_packages("show --tensors")
        from .commands.tensors_command import run_tensors

        given = {"--set": words, "--settings": settings, "--seq": seq, "--source": source, "--svg": svg, "--html": html}
        given["--placements"] = placements
        if flag := next((name for name, value in given.items() if value), None):
            raise UserError(f"{flag} has no effect with --tensors, which lists a checkpoint\nomit one of the two")
        run_tensors(Path(model))
        return
    from .commands.show_command import run_placements, run_show

    if placements:
        if not axes:
            raise UserError("--placements needs the axes that shard the model\nadd --tp 2, for example")
        if flag := next((name for name, value in (("--svg", svg), ("--html", html), ("--seq", seq)) if value), None):
            raise UserError(f"{flag} has no effect with --placements, which do not depend on it\nomit one of the two")
        run_placements(model, model_arguments(words, settings), axes)
        return
    check_output_file(svg, "--svg")
    check_output_file(html, "--html")
    run_show(model, model_arguments(words, settings), seq, batch, source, precision, svg, html)


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
