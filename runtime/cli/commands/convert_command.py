"""`megaloom convert`: write the weights of a run for other programs."""

from __future__ import annotations

from pathlib import Path

from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import graph
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.checkpoints.checkpoint_folder import newest_intact
from megaloom.runtime.cli.printing import print_on_first_rank
from megaloom.runtime.convert.adapters import with_merged_adapters, write_adapters
from megaloom.runtime.convert.hugging_face import DescribedModel, describe, write_folder
from megaloom.runtime.convert.megatron_weights import read_megatron
from megaloom.runtime.convert.run_weights import checkpoint_weights
from megaloom.runtime.megatron.build_context import DTYPES
from megaloom.runtime.training.run_folder import is_run, no_checkpoint, plan_and_model, plan_of_run
from megaloom.runtime.weights.given import is_megatron
from megaloom.runtime.weights.kept_files import CONFIG, KEPT


def run_convert(
    run: Path, to: str, output: Path, config: Path | None, precision: Precision | None, *, averaged: bool
) -> None:
    """Write the last checkpoint of a run as a Hugging Face folder, or its adapters as PEFT does."""
    if not is_run(run) and is_megatron(run):
        _convert_megatron(run, to, output, config, precision)
        return
    plan, model = plan_and_model(run)
    checkpoint = newest_intact(run, fingerprint=plan.fingerprint)
    if checkpoint is None:
        raise no_checkpoint(run)
    description = _description(run, config)
    base = model.without_adapters
    description.check(base)
    dtype = DTYPES[plan.workload.precision if precision is None else precision]
    weights = checkpoint_weights(graph(model), checkpoint, averaged=averaged)
    if to == "peft":
        count = write_adapters(description.names, model, weights, output, dtype, _base(run))
    else:
        count = write_folder(description, base, with_merged_adapters(model, weights), output, dtype)
    kind = str(dtype).removeprefix("torch.")
    what = ", adapters merged" if to == "hf" and model.lora else ""
    lines = [*checkpoint.notes, f"wrote {output}: {count} tensors of {kind}, of step {checkpoint.manifest.step}{what}"]
    if left := [name.format(beyond="N") for name in description.names.unused if "{beyond}" in name]:
        lines.append(f"not written: {', '.join(left)}*, since the model has no such layers")
    if not description.is_exact(base):
        source = plan_of_run(run).model
        lines.append(f"config.json is that of {description.file}, whose options, such as dropout, differ from {source}")
    print_on_first_rank(*lines)


def _convert_megatron(path: Path, to: str, output: Path, config: Path | None, precision: Precision | None) -> None:
    """Write the weights of a checkpoint of Megatron-LM as a Hugging Face folder."""
    if config is None or to != "hf":
        raise UserError(
            f"{path} is a checkpoint of Megatron-LM, whose weights are written with --to hf\n"
            "give the config.json that describes its model with --config"
        )
    description = describe(config)
    weights = read_megatron(path, description.model)
    dtype = next(iter(weights.values())).dtype if precision is None else DTYPES[precision]
    count = write_folder(description, description.model, weights, output, dtype)
    kind = str(dtype).removeprefix("torch.")
    print_on_first_rank(f"wrote {output}: {count} tensors of {kind}. Next: megaloom train --from {output}")


def _base(run: Path) -> str | None:
    """Return the Hugging Face folder of the model of a run, if it was one."""
    model = plan_of_run(run).model
    return str(Path(model).parent) if Path(model).name == CONFIG else None


def _description(run: Path, config: Path | None) -> DescribedModel:
    """Return the config.json that describes the model of a run."""
    kept = run / KEPT / CONFIG
    if config is None and not kept.is_file():
        raise UserError(
            f"{run} has no Hugging Face config: its model is {plan_of_run(run).model}\n"
            "give the config.json that describes it with --config"
        )
    return describe(kept if config is None else config)
