"""Write a plan as a Python configuration of torchtitan 0.3, which no longer reads TOML: a module with one function.

A plan that torchtitan would run otherwise is refused; a small difference is a comment in the file.
"""

from __future__ import annotations

from collections.abc import Mapping

from megaloom.dsl import MLA, Graph
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision

from .quoting import title
from .slurm import machines
from .target import Target
from .torchtitan import chunks_note
from .torchtitan_fields import HEADS, titan_fields
from .torchtitan_flavors import Flavor

SCALES_OF_ROWS = "# Its products in 8 bits have a scale for each row; the plan has one for each tensor.\n"
FLOAT8_ARGUMENT = f""", converters=[
        Float8LinearConverter.Config(
            recipe_name="rowwise", filter_fqns=["{HEADS[Target.TORCHTITAN_0_3]}"], model_compile_enabled=True
        ),
    ]"""
CONFIG_FUNCTION = "planned"
"""The function of the file that returns the configuration: `--config planned`."""


def config_python(plan: Plan, graph: Graph) -> str:
    """Return a plan as a Python module for torchtitan. Raises UserError that names what torchtitan does otherwise.

    CUDA graphs are off, since the plan does not price them, and torchtitan refuses them with pipelines and experts.
    """
    made = titan_fields(plan, graph, Target.TORCHTITAN_0_3)
    nodes, each = machines(plan.cluster)
    whole = plan.layout.recompute is Recompute.FULL
    training = {**made.training, "disable_cuda_graphs": True}
    float8 = plan.workload.precision is Precision.FP8
    spec = f'model_registry("{made.flavor.name}"{_attention(made.flavor)}{FLOAT8_ARGUMENT if float8 else ""})'
    imported = "from torchtitan.distributed.activation_checkpoint import FullAC\n" if whole else ""
    quantized = "from torchtitan.components.quantization import Float8LinearConverter\n" if float8 else ""
    notes = SCALES_OF_ROWS * float8 + chunks_note(plan.layout)
    return f"""{title(plan, graph.name)}\
# For torchtitan 0.3.0, with this file as NAME.py in a folder of PYTHONPATH:
# torchrun --nnodes {nodes} --nproc-per-node {each} ... -m torchtitan.train --module NAME --config {CONFIG_FUNCTION}
# torchtitan's own model has {made.flavor.own}. That does not change the step time.
# Its attention stays within documents; the plan counts whole sequences.
{notes}# Add the tokenizer (hf_assets_path), dataloader, optimizer, steps and learning rate.
from torchtitan.components.loss import CrossEntropyLoss
{quantized}from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
{imported}from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.{made.flavor.model} import model_registry
from torchtitan.trainer import Trainer


def {CONFIG_FUNCTION}() -> Trainer.Config:
    spec = {spec}
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)),
        training=TrainingConfig(
{_arguments(training)}        ),
        parallelism=ParallelismConfig(
{_arguments(made.parallelism)}        ),
        activation_checkpoint={"FullAC.Config()" if whole else "None"},
        compile=CompileConfig(enable=True, components=["model", "loss"]),
    )
"""


def _attention(flavor: Flavor) -> str:
    """Return the argument for the fused kernel that a plan has; latent attention has torchtitan's default."""
    return "" if isinstance(flavor.decoder.attention, MLA) else ', attn_backend="varlen"'


def _arguments(fields: Mapping[str, object]) -> str:
    """Return keyword arguments, a line each; a list of lists has a line for each of its items."""
    lines = []
    for name, value in fields.items():
        if isinstance(value, list):
            lines.append(f"{name}=[\n" + "".join(f"    {_literal(one)},\n" for one in value) + "],\n")
        else:
            lines.append(f"{name}={_literal(value)},\n")
    return "".join(f"            {line}\n" for text in lines for line in text.splitlines())


def _literal(value: object) -> str:
    """Return a number, a text of ours or a list of them as Python."""
    return f"[{', '.join(map(_literal, value))}]" if isinstance(value, list) else repr(value).replace("'", '"')
