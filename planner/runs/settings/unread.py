"""Settings that no reader asks for: a framework has hundreds that change no step, and a run says which it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from megaloom.dsl.quoting import shortened
from megaloom.planner.runs.run import Note
from megaloom.planner.runs.settings.near_names import first_origin, keys_by_section, unknown_setting
from megaloom.planner.runs.settings.tree import Setting, Tree, found, is_null, setting_at
from megaloom.planner.runs.words import Word

SHOWN_LETTERS = 120
SHOWN_OF_SECTION = 3


def unread_settings(tree: Tree | None, read: Collection[str], silent: Collection[str] = ()) -> Iterator[Word]:
    """Yield the paths of settings beside those that are read, with their lines, except null ones and what is disabled.

    read: paths such as `trainer.devices`; what is below them is for others to judge. silent: paths of values and lists
    that change no step.
    """
    yield from _unread(tree, "", keys_by_section(read), frozenset(silent))


def _unread(tree: Tree | None, path: str, parents: Mapping[str, set[str]], silent: frozenset[str]) -> Iterator[Word]:
    for key, value in tree.items() if isinstance(tree, Mapping) else ():
        inner = f"{path}.{key}" if path else key
        is_section = isinstance(value, Mapping)
        if inner in parents and is_section:
            yield from _unread(value, inner, parents, silent)
        elif (key not in parents[path] or inner in parents) and (is_section or inner not in silent) and _says(value):
            yield Word(inner, first_origin(value))


def _says(value: Tree) -> bool:
    """Return whether a setting says anything: null, an empty section and one that is disabled do not."""
    if isinstance(value, Mapping) and not value:
        return False
    switch = setting_at(value, "enabled") if isinstance(value, Mapping) else None
    return not is_null(value) and not (switch and not switch.word.unknown and switch.text.lower() == "false")


def misshapen_settings(tree: Tree | None, paths: Iterable[str]) -> Iterator[Word]:
    """Yield as unknown what stands at the paths of single values, and is a mapping or a list."""
    for path in paths:
        value = found(tree, path)
        if value is not None and not isinstance(value, Setting):
            yield unknown_setting(path, value)


def note_of_unread(words: Sequence[Word]) -> Iterator[Note]:
    """Yield one note with the settings that are left out, if there are any; many of a section as the section."""
    if words:
        sections = Counter(word.text.rpartition(".")[0] for word in words)
        several = {section for section, count in sections.items() if section and count > SHOWN_OF_SECTION}
        paths = (section if (section := word.text.rpartition(".")[0]) in several else word.text for word in words)
        names = ", ".join(dict.fromkeys(shortened(path, SHOWN_LETTERS) for path in paths))
        yield Note(f"not read, beyond what is named here: {names}", words[0].origin)
