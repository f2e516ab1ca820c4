"""`megaloom convert`: write the weights of a run for other programs."""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.facts.positions import longest
from megaloom.dsl.graph import Model, graph
from megaloom.dsl.hf.architectures import read
from megaloom.planner.contract.layout import VOCAB_MULTIPLE
from megaloom.planner.contract.workload import Precision
from megaloom.planner.export.megatron_arguments import (
    MegatronArguments,
    bert_arguments,
    megatron_arguments,
    t5_arguments,
)
from megaloom.runtime.checkpoints.checkpoint_folder import newest_intact
from megaloom.runtime.cli.printing import print_on_first_rank
from megaloom.runtime.convert.adapters import with_merged_adapters, write_adapters
from megaloom.runtime.convert.hugging_face import SHARD_NBYTES, DescribedModel, describe, nbytes_of, write_folder
from megaloom.runtime.convert.megatron_names import Family, family_of
from megaloom.runtime.convert.megatron_weights import read_megatron
from megaloom.runtime.convert.megatron_writer import MegatronCheckpoint, write_megatron
from megaloom.runtime.convert.run_weights import checkpoint_weights
from megaloom.runtime.megatron.build_context import DTYPES
from megaloom.runtime.training.artefact import opened
from megaloom.runtime.training.run_folder import is_run, no_checkpoint, plan_and_model, plan_of_run
from megaloom.runtime.weights.hugging_face_files import CONFIG, HF_FOLDER
from megaloom.runtime.weights.hugging_face_weights import is_megatron, open_folder

UNLIMITED_SEQ = 4096
"""Tokens per sequence that are written for a model without learned positions."""
ARGUMENTS = {Family.GPT: megatron_arguments, Family.BERT: bert_arguments, Family.T5: t5_arguments}


def run_convert(
    run: Path,
    to: str,
    output: Path,
    config: Path | None,
    precision: Precision | None,
    max_shard_size: str | None = None,
    *,
    averaged: bool,
) -> None:
    """Write the last checkpoint of a run as a Hugging Face folder, or its adapters as PEFT does."""
    if max_shard_size is not None and to != "hf":
        raise UserError(f"--max-shard-size has no effect with --to {to}, which writes one file\nomit it")
    shard_nbytes = SHARD_NBYTES if max_shard_size is None else nbytes_of(max_shard_size, "--max-shard-size")
    asked = Written(to, output, config, precision, shard_nbytes)
    with opened(run) as folder:
        if not is_run(folder) and is_megatron(folder):
            _convert_megatron(folder, asked)
        elif to == "megatron" and not is_run(folder) and (folder / CONFIG).is_file():
            _convert_hugging_face(folder, asked)
        else:
            _convert_run(folder, asked, averaged=averaged)


@frozen
class Written:
    """The options of `convert`: the form, the folder, the config.json of the model, the precision, bytes of a file."""

    to: str
    output: Path
    config: Path | None
    precision: Precision | None
    shard_nbytes: int


def _convert_run(run: Path, asked: Written, *, averaged: bool) -> None:
    """Write the last checkpoint in the folder of a run."""
    to, output, config, precision = asked.to, asked.output, asked.config, asked.precision
    plan, model = plan_and_model(run)
    checkpoint = newest_intact(run, fingerprint=plan.fingerprint)
    if checkpoint is None:
        raise no_checkpoint(run)
    dtype = DTYPES[plan.workload.precision.wide if precision is None else precision]
    weights = checkpoint_weights(graph(model), checkpoint, averaged=averaged)
    base = model.without_adapters
    if to == "megatron":
        step, workload = checkpoint.manifest.step, plan.workload
        arguments = arguments_of(base, workload.seq, plan.layout.vocab_multiple)
        about = MegatronCheckpoint(arguments.stored, step)
        count = write_megatron(base, with_merged_adapters(model, weights), output, dtype, about)
        print_on_first_rank(*checkpoint.notes, *_wrote_megatron(asked, count, dtype, model, arguments))
        return
    description = _description(run, config)
    description.check(base)
    if to == "peft":
        count = write_adapters(description.names, model, weights, output, dtype, _base(run))
    else:
        merged = with_merged_adapters(model, weights)
        count = write_folder(description, base, merged, output, dtype, asked.shard_nbytes)
    kind = str(dtype).removeprefix("torch.")
    what = ", adapters merged" if to == "hf" and model.lora else ""
    lines = [*checkpoint.notes, f"wrote {output}: {count} tensors of {kind}, of step {checkpoint.manifest.step}{what}"]
    if left := [name.format(beyond="N") for name in description.names.unused if "{beyond}" in name]:
        lines.append(f"not written: {', '.join(left)}*, since the model has no such layers")
    if not description.is_exact(base):
        source = plan_of_run(run).model
        lines.append(f"config.json is that of {description.file}, whose options, such as dropout, differ from {source}")
    print_on_first_rank(*lines)


def _convert_hugging_face(folder: Path, asked: Written) -> None:
    """Write the weights of a Hugging Face folder as a checkpoint of Megatron-LM, a release."""
    model, given = read(folder), open_folder(folder)
    given.check(model)
    weights = given.of(model)
    dtype = next(iter(weights.values())).dtype if asked.precision is None else DTYPES[asked.precision]
    seq = longest(graph(model)).get("seq", UNLIMITED_SEQ)
    arguments = arguments_of(model, seq, VOCAB_MULTIPLE)
    about = MegatronCheckpoint(arguments.stored, None)
    count = write_megatron(model, weights, asked.output, dtype, about)
    print_on_first_rank(*_wrote_megatron(asked, count, dtype, model, arguments))


def arguments_of(model: Model, seq: int, vocab_multiple: int) -> MegatronArguments:
    """Return the arguments of Megatron-LM for a model. Raise UserError for what it cannot express."""
    g = graph(model)
    return ARGUMENTS[family_of(g)](g, seq=seq, vocab_multiple=vocab_multiple)


def _wrote_megatron(
    asked: Written, count: int, dtype: torch.dtype, model: Model, arguments: MegatronArguments
) -> list[str]:
    """Return the lines about a checkpoint of Megatron-LM that was written."""
    merged = ", adapters merged" if model.lora else ""
    kind = str(dtype).removeprefix("torch.")
    options = " ".join(word for one in arguments.unread for word in one.words)
    lines = [
        f"wrote {asked.output}: {count} tensors of {kind}{merged}. Megatron-LM reads them, and its arguments, with "
        f"--load {asked.output} --finetune --use-checkpoint-args --ckpt-format torch_dist"
    ]
    if options:
        lines.append(f"arguments that it does not read from a checkpoint: {options}")
    if arguments.stored.get("bert_binary_head"):
        lines.append("its head for the next sentence, which the model does not have, is untrained")
    return lines


def _convert_megatron(path: Path, asked: Written) -> None:
    """Write the weights of a checkpoint of Megatron-LM as a Hugging Face folder."""
    output, config, precision = asked.output, asked.config, asked.precision
    if config is None or asked.to != "hf":
        raise UserError(
            f"{path} is a checkpoint of Megatron-LM, whose weights are written with --to hf\n"
            "give the config.json that describes its model with --config"
        )
    description = describe(config)
    weights = read_megatron(path, description.model)
    dtype = next(iter(weights.values())).dtype if precision is None else DTYPES[precision]
    count = write_folder(description, description.model, weights, output, dtype, asked.shard_nbytes)
    kind = str(dtype).removeprefix("torch.")
    print_on_first_rank(f"wrote {output}: {count} tensors of {kind}. Next: megaloom train --from {output}")


def _base(run: Path) -> str | None:
    """Return the Hugging Face folder of the model of a run, if it was one."""
    model = plan_of_run(run).model
    return str(Path(model).parent) if Path(model).name == CONFIG else None


def _description(run: Path, config: Path | None) -> DescribedModel:
    """Return the config.json that describes the model of a run."""
    copied = run / HF_FOLDER / CONFIG
    if config is None and not copied.is_file():
        raise UserError(
            f"{run} has no Hugging Face config: its model is {plan_of_run(run).model}\n"
            "give the config.json that describes it with --config"
        )
    return describe(copied if config is None else config)
