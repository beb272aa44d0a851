/* The shape of a tile on AVX-512, in vectors or on AMX. scalar.h explains its words. */
#pragma once

#if defined(FDMA_POINT_AMX)
enum {
    tile_vectors = 4,
    half_vectors = 0,
    tile_blocks = 12,
    key_block = 256,
    group_keys = 4,
    key_step = 32, /* AMX's own tiles are 16 rows of 16 words */
    channel_step = 32,
    value_channels = 16,
    dot_keys = 4,
};
#else
enum {
    tile_vectors = 4,
    half_vectors = 2,
    tile_blocks = 8,
    key_block = 120,
    group_keys = 6, /* 24 of 32 registers hold sums */
    key_step = group_keys,
    channel_step = 8,
    value_channels = 4,
    dot_keys = 4,
};
#endif
