"""Integer noise for statistics of sensitivity 1: discrete Laplace and discrete Gaussian.

Both laws live on the integers and are sampled exactly, so the noisy statistic has no
floating-point side. The Laplace law is accounted for in pure differential privacy, the Gaussian
one in zCDP, where for the same cost its tails are shorter (docs/decisions/0002).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from flint import arb

from tukeyreg.mechanisms.randomness import Floats, Integers, Randomness, tail_threshold

__all__ = ["IntegerNoise"]

#: Scale beyond which the laws are no longer tabulated value by value.
_WIDE = 10_000


@dataclass(frozen=True)
class IntegerNoise:
    """Z with P[Z = z] proportional to exp(-|z| / scale) or exp(-z**2 / (2 scale**2)).

    Attributes
    ----------
    law : {"discrete Laplace", "discrete Gaussian"}
    rate : float
        For Laplace the epsilon of a statistic of sensitivity 1, P[z] proportional to
        exp(-rate |z|). For Gaussian its rho, P[z] proportional to exp(-rate z**2): the discrete
        Gaussian of variance parameter 1 / (2 rate) costs rate-zCDP (Canonne, Kamath and
        Steinke 2020, Theorem 14).

    Examples
    --------
    >>> IntegerNoise("discrete Laplace", 0.05).quantile(1e-3)
    124
    >>> IntegerNoise("discrete Gaussian", 0.05**2 / 2).quantile(1e-3)
    62
    """

    law: str
    rate: float

    @property
    def scale(self) -> float:
        """Scale of the Laplace law, or sigma of the Gaussian one."""
        return 1 / self.rate if self.law == "discrete Laplace" else math.sqrt(0.5 / self.rate)

    def sample(self, randomness: Randomness) -> int:
        """One exact draw."""
        if self.law == "discrete Laplace":
            return randomness.discrete_laplace(self.rate)
        return _discrete_gaussian(self.rate, randomness)

    def quantile(self, probability: float) -> int:
        """A g >= 0 with P[Z > g] <= probability: the smallest, unless the noise is very wide."""
        if self.law == "discrete Laplace":
            return tail_threshold(self.rate, probability)
        if self.scale > _WIDE:
            # P[Z >= g + 1] is at most the normal tail at g (Canonne, Kamath and Steinke 2020).
            return max(0, math.ceil(-self.scale * NormalDist().inv_cdf(probability)))
        values, masses = self.probabilities()
        tails = np.cumsum(masses[::-1])[::-1]
        return int(values[np.flatnonzero((tails <= probability) & (values > 0))[0]]) - 1

    def probabilities(self) -> tuple[Integers, Floats]:
        """Values and their probabilities, up to a tail below 1e-20 (for planning).

        Very wide noise is put on a coarser grid of values.
        """
        reach = math.ceil(self.scale * (48 if self.law == "discrete Laplace" else 10)) + 1
        values = np.arange(-reach, reach + 1, max(1, int(self.scale / _WIDE)))
        power = np.abs(values) if self.law == "discrete Laplace" else values.astype(float) ** 2
        masses = np.exp(-self.rate * power)
        return values, masses / masses.sum()


def _discrete_gaussian(rate: float, randomness: Randomness) -> int:
    """Canonne, Kamath and Steinke (2020), Algorithm 3: accept a discrete Laplace draw by a coin."""
    width = math.floor(math.sqrt(0.5 / rate)) + 1
    while True:
        candidate = randomness.discrete_laplace_of_scale(width)

        def chance(magnitude: int = abs(candidate)) -> arb:
            # exp(-(|y| - sigma**2 / t)**2 / (2 sigma**2)) with sigma**2 = 1 / (2 rate)
            offset = magnitude - 1 / (2 * arb(rate) * width)
            return (-arb(rate) * offset**2).exp()

        if randomness.coin(chance):
            return candidate
