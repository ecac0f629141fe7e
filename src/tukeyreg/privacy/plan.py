"""(n, d, epsilon, delta) -> Plan: what is known before any data are touched.

The plan fixes everything that the mechanisms need: the number of groups m, the split of the
budget, and the probability that the release succeeds under a reference model. It is computed
from public numbers alone (docs/method.md, section 7).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import ndtri

from tukeyreg.errors import InvalidInput
from tukeyreg.mechanisms.joint import JointParameters
from tukeyreg.mechanisms.moments import LEVELS, MomentsParameters
from tukeyreg.mechanisms.noise import IntegerNoise
from tukeyreg.mechanisms.randomness import Floats
from tukeyreg.mechanisms.sequential import (
    ATOM,
    SequentialParameters,
    base_measure,
    verdict_threshold,
)
from tukeyreg.privacy.budget import (
    NEIGHBORING,
    Budget,
    largest_rho,
    largest_stage_by_sum,
    largest_stage_by_zcdp,
)
from tukeyreg.privacy.composition import largest_stage_by_divergence
from tukeyreg.privacy.plan_moments import COUNT_SHARE, MomentsPlanner

__all__ = ["Plan", "plan"]

METHODS = ("auto", "moments", "sequential", "joint")

#: The noisy count is lowered so far that it exceeds the true one with at most this probability.
COUNT_RISK = 1e-3

#: Success probability at which adding groups stops, and below which a plan is not enough.
SURE = 0.999
ENOUGH = 0.95
#: Who gives m may also want to see where a method begins to fail.
ENOUGH_FOR_GIVEN_GROUPS = 0.5

#: Units per group beyond which groups are added rather than enlarged, per coefficient.
AMPLE_ROWS_PER_COLUMN = 20
MOST_EXTRA_GROUPS = 4

_LARGEST_N_MODELS = 1 << 20
#: A release needs some ten votes per unit of 1/epsilon, so this is far below any that works.
SMALLEST_EPSILON = 1e-6


def fewest_units_per_group(method: str, d: int) -> float:
    """Below this the groups' own models are too poor (docs/decisions/0003)."""
    return 1.2 * d + 1 if method == "sequential" else d + 3 * math.sqrt(d)


def comfortable_units_per_group(method: str, d: int) -> float:
    """What groups get where a few less of them still succeed."""
    return d + 2 * math.sqrt(d) + 1 if method == "sequential" else d + 4 * math.sqrt(d)


#: Where the search for a sufficient number of groups gives up.
_MOST_GROUPS_SOUGHT = 1 << 17


@dataclass(frozen=True)
class Plan:
    """What a fit will do, decided from public numbers alone.

    Attributes
    ----------
    method : str
        ``"moments"``, ``"sequential"`` or ``"joint"``.
    choice : str
        Why this method: given by the caller, or how ``"auto"`` decided.
    neighboring : str
    n_units : int or None
        The number of units that the plan counts on (a lower bound of the true number); ``None``
        where m is given and nothing is known of the number of units.
    n_coefficients : int
        d, the intercept included.
    budget : Budget
    accounting : str
        How the parts of the budget are added up: ``"pure"``, ``"zCDP"``, ``"divergence"`` (the
        adaptive sequence itself, Lemma 3) or ``"test and selection"`` (Theorem 1).
    n_models : int or None
        m, the number of groups; ``None`` for ``moments``, which has no groups.
    parameters : MomentsParameters, SequentialParameters or JointParameters
        The split of the budget among the mechanism's steps.
    count : IntegerNoise or None
        The noise of the private count of units, where one is taken.
    success_probability : float
        That the release is not refused, under the reference model.
    noise_ratio : float
        Expected privacy noise of a coefficient as a multiple of the statistical error of
        non-private OLS on all rows, under the reference model.
    enough : bool
    advice : tuple of str
        What would be enough, when it is not.
    """

    method: str
    choice: str
    neighboring: str
    n_units: int | None
    n_coefficients: int
    budget: Budget
    accounting: str
    n_models: int | None
    parameters: MomentsParameters | SequentialParameters | JointParameters
    count: IntegerNoise | None
    success_probability: float
    noise_ratio: float
    enough: bool
    advice: tuple[str, ...] = ()

    @property
    def units_per_group(self) -> float | None:
        """Units in a group on average, where the number of units is known."""
        if self.n_units is None or self.n_models is None:
            return None
        return self.n_units / self.n_models

    def split(self) -> dict[str, str]:
        """The budget's parts in words."""
        parts: dict[str, str] = {}
        if self.count is not None:
            parts["private count of units"] = _words(self.count)
        if isinstance(self.parameters, MomentsParameters):
            parts |= _moments_split(self.parameters, self.n_coefficients)
        elif isinstance(self.parameters, JointParameters):
            p = self.parameters
            parts["safety test"] = f"epsilon = {p.test_epsilon:.4g}"
            parts["selection"] = (
                f"epsilon = {p.selection_epsilon:.4g}, depth at least {p.restriction_depth}"
            )
        else:
            stages = f"{self.n_coefficients} stages" if self.n_coefficients > 1 else "1 stage"
            parts[stages] = f"epsilon = {self.parameters.stage_epsilon:.4g} each"
            parts["verdict"] = _words(self.parameters.verdict)
        return parts

    def rows(self) -> list[tuple[str, str]]:
        """The plan as rows of a table."""
        success = f"{100 * self.success_probability:.2f} %"
        if self.success_probability > 0.9999:
            success = "more than 99.99 %"
        units = "not used: m is given" if self.n_units is None else f"{self.n_units:,}"
        per_group = "unknown" if self.units_per_group is None else f"{self.units_per_group:.1f}"
        groups = []
        if self.n_models is not None:
            groups = [("groups (m)", f"{self.n_models:,}"), ("units per group", per_group)]
        rows = [
            ("method", self.method),
            ("choice of method", self.choice),
            ("neighbouring data", self.neighboring),
            ("budget", str(self.budget)),
            ("units", units),
            ("coefficients", f"{self.n_coefficients}"),
            *groups,
            *self.split().items(),
            ("accounting", self.accounting),
            ("success probability", success),
            ("privacy noise / statistical error", f"{self.noise_ratio:.2g}"),
            ("enough data", "yes" if self.enough else "no"),
        ]
        return rows + [("what would be enough", line) for line in self.advice]

    def __str__(self) -> str:
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _repr_html_(self) -> str:
        cells = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in self.rows())
        return f"<table>{cells}</table>"


def _words(noise: IntegerNoise) -> str:
    name = "epsilon" if noise.law == "discrete Laplace" else "rho"
    return f"{noise.law} noise of scale {noise.scale:.3g}, {name} = {noise.rate:.3g}"


def _moments_split(p: MomentsParameters, d: int) -> dict[str, str]:
    rounds = ", ".join(f"{rho:.3g}" for rho in p.round_rho)
    locations = {f"{d} locations": f"epsilon = {p.location_epsilon:.3g} each"}
    return (locations if p.location_epsilon else {}) | {
        "scales": f"normal noise, rho = {p.profile_rho:.3g}",
        "norms": f"normal noise, rho = {p.norm_rho:.3g} each of {LEVELS}",
        "Gram matrices": f"normal noise, rho = {p.gram_rho:.3g} each of {LEVELS}",
        "residuals": f"normal noise, rho = {p.residual_rho:.3g} each of {len(p.round_rho) + 1}",
        "gradients": f"normal noise, rho = {rounds}",
    }


def plan(
    n: int,
    d: int,
    epsilon: float,
    delta: float,
    *,
    method: str = "auto",
    neighboring: str = "add-remove",
    n_models: int | str = "auto",
    split: str | None = None,
    private_count: bool | None = None,
) -> Plan:
    """Plan a release of d coefficients from n units; no data are touched.

    Parameters
    ----------
    n : int
        Number of privacy units (rows, unless a unit has several).
    d : int
        Number of coefficients, the intercept included.
    epsilon, delta : float
    method : {"auto", "moments", "sequential", "joint"}
        ``"auto"`` is ``moments``, unless ``delta=0`` or ``n_models`` ask for ``sequential``.
    neighboring : {"add-remove", "replace-one"}
    n_models : "auto" or int
        The number of groups m; ``moments`` has none.
    split : None or "paper"
        For ``joint``: ``"paper"`` halves epsilon and restricts to depth m/4.
    private_count : bool, optional
        Whether the fit will count its units privately. By default it does under
        ``add-remove`` unless m is given.

    Examples
    --------
    >>> print(plan(20_000, 9, 1.0, 1e-6))
    method                             moments
    choice of method                   auto: delta > 0
    neighbouring data                  add-remove
    budget                             (epsilon = 1, delta = 1e-06)
    ...
    enough data                        yes
    >>> plan(1_500, 9, 1.0, 1e-6).enough
    True
    >>> plan(1_500, 9, 1.0, 1e-6, method="sequential").enough
    False
    """
    budget = Budget(epsilon, delta)
    for name, value in (("n", n), ("d", d)):
        if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or value < 1:
            raise InvalidInput(f"{name} must be a positive integer, got {value!r}.")
    check_choice("method", method, METHODS)
    check_choice("neighboring", neighboring, NEIGHBORING)
    check_n_models(n_models)
    if private_count is None:
        private_count = neighboring == "add-remove" and n_models == "auto"
    method, choice = choose(method, budget.delta, n_models)
    design = Design(method, neighboring, budget, split, private_count, choice=choice)
    margin = count_margin(count_noise(design, int(d))) if private_count else 0
    return plan_units(int(n) - margin, int(d), design, n_models)


@dataclass(frozen=True)
class Design:
    """The choices of a plan that do not depend on the size of the data."""

    method: str
    neighboring: str
    budget: Budget
    split: str | None
    private_count: bool
    intercept: bool = True
    choice: str = "given"

    def __post_init__(self) -> None:
        if self.split not in (None, "paper"):
            raise InvalidInput(
                f"split must be None or 'paper', got {self.split!r}. Nothing was spent."
            )
        if self.split == "paper" and self.method != "joint":
            raise InvalidInput("split='paper' belongs to method='joint'. Nothing was spent.")
        if self.budget.epsilon < SMALLEST_EPSILON:
            raise InvalidInput(
                f"epsilon must be at least {SMALLEST_EPSILON:g}, got {self.budget.epsilon!r}: "
                "below it no number of units that can be planned for is enough. Nothing was spent."
            )
        if self.budget.delta == 0 and self.method in ("moments", "joint"):
            reason = {
                "moments": "its noise is normal",
                "joint": "its safety test errs with probability delta",
            }[self.method]
            raise InvalidInput(
                f"method={self.method!r} needs delta > 0: {reason}. "
                "Nothing was spent. Give a delta, or use method='sequential'."
            )


def choose(method: str, delta: float, n_models: int | str) -> tuple[str, str]:
    """The method, and why: decided by the arguments alone (docs/decisions/0005)."""
    if method == "moments" and not isinstance(n_models, str):
        raise InvalidInput(
            "method='moments' has no groups, so n_models does not belong to it. "
            "Nothing was spent. Leave it out, or use method='sequential'."
        )
    if method != "auto":
        return method, "given"
    if not isinstance(n_models, str):
        return "sequential", "auto: n_models is given"
    if delta == 0:
        return "sequential", "auto: delta = 0"
    return "moments", "auto: delta > 0"


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuse a value that is not among the choices, naming them."""
    if value not in choices:
        raise InvalidInput(
            f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}. "
            "Nothing was spent."
        )


def check_n_models(n_models: object) -> None:
    """Refuse a number of groups that is neither "auto" nor an integer of at least 4."""
    if isinstance(n_models, str) and n_models == "auto":
        return
    whole = isinstance(n_models, (int, np.integer)) and not isinstance(n_models, bool)
    if not whole or not 4 <= n_models <= _LARGEST_N_MODELS:  # type: ignore[operator]
        raise InvalidInput(
            f"n_models must be 'auto' or an integer from 4 to {_LARGEST_N_MODELS}, "
            f"got {n_models!r}. Nothing was spent."
        )


def count_noise(design: Design, d: int) -> IntegerNoise:
    """The noise of the private count of units, in the currency of the design's accounting."""
    noise = _model(design, d).count
    assert noise is not None, "this design takes no private count"
    return noise


def count_margin(noise: IntegerNoise) -> int:
    """What is taken off a noisy count to make it a lower bound."""
    return noise.quantile(COUNT_RISK)


def plan_units(lower: int | None, d: int, design: Design, n_models: int | str) -> Plan:
    """The plan for a lower bound of the number of units, or for given groups alone.

    A lower bound that comes from a noisy count may be below 1, and then counts as 1.
    """
    if design.method == "moments":
        assert lower is not None
        return _plan_moments(lower, d, design)
    model = _group_model(design, d)
    units = None if lower is None else max(1, lower)
    most = _LARGEST_N_MODELS
    if units is not None:
        most = int(units / fewest_units_per_group(design.method, d))
    if isinstance(n_models, str):
        assert units is not None
        m, needed = max(4, min(most, _groups_for(units, d, design.method, model))), ENOUGH
    else:
        m, needed = int(n_models), ENOUGH_FOR_GIVEN_GROUPS
    success = model.success(m)
    noise = model.noise(m)
    result = Plan(
        design.method,
        design.choice,
        design.neighboring,
        units,
        d,
        design.budget,
        model.accounting,
        m,
        model.parameters(m),
        model.count,
        success,
        noise if units is None else _with_small_groups(noise, units / m, d),
        enough=m <= most and success >= needed,
    )
    return result if result.enough else replace(result, advice=_advice(lower, d, design, n_models))


def _groups_for(units: int, d: int, method: str, model: _Sequential | _Joint) -> int:
    """As many groups as make success sure; more where units abound, fewer where they are few."""
    sure = model.fewest_groups(SURE)
    ample = min(int(units / (AMPLE_ROWS_PER_COLUMN * d)), MOST_EXTRA_GROUPS * sure)
    comfortable = int(units / comfortable_units_per_group(method, d))
    if comfortable >= sure:
        return max(sure, ample)
    fewest = min(sure, model.fewest_groups(ENOUGH))
    # Where groups are few, one more can be the worse: the verdict's threshold is a whole number.
    better = comfortable > fewest and model.success(comfortable) >= ENOUGH
    return comfortable if better else fewest


def _plan_moments(lower: int, d: int, design: Design) -> Plan:
    planner, units = _moments_planner(design, d), max(1, lower)
    result = Plan(
        design.method,
        design.choice,
        design.neighboring,
        units,
        d,
        design.budget,
        planner.accounting(units),
        None,
        planner.parameters(units),
        planner.count,
        planner.success(units),
        planner.noise(units),
        planner.enough(units),
    )
    return result if result.enough else replace(result, advice=_moments_advice(lower, d, design))


def _moments_planner(design: Design, d: int) -> MomentsPlanner:
    return MomentsPlanner(
        design.budget,
        d,
        design.private_count,
        replace=design.neighboring == "replace-one",
        intercept=design.intercept,
    )


def _moments_advice(lower: int, d: int, design: Design) -> tuple[str, ...]:
    """What would be enough: more units, or more epsilon, or fewer columns."""

    def margin(planner: MomentsPlanner) -> int:
        return 0 if planner.count is None else count_margin(planner.count)

    n = lower + margin(_moments_planner(design, d))

    def enough(epsilon: float, columns: int) -> bool:
        budget = Budget(epsilon, design.budget.delta)
        planner = _moments_planner(replace(design, budget=budget), columns)
        return planner.enough(n - margin(planner))

    epsilon, planner = design.budget.epsilon, _moments_planner(design, d)
    units = planner.fewest_units()
    advice = [] if units is None else [f"{units + margin(planner):,} units"]
    return (*advice, *_other_advice(enough, epsilon, d))


def _other_advice(enough: Callable[[float, int], bool], epsilon: float, d: int) -> tuple[str, ...]:
    """The smallest of some larger epsilons and the most columns that are enough."""
    advice = []
    factor = next((f for f in (1.5, 2, 3, 5, 10, 20, 50) if enough(f * epsilon, d)), None)
    if factor:
        advice.append(f"epsilon = {factor * epsilon:.3g}")
    columns = _largest(lambda k: enough(epsilon, k), d - 1)
    if columns:
        plural = "s" if columns > 1 else ""
        advice.append(f"{columns} coefficient{plural}, the intercept included")
    return tuple(advice)


def _model(design: Design, d: int) -> _Sequential | _Joint | MomentsPlanner:
    if design.method == "moments":
        return _moments_planner(design, d)
    return _group_model(design, d)


def _group_model(design: Design, d: int) -> _Sequential | _Joint:
    if design.method == "sequential":
        return _Sequential(design.budget, d, design.private_count)
    return _Joint(design.budget, d, design.private_count, design.split)


def _with_small_groups(noise: float, per_group: float, d: int) -> float:
    """Noise in units of a group's error, as a multiple of the error of OLS on all rows."""
    spare = per_group - d - 1
    return noise * math.sqrt(per_group / spare) if spare > 0 else math.inf


def _units_for(groups: int, method: str, d: int, count: IntegerNoise | None) -> int:
    """With so many units the groups are large enough, though a count is lowered by its margin."""
    margin = 0 if count is None else count_margin(count)
    return math.ceil(groups * fewest_units_per_group(method, d)) + 1 + margin


def _advice(lower: int | None, d: int, design: Design, n_models: int | str) -> tuple[str, ...]:
    """What would be enough: more units (or groups), or more epsilon, or fewer columns."""
    given = None if isinstance(n_models, str) else n_models
    target = ENOUGH if given is None else ENOUGH_FOR_GIVEN_GROUPS
    count = _group_model(design, d).count
    # Another design counts with other noise, so what they have in common is n, not its bound.
    n = lower if lower is None or count is None else lower + count_margin(count)

    def fewest(epsilon: float, columns: int) -> tuple[int, int]:
        """Groups, and units for them, that another epsilon or number of columns needs."""
        budget = Budget(epsilon, design.budget.delta)
        model = _group_model(replace(design, budget=budget), columns)
        groups = model.fewest_groups(target)
        return groups, _units_for(max(groups, given or 0), design.method, columns, model.count)

    def enough(epsilon: float, columns: int) -> bool:
        groups, units = fewest(epsilon, columns)
        most = _LARGEST_N_MODELS - 1 if given is None else given
        return groups <= most and (n is None or units <= n)

    epsilon = design.budget.epsilon
    groups, units = fewest(epsilon, d)
    more = []
    if given is not None and given < groups < _LARGEST_N_MODELS:
        more.append(f"{groups:,} groups")
    if n is not None and n < units and groups < _LARGEST_N_MODELS:
        more.append(f"{units:,} units")
    advice = [" and ".join(more)] if more else []
    return (*advice, *_other_advice(enough, epsilon, d))


def _largest(holds: Callable[[int], bool], most: int) -> int:
    """The largest integer of 1 .. most for which a falling property holds, or 0."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def _fewest(succeeds: Callable[[int], bool]) -> int:
    """The fewest groups that succeed, within one per cent."""
    low, high = 3, 8
    while not succeeds(high):
        low, high = high, 2 * high
        if high > _MOST_GROUPS_SOUGHT:
            return _LARGEST_N_MODELS
    while high - low > max(1, low // 100):
        middle = (low + high) // 2
        if succeeds(middle):
            high = middle
        else:
            low = middle
    return high


@lru_cache(maxsize=512)
def _normal_quantiles(m: int) -> Floats:
    """m values on the quantiles of the standard normal law, exactly symmetric."""
    lower = ndtri((np.arange(m // 2) + 0.5) / m)
    values = np.concatenate([lower, np.zeros(m % 2), -lower[::-1]])
    values.setflags(write=False)
    return values


# --- sequential -------------------------------------------------------------------------------

#: Reference laws of the votes: centre, and spread relative to the centre.
_REFERENCES = ((1e6, 1e-2), (1e-6, 1e-2), (1.0, 1e-2), (1e6, 10.0), (1e-6, 10.0), (1.0, 1.0))


@dataclass(frozen=True)
class _Split:
    """One way to spend a budget on ``sequential``, with the accounting that it needs."""

    accounting: str
    parameters: SequentialParameters
    count: IntegerNoise | None

    def fewest_units(self, d: int) -> float:
        """How many units make it succeed; infinite where no number of groups does."""
        groups = _fewest_sequential(d, self.parameters, ENOUGH)
        if groups == _LARGEST_N_MODELS:
            return math.inf
        return _units_for(groups, "sequential", d, self.count)


@lru_cache(maxsize=256)
def _sequential_split(budget: Budget, d: int, private_count: bool) -> _Split:
    """The split that needs the fewest units, or has the largest stages where none succeeds."""
    splits = [_pure_split(budget, d, private_count)]
    rho = largest_rho(budget.epsilon, budget.delta)
    if rho > 0:
        splits.append(_gaussian_split(rho, budget, d, private_count))
    return min(splits, key=lambda s: (s.fewest_units(d), -s.parameters.stage_epsilon))


def _pure_split(budget: Budget, d: int, private_count: bool) -> _Split:
    """Discrete Laplace noise, and everything adds up in pure DP."""
    verdict = budget.epsilon * (0.05 + 0.15 / d)
    count = (budget.epsilon * COUNT_SHARE,) if private_count else ()
    stage = largest_stage_by_sum(budget.epsilon, d, (*count, verdict))
    return _split("pure", "discrete Laplace", stage, verdict, count)


def _gaussian_split(rho: float, budget: Budget, d: int, private_count: bool) -> _Split:
    """Discrete Gaussian noise, and stages as large as their divergence allows (Lemma 3)."""
    verdict = rho * (0.05 + 0.1 / d)
    count = (rho * COUNT_SHARE,) if private_count else ()
    by_zcdp = largest_stage_by_zcdp(rho, d, (*count, verdict))
    stage = largest_stage_by_divergence(budget.epsilon, budget.delta, d, count, (verdict,), by_zcdp)
    accounting = "divergence" if stage > by_zcdp else "zCDP"
    return _split(accounting, "discrete Gaussian", stage, verdict, count)


def _split(
    accounting: str, law: str, stage: float, verdict: float, count: tuple[float, ...]
) -> _Split:
    parameters = SequentialParameters(stage, IntegerNoise(law, verdict))
    return _Split(accounting, parameters, IntegerNoise(law, *count) if count else None)


class _Sequential:
    """Success and noise of ``sequential`` under the reference laws: finite sums, no simulation."""

    def __init__(self, budget: Budget, d: int, private_count: bool) -> None:
        split = _sequential_split(budget, d, private_count)
        self._d, self._parameters = d, split.parameters
        self.accounting, self.count = split.accounting, split.count

    def parameters(self, m: int) -> SequentialParameters:
        return self._parameters

    def success(self, m: int) -> float:
        return _sequential_success(m, self._d, self._parameters)

    def fewest_groups(self, target: float) -> int:
        return _fewest_sequential(self._d, self._parameters, target)

    def noise(self, m: int) -> float:
        """Root mean square of the released quantile, in units of the error of all rows."""
        depths = _reference_depths(m, self._parameters.stage_epsilon, 1.0, 1.0)
        at = _normal_quantiles(m)[np.maximum(np.arange(len(depths)) - 1, 0)]
        return math.sqrt(m * float(np.sum(depths * at**2)))


@lru_cache(maxsize=256)
def _fewest_sequential(d: int, parameters: SequentialParameters, target: float) -> int:
    def succeeds(m: int) -> bool:
        return all(_released(m, d, parameters, *law) >= target for law in _REFERENCES)

    return _fewest(succeeds)


def _sequential_success(m: int, d: int, parameters: SequentialParameters) -> float:
    """The least probability over the reference laws that the verdict releases."""
    return min(_released(m, d, parameters, *law) for law in _REFERENCES)


def _released(
    m: int, d: int, parameters: SequentialParameters, centre: float, spread: float
) -> float:
    """The probability that the verdict releases under one reference law."""
    threshold = verdict_threshold(m, parameters.verdict)
    if threshold > m:  # the verdict's noise drowns every vote: below any success worth planning
        return 0.0
    noise, chance = parameters.verdict.probabilities()
    depths = _reference_depths(m, parameters.stage_epsilon, centre, spread)
    reached = np.append(np.cumsum(depths[::-1])[::-1], 0.0)  # P[depth >= k]
    least = np.clip(threshold - noise, 0, len(reached) - 1)
    return min(1.0, float(np.sum(chance * np.minimum(reached[least], 1.0) ** d)))


def _reference_depths(m: int, epsilon: float, centre: float, spread: float) -> Floats:
    """Law of the depth of one stage when the votes lie on the quantiles of a normal law."""
    votes = centre * (1 + spread * _normal_quantiles(m))
    inner = np.sort(np.concatenate([votes, [-1.0, 0.0, 1.0]]))
    low, high = np.concatenate([[-np.inf], inner]), np.concatenate([inner, [np.inf]])
    kept = low < high
    below = np.searchsorted(votes, low[kept], side="right")
    depth = np.append(np.minimum(below, m - below), min(np.sum(votes <= 0), np.sum(votes >= 0)))
    mass = np.append((1 - ATOM) * base_measure(low[kept], high[kept]), ATOM)
    mass = mass * np.exp(epsilon / 2 * (depth - depth.max()))
    return np.asarray(np.bincount(depth, mass) / mass.sum())


# --- joint ------------------------------------------------------------------------------------

_TEST_SHARES = (0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5)
_DEPTH_SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)


class _Joint:
    """Success and noise of ``joint`` when the models are Gaussian and lie on their quantiles."""

    accounting = "test and selection"

    def __init__(self, budget: Budget, d: int, private_count: bool, split: str | None) -> None:
        self._d, self._split = d, split
        self.count = None
        epsilon = budget.epsilon
        if private_count:
            self.count = IntegerNoise("discrete Laplace", epsilon * COUNT_SHARE)
            epsilon = _less(epsilon, self.count.rate)
        self._budget = Budget(epsilon, budget.delta)

    def parameters(self, m: int) -> JointParameters:
        return _joint_best(m, self._d, self._budget, self._split)[0]

    def success(self, m: int) -> float:
        return _joint_best(m, self._d, self._budget, self._split)[1]

    def noise(self, m: int) -> float:
        return _joint_best(m, self._d, self._budget, self._split)[2]

    def fewest_groups(self, target: float) -> int:
        return _fewest_joint(self._d, self._budget, self._split, target)


@lru_cache(maxsize=256)
def _fewest_joint(d: int, budget: Budget, split: str | None, target: float) -> int:
    return _fewest(lambda m: _joint_best(m, d, budget, split)[1] >= target)


def _less(epsilon: float, part: float) -> float:
    """epsilon - part, rounded down."""
    return math.nextafter(epsilon - part, 0.0)


@lru_cache(maxsize=512)
def _joint_best(
    m: int, d: int, budget: Budget, split: str | None
) -> tuple[JointParameters, float, float]:
    """Parameters, success and noise: the least noise among what is sure, else the surest."""
    if split == "paper":
        return _joint_candidate(m, d, budget, 0.5, 0.25)
    candidates = [
        _joint_candidate(m, d, budget, share, depth)
        for share in _TEST_SHARES
        for depth in _DEPTH_SHARES
    ]
    sure = [candidate for candidate in candidates if candidate[1] >= SURE]
    if sure:
        return min(sure, key=lambda candidate: candidate[2])
    return max(candidates, key=lambda candidate: candidate[1])


def _joint_candidate(
    m: int, d: int, budget: Budget, share: float, depth: float
) -> tuple[JointParameters, float, float]:
    test = budget.epsilon * share
    parameters = JointParameters(
        test, _less(budget.epsilon, test), budget.delta, max(1, int(depth * m))
    )
    log_volume, log_mass = _gaussian_masses(m, d, parameters.selection_epsilon)
    distance = _reference_distance(log_volume, log_mass, parameters)
    success = _pass_probability(distance, test, budget.delta)
    shells = log_mass[parameters.restriction_depth - 1 :]
    weights = np.exp(shells - np.max(shells))
    half_width = -_normal_quantiles(m)[parameters.restriction_depth - 1 : m // 2]
    variance = float(np.sum(weights * half_width**2 / 3) / weights.sum())
    return parameters, success, math.sqrt(m * variance)


def _gaussian_masses(m: int, d: int, epsilon: float) -> tuple[Floats, Floats]:
    """log V_p and log(W_p exp(epsilon p / 2)) for p = 1 .. m // 2."""
    half_width = np.maximum(-_normal_quantiles(m)[: m // 2], 1e-12)
    log_volume = d * np.log(2 * half_width)
    deeper = np.append(log_volume[1:], -np.inf)
    log_shell = log_volume + np.log(-np.expm1(np.minimum(deeper - log_volume, -1e-12)))
    return log_volume, log_shell + epsilon / 2 * np.arange(1, m // 2 + 1)


def _reference_distance(log_volume: Floats, log_mass: Floats, parameters: JointParameters) -> int:
    t, epsilon = parameters.restriction_depth, parameters.selection_epsilon
    deep = np.logaddexp.accumulate(log_mass[::-1])[::-1]
    k = np.arange(0, min(t - 2, len(log_volume) - t) + 1)
    if not k.size:
        return -1
    holds = log_volume[t - 2 - k] + epsilon * (t + 1 + k) / 2 <= (
        math.log(parameters.delta) + deep[t + k - 1]
    )
    return int(np.argmin(holds)) - 1 if not holds.all() else int(k[-1])


def _pass_probability(distance: int, epsilon: float, delta: float) -> float:
    """P[k* + Z >= T] in floating point, for planning."""
    q = math.exp(-epsilon)
    threshold = max(0, math.ceil(-(math.log(delta) + math.log1p(q)) / epsilon - 1))
    missing = threshold - distance
    tail = q ** abs(missing) / (1 + q)
    return tail if missing > 0 else 1 - q * tail
