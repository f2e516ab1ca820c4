"""`megaloom show --tensors`: the tensors of a checkpoint with their shapes and types."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from megaloom.runtime.checkpoints.checkpoint_folder import newest_intact
from megaloom.runtime.cli.printing import print_on_first_rank
from megaloom.runtime.convert.stored_tensors import stored_tensors
from megaloom.runtime.training.artefact import opened
from megaloom.runtime.training.run_folder import is_run, no_checkpoint, plan_of_run


def run_tensors(path: Path) -> None:
    """Print the tensors of a checkpoint; of a run, those of its newest one that is not damaged."""
    notes: list[str] = []
    with opened(path) as folder:
        if is_run(folder):
            checkpoint = newest_intact(folder, fingerprint=plan_of_run(folder).fingerprint)
            if checkpoint is None:
                raise no_checkpoint(folder)
            folder, notes = checkpoint.folder, checkpoint.notes
        tensors = stored_tensors(folder)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("tensor", no_wrap=True)
    table.add_column("shape", no_wrap=True)
    table.add_column("type")
    for x in tensors:
        table.add_row(Text(x.name), Text(str(list(x.shape))), x.dtype)
    total = f"{len(tensors):,} tensors, {sum(x.numel for x in tensors):,} elements"
    print_on_first_rank(*notes, table, Text(f"\n{total}"))
