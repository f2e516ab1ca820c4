"""Calls of Python's own functions that a configuration is made of: numbers, copies, variables, argparse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

from megaloom.planner.runs.words import Unknown

from .values import Foreign, Function, Instance, Known, Lacking, Value, item_key

MOST_LOOPS = 1000
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "min": min,
    "max": max,
    "abs": abs,
}
PLAIN_TYPES = {"str": str, "int": int, "float": float, "bool": bool}
SWITCH_ACTIONS = {"store_true": False, "store_false": True}


def computed_call(call: Instance, environment: Mapping[str, str]) -> Value | None:
    """Return the value of a call of a function of Python's; None for another one."""
    if call.last in ("deepcopy", "copy") and (call.arguments or call.base):
        return deepcopy(call.arguments[0] if call.arguments else call.base)
    if call.last in ("Config", "Partial") and call.name.startswith("nemo_run.") and call.arguments:
        return _built(call)
    if call.name in ("hasattr", "isinstance") and len(call.arguments) == 2:
        return _asked_of(call)
    if call.name == "fiddle.build" and len(call.arguments) == 1:
        return call.arguments[0]  # the object that a configuration describes
    if call.name == "getattr" and len(call.arguments) > 1 and isinstance(call.arguments[0], Instance):
        default = call.arguments[2] if len(call.arguments) > 2 else Known(None, call.origin)
        return call.arguments[0].fields.get(item_key(call.arguments[1]), default)
    if call.name in ("list", "tuple") and call.arguments and isinstance(call.arguments[0], list):
        return list(call.arguments[0])
    if call.name in FUNCTIONS or call.name in ("len", "range"):
        return _number(call)
    if call.name in ("os.getenv", "os.environ.get"):
        return _variable(call, environment)
    if call.name == "dict.get" and call.base is not None and call.arguments:
        return (
            call.base.fields.get(item_key(call.arguments[0])) or (call.arguments[1:] or [Known(None, call.origin)])[0]
        )
    if call.base is not None and call.base.last == "ArgumentParser":
        return _argparse(call, call.base)
    return None


def _asked_of(call: Instance) -> Value | None:
    """Return whether an object has a field that was set, or whether a value is of a plain type; None if unknown."""
    one, other = call.arguments
    if call.name == "hasattr":
        known = isinstance(one, Instance) and item_key(other) in one.fields
        return Known(True, call.origin) if known else None
    kind = PLAIN_TYPES.get(other.name) if isinstance(other, Foreign) else None
    if kind is None or not isinstance(one, Known | Instance):
        return None
    return Known(isinstance(one, Known) and isinstance(one.value, kind), call.origin)


def _built(call: Instance) -> Value | None:
    """Return the object that `run.Config(CLASS, …)` or `run.Partial(FUNCTION, …)` of NeMo-Run describes."""
    first = call.arguments[0]
    name = first.name if isinstance(first, Foreign) else first.node.name if isinstance(first, Function) else ""
    return Instance(name, call.origin, dict(call.fields), list(call.arguments[1:])) if name else None


def _number(call: Instance) -> Value | None:
    first = call.arguments[0] if call.arguments else None
    if call.name == "len":
        return Known(len(first), call.origin) if isinstance(first, list) else None
    values = [one.value for one in call.arguments if isinstance(one, Known)]
    lacking = next((one for one in call.arguments if isinstance(one, Lacking)), None)
    if len(values) != len(call.arguments) or not values:
        return lacking
    try:
        if call.name == "range":
            numbers = range(*values)  # type: ignore[call-overload]
            return [Known(number, call.origin) for number in numbers] if len(numbers) <= MOST_LOOPS else None
        origin = first.origin if isinstance(first, Known) else call.origin
        return Known(FUNCTIONS[call.name](*values), origin)
    except (TypeError, ValueError, OverflowError):
        return None


def _variable(call: Instance, environment: Mapping[str, str]) -> Value | None:
    """Return the value of a variable of the environment, or the default that the call has."""
    name = call.arguments[0] if call.arguments else None
    if not isinstance(name, Known):
        return None
    if str(name.value) in environment:
        return Known(environment[str(name.value)], call.origin)
    if len(call.arguments) > 1:
        return call.arguments[1]
    return call.fields.get("default") or Lacking(Unknown(str(name.value), "variable", call.origin))


def _argparse(call: Instance, parser: Instance) -> Value | None:
    """Return the parser after an option was added to it, or its options with their defaults."""
    if call.last == "add_argument":
        names = [str(one.value) for one in call.arguments if isinstance(one, Known)]
        name = next((one for one in names if one.startswith("--")), names[0] if names else "")
        dest, action = call.fields.get("dest"), call.fields.get("action")
        key = str(dest.value) if isinstance(dest, Known) else name.lstrip("-").replace("-", "_")
        switch = SWITCH_ACTIONS.get(str(action.value)) if isinstance(action, Known) else None
        default = call.fields.get("default") or Known(switch, call.origin)
        is_needed = isinstance(needed := call.fields.get("required"), Known) and bool(needed.value)
        parser.fields[key] = Lacking(Unknown(name, "positional", call.origin)) if is_needed else default
        return parser
    if call.last in ("parse_args", "parse_known_args"):
        options = Instance("argparse.Namespace", call.origin, dict(parser.fields))
        return options if call.last == "parse_args" else [options, []]
    return None
