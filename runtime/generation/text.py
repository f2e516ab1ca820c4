"""Text of prompts and of what is written: tokens, names of tokens, chat templates, and text shown while it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import define, field, frozen

from megaloom.dsl.errors import UserError, did_you_mean
from megaloom.runtime.data.chat_template import load_chat_template
from megaloom.runtime.data.tokenizer import load_tokenizer
from megaloom.runtime.data.tokenizer_kinds import JsonTokenizer, TextTokenizer

UNFINISHED = "\ufffd"
"""The character that a tokenizer writes for bytes that are not a whole character."""


@frozen
class PromptText:
    """The tokenizer of a model that writes text."""

    name: str  # "bytes", or a folder or file
    tokenizer: TextTokenizer = field(repr=False)

    @classmethod
    def load(cls, name: str) -> PromptText:
        """Return a tokenizer by its name. Raise UserError if it cannot be read."""
        return cls(name, load_tokenizer(name))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt, with the special tokens that the tokenizer adds, as transformers has them."""
        if isinstance(self.tokenizer, JsonTokenizer):
            return tuple(self.tokenizer.backend.encode(text, add_special_tokens=True).ids)
        return tuple(int(t) for t in self.tokenizer.encode([text])[0])

    def chat(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a conversation in which the user has said this, up to the assistant's turn."""
        template = load_chat_template(self.name, "--chat is given")
        rendered = template.prompt([{"role": "user", "content": text}])
        return tuple(int(t) for t in self.tokenizer.encode([rendered])[0])

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""
        known = self.tokenizer.ids.vocab
        return self.tokenizer.decode([t for t in tokens if t < known])

    def written(self, tokens: Sequence[int], stop: Sequence[str]) -> str:
        """Return the text of tokens up to the first of the texts that end a sequence."""
        return until(self.decode(tokens), stop)

    def token(self, name: str, vocab: int) -> int:
        """Return a token by its id or its name. Raise UserError if the model has no such token."""
        if name.isdigit():
            if int(name) >= vocab:
                raise UserError(f"--eos-token-id {name} is beyond the model's vocabulary of {vocab:,} tokens")
            return int(name)
        if isinstance(self.tokenizer, JsonTokenizer):
            if (found := self.tokenizer.backend.token_to_id(name)) is not None:
                return int(found)
            special = [t.content for t in self.tokenizer.backend.get_added_tokens_decoder().values()]
            hint = did_you_mean(name, special)
            raise UserError(
                f"--eos-token-id {name!r} is not a token of {self.name}{hint}give the name of a token, or an id"
            )
        raise UserError(f"--eos-token-id {name!r} is not the id of a token\nthe tokens of {self.name} have no names")


def until(text: str, stop: Sequence[str]) -> str:
    """Return the text before the first of the texts that end it."""
    return text[: min((at for end in stop if (at := text.find(end)) >= 0), default=len(text))]


@define(eq=False)
class TextStream:
    """Shows one sequence while it is written. Incomplete characters, and possible ends, wait for the next tokens."""

    text: PromptText
    stop: tuple[str, ...]
    show: Callable[[str], object]
    tokens: list[int] = field(factory=list)
    shown: int = 0

    def add(self, token: int) -> None:
        """Show the text that a token completes."""
        self.tokens.append(token)
        text = self.text.decode(self.tokens)
        if text.endswith(UNFINISHED):
            return
        whole = until(text, self.stop)
        begun = max((n for end in self.stop for n in range(1, len(end)) if whole.endswith(end[:n])), default=0)
        self._show(whole[: len(whole) - begun] if whole == text else whole)

    def end(self) -> None:
        """Show the rest of the text."""
        self._show(until(self.text.decode(self.tokens), self.stop))

    def _show(self, text: str) -> None:
        if len(text) > self.shown:
            self.show(text[self.shown :])
            self.shown = len(text)
