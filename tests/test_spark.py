"""Spark: the same groups, summaries and sums as in memory, whatever happens to the tasks.

Most properties are checked on what tasks and the driver compute, without Spark between them, for
many small tables; and then once more through Spark, with small batches and workers that are killed.
"""

import importlib.util
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from decimal import Decimal
from functools import reduce
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tukeyreg import TukeyRegressor
from tukeyreg.engines import MemoryEngine, UnitDraws
from tukeyreg.engines import spark as engine
from tukeyreg.engines.spark import SparkEngine
from tukeyreg.errors import InvalidInput, MissingExtra, UndeclaredCategory
from tukeyreg.intake import read_training
from tukeyreg.kernel import Columns
from tukeyreg.mechanisms import moments
from tukeyreg.mechanisms.randomness import Draws, Randomness
from tukeyreg.privacy.budget import Budget
from tukeyreg.privacy.plan_moments import MomentsPlanner
from tukeyreg.summaries.groups import GroupSummaries, summarise

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("pyspark") is None, reason="PySpark is missing"),
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:pyspark"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
LENIENT = {"deadline": None, "suppress_health_check": list(HealthCheck)}
KEY = bytes(range(32))
BUDGET = Budget(3.0, 1e-5)


@pytest.fixture(scope="session")
def spark():
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("there is no Java, which Spark runs on")
    from pyspark import cloudpickle
    from pyspark.sql import SparkSession

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import tests
    os.environ["PYSPARK_PYTHON"] = sys.executable
    with tempfile.TemporaryDirectory() as folder:
        session = (
            SparkSession.builder.master("local[2, 4]")  # a task may fail three times
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.memory", "1g")
            .config("spark.sql.shuffle.partitions", "3")
            .config("spark.sql.unionOutputPartitioning", "false")
            .config("spark.sql.execution.arrow.maxRecordsPerBatch", "17")
            .config("spark.sql.warehouse.dir", f"{folder}/warehouse")
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()


# ---------------------------------------------------------------- tables


def table(n, p=3, seed=0, units=None, wild=False):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, p)) * 10.0 ** rng.integers(-2, 3, p) + rng.normal(size=p)
    y = X @ rng.normal(size=p) + rng.normal(size=n)
    if wild:
        X[rng.random(X.shape) < 0.05] = rng.choice([np.nan, np.inf, 1e300, -1e-300, 0.0])
    columns = {f"x{j}": X[:, j] for j in range(p)} | {"y": y}
    if units is not None:
        columns["who"] = rng.integers(0, units, n)
    return pa.table(columns)


def cut(whole, parts):
    """Parts of different sizes, one of them without rows."""
    ends = np.linspace(0, 1, parts) ** 1.5 * whole.num_rows
    ends = np.concatenate([[0, 0], ends[1:]]).astype(int)
    return [whole.slice(a, b - a) for a, b in pairwise(ends)]


def framed(spark, parts):
    """A frame with these partitions."""
    one = [spark.createDataFrame(part).coalesce(1) for part in parts if part.num_rows]
    return reduce(lambda a, b: a.union(b), one)


def of_spark(frame, unit=None, seed=1, features=None, categories=None):
    return SparkEngine(frame, "y", features, unit, categories, Randomness(seed))


def of_memory(whole, unit=None, seed=1, categories=None):
    rows = read_training(whole, "y", privacy_unit=unit, categories=categories)
    return MemoryEngine(rows, Randomness(seed))


def parts_of(summaries):
    return [
        factor.tobytes() + target.tobytes()
        for factor, target in zip(summaries.factors, summaries.targets, strict=True)
    ]


def differing(before, after):
    pairs = zip(parts_of(before), parts_of(after), strict=True)
    return [group for group, (one, other) in enumerate(pairs) if one != other]


def agree(one, other, X, y):
    """Whether predictions of every group's model agree to 1e-8 of the target's size."""
    design = np.column_stack([np.ones(len(X)), X])
    good = np.isfinite(design).all(axis=1)
    first, second = (design[good] @ summaries.models().T for summaries in (one, other))
    return np.allclose(first, second, rtol=1e-8, atol=1e-8 * np.abs(y).max())


# ---------------------------------------------------------------- without Spark between


@dataclass(frozen=True, repr=False)
class Coupled(Draws):
    """Common rows keep their draws, as in the proof of Proposition 1."""

    groups: tuple[Any, ...] = ()

    def of_rows(self, bound, first, count):
        return np.array(self.groups[self.part][first : first + count], dtype=np.int32)


def by_hand(
    parts,
    draws,
    n_groups,
    *,
    intercept=True,
    unit=None,
    rows=5,
    merge=engine._merge,
    reader=engine._Reader,
):
    """What Spark would bring together."""
    target = "y"
    schema = engine.intake.declare(parts[0].slice(0, 0), target, privacy_unit=unit)
    reader = reader(tuple(parts[0].column_names), target, schema, unit)
    shape = engine._Shape(n_groups, schema.n_design + 1 + int(intercept))
    answers = [
        answer
        for part, given in enumerate(parts)
        for answer in engine._summarise(
            reader, draws, shape, intercept, part, iter(given.to_batches(rows))
        )
    ]
    answers.sort(key=lambda answer: (answer.at, answer.part))
    triangles = np.zeros((n_groups, shape.width, shape.width))
    for _, same in groupby(answers, key=lambda answer: answer.at):
        merged = merge(shape, list(same))
        exponents, upper = shape.unpacked(merged.data)
        triangles[merged.at : merged.at + len(upper)] = shape.scaled(upper, exponents)
    with np.errstate(all="ignore"):
        return GroupSummaries.of_triangles(triangles)


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch):
    """So that small tables have several, as large ones do."""
    monkeypatch.setattr(engine, "_GROUP_BYTES", 1 << 11)


@settings(max_examples=60, **LENIENT)
@given(st.integers(0, 2**20), st.integers(2, 120), st.integers(1, 5), st.booleans(), st.booleans())
def test_a_removed_unit_changes_one_group(seed, n, n_parts, intercept, wild):
    whole = table(n, 1 + seed % 4, seed, units=max(2, n // 3), wild=wild)
    parts = cut(whole, n_parts + 1)
    who = whole["who"][seed % n].as_py()
    others = [part.filter(np.asarray(part["who"]) != who) for part in parts]
    draws = Draws(KEY)
    before, after = (
        by_hand(given, draws, 7, intercept=intercept, unit="who") for given in (parts, others)
    )
    assert differing(before, after) in ([int(draws.of_integers(7, np.array([who]))[0])], [])


@settings(max_examples=60, **LENIENT)
@given(st.integers(0, 2**20), st.integers(2, 120), st.integers(1, 5), st.booleans())
def test_a_removed_row_changes_one_group(seed, n, n_parts, wild):
    whole = table(n, 1 + seed % 4, seed, wild=wild)
    parts = cut(whole, n_parts + 1)
    groups = [
        np.random.default_rng(part).integers(0, 7, len(given)) for part, given in enumerate(parts)
    ]
    part = max(range(len(parts)), key=lambda at: len(parts[at]))
    kept = np.arange(len(parts[part])) != seed % len(parts[part])
    group = int(groups[part][~kept][0])
    before = by_hand(parts, Coupled(KEY, groups=tuple(groups)), 7)
    parts[part], groups[part] = parts[part].filter(kept), groups[part][kept]
    after = by_hand(parts, Coupled(KEY, groups=tuple(groups)), 7)
    assert differing(before, after) in ([group], [])


@settings(max_examples=40, **LENIENT)
@given(st.integers(0, 2**20), st.integers(2, 120), st.integers(1, 5))
def test_a_replaced_row_changes_one_group(seed, n, n_parts):
    whole = table(n, 1 + seed % 4, seed)
    parts = cut(whole, n_parts + 1)
    part = max(range(len(parts)), key=lambda at: len(parts[at]))
    at = seed % len(parts[part])
    before = by_hand(parts, Draws(KEY), 7)
    target = np.asarray(parts[part]["y"]).copy()
    target[at] = [1e9, np.nan, -3.0][seed % 3]
    parts[part] = parts[part].set_column(parts[part].column_names.index("y"), "y", pa.array(target))
    group = int(Draws(KEY, part).of_rows(7, at, 1)[0])
    assert differing(before, by_hand(parts, Draws(KEY), 7)) == [group]


def with_rows_of_zeros(shape, parts):
    """Broken: rows of zeros of groups that a partition does not have are brought in, too."""
    triangles = [shape.unpacked(part.data) for part in parts]
    used = [at for at, (_, upper) in enumerate(triangles) if upper.any()]
    scale = np.max([exponent for exponent, _ in triangles], axis=0)
    n = len(scale)
    state = engine.Triangles(n, shape.width - 1, intercept=False)
    for at in used:
        exponent, upper = triangles[at]
        rows = shape.scaled(upper, exponent - scale).reshape(-1, shape.width)
        groups = np.repeat(np.arange(n, dtype=np.int32), shape.width)
        engine.kernel.absorb(Columns.of(rows[:, :-1], rows[:, -1]), groups, state)
    engine.kernel.flush(state)
    state.exponent[:, : shape.width] += scale
    return engine._Answer(0, parts[0].at, b"", shape.packed(state, slice(0, n)))


@dataclass(frozen=True)
class Centred(engine._Reader):
    """Broken: features are measured from the mean of their partition."""

    def rows(self, batches):
        given = list(batches)
        whole = pa.Table.from_batches(given, given[0].schema if given else pa.schema([]))
        for at, name in enumerate(whole.column_names):
            if name.startswith("x"):
                values = np.asarray(whole[name])
                whole = whole.set_column(at, name, pa.array(values - values.mean()))
        return super().rows(iter(whole.to_batches()))


@pytest.mark.parametrize(
    "broken", [{"merge": with_rows_of_zeros}, {"reader": Centred}], ids=["merge", "task"]
)
def test_the_check_of_isolation_catches_broken_ones(broken):
    caught = 0
    for seed in range(10):
        whole = table(241, 3, seed, units=80)
        ends = [*range(0, 121, 10), *range(121, 242, 10)]
        parts = [whole.slice(a, b - a) for a, b in pairwise(ends)]
        who = whole["who"][120].as_py()
        others = [part.filter(np.asarray(part["who"]) != who) for part in parts]
        before, after = (
            by_hand(given, Draws(KEY), 7, unit="who", **broken) for given in (parts, others)
        )
        caught += len(differing(before, after)) > 1
    assert caught > 5


def test_the_check_of_isolation_catches_groups_by_turns():
    whole = table(90)
    parts = [whole.slice(0, 40), whole.slice(40)]
    without = [parts[0].slice(1), parts[1]]
    turns = [np.arange(len(part)) % 7 for part in parts]
    before = by_hand(parts, Coupled(KEY, groups=tuple(turns)), 7)
    after = by_hand(without, Coupled(KEY, groups=tuple(turns)), 7)
    assert len(differing(before, after)) > 1


@settings(max_examples=30, **LENIENT)
@given(st.integers(0, 2**20), st.integers(30, 200), st.integers(1, 5))
def test_where_batches_are_cut_does_not_matter(seed, n, n_parts):
    parts = cut(table(n, 3, seed, units=9, wild=True), n_parts + 1)
    results = [by_hand(parts, Draws(KEY), 5, unit="who", rows=rows) for rows in (3, 1000)]
    assert differing(*results) == []


def test_absurd_magnitudes_are_merged_as_they_are():
    whole = table(300, 2)
    X = np.column_stack([whole["x0"], whole["x1"]]) * [1e305, 1e-305]
    scaled = pa.table({"x0": X[:, 0], "x1": X[:, 1], "y": whole["y"]})
    parts = cut(scaled, 4)
    found = by_hand(parts, Draws(KEY), 3)
    groups = np.concatenate(
        [Draws(KEY, part).of_rows(3, 0, len(given)) for part, given in enumerate(parts)]
    )
    with np.errstate(all="ignore"):
        expected = summarise(Columns.of(X, np.asarray(whole["y"])), groups, 3, intercept=True)
    assert agree(found, expected, X, np.asarray(whole["y"]))


@pytest.mark.parametrize("intercept", [True, False])
def test_columns_that_others_explain_take_nothing_with_them(intercept):
    rng = np.random.default_rng(0)
    n = 60
    X = rng.normal(size=(n, 6))
    X[:, 1], X[:, 3] = 1.0, X[:, 0] - 2 * X[:, 2]
    X[:, 4] = 0.0
    y = X @ rng.normal(size=6) + rng.normal(size=n)
    whole = pa.table({f"x{j}": X[:, j] for j in range(6)} | {"y": y})
    for n_groups in (1, 9):  # nine rows or fewer for seven coefficients
        found = by_hand(
            [whole.slice(0, 35), whole.slice(35)], Draws(KEY), n_groups, intercept=intercept
        )
        groups = np.concatenate(
            [Draws(KEY, part).of_rows(n_groups, 0, size) for part, size in enumerate((35, 25))]
        )
        design = np.column_stack([np.ones(n), X]) if intercept else X
        for group, model in enumerate(found.models()):
            own = groups == group
            best = np.linalg.lstsq(design[own], y[own])[0]
            assert np.allclose(design[own] @ model, design[own] @ best, atol=1e-9)


def test_sums_are_exact_and_cut_at_64_bits():
    def total(*numbers):
        parts = [engine._Answer(0, 0, b"", np.array([number]).tobytes()) for number in numbers]
        return int(engine._total(parts, (1,))[0])

    for numbers in ([2**62, 2**61, -5], [-(2**62), -7], [2**62, 2**62, -(2**62) - 1], [-1, 1], []):
        assert total(*numbers) == sum(numbers)
    largest = 2**63 - 1
    assert total(largest, 1) == total(largest, largest, largest) == largest
    assert total(-largest, -largest) == total(-(2**63)) == -largest


# ---------------------------------------------------------------- through Spark


@pytest.mark.parametrize("unit", [None, "who"])
def test_summaries_are_those_of_memory(spark, unit):
    whole = table(900, 4, units=80 if unit else None, wild=True)
    parts = [part for part in cut(whole, 4) if part.num_rows]
    found = of_spark(framed(spark, parts), unit).summaries(12, "add-remove", intercept=True)
    if unit:
        expected = of_memory(whole, unit).summaries(12, "add-remove", intercept=True)
    else:
        draws = UnitDraws.of(Randomness(1)).groups
        groups = [
            replace(draws, part=part).of_rows(12, 0, len(given)) for part, given in enumerate(parts)
        ]
        columns = read_training(whole, "y").columns
        with np.errstate(all="ignore"):
            expected = summarise(columns, np.concatenate(groups), 12, intercept=True)
    X = np.column_stack([whole[f"x{j}"] for j in range(4)])
    assert agree(found, expected, X, np.asarray(whole["y"]))


def test_one_partition_has_the_groups_of_memory(spark):
    whole = table(300)
    found = of_spark(framed(spark, [whole])).summaries(5, "replace-one", intercept=False)
    expected = of_memory(whole).summaries(5, "add-remove", intercept=False)
    for one, other in zip(found.models(), expected.models(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-8)


def test_driver_and_spark_merge_alike(spark):
    frame = framed(spark, cut(table(400), 4))
    results = []
    for counted in (False, True):
        with of_spark(frame) as rows:
            if counted:
                assert rows.n_valid_units() == 400
            results.append(rows.summaries(2000, "add-remove", intercept=True))
    assert parts_of(results[0]) == parts_of(results[1])


def test_isolation_through_spark(spark):
    whole = table(400, units=30)
    parts = [part for part in cut(whole, 4) if part.num_rows]
    others = [part.filter(np.asarray(part["who"]) != 7) for part in parts]
    before, after = (
        of_spark(framed(spark, given), "who").summaries(9, "add-remove", intercept=True)
        for given in (parts, others)
    )
    draws = UnitDraws.of(Randomness(1)).groups
    assert differing(before, after) == [int(draws.of_integers(9, np.array([7]))[0])]


@dataclass(frozen=True)
class Killing(engine._Reader):
    """Kills the worker in the middle of the second partition, once."""

    marker: str = ""

    def rows(self, batches: Iterator[Any]) -> Iterator[Any]:
        from pyspark import TaskContext

        for first, rows in super().rows(batches):
            yield first, rows
            if first > 0 and TaskContext.get().partitionId() == 1:
                try:
                    os.close(os.open(self.marker, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("unit", [None, "who"])
def test_a_killed_worker_changes_nothing(spark, tmp_path, unit):
    whole = table(400, units=30 if unit else None)
    frame = framed(spark, [whole.slice(0, 150), whole.slice(150, 200), whole.slice(350)])
    plain, killed = of_spark(frame, unit), of_spark(frame, unit)
    expected = plain.summaries(9, "add-remove", intercept=True)
    marker = tmp_path / "killed"
    killed._reader = Killing(**killed._reader.__dict__, marker=str(marker))
    found = killed.summaries(9, "add-remove", intercept=True)
    assert marker.exists()
    assert parts_of(found) == parts_of(expected)
    marker.unlink()
    votes = [rows.pilot(2, 1).votes(0).tobytes() for rows in (plain, killed)]
    assert votes[0] == votes[1]
    assert marker.exists()
    plain.close()
    killed.close()


@pytest.mark.parametrize("unit", [None, "who"])
def test_counts(spark, unit):
    whole = table(500, units=120, wild=True)
    who = [None if at % 11 == 0 else value for at, value in enumerate(whole["who"].to_pylist())]
    whole = whole.set_column(whole.column_names.index("who"), "who", pa.array(who, pa.int64()))
    whole = whole if unit else whole.drop(["who"])
    with of_spark(framed(spark, cut(whole, 4)), unit) as rows:
        memory = of_memory(whole, unit)
        assert rows.n_units() == memory.n_units()
        assert rows.n_valid_units() == memory.n_valid_units()


MIDNIGHT = datetime(2020, 2, 29, tzinfo=UTC)
IDENTIFIERS = {
    "text": (["ann", "bob", "Müller", None, ""], pa.string()),
    "bytes": ([b"ann", b"\xff\x00", None], pa.binary()),
    "whole and broken floats": ([1.0, -0.0, 0.0, 0.5, float("nan"), None, 1e300], pa.float64()),
    "decimals": ([Decimal("1.00"), Decimal("1.50"), Decimal("-3"), None], pa.decimal128(8, 2)),
    "flags": ([True, False, None], pa.bool_()),
    "moments": (
        [MIDNIGHT, MIDNIGHT.replace(hour=3, microsecond=5), None],
        pa.timestamp("us", "UTC"),
    ),
    "dates": ([MIDNIGHT.date(), None], pa.date32()),
}


@pytest.mark.parametrize("kind", IDENTIFIERS)
def test_identifiers_are_those_of_memory(spark, kind):
    values, dtype = IDENTIFIERS[kind]
    whole = table(60).append_column(
        "who", pa.array([values[at % len(values)] for at in range(60)], dtype)
    )
    rows, memory = of_spark(framed(spark, cut(whole, 3)), "who"), of_memory(whole, "who")
    assert rows.n_valid_units() == memory.n_valid_units()
    found = rows.summaries(40, "add-remove", intercept=False)
    expected = memory.summaries(40, "add-remove", intercept=False)
    used = [[bool(factor.any()) for factor in either.factors] for either in (found, expected)]
    assert used[0] == used[1]


def test_levels_nulls_and_single_precision(spark):
    rng = np.random.default_rng(0)
    n = 600
    region = rng.choice(["north", "south", "west", "nowhere", None], n)
    age = [None if at % 13 == 0 else int(value) for at, value in enumerate(rng.integers(20, 80, n))]
    whole = pa.table(
        {
            "a.b `c`": rng.normal(size=n).astype(np.float32),
            "Region": pa.array(region.tolist()),
            "age": pa.array(age, pa.int32()),
            "AGE": pa.array(rng.random(n) < 0.5),
            "y": rng.normal(size=n),
        }
    )
    categories = {"Region": ["north", "south", "west"]}
    found = of_spark(framed(spark, [whole]), categories=categories)
    memory = of_memory(whole, categories=categories)
    assert found.schema == memory.schema
    assert found.n_valid_units() == memory.n_valid_units()
    one = found.summaries(4, "add-remove", intercept=True)
    other = memory.summaries(4, "add-remove", intercept=True)
    rows = read_training(whole, "y", categories=categories)
    assert agree(one, other, np.asarray(rows.design, float), rows.target)
    pilots = [either.pilot(2, 2) for either in (found, memory)]
    location = np.zeros(found.n_features + 1)
    assert np.array_equal(*(pilot.profiles(location) for pilot in pilots))
    found.close()


# ---------------------------------------------------------------- moments


def planned(n, p):
    planner = MomentsPlanner(BUDGET, p + 1, private_count=False)
    return replace(planner.parameters(n), pilot=2, voters=2)


def released(rows, parameters, intercept=True):
    randomness = Randomness(5)
    with np.errstate(all="ignore"):
        model = moments.release(rows, intercept, parameters, randomness)
    assert model is not None
    return model.coefficients.tobytes(), model.intercept, model.ranges.tobytes()


def test_moments_of_units_are_those_of_memory_bit_for_bit(spark):
    whole = table(6000, 3, units=2500, wild=True)
    parameters = planned(2500, 3)
    with of_spark(framed(spark, cut(whole, 4)), "who") as rows:
        assert released(rows, parameters) == released(of_memory(whole, "who"), parameters)


def test_moments_of_rows_are_those_of_memory_in_one_partition(spark):
    whole = table(3000, 2, wild=True)
    parameters = planned(3000, 2)
    with of_spark(framed(spark, [whole])) as rows:
        assert released(rows, parameters) == released(of_memory(whole), parameters)


def test_a_fit_is_that_of_memory_bit_for_bit(spark):
    whole = table(4000, 2, units=1500)
    frame = framed(spark, cut(whole, 3))
    arguments = {"epsilon": 4.0, "delta": 1e-5, "random_state": 0}
    memory = TukeyRegressor(**arguments).fit(whole, "y", privacy_unit="who")
    model = TukeyRegressor(**arguments).fit_spark(frame, "y", privacy_unit="who")
    assert model.release_ == memory.release_
    with pytest.raises(InvalidInput, match=r"no column of the name 'z'\. Nothing was spent\."):
        TukeyRegressor(**arguments).fit_spark(frame, "z")


def test_the_pilot_of_rows_is_drawn_by_partition(spark):
    whole = table(500, 2)
    parts = [part for part in cut(whole, 4) if part.num_rows]
    draws = UnitDraws.of(Randomness(1))
    here, voting = (
        np.concatenate(
            [replace(draw, part=at).of_rows(3, 0, len(part)) == 0 for at, part in enumerate(parts)]
        )
        for draw in (draws.pilot, draws.voters)
    )
    with of_spark(framed(spark, parts)) as rows:
        pilot = rows.pilot(3, 3)
        for j, name in enumerate(("x0", "x1", "y")):
            expected = np.sort(np.asarray(whole[name])[here & voting])
            assert pilot.votes(j).tobytes() == expected.tobytes()
        assert pilot.profiles(np.zeros(3)).sum(axis=1).tolist() == [here.sum()] * 3


def test_a_pilot_whose_rows_come_in_another_order_is_refused(spark, tmp_path):
    marker = str(tmp_path / "again")

    def turned(batches):
        for batch in batches:
            turn = os.path.exists(marker)
            yield batch.take(list(range(len(batch)))[:: -1 if turn else 1])

    frame = framed(spark, [table(200)])
    with of_spark(frame.mapInArrow(turned, frame.schema)) as rows:
        pilot = rows.pilot(3, 1)
        before = pilot.profiles(np.zeros(4))
        assert np.array_equal(pilot.profiles(np.zeros(4)), before)
        Path(marker).touch()
        assert np.array_equal(pilot.profiles(np.zeros(4)), before)  # Spark has kept them
        pilot._frame.unpersist()
        with pytest.raises(InvalidInput, match="another order"):
            pilot.profiles(np.zeros(4))


def test_parts_that_were_merged_of_different_attempts_are_refused(spark, monkeypatch):
    rows = of_spark(framed(spark, [table(100)]))
    answers = engine._answers

    def of_two_attempts(frame):
        first, *others = answers(frame)
        return [replace(first, mark=b"another"), *others]

    monkeypatch.setattr(engine, "_answers", of_two_attempts)
    with pytest.raises(InvalidInput, match="another order"):
        rows.summaries(2000, "add-remove", intercept=True)


# ---------------------------------------------------------------- what can be wrong


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": "z"}, "no column of the name 'z'"),
        ({"features": ["x0", "x9"]}, "no column of the name 'x9'"),
        ({"unit": "x9"}, "no column of the name 'x9'"),
        ({"features": ["x0", "x0"]}, "'x0' has two roles"),
        ({"features": ["x0", "y"]}, "'y' has two roles"),
        ({"features": ["x0", "when"]}, "'when' holds dates"),
        ({"features": ["x0", "list"]}, "'list' has dtype List"),
        ({"features": ["x0", "months"]}, "'months' has type interval"),
        ({"target": "name"}, "The target has dtype String"),
        ({"unit": "list"}, "privacy unit has dtype List"),
        ({"features": []}, "no features"),
        ({"features": ["x0"], "categories": {"x1": ["a"]}}, "no feature has the name 'x1'"),
        ({"features": ["x0", "twice"]}, "several columns of the name 'twice'"),
    ],
)
def test_what_is_wrong_with_columns(spark, arguments, message):
    frame = spark.sql(
        "SELECT 1.0D x0, 2.0D x1, now() when, array(1) list, 'a' name, 1 twice, 2 twice, 3.0D y, "
        "INTERVAL '1' MONTH months"
    )
    given = {"target": "y", "features": ["x0"], "unit": None, "categories": None} | arguments
    with pytest.raises(InvalidInput, match=message):
        SparkEngine(
            frame,
            given["target"],
            given["features"],
            given["unit"],
            given["categories"],
            Randomness(0),
        )


def test_text_needs_levels(spark):
    with pytest.raises(UndeclaredCategory, match="'name'"):
        of_spark(spark.sql("SELECT 'a' name, 3.0D y"))


def test_not_a_frame_of_spark(spark):
    with pytest.raises(InvalidInput, match="needs a Spark DataFrame, got dict"):
        of_spark({"y": [1.0]})


def test_units_are_not_dealt_out_evenly(spark):
    with pytest.raises(InvalidInput, match="use 'add-remove'"):
        of_spark(framed(spark, [table(9, units=3)]), "who").summaries(
            2, "replace-one", intercept=True
        )


def test_no_rows(spark):
    frame = spark.createDataFrame(table(5, units=2)).where("x0 != x0").repartition(3)
    for unit in (None, "who"):
        with of_spark(frame if unit else frame.drop("who"), unit) as rows:
            assert rows.n_units() == rows.n_valid_units() == 0
            assert not rows.summaries(4, "add-remove", intercept=True).factors.any()
            pilot = rows.pilot(2, 2)
            assert len(pilot.votes(0)) == 0
            assert not pilot.profiles(np.zeros(4)).any()


def test_errors_say_nothing_of_values(spark):
    frame = spark.sql("SELECT id x0, CAST(concat('secret', id) AS DOUBLE) y FROM range(9)")
    rows = of_spark(frame)
    for job in (rows.n_valid_units, lambda: rows.summaries(3, "add-remove", intercept=True)):
        with pytest.raises(InvalidInput) as caught:
            job()
        assert "CAST_INVALID_INPUT" in str(caught.value)
        assert "secret" not in str(caught.value)
        assert caught.value.__cause__ is caught.value.__context__ is None


def test_tasks_say_nothing_of_values(monkeypatch):
    import pyspark

    class Task:
        def partitionId(self):  # noqa: N802
            return 0

    class Frame:
        def mapInArrow(self, task, schema):  # noqa: N802
            return task

    def failing(part, batches):
        yield 1
        try:
            raise ValueError("secret")
        except ValueError:
            raise KeyError("secret", "too") from None

    monkeypatch.setattr(pyspark.TaskContext, "get", Task)
    answers = engine._mapped(Frame(), failing, "")(iter([]))
    assert next(answers) == 1
    with pytest.raises(RuntimeError) as caught:
        next(answers)
    assert str(caught.value) == "a task of tukeyreg failed: KeyError"
    assert caught.value.__cause__ is caught.value.__context__ is None


def test_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(MissingExtra, match=r"needs pyspark: pip install 'tukeyreg\[spark\]'"):
        of_spark(None)
