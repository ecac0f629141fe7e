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
from functools import cached_property, lru_cache
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from tukeyreg import kernel
from tukeyreg.errors import InvalidInput
from tukeyreg.kernel import Columns

__all__ = ["MOST_ROWS", "PilotRows", "RowMap", "ShrunkRows", "UnitRows", "profile", "weights_of"]

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
#: More rows than this could make a sum of products overflow 64 bits.
MOST_ROWS = 1 << 28
#: Room for the rounding of the shrinking, which is a million times smaller.
_BELOW_ONE = 1 - 2.0**-30
#: Exponents of the magnitudes of doubles; their histogram has one more cell, for zero.
LOWEST, HIGHEST = -1074, 1025
_LARGEST = float(np.finfo(np.float64).max)


class Coins(Protocol):
    """A source of independent uniform integers in ``0 .. bound - 1``."""

    def below(self, bound: int, size: int) -> Integers:
        """So many of them."""
        ...


def weights_of(sizes: Integers) -> Floats:
    """What makes the rows of units of these sizes count as one: 1 / sqrt(size), rounded down."""
    return np.asarray(1 / np.sqrt(sizes) * _BELOW_ONE)


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

    @cached_property
    def columns(self) -> Columns:
        """The same rows as the kernel reads them."""
        return Columns(list(self.design.T), self.target)

    @property
    def n_features(self) -> int:
        """p, the number of features."""
        return int(self.design.shape[1])

    def pilot(self, share: int, voters: int, coins: Coins) -> PilotRows:
        """A random part of the units, one in ``share``, and one in ``voters`` of it, which votes.

        A unit is in it or not whoever else there is.
        """
        part = self._one_in(share, coins)
        return PilotRows(part, part._one_in(voters, coins))

    def gradient(
        self, chosen: NDArray[np.bool_], map: RowMap, coefficients: Floats, bound: float
    ) -> Integers:
        """The sum of all integer rows times residuals, with the chosen features."""
        return map.shrunk(self.of_features(chosen)).gradient(coefficients, bound)

    def _one_in(self, share: int, coins: Coins) -> UnitRows:
        if share == 1:
            return self
        return self.of_units(coins.below(share, self.n_units) == 0)

    def weights(self) -> Floats | None:
        """What makes a unit's rows count as one."""
        return None if self.codes is None else weights_of(self._sizes())[self.codes]

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

    @property
    def gram_step(self) -> float:
        """What one step of :meth:`ShrunkRows.gram` is worth."""
        return 4.0**-self.grid_bits

    @property
    def gradient_worth(self) -> float:
        """The most that one unit can add to :meth:`gradient`, in steps."""
        return self.radius * 2.0 ** (self.grid_bits + _RESIDUAL_BITS)

    def gradient_step(self, bound: float) -> float:
        """What one step of :meth:`gradient` is worth: of a row, times that of a residual."""
        return bound * 2.0 ** -(self.grid_bits + _RESIDUAL_BITS)

    def gradient(
        self,
        columns: Columns,
        kept: NDArray[np.bool_] | None,
        weights: Floats | None,
        coefficients: Floats,
        bound: float,
        *,
        threads: int = 8,
    ) -> Integers:
        """The sum of integer rows times residuals within the bound, in steps.

        A row that is not kept, or not finite, counts for nothing. Weights make a unit's rows
        count as one, and the bounds of their residuals with them.
        """
        integers, bits = self.integer_model(coefficients)
        numbers = kernel.IntegerMap(
            location=self.location,
            scale=self.scale,
            whitening=self.whitening,
            width=self.width,
            target_location=self.target_location,
            target_scale=self.target_scale,
            reach=REACH,
            steps=2.0**_FEATURE_BITS,
            unit=2.0 ** -(_FEATURE_BITS + self.whitening_bits),
            radius=self.radius,
            shrink=_BELOW_ONE * 2.0**self.grid_bits,
            residual_steps=2.0**_RESIDUAL_BITS,
        )
        unit = 2.0 ** -(bits + self.grid_bits)
        return kernel.gradient(
            columns, kept, weights, numbers, integers, unit, bound, threads=threads
        )

    def integer_model(self, coefficients: Floats) -> tuple[Floats, int]:
        """Coefficients on a grid on which their products with integer rows are exact.

        Coefficients that have gone so far astray that they fit no grid are cut: they are public,
        so this is allowed, and no residual of theirs would mean anything.
        """
        limit = 2.0**51 / (self.radius * 2.0**self.grid_bits)
        limited = np.clip(coefficients, -limit / len(coefficients), limit / len(coefficients))
        spare = limit / max(limit * 2.0**-41, float(np.abs(limited).sum()))
        bits = max(0, min(40, int(math.log2(spare))))
        return np.rint(np.ldexp(limited, bits)), bits

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
        """The sum of outer products, in steps of ``map.gram_step``."""

        def of_block(part: slice) -> Integers:
            vectors, _ = self._block(part)
            return np.asarray((vectors @ vectors.T).astype(np.int64))

        return self._total(of_block)

    def residuals(self, coefficients: Floats) -> Floats:
        """The root mean square of every unit's residuals, weighted as its rows are."""
        model = self.map.integer_model(coefficients)

        def of_block(part: slice) -> Floats:
            return self._rest(*self._block(part), model)

        rest = np.concatenate(_each_block(len(self.rows.target), of_block))
        return self.rows.lengths(rest)  # rows have the weights that make it a mean

    def gradient(self, coefficients: Floats, bound: float) -> Integers:
        """The sum of rows times residuals within the bound: :meth:`RowMap.gradient`."""
        return self.map.gradient(self.rows.columns, None, self.weights, coefficients, bound)

    def _block(self, part: slice) -> tuple[Floats, Floats]:
        if self.kept is not None:
            return self.kept[int(part.start) // _BLOCK]
        vectors = self.map.coordinates(self.rows.design[part])
        return self.map._shrink(vectors, self.rows, self.weights, part)

    def _total(self, of_block: Callable[[slice], Integers]) -> Integers:
        blocks = _each_block(len(self.rows.target), of_block)
        return np.asarray(np.sum(blocks, axis=0, dtype=np.int64))

    def _rest(self, vectors: Floats, target: Floats, model: tuple[Floats, int]) -> Floats:
        integers, bits = model
        return np.asarray(target - np.ldexp(integers @ vectors, -(bits + self.map.grid_bits)))


class PilotRows:
    """The random part of the units by which `moments` finds its way; it is held in memory.

    All that a mechanism is told of it are votes, counts and exact sums.

    Parameters
    ----------
    rows, voters : UnitRows
    """

    def __init__(self, rows: UnitRows, voters: UnitRows) -> None:
        if len(rows.target) > MOST_ROWS:
            raise InvalidInput(f"a pilot of more than {MOST_ROWS:,} rows does not fit.")
        self._rows, self._voters = rows, voters
        self._blocks: tuple[Floats | None, list[Floats]] | None = None
        self._kept: ShrunkRows | None = None

    def votes(self, j: int) -> Floats:
        """One vote of each voter for the location of a column; the target is the last."""
        return self._voters.medians(self._voters.column(j))

    def profiles(self, location: Floats) -> Integers:
        """For every column the profile of its distances from the location, unit by unit."""
        columns = [
            _minus(self._rows.column(j), centre) for j, centre in enumerate(location.tolist())
        ]
        return np.array([profile(self._rows.magnitudes(column)) for column in columns])

    def of_features(self, chosen: NDArray[np.bool_]) -> PilotRows:
        """The same units with the chosen features only."""
        return PilotRows(self._rows.of_features(chosen), self._voters)

    def norm_counts(self, map: RowMap, edges: Floats) -> Integers:
        """How many units have rows whose norm lies between which edges."""
        self._blocks = (map.whitening, map.blocks(self._rows))
        cells = np.searchsorted(edges, map.norms(self._rows, self._blocks[1]))
        return np.bincount(cells, minlength=len(edges) + 1).astype(np.int64)

    def gram(self, map: RowMap) -> Integers:
        """The sum of outer products of integer rows."""
        return self._shrunk(map).gram()

    def residual_counts(self, map: RowMap, coefficients: Floats) -> Integers:
        """The profile of the residuals, unit by unit."""
        return profile(self._shrunk(map).residuals(coefficients))

    def gradient(self, map: RowMap, coefficients: Floats, bound: float) -> Integers:
        """The sum of integer rows times residuals."""
        return self._shrunk(map).gradient(coefficients, bound)

    def _shrunk(self, map: RowMap) -> ShrunkRows:
        if self._kept is None or self._kept.map is not map:
            blocks = None
            if self._blocks is not None and self._blocks[0] is map.whitening:
                blocks = self._blocks[1]
            self._kept, self._blocks = map.shrunk(self._rows, blocks), None
        return self._kept


def _minus(values: Floats, centre: float) -> Floats:
    with np.errstate(over="ignore"):
        return np.asarray(values - centre)


def profile(magnitudes: Floats) -> Integers:
    """Counts of magnitudes by their exponent, after the count of zeros.

    Examples
    --------
    >>> counts = profile(np.array([0.0, 3.0, 2.5, 0.6]))
    >>> int(counts[0]), counts[counts > 0].tolist()
    (1, [1, 1, 2])
    """
    finite = np.minimum(magnitudes, _LARGEST)
    exponents = np.where(finite == 0, LOWEST - 1, np.frexp(finite)[1]) - (LOWEST - 1)
    return np.bincount(exponents, minlength=HIGHEST - LOWEST + 1).astype(np.int64)


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
