"""The referee: known answers, brute force, the theorems, and that it can convict."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import published_variant as published
from tukeyreg.privacy import verify
from tukeyreg.privacy.verify import (
    ATOM,
    bernoulli_divergence,
    joint_divergence,
    joint_law,
    pass_probability,
    pass_threshold,
    safe_distances,
    safety_distance,
    selection_divergence,
    stage_divergence,
    stage_law,
    stage_loss,
)
from verify_cases import cases, climb, gaussian, geometric, neighbours, split, ties

LENIENT = {"deadline": None, "suppress_health_check": list(HealthCheck)}
epsilons = st.floats(math.log(0.1), math.log(5)).map(math.exp)


def whole_mechanism(case):
    return joint_divergence(
        case.models,
        case.neighbour,
        epsilon=case.epsilon,
        test_epsilon=case.test_epsilon,
        **case.safety,
    )


# ---------------------------------------------------------------- the published variant

HALF = math.log(3) / 2
DELTA = 1e-5


def geometric_pair(rate):
    """1000 models that close in on 0; the neighbour moves the leftmost beyond the rightmost."""
    steps = np.exp(-rate * HALF * np.arange(500))
    models = np.concatenate([-steps, 3 * steps])[:, None]
    neighbour = models.copy()
    neighbour[0] = models.max() + 1
    return models, neighbour


@pytest.fixture(scope="module")
def counterexample():
    return geometric_pair(0.25)


def test_published_safety_test_accepts_the_counterexample(counterexample):
    parameters = {"half_epsilon": HALF, "delta": DELTA}
    assert published.distance(counterexample[0], restriction_depth=250, **parameters) == 48
    assert published.distance(counterexample[1], restriction_depth=250, **parameters) == 47
    assert math.ceil(published.threshold(**parameters)) == 20


def test_monotone_form_leaks_on_the_counterexample(counterexample):
    loss = selection_divergence(
        *counterexample,
        epsilon=HALF,
        selection_epsilon=HALF,
        restriction_depth=250,
        exponent=1.0,
    )
    assert loss.worst == pytest.approx(0.0864, abs=5e-5)
    assert loss.worst > 8000 * DELTA


def test_half_exponent_does_not(counterexample):
    loss = selection_divergence(
        *counterexample, epsilon=HALF, selection_epsilon=HALF, restriction_depth=250
    )
    assert loss.worst < 1e-15
    whole = joint_divergence(
        *counterexample,
        epsilon=2 * HALF,
        test_epsilon=HALF,
        selection_epsilon=HALF,
        delta=DELTA,
        restriction_depth=250,
    )
    assert whole.worst < 1e-15


def test_published_pass_bit_is_not_private_as_claimed():
    """Scale eps/2 with the whole budget eps = ln 3, where 2/eps is needed."""
    bits = [
        published.pass_probability(k, half_epsilon=HALF, delta=DELTA, scale=HALF) for k in (18, 19)
    ]
    assert math.log(bits[1] / bits[0]) == pytest.approx(1 / HALF)
    assert round(1 / HALF, 2) == 1.82
    assert bernoulli_divergence(*bits, epsilon=HALF).backward > 0.09
    assert bernoulli_divergence(*bits, epsilon=2 * HALF).backward > 0.07
    correct = [
        published.pass_probability(k, half_epsilon=HALF, delta=DELTA, scale=1 / HALF)
        for k in (18, 19)
    ]
    assert bernoulli_divergence(*correct, epsilon=HALF).worst < 1e-15


def test_whole_published_mechanism_is_convicted_at_its_whole_budget():
    """Distances just below the threshold bring out the wrong scale of the noise."""
    pair = geometric_pair(0.33)
    parameters = {"half_epsilon": HALF, "delta": DELTA, "restriction_depth": 250}
    assert [published.distance(side, **parameters) for side in pair] == [19, 18]
    assert published.divergence(*pair, scale=HALF, **parameters).worst > 7000 * DELTA


# ---------------------------------------------------------------- the theorems


def theorem_1(examples):
    safe = []

    @settings(max_examples=examples, **LENIENT)
    @given(cases())
    def holds(case):
        distances = [safety_distance(x, **case.safety) for x in (case.models, case.neighbour)]
        safe.append(max(distances) >= 0)
        event(f"safe: {safe[-1]}")
        assert whole_mechanism(case).worst <= case.delta
        if distances[0] >= 0:  # Lemma 1
            loss = selection_divergence(
                case.models,
                case.neighbour,
                epsilon=case.selection_epsilon,
                selection_epsilon=case.selection_epsilon,
                restriction_depth=case.restriction_depth,
            )
            assert loss.forward <= case.delta

    holds()
    return np.mean(safe)


def test_theorem_1_and_lemma_1():
    assert theorem_1(5000) > 0.2


@pytest.mark.slow
def test_theorem_1_and_lemma_1_on_many_pairs():
    assert theorem_1(40_000) > 0.2


@settings(max_examples=2000, **LENIENT)
@given(cases())
def test_lemma_2(case):
    first, second = (safe_distances(x, **case.safety) for x in (case.models, case.neighbour))
    assert first == list(range(len(first)))
    assert second == list(range(len(second)))
    assert abs(len(first) - len(second)) <= 1


@settings(max_examples=2000, **LENIENT)
@given(neighbours(max_dimension=1), epsilons, st.sampled_from([ATOM, 0.0, 0.5]))
def test_theorem_2(pair, epsilon, atom):
    first, second = (x[:, 0] for x in pair)
    loss = stage_loss(first, second, stage_epsilon=epsilon, atom=atom)
    assert max(loss.forward, loss.backward, loss.range) <= epsilon
    assert stage_divergence(
        first, second, epsilon=epsilon, stage_epsilon=epsilon, atom=atom
    ).worst < (1e-60)


@settings(max_examples=200, **LENIENT)
@given(neighbours(max_dimension=1), epsilons)
def test_added_value_allows_the_exponent_one(pair, epsilon):
    values = pair[0][:, 0]
    loss = stage_loss(values, values[1:], stage_epsilon=epsilon, exponent=1.0)
    assert max(loss.forward, loss.backward, loss.range) <= epsilon


@given(epsilons, st.floats(-12, math.log10(0.4)).map(lambda x: 10**x))
def test_threshold_is_the_smallest_and_the_test_private(epsilon, delta):
    curve = [pass_probability(k, test_epsilon=epsilon, delta=delta) for k in range(-1, 12)]
    assert curve[0] <= delta < curve[1]  # one lower threshold is one more unit of distance
    for p, q in itertools.pairwise(curve):
        assert p <= q
        assert bernoulli_divergence(p, q, epsilon=epsilon).worst < 1e-13  # p and q are rounded


def test_pass_probability_is_the_tail_of_the_discrete_laplace_law():
    z = np.arange(-400, 401)
    law = np.exp(-0.7 * abs(z))
    threshold = pass_threshold(test_epsilon=0.7, delta=1e-3)
    for k in (-1, 0, threshold, threshold + 3, 40):
        expected = law[k + z >= threshold].sum() / law.sum()
        assert pass_probability(k, test_epsilon=0.7, delta=1e-3) == pytest.approx(expected, 1e-13)


# ---------------------------------------------------------------- a search that can convict

SETTINGS = [
    # models, dimension, eps1, eps2, delta, t
    (16, 1, 1.0, 1.0, 0.1, 4),
    (17, 2, 0.5, 3.0, 0.1, 4),
    (24, 1, 1.0, 3.0, 0.01, 6),
    (60, 1, 0.5, 3.0, 0.1, 15),
    (16, 3, 1.0, 2.0, 0.05, 8),
]


def joint_ratio(test_epsilon, selection_epsilon, delta, depth, *, lowered=0, exponent=0.5, gate=1):
    """Divergence / delta of a mechanism built like `joint`, with room for mistakes."""

    def passes(models):
        if not gate:
            return 1.0
        k = safety_distance(
            models, selection_epsilon=selection_epsilon, delta=delta, restriction_depth=depth
        )
        return pass_probability(k + lowered, test_epsilon=test_epsilon, delta=delta)

    def ratio(models, neighbour):
        loss = selection_divergence(
            models,
            neighbour,
            epsilon=test_epsilon + selection_epsilon,
            selection_epsilon=selection_epsilon,
            restriction_depth=depth,
            exponent=exponent,
            pass_probabilities=(passes(models), passes(neighbour)),
        )
        return loss.worst / delta

    return ratio


def worst_joint(setting, layout, *, seed, steps, **defect):
    m, d, *parameters = setting
    start = layout(np.random.default_rng(seed), m, d)
    return climb(joint_ratio(*parameters, **defect), start, seed=seed, steps=steps, enough=1.001)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", [split, geometric, gaussian])
def test_search_does_not_break_joint(setting, layout):
    assert worst_joint(setting, layout, seed=1, steps=600) <= 1 + 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("layout", [split, geometric, gaussian, ties])
@pytest.mark.parametrize("seed", range(4))
def test_long_search_does_not_break_joint(setting, layout, seed):
    assert worst_joint(setting, layout, seed=seed, steps=2000) <= 1 + 1e-12


@pytest.mark.parametrize("setting", [SETTINGS[2], SETTINGS[3]])
def test_search_convicts_the_exponent_one(setting):
    assert worst_joint(setting, split, seed=1, steps=2000, exponent=1.0) > 1.001


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("defect", [{"lowered": 1}, {"lowered": 3}, {"gate": 0}])
def test_search_convicts_a_weak_safety_test(setting, defect):
    assert worst_joint(setting, geometric, seed=1, steps=2000, **defect) > 1.001


def test_search_on_stages():
    def ratio(exponent):
        def loss(models, neighbour):
            sides = models[:, 0], neighbour[:, 0]
            found = stage_loss(*sides, stage_epsilon=0.5, exponent=exponent)
            return max(found.forward, found.backward, found.range) / 0.5

        return loss

    for layout in (split, geometric, gaussian, ties):
        start = layout(np.random.default_rng(0), 11, 1)
        assert climb(ratio(0.5), start, seed=0, steps=100) <= 1
        assert climb(ratio(1.0), start, seed=0, steps=100, enough=1) > 1


# ---------------------------------------------------------------- brute force and hand results


def brute_cells(models, neighbour):
    """(volume, u, u') of every grid cell, from the counts of the definition at its midpoint."""
    both = np.vstack([models, neighbour])
    edges = [np.unique(column) for column in both.T]
    sides = [list(itertools.pairwise(e.tolist())) for e in edges]
    for cell in itertools.product(*sides):
        point = np.array([(low + high) / 2 for low, high in cell])
        yield (
            math.prod(high - low for low, high in cell),
            *(
                int(min((x <= point).sum(axis=0).min(), (x >= point).sum(axis=0).min()))
                for x in (models, neighbour)
            ),
        )


def integer_models(rng, m, d):
    return rng.integers(-40, 41, (m, d)).astype(float)


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("replaced", [1, 2, None])
@pytest.mark.parametrize("m", [5, 8])
def test_joint_volumes_against_grid_cells(m, d, replaced):
    rng = np.random.default_rng([m, d, replaced or 0])
    for t in range(1, (m + 1) // 2 + 1):
        models = integer_models(rng, m, d)
        neighbour = models.copy()
        neighbour[:replaced] = integer_models(rng, m, d)[:replaced]
        expected = {}
        for volume, *depths in brute_cells(models, neighbour):
            i, j = (max(0, u - t + 1) for u in depths)
            if (i or j) and volume:
                expected[i, j] = expected.get((i, j), 0) + int(volume)
        levels = verify._levels(models, t), verify._levels(neighbour, t)
        cells = {(i, j): v >> (1074 * d) for i, j, v in verify._joint_cells(*levels)}
        assert cells == expected
        if replaced == 1:
            assert verify._reach(*levels) <= 1


@pytest.mark.parametrize("d", [1, 2])
def test_selection_divergence_against_grid_cells(d):
    rng = np.random.default_rng(d)
    for m, t, epsilon in [(6, 1, 0.0), (7, 2, 0.3), (8, 3, 0.1)]:
        models, neighbour = integer_models(rng, m, d), integer_models(rng, m, d)
        cells = np.array(list(brute_cells(models, neighbour)))
        weights = [cells[:, 0] * np.exp(0.7 * u) * (u >= t) for u in cells[:, 1:].T]
        p, q = (w / w.sum() for w in weights)
        loss = selection_divergence(
            models, neighbour, epsilon=epsilon, selection_epsilon=1.4, restriction_depth=t
        )
        factor = math.exp(epsilon)
        assert loss.forward == pytest.approx(np.maximum(p - factor * q, 0).sum(), rel=1e-12)
        assert loss.backward == pytest.approx(np.maximum(q - factor * p, 0).sum(), rel=1e-12)


@settings(max_examples=100, **LENIENT)
@given(cases(max_models=16))
def test_joint_divergence_is_the_gated_selection(case):
    ratio = joint_ratio(
        case.test_epsilon, case.selection_epsilon, case.delta, case.restriction_depth
    )
    # The budgets add up in doubles on both sides; the pass probabilities are rounded in one.
    assert whole_mechanism(case).worst == pytest.approx(
        ratio(case.models, case.neighbour) * case.delta, rel=1e-12, abs=1e-15
    )


def test_safety_distance_by_its_definition():
    rng = np.random.default_rng(3)
    found = set()
    for _ in range(60):
        m, d = int(rng.integers(8, 40)), int(rng.integers(1, 4))
        t, rate, delta = (
            int(rng.integers(1, m // 2)),
            rng.uniform(0.5, 4),
            10 ** rng.uniform(-4, -1),
        )
        models = split(rng, m, d)
        s, top = np.sort(models, axis=0), (m + 1) // 2
        V = [math.inf, *((s[m - p] - s[p - 1]).prod() for p in range(1, top + 1)), 0.0, 0.0]
        M = [sum((V[p] - V[p + 1]) * math.exp(rate * p / 2) for p in range(a, top + 1))
             for a in range(top + 1)]  # fmt: skip
        safe = [
            k
            for k in range(t)
            if t + k <= top
            and M[t + k] > 0
            and V[t - 1 - k] * math.exp(rate * (t + 1 + k) / 2) <= delta * M[t + k]
        ]
        result = safe_distances(models, selection_epsilon=rate, delta=delta, restriction_depth=t)
        assert result == safe
        found.add(len(safe))
    assert len(found) > 3


def test_models_without_volume_are_refused():
    same = np.full((12, 2), 7.0)
    safety = {"selection_epsilon": 1.0, "delta": 0.1, "restriction_depth": 3}
    assert safety_distance(same, **safety) == -1
    moved = same.copy()
    moved[0] = 9.0
    parameters = {"epsilon": 0.0, "test_epsilon": 1.0, **safety}
    assert joint_divergence(same, moved, **parameters).worst == 0.0

    # One side has volume: it passes by noise, the other side never releases a point.
    wide = np.array([0.0] * 3 + [1.0] * 3)[:, None]
    flat = np.array([0.0] * 2 + [1.0] * 4)[:, None]
    parameters["restriction_depth"] = 3
    loss = joint_divergence(wide, flat, **parameters)
    leak = pass_probability(-1, test_epsilon=1.0, delta=0.1)
    assert loss.forward == pytest.approx(leak)
    with pytest.raises(ValueError, match="no volume"):
        joint_law(flat, selection_epsilon=1.0, restriction_depth=3)


def test_joint_law_adds_up():
    models = gaussian(np.random.default_rng(0), 15, 2)
    law = joint_law(models, selection_epsilon=1.0, restriction_depth=3)
    assert list(law.depth_probabilities) == [3, 4, 5, 6, 7, 8]
    assert law.depth_probabilities[8] == 0.0
    assert math.fsum(law.depth_probabilities.values()) == pytest.approx(1, abs=1e-14)
    edges = [-math.inf, -0.3, 0.1, 0.4, math.inf]
    cells = itertools.product(itertools.pairwise(edges), repeat=2)
    parts = [law.box_probability(*zip(*cell, strict=True)) for cell in cells]
    assert min(parts) > 0
    assert math.fsum(parts) == pytest.approx(1, abs=1e-14)
    assert law.box_probability([0.1, 5.0], [0.1, 6.0]) == 0.0


@settings(max_examples=150, **LENIENT)
@given(neighbours(max_dimension=1), epsilons, st.sampled_from([ATOM, 0.0]))
def test_stage_law_is_a_law(pair, epsilon, atom):
    values = pair[0][:, 0]
    law = stage_law(values, stage_epsilon=epsilon, atom=atom)
    assert law.breakpoints == tuple(np.unique(np.append(values, 0.0)))
    assert len(law.intervals) == len(law.breakpoints) + 1
    assert min(law.intervals) > 0
    assert math.fsum([*law.intervals, law.atom]) == pytest.approx(1, abs=1e-14)
    points = np.unique([*law.breakpoints, *np.nextafter(law.breakpoints, math.inf), -1e-3, 1, 2e4])
    curve = [law.cdf(x) for x in (-math.inf, *points, math.inf)]
    assert curve[0] == 0.0
    assert curve[-1] == pytest.approx(1, abs=1e-15)
    assert curve == sorted(curve)
    at_breaks = np.cumsum(law.intervals)[:-1] + law.atom * (np.array(law.breakpoints) >= 0)
    assert [law.cdf(x) for x in law.breakpoints] == pytest.approx(at_breaks, abs=1e-13)


def test_stage_law_by_hand():
    """Depth is 1 on [-1, 1] and 0 outside; half of the continuous base mass lies inside."""
    rate = math.exp(0.75)
    total = rate * (ATOM + (1 - ATOM) / 2) + (1 - ATOM) / 2
    law = stage_law([-1.0, 1.0], stage_epsilon=1.5)
    tail, inner = (1 - ATOM) / 4 / total, rate * (1 - ATOM) / 4 / total
    assert law.intervals == pytest.approx((tail, inner, inner, tail), rel=1e-14)
    assert law.atom == pytest.approx(rate * ATOM / total, rel=1e-14)
    assert law.cdf(256.0) == pytest.approx(1 - tail / 2, rel=1e-14)  # 256^(-1/8) = 1/2
    assert law.cdf(-(0.5**8)) == pytest.approx(tail + inner / 2, rel=1e-14)


def test_stage_loss_by_hand():
    """Values 1 against -1: depth 0 everywhere but for points without mass, so no loss."""
    assert stage_loss([1.0], [-1.0], stage_epsilon=1.0).range == 0.0
    loss = stage_loss([0.0], [1.0], stage_epsilon=1.0)  # only the atom's depth differs
    assert loss.range == 0.5
    assert loss.backward == pytest.approx(math.log(ATOM * math.exp(0.5) + 1 - ATOM), rel=1e-14)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stage_law([math.nan], stage_epsilon=1.0), "finite"),
        (lambda: stage_law([1.0], stage_epsilon=0.0), "stage_epsilon"),
        (lambda: stage_law([1.0], stage_epsilon=1.0, atom=1.0), "atom"),
        (lambda: stage_law([1.0], stage_epsilon=1.0).cdf(math.nan), "number"),
        (lambda: pass_threshold(test_epsilon=1.0, delta=0.5), "delta"),
        (lambda: pass_probability(-2, test_epsilon=1.0, delta=0.1), "distance"),
        (lambda: bernoulli_divergence(0.5, 1.5, epsilon=0.0), "p and q"),
        (lambda: bernoulli_divergence(0.5, 0.5, epsilon=-1.0), "epsilon"),
        (lambda: joint_law([[1.0]], selection_epsilon=1.0, restriction_depth=2), "depth"),
        (
            lambda: selection_divergence(
                [[1.0]], [[1.0, 2.0]], epsilon=1.0, selection_epsilon=1.0, restriction_depth=1
            ),
            "shapes",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
