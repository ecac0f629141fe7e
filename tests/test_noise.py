"""Integer noise: the sampled laws, and quantiles against tails that are summed by brute force."""

import math
import tracemalloc

import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import given, settings
from hypothesis import strategies as st

from law_checks import P_LIMIT, integers_p
from tukeyreg.mechanisms.noise import IntegerNoise
from tukeyreg.mechanisms.randomness import Randomness

LAWS = ("discrete Laplace", "discrete Gaussian")
LENIENT = {"deadline": None}


def exact_masses(law, rate, reach):
    """P[0], P[1], ..., P[reach] as balls, from the definition."""
    power = 1 if law == "discrete Laplace" else 2
    halves = [(-arb(rate) * z**power).exp() for z in range(reach + 1)]
    total = halves[0] + 2 * sum(halves[1:], arb(0))
    return [h / total for h in halves]


def reach_of(law, rate):
    return math.ceil(80 / rate if law == "discrete Laplace" else math.sqrt(80 / rate)) + 2


@pytest.mark.parametrize(
    ("law", "rate"),
    [
        ("discrete Gaussian", 0.003),
        ("discrete Gaussian", 0.11),
        ("discrete Gaussian", 0.5),
        ("discrete Gaussian", 4.0),
        ("discrete Laplace", 0.2),
    ],
)
def test_sample_follows_the_exact_law(law, rate):
    randomness, noise = Randomness(seed=1), IntegerNoise(law, rate)
    sample = [noise.sample(randomness) for _ in range(8000)]
    masses = [float(p) for p in exact_masses(law, rate, reach_of(law, rate))]
    reach = math.ceil(6 * noise.scale)
    assert integers_p(sample, lambda z: masses[abs(z)], min(reach, len(masses) - 1)) > P_LIMIT


@pytest.mark.parametrize("wrong", [0.5, 2.0])
def test_another_rate_is_convicted(wrong):
    randomness = Randomness(seed=1)
    sample = [
        IntegerNoise("discrete Gaussian", 0.11 * wrong).sample(randomness) for _ in range(8000)
    ]
    masses = [float(p) for p in exact_masses("discrete Gaussian", 0.11, 40)]
    assert integers_p(sample, lambda z: masses[abs(z)], 13) < P_LIMIT


def test_rounded_normal_noise_is_convicted():
    sample = np.rint(np.random.default_rng(0).normal(0, math.sqrt(0.5 / 4), 8000)).astype(int)
    masses = [float(p) for p in exact_masses("discrete Gaussian", 4.0, 8)]
    assert integers_p(sample, lambda z: masses[abs(z)], 3) < P_LIMIT


def test_discrete_gaussian_of_tiny_and_huge_width():
    randomness = Randomness(seed=2)
    narrow = [IntegerNoise("discrete Gaussian", 50.0).sample(randomness) for _ in range(300)]
    assert set(narrow) == {0}
    wide = [IntegerNoise("discrete Gaussian", 1e-12).sample(randomness) for _ in range(600)]
    spread = np.mean(np.square(np.array(wide, dtype=float))) * 2e-12  # chi-square / 600
    assert 0.75 < spread < 1.3  # each beyond 4.3 standard deviations
    assert IntegerNoise("discrete Laplace", 1e-12).sample(randomness) != 0


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rate", [0.01, 0.7, 6.0])
def test_probabilities_are_those_of_the_law(law, rate):
    values, masses = IntegerNoise(law, rate).probabilities()
    assert masses.sum() == pytest.approx(1, abs=1e-12)
    assert np.array_equal(values, -values[::-1])
    exact = exact_masses(law, rate, reach_of(law, rate))
    for value, mass in list(zip(values.tolist(), masses.tolist(), strict=True))[::7]:
        expected = float(exact[abs(value)]) if abs(value) < len(exact) else 0.0
        assert mass == pytest.approx(expected, rel=1e-9, abs=1e-30)


@settings(max_examples=60, **LENIENT)
@given(
    st.sampled_from(LAWS),
    st.floats(math.log(1e-2), math.log(5)).map(math.exp),
    st.floats(-12, -0.31).map(lambda x: 10.0**x),
)
def test_quantile_is_the_smallest_by_brute_force(law, rate, probability):
    g = IntegerNoise(law, rate).quantile(probability)
    assert g >= 0
    with ctx.workprec(192):
        masses = exact_masses(law, rate, max(g + 2, reach_of(law, rate)))
        beyond = float(sum(masses[g + 1 :], arb(0)))
    assert beyond <= probability * (1 + 1e-9)
    if g > 0:
        assert beyond + float(masses[g]) > probability * (1 - 1e-9)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("rate", [1e-6, 1e-12, 1e-20])
def test_very_wide_noise_needs_little_memory(law, rate):
    noise = IntegerNoise(law, rate)
    tracemalloc.start()
    try:
        g = noise.quantile(1e-3)
        masses = noise.probabilities()[1] if rate >= 1e-12 else np.ones(1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**27
    assert masses.sum() == pytest.approx(1)
    standard = math.log(500) if law == "discrete Laplace" else 3.0902
    assert g == pytest.approx(standard * noise.scale, rel=0.01)


@pytest.mark.parametrize("law", LAWS)
def test_the_quantile_of_very_wide_noise_is_never_too_small(law):
    """Planning may ask for more than the smallest margin, not for less."""
    for rate in (1e-7, 1e-9, 1e-11, 1e-13):
        noise = IntegerNoise(law, rate)
        for probability in (0.3, 1e-3, 1e-9):
            g = noise.quantile(probability)
            if law == "discrete Laplace":
                tail = float((-arb(rate) * (g + 1)).exp() / (1 + (-arb(rate)).exp()))
            else:
                tail = float((arb(rate) ** 0.5 * (g + 1)).erfc()) / 2
            assert tail <= probability * (1 + 1e-6)


@pytest.mark.parametrize("law", LAWS)
def test_noise_costs_what_its_rate_says(law):
    """Between neighbouring statistics: epsilon for Laplace, rho for Gaussian (order 2)."""
    rate = 0.4
    masses = exact_masses(law, rate, reach_of(law, rate))
    p = np.array([float(x) for x in [*masses[:0:-1], *masses]])
    p, q = p[1:], p[:-1]
    if law == "discrete Laplace":
        assert np.abs(np.log(p / q)).max() == pytest.approx(rate)
    else:
        for order in (1.5, 2, 8):
            renyi = math.log(np.sum(q * (p / q) ** order)) / (order - 1)
            assert renyi <= order * rate * (1 + 1e-9)
        assert math.log(np.sum(q * (p / q) ** 2)) == pytest.approx(2 * rate, rel=1e-6)
