"""Ranks that read other files or have other options are refused before the first step, with rank and host."""

import os
import re
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch.distributed as dist
from attrs import evolve

from megaloom.dsl.errors import UserError
from megaloom.planner.contract.choices import Recompute
from megaloom.planner.contract.layout import Layout
from megaloom.planner.contract.plans import Plan
from megaloom.runtime.data.corpus import open_corpus
from megaloom.runtime.data.indexed import write_indexed
from megaloom.runtime.launch import launcher
from megaloom.runtime.training.launch import owned_folder, prepared_once
from megaloom.runtime.training.rank_inputs import check_same_data, check_same_plan, check_shared_folder
from megaloom.runtime.training.run_folder import OPTIONS_NAME
from megaloom.runtime.training.run_options import RunOptions
from tests.support.limits import LIMIT
from tests.support.paths import TEST_MODELS


def refusal(check: Callable[[], None]) -> str:
    try:
        check()
    except UserError as error:
        return str(error)
    return ""


def refusals(plan: Plan, folder: Path) -> list[str]:
    """On each rank: the messages for inputs in which rank 1 differs."""
    rank, options = dist.get_rank(), RunOptions().changed(data="books")
    layout = evolve(plan, layout=evolve(plan.layout, recompute=Recompute.FULL if rank else Recompute.NONE))
    model = evolve(plan, model=f"{TEST_MODELS / 'small.py'}:{'byte_gpt' if rank else 'byte_llama'}")
    missing = evolve(plan, model=str(folder / "nowhere.py") if rank else plan.model)
    own = folder / str(rank)  # as the storage of a host
    shutil.copytree(folder / "data", own)
    (own / "data").mkdir()
    os.chdir(own)
    if rank:
        tokens = np.memmap("changed.bin", np.uint16, "r+")
        tokens[len(tokens) // 2] += 1
        tokens.flush()
    books, changed = (open_corpus([name], None, folder) for name in ("books", "changed"))
    return [
        refusal(lambda: check_same_plan(plan, options)),
        refusal(lambda: check_shared_folder(folder)),
        refusal(lambda: check_same_data(books)),
        refusal(lambda: check_same_plan(layout, options)),
        refusal(lambda: check_same_plan(model, options)),
        refusal(lambda: check_same_plan(missing, options)),
        refusal(lambda: check_same_plan(plan, options.changed(lr=0.1 if rank else 0.2, seed=rank))),
        refusal(lambda: check_same_plan(plan, options.changed(data=f"books-{rank}"))),
        refusal(lambda: check_shared_folder(Path("data"))),
        refusal(lambda: check_same_data(changed)),
    ]


def test_ranks_with_other_inputs_are_refused(plan_of, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name in ("books", "changed"):
        write_indexed([np.arange(5000, dtype=np.uint16)] * 10, tmp_path / "data" / name, "u2")
    plan, host = plan_of("byte_llama", Layout(dp=2)), re.escape(socket.gethostname())
    first, second = launcher.run(refusals, (plan, tmp_path), 2, timeout=LIMIT)
    differs = rf"rank 1 \({host}\) differs from rank 0 \({host}\): "
    expected = [
        "",
        "",
        "",
        differs + r"--recompute is full, not none\nstart all ranks with one command, .*",
        differs + r"the model's fingerprint is 1-\w+, not 1-\w+\nstart .*",
        rf"on rank 1 \({host}\): no file (.|\n)*",
        differs + r"--lr is 0.1, not 0.2; --seed is 1, not 0\nstart .*",
        differs + r"--data is books-1, not books-0\nstart .*",
        rf"rank 1 \({host}\) does not see data of rank 0 \({host}\)\ngive --out on storage that all hosts share: .*",
        differs + r"changed is 50,000 tokens with digest \w+, not 50,000 tokens with digest \w+\ncopy the dataset .*",
    ]
    for pattern, on_first, on_second in zip(expected, first, second, strict=True):
        assert re.fullmatch(pattern, on_first)
        assert on_second == on_first or on_first.endswith(on_second)  # a rank's own error does not name it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "data"]


def refused_runs(plan: Plan, folder: Path) -> list[str]:
    """On each rank: the messages for data that rank 1 has changed, in a new folder and in two that must stay."""
    own = folder / str(dist.get_rank())
    shutil.copytree(folder / "data", own)
    os.chdir(own)
    if dist.get_rank():
        np.memmap("changed.bin", np.uint16, "r+")[25_000] += 1

    def prepared(run: Path) -> SimpleNamespace:
        (run / "plan.json").touch()
        return SimpleNamespace(corpus=open_corpus(["changed"], None, folder))

    runs = (folder / "new", folder / "old", folder / "of another command")

    def trained(run: Path) -> None:
        with owned_folder(plan, RunOptions().changed(out=run)):
            prepared_once(lambda: prepared(run))

    return [refusal(lambda run=run: trained(run)) for run in runs]


def test_a_refused_run_leaves_no_folder(plan_of, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "of another command").mkdir()
    (tmp_path / "of another command" / OPTIONS_NAME).touch()
    write_indexed([np.arange(5000, dtype=np.uint16)] * 10, tmp_path / "data" / "changed", "u2")
    for messages in launcher.run(refused_runs, (plan_of("byte_llama", Layout(dp=2)), tmp_path), 2, timeout=LIMIT):
        assert all("copy the dataset to every host again" in message for message in messages)
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old" / "plan.json").exists()
    assert (tmp_path / "of another command" / OPTIONS_NAME).exists()
