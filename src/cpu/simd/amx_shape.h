/* The shape of a tile for AMX, whose own tiles are 16 rows of 16 words. See scalar.h for what each
 * word means. */
#ifndef FDMA_CPU_SIMD_AMX_SHAPE_H
#define FDMA_CPU_SIMD_AMX_SHAPE_H

enum {
    tile_vectors = 4,
    half_vectors = 0,
    tile_blocks = 12,
    key_block = 256,
    score_keys = 4,
    key_step = 32, /* 16 words */
    channel_step = 32,
    value_channels = 16,
    dot_keys = 4,
};

#endif
