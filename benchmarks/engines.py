"""Time and memory as ratios to peers, on the same data: in memory, from files and on Spark.

    python benchmarks/engines.py [--only SECTION ...] [--quick] [--scratch DIR]

Whatever is measured has processes of its own, and ours and its peers' take turns, because the
speed of a machine drifts. Seconds are the median of all runs after one that warms up. Extra memory
is the peak during the runs, beyond what the process held once the data were made. A fit that was
refused did all of the work; one with NOT ENOUGH DATA did none. MB are 10**6 bytes.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import closing, contextmanager, suppress
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.linear_model import LinearRegression

from tukeyreg import NotEnoughData, ReleaseRefused, TukeyRegressor, select
from tukeyreg.kernel import Columns
from tukeyreg.mechanisms.randomness import Randomness
from tukeyreg.summaries.groups import summarise

QUICK = "--quick" in sys.argv
#: Processes of every case; runs in each of them, and more of them if they are short.
PROCESSES, RUNS, LEAST_SECONDS, MOST_RUNS = 1 if QUICK else 2, 5, 0.5, 50
FRAMES = {"pandas": "DataFrame", "polars": "DataFrame", "pyarrow": "table"}
GROUPS = {"method": "sequential", "m": 1000}
WAYS = {"sequential, m = 1000": GROUPS, "the default": {}}
VARIANTS = {
    "the default": {},
    "joint, m = 1000": {"method": "joint", "m": 1000},
    "sequential, m from the plan": {"method": "sequential"},
    **{f"m = 1000, {kind}": GROUPS | {"kind": kind} for kind in (*FRAMES, "float32")},
    "m = 1000, integer units": GROUPS | {"units": True},
}

# What is measured: each makes or opens its data, and gives back what is to be timed.


def data(n, d, kind="float64"):
    rng = np.random.default_rng(0)
    dtype = np.float32 if kind == "float32" else np.float64
    X = rng.standard_normal((n, d), dtype)
    y = X @ rng.standard_normal(d, dtype)
    y += rng.standard_normal(n, dtype)
    if kind in FRAMES:
        columns = {f"x{j}": X[:, j].copy() for j in range(d)}
        X = getattr(import_module(kind), FRAMES[kind])(columns)
    return X, y


def regressor(method="auto", m="auto", epsilon=1.0):
    return TukeyRegressor(epsilon=epsilon, delta=1e-6, method=method, n_models=m)


def attempt(release):
    """What kept it from a release, if anything did."""
    try:
        release()
    except NotEnoughData:
        return "NOT ENOUGH DATA"
    except ReleaseRefused:
        return "refused"
    return ""


def fit(n, d, kind="float64", units=False, **how):
    X, y = data(n, d, kind)
    unit = np.random.default_rng(1).integers(n // 4, size=n) if units else None
    return lambda: attempt(lambda: regressor(**how).fit(X, y, unit))


def summaries(n, d, m):
    X, y = data(n, d)
    groups = Randomness().draws().of_rows(m, 0, n)
    return lambda: summarise(Columns.of(X, y), groups, m, intercept=True)


def peer(what, n, d, kind="float64"):
    X, y = data(n, d, kind)
    return {
        "LinearRegression": lambda: LinearRegression().fit(X, y),
        "lstsq": lambda: np.linalg.lstsq(np.column_stack([np.ones(n), X]), y),
        "X'X": lambda: X.T @ X,
        "X'X and a copy": lambda: (X.T @ X, X.copy()),
        "1000 × LinearRegression, joint": lambda: attempt(lambda: paper(X, y, 1000)),
        "DP-SGD": lambda: dp_sgd(X, y),
    }[what]


def paper(X, y, m):
    """TukeyEM as published: a regression for every group in a loop, then its selection."""
    models = []
    for rows in np.array_split(np.random.default_rng(1).permutation(len(y)), m):
        model = LinearRegression().fit(X[rows], y[rows])
        models.append([model.intercept_, *model.coef_])
    return select(models, epsilon=1.0, delta=1e-6, method="joint")


def dp_sgd(X, y, batch=1024, epochs=5, clip=1.0, noise=1.0, rate=0.1):
    """With Poisson batches; clipped gradients of squared loss have a closed form."""
    n, d = X.shape
    rng, model = np.random.default_rng(1), np.zeros(d + 1)
    for _ in range(epochs * n // batch):
        rows = rng.choice(n, rng.binomial(n, batch / n), replace=False, shuffle=False)
        part = X[rows]
        rest = y[rows] - model[0] - part @ model[1:]
        norms = np.abs(rest) * np.sqrt(1 + np.einsum("ij,ij->i", part, part))
        rest *= clip / np.maximum(clip, norms)
        gradient = np.append(rest.sum(), rest @ part)
        model += rate / batch * (gradient + noise * clip * rng.standard_normal(d + 1))
    return model


def fit_files(folder, kind, **how):
    path = f"{folder}/*.{kind}"
    return lambda: attempt(lambda: regressor(**how).fit_files(path, "y", progress=False))


def duckdb(folder, kind, rows):
    connect = import_module("duckdb").connect

    def run():
        with closing(connect()) as connection:
            sql = f"SELECT * FROM read_{kind}('{folder}/*.{kind}')"
            for _ in connection.sql(sql).to_arrow_reader(rows):
                pass

    return run


def frame(folder):
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = import_module("pyspark.sql").SparkSession.builder.master("local[2]")
    options = {"spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    options["spark.driver.memory"] = "4g"  # of 1g 50 columns leave too little
    return builder.config(map=options).getOrCreate().read.parquet(folder)


def fit_spark(folder, **how):
    rows = frame(folder)
    return lambda: attempt(lambda: regressor(**how).fit_spark(rows, target="y"))


def map_in_arrow(folder):
    """The same columns as batches of Arrow, which are dropped in the tasks."""
    import pyarrow

    def count(batches):
        n = sum(batch.num_rows for batch in batches)
        yield pyarrow.RecordBatch.from_pydict({"n": [n]})

    rows = frame(folder)
    return lambda: rows.mapInArrow(count, "n long").collect()


MEASURED = (fit, summaries, peer, fit_files, duckdb, fit_spark, map_in_arrow)
MEASURED = {work.__name__: work for work in MEASURED}

# One process


def status(field):
    """A number of bytes that the kernel knows of this process."""
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())
    return 1024 * int(found[1])


def forget_peak():
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return lambda: status("VmHWM")


def peak_of_workers():
    """The largest peak of the Python processes of Spark."""
    import pyarrow

    def peak(batches):
        for _ in batches:
            yield pyarrow.RecordBatch.from_pydict({"n": [status("VmHWM")]})

    session = import_module("pyspark.sql").SparkSession.getActiveSession()
    rows = session.range(2, numPartitions=2).mapInArrow(peak, "n long")
    return max(row.n for row in rows.collect())


def timed(run):
    start = time.perf_counter()
    answer = run()
    return time.perf_counter() - start, answer if isinstance(answer, str) else ""


def measure(name, args):
    run = MEASURED[name](**args)
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    peak, before = forget_peak(), status("VmRSS")
    notes, seconds = {timed(run)[1]}, []
    while len(seconds) < RUNS or (sum(seconds) < LEAST_SECONDS and len(seconds) < MOST_RUNS):
        took, note = timed(run)
        seconds.append(took)
        notes.add(note)
    found = {"median": float(np.median(seconds)), "seconds": seconds, "notes": sorted(notes)}
    memory = {"peak": peak(), "extra": peak() - before}
    if "pyspark" in sys.modules:
        memory = {"peak": peak_of_workers(), "extra": None}
    print(json.dumps(found | memory))


# Many processes


class Case(NamedTuple):
    """Something to measure, and what it is called."""

    label: str
    name: str
    args: dict[str, Any]


class Found(NamedTuple):
    """What was measured in all processes of a case."""

    label: str
    seconds: float
    extra: int | None
    peak: int

    @classmethod
    def of(cls, case, *parts):
        """All processes together."""
        seconds = float(np.median([second for part in parts for second in part["seconds"]]))
        notes = {note for part in parts for note in part["notes"]} - {""}
        label = " ".join([case.label, *(f"({note})" for note in sorted(notes))])
        extra = None if parts[0]["extra"] is None else max(part["extra"] for part in parts)
        return cls(label, seconds, extra, max(part["peak"] for part in parts))

    def memory(self, size=None):
        """What is said of memory."""
        if self.extra is None:
            return f"Python worker's peak {self.peak / 1e6:,.0f} MB"
        share = f" = {self.extra / size:.2f} of X" if size else ""
        return f"{self.extra / 1e6:,.0f} MB{share}"


def process(case):
    command = [sys.executable, __file__, "--measure", case.name, "--args", json.dumps(case.args)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(ours, *peers, scale=1.0, size=None):
    """Lines of a table: ours against peers, each (asked, case, ...), of which the fastest counts.

    ``scale`` is what the ratio is multiplied by, and ``size`` the bytes of the features.
    """
    cases = [ours, *(case for _, *cases in peers for case in cases)]
    try:
        answers = [[process(case) for case in cases] for _ in range(PROCESSES)]
    except subprocess.CalledProcessError as error:
        print(error.stderr, file=sys.stderr)
        line(f"{ours.label}: FAILED in {error.cmd[3]}")
        return None
    found, *rest = map(Found.of, cases, *answers)
    for asked, *same in peers:
        one = min(rest[: len(same)], key=lambda other: other.seconds)
        rest = rest[len(same) :]
        ratio = scale * found.seconds / one.seconds
        against = f"{one.label}: {one.seconds:.3g} s, {one.memory()}"
        line(found.label, f"{found.seconds:.3g}", against, ratio, asked, found.memory(size))
    return found


def share(what, part, whole, name, asked):
    """A line of a table: memory against something."""
    line(what, "", f"{name}: {whole / 1e6:,.0f} MB", part / whole, asked, f"{part / 1e6:,.0f} MB")


def line(what, seconds="", against="", ratio=None, asked=None, memory=""):
    number = "" if ratio is None else f"{ratio:.2f}"
    bound, reached = ("", "") if asked is None else (f"≤ {asked:g}", "**not reached**")
    if asked is not None and ratio <= asked:
        reached = "reached"
    print(f"| {' | '.join((what, seconds, against, number, bound, reached, memory))} |", flush=True)


def table(title):
    print(f"\n## {title}\n\n| what | seconds | against | ratio | asked | reached | extra memory |")
    print("|---|---|---|---|---|---|---|", flush=True)


# Sections


def rows_of(n):
    """How many rows to take for so many: a fiftieth, but enough for a release, if it is quick."""
    return max(n // 50, 20_000) if QUICK else n


def shape_of(rows, d):
    return {"n": rows_of(rows), "d": d}


def ours(label, shape, how):
    return Case(f"fit, {label}", "fit", shape | how)


def rival(what, shape, **more):
    return Case(what, "peer", {"what": what, **shape, **more})


def memory(_):
    for rows, d, asked, most in (
        (1_000_000, 25, (0.2, 0.1), 0.5),
        (5_000_000, 10, (0.1, None), None),
    ):
        shape = shape_of(rows, d)
        size = 8 * shape["n"] * d
        table(f"In memory, {shape['n']:,} × {d}")
        bounds = {"LinearRegression": asked[0], "lstsq": None, "X'X and a copy": None}
        against = ((bound, rival(what, shape)) for what, bound in bounds.items())
        sums = Case("summaries only, m = 1000", "summaries", shape | {"m": 1000})
        found = compare(ours("sequential, m = 1000", shape, GROUPS), *against, size=size)
        if found:
            share(f"{found.label}: extra memory", found.extra, size, "X", most)
        peers = ((2.5, rival("X'X", shape)), (asked[1], rival("LinearRegression", shape)))
        compare(sums, *peers, size=size)
        for label, how in VARIANTS.items():
            kind = how.get("kind", "float64")
            against = rival("LinearRegression", shape, kind=kind)
            bytes_ = size // 2 if kind == "float32" else size
            compare(ours(label, shape, how), (None, against), size=bytes_)


def small(_):
    shape = shape_of(20_000, 10)
    table(f"Small, {shape['n']:,} × 10")
    for (label, how), asked in zip(WAYS.items(), ((0.1, 10), (None, None)), strict=True):
        against = ("1000 × LinearRegression, joint", "LinearRegression")
        pairs = [(bound, rival(what, shape)) for bound, what in zip(asked, against, strict=True)]
        compare(ours(label, shape, how), *pairs)


def dpsgd(_):
    for rows, d in ((1_000_000, 25), (20_000, 10)):
        shape = shape_of(rows, d)
        table(f"DP-SGD in numpy, batches of 1024, 5 epochs, {shape['n']:,} × {d}")
        for label, how in WAYS.items():
            compare(ours(label, shape, how), (None, rival("DP-SGD", shape)))


@contextmanager
def stored(scratch, n, d, kind="parquet", files=1):
    """A folder with files of n rows, in row groups of a million at most."""
    import pyarrow
    from pyarrow import csv, parquet

    writer_of = {"parquet": parquet.ParquetWriter, "csv": csv.CSVWriter}[kind]
    names = [*(f"x{j}" for j in range(d)), "y"]
    schema = pyarrow.schema([(name, pyarrow.float64()) for name in names])
    rng = np.random.default_rng(0)
    truth = rng.standard_normal(d)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        for k in range(files):
            left = n * (k + 1) // files - n * k // files
            with writer_of(f"{folder}/{k}.{kind}", schema) as writer:
                while left > 0:
                    X = rng.standard_normal((d, min(left, 1_000_000)))
                    y = truth @ X + rng.standard_normal(X.shape[1])
                    writer.write_table(pyarrow.table([*X, y], schema=schema))
                    left -= len(y)
        os.sync()
        yield folder


def files(scratch):
    parquet = ((50_000_000, 10, "parquet", 2), (1_000_000, 50, "parquet", None))
    for rows, d, kind, asked in (*parquet, (5_000_000, 10, "csv", None)):
        n = rows_of(rows)
        table(f"Files, {kind}, {n:,} × {d}")
        with stored(scratch, n, d, kind) as folder:
            where = {"folder": folder, "kind": kind}
            peers = [
                Case(f"DuckDB, batches of {most:,}", "duckdb", where | {"rows": most})
                for most in (87_000, 1_000_000)
            ]
            for label, how in WAYS.items():
                case = Case(f"fit_files, {label}", "fit_files", where | how)
                found = compare(case, (asked if how else None, *peers))
                if found:
                    share(f"{found.label}: whole process", found.peak, 1 << 30, "1 GiB", 1)


def growth(_):
    table("Growth with rows, d = 10, m = 1000: time per row")
    shapes = [shape_of(n, 10) for n in (100_000, 1_000_000, 10_000_000)]
    fits = [ours(f"{shape['n']:,} rows", shape, GROUPS) for shape in shapes]
    for k, asked in ((1, None), (2, 1.2)):
        compare(fits[k], (asked, fits[k - 1]), scale=shapes[k - 1]["n"] / shapes[k]["n"])
    of_columns = [(500_000, d, 1000) for d in (5, 10, 25, 50, 100)]
    of_groups = [(1_000_000, 10, m) for m in (100, 500, 1000, 2000, 5000, 20_000)]
    for what, cases in (("columns", of_columns), ("groups", of_groups)):
        # With epsilon = 1, some of these would have too few groups for a release.
        table(f"Growth with {what}, {rows_of(cases[0][0]):,} rows, epsilon = 5")
        for rows, d, m in cases:
            shape, how = shape_of(rows, d), {"method": "sequential", "m": m, "epsilon": 5.0}
            against = (None, rival("LinearRegression", shape))
            compare(ours(f"d = {d}, m = {m:,}", shape, how), against, size=8 * shape["n"] * d)


def spark(scratch):
    table("Spark, local[2], Parquet, 4 files")
    missing = what_spark_needs()
    if missing:
        line(f"skipped: there is no {missing}")
        return
    few, many = rows_of(5_000_000), rows_of(1_000_000)
    with stored(scratch, few, 10, files=4) as narrow, stored(scratch, many, 50, files=4) as wide:
        fits = []
        for shape, folder in ((f"{few:,} × 10", narrow), (f"{many:,} × 50", wide)):
            against = Case("mapInArrow", "map_in_arrow", {"folder": folder})
            for label, how in WAYS.items():
                case = Case(f"fit_spark, {shape}, {label}", "fit_spark", {"folder": folder} | how)
                compare(case, (1.5 if how else None, against))
                fits.append(case)
        line("the same, time per byte")
        compare(fits[2], (1, fits[0]), scale=few * 11 / (many * 51))


def what_spark_needs():
    try:
        import_module("pyspark.sql")
    except ImportError:
        return "pyspark"
    if "JAVA_HOME" not in os.environ and shutil.which("java") is None:
        return "Java"
    return "" if hasattr(TukeyRegressor, "fit_spark") else "TukeyRegressor.fit_spark"


def machine():
    cpu = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())[1]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    print(f"{cpu}, {cores} cores, {memory:.1f} GiB, {platform.platform()}", end="\n\n")
    if load > 0.5:
        print(f"**The machine is busy (load {load:.1f})**: peers with threads suffer most.\n")
    versions = [f"Python {platform.python_version()}"]
    for name in ("numpy", "scikit-learn", "duckdb", "pyspark", "pyarrow", "pandas", "polars"):
        with suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    with suppress(OSError):
        java = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False)
        versions.append(java.stderr.partition("\n")[0])
    print(", ".join(versions), flush=True)


SECTIONS = {one.__name__: one for one in (memory, small, dpsgd, files, growth, spark)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", nargs="*", default=tuple(SECTIONS), choices=SECTIONS)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of the rows, one process")
    parser.add_argument("--scratch", help="where to put up to 5 GB of files, removed in the end")
    parser.add_argument("--measure", choices=MEASURED, help=argparse.SUPPRESS)
    parser.add_argument("--args", type=json.loads, default={}, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(given.measure, given.args)
        return
    machine()
    for name in given.only:
        SECTIONS[name](given.scratch)


if __name__ == "__main__":
    main()
