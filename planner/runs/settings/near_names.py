"""Keys of settings that are nearly spelled as one that is read: a reader must not take them for something else.

Frameworks have hundreds of keys that change no step, in sections of which only some are read. A key there that no
reader asks for is left out, unless its name is so near to that of a key that is read that it may be meant.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import SequenceMatcher

from megaloom.planner.runs.settings.tree import Setting, Tree
from megaloom.planner.runs.words import Origin, Word

NEAR = 0.8
"""Share of equal letters from which two names are nearly alike, where both have at least four letters."""
SHORTEST = 4


def near_names(tree: Tree | None, read: Collection[str], known: Collection[str] = ()) -> Iterator[Word]:
    """Yield as flags, which a parser refuses by name, the keys that are nearly those of the paths that are read.

    read: paths such as `train.micro_batch_size`. known: other keys of the framework, by their last names.
    """
    yield from _near(tree, "", keys_by_section(read), frozenset(known))


def keys_by_section(paths: Iterable[str]) -> dict[str, set[str]]:
    """Return the keys of each section that paths such as `train.micro_batch_size` name; "" is the whole file."""
    sections: dict[str, set[str]] = {}
    for path in paths:
        keys = path.split(".")
        for depth, key in enumerate(keys):
            sections.setdefault(".".join(keys[:depth]), set()).add(key)
    return sections


def _near(tree: Tree | None, path: str, parents: Mapping[str, set[str]], known: frozenset[str]) -> Iterator[Word]:
    if not isinstance(tree, Mapping) or path not in parents:
        return
    for key, value in tree.items():
        inner = f"{path}.{key}" if path else key
        if key not in parents[path] and key not in known and any(nearly_spelled(key, one) for one in parents[path]):
            yield Word(f"--{inner}", first_origin(value))
        yield from _near(value, inner, parents, known)


def nearly_spelled(a: str, b: str) -> bool:
    """Return whether a name is nearly spelled as another: in other letters, or with a letter more, less or changed."""
    plain, other = a.lower().replace("-", "_"), b.lower().replace("-", "_")
    if plain == other:
        return True
    close = min(len(plain), len(other)) >= SHORTEST and SequenceMatcher(None, plain, other).ratio() >= NEAR
    return close and not (a.startswith(f"{b}_") or b.startswith(f"{a}_"))


def first_origin(tree: Tree) -> Origin:
    """Return the line of the first value in a tree."""
    if isinstance(tree, Setting):
        return tree.word.origin
    values = tree.values() if isinstance(tree, Mapping) else tree
    return next((first_origin(one) for one in values), Origin("the settings", 1))


def unknown_setting(path: str, value: Tree) -> Word:
    """Return a setting that is not known as a flag that a parser refuses by name."""
    return Word(f"--{path}", first_origin(value))
