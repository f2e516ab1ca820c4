"""Runs whose processes are killed, whose disk is full or whose folder is read-only. `make faults` kills 50 more."""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.layout import Layout
from megaloom.runtime import Recipe, train
from megaloom.runtime.data.indexed import write_indexed
from megaloom.runtime.data.preprocess import preprocess
from megaloom.runtime.data.preprocess_options import Preprocessing
from tests.support.faults import Moment, outcome, references

MOMENTS = {
    "a rank, while a thread writes": Moment(Layout(dp=2), True, "rank", saving=True, count=2, delay=0.03),
    "all, while a thread writes": Moment(Layout(dp=2), True, "launcher", saving=True, count=3, delay=0.01),
    "a rank, in a step": Moment(Layout(dp=2), False, "rank", saving=False, count=5, delay=0.01),
}
Straight = Callable[[Moment], list[float]]


@pytest.fixture(scope="module")
def straight() -> Iterator[tuple[Path, Straight]]:
    with references() as given:
        yield given


@pytest.mark.parametrize("name", MOMENTS)
def test_a_killed_run_continues_from_the_newest_checkpoint_bit_for_bit(
    name: str, straight: tuple[Path, Straight], tmp_path: Path
) -> None:
    text, losses = straight
    result = outcome(MOMENTS[name], losses(MOMENTS[name]), text, tmp_path)
    assert result.problem == ""
    assert result.saved >= 2 * (MOMENTS[name].count - 1) if MOMENTS[name].saving else result.saved >= 4


def mounted(options: str, folder: Path) -> None:
    """Mount a file system in memory, or skip the test."""
    folder.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "megaloom-test", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this process may not mount a file system")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint."""
    disk = tmp_path / "disk"
    mounted("size=1200k", disk)
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_and_a_read_only_disk_are_named(
    small_disk: Path, straight: tuple[Path, Straight], plan_of: Callable
) -> None:
    plan, (text, _) = plan_of("byte_llama", Layout()), straight
    with pytest.raises(UserError) as raised:
        train(plan, Recipe(steps=4), folder=small_disk / "run", source=str(text), save_every=2)
    message = str(raised.value)
    assert message.startswith(f"cannot save step 4 in {small_disk}/run: no space left on the device (needs ")
    assert message.endswith(" free). Step 2 is saved; free some space and run the same command again")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(UserError, match=r"cannot write in .*other: Read-only file system\n.*--out"):
        train(plan, Recipe(steps=4), folder=small_disk / "other", source=str(text))


def test_a_disk_that_is_full_before_anything_is_written(small_disk: Path, plan_of: Callable, tmp_path: Path) -> None:
    text = Path(__file__).read_bytes() * 20
    write_indexed([np.frombuffer(text, np.uint8)], tmp_path / "books", "u1")
    with contextlib.suppress(OSError), (small_disk / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    plan, books = plan_of("byte_llama", Layout()), str(tmp_path / "books")
    with pytest.raises(UserError) as raised:
        train(plan, Recipe(steps=1), folder=small_disk / "run", source=books, split="9,1")
    fix = "free some space, or choose another folder with --out"
    assert str(raised.value) == f"cannot write in {small_disk}/run: No space left on device\n{fix}"
    (tmp_path / "text.txt").write_bytes(text)
    request = Preprocessing(sources=(str(tmp_path / "text.txt"),), prefix=small_disk / "a", tokenizer="bytes")
    with pytest.raises(UserError, match=r"^cannot write in .*disk: No space left on device\nfree some space and run"):
        preprocess(request, lambda text, done, total: None)
    (small_disk / "fill").unlink()
    assert not (small_disk / "run").exists()
    preprocess(request, lambda text, done, total: None)
    assert (small_disk / "a.bin").stat().st_size == len(text)
