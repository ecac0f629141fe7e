"""`moments` on neighbouring data with the same past: what each step gives away, added up.

`tukeyreg.privacy.replay` fits D' with every random draw answered as it was for D, as in the proof
of Theorem 4. What may differ are the arguments of the draws: shifts of sums under normal noise, and
the depths that medians are drawn by.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tukeyreg.mechanisms import moments
from tukeyreg.mechanisms.moments import profile, scale_of_profile
from tukeyreg.mechanisms.randomness import Randomness
from tukeyreg.privacy import replay as referee
from tukeyreg.privacy.budget import Budget
from tukeyreg.privacy.plan_moments import MomentsPlanner
from tukeyreg.privacy.replay import replay
from tukeyreg.summaries import rows as kernel
from tukeyreg.summaries.rows import UnitRows

BUDGET = Budget(3.0, 1e-5)


def given_away(rows, other, parameters, intercept=True, seed=0, coins=None):
    """Normal shifts in rho, the widest loss of a median, and how many medians and draws."""
    found = replay(rows, other, parameters, intercept=intercept, seed=seed, coins=coins)
    losses = found.median_losses
    width = max(losses, default=0.0)
    as_planned = found.rho <= parameters.gaussian_rho
    as_planned &= width <= parameters.location_epsilon * (1 + 1e-12)
    assert (found.delta(BUDGET.epsilon) <= BUDGET.delta) >= as_planned
    return found.rho, width, len(losses), found.draws


def steps(parameters, columns):
    """How many draws a fit that settles asks for."""
    rounds = len(parameters.round_rho)
    return columns + 2 + 2 + 2 * 2 + 2 * rounds + 1


EXTREME = [0.0, 1.0, -1.0, 1e-300, 1e6, -1e9, 1e300, -1.7e308]


def table(n, p, seed, units, wild):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p)) * 10.0 ** rng.integers(-2, 3, p) + rng.normal(size=p)
    y = X @ rng.normal(size=p) + rng.normal(size=n)
    codes = None
    if units:
        codes = np.unique(rng.integers(0, n // 2, n), return_inverse=True)[1].astype(np.int64)
    rows = UnitRows(X, y, codes, n if codes is None else int(codes.max()) + 1)
    one = np.zeros(rows.n_units, dtype=bool)
    one[int(rng.integers(rows.n_units))] = True
    mine = one if codes is None else one[codes]
    if wild:
        X[mine] = rng.choice(EXTREME, (int(mine.sum()), p))
        y[mine] = rng.choice(EXTREME, int(mine.sum()))
    return rows, one


def planned(n, p, *, replaced=False, intercept=True):
    planner = MomentsPlanner(
        BUDGET, p + int(intercept), private_count=False, replace=replaced, intercept=intercept
    )
    return planner.parameters(n)


cases = st.tuples(
    st.integers(300, 900),
    st.integers(1, 4),
    st.integers(0, 2**20),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(cases)
def test_a_unit_more_or_less_gives_away_no_more_than_planned(case):
    n, p, seed, units, wild, intercept = case
    rows, one = table(n, p, seed, units, wild)
    parameters = planned(n, p, intercept=intercept)
    with np.errstate(all="ignore"):
        fewer = rows.of_units(~one)
    for pair in ((rows, fewer), (fewer, rows)):
        rho, width, medians, _ = given_away(*pair, parameters, intercept, seed)
        assert rho <= parameters.gaussian_rho * (1 + 1e-12)
        assert width <= parameters.location_epsilon * (1 + 1e-12)
        assert medians == (p + 1 if intercept else 0)


@settings(max_examples=40, deadline=None)
@given(cases)
def test_a_replaced_unit_gives_away_no_more_than_planned(case):
    n, p, seed, units, wild, intercept = case
    rows, one = table(n, p, seed, units, wild)
    mine = one if rows.codes is None else one[rows.codes]
    X, y = rows.design.copy(), rows.target.copy()
    X[mine], y[mine] = -X[mine][::-1] * 0.7, 3 - y[mine]
    other = UnitRows(X, y, rows.codes, rows.n_units)
    parameters = planned(n, p, replaced=True, intercept=intercept)
    rho, width, _, _ = given_away(rows, other, parameters, intercept, seed)
    assert rho <= parameters.gaussian_rho * (1 + 1e-12)
    assert width <= parameters.location_epsilon * (1 + 1e-12)


def opposite(n=600, p=2, seed=1):
    """Neighbours by replacement that are as far apart as it gets."""
    rows, _ = table(n, p, seed, units=False, wild=False)
    X, y = rows.design.copy(), rows.target.copy()
    X[0], y[0] = 1e6, 1e6
    other = UnitRows(X.copy(), y.copy(), None, n)
    other.design[0], other.target[0] = 1e6, -1e6
    other.design[0, 0] = -1e6
    return UnitRows(X, y, None, n), other


def test_replacing_costs_more_than_adding_and_a_plan_for_adding_is_convicted():
    rows, other = opposite()
    n, p = rows.design.shape
    enough = planned(n, p, replaced=True)
    rho, width, _, asked = given_away(rows, other, enough)
    assert asked == steps(enough, p + 1)
    assert 0.3 * enough.gaussian_rho < rho <= enough.gaussian_rho
    assert 0.99 * enough.location_epsilon < width <= enough.location_epsilon * (1 + 1e-12)
    wrong = planned(n, p)
    rho, width, _, _ = given_away(rows, other, wrong)
    assert rho > wrong.gaussian_rho
    assert width > 1.9 * wrong.location_epsilon


def added(n=600, p=2):
    rows, _ = table(n, p, 2, units=False, wild=False)
    X, y = rows.design.copy(), rows.target.copy()
    X[0], y[0] = 1e6, -1e6
    rows = UnitRows(X, y, None, n)
    return rows, rows.of_units(np.arange(n) > 0)


def test_the_worst_unit_uses_most_of_what_is_planned():
    rows, fewer = added()
    parameters = planned(*rows.design.shape)
    rho, width, _, _ = given_away(rows, fewer, parameters)
    assert 0.8 * parameters.gaussian_rho < rho <= parameters.gaussian_rho
    assert width == pytest.approx(parameters.location_epsilon)


@pytest.mark.parametrize("scale_zero", [True, False])
@pytest.mark.parametrize("large", [190, 200])
def test_such_residuals_end_the_rounds_or_get_all_their_noise(monkeypatch, large, scale_zero):
    if not scale_zero:
        monkeypatch.setattr(moments, "_NO_RESIDUALS", 0.0)
    for seed in range(6):
        test_residuals_too_small_for_a_double_get_no_less_noise(large, seed)


@pytest.mark.parametrize("large", [190, 200])
@pytest.mark.parametrize("seed", range(12))
def test_residuals_too_small_for_a_double_get_no_less_noise(large, seed):
    """Most of the target is all but zero, so that the value of a step of the sum is rounded."""
    n = 2000
    planner = MomentsPlanner(Budget(1.0, 1e-6), 1, private_count=False, intercept=False)
    X, y = np.ones((n, 1)), np.full(n, 5.39e-317)
    y[:large], X[-1], y[-1] = 1.0, 1e9, 1e300
    rows, parameters = UnitRows(X, y, None, n), planner.parameters(n)
    fewer = rows.of_units(np.arange(n) < n - 1)
    found = replay(rows, fewer, parameters, intercept=False, seed=seed)
    assert found.rho <= parameters.gaussian_rho * (1 + 1e-12)


def test_noise_that_is_set_by_the_value_of_a_step_is_caught(monkeypatch):
    def rounded(self, sums, map, bound, k):
        sigma = map.radius * bound / math.sqrt(2 * self._parameters.round_rho[k])
        step = map.gradient_step(bound)
        return self._randomness.gaussian(sums, sigma / step) * step

    monkeypatch.setattr(moments._Fit, "_noisy_gradient", rounded)
    monkeypatch.setattr(moments, "_NO_RESIDUALS", 0.0)
    with pytest.raises((AssertionError, ZeroDivisionError)):
        list(map(test_residuals_too_small_for_a_double_get_no_less_noise, [190] * 12, range(12)))


def break_norms(monkeypatch):
    monkeypatch.setattr(kernel, "_norms", lambda vectors: np.zeros(vectors.shape[1]))
    monkeypatch.setattr(kernel, "REACH", 1e3)


def break_medians(monkeypatch):
    plain = referee._TapedMedian.__init__

    def louder(self, votes, epsilon, width=0.0):
        plain(self, votes, 2 * epsilon, width)

    monkeypatch.setattr(referee._TapedMedian, "__init__", louder)


def break_residuals(monkeypatch):
    plain = kernel.ShrunkRows.gradient

    def unbounded(self, coefficients, bound):
        return (plain(self, coefficients, 4 * bound).astype(float) * 4).astype(np.int64)

    monkeypatch.setattr(kernel.ShrunkRows, "gradient", unbounded)


def break_centre(monkeypatch):
    plain = kernel.RowMap.coordinates
    monkeypatch.setattr(
        kernel.RowMap, "coordinates", lambda self, design: plain(self, design - design.mean(axis=0))
    )


def break_gram_noise(monkeypatch):
    plain = referee._Tape.gaussian

    def quieter(self, values, sigma):
        return plain(self, values, sigma / 2 if sigma > 1e6 else sigma)

    monkeypatch.setattr(referee._Tape, "gaussian", quieter)


@pytest.mark.parametrize(
    "spoil", [break_norms, break_medians, break_residuals, break_centre, break_gram_noise]
)
def test_a_broken_mechanism_is_caught(monkeypatch, spoil):
    rows, fewer = added()
    parameters = planned(*rows.design.shape)
    spoil(monkeypatch)
    rho, width, _, _ = given_away(rows, fewer, parameters)
    over = rho / parameters.gaussian_rho, width / parameters.location_epsilon
    assert max(over) > 1.01


@pytest.mark.parametrize("units", [False, True])
def test_a_part_of_the_units_gives_away_no_more(units):
    rows, one = table(3000, 2, 5, units=units, wild=True)
    parameters = replace(planned(1500, 2), pilot=2, voters=3)
    coins = np.random.default_rng(0).integers(0, 6, rows.n_units)
    coins[one] = 0
    fewer = rows.of_units(~one)

    rho, width, _, asked = given_away(rows, fewer, parameters, seed=3, coins=(coins, coins[~one]))
    assert asked == steps(parameters, 3)
    assert 0 < rho <= parameters.gaussian_rho
    assert 0 < width <= parameters.location_epsilon * (1 + 1e-12)


# ---------------------------------------------------------------- scales


@settings(max_examples=150, deadline=None, derandomize=True)  # what noise makes likely, not sure
@given(
    st.integers(0, 2**30),
    st.floats(-300, 300).map(lambda power: 10.0**power),
    st.floats(5.0, 60.0),
    st.floats(0.0, 0.8),
)
def test_the_scale_of_a_column_is_found_wherever_it_is(seed, scale, sigma, zeros):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=20_000) * scale
    values[rng.random(20_000) < zeros] = 0
    truth = math.sqrt(np.mean((values / scale) ** 2)) * scale
    found = scale_of_profile(profile(np.abs(values)) + rng.normal(size=2100) * sigma, sigma)
    assert 0.7 * truth < found < 2 * truth


def test_noise_alone_is_rarely_taken_for_a_scale():
    rng = np.random.default_rng(0)
    found = [scale_of_profile(rng.normal(size=2100) * 30.0, 30.0) for _ in range(1000)]
    assert sum(scale is not None for scale in found) <= 40


def test_zeros_alone_have_scale_zero_and_a_few_rows_none():
    counts = profile(np.zeros(5000)).astype(float)
    assert scale_of_profile(counts, 20.0) == 0.0
    assert scale_of_profile(profile(np.ones(30)).astype(float), 20.0) is None


def test_profiles_count_every_magnitude_once():
    values = np.array([0.0, 5e-324, 1e-310, 0.5, 1.0, 1.5, np.finfo(float).max, np.inf])
    counts = profile(values)
    assert len(counts) == 2100
    assert counts.sum() == len(values)
    assert counts[-1] == 2
    assert counts[0] == 1


# ---------------------------------------------------------------- the fit


def fit(X, y, budget=BUDGET, codes=None, seed=0, intercept=True):
    n = len(y) if codes is None else int(codes.max()) + 1
    planner = MomentsPlanner(budget, X.shape[1] + int(intercept), False, intercept=intercept)
    rows = UnitRows(X, y, codes, n)
    with np.errstate(all="ignore"):
        return moments.release(rows, intercept, planner.parameters(n), Randomness(seed))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.floats(-100, 100), st.floats(-100, 100), st.floats(-6, 6))
def test_the_units_of_measurement_do_not_matter(seed, log_x, log_y, shift):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(3000, 2))
    y = X @ [1.0, -2.0] + rng.normal(size=3000)
    model = fit(X * 10.0**log_x + shift * 10.0**log_x, y * 10.0**log_y, seed=seed)
    assume(model is not None)
    assert np.allclose(model.coefficients * 10.0 ** (log_x - log_y), [1, -2], atol=0.25)


def test_equal_rows_of_a_unit_count_as_one():
    rng = np.random.default_rng(3)
    X = rng.normal(size=(4000, 3))
    y = X @ [1.0, 2.0, 3.0] + rng.normal(size=4000)
    times = rng.integers(1, 6, 4000)
    codes = np.repeat(np.arange(4000), times)
    plain = fit(X, y, seed=4)
    repeated = fit(np.repeat(X, times, axis=0), np.repeat(y, times), codes=codes, seed=4)
    assert np.allclose(plain.coefficients, repeated.coefficients, atol=0.02)


def test_a_far_outlier_hardly_matters():
    rng = np.random.default_rng(5)
    X = rng.normal(size=(4000, 2))
    y = X @ [1.0, 2.0] + rng.normal(size=4000)
    X[:5], y[:5] = 1e12, -1e15
    assert np.allclose(fit(X, y).coefficients, [1, 2], atol=0.2)


def test_nothing_seen_is_a_refusal():
    rng = np.random.default_rng(6)
    X, y = rng.normal(size=(3000, 2)), rng.normal(size=3000)
    assert fit(np.ones((3000, 2)), y) is None
    assert fit(X, np.full(3000, 7.0)) is None
    assert fit(X[:20], y[:20]) is None


def test_rounds_that_grow_are_a_refusal(monkeypatch):
    rng = np.random.default_rng(7)
    X = rng.normal(size=(3000, 2))
    y = X @ [1.0, 2.0] + rng.normal(size=3000)
    plain = moments._Fit._noisy_gradient
    monkeypatch.setattr(moments._Fit, "_noisy_gradient", lambda *a: -30 * plain(*a))
    assert fit(X, y) is None


def test_a_column_that_is_not_seen_has_coefficient_zero_and_all_values_for_range():
    rng = np.random.default_rng(8)
    X = rng.normal(size=(5000, 3))
    X[:, 1] = 4.0
    y = X @ [1.0, 0.0, 2.0] + rng.normal(size=5000)
    model = fit(X, y)
    assert model.coefficients[1] == 0.0
    assert model.ranges[1].tolist() == [-math.inf, math.inf]
    assert np.all(np.isfinite(model.ranges[[0, 2]]))
    assert np.allclose(model.coefficients[[0, 2]], [1, 2], atol=0.1)
