"""Changes of JSON files: plans, configs, cluster files, settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.support.fuzz.case import (
    JSON,
    ODD,
    Drawn,
    Label,
    changed,
    damaged_text,
    of_another_type,
    places,
    removed,
    same_type,
    shown,
)

LEGAL, ILLEGAL, EITHER = Label.LEGAL, Label.ILLEGAL, Label.EITHER
BIG = 2**63


def written(path: Path, text: str | bytes) -> None:
    """Write text, in which a lone surrogate is an escape of JSON, or bytes."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))


def relaid(draw: Random, raw: JSON) -> tuple[str, str]:
    """Return JSON text of equal contents in another form."""
    shuffled = dict(draw.sample(list(raw.items()), len(raw)))
    return draw.choice(
        [
            (json.dumps(raw), "on one line"),
            (json.dumps(raw, separators=(",", ":")), "without spaces"),
            (json.dumps(raw, indent=4), "indented by 4"),
            (json.dumps(raw, indent=1, ensure_ascii=False), "not ASCII only"),
            (json.dumps(shuffled, indent=1), "fields in another order"),
            (json.dumps(raw).replace("{", "{\n\r\t "), "more white space"),
            (json.dumps(raw, sort_keys=True), "fields sorted"),
        ]
    )


# Fields of a plan of which the campaign knows that no other value of their type is consistent with the rest.
BOUND = ("fingerprint", "version")
POSITIVE = ("step_seconds", "seq", "batch", "count", "per_node", "flops", "nbytes", "bandwidth")


def plan(draw: Random, folder: Path, bases: Path) -> Drawn:
    """Change a plan, and explain, export, train or verify it."""
    name = draw.choice(["plan.json", "plan.json", "gpt2.json", "own.json"])
    raw = json.loads((bases / name).read_text())
    text, what, label = _changed_plan(draw, raw)
    written(folder / "p.json", text)
    command = draw.choice(["explain", "explain", "export", "explain-json", "train", "verify"])
    if label is LEGAL or (label is EITHER and command in ("train", "verify")):
        command = "explain"  # what runs on this machine is not the question here
    targets = ("slurm", "megatron-lm", "kubernetes", "skypilot", "megatron-bridge", "accelerate", "torchtitan")
    words = {
        "explain": ("explain", "p.json"),
        "explain-json": ("explain", "p.json", "--json"),
        "export": ("export", "p.json", "--to", draw.choice(targets)),
        "train": ("train", "p.json", "--steps", "1", "--out", "new"),
        "verify": ("verify", "p.json", "--steps", "1"),
    }[command]
    return Drawn(words, label, f"{command} {name}: {what}")


def _changed_plan(draw: Random, raw: JSON) -> tuple[str | bytes, str, Label]:
    way = draw.randrange(10)
    if way == 0:
        text, what = relaid(draw, raw)
        return text, what, LEGAL
    if way == 1:
        damaged, what = damaged_text(draw, json.dumps(raw, indent=1))
        return damaged, what, ILLEGAL
    spots = list(places(raw))
    path, value = draw.choice(spots)
    if way == 2:
        path, value = draw.choice([(p, v) for p, v in spots if isinstance(p[-1], str)])
        open_ended = len(path) > 1 and path[-2] == "flops"
        removed(raw, path)
        return json.dumps(raw), f"without {shown(path)}", EITHER if open_ended else ILLEGAL
    if way == 3:
        path, value = draw.choice([(p, v) for p, v in spots if isinstance(v, dict)] + [((), raw)])
        if (path and path[-1] in ("breakdown", "flops")) or (len(path) > 1 and path[-2] == "nbytes"):
            path, value = (), raw
        value["unknown_field"] = draw.choice(ODD)
        return json.dumps(raw), f"a field more in {shown(path) or 'the plan'}", ILLEGAL
    if way in (4, 5, 6):
        if value is None or isinstance(value, float):
            path, value = draw.choice([(p, v) for p, v in spots if isinstance(v, str | int | list | dict | bool)])
        new = of_another_type(draw, value)
        changed(raw, path, new)
        whole = isinstance(value, int) and not isinstance(value, bool)
        return json.dumps(raw), f"{shown(path)} = {new!r:.40}", EITHER if whole and isinstance(new, float) else ILLEGAL
    return _same_type_change(draw, raw, spots)


def _same_type_change(draw: Random, raw: JSON, spots: list[tuple[tuple[Any, ...], Any]]) -> tuple[str, str, Label]:
    kind = draw.randrange(4)
    if kind == 0:
        numbers = [(p, v) for p, v in spots if type(v) in (int, float) and p[0] != "cluster"]
        path, value = draw.choice(numbers)
        new = draw.choice([-1, -7.5 if isinstance(value, float) else -7, BIG if isinstance(value, int) else -1e300])
        changed(raw, path, new)
        return json.dumps(raw), f"{shown(path)} = {new}", EITHER if path[0] == "lora" else ILLEGAL
    if kind == 1:  # a prediction that does not fit its workload
        p, w = raw["predicted"], raw["workload"]
        change: Callable[[], object] = draw.choice(
            [
                lambda: p.update(mfu=draw.choice([1.5, 5.0, 1e9])),
                lambda: p.update(bubble=draw.choice([1.01, 7.0])),
                lambda: p.update(
                    tokens_per_second_per_device=p["tokens_per_second_per_device"] * draw.choice([2, 0.5])
                ),
                lambda: p.update(interval=[p["step_seconds"] * 1.1, p["step_seconds"] * 2]),
                lambda: p.update(interval=[0, p["step_seconds"] / 2]),
                lambda: p["nbytes"][0].update({next(iter(p["nbytes"][0])): 10**30}),
                lambda: w.update(seq=w["seq"] * 2),
                lambda: w.update(batch=w["batch"] * 2),
            ]
        )
        before = json.dumps(raw)
        change()
        assert before != json.dumps(raw)
        return json.dumps(raw), "a prediction that does not fit its workload", ILLEGAL
    if kind == 2:
        texts = [(p, v) for p, v in spots if isinstance(v, str)]
        path, value = draw.choice(texts)
        new = draw.choice([odd for odd in ODD if isinstance(odd, str)])
        changed(raw, path, new)
        free = path[0] in ("reasons",) or "moments" in path
        label = ILLEGAL if path[0] in BOUND else EITHER
        return json.dumps(raw), f"{shown(path)} = {new!r:.40}", LEGAL if free and new in ("x",) else label
    path, value = draw.choice(spots)
    new = draw.choice([odd for odd in ODD if same_type(odd, value) and odd != value] or [value])
    changed(raw, path, new)
    return json.dumps(raw), f"{shown(path)} = {new!r:.40}", EITHER


# Fields that a reader of config.json never lets pass with these values, where the file has them.
SIZES = (
    *("hidden_size", "n_embd", "d_model", "vocab_size", "num_attention_heads", "n_head", "intermediate_size", "d_ff"),
    *("num_hidden_layers", "n_layer", "num_layers"),
)
IGNORED = ("bos_token_id", "use_cache", "torch_dtype", "transformers_version", "_name_or_path")


def config(draw: Random, folder: Path, bases: Path) -> Drawn:
    """Change a config.json, and show or plan its model."""
    source = draw.choice(sorted((bases / "configs").glob("*.json")))
    raw = json.loads(source.read_text())
    text, what, label = _changed_config(draw, raw)
    written(folder / "config.json", text)
    sizes = ("--gpus", "2xH100", "--seq", "16", "--batch", "4", "--tp", "1", "--pp", "1", "--cp", "1", "-o", "p.json")
    words = draw.choice([("show", "config.json"), ("show", "."), ("plan", "config.json", *sizes)])
    if label is LEGAL and words[0] == "plan":
        label = EITHER  # a layout need not exist
    return Drawn(words, label, f"{words[0]} {source.stem}: {what}")


def _changed_config(draw: Random, raw: JSON) -> tuple[str | bytes, str, Label]:
    way = draw.randrange(9)
    if way == 0:
        text, what = relaid(draw, raw)
        return text, what, LEGAL
    if way == 1:
        text, what = damaged_text(draw, json.dumps(raw, indent=1))
        return text, what, ILLEGAL
    if way == 2:
        raw["unheard_of"] = new = draw.choice([odd for odd in ODD if odd is not None])
        return json.dumps(raw), f"unheard_of = {new!r:.40}", ILLEGAL
    if way == 3:
        name = draw.choice(IGNORED)
        raw[name] = new = draw.choice([None, 0, 7, "x", False])
        return json.dumps(raw), f"{name} = {new!r}", LEGAL
    present = [name for name in SIZES if isinstance(raw.get(name), int)]
    if way in (4, 5) and present:
        name = draw.choice(present)
        raw[name] = new = draw.choice([0, -1, BIG, 10**30, "64", 64.5, [64], {}, True])
        return json.dumps(raw), f"{name} = {new!r}", ILLEGAL
    spots = list(places(raw))
    path, _ = draw.choice(spots)
    if way == 6:
        removed(raw, path)
        return json.dumps(raw), f"without {shown(path)}", EITHER
    new = draw.choice(ODD)
    changed(raw, path, new)
    return json.dumps(raw), f"{shown(path)} = {new!r:.40}", EITHER


def settings(draw: Random, folder: Path, bases: Path) -> Drawn:
    """Change a settings file, and plan or show with it."""
    text = (bases / "settings.toml").read_text()
    changes: list[tuple[str | bytes, str, Label]] = [
        (text, "nothing", LEGAL),
        (text.replace("\n", "\r\n"), "line ends of Windows", LEGAL),
        ("# a comment\n" + text, "a comment", LEGAL),
        (
            text.replace("layers = 2", f"layers = {draw.choice(['-1', '0', '2.5', 'true', BIG, '[2]', '10**9'])}"),
            "layers",
            ILLEGAL,
        ),
        (text.replace("heads = 2", f"heads = {draw.choice(['-1', '0', '3', '2.5', BIG])}"), "heads", ILLEGAL),
        (text.replace("layers", "layer"), "a misspelt name", ILLEGAL),
        (text.replace("seq = 64", f"seq = {draw.choice(['-1', '0', 'x', BIG, '1.5', 'false'])}"), "seq", ILLEGAL),
        (
            text.replace('"4xH100"', draw.choice(['"4xZ9"', '""', '"-1xH100"', "[]"])),
            "gpus",
            ILLEGAL,
        ),
        (text.replace("[plan]", "[plann]"), "a misspelt table", ILLEGAL),
        (text.replace("[plan]", "plan = 3\n[plan]"), "a name twice", ILLEGAL),
        (text[: draw.randrange(5, 30)] + "=", "cut", ILLEGAL),
        ("x = " + "[" * 50_000, "nested", ILLEGAL),
        (b"\xff\xfe\x00" + text.encode(), "no UTF-8", ILLEGAL),
        (text.replace("batch = 8", "batch = 8\nunheard_of = 1"), "an unknown option", ILLEGAL),
        (text.replace("embed = 32", f"embed = {draw.randrange(1, 64)}"), "another width", EITHER),
    ]
    changed_text, what, label = draw.choice(changes)
    written(folder / "s.toml", changed_text)
    more = draw.choice([(), ("--set", "layers=3"), ("--seq", "32")]) if label is LEGAL else ()
    bad_sets = (
        "layers=x",
        "nope=1",
        "layers",
        "=",
        "layers=-3",
        "layers=1e9",
        "layers=9223372036854775808",
        "heads=[]",
    )
    if label is LEGAL and draw.random() < 0.5:
        more, what, label = ("--set", bad := draw.choice(bad_sets)), f"--set {bad}", ILLEGAL
    return Drawn(("plan", "stdlib-gpt", "--settings", "s.toml", *more, "-o", "p.json"), label, what)


def cluster(draw: Random, folder: Path, bases: Path) -> Drawn:
    """Change a cluster file, TOML or JSON, and plan for it."""
    import tomllib

    text = (bases / "cluster.toml").read_text()
    raw, name = tomllib.loads(text), "c.json"
    way = draw.randrange(8)
    label, what, out = EITHER, "nothing", json.dumps(raw)
    if way == 0:
        out, name, label = text, "c.toml", LEGAL
    elif way == 1:
        damaged, what = damaged_text(draw, json.dumps(raw, indent=1))
        written(folder / name, damaged)
        return _planned_for(draw, name, ILLEGAL, what)
    elif way in (2, 3):
        path, value = draw.choice(list(places(raw)))
        new = of_another_type(draw, value)
        changed(raw, path, new)
        out, what = json.dumps(raw), f"{shown(path)} = {new!r:.40}"
        number = isinstance(value, int | float) and isinstance(new, int | float) and not isinstance(new, bool)
        label = EITHER if number else ILLEGAL
    elif way == 4:
        where = draw.choice([raw, raw["device"], raw["inter"]])
        where["unheard_of"] = draw.choice(ODD)
        out, what, label = json.dumps(raw), "an unknown field", ILLEGAL
    elif way == 5:
        path, value = draw.choice([(p, v) for p, v in places(raw) if isinstance(v, int | float)])
        new = draw.choice([-1, 0, -1e-9, BIG, 1e300, -BIG])
        changed(raw, path, new)
        free = new == 0 and path[-1] in ("latency", "pod", "failures", "nics")
        out, what, label = json.dumps(raw), f"{shown(path)} = {new}", EITHER if free else ILLEGAL
    elif way == 6:
        raw["base"] = draw.choice(["Z9", "", "h100x", "H100\n", "CPU" * 1000, "\x1b[31m"])
        out, what, label = json.dumps(raw), f"base = {raw['base']!r:.40}", ILLEGAL
    else:
        path, value = draw.choice(list(places(raw)))
        removed(raw, path)
        out, what = json.dumps(raw), f"without {shown(path)}"
    written(folder / name, out)
    return _planned_for(draw, name, label, what)


def _planned_for(draw: Random, name: str, label: Label, what: str) -> Drawn:
    count = draw.choice(["", "8x", "16x"])
    words = ("plan", "stdlib-gpt", "--gpus", f"{count}{name}", "--seq", "64", "--batch", "16", "-o", "p.json")
    return Drawn(words, label, what)
