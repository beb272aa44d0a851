/* The vocabulary on NEON, as every AArch64 CPU has it. scalar.h explains its words. */
#pragma once

#include "cpu/simd/modes.h"

#include <arm_neon.h>
#include <stdbool.h>
#include <stdint.h>

typedef float32x4_t vf;

enum {
    vf_width = 4,
    tile_vectors = 4,
    half_vectors = 2,
    tile_blocks = 12, /* q and out of 128 channels take 192 KB; L2 caches have 512 KB or more */
    key_block = 120,
    group_keys = 6, /* 24 of 32 registers hold sums */
    key_step = group_keys,
    channel_step = 8,
    value_channels = 4,
    dot_keys = 4,
};

static inline uint32_t flush_subnormals(void) { return set_modes(default_modes | flush_to_zero); }

static inline vf vf_set(float x) { return vdupq_n_f32(x); }

static inline vf vf_load(const float *p) { return vld1q_f32(p); }

static inline void vf_store(float *p, vf x) { vst1q_f32(p, x); }

/* Rows are multiples of 8 channels, so that `count` is always the whole width. */
static inline vf vf_load_first_f16(const uint16_t *p, int64_t count) {
    (void)count;
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

static inline void vf_store_first_f16(uint16_t *p, vf x, int64_t count) {
    (void)count;
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(x)));
}

static inline vf vf_load_first_bf16(const uint16_t *p, int64_t count) {
    (void)count;
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}

static inline void vf_store_first_bf16(uint16_t *p, vf x, int64_t count) {
    (void)count;
    const uint32x4_t bits = vreinterpretq_u32_f32(x);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
    vst1_u16(p, vshrn_n_u32(quiet, 16));
}

static inline void vf_load_even_odd_bf16(const uint16_t *p, vf *even, vf *odd) {
    const uint32x4_t bits = vreinterpretq_u32_u16(vld1q_u16(p));
    *even = vreinterpretq_f32_u32(vshlq_n_u32(bits, 16));
    *odd = vreinterpretq_f32_u32(vandq_u32(bits, vdupq_n_u32(0xffff0000)));
}

static inline vf vf_fma(vf a, vf b, vf c) { return vfmaq_f32(c, a, b); }

static inline vf vf_pick_greater(vf a, vf b, vf x, vf y) {
    return vbslq_f32(vcgtq_f32(a, b), x, y);
}

static inline vf vf_rounding_error(vf a, vf b, vf product) {
    return vfmaq_f32(vnegq_f32(product), a, b);
}

/* FMAX would give NaN where only a is NaN. */
static inline vf vf_max(vf a, vf b) { return vf_pick_greater(a, b, a, b); }

static inline vf vf_abs(vf x) { return vabsq_f32(x); }

static inline float vf_sum(vf x) { return vaddvq_f32(x); }

static inline vf vf_sum_each(const vf x[vf_width]) {
    return vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3]));
}

static inline bool vf_any_greater(vf a, vf b) { return vmaxvq_u32(vcgtq_f32(a, b)) != 0; }

static inline vf vf_copy_sign(vf size, vf sign) {
    return vbslq_f32(vdupq_n_u32(0x80000000), sign, size);
}

static inline vf vf_keep(vf x, int32_t first, int32_t end) {
    static const int32_t lanes[vf_width] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(lanes);
    const uint32x4_t begun = vcgeq_s32(lane, vdupq_n_s32(first));
    const uint32x4_t kept = vandq_u32(begun, vcltq_s32(lane, vdupq_n_s32(end)));
    return vbslq_f32(kept, x, vdupq_n_f32(-__builtin_inff()));
}

static inline vf vf_keep_bits(vf x, uint32_t bits) {
    static const uint32_t lane_bits[vf_width] = {1, 2, 4, 8};
    const uint32x4_t kept = vtstq_u32(vdupq_n_u32(bits), vld1q_u32(lane_bits));
    return vbslq_f32(kept, x, vdupq_n_f32(-__builtin_inff()));
}

/* Byte n becomes bit n % 8 of itself; sums of neighbours then join 8 of them. */
static inline uint64_t vf_nonzero_bytes(const uint8_t *p) {
    static const uint8_t weights[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    const uint8x16_t weight = vld1q_u8(weights);
    uint8x16_t bits[4];
    for (int n = 0; n < 4; n++) {
        const uint8x16_t bytes = vld1q_u8(p + 16 * n);
        bits[n] = vandq_u8(vtstq_u8(bytes, bytes), weight);
    }
    const uint8x16_t pairs = vpaddq_u8(vpaddq_u8(bits[0], bits[1]), vpaddq_u8(bits[2], bits[3]));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(pairs, pairs)), 0);
}

/* The halves of a vector as one element each. */
static inline float64x2_t vf_halves(vf x) { return vreinterpretq_f64_f32(x); }

static inline void vf_transpose(vf x[vf_width]) {
    const vf even01 = vtrn1q_f32(x[0], x[1]), odd01 = vtrn2q_f32(x[0], x[1]);
    const vf even23 = vtrn1q_f32(x[2], x[3]), odd23 = vtrn2q_f32(x[2], x[3]);
    x[0] = vreinterpretq_f32_f64(vtrn1q_f64(vf_halves(even01), vf_halves(even23)));
    x[1] = vreinterpretq_f32_f64(vtrn1q_f64(vf_halves(odd01), vf_halves(odd23)));
    x[2] = vreinterpretq_f32_f64(vtrn2q_f64(vf_halves(even01), vf_halves(even23)));
    x[3] = vreinterpretq_f32_f64(vtrn2q_f64(vf_halves(odd01), vf_halves(odd23)));
}

/* In vf_scale2 2^-127 gives 0 and 2^128 infinity, so exponents beyond are not needed. NaN stays. */
static inline vf vf_clamp_exponent(vf x) {
    return vminq_f32(vmaxq_f32(x, vdupq_n_f32(-127)), vdupq_n_f32(128));
}

static inline vf vf_fraction(vf x) {
    const vf clamped = vf_clamp_exponent(x);
    return vsubq_f32(clamped, vrndmq_f32(clamped));
}

static inline vf vf_scale2(vf fraction, vf x) {
    const int32x4_t whole = vcvtmq_s32_f32(vf_clamp_exponent(x)); // rounds down
    const int32x4_t power = vshlq_n_s32(vaddq_s32(whole, vdupq_n_s32(127)), 23);
    return vmulq_f32(fraction, vreinterpretq_f32_s32(power));
}
