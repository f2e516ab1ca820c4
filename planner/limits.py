"""What megaloom's own runtime does not train. Such plans are made all the same, for other programs, and say so.

Protocol: `limits` are the violations of these rules, as `violations` are those of the rules that all layouts meet.
"""

from __future__ import annotations

from megaloom.dsl import MLP, ClampedGLU, DType, GeGLU, Graph, Layer, MoE, Node, SwiGLU, Unembed
from megaloom.dsl.splits import SPLITS, among_experts

from .cluster import Cluster
from .layout import Layout, Precision, Workload
from .rule import By, Case, Rule, Truth, Violation, Words, broken

TRAINED = (Precision.FP32, Precision.BF16)
FEEDS = (MLP, GeGLU, SwiGLU, ClampedGLU)  # the feed-forwards that megatron-core's module computes


def untrainable(graph: Graph) -> Words | None:
    """Why a model is none that goes from one input of tokens to the logits of the next, through layers, if so."""
    inputs = [n.name for n in graph.nodes if n.input]
    tokens = all(n.value.dtype is DType.INDEX for n in graph.nodes if n.input)
    last = graph.nodes[graph.index[graph.outputs[0]]]
    if len(inputs) != 1 or not tokens or len(graph.outputs) != 1 or not isinstance(last.op, Unembed):
        several = f", and {graph.name} has {len(inputs)} inputs" if len(inputs) > 1 else ""
        return (
            f"{graph.name} goes from {', '.join(inputs) or 'nothing'} to {', '.join(graph.outputs)}",
            f"the runtime trains models of next tokens: ids() in front, one output, and that an Unembed{several}",
        )
    for n in graph.nodes:
        if n.weights and not isinstance(n.op, Layer):
            return (
                f"the weight {n.weights[0].name!r} ({n.weights[0].value.at}) is used outside of any layer",
                "the runtime trains the weights of layers, such as the biases of MLP(…, bias=True)",
            )
    return None


def undivided(graph: Graph) -> Node | None:
    """The first node whose experts run one by one, each of them whole, as megatron-core's module has no such."""
    for n in graph.nodes:
        table = {**SPLITS, **getattr(n.op, "splits", {})}
        if any(among_experts(table, slot.outer) for slot in n.weights) and not _dispatched(n.op):
            return n
    return None


def _dispatched(op: object) -> bool:
    if type(op) is not MoE:
        return False
    biased = isinstance(op.shared, ClampedGLU) or getattr(op.shared, "bias", False)
    return type(op.expert) in FEEDS and (op.shared is None or (type(op.shared) in FEEDS and not biased))


def _precision(case: Case) -> Truth:
    return case.workload.precision in TRAINED


def _precision_told(case: Case) -> Words:
    return f"the runtime does not train in {case.workload.precision}", f"{' or '.join(TRAINED)} would do"


def _tokens(case: Case) -> Truth:
    return untrainable(case.graph) is None


def _tokens_told(case: Case) -> Words:
    return untrainable(case.graph) or ("", "")


def _experts(case: Case) -> Truth:
    return case.layout.ep * case.layout.etp == 1 or undivided(case.graph) is None


def _experts_told(case: Case) -> Words:
    x, node = case.layout, undivided(case.graph)
    name = node.name if node else ""
    return (
        f"{name} has experts that run one by one: they are not divided over ep {x.ep} x etp {x.etp}",
        "ep 1 and etp 1 would work, or a MoE of SwiGLU, GeGLU, ClampedGLU or MLP",
    )


LIMITS = (
    Rule(
        "runtime-precision",
        "The runtime trains in fp32 or bf16.",
        f"{' or '.join(TRAINED)}, or an export",
        By.RUNTIME,
        "megatron-core has the others with Transformer Engine alone",
        _precision,
        _precision_told,
    ),
    Rule(
        "runtime-tokens",
        "The runtime trains models that go from one input of tokens to the logits of the next.",
        "an export",
        By.RUNTIME,
        "its schedules carry one hidden state from stage to stage, and its data is text",
        _tokens,
        _tokens_told,
    ),
    Rule(
        "runtime-experts",
        "The runtime divides experts over ep and etp where each is a feed-forward that megatron-core has.",
        "ep 1 and etp 1",
        By.RUNTIME,
        "the bodies of other experts run one by one, each of them whole",
        _experts,
        _experts_told,
    ),
)


def limits(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[Violation, ...]:
    """Why the runtime does not train this."""
    return broken(LIMITS, Case(layout, graph, workload, cluster))


def caveats(layout: Layout, graph: Graph, workload: Workload, cluster: Cluster) -> tuple[str, ...]:
    """The same, in sentences for who reads a plan."""
    return tuple(
        f"`megaloom train` does not run it, other programs may: {limit.message} [{limit.rule}]; {limit.fix}."
        for limit in limits(layout, graph, workload, cluster)
    )
