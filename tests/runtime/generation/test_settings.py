"""Settings that contradict themselves are refused."""

import pytest

from megaloom.dsl.errors import UserError
from megaloom.runtime.generation.settings import EarlyStopping, GenerationSettings

WRONG = [
    ({"max_new_tokens": 0}, "--max-new-tokens must be at least 1, got 0"),
    ({"do_sample": True, "top_p": 1.5}, "--top-p must be above 0 and at most 1, got 1.5"),
    ({"do_sample": True, "top_p": float("nan")}, "--top-p must be above 0 and at most 1, got nan"),
    ({"do_sample": True, "top_k": 0}, "--top-k must be at least 1, got 0"),
    ({"do_sample": True, "temperature": 0.0}, "--temperature must be above 0, got 0"),
    ({"temperature": 0.5}, "--temperature has no effect without --do-sample\nadd --do-sample, or leave it out"),
    ({"do_sample": True, "num_beams": 2}, "--num-beams 2 cannot be combined with --do-sample\nleave one of them out"),
    ({"length_penalty": 2.0}, "--length-penalty has no effect without beam search\nadd --num-beams 4, or leave it out"),
    ({"early_stopping": "maybe", "num_beams": 2}, "--early-stopping must be true, false or never, got 'maybe'"),
    (
        {"num_return_sequences": 2},
        "--num-return-sequences 2 needs as many beams, or samples\nadd --num-beams 2",
    ),
    ({"repetition_penalty": -1.0}, "--repetition-penalty must be above 0, got -1"),
    ({"stop_strings": ("",)}, "--stop-strings must not be empty: each text would end at once"),
]


@pytest.mark.parametrize(("given", "says"), WRONG)
def test_a_wrong_setting_is_refused(given: dict[str, object], says: str) -> None:
    with pytest.raises(UserError) as refused:
        GenerationSettings(**given)  # type: ignore[arg-type]
    assert str(refused.value).startswith(says)


def test_early_stopping_has_the_values_of_hugging_face() -> None:
    found = [GenerationSettings(num_beams=2, early_stopping=given).early_stopping for given in (False, True, "never")]
    assert found == [EarlyStopping.FALSE, EarlyStopping.TRUE, EarlyStopping.NEVER]
