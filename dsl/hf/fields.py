"""The fields of a Hugging Face config.json, handed out strictly.

Protocol: a reader takes every field that its mathematics depends on; what is `unread` then is refused. So a field is
either read, or known not to change what a trained model computes (`APART`), or an error: none is ignored in silence.
A `default` is what Hugging Face takes where the field is missing; without one the field must be there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from math import inf
from typing import Any, Final, TypeVar

from attrs import field, frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.ops.rope import (
    LinearScaling,
    Llama3Scaling,
    Rope,
    YarnScaling,
    yarn_magnitude,
)

T = TypeVar("T")
V = TypeVar("V")
NEEDED: Final[Any] = object()

# Fields that do not change what a trained model computes, by what they are about.
STORAGE = """_attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
    attn_implementation auto_map cache_implementation chunk_size_feed_forward dtype ep_size gradient_checkpointing
    mamba_ssm_cache_dtype model_type num_logits_to_keep pretraining_tp quantization_config torch_dtype torchscript
    transformers.js_config transformers_version use_bfloat16 use_cache use_mamba_kernels"""
GENERATION = """begin_suppress_tokens bos_token_id cls_token_id decoder_start_token_id do_sample early_stopping
    eos_token_id force_bos_token_to_be_generated forced_bos_token_id forced_eos_token_id length_penalty mask_token_id
    max_length max_position_embeddings min_length no_repeat_ngram_size num_beams pad_token_id prefix sep_token_id
    suppress_tokens task_specific_params tokenizer_class unk_token_id"""  # a table of positions is read by who has one
OUTPUTS = """finetuning_task id2label label2id output_attentions output_hidden_states output_past output_router_logits
    problem_type return_dict summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj"""
TRAINING = """activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop classif_dropout
    classifier_dropout decoder_layerdrop dropout dropout_rate embd_pdrop encoder_layerdrop hidden_dropout
    hidden_dropout_prob init_std initializer_factor initializer_range resid_pdrop router_jitter_noise"""
APART = frozenset(" ".join((STORAGE, GENERATION, OUTPUTS, TRAINING)).split())

# Fields that say nothing with these values.
IDLE: Final[Mapping[str, object]] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}


@frozen(eq=False)
class Config:
    """The fields of one config.json, or of an object inside it, and which of them were read."""

    fields: Mapping[str, object]
    where: str
    taken: set[str] = field(factory=set, repr=False)
    parts: dict[str, Config] = field(factory=dict, repr=False)

    def null(self, name: str) -> bool:
        """Whether a field is there and says null, where that differs from its missing."""
        return name in self.fields and self.fields[name] is None

    def either(self, *names: str) -> str:
        """The first of several names of one field that is there."""
        return next((name for name in names if self.fields.get(name) is not None), names[0])

    def moot(self, *names: str) -> None:
        """Fields that change nothing, given what others say."""
        self.taken.update(names)

    def size(self, name: str, default: int = NEEDED) -> int:
        """How many entries an object or a list has."""
        value: Any = self._take(name, default, object, "an object")
        return len(value) if isinstance(value, dict | list) else default

    def whole(self, name: str, default: T = NEEDED, *, least: int = 1) -> int | T:
        """A whole number of at least `least`; null counts as missing, here and below."""
        return self._take(name, default, int, f"a whole number of at least {least}", lambda n: n >= least)

    def number(self, name: str, default: T = NEEDED) -> float | T:
        """A number that is not negative."""
        return self._take(name, default, float, "a number of at least 0", lambda x: 0 <= x < inf)

    def flag(self, name: str, default: T = NEEDED) -> bool | T:
        """True or false."""
        return self._take(name, default, bool, "true or false")

    def text(self, name: str, default: T = NEEDED) -> str | T:
        """A string."""
        return self._take(name, default, str, "a string")

    def many(self, name: str, default: T = NEEDED) -> list[Any] | T:
        """A list."""
        return self._take(name, default, list, "a list")

    def choice(self, name: str, meant: Mapping[str, T], default: str = NEEDED) -> T:
        """What one of several strings means."""
        value = self.text(name, default)
        if value not in meant:
            raise self.wrong(name, f"it can be {', '.join(map(said, meant))}")
        return meant[value]

    def head_dim(self, embed: int, heads: int) -> int | None:
        """The channels of each head, None if the heads share embed evenly."""
        said = self.whole("head_dim", None)
        return None if said is None or said * heads == embed else said

    def only(self, name: str, *supported: object, default: object = NEEDED) -> None:
        """Check that a field has one of the values for which the mathematics here is right."""
        value = self._take(name, default, object, "any value")
        right = [*supported, *([] if default is NEEDED or default in supported else [default])]
        if not any(value == r and isinstance(value, bool) == isinstance(r, bool) for r in right):
            raise self.wrong(name, f"it can be {' or '.join(map(said, right))} here")

    def inner(self, name: str, default: Mapping[str, object] = NEEDED) -> Config:
        """An object inside, whose fields are checked as this one's are."""
        value: Mapping[str, object] = self._take(name, default, dict, "an object")
        return self.parts.setdefault(name, Config(value, f"{self.where}: {name}"))

    def unread(self) -> Iterator[str]:
        """The fields that say something and that nobody has read, those of objects inside too."""
        for name, value in self.fields.items():
            if name in self.parts:
                yield from (f"{name}.{inner}" for inner in self.parts[name].unread())
            elif value not in (None, IDLE.get(name)) and name not in self.taken | APART and not name.startswith("_"):
                yield name

    def wrong(self, name: str, hint: str) -> UserError:
        """The error of a field whose value cannot be used."""
        return UserError(f"{self.where}: {name} of {said(self.fields.get(name))} is not supported\n{hint}")

    def _take(
        self, name: str, default: T, kind: type[V], what: str, fits: Callable[[V], bool] = lambda _: True
    ) -> V | T:
        self.taken.add(name)
        value: Any = self.fields.get(name)
        if value is None:
            if default is NEEDED:
                raise UserError(f"{self.where} has no {name}, and this architecture needs it: {what}")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        flag = isinstance(value, bool) and kind not in (bool, object)
        if not isinstance(value, kind) or flag or not fits(value):
            raise UserError(f"{self.where}: {name} is {said(value)}, and not {what}")
        return value


def said(value: object) -> str:
    """A value as a config.json writes it."""
    return json.dumps(value, default=str)


def rope(c: Config, default: float = NEEDED, *, head_dim: int | None = None, kind: str = "") -> float | Rope:
    """Rotary positions as `rotation` finds them: their base, if there is no more to say of them."""
    found = rotation(c, default, head_dim=head_dim, kind=kind)
    return found.theta if found == Rope(found.theta) else found


def rotation(
    c: Config, default: float = NEEDED, *, head_dim: int | None = None, part: float = 1.0, kind: str = ""
) -> Rope:
    """Rotary positions as a config says them: in `rope_parameters`, or in `rope_theta` and `rope_scaling` as of old.

    default: the base where none is said. head_dim: needed where only a part of the channels may turn, `part` where none
    is said. kind: of the layer (sliding_attention, full_attention), where each kind has its own.
    """
    turn = c.inner("rope_parameters" if "rope_parameters" in c.fields else "rope_scaling", {})
    turn = turn.inner(kind) if kind in turn.fields else turn
    own = turn.number("rope_theta", None)
    theta = c.number("rope_theta", default if own is None else own)
    if theta == 0:
        raise UserError(f"{c.where}: rotary positions cannot have a base of 0")
    if own not in (None, theta):
        raise c.wrong("rope_theta", f"another base, {own:g}, is said with the other rope parameters")
    if head_dim is not None:
        part = turn.number("partial_rotary_factor", c.number("partial_rotary_factor", part))
    channels = None if head_dim is None or part == 1 else int(head_dim * part)
    meant = {"default": "default", "linear": "linear", "llama3": "llama3", "yarn": "yarn"}
    called = turn.choice(turn.either("rope_type", "type"), meant, "default")
    turn.only("type", called, default=called)  # as it was written before; some have both
    return Rope(theta, channels, scaling=_scaling(called, c, turn))


def _scaling(kind: str, c: Config, turn: Config) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    match kind:
        case "linear":
            return LinearScaling(turn.number("factor"))
        case "llama3":
            low, high = turn.number("low_freq_factor"), turn.number("high_freq_factor")
            return Llama3Scaling(
                factor=turn.number("factor"), low_freq_factor=low, high_freq_factor=high, original=_original(c, turn)
            )
        case "yarn":
            return _yarn(c, turn)
    return None


def _yarn(c: Config, turn: Config) -> YarnScaling:
    original = _original(c, turn)
    factor = turn.number("factor", None) or c.whole("max_position_embeddings") / original
    attention = turn.number("attention_factor", None)
    mscale, of_all = turn.number("mscale", None), turn.number("mscale_all_dim", None)
    if attention is None and mscale and of_all:
        attention = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, of_all)
    return YarnScaling(
        factor=factor,
        original=original,
        beta_fast=turn.number("beta_fast", 32.0),
        beta_slow=turn.number("beta_slow", 1.0),
        attention_factor=attention,
        truncate=turn.flag("truncate", True),
    )


def _original(c: Config, turn: Config) -> int:
    """The length of sequence that a model was first trained on."""
    name = "original_max_position_embeddings"
    found = turn.whole(name, None) or c.whole(name, None)
    return c.whole("max_position_embeddings") if found is None else found
