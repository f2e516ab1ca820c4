"""Rules of Megaloom's own runtime: models, precisions and overlaps that it trains.

A plan may break them; `caveats` then says in its reasons that other programs must run it.
"""

from __future__ import annotations

from functools import lru_cache

from megaloom.dsl import (
    Attend,
    Classification,
    DType,
    Graph,
    Layer,
    MaskedToken,
    Node,
    Route,
    Split,
    TokenClassification,
)
from megaloom.dsl.facts.primitives import Program, program
from megaloom.dsl.layers.losses import Stacked
from megaloom.dsl.node import primitives
from megaloom.dsl.ops.attention_core import sequence_dim
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.planner.contract.capability import assumed_environment, capability
from megaloom.planner.contract.choices import MICROBATCH_OVERLAPS, Module
from megaloom.planner.contract.devices import Cluster
from megaloom.planner.contract.engine_parts import NARROW_ROWS, EnginePart
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.module_kinds import Role, module_kind
from megaloom.planner.contract.workload import Precision, Runtime, Workload

from .export_rules import export_violations
from .fsdp import OWN_GRADIENTS
from .packing import document_mixing
from .padding import padding_refusal
from .rule import (
    Case,
    L,
    Owner,
    Rule,
    Truth,
    Violation,
    Words,
    violated,
)
from .shared_weights import sharing_refusal

OWN_RUNTIME = capability(Runtime.MEGALOOM, assumed_environment(Runtime.MEGALOOM, ""))
TRAINED = OWN_RUNTIME.precisions
TRAINED_TEXT = f"{', '.join(TRAINED[:-1])} or {TRAINED[-1]}"


@lru_cache(maxsize=16)
def untrainable(graph: Graph) -> Words | None:
    """Return why the runtime cannot train a model, and the fix; None if it can."""
    ends = [graph.nodes[graph.index[name]] for name in graph.outputs]
    if len(ends) != 1 or not ends[0].is_loss:
        several = len(ends) > 1 and all(n.is_loss for n in ends)
        return (
            f"{graph.name} ends in {', '.join(graph.outputs)}, not in {'one' if several else 'a'} loss",
            "add losses with weighted_sum((1.0, loss), …)"
            if several
            else "end it in a loss, such as `… >> Unembed(head) >> NextToken()`",
        )
    if wrong := _sees_labels(graph):
        return wrong
    for n in graph.nodes:
        if n.weights and not isinstance(n.op, Layer):
            return (
                f"the weight {n.weights[0].name!r} ({n.weights[0].value.at}) is used outside of any layer",
                "the runtime trains the weights of layers, such as the biases of MLP(…, bias=True)",
            )
    return None


def _sees_labels(graph: Graph) -> Words | None:
    """Return the refusal of a model that reads the tokens that it is to predict; None if it does not."""
    unseen = MaskedToken | Classification | TokenClassification | Stacked
    losses = [n for n in graph.nodes if n.is_loss and not isinstance(n.op, unseen)]
    labels = [a for n in losses for a in n.value.args if a.dtype is DType.INDEX]  # a loss without ids predicts no token
    sequences = {d.name for a in labels for d in a.shape if d.name in SEQUENCES}
    for node in graph.nodes:
        for step in program(node).steps:
            op, args = step.value.op, step.value.args
            if not isinstance(op, Attend) or op.causal:
                continue
            queries, keys = (sequence_dim(a.shape).name for a in args[:2])
            if queries == keys and queries in sequences:
                return (
                    f"{node.name} of {graph.name} is not causal, so each position reads the token that "
                    f"{losses[0].name} asks it to predict",
                    "set causal=True, or end the model in another loss, such as MaskedToken()",
                )
    return None


@lru_cache(maxsize=16)
def unrouted_experts(graph: Graph) -> Node | None:
    """Return the first node whose experts are not fed by a router; None if there is none."""
    for n in graph.nodes:
        table = program(n).table
        has_experts = any(table.among_experts(slot.outer) for slot in n.weights)
        if has_experts and not any(isinstance(v.op, Route) for v, *_ in primitives(n.value)):
            return n
    return None


def _precision_refusal(case: Case[L]) -> Words | None:
    assert isinstance(case.layout, Layout), "rules of the runtime look at one layout"
    if case.workload.precision is not Precision.FP8:
        return None if case.workload.precision in TRAINED else precision_refusal(case.workload)
    other = _layer_without_fp8(case.graph, case.layout.split)
    if other is not None:
        return f"the runtime has no fp8 for {other.name} ({type(other.op).__name__})", "use --precision bf16"
    modules = [m for m in case.layout.recomputed_modules if m != Module.CORE_ATTN]
    if modules:
        return f"the runtime does not recompute {' '.join(modules)} in fp8", f"recompute {Module.CORE_ATTN} or in full"
    x, seq = case.layout, case.workload.seq
    tokens = x.micro_batch * seq // (x.cp * x.tp if x.sequence_parallel else x.cp)
    if tokens % NARROW_ROWS:
        return (
            f"{tokens:,} tokens of a micro-batch on a device are no multiple of {NARROW_ROWS}",
            "use --precision bf16",
        )
    if case.layout.fsdp:
        return f"the runtime does not train in fp8 with --shard {case.layout.shard}", "use --shard optimizer"
    return None


@lru_cache(maxsize=256)
def _layer_without_fp8(graph: Graph, split: Split) -> Node | None:
    """Return the first layer in a block whose linear layers Transformer Engine does not compute in fp8; None if none.

    Tables, norms and logits stay in bf16.
    """
    wide = Role.EMBEDDING, Role.POSITIONS, Role.LOGITS, Role.NORM
    own = capability(Runtime.MEGALOOM, assumed_environment(Runtime.MEGALOOM, "", precision=Precision.FP8))
    for nodes in _nodes_by_program(graph):
        kind, engine = module_kind(nodes[0].op), own.execution(nodes[0], split, Precision.FP8).engine
        if nodes[0].weights and EnginePart.LINEAR not in engine and (kind is None or kind.role not in wide):
            return nodes[0]
    return None


def _precision(case: Case[L]) -> Truth:
    return _precision_refusal(case) is None


def precision_refusal(workload: Workload) -> Words:
    """Return the message and the fix for a precision that the runtime does not train in."""
    return f"the runtime does not train in {workload.precision}", f"use {TRAINED_TEXT}"


def _precision_text(case: Case[Layout]) -> Words:
    return _precision_refusal(case) or ("", "")


def _loss(case: Case[L]) -> Truth:
    return untrainable(case.graph) is None


def _loss_text(case: Case[Layout]) -> Words:
    return untrainable(case.graph) or ("", "")


def _documents(case: Case[L]) -> Truth:
    return document_mixing(case.graph) is None


def _documents_text(case: Case[Layout]) -> Words:
    return document_mixing(case.graph) or ("", "")


def _experts(case: Case[L]) -> Truth:
    return case.layout.ep * case.layout.etp == 1 or unrouted_experts(case.graph) is None


def _experts_text(case: Case[Layout]) -> Words:
    x, node = case.layout, unrouted_experts(case.graph)
    name = node.name if node else ""
    return (
        f"{name} has experts without a router, which cannot be sharded over ep {x.ep} x etp {x.etp}",
        "use ep 1 and etp 1, or a MoE layer",
    )


def _padding_refusal(case: Case[L]) -> Words | None:
    assert isinstance(case.layout, Layout), "rules of the runtime look at one layout"
    return _first_padding_refusal(case.graph, case.layout.split)


@lru_cache(maxsize=256)
def _first_padding_refusal(graph: Graph, split: Split) -> Words | None:
    """Return the first refusal of a padded dim. Layers with a torch module of their own are not computed by a body."""
    bodies = [n for n, *_ in _nodes_by_program(graph) if not n.is_input and not hasattr(n.op, "module")]
    return next((refusal for n in bodies if (refusal := padding_refusal(n, split))), None)


@lru_cache(maxsize=16)
def _nodes_by_program(graph: Graph) -> tuple[tuple[Node, ...], ...]:
    """Return the nodes that share a program, which run alike, for each program in the order of the first of them."""
    out: dict[Program, list[Node]] = {}
    for n in graph.nodes:
        out.setdefault(program(n), []).append(n)
    return tuple(map(tuple, out.values()))


def _padding(case: Case[L]) -> Truth:
    return _padding_refusal(case) is None


def _padding_text(case: Case[Layout]) -> Words:
    return _padding_refusal(case) or ("", "")


def _sharing_refusal(case: Case[L]) -> Words | None:
    assert isinstance(case.layout, Layout), "rules of the runtime look at one layout"
    return sharing_refusal(case.graph, case.layout.split)


def _sharing(case: Case[L]) -> Truth:
    return _sharing_refusal(case) is None


def _sharing_text(case: Case[Layout]) -> Words:
    return _sharing_refusal(case) or ("", "")


def _overlaps(case: Case[L]) -> Truth:
    holds: Truth = case.layout.microbatch_overlap_bits & ~int(OWN_RUNTIME.microbatch_overlaps) == 0
    return holds


def _overlaps_text(case: Case[Layout]) -> Words:
    named = " ".join(o for o in case.layout.overlaps if o in MICROBATCH_OVERLAPS)
    return f"the runtime does not run `--overlap {named}`", "use `--overlap gradients weights`, or export the plan"


def _replicas(case: Case[L]) -> Truth:
    holds: Truth = case.layout.replicas == 1
    return holds


def _replicas_text(case: Case[Layout]) -> Words:
    return f"the runtime does not run {case.layout.replicas} replicas", "use --replicas 1, or export the plan"


RUNTIME_RULES = (
    OWN_GRADIENTS,
    Rule(
        id="runtime-replicas",
        sentence="The runtime shares state over all data-parallel ranks, or none.",
        fix="use --replicas 1, or export the plan",
        owner=Owner.RUNTIME,
        source="nobody has shown that the result is right",
        holds=_replicas,
        explain=_replicas_text,
    ),
    Rule(
        id="runtime-precision",
        sentence=f"The runtime trains in {TRAINED_TEXT}; in fp8 by Transformer Engine, if all blocks consist of "
        "attention and MLPs, without sharded weights, and without recompute of modules other than core_attn.",
        fix=f"use {TRAINED_TEXT}, or export the plan",
        owner=Owner.RUNTIME,
        source="megatron-core has the other precisions only with Transformer Engine; experts and other layers in fp8 "
        "have not been shown to be right",
        holds=_precision,
        explain=_precision_text,
    ),
    Rule(
        id="runtime-loss",
        sentence="The runtime trains models that end in a loss, and do not read the tokens that they predict.",
        fix="end the model in a loss that fits it",
        owner=Owner.RUNTIME,
        source="there is nothing to minimise, or the model copies its input",
        holds=_loss,
        explain=_loss_text,
    ),
    Rule(
        id="runtime-documents",
        sentence="In a model with document indices, only attention reads other positions, and those of the same "
        "document only.",
        fix="give the indices to all layers, or train without them",
        owner=Owner.RUNTIME,
        source="a packed sequence must compute what its documents compute one by one",
        holds=_documents,
        explain=_documents_text,
    ),
    Rule(
        id="runtime-experts",
        sentence="The runtime shards experts over ep and etp only if a router sends them tokens, as in a MoE.",
        fix="use ep 1 and etp 1",
        owner=Owner.RUNTIME,
        source="experts that read all tokens run unsharded on each device",
        holds=_experts,
        explain=_experts_text,
    ),
    Rule(
        id="runtime-padding",
        sentence="The runtime does not join, slice or normalize over a dim that is padded.",
        fix='use policy "whole" for the dim, or a tp that divides it',
        owner=Owner.RUNTIME,
        source="the padding would be joined, sliced or counted in the mean as if it were data",
        holds=_padding,
        explain=_padding_text,
    ),
    Rule(
        id="runtime-sharing",
        sentence="The runtime shares a weight between layers that shard it alike, and compute with it by their bodies "
        "or as the table of Embed, Positions or Unembed.",
        fix="give each layer a weight of its own",
        owner=Owner.RUNTIME,
        source="one parameter has one shard on each device, and one place in a module",
        holds=_sharing,
        explain=_sharing_text,
    ),
    Rule(
        id="runtime-overlap",
        sentence="The runtime overlaps only gradient reduction and weight gathers.",
        fix="leave tensor and experts out of `--overlap`, or export the plan",
        owner=Owner.RUNTIME,
        source="megatron-core overlaps tensor only with Transformer Engine, and experts only in its own GPTModel",
        holds=_overlaps,
        explain=_overlaps_text,
    ),
)


def runtime_violations(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """Return the rules by which Megaloom's own runtime does not train a layout."""
    return violated(RUNTIME_RULES, Case(layout, graph, workload, cluster))


def unfused_cores(graph: Graph, layout: Layout, workload: Workload, cluster: Cluster) -> tuple[Node, ...]:
    """Return the nodes whose attention or scan the runtime computes without a fused kernel on these devices."""
    return _unfused_cores(graph, layout.split, workload.precision, cluster.device.name)


@lru_cache(maxsize=256)
def _unfused_cores(graph: Graph, split: Split, precision: Precision, device: str) -> tuple[Node, ...]:
    own = capability(Runtime.MEGALOOM, assumed_environment(Runtime.MEGALOOM, device))
    alike = [nodes for nodes in _nodes_by_program(graph) if own.execution(nodes[0], split, precision).recomputes_cores]
    return tuple(sorted((n for nodes in alike for n in nodes), key=lambda n: graph.index[n.name]))


def caveats(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[str, ...]:
    """Return, as reasons of a plan, what keeps programs from running it or from reaching its predicted time."""
    case = (layout, graph, workload, cluster)
    own, export = runtime_violations(*case), export_violations(*case)
    found = [f"`megaloom train` cannot run this plan: {_refusal(v)}" for v in own]
    nodes = () if own else unfused_cores(graph, layout, workload, cluster)
    attention = [n for n in nodes if any(isinstance(v.op, Attend) for v, *_ in primitives(n.value))]
    for unfused, how in ((attention, "blocks of queries"), ([n for n in nodes if n not in attention], "chunks")):
        if unfused:
            found.append(
                f"`megaloom train` has no fused kernel for {unfused[0].name} (layers of this kind: {len(unfused)}). It "
                f"computes {'attention' if unfused is attention else 'scans'} by {how}, and the prediction includes it."
            )
    return (*found, *(f"Exports to Megatron-LM are refused: {_refusal(v)}" for v in export))


def _refusal(v: Violation) -> str:
    return f"{v.message} [{v.rule}]; {v.fix}."
