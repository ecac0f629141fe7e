"""One unit moves one model (docs/method.md, section 2), bit for bit, and other ways do not.

Two runs on neighbouring tables are coupled as in the proof of Proposition 1: rows in common draw
the same groups, units in common have the same key. Then the groups that changed are looked for.
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_limits

from tukeyreg.engines import MemoryEngine
from tukeyreg.grouping import even_partition, keyed_groups
from tukeyreg.intake import read_training
from tukeyreg.kernel import Columns
from tukeyreg.mechanisms.randomness import Draws, Randomness
from tukeyreg.summaries import groups as engine
from tukeyreg.summaries.groups import GroupSummaries
from tukeyreg.units import Units

LENIENT = {"deadline": None, "suppress_health_check": list(HealthCheck)}
SCALES = (1.0, 1e-9, 1e7, 1e150, 1e-150, 1e300)
KEY = bytes(range(32))


def summarise(X, y, groups, n_groups, *, intercept):
    return engine.summarise(Columns.of(X, y), groups, n_groups, intercept=intercept)


@dataclass(frozen=True)
class Table:
    X: np.ndarray
    y: np.ndarray
    units: np.ndarray
    n_groups: int
    intercept: bool

    def where(self, kept):
        return replace(self, X=self.X[kept], y=self.y[kept], units=self.units[kept])


def columns(rng, n, p):
    """Random columns; some are constant, binary, copies of another one, or nearly so."""
    X = rng.normal(size=(n, p))
    for j in range(p):
        kind = rng.integers(7)
        if kind == 0:
            X[:, j] = rng.integers(-1, 2)
        elif kind == 1:
            X[:, j] = X[:, rng.integers(p)]
        elif kind == 2:
            X[:, j] = X.sum(axis=1) * (1 + 1e-13 * rng.normal(size=n))
        elif kind == 3:
            X[:, j] = rng.integers(0, 2, n)
    return X


@st.composite
def tables(draw):
    """Tables of 1 to 8 columns, with units of one row or of many, and groups that stay empty."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, p = draw(st.integers(2, 150)), draw(st.integers(1, 8))
    dtype = draw(st.sampled_from([np.float64, np.float32]))
    scales = rng.choice(SCALES if dtype is np.float64 else (1.0, 1e-9, 1e7), p + 1)
    X = (columns(rng, n, p) * scales[:p]).astype(dtype)
    y = rng.normal(size=n) * scales[p]
    n_units = draw(st.sampled_from([2, 5, 40, n]))
    units = np.arange(n) if n_units == n else rng.integers(0, n_units, n)
    return Table(X, y, units, draw(st.sampled_from([2, 3, 8, 30])), draw(st.booleans()))


def quietly(summariser, table, groups):
    with np.errstate(all="ignore"):
        return summariser(table.X, table.y, groups, table.n_groups, intercept=table.intercept)


def parts(summaries):
    return [
        factor.tobytes() + target.tobytes()
        for factor, target in zip(summaries.factors, summaries.targets, strict=True)
    ]


def differing(before, after):
    pairs = zip(parts(before), parts(after), strict=True)
    return [i for i, (one, other) in enumerate(pairs) if one != other]


def chosen_unit(table, place):
    """The unit of the first, middle or last row."""
    return table.units[{"first": 0, "middle": len(table.units) // 2, "last": -1}[place]]


# ---------------------------------------------------------------- assignments of units to groups


def by_key(units, n_groups):
    names = units.astype(np.int64)
    return keyed_groups(Units(np.arange(len(names)), names), n_groups, Draws(KEY))


def by_draws(units, n_groups):
    """Rows as units: common rows keep their draws."""
    draws = Randomness(seed=4).below(n_groups, int(units.max()) + 1)
    return draws[units]


def by_turns(units, n_groups):
    """Not private under add-remove: units are dealt out in turn."""
    return np.unique(units, return_inverse=True)[1] % n_groups


ASSIGNMENTS = {"key": by_key, "draws": by_draws}


def moved_by_removal(table, unit, assign, summariser=summarise):
    """The group of a unit, and the groups that change when the unit is removed."""
    kept = table.units != unit
    without = table.where(kept)
    before = quietly(summariser, table, assign(table.units, table.n_groups))
    after = quietly(summariser, without, assign(without.units, table.n_groups))
    (group,) = set(assign(table.units, table.n_groups)[~kept].tolist())
    return group, differing(before, after)


def moved_by_replacement(table, unit, summariser=summarise):
    """The same when the rows of a unit are replaced by others, with an even partition."""
    positions = np.unique(table.units, return_inverse=True)[1]
    partition = even_partition(int(positions.max()) + 1, table.n_groups, Randomness(seed=5))
    groups, own = partition[positions], table.units == unit
    X, y = table.X.copy(), table.y.copy()
    X[own], y[own] = 2 - X[own], 1 - 3 * y[own]
    before = quietly(summariser, table, groups)
    after = quietly(summariser, replace(table, X=X, y=y), groups)
    (group,) = set(groups[own].tolist())
    return group, differing(before, after)


# ---------------------------------------------------------------- the property

PLACES = st.sampled_from(["first", "middle", "last"])


@pytest.mark.parametrize("assign", ASSIGNMENTS.values(), ids=ASSIGNMENTS)
@settings(max_examples=150, **LENIENT)
@given(tables(), PLACES)
def test_a_removed_or_added_unit_changes_one_group(assign, table, place):
    unit = chosen_unit(table, place)
    if (table.units == unit).all():
        return
    group, moved = moved_by_removal(table, unit, assign)
    assert moved in ([group], [])
    assert moved or not table.intercept  # a row of zeros leaves no trace; a one does


@settings(max_examples=150, **LENIENT)
@given(tables(), PLACES)
def test_a_replaced_unit_changes_one_group(table, place):
    group, moved = moved_by_replacement(table, chosen_unit(table, place))
    assert moved in ([group], [])
    assert moved or not table.intercept


@settings(max_examples=150, **LENIENT)
@given(tables())
def test_a_group_is_summarised_as_if_it_were_alone(table):
    groups = by_draws(np.arange(len(table.y)), table.n_groups)
    together = quietly(summarise, table, groups)
    for group in np.unique(groups).tolist():
        own = groups == group
        alone = quietly(summarise, replace(table.where(own), n_groups=1), 0 * groups[own])
        assert parts(alone) == [parts(together)[group]]


@settings(max_examples=80, **LENIENT)
@given(tables(), st.integers(0, 2**20))
def test_neither_place_in_memory_nor_rows_between_matter(table, seed):
    rng = np.random.default_rng(seed)
    groups = by_draws(np.arange(len(table.y)), table.n_groups)
    expected = parts(quietly(summarise, table, groups))
    wide = np.full((2 * len(table.y) + 1, table.X.shape[1] + 3), 7, dtype=table.X.dtype)
    wide[1::2, 2:-1] = table.X
    for X in (np.asfortranarray(table.X), wide[1::2, 2:-1]):
        assert parts(quietly(summarise, replace(table, X=X), groups)) == expected
    # Other groups are shuffled among each other; within a group the order stays.
    order = np.argsort(rng.permutation(table.n_groups)[groups], kind="stable")
    assert parts(quietly(summarise, table.where(order), groups[order])) == expected


def test_groups_without_rows_stay_zero():
    table = Table(np.ones((4, 2)), np.ones(4), np.arange(4), 6, True)
    summaries = summarise(table.X, table.y, np.array([1, 1, 4, 4]), 6, intercept=True)
    used = [bool(factor.any()) for factor in summaries.factors]
    assert used == [False, True, False, False, True, False]


# ---------------------------------------------------------------- threads


def wide_table(n, p, n_groups):
    rng = np.random.default_rng([n, p])
    return Table(rng.normal(size=(n, p)), rng.normal(size=n), np.arange(n), n_groups, True)


SMALL = [(4000, 5, 20), (3000, 30, 40), (20_000, 8, 3)]
LARGE = [(16_000, 25, 2), (2000, 120, 2)]


@pytest.mark.parametrize("size", SMALL)
def test_the_number_of_threads_does_not_matter_for_groups_of_ordinary_size(size):
    table = wide_table(*size)
    groups = by_key(table.units, table.n_groups)
    found = []
    for threads in (1, 2):
        with threadpool_limits(threads, user_api="blas"):
            found.append(parts(quietly(summarise, table, groups)))
    assert found[0] == found[1]


@pytest.mark.parametrize("size", [SMALL[0], *LARGE])
@pytest.mark.parametrize("threads", [1, 2])
def test_one_group_changes_under_any_number_of_threads(size, threads):
    """Threads may split the rows of a large block: also then by its own shape alone."""
    table = wide_table(*size)
    with threadpool_limits(threads, user_api="blas"):
        for unit in (0, len(table.y) // 2):
            group, moved = moved_by_removal(table, unit, by_key)
            assert moved == [group]


@settings(max_examples=25, **LENIENT)
@given(tables(), PLACES, st.sampled_from(list(ASSIGNMENTS.values())))
def test_random_tables_with_two_threads(table, place, assign):
    unit = chosen_unit(table, place)
    if (table.units == unit).all():
        return
    with threadpool_limits(2, user_api="blas"):
        group, moved = moved_by_removal(table, unit, assign)
    assert moved in ([group], [])


# ---------------------------------------------------------------- what the check convicts


def centred_first(X, y, groups, n_groups, *, intercept):
    return summarise(X - X.mean(axis=0), y - y.mean(), groups, n_groups, intercept=intercept)


def scaled_first(X, y, groups, n_groups, *, intercept):
    return summarise(X / np.abs(X).max(axis=0), y, groups, n_groups, intercept=intercept)


def by_running_sums(X, y, groups, n_groups, *, intercept):
    """Moments of each group as differences of cumulative sums over all groups."""
    order = np.argsort(groups, kind="stable")
    rows = np.column_stack([np.ones(len(y)), X, y])[order]
    sums = np.cumsum(rows[:, :, None] * rows[:, None, :], axis=0)
    sums = np.concatenate([np.zeros_like(sums[:1]), sums])
    ends = np.cumsum(np.bincount(groups, minlength=n_groups))
    moments = np.diff(sums[np.concatenate([[0], ends])], axis=0)
    return GroupSummaries(moments[:, :-1, :-1], moments[:, :-1, -1])


def by_chunks(X, y, groups, n_groups, *, intercept):
    """Moments added up over chunks of rows, cut wherever they happen to lie."""
    rows = np.column_stack([np.ones(len(y)), X, y])
    moments = np.zeros((n_groups, rows.shape[1], rows.shape[1]))
    for chunk in range(0, len(y), 64):
        for group in range(n_groups):
            own = rows[chunk : chunk + 64][groups[chunk : chunk + 64] == group]
            moments[group] += own.T @ own
    return GroupSummaries(moments[:, :-1, :-1], moments[:, :-1, -1])


@pytest.mark.parametrize("broken", [centred_first, scaled_first, by_running_sums, by_chunks])
def test_summaries_that_look_across_groups_are_convicted(broken):
    table = wide_table(1200, 3, 8)
    extreme = int(np.abs(table.X[:, 0]).argmax())
    for unit in (0, extreme):
        table.X[unit] *= 50
        assert len(moved_by_removal(table, unit, by_key)[1]) == 1
    convicted = [len(moved_by_removal(table, u, by_key, broken)[1]) > 1 for u in (0, extreme)]
    assert any(convicted)


def test_units_dealt_out_in_turn_are_convicted():
    table = wide_table(100, 3, 8)
    assert len(moved_by_removal(table, 99, by_turns)[1]) == 1
    assert len(moved_by_removal(table, 50, by_turns)[1]) == 8


# ---------------------------------------------------------------- keyed groups


def grouped(names, n_groups, key):
    return keyed_groups(Units(np.arange(len(names)), names), n_groups, Draws(key))


@given(
    st.sets(st.binary(max_size=20), min_size=1, max_size=30),
    st.sets(st.binary(max_size=20), max_size=30),
    st.integers(1, 2**20),
    st.binary(min_size=32, max_size=32),
)
def test_the_group_of_a_unit_does_not_depend_on_other_units(units, others, n_groups, key):
    everyone = sorted(units | others)
    groups = dict(zip(everyone, grouped(everyone, n_groups, key).tolist(), strict=True))
    assert all(0 <= group < n_groups for group in groups.values())
    alone = {unit: int(grouped([unit], n_groups, key)[0]) for unit in units}
    assert alone == {unit: groups[unit] for unit in units}


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(1, 2**20))
def test_integers_have_the_groups_of_their_digits(identifiers, n_groups):
    names = np.array(identifiers, dtype=np.int64)
    spelled = [b"i%d" % identifier for identifier in identifiers]
    assert grouped(names, n_groups, KEY).tolist() == grouped(spelled, n_groups, KEY).tolist()


def test_keys_change_the_groups():
    names = [b"%d" % i for i in range(400)]
    first, second = (grouped(names, 100, key) for key in (KEY, KEY[::-1]))
    assert np.mean(first == second) < 0.05
    assert len(set(first.tolist())) > 90


# ---------------------------------------------------------------- intake, grouping, summaries


def people(seed, *, n=300, n_units=60):
    """A frame with missing values, undeclared levels, and units with and without valid rows."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 70, n),
            "dose": rng.lognormal(sigma=3, size=n),
            "region": rng.choice(["north", "south", "west"], n, p=[0.5, 0.4, 0.1]),
            "outcome": rng.normal(size=n),
            "person": [f"p{u}" for u in rng.integers(0, n_units, n)],
        }
    )
    frame.loc[rng.random(n) < 0.05, "dose"] = np.nan
    frame.loc[rng.random(n) < 0.03, "outcome"] = np.inf
    frame.loc[rng.random(n) < 0.03, "person"] = None
    return frame


def pipeline(frame, neighboring, n_groups=25, *, unit="person", randomness=None):
    rows = read_training(
        frame, "outcome", categories={"region": ["north", "south"]}, privacy_unit=unit
    )
    engine = MemoryEngine(rows, randomness or Randomness(seed=11))
    with np.errstate(all="ignore"):
        return rows, engine.summaries(n_groups, neighboring, intercept=True)


@pytest.mark.parametrize("seed", range(3))
def test_a_person_who_leaves_changes_one_group(seed):
    frame = people(seed)
    rows, before = pipeline(frame, "add-remove")
    valid = set(rows.units.keys)
    for person in sorted(set(frame["person"].dropna())):
        without = frame[frame["person"] != person]
        moved = differing(before, pipeline(without, "add-remove")[1])
        assert len(moved) == (b"s" + person.encode() in valid)


def test_the_only_person_with_missing_values_changes_one_group():
    frame = people(0)
    frame = frame[np.isfinite(frame[["dose", "outcome"]]).all(axis=1) & (frame["region"] != "west")]
    frame = frame[frame["person"].notna()].reset_index(drop=True)
    frame.loc[frame["person"] == "p1", "dose"] = np.nan
    frame.loc[len(frame)] = [30, 1.0, "north", 0.5, "p1"]
    without = frame[frame["person"] != "p1"]
    runs = [pipeline(table, "add-remove") for table in (frame, without)]
    assert [bool(rows.kept.all()) for rows, _ in runs] == [False, True]
    assert len(differing(*(summaries for _, summaries in runs))) == 1


@pytest.mark.parametrize("seed", range(3))
def test_a_person_who_is_replaced_changes_one_group(seed):
    frame = people(seed)
    frame["person"] = frame["person"].fillna("p0")
    rows, before = pipeline(frame, "replace-one")
    rng = np.random.default_rng(seed)
    for number, person in enumerate(sorted(set(frame["person"]))):
        other, own = frame.copy(), frame["person"] == person
        other.loc[own, "outcome"] = rng.normal(size=own.sum())
        other.loc[own, "dose"] = np.nan if number % 3 == 0 else 1.0
        other.loc[own, "person"] = "somebody new"
        other_rows, after = pipeline(other, "replace-one")
        used = rows.kept[own].any() or other_rows.kept[own].any()
        assert len(differing(before, after)) == used


def test_a_replaced_row_changes_one_group():
    frame = people(1).drop(columns="person")
    before = pipeline(frame, "replace-one", unit=None)[1]
    valid = pipeline(frame, "replace-one", unit=None)[0].kept
    for row in range(0, len(frame), 9):
        other = frame.copy()
        other.loc[row, "outcome"] = np.nan if row % 2 else 17.0
        moved = differing(before, pipeline(other, "replace-one", unit=None)[1])
        assert len(moved) == (valid[row] or 0)


class GivenDraws(Randomness):
    """Rows in common draw the same groups."""

    def __init__(self, drawn):
        super().__init__(seed=0)
        self._drawn = drawn

    def draws(self):
        return GivenRows(self._drawn)


class GivenRows(Draws):
    def of_rows(self, bound, first, count):
        assert (first, count) == (0, len(self.key))
        return self.key.copy()


def test_a_row_that_leaves_changes_one_group():
    frame = people(2).drop(columns="person")
    everything = read_training(frame, "outcome", categories={"region": ["north", "south"]})
    drawn = np.random.default_rng(0).integers(0, 25, len(frame), dtype=np.int32)
    before = pipeline(frame, "add-remove", unit=None, randomness=GivenDraws(drawn))[1]
    for row in range(0, len(frame), 9):
        left = np.delete(drawn, row)
        after = pipeline(
            frame.drop(index=row), "add-remove", unit=None, randomness=GivenDraws(left)
        )[1]
        moved = differing(before, after)
        assert moved == ([drawn[row]] if everything.kept[row] else [])


def test_an_even_partition_of_valid_units_only_is_convicted():
    """Why all input units take part: a row that becomes invalid would move the others."""
    frame = people(1).drop(columns="person")
    other = frame.copy()
    row = int(np.flatnonzero(pipeline(frame, "replace-one", unit=None)[0].kept)[0])
    other.loc[row, "outcome"] = np.nan
    keys, found = np.random.default_rng(0).random(len(frame)), []
    for table in (frame, other):
        rows = read_training(table, "outcome", categories={"region": ["north", "south"]})
        rank = np.argsort(np.argsort(keys[rows.kept]))
        with np.errstate(all="ignore"):
            found.append(summarise(rows.design, rows.target, rank % 25, 25, intercept=True))
    assert len(differing(*found)) > 1
