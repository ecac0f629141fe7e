"""``joint``: the sampler against the referee's law, the safety test, and refusals."""

import itertools
import math

import numpy as np
import pytest
from flint import arb, ctx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from law_checks import P_LIMIT, chi_square_p, share_p
from tukeyreg.mechanisms import joint
from tukeyreg.mechanisms.depth import Sides
from tukeyreg.mechanisms.joint import (
    LARGEST,
    JointParameters,
    RestrictedLaw,
    SafetyTest,
    break_ties,
    restricted_law,
)
from tukeyreg.mechanisms.randomness import Randomness
from tukeyreg.privacy import verify
from verify_cases import LAYOUTS, SCALES, any_cases, hopeful_cases

LENIENT = {"deadline": None, "suppress_health_check": list(HealthCheck)}


def parameters_of(case):
    return JointParameters(
        case.test_epsilon, case.selection_epsilon, case.delta, case.restriction_depth
    )


# ---------------------------------------------------------------- the sampler follows the law

DRAWS = 4000


def grid(models, depth):
    """For each dimension edges between order statistics, and infinity on both sides."""
    m = len(models)
    places = sorted({max(depth - 1, 0), m // 3, m // 2, m - 1 - m // 3, m - depth})
    for column in np.sort(models, axis=0).T:
        inner = [0.7 * a + 0.3 * b for a, b in itertools.pairwise(column[places].tolist())]
        yield [-math.inf, *sorted(set(inner)), math.inf]


def box_counts_p(points, models, epsilon, depth):
    """P-value of the points' counts in a grid of boxes, under the referee's exact law."""
    law = verify.joint_law(models, selection_epsilon=epsilon, restriction_depth=depth)
    edges = list(grid(models, depth))
    bins = [np.searchsorted(e[1:-1], x) for e, x in zip(edges, points.T, strict=True)]
    counts = np.zeros([len(e) - 1 for e in edges])
    np.add.at(counts, tuple(bins), 1)
    probabilities = [
        law.box_probability(*np.transpose([e[i : i + 2] for e, i in zip(edges, box, strict=True)]))
        for box in np.ndindex(counts.shape)
    ]
    return chi_square_p(counts.ravel(), probabilities)


def cloud(d, m, seed=0, *, tied=False):
    rng = np.random.default_rng([d, m, seed])
    if tied:
        return rng.integers(-6, 7, (m, d)).astype(float)
    return rng.standard_normal((m, d)) * np.array([1.0, 1e-6, 3e7])[:d]


CASES = [
    # d, m, restriction depth, epsilon, ties
    (1, 9, 2, 1.5, False),
    (1, 10, 1, 0.8, False),
    (1, 25, 6, 0.7, True),
    (2, 9, 2, 1.5, False),
    (2, 10, 2, 2.0, False),
    (2, 10, 5, 1.0, False),
    (2, 25, 4, 0.8, False),
    (2, 25, 4, 0.8, True),
    (3, 9, 1, 2.5, False),
    (3, 10, 3, 1.0, False),
    (3, 25, 5, 1.5, False),
    (3, 24, 4, 1.5, True),
]


@pytest.mark.parametrize(("d", "m", "depth", "epsilon", "tied"), CASES)
def test_the_sampler_follows_the_referee(d, m, depth, epsilon, tied):
    models = cloud(d, m, tied=tied)
    law = restricted_law(models, JointParameters(1.0, epsilon, 1e-6, depth))
    randomness = Randomness(seed=d * 100 + m)
    points = np.array([law.sample(randomness) for _ in range(DRAWS)])
    assert box_counts_p(points, models, epsilon, depth) > P_LIMIT


def test_the_exact_path_follows_the_referee():
    models = cloud(2, 10)
    law = restricted_law(models, JointParameters(1.0, 1.5, 1e-6, 2))
    randomness = Randomness(seed=3, fast=False)
    points = np.array([law.sample(randomness) for _ in range(1000)])
    assert box_counts_p(points, models, 1.5, 2) > P_LIMIT


class Textbook:
    """The sampler in plain floating point, with room for the defects of the published code."""

    def __init__(self, models, epsilon, depth, *, right="depth p", shift=0, exponent=0.5):
        self.ordered = np.sort(models, axis=0)
        self.depth, self.right, self.shift = depth, right, shift
        m = len(models)
        depths = np.arange(depth, m // 2 + 1)
        volumes = np.array([self.volume(p) - self.volume(p + 1) for p in depths])
        weights = volumes * np.exp(exponent * epsilon * (depths - depths[-1]))
        self.probabilities = weights / weights.sum()

    def box(self, p):
        m = len(self.ordered)
        if 2 * p > m:
            return self.ordered[m // 2], self.ordered[m // 2]
        return self.ordered[p - 1], self.ordered[m - p]

    def volume(self, p):
        low, high = self.box(p)
        return np.prod(high - low) if 2 * p <= len(self.ordered) else 0.0

    def sample(self, rng):
        p = self.depth + rng.choice(len(self.probabilities), p=self.probabilities)
        p = min(p + self.shift, len(self.ordered) // 2)
        (low, high), (inner_low, inner_high) = self.box(p), self.box(p + 1)
        wide, narrow = high - low, inner_high - inner_low
        if 2 * p == len(self.ordered):
            return rng.uniform(low, high)
        d = len(low)
        beyond = narrow if self.right == "depth p + 1" else wide
        cells = [np.prod(narrow[:j]) * (wide - narrow)[j] * np.prod(beyond[j + 1 :])
                 for j in range(d)]  # fmt: skip
        j = rng.choice(d, p=np.array(cells) / sum(cells))
        point = rng.uniform(inner_low, inner_high)
        if self.right == "depth p":
            point[j + 1 :] = rng.uniform(low, high)[j + 1 :]
        left = inner_low[j] - low[j]
        step = rng.uniform(0, (wide - narrow)[j])
        point[j] = low[j] + step if step < left else inner_high[j] + step - left
        return point


def textbook_p(d, m, epsilon, depth, **defect):
    models = cloud(d, m)
    sampler, rng = Textbook(models, epsilon, depth, **defect), np.random.default_rng(0)
    points = np.array([sampler.sample(rng) for _ in range(DRAWS)])
    return box_counts_p(points, models, epsilon, depth)


PLAIN = [(1, 25, 0.8, 5), (2, 10, 1.0, 2), (2, 24, 0.8, 4), (3, 24, 1.5, 5)]


@pytest.mark.parametrize("case", [*PLAIN, (3, 25, 1.5, 5)])
def test_the_textbook_sampler_without_defects_is_acquitted(case):
    assert textbook_p(*case) > P_LIMIT


@pytest.mark.parametrize("case", PLAIN[1:])
def test_a_smaller_box_to_the_right_is_convicted(case):
    assert textbook_p(*case, right="depth p + 1") < P_LIMIT


@pytest.mark.parametrize("case", PLAIN)
def test_an_index_that_is_off_by_one_is_convicted(case):
    assert textbook_p(*case, shift=1) < P_LIMIT


@pytest.mark.parametrize("case", PLAIN)
def test_the_exponent_without_one_half_is_convicted(case):
    assert textbook_p(*case, exponent=1.0) < P_LIMIT


def test_points_are_at_least_as_deep_as_the_restriction():
    for d, m, depth, epsilon, tied in CASES:
        models = cloud(d, m, seed=1, tied=tied)
        law = restricted_law(models, JointParameters(1.0, epsilon, 1e-6, depth))
        randomness = Randomness(seed=m)
        for _ in range(50):
            point = law.sample(randomness)
            below, above = (models <= point).sum(axis=0), (models >= point).sum(axis=0)
            assert min(below.min(), above.min()) >= depth


@settings(max_examples=150, **LENIENT)
@given(any_cases(max_models=14))
def test_cell_weights_are_within_their_certified_error(case):
    models = np.clip(case.models, -LARGEST, LARGEST)
    if case.restriction_depth > len(models) // 2:
        return
    law = restricted_law(models, parameters_of(case))
    weights = law.cell_weights()
    with ctx.workprec(16_384):
        exact = weights.exact()
        total = sum(exact, arb(0))
        if law.empty:
            assert total == 0
            return
        factor = arb(float(weights.approximate.max())) / max(exact, key=float_log)
        for found, true in zip(weights.approximate.tolist(), exact, strict=True):
            if found == 0:
                assert true <= total * arb(2) ** -900
            else:
                # the factor itself carries one more such error
                assert abs(arb(found) / (factor * true) - 1) < 2 * weights.relative_error


def float_log(ball):
    return float(ball.log()) if ball > 0 else -math.inf


# ---------------------------------------------------------------- the safety test

usable = st.one_of(any_cases(), hopeful_cases()).filter(
    lambda case: case.restriction_depth <= len(case.models) // 2
)


@settings(max_examples=400, **LENIENT)
@given(usable)
def test_the_distance_is_that_of_the_referee(case):
    for models in (case.models, case.neighbour):
        bounded = np.clip(models, -LARGEST, LARGEST)
        found = SafetyTest(Sides.of(bounded), parameters_of(case)).distance()
        assert found == verify.safety_distance(bounded, **case.safety)


def test_distances_of_safe_cases_are_compared_too():
    found, safety = [], {"selection_epsilon": 2.0, "delta": 0.05, "restriction_depth": 15}
    for d, rate in itertools.product((1, 2, 3), np.linspace(0.2, 1.4, 8)):
        steps = np.exp(-rate * (np.arange(60) // 2) / d)
        models = (np.where(np.arange(60) % 2, 1.0, -2.0) * steps)[:, None].repeat(d, 1)
        parameters = JointParameters(1.0, 2.0, 0.05, 15)
        found.append(SafetyTest(Sides.of(models), parameters).distance())
        assert found[-1] == verify.safety_distance(models, **safety)
    assert len(set(found)) > 4


def critical_delta(models, epsilon, t, k):
    """The delta at which C_k changes, to the nearest double."""
    sides = Sides.of(models)
    with ctx.workprec(2048):
        half = arb(epsilon) / 2
        mass = sum(
            (
                (sides.exact_volume(p) - sides.exact_volume(p + 1)) * (half * p).exp()
                for p in range(t + k, sides.deepest + 1)
            ),
            arb(0),
        )
        return float(sides.exact_volume(t - 1 - k) * (half * (t + 1 + k)).exp() / mass)


def close_calls():
    """Cases whose delta is within two units in the last place of the critical one."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        m, d = int(rng.integers(16, 40)), int(rng.integers(1, 4))
        side = np.where(np.arange(m) % 2, 1.0, -1.0)[:, None]
        models = side * (1 + 10.0 ** -rng.uniform(0.5, 3) * rng.random((m, d)))
        t, epsilon = m // 4, float(rng.uniform(2, 4))
        k = int(rng.integers(0, t - 1))
        delta = critical_delta(models, epsilon, t, k)
        if not 0 < delta < 0.4:
            continue
        for _ in range(int(rng.integers(0, 3))):
            delta = math.nextafter(delta, rng.choice([0.0, 1.0]))
        yield models, JointParameters(1.0, epsilon, delta, t)


def distances_of_close_calls():
    for models, parameters in close_calls():
        expected = verify.safety_distance(
            models,
            selection_epsilon=parameters.selection_epsilon,
            delta=parameters.delta,
            restriction_depth=parameters.restriction_depth,
        )
        yield SafetyTest(Sides.of(models), parameters).distance(), expected


def test_close_calls_are_decided_exactly(monkeypatch):
    calls = []
    exactly = SafetyTest._condition_exactly
    monkeypatch.setattr(
        SafetyTest, "_condition_exactly", lambda self, k: calls.append(k) or exactly(self, k)
    )
    pairs = list(distances_of_close_calls())
    assert len(calls) >= len(pairs) > 20
    assert all(found == expected for found, expected in pairs)


def test_a_fast_path_that_trusts_its_last_digit_is_convicted(monkeypatch):
    monkeypatch.setattr(SafetyTest, "_condition_exactly", lambda self, k: True)
    assert any(found != expected for found, expected in distances_of_close_calls())


@pytest.mark.parametrize("epsilon", [0.05, 0.5493, 2.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 0.1])
def test_the_threshold_is_that_of_the_referee(epsilon, delta):
    test = SafetyTest(Sides.of(cloud(1, 20)), JointParameters(epsilon, 1.0, delta, 5))
    assert test.threshold == verify.pass_threshold(test_epsilon=epsilon, delta=delta)


class AtDistance(SafetyTest):
    """The test of a data set at a given distance."""

    def __init__(self, distance, parameters):
        super().__init__(Sides.of(cloud(1, 20)), parameters)
        self._distance = distance

    def distance(self):
        return self._distance


def pass_share(distance, epsilon, delta, *, noise_epsilon=None):
    test = AtDistance(distance, JointParameters(epsilon, 1.0, delta, 5))
    randomness = Randomness(seed=distance + 7)
    if noise_epsilon is not None:
        draw = randomness.discrete_laplace
        randomness.discrete_laplace = lambda _: draw(noise_epsilon)
    return sum(test.passes(randomness) for _ in range(3000))


@pytest.mark.parametrize("distance", [-1, 0, 2, 5, 6, 9, 30])
def test_the_test_passes_as_often_as_it_should(distance):
    chance = verify.pass_probability(distance, test_epsilon=0.5, delta=0.02)
    assert share_p(pass_share(distance, 0.5, 0.02), 3000, chance) > P_LIMIT


def test_noise_of_the_published_scale_is_convicted():
    """Scale eps/2 where 1/eps1 = 2/eps is needed."""
    chance = verify.pass_probability(4, test_epsilon=0.5, delta=0.02)
    passed = pass_share(4, 0.5, 0.02, noise_epsilon=2.0)
    assert share_p(passed, 3000, chance) < P_LIMIT


@pytest.mark.parametrize("depth", [0, -1, 11, 100])
def test_depths_that_do_not_exist_are_refused(depth):
    with pytest.raises(ValueError, match="restriction depth"):
        SafetyTest(Sides.of(cloud(2, 20)), JointParameters(1.0, 1.0, 0.1, depth))


# ---------------------------------------------------------------- release and refusal

EASY = JointParameters(2.0, 4.0, 0.01, restriction_depth=60)


def tight(m=240, d=2, centre=5.0, spread=1.0, seed=0):
    side = np.where(np.arange(m) % 2, 1.0, -1.0)[:, None]
    hair = 1e-3 * np.random.default_rng(seed).random((m, d))
    return centre + spread * side * (1 + hair)


def test_what_agrees_is_released():
    points = [joint.release(tight(seed=s), EASY, Randomness(seed=s)) for s in range(20)]
    assert all(point is not None for point in points)
    assert all(np.all(np.abs(point - 5.0) <= 1.1) for point in points)


def test_what_does_not_agree_is_refused_with_none():
    rng = np.random.default_rng(0)
    models = np.exp(30 * rng.normal(size=(240, 2)))
    parameters = JointParameters(0.5, 0.5, 1e-6, restriction_depth=60)
    refused = [joint.release(models, parameters, Randomness(seed=s)) for s in range(50)]
    assert all(outcome is None for outcome in refused)


@pytest.mark.parametrize("centre", [0.0, 1.0, -1e7, 1e300, -1e308, 1e-300])
def test_models_that_are_all_equal(centre):
    """Ties leave a box of relative width 2**-40, whose volume is what hairs make of it."""
    models = np.full((400, 2), centre)
    parameters = JointParameters(1.0, 2.0, 1e-5, restriction_depth=100)
    outcomes = [joint.release(models, parameters, Randomness(seed=s)) for s in range(10)]
    released = [outcome for outcome in outcomes if outcome is not None]
    assert released
    bounded = np.clip(centre, -LARGEST, LARGEST)
    for point in released:
        assert np.all(np.abs(point - bounded) <= 2.0**-39 * abs(bounded) + 2.0**-999)


class NoHairs(Randomness):
    def hairs(self, rows, columns):
        return np.zeros((rows, columns))


@pytest.mark.parametrize(
    "models",
    [
        np.full((9, 2), 3.0),
        np.array([[1.0], [2.0], [2.0], [2.0], [9.0]]),
        np.column_stack([np.arange(11.0), np.zeros(11)]),
    ],
)
def test_a_region_without_volume_is_refused_even_if_the_test_passes(models, monkeypatch):
    parameters = JointParameters(1.0, 1.0, 0.1, restriction_depth=2)
    assert SafetyTest(Sides.of(models), parameters).distance() == -1
    assert RestrictedLaw(Sides.of(models), parameters).empty
    monkeypatch.setattr(SafetyTest, "passes", lambda self, randomness: True)
    assert joint.release(models, parameters, NoHairs(seed=0)) is None


def test_models_whose_deepest_region_alone_has_volume():
    models = np.array([[0.0], [0.0], [1.0], [1.0]])
    law = restricted_law(models, JointParameters(1.0, 1.0, 0.1, 1))
    points = np.array([law.sample(Randomness(seed=s)) for s in range(300)])
    assert np.all((points >= 0) & (points <= 1))
    assert 0.4 < points.mean() < 0.6


def test_the_models_are_not_changed():
    models = tight()
    kept = models.copy()
    joint.release(models, EASY, Randomness(seed=0))
    np.testing.assert_array_equal(models, kept)


# ---------------------------------------------------------------- hairs


@st.composite
def model_arrays(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**20)))
    m, d = draw(st.integers(2, 12)), draw(st.integers(1, 3))
    with np.errstate(over="ignore"):
        array = draw(st.sampled_from(SCALES)) * draw(st.sampled_from(LAYOUTS))(rng, m, d)
    return np.clip(array, -1e308, 1e308)


@settings(max_examples=200, **LENIENT)
@given(model_arrays(), st.integers(0, 100))
def test_hairs_are_thinner_than_two_to_the_minus_40(models, seed):
    moved = break_ties(models, Randomness(seed=seed))
    bounded = np.clip(models, -LARGEST, LARGEST)
    finest = 2.0**-1074
    limit = np.abs(bounded) * 2.0**-40 * (1 + 2.0**-10) + finest
    assert np.all(np.abs(moved - bounded) <= np.where(bounded == 0, 2.0**-1000, limit))


@settings(max_examples=200, **LENIENT)
@given(model_arrays(), st.integers(0, 100), st.data())
def test_hairs_of_other_models_do_not_depend_on_a_model(models, seed, data):
    row = data.draw(st.integers(0, len(models) - 1))
    other = models.copy()
    other[row] = data.draw(st.sampled_from([0.0, 1.0, 1e308, -1e-308]))
    before, after = (break_ties(x, Randomness(seed=seed)) for x in (models, other))
    unchanged = np.arange(len(models)) != row
    assert before[unchanged].tobytes() == after[unchanged].tobytes()


@pytest.mark.parametrize("value", [1e7, 0.0, 1e300, -3.0, 1e-300, 1e308])
def test_hairs_give_ties_a_volume(value):
    moved = break_ties(np.full((200, 2), value), Randomness(seed=1))
    for column in moved.T:
        assert len(np.unique(column)) > 150
    sides = Sides.of(moved)
    assert np.all(sides.volume.mantissa[:90] > 0)


def test_an_absolute_hair_is_convicted():
    """The published jitter of 1e-10 vanishes beside 1e7."""
    hair = 1e-10 * Randomness(seed=1).hairs(200, 1)
    assert len(np.unique(1e7 + hair)) == 1
    assert Sides.of(1e7 + hair).volume.mantissa.max() == 0
