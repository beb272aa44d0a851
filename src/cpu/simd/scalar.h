/* The vocabulary in plain C, one lane wide. It explains the words, and serves the kernels on any
 * CPU. The words of arithmetic are in simd.h. */
#pragma once

#include "cpu/simd/modes.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* A vector of vf_width floats. */
typedef float vf;

enum {
    vf_width = 1,
    tile_vectors = 4,      /* vectors of query lanes in registers: a block of lanes */
    half_vectors = 2,      /* vectors before this one may be left out; 0: never */
    tile_blocks = 4,       /* blocks of lanes in a tile, at most */
    key_block = 120,       /* keys whose weights are held between the two products */
    group_keys = 2,        /* keys x lanes sums of the first product, and keys weighed at a time */
    key_step = group_keys, /* keys that the products take at a time */
    channel_step = 8,      /* channels that the products take at a time */
    value_channels = 2,    /* channels x lanes sums of the second product */
    dot_keys = 2,          /* keys x dot_heads sums of the scores */
};

/* Like keep_subnormals(), but float32 operations treat subnormal numbers as 0: arithmetic on them
 * takes a hundred times as long on some CPUs. Here they are kept, because the conversions from and
 * to float16 below compute with them. */
static inline uint32_t flush_subnormals(void) { return keep_subnormals(); }

static inline vf vf_set(float x) { return x; }

static inline vf vf_load(const float *p) { return *p; }

static inline void vf_store(float *p, vf x) { *p = x; }

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Loads and stores of the first `count` lanes from and to float16, as vf_load_first() does it for
 * float32: round to nearest even, NaN stays NaN. */
static inline vf vf_load_first_f16(const uint16_t *p, int64_t count) {
    (void)count;
    const uint32_t sign = (uint32_t)(*p & 0x8000) << 16;
    const uint32_t size = (uint32_t)(*p & 0x7fff) << 13;
    // an exponent of 31 means inf or NaN; multiplying by 2^112 moves the others' bias to 127
    if (size >= 31u << 23)
        return float_of(sign | size | 0x7f800000);
    return float_of(sign | bits_of(float_of(size) * 0x1p112f));
}

static inline void vf_store_first_f16(uint16_t *p, vf x, int64_t count) {
    (void)count;
    const uint32_t sign = bits_of(x) >> 16 & 0x8000;
    const uint32_t size = bits_of(x) & 0x7fffffff;
    uint32_t bits;
    if (size > 0x7f800000)
        bits = 0x7e00;
    else if (size >= bits_of(65520.0f))
        bits = 0x7c00;
    else if (size < bits_of(0x1p-14f))
        bits = bits_of(float_of(size) + 0.5f) - bits_of(0.5f); // the addition rounds to 2^-24
    else
        bits = (size + 0xfff + (size >> 13 & 1) - (112u << 23)) >> 13;
    *p = (uint16_t)(sign | bits);
}

/* The same from and to bfloat16. */
static inline vf vf_load_first_bf16(const uint16_t *p, int64_t count) {
    (void)count;
    return float_of((uint32_t)*p << 16);
}

static inline void vf_store_first_bf16(uint16_t *p, vf x, int64_t count) {
    (void)count;
    const uint32_t bits = bits_of(x);
    *p = (uint16_t)(x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Loads 2 * vf_width channels: those with even indices into one vector, the others into another. */
static inline void vf_load_even_odd_bf16(const uint16_t *p, vf *even, vf *odd) {
    *even = float_of((uint32_t)p[0] << 16);
    *odd = float_of((uint32_t)p[1] << 16);
}

/* a * b + c; every vocabulary but this one rounds once. */
static inline vf vf_fma(vf a, vf b, vf c) { return a * b + c; }

/* a * b - product, rounded once: the rounding error of `product`. */
static inline vf vf_rounding_error(vf a, vf b, vf product) {
    return (float)((double)a * (double)b - (double)product);
}

/* The greater; b if either is NaN. */
static inline vf vf_max(vf a, vf b) { return a > b ? a : b; }

static inline vf vf_abs(vf x) { return fabsf(x); }

static inline float vf_sum(vf x) { return x; }

/* The sum of all lanes of x[n] in lane n. */
static inline vf vf_sum_each(const vf x[vf_width]) { return x[0]; }

/* True if a > b in any lane. */
static inline bool vf_any_greater(vf a, vf b) { return a > b; }

/* a > b ? x : y */
static inline vf vf_pick_greater(vf a, vf b, vf x, vf y) { return a > b ? x : y; }

/* |size| with the sign of `sign` */
static inline vf vf_copy_sign(vf size, vf sign) { return copysignf(size, sign); }

/* x in the lanes from `first` up to `end`, -inf in the others; the range may lie outside. */
static inline vf vf_keep(vf x, int32_t first, int32_t end) {
    return first <= 0 && end > 0 ? x : -INFINITY;
}

/* x in the lanes whose bit is set, lane 0 the lowest, -inf in the others */
static inline vf vf_keep_bits(vf x, uint32_t bits) { return bits & 1 ? x : -INFINITY; }

/* Bit n is set if byte n of 64 is not 0. */
static inline uint64_t vf_nonzero_bytes(const uint8_t *p) {
    uint64_t bits = 0;
    for (int n = 0; n < 64; n++)
        bits |= (uint64_t)(p[n] != 0) << n;
    return bits;
}

static inline void vf_transpose(vf x[vf_width]) { (void)x; }

/* 2^x = vf_scale2(p(vf_fraction(x)), x) with p(f) = 2^f on [0, 1); NaN gives NaN. Results below
 * 2^-126 may be 0. */
static inline vf vf_clamp_exponent(vf x) {
    const vf above = vf_max(-127, x);
    return above > 128 ? 128 : above;
}

static inline vf vf_fraction(vf x) {
    const vf clamped = vf_clamp_exponent(x);
    return clamped - floorf(clamped);
}

static inline vf vf_scale2(vf fraction, vf x) {
    const vf clamped = vf_clamp_exponent(x);
    return clamped == clamped
               ? fraction * float_of((uint32_t)((int32_t)floorf(clamped) + 127) << 23)
               : clamped;
}
