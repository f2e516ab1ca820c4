"""A model as a file, which loads where the program that declared it is missing. Reading it runs no code.

    {"version": 3, "seal": "5f0c…", "fingerprint": "1-…", "name": "m",
     "ops": [{"kind": "MLP", "fields": {"ff": 64}}, …],
     "values": [{"op": 0, "args": [], "dims": [["batch"], ["seq"]], "dtype": "index"}, …], "outputs": [7], "lora": null}

`values` are all values of the program in order, bodies of layers included; `args` and `body` are positions in it. A
layer that is not built in is its name, its shard policies and its body. A torch module of its own is left out. Of a
model with adapters, the file has the model without them, and `lora`, which says where they are.

The fingerprint says what model this is: built-in layers count by their fields. `seal` is the SHA-256 of everything else
in the file, bodies of built-in layers included, so that no change of it is read as another model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from fractions import Fraction
from hashlib import sha256
from pathlib import Path
from typing import Any, NoReturn

from attrs import NOTHING, asdict, fields, has

from megaloom.dsl.dims import Dim, DType, Shape
from megaloom.dsl.errors import ShapeError, UserError
from megaloom.dsl.graph import Model
from megaloom.dsl.layer import Layer, held_values
from megaloom.dsl.low_rank import LoRA
from megaloom.dsl.op import Op
from megaloom.dsl.ops.weight import INITIAL_STD
from megaloom.dsl.transforms.adapters import adapted
from megaloom.dsl.value import Value

from .built_in import built_in_kinds, is_built_in
from .json_file import read_json
from .json_form import JSON, dim_form, fingerprint, is_current
from .loaded_layer import LoadedLayer, loaded_kind

VERSION = 3
"""Version of the file. 3: seal; 2: adapters."""
READ = (1, 2, VERSION)
SEALED = 3  # the first version with a seal


def model_to_json(m: Model) -> JSON:
    """Return a model as JSON. Raises UserError for a field or a primitive that has no JSON form."""
    writer, identity, lora, m = _Writer(), fingerprint(m), m.lora, m.without_adapters
    values = [writer.value(v) for v in _in_order(m)]
    out = {
        "version": VERSION,
        "fingerprint": identity,
        "name": m.name,
        "std": m.std,
        "unused": list(m.unused),
        "ops": writer.ops,
        "values": values,
        "outputs": [writer.positions[id(v)] for v in m.outputs],
        "lora": None if lora is None else asdict(lora),
    }
    return {"version": VERSION, "seal": _seal(out), **out}


def _seal(raw: JSON) -> str:
    """Return the hash of a file's fields, without that of the seal itself."""
    sealed = {name: value for name, value in raw.items() if name != "seal"}
    return sha256(json.dumps(sealed, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def save_model(m: Model, path: Path) -> None:
    """Write a model to a file. Raises UserError for a model that has no JSON form."""
    path.write_text(json.dumps(model_to_json(m), separators=(",", ":"), allow_nan=False), encoding="utf-8")


def load_model(path: str | Path) -> Model:
    """Return the model in a file. Raises UserError if the file is damaged, or of another version of megaloom."""
    try:
        raw = read_json(path)
    except OSError as error:
        raise UserError(f"cannot read a model from {path}: {error.strerror}") from None
    except ValueError:
        raise UserError(f"{path} is not JSON, so not a model\ncopy the run folder again") from None
    return model_from_json(raw, str(path))


def model_from_json(raw: object, where: str) -> Model:
    """Return the model of this JSON; `where` is its file, for errors. Raises UserError."""
    advice = "declare the model again from its source, or install the megaloom that wrote this file"
    if not isinstance(raw, dict) or not isinstance(raw.get("fingerprint"), str) or "values" not in raw:
        raise UserError(f"{where} is not a model\ngive the model.json of a run folder")
    if raw.get("version") not in READ or not is_current(raw["fingerprint"]):
        made = f"version {raw.get('version')!r}, fingerprint {raw['fingerprint']:.20}"
        raise UserError(f"{where} is a model of another version of megaloom ({made})\n{advice}")
    if (raw["version"] >= SEALED or "seal" in raw) and raw.get("seal") != _seal(raw):
        raise UserError(f"{where} was changed after it was written: its seal is another\ncopy the run folder again")
    try:
        m = _Reader(raw).model()
        same = fingerprint(m) == raw["fingerprint"]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ShapeError, RecursionError) as error:
        raise UserError(f"{where} is damaged: {type(error).__name__} {error}\ncopy the run folder again") from None
    if not same:
        raise UserError(f"{where} is damaged: its model has another fingerprint\ncopy the run folder again")
    return m


def _in_order(m: Model) -> Iterator[Value]:
    """Yield all values of a model, arguments, bodies and the values in fields of layers before the value."""
    seen: set[int] = set()
    todo = [(v, False) for v in reversed(m.outputs)]
    while todo:
        v, ready = todo.pop()
        if ready:
            yield v
        elif id(v) not in seen:
            seen.add(id(v))
            before = (*held_values(v.op), *v.args, *([] if v.body is None else [v.body]))
            todo += [(v, True), *((a, False) for a in reversed(before))]


class _Writer:
    """Writes values and ops. `positions` has the position of each value by its id."""

    def __init__(self) -> None:
        self.positions: dict[int, int] = {}
        self.ops: list[JSON] = []
        self.numbers: dict[int, int] = {}  # the position of each op by its id
        self.own: list[tuple[Layer, int]] = []

    def value(self, v: Value) -> JSON:
        """Return the form of a value. The values that it depends on come first."""
        self.positions[id(v)] = len(self.positions)
        return {
            "op": self.op(v.op),
            "args": [self.positions[id(a)] for a in v.args],
            "dims": [dim_form(d) for d in v.shape],
            **({} if v.body is None else {"body": self.positions[id(v.body)]}),
            **({} if v.dtype is DType.COMPUTE else {"dtype": str(v.dtype)}),
        }

    def op(self, op: Op) -> int:
        """Return the position of an op in `ops`."""
        if id(op) not in self.numbers:
            form = self.own_layer(op) if isinstance(op, Layer) and not is_built_in(op) else self.fields(op)
            self.numbers[id(op)] = len(self.ops)
            self.ops.append(form)
        return self.numbers[id(op)]

    def own_layer(self, layer: Layer) -> JSON:
        """Return the form of a layer that is not built in."""
        number = next((n for known, n in self.own if known == layer), len(self.own))
        self.own.append((layer, number))
        return {
            "own": type(layer).__name__,
            "shown": str(layer),
            "number": number,
            "held": [self.positions[id(v)] for v in held_values(layer)],
            "at": layer.at,
            "splits": {name: self.form(entry) for name, entry in layer.splits.items()},
            "transparent": layer.transparent,
            "module": hasattr(layer, "module"),
        }

    def fields(self, it: Any) -> JSON:
        """Return the class name of an op or attrs value with its changed fields."""
        if not has(type(it)) or not is_built_in(it):
            _refuse(it)
        out = {f.name: getattr(it, f.name) for f in fields(type(it)) if f.init}
        defaults = {f.name: f.default for f in fields(type(it))}
        changed = {n: v for n, v in out.items() if isinstance(v, Value) or defaults[n] is NOTHING or v != defaults[n]}
        return {"kind": type(it).__name__, "fields": {name: self.form(value) for name, value in changed.items()}}

    def form(self, it: Any) -> Any:
        """Return the form of the value of a field."""
        if isinstance(it, Enum):
            return {"kind": type(it).__name__, "enum": it.value}
        if it is None or isinstance(it, str | int):
            return it
        if isinstance(it, float):
            return it if it - it == 0 else {"number": str(it)}
        if isinstance(it, tuple | list):
            return [self.form(part) for part in it]
        if isinstance(it, Mapping):
            return {"items": {str(key): self.form(value) for key, value in it.items()}}
        if isinstance(it, Fraction):
            return {"fraction": str(it)}
        if isinstance(it, Dim):
            return {"dim": dim_form(it)}
        if isinstance(it, Value):
            return {"value": self.positions[id(it)]}
        return {"op": self.op(it)} if isinstance(it, Op) else self.fields(it)


class _Reader:
    """Reads values and ops in the order in which they were written. An op may hold values before it, and ops."""

    def __init__(self, raw: JSON) -> None:
        self.raw = raw
        self.values: list[Value] = []
        self.ops: dict[int, Op] = {}

    def model(self) -> Model:
        """Return the model."""
        for form in self.raw["values"]:
            self.values.append(self.value(form))
        outputs = tuple(self.values[_position(i)] for i in self.raw["outputs"])
        name, std, unused = self.raw["name"], self.raw.get("std", INITIAL_STD), self.raw["unused"]
        if not outputs or type(name) is not str or not isinstance(std, int | float):
            raise ValueError("name, std or outputs are wrong")
        m = Model(name, outputs, float(std), tuple(map(str, unused)))
        return m if (lora := self.raw.get("lora")) is None else adapted(m, _lora(lora))

    def value(self, form: JSON) -> Value:
        """Return the value of a form."""
        args = tuple(self.values[_position(i)] for i in form["args"])
        body = self.values[_position(form["body"])] if "body" in form else None
        shape = Shape(tuple(_dim(d) for d in form["dims"]))
        return Value(self.op(form["op"]), args, shape, body, dtype=DType(form.get("dtype", DType.COMPUTE)))

    def op(self, number: int) -> Op:
        """Return an op by its position."""
        if number not in self.ops:
            form = self.raw["ops"][_position(number)]
            op = self.own_layer(form) if "own" in form else self.fields(form)
            if not isinstance(op, Op):
                raise ValueError(f"{type(op).__name__} is not an op")
            self.ops[number] = op
        return self.ops[number]

    def own_layer(self, form: JSON) -> LoadedLayer:
        """Return a layer that was not built in."""
        splits = tuple((name, self.form(entry)) for name, entry in form["splits"].items())
        kind = loaded_kind(str(form["own"]), splits, bool(form["transparent"]), bool(form["module"]))
        held = tuple(self.values[_position(i)] for i in form["held"])
        return kind(str(form["shown"]), _position(form["number"]), held, at=str(form["at"]))

    def fields(self, form: JSON) -> Any:
        """Return an op or attrs value of a class of megaloom.dsl."""
        kind = built_in_kinds()[form["kind"]]
        if "enum" in form:
            return kind(form["enum"])
        return kind(**{name: self.form(value) for name, value in form["fields"].items()})

    def form(self, form: Any) -> Any:
        """Return the value of a field."""
        if isinstance(form, list):
            return tuple(self.form(part) for part in form)
        if not isinstance(form, dict):
            return form
        if "kind" in form:
            return self.fields(form)
        ((what, inner),) = form.items()
        match what:
            case "number":
                return float(inner)
            case "items":
                return {str(key): self.form(value) for key, value in inner.items()}
            case "fraction":
                return Fraction(inner)
            case "dim":
                return _dim(inner)
            case "value":
                return self.values[_position(inner)]
            case "op":
                return self.op(inner)
        raise ValueError(f"unknown form {what!r:.40}")


def _lora(form: JSON) -> LoRA:
    """Return the settings of adapters."""
    nodes = {name: tuple(tuple(map(str, group)) for group in groups) for name, groups in form["nodes"].items()}
    return LoRA(form["rank"], form["alpha"], tuple(map(str, form["targets"])), nodes)


def _position(i: Any) -> int:
    """Return a position, which is not negative."""
    if type(i) is not int or i < 0:
        raise ValueError(f"{i!r:.40} is not a position")
    return i


def _dim(form: Any) -> Dim:
    """Return the dim that `dim_form` wrote."""
    match form:
        case [name] | [name, int()]:
            return Dim(name, *form[1:])
        case [name, None, str(share), [*of]]:
            return Dim(name, None, Fraction(share), tuple(map(_dim, of)))
    raise ValueError(f"{form!r:.40} is not a dim")


def _refuse(it: object) -> NoReturn:
    raise UserError(
        f"{type(it).__name__} {it!r:.40} has no JSON form, so a model with it cannot be saved: "
        "use layers with a body, and numbers, strings, tuples or values of megaloom.dsl as fields"
    )
