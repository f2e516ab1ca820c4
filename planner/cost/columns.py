"""Columns of a cost table, and the groups of columns that are added up."""

from __future__ import annotations

from enum import IntEnum


class CostColumn(IntEnum):
    """One column of a cost table: seconds, then bytes, then elements, of one micro-batch on one device."""

    FORWARD = 0  # seconds of kernels
    BACKWARD = 1
    RECOMPUTE = 2  # seconds of forward kernels that the backward pass repeats
    TP_FORWARD = 3  # seconds of exposed collectives
    CP_FORWARD = 4
    EP_FORWARD = 5
    TP_BACKWARD = 6  # with the collectives that recompute repeats
    CP_BACKWARD = 7
    EP_BACKWARD = 8
    SAVED = 9  # bytes of saved activations
    PARAMS = 10  # elements of trained dense weights
    EXPERT_PARAMS = 11
    FROZEN_PARAMS = 12  # elements of weights that are not trained
    FUSED_PARAMS = 13  # elements of trained weights whose gradients products add to main gradients
    NARROW_COPIES = 14  # bytes of the copies of weights in 8 bits that products read
    HOST = 15  # seconds for which the host launches kernels, forward and backward


FORWARD_COLUMNS = [CostColumn.FORWARD, CostColumn.TP_FORWARD, CostColumn.CP_FORWARD, CostColumn.EP_FORWARD]
# The columns that take each of FORWARD_COLUMNS when the backward pass repeats it.
RECOMPUTE_COLUMNS = [CostColumn.RECOMPUTE, CostColumn.TP_BACKWARD, CostColumn.CP_BACKWARD, CostColumn.EP_BACKWARD]
BACKWARD_COLUMNS = [CostColumn.BACKWARD, *RECOMPUTE_COLUMNS]
STEP_COLUMNS = [*FORWARD_COLUMNS, *BACKWARD_COLUMNS]
# The columns that recompute of a module changes: it repeats the seconds, and frees the bytes.
MODULE_COLUMNS = [*FORWARD_COLUMNS, CostColumn.SAVED]
# Forward and backward column of the collectives of each axis.
AXIS_COLUMNS = {
    "tp": (CostColumn.TP_FORWARD, CostColumn.TP_BACKWARD),
    "cp": (CostColumn.CP_FORWARD, CostColumn.CP_BACKWARD),
    "ep": (CostColumn.EP_FORWARD, CostColumn.EP_BACKWARD),
    "etp": (CostColumn.EP_FORWARD, CostColumn.EP_BACKWARD),
}
# Elements of trained dense weights, of trained weights of experts, and of frozen weights; bytes of narrow copies.
STATE_COLUMNS = [CostColumn.PARAMS, CostColumn.EXPERT_PARAMS, CostColumn.FROZEN_PARAMS, CostColumn.NARROW_COPIES]
