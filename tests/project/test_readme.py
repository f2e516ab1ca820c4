"""What the README says to type works."""

import re
from pathlib import Path
from textwrap import indent

from megaloom.dsl import fingerprint
from megaloom.dsl.catalog import find
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The code of the README in this language, block by block."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_declared_model_is_llama3_8b(tmp_path: Path) -> None:
    declaration, *_ = blocks("python")
    (tmp_path / "llama.py").write_text(declaration)
    ours, published = (find(ref)[0] for ref in (str(tmp_path / "llama.py"), "llama3-8b"))
    assert fingerprint(ours) == fingerprint(published)


def test_the_own_layer_is_that_of_the_examples() -> None:
    _, layer, module = blocks("python")
    assert layer in (ROOT / "examples" / "own_layer.py").read_text()
    assert indent(module.replace("\n\n\n", "\n\n"), "    ") in (ROOT / "examples" / "own_module.py").read_text()
