"""A small case of an op: its value with small dims, and random arguments on which its whole-tensor function runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import product

import torch
from attrs import evolve, field, fields, frozen, has
from torch import Tensor

from megaloom.dsl.dims import Dim, DType, Shape, Sizes
from megaloom.dsl.op import Op
from megaloom.dsl.ops.weight import Input
from megaloom.dsl.value import Value
from megaloom.runtime.ops import whole

SMALL_DIMS = (6, 8, 10, 9, 16, 20, 24, 32, 48, 64)  # of dims: the first that fits and that no other dim has
SMALL_LENGTHS = (12, 64, 256)  # of dims whose size the workload gives, other than batch
SMALL_BATCH = 3
NUMBER_RANGES = ((-1.5, 1.5), (0.1, 0.9), (1.5, 2.5))  # of random numbers: the first with a finite result
SEED_OF_CASES = 1234

Arguments = tuple[tuple[Shape, DType], ...]


@frozen(eq=False)
class SmallCase:
    """An op applied to random arguments: fp64 numbers, ids or truth values."""

    value: Value
    tensors: tuple[Tensor, ...]
    sizes: Sizes
    function: Callable[..., Tensor]
    result: Tensor = field()

    @result.default
    def _result(self) -> Tensor:
        with torch.no_grad():
            return self.run(*(x.clone() for x in self.tensors))

    def run(self, *tensors: Tensor) -> Tensor:
        """Return the result of the op's function for the whole tensors or for shards of them."""
        return self.function(self.value.op, self.value, *tensors)

    def leaves(self) -> list[Tensor]:
        """Return copies of the arguments, of which numbers require gradients."""
        return [x.clone().requires_grad_(x.is_floating_point()) for x in self.tensors]

    def size(self, d: Dim) -> int:
        """Return the size of a dim."""
        return max(1, self.sizes.of(d))


def small_case(op: Op, arguments: Arguments) -> SmallCase:
    """Return a case with small dims on which the function of an op runs; of the true dims if it runs on no smaller one.

    A size is larger than each whole number in the fields of the op, so that a shift by 7 shifts something. Raise the
    error of the function if it runs on no case.
    """
    shapes = tuple(s for s, _ in arguments)
    failure: Exception | None = None
    for some, length in product((_shrunk(op, shapes), shapes), SMALL_LENGTHS):
        if length <= min(_largest_number(op), SMALL_LENGTHS[-2]):
            continue  # a longer one follows
        try:
            return _finite_case(op, tuple(zip(some, (t for _, t in arguments), strict=True)), length)
        except Exception as error:  # of the function, which a user wrote
            failure = error
    assert failure is not None
    raise failure


def _finite_case(op: Op, arguments: Arguments, length: int) -> SmallCase:
    """Return a case whose result is finite; that of the last range of numbers if none is."""
    case: SmallCase | None = None
    for numbers in NUMBER_RANGES:
        case = _case(op, arguments, length, numbers)
        if not case.result.is_floating_point() or case.result.isfinite().all():
            return case
    assert case is not None
    return case


def _case(op: Op, arguments: Arguments, length: int, numbers: tuple[float, float]) -> SmallCase:
    args = tuple(Value(Input(f"argument {i}"), (), s, dtype=t) for i, (s, t) in enumerate(arguments, 1))
    out = Value(op, args, op.shape(*(s for s, _ in arguments)), dtype=op.dtype(*(t for _, t in arguments)))
    names = {d.name for v in (*args, out) for d in _with_origins(v.shape)}
    sizes = Sizes(dict.fromkeys(names, length) | {"batch": SMALL_BATCH})
    shapes = [[max(1, sizes.of(d)) for d in a.shape] for a in args]
    indexed = [max(1, sizes.of(d)) for v in (*args, out) for d in v.shape if d.name != "batch"]
    ids, generator = min(indexed, default=1), torch.Generator().manual_seed(SEED_OF_CASES)
    tensors = tuple(_random(shape, a.dtype, ids, numbers, generator) for a, shape in zip(args, shapes, strict=True))
    return SmallCase(out, tensors, sizes, whole.dispatch(type(op)))


def _random(
    shape: list[int], dtype: DType, ids: int, numbers: tuple[float, float], generator: torch.Generator
) -> Tensor:
    """Return a random tensor: fp64 numbers of a range, ids below `ids`, or truth values."""
    match dtype:
        case DType.INDEX:
            return torch.randint(ids, shape, generator=generator)
        case DType.MASK:
            return torch.randint(2, shape, generator=generator).bool()
    low, high = numbers
    return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)


def _with_origins(dims: Iterable[Dim]) -> Iterator[Dim]:
    """Yield dims and those that derived ones, such as slots, are made of."""
    for d in dims:
        yield d
        yield from _with_origins(d.of)


def _shrunk(op: Op, shapes: tuple[Shape, ...]) -> tuple[Shape, ...]:
    """Return shapes with each dim as small as the op accepts it while the others keep theirs."""
    least = _largest_number(op)
    for d in dict.fromkeys(d for s in shapes for d in s if d.size is not None):
        used = {other.size for s in shapes for other in s if other != d}
        for size in sorted(SMALL_DIMS, key=lambda n: n in used):  # sizes that differ show dims in a wrong order
            if least < size < d.known and _is_accepted(op, smaller := _replaced(shapes, d, evolve(d, size=size))):
                shapes = smaller
                break
    return shapes


def _replaced(shapes: tuple[Shape, ...], old: Dim, new: Dim) -> tuple[Shape, ...]:
    return tuple(Shape(tuple(new if d == old else d for d in s)) for s in shapes)


def _is_accepted(op: Op, shapes: tuple[Shape, ...]) -> bool:
    try:
        op.shape(*shapes)
    except Exception:  # of a user's own shape, whatever it raises
        return False
    return True


def _largest_number(op: Op) -> int:
    """Return the largest absolute value of the whole numbers in the fields of an op; 0 if it has none."""
    return max(_numbers(op), default=0)


def _numbers(it: object) -> Iterator[int]:
    if isinstance(it, tuple):
        for part in it:
            yield from _numbers(part)
    elif has(kind := type(it)):
        yield from _numbers(tuple(getattr(it, f.name) for f in fields(kind)))
    elif isinstance(it, int):
        yield abs(it)
