"""Every random decision of the library: exact, not rounded (docs/method.md, section 8).

A decision is a coin, a choice among weights, a point of an interval under a known law, or an
integer from the discrete Laplace law. Its real-valued definition is evaluated as Arb balls, a
uniform real number is revealed bit by bit, and precision and bits grow until the decision (or the
rounding of the point to the nearest double) is the same for everything the balls allow. What
comes out is therefore a function of the ideal real-valued mechanism, and rounding it is
post-processing. A double-precision fast path may decide only where its tracked error cannot
matter.

Bits come from the operating system. A seed is for tests and experiments: whatever uses one is
marked as not private.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from flint import arb, ctx, fmpz
from numpy.typing import NDArray
from scipy.special import ndtri

from tukeyreg import kernel

__all__ = ["Draws", "LazyUniform", "Randomness", "Weights"]

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

_FIRST_PRECISION = 128
_LAST_PRECISION = 1 << 17


def precisions() -> Iterator[int]:
    """Working precisions to try in turn, each set in Arb while the caller uses it.

    Running out of them has probability below 2**-100000; the fit then fails with an error.
    """
    precision = _FIRST_PRECISION
    while precision <= _LAST_PRECISION:
        with ctx.workprec(precision):
            yield precision
        precision *= 2
    raise ArithmeticError("an exact decision was not reached at any precision; nothing is released")


class _Bits(Protocol):
    def raw(self, count: int) -> bytes: ...


class _SystemBits:
    """Bits from the operating system, fetched a page at a time."""

    def __init__(self) -> None:
        self._page = b""

    def raw(self, count: int) -> bytes:
        if count > 4096:
            return os.urandom(count)
        if len(self._page) < count:
            self._page = os.urandom(4096)
        taken, self._page = self._page[:count], self._page[count:]
        return taken


class _SeededBits:
    """A reproducible stream (SHAKE-256 in counter mode) for tests and experiments."""

    def __init__(self, seed: int) -> None:
        self._seed = repr(int(seed)).encode()
        self._counter = 0
        self._page = b""

    def raw(self, count: int) -> bytes:
        while len(self._page) < count:
            block = hashlib.shake_256(self._seed + b":%d" % self._counter)
            self._page += block.digest(max(4096, count))
            self._counter += 1
        taken, self._page = self._page[:count], self._page[count:]
        return taken


class LazyUniform:
    """A uniform real number in (0, 1), known to as many bits as were asked for."""

    def __init__(self, bits: _Bits, numerator: int = 0, known: int = 0) -> None:
        self._bits = bits
        self._numerator = numerator
        self._known = known

    def interval(self, bits: int) -> tuple[int, int]:
        """``(a, k)`` such that the number lies in ``[a, a + 1] / 2**k``, with ``k >= bits``."""
        missing = -(-(bits - self._known) // 8)
        if missing > 0:
            more = int.from_bytes(self._bits.raw(missing), "big")
            self._numerator = (self._numerator << (8 * missing)) | more
            self._known += 8 * missing
        return self._numerator, self._known

    def ball(self, bits: int) -> arb:
        """A ball that holds the number, of radius ``2**-(bits + 1)`` or less."""
        numerator, known = self.interval(bits)
        with ctx.workprec(known + 8):
            half = arb(2) ** (-known - 1)
            return arb((2 * numerator + 1) * half, half)


@dataclass(frozen=True)
class Weights:
    """Weights of a choice, as doubles with a certified error and as balls of any precision.

    Parameters
    ----------
    approximate : array of float
        Up to one common positive factor, the weights. Each is within ``relative_error`` of the
        true value, or flushed to zero when it is less than ``2**-900`` of the largest.
    relative_error : float
        The certified bound.
    exact : callable
        The true weights as balls, at Arb's working precision when called.
    """

    approximate: Floats
    relative_error: float
    exact: Callable[[], Sequence[arb]]


@dataclass(frozen=True, repr=False)
class Draws:
    """Independent uniform integers for units, had again from a key and nothing else.

    A unit that is a row draws by its place, from the ChaCha20 stream of the key; one that has an
    identifier by its keyed hash (SipHash-2-4). So engines that read the same rows give the same
    draws, and so does a task that is tried again. Who has no key cannot tell them from draws of
    the operating system's.

    Parameters
    ----------
    key : bytes
        32 secret bytes, see :meth:`Randomness.draws`.
    part : int
        Which part of the storage rows are counted in, where they have no places in the whole.

    Examples
    --------
    >>> draws = Draws(bytes(32))
    >>> draws.of_rows(6, first=0, count=5).tolist()
    [4, 3, 5, 0, 4]
    >>> draws.of_rows(6, first=3, count=2).tolist()
    [0, 4]
    """

    key: bytes
    part: int = 0

    def of_rows(self, bound: int, first: int, count: int) -> NDArray[np.int32]:
        """For rows by their places ``first .. first + count - 1``, in ``0 .. bound - 1``.

        That 2**32 is not a multiple of the bound makes some values likelier by 2**-32 times it.
        Neither groups nor random parts of the units ask for more (docs/method.md, section 2).
        """
        return kernel.draws(self.key, self.part, first, count, bound)

    def of_texts(self, bound: int, texts: Sequence[bytes]) -> NDArray[np.int32]:
        """For identifiers in bytes."""
        starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        buffer = np.frombuffer(b"".join(texts) or b" ", dtype=np.uint8)
        return self.of_hashes(bound, kernel.hash_texts(buffer, starts, self.key))

    def of_integers(self, bound: int, identifiers: Integers) -> NDArray[np.int32]:
        """For identifiers that are integers: as those of ``i`` and their digits."""
        return self.of_hashes(bound, kernel.hash_integers(identifiers, self.key))

    @staticmethod
    def of_hashes(bound: int, hashes: NDArray[np.uint64]) -> NDArray[np.int32]:
        """For identifiers by their hashes."""
        return (hashes % np.uint64(bound)).astype(np.int32)


class Randomness:
    """A source of exact random decisions.

    Parameters
    ----------
    seed : int or None
        ``None`` takes bits from the operating system. A seed makes decisions reproducible and
        :attr:`private` false.
    fast : bool
        Whether the double-precision fast path may decide. ``False`` is for tests, which check
        that both ways give the same decisions from the same bits.

    Examples
    --------
    >>> Randomness(seed=0).discrete_laplace(0.5) == Randomness(seed=0).discrete_laplace(0.5)
    True
    >>> Randomness().private
    True
    """

    def __init__(self, seed: int | None = None, *, fast: bool = True) -> None:
        self.private = seed is None
        self._bits: _Bits = _SystemBits() if seed is None else _SeededBits(seed)
        self._fast = fast

    def __reduce__(self) -> str | tuple[object, ...]:
        raise TypeError("a source of randomness is not pickled: its state must not be repeated")

    def uniform(self) -> LazyUniform:
        """A fresh uniform real number in (0, 1)."""
        return LazyUniform(self._bits)

    def key(self) -> bytes:
        """32 fresh bytes, the key of a hash or of a stream."""
        return self._bits.raw(32)

    def draws(self) -> Draws:
        """Draws for units from a fresh key."""
        return Draws(self.key())

    def coin(self, probability: Callable[[], arb]) -> bool:
        """Heads with exactly the probability that the ball-valued function encloses."""
        uniform = self.uniform()
        for precision in precisions():
            ball, chance = uniform.ball(precision), probability()
            if ball < chance:
                return True
            if ball > chance:
                return False
        raise AssertionError  # precisions() raises before this

    def choice(self, weights: Weights) -> int:
        """An index with probability exactly proportional to the true weights."""
        uniform = self.uniform()
        decided = _choose_fast(weights, uniform) if self._fast else None
        return _choose_exactly(weights, uniform) if decided is None else decided

    def point(self, quantile: Callable[[arb], arb]) -> float:
        """The double nearest to ``quantile(U)``, U uniform in (0, 1); finite.

        ``quantile`` maps a ball to a ball and must be continuous.
        """
        uniform = self.uniform()
        for precision in precisions():
            ball = quantile(uniform.ball(precision - 16))
            low, high = float(ball.lower()), float(ball.upper())
            if low == high:
                return max(-sys.float_info.max, min(low, sys.float_info.max))
        raise AssertionError

    def uniform_point(self, low: float, high: float) -> float:
        """The double nearest to a uniform real number between two doubles."""
        if low == high:
            return low
        return self.point(lambda u: arb(low) + u * (arb(high) - arb(low)))

    def discrete_laplace(self, epsilon: float) -> int:
        """Z with P[Z = z] proportional to exp(-epsilon |z|): a difference of geometrics."""
        return self._geometric(lambda: 1 / arb(epsilon)) - self._geometric(lambda: 1 / arb(epsilon))

    def discrete_laplace_of_scale(self, scale: int) -> int:
        """Z with P[Z = z] proportional to exp(-|z| / scale)."""
        return self._geometric(lambda: arb(scale)) - self._geometric(lambda: arb(scale))

    def _geometric(self, scale: Callable[[], arb]) -> int:
        """G >= 0 with P[G >= g] = exp(-g / scale) exactly."""
        uniform = self.uniform()
        for precision in precisions():
            whole = (-uniform.ball(precision).log() * scale()).floor().unique_fmpz()
            if whole is not None:
                return int(whole)
        raise AssertionError

    def gaussian(self, values: Integers, sigma: float) -> Floats:
        """``values`` plus independent normal noise, each sum rounded to a fine grid.

        The grid has a power of two between sigma / 2**21 and sigma / 2**20. Every result is the
        exact sum of an integer and a normal real number, rounded: post-processing of the Gaussian
        mechanism, with no floating-point side.

        Parameters
        ----------
        values : array of int64
        sigma : float
            From 2**-30 to 2**80, and at least 2**-40 of the largest value.

        Examples
        --------
        >>> noisy = Randomness(seed=0).gaussian(np.full(1000, 10**6), 3.0)
        >>> bool(abs(noisy.mean() - 10**6) < 0.5 and 2.8 < noisy.std() < 3.2)
        True
        """
        if not 2.0**-30 <= sigma <= 2.0**80:
            raise OverflowError("noise of this width does not fit its grid")
        exponent = math.frexp(sigma)[1] - 21
        width = math.ldexp(sigma, -exponent)  # of the noise, in steps of the grid
        whole, part = _on_grid(values, exponent)
        words = np.frombuffer(self._bits.raw(8 * values.size), dtype="<u8")
        steps, decided = _normal_steps_fast(words, part, width)
        if not self._fast:
            decided[:] = False
        for at in np.flatnonzero(~decided).tolist():
            uniform = LazyUniform(self._bits, int(words[at]), 64)
            steps[at] = _normal_step_exactly(uniform, float(part[at]), width)
        with np.errstate(over="ignore"):
            noisy = np.ldexp((whole + steps).astype(float), exponent)
        return np.asarray(noisy.reshape(values.shape))

    def below(self, bound: int, size: int) -> Integers:
        """Independent uniform integers in ``0 .. bound - 1``, by rejection from 32-bit words."""
        if not 1 <= bound <= 2**31:
            raise ValueError("bound must lie between 1 and 2**31")
        limit = (1 << 32) // bound * bound
        drawn = self._words(size)
        rejected = np.flatnonzero(drawn >= limit)
        while rejected.size:
            drawn[rejected] = self._words(rejected.size)
            rejected = rejected[drawn[rejected] >= limit]
        return (drawn % bound).astype(np.int64)

    def permutation(self, size: int) -> Integers:
        """A random order of ``0 .. size - 1``, by sorting 64-bit random keys."""
        keys = np.frombuffer(self._bits.raw(8 * size), dtype="<u8")
        return np.argsort(keys, kind="stable").astype(np.int64)

    def hairs(self, rows: int, columns: int) -> Floats:
        """Independent uniform multiples of 2**-31 in [-1, 1)."""
        words = np.frombuffer(self._bits.raw(4 * rows * columns), dtype="<i4")
        return words.reshape(rows, columns) * 2.0**-31

    def _words(self, size: int) -> NDArray[np.uint64]:
        return np.frombuffer(self._bits.raw(4 * size), dtype="<u4").astype(np.uint64)


def _choose_fast(weights: Weights, uniform: LazyUniform) -> int | None:
    """The index, where the certified error of the cumulative sums cannot change it."""
    cumulative = np.cumsum(weights.approximate)
    total = float(cumulative[-1])
    if not 0.0 < total < math.inf:
        return None
    # Summation adds one rounding a term; the last terms cover this function's own arithmetic.
    slack = total * (2 * weights.relative_error + (len(cumulative) + 8) * 2.0**-52)
    numerator, known = uniform.interval(64)
    target = math.ldexp(numerator, -known) * total
    first = int(np.searchsorted(cumulative, target - slack, side="right"))
    last = int(np.searchsorted(cumulative, target + slack, side="left"))
    return first if first == last < len(cumulative) else None


def _choose_exactly(weights: Weights, uniform: LazyUniform) -> int:
    for precision in precisions():
        balls = weights.exact()
        target = uniform.ball(precision) * _sum(balls)
        running = arb(0)
        for index, ball in enumerate(balls):
            running = running + ball
            if target < running:
                return index
            if not target > running:
                break
    raise AssertionError


def _on_grid(values: Integers, exponent: int) -> tuple[Integers, Floats]:
    """Integers as whole and fractional steps of the grid of 2**exponent, exactly."""
    flat = values.reshape(-1)
    if exponent <= 0:
        if flat.size and int(np.abs(flat).max()) >= 1 << max(0, 62 + exponent):
            raise OverflowError("a sum is too large for the grid of its noise")
        return flat << -exponent, np.zeros(flat.size)
    whole = flat >> exponent
    return whole, np.ldexp((flat - (whole << exponent)).astype(float), -exponent)


#: The double-precision normal quantile is good to some 1e-15; five orders more are allowed for.
_QUANTILE_ERROR = 1e-10


def _normal_steps_fast(
    words: NDArray[np.uint64], part: Floats, width: float
) -> tuple[Integers, NDArray[np.bool_]]:
    """round(part + width * normal quantile of U), and where the error cannot change it.

    U lies in [w, w + 1] / 2**64. The upper half is mirrored, so that U is small and its
    relative precision full.
    """
    upper = words >= np.uint64(1 << 63)
    mirrored = np.where(upper, ~words, words).astype(float)  # rounded: 2**-53 relative
    sign = np.where(upper, -1.0, 1.0)
    ends = []
    for far in (mirrored * (1 - 2.0**-50), (mirrored + 1) * (1 + 2.0**-50)):
        normal = sign * ndtri(np.ldexp(far, -64))
        ends.append(part + width * normal)
    with np.errstate(invalid="ignore"):
        slack = _QUANTILE_ERROR * width * (1 + np.abs(ends[0] - part) / width)
        low = np.rint(np.minimum(*ends) - slack)
        high = np.rint(np.maximum(*ends) + slack)
        decided = (low == high) & np.isfinite(low)
    return np.where(decided, low, 0).astype(np.int64), decided


def _normal_step_exactly(uniform: LazyUniform, part: float, width: float) -> int:
    for precision in precisions():
        normal = arb(2).sqrt() * (2 * uniform.ball(precision) - 1).erfinv()
        whole = (arb(part) + arb(width) * normal + arb(1) / 2).floor().unique_fmpz()
        if whole is not None:
            return int(whole)
    raise AssertionError


def _sum(balls: Sequence[arb]) -> arb:
    total = arb(0)
    for ball in balls:
        total = total + ball
    return total


def smallest_integer(holds: Callable[[fmpz], arb]) -> int:
    """The smallest integer g >= 0 at which a decreasing ball-valued function is <= 0."""
    low, high = -1, 1
    while not _at_most_zero(holds, high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if middle >= 0 and _at_most_zero(holds, middle):
            high = middle
        else:
            low = middle
    return high


def _at_most_zero(function: Callable[[fmpz], arb], at: int) -> bool:
    for _ in precisions():
        value = function(fmpz(at))
        if value <= 0:
            return True
        if value > 0:
            return False
    raise AssertionError


def tail_threshold(epsilon: float, probability: float) -> int:
    """The smallest T >= 0 with P[Z >= T + 1] <= probability, Z discrete Laplace.

    It is what a statistic that is one below acceptance must be held to: with it
    P[-1 + Z >= T] <= probability, decided exactly.

    Examples
    --------
    >>> tail_threshold(0.5493, 1e-5)
    20
    """

    def excess(threshold: fmpz) -> arb:
        # P[Z >= g] = q**g / (1 + q) for g >= 1, q = exp(-epsilon)
        rate = arb(epsilon)
        return (-rate * (threshold + 1)).exp() / (1 + (-rate).exp()) - arb(probability)

    return smallest_integer(excess)
