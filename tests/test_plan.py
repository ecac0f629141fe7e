"""Plans: public numbers in, a split of the budget that adds up and advice that is true out."""

import inspect
import math
import pickle
import re
import time
from dataclasses import FrozenInstanceError, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

import tukeyreg
from law_checks import P_LIMIT
from plan_text import amount, printed_table, with_advice
from tukeyreg import InvalidInput
from tukeyreg.mechanisms.randomness import Randomness
from tukeyreg.mechanisms.sequential import PrivateMedian, depth_of, verdict_threshold
from tukeyreg.privacy.budget import largest_rho
from tukeyreg.privacy.composition import sequence_delta

LENIENT = {"deadline": None}
planning = inspect.getmodule(tukeyreg.plan)


def plan(*arguments, method="sequential", **options):
    return tukeyreg.plan(*arguments, method=method, **options)


def test_a_plan_takes_numbers_and_choices_only():
    assert list(inspect.signature(tukeyreg.plan).parameters) == [
        "n",
        "d",
        "epsilon",
        "delta",
        "method",
        "neighboring",
        "n_models",
        "split",
        "private_count",
    ]


@pytest.mark.parametrize("method", ["sequential", "joint"])
def test_a_plan_is_a_frozen_value(method):
    made = plan(5000, 3, 1.0, 1e-6, method=method)
    with pytest.raises(FrozenInstanceError):
        made.n_models = 1
    assert made == plan(np.int64(5000), np.int32(3), 1, 1e-6, method=method)
    assert pickle.loads(pickle.dumps(made)) == made


# ---------------------------------------------------------------- printing


PRINTED = [
    plan(20_000, 9, 1.0, 1e-6),
    plan(20_000, 9, 1.0, 1e-6, method="joint", neighboring="replace-one"),
    plan(300, 9, 1.0, 0.0),
    plan(5000, 1, 1.0, 1e-6, n_models=400),
]


@pytest.mark.parametrize("made", PRINTED)
def test_a_plan_prints_as_a_table(made):
    lines, table = printed_table(made)
    assert table["method"] == made.method
    assert table["groups (m)"] == f"{made.n_models:,}"
    assert table["enough data"] == ("yes" if made.enough else "no")
    assert ("what would be enough" in table) == (not made.enough)
    assert max(map(len, lines)) < 110
    assert not re.search(r"\bnan\b|None|object at", str(made))
    html = made._repr_html_()
    assert html.count("<tr>") == html.count("</tr>") == len(lines)


def test_a_plan_without_units_says_so():
    design = planning.Design("sequential", "add-remove", PRINTED[0].budget, None, False)
    made = planning.plan_units(None, 3, design, 800)
    assert made.n_units is None
    assert made.units_per_group is None
    assert "not used: m is given" in str(made)


# ---------------------------------------------------------------- the split adds up


def within_budget(made):
    """The parts of a plan, added up from the definitions."""
    epsilon, d = Fraction(made.budget.epsilon), made.n_coefficients
    count = [] if made.count is None else [made.count]
    p = made.parameters
    if made.accounting == "test and selection":
        assert all(noise.law == "discrete Laplace" for noise in count)
        parts = [p.test_epsilon, p.selection_epsilon, *(noise.rate for noise in count)]
        return sum(map(Fraction, parts)) <= epsilon and p.delta <= made.budget.delta
    noises = [*count, p.verdict]
    rates = [Fraction(noise.rate) for noise in noises]
    stage = Fraction(p.stage_epsilon)
    if made.accounting == "pure":
        assert {noise.law for noise in noises} == {"discrete Laplace"}
        return d * stage + sum(rates) <= epsilon
    assert {noise.law for noise in noises} == {"discrete Gaussian"}
    if made.accounting == "zCDP":
        rho = largest_rho(made.budget.epsilon, made.budget.delta)
        return d * stage**2 / 8 + sum(rates) <= Fraction(rho)
    before = tuple(noise.rate for noise in count)
    found = sequence_delta(made.budget.epsilon, d, p.stage_epsilon, before, after=(p.verdict.rate,))
    return found <= made.budget.delta


def with_larger_parts(made, factor):
    p = made.parameters
    if made.accounting == "test and selection":
        return replace(made, parameters=replace(p, selection_epsilon=p.selection_epsilon * factor))
    return replace(made, parameters=replace(p, stage_epsilon=p.stage_epsilon * factor))


budgets = st.tuples(
    st.floats(math.log(0.02), math.log(60)).map(math.exp),
    st.one_of(st.just(0.0), st.floats(-15, -1).map(lambda x: 10.0**x)),
)
neighborings = st.sampled_from(["add-remove", "replace-one"])


@settings(max_examples=60, **LENIENT)
@given(budgets, st.sampled_from([1, 2, 7, 30, 120, 600]), neighborings)
def test_the_parts_of_sequential_add_up(budget, d, neighboring):
    made = plan(10**9, d, *budget, neighboring=neighboring, n_models=1000, private_count=None)
    counted = plan(10**9, d, *budget, neighboring=neighboring, n_models=1000, private_count=True)
    for one in (made, counted):
        assert (one.count is None) == (one is made)
        assert within_budget(one)
        assert not within_budget(with_larger_parts(one, 2.05))
        assert one.accounting == "pure" or one.budget.delta > 0
    if (made.accounting == "pure") == (counted.accounting == "pure"):  # the count costs something
        assert counted.parameters.stage_epsilon < made.parameters.stage_epsilon * (1 + 1e-3)


@pytest.mark.parametrize(
    ("d", "epsilon", "delta", "accounting"),
    [
        (9, 1.0, 0.0, "pure"),
        (2, 1.0, 1e-15, "pure"),
        (5, 25.0, 1e-6, "pure"),
        (1, 1.0, 1e-6, "divergence"),
        (9, 1.0, 1e-6, "divergence"),
        (50, 0.1, 1e-9, "divergence"),
        (600, 1.0, 1e-6, "zCDP"),
        (60, 25.0, 1e-6, "zCDP"),
        (30, 1.0, 1e-15, "zCDP"),
    ],
)
def test_one_per_cent_more_is_too_much(d, epsilon, delta, accounting):
    made = plan(10**8, d, epsilon, delta, neighboring="add-remove")
    assert made.accounting == accounting
    assert made.count is not None
    assert within_budget(made)
    assert not within_budget(with_larger_parts(made, 1.01))


@settings(max_examples=100, **LENIENT)
@given(
    st.floats(math.log(0.05), math.log(60)).map(math.exp),
    st.floats(-12, -1).map(lambda x: 10.0**x),
    neighborings,
    st.sampled_from([None, "paper"]),
    st.integers(8, 300),
    st.booleans(),
)
def test_the_parts_of_joint_add_up(epsilon, delta, neighboring, split, m, counted):
    made = plan(
        10**6,
        2,
        epsilon,
        delta,
        method="joint",
        neighboring=neighboring,
        n_models=m,
        split=split,
        private_count=counted,
    )
    assert within_budget(made)
    assert not within_budget(with_larger_parts(made, 1 + 1e-14))
    p = made.parameters
    assert p.delta == delta
    assert 1 <= p.restriction_depth <= m // 2
    if split == "paper":
        rest = Fraction(epsilon) - (Fraction(made.count.rate) if counted else 0)
        assert p.restriction_depth == m // 4
        assert p.test_epsilon == pytest.approx(float(rest / 2), rel=1e-15)
        assert p.selection_epsilon == pytest.approx(p.test_epsilon, rel=1e-15)


def test_the_split_in_words_is_the_split():
    made = plan(20_000, 9, 1.0, 1e-6)
    words = made.split()
    assert list(words) == ["private count of units", "9 stages", "verdict"]
    assert f"epsilon = {made.parameters.stage_epsilon:.4g} each" == words["9 stages"]
    assert f"rho = {made.count.rate:.3g}" in words["private count of units"]
    assert f"rho = {made.parameters.verdict.rate:.3g}" in words["verdict"]
    assert list(plan(20_000, 1, 1.0, 0).split()) == ["private count of units", "1 stage", "verdict"]
    joint = plan(20_000, 9, 2.0, 1e-6, method="joint", neighboring="replace-one")
    assert list(joint.split()) == ["safety test", "selection"]
    shares = [float(re.search(r"epsilon = ([\d.]+)", text)[1]) for text in joint.split().values()]
    assert sum(shares) == pytest.approx(2.0, rel=1e-3)


@pytest.mark.parametrize("method", ["sequential", "joint"])
def test_units_are_counted_only_where_their_number_is_private_and_used(method):
    def counts(**options):
        return plan(20_000, 3, 1.0, 1e-6, method=method, **options).count is not None

    assert counts()
    assert not counts(neighboring="replace-one")
    assert not counts(n_models=600)
    assert not counts(private_count=False)


def test_without_delta_everything_is_pure():
    for d in (1, 5, 40):
        assert plan(10**6, d, 1.0, 0.0).accounting == "pure"
        assert plan(10**6, d, 1.0, 0).parameters.verdict.law == "discrete Laplace"


# ---------------------------------------------------------------- more is never worse

GRID = [100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 10_000_000]


@pytest.mark.parametrize("method", ["sequential", "joint"])
@pytest.mark.parametrize("neighboring", ["add-remove", "replace-one"])
@pytest.mark.parametrize("d", [1, 4, 15])
def test_more_units_are_never_worse(method, neighboring, d):
    plans = [plan(n, d, 1.0, 1e-6, method=method, neighboring=neighboring) for n in GRID]
    assert [p.enough for p in plans] == sorted(p.enough for p in plans)
    assert {p.enough for p in plans} == {False, True}
    enough = [p for p in plans if p.enough]
    assert [p.n_models for p in enough] == sorted(p.n_models for p in enough)
    assert all(p.success_probability >= planning.ENOUGH for p in enough)
    for p in enough:
        assert p.units_per_group >= planning.fewest_units_per_group(method, d)


def fewest_units(*arguments, **options):
    low, high = 1, 10**9
    while high - low > 1:
        middle = (low + high) // 2
        if plan(middle, *arguments, **options).enough:
            high = middle
        else:
            low = middle
    return high


@pytest.mark.parametrize("method", ["sequential", "joint"])
def test_a_larger_epsilon_or_delta_or_fewer_columns_need_fewer_units(method):
    by_epsilon = [fewest_units(5, e, 1e-6, method=method) for e in (0.3, 0.6, 1.2, 2.5, 5.0)]
    by_delta = [fewest_units(5, 1.0, delta, method=method) for delta in (1e-12, 1e-8, 1e-4)]
    by_columns = [fewest_units(d, 1.0, 1e-6, method=method) for d in (20, 10, 5, 2)]
    for needed in (by_epsilon, by_delta, by_columns):
        assert needed == sorted(needed, reverse=True)
        assert len(set(needed)) == len(needed)


@pytest.mark.parametrize("neighboring", ["add-remove", "replace-one"])
@pytest.mark.parametrize(
    ("d", "epsilon", "delta"),
    [(1, 1.0, 1e-6), (2, 1.0, 1e-15), (3, 1.0, 1e-6), (5, 25.0, 1e-6), (7, 0.3, 1e-9)],
)
def test_the_accounting_is_the_one_that_needs_the_fewest_units(
    monkeypatch, neighboring, d, epsilon, delta
):
    design = (planning.Budget(epsilon, delta), d, neighboring == "add-remove")
    rho = largest_rho(epsilon, delta)
    splits = planning._pure_split(*design), planning._gaussian_split(rho, *design)
    chosen = planning._sequential_split(*design)
    needed = []
    for split in (*splits, chosen):
        monkeypatch.setattr(planning, "_sequential_split", lambda *_, split=split: split)
        needed.append(fewest_units(d, epsilon, delta, neighboring=neighboring))
    assert needed[2] == min(needed)
    assert needed[0] != needed[1]


# ---------------------------------------------------------------- success, by simulation


def released_share(d, parameters, m, centre, spread, draws, randomness):
    """How often sequential would release votes that lie on the quantiles of a normal law."""
    quantiles = stats.norm.ppf((np.arange(m) + 0.5) / m)
    votes = np.sort(centre * (1 + spread * quantiles))
    median = PrivateMedian(votes, parameters.stage_epsilon)
    threshold = verdict_threshold(m, parameters.verdict)
    released = 0
    for _ in range(draws):
        shallowest = min(depth_of(votes, median.sample(randomness)) for _ in range(d))
        released += shallowest + parameters.verdict.sample(randomness) >= threshold
    return released


@pytest.mark.parametrize(
    ("d", "epsilon", "delta", "m"), [(2, 1.0, 0.0, 184), (3, 2.0, 1e-3, 72), (1, 0.5, 1e-6, 301)]
)
def test_the_success_probability_is_that_of_a_simulation(monkeypatch, d, epsilon, delta, m):
    made = plan(10**6, d, epsilon, delta, n_models=m)
    draws, randomness, promised = 300, Randomness(seed=d), []
    for reference in planning._REFERENCES:
        monkeypatch.setattr(planning, "_REFERENCES", (reference,))
        chance = planning._sequential_success(m, d, made.parameters)
        released = released_share(d, made.parameters, m, *reference, draws, randomness)
        assert stats.binomtest(released, draws, min(1.0, chance)).pvalue > P_LIMIT
        promised.append(chance)
    assert made.success_probability == min(promised)
    assert 0.05 < min(promised) < 0.999


@pytest.mark.parametrize("factor", [1 / 1.5, 1.5])
def test_a_promise_of_another_epsilon_is_convicted(monkeypatch, factor):
    # Where every coefficient of several must be deep, success depends on the stages the most.
    made = plan(10**6, 6, 1.0, 0.0, n_models=400)
    worst = planning._REFERENCES[0]
    monkeypatch.setattr(planning, "_REFERENCES", (worst,))
    other = replace(made.parameters, stage_epsilon=made.parameters.stage_epsilon * factor)
    right, wrong = (planning._sequential_success(400, 6, p) for p in (made.parameters, other))
    released = released_share(6, made.parameters, 400, *worst, 300, Randomness(seed=2))
    assert stats.binomtest(released, 300, right).pvalue > P_LIMIT
    assert stats.binomtest(released, 300, wrong).pvalue < P_LIMIT


# ---------------------------------------------------------------- advice


def followed(advice, **options):
    return plan(**with_advice(advice, options))


@pytest.mark.parametrize("method", ["sequential", "joint"])
@pytest.mark.parametrize("neighboring", ["add-remove", "replace-one"])
@pytest.mark.parametrize("delta", [0.0, 1e-9, 1e-3])
@pytest.mark.parametrize(
    ("n", "d", "epsilon"), [(900, 12, 1.0), (150, 2, 0.7), (4000, 40, 2.0), (3000, 5, 0.09)]
)
def test_every_piece_of_advice_is_true(method, neighboring, delta, n, d, epsilon):
    if method == "joint" and not delta:
        delta = 1e-6
    case = {"n": n, "d": d, "epsilon": epsilon, "delta": delta}
    options = {"method": method, "neighboring": neighboring}
    made = plan(**case, **options)
    if made.enough:
        assert made.advice == ()
        return
    assert made.advice[0].endswith(" units")
    for advice in made.advice:
        assert followed(advice, **case, **options).enough
    # It is not idle: with a third less of the units than advised it is not enough.
    fewer = int(int(amount(made.advice[0])) * 0.66)
    assert not plan(fewer, d, epsilon, delta, **options).enough
    # Nor is it timid: nothing closer to what was asked for would be enough.
    columns = next((int(amount(a)) for a in made.advice if "coefficient" in a), 0)
    assert columns == d - 1 or not plan(n, columns + 1, epsilon, delta, **options).enough
    larger = next((float(amount(a)) for a in made.advice if "epsilon" in a), 51 * epsilon)
    for factor in (1.5, 2, 3, 5, 10, 20, 50):
        if factor * epsilon < 0.99 * larger:
            assert not plan(n, d, factor * epsilon, delta, **options).enough


@pytest.mark.parametrize("method", ["sequential", "joint"])
@pytest.mark.parametrize(("n", "kind"), [(10**7, "groups"), (1000, "units")])
def test_advice_on_given_groups_is_true(method, n, kind):
    case = {"n": n, "d": 4, "epsilon": 1.0, "delta": 1e-6}
    made = plan(**case, method=method, n_models=60)
    assert not made.enough
    for advice in made.advice:
        assert followed(advice, **case, method=method, n_models=60).enough
    assert made.advice[0].endswith(f" {kind}")
    assert " groups" in made.advice[0]
    assert len(made.advice) > 1
    groups = int(amount(made.advice[0]))
    assert not plan(**case, method=method, n_models=int(groups * 0.9)).enough


# ---------------------------------------------------------------- given numbers of groups


@pytest.mark.parametrize("method", ["sequential", "joint"])
@pytest.mark.parametrize("split", [None, "paper"])
@pytest.mark.parametrize("m", [4, 5, 6, 7, 8, 9, 100, 101, 102, 103])
def test_odd_and_even_numbers_of_groups(method, split, m):
    if split and method == "sequential":
        return
    made = plan(10**6, 2, 30.0, 1e-2, method=method, split=split, n_models=m)
    assert made.n_models == m
    assert 0 <= made.success_probability <= 1 + 1e-12
    assert 0 < made.noise_ratio < math.inf
    assert made.enough == (made.success_probability >= planning.ENOUGH_FOR_GIVEN_GROUPS)


def test_given_groups_must_not_be_too_small():
    assert plan(10**6, 9, 1.0, 1e-6, n_models=700).enough
    assert not plan(700 * 11, 9, 1.0, 1e-6, n_models=700).enough
    assert plan(700 * 12, 9, 1.0, 1e-6, n_models=700).enough


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("name", ["n", "d"])
@pytest.mark.parametrize("value", [0, -3, 1.0, True, "9", None, math.nan])
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(InvalidInput, match=f"^{name} must be a positive integer"):
        plan(**({"n": 1000, "d": 3, "epsilon": 1.0, "delta": 1e-6} | {name: value}))


@pytest.mark.parametrize(
    "options",
    [
        {"epsilon": 0.0},
        {"epsilon": None},
        {"epsilon": 1e-7},
        {"delta": 1.0},
        {"delta": None},
        {"method": "ols"},
        {"method": "joint", "delta": 0.0},
        {"neighboring": "swap"},
        {"n_models": 3},
        {"n_models": True},
        {"n_models": "many"},
        {"n_models": 1 << 21},
        {"split": "half"},
        {"split": "paper"},
    ],
)
def test_wrong_choices_are_refused_and_cost_nothing(options):
    with pytest.raises(InvalidInput, match="Nothing was spent"):
        plan(**({"n": 1000, "d": 3, "epsilon": 1.0, "delta": 1e-6} | options))


# ---------------------------------------------------------------- extremes


@pytest.mark.parametrize("method", ["sequential", "joint"])
@pytest.mark.parametrize(
    ("n", "d", "epsilon"),
    [(1, 1, 1.0), (10**15, 1, 1.0), (10**15, 5000, 1.0), (50, 2, 1e4), (10**9, 20, 1e6)],
)
def test_extremes_are_planned_at_once(method, n, d, epsilon):
    start = time.process_time()
    made = plan(n, d, epsilon, 1e-6, method=method)
    assert time.process_time() - start < 2
    assert within_budget(made)
    assert made.enough == (n > 1)
    assert made.n_models <= max(4, n)


def test_a_tiny_epsilon_is_planned_and_not_enough():
    assert not plan(10**5, 3, 1e-6, 1e-6).enough
    assert not plan(10**5, 3, 1e-5, 0.0).enough
