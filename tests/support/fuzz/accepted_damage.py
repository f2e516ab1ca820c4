"""Damaged run files that are accepted: the damage is seen in what is read, or is said, or is without effect.

A file is read before and after the damage, without planning. What is compared is the model, the layout, the workload,
the stages, the framework's profile, the devices and the measured step. Everything that is assumed or left out counts as
said. A damage that is accepted, changes nothing of these and says nothing is silent, unless it only touches what has no
effect on a step.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from random import Random

from attrs import frozen

from megaloom.dsl.errors import UserError
from megaloom.dsl.files.json_form import fingerprint
from megaloom.planner.runs.megatron.flag import Effect
from megaloom.planner.runs.megatron.parser import table
from megaloom.planner.runs.read import read_text
from tests.support.run_files import FOLDER, RUN_FILES, inputs_of

_SHELL = (
    r"(?<![\w-])--(?P<name>[\w-]+)(?:[ =]+(?P<value>[^\s\"'()\\-][^\s\"'()]*))?"
    r"|(?<![\w-])(?P<key>[\w.]+\.\w+)=(?P<text>[^\s\"'()]+)"
)
SETTINGS: Mapping[str, re.Pattern[str]] = {
    "sh": re.compile(_SHELL),
    "slurm": re.compile(_SHELL),
    "txt": re.compile(_SHELL),
    "yaml": re.compile(r"(?P<name>[\w.]+):\s+(?P<value>[^\s,{}\[\]#]+)"),
    "toml": re.compile(r"(?m)^(?P<name>\w+) *= *(?P<value>\S+)$"),
    "py": re.compile(r"\b(?P<name>\w+)=(?P<value>[^,()\s]+)|\.(?P<key>\w+) = (?P<text>\S+)"),
    "log": re.compile(r"(?m)^\s+(?P<name>\w+) \.{2,} (?P<value>\S+)"),
}
"""Patterns of a setting and its value, by the ending of a file."""
_NO_EFFECT = """
compute_environment machine_rank megatron_lm_gradient_clipping work_group tensor_parallel_size generation vllm_cfg
sglang-mem-fraction-static address dataset packing data.train_batch_size config-name mcore_gpt tp-comm-overlap-cfg
deepspeed_config trainer.nnodes max_position_embeddings max-position-embeddings data_path optimizer lr_scheduler
logging runner experiment
"""
NO_EFFECT = frozenset(_NO_EFFECT.split())
"""Settings of the files that change no step."""
_AS_WITHOUT = """
grad_reduce_in_fp32 transformer-impl vocab_size vocab-size tokenizer_type world_size ntasks-per-node gpus-per-node
megatron_lm_recompute_activations num_machines context_parallel_size
data_parallel_shard_degree activations_checkpoint_num_layers ffn_hidden_size pipeline_model_parallel_size
"""
AS_WITHOUT = frozenset(_AS_WITHOUT.split())
"""Settings whose value in the files is that without them, or is stated by another setting too."""


OUTWEIGHED = {"log.log": frozenset({"tokenizer_type", "vocab_size"})}
"""Settings beside others that count instead: a log lists the padded vocabulary."""


@frozen
class Reading:
    """The run that a reader makes of a file, and the notes that it prints about it."""

    facts: Mapping[str, object]
    said: tuple[str, ...]


@frozen
class Damage:
    """A damaged file: the kind of damage, the settings that it touches, and how it may be accepted.

    removed: the settings are not there any more. changed: a changed reading is enough; otherwise it has to be said.
    same: the reading must be as before.
    """

    kind: str
    file: str
    text: str
    touched: tuple[str, ...]
    removed: bool = False
    changed: bool = True
    same: bool = False


def reading(name: str, text: str) -> Reading | str:
    """Return what is read of a text, or the message with which it is refused."""
    try:
        run = read_text(text, str(FOLDER / name), inputs_of(name))
    except UserError as error:
        return str(error)
    m = run.measured
    facts = {fact.name: fact.value for fact in run.stated} | {
        "model": fingerprint(run.model),
        "run": (run.layout, run.workload, run.stages, run.profile),
        "devices": (run.devices.count, run.devices.per_machine),
        "measured": m and (m.seconds, m.nbytes, m.reserved),
    }
    return Reading(facts, tuple(note.text for note in (*run.assumed, *run.notes)))


@cache
def undamaged(name: str) -> Reading:
    """Return what is read of a file as it is."""
    whole = reading(name, (FOLDER / name).read_text())
    assert isinstance(whole, Reading), whole
    return whole


def silent(damage: Damage) -> str:
    """Return what is wrong with the acceptance of a damaged file; an empty text if nothing is."""
    now, before = reading(damage.file, damage.text), undamaged(damage.file)
    free = (
        _without_effect() | OUTWEIGHED.get(damage.file, frozenset()) | (AS_WITHOUT if damage.removed else frozenset())
    )
    if isinstance(now, str) or set(damage.touched) <= free:
        return ""
    differs = [name for name in {*now.facts, *before.facts} if now.facts.get(name) != before.facts.get(name)]
    if damage.same:
        return f"{', '.join(sorted(differs))} read otherwise" if differs else ""
    if set(now.said) - set(before.said) or (differs and damage.changed):
        return ""
    return "accepted in silence" if not differs else f"{', '.join(sorted(differs))} read otherwise, and nothing is said"


@cache
def _without_effect() -> frozenset[str]:
    """Return the names of settings that have no effect on a step."""
    flags = {flag.dest for flag in table().values() if flag.effect is Effect.NOTHING}
    return NO_EFFECT | flags | {dest.replace("_", "-") for dest in flags}


def settings_of(name: str, text: str) -> Iterator[tuple[str, tuple[int, int], tuple[int, int] | None]]:
    """Yield the settings of a text: the name, its place, and the place of its value."""
    for found in SETTINGS[name.rpartition(".")[2]].finditer(text):
        first = "name" if found["name"] else "key"
        second = "value" if first == "name" else "text"
        yield found[first], found.span(first), found.span(second) if found[second] else None


def _misspelled(draw: Random, file: str, text: str) -> Damage | None:
    name, (start, end), _ = draw.choice([one for one in settings_of(file, text) if len(one[0]) > 5])
    at = start + (end - start) // 2
    changes = [text[start:at] + text[at + 1 : end], text[start:at] + text[at] + text[at:end], text[start:end] + "s"]
    new = draw.choice([*changes, text[start:end].upper()])
    return Damage("misspelled name", file, text[:start] + new + text[end:], (name,), changed=False)


def _value(draw: Random, file: str, text: str) -> Damage | None:
    name, _, place = draw.choice([one for one in settings_of(file, text) if one[2]])
    assert place is not None
    start, end = place
    old = text[start:end]
    if old[0] in "$\"'" or (old.isidentifier() and not file.endswith("log")):
        return None
    junk, new = draw.choice(
        [
            ("a value with more behind it", old + draw.choice(["x", "k", "%", "²", "\u200b", "!"])),
            ("a negative number", f"-{old}"),
            ("another number of digits", old + "1"),
            ("no number", draw.choice(["nan", "inf", "banana", "9" * 30])),
        ]
    )
    if new.startswith("-") and old.strip("0.") == "":
        return None  # -0.0 is 0
    return Damage(junk, file, text[:start] + new + text[end:], (name,))


def _again(draw: Random, file: str, text: str) -> Damage | None:
    """Let a setting stand again with another number, where files of the format may have it twice."""
    places = [(n, p, v) for n, p, v in settings_of(file, text) if v and text[v[0] : v[1]].isdecimal()]
    if file == "recipe.py" or not places:  # Python's assignments count in their order
        return None
    name, (start, _), value = draw.choice(places)
    assert value is not None
    other = str(2 * int(text[value[0] : value[1]]) + 2)
    if file.endswith(("sh", "slurm")):
        if text[: value[0]].rpartition("\n")[2].startswith("#SBATCH") or text[start - 2 : start] != "--":
            return None
        new = f"{text[: value[1]]} --{name} {other}{text[value[1] :]}"
    elif file.endswith(("py", "yaml")) and "\n" not in text[start - 20 : start]:
        new = f"{text[: value[1]]}, {text[start : value[0]]}{other}{text[value[1] :]}"
    else:
        line = text.rfind("\n", 0, start) + 1
        ending = text.index("\n", value[1]) + 1
        new = text[:ending] + text[line : value[0]] + other + text[value[1] : ending] + text[ending:]
    return Damage("a setting that stands twice", file, new, (name,), changed=False)


def _line(draw: Random, file: str, text: str) -> Damage | None:
    lines = text.splitlines(keepends=True)
    number = draw.randrange(len(lines))
    touched = tuple(name for name, _, _ in settings_of(file, lines[number]))
    if not touched:
        return None
    kind, changed = draw.choice([("a line that is missing", ""), ("a line that is a comment", f"# {lines[number]}")])
    if kind.endswith("comment") and file.endswith("log"):
        return None
    return Damage(kind, file, "".join([*lines[:number], changed, *lines[number + 1 :]]), touched, True)


def _cut(draw: Random, file: str, text: str) -> Damage | None:
    cut = draw.randrange(len(text))
    return Damage(
        "a file that ends early", file, text[:cut], tuple(name for name, _, _ in settings_of(file, text[cut:])), True
    )


def _continuation(draw: Random, file: str, text: str) -> Damage | None:
    places = [found.start() for found in re.finditer(r"\\\n", text)]
    if not places:
        return None
    at = draw.choice(places)
    space = draw.random() < 0.5
    new = f"{text[: at + 1]} {text[at + 1 :]}" if space else text[:at] + text[at + 1 :]
    kind = "a backslash with a space behind it" if space else "a backslash that is missing"
    return Damage(kind, file, new, tuple(name for name, _, _ in settings_of(file, text[at:])))


def _same(draw: Random, file: str, text: str) -> Damage | None:
    kind, new = draw.choice(
        [
            ("Windows line ends", text.replace("\n", "\r\n")),
            ("a byte order mark", "\ufeff" + text),
            ("spaces at the ends of lines", re.sub(r"(?m)(?<!\\)$", "  ", text)),
            ("a line of no UTF-8", f"# \ufffd\ufffd\n{text}"),
            ("no end of the last line", text.rstrip("\n")),
        ]
    )
    return Damage(kind, file, new, ("?",), same=True)


DAMAGES: tuple[Callable[[Random, str, str], Damage | None], ...] = (
    _misspelled,
    _misspelled,
    _value,
    _value,
    _again,
    _line,
    _cut,
    _continuation,
    _same,
)


def damaged(number: int) -> Damage:
    """Return the damaged file of this number."""
    draw = Random(f"accepted damage {number}")
    while True:
        file = draw.choice(RUN_FILES)
        made = draw.choice(DAMAGES)(draw, file, (FOLDER / file).read_text())
        if made is not None:
            return made


def silent_acceptances(count: int) -> tuple[list[str], Counter[str]]:
    """Return the silent acceptances among so many damaged files, and the number of files by kind of damage."""
    kinds: Counter[str] = Counter()
    found = []
    for number in range(count):
        damage = damaged(number)
        kinds[damage.kind] += 1
        if wrong := silent(damage):
            found.append(f"{number}: {damage.file}, {damage.kind} ({', '.join(damage.touched)[:80]}): {wrong}")
    return found, kinds
