"""The demonstration: a fit of real data, a release that reads back, and a page without scripts."""

import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pytest

from tukeyreg import Release, ReleaseRefused, TukeyRegressor, demo, plan

VOID = {"meta", "br", "hr", "img", "input", "link"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "new" / "folder"
    with pytest.MonkeyPatch.context() as patch:
        lines = []
        patch.setattr("builtins.print", lambda *texts, **_: lines.append(" ".join(map(str, texts))))
        assert demo.main(["--out", str(folder), "--seed", "0"]) == 0
    release = Release.from_json((folder / "release.json").read_text(encoding="utf-8"))
    return folder, "\n".join(lines), release, (folder / "report.html").read_text(encoding="utf-8")


def test_the_release_is_what_was_printed_and_embedded(run):
    folder, printed, release, page = run
    assert str(release) in printed
    embedded = re.search(r'<pre id="release">(.*?)</pre>', page, re.DOTALL).group(1)
    assert Release.from_json(unescape(embedded)) == release
    assert sorted(path.name for path in folder.iterdir()) == ["release.json", "report.html"]


def test_a_seed_is_not_private_and_says_so(run):
    _, printed, release, page = run
    assert not release.guarantee.private
    assert "NOT PRIVATE" in printed
    assert "NOT PRIVATE" in page


def test_the_model_is_good_and_the_scores_are_marked(run):
    _, printed, _, page = run
    scores = [float(score) for score in re.findall(r"R² of \w+ ?\w* +([\d.-]+)", printed)]
    assert len(scores) == 2
    assert min(scores) > 0.5
    assert printed.index("Non-private comparison, never publish") < printed.index("R² of OLS")
    assert "R²" not in page


def test_every_coefficient_and_part_of_the_budget_is_on_the_page(run):
    _, _, release, page = run
    for name, value in zip(release.names, release.coefficients, strict=True):
        assert f'<th scope="row">{name}</th><td>{value:.6g}</td>' in page
    for part in release.split.values():
        assert part in page


def test_the_page_says_where_a_coefficient_holds(run):
    *_, release, page = run
    assert "holds between" in page
    assert '<th scope="row">longitude</th>' in page
    low, high = release.ranges[release.names.index("total_rooms")]
    assert f"<td>{low:,.0f} and {high:,.0f}</td>" in page
    unseen = replace(release, ranges=(None, *release.ranges[1:]))
    assert "<td>not seen above the noise</td>" in demo.report(unseen, plan(16_000, 9, 1.0, 1e-5))


def test_groups_are_told_of_where_there_are_any(run):
    *_, release, page = run
    assert release.method == "moments"
    assert "group" not in re.sub(r"block groups|<pre.*</pre>", "", page, flags=re.DOTALL)
    planned = plan(16_000, 9, 1.0, 1e-5, method="sequential")
    grouped = replace(
        release, method="sequential", ranges=None, n_models=452, split=planned.split()
    )
    page = demo.report(grouped, planned)
    assert "sequential, 452 groups" in page
    assert "holds between" not in page
    assert "The model is linear.</p>" in page


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (-146.2951, -90.7088, "-146.3 and -90.7"),
        (-38051.2, 42330.9, "-38,051 and 42,331"),
        (1999.98, 2000.02, "1,999.9800 and 2,000.0200"),
        (-1e-301, 1e-301, "-1e-301 and 1e-301"),
        (-1.7e308, 1.7e308, "-1.7e+308 and 1.7e+308"),
    ],
)
def test_ranges_are_readable(low, high, text):
    assert demo._between(low, high) == text


class _Balanced(HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_closed_and_loads_nothing(run):
    *_, page = run
    parser = _Balanced()
    parser.feed(page)
    assert parser.open == []
    assert not parser.seen & {"script", "link", "img", "iframe", "object", "embed"}
    assert page.startswith("<!DOCTYPE html>")
    assert "$" not in page
    assert not re.search(r"https?:|//|url\(|@import|\bon\w+=|src=|href=", page)


def test_text_is_escaped(run):
    _, _, release, _ = run
    hostile = '<script>alert("x")</script>'
    names = (hostile, *release.names[1:])
    page = demo.report(Release(**{**vars(release), "names": names}), plan(16_000, 9, 1.0, 1e-5))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_without_a_seed_the_release_is_private(tmp_path):
    try:
        status = demo.main(["--out", str(tmp_path)])
    except SystemExit as stopped:
        pytest.fail(f"stopped with {stopped.code}")
    if status == demo.REFUSED:  # one in a thousand
        return
    release = Release.from_json((tmp_path / "release.json").read_text(encoding="utf-8"))
    assert release.guarantee.private
    assert np.isfinite(release.coefficients).all()


def test_a_refusal_is_told_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise ReleaseRefused("The verdict refused. The whole budget is spent.", "verdict", 1, 1e-5)

    monkeypatch.setattr(TukeyRegressor, "fit", refuse)
    assert demo.main(["--out", str(tmp_path / "demo")]) == 3
    assert "The whole budget is spent" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()
