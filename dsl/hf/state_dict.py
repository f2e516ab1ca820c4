"""Convert between the weights of a model and the tensors of a Hugging Face checkpoint.

`from_checkpoint` and `to_checkpoint` are inverse, and only rearrange: reshape, permute, narrow, select, concatenate.
Whatever has these methods of torch tensors is converted, tensors or views of files, and torch is not imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from megaloom.dsl.graph import Model

from .tensor_check import TensorLike, check_tensors
from .tensor_layout import StoredTensor, stored_tensors
from .tensor_names import Names


def from_checkpoint(
    names: Names,
    model: Model,
    checkpoint: Mapping[str, TensorLike],
    concatenate: Callable[[Sequence[TensorLike], int], TensorLike],
) -> dict[str, TensorLike]:
    """Return the weights of a model by their names in `graph(model).weights`, from the tensors of a checkpoint.

    concatenate: `torch.cat`, or a function with its arguments. Raises UserError, as `check_tensors` does, if a tensor
    is missing, has another shape, or does not belong to this model.
    """
    check_tensors(names, model, {name: tuple(x.shape) for name, x in checkpoint.items()})
    stored = {names.current(name): x for name, x in checkpoint.items()}
    out: dict[str, TensorLike] = {}
    copies: dict[
        str, tuple[int, list[TensorLike]]
    ] = {}  # of weights with one tensor per index: the dim, the parts in order
    for t in stored_tensors(names, model):
        for slot, part in zip(t.slots, _split(stored[t.name], t), strict=True):
            if t.index is None:
                out[slot.name] = part
            else:
                dim = slot.dims.index(t.index[0])
                shape = tuple(part.shape)
                copies.setdefault(slot.name, (dim, []))[1].append(part.reshape((*shape[:dim], 1, *shape[dim:])))
    return out | {name: concatenate(parts, dim) for name, (dim, parts) in copies.items()}


def to_checkpoint(
    names: Names,
    model: Model,
    weights: Mapping[str, TensorLike],
    concatenate: Callable[[Sequence[TensorLike], int], TensorLike],
) -> dict[str, TensorLike]:
    """Return the tensors of a checkpoint, from the weights of a model by their names in `graph(model).weights`.

    concatenate: `torch.cat`, or a function with its arguments.
    """
    return {t.name: joined(weights, t, concatenate) for t in stored_tensors(names, model)}


def _split(tensor: TensorLike, t: StoredTensor) -> Iterator[TensorLike]:
    """Yield the weights that a tensor holds, each with its dims in the order of its slot."""
    start = 0
    for x in t.layouts:
        part = tensor
        if (at := x.joined) is not None:
            split = tensor.reshape((*x.axes[:at], t.joined_size, *x.axes[at + 1 :]))
            part = split.narrow(at, start, x.axes[at])
            start += x.axes[at]
        permuted = part.reshape(tuple(x.sizes[i] for i in x.order))
        yield permuted.permute(tuple(x.order.index(i) for i in range(len(x.order))))


def joined(
    weights: Mapping[str, TensorLike], t: StoredTensor, concatenate: Callable[[Sequence[TensorLike], int], TensorLike]
) -> TensorLike:
    """Return the tensor that holds these weights."""
    parts: list[TensorLike] = []
    for slot, x in zip(t.slots, t.layouts, strict=True):
        weight = weights[slot.name]
        one = weight if t.index is None else weight.select(slot.dims.index(t.index[0]), t.index[1])
        parts.append(one.permute(x.order).reshape(x.axes))
    at = t.layouts[0].joined
    tensor: TensorLike = (parts[0] if at is None else concatenate(parts, at)).reshape(t.shape)
    return tensor
