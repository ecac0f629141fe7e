"""Every method on every table at hand: R² on held-out rows as a share of that of OLS.

    python benchmarks/methods.py --data DIR [--only SECTION ...]

A row is held out by a coin of probability 1/5. Shares are floored at 0 and capped at 1.05, and
the median of the runs is shown. Where OLS itself is ruined by outliers among the held-out rows
(``brazil_rent``), its share is of the R² that it has on its own rows. Seeds make the numbers
reproducible; they are experiments, not releases.
"""

from __future__ import annotations

import argparse
import time
from math import log
from pathlib import Path

import numpy as np
from sklearn.linear_model import LinearRegression
from sklearn.metrics import r2_score

import tables
from baselines import BoostedAdaSSP
from tukeyreg import NotEnoughData, ReleaseRefused, TukeyRegressor

EPSILON, DELTA = log(3), 1e-5
OWN = ("auto", "moments", "sequential", "joint")
#: R² of OLS by which shares of a table are taken, where held-out rows ruin OLS.
FIXED = {"brazil_rent": 0.52}


def ours(method, *, linear=False):
    """Held-out predictions of one of our methods; ``linear`` does without the ranges."""

    def predictions(X, y, X_new, epsilon, delta, seed):
        model = TukeyRegressor(epsilon=epsilon, delta=delta, method=method, random_state=seed)
        model.fit(X, y)
        return X_new @ model.coef_ + model.intercept_ if linear else model.predict(X_new)

    return predictions


def boosted(standardise):
    def predictions(X, y, X_new, epsilon, delta, seed):
        model = BoostedAdaSSP(epsilon, delta, standardise=standardise, seed=seed)
        return model.fit(X, y).predict(X_new)

    return predictions


METHODS = {
    **{method: ours(method) for method in OWN},
    "line": ours("auto", linear=True),
    "boosted": boosted(False),
    "boosted+": boosted(True),
}
LEGEND = """line: auto without its ranges, the straight line everywhere. boosted: BoostedAdaSSP.
boosted+: the same, given the true mean and standard deviation of every column."""


def share(method, X, y, epsilon, delta, seed, reference=None):
    """R² on held-out rows as a share of OLS's, or what kept it from a release."""
    held_out = np.random.default_rng(1000 + seed).random(len(y)) < 0.2
    train, test = ~held_out, held_out
    try:
        found = METHODS[method](X[train], y[train], X[test], epsilon, delta, seed)
    except NotEnoughData:
        return "short"
    except ReleaseRefused:
        return "refused"
    if reference is None:
        reference = LinearRegression().fit(X[train], y[train]).score(X[test], y[test])
    return min(1.05, max(0.0, r2_score(y[test], np.nan_to_num(found)) / reference))


def median_share(shares):
    """The median, with nothing released as 0."""
    return float(np.median([0.0 if isinstance(value, str) else value for value in shares]))


def cell(shares):
    words = [value for value in shares if isinstance(value, str)]
    if len(words) == len(shares):
        return words[0]
    return f"{median_share(shares):.3f}" + ("*" if words else "")


def table(found, epsilon, delta, runs, methods):
    print(f"\nepsilon = {epsilon:.4g}, delta = {delta:g}, median of {runs}; *: some not released")
    print(f"{'':20} {'n':>7} {'d':>3}", *(f"{method:>10}" for method in methods))
    medians = {method: [] for method in methods}
    for name, (X, y) in found.items():
        cells = []
        for method in methods:
            shares = [
                share(method, X, y, epsilon, delta, seed, FIXED.get(name)) for seed in range(runs)
            ]
            medians[method].append(median_share(shares))
            cells.append(f"{cell(shares):>10}")
        print(f"{name:20} {len(y):7,} {X.shape[1]:3}", *cells, flush=True)
    columns = [np.array(medians[method]) for method in methods]
    for label, summary in (
        ("mean", lambda v: f"{v.mean():.3f}"),
        ("at least 0.9", lambda v: f"{np.sum(v >= 0.9)} of {len(v)}"),
        ("at least 0.98", lambda v: f"{np.sum(v >= 0.98)} of {len(v)}"),
    ):
        print(f"{label:32}", *(f"{summary(column):>10}" for column in columns))
    if {"auto", "moments", "sequential"} <= set(methods):
        better = np.maximum(medians["moments"], medians["sequential"])
        print(
            f"auto below the better of moments and sequential by at most "
            f"{np.max(better - medians['auto']):.3f}"
        )


def other_targets(found, runs, most=4):
    """Columns of the same tables as targets, which no constant was chosen for."""
    print("\ncolumns of the tables as targets, share of OLS's R², auto")
    medians = []
    for name, (X, y) in found.items():
        everything = np.column_stack([X, y])
        columns = [j for j in range(X.shape[1]) if len(np.unique(X[:, j])) > 8]
        np.random.default_rng(len(name)).shuffle(columns)
        taken = 0
        for j in columns:
            target, rest = everything[:, j], np.delete(everything, j, axis=1)
            held_out = np.random.default_rng(1000).random(len(y)) < 0.2
            fitted = LinearRegression().fit(rest[~held_out], target[~held_out])
            own = LinearRegression().fit(rest, target).score(rest, target)
            if not 0.08 < own < 0.985 or fitted.score(rest[held_out], target[held_out]) < own / 2:
                continue  # no relation, a formula, or outliers that ruin OLS
            shares = [share("auto", rest, target, EPSILON, DELTA, seed) for seed in range(runs)]
            medians.append(median_share(shares))
            print(f"{name:20} column {j:2}  OLS {own:.3f}  {cell(shares)}", flush=True)
            taken += 1
            if taken == most:
                break
    v = np.array(medians)
    print(
        f"{len(v)} tasks: mean {v.mean():.3f}, {np.sum(v >= 0.9)} at least 0.9, "
        f"{np.sum(v >= 0.98)} at least 0.98"
    )


def rows_needed(runs):
    """R² against the number of rows on well-specified normal data."""
    print("\nshare of OLS's R² against rows: normal data, epsilon = 1, delta = 1e-6")
    for d, sizes in (
        (10, (600, 800, 1000, 1200, 1500, 2000, 3000, 5000, 7500, 10_000)),
        (50, (1600, 2000, 2500, 3000, 3500, 5000, 10_000, 20_000, 50_000)),
    ):
        for signal in (0.5, 0.9):
            print(f"d = {d}, R² of the truth {signal}")
            print(f"{'rows':>8}", *(f"{method:>10}" for method in METHODS))
            for n in sizes:
                cells = []
                for method in METHODS:
                    shares = [normal_share(method, n, d, signal, seed) for seed in range(runs)]
                    cells.append(f"{cell(shares):>10}")
                print(f"{n:8,}", *cells, flush=True)


def normal_share(method, n, d, signal, seed):
    rng = np.random.default_rng(10_000 * d + seed)
    X = rng.normal(size=(n + 5000, d))
    truth = rng.normal(size=d)
    truth *= np.sqrt(signal / (1 - signal)) / np.linalg.norm(truth)
    y = X @ truth + rng.normal(size=len(X))
    try:
        found = METHODS[method](X[:n], y[:n], X[n:], 1.0, 1e-6, seed)
    except NotEnoughData:
        return "short"
    except ReleaseRefused:
        return "refused"
    reference = LinearRegression().fit(X[:n], y[:n]).score(X[n:], y[n:])
    return min(1.05, max(0.0, r2_score(y[n:], found) / reference))


def speed():
    print("\nseconds, n = 1,000,000, d = 25, in memory, median of 5, warm process")
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1_000_000, 25))
    y = X @ rng.normal(size=25) + rng.normal(size=len(X))
    fits = {"LinearRegression": LinearRegression()} | {
        method: TukeyRegressor(epsilon=1.0, delta=1e-6, method=method)
        for method in ("auto", "sequential", "joint")
    }
    times = {name: [] for name in fits}
    for name, model in fits.items():  # in turn: the first call after another's is slower for all
        for _ in range(6):
            start = time.perf_counter()
            model.fit(X, y)
            times[name].append(time.perf_counter() - start)
    base = np.median(times["LinearRegression"][1:])
    for name, seconds in times.items():
        middle = np.median(seconds[1:])
        print(f"  {name:18} {middle:.3f} = {middle / base:.2f} x LinearRegression", flush=True)


def main():
    sections = ("tables", "budgets", "targets", "rows", "speed")
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", type=Path, help="folder with the raw files")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=sections, choices=sections)
    given = parser.parse_args()
    found = tables.load(given.data) if given.data else {}
    print(LEGEND)
    if "tables" in given.only:
        table(found, EPSILON, DELTA, given.runs, tuple(METHODS))
    if "budgets" in given.only:
        for epsilon in (0.3, 3.0):
            table(found, epsilon, DELTA, given.runs, ("auto", "sequential", "boosted+"))
    if "targets" in given.only:
        other_targets(found, given.runs)
    if "rows" in given.only:
        rows_needed(given.runs)
    if "speed" in given.only:
        speed()


if __name__ == "__main__":
    main()
