"""PREFIX.json beside an indexed dataset: its tokenizer, and digests of what it was made of and of what was written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

import cattrs
from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_file import read_json

from .images import ImageSize
from .indexed import path_of
from .labels import Labels, LabelUnit
from .token_ids import BYTE_IDS, TokenIds

DESCRIPTION_VERSION = 1
SUFFIX, TOKENIZER_SUFFIX = ".json", "-tokenizer"


@frozen(kw_only=True)
class Description:
    """The contents of PREFIX.json."""

    version: int = DESCRIPTION_VERSION
    digest: str  # of sources, tokenizer and options
    sources: tuple[str, ...]
    documents: int
    tokens: int
    ids: TokenIds
    tokenizer: str  # digest of the tokenizer's files
    chat: bool = False  # conversations: samples have whole documents
    labels: Labels | None = None  # of PREFIX-labels
    pairs: bool = False  # PREFIX-target has the other text of each document
    image: ImageSize | None = None  # documents are the pixels of images
    tokens_digest: str = ""  # of the tokens that were written; earlier versions wrote none
    checksum: str = ""  # of the other fields, in the file; earlier versions wrote none

    @property
    def kind(self) -> DataKind:
        """Return what the dataset has beside running text."""
        return DataKind(self.labels, self.pairs, self.image)

    @property
    def is_bytes(self) -> bool:
        """Return whether tokens are bytes, so that no tokenizer lies beside the data."""
        return self.ids == BYTE_IDS


@frozen
class DataKind:
    """The labels, pairs and images of a dataset: models of some objectives train on them alone."""

    labels: Labels | None = None
    pairs: bool = False
    image: ImageSize | None = None

    @property
    def words(self) -> str:
        """Return what the data are, for messages."""
        texts = "images" if self.image else "pairs of texts" if self.pairs else "text"
        if self.labels is None:
            return texts
        each = "token" if self.labels.unit is LabelUnit.TOKEN else "image" if self.image else "document"
        return f"{texts} with a label for each {each}"


RUNNING_TEXT = DataKind()
"""Text without labels or pairs."""


def read_description(prefix: Path) -> Description | None:
    """Return the description of a dataset, or None if it has none, as one that Megatron-LM has written."""
    path = path_of(prefix, SUFFIX)
    try:
        contents = read_json(path)
        if contents["version"] != DESCRIPTION_VERSION:
            raise UserError(
                f"{path} has version {contents['version']}; this megaloom reads version {DESCRIPTION_VERSION}"
            )
        if "checksum" in contents and contents["checksum"] != _checksum(contents):
            raise UserError(f"{path} has changed since it was written\ncopy the files of the dataset again")
        return cattrs.structure(contents, Description)
    except FileNotFoundError:
        return None
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, RecursionError, cattrs.BaseValidationError):
        raise UserError(f"{path} does not describe a dataset\nremove it, or write the dataset again") from None


def write_description(description: Description, prefix: Path) -> None:
    """Write PREFIX.json, with its checksum."""
    contents = cattrs.unstructure(description)
    contents["checksum"] = _checksum(contents)
    path_of(prefix, SUFFIX).write_text(json.dumps(contents, indent=2) + "\n")


def _checksum(contents: Mapping[str, Any]) -> str:
    """Return the checksum of the fields of a description."""
    others = {name: value for name, value in contents.items() if name != "checksum"}
    return blake2b(json.dumps(others, sort_keys=True).encode(), digest_size=8).hexdigest()
