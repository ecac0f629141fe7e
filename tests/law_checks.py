"""Does a sample follow a law? Bounds on the probability of a discrepancy as large as the seen one.

Every check that uses these rejects at P_LIMIT, so a correct sampler fails it with probability at
most 1e-6; seeds are fixed, so it passes always or never.
"""

import math

import numpy as np
from scipy import stats

P_LIMIT = 1e-6
LEAST_EXPECTED = 10


def chi_square_p(counts, probabilities):
    """P-value of the counts of all cells; small cells are merged with their neighbours."""
    counts = np.asarray(counts, dtype=float)
    expected = np.asarray(probabilities, dtype=float) * counts.sum()
    assert math.isclose(expected.sum(), counts.sum(), rel_tol=1e-6)
    if np.any(counts[expected == 0] > 0):
        return 0.0
    merged = [[0.0, 0.0]]
    for count, mean in zip(counts, expected, strict=True):
        if merged[-1][1] >= LEAST_EXPECTED:
            merged.append([0.0, 0.0])
        merged[-1][0] += count
        merged[-1][1] += mean
    if len(merged) > 1 and merged[-1][1] < LEAST_EXPECTED:
        last = merged.pop()
        merged[-1][0] += last[0]
        merged[-1][1] += last[1]
    seen, mean = np.array(merged).T
    if len(seen) == 1:
        return 1.0
    return float(stats.chi2.sf(((seen - mean) ** 2 / mean).sum(), len(seen) - 1))


def integers_p(sample, mass, reach):
    """P-value of integers against P[z] = mass(z), the values beyond +-reach taken together."""
    values = np.arange(-reach, reach + 1)
    probabilities = np.array([mass(z) for z in values.tolist()])
    counts = [np.count_nonzero(np.asarray(sample) == z) for z in values]
    rest = max(0.0, 1 - probabilities.sum())
    return chi_square_p([*counts, len(sample) - sum(counts)], [*probabilities, rest])


def intervals_p(sample, cdf, edges):
    """P-value of the counts of ]edge, next edge], both tails included."""
    edges = np.unique(edges)
    counts = np.bincount(np.searchsorted(edges, sample, side="left"), minlength=len(edges) + 1)
    below = np.array([0.0, *(cdf(float(edge)) for edge in edges), 1.0])
    return chi_square_p(counts, np.diff(below))


def distance_p(sample, cdf):
    """Bound of Dvoretzky, Kiefer, Wolfowitz and Massart, for laws with atoms too."""
    ordered = np.sort(sample)
    places, last = np.unique(ordered, return_index=True)
    up_to = np.append(last[1:], len(ordered)) / len(ordered)
    at = np.array([cdf(float(x)) for x in places])
    left = np.array([cdf(math.nextafter(float(x), -math.inf)) for x in places])
    largest = max(np.abs(up_to - at).max(), np.abs(last / len(ordered) - left).max())
    return min(1.0, 2 * math.exp(-2 * len(ordered) * largest**2))


def share_p(successes, trials, probability):
    """Two-sided exact binomial p-value."""
    return float(stats.binomtest(int(successes), int(trials), probability).pvalue)
