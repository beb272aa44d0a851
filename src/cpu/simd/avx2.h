/* The vocabulary on AVX2, FMA and F16C. scalar.h explains its words. */
#pragma once

#include "cpu/simd/modes.h"

#include <immintrin.h>
#include <stdbool.h>
#include <stdint.h>

typedef __m256 vf;

enum {
    vf_width = 8,
    tile_vectors = 3,
    half_vectors = 1,
    tile_blocks = 16,
    key_block = 120,
    group_keys = 4, /* 12 of 16 registers hold sums */
    key_step = group_keys,
    channel_step = 8,
    value_channels = 4,
    dot_keys = 2,
};

static inline uint32_t flush_subnormals(void) { return set_modes(default_modes | flush_to_zero); }

static inline vf vf_set(float x) { return _mm256_set1_ps(x); }

static inline vf vf_load(const float *p) { return _mm256_loadu_ps(p); }

static inline void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }

/* Rows are multiples of 8 channels, so that `count` is always the whole width. */
static inline vf vf_load_first_f16(const uint16_t *p, int64_t count) {
    (void)count;
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

static inline void vf_store_first_f16(uint16_t *p, vf x, int64_t count) {
    (void)count;
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

static inline vf vf_load_first_bf16(const uint16_t *p, int64_t count) {
    (void)count;
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}

static inline void vf_store_first_bf16(uint16_t *p, vf x, int64_t count) {
    (void)count;
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, half), 16);
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), is_nan);
    const __m256i packed = _mm256_packus_epi32(quiet, quiet); // within 128-bit halves
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}

static inline void vf_load_even_odd_bf16(const uint16_t *p, vf *even, vf *odd) {
    const __m256i bits = _mm256_loadu_si256((const __m256i *)p);
    const __m256i high = _mm256_set1_epi32((int32_t)0xffff0000);
    *even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
    *odd = _mm256_castsi256_ps(_mm256_and_si256(bits, high));
}

static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }

static inline vf vf_rounding_error(vf a, vf b, vf product) {
    return _mm256_fmsub_ps(a, b, product);
}

static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }

static inline vf vf_abs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

static inline float vf_sum(vf x) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

static inline vf vf_sum_each(const vf x[vf_width]) {
    const vf low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const vf high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
}

static inline bool vf_any_greater(vf a, vf b) {
    return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)) != 0;
}

static inline vf vf_pick_greater(vf a, vf b, vf x, vf y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_GT_OQ));
}

static inline vf vf_copy_sign(vf size, vf sign) {
    return _mm256_or_ps(vf_abs(size), _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
}

static inline vf vf_keep(vf x, int32_t first, int32_t end) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i early = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
    const __m256i open = _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane);
    const __m256 kept = _mm256_castsi256_ps(_mm256_andnot_si256(early, open));
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, kept);
}

static inline vf vf_keep_bits(vf x, uint32_t bits) {
    const __m256i lane_bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32((int32_t)bits), lane_bit);
    const __m256 kept = _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane_bit));
    return _mm256_blendv_ps(_mm256_set1_ps(-__builtin_inff()), x, kept);
}

static inline uint64_t vf_nonzero_bytes(const uint8_t *p) {
    const __m256i low = _mm256_loadu_si256((const __m256i *)p);
    const __m256i high = _mm256_loadu_si256((const __m256i *)(p + 32));
    const __m256i zero = _mm256_setzero_si256();
    const uint32_t low_zeros = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(low, zero));
    const uint32_t high_zeros = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(high, zero));
    return ~((uint64_t)high_zeros << 32 | low_zeros);
}

static inline void vf_transpose(vf x[vf_width]) {
    vf y[vf_width];
    for (int i = 0; i < 8; i += 4) {
        const vf low01 = _mm256_unpacklo_ps(x[i], x[i + 1]),
                 high01 = _mm256_unpackhi_ps(x[i], x[i + 1]);
        const vf low23 = _mm256_unpacklo_ps(x[i + 2], x[i + 3]),
                 high23 = _mm256_unpackhi_ps(x[i + 2], x[i + 3]);
        y[i] = _mm256_shuffle_ps(low01, low23, 0x44);
        y[i + 1] = _mm256_shuffle_ps(low01, low23, 0xee);
        y[i + 2] = _mm256_shuffle_ps(high01, high23, 0x44);
        y[i + 3] = _mm256_shuffle_ps(high01, high23, 0xee);
    }
    for (int i = 0; i < 4; i++) {
        x[i] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x31);
    }
}

/* In vf_scale2 2^-127 gives 0 and 2^128 infinity, so exponents beyond are not needed. NaN stays,
 * because it is the second operand. */
static inline vf vf_clamp_exponent(vf x) {
    return _mm256_min_ps(_mm256_set1_ps(128.0f), _mm256_max_ps(_mm256_set1_ps(-127.0f), x));
}

static inline vf vf_fraction(vf x) {
    const vf clamped = vf_clamp_exponent(x);
    return _mm256_sub_ps(clamped, _mm256_floor_ps(clamped));
}

static inline vf vf_scale2(vf fraction, vf x) {
    const __m256i whole = _mm256_cvttps_epi32(_mm256_floor_ps(vf_clamp_exponent(x)));
    const __m256i power = _mm256_slli_epi32(_mm256_add_epi32(whole, _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(fraction, _mm256_castsi256_ps(power));
}
