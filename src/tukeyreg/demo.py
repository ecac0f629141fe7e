"""A private fit of California housing: ``python -m tukeyreg.demo --out demo``.

It prints the plan, the release and how good the model is, and leaves ``release.json`` and
``report.html``. These two files hold nothing but public numbers and the release. The scores that
are printed are another matter: they come from private rows, and are for this demonstration only.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from string import Template

import numpy as np
from sklearn.linear_model import LinearRegression

from tukeyreg.datasets import load_california
from tukeyreg.errors import ReleaseRefused
from tukeyreg.mechanisms.randomness import Randomness
from tukeyreg.privacy.plan import Plan, plan
from tukeyreg.regression import TukeyRegressor
from tukeyreg.release import Release

__all__ = ["main", "report"]

EPSILON, DELTA = math.log(3), 1e-5
REFUSED = 3
#: A public guess of how many rows there are; a plan from the true number would tell it.
ROUGHLY = 16_000

_MEANING = """Whoever sees this page learns almost the same about a row as if it had not been in
the data. All numbers of the release are covered, and that there is a release at all."""
_LINEAR = "The model is linear."
_CLIPPED = """The model is linear while every feature lies in the range beside its coefficient, and
constant beyond: a value outside the range counts as its nearer end. The ranges are part of the
release, and wider than what most rows fill."""
_NOT_PRIVATE = "Nothing is promised. This is a trial run, not a release."

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
body { max-width: 46rem; margin: 2rem auto; padding: 0 1rem; font: 1rem/1.5 system-ui, sans-serif;
  color: #1d1d1f; background: #fff; }
h2 { margin-top: 2rem; } table { border-collapse: collapse; }
th, td { padding: .2rem 1rem .2rem 0; border-bottom: 1px solid #88888866; text-align: left; }
thead th { opacity: .7; } th { font-weight: normal; } pre { overflow-x: auto; }
@media (prefers-color-scheme: dark) { body { color: #e8e8ea; background: #161618; } }
</style>
</head>
<body>
<h1>$title</h1>
<p>Median house value of California&rsquo;s census block groups in 1990, by linear regression.</p>
<h2>Guarantee</h2>
<p><strong>$guarantee.</strong></p>
<p>$meaning</p>
<h2>Coefficients</h2>
<p>Dollars for one more of a feature. $linear</p>
$coefficients
<h2>How the budget was split</h2>
$split
<p>Added up by the accounting &ldquo;$accounting&rdquo;, which docs/method.md explains.</p>
<h2>Method and verdict</h2>
$outcome
<h2>The plan, made beforehand for $roughly rows</h2>
$plan
<h2>What is not covered</h2>
<p>How long the fit took, how much memory it needed, and errors. Any further fit of the same rows:
it costs a further budget. Any score that is computed on private rows. Names, order and types of
the columns, which are taken as public. The full list is in docs/sharp-edges.md.</p>
<h2>Versions</h2>
$versions
<details><summary>release.json</summary>
<pre id="release">$json</pre>
</details>
</body></html>
""")


def _table(rows: Iterable[tuple[str, ...]], head: Sequence[str] = ()) -> str:
    lines = []
    if head:
        names = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
        lines.append(f"<thead><tr>{names}</tr></thead>")
    for name, *values in rows:
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _coefficients(release: Release) -> str:
    """The coefficients and, where the model has ranges, between which values they hold."""
    head = ["feature", "coefficient"]
    rows = [
        [name, f"{value:.6g}"]
        for name, value in zip(release.names, release.coefficients, strict=True)
    ]
    if release.ranges is not None:
        head.append("holds between")
        for row, pair in zip(rows, release.ranges, strict=True):
            row.append("not seen above the noise" if pair is None else _between(*pair))
    if release.intercept is not None:
        blank = [""] * (len(head) - 2)
        rows.insert(0, ["(intercept)", f"{release.intercept:.6g}", *blank])
    return _table(map(tuple, rows), head)


def _between(low: float, high: float) -> str:
    width = high - low
    if not 1e-6 < width < 1e9:
        return f"{low:.6g} and {high:.6g}"
    decimals = max(0, 2 - math.floor(math.log10(width)))
    return f"{low:,.{decimals}f} and {high:,.{decimals}f}"


def report(release: Release, planned: Plan) -> str:
    """A self-contained page about a release: no scripts, nothing loaded, no private number."""
    rows = dict(release.rows())
    told = ("method", "units", "verdict", "expected privacy noise")
    return _PAGE.substitute(
        title="A private linear regression",
        guarantee=escape(str(release.guarantee)),
        meaning=_MEANING if release.guarantee.private else _NOT_PRIVATE,
        linear=_LINEAR if release.ranges is None else _CLIPPED,
        coefficients=_coefficients(release),
        split=_table(release.split.items()),
        accounting=escape(release.accounting),
        outcome=_table((name, rows[name]) for name in told),
        roughly=f"{ROUGHLY:,}",
        plan=_table(planned.rows()),
        versions=_table(release.versions.items()),
        json=escape(release.to_json()),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit, print and write; the exit status is 3 if the release was refused."""
    parser = argparse.ArgumentParser(prog="python -m tukeyreg.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for the files")
    parser.add_argument("--seed", type=int, help="makes the run repeatable and NOT private")
    given = parser.parse_args(arguments)

    data = load_california()
    # A coin for each row keeps neighbours neighbours; a split by an exact share would not.
    held_out = Randomness(given.seed).below(5, len(data.y)) == 0
    planned = plan(ROUGHLY, data.X.shape[1] + 1, EPSILON, DELTA)
    print(f"The plan for {ROUGHLY:,} rows, from public numbers alone:\n\n{planned}\n")

    model = TukeyRegressor(epsilon=EPSILON, delta=DELTA, random_state=given.seed)
    start = time.perf_counter()
    try:
        model.fit(data.X[~held_out], data.y[~held_out])
    except ReleaseRefused as refusal:
        print(f"No model this time. {refusal}", file=sys.stderr)
        return REFUSED
    seconds = time.perf_counter() - start
    release = replace(model.release_, names=data.feature_names)  # names are public
    print(f"The release:\n\n{release}\n")

    complete = np.isfinite(data.X).all(axis=1)
    train, test = complete & ~held_out, complete & held_out
    ols = LinearRegression().fit(data.X[train], data.y[train])
    private, other = (fitted.score(data.X[test], data.y[test]) for fitted in (model, ols))
    print("Non-private comparison, never publish: scores on held-out rows")
    print(f"  R² of the release  {private:.4f}\n  R² of OLS          {other:.4f}")
    print(f"The fit took {seconds:.3f} seconds.")

    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "release.json").write_text(release.to_json(), encoding="utf-8")
    (given.out / "report.html").write_text(report(release, planned), encoding="utf-8")
    print(f"Written: {given.out / 'release.json'} and {given.out / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
