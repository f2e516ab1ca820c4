"""A plan as the configuration file of Accelerate's Megatron-LM plugin, for `accelerate launch --config_file`.

Every key that has a default of its own is written: without one Accelerate 1.15.0 takes two context-parallel ranks,
recomputes all, and turns positions. Source of the keys and their defaults: its utils/dataclasses.py.
"""

from __future__ import annotations

from collections.abc import Iterator

from megaloom.dsl import (
    MLP,
    Attention,
    Graph,
    LayerNorm,
    RMSNorm,
    SwiGLU,
)
from megaloom.planner.contract.layout import (
    INNER,
    Layout,
    Precision,
    Recompute,
)
from megaloom.planner.contract.plans import Plan

from .decoder import GPT, cannot, gpt
from .megatron_lm import OVERLAPS
from .slurm import hosts
from .whole_layers import (
    Part,
    even,
    parts,
    recomputed,
)

NAME = "Accelerate"
INSTEAD = "use `megaloom export --to megatron-lm`"
PRECISION = {Precision.FP32: "no", Precision.BF16: "bf16", Precision.FP16: "fp16"}


def config(plan: Plan, graph: Graph) -> str:
    """The file. Raises UserError that names what none of its keys says."""
    precision, read = plan.workload.precision, gpt(graph, NAME)
    if precision not in PRECISION:
        cannot(NAME, f"precision {precision}", f"plan with --precision {' or '.join(PRECISION)}")
    _known(read)
    nodes, per_node = hosts(plan.cluster)
    keys = "".join(f"  megatron_lm_{key}: {_said(value)}\n" for key, value in _keys(plan, read, graph))
    meet = "machine_rank: 0  # another on each machine\nmain_process_ip: MACHINE_0\nmain_process_port: 29500\n"
    return f"""# {graph.name} on {plan.cluster}: {plan.layout}
# For Accelerate 1.15.0. Your script says the model, that a sequence has {plan.workload.seq} tokens, and that a
# micro-batch (per_device_train_batch_size) has {plan.layout.micro_batch} of them.
{_overlaps(plan.layout)}compute_environment: LOCAL_MACHINE
distributed_type: MEGATRON_LM
mixed_precision: '{PRECISION[precision]}'
num_machines: {nodes}
num_processes: {nodes * per_node}
{meet if nodes > 1 else ""}use_cpu: false
megatron_lm_config:
{keys}"""


def _overlaps(x: Layout) -> str:
    """What its file has no keys for, but its plugin hands on."""
    named = [OVERLAPS[o].replace("-", "_") for o in x.overlaps if o in INNER or x.dp * x.cp > 1]
    if not named:
        return ""
    given = ", ".join(f'"{name}": True' for name in named)
    return f"# It also says what overlaps: MegatronLMPlugin(other_megatron_args={{{given}}}).\n"


def _known(m: GPT) -> None:
    """Refuse a decoder that is neither a GPT-2 nor a Llama: those alone Accelerate hands on to Megatron-LM."""
    a, ff = m.attention, m.dense
    if m.moe or not isinstance(a, Attention):
        cannot(NAME, f"the layers of {m.name}: of decoders it takes GPT-2 and Llama", INSTEAD)
    gpt2 = isinstance(ff, MLP) and ff.bias and a.bias and m.positions and isinstance(m.norm, LayerNorm)
    llama = isinstance(ff, SwiGLU) and not (a.bias or a.qkv_bias) and a.rope and isinstance(m.norm, RMSNorm)
    if not (gpt2 or llama) or a.window or a.sink or a.qk_norm:
        cannot(NAME, f"the layers of {m.name}: of decoders it takes GPT-2 and Llama", INSTEAD)


def _keys(plan: Plan, m: GPT, graph: Graph) -> Iterator[tuple[str, object]]:
    x = plan.layout
    if x.vpp > 1:
        cannot(NAME, f"vpp {x.vpp}: its file has no key for it", f"plan with --vpp 1, or {INSTEAD}")
    yield "tp_degree", x.tp
    yield "pp_degree", x.pp
    yield "num_micro_batches", x.microbatches(plan.workload.batch)
    yield "sequence_parallelism", x.sequence_parallel
    yield "context_parallel_size", x.cp
    yield "expert_model_parallel_size", x.ep
    yield "expert_tensor_parallel_size", x.etp
    yield from _stages(parts(plan, m, graph, NAME))
    yield from _recompute(x, m)
    yield "use_distributed_optimizer", x.distributed_optimizer
    yield "attention_dropout", getattr(m.attention, "dropout", 0.0)
    yield "hidden_dropout", m.dropout
    yield "use_rotary_position_embeddings", m.positions is None


def _stages(cut: tuple[Part, ...]) -> Iterator[tuple[str, object]]:
    """The last stage may have fewer or more layers than the others, which have as many."""
    if even(cut) is not None:
        return
    if even(cut[:-1]) is None:
        counts = ", ".join(str(part.layers) for part in cut)
        cannot(NAME, f"stages of {counts} layers: its file says that of the last one only", INSTEAD)
    yield "decoder_last_pipeline_num_layers", cut[-1].layers


def _recompute(x: Layout, m: GPT) -> Iterator[tuple[str, object]]:
    """It always asks for full recompute, which of the first no layers of each stage is none."""
    if x.recompute is Recompute.SELECTIVE:
        cannot(NAME, "recompute selective: its file always gives a method, which Megatron-LM then refuses", INSTEAD)
    first = recomputed(x, m, NAME)
    yield "recompute_activations", False
    yield "recompute_granularity", "full"
    yield "recompute_method", "uniform" if first is None else "block"
    yield "recompute_num_layers", 1 if first is None else first


def _said(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
