"""``sequential``: private back-substitution (docs/method.md, section 5).

Every group votes for one coefficient at a time, given the coefficients already released; the
coefficient is the private median of the votes under a base measure that needs no bounds. A final
verdict releases all of them or none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from flint import arb
from numpy.typing import NDArray

from tukeyreg.mechanisms.depth import UNIT, halving_table
from tukeyreg.mechanisms.noise import IntegerNoise
from tukeyreg.mechanisms.randomness import Floats, Randomness, Weights

__all__ = [
    "ATOM",
    "PrivateMedian",
    "SequentialParameters",
    "base_measure",
    "depth_of",
    "release",
    "verdict_threshold",
]

#: Share of the base measure that sits on exactly zero (rare categories, aliased columns).
ATOM = 1 / 16

#: The verdict's promise: with at least this probability every released coefficient has at least
#: an eighth of the groups on either side.
VERDICT_CONFIDENCE = 0.999

LARGEST = np.finfo(np.float64).max


@dataclass(frozen=True)
class SequentialParameters:
    """The numbers that fix ``sequential``: epsilon of one stage, and the verdict's noise."""

    stage_epsilon: float
    verdict: IntegerNoise


def base_measure(low: Floats, high: Floats) -> Floats:
    """Mass of the double Pareto measure between neighbouring break points, certified.

    ``low`` and ``high`` are ends of intervals that do not cross -1, 0 or 1. With s = 8 the CDF
    is three square roots, and the difference of two values of it is computed without
    cancellation: b**(1/8) - a**(1/8) = (b - a) / product of sums of roots. Each mass is within
    ``24 * UNIT`` relative of the true one. Ends are infinite only in the outermost intervals.

    Examples
    --------
    >>> base_measure(np.array([0.0, 1.0, -1.0]), np.array([1.0, np.inf, 0.0]))
    array([0.25, 0.25, 0.25])
    """
    near = np.minimum(np.abs(low), np.abs(high))
    far = np.maximum(np.abs(low), np.abs(high))
    near_roots, far_roots = _roots(near), _roots(far)
    with np.errstate(all="ignore"):  # the branches not taken
        difference = (far - near) / (
            (far_roots[0] + near_roots[0])
            * (far_roots[1] + near_roots[1])
            * (far_roots[2] + near_roots[2])
        )
        outside = np.where(
            np.isinf(far), 1 / near_roots[2], difference / (near_roots[2] * far_roots[2])
        )
    return np.asarray(np.where(far <= 1, difference, outside) / 4)


def _roots(values: Floats) -> tuple[Floats, Floats, Floats]:
    second = np.sqrt(values)
    fourth = np.sqrt(second)
    return second, fourth, np.sqrt(fourth)


class PrivateMedian:
    """The law of one stage: exponential mechanism over the real line (Theorem 2).

    Density with respect to the base measure is proportional to exp(epsilon u / 2), u the closed
    one-dimensional depth among the votes. Replacing one vote moves u by at most 1, so a draw is
    epsilon-DP and epsilon-bounded-range.

    Examples
    --------
    >>> law = PrivateMedian(np.linspace(9, 11, 500), 0.5)
    >>> bool(abs(law.sample(Randomness(seed=0)) - 10) < 0.2)
    True

    With a width a vote is the interval of numbers that agree with it up to this share, so that
    many equal votes are a target that can be hit:

    >>> law = PrivateMedian(np.full(500, 10.0), 0.5, width=1e-6)
    >>> bool(abs(law.sample(Randomness(seed=0)) - 10) < 1e-4)
    True
    """

    def __init__(self, votes: Floats, epsilon: float, width: float = 0.0) -> None:
        ordered = np.sort(votes)
        self._lower = self._upper = ordered
        if width:
            half = np.abs(ordered) * width
            with np.errstate(over="ignore"):
                self._lower = np.maximum(ordered - half, -LARGEST)
                self._upper = np.minimum(ordered + half, LARGEST)
        self._epsilon = epsilon

    @property
    def epsilon(self) -> float:
        """Twice the factor of the depth in the exponent."""
        return self._epsilon

    def depth_changes(self, other: PrivateMedian) -> list[int]:
        """The depth less that among other votes, at all points where it can differ."""
        ends = [law._lower for law in (self, other)] + [law._upper for law in (self, other)]
        marks = np.unique(np.concatenate([*ends, [-1.0, 0.0, 1.0]]))
        between = marks[1:] / 2 + marks[:-1] / 2
        points = np.concatenate([marks, between, [-LARGEST, LARGEST]]).tolist()
        return [self._depth(point) - other._depth(point) for point in points]

    def _depth(self, point: float) -> int:
        below = np.count_nonzero(self._lower <= point)
        return int(min(below, np.count_nonzero(self._upper >= point)))

    @cached_property
    def _pieces(self) -> tuple[Floats, Floats, NDArray[np.int64]]:
        """Lower ends, upper ends and depths of the open intervals between break points."""
        m = len(self._lower)
        ends = [self._lower] if self._lower is self._upper else [self._lower, self._upper]
        marks = np.concatenate([*ends, [-1.0, 0.0, 1.0]])
        order = np.argsort(marks, kind="stable")
        inner = marks[order]
        low = np.concatenate([[-np.inf], inner])
        high = np.concatenate([inner, [np.inf]])
        kept = low < high
        # How many votes begin, and how many end, up to every mark; of equal marks the last is kept.
        begun = np.cumsum(order < m)
        ended = begun if len(ends) == 1 else np.cumsum((order >= m) & (order < 2 * m))
        depths = np.concatenate([[0], np.minimum(begun, m - ended)])
        return low[kept], high[kept], depths[kept]

    def weights(self) -> Weights:
        """Weights of the atom at zero, then of the open intervals from left to right."""
        low, high, depths = self._pieces
        scale = halving_table(self._epsilon, len(self._lower))
        at_zero = self._depth(0.0)
        top = max(int(np.max(depths)), at_zero)
        masses = np.concatenate([[ATOM], (1 - ATOM) * base_measure(low, high)])
        depth_of_piece = np.concatenate([[at_zero], depths])
        return Weights(masses * scale[top - depth_of_piece], 32 * UNIT, self._exact_weights)

    def sample(self, randomness: Randomness) -> float:
        """One draw, correctly rounded: a piece by weight, then the base measure inside it."""
        index = randomness.choice(self.weights())
        if index == 0:
            return 0.0
        low, high, _ = self._pieces
        return _point(float(low[index - 1]), float(high[index - 1]), randomness)

    def _exact_weights(self) -> list[arb]:
        low, high, depths = self._pieces
        half = arb(self._epsilon) / 2
        weights = [arb(ATOM) * (half * self._depth(0.0)).exp()]
        for a, b, depth in zip(low.tolist(), high.tolist(), depths.tolist(), strict=True):
            start, stop = _side(a, b)
            mass = abs(_eighth_root(stop) - _eighth_root(start)) / 4
            weights.append((1 - arb(ATOM)) * mass * (half * depth).exp())
        return weights


def _side(low: float, high: float) -> tuple[float, float]:
    """Ends of an interval as magnitudes whose eighth roots are linear in the base measure.

    Within [-1, 1] these are the magnitudes; beyond, their inverses, marked by a minus sign.
    """
    near, far = sorted((abs(low), abs(high)))
    return (near, far) if far <= 1 else (-far, -near)


def _eighth_root(mark: float) -> arb:
    if mark == -np.inf:
        return arb(0)
    root = arb(abs(mark)).root(8)
    return 1 / root if mark < 0 else root


def _point(low: float, high: float, randomness: Randomness) -> float:
    """A draw of the base measure between two break points."""
    sign = -1.0 if low < 0 else 1.0
    start, stop = _side(low, high)
    inverted = start < 0

    def quantile(uniform: arb) -> arb:
        first, last = _eighth_root(start), _eighth_root(stop)
        power = (first + uniform * (last - first)) ** 8
        return 1 / power if inverted else power

    return sign * randomness.point(quantile)


def depth_of(votes: Floats, point: float) -> int:
    """Closed one-dimensional depth: the smaller number of votes on either side of a point."""
    return int(min(np.count_nonzero(votes <= point), np.count_nonzero(votes >= point)))


def verdict_threshold(groups: int, noise: IntegerNoise) -> int:
    """What D + Z must reach for a release: an eighth of the groups, and the noise's margin.

    With it a set of coefficients that has fewer than an eighth of the groups on some side is
    released with probability at most 1 - VERDICT_CONFIDENCE.
    """
    return -(-groups // 8) + noise.quantile(1 - VERDICT_CONFIDENCE)


def release(
    factors: Floats, targets: Floats, parameters: SequentialParameters, randomness: Randomness
) -> Floats | None:
    """Coefficients by private back-substitution, or ``None`` when the verdict refuses.

    Parameters
    ----------
    factors : array (m, d, d)
        Upper triangular factor of every group; a zero pivot marks an unidentified coefficient.
    targets : array (m, d)
        The transformed labels of every group.
    parameters, randomness
        What fixes the mechanism, and where its decisions come from.

    Notes
    -----
    Formal guarantee (Theorem 2): for inputs that differ in one group, d stages that are each
    stage_epsilon-DP and stage_epsilon-bounded-range, and the noisy verdict on a statistic of
    sensitivity 1. What they add up to is the business of ``tukeyreg.privacy``.
    """
    stages = list(_back_substitute(factors, targets, parameters.stage_epsilon, randomness))
    shallowest = min(depth for _, depth in stages)
    noise = parameters.verdict.sample(randomness)
    if shallowest + noise < verdict_threshold(len(targets), parameters.verdict):
        return None
    return np.array([coefficient for coefficient, _ in reversed(stages)])


def _back_substitute(
    factors: Floats, targets: Floats, epsilon: float, randomness: Randomness
) -> Iterator[tuple[float, int]]:
    """Coefficients from the last to the first, each with its depth among the votes."""
    # Groups run along the last axis, so that every update is elementwise and contiguous: a vote
    # is a function of its own group's numbers alone.
    rows = np.ascontiguousarray(np.moveaxis(factors, 0, -1))
    rest = np.array(targets.T, order="C")
    for j in range(len(rest) - 1, -1, -1):
        votes = _votes(rest[j], rows[j, j])
        coefficient = PrivateMedian(votes, epsilon).sample(randomness)
        yield coefficient, depth_of(votes, coefficient)
        with np.errstate(over="ignore", invalid="ignore"):
            rest[:j] -= rows[:j, j] * coefficient


def _votes(target: Floats, pivot: Floats) -> Floats:
    """Every group's solution for one coefficient; 0 where it has none, finite always."""
    with np.errstate(all="ignore"):
        votes = np.where(pivot == 0, 0.0, target / np.where(pivot == 0, 1.0, pivot))
    return np.nan_to_num(votes, nan=0.0, posinf=LARGEST, neginf=-LARGEST)
