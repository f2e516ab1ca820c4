"""An option of a program's command line: a name, and the values that it is given."""

from __future__ import annotations

from attrs import frozen


@frozen
class Option:
    """`--name`, or `--name value …`."""

    name: str
    values: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """As the words of a command."""
        return (f"--{self.name}", *self.values)


def option(name: str, *values: object) -> Option:
    """The option of this name with these values, as they are written."""
    return Option(name, tuple(map(str, values)))
