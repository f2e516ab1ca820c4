"""Write a plan as Accelerate's configuration file, for `accelerate launch --config_file`.

A plan with sharded gradients or weights becomes one for FSDP (see `accelerate_fsdp`), any other one for Accelerate's
Megatron-LM plugin.
The plugin takes from a model only its numbers of layers, channels, heads, positions and tokens. All else is
Megatron-LM's default, which is GPT-2, so every other model is refused: a Llama would train with GELU, a feed-forward
of 4 × hidden channels, LayerNorm and tied embeddings.
Every key that has a default of its own is written: without them, Accelerate 1.15.0 takes two context-parallel ranks,
recomputes all layers and uses rotary positions.
Source of the keys, their defaults and the model's numbers: Accelerate's utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from attrs import fields

from megaloom.dsl import MLP, Attention, Graph, Layer, LayerNorm
from megaloom.dsl.show.formatting import declared
from megaloom.planner.contract.choices import MICROBATCH_OVERLAPS, GradReduce, Recompute
from megaloom.planner.contract.layout import VOCAB_MULTIPLE, Layout
from megaloom.planner.contract.plans import Plan
from megaloom.planner.contract.workload import Precision

from .accelerate_fsdp import fsdp_notes, fsdp_table
from .accelerate_keys import ACCELERATE_KEYS, MEGATRON_PREFIX, MICROBATCHES
from .decoder import DecoderModel, read_decoder
from .megatron_lm import GRADIENTS_IN_BF16, OVERLAP_OPTIONS
from .quoting import title
from .slurm import machines
from .target import Target, refuse
from .whole_layers import StageLayers, equal_layers, recomputed_layers, stage_layers

MEGATRON_INSTEAD = "use `megaloom export --to megatron-lm`"
MIXED_PRECISION = {Precision.FP32: "no", Precision.BF16: "bf16", Precision.FP16: "fp16"}


def config_yaml(plan: Plan, graph: Graph) -> str:
    """Return a plan as Accelerate's YAML file. Raises UserError that names what no key expresses."""
    precision, fsdp = plan.workload.precision, plan.layout.fsdp
    if precision not in MIXED_PRECISION:
        refuse(Target.ACCELERATE, f"precision {precision}", f"plan with --precision {' or '.join(MIXED_PRECISION)}")
    table = fsdp_table(plan) if fsdp else _megatron_table(plan, graph)
    notes = fsdp_notes(plan) if fsdp else _other_arguments(plan.layout)
    nodes, per_node = machines(plan.cluster)
    address = "machine_rank: 0  # its number on each machine\nmain_process_ip: MACHINE_0\nmain_process_port: 29500\n"
    return f"""{title(plan, graph.name)}\
# For Accelerate 1.15.0. Your script provides the model, sequences of {plan.workload.seq} tokens, and micro-batches
# (per_device_train_batch_size) of {plan.layout.micro_batch}.
{notes}compute_environment: LOCAL_MACHINE
distributed_type: {"FSDP" if fsdp else "MEGATRON_LM"}
mixed_precision: '{MIXED_PRECISION[precision]}'
num_machines: {nodes}
num_processes: {nodes * per_node}
{address if nodes > 1 else ""}use_cpu: false
{table}"""


def _megatron_table(plan: Plan, graph: Graph) -> str:
    """Return the keys of the Megatron-LM plugin. Raises UserError that names what they do not express."""
    model = read_decoder(graph, Target.ACCELERATE)
    _check_model(model)
    _check_layout(plan.layout)
    values: dict[str, object] = {MICROBATCHES: plan.layout.microbatches(plan.workload.batch)}
    values |= {ACCELERATE_KEYS[option]: value for option, value in _options(plan, model, graph)}
    lines = "".join(f"  {MEGATRON_PREFIX}{key}: {_yaml(value)}\n" for key, value in values.items())
    return f"megatron_lm_config:\n{lines}"


def _other_arguments(x: Layout) -> str:
    """Return a comment on what the file has no keys for; the script passes it to the plugin."""
    overlaps = [o for o in x.overlaps if o in MICROBATCH_OVERLAPS or x.dp * x.cp > 1]
    arguments: dict[str, object] = {OVERLAP_OPTIONS[o].replace("-", "_"): True for o in overlaps}
    what = ["overlap"] if arguments else []
    if x.vocab_multiple != VOCAB_MULTIPLE:  # Megatron-LM's default
        what.append("vocabulary padding")
        arguments["make_vocab_size_divisible_by"] = x.vocab_multiple
    if x.grad_reduce is GradReduce.BF16:
        what.append("format of gradients")
        arguments[GRADIENTS_IN_BF16.replace("-", "_")] = True
    if not arguments:
        return ""
    items = ", ".join(f'"{name}": {value}' for name, value in arguments.items())
    plugin = f"MegatronLMPlugin(other_megatron_args={{{items}}})"
    return f"# For the plan's {' and '.join(what)}, your script passes {plugin}.\n"


def _check_model(m: DecoderModel) -> None:
    """Refuse a model that is not a GPT-2, naming what Accelerate would ignore."""
    if ignored := ", ".join(_unlike_gpt2(m)):
        what = f"{m.name}: its Megatron-LM plugin always trains a GPT-2. It would ignore {ignored}"
        refuse(Target.ACCELERATE, what, MEGATRON_INSTEAD)


def _unlike_gpt2(m: DecoderModel) -> Iterator[str]:
    """Yield the properties of a model that GPT-2 does not have; sizes and dropout are free."""
    a = m.attention
    if isinstance(a, Attention):
        gpt2 = Attention(heads=a.heads, kv_heads=a.kv_heads, head_dim=a.head_dim, bias=True, dropout=a.dropout)
        given = ((f.name, getattr(a, f.name)) for f in fields(Attention) if f.eq)
        yield from (f"{name}={declared(value)}" for name, value in given if value != getattr(gpt2, name))
        if a.kv_heads not in (None, a.heads):
            yield f"kv_heads={a.kv_heads}"
        if a.head_dim not in (None, m.embed // a.heads):
            yield f"head_dim={a.head_dim}"
    else:
        yield type(a).__name__
    if m.positions is None and not getattr(a, "rope", None):
        yield "that it has no positions"
    gelu = MLP(4 * m.embed, "gelu_tanh", bias=True)
    yield from dict.fromkeys(_kind(ff, gelu) for ff in m.layers if ff != gelu)
    if m.norm != LayerNorm():
        yield _kind(m.norm, LayerNorm())
    if not m.tied:
        yield "untied embeddings"
    if m.mtp:
        yield "multi-token prediction"


def _kind(layer: Layer, gpt2: Layer) -> str:
    """Return the layer's class, with its fields if GPT-2's layer has that class."""
    return declared(layer) if type(layer) is type(gpt2) else type(layer).__name__


def _check_layout(x: Layout) -> None:
    """Refuse what the file has no keys for, with the options of `plan` that avoid all of it at once."""
    what, options = list[str](), list[str]()
    if x.vpp > 1:
        what.append(f"vpp {x.vpp}: its file has no key for model chunks")
        options.append("--vpp 1")
    if x.recompute is Recompute.SELECTIVE:
        what.append("recompute selective: it always passes a recompute method, which Megatron-LM then refuses")
        options.append("--recompute none (or full, if that does not fit)")
    if what:
        advice = f"add to the command that planned it {' '.join(options)}, or {MEGATRON_INSTEAD}"
        refuse(Target.ACCELERATE, "; ".join(what), advice)


def _options(plan: Plan, m: DecoderModel, graph: Graph) -> Iterator[tuple[str, object]]:
    """Yield every option of Megatron-LM that a key stands for, with its value; False for a switch that is not set."""
    x = plan.layout
    yield "tensor-model-parallel-size", x.tp
    yield "pipeline-model-parallel-size", x.pp
    yield "sequence-parallel", x.sequence_parallel
    yield "context-parallel-size", x.cp
    yield "expert-model-parallel-size", x.ep
    yield "expert-tensor-parallel-size", x.etp
    yield from _stages(stage_layers(plan, m, graph, Target.ACCELERATE))
    yield from _recompute(x, m)
    yield "use-distributed-optimizer", x.distributed_optimizer
    yield "attention-dropout", getattr(m.attention, "dropout", 0.0)
    yield "hidden-dropout", m.dropout
    yield "use-rotary-position-embeddings", m.positions is None


def _stages(stages: tuple[StageLayers, ...]) -> Iterator[tuple[str, object]]:
    """Yield the number of layers of the last stage, the only one that may differ from the others."""
    if equal_layers(stages) is not None:
        return
    if equal_layers(stages[:-1]) is None:
        counts = ", ".join(str(stage.layers) for stage in stages)
        what = f"stages of {counts} layers: its file has a key for the last stage only"
        refuse(Target.ACCELERATE, what, MEGATRON_INSTEAD)
    yield "decoder-last-pipeline-num-layers", stages[-1].layers


def _recompute(x: Layout, m: DecoderModel) -> Iterator[tuple[str, object]]:
    """Yield full recompute, which Accelerate always asks for; of the first 0 layers of each stage, it is none."""
    blocks = recomputed_layers(x, m, Target.ACCELERATE)
    yield "recompute-activations", False
    yield "recompute-granularity", "full"
    yield "recompute-method", "uniform" if blocks is None else "block"
    yield "recompute-num-layers", 1 if blocks is None else blocks


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
