"""The options --set and --settings: arguments of the model's function, and options of a command from a file."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, ArgumentCollection, Parameter
from cyclopts.argument import update_argument_collection

if TYPE_CHECKING:
    from megaloom.dsl.settings.arguments import Arguments

SET_HELP = (
    "Argument of the model's function or family, or field of a config.json; with --from a flag of the run's program: "
    "NAME=VALUE; repeat it for more."
)
SETTINGS_HELP = (
    "TOML or YAML file: a table [model] with arguments of the model's function, and tables [plan], [train], [show] "
    "with options."
)
SetOption = Annotated[list[str], Parameter(name="--set", negative="", show_default=False, help=SET_HELP)]
SettingsOption = Annotated[Path | None, Parameter(name="--settings", help=SETTINGS_HELP)]


def model_arguments(words: Sequence[str], settings: Path | None) -> Arguments:
    """Return the arguments of a model's function: those of a settings file, replaced by those of --set."""
    if not words and settings is None:
        return {}
    from megaloom.dsl.settings.arguments import words_as_arguments
    from megaloom.dsl.settings.settings_file import MODEL_TABLE, read_settings

    table = {} if settings is None else read_settings(settings).get(MODEL_TABLE, {})
    return {**table, **words_as_arguments(words)}


def options_of_settings(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Give a command the options in its table of the settings file, where the command line gives none."""
    tokens = [token for argument in arguments if argument.name == "--settings" for token in argument.tokens]
    if not tokens:
        return
    from megaloom.dsl.settings.settings_file import read_settings

    command, path = commands[-1] if commands else "plan", tokens[-1].value
    table = read_settings(path).get(command, {})
    known = {a.name.removeprefix("--"): a for a in arguments if a.name.startswith("--") and a.parse}
    config = {}
    for name, value in table.items():
        option = name.replace("_", "-")
        if option not in known or option in ("settings", "set"):
            _refuse(path, command, name, [*known])
        config[option] = _as_text(value)
    update_argument_collection(config, path, arguments, (), root_keys=(), allow_unknown=True)


def _refuse(path: str, command: str, name: str, known: list[str]) -> None:
    from megaloom.dsl.errors import UserError

    near = get_close_matches(name.replace("_", "-"), known, 1)
    suggestion = f": did you mean {near[0]}?" if near else ""
    raise UserError(
        f"{path}: [{command}] has no option {name!r}{suggestion}\n"
        f"its names are the options of the command without --; arguments of the model belong below [model]"
    )


def _as_text(value: Any) -> Any:
    """Return a value as the command line would have it."""
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value if isinstance(value, bool) else str(value)
