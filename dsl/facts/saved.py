"""Saved activations: the tensors that the forward pass keeps for the backward pass.

`saved_tensors` lists those of one node on one device. Several nodes may save one tensor: `saved_parts(nodes,
recompute)` gives each node its part, so that a sum over nodes counts each distinct tensor once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Literal

from attrs import frozen

from megaloom.dsl.dims import (
    Dim,
    DType,
    Shape,
    Sizes,
)
from megaloom.dsl.layer import Layer
from megaloom.dsl.node import Node
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.sharding_table import Split
from megaloom.dsl.value import Value
from megaloom.dsl.work_kinds import WorkKind

from .primitives import (
    Program,
    Step,
    eager_tensors,
    origin,
    program,
)
from .recompute import (
    CORE,
    NO_MODULES,
    RecomputedBy,
    is_norm,
    modules_of_ops,
    ordered_modules,
    recompute_mode,
)

AttentionTensor = Literal["projected", "rotated", "output", "gathered", "log_sum_exp"]
"""The part that a tensor has in attention, which frameworks store in different ways.

projected: queries or keys before their norm, as the projection gives them. rotated: queries or keys after rotary
positions. output: the result of the attention core. gathered: keys and values of other devices. log_sum_exp: of the
scores of each query, which a fused kernel saves.
"""


@frozen
class Saved:
    """A tensor that the backward pass reads, as one device holds it.

    recomputed_by: the modules that recompute it, so that it is not saved. port: its position in `Node.inputs` if it is
    an input of the node, -1 for the output, else None. product: a matrix product with a weight reads it, which can save
    a copy in fewer bits instead. other: another op reads it. eager_tensors: of the op that computes it, see
    `Pointwise`. experts: whether experts compute it. attention: its part in attention, if it has one.
    """

    elements: int
    dtype: DType
    what: str
    recomputed_by: RecomputedBy = NO_MODULES
    port: int | None = None
    product: bool = False
    other: bool = True
    eager_tensors: int = 0
    attention: AttentionTensor | None = None
    experts: bool = False


@frozen
class SavedPart:
    """The part of a node's saved tensors that counts for this node, where several nodes save one tensor.

    ports: of the saved inputs and output that count for it; tensors without a port always do. block_inputs: ports of
    the inputs of a block, which full recompute saves. recomputed: full recompute recomputes the node. norm: the node is
    a norm in front of layers, which the module `layernorm` recomputes. norm_ports: those of `ports` that such norms
    give.
    """

    ports: frozenset[int]
    block_inputs: tuple[int, ...] = ()
    recomputed: bool = False
    norm: bool = False
    norm_ports: frozenset[int] = frozenset()

    def tensors(
        self, saved: Iterable[Saved], inputs: tuple[Saved, ...], modules: RecomputedBy = NO_MODULES
    ) -> Iterator[Saved]:
        """Yield the tensors that the node saves if these modules are recomputed."""
        if not self.recomputed:
            own = (s for s in saved if s.port is None or s.port in self.ports)
            yield from (s for s in own if not modules & self.recomputed_by(s))
        yield from (inputs[port] for port in self.block_inputs)

    def recomputed_by(self, saved: Saved) -> RecomputedBy:
        """Return the modules that recompute a saved tensor."""
        return saved.recomputed_by | {"layernorm"} if saved.port in self.norm_ports else saved.recomputed_by


def selected_modules(recompute: str, names: Iterable[str] = CORE) -> RecomputedBy:
    """Return the modules that are recomputed: `names` under selective recompute, else none. Raises UserError."""
    return frozenset(ordered_modules(names)) if recompute_mode(recompute) == "selective" else NO_MODULES


def saved_parts(nodes: Iterable[Node], recompute: str = "none") -> Iterator[tuple[Node, SavedPart]]:
    """Yield each node with its part of the saved tensors. A tensor that several nodes save counts for the first.

    Raises UserError for an unknown recompute mode.
    """
    mode, nodes = recompute_mode(recompute), tuple(nodes)
    blocks = {n.name: n.block for n in nodes}
    norms = set(_norms(nodes))
    claimed: set[str] = set()

    def first(node: Node, port: int) -> bool:
        name = node.name if port < 0 else node.inputs[port]
        new = name not in claimed
        claimed.add(name)
        return new

    for n in nodes:
        if mode == "full" and n.block is not None:
            entering = (i for i, name in enumerate(n.inputs) if blocks.get(name) != n.block)
            yield n, SavedPart(frozenset(), tuple(i for i in entering if first(n, i)), recomputed=True)
        else:
            ports = frozenset(port for port in _ports(program(n)) if first(n, port))
            norm_ports = frozenset(port for port in ports if port >= 0 and n.inputs[port] in norms)
            yield n, SavedPart(ports, norm=n.name in norms, norm_ports=norm_ports)


def _norms(nodes: tuple[Node, ...]) -> Iterator[str]:
    """Yield the norms in front of the layers of a block whose input has other readers, such as a residual."""
    readers: dict[str, list[Node]] = {}
    for n in nodes:
        for name in n.inputs:
            readers.setdefault(name, []).append(n)
    for n in nodes:
        if n.block is not None and is_norm(program(n)) and len(readers[n.inputs[0]]) > 1:
            after = readers.get(n.name, [])
            if after and all(isinstance(r.op, Layer) and r.block == n.block for r in after):
                yield n.name


def saved_tensors(p: Program, sizes: Sizes, split: Split) -> Iterator[Saved]:
    """Yield the tensors that the backward pass of a node reads, as one device holds them."""
    for x in _unsized(p):
        yield Saved(
            elements=p.local_elements(x.shape, x.outer, sizes, split, data=_is_data(x)),
            dtype=x.dtype,
            what=x.what,
            recomputed_by=x.recomputed_by,
            port=x.port,
            product=x.product,
            other=x.other,
            eager_tensors=x.eager_tensors,
            attention=x.attention,
            experts=p.table.among_experts(x.outer),
        )
    for step in p.steps:
        for v in step.gathered(split):  # each device has its own part already
            n = (split.cp - 1) * p.local_elements(v.shape, step.outer, sizes, split)
            modules = modules_of_ops(p)[id(step.value)]
            yield Saved(n, v.dtype, "keys and values of other devices", modules, attention="gathered")


def _is_data(x: _Unsized) -> bool:
    """Return whether a saved tensor is ids or a mask of the data, of which every device of tp has all."""
    return x.dtype is DType.INDEX or (x.dtype is DType.MASK and x.port is not None)


def saved_inputs(p: Program, sizes: Sizes, split: Split) -> Iterator[Saved]:
    """Yield the inputs of a node, as one device holds them."""
    for i, x in enumerate(p.inputs):
        n = p.local_elements(x.shape, (), sizes, split, data=x.dtype in (DType.INDEX, DType.MASK))
        yield Saved(n, x.dtype, "input", port=i)


@frozen
class _Unsized:
    """A saved tensor without a size; `outer` are the dims of the copies around it."""

    shape: Shape
    dtype: DType
    outer: tuple[Dim, ...]
    what: str
    recomputed_by: RecomputedBy = NO_MODULES
    port: int | None = None
    product: bool = False
    other: bool = True
    eager_tensors: int = 0
    attention: AttentionTensor | None = None


@lru_cache(maxsize=1 << 12)
def _unsized(p: Program) -> tuple[_Unsized, ...]:
    """Return the saved tensors of a node. A chain of pointwise ops saves its inputs and recomputes its inside."""
    return tuple(_read(p, {id(s.value): s for s in p.steps}))


def _read(p: Program, steps: dict[int, Step]) -> Iterator[_Unsized]:
    ports = {id(v.source): i for i, v in reversed(list(enumerate(p.inputs)))}
    seen: set[int] = set()
    attention = _attention_tensors(p)
    entries = [(step.value, tuple(_entries(p, step.value))) for step in p.steps]
    reads = {(id(x.source), _weighs(v)) for v, read in entries for x in read}
    for step, (v, read) in zip(p.steps, entries, strict=True):
        for x in read:
            if id(x.source) in seen or isinstance(x.source.op, Weight):
                continue
            seen.add(id(x.source))
            around, maker = steps.get(id(origin(x))), steps.get(id(x.source))
            port = -1 if x.source is p.value.source else ports.get(id(x.source))
            yield _Unsized(
                shape=x.shape,
                dtype=x.dtype,
                outer=around.outer if around else (),
                what=maker.name if maker else "input",
                recomputed_by=_recomputed(p, maker.value) if maker and port is None else NO_MODULES,
                port=port,
                product=(id(x.source), True) in reads,
                other=(id(x.source), False) in reads,
                eager_tensors=eager_tensors(maker.value.op) if maker else 0,
                attention=attention.get(id(x.source)),
            )
        for what, shape, dtype in v.op.saved_buffers(v):
            part: AttentionTensor | None = "log_sum_exp" if v.op.work_kind is WorkKind.ATTENTION else None
            yield _Unsized(shape, dtype, step.outer, what, recomputed_by=modules_of_ops(p)[id(v)], attention=part)
    yield from _weighted(p, steps)


def _attention_tensors(p: Program) -> dict[int, AttentionTensor]:
    """Return the part of values in attention, by the identity of their source."""
    out: dict[int, AttentionTensor] = {}
    for v in (step.value for step in p.steps if step.value.op.work_kind is WorkKind.ATTENTION):
        out[id(v)] = "output"
        for x in (a.source for a in v.args[:2]):
            while x.op.work_kind in (WorkKind.ROTARY, WorkKind.NORM):
                before = x.args[0].source
                if x.op.work_kind is WorkKind.ROTARY:
                    out[id(x)] = "rotated"
                else:
                    out[id(before)] = "projected"
                x = before
    return out


def _weighted(p: Program, steps: dict[int, Step]) -> Iterator[_Unsized]:
    """Yield what experts save to multiply the input of their last product by the router's weights (see `Combine`).

    The kernel of a gated unit multiplies too (megatron-core 0.16.1, fusions/fused_bias_swiglu.py: weighted_swiglu).
    After another activation the multiplication is an op of its own, which saves its input (transformer/moe/experts.py).
    """
    products = [step for step in p.steps if step.outer and step.value.op.work_kind is WorkKind.PRODUCT]
    if products and any(step.value.op.work_kind is WorkKind.COMBINE for step in p.steps):
        h = products[-1].value.args[0].source
        if len(h.args) == 1 and h.op.elementwise:
            what = f"{steps[id(h)].name}, weighted"
            yield _Unsized(h.shape, h.dtype, products[-1].outer, what, recomputed_by=_recomputed(p, h))


def _recomputed(p: Program, v: Value) -> RecomputedBy:
    """Return the modules that recompute the output of a primitive. That of the attention core is saved."""
    return modules_of_ops(p)[id(v)] - frozenset(CORE)


def _weighs(v: Value) -> bool:
    """Return whether this is a matrix product with a weight."""
    return v.op.work_kind is WorkKind.PRODUCT and any(isinstance(x.source.op, Weight) for x in v.args)


def _entries(p: Program, v: Value) -> Iterator[Value]:
    saved_values = v.op.saved_by_torch(v) if p.separate else v.op.saved_values(v)
    if v.op.work_kind is WorkKind.PRODUCT and any(isinstance(a.op, Weight) and a.op.frozen for a in v.args):
        saved_values = tuple(a for a in v.args if isinstance(a.op, Weight))  # no weight gradient reads the input
    for x in saved_values:
        yield from p.entries(x)


def _ports(p: Program) -> Iterator[int]:
    return (x.port for x in _unsized(p) if x.port is not None)
