"""What every engine can do, and the draws that all of them make alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tukeyreg.intake import Schema
from tukeyreg.mechanisms.moments import Rows
from tukeyreg.mechanisms.randomness import Draws, Randomness
from tukeyreg.summaries.groups import GroupSummaries

__all__ = ["Engine", "UnitDraws"]


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
