"""Errors of torch's and megatron-core's checkpointing, and of the disk, as CheckpointErrors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException  # from any rank; a BaseException, not an Exception

from .checkpoint_folder import CheckpointError

FROM_TORCH_WRITER = ("inline_container", "StreamWriter")  # words of the RuntimeError when a write fails


@contextmanager
def checkpoint_errors(message: Callable[[BaseException], str]) -> Iterator[None]:
    """Raise CheckpointError, with the message for its cause, instead of an error of checkpointing or of the disk."""
    try:
        yield
    except (CheckpointException, CheckpointingException, OSError) as error:
        failures = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
        cause, *_ = [*failures, error]
        raise CheckpointError(message(cause)) from error
    except RuntimeError as error:
        if not any(word in str(error) for word in FROM_TORCH_WRITER):
            raise
        raise CheckpointError(message(error)) from error
