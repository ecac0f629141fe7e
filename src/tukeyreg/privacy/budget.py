"""Budgets and what they add up to (docs/method.md, sections 4 and 5).

Composition is computed exactly: pure epsilons are added as rational numbers, zero-concentrated
budgets are added and converted with certified ball arithmetic, and every float that leaves this
module is rounded to the safe side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from flint import arb, ctx

from tukeyreg.errors import InvalidInput

__all__ = [
    "Budget",
    "Guarantee",
    "delta_of_rho",
    "epsilon_of_rho",
    "largest_rho",
    "largest_stage_by_sum",
    "largest_stage_by_zcdp",
]

NEIGHBORING = ("add-remove", "replace-one")


@dataclass(frozen=True)
class Budget:
    """What may be spent: differential privacy with parameters epsilon and delta.

    Examples
    --------
    >>> print(Budget(1.0, 1e-6))
    (epsilon = 1, delta = 1e-06)
    """

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "epsilon", _real("epsilon", self.epsilon))
        object.__setattr__(self, "delta", _real("delta", self.delta))
        if not (0 < self.epsilon < math.inf):
            raise InvalidInput(
                f"epsilon must be a positive finite number, got {self.epsilon!r}. "
                "Nothing was spent."
            )
        if not (0 <= self.delta < 1):
            raise InvalidInput(
                f"delta must lie in [0, 1), got {self.delta!r}. Nothing was spent; a common "
                "choice is less than one over the number of units."
            )

    def __str__(self) -> str:
        return f"(epsilon = {self.epsilon:.6g}, delta = {self.delta:.6g})"


def _real(name: str, value: object) -> float:
    if value is None:
        raise InvalidInput(
            f"{name} is required: say how much privacy loss the release may cost. "
            "Nothing was spent."
        )
    if isinstance(value, (bool, str, bytes)):
        raise InvalidInput(f"{name} must be a number, got {value!r}. Nothing was spent.")
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise InvalidInput(
            f"{name} must be a number, got {type(value).__name__}. Nothing was spent."
        ) from None
    if math.isnan(number):
        raise InvalidInput(f"{name} must be a number, got nan. Nothing was spent.")
    return number


@dataclass(frozen=True)
class Guarantee:
    """What a release promises, and to whom.

    ``private`` is false when a seed made the randomness predictable: then nothing is promised.

    Examples
    --------
    >>> print(Guarantee(1.0, 1e-6, "add-remove", "row", private=True))
    (epsilon = 1, delta = 1e-06)-differential privacy when one row is added or removed
    """

    epsilon: float
    delta: float
    neighboring: str
    unit: str
    private: bool

    def __str__(self) -> str:
        if not self.private:
            return "NOT PRIVATE: a random_state was given, so the noise is predictable"
        change = {
            "add-remove": "added or removed",
            "replace-one": "replaced by others",
            "replace-one-model": "",
        }[self.neighboring]
        budget = Budget(self.epsilon, self.delta)
        if self.neighboring == "replace-one-model":
            return f"{budget}-differential privacy when one model is replaced by another"
        if self.unit == "row":
            return f"{budget}-differential privacy when one row is {change}"
        return f"{budget}-differential privacy when all rows of one {self.unit} are {change}"


def delta_of_rho(rho: float, epsilon: float) -> float:
    """An upper bound of the delta at which rho-zCDP implies (epsilon, delta)-DP.

    Canonne, Kamath and Steinke (2020), Proposition 12: for every order a > 1 the value
    exp((a - 1)(a rho - epsilon)) / (a - 1) * (1 - 1/a)**a is such a delta. The order is found
    in floating point, which any choice of it allows; the value is then certified.

    Examples
    --------
    >>> 9.9e-6 < delta_of_rho(largest_rho(1.0, 1e-5), 1.0) <= 1e-5
    True
    """
    if rho == 0:
        return 0.0
    order = _best_order(rho, epsilon)
    with ctx.workprec(128):
        a = arb(order)
        log_delta = (a - 1) * (a * arb(rho) - arb(epsilon)) - (a - 1).log() + a * (1 - 1 / a).log()
        return min(1.0, _up(log_delta.exp()))


def _best_order(rho: float, epsilon: float) -> float:
    def log_delta(log_excess: float) -> float:
        excess = math.exp(log_excess)
        order = 1 + excess
        return excess * (order * rho - epsilon) - log_excess + order * math.log1p(-1 / order)

    low, high = -20.0, math.log(max(4.0, 4 * (epsilon / rho + 1)))
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(120):  # the function is unimodal in the logarithm of the order
        left, right = high - golden * (high - low), low + golden * (high - low)
        if log_delta(left) < log_delta(right):
            high = right
        else:
            low = left
    return 1 + math.exp((low + high) / 2)


@lru_cache(maxsize=256)
def largest_rho(epsilon: float, delta: float) -> float:
    """The largest rho found (rounded down) for which rho-zCDP implies (epsilon, delta)-DP."""
    if delta == 0:
        return 0.0
    low, high = 0.0, epsilon + 1.0
    while delta_of_rho(high, epsilon) <= delta:
        high *= 2
    for _ in range(70):
        middle = (low + high) / 2
        if delta_of_rho(middle, epsilon) <= delta:
            low = middle
        else:
            high = middle
    return low


def epsilon_of_rho(rho: float, delta: float) -> float:
    """An epsilon (rounded up) at which rho-zCDP implies (epsilon, delta)-DP.

    Examples
    --------
    >>> rho = largest_rho(1.0, 1e-6)
    >>> 1.0 <= epsilon_of_rho(rho, 1e-6) < 1.0 + 1e-9
    True
    """
    if rho == 0:
        return 0.0
    if not 0 < delta < 1:
        return math.inf
    low, high = 0.0, 1.0
    while delta_of_rho(rho, high) > delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if delta_of_rho(rho, middle) <= delta:
            high = middle
        else:
            low = middle
    return high


def largest_stage_by_sum(epsilon: float, stages: int, steps: tuple[float, ...] = ()) -> float:
    """The largest epsilon of each of ``stages`` stages beside pure-DP steps, in pure DP.

    Theorem 2: the stages cost ``stages`` times it, and the steps their sum. Rounded down; 0.0
    when the steps alone use up epsilon.

    Examples
    --------
    >>> largest_stage_by_sum(1.0, 4)
    0.25
    >>> largest_stage_by_sum(1.0, 4, (0.5,))
    0.125
    """
    return _down((Fraction(epsilon) - sum(map(Fraction, steps), Fraction(0))) / stages)


def largest_stage_by_zcdp(rho: float, stages: int, steps: tuple[float, ...] = ()) -> float:
    """The largest epsilon of each of ``stages`` bounded-range stages beside steps, in zCDP.

    Theorem 2: a stage costs an eighth of its square (Cesar and Rogers 2021), and each step its
    own rho. Rounded down; 0.0 when the steps alone use up rho.

    Examples
    --------
    >>> largest_stage_by_zcdp(0.5, 4)
    1.0
    >>> largest_stage_by_zcdp(0.5, 4, (0.3, 0.2))
    0.0
    """
    rest = Fraction(rho) - sum(map(Fraction, steps), Fraction(0))
    return _sqrt_down(8 * rest / stages) if rest > 0 else 0.0


def _down(value: Fraction) -> float:
    """The largest double that is not above a fraction; 0.0 for what is not positive."""
    if value <= 0:
        return 0.0
    nearest = float(value)
    return nearest if Fraction(nearest) <= value else math.nextafter(nearest, 0.0)


def _sqrt_down(value: Fraction) -> float:
    root = math.sqrt(float(value))
    while Fraction(root) ** 2 > value:
        root = math.nextafter(root, 0.0)
    return root


def _up(value: arb) -> float:
    """A double that is not below a ball."""
    return math.nextafter(float(value.upper()), math.inf)
