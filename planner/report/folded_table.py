"""Tables of plain text whose columns continue below where a terminal is too narrow for all of them.

`text_table` returns one. Words are never broken: columns of short cells keep their width, and only columns of long
texts wrap, between words.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

TEXT_WIDTH = 30  # characters; a wider column wraps, to no less than this
ROW_NUMBER = "#"  # title of the column that tells which rows belong together


class FoldedTable(Table):
    """A table without a frame. If it is wider than the console, the columns that do not fit follow in a table below.

    `key`: whether the first column names its row. It is then repeated in each part; else rows are numbered.
    """

    key = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        groups = self._groups(options.max_width)
        if len(groups) == 1:
            yield from super().__rich_console__(console, options)
            return
        for i, group in enumerate(groups):
            if i:
                yield Text()
            yield self._part(group)

    def _groups(self, width: int) -> list[list[Column]]:
        """Return the columns of each part: as many as fit below each other, at least one beside the key."""
        columns = [*self.columns]
        gap = self.padding[1]
        if sum(_least(c) + gap for c in columns) <= width or len(columns) == 1:
            return [columns]
        first = self._key_column()
        rest = columns[1:] if self.key else columns
        front = [first] if first else []
        left = width - sum(_least(c) + gap for c in front)
        groups: list[list[Column]] = []
        used = left + 1  # begins the first part
        for column in rest:
            used += (needed := _least(column) + gap)
            if used > left:
                groups.append([*front])
                used = needed
            groups[-1].append(column)
        return groups

    def _key_column(self) -> Column | None:
        """Return the column that stands first in each part; None for a table of one row without a key."""
        if self.key:
            return self.columns[0]
        if self.row_count < 2:
            return None
        numbers: list[Text] = [Text(str(i + 1)) for i in range(self.row_count)]
        return Column(Text(ROW_NUMBER), justify="right", no_wrap=True, _cells=list(numbers))

    def _part(self, columns: Sequence[Column]) -> Table:
        part = Table(box=None, padding=self.padding, header_style=self.header_style)
        for column in columns:
            part.add_column(column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow)
        for row in zip(*(column.cells for column in columns), strict=True):
            part.add_row(*row)
        return part


def _least(column: Column) -> int:
    """Return the least characters for a column: all of its widest cell, but no more than TEXT_WIDTH of a long text."""
    widest = max(map(_width, (column.header, *column.cells)))
    return widest if column.no_wrap else min(widest, TEXT_WIDTH)


def _width(cell: object) -> int:
    return max((cell_len(line) for line in str(cell).split("\n")), default=0)


def text_table(
    head: Iterable[str], rows: Iterable[Sequence[str]], left: Sequence[str] = (), gap: int = 2, key: bool = False
) -> FoldedTable:
    """Return a table of plain text (brackets are no markup); columns named in `left` are aligned to the left.

    key: whether the first column names its row.
    """
    titles, cells = [*head], [*rows]
    out = FoldedTable(box=None, padding=(0, gap, 0, 0), header_style="dim")
    out.key = key
    for i, name in enumerate(titles):
        longest = max(map(_width, (name, *(row[i] for row in cells))))
        out.add_column(
            Text(name),
            justify="left" if name in left else "right",
            overflow="fold",
            no_wrap=longest <= TEXT_WIDTH or name not in left,
        )
    for row in cells:
        out.add_row(*(Text(cell) for cell in row))
    return out
