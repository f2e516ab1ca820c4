"""The JSON form of a graph, and the fingerprint of a model, which is its hash.

    {"version": 1, "name": "m",
     "weights": {"wte": {"dims": [["vocab", 11], ["embed", 8]]}, ...},
     "nodes": [{"name": "tokens", "kind": "Input", "fields": {"name": "tokens"}, "dims": [["batch"], ["seq"]]},
               {"name": "mlp.0", "kind": "MLP", "fields": {"ff": 4}, "inputs": [{"node": "rms_norm.0"}],
                "weights": ["mlp.0.up", "mlp.0.down"], "dims": [["batch"], ["seq"], ["embed", 8]], "block": 0}, ...],
     "outputs": ["unembed.0"]}

An op or a built-in layer is its class name and those of its fields that are not at their defaults. A layer that is not
built in has a `body` instead: its primitives in order. A dim is [name] or [name, size]; a dim whose size is a share of
other dims is [name, null, share, dims]. Equal numbers are written alike: 1e6 as 1000000.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from inspect import isfunction
from typing import Any

from attrs import NOTHING, fields, has

from megaloom.dsl.dims import Dim, Shape
from megaloom.dsl.errors import UserError
from megaloom.dsl.graph import Graph, Model, graph, without_loss
from megaloom.dsl.layer import Layer
from megaloom.dsl.node import Node, primitives
from megaloom.dsl.op import Op
from megaloom.dsl.ops.weight import INITIAL_STD, Weight
from megaloom.dsl.value import Value

# Raise it when the form changes, or when the mathematics of a built-in op or layer changes under an equal name.
FORM_VERSION = 1
BUILT_IN = "megaloom.dsl."
EXACT = 2**53  # whole floats up to here are written as integers

JSON = dict[str, Any]


def graph_to_json(g: Graph) -> JSON:
    """Return the JSON form of a graph, as dicts, lists, strings and numbers. Raises UserError for a field with no form.

    It does not depend on the process, the version of Python, or where the model was written.
    """
    writer = _Writer(g)
    return {
        "version": FORM_VERSION,
        "name": g.name,
        **({} if g.std == INITIAL_STD else {"std": _number(g.std)}),
        "weights": {name: writer.weight(slot.value, slot.outer) for name, slot in g.weights.items()},
        "nodes": [writer.node(n) for n in g.nodes],
        "outputs": list(g.outputs),
    }


@lru_cache(maxsize=128)  # more than there are examples
def fingerprint(m: Model) -> str:
    """Return the identity of a model: the version of the JSON form, and 16 digits of the form's SHA-256.

    Models with one fingerprint compute one function of one set of weights. The name of the model, its division into
    blocks and its losses do not count.
    """
    form = graph_to_json(graph(without_loss(m)))
    del form["name"]
    for node in form["nodes"]:
        node.pop("block", None)
    text = json.dumps(form, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{FORM_VERSION}-{sha256(text.encode()).hexdigest()[:16]}"


def is_current(identity: str) -> bool:
    """Return True if a fingerprint was made with the JSON form of this version, so that it can be compared."""
    return identity.startswith(f"{FORM_VERSION}-")


class _Writer:
    """Writes the parts of one graph. A field that holds a value names its weight or node."""

    def __init__(self, g: Graph) -> None:
        self.nodes = {id(n.value): n.name for n in g.nodes}
        self.nodes |= {id(n.value.source): n.name for n in g.nodes}
        self.weights = {id(s.value): s.name for s in g.weights.values()}
        self.written: dict[int, JSON] = {}  # the form of each op by its id: repeated layers share one op

    def node(self, n: Node) -> JSON:
        """Return the form of a node."""
        out: JSON = {"name": n.name, **self.op(n.op), "dims": _dims(n.shape)}
        if n.value.args:
            out["inputs"] = [self.reference(a) for a in n.value.args]
        if n.weights:
            out["weights"] = [s.name for s in n.weights]
        if n.block is not None:
            out["block"] = n.block
        if any(isinstance(it, Layer) and not _built_in(it) for it in _ops(n.op)):
            out["body"] = list(self.body(n))
        return out

    def body(self, n: Node) -> Iterator[JSON]:
        """Yield the primitives of a node; their arguments are inputs of the node, weights, or earlier primitives."""
        known: dict[int, JSON] = {}
        for i, a in enumerate(n.value.args):
            known[id(a)] = known[id(a.source)] = {"input": i}
        known |= {id(s.value): {"weight": s.name} for s in n.weights}
        count = 0
        for v, path, outer in primitives(n.value):
            if isinstance(v.op, Weight):
                continue
            yield {
                **self.op(v.op),
                "dims": _dims(v.shape),
                "inputs": [known[_first_known(a, known)] for a in v.args],
                **({"path": path} if path else {}),
                **({"copies": _dims(outer)} if outer else {}),
            }
            known[id(v)] = {"primitive": count}
            count += 1

    def op(self, op: Op) -> JSON:
        """Return the kind and the fields of an op."""
        if id(op) not in self.written:
            self.written[id(op)] = self.form(op)
        return self.written[id(op)]

    def weight(self, v: Value, outer: tuple[Dim, ...]) -> JSON:
        """Return the form of a weight without its name."""
        form = self.form(v.op)["fields"]
        return {**{key: value for key, value in form.items() if key != "name"}, "dims": _dims((*outer, *v.shape))}

    def reference(self, v: Value) -> JSON:
        """Return the name of a weight or a node; a value that the graph does not compute has none."""
        if id(v) in self.weights:
            return {"weight": self.weights[id(v)]}
        while id(v) not in self.nodes and v.body is not None:
            v = v.body
        return {"node": self.nodes.get(id(v))}

    def form(self, it: Any) -> Any:
        """Return the form of the value of a field. Raises UserError if it has none."""
        if it is None or isinstance(it, str | int):
            return it
        if isinstance(it, float):
            return _number(it)
        if isinstance(it, Value):
            return self.reference(it)
        if isinstance(it, Dim):
            return dim_form(it)
        if isinstance(it, tuple | list):
            return [self.form(part) for part in it]
        if isinstance(it, set | frozenset):
            return sorted(map(self.form, it), key=str)
        if isinstance(it, dict):
            return {str(key): self.form(value) for key, value in it.items()}
        if isinstance(it, Fraction):
            return str(it)
        return it.value if isinstance(it, Enum) else self.fields(it)

    def fields(self, it: object) -> JSON:
        """Return the class name of an op or attrs value with its changed fields, or the name of a function."""
        kind = type(it)
        if has(kind) and (not isinstance(it, Layer) or _built_in(it)):
            written = {f.name: getattr(it, f.name) for f in fields(kind) if f.eq and not _is_default(it, f)}
            form = {name: self.form(value) for name, value in written.items()}
            return {"kind": kind.__name__, **({"fields": form} if form else {})}
        if isinstance(it, type) or isfunction(it):
            return {"kind": it.__qualname__}
        if has(kind) or isinstance(it, Op):
            return {"kind": kind.__name__}
        raise UserError(
            f"{kind.__name__} {it!r:.40} has no JSON form, so a model with it has no fingerprint: "
            "use numbers, strings, tuples, enums or frozen attrs values as fields"
        )


def _is_default(it: Any, f: Any) -> bool:
    default = f.default
    if hasattr(default, "takes_self"):  # an attrs.Factory
        default = NOTHING if default.takes_self else default.factory()
    value = getattr(it, f.name)
    return default is not NOTHING and isinstance(value, bool) is isinstance(default, bool) and bool(value == default)


def _ops(it: object) -> Iterator[Op]:
    """Yield an op and the ops in its fields."""
    if isinstance(it, Op):
        yield it
        kind: type = type(it)
        for f in fields(kind) if has(kind) else ():
            yield from _ops(getattr(it, f.name))
    elif isinstance(it, tuple):
        for part in it:
            yield from _ops(part)
    elif isinstance(it, Mapping):
        yield from _ops(tuple(it.values()))


def _built_in(op: Op) -> bool:
    return type(op).__module__.startswith(BUILT_IN)


def _first_known(v: Value, known: Mapping[int, JSON]) -> int:
    """Return the id of a value or, if it is the output of a layer, of the first known value that it stands for."""
    while id(v) not in known and v.body is not None:
        v = v.body
    return id(v)


def _number(x: float) -> int | float | str:
    if x != x or x in (float("inf"), float("-inf")):
        return str(x)
    return int(x) if x.is_integer() and abs(x) <= EXACT else x


def _dims(dims: Shape | tuple[Dim, ...]) -> list[Any]:
    return [dim_form(d) for d in dims]


def dim_form(d: Dim) -> list[Any]:
    """Return the form of a dim."""
    if d.of:
        return [d.name, None, str(d.share), _dims(d.of)]
    return [d.name] if d.size is None else [d.name, d.size]
