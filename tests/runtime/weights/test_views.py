"""Views against the same rearrangements of torch tensors: equal values, only what is needed is read, inverse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megaloom.runtime.weights.views import Box, View, held, solve, source, stored_boxes, values_of

CASES: dict[str, tuple[Callable[[Any, Any], Any], tuple[int, ...], tuple[int, ...]]] = {
    "transposed": (lambda x, y: x.T, (6, 4), (1,)),
    "heads": (lambda x, y: x.unflatten(1, (2, -1)).permute(1, 2, 0).flatten(0, 1), (6, 4), (1,)),
    "by group": (
        lambda x, y: torch.cat([x.unflatten(0, (2, 2)), y[:, None]], 1).flatten(0, 2).chunk(2)[1],
        (4, 3, 5),
        (2, 3, 5),
    ),
    "two halves": (
        lambda x, y: torch.cat([p.chunk(3, 0)[2] for p in torch.cat([x, y]).chunk(2, 0)], 0),
        (6, 2),
        (6, 2),
    ),
    "one of two": (lambda x, y: x.reshape(2, 3, 2).narrow(2, 1, 1).reshape(2, 3).permute(1, 0), (2, 6), (1,)),
    "stacked": (lambda x, y: torch.stack([x, y], 1)[:, 1], (3, 2), (3, 2)),
    "padded": (lambda x, y: torch.cat([x, x.new_zeros([2, 3])], 0).chunk(2, 0)[1], (4, 3), (1,)),
    "across": (lambda x, y: x.flatten().narrow(0, 5, 9).reshape(3, 3).narrow(1, 1, 2), (4, 1, 6), (1,)),
    "ones": (lambda x, y: x.reshape(1, 6, 1, 4, 1).select(1, 2).reshape(-1), (6, 4), (1,)),
}


def numbered(shape: tuple[int, ...], first: int = 0) -> Tensor:
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("case", CASES)
def test_a_view_has_the_values_of_tensors(case: str) -> None:
    rearrange, *shapes = CASES[case]
    x, y = (numbered(shape, 100 * i) for i, shape in enumerate(shapes))
    expected, view = rearrange(x, y), rearrange(held(x), held(y))
    assert isinstance(view, View)
    assert view.shape == tuple(expected.shape)
    assert torch.equal(values_of(view), expected)


@pytest.mark.parametrize("case", CASES)
def test_the_stored_boxes_of_a_view_have_its_values(case: str) -> None:
    rearrange, *shapes = CASES[case]
    tensors = {name: numbered(shape, 1 + 100 * i) for i, (name, shape) in enumerate(zip("xy", shapes, strict=True))}
    value = rearrange(*tensors.values())
    found = list(stored_boxes(rearrange(*(held(x, name) for name, x in tensors.items())), value))
    for name, box, values in found:
        assert torch.equal(values, tensors[name][tuple(slice(r.start, r.stop) for r in box)])
    elements = sorted(e for *_, values in found for e in values.flatten().tolist())
    assert elements == sorted(e for e in value.flatten().tolist() if e)  # zeros pad


@given(st.data())
def test_any_part_of_any_reshape(data: st.DataObject) -> None:
    sizes = st.sampled_from([(24,), (2, 12), (4, 6), (2, 3, 4), (1, 24, 1), (3, 2, 2, 2), (12, 1, 2), (6, 4)])
    old, middle, new = (data.draw(sizes) for _ in range(3))
    x = numbered(old)
    expected, view = x, held(x, "x")
    for shape in (middle, new):
        order = data.draw(st.permutations(range(expected.ndim)))
        expected, view = expected.permute(order).reshape(shape), view.permute(order).reshape(shape)
    for dim, size in enumerate(new):
        start = data.draw(st.integers(0, size - 1))
        length = data.draw(st.integers(1, size - start))
        expected, view = expected.narrow(dim, start, length), view.narrow(dim, start, length)
    assert torch.equal(view.read(), expected)
    boxes = [(x[tuple(slice(r.start, r.stop) for r in box)], values) for _, box, values in stored_boxes(view, expected)]
    assert all(torch.equal(stored, values) for stored, values in boxes)
    assert sum(values.numel() for _, values in boxes) == expected.numel()


def test_only_the_boxes_of_a_part_are_read() -> None:
    """A tensor-parallel rank's rows of a joint matrix: nothing else is read of the stored tensors."""
    boxes: list[tuple[str, Box]] = []

    def stored(name: str, rows: int) -> View:
        def reader(box: Box) -> Tensor:
            boxes.append((name, box))
            return torch.zeros([len(r) for r in box])

        return source((rows, 8), torch.float32, reader)

    q, k = stored("q", 12).unflatten(0, (4, 3)), stored("k", 6).unflatten(0, (2, 3))
    joint = torch.cat([q.unflatten(0, (2, 2)), k[:, None]], 1).flatten(0, 2)
    assert not boxes
    assert joint.chunk(2)[1].read().shape == (9, 8)
    assert boxes == [("q", (range(6, 12), range(8))), ("k", (range(3, 6), range(8)))]


def test_a_rearrangement_is_inverted() -> None:
    q, k, v = (torch.randn(3, 4, 2), torch.randn(3, 2, 2), torch.randn(3, 2, 2))

    def joined(q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.permute(1, 2, 0) for x in (q, k, v))
        return torch.cat([q.unflatten(0, (2, 2)), k[:, None], v[:, None]], 1).flatten(0, 2)

    view = joined(*(held(x, name) for name, x in zip("qkv", (q, k, v), strict=True)))
    found = solve(view, held(joined(q, k, v)))
    assert {name: values_of(x).shape for name, x in found.items()} == {"q": q.shape, "k": k.shape, "v": v.shape}
    assert all(torch.equal(values_of(found[name]), x) for name, x in zip("qkv", (q, k, v), strict=True))
    with pytest.raises(TypeError, match="no inverse"):
        solve(held(q).narrow(0, 0, 1), held(q[:1]))


def test_what_is_no_rearrangement_is_refused() -> None:
    x = held(torch.zeros(4, 6))
    with pytest.raises(ValueError, match="cannot have the sizes"):
        x.reshape(5, 5)
    with pytest.raises(ValueError, match="4 does not divide dim 1"):
        x.chunk(4, 1)
    with pytest.raises(IndexError, match="out of range"):
        x.narrow(0, 3, 2)
    with pytest.raises(ValueError, match="cannot be concatenated"):
        torch.cat([x, held(torch.zeros(4, 5))])
    with pytest.raises(TypeError):
        torch.add(x, 1)
