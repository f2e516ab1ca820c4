"""Write a plan as a Python script for Megatron-Bridge, which builds the whole configuration and trains by it.

No recipe is used: a recipe's own values would stay where the plan says nothing, and they change between releases.
The fields are those of Megatron-LM's options for the plan (see `bridge_fields`), and those below where Megatron-Bridge
has another default than Megatron-LM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from megaloom.dsl import GeGLU, Graph, SwiGLU
from megaloom.planner.contract.choices import GradReduce
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision

from .bridge_fields import fields_of
from .decoder import DecoderModel, read_decoder
from .megatron_fsdp import max_connections
from .megatron_lm import REPORTS, megatron_options, trial_options
from .option import Option, option
from .quoting import comment, title
from .slurm import machines
from .target import Target, refuse

VERSIONS = "0.3 to 0.6"
WITHOUT_FIELD = frozenset(
    {
        "mock-data",  # the kind of the data set
        "max-position-embeddings",  # always the tokens of a sequence
        "num-layers-per-virtual-pipeline-stage",  # it counts chunks instead
    }
)
"""Options of Megatron-LM without a field in Megatron-Bridge."""
BRIDGE_SECTIONS = {
    "model": "GPTModelProvider",
    "train": "TrainingConfig",
    "optimizer": "OptimizerConfig",
    "scheduler": "SchedulerConfig",
    "ddp": "DistributedDataParallelConfig",
    "dist": "DistributedInitConfig",
    "dataset": "MockGPTDatasetConfig",
    "tokenizer": "TokenizerConfig",
    "checkpoint": "CheckpointConfig",
    "logger": "LoggerConfig",
    "mixed_precision": "MixedPrecisionConfig",
}
"""The sections of a ConfigContainer, and the class of each."""
_LATENT = "MLAModelProvider"
_CONFIG = "megatron.bridge.training.config"
_MODULES = {
    "model": "megatron.bridge.models.gpt_provider",
    "mixed_precision": "megatron.bridge.training.mixed_precision",
}


def bridge_script(plan: Plan, graph: Graph) -> str:
    """Return a plan as a script for Megatron-Bridge. Raises UserError that names what no field expresses."""
    model = read_decoder(graph, Target.MEGATRON_BRIDGE)
    if model.positions not in (None, plan.workload.seq):
        what = f"{model.positions} learned positions with sequences of {plan.workload.seq} tokens"
        refuse(Target.MEGATRON_BRIDGE, what, f"plan with --seq {model.positions}, or use --to megatron-lm")
    fields = config_fields(plan, graph)
    nodes, each = machines(plan.cluster)
    rendezvous = "" if nodes == 1 else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    environment = _environment(plan.layout)
    body = "".join(f"        {name}={_call(name, fields)},\n" for name in BRIDGE_SECTIONS)
    return f"""{title(plan, graph.name)}\
{comment(f"For Megatron-Bridge {VERSIONS}: torchrun {rendezvous}--nproc-per-node {each} THIS_FILE")}\
# It trains on mock data for a few steps. Replace the data set, the tokenizer and the schedule by yours.
{_notes(model)}{_imports(fields, environment)}

def config() -> ConfigContainer:
    return ConfigContainer(
{body}    )


if __name__ == "__main__":
{environment}{_start(plan.layout)}"""


def config_fields(plan: Plan, graph: Graph) -> dict[str, str]:
    """Return the fields of the configuration, `section.name`, with their values as Python writes them."""
    options, model = megatron_options(plan, graph, Target.MEGATRON_BRIDGE), read_decoder(graph, Target.MEGATRON_BRIDGE)
    fields = dict(_defaults(plan, model))
    for one in (*options.model, *options.layout, *_chunks(plan.layout), *options.step, *REPORTS, *trial_options(model)):
        if one.name not in WITHOUT_FIELD:
            fields |= dict(fields_of(one))
    return fields


def _chunks(x: Layout) -> Iterator[Option]:
    if x.vpp > 1:
        yield option("num-virtual-stages-per-pipeline-rank", x.vpp)


def _defaults(plan: Plan, m: DecoderModel) -> Iterator[tuple[str, str]]:
    """Yield the fields whose defaults are not Megatron-LM's, and those that no option of Megatron-LM sets."""
    x, biases = plan.layout, getattr(m.attention, "bias", False)
    gated = isinstance(m.dense or (m.moe and m.moe.expert), SwiGLU | GeGLU)
    yield "model.activation_func", "torch.nn.functional.gelu"
    yield "model.bias_activation_fusion", str(gated or biases)
    yield "model.bias_dropout_fusion", "True"
    yield "model.apply_rope_fusion", str(m.positions is None and getattr(m.attention, "rope", None) is not None)
    yield "model.cross_entropy_loss_fusion", "False"
    yield "model.masked_softmax_fusion", "True"
    yield "model.attention_softmax_in_fp32", "False"
    yield "model.deallocate_pipeline_outputs", "True"
    yield "model.mtp_num_layers", "None"
    if m.moe and m.dense:
        yield "model.transformer_layer_spec", "partial(get_gpt_decoder_block_spec, use_transformer_engine=True)"
    if x.vpp > 1:
        yield "model.overlap_p2p_comm", "True"
        yield "model.batch_p2p_comm", "False"
    yield "ddp.check_for_nan_in_grad", "True"
    yield "dataset.random_seed", "1234"
    yield "dataset.seq_length", str(plan.workload.seq)
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        yield f"dataset.{name}", "False"
    if plan.workload.precision is Precision.FP32:
        yield "mixed_precision.fp32", "True"
        yield "mixed_precision.params_dtype", "torch.float32"
        yield "mixed_precision.pipeline_dtype", "torch.float32"
    yield "mixed_precision.grad_reduce_in_fp32", str(x.grad_reduce is GradReduce.FP32)


def _call(section: str, fields: Mapping[str, str]) -> str:
    """Return the call that makes a section, one field a line."""
    own = "".join(
        f"            {path.partition('.')[2]}={value},\n"
        for path, value in fields.items()
        if path.startswith(f"{section}.")
    )
    return f"{_kind(section, fields)}(\n{own}        )" if own else f"{_kind(section, fields)}()"


def _kind(section: str, fields: Mapping[str, str]) -> str:
    return _LATENT if section == "model" and "model.multi_latent_attention" in fields else BRIDGE_SECTIONS[section]


def _imports(fields: Mapping[str, str], environment: str) -> str:
    """Return the script's imports."""
    standard = "import os\n" if environment else ""
    if "model.transformer_layer_spec" in fields:
        standard += "from functools import partial\n"
    text = f"{standard}\nimport torch\n"
    latent = _kind("model", fields) == _LATENT
    modules = {**_MODULES, "model": "megatron.bridge.models.mla_provider"} if latent else _MODULES
    kinds = sorted(["ConfigContainer", *(kind for section, kind in BRIDGE_SECTIONS.items() if section not in modules)])
    own = "".join(f"    {kind},\n" for kind in kinds)
    lines = [
        *(f"from {module} import {_kind(section, fields)}\n" for section, module in modules.items()),
        f"from {_CONFIG} import (\n{own})\n",
        "from megatron.bridge.training.gpt_step import forward_step\n",
        "from megatron.bridge.training.pretrain import pretrain\n",
    ]
    if "activations." in fields["model.activation_func"]:
        lines.append("from megatron.core import activations\n")
    if "model.transformer_layer_spec" in fields:
        lines.append("from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec\n")
    return text + "".join(sorted(lines))


def _environment(x: Layout) -> str:
    """Return the line that sets CUDA_DEVICE_MAX_CONNECTIONS, or removes it."""
    limit = max_connections(x)
    if limit is None:
        return '    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)\n'
    return f'    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "{limit}"\n' if limit else ""


def _start(x: Layout) -> str:
    """Return the lines that train.

    Megatron-FSDP of megatron-core 0.19 reads the format of gradients from a field that older releases do not have, and
    `grad_reduce_in_fp32` no more (fsdp/src/megatron_fsdp/mixed_precision.py).
    """
    if not x.fsdp or x.grad_reduce is not GradReduce.FP32:
        return "    pretrain(config(), forward_step)\n"
    field = "megatron_fsdp_main_grads_dtype"
    return f"""    made = config()
    if hasattr(made.ddp, "{field}"):  # since megatron-core 0.19
        made.ddp.{field} = torch.float32
    pretrain(made, forward_step)
"""


def _notes(m: DecoderModel) -> str:
    return (
        comment("The MTP layer reads hidden states after the final norm, the plan's model before it.") if m.mtp else ""
    )
