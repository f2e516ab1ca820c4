"""Real data with labels and pairs, from packages that are installed, and small models that train on them.

python labelled_data.py digits images            # images of handwritten digits, a folder for each (scikit-learn)
python labelled_data.py languages texts.jsonl    # messages in five languages, with their language (Django)
python labelled_data.py translations de.jsonl    # messages in English and German (Django)
python labelled_data.py tokens code.jsonl        # lines of Python's standard library, with the class of each word

megaloom data texts.jsonl -o texts --tokenizer bytes --label-key language
megaloom train labelled_data.py:language --data texts --split 80,20 --seq 64

labelled_runs.py trains on each of them, and compares the scores with those of scikit-learn.
"""

from __future__ import annotations

import gettext
import io
import json
import keyword
import sys
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megaloom.dsl import MLP, Model, packed
from megaloom.dsl.errors import UserError
from megaloom.examples.bert import bert
from megaloom.examples.t5 import t5
from megaloom.examples.vit import vit

LANGUAGES = ("de", "es", "fr", "it", "nl")
MODULES = 40  # of the standard library, from which lines are taken
BYTES = 256
CONTEXT = "\x04"  # between the context of a message and the message
TRAINING_DIGITS = 1400  # of 1,797


def digit() -> Model:
    """A ViT for images of 8 x 8 pixels."""
    return vit("digit", 2, 4, 64, 128, patch=2, pixels=8, classes=10)


def language() -> Model:
    """A BERT that reads bytes and tells their language."""
    return bert("language", 2, 4, 64, 128, vocab=BYTES, seq=128, classes=len(LANGUAGES))


def tagger() -> Model:
    """A BERT that reads bytes and tells the class of each word of Python."""
    return bert("tagger", 2, 4, 64, 128, vocab=BYTES, seq=128, tags=6)


def translator() -> Model:
    """A T5 that reads and writes bytes."""
    return packed(t5("translator", 2, 4, 64, MLP(128, "relu"), head_dim=16, vocab=BYTES))


def write_digits(folder: Path) -> None:
    """Write scikit-learn's digits as images into training/ and test/, those of each class in a folder of their own."""
    from PIL import Image

    for part, digits in zip(("training", "test"), digits_in_parts(), strict=True):
        for i, (pixels, label) in enumerate(digits):
            (named := folder / part / str(label)).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(named / f"{i:04}.png")


def digits_in_parts() -> tuple[list[tuple[Any, int]], list[tuple[Any, int]]]:
    """Return the digits for training, and those that are held out, of other writers: bytes [8, 8], and the digit."""
    digits = _package("sklearn.datasets", "scikit-learn").load_digits()
    pixels = (digits.images * 255 / 16).astype("uint8")
    pairs = list(zip(pixels, digits.target.tolist(), strict=True))
    return pairs[:TRAINING_DIGITS], pairs[TRAINING_DIGITS:]


def languages() -> Iterator[dict[str, Any]]:
    """Yield Django's messages in some languages, taking turns."""
    catalogues = [[text for _, text in _messages(name)] for name in LANGUAGES]
    for texts in zip(*catalogues, strict=False):
        yield from ({"text": text, "language": name} for name, text in zip(LANGUAGES, texts, strict=True))


def translations() -> Iterator[dict[str, Any]]:
    """Yield Django's messages in English and in German."""
    return ({"en": english, "de": german} for english, german in _messages("de"))


def tokens() -> Iterator[dict[str, Any]]:
    """Yield lines of Python, as words and the class that the module `tokenize` gives to each, or KEYWORD."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:MODULES]:
        line: list[tuple[str, str]] = []
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.string.strip() and token.type != tokenize.ENCODING:
                line.append((token.string, _class(token)))
            if token.type in (tokenize.NEWLINE, tokenize.NL) and line:
                yield {"words": [word for word, _ in line], "classes": [kind for _, kind in line]}
                line = []


def _class(token: tokenize.TokenInfo) -> str:
    """Return the class of a token. The parts of an f-string, which are tokens since Python 3.12, are strings."""
    if keyword.iskeyword(token.string):
        return "KEYWORD"
    name = tokenize.tok_name[token.type]
    return "STRING" if name.startswith(("FSTRING", "TSTRING")) else name


def _messages(language: str) -> Iterator[tuple[str, str]]:
    """Yield the messages of Django and its applications in English, and in another language."""
    django = Path(_package("django", "django").__file__).parent
    messages: dict[str, str] = {}
    for path in sorted(django.glob(f"**/locale/{language}/LC_MESSAGES/django.mo")):
        with path.open("rb") as file:
            catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
        singular = ((english, other) for english, other in catalogue.items() if isinstance(english, str))
        messages |= {english.rpartition(CONTEXT)[2]: other for english, other in singular}
    yield from ((english, other) for english, other in sorted(messages.items()) if other and english not in ("", other))


def _package(module: str, name: str) -> Any:
    """Return a module. Raise UserError, which says how to install it, if it is not there."""
    if find_spec(module.partition(".")[0]) is None:
        raise UserError(f"these data are in the package {name}, which is not installed\npip install {name}")
    return import_module(module)


ROWS: Mapping[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "languages": languages,
    "translations": translations,
    "tokens": tokens,
}


def main(name: str, out: str) -> None:
    """Write the data of this name."""
    if name == "digits":
        write_digits(Path(out))
        return
    Path(out).write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]()), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("digits", *ROWS):
        sys.exit(f"usage: {sys.argv[0]} {{digits,{','.join(ROWS)}}} OUT")
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(str(error))
