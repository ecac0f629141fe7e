"""TukeyRegressor: the scikit-learn face of the library, and ``select`` for models of your own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from tukeyreg.engines import Engine, MemoryEngine
from tukeyreg.errors import InvalidInput, MissingExtra, NotEnoughData, ReleaseRefused
from tukeyreg.intake import Schema, read_features, read_training
from tukeyreg.mechanisms import moments
from tukeyreg.mechanisms.moments import Model, MomentsParameters
from tukeyreg.mechanisms.noise import IntegerNoise
from tukeyreg.mechanisms.randomness import Randomness
from tukeyreg.mechanisms.select import release_vector, summaries_of_models
from tukeyreg.privacy.budget import NEIGHBORING, Budget, Guarantee, epsilon_of_rho
from tukeyreg.privacy.plan import (
    METHODS,
    Design,
    Plan,
    check_choice,
    check_n_models,
    choose,
    count_margin,
    count_noise,
    plan_units,
)
from tukeyreg.release import Release, release_of

__all__ = ["TukeyRegressor", "select"]

_FITTED = (
    "coef_",
    "intercept_",
    "feature_ranges_",
    "release_",
    "n_features_in_",
    "feature_names_in_",
    "schema_",
)


class TukeyRegressor(RegressorMixin, BaseEstimator):
    """Differentially private linear regression with no bounds and nothing to tune.

    A model is released so that adding or removing all rows of one privacy unit hardly changes
    its distribution. How depends on the method.

    Parameters
    ----------
    epsilon, delta : float
        The privacy budget. Both are required. ``delta=0`` gives pure differential privacy and
        is possible with ``method="sequential"`` only.
    method : {"auto", "moments", "sequential", "joint"}, default="auto"
        ``"moments"`` finds the scale of every column privately and then adds noise to sums over
        rows. ``"sequential"`` (private back-substitution) and ``"joint"`` (the paper's TukeyEM)
        select one model from those of m groups. ``"auto"`` is ``"moments"``, unless ``delta=0``
        or ``n_models`` ask for ``"sequential"``.
    n_models : "auto" or int, default="auto"
        The number of groups m, for the methods that have groups.
    neighboring : {"add-remove", "replace-one"}, default="add-remove"
        What one unit may do: appear or disappear (the number of units is private), or have its
        rows replaced by others (the number of units is public).
    fit_intercept : bool, default=True
    categories : mapping of column to levels, optional
        The levels of categorical columns. They are public: they never come from the data. A
        declared column is one-hot encoded with all its levels.
    expected_units : int, optional
        A public lower bound of the number of units, which saves the private count.
    split : {None, "paper"}, default=None
        For ``method="joint"``: ``"paper"`` halves epsilon and takes t = m/4.
    random_state : int, RandomState or None, default=None
        For tests and experiments only: a seed makes the release not private, and it says so.

    Attributes
    ----------
    coef_ : array of shape (n_coefficients,)
        One per design column; after one-hot encoding, where categories are declared.
    intercept_ : float
    feature_ranges_ : array of shape (n_coefficients, 2)
        With ``moments``: the model is linear between these values of a feature, and constant
        beyond them, where hardly any rows were. :meth:`predict` clips features to them.
    release_ : Release
        The model with its guarantee, for a reviewer.
    n_features_in_ : int
    feature_names_in_ : array of str
        Where the features had names.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(20_000, 3))
    >>> y = X @ [1.0, 2.0, 3.0] + rng.normal(size=20_000)
    >>> model = TukeyRegressor(epsilon=1.0, delta=1e-6, random_state=0).fit(X, y)
    >>> bool(np.allclose(model.coef_, [1, 2, 3], atol=0.2))
    True
    >>> print(model.release_.guarantee)
    NOT PRIVATE: a random_state was given, so the noise is predictable

    Notes
    -----
    Formal guarantee (Theorems 1, 2 and 4 of docs/method.md): the released model, or the refusal,
    is (epsilon, delta)-differentially private with respect to all rows of one privacy unit.
    """

    def __init__(
        self,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        method: str = "auto",
        n_models: str | int = "auto",
        neighboring: str = "add-remove",
        fit_intercept: bool = True,
        categories: Mapping[Any, Sequence[Any]] | None = None,
        expected_units: int | None = None,
        split: str | None = None,
        random_state: Any = None,
    ) -> None:
        self.epsilon = epsilon
        self.delta = delta
        self.method = method
        self.n_models = n_models
        self.neighboring = neighboring
        self.fit_intercept = fit_intercept
        self.categories = categories
        self.expected_units = expected_units
        self.split = split
        self.random_state = random_state

    def fit(self, X: Any, y: Any, privacy_unit: Any = None) -> Self:
        """Spend the budget on a release.

        Parameters
        ----------
        X : array or data frame of shape (n_rows, n_features)
            numpy, pandas, polars or Arrow. A row with a missing or non-finite value, or with a
            value outside the declared levels, is dropped, silently and whatever other rows hold.
        y : array of shape (n_rows,), or the name of a column of ``X``
        privacy_unit : array of shape (n_rows,), or the name of a column of ``X``, optional
            Whom each row belongs to; all rows of one unit are protected together. By default
            each row is its own unit.

        Raises
        ------
        InvalidInput
            The call is wrong. Nothing was spent.
        NotEnoughData
            Too few units for this budget and so many columns. At most the share of the private
            count was spent; the error says what.
        ReleaseRefused
            A private test refused. The whole budget is spent.
        """
        design = self._begin()
        with _nothing_spent():
            rows = read_training(X, y, categories=self.categories, privacy_unit=privacy_unit)
        randomness = Randomness(_seed(self.random_state))
        unit = privacy_unit if isinstance(privacy_unit, str) else "privacy unit"
        unit = "row" if privacy_unit is None else unit
        return self._release(MemoryEngine(rows, randomness), design, unit, randomness)

    def fit_files(
        self,
        source: Any = None,
        target: str | None = None,
        features: Sequence[str] | None = None,
        privacy_unit: str | None = None,
        *,
        table: str | None = None,
        query: str | None = None,
        delimiter: str = ",",
        progress: bool | None = None,
    ) -> Self:
        """Spend the budget on a release from files, however large; with ``tukeyreg[files]``.

        Parameters
        ----------
        source : path, list of paths, or None
            Parquet or CSV files, by name or by pattern (``"claims/*.parquet"``), or one DuckDB
            database. None for a query that names its files itself.
        target : str
        features : sequence of str, optional
            In the order of the coefficients. By default all columns but the target and the unit.
        privacy_unit : str, optional
            The column that tells whom a row belongs to. By default each row is its own unit.
        table, query : str, optional
            What to read from a database; or a query. It must look at every row by itself: with
            joins, aggregates, ``DISTINCT`` or ``LIMIT`` one person can move other people's rows,
            and there is no guarantee.
        delimiter : str
            Of CSV files. Their first line names the columns. What is not a number drops its row,
            and levels and privacy units are text.
        progress : bool, optional
            Whether to show how many rows were read, which is private. By default on a terminal
            only.

        Raises
        ------
        MissingExtra
            DuckDB or pyarrow is not installed. Nothing was spent.
        InvalidInput, NotEnoughData, ReleaseRefused
            As for :meth:`fit`. A file that cannot be read, or that changes meanwhile, is
            ``InvalidInput``: nothing was released, so nothing was spent.

        Examples
        --------
        >>> import pyarrow as pa, pyarrow.parquet as pq, tempfile
        >>> rng = np.random.default_rng(0)
        >>> age = rng.uniform(20, 80, 20_000)
        >>> rows = pa.table({"age": age, "charges": 3 * age + rng.normal(size=20_000)})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     pq.write_table(rows, f"{folder}/claims.parquet")
        ...     model = TukeyRegressor(epsilon=1.0, delta=1e-6, random_state=0)
        ...     model = model.fit_files(f"{folder}/*.parquet", target="charges")
        >>> round(float(model.coef_[0]), 1)
        3.0
        """
        from tukeyreg.engines import files

        design = self._begin()
        with _nothing_spent():
            files.require()
            _check_column("target", target)
            _check_streamed(design, privacy_unit)
            opened = files.FileSource(source, table=table, query=query, delimiter=delimiter)
        randomness = Randomness(_seed(self.random_state))
        with opened, _nothing_spent():
            engine = files.FileEngine(
                opened,
                str(target),
                features,
                privacy_unit,
                self.categories,
                randomness,
                progress=progress,
                for_moments=design.method == "moments",
            )
            return self._release(engine, design, privacy_unit or "row", randomness)

    def fit_spark(
        self,
        frame: Any,
        target: str | None = None,
        features: Sequence[str] | None = None,
        privacy_unit: str | None = None,
    ) -> Self:
        """Spend the budget on a release from a Spark data frame; with ``tukeyreg[spark]``.

        Tasks add up the rows of their partitions, and the driver sees group summaries, counts,
        exact sums and votes only. The library must be installed where the tasks run.

        Parameters
        ----------
        frame : pyspark.sql.DataFrame
            It must look at every row by itself, and give the same rows every time: with joins,
            aggregates, ``distinct`` or ``limit`` one person can move other people's rows, and
            there is no guarantee.
        target : str
        features : sequence of str, optional
            In the order of the coefficients. By default all columns but the target and the unit.
        privacy_unit : str, optional
            The column that tells whom a row belongs to. By default each row is its own unit.

        Raises
        ------
        MissingExtra
            PySpark, pandas or pyarrow is not installed. Nothing was spent.
        InvalidInput, NotEnoughData, ReleaseRefused
            As for :meth:`fit`. A job that fails is ``InvalidInput``: nothing was released, so
            nothing was spent.
        """
        from tukeyreg.engines import spark

        design = self._begin()
        randomness = Randomness(_seed(self.random_state))
        with _nothing_spent():
            spark.require()
            _check_column("target", target)
            _check_streamed(design, privacy_unit)
            engine = spark.SparkEngine(
                frame, str(target), features, privacy_unit, self.categories, randomness
            )
            with engine:
                return self._release(engine, design, privacy_unit or "row", randomness)

    def predict(self, X: Any) -> NDArray[np.float64]:
        """Predictions of the released model; NaN for a row with a missing or undeclared value."""
        check_is_fitted(self, "coef_")
        design = read_features(X, self.schema_)
        ranges = getattr(self, "feature_ranges_", None)
        if ranges is not None:
            design = np.clip(design, ranges[:, 0], ranges[:, 1])
        with np.errstate(all="ignore"):
            return np.asarray(design @ self.coef_ + self.intercept_, dtype=np.float64)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.non_deterministic = self.random_state is None
        tags.input_tags.allow_nan = True
        tags.regressor_tags.poor_score = True
        return tags

    def _begin(self) -> Design:
        """Forget an older model, which a refused release must not leave behind, and look ahead."""
        for name in _FITTED:
            self.__dict__.pop(name, None)
        return self._design()

    def _release(self, engine: Engine, design: Design, unit: str, randomness: Randomness) -> Self:
        # Overflow in one group is that group's own affair; a warning would tell of it.
        with np.errstate(all="ignore"):
            plan, source = self._plan(engine, design, randomness)
            fitted = _carry_out(plan, engine, bool(self.fit_intercept), randomness)
        if fitted is None:
            raise _refusal(plan)
        self._keep(fitted, engine.schema, plan, source, unit, randomness.private)
        return self

    def _design(self) -> Design:
        """Everything about the call that can be wrong before the data are looked at."""
        budget = Budget(self.epsilon, self.delta)  # type: ignore[arg-type]
        check_choice("method", self.method, METHODS)
        check_choice("neighboring", self.neighboring, NEIGHBORING)
        check_n_models(self.n_models)
        expected = self.expected_units
        if expected is not None and (
            isinstance(expected, bool)
            or not isinstance(expected, (int, np.integer))
            or expected < 1
        ):
            raise InvalidInput(
                f"expected_units must be a positive integer, got {expected!r}. Nothing was spent."
            )
        if not isinstance(self.fit_intercept, (bool, np.bool_)):
            raise InvalidInput(
                f"fit_intercept must be True or False, got {self.fit_intercept!r}. "
                "Nothing was spent."
            )
        counted = self.neighboring == "add-remove" and self.n_models == "auto" and expected is None
        method, choice = choose(self.method, budget.delta, self.n_models)
        return Design(
            method,
            self.neighboring,
            budget,
            self.split,
            counted,
            intercept=bool(self.fit_intercept),
            choice=choice,
        )

    def _plan(self, engine: Engine, design: Design, randomness: Randomness) -> tuple[Plan, str]:
        """The plan, and where its number of units comes from."""
        d = engine.n_features + int(self.fit_intercept)
        units, source, spent = self._units(engine, d, design, randomness)
        plan = plan_units(units, d, design, self.n_models)
        if not plan.enough:
            raise _not_enough(plan, source, spent)
        return plan, source

    def _units(
        self, engine: Engine, d: int, design: Design, randomness: Randomness
    ) -> tuple[int | None, str, IntegerNoise | None]:
        """A lower bound of the number of units, where it comes from, and what it cost."""
        if design.neighboring == "replace-one":
            return engine.n_units(), "public", None
        if self.expected_units is not None:
            return int(self.expected_units), "given by the caller", None
        if not design.private_count:
            return None, "not used", None
        noise = count_noise(design, d)
        lower = engine.n_valid_units() + noise.sample(randomness) - count_margin(noise)
        return lower, "noisy count", noise

    def _keep(
        self,
        fitted: Model,
        schema: Schema,
        plan: Plan,
        source: str,
        unit: str,
        private: bool,
    ) -> None:
        names = schema.design_names
        guarantee = Guarantee(
            plan.budget.epsilon, plan.budget.delta, plan.neighboring, unit, private
        )
        self.intercept_ = fitted.intercept
        self.coef_ = fitted.coefficients
        if fitted.ranges is not None:
            self.feature_ranges_ = fitted.ranges
        self.release_ = release_of(
            plan,
            names,
            tuple(self.coef_.tolist()),
            self.intercept_ if self.fit_intercept else None,
            guarantee,
            source,
            fitted.ranges,
        )
        self.schema_ = schema
        self.n_features_in_ = schema.n_features_in
        if schema.feature_names_in is not None:
            self.feature_names_in_ = schema.feature_names_in


def _seed(random_state: Any) -> int | None:
    if random_state is None:
        return None
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        return int(random_state)
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**31))
    return int(check_random_state(random_state).randint(2**31 - 1))


@contextmanager
def _nothing_spent() -> Iterator[None]:
    """Say of a wrong call that it cost nothing, and nothing of what stood behind it."""
    try:
        yield
    except (InvalidInput, MissingExtra) as error:
        raise type(error)(f"{error} Nothing was spent.") from None


def _check_column(role: str, name: object) -> None:
    if not isinstance(name, str):
        raise InvalidInput(f"{role} must be the name of a column, got {name!r}.")


def _check_streamed(design: Design, privacy_unit: str | None) -> None:
    """What engines that read rows one after the other cannot do."""
    if privacy_unit is not None:
        _check_column("privacy_unit", privacy_unit)
        if design.neighboring == "replace-one" and design.method != "moments":
            raise InvalidInput(
                "neighboring='replace-one' with a privacy unit needs all units at once for "
                f"method={design.method!r}: use 'add-remove', or method='moments'."
            )


def _carry_out(plan: Plan, engine: Engine, intercept: bool, randomness: Randomness) -> Model | None:
    """The planned mechanism on the rows; ``None`` is a refusal."""
    if isinstance(plan.parameters, MomentsParameters):
        model = moments.release(engine, intercept, plan.parameters, randomness)
        return model if model is None else _with_reference_levels(model, engine.schema, intercept)
    assert plan.n_models is not None
    summaries = engine.summaries(plan.n_models, plan.neighboring, intercept=intercept)
    vector = release_vector(summaries, plan.parameters, randomness)
    if vector is None:
        return None
    first = int(intercept)
    return Model(vector[first:].copy(), float(vector[0]) if first else 0.0, None)


def _with_reference_levels(model: Model, schema: Schema, intercept: bool) -> Model:
    """The same model, with declared levels measured against the last one that was seen.

    A usable row has a one in exactly one level of a declared column and zeros in the others.
    So a coefficient matters at 0 and 1 only, and what is added to all levels of a column can as
    well be added to the intercept. Both are public facts. A level that was not seen gets 0: it
    counts as the last one that was.
    """
    assert model.ranges is not None
    coefficients, ranges = model.coefficients.copy(), model.ranges.copy()
    constant, first = model.intercept, 0
    for column in schema.columns:
        width = len(column.design_names)
        part = slice(first, first + width)
        first += width
        if column.levels is None:
            continue
        low, high = np.clip(0.0, *ranges[part].T), np.clip(1.0, *ranges[part].T)
        constant += float(coefficients[part] @ low)
        effects = coefficients[part] * (high - low)
        seen = np.isfinite(ranges[part]).all(axis=1)
        ranges[part][seen] = [0.0, 1.0]
        if intercept and seen.any():
            last = effects[seen][-1]
            constant, effects = constant + last, np.where(seen, effects - last, 0.0)
        coefficients[part] = effects
    return Model(coefficients, float(constant), ranges)


def _not_enough(plan: Plan, source: str, spent: IntegerNoise | None) -> NotEnoughData:
    epsilon, delta = 0.0, 0.0
    if spent is not None and spent.law == "discrete Laplace":
        epsilon = spent.rate
    elif spent is not None:
        delta = plan.budget.delta
        epsilon = epsilon_of_rho(spent.rate, delta)
    cost = (
        "Nothing was spent."
        if spent is None
        else f"Only the private count of units was spent: {Budget(epsilon, delta)}."
    )
    have = "" if plan.n_models is None else f"{plan.n_models:,} groups (n_models)"
    if plan.n_units is not None:
        have = (
            f"{plan.n_units:,} unit{'s' if plan.n_units > 1 else ''}"
            + {
                "noisy count": " (a private count, lowered by its margin)",
                "given by the caller": " (expected_units)",
                "public": "",
            }[source]
        )
    advice = "; or ".join(plan.advice) or "a larger epsilon"
    plural = "s" if plan.n_coefficients > 1 else ""
    return NotEnoughData(
        f"{plan.method} needs more than {have} for {plan.n_coefficients} coefficient{plural} at "
        f"{plan.budget}. {cost} What would be enough: {advice}.",
        plan,
        epsilon,
        delta,
    )


_REFUSALS = {
    "moments": (
        "verdict",
        "the scale of the target, or of all features, did not rise above the noise, or the rounds "
        "did not settle",
        "more rows, fewer columns, a larger epsilon, or method='sequential'",
    ),
    "sequential": (
        "verdict",
        "the groups' models do not agree closely enough to release one",
        "fewer columns, a larger epsilon, or a different number of groups (n_models)",
    ),
    "joint": (
        "safety test",
        "the groups' models do not agree closely enough to release one",
        "method='sequential', which needs fewer groups and no safety test, or fewer columns",
    ),
}


def _refusal(plan: Plan) -> ReleaseRefused:
    test, reason, hint = _REFUSALS[plan.method]
    return ReleaseRefused(
        f"The {test} refused: {reason}. "
        f"The whole budget {plan.budget} is spent and there is no model. The plan put the "
        f"probability of success at {100 * plan.success_probability:.1f} %. Running again "
        f"spends the budget again. To try, with a new budget: {hint}.",
        test,
        plan.budget.epsilon,
        plan.budget.delta,
    )


def select(
    models: ArrayLike,
    curvature: ArrayLike | None = None,
    *,
    epsilon: float,
    delta: float,
    method: str = "sequential",
    split: str | None = None,
    names: Sequence[str] | None = None,
    random_state: Any = None,
) -> Release:
    """Release one vector from m model vectors that you trained on disjoint groups yourself.

    The guarantee is for one model replaced by another. It is a guarantee for people if each
    person's data went into one model, and each model was computed from its own data alone.

    Parameters
    ----------
    models : array of shape (m, d)
        What is not a number counts as 0; what is too large, as the largest number.
    curvature : array of shape (m, d, d), optional
        For ``sequential``: how sure each model is of its coefficients, e.g. the Fisher
        information at its maximum-likelihood estimate. Without it coefficients are released
        one by one, without regard to their correlation.
    epsilon, delta : float
    method : {"sequential", "joint"}
    split : None or "paper"
    names : sequence of str, optional
    random_state : optional
        For tests only; the release then says that it is not private.

    Returns
    -------
    Release
        With ``intercept=None``.

    Raises
    ------
    NotEnoughData
        If m is too small; nothing was spent.
    ReleaseRefused
        If a private test refused; the whole budget is spent.

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> models = rng.normal([3.0, -1.0], 0.1, size=(800, 2))
    >>> release = select(models, epsilon=1.0, delta=1e-6, random_state=0)
    >>> [round(value, 1) for value in release.coefficients]
    [3.0, -1.0]
    """
    vectors = _numbers("models", models, 2)
    m, d = vectors.shape
    matrices = None if curvature is None else _numbers("curvature", curvature, 3)
    if matrices is not None and matrices.shape != (m, d, d):
        raise InvalidInput(
            f"curvature must have shape {(m, d, d)}, got {matrices.shape}. Nothing was spent."
        )
    check_choice("method", method, ("sequential", "joint"))
    if names is not None and len(names) != d:
        raise InvalidInput(f"{len(names)} names for {d} coefficients. Nothing was spent.")
    design = Design(method, "replace-one", Budget(epsilon, delta), split, private_count=False)
    if m < 4:
        raise InvalidInput(f"at least 4 models are needed, got {m}. Nothing was spent.")
    plan = plan_units(None, d, design, m)
    if not plan.enough:
        raise _not_enough(plan, "not used", None)
    assert not isinstance(plan.parameters, MomentsParameters)
    randomness = Randomness(_seed(random_state))
    with np.errstate(all="ignore"):
        summaries = summaries_of_models(vectors, matrices)
        vector = release_vector(summaries, plan.parameters, randomness)
    if vector is None:
        raise _refusal(plan)
    guarantee = Guarantee(
        plan.budget.epsilon, plan.budget.delta, "replace-one-model", "model", randomness.private
    )
    labels = tuple(names) if names is not None else tuple(f"x{j}" for j in range(d))
    return release_of(plan, labels, tuple(vector.tolist()), None, guarantee, "not used")


def _numbers(name: str, values: ArrayLike, dimensions: int) -> NDArray[np.float64]:
    try:
        array = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InvalidInput(f"{name} must be an array of numbers. Nothing was spent.") from None
    if array.ndim != dimensions or 0 in array.shape:
        raise InvalidInput(
            f"{name} must have {dimensions} dimensions and no empty one, got shape "
            f"{array.shape}. Nothing was spent."
        )
    return np.nan_to_num(array, nan=0.0)
