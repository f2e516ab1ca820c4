"""A command without memory for its imports says so once."""

import resource

import pytest

from megaloom.runtime.cli.address_space import within_address_space


def failing(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize("error", [MemoryError(), ImportError("failed to map segment"), SystemError("no error set")])
def test_a_limit_of_the_address_space_is_named(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (700 * 2**20, 700 * 2**20))
    assert within_address_space(lambda: failing(error)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"megaloom: out of memory ({type(error).__name__}")
    assert said.endswith(
        "\nthis process may use 0.7 GiB of address space: raise the limit with `ulimit -v unlimited`\n"
    )


def test_without_a_limit_only_memory_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with pytest.raises(ImportError):
        within_address_space(lambda: failing(ImportError("no module named torch")))
    assert within_address_space(lambda: failing(MemoryError())) == 2
    assert "end other programs" in capsys.readouterr().err
    assert within_address_space(lambda: 3) == 3
