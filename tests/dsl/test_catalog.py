"""Every way to name a model, and every way to name none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megaloom.dsl import (
    Model,
    ShapeError,
    UserError,
    fingerprint,
)
from megaloom.dsl.catalog import examples, find
from megaloom.dsl.hf.architectures import WANTED
from tests.support.limits import LIMIT

HEAD = "from megaloom.dsl import *\n"
TINY = HEAD + 'wte = weight("wte", Dim("vocab", 5), Dim("embed", 4))\n'
ONE = TINY + 'def tiny() -> Model:\n    return model("tiny", ids() >> Embed(wte))\n'
TWO = ONE + 'other = model("other", ids() >> Embed(wte) >> RMSNorm())\n'


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a file of the working directory."""
    monkeypatch.chdir(tmp_path)

    def _write(text: str, name: str = "models.py") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return _write


def message(ref: str) -> str:
    with pytest.raises(UserError) as error:
        find(ref)
    return str(error.value)


# What is found


def test_examples_by_name() -> None:
    of_files = {ref.partition(":")[0]: name for name, ref in examples().items()}
    assert len(of_files) > 10
    for name, ref in examples().items():
        m, canonical = find(name)
        assert (m.name.replace(".", "-"), canonical) == (name, ref)
        if name in of_files.values():
            assert fingerprint(find(canonical)[0]) == fingerprint(m)


def test_an_example_is_built_once_and_with_arguments_anew() -> None:
    m, canonical = find("llama3-8b")
    assert find("llama3-8b")[0] is find(canonical)[0] is m
    assert find("llama3-8b", {"layers": 2})[0] is not m
    assert find("llama3-8b")[0] is m


def test_the_only_model_of_a_file(write) -> None:
    path = write(ONE + "def sized(embed: int) -> Model: ...\ndef _hidden() -> Model: ...\nfrom math import sqrt\n")
    m, ref = find("models.py")
    assert (m.name, ref) == ("tiny", f"{path}:tiny")
    assert find("models.py:")[1] == ref


def test_a_model_of_a_file_by_name(write) -> None:
    path = write(TWO)
    assert find("models.py:tiny")[0].name == "tiny"
    assert find(f"{path}:other")[1] == f"{path}:other"


def test_a_name_needs_no_annotation(write) -> None:
    write(ONE.replace(" -> Model", "") + "def wider(embed=4):\n    return tiny()\n")
    assert find("models.py:tiny")[0].name == find("models.py:wider")[0].name == "tiny"


def test_a_model_of_a_module() -> None:
    m, ref = find("megaloom.examples.gpt2:gpt2_medium")
    assert (m.name, ref) == ("gpt2-medium", "megaloom.examples.gpt2:gpt2_medium")


def test_a_file_of_imported_models_declares_none_of_them(write) -> None:
    write(ONE + "from megaloom.examples.gpt2 import gpt2\n")
    assert find("models.py")[0].name == "tiny"
    assert find("models.py:gpt2")[0].name == "gpt2"


def test_a_reference_is_good_anywhere(write, tmp_path: Path) -> None:
    write(ONE)
    m, ref = find("models.py")
    code = "import sys; from megaloom.dsl import fingerprint; from megaloom.dsl.catalog import find\n"
    code += "print(fingerprint(find(sys.argv[1])[0]))"
    env = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", code, ref], cwd="/", env=env, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.stdout.strip() == fingerprint(m), done.stderr


def test_a_file_is_run_once(write) -> None:
    write(ONE + 'print("run", file=open("runs", "a"))\n')
    assert find("models.py")[0] is not find("models.py")[0]
    assert Path("runs").read_text() == "run\n"


# What is not


def test_unknown_names() -> None:
    known = "MODEL can be file.py:name, a config.json, or one of bart-base, bart-large"
    like = "MODEL can be file.py:name, a config.json, or an example, such as llama3-8b, "
    assert message("lama3-8b").startswith(f"no model 'lama3-8b': did you mean llama3-8b?\n{like}")
    assert message("zzz").startswith(f"no model 'zzz'\n{known}")
    assert message("").startswith(f"no model ''\n{known}")
    assert message(1000 * "a").startswith("no model 'aaa")  # longer than the name of a file may be
    assert message(1000 * "a" + ".json").startswith("cannot read aaa")


def test_no_such_file(write) -> None:
    assert message("absent.py:tiny") == f"no file 'absent.py'\n{WANTED}"


def test_what_is_there_and_no_model(write) -> None:
    path = write("", "notes.txt")
    assert message(str(path)) == f"{path} is neither a .py nor a .json file\n{WANTED}"
    assert message(str(path.parent)) == f"{path.parent} is a folder without a config.json\n{WANTED}"


@pytest.mark.parametrize("location", ["absent", "megaloom.absent", "", ".relative", "a..b", "a-b"])
def test_no_such_module(location: str) -> None:
    text = message(f"{location}:tiny")
    assert text.startswith(f"cannot import {location!r} of '{location}:tiny': ")
    assert text.endswith(f"\n{WANTED}")


def test_a_file_with_no_model_or_several(write) -> None:
    path = write(TWO)
    assert message("models.py") == (f"{path} has several models: name one as {path}:name; it has tiny, other")
    path = write(HEAD, "empty.py")
    assert message("empty.py") == (f"{path} has no model: write a function without arguments, `-> Model`")


def test_a_name_that_is_no_model(write) -> None:
    path = write(TWO + "def sized(layers, embed=4) -> Model: ...\ndef five(): return 5\n")
    for name in ("absent", "wte", "five", "Model"):
        assert message(f"models.py:{name}") == f"{path} has no model '{name}': it has tiny, other"
    needs = "needs layers: give each argument of this function a default, or a value with --set layers=…"
    assert message("models.py:sized") == f"{path}:sized {needs}"
    path = write(ONE + "def five() -> Model: return 5\n", "wrong.py")
    assert message("wrong.py:five") == f"{path}:five is annotated with `-> Model`, but returns 5"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = [\n", "cannot load wrong.py: SyntaxError: '[' was never closed\n  at wrong.py:1"),
        ("\nimport nowhere\n", "cannot load wrong.py: ModuleNotFoundError: No module named 'nowhere'\n  at wrong.py:2"),
        ("x = 1\nraise SystemExit(3)\n", "cannot load wrong.py: SystemExit: 3\n  at wrong.py:2"),
        ("x = '\0'\n", "cannot load wrong.py: SyntaxError: source code string cannot contain null bytes"),
        ("\n\nx = 1 / 0\n", "cannot load wrong.py: ZeroDivisionError: division by zero\n  at wrong.py:3"),
        (TINY + "ids() >> Embed(wte) >> repeat(0, RMSNorm())\n", "repeat needs a whole "
         "number of times, at least 1, got 0\n  at wrong.py:3"),
    ],
)  # fmt: skip
def test_files_that_fail(write, text: str, expected: str) -> None:
    write(text, "wrong.py")
    assert message("wrong.py:tiny") == expected
    write(ONE, "wrong.py")
    assert find("wrong.py")[0].name == "tiny"  # mended, it is read again


def test_functions_that_fail(write) -> None:
    path = write(
        ONE + "def broken() -> Model:\n    return [][0]\ndef misshapen() -> Model:\n    return ids() >> RMSNorm()\n"
    )
    assert message("models.py:broken") == f"{path}:broken fails: IndexError: list index out of range\n  at models.py:6"
    with pytest.raises(ShapeError, match=r"no dim 'embed'(.|\n)* in RMSNorm\(\) +models.py:8"):
        find("models.py:misshapen")


def test_modules_that_fail(write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("import json\njson.loads(4)\n", "failing_models.py")
    monkeypatch.syspath_prepend(path.parent)
    text = message("failing_models:tiny")
    assert text.startswith(
        "cannot import 'failing_models' of 'failing_models:tiny': TypeError: the JSON object must be"
    )
    write(ONE + "import json\ndef broken(): return json.loads(4)\n")
    assert message("models.py:broken").endswith("\n  at models.py:6")  # the user's line, not one of the library


def test_what_is_found_is_a_model(write) -> None:
    write(TWO)
    assert all(isinstance(find(f"models.py:{name}")[0], Model) for name in ("tiny", "other"))


# Modules beside the file


def test_a_file_imports_its_neighbours(write, tmp_path: Path) -> None:
    """As under `python file.py`, and also when its function runs; equal names in two folders are two modules."""
    for folder, width in (("a", 4), ("b", 8)):
        (tmp_path / folder).mkdir()
        write(f"width = {width}\n", f"{folder}/beside.py")
        write(f"later = {width}\n", f"{folder}/lazy.py")
        text = "from beside import width\n" + ONE.replace("4)", "width)").replace(
            "    return", "    import lazy\n    return"
        )
        write(text, f"{folder}/models.py")
    before = list(sys.path)
    for folder, width in (("a", 4), ("b", 8), ("a", 4)):
        m, _ = find(f"{folder}/models.py")
        assert m.outputs[0].shape["embed"].size == width
    assert sys.path == before


ODD = """
class Odd(BaseException):
    def __str__(self): raise KeyError("no text")
    __repr__ = __str__
class Error(Exception):
    __str__ = __repr__ = Odd.__str__
"""


@pytest.mark.parametrize(
    "raised", ["Odd", "Error", "Odd()", "GeneratorExit", "SystemExit(3)", "BaseExceptionGroup('x', [Odd()])"]
)
def test_whatever_a_file_raises_is_one_message(write, raised: str) -> None:
    write(ODD + f"raise {raised}\n", "top.py")
    assert message("top.py").startswith("cannot load top.py: ")
    write(HEAD + ODD + f"def m() -> Model:\n    raise {raised}\n", "inside.py")
    assert "inside.py:m fails: " in message("inside.py")
    write(HEAD + ODD + "def m() -> Model:\n    return Error()\n", "returns.py")
    assert "but returns <Error>" in message("returns.py")


def test_conversations_with_padding_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="conversations=true and padded=true exclude each other"):
        find(str(tmp_path), {"conversations": True, "padded": True})
