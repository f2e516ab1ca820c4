"""Settings as words of Megatron-LM's command line; each word has the line of its setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import evolve, field, frozen

from megaloom.planner.runs.settings.near_names import first_origin, nearly_spelled, unknown_setting
from megaloom.planner.runs.settings.tree import Setting, Tree, items_of_list
from megaloom.planner.runs.words import Command, Origin, Script, Unknown, Word

_SWITCHED_OFF = {
    "add_bias_linear": "disable-bias-linear",
    "add_position_embedding": "no-position-embedding",
    "apply_rope_fusion": "no-rope-fusion",
    "async_tensor_model_parallel_allreduce": "no-async-tensor-model-parallel-allreduce",
    "barrier_with_L1_time": "no-barrier-with-level-1-timing",
    "bias_dropout_fusion": "no-bias-dropout-fusion",
    "bias_gelu_fusion": "no-bias-gelu-fusion",
    "bias_swiglu_fusion": "no-bias-swiglu-fusion",
    "check_for_nan_in_loss_and_grad": "no-check-for-nan-in-loss-and-grad",
    "clone_scatter_output_in_embedding": "no-clone-scatter-output-in-embedding",
    "create_attention_mask_in_dataloader": "no-create-attention-mask-in-dataloader",
    "gradient_accumulation_fusion": "no-gradient-accumulation-fusion",
    "log_learning_rate_to_tensorboard": "no-log-learning-rate-to-tensorboard",
    "log_loss_scale_to_tensorboard": "no-log-loss-scale-to-tensorboard",
    "masked_softmax_fusion": "no-masked-softmax-fusion",
    "mmap_bin_files": "no-mmap-bin-files",
    "overlap_p2p_comm": "no-overlap-p2p-communication",
    "perform_initialization": "no-initialization",
    "tp_comm_bulk_dgrad": "disable-tp-comm-bulk-dgrad",
    "tp_comm_bulk_wgrad": "disable-tp-comm-bulk-wgrad",
    "tp_comm_overlap_ag": "disable-tp-comm-overlap-ag",
    "tp_comm_overlap_rs": "disable-tp-comm-overlap-rs",
    "tp_comm_split_ag": "disable-tp-comm-split-ag",
    "tp_comm_split_rs": "disable-tp-comm-split-rs",
    "use_tokenizer_model_from_checkpoint_args": "no-use-tokenizer-model-from-checkpoint-args",
}
"""Destinations that are true unless the flag beside them is given."""
_NAMED_OTHERWISE = {"fp8": "fp8-format", "fp4": "fp4-format", "layernorm_epsilon": "norm-epsilon"}
"""Destinations whose flag has another name."""


_EMPTY_MATTERS = frozenset({"recompute_modules"})
"""Lists that are something else without items than by default."""
_SWITCHES = frozenset({"sequence_parallel", "bf16", "fp16", "swiglu"})
"""Switches for which people write 0 and 1."""


def flag_words(key: str, value: Tree | None) -> Iterator[Word]:
    """Yield the flag of a setting and its value; nothing for null, what is empty, and a switch that is not set.

    The key is a destination of Megatron-LM, so a mapping, a list in a list and a name with dashes are unknown settings.
    """
    if value is None or (not isinstance(value, Setting) and not value and key not in _EMPTY_MATTERS):
        return
    if "-" in key or not _is_plain(value):
        yield unknown_setting(f"settings.{key}", value)
        return
    flag = "--" + _NAMED_OTHERWISE.get(key, key).replace("_", "-")
    if not isinstance(value, Setting):
        yield Word(flag, first_origin(value))
        yield from (item.word for item in items_of_list(value))
        return
    origin = value.word.origin
    if value.kind == "null":
        return
    if value.kind == "boolean" or (key in _SWITCHES and value.text in ("0", "1")):
        if key in _SWITCHED_OFF:
            if not value.is_true:
                yield Word(f"--{_SWITCHED_OFF[key]}", origin)
        elif value.is_true:
            yield Word(flag, origin)
        elif any(nearly_spelled(key, one) for one in _SWITCHED_OFF):
            yield unknown_setting(f"settings.{key}", value)  # false of a switch that may be on without it
        return
    yield Word(flag, origin)
    yield value.word


def is_other_spelling(key: str) -> bool:
    """Return whether a key is a flag's name that is no destination: `disable_bias_linear` for add_bias_linear."""
    names = {*_SWITCHED_OFF.values(), *_NAMED_OTHERWISE.values()} - {"norm-epsilon"}
    return key.replace("_", "-") in names


def passed_words(key: str, value: Tree) -> Iterator[Word]:
    """Yield a setting as a launcher passes it that writes each key as a flag: FlagScale's `flatten_dict_to_args`.

    A switch that is true is a flag, one that is false is nothing, and null is the text None. A list in a list, and a
    mapping in one, is an unknown setting.
    """
    flag = "--" + key.replace("_", "-")
    if not _is_plain(value):
        yield unknown_setting(f"settings.{key}", value)
    elif not isinstance(value, Setting):
        yield Word(flag, first_origin(value))
        yield from (item.word for item in items_of_list(value))
    elif value.kind != "boolean" or value.is_true:
        yield Word(flag, value.word.origin)
        if value.kind != "boolean":
            yield evolve(value.word, text="None") if value.kind == "null" else value.word


def _is_plain(value: Tree) -> bool:
    """Return whether a setting is a value or a list of values."""
    return not isinstance(value, Mapping) and (isinstance(value, Setting) or all(isinstance(i, Setting) for i in value))


def switch_words(flag: str, value: Setting | None) -> Iterator[Word]:
    """Yield a flag without a value, on the line of a setting."""
    if value is not None:
        yield Word(flag, value.word.origin)


def renamed(flag: str, value: Setting | None, text: str | None = None) -> Iterator[Word]:
    """Yield a flag with the value of a setting, or with another text on its line."""
    if value is not None and value.kind != "null":
        yield Word(flag, value.word.origin)
        yield value.word if text is None else evolve(value.word, text=text)


@frozen(kw_only=True)
class SettingsRun:
    """The run that a settings file describes, as a command line, with what is not known of it."""

    framework: str
    version: str = ""  # the framework's release, if the file states it
    words: tuple[Word, ...]
    nodes: Word | None = None
    per_node: Word | None = None
    environment: Mapping[str, Word] = field(factory=dict, hash=False)
    model: Word | None = None  # a Hugging Face name or path that stands for the model
    program: str = "pretrain_gpt.py"
    unknown: tuple[Unknown, ...] = ()
    assumed: tuple[Unknown, ...] = ()
    beside: str = ""  # the path of a file that is read with the one that was given
    left_out: tuple[Word, ...] = ()  # paths of settings that no reader asks for
    repeated: tuple[Word, ...] = ()  # settings that stand again with another value, which counts

    def script(self, path: str) -> Script:
        """Return the run as the one command of a script: `torchrun … PROGRAM FLAGS`."""
        start = Origin(path, 1)
        launcher = [Word("torchrun", start)]
        for flag, word in (("--nnodes", self.nodes), ("--nproc_per_node", self.per_node)):
            if word is not None:
                launcher += [Word(flag, word.origin), word]
        words = (*launcher, Word(self.program, start), *self.words)
        lacking = tuple(dict.fromkeys(u for w in words for u in w.unknown))
        return Script((Command(words, self.environment, lacking),), {}, self.unknown, self.assumed)
