"""Real tables for the benchmarks, read from a folder of raw public files.

The four data sets of the paper that the folder may hold (california.csv, diamonds.csv, nba.csv,
garbage.csv), preprocessed as in the paper's appendix, and every ``tabular/*.npz`` beside them.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np

Pair = tuple[np.ndarray, np.ndarray]
RAW = ("california", "diamonds", "nba", "garbage")


def columns(path: Path) -> dict[str, list[str]]:
    with path.open(newline="") as stream:
        rows = list(csv.reader(stream))
    return dict(zip(rows[0], map(list, zip(*rows[1:], strict=True)), strict=True))


def numbers(values: list[str]) -> np.ndarray:
    return np.array([float(value) if value else np.nan for value in values])


def complete(features: list[np.ndarray], target: np.ndarray) -> Pair:
    X = np.column_stack(features)
    kept = np.isfinite(X).all(axis=1) & np.isfinite(target)
    return X[kept], target[kept]


def california(table: dict[str, list[str]]) -> Pair:
    names = [name for name in table if name not in ("median_house_value", "ocean_proximity")]
    return complete([numbers(table[name]) for name in names], numbers(table["median_house_value"]))


def diamonds(table: dict[str, list[str]]) -> Pair:
    grades = {
        "cut": ["Fair", "Good", "Very Good", "Premium", "Ideal"],
        "color": list("JIHGFED"),
        "clarity": ["I1", "SI2", "SI1", "VS2", "VS1", "VVS2", "VVS1", "IF"],
    }
    features = [
        np.array([grades[name].index(value) + 1.0 for value in values])
        if name in grades
        else numbers(values)
        for name, values in table.items()
        if name != "price"
    ]
    return complete(features, numbers(table["price"]))


def nba(table: dict[str, list[str]]) -> Pair:
    names = ["FT_PCT_home", "FG3_PCT_home", "FG_PCT_home", "AST_home", "REB_home"]
    return complete([numbers(table[name]) for name in names], numbers(table["PTS_home"]))


def garbage(table: dict[str, list[str]]) -> Pair:
    table = {name.upper().replace(" ", ""): values for name, values in table.items()}
    features = [numbers(table["PAPERTONSCOLLECTED"]), numbers(table["MGPTONSCOLLECTED"])]
    boroughs = sorted(set(table["BOROUGH"]))
    features += [np.array([value == b for value in table["BOROUGH"]], float) for b in boroughs]
    target = numbers(table["REFUSETONSCOLLECTED"])
    target[np.array(table["MONTH"]) > "2022 / 07"] = np.nan
    return complete(features, target)


_LOADERS: dict[str, Callable[[dict[str, list[str]]], Pair]] = {
    "california": california,
    "diamonds": diamonds,
    "nba": nba,
    "garbage": garbage,
}


def load(folder: Path) -> dict[str, Pair]:
    """Every table that the folder holds, by name."""
    found: dict[str, Pair] = {}
    for name in RAW:
        path = folder / f"{name}.csv"
        if path.exists():
            found[name] = _LOADERS[name](columns(path))
    for path in sorted((folder / "tabular").glob("*.npz")):
        with np.load(path, allow_pickle=True) as stored:
            found[path.stem] = stored["X"].astype(float), stored["y"].astype(float)
    return found
