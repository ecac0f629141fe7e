"""Neighbouring sets of models: random ones, and ones that a search makes as bad as it can."""

import math
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st


@dataclass(frozen=True)
class Case:
    models: np.ndarray
    neighbour: np.ndarray
    test_epsilon: float
    selection_epsilon: float
    delta: float
    restriction_depth: int

    @property
    def epsilon(self):
        return self.test_epsilon + self.selection_epsilon

    @property
    def safety(self):
        return {
            "selection_epsilon": self.selection_epsilon,
            "delta": self.delta,
            "restriction_depth": self.restriction_depth,
        }


def split(rng, m, d):
    """Two tight clusters: nearly all volume is deep, so the safety test can pass."""
    sides = np.where(np.arange(m) % 2, 1.0, -1.0)[:, None]
    return sides * (1 + 10.0 ** -rng.uniform(0.5, 6) * rng.random((m, d)))


def geometric(rng, m, d):
    steps = np.exp(-rng.uniform(0.01, 1) * (np.arange(m) // 2))
    return (np.where(np.arange(m) % 2, rng.uniform(0.5, 4), -1.0) * steps)[:, None].repeat(d, 1)


def gaussian(rng, m, d):
    return rng.standard_normal((m, d))


def ties(rng, m, d):
    return rng.integers(-2, 3, (m, d)).astype(float)


def wild(rng, m, d):
    return rng.choice([-1.0, 0.0, 1.0], (m, d)) * 10.0 ** rng.uniform(-323, 308, (m, d))


LAYOUTS = (split, geometric, gaussian, ties, wild)
SCALES = (1.0, 1e-9, 1e7, 1e-305, 1e300)


def _replacement(draw, column):
    """Where the coordinate of the replaced model goes."""
    low, high = column.min(), column.max()
    return draw(
        st.sampled_from(
            [
                np.median(column),
                low,
                high,
                np.nextafter(high, math.inf),
                np.clip(low - abs(low), -1e308, 1e308),
                np.clip(3 * high, -1e308, 1e308),
                1e308,
                0.0,
                column[0],
            ]
        )
    )


@st.composite
def neighbours(draw, min_models=5, max_models=40, max_dimension=3, layouts=LAYOUTS):
    m, d = draw(st.integers(min_models, max_models)), draw(st.integers(1, max_dimension))
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    layout, scale = draw(st.sampled_from(layouts)), draw(st.sampled_from(SCALES))
    with np.errstate(over="ignore"):
        models = np.clip(scale * layout(rng, m, d), -1e308, 1e308)
        models = np.array([rng.permutation(column) for column in models.T]).T
        neighbour = models.copy()
        neighbour[draw(st.integers(0, m - 1))] = [_replacement(draw, c) for c in models.T]
    return models, neighbour


def _logarithmic(low, high):
    return st.floats(math.log(low), math.log(high)).map(math.exp)


@st.composite
def any_cases(draw, **sizes):
    models, neighbour = draw(neighbours(**sizes))
    return Case(
        models,
        neighbour,
        test_epsilon=draw(_logarithmic(0.1, 5)),
        selection_epsilon=draw(_logarithmic(0.1, 5)),
        delta=draw(_logarithmic(1e-9, 0.2)),
        restriction_depth=draw(st.integers(1, (len(models) + 1) // 2)),
    )


@st.composite
def hopeful_cases(draw, max_models=40):
    """Cases that the safety test has a fair chance to accept."""
    models, neighbour = draw(neighbours(min_models=12, max_models=max_models, layouts=(split,)))
    return Case(
        models,
        neighbour,
        test_epsilon=draw(_logarithmic(0.5, 5)),
        selection_epsilon=draw(_logarithmic(2, 5)),
        delta=draw(_logarithmic(1e-3, 0.2)),
        restriction_depth=draw(st.integers(2, len(models) // 4)),
    )


def cases(max_models=40):
    return st.one_of(any_cases(max_models=max_models), hopeful_cases(max_models=max_models))


def _mutate(rng, models, replacement):
    """One random move: of one coordinate, of a coordinate of the replaced model, or of all."""
    models, replacement = models.copy(), replacement.copy()
    i, j = rng.integers(models.shape[0]), rng.integers(models.shape[1])
    target, key = (replacement, j) if rng.random() < 0.3 else (models, (i, j))
    move = rng.integers(4)
    if move == 0:
        target[key] *= math.exp(rng.normal() * 10.0 ** rng.uniform(-3, 0.5))
    elif move == 1:
        target[key] = models[rng.integers(len(models)), j] + rng.normal() * 10 ** rng.uniform(-9, 0)
    elif move == 2:
        target[key] = -target[key]
    else:
        models[:, j] = np.sign(models[:, j]) * abs(models[:, j]) ** math.exp(0.2 * rng.normal())
    return np.clip(models, -1e12, 1e12), np.clip(replacement, -1e12, 1e12)


def climb(objective, models, *, seed, steps, enough=math.inf):
    """Largest objective(models, neighbour) found by hill climbing; the first row is replaced."""
    rng = np.random.default_rng(seed)
    replacement = models[rng.integers(len(models))] * 1.5

    def score(models, replacement):
        return objective(models, np.vstack([replacement[None], models[1:]]))

    best = score(models, replacement)
    for _ in range(steps):
        if best > enough:
            break
        candidate = _mutate(rng, models, replacement)
        value = score(*candidate)
        if value >= best:
            best, (models, replacement) = value, candidate
    return best
