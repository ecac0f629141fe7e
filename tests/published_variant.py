"""The published form of the mechanism, as laws that the verifier can convict.

Three things differ from the library's `joint`: the density is exp(eps u) with replaced models, the
safety condition is the paper's own, and the noise of the test is Laplace noise of scale eps/2.
Here `half_epsilon` is the half of the budget that the test and the selection get each.
"""

import math

import numpy as np

from tukeyreg.privacy.verify import Divergence, selection_divergence


def log_volumes(models):
    """log V_p for p = 0, ..., ceil(m/2), with V_0 infinite; entry p is for depth p."""
    ordered = np.sort(np.asarray(models, dtype=float), axis=0)
    m = len(ordered)
    top = (m + 1) // 2
    with np.errstate(divide="ignore"):
        inner = np.log(ordered[::-1][:top] - ordered[:top]).sum(axis=1)
    return np.concatenate([[math.inf], inner])


def distance(models, *, half_epsilon, delta, restriction_depth):
    """Largest k in 0..t-1 that passes the paper's condition for some g >= 1, or -1."""
    volumes = log_volumes(models)
    t, last = restriction_depth, len(volumes) - 1
    bound = math.log(delta / 8) - half_epsilon
    for k in reversed(range(t)):
        g = np.arange(1, last - t - k)
        ratios = volumes[t - k - 1] - volumes[t + k + 1 + g] - half_epsilon * g / 2
        if np.any(ratios <= bound):
            return k
    return -1


def threshold(*, half_epsilon, delta):
    return math.log(1 / (2 * delta)) / half_epsilon


def pass_probability(k, *, half_epsilon, delta, scale):
    """P[k + Lap(scale) >= threshold]."""
    gap = threshold(half_epsilon=half_epsilon, delta=delta) - k
    tail = math.exp(-abs(gap) / scale) / 2
    return tail if gap >= 0 else 1 - tail


def divergence(models, neighbour, *, half_epsilon, delta, restriction_depth, scale) -> Divergence:
    """Divergence of the whole published mechanism at the budget that it claims."""
    bits = tuple(
        pass_probability(
            distance(
                side, half_epsilon=half_epsilon, delta=delta, restriction_depth=restriction_depth
            ),
            half_epsilon=half_epsilon,
            delta=delta,
            scale=scale,
        )
        for side in (models, neighbour)
    )
    return selection_divergence(
        models,
        neighbour,
        epsilon=2 * half_epsilon,
        selection_epsilon=half_epsilon,
        restriction_depth=restriction_depth,
        exponent=1.0,
        pass_probabilities=bits,
    )
