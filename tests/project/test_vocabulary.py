"""Names and texts follow docs/glossary.md: one definition per public name, no replaced word, plain docstrings."""

from pathlib import Path

import pytest

from tests.support import vocabulary
from tests.support.vocabulary import PACKAGES, glossary, long_messages, repeated_names, replaced_names, vague_docstrings

WRONG = '''
"""What this module has."""
class Rooms:
    """Both of them."""
    def tail(self):
        """The same, later."""
        raise UserError(f"{'word ' * 3}" "one two three four five six seven eight nine ten eleven twelve thirteen "
            "a b c d e f g h i j k l m n o p q r s t u v w x y z")
'''


def test_the_glossary_is_short_and_has_no_replaced_word() -> None:
    words, replaced = glossary()
    assert 45 <= len(words) <= 75
    assert not words.keys() & replaced.keys()
    assert all(words.values()) and all(replaced.values())


@pytest.mark.parametrize("package", PACKAGES)
def test_each_public_name_is_defined_once(package: str) -> None:
    assert repeated_names(package) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_or_public_name_is_a_replaced_word(package: str) -> None:
    assert replaced_names([package]) == []


@pytest.mark.parametrize("package", [*PACKAGES, "examples"])
def test_docstrings_stand_alone(package: str) -> None:
    assert vague_docstrings([package]) == []


@pytest.mark.parametrize("package", [*PACKAGES, "examples"])
def test_messages_have_short_sentences(package: str) -> None:
    assert long_messages([package]) == []


def test_the_checks_find_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dsl").mkdir()
    for name in ("sheet.py", "other.py"):
        (tmp_path / "dsl" / name).write_text(WRONG)
    monkeypatch.setattr(vocabulary, "ROOT", tmp_path)
    assert repeated_names("dsl") == ["Rooms: dsl/other.py, dsl/sheet.py"]
    assert "dsl/sheet.py: file name" in replaced_names(["dsl"])
    assert "dsl/other.py: Rooms.tail" in replaced_names(["dsl"])
    assert len(vague_docstrings(["dsl"])) == 6
    assert len(long_messages(["dsl"])) == 2
