"""Words of a Megatron-LM command as arguments, by argparse's rules: prefixes, `--a=b`, the last of several wins.

`parse_words` never raises for what a stranger wrote: what it does not understand is listed in the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Any

from attrs import evolve, field, frozen

from megaloom.planner.runs.words import Origin, Unknown, Word

from .field_flags import FIELD_FLAGS
from .flag import Effect, Flag
from .fork_flags import DEEPSPEED_FIELDS, FORK_FLAGS
from .framework_flags import FRAMEWORK_FLAGS, TORCH_FIELDS
from .harmless_flags import HARMLESS
from .judged_flags import JUDGED
from .newer_flags import NEWER_FIELDS, NEWER_FLAGS

WRITTEN = re.compile(r"[0-9]+\.[0-9]*(e\+?[0-9]+)?|[0-9]+e\+?[0-9]+", re.IGNORECASE)
WHOLE_FLOATS = 2**53  # below which a float is every whole number
UNKNOWN_FLAG = "is not a known flag"
EVERY_UNKNOWN = "unknown"  # what --ignore-flag calls all flags that are not known
STRAY = "a word that belongs to no flag, at which the program stops; an array without quotes splits its words"
# Values that another message asks for where they matter: the vocabulary.
ASKED_ELSEWHERE = frozenset({"tokenizer_model", "tokenizer_name_or_path", "pp_partition_method"})


@frozen
class GivenArgument:
    """One argument as the file has it: its value, the word of the flag, and the words of the value."""

    flag: Flag
    value: Any
    word: Word
    values: tuple[Word, ...] = ()

    @property
    def origin(self) -> Origin:
        """The line of the value, or of a switch."""
        return self.values[0].origin if self.values else self.word.origin


@frozen
class Trouble:
    """A word or a flag that keeps a run from being read: the message, a flag that may be ignored, what is asked for."""

    message: str
    origin: Origin
    flag: str = ""  # without dashes; empty where none can be ignored
    asked: tuple[Unknown, ...] = ()

    def __str__(self) -> str:
        how = f"; `--ignore-flag {self.flag}` reads the run as if it were not there" if self.flag else ""
        return f"{self.origin}: {self.message}{how}"


@frozen
class Arguments:
    """Arguments of a run by destination, with Megatron-LM's defaults where the run states none."""

    given: Mapping[str, GivenArgument] = field(factory=dict)
    defaults: Mapping[str, object] = field(factory=lambda: defaults())
    trouble: tuple[Trouble, ...] = ()
    complete: bool = False  # a log has every argument of its run
    repeated: tuple[tuple[GivenArgument, GivenArgument], ...] = ()  # an argument, and the later one that counts

    def __getitem__(self, dest: str) -> Any:
        """Return the value of an argument, or Megatron-LM's default."""
        return self.given[dest].value if dest in self.given else self.defaults[dest]

    def origin(self, *dests: str) -> Origin | None:
        """Return the line that states the first of these arguments which the run states; None if it states none."""
        return next((self.given[dest].origin for dest in dests if dest in self.given), None)

    @property
    def names(self) -> dict[str, Origin]:
        """The flags of the run as they are spelled, with their lines."""
        return {one.word.text.partition("=")[0]: one.origin for one in self.given.values()}

    def without(self, names: Sequence[str]) -> Arguments:
        """Return the arguments without those flags, which are spelled as on the command line."""
        ignored = {name.lstrip("-").replace("_", "-") for name in names}

        def drop(flag: Flag) -> bool:
            return any(name.removeprefix("--").replace("_", "-") in ignored for name in flag.names)

        given = {dest: one for dest, one in self.given.items() if not drop(one.flag)}
        every = EVERY_UNKNOWN in ignored
        trouble = tuple(
            one
            for one in self.trouble
            if one.flag.replace("_", "-") not in ignored and not (every and UNKNOWN_FLAG in one.message)
        )
        repeated = tuple(pair for pair in self.repeated if not drop(pair[0].flag))
        return evolve(self, given=given, trouble=trouble, repeated=repeated)

    def judged(self, effect: Effect) -> Iterator[GivenArgument]:
        """Yield the arguments of this effect whose values are not harmless."""
        for one in self.given.values():
            if one.flag.effect is effect and not is_harmless(one):
                yield one


def is_harmless(one: GivenArgument) -> bool:
    """Return whether a judged flag has a value that changes nothing."""
    if one.flag.nargs == "0":
        return one.value in one.flag.harmless
    text = " ".join(one.value) if isinstance(one.value, tuple) else str(one.value)
    return text in map(str, one.flag.harmless) or (text == "None" and not one.flag.harmless)


@cache
def table() -> Mapping[str, Flag]:
    """Return every known flag by each of its spellings, with dashes."""
    rows = (*FRAMEWORK_FLAGS, *FORK_FLAGS, *NEWER_FLAGS, *FIELD_FLAGS, *HARMLESS, *JUDGED)
    return {name: flag for flag in rows for name in flag.names}


@cache
def by_dest() -> Mapping[str, Flag]:
    """Return every known flag by its destination."""
    return {flag.dest: flag for flag in (*FRAMEWORK_FLAGS, *FORK_FLAGS, *NEWER_FLAGS, *JUDGED, *HARMLESS, *FIELD_FLAGS)}


def defaults() -> Mapping[str, object]:
    """Return Megatron-LM's defaults of the arguments that are fields of a run."""
    return {flag.dest: flag.default for flag in (*FIELD_FLAGS, *DEEPSPEED_FIELDS, *TORCH_FIELDS, *NEWER_FIELDS)}


def parse_words(words: Sequence[Word], *, of_settings: bool = False) -> Arguments:
    """Return the arguments in the words after the name of the program.

    of_settings: the words stand for settings, of which names have no abbreviations, and whose defaults come first.
    """
    given, trouble, at, before = dict[str, GivenArgument](), list[Trouble](), 0, ""
    repeated: list[tuple[GivenArgument, GivenArgument]] = []
    while at < len(words):
        word, at = words[at], at + 1
        if word.unknown and not looks_like_flag(word.text.partition("=")[0]):
            trouble += () if _always_harmless(word) else (_asked("flags", word),)
            continue
        name, equals, attached = word.text.partition("=")
        if not looks_like_flag(word.text):
            trouble.append(Trouble(STRAY, word.origin, before))
            continue
        before = _shown(name).lstrip("-")
        found = _find(name, abbreviated=not of_settings)
        values = tuple(takewhile(lambda w: not looks_like_flag(w.text), words[at:]))
        if isinstance(found, str):
            at += len(values)
            trouble.append(Trouble(found, word.origin, _shown(name).lstrip("-")))
            continue
        if equals:
            taken: tuple[Word, ...] = (Word(attached, word.origin),)
        else:
            taken = values[: _most(found)]
            at += len(taken)
        one = _read(found, word, tuple(map(_whole, taken)) if of_settings and found.kind is int else taken)
        if isinstance(one, Trouble):
            trouble.append(one)
        else:
            if (earlier := given.get(found.dest)) and earlier.value != one.value and not of_settings:
                repeated.append((earlier, one))
            given[found.dest] = one
    return Arguments(given=given, trouble=tuple(trouble), repeated=tuple(repeated))


def _asked(what: str, word: Word, flag: str = "") -> Trouble:
    names = " and ".join(dict.fromkeys(f"{one.kind} {one.name}" for one in word.unknown))
    depend = "depend" if what == "flags" else "depends"
    return Trouble(f"{what} {depend} on {names}", word.origin, flag, word.unknown)


def _always_harmless(word: Word) -> bool:
    """Return whether an unknown word stands for harmless flags, or for none, under each outcome of a condition."""

    def harmless(words: Sequence[Word]) -> bool:
        read = parse_words(words)
        return not read.trouble and all(
            one.flag.effect is Effect.NOTHING or is_harmless(one) for one in read.given.values()
        )

    return bool(word.either) and all(map(harmless, word.either))


def looks_like_flag(text: str) -> bool:
    """Return whether argparse takes a word as an option rather than as a value."""
    if len(text) < 2 or not text.startswith("-") or " " in text.partition("=")[0]:
        return False
    return not text[1:].replace(".", "", 1).isdecimal()


def _find(name: str, *, abbreviated: bool) -> Flag | str:
    """Return the flag of this name, or of an unambiguous prefix if abbreviations are taken; else a message."""
    flags = table()
    if name in flags:
        return flags[name]
    if abbreviated and name.startswith("--") and len(name) > 2:
        every = {flag.dest: flag for known, flag in flags.items() if known.startswith(name)}
        of_forks = {flag.dest for flag in (*FRAMEWORK_FLAGS, *FORK_FLAGS)}
        found = {dest: flag for dest, flag in every.items() if dest not in of_forks} or every
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            return f"{_shown(name)} is the beginning of several flags of Megatron-LM"
    return f"{_shown(name)} {UNKNOWN_FLAG}"


def _shown(name: str) -> str:
    """Return the name of a flag for a message, if it is one that could be typed; a secret could not."""
    plain = name.lstrip("-").replace("-", "").replace("_", "").replace(".", "")
    return name if len(name) <= 64 and plain.isalnum() and plain.isascii() else "a flag"


def _most(flag: Flag) -> int:
    """Return the most values that a flag takes."""
    return 10_000 if flag.nargs in "+*" else 1 if flag.nargs == "?" else int(flag.nargs)


def _whole(word: Word) -> Word:
    """Return a whole number that a settings file writes as 1000000.0 or 1e6 without its point and its exponent."""
    try:
        number = float(word.text)
    except ValueError:
        return word
    is_whole = WRITTEN.fullmatch(word.text) and number.is_integer() and abs(number) < WHOLE_FLOATS
    return evolve(word, text=str(int(number))) if is_whole else word


def _read(flag: Flag, word: Word, taken: tuple[Word, ...]) -> GivenArgument | Trouble:
    """Return the argument that a flag with these values gives, or why argparse refuses it."""
    if flag.nargs == "0":
        if taken:
            return Trouble(f"{flag.name} takes no value", word.origin, flag.name.removeprefix("--"))
        return GivenArgument(flag, flag.sets, word)
    if (flag.nargs.isdecimal() and len(taken) != int(flag.nargs)) or (flag.nargs == "+" and not taken):
        many = {"1": "a value", "+": "at least one value"}.get(flag.nargs, f"{flag.nargs} values")
        return Trouble(f"{flag.name} needs {many}", word.origin, flag.name.removeprefix("--"))
    matters = flag.effect in (Effect.READ, Effect.REFUSED) and flag.dest not in ASKED_ELSEWHERE
    if matters and (unknown := next((one for one in taken if one.unknown), None)):
        return _asked(f"the value of {flag.name}", unknown, flag.name.removeprefix("--"))
    values = tuple(flag.typed(one.text) for one in taken)
    for value, one in zip(values, taken, strict=True):
        if value is None or (flag.choices and value not in flag.choices):
            due = f"one of {', '.join(flag.choices)}" if flag.choices else flag.due or "a value"
            return Trouble(f"{flag.name} must be {due}", one.origin, flag.name.removeprefix("--"))
    return GivenArgument(flag, values[0] if flag.nargs == "1" else values, word, taken)
