"""Plans of ``moments``: parts that add up, promises that are kept, advice that is true."""

import itertools
import math
import pickle
import re
import time
from dataclasses import FrozenInstanceError, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import tukeyreg
from law_checks import P_LIMIT
from plan_text import amount, printed_table, with_advice
from tukeyreg import InvalidInput
from tukeyreg.mechanisms import moments
from tukeyreg.mechanisms.randomness import Randomness
from tukeyreg.privacy.budget import Budget, largest_rho
from tukeyreg.privacy.composition import _Grid, sequence_delta
from tukeyreg.privacy.plan_moments import MomentsPlanner
from tukeyreg.summaries.rows import UnitRows

LENIENT = {"deadline": None}
BOTH = ["add-remove", "replace-one"]


def plan(*arguments, method="moments", **options):
    return tukeyreg.plan(*arguments, method=method, **options)


# ---------------------------------------------------------------- the parts add up


def gaussian_sum(p):
    """What the normal steps cost, from what the mechanism does: one by one."""
    steps = [p.profile_rho]  # one histogram for all columns
    steps += [p.norm_rho, p.gram_rho] * 2
    for rho in p.round_rho:
        steps += [p.residual_rho, rho]
    return math.fsum([*steps, p.residual_rho])


def within(budget, p, medians, count, accounting):
    """Whether the parts stay within a budget, by zCDP or by the divergence of the sequence."""
    rates = () if count is None else (count.rate,)
    normal = gaussian_sum(p)
    if accounting == "zCDP":
        rho = sum(rates) + medians * p.location_epsilon**2 / 8 + normal
        return rho <= largest_rho(budget.epsilon, budget.delta)
    assert accounting == "divergence"
    found = sequence_delta(budget.epsilon, medians, p.location_epsilon, rates, normal=normal)
    return found <= budget.delta


def plan_is_within(made, **parts):
    p = replace(made.parameters, **parts)
    return within(made.budget, p, made.n_coefficients, made.count, made.accounting)


def normal_parts(p, factor):
    names = ("profile_rho", "norm_rho", "gram_rho", "residual_rho")
    parts = {name: getattr(p, name) * factor for name in names}
    return parts | {"round_rho": tuple(rho * factor for rho in p.round_rho)}


def check_parts(made):
    p = made.parameters
    assert p.gaussian_rho == pytest.approx(gaussian_sum(p), rel=1e-12)
    assert min(p.profile_rho, p.norm_rho, p.gram_rho, p.residual_rho, *p.round_rho) > 0
    assert plan_is_within(made)
    # One per cent more of any large part is too much, and so is half as much again of the count.
    assert not plan_is_within(made, **normal_parts(p, 1.01))
    assert not plan_is_within(made, location_epsilon=1.01 * p.location_epsilon)
    *first, last = p.round_rho
    assert not plan_is_within(made, round_rho=(*first, 1.01 * last))
    assert not plan_is_within(made, gram_rho=1.01 * p.gram_rho)
    if made.count is not None:
        dearer = replace(made, count=replace(made.count, rate=1.5 * made.count.rate))
        assert not plan_is_within(dearer)


units = st.floats(0, math.log(1e12)).map(lambda x: int(math.exp(x)))
epsilons = st.floats(math.log(0.005), math.log(100)).map(math.exp)
deltas = st.floats(-16, math.log10(0.9)).map(lambda x: 10.0**x)


@settings(max_examples=25, **LENIENT)
@given(units, st.sampled_from([1, 2, 5, 15]), epsilons, deltas, st.sampled_from(BOTH))
def test_the_parts_add_up(n, d, epsilon, delta, neighboring):
    made = plan(n, d, epsilon, delta, neighboring=neighboring)
    assert (made.count is None) == (neighboring == "replace-one")
    check_parts(made)


@pytest.mark.parametrize("neighboring", BOTH)
@pytest.mark.parametrize("private_count", [True, False])
@pytest.mark.parametrize(
    ("n", "d", "epsilon", "delta", "accounting"),
    [
        (2000, 11, 1.0, 1e-6, "divergence"),
        (100, 3, 1.0, 1e-6, "divergence"),
        (10**6, 60, 0.3, 1e-9, "divergence"),
        (5000, 5, 25.0, 1e-6, "zCDP"),
        (5000, 5, 1.0, 1e-15, "zCDP"),
    ],
)
def test_the_parts_of_a_plan_add_up(n, d, epsilon, delta, accounting, neighboring, private_count):
    made = plan(n, d, epsilon, delta, neighboring=neighboring, private_count=private_count)
    assert (made.count is not None) == private_count
    assert made.accounting == accounting
    check_parts(made)


@settings(max_examples=40, **LENIENT)
@given(
    st.builds(Budget, epsilons, deltas),
    st.sampled_from([1, 4, 20]),
    st.booleans(),
    st.booleans(),
    units,
)
def test_without_an_intercept_there_are_no_medians(budget, d, counted, replaced, n):
    planner = MomentsPlanner(budget, d, counted, replaced, intercept=False)
    p = planner.parameters(n)
    assert p.location_epsilon == 0
    assert planner.columns == d + 1  # there is no location, but the target has a scale
    accounting = planner.accounting(n)
    assert within(budget, p, 0, planner.count, accounting)
    more = replace(p, **normal_parts(p, 1.01))
    assert not within(budget, more, 0, planner.count, accounting)


def test_a_count_of_very_little_rho_is_added_up_by_zcdp():
    made = plan(3000, 8, 0.0001, 1e-6)
    assert made.accounting == "zCDP"
    check_parts(made)
    assert plan(3000, 8, 0.0001, 1e-6, private_count=False).accounting == "divergence"


def test_what_the_direct_accounting_is_worth():
    p = plan(2000, 11, 1.0, 1e-6).parameters
    rho = largest_rho(1.0, 1e-6)
    assert gaussian_sum(p) + 11 * p.location_epsilon**2 / 8 > 1.05 * rho
    beyond = plan(2000, 11, 21.0, 1e-6).parameters
    spent = gaussian_sum(beyond) + 11 * beyond.location_epsilon**2 / 8
    assert 0.98 < spent / largest_rho(21.0, 1e-6) < 1


# ---------------------------------------------------------------- the parameters make sense


@settings(max_examples=150, **LENIENT)
@given(units, st.sampled_from([1, 2, 9, 40]), st.sampled_from([0.1, 1.0, 8.0]), st.booleans())
def test_the_parameters_make_sense(n, d, epsilon, replaced):
    planner = MomentsPlanner(Budget(epsilon, 1e-6), d, True, replaced)
    p = planner.parameters(n)
    assert p.replace is replaced
    assert isinstance(p.pilot, int)
    assert isinstance(p.voters, int)
    assert p.pilot >= 1 <= p.voters
    # A part of the units is taken only where it still is a large number of them.
    assert p.pilot == 1 or n / p.pilot >= 1e5
    assert p.voters == 1 or n / p.pilot / p.voters >= 1e4
    assert p.voters > 1 or n / p.pilot < 3e5
    assert list(p.round_rho) == sorted(p.round_rho)
    assert len(p.clips) == len(p.round_rho)
    assert all(1 <= clip <= 4 for clip in p.clips)
    assert p.clips[0] > p.clips[-1]
    assert 0 <= planner.success(n) <= 1
    assert 0 < planner.gradient_noise(n) < math.inf
    # Hardly any number of units changes anything, so that a noisy count is not looked at twice.
    assert planner.parameters(n) == planner.parameters(2 ** (math.floor(8 * math.log2(n)) / 8) + 1)


def test_replacing_needs_more_noise():
    one, other = (
        MomentsPlanner(Budget(1.0, 1e-6), 5, False, replaced).gradient_noise(10**5)
        for replaced in (False, True)
    )
    assert other == pytest.approx(2 * one, rel=1e-9)


# ---------------------------------------------------------------- more is never worse

GRID = [2**k for k in range(4, 26)]
DESIGNS = [
    (budget, d, neighboring)
    for budget in [(1.0, 1e-6), (0.1, 1e-3), (6.0, 1e-12)]
    for d in (1, 6)
    for neighboring in BOTH
]


@pytest.mark.parametrize(("budget", "d", "neighboring"), DESIGNS)
def test_more_units_are_never_worse(budget, d, neighboring):
    plans = [plan(n, d, *budget, neighboring=neighboring) for n in GRID]
    assert [p.enough for p in plans] == sorted(p.enough for p in plans)
    assert {p.enough for p in plans} == {False, True}
    success = [p.success_probability for p in plans]
    assert all(after > before - 1e-3 for before, after in itertools.pairwise(success))
    noise = [p.noise_ratio / math.sqrt(p.n_units) for p in plans if p.enough]
    assert noise == sorted(noise, reverse=True)


#: Where the private medians are what fails first.
FEW = [
    (0.05, 11, False),
    (0.03, 11, False),
    (1.0, 2, True),
    (1.0, 5, True),
]


@pytest.mark.parametrize(("epsilon", "d", "replaced"), FEW)
def test_success_does_not_fall_on_the_way(epsilon, d, replaced):
    planner = MomentsPlanner(Budget(epsilon, 1e-6), d, False, replaced)
    success = [planner.success(int(2 ** (k / 4))) for k in range(24, 100)]
    assert all(after > before - 0.02 for before, after in itertools.pairwise(success))


@pytest.mark.parametrize("d", [3, 11, 50])
@pytest.mark.parametrize("epsilon", [0.01, 0.03, 0.1])
def test_some_number_of_units_is_enough_for_a_small_budget(epsilon, d):
    """What the steps measure grows with the units, and their noise does not."""
    assert MomentsPlanner(Budget(epsilon, 1e-6), d, True).fewest_units() is not None


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
def test_a_larger_epsilon_or_delta_or_fewer_columns_need_fewer_units(replaced, intercept):
    def fewest(d, epsilon, delta):
        return MomentsPlanner(Budget(epsilon, delta), d, True, replaced, intercept).fewest_units()

    by_epsilon = [fewest(5, e, 1e-6) for e in (0.3, 0.6, 1.2, 2.5, 5.0, 15.0, 30.0)]
    by_delta = [fewest(5, 1.0, delta) for delta in (1e-16, 1e-12, 1e-8, 1e-4, 1e-2)]
    by_columns = [fewest(d, 1.0, 1e-6) for d in (40, 20, 10, 5, 2)]
    for needed in (by_epsilon, by_delta, by_columns):
        assert needed == sorted(needed, reverse=True)
    # A few columns more can cost nothing where it is the target's histogram that needs units.
    for needed in (by_epsilon, by_delta, by_columns[:3]):
        assert len(set(needed)) == len(needed)


def test_the_fewest_units_are_enough_and_few():
    for d, epsilon in [(1, 1.0), (11, 1.0), (3, 0.2), (30, 5.0)]:
        planner = MomentsPlanner(Budget(epsilon, 1e-6), d, True)
        fewest = planner.fewest_units()
        assert planner.enough(fewest)
        assert not planner.enough(int(0.95 * fewest))


def test_a_plan_is_enough_where_the_planner_says_so():
    planner = MomentsPlanner(Budget(1.0, 1e-6), 6, False)
    fewest = planner.fewest_units()
    for n in (fewest // 2, fewest, 3 * fewest):
        made = plan(n, 6, 1.0, 1e-6, private_count=False)
        assert made.enough == planner.enough(n)
        assert made.success_probability == planner.success(n)
        assert made.noise_ratio == planner.noise(n)
        assert made.parameters == planner.parameters(n)


# ---------------------------------------------------------------- success, by simulation


def normal_rows(n, d, seed, slope=0.0):
    rng = np.random.default_rng([seed, n, d])
    X = rng.normal(size=(n, d - 1))
    return UnitRows(X, X @ np.full(d - 1, slope) + rng.normal(size=n), None, n)


def scales_found(planner, n, draws):
    """How often the target's location is not wild and its scale is seen, for normal columns."""
    found = 0
    for seed in range(draws):
        fit = moments._Fit(
            normal_rows(n, planner.d, seed), True, planner.parameters(n), Randomness(seed=seed)
        )
        location = fit._locations()
        scale = fit._scales(location)
        found += bool(np.all(np.abs(location) < 4) and 0.4 < scale[-1] < 2.5)
    return found


def shortfall_p(found, draws, promised):
    """Probability of so few successes if the promise holds: more are welcome."""
    return float(stats.binom.cdf(found, draws, promised))


SIMULATED = [(1.0, 1e-6, 2, 0.8), (3.0, 1e-3, 2, 0.79), (0.3, 1e-6, 5, 0.77)]


@pytest.mark.parametrize(("epsilon", "delta", "d", "share"), SIMULATED)
def test_scales_are_found_as_often_as_promised(epsilon, delta, d, share):
    planner = MomentsPlanner(Budget(epsilon, delta), d, False)
    n = int(share * planner.fewest_units())
    promised = planner.success(n)
    assert 0.3 < promised < 0.9
    assert shortfall_p(scales_found(planner, n, 200), 200, promised) > P_LIMIT


def test_a_promise_of_another_epsilon_is_convicted():
    planner = MomentsPlanner(Budget(1.0, 1e-6), 2, False)
    n = int(0.55 * planner.fewest_units())
    found = scales_found(planner, n, 200)
    richer = MomentsPlanner(Budget(2.0, 1e-6), 2, False)
    assert shortfall_p(found, 200, planner.success(n)) > P_LIMIT
    assert shortfall_p(found, 200, richer.success(n)) < P_LIMIT


@pytest.mark.parametrize("slope", [0.0, 1.0])
@pytest.mark.parametrize(
    ("epsilon", "d", "more"),
    [(1.0, 2, 1), (1.0, 11, 1), (1.0, 2, 4), (1.0, 2, 1.5)],
)
def test_releases_are_refused_as_rarely_as_promised(epsilon, d, more, slope):
    """Where the units are just enough, and where they are more, with a signal or without."""
    planner = MomentsPlanner(Budget(epsilon, 1e-6), d, False)
    n = int(more * planner.fewest_units())
    released = sum(
        moments.release(
            normal_rows(n, d, seed, slope), True, planner.parameters(n), Randomness(seed=seed)
        )
        is not None
        for seed in range(200)
    )
    assert shortfall_p(released, 200, planner.success(n)) > P_LIMIT


# ---------------------------------------------------------------- advice


def followed(advice, **options):
    return plan(**with_advice(advice, options))


ADVISED = [
    (300, 12, 1.0),
    (50, 2, 0.7),
    (600, 18, 2.0),
    (3000, 5, 0.09),
    (10, 3, 25.0),
    (1, 1, 0.3),
]


@pytest.mark.parametrize("neighboring", BOTH)
@pytest.mark.parametrize("delta", [1e-9, 1e-3])
@pytest.mark.parametrize(("n", "d", "epsilon"), ADVISED)
def test_every_piece_of_advice_is_true(neighboring, delta, n, d, epsilon):
    case = {"n": n, "d": d, "epsilon": epsilon, "delta": delta}
    made = plan(**case, neighboring=neighboring)
    if made.enough:
        assert made.advice == ()
        assert delta == 1e-3
        return
    assert made.advice
    for advice in made.advice:
        assert followed(advice, **case, neighboring=neighboring).enough
    # Nothing closer to what was asked for would be enough.
    columns = next((int(amount(a)) for a in made.advice if "coefficient" in a), 0)
    assert (
        columns == d - 1 or not plan(n, columns + 1, epsilon, delta, neighboring=neighboring).enough
    )
    larger = next((float(amount(a)) for a in made.advice if "epsilon" in a), 51 * epsilon)
    for factor in (1.5, 2, 3, 5, 10, 20, 50):
        if factor * epsilon < 0.99 * larger:
            assert not plan(n, d, factor * epsilon, delta, neighboring=neighboring).enough


@pytest.mark.parametrize("neighboring", BOTH)
@pytest.mark.parametrize("delta", [1e-15, 1e-9, 1e-3])
@pytest.mark.parametrize(("n", "d", "epsilon"), ADVISED)
def test_the_advice_on_units_comes_first_and_is_not_idle(neighboring, delta, n, d, epsilon):
    made = plan(n, d, epsilon, delta, neighboring=neighboring)
    if not made.enough:
        assert made.advice[0].endswith(" units")
        fewer = int(int(amount(made.advice[0])) * 2 / 3)
        assert not plan(fewer, d, epsilon, delta, neighboring=neighboring).enough


# ---------------------------------------------------------------- a plan is a value that prints


PRINTED = [
    plan(20_000, 9, 1.0, 1e-6),
    plan(200, 9, 1.0, 1e-6),
    plan(5000, 1, 3.0, 1e-3, neighboring="replace-one"),
    plan(1, 30, 0.5, 1e-12, private_count=False),
]


@pytest.mark.parametrize("made", PRINTED)
def test_a_plan_prints_as_a_table(made):
    lines, table = printed_table(made)
    assert table["method"] == "moments"
    assert table["choice of method"] == "given"
    assert "groups (m)" not in table
    assert table["units"] == f"{made.n_units:,}"
    assert table["enough data"] == ("yes" if made.enough else "no")
    assert ("what would be enough" in table) == (not made.enough)
    assert ("private count of units" in table) == (made.count is not None)
    assert max(map(len, lines)) < 110
    assert not re.search(r"\bnan\b|\binf\b|None|object at", str(made))
    html = made._repr_html_()
    assert html.count("<tr>") == html.count("</tr>") == len(lines)


def test_the_split_in_words_is_the_split():
    made = plan(20_000, 9, 1.0, 1e-6)
    p, words = made.parameters, made.split()
    assert list(words) == [
        "private count of units",
        "9 locations",
        "scales",
        "norms",
        "Gram matrices",
        "residuals",
        "gradients",
    ]
    assert f"rho = {made.count.rate:.3g}" in words["private count of units"]
    told = 0.0
    for name, times in {"scales": 1, "norms": 2, "Gram matrices": 2, "residuals": 4}.items():
        told += times * float(re.search(r"rho = ([\d.e-]+)", words[name])[1])
        assert times == 1 or words[name].endswith(f"each of {times}")
    told += sum(map(float, re.search(r"rho = (.*)", words["gradients"])[1].split(",")))
    assert told == pytest.approx(p.gaussian_rho, rel=0.01)
    assert words["9 locations"] == f"epsilon = {p.location_epsilon:.3g} each"


@pytest.mark.parametrize("made", PRINTED)
def test_a_plan_is_a_frozen_value(made):
    with pytest.raises(FrozenInstanceError):
        made.n_units = 1
    with pytest.raises(FrozenInstanceError):
        made.parameters.pilot = 7
    assert pickle.loads(pickle.dumps(made)) == made
    assert hash(made) == hash(pickle.loads(pickle.dumps(made)))


def test_a_plan_is_a_function_of_its_arguments():
    made = plan(5000, 3, 1.0, 1e-6)
    assert made == plan(np.int64(5000), np.int32(3), 1, 1e-6)
    assert made != plan(5000, 3, 1.1, 1e-6)
    assert made.n_models is None
    assert made.units_per_group is None


# ---------------------------------------------------------------- the choice of a method


@pytest.mark.parametrize(
    ("delta", "n_models", "method", "choice"),
    [
        (1e-6, "auto", "moments", "auto: delta > 0"),
        (1e-300, "auto", "moments", "auto: delta > 0"),
        (0.0, "auto", "sequential", "auto: delta = 0"),
        (0.0, 400, "sequential", "auto: n_models is given"),
        (1e-6, 400, "sequential", "auto: n_models is given"),
    ],
)
@pytest.mark.parametrize("neighboring", BOTH)
def test_auto_decides_by_the_arguments_alone(delta, n_models, method, choice, neighboring):
    for n in (10, 10**4, 10**8):
        made = tukeyreg.plan(n, 3, 1.0, delta, n_models=n_models, neighboring=neighboring)
        assert (made.method, made.choice) == (method, choice)
        given = plan(n, 3, 1.0, delta, method=method, n_models=n_models, neighboring=neighboring)
        assert given.choice == "given"
        assert replace(made, choice="given") == given


@pytest.mark.parametrize(
    "options", [{"delta": 0.0}, {"delta": 0}, {"n_models": 400}, {"split": "paper"}]
)
def test_what_does_not_belong_to_moments_is_refused_and_costs_nothing(options):
    case = {"n": 10**4, "d": 3, "epsilon": 1.0, "delta": 1e-6} | options
    with pytest.raises(InvalidInput, match="Nothing was spent"):
        plan(**case)
    model = tukeyreg.TukeyRegressor(
        method="moments", **{name: case[name] for name in case if name not in ("n", "d")}
    )
    with pytest.raises(InvalidInput, match="Nothing was spent"):
        model.fit(np.zeros((50, 2)), np.zeros(50))


# ---------------------------------------------------------------- extremes


@pytest.fixture
def impatient(monkeypatch):
    """Fails what computes on the grid for longer than a plan may take."""
    start, step = time.process_time(), _Grid.bounded_range_step

    def hurried(self, cells):
        assert time.process_time() - start < 3, "a plan takes too long"
        step(self, cells)

    monkeypatch.setattr(_Grid, "bounded_range_step", hurried)
    return start


@pytest.mark.parametrize("neighboring", BOTH)
@pytest.mark.parametrize("delta", [1e-300, 1e-6, 0.9])
@pytest.mark.parametrize("epsilon", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("n", [1, 10**12])
def test_extremes_are_planned_at_once(impatient, n, epsilon, delta, neighboring):
    made = plan(n, 1, epsilon, delta, neighboring=neighboring)
    assert time.process_time() - impatient < 3
    assert not made.enough or n > 1
    assert 0 <= made.success_probability <= 1
    assert made.noise_ratio > 0
    assert plan_is_within(made)


@pytest.mark.parametrize(
    ("n", "epsilon", "delta", "neighboring"),
    [
        (1, 1.0, 1e-6, "add-remove"),
        (1, 1e-6, 0.9, "replace-one"),
        (1, 1e4, 1e-300, "add-remove"),
        (10**12, 1.0, 1e-6, "add-remove"),
        (10**12, 1e4, 0.9, "replace-one"),
        (10**12, 1e-6, 1e-300, "add-remove"),
        (10**12, 1.0, 1e-6, "replace-one"),
    ],
)
def test_a_thousand_coefficients_are_planned_at_once(impatient, n, epsilon, delta, neighboring):
    made = plan(n, 1000, epsilon, delta, neighboring=neighboring)
    assert time.process_time() - impatient < 3
    assert not made.enough or n > 1
    assert 0 <= made.success_probability <= 1
    assert made.noise_ratio > 0
