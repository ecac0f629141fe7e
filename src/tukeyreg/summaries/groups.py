"""The value that every engine returns, one triangular summary per group, and how it is added up.

A group's numbers are changed by its own rows only, one row after the other (docs/method.md,
section 2): where batches are cut, and whose rows lie between, changes no bit of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tukeyreg import kernel
from tukeyreg.errors import InvalidInput
from tukeyreg.kernel import Columns, Products, Triangles

__all__ = ["GroupSummaries", "GroupSums", "summarise", "triangles_of"]

Floats = NDArray[np.float64]
Groups = NDArray[np.signedinteger]

#: A pivot below this share of its column's length cannot tell its coefficient from later ones.
PIVOT_TOLERANCE = 1e-12


@dataclass(frozen=True, repr=False)
class GroupSummaries:
    """Triangular factors R_i and transformed labels z_i of m groups (docs/method.md, section 3).

    Summaries are functions of private rows and never leave the library.

    Attributes
    ----------
    factors : array (m, d, d)
        Upper triangular; a pivot that is zero up to a tolerance is stored as exactly zero.
    targets : array (m, d)
    """

    factors: Floats
    targets: Floats

    @classmethod
    def of_triangles(cls, triangles: Floats) -> GroupSummaries:
        """From the triangular factors (m, d + 1, d + 1) of [design, label]."""
        d = triangles.shape[1] - 1
        factors = np.ascontiguousarray(triangles[:, :d, :d])
        targets = np.ascontiguousarray(triangles[:, :d, d])
        zero = _zero_pivots(factors)
        np.einsum("mjj->mj", factors)[zero] = 0.0
        rows = np.flatnonzero((zero & (factors.any(axis=2) | (targets != 0))).any(axis=1))
        if len(rows):
            settled = _settled(triangles[rows])
            factors[rows], targets[rows] = settled[:, :d, :d], settled[:, :d, d]
        return cls(factors, targets)

    def models(self) -> Floats:
        """OLS coefficients (m, d) by back-substitution; 0 where a pivot is zero."""
        rows = np.ascontiguousarray(np.moveaxis(self.factors, 0, -1))
        rest = np.array(self.targets.T, order="C")
        for j in range(len(rest) - 1, -1, -1):
            pivot = rows[j, j]
            with np.errstate(all="ignore"):
                rest[j] = np.where(pivot == 0, 0.0, rest[j] / np.where(pivot == 0, 1.0, pivot))
                rest[:j] -= rows[:j, j] * rest[j]
        return np.ascontiguousarray(np.nan_to_num(rest, nan=0.0).T)


class GroupSums:
    """Rows of all groups, added up batch by batch.

    Sums of products, from every group's first row on, are all that most groups need. Where they
    have lost too many digits (nearly collinear columns, fewer rows than columns, absurd
    magnitudes) a group is *weak*: it needs a second look at its rows, by QR. Which groups are weak
    is a group's own affair; that a second look was needed at all can be seen from the time.
    ``checked`` makes sure that the same rows come the second time.

    Examples
    --------
    >>> x = np.arange(8.0)
    >>> sums = GroupSums(2, 1, intercept=True)
    >>> for rows in (slice(0, 3), slice(3, 8)):
    ...     sums.add(Columns([x[rows]], 5 - x[rows]), np.arange(8)[rows] % 2)
    >>> bool(sums.weak().any()), sums.summaries().models().round(6).tolist()
    (False, [[5.0, -1.0], [5.0, -1.0]])
    """

    def __init__(
        self,
        n_groups: int,
        n_features: int,
        *,
        intercept: bool,
        levels: Sequence[slice] = (),
        threads: int = 8,
        checked: bool = True,
    ) -> None:
        self._threads = threads
        self._intercept, self._levels = intercept, levels if intercept else ()
        self._sums = Products(n_groups, n_features, checked=checked)
        self._again: Triangles | None = None

    def add(self, columns: Columns, groups: Groups) -> None:
        """Add a batch; rows that are not finite, or of group -1, are left out."""
        kernel.add(
            columns, _contiguous(groups), self._sums, shifted=self._intercept, threads=self._threads
        )

    def weak(self) -> NDArray[np.bool_]:
        """Which groups need :meth:`add_again`, after all rows were added."""
        return ~self._factored[1]

    def add_again(self, columns: Columns, groups: Groups) -> None:
        """Add a batch once more, to the weak groups only."""
        weak = self.weak()
        place = np.where(weak, np.cumsum(weak) - 1, -1).astype(np.int32)
        if self._again is None:
            self._again = Triangles(
                int(weak.sum()),
                columns.n_features,
                intercept=self._intercept,
                checked=self._sums.check is not None,
            )
        # Group -1 would be the last one.
        again = np.where(groups < 0, -1, place[groups]).astype(np.int32)
        kernel.absorb(columns, again, self._again, threads=self._threads)

    def summaries(self) -> GroupSummaries:
        """The summaries of all groups."""
        triangles, sound = self._factored
        if self._again is not None:
            first, second = self._sums.check, self._again.check
            if first is not None and second is not None and (first[~sound] != second).any():
                raise InvalidInput(
                    "the rows came in another order when they were read again; nothing was "
                    "released."
                )
            triangles[~sound] = triangles_of(self._again)
        return GroupSummaries.of_triangles(triangles)

    @cached_property
    def _factored(self) -> tuple[Floats, NDArray[np.bool_]]:
        return kernel.factor(self._sums, intercept=self._intercept, aliased=self._aliased())

    def _aliased(self) -> NDArray[np.uint8] | None:
        """The last level that a group has of every category: with the intercept it is one too many.

        Which levels a group has is known exactly, from sums of zeros and ones.
        """
        if not self._levels:
            return None
        p = self._sums.n_features
        counts = (
            self._sums.gram[:, :p, p + 1] + self._sums.origin[:, :p] * self._sums.count[:, None]
        )
        aliased = np.zeros((len(counts), p), dtype=np.uint8)
        for category in self._levels:
            has = counts[:, category] > 0.5
            last = has.shape[1] - 1 - np.argmax(has[:, ::-1], axis=1)
            aliased[np.arange(len(has)), category.start + last] = has.any(axis=1)
        return aliased


def summarise(
    columns: Columns,
    groups: NDArray[np.int32],
    n_groups: int,
    *,
    intercept: bool,
    levels: Sequence[slice] = (),
) -> GroupSummaries:
    """Factor [1, features, target] of every group.

    Parameters
    ----------
    columns : Columns
        Rows that are not finite are left out.
    groups : array (n,) of integers in 0 .. n_groups - 1, or -1 for no group
    n_groups : int
    intercept : bool
        Whether a column of ones goes in front.
    levels : sequence of slices
        Features that are all levels of one category: one of them is 1, the others are 0.

    Examples
    --------
    >>> x = np.arange(8.0)
    >>> summaries = summarise(Columns([x], 1 + 2 * x), np.arange(8) % 2, 2, intercept=True)
    >>> summaries.models().round(6)
    array([[1., 2.],
           [1., 2.]])
    """
    sums = GroupSums(
        n_groups, columns.n_features, intercept=intercept, levels=levels, checked=False
    )
    sums.add(columns, groups)
    if sums.weak().any():
        sums.add_again(columns, groups)
    return sums.summaries()


def triangles_of(state: Triangles) -> Floats:
    """The triangles of rows that were absorbed, those that still wait included."""
    kernel.flush(state)
    w = state.width
    upper = np.triu(state.triangle[:, :w, :w])
    with np.errstate(over="ignore"):
        return np.asarray(np.ldexp(upper, state.exponent[:, None, :w]))


def _zero_pivots(factors: Floats) -> NDArray[np.bool_]:
    """Which pivots are zero up to the tolerance, or no numbers."""
    with np.errstate(over="ignore", invalid="ignore"):
        largest = np.max(np.abs(factors), axis=1)
        scaled = factors / np.where(largest > 0, largest, 1.0)[:, None]
        lengths = largest * np.sqrt(np.einsum("mij,mij->mj", scaled, scaled))
    return np.asarray(~(np.abs(np.einsum("mjj->mj", factors)) > PIVOT_TOLERANCE * lengths))


def _settled(triangles: Floats) -> Floats:
    """Triangles with zero rows where pivots are zero.

    Rounding errors decide the direction of a row whose pivot is zero. What it says on later columns
    is not lost: they are factored once more, with it and group by group.
    """
    for j in range(triangles.shape[1] - 1):
        zero = _zero_pivots(triangles[:, : j + 1, : j + 1])[:, j]
        triangles[zero, j, j] = 0.0
        at = np.flatnonzero(zero & triangles[:, j, j:].any(axis=1))
        if len(at):
            rows = triangles[at, j:, j + 1 :]
            triangles[at, j] = 0.0
            triangles[at, j + 1 :, j + 1 :] = _factored(rows)
    return triangles


def _factored(rows: Floats) -> Floats:
    """The triangle of each of several blocks of rows."""
    n, size, width = rows.shape
    state = Triangles(n, width - 1, intercept=False)
    groups = np.repeat(np.arange(n, dtype=np.int32), size)
    flat = rows.reshape(-1, width)
    kernel.absorb(Columns.of(flat[:, :-1], flat[:, -1]), groups, state)
    return triangles_of(state)


def _contiguous(groups: Groups) -> NDArray[np.int32]:
    return np.ascontiguousarray(groups, dtype=np.int32)
