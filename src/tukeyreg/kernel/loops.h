/* The heavy loops of kernel.c, for one width of vectors: TARGET, FOR_TARGET and ABREAST are set. */
#define FOR(name) NAME(name, TARGET)
#define INLINE static inline __attribute__((always_inline)) FOR_TARGET

INLINE vector FOR(chosen)(whole where, vector a, vector b) {
    return (vector)((where & (whole)a) | (~where & (whole)b));
}

INLINE vector FOR(within)(vector x, vector most) {
    x = FOR(chosen)(x < most, x, most);
    return FOR(chosen)(x > -most, x, -most);
}

/* To the nearest integer, ties to even; below 2**51. */
INLINE vector FOR(nearest)(vector x) {
    const double shift = 6755399441055744.0; /* 1.5 * 2**52 */
    return x + shift - shift;
}

/* Towards zero; below 2**31. */
INLINE vector FOR(towards_zero)(vector x) {
    typedef int32_t ints __attribute__((vector_size(16)));
    return __builtin_convertvector(__builtin_convertvector(x, ints), vector);
}

/* Whether a vector whose lanes are zero or not a number is all zero. */
INLINE int FOR(all_zero)(vector v) {
    typedef double half __attribute__((vector_size(16)));
    union { vector whole; half halves[2]; } both = {v};
    half left = both.halves[0] + both.halves[1];
    return left[0] + left[1] == 0.0;
}

/* Entries j .. j + ABREAST - 1, k .. k + PAIR * LANES - 1 of gram += rows' rows. */
#define BLOCK(PAIR)                                                                                \
    do {                                                                                           \
        vector sum[ABREAST][PAIR];                                                                 \
        for (int a = 0; a < ABREAST; a++)                                                          \
            for (int b = 0; b < PAIR; b++)                                                         \
                sum[a][b] = *(const vector *)(gram + (j + a) * wp + k + b * LANES);                \
        for (int64_t r = 0; r < n; r++) {                                                          \
            const double *row = tile + r * wp;                                                     \
            for (int b = 0; b < PAIR; b++) {                                                       \
                vector right = *(const vector *)(row + k + b * LANES);                             \
                for (int a = 0; a < ABREAST; a++) sum[a][b] += row[j + a] * right;                 \
            }                                                                                      \
        }                                                                                          \
        for (int a = 0; a < ABREAST; a++)                                                          \
            for (int b = 0; b < PAIR; b++)                                                         \
                *(vector *)(gram + (j + a) * wp + k + b * LANES) = sum[a][b];                      \
    } while (0)

/* gram += rows' rows on and above the diagonal, every entry summed in the order of rows. */
static FOR_TARGET void FOR(add_products)(const double *tile, int64_t n, int64_t wp, double *gram) {
    int64_t k = 0;
    for (; k + 2 * LANES <= wp; k += 2 * LANES)
        for (int64_t j = 0; j < k + 2 * LANES; j += ABREAST) BLOCK(2);
    for (; k < wp; k += LANES)
        for (int64_t j = 0; j < k + LANES; j += ABREAST) BLOCK(1);
}
#undef BLOCK

/* Rows of columns that lie apart, side by side; a step of rows at a time stays in the cache. */
static FOR_TARGET void FOR(turn)(const table *t, int64_t start, int64_t n, int64_t wp,
                                 double *out) {
    enum { STEP = 32 };
    for (int64_t from = 0; from < n; from += STEP) {
        int64_t size = n - from < STEP ? n - from : STEP;
        for (int64_t j = 0; j < t->n_columns; j++) {
            const char *data = t->data[j] + (start + from) * t->stride[j];
            int64_t stride = t->stride[j];
            double *to = out + from * wp + j;
#define COPY(type)                                                                                 \
    for (int64_t r = 0; r < size; r++, data += stride) {                                           \
        type v;                                                                                    \
        memcpy(&v, data, sizeof v);                                                                \
        to[r * wp] = (double)v;                                                                    \
    }                                                                                              \
    break;
            switch (t->kind[j]) {
            case F64: COPY(double)
            case F32: COPY(float)
            case U8: COPY(uint8_t)
            case I8: COPY(int8_t)
            case I16: COPY(int16_t)
            case U16: COPY(uint16_t)
            case I32: COPY(int32_t)
            case U32: COPY(uint32_t)
            case I64: COPY(int64_t)
            default: COPY(uint64_t)
            }
#undef COPY
        }
    }
}

/* Doubles side by side, then the target, then zeros: whole vectors only, which are read again soon. */
INLINE void FOR(take)(const double *from, int64_t p, double y, int64_t wp, double *out) {
    int64_t j = 0;
    for (; j + LANES <= p; j += LANES) *(vector *)(out + j) = *(const vector *)(from + j);
    vector rest = {y};
    if (p - j == 1) rest = (vector){from[j], y};
    if (p - j == 2) rest = (vector){from[j], from[j + 1], y};
    if (p - j == 3) rest = (vector){from[j], from[j + 1], from[j + 2], y};
    *(vector *)(out + j) = rest;
    for (j += LANES; j < wp; j += LANES) *(vector *)(out + j) = (vector){0};
}

static FOR_TARGET int FOR(add)(const table *t, int64_t n, const int32_t *groups, int32_t first,
                               int32_t last, int shifted, products *sums) {
    int64_t w = t->n_columns, wp = padded(w + 1), n_groups = last - first;
    int side_by_side = layout_of(t) == 2;
    int64_t step = side_by_side ? 16 * n_groups : 8 * n_groups, least = 1 << (side_by_side ? 14 : 12);
    step = step < least ? least : step > 1 << 20 ? 1 << 20 : step;
    double *turned = side_by_side ? NULL : calloc((size_t)(step * wp), 8);
    int32_t *order = malloc(4 * step);
    int64_t *ends = malloc(8 * (n_groups + 1));
    double *space = calloc(wp * TILE + 8, 8);
    double *tile = (double *)(((uintptr_t)space + 63) & ~(uintptr_t)63); /* 8 doubles at most */
    int done = order && ends && space && (side_by_side || turned) ? 0 : -1;
    for (int64_t start = 0; start < n && !done; start += step) {
        int64_t stop = start + step < n ? start + step : n;
        by_group(groups, start, stop, first, last, ends, order);
        if (!side_by_side) FOR(turn)(t, start, stop - start, wp, turned);
        for (int64_t g = 0, from = 0; g < n_groups; from = ends[g++]) {
            double *gram = sums->gram + (g + first) * wp * wp;
            double *origin = sums->origin + (g + first) * wp, *peak = sums->peak + (g + first) * wp;
            int64_t filled = 0;
            for (int64_t at = from; at < ends[g]; at++) {
                double *row = tile + filled * wp;
                if (side_by_side && at + AHEAD < ends[n_groups]) {
                    int64_t soon = start + order[at + AHEAD];
                    const char *ahead = t->data[0] + soon * t->stride[0];
                    for (int64_t byte = 0; byte < 8 * w + 56; byte += 64)
                        __builtin_prefetch(ahead + byte);
                    __builtin_prefetch(t->data[w - 1] + soon * t->stride[w - 1]);
                }
                if (side_by_side) {
                    const double *from =
                        (const double *)(t->data[0] + (start + order[at]) * t->stride[0]);
                    double y = *(const double *)(t->data[w - 1] +
                                                 (start + order[at]) * t->stride[w - 1]);
                    FOR(take)(from, w - 1, y, wp, row);
                } else {
                    const double *from = turned + order[at] * wp;
                    for (int64_t j = 0; j < wp; j += LANES)
                        *(vector *)(row + j) = *(const vector *)(from + j);
                }
                vector bad = {0}; /* NaN where a number is not finite */
                for (int64_t j = 0; j < wp; j += LANES)
                    bad += *(vector *)(row + j) - *(vector *)(row + j);
                if (!FOR(all_zero)(bad)) continue;
                if (sums->check) sums->check[g + first] += mark_of(row, w);
                /* origin[w] is -1, which makes a column of ones of the zeros there */
                if (shifted && sums->count[g + first] == 0 && filled == 0)
                    memcpy(origin, row, 8 * w);
                for (int64_t j = 0; j < wp; j += LANES) {
                    vector v = *(vector *)(row + j) - *(vector *)(origin + j);
                    vector size = (vector)((whole)v & INT64_MAX), top = *(vector *)(peak + j);
                    whole higher = size > top;
                    *(vector *)(row + j) = v;
                    *(vector *)(peak + j) = (vector)((higher & (whole)size) | (~higher & (whole)top));
                }
                if (++filled == TILE) {
                    FOR(add_products)(tile, filled, wp, gram);
                    sums->count[g + first] += filled;
                    filled = 0;
                }
            }
            if (filled) FOR(add_products)(tile, filled, wp, gram);
            sums->count[g + first] += filled;
        }
    }
    free(turned);
    free(order);
    free(ends);
    free(space);
    return done;
}

/* Columns k .. k + WIDE * LANES - 1 of the triangle's row and of the rows below, reflected. */
#define REFLECT(WIDE)                                                                              \
    do {                                                                                           \
        vector *above = (vector *)(top + j * wp + k), sum[WIDE];                                   \
        for (int b = 0; b < WIDE; b++) sum[b] = above[b];                                          \
        for (int64_t r = 0; r < n; r++)                                                            \
            for (int b = 0; b < WIDE; b++)                                                         \
                sum[b] += reflection[r] * *(const vector *)(rows + r * wp + k + b * LANES);        \
        for (int b = 0; b < WIDE; b++) {                                                           \
            sum[b] *= scale / norm;                                                                \
            above[b] -= sum[b];                                                                    \
        }                                                                                          \
        for (int64_t r = 0; r < n; r++)                                                            \
            for (int b = 0; b < WIDE; b++)                                                         \
                *(vector *)(rows + r * wp + k + b * LANES) -= reflection[r] * sum[b];              \
        k += WIDE * LANES;                                                                         \
    } while (0)

/* QR of a group's triangle on top of the rows that wait, by Householder reflections. */
static FOR_TARGET void FOR(flush)(int64_t w, triangles *state, int64_t g) {
    int64_t wp = padded(w), n = state->n_waiting[g];
    double *top = state->triangle + g * wp * wp, *rows = state->waiting + g * state->block * wp;
    int32_t *exponent = state->exponent + g * wp;
    double reflection[TILE];
    for (int64_t k = 0; k < wp; k += LANES) {
        vector largest = {0}, factor;
        for (int64_t r = 0; r < n; r++) {
            vector size = (vector)(*(whole *)(rows + r * wp + k) & INT64_MAX);
            largest = FOR(chosen)(size > largest, size, largest);
        }
        for (int lane = 0; lane < LANES; lane++)
            factor[lane] = rescaled(top, rows, wp, n, k + lane, largest[lane], exponent);
        for (int64_t r = 0; r < n; r++) *(vector *)(rows + r * wp + k) *= factor;
    }
    for (int64_t j = 0; j < w; j++) {
        double square = 0.0, pivot = top[j * wp + j];
        for (int64_t r = 0; r < n; r++) square += rows[r * wp + j] * rows[r * wp + j];
        if (!(square > 1e-280)) continue;
        double norm = copysign(sqrt(pivot * pivot + square), pivot), scale = pivot + norm;
        for (int64_t r = 0; r < n; r++) reflection[r] = rows[r * wp + j] / scale;
        /* What this does below the diagonal is never looked at. */
        int64_t k = (j + 1) / LANES * LANES;
        while (k + 4 * LANES <= wp) REFLECT(4);
        while (k + 2 * LANES <= wp) REFLECT(2);
        while (k < wp) REFLECT(1);
        top[j * wp + j] = -norm;
    }
    state->n_waiting[g] = 0;
}

#undef REFLECT

static FOR_TARGET int FOR(absorb)(const table *t, int64_t n, const int32_t *groups, int32_t first,
                                  int32_t last, int intercept, triangles *state) {
    int64_t w = t->n_columns + intercept, wp = padded(w);
    int layout = layout_of(t);
    for (int64_t i = 0; i < n; i++) {
        int32_t g = groups[i];
        if (g < first || g >= last) continue;
        double *row = state->waiting + ((int64_t)g * state->block + state->n_waiting[g]) * wp;
        row[0] = 1.0;
        read_row(t, layout, i, row + intercept);
        if (!all_finite(row, w)) continue;
        for (int64_t j = w; j < wp; j++) row[j] = 0.0;
        if (state->check) state->check[g] += mark_of(row + intercept, w - intercept);
        if (++state->n_waiting[g] == state->block) FOR(flush)(w, state, g);
    }
    return 0;
}

static FOR_TARGET void FOR(flush_all)(int64_t w, int32_t first, int32_t last, triangles *state) {
    for (int32_t g = first; g < last; g++)
        if (state->n_waiting[g]) FOR(flush)(w, state, g);
}

static FOR_TARGET void FOR(finite)(const table *t, int64_t start, int64_t stop, uint8_t *out) {
    enum { STEP = 2048 };
    int layout = layout_of(t);
    double bad[STEP];
    for (int64_t from = start; from < stop; from += STEP) {
        int64_t size = stop - from < STEP ? stop - from : STEP;
        for (int64_t r = 0; r < size; r++) bad[r] = 0.0;
        for (int64_t j = 0; j < t->n_columns; j++) {
            const char *data = t->data[j] + from * t->stride[j];
            if (layout == 2 && j == 0 && t->n_columns > 1) { /* side by side: row by row */
                int64_t p = t->n_columns - 1, even = p / LANES * LANES;
                for (int64_t r = 0; r < size; r++) {
                    const double *x = (const double *)(data + r * t->stride[0]);
                    vector sums = {0};
                    for (int64_t k = 0; k < even; k += LANES)
                        sums += *(const vector *)(x + k) - *(const vector *)(x + k);
                    for (int64_t k = even; k < p; k++) bad[r] += x[k] - x[k];
                    if (!FOR(all_zero)(sums)) bad[r] = NAN;
                }
                j = p - 1;
            } else if (t->kind[j] == F64 && t->stride[j] == 8) {
                const double *x = (const double *)data;
                for (int64_t r = 0; r < size; r++) bad[r] += x[r] - x[r];
            } else if (t->kind[j] <= F32) {
                for (int64_t r = 0; r < size; r++) {
                    double x = value_at(t, j, from + r);
                    bad[r] += x - x;
                }
            }
        }
        for (int64_t r = 0; r < size; r++) out[from + r - start] = bad[r] == 0.0;
    }
}

/* Noisy gradients without the noise: the sum of integer rows times integer residuals. The same
 * numbers as RowMap and ShrunkRows of summaries/rows.py, step by step; LANES rows side by side. */
static FOR_TARGET int FOR(gradient)(const table *t, int64_t start, int64_t stop,
                                    const uint8_t *kept, const double *weights, const row_map *map,
                                    const double *model, double unit_of_model, double bound,
                                    int64_t *out) {
    enum { ROUNDS = 512 }; /* so that sums of one lane are below 2**53 */
    int64_t p = t->n_columns - 1, d = map->width, first = d - p;
    int layout = layout_of(t);
    vector *z = aligned_alloc(64, 64 * (size_t)(3 * d)), *u = z + d, *sums = u + d;
    double *row = malloc(8 * (size_t)(p + LANES));
    int done = z && row ? 0 : -1;
    if (!done) memset(sums, 0, 64 * (size_t)d);
    for (int64_t i = 0; i < first && !done; i++) z[i] = (vector){0} + map->steps;
    for (int64_t at = start, round = 1; at < stop && !done; at += LANES, round++) {
        vector target = {0}, most = {0};
        for (int64_t lane = 0; lane < LANES; lane++) {
            int64_t i = at + lane;
            int used = i < stop && (!kept || kept[i]);
            if (used) {
                read_row(t, layout, i, row);
                used = all_finite(row, p + 1);
            }
            for (int64_t j = 0; j < p; j++) z[first + j][lane] = used ? row[j] : map->location[j];
            target[lane] = used ? row[p] : map->target_location;
            most[lane] = used ? weights ? weights[i] : 1.0 : 0.0;
        }
        for (int64_t j = 0; j < p; j++) {
            vector x = (z[first + j] - map->location[j]) / map->scale[j];
            z[first + j] = FOR(nearest)(FOR(within)(x, (vector){0} + map->reach) * map->steps);
        }
        for (int64_t i = 0; i < d && map->whitening; i += 4) {
            int64_t rest = d - i < 4 ? d - i : 4;
            vector sum[4] = {{0}};
            const double *w = map->whitening + i * d;
            if (rest == 4)
                for (int64_t j = 0; j < d; j++)
                    for (int a = 0; a < 4; a++) sum[a] += w[a * d + j] * z[j];
            else
                for (int64_t a = 0; a < rest; a++)
                    for (int64_t j = 0; j < d; j++) sum[a] += w[a * d + j] * z[j];
            for (int64_t a = 0; a < rest; a++) u[i + a] = sum[a] * map->unit;
        }
        for (int64_t i = 0; i < d && !map->whitening; i++) u[i] = z[i] * map->unit;
        vector factor = {0}, predicted = {0};
        for (int64_t i = 0; i < d; i++) factor += u[i] * u[i];
        for (int lane = 0; lane < LANES; lane++) factor[lane] = sqrt(factor[lane]);
        factor = map->radius / factor;
        factor = FOR(chosen)(factor < 1.0, factor, (vector){0} + 1.0);
        if (weights) factor *= FOR(chosen)(most > 0.0, most, (vector){0} + 1.0);
        target = (target - map->target_location) / map->target_scale * factor;
        factor *= map->shrink;
        for (int64_t i = 0; i < d; i++) {
            u[i] = FOR(towards_zero)(u[i] * factor);
            predicted += model[i] * u[i];
        }
        vector share = (target - predicted * unit_of_model) / bound;
        share = FOR(towards_zero)(FOR(within)(share, most) * map->residual_steps);
        for (int64_t i = 0; i < d; i++) sums[i] += u[i] * share;
        if (round % ROUNDS == 0 || at + LANES >= stop)
            for (int64_t i = 0; i < d; i++) {
                for (int lane = 0; lane < LANES; lane++) out[i] += (int64_t)sums[i][lane];
                sums[i] = (vector){0};
            }
    }
    free(z);
    free(row);
    return done;
}

/* ChaCha20 (Bernstein 2008; 64-bit counter and nonce), sixteen blocks side by side. */
static FOR_TARGET void FOR(stream)(const uint8_t *key, uint64_t nonce, uint64_t first, int64_t n,
                                   uint64_t bound, uint32_t *out) {
    uint32_t start[16] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};
    for (int i = 0; i < 8; i++)
        start[4 + i] = (uint32_t)key[4 * i] | (uint32_t)key[4 * i + 1] << 8 |
                       (uint32_t)key[4 * i + 2] << 16 | (uint32_t)key[4 * i + 3] << 24;
    start[14] = (uint32_t)nonce;
    start[15] = (uint32_t)(nonce >> 32);
    int64_t written = 0;
    for (uint64_t chunk = first / 256; written < n; chunk++) {
        words s[16], t[16];
        uint32_t made[256];
        for (int i = 0; i < 16; i++) s[i] = (words){0} + start[i];
        for (int lane = 0; lane < 16; lane++) {
            uint64_t block = chunk * 16 + (uint64_t)lane;
            s[12][lane] = (uint32_t)block;
            s[13][lane] = (uint32_t)(block >> 32);
        }
        memcpy(t, s, sizeof s);
#define TURN(x, by) ((x) << (by) | (x) >> (32 - (by)))
#define QUARTER(a, b, c, d)                                                                        \
    (t[a] += t[b], t[d] ^= t[a], t[d] = TURN(t[d], 16), t[c] += t[d], t[b] ^= t[c],                \
     t[b] = TURN(t[b], 12), t[a] += t[b], t[d] ^= t[a], t[d] = TURN(t[d], 8), t[c] += t[d],        \
     t[b] ^= t[c], t[b] = TURN(t[b], 7))
        for (int round = 0; round < 10; round++) {
            QUARTER(0, 4, 8, 12);
            QUARTER(1, 5, 9, 13);
            QUARTER(2, 6, 10, 14);
            QUARTER(3, 7, 11, 15);
            QUARTER(0, 5, 10, 15);
            QUARTER(1, 6, 11, 12);
            QUARTER(2, 7, 8, 13);
            QUARTER(3, 4, 9, 14);
        }
#undef QUARTER
#undef TURN
        for (int i = 0; i < 16; i++) {
            t[i] += s[i];
            for (int lane = 0; lane < 16; lane++) made[16 * lane + i] = t[i][lane];
        }
        int64_t skipped = written ? 0 : (int64_t)(first % 256);
        int64_t taken = 256 - skipped < n - written ? 256 - skipped : n - written;
        for (int64_t i = 0; i < taken; i++)
            out[written + i] = (uint32_t)(made[skipped + i] * bound >> 32);
        written += taken;
    }
}

#undef FOR
#undef INLINE
#undef TARGET
#undef FOR_TARGET
#undef ABREAST
