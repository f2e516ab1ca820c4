"""A DataLoader of the user's own, read once for each data-parallel rank.

The first rank of a data-parallel rank reads the rows of its part, and its tensor-, context- and pipeline-parallel ranks
get equal batches from it. So random augmentation and collators that draw masks need no care, and the other ranks need
neither the loader nor the files. The order of the rows depends on the seed and the epoch only.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
from attrs import define, field
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler, SequentialSampler

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.runtime.launch.agreement import agreed, gathered

from .engine import Engine
from .row_share import RowShare
from .shared_batches import SharedBatches

KEPT_OPTIONS = (
    *("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)
"""Options of a DataLoader that the divided one has as well."""


class OwnRows(Sampler[list[int]]):
    """The indices of this data-parallel rank's rows, batch by batch, in the order of a sampler of the whole data."""

    def __init__(self, sampler: Any, share: RowShare, seed: int, *, drop_last: bool) -> None:
        self.sampler, self.share, self.seed, self.drop_last = sampler, share, seed, drop_last
        self.epoch, self.skipped = 0, 0  # of the next pass, and batches at its beginning that are left out

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        whole, rest = divmod(len(self.sampler), self.share.batch)
        return whole + bool(not self.drop_last and self.share.of(rest))

    def __iter__(self) -> Iterator[list[int]]:
        order = self.sampler
        if not isinstance(order, SequentialSampler):
            order = copy(order)
            order.generator = torch.Generator().manual_seed(self.seed + self.epoch)
        indices = list(order)
        for first in range(self.skipped * self.share.batch, len(indices), self.share.batch):
            rows = indices[first : first + self.share.batch]
            if (own := self.share.of(len(rows))) and not (self.drop_last and len(rows) < self.share.batch):
                yield [rows[i] for i in own]


class OwnStream(IterableDataset[Any]):
    """The rows of this data-parallel rank, from data that are read from the first row to the last."""

    def __init__(self, data: Any, share: RowShare, *, drop_last: bool) -> None:
        self.data, self.share, self.drop_last = data, share, drop_last

    def __iter__(self) -> Iterator[Any]:
        rows: list[Any] = []
        for row in self.data:
            rows.append(row)
            if len(rows) == self.share.batch:
                yield from (rows[i] for i in self.share.of(len(rows)))
                rows = []
        if rows and self.share.evaluates and not self.drop_last:
            yield from (rows[i] for i in self.share.of(len(rows)))
        elif rows and not self.drop_last:
            raise UserError(
                f"the last batch of the loader has {len(rows)} rows, and a step needs {self.share.batch}\n"
                "give DataLoader(…, drop_last=True)"
            )


@define(eq=False)
class ShardedLoader:
    """The batches of this data-parallel rank, equal on its tp, cp and pp ranks. A pass over it is an epoch.

    Every rank iterates over it at the same time.
    """

    shared: SharedBatches
    loader: DataLoader[Any] | None  # None on ranks that get their batches from the first
    length: int | None  # batches of an epoch; None if the data do not know it
    epoch: int = field(default=0, init=False)  # of the next pass

    def __len__(self) -> int:
        """Return the number of batches of an epoch. Raise TypeError for data that are read as a stream."""
        if self.length is None:
            raise TypeError("a loader of an IterableDataset has no length")
        return self.length

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, on which its order depends. It counts by itself."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._pass(0)

    def from_step(self, step: int) -> Iterator[Any]:
        """Yield the batches of steps `step`, `step` + 1, … without end, over as many epochs as it takes.

        Raise UserError for data that are read as a stream, of which the rows before a step are not known.
        """
        if self.length is None:
            raise UserError(
                "a loader of an IterableDataset cannot begin at a step: it has no length\n"
                "skip the rows in the dataset, such as data.skip(step * batch) of Hugging Face"
            )
        self.epoch, skipped = divmod(step, self.length)
        while True:
            yield from self._pass(skipped)
            skipped = 0

    def _pass(self, skipped: int) -> Iterator[Any]:
        """Yield the batches of one epoch, without the first ones."""
        own = iter(()) if self.loader is None else self._of_epoch(self.loader, skipped)
        self.epoch += 1
        while (held := self.shared.of_first_rank(_next(own))) is not None:
            if isinstance(held, UserError):
                raise held  # on all ranks that wait for a batch
            yield held

    def _of_epoch(self, loader: DataLoader[Any], skipped: int) -> Iterator[Any]:
        """Return an iterator over the loader's batches of the present epoch."""
        sampler, data = loader.batch_sampler, loader.dataset
        if isinstance(sampler, OwnRows):
            sampler.epoch, sampler.skipped = self.epoch, skipped
        elif isinstance(data, OwnStream) and hasattr(data.data, "set_epoch"):
            data.data.set_epoch(self.epoch)
        return iter(loader)


def _next(batches: Iterator[Any]) -> Any:
    """Return the next batch; None if there is none, and the UserError with which it is refused."""
    try:
        return next(batches, None)
    except UserError as refusal:
        return refusal


def shard_loader(
    engine: Engine, loader: DataLoader[Any] | None, *, evaluates: bool = False, seed: int | None = None
) -> ShardedLoader:
    """Return the batches of a DataLoader for this data-parallel rank, for `engine.step`. Every rank calls it.

    loader: read on the first rank of each data-parallel rank, whose tp, cp and pp index is 0; others may give None.
    Its batch_size is the plan's batch, or the part of a data-parallel rank. Either way a step takes the next rows of
    one global batch. Its sampler is in order, or draws from a generator, which is seeded anew for each epoch, as that
    of DistributedSampler. Rows that fill no batch need drop_last=True.

    evaluates: batches for `engine.evaluate`. batch_size is then any number of rows of a data-parallel rank, and each
    row is read once. seed: of the order; that of the recipe by default.

    Raise UserError on all ranks for a loader that cannot be divided.
    """
    layout, batch, groups = engine.plan.layout, engine.plan.workload.batch, engine.groups
    first = groups.tp_rank == groups.cp_rank == groups.pp_rank == 0
    agreed(lambda: _check(loader, batch, layout, evaluates=evaluates) if first else None)
    own, facts = None, None
    if first and loader is not None:
        rows = (loader.batch_size or 1) * layout.dp if evaluates else batch
        share = RowShare(layout, groups.dp_rank, rows, evaluates)
        own, facts = _divided(loader, share, engine.recipe.seed if seed is None else seed), _facts(loader)
    length = len(own) if own is not None and isinstance(own.batch_sampler, OwnRows) else None
    found = gathered((groups.dp_rank, facts, length))
    agreed(lambda: _check_same([f for _, f, _ in found if f]))
    length = next(n for dp_rank, f, n in found if f and dp_rank == groups.dp_rank)
    return ShardedLoader(engine.shared, own, length)


def _divided(loader: DataLoader[Any], share: RowShare, seed: int) -> DataLoader[Any]:
    """Return a loader that reads the own rows of another one, with its collate_fn and its workers."""
    options: dict[str, Any] = {name: getattr(loader, name) for name in KEPT_OPTIONS}
    data, drop_last = loader.dataset, loader.drop_last
    if isinstance(data, IterableDataset):
        stream = OwnStream(data, share, drop_last=drop_last)
        return DataLoader(stream, batch_size=share.batch // share.layout.dp, **options)
    return DataLoader(data, batch_sampler=OwnRows(loader.sampler, share, seed, drop_last=drop_last), **options)


def _check(loader: Any, batch: int, layout: Layout, *, evaluates: bool) -> None:
    """Raise UserError for a loader of the first rank of a data-parallel rank that cannot be divided."""
    if not isinstance(loader, DataLoader):
        found = "there is no loader" if loader is None else f"the loader is a {type(loader).__name__}"
        raise UserError(
            f"{found}: the first rank of each data-parallel rank, whose tp, cp and pp index is 0, gives a torch "
            "DataLoader"
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise UserError(
            "the loader has a DistributedSampler, so it is divided already\ngive the loader without it, or give its "
            "batches to engine.step as they are"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise UserError("the loader makes batches by a sampler of its own\ngive DataLoader(data, batch_size=…)")
    if not evaluates and loader.batch_size not in (batch, batch // layout.dp):
        either = f"{batch}, the batch of the plan"
        either += f", or {batch // layout.dp}, the part of a data-parallel rank" if layout.dp > 1 else ""
        raise UserError(f"the loader has batch_size={loader.batch_size}\ngive {either}")
    if isinstance(loader.dataset, IterableDataset):
        if loader.num_workers > 1:
            raise UserError(
                f"the loader of an IterableDataset has {loader.num_workers} workers, each of which reads all of it\n"
                "give num_workers=1 or 0"
            )
        return
    if not isinstance(loader.sampler, SequentialSampler) and not hasattr(loader.sampler, "generator"):
        raise UserError(
            f"the loader's sampler {type(loader.sampler).__name__} has no generator, so its order may differ between "
            "ranks\ngive shuffle=True, or a sampler with the attribute `generator`"
        )
    _check_rows(len(loader.sampler), batch, evaluates=evaluates, drop_last=loader.drop_last)


def _check_rows(rows: int, batch: int, *, evaluates: bool, drop_last: bool) -> None:
    """Raise UserError unless an epoch of so many rows has whole batches."""
    if evaluates:
        return
    if rows < batch:
        raise UserError(f"the loader has {rows} rows, fewer than the batch of the plan, {batch}\ngive more rows")
    if rows % batch and not drop_last:
        raise UserError(
            f"the loader has {rows} rows, so its last batch has {rows % batch}, and a step needs {batch}\n"
            "give DataLoader(…, drop_last=True)"
        )


def _facts(loader: DataLoader[Any]) -> dict[str, str]:
    """Return what the loaders of all data-parallel ranks have in common."""
    streams = isinstance(loader.dataset, IterableDataset)
    return {
        "number of rows": "a stream" if streams else str(len(loader.sampler)),  # type: ignore[arg-type]
        "batch_size": str(loader.batch_size),
        "drop_last": str(loader.drop_last),
        "sampler": type(loader.sampler).__name__,
    }


def _check_same(found: list[dict[str, str]]) -> None:
    """Raise UserError unless data-parallel ranks have loaders of the same facts."""
    for one in found[1:]:
        for name in (name for name in one if one[name] != found[0][name]):
            raise UserError(
                f"data-parallel ranks have loaders of different data: {name} is {one[name]}, not {found[0][name]}\n"
                "give the loader of all data on each of them; it is divided here"
            )
