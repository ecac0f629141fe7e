"""Everything that can go wrong, typed, with what was spent and what to do next.

Two families matter to a caller who keeps a privacy budget:

* errors raised *before* the data are used spend nothing (:class:`InvalidInput` and its kin,
  and :class:`NotEnoughData` when the number of units is public);
* :class:`ReleaseRefused` is an *outcome*: the whole budget is spent and there is no model.

No message carries a value that was computed from private rows, except one that was itself
released under the budget (the noisy count of units).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tukeyreg.privacy.plan import Plan

__all__ = [
    "InvalidInput",
    "MissingExtra",
    "NotEnoughData",
    "ReleaseRefused",
    "TukeyregError",
    "UndeclaredCategory",
]


class TukeyregError(Exception):
    """Base class of every error that this library raises on purpose."""


class InvalidInput(TukeyregError, ValueError):
    """The call is wrong: shapes, types, names or parameters. Nothing was spent."""


class UndeclaredCategory(InvalidInput):
    """A text column has no declared levels. Nothing was spent.

    Levels are public and never come from the data: declare them with ``categories={...}``.
    """


class MissingExtra(TukeyregError, ImportError):
    """A library that this needs is an extra, and not installed. Nothing was spent."""


class NotEnoughData(TukeyregError, ValueError):
    """The plan does not work for this many units; no model was computed.

    Attributes
    ----------
    plan : Plan
        The plan that fails, which says what would be enough.
    epsilon_spent, delta_spent : float
        0.0 when the number of units is public. Otherwise the small share of the budget that
        paid for the private count of units by which this was decided.
    """

    def __init__(self, message: str, plan: Plan, epsilon_spent: float, delta_spent: float) -> None:
        super().__init__(message)
        self.plan = plan
        self.epsilon_spent = epsilon_spent
        self.delta_spent = delta_spent

    def __reduce__(self) -> tuple[type[NotEnoughData], tuple[str, Plan, float, float]]:
        return type(self), (str(self), self.plan, self.epsilon_spent, self.delta_spent)


class ReleaseRefused(TukeyregError, RuntimeError):
    """A private test refused the release. The whole budget is spent and there is no model.

    Attributes
    ----------
    test : str
        Which test refused: ``"safety test"`` (``joint``) or ``"verdict"`` (``sequential``).
    epsilon_spent, delta_spent : float
        What this attempt cost, which is the same as a release would have cost.
    """

    def __init__(self, message: str, test: str, epsilon_spent: float, delta_spent: float) -> None:
        super().__init__(message)
        self.test = test
        self.epsilon_spent = epsilon_spent
        self.delta_spent = delta_spent

    def __reduce__(self) -> tuple[type[ReleaseRefused], tuple[str, str, float, float]]:
        return type(self), (str(self), self.test, self.epsilon_spent, self.delta_spent)
