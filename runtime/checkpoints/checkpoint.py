"""Loading the state of all ranks, through megatron.core.dist_checkpointing, and saving it at once.

`checkpoint_folder` describes a checkpoint on disk; `saver` saves while training goes on. Only ranks import this file:
`device.prepare` must run before.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.validation import StrictHandling

from megaloom.runtime.launch.agreement import agreed, gathered
from megaloom.runtime.weights.safe_pickle import check_files, only_weights

from .checkpoint_folder import (
    Checkpoint,
    Retention,
    changed_files,
    first_sentence,
    latest,
    newest_intact,
    unusable,
)
from .errors import checkpoint_errors
from .manifest import Manifest
from .saver import Saver, Stateful

DEFAULT_RETENTION = Retention()


def save(engine: Stateful, run: Path, manifest: Manifest, retention: Retention = DEFAULT_RETENTION) -> Path:
    """Save the state of all ranks as run/step-…, then remove what is not kept. Every rank calls it.

    Raise CheckpointError on all ranks if the checkpoint cannot be written.
    """
    saver = Saver(run, retention)
    saver.start(engine, manifest)
    saved = saver.finish()
    assert saved
    return saved.folder


def newest_on_ranks(run: Path, *, fingerprint: str) -> Checkpoint | None:
    """Return the newest checkpoint whose files are as they were saved, or None if there is none. Every rank calls it.

    Rank 0 chooses; each rank reads some of the files. Checkpoints that cannot be used are in `skipped`. Raise
    CheckpointError on all ranks if there are none but such, or they belong to another model.
    """
    return newest_intact(run, fingerprint=fingerprint, find=_latest_on_ranks, changed=_changed_on_ranks)


def load(engine: Stateful, checkpoint: Checkpoint) -> None:
    """Load a checkpoint, saved under any layout, into the engine's own layout. Every rank calls it.

    Raise CheckpointError if its tensors are not those of the engine, UserError if a file could run code. Its bytes are
    not checked: `newest_on_ranks` does.
    """
    folder = checkpoint.folder
    # Without a comparable fingerprint, the checkpoint must have exactly the tensors of this model.
    comparable = checkpoint.manifest.has_comparable_fingerprint
    strict = StrictHandling.ASSUME_OK_UNEXPECTED if comparable else StrictHandling.RAISE_ALL

    def message(error: BaseException) -> str:
        return unusable(folder, f"cannot be loaded: {first_sentence(error)}")

    check_files(folder)
    with checkpoint_errors(message), only_weights(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)  # megatron-core calls torch by an old name
        state = dist_checkpointing.load(engine.sharded_state(loading=True), str(folder), strict=strict)
    engine.load_state(state)


def _latest_on_ranks(run: Path, *, fingerprint: str, damaged: Mapping[str, str]) -> Checkpoint | None:
    """Return what rank 0 finds with `latest`, on all ranks."""

    def choose() -> Checkpoint | None:
        return None if dist.get_rank() else latest(run, fingerprint=fingerprint, damaged=damaged)

    found = [agreed(choose, names_rank=False)]
    dist.broadcast_object_list(found)
    return found[0]


def _changed_on_ranks(checkpoint: Checkpoint) -> list[str]:
    """Return the changed files of a checkpoint, of which each rank reads some."""
    share = slice(dist.get_rank(), None, dist.get_world_size())
    changed = agreed(partial(changed_files, checkpoint, share))
    return [name for part in gathered(changed) for name in part]
