/* words.h - every word of the vocabulary included before, as a function on arrays. */
#pragma once

#include "vocabulary.h"

static void word_set(float *to, float x) { vf_store(to, vf_set(x)); }

static void word_copy(float *to, const float *from) { vf_store(to, vf_load(from)); }

static void word_copy_first(float *to, const float *from, int64_t count) {
    vf_store_first(to, vf_load(from), count);
}

static void word_load_first(float *to, const float *from, int64_t count) {
    vf_store(to, vf_load_first(from, count));
}

static void word_load_f16(float *to, const uint16_t *from, int64_t count) {
    vf_store(to, vf_load_first_f16(from, count));
}

static void word_store_f16(uint16_t *to, const float *from, int64_t count) {
    vf_store_first_f16(to, vf_load(from), count);
}

static void word_load_bf16(float *to, const uint16_t *from, int64_t count) {
    vf_store(to, vf_load_first_bf16(from, count));
}

static void word_store_bf16(uint16_t *to, const float *from, int64_t count) {
    vf_store_first_bf16(to, vf_load(from), count);
}

static void word_add(float *to, const float *a, const float *b) {
    vf_store(to, vf_add(vf_load(a), vf_load(b)));
}

static void word_sub(float *to, const float *a, const float *b) {
    vf_store(to, vf_sub(vf_load(a), vf_load(b)));
}

static void word_mul(float *to, const float *a, const float *b) {
    vf_store(to, vf_mul(vf_load(a), vf_load(b)));
}

static void word_div(float *to, const float *a, const float *b) {
    vf_store(to, vf_div(vf_load(a), vf_load(b)));
}

static void word_max(float *to, const float *a, const float *b) {
    vf_store(to, vf_max(vf_load(a), vf_load(b)));
}

static void word_copy_sign(float *to, const float *size, const float *sign) {
    vf_store(to, vf_copy_sign(vf_load(size), vf_load(sign)));
}

static void word_fma(float *to, const float *a, const float *b, const float *c) {
    vf_store(to, vf_fma(vf_load(a), vf_load(b), vf_load(c)));
}

static void word_rounding_error(float *to, const float *a, const float *b, const float *product) {
    vf_store(to, vf_rounding_error(vf_load(a), vf_load(b), vf_load(product)));
}

static void word_abs(float *to, const float *x) { vf_store(to, vf_abs(vf_load(x))); }

static float word_sum(const float *x) { return vf_sum(vf_load(x)); }

static void word_sum_each(float *to, const float *x) {
    vf rows[vf_width];
    for (int i = 0; i < vf_width; i++)
        rows[i] = vf_load(x + i * vf_width);
    vf_store(to, vf_sum_each(rows));
}

static void word_load_even_odd_bf16(float *even, float *odd, const uint16_t *from) {
    vf x[2];
    vf_load_even_odd_bf16(from, &x[0], &x[1]);
    vf_store(even, x[0]);
    vf_store(odd, x[1]);
}

static bool word_any_greater(const float *a, const float *b) {
    return vf_any_greater(vf_load(a), vf_load(b));
}

static void word_pick_greater(float *to, const float *a, const float *b, const float *x,
                              const float *y) {
    vf_store(to, vf_pick_greater(vf_load(a), vf_load(b), vf_load(x), vf_load(y)));
}

static void word_keep(float *to, const float *x, int32_t first, int32_t end) {
    vf_store(to, vf_keep(vf_load(x), first, end));
}

static void word_keep_bits(float *to, const float *x, uint32_t bits) {
    vf_store(to, vf_keep_bits(vf_load(x), bits));
}

static uint64_t word_nonzero_bytes(const uint8_t *p) { return vf_nonzero_bytes(p); }

static void word_transpose(float *x) {
    vf rows[vf_width];
    for (int i = 0; i < vf_width; i++)
        rows[i] = vf_load(x + i * vf_width);
    vf_transpose(rows);
    for (int i = 0; i < vf_width; i++)
        vf_store(x + i * vf_width, rows[i]);
}

static void word_fraction(float *to, const float *x) { vf_store(to, vf_fraction(vf_load(x))); }

static void word_scale2(float *to, const float *fraction, const float *x) {
    vf_store(to, vf_scale2(vf_load(fraction), vf_load(x)));
}

static void word_exp2(float *to, const float *x) { vf_store(to, exp2_of(vf_load(x))); }

static void word_exp(float *to, const float *x) { vf_store(to, exp_of(vf_load(x))); }

static void word_log1p(float *to, const float *x) { vf_store(to, log1p_of(vf_load(x))); }

static void word_tanh(float *to, const float *x) { vf_store(to, tanh_of(vf_load(x))); }

#define word_flush_subnormals flush_subnormals
#define word_keep_subnormals keep_subnormals
#define word_restore_modes restore_modes
#define VOCABULARY_ENTRY(type, name, parameters) .name = word_##name,
#define VOCABULARY {.width = vf_width, VOCABULARY_WORDS(VOCABULARY_ENTRY)}
