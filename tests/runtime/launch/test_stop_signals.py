"""Signals before ranks run: each is said at once, ends the command, and is never lost."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from megaloom.runtime.launch.stop_signals import STOPPING, until_stopped


def raised(number: int) -> int:
    os.kill(os.getpid(), number)
    return 0


@pytest.mark.parametrize("number", STOPPING)
def test_a_signal_is_said_and_ends_the_command(number: signal.Signals, capfd: pytest.CaptureFixture[str]) -> None:
    inherited = signal.signal(number, signal.SIG_DFL)  # nohup ignores SIGHUP, and commands then ignore it too
    try:
        assert until_stopped(lambda: raised(number)) == 128 + number
        assert capfd.readouterr().err == f"megaloom: {number.name} heard; stopping\n"
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, inherited)


def test_sigusr2_is_ignored_with_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert until_stopped(lambda: raised(signal.SIGUSR2)) == 0
    assert "SIGUSR2 heard; ignored: it saves a checkpoint, and training has not begun" in capfd.readouterr().err


def test_an_import_that_makes_another_error_of_it_hides_nothing() -> None:
    def imports() -> int:
        try:
            return raised(signal.SIGTERM)
        except BaseException:
            raise ImportError("multiarray failed to import") from None

    assert until_stopped(imports) == 143


def test_other_errors_are_left_alone() -> None:
    with pytest.raises(ArithmeticError):
        until_stopped(lambda: 1 // 0)
    with pytest.raises(SystemExit):
        until_stopped(lambda: exit(3))


def dropped() -> None:
    def command() -> int:
        try:
            raised(signal.SIGINT)
        except KeyboardInterrupt:
            raised(signal.SIGINT)
        return 0

    os._exit(until_stopped(command))


def inherited() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_one_ends_the_process_and_a_forked_process_has_the_default() -> None:
    fork = multiprocessing.get_context("fork")
    second = fork.Process(target=dropped)
    second.start()
    second.join()
    assert second.exitcode == 130

    def command() -> int:
        child = fork.Process(target=inherited)
        child.start()
        child.join()
        return 1 if child.exitcode == -signal.SIGTERM else 0

    assert until_stopped(command) == 1
