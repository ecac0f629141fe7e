"""The value that every engine returns: one triangular summary per group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["GroupSummaries"]

Floats = NDArray[np.float64]

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
        with np.errstate(over="ignore", invalid="ignore"):
            largest = np.max(np.abs(factors), axis=1)
            scaled = factors / np.where(largest > 0, largest, 1.0)[:, None]
            lengths = largest * np.sqrt(np.sum(scaled**2, axis=1))
        pivots = np.einsum("mjj->mj", factors)
        # `not above` also catches what is not a number
        pivots[~(np.abs(pivots) > PIVOT_TOLERANCE * lengths)] = 0.0
        return cls(factors, np.ascontiguousarray(triangles[:, :d, d]))

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
