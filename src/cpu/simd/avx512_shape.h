/* The shape of a tile in the registers of AVX-512. See scalar.h for what each word means. */
#ifndef FDMA_CPU_SIMD_AVX512_SHAPE_H
#define FDMA_CPU_SIMD_AVX512_SHAPE_H

enum {
    tile_vectors = 4,
    half_vectors = 2,
    tile_blocks = 8,
    key_block = 120,
    score_keys = 6, /* 24 of 32 registers hold sums */
    key_step = score_keys,
    channel_step = 8,
    value_channels = 4,
    dot_keys = 4,
};

#endif
