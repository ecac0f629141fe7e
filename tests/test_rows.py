"""Rows as integers: one unit moves a sum by what its own rows are worth, bit for bit."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tukeyreg.summaries import rows as kernel
from tukeyreg.summaries.rows import REACH, RowMap, UnitRows

LENIENT = {"deadline": None, "max_examples": 60}
WILD = [0.0, -0.0, 1.0, -1.0, 1e-310, 1e300, -1e308, 1.7e308, 12.0, 1e-5, -3e7]


def some_rows(n, p, seed, units=None, kind=np.float64, wild=True):
    rng = np.random.default_rng(seed)
    X, y = rng.normal(size=(n, p)), rng.normal(size=n)
    if wild:
        for values in (X, y):
            at = rng.random(values.shape) < 0.2
            values[at] = rng.choice(WILD, at.sum())
    with np.errstate(over="ignore"):
        X = np.nan_to_num(X.astype(kind), posinf=1e38, neginf=-1e38)
    codes = None if units is None else np.unique(rng.integers(0, units, n), return_inverse=True)[1]
    return UnitRows(X, y, codes, n if codes is None else int(codes.max()) + 1)


def some_map(p, seed, intercept=True):
    rng = np.random.default_rng(seed)
    d = p + int(intercept)
    plain = RowMap(
        rng.normal(size=p) * 10.0 ** rng.integers(-3, 3, p),
        10.0 ** rng.uniform(-3, 3, p),
        float(rng.normal()),
        10.0 ** rng.uniform(-2, 2),
        intercept,
    )
    matrix = rng.normal(size=(d, d)) + np.eye(d)
    return RowMap(**{**plain.whitened(matrix).__dict__, "radius": float(rng.uniform(0.3, 9))})


def of_unit(rows, unit):
    chosen = np.zeros(rows.n_units, dtype=bool)
    chosen[unit] = True
    return rows.of_units(chosen), rows.of_units(~chosen)


cases = st.tuples(
    st.integers(2, 40),  # rows
    st.integers(1, 5),  # features
    st.integers(0, 2**20),  # seed
    st.sampled_from([None, 1, 3, 12]),  # units
    st.sampled_from([np.float64, np.float32]),
    st.booleans(),  # intercept
)


def model_of(map, seed):
    return np.random.default_rng(seed).normal(size=map.width) * 3


@settings(**LENIENT)
@given(cases, st.floats(0, 1, exclude_max=True), st.sampled_from([1.0, 1e-9, 1e9, 1e15, 1e300]))
def test_sums_without_a_unit_differ_by_that_unit_and_nothing_else(case, where, size):
    n, p, seed, units, kind, intercept = case
    rows, map = some_rows(n, p, seed, units, kind), some_map(p, seed, intercept)
    model = model_of(map, seed) * size
    one, others = of_unit(rows, int(where * rows.n_units))
    assert np.array_equal(
        map.shrunk(rows).gram(), map.shrunk(others).gram() + map.shrunk(one).gram()
    )
    gradients = [map.shrunk(part).gradient(model, 1.5) for part in (rows, others, one)]
    assert np.array_equal(gradients[0], gradients[1] + gradients[2])
    for vote in (map.norms, lambda part: map.shrunk(part).residuals(model)):
        kept = np.delete(vote(rows), int(where * rows.n_units))
        assert kept.tobytes() == vote(others).tobytes()


@settings(**LENIENT)
@given(cases)
def test_no_unit_is_worth_more_than_the_radius_allows(case):
    n, p, seed, units, kind, intercept = case
    rows, map = some_rows(n, p, seed, units, kind), some_map(p, seed, intercept)
    model = model_of(map, seed)
    norm = map.radius * 2.0**map.grid_bits
    for unit in range(rows.n_units):
        one, _ = of_unit(rows, unit)
        gram = map.shrunk(one).gram().astype(object)
        assert sum(entry**2 for entry in gram.reshape(-1)) <= norm**4
        gradient = map.shrunk(one).gradient(model, 0.7).astype(object)
        assert sum(entry**2 for entry in gradient) <= (norm * 2**12) ** 2


def test_a_row_that_is_not_shrunk_is_caught(monkeypatch):
    rows, map = some_rows(30, 3, 0), some_map(3, 0)
    assert largest_norm(map, rows) <= map.radius * 2**map.grid_bits
    monkeypatch.setattr(kernel, "_norms", lambda vectors: np.zeros(vectors.shape[1]))
    with np.errstate(all="ignore"):
        assert largest_norm(map, rows) > map.radius * 2**map.grid_bits


def largest_norm(map, rows):
    shrunk, _ = map.shrunk(rows)._block(slice(0, len(rows.target)))
    return float(np.sqrt((shrunk**2).sum(axis=0)).max())


def test_rows_centred_by_their_own_mean_are_caught(monkeypatch):
    rows, map = some_rows(60, 3, 1, wild=False), some_map(3, 1)
    plain = RowMap.coordinates

    def centred(self, design):
        return plain(self, design - design.mean(axis=0))

    one, others = of_unit(rows, 7)
    assert np.array_equal(
        map.shrunk(rows).gram(), map.shrunk(others).gram() + map.shrunk(one).gram()
    )
    monkeypatch.setattr(RowMap, "coordinates", centred)
    assert not np.array_equal(
        map.shrunk(rows).gram(), map.shrunk(others).gram() + map.shrunk(one).gram()
    )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("units", [None, 9000])
def test_blocks_and_threads_do_not_matter(monkeypatch, threads, units):
    rows = some_rows(40_000, 4, 3, units)
    map = some_map(4, 3)
    model = model_of(map, 3)

    def everything():
        parts = map.shrunk(rows).gram(), map.shrunk(rows).gradient(model, 2.0), map.norms(rows)
        blocks = map.blocks(rows)
        kept = map.shrunk(rows, blocks)
        parts += kept.gram(), kept.gradient(model, 2.0), map.norms(rows, blocks)
        parts += map.shrunk(rows).residuals(model), kept.residuals(model)
        return [part.tobytes() for part in parts]

    monkeypatch.setattr(kernel, "_THREADS", threads)
    before, bits = everything(), map.grid_bits
    monkeypatch.setattr(kernel, "_BLOCK", 1000)
    assert map.grid_bits == bits
    assert everything() == before


def test_integers_stay_within_doubles_and_words():
    for radius in (0.1, 1.0, 30.0, 1000.0):
        map = RowMap(**{**some_map(3, 0).__dict__, "radius": radius})
        assert kernel._BLOCK * radius**2 * 4.0**map.grid_bits <= 2.0**53
        most = radius * 2.0 ** (map.grid_bits + kernel._RESIDUAL_BITS) * kernel.MOST_ROWS
        assert most < 2.0**63
        assert radius**2 * 4.0**map.grid_bits * kernel.MOST_ROWS < 2.0**63


def test_whitening_products_are_exact():
    rng = np.random.default_rng(0)
    for size in (1e-3, 1.0, 1e3):
        map = some_map(30, 0).whitened(rng.normal(size=(31, 31)) * size)
        bound = np.abs(map.whitening).sum(axis=1).max() * REACH * 2**kernel._FEATURE_BITS
        assert bound <= 2.0**53
        design = rng.normal(size=(50, 30))
        shuffled = rng.permutation(50)
        assert np.array_equal(
            map.coordinates(design)[:, shuffled], map.coordinates(design[shuffled])
        )


def test_the_sums_are_those_of_plain_arithmetic():
    rows = some_rows(500, 3, 5, wild=False)
    map = RowMap(**{**some_map(3, 5).__dict__, "radius": 1e3})
    z = np.clip((rows.design - map.location) / map.scale, -REACH, REACH)
    u = np.column_stack([np.ones(500), z]) @ map.matrix().T
    u *= np.minimum(1, 1e3 / np.linalg.norm(u, axis=1))[:, None]
    assert np.allclose(map.shrunk(rows).gram() * map.gram_step, u.T @ u, rtol=1e-2, atol=1)
    t = (rows.target - map.target_location) / map.target_scale
    model = np.array([0.1, -0.2, 0.3, 0.0])
    rest = np.clip(t - u @ model, -0.5, 0.5)
    assert np.allclose(
        map.shrunk(rows).gradient(model, 0.5) * map.gradient_step(0.5),
        u.T @ rest,
        atol=2,
    )


# ---------------------------------------------------------------- units


def test_a_unit_of_many_equal_rows_is_worth_one_row():
    one = UnitRows(np.array([[0.3, 5.0]]), np.array([2.0]), None, 1)
    codes = np.zeros(50, dtype=np.int64)
    many = UnitRows(np.tile(one.design, (50, 1)), np.tile(one.target, 50), codes, 1)
    map, model = some_map(2, 4), np.array([0.1, 0.2, 0.3])
    assert np.allclose(map.shrunk(many).gram(), map.shrunk(one).gram(), rtol=1e-3, atol=100)
    assert np.allclose(map.norms(many), map.norms(one))
    assert np.allclose(
        map.shrunk(many).residuals(model), map.shrunk(one).residuals(model), rtol=1e-3
    )


def test_medians_and_magnitudes_of_units():
    codes = np.array([1, 0, 1, 0, 1, 2])
    values = np.array([5.0, 2.0, 1.0, 4.0, -9.0, 3.0])
    rows = UnitRows(np.zeros((6, 1)), values, codes, 3)
    assert rows.medians(values).tolist() == [2.0, 1.0, 3.0]
    expected = [math.sqrt(10), math.sqrt(107 / 3), 3.0]
    assert np.allclose(rows.magnitudes(values), expected)
    plain = UnitRows(np.zeros((6, 1)), values, None, 6)
    assert plain.medians(values) is values
    assert plain.magnitudes(values).tolist() == np.abs(values).tolist()


def test_choosing_units_keeps_their_rows_in_order():
    rows = UnitRows(np.arange(6.0)[:, None], np.arange(6.0), np.array([1, 0, 1, 2, 0, 2]), 3)
    chosen = rows.of_units(np.array([True, False, True]))
    assert chosen.target.tolist() == [1.0, 3.0, 4.0, 5.0]
    assert chosen.codes.tolist() == [0, 1, 0, 1]
    assert chosen.n_units == 2
    assert rows.of_units(np.ones(3, dtype=bool)) is rows


@pytest.mark.parametrize("size", [1.0, 1e9, 1e15, 1e300])
def test_products_with_any_coefficients_are_exact(size):
    """However far the rounds went astray, no sum depends on the order of its terms."""
    map = some_map(30, 2)
    rows = some_rows(200, 30, 2)
    shrunk = map.shrunk(rows)
    integers, bits = map.integer_model(model_of(map, 2) * size)
    assert np.array_equal(integers, np.rint(integers))
    assert np.abs(integers).sum() * map.radius * 2**map.grid_bits <= 2.0**53
    vectors, _ = shrunk._block(slice(0, 200))
    backwards = integers[::-1] @ vectors[::-1]
    assert np.array_equal(integers @ vectors, backwards)
    assert (bits == 0) == (size > 1e6)
