"""Comparison of the reads that an op of a user's own declares with those of its whole-tensor function.

`check_reads(value)` runs the function of the value's op on a small case with random numbers, once on whole tensors, and
for each dim on the shards that the runtime would give it. Results and gradients must be those of the whole tensors.
An op with a function for shards of its own, `local`, is run on whole tensors only.
Ops of megaloom.dsl are not checked here: tests compare them with other programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from attrs import evolve
from torch import Tensor

from megaloom.dsl.dims import DType
from megaloom.dsl.errors import UserError, safe_repr
from megaloom.dsl.files.built_in import is_built_in
from megaloom.dsl.graph import Graph
from megaloom.dsl.node import primitives
from megaloom.dsl.op import Op, Reads
from megaloom.dsl.ops.loss import is_loss
from megaloom.dsl.sharding_table import SEQUENCES
from megaloom.dsl.value import Value
from megaloom.runtime.ops import whole
from megaloom.runtime.ops.registry import has_own_local, has_own_whole

from .shard_runs import ShardRuns, differs
from .small_case import Arguments, SmallCase, small_case

OF_BUILT_IN_CODE = ("statistics", "located", "groups", "heads")  # statements that need torch code for shards
Problem = tuple[str, str]  # what is wrong, and what to do


def check_graph(g: Graph) -> None:
    """Raise UserError for the first op of a user's own in a graph that reads other than it declares."""
    for node in g.nodes:
        for v, *_ in primitives(node.value):
            check_reads(v, f"{node.name} ({getattr(node.op, 'at', '') or v.at})")


def check_reads(value: Value, where: str = "") -> None:
    """Raise UserError if the op of a value is a user's own and reads other than it declares.

    where: the node that applies it, for the message; by default the line of the program.
    """
    if is_built_in(value.op) or not (has_own_whole(value.op) or _has_own_reads(value.op)):
        return
    arguments = tuple((a.shape, a.dtype) for a in value.args)
    if problem := _problem(value.op, whole.dispatch(type(value.op)), arguments):
        shapes = ", ".join(str(a.shape) for a in value.args)
        raise UserError(f"{where or value.at} applies {type(value.op).__name__} to {shapes}: " + "\n".join(problem))


def _has_own_reads(op: Op) -> bool:
    """Return whether the declared reads of an op are a user's own."""
    return not type(op).reads.__module__.startswith("megaloom.dsl.")


@lru_cache(maxsize=1 << 10)
def _problem(op: Op, function: Callable[..., Tensor], arguments: Arguments) -> Problem | None:
    """Return the first thing that is wrong with an op. function: that of the op; another one is checked anew."""
    with torch.random.fork_rng(devices=[]):
        try:
            case = small_case(op, arguments)
        except UserError:
            raise  # there is no function
        except Exception as error:
            return (
                f"its function raises {type(error).__name__} for random numbers: {error}",
                f"correct the function of {type(op).__name__}; it is called as function(op, out, *tensors)",
            )
        reads = op.reads(case.value)
        return next(_problems(case, reads), None)


def _problems(case: SmallCase, reads: tuple[Reads, ...]) -> Iterator[Problem]:
    yield from _result_problems(case)
    yield from _statement_problems(case, reads)
    yield from _gradient_problems(case)
    for name in () if has_own_local(case.value.op) else _dims(case, reads):
        yield from _dim_problems(ShardRuns.of(case, reads, name), reads)


def _result_problems(case: SmallCase) -> Iterator[Problem]:
    """Yield what is wrong with the function on whole tensors."""
    v, y = case.value, case.result
    sizes, floating = [case.size(d) for d in v.shape], v.dtype in (DType.COMPUTE, DType.FLOAT32)
    if list(y.shape) != sizes:
        yield (
            f"its function returns a tensor {list(y.shape)}, and its shape is {v.shape}, here {sizes}",
            "return the dims in the order of out.shape",
        )
    if floating is not y.is_floating_point() or (v.dtype is DType.COMPUTE and y.dtype is not torch.float64):
        yield (
            f"its function returns {y.dtype} for arguments of float64, and its dtype is {v.dtype}",
            "end the function with .to(args[0].dtype), or state the element type with a method dtype",
        )
    copies = [x.clone() for x in case.tensors]
    with torch.no_grad():
        again = case.run(*copies)
    for i, (x, before) in enumerate(zip(copies, case.tensors, strict=True), 1):
        if not torch.equal(x, before):
            yield (
                f"its function changes argument {i} in place",
                "change a copy: x.clone(), or an op that is not in place",
            )
    if y.is_floating_point() and not y.isfinite().all():
        yield (
            "its function returns NaN or infinite numbers for arguments between -1.5 and 1.5, and between 0.1 and 0.9",
            "return finite numbers for one of these ranges",
        )
    if differs(again, y):
        yield "its function returns another result when it is called again", "draw random numbers with the op Drop"


def _statement_problems(case: SmallCase, reads: tuple[Reads, ...]) -> Iterator[Problem]:
    """Yield statements that contradict each other, or that no own function can honour."""
    v, kind = case.value, type(case.value.op).__name__
    if not isinstance(reads, tuple) or len(reads) != len(v.args) or not all(isinstance(r, Reads) for r in reads):
        yield (
            f"{kind}.reads returns {safe_repr(reads)}",
            f"return a tuple of {len(v.args)} Reads, one for each argument",
        )
        return
    for i, r in enumerate(reads, 1):
        for name in OF_BUILT_IN_CODE if has_own_whole(v.op) and not has_own_local(v.op) else ():
            if getattr(r, name):
                yield (
                    f"it declares {name} for argument {i}, which needs torch code for shards, and it has none",
                    f"declare {'offset alone' if name == 'located' else 'whole'} in {kind}.reads instead, or write a "
                    f"function for {kind} and decorate it with @local.register",
                )
        if both := sorted(set(r.summed) & (r.whole | set(v.shape.names))):
            yield (
                f"it declares summed over {both[0]} of argument {i}, which is also read whole or a dim of the result",
                f"declare one of them in {kind}.reads: whole is right for any op",
            )
        if "batch" in r.mixed | r.offset and not is_loss(v):
            yield (
                f"it reads other samples of the batch in argument {i}, and a layout chooses how samples share a device",
                "compute each sample by itself",
            )
    if v.op.elementwise and any(r != Reads() for r in reads):
        yield f"{kind} is elementwise, and declares reads", "leave elementwise out, or return Reads() for each argument"
    if v.op.channelwise and (mixed := sorted({n for r in reads for n in r.mixed & set(v.shape.names)} - SEQUENCES)):
        yield f"{kind} is channelwise, and reads {mixed[0]}, which is no sequence", "leave channelwise out"


def _gradient_problems(case: SmallCase) -> Iterator[Problem]:
    """Yield arguments on which the result depends without a gradient."""
    if not case.result.is_floating_point():
        return
    leaves = case.leaves()
    y = case.run(*leaves)
    trained = [x for x in leaves if x.requires_grad]
    found = torch.autograd.grad(y.sum(), trained, allow_unused=True) if y.requires_grad else [None] * len(trained)
    gradients = iter(found)
    for i, x in enumerate(leaves):
        if x.requires_grad and next(gradients) is None and _depends(case, i):
            yield (
                f"the result depends on argument {i + 1}, and has no gradient for it, as after .detach() or .item()",
                "compute it with torch operations that autograd follows; where no gradient is meant, return zeros "
                "from the backward of a torch.autograd.Function",
            )


def _depends(case: SmallCase, i: int) -> bool:
    """Return whether the result changes with an argument."""
    with torch.no_grad():
        changed = [x * 0.875 if k == i else x for k, x in enumerate(case.tensors)]
        return bool(differs(case.run(*changed), case.result))


def _dims(case: SmallCase, reads: Sequence[Reads]) -> tuple[str, ...]:
    """Return the dims of the result, then those that only arguments have."""
    old = {r.renamed[0] for r in reads if r.renamed}
    shapes = (case.value.shape, *(a.shape for a in case.value.args))
    of_built_in = {n for r in reads for n in (*r.statistics, *(r.heads or ())[:1])}  # its torch code is tested
    names = dict.fromkeys(n for s in shapes for n in s.names)
    return tuple(n for n in names if n not in of_built_in and (n in case.value.shape or n not in old))


def _dim_problems(runs: ShardRuns, reads: Sequence[Reads]) -> Iterator[Problem]:
    """Yield what is wrong with the statements about one dim: by results, then by gradients, then in its padding."""
    op, of_shard = runs.case.value.op, f"the indices 0, 2, .. of {runs.name} alone"
    try:
        found = "" if runs.is_gathered else runs.problem()
    except Exception as error:  # of the function, which a user wrote
        found = f"its function raises {type(error).__name__} for {of_shard}: {error}"
    if found:
        yield f"it declares {_declared(runs, reads)}, but {found}", _advice(runs, reads)
    elif op.ignores_padding and runs.is_padded:
        try:
            found = runs.wrong_padding()
        except Exception as error:
            found = f"its function raises {type(error).__name__} if {runs.name} is padded: {error}"
        if found:
            yield f"it states ignores_padding, but {found}", f"set ignores_padding = False in {type(op).__name__}"


def _declared(runs: ShardRuns, reads: Sequence[Reads]) -> str:
    """Return what an op declares about a dim, for a message."""
    stated = [
        f"{what} for argument {i}"
        for i, (r, name) in enumerate(zip(reads, runs.names, strict=True), 1)
        for what in ("whole", "offset", "summed")
        if name in getattr(r, what)
    ]
    return f"{runs.name} as {', '.join(stated)}" if stated else f"no reads along {runs.name}"


def _advice(runs: ShardRuns, reads: Sequence[Reads]) -> str:
    """Return the statement that would be true of a dim, the cheapest first."""
    own = [i for i, name in enumerate(runs.names) if name]
    name = runs.names[own[0]] or ""
    where = f"argument{'s' * (len(own) > 1)} {' and '.join(str(i + 1) for i in own)} "
    where += f"in {type(runs.case.value.op).__name__}.reads"
    for stated, text in (
        (Reads(summed=(name,)), f"Reads(summed=({name!r},))"),
        (Reads(offset=frozenset({name})), f"Reads(offset=frozenset({{{name!r}}}))"),
    ):
        other = [evolve(stated, renamed=r.renamed) if n else r for n, r in zip(runs.names, reads, strict=True)]
        if ShardRuns.of(runs.case, other, runs.name).holds():
            return f"declare {text} for {where}"
    return f"declare Reads(whole=frozenset({{{name!r}}})) for {where}: it is right for every op, and gathers the dim"
