"""Python files that declare models: one token of a good one changed, and wrong ones written by hand."""

from __future__ import annotations

import io
import tokenize
from pathlib import Path
from random import Random

from tests.support.fuzz.case import Drawn, Label

LEGAL, ILLEGAL, EITHER = Label.LEGAL, Label.ILLEGAL, Label.EITHER
GOOD = """
from attrs import frozen
from megaloom.dsl import *

@frozen
class Gated(Layer):
    channels: int = 64
    eps: float = 1e-5
    bias: bool = False
    splits = {"channels": "tp"}

    def body(self, x, /, **side):
        inner = Dim("channels", self.channels)
        y = dot(x, weight("up", x["embed"], inner), "embed")
        y = fn("silu", y) * dot(x, weight("gate", x["embed"], inner), "embed") + 1.0
        return dot(y, weight("down", inner, x["embed"]), "channels")

def tiny(layers: int = 2) -> Model:
    wte = weight("wte", Dim("vocab", 128), Dim("embed", 32))
    block = residual(RMSNorm(), Attention(heads=2, causal=True)) >> residual(RMSNorm(eps=1e-6), Gated(96))
    x = ids() >> Embed(wte) >> repeat(layers, block) >> RMSNorm()
    return model("tiny", x >> Unembed(wte) >> NextToken())
"""
FREE = ("0.5 * 2", "2 + 1", "3e-5")
# Expressions in place of others of GOOD, of which none makes a model.
WRONG = {
    "heads=2": [
        "heads=0",
        "heads=-2",
        "heads=3",
        "heads=2.0",
        "heads='2'",
        "heads=None",
        "heads=True",
        "heads=[2]",
        "head=2",
    ],
    "causal=True": [
        "causal='no'",
        "causal=2",
        "causal=1.0",
        "causal=[]",
        "scale='x'",
        "scale=float('inf')",
        "dropout=1.5",
        "dropout=-1",
    ],
    "eps=1e-6": ["eps='x'", "eps=-1", "eps=float('nan')", "eps=float('inf')", "eps=None", "eps=[1]", "over=3"],
    "Gated(96)": [
        "Gated(-1)",
        "Gated(0)",
        "Gated(96.5)",
        "Gated('96')",
        "Gated(10**30)",
        "Gated(96, eps='x')",
        "Gated(96, bias='no')",
        "Gated(96, bias=2)",
        "Gated(None)",
        "Gated",
        "96",
        "None",
        "Gated(96)()",
    ],
    'splits = {"channels": "tp"}': [
        'splits = {"chanels": "tp"}',
        'splits = {"channels": "xp"}',
        'splits = {"channels": 3}',
        "splits = 3",
        'splits = {3: "tp"}',
        'splits = {"nope": "tp"}',
    ],
    'Dim("vocab", 128)': [
        'Dim("vocab", 0)',
        'Dim("vocab", -1)',
        'Dim("vocab", 1.5)',
        'Dim("vocab", 10**30)',
        'Dim("vocab", 2**63)',
        'Dim("", 3)',
        "Dim(3, 3)",
        'Dim("vocab")',
        'Dim("vocab", "128")',
        'Dim("vocab", True)',
        "128",
        "None",
    ],
    'weight("wte", ': [
        'weight("", ',
        "weight(3, ",
        'weight("wte", std=float("nan"), *',
        'weight("wte", mean=float("inf"), *',
        'weight("wte", std=-1, *',
        'weight("wte", std="x", *',
        'weight("wte", 3, ',
    ],
    "repeat(layers, block)": [
        "repeat(0, block)",
        "repeat(-1, block)",
        "repeat(1.5, block)",
        "repeat(10**9, block)",
        "repeat(10**30, block)",
        "repeat(layers)",
        "repeat(layers, 3)",
        "repeat('2', block)",
        "repeat(block, layers)",
        "block(3)",
        "None",
    ],
    '"tiny", x': [
        '"", x',
        '"\\n", x',
        '"\\x00", x',
        '"-rf", x',
        '"\\x1b[31m", x',
        "3, x",
        '"tiny", 3, x',
        '"tiny", None, x',
    ],
    "std=0.5": [],
    "+ 1.0": ["+ float('nan')", "+ float('inf')", "+ 'x'", "+ None", "+ [1]", "/ 0", "@ y", "** 2", "+ 10**400"],
    '"silu"': ['"silly"', "3", "None", '""', "'ad'"],
    "return dot(": [
        "return None; dot(",
        "return 3; dot(",
        "return [y]; dot(",
        "raise ValueError('x'); dot(",
        "yield dot(",
        "return self; dot(",
        "return body(self, x); dot(",
        "return self(x); dot(",
    ],
    "def tiny(": [
        "def tiny(x, ",
        "async def tiny(",
        "def _tiny(",
        "class tiny(",
        "1 / 0\ndef tiny(",
        "import nope\ndef tiny(",
    ],
    "-> Model": ["-> int", "", "-> Mdoel", "-> 'Nope'"],
    "return model(": [
        "return 3; model(",
        "model(",
        "raise SystemExit(0); model(",
        "raise GeneratorExit; model(",
        "import sys; sys.exit('x'); model(",
        "raise KeyError('x'); model(",
        "raise RecursionError; model(",
        "exec('raise ZeroDivisionError'); model(",
    ],
}
UNPRINTABLE = """
class Odd(BaseException):
    def __str__(self): raise KeyError("no text")
    __repr__ = __str__
class Error(Exception):
    def __str__(self): raise KeyError("no text")
class Value:
    def __repr__(self): raise KeyError("no text")
"""
WHOLE = {  # whole files, of which none has a model
    "empty": "",
    "only a comment": "# x\n",
    "null bytes": "x = 1\0",
    "a syntax error": "def f(:\n",
    "wrong encoding": "# coding: nope\n",
    "a tab too many": "def f():\n\tx\n        y\n",
    "Latin-1": b"x = '\xe9'\n",
    "a surrogate": "x = '\\ud800'\nraise ValueError(x)\n",
    "exits": "import sys; sys.exit(0)\n",
    "raises BaseException": UNPRINTABLE + "raise Odd\n",
    "raises without text": UNPRINTABLE + "raise Error\n",
    "returns without repr": UNPRINTABLE + "from megaloom.dsl import *\ndef m() -> Model: return Value()\n",
    "raises GeneratorExit": "raise GeneratorExit\n",
    "raises in escapes": "raise ValueError('\\x1b[31m' + 'x' * 100000)\n",
    "recursion": "def f(): f()\nf()\n",
    "deep": "x = " + "(" * 5000 + ")" * 5000,
    "an assertion": "assert False\n",
    "a warning": "raise UserWarning('x')\n",
    "a keyboard interrupt of its own": "raise ValueError(KeyboardInterrupt())\n",
    "an exception group": "raise BaseExceptionGroup('x', [KeyError(1)])\n",
    "two models": GOOD + GOOD.replace("tiny", "other"),
    "an import of itself": "import m\nm.nope\n",
    "a relative import": "from . import x\n",
    "from megaloom": "from megaloom.dsl import nope\n",
    "a cycle": GOOD + "\n_v = tiny.__wrapped__\n",
    "annotation": "def m() -> 'Model': return 3\n",
    "unhashable": "class A:\n    __hash__ = None\n",
    "deleted": "import sys\ndel sys.modules[__name__]\nraise ValueError\n",
    "closes stdout": "import sys\nraise OSError(5, 'x')\n",
    "value twice, 60 deep": GOOD.replace(
        "        return dot(", "        for _ in range(60): y = y + y\n        return dot(nope, "
    ),
    "stop iteration": "raise StopIteration\n",
    "timeout error": "raise TimeoutError\n",
    "memory error": "raise MemoryError\n",
}
GOOD_WHOLE = {
    "value twice, 60 deep": GOOD.replace(
        "        return dot(", "        for _ in range(60): y = y + y\n        return dot("
    ),
    "3,000 additions": GOOD.replace(
        "        return dot(", "        for _ in range(3000): y = y + 1.0\n        return dot("
    ),
    "Windows lines": GOOD.replace("\n", "\r\n"),
    "a byte order mark": "\ufeff" + GOOD,
    "prints": "print('hello')\n" + GOOD,
    "a neighbour": "from beside import width\n" + GOOD.replace("Gated(96)", "Gated(width)"),
    "unicode": GOOD.replace('"tiny"', '"é"'),
    "an int for a float": GOOD.replace("eps=1e-6", "eps=1"),
    "numpy": "import numpy\n" + GOOD.replace("heads=2", "heads=int(numpy.int64(2))"),
}
COMMANDS = {
    "show": ("show", "m.py"),
    "plan": ("plan", "m.py", "--gpus", "2xH100", "--seq", "32", "--batch", "4", "-o", "p.json"),
    "lint": ("plan", "m.py", "--gpus", "2xH100", "--seq", "32", "--batch", "4", "--lint", "--tp", "2"),
}


def model(draw: Random, folder: Path, bases: Path) -> Drawn:
    """Write a model file, and show, plan or lint it."""
    del bases
    way = draw.randrange(10)
    text: str | bytes
    if way < 5:
        old = draw.choice([old for old in WRONG if WRONG[old]])
        new = draw.choice(WRONG[old])
        assert old in GOOD, old
        text, what, label = GOOD.replace(old, new, 1), f"{new} for {old}", ILLEGAL
    elif way < 7:
        what = draw.choice(list(WHOLE))
        text, label = WHOLE[what], ILLEGAL
    elif way < 8:
        what = draw.choice(list(GOOD_WHOLE))
        text, label = GOOD_WHOLE[what], LEGAL
    else:
        text, what = one_token_changed(draw)
        label = EITHER
    (folder / "m.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    (folder / "beside.py").write_text("width = 96\n")
    command = draw.choice(list(COMMANDS))
    return Drawn(COMMANDS[command], label, f"{command}: {what}"[:200])


def one_token_changed(draw: Random) -> tuple[str, str]:
    """Return the good file with one token removed, repeated or replaced by another of its tokens."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(GOOD).readline) if t.string.strip()]
    old, new = draw.choice(tokens), draw.choice(tokens).string
    new = draw.choice(["", old.string + " " + old.string, new, new])
    lines = GOOD.splitlines(keepends=True)
    (row, start), (_, stop) = old.start, old.end
    line = lines[row - 1]
    lines[row - 1] = line[:start] + new + line[stop:]
    return "".join(lines), f"{new!r} for {old.string!r} in line {row}"
