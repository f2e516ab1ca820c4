"""The rows of a global batch that a data-parallel rank trains on or evaluates."""

from __future__ import annotations

from attrs import frozen

from megaloom.planner.contract.layout import Layout


@frozen
class RowShare:
    """The rows that a data-parallel rank reads of each global batch."""

    layout: Layout
    dp_rank: int
    batch: int  # rows of a global batch
    evaluates: bool = False  # the last batch may have fewer rows, in any number

    def of(self, count: int) -> list[int]:
        """Return the own rows of a batch of `count` rows, in the order of the global batch.

        Row j of micro-batch k of data-parallel rank r is row (k dp + r) micro_batch + j. An evaluation deals rows one
        by one.
        """
        size = 1 if self.evaluates else self.layout.micro_batch
        return [i for i in range(count) if i // size % self.layout.dp == self.dp_rank]
