"""No reader drops a setting in silence: an unknown one is refused, or named in a note, wherever it stands.

Each sample file gets a setting of a strange name in every mapping, as a value, a mapping and a list; each value of a
sample that counts becomes a mapping, a list and an interpolation. A setting counts as named if a note has its key, or
the path of a section that is left out as a whole.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest

from megaloom.dsl.errors import UserError
from megaloom.planner.runs.read import read_text
from megaloom.planner.runs.slime import OF_SLIME
from tests.support.run_files import FOLDER, inputs_of

yaml = pytest.importorskip("yaml")

Path = tuple[str, ...]
STRANGE, INNER = "strange_zq", "inner_zq"
SETTINGS = (
    "nemo1.yaml",
    "nemo_rl.yaml",
    "primus.yaml",
    "flagscale.yaml",
    "bridge.yaml",
    "accelerate.yaml",
    "titan.toml",
)
SHAPES = {"value": 7, "true": True, "mapping": {INNER: 7}, "list": [7], "mappings in a list": [{INNER: 7}]}


@cache
def sample(name: str) -> Any:
    """Return the settings of a sample as Python values."""
    text = (FOLDER / name).read_text()
    return tomllib.loads(text) if name.endswith(".toml") else yaml.safe_load(text)


def written(name: str, tree: Mapping[str, Any]) -> str:
    """Return settings in the format of a sample."""
    if not name.endswith(".toml"):
        return str(yaml.safe_dump(tree, sort_keys=False))
    plain = [f"{key} = {_toml(value)}" for key, value in tree.items() if not isinstance(value, dict)]
    for section, values in tree.items():
        if isinstance(values, dict):
            plain += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items())]
    return "\n".join(plain) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')


def mappings(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every mapping."""
    if isinstance(tree, dict):
        yield path
        for key, value in tree.items():
            yield from mappings(value, (*path, key))


def values(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every value."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from values(value, (*path, key))
    else:
        yield path


def changed(tree: Any, path: Path, value: Any) -> Any:
    """Return settings with another value at a path; without the path if the value is None."""
    key, rest = path[0], path[1:]
    inner = changed(tree[key], rest, value) if rest else value
    others = {one: kept for one, kept in tree.items() if one != key}
    if inner is None:
        return others
    return {one: inner if one == key else kept for one, kept in tree.items()} if key in tree else {**others, key: inner}


def answer(name: str, text: str, *words: str) -> tuple[str, str]:
    """Return what a user is told of a file, and what is read of it; the second is empty for a file that is refused."""
    given = inputs_of(name)
    try:
        run = read_text(text, name, type(given)(**{**_fields(given), "positional": words}))
    except UserError as error:
        return str(error), ""
    told = "\n".join(note.text for note in (*run.assumed, *run.notes))
    return told, f"{run.layout} {run.workload} {run.profile} {run.devices.count} {[f.value for f in run.stated]}"


def _fields(given: Any) -> dict[str, Any]:
    return {name: getattr(given, name) for name in ("environment", "devices", "hints", "flags", "command")}


def named(told: str, path: Path) -> bool:
    """Return whether a text has the last key of a path, or names a section that the path is in."""
    sections = (".".join(path[:depth]) for depth in range(1, len(path)))
    told = told.replace("-", "_")
    return path[-1] in told or any(re.search(rf"(?<![\w.]){re.escape(one)}(?![\w.])", told) for one in sections)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("shape", SHAPES)
def test_an_unknown_setting_is_refused_or_named_at_every_level(name: str, shape: str) -> None:
    dropped = []
    for path in mappings(sample(name)):
        told, _ = answer(name, written(name, changed(sample(name), (*path, STRANGE), SHAPES[shape])))
        if not named(told, (*path, STRANGE)) and INNER not in told.replace("-", "_"):
            dropped.append(".".join((*path, STRANGE)))
    assert not dropped


@pytest.mark.parametrize("name", SETTINGS)
def test_a_value_of_another_shape_is_refused_or_named(name: str) -> None:
    """A value without which the same is read has no effect in any shape."""
    tree, dropped = sample(name), []
    _, read = answer(name, written(name, tree))
    for path in values(tree):
        if answer(name, written(name, changed(tree, path, None)))[1] == read:
            continue
        old = tree
        for key in path:
            old = old[key]
        for new in ({INNER: old}, [{INNER: old}], "${nothing_zq}"):
            told, other = answer(name, written(name, changed(tree, path, new)))
            if other and not named(told, path) and INNER not in told and "nothing_zq" not in told:
                dropped.append(f"{'.'.join(path)}: {new}")
    assert not dropped


@pytest.mark.parametrize("name", [*SETTINGS, "recipe.py", "titan.py"])
@pytest.mark.parametrize("word", [STRANGE, f"~{STRANGE}.a", f"--{STRANGE}", f"--{STRANGE}=7", f"{STRANGE}[0]=7"])
def test_a_word_after_the_file_is_refused_or_named(name: str, word: str) -> None:
    text = (FOLDER / name).read_text()
    for words in ((word,), (word, "7"), (f"+{STRANGE}=7",), (f"a.b.{STRANGE}=7",), (f"++{STRANGE}.c=[7]",)):
        told, read = answer(name, text, *words)
        path = words[0].lstrip("~+-").partition("=")[0]
        assert not read or named(told, tuple(path.split("."))), (words, told)


PROGRAMS = ("pretrain_gpt.py", "train.py", "main_ppo", "megatron sft", "--num-layers")


@pytest.mark.parametrize(
    "name", ["verl.sh", "swift.sh", "slime.sh", "dense.sh", "flags.txt", "experts.slurm", "fork.sh"]
)
@pytest.mark.parametrize("word", [STRANGE, f"--{STRANGE}", f"--{STRANGE} 7", f"--{STRANGE}=7"])
def test_an_unknown_word_of_a_command_is_refused_or_named(name: str, word: str) -> None:
    text, dropped = (FOLDER / name).read_text(), []
    begin = max((text.find(program) for program in PROGRAMS if program in text), default=0)
    places = [at.start() for at in re.finditer(r"(?<=[\w}])[ \n](?=--[a-z])|(?<=[\w}]) (?=[a-z_]+\.[\w.]+=)", text)]
    places = [place for place in places if place >= begin]
    for place in places:
        told, read = answer(name, f"{text[:place]} {word}{text[place:]}")
        before = text[:place].split()
        if word == STRANGE and (before[-2] in OF_SLIME or "--sglang" in before[-2] or "--dataset" in before[-4:]):
            continue  # another value of an option that only its framework knows
        if read and STRANGE not in told.replace("-", "_"):
            dropped.append(text[place : place + 40])
    assert not dropped and places


VERL = ("", "actor_rollout_ref.", "actor_rollout_ref.actor.", "actor_rollout_ref.actor.megatron.", "trainer.", "data.")


@pytest.mark.parametrize("section", [*VERL, "actor_rollout_ref.actor.optim.", "actor_rollout_ref.model.", "algorithm."])
@pytest.mark.parametrize("form", ["{}=7", "+{}=7", "++{}.a=7", "{}=[7]", "+{}={{a:7}}", "~{}", "~{}=7"])
def test_an_override_of_verl_is_refused_or_named(section: str, form: str) -> None:
    text = (FOLDER / "verl.sh").read_text().rstrip()
    told, read = answer("verl.sh", f"{text} {form.format(section + STRANGE)}\n")
    assert named(told, (*section.split(".")[:-1], STRANGE)), read


DEEPSPEED = """cat <<EOT > ds.json
{{"train_batch_size": 8, "zero_optimization": {{"stage": 2{}}}, "fp16": {{"enabled": true}}{}}}
EOT
deepspeed --num_nodes 1 --num_gpus 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 8 \\
  --seq-length 256 --max-position-embeddings 256 --micro-batch-size 1 --global-batch-size 8 --vocab-size 1000 --fp16 \\
  --no-pipeline-parallel --deepspeed --deepspeed_config ds.json {}
"""


@pytest.mark.parametrize("flag", ["", "--zero-stage 2", "--zero-stage=2"])
@pytest.mark.parametrize("value", ["7", "true", '{"device": "cpu"}', '{"enabled": true}', "[7]"])
def test_an_unknown_key_of_a_file_of_deepspeed_is_refused(value: str, flag: str) -> None:
    key = f', "{STRANGE}": {value}'
    for inside, beside in ((key, ""), ("", key)):
        told, read = answer("run.sh", DEEPSPEED.format(inside, beside, flag))
        assert STRANGE in told and not read
    off = f', "{STRANGE}": {{"enabled": false, "size": 7}}'
    assert answer("run.sh", DEEPSPEED.format(off, off, flag)) == answer("run.sh", DEEPSPEED.format("", "", flag))
    assert "no mapping of JSON" in answer("run.sh", DEEPSPEED.format(", stage", "", flag))[0]
