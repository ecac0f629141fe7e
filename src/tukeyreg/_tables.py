"""What was given, array or frame, as columns behind one interface.

Whether a column is accepted is decided by its dtype alone, never by what is in it. Values are
converted one by one: no value, missing or not, changes how another is read. Narwhals turns
integers into floats when one of them is missing, and guesses the type of an ``object`` column of
pandas from its values; both are avoided here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast

import narwhals.stable.v2 as nw
import numpy as np
import numpy.typing as npt
from scipy.sparse import issparse
from sklearn.exceptions import DataConversionWarning

from tukeyreg.errors import InvalidInput
from tukeyreg.kernel import readable

__all__ = [
    "ESTIMATOR",
    "Array",
    "ArrayColumn",
    "Column",
    "InvalidTypeError",
    "Kind",
    "SeriesColumn",
    "Table",
    "array_numbers",
    "numbers_of",
    "read_beside",
    "read_table",
]

ESTIMATOR = "TukeyRegressor"  # scikit-learn's conventions name the estimator in some messages

Array: TypeAlias = npt.NDArray[Any]
Kind: TypeAlias = Literal[
    "number",  # also booleans
    "string",
    "date",
    "datetime",
    "duration",  # also times of the day
    "label",  # can only be compared with declared levels: categorical, binary, object of a frame
    "object",  # of an array: may be all numbers
    "complex",
    "other",
]

_KINDS_OF_ARRAYS: dict[str, Kind] = {
    **dict.fromkeys("biuf", "number"),
    **dict.fromkeys("UT", "string"),
    "S": "label",
    "M": "datetime",
    "m": "duration",
    "O": "object",
    "c": "complex",
}


class InvalidTypeError(InvalidInput, TypeError):
    """Invalid input for which scikit-learn's conventions ask for a ``TypeError``."""


@dataclass(frozen=True)
class ArrayColumn:
    """A one-dimensional NumPy array."""

    array: Array

    @property
    def kind(self) -> Kind:
        """What the dtype allows."""
        return _KINDS_OF_ARRAYS.get(self.array.dtype.kind, "other")

    @property
    def dtype_name(self) -> str:
        """The dtype, for messages; without the length of strings, which a list has from values."""
        return self.array.dtype.type.__name__

    def __len__(self) -> int:
        return len(self.array)

    def numbers(self) -> Array:
        """Every value as a number, NaN where it is missing."""
        return numbers_of(self.array)

    def integers(self) -> Array | None:
        """The array, if it holds integers that fit into 64 bits with a sign."""
        return self.array if _is_signed_word(self.array) else None

    def values(self) -> tuple[npt.NDArray[np.bool_], list[Any]]:
        """Where a value is present, and those values as Python objects."""
        return np.ones(len(self.array), dtype=bool), self.array.tolist()

    def coded(self) -> None:
        """An array has no dictionary."""

    def piece_ends(self) -> tuple[int, ...]:
        """An array is in one piece."""
        return (len(self.array),)

    def piece(self, rows: slice) -> ArrayColumn:
        """Some rows."""
        return ArrayColumn(self.array[rows])

    def moments(self) -> tuple[npt.NDArray[np.bool_], Array]:
        """Where a date and time is present, and those as ``datetime64``."""
        return np.ones(len(self.array), dtype=bool), self.array


@dataclass(frozen=True)
class SeriesColumn:
    """A column of a frame or a Series, read through narwhals."""

    series: nw.Series[Any]

    @classmethod
    def of_frame(cls, frame: nw.DataFrame[Any]) -> tuple[SeriesColumn, ...]:
        """All columns of a frame, in order."""
        return tuple(cls(cast("nw.Series[Any]", series)) for series in frame.iter_columns())

    def _array(self) -> Array:
        """Values as NumPy sees them; where Arrow has them in one piece, without a copy."""
        if self.series.implementation.is_pyarrow():
            native = nw.to_native(self.series)
            if native.num_chunks == 1:
                return np.asarray(native.chunk(0).to_numpy(zero_copy_only=False))
        return self.series.to_numpy()

    @property
    def _numpy_dtype(self) -> np.dtype[Any] | None:
        dtype = getattr(nw.to_native(self.series), "dtype", None)
        return dtype if isinstance(dtype, np.dtype) else None

    @property
    def kind(self) -> Kind:
        """What the dtype allows."""
        if self._numpy_dtype is not None and self._numpy_dtype.kind in "Oc":
            # Asking narwhals would look at the values.
            return "label" if self._numpy_dtype.kind == "O" else "complex"
        dtype = self.series.dtype
        if dtype.is_numeric() or dtype == nw.Boolean:
            return "number"
        if dtype == nw.String:
            return "string"
        if dtype == nw.Date:
            return "date"
        if dtype == nw.Datetime:
            return "datetime"
        if dtype in (nw.Duration, nw.Time):
            return "duration"
        return "other" if dtype.is_nested() else "label"

    @property
    def dtype_name(self) -> str:
        """The dtype, for messages; without its parameters, which can hold categories."""
        if self._numpy_dtype is not None:
            return self._numpy_dtype.name
        return type(self.series.dtype).__name__

    def __len__(self) -> int:
        return len(self.series)

    def numbers(self) -> Array:
        """Every value as a number, NaN where it is missing."""
        if self.series.dtype in (nw.Boolean, nw.Decimal, nw.Int128, nw.UInt128):
            present, values = self.values()
            numbers = np.full(len(self), np.nan)
            numbers[present] = [_as_float(value) for value in values]
            return numbers
        return numbers_of(self._array())

    def integers(self) -> Array | None:
        """The values, if they are integers that fit into 64 bits with a sign, none missing."""
        if self.kind != "number" or not self.series.dtype.is_integer():
            return None
        if self.series.null_count():
            return None
        array = self._array()
        return array if _is_signed_word(array) else None

    def values(self) -> tuple[npt.NDArray[np.bool_], list[Any]]:
        """Where a value is present, and those values as Python objects."""
        present = ~np.asarray(self.series.is_null().to_numpy(), dtype=bool)
        return present, self.series.drop_nulls().to_list()

    def piece_ends(self) -> tuple[int, ...]:
        """Where the pieces end in which Arrow keeps the column."""
        if not self.series.implementation.is_pyarrow():
            return (len(self),)
        ends, total = [], 0
        for chunk in nw.to_native(self.series).chunks:
            total += len(chunk)
            ends.append(total)
        return tuple(ends) or (0,)

    def piece(self, rows: slice) -> SeriesColumn:
        """Some rows, where they lie."""
        return SeriesColumn(self.series[rows])

    def coded(self) -> tuple[Array, list[Any]] | None:
        """For text in Arrow: codes of the values, -1 where one is missing, and what they stand for.

        It is the same as :meth:`values`, without a Python object for every row.
        """
        if self.kind != "string" or not self.series.implementation.is_pyarrow():
            return None
        encoded = nw.to_native(self.series).dictionary_encode().combine_chunks()
        if hasattr(encoded, "chunks"):  # of no rows
            return None
        codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        return codes, encoded.dictionary.to_pylist()

    def moments(self) -> tuple[npt.NDArray[np.bool_], Array]:
        """Where a date and time is present, and those as ``datetime64`` in UTC."""
        present = ~np.asarray(self.series.is_null().to_numpy(), dtype=bool)
        return present, self.series.drop_nulls().to_numpy()


Column: TypeAlias = ArrayColumn | SeriesColumn


@dataclass(frozen=True)
class Table:
    """Columns, with or without names."""

    names: tuple[str, ...] | None
    columns: tuple[Column, ...]
    n_rows: int
    array: Array | None = None  # all columns at once, where the input is an array

    def column(self, name: str, role: str) -> Column:
        """Return the column that the argument `role` names."""
        if self.names is None:
            raise InvalidInput(
                f"{role}={name!r} names a column, but X has no column names: pass a data frame, "
                f"or pass {role} as an array."
            )
        if name not in self.names:
            raise InvalidInput(f"{role}={name!r}: X has no column of this name.")
        return self.columns[self.names.index(name)]

    def without(self, removed: Sequence[str]) -> Table:
        """Leave out the columns that are not features."""
        if not removed or self.names is None:
            return self
        if len(set(removed)) < len(removed):
            raise InvalidInput(f"Column {removed[0]!r} cannot be both y and privacy_unit.")
        kept = [at for at, name in enumerate(self.names) if name not in removed]
        return Table(
            tuple(self.names[at] for at in kept),
            tuple(self.columns[at] for at in kept),
            self.n_rows,
        )

    def key(self, at: int) -> str | int:
        """By what the user knows a column: its name, or its position."""
        return at if self.names is None else self.names[at]


def read_table(X: Any, *, with_categories: bool) -> Table:
    """Read the features, and what else is in their frame."""
    frame = _through_narwhals(X, "X")
    if isinstance(frame, nw.DataFrame):
        return Table(_column_names(frame.columns), SeriesColumn.of_frame(frame), len(frame))
    array = _as_array(X, "X", keep_objects=with_categories)
    if array.dtype.names is not None:
        raise InvalidInput("Structured arrays are not supported: pass a data frame instead.")
    if array.ndim > 2:
        raise InvalidInput(f"Found array with dim {array.ndim}. {ESTIMATOR} expected <= 2.")
    if array.ndim < 2:
        given = "1D" if array.ndim == 1 else "scalar"
        raise InvalidInput(
            f"Expected 2D array, got {given} array instead. Reshape your data either using "
            "array.reshape(-1, 1) if your data has a single feature or array.reshape(1, -1) if "
            "it contains a single sample."
        )
    return Table(None, tuple(map(ArrayColumn, array.T)), len(array), array)


def _through_narwhals(data: Any, role: str) -> Any:
    if issparse(data):
        raise InvalidTypeError(
            f"Sparse data was passed for {role}, but dense data is required. Use '.toarray()' to "
            "convert to a dense array."
        )
    try:
        wrapped = nw.from_native(data, pass_through=True, allow_series=True)
    except nw.exceptions.DuplicateError:
        raise InvalidInput(f"{role} has several columns of the same name.") from None
    if isinstance(wrapped, nw.LazyFrame):
        raise InvalidInput(f"{role} is a lazy frame: call .collect() and pass the result.")
    return wrapped


def _column_names(names: Iterable[Any]) -> tuple[str, ...] | None:
    """Give the names of a frame by scikit-learn's rule: only text counts, and nothing mixed."""
    names = tuple(names)
    if all(isinstance(name, str) for name in names):
        return names
    if any(isinstance(name, str) for name in names):
        types = sorted({type(name).__qualname__ for name in names})
        raise InvalidTypeError(
            "Feature names are only supported if all input features have string names, but your "
            f"input has {types} as feature name / column name types. Convert them all to "
            "strings, by using X.columns = X.columns.astype(str) for example."
        )
    return None


def _as_array(data: Any, role: str, *, keep_objects: bool) -> Array:
    if isinstance(data, np.ma.MaskedArray):
        raise InvalidInput(f"{role} is a masked array: fill it with nan where it is masked.")
    is_list = isinstance(data, list | tuple)
    try:
        # NumPy would turn the numbers of a list into text if there is text among them.
        array = np.asarray(data, dtype=object if is_list and keep_objects else None)
    except ValueError:
        array = None
    if array is None:
        raise InvalidInput(f"{role} is not an array: its rows differ in length.")
    if is_list and array.dtype.kind in "biuf":
        # The precision of a list is that of its values, so it must not decide anything.
        return array_numbers(array).astype(np.float64, copy=False)
    return array


def read_beside(table: Table, data: Any, role: str) -> Column:
    """Read the target or the privacy units, which stand in the frame or beside it."""
    if isinstance(data, str):
        return table.column(data, role)
    vector = _as_vector(data, role)
    if len(vector) != table.n_rows:
        raise InvalidInput(f"X and {role} have different numbers of rows.")
    return vector


def _as_vector(data: Any, role: str) -> Column:
    wrapped = _through_narwhals(data, role)
    if isinstance(wrapped, nw.Series):
        return SeriesColumn(wrapped)
    if isinstance(wrapped, nw.DataFrame):
        columns = SeriesColumn.of_frame(wrapped)
        return columns[0] if _is_column_vector(len(columns), role) else _no_vector(role)
    array = _as_array(data, role, keep_objects=role == "privacy_unit")
    if array.ndim == 2 and _is_column_vector(array.shape[1], role):
        return ArrayColumn(array[:, 0])
    return ArrayColumn(array) if array.ndim == 1 else _no_vector(role)


def _is_column_vector(n_columns: int, role: str) -> bool:
    if n_columns != 1 or role != "y":
        return False
    warnings.warn(
        "A column-vector y was passed when a 1d array was expected. Please change the shape of y "
        "to (n_samples, ), for example using ravel().",
        DataConversionWarning,
        stacklevel=2,
    )
    return True


def _no_vector(role: str) -> Column:
    raise InvalidInput(f"{role} should be a 1d array, with one entry for each row of X.")


def _is_signed_word(array: Array) -> bool:
    return array.dtype.kind in "iu" and array.dtype != np.dtype("u8") and readable(array)


def numbers_of(array: Array) -> Array:
    """The array itself where its numbers can be read where they lie, otherwise floats.

    Examples
    --------
    >>> import numpy as np
    >>> integers = np.array([[1, 2]])
    >>> numbers_of(integers) is integers, numbers_of(integers > 1).tolist()
    (True, [[0.0, 1.0]])
    """
    plain = array.dtype.kind in "fiu" and readable(array)
    return array if plain else array_numbers(array)


def array_numbers(array: Array) -> Array:
    """Convert a numeric or object array to contiguous floats, without a copy where possible.

    Single precision stays; everything else becomes the nearest double. What is too large for a
    double becomes infinite, and what is missing becomes NaN.

    Examples
    --------
    >>> import numpy as np
    >>> array_numbers(np.array([1, None, 10**400], dtype=object))
    array([ 1., nan, inf])
    """
    if array.dtype.kind == "O":
        return _object_numbers(array)
    precision = np.float32 if array.dtype.type is np.float32 else np.float64
    with np.errstate(all="ignore"):  # a warning would tell that some value is too large
        return np.ascontiguousarray(array, dtype=precision)


def _object_numbers(array: Array) -> Array:
    # Whether an object array is numeric is part of its schema, as for scikit-learn; NumPy just
    # has no dtype that says so. What cannot be converted is therefore an error of the call, but
    # one whose text, and whose chain of exceptions, must not carry the value: NumPy's would.
    numbers = _converted_at_once(array)
    if numbers is None:
        numbers = _converted_one_by_one(array.ravel())
    if numbers is None:
        raise InvalidTypeError(
            "An object array must hold numbers only: each argument must be a number, or a "
            "string that spells a number. Convert text to numbers, or declare the levels of "
            "the columns that hold it: categories={position: [...]}."
        )
    return numbers.reshape(array.shape)


def _converted_at_once(array: Array) -> Array | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return np.ascontiguousarray(array, dtype=np.float64)
    except Exception:  # whatever the objects' own conversion raises
        return None


def _converted_one_by_one(values: Iterable[Any]) -> Array | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return np.array([_as_float(value) for value in values], dtype=np.float64)
    except Exception:
        return None


def _as_float(value: Any) -> float:
    pandas = nw.dependencies.get_pandas()
    if value is None or (pandas is not None and value is pandas.NA):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
