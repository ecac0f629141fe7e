"""Sorted sides of a set of models, and volumes by depth, with certified rounding.

For m models in d dimensions the region of closed axis-aligned depth at least p is the box of the
p-th smallest and p-th largest coordinates (docs/method.md, section 4). Products of many widths
leave the range of doubles, so volumes are kept as :class:`Scaled` pairs; they are built from
IEEE multiplications and additions of non-negative numbers only, each of which errs by at most
2**-53 relative, so every error bound here is a count of operations. No logarithm is trusted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from flint import arb, ctx
from numpy.typing import NDArray

__all__ = ["Scaled", "Sides", "exponentials", "halving_table"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

#: Relative error of one IEEE operation, rounded up.
UNIT = 2.0**-52

#: The exponent of zero: so low that zero never sets the scale. Typed, because beside the 32-bit
#: exponents of frexp a Python integer would be cut to 32 bits.
_NOTHING = np.int64(-(2**40))


@dataclass(frozen=True)
class Scaled:
    """Non-negative numbers ``mantissa * 2**exponent``, far beyond the range of doubles."""

    mantissa: Floats
    exponent: Integers

    @classmethod
    def of(cls, values: Floats) -> Scaled:
        """Doubles as scaled numbers, exactly."""
        mantissa, exponent = np.frexp(values)
        return cls(mantissa, np.where(mantissa == 0, _NOTHING, exponent))

    def __getitem__(self, item: Any) -> Scaled:
        return Scaled(self.mantissa[item], self.exponent[item])

    def __mul__(self, other: Scaled) -> Scaled:
        mantissa, shift = np.frexp(self.mantissa * other.mantissa)
        exponent = self.exponent + other.exponent + shift
        return Scaled(mantissa, np.where(mantissa == 0, _NOTHING, exponent))

    def __add__(self, other: Scaled) -> Scaled:
        top = np.maximum(self.exponent, other.exponent)
        mantissa, shift = np.frexp(self._at(top) + other._at(top))
        return Scaled(mantissa, np.where(mantissa == 0, _NOTHING, top + shift))

    def relative(self) -> Floats:
        """As doubles, divided by the power of two that makes the largest less than 1."""
        return self._at(np.asarray(np.max(self.exponent)))

    def _at(self, exponent: Integers) -> Floats:
        # What is flushed to zero here is below 2**-1000 of the largest.
        below = np.clip(self.exponent - exponent, -1000, 0)
        shifted: Floats = np.ldexp(self.mantissa, below.astype(np.int32))
        return np.where(below > -1000, shifted, 0.0)

    def log2(self) -> Floats:
        """Base-2 logarithms, for planning and diagnostics; not certified."""
        with np.errstate(divide="ignore"):
            return np.log2(self.mantissa) + self.exponent


@lru_cache(maxsize=64)
def exponentials(rate: float, count: int) -> Scaled:
    """``exp(rate * k / 2)`` for k = 0 .. count, each within ``2 * UNIT`` relative."""
    with ctx.workprec(128):
        step, two = arb(rate) / 2, arb.const_log2()
        mantissas, exponents = [], []
        for k in range(count + 1):
            power = math.floor(float(step * k / two))
            mantissas.append(float((step * k - two * power).exp()))
            exponents.append(power)
    mantissa, shift = np.frexp(np.array(mantissas))
    return Scaled(mantissa, np.array(exponents, dtype=np.int64) + shift)


@lru_cache(maxsize=64)
def halving_table(rate: float, count: int) -> Floats:
    """``exp(-rate * k / 2)`` for k = 0 .. count as doubles, each within ``2 * UNIT`` relative.

    Values below 2**-1000 are zero.
    """
    table = np.zeros(count + 1)
    with ctx.workprec(128):
        step = -arb(rate) / 2
        for k in range(count + 1):
            value = float((step * k).exp())
            if value < 2.0**-1000:
                break
            table[k] = value
    table.setflags(write=False)
    return table


@dataclass(frozen=True)
class Sides:
    """The coordinates of m models, sorted in each of d dimensions.

    Depth runs from 1 to ``deepest = m // 2`` wherever there is volume: for odd m the set of
    points of depth (m + 1) / 2 is a single point.

    Examples
    --------
    >>> sides = Sides.of(np.array([[0.0, 0.0], [1.0, 4.0], [2.0, 2.0], [4.0, 6.0]]))
    >>> sides.deepest
    2
    >>> sides.volume.log2()  # 4 * 6 and 1 * 2
    array([4.5849625, 1.       ])
    """

    ordered: Floats  # (d, m)

    @classmethod
    def of(cls, models: Floats) -> Sides:
        """Sort the columns of an m x d array of finite doubles."""
        return cls(np.sort(np.ascontiguousarray(models.T), axis=1))

    @property
    def dimensions(self) -> int:
        """Number of coefficients d."""
        return int(self.ordered.shape[0])

    @property
    def deepest(self) -> int:
        """The largest depth that can have a volume."""
        return int(self.ordered.shape[1]) // 2

    def bounds(self, depth: int) -> tuple[Floats, Floats]:
        """Lower and upper corner of the box of depth at least ``depth``."""
        m = self.ordered.shape[1]
        if depth > m - depth + 1:  # beyond the middle of an even set: nothing
            middle = self.ordered[:, m // 2]
            return middle, middle
        return self.ordered[:, depth - 1], self.ordered[:, m - depth]

    @cached_property
    def widths(self) -> Scaled:
        """(d, deepest + 1): side lengths of the boxes of depth at least 1, 2, ...; then 0."""
        m, h = self.ordered.shape[1], self.deepest
        lower, upper = self.ordered[:, :h], self.ordered[:, ::-1][:, :h]
        assert m >= 2
        return Scaled.of(np.hstack([upper - lower, np.zeros((self.dimensions, 1))]))

    @cached_property
    def gaps(self) -> tuple[Scaled, Scaled]:
        """(d, deepest) each: lengths at exactly each depth, left side and right side."""
        m, h = self.ordered.shape[1], self.deepest
        left = self.ordered[:, 1 : h + 1] - self.ordered[:, :h]
        right = self.ordered[:, m - h :] - self.ordered[:, m - h - 1 : m - 1]
        right = np.ascontiguousarray(right[:, ::-1])
        if m % 2 == 0:
            right[:, h - 1] = 0.0  # the middle interval of an even set is one, not two
        return Scaled.of(left), Scaled.of(right)

    @cached_property
    def volume(self) -> Scaled:
        """V_1 .. V_deepest, within ``d * UNIT * 2`` relative."""
        product = self.widths[0]
        for j in range(1, self.dimensions):
            product = product * self.widths[j]
        return product[: self.deepest]

    @cached_property
    def cells(self) -> Scaled:
        """(deepest, d, 2): volumes of the cells that the region of exactly each depth splits into.

        Cell (p, j, side) holds the points whose first dimension of depth exactly p is j and that
        lie on the given side of it: deeper than p before j, at least p after j (the dimensions
        after j use the box of depth p, not p + 1). Within ``2 * (d + 1) * UNIT`` relative.
        """
        d, h = self.dimensions, self.deepest
        left, right = self.gaps
        after = [Scaled.of(np.ones(h))]
        for j in range(d - 1, 0, -1):
            after.append(after[-1] * self.widths[j, :h])
        after.reverse()
        before = Scaled.of(np.ones(h))
        cells = []
        for j in range(d):
            rest = before * after[j]
            cells += [rest * left[j], rest * right[j]]
            before = before * self.widths[j, 1:]
        mantissa = np.stack([cell.mantissa for cell in cells], axis=1)
        exponent = np.stack([cell.exponent for cell in cells], axis=1)
        return Scaled(mantissa.reshape(h, d, 2), exponent.reshape(h, d, 2))

    def exact_volume(self, depth: int) -> arb:
        """V_depth as a ball at Arb's working precision."""
        if depth > self.deepest:
            return arb(0)
        lower, upper = self.bounds(depth)
        product = arb(1)
        for low, high in zip(lower.tolist(), upper.tolist(), strict=True):
            product = product * (arb(high) - arb(low))
        return product

    def exact_cells(self, depth: int) -> Sequence[arb]:
        """The 2 d cells at exactly ``depth`` as balls, in the order of :attr:`cells`."""
        here = _ball_sides(*self.bounds(depth))
        deeper = (
            _ball_sides(*self.bounds(depth + 1))
            if depth < self.deepest
            else [arb(0)] * self.dimensions
        )
        lows, highs = (corner.tolist() for corner in self.bounds(depth))
        m = self.ordered.shape[1]
        inner_lows = self.ordered[:, depth].tolist()
        inner_highs = self.ordered[:, m - depth - 1].tolist()
        after = [arb(1)]
        for j in range(self.dimensions - 1, 0, -1):
            after.append(after[-1] * here[j])
        after.reverse()
        before, cells = arb(1), []
        for j in range(self.dimensions):
            rest = before * after[j]
            single = 2 * depth == m
            cells.append(rest * (arb(inner_lows[j]) - arb(lows[j])))
            cells.append(arb(0) if single else rest * (arb(highs[j]) - arb(inner_highs[j])))
            before = before * deeper[j]
        return cells


def _ball_sides(lower: Floats, upper: Floats) -> list[arb]:
    return [arb(high) - arb(low) for low, high in zip(lower.tolist(), upper.tolist(), strict=True)]
