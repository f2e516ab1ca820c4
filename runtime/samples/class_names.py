"""Names of classes: those of a config.json and those of labelled data must have one order."""

from __future__ import annotations

from megaloom.dsl.catalog import config_of
from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import read_json
from megaloom.runtime.data.description import DataKind

SHOWN = 6  # classes that a message lists


def check_class_names(ref: str, kind: DataKind, data: str) -> None:
    """Raise UserError if the `id2label` of a model's config.json and the data name classes in different orders.

    ref: the full reference of the model. Names such as LABEL_0, which transformers gives to classes without names, and
    data whose labels are numbers fit any order.
    """
    path = config_of(ref)
    if path is None or kind.labels is None or not kind.labels.names:
        return
    found = read_json(path).get("id2label") or {}
    named = [str(found.get(str(i), "")) for i in range(len(found))]
    ours = list(kind.labels.names)
    if all(name in ("", f"LABEL_{i}") for i, name in enumerate(named)) or named[: len(ours)] == ours:
        return
    raise UserError(
        f"{data} has the classes {_listed(ours)} in this order, and id2label of {path} has {_listed(named)}\n"
        "label the data with the numbers of id2label, or remove id2label to train the classes anew"
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
