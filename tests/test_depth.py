"""Volumes by depth: against fractions and grid cells, with certified bounds of their rounding."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tukeyreg.mechanisms.depth import UNIT, Scaled, Sides, exponentials, halving_table
from verify_cases import LAYOUTS, SCALES

LENIENT = {"deadline": None, "suppress_health_check": list(HealthCheck)}
ENOUGH_BITS = 16_384
RATES = (1e-6, 0.01, 0.5493, 1.0, 7.3)


def fraction(ball):
    assert ball.is_exact()
    mantissa, exponent = ball.man_exp()
    return Fraction(int(mantissa)) * Fraction(2) ** int(exponent)


def unscaled(scaled):
    """Scaled numbers as fractions."""
    pairs = zip(scaled.mantissa.ravel().tolist(), scaled.exponent.ravel().tolist(), strict=True)
    return [Fraction(x) * Fraction(2) ** e if x else Fraction(0) for x, e in pairs]


def within(found, exact, relative_error):
    return all(
        abs(f - e) <= Fraction(relative_error) * e for f, e in zip(found, exact, strict=True)
    )


@st.composite
def models(draw, max_models=12):
    m, d = draw(st.integers(2, max_models)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    layout, scale = draw(st.sampled_from(LAYOUTS)), draw(st.sampled_from(SCALES))
    with np.errstate(over="ignore"):
        array = np.clip(scale * layout(rng, m, d), -(2.0**1000), 2.0**1000)
    return np.array([rng.permutation(column) for column in array.T]).T


def corners(array, depth):
    """Sides of {u >= depth} as fractions, from the definition."""
    m = len(array)
    columns = [sorted(map(Fraction, column)) for column in array.T.tolist()]
    return [(c[depth - 1], c[m - depth]) for c in columns]


def volume(array, depth):
    if 2 * depth > len(array):
        return Fraction(0)
    return math.prod(high - low for low, high in corners(array, depth))


def cells(array, depth):
    """The partition of {u = depth} by its first dimension of exactly that depth, and the side."""
    m, d = array.shape
    here = corners(array, depth)
    middle = [((a + b) / 2,) * 2 for a, b in here]
    inner = corners(array, depth + 1) if 2 * depth + 1 <= m else middle
    found = []
    for j in range(d):
        if 2 * depth == m:  # the deepest region of an even set is one cell
            found += [math.prod(b - a for a, b in here) if j == 0 else Fraction(0), Fraction(0)]
            continue
        rest = math.prod(b - a for a, b in inner[:j]) * math.prod(b - a for a, b in here[j + 1 :])
        found += [rest * (inner[j][0] - here[j][0]), rest * (here[j][1] - inner[j][1])]
    return found


# ---------------------------------------------------------------- values


@settings(max_examples=250, **LENIENT)
@given(models())
def test_volumes_within_their_certified_bound(array):
    sides = Sides.of(array)
    exact = [volume(array, p) for p in range(1, sides.deepest + 1)]
    assert within(unscaled(sides.volume), exact, 2 * sides.dimensions * UNIT)


@settings(max_examples=250, **LENIENT)
@given(models())
def test_cells_within_their_certified_bound(array):
    sides = Sides.of(array)
    exact = [c for p in range(1, sides.deepest + 1) for c in cells(array, p)]
    assert within(unscaled(sides.cells), exact, 2 * (sides.dimensions + 1) * UNIT)


@settings(max_examples=120, **LENIENT)
@given(models(max_models=8))
def test_exact_volumes_and_cells_are_exact(array):
    sides = Sides.of(array)
    with ctx.workprec(ENOUGH_BITS):
        for depth in range(1, sides.deepest + 1):
            assert fraction(sides.exact_volume(depth)) == volume(array, depth)
            assert list(map(fraction, sides.exact_cells(depth))) == cells(array, depth)
        assert fraction(sides.exact_volume(sides.deepest + 1)) == 0


@settings(max_examples=120, **LENIENT)
@given(models())
def test_cells_of_a_depth_add_up_to_its_volume(array):
    for depth in range(1, len(array) // 2 + 1):
        assert sum(cells(array, depth)) == volume(array, depth) - volume(array, depth + 1)
        assert min(cells(array, depth)) >= 0


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("m", [2, 5, 6, 9])
def test_cells_against_grid_cells(m, d):
    """Every cell of the grid through all coordinates is classified by counting at its middle."""
    rng = np.random.default_rng([m, d])
    array = rng.integers(-9, 10, (m, d)).astype(float)
    deepest = m // 2
    expected = np.zeros((deepest, d, 2))
    edges = [list(itertools.pairwise(np.unique(column).tolist())) for column in array.T]
    for cell in itertools.product(*edges):
        point = np.array([(low + high) / 2 for low, high in cell])
        below, above = (array <= point).sum(axis=0), (array >= point).sum(axis=0)
        depths = np.minimum(below, above)
        p = depths.min()
        j = int(np.argmax(depths == p))
        side = 0 if below[j] <= above[j] else 1
        expected[p - 1, j, side] += math.prod(high - low for low, high in cell)
    sides = Sides.of(array)
    found = np.ldexp(sides.cells.mantissa, np.maximum(sides.cells.exponent, -1000).astype(int))
    np.testing.assert_allclose(found, expected, rtol=1e-13)
    with ctx.workprec(ENOUGH_BITS):
        exact = [float(c) for p in range(deepest) for c in sides.exact_cells(p + 1)]
    assert exact == expected.ravel().tolist()


@settings(**LENIENT)
@given(models())
def test_bounds_are_order_statistics(array):
    sides = Sides.of(array)
    for depth in range(1, sides.deepest + 1):
        low, high = sides.bounds(depth)
        assert [(Fraction(a), Fraction(b)) for a, b in zip(low, high, strict=True)] == corners(
            array, depth
        )


def test_models_are_not_changed():
    array = np.random.default_rng(0).normal(size=(7, 2))
    kept = array.copy()
    sides = Sides.of(array)
    assert sides.cells.mantissa.size == 3 * 2 * 2
    assert np.array_equal(array, kept)


# ---------------------------------------------------------------- arithmetic

doubles = st.floats(0, 1e308)


@settings(max_examples=300, **LENIENT)
@given(st.lists(doubles, min_size=1, max_size=6), st.lists(doubles, min_size=6, max_size=6))
@example([5e-324, 0.0, 2.0**-1001, 1.0], [0.0, 0.0, 0.0, 2.0**-1001, 0.0, 0.0])
def test_scaled_operations_round_once(first, second):
    second = second[: len(first)]
    a, b = Scaled.of(np.array(first)), Scaled.of(np.array(second))
    assert unscaled(a) == list(map(Fraction, first))
    products = [Fraction(x) * Fraction(y) for x, y in zip(first, second, strict=True)]
    assert within(unscaled(a * b), products, UNIT / 2)
    sums = [Fraction(x) + Fraction(y) for x, y in zip(first, second, strict=True)]
    assert within(unscaled(a + b), sums, UNIT / 2 + 2.0**-900)


def test_zero_never_sets_the_scale():
    tiny = Scaled.of(np.array([0.0, 2.0**-1060, 2.0**-1061]))
    assert tiny.relative().tolist() == [0.0, 0.5, 0.25]
    for zero in (tiny[:1], tiny[:1] * tiny[1:2], tiny[:1] + tiny[:1]):
        assert zero.exponent.dtype == np.int64
        assert unscaled(zero + tiny[1:2]) == [Fraction(2) ** -1060]


@settings(**LENIENT)
@given(st.lists(st.tuples(doubles, st.integers(-4000, 4000)), min_size=1, max_size=6))
def test_relative_is_exact_but_for_what_is_negligible(pairs):
    values, powers = zip(*pairs, strict=True)
    scaled = Scaled.of(np.array(values)) * Scaled(
        np.full(len(values), 0.5), np.array(powers, dtype=np.int64)
    )
    exact = unscaled(scaled)
    largest = max(exact)
    if largest == 0:
        return
    relative = [Fraction(x) for x in scaled.relative().tolist()]
    factor = next(r / e for r, e in zip(relative, exact, strict=True) if e == largest)
    assert Fraction(1, 2) <= max(relative) < 1
    for r, e in zip(relative, exact, strict=True):
        assert r == e * factor or (r == 0 and e < largest * Fraction(2) ** -900)


@pytest.mark.parametrize("rate", RATES)
def test_exponentials_within_their_certified_bound(rate):
    table = exponentials(rate, 900)
    with ctx.workprec(256):
        for k in (0, 1, 2, 77, 899, 900):
            exact = (arb(rate) * k / 2).exp()
            found = arb(float(table.mantissa[k])) * arb(2) ** int(table.exponent[k])
            assert abs(found / exact - 1) < 2 * UNIT


@pytest.mark.parametrize("rate", RATES)
def test_halving_table_within_its_certified_bound(rate):
    table = halving_table(rate, 900)
    with ctx.workprec(256):
        for k, found in enumerate(table.tolist()):
            exact = (-arb(rate) * k / 2).exp()
            if found == 0:
                assert exact < arb(2) ** -999
            else:
                assert abs(arb(found) / exact - 1) < 2 * UNIT
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 2.0
