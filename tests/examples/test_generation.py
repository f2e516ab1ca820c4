"""The script on generation agrees with transformers."""

from megaloom.examples.scripts.generation import main


def test_searches_and_draws_agree_with_transformers() -> None:
    assert main(tp=2)
