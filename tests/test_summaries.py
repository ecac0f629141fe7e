"""The numbers in the summaries: every group's model is the least-squares fit of its own rows."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tukeyreg.datasets import load_california
from tukeyreg.kernel import Columns
from tukeyreg.summaries import groups as engine
from tukeyreg.summaries.groups import GroupSummaries

LENIENT = {"deadline": None, "suppress_health_check": list(HealthCheck)}
CLOSE = 1e-8


def summarise(X, y, groups, n_groups, *, intercept):
    return engine.summarise(Columns.of(X, y), groups, n_groups, intercept=intercept)


def with_ones(X, intercept):
    return np.column_stack([np.ones(len(X)), X]) if intercept else np.asarray(X, dtype=float)


def householder(design, y):
    """Least squares by Householder QR in extended precision, columns equilibrated; full rank."""
    A = np.column_stack([design, y]).astype(np.longdouble)
    scale = np.abs(A).max(axis=0)
    A /= scale
    d = design.shape[1]
    for j in range(d):
        v = A[j:, j].copy()
        v[0] += np.copysign(np.sqrt((v**2).sum()), v[0])
        A[j:] -= np.outer(v, 2 * (v @ A[j:]) / (v @ v))
    beta = np.zeros(d, dtype=np.longdouble)
    for j in range(d - 1, -1, -1):
        beta[j] = (A[j, d] - A[j, j + 1 : d] @ beta[j + 1 :]) / A[j, j]
    return beta * scale[-1] / scale[:d]


def minimum_norm(design, y):
    """Least squares of any rank; its predictions are those of every least-squares fit."""
    scale = np.abs(design).max(axis=0)
    scale[scale == 0] = 1.0
    return np.linalg.lstsq(design / scale, y, rcond=1e-11)[0] / scale


def worst_prediction(models, X, y, groups, *, intercept, reference):
    """Largest difference from the reference's predictions, relative to the largest label."""
    worst = 0.0
    for group in np.unique(groups).tolist():
        own = groups == group
        design = with_ones(X[own], intercept)
        expected = design @ reference(design, y[own])
        largest = np.abs(y[own]).max()
        worst = max(worst, float(np.abs(design @ models[group] - expected).max() / largest))
    return worst


def fit(X, y, groups, n_groups, *, intercept):
    return summarise(X, y, groups, n_groups, intercept=intercept).models()


# ---------------------------------------------------------------- against references


def california(n_groups):
    data = load_california()
    valid = np.isfinite(data.X).all(axis=1)
    groups = np.random.default_rng(0).integers(0, n_groups, valid.sum())
    return data.X[valid], data.y[valid], groups


@pytest.mark.parametrize("n_groups", [4, 100, 500])
def test_california_in_raw_columns(n_groups):
    X, y, groups = california(n_groups)
    models = fit(X, y, groups, n_groups, intercept=True)
    assert worst_prediction(models, X, y, groups, intercept=True, reference=householder) < CLOSE


def test_the_two_references_agree():
    X, y, groups = california(100)
    designs = [with_ones(X[groups == group], True) for group in range(100)]
    models = np.array([minimum_norm(x, y[groups == g]) for g, x in enumerate(designs)])
    assert worst_prediction(models, X, y, groups, intercept=True, reference=householder) < CLOSE


def scales_side_by_side():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(600, 3)) * [1e12, 1e-9, 1.0] + [3e12, 2e-9, 0.0]
    y = X @ [1e-12, 1e9, 2.0] + rng.normal(size=600)
    return X, y, np.arange(600) % 12


def test_columns_of_very_different_size():
    X, y, groups = scales_side_by_side()
    models = fit(X, y, groups, 12, intercept=True)
    assert worst_prediction(models, X, y, groups, intercept=True, reference=householder) < CLOSE


def columns_with_an_offset():
    rng = np.random.default_rng(2)
    X = rng.normal(loc=[0.0, 1e7, 3e7], size=(600, 3))
    return X, X @ [1.0, 2.0, 3.0] + rng.normal(size=600), np.arange(600) % 12


def test_columns_with_an_offset():
    X, y, groups = columns_with_an_offset()
    models = fit(X, y, groups, 12, intercept=True)
    assert worst_prediction(models, X, y, groups, intercept=True, reference=householder) < CLOSE


def by_plain_lstsq(design, y):
    return np.linalg.lstsq(design, y, rcond=None)[0]


def by_normal_equations(design, y):
    return np.linalg.solve(design.T @ design, design.T @ y)


@pytest.mark.parametrize(
    ("case", "solver"),
    [
        (scales_side_by_side, by_plain_lstsq),
        (columns_with_an_offset, by_normal_equations),
    ],
)
def test_worse_solvers_are_convicted(case, solver):
    X, y, groups = case()
    designs = [(with_ones(X[groups == g], True), y[groups == g]) for g in range(groups.max() + 1)]
    models = np.array([solver(*own) for own in designs])
    assert worst_prediction(models, X, y, groups, intercept=True, reference=householder) > CLOSE


@st.composite
def tables(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows, p = draw(st.integers(12, 60)), draw(st.integers(1, 8))
    n_groups = draw(st.integers(1, 6))
    X = rng.normal(size=(rows * n_groups, p)) * 10.0 ** rng.integers(-120, 120, p)
    y = rng.normal(size=len(X)) * 10.0 ** draw(st.integers(-120, 120))
    return X, y, rng.permutation(len(X)) % n_groups, n_groups, draw(st.booleans())


@settings(max_examples=100, **LENIENT)
@given(tables())
def test_random_tables_of_any_scale(table):
    X, y, groups, n_groups, intercept = table
    models = fit(X, y, groups, n_groups, intercept=intercept)
    found = worst_prediction(models, X, y, groups, intercept=intercept, reference=householder)
    assert found < CLOSE


@settings(max_examples=60, **LENIENT)
@given(tables())
def test_factor_times_coefficients_is_the_target(table):
    X, y, groups, n_groups, intercept = table
    summaries = summarise(X, y, groups, n_groups, intercept=intercept)
    below = np.tril(np.ones(summaries.factors.shape[1:]), -1).astype(bool)
    assert not summaries.factors[:, below].any()
    product = np.einsum("mij,mj->mi", summaries.factors, summaries.models())
    lengths = np.sqrt(((y / np.abs(y).max()) ** 2).sum()) * np.abs(y).max()
    np.testing.assert_allclose(product / lengths, summaries.targets / lengths, atol=1e-10)


def test_single_precision_rows_are_summed_in_double():
    rng = np.random.default_rng(3)
    X = (1000 + rng.normal(size=(400, 4))).astype(np.float32)
    y = X.astype(float) @ [1.0, 2.0, 3.0, 4.0] + rng.normal(size=400)
    groups = np.arange(400) % 8
    models = fit(X, y, groups, 8, intercept=True)
    np.testing.assert_array_equal(models, fit(X.astype(float), y, groups, 8, intercept=True))
    assert worst_prediction(models, X, y, groups, intercept=True, reference=householder) < CLOSE


# ---------------------------------------------------------------- columns that say nothing


def test_all_levels_of_a_category_beside_an_intercept():
    rng = np.random.default_rng(4)
    level = rng.integers(0, 4, 900)
    X = np.column_stack([rng.normal(size=900), np.eye(4)[level]])
    y = X @ [7.0, 1.0, -2.0, 3.0, 0.5] + rng.normal(size=900)
    groups = np.arange(900) % 15
    models = fit(X, y, groups, 15, intercept=True)
    assert worst_prediction(models, X, y, groups, intercept=True, reference=minimum_norm) < CLOSE
    assert not models[:, 5].any()  # the last level is the reference level
    assert models[:, :5].all()


@pytest.mark.parametrize(
    "column", [np.zeros, np.ones, lambda n: np.full(n, 1e12), lambda n: np.full(n, -1e-9)]
)
def test_a_constant_column_is_aliased_with_the_intercept(column):
    rng = np.random.default_rng(5)
    X = np.column_stack([rng.normal(size=200), column(200)])
    y = 3 + 2 * X[:, 0] + rng.normal(size=200)
    groups = np.arange(200) % 5
    models = fit(X, y, groups, 5, intercept=True)
    assert models[:, 2].tolist() == [0.0] * 5
    alone = fit(X[:, :1], y, groups, 5, intercept=True)
    np.testing.assert_allclose(models[:, :2], alone, rtol=1e-10)


def test_of_two_equal_columns_the_second_is_zero():
    rng = np.random.default_rng(6)
    first = rng.normal(size=300) * 1e5
    X = np.column_stack([first, rng.normal(size=300), first, 3 * first])
    y = rng.normal(size=300)
    groups = np.arange(300) % 6
    models = fit(X, y, groups, 6, intercept=True)
    assert not models[:, 3:].any()
    assert models[:, :3].all()
    assert worst_prediction(models, X, y, groups, intercept=True, reference=minimum_norm) < CLOSE


def test_what_little_distinguishes_two_columns_is_used():
    """Far above rounding the tolerance does not alias."""
    rng = np.random.default_rng(7)
    first = rng.normal(size=400)
    X = np.column_stack([first, first + 1e-8 * rng.normal(size=400)])
    y = 1e8 * (X[:, 1] - X[:, 0]) + first
    models = fit(X, y, np.arange(400) % 4, 4, intercept=True)
    np.testing.assert_allclose(models[:, 2], 1e8, rtol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_groups_with_fewer_rows_than_columns_interpolate(rows):
    rng = np.random.default_rng(rows)
    X, y = rng.normal(size=(6 * rows, 5)), rng.normal(size=6 * rows)
    groups = np.arange(6 * rows) % 6
    models = fit(X, y, groups, 6, intercept=True)
    assert not models[:, rows:].any()
    predicted = np.sum(with_ones(X, True) * models[groups], axis=1)
    np.testing.assert_allclose(predicted, y, rtol=1e-8)


def test_groups_without_rows_vote_zero():
    rng = np.random.default_rng(8)
    groups = np.repeat([1, 3], 20)
    models = fit(rng.normal(size=(40, 2)), rng.normal(size=40), groups, 5, intercept=True)
    assert models.any(axis=1).tolist() == [False, True, False, True, False]


def test_a_table_without_rows_is_all_zeros():
    models = fit(np.zeros((0, 2)), np.zeros(0), np.zeros(0, dtype=int), 4, intercept=True)
    assert models.tolist() == [[0.0] * 3] * 4


# ---------------------------------------------------------------- extremes


@pytest.mark.parametrize("huge", [1e300, 1.7e308, 5e-324])
@pytest.mark.parametrize("where", ["X", "y"])
def test_overflow_stays_in_its_group(huge, where):
    rng = np.random.default_rng(9)
    X, y, groups = rng.normal(size=(200, 3)), rng.normal(size=200), np.arange(200) % 10
    expected = summarise(X, y, groups, 10, intercept=True)
    (X if where == "X" else y[:, None])[groups == 4] = huge * (1 - rng.random((20, 1)) / 2)
    found = summarise(X, y, groups, 10, intercept=True)
    others = np.arange(10) != 4
    np.testing.assert_array_equal(found.factors[others], expected.factors[others])
    np.testing.assert_array_equal(found.targets[others], expected.targets[others])
    np.testing.assert_array_equal(found.models()[others], expected.models()[others])
    assert np.isfinite(found.models()).all()


def test_huge_rows_among_ordinary_ones_make_no_warning():
    X = np.array([[1e300, 1.0], [-1e300, 2.0], [1.0, 3.0], [1e308, 4.0]])
    models = fit(X, np.array([1e308, -1e308, 0.0, 1.0]), np.zeros(4, dtype=int), 1, intercept=True)
    assert np.isfinite(models).all()


def test_the_input_is_not_changed():
    rng = np.random.default_rng(10)
    arrays = [rng.normal(size=(50, 3)) * 1e9, rng.normal(size=50), rng.integers(0, 4, 50)]
    kept = [array.copy() for array in arrays]
    for array in arrays:
        array.setflags(write=False)
    summaries = summarise(*arrays, 4, intercept=True)
    arrays += [summaries.factors, summaries.targets]
    kept += [summaries.factors.copy(), summaries.targets.copy()]
    summaries.models()
    for array, copy in zip(arrays, kept, strict=True):
        np.testing.assert_array_equal(array, copy)


# ---------------------------------------------------------------- triangles


def test_pivots_below_the_tolerance_are_exactly_zero():
    triangle = np.array([[[1.0, 2.0, 0.0], [0.0, 1e-13, 1.0], [0.0, 0.0, 1.0]]])
    summaries = GroupSummaries.of_triangles(triangle)
    assert summaries.factors.tolist() == [[[1.0, 2.0], [0.0, 0.0]]]
    assert summaries.models().tolist() == [[0.0, 0.0]]
    assert triangle[0, 1, 1] == 1e-13


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_triangles_that_are_not_finite_give_finite_models(bad):
    triangles = np.broadcast_to(np.triu(np.ones((3, 3))), (9, 3, 3)).copy()
    for at, place in enumerate(zip(*np.triu_indices(3), strict=True)):
        triangles[at][place] = bad
    models = GroupSummaries.of_triangles(triangles).models()
    assert np.isfinite(models).all()
    np.testing.assert_array_equal(models[6:], [[0.0, 1.0]] * 3)


def test_summaries_do_not_show_private_numbers():
    summaries = summarise(np.full((6, 1), 12345.0), np.ones(6), np.zeros(6, int), 1, intercept=True)
    assert "12345" not in repr(summaries)
    assert "array" not in repr(summaries)
