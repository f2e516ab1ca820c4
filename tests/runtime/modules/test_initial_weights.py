"""Initial values depend on (seed, name, copy) and on nothing else."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from megaloom.dsl import Dim, Slot, weight
from megaloom.runtime.modules.initial_weights import initial_weight
from tests.support.limits import LIMIT

D, F, E = Dim("embed", 8), Dim("ff", 3), Dim("experts", 4)
PLAIN = Slot("mlp.0.up", weight("up", D, F))
GOLDEN = [-0.04753691703081131, 0.0061705270782113075, 0.005382305942475796, 0.004763671196997166]
COPIES = Slot("moe.0.experts.up", weight("up", D, F), (E,))
DIGEST = (
    "from hashlib import sha256; from megaloom.dsl import *;"
    "from megaloom.runtime.modules.initial_weights import initial_weight;"
    "slot = Slot('a.0.b', weight('b', Dim('x', 1000), Dim('y', 33), mean=0.5));"
    "print(sha256(initial_weight(slot, 7).numpy().tobytes()).hexdigest())"
)


def test_the_values_are_these() -> None:
    """On every machine and under every version: were they not, no seed would mean anything."""
    first = initial_weight(Slot("wte", weight("wte", Dim("vocab", 50257), D)), 1234)[0, :4]
    torch.testing.assert_close(first, torch.tensor(GOLDEN), rtol=0, atol=0)


def test_other_processes_draw_the_same() -> None:
    def digest(hashseed: str, threads: str) -> str:
        env = {"PYTHONHASHSEED": hashseed, "OMP_NUM_THREADS": threads, "PYTHONPATH": ":".join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert digest("1", "1") == digest("2", "2")


def test_no_global_generator_is_touched() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    initial_weight(PLAIN, 1)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_copies_are_drawn_apart() -> None:
    whole = initial_weight(COPIES, 5)
    assert whole.shape == (4, 8, 3)
    assert torch.equal(whole, torch.stack([initial_weight(COPIES, 5, index=i) for i in range(4)]))
    assert len({tuple(one.flatten().tolist()) for one in whole}) == 4
    nested = initial_weight(Slot("n", weight("up", D), (Dim("a", 2), Dim("b", 3))), 5)
    assert torch.equal(nested[1, 2], initial_weight(Slot("n", weight("up", D), (Dim("a", 2), Dim("b", 3))), 5, index=5))


def test_no_copy_of_that_index() -> None:
    with pytest.raises(IndexError, match="4 copies; index 4 is out of range"):
        initial_weight(COPIES, 5, index=4)


def test_seeds_and_names_draw_apart() -> None:
    base = initial_weight(PLAIN, 1)
    assert base.dtype == torch.float32
    assert torch.equal(base, initial_weight(PLAIN, 1))
    assert not torch.isclose(base, initial_weight(PLAIN, 1 + 2**32)).any()  # which torch's CPU generator would equate
    assert not torch.isclose(base, initial_weight(Slot("mlp.1.up", PLAIN.value), 1)).any()


def test_the_distribution_is_the_weights_own() -> None:
    x = initial_weight(Slot("w", weight("w", Dim("a", 1000), Dim("b", 1000), mean=0.25, std=0.5)), 3).double()
    assert abs(x.mean() - 0.25) < 0.5 * 5 / 1000  # five standard errors
    assert abs(x.std() - 0.5) < 0.5 * 5 / 1000
    third = ((x - 0.25).abs() < 0.5).double().mean()
    assert abs(third - 0.682689) < 0.003


def test_no_deviation_is_a_constant() -> None:
    ones = initial_weight(Slot("s", weight("scale", D, mean=1.0, std=0.0), (E,)), 3)
    assert torch.equal(ones, torch.ones(4, 8))
