/* The loops of one instruction set, for product.c, which includes this file once for each after
 * defining
 *
 *   NAME(word)       the names of what is defined here
 *   TARGET           the attribute of functions that use these instructions, or nothing
 *   BYTES            of a vector
 *   TILE_ROWS        rows of x whose sums are in registers at once, PANEL_VECTORS for each
 *
 * and which this file undefines again. */

enum { NAME(count) = BYTES / sizeof(float), NAME(outputs) = PANEL_VECTORS * NAME(count) };

typedef float NAME(lanes) __attribute__((vector_size(BYTES)));
typedef float NAME(floats) __attribute__((vector_size(BYTES), aligned(1), may_alias));
typedef uint32_t NAME(words) __attribute__((vector_size(BYTES)));
typedef uint16_t NAME(halves) __attribute__((vector_size(BYTES / 2), aligned(1), may_alias));

TARGET static inline NAME(lanes) NAME(load)(const char *w, bool is_bfloat16) {
    if (!is_bfloat16)
        return *(const NAME(floats) *)w;
    return (NAME(lanes))(__builtin_convertvector(*(const NAME(halves) *)w, NAME(words)) << 16);
}

/* A row after the other, so that the weights are read from first to last. Many processors
 * fetch nothing beyond a page themselves. */
TARGET static inline void NAME(dots_of)(const float *x, const char *w, int64_t columns,
                                        bool is_bfloat16, float dots[GROUP]) {
    const int64_t size = is_bfloat16 ? 2 : 4, step = SUMS * NAME(count);
    for (int n = 0; n < GROUP; n++) {
        const char *const row = w + n * columns * size;
        NAME(lanes) sums[SUMS] = {{0}};
        int64_t c = 0;
        for (; c + step <= columns; c += step)
            for (int s = 0; s < SUMS; s++) {
                const int64_t at = c + s * (int64_t)NAME(count);
                if (s * NAME(count) * size % CACHE_LINE == 0)
                    __builtin_prefetch(row + at * size + AHEAD);
                sums[s] +=
                    *(const NAME(floats) *)(x + at) * NAME(load)(row + at * size, is_bfloat16);
            }
        const NAME(lanes) all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        float parts[NAME(count)], sum; // halves are added, so that few additions wait for others
        memcpy(parts, &all, sizeof parts);
        for (int half = NAME(count) / 2; half > 0; half /= 2)
            for (int l = 0; l < half; l++)
                parts[l] += parts[l + half];
        sum = parts[0];
        for (; c < columns; c++)
            sum += x[c] * read_number(row, c, is_bfloat16);
        dots[n] = sum;
    }
}

TARGET static void NAME(dots)(const float *x, const char *w, int64_t columns, bool is_bfloat16,
                              float dots[GROUP]) {
    if (is_bfloat16)
        NAME(dots_of)(x, w, columns, true, dots);
    else
        NAME(dots_of)(x, w, columns, false, dots);
}

/* sums[i, n] = <x[i], output n of the panel>, for `rows` rows of x, at most TILE_ROWS. */
TARGET static void NAME(tile)(const float *panel, const float *x, int64_t rows, int64_t columns,
                              float *sums) {
    NAME(lanes) tile[TILE_ROWS][PANEL_VECTORS] = {{{0}}};
    const float *from[TILE_ROWS]; // the last row stands in for rows that x does not have
    for (int64_t i = 0; i < TILE_ROWS; i++)
        from[i] = x + (i < rows ? i : rows - 1) * columns;
    for (int64_t c = 0; c < columns; c++) {
        const NAME(floats) *const w = (const NAME(floats) *)(panel + c * (int64_t)NAME(outputs));
        const NAME(lanes) low = w[0], high = w[1];
        for (int i = 0; i < TILE_ROWS; i++) {
            tile[i][0] += from[i][c] * low;
            tile[i][1] += from[i][c] * high;
        }
    }
    memcpy(sums, tile, sizeof tile);
}

static const loops NAME(loops) = {TILE_ROWS, NAME(outputs), NAME(dots), NAME(tile)};

#undef NAME
#undef TARGET
#undef BYTES
#undef TILE_ROWS
