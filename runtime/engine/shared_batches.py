"""One batch for the tensor-, context- and pipeline-parallel ranks of a data-parallel rank.

Ranks that pass None or an empty batch get that of the first of these ranks, as in Megatron-LM and Accelerate. Batches
that differ are refused: the first three of an engine and then one in a hundred are compared by a hash.
`benchmarks/batches.py` measures the cost. With 8 sequences of 4,096 tokens on two processes over gloo a step takes 0.4
ms longer, one that compares 2 ms, and one in which only the first rank has the batch 3 ms.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import blake2b
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field
from torch import Tensor

from megaloom.dsl import Graph
from megaloom.dsl.errors import UserError
from megaloom.runtime.launch.agreement import agreed, any_rank, check_equal, gathered, largest
from megaloom.runtime.megatron import device
from megaloom.runtime.megatron.process_groups import ProcessGroups

from .megatron_batch import as_inputs, as_sample

COMPARED_FIRST = 3  # batches of an engine that are compared
COMPARED_EVERY = 100  # batches after those, one of which is compared
ONE_BATCH = (
    "all tensor-, context- and pipeline-parallel ranks of one data-parallel rank train on one batch: pass it on the "
    "first of them and None on the others, or pass equal ones"
)
ONE_KIND = (
    "a function from i to sample i reads the samples of the global batch: pass it, and the same count, on every rank; "
    "or pass tensors on the first rank of each data-parallel rank"
)


class RepeatedRows(UserWarning):
    """Data-parallel ranks train on equal batches."""


@define(eq=False)
class SharedBatches:
    """Makes the batches of an engine equal on the ranks that share them. Every rank makes every call."""

    groups: ProcessGroups
    graph: Graph
    seq: int
    more: bool  # steps of the user's own read tensors beside the inputs
    calls: int = field(default=0, init=False)
    warned: bool = field(default=False, init=False)  # that data-parallel ranks have equal batches

    def of(self, batch: Any, *, training: bool = False) -> Any:
        """Return the batch of this data-parallel rank by the model's inputs; None or an empty one if it has none.

        training: each data-parallel rank should have rows of its own. Raise UserError on all ranks if batches differ.
        """
        batch = agreed(partial(as_inputs, batch, self.graph, self.seq, more=self.more))
        layout, own = self.groups.layout, is_absent(batch)
        compares = self.calls < COMPARED_FIRST or self.calls % COMPARED_EVERY == 0
        self.calls += 1
        if layout.world == 1 or (layout.world == layout.dp and not (training and compares)):
            return batch
        absent = self._compare(batch, training) if compares else any_rank(own)
        if not absent:
            return batch
        agreed(partial(_refuse_function, batch))
        found = self.of_first_rank(batch)
        agreed(lambda: _refuse(self.groups) if is_absent(found) and not own else None)
        return found

    def named(self, samples: Callable[[int], Any]) -> Callable[[int], Any]:
        """Return a function from i to sample i by the names of the model's inputs."""
        return lambda i: as_sample(samples(i), self.graph, self.seq, more=self.more)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the tensors that are compared."""
        return tuple(n.name for n in self.graph.nodes if n.is_input)

    def _compare(self, batch: Any, training: bool) -> bool:
        """Compare the batches of all ranks, and return whether one has none."""
        own = torch.tensor([self.groups.dp_rank, int(is_absent(batch)), digest(batch, self.inputs)])
        own = own.to(device.current())
        rows = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, own)
        first: dict[int, tuple[int, int]] = {}  # of each data-parallel rank, a rank that has a batch, and its digest
        for rank, (dp_rank, absent, found) in enumerate(torch.stack(rows).tolist()):
            if not absent and first.setdefault(dp_rank, (rank, found))[1] != found:
                self._refuse_other(batch, dp_rank, first[dp_rank][0], rank)
        if training:
            self._warn_of_repeated({dp_rank: found for dp_rank, (_, found) in first.items()})
        return any(absent for _, absent, _ in torch.stack(rows).tolist())

    def _refuse_other(self, batch: Any, dp_rank: int, first: int, other: int) -> None:
        """Raise UserError for the batch of a rank that differs from that of another. Every rank calls it."""
        found = gathered((socket.gethostname(), digests(batch, self.inputs)))
        (host, expected), (other_host, given) = found[first], found[other]
        names = [name for name in {**expected, **given} if expected.get(name) != given.get(name)]
        raise UserError(
            f"rank {other} ({other_host}) has another batch than rank {first} ({host}), but both are of data-parallel "
            f"rank {dp_rank}: {', '.join(filter(None, names)) or 'the text'} differs\n{ONE_BATCH}"
        )

    def _warn_of_repeated(self, found: dict[int, int]) -> None:
        """Warn once, on rank 0, of data-parallel ranks whose batches have one digest. found: their digests."""
        equal: dict[int, list[int]] = {}
        for dp_rank, one in sorted(found.items()):
            equal.setdefault(one, []).append(dp_rank)
        ranks = max(equal.values(), key=len, default=[])
        if len(ranks) < 2 or self.warned:
            return
        self.warned = True
        if dist.get_rank() == 0:
            warnings.warn(
                f"data-parallel ranks {', '.join(map(str, ranks))} have the same batch, so a step trains on each of "
                f"its rows {len(ranks)} times: give each data-parallel rank its own rows, of a DataLoader by "
                "shard_loader(engine, loader)",
                RepeatedRows,
                stacklevel=6,
            )

    def of_first_rank(self, batch: Any) -> Any:
        """Return the batch of the first rank of this data-parallel rank: of index 0 on the axes pp, cp and tp."""
        if self.groups.layout.world == self.groups.layout.dp:
            return batch
        held = [_on_cpu(batch)]
        for axis in ("pp", "cp", "tp"):
            if self.groups.layout.degrees[axis] > 1:
                dist.broadcast_object_list(held, group=self.groups.of_axis(axis), group_src=0)
        return held[0]


def check_kinds(batch: Any, count: int | None) -> None:
    """Raise UserError on all ranks unless all give a function and one count, or none does. Every rank calls it."""
    known = 0 if _wrong_count(batch, count) else -1 if count is None else int(count)
    is_function = int(callable(batch))
    most_functions, least_functions, most, least = largest(is_function, -is_function, known, -known)
    if most_functions == -least_functions and most == -least != 0:
        return
    agreed(partial(_check_count, batch, count))
    given = "a function" if callable(batch) else "tensors or None"
    check_equal({"batch": given, "count": str(count)}, ONE_KIND)


def _wrong_count(batch: Any, count: object) -> str:
    """Return what is wrong with a count of samples, and what to do; empty if it is right."""
    if count is None:
        return ""
    if isinstance(count, bool) or not isinstance(count, Integral) or count < 1:
        return f"count is {count!r}: it must be a whole number, at least 1\nleave it out for the batch of the plan"
    if not callable(batch):
        return (
            f"count is {count}, but the batch is no function from i to sample i: tensors have a number of their own\n"
            "leave count out, or pass a function"
        )
    return ""


def _check_count(batch: Any, count: object) -> None:
    if wrong := _wrong_count(batch, count):
        raise UserError(wrong)


def is_absent(batch: Any) -> bool:
    """Return whether a rank passes no batch: None, or a dict or tuple without anything."""
    return batch is None or (isinstance(batch, Mapping | tuple) and not batch)


def digest(batch: Any, names: tuple[str, ...]) -> int:
    """Return a number that differs for batches that differ in tensors of these names."""
    return int.from_bytes(blake2b(repr(digests(batch, names)).encode(), digest_size=7).digest())


def digests(batch: Any, names: tuple[str, ...]) -> dict[str, str]:
    """Return a hash of each tensor of a batch, by name; of a batch that is one tensor, under the empty name."""
    tensors = {"": batch} if isinstance(batch, Tensor) else batch if isinstance(batch, Mapping) else {}
    return {
        name: _hash(x) for name, x in sorted(tensors.items()) if isinstance(x, Tensor) and (name in names or not name)
    }


def _hash(x: Tensor) -> str:
    numbers = x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return blake2b(numbers, digest_size=16, key=f"{x.dtype}{list(x.shape)}".encode()[:64]).hexdigest()


def _on_cpu(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in batch.items()}
    return batch.cpu() if isinstance(batch, Tensor) else batch


def _refuse_function(batch: Any) -> None:
    if callable(batch):
        raise UserError("a batch of an evaluation or of logits is tensors, not a function from i to sample i")


def _refuse(groups: ProcessGroups) -> None:
    raise UserError(
        f"a rank of data-parallel rank {groups.dp_rank} has a batch that the first of them does not have\n{ONE_BATCH}"
    )
