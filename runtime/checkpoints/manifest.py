"""The manifest of a checkpoint: its model, its progress, and all its files with their sizes and CRCs."""

from __future__ import annotations

import json
from hashlib import sha256
from importlib.metadata import version

import cattrs
from attrs import field, frozen
from cattrs.strategies import configure_union_passthrough

from megaloom.dsl.files.json_form import is_current

VERSION = 3
"""Version of the files and of the manifest. The manifest of version 1 has no checksum."""
DECLARED_NAMES = 3
"""First version whose tensors have the names and dims of the model's weights; see `version_2` for those before."""
MANIFEST_NAME = "checkpoint.json"
CONVERTER = cattrs.Converter()
"""Reads and writes manifests."""
configure_union_passthrough(int | float | str | bool, CONVERTER)
configure_union_passthrough(int | str, CONVERTER)


@frozen
class SavedFile:
    """Size and checksum that a file of a checkpoint must have."""

    nbytes: int
    crc32: int


@frozen(kw_only=True)
class Manifest:
    """The contents of checkpoint.json: model, progress, and all files of a checkpoint."""

    version: int = VERSION
    step: int
    samples: int  # training samples consumed
    model: str
    fingerprint: str
    data: str  # digest of the corpus
    recipe: dict[str, float | str | bool]  # `Recipe.as_saved`
    averaged: bool = False  # whether the checkpoint has averaged weights
    validation_loss: float | None = None  # nats per token; None if it was not evaluated
    epoch: int | None = None  # passes over the training text, if one has ended here and names the checkpoint
    layout: str  # the layout under which the checkpoint was saved
    workload: dict[str, int | str] = field(factory=dict)  # seq, batch, precision; empty in versions before 3
    libraries: dict[str, str] = field(factory=lambda: {name: version(name) for name in ("torch", "megatron-core")})
    files: dict[str, SavedFile] = field(factory=dict)  # by file name; `save` fills it in

    @property
    def folder_name(self) -> str:
        """Return the name of the checkpoint's folder, such as step-000200 or step-000200-epoch-1-loss-1.2345."""
        epoch = "" if self.epoch is None else f"-epoch-{self.epoch}"
        loss = "" if self.validation_loss is None else f"-loss-{self.validation_loss:.4f}"
        return f"step-{self.step:06d}{epoch}{loss}"

    @property
    def has_comparable_fingerprint(self) -> bool:
        """Return whether `fingerprint` is a hash of the graph's current JSON form."""
        return is_current(self.fingerprint)


def manifest_to_json(manifest: Manifest) -> str:
    """Return the text of checkpoint.json, with a checksum of all else that is in it."""
    raw = CONVERTER.unstructure(manifest)
    return json.dumps({**raw, "checksum": manifest_checksum(raw)}, indent=1)


def manifest_checksum(raw: dict[str, object]) -> str:
    """Return the checksum of the contents of checkpoint.json without it."""
    return sha256(json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
