"""Rows in: every kind of table gives the same rows, and no row knows of another."""

from __future__ import annotations

import datetime as dt
import math
import pickle
import traceback
import warnings
from decimal import Decimal
from fractions import Fraction
from uuid import UUID

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.exceptions import DataConversionWarning
from sklearn.utils.estimator_checks import parametrize_with_checks
from sklearn.utils.validation import check_is_fitted

from tukeyreg.errors import InvalidInput, UndeclaredCategory
from tukeyreg.intake import Column, Schema, read_features, read_training

SECRET = "SECRET-7731"
SECRET_NUMBER = 7731.7731
REGIONS = ["north", "south"]

FRAMES = {
    "pandas": pd.DataFrame,
    "polars": pl.DataFrame,
    "pyarrow": pa.table,
}
SERIES = {
    "list": list,
    "pandas": pd.Series,
    "polars": pl.Series,
    "pyarrow": lambda values: pa.chunked_array([pa.array(values)]),
}

frames = pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
series = pytest.mark.parametrize("vector", SERIES.values(), ids=SERIES)


def patients() -> dict[str, list]:
    return {
        "age": [44, 51, 38, 67],
        "weight": [71.5, 80.25, 65.0, 90.125],
        "region": ["north", "south", "south", "north"],
        "smoker": [True, False, False, True],
        "charges": [310.5, 275.0, 190.0, 600.0],
        "patient_id": ["p1", "p2", "p1", "p3"],
    }


def rows_of(training):
    """Rows as comparable bits: design, target, key of the unit."""
    keys = training.units
    return [
        (
            training.design[at].tobytes(),
            training.target[at].tobytes(),
            None if keys is None else keys.keys[keys.codes[at]],
        )
        for at in range(len(training.target))
    ]


def assert_says(error, *fragments):
    text = str(error.value)
    for fragment in fragments:
        assert fragment in text


def assert_silent(error):
    """Neither the text nor the chain of exceptions carries a canary."""
    told = "".join(traceback.format_exception_only(error.value))
    assert "7731" not in told
    assert error.value.__context__ is None or "7731" not in str(error.value.__context__)
    assert error.value.__cause__ is None


# The same rows from every kind of table


@frames
def test_a_frame_with_named_target_and_unit(frame):
    rows = read_training(
        frame(patients()), "charges", categories={"region": REGIONS}, privacy_unit="patient_id"
    )
    np.testing.assert_array_equal(
        rows.design,
        [[44, 71.5, 1, 0, 1], [51, 80.25, 0, 1, 0], [38, 65, 0, 1, 0], [67, 90.125, 1, 0, 1]],
    )
    assert rows.design.dtype == np.float64
    assert rows.design.flags.c_contiguous
    np.testing.assert_array_equal(rows.target, [310.5, 275.0, 190.0, 600.0])
    assert rows.target.dtype == np.float64
    assert rows.units.codes.tolist() == [0, 1, 0, 2]
    assert rows.units.codes.dtype == np.int64
    assert rows.units.keys == [b"sp1", b"sp2", b"sp3"]
    assert rows.schema == Schema(
        (
            Column("age"),
            Column("weight"),
            Column("region", ("north", "south")),
            Column("smoker"),
        ),
        named=True,
    )
    assert rows.schema.design_names == ("age", "weight", "region=north", "region=south", "smoker")
    assert rows.schema.n_design == 5
    assert rows.schema.n_features_in == 4
    names = rows.schema.feature_names_in
    assert names.dtype == object
    assert names.tolist() == ["age", "weight", "region", "smoker"]


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint8, np.float16, bool, object])
def test_arrays_of_numbers(dtype):
    X = np.array([[0, 1], [1, 1], [1, 0]]).astype(dtype)
    rows = read_training(X, [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(rows.design, [[0, 1], [1, 1], [1, 0]])
    assert rows.design.dtype == np.float64
    assert rows.units is None
    assert rows.schema == Schema((Column("x0"), Column("x1")), named=False)
    assert rows.schema.feature_names_in is None


def test_lists_of_lists():
    rows = read_training([[1, 2.5], [None, 3], [True, math.nan], [4, 5]], [1, 2, 3, None])
    np.testing.assert_array_equal(rows.design, [[1, 2.5]])
    assert rows.design.dtype == np.float64


@series
@pytest.mark.parametrize("X", [np.eye(3), np.eye(3).tolist(), pd.DataFrame(np.eye(3))])
def test_target_and_unit_beside_the_table(vector, X):
    rows = read_training(X, vector([1, 2, 3]), privacy_unit=vector(["b", "a", "b"]))
    np.testing.assert_array_equal(rows.target, [1.0, 2.0, 3.0])
    assert rows.units.codes.tolist() == [0, 1, 0]
    assert rows.units.keys == [b"sb", b"sa"]


def test_rows_are_matched_by_position_not_by_index():
    frame = pd.DataFrame({"a": [1.0, 2.0]}, index=[7, 8])
    y = pd.Series([10.0, 20.0], index=[8, 7])
    np.testing.assert_array_equal(read_training(frame, y).target, [10.0, 20.0])


@pytest.mark.parametrize("names", [[0, 1], pd.MultiIndex.from_tuples([("a", 1), ("a", 2)])])
def test_pandas_names_that_are_not_text_are_no_names(names):
    frame = pd.DataFrame([[1.0, 2.0]], columns=names)
    assert not read_training(frame, [1.0]).schema.named


@pytest.mark.parametrize("container", [np.array, lambda rows, dtype: rows])
def test_categories_by_position(container):
    X = container([["north", 1.5], ["west", 2.0], ["south", "3.5"]], dtype=object)
    rows = read_training(X, [1, 2, 3], categories={0: REGIONS})
    np.testing.assert_array_equal(rows.design, [[1, 0, 1.5], [0, 1, 3.5]])
    assert rows.schema.design_names == ("x0=north", "x0=south", "x1")
    np.testing.assert_array_equal(
        read_features(X, rows.schema), [[1, 0, 1.5], [np.nan, np.nan, 2.0], [0, 1, 3.5]]
    )


def test_an_array_of_text_whose_columns_are_all_declared():
    X = np.array([["a", "x"], ["b", "y"]])
    rows = read_training(X, [1, 2], categories={0: ["a", "b"], 1: ["x"]})
    np.testing.assert_array_equal(rows.design, [[1, 0, 1]])


def test_missing_values_of_pandas_inside_an_object_array():
    frame = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": [1.5, 2.5]})
    rows = read_training(frame.to_numpy(dtype=object), [1.0, 2.0])
    np.testing.assert_array_equal(rows.design, [[1.0, 1.5]])


# What happens to single values


@frames
def test_rows_with_something_missing_are_dropped(frame):
    data = {
        "a": [1.0, None, 3.0, 4.0, 5.0, 6.0],
        "b": [True, False, None, True, False, True],
        "c": ["x", "y", "x", None, "y", "x"],
        "y": [1, 2, 3, 4, None, 6],
        "id": [2**60 + 1, 2, 3, 4, 5, None],
    }
    made = frame(data)
    if isinstance(made, pd.DataFrame):
        made = made.astype({"b": "boolean", "id": "object"}).astype({"id": "Int64", "y": "Int64"})
        made["id"] = pd.array(data["id"], dtype="Int64")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = read_training(made, "y", categories={"c": ["x", "y"]}, privacy_unit="id")
    assert caught == []
    np.testing.assert_array_equal(rows.design, [[1, 1, 1, 0]])
    assert rows.units.keys == [b"i%d" % (2**60 + 1)]


@frames
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_dropped(frame, bad):
    rows = read_training(frame({"a": [1.0, bad, 3.0], "y": [1.0, 2.0, bad]}), "y")
    np.testing.assert_array_equal(rows.design, [[1.0]])


@frames
def test_rows_with_undeclared_values_are_dropped(frame):
    rows = read_training(
        frame({"a": ["x", SECRET, "y"], "y": [1, 2, 3]}), "y", categories={"a": ["y", "x", "z"]}
    )
    np.testing.assert_array_equal(rows.design, [[0, 1, 0], [1, 0, 0]])


def test_no_row_may_be_left():
    rows = read_training(np.full((3, 2), np.nan), [1, 2, 3], privacy_unit=["a", "b", "c"])
    assert rows.design.shape == (0, 2)
    assert rows.target.shape == (0,)
    assert rows.units.keys == []
    assert rows.units.codes.shape == (0,)


def test_huge_and_tiny_values_pass_untouched():
    X = np.array([[1e300, 5e-324], [-1.7e308, -0.0]])
    assert read_training(X, [1e300, 5e-324]).design.tobytes() == X.tobytes()
    largest = np.full((2, 2), 1.7e308)
    beside_nan = np.vstack([largest, [np.nan, 0.0]])
    np.testing.assert_array_equal(read_training(beside_nan, [1, 2, 3]).design, largest)


@pytest.mark.parametrize("whole", [2**53 + 1, 2**63 - 1, 2**64 - 1])
def test_integers_become_the_nearest_double(whole):
    for given_as in (
        np.array([[whole]]),
        np.array([[whole]], dtype=object),
        [[whole]],
        pl.DataFrame({"a": pl.Series([whole], dtype=pl.UInt64)}),
        pl.DataFrame({"a": pl.Series([whole, None], dtype=pl.UInt64)}),
        pl.DataFrame({"a": pl.Series([whole, None], dtype=pl.Int128)}),
        pa.table({"a": pa.array([whole, None], type=pa.uint64())}),
        pd.DataFrame({"a": pd.array([whole, None], dtype="UInt64")}),
    ):
        n = len(given_as)
        np.testing.assert_array_equal(read_training(given_as, [1] * n).design, [[float(whole)]])


def test_what_overflows_a_double_is_dropped_without_a_warning():
    too_large = [[10**400, 1], [1, -(10**400)], [2, 3]]
    np.testing.assert_array_equal(read_training(too_large, [1, 2, 3]).design, [[2, 3]])
    np.testing.assert_array_equal(read_training([[1], [2]], [10**400, 2]).design, [[2]])
    if np.finfo(np.longdouble).max > np.finfo(np.float64).max:
        X = np.array([[np.longdouble("1e4000")], [1]])
        np.testing.assert_array_equal(read_training(X, [1, 2]).design, [[1]])


@pytest.mark.parametrize(
    "made",
    [
        pl.DataFrame({"a": [Decimal("0.1"), None, Decimal("2.5")]}),
        pa.table({"a": [Decimal("0.1"), None, Decimal("2.5")]}),
        pd.DataFrame(
            {
                "a": pd.Series(
                    [Decimal("0.1"), None, Decimal("2.5")], dtype=pd.ArrowDtype(pa.decimal128(5, 2))
                )
            }
        ),
    ],
    ids=["polars", "pyarrow", "pandas"],
)
def test_decimals_are_numbers(made):
    np.testing.assert_array_equal(read_training(made, [1, 2, 3]).design, [[0.1], [2.5]])


# Single precision


@pytest.mark.parametrize(
    "made",
    [
        np.array([[1.5, 2.5], [np.nan, 1.0]], dtype=np.float32),
        np.array([[1.5, 2.5], [np.nan, 1.0]], dtype=">f4"),
        pd.DataFrame({"a": [1.5, None], "b": [2.5, 1.0]}, dtype=np.float32),
        pd.DataFrame({"a": [1.5, None], "b": [2.5, 1.0]}, dtype="Float32"),
        pl.DataFrame({"a": [1.5, None], "b": [2.5, 1.0]}).cast(pl.Float32),
        pa.table(
            {
                "a": pa.array([1.5, None], pa.float32()),
                "b": pa.array([2.5, 1.0], pa.float32()),
            }
        ),
    ],
)
def test_float32_stays(made):
    rows = read_training(made, np.array([1.5, 2.5], dtype=np.float32))
    np.testing.assert_array_equal(rows.design, np.array([[1.5, 2.5]], dtype=np.float32))
    assert rows.design.dtype == np.dtype("=f4")
    assert rows.target.dtype == np.float64
    assert read_features(made, rows.schema).dtype == np.float32


def test_float32_with_categories_stays_and_with_doubles_does_not():
    single = {"a": pl.Series([0.5], dtype=pl.Float32), "c": ["x"]}
    frame = pl.DataFrame(single)
    assert read_training(frame, [1], categories={"c": ["x"]}).design.dtype == np.float32
    mixed = pl.DataFrame(single | {"b": [0.5]})
    assert read_training(mixed, [1], categories={"c": ["x"]}).design.dtype == np.float64
    only = frame.select("c")
    assert read_training(only, [1], categories={"c": ["x"]}).design.dtype == np.float64


def test_the_precision_of_a_list_is_not_that_of_its_values():
    assert read_training([[np.float32(1)]], [1]).design.dtype == np.float64


# Copies


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_valid_contiguous_arrays_are_not_copied(dtype):
    X = np.arange(12, dtype=dtype).reshape(4, 3)
    assert read_training(X, np.arange(4.0)).design is X
    assert read_features(X, read_training(X, np.arange(4.0)).schema) is X


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("hole", [False, True])
def test_the_design_is_contiguous_and_the_input_is_left_alone(order, hole):
    X = np.array([[1.0, 2.0, 3.0], [4.0, np.nan if hole else 5.0, 6.0]], order=order)
    y = np.array([1.0, 2.0])
    X_before, y_before = X.copy(), y.copy()
    X.setflags(write=False)
    y.setflags(write=False)
    rows = read_training(X, y)
    assert rows.design.flags.c_contiguous
    assert len(rows.design) == (1 if hole else 2)
    np.testing.assert_array_equal(X, X_before)
    np.testing.assert_array_equal(y, y_before)


def test_pandas_frames_are_left_alone():
    frame = pd.DataFrame(patients())
    before = frame.copy(deep=True)
    categories = {"region": list(REGIONS)}
    read_training(frame, "charges", categories=categories, privacy_unit="patient_id")
    pd.testing.assert_frame_equal(frame, before)
    assert categories == {"region": REGIONS}


# Categories


@pytest.mark.parametrize(
    ("values", "levels"),
    [
        ([1, 2, 3, 2], [1, 2]),
        ([1.0, 2.0, 3.5, 2.0], [1, 2]),
        ([True, False, None, False], [True, False]),
        ([True, False, None, False], [1, 0]),
        ([Decimal("1.0"), Decimal("2.0"), Decimal("3.5"), Decimal("2.0")], [1, 2]),
        (["a", "b", "c", "b"], ["a", "b"]),
        ([b"a", b"b", b"c", b"b"], [b"a", b"b"]),
        ([dt.date(2020, 1, 1), dt.date(2021, 1, 1), None, dt.date(2021, 1, 1)],) * 2,
    ],
)
@pytest.mark.parametrize("kind", ["pandas", "polars", "pyarrow", "array"])
def test_levels_of_every_type(kind, values, levels):
    if None in levels:
        levels = [dt.date(2020, 1, 1), dt.date(2021, 1, 1)]
    if kind == "array":
        made, key = np.array(values, dtype=object).reshape(-1, 1), 0
    else:
        made, key = FRAMES[kind]({"a": values}), "a"
    rows = read_training(made, [1, 2, 3, 4], categories={key: levels})
    np.testing.assert_array_equal(rows.design, [[1, 0], [0, 1], [0, 1]])
    np.testing.assert_array_equal(rows.target, [1, 2, 4])


@pytest.mark.parametrize(
    "made",
    [
        pd.DataFrame({"a": pd.Categorical(["x", None, "y", SECRET])}),
        pd.DataFrame({"a": pd.Categorical(["x", None, "y", SECRET], ordered=True)}),
        pd.DataFrame({"a": pd.Series(["x", None, "y", SECRET], dtype=object)}),
        pd.DataFrame({"a": pd.Series(["x", None, "y", SECRET], dtype="string")}),
        pd.DataFrame({"a": pd.Series(["x", [1], "y", {}], dtype=object)}),
        pl.DataFrame({"a": pl.Series(["x", None, "y", SECRET], dtype=pl.Categorical)}),
        pl.DataFrame({"a": pl.Series(["x", None, "y", SECRET], dtype=pl.Enum(["x", "y", SECRET]))}),
        pa.table({"a": pa.array(["x", None, "y", SECRET]).dictionary_encode()}),
    ],
)
def test_text_and_categoricals_must_be_declared(made):
    rows = read_training(made, [1, 2, 3, 4], categories={"a": ["y", "x"]})
    np.testing.assert_array_equal(rows.design, [[0, 1], [1, 0]])
    with pytest.raises(UndeclaredCategory) as error:
        read_training(made, [1, 2, 3, 4])
    assert_says(error, "Column 'a'", "categories={'a': [...]}")
    assert_silent(error)


@pytest.mark.parametrize("values", [[1, 2], ["x", "y"], [None, None], [dt.date(2020, 1, 1)] * 2])
def test_an_object_column_is_refused_by_its_dtype_alone(values):
    frame = pd.DataFrame({"a": pd.Series(values, dtype=object)})
    with pytest.raises(UndeclaredCategory, match=r"Column 'a' has dtype object.*numeric dtype"):
        read_training(frame, [1, 2])


@frames
def test_dates_can_be_declared_but_moments_cannot(frame):
    day = dt.date(2020, 1, 1)
    if frame is not pd.DataFrame:
        made = frame({"d": [day, day]})
        with pytest.raises(UndeclaredCategory, match="Column 'd' has dtype Date"):
            read_training(made, [1, 2])
        rows = read_training(made, [1, 2], categories={"d": [day]})
        np.testing.assert_array_equal(rows.design, [[1], [1]])
    for value in (dt.datetime(2020, 1, 1, 12), dt.timedelta(days=1)):
        with pytest.raises(InvalidInput, match=r"Column 'd' .*convert it to a number first"):
            read_training(frame({"d": [value, value]}), [1, 2])


def test_arrays_of_dates_say_what_to_do():
    for dtype in ("M8[D]", "m8[s]"):
        with pytest.raises(InvalidInput, match=r"Column 0 .*convert it to a number first"):
            read_training(np.zeros((2, 1), dtype=dtype), [1, 2])


@pytest.mark.parametrize(
    ("categories", "fragment"),
    [
        ({"nope": ["x"]}, "no feature has the name 'nope'"),
        ({0: ["x"]}, "no feature has the name 0"),
        ({"y": ["x"]}, "no feature has the name 'y'"),
        ({"a": []}, "categories['a'] must be a list"),
        ({"a": "xy"}, "categories['a'] must be a list"),
        ({"a": {"x", "y"}}, "categories['a'] must be a list"),
        ({"a": np.array(["x", "y"])}, "categories['a'] must be a list"),
        ({"a": None}, "categories['a'] must be a list"),
        ({"a": ["x", "x"]}, "has a level twice"),
        ({"a": ["x", None]}, "a missing value is none"),
        ({"a": ["x", math.nan]}, "a missing value is none"),
        ({"a": ["x", pd.NA]}, "a missing value is none"),
        ({"a": [["x"]]}, "a level is"),
        ({"a": [dt.datetime(2020, 1, 1)]}, "a level is"),
        ({"a": [1, 2]}, "the levels do not fit the dtype"),
        ({"a": ["x"], "b": ["1", "2"]}, "the levels do not fit the dtype"),
        (["a"], "categories must map columns"),
    ],
)
@frames
def test_wrong_declarations(frame, categories, fragment):
    with pytest.raises(InvalidInput) as error:
        read_training(
            frame({"a": ["x", "y"], "b": [1, 2], "y": [1.0, 2.0]}), "y", categories=categories
        )
    assert_says(error, fragment)


def test_wrong_positions():
    with pytest.raises(InvalidInput, match="no feature has the position 2"):
        read_training(np.eye(2), [1, 2], categories={2: [1]})
    with pytest.raises(InvalidInput, match="no feature has the position 'x0'"):
        read_training(np.eye(2), [1, 2], categories={"x0": [1]})


def test_numpy_scalars_are_levels():
    rows = read_training(np.eye(2), [1, 2], categories={0: [np.int64(0), np.float64(1)]})
    assert rows.schema.columns[0].levels == (0, 1.0)
    assert rows.schema.design_names == ("x0=0", "x0=1.0", "x1")


def test_design_names_are_unique():
    frame = pl.DataFrame({"a": ["x"], "a=x": [1.0]})
    with pytest.raises(InvalidInput, match="would be called 'a=x'"):
        read_training(frame, [1], categories={"a": ["x"]})


# Privacy units

MOMENT = dt.datetime(2020, 2, 29, 13, 30, 0, 250000)
MOMENT_UTC = MOMENT.replace(tzinfo=dt.UTC)
DAY = dt.date(2020, 2, 29)


@pytest.mark.parametrize(
    ("values", "keys"),
    [
        ([7, -8, None, 7], [b"i7", b"i-8"]),
        ([2**60 + 1, 2**60, None, 2**60 + 1], [b"i1152921504606846977", b"i1152921504606846976"]),
        (["Zoë", "", None, "Zoë"], [b"sZo\xc3\xab", b"s"]),
        ([b"\x00a", b"b", None, b"\x00a"], [b"b\x00a", b"bb"]),
        ([1.0, 0.5, None, 1.0], [b"i1", b"f0.5"]),
        ([1e300, 1e-7, math.nan, 1e300], [b"i%d" % int(1e300), b"f1e-07"]),
        ([True, False, None, True], [b"i1", b"i0"]),
        ([Decimal("1.50"), Decimal("2.00"), None, Decimal("1.50")], [b"f1.5", b"i2"]),
        ([DAY, dt.date(1970, 1, 1), None, DAY], [b"d2020-02-29", b"d1970-01-01"]),
        (
            [MOMENT, dt.datetime(2020, 2, 29), None, MOMENT],
            [b"d2020-02-29T13:30:00.250000", b"d2020-02-29"],
        ),
        (
            [MOMENT_UTC, dt.datetime(2020, 1, 1, 5, tzinfo=dt.UTC), None, MOMENT_UTC],
            [b"d2020-02-29T13:30:00.250000", b"d2020-01-01T05:00:00"],
        ),
    ],
)
@pytest.mark.parametrize("kind", ["list", "array", "object", "pandas", "polars", "pyarrow"])
def test_equal_units_have_equal_keys_in_every_library(kind, values, keys):
    vector = SERIES.get(kind)
    if kind == "array":
        vector = np.array
    elif kind == "object":

        def vector(given):
            return pd.Series(given, dtype=object)

    elif kind == "pandas" and all(v is None or type(v) is int for v in values):

        def vector(given):
            return pd.Series(given, dtype="Int64")

    rows = read_training(np.eye(4), np.arange(4.0), privacy_unit=vector(values))
    found = [rows.units.keys[code] for code in rows.units.codes]
    assert found == [keys[0], keys[1], keys[0]]
    np.testing.assert_array_equal(rows.target, [0, 1, 3])


@pytest.mark.parametrize(
    ("units", "keys"),
    [
        (np.array([3, 1, 3], dtype=np.uint64), [b"i3", b"i1"]),
        (np.array([0.5, 1, 0.5], dtype=np.float32), [b"f0.5", b"i1"]),
        (np.array([0.5, 1, 0.5], dtype=np.longdouble), [b"f0.5", b"i1"]),
        (np.array(["b", "a", "b"]), [b"sb", b"sa"]),
        (np.array([b"b", b"a", b"b"]), [b"bb", b"ba"]),
        (np.array([True, False, True]), [b"i1", b"i0"]),
        (np.array(["2020-01", "2020-02", "2020-01"], "M8[M]"), [b"d2020-01-01", b"d2020-02-01"]),
        (
            np.array(["2020-01-01T05", "2020-01-01", "2020-01-01T05"], "M8[h]"),
            [b"d2020-01-01T05:00:00", b"d2020-01-01"],
        ),
        (
            np.array([1, 0, 1], "M8[ns]"),
            [b"d1970-01-01T00:00:00.000000001", b"d1970-01-01"],
        ),
        ([np.int64(3), np.str_("a"), 3.0], [b"i3", b"sa"]),
        ([1, "1", True], [b"i1", b"s1"]),
        ([UUID(int=5), 5, UUID(int=5)], [b"s00000000-0000-0000-0000-000000000005", b"i5"]),
        ([np.datetime64("2020-01-01"), dt.datetime(2020, 1, 1, 6), DAY.replace(2020, 1, 1)],
         [b"d2020-01-01", b"d2020-01-01T06:00:00"]),
        (("b", "a", "b"), [b"sb", b"sa"]),
        (pd.Categorical(["b", "a", "b"]), [b"sb", b"sa"]),
        (pd.Series(pd.Categorical([2**60 + 1, 1, 2**60 + 1])), [b"i%d" % (2**60 + 1), b"i1"]),
        (pd.Index(["b", "a", "b"]), [b"sb", b"sa"]),
        (pl.Series(["b", "a", "b"], dtype=pl.Categorical), [b"sb", b"sa"]),
        (pa.chunked_array([pa.array(["b", "a", "b"]).dictionary_encode()]), [b"sb", b"sa"]),
        (pd.Series([DAY, None, DAY], dtype=pd.ArrowDtype(pa.date32())), [b"d2020-02-29"]),
        (pd.Series(pd.to_datetime(["2020-01-01T01:00"] * 3).tz_localize("Europe/Vienna")),
         [b"d2020-01-01"]),
        (["\ud800", "a", "\ud800"], [b"s\xed\xa0\x80", b"sa"]),
        ([math.inf, -math.inf, math.inf], [b"finf", b"f-inf"]),
        ([-0.0, 1, 0], [b"i0", b"i1"]),
    ],
)  # fmt: skip
def test_other_identifiers(units, keys):
    rows = read_training(np.eye(3), [1, 2, 3], privacy_unit=units)
    assert sorted(rows.units.keys) == sorted(keys)
    found = [rows.units.keys[code] for code in rows.units.codes]
    assert found == ([keys[0], keys[1], keys[0]] if len(keys) == 2 else keys * len(found))


@pytest.mark.parametrize(
    "nothing",
    [
        None,
        math.nan,
        np.float64("nan"),
        np.datetime64("NaT", "s"),
        pd.NA,
        pd.NaT,
        Decimal("NaN"),
        Decimal("sNaN"),
        Decimal("1E+999999999"),
        10**5000,
        Fraction(1, 2),
        1j,
        {},
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_does_not_identify_a_unit_is_no_unit(nothing):
    units = np.empty(3, dtype=object)
    units[:] = [0.5, nothing, "a"]
    rows = read_training(np.eye(3), [1, 2, 3], privacy_unit=units)
    np.testing.assert_array_equal(rows.target, [1, 3])
    assert rows.units.keys == [b"f0.5", b"sa"]


def test_units_without_valid_rows_are_not_listed():
    rows = read_training([[1], [None], [3]], [1, 2, 3], privacy_unit=["a", "b", "a"])
    assert rows.units.keys == [b"sa"]
    assert rows.units.codes.tolist() == [0, 0]


@pytest.mark.parametrize(
    "units",
    [
        np.zeros(2, dtype="m8[s]"),
        np.zeros(2, dtype=complex),
        np.zeros(2, dtype="V3"),
        pl.Series([dt.timedelta(1)] * 2),
        pl.Series([[1], [2]]),
        pa.chunked_array([pa.array([[1], [2]])]),
    ],
)
def test_columns_that_cannot_identify_units(units):
    with pytest.raises(InvalidInput, match="The privacy unit has dtype"):
        read_training(np.eye(2), [1, 2], privacy_unit=units)


# Row independence

CELLS = {
    "number": st.one_of(
        st.none(),
        st.floats(width=64),
        st.sampled_from([math.nan, math.inf, 1e300, 5e-324, SECRET_NUMBER]),
    ),
    "whole": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
    "flag": st.one_of(st.none(), st.booleans()),
    "region": st.sampled_from([None, "north", "south", "west", SECRET]),
    "target": st.one_of(st.none(), st.floats(width=64)),
    "unit": st.one_of(st.none(), st.integers(2**53 - 3, 2**53 + 3)),
}
ROW = st.fixed_dictionaries(CELLS)
TYPES = {
    "number": (pl.Float64, pa.float64(), "float64", "Float64"),
    "whole": (pl.Int64, pa.int64(), "Int64", "Int64"),
    "flag": (pl.Boolean, pa.bool_(), "boolean", "boolean"),
    "region": (pl.String, pa.string(), "str", object),
    "target": (pl.Float64, pa.float64(), "float64", "Float64"),
    "unit": (pl.Int64, pa.int64(), "Int64", "Int64"),
}


def as_pandas(rows, at):
    return pd.DataFrame(
        {name: pd.Series([row[name] for row in rows], dtype=TYPES[name][at]) for name in TYPES}
    )


def as_polars(rows):
    return pl.DataFrame(rows, schema={name: kinds[0] for name, kinds in TYPES.items()})


def as_arrow(rows):
    schema = pa.schema([(name, kinds[1]) for name, kinds in TYPES.items()])
    return pa.Table.from_pylist(rows, schema=schema)


def as_object(rows):
    return np.array([[row[name] for name in TYPES] for row in rows], dtype=object)


def as_list(rows):
    return [[row[name] for name in TYPES] for row in rows]


BUILDERS = {
    "pandas": lambda rows: as_pandas(rows, 2),
    "pandas-other": lambda rows: as_pandas(rows, 3),
    "polars": as_polars,
    "pyarrow": as_arrow,
    "object": as_object,
    "list": as_list,
}


def flat(parts):
    return [row for part in parts for row in part]


def train(build, rows):
    made = build(rows)
    if build in (as_object, as_list):
        names = list(TYPES)
        columns = [[row[at] for row in made] for at in range(len(names))]
        features = [list(row[:4]) for row in made]
        if build is as_object:
            features = made[:, :4]
        return read_training(features, columns[4], categories={3: REGIONS}, privacy_unit=columns[5])
    return read_training(made, "target", categories={"region": REGIONS}, privacy_unit="unit")


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@settings(max_examples=60, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=6), other=ROW, data=st.data())
def test_a_row_knows_of_no_other_row(build, rows, other, data):
    at = data.draw(st.integers(0, len(rows) - 1))
    alone = [rows_of(train(build, [row])) for row in rows]
    assert rows_of(train(build, rows)) == flat(alone)

    added = [*rows[:at], other, *rows[at:]]
    of_other = rows_of(train(build, [other]))
    assert rows_of(train(build, added)) == flat([*alone[:at], of_other, *alone[at:]])

    changed = [*rows[:at], other, *rows[at + 1 :]]
    assert rows_of(train(build, changed)) == flat([*alone[:at], of_other, *alone[at + 1 :]])


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@settings(max_examples=30, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=6))
def test_every_library_agrees(build, rows):
    assert rows_of(train(build, rows)) == rows_of(train(as_polars, rows))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.lists(
            st.one_of(st.none(), st.integers(), st.floats(), st.booleans()), min_size=2, max_size=2
        ),
        min_size=1,
        max_size=6,
    )
)
def test_a_list_row_knows_of_no_other_row(rows):
    together = rows_of(read_training(rows, [0] * len(rows)))
    assert together == [kept for row in rows for kept in rows_of(read_training([row], [0]))]


@settings(max_examples=60, deadline=None)
@given(
    units=st.lists(
        st.one_of(
            st.none(),
            st.integers(),
            st.floats(),
            st.booleans(),
            st.text(max_size=3),
            st.binary(max_size=3),
            st.decimals(),
            st.dates(),
            st.datetimes(),
            st.fractions(),
            st.complex_numbers(),
            st.lists(st.integers(), max_size=2),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_a_unit_is_named_without_regard_to_others(units):
    def keys(given):
        column = np.empty(len(given), dtype=object)
        column[:] = given
        rows = read_training(np.ones((len(given), 1)), np.ones(len(given)), privacy_unit=column)
        return [rows.units.keys[code] for code in rows.units.codes]

    assert keys(units) == [key for unit in units for key in keys([unit])]


# Prediction


@frames
def test_prediction_keeps_every_row(frame):
    data = {"a": [1.0, None, math.inf, 4.0], "c": ["x", "y", None, SECRET]}
    schema = Schema((Column("a"), Column("c", ("x", "y"))), named=True)
    nan = math.nan
    np.testing.assert_array_equal(
        read_features(frame(data), schema),
        [[1, 1, 0], [nan, 0, 1], [math.inf, nan, nan], [4, nan, nan]],
    )


@pytest.mark.parametrize(
    ("names", "fragment"),
    [
        (["b", "a"], "Feature names must be in the same order as they were in fit.\n"),
        (
            ["a", "c"],
            "Feature names unseen at fit time:\n- c\nFeature names seen at fit time, yet ",
        ),
        (["a"], "Feature names seen at fit time, yet now missing:\n- b\n"),
        (
            ["a", "b", *"tuvwxyz"],
            "Feature names unseen at fit time:\n- t\n- u\n- v\n- w\n- x\n- ...",
        ),
    ],
)
@frames
def test_names_at_prediction(frame, names, fragment):
    schema = Schema((Column("a"), Column("b")), named=True)
    with pytest.raises(InvalidInput) as error:
        read_features(frame({name: [1.0] for name in names}), schema)
    assert_says(
        error, "The feature names should match those that were passed during fit.\n", fragment
    )


def test_the_number_of_columns_at_prediction():
    schema = Schema((Column("x0"), Column("x1")), named=False)
    with pytest.raises(
        InvalidInput, match="X has 3 features, but TukeyRegressor is expecting 2 features as input"
    ):
        read_features(np.eye(3), schema)


def test_names_on_one_side_only():
    named = Schema((Column("a"), Column("c", ("x",))), named=True)
    X = np.array([[1.0, "x"]], dtype=object)
    with pytest.warns(
        UserWarning,
        match="X does not have valid feature names, but TukeyRegressor was fitted with feature",
    ):
        np.testing.assert_array_equal(read_features(X, named), [[1, 1]])
    unnamed = Schema((Column("x0"),), named=False)
    with pytest.warns(
        UserWarning,
        match="X has feature names, but TukeyRegressor was fitted without feature names",
    ):
        np.testing.assert_array_equal(read_features(pl.DataFrame({"a": [1.0]}), unnamed), [[1]])


def test_dtypes_at_prediction():
    with pytest.raises(UndeclaredCategory, match="Column 'a'"):
        read_features(pl.DataFrame({"a": [SECRET]}), Schema((Column("a"),), named=True))
    with pytest.raises(InvalidInput, match="the levels do not fit"):
        read_features(pl.DataFrame({"a": ["1"]}), Schema((Column("a", (1, 2)),), named=True))


def test_the_schema_can_be_stored():
    schema = read_training(
        pl.DataFrame({"a": ["x"], "b": [1]}), [1], categories={"a": ["x", "y"]}
    ).schema
    assert pickle.loads(pickle.dumps(schema)) == schema


# Errors


@pytest.mark.parametrize(
    ("X", "kind", "fragment"),
    [
        (np.zeros(3), ValueError, "Expected 2D array, got 1D array instead. Reshape your data"),
        (pd.Series([1.0, 2.0, 3.0]), ValueError, "Expected 2D array, got 1D array instead"),
        (5.0, ValueError, "Expected 2D array, got scalar array instead"),
        (None, ValueError, "Expected 2D array, got scalar array instead"),
        (np.zeros((3, 1, 1)), ValueError, "Found array with dim 3. TukeyRegressor expected <= 2."),
        (np.zeros((3, 0)), ValueError, "0 feature(s) (shape=(3, 0)) while a minimum of 1 is requi"),
        (pd.DataFrame(index=range(3)), ValueError, "0 feature(s) (shape=(3, 0)) while a minimum"),
        (np.zeros((3, 1), dtype=complex), ValueError, "Complex data not supported"),
        (pd.DataFrame({"a": [SECRET_NUMBER * 1j] * 3}), ValueError, "Complex data not supported"),
        (sparse.csr_array(np.eye(3)), TypeError, "dense data is required"),
        (sparse.csr_matrix(np.eye(3)), TypeError, "Sparse"),
        (np.zeros(3, dtype=[("a", float)]), ValueError, "Structured arrays are not supported"),
        (np.zeros((3, 1), dtype="V7"), ValueError, "Column 0 has dtype void"),
        (np.ma.masked_array(np.eye(3)), ValueError, "X is a masked array"),
        ([[1, 2], [3], [4, 5]], ValueError, "its rows differ in length"),
        (pl.LazyFrame({"a": [1, 2, 3]}), ValueError, "call .collect()"),
        (pl.DataFrame({"a": [[1]] * 3}), ValueError, "Column 'a' has dtype List"),
        (np.array([[SECRET]] * 3), UndeclaredCategory, "Column 0 has dtype str_"),
        (np.array([[SECRET.encode()]] * 3), UndeclaredCategory, "Column 0 has dtype bytes_"),
        ([[1, SECRET], [3, 4], [4, 5]], UndeclaredCategory, "categories={0: [...]}"),
        (np.array([[1], [SECRET], [2]], dtype=object), InvalidInput, "must hold numbers only"),
        (np.array([[1], [SECRET], [2]], dtype=object), TypeError, "must hold numbers only"),
        (np.array([[1], [{SECRET: 1}], [2]], dtype=object), TypeError, "must be a number"),
        (np.array([[1], [1j * SECRET_NUMBER], [2]], dtype=object), TypeError, "must be a number"),
        (np.array([[1], [np.complex128(1j)], [2]], dtype=object), TypeError, "must be a number"),
        (pd.DataFrame([[1, 2]] * 3, columns=["a", "a"]), ValueError, "columns of the same name"),
        (pa.table([[1] * 3, [2] * 3], names=["a", "a"]), ValueError, "columns of the same name"),
        (pd.DataFrame([[1, 2]] * 3, columns=["a", 1]), TypeError, "Feature names are only support"),
    ],
)  # fmt: skip
def test_tables_that_are_refused(X, kind, fragment):
    with pytest.raises(kind) as error:
        read_training(X, [1.0, 2.0, 3.0])
    assert isinstance(error.value, InvalidInput)
    assert_says(error, fragment)
    assert_silent(error)


@pytest.mark.parametrize("X", [np.zeros((0, 3)), pl.DataFrame(schema={"a": pl.Float64})])
def test_a_table_without_rows(X):
    with pytest.raises(InvalidInput, match=r"0 sample\(s\) .* while a minimum of 1 is required"):
        read_training(X, [])


@pytest.mark.parametrize(
    ("y", "kind", "fragment"),
    [
        (None, ValueError, "requires y to be passed, but the target y is None"),
        ([1.0, 2.0], ValueError, "X and y have different numbers of rows"),
        (pl.Series([1.0, 2.0]), ValueError, "X and y have different numbers of rows"),
        (5.0, ValueError, "y should be a 1d array"),
        (np.eye(3), ValueError, "y should be a 1d array"),
        (pd.DataFrame(np.eye(3)), ValueError, "y should be a 1d array"),
        (np.zeros(3, dtype=complex), ValueError, "Complex data not supported"),
        ([SECRET, "b", "c"], ValueError, "The target has dtype str_"),
        (pl.Series([SECRET, "b", "c"]), ValueError, "The target has dtype String"),
        (pl.Series([[1], [2], [3]]), ValueError, "The target has dtype List"),
        (pd.Series([SECRET, 1, 2], dtype=object), ValueError, "The target has dtype object"),
        (pd.Series(pd.Categorical([SECRET] * 3)), ValueError, "The target has dtype Categorical"),
        (np.array([SECRET, 1, 2], dtype=object), TypeError, "must hold numbers only"),
        (np.zeros(3, dtype="M8[s]"), ValueError, "The target has dtype datetime64"),
        ("charges", ValueError, "y='charges' names a column, but X has no column names"),
        (sparse.csr_array(np.eye(3)), TypeError, "Sparse"),
    ],
)
def test_targets_that_are_refused(y, kind, fragment):
    with pytest.raises(kind) as error:
        read_training(np.eye(3), y)
    assert isinstance(error.value, InvalidInput)
    assert_says(error, fragment)
    assert_silent(error)


@pytest.mark.parametrize("as_column", [lambda y: y.reshape(-1, 1), pd.DataFrame, pl.DataFrame])
def test_a_column_vector_is_accepted_with_a_warning(as_column):
    y = np.array([1.0, 2.0, 3.0])
    with pytest.warns(DataConversionWarning, match="A column-vector y was passed when a 1d array"):
        rows = read_training(np.eye(3), as_column(y))
    np.testing.assert_array_equal(rows.target, y)


@frames
def test_names_that_do_not_fit(frame):
    made = frame(patients())
    with pytest.raises(InvalidInput, match="y='cost': X has no column of this name"):
        read_training(made, "cost")
    with pytest.raises(InvalidInput, match="privacy_unit='who': X has no column of this name"):
        read_training(made, "charges", privacy_unit="who")
    with pytest.raises(InvalidInput, match="'charges' cannot be both y and privacy_unit"):
        read_training(made, "charges", privacy_unit="charges")
    with pytest.raises(InvalidInput, match=r"0 feature\(s\)"):
        read_training(frame({"y": [1.0]}), "y")


def test_units_that_do_not_fit():
    with pytest.raises(InvalidInput, match="X and privacy_unit have different numbers of rows"):
        read_training(np.eye(3), [1, 2, 3], privacy_unit=["a", "b"])
    with pytest.raises(InvalidInput, match="privacy_unit='id' names a column, but X has no column"):
        read_training(np.eye(3), [1, 2, 3], privacy_unit="id")
    for units in (np.eye(3), [["a"], ["b"], ["c"]], pd.DataFrame({"a": [1, 2, 3]}), {"a", "b"}):
        with pytest.raises(InvalidInput, match="privacy_unit should be a 1d array"):
            read_training(np.eye(3), [1, 2, 3], privacy_unit=units)


# scikit-learn's conventions


class LeastSquares(RegressorMixin, BaseEstimator):
    """The smallest estimator that takes its rows from here."""

    def fit(self, X, y):
        rows = read_training(X, y)
        self.schema_ = rows.schema
        self.n_features_in_ = rows.schema.n_features_in
        if rows.schema.named:
            self.feature_names_in_ = rows.schema.feature_names_in
        if not len(rows.target):
            raise ValueError("no rows")
        ones = np.ones((len(rows.target), 1))
        self.coef_ = np.linalg.lstsq(np.hstack([ones, rows.design]), rows.target)[0]
        return self

    def predict(self, X):
        check_is_fitted(self)
        return read_features(X, self.schema_) @ self.coef_[1:] + self.coef_[0]

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags


@parametrize_with_checks([LeastSquares()])
def test_scikit_learn_estimator_checks(estimator, check):
    check(estimator)
