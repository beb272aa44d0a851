/* Products of bfloat16 on AVX-512 BF16: a word is two channels, or two keys, the even one in its
 * low half. Products are exact, sums float32; subnormal numbers count as 0. */
#pragma once

#include "cpu/simd/avx512.h"

enum { terms = 2 };

typedef vf vf_word;

static inline vf_word vf_load_word(const float *p) { return vf_set(*p); }

static inline vf vf_dot(vf_word word, vf lanes, vf sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)word, (__m512bh)lanes);
}

static inline vf vf_dot_lanes(vf a, vf b, vf sum) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
}

/* The words of channels d, d + 1, ... of two rows. */
static inline vf vf_load_pairs(const uint16_t *even, const uint16_t *odd, int64_t d,
                               int64_t count) {
    const __mmask16 first = vf_first(count);
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first, even + d));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first, odd + d));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

/* The words of 2 * vf_width channels of two rows: first those with even indices, then the
 * others. */
static inline void vf_load_even_odd_pairs(const uint16_t *first, const uint16_t *second, vf *even,
                                          vf *odd) {
    const __m512i x = _mm512_loadu_si512(first), y = _mm512_loadu_si512(second);
    *even = _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaa, x, _mm512_slli_epi32(y, 16)));
    *odd = _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(x, 16), y));
}

/* Two vectors of floats, rounded to the nearest even, as words. */
static inline vf vf_join(vf even, vf odd) {
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves));
}

/* vf_join() of numbers that are not negative. Rounds up where two are as near: Intel's conversion
 * takes four times as long as these integer operations. */
static inline vf vf_join_weights(vf even, vf odd) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    const __m512i low = _mm512_add_epi32(_mm512_castps_si512(even), half);
    const __m512i high = _mm512_add_epi32(_mm512_castps_si512(odd), half);
    return _mm512_castsi512_ps(
        _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high));
}

/* Stores vf_width terms side by side: vf_width / 2 words of lanes. */
static inline void vf_store_terms(float *p, vf x) {
    _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(x));
}

static inline vf vf_even(vf word) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(word), 16));
}

static inline vf vf_odd(vf word) {
    const __m512i high = _mm512_set1_epi32((int32_t)0xffff0000);
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(word), high));
}
