"""``sequential``: the private median against the referee's law, back-substitution, the verdict."""

import itertools
import math

import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from law_checks import P_LIMIT, distance_p, intervals_p, share_p
from tukeyreg.kernel import Columns
from tukeyreg.mechanisms import sequential
from tukeyreg.mechanisms.depth import UNIT
from tukeyreg.mechanisms.noise import IntegerNoise
from tukeyreg.mechanisms.randomness import Randomness
from tukeyreg.mechanisms.sequential import (
    ATOM,
    LARGEST,
    PrivateMedian,
    SequentialParameters,
    base_measure,
    depth_of,
    verdict_threshold,
)
from tukeyreg.privacy import verify
from tukeyreg.summaries.groups import summarise

LENIENT = {"deadline": None, "suppress_health_check": list(HealthCheck)}
DRAWS = 4000

# ---------------------------------------------------------------- one stage follows its law

VOTES = {
    "one vote": [3.0],
    "ties": [2.0, 2.0, 2.0, 5.0, 5.0, -1.0, 7.0],
    "all equal": [0.25] * 9,
    "at the break points": [-1.0, -1.0, 0.0, 0.0, 1.0, 1.0, 1.0],
    "all zero": [0.0] * 7,
    "both signs": [-4.0, -0.5, -0.01, 0.02, 0.7, 6.0, 80.0],
    "negative": [-9.0, -8.0, -7.5, -7.0, -6.0, -0.1],
    "huge": [1e200, 3e200, 1e250, 2e250, 1e300],
    "tiny": [-1e-300, 1e-308, 5e-324, 1e-200, 3e-200, 1e-100],
    "far apart": [-1e300, -1e-300, 1e-300, 1e10, 1e300],
    "close together": [1.0, 1.0 + 2**-52, 1.0 + 2**-51, 1.0 + 2**-50, 1.0 + 2**-49],
}


def draws(votes, epsilon, *, seed=0, fast=True, kind=PrivateMedian):
    law, randomness = kind(np.array(votes), epsilon), Randomness(seed=seed, fast=fast)
    return np.array([law.sample(randomness) for _ in range(DRAWS)])


def edges_of(votes):
    """Votes, break points, and points inside every interval."""
    ends = np.unique([*votes, -1.0, 0.0, 1.0])
    roots = np.sign(ends) * np.abs(ends) ** 0.125
    pairs = itertools.pairwise(roots.tolist())
    inside = np.array([a + (b - a) * part for a, b in pairs for part in (0.2, 0.5, 0.8)])
    tails = [f * end for end in ends[[0, -1]] for f in (1.5, 10, 1e4) if abs(f * end) < 1e305]
    found = np.sign(inside) * np.abs(inside) ** 8
    return np.unique([*ends, *found, *tails])


@pytest.mark.parametrize("epsilon", [0.3, 1.5])
@pytest.mark.parametrize("votes", VOTES.values(), ids=VOTES)
def test_a_stage_follows_the_referee(votes, epsilon):
    law = verify.stage_law(votes, stage_epsilon=epsilon)
    sample = draws(votes, epsilon)
    assert intervals_p(sample, law.cdf, edges_of(votes)) > P_LIMIT
    if max(np.abs(votes)) < 1e100:
        assert distance_p(sample, law.cdf) > P_LIMIT


@pytest.mark.parametrize("votes", VOTES.values(), ids=VOTES)
def test_zero_is_drawn_as_often_as_it_should(votes):
    law = verify.stage_law(votes, stage_epsilon=0.8)
    zeros = np.count_nonzero(draws(votes, 0.8, seed=1) == 0)
    assert share_p(zeros, DRAWS, min(law.atom, 1.0)) > P_LIMIT


def test_the_exact_path_follows_the_referee():
    votes = VOTES["both signs"]
    sample = draws(votes, 1.0, fast=False)[:1000]
    law = verify.stage_law(votes, stage_epsilon=1.0)
    assert intervals_p(sample, law.cdf, edges_of(votes)) > P_LIMIT


class UniformInside(PrivateMedian):
    """Defect: the point inside the chosen interval is uniform."""

    def sample(self, randomness):
        point = super().sample(randomness)
        low, high, _ = self._pieces
        at = np.searchsorted(low, point, side="right") - 1
        ends = np.clip([low[at], high[at]], -1e300, 1e300)
        return randomness.uniform_point(*ends.tolist()) if point else 0.0


class FullExponent(PrivateMedian):
    """Defect: exp(epsilon u) where replaced votes need exp(epsilon u / 2)."""

    def __init__(self, votes, epsilon):
        super().__init__(votes, 2 * epsilon)


class AtomOnly(PrivateMedian):
    """Defect: draws that are small become zero."""

    def sample(self, randomness):
        point = super().sample(randomness)
        return point if abs(point) > 1e-3 else 0.0


@pytest.mark.parametrize(
    ("kind", "votes"),
    [
        (UniformInside, "both signs"),
        (UniformInside, "far apart"),
        (UniformInside, "ties"),
        (FullExponent, "ties"),
        (FullExponent, "negative"),
        (AtomOnly, "both signs"),
    ],
)
def test_other_laws_are_convicted(kind, votes):
    votes = VOTES[votes]
    law = verify.stage_law(votes, stage_epsilon=1.5)
    assert intervals_p(draws(votes, 1.5, kind=kind), law.cdf, edges_of(votes)) < P_LIMIT


def test_draws_are_finite_without_votes_to_hold_them():
    sample = draws([LARGEST] * 3, 1e-3)
    assert np.isfinite(sample).all()
    assert np.abs(sample).max() > 1e6
    assert np.abs(sample[sample != 0]).min() < 1e-6


def test_the_order_of_the_votes_does_not_matter():
    votes = np.array(VOTES["both signs"])
    first, second = (draws(v, 1.0) for v in (votes, votes[::-1].copy()))
    np.testing.assert_array_equal(first, second)


def test_the_votes_are_not_changed():
    votes = np.array([3.0, 1.0, 2.0])
    draws(votes, 1.0)
    assert votes.tolist() == [3.0, 1.0, 2.0]


def test_a_negative_zero_is_a_zero():
    plain, signed = np.array([0.0, 0.0, 1.0, -3.0]), np.array([-0.0, 0.0, 1.0, -3.0])
    laws = [PrivateMedian(votes, 0.7).weights() for votes in (plain, signed)]
    np.testing.assert_array_equal(laws[0].approximate, laws[1].approximate)
    np.testing.assert_array_equal(draws(plain, 0.7), draws(signed, 0.7))
    assert depth_of(signed, 0.0) == depth_of(plain, -0.0) == 3


# ---------------------------------------------------------------- certified weights

sizes = st.one_of(
    st.floats(0, LARGEST),
    st.floats(-323, 308).map(lambda x: 10.0**x),
    st.sampled_from([0.0, 1.0, 5e-324, math.nextafter(1, 0), math.nextafter(1, 2), LARGEST]),
)


def root(value):
    return arb(value).sqrt().sqrt().sqrt()


def exact_mass(low, high):
    near, far = sorted((abs(low), abs(high)))
    if far <= 1:
        return (root(far) - root(near)) / 4
    outer = arb(0) if math.isinf(far) else 1 / root(far)
    return (1 / root(near) - outer) / 4


@settings(max_examples=500, **LENIENT)
@given(sizes, st.one_of(sizes, st.just(math.inf)), st.booleans(), st.integers(0, 3))
def test_the_base_measure_is_within_its_certified_error(first, second, negative, neighbours):
    if neighbours:  # intervals a few units in the last place wide
        second = first
        for _ in range(neighbours):
            second = math.nextafter(second, math.inf)
    low, high = sorted((first, second))
    if low == high or low == math.inf:
        return
    if low < 1 < high:
        high = 1.0
    low, high = (-high, -low) if negative else (low, high)
    (found,) = base_measure(np.array([low]), np.array([high])).tolist()
    with ctx.workprec(400):
        assert abs(arb(found) / exact_mass(low, high) - 1) <= 24 * UNIT


def test_a_difference_of_rounded_roots_is_convicted():
    low, high = 0.5, 0.5 + 2**-40
    with ctx.workprec(400):
        naive = arb((high**0.125 - low**0.125) / 4)
        assert abs(naive / exact_mass(low, high) - 1) > 24 * UNIT


def test_the_base_measure_adds_up_to_one():
    ends = np.array([-np.inf, -1e300, -7.0, -1.0, -1e-9, 0.0, 1e-300, 0.5, 1.0, 2.0, np.inf])
    assert math.fsum(base_measure(ends[:-1], ends[1:])) == pytest.approx(1.0, rel=1e-14)


@st.composite
def vote_arrays(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    m = draw(st.integers(1, 40))
    kind = draw(st.integers(0, 4))
    if kind == 0:
        return rng.normal(size=m)
    if kind == 1:
        return rng.integers(-2, 3, m).astype(float)
    if kind == 2:
        return rng.choice([-1.0, 0.0, 1.0], m) * 10.0 ** rng.uniform(-320, 308, m)
    if kind == 3:
        return 1e7 * (1 + 1e-14 * rng.normal(size=m))
    return np.full(m, draw(st.sampled_from([0.0, -0.0, 1.0, -1.0, 5e-324, LARGEST, -LARGEST])))


@settings(max_examples=300, **LENIENT)
@given(vote_arrays(), st.floats(-6, 1.5).map(lambda x: 10.0**x))
def test_fast_weights_are_within_their_certified_error(votes, epsilon):
    law = PrivateMedian(votes, epsilon)
    weights = law.weights()
    _, _, depths = law._pieces
    top = max(int(depths.max()), depth_of(votes, 0.0))
    with ctx.workprec(1024):  # FLINT takes no eighth root of 0 at low precision
        exact = weights.exact()
        shift = (-arb(epsilon) / 2 * top).exp()
        largest = max(float((ball * shift).upper()) for ball in exact)
        assert len(exact) == len(weights.approximate) == len(depths) + 1
        for found, true in zip(weights.approximate.tolist(), exact, strict=True):
            scaled = true * shift
            assert scaled > 0
            if found == 0:
                assert scaled < largest * 2.0**-800
            else:
                assert abs(arb(found) / scaled - 1) <= weights.relative_error


@settings(max_examples=150, **LENIENT)
@given(vote_arrays(), st.floats(-3, 1).map(lambda x: 10.0**x))
def test_the_weights_are_the_referee_s(votes, epsilon):
    weights = PrivateMedian(votes, epsilon).weights().approximate
    low = PrivateMedian(votes, epsilon)._pieces[0]
    law = verify.stage_law(votes, stage_epsilon=epsilon)
    shares = weights / weights.sum()
    assert shares[0] == pytest.approx(law.atom, rel=1e-12, abs=1e-300)
    inside = np.searchsorted(law.breakpoints, low, side="right")
    merged = np.bincount(inside, shares[1:], minlength=len(law.intervals))
    np.testing.assert_allclose(merged, law.intervals, rtol=1e-12, atol=1e-300)


@given(vote_arrays(), st.floats(allow_nan=False))
def test_depth_is_the_smaller_number_of_votes_on_either_side(votes, point):
    below, above = sum(v <= point for v in votes), sum(v >= point for v in votes)
    assert depth_of(votes, point) == min(below, above)


# ---------------------------------------------------------------- back-substitution


def grouped_fits(X, y, m):
    summaries = summarise(Columns.of(X, y), np.arange(len(y)) % m, m, intercept=True)
    return summaries, SequentialParameters(0.3, IntegerNoise("discrete Laplace", 0.5))


def correlated(correlation, *, m=400, d=3, seed=0):
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(40 * m, 1))
    X = math.sqrt(correlation) * common + math.sqrt(1 - correlation) * rng.normal(size=(40 * m, d))
    X = 10 + 3 * X
    return X, X @ np.arange(1.0, d + 1) - 5 + rng.normal(size=len(X))


def releases(summaries, parameters, count=10):
    found = [
        sequential.release(summaries.factors, summaries.targets, parameters, Randomness(seed=s))
        for s in range(count)
    ]
    assert all(vector is not None for vector in found)
    return np.array(found)


@pytest.mark.parametrize("correlation", [0.0, 0.9, 0.999])
def test_coefficients_of_correlated_features_are_recovered(correlation):
    X, y = correlated(correlation)
    released = releases(*grouped_fits(X, y, 400))
    predicted = released[:, :1] + released[:, 1:] @ X.T
    assert np.abs(released[:, 1:] - [1, 2, 3]).max() < 0.5 / math.sqrt(1.01 - correlation)
    assert np.sqrt(((predicted - y) ** 2).mean(axis=1)).max() < 1.1  # the noise alone is 1


def nearly_collinear():
    """Two features that differ by a millionth: their coefficients are unknown, their sum is not."""
    rng = np.random.default_rng(1)
    first = rng.normal(size=20_000)
    X = np.column_stack([first, first + 1e-6 * rng.normal(size=20_000)])
    return X, 3 * first + 2 + 0.5 * rng.normal(size=20_000)


def test_earlier_coefficients_absorb_the_errors_of_later_ones():
    X, y = nearly_collinear()
    released = releases(*grouped_fits(X, y, 400))
    assert np.ptp(released[:, 2]) > 100
    np.testing.assert_allclose(released[:, 1] + released[:, 2], 3, atol=0.1)
    predicted = released[:, :1] + released[:, 1:] @ X.T
    assert np.sqrt(((predicted - y) ** 2).mean(axis=1)).max() < 0.55


def test_independent_medians_are_convicted():
    X, y = nearly_collinear()
    models = grouped_fits(X, y, 400)[0].models()
    randomness = Randomness(seed=0)
    vector = np.array([PrivateMedian(column, 0.3).sample(randomness) for column in models.T])
    assert np.sqrt(np.mean((vector[0] + X @ vector[1:] - y) ** 2)) > 1.5


def test_the_first_stage_is_the_last_coefficient():
    X, y = correlated(0.5)
    summaries, parameters = grouped_fits(X, y, 400)
    last = summaries.targets[:, -1] / summaries.factors[:, -1, -1]
    expected = PrivateMedian(last, parameters.stage_epsilon).sample(Randomness(seed=4))
    found = sequential.release(summaries.factors, summaries.targets, parameters, Randomness(seed=4))
    assert found[-1] == expected


@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_coefficient_that_no_group_knows_is_exactly_zero(place):
    summaries, parameters = grouped_fits(*correlated(0.5), 400)
    factors = summaries.factors.copy()
    factors[:, place, place] = 0.0
    for seed in range(10):
        found = sequential.release(factors, summaries.targets, parameters, Randomness(seed=seed))
        assert found[place] == 0.0


def test_a_rare_coefficient_is_exactly_zero():
    """Where nine groups in ten vote zero the atom wins."""
    rng = np.random.default_rng(2)
    rare = (rng.random(16_000) < 0.002).astype(float)
    X = np.column_stack([rng.normal(size=16_000), rare])
    y = X @ [2.0, 50.0] + rng.normal(size=16_000)
    released = releases(*grouped_fits(X, y, 400))
    assert not released[:, 2].any()
    np.testing.assert_allclose(released[:, 1], 2.0, atol=0.2)


def test_the_summaries_are_not_changed():
    summaries, parameters = grouped_fits(*correlated(0.5), 400)
    kept = summaries.factors.copy(), summaries.targets.copy()
    sequential.release(summaries.factors, summaries.targets, parameters, Randomness(seed=0))
    np.testing.assert_array_equal(summaries.factors, kept[0])
    np.testing.assert_array_equal(summaries.targets, kept[1])


# ---------------------------------------------------------------- votes


def votes_of_all_stages(factors, targets, coefficients):
    """What every group votes in each stage when these coefficients are drawn."""
    recorded = []

    class Recorder:
        def __init__(self, votes, epsilon):
            recorded.append(votes.copy())

        def sample(self, randomness):
            return coefficients[len(coefficients) - len(recorded)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequential, "PrivateMedian", Recorder)
        parameters = SequentialParameters(1.0, IntegerNoise("discrete Laplace", 1.0))
        sequential.release(factors, targets, parameters, Randomness(seed=0))
    return np.array(recorded)


@st.composite
def neighbouring_summaries(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    m, d = draw(st.integers(2, 30)), draw(st.integers(1, 5))
    factors = np.triu(rng.normal(size=(m, d, d))) * 10.0 ** rng.integers(-9, 9, (m, 1, 1))
    factors[rng.random(m) < 0.2, -1] = 0.0
    targets = rng.normal(size=(m, d)) * 10.0 ** rng.integers(-9, 9, (m, 1))
    others = factors.copy(), targets.copy()
    row = draw(st.integers(0, m - 1))
    others[0][row] = np.triu(np.full((d, d), draw(st.sampled_from([0.0, 1.0, 1e300, np.inf]))))
    others[1][row] = draw(st.sampled_from([0.0, -1.0, 1e308, np.nan]))
    coefficients = (rng.normal(size=d) * 10.0 ** rng.integers(-9, 9, d)).tolist()
    return factors, targets, *others, row, coefficients


def changed_votes(case):
    factors, targets, other_factors, other_targets, _, coefficients = case
    before = votes_of_all_stages(factors, targets, coefficients)
    after = votes_of_all_stages(other_factors, other_targets, coefficients)
    assert np.isfinite(before).all()
    assert np.isfinite(after).all()
    return set(np.flatnonzero((before.view(np.int64) != after.view(np.int64)).any(axis=0)).tolist())


@settings(max_examples=200, **LENIENT)
@given(neighbouring_summaries())
def test_one_group_has_one_vote_in_each_stage(case):
    assert changed_votes(case) <= {case[4]}


def test_votes_relative_to_their_mean_are_convicted(monkeypatch):
    plain, rng = sequential._votes, np.random.default_rng(0)
    factors = np.triu(rng.normal(size=(9, 2, 2)))
    targets = rng.normal(size=(9, 2))
    case = factors, targets, factors, np.vstack([[5.0, 5.0], targets[1:]]), 0, [1.0, 2.0]
    assert changed_votes(case) == {0}
    monkeypatch.setattr(sequential, "_votes", lambda *a: plain(*a) - plain(*a).mean())
    assert len(changed_votes(case)) > 1


@given(st.lists(st.tuples(st.floats(), st.floats()), min_size=1, max_size=8))
def test_votes_are_finite_quotients(pairs):
    target, pivot = np.array(pairs).T
    with np.errstate(all="ignore"):
        quotients = target / pivot
    for vote, quotient, p in zip(
        sequential._votes(target, pivot), quotients, pivot.tolist(), strict=True
    ):
        if p == 0 or math.isnan(quotient):
            assert vote == 0
        else:
            assert vote == np.clip(quotient, -LARGEST, LARGEST)


# ---------------------------------------------------------------- the verdict

NOISES = [
    IntegerNoise(law, rate)
    for law in ("discrete Laplace", "discrete Gaussian")
    for rate in (0.0013, 0.02, 0.7, 5.0)
]


def release_chance(depth, threshold, noise):
    values, masses = noise.probabilities()
    return masses[depth + values >= threshold].sum()


@pytest.mark.parametrize("noise", NOISES, ids=str)
@pytest.mark.parametrize("m", [4, 7, 8, 9, 400, 1001])
def test_too_shallow_coefficients_are_released_with_probability_1e_3_at_most(m, noise):
    threshold = verdict_threshold(m, noise)
    shallow = [depth for depth in range(m) if depth < m / 8]
    assert max(release_chance(depth, threshold, noise) for depth in shallow) <= 1e-3
    assert release_chance(shallow[-1], threshold - 1, noise) > 1e-3  # the smallest such threshold
    assert threshold == math.ceil(m / 8) + noise.quantile(1e-3)


@pytest.mark.parametrize("noise", NOISES, ids=str)
def test_a_threshold_without_margin_is_convicted(noise):
    assert release_chance(math.ceil(400 / 8) - 1, math.ceil(400 / 8), noise) > 1e-3


def outcomes_at(coefficient, votes, noise, count):
    """How often a coefficient that is drawn from somewhere else is released."""
    m = len(votes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PrivateMedian, "sample", lambda self, randomness: coefficient)
        parameters, randomness = SequentialParameters(1.0, noise), Randomness(seed=m)
        factors, targets = np.ones((m, 1, 1)), np.array(votes)[:, None]
        found = [sequential.release(factors, targets, parameters, randomness)
                 for _ in range(count)]  # fmt: skip
    assert all(vector is None or vector.tolist() == [coefficient] for vector in found)
    return sum(vector is not None for vector in found)


@pytest.mark.parametrize("noise", [NOISES[1], NOISES[5]], ids=str)
@pytest.mark.parametrize("below", [0, 49, 50, 110, 150, 200])
def test_the_verdict_weighs_the_depth(noise, below):
    votes = np.arange(400.0)
    chance = release_chance(below, verdict_threshold(400, noise), noise)
    released = outcomes_at(below - 0.5, votes, noise, 1000)
    assert share_p(released, 1000, min(1.0, chance)) > P_LIMIT


def test_one_shallow_coefficient_is_enough_for_a_refusal(monkeypatch):
    drawn = iter([100.0, 100.0, 399.5] * 50)  # the last in time is beyond all votes
    monkeypatch.setattr(PrivateMedian, "sample", lambda self, randomness: next(drawn))
    factors = np.broadcast_to(np.eye(3), (400, 3, 3))
    targets = np.repeat(np.arange(400.0)[:, None], 3, axis=1)
    parameters = SequentialParameters(1.0, NOISES[2])
    randomness = Randomness(seed=0)
    found = [sequential.release(factors, targets, parameters, randomness) for _ in range(50)]
    assert found == [None] * 50


def test_too_few_groups_are_refused():
    parameters = SequentialParameters(0.1, IntegerNoise("discrete Laplace", 0.05))
    rng = np.random.default_rng(0)
    factors = np.broadcast_to(np.eye(2), (20, 2, 2))
    targets = rng.normal([5.0, -3.0], 0.1, size=(20, 2))
    randomness = Randomness(seed=1)
    found = [sequential.release(factors, targets, parameters, randomness) for _ in range(300)]
    # at the largest depth, 10, the chance is that of Z >= threshold - 10
    at_most = release_chance(10, verdict_threshold(20, parameters.verdict), parameters.verdict)
    assert at_most < 0.002
    assert sum(vector is not None for vector in found) <= 5


def test_votes_at_the_ends_of_the_doubles_are_survived():
    values = [LARGEST, -LARGEST, 5e-324, 0.0, np.nan, np.inf, -np.inf]
    targets = np.array([[a, b] for a in values for b in values])
    factors = np.broadcast_to(np.array([[1e-300, 1e300], [0.0, 1e-300]]), (len(targets), 2, 2))
    parameters = SequentialParameters(1.0, IntegerNoise("discrete Laplace", 1.0))
    for seed in range(20):
        found = sequential.release(factors, targets, parameters, Randomness(seed=seed))
        assert found is None or np.isfinite(found).all()


def test_the_atom_is_that_of_the_referee():
    assert ATOM == verify.ATOM
