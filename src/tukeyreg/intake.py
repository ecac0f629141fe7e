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
from dataclasses import dataclass, replace
from datetime import date, datetime
from decimal import Decimal
from functools import cached_property
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from tukeyreg import _tables
from tukeyreg._tables import (
    ESTIMATOR,
    Array,
    Table,
    array_numbers,
    numbers_of,
    read_beside,
    read_table,
)
from tukeyreg.errors import InvalidInput, UndeclaredCategory
from tukeyreg.kernel import Columns, JoinedColumns, finite
from tukeyreg.units import Units, identify

__all__ = [
    "Column",
    "Schema",
    "TrainingRows",
    "Units",
    "declare",
    "read_batch",
    "read_features",
    "read_training",
]

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
    def declared(self) -> dict[str, tuple[Level, ...]]:
        """The levels of the columns that have them."""
        return {column.name: column.levels for column in self.columns if column.levels is not None}

    @property
    def level_slices(self) -> tuple[slice, ...]:
        """Which design columns are the levels of one category, for every category."""
        ends = np.cumsum([0, *(len(column.design_names) for column in self.columns)]).tolist()
        return tuple(
            slice(start, stop)
            for column, start, stop in zip(self.columns, ends[:-1], ends[1:], strict=True)
            if column.levels is not None
        )

    @property
    def n_design(self) -> int:
        """The number of design columns."""
        return sum(len(column.levels or (None,)) for column in self.columns)


@dataclass(frozen=True, eq=False, repr=False)
class TrainingRows:
    """Rows to train on, where they lie, and which of them can be used.

    Attributes
    ----------
    columns : Columns
        The design columns and the target of all input rows. They are the caller's own arrays
        where nothing had to be converted: do not write to them.
    schema : Schema
        What a row for prediction must look like.
    whole : ndarray of shape (n_rows, n_design) or None
        All design rows side by side, where they lie so.
    undeclared : ndarray of bool, shape (n_rows,), or None
        Which rows have a value that is not among the declared levels.
    all_units : Units or None
        The privacy unit of each input row, -1 for a row that has none; None where each row is
        its own unit.
    threads : int
        How many may look at the rows at a time.
    """

    columns: Columns
    schema: Schema
    whole: Array | None
    undeclared: npt.NDArray[np.bool_] | None
    all_units: Units | None
    threads: int = 8

    def __len__(self) -> int:
        return len(self.columns)

    @cached_property
    def kept(self) -> npt.NDArray[np.bool_]:
        """Which input rows can be used. It takes a pass over all of them."""
        kept = finite(self.columns, threads=self.threads)
        if self.undeclared is not None:
            kept &= ~self.undeclared
        if self.all_units is not None:
            kept &= self.all_units.codes >= 0
        return kept

    @cached_property
    def excluded(self) -> npt.NDArray[np.bool_] | None:
        """Rows that cannot be used although all their numbers are finite; None if there are none.

        Who reads numbers notices for itself when one is not finite.
        """
        excluded = self.undeclared
        if self.all_units is not None and (without := self.all_units.codes < 0).any():
            excluded = without if excluded is None else excluded | without
        return excluded

    @cached_property
    def design(self) -> Array:
        """The design rows that can be used, as one C-contiguous array.

        In float32 if every numeric column is, otherwise in float64.
        """
        whole = self.whole
        if whole is not None and whole.dtype.kind == "f" and whole.flags.c_contiguous:
            return whole if self.kept.all() else np.ascontiguousarray(whole[self.kept])
        return self.columns.matrix(self.kept, _precision(self.columns, self.schema))

    @cached_property
    def target(self) -> npt.NDArray[np.float64]:
        """The target of the rows that can be used, in double precision."""
        return self.columns.labels(slice(None) if self.kept.all() else self.kept)

    @cached_property
    def units(self) -> Units | None:
        """The privacy unit of each row that can be used; None where each row is its own."""
        return None if self.all_units is None else self.all_units.of_rows(self.kept)

    @property
    def n_units(self) -> int:
        """How many units the input has, rows that cannot be used included."""
        return len(self) if self.all_units is None else len(self.all_units.keys)

    @cached_property
    def n_valid_units(self) -> int:
        """How many units have a row that can be used."""
        return int(self.kept.sum()) if self.units is None else len(self.units.keys)


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
    table, target, unit = _read_parts(X, y, categories, privacy_unit)
    _check_size(table)
    return _rows_of(table, target, unit, _declare_all(table, target, unit, categories))


def declare(
    X: Any, y: str, *, categories: Categories | None = None, privacy_unit: str | None = None
) -> Schema:
    """Check what can be checked without rows: names, types and declarations.

    Parameters are those of :func:`read_training`; `X` is a frame of the right types, and how many
    rows it has does not matter.

    Examples
    --------
    >>> import pyarrow as pa
    >>> types = pa.schema([("age", pa.int64()), ("charges", pa.float64())])
    >>> declare(types.empty_table(), "charges").design_names
    ('age',)
    """
    table, target, unit = _read_parts(X, y, categories, privacy_unit)
    if not table.columns:
        raise InvalidInput("no features: the target and the privacy unit are the only columns.")
    return _declare_all(table, target, unit, categories)


def read_batch(
    X: Any, y: str, schema: Schema, privacy_unit: str | None = None, *, threads: int = 1
) -> TrainingRows:
    """Read some rows of a table that was declared before, none of them being fine.

    `X` has the types that :func:`declare` has seen.
    """
    table, target, unit = _read_parts(X, y, schema.declared, privacy_unit)
    return replace(_rows_of(table, target, unit, schema), threads=threads)


def _read_parts(
    X: Any, y: Any, categories: Any, privacy_unit: Any
) -> tuple[Table, _tables.Column, _tables.Column | None]:
    """Features, target and privacy unit."""
    if y is None:
        raise InvalidInput(
            f"This {ESTIMATOR} estimator requires y to be passed, but the target y is None."
        )
    table = read_table(X, with_categories=bool(categories))
    target = read_beside(table, y, "y")
    unit = None if privacy_unit is None else read_beside(table, privacy_unit, "privacy_unit")
    return (
        table.without([name for name in (y, privacy_unit) if isinstance(name, str)]),
        target,
        unit,
    )


def _declare_all(
    features: Table,
    target: _tables.Column,
    unit: _tables.Column | None,
    categories: Categories | None,
) -> Schema:
    schema = _declare(features, categories)
    _check_features(features, schema)
    _check_target(target)
    if unit is not None:
        _check_unit(unit)
    return schema


def _rows_of(
    features: Table, target: _tables.Column, unit: _tables.Column | None, schema: Schema
) -> TrainingRows:
    units = None if unit is None else identify(unit)[0]
    ends = _pieces_of([*features.columns, target])
    if ends is not None:
        columns, undeclared = _joined(features, target, schema, ends)
        return TrainingRows(columns, schema, None, undeclared, units)
    numbers = target.numbers()
    if _is_plain(features, schema):
        assert features.array is not None
        whole = numbers_of(features.array)
        return TrainingRows(Columns.of(whole, numbers), schema, whole, None, units)
    arrays, undeclared = _design_columns(features, schema)
    return TrainingRows(Columns(arrays, numbers), schema, None, undeclared, units)


def _pieces_of(columns: Sequence[_tables.Column]) -> list[int] | None:
    """Where pieces end if all columns are in the same pieces, more than one, and not all in one."""
    found = {column.piece_ends() for column in columns}
    ends = found.pop()
    return list(ends) if not found and len(ends) > 1 else None


def _joined(
    features: Table, target: _tables.Column, schema: Schema, ends: list[int]
) -> tuple[Columns, npt.NDArray[np.bool_] | None]:
    """Columns piece by piece, where they lie."""
    parts, unknown = [], []
    for start, stop in zip([0, *ends[:-1]], ends, strict=True):
        rows = slice(start, stop)
        piece = Table(features.names, tuple(c.piece(rows) for c in features.columns), stop - start)
        arrays, undeclared = _design_columns(piece, schema)
        parts.append(Columns(arrays, target.piece(rows).numbers()))
        unknown.append(np.zeros(stop - start, bool) if undeclared is None else undeclared)
    undeclared = np.concatenate(unknown)
    return JoinedColumns(parts), undeclared if undeclared.any() else None


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


def _is_plain(table: Table, schema: Schema) -> bool:
    return table.array is not None and all(column.levels is None for column in schema.columns)


def _encode(table: Table, schema: Schema) -> Array:
    """Design rows: NaN where a value is missing or not among the levels."""
    if _is_plain(table, schema):
        assert table.array is not None
        return array_numbers(table.array)
    columns = Columns(_design_columns(table, schema)[0], np.zeros(table.n_rows, np.uint8))
    design = columns.matrix(dtype=_precision(columns, schema))
    start = 0
    for column in schema.columns:
        stop = start + len(column.design_names)
        if column.levels is not None:
            block = design[:, start:stop]
            block[~block.any(axis=1)] = np.nan
        start = stop
    return design


def _precision(columns: Columns, schema: Schema) -> type[np.floating]:
    """Single precision if every column of numbers has it, otherwise double."""
    of_level = [column.levels is not None for column in schema.columns for _ in column.design_names]
    single = [
        dtype == np.float32
        for dtype, level in zip(columns.dtypes, of_level, strict=True)
        if not level
    ]
    return np.float32 if single and all(single) else np.float64


def _design_columns(
    table: Table, schema: Schema
) -> tuple[list[Array], npt.NDArray[np.bool_] | None]:
    """Design columns, a byte for each level, and which rows have an undeclared value."""
    found: list[Array] = []
    undeclared: npt.NDArray[np.bool_] | None = None
    for column, declared in zip(table.columns, schema.columns, strict=True):
        if declared.levels is None:
            found.append(column.numbers())
            continue
        position = _positions_of(column, declared.levels)
        unknown = position < 0
        undeclared = unknown if undeclared is None else undeclared | unknown
        found += [(position == at).view(np.uint8) for at in range(len(declared.levels))]
    return found, undeclared


def _positions_of(column: _tables.Column, levels: tuple[Level, ...]) -> npt.NDArray[np.int32]:
    """Which of the levels every value is; -1 for none of them."""
    coded = column.coded()
    if coded is not None:
        codes, distinct = coded
        of_code = np.array([*_level_positions(distinct, levels), -1], dtype=np.int32)
        return of_code[codes]
    present, values = column.values()
    positions = np.full(len(column), -1, dtype=np.int32)
    positions[present] = _level_positions(values, levels)
    return positions


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
