"""Rows in memory: arrays and frames, read where they lie."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tukeyreg.engines.contract import UnitDraws, groups_of
from tukeyreg.grouping import even_partition, keyed_groups
from tukeyreg.intake import Schema, TrainingRows
from tukeyreg.mechanisms.randomness import Draws, Floats, Integers, Randomness
from tukeyreg.summaries.groups import GroupSummaries, summarise
from tukeyreg.summaries.rows import PilotRows, RowMap, UnitRows, weights_of
from tukeyreg.units import Units

__all__ = ["MemoryEngine"]


class MemoryEngine:
    """Rows in memory; see :class:`tukeyreg.engines.contract.Engine`.

    Parameters
    ----------
    rows : TrainingRows
    randomness : Randomness
        Where the keys of the units' draws come from, and even partitions.
    """

    def __init__(self, rows: TrainingRows, randomness: Randomness) -> None:
        self._rows, self._randomness = rows, randomness
        self._draws = UnitDraws.of(randomness)

    @property
    def schema(self) -> Schema:
        """What a row for prediction must look like."""
        return self._rows.schema

    @property
    def n_features(self) -> int:
        """The number of design columns."""
        return self._rows.schema.n_design

    def n_units(self) -> int:
        """How many units the input has."""
        return self._rows.n_units

    def n_valid_units(self) -> int:
        """How many units have a row that can be used."""
        return self._rows.n_valid_units

    def summaries(self, n_groups: int, neighboring: str, *, intercept: bool) -> GroupSummaries:
        """Group summaries in one pass over the rows."""
        groups = self.groups(n_groups, neighboring)
        levels = self.schema.level_slices
        return summarise(self._rows.columns, groups, n_groups, intercept=intercept, levels=levels)

    def groups(self, n_groups: int, neighboring: str) -> NDArray[np.int32]:
        """The group of every input row; -1 for rows that are excluded."""
        rows = self._rows
        if neighboring == "add-remove":
            return groups_of(rows, n_groups, self._draws.groups)
        # All input units take part, so that a unit whose rows become invalid moves no other.
        groups = even_partition(rows.n_units, n_groups, self._randomness)
        if rows.all_units is not None:
            groups = np.append(groups, np.int32(-1))[rows.all_units.codes]
        if rows.excluded is not None:
            groups[rows.excluded] = -1
        return groups

    def pilot(self, share: int, voters: int, coins: object = None) -> PilotRows:
        """A random part of the units; by draws of the engine's own, so ``coins`` are not used."""
        rows = self._rows
        if rows.units is None:
            places = np.flatnonzero(rows.kept)
            if share > 1:
                places = places[self._of_rows(self._draws.pilot, share)[places]]
            votes = self._of_rows(self._draws.voters, voters)[places]
            part = self._part(places, None, len(places))
        else:
            places = np.flatnonzero(rows.kept)
            chosen = _of_units(rows.units, self._draws.pilot, share)
            votes = _of_units(rows.units, self._draws.voters, voters)[chosen]
            codes = (np.cumsum(chosen, dtype=np.int64) - 1)[rows.units.codes]
            here = chosen[rows.units.codes]
            part = self._part(places[here], codes[here], int(chosen.sum()))
        return PilotRows(part, part.of_units(votes))

    def gradient(
        self, chosen: NDArray[np.bool_], map: RowMap, coefficients: Floats, bound: float
    ) -> Integers:
        """The sum of all integer rows times residuals, with the chosen features."""
        rows, kept, weights = self._rows, None, None
        if rows.excluded is not None:
            kept = ~rows.excluded
        if rows.units is not None:
            assert rows.all_units is not None
            sizes = np.bincount(rows.units.codes, minlength=len(rows.units))
            weights = np.zeros(len(rows))
            weights[rows.kept] = weights_of(sizes)[rows.units.codes]
            kept = rows.kept
        columns = rows.columns.of_features(chosen)
        return map.gradient(columns, kept, weights, coefficients, bound)

    def _of_rows(self, draws: Draws, share: int) -> NDArray[np.bool_]:
        return np.asarray(draws.of_rows(share, 0, len(self._rows)) == 0)

    def _part(self, places: Integers, codes: Integers | None, n_units: int) -> UnitRows:
        rows = self._rows
        if len(places) == len(rows):
            return UnitRows(rows.design, rows.target, codes, n_units)
        if rows.whole is not None:  # whole rows are faster to gather than columns
            design: NDArray[np.floating] = rows.whole[places].astype(np.float64, copy=False)
        else:
            design = rows.columns.matrix(places)
        return UnitRows(design, rows.columns.labels(places), codes, n_units)


def _of_units(units: Units, draws: Draws, share: int) -> NDArray[np.bool_]:
    return np.asarray(keyed_groups(units, share, draws) == 0)
