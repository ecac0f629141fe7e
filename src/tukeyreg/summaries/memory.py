"""Group summaries of rows that are in memory.

The rows of a group are brought together first and factored on their own, so that a group's
summary is a function of that group's rows alone, bit for bit (docs/method.md, section 2): sums
never run across groups, and where other groups' rows lie does not matter. Groups are padded with
zero rows to a length that depends on their own size only, and each is copied by the QR routine
into its own work space before it is factored.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tukeyreg.summaries.groups import GroupSummaries

__all__ = ["summarise"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_BATCH_BYTES = 1 << 24


def summarise(
    design: NDArray[np.floating],
    target: Floats,
    groups: Integers,
    n_groups: int,
    *,
    intercept: bool,
) -> GroupSummaries:
    """Factor [1, design, target] of every group.

    Parameters
    ----------
    design : array (n, p), float64 or float32
    target : array (n,)
    groups : array (n,) of integers in 0 .. n_groups - 1
    n_groups : int
    intercept : bool
        Whether a column of ones goes in front.

    Examples
    --------
    >>> x = np.arange(8.0)[:, None]
    >>> summaries = summarise(x, 1 + 2 * x[:, 0], np.arange(8) % 2, 2, intercept=True)
    >>> summaries.models().round(6)
    array([[1., 2.],
           [1., 2.]])
    """
    order = np.argsort(groups, kind="stable")
    sizes = np.bincount(groups, minlength=n_groups)
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    width = design.shape[1] + int(intercept) + 1
    triangles = np.zeros((n_groups, width, width))
    padded = np.where(sizes > 0, _padded_sizes(sizes, width), 0)
    for rows in np.unique(padded[padded > 0]).tolist():
        members = np.flatnonzero(padded == rows)
        batch = max(1, _BATCH_BYTES // (8 * rows * width))
        for first in range(0, len(members), batch):
            chosen = members[first : first + batch]
            block = _gather(design, target, order, starts[chosen], sizes[chosen], rows, intercept)
            triangles[chosen] = _triangles(block)
    return GroupSummaries.of_triangles(triangles)


def _padded_sizes(sizes: Integers, width: int) -> Integers:
    """The number of rows each group is padded to: a function of its own size only."""
    least = np.maximum(sizes, width)
    step = 1 << np.maximum(0, np.frexp(least.astype(float))[1] - 4)
    return np.asarray(-(-least // step) * step)


def _gather(
    design: NDArray[np.floating],
    target: Floats,
    order: Integers,
    starts: Integers,
    sizes: Integers,
    rows: int,
    intercept: bool,
) -> Floats:
    """Zero-padded blocks (b, rows, width) of [1, design, target]."""
    position = np.arange(rows)
    present = position < sizes[:, None]
    source = order[np.where(present, starts[:, None] + position, starts[:, None])]
    columns = design.shape[1]
    block = np.empty((len(sizes), rows, columns + int(intercept) + 1))
    if intercept:
        block[:, :, 0] = 1.0
    block[:, :, int(intercept) : -1] = design[source]
    block[:, :, -1] = target[source]
    block[~present] = 0.0
    return block


def _triangles(block: Floats) -> Floats:
    """Triangular factors of every block, equilibrated by powers of two, which are exact."""
    largest = np.maximum(block.max(axis=1), -block.min(axis=1))
    exponent = np.frexp(largest)[1]
    np.ldexp(block, -exponent[:, None, :], out=block)
    factors = np.asarray(np.linalg.qr(block, mode="r"))
    with np.errstate(over="ignore"):
        return np.asarray(np.ldexp(factors, exponent[:, None, :]))
