"""Initial values depend on (seed, name, copy, index) and on nothing else."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import torch

from megaloom.dsl import Dim, Slot, weight
from megaloom.runtime.modules.initial_weights import initial_weight
from tests.support.limits import LIMIT

D, F, E = Dim("embed", 8), Dim("ff", 3), Dim("experts", 4)
PLAIN = Slot("mlp.0.up", weight("up", D, F))
GOLDEN = [0.031171301379799843, 0.006366712972521782, 0.042781002819538116, 0.04618815332651138]
COPIES = Slot("moe.0.experts.up", weight("up", D, F), (E,))
DIGEST = (
    "from hashlib import sha256; from megaloom.dsl import *;"
    "from megaloom.runtime.modules.initial_weights import initial_weight;"
    "slot = Slot('a.0.b', weight('b', Dim('x', 1000), Dim('y', 33), mean=0.5));"
    "print(sha256(initial_weight(slot, 7).read().numpy().tobytes()).hexdigest())"
)


def test_the_values_are_these() -> None:
    """On every machine and under every version: were they not, no seed would mean anything."""
    slot = Slot("wte", weight("wte", Dim("vocab", 50257), D))
    first = initial_weight(slot, 1234).read((range(1), range(4)))
    torch.testing.assert_close(first, torch.tensor([GOLDEN]), rtol=0, atol=0)


def test_other_processes_draw_the_same() -> None:
    def digest(hashseed: str, threads: str) -> str:
        env = {"PYTHONHASHSEED": hashseed, "OMP_NUM_THREADS": threads, "PYTHONPATH": ":".join(filter(None, sys.path))}
        done = subprocess.run([sys.executable, "-c", DIGEST], env=env, capture_output=True, text=True, timeout=LIMIT)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert digest("1", "1") == digest("2", "2")


def test_no_global_generator_is_touched() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    initial_weight(PLAIN, 1).read()
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_copies_are_drawn_apart() -> None:
    whole = initial_weight(COPIES, 5).read()
    assert whole.shape == (4, 8, 3)
    assert torch.equal(whole, torch.stack([initial_weight(COPIES, 5)[i].read() for i in range(4)]))
    assert len(set(whole.flatten().tolist())) == whole.numel()
    nested = initial_weight(Slot("n", weight("up", D), (Dim("a", 2), Dim("b", 3))), 5)
    rows = nested.read((range(1, 2), range(1, 3), range(2, 7)))
    assert torch.equal(nested.read()[1:2, 1:3, 2:7], rows)
    assert torch.equal(nested.reshape(6, 8)[5].read(), nested.read()[1, 2])


def test_a_shard_is_a_slice_of_the_whole() -> None:
    """As ranks read it: rows, columns, the rows of one head, both halves of gate and up, and padded rows."""
    sizes = 30, 6, 7
    view = initial_weight(Slot("w", weight("w", *(Dim(n, size) for n, size in zip("abc", sizes, strict=True)))), 9)
    whole = view.read()
    assert torch.equal(view.narrow(0, 7, 11).read(), whole[7:18])
    assert torch.equal(view.permute(2, 0, 1).narrow(0, 3, 2).read(), whole.permute(2, 0, 1)[3:5])
    assert torch.equal(view.flatten(0, 1).narrow(0, 29, 50).T.read(), whole.flatten(0, 1)[29:79].T)
    halves = torch.cat([half.narrow(0, 5, 5) for half in view.chunk(2)])
    assert torch.equal(halves.read(), torch.cat([whole[5:10], whole[20:25]]))
    padded = torch.cat([view, view.new_zeros(2, 6, 7)]).narrow(0, 28, 4)
    assert torch.equal(padded.read(), torch.cat([whole[28:], torch.zeros(2, 6, 7)]))


def test_seeds_and_names_draw_apart() -> None:
    base = initial_weight(PLAIN, 1).read()
    assert base.dtype == torch.float32
    assert torch.equal(base, initial_weight(PLAIN, 1).read())
    others = initial_weight(PLAIN, 1 + 2**32), initial_weight(Slot("mlp.1.up", PLAIN.value), 1)
    for other in others:  # torch's CPU generator would equate the first
        assert not torch.isclose(base, other.read()).any()


def test_the_distribution_is_the_weights_own() -> None:
    x = initial_weight(Slot("w", weight("w", Dim("a", 1000), Dim("b", 1000), mean=0.25, std=0.5)), 3).read().double()
    assert abs(x.mean() - 0.25) < 0.5 * 5 / 1000  # five standard errors
    assert abs(x.std() - 0.5) < 0.5 * 5 / 1000
    third = ((x - 0.25).abs() < 0.5).double().mean()
    assert abs(third - 0.682689) < 0.003


def test_a_uniform_weight_has_its_deviation_too() -> None:
    x = initial_weight(Slot("w", weight("w", Dim("a", 1000), D, std=0.5, uniform=True)), 3).read()
    assert abs(x.std() - 0.5) < 0.02
    assert 0.86 < x.max() < 0.8661  # sqrt(3) / 2
    assert -0.8661 < x.min() < -0.86


def test_no_deviation_is_a_constant() -> None:
    ones = initial_weight(Slot("s", weight("scale", D, mean=1.0, std=0.0), (E,)), 3).read()
    assert torch.equal(ones, torch.ones(4, 8))
