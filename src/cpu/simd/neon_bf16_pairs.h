/* Products of bfloat16 on NEON with FEAT_BF16: a word is two channels, or two keys, the even one in
 * its low half. Products are exact; sums are float32, rounded to odd, and subnormal numbers count
 * as 0. BFDOT does this while FPCR.EBF is clear, which flush_subnormals() ensures. */
#pragma once

#include "cpu/simd/neon.h"

#include <string.h>

enum { terms = 2 };

/* The word is in the lowest lane, from which BFDOT multiplies every lane. A load that fills all
 * lanes would cost a vector operation. */
typedef bfloat16x4_t vf_word;

static inline vf_word vf_load_word(const float *p) {
    uint32_t bits;
    memcpy(&bits, p, sizeof bits);
    // gcc and clang both compile this form to one scalar load
    return vreinterpret_bf16_u32(vset_lane_u32(bits, vdup_n_u32(0), 0));
}

static inline vf vf_dot(vf_word word, vf lanes, vf sum) {
    return vbfdotq_lane_f32(sum, vreinterpretq_bf16_f32(lanes), word, 0);
}

static inline vf vf_dot_lanes(vf a, vf b, vf sum) {
    return vbfdotq_f32(sum, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
}

/* The words of channels d, d + 1, ... of two rows; `count` is the whole width, as in neon.h. */
static inline vf vf_load_pairs(const uint16_t *even, const uint16_t *odd, int64_t d,
                               int64_t count) {
    (void)count;
    const uint16x4_t none = vdup_n_u16(0);
    const uint16x8_t low = vcombine_u16(vld1_u16(even + d), none);
    const uint16x8_t high = vcombine_u16(vld1_u16(odd + d), none);
    return vreinterpretq_f32_u16(vzip1q_u16(low, high));
}

/* The words of 2 * vf_width channels of two rows: first those with even indices, then the
 * others. */
static inline void vf_load_even_odd_pairs(const uint16_t *first, const uint16_t *second, vf *even,
                                          vf *odd) {
    const uint16x8_t x = vld1q_u16(first), y = vld1q_u16(second);
    *even = vreinterpretq_f32_u16(vtrn1q_u16(x, y));
    *odd = vreinterpretq_f32_u16(vtrn2q_u16(x, y));
}

/* Two vectors of floats, rounded to the nearest even, as words. */
static inline vf vf_join(vf even, vf odd) {
    const uint16x8_t low = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(even));
    const uint16x8_t high = vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(odd));
    return vreinterpretq_f32_u16(vzip1q_u16(low, high));
}

/* vf_join() of numbers that are not negative; may round up where two are as near. */
static inline vf vf_join_weights(vf even, vf odd) { return vf_join(even, odd); }

/* Stores vf_width terms side by side: vf_width / 2 words of lanes. */
static inline void vf_store_terms(float *p, vf x) {
    const uint16x4_t halves = vget_low_u16(vreinterpretq_u16_bf16(vcvtq_low_bf16_f32(x)));
    memcpy(p, &halves, sizeof halves);
}

static inline vf vf_even(vf word) {
    return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(word), 16));
}

static inline vf vf_odd(vf word) {
    const uint32x4_t high = vdupq_n_u32(0xffff0000);
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(word), high));
}
