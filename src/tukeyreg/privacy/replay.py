"""What a fit by ``moments`` gives away between two given sets of rows, added up step by step.

A fit of one set is recorded. Then the other set is fitted with every draw answered as it was for
the first, so that all steps have the same past: the situation that Theorem 4 of docs/method.md is
about. What may then differ are the arguments of the draws. Of every sum under normal noise this is
its shift, and of every private median the range of the change in depth. From these alone, and not
from any claim about sensitivities, the privacy loss of this past is computed.

Like ``tukeyreg.privacy.verify`` it is a referee for examples. Unlike it, it runs the program that
it judges: so it sees what rounding, threads and extreme values do to the sums. It looks at private
rows and its numbers are not private.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tukeyreg.mechanisms import moments
from tukeyreg.mechanisms.moments import Model, MomentsParameters
from tukeyreg.mechanisms.randomness import Floats, Integers, Randomness
from tukeyreg.mechanisms.sequential import PrivateMedian
from tukeyreg.privacy.composition import sequence_delta
from tukeyreg.summaries.rows import UnitRows

__all__ = ["Replay", "replay"]


@dataclass(frozen=True)
class Replay:
    """What one past of a fit gives away between two sets of rows.

    Attributes
    ----------
    rho : float
        Sum of shift**2 / (2 sigma**2) over all sums under normal noise.
    median_losses : tuple of float
        For every private median the width of the interval in which its loss lies.
    draws : int
        How many draws were compared.
    """

    rho: float
    median_losses: tuple[float, ...]
    draws: int

    def delta(self, epsilon: float) -> float:
        """A delta at which this past is (epsilon, delta)-DP (Lemmas 3 and 6)."""
        if self.rho > 30:  # so far apart that nothing hides it
            return 1.0
        widest = max(self.median_losses, default=0.0)
        stages = len(self.median_losses) if widest > 0 else 0
        return sequence_delta(epsilon, stages, widest, normal=self.rho)


def replay(
    before: UnitRows,
    after: UnitRows,
    parameters: MomentsParameters,
    *,
    intercept: bool = True,
    seed: int = 0,
    coins: tuple[Integers, Integers] | None = None,
) -> Replay:
    """Fit two sets of rows with the same draws, and compare what the draws were about.

    Parameters
    ----------
    before, after : UnitRows
    parameters : MomentsParameters
    intercept : bool
    seed : int
        Of the draws of the recorded fit. The losses depend on the past, so try several.
    coins : pair of arrays, optional
        For every unit of each set an integer that decides whether it is in the pilot (a multiple
        of ``parameters.pilot``) and then a voter. Without it every unit is both.

    Examples
    --------
    >>> from tukeyreg.privacy.budget import Budget
    >>> from tukeyreg.privacy.plan_moments import MomentsPlanner
    >>> rng = np.random.default_rng(0)
    >>> X, y = rng.normal(size=(800, 2)), rng.normal(size=800)
    >>> X[0], y[0] = 1e9, -1e9
    >>> rows = UnitRows(X, y, None, 800)
    >>> parameters = MomentsPlanner(Budget(1.0, 1e-6), 3, private_count=False).parameters(800)
    >>> found = replay(rows, rows.of_units(np.arange(800) > 0), parameters)
    >>> found.rho <= parameters.gaussian_rho
    True
    >>> max(found.median_losses) <= parameters.location_epsilon * (1 + 1e-12)
    True
    >>> found.delta(1.0) <= 1e-6
    True
    """
    first, second = coins or (np.zeros(1, np.int64), np.zeros(1, np.int64))
    record = _Tape(Randomness(seed), [], first)
    again = _Tape(None, record.answers, second)
    with np.errstate(all="ignore"):
        models = [
            moments.release(rows, intercept, parameters, tape, median=_TapedMedian)  # type: ignore[arg-type]
            for rows, tape in ((before, record), (after, again))
        ]
    if len(record.questions) != len(again.questions):
        raise AssertionError("the same past led to different steps")
    if _bytes(models[0]) != _bytes(models[1]):
        raise AssertionError("the same draws led to different models")
    pairs = list(zip(record.questions, again.questions, strict=True))
    return Replay(
        sum(_shift(*q, *r) for q, r in pairs if isinstance(q, tuple)),
        tuple(_loss(q, r) for q, r in pairs if isinstance(q, PrivateMedian)),
        len(pairs),
    )


def _bytes(model: Model | None) -> bytes:
    """A model as its bits; with the same draws nothing of it may differ."""
    if model is None:
        return b""
    ranges = b"" if model.ranges is None else model.ranges.tobytes()
    return model.coefficients.tobytes() + np.float64(model.intercept).tobytes() + ranges


class _Tape:
    """Stands in for a source of randomness: records draws, or answers them from a record."""

    def __init__(self, source: Randomness | None, answers: list[Any], coins: Integers) -> None:
        self.source, self.answers = source, answers
        self.questions: list[Any] = []
        self._coins = coins

    def answer(self, question: Any, draw: Callable[[Randomness], Any]) -> Any:
        at = len(self.questions)
        self.questions.append(question)
        if self.source is not None:
            self.answers.append(draw(self.source))
        if at == len(self.answers):
            raise AssertionError("the same past led to different steps")
        return self.answers[at]

    def gaussian(self, values: Integers, sigma: float) -> Floats:
        question = (values.copy(), sigma)
        return np.asarray(self.answer(question, lambda source: source.gaussian(values, sigma)))

    def below(self, bound: int, size: int) -> Integers:
        coins = self._coins if len(self._coins) > 1 else np.zeros(size, dtype=np.int64)
        if len(coins) != size:
            raise AssertionError("coins are for other units")
        kept = coins % bound == 0
        self._coins = coins[kept] // bound
        return coins % bound


class _TapedMedian(PrivateMedian):
    def sample(self, randomness: Any) -> float:
        plain = super().sample
        return float(randomness.answer(self, lambda source: plain(source)))


def _shift(values: Integers, sigma: float, others: Integers, same: float) -> float:
    """rho of one sum, from exact integers."""
    if sigma != same:
        raise AssertionError("the same past led to different noise")
    difference = values.astype(object) - others.astype(object)
    return float(sum(x * x for x in difference.reshape(-1).tolist())) / (2 * sigma**2)


def _loss(law: PrivateMedian, other: PrivateMedian) -> float:
    """The width of the loss: half the epsilon of the exponent, times that of the depths."""
    change = law.depth_changes(other)
    return law.epsilon / 2 * (max(change) - min(change))
