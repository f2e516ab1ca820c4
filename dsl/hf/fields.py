"""The fields of a Hugging Face config.json, read strictly.

A reader reads every field that the model depends on. A field that it does not read must be in `UNUSED`, the fields that
do not change what a model computes, or in `TRAINING`, the fields of dropout and initial values: those that have an
effect in Hugging Face are listed in `Model.unused`. Any other field is an error, so that none is ignored silently.
`default` is the value that Hugging Face uses for a missing field; without a default the field is required.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from math import inf
from typing import Any, Final, TypeVar

from attrs import field, frozen

from megaloom.dsl.dims import LARGEST_DIM, MAX_LAYERS
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
REQUIRED: Final[Any] = object()

# Fields that do not change what a model computes, by topic.
STORAGE = """_attn_implementation _attn_implementation_autoset _attn_implementation_internal _auto_class
    _commit_hash _experts_implementation _experts_implementation_internal _from_model_config _is_quantized
    _name_or_path _num_labels _output_attentions _post_init_done architectures attn_implementation auto_map
    chunk_size_feed_forward dtype ep_size gradient_checkpointing internal_version mamba_ssm_cache_dtype model_type
    num_logits_to_keep pretraining_tp quantization_config tf_legacy_loss torch_dtype torchscript
    transformers.js_config transformers_version use_bfloat16 use_cache use_mamba_kernels"""
# Models with a table of positions read max_position_embeddings.
TOKENS = """cls_token_id force_bos_token_to_be_generated mask_token_id max_position_embeddings prefix sep_token_id
    task_specific_params tokenizer_class unk_token_id"""
# The fields of transformers.GenerationConfig, which transformers before 4.26 wrote into config.json.
GENERATION = """assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind
    bad_words_ids begin_suppress_tokens bos_token_id cache_config cache_implementation compile_config constraints
    continuous_batching_config decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers
    early_stopping encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_decoder_ids forced_eos_token_id
    generation_kwargs guidance_scale is_assistant length_penalty low_memory max_cache_len max_length
    max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p no_repeat_ngram_size
    num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_logits
    output_scores pad_token_id penalty_alpha prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values
    renormalize_logits repetition_penalty return_dict_in_generate return_legacy_cache sequence_bias speculation_type
    stop_strings suppress_tokens target_lookbehind temperature token_healing top_h top_k top_p typical_p use_mtp
    watermarking_config"""
OUTPUTS = """classif_dropout classifier_dropout finetuning_task id2label label2id output_attentions
    output_hidden_states output_past output_router_logits problem_type return_dict summary_activation
    summary_first_dropout summary_proj_to_labels summary_type summary_use_proj"""
UNUSED = frozenset(" ".join((STORAGE, TOKENS, GENERATION, OUTPUTS)).split())

# Fields that change the training of a model, for architectures whose reader does not use them.
DROPOUT = """activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop decoder_layerdrop dropout
    dropout_rate embd_pdrop encoder_layerdrop hidden_dropout hidden_dropout_prob resid_pdrop router_jitter_noise"""
INITIAL_VALUES = "init_std initializer_factor initializer_range"
TRAINING = frozenset(f"{DROPOUT} {INITIAL_VALUES}".split())

# Fields that have no effect with these values.
NO_EFFECT: Final[Mapping[str, object]] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}


@frozen(eq=False)
class Config:
    """The fields of a config.json or of an object inside it, with a record of the fields that were read."""

    fields: Mapping[str, object]
    where: str
    balance: float | None = None  # coefficient of the balancing loss of experts, instead of that in the fields
    tensors: Callable[[], Collection[str]] = field(default=tuple, repr=False)  # names of those beside the config
    used: set[str] = field(factory=set, repr=False)
    parts: dict[str, Config] = field(factory=dict, repr=False)

    def is_null(self, name: str) -> bool:
        """Return True if a field is present and null, which may differ from a missing field."""
        return name in self.fields and self.fields[name] is None

    def first_present(self, *names: str) -> str:
        """Return the first of these names that the config has; the first of all if it has none."""
        return next((name for name in names if self.fields.get(name) is not None), names[0])

    def has_tensor(self, name: str) -> bool:
        """Return True if there are weights beside the config, and a tensor of this name is one of them."""
        return name in self.tensors()

    def ignore(self, *names: str) -> None:
        """Mark fields as read that have no effect in this model."""
        self.used.update(names)

    def length(self, name: str, default: int = REQUIRED) -> int:
        """Return the number of entries of an object or an array."""
        value: Any = self._read(name, default, object, "an object")
        return len(value) if isinstance(value, dict | list) else default

    def whole(self, name: str, default: T = REQUIRED, *, least: int = 1, most: int = LARGEST_DIM) -> int | T:
        """Return a whole number in a range. In this and the following methods null counts as missing."""
        expected = f"a whole number of at least {least}"
        value = self._read(name, default, int, expected, lambda n: n >= least)
        if isinstance(value, int) and value > most:
            raise UserError(f"{self.where}: {name} must be at most {most:,}, got {value:,}")
        return value

    def layers(self, name: str, default: T = REQUIRED, *, least: int = 1) -> int | T:
        """Return a number of layers, each of which is built."""
        return self.whole(name, default, least=least, most=MAX_LAYERS)

    def number(self, name: str, default: T = REQUIRED) -> float | T:
        """Return a field that holds a finite number of at least 0."""
        return self._read(name, default, float, "a number of at least 0", lambda x: 0 <= x < inf)

    def rate(self, name: str, default: float) -> float:
        """Return a field that holds the probability of a dropout."""
        return self._read(name, default, float, "a number of at least 0 and below 1", lambda p: 0 <= p < 1)

    def balancing(self, name: str, default: float) -> float:
        """Return the coefficient of the balancing loss of experts, 0 unless training by Hugging Face's code adds one.

        It adds one if `output_router_logits` is true. name: the field with the coefficient.
        """
        given, adds = self.number(name, default), self.flag("output_router_logits", False)
        return self.balance if self.balance is not None else given if adds else 0.0

    def flag(self, name: str, default: T = REQUIRED) -> bool | T:
        """Return a field that holds true or false."""
        return self._read(name, default, bool, "true or false")

    def text(self, name: str, default: T = REQUIRED) -> str | T:
        """Return a field that holds a string."""
        return self._read(name, default, str, "a string")

    def array(self, name: str, default: T = REQUIRED) -> list[Any] | T:
        """Return a field that holds an array."""
        return self._read(name, default, list, "an array")

    def choice(self, name: str, meanings: Mapping[str, T], default: str = REQUIRED) -> T:
        """Return the meaning of a field that holds a string. Raises UserError for a string without a meaning."""
        value = self.text(name, default)
        if value not in meanings:
            raise self.unsupported(name, f"supported: {', '.join(map(as_json, meanings))}")
        return meanings[value]

    def head_dim(self, embed: int, heads: int) -> int | None:
        """Return the field head_dim, or None if it is missing or equals embed / heads."""
        channels = self.whole("head_dim", None)
        return None if channels is None or channels * heads == embed else channels

    def only(self, name: str, *supported: object, default: object = REQUIRED) -> None:
        """Raise UserError if a field has a value that the model here does not support."""
        value = self._read(name, default, object, "any value")
        right = [*supported, *([] if default is REQUIRED or default in supported else [default])]
        if not any(value == r and isinstance(value, bool) == isinstance(r, bool) for r in right):
            raise self.unsupported(name, f"supported: {' or '.join(map(as_json, right))}")

    def inner(self, name: str, default: Mapping[str, object] = REQUIRED) -> Config:
        """Return an object inside this one. Its fields must be read, too."""
        value: Mapping[str, object] = self._read(name, default, dict, "an object")
        return self.parts.setdefault(name, Config(value, f"{self.where}: {name}", self.balance))

    def unread(self) -> Iterator[str]:
        """Yield the names of the fields that may change the model and were not read, also of objects inside."""
        for name, value in self.fields.items():
            if name in self.parts:
                yield from (f"{name}.{inner}" for inner in self.parts[name].unread())
            elif value not in (None, NO_EFFECT.get(name)) and name not in self.used | UNUSED | TRAINING:
                yield name

    def unused(self) -> Iterator[str]:
        """Yield the unread training fields that are not 0, those of nested objects too, as `name = value`."""
        for name, value in self.fields.items():
            if name in self.parts:
                yield from (f"{name}.{inner}" for inner in self.parts[name].unused())
            elif value and name in TRAINING and name not in self.used:
                yield f"{name} = {as_json(value)}"

    def unsupported(self, name: str, hint: str) -> UserError:
        """Return the error for a field whose value is not supported."""
        return UserError(f"{self.where}: {name} = {as_json(self.fields.get(name))} is not supported\n{hint}")

    def _read(
        self, name: str, default: T, kind: type[V], expected: str, fits: Callable[[V], bool] = lambda _: True
    ) -> V | T:
        self.used.add(name)
        value: Any = self.fields.get(name)
        if value is None:
            if default is REQUIRED:
                raise UserError(f"{self.where} has no {name}; this architecture needs it: {expected}")
            return default
        if kind is float and type(value) is int:
            value = float(value)
        flag = isinstance(value, bool) and kind not in (bool, object)
        if not isinstance(value, kind) or flag or not fits(value):
            raise UserError(f"{self.where}: {name} must be {expected}, got {as_json(value)}")
        return value


def as_json(value: object) -> str:
    """Return a value as a config.json writes it."""
    return json.dumps(value, default=str)


def rope(c: Config, default: float = REQUIRED, *, head_dim: int | None = None, kind: str = "") -> float | Rope:
    """Return the rotary positions of a config, as the base alone if nothing else is set (see `rotation`)."""
    full = rotation(c, default, head_dim=head_dim, kind=kind)
    return full.theta if full == Rope(full.theta) else full


def rotation(
    c: Config, default: float = REQUIRED, *, head_dim: int | None = None, part: float = 1.0, kind: str = ""
) -> Rope:
    """Return the rotary positions of a config, from `rope_parameters` or the older `rope_theta` and `rope_scaling`.

    default: the base if the config has none. head_dim: give it if the model may rotate a part of the channels; `part`
    is the share if the config has none. kind: the kind of layer (sliding_attention, full_attention), for configs with
    parameters for each kind.
    """
    scaling = c.inner("rope_parameters" if "rope_parameters" in c.fields else "rope_scaling", {})
    scaling = scaling.inner(kind) if kind in scaling.fields else scaling
    own = scaling.number("rope_theta", None)
    theta = c.number("rope_theta", default if own is None else own)
    if theta == 0:
        raise UserError(f"{c.where}: rope_theta must be more than 1, got 0")
    if own not in (None, theta):
        raise c.unsupported("rope_theta", f"rope_parameters.rope_theta is {own:g}: give one of them, or equal ones")
    if head_dim is not None:
        part = scaling.number("partial_rotary_factor", c.number("partial_rotary_factor", part))
    channels = None if head_dim is None or part == 1 else int(head_dim * part)
    types = {name: name for name in ("default", "linear", "llama3", "yarn")}
    rope_type = scaling.choice(scaling.first_present("rope_type", "type"), types, "default")
    scaling.only("type", rope_type, default=rope_type)  # the older name; some configs have both
    return Rope(theta, channels, scaling=_scaling(rope_type, c, scaling))


def _scaling(kind: str, c: Config, scaling: Config) -> LinearScaling | Llama3Scaling | YarnScaling | None:
    match kind:
        case "linear":
            return LinearScaling(scaling.number("factor"))
        case "llama3":
            return Llama3Scaling(
                factor=scaling.number("factor"),
                low_freq_factor=scaling.number("low_freq_factor"),
                high_freq_factor=scaling.number("high_freq_factor"),
                original=_original(c, scaling),
            )
        case "yarn":
            return _yarn(c, scaling)
    return None


def _yarn(c: Config, scaling: Config) -> YarnScaling:
    original = _original(c, scaling)
    factor = scaling.number("factor", None) or c.whole("max_position_embeddings") / original
    attention = scaling.number("attention_factor", None)
    mscale, mscale_all = scaling.number("mscale", None), scaling.number("mscale_all_dim", None)
    if attention is None and mscale and mscale_all:
        attention = yarn_magnitude(factor, mscale) / yarn_magnitude(factor, mscale_all)
    return YarnScaling(
        factor=factor,
        original=original,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        attention_factor=attention,
        truncate=scaling.flag("truncate", True),
    )


def _original(c: Config, scaling: Config) -> int:
    """Return the sequence length that the model was first trained on."""
    name = "original_max_position_embeddings"
    original = scaling.whole(name, None) or c.whole(name, None)
    return c.whole("max_position_embeddings") if original is None else original
