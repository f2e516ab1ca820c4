"""Messages of errors: each line of the user's program appears once."""

from __future__ import annotations

import pickle
import traceback

import pytest

from megaloom.dsl import Dim, Embed, ShapeError, UserError, ids, repeat, residual, weight
from megaloom.dsl.errors import did_you_mean, full_message
from megaloom.dsl.layers.linear import Linear


def error() -> UserError:
    x = ids() >> Embed(weight("wte", Dim("vocab", 10), Dim("embed", 8)))
    with pytest.raises(ShapeError) as raised:
        x >> repeat(2, residual(Linear(Dim("embed", 4))))
    return raised.value


def test_a_traceback_prints_each_note_once() -> None:
    wrong = error()
    assert wrong.__notes__
    printed = "".join(traceback.format_exception_only(wrong))
    for note in wrong.__notes__:
        assert printed.count(note) == full_message(wrong).count(note) == 1
        assert note not in str(wrong)


def test_an_error_without_notes_names_its_line_once() -> None:
    with pytest.raises(ShapeError) as raised:
        Dim("embed", 0)
    printed = "".join(traceback.format_exception_only(raised.value))
    assert printed.count("test_errors.py:") == full_message(raised.value).count("test_errors.py:") == 1


def test_an_error_keeps_its_notes_between_processes() -> None:
    wrong = error()
    assert full_message(pickle.loads(pickle.dumps(wrong))) == full_message(wrong)


def test_the_closest_known_name_is_suggested() -> None:
    assert did_you_mean("sigmoyd", ["softmax", "sigmoid"]) == ": did you mean sigmoid?\n"
    assert did_you_mean("x", ["softmax", "sigmoid"]) == ": "
