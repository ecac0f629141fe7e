"""The default fit from end to end: ``method="auto"``, which is ``moments`` where delta > 0."""

import json
import math
import pickle
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from tukeyreg import (
    InvalidInput,
    NotEnoughData,
    Release,
    ReleaseRefused,
    TukeyRegressor,
    regression,
)

SLOPES = np.array([1.0, -2.0, 3.0])


def model(**options):
    return TukeyRegressor(**({"epsilon": 1.0, "delta": 1e-6, "random_state": 0} | options))


def table(n=3000, seed=0, slopes=SLOPES, noise=1.0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, len(slopes)))
    return X, X @ slopes + 0.5 + noise * rng.normal(size=n)


def r2(fitted, X, y):
    """R2 that does not overflow."""
    size = np.abs(y).max()
    rest, whole = (y - fitted.predict(X)) / size, (y - y.mean()) / size
    return 1 - float(rest @ rest) / float(whole @ whole)


def everything(fitted):
    """Coefficients, intercept and ranges in one vector."""
    return np.concatenate([fitted.coef_, [fitted.intercept_], fitted.feature_ranges_.reshape(-1)])


# ---------------------------------------------------------------- the choice


def test_the_default_is_auto_and_auto_is_moments():
    X, y = table()
    assert TukeyRegressor(epsilon=1.0, delta=1e-6).method == "auto"
    default, named = model().fit(X, y), model(method="moments").fit(X, y)
    assert default.release_.method == named.release_.method == "moments"
    assert default.release_.choice == "auto: delta > 0"
    assert named.release_.choice == "given"
    assert np.array_equal(everything(default), everything(named))
    assert replace(default.release_, choice="given") == named.release_


@pytest.mark.parametrize(
    ("options", "choice"),
    [({"delta": 0.0}, "auto: delta = 0"), ({"n_models": 600}, "auto: n_models is given")],
)
def test_auto_is_sequential_where_moments_cannot_be(options, choice):
    X, y = table(6000)
    release = model(**options).fit(X, y).release_
    assert (release.method, release.choice) == ("sequential", choice)
    assert f"sequential, {release.n_models:,} groups ({choice})" in str(release)


def test_the_release_says_what_was_done():
    X, y = table()
    release = model().fit(X, y).release_
    assert release.accounting == "divergence"
    assert release.n_models is None
    assert release.n_units_source == "noisy count"
    assert 2600 < release.n_units < 3000
    assert set(release.split) >= {"private count of units", "4 locations", "scales", "gradients"}
    text = str(release)
    assert "moments (auto: delta > 0)" in text
    assert text.count(" for values from ") == 3
    assert "NOT PRIVATE" in text
    private = model(random_state=None).fit(X, y).release_
    assert str(private.guarantee).startswith("(epsilon = 1, delta = 1e-06)-differential privacy")


# ---------------------------------------------------------------- one table, many kinds of it


def test_every_kind_of_table_gives_the_same_model():
    X, y = table()
    names = ["a", "b", "c"]
    frame = pd.DataFrame(X, columns=names).assign(y=y)
    expected = everything(model().fit(X, y))
    kinds = [
        (frame[names], frame["y"]),
        (frame, "y"),
        (pl.DataFrame(frame.to_dict("list")), "y"),
        (pa.Table.from_pandas(frame), "y"),
        (np.asfortranarray(X), y),
        (X.tolist(), y.tolist()),
        (frame.astype({"b": "Float64"}), "y"),
    ]
    for features, target in kinds:
        assert np.array_equal(everything(model().fit(features, target)), expected)


def test_single_precision_is_close_to_double():
    X, y = table()
    single, double = model().fit(X.astype(np.float32), y), model().fit(X, y)
    assert np.allclose(single.coef_, double.coef_, atol=1e-3)
    assert np.allclose(single.feature_ranges_, double.feature_ranges_, rtol=1e-3)
    assert single.coef_.dtype == np.float64
    assert single.predict(X.astype(np.float32)).dtype == np.float64


def test_rows_that_cannot_be_used_are_dropped():
    X, y = table()
    spoilt = np.vstack([X, [[math.nan, 1, 1], [1, math.inf, 1], [1, 1, 1]]])
    targets = np.append(y, [1.0, 1.0, math.nan])
    assert np.array_equal(everything(model().fit(spoilt, targets)), everything(model().fit(X, y)))


# ---------------------------------------------------------------- units


def test_units_with_many_rows():
    rng = np.random.default_rng(0)
    X, y = table(12_000)
    units = rng.permutation(np.repeat(np.arange(2000), 6))
    fitted = model().fit(X, y, privacy_unit=units)
    assert 1600 < fitted.release_.n_units < 2000
    assert fitted.release_.guarantee.unit == "privacy unit"
    assert np.allclose(fitted.coef_, SLOPES, atol=0.25)
    # A unit's order of rows and its name do not matter; that rows have units does.
    names = np.array([f"person {unit}" for unit in range(2000)])[units]
    named = model().fit(X, y, privacy_unit=names)
    assert np.allclose(named.coef_, SLOPES, atol=0.25)
    assert not np.array_equal(fitted.coef_, model().fit(X, y).coef_)


def test_a_unit_of_very_many_rows_cannot_bend_the_model():
    X, y = table(3000)
    rng = np.random.default_rng(1)
    theirs = rng.normal(size=(20_000, 3))
    rows, target = np.vstack([X, theirs]), np.append(y, theirs @ [-9.0, 9.0, -9.0])
    units = np.append(np.arange(3000), np.full(20_000, 3000))
    bent = TukeyRegressor(epsilon=1.0, delta=1e-6, random_state=0).fit(rows, target)
    assert np.abs(bent.coef_ - SLOPES).max() > 2
    held = model().fit(rows, target, privacy_unit=units)
    assert np.allclose(held.coef_, SLOPES, atol=0.25)


def test_replaced_units_are_counted_in_public():
    X, y = table()
    fitted = model(neighboring="replace-one").fit(X, y)
    release = fitted.release_
    assert (release.n_units, release.n_units_source) == (3000, "public")
    assert "private count of units" not in release.split
    assert np.allclose(fitted.coef_, SLOPES, atol=0.3)
    private = model(neighboring="replace-one", random_state=None).fit(X, y).release_
    assert "when one row is replaced by others" in str(private.guarantee)
    assert release.noise_ratio > 1.5 * model().fit(X, y).release_.noise_ratio


def test_an_expected_number_of_units_saves_the_count():
    X, y = table()
    release = model(expected_units=2500).fit(X, y).release_
    assert (release.n_units, release.n_units_source) == (2500, "given by the caller")
    assert "private count of units" not in release.split
    with pytest.raises(NotEnoughData, match=r"expected_units.*Nothing was spent") as caught:
        model(expected_units=100).fit(X, y)
    assert caught.value.epsilon_spent == caught.value.delta_spent == 0


# ---------------------------------------------------------------- the intercept and predictions


def test_without_an_intercept():
    X, y = table()
    fitted = model(fit_intercept=False).fit(X, y - 0.5)
    assert fitted.intercept_ == 0.0
    assert fitted.release_.intercept is None
    assert "(intercept)" not in str(fitted.release_)
    assert "locations" not in " ".join(fitted.release_.split)
    assert np.allclose(fitted.coef_, SLOPES, atol=0.15)
    assert np.array_equal(fitted.feature_ranges_[:, 0], -fitted.feature_ranges_[:, 1])
    assert np.array_equal(fitted.predict(np.zeros((2, 3))), [0.0, 0.0])


def test_predictions_are_linear_within_the_ranges_and_constant_beyond():
    X, y = table()
    fitted = model().fit(X, y)
    low, high = fitted.feature_ranges_.T
    wild = X[:200] * 10.0 ** np.random.default_rng(1).integers(-1, 9, size=(200, 1))
    assert np.any(wild > high)
    clipped = np.clip(wild, low, high)
    assert np.array_equal(fitted.predict(wild), clipped @ fitted.coef_ + fitted.intercept_)
    assert np.array_equal(fitted.predict(X), X @ fitted.coef_ + fitted.intercept_)
    most = np.abs(fitted.coef_ * np.maximum(-low, high)).sum() + abs(fitted.intercept_)
    assert np.abs(fitted.predict(np.full((1, 3), 1e308))).max() <= most * (1 + 1e-9)


def test_a_row_with_a_missing_value_is_predicted_to_be_missing():
    X, y = table()
    fitted = model().fit(X, y)
    rows = np.array([[1.0, math.nan, 0.0], [1.0, 2.0, 0.0]])
    assert np.isnan(fitted.predict(rows)).tolist() == [True, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(fitted.predict(np.full((3, 3), math.nan))).all()


def test_ranges_belong_to_moments_and_go_with_it():
    X, y = table(6000)
    fitted = model()
    assert fitted.fit(X, y).feature_ranges_.shape == (3, 2)
    for options in ({"method": "sequential"}, {"method": "joint", "epsilon": 4.0}):
        fitted.set_params(method="auto", epsilon=1.0).fit(X, y)
        fitted.set_params(**options).fit(X, y)
        assert not hasattr(fitted, "feature_ranges_")
        assert fitted.release_.ranges is None
        far = np.full((1, 3), 1e6)
        assert np.array_equal(fitted.predict(far), far @ fitted.coef_ + fitted.intercept_)


def test_a_fit_that_fails_leaves_no_older_model_behind():
    X, y = table()
    fitted = model().fit(X, y)
    with pytest.raises(NotEnoughData):
        fitted.fit(X[:20], y[:20])
    assert not [name for name in vars(fitted) if name.endswith("_")]


# ---------------------------------------------------------------- the release as JSON


def with_constant():
    X, y = table()
    return np.column_stack([X, np.full(len(y), 5.0)]), y


def test_a_release_survives_json():
    X, y = with_constant()
    for release in (model().fit(X, y).release_, model(fit_intercept=False).fit(X, y).release_):
        text = release.to_json()
        again = Release.from_json(text)
        assert again == release
        assert again.to_json() == text
        assert str(again) == str(release)
    content = json.loads(model().fit(X, y).release_.to_json())
    assert content["ranges"][3] is None
    assert all(low < high for low, high in content["ranges"][:3])


@pytest.mark.parametrize(
    "ranges",
    [
        [None, None, None],  # one too few
        [None] * 5,
        [[0.0, 1.0], [0.0], None, None],
        [[0.0, "much"], None, None, None],
        [[0.0, None], None, None, None],
        [0.0, 1.0, 2.0, 3.0],
        "wide",
        7,
        {"x0": [0.0, 1.0]},
    ],
)
def test_damaged_ranges_are_refused(ranges):
    X, y = with_constant()
    content = json.loads(model().fit(X, y).release_.to_json())
    content["ranges"] = ranges
    with pytest.raises(InvalidInput):
        Release.from_json(json.dumps(content))


def test_a_release_is_enough_to_predict():
    X, y = with_constant()
    fitted = model().fit(X, y)
    release = Release.from_json(fitted.release_.to_json())
    far = 30 * X
    for j, pair in enumerate(release.ranges):
        if pair is not None:
            far[:, j] = np.clip(far[:, j], *pair)
    predicted = far @ np.array(release.coefficients) + release.intercept
    assert np.allclose(fitted.predict(30 * X), predicted, rtol=1e-12)


# ---------------------------------------------------------------- declared categories

LEVELS = {"region": ["north", "east", "south"], "kind": [0, 1]}


def people(n=4000, seed=0, rare=0.3):
    rng = np.random.default_rng(seed)
    region = rng.choice(LEVELS["region"], n, p=[0.5, 0.5 - rare, rare])
    frame = pd.DataFrame(
        {"age": rng.normal(40, 10, n), "region": region, "kind": rng.integers(0, 2, n)}
    )
    effects = frame["region"].map({"north": 0.0, "east": 2.0, "south": -3.0})
    frame["y"] = 0.1 * frame["age"] + effects + 1.5 * frame["kind"] + rng.normal(size=n)
    return frame


def test_declared_levels_are_measured_against_the_last(monkeypatch):
    frame = people()
    kept = []
    plain = regression._with_reference_levels

    def watched(*arguments):
        kept.append(arguments[0])
        return plain(*arguments)

    monkeypatch.setattr(regression, "_with_reference_levels", watched)
    fitted = model(categories=LEVELS).fit(frame, "y")
    names = list(fitted.release_.names)
    effect = dict(zip(names, fitted.coef_, strict=True))
    assert len(names) == 1 + 3 + 2
    assert fitted.coef_[3] == fitted.coef_[5] == 0.0
    assert np.allclose(fitted.coef_, [0.1, 3.0, 5.0, 0.0, -1.5, 0.0], atol=0.5), effect
    # The model before says the same of every row, however far its numbers are.
    (before,) = kept
    assert np.abs(before.coefficients[[3, 5]]).min() > 0
    features = frame.drop(columns="y").assign(age=lambda f: f["age"] * 50)
    after = fitted.predict(features)
    fitted.coef_, fitted.intercept_ = before.coefficients, before.intercept
    fitted.feature_ranges_ = before.ranges
    assert np.allclose(fitted.predict(features), after, rtol=1e-12, atol=1e-9)


def test_without_an_intercept_levels_keep_their_own_effects():
    frame = people()
    fitted = model(categories=LEVELS, fit_intercept=False).fit(frame, "y")
    assert fitted.intercept_ == 0.0
    assert np.all(fitted.coef_ != 0)
    assert r2(fitted, frame.drop(columns="y"), frame["y"].to_numpy()) > 0.7


@pytest.mark.parametrize("rare", [0.0, 0.0005])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_level_that_hardly_anyone_has_counts_as_the_last_that_was_seen(rare, place):
    regions = ["north", "east"]
    regions.insert(place, "south")
    frame = people(rare=rare)
    fitted = model(categories=LEVELS | {"region": regions}).fit(frame, "y")
    release = fitted.release_
    assert [pair is None for pair in release.ranges[1:4]] == [r == "south" for r in regions]
    effect = dict(zip(release.names, release.coefficients, strict=True))
    assert effect["region=south"] == effect["region=east"] == 0.0
    assert effect["region=north"] == pytest.approx(-2, abs=0.5)
    features = frame.drop(columns="y")
    assert r2(fitted, features, frame["y"].to_numpy()) > 0.5
    south, east = (features.assign(region=region) for region in ("south", "east"))
    assert np.array_equal(fitted.predict(south), fitted.predict(east))


def test_a_row_of_an_undeclared_level_is_predicted_to_be_missing():
    frame = people()
    fitted = model(categories=LEVELS).fit(frame, "y")
    rows = frame.drop(columns="y").head(2).assign(region=["west", "north"])
    assert np.isnan(fitted.predict(rows)).tolist() == [True, False]


# ---------------------------------------------------------------- what does not vary


@pytest.mark.parametrize("value", [5.0, 0.0, -1e9, 0.1, 1e300, 1e-300])
def test_a_constant_column_has_coefficient_zero(value):
    X, y = table()
    X[:, 1] = value
    fitted = model().fit(X, y)
    assert fitted.coef_[1] == 0.0
    assert fitted.release_.ranges[1] is None
    assert fitted.release_.ranges[0] is not None
    assert fitted.feature_ranges_[1].tolist() == [-math.inf, math.inf]
    assert "x1" in fitted.release_.names
    assert "(not seen above the noise)" in str(fitted.release_)
    assert np.allclose(fitted.coef_[[0, 2]], [1, 3], atol=0.4)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda X, y: (X, np.full_like(y, 7.3)),
        lambda X, y: (X, np.zeros_like(y)),
        lambda X, y: (X, np.full_like(y, -1e300)),
        lambda X, y: (np.full_like(X, 4.2), y),
        lambda X, y: (np.zeros_like(X), y),
    ],
)
def test_nothing_to_find_is_a_refusal(spoil):
    fitted = model()
    with pytest.raises(ReleaseRefused, match="whole budget") as caught:
        fitted.fit(*spoil(*table()))
    assert (caught.value.epsilon_spent, caught.value.delta_spent) == (1.0, 1e-6)
    assert caught.value.test == "verdict"
    assert not hasattr(fitted, "coef_")


@pytest.mark.parametrize("n", [1, 20])
def test_too_few_units(n):
    X, y = table(n)
    with pytest.raises(NotEnoughData, match="Only the private count") as caught:
        model().fit(X, y)
    assert 0 < caught.value.epsilon_spent < 0.2
    assert caught.value.delta_spent == 1e-6
    assert caught.value.plan.method == "moments"
    with pytest.raises(NotEnoughData, match="Nothing was spent") as caught:
        model(neighboring="replace-one").fit(X, y)
    assert caught.value.epsilon_spent == caught.value.delta_spent == 0
    assert pickle.loads(pickle.dumps(caught.value)).plan == caught.value.plan


# ---------------------------------------------------------------- units of measurement


@pytest.mark.parametrize(
    ("x_factor", "y_factor", "shift"),
    [
        (1e300, 1.0, 0.0),
        (1e-300, 1.0, 0.0),
        (1.0, 1e300, 0.0),
        (1.0, 1e-300, 0.0),
        (1e-150, 1e150, 0.0),
        (1.0, 1.0, 1e9),
        (1e100, 1e100, 1e109),
    ],
)
def test_the_units_of_measurement_do_not_matter(x_factor, y_factor, shift):
    X, y = table()
    plain = model().fit(X, y)
    rows, target = X * x_factor + shift, y * y_factor
    fitted = model().fit(rows, target)
    slopes = fitted.coef_ * x_factor / y_factor
    assert np.allclose(slopes, SLOPES, atol=0.2)
    assert abs(r2(fitted, rows, target) - r2(plain, X, y)) < 0.01
    width = np.ptp(fitted.feature_ranges_ / x_factor, axis=1)
    assert np.allclose(width, np.ptp(plain.feature_ranges_, axis=1), rtol=0.3)


def test_a_range_that_overflows_is_not_said_to_be_unseen():
    X, y = table()
    fitted = model().fit(X * 3e307, y)
    assert np.all(fitted.coef_ != 0)
    assert "not seen" not in str(fitted.release_)


# ---------------------------------------------------------------- an estimator among others


def test_clones_pipelines_and_pickles():
    X, y = table()
    fitted = model().fit(X, y)
    assert np.array_equal(clone(fitted).fit(X, y).coef_, fitted.coef_)
    assert not hasattr(clone(fitted), "coef_")
    again = pickle.loads(pickle.dumps(fitted))
    assert again.release_ == fitted.release_
    assert np.array_equal(again.predict(5 * X), fitted.predict(5 * X))
    scaled = make_pipeline(StandardScaler(), model()).fit(100 * X, y)
    assert np.allclose(scaled.predict(100 * X), fitted.predict(X), atol=1.0)
    assert scaled[-1].release_.method == "moments"


def test_no_warning_whatever_the_table():
    X, y = table()
    wild = X.copy()
    wild[::7] *= 1e300
    wild[::11] = -1.7e308
    wild[::13] = 5e-324
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for features, target in [(X, y), (wild, y), (X, y * 1e307), (wild, wild[:, 0])]:
            for intercept in (True, False):
                try:
                    fitted = model(fit_intercept=intercept).fit(features, target)
                except ReleaseRefused:
                    continue
                fitted.predict(features)
                str(fitted.release_)


def test_nothing_but_what_was_released_is_kept():
    X, y = table()
    X[0, 0], y[0] = 987.654321, -123.456789
    fitted = model().fit(X, y)
    public = {"coef_", "intercept_", "feature_ranges_", "release_", "n_features_in_", "schema_"}
    assert set(vars(fitted)) == set(fitted.get_params()) | public
    named = model().fit(pd.DataFrame(X, columns=list("abc")), y)
    assert set(vars(named)) == set(vars(fitted)) | {"feature_names_in_"}
    assert repr(fitted) == repr(model())
    kept = pickle.dumps(fitted)
    assert len(kept) < 6000  # a column alone has 24,000 bytes
    for value in (X[0, 0], y[0], *X[1]):
        assert np.float64(value).tobytes() not in kept
        assert repr(float(value)) not in fitted.release_.to_json()


def test_a_seed_repeats_a_release_and_no_seed_does_not():
    X, y = table()
    assert model().fit(X, y).release_ == model().fit(X, y).release_
    assert np.array_equal(everything(model().fit(X, y)), everything(model().fit(X, y)))
    assert model(random_state=1).fit(X, y).release_ != model().fit(X, y).release_
    first, second = (model(random_state=None).fit(X, y) for _ in range(2))
    assert np.all(first.coef_ != second.coef_)
    assert np.all(first.feature_ranges_ != second.feature_ranges_)


# ---------------------------------------------------------------- accuracy


@pytest.fixture(scope="module")
def gaussian():
    slopes = np.random.default_rng(3).normal(size=10)
    return table(2000, seed=4, slopes=slopes, noise=float(np.linalg.norm(slopes)) / 2)


def scores(X, y, fresh, **options):
    return [r2(model(random_state=seed, **options).fit(X, y), *fresh) for seed in range(5)]


def test_accuracy_on_a_gaussian_table(gaussian):
    X, y = gaussian
    design = np.column_stack([X, np.ones(len(y))])
    rest = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    best = 1 - rest.var() / y.var()
    assert best > 0.7
    assert np.median(scores(X, y, gaussian)) > 0.9 * best
    # and that is not for want of noise
    assert np.median(scores(X, y, gaussian, epsilon=0.5)) < np.median(scores(X, y, gaussian)) < best


def test_correlated_columns(gaussian):
    X, y = gaussian
    mixed = X @ (np.eye(10) + 0.5 * np.ones((10, 10)))
    assert np.median(scores(mixed, y, (mixed, y), epsilon=2.0)) > 0.6


@pytest.mark.parametrize("where", ["X", "y", "both"])
@pytest.mark.parametrize("size", [1e3, 1e9, 1e200])
def test_heavy_outliers_do_not_ruin_it(gaussian, where, size):
    X, y = (part.copy() for part in gaussian)
    rng = np.random.default_rng(5)
    at = rng.random(len(y)) < 0.01
    if where != "y":
        X[at] = size * rng.standard_cauchy(size=(at.sum(), 10))
    if where != "X":
        y[at] = size * rng.standard_cauchy(size=at.sum())
    clean = gaussian[0][~at], gaussian[1][~at]
    design = np.column_stack([X, np.ones(len(y))])
    with np.errstate(all="ignore"):
        ruined = np.linalg.lstsq(design / design.max(), y, rcond=None)[0] / design.max()
        rest = clean[1] - np.column_stack([clean[0], np.ones((~at).sum())]) @ ruined
        assert not rest.var() < 0.9 * clean[1].var()
    assert np.median(scores(X, y, clean)) > 0.6


@pytest.mark.parametrize("epsilon", [1e6, 1e17, 1e25])
@pytest.mark.parametrize("rows", [19_115, 19_116, 30_000])
@pytest.mark.parametrize("expected", [20_000, None])
def test_an_absurd_budget_raises_nothing_that_depends_on_the_rows(epsilon, rows, expected):
    regressor = TukeyRegressor(
        epsilon=epsilon, delta=1e-6, fit_intercept=False, expected_units=expected, random_state=1
    )
    regressor.fit(np.ones((rows, 1)), np.full(rows, 0.75))
    assert abs(regressor.coef_[0] - 0.75) < 0.01
