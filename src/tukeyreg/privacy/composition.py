"""What many small private steps add up to, without the slack of a conversion.

Converting zCDP to (epsilon, delta) gives away part of what the steps actually leave. Here the
hockey-stick divergence of the whole adaptive sequence is bounded directly (Lemma 3 of
docs/method.md), on a grid of logarithms whose every rounding is to the safe side.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

__all__ = ["largest_normal_by_divergence", "largest_stage_by_divergence", "sequence_delta"]

Floats = NDArray[np.float64]

#: Where the grid is used; outside of it the closed forms of zCDP and pure DP serve.
_LARGEST_EPSILON = 20.0
_SMALLEST_DELTA = 1e-14
_FEWEST_CELLS = 12
_SMALLEST_RATE = 1e-10
#: Relative error that is allowed for in normal tail probabilities, many times their own.
_TAIL_ERROR = 1e-11


def _cells(stages: int) -> int:
    """Grid cells per stage epsilon: as many as keep the computation well below a second."""
    return min(64, int(math.sqrt(1.6e6 / max(1, stages) ** 1.5)))


def _cells_beside_normal(stages: int) -> int:
    """The same where stages cost little beside normal noise."""
    return min(24, max(6, int(math.sqrt(2.5e5 / max(1, stages) ** 1.5))))


class _Grid:
    """Upper bounds of a divergence at exp(s), for s on a regular grid of logarithms."""

    def __init__(
        self, epsilon: float, step: float, deviation: float, reach: float, normal: float = 0.0
    ) -> None:
        self.step = step
        below = math.ceil((max(0.0, epsilon) + 6 * deviation + reach) / step)
        above = math.ceil((9 * deviation + reach) / step)
        s = np.asarray(epsilon + np.arange(-below, above + 1) * step, dtype=np.float64)
        # With no steps left max(0, 1 - exp(s)); or the divergence of normal noise.
        self._values = np.maximum(0.0, -np.expm1(s))
        if normal > 0:
            self._values = np.maximum(self._values, _normal_divergence(s, normal))
        self._at = below

    def value(self) -> float:
        """The bound at epsilon, with room for the rounding of at most 10**5 operations."""
        return float(self._values[self._at]) * (1 + 1e-10) + 1e-20

    def _padded(self, left: int, right: int) -> Floats:
        # Below the grid a divergence is at most 1; above it, at most its last value.
        below = np.ones(max(0, left))
        above = np.full(max(0, right), self._values[-1])
        return np.concatenate([below, self._values, above])

    def gaussian_step(self, rate: float) -> None:
        """A statistic of sensitivity 1 under discrete Gaussian noise, P[z] ~ exp(-rate z**2)."""
        reach = math.ceil(10 / math.sqrt(2 * rate))
        z = np.arange(-reach, reach + 1)
        mass = np.exp(-rate * z.astype(float) ** 2)
        # log P[z] / P[z - 1] = rate (1 - 2 z); rounding it up rounds the divergence up
        shift = np.ceil(rate * (1 - 2 * z) / self.step).astype(int)
        self._values = self._average(shift, mass / mass.sum()) + 1e-20

    def bounded_range_step(self, cells: int) -> None:
        """A bounded-range mechanism of epsilon = cells * step: the worst two-point law.

        Losses in [t - epsilon, t] for any t of a cell lie between the ends of the widened range
        [low, up], and by convexity the worst law there has only the two ends.
        """
        up = np.arange(1, cells + 1)
        low = up - 1 - cells
        odds = np.expm1(-low * self.step)
        chance = odds / (odds - np.expm1(-up * self.step))
        n = len(self._values)
        padded = self._padded(cells, cells)
        worst = np.zeros(n)
        for u, v, p in zip(up.tolist(), low.tolist(), chance.tolist(), strict=True):
            mixed = p * padded[cells - u : cells - u + n]
            mixed += (1 - p) * padded[cells - v : cells - v + n]
            np.maximum(worst, mixed, out=worst)
        self._values = worst

    def _average(self, shift: NDArray[np.int_], mass: Floats) -> Floats:
        n, most, least = len(self._values), int(np.max(shift)), int(np.min(shift))
        padded = self._padded(max(0, most), max(0, -least))
        total = np.zeros(n)
        start = max(0, most)
        weights = np.bincount(shift - least, mass)
        for offset in np.flatnonzero(weights).tolist():
            begin = start - (offset + least)
            total += weights[offset] * padded[begin : begin + n]
        return total


def _normal_divergence(s: Floats, rho: float) -> Floats:
    """Upper bounds of the divergence at exp(s) of normal noise with rho = shift**2 / 2 variance."""
    mu = math.sqrt(2 * rho)
    gained = np.exp(log_ndtr(mu / 2 - s / mu)) * (1 + _TAIL_ERROR)
    lost = np.exp(s + log_ndtr(-mu / 2 - s / mu)) * (1 - _TAIL_ERROR)
    return np.asarray(np.minimum(1.0, gained - lost + 1e-20))


def sequence_delta(
    epsilon: float,
    stages: int,
    stage_epsilon: float,
    before: tuple[float, ...] = (),
    after: tuple[float, ...] = (),
    normal: float = 0.0,
) -> float:
    """A delta at which the adaptive sequence is (epsilon, delta)-DP (Lemma 3).

    The recursion runs backwards in time. The order matters: a stage may be the worse for what
    was seen before it.

    Parameters
    ----------
    epsilon : float
    stages : int
        Number of stages that are stage_epsilon-DP and stage_epsilon-bounded-range.
    stage_epsilon : float
    before, after : tuple of float
        Discrete Gaussian statistics of sensitivity 1 that are released before and after the
        stages, each by its rho.
    normal : float
        What normal mechanisms that come last add up to, in rho. Any number of them, chosen
        adaptively, is no worse than one (Dong, Roth and Su 2022, Corollary 2).

    Examples
    --------
    One stage alone loses exactly what the two-point law does, (1 - exp(-e/2))**2 / (1 - exp(-e))
    at epsilon = 0:

    >>> exact = (1 - math.exp(-0.5)) ** 2 / (1 - math.exp(-1))
    >>> exact < sequence_delta(0.0, 1, 1.0) < 1.05 * exact
    True
    """
    deviation = math.sqrt(stages) * stage_epsilon / 2 + math.sqrt(
        2 * sum((*before, *after, normal))
    )
    if deviation == 0:  # nothing at all
        return max(0.0, -math.expm1(epsilon))
    cells = _cells_beside_normal(stages) if normal else _cells(stages)
    step = stage_epsilon / cells if stages else max(deviation / 200, abs(epsilon) / 4000)
    grid = _Grid(epsilon, step, deviation, stage_epsilon, normal)
    for rate in reversed(after):
        grid.gaussian_step(rate)
    for _ in range(stages):
        grid.bounded_range_step(cells)
    for rate in reversed(before):
        grid.gaussian_step(rate)
    return min(1.0, grid.value())


@lru_cache(maxsize=128)
def largest_stage_by_divergence(
    epsilon: float,
    delta: float,
    stages: int,
    before: tuple[float, ...],
    after: tuple[float, ...],
    start: float,
) -> float:
    """The largest stage epsilon found, from ``start`` on, that stays within (epsilon, delta).

    ``start`` is a value that is known to be within the budget (by zCDP); it is returned where
    the grid does not apply.
    """
    applies = (
        epsilon <= _LARGEST_EPSILON
        and delta >= _SMALLEST_DELTA
        and _cells(stages) >= _FEWEST_CELLS
        and min(before + after, default=1.0) >= _SMALLEST_RATE
        and start > 0
    )
    if not applies:
        return start
    low, high = start, 2 * start
    for _ in range(9):
        middle = (low + high) / 2
        if sequence_delta(epsilon, stages, middle, before, after) <= delta:
            low = middle
        else:
            high = middle
    return low


@lru_cache(maxsize=256)
def largest_normal_by_divergence(
    epsilon: float,
    delta: float,
    stages: int,
    stage_epsilon: float,
    before: tuple[float, ...],
    start: float,
) -> float:
    """The largest rho found, from ``start`` on, that normal mechanisms after the stages may cost.

    ``start`` is a value that is known to be within the budget (by zCDP); it is returned where
    the grid does not apply.

    Examples
    --------
    >>> from tukeyreg.privacy.budget import largest_rho
    >>> by_zcdp = largest_rho(1.0, 1e-6)
    >>> 1.14 < largest_normal_by_divergence(1.0, 1e-6, 0, 0.0, (), by_zcdp) / by_zcdp < 1.16
    True
    """
    applies = (
        epsilon <= _LARGEST_EPSILON
        and delta >= _SMALLEST_DELTA
        and min(before, default=1.0) >= _SMALLEST_RATE
        and start > 0
    )
    if not applies:
        return start

    def fits(rho: float) -> bool:
        return sequence_delta(epsilon, stages, stage_epsilon, before, (), rho) <= delta

    low, high = start, 1.25 * start
    while fits(high):
        low, high = high, 1.25 * high
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
