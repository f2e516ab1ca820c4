"""An option of a program's command line."""

from __future__ import annotations

from attrs import frozen


@frozen
class Option:
    """`--name`, or `--name value …`."""

    name: str
    values: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the shell command: the name with its dashes, then each value."""
        return (f"--{self.name}", *self.values)


def option(name: str, *values: object) -> Option:
    """Return the option of this name; values are written by `str`."""
    return Option(name, tuple(map(str, values)))
