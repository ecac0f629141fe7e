"""Rows in files: the same groups, the same sums and the same releases as in memory."""

import gzip
import io
import os
import re
import sys
import threading
import tracemalloc
from dataclasses import replace

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tukeyreg import InvalidInput, MissingExtra, NotEnoughData, TukeyRegressor, UndeclaredCategory
from tukeyreg.engines import MemoryEngine, files
from tukeyreg.engines.files import FileEngine, FileSource
from tukeyreg.engines.progress import Progress
from tukeyreg.intake import read_training
from tukeyreg.kernel import Columns
from tukeyreg.mechanisms.randomness import Randomness

LEVELS = {"region": ["north", "south", "west"]}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """Batches of some two thousand rows, DuckDB's smallest: units and groups span many of them."""
    monkeypatch.setattr(files, "_LEAST_ROWS", 1)
    monkeypatch.setattr(files, "_BATCH_BYTES", 1 << 16)


def people(n=12_000, seed=0, units=3000):
    """Ordinary rows, missing values, undeclared levels, and rows of nobody."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "age": rng.integers(20, 70, n),
            "dose": rng.lognormal(size=n),
            "smokes": rng.random(n) < 0.3,
            "region": rng.choice(["north", "south", "west", "moon"], n, p=[0.4, 0.4, 0.19, 0.01]),
            "person": rng.integers(0, units, n),
        }
    )
    frame["charges"] = 3.0 * frame.age + 10 * frame.smokes + rng.normal(size=n)
    frame.loc[rng.random(n) < 0.02, "dose"] = np.nan
    frame.loc[rng.random(n) < 0.01, "charges"] = np.inf
    return frame


def stored(frame, folder, pieces=3, kind="parquet"):
    """The rows in several files; the pattern that matches them."""
    for at, part in enumerate(np.array_split(np.arange(len(frame)), pieces)):
        piece = frame.iloc[part]
        if kind == "csv":
            piece.to_csv(folder / f"rows-{at}.csv", index=False)
        else:
            table = pa.Table.from_pandas(piece, preserve_index=False)
            pq.write_table(table, folder / f"rows-{at}.parquet", row_group_size=1500)
    return f"{folder}/rows-*.{kind}"


def regressor(**options):
    options = {"epsilon": 2.0, "delta": 1e-5, "random_state": 3, "categories": LEVELS} | options
    return TukeyRegressor(**options)


def same_release(one, other):
    assert one.release_.coefficients == other.release_.coefficients
    assert one.release_.intercept == other.release_.intercept
    assert one.release_.ranges == other.release_.ranges
    assert one.release_ == other.release_


# ---------------------------------------------------------------- the same as in memory

OPTIONS = [
    {},
    {"method": "sequential", "n_models": 400},
    {"method": "sequential"},
    {"method": "joint", "n_models": 400, "fit_intercept": False, "epsilon": 20.0},
    {"neighboring": "replace-one"},
]


@pytest.mark.parametrize("unit", [None, "person"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_seed_gives_the_release_of_memory_bit_for_bit(tmp_path, options, unit):
    frame = people()
    features = ["age", "dose", "smokes", "region"]
    if options.get("method") == "joint":
        features, frame = ["age", "dose", "smokes"], frame.dropna()
    options = options | ({"categories": None} if "region" not in features else {})
    given_frame = frame[[*features, "charges", *([unit] if unit else [])]]
    expected = regressor(**options).fit(given_frame, "charges", unit)
    found = regressor(**options).fit_files(
        stored(frame, tmp_path), "charges", features, privacy_unit=unit
    )
    same_release(found, expected)
    assert found.feature_names_in_.tolist() == features
    assert np.array_equal(found.predict(frame[features]), expected.predict(frame[features]), True)


@pytest.mark.parametrize("spell", [str, lambda i: i / 2, lambda i: f"ü{i}", np.int32, np.uint64])
def test_identifiers_of_any_type(tmp_path, spell):
    frame = people()
    frame["person"] = [spell(person) for person in frame.person]
    for method in ("moments", "sequential"):
        expected = regressor(method=method).fit(frame, "charges", "person")
        found = regressor(method=method).fit_files(
            stored(frame, tmp_path), "charges", privacy_unit="person"
        )
        same_release(found, expected)


def test_identifiers_that_are_missing_or_zero_of_either_sign(tmp_path):
    frame = people()
    frame["person"] = frame.person - 5.0
    zero = np.flatnonzero(frame.person == 0)
    frame.loc[zero, "person"] = np.where(zero % 2, -0.0, 0.0)
    frame.loc[::9, "person"] = np.nan
    for method in ("moments", "sequential"):
        expected = regressor(method=method).fit(frame, "charges", "person")
        found = regressor(method=method).fit_files(
            stored(frame, tmp_path), "charges", privacy_unit="person"
        )
        same_release(found, expected)


@pytest.mark.parametrize("method", ["moments", "sequential"])
@pytest.mark.parametrize("neighboring", ["add-remove", "replace-one"])
def test_rows_of_nobody_are_no_rows(tmp_path, method, neighboring):
    frame = people().astype({"person": float})
    frame["person"] = np.nan
    options = {"method": method, "neighboring": neighboring}
    with pytest.raises(NotEnoughData):
        regressor(**options).fit(frame, "charges", "person")
    if options != {"method": "sequential", "neighboring": "replace-one"}:
        with pytest.raises(NotEnoughData):
            regressor(**options).fit_files(
                stored(frame, tmp_path), "charges", privacy_unit="person"
            )
    if options == {"method": "sequential", "neighboring": "add-remove"}:
        model = regressor(**options, n_models=400).fit(frame, "charges", "person")
        assert not model.coef_.any()


def test_dates_and_decimals(tmp_path):
    n = 6000
    rng = np.random.default_rng(1)
    table = pa.table(
        {
            "price": pa.array(np.round(rng.uniform(1, 9, n), 2)).cast(pa.decimal128(9, 2)),
            "huge": pa.array(rng.integers(0, 2**62, n)),
            "single": pa.array(rng.normal(size=n).astype(np.float32)),
            "day": pa.array(np.datetime64("2020-01-01") + rng.integers(0, 900, n)),
        }
    )
    table = table.append_column("y", pa.array(np.asarray(table["single"]) + rng.normal(size=n)))
    pq.write_table(table, tmp_path / "t.parquet")
    expected = regressor(categories=None).fit(table, "y", "day")
    found = regressor(categories=None).fit_files(tmp_path / "t.parquet", "y", privacy_unit="day")
    same_release(found, expected)


def test_without_features_all_columns_count_in_their_order(tmp_path):
    frame = people()[["dose", "charges", "age"]]
    found = regressor(categories=None).fit_files(stored(frame, tmp_path), "charges")
    assert found.release_.names == ("dose", "age")


def test_a_database_a_table_of_a_schema_and_queries(tmp_path):
    frame = people().drop(columns="person")
    expected = regressor().fit(frame, "charges")
    path = tmp_path / "study.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.register("given", frame)
        connection.execute("CREATE SCHEMA q; CREATE TABLE q.claims AS SELECT * FROM given")
        connection.execute("CREATE VIEW all_claims AS SELECT * FROM q.claims")
    pattern = stored(frame, tmp_path)
    fits = [
        regressor().fit_files(path, "charges", table="q.claims"),
        regressor().fit_files(path, "charges", table="all_claims"),
        regressor().fit_files(path, "charges", query="SELECT * FROM q.claims;"),
        regressor().fit_files(target="charges", query=f"SELECT * FROM '{pattern}'"),
    ]
    for found in fits:
        same_release(found, expected)


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("delimiter", [",", ";"])
def test_csv(tmp_path, zipped, delimiter):
    frame = people()
    frame["region"] = frame.region.where(frame.region != "moon", 'the "moon", a satellite')
    expected = regressor().fit(frame.astype({"person": str}), "charges", "person")
    text = frame.to_csv(index=False, sep=delimiter)
    path = tmp_path / ("rows.csv.gz" if zipped else "rows.csv")
    path.write_bytes(gzip.compress(text.encode()) if zipped else text.encode())
    found = regressor().fit_files(path, "charges", privacy_unit="person", delimiter=delimiter)
    assert np.allclose(found.coef_, expected.coef_)


def test_what_is_not_a_number_in_a_csv_file_drops_its_row(tmp_path):
    frame = people().drop(columns=["person", "region"])
    spoiled = frame.astype({"age": object})
    spoiled.loc[::50, "age"] = "about forty"
    spoiled.to_csv(tmp_path / "rows.csv", index=False)
    kept = np.arange(len(frame)) % 50 > 0
    rows = FileSource(tmp_path / "rows.csv")
    with rows:
        engine = FileEngine(rows, "charges", None, None, None, Randomness(0))
        assert engine.n_valid_units() == np.isfinite(frame[kept].astype(float)).all(axis=1).sum()


def test_float32_files_and_frames_of_other_libraries_agree():
    frame = people().dropna().drop(columns="person").astype({"smokes": np.int8})
    expected = regressor().fit(frame, "charges")
    for other in (pl.from_pandas(frame), pa.Table.from_pandas(frame, preserve_index=False)):
        same_release(regressor().fit(other, "charges"), expected)


def test_arrow_in_many_pieces_is_read_where_it_lies():
    frame = people().drop(columns="person")
    expected = regressor().fit(frame, "charges")
    whole = pa.Table.from_pandas(frame, preserve_index=False)
    pieces = pa.concat_tables([whole.slice(0, 10), whole.slice(10, 5000), whole.slice(5010)])
    same_release(regressor().fit(pieces, "charges"), expected)


# ---------------------------------------------------------------- groups that are weak


def dummies(n=9000, seed=2):
    """All levels of a category as columns of numbers: every group is collinear."""
    rng = np.random.default_rng(seed)
    level = rng.integers(0, 4, n)
    frame = pd.DataFrame({f"is {k}": (level == k).astype(float) for k in range(4)})
    frame["far"] = 1e9 + rng.normal(size=n)
    frame["y"] = level + 2 * (frame.far - 1e9) + rng.normal(size=n)
    return frame


def test_weak_groups_are_looked_at_again(tmp_path):
    frame = dummies()
    options = {"method": "sequential", "n_models": 300, "categories": None, "epsilon": 3.0}
    expected = regressor(**options).fit(frame, "y")
    found = regressor(**options).fit_files(stored(frame, tmp_path), "y")
    same_release(found, expected)
    assert found.coef_[3] == 0.0
    assert found.coef_[4] == pytest.approx(2.0, abs=0.2)


def test_rows_that_come_in_another_order_the_second_time_release_nothing(tmp_path, monkeypatch):
    frame = dummies()
    pattern = stored(frame, tmp_path)
    looks = []
    plain = FileEngine._visit

    def visit(self, what, visitor, **options):
        looks.append(what)
        plain(self, what, visitor, **options)

    monkeypatch.setattr(FileEngine, "_visit", visit)
    given = files.groups_of

    def shuffled(*arguments):
        groups = given(*arguments)
        return groups[::-1].copy() if looks[-1] == "looking again" else groups

    monkeypatch.setattr(files, "groups_of", shuffled)
    options = {"method": "sequential", "n_models": 300, "categories": None, "epsilon": 3.0}
    with pytest.raises(InvalidInput, match="another order"):
        regressor(**options).fit_files(pattern, "y")


# ---------------------------------------------------------------- one unit, one group


def parts(engine, n_groups):
    summaries = engine.summaries(n_groups, "add-remove", intercept=True)
    return [
        factor.tobytes() + target.tobytes()
        for factor, target in zip(summaries.factors, summaries.targets, strict=True)
    ]


def summarised(frame, folder, n_groups=25, unit="person"):
    with FileSource(stored(frame, folder)) as source:
        engine = FileEngine(source, "charges", None, unit, LEVELS, Randomness(5))
        with np.errstate(all="ignore"):
            return parts(engine, n_groups)


def in_memory(frame, n_groups=25, unit="person"):
    rows = read_training(frame, "charges", categories=LEVELS, privacy_unit=unit)
    with np.errstate(all="ignore"):
        return parts(MemoryEngine(rows, Randomness(5)), n_groups)


def differing(before, after):
    return [i for i, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(0, 2**20), st.sampled_from([1, 30, 400]), st.floats(0, 1, exclude_max=True))
def test_a_unit_that_leaves_the_files_changes_one_group(tmp_path_factory, seed, units, place):
    frame = people(4000, seed, units=units + 1)
    person = frame.person.iloc[int(place * len(frame))]
    folder = tmp_path_factory.mktemp("rows")
    before, memory = summarised(frame, folder), in_memory(frame)
    after = summarised(frame[frame.person != person], folder)
    moved = differing(before, after)
    assert len(moved) == 1
    assert before == memory


def test_a_row_that_is_replaced_changes_one_group(tmp_path):
    frame = people(4000).drop(columns="person")
    before = summarised(frame, tmp_path, unit=None)
    for row in (0, 1999, 2000, 3999):
        other = frame.copy()
        other.loc[row, ["age", "charges"]] = [10**6, -5.0]
        other.loc[row, ["dose", "region"]] = [1.0, "north"]
        assert len(differing(before, summarised(other, tmp_path, unit=None))) == 1


def test_sums_that_are_cut_by_batches_are_convicted(tmp_path, monkeypatch):
    """Partial sums per batch: a row less moves later rows into other batches."""
    frame = people(6000, units=6000)
    frame = frame[np.isfinite(frame.charges)]
    plain = files.intake.read_batch

    def centred(*arguments, **options):
        rows = plain(*arguments, **options)
        target = rows.columns.target
        return replace(rows, columns=Columns(rows.columns.features, target - target.mean()))

    before = summarised(frame, tmp_path)
    assert len(differing(before, summarised(frame.iloc[1:], tmp_path))) == 1
    monkeypatch.setattr(files.intake, "read_batch", centred)
    before = summarised(frame, tmp_path)
    assert len(differing(before, summarised(frame.iloc[1:], tmp_path))) > 1


# ---------------------------------------------------------------- what can be wrong


def refused(match, *arguments, error=InvalidInput, **options):
    model = regressor(categories=options.pop("categories", None))
    with pytest.raises(error, match=match) as caught:
        model.fit_files(*arguments, **options)
    assert str(caught.value).endswith("Nothing was spent.")
    chain, seen = caught.value, []
    while chain is not None:
        seen.append(str(chain))
        chain = chain.__cause__ or (None if chain.__suppress_context__ else chain.__context__)
    assert len(seen) == 1
    return str(caught.value)


def test_wrong_calls(tmp_path):
    frame = people()
    pattern = stored(frame, tmp_path)
    stored(frame, tmp_path, kind="csv")
    refused("there is no column 'age of'", pattern, "charges", ["age of"])
    refused("there is no column 'cost'", pattern, "cost")
    refused("there is no column 'who'", pattern, "charges", ["age"], privacy_unit="who")
    refused("must be the name of a column", pattern)
    refused("must be the name of a column", pattern, "charges", ["age"], privacy_unit=3)
    refused("named twice", pattern, "charges", ["age", "age"])
    refused("named twice", pattern, "charges", ["age", "charges"])
    refused("no features", pattern, "charges", [])
    refused("dtype", pattern, "charges", ["region"], error=UndeclaredCategory)
    refused("dtype", pattern, "region", ["age"])
    refused("no file matches", f"{tmp_path}/none-*.parquet", "charges")
    refused("there is no file", tmp_path / "none.parquet", "charges")
    refused("no source", None, "charges")
    refused("cannot be told from its name", tmp_path / "rows.xlsx", "charges")
    refused("different kinds", [pattern, f"{tmp_path}/rows-*.csv"], "charges")
    refused("must be a path", 3, "charges")
    refused("belong to a DuckDB", pattern, "charges", table="t")
    refused("either table= or query=", tmp_path / "x.duckdb", "charges")
    refused("missing, locked", tmp_path / "x.duckdb", "charges", table="t")
    refused("not valid SQL", None, "charges", query="SELEC * FROM t")
    refused("does not exist", None, "charges", query="SELECT * FROM nowhere")
    refused("one character", f"{tmp_path}/rows-*.csv", "charges", delimiter="||")


def test_replaced_identifiers_need_all_units_at_once(tmp_path):
    pattern = stored(people(), tmp_path)
    model = regressor(method="sequential", neighboring="replace-one")
    with pytest.raises(InvalidInput, match="use 'add-remove', or method='moments'"):
        model.fit_files(pattern, "charges", privacy_unit="person")


def test_too_few_units_cost_the_count_only(tmp_path):
    model = regressor(categories=None)
    with pytest.raises(NotEnoughData, match="Only the private count of units was spent"):
        model.fit_files(stored(people(90), tmp_path, 1), "charges", ["age"])


def test_files_that_are_truncated_or_corrupt(tmp_path):
    frame = people()
    for damage in ("cut", "empty", "noise", "footer"):
        pattern = stored(frame, tmp_path)
        path = tmp_path / "rows-1.parquet"
        content = path.read_bytes()
        if damage == "cut":
            path.write_bytes(content[: len(content) // 2])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "footer":
            path.write_bytes(content[:-2000] + b"\xff" * 1900 + content[-100:])
        else:
            noise = np.random.default_rng(0).bytes(4000)
            path.write_bytes(content[:4] + noise + content[4004:])
        message = refused("could not be read|damaged", pattern, "charges", categories=LEVELS)
        assert damage == "noise" or "rows-1.parquet" in message


def test_a_database_that_is_truncated(tmp_path):
    path = tmp_path / "study.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute(
            "CREATE TABLE t AS SELECT random() AS x, random() AS y FROM range(99999)"
        )
    path.write_bytes(path.read_bytes()[:9000])
    refused("could not be opened|damaged|could not be read", path, "y", table="t")


def test_csv_files_that_are_damaged(tmp_path):
    path = tmp_path / "rows.csv"
    for text in ("x,y\n1,2\n7654321,4,5\n", 'x,y\n1,2\n"7654321,4\n', "x,y\n1,2\n7654321\n"):
        path.write_text(text + "")
        assert "7654321" not in refused("CSV file could not be read", path, "y")
    path.write_bytes(b"x,y\n1,2\n\xff\xfe7654321,4\n")
    assert "7654321" not in refused("CSV file could not be read", path, "y", privacy_unit=None)
    path.write_text("x,x\n1,2\n")
    refused("must name every column", path, "y")
    path.write_text("")
    refused("must name every column", path, "y")
    (tmp_path / "rows2.csv").write_text("y,x\n1,2\n")
    path.write_text("x,y\n1,2\n")
    refused("other columns", [path, tmp_path / "rows2.csv"], "y")


def test_files_that_do_not_match(tmp_path):
    pattern = stored(people(), tmp_path)
    pq.write_table(pa.table({"age": ["a secret"], "dose": [1.0]}), tmp_path / "rows-9.parquet")
    assert "secret" not in refused("read", pattern, "charges", ["age", "dose"])


def test_a_query_that_stumbles_over_a_value_does_not_quote_it(tmp_path):
    frame = people().astype({"age": str})
    frame.loc[7, "age"] = "a secret"
    pattern = stored(frame, tmp_path)
    query = f"SELECT CAST(age AS INTEGER) AS age, charges FROM '{pattern}'"
    assert "secret" not in refused("could not be converted", None, "charges", query=query)


def test_a_file_that_changes_meanwhile(tmp_path, monkeypatch):
    pattern = stored(people(), tmp_path)
    plain = FileEngine._visit

    def visit(self, what, visitor, **options):
        os.utime(tmp_path / "rows-0.parquet", (1, 1))
        plain(self, what, visitor, **options)

    monkeypatch.setattr(FileEngine, "_visit", visit)
    refused("changed while they were read", pattern, "charges", ["age", "dose"])


def test_a_missing_extra_says_its_name(tmp_path, monkeypatch):
    pattern = stored(people(), tmp_path)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    refused(re.escape("pip install 'tukeyreg[files]'"), pattern, "charges", error=MissingExtra)


def test_nothing_stays_behind(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    pattern = stored(people(), tmp_path)
    threads = threading.active_count()
    regressor().fit_files(pattern, "charges", privacy_unit="person")
    with pytest.raises(InvalidInput):
        regressor().fit_files(pattern, "cost")
    with pytest.raises(InvalidInput):
        regressor().fit_files(None, "charges", query="SELECT * FROM nowhere")
    with pytest.raises(InvalidInput):
        regressor().fit_files(tmp_path / "none.duckdb", "charges", table="t")
    assert list((tmp_path / "scratch").iterdir()) == []
    assert threading.active_count() == threads


def test_a_python_variable_is_no_table():
    private = pd.DataFrame({"x": [1.0], "y": [2.0]})
    refused("does not exist", None, "y", query="SELECT * FROM private")
    assert len(private) == 1


# ---------------------------------------------------------------- progress


def test_progress_is_for_terminals_and_goes_away(tmp_path, monkeypatch, capsys):
    pattern = stored(people(), tmp_path)
    model = regressor(categories=None)
    model.fit_files(pattern, "charges", ["age", "dose"])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("tukeyreg.engines.progress._PATIENCE", 0.0)
    monkeypatch.setattr("tukeyreg.engines.progress._PAUSE", 0.0)
    model.fit_files(pattern, "charges", ["age", "dose"], progress=True)
    shown = capsys.readouterr().err
    assert "counting units" in shown
    assert "million rows read" in shown
    assert shown.endswith("\r")


def test_a_terminal_is_noticed(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("tukeyreg.engines.progress._PATIENCE", 0.0)
    monkeypatch.setattr("tukeyreg.engines.progress._PAUSE", 0.0)
    for stream, expected in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress(None).of("reading") as report:
            report(10**6)
        assert ("reading" in stream.getvalue()) == expected


# ---------------------------------------------------------------- memory


def held(kind, dtype, n=150_000, p=20):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, p)).astype(dtype)
    y = (X @ rng.normal(size=p) + rng.normal(size=n)).astype(dtype)
    if kind == "numpy":
        return X, y
    columns = {f"x{j}": X[:, j].copy() for j in range(p)}
    if kind == "pandas":
        return pd.DataFrame(columns), y
    if kind == "polars":
        return pl.DataFrame(columns), y
    table = pa.table(columns | {"y": y})
    pieces = (
        [table.slice(at, 40_000) for at in range(0, n, 40_000)] if kind == "pieces" else [table]
    )
    return pa.concat_tables(pieces), "y"


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64])
@pytest.mark.parametrize("kind", ["numpy", "pandas", "polars", "arrow", "pieces"])
def test_groups_need_no_copy_of_the_rows(kind, dtype):
    X, y = held(kind, dtype)
    model = TukeyRegressor(epsilon=3.0, delta=1e-5, method="sequential", n_models=300)
    model.fit(X, y)  # plans are remembered
    size = 150_000 * 20 * np.dtype(dtype).itemsize
    tracemalloc.start()
    model.fit(X, y)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * size


def test_a_copy_of_the_rows_would_be_noticed():
    X, y = held("numpy", np.float64)
    tracemalloc.start()
    read_training(X, y).columns.matrix()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak > 0.9 * X.nbytes
