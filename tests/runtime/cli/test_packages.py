"""Commands without the packages that training needs."""

import re

import pytest

from megaloom.dsl.errors import UserError
from megaloom.runtime.cli.packages import TRAINING_PACKAGES, require_training_packages
from tests.project.test_packaging import PYPROJECT


def test_missing_packages_are_named_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TRAINING_PACKAGES, "megatron-core", "absent.core")
    monkeypatch.setitem(TRAINING_PACKAGES, "psutil", "absent")
    with pytest.raises(UserError) as raised:
        require_training_packages("train")
    assert str(raised.value).splitlines() == [
        "`megaloom train` needs packages that are not installed: megatron-core, psutil",
        "install them with: pip install 'megaloom[train]'",
    ]


def test_the_extra_brings_them() -> None:
    extra = PYPROJECT["project"]["optional-dependencies"]["train"]
    assert TRAINING_PACKAGES.keys() <= {re.split("[<>=!~]", requirement)[0] for requirement in extra}
