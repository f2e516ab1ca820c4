"""The ZeRO stage of a DeepSpeed file that a script writes for its own command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from posixpath import normpath

from .words import Word


def deepspeed_words(words: Sequence[Word], files: Mapping[str, str]) -> Iterator[Word]:
    """Yield `--zero-stage` with the stage in the file of `--deepspeed_config`, unless the words state it."""
    texts = [word.text for word in words]
    if "--zero-stage" in texts or "--deepspeed" not in texts:
        return
    for flag, name in pairwise(words):
        if flag.text in ("--deepspeed_config", "--deepspeed-config") and (text := files.get(normpath(name.text))):
            try:
                stage = json.loads(text).get("zero_optimization", {}).get("stage", 0)
            except (ValueError, AttributeError):
                return
            if isinstance(stage, int):
                yield Word("--zero-stage", flag.origin)
                yield Word(str(stage), flag.origin)
