"""The table of Megatron-LM's flags is complete, and words are read by argparse's rules."""

from __future__ import annotations

from argparse import ArgumentError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl import UserError
from megaloom.planner.runs.megatron.field_flags import FIELD_FLAGS
from megaloom.planner.runs.megatron.flag import Effect
from megaloom.planner.runs.megatron.harmless_flags import HARMLESS
from megaloom.planner.runs.megatron.judged_flags import JUDGED
from megaloom.planner.runs.megatron.parser import Arguments, parse_words, table
from megaloom.planner.runs.megatron.read import ArgumentSource, Hints, read_run
from megaloom.planner.runs.run import Devices, TrainingRun
from megaloom.planner.runs.words import Origin, Unknown, Word
from tests.support.exported import FLAGS, parser

GPT = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 "
    "--micro-batch-size 2 --global-batch-size 64 --bf16 --tokenizer-type GPT2BPETokenizer"
)


def words(text: str) -> tuple[Word, ...]:
    return tuple(Word(word, Origin("run.sh", 7)) for word in text.split())


def parsed(text: str) -> Arguments:
    return parse_words(words(text))


def run_of(text: str, gpus: int = 8, **hints: object) -> TrainingRun:
    return read_run(parsed(f"{GPT} {text}"), ArgumentSource("run.sh", Devices(gpus), hints=Hints(**hints)))  # type: ignore[arg-type]


def refusal(text: str, gpus: int = 8, **hints: object) -> str:
    with pytest.raises(UserError) as error:
        run_of(text, gpus, **hints)
    return str(error.value)


def test_every_flag_of_megatron_lm_is_in_the_table_once_with_its_destination_and_number_of_values() -> None:
    names = [name for flag in (*FIELD_FLAGS, *HARMLESS, *JUDGED) for name in flag.names]
    assert len(names) == len(set(names))
    for line in FLAGS.read_text().splitlines():
        if line.startswith("#"):
            continue
        spellings, dest, nargs, *_ = line.split("\t")
        for name in spellings.split():
            assert (table()[name].dest, table()[name].nargs) == (dest, {"None": "1"}.get(nargs, nargs)), name


def test_every_judged_flag_says_what_it_changes() -> None:
    assert all(flag.why and flag.effect in (Effect.LITTLE, Effect.REFUSED) for flag in JUDGED)


SAMPLES = {
    "--num-layers": ["8"],
    "--lr": ["1e-4"],
    "--bf16": [],
    "--disable-bias-linear": [],
    "--data-path": ["a", "b"],
    "--rampup-batch-size": ["32", "32", "1000"],
    "--recompute-modules": ["mlp", "layernorm"],
    "--attention-dropout": ["0.0"],
    "--rotary-base": ["500000"],
}


@given(st.lists(st.tuples(st.sampled_from(sorted(SAMPLES)), st.booleans()), max_size=8))
def test_words_are_read_as_argparse_reads_them(chosen: list[tuple[str, bool]]) -> None:
    line: list[str] = []
    for name, joined in chosen:
        values = SAMPLES[name]
        line += [f"{name}={values[0]}"] if joined and len(values) == 1 else [name, *values]
    theirs = vars(parser().parse_args(line))
    ours = parse_words([Word(word, Origin("x", 1)) for word in line])
    assert not ours.trouble
    assert {dest for dest, value in theirs.items() if value is not None and value is not False} == set(ours.given)
    for dest, one in ours.given.items():
        texts = [word.text for word in one.values]
        assert theirs[dest] == (True if not texts else texts if one.flag.nargs not in ("1",) else texts[0])


def test_the_last_of_several_wins_and_prefixes_are_found() -> None:
    a = parsed("--num-layers 4 --num-layers=6 --tensor-model 2 --hidden-s 8")
    assert (a["num_layers"], a["tensor_model_parallel_size"], a["hidden_size"]) == (6, 2, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--num 4", "--num is the beginning of several flags of Megatron-LM"),
        ("--num-layers", "--num-layers needs a value"),
        ("--num-layers four", "--num-layers must be a whole number"),
        ("--num-layers 99999999999999999999999", "--num-layers must be a whole number from 1 to 2,147,483,647"),
        ("--bf16=1", "--bf16 takes no value"),
        ("--normalization GroupNorm", "--normalization must be one of LayerNorm, RMSNorm"),
        ("--rampup-batch-size 1 2", "--rampup-batch-size needs 3 values"),
        ("--no-such-layers 3", "--no-such-layers is not a known flag"),
        ("hello", "a word that belongs to no flag"),
    ],
)
def test_what_argparse_refuses_is_named_with_its_line(text: str, message: str) -> None:
    (trouble,) = parsed(text).trouble
    assert message in str(trouble) and str(trouble).startswith("run.sh:7: ")
    assert "four" not in str(trouble) and "hello" not in str(trouble)  # words of the file are never shown
    if text.startswith("--num-layers"):
        with pytest.raises((SystemExit, ArgumentError)):
            parser().parse_args(["--num-layers"])


def test_flags_that_are_not_known_refuse_until_they_are_ignored() -> None:
    assert "`--ignore-flag my-fork`" in refusal("--my-fork 3")
    message = refusal("--my-fork 3 --other")
    assert "2 flags are not known" in message and "--my-fork (7), --other (7); `--ignore-flag unknown`" in message
    assert run_of("--my-fork 3 --other", ignored=("unknown",)).layout == run_of("").layout
    assert run_of("--my-fork 3 --other", ignored=("my-fork", "--other")).layout == run_of("").layout


def test_flags_that_are_not_modelled_refuse_with_the_reason() -> None:
    assert "an optimizer on the host is not modelled" in refusal("--optimizer-cpu-offload")
    assert "only Adam is modelled" in refusal("--optimizer muon")
    assert run_of("--optimizer adam --cpu-offloading-num-layers 0").notes == ()


def test_flags_of_little_effect_are_noted() -> None:
    assert any("--deterministic-mode" in note.text for note in run_of("--deterministic-mode").notes)
    assert run_of("--attention-backend flash --no-load-optim --log-interval 1").notes == ()


def test_an_unknown_variable_is_asked_for_where_it_matters() -> None:
    unknown = Word("", Origin("run.sh", 9), (Unknown("LAYERS", "variable", Origin("run.sh", 9)),))
    a = parse_words([*words("--num-layers"), unknown])
    with pytest.raises(UserError, match=r"the value of --num-layers depends on variable LAYERS(.|\n)*--env LAYERS="):
        read_run(a, ArgumentSource("run.sh", Devices(8)))
    assert not parse_words([*words("--save"), unknown]).trouble
    (trouble,) = parse_words([unknown]).trouble
    assert "flags depend on variable LAYERS" in str(trouble)


def test_a_word_that_only_harmless_flags_stand_for_is_not_asked_for() -> None:
    def conditional(text: str) -> Word:
        unknown = (Unknown("DEBUG", "condition", Origin("run.sh", 3)),)
        return Word("", Origin("run.sh", 3), unknown, (words(text), ()))

    assert not parse_words([conditional("--log-interval 1 --profile")]).trouble
    assert parse_words([conditional("--sequence-parallel")]).trouble
