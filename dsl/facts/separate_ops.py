"""Memory traffic of ops that torch runs one by one: the elements that their kernels read and write.

A layer that runs by its body has no fused chains. `traffic` counts what one primitive adds, forward and backward, from
its evaluation in torch and the formulas of its gradient.
"""

from __future__ import annotations

from megaloom.dsl.base_ops import COPY, SUM
from megaloom.dsl.ops.weight import Weight
from megaloom.dsl.work_kinds import Elements, Traffic

from .primitives import Program, Step


def traffic(p: Program, step: Step, elements: Elements) -> tuple[Traffic, bool]:
    """Return the traffic of a primitive, and of the sums of gradients and changes of order around it.

    elements: of a tensor on one device. The second item is True if this counts all kernels of the primitive.
    """
    v = step.value
    own = v.op.torch_traffic(v, elements)
    out = own or Traffic()
    inputs = {id(x.source) for x in p.inputs}
    for a in {id(a.source): a for a in v.args if not isinstance(a.op, Weight) and id(a.source) not in p.data}.values():
        n = elements(a)
        if p.first_readers[id(a.source)] is not step:
            out += Traffic(0, SUM * n, 0, 1)  # gradients of all readers add up
        elif id(a.source) in inputs:  # to batch and sequence, from megatron-core's sequence and batch
            out += Traffic(COPY * n, COPY * n, 1, 1)
    if v is p.value.source:
        out += Traffic(COPY * elements(v), COPY * elements(v), 1, 1)
    return out, own is not None
