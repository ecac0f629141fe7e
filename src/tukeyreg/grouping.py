"""Unit -> group: one unit moves one model (docs/method.md, section 2)."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

from tukeyreg.mechanisms.randomness import Integers, Randomness

__all__ = ["even_partition", "keyed_groups"]


def keyed_groups(keys: list[bytes], n_groups: int, key: bytes) -> Integers:
    """The group of every unit by a keyed hash of its identifier.

    The group of one unit does not depend on which other units exist, which is what add-remove
    neighbours need: with an even partition, removing one unit could move a second one.

    Examples
    --------
    >>> both = keyed_groups([b"ann", b"bob"], 100, b"key")
    >>> bool(both[1] == keyed_groups([b"bob"], 100, b"key")[0])
    True
    """
    return np.fromiter(
        (
            int.from_bytes(hashlib.blake2b(unit, key=key, digest_size=16).digest(), "big")
            % n_groups
            for unit in keys
        ),
        dtype=np.int64,
        count=len(keys),
    )


def even_partition(n_units: int, n_groups: int, randomness: Randomness) -> Integers:
    """A random partition into groups whose sizes differ by at most one (replace-one).

    Examples
    --------
    >>> np.bincount(even_partition(10, 4, Randomness(seed=0))).tolist()
    [3, 3, 2, 2]
    """
    groups: NDArray[np.int64] = np.empty(n_units, dtype=np.int64)
    groups[randomness.permutation(n_units)] = np.arange(n_units) % n_groups
    return groups
