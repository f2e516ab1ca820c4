"""Settings of generation, by the option names of Hugging Face's `generate`. Free of torch."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from attrs import Attribute, field, frozen

from megaloom.dsl.errors import UserError
from megaloom.runtime.options.option import at_least, flag_of_option


class EarlyStopping(StrEnum):
    """When beam search stops."""

    FALSE = "false"  # when no running beam is likely to beat the finished ones, by its score at its present length
    TRUE = "true"  # when there are num_beams finished sequences
    NEVER = "never"  # when no running beam can beat the finished ones, by its score at the largest length


def _share(owner: Any, attribute: Attribute[Any], value: float) -> None:
    if not 0 < value <= 1:
        raise UserError(f"{flag_of_option(attribute.name)} must be above 0 and at most 1, got {value:g}")


def _positive(owner: Any, attribute: Attribute[Any], value: float) -> None:
    if not 0 < value < float("inf"):
        raise UserError(f"{flag_of_option(attribute.name)} must be above 0, got {value:g}")


def _early_stopping(value: bool | str) -> EarlyStopping:
    try:
        return EarlyStopping(str(value).lower())
    except ValueError:
        raise UserError(f"--early-stopping must be true, false or never, got {value!r}") from None


@frozen(kw_only=True)
class GenerationSettings:
    """Settings of the choice of tokens and of the end of sequences, by the names of Hugging Face's GenerationConfig."""

    max_new_tokens: int | None = field(default=None, validator=at_least(1))
    """Maximum number of tokens after the prompt. [default: 128, or fewer if the model has no more positions]"""
    do_sample: bool = False
    """Draw tokens by their probabilities, instead of the most probable one."""
    temperature: float = field(default=1.0, validator=_positive)
    """Logits are divided by it. With --do-sample."""
    top_k: int | None = field(default=None, validator=at_least(1))
    """Draw from the K most probable tokens only. With --do-sample. [default: all]"""
    top_p: float = field(default=1.0, validator=_share)
    """Draw from the most probable tokens only, as few as have this probability in sum. With --do-sample."""
    num_beams: int = field(default=1, validator=at_least(1))
    """Beams of beam search; 1: no beam search."""
    length_penalty: float = 1.0
    """Beam search divides the score of a sequence by its length to this power."""
    early_stopping: EarlyStopping = field(default=EarlyStopping.FALSE, converter=_early_stopping)
    """When beam search stops: true, at --num-beams sequences; false, by a heuristic; never, when none can improve."""
    repetition_penalty: float = field(default=1.0, validator=_positive)
    """Above 1, tokens that are in the prompt or in what was written become less probable."""
    num_return_sequences: int = field(default=1, validator=at_least(1))
    """Sequences for each prompt: samples, or the best beams."""
    eos_token_id: tuple[str, ...] | None = None
    """Tokens that end a sequence, by id or name. [default: those of the Hugging Face files, or of the tokenizer]"""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a sequence. They are not part of the text that is returned."""
    seed: int = field(default=0, validator=at_least(0))
    """Seed of the draws of --do-sample."""

    def __attrs_post_init__(self) -> None:
        others = {"temperature": 1.0, "top_k": None, "top_p": 1.0}
        changed = [flag_of_option(name) for name, default in others.items() if getattr(self, name) != default]
        if changed and not self.do_sample:
            raise UserError(f"{changed[0]} has no effect without --do-sample\nadd --do-sample, or leave it out")
        if self.num_beams > 1 and self.do_sample:
            raise UserError(f"--num-beams {self.num_beams} cannot be combined with --do-sample\nleave one of them out")
        if self.num_beams == 1 and (self.length_penalty != 1.0 or self.early_stopping is not EarlyStopping.FALSE):
            name = "--length-penalty" if self.length_penalty != 1.0 else "--early-stopping"
            raise UserError(f"{name} has no effect without beam search\nadd --num-beams 4, or leave it out")
        if not self.do_sample and self.num_return_sequences > self.num_beams:
            raise UserError(
                f"--num-return-sequences {self.num_return_sequences} needs as many beams, or samples\n"
                f"add --num-beams {self.num_return_sequences} or --do-sample"
            )
        if "" in self.stop_strings:
            raise UserError("--stop-strings must not be empty: each text would end at once")

    @property
    def copies(self) -> int:
        """Return the rows that each prompt has in a batch."""
        return self.num_beams if self.num_beams > 1 else self.num_return_sequences
