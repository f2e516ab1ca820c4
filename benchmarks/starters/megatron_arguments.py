"""Starts exports to Megatron-LM: parse_args, validate_args, and the configuration of megatron-core from them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), sys.argv[1]]
from empty_modules import hopper, install_empty_modules  # noqa: E402
from judging import Facts, judge  # noqa: E402

install_empty_modules()
hopper()
from megatron.training.arguments import (  # noqa: E402
    core_transformer_config_from_args,
    parse_args,
    validate_args,
)


def start(_: Path, facts: Facts) -> None:
    """Read the words that torchrun was given after the program's name."""
    words, program = (
        facts["words"],
        next(n for n, word in enumerate(facts["words"]) if word.endswith("pretrain_gpt.py")),
    )
    own, sys.argv = sys.argv, words[program:]
    try:
        arguments = parse_args()
        validate_args(arguments, {})
        core_transformer_config_from_args(arguments)
    finally:
        sys.argv = own


judge(start)
