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

# A note on a refusal that is not in the message.
NOTES = ("one unit is one vote", "coefficients beyond about")


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
    elif call.startswith("fit(") and ".predict(" not in call:
        assert "Nothing was spent" in text
        assert isinstance(caught.value, TukeyregError)


@pytest.mark.parametrize(
    ("call", "coefficients"),
    [
        ("fit(np.column_stack([X, np.ones(4000)]))", [1, 2, 0]),
        ("fit(np.column_stack([X, X[:, 0]]))", [1, 2, 0]),
        ("fit(np.column_stack([X[:, 0] * 1e12, X[:, 1] * 1e-9]))", [1e-12, 2e9]),
        ("fit(X, np.zeros(4000))", [0, 0]),
        ("fit(X, y, n_models=4000)", [0, 0]),
        ("fit(X.tolist(), y.tolist())", [1, 2]),
    ],
)
def test_what_is_released(names, call, coefficients):
    assert np.allclose(eval(call, names).coef_, coefficients, rtol=0.1, atol=0)


def test_the_order_of_collinear_columns(names):
    X = names["X"]
    fitted = eval("fit", names)(np.column_stack([X[:, 0], X[:, 0], X[:, 1]]))
    assert np.allclose(fitted.coef_, [1, 0, 2], atol=0.1)
