/* attn_bias in sm90's forward kernel. The producer puts the keys of a block into the order of
 * mask_index(), in which a consumer's thread has four successive ones of each 16, and says where
 * these are neighbours in memory. The thread reads the biases of its two rows itself, and adds them
 * to its products. */
#pragma once

#include "cuda/forward/sm90/forward.cuh"

/* attn_bias of a key block for a thread's two rows, of each 16 keys four: as they are in memory if
 * they are neighbours, otherwise one in each word. */
template <class config> struct pair_biases {
    uint32_t word[2][config::loads_pairs_ahead ? config::key_rows / 4 : 1];
};

struct no_pair_biases {};

/* attn_bias of a thread's two rows. */
struct pair_rows {
    const char *row[2];
};

/* attn_bias of a thread's rows `own_row` and own_row + 8 of a kv head. Past the last row it is the
 * last row's. */
template <typename element>
__device__ static pair_rows find_pair_rows(const forward_plan &plan, const divisor &group,
                                           const row_tile &tile, int32_t own_row) {
    const pair_view &bias = plan.pair_bias;
    const int64_t size = bias.dtype == pair_view::float32 ? sizeof(float) : sizeof(element);
    pair_rows pairs;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t row = min(own_row + 8 * i, tile.end_row - 1), query = group.divide(row);
        const int32_t h = tile.g * plan.group + group.remainder(row);
        pairs.row[i] = (const char *)bias.data + size * bias.offset(tile.b, h, query, 0);
    }
    return pairs;
}

/* Writes the key of a producer's lane, and whether each four of 16 keys are neighbours whose biases
 * can be read as one vector. */
template <class config>
__device__ static void write_pair_key(const forward_plan &plan, block_mask<config> *to,
                                      int32_t column, int32_t key) {
    const int32_t n = mask_index(column), lane = threadIdx.x % 32;
    const int32_t first = __shfl_sync(~0u, key, lane / 16 * 16 + lane % 8 / 2 * 2);
    const pair_view &bias = plan.pair_bias;
    const bool is_vector = bias.key == 1 && (uintptr_t)bias.data % 16 == 0 &&
                           (first | bias.query | bias.head | bias.batch) % 4 == 0;
    const uint32_t scattered = __ballot_sync(~0u, !is_vector || key != first + n % 4);
    to->key[n] = key;
    if (lane == 0)
        to->is_scattered[column / config::warp_keys] =
            (scattered & 0xffff) != 0 | (scattered >> 16 != 0) << 1;
}

/* True if each four of 16 keys of a block are neighbours. */
template <class config>
__device__ static bool reads_vectors(const block_mask<config> *from, int group) {
    const int keys = 16 * group, warp = keys / config::warp_keys;
    const uint32_t bits = *(const uint32_t *)from->is_scattered;
    return (bits >> (warp * 8 + keys % config::warp_keys / 16) & 1) == 0;
}

/* Starts to load attn_bias of this lane's four of 16 keys from a row: as one vector, two words of
 * 16-bit elements or four, or one by one. Absent keys get 0. */
template <typename number>
__device__ static void load_four(const char *row, const int4 &keys, int64_t stride, bool is_vector,
                                 uint32_t *four) {
    const int32_t each[4] = {keys.x, keys.y, keys.z, keys.w};
    if (is_vector && sizeof(number) == sizeof(uint16_t)) {
        const uint2 all = *(const uint2 *)(row + keys.x * sizeof(number));
        four[0] = all.x, four[1] = all.y;
    } else if (is_vector) {
        const uint4 all = *(const uint4 *)(row + keys.x * sizeof(number));
        four[0] = all.x, four[1] = all.y, four[2] = all.z, four[3] = all.w;
    } else {
#pragma unroll
        for (int n = 0; n < 4; n++) {
            const uint64_t at =
                mad_wide_u32((uint32_t)each[n], (uint32_t)(stride * sizeof(number)), (uint64_t)row);
            four[n] = each[n] < 0 ? 0 : *(const number *)at;
        }
    }
}

/* Starts to load attn_bias of 16 keys of a block for both rows. */
template <class config>
__device__ static void load_group(const forward_plan &plan, const pair_rows &rows,
                                  const block_mask<config> *from, int group, uint32_t *first,
                                  uint32_t *second) {
    const pair_view &bias = plan.pair_bias;
    const int4 keys = *(const int4 *)&from->key[16 * group + threadIdx.x % 4 * 4];
    const bool is_vector = reads_vectors(from, group);
    if (bias.dtype == pair_view::float32) {
        load_four<uint32_t>(rows.row[0], keys, bias.key, is_vector, first);
        load_four<uint32_t>(rows.row[1], keys, bias.key, is_vector, second);
    } else {
        load_four<uint16_t>(rows.row[0], keys, bias.key, is_vector, first);
        load_four<uint16_t>(rows.row[1], keys, bias.key, is_vector, second);
    }
}

/* Adds attn_bias, times a factor, to the products of 16 keys. first, second: from load_group(). */
template <typename element>
__device__ static void add_group(const pair_view &bias, float factor, bool is_vector,
                                 const uint32_t *first, const uint32_t *second, float *products) {
    const uint32_t *const words[2] = {first, second};
    if (bias.dtype == pair_view::float32) {
#pragma unroll
        for (int k = 0; k < 8; k++)
            products[k] =
                fmaf(__uint_as_float(words[k / 2 % 2][k / 4 * 2 + k % 2]), factor, products[k]);
        return;
    }
#pragma unroll
    for (int k = 0; k < 8; k += 2) {
        const uint32_t *const four = words[k / 2 % 2];
        const uint32_t pair =
            is_vector ? four[k / 4] : prmt(four[k / 4 * 2], four[k / 4 * 2 + 1], 0x5410);
        const float2 both = unpack<element>(pair);
        products[k] = fmaf(both.x, factor, products[k]);
        products[k + 1] = fmaf(both.y, factor, products[k + 1]);
    }
}
