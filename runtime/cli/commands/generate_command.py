"""`megaloom generate`: text that a trained model writes for prompts."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from attrs import asdict

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import read_text
from megaloom.planner.contract.workload import Precision
from megaloom.runtime.cli.command_groups import GenerateOptions
from megaloom.runtime.generation.generate import Asked, Generation, timed_generate
from megaloom.runtime.generation.settings import GenerationSettings


def run_generate(run: Path, options: GenerateOptions, settings: GenerationSettings) -> None:
    """Generate, and print texts to stdout, a single one while it is written. Prompts and times go to stderr."""
    given = prompts_of(options.prompt, options.prompt_file)
    start = time.monotonic()
    single = len(given) * settings.copies == 1 and not options.as_json
    found, seconds = timed_generate(run, given, settings, asked_for(options, stream=single))
    for x in found:
        if options.as_json:
            print(json.dumps(asdict(x), ensure_ascii=False), flush=True)
        elif not single:
            print(f"\n> {x.prompt}", file=sys.stderr, flush=True)
            print(x.text, flush=True)
    print(summary(found, seconds, time.monotonic() - start), file=sys.stderr)


def asked_for(options: GenerateOptions, *, stream: bool) -> Asked:
    """Return the options of the command as those of `generate`. stream: print a single sequence while it is written."""
    return Asked(
        tp=options.tp,
        pp=options.pp,
        precision=None if options.precision is None else Precision(options.precision),
        tokenizer=options.tokenizer,
        tokenizer_type=options.tokenizer_type,
        chat=options.chat,
        add_bos=options.add_bos,
        batch_size=options.batch_size,
        stream=stream,
        averaged=options.averaged,
    )


def summary(found: tuple[Generation, ...], seconds: float, total: float) -> str:
    """Return the number of tokens, the seconds of writing them, and those of the whole command."""
    tokens = sum(len(x.tokens) for x in found)
    reasons = {x.reason for x in found}
    why = f" (ended by {reasons.pop()})" if len(reasons) == 1 else ""
    return (
        f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s{why}; {total:.1f} s including start-up"
    )


def prompts_of(prompts: Sequence[str], file: Path | None) -> list[str]:
    """Return the prompts: those given, the text of a file, or standard input if there are none."""
    if file is not None:
        try:
            return [*prompts, read_text(file).removesuffix("\n")]
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not text in UTF-8"
            raise UserError(f"cannot read the prompt in {file}: {reason}") from None
    if prompts:
        return list(prompts)
    if sys.stdin.isatty():
        raise UserError("there is no prompt\ngive --prompt TEXT, --prompt-file FILE, or text on standard input")
    return [sys.stdin.read().removesuffix("\n")]
