"""Lemma 3: the divergence of an adaptive sequence is never above what ``sequence_delta`` says."""

import itertools
import math
import random

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from flint import arb, ctx
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from tukeyreg.privacy import composition
from tukeyreg.privacy.budget import delta_of_rho, largest_rho
from tukeyreg.privacy.composition import (
    _Grid,
    largest_normal_by_divergence,
    largest_stage_by_divergence,
    sequence_delta,
)

LENIENT = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
}


# ---------------------------------------------------------------- broken variants


class OnlyTheMiddle(_Grid):
    """A stage is judged by its symmetric law alone."""

    def bounded_range_step(self, cells):
        half = cells // 2
        padded, n = self._padded(cells, cells), len(self._values)
        chance = 1 / (1 + math.exp(-half * self.step))
        up, low = (padded[cells - shift : cells - shift + n] for shift in (half, -half))
        self._values = chance * up + (1 - chance) * low


class RoundedDown(_Grid):
    """Losses go to the grid point below."""

    def gaussian_step(self, rate):
        reach = math.ceil(10 / math.sqrt(2 * rate))
        z = np.arange(-reach, reach + 1)
        mass = np.exp(-rate * z.astype(float) ** 2)
        shift = np.floor(rate * (1 - 2 * z) / self.step).astype(int)
        self._values = self._average(shift, mass / mass.sum())


class HalfTheRate(_Grid):
    """The noise is believed to be wider than it is."""

    def gaussian_step(self, rate):
        super().gaussian_step(rate / 2)


def swapped(epsilon, stages, stage_epsilon, before=(), after=()):
    """The recursion run forwards: what happened first is treated as last."""
    return sequence_delta(epsilon, stages, stage_epsilon, tuple(after), tuple(before))


# ---------------------------------------------------------------- one stage, in closed form


def one_stage(epsilon, stage_epsilon):
    """max over t of p_t max(0, 1 - e^(s-t)) + ..., by calculus: the best t is the middle."""
    if epsilon < 0:
        return -math.expm1(epsilon) + math.exp(epsilon) * one_stage(-epsilon, stage_epsilon)
    if epsilon >= stage_epsilon:
        return 0.0
    return math.expm1((epsilon - stage_epsilon) / 2) ** 2 / -math.expm1(-stage_epsilon)


@pytest.mark.parametrize("stage_epsilon", [0.01, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("share", [-2.0, -0.5, 0.0, 0.3, 0.77, 1.0, 1.5])
def test_one_stage_loses_what_the_closed_form_says(stage_epsilon, share):
    exact = one_stage(share * stage_epsilon, stage_epsilon)
    bound = sequence_delta(share * stage_epsilon, 1, stage_epsilon)
    assert exact <= bound <= 1.15 * exact + 2e-3 * stage_epsilon


def test_the_middle_alone_is_convicted_on_one_stage(monkeypatch):
    monkeypatch.setattr(composition, "_Grid", OnlyTheMiddle)
    assert sequence_delta(0.5, 1, 1.0) < one_stage(0.5, 1.0)


# ---------------------------------------------------------------- without adaptivity


def same_law_every_time(epsilon, times, stage_epsilon):
    """The worst t for k repetitions of one two-point law (Dong, Durfee and Rogers, 2020).

    The optimum is at one of the t = (epsilon + (i + 1) stage_epsilon) / (k + 1).
    """
    worst = 0.0
    for i in range(times):
        t = (epsilon + (i + 1) * stage_epsilon) / (times + 1)
        if not 0 < t < stage_epsilon:
            continue
        p = math.expm1(t - stage_epsilon) / math.expm1(-stage_epsilon)
        losses = [times * t - j * stage_epsilon for j in range(times + 1)]
        worst = max(
            worst,
            math.fsum(
                math.comb(times, j)
                * p ** (times - j)
                * (1 - p) ** j
                * max(0.0, -math.expm1(epsilon - loss))
                for j, loss in enumerate(losses)
            ),
        )
    return worst


def two_point(t, stage_epsilon):
    p = math.expm1(t - stage_epsilon) / math.expm1(-stage_epsilon)
    upper = {0: math.log(p), 1: math.log1p(-p)}
    lower = {0: math.log(p) - t, 1: math.log1p(-p) - t + stage_epsilon}
    return pld.from_two_probability_mass_functions(
        lower, upper, value_discretization_interval=1e-4, pessimistic_estimate=False
    )


REPEATED = [(0.0, 4, 0.1), (0.5, 5, 0.3), (1.0, 9, 0.2), (1.0, 30, 0.1), (3.0, 12, 0.6)]


@pytest.mark.parametrize(("epsilon", "times", "stage_epsilon"), REPEATED)
def test_repetition_of_one_stage_is_within_the_bound_and_close(epsilon, times, stage_epsilon):
    optimum = same_law_every_time(epsilon, times, stage_epsilon)
    bound = sequence_delta(epsilon, times, stage_epsilon)
    assert optimum <= bound
    # The slack (adaptivity and the grid's 1/64) is as if a stage's epsilon were 5 % larger.
    assert bound <= same_law_every_time(epsilon, times, 1.05 * stage_epsilon)
    for share in (0.4, 0.5, 0.55, 0.7):
        repeated = two_point(share * stage_epsilon, stage_epsilon).self_compose(times)
        assert repeated.get_delta_for_epsilon(epsilon) <= bound


def test_the_formula_of_repetition_is_that_of_dp_accounting():
    """The best t on a fine grid, by composing privacy-loss distributions."""
    grid = (two_point(k / 40 * 0.3, 0.3).self_compose(5) for k in range(1, 40))
    best = max(law.get_delta_for_epsilon(0.5) for law in grid)
    assert best == pytest.approx(same_law_every_time(0.5, 5, 0.3), rel=0.01)


GAUSSIANS = [(1.0, (0.02,)), (1.0, (0.02, 0.005)), (0.3, (0.001,) * 4), (4.0, (0.3, 0.5, 0.1))]


def gaussian_bound(epsilon, rates, grid=_Grid, cells=57):
    deviation = math.sqrt(2 * sum(rates))
    values = grid(epsilon, deviation / cells, deviation, 0.1)
    for rate in rates:
        values.gaussian_step(rate)
    return values.value()


def gaussian_losses(rates, *, pessimistic):
    laws = [
        pld.from_discrete_gaussian_mechanism(
            math.sqrt(0.5 / rate),
            value_discretization_interval=2e-4,
            pessimistic_estimate=pessimistic,
        )
        for rate in rates
    ]
    total = laws[0]
    for law in laws[1:]:
        total = total.compose(law)
    return total


@pytest.mark.parametrize(("epsilon", "rates"), GAUSSIANS)
def test_gaussian_steps_lose_what_dp_accounting_says(epsilon, rates):
    least = gaussian_losses(rates, pessimistic=False).get_delta_for_epsilon(epsilon)
    most = gaussian_losses(rates, pessimistic=True).get_delta_for_epsilon(epsilon)
    assert least <= gaussian_bound(epsilon, rates) <= 1.25 * most
    assert least <= sequence_delta(epsilon, 1, 0.02, rates[:1], rates[1:])


@pytest.mark.parametrize("broken", [RoundedDown, HalfTheRate])
@pytest.mark.parametrize(("epsilon", "rates"), GAUSSIANS)
def test_broken_gaussian_steps_are_convicted(broken, epsilon, rates):
    least = gaussian_losses(rates, pessimistic=False).get_delta_for_epsilon(epsilon)
    assert gaussian_bound(epsilon, rates, broken, cells=17) < least
    assert gaussian_bound(epsilon, rates, cells=17) >= least


def test_the_direct_bound_is_below_the_conversion_of_zcdp():
    for epsilon, stages, stage in [(1.0, 10, 0.15), (3.0, 30, 0.3), (0.2, 5, 0.03)]:
        rates = (stage**2 / 100, stage**2 / 20)
        converted = delta_of_rho(stages * stage**2 / 8 + sum(rates), epsilon)
        assert sequence_delta(epsilon, stages, stage, rates[:1], rates[1:]) < converted


def test_the_bound_grows_with_what_is_done_and_falls_with_epsilon():
    base = sequence_delta(0.5, 5, 0.2, (0.001,), (0.003,))
    assert sequence_delta(0.6, 5, 0.2, (0.001,), (0.003,)) < base
    for more in [(6, 0.2, (0.001,), (0.003,)), (5, 0.22, (0.001,), (0.003,))]:
        assert sequence_delta(0.5, *more) > base
    for more in [(5, 0.2, (0.002,), (0.003,)), (5, 0.2, (0.001,), (0.003, 0.001))]:
        assert sequence_delta(0.5, *more) > base


# ---------------------------------------------------------------- an adversary, enumerated


def integers_of(rate):
    """The discrete Gaussian law, but for a tail below 1e-20."""
    z = np.arange(-math.ceil(10 / math.sqrt(2 * rate)), math.ceil(10 / math.sqrt(2 * rate)) + 1)
    mass = np.exp(-rate * z**2.0)
    return z, mass / mass.sum()


SHARES = tuple(k / 12 for k in range(1, 12))


def two_points(share, stage_epsilon):
    """(probability, loss) of both outcomes of the extreme law with losses t and t - epsilon."""
    t = share * stage_epsilon
    p = math.expm1(t - stage_epsilon) / math.expm1(-stage_epsilon)
    return (p, t), (1 - p, t - stage_epsilon)


def best_from_here(s, steps):
    """The divergence at exp(s) that the best extreme law after every past achieves."""
    s = np.asarray(s, dtype=float)
    if not steps:
        return np.maximum(0.0, -np.expm1(np.minimum(s, 0.0)))
    (kind, size), rest = steps[0], steps[1:]
    if kind == "noise":
        z, mass = integers_of(size)
        return best_from_here(s[..., None] - size * (1 - 2 * z), rest) @ mass
    worst = np.zeros_like(s)
    for share in SHARES:
        mixed = sum(p * best_from_here(s - loss, rest) for p, loss in two_points(share, size))
        np.maximum(worst, mixed, out=worst)
    return worst


def greedy(s, steps, _past):
    """The stage that the best adversary takes after a past with the remaining exponent s."""
    size, rest = steps[0][1], steps[1:]

    def value(share):
        return sum(p * float(best_from_here(s - loss, rest)) for p, loss in two_points(share, size))

    return two_points(max(SHARES, key=value), size)


def arbitrary(seed):
    """Any bounded-range mechanism with up to six outcomes, another after every past."""

    def choose(_s, steps, past):
        size = steps[0][1]
        dice = random.Random(f"{seed} {past}")
        t = size * dice.choice([dice.random(), 0.5, 0.9])
        outcomes = []
        weights = [dice.random() + 1e-3 for _ in range(dice.randint(1, 3))]
        for weight in weights:
            up = t * dice.choice([1.0, dice.random()])
            down = (t - size) * dice.choice([1.0, dice.random()])
            # The law on two losses for which both P and P' have mass 1.
            chance = math.expm1(-down) / (math.expm1(-down) - math.expm1(-up))
            share = weight / sum(weights)
            outcomes += [(share * chance, up), (share * (1 - chance), down)]
        return outcomes

    return choose


def transcripts(s, steps, choose, past=(), p=1.0, q=1.0):
    """Every complete transcript with its probabilities P and P'."""
    if not steps:
        yield p, q
        return
    (kind, size), rest = steps[0], steps[1:]
    if kind == "noise":
        z, mass = integers_of(size)
        # Neighbours' statistics differ by 1, so P'[z] is P[z - 1].
        outcomes = [(m, size * (1 - 2 * k)) for k, m in zip(z.tolist(), mass.tolist(), strict=True)]
    else:
        outcomes = choose(s, steps, past)
    for i, (probability, loss) in enumerate(outcomes):
        yield from transcripts(
            s - loss, rest, choose, (*past, i), p * probability, q * probability * math.exp(-loss)
        )


def divergence(epsilon, steps, choose):
    """sup over S of P[S] - e^epsilon P'[S], by adding up every transcript that helps."""
    pairs = np.array(list(transcripts(epsilon, steps, choose)))
    total = pairs.sum(axis=0)
    assert total[0] == pytest.approx(1, abs=1e-9)
    assert total[1] == pytest.approx(1, abs=1e-9)
    return math.fsum(np.maximum(0.0, pairs[:, 0] - math.exp(epsilon) * pairs[:, 1]))


def steps_of(stages, stage_epsilon, before=(), after=()):
    return (
        *(("noise", rate) for rate in before),
        *(("stage", stage_epsilon),) * stages,
        *(("noise", rate) for rate in after),
    )


rates = st.floats(math.log(0.1), math.log(2)).map(math.exp)
few_noises = st.lists(rates, max_size=1).map(tuple)
sequences = st.tuples(
    st.integers(1, 3),
    st.floats(math.log(0.05), math.log(2.5)).map(math.exp),
    few_noises,
    few_noises,
)


@settings(max_examples=60, **LENIENT)
@given(sequences, st.floats(-0.5, 1.2), st.integers(0, 2**32))
@example((3, 1.0, (0.5,), (0.5,)), 0.4, 7)
def test_no_enumerated_sequence_is_worse_than_the_bound(sequence, share, seed):
    stages, stage_epsilon, before, after = sequence
    stages = min(stages, 2) if before and after else stages
    epsilon = share * (stages * stage_epsilon + sum(before + after))
    exact = divergence(epsilon, steps_of(stages, stage_epsilon, before, after), arbitrary(seed))
    assert exact <= sequence_delta(epsilon, stages, stage_epsilon, before, after)


@settings(max_examples=60, **LENIENT)
@given(sequences, st.floats(-0.5, 1.0))
def test_the_best_adversary_is_within_the_bound_and_nearly_reaches_it(sequence, share):
    stages, stage_epsilon, before, after = sequence
    epsilon = share * (stages * stage_epsilon + sum(before + after))
    exact = float(best_from_here(epsilon, steps_of(stages, stage_epsilon, before, after)))
    bound = sequence_delta(epsilon, stages, stage_epsilon, before, after)
    assert exact <= bound
    # The adversary has eleven laws to choose from, the bound a grid of 64 cells.
    assert bound <= 1.3 * exact + 0.02 * stage_epsilon


@pytest.mark.parametrize("sequence", [(2, 1.0, (), ()), (2, 1.0, (0.5,), ()), (1, 2.0, (), (0.3,))])
def test_the_best_adversary_is_a_mechanism(sequence):
    """Its value by the chain rule is the divergence of its transcripts, one by one."""
    steps = steps_of(*sequence)
    value = float(best_from_here(0.6, steps))
    assert divergence(0.6, steps, greedy) == pytest.approx(value, rel=1e-9)
    assert value <= sequence_delta(0.6, *sequence)
    assert divergence(0.6, steps, arbitrary(1)) < value


def test_adaptivity_is_worse_than_repetition():
    """So the bound has to be above the optimum without adaptivity."""
    adaptive = float(best_from_here(0.4, steps_of(3, 1.0)))
    assert adaptive > 1.001 * max(
        divergence(0.4, steps_of(3, 1.0), lambda *_, share=share: two_points(share, 1.0))
        for share in SHARES
    )


# A stage that follows noise may be the worse for it; one that comes first may not.
CONVICTING = [
    (0.9, 1, 1.0, (0.2,), ()),
    (1.5, 2, 1.0, (0.2,), ()),
    (2.5, 2, 1.0, (0.2,), ()),
    (2.5, 2, 0.5, (0.2,), ()),
]


@pytest.mark.parametrize("case", CONVICTING)
def test_the_wrong_order_of_steps_is_convicted(case):
    epsilon, *sequence = case
    exact = float(best_from_here(epsilon, steps_of(*sequence)))
    assert swapped(*case) < exact <= sequence_delta(*case)


@pytest.mark.parametrize("broken", [OnlyTheMiddle, HalfTheRate])
def test_a_broken_recursion_is_convicted(monkeypatch, broken):
    cases = list(itertools.product([0.3, 0.9, 1.5], [1, 2], [0.8, 2.0], [(0.4,)], [(), (0.2,)]))
    exact = [float(best_from_here(case[0], steps_of(*case[1:]))) for case in cases]
    assert all(value <= sequence_delta(*case) for value, case in zip(exact, cases, strict=True))
    monkeypatch.setattr(composition, "_Grid", broken)
    below = [sequence_delta(*case) < value for value, case in zip(exact, cases, strict=True)]
    assert sum(below) >= 4


# ---------------------------------------------------------------- the search


def searched(epsilon, delta, stages):
    """The rates of two noises, and what zCDP leaves for a stage beside them."""
    rho = largest_rho(epsilon, delta)
    return (0.01 * rho,), (0.1 * rho,), math.sqrt(8 * 0.89 * rho / stages) * (1 - 1e-9)


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 12.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 1e-2])
@pytest.mark.parametrize("stages", [3, 10, 60])
def test_the_search_stays_within_the_budget(epsilon, delta, stages):
    before, after, start = searched(epsilon, delta, stages)
    found = largest_stage_by_divergence(epsilon, delta, stages, before, after, start)
    assert start <= found <= 2 * start
    assert sequence_delta(epsilon, stages, found, before, after) <= delta
    if start < found < 1.98 * start:
        assert sequence_delta(epsilon, stages, 1.01 * found, before, after) > delta


def test_the_search_finds_more_than_the_conversion_of_zcdp():
    before, after, start = searched(1.0, 1e-6, 10)
    assert largest_stage_by_divergence(1.0, 1e-6, 10, before, after, start) > 1.05 * start


@pytest.mark.parametrize(
    ("epsilon", "delta", "stages", "before", "start"),
    [
        (20.5, 1e-6, 10, (0.01,), 0.5),
        (1.0, 1e-15, 10, (0.01,), 0.05),
        (1.0, 1e-6, 600, (0.0001,), 0.005),
        (1.0, 1e-6, 10, (1e-11,), 0.05),
        (1.0, 1e-6, 10, (0.0001,), 0.0),
    ],
)
def test_outside_of_its_domain_the_search_returns_its_start(epsilon, delta, stages, before, start):
    assert largest_stage_by_divergence(epsilon, delta, stages, before, (), start) == start


# ---------------------------------------------------------------- normal mechanisms that come last


def certified_normal_delta(epsilon, rho):
    """Theorem 8 of Balle and Wang (2018), in ball arithmetic."""

    def below(x):
        return (-x / arb(2).sqrt()).erfc() / 2

    with ctx.workprec(300):
        s, mu = arb(epsilon), (2 * arb(rho)).sqrt()
        return float(below(mu / 2 - s / mu) - s.exp() * below(-mu / 2 - s / mu))


@settings(max_examples=400, **LENIENT)
@given(
    st.one_of(st.floats(-2, 2), st.floats(math.log(1e-3), math.log(20)).map(math.exp)),
    st.floats(math.log(1e-8), math.log(30)).map(math.exp),
)
@example(1.0, 0.5)
@example(20.0, 30.0)
def test_normal_noise_alone_loses_what_the_closed_form_says(epsilon, rho):
    exact = certified_normal_delta(epsilon, rho)
    bound = sequence_delta(epsilon, 0, 0.0, normal=rho)
    assert exact <= bound <= exact * (1 + 1e-6) + 1e-19


ALONE = [(0.05, 0.0002), (1.0, 0.02), (1.0, 0.3), (5.0, 0.7), (15.0, 4.0)]


@pytest.mark.parametrize(("epsilon", "rho"), ALONE)
def test_normal_noise_is_that_of_dp_accounting(epsilon, rho):
    """Of one mechanism, and of several that add up to it."""
    parts = {"one": [rho], "several": [0.1 * rho, 0.3 * rho, 0.6 * rho]}
    for rhos in parts.values():
        laws = [
            pld.from_gaussian_mechanism(
                math.sqrt(0.5 / part), value_discretization_interval=1e-4 * max(1, epsilon)
            )
            for part in rhos
        ]
        total = laws[0]
        for law in laws[1:]:
            total = total.compose(law)
        theirs = total.get_delta_for_epsilon(epsilon)  # rounded up by their own grid
        ours = sequence_delta(epsilon, 0, 0.0, normal=math.fsum(rhos))
        assert 0.98 * theirs <= ours <= theirs * (1 + 1e-6)


def losses_from_below(law, rho):
    return law(math.sqrt(0.5 / rho), value_discretization_interval=1e-4, pessimistic_estimate=False)


@pytest.mark.parametrize(
    ("epsilon", "stages", "stage_epsilon", "rate", "rho"),
    [(1.0, 3, 0.05, 0.001, 0.02), (0.3, 6, 0.02, 0.0001, 0.003), (3.0, 2, 0.4, 0.01, 0.3)],
)
def test_counts_stages_and_normal_noise_are_within_the_bound(
    epsilon, stages, stage_epsilon, rate, rho
):
    bound = sequence_delta(epsilon, stages, stage_epsilon, (rate,), normal=rho)
    fixed = losses_from_below(pld.from_discrete_gaussian_mechanism, rate).compose(
        losses_from_below(pld.from_gaussian_mechanism, rho)
    )
    worst = max(
        fixed.compose(
            two_point(share * stage_epsilon, stage_epsilon).self_compose(stages)
        ).get_delta_for_epsilon(epsilon)
        for share in (0.3, 0.45, 0.5, 0.55, 0.7)
    )
    assert worst <= bound <= 1.35 * worst


def normal_delta(s, rho):
    mu = math.sqrt(2 * rho)
    return norm.cdf(mu / 2 - s / mu) - np.exp(s) * norm.cdf(-mu / 2 - s / mu)


MANY_SHARES = tuple(k / 40 for k in range(1, 40))


def best_before_normal(s, stages, stage_epsilon, rho):
    """What the best extreme law after every past achieves, when normal noise follows."""
    s = np.asarray(s, dtype=float)
    if not stages:
        return normal_delta(s, rho)
    worst = np.zeros_like(s)
    for share in MANY_SHARES:
        mixed = sum(
            p * best_before_normal(s - loss, stages - 1, stage_epsilon, rho)
            for p, loss in two_points(share, stage_epsilon)
        )
        np.maximum(worst, mixed, out=worst)
    return worst


def integrated(epsilon, laws, rho):
    """The divergence of fixed two-point laws and one normal law, added up over a grid of z."""
    mu, z = math.sqrt(2 * rho), np.linspace(-15, 15, 60_001)
    first, second = norm.pdf(z - mu), norm.pdf(z)
    total = 0.0
    for outcomes in itertools.product(*laws):
        chance = math.prod(p for p, _ in outcomes)
        loss = sum(loss for _, loss in outcomes)
        kept = np.maximum(0.0, chance * first - math.exp(epsilon - loss) * chance * second)
        total += float(kept.sum()) * (z[1] - z[0])
    return total


# Stages that cost up to a fifth of what the normal noise does, as they do in a plan.
BEFORE_NORMAL = [
    (1.0, 1, 0.05, 0.02, 1.03),
    (1.0, 2, 0.05, 0.05, 1.03),
    (0.0, 1, 0.5, 0.2, 1.03),
    (-0.7, 2, 0.3, 0.2, 1.03),
    (12.0, 2, 1.0, 3.0, 1.1),
    (3.0, 2, 0.5, 0.3, 1.15),
    (1.0, 2, 0.1, 0.02, 1.15),
]


@pytest.mark.parametrize(("epsilon", "stages", "stage_epsilon", "rho", "room"), BEFORE_NORMAL)
def test_stages_before_normal_noise_are_within_the_bound_and_close(
    epsilon, stages, stage_epsilon, rho, room
):
    exact = float(best_before_normal(epsilon, stages, stage_epsilon, rho))
    bound = sequence_delta(epsilon, stages, stage_epsilon, normal=rho)
    assert exact <= bound <= room * exact
    # A few per cent of the delta are far less in rho.
    assert bound <= best_before_normal(epsilon, stages, stage_epsilon, 1.02 * rho)
    for share in (0.2, 0.5, 0.6):
        law = two_points(share, stage_epsilon)
        value = integrated(epsilon, [law] * stages, rho)
        assert value <= bound * (1 + 1e-5)


def test_the_chain_rule_is_the_integral():
    law = two_points(0.4, 0.8)
    chained = sum(p * normal_delta(0.6 - loss, 0.05) for p, loss in law)
    assert integrated(0.6, [law], 0.05) == pytest.approx(chained, rel=1e-6)


@settings(max_examples=80, **LENIENT)
@given(
    st.integers(1, 3),
    st.floats(math.log(0.02), math.log(2)).map(math.exp),
    st.floats(math.log(0.003), math.log(3)).map(math.exp),
    st.floats(-0.5, 3),
    st.integers(0, 2**32),
)
def test_no_adaptive_sequence_before_normal_noise_is_worse(stages, stage_epsilon, rho, share, seed):
    epsilon = share * (stages * stage_epsilon / 2 + rho)
    choose = arbitrary(seed)

    def value(s, left, past):
        if not left:
            return float(normal_delta(s, rho))
        outcomes = choose(s, (("stage", stage_epsilon),), past)
        return math.fsum(
            p * value(s - loss, left - 1, (*past, i)) for i, (p, loss) in enumerate(outcomes)
        )

    exact = value(epsilon, stages, ())
    bound = sequence_delta(epsilon, stages, stage_epsilon, normal=rho)
    assert exact <= bound * (1 + 1e-9) + 1e-15


@settings(max_examples=60, **LENIENT)
@given(
    st.floats(0.01, 3),
    st.integers(1, 4),
    st.floats(0.01, 0.5),
    st.lists(st.floats(1e-4, 0.05), max_size=1).map(tuple),
    st.floats(1e-3, 1),
)
def test_the_bound_grows_with_everything_that_comes_before_normal_noise(
    epsilon, stages, stage_epsilon, before, rho
):
    base = sequence_delta(epsilon, stages, stage_epsilon, before, normal=rho)
    assume(1e-15 < base < 1)
    assert sequence_delta(epsilon, stages, stage_epsilon, before, normal=1.1 * rho) > base
    assert sequence_delta(epsilon, stages + 1, stage_epsilon, before, normal=rho) > base
    assert sequence_delta(epsilon, stages, stage_epsilon, (*before, 0.1), normal=rho) > base
    assert sequence_delta(1.1 * epsilon, stages, stage_epsilon, before, normal=rho) < base


def best_after_normal(epsilon, stage_epsilon, rho):
    """One stage that is chosen when the normal noise has been seen."""
    mu, z = math.sqrt(2 * rho), np.linspace(-14, 14, 40_001)
    rest = epsilon - (mu * z + rho)
    worst = np.max(
        [
            sum(
                p * np.maximum(0.0, -np.expm1(np.minimum(0, rest - loss)))
                for p, loss in two_points(share, stage_epsilon)
            )
            for share in MANY_SHARES
        ],
        axis=0,
    )
    return float(np.sum(norm.pdf(z) * worst)) * (z[1] - z[0])


def test_a_stage_that_follows_the_normal_noise_would_be_worse():
    """So what is called normal has to come last."""
    for epsilon, stage_epsilon, rho in [(1.0, 1.0, 0.1), (1.5, 1.0, 0.2), (0.5, 0.5, 0.02)]:
        first = float(best_before_normal(epsilon, 1, stage_epsilon, rho))
        bound = sequence_delta(epsilon, 1, stage_epsilon, normal=rho)
        assert first <= bound < 0.95 * best_after_normal(epsilon, stage_epsilon, rho)


def test_a_count_before_stages_is_followed_by_stages_that_know_it():
    for epsilon, stage_epsilon, rate, rho in [(1.0, 1.0, 0.2, 0.005), (1.5, 1.0, 0.3, 0.01)]:
        z, mass = integers_of(rate)
        losses = rate * (1 - 2 * z)
        exact = float(best_before_normal(epsilon - losses, 1, stage_epsilon, rho) @ mass)
        law = two_points(0.5, stage_epsilon)
        late = sum(p * normal_delta(epsilon - losses - loss, rho) for p, loss in law)
        fixed = float(late @ mass)
        bound = sequence_delta(epsilon, 1, stage_epsilon, (rate,), normal=rho)
        # One law for all counts would lose less than the law that fits the count.
        assert 1.05 * fixed < exact <= bound <= 1.2 * exact


# ---------------------------------------------------------------- what the checks convict


class StagesRoundedDown(_Grid):
    """The losses of a stage go to the grid point below."""

    def bounded_range_step(self, cells):
        super().bounded_range_step(cells)
        self._values = np.append(self._values[1:], self._values[-1])


def half_the_shift(s, rho):
    return composition_normal(s, rho / 4)


def without_what_is_lost(s, rho):
    """The loss of the noise is taken for its mean."""
    return np.maximum(0.0, -np.expm1(s - rho))


composition_normal = composition._normal_divergence


@pytest.mark.parametrize("broken", [half_the_shift, without_what_is_lost])
def test_broken_normal_noise_is_convicted(monkeypatch, broken):
    monkeypatch.setattr(composition, "_normal_divergence", broken)
    for epsilon, rho in ALONE:
        assert sequence_delta(epsilon, 0, 0.0, normal=rho) < certified_normal_delta(epsilon, rho)
    for epsilon, stages, stage_epsilon, rho, _ in BEFORE_NORMAL:
        exact = float(best_before_normal(epsilon, stages, stage_epsilon, rho))
        below = sequence_delta(epsilon, stages, stage_epsilon, normal=rho) < exact
        assert below or epsilon < 0


@pytest.mark.parametrize("broken", [StagesRoundedDown, OnlyTheMiddle])
def test_broken_stages_before_normal_noise_are_convicted(monkeypatch, broken):
    monkeypatch.setattr(composition, "_Grid", broken)
    below = [
        sequence_delta(*case[:3], normal=case[3]) < float(best_before_normal(*case[:4]))
        for case in BEFORE_NORMAL
    ]
    assert sum(below) >= 4


# ---------------------------------------------------------------- the search for normal noise


@pytest.mark.parametrize("epsilon", [0.01, 1.0, 12.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 1e-2])
@pytest.mark.parametrize("stages", [0, 3, 30])
def test_the_search_for_normal_noise_stays_within_the_budget(epsilon, delta, stages):
    rho = largest_rho(epsilon, delta)
    stage = math.sqrt(8 * 0.05 * rho / stages) if stages else 0.0
    before, start = (0.01 * rho,), 0.94 * rho * (1 - 1e-9)
    found = largest_normal_by_divergence(epsilon, delta, stages, stage, before, start)
    assert start < found < 2.5 * start
    assert sequence_delta(epsilon, stages, stage, before, normal=found) <= delta
    assert sequence_delta(epsilon, stages, stage, before, normal=1.002 * found) > delta
    # With nothing beside it, it is what the closed form allows.
    if not stages:
        alone = largest_normal_by_divergence(epsilon, delta, 0, 0.0, (), rho)
        assert certified_normal_delta(epsilon, alone) <= delta
        assert alone > 1.49 * rho or certified_normal_delta(epsilon, 1.0005 * alone) > delta


@pytest.mark.parametrize(
    ("epsilon", "delta", "before", "start"),
    [
        (20.5, 1e-6, (0.01,), 0.5),
        (1.0, 0.9e-14, (0.01,), 0.01),
        (1.0, 1e-6, (0.9e-10,), 0.01),
        (1.0, 1e-6, (0.0001,), 0.0),
    ],
)
def test_outside_of_its_domain_the_search_for_normal_noise_returns_its_start(
    epsilon, delta, before, start
):
    assert largest_normal_by_divergence(epsilon, delta, 3, 0.01, before, start) == start
    if start:  # and inside of it, it does not
        inside = largest_normal_by_divergence(1.0, 1e-6, 3, 0.01, (0.0001,), 0.01)
        assert inside > 0.01


def test_a_start_that_is_not_within_the_budget_by_the_grid_is_kept():
    """The grid may not confirm what zCDP allows; then zCDP is believed."""
    far = 10 * largest_rho(1.0, 1e-6)
    assert largest_normal_by_divergence(1.0, 1e-6, 0, 0.0, (), far) == far
