"""Files are read in one place: what they are for, their size, encoding and nesting, and devices."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megaloom.dsl.catalog import find
from megaloom.dsl.files.json_file import Content, content_of, parse_json, read_json, read_text, read_whole
from megaloom.dsl.files.model_file import model_to_json
from megaloom.planner.contract.plan_json import plan_to_json
from tests.support.exported import priced

LLAMA = {"architectures": ["LlamaForCausalLM"], "version": 1}
FORMS = (
    lambda raw: json.dumps(raw),
    lambda raw: json.dumps(raw, separators=(",", ":")),
    lambda raw: json.dumps(raw, indent=4),
    lambda raw: json.dumps(raw, sort_keys=True),
    lambda raw: "\ufeff\n\t" + json.dumps(raw),
)


def test_a_file_is_known_by_its_content(tmp_path: Path) -> None:
    """White space, the order of fields and the name of the file do not count."""
    plan, model = json.loads(plan_to_json(priced())), model_to_json(find("stdlib-gpt")[0])
    known = [(plan, Content.PLAN), (model, Content.MODEL), (LLAMA, Content.CONFIG), ({"version": 1}, Content.OTHER)]
    for number, (raw, content) in enumerate(known):
        for form in FORMS:
            (path := tmp_path / f"{number}.json").write_text(form(raw))
            assert content_of(path) is content
            path.unlink()
    for text in ("[]", "{", "", "null", "[" * 100_000):
        path.write_text(text)
        assert content_of(path) is Content.OTHER
    path.write_text(json.dumps(model, separators=(",", ":"))[:-1])
    assert content_of(path) is Content.MODEL  # damaged, but it was one
    for other in (tmp_path / "absent", tmp_path, Path("/dev/zero"), Path("x" * 300)):
        assert content_of(other) is Content.OTHER


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    for device in ("/dev/zero", "/dev/full", "/dev/null"):
        with pytest.raises(OSError, match="is a device"):
            read_whole(device)
    with (tmp_path / "hole").open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    with pytest.raises(OSError, match="has more than 268,435,456 bytes"):
        read_whole(tmp_path / "hole")
    with pytest.raises(OSError):
        read_json("x" * 300)
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(ValueError):
        read_text(tmp_path / "latin")


def test_a_pipe_is_read(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b'{"a": 1}')
    os.close(write)
    assert read_json(f"/dev/fd/{read}") == {"a": 1}
