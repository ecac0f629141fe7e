"""Any set of model vectors, with or without curvature, to one released vector or none."""

from __future__ import annotations

import numpy as np

from tukeyreg.mechanisms import joint, sequential
from tukeyreg.mechanisms.joint import JointParameters
from tukeyreg.mechanisms.randomness import Floats, Randomness
from tukeyreg.mechanisms.sequential import SequentialParameters
from tukeyreg.summaries.groups import GroupSummaries

__all__ = ["release_vector", "summaries_of_models"]


def release_vector(
    summaries: GroupSummaries,
    parameters: SequentialParameters | JointParameters,
    randomness: Randomness,
) -> Floats | None:
    """Carry out the mechanism that the parameters belong to; ``None`` is a refusal."""
    if isinstance(parameters, JointParameters):
        return joint.release(summaries.models(), parameters, randomness)
    return sequential.release(summaries.factors, summaries.targets, parameters, randomness)


def summaries_of_models(models: Floats, curvature: Floats | None) -> GroupSummaries:
    """Summaries of models trained elsewhere (docs/method.md, section 9).

    With curvature H_i the factor is the triangle of H_i = R_i' R_i, without it the identity.
    """
    m, d = models.shape
    if curvature is None:
        return GroupSummaries(np.broadcast_to(np.eye(d), (m, d, d)), models)
    factors = _triangles(curvature)
    with np.errstate(over="ignore", invalid="ignore"):
        targets = np.zeros_like(models)
        for j in range(d):  # elementwise, so that a model's target is a function of it alone
            targets += factors[:, :, j] * models[:, j, None]
    return GroupSummaries(factors, targets)


def _triangles(curvature: Floats) -> Floats:
    """Upper triangles R with R' R = H for symmetric positive semi-definite matrices.

    Elementwise over the models; a pivot that is not positive becomes a zero row.
    """
    left = np.array(curvature)
    d = left.shape[1]
    diagonal = np.abs(np.einsum("mjj->mj", curvature))
    factors = np.zeros_like(left)
    with np.errstate(all="ignore"):
        for j in range(d):
            pivot = left[:, j, j]
            sound = pivot > 1e-12 * diagonal[:, j]
            row = left[:, j, j:] / np.sqrt(np.where(sound, pivot, 1.0))[:, None]
            factors[:, j, j:] = np.where(sound[:, None], row, 0.0)
            left[:, j:, j:] -= factors[:, j, j:, None] * factors[:, j, None, j:]
    return factors
