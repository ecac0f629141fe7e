"""Normal noise on integers: the right law, the right grid, and no decision left to rounding."""

import math

import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.special import ndtri

from law_checks import P_LIMIT
from tukeyreg.mechanisms.randomness import _QUANTILE_ERROR, Randomness

SIGMAS = [2.0**-30, 0.37, 60.0, 1e7, 3e11, 2.0**59, 2.0**79]


def grid(sigma):
    return 2.0 ** (math.frexp(sigma)[1] - 21)


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_noise_is_normal(sigma):
    zeros = np.zeros(40_000, dtype=np.int64)
    noise = Randomness(seed=1).gaussian(zeros, sigma) / sigma
    assert stats.kstest(noise, "norm").pvalue > P_LIMIT
    wrong = Randomness(seed=1).gaussian(zeros, sigma * 1.08) / sigma
    assert stats.kstest(wrong, "norm").pvalue < P_LIMIT


@given(
    st.lists(st.integers(-(2**36), 2**36), min_size=1, max_size=20),
    st.floats(-3, 50).map(lambda power: 2.0**power),
    st.integers(0, 2**30),
)
def test_both_ways_decide_alike(values, sigma, seed):
    values = np.array(values, dtype=np.int64)
    fast = Randomness(seed).gaussian(values, sigma)
    assert np.array_equal(fast, Randomness(seed, fast=False).gaussian(values, sigma))


@pytest.mark.parametrize("sigma", SIGMAS[1:])
def test_results_lie_on_the_grid_and_move_with_the_values(sigma):
    values = np.arange(-300, 300, dtype=np.int64) * min(2**52, max(1, int(sigma) // 700))
    noisy = Randomness(seed=2).gaussian(values, sigma)
    steps = noisy / grid(sigma)
    assert np.array_equal(steps, np.rint(steps))
    moved = Randomness(seed=2).gaussian(values + (1 << 29), sigma)
    assert np.all(np.abs(moved - (1 << 29) - noisy) <= grid(sigma))


def test_a_sum_that_does_not_fit_is_refused():
    with pytest.raises(OverflowError):
        Randomness(seed=0).gaussian(np.array([2**45]), 0.3)


@pytest.mark.parametrize("sigma", [0.0, 2.0**-31, 2.0**81, math.inf, math.nan])
def test_noise_that_does_not_fit_is_refused(sigma):
    with pytest.raises(OverflowError):
        Randomness(seed=0).gaussian(np.array([1]), sigma)


def test_shapes_and_empty_arrays():
    assert Randomness(seed=0).gaussian(np.zeros((3, 4), dtype=np.int64), 2.0).shape == (3, 4)
    assert Randomness(seed=0).gaussian(np.zeros(0, dtype=np.int64), 2.0).size == 0


def test_the_double_precision_quantile_is_far_better_than_allowed_for():
    powers = np.linspace(-63, -1, 400)
    places = np.concatenate([2.0**powers, np.random.default_rng(0).random(400) / 2])
    with ctx.workprec(300):
        for p in places.tolist():
            exact = float(arb(2).sqrt() * (2 * arb(p) - 1).erfinv())
            assert abs(float(ndtri(p)) - exact) < 1e-4 * _QUANTILE_ERROR * (1 + abs(exact))


def test_bits_at_the_ends_are_decided_exactly(monkeypatch):
    for word in (b"\x00" * 8, b"\xff" * 8):
        source = Randomness(seed=3)
        raw, first = source._bits.raw, [word]
        monkeypatch.setattr(source._bits, "raw", lambda n: first.pop() if first else raw(n))  # noqa: B023
        noise = source.gaussian(np.zeros(1, dtype=np.int64), 1.0)[0]
        assert 9 < abs(noise) < 12
        assert (noise > 0) == (word[0] == 255)
