"""docs/errors.md is true: every call in its tables has the outcome that stands beside it."""

import doctest
import re
from pathlib import Path

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

import tukeyreg
from tukeyreg import NotEnoughData, ReleaseRefused, TukeyregError

PAGE = (Path(__file__).parent.parent / "docs" / "errors.md").read_text()
ROWS = re.findall(r"^\| `(.+?)` \| (`\w+`|released) \| (.*?) ?\|$", PAGE, re.MULTILINE)
KINDS = {name: kind for name, kind in vars(tukeyreg).items() if isinstance(kind, type)}

# Notes on failures that are not in the message.
NOTES = (
    "a lower bound that is none",
    "coefficients beyond about",
    "no feature varies",
    "one unit counts as one row",
    "the rows with an undeclared level",
)


@pytest.fixture(scope="module")
def names():
    scope = {}
    for example in doctest.DocTestParser().get_examples(PAGE):
        exec(example.source, scope)
    return scope


def test_the_page_has_its_rows():
    assert len(ROWS) > 80
    assert {outcome for _, outcome, _ in ROWS} >= {
        "released",
        "`InvalidInput`",
        "`UndeclaredCategory`",
        "`NotEnoughData`",
        "`ReleaseRefused`",
    }


@pytest.mark.parametrize(("call", "outcome", "message"), ROWS)
def test_outcome(names, call, outcome, message):
    if outcome == "released":
        eval(call, names)
        return
    kind = KINDS.get(outcome.strip("`"), NotFittedError)
    with pytest.raises(kind) as caught:
        eval(call, names)
    assert type(caught.value) in (kind, *kind.__subclasses__())
    text = str(caught.value)
    assert message in text or message.startswith(NOTES)
    if isinstance(caught.value, (NotEnoughData, ReleaseRefused)):
        assert "spent" in text
    elif call.startswith(("fit(", "files(")) and ".predict(" not in call:
        assert "Nothing was spent" in text
        assert isinstance(caught.value, TukeyregError)


@pytest.mark.parametrize(
    ("call", "coefficients"),
    [
        ("fit(np.column_stack([X, np.ones(4000)]))", [1, 2, 0]),
        ("fit(np.column_stack([X, np.arange(4000) < 5]))", [1, 2, 0]),
        ('fit(np.column_stack([X, X[:, 0]]), method="sequential")', [1, 2, 0]),
        ("fit(np.column_stack([X[:, 0] * 1e12, X[:, 1] * 1e-9]))", [1e-12, 2e9]),
        ('fit(X, np.zeros(4000), method="sequential")', [0, 0]),
        ('fit(np.ones((4000, 2)), method="sequential")', [0, 0]),
        ("fit(X * 1e-300)", [1e300, 2e300]),
        ("fit(X * 1e300)", [1e-300, 2e-300]),
        ("fit(X, y * 1e300)", [1e300, 2e300]),
        ("fit(X, y, n_models=4000)", [0, 0]),
        ("fit(X.tolist(), y.tolist())", [1, 2]),
    ],
)
def test_what_is_released(names, call, coefficients):
    assert np.allclose(eval(call, names).coef_, coefficients, rtol=0.1, atol=0)


def test_the_order_of_collinear_columns(names):
    X = names["X"]
    columns = np.column_stack([X[:, 0], X[:, 0], X[:, 1]])
    fitted = eval("fit", names)(columns, method="sequential")
    assert np.allclose(fitted.coef_, [1, 0, 2], atol=0.1)


def test_collinear_columns_share_their_effect(names):
    first, second, third = eval("fit(np.column_stack([X, X[:, 0]]))", names).coef_
    assert np.allclose([first + third, second], [1, 2], atol=0.1)


def test_a_level_that_nobody_has(names):
    levels = ["north", "south", "east"]
    fitted = eval("fit", names)(names["frame"], "charges", categories={"region": levels})
    north, south, east = fitted.coef_[2:]
    assert east == 0
    assert np.isclose(north, south, atol=0.3)  # the data have no effect of a region


def test_auto_is_moments_unless_the_arguments_ask_for_groups(names):
    for call, method in (
        ("fit()", "moments"),
        ("fit(delta=0)", "sequential"),
        ("fit(n_models=600)", "sequential"),
    ):
        assert eval(call, names).release_.method == method
