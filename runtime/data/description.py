"""PREFIX.json beside an indexed dataset: its tokenizer, and a digest of what it was made of."""

from __future__ import annotations

import json
from pathlib import Path

import cattrs
from attrs import frozen

from megaloom.dsl.errors import UserError

from .indexed import path_of
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

    @property
    def is_bytes(self) -> bool:
        """Return whether tokens are bytes, so that no tokenizer lies beside the data."""
        return self.ids == BYTE_IDS


def read_description(prefix: Path) -> Description | None:
    """Return the description of a dataset, or None if it has none, as one that Megatron-LM has written."""
    path = path_of(prefix, SUFFIX)
    try:
        contents = json.loads(path.read_text())
        if contents["version"] != DESCRIPTION_VERSION:
            raise UserError(
                f"{path} has version {contents['version']}; this megaloom reads version {DESCRIPTION_VERSION}"
            )
        return cattrs.structure(contents, Description)
    except FileNotFoundError:
        return None
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, cattrs.BaseValidationError):
        raise UserError(f"{path} does not describe a dataset\nremove it, or write the dataset again") from None


def write_description(description: Description, prefix: Path) -> None:
    """Write PREFIX.json."""
    path_of(prefix, SUFFIX).write_text(json.dumps(cattrs.unstructure(description), indent=2) + "\n")
