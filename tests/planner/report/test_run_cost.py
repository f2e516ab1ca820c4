"""Days, device-hours and money of a run: their laws, how tokens and durations are written, and what `plan` prints."""

from __future__ import annotations

import json
from functools import cache
from math import isclose
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from megaloom.dsl.errors import UserError
from megaloom.examples.gpt2 import gpt2
from megaloom.planner import Plan, TokenBudget, Workload, cluster, fewest_devices, plan, training_cost
from megaloom.planner.cli.main import main
from megaloom.planner.report.goodput import goodput
from megaloom.planner.report.run_cost import RunCost, answer_text, cost_json, cost_text, days_text, run_cost
from megaloom.planner.report.token_budget import (
    MOST_SECONDS,
    MOST_TOKENS,
    duration_text,
    parse_duration,
    parse_tokens,
    tokens_text,
)

TOKENS, COUNTS = st.integers(1, MOST_TOKENS), st.sampled_from([8, 64, 1024, 16384])
PARAMS, SECONDS = 8_000_000_000, st.floats(0.01, 100)
LAYOUT = {"tp": 1, "pp": 1, "cp": 1, "micro_batch": 1, "recompute": "none"}
FIXED = ("--tp", "1", "--pp", "1", "--cp", "1", "--micro-batch", "1", "--recompute", "none")


@cache
def small_plan() -> Plan:
    return plan(gpt2(), cluster("8xH100"), Workload(seq=1024, batch=64), ref="", fixed=LAYOUT).best


def cost(tokens: int, count: int, seconds: float, price: float | None = None, failures: float = 2e-5) -> RunCost:
    predicted = evolve(small_plan().predicted, step_seconds=seconds, interval=(0.9 * seconds, 1.2 * seconds))
    machine = evolve(cluster(f"{count}xH100"), failures=failures)
    budget = TokenBudget(tokens=tokens, price=price)
    return run_cost(machine, Workload(seq=4096, batch=1024), predicted, PARAMS, budget)


@given(TOKENS, COUNTS, SECONDS, st.floats(0.01, 100))
def test_days_device_hours_and_money(tokens: int, count: int, seconds: float, price: float) -> None:
    result = cost(tokens, count, seconds, price)
    assert isclose(result.days * count * 24, result.gpu_hours)
    assert result.money is not None
    assert isclose(result.money, result.gpu_hours * price)
    assert result.interval[0] <= result.seconds <= result.interval[1]
    work = Workload(seq=4096, batch=1024).tokens
    assert (result.steps - 1) * work < tokens <= result.steps * work


@given(TOKENS, TOKENS, COUNTS, SECONDS)
def test_more_tokens_never_take_fewer_days(one: int, other: int, count: int, seconds: float) -> None:
    assert cost(min(one, other), count, seconds).days <= cost(max(one, other), count, seconds).days


@given(TOKENS, COUNTS, SECONDS)
def test_failures_take_time(tokens: int, count: int, seconds: float) -> None:
    """Without failures the time is that of the steps; with them, it is divided by the goodput."""
    result, without = cost(tokens, count, seconds), cost(tokens, count, seconds, failures=0.0)
    lasting = goodput(PARAMS, small_plan().workload.precision, result.cluster, seconds)
    assert lasting is not None
    assert without.seconds == without.steps * seconds
    assert isclose(result.seconds * lasting.share, without.seconds)
    assert result.seconds > without.seconds


@given(st.lists(st.tuples(COUNTS, SECONDS), min_size=1, max_size=5), st.integers(1, 10**9))
def test_no_fewer_devices_are_enough(drawn: list[tuple[int, float]], within: int) -> None:
    budget = TokenBudget(tokens=10**12, within_seconds=within)
    costs = [cost(budget.tokens, count, seconds) for count, seconds in drawn]
    best = fewest_devices([None, *costs], budget)
    enough = {c.cluster.count for c in costs if c.seconds <= within}
    assert (best and best.cluster.count) == min(enough, default=None)
    assert ("smallest" in answer_text(costs, budget, "gpt")) == bool(enough)


@given(TOKENS)
def test_tokens_are_read_as_they_are_written(tokens: int) -> None:
    assert parse_tokens(tokens_text(tokens), "--tokens") == tokens


@given(st.integers(1, MOST_SECONDS))
def test_durations_are_read_as_they_are_written(seconds: int) -> None:
    assert parse_duration(duration_text(seconds), "--within") == seconds


@pytest.mark.parametrize(
    ("text", "tokens", "shown"),
    [
        ("300B", 300 * 10**9, "300B"),
        ("15.6T", 15_600_000_000_000, "15.6T"),
        ("1e12", 10**12, "1T"),
        ("1.5e3", 1500, "1.5K"),
        (" 10m ", 10**7, "10M"),
        ("999", 999, "999"),
    ],
)
def test_tokens(text: str, tokens: int, shown: str) -> None:
    assert (parse_tokens(text, "--tokens"), tokens_text(tokens)) == (tokens, shown)


@pytest.mark.parametrize(
    ("text", "hours", "shown"), [("12h", 12, "12h"), ("30d", 720, "30d"), ("2W", 336, "14d"), ("1.5h", 1.5, "1.5h")]
)
def test_durations(text: str, hours: float, shown: str) -> None:
    assert (parse_duration(text, "--within"), duration_text(round(3600 * hours))) == (3600 * hours, shown)


HOW_TOKENS = "--tokens must be a number of tokens such as 300B, 15.6T or 1e12, got"
HOW_WITHIN = "--within must be a duration such as 12h, 30d or 2w, got"
REFUSED = [
    *((("--tokens", text), f"{HOW_TOKENS} {text!r}") for text in ("1 trillion", "1.5", "0", "1e99", "1TB", "٣T")),
    *(
        (("--tokens", "1T", "--within", text), f"{HOW_WITHIN} {text!r}")
        for text in ("30", "30 days", "0d", "1e9w", "5m")
    ),
    (("--tokens", "1T", "--price", "0"), "--price must be a price per GPU-hour above 0, such as 2.5, got 0"),
    (("--tokens", "1T", "--price", "nan"), "--price must be a price per GPU-hour above 0, such as 2.5, got nan"),
    (("--tokens", "1T", "--price", "two"), "--price must be a number, got 'two'\n`plan --help` lists the options"),
    (("--within", "30d"), "--within has no effect without --tokens\ngive the tokens to train on: --tokens 1T"),
    (("--price", "2.5"), "--price has no effect without --tokens\ngive the tokens to train on: --tokens 1T"),
    (("--tokens", "1T", "--lint"), "--tokens has no effect with --lint, which searches nothing\ndrop it"),
    (
        ("--tokens", "1T", "--within", "30d", "--pareto"),
        "--pareto shows slower layouts too, and --within asks for the fastest\ndrop one of them",
    ),
]


@pytest.mark.parametrize(("args", "says"), REFUSED)
def test_refusals(args: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt2", *args]) == 2
    assert capsys.readouterr().err == f"plan: {says}\n"


def test_budgets_of_a_library_are_checked() -> None:
    for wrong in ({"tokens": 0}, {"tokens": 1, "within_seconds": 0}, {"tokens": 1, "price": -1.0}):
        with pytest.raises(UserError):
            TokenBudget(**wrong)


def test_a_cluster_that_fails_before_a_checkpoint() -> None:
    budget = TokenBudget(tokens=10**12, within_seconds=10**6, price=1.0)
    never = cost(budget.tokens, 16384, 1.0, price=1.0, failures=1.0)
    assert never.share == 0
    assert cost_text(never, budget) == "No run of 1T tokens ends: it fails before the first checkpoint is written."
    assert answer_text([never], budget, "gpt").endswith("each fails before its first checkpoint is written.")
    found = cost_json(never, budget)
    assert (found["days"], found["gpu_hours"], found["money"], found["is_met"]) == (None, None, None, False)


def test_runs_of_images_count_inputs() -> None:
    budget = TokenBudget(tokens=10**9, within_seconds=1)
    images = run_cost(cluster("8xH100"), Workload(seq=1, batch=64), small_plan().predicted, PARAMS, budget)
    assert cost_text(images, budget).startswith("1B inputs (15,625,000 steps) take ")
    assert answer_text([images], budget, "vit").startswith("None of these clusters trains vit on 1B inputs within ")


@pytest.mark.parametrize(
    ("days", "text"),
    [(1e-9, "<0.001"), (4.4843, "4.48"), (1234.4, "1,234"), (17.97, "18.0"), (99.97, "100"), (1e20, "1.00e+20")],
)
def test_days_are_short(days: float, text: str) -> None:
    assert days_text(86400 * days) == text


def test_the_cost_of_a_plan() -> None:
    found, budget = small_plan(), TokenBudget(tokens=10**10, price=2.0)
    result = training_cost(found, gpt2(), budget)
    assert result.steps == -(-(10**10) // (64 * 1024))
    seconds = result.steps * found.predicted.step_seconds
    assert seconds < result.seconds < 1.1 * seconds


def test_a_cluster_and_a_range(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ("--seq", "1024", "--batch", "64", *FIXED, "--tokens", "1T", "--price", "2.5")

    def printed(*args: str) -> str:
        assert main(["gpt2", "--gpus", *args]) == 0
        return capsys.readouterr().out

    alone = json.loads(printed("8xH100", *asked, "--within", "1h", "--json"))["plans"][0]["run"]
    enough = f"{alone['days'] + 0.001:.6f}d"
    table = json.loads(printed("4..16xH100", *asked, "--within", enough, "--json"))
    assert alone.pop("is_met") is False
    assert [p["run"]["is_met"] for p in table["points"]] == [False, True, True]
    assert table["fewest_gpus"] == "8xH100"
    assert table["points"][1]["run"].items() >= {k: v for k, v in alone.items() if k != "within_days"}.items()

    head, _, titles, *rows = printed("4..16xH100", *asked, "--within", "1h").splitlines()
    assert head.startswith("None of these clusters trains gpt2 on 1T tokens within 1h: the fastest, 16xH100, takes ")
    assert titles.split()[:4] == ["GPUs", "days", "GPU-hours", "money"]
    hours, money = (float(text.replace(",", "")) for text in rows[1].split()[2:4])
    assert (hours, money) == (round(alone["gpu_hours"]), round(alone["money"]))
    assert rows[-1].startswith("Failures are included: ")

    answer = printed("4..16xH100", *asked, "--within", enough)
    assert answer.startswith("8xH100 is the smallest of these clusters that trains gpt2 on 1T tokens within ")
    report = printed("8xH100", *asked, "--within", "1h")
    assert "1T tokens (15,258,790 steps) take " in report
    assert "This is longer than 1h; a range, such as" in report
    assert "days" not in printed("4..8xH100", *asked[:-4])
