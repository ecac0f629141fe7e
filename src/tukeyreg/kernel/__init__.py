"""The compiled loops over rows, and the columns that they read.

``kernel.c`` is plain C without a word of Python in it, compiled when the package is built; ctypes
calls it, and lets other threads run meanwhile. What may differ between machines is the speed: no
result depends on the number of threads, on the width of vectors or on where batches are cut.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Columns",
    "IntegerMap",
    "JoinedColumns",
    "Products",
    "Triangles",
    "absorb",
    "add",
    "draws",
    "factor",
    "finite",
    "flush",
    "gradient",
    "hash_integers",
    "hash_texts",
    "in_threads",
    "padded",
    "processors",
    "readable",
]

Array = NDArray[Any]
Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_Result = TypeVar("_Result")

_KINDS = {
    np.dtype(name): kind
    for kind, name in enumerate(("f8", "f4", "u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8"))
}
_LANES = 4
#: More threads than this do not help: memory is the limit.
_MOST_THREADS = 8
_ROWS_WORTH_A_THREAD = 1 << 14


def _loaded() -> ctypes.CDLL:
    built = Path(__file__).with_name("kernel.so")
    try:
        return ctypes.CDLL(str(built))
    except OSError as error:
        raise ImportError(
            f"the compiled loops of tukeyreg could not be loaded ({error}). They are built when "
            "the package is installed: python -m pip install ."
        ) from None


_library = _loaded()


def padded(width: int) -> int:
    """The width of stored rows: a whole number of vectors."""
    return -(-width // _LANES) * _LANES


def readable(array: Array) -> bool:
    """Whether the kernel can read a one-dimensional array where it lies."""
    return array.dtype in _KINDS and array.flags.aligned and array.dtype.isnative


class _Table(ctypes.Structure):
    _fields_ = (
        ("n_columns", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("stride", ctypes.c_void_p),
        ("kind", ctypes.c_void_p),
    )


class Columns:
    """Features and target, each an array of any real type and stride; nothing is copied.

    Examples
    --------
    >>> ages, smokes = np.array([44.0, np.nan]), np.array([1, 0], dtype=np.uint8)
    >>> columns = Columns([ages, smokes], np.array([3.5, 4.5], dtype=np.float32))
    >>> columns.matrix()
    array([[44.,  1.],
           [nan,  0.]])
    >>> finite(columns).tolist()
    [True, False]
    """

    def __init__(self, features: Sequence[Array], target: Array) -> None:
        self.features = tuple(map(_as_readable, features))
        self.target = _as_readable(target)
        arrays = (*self.features, self.target)
        if any(len(array) != len(self.target) for array in arrays):
            raise ValueError("columns differ in length")
        self._data = np.array([array.ctypes.data for array in arrays], dtype=np.int64)
        self._strides = np.array([array.strides[0] for array in arrays], dtype=np.int64)
        self._kinds = np.array([_KINDS[array.dtype] for array in arrays], dtype=np.int32)

    @classmethod
    def of(cls, matrix: Array, target: Array) -> Columns:
        """The columns of a matrix, where they lie."""
        return cls(list(matrix.T), target)

    def __len__(self) -> int:
        return len(self.target)

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """The types of the features."""
        return tuple(feature.dtype for feature in self.features)

    def pieces(self) -> Iterator[tuple[slice, Columns]]:
        """The rows in pieces that lie in one place each, and which rows these are."""
        yield slice(0, len(self)), self

    def __reduce__(self) -> str | tuple[Any, ...]:
        raise TypeError("columns are private rows: they are not pickled")

    @property
    def n_features(self) -> int:
        """The number of features."""
        return len(self.features)

    def part(self, rows: slice) -> Columns:
        """Some rows, where they lie."""
        return Columns([feature[rows] for feature in self.features], self.target[rows])

    def of_features(self, chosen: NDArray[np.bool_]) -> Columns:
        """The same rows with the chosen features only."""
        kept = [self.features[j] for j in np.flatnonzero(chosen).tolist()]
        return Columns(kept, self.target)

    def matrix(
        self, rows: NDArray[Any] | slice = slice(None), dtype: type[np.floating] = np.float64
    ) -> NDArray[np.floating]:
        """Copy the features of some rows, side by side."""
        out = np.empty((len(self.target[rows]), len(self.features)), dtype)
        for j, feature in enumerate(self.features):
            out[:, j] = feature[rows]
        return out

    def labels(self, rows: NDArray[Any] | slice = slice(None)) -> Floats:
        """The target of some rows in double precision."""
        return self.target[rows].astype(np.float64)

    def _c(self) -> Any:
        places = map(_address, (self._data, self._strides, self._kinds))
        return ctypes.byref(_Table(len(self._data), *places))


class JoinedColumns(Columns):
    """Columns that lie in several places, as Arrow keeps them.

    Examples
    --------
    >>> parts = [Columns([np.arange(2.0)], np.ones(2)), Columns([np.arange(3.0)], np.ones(3))]
    >>> joined = JoinedColumns(parts)
    >>> len(joined), joined.matrix(np.array([1, 4])).tolist(), joined.labels().tolist()
    (5, [[1.0], [2.0]], [1.0, 1.0, 1.0, 1.0, 1.0])
    """

    def __init__(self, parts: Sequence[Columns]) -> None:
        self._parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def n_features(self) -> int:
        """The number of features."""
        return self._parts[0].n_features

    @property
    def dtypes(self) -> tuple[np.dtype[Any], ...]:
        """The types of the features."""
        return self._parts[0].dtypes

    def pieces(self) -> Iterator[tuple[slice, Columns]]:
        """The rows in pieces that lie in one place each, and which rows these are."""
        for part, end in zip(self._parts, self._ends.tolist(), strict=True):
            yield slice(end - len(part), end), part

    def of_features(self, chosen: NDArray[np.bool_]) -> Columns:
        """The same rows with the chosen features only."""
        return JoinedColumns([part.of_features(chosen) for part in self._parts])

    def matrix(
        self, rows: NDArray[Any] | slice = slice(None), dtype: type[np.floating] = np.float64
    ) -> NDArray[np.floating]:
        """Copy the features of some rows, side by side."""
        return np.concatenate([part.matrix(own, dtype) for part, own in self._split(rows)])

    def labels(self, rows: NDArray[Any] | slice = slice(None)) -> Floats:
        """The target of some rows in double precision."""
        return np.concatenate([part.labels(own) for part, own in self._split(rows)])

    def _split(self, rows: NDArray[Any] | slice) -> Iterator[tuple[Columns, NDArray[Any]]]:
        """What of some rows, in rising order, is in which part."""
        places = np.arange(len(self))[rows]
        ends = np.searchsorted(places, self._ends)
        for part, end, start, stop in zip(
            self._parts, self._ends, [0, *ends[:-1]], ends, strict=True
        ):
            yield part, places[start:stop] - (end - len(part))


def _as_readable(array: Array) -> Array:
    if array.dtype == np.bool_:
        array = array.view(np.uint8)
    if not readable(array):
        with np.errstate(all="ignore"):
            array = np.array(array, dtype=np.float64)
    return array


def _address(array: Any) -> ctypes.c_void_p | None:
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


def in_threads(
    n_rows: int, work: Callable[[int, int], _Result], most: int = _MOST_THREADS
) -> list[_Result]:
    """Results of ``work(k, threads)`` for every k, with as many threads as so many rows deserve."""
    threads = min(most, processors(), 1 + n_rows // _ROWS_WORTH_A_THREAD)
    if threads < 2:
        return [work(0, 1)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, range(threads), [threads] * threads))


def processors() -> int:
    """How many processors this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if affinity is None else len(affinity(0))


def _done(status: int) -> None:
    if status:
        raise MemoryError("no memory for the work on a batch of rows")


# Sums of every group


class _Products(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("gram", "origin", "peak", "count", "check")
    )


class Products:
    """Sums of products of every group's rows [features, target, 1], from the first row on.

    Attributes
    ----------
    gram : array (groups, w, w)
        On and above the diagonal; w is the padded width.
    origin, peak : array (groups, w)
        The first row where rows are shifted, then -1; and the largest magnitudes after the shift.
    count : array (groups,)
    check : array (groups,) or None
        A checksum of the rows, whatever their order; for who reads rows twice.
    """

    def __init__(self, n_groups: int, n_features: int, *, checked: bool = True) -> None:
        self.n_features = n_features
        width = padded(n_features + 2)
        self.gram: Floats = np.zeros((n_groups, width, width))
        self.origin: Floats = np.zeros((n_groups, width))
        self.origin[:, n_features + 1] = -1.0
        self.peak: Floats = np.zeros((n_groups, width))
        self.count: Integers = np.zeros(n_groups, dtype=np.int64)
        self.check = np.zeros(n_groups, dtype=np.uint64) if checked else None

    def _c(self) -> Any:
        arrays = (self.gram, self.origin, self.peak, self.count, self.check)
        return ctypes.byref(_Products(*map(_address, arrays)))


def add(
    columns: Columns,
    groups: NDArray[np.int32],
    sums: Products,
    *,
    shifted: bool,
    threads: int = _MOST_THREADS,
) -> None:
    """Add rows to the sums of their groups, one after the other; -1 is no group.

    A row that is not finite is left out. Every thread has groups of its own.
    """
    _check(columns, sums.n_features, ("groups", groups, np.int32))
    for rows, piece in columns.pieces():
        _add(piece, groups[rows], sums, shifted=shifted, threads=threads)


def _check(columns: Columns, n_features: int, *arrays: tuple[str, Any, type]) -> None:
    """C reads what it is told to read: so this is looked at before."""
    if columns.n_features != n_features:
        raise ValueError(f"{columns.n_features} features where there should be {n_features}")
    for name, array, dtype in arrays:
        if array is None:
            continue
        plain = array.dtype == dtype and array.flags.c_contiguous
        if not plain or array.shape != (len(columns),):
            raise ValueError(f"{name} must have one {dtype.__name__} for each row")


def _add(
    columns: Columns,
    groups: NDArray[np.int32],
    sums: Products,
    *,
    shifted: bool,
    threads: int,
) -> None:
    n_groups = len(sums.count)

    def work(k: int, threads: int) -> int:
        return int(
            _library.tukeyreg_add(
                columns._c(),
                ctypes.c_int64(len(columns)),
                _address(groups),
                k * n_groups // threads,
                (k + 1) * n_groups // threads,
                int(shifted),
                sums._c(),
            )
        )

    for status in in_threads(len(columns), work, threads):
        _done(status)


def factor(
    sums: Products, *, intercept: bool, aliased: NDArray[np.uint8] | None
) -> tuple[Floats, NDArray[np.bool_]]:
    """Triangular factors of [1, features, target], and for which groups they are good enough.

    ``aliased`` marks features of groups that are known to be collinear with earlier ones.
    """
    n_groups, width = len(sums.count), sums.n_features + 1 + int(intercept)
    out = np.zeros((n_groups, width, width))
    sound = np.zeros(n_groups, dtype=np.uint8)

    def work(k: int, threads: int) -> int:
        return int(
            _library.tukeyreg_factor(
                ctypes.c_int64(k * n_groups // threads),
                ctypes.c_int64((k + 1) * n_groups // threads),
                ctypes.c_int64(sums.n_features),
                int(intercept),
                sums._c(),
                _address(aliased),
                _address(out),
                _address(sound),
            )
        )

    for status in in_threads(n_groups * width, work):
        _done(status)
    return out, sound.view(np.bool_)


class _Triangles(ctypes.Structure):
    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in ("triangle", "waiting", "exponent", "n_waiting", "check")
        ),
        ("block", ctypes.c_int32),
    )


class Triangles:
    """Triangles of every group's rows [1, features, target] by QR, and rows that wait for it.

    Attributes
    ----------
    width : int
    triangle : array (groups, w, w)
        In units of 2**exponent for each column; what is below the diagonal means nothing.
    exponent : array (groups, w)
    check : array (groups,) or None
        That of :class:`Products` for the same rows.
    """

    #: A group's rows are brought in so many at a time, counted from its own first row; at most 64.
    BLOCK = 32

    def __init__(
        self, n_groups: int, n_features: int, *, intercept: bool, checked: bool = True
    ) -> None:
        self.intercept = intercept
        self.width = n_features + 1 + int(intercept)
        width = padded(self.width)
        self.triangle: Floats = np.zeros((n_groups, width, width))
        self.exponent = np.full((n_groups, width), -5000, dtype=np.int32)
        self._waiting: Floats = np.zeros((n_groups, self.BLOCK, width))
        self._n_waiting = np.zeros(n_groups, dtype=np.int32)
        self.check = np.zeros(n_groups, dtype=np.uint64) if checked else None

    def __len__(self) -> int:
        return len(self.triangle)

    def _c(self) -> Any:
        arrays = (self.triangle, self._waiting, self.exponent, self._n_waiting, self.check)
        return ctypes.byref(_Triangles(*map(_address, arrays), self.BLOCK))


def absorb(
    columns: Columns,
    groups: NDArray[np.int32],
    state: Triangles,
    *,
    threads: int = _MOST_THREADS,
) -> None:
    """Bring rows into the triangles of their groups, as :func:`add` does with sums."""
    width = state.width - 1 - int(state.intercept)
    _check(columns, width, ("groups", groups, np.int32))
    for rows, piece in columns.pieces():
        _absorb(piece, groups[rows], state, threads)


def _absorb(columns: Columns, groups: NDArray[np.int32], state: Triangles, threads: int) -> None:
    def work(k: int, threads: int) -> int:
        return int(
            _library.tukeyreg_absorb(
                columns._c(),
                ctypes.c_int64(len(columns)),
                _address(groups),
                k * len(state) // threads,
                (k + 1) * len(state) // threads,
                int(state.intercept),
                state._c(),
            )
        )

    for status in in_threads(len(columns), work, threads):
        _done(status)


def flush(state: Triangles) -> None:
    """Bring in the rows that still wait."""
    _library.tukeyreg_flush(ctypes.c_int64(state.width), 0, len(state), state._c())


# Sums of integer rows


class _RowMap(ctypes.Structure):
    _fields_ = (
        ("width", ctypes.c_int64),
        *(
            (name, ctypes.c_double)
            for name in (
                "target_location",
                "target_scale",
                "reach",
                "steps",
                "unit",
                "radius",
                "shrink",
                "residual_steps",
            )
        ),
        *((name, ctypes.c_void_p) for name in ("location", "scale", "whitening")),
    )


class IntegerMap:
    """Public numbers that make integers of rows: those of ``RowMap``, with their grids."""

    def __init__(
        self,
        *,
        location: Floats,
        scale: Floats,
        whitening: Floats | None,
        **numbers: float,
    ) -> None:
        self._arrays = [
            None if array is None else np.ascontiguousarray(array, dtype=np.float64)
            for array in (location, scale, whitening)
        ]
        places = [_address(array) for array in self._arrays]
        names = ("location", "scale", "whitening")
        self.width = int(numbers["width"])
        self._struct = _RowMap(**numbers, **dict(zip(names, places, strict=True)))

    def _c(self) -> Any:
        return ctypes.byref(self._struct)


def gradient(
    columns: Columns,
    kept: NDArray[np.bool_] | None,
    weights: Floats | None,
    map: IntegerMap,
    model: Floats,
    unit_of_model: float,
    bound: float,
    *,
    threads: int = _MOST_THREADS,
) -> Integers:
    """The exact sum of integer rows times integer residuals; a row that is not kept is nothing."""
    if len(model) != map.width or not len(model) - 2 < columns.n_features <= len(model):
        raise ValueError("columns, map and model do not fit together")
    given = (("kept", kept, np.bool_), ("weights", weights, np.float64))
    _check(columns, columns.n_features, *given)
    total = np.zeros(len(model), dtype=np.int64)
    for rows, piece in columns.pieces():
        own = kept if kept is None else kept[rows]
        of_rows = weights if weights is None else weights[rows]
        total += _gradient(piece, own, of_rows, map, model, unit_of_model, bound, threads)
    return total


def _gradient(
    columns: Columns,
    kept: NDArray[np.bool_] | None,
    weights: Floats | None,
    map: IntegerMap,
    model: Floats,
    unit_of_model: float,
    bound: float,
    threads: int,
) -> Integers:
    width, n = len(model), len(columns)

    def work(k: int, threads: int) -> Integers:
        out = np.zeros(width, dtype=np.int64)
        _done(
            _library.tukeyreg_gradient(
                columns._c(),
                ctypes.c_int64(k * n // threads),
                ctypes.c_int64((k + 1) * n // threads),
                _address(kept),
                _address(weights),
                map._c(),
                _address(model),
                ctypes.c_double(unit_of_model),
                ctypes.c_double(bound),
                _address(out),
            )
        )
        return out

    return np.asarray(np.sum(in_threads(n, work, threads), axis=0, dtype=np.int64))


# Rows one by one


def finite(columns: Columns, *, threads: int = _MOST_THREADS) -> NDArray[np.bool_]:
    """For every row whether all its numbers are finite."""
    out = np.empty(len(columns), dtype=np.uint8)
    for rows, piece in columns.pieces():
        _finite(piece, out[rows], threads)
    return out.view(np.bool_)


def _finite(columns: Columns, out: NDArray[np.uint8], threads: int) -> None:
    n = len(columns)

    def work(k: int, threads: int) -> None:
        start, stop = k * n // threads, (k + 1) * n // threads
        part = out[start:stop]
        _library.tukeyreg_finite(
            columns._c(), ctypes.c_int64(start), ctypes.c_int64(stop), _address(part)
        )

    in_threads(n, work, threads)


def draws(key: bytes, nonce: int, first: int, count: int, bound: int) -> NDArray[np.int32]:
    """Words of the ChaCha20 stream of a key and a nonce, times a bound, over 2**32.

    With a bound of 2**32 they are the words themselves.

    Examples
    --------
    >>> key = bytes(32)
    >>> bool(np.all(draws(key, 0, 1000, 5, 7) == draws(key, 0, 0, 1005, 7)[1000:]))
    True
    >>> draws(key, 0, 0, 2, 1 << 32).tobytes().hex()
    '76b8e0ada0f13d90'
    """
    if len(key) != 32:
        raise ValueError("a key has 32 bytes")
    out = np.empty(count, dtype=np.int32)

    def work(k: int, threads: int) -> None:
        start, stop = k * count // threads, (k + 1) * count // threads
        part = out[start:stop]
        _library.tukeyreg_draws(
            ctypes.c_char_p(key),
            ctypes.c_uint64(nonce),
            ctypes.c_uint64(first + start),
            ctypes.c_int64(stop - start),
            ctypes.c_uint64(bound),
            _address(part),
        )

    in_threads(count // 64, work)
    return out


def hash_texts(texts: Array, starts: Integers, key: bytes) -> NDArray[np.uint64]:
    """SipHash-2-4 of texts that lie one after the other; ``starts`` has one entry more."""
    n = len(starts) - 1
    out = np.empty(n, dtype=np.uint64)
    k0, k1 = _halves(key)
    _library.tukeyreg_hash_texts(
        ctypes.c_int64(n), _address(texts), _address(starts), k0, k1, _address(out)
    )
    return out


def hash_integers(values: Integers, key: bytes) -> NDArray[np.uint64]:
    """SipHash-2-4 of integers, spelled as ``i`` and their decimal digits."""
    out = np.empty(len(values), dtype=np.uint64)
    k0, k1 = _halves(key)
    _library.tukeyreg_hash_integers(
        ctypes.c_int64(len(values)), _address(values), k0, k1, _address(out)
    )
    return out


def _halves(key: bytes) -> tuple[ctypes.c_uint64, ctypes.c_uint64]:
    if len(key) < 16:
        raise ValueError("a key has at least 16 bytes")
    return tuple(ctypes.c_uint64(int.from_bytes(key[at : at + 8], "little")) for at in (0, 8))  # type: ignore[return-value]
