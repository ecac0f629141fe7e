"""``joint``: the paper's TukeyEM with constants that hold (docs/method.md, section 4).

A safety test by propose-test-release decides whether a point of high depth among the m models
can be released; if so, the restricted exponential mechanism draws one. The functions below
compute a distribution and sample it separately, so that the distribution can be verified.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flint import arb
from numpy.typing import NDArray

from tukeyreg.mechanisms.depth import UNIT, Scaled, Sides, exponentials
from tukeyreg.mechanisms.randomness import (
    Floats,
    Randomness,
    Weights,
    precisions,
    tail_threshold,
)

__all__ = ["JointParameters", "SafetyTest", "break_ties", "release", "restricted_law"]

#: Coordinates beyond this magnitude are brought to it, model by model, so that widths are finite.
LARGEST = 2.0**1000


@dataclass(frozen=True)
class JointParameters:
    """The numbers that fix ``joint``: its guarantee is (test + selection epsilon, delta)."""

    test_epsilon: float
    selection_epsilon: float
    delta: float
    restriction_depth: int


def break_ties(models: Floats, randomness: Randomness) -> Floats:
    """Move every coefficient by a random hair of its own size, so that regions have volume.

    The hair is at most 2**-40 of the coefficient's own magnitude (2**-1000 for a zero). It is
    drawn per model, whatever the models are, so replacing one model still changes one model.
    """
    hair = randomness.hairs(*models.shape)
    bounded = np.clip(models, -LARGEST, LARGEST)
    return np.asarray(bounded * (1 + hair * 2.0**-40) + (bounded == 0) * hair * 2.0**-1000)


class SafetyTest:
    """The distance k* of Lemma 2 and the threshold of Theorem 1."""

    def __init__(self, sides: Sides, parameters: JointParameters) -> None:
        self._sides = sides
        self._parameters = parameters
        depth = parameters.restriction_depth
        if not 1 <= depth <= sides.deepest:
            raise ValueError(f"restriction depth {depth} is outside 1 .. {sides.deepest}")
        self._deep_mass = _deep_masses(sides, parameters.selection_epsilon)
        self._growth = exponentials(parameters.selection_epsilon, 2 * sides.deepest)
        # Products and sums behind both sides of C_k, each counted once.
        operations = 8 * sides.dimensions + 2 * sides.deepest + 64
        self._slack = operations * UNIT

    @property
    def threshold(self) -> int:
        """T of Theorem 1: a data set that is not safe passes with probability at most delta."""
        return tail_threshold(self._parameters.test_epsilon, self._parameters.delta)

    def distance(self) -> int:
        """k*: the largest k for which C_k holds, or -1. 1-sensitive (Lemma 2)."""
        depth = self._parameters.restriction_depth
        low, high = -1, min(depth - 2, self._sides.deepest - depth) + 1
        while high - low > 1:  # C_k implies C_(k-1)
            middle = (low + high) // 2
            if self._condition(middle):
                low = middle
            else:
                high = middle
        return low

    def passes(self, randomness: Randomness) -> bool:
        """The private test (Theorem 1)."""
        noise = randomness.discrete_laplace(self._parameters.test_epsilon)
        return self.distance() + noise >= self.threshold

    def _condition(self, k: int) -> bool:
        """C_k: V_(t-1-k) exp(eps (t+1+k)/2) <= delta M_(t+k), and M_(t+k) > 0."""
        depth, delta = self._parameters.restriction_depth, self._parameters.delta
        outer = self._sides.volume[depth - 2 - k]
        growth = self._growth[depth + 1 + k]
        mass = self._deep_mass[depth + k - 1]
        if mass.mantissa == 0:
            return False
        left, right = outer * growth, mass * Scaled.of(np.float64(delta))  # type: ignore[arg-type]
        apart = int(left.exponent - right.exponent)
        if abs(apart) > 4:
            return apart < 0
        ratio = float(np.ldexp(left.mantissa / right.mantissa, apart))
        if ratio < 1 - self._slack:
            return True
        if ratio > 1 + self._slack:
            return False
        return self._condition_exactly(k)

    def _condition_exactly(self, k: int) -> bool:
        # Equality is impossible (exponentials of distinct algebraic numbers are linearly
        # independent over the algebraic numbers), so this ends.
        depth, epsilon = self._parameters.restriction_depth, self._parameters.selection_epsilon
        for _ in precisions():
            half = arb(epsilon) / 2
            left = self._sides.exact_volume(depth - 1 - k) * (half * (depth + 1 + k)).exp()
            mass = arb(0)
            for p in range(depth + k, self._sides.deepest + 1):
                shell = self._sides.exact_volume(p) - self._sides.exact_volume(p + 1)
                mass += shell * (half * p).exp()
            right = arb(self._parameters.delta) * mass
            if left <= right:
                return True
            if left > right:
                return False
        raise AssertionError


def _deep_masses(sides: Sides, epsilon: float) -> Scaled:
    """M_1 .. M_deepest: mass of depth at least p under exp(epsilon u / 2)."""
    shells = sides.cells[:, 0, 0]
    for j in range(sides.dimensions):
        for side in range(2):
            if j or side:
                shells = shells + sides.cells[:, j, side]
    shells = shells * exponentials(epsilon, sides.deepest)[1:]
    mantissa, exponent = shells.mantissa.copy(), shells.exponent.copy()
    for p in range(sides.deepest - 2, -1, -1):
        total = Scaled(mantissa[p], exponent[p]) + Scaled(mantissa[p + 1], exponent[p + 1])
        mantissa[p], exponent[p] = total.mantissa, total.exponent
    return Scaled(mantissa, exponent)


class RestrictedLaw:
    """The restricted exponential mechanism A_t: density prop. to exp(eps u / 2) on {u >= t}."""

    def __init__(self, sides: Sides, parameters: JointParameters) -> None:
        self._sides = sides
        self._depth = parameters.restriction_depth
        self._epsilon = parameters.selection_epsilon

    @property
    def empty(self) -> bool:
        """Whether no point is that deep: then there is nothing to draw."""
        return not np.any(self._cells().mantissa > 0)

    def cell_weights(self) -> Weights:
        """Weights of the cells (depth - t, dimension, side), flattened."""
        operations = 2 * (self._sides.dimensions + 4)
        growth = exponentials(self._epsilon, self._sides.deepest)[self._depth :]
        weighted = self._cells() * growth[:, None, None]
        return Weights(weighted.relative().ravel(), operations * UNIT, self._exact_weights)

    def sample(self, randomness: Randomness) -> Floats:
        """One point: a cell by weight, then uniform in it, every coordinate correctly rounded."""
        index = randomness.choice(self.cell_weights())
        above, rest = divmod(index, 2 * self._sides.dimensions)
        chosen, side = divmod(rest, 2)
        depth = self._depth + above
        low, high = self._box(depth, chosen, side)
        return np.array(
            [randomness.uniform_point(a, b) for a, b in zip(low, high, strict=True)], dtype=float
        )

    def _box(self, depth: int, chosen: int, side: int) -> tuple[list[float], list[float]]:
        low, high = (corner.copy() for corner in self._sides.bounds(depth))
        if depth < self._sides.deepest:
            inner_low, inner_high = self._sides.bounds(depth + 1)
        else:
            inner_low = inner_high = self._sides.ordered[:, depth]
        low[:chosen], high[:chosen] = inner_low[:chosen], inner_high[:chosen]
        if side == 0:
            high[chosen] = inner_low[chosen]
        else:
            low[chosen] = inner_high[chosen]
        return low.tolist(), high.tolist()

    def _cells(self) -> Scaled:
        return self._sides.cells[self._depth - 1 :]

    def _exact_weights(self) -> list[arb]:
        half = arb(self._epsilon) / 2
        return [
            cell * (half * depth).exp()
            for depth in range(self._depth, self._sides.deepest + 1)
            for cell in self._sides.exact_cells(depth)
        ]


def restricted_law(models: Floats, parameters: JointParameters) -> RestrictedLaw:
    """The law that ``release`` samples once the test has passed."""
    return RestrictedLaw(Sides.of(models), parameters)


def release(
    models: NDArray[np.float64], parameters: JointParameters, randomness: Randomness
) -> Floats | None:
    """A point of high depth, or ``None`` when the safety test refuses.

    Formal guarantee (Theorem 1): for two m x d arrays that differ in one row the outcome is
    (test_epsilon + selection_epsilon, delta)-indistinguishable.

    Examples
    --------
    >>> parameters = JointParameters(1.0, 1.0, 1e-6, restriction_depth=50)
    >>> models = np.linspace(-1, 1, 200)[:, None]
    >>> point = release(models, parameters, Randomness(seed=3))
    >>> bool(abs(point[0]) < 0.2)
    True
    >>> release(models[:100], JointParameters(1.0, 1.0, 1e-6, 5), Randomness(seed=3)) is None
    True
    """
    sides = Sides.of(break_ties(models, randomness))
    law = RestrictedLaw(sides, parameters)
    passed = SafetyTest(sides, parameters).passes(randomness)
    # A set of models with no deep region is at distance -1; passing by noise then also refuses.
    return law.sample(randomness) if passed and not law.empty else None
