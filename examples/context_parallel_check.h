/* The sequence that examples/context_parallel.c computes, and a check that a rank found the results
 * that attention over the whole of it gives for the rank's tokens. */
#ifndef CONTEXT_PARALLEL_CHECK_H
#define CONTEXT_PARALLEL_CHECK_H

#include "context_parallel_ranks.h"

#include <math.h>
#include <stdbool.h>

enum { q_heads = 8, kv_heads = 2, head_dim = 64, vocabulary = 512 };
enum { q_width = q_heads * head_dim, kv_width = kv_heads * head_dim };
enum { window = 96, recent = 32, sinks = 4, rows = window + recent }; /* rows: of a table */

/* The whole sequence, on the host. */
typedef struct sequence {
    int64_t len;
    uint16_t *q, *k, *v; /* [len, heads, head_dim], the upper halves of float32 */
    float *dt_proj, *a;  /* [kv_heads, kv_width], [kv_heads] */
} sequence;

/* Repeatable numbers in [-1, 1): the high bits of a linear congruential generator. */
static float next_random(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (float)(state >> 40) * 0x1p-23F - 1;
}

static float *random_floats(size_t count, float size) {
    float *const data = allocate(count, sizeof *data);
    for (size_t n = 0; n < count; n++)
        data[n] = size * next_random();
    return data;
}

static uint16_t *random_bfloat16(size_t count) {
    uint16_t *const data = allocate(count, sizeof *data);
    for (size_t n = 0; n < count; n++) {
        const float x = next_random();
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        data[n] = (uint16_t)(bits >> 16);
    }
    return data;
}

static float float_of(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A key has the value state of its token. So many scores are equal, and positions decide which of
 * these keys a query keeps. */
static sequence new_sequence(int64_t len) {
    const size_t count = (size_t)len;
    const sequence made = {.len = len,
                           .q = random_bfloat16(count * q_width),
                           .k = random_bfloat16(count * kv_width),
                           .v = allocate(count * kv_width, sizeof(uint16_t)),
                           .dt_proj = random_floats((size_t)kv_heads * kv_width, 0.3F),
                           .a = random_floats(kv_heads, 1)};
    uint16_t *const values = random_bfloat16((size_t)vocabulary * kv_width);
    for (size_t j = 0; j < count; j++) {
        const size_t token = (size_t)((next_random() + 1) / 2 * vocabulary);
        memcpy(made.v + j * kv_width, values + token * kv_width, kv_width * sizeof *values);
    }
    free(values);
    return made;
}

static void free_sequence(const sequence *it) {
    void *const all[] = {it->q, it->k, it->v, it->dt_proj, it->a};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; n++)
        free(all[n]);
}

/* Results for consecutive tokens, copied to the host. */
typedef struct results {
    int64_t offset, len; /* the first token, and how many there are */
    int32_t *expiry;     /* [kv_heads, rows + len], of the whole sequence [kv_heads, len] */
    int32_t *carried;    /* [kv_heads, rows]: positions of the carried keys, -1: none */
    float *lse;          /* [q_heads, len] */
    uint16_t *out;       /* [len, q_heads, head_dim] bfloat16 */
} results;

/* The number of keys of the sequence so far on which a selection differs from the selection of the
 * whole. */
static int64_t count_differences(const results *found, const results *whole) {
    const int64_t begin = found->offset, end = begin + found->len, keys = rows + found->len;
    int32_t *const until = allocate((size_t)end, sizeof *until); // the expiry, as a position
    int64_t differences = 0;
    for (int64_t g = 0; g < kv_heads; g++) {
        for (int64_t j = 0; j < end; j++)
            until[j] = -1; // evicted before the first of the tokens
        for (int64_t key = 0; key < keys; key++) {
            const int64_t j = key < rows ? found->carried[g * rows + key] : begin + key - rows;
            if (j >= end)
                differences++;
            else if (j >= 0)
                until[j] = (int32_t)(found->expiry[g * keys + key] - rows + begin);
        }
        for (int64_t j = 0; j < end; j++) {
            const int64_t expiry = whole->expiry[g * whole->len + j];
            differences += until[j] != (expiry < begin ? -1 : expiry < end ? expiry : end);
        }
    }
    free(until);
    return differences;
}

/* The larger of `most` and |x - y|; NaN if either is. */
static double raise_to(double most, float x, float y) {
    const double off = fabs((double)x - (double)y);
    return isnan(most) || off <= most ? most : off;
}

static bool is_right(int r, const results *found, const results *whole) {
    // |v| <= 1. Each of the two may round weights to bfloat16, and rounds out: by 2^-9 at most.
    const double most_out = 4 * 0x1p-9;
    // Sums of lse are in float32. One key more or less changes it by about 1 / rows.
    const double most_lse = 1e-4;
    const int64_t begin = found->offset, len = found->len;
    const int64_t differences = count_differences(found, whole);
    double out = 0, lse = 0;
    for (int64_t n = 0; n < len * q_width; n++)
        out = raise_to(out, float_of(found->out[n]), float_of(whole->out[begin * q_width + n]));
    for (int64_t h = 0; h < q_heads; h++)
        for (int64_t i = 0; i < len; i++)
            lse = raise_to(lse, found->lse[h * len + i], whole->lse[h * whole->len + begin + i]);
    printf("rank %2d, tokens %7lld to %7lld: %lld keys differ, lse by %.1e, out by %.1e\n", r,
           (long long)begin, (long long)(begin + len - 1), (long long)differences, lse, out);
    return differences == 0 && lse <= most_lse && out <= most_out;
}

#endif /* CONTEXT_PARALLEL_CHECK_H */
