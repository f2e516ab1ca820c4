"""The generator against its publication, and the distribution of its values."""

from __future__ import annotations

from itertools import product
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor

from megaloom.runtime.weights.random_values import (
    LOW_BITS,
    RandomKey,
    normal_values,
    philox,
    signed,
    uniform_values,
    upper_quantiles,
)

CPU = torch.device("cpu")
KEY = RandomKey.of("a test")

KNOWN_ANSWERS = [  # kat_vectors of Random123 1.14, philox4x32 10: counter, key, words
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((LOW_BITS,) * 4, (LOW_BITS,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def normal(*sizes: int) -> Tensor:
    return normal_values(KEY, sizes, tuple(map(range, sizes)), CPU)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    """In integers of numpy, as processors run it, and in those of torch, as GPUs do."""
    tensors = [torch.tensor([signed(x)], dtype=torch.int32) for x in counter]
    arrays = [x.numpy() for x in tensors]
    assert tuple(int(x) & LOW_BITS for x in philox((*tensors,), key)) == words
    assert tuple(int(x[0]) & LOW_BITS for x in philox((*arrays,), key)) == words


def test_element_i_has_word_i_of_the_stream() -> None:
    rows = [0, 1, 2], [0] * 3, *([signed(c)] * 3 for c in KEY.upper)
    words = torch.stack(philox((*(torch.tensor(x, dtype=torch.int32) for x in rows),), KEY.key), -1)
    uniform = uniform_values(KEY, (11,), (range(11),), CPU)
    assert torch.equal(uniform, words.flatten()[:11] / 2.0**31)


def test_a_box_is_a_slice_of_the_whole() -> None:
    sizes = 5, 6, 7
    whole = normal(*sizes)
    ranges = [[range(a, b) for a, b in product(range(n), range(n + 1)) if a < b and (b - a) % 2] for n in sizes]
    for box in product(*ranges):
        part = whole[tuple(slice(r.start, r.stop) for r in box)]
        assert torch.equal(normal_values(KEY, sizes, box, CPU), part), box


def test_pieces_do_not_change_values(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = normal(40, 50)
    monkeypatch.setitem(normal_values.__globals__["AT_ONCE"], "cpu", 13)
    assert torch.equal(normal(40, 50), whole)
    assert normal(0, 3).shape == (0, 3)


def test_elements_far_into_a_tensor_differ_from_the_first() -> None:
    """Their counters need more than 32 bits."""
    far = 2**36
    values = normal_values(KEY, (far,), (range(far - 8, far),), CPU)
    assert not torch.isclose(values, normal(8)).any()


def test_quantiles_are_those_of_the_normal_distribution() -> None:
    p = np.array([2.0**-33, 1e-9, 1e-6, 1e-3, 0.07, 0.075, 0.08, 0.3, 0.5])
    expected = [-NormalDist().inv_cdf(x) for x in p]
    np.testing.assert_allclose(upper_quantiles(p), expected, rtol=1.5e-7, atol=1e-7)


def test_each_value_is_the_quantile_of_its_word() -> None:
    n = 20_000
    words = (uniform_values(KEY, (n,), (range(n),), CPU).double() * 2**31).tolist()
    values = normal(n).double().tolist()
    for word, value in zip(words, values, strict=True):
        beyond = min(abs(word), 2**31 - 1) / 2**32
        expected = -NormalDist().inv_cdf(beyond) * (1 if word > 0 else -1)
        assert abs(value - expected) < 3e-6, word


def test_moments_tails_and_correlations() -> None:
    """Each within five standard errors."""
    n = 2**22
    x = normal(n).double()
    errors = {
        "mean": x.mean() * n**0.5,
        "variance": (x.var() - 1) * (n / 2) ** 0.5,
        "skewness": (x**3).mean() * (n / 15) ** 0.5,
        "kurtosis": ((x**4).mean() - 3) * (n / 96) ** 0.5,
        "neighbours": (x[:-1] * x[1:]).mean() * n**0.5,
        "words of one counter": (x[::4] * x[3::4]).mean() * (n / 4) ** 0.5,
        "counters": (x[:-4] * x[4:]).mean() * n**0.5,
    }
    for edge in (1.0, 2.0, 3.0, 4.0, 4.5):
        p = NormalDist().cdf(-edge)
        errors |= {f"beyond {s * edge}": ((s * x > edge).double().mean() - p) * (n / p) ** 0.5 for s in (1, -1)}
    assert {k: float(e) for k, e in errors.items() if abs(e) > 5} == {}
    assert x.unique().numel() > 0.9 * n


def test_no_two_of_many_matrices_share_a_value() -> None:
    """Of 4,000 keys, as the matrices of a mixture have, none begins as another one does."""
    firsts = {tuple(normal_values(RandomKey.of(f"{i}"), (4,), (range(4),), CPU).tolist()) for i in range(4_000)}
    assert len(firsts) == 4_000
    assert all(len({first[i] for first in firsts}) > 3_990 for i in range(4))
