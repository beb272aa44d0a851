/* The vocabulary on AVX-512 (F, BW, DQ, VL) and F16C. scalar.h explains its words. */
#pragma once

#include "cpu/simd/modes.h"

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

typedef __m512 vf;

enum { vf_width = 16 };

static inline uint32_t flush_subnormals(void) { return set_modes(default_modes | flush_to_zero); }

static inline vf vf_set(float x) { return _mm512_set1_ps(x); }

static inline vf vf_load(const float *p) { return _mm512_loadu_ps(p); }

static inline void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }

static inline __mmask16 vf_first(int64_t count) {
    return (__mmask16)_bzhi_u32(0xffff, (uint32_t)count);
}

static inline vf vf_load_first(const float *p, int64_t count) {
    return _mm512_maskz_loadu_ps(vf_first(count), p);
}

static inline void vf_store_first(float *p, vf x, int64_t count) {
    _mm512_mask_storeu_ps(p, vf_first(count), x);
}

static inline vf vf_load_first_f16(const uint16_t *p, int64_t count) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(vf_first(count), p));
}

static inline void vf_store_first_f16(uint16_t *p, vf x, int64_t count) {
    const __mmask16 first = vf_first(count);
    const __m256i halves = _mm512_maskz_cvtps_ph(first, x, _MM_FROUND_TO_NEAREST_INT);
    _mm256_mask_storeu_epi16(p, first, halves);
}

static inline vf vf_load_first_bf16(const uint16_t *p, int64_t count) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(vf_first(count), p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline void vf_store_first_bf16(uint16_t *p, vf x, int64_t count) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc0));
    _mm256_mask_storeu_epi16(p, vf_first(count), _mm512_cvtepi32_epi16(quiet));
}

static inline void vf_load_even_odd_bf16(const uint16_t *p, vf *even, vf *odd) {
    const __m512i bits = _mm512_loadu_si512(p);
    const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000);
    *even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    *odd = _mm512_castsi512_ps(_mm512_and_si512(bits, high));
}

static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }

static inline vf vf_rounding_error(vf a, vf b, vf product) {
    return _mm512_fmsub_ps(a, b, product);
}

static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }

static inline vf vf_abs(vf x) { return _mm512_abs_ps(x); }

static inline float vf_sum(vf x) { return _mm512_reduce_add_ps(x); }

/* Adds the halves of a and of b: a's sums are the lower half of the result, b's the upper one. */
static inline vf vf_fold_halves(vf a, vf b) {
    return _mm512_mask_blend_ps(0xff00, a, b) + _mm512_shuffle_f32x4(a, b, 0x4e);
}

/* The same within each 128-bit quarter. */
static inline vf vf_fold_quarters(vf a, vf b) {
    return _mm512_mask_blend_ps(0xcccc, a, b) + _mm512_shuffle_ps(a, b, 0x4e);
}

/* A blend and a shuffle take less time than the two shuffles of a transposition. */
static inline vf vf_sum_each(const vf x[vf_width]) {
    vf y[4];
    for (int i = 0; i < 4; i++) { // quarter n of y[i] adds up to the sum of x[4 n + i]
        const vf low = vf_fold_halves(x[i], x[i + 4]), high = vf_fold_halves(x[i + 8], x[i + 12]);
        y[i] = _mm512_shuffle_f32x4(low, high, 0x88) + _mm512_shuffle_f32x4(low, high, 0xdd);
    }
    const vf low = vf_fold_quarters(y[0], y[1]), high = vf_fold_quarters(y[2], y[3]);
    return _mm512_shuffle_ps(low, high, 0x88) + _mm512_shuffle_ps(low, high, 0xdd);
}

static inline bool vf_any_greater(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0; }

static inline vf vf_pick_greater(vf a, vf b, vf x, vf y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ), y, x);
}

static inline vf vf_copy_sign(vf size, vf sign) {
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(sign), _mm512_castps_si512(size), 0xca));
}

static inline vf vf_keep(vf x, int32_t first, int32_t end) {
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __mmask16 begun = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first));
    const __mmask16 kept = _mm512_mask_cmplt_epi32_mask(begun, lane, _mm512_set1_epi32(end));
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), kept, x);
}

static inline vf vf_keep_bits(vf x, uint32_t bits) {
    return _mm512_mask_mov_ps(_mm512_set1_ps(-__builtin_inff()), (__mmask16)bits, x);
}

static inline uint64_t vf_nonzero_bytes(const uint8_t *p) {
    const __m512i bytes = _mm512_loadu_si512(p);
    return _mm512_test_epi8_mask(bytes, bytes);
}

/* Three rounds of shuffles swap the bits of (row, column): pairs, quads, then 128-bit quarters. */
static inline void vf_transpose(vf x[vf_width]) {
    vf y[vf_width];
    for (int i = 0; i < 16; i += 4) {
        const vf low01 = _mm512_unpacklo_ps(x[i], x[i + 1]),
                 high01 = _mm512_unpackhi_ps(x[i], x[i + 1]);
        const vf low23 = _mm512_unpacklo_ps(x[i + 2], x[i + 3]),
                 high23 = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
        y[i] = _mm512_shuffle_ps(low01, low23, 0x44);
        y[i + 1] = _mm512_shuffle_ps(low01, low23, 0xee);
        y[i + 2] = _mm512_shuffle_ps(high01, high23, 0x44);
        y[i + 3] = _mm512_shuffle_ps(high01, high23, 0xee);
    }
    for (int i = 0; i < 4; i++) {
        const vf even01 = _mm512_shuffle_f32x4(y[i], y[i + 4], 0x88);
        const vf odd01 = _mm512_shuffle_f32x4(y[i], y[i + 4], 0xdd);
        const vf even23 = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0x88);
        const vf odd23 = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0xdd);
        x[i] = _mm512_shuffle_f32x4(even01, even23, 0x88);
        x[i + 8] = _mm512_shuffle_f32x4(even01, even23, 0xdd);
        x[i + 4] = _mm512_shuffle_f32x4(odd01, odd23, 0x88);
        x[i + 12] = _mm512_shuffle_f32x4(odd01, odd23, 0xdd);
    }
}

static inline vf vf_fraction(vf x) {
    return _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); // 0 where x is infinite
}

static inline vf vf_scale2(vf fraction, vf x) { return _mm512_scalef_ps(fraction, x); }
