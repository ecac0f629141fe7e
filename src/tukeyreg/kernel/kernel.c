/* The loops over rows. Everything here is a function of its arguments alone: no state, no threads.
 *
 * A group's rows are added one after the other, in the order in which they come, to that group's own
 * numbers. So a group's bits depend on its own rows only, wherever batches are cut and whoever else
 * is in them (docs/method.md, section 2). No sum runs across the lanes of a vector, and products and
 * sums are rounded one by one (-ffp-contract=off), so that every width of vectors gives the same bits.
 *
 * The heavy loops are in loops.h, which is compiled once for every width of vectors.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef double vector __attribute__((vector_size(32), aligned(8), may_alias));
typedef int64_t whole __attribute__((vector_size(32), aligned(8), may_alias));
typedef uint32_t words __attribute__((vector_size(64), aligned(4), may_alias));
enum { LANES = 4, TILE = 64, AHEAD = 16 };

/* Columns of numbers, each with its own place, stride and type; the last one is the target. */
typedef struct {
    int64_t n_columns;
    const char *const *data;
    const int64_t *stride;
    const int32_t *kind;
} table;

enum { F64, F32, U8, I8, I16, U16, I32, U32, I64, U64 };

static inline double value_at(const table *t, int64_t j, int64_t row) {
    const char *at = t->data[j] + row * t->stride[j];
#define AS(type) { type v; memcpy(&v, at, sizeof v); return (double)v; }
    switch (t->kind[j]) {
    case F64: AS(double)
    case F32: AS(float)
    case U8: AS(uint8_t)
    case I8: AS(int8_t)
    case I16: AS(int16_t)
    case U16: AS(uint16_t)
    case I32: AS(int32_t)
    case U32: AS(uint32_t)
    case I64: AS(int64_t)
    default: AS(uint64_t)
    }
#undef AS
}

/* 2: doubles side by side in rows; 1: doubles; 0: anything. The target stands apart. */
static inline int layout_of(const table *t) {
    int rows = 1;
    for (int64_t j = 0; j < t->n_columns; j++) {
        if (t->kind[j] != F64) return 0;
        if (j && j < t->n_columns - 1)
            rows &= t->data[j] == t->data[j - 1] + 8 && t->stride[j] == t->stride[j - 1];
    }
    return 1 + rows;
}

static inline __attribute__((always_inline)) void read_row(const table *t, int layout, int64_t row,
                                                           double *out) {
    int64_t p = t->n_columns - 1;
    if (layout == 2) {
        const double *from = (const double *)(t->data[0] + row * t->stride[0]);
        int64_t j = 0;
        for (; j + LANES <= p; j += LANES) *(vector *)(out + j) = *(const vector *)(from + j);
        for (; j < p; j++) out[j] = from[j];
        out[p] = *(const double *)(t->data[p] + row * t->stride[p]);
    } else if (layout) {
        for (int64_t j = 0; j <= p; j++)
            out[j] = *(const double *)(t->data[j] + row * t->stride[j]);
    } else {
        for (int64_t j = 0; j <= p; j++) out[j] = value_at(t, j, row);
    }
}

static inline int all_finite(const double *row, int64_t width) {
    double bad = 0.0;
    for (int64_t j = 0; j < width; j++) bad += row[j] - row[j]; /* NaN if not finite */
    return bad == 0.0;
}

/* Sums of products of every group: rows are [features, target, 1], in steps of LANES.
 * With an intercept they are taken from the group's own first row, its origin. */
typedef struct {
    double *gram;   /* groups x padded x padded; on and above the diagonal */
    double *origin; /* groups x padded; -1 behind the target */
    double *peak;   /* groups x padded: largest magnitude */
    int64_t *count;
    uint64_t *check; /* sums of marks of rows, to tell whether the same rows come again; or NULL */
} products;

/* Triangles of every group: rows are [1, features, target]. Columns are kept in units of a power of
 * two, so that nothing overflows; so many rows are brought in at a time. */
typedef struct {
    double *triangle; /* groups x padded x padded */
    double *waiting;  /* groups x block x padded */
    int32_t *exponent; /* groups x padded */
    int32_t *n_waiting;
    uint64_t *check; /* as in products */
    int32_t block;
} triangles;

/* Public numbers by which rows become integers (RowMap in summaries/rows.py). */
typedef struct {
    int64_t width; /* of integer rows: features, and one more with an intercept */
    double target_location, target_scale, reach, steps, unit, radius, shrink, residual_steps;
    const double *location, *scale, *whitening; /* whitening: width x width, or NULL */
} row_map;

/* What brings a column of waiting rows into units of its power of two, which never falls: exact. */
static double rescaled(double *top, double *rows, int64_t wp, int64_t n, int64_t j, double largest,
                       int32_t *exponent) {
    int of_rows;
    if (largest == 0.0) return 1.0;
    frexp(largest, &of_rows);
    if (of_rows > exponent[j]) {
        for (int64_t i = 0; i <= j; i++)
            if (top[i * wp + j] != 0.0)
                top[i * wp + j] = ldexp(top[i * wp + j], exponent[j] - of_rows);
        exponent[j] = of_rows;
    }
    if (exponent[j] > -1000) return ldexp(1.0, -exponent[j]);
    for (int64_t r = 0; r < n; r++) rows[r * wp + j] = ldexp(rows[r * wp + j], -exponent[j]);
    return 1.0;
}

/* A mark of a row: other rows have another one, but for one in 2**64 and those made for it. */
static inline uint64_t mark_of(const double *row, int64_t width) {
    uint64_t mark = 0, factor = 0x9e3779b97f4a7c15u;
    for (int64_t j = 0; j < width; j++, factor += 0x3c6ef372fe94f82au) { /* stays odd */
        uint64_t bits;
        memcpy(&bits, row + j, 8);
        mark += (bits ^ bits >> 29) * factor;
    }
    return (mark ^ mark >> 32) * 0xd6e8feb86659fd93u;
}

static inline int64_t padded(int64_t width) { return (width + LANES - 1) / LANES * LANES; }

/* Rows of the groups first .. last - 1 among start .. stop - 1, by group, in their order; ends has a
 * place more, for the rows of others. Without branches: half of the rows are others', at random. */
static void by_group(const int32_t *groups, int64_t start, int64_t stop, int32_t first,
                     int32_t last, int64_t *ends, int32_t *order) {
    uint32_t n_groups = (uint32_t)(last - first);
    int64_t total = 0;
    memset(ends, 0, 8 * ((size_t)n_groups + 1));
    for (int64_t i = start; i < stop; i++) {
        uint32_t g = (uint32_t)groups[i] - (uint32_t)first;
        ends[g < n_groups ? g : n_groups]++;
    }
    for (uint32_t g = 0; g <= n_groups; g++) {
        int64_t size = ends[g];
        ends[g] = total;
        total += size;
    }
    for (int64_t i = start; i < stop; i++) {
        uint32_t g = (uint32_t)groups[i] - (uint32_t)first;
        order[ends[g < n_groups ? g : n_groups]++] = (int32_t)(i - start);
    }
}

#define NAME_(name, target) name##_##target
#define NAME(name, target) NAME_(name, target)

#define TARGET baseline
#define FOR_TARGET
#define ABREAST 2
#include "loops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#define TARGET avx2
#define FOR_TARGET __attribute__((target("avx2")))
#define ABREAST 4
#include "loops.h"

/* 1: AVX2, 0: not. Asked once; whoever asks gets the same answer. */
static volatile int known = -1;

static int width_of_vectors(void) {
    if (known < 0) {
        unsigned a, b, c, d, saved = 0, high, width = 0;
        if (__get_cpuid(1, &a, &b, &c, &d) && (c & bit_OSXSAVE)) {
            __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
            if (__get_cpuid_count(7, 0, &a, &b, &c, &d))
                width = (saved & 0x6) == 0x6 && (b & bit_AVX2);
        }
        known = (int)width;
    }
    return known;
}

#define DISPATCH(name, ...)                                                                        \
    do {                                                                                           \
        if (width_of_vectors()) return name##_avx2(__VA_ARGS__);                              \
        return name##_baseline(__VA_ARGS__);                                                       \
    } while (0)
/* For tests, which compare bits: use no wider vectors than these. */
void tukeyreg_limit(int width) {
    known = -1;
    if (width < width_of_vectors()) known = width;
}
#else
#define DISPATCH(name, ...) return name##_baseline(__VA_ARGS__)

void tukeyreg_limit(int width) { (void)width; }
#endif

/* Add rows to the products of their groups. 0, or -1 if there is no memory for the work. */
int tukeyreg_add(const table *rows, int64_t n, const int32_t *groups, int32_t first, int32_t last,
                 int shifted, products *sums) {
    DISPATCH(add, rows, n, groups, first, last, shifted, sums);
}

/* Add rows to the triangles of their groups. 0, or -1 if there is no memory for the work. */
int tukeyreg_absorb(const table *rows, int64_t n, const int32_t *groups, int32_t first,
                    int32_t last, int intercept, triangles *state) {
    DISPATCH(absorb, rows, n, groups, first, last, intercept, state);
}

/* Bring the rows that still wait in the groups' buffers into their triangles. */
void tukeyreg_flush(int64_t width, int32_t first, int32_t last, triangles *state) {
    DISPATCH(flush_all, width, first, last, state);
}

/* Add to out the sum of integer rows times residuals, of rows start .. stop - 1. Rows that are not
 * kept, or not finite, count for nothing. 0, or -1 if there is no memory for the work. */
int tukeyreg_gradient(const table *rows, int64_t start, int64_t stop, const uint8_t *kept,
                      const double *weights, const row_map *map, const double *model,
                      double unit_of_model, double bound, int64_t *out) {
    DISPATCH(gradient, rows, start, stop, kept, weights, map, model, unit_of_model, bound, out);
}

/* The words first .. first + n - 1 of the stream of a key and a nonce, each times bound >> 32. */
void tukeyreg_draws(const uint8_t *key, uint64_t nonce, uint64_t first, int64_t n, uint64_t bound,
                    uint32_t *out) {
    DISPATCH(stream, key, nonce, first, n, bound, out);
}

/* Which rows are finite: 1 or 0 for each. */
void tukeyreg_finite(const table *rows, int64_t start, int64_t stop, uint8_t *out) {
    DISPATCH(finite, rows, start, stop, out);
}

/* Products to triangles ---------------------------------------------------------------------- */

/* Below this share of what it was, a pivot or a centred square has lost digits that QR keeps. */
static const double SOUND_PIVOT = 1e-6, SOUND_CENTRE = 1e-4, LARGEST_INFLATION = 1e6;
/* Largest magnitude, and smallest that is not zero, whose products are ordinary doubles. */
static const double LARGE = 1e140, SMALL = 1e-140;

/* Whether no feature is explained by the others so far that products lose its digits: the largest
 * variance inflation, which is the square of a row of the inverse times that of a column. */
static int inflation_is_small(int64_t p, const double *triangle, int64_t stride, double *inverse) {
    for (int64_t j = 0; j < p; j++) {
        double pivot = triangle[j * stride + j], column = 0.0;
        if (pivot == 0.0) continue;
        for (int64_t i = 0; i <= j; i++) column += triangle[i * stride + j] * triangle[i * stride + j];
        inverse[j * p + j] = sqrt(column); /* the length for now */
    }
    for (int64_t i = 0; i < p; i++) {
        double pivot = triangle[i * stride + i];
        if (pivot == 0.0) continue;
        double length = inverse[i * p + i], square = 1.0 / (pivot * pivot);
        double *row = inverse + i * p; /* row i of the inverse, from the diagonal on */
        row[i] = 1.0 / pivot;
        for (int64_t k = i + 1; k < p; k++) {
            double below = triangle[k * stride + k], sum = 0.0;
            if (below == 0.0) continue;
            for (int64_t l = i; l < k; l++)
                if (triangle[l * stride + l] != 0.0) sum += row[l] * triangle[l * stride + k];
            row[k] = -sum / below;
            square += row[k] * row[k];
        }
        if (!(square * length * length < LARGEST_INFLATION)) return 0;
    }
    return 1;
}

static int factor_one(int64_t p, const double *gram, const double *origin, const double *peak,
                      int64_t count, int intercept, const uint8_t *aliased, double *centred,
                      double *out) {
    int64_t w = p + 1, wp = padded(w + 1), d = w + intercept;
    const double *ones = gram + w; /* the column of sums */
    double n = (double)count;
    if (count == 0) return 1; /* all zero */
    for (int64_t j = 0; j < w; j++) {
        if (peak[j] != 0.0 && !(peak[j] >= SMALL && peak[j] <= LARGE)) return 0;
        if (!(fabs(origin[j]) <= LARGE)) return 0;
    }
    for (int64_t j = 0; j < w; j++)
        for (int64_t k = j; k < w; k++) {
            double product = gram[j * wp + k];
            if (intercept) product -= ones[j * wp] * (ones[k * wp] / n);
            centred[j * w + k] = peak[j] == 0.0 || peak[k] == 0.0 ? 0.0 : product;
        }
    if (intercept) {
        double root = sqrt(n);
        out[0] = root;
        for (int64_t j = 0; j < w; j++) out[1 + j] = root * (origin[j] + ones[j * wp] / n);
    }
    for (int64_t j = 0; j < p; j++) {
        double *row = out + (j + intercept) * d + intercept;
        if (peak[j] == 0.0 || (aliased && aliased[j])) continue; /* its row stays zero */
        double square = gram[j * wp + j], start = centred[j * w + j];
        if (!(start > SOUND_CENTRE * square)) return 0;
        double pivot = start;
        for (int64_t l = 0; l < j; l++) {
            double above = out[(l + intercept) * d + intercept + j];
            pivot -= above * above;
        }
        if (!(pivot > SOUND_PIVOT * start)) return 0;
        pivot = sqrt(pivot);
        row[j] = pivot;
        for (int64_t k = j + 1; k < w; k++) row[k] = centred[j * w + k];
        for (int64_t l = 0; l < j; l++) {
            const double *above = out + (l + intercept) * d + intercept;
            double share = above[j];
            if (share != 0.0)
                for (int64_t k = j + 1; k < w; k++) row[k] -= share * above[k];
        }
        for (int64_t k = j + 1; k < w; k++) row[k] /= pivot;
    }
    return inflation_is_small(p, out + intercept * d + intercept, d, centred);
}

/* Triangles of [1, features, target] of every group, row by row of out (d + 1 rows of d + 1), and
 * whether products were good enough for it. Of a group that needs QR nothing is written that counts.
 * aliased: for every group and feature whether it is known to be collinear with others, or NULL. */
int tukeyreg_factor(int64_t first, int64_t last, int64_t p, int intercept, const products *sums,
                    const uint8_t *aliased, double *out, uint8_t *sound) {
    int64_t w = p + 1, wp = padded(w + 1), d = w + intercept;
    double *centred = malloc(8 * w * w);
    if (!centred) return -1;
    for (int64_t g = first; g < last; g++)
        sound[g] = (uint8_t)factor_one(p, sums->gram + g * wp * wp, sums->origin + g * wp,
                                       sums->peak + g * wp, sums->count[g], intercept,
                                       aliased ? aliased + g * p : NULL, centred, out + g * d * d);
    free(centred);
    return 0;
}

/* Keyed hash: SipHash-2-4 (Aumasson and Bernstein 2012) ---------------------------------------- */

static inline uint64_t rotated(uint64_t x, int by) { return x << by | x >> (64 - by); }

static uint64_t siphash(const uint8_t *text, uint64_t length, uint64_t k0, uint64_t k1) {
    uint64_t a = k0 ^ 0x736f6d6570736575u, b = k1 ^ 0x646f72616e646f6du;
    uint64_t c = k0 ^ 0x6c7967656e657261u, d = k1 ^ 0x7465646279746573u;
#define ROUND                                                                                      \
    (a += b, b = rotated(b, 13) ^ a, a = rotated(a, 32), c += d, d = rotated(d, 16) ^ c, a += d,   \
     d = rotated(d, 21) ^ a, c += b, b = rotated(b, 17) ^ c, c = rotated(c, 32))
    uint64_t left = length & 7, word;
    const uint8_t *end = text + length - left;
    for (; text != end; text += 8) {
        word = 0;
        for (int i = 0; i < 8; i++) word |= (uint64_t)text[i] << 8 * i;
        d ^= word;
        ROUND;
        ROUND;
        a ^= word;
    }
    word = length << 56;
    for (uint64_t i = 0; i < left; i++) word |= (uint64_t)text[i] << 8 * i;
    d ^= word;
    ROUND;
    ROUND;
    a ^= word;
    c ^= 0xff;
    ROUND;
    ROUND;
    ROUND;
    ROUND;
    return a ^ b ^ c ^ d;
#undef ROUND
}

/* Hashes of n texts that lie one after the other; text i begins at starts[i], starts[n] is the end. */
void tukeyreg_hash_texts(int64_t n, const uint8_t *texts, const int64_t *starts, uint64_t k0,
                         uint64_t k1, uint64_t *out) {
    for (int64_t i = 0; i < n; i++)
        out[i] = siphash(texts + starts[i], (uint64_t)(starts[i + 1] - starts[i]), k0, k1);
}

/* Hashes of integers, spelled as 'i' and their decimal digits. */
void tukeyreg_hash_integers(int64_t n, const int64_t *values, uint64_t k0, uint64_t k1,
                            uint64_t *out) {
    for (int64_t i = 0; i < n; i++) {
        uint8_t text[24];
        int at = 24;
        uint64_t size = values[i] < 0 ? 0 - (uint64_t)values[i] : (uint64_t)values[i];
        do {
            text[--at] = (uint8_t)('0' + size % 10);
            size /= 10;
        } while (size);
        if (values[i] < 0) text[--at] = '-';
        text[--at] = 'i';
        out[i] = siphash(text + at, (uint64_t)(24 - at), k0, k1);
    }
}
