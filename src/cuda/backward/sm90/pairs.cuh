/* attn_bias in the consumers of sm90's backward kernel, and its gradient, which is dS. A lane reads
 * the biases of its own pairs before it multiplies S, and writes the gradients of the same pairs.
 * These are two keys and every fourth pair of queries, in the order of accumulators: [8 queries]
 * [key][2 queries]. */
#pragma once

#include "cuda/backward/sm90/backward.cuh"
#include "cuda/device/softmax.cuh"

/* The elements of a lane's pairs in a tensor of pairs. An absent key has the elements of key 0. */
struct pair_elements {
    char *row[2];    // of the lane's keys: the element of its first query
    int64_t step;    // from a query to the next one, in bytes
    int32_t queries; // that exist, from the first one on
    bool is_there[2];

    __device__ char *at(int row_index, int query) const { return row[row_index] + query * step; }
};

/* key: of the lane's two rows; negative: absent. query: the lane's first one. */
template <typename element>
__device__ static pair_elements find_elements(const forward_plan &plan, const pair_view &pairs,
                                              int32_t b, int32_t h, int32_t query,
                                              const int32_t (&key)[2]) {
    const int64_t size = pairs.dtype == pair_view::float32 ? sizeof(float) : sizeof(element);
    char *const first = (char *)pairs.data + size * pairs.offset(b, h, query, 0);
    pair_elements elements;
    elements.step = size * pairs.query;
    elements.queries = plan.q_len - query;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        elements.is_there[i] = key[i] >= 0;
        elements.row[i] = first + size * max(key[i], 0) * pairs.key;
    }
    return elements;
}

/* The query and the row of the i-th pair of a lane, and the number of queries that its n pairs
 * span. */
__device__ static constexpr int query_of(int i) { return i / 4 * 8 + i % 2; }
__device__ static constexpr int row_of(int i) { return i / 2 % 2; }
__device__ static constexpr int span_of(int n) { return query_of(n - 1) + 1; }

/* attn_bias of a lane's pairs: as bits of its type, then in float32. Pairs of queries that do not
 * exist have 0, because NaN in a bias would reach a weight that lse makes 0. */
template <int n> struct pair_biases {
    uint32_t word[n];

    /* is_whole: all queries exist. */
    template <typename number, bool is_whole>
    __device__ void load_words(const pair_elements &from) {
#pragma unroll
        for (int i = 0; i < n; i++)
            word[i] = is_whole || query_of(i) < from.queries
                          ? *(const number *)from.at(row_of(i), query_of(i))
                          : 0;
    }

    template <typename number> __device__ void load_words(const pair_elements &from) {
        if (from.queries >= span_of(n))
            load_words<number, true>(from);
        else
            load_words<number, false>(from);
    }

    __device__ void load(const pair_view &bias, const pair_elements &from) {
        if (bias.dtype == pair_view::float32)
            load_words<uint32_t>(from);
        else
            load_words<uint16_t>(from);
    }

    /* Replaces the bits by float32 numbers, times a factor. */
    template <typename element> __device__ void scale(const pair_view &bias, float factor) {
        if (bias.dtype != pair_view::float32)
#pragma unroll
            for (int i = 0; i < n; i++)
                word[i] = __float_as_uint(unpack<element>(word[i]).x);
#pragma unroll
        for (int i = 0; i < n; i++)
            word[i] = __float_as_uint(__uint_as_float(word[i]) * factor);
    }

    __device__ float scaled(int i) const { return __uint_as_float(word[i]); }
};

struct no_pair_biases {
    static __device__ float scaled(int) { return 0; }
};

template <typename number, int n>
__device__ static void store_gradients(const pair_elements &to, const float (&ds)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++)
        if (to.is_there[row_of(i)] && query_of(i) < to.queries)
            *(number *)to.at(row_of(i), query_of(i)) = from_float<number>(ds[i]);
}

/* The sum over the lanes that have the same queries. */
__device__ static float sum_over_keys(float x) {
#pragma unroll
    for (int lanes = 4; lanes < 32; lanes *= 2)
        x += __shfl_xor_sync(~0u, x, lanes);
    return x;
}

/* Adds gradients where all queries share an element. ds of pairs that do not exist is 0. */
template <int n>
__device__ static void add_over_queries(const pair_view &pairs, const pair_elements &to,
                                        const float (&ds)[n]) {
    float sums[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < n; i++)
        sums[row_of(i)] += ds[i];
    sums[0] = quad_sum(sums[0]);
    sums[1] = quad_sum(sums[1]);
    if (pairs.key == 0) {
        const float sum = sum_over_keys(sums[0] + sums[1]);
        if (threadIdx.x % 32 == 0)
            atomicAdd((float *)to.row[0], sum);
    } else if (threadIdx.x % 4 == 0) {
#pragma unroll
        for (int i = 0; i < 2; i++)
            if (to.is_there[i])
                atomicAdd((float *)to.row[i], sums[i]);
    }
}

/* Adds gradients to float32 sums, which several pairs share. If these are all queries, or all keys,
 * a warp adds up its own ones first. */
template <int n>
__device__ static void add_gradients(const pair_view &pairs, const pair_elements &to,
                                     const float (&ds)[n]) {
    if (pairs.query == 0) {
        add_over_queries(pairs, to, ds);
        return;
    }
    if (pairs.key == 0) {
#pragma unroll
        for (int i = 0; i < n; i += i % 2 == 0 ? 1 : 3) {
            const float sum = sum_over_keys(ds[i] + ds[i + 2]);
            if (threadIdx.x % 32 < 4 && query_of(i) < to.queries)
                atomicAdd((float *)to.at(0, query_of(i)), sum);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < n; i++)
        if (to.is_there[row_of(i)] && query_of(i) < to.queries)
            atomicAdd((float *)to.at(row_of(i), query_of(i)), ds[i]);
}

/* Writes or adds the gradients of a lane's pairs. */
template <typename element, int n>
__device__ static void put_gradients(const backward_plan &plan, const pair_elements &to,
                                     const float (&ds)[n]) {
    if (plan.dpair_writing == pairs_added)
        add_gradients(plan.dpairs, to, ds);
    else if (plan.dpairs.dtype == pair_view::float32)
        store_gradients<float>(to, ds);
    else
        store_gradients<element>(to, ds);
}
