"""Rows come in: arrays, pandas, polars and Arrow become numeric design rows.

Formal guarantees
-----------------
What becomes of a row depends on that row and on the schema alone: it is kept or dropped, and
encoded, in the same bits whatever the other rows hold. The schema is made of dtypes, names and
declarations, never of values. Nothing else leaves: dropped rows are neither counted nor reported,
and no error or warning carries a value.

A row is dropped if a feature or the target is missing or not finite, if a value is not among the
declared levels, or if it has no privacy unit.

One thing counts as schema although NumPy has no dtype for it: that a list, or an array of dtype
``object``, is made of numbers. One that is not is refused as a whole.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from tukeyreg import _tables
from tukeyreg._tables import ESTIMATOR, Array, Table, array_numbers, read_beside, read_table
from tukeyreg.errors import InvalidInput, UndeclaredCategory
from tukeyreg.units import Units, identify

__all__ = ["Column", "Schema", "TrainingRows", "Units", "read_features", "read_training"]

Level: TypeAlias = str | int | float | Decimal | bytes | date
Categories: TypeAlias = Mapping[str, Sequence[Level]] | Mapping[int, Sequence[Level]]

_LEVEL_TYPES: dict[_tables.Kind, tuple[type, ...]] = {
    "number": (int, float, Decimal),
    "string": (str,),
    "date": (date,),
}


@dataclass(frozen=True)
class Column:
    """An input column: its name, and its levels if it is a declared category.

    Examples
    --------
    >>> Column("region", ("north", "south")).design_names
    ('region=north', 'region=south')
    """

    name: str
    levels: tuple[Level, ...] | None = None

    @property
    def design_names(self) -> tuple[str, ...]:
        """The names of the design columns that it becomes."""
        if self.levels is None:
            return (self.name,)
        return tuple(f"{self.name}={level!s}" for level in self.levels)


@dataclass(frozen=True)
class Schema:
    """What is public about the features: names and declared levels, in order.

    Attributes
    ----------
    columns : tuple of Column
        The input columns. Without names in the input they are called x0, x1, ...
    named : bool
        Whether the names come from the input.

    Examples
    --------
    >>> schema = Schema((Column("age"), Column("region", ("north", "south"))), named=True)
    >>> schema.n_features_in, schema.design_names
    (2, ('age', 'region=north', 'region=south'))
    """

    columns: tuple[Column, ...]
    named: bool

    @property
    def n_features_in(self) -> int:
        """The number of input columns."""
        return len(self.columns)

    @property
    def feature_names_in(self) -> Array | None:
        """The names of the input columns as scikit-learn keeps them, or None without names."""
        if not self.named:
            return None
        return np.array([column.name for column in self.columns], dtype=object)

    @property
    def design_names(self) -> tuple[str, ...]:
        """The names of the design columns."""
        return tuple(name for column in self.columns for name in column.design_names)

    @property
    def n_design(self) -> int:
        """The number of design columns."""
        return sum(len(column.levels or (None,)) for column in self.columns)


@dataclass(frozen=True, eq=False)
class TrainingRows:
    """The rows that can be used for training.

    Attributes
    ----------
    design : ndarray of shape (n_valid, n_design)
        C-contiguous; float32 if every numeric column is, otherwise float64. It is the caller's
        own array where nothing had to be changed: do not write to it.
    target : ndarray of shape (n_valid,)
        In float64.
    units : Units or None
        The privacy unit of each row; None where each row is its own.
    schema : Schema
        What a row for prediction must look like.
    kept : ndarray of bool, shape (n_rows,)
        Which input rows these are.
    all_units : Units or None
        The privacy unit of each input row, -1 for a row that has none.
    """

    design: Array
    target: npt.NDArray[np.float64]
    units: Units | None
    schema: Schema
    kept: npt.NDArray[np.bool_]
    all_units: Units | None

    @property
    def n_units(self) -> int:
        """How many units the input has, rows that cannot be used included."""
        return len(self.kept) if self.all_units is None else len(self.all_units.keys)

    @property
    def n_valid_units(self) -> int:
        """How many units have a row here."""
        return len(self.target) if self.units is None else len(self.units.keys)


def read_training(
    X: Any, y: Any, *, categories: Categories | None = None, privacy_unit: Any = None
) -> TrainingRows:
    """Turn a table and its target into the rows to train on.

    Parameters
    ----------
    X : array-like of shape (n_samples, n_features) or data frame
        NumPy array, list of lists, pandas or polars DataFrame, Arrow table, or whatever eager
        frame narwhals reads. Booleans count as 0 and 1.
    y : array-like of shape (n_samples,) or str
        The target, or the name of the column of `X` that holds it.
    categories : mapping of column to list of levels, optional
        The columns to encode one-hot, by name, or by position if `X` has no names. Levels are
        public, so they are declared and never read from the data. Every level gets a column.
    privacy_unit : array-like of shape (n_samples,) or str, optional
        To whom each row belongs, or the name of the column of `X` that tells.

    Returns
    -------
    TrainingRows
        Without the rows that cannot be used.

    Raises
    ------
    InvalidInput
        If shapes, dtypes or names do not fit together.
    UndeclaredCategory
        If a column is not numeric and has no declared levels.

    Examples
    --------
    >>> import pandas as pd
    >>> frame = pd.DataFrame({
    ...     "age": [44, 51, None],
    ...     "region": ["north", "south", "north"],
    ...     "charges": [310.5, 275.0, 120.0],
    ...     "patient": ["p1", "p2", "p1"],
    ... })
    >>> rows = read_training(
    ...     frame, "charges", categories={"region": ["north", "south"]}, privacy_unit="patient"
    ... )
    >>> rows.design
    array([[44.,  1.,  0.],
           [51.,  0.,  1.]])
    >>> rows.target
    array([310.5, 275. ])
    >>> rows.units.keys
    [b'sp1', b'sp2']
    """
    if y is None:
        raise InvalidInput(
            f"This {ESTIMATOR} estimator requires y to be passed, but the target y is None."
        )
    table = read_table(X, with_categories=bool(categories))
    target = read_beside(table, y, "y")
    unit = None if privacy_unit is None else read_beside(table, privacy_unit, "privacy_unit")
    features = table.without([name for name in (y, privacy_unit) if isinstance(name, str)])
    _check_size(features)
    schema = _declare(features, categories)
    _check_features(features, schema)
    _check_target(target)
    if unit is not None:
        _check_unit(unit)

    design = _encode(features, schema)
    numbers = target.numbers().astype(np.float64, copy=False)
    valid = _finite_rows(design) & np.isfinite(numbers)
    units = all_units = None
    if unit is not None:
        all_units, known = identify(unit)
        valid &= known
        units = all_units.of_rows(valid)
    if not valid.all():
        design, numbers = np.ascontiguousarray(design[valid]), numbers[valid]
    return TrainingRows(design, numbers, units, schema, valid, all_units)


def read_features(X: Any, schema: Schema) -> Array:
    """Turn a table into design rows for prediction, one for each row.

    Parameters
    ----------
    X : array-like of shape (n_samples, n_features) or data frame
        The columns of the training features, in the same order.
    schema : Schema
        The schema of the training rows.

    Returns
    -------
    ndarray of shape (n_samples, n_design)
        NaN where a value is missing, and in all columns of a category where the value is not
        among the declared levels: such a row has no prediction.

    Raises
    ------
    InvalidInput
        If names, dtypes or the number of columns differ from training.

    Warns
    -----
    UserWarning
        If only one of the training features and `X` has names.

    Examples
    --------
    >>> import pandas as pd
    >>> schema = Schema((Column("age"), Column("region", ("north", "south"))), named=True)
    >>> read_features(pd.DataFrame({"age": [44, 51], "region": ["south", "west"]}), schema)
    array([[44.,  0.,  1.],
           [51., nan, nan]])
    """
    table = read_table(X, with_categories=any(column.levels for column in schema.columns))
    _check_size(table)
    _check_names(table.names, schema)
    if len(table.columns) != schema.n_features_in:
        raise InvalidInput(
            f"X has {len(table.columns)} features, but {ESTIMATOR} is expecting "
            f"{schema.n_features_in} features as input."
        )
    _check_features(table, schema)
    return _encode(table, schema)


# Checking the schema


def _declare(table: Table, categories: Categories | None) -> Schema:
    names = table.names or tuple(f"x{at}" for at in range(len(table.columns)))
    if categories is not None and not isinstance(categories, Mapping):
        raise InvalidInput("categories must map columns to lists of levels: {column: [...]}.")
    declared: dict[Any, Any] = dict(categories or {})
    keys = [table.key(at) for at in range(len(names))]
    for key in declared:
        if key not in keys:
            known_by = "position" if table.names is None else "name"
            raise InvalidInput(f"categories: no feature has the {known_by} {key!r}.")
    levels = {key: _levels(key, given) for key, given in declared.items()}
    schema = Schema(
        tuple(Column(name, levels.get(key)) for name, key in zip(names, keys, strict=True)),
        named=table.names is not None,
    )
    repeated = [name for name, times in Counter(schema.design_names).items() if times > 1]
    if repeated:
        raise InvalidInput(f"Several design columns would be called {repeated[0]!r}.")
    return schema


def _levels(key: str | int, given: Any) -> tuple[Level, ...]:
    if not isinstance(given, list | tuple) or not given:
        raise InvalidInput(f"categories[{key!r}] must be a list of levels, at least one.")
    levels = tuple(level.item() if isinstance(level, np.generic) else level for level in given)
    if not all(_is_level(level) for level in levels):
        raise InvalidInput(
            f"categories[{key!r}]: a level is a string, a number, a date or bytes; a missing "
            "value is none."
        )
    if len(set(levels)) < len(levels):
        raise InvalidInput(f"categories[{key!r}] has a level twice.")
    return levels


def _is_level(level: Any) -> TypeGuard[Level]:
    if isinstance(level, datetime):
        return False
    return isinstance(level, str | int | float | Decimal | bytes | date) and level == level


def _check_size(table: Table) -> None:
    if not table.n_rows:
        raise InvalidInput(
            f"Found array with 0 sample(s) (shape=(0, {len(table.columns)})) while a minimum of "
            "1 is required."
        )
    if not table.columns:
        raise InvalidInput(
            f"Found array with 0 feature(s) (shape=({table.n_rows}, 0)) while a minimum of 1 is "
            "required."
        )


def _check_features(table: Table, schema: Schema) -> None:
    for at, (column, declared) in enumerate(zip(table.columns, schema.columns, strict=True)):
        _check_feature(column, repr(table.key(at)), declared.levels)


def _check_feature(column: _tables.Column, key: str, levels: tuple[Level, ...] | None) -> None:
    kind, dtype = column.kind, column.dtype_name
    _refuse_complex(column)
    if kind in {"datetime", "duration"}:
        raise InvalidInput(
            f"Column {key} holds dates or times ({dtype}): convert it to a number first, for "
            "example to days since a fixed date."
        )
    if kind == "other":
        raise InvalidInput(f"Column {key} has dtype {dtype}, which is neither number nor text.")
    if levels is None:
        if kind not in {"number", "object"}:
            raise UndeclaredCategory(
                f"Column {key} has dtype {dtype}, which is not numeric. Declare its levels: "
                f"categories={{{key}: [...]}} (they are public, and never read from the data), "
                "or convert it to a numeric dtype."
            )
    elif not all(isinstance(level, _LEVEL_TYPES.get(kind, object)) for level in levels):
        raise InvalidInput(f"categories[{key}]: the levels do not fit the dtype {dtype}.")


def _check_target(target: _tables.Column) -> None:
    _refuse_complex(target)
    if target.kind not in {"number", "object"}:
        raise InvalidInput(
            f"The target has dtype {target.dtype_name}: convert it to a numeric dtype."
        )


def _check_unit(unit: _tables.Column) -> None:
    if unit.kind in {"complex", "duration", "other"}:
        raise InvalidInput(
            f"The privacy unit has dtype {unit.dtype_name}: identify units by integers, text, "
            "bytes or dates."
        )


def _refuse_complex(column: _tables.Column) -> None:
    if column.kind == "complex":
        raise InvalidInput("Complex data not supported.")


def _check_names(names: tuple[str, ...] | None, schema: Schema) -> None:
    fitted = tuple(column.name for column in schema.columns) if schema.named else None
    if names == fitted:
        return
    if names is None:
        _warn(f"X does not have valid feature names, but {ESTIMATOR} was fitted with")
        return
    if fitted is None:
        _warn(f"X has feature names, but {ESTIMATOR} was fitted without")
        return
    unseen, missing = sorted(set(names) - set(fitted)), sorted(set(fitted) - set(names))
    message = "The feature names should match those that were passed during fit.\n"
    if unseen:
        message += "Feature names unseen at fit time:\n" + _listed(unseen)
    if missing:
        message += "Feature names seen at fit time, yet now missing:\n" + _listed(missing)
    if not unseen and not missing:
        message += "Feature names must be in the same order as they were in fit.\n"
    raise InvalidInput(message)


def _warn(message: str) -> None:
    warnings.warn(f"{message} feature names", UserWarning, stacklevel=3)


def _listed(names: Sequence[str], at_most: int = 5) -> str:
    more = "- ...\n" if len(names) > at_most else ""
    return "".join(f"- {name}\n" for name in names[:at_most]) + more


# Encoding rows


def _encode(table: Table, schema: Schema) -> Array:
    """Design rows: NaN where a value is missing or not among the levels."""
    if table.array is not None and all(column.levels is None for column in schema.columns):
        return array_numbers(table.array)
    numeric = [
        column
        for column, declared in zip(table.columns, schema.columns, strict=True)
        if declared.levels is None
    ]
    single = bool(numeric) and all(column.is_float32 for column in numeric)
    design = np.zeros((table.n_rows, schema.n_design), np.float32 if single else np.float64)
    start = 0
    for column, declared in zip(table.columns, schema.columns, strict=True):
        if declared.levels is None:
            design[:, start] = column.numbers()
            start += 1
        else:
            stop = start + len(declared.levels)
            _encode_one_hot(column, declared.levels, design[:, start:stop])
            start = stop
    return design


def _encode_one_hot(column: _tables.Column, levels: tuple[Level, ...], block: Array) -> None:
    present, values = column.values()
    positions = np.full(len(column), -1)
    positions[present] = _level_positions(values, levels)
    known = positions >= 0
    block[known, positions[known]] = 1.0
    block[~known] = np.nan


def _level_positions(values: list[Any], levels: tuple[Level, ...]) -> list[int]:
    position: dict[Any, int] = {level: at for at, level in enumerate(levels)}
    try:
        return [position.get(value, -1) for value in values]
    except TypeError:
        return [position.get(value, -1) if _is_hashable(value) else -1 for value in values]


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _finite_rows(design: Array) -> npt.NDArray[np.bool_]:
    finite = np.isfinite(design)
    if finite.all():  # much faster than row by row
        return np.ones(len(design), dtype=bool)
    return np.asarray(finite.all(axis=1))
