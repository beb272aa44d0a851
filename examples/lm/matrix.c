/* See matrix.h. Single rows of x are multiplied with the weights as they are stored, since reading
 * them takes most of the time. For texts the weights are widened to float32 first. */
#include "matrix.h"

#include "common/arrays.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

/* dots that share an operand and are summed side by side, so that additions need not wait for each
 * other */
enum { GROUP = 4 };
/* A tile of sums of a text is in registers. */
enum { TILE_ROWS = ROWS_MULTIPLE, TILE_OUTPUTS = 32 };
enum { BLOCK_ROWS = 512 };    // rows of x for which weights are widened once
enum { BLOCK_COLUMNS = 512 }; // 512 * 32767 * 127 < 2^31

/* One row of x: its values and, for weights of 8 bits, integers that are multiplied by `factor`. */
typedef struct operand {
    const float *values;
    float factor;
    int16_t integers[MOST_COLUMNS];
} operand;

static inline float widen_bfloat16(uint16_t bits) {
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* ---- dots[n] = <x, row n of GROUP rows of w> ---- */

static void dots_float32(const float *x, const float *w, int64_t columns, float dots[GROUP]) {
    const float *const w1 = w + columns, *const w2 = w1 + columns, *const w3 = w2 + columns;
    float sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
#pragma omp simd reduction(+ : sum0, sum1, sum2, sum3)
    for (int64_t c = 0; c < columns; c++) {
        sum0 += x[c] * w[c];
        sum1 += x[c] * w1[c];
        sum2 += x[c] * w2[c];
        sum3 += x[c] * w3[c];
    }
    dots[0] = sum0, dots[1] = sum1, dots[2] = sum2, dots[3] = sum3;
}

static void dots_bfloat16(const float *x, const uint16_t *w, int64_t columns, float dots[GROUP]) {
    const uint16_t *const w1 = w + columns, *const w2 = w1 + columns, *const w3 = w2 + columns;
    float sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
#pragma omp simd reduction(+ : sum0, sum1, sum2, sum3)
    for (int64_t c = 0; c < columns; c++) {
        sum0 += x[c] * widen_bfloat16(w[c]);
        sum1 += x[c] * widen_bfloat16(w1[c]);
        sum2 += x[c] * widen_bfloat16(w2[c]);
        sum3 += x[c] * widen_bfloat16(w3[c]);
    }
    dots[0] = sum0, dots[1] = sum1, dots[2] = sum2, dots[3] = sum3;
}

/* Integer sums of BLOCK_COLUMNS products of 16 and 8 bits fit into 32 bits. */
static void dots_int8(const int16_t *x, const int8_t *w, int64_t columns, float dots[GROUP]) {
    for (int n = 0; n < GROUP; n++)
        dots[n] = 0;
    for (int64_t first = 0; first < columns; first += BLOCK_COLUMNS) {
        const int64_t left = columns - first;
        const int64_t count = left < BLOCK_COLUMNS ? left : BLOCK_COLUMNS;
        const int16_t *const block = x + first;
        const int8_t *const w0 = w + first, *const w1 = w0 + columns, *const w2 = w1 + columns,
                            *const w3 = w2 + columns;
        int32_t sum0 = 0, sum1 = 0, sum2 = 0, sum3 = 0;
        for (int64_t c = 0; c < count; c++) {
            sum0 += block[c] * (int16_t)w0[c];
            sum1 += block[c] * (int16_t)w1[c];
            sum2 += block[c] * (int16_t)w2[c];
            sum3 += block[c] * (int16_t)w3[c];
        }
        dots[0] += (float)sum0, dots[1] += (float)sum1;
        dots[2] += (float)sum2, dots[3] += (float)sum3;
    }
}

/* x in 16 bits, for weights of 8 bits: x[c] is about factor * integers[c]. Returns false if an
 * element is not finite. Without their signs floats are ordered as their bits are. */
static bool quantise(const float *x, int64_t columns, int16_t *integers, float *factor) {
    const float least = 1e-30F; // smaller rows become 0: 1 / factor could overflow
    const uint32_t magnitude = 0x7FFFFFFF, infinity = 0x7F800000;
    uint32_t most_bits = 0;
    for (int64_t c = 0; c < columns; c++) {
        uint32_t bits;
        memcpy(&bits, &x[c], sizeof bits);
        bits &= magnitude;
        most_bits = bits > most_bits ? bits : most_bits;
    }
    if (most_bits >= infinity)
        return false;
    float most;
    memcpy(&most, &most_bits, sizeof most);
    *factor = most > least ? most / INT16_MAX : 1;
    const float inverse = 1 / *factor;
    for (int64_t c = 0; c < columns; c++)
        integers[c] = (int16_t)(x[c] * inverse + copysignf(0.5F, x[c]));
    return true;
}

static void multiply_group(const matrix *w, const operand *x, int64_t r, float *y) {
    const int64_t first = r * w->columns;
    switch (w->kind) {
    case MATRIX_FLOAT32:
        dots_float32(x->values, (const float *)w->data + first, w->columns, y + r);
        break;
    case MATRIX_BFLOAT16:
        dots_bfloat16(x->values, (const uint16_t *)w->data + first, w->columns, y + r);
        break;
    case MATRIX_INT8:
        dots_int8(x->integers, (const int8_t *)w->data + first, w->columns, y + r);
        for (int n = 0; n < GROUP; n++)
            y[r + n] *= w->scale[r + n] * x->factor;
        break;
    }
}

static void multiply_row(const matrix *w, const float *x, float *y, int threads) {
    (void)threads; // without OpenMP
    operand row;   // its integers need no initial values
    row.values = x;
    if (w->kind == MATRIX_INT8 && !quantise(x, w->columns, row.integers, &row.factor)) {
        for (int64_t r = 0; r < w->rows; r++)
            y[r] = NAN;
        return;
    }
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t r = 0; r < w->rows; r += GROUP)
        multiply_group(w, &row, r, y);
}

void multiply_rows(const matrix *w, const float *x, int64_t len, float *y, int threads) {
    if (len == 1) {
        multiply_row(w, x, y, threads);
        return;
    }
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < len; i++)
        multiply_row(w, x + i * w->columns, y + i * w->rows, 1);
}

/* ---- texts ---- */

void widen_row(const matrix *w, int64_t r, float *row) {
    const int64_t first = r * w->columns;
    for (int64_t c = 0; c < w->columns; c++)
        switch (w->kind) {
        case MATRIX_FLOAT32:
            row[c] = ((const float *)w->data)[first + c];
            break;
        case MATRIX_BFLOAT16:
            row[c] = widen_bfloat16(((const uint16_t *)w->data)[first + c]);
            break;
        case MATRIX_INT8:
            row[c] = w->scale[r] * (float)((const int8_t *)w->data)[first + c];
            break;
        }
}

/* panel [columns, TILE_OUTPUTS]: rows r to r + TILE_OUTPUTS - 1 of w, transposed. Rows that w does
 * not have are 0. `row` has room for a row of w. */
static void pack_panel(const matrix *w, int64_t r, float *row, float *panel) {
    for (int64_t n = 0; n < TILE_OUTPUTS; n++) {
        if (r + n < w->rows)
            widen_row(w, r + n, row);
        for (int64_t c = 0; c < w->columns; c++)
            panel[c * TILE_OUTPUTS + n] = r + n < w->rows ? row[c] : 0;
    }
}

/* sums [TILE_ROWS, TILE_OUTPUTS] stay in registers. */
static void multiply_tile(const float *restrict panel, const float *restrict x, int64_t columns,
                          float sums[restrict TILE_ROWS][TILE_OUTPUTS]) {
    float tile[TILE_ROWS][TILE_OUTPUTS] = {{0}};
    for (int64_t c = 0; c < columns; c++)
        for (int i = 0; i < TILE_ROWS; i++)
#pragma omp simd
            for (int n = 0; n < TILE_OUTPUTS; n++)
                tile[i][n] += x[i * columns + c] * panel[c * TILE_OUTPUTS + n];
    memcpy(sums, tile, sizeof tile);
}

/* Columns r to r + TILE_OUTPUTS - 1 of rows `first` to `end` - 1 of y, and of the further rows that
 * fill the last tile. */
static void multiply_panel(const matrix *w, const float *panel, const float *x, int64_t first,
                           int64_t end, int64_t r, float *y) {
    const int64_t outputs = w->rows - r < TILE_OUTPUTS ? w->rows - r : TILE_OUTPUTS;
    float sums[TILE_ROWS][TILE_OUTPUTS];
    for (int64_t i = first; i < end; i += TILE_ROWS) {
        multiply_tile(panel, x + i * w->columns, w->columns, sums);
        for (int64_t n = 0; n < TILE_ROWS; n++)
            memcpy(y + (i + n) * w->rows + r, sums[n], (size_t)outputs * sizeof(float));
    }
}

void multiply_text(const matrix *w, const float *x, int64_t len, float *y, int threads) {
    (void)threads; // without OpenMP
#pragma omp parallel num_threads(threads)
    {
        float *const row = allocate((size_t)w->columns * sizeof *row);
        float *const panel = allocate((size_t)w->columns * TILE_OUTPUTS * sizeof *panel);
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t first = 0; first < len; first += BLOCK_ROWS)
            for (int64_t r = 0; r < w->rows; r += TILE_OUTPUTS) {
                const int64_t end = first + BLOCK_ROWS < len ? first + BLOCK_ROWS : len;
                pack_panel(w, r, row, panel);
                multiply_panel(w, panel, x, first, end, r, y);
            }
        free(row);
        free(panel);
    }
}
