"""Unit -> group: one unit moves one model (docs/method.md, section 2)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tukeyreg.mechanisms.randomness import Draws, Randomness
from tukeyreg.units import Units

__all__ = ["even_partition", "keyed_groups"]

Groups = NDArray[np.int32]


def keyed_groups(units: Units, n_groups: int, draws: Draws) -> Groups:
    """The group of every unit by a keyed hash of its identifier.

    The group of one unit does not depend on which other units exist, which is what add-remove
    neighbours need: with an even partition, removing one unit could move a second one.

    Examples
    --------
    >>> both = Units(np.array([0, 1]), [b"sann", b"sbob"])
    >>> bob = Units(np.array([0]), [b"sbob"])
    >>> draws = Randomness(seed=0).draws()
    >>> bool(keyed_groups(both, 100, draws)[1] == keyed_groups(bob, 100, draws)[0])
    True
    """
    if isinstance(units.names, np.ndarray):
        return draws.of_integers(n_groups, units.names)
    return draws.of_texts(n_groups, units.names)


def even_partition(n_units: int, n_groups: int, randomness: Randomness) -> Groups:
    """A random partition into groups whose sizes differ by at most one (replace-one).

    Examples
    --------
    >>> np.bincount(even_partition(10, 4, Randomness(seed=0))).tolist()
    [3, 3, 2, 2]
    """
    groups: Groups = np.empty(n_units, dtype=np.int32)
    groups[randomness.permutation(n_units)] = np.arange(n_units, dtype=np.int32) % n_groups
    return groups
