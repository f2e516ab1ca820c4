"""The body of a graph node as a torch module, for layers that have no module of their own. It runs under any layout.

The module holds this rank's shard of each weight of the node, under the weight's name in the layer (`q_norm.scale`).
`forward` evaluates the primitives of the body on local tensors (see `evaluation`), with the transitions that
`dsl.facts.propagation` infers and the planner prices. Hidden states enter and leave as [seq, batch, ..].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core import tensor_parallel
from torch import Tensor, nn

from megaloom.dsl import DType, Gate, Layer, MoE, Node, Op, Route, Slot, Split, Unembed, UserError, Value, Weight
from megaloom.dsl.facts.context_exchange import divides_channels, values_by_channel
from megaloom.dsl.facts.placement import INVARIANT, NodePlacement, Shard, Transition
from megaloom.dsl.facts.primitives import Program, fitted, program
from megaloom.dsl.facts.propagation import propagate
from megaloom.dsl.node import primitives
from megaloom.dsl.ops.loss import is_loss
from megaloom.dsl.sharding_table import SEQUENCES, SHARED_BY_HEADS, Sharded
from megaloom.planner.contract.capability import Execution
from megaloom.planner.rules.padding import padding_refusal
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.build_context import BuildContext, to_declared_order, to_megatron_order
from megaloom.runtime.megatron.padded_shards import mark_padded
from megaloom.runtime.megatron.process_groups import ProcessGroups
from megaloom.runtime.ops.dropout_masks import MaskSource, dropouts
from megaloom.runtime.ops.local_op import padding_of
from megaloom.runtime.ops.tensors import dim_index

from .balancing_loss import Balancing
from .corrections import Correction
from .evaluation import Evaluation, LocalProgram
from .recompute_regions import recompute_regions
from .transitions import perform

EVEN = Sharded("tp")


class Body(nn.Module):
    """A graph node that runs by its body.

    Values are keyed by the identity of the `Value` in the program.
    """

    def __init__(self, node: Node, context: BuildContext, execution: Execution) -> None:
        super().__init__()
        split, self.groups = context.split, context.groups
        self.program = fitted(program(node), split, SHARED_BY_HEADS)
        _check_trainable(node, self.program, split)
        # Equal nodes share one program, whose weights are in the order of each node's weight slots.
        weights = (v for v, *_ in primitives(self.program.value) if isinstance(v.op, Weight))
        slots = {id(v): s for v, s in zip(weights, node.weights, strict=True)}
        placement = propagate(self.program, split)
        self.local = LocalProgram(
            program=self.program,
            placement=placement,
            slots=slots,
            expert_values=_expert_values(self.program, slots, placement),
            regions=recompute_regions(self.program, self.groups.layout.recomputed_modules),
            balanced_moe=node.op if isinstance(node.op, MoE) and node.op.balance else None,
            kernels={id(core.value): core.kernel for core in execution.cores},
            groups=self.groups,
            dropouts={id(v): i for i, v in enumerate(dropouts(self.program.value))},
            by_channel=_by_channel(self.program, placement, split),
            routed=_routed(node.op, self.program),
        )
        self.logits = isinstance(node.op, Unembed)
        self.dtype, self.leaves_vectors = context.config.params_dtype, _is_vectors(self.program.value)
        self.overwrites_logits = False  # True if nothing but this loss reads the logits, which come from an Unembed
        self.names = {i: s.name.removeprefix(f"{node.name}.") for i, s in slots.items()}
        self.gathered_dims = {i: d for i, s in slots.items() if (d := self._gathered_dim(s)) is not None}
        by_rows = {i for i, s in slots.items() if s.name in context.stored_by_rows and s.dims[-1].name != "embed"}
        self.transposed_weights = frozenset(by_rows)  # stored as the embedding that shares them stores them
        for i, slot in slots.items():
            _register(self, self.names[i], self._local_weight(slot, context, i))

    def _gathered_dim(self, slot: Slot) -> int | None:
        """Return the index of the dim over which tp shards a weight that every tp rank computes with; None if none.

        Such a weight belongs to key/value heads, of which there are fewer than tp ranks. megatron-core shards it too.
        """
        tp = self.groups.layout.tp
        few_heads = any(d.name in SHARED_BY_HEADS and d.known < tp and tp % d.known == 0 for d in slot.value.shape)
        if not few_heads or slot.outer or not slot.is_parameter:
            return None
        return next((i for i, d in enumerate(slot.dims) if d.known % tp == 0), None)

    def _local_weight(self, slot: Slot, context: BuildContext, i: int) -> Tensor:
        """Return an uninitialized tensor for this rank's shard of a weight.

        Its attributes say how it is sharded; `modules.parameters` and checkpoints read them.
        """
        table, of_expert = self.program.table, i in self.local.expert_values
        axes = table.axes(slot.outer, slot.value.shape)
        if i in self.gathered_dims:
            axes[slot.dims[self.gathered_dims[i]].name] = "tp"
        dims = slot.dims[::-1] if i in self.transposed_weights else slot.dims
        degrees = [self.groups.layout.degrees.get(axes.get(d.name, ""), 1) for d in dims]
        entries = [table.dims.get(d.name, EVEN) for d in dims]
        sizes = [
            entry.local(d.known, n, context.split) if d.name in axes else d.known
            for entry, d, n in zip(entries, dims, degrees, strict=True)
        ]
        correction = any(v.args[1].source is slot.value for v in self.local.corrected_gates)
        dtype = torch.float32 if correction else context.config.params_dtype
        values = torch.empty(sizes, dtype=dtype, device=device.current())
        p = nn.Parameter(values, requires_grad=slot.trained) if slot.is_parameter else values
        axis = "etp" if of_expert else "tp"
        sharded = next((k for k, d in enumerate(dims) if axes.get(d.name) == axis and degrees[k] > 1), None)
        if of_expert:
            # Expert gradients are reduced over the expert process groups (see `modules.moe`). A weight that etp does
            # not shard is replicated over etp: its gradients are added there, and count once in the gradient norm.
            p.allreduce, p.shared = False, sharded is None and context.groups.etp_rank > 0  # type: ignore[attr-defined]
        if of_expert or sharded is not None:
            tensor_parallel.set_tensor_model_parallel_attributes(p, True, -1 if sharded is None else sharded, 1)
        pads = (d.name in axes and entry.policy == "pad" for d, entry in zip(dims, entries, strict=True))
        if (padded := next((k for k, pad in enumerate(pads) if pad), None)) is not None:
            mark_padded(p, padded)
        p.constant = slot.std == 0  # type: ignore[attr-defined]
        return p

    @property
    def expert_weight_names(self) -> frozenset[str]:
        """Return the names of the weights that each expert has of its own."""
        return frozenset(name for i, name in self.names.items() if i in self.local.expert_values)

    def corrections(self) -> list[Correction]:
        """Return the corrections of the scores of this node's gates."""
        names = {id(v): self.names[id(v.args[1].source)] for v in self.local.corrected_gates}
        return [Correction(parameter_or_buffer(self, names[i]), counts) for i, counts in self.local.routed.items()]

    def forward(self, *inputs: Tensor, masks: MaskSource, balancing: Balancing | None = None) -> Tensor:
        entering = zip(self.program.inputs, inputs, strict=True)
        values = {id(v): to_declared_order(v, x) for v, x in entering}
        evaluation = Evaluation(self.local, values, masks if self.training else None, balancing, self.overwrites_logits)
        evaluation.values.update((i, self.full_weight(i)) for i in self.names)
        out = evaluation.run()
        out = out.to(self.dtype) if self.leaves_vectors else out
        out = _hide_padding(self.program, out, self.groups) if self.logits else out
        return to_megatron_order(self.program.value, out.view_as(out))  # a view: recompute hooks stay on this tensor

    def full_weight(self, i: int) -> Tensor:
        """Return a weight as this rank computes with it, in declared order.

        It is gathered over tp if only its storage is sharded.
        """
        weight = parameter_or_buffer(self, self.names[i])
        weight = weight.T if i in self.transposed_weights else weight
        if i not in self.gathered_dims:
            return weight
        dim = self.gathered_dims[i]
        gather = Transition("tp", Shard(self.local.slots[i].dims[dim].name), INVARIANT)
        return perform(gather, weight, dim, self.groups)


def parameter_or_buffer(module: nn.Module, name: str) -> Tensor:
    """Return the parameter or buffer of this name."""
    path, _, last = name.rpartition(".")
    tensor = getattr(module.get_submodule(path), last)
    assert isinstance(tensor, Tensor)
    return tensor


def _expert_values(p: Program, slots: dict[int, Slot], placement: NodePlacement) -> dict[int, bool]:
    """Return the tensors that each expert has of its own: its weights, and values made of weights alone.

    Keys are identities of values. The value of the dict is True if etp replicates the tensor.
    """
    if not any(isinstance(s.value.op, Route) for s in p.steps):
        return {}
    weights = [(i, s.outer, s.value.shape) for i, s in slots.items()]
    derived = [(id(s.value), s.outer, s.value.shape) for s in p.steps if id(s.value) in placement.weights_only]
    return {
        i: "etp" not in p.table.axes(outer, shape).values()
        for i, outer, shape in (*weights, *derived)
        if p.table.among_experts(outer)
    }


def _routed(op: Op, p: Program) -> dict[int, Tensor]:
    """Return counts of tokens, zeros [experts], for the corrected gate of a mixture, by the identity of its value."""
    gates = [s.value for s in p.steps if isinstance(s.value.op, Gate) and s.value.op.corrected]
    sizes = {id(v): v.shape["experts"].known for v in gates if isinstance(op, MoE)}
    return {i: torch.zeros(n, dtype=torch.float32, device=device.current()) for i, n in sizes.items()}


def _hide_padding(p: Program, logits: Tensor, groups: ProcessGroups) -> Tensor:
    """Return local logits with the most negative number in the columns that pad the vocabulary."""
    vocab, i = p.value.shape["vocab"], dim_index(p.value.shape, "vocab")
    padding = padding_of(vocab, logits, i, groups.of_axis("tp")) if p.table.axis(vocab) == "tp" else None
    return logits if padding is None else logits.masked_fill(padding, torch.finfo(logits.dtype).min)


def _is_vectors(v: Value) -> bool:
    """Return whether a value has vectors, such as hidden states, which other nodes read in the compute dtype.

    Inside a node, sums and what is computed from them have 32 bits. So have numbers of tokens, such as losses.
    """
    per_token = {"batch", *SEQUENCES}
    return v.dtype not in (DType.INDEX, DType.MASK) and not is_loss(v) and any(d.name not in per_token for d in v.shape)


def _by_channel(p: Program, placement: NodePlacement, split: Split) -> frozenset[int]:
    """Return the values that are in channel shards; none if context-parallel ranks gather sequences instead."""
    exchanges = split.cp > 1 and divides_channels(p, placement.weights_only, split)
    return values_by_channel(p, placement.weights_only) if exchanges else frozenset()


def _register(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a tensor as a parameter or buffer. A name with dots creates submodules."""
    *path, last = name.split(".")
    for part in path:
        if part not in dict(module.named_children()):
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(last, tensor)
    else:
        module.register_buffer(last, tensor)


def _check_trainable(node: Node, p: Program, split: Split) -> None:
    """Raise UserError if the body of a node cannot be trained under this split."""
    value = p.value
    at = f"{node.name} ({getattr(node.op, 'at', '')})"
    inside = [op for op in _layers(value) if isinstance(op, MoE) and op is not value.op]
    if any(op.balance for op in inside):
        raise UserError(
            f"{at} contains a MoE with a balancing loss, which a MoE inside another layer cannot have\n"
            "set balance=0 in that MoE"
        )
    if any(op.corrected for op in inside):
        raise UserError(
            f"{at} contains a MoE with corrected scores, which training moves only in a MoE that is a layer by itself\n"
            "set corrected=False in that MoE, or set transparent = True in the class of the layer around it"
        )
    routes = any(isinstance(v.op, Route) for v, *_ in primitives(value))
    for _, _, outer in primitives(value):
        if split.ep * split.etp > 1 and not routes and p.table.among_experts(outer):
            raise UserError(
                f"{at} has experts but no Route, so they cannot be sharded over ep {split.ep} x etp {split.etp}\n"
                "use --ep 1 --etp 1, or declare the experts in a MoE"
            )
    if refusal := padding_refusal(node, split):
        raise UserError("\n".join(refusal))


def _layers(value: Value) -> Iterator[Layer]:
    """Yield the layers applied inside a node, the node's own included."""
    seen, todo = {id(a) for a in value.args}, [value]
    while todo:
        v = todo.pop()
        if id(v) not in seen:
            seen.add(id(v))
            if isinstance(v.op, Layer):
                yield v.op
            todo += [*v.args, *([] if v.body is None else [v.body])]
