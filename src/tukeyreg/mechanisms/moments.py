"""``moments``: private scale first, then noisy moments (docs/method.md, section 6).

Every column's location is a private median and its scale comes from a noisy histogram of
magnitudes. With these public, rows have a bounded norm, and regression needs nothing but noisy
sums: two Gram matrices, by which rows are whitened, and a few rounds of noisy gradients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tukeyreg.mechanisms.randomness import Floats, Integers, Randomness
from tukeyreg.mechanisms.sequential import LARGEST, PrivateMedian
from tukeyreg.summaries.rows import HIGHEST, LOWEST, REACH, RowMap, profile

__all__ = [
    "LEVELS",
    "Model",
    "MomentsParameters",
    "Pilot",
    "Rows",
    "profile",
    "release",
    "scale_of_profile",
    "target_weight",
]

#: Smallest scale: what divides by it may overflow, and is bounded then.
SMALLEST = float(np.finfo(np.float64).smallest_subnormal)

#: Noisy Gram matrices: the first whitens the rows, the second is that of the rounds.
LEVELS = 2
#: A vote for a location is the interval of numbers that agree with it to 36 bits.
VOTE_WIDTH = 2.0**-36
#: Standard deviations of the noise above which a cell beside seen ones is seen, too.
SEEN_BESIDE = 2.0


def _heights(false: float) -> Floats:
    """How far above the noise a cell must rise so that noise alone is rarely taken for a column.

    Less is asked where magnitudes are likelier: near 1, as of indicators. The probability that
    any cell of noise rises so high is at most half of ``false``.
    """
    likelier = (1.0 + np.abs(np.arange(LOWEST, HIGHEST) - 1.0)) ** -1.5
    return np.asarray(np.sqrt(-2 * np.log(false * likelier / np.sum(likelier))))


#: For the first cells of a feature, which do little harm if they are noise; and for the target,
#: and for more cells of a feature, where noise would hide what is there.
HEIGHTS, SURE_HEIGHTS = _heights(0.05), _heights(1e-4)
#: Share of a unit square's mean in [1/2, 1): of x**2 over an octave.
_OCTAVE_MEAN_SQUARE = 7 / 12
#: Norms are counted in quarter octaves from sqrt(d) / 4 to 4 sqrt(d).
_NORM_CELLS = 16
#: Eigenvalues are raised by this multiple of sigma sqrt(d), and to this share of their mean.
_RIDGE, _LEAST_EIGENVALUE = 0.9, 0.02
#: Residuals of a smaller scale, in units of the target's, are none.
_NO_RESIDUALS = 2.0**-200
#: A later round is preferred unless its residuals are that much larger than the smallest.
_TOLERANCE = 2.0


@dataclass(frozen=True)
class MomentsParameters:
    """The numbers that fix ``moments``: what each step may spend, and public choices.

    Attributes
    ----------
    location_epsilon : float
        Of each private median.
    profile_rho, norm_rho, gram_rho, residual_rho : float
        Of the histogram of magnitudes of all columns, of each of two histograms of norms, of
        each of two Gram matrices, and of each histogram of residuals.
    round_rho : tuple of float
        Of each gradient.
    clips : tuple of float
        The bound of residuals in every round, as a multiple of their scale.
    norm_share : float
        The share of rows that are not to be shrunk.
    pilot : int
        One in so many units takes part in all steps but the last gradient.
    voters : int
        One in so many units of the pilot votes for the locations.
    replace : bool
        Whether a neighbour has a unit replaced rather than added or removed.
    """

    location_epsilon: float
    profile_rho: float
    norm_rho: float
    gram_rho: float
    residual_rho: float
    round_rho: tuple[float, ...]
    clips: tuple[float, ...]
    norm_share: float
    pilot: int
    voters: int
    replace: bool

    @property
    def gaussian_rho(self) -> float:
        """What all the Gaussian steps add up to."""
        return (
            self.profile_rho
            + LEVELS * (self.norm_rho + self.gram_rho)
            + (len(self.round_rho) + 1) * self.residual_rho
            + math.fsum(self.round_rho)
        )


@dataclass(frozen=True)
class Model:
    """What is released: a linear model inside of ranges.

    Attributes
    ----------
    coefficients : array (p,)
    intercept : float
    ranges : array (p, 2) or None
        Between which values of a feature the model is linear; beyond them it is constant. All
        values where a feature's scale did not rise above the noise: its coefficient is 0.
        ``None`` for a model that is linear everywhere.
    """

    coefficients: Floats
    intercept: float
    ranges: Floats | None


class Pilot(Protocol):
    """What is asked of a random part of the units: votes, counts and exact sums, never rows.

    Attributes and methods are those of :class:`tukeyreg.summaries.rows.PilotRows`.
    """

    def votes(self, j: int) -> Floats: ...  # noqa: D102
    def profiles(self, location: Floats) -> Integers: ...  # noqa: D102
    def of_features(self, chosen: NDArray[np.bool_]) -> Pilot: ...  # noqa: D102
    def norm_counts(self, map: RowMap, edges: Floats) -> Integers: ...  # noqa: D102
    def gram(self, map: RowMap) -> Integers: ...  # noqa: D102
    def residual_counts(self, map: RowMap, coefficients: Floats) -> Integers: ...  # noqa: D102
    def gradient(self, map: RowMap, coefficients: Floats, bound: float) -> Integers: ...  # noqa: D102


class Rows(Protocol):
    """What is asked of all rows, wherever they are; see :mod:`tukeyreg.engines`."""

    @property
    def n_features(self) -> int:
        """p, the number of features."""
        ...

    def pilot(self, share: int, voters: int, coins: Randomness) -> Pilot:
        """A random part of the units: one in so many of them, and of these one in so many votes."""
        ...

    def gradient(
        self, chosen: NDArray[np.bool_], map: RowMap, coefficients: Floats, bound: float
    ) -> Integers:
        """The sum of all integer rows times residuals, with the chosen features."""
        ...


def release(
    rows: Rows,
    intercept: bool,
    parameters: MomentsParameters,
    randomness: Randomness,
    *,
    median: type[PrivateMedian] = PrivateMedian,
) -> Model | None:
    """A model by noisy moments, or ``None`` when the verdict refuses.

    ``median`` is the law of a location; another one is for ``tukeyreg.privacy.replay``.

    Notes
    -----
    Formal guarantee (Theorem 4): under the chosen neighbours, one private median for every
    column, each of them location_epsilon-DP and location_epsilon-bounded-range, and Gaussian
    mechanisms that together have the sensitivity of ``gaussian_rho``. What they add up to is
    the business of ``tukeyreg.privacy``.
    """
    return _Fit(rows, intercept, parameters, randomness, median).run()


class _Fit:
    def __init__(
        self,
        rows: Rows,
        intercept: bool,
        parameters: MomentsParameters,
        randomness: Randomness,
        median: type[PrivateMedian] = PrivateMedian,
    ) -> None:
        self._rows, self._intercept = rows, intercept
        self._parameters, self._randomness = parameters, randomness
        self._median = median
        self._pilot = rows.pilot(parameters.pilot, parameters.voters, randomness)
        #: One replaced unit takes one vector from a sum and gives another.
        self._wider = math.sqrt(2) if parameters.replace else 1.0

    def run(self) -> Model | None:
        location = self._locations()
        scale = self._scales(location)
        seen = np.isfinite(scale[:-1])
        if scale[-1] == math.inf or not seen.any():
            return None
        # What is not seen takes no part: its noise would only be in the way.
        self._pilot = self._pilot.of_features(seen)
        map = RowMap(
            location[:-1][seen], scale[:-1][seen], location[-1], scale[-1], self._intercept
        )
        map, inverse = self._whiten(map)
        model = self._descend(map, inverse, seen)
        return None if model is None else _in_raw_units(map, model, seen)

    # --- scale ------------------------------------------------------------------------------

    def _locations(self) -> Floats:
        """The private median of every feature and of the target; 0 without an intercept."""
        p = self._rows.n_features
        if not self._intercept:
            return np.zeros(p + 1)
        # Lemma 4: where votes are only added or removed the factor 1/2 of the exponent goes away.
        epsilon = self._parameters.location_epsilon * (1 if self._parameters.replace else 2)
        return np.array(
            [
                self._median(self._pilot.votes(j), epsilon, VOTE_WIDTH).sample(self._randomness)
                for j in range(p + 1)
            ]
        )

    def _scales(self, location: Floats) -> Floats:
        """The root mean square of every column about its location; infinite where not seen."""
        counts = self._pilot.profiles(location)
        p = len(counts) - 1
        weight = target_weight(p)
        sigma = self._sigma(math.sqrt(p + weight**2), self._parameters.profile_rho)
        noisy = self._randomness.gaussian(counts[:-1], sigma)
        found = [scale_of_profile(row, sigma) for row in noisy]
        # A feature that is nothing but noise does little harm; a target would make up the model.
        sigma /= weight
        noisy = self._randomness.gaussian(counts[-1], sigma)
        found.append(scale_of_profile(noisy, sigma, SURE_HEIGHTS))
        scales = np.array([scale or math.inf for scale in found])
        # What varies less than a location is known to is a constant.
        scales[scales <= 2 * VOTE_WIDTH * np.abs(location)] = math.inf
        return scales

    # --- whitening --------------------------------------------------------------------------

    def _whiten(self, map: RowMap) -> tuple[RowMap, Floats]:
        """Rows in coordinates that are nearly uncorrelated, and the inverse of their Gram matrix.

        The first noisy Gram matrix whitens. The second is that of the very rows and weights that
        the rounds use, so that every round goes all the way.
        """
        for level in range(LEVELS):
            map = self._shrink(map)
            sigma = self._sigma(map.radius**2, self._parameters.gram_rho)
            denoised = _Denoised.of(self._noisy_gram(map, sigma), sigma)
            if level < LEVELS - 1:
                map = map.whitened(denoised.inverse_root() @ map.matrix())
        return map, denoised.inverse()

    def _shrink(self, map: RowMap) -> RowMap:
        """The norm that most rows do not exceed, from a noisy histogram, as the radius."""
        unit = math.sqrt(map.width)
        edges = unit * 2.0 ** ((np.arange(1, _NORM_CELLS) - _NORM_CELLS // 2) / 4)
        counts = self._pilot.norm_counts(map, edges)
        sigma = self._sigma(1.0, self._parameters.norm_rho)
        below = np.cumsum(self._randomness.gaussian(counts, sigma))
        at = int(np.argmax(below >= self._parameters.norm_share * below[-1]))
        return replace(map, radius=unit * 2.0 ** ((at + 1 - _NORM_CELLS // 2) / 4))

    def _noisy_gram(self, map: RowMap, sigma: float) -> Floats:
        """A symmetric Gram matrix with noise sigma on and sigma / sqrt(2) off the diagonal.

        Off the diagonal an entry stands for two, so that the noise is as if the whole matrix
        were one vector, whose norm is at most radius**2 (Lemma 5).
        """
        sums, step = self._pilot.gram(map), map.gram_step
        d = len(sums)
        above = np.triu_indices(d, 1)
        gram = np.zeros((d, d))
        gram[above] = self._randomness.gaussian(sums[above], sigma / math.sqrt(2) / step) * step
        gram += gram.T
        diagonal = np.ascontiguousarray(np.diagonal(sums))
        gram[np.diag_indices(d)] = self._randomness.gaussian(diagonal, sigma / step) * step
        return gram

    # --- rounds -----------------------------------------------------------------------------

    def _descend(self, map: RowMap, inverse: Floats, seen: NDArray[np.bool_]) -> Floats | None:
        """Coefficients after the rounds, or ``None`` if the rounds made residuals larger."""
        model = np.zeros(map.width)
        scale, passed = 1.0, []
        last = len(self._parameters.clips) - 1
        for k, clip in enumerate(self._parameters.clips):
            found = self._residual_scale(map, model)
            scale = scale if found is None else min(found, 3.0)
            passed.append((scale, model))
            if scale < _NO_RESIDUALS:
                break
            whole = k == last and self._parameters.pilot > 1
            bound = clip * scale
            if whole:
                sums = self._rows.gradient(seen, map, model, bound)
            else:
                sums = self._pilot.gradient(map, model, bound)
            share = 1 / self._parameters.pilot if whole else 1.0
            model = model + inverse @ self._noisy_gradient(sums, map, bound, k) * share
        found = self._residual_scale(map, model)
        passed.append((math.inf if found is None else found, model))
        smallest = min(size for size, _ in passed)
        kept = max(k for k, (size, _) in enumerate(passed) if size <= _TOLERANCE * smallest)
        return passed[kept][1] if kept else None

    def _residual_scale(self, map: RowMap, model: Floats) -> float | None:
        counts = self._pilot.residual_counts(map, model)
        sigma = self._sigma(1.0, self._parameters.residual_rho)
        return scale_of_profile(self._randomness.gaussian(counts, sigma), sigma)

    def _noisy_gradient(self, sums: Integers, map: RowMap, bound: float, k: int) -> Floats:
        # Replaced units can pull in opposite directions.
        wider = 2.0 if self._parameters.replace else 1.0
        # In steps, of which a unit is worth so many whatever the bound: a bound so small that the
        # value of a step is rounded must not round the noise.
        sigma = wider * map.gradient_worth / math.sqrt(2 * self._parameters.round_rho[k])
        noisy = self._randomness.gaussian(sums, sigma)
        return np.asarray(noisy * map.gradient_step(bound))

    # --- noise ------------------------------------------------------------------------------

    def _sigma(self, sensitivity: float, rho: float) -> float:
        return self._wider * sensitivity / math.sqrt(2 * rho)


def target_weight(p: int) -> float:
    """By how much less noise the target's histogram gets than those of p features.

    It counts as so many features in the norm of the whole, so this costs them a ninth at most.
    """
    return max(1.0, math.sqrt(p) / 2)


def scale_of_profile(noisy: Floats, sigma: float, heights: Floats = HEIGHTS) -> float | None:
    """The root mean square from a noisy profile, or ``None`` where nothing rises above the noise.

    The octave is seen, or the two or three side by side, that rise highest above what noise
    would; and every other that no noise would explain; and then the neighbours of what is seen,
    as long as each is likely more than noise.

    Examples
    --------
    >>> counts = profile(np.linspace(0.01, 1, 10_000))  # the mean square is a third
    >>> round(scale_of_profile(counts.astype(float), 10.0), 2)
    0.58
    >>> scale_of_profile(np.zeros(2100), 10.0) is None
    True
    """
    zeros, cells = float(noisy[0]), noisy[1:]
    height, first, last = max(_highest(cells / sigma, span, heights) for span in (1, 2, 3))
    if height < 0:
        return 0.0 if zeros > float(np.min(SURE_HEIGHTS)) * sigma else None
    seen = cells > SURE_HEIGHTS * sigma
    seen[first : last + 1] = True
    seen = _with_neighbours(seen, cells > SEEN_BESIDE * sigma)
    found = np.where(seen, np.maximum(cells, 0.0), 0.0)
    top = int(np.flatnonzero(seen)[-1])
    shares = np.ldexp(found, 2 * np.minimum(np.arange(len(cells)) - top, 0))
    mean = float(np.sum(shares)) * _OCTAVE_MEAN_SQUARE / (float(np.sum(found)) + max(zeros, 0.0))
    exponent = min(top + LOWEST, HIGHEST - 2)
    return max(SMALLEST, min(math.ldexp(math.sqrt(mean), exponent), float(LARGEST)))


def _with_neighbours(seen: NDArray[np.bool_], likely: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """What is seen, and every unbroken run of what is likely that begins beside it."""
    runs = np.cumsum(~likely)  # constant along a run of likely cells, and one cell before it
    near = seen.copy()
    near[1:] |= seen[:-1]
    near[:-1] |= seen[1:]
    return np.asarray(seen | (likely & np.isin(runs, runs[near & likely])))


def _highest(cells: Floats, span: int, heights: Floats) -> tuple[float, int, int]:
    """Of all runs of so many cells the one highest above what noise reaches, and where it is."""
    sums = np.convolve(cells, np.ones(span), "valid") / math.sqrt(span)
    middle = (span - 1) // 2
    above = sums - heights[middle : middle + len(sums)]
    at = int(np.argmax(above))
    return float(above[at]), at, at + span - 1


@dataclass(frozen=True)
class _Denoised:
    """A noisy Gram matrix, with what is known of its noise taken out, by its eigenvectors.

    Off its mean eigenvalue the matrix is shrunk as far as noise explains it (James and Stein);
    the ridge is about the norm of the noise that is left.
    """

    values: Floats
    vectors: Floats
    mean: float
    ridge: float

    @classmethod
    def of(cls, gram: Floats, sigma: float) -> _Denoised:
        d = len(gram)
        mean = max(float(np.trace(gram)) / d, sigma)
        spread = gram - mean * np.eye(d)
        energy = float(np.sum(spread**2))
        kept = max(0.0, 1 - sigma**2 * d * (d + 1) / 2 / energy) if energy > 0 else 0.0
        values, vectors = np.linalg.eigh(mean * np.eye(d) + kept * spread)
        return cls(values, vectors, mean, _RIDGE * sigma * math.sqrt(d) * kept)

    def _raised(self) -> Floats:
        least = max(self.ridge / 2, _LEAST_EIGENVALUE * self.mean)
        return np.maximum(self.values + self.ridge, least)

    def inverse_root(self) -> Floats:
        """What makes the matrix nearly a multiple of the identity."""
        return np.asarray((self.vectors / np.sqrt(self._raised() / self.mean)) @ self.vectors.T)

    def inverse(self) -> Floats:
        """The inverse, zero in directions in which there is hardly more than noise."""
        left = np.where(self.values < self.ridge / 2, 0.0, 1 / self._raised())
        return np.asarray((self.vectors * left) @ self.vectors.T)


def _in_raw_units(map: RowMap, model: Floats, seen: NDArray[np.bool_]) -> Model:
    standard = map.matrix().T @ model
    first = int(map.intercept)
    coefficients, ranges = np.zeros(len(seen)), np.tile([-math.inf, math.inf], (len(seen), 1))
    with np.errstate(all="ignore"):
        slopes = np.nan_to_num(standard[first:] * (map.target_scale / map.scale))
        centre = float(standard[0]) * map.target_scale + map.target_location if first else 0.0
        intercept = float(np.nan_to_num(centre - float(slopes @ map.location)))
        half = REACH * map.scale
        ends = np.column_stack([map.location - half, map.location + half])
        ranges[seen] = np.clip(ends, -LARGEST, LARGEST)
    coefficients[seen] = slopes
    return Model(coefficients, intercept, ranges)
