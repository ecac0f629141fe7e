"""How ``moments`` spends its budget, and how well it will do (docs/method.md, section 7).

Everything here is a function of public numbers: a bound of the number of units, d, the budget and
the neighbour relation. Shares of the budget are set by what a step needs: a histogram that
must rise above its noise needs a share that falls with the square of the number of units, and the
rest goes to the gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from scipy.special import ndtr

from tukeyreg.mechanisms.moments import LEVELS, MomentsParameters, target_weight
from tukeyreg.mechanisms.noise import IntegerNoise
from tukeyreg.privacy.budget import Budget, largest_rho
from tukeyreg.privacy.composition import largest_normal_by_divergence

__all__ = ["COUNT_SHARE", "MomentsPlanner"]

#: Share of the budget that pays for a private count of units, whatever the method.
COUNT_SHARE = 0.01

#: Least and largest share of the medians, and of the histogram of magnitudes, each.
_SCALE_SHARES = (0.04, 0.15)
#: Epsilon of a median times the number of voters; units over the noise of the histogram.
_MEDIAN_NEED, _PROFILE_NEED = 48.0, 60.0
#: The same for the histograms of norms and of residuals, with their shares of what is left.
_NORM_NEED, _NORM_SHARES = 30.0, (0.004, 0.03)
_RESIDUAL_NEED, _RESIDUAL_SHARES = 40.0, (0.005, 0.02)
_GRAM_SHARE = 0.15
#: Rounds of gradients, each with twice the budget of the one before.
_ROUNDS = (1, 2, 4)
#: Residuals are bounded by 2.5 times their scale, by less where noise is the larger evil.
_CLIP_RANGE, _CLIP_NEED = (1.2, 2.5), 0.2
#: Of the rows 85 % are not shrunk, more where noise is small: 97 % from an eighth of the noise on.
_NORM_RANGE, _NORM_NOISE = (0.85, 0.97), (0.05, 0.05 / 8)

#: Units that take part in the steps before the last, and that vote for locations: so many, or
#: more where noise is large, so that each step has twice what it needs.
_PILOT_UNITS, _VOTERS = 1 << 17, 1 << 14
#: Noise of the Gram matrices, as a share of them, that the pilot must not exceed.
_PILOT_GRAM_NOISE = 0.05

#: With more the noise would be finer than the grid of its sums; no budget of use comes near.
_MOST_RHO = 2.0**24
#: How far above its noise the target's histogram must rise, for magnitudes up to a million.
_SEEN = 5.5
#: Share of normal magnitudes in the three octaves that hold the most.
_THREE_OCTAVES = 0.757
#: Minus the logarithm of what the base measure gives to a typical column's bulk, and room.
_BASE_MEASURE_COST = 9.0
#: The share of units by which the noise of a histogram of residuals may move it.
_SETTLING = 0.2
#: Norm of the last gradient's noise against that of the residuals' own: more is not worth it.
_MOST_NOISE = 1 / 4


@dataclass(frozen=True)
class MomentsPlanner:
    """Parameters, success and noise of ``moments`` for any number of units.

    Examples
    --------
    >>> planner = MomentsPlanner(Budget(1.0, 1e-6), 11, private_count=True)
    >>> planner.enough(1200), planner.enough(400)
    (True, False)
    >>> planner.success(20_000) > 0.999
    True
    """

    budget: Budget
    d: int
    private_count: bool
    replace: bool = False
    intercept: bool = True

    @property
    def count(self) -> IntegerNoise | None:
        """The noise of the private count of units."""
        if not self.private_count:
            return None
        rho = largest_rho(self.budget.epsilon, self.budget.delta)
        return IntegerNoise("discrete Gaussian", rho * COUNT_SHARE)

    @property
    def columns(self) -> int:
        """Features and the target."""
        return self.d if self.intercept else self.d + 1

    @property
    def medians(self) -> int:
        """How many private medians there are: none without an intercept."""
        return self.columns if self.intercept else 0

    def parameters(self, n: int) -> MomentsParameters:
        """The split of the budget for n units, rounded down to an eighth of an octave."""
        return _parameters(self, _rounded(n))[0]

    def accounting(self, n: int) -> str:
        """How the parts are added up: ``"divergence"``, or ``"zCDP"`` where that does not apply."""
        return _parameters(self, _rounded(n))[1]

    def success(self, n: int) -> float:
        """That locations are not wild, the target's scale is seen and the rounds settle.

        For normal columns. The last of the three is fitted to simulations.
        """
        p = self.parameters(n)
        pilot = n / p.pilot
        features = self.columns - 1
        weight = target_weight(features)
        sigma = self._wider * math.sqrt((features + weight**2) / (2 * p.profile_rho)) / weight
        seen = float(ndtr(_THREE_OCTAVES * pilot / (math.sqrt(3) * sigma) - _SEEN))
        gain = p.location_epsilon * pilot / p.voters / (4 if self.replace else 2)
        wild = self.medians * math.exp(min(0.0, _BASE_MEASURE_COST - gain))
        error = self._wider / math.sqrt(2 * p.residual_rho) / pilot
        settled = 1 - 2 * float(ndtr(-_SETTLING / error))
        return max(0.0, seen * (1 - wild) * settled)

    def gradient_noise(self, n: int) -> float:
        """The norm of the last gradient's noise over n, in units of the residuals' scale."""
        p = self.parameters(n)
        wider = 2.0 if self.replace else 1.0
        return wider * p.clips[-1] * self.d / (n * math.sqrt(2 * p.round_rho[-1]))

    def noise(self, n: int) -> float:
        """Privacy noise of a coefficient as a multiple of the statistical error of OLS."""
        return self.gradient_noise(n) * math.sqrt(n / self.d)

    def enough(self, n: int, sure: float = 0.95) -> bool:
        """Whether a fit of n units is likely to succeed and to be of use."""
        return n >= 4 and self.success(n) >= sure and self.gradient_noise(n) <= _MOST_NOISE

    def fewest_units(self) -> int | None:
        """The fewest units that are enough, within two per cent; ``None`` if no number is."""
        low, high = 3, 8
        while not self.enough(high):
            low, high = high, 2 * high
            if high > 1 << 40:
                return None
        while high - low > max(1, low // 50):
            middle = (low + high) // 2
            low, high = (low, middle) if self.enough(middle) else (middle, high)
        return high

    @property
    def _wider(self) -> float:
        return math.sqrt(2) if self.replace else 1.0


def _rounded(n: int) -> float:
    return float(2.0 ** (math.floor(8 * math.log2(max(n, 4))) / 8))


@lru_cache(maxsize=512)
def _parameters(planner: MomentsPlanner, n: float) -> tuple[MomentsParameters, str]:
    budget, medians = planner.budget, planner.medians
    allowed = largest_rho(budget.epsilon, budget.delta)
    whole = min(allowed, _MOST_RHO)
    before = () if planner.count is None else (planner.count.rate,)
    location = 0.0
    if medians:
        need = _MEDIAN_NEED * (2 if planner.replace else 1)
        location = _bounded(medians * (need / n) ** 2 / 8, whole, _SCALE_SHARES)
    epsilon = math.sqrt(8 * location / max(1, medians))
    by_zcdp = (min(whole, allowed - sum(before)) - location) * (1 - 1e-9)
    found = largest_normal_by_divergence(
        budget.epsilon, budget.delta, medians, epsilon, before, by_zcdp
    )
    total = found * (1 - 1e-9)
    profile = _bounded(planner.columns * (_PROFILE_NEED / n) ** 2 / 2, whole, _SCALE_SHARES)
    left = total - profile
    norm = _bounded((_NORM_NEED / n) ** 2 / 2, left, _NORM_SHARES)
    residual = _bounded((_RESIDUAL_NEED / n) ** 2 / 2, left, _RESIDUAL_SHARES)
    gram = _GRAM_SHARE * left
    rest = left - LEVELS * (norm + gram) - (len(_ROUNDS) + 1) * residual
    rounds = tuple(rest * share / sum(_ROUNDS) for share in _ROUNDS)
    # What a bound of 1 would leave of noise; see gradient_noise.
    unit_noise = planner.d / (n * math.sqrt(2 * rounds[-1])) * (2 if planner.replace else 1)
    bound = min(_CLIP_RANGE[1], max(_CLIP_RANGE[0], _CLIP_NEED / (2 * unit_noise)))
    needs = (
        _PROFILE_NEED * math.sqrt(planner.columns / (2 * profile)),
        _NORM_NEED / math.sqrt(2 * norm),
        _RESIDUAL_NEED / math.sqrt(2 * residual),
        planner.d**1.5 / math.sqrt(2 * gram) / (2 * _PILOT_GRAM_NOISE),
    )
    noise = min(_NORM_NOISE[0], max(_NORM_NOISE[1], bound * unit_noise))
    way = math.log(_NORM_NOISE[0] / noise) / math.log(_NORM_NOISE[0] / _NORM_NOISE[1])
    pilot = max(1, int(n / max(_PILOT_UNITS, *(2 * need for need in needs))))
    voters = max(_VOTERS, 4 * _MEDIAN_NEED / epsilon) if medians else _VOTERS
    parameters = MomentsParameters(
        location_epsilon=epsilon,
        profile_rho=profile,
        norm_rho=norm,
        gram_rho=gram,
        residual_rho=residual,
        round_rho=rounds,
        clips=(bound + 1, *([bound] * (len(_ROUNDS) - 1))),
        norm_share=_NORM_RANGE[0] + way * (_NORM_RANGE[1] - _NORM_RANGE[0]),
        pilot=pilot,
        voters=max(1, int(n / pilot / voters)),
        replace=planner.replace,
    )
    return parameters, "divergence" if found > by_zcdp else "zCDP"


def _bounded(need: float, whole: float, shares: tuple[float, float]) -> float:
    """What is needed, within these shares of the whole."""
    return min(shares[1] * whole, max(shares[0] * whole, need))
