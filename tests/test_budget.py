"""Budgets: values that explain themselves, and conversions that are rounded to the safe side."""

import math
import pickle
from dataclasses import FrozenInstanceError
from decimal import Decimal
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, ZCDpEvent
from dp_accounting.rdp import RdpAccountant
from flint import arb, ctx
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import log_ndtr

from tukeyreg import Budget, Guarantee, InvalidInput
from tukeyreg.privacy.budget import (
    delta_of_rho,
    epsilon_of_rho,
    largest_rho,
    largest_stage_by_sum,
    largest_stage_by_zcdp,
)

LENIENT = {"deadline": None}


def logarithmic(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


rhos = logarithmic(1e-8, 20)
epsilons = logarithmic(1e-3, 30)
deltas = logarithmic(1e-30, 0.3)


# ---------------------------------------------------------------- the values


@pytest.mark.parametrize(
    "value", [Budget(1.0, 1e-6), Guarantee(1.0, 0.0, "add-remove", "row", True)]
)
def test_values_are_frozen_equal_and_can_be_stored(value):
    with pytest.raises(FrozenInstanceError):
        value.epsilon = 2.0
    assert pickle.loads(pickle.dumps(value)) == value
    assert len({value, pickle.loads(pickle.dumps(value))}) == 1


@pytest.mark.parametrize("one", [1, np.float32(1), np.int64(1), Fraction(1), Decimal(1)])
def test_numbers_of_every_kind_become_floats(one):
    budget = Budget(one, 0 * one)
    assert budget == Budget(1.0, 0.0)
    assert [type(part) for part in (budget.epsilon, budget.delta)] == [float, float]
    assert str(budget) == "(epsilon = 1, delta = 0)"


@pytest.mark.parametrize(
    ("epsilon", "delta", "name"),
    [
        (-1.0, 0.0, "epsilon"),
        (0, 0.0, "epsilon"),
        (math.inf, 0.0, "epsilon"),
        (None, 0.0, "epsilon"),
        (True, 0.0, "epsilon"),
        ([1.0, 2.0], 0.0, "epsilon"),
        (1.0 + 0j, 0.0, "epsilon"),
        (1.0, 1, "delta"),
        (1.0, -5e-324, "delta"),
        (1.0, math.nan, "delta"),
        (1.0, math.inf, "delta"),
        (1.0, None, "delta"),
        (1.0, False, "delta"),
        (1.0, b"0", "delta"),
    ],
)
def test_a_budget_that_is_none_is_refused_by_name(epsilon, delta, name):
    with pytest.raises(InvalidInput, match=rf"^{name} .*Nothing was spent"):
        Budget(epsilon, delta)


@pytest.mark.parametrize(
    ("neighboring", "unit", "text"),
    [
        ("add-remove", "row", "when one row is added or removed"),
        ("replace-one", "row", "when one row is replaced by others"),
        ("add-remove", "patient", "when all rows of one patient are added or removed"),
        ("replace-one", "patient", "when all rows of one patient are replaced by others"),
        ("replace-one-model", "model", "when one model is replaced by another"),
    ],
)
def test_a_guarantee_says_to_whom(neighboring, unit, text):
    promise = str(Guarantee(0.5, 1e-7, neighboring, unit, private=True))
    assert promise == f"(epsilon = 0.5, delta = 1e-07)-differential privacy {text}"
    assert "NOT PRIVATE" in str(Guarantee(0.5, 1e-7, neighboring, unit, private=False))


# ---------------------------------------------------------------- delta of rho


def log_delta_at(order, rho, epsilon):
    """The exponent of Proposition 12, in the working precision of mpmath."""
    a, rho, epsilon = mpmath.mpf(order), mpmath.mpf(rho), mpmath.mpf(epsilon)
    return (a - 1) * (a * rho - epsilon) - mpmath.log(a - 1) + a * mpmath.log1p(-1 / a)


def least_delta(rho, epsilon):
    """The minimum over all orders: where (2 a - 1) rho - epsilon + log(1 - 1/a) = 0.

    The left side increases in a, so there is one zero. 60 digits.
    """
    with mpmath.workdps(60):
        low, high = mpmath.mpf("1e-40"), mpmath.mpf(1)

        def slope(excess):
            order = 1 + excess
            return (2 * order - 1) * mpmath.mpf(rho) - epsilon + mpmath.log(excess / order)

        while slope(high) < 0:
            high *= 2
        for _ in range(150):
            middle = mpmath.sqrt(low * high)
            low, high = (middle, high) if slope(middle) < 0 else (low, middle)
        return mpmath.exp(log_delta_at(1 + high, rho, epsilon))


def is_not_below_the_least(delta, rho, epsilon):
    return delta == 1.0 or mpmath.mpf(delta) >= least_delta(rho, epsilon)


@settings(max_examples=60, **LENIENT)
@given(rhos, epsilons)
def test_delta_is_the_least_over_all_orders_rounded_up(rho, epsilon):
    delta = delta_of_rho(rho, epsilon)
    least = least_delta(rho, epsilon)
    assume(least > 1e-290)
    assert is_not_below_the_least(delta, rho, epsilon)
    if epsilon > math.sqrt(rho):  # where it is smaller the search for the order stops early
        assert delta <= least * (1 + mpmath.mpf("1e-9"))
        assert not is_not_below_the_least(delta * (1 - 1e-8), rho, epsilon)


@pytest.mark.parametrize(("rho", "epsilon"), [(1e-6, 0.01), (0.02, 1.0), (0.02, 1.8), (3.0, 12.0)])
def test_no_order_of_a_dense_grid_is_better(rho, epsilon):
    values = []
    with ctx.workprec(200):
        for k in range(-600, 1200):
            a = 1 + arb(k / 50).exp()
            log_delta = (a - 1) * (a * arb(rho) - arb(epsilon))
            log_delta += a * (1 - 1 / a).log() - (a - 1).log()
            values.append(float(log_delta.lower()))
    best = math.exp(min(values))
    assert delta_of_rho(rho, epsilon) <= best * (1 + 1e-12)
    assert delta_of_rho(rho, epsilon) >= best * (1 - 1e-2)  # the grid is coarser than the search


@pytest.mark.parametrize("rho", [1e-4, 0.003, 0.05, 0.5])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 1e-3])
def test_epsilon_and_delta_are_those_of_dp_accounting(rho, delta):
    epsilon = epsilon_of_rho(rho, delta)
    orders = (1 + np.exp(np.linspace(-3, 13, 4000))).tolist()
    for event in (ZCDpEvent(rho), GaussianDpEvent(math.sqrt(0.5 / rho))):
        accountant = RdpAccountant(orders).compose(event)
        # It searches a grid of orders, so it can only be a little worse.
        assert accountant.get_delta(epsilon) == pytest.approx(delta, rel=2e-3)
        assert delta_of_rho(rho, epsilon) <= accountant.get_delta(epsilon) * (1 + 1e-9)
        assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=2e-4)
        assert epsilon <= accountant.get_epsilon(delta) * (1 + 1e-9)


@settings(max_examples=100, **LENIENT)
@given(rhos, epsilons)
def test_the_gaussian_mechanism_is_within_delta_of_rho(rho, epsilon):
    """Its exact delta (Balle and Wang, 2018), at rho = 1 / (2 sigma**2)."""
    mu = math.sqrt(2 * rho)
    above, below = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    exact = -math.exp(above) * math.expm1(min(0.0, below - above))
    assert exact <= delta_of_rho(rho, epsilon)


def test_half_the_cost_of_the_gaussian_mechanism_is_convicted():
    """The check above can fail: rho = 1 / (4 sigma**2) is too little."""
    rho, epsilon = 0.5, 1.0
    exact = 0.5 * math.erfc(0.5 / math.sqrt(2)) - math.e * 0.5 * math.erfc(1.5 / math.sqrt(2))
    assert delta_of_rho(rho / 4, epsilon) < exact < delta_of_rho(rho, epsilon)


def test_nothing_costs_nothing():
    assert delta_of_rho(0.0, 1.0) == epsilon_of_rho(0.0, 0.0) == largest_rho(1.0, 0.0) == 0.0
    assert epsilon_of_rho(0.1, 0.0) == math.inf
    assert delta_of_rho(1e6, 1.0) == 1.0


# ---------------------------------------------------------------- the inverses


@settings(max_examples=40, **LENIENT)
@given(epsilons, deltas)
def test_largest_rho_is_rounded_down(epsilon, delta):
    rho = largest_rho(epsilon, delta)
    assert rho > 0
    assert least_delta(rho, epsilon) <= mpmath.mpf(delta)
    if epsilon > 1.01 * math.sqrt(rho):
        assert least_delta(rho * (1 + 1e-7), epsilon) > mpmath.mpf(delta)  # so it can fail


@settings(max_examples=40, **LENIENT)
@given(rhos, deltas)
def test_epsilon_of_rho_is_rounded_up(rho, delta):
    epsilon = epsilon_of_rho(rho, delta)
    assert least_delta(rho, epsilon) <= mpmath.mpf(delta)
    if epsilon > math.sqrt(rho):
        assert least_delta(rho, epsilon * (1 - 1e-9)) > mpmath.mpf(delta)


@settings(max_examples=40, **LENIENT)
@given(epsilons, deltas, st.floats(1.0001, 4.0))
def test_more_budget_buys_more(epsilon, delta, factor):
    rho = largest_rho(epsilon, delta)
    assert largest_rho(epsilon * factor, delta) > rho
    assert largest_rho(epsilon, min(0.5, delta * factor)) > rho
    assert delta_of_rho(rho * factor, epsilon) >= delta_of_rho(rho, epsilon)
    assert delta_of_rho(rho, epsilon * factor) <= delta_of_rho(rho, epsilon)
    assert epsilon_of_rho(rho * factor, delta) > epsilon_of_rho(rho, delta)
    assert epsilon_of_rho(rho, min(0.5, delta * factor)) < epsilon_of_rho(rho, delta)


# ---------------------------------------------------------------- stages


def fits_in_sum(epsilon, stages, stage, steps):
    """The sum of Theorem 2 in pure DP as rational numbers, from the definition."""
    return stages * Fraction(stage) + sum(map(Fraction, steps)) <= Fraction(epsilon)


def fits_in_zcdp(rho, stages, stage, steps):
    """The same in zCDP."""
    return stages * Fraction(stage) ** 2 / 8 + sum(map(Fraction, steps)) <= Fraction(rho)


SUMS = [(largest_stage_by_sum, fits_in_sum), (largest_stage_by_zcdp, fits_in_zcdp)]
stage_cases = st.tuples(
    logarithmic(1e-8, 30), st.integers(1, 300), st.lists(st.floats(1e-6, 0.3), max_size=3)
)


@pytest.mark.parametrize(("largest", "fits"), SUMS)
@settings(max_examples=300, **LENIENT)
@given(stage_cases)
def test_stages_never_exceed_the_budget_and_the_next_double_would(largest, fits, case):
    total, stages, shares = case
    steps = tuple(share * total for share in shares)
    stage = largest(total, stages, steps)
    assert stage > 0
    assert fits(total, stages, stage, steps)
    assert not fits(total, stages, math.nextafter(stage, math.inf), steps)


def test_sums_in_doubles_are_convicted():
    rng = np.random.default_rng(0)
    exceeded = {"pure": 0, "zCDP": 0}
    for total, share in rng.uniform(0.1, 1, size=(100, 2)).tolist():
        steps = (share * total / 10,)
        by_sum = (total - steps[0]) / 7
        by_rho = math.sqrt(8 * (total - steps[0]) / 7)
        exceeded["pure"] += not fits_in_sum(total, 7, by_sum, steps)
        exceeded["zCDP"] += not fits_in_zcdp(total, 7, by_rho, steps)
    assert min(exceeded.values()) > 10


@pytest.mark.parametrize("largest", [largest_stage_by_sum, largest_stage_by_zcdp])
def test_steps_beyond_the_budget_leave_nothing(largest):
    assert largest(1.0, 3, (0.6, 0.6)) == 0.0
    assert largest(1.0, 3, (2.0,)) == 0.0
    assert largest(1.0, 3, (1.0,)) == 0.0
    assert largest(0.0, 3) == 0.0


def test_few_stages_are_cheaper_in_pure_privacy_and_many_in_zcdp():
    rho = largest_rho(1.0, 1e-6)
    more = [largest_stage_by_zcdp(rho, d) > largest_stage_by_sum(1.0, d) for d in range(1, 41)]
    assert more == sorted(more)
    assert set(more) == {False, True}
