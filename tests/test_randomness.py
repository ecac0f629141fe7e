"""Exact decisions: both ways agree, points are correctly rounded, laws are the stated ones."""

import ast
import copy
import itertools
import math
import os
import pickle
from decimal import Decimal, localcontext
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from flint import arb
from hypothesis import given, settings
from hypothesis import strategies as st

import tukeyreg
from law_checks import P_LIMIT, chi_square_p, integers_p, share_p
from tukeyreg.grouping import even_partition
from tukeyreg.mechanisms import joint, sequential
from tukeyreg.mechanisms.depth import UNIT
from tukeyreg.mechanisms.joint import JointParameters
from tukeyreg.mechanisms.noise import IntegerNoise
from tukeyreg.mechanisms.randomness import LazyUniform, Randomness, Weights, tail_threshold
from tukeyreg.mechanisms.sequential import SequentialParameters
from tukeyreg.privacy.verify import pass_threshold

LENIENT = {"deadline": None}
SCRIPT_BITS = 8192


class Script:
    """Given bits first, then more that depend on a seed only."""

    def __init__(self, start=b"", seed=0):
        rng = np.random.default_rng(seed)
        self.bytes = start + rng.bytes(SCRIPT_BITS // 8 - len(start))
        self._used = 0

    def raw(self, count):
        taken = self.bytes[self._used : self._used + count]
        assert len(taken) == count
        self._used += count
        return taken

    @property
    def uniform(self):
        """The ends of what the bits leave of the first uniform number, as fractions."""
        numerator = int.from_bytes(self.bytes, "big")
        return Fraction(numerator, 1 << SCRIPT_BITS), Fraction(numerator + 1, 1 << SCRIPT_BITS)


def scripted(start=b"", seed=0, *, fast=True):
    randomness = Randomness(seed=0, fast=fast)
    randomness._bits = Script(start, seed)
    return randomness


class OwnBits(Randomness):
    """A fresh stream for every decision, so that runs that ask for more bits stay in step."""

    def uniform(self):
        self.decisions = getattr(self, "decisions", 0) + 1
        return LazyUniform(Script(seed=[int.from_bytes(self.key()[:4], "big"), self.decisions]))


def bits_near(value, offset, size=8):
    """The first bytes of a uniform number near a fraction of [0, 1]."""
    numerator = math.floor(value * (1 << (8 * size))) + offset
    return max(0, min(numerator, (1 << (8 * size)) - 1)).to_bytes(size, "big")


starts = st.one_of(
    st.binary(max_size=16),
    st.sampled_from([b"\x00" * 40, b"\xff" * 40, b"\x80" + b"\x00" * 39, b"\x7f" + b"\xff" * 39]),
)
finite = st.floats(allow_nan=False, allow_infinity=False)


# ---------------------------------------------------------------- choices

magnitudes = st.one_of(
    st.sampled_from([0.0, 1.0, 5e-324, 1e-300, 1e-17, 1 / 3, 1e17, 1e300]),
    st.floats(0, 1e3),
    st.floats(1, 1 + 1e-12),
)


def weights_of(values, relative_error=2.0**-52):
    return Weights(np.array(values, dtype=float), relative_error, lambda: [arb(w) for w in values])


def choice_by_definition(values, script):
    cumulative = list(itertools.accumulate(map(Fraction, values)))
    found = {
        next(i for i, c in enumerate(cumulative) if end * cumulative[-1] <= c)
        for end in script.uniform
    }
    assert len(found) == 1, "the script has too few bits to tell"
    return found.pop()


@settings(max_examples=1500, **LENIENT)
@given(
    st.lists(magnitudes, min_size=1, max_size=12).filter(any),
    st.integers(0, 11),
    st.integers(-3, 3),
    st.integers(0, 2**20),
)
def test_choice_is_the_definition_on_both_paths(values, boundary, offset, seed):
    """The bits are put next to the boundary between two choices."""
    total = sum(map(Fraction, values))
    start = bits_near(sum(map(Fraction, values[: boundary % len(values) + 1])) / total, offset)
    fast, exact = (scripted(start, seed, fast=way) for way in (True, False))
    chosen = fast.choice(weights_of(values))
    assert chosen == exact.choice(weights_of(values))
    assert chosen == choice_by_definition(values, fast._bits)
    assert values[chosen] > 0


@settings(max_examples=400, **LENIENT)
@given(
    st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=300),
    st.sampled_from([32 * UNIT, 1e-9, 1e-3]),
    st.integers(0, 299),
    st.integers(0, 2**20),
    st.booleans(),
)
def test_errors_within_the_stated_bound_do_not_change_the_choice(
    values, error, boundary, seed, below
):
    """Adversarial errors: everything up to the boundary too large, everything after too small."""
    boundary = boundary % len(values)
    signs = np.where(np.arange(len(values)) <= boundary, 1.0, -1.0)
    weights = Weights(
        np.array(values) * (1 + 0.99 * error * signs), error, lambda: [arb(w) for w in values]
    )
    share = sum(map(Fraction, values[: boundary + 1])) / sum(map(Fraction, values))
    nudge = Fraction(error) * Fraction(seed % 1000, 2000)
    start = bits_near(share - nudge if below else share + nudge, 0, 12)
    fast, exact = (scripted(start, seed, fast=way) for way in (True, False))
    assert fast.choice(weights) == exact.choice(weights)


def test_understated_errors_do_change_the_choice():
    """The check above can fail: here the doubles are further off than they admit."""
    values = [1.0, 1.0]
    wrong = Weights(np.array([1.0 + 1e-6, 1.0]), UNIT, lambda: [arb(w) for w in values])
    start = bits_near(Fraction(1, 2) + Fraction(1, 10**7), 0)
    fast, exact = (scripted(start, fast=way) for way in (True, False))
    assert (fast.choice(wrong), exact.choice(wrong)) == (0, 1)


@pytest.mark.parametrize("scale", [math.inf, math.nan])
def test_weights_beyond_doubles_are_left_to_the_exact_path(scale):
    weights = Weights(np.array([1.0, scale]), UNIT, lambda: [arb(1), arb(3)])
    drawn = [scripted(seed=seed).choice(weights) for seed in range(300)]
    assert drawn == [scripted(seed=seed, fast=False).choice(weights) for seed in range(300)]
    assert share_p(sum(drawn), 300, 0.75) > P_LIMIT


@pytest.mark.parametrize("fast", [True, False])
def test_choice_follows_its_weights(fast):
    values = [3.0, 0.0, 1e-3, 0.5, 1e-30, 2.0]
    randomness = Randomness(seed=5, fast=fast)
    drawn = [randomness.choice(weights_of(values)) for _ in range(3000)]
    counts = np.bincount(drawn, minlength=6)
    assert chi_square_p(counts, np.array(values) / sum(values)) > P_LIMIT


def test_fast_and_exact_runs_of_whole_mechanisms_agree():
    rng = np.random.default_rng(0)
    factors = np.triu(rng.normal(size=(60, 3, 3))) + 2 * np.eye(3)
    targets = rng.normal(size=(60, 3)) + np.array([1.0, -200.0, 1e-6])
    chain = SequentialParameters(2.0, IntegerNoise("discrete Gaussian", 0.5))
    models = np.where(np.arange(60) % 2, 1.0, -1.0)[:, None] * (1 + 1e-4 * rng.random((60, 2)))
    box = JointParameters(2.0, 3.0, 0.01, restriction_depth=15)
    released = []
    for seed in range(40):
        for run in (
            lambda r: sequential.release(factors, targets, chain, r),
            lambda r: joint.release(models, box, r),
        ):
            outcomes = [run(OwnBits(seed, fast=way)) for way in (True, False)]
            released.append(outcomes[0] is not None)
            np.testing.assert_array_equal(*[[np.nan] if o is None else o for o in outcomes])
    assert sum(released[::2]) > 10
    assert sum(released[1::2]) > 10


# ---------------------------------------------------------------- points


def correctly_rounded(low, high, script):
    width = Fraction(high) - Fraction(low)
    nearest = {float(Fraction(low) + end * width) for end in script.uniform}
    assert len(nearest) == 1, "the script has too few bits to tell"
    return nearest.pop()


@settings(max_examples=500, **LENIENT)
@given(finite, finite, starts, st.integers(0, 2**20))
def test_uniform_point_is_correctly_rounded(first, second, start, seed):
    low, high = sorted((first, second))
    randomness = scripted(start, seed)
    point = randomness.uniform_point(low, high)
    assert point == (low if low == high else correctly_rounded(low, high, randomness._bits))
    assert low <= point <= high


@settings(max_examples=300, **LENIENT)
@given(st.integers(-100, 100), st.integers(1, 2**50), st.integers(-1, 1), st.integers(0, 99))
def test_uniform_point_next_to_rounding_ties(exponent, step, offset, seed):
    """The bits agree with a midpoint of two doubles for 190 bits."""
    low, high = math.ldexp(1.0, exponent), math.ldexp(2.0, exponent)
    tie = Fraction(2 * step + 1, 2**53)
    randomness = scripted(bits_near(tie, offset, 24), seed)
    point = randomness.uniform_point(low, high)
    assert point == correctly_rounded(low, high, randomness._bits)


@given(st.integers(0, 3), starts, st.integers(0, 99))
def test_uniform_point_among_the_smallest_numbers(steps, start, seed):
    low, high = -steps * 5e-324, 4 * 5e-324
    randomness = scripted(start, seed)
    assert randomness.uniform_point(low, high) == correctly_rounded(low, high, randomness._bits)


def test_point_is_finite_under_a_law_without_bounds():
    far = scripted(b"\x00" * 64)
    assert far.point(lambda u: 1 / u**8) == np.finfo(float).max
    assert scripted(b"\x00" * 64).point(lambda u: -1 / u**8) == -np.finfo(float).max


def test_lazy_uniform_never_takes_back_a_bit():
    uniform = LazyUniform(Script(seed=1))
    ends = []
    for bits in (1, 8, 9, 64, 3, 200):
        numerator, known = uniform.interval(bits)
        assert known >= bits
        ends.append((Fraction(numerator, 1 << known), Fraction(numerator + 1, 1 << known)))
    for (low, high), (next_low, next_high) in itertools.pairwise(ends):
        assert low <= next_low < next_high <= high
    ball = uniform.ball(300)
    assert ball.rad() <= arb(2) ** -300
    assert ends[-1][0] <= Fraction(float(ball.upper()))


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("rate", [0.05, 0.5493, 3.0])
def test_discrete_laplace(rate):
    randomness = Randomness(seed=11)
    sample = [randomness.discrete_laplace(rate) for _ in range(4000)]
    q = math.exp(-rate)
    p = integers_p(sample, lambda z: (1 - q) / (1 + q) * q ** abs(z), math.ceil(7 / rate))
    assert p > P_LIMIT


@pytest.mark.parametrize("scale", [1, 7])
def test_discrete_laplace_of_scale(scale):
    randomness = Randomness(seed=12)
    sample = [randomness.discrete_laplace_of_scale(scale) for _ in range(3000)]
    q = math.exp(-1 / scale)
    p = integers_p(sample, lambda z: (1 - q) / (1 + q) * q ** abs(z), 7 * scale)
    assert p > P_LIMIT


def test_published_noise_scale_is_convicted():
    """The published code used scale eps/2 where 2/eps is needed."""
    randomness = Randomness(seed=11)
    sample = [randomness.discrete_laplace(1 / 0.5493) for _ in range(4000)]
    q = math.exp(-0.5493)
    assert integers_p(sample, lambda z: (1 - q) / (1 + q) * q ** abs(z), 13) < P_LIMIT


@pytest.mark.parametrize("chance", [0.001, 0.3, 0.999])
def test_coin(chance):
    randomness = Randomness(seed=13)
    heads = sum(randomness.coin(lambda: arb(chance)) for _ in range(5000))
    assert share_p(heads, 5000, chance) > P_LIMIT


def test_sure_coins():
    randomness = Randomness(seed=14)
    assert all(randomness.coin(lambda: arb(1)) for _ in range(50))
    assert not any(randomness.coin(lambda: arb(0)) for _ in range(50))


def test_below_stays_in_range_and_is_uniform():
    for bound in (1, 2, 3, 1000, 2**31):
        drawn = Randomness(seed=15).below(bound, 5000)
        assert drawn.dtype == np.int64
        assert drawn.min() >= 0
        assert drawn.max() < bound
        counts = np.histogram(drawn / bound, bins=min(bound, 20), range=(0, 1))[0]
        if bound < 20 or bound % 20 == 0 or bound > 10**6:
            assert chi_square_p(counts, np.full(len(counts), 1 / len(counts))) > P_LIMIT
    for bound in (0, 2**31 + 1):
        with pytest.raises(ValueError, match="bound"):
            Randomness(seed=0).below(bound, 1)


def test_below_rejects_the_incomplete_last_cycle():
    """Words modulo 3 * 2**29 would make the lowest third half as likely again."""
    bound = 3 * 2**29
    thirds = np.bincount(Randomness(seed=16).below(bound, 6000) // 2**29, minlength=3)
    assert chi_square_p(thirds, np.full(3, 1 / 3)) > P_LIMIT
    words = np.random.default_rng(0).integers(2**32, size=6000, dtype=np.uint64) % bound
    assert chi_square_p(np.bincount((words // 2**29).astype(int)), np.full(3, 1 / 3)) < P_LIMIT
    last = (2**32 - 1).to_bytes(4, "little")
    randomness = scripted(last * 5 + (7).to_bytes(4, "little"))
    assert randomness.below(3, 1).tolist() == [7 % 3]


def test_permutation_is_a_permutation():
    for size in (0, 1, 2, 1000):
        assert sorted(Randomness(seed=size).permutation(size)) == list(range(size))


def test_permutations_are_equally_likely():
    randomness = Randomness(seed=17)
    orders = dict.fromkeys(itertools.permutations(range(4)), 0)
    for _ in range(6000):
        orders[tuple(randomness.permutation(4).tolist())] += 1
    assert chi_square_p(list(orders.values()), np.full(24, 1 / 24)) > P_LIMIT


def test_even_partition_is_even_and_uniform_over_pairs():
    randomness = Randomness(seed=18)
    partitions = np.array([even_partition(7, 3, randomness) for _ in range(3000)])
    sizes = [np.bincount(p, minlength=3).tolist() for p in partitions]
    assert set(map(tuple, sizes)) == {(3, 2, 2)}
    # 3 + 1 + 1 of the 21 pairs of positions share a group
    for i, j in itertools.combinations(range(7), 2):
        together = np.count_nonzero(partitions[:, i] == partitions[:, j])
        assert share_p(together, 3000, 5 / 21) > P_LIMIT


epsilons = st.floats(math.log(1e-4), math.log(20)).map(math.exp)
deltas = st.floats(-200, math.log10(0.499)).map(lambda x: 10.0**x)


@given(epsilons, deltas)
def test_tail_threshold_is_that_of_the_referee(epsilon, delta):
    assert tail_threshold(epsilon, delta) == pass_threshold(test_epsilon=epsilon, delta=delta)


@given(epsilons, deltas)
def test_tail_threshold_is_the_smallest(epsilon, delta):
    threshold = tail_threshold(epsilon, delta)
    with localcontext(prec=80):
        q = (-Decimal(epsilon)).exp()
        assert q ** (threshold + 1) / (1 + q) <= Decimal(delta)
        if threshold > 0:
            assert q**threshold / (1 + q) > Decimal(delta)


@pytest.mark.parametrize("near", [-1, 0, 1])
def test_tail_threshold_next_to_equality(near):
    with localcontext(prec=80):
        q = (-Decimal.from_float(0.7)).exp()
        delta = float(q**9 / (1 + q))
        for _ in range(abs(near)):
            delta = math.nextafter(delta, math.copysign(math.inf, near))
        assert tail_threshold(0.7, delta) == (8 if Decimal(delta) >= q**9 / (1 + q) else 9)


# ---------------------------------------------------------------- where the bits come from


def use_everything(randomness):
    randomness.key()
    randomness.discrete_laplace(0.5)
    randomness.permutation(2000)
    randomness.below(7, 2000)
    even_partition(20, 4, randomness)
    votes = np.linspace(1, 2, 40)
    parameters = SequentialParameters(1.0, IntegerNoise("discrete Gaussian", 0.1))
    sequential.release(np.ones((40, 1, 1)), votes[:, None], parameters, randomness)
    joint.release(votes[:, None], JointParameters(1.0, 1.0, 0.1, 10), randomness)


def test_a_seeded_run_never_asks_the_system(monkeypatch):
    def forbidden(size):
        raise AssertionError("a seeded run asked the operating system for bits")

    monkeypatch.setattr(os, "urandom", forbidden)
    use_everything(Randomness(seed=3))
    with pytest.raises(AssertionError, match="operating system"):
        use_everything(Randomness())


def test_an_unseeded_run_uses_the_system_alone(monkeypatch):
    asked = []

    def counted(size):
        asked.append(size)
        return bytes(i % 251 for i in range(size))

    monkeypatch.setattr(os, "urandom", counted)
    state = np.random.get_state()[1].copy()  # noqa: NPY002
    first, second = Randomness(), Randomness()
    drawn = [first.key(), second.key()]
    assert drawn[0] == drawn[1] == bytes(range(32))
    use_everything(first)
    assert sum(asked) > 20_000
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def test_system_bits_are_never_given_twice(monkeypatch):
    served = itertools.count()

    def numbered(size):
        return b"".join(next(served).to_bytes(8, "big") for _ in range(-(-size // 8)))[:size]

    monkeypatch.setattr(os, "urandom", numbered)
    bits = Randomness()._bits
    words = [bits.raw(8) for _ in range(2000)] + [bits.raw(8000)[i : i + 8] for i in (0, 800)]
    assert len(set(words)) == len(words)


def test_a_seed_marks_the_source_as_not_private():
    assert Randomness().private
    for seed in (0, 1, -1, 2**70):
        assert not Randomness(seed).private


def test_seeds_repeat_and_differ():
    keys = [Randomness(seed).key() for seed in (0, 1, -1, 2**64)]
    assert len(set(keys)) == 4
    assert keys[0] == Randomness(0).key()
    bits = Randomness(4)._bits
    pages = [bits.raw(size)[:16] for size in (4096, 16, 5000, 4096, 4080, 20_000, 16)]
    assert len(set(pages)) == len(pages)


@pytest.mark.parametrize("seed", [None, 0])
@pytest.mark.parametrize("repeat", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_source_is_not_copied(seed, repeat):
    with pytest.raises(TypeError, match="pickled"):
        repeat(Randomness(seed))


# ---------------------------------------------------------------- no other source

SOURCE = Path(tukeyreg.__file__).parent
OWN = "mechanisms/randomness.py"
#: Types of seeds that a caller may give; nothing else of theirs is used but one integer.
SEEDS = {"np.random.Generator", "np.random.RandomState", "sklearn.utils.check_random_state"}
FORBIDDEN_MODULES = {"random", "secrets", "numpy.random", "scipy.stats"}
FORBIDDEN_NAMES = ("os.urandom", "os.getrandom", "np.random", "numpy.random", "uuid.uuid")


def dotted(node):
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return inner and f"{inner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def other_sources(code):
    """Names of sources of randomness in code, not in its text."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name in FORBIDDEN_MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{a.name}" for a in node.names}
            found |= {n for n in names if n in SEEDS or n.startswith(FORBIDDEN_NAMES)}
            found |= {n for n in names if {n, node.module} & FORBIDDEN_MODULES}
        elif isinstance(node, ast.Attribute):
            name = dotted(node) or ""
            found |= {name} if name.startswith(FORBIDDEN_NAMES) else set()
    if found & SEEDS:  # the module in the name of a type is not a use of it
        found.discard("np.random")
    return found


def test_the_library_has_one_source_of_randomness():
    files = {p.relative_to(SOURCE).as_posix(): p.read_text() for p in SOURCE.rglob("*.py")}
    assert OWN in files
    used = {name: other_sources(code) for name, code in files.items()}
    assert used.pop(OWN) == {"os.urandom"}
    assert {name: found - SEEDS for name, found in used.items() if found - SEEDS} == {}
    assert len([name for name, found in used.items() if found]) <= 1


@pytest.mark.parametrize(
    "code",
    [
        "import random",
        "from random import random",
        "import secrets as s",
        "import os\nos.urandom(4)",
        "from os import urandom",
        "import numpy as np\nnp.random.default_rng(0)",
        "import numpy as np\nnp.random.seed",
        "from numpy.random import default_rng",
        "from numpy import random as r",
        "import uuid\nuuid.uuid4()",
    ],
)
def test_the_scan_finds_other_sources(code):
    assert other_sources(code) - SEEDS
    assert not other_sources(f"'''{code}'''")
