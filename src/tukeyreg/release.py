"""Release: what was computed, under which guarantee; to and from JSON."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tukeyreg.errors import InvalidInput
from tukeyreg.privacy.budget import Budget, Guarantee
from tukeyreg.privacy.plan import Plan

__all__ = ["Release", "versions"]

_FORMAT = "tukeyreg release 1"


def versions() -> dict[str, str]:
    """Versions of what computed a release."""
    packages = ("tukeyreg", "numpy", "python-flint", "scikit-learn")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


@dataclass(frozen=True)
class Release:
    """A private result and everything a reviewer needs to know about it.

    Nothing in it was computed from private rows except the coefficients and, where units were
    counted privately, ``n_units``; both are covered by the guarantee.

    Attributes
    ----------
    method : str
    choice : str
        Why this method: given by the caller, or how ``"auto"`` decided.
    names : tuple of str
        One per coefficient, the intercept not included.
    coefficients : tuple of float
    intercept : float or None
    ranges : tuple of pairs, or None
        With ``moments``: between which values of a feature the model is linear. Beyond them it
        is constant: replace a value by the nearest in the range. ``None`` for a feature whose
        scale did not rise above the noise, and whose coefficient therefore is 0.
    guarantee : Guarantee
    accounting : str
        How the parts of the budget are added up.
    split : dict
        The parts of the budget, in words.
    n_models : int or None
        m, the number of groups, where there are any.
    n_units : int or None
        What the plan took for a lower bound of the number of units; ``None`` if it took none.
    n_units_source : str
        ``"public"``, ``"given by the caller"``, ``"noisy count"`` or ``"not used"``.
    verdict : str
        The test that the release passed.
    success_probability, noise_ratio : float
        What the plan promised (docs/method.md, section 7).
    versions : dict
    """

    method: str
    choice: str
    names: tuple[str, ...]
    coefficients: tuple[float, ...]
    intercept: float | None
    ranges: tuple[tuple[float, float] | None, ...] | None
    guarantee: Guarantee
    accounting: str
    split: dict[str, str]
    n_models: int | None
    n_units: int | None
    n_units_source: str
    verdict: str
    success_probability: float
    noise_ratio: float
    versions: dict[str, str] = field(default_factory=versions)

    @property
    def budget(self) -> Budget:
        """What the release cost."""
        return Budget(self.guarantee.epsilon, self.guarantee.delta)

    def to_json(self) -> str:
        """The release as JSON text; every float is written so that it reads back the same.

        Examples
        --------
        >>> from tukeyreg import select
        >>> models = [[1 + i / 1000, 2 - i / 1000] for i in range(800)]
        >>> release = select(models, epsilon=2.0, delta=1e-6, random_state=0)
        >>> Release.from_json(release.to_json()) == release
        True
        """
        content = {"format": _FORMAT, **asdict(self)}
        if math.isinf(self.noise_ratio):
            content["noise_ratio"] = None
        return json.dumps(content, indent=2, allow_nan=False, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Release:
        """Read what :meth:`to_json` wrote; anything else is :class:`InvalidInput`."""
        try:
            content: dict[str, Any] = json.loads(text)
            if content.pop("format") != _FORMAT:
                raise InvalidInput(f"not a release of format {_FORMAT!r}")
            content["guarantee"] = Guarantee(**content["guarantee"])
            for name in ("names", "coefficients"):
                content[name] = tuple(content[name])
            if content["ranges"] is not None:
                content["ranges"] = tuple(
                    None if pair is None else (float(pair[0]), float(pair[1]))
                    for pair in content["ranges"]
                )
            if content["noise_ratio"] is None:
                content["noise_ratio"] = math.inf
            release = cls(**content)
        except InvalidInput:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            raise InvalidInput("this text is not a release written by tukeyreg") from None
        numbers = [*release.coefficients, *([] if release.intercept is None else [0.0])]
        ranges = release.names if release.ranges is None else release.ranges
        if not len(release.names) == len(release.coefficients) == len(ranges) or not all(
            isinstance(number, (int, float)) for number in numbers
        ):
            raise InvalidInput("this release is damaged: names and coefficients do not fit")
        return release

    def rows(self) -> list[tuple[str, str]]:
        """The release as rows of a table."""
        intercept = [] if self.intercept is None else [("(intercept)", f"{self.intercept:.6g}")]
        units = "" if self.n_units is None else f"at least {self.n_units:,} "
        groups = "" if self.n_models is None else f", {self.n_models:,} groups"
        ranges = self.ranges or [(-math.inf, math.inf)] * len(self.names)
        ratio = "unknown" if math.isinf(self.noise_ratio) else f"{self.noise_ratio:.2g}"
        return [
            *intercept,
            *(
                (name, f"{value:.6g}{_between(pair)}")
                for name, value, pair in zip(self.names, self.coefficients, ranges, strict=True)
            ),
            ("method", f"{self.method}{groups} ({self.choice})"),
            ("guarantee", str(self.guarantee)),
            *self.split.items(),
            ("accounting", self.accounting),
            ("units", f"{units}({self.n_units_source})"),
            ("verdict", self.verdict),
            ("expected privacy noise", f"{ratio} x statistical error"),
        ]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _pair(ends: list[float]) -> tuple[float, float] | None:
    low, high = ends
    return (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _between(pair: tuple[float, float] | None) -> str:
    """Where a coefficient holds, in words."""
    if pair is None:
        return " (not seen above the noise)"
    return "" if pair[1] == math.inf else f" for values from {pair[0]:.4g} to {pair[1]:.4g}"


def release_of(
    plan: Plan,
    names: tuple[str, ...],
    coefficients: tuple[float, ...],
    intercept: float | None,
    guarantee: Guarantee,
    n_units_source: str,
    ranges: NDArray[np.float64] | None = None,
) -> Release:
    """The release of a plan that was carried out."""
    verdicts = {
        "moments": "the target's scale was seen and the rounds settled: released",
        "sequential": "every coefficient lies well inside the groups' votes: released",
        "joint": "the safety test passed: released",
    }
    return Release(
        method=plan.method,
        choice=plan.choice,
        names=names,
        coefficients=coefficients,
        intercept=intercept,
        ranges=None if ranges is None else tuple(map(_pair, ranges.tolist())),
        guarantee=guarantee,
        accounting=plan.accounting,
        split=plan.split(),
        n_models=plan.n_models,
        n_units=plan.n_units,
        n_units_source=n_units_source,
        verdict=verdicts[plan.method],
        success_probability=plan.success_probability,
        noise_ratio=plan.noise_ratio,
    )
