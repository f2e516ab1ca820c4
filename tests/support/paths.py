"""Folders of the repository that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
TEST_MODELS = SUPPORT / "models"
