"""scikit-learn's own checks, and the ones that a private estimator cannot pass, with the reason."""

import pandas as pd
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from tukeyreg import TukeyRegressor
from tukeyreg.datasets import load_california

DROPS_ROWS = (
    "a row whose target is not finite is dropped, row by row: an error would tell of one person"
)
HANDFUL = (
    "fits a handful of rows, which no epsilon of ordinary size can protect: NotEnoughData is right"
)

#: With a budget so large that a few rows are enough, only this one check cannot pass.
BY_DESIGN = {"check_supervised_y_no_nan": DROPS_ROWS}

#: With an ordinary budget, the checks that fit 10 to 200 rows stop at NotEnoughData.
AT_ORDINARY_BUDGET = dict.fromkeys(
    (
        "check_dict_unchanged",
        "check_dont_overwrite_parameters",
        "check_dtype_object",
        "check_estimators_dtypes",
        "check_estimators_fit_returns_self",
        "check_estimators_overwrite_params",
        "check_estimators_pickle",
        "check_f_contiguous_array_estimator",
        "check_fit2d_1feature",
        "check_fit2d_1sample",
        "check_fit2d_predict1d",
        "check_fit_check_is_fitted",
        "check_fit_idempotent",
        "check_fit_score_takes_y",
        "check_n_features_in",
        "check_n_features_in_after_fitting",
        "check_positive_only_tag_during_fit",
        "check_readonly_memmap_input",
        "check_regressor_data_not_an_array",
        "check_regressors_int",
        "check_regressors_no_decision_function",
        "check_regressors_train",
        "check_supervised_y_2d",
    ),
    HANDFUL,
)

# The warning is scikit-learn's about a check that it skips without SCIPY_ARRAY_API.
pytestmark = pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")


@parametrize_with_checks(
    [TukeyRegressor(epsilon=1e4, delta=1e-6, n_models=4, random_state=0)],
    expected_failed_checks=lambda estimator: BY_DESIGN,
)
def test_with_a_budget_that_makes_a_handful_enough(estimator, check):
    check(estimator)


@parametrize_with_checks(
    [TukeyRegressor(epsilon=1.0, delta=1e-6)],
    expected_failed_checks=lambda estimator: AT_ORDINARY_BUDGET,
)
def test_with_an_ordinary_budget(estimator, check):
    check(estimator)


def california():
    data = load_california()
    return pd.DataFrame(data.X, columns=list(data.feature_names)), data.y


def model(**options):
    return TukeyRegressor(epsilon=1.0, delta=1e-6, random_state=0, **options)


def test_clone_keeps_the_parameters_and_drops_the_fit():
    X, y = california()
    fitted = model(n_models=400, fit_intercept=True).fit(X, y)
    copy = clone(fitted)
    assert copy.get_params() == fitted.get_params()
    assert not hasattr(copy, "coef_")


def test_a_pipeline_hands_frames_with_names_through():
    X, y = california()
    pipeline = make_pipeline(
        FunctionTransformer(lambda frame: frame.assign(rooms=frame["total_rooms"] / 1000)),
        model(),
    ).set_output(transform="pandas")
    pipeline.fit(X, y)
    assert list(pipeline[-1].feature_names_in_) == [*X.columns, "rooms"]
    assert pipeline[-1].release_.names == (*X.columns, "rooms")
    assert pipeline.predict(X).shape == (len(X),)


def test_a_pipeline_hands_the_privacy_unit_to_the_regressor():
    X, y = california()
    pipeline = make_pipeline(StandardScaler(), model())
    pipeline.fit(X, y, tukeyregressor__privacy_unit=[i // 2 for i in range(len(X))])
    assert pipeline[-1].release_.guarantee.unit == "privacy unit"


def test_cross_validation_scores_and_grid_search():
    X, y = california()
    rows = (
        X.notna().all(axis=1).to_numpy()
    )  # scikit-learn's scorer refuses the NaN of a dropped row
    X, y = X[rows], y[rows]
    scores = cross_val_score(model(), X, y, cv=3)
    assert (scores > 0.4).all()
    search = GridSearchCV(model(), {"fit_intercept": [True, False]}, cv=2).fit(X, y)
    assert search.best_params_["fit_intercept"]
