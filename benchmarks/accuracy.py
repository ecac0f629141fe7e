"""Accuracy, refusals and smallest sufficient m, as printed in docs/accuracy.md.

    python benchmarks/accuracy.py --data DIR [--only SECTION ...]

Every R² stands beside that of non-private OLS on the same rows in the same run. Seeds make the
numbers reproducible; they are experiments, not releases.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from math import log
from pathlib import Path

import numpy as np
from sklearn.datasets import make_regression
from sklearn.linear_model import LinearRegression

import tables
from tukeyreg import NotEnoughData, ReleaseRefused, TukeyRegressor, plan
from tukeyreg.mechanisms import joint, sequential
from tukeyreg.mechanisms.randomness import Randomness
from tukeyreg.privacy.budget import Budget
from tukeyreg.privacy.plan import Design, plan_units

EPSILON, DELTA = log(3), 1e-5


def fits(X, y, method, runs, **options):
    """R² of every run on all rows, and how many were refused or not started."""
    scores, refused, short = [], 0, 0
    for seed in range(runs):
        model = TukeyRegressor(
            epsilon=EPSILON, delta=DELTA, method=method, random_state=seed, **options
        )
        try:
            scores.append(model.fit(X, y).score(X, y))
        except ReleaseRefused:
            refused += 1
        except NotEnoughData:
            short += 1
    return np.array(scores), refused, short


def show(label, X, y, method, least, runs, **options):
    scores, refused, short = fits(X, y, method, runs, **options)
    ols = LinearRegression().fit(X, y).score(X, y)
    if len(scores):
        low, mid, high = np.percentile(scores, [25, 50, 75])
        text = f"{mid:8.4f} [{low:7.4f}, {high:7.4f}]  {mid / ols:6.3f} of OLS {ols:.4f}"
    else:
        text = f"{'-':>8}  OLS {ols:.4f}"
    bound = "" if least is None else f"at least {least}"
    print(f"{label:28} {method:10} {text}  refused {refused}, short {short}  {bound}", flush=True)


def real(data: Path, runs: int) -> None:
    print(f"R² on all rows, median and quartiles of {runs} runs, (ln 3, 1e-5), add-remove, auto m")
    least = {"california": 0.615, "diamonds": 0.79, "nba": 0.618, "garbage": 0.535}
    found = tables.load(data)
    for name in tables.RAW:
        if name in found:
            show(name, *found[name], "auto", None, runs)
            show(name, *found[name], "sequential", least[name], runs)
            show(name, *found[name], "joint", None, runs)


def synthetic(runs: int) -> None:
    print(f"make_regression(noise=10), median and quartiles of {runs} runs")
    for n, d, method, least in (
        (22_000, 10, "sequential", 0.995),
        (22_000, 10, "joint", 0.995),
        (6_000, 10, "sequential", 0.99),
        (102_000, 50, "sequential", 0.99),
        (102_000, 50, "joint", None),
    ):
        X, y = make_regression(n, d, n_informative=d, noise=10, random_state=0)
        show(f"n = {n:,}, d = {d}", X, y, method, least, runs)


def refusals(runs: int) -> None:
    print(f"refused of {runs:,} releases where the plan promised at least 99.9 %")
    for n, d in ((10_000, 5), (40_000, 10)):
        rng = np.random.default_rng(0)
        X = rng.normal(size=(n, d))
        y = X @ rng.normal(size=d) + rng.normal(size=n)
        promised = plan(n, d + 1, EPSILON, DELTA, method="sequential")
        _, refused, short = fits(X, y, "sequential", runs)
        print(
            f"  n = {n:,}, d = {d}, m = {promised.n_models}, promised "
            f"{promised.success_probability:.5f}: refused {refused}, short {short}  at most "
            f"{3 * runs // 1000}",
            flush=True,
        )


def smallest_m(runs: int) -> None:
    print(f"joint on Gaussian models: smallest m that passes in at least 99 % of {runs} runs")
    design = Design("joint", "replace-one", Budget(EPSILON, DELTA), None, private_count=False)
    for d, most in ((10, 640), (30, 1050), (50, 1500)):
        rng = np.random.default_rng(d)

        def passing(m, d=d, rng=rng):
            parameters = plan_units(None, d, design, m).parameters
            passed = 0
            for seed in range(runs):
                models = rng.normal(size=(m, d))
                passed += joint.release(models, parameters, Randomness(seed)) is not None
            return passed / runs

        low, high = 100, 3000
        while high - low > 10:
            middle = (low + high) // 2
            low, high = (low, middle) if passing(middle) >= 0.99 else (middle, high)
        print(f"  d = {d}: m = {high}, passing {passing(high):.3f}  at most {most}", flush=True)


def speed(data: Path) -> None:
    print("seconds, median of 11, warm process")
    found = tables.load(data)
    for method, least in (("sequential", 0.25), ("joint", 0.25)):
        times = []
        X, y = found["california"]
        for _ in range(12):
            start = time.perf_counter()
            with contextlib.suppress(ReleaseRefused, NotEnoughData):
                TukeyRegressor(epsilon=EPSILON, delta=DELTA, method=method).fit(X, y)
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        LinearRegression().fit(X, y)
        ols = time.perf_counter() - start
        median = float(np.median(times[1:]))
        print(
            f"  California fit, {method}: {median:.4f} = {median / ols:.1f} x OLS  at most {least}"
        )
    rng = np.random.default_rng(0)
    models = rng.normal(size=(2000, 50))
    factors = np.broadcast_to(np.eye(50), (2000, 50, 50))
    for method, least in (("sequential", 1.5), ("joint", 0.5)):
        design = Design(method, "replace-one", Budget(EPSILON, DELTA), None, private_count=False)
        parameters = plan_units(None, 50, design, 2000).parameters
        times = []
        for _ in range(12):
            start = time.perf_counter()
            if method == "joint":
                joint.release(models, parameters, Randomness())
            else:
                sequential.release(factors, models, parameters, Randomness())
            times.append(time.perf_counter() - start)
        print(
            f"  selection, d = 50, m = 2,000, {method}: {np.median(times[1:]):.3f}  at most {least}"
        )


def main() -> None:
    sections = ("real", "synthetic", "refusals", "smallest_m", "speed")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the raw files")
    parser.add_argument("--runs", type=int, default=11)
    parser.add_argument("--only", nargs="*", default=sections, choices=sections)
    given = parser.parse_args()
    if "real" in given.only:
        real(given.data, given.runs)
    if "synthetic" in given.only:
        synthetic(given.runs)
    if "refusals" in given.only:
        refusals(1000)
    if "smallest_m" in given.only:
        smallest_m(300)
    if "speed" in given.only:
        speed(given.data)


if __name__ == "__main__":
    main()
