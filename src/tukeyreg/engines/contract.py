"""What every engine can do, and the draws that all of them make alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tukeyreg.grouping import keyed_groups
from tukeyreg.intake import Schema, TrainingRows
from tukeyreg.mechanisms.moments import Rows
from tukeyreg.mechanisms.randomness import Draws, Randomness
from tukeyreg.summaries.groups import GroupSummaries

__all__ = ["Engine", "UnitDraws", "groups_of"]


@dataclass(frozen=True, repr=False)
class UnitDraws:
    """The draws of a fit for its units: for groups, for the pilot, and for voters of the pilot.

    Each has a key of its own. They are taken from the source of randomness in this order, before
    anything else, so that a seed means the same for every engine.
    """

    groups: Draws
    pilot: Draws
    voters: Draws

    @classmethod
    def of(cls, randomness: Randomness) -> UnitDraws:
        """Fresh ones."""
        return cls(randomness.draws(), randomness.draws(), randomness.draws())


def groups_of(rows: TrainingRows, n_groups: int, draws: Draws, first: int = 0) -> NDArray[np.int32]:
    """The group of every row: by its unit, or by its place; -1 for rows that are excluded.

    ``first`` is the place of the first row. A row that is not finite keeps its group: who adds it
    up leaves it out.
    """
    if rows.all_units is None:
        groups = draws.of_rows(n_groups, first, len(rows))
    else:
        of_units = keyed_groups(rows.all_units, n_groups, draws)
        groups = np.append(of_units, np.int32(-1))[rows.all_units.codes]
    if rows.excluded is not None:
        groups[rows.excluded] = -1
    return groups


class Engine(Rows, Protocol):
    """Rows, wherever they are."""

    @property
    def schema(self) -> Schema:
        """What a row for prediction must look like."""
        ...

    def n_units(self) -> int:
        """How many units the input has, rows that cannot be used included (replace-one)."""
        ...

    def n_valid_units(self) -> int:
        """How many units have a row that can be used: private, to be released with noise only."""
        ...

    def summaries(self, n_groups: int, neighboring: str, *, intercept: bool) -> GroupSummaries:
        """Group summaries, with every unit in one group (docs/method.md, section 2)."""
        ...
