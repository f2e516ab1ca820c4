"""Real data with labels and pairs, from packages that are installed, and small models that train on them.

python labelled_data.py digits digits            # images of handwritten digits, a folder for each (scikit-learn)
python labelled_data.py languages texts.jsonl    # messages in five languages, with their language (Django)
python labelled_data.py translations de.jsonl    # messages in English and German (Django)
python labelled_data.py tokens code.jsonl        # lines of Python's standard library, with the class of each word

megaloom data texts.jsonl -o texts --tokenizer bytes --label-key language
megaloom train labelled_data.py:language --data texts --split 80,20 --seq 64
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
    """Write the 1,797 digits of scikit-learn as images, those of each class in a folder of their own."""
    from PIL import Image

    digits = _package("sklearn.datasets", "scikit-learn").load_digits()
    for i, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 255 / 16).astype("uint8")).save(folder / str(label) / f"{i:04}.png")


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
                kind = "KEYWORD" if keyword.iskeyword(token.string) else tokenize.tok_name[token.type]
                line.append((token.string, kind))
            if token.type in (tokenize.NEWLINE, tokenize.NL) and line:
                yield {"words": [word for word, _ in line], "classes": [kind for _, kind in line]}
                line = []


def _messages(language: str) -> Iterator[tuple[str, str]]:
    """Yield Django's messages in English, and in another language."""
    locale = Path(_package("django", "django").__file__).parent / "conf/locale"
    with (locale / language / "LC_MESSAGES/django.mo").open("rb") as file:
        catalogue = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
    pairs = ((english, other) for english, other in sorted(catalogue.items(), key=str) if isinstance(english, str))
    yield from ((english, other) for english, other in pairs if english and other and english != other)


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
