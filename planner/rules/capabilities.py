"""Rules that hold for one program only: Megaloom's own runtime, or megatron-core as the target of an export.

A plan may break them; its reasons then say which program cannot run it. `runtime_violations` lists what our runtime
does not train, `export_violations` what megatron-core refuses or computes with wrong gradients.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache

from megaloom.dsl import (
    MLA,
    DType,
    Embed,
    Graph,
    Layer,
    Node,
    Route,
    Split,
    Unembed,
)
from megaloom.dsl.facts.primitives import program
from megaloom.dsl.graph import primitives
from megaloom.planner.contract.capability import assumed_environment, capability
from megaloom.planner.contract.choices import MICROBATCH_OVERLAPS
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.layouts import Layouts
from megaloom.planner.contract.workload import Runtime, Workload

from .divisors import divisors, nearest
from .padding import padding_refusal
from .rule import (
    Case,
    Owner,
    Rule,
    Truth,
    Violation,
    Words,
    all_of,
    violated,
)

OWN_RUNTIME = capability(Runtime.MEGALOOM, assumed_environment(Runtime.MEGALOOM, ""))
TRAINED = OWN_RUNTIME.precisions


@lru_cache(maxsize=16)
def untrainable(graph: Graph) -> Words | None:
    """Return why a model is no next-token model that the runtime trains, and the fix; None if it is one."""
    inputs = [n.name for n in graph.nodes if n.is_input]
    tokens = all(n.value.dtype is DType.INDEX for n in graph.nodes if n.is_input)
    last = graph.nodes[graph.index[graph.outputs[0]]]
    if len(inputs) != 1 or not tokens or len(graph.outputs) != 1 or not isinstance(last.op, Unembed):
        return (
            f"{graph.name} has the inputs {', '.join(inputs) or 'none'} and the outputs {', '.join(graph.outputs)}",
            "the runtime trains next-token models only: one input of token ids, ids(), and one output, of an Unembed",
        )
    for n in graph.nodes:
        if n.weights and not isinstance(n.op, Layer):
            return (
                f"the weight {n.weights[0].name!r} ({n.weights[0].value.at}) is used outside of any layer",
                "the runtime trains the weights of layers, such as the biases of MLP(…, bias=True)",
            )
    if len(sizes := hidden_sizes(graph)) != 1:
        return f"{graph.name} has hidden states of sizes {sorted(sizes)}", "the runtime carries one size"
    uses = shared_weight_users(graph)
    for name, nodes in uses.items():
        if [type(n.op) for n in nodes] != [Embed, Unembed] or len(uses) > 1:
            said = ", ".join(n.name for n in nodes)
            return f"weight {name!r} is shared by {said}", "the runtime can tie one Embed with one Unembed"
    return None


def hidden_sizes(graph: Graph) -> set[int]:
    """Return the sizes of the hidden states between layers."""
    return {n.shape["embed"].known for n in graph.nodes if "embed" in n.shape}


def shared_weight_users(graph: Graph) -> dict[str, list[Node]]:
    """Return the weights that several nodes use, by name, with those nodes."""
    users: dict[str, list[Node]] = {}
    for n in graph.nodes:
        for slot in n.weights:
            users.setdefault(slot.name, []).append(n)
    return {name: nodes for name, nodes in users.items() if len(nodes) > 1}


@lru_cache(maxsize=16)
def unrouted_experts(graph: Graph) -> Node | None:
    """Return the first node whose experts are not fed by a router; None if there is none."""
    for n in graph.nodes:
        table = program(n).table
        apart = any(table.among_experts(slot.outer) for slot in n.weights)
        if apart and not any(isinstance(v.op, Route) for v, *_ in primitives(n.value)):
            return n
    return None


def _precision(case: Case) -> Truth:
    return case.workload.precision in TRAINED


def precision_refusal(workload: Workload) -> Words:
    """Return the message and the fix for a precision that the runtime does not train in."""
    return f"the runtime does not train in {workload.precision}", f"use {' or '.join(TRAINED)}"


def _precision_text(case: Case) -> Words:
    return precision_refusal(case.workload)


def _tokens(case: Case) -> Truth:
    return untrainable(case.graph) is None


def _tokens_text(case: Case) -> Words:
    return untrainable(case.graph) or ("", "")


def _experts(case: Case) -> Truth:
    return case.layout.ep * case.layout.etp == 1 or unrouted_experts(case.graph) is None


def _experts_text(case: Case) -> Words:
    x, node = case.layout, unrouted_experts(case.graph)
    name = node.name if node else ""
    return (
        f"{name} has experts to which no tokens are sent: they are not divided over ep {x.ep} x etp {x.etp}",
        "ep 1 and etp 1 would work, or a MoE of them",
    )


def _padding_refusal(case: Case) -> Words | None:
    """Return the first refusal of a padded dim. Layers with a torch module of their own are not computed by a body."""
    x = case.layout
    split = Split(tp=x.tp, cp=x.cp, ep=x.ep, etp=x.etp, sequence_parallel=x.sequence_parallel)
    nodes = [n for n in case.graph.nodes if not n.is_input and not hasattr(n.op, "module")]
    first: dict[int, Node] = {}  # equal nodes share a program; a refusal names the first
    for n in nodes:
        first.setdefault(id(program(n)), n)
    return next((refusal for n in first.values() if (refusal := padding_refusal(n, split))), None)


def _padding(case: Case) -> Truth:
    return _padding_refusal(case) is None


def _padding_text(case: Case) -> Words:
    return _padding_refusal(case) or ("", "")


def _overlaps(case: Case) -> Truth:
    return case.layout.microbatch_overlap_bits & ~int(OWN_RUNTIME.microbatch_overlaps) == 0


def _overlaps_text(case: Case) -> Words:
    named = " and ".join(o for o in case.layout.overlaps if o in MICROBATCH_OVERLAPS)
    return f"the runtime does not overlap the exchange of {named}", "--overlap gradients weights would, or an export"


RUNTIME_RULES = (
    Rule(
        "runtime-precision",
        "The runtime trains in fp32 or bf16.",
        f"{' or '.join(TRAINED)}, or an export",
        Owner.RUNTIME,
        "megatron-core has the others with Transformer Engine alone",
        _precision,
        _precision_text,
    ),
    Rule(
        "runtime-tokens",
        "The runtime trains models that go from one input of tokens to the logits of the next.",
        "an export",
        Owner.RUNTIME,
        "its schedules carry one hidden state from stage to stage, and its data is text",
        _tokens,
        _tokens_text,
    ),
    Rule(
        "runtime-experts",
        "The runtime divides experts over ep and etp where tokens are sent to them, as in a MoE.",
        "ep 1 and etp 1",
        Owner.RUNTIME,
        "experts that read all tokens run on each device, each of them whole",
        _experts,
        _experts_text,
    ),
    Rule(
        "runtime-padding",
        "The runtime does not join, slice or normalize over a dim that is padded.",
        'policy "whole" for the dim, or a tp that divides it',
        Owner.RUNTIME,
        "the padding would be joined, sliced or counted in the mean as if it were data",
        _padding,
        _padding_text,
    ),
    Rule(
        "runtime-overlap",
        "The runtime overlaps the exchange of gradients and weights alone.",
        "no overlap of tensor or experts, or an export",
        Owner.RUNTIME,
        "megatron-core overlaps that of tensor in Transformer Engine alone, that of experts in its own GPTModel",
        _overlaps,
        _overlaps_text,
    ),
)


def _reduced(case: Case) -> Truth:
    x = case.layout
    return (not case.requirements.experts) | (x.ep > 1) | (x.etp == x.tp)


def _reduced_text(case: Case) -> Words:
    x = case.layout
    return f"experts on ep 1 and etp {x.etp} beside tp {x.tp}", f"use ep 2 or more, or etp {x.tp}"


def _latent(case: Case) -> Truth:
    x = case.layout
    return (x.tp == 1) | (x.sequence_parallel == 1) | (not any(isinstance(n.op, MLA) for n in case.graph.nodes))


def _latent_text(case: Case) -> Words:
    return (
        f"latent attention under tp {case.layout.tp} without sequence parallelism",
        "use sequence_parallel, or tp 1",
    )


def _expert_bias(case: Case) -> Truth:
    return (case.layout.etp == 1) | (not case.requirements.expert_biases)


def _expert_bias_text(case: Case) -> Words:
    return f"etp {case.layout.etp} divides experts that add biases", "etp 1"


def _own_width(case: Case) -> Truth:
    sizes = case.requirements.whole_sizes.items()
    return all_of(n % getattr(case.layout, axis) == 0 for (axis, _), found in sizes for n in found)


def _own_width_text(case: Case) -> Words:
    sizes = ((axis, dim, n) for (axis, dim), found in case.requirements.whole_sizes.items() for n in found)
    axis, dim, n = next((axis, dim, n) for axis, dim, n in sizes if n % getattr(case.layout, axis))
    degree = getattr(case.layout, axis)
    works = [m for m in divisors(n) if case.cluster.count % m == 0]
    return f"{axis} {degree} does not divide {dim}={n}", f"{axis} {nearest(degree, works)} would"


def _twice(case: Case) -> str:
    """A weight that a pipeline rank has in two of its chunks, if there is one."""
    if not case.starts:
        return ""
    for name, nodes in shared_weight_users(case.graph).items():
        stages = {bisect_right(case.starts, case.graph.index[n.name]) - 1 for n in nodes}
        if len({stage % case.layout.pp for stage in stages}) < len(stages):
            return name
    return ""


def _apart(case: Case) -> Truth:
    return not _twice(case)


def _apart_text(case: Case) -> Words:
    x = case.layout
    return (
        f"under pp {x.pp} and vpp {x.vpp} two chunks of a rank have {_twice(case)!r}",
        "plan with another pp or vpp",
    )


EXPORT_RULES = (
    Rule(
        "experts-reduced",
        "etp is tp where ep is 1.",
        "ep at least 2, or etp as large as tp",
        Owner.EXPORTS,
        "layers.py:829: unless ep > 1, gradients of experts are added over dp and cp, wherever copies are",
        _reduced,
        _reduced_text,
    ),
    Rule(
        "expert-bias",
        "etp is 1 where experts add biases.",
        "etp 1, and ep in its place",
        Owner.CORE,
        "transformer_config.py:1589",
        _expert_bias,
        _expert_bias_text,
    ),
    Rule(
        "own-width",
        "tp and etp divide the dims that layers of one's own declare on them.",
        "tp and etp that divide them",
        Owner.CORE,
        "layers.py:842 and 1166",
        _own_width,
        _own_width_text,
    ),
    Rule(
        "latent-sp",
        "Latent attention under tp needs sequence parallelism.",
        "sequence_parallel on, or tp 1",
        Owner.EXPORTS,
        "multi_latent_attention.py:616: the gradient of the keys that all heads share is not added over tp",
        _latent,
        _latent_text,
    ),
    Rule(
        "shared-chunks",
        "No two chunks of a pipeline rank share a weight, as the embedding and what predicts a token further ahead.",
        "heads in one stage with what predicts ahead",
        Owner.EXPORTS,
        "finalize_model_grads.py:233: gradients of one chunk's embedding are added to those of other ranks alone",
        _apart,
        _apart_text,
    ),
)


def runtime_violations(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """Return the rules by which Megaloom's own runtime does not train a layout."""
    return violated(RUNTIME_RULES, Case(layout, graph, workload, cluster))


def export_violations(
    layout: Layout, graph: Graph, workload: Workload, cluster: Cluster, starts: tuple[int, ...] = ()
) -> tuple[Violation, ...]:
    """Return the export rules that a layout breaks; `starts` are the first nodes of its stages."""
    return violated(EXPORT_RULES, Case(layout, graph, workload, cluster, starts))


def exportable(layouts: Layouts, graph: Graph, workload: Workload, cluster: Cluster) -> Truth:
    """Return a mask of the layouts that break no rule of exports to megatron-core."""
    case = Case(layouts, graph, workload, cluster)
    return all_of(rule.holds(case) for rule in EXPORT_RULES)


def caveats(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[str, ...]:
    """Return the violations of runtime and export rules as sentences for the reasons of a plan."""
    said = {
        "`megaloom train` cannot run this plan": runtime_violations,
        "Exports to Megatron-LM are refused": export_violations,
    }
    found = ((head, v) for head, asked in said.items() for v in asked(layout, graph, workload, cluster))
    return tuple(f"{head}: {v.message} [{v.rule}]; {v.fix}." for head, v in found)
