"""Exact privacy loss of the mechanisms between two given sets of models.

This module is a referee. It imports nothing from the mechanisms and works from the definitions
alone: closed depth, boxes, the base measure of the private median. Doubles are taken as the exact
numbers that they are, volumes are exact integers, and only exponentials and roots are certified
balls (Arb), at a precision that makes their radius negligible. Losses are rounded upwards, so a
bound that is respected here is respected by the real number.

Names of statements (Lemma 1, Lemma 2, Theorem 1, Theorem 2) are those of the method page.

Two readings of the definitions are fixed here, because the proofs need them:

* *No volume, never safe.* C_k also demands M_(t+k) > 0; without this, 0 <= 0 would make a set of
  models that all agree pass as safe. Lemma 2 still holds: {u >= t+k} for one set of models lies
  inside {u' >= t+k-1} for its neighbour, so M_(t+k)(D) > 0 implies M_(t+k-1)(D') > 0.
* *No volume, no point.* If the test passes by noise while {u >= t} has no volume, the outcome is a
  refusal. This happens only where k* = -1, and then no neighbour is safe either. For C_0(D') with
  delta < 1 implies M_(t+1)(D') > 0: otherwise M_t(D') = e^(eps2 t/2) V_t(D') and C_0(D') would read
  V_(t-1) e^(eps2/2) <= delta V_t with 0 < V_t <= V_(t-1). Hence M_t(D) > 0 for every neighbour D of
  a safe D', and Lemma 1 and Theorem 1 never meet a law that does not exist.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from flint import arb, ctx

__all__ = [
    "ATOM",
    "SPREAD",
    "Divergence",
    "JointLaw",
    "StageLaw",
    "StageLoss",
    "bernoulli_divergence",
    "joint_divergence",
    "joint_law",
    "pass_probability",
    "pass_threshold",
    "safe_distances",
    "safety_distance",
    "selection_divergence",
    "stage_divergence",
    "stage_law",
    "stage_loss",
]

ATOM = 1 / 16
"""Mass that the base measure of the private median puts on exactly zero."""

SPREAD = 8
"""Shape s of the double Pareto base measure: F+(x) = x^(1/s)/2 up to 1."""

_BITS = 256
_DOUBLINGS = 10
_RADIUS = 2.0**-128

Models = npt.ArrayLike
_Box = tuple[tuple[float, float], ...]  # integers, or infinite sides of the whole space
_Piece = tuple[float, float]  # an open interval, or (0, 0) for the atom
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Divergence:
    """Certified upper bounds of the hockey-stick divergence at e^epsilon.

    Attributes
    ----------
    forward : float
        sup over events S of P[S] - e^epsilon P'[S], from the first argument to the second.
    backward : float
        The same with the two laws exchanged.

    Examples
    --------
    >>> Divergence(forward=0.25, backward=0.0).worst
    0.25
    """

    forward: float
    backward: float

    @property
    def worst(self) -> float:
        """The larger of the two directions: the smallest delta that covers this pair."""
        return max(self.forward, self.backward)


@dataclass(frozen=True)
class StageLoss:
    """Certified upper bounds of the pure privacy loss of one stage.

    Attributes
    ----------
    forward, backward : float
        sup over outputs of log(p/p') and of log(p'/p).
    range : float
        Width of the set of values of log(p/p'), the quantity that a bounded range bounds.
    """

    forward: float
    backward: float
    range: float


# ---------------------------------------------------------------- exact decisions


def _escalate(attempt: Callable[[], _Result | None]) -> _Result:
    """First answer of `attempt` that is not None, under doubling precision."""
    for doubling in range(_DOUBLINGS):
        with ctx.workprec(_BITS << doubling):
            result = attempt()
        if result is not None:
            return result
    raise ArithmeticError("precision exhausted: the parameters are too extreme to verify")


def _accurate(*balls: arb) -> bool:
    return all(ball.rad() < _RADIUS for ball in balls)


def _round_up(ball: arb) -> float:
    bound = ball.upper()
    value = float(bound)
    while arb(value) < bound:
        value = math.nextafter(value, math.inf)
    return value


def _positive_part(ball: arb) -> arb:
    return ball.max(arb(0))


def _hockey_stick(terms: Iterable[tuple[arb, arb]], factor: arb) -> arb:
    return sum((_positive_part(p - factor * q) for p, q in terms), arb(0))


def _both_ways(terms: Sequence[tuple[arb, arb]], epsilon: float) -> Divergence | None:
    factor = arb(epsilon).exp()
    forward = _hockey_stick(terms, factor)
    backward = _hockey_stick(((q, p) for p, q in terms), factor)
    if not _accurate(forward, backward):
        return None
    return Divergence(_round_up(forward), _round_up(backward))


# ---------------------------------------------------------------- checks of arguments


def _check_positive(**parameters: float) -> None:
    for name, value in parameters.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} must be positive and finite, got {value!r}")


def _check_epsilon(epsilon: float) -> None:
    if not (epsilon >= 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon must be finite and not negative, got {epsilon!r}")


def _check_delta(delta: float) -> None:
    if not 0 < delta < 0.5:
        raise ValueError(f"delta must lie strictly between 0 and 1/2, got {delta!r}")


def _check_models(models: Models, depth: int) -> npt.NDArray[np.float64]:
    array = np.asarray(models, dtype=np.float64)
    if array.ndim != 2 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError("models must be a non-empty m x d array of finite numbers")
    if not 1 <= depth <= (len(array) + 1) // 2:
        raise ValueError(f"restriction_depth must lie in 1..ceil(m/2), got {depth!r}")
    return array


def _check_pair(
    models: Models, neighbour: Models, depth: int
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    first, second = _check_models(models, depth), _check_models(neighbour, depth)
    if first.shape != second.shape:
        raise ValueError(f"shapes differ: {first.shape} and {second.shape}")
    return first, second


def _check_values(values: npt.ArrayLike) -> list[float]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or not np.isfinite(array).all():
        raise ValueError("values must be a non-empty vector of finite numbers")
    return sorted(array.tolist())


def _check_atom(atom: float) -> None:
    if not 0 <= atom < 1:
        raise ValueError(f"atom must lie in [0, 1), got {atom!r}")


# ---------------------------------------------------------------- depth regions as exact boxes


def _exact(x: float) -> float:
    """x in units of 2^-1074, of which every finite double is a multiple; infinities stay."""
    if math.isinf(x):
        return x
    numerator, denominator = x.as_integer_ratio()
    return numerator << (1075 - denominator.bit_length())


def _levels(models: npt.NDArray[np.float64], depth: int) -> list[_Box]:
    """The whole space, then {u >= a} for a = depth..ceil(m/2), then an empty box: nested."""
    m, d = models.shape
    sides = [sorted(map(_exact, column)) for column in models.T.tolist()]
    space: _Box = ((-math.inf, math.inf),) * d
    empty: _Box = ((math.inf, -math.inf),) * d
    regions = [tuple((s[a - 1], s[m - a]) for s in sides) for a in range(depth, (m + 1) // 2 + 1)]
    return [space, *regions, empty]


def _volume(*boxes: _Box) -> int:
    """Exact volume of the intersection; at least one box is bounded."""
    volume = 1
    for sides in zip(*boxes, strict=True):
        width = min([high for _, high in sides]) - max([low for low, _ in sides])
        if width <= 0:
            return 0
        volume *= int(width)
    return volume


def _inside(inner: _Box, outer: _Box) -> bool:
    return all(o[0] <= i[0] and i[1] <= o[1] for i, o in zip(inner, outer, strict=True))


def _reach(first: list[_Box], second: list[_Box]) -> int:
    """How far the two depths can differ, in levels: 1 for neighbours."""
    last = len(first) - 1

    def suffices(steps: int) -> bool:
        return all(
            _inside(first[min(i + steps, last)], second[i])
            and _inside(second[min(i + steps, last)], first[i])
            for i in range(last)
        )

    return next(steps for steps in range(last + 1) if suffices(steps))


def _joint_cells(first: list[_Box], second: list[_Box]) -> list[tuple[int, int, int]]:
    """(i, j, volume) of {u at level i, u' at level j}; level 0 is outside both restrictions.

    {u >= a, u' >= b} is the intersection of two boxes, so inclusion and exclusion over four of
    them gives each cell. Cells without volume are left out.
    """
    last, reach = len(first) - 1, _reach(first, second)

    @cache
    def at_least(i: int, j: int) -> int:
        return _volume(first[i], second[j])

    cells = []
    for i in range(last):
        for j in range(max(0, i - reach), min(last, i + reach + 1)):
            if i or j:
                upper = at_least(i, j) - at_least(i, j + 1)
                lower = at_least(i + 1, j) - at_least(i + 1, j + 1)
                if upper > lower:
                    cells.append((i, j, upper - lower))
    return cells


def _exact_volumes(levels: list[_Box]) -> list[int]:
    """Volume at exactly each level, level 0 (outside) excluded."""
    return [a - b for a, b in pairwise([_volume(box) for box in levels[1:]])]


# ---------------------------------------------------------------- `joint`


def _densities(volumes: list[int], rate: arb) -> list[arb] | None:
    """Density of A_t at levels t, t+1, ...; None where {u >= t} has no volume."""
    if not any(volumes):
        return None
    weights = [(rate * level).exp() for level in range(len(volumes))]
    mass = sum((w * v for w, v in zip(weights, volumes, strict=True)), arb(0))
    return [w / mass for w in weights]


def _outcome(volumes: list[int], rate: arb, passing: arb) -> tuple[arb, list[arb]]:
    """P[refusal] and the density of the released point at every level, level 0 first."""
    densities = _densities(volumes, rate)
    if densities is None:
        return arb(1), [arb(0)] * (len(volumes) + 1)
    return 1 - passing, [arb(0), *(passing * p for p in densities)]


def _gated_divergence(
    models: npt.NDArray[np.float64],
    neighbour: npt.NDArray[np.float64],
    *,
    epsilon: float,
    rate: Callable[[], arb],
    restriction_depth: int,
    passing: Callable[[], tuple[arb, arb]],
) -> Divergence:
    """Divergence of: pass with a given probability, then density exp(rate * u) on {u >= t}."""
    first, second = _levels(models, restriction_depth), _levels(neighbour, restriction_depth)
    volumes, other_volumes = _exact_volumes(first), _exact_volumes(second)
    cells = _joint_cells(first, second)

    def attempt() -> Divergence | None:
        p_pass, q_pass = passing()
        refusal, p = _outcome(volumes, rate(), p_pass)
        other_refusal, q = _outcome(other_volumes, rate(), q_pass)
        terms = [(volume * p[i], volume * q[j]) for i, j, volume in cells]
        return _both_ways([(refusal, other_refusal), *terms], epsilon)

    return _escalate(attempt)


def selection_divergence(
    models: Models,
    neighbour: Models,
    *,
    epsilon: float,
    selection_epsilon: float,
    restriction_depth: int,
    exponent: float = 0.5,
    pass_probabilities: tuple[float, float] = (1.0, 1.0),
) -> Divergence:
    """Divergence of the restricted exponential mechanism behind a gate of known probability.

    The density is proportional to exp(exponent * selection_epsilon * u) on {u >= t}; Lemma 1
    speaks about the exponent 1/2 and an open gate. Where {u >= t} has no volume the outcome is a
    refusal.

    Parameters
    ----------
    models, neighbour : array-like of shape (m, d)
        Any two sets of models of one shape.
    epsilon : float
        The divergence is taken at e^epsilon.
    selection_epsilon : float
        eps2.
    restriction_depth : int
        t.
    exponent : float
        Factor of selection_epsilon * u in the exponent.
    pass_probabilities : tuple of float
        Probability that the gate opens for `models` and for `neighbour`.

    Returns
    -------
    Divergence

    Examples
    --------
    Depth 1 has width 2 and depth 2 width 4; the neighbour moves the outermost model inwards.

    >>> from math import log
    >>> selection_divergence(
    ...     [[0.0], [1.0], [5.0], [6.0]], [[1.0], [1.0], [5.0], [6.0]],
    ...     epsilon=log(2), selection_epsilon=log(2), restriction_depth=2)
    Divergence(forward=0.0, backward=0.0)
    >>> selection_divergence(
    ...     [[0.0], [1.0], [5.0], [6.0]], [[1.0], [1.0], [5.0], [6.0]],
    ...     epsilon=0.0, selection_epsilon=log(4), restriction_depth=1)
    Divergence(forward=0.1, backward=0.1)
    """
    first, second = _check_pair(models, neighbour, restriction_depth)
    _check_epsilon(epsilon)
    _check_positive(selection_epsilon=selection_epsilon, exponent=exponent)
    if not all(0 <= p <= 1 for p in pass_probabilities):
        raise ValueError(f"pass_probabilities must lie in [0, 1], got {pass_probabilities!r}")
    p, q = pass_probabilities
    return _gated_divergence(
        first,
        second,
        epsilon=epsilon,
        rate=lambda: arb(selection_epsilon) * arb(exponent),
        restriction_depth=restriction_depth,
        passing=lambda: (arb(p), arb(q)),
    )


def safe_distances(
    models: Models, *, selection_epsilon: float, delta: float, restriction_depth: int
) -> list[int]:
    """Every k >= 0 for which C_k holds; by Lemma 2 these are 0, 1, ..., k*.

    C_k: V_(t-1-k) e^(eps2 (t+1+k)/2) <= delta M_(t+k), and M_(t+k) > 0, with V_0 infinite.
    Each comparison is exact. It always ends: equality would make exponentials of distinct
    algebraic numbers linearly dependent (Lindemann and Weierstrass), except for
    V_(t-1-k) = delta W_(t+1+k), which delta < 1 excludes because W_(t+1+k) <= V_(t-1-k).

    Parameters
    ----------
    models : array-like of shape (m, d)
        The models.
    selection_epsilon : float
        eps2.
    delta : float
        The delta of the safety condition.
    restriction_depth : int
        t.

    Returns
    -------
    list of int

    Examples
    --------
    >>> models = [[side + i / 1000] for side in (0, 1) for i in range(12)]
    >>> safe_distances(models, selection_epsilon=2.0, delta=0.1, restriction_depth=6)
    [0, 1, 2]
    """
    array = _check_models(models, restriction_depth)
    _check_positive(selection_epsilon=selection_epsilon)
    _check_delta(delta)
    t = restriction_depth
    levels = _levels(array, 1)
    at_least = [_volume(box) for box in levels[1:]]  # V_1, V_2, ...
    exactly = _exact_volumes(levels)  # W_1, W_2, ...
    candidates = [k for k in range(t - 1) if t + k <= len(exactly) and at_least[t + k - 1]]

    def attempt() -> list[int] | None:
        weights = [(arb(selection_epsilon) * p / 2).exp() for p in range(1, len(exactly) + 2)]
        parts = [w * v for w, v in zip(weights, exactly, strict=False)]
        masses = list(accumulate(reversed(parts)))[::-1]  # M_1, M_2, ...
        margins = [
            arb(delta) * masses[t + k - 1] - at_least[t - k - 2] * weights[t + k]
            for k in candidates
        ]
        if any(margin.contains(0) for margin in margins):
            return None
        return [k for k, margin in zip(candidates, margins, strict=True) if margin > 0]

    return _escalate(attempt)


def safety_distance(
    models: Models, *, selection_epsilon: float, delta: float, restriction_depth: int
) -> int:
    """k* of Lemma 2: the largest k for which C_k holds, or -1.

    Parameters
    ----------
    models, selection_epsilon, delta, restriction_depth
        As in `safe_distances`.

    Returns
    -------
    int

    Examples
    --------
    >>> models = [[side + i / 1000] for side in (0, 1) for i in range(12)]
    >>> safety_distance(models, selection_epsilon=2.0, delta=0.1, restriction_depth=6)
    2
    >>> safety_distance([[7.0]] * 24, selection_epsilon=2.0, delta=0.1, restriction_depth=6)
    -1
    """
    distances = safe_distances(
        models,
        selection_epsilon=selection_epsilon,
        delta=delta,
        restriction_depth=restriction_depth,
    )
    return max(distances, default=-1)


def _upper_tail(z: int, test_epsilon: float) -> arb:
    """P[Z >= z] for the discrete Laplace law P[Z = z] proportional to e^(-test_epsilon |z|)."""
    q = (-arb(test_epsilon)).exp()
    return q**z / (1 + q) if z >= 0 else 1 - q ** (1 - z) / (1 + q)


def pass_threshold(*, test_epsilon: float, delta: float) -> int:
    """T of Theorem 1: the smallest integer with P[-1 + Z >= T] <= delta.

    The decision is exact. It always ends: equality would make e^(-eps1) algebraic.

    Parameters
    ----------
    test_epsilon : float
        eps1.
    delta : float
        Largest probability with which an unsafe set of models may pass, below 1/2.

    Returns
    -------
    int

    Examples
    --------
    >>> pass_threshold(test_epsilon=1.0, delta=0.1)
    1
    """
    _check_positive(test_epsilon=test_epsilon)
    _check_delta(delta)

    def attempt() -> int | None:
        # delta < 1/2 < P[Z >= 0], so the tail e^(-eps1 z)/(1 + e^(-eps1)) for z >= 0 decides.
        q = (-arb(test_epsilon)).exp()
        smallest = (-(arb(delta) * (1 + q)).log() / arb(test_epsilon)).ceil().unique_fmpz()
        return None if smallest is None else int(smallest) - 1

    return _escalate(attempt)


def pass_probability(distance: int, *, test_epsilon: float, delta: float) -> float:
    """P[k + Z >= T] for the safety test of Theorem 1, to the nearest double.

    Parameters
    ----------
    distance : int
        k, at least -1.
    test_epsilon, delta : float
        As in `pass_threshold`.

    Returns
    -------
    float

    Examples
    --------
    >>> pass_probability(-1, test_epsilon=1.0, delta=0.1)
    0.0989...
    >>> pass_probability(1, test_epsilon=1.0, delta=0.1)
    0.731...
    """
    if distance < -1:
        raise ValueError(f"distance must be at least -1, got {distance!r}")
    threshold = pass_threshold(test_epsilon=test_epsilon, delta=delta)

    def attempt() -> float | None:
        probability = _upper_tail(threshold - distance, test_epsilon)
        return float(probability) if _accurate(probability) else None

    return _escalate(attempt)


def bernoulli_divergence(p: float, q: float, *, epsilon: float) -> Divergence:
    """Divergence between two coins, such as the pass bits of two sets of models.

    Parameters
    ----------
    p, q : float
        Probabilities of heads, taken as exact.
    epsilon : float
        The divergence is taken at e^epsilon.

    Returns
    -------
    Divergence

    Examples
    --------
    >>> bernoulli_divergence(0.5, 0.25, epsilon=0.0)
    Divergence(forward=0.25, backward=0.25)
    """
    _check_epsilon(epsilon)
    if not (0 <= p <= 1 and 0 <= q <= 1):
        raise ValueError(f"p and q must lie in [0, 1], got {p!r} and {q!r}")
    return _escalate(
        lambda: _both_ways([(arb(p), arb(q)), (1 - arb(p), 1 - arb(q))], epsilon),
    )


def joint_divergence(
    models: Models,
    neighbour: Models,
    *,
    epsilon: float,
    test_epsilon: float,
    selection_epsilon: float,
    delta: float,
    restriction_depth: int,
) -> Divergence:
    """Divergence of the whole mechanism `joint`: safety test, then A_t or a refusal.

    Theorem 1 says that neither direction exceeds delta at epsilon = eps1 + eps2 for neighbours.
    Any two sets of models of one shape are accepted.

    Parameters
    ----------
    models, neighbour : array-like of shape (m, d)
        The two sets of models.
    epsilon : float
        The divergence is taken at e^epsilon.
    test_epsilon, selection_epsilon : float
        eps1 and eps2.
    delta : float
        The delta of the safety condition and of the threshold, below 1/2.
    restriction_depth : int
        t.

    Returns
    -------
    Divergence

    Examples
    --------
    >>> models = [[side + i / 1000] for side in (0, 1) for i in range(12)]
    >>> neighbour = [[0.5], *models[1:]]
    >>> loss = joint_divergence(
    ...     models, neighbour, epsilon=3.0, test_epsilon=1.0, selection_epsilon=2.0,
    ...     delta=0.1, restriction_depth=6)
    >>> loss.worst <= 0.1
    True
    """
    first, second = _check_pair(models, neighbour, restriction_depth)
    _check_epsilon(epsilon)
    _check_positive(selection_epsilon=selection_epsilon)
    threshold = pass_threshold(test_epsilon=test_epsilon, delta=delta)
    p_distance, q_distance = (
        safety_distance(
            side,
            selection_epsilon=selection_epsilon,
            delta=delta,
            restriction_depth=restriction_depth,
        )
        for side in (first, second)
    )
    return _gated_divergence(
        first,
        second,
        epsilon=epsilon,
        rate=lambda: arb(selection_epsilon) / 2,
        restriction_depth=restriction_depth,
        passing=lambda: (
            _upper_tail(threshold - p_distance, test_epsilon),
            _upper_tail(threshold - q_distance, test_epsilon),
        ),
    )


@dataclass(frozen=True)
class JointLaw:
    """The exact law of the point that A_t releases.

    Attributes
    ----------
    depth_probabilities : dict of int to float
        P[u(Y) = p] for p = t, ..., ceil(m/2).
    """

    depth_probabilities: dict[int, float]
    _levels: list[_Box] = field(repr=False)
    _densities: list[arb] = field(repr=False)

    def box_probability(self, lower: npt.ArrayLike, upper: npt.ArrayLike) -> float:
        """P[lower <= Y <= upper] coordinate by coordinate; sides may be infinite.

        Parameters
        ----------
        lower, upper : array-like of shape (d,)
            Corners of the box.

        Returns
        -------
        float
        """
        low, high = (np.asarray(side, dtype=np.float64) for side in (lower, upper))
        if any(c.shape != (len(self._levels[0]),) or np.isnan(c).any() for c in (low, high)):
            raise ValueError("lower and upper must be vectors of length d without NaN")
        window = tuple(
            (_exact(a), _exact(b)) for a, b in zip(low.tolist(), high.tolist(), strict=True)
        )
        volumes = [a - b for a, b in pairwise([_volume(b, window) for b in self._levels[1:]])]
        with ctx.workprec(_BITS):
            parts = [p * v for p, v in zip(self._densities, volumes, strict=True)]
            return float(sum(parts, arb(0)))


def joint_law(models: Models, *, selection_epsilon: float, restriction_depth: int) -> JointLaw:
    """Exact law of the restricted exponential mechanism A_t (Lemma 1).

    Parameters
    ----------
    models : array-like of shape (m, d)
        The models.
    selection_epsilon : float
        eps2.
    restriction_depth : int
        t.

    Returns
    -------
    JointLaw

    Examples
    --------
    >>> from math import log
    >>> law = joint_law(
    ...     [[0.0], [1.0], [5.0], [6.0]], selection_epsilon=log(4), restriction_depth=1)
    >>> law.depth_probabilities
    {1: 0.2, 2: 0.8}
    >>> law.box_probability([-1.0], [3.0])
    0.5
    """
    array = _check_models(models, restriction_depth)
    _check_positive(selection_epsilon=selection_epsilon)
    levels = _levels(array, restriction_depth)
    volumes = _exact_volumes(levels)

    def attempt() -> JointLaw | None:
        densities = _densities(volumes, arb(selection_epsilon) / 2)
        if densities is None:
            raise ValueError("the region of depth >= restriction_depth has no volume: no law")
        parts = [p * v for p, v in zip(densities, volumes, strict=True)]
        if not _accurate(*parts):
            return None
        return JointLaw(
            dict(enumerate(map(float, parts), start=restriction_depth)), levels, densities
        )

    return _escalate(attempt)


# ---------------------------------------------------------------- one stage of `sequential`


def _base_cdf(x: float) -> arb:
    """CDF of the symmetric double Pareto law, without cancellation in either tail."""
    if x == 0 or math.isinf(x):
        return arb((1 + np.sign(x)) / 2)
    size = abs(x)
    if size <= 1:
        half = arb(size).root(SPREAD) / 4
        return arb(0.5) + half if x >= 0 else arb(0.5) - half
    tail = 1 / (4 * arb(size).root(SPREAD))
    return 1 - tail if x > 0 else tail


def _pieces(*samples: list[float], atom: float) -> list[_Piece]:
    """Where depth is constant and the base measure positive: open intervals and the atom.

    The sample values themselves (other than 0) have no mass and are in no piece.
    """
    edges = sorted({-math.inf, 0.0, math.inf}.union(*samples))
    return [*([(0.0, 0.0)] if atom else []), *pairwise(edges)]


def _base_masses(pieces: list[_Piece], atom: float) -> list[arb]:
    cdf = cache(_base_cdf)
    return [
        arb(atom) if low == high else (1 - arb(atom)) * (cdf(high) - cdf(low))
        for low, high in pieces
    ]


def _depth(values: list[float], piece: _Piece) -> int:
    low, high = piece
    return min(bisect_right(values, low), len(values) - bisect_left(values, high))


def _tilt(masses: list[arb], depths: list[int], rate: arb) -> list[arb]:
    return [mass * (rate * depth).exp() for mass, depth in zip(masses, depths, strict=True)]


def _stage_terms(
    pieces: list[_Piece], samples: Sequence[list[float]], rate: arb, atom: float
) -> list[list[arb]]:
    """Probability of every piece, for each sample."""
    masses = _base_masses(pieces, atom)
    tilted = [_tilt(masses, [_depth(s, piece) for piece in pieces], rate) for s in samples]
    totals = [sum(weights, arb(0)) for weights in tilted]
    return [
        [weight / total for weight in weights]
        for weights, total in zip(tilted, totals, strict=True)
    ]


def stage_loss(
    values: npt.ArrayLike,
    neighbour: npt.ArrayLike,
    *,
    stage_epsilon: float,
    exponent: float = 0.5,
    atom: float = ATOM,
) -> StageLoss:
    """Exact privacy loss of one private median.

    Theorem 2 says that for one replaced value neither direction and not even the range exceeds
    stage_epsilon. With one value added or removed depth moves one way only, and the same holds
    with the exponent 1.

    Parameters
    ----------
    values, neighbour : array-like of shape (m,)
        The two samples; they may differ in length.
    stage_epsilon : float
        eps0: the density with respect to the base measure is exp(exponent * eps0 * u).
    exponent : float
        1/2 for the stages of `sequential`.
    atom : float
        Mass of the base measure at 0.

    Returns
    -------
    StageLoss

    Examples
    --------
    >>> loss = stage_loss([-1.0, 1.0, 2.0], [-1.0, 1.0, -2.0], stage_epsilon=0.5)
    >>> loss.range
    0.5
    >>> max(loss.forward, loss.backward) <= 0.5
    True
    """
    first, second = _check_values(values), _check_values(neighbour)
    _check_positive(stage_epsilon=stage_epsilon, exponent=exponent)
    _check_atom(atom)
    pieces = _pieces(first, second, atom=atom)
    p_depths = [_depth(first, piece) for piece in pieces]
    q_depths = [_depth(second, piece) for piece in pieces]
    rises = [p - q for p, q in zip(p_depths, q_depths, strict=True)]
    highest, lowest = max(rises), min(rises)

    def attempt() -> StageLoss | None:
        rate = arb(stage_epsilon) * arb(exponent)
        masses = _base_masses(pieces, atom)
        p_total = sum(_tilt(masses, p_depths, rate), arb(0))
        q_total = sum(_tilt(masses, q_depths, rate), arb(0))
        shift = (q_total / p_total).log()  # log(p/p') = rate * (u - u') + shift
        forward, backward = rate * highest + shift, -rate * lowest - shift
        if not _accurate(forward, backward):
            return None
        return StageLoss(*map(_round_up, (forward, backward, rate * (highest - lowest))))

    return _escalate(attempt)


def stage_divergence(
    values: npt.ArrayLike,
    neighbour: npt.ArrayLike,
    *,
    epsilon: float,
    stage_epsilon: float,
    exponent: float = 0.5,
    atom: float = ATOM,
) -> Divergence:
    """Divergence of one private median; zero at epsilon = stage_epsilon by Theorem 2.

    Parameters
    ----------
    values, neighbour : array-like of shape (m,)
        The two samples; they may differ in length.
    epsilon : float
        The divergence is taken at e^epsilon.
    stage_epsilon, exponent, atom : float
        As in `stage_loss`.

    Returns
    -------
    Divergence

    Examples
    --------
    >>> samples = [-1.0, 1.0, 2.0], [-1.0, 1.0, -2.0]
    >>> stage_divergence(*samples, epsilon=0.5, stage_epsilon=0.5)
    Divergence(forward=0.0, backward=0.0)
    >>> stage_divergence(*samples, epsilon=0.0, stage_epsilon=0.5).forward
    0.0047...
    """
    samples = _check_values(values), _check_values(neighbour)
    _check_epsilon(epsilon)
    _check_positive(stage_epsilon=stage_epsilon, exponent=exponent)
    _check_atom(atom)
    pieces = _pieces(*samples, atom=atom)

    def attempt() -> Divergence | None:
        rate = arb(stage_epsilon) * arb(exponent)
        p, q = _stage_terms(pieces, samples, rate, atom)
        return _both_ways(list(zip(p, q, strict=True)), epsilon)

    return _escalate(attempt)


@dataclass(frozen=True)
class StageLaw:
    """The exact law of one private median.

    Attributes
    ----------
    breakpoints : tuple of float
        The distinct values and 0, sorted.
    intervals : tuple of float
        Probability of every open interval between breakpoints, both tails included: one more
        than there are breakpoints.
    atom : float
        Probability of exactly 0.
    """

    breakpoints: tuple[float, ...]
    intervals: tuple[float, ...]
    atom: float
    _below: list[arb] = field(repr=False)
    _densities: list[arb] = field(repr=False)

    def cdf(self, x: float) -> float:
        """P[Y <= x].

        Parameters
        ----------
        x : float
            Any double, infinities included.

        Returns
        -------
        float
        """
        if math.isnan(x):
            raise ValueError("x must be a number")
        edges = (-math.inf, *self.breakpoints)
        index = bisect_right(self.breakpoints, x)
        with ctx.workprec(_BITS):
            within = self._densities[index] * (_base_cdf(x) - _base_cdf(edges[index]))
            return float(self._below[index] + within)


def stage_law(
    values: npt.ArrayLike, *, stage_epsilon: float, exponent: float = 0.5, atom: float = ATOM
) -> StageLaw:
    """Exact law of one private median (Theorem 2), for tests of its sampler.

    Parameters
    ----------
    values : array-like of shape (m,)
        The sample.
    stage_epsilon, exponent, atom : float
        As in `stage_loss`.

    Returns
    -------
    StageLaw

    Examples
    --------
    >>> law = stage_law([-1.0, 1.0], stage_epsilon=2.0)
    >>> law.breakpoints
    (-1.0, 0.0, 1.0)
    >>> law.cdf(0.0) - law.atom / 2
    0.5
    """
    sample = _check_values(values)
    _check_positive(stage_epsilon=stage_epsilon, exponent=exponent)
    _check_atom(atom)
    pieces = _pieces(sample, atom=atom)
    breakpoints = tuple(high for _, high in pieces[bool(atom) : -1])

    def attempt() -> StageLaw | None:
        rate = arb(stage_epsilon) * arb(exponent)
        (terms,) = _stage_terms(pieces, [sample], rate, atom)
        if not _accurate(*terms):
            return None
        at_zero, intervals = (terms[0], terms[1:]) if atom else (arb(0), terms)
        masses = _base_masses(pieces[bool(atom) :], 0.0)
        return StageLaw(
            breakpoints,
            tuple(map(float, intervals)),
            float(at_zero),
            _cumulative(breakpoints, intervals, at_zero),
            [p / mass for p, mass in zip(intervals, masses, strict=True)],
        )

    return _escalate(attempt)


def _cumulative(breakpoints: Sequence[float], intervals: list[arb], at_zero: arb) -> list[arb]:
    """P[Y <= left end] of every interval."""
    steps = [
        p + (at_zero if end == 0 else 0) for p, end in zip(intervals, breakpoints, strict=False)
    ]
    return list(accumulate(steps, initial=arb(0)))
