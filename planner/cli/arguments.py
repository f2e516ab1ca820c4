"""Types and converters of command-line options, and the options that fix a part of the layout."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from inspect import cleandoc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from attrs import asdict, evolve, field, frozen, make_class
from cyclopts import (
    App,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    Parameter,
    UnusedCliTokensError,
)

from megaloom.planner.contract.choices import (
    ExpertShard,
    GradReduce,
    LayoutField,
    ModuleSet,
    OverlapSet,
    Recompute,
    Reshard,
    Shard,
)
from megaloom.planner.contract.layout import FIELDS

_CommandT = TypeVar("_CommandT", bound=Callable[..., object])


def reject_rounded(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Refuse 1.5 for a whole number, which cyclopts would round, and an empty path, which is the current folder."""
    for argument in arguments:
        for token in argument.tokens:
            if argument.hint in (Path, Path | None) and not token.value:
                raise CoercionError(
                    msg="is an empty path; for the current folder write .", argument=argument, token=token
                )
            if argument.hint in (int, int | None) and "." in token.value:
                raise CoercionError(argument=argument, token=token, target_type=int)


def usage_error(error: CycloptsError) -> str:
    """Return the message of a wrong command line: the option, what it takes, and what was given."""
    name = error.argument.name if error.argument else ""
    if isinstance(error, CoercionError) and error.token and not error.msg and error.target_type in (int, float):
        kind = "whole number" if error.target_type is int else "number"
        file = "" if error.token.source in ("", "cli") else f"{error.token.source}: "
        return f"{file}{name} must be a {kind}, got {error.token.value!r}"
    if isinstance(error, CoercionError) and error.token and error.msg:
        return f"{name} {error.msg}"
    if isinstance(error, MissingArgumentError) and not error.tokens_so_far:
        return f"{name} needs a value" if error.keyword else f"{name} is missing"
    if isinstance(error, UnusedCliTokensError):
        return f"unexpected argument {' '.join(error.unused_tokens or ())!r}"
    return str(error)


def parse_share(kind: type, tokens: Sequence[Any]) -> float:
    """Return a share in [0, 1) from `10%` or `0.1`."""
    text = tokens[0].value
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        message = f"must be a share below 1, such as 10% or 0.1, got {text!r}"
        raise CoercionError(msg=message, token=tokens[0], target_type=kind)
    return value


def parse_names(kind: type, tokens: Sequence[Any]) -> tuple[str, ...]:
    """Return names separated by commas or spaces; `none` stands for an empty list."""
    names = tuple(name for token in tokens for name in token.value.split(",") if name)
    return () if names == ("none",) else names


def unwrap_help(command: _CommandT) -> _CommandT:
    """Join each paragraph of a command's docstring into one line, so that help folds at the terminal's width."""
    head, mark, rest = cleandoc(command.__doc__ or "").partition("Parameters\n----------")
    head = re.sub(r"(?<=\S)\n(?=\S)", " ", head)
    rest = re.sub(r"(?m)^    .*(?:\n    .*)+$", lambda lines: "    " + " ".join(lines[0].split()), rest)
    command.__doc__ = head + mark + rest
    return command


_OPTION_TYPES: dict[type, Any] = {
    int: int,
    bool: bool,
    Recompute: Recompute,
    Shard: Shard,
    Reshard: Reshard,
    ExpertShard: ExpertShard,
    GradReduce: GradReduce,
    ModuleSet: tuple[str, ...],
    OverlapSet: tuple[str, ...],
}
"""The types of command-line options, by those of layout fields."""


def _option(spec: LayoutField) -> Any:
    """Return a layout field as a command-line option."""
    parameter: dict[str, Any] = {"name": spec.flag, "help": spec.help}
    if spec.kind in (ModuleSet, OverlapSet):
        parameter |= {"consume_multiple": True, "negative": ""}
    if spec.kind is OverlapSet:
        parameter["converter"] = parse_names
    hint: Any = Annotated[_OPTION_TYPES[spec.kind] | None, Parameter(**parameter)]
    return field(default=None, type=hint)


_DISTRIBUTED_OPTIMIZER = Annotated[
    bool | None,
    Parameter(name="--distributed-optimizer", help="Other names of --shard optimizer and --shard none."),
]
FIXED = "Fix a part of the layout (the rest is searched)"
TRAINED_OVERLAPS = "Communication that runs while devices compute: gradients, weights; or none."
"""Help for the overlaps that Megaloom's own runtime runs."""

if TYPE_CHECKING:

    @frozen
    class FixedLayout:
        """Fields of the layout that the user has fixed; None for the others."""

    class TrainedLayout(FixedLayout):
        """Fields of the layout that the user has fixed, as options that offer what Megaloom's own runtime runs."""

    class ShownLayout(FixedLayout):
        """Fields of the layout that say how tensors are sharded."""
else:

    def _layout_options(name: str, table: Mapping[str, LayoutField], group: str = FIXED) -> Any:
        """Return a class with an option for each layout field of a table."""
        options = {field_name: _option(spec) for field_name, spec in table.items()}
        if "shard" in table:
            options["distributed_optimizer"] = field(default=None, type=_DISTRIBUTED_OPTIMIZER)
        layout_class = make_class(name, options, frozen=True, kw_only=True)
        return Parameter(name="*", group=group)(layout_class)

    FixedLayout = _layout_options("FixedLayout", FIELDS)
    TrainedLayout = _layout_options(
        "TrainedLayout", {**FIELDS, "overlaps": evolve(FIELDS["overlaps"], help=TRAINED_OVERLAPS)}
    )
    ShownLayout = _layout_options(
        "ShownLayout",
        {name: FIELDS[name] for name in ("tp", "sequence_parallel", "cp", "ep", "etp")},
        "Axes of --placements",
    )

NOTHING_FIXED, SEARCH_ALL, NOTHING_SHARDED = FixedLayout(), TrainedLayout(), ShownLayout()


def fixed_fields(fixed: FixedLayout) -> dict[str, Any]:
    """Return the layout fields that the user has fixed, by name."""
    from megaloom.dsl.errors import UserError

    values = {name: value for name, value in asdict(fixed, recurse=False).items() if value is not None}
    on = values.pop("distributed_optimizer", None)
    if on is None:
        return values
    named = Shard.OPTIMIZER if on else Shard.NONE
    if values.setdefault("shard", named) is not named:
        flag = "--distributed-optimizer" if on else "--no-distributed-optimizer"
        raise UserError(f"`{flag}` is `--shard {named}`, but got `--shard {values['shard']}` too\ndrop one of them")
    return values
