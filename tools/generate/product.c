/* See generate/product.h. product_loops.h makes the loops of each instruction set. */
#include "generate/product.h"

#include "fdma.h"

#include "common/arrays.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum {
    GROUP = 4,         // rows of w that a call of `dots` multiplies
    SUMS = 4,          // of a dot, so that additions need not wait for each other
    PANEL_VECTORS = 2, // of outputs in a panel
    AHEAD = 4096,      // bytes of w from what a dot reads to what it fetches
    CACHE_LINE = 64,
    FEW_ROWS = 4, // with fewer rows of x than this, packing panels does not pay
    MOST_SUMS = 12 * 32,
};

typedef struct loops {
    int64_t tile_rows, panel_outputs;
    void (*dots)(const float *x, const char *w, int64_t columns, bool is_bfloat16,
                 float dots[GROUP]);
    void (*tile)(const float *panel, const float *x, int64_t rows, int64_t columns, float *sums);
} loops;

static inline float read_number(const char *w, int64_t c, bool is_bfloat16) {
    float value;
    if (is_bfloat16) {
        uint16_t half;
        memcpy(&half, w + c * 2, sizeof half);
        const uint32_t wide = (uint32_t)half << 16;
        memcpy(&value, &wide, sizeof value);
    } else {
        memcpy(&value, w + c * 4, sizeof value);
    }
    return value;
}

#define NAME(word) baseline_##word
#define TARGET
#define BYTES 16
#define TILE_ROWS 6
#include "generate/product_loops.h"

#if defined(__x86_64__)

#define NAME(word) avx2_##word
#define TARGET __attribute__((target("avx2,fma")))
#define BYTES 32
#define TILE_ROWS 6
#include "generate/product_loops.h"

#define NAME(word) avx512_##word
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,fma")))
#define BYTES 64
#define TILE_ROWS 12
#include "generate/product_loops.h"

#endif

#if defined(__x86_64__)
static bool has_feature(const fdma_device_info *device, const char *name) {
    const size_t length = strlen(name);
    for (const char *at = device->features; *at != '\0'; at += strspn(at, " ")) {
        const size_t word = strcspn(at, " ");
        if (word == length && strncmp(at, name, length) == 0)
            return true;
        at += word;
    }
    return false;
}
#endif

static const loops *find_loops(void) {
#if defined(__x86_64__)
    fdma_device_info device = {.size = sizeof device};
    if (fdma_describe_device(FDMA_CPU, &device) != FDMA_OK || !has_feature(&device, "avx2") ||
        !has_feature(&device, "fma"))
        return &baseline_loops;
    if (has_feature(&device, "avx512f") && has_feature(&device, "avx512bw") &&
        has_feature(&device, "avx512vl"))
        return &avx512_loops;
    return &avx2_loops;
#else
    return &baseline_loops;
#endif
}

static const loops *choose_loops(void) {
    static const loops *found; // by the thread that calls multiply()
    if (found == NULL)
        found = find_loops();
    return found;
}

typedef struct product {
    const loops *by;
    const matrix *w;
    const float *x;
    int64_t len;
    float *y;
} product;

typedef struct product_list {
    product all[MOST_PRODUCTS];
    int count;
} product_list;

static const char *row_of(const matrix *w, int64_t r) {
    return (const char *)w->data + r * w->columns * (w->is_bfloat16 ? 2 : 4);
}

void read_row(const matrix *w, int64_t r, float *row) {
    const char *const from = row_of(w, r);
    for (int64_t c = 0; c < w->columns; c++)
        row[c] = read_number(from, c, w->is_bfloat16);
}

/* ---- few rows of x: the weights are read as they are ---- */

static float single_dot(const product *of, const float *x, int64_t r) {
    const char *const row = row_of(of->w, r);
    float sum = 0;
    for (int64_t c = 0; c < of->w->columns; c++)
        sum += x[c] * read_number(row, c, of->w->is_bfloat16);
    return sum;
}

static void multiply_group(const product *of, int64_t r) {
    const matrix *const w = of->w;
    for (int64_t i = 0; i < of->len; i++) {
        const float *const x = of->x + i * w->columns;
        float *const y = of->y + i * w->rows + r;
        const int64_t count = w->rows - r < GROUP ? w->rows - r : GROUP;
        if (count == GROUP)
            of->by->dots(x, row_of(w, r), w->columns, w->is_bfloat16, y);
        else
            for (int64_t n = 0; n < count; n++)
                y[n] = single_dot(of, x, r + n);
        for (int64_t n = 0; n < count && w->bias != NULL; n++)
            y[n] += w->bias[r + n];
    }
}

/* Part `index` of `count` has groups of successive rows of each w. */
static void multiply_rows(void *argument, int index, int count) {
    const product_list *const list = argument;
    for (int n = 0; n < list->count; n++) {
        const product *const of = &list->all[n];
        const int64_t groups = (of->w->rows + GROUP - 1) / GROUP;
        for (int64_t g = groups * index / count; g < groups * (index + 1) / count; g++)
            multiply_group(of, g * GROUP);
    }
}

/* ---- many rows of x: the weights are packed into panels ---- */

/* panel [columns, outputs]: rows r, r + 1, ... of w, transposed; 0 where w has no row. A few
 * columns at a time, so that their part of the panel stays in the first cache. */
static void pack_panel(const product *of, int64_t r, float *panel) {
    enum { AT_A_TIME = 16 };
    const matrix *const w = of->w;
    const int64_t outputs = of->by->panel_outputs;
    for (int64_t first = 0; first < w->columns; first += AT_A_TIME) {
        const int64_t left = w->columns - first, count = left < AT_A_TIME ? left : AT_A_TIME;
        for (int64_t n = 0; n < outputs; n++) {
            const bool exists = r + n < w->rows;
            const char *const row = row_of(w, exists ? r + n : 0);
            float *const to = panel + first * outputs + n;
            for (int64_t c = 0; c < count; c++)
                to[c * outputs] = exists ? read_number(row, first + c, w->is_bfloat16) : 0;
        }
    }
}

static void multiply_panel(const product *of, int64_t r, const float *panel) {
    const matrix *const w = of->w;
    const int64_t outputs = of->by->panel_outputs, tile_rows = of->by->tile_rows;
    const int64_t wanted = w->rows - r < outputs ? w->rows - r : outputs;
    float sums[MOST_SUMS];
    for (int64_t i = 0; i < of->len; i += tile_rows) {
        const int64_t rows = of->len - i < tile_rows ? of->len - i : tile_rows;
        of->by->tile(panel, of->x + i * w->columns, rows, w->columns, sums);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t n = 0; n < wanted; n++)
                of->y[(i + row) * w->rows + r + n] =
                    sums[row * outputs + n] + (w->bias != NULL ? w->bias[r + n] : 0);
    }
}

static void multiply_panels(void *argument, int index, int count) {
    const product_list *const list = argument;
    int64_t columns = 0;
    for (int n = 0; n < list->count; n++)
        columns = list->all[n].w->columns > columns ? list->all[n].w->columns : columns;
    const int64_t outputs = list->all[0].by->panel_outputs;
    float *const panel = allocate((size_t)(columns * outputs) * sizeof *panel);
    for (int n = 0; n < list->count; n++) {
        const product *const of = &list->all[n];
        const int64_t panels = (of->w->rows + outputs - 1) / outputs;
        for (int64_t p = panels * index / count; p < panels * (index + 1) / count; p++) {
            pack_panel(of, p * outputs, panel);
            multiply_panel(of, p * outputs, panel);
        }
    }
    free(panel);
}

void multiply(crew *threads, int count, const matrix *const *w, const float *x, int64_t len,
              float *const *y) {
    product_list list = {.count = count};
    for (int n = 0; n < count; n++)
        list.all[n] = (product){choose_loops(), w[n], x, len, y[n]};
    run_crew(threads, len < FEW_ROWS ? multiply_rows : multiply_panels, &list);
}

void free_matrix(matrix *w) {
    free(w->owned);
    free(w->bias);
}
