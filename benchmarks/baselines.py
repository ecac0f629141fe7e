"""Rivals for the benchmarks. They are for comparison: their noise is not secure randomness."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest mu for which mu-GDP implies (epsilon, delta)-DP (Dong, Roth and Su 2022)."""

    def excess(mu: float) -> float:
        first = norm.cdf(-epsilon / mu + mu / 2)
        return first - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2) - delta

    return brentq(excess, 1e-4, 50.0)


class BoostedAdaSSP:
    """Tang et al. (2023), Algorithm 1: unit norms, residuals within 1, a third of the budget each.

    ``standardise`` gives it the true mean and standard deviation of every column, features and
    target, which no private method has, and shrinks features by sqrt(d). Without it, it gets
    rows as they are, cut to norm 1, which is how it is published for public bounds.
    """

    def __init__(self, epsilon, delta, *, standardise, rounds=100, seed=0):
        self.mu = gaussian_mu(epsilon, delta) / math.sqrt(3)
        self.standardise, self.rounds = standardise, rounds
        self.rng = np.random.default_rng(seed)

    def fit(self, X, y):
        """Coefficients by boosting."""
        rng, mu = self.rng, self.mu
        self.centre = np.append(X.mean(axis=0), y.mean()) * self.standardise
        scale = np.append(X.std(axis=0), y.std())
        self.scale = np.where(scale > 0, scale, 1.0) if self.standardise else np.ones(len(scale))
        rows = self._rows(X)
        target = (y - self.centre[-1]) / self.scale[-1]
        d = rows.shape[1]
        gram = rows.T @ rows
        noise = np.triu(rng.normal(size=(d, d)) / mu)
        least = max(0.0, np.linalg.eigvalsh(gram)[0]) + rng.normal() / mu
        bound = math.sqrt(d * math.log(2 * d**2 / 0.05)) / mu
        ridge = max(0.0, bound - max(0.0, least - math.sqrt(math.log(6 / 0.05)) / mu))
        left = np.linalg.pinv(gram + noise + np.triu(noise, 1).T + ridge * np.eye(d))
        self.model = np.zeros(d)
        for _ in range(self.rounds):
            rest = np.clip(target - rows @ self.model, -1, 1)
            noisy = rows.T @ rest + rng.normal(size=d) * math.sqrt(self.rounds) / mu
            self.model = self.model + left @ noisy
        return self

    def predict(self, X):
        """Predictions in the units of the target."""
        return self._rows(X) @ self.model * self.scale[-1] + self.centre[-1]

    def _rows(self, X):
        rows = np.column_stack([(X - self.centre[:-1]) / self.scale[:-1], np.ones(len(X))])
        if self.standardise:
            rows = rows / math.sqrt(rows.shape[1])
        return rows * np.minimum(1, 1 / np.linalg.norm(rows, axis=1))[:, None]
