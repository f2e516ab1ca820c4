"""Conversations as tokens, by a tokenizer's chat template, and which of them training predicts: the assistant's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import field, frozen

from megaloom.dsl.errors import UserError

from .token_ids import BYTE_IDS
from .tokenizer_files import transformers_tokenizer

ASSISTANT = "assistant"
Message = Mapping[str, Any]


@frozen
class ChatTemplate:
    """The chat template of a Hugging Face folder."""

    tokenizer: Any = field(repr=False)  # of transformers
    folder: str

    def encode(self, messages: Sequence[Message]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """Return the tokens of a conversation, and whether training predicts each: it is the assistant's.

        An assistant's turn begins after the prompt that generation adds, and ends where the next message begins.
        """
        text = self._render(messages)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens = np.array(encoded["input_ids"], np.int64)
        starts = np.array([start for start, _ in encoded["offset_mapping"]], np.int64)
        counted = np.zeros(len(tokens), np.bool_)
        for i, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                prompt, turn = self._render(messages[:i], prompt=True), self._render(messages[: i + 1])
                if not (text.startswith(turn) and turn.startswith(prompt)):
                    raise UserError(
                        f"the chat template of {self.folder} changes earlier messages when others follow, so that the "
                        f"assistant's tokens are not known\ngive each turn as a conversation of its own"
                    )
                counted |= (starts >= len(prompt)) & (starts < len(turn))
        return tokens, counted

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text of messages, and of what the assistant's answer begins with."""
        return self._render(messages, prompt=True)

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Return the text of messages, with the prompt of the assistant's next turn if asked."""
        if not messages:
            return ""
        try:
            return str(self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt))
        except Exception as error:  # templates raise errors of their own
            raise UserError(f"the chat template of {self.folder} refuses a conversation: {error}") from None


def load_chat_template(source: str, wanted: str = "the documents are conversations") -> ChatTemplate:
    """Return the chat template of a tokenizer. Raise UserError if it has none; `wanted` says why it is needed."""
    if source != BYTE_IDS.name and Path(source).is_dir():
        tokenizer = transformers_tokenizer(Path(source))
        if tokenizer.chat_template and tokenizer.is_fast:
            return ChatTemplate(tokenizer, source)
    raise UserError(
        f"{wanted}, and the tokenizer has no chat template\ngive --tokenizer a Hugging Face folder with a chat template"
    )
