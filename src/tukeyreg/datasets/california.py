"""California housing: 1990 census block groups (US census, public domain).

The numbers are stored as the integers that they are multiples of, so that nothing is lost and
the file stays small.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

__all__ = ["Dataset", "load_california"]

Floats = NDArray[np.float64]

#: Column and the unit that its stored integers count.
_COLUMNS = {
    "longitude": 0.01,
    "latitude": 0.01,
    "housing_median_age": 1.0,
    "total_rooms": 1.0,
    "total_bedrooms": 1.0,
    "population": 1.0,
    "households": 1.0,
    "median_income": 0.0001,
}
_TARGET = "median_house_value"
_MISSING = -1


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """A table of numbers with its target.

    Attributes
    ----------
    X : array (n, p)
        NaN where a value is missing.
    y : array (n,)
    feature_names : tuple of str
    target_name : str
    source : str
        Where the data come from, and their licence.
    """

    X: Floats
    y: Floats
    feature_names: tuple[str, ...]
    target_name: str
    source: str


def load_california() -> Dataset:
    """Median house value of 20,640 block groups; 207 of them miss the number of bedrooms.

    Examples
    --------
    >>> data = load_california()
    >>> data.X.shape, data.feature_names[-1], float(data.y[0])
    ((20640, 8), 'median_income', 452600.0)
    """
    path = files("tukeyreg.datasets").joinpath("california.npz")
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
        columns = []
        for name, unit in _COLUMNS.items():
            counts = stored[name].astype(np.float64)
            values = counts * unit if unit == 1 else counts / round(1 / unit)
            columns.append(np.where(counts == _MISSING, np.nan, values))
        target = stored[_TARGET].astype(np.float64)
    return Dataset(
        np.column_stack(columns),
        target,
        tuple(_COLUMNS),
        _TARGET,
        "1990 US census, block groups of California; public domain",
    )
