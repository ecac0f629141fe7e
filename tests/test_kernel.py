"""The compiled loops: against plain arithmetic, and the same bits however the rows are read."""

import ctypes
import functools
import os
import pickle
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tukeyreg import kernel
from tukeyreg.errors import InvalidInput
from tukeyreg.kernel import Columns, Products, Triangles
from tukeyreg.mechanisms.randomness import Draws
from tukeyreg.summaries.groups import GroupSums, summarise, triangles_of
from tukeyreg.summaries.rows import RowMap, weights_of

LENIENT = {"deadline": None, "max_examples": 40}
BASELINE, WIDEST = 0, 2
KINDS = ["f8", "f4", "u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "?"]
LARGEST = np.finfo(float).max
WILD = [0.0, -0.0, 1.0, -1.0, 5e-324, -1e-310, 1e-200, 1e200, -1e308, LARGEST, -LARGEST, 3e7]
NOT_FINITE = [np.nan, np.inf, -np.inf]


@contextmanager
def width_of_vectors(width):
    kernel._library.tukeyreg_limit(width)
    try:
        yield
    finally:
        kernel._library.tukeyreg_limit(WIDEST)


@contextmanager
def threads_for_few_rows():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_ROWS_WORTH_A_THREAD", 1)
        patch.setattr(kernel, "processors", lambda: 8)
        yield


# ---------------------------------------------------------------- ChaCha20


def chacha_block(key, nonce, counter):
    """Sixteen words, after section 2.3 of RFC 8439; the counter and the nonce have 64 bits."""
    mask = 0xFFFFFFFF
    words = [key[at : at + 4] for at in range(0, 32, 4)]
    state = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    state += [int.from_bytes(word, "little") for word in words]
    state += [counter & mask, counter >> 32, nonce & mask, nonce >> 32]
    x = state.copy()

    def quarter(a, b, c, d):
        for into, other, turned, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            x[into] = (x[into] + x[other]) & mask
            mixed = x[turned] ^ x[into]
            x[turned] = (mixed << by | mixed >> (32 - by)) & mask

    for _ in range(10):
        for column in range(4):
            quarter(column, column + 4, column + 8, column + 12)
        for column in range(4):
            down = [4 * row + (column + row) % 4 for row in range(4)]
            quarter(*down)
    return [(new + old) & mask for new, old in zip(x, state, strict=True)]


def chacha_words(key, nonce, first, count):
    blocks = range(first // 16, (first + count) // 16 + 1)
    words = [word for block in blocks for word in chacha_block(key, nonce, block)]
    return words[first % 16 : first % 16 + count]


COUNTING = bytes(range(32))
#: Published key streams: key, nonce, first block, bytes.
STREAMS = [
    # draft-strombergson-chacha-test-vectors, 256-bit keys, 20 rounds
    (
        bytes(32),
        0,
        0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    # draft-agl-tls-chacha20poly1305, section 7
    (
        bytes(31) + b"\1",
        0,
        0,
        "4540f05a9f1fb296d7736e7b208e3c96eb4fe1834688d2604f450952ed432d41"
        "bbe2a0b6ea7566d2a5d1e7e20d42af2c53d792b1c43fea817e9ad275ae546963",
    ),
    (
        bytes(32),
        1 << 56,
        0,
        "de9cba7bf3d69ef5e786dc63973f653a0b49e015adbff7134fcb7df137821031"
        "e85a050278a7084527214f73efc7fa5b5277062eb7a0433e445f41e3",
    ),
    (
        bytes(32),
        1,
        0,
        "ef3fdfd6c61578fbf5cf35bd3dd33b8009631634d21e42ac33960bd138e50d32"
        "111e4caf237ee53ca8ad6426194a88545ddc497a0b466e7d6bbdb0041b2f586b",
    ),
    (
        COUNTING,
        0x0706050403020100,
        0,
        "f798a189f195e66982105ffb640bb7757f579da31602fc93ec01ac56f85ac3c1"
        "34a4547b733b46413042c9440049176905d3be59ea1c53f15916155c2be8241a"
        "38008b9a26bc35941e2444177c8ade6689de95264986d95889fb60e84629c9bd",
    ),
    # RFC 8439, section 2.3.2: its nonce is the upper half of our counter, and our nonce
    (
        COUNTING,
        0x4A000000,
        0x0900000000000001,
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
]


@pytest.mark.parametrize("width", [BASELINE, WIDEST])
@pytest.mark.parametrize(("key", "nonce", "block", "stream"), STREAMS)
def test_draws_are_the_published_streams(key, nonce, block, stream, width):
    expected = bytes.fromhex(stream)
    with width_of_vectors(width):
        found = kernel.draws(key, nonce, 16 * block, len(expected) // 4, 1 << 32)
    assert found.astype("<i4").tobytes() == expected
    words = np.array(chacha_words(key, nonce, 16 * block, len(expected) // 4), dtype="<u4")
    assert words.tobytes() == expected


ranges = st.tuples(
    st.binary(min_size=32, max_size=32),
    st.integers(0, 2**64 - 1),
    st.one_of(st.integers(0, 600), st.integers(2**36 - 300, 2**36), st.integers(2**37, 2**63)),
    st.integers(0, 600),
)


@settings(**LENIENT)
@given(ranges)
def test_draws_are_those_of_plain_chacha(drawn):
    key, nonce, first, count = drawn
    found = kernel.draws(key, nonce, first, count, 1 << 32)
    assert found.view(np.uint32).tolist() == chacha_words(key, nonce, first, count)


@settings(**LENIENT)
@given(ranges, st.lists(st.floats(0, 1), max_size=4), st.sampled_from([1, 7, 1000, 2**31, 2**32]))
def test_no_cut_of_a_range_changes_a_draw(drawn, shares, bound):
    key, nonce, first, count = drawn
    whole = kernel.draws(key, nonce, first, count, bound)
    cuts = sorted([0, count, *(int(share * count) for share in shares)])
    pieces = [
        kernel.draws(key, nonce, first + start, stop - start, bound)
        for start, stop in pairwise(cuts)
    ]
    assert np.array_equal(np.concatenate(pieces), whole)
    with threads_for_few_rows(), width_of_vectors(BASELINE):
        assert np.array_equal(kernel.draws(key, nonce, first, count, bound), whole)


@pytest.mark.parametrize("bound", [1, 2, 3, 10, 1000, 2**31 - 1, 2**31])
def test_draws_are_words_times_the_bound(bound):
    words = kernel.draws(COUNTING, 5, 77, 40_000, 1 << 32).view(np.uint32).astype(object)
    found = kernel.draws(COUNTING, 5, 77, 40_000, bound)
    assert np.array_equal(found, words * bound // 2**32)
    assert found.min() >= 0
    assert found.max() < bound
    shares = np.bincount(found * np.int64(8) // bound, minlength=8) / 40_000
    if bound >= 1000:
        assert np.abs(shares - 1 / 8).max() < 0.01  # six standard errors
    elif bound > 1:
        each = np.bincount(found, minlength=bound) / 40_000
        assert np.abs(each * bound - 1).max() < 0.1


def test_keys_and_nonces_give_other_draws():
    streams = [
        kernel.draws(key, nonce, 0, 64, 1 << 32)
        for key in (COUNTING, COUNTING[::-1])
        for nonce in (0, 1, 1 << 32, 1 << 63)
    ]
    assert len({stream.tobytes() for stream in streams}) == len(streams)
    assert np.array_equal(
        Draws(COUNTING, part=1).of_rows(9, 3, 4), kernel.draws(COUNTING, 1, 3, 4, 9)
    )


@pytest.mark.parametrize("length", [0, 31, 33])
def test_keys_of_another_length_are_refused(length):
    with pytest.raises(ValueError, match="32 bytes"):
        kernel.draws(bytes(length), 0, 0, 1, 2)


# ---------------------------------------------------------------- SipHash-2-4


def siphash(text, key):
    """After the definition of Aumasson and Bernstein (2012)."""
    mask = (1 << 64) - 1
    k0, k1 = (int.from_bytes(key[at : at + 8], "little") for at in (0, 8))
    initial = b"somepseudorandomlygeneratedbytes"
    v = [int.from_bytes(initial[at : at + 8], "big") for at in range(0, 32, 8)]
    v = [v[0] ^ k0, v[1] ^ k1, v[2] ^ k0, v[3] ^ k1]

    def turned(x, by):
        return (x << by | x >> (64 - by)) & mask

    def rounds(count):
        for _ in range(count):
            v[0] = (v[0] + v[1]) & mask
            v[2] = (v[2] + v[3]) & mask
            v[1], v[3] = turned(v[1], 13) ^ v[0], turned(v[3], 16) ^ v[2]
            v[0] = turned(v[0], 32)
            v[2] = (v[2] + v[1]) & mask
            v[0] = (v[0] + v[3]) & mask
            v[1], v[3] = turned(v[1], 17) ^ v[2], turned(v[3], 21) ^ v[0]
            v[2] = turned(v[2], 32)

    filled = text + bytes(-(len(text) + 1) % 8) + bytes([len(text) % 256])
    for at in range(0, len(filled), 8):
        word = int.from_bytes(filled[at : at + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def hashes(texts, key):
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    buffer = np.frombuffer(b"".join(texts) or b" ", dtype=np.uint8)
    return kernel.hash_texts(buffer, starts, key).tolist()


#: Of the reference implementation, for 0, 1, … 15 and for 63 bytes 00 01 02 …
SIPHASHES = (
    "310e0edd47db6f72 fd67dc93c539f874 5a4fa9d909806c0d 2d7efbd796666785 "
    "b7877127e09427cf 8da699cd64557618 cee3fe586e46c9cb 37d1018bf50002ab "
    "6224939a79f5f593 b0e4a90bdf82009e f3b9dd94c5bb5d7a a7ad6b22462fb3f4 "
    "fbe50e86bc8f1e75 903d84c02756ea14 eef27a8e90ca23f7 e545be4961ca29a1 "
    "724506eb4c328a95 "
)


def test_hashes_are_the_published_ones():
    texts = [bytes(range(length)) for length in (*range(16), 63)]
    expected = [int.from_bytes(bytes.fromhex(digest), "little") for digest in SIPHASHES.split()]
    assert expected[0] == 0x726FDB47DD0E0E31
    assert hashes(texts, bytes(range(16))) == expected
    assert [siphash(text, bytes(range(16))) for text in texts] == expected


@settings(**LENIENT)
@given(st.lists(st.binary(max_size=300), max_size=8), st.binary(min_size=16, max_size=40))
def test_hashes_are_those_of_plain_siphash(texts, key):
    assert hashes(texts, key) == [siphash(text, key) for text in texts]


INTEGERS = [0, 1, -1, 9, 10, -10, 2**31, 2**63 - 1, -(2**63), -(2**63) + 1]


@settings(**LENIENT)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=8), st.binary(min_size=16, max_size=32))
def test_integers_are_hashed_by_their_digits(drawn, key):
    values = INTEGERS + drawn
    found = kernel.hash_integers(np.array(values, dtype=np.int64), key).tolist()
    assert found == hashes([b"i%d" % value for value in values], key)


def test_short_keys_of_hashes_are_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        kernel.hash_integers(np.zeros(1, dtype=np.int64), bytes(15))


# ---------------------------------------------------------------- the same bits for everybody


def some_table(n, p, n_groups, seed, *, wild=0.0, missing=0.0):
    """Features, target, and a group or -1 for every row."""
    rng = np.random.default_rng([n, p, n_groups, seed])
    whole = rng.normal(size=(n, p + 1)) * 10.0 ** rng.integers(-3, 4, p + 1)
    for share, values in ((wild, WILD), (missing, NOT_FINITE)):
        at = rng.random(whole.shape) < share
        whole[at] = rng.choice(values, at.sum())
    groups = rng.integers(-1, n_groups, n).astype(np.int32)
    return whole[:, :p].copy(), whole[:, p].copy(), groups


def some_map(p, seed=0, *, intercept=True, whitened=True, radius=2.0):
    rng = np.random.default_rng([p, seed])
    location, scale = rng.normal(size=p), 10.0 ** rng.uniform(-2, 3, p)
    map = RowMap(location, scale, 0.3, 2.5, intercept)
    if whitened:
        map = map.whitened(rng.normal(size=(map.width, map.width)))
    return RowMap(**{**map.__dict__, "radius": radius})


def settled(array):
    """The bytes of an array; what is not a number has one spelling."""
    array = np.asarray(array)
    return (
        np.where(np.isnan(array), np.nan, array) if array.dtype.kind == "f" else array
    ).tobytes()


def everything(columns, groups, n_groups, *, cuts=(), threads=1):
    """Bits of all that the kernel makes of rows, which come batch by batch."""
    p, found = columns.n_features, []
    ends = sorted([0, len(columns), *cuts])
    parts = [slice(start, stop) for start, stop in pairwise(ends)]
    batches = [(columns.part(part), groups[part]) for part in parts]
    for intercept in (True, False):
        sums, state = Products(n_groups, p), Triangles(n_groups, p, intercept=intercept)
        map = some_map(p, intercept=intercept) if p + intercept else None
        total = np.zeros(p + intercept, dtype=np.int64)
        for batch, own in batches:
            kernel.add(batch, own, sums, shifted=intercept, threads=threads)
            kernel.absorb(batch, own, state, threads=threads)
            if map is not None:
                ones, kept = np.ones(map.width), own >= 0
                total += map.gradient(batch, kept, None, ones, 0.7, threads=threads)
        triangles, sound = kernel.factor(sums, intercept=intercept, aliased=None)
        found += [np.triu(sums.gram), sums.origin, sums.peak, sums.count, sums.check]
        found += [triangles[sound], sound, triangles_of(state), state.exponent, state.check, total]
        assert np.array_equal(sums.check, state.check)
    found.append(np.concatenate([kernel.finite(batch) for batch, _ in batches]))
    return [settled(array) for array in found]


SHAPES = [(0, 3, 2), (1, 1, 1), (65, 3, 1), (500, 6, 7), (700, 40, 3), (300, 2, 1000), (90, 0, 4)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("wild", [0.0, 0.05])
def test_neither_width_of_vectors_nor_threads_change_a_bit(shape, wild):
    X, y, groups = some_table(*shape, 0, wild=wild, missing=wild / 4)
    for columns in (Columns.of(X, y), Columns.of(np.asfortranarray(X), y)):
        with width_of_vectors(BASELINE):
            expected = everything(columns, groups, shape[2])
        assert everything(columns, groups, shape[2]) == expected
        with threads_for_few_rows():
            for threads in (2, 3, 7):
                assert everything(columns, groups, shape[2], threads=threads) == expected


@pytest.mark.parametrize("layout", ["C", "F"])
def test_tables_of_more_rows_than_one_step(layout):
    X, y, groups = some_table(40_000, 5, 6, 0, missing=0.001)
    columns = Columns.of(np.asarray(X, order=layout), y)
    expected = everything(columns, groups, 6)
    assert everything(columns, groups, 6, cuts=[1, 16_384, 20_000, 39_999]) == expected
    with width_of_vectors(BASELINE):
        assert everything(columns, groups, 6, threads=3) == expected


@settings(**LENIENT)
@given(
    st.tuples(st.integers(0, 200), st.integers(0, 12), st.integers(1, 9), st.integers(0, 2**20)),
    st.lists(st.floats(0, 1), max_size=6),
    st.sampled_from(["C", "F"]),
)
def test_no_cut_into_batches_changes_a_bit(shape, shares, layout):
    X, y, groups = some_table(*shape, wild=0.02, missing=0.01)
    columns = Columns.of(np.asarray(X, order=layout), y)
    expected = everything(columns, groups, shape[2])
    cuts = [int(share * shape[0]) for share in shares]
    assert everything(columns, groups, shape[2], cuts=cuts) == expected


@settings(**LENIENT)
@given(
    st.tuples(st.integers(1, 200), st.integers(0, 12), st.integers(2, 9), st.integers(0, 2**20)),
    st.booleans(),
)
def test_rows_of_others_change_no_bit_of_a_group(shape, intercept):
    n, p, n_groups, _ = shape
    X, y, groups = some_table(*shape, wild=0.02, missing=0.01)
    at = groups == 1
    for others in (X, y[:, None]):
        rng = np.random.default_rng(n)
        others[~at] = rng.choice([*WILD, *NOT_FINITE], others[~at].shape)
    found = []
    for rows in (np.ones(n, dtype=bool), at):
        columns = Columns.of(X[rows], y[rows])
        sums, state = Products(n_groups, p), Triangles(n_groups, p, intercept=intercept)
        kernel.add(columns, groups[rows], sums, shifted=intercept)
        kernel.absorb(columns, groups[rows], state)
        triangles, sound = kernel.factor(sums, intercept=intercept, aliased=None)
        arrays = np.triu(sums.gram), sums.origin, sums.peak, sums.count, sums.check, sound
        arrays += triangles * sound[:, None, None], triangles_of(state), state.check
        found.append([settled(array[1]) for array in arrays])
    assert found[0] == found[1]


# ---------------------------------------------------------------- layouts


def misaligned(column):
    raw = np.empty(column.nbytes + 1, dtype=np.uint8)
    shifted = raw[1:].view(column.dtype)
    shifted[:] = column
    return shifted


def layouts(X, y):
    n, p = X.shape
    wide = np.full((2 * n, 2 * p + 3), 7.0)
    wide[::2, 1 : p + 1] = X
    spread = np.full((n, 2 * p + 1), 7.0)
    spread[:, 1::2] = X
    whole = np.column_stack([X, y])
    backwards = Columns.of(X[::-1].copy()[::-1], y[::-1].copy()[::-1])
    return {
        "Fortran": Columns.of(np.asfortranarray(X), y),
        "target among the features": Columns.of(whole[:, :-1], whole[:, -1]),
        "target in front": Columns.of(
            np.column_stack([y, X])[:, 1:], np.column_stack([y, X])[:, 0]
        ),
        "inside a wider table": Columns.of(wide[::2, 1 : p + 1], y),
        "every second column": Columns.of(spread[:, 1::2], y),
        "backwards": backwards,
        "columns backwards": Columns.of(X[:, ::-1].copy()[:, ::-1], y),
        "apart": Columns([column.copy() for column in X.T], np.repeat(y, 3)[::3]),
        "misaligned": Columns([misaligned(column) for column in X.T], misaligned(y)),
        "misaligned target": Columns.of(X, misaligned(y)),
        "other byte order": Columns.of(X.astype(">f8"), y.astype(">f8")),
        "long double": Columns.of(X.astype(np.longdouble), y),
        "read-only": Columns.of(np.broadcast_to(X, (1, n, p))[0], y),
    }


@pytest.mark.parametrize("shape", [(200, 1, 3), (200, 5, 3), (150, 17, 40)])
def test_layouts_give_the_same_bits(shape):
    X, y, groups = some_table(*shape, 0, wild=0.01, missing=0.01)
    expected = everything(Columns.of(X, y), groups, shape[2])
    for name, columns in layouts(X, y).items():
        assert everything(columns, groups, shape[2]) == expected, name
        chosen = np.arange(shape[1]) % 2 == 0
        few, plain = columns.of_features(chosen), Columns.of(X[:, chosen], y)
        assert everything(few, groups, shape[2]) == everything(plain, groups, shape[2]), name


def test_columns_that_only_begin_side_by_side():
    buffer, groups = np.random.default_rng(0).normal(size=100), np.zeros(50, dtype=np.int32)
    features, y = [buffer[::2], buffer[1:51], buffer[2:52]], buffer[50:].copy()
    plain = Columns([feature.copy() for feature in features], y)
    assert everything(Columns(features, y), groups, 1) == everything(plain, groups, 1)


def test_columns_are_aligned():
    columns = layouts(*some_table(9, 2, 1, 0)[:2])["misaligned"]
    assert all(kernel.readable(column) for column in (*columns.features, columns.target))


def of_kind(kind, n, rng):
    """A column of a type, its extremes included."""
    dtype = np.dtype(kind)
    if dtype.kind == "b":
        return rng.random(n) < 0.5
    if dtype.kind == "f":
        column = rng.normal(size=n).astype(kind)
        column[:5] = [np.finfo(kind).max, np.finfo(kind).tiny, 0, -0.0, np.nan]
        return column
    limits = np.iinfo(kind)
    plain = dtype.newbyteorder("=")
    column = rng.integers(limits.min, limits.max, n, dtype=plain, endpoint=True).astype(kind)
    column[:3] = [limits.min, limits.max, limits.max - 1]
    return column


@pytest.mark.parametrize("kind", [*KINDS, "f2", ">f4", ">i8", ">u2", "g"])
@pytest.mark.parametrize("step", [1, -2])
def test_numbers_of_every_type_are_what_numpy_makes_of_them(kind, step):
    rng = np.random.default_rng(3)
    column = of_kind(kind, 60, rng)[::step]
    n = len(column)
    with np.errstate(over="ignore"):
        plain = column.astype(np.float64)
    other, groups = rng.normal(size=n), np.zeros(n, dtype=np.int32)
    expected = everything(Columns([other, plain], other), groups, 1)
    assert everything(Columns([other, column], other), groups, 1) == expected
    expected = everything(Columns([other], plain), groups, 1)
    assert everything(Columns([other], column), groups, 1) == expected


@settings(**LENIENT)
@given(st.lists(st.sampled_from(KINDS), max_size=9), st.integers(5, 90), st.integers(0, 2**20))
def test_columns_of_mixed_types(kinds, n, seed):
    rng = np.random.default_rng(seed)
    features = [of_kind(kind, n, rng) for kind in kinds]
    target, groups = of_kind("f4", n, rng), rng.integers(-1, 3, n).astype(np.int32)
    plain = Columns([column.astype(float) for column in features], target.astype(float))
    assert everything(Columns(features, target), groups, 3) == everything(plain, groups, 3)


# ---------------------------------------------------------------- sums of products


def own_rows(X, y, groups, group):
    """The finite rows of a group, [features, target], in extended precision."""
    rows = np.column_stack([X, y])[groups == group]
    return rows[np.isfinite(rows).all(axis=1)].astype(np.longdouble)


@pytest.mark.parametrize("shape", [(400, 4, 5), (900, 23, 3), (50, 3, 80), (64, 2, 1), (40, 0, 3)])
@pytest.mark.parametrize("shifted", [True, False])
def test_products_are_those_of_extended_precision(shape, shifted):
    n, p, n_groups = shape
    X, y, groups = some_table(*shape, 1, missing=0.02)
    X += 5.0
    sums = Products(n_groups, p)
    kernel.add(Columns.of(X, y), groups, sums, shifted=shifted)
    for group in range(n_groups):
        rows = own_rows(X, y, groups, group)
        assert sums.count[group] == len(rows)
        origin = rows[0] if shifted and len(rows) else np.zeros(p + 1)
        assert np.array_equal(sums.origin[group, : p + 1], origin)
        rows = np.column_stack([rows - origin, np.ones(len(rows))])
        peak = np.abs(rows.astype(float)).max(axis=0, initial=0.0)
        assert np.array_equal(sums.peak[group, : p + 2], peak)
        gram, room = rows.T @ rows, np.abs(rows).T @ np.abs(rows)
        difference = np.abs(sums.gram[group, : p + 2, : p + 2] - gram)
        assert (np.triu(difference) <= (n + 4) * 2.0**-53 * room).all()


@pytest.mark.parametrize("p", [1, 6, 14])
@pytest.mark.parametrize("width", [BASELINE, WIDEST])
def test_products_are_rounded_one_by_one_in_the_order_of_rows(p, width):
    """No fused operation, and no sum across lanes: other machines give the same bits."""
    X, y, _ = some_table(300, p, 1, 2)
    sums = Products(1, p)
    with width_of_vectors(width):
        kernel.add(Columns.of(X, y), np.zeros(300, dtype=np.int32), sums, shifted=True)
    gram = np.zeros((p + 2, p + 2))
    for row in np.column_stack([X - X[0], y - y[0], np.ones(300)]):
        gram += row[:, None] * row
    assert np.array_equal(np.triu(sums.gram[0, : p + 2, : p + 2]), np.triu(gram))


def factored(X, y, *, intercept=True, aliased=None):
    """The triangle of one group, and whether it is sound."""
    sums = Products(1, X.shape[1])
    kernel.add(Columns.of(X, y), np.zeros(len(y), dtype=np.int32), sums, shifted=intercept)
    marks = None if aliased is None else np.array([aliased], dtype=np.uint8)
    triangles, sound = kernel.factor(sums, intercept=intercept, aliased=marks)
    return triangles[0], bool(sound[0])


def design_of(X, y, intercept):
    ones = [np.ones(len(y))] if intercept else []
    return np.column_stack([*ones, X, y]).astype(np.longdouble)


def gram_error(triangle, design):
    """How far T'T is from the products of the columns, relative to their lengths."""
    triangle = triangle.astype(np.longdouble)
    lengths = np.sqrt((design**2).sum(axis=0))
    lengths[lengths == 0] = 1.0
    return np.abs(
        (triangle / lengths).T @ (triangle / lengths) - (design / lengths).T @ (design / lengths)
    )


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize(("n", "p"), [(30, 1), (200, 8), (500, 31), (40, 0)])
def test_triangles_of_sound_groups(n, p, intercept):
    X, y, _ = some_table(n, p, 1, 2)
    X += 3 * np.abs(X[:1])
    triangle, sound = factored(X, y, intercept=intercept)
    assert sound
    assert not np.tril(triangle, -1).any()
    error = gram_error(triangle, design_of(X, y, intercept))
    error[-1, -1] = 0.0  # what is left of the target is not kept
    assert error.max() < 1e-14 * n
    assert triangle[-1, -1] == 0.0


def ordinary(n=200, p=3):
    X, y, _ = some_table(n, p, 1, 4)
    return X, y


def collinear(how_nearly):
    X, y = ordinary()
    rng = np.random.default_rng(0)
    X[:, 2] = X[:, 0] / X[:, 0].std() + X[:, 1] / X[:, 1].std()
    X[:, 2] += how_nearly * rng.normal(size=len(y))
    return X, y


def scaled(column, factor):
    X, y = ordinary()
    (y if column == 3 else X[:, column])[:] *= factor
    return X, y


def offset(size):
    X, y = ordinary()
    X[:, 1] = size * X[:, 1].std() + X[:, 1]
    return X, y


def first_row(value, n=200):
    X, y = ordinary(n)
    X[0, 1] = value * X[:, 1].std()
    return X, y


SOUNDNESS = {
    "ordinary": (ordinary(), True),
    "as many rows as columns": (ordinary(4), True),
    "one row less": (ordinary(3), False),
    "one row": (ordinary(1), True),  # all features are constant
    "two rows": (ordinary(2), False),
    "no rows": (ordinary(0), True),
    "collinear": (collinear(0.0), False),
    "nearly collinear": (collinear(1e-6), False),
    "not quite collinear": (collinear(0.01), True),
    "offset": (offset(1e9), True),  # the first row takes it away
    "tiny": (scaled(1, 1e-200), False),
    "huge": (scaled(1, 1e200), False),
    "small": (scaled(1, 1e-120), True),
    "large": (scaled(1, 1e120), True),
    "overflowing": (scaled(1, LARGEST / 1e6), False),
    "subnormal": (scaled(1, 1e-315), False),
    "tiny target": (scaled(3, 1e-200), False),
    "huge target": (scaled(3, 1e200), False),
    "first row far out": (first_row(1e6), True),  # then it is most of the spread as well
    "first row far out of many": (first_row(1e6, 20_000), False),
    "first row somewhat out of many": (first_row(10.0, 20_000), True),
}


@pytest.mark.parametrize(("table", "expected"), SOUNDNESS.values(), ids=SOUNDNESS)
def test_which_groups_are_sound(table, expected):
    X, y = table
    triangle, sound = factored(X, y)
    assert sound == expected
    if sound and len(y) > 4:
        error = gram_error(triangle, design_of(X, y, True))
        error[-1, -1] = 0.0
        assert error.max() < 1e-12


def test_sound_groups_have_accurate_models():
    """Every column is nearly collinear with those before it, but none by much."""
    rng = np.random.default_rng(0)
    axes = np.linalg.qr(rng.normal(size=(200, 3)))[0] * np.sqrt(200)
    X = axes + 1.2e-3 * np.roll(axes, -1, axis=1)
    X[:, 0], X[:, 1:] = axes[:, 0], axes[:, :-1] + 1.2e-3 * axes[:, 1:]
    y = X.sum(axis=1) + rng.normal(size=200)
    models = summarise(Columns.of(X, y), np.zeros(200, np.int32), 1, intercept=True).models()[0]
    state = Triangles(1, 3, intercept=True)
    kernel.absorb(Columns.of(X, y), np.zeros(200, np.int32), state)
    by_qr = np.linalg.solve(*np.split(triangles_of(state)[0, :4], [4], axis=1))[:, 0]
    design = design_of(X, y, True)[:, :4]
    assert np.abs(design @ (models - by_qr)).max() < 1e-8 * np.abs(y).max()


@pytest.mark.parametrize("constant", [0.0, 1.0, -3.7, 1e12, 1e-9])
def test_a_constant_column_has_a_row_of_zeros(constant):
    X, y = ordinary()
    X[:, 1] = constant
    triangle, sound = factored(X, y)
    assert sound
    assert not triangle[2].any()
    error = gram_error(triangle, design_of(X, y, True))
    error[-1, -1] = 0.0
    assert error.max() < 1e-12


def test_a_constant_target():
    X, _ = ordinary()
    triangle, sound = factored(X, np.full(len(X), 1.7))
    assert sound
    assert not triangle[1:, -1].any()
    assert triangle[0, -1] == np.sqrt(200) * 1.7


def test_aliased_columns_have_rows_of_zeros_and_do_no_harm():
    X, y = collinear(0.0)
    triangle, sound = factored(X, y, aliased=[0, 0, 1])
    assert sound
    assert not triangle[3].any()
    without, _ = factored(X[:, :2], y)
    kept = [0, 1, 2, 4]
    assert np.array_equal(triangle[np.ix_(kept, kept)], without)
    error = gram_error(triangle, design_of(X, y, True))
    error[-1, -1] = 0.0
    assert error.max() < 1e-12


# ---------------------------------------------------------------- triangles by QR


def absorbed(X, y, *, intercept=True):
    state = Triangles(1, X.shape[1], intercept=intercept)
    kernel.absorb(Columns.of(X, y), np.zeros(len(y), dtype=np.int32), state)
    kernel.flush(state)
    upper = np.triu(state.triangle[0, : state.width, : state.width]).astype(np.longdouble)
    return np.ldexp(upper, state.exponent[0, : state.width]), triangles_of(state)[0]


def plain_qr(design):
    """Triangle by NumPy, columns scaled by powers of two, pivots positive."""
    powers = np.frexp(np.abs(design).max(axis=0))[1]
    factor = np.linalg.qr(np.ldexp(design, -powers).astype(float), mode="r")
    factor = np.copysign(1.0, np.diagonal(factor))[:, None] * factor
    return np.ldexp(factor.astype(np.longdouble), powers)


@pytest.mark.parametrize("n", [1, 2, 7, 31, 32, 33, 63, 64, 65, 96, 200])
@pytest.mark.parametrize("p", [0, 1, 3, 4, 6])
@pytest.mark.parametrize("intercept", [True, False])
def test_triangles_are_those_of_numpy(n, p, intercept):
    rng = np.random.default_rng([n, p])
    scales = np.array([1.0, 1e300, 1e-300, 1e12, 1e-9, 1e-310, -1e140])
    whole = rng.normal(size=(n, p + 1)) * scales[: p + 1]
    whole[:, :p] *= 4.0 ** (np.arange(n) // Triangles.BLOCK)[:, None]  # exponents rise
    design = design_of(whole[:, :p], whole[:, p], intercept)
    exact, rounded = absorbed(whole[:, :p], whole[:, p], intercept=intercept)
    expected = plain_qr(design)
    rows = min(n, len(exact))
    signs = np.copysign(1.0, np.diagonal(exact)[:rows])
    lengths = np.abs(design).max(axis=0)
    difference = (signs[:, None] * exact[:rows] - expected) / lengths
    assert np.abs(difference).max() < 1e-12
    assert np.abs(exact[rows:] / lengths).max(initial=0.0) < 1e-12
    np.testing.assert_array_equal(rounded, exact.astype(float))


def test_what_little_distinguishes_two_columns_is_in_the_pivot():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(100, 2)), rng.normal(size=100)
    X[:, 1] = X[:, 0] + 1e-11 * X[:, 1]
    exact, _ = absorbed(X, y)
    design = design_of(X, y, True)
    expected = design[:, 2] - design[:, 1]  # with what the others explain of it taken away
    others = np.linalg.qr(design[:, :2].astype(float))[0]
    expected -= others @ (others.T @ expected)
    np.testing.assert_allclose(abs(exact[2, 2]), np.sqrt((expected**2).sum()), rtol=1e-2)


@st.composite
def wild_rows(draw):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, p = draw(st.integers(1, 120)), draw(st.integers(0, 7))
    lowest = rng.integers(-323, 300, p + 1)
    growth = draw(st.sampled_from([0, 1, 8]))
    powers = np.minimum(lowest + growth * np.arange(n)[:, None] // 16, 307)
    with np.errstate(under="ignore"):
        whole = rng.uniform(-1, 1, (n, p + 1)) * 10.0**powers
    at = rng.random(whole.shape) < draw(st.sampled_from([0.0, 0.1]))
    whole[at] = rng.choice(WILD, at.sum())
    return whole[:, :p], whole[:, p], draw(st.booleans())


@settings(**LENIENT | {"max_examples": 150})
@given(wild_rows())
def test_triangles_of_wild_rows(table):
    X, y, intercept = table
    exact, _ = absorbed(X, y, intercept=intercept)
    assert np.isfinite(exact).all()
    assert gram_error(exact, design_of(X, y, intercept)).max() < 1e-12


def test_columns_of_zeros_stay_zero():
    X, y = ordinary()
    X[:, 1], y[:] = 0.0, -0.0
    exact, _ = absorbed(X, y)
    assert not exact[:, [2, 4]].any()
    assert np.abs(np.diagonal(exact)[[0, 1, 3]]).min() > 0


@settings(**LENIENT)
@given(
    st.tuples(st.integers(0, 200), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**20)),
    st.sampled_from(["C", "F"]),
)
def test_rows_that_are_not_finite_are_as_if_they_were_not_there(shape, layout):
    X, y, groups = some_table(*shape, missing=0.05)
    columns = Columns.of(np.asarray(X, order=layout), y)
    usable = np.isfinite(X).all(axis=1) & np.isfinite(y)
    assert np.array_equal(kernel.finite(columns), usable)
    left = Columns.of(X[usable], y[usable])
    found = everything(columns, groups, shape[2])[:-1]
    assert found == everything(left, groups[usable], shape[2])[:-1]


# ---------------------------------------------------------------- sums of groups, read twice


def weak_table():
    """Three groups; in the second one two columns are equal."""
    X, y, _ = some_table(300, 3, 1, 6)
    groups = (np.arange(300) % 3).astype(np.int32)
    X[groups == 1, 2] = 3 * X[groups == 1, 0]
    return X, y, groups


def read(sums, rows, *, again=False, pieces=3):
    X, y, groups = rows
    for part in np.array_split(np.arange(len(y)), pieces):
        batch = Columns.of(X[part], y[part]), groups[part]
        (sums.add_again if again else sums.add)(*batch)


def test_weak_groups_are_read_again():
    rows = weak_table()
    sums = GroupSums(3, 3, intercept=True)
    read(sums, rows)
    assert sums.weak().tolist() == [False, True, False]
    read(sums, rows, again=True, pieces=7)
    found = sums.summaries()
    X, y, groups = rows
    expected = summarise(Columns.of(X, y), groups, 3, intercept=True)
    assert settled(found.factors) == settled(expected.factors)
    assert settled(found.targets) == settled(expected.targets)
    models = found.models()
    assert (models[:, 3] == 0).tolist() == [False, True, False]
    for group in range(3):
        design = design_of(X, y, True)[groups == group, :4].astype(float)
        reference = np.linalg.lstsq(design, y[groups == group], rcond=1e-11)[0]
        error = np.abs(design @ (models[group] - reference)).max()
        assert error < 1e-10 * np.abs(y).max()


def changed(how, X, y, groups):
    own, other = np.flatnonzero(groups == 1), np.flatnonzero(groups == 0)
    X, y, groups = X.copy(), y.copy(), groups.copy()
    if how == "one bit":
        y[own[5]] = np.nextafter(y[own[5]], np.inf)
    elif how == "a row less":
        groups[own[5]] = -1
    elif how == "a row more":
        groups[other[5]] = 1
    elif how == "rows of two groups exchanged":
        groups[own[5]], groups[other[5]] = 0, 1
    elif how == "a sign":
        X[own[5], 1] *= -1
    return X, y, groups


@pytest.mark.parametrize(
    "how", ["one bit", "a row less", "a row more", "rows of two groups exchanged", "a sign"]
)
def test_other_rows_the_second_time_are_refused(how):
    rows = weak_table()
    sums = GroupSums(3, 3, intercept=True)
    read(sums, rows)
    read(sums, changed(how, *rows), again=True)
    with pytest.raises(InvalidInput, match="another order"):
        sums.summaries()


@pytest.mark.parametrize("other", [[0.0, 1.0, 5.0], [2.0, 0.0, 2.5]])
def test_other_rows_of_round_numbers_are_refused(other):
    """Zeros and ones are what categories are made of."""
    found = []
    for row in ([1.0, 0.0, 5.0], other):
        sums = Products(1, 2)
        kernel.add(
            Columns.of(np.array([row[:2]]), np.array(row[2:])),
            np.zeros(1, np.int32),
            sums,
            shifted=True,
        )
        found.append(int(sums.check[0]))
    assert found[0] != found[1]


def test_the_same_rows_in_another_order_are_accepted():
    X, y, groups = weak_table()
    sums = GroupSums(3, 3, intercept=True)
    read(sums, (X, y, groups))
    read(sums, (X[::-1], y[::-1], groups[::-1]), again=True)
    assert np.isfinite(sums.summaries().models()).all()


def one_hot(rng, n, n_levels):
    return np.eye(n_levels)[rng.integers(0, n_levels, n)]


def of_levels(table):
    """Two categories around a number; some groups lack levels, others have no category at all."""
    rng = np.random.default_rng(8)
    n, groups = 900, (np.arange(900) % 6).astype(np.int32)
    first, second = rng.integers(0, 4, n), rng.integers(0, 3, n)
    first[(groups == 1) & (first == 3)] = 0  # lacks the last level
    first[groups == 2] = 1  # has one level only
    second[groups == 2] = 2
    second[(groups == 3) & (second == 0)] = 1
    X = np.column_stack([np.eye(4)[first], rng.normal(size=n), np.eye(3)[second]])
    if table == "zeros":
        X[groups == 4, :4] = 0.0
        X[groups == 5, 5:] = 0.0
    return X, X @ rng.normal(size=8) + rng.normal(size=n), groups


@pytest.mark.parametrize("table", ["complete", "zeros"])
@pytest.mark.parametrize("kind", [np.float64, np.uint8])
def test_levels_that_are_declared_make_no_group_weak(table, kind):
    X, y, groups = of_levels(table)
    features = [column if j == 4 else column.astype(kind) for j, column in enumerate(X.T)]
    sums = GroupSums(6, 8, intercept=True, levels=[slice(0, 4), slice(5, 8)])
    sums.add(Columns(features, y), groups)
    assert not sums.weak().any()
    models = sums.summaries().models()
    for group in range(6):
        own = groups == group
        design = design_of(X, y, True)[own, :9].astype(float)
        reference = np.linalg.lstsq(design, y[own], rcond=1e-11)[0]
        assert np.abs(design @ (models[group] - reference)).max() < 1e-10
    assert (models[0, 1:] == 0).tolist() == [False] * 3 + [True] + [False] * 3 + [True]
    assert (models[1, 1:5] == 0).tolist() == [False, False, True, True]  # the last that it has
    assert (models[2, 1:] == 0).tolist() == [True] * 4 + [False] + [True] * 3


def test_levels_that_are_not_declared_are_read_again():
    X, y, groups = of_levels("complete")
    declared = GroupSums(6, 8, intercept=True, levels=[slice(0, 4), slice(5, 8)])
    plain = GroupSums(6, 8, intercept=True)
    for sums in (declared, plain):
        read(sums, (X, y, groups))
    assert plain.weak().tolist() == [True, True, False, True, True, True]
    read(plain, (X, y, groups), again=True)
    np.testing.assert_allclose(plain.summaries().models(), declared.summaries().models(), atol=1e-9)


def test_a_column_that_is_collinear_takes_nothing_from_those_behind_it():
    rng = np.random.default_rng(0)
    X, y, groups = rng.normal(size=(40, 4)), rng.normal(size=40), np.zeros(40, dtype=np.int32)
    X[:, 1] = 3 * X[:, 0]
    models = summarise(Columns.of(X, y), groups, 1, intercept=True).models()[0]
    assert models[2] == 0
    design = design_of(X, y, True)[:, :5].astype(float)
    reference = np.linalg.lstsq(design, y, rcond=1e-11)[0]
    assert np.abs(design @ (models - reference)).max() < 1e-10


def test_without_an_intercept_no_level_is_one_too_many():
    rng = np.random.default_rng(9)
    X, y = one_hot(rng, 100, 3), rng.normal(size=100)
    groups = np.zeros(100, dtype=np.int32)
    levels = [slice(0, 3)]
    found = summarise(Columns.of(X, y), groups, 1, intercept=False, levels=levels).models()
    assert np.allclose(found[0], [y[X[:, j] == 1].mean() for j in range(3)])


@pytest.mark.parametrize("n_groups", [1, 5000])
def test_groups_out_of_range_are_nobodys(n_groups):
    groups = np.array([0, n_groups, -1, -2, 2**31 - 1, -(2**31)], dtype=np.int32)
    X, y = np.arange(6.0)[:, None], np.ones(6)
    sums, state = Products(n_groups, 1), Triangles(n_groups, 1, intercept=True)
    with threads_for_few_rows():
        kernel.add(Columns.of(X, y), groups, sums, shifted=True, threads=7)
        kernel.absorb(Columns.of(X, y), groups, state, threads=7)
    kernel.flush(state)
    assert np.flatnonzero(sums.count).tolist() == [0]
    assert sums.count[0] == 1
    assert np.flatnonzero(state.check).tolist() == [0]


# ---------------------------------------------------------------- sums of integer rows


def plain_gradient(map, X, y, kept, weights, coefficients, bound):
    """Section 6.4 of docs/method.md in plain NumPy, row by row where rows matter."""
    usable = np.isfinite(X).all(axis=1) & np.isfinite(y)
    usable &= True if kept is None else kept
    X, y = X[usable], y[usable]
    w = np.ones(len(y)) if weights is None else weights[usable]
    vectors = map.coordinates(X)
    norm = np.zeros(len(y))
    for coordinate in vectors:
        norm += coordinate**2
    with np.errstate(all="ignore"):
        factor = np.minimum(1.0, map.radius / np.sqrt(norm)) * w
        target = (y - map.target_location) / map.target_scale * factor
        rows = np.trunc(vectors * (factor * ((1 - 2.0**-30) * 2.0**map.grid_bits)))
        integers, bits = map.integer_model(coefficients)
        predicted = np.ldexp(integers @ rows, -(bits + map.grid_bits))
        share = np.clip((target - predicted) / bound, -w, w)
    residuals = np.trunc(share * 2.0**12)
    exact = rows.astype(np.int64).astype(object) @ residuals.astype(np.int64).astype(object)
    assert np.abs(rows).max(initial=0.0) < 2.0**31
    return exact.tolist()


@settings(**LENIENT | {"max_examples": 150})
@given(
    st.tuples(st.integers(0, 60), st.integers(0, 9), st.integers(0, 2**20)),
    st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    st.sampled_from([0.01, 1.0, 3.7, 1000.0]),
    st.sampled_from([1e-300, 1e-9, 0.5, 1e9, 1e300]),
    st.sampled_from([0.0, 1.0, 1e9, 1e300]),
    st.sampled_from(["C", "F"]),
)
def test_gradients_are_those_of_plain_arithmetic(shape, options, radius, bound, astray, layout):
    n, p, seed = shape
    intercept, whitened, weighted, chosen = options
    if p + intercept == 0:
        return
    X, y, groups = some_table(n, p, 2, seed, wild=0.1, missing=0.02)
    map = some_map(p, seed, intercept=intercept, whitened=whitened, radius=radius)
    rng = np.random.default_rng(seed)
    weights = weights_of(rng.integers(1, 9, n)) if weighted else None
    kept = groups >= 0 if chosen else None
    coefficients = astray * rng.normal(size=map.width)
    columns = Columns.of(np.asarray(X, order=layout), y)
    expected = plain_gradient(map, X, y, kept, weights, coefficients, bound)
    for width in (BASELINE, WIDEST):
        with width_of_vectors(width):
            found = map.gradient(columns, kept, weights, coefficients, bound)
        assert found.tolist() == expected


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_gradients_of_more_rows_than_a_lane_holds(threads):
    X, y, groups = some_table(20_003, 3, 2, 1, missing=0.001)
    map, kept = some_map(3, 1), groups >= 0
    weights = weights_of(np.random.default_rng(0).integers(1, 5, 20_003))
    model = np.array([0.3, -1.0, 2.0, 0.1])
    expected = plain_gradient(map, X, y, kept, weights, model, 0.5)
    with threads_for_few_rows():
        found = map.gradient(Columns.of(X, y), kept, weights, model, 0.5, threads=threads)
    assert found.tolist() == expected


def test_sums_of_rows_that_all_pull_in_one_direction_are_exact():
    """A double would not hold the sum of the last ones."""
    plain = RowMap(np.zeros(1), np.ones(1), 0.0, 1.0, False)
    whitened = plain.whitened(np.array([[1e6]]))
    map, n = RowMap(**{**whitened.__dict__, "radius": 1e9}), 1_000_000
    X, y, weights = (np.broadcast_to(value, n) for value in (1e9, 1e18, 0.9))
    (one,) = plain_gradient(map, X[:1, None], y[:1], None, weights[:1], np.zeros(1), 1.0)
    assert one % 4
    assert one * n > 4 * 2**53
    found = map.gradient(Columns([X], y), None, weights.copy(), np.zeros(1), 1.0, threads=1)
    assert found.tolist() == [n * one]


# ---------------------------------------------------------------- columns


def test_parts_and_chosen_features():
    X, y, _ = some_table(50, 4, 1, 0)
    columns = Columns.of(X, y)
    assert (len(columns), columns.n_features) == (50, 4)
    part = columns.part(slice(10, 30))
    assert np.shares_memory(part.features[0], X)
    assert np.array_equal(part.matrix(), X[10:30])
    assert np.array_equal(part.labels(), y[10:30])
    chosen = columns.of_features(np.array([True, False, False, True]))
    assert np.array_equal(chosen.matrix(), X[:, [0, 3]])
    assert np.array_equal(chosen.labels(), y)
    assert columns.of_features(np.zeros(4, dtype=bool)).matrix().shape == (50, 0)
    some = np.array([3, 1, 40])
    assert np.array_equal(columns.matrix(some), X[some])
    assert np.array_equal(columns.labels(some), y[some])
    assert columns.matrix(y > 0, np.float32).dtype == np.float32
    assert np.array_equal(columns.matrix(y > 0, np.float32), X[y > 0].astype(np.float32))
    columns.matrix()[:] = 0.0
    columns.labels()[:] = 0.0
    assert X.all()
    assert y.all()


def test_labels_and_matrices_of_other_types_are_doubles():
    columns = Columns([np.array([True, False])], np.array([2**53, 7], dtype=np.int64))
    assert columns.matrix().tolist() == [[1.0], [0.0]]
    assert columns.matrix().dtype == columns.labels().dtype == np.float64
    assert columns.labels().tolist() == [2.0**53, 7.0]


@pytest.mark.parametrize("lengths", [(3, 4), (4, 3), (0, 1)])
def test_columns_of_different_lengths_are_refused(lengths):
    feature, target = map(np.zeros, lengths)
    with pytest.raises(ValueError, match="differ in length"):
        Columns([target, feature], target)


def test_columns_are_private():
    columns = Columns([np.full(3, 12345.0)], np.full(3, 67890.0))
    assert "12345" not in repr(columns) + str(columns)
    assert "67890" not in repr(columns) + str(columns)
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(columns)


@pytest.mark.parametrize("p", [0, 1, 5])
def test_tables_without_rows(p):
    columns, groups = Columns.of(np.zeros((0, p)), np.zeros(0)), np.zeros(0, dtype=np.int32)
    assert columns.matrix().shape == (0, p)
    assert columns.labels().shape == (0,)
    assert kernel.finite(columns).shape == (0,)
    assert kernel.draws(COUNTING, 0, 9, 0, 7).shape == (0,)
    models = summarise(columns, groups, 3, intercept=True).models()
    assert not models.any()
    assert some_map(p).gradient(columns, None, None, np.ones(p + 1), 1.0).tolist() == [0] * (p + 1)


def test_without_features_the_model_is_the_mean():
    y = np.array([1.0, 2.0, 6.0, -4.0, np.nan])
    groups = np.array([0, 0, 0, 2, 0], dtype=np.int32)
    models = summarise(Columns([], y), groups, 3, intercept=True).models()
    assert np.allclose(models, [[3.0], [0.0], [-4.0]])


def test_the_rows_are_not_changed():
    X, y, groups = some_table(300, 5, 4, 0, wild=0.1, missing=0.1)
    before = X.copy(), y.copy(), groups.copy()
    everything(Columns.of(X, y), groups, 4)
    for array, copy in zip((X, y, groups), before, strict=True):
        assert array.tobytes() == copy.tobytes()


# ---------------------------------------------------------------- memory


def stress(library, seconds):
    """Random shapes and layouts; a sanitized library ends the process where it finds fault."""
    kernel._library = ctypes.CDLL(library)
    kernel._ROWS_WORTH_A_THREAD = 500
    kernel.processors = lambda: 3
    rng, end = np.random.default_rng(0), time.monotonic() + seconds
    rounds = 0
    while rounds < 60 or time.monotonic() < end:
        rounds += 1
        most = 40_000 if rounds % 20 == 0 else 5000
        n = int(rng.choice([0, 1, 2, 31, 32, 33, 63, 64, 65, rng.integers(most)]))
        p, n_groups = int(rng.integers(0, 41)), int(rng.choice([1, 2, rng.integers(1, 301)]))
        kernel._library.tukeyreg_limit(int(rng.choice([BASELINE, WIDEST])))
        X, y, groups = some_table(n, p, n_groups, rounds, wild=0.02, missing=0.01)
        choices = [Columns.of(X, y), *layouts(X, y).values()]
        kinds = [of_kind(kind, max(n, 5), rng)[:n] for kind in rng.choice(KINDS, p + 1)]
        columns = rng.choice(np.array([*choices, Columns(kinds[:-1], kinds[-1])], dtype=object))
        threads = int(rng.integers(1, 8))
        everything(columns, groups, n_groups, cuts=[int(rng.integers(n + 1))], threads=threads)
        summarise(columns, groups, n_groups, intercept=True).models()
        map = some_map(p, rounds, whitened=bool(rng.integers(2)))
        weights = weights_of(rng.integers(1, 9, n))
        map.gradient(columns, groups > 0, weights, np.ones(p + 1), 1.0, threads=threads)
        first, count = int(rng.integers(2**40)), int(rng.integers(3000))
        kernel.draws(rng.bytes(32), rounds, first, count, 1 << 32)
        hashes([rng.bytes(int(length)) for length in rng.integers(0, 40, 9)], rng.bytes(16))
        kernel.hash_integers(np.array(INTEGERS, dtype=np.int64), rng.bytes(16))
    print(rounds, "rounds")


SANITIZERS = "address,undefined,float-cast-overflow,bounds-strict"


@functools.cache
def sanitizer():
    """The compiler's address sanitizer, or ``None``."""
    gcc = shutil.which("gcc")
    if gcc is None or not sys.platform.startswith("linux"):
        return None
    command = [gcc, "-print-file-name=libasan.so"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return found if Path(found).is_absolute() else None


@pytest.mark.slow
def test_no_loop_leaves_its_memory(tmp_path):
    if sanitizer() is None:
        pytest.skip("no gcc with libasan")
    library, source = tmp_path / "kernel.so", Path(kernel.__file__).with_name("kernel.c")
    flags = ["-O1", "-g", "-std=gnu11", "-fPIC", "-shared", "-ffp-contract=off", "-Wno-psabi"]
    flags += [f"-fsanitize={SANITIZERS}", f"-fno-sanitize-recover={SANITIZERS}"]
    subprocess.run(["gcc", *flags, "-o", str(library), str(source), "-lm"], check=True)
    script = f"import test_kernel; test_kernel.stress({str(library)!r}, 8)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent,
        env=os.environ
        | {
            "LD_PRELOAD": str(sanitizer()),
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONMALLOC": "malloc",
            "OPENBLAS_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rounds" in done.stdout
