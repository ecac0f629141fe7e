"""Rows as integers: exact sums whatever the order, block or thread (docs/method.md, section 6).

`moments` adds up rows instead of fitting groups. A row is standardised, whitened and shrunk by
public numbers alone, element by element, so that its bits do not depend on where other rows lie.
It is then rounded towards zero to a grid, and sums of such rows are sums of integers that a
double holds exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

__all__ = ["RowMap", "ShrunkRows", "UnitRows"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_Result = TypeVar("_Result")

#: Standard units beyond which a feature counts as no larger, here and in predictions.
REACH = 12.0
#: Bits after the point of a standardised feature, and of a residual as a share of its bound.
_FEATURE_BITS = 14
_RESIDUAL_BITS = 12
#: Rows of one block: its columns stay in the cache, and its sums below 2**53.
_BLOCK = 1 << 12
_THREADS = 2
#: More rows than this could make a sum overflow 64 bits.
MOST_ROWS = 1 << 28
#: Room for the rounding of the shrinking, which is a million times smaller.
_BELOW_ONE = 1 - 2.0**-30


@dataclass(frozen=True, repr=False)
class UnitRows:
    """Usable rows, and which unit each belongs to.

    Attributes
    ----------
    design : array (n, p), float64 or float32
    target : array (n,)
    codes : array (n,) or None
        The unit of every row, in 0 .. n_units - 1; ``None`` where each row is its own.
    n_units : int
    """

    design: NDArray[np.floating]
    target: Floats
    codes: Integers | None
    n_units: int

    def of_units(self, chosen: NDArray[np.bool_]) -> UnitRows:
        """The rows of the chosen units."""
        if chosen.all():
            return self
        if self.codes is None:
            at = np.flatnonzero(chosen)
            return UnitRows(self.design[at], self.target[at], None, len(at))
        at = np.flatnonzero(chosen[self.codes])
        renumbered = np.cumsum(chosen, dtype=np.int64) - 1
        codes = renumbered[self.codes[at]]
        return UnitRows(self.design[at], self.target[at], codes, int(chosen.sum()))

    def of_features(self, chosen: NDArray[np.bool_]) -> UnitRows:
        """The same rows with the chosen features only."""
        return self if chosen.all() else replace(self, design=self.design[:, chosen])

    def column(self, j: int) -> Floats:
        """A feature, or the target for j = p, in double precision."""
        if j == self.design.shape[1]:
            return self.target
        return np.ascontiguousarray(self.design[:, j], dtype=np.float64)

    def weights(self) -> Floats | None:
        """What makes a unit's rows count as one: 1 / sqrt(rows of the unit), rounded down."""
        if self.codes is None:
            return None
        return np.asarray((1 / np.sqrt(self._sizes()) * _BELOW_ONE)[self.codes])

    def medians(self, values: Floats) -> Floats:
        """The lower median of every unit's values: one vote for each unit."""
        if self.codes is None:
            return values
        order = np.lexsort((values, self.codes))
        sizes = self._sizes()
        starts = np.cumsum(sizes) - sizes
        return np.asarray(values[order[starts + (sizes - 1) // 2]])

    def magnitudes(self, values: Floats) -> Floats:
        """The root mean square of every unit's values."""
        if self.codes is None:
            return np.abs(values)
        with np.errstate(all="ignore"):
            return np.asarray(np.sqrt(self._squares(values) / self._sizes()))

    def lengths(self, values: Floats) -> Floats:
        """The root of the sum of squares of every unit's values."""
        if self.codes is None:
            return np.abs(values)
        return np.asarray(np.sqrt(self._squares(values)))

    def _sizes(self) -> Integers:
        return np.bincount(self._known_codes(), minlength=self.n_units)

    def _squares(self, values: Floats) -> Floats:
        # One after the other in the order of rows: a unit's sum is its own affair, bit for bit.
        with np.errstate(all="ignore"):
            squares = np.bincount(self._known_codes(), weights=values**2, minlength=self.n_units)
        return squares.astype(np.float64, copy=False)

    def _known_codes(self) -> Integers:
        assert self.codes is not None
        return self.codes


@dataclass(frozen=True)
class RowMap:
    """Public numbers that turn a row into a short vector of integers.

    Attributes
    ----------
    location, scale : array (p,)
        Of the features.
    target_location, target_scale : float
    intercept : bool
    whitening : array (d, d) of integers, or None
        What standardised rows are multiplied by, in steps of 2**-whitening_bits.
    whitening_bits : int
    radius : float
        The norm that rows are shrunk to.

    Examples
    --------
    >>> rows = UnitRows(np.array([[1.0], [90.0]]), np.array([3.0, 4.0]), None, 2)
    >>> map = RowMap(np.array([0.0]), np.array([2.0]), 0.0, 1.0, intercept=True, radius=2.0)
    >>> map.coordinates(rows.design)  # the intercept first; 45 standard units count as 12
    array([[ 1. ,  1. ],
           [ 0.5, 12. ]])
    >>> map.shrunk(rows).gram().shape
    (2, 2)
    """

    location: Floats
    scale: Floats
    target_location: float
    target_scale: float
    intercept: bool
    whitening: Floats | None = None
    whitening_bits: int = 0
    radius: float = math.inf

    @property
    def width(self) -> int:
        """d, the number of coordinates."""
        return len(self.location) + int(self.intercept)

    @property
    def grid_bits(self) -> int:
        """Bits after the point of a shrunk coordinate.

        So few that the sums of a block are exact in doubles, and those of all rows in 64 bits.
        """
        spare = min(52 - math.log2(_BLOCK), 62 - math.log2(MOST_ROWS))
        return max(2, min(15, int(spare / 2 - math.log2(max(1.0, self.radius)))))

    def whitened(self, matrix: Floats) -> RowMap:
        """The same with coordinates ``matrix @`` the standardised row, rounded to a grid."""
        largest = float(np.abs(matrix).sum(axis=1).max()) * REACH * 2**_FEATURE_BITS
        bits = max(0, min(30, int(52 - math.log2(largest))))
        return replace(
            self, whitening=np.rint(np.ldexp(matrix, bits)), whitening_bits=bits, radius=math.inf
        )

    def matrix(self) -> Floats:
        """The whitening in use."""
        if self.whitening is None:
            return np.eye(self.width)
        return np.asarray(np.ldexp(self.whitening, -self.whitening_bits))

    def coordinates(self, design: NDArray[np.floating]) -> Floats:
        """Whitened coordinates (d, n) of standardised rows.

        Standardised features are integers in steps of 2**-14 and so is the whitening in its
        steps, so that their products are exact in any order of summation.
        """
        first = int(self.intercept)
        rows = np.empty((self.width, len(design)))
        rows[:first] = 2.0**_FEATURE_BITS
        body = rows[first:]
        with np.errstate(all="ignore"):
            np.subtract(design.T, self.location[:, None], out=body)
            np.divide(body, self.scale[:, None], out=body)
        np.clip(body, -REACH, REACH, out=body)
        np.multiply(body, 2.0**_FEATURE_BITS, out=body)
        np.rint(body, out=body)
        if self.whitening is not None:
            rows = self.whitening @ rows
        np.multiply(rows, 2.0 ** -(_FEATURE_BITS + self.whitening_bits), out=rows)
        return rows

    def blocks(self, rows: UnitRows) -> list[Floats]:
        """Coordinates of all rows, block by block, for several passes."""

        def of_block(part: slice) -> Floats:
            return self.coordinates(rows.design[part])

        return _each_block(len(rows.target), of_block)

    def norms(self, rows: UnitRows, blocks: list[Floats] | None = None) -> Floats:
        """The root mean square, over a unit's rows, of the norms of coordinates."""

        def of_block(part: slice) -> Floats:
            if blocks is not None:
                return _norms(blocks[int(part.start) // _BLOCK])
            return _norms(self.coordinates(rows.design[part]))

        return rows.magnitudes(np.concatenate(_each_block(len(rows.target), of_block)))

    def shrunk(self, rows: UnitRows, blocks: list[Floats] | None = None) -> ShrunkRows:
        """Rows as integers; with their blocks of coordinates they are kept, else made anew."""
        weights = rows.weights()
        if blocks is None:
            return ShrunkRows(self, rows, weights, None)

        def of_block(part: slice) -> tuple[Floats, Floats]:
            return self._shrink(blocks[int(part.start) // _BLOCK], rows, weights, part)

        return ShrunkRows(self, rows, weights, _each_block(len(rows.target), of_block))

    def _shrink(
        self, vectors: Floats, rows: UnitRows, weights: Floats | None, part: slice
    ) -> tuple[Floats, Floats]:
        """Integer rows (d, n) of norm at most radius * 2**grid_bits, and targets alike."""
        with np.errstate(all="ignore"):
            factor = np.minimum(1.0, self.radius / _norms(vectors))
            factor = np.where(np.isnan(factor), 1.0, factor)
            if weights is not None:
                factor *= weights[part]
            target = (rows.target[part] - self.target_location) / self.target_scale * factor
        vectors = vectors * (factor * (_BELOW_ONE * 2.0**self.grid_bits))
        np.trunc(vectors, out=vectors)
        return vectors, target


@dataclass(frozen=True, repr=False)
class ShrunkRows:
    """Rows as integers of bounded norm, and the exact sums over them.

    Attributes
    ----------
    map : RowMap
    rows : UnitRows
    weights : array (n,) or None
        What makes a unit's rows count as one.
    kept : list of pairs of arrays, or None
        Integer rows (d, n) and their targets, block by block; ``None`` to make them in passing.
    """

    map: RowMap
    rows: UnitRows
    weights: Floats | None
    kept: list[tuple[Floats, Floats]] | None

    def gram(self) -> Integers:
        """The sum of outer products, in steps of ``gram_step``."""

        def of_block(part: slice) -> Integers:
            vectors, _ = self._block(part)
            return np.asarray((vectors @ vectors.T).astype(np.int64))

        return self._total(of_block)

    def residuals(self, coefficients: Floats) -> Floats:
        """The root mean square of every unit's residuals, weighted as its rows are."""
        model = self._integer_model(coefficients)

        def of_block(part: slice) -> Floats:
            return self._rest(*self._block(part), model)

        rest = np.concatenate(_each_block(len(self.rows.target), of_block))
        return self.rows.lengths(rest)  # rows have the weights that make it a mean

    def gradient(self, coefficients: Floats, bound: float) -> Integers:
        """The sum of rows times residuals within the bound, in steps of ``gradient_step``."""
        model = self._integer_model(coefficients)

        def of_block(part: slice) -> Integers:
            vectors, target = self._block(part)
            with np.errstate(over="ignore"):
                share = self._rest(vectors, target, model) / bound
            most = 1.0 if self.weights is None else self.weights[part]
            share = np.trunc(np.clip(share, -most, most) * 2.0**_RESIDUAL_BITS)
            return np.asarray((vectors @ share).astype(np.int64))

        return self._total(of_block)

    @property
    def gram_step(self) -> float:
        """What one step of :meth:`gram` is worth."""
        return 4.0**-self.map.grid_bits

    @property
    def gradient_worth(self) -> float:
        """The most that one unit can add to :meth:`gradient`, in steps."""
        return self.map.radius * 2.0 ** (self.map.grid_bits + _RESIDUAL_BITS)

    def gradient_step(self, bound: float) -> float:
        """What one step of :meth:`gradient` is worth: of a row, times that of a residual."""
        return bound * 2.0 ** -(self.map.grid_bits + _RESIDUAL_BITS)

    def _block(self, part: slice) -> tuple[Floats, Floats]:
        if self.kept is not None:
            return self.kept[int(part.start) // _BLOCK]
        vectors = self.map.coordinates(self.rows.design[part])
        return self.map._shrink(vectors, self.rows, self.weights, part)

    def _total(self, of_block: Callable[[slice], Integers]) -> Integers:
        blocks = _each_block(len(self.rows.target), of_block)
        return np.asarray(np.sum(blocks, axis=0, dtype=np.int64))

    def _integer_model(self, coefficients: Floats) -> tuple[Floats, int]:
        """Coefficients on a grid on which their products with integer rows are exact.

        Coefficients that have gone so far astray that they fit no grid are cut: they are public,
        so this is allowed, and no residual of theirs would mean anything.
        """
        limit = 2.0**51 / (self.map.radius * 2.0**self.map.grid_bits)
        limited = np.clip(coefficients, -limit / len(coefficients), limit / len(coefficients))
        spare = limit / max(limit * 2.0**-41, float(np.abs(limited).sum()))
        bits = max(0, min(40, int(math.log2(spare))))
        return np.rint(np.ldexp(limited, bits)), bits

    def _rest(self, vectors: Floats, target: Floats, model: tuple[Floats, int]) -> Floats:
        integers, bits = model
        return np.asarray(target - np.ldexp(integers @ vectors, -(bits + self.map.grid_bits)))


def _norms(vectors: Floats) -> Floats:
    """Norms of columns, squares added coordinate by coordinate in a fixed order."""
    total = np.zeros(vectors.shape[1])
    for coordinate in vectors:
        total += coordinate * coordinate
    return np.asarray(np.sqrt(total))


def _each_block(n_rows: int, work: Callable[[slice], _Result]) -> list[_Result]:
    """Results for all blocks in their order; every block is one thread's, with one of BLAS."""
    parts = [slice(first, first + _BLOCK) for first in range(0, max(1, n_rows), _BLOCK)]
    if len(parts) < 4:
        return list(map(work, parts))

    def share(first: int) -> list[_Result]:
        return [work(part) for part in parts[first::_THREADS]]

    with _libraries().limit(limits=1, user_api="blas"), ThreadPoolExecutor(_THREADS) as pool:
        shares = list(pool.map(share, range(_THREADS)))
    return [shares[at % _THREADS][at // _THREADS] for at in range(len(parts))]


@lru_cache(maxsize=1)
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()
