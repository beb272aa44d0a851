/* The consumers of sm90's forward kernel: warpgroups of 64 rows each that turn blocks of keys into
 * out and lse. While one weighs its scores the other has the tensor cores.
 * Source: FlashAttention-3, arXiv:2407.08608, sections 3.1 and 3.2. */
#ifndef FDMA_CUDA_FORWARD_SM90_CONSUMER_CUH
#define FDMA_CUDA_FORWARD_SM90_CONSUMER_CUH

#include "cuda/device/quad.cuh"
#include "cuda/forward/sm90/softmax.cuh"
#include "cuda/forward/sm90/tile.cuh"

/* One of the consumers, between blocks. */
template <class config> struct consumer {
    using element = typename config::element;
    static constexpr int scores_held = config::key_rows / 2, out_held = config::channels / 2;

    using block_weights = uint32_t[config::key_rows / step_k][4]; // pairs, as wgmma takes them

    forward_memory<config> *memory;
    tile_order order;
    float softcap_scale; // of scores inside tanh
    ring_place<config::buffers> kv;
    ring_place<config::notes> notes;
    ring_place<1> q;
    int32_t index;       // of the consumer
    int32_t position[2]; // of this thread's rows, since the tile's first
    row_softmax softmax;
    float out[out_held];
    block_weights weights;

    /* Until a buffer holds its rows; buffers that come before it then do as well. */
    __device__ inline void wait_rows(void) {
        wait(&memory->kv_full[kv.index], kv.parity);
        fence_proxy_async(); // cp.async writes as threads do, wgmma reads as TMA does
    }

    /* A warp at a time: barriers count warps. */
    __device__ inline void release(uint64_t *barrier) {
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive(barrier);
    }

    /* Scores of the keys in a buffer, begun. Without softcap they are logits / scale: the products
     * and, as 16 channels more, the bias. */
    template <int held>
    __device__ inline void begin_scores(const forward_plan &plan, float (&scores)[held], int keys) {
        const uint32_t first_row = index * config::warpgroup_rows;
        const uint32_t ones[4] = {ones_of_bias(), ones_of_bias(), 0, 0};
        wait(&memory->notes_full[notes.index], notes.parity);
        wgmma_fence();
        begin_abt<element, config::channels, config::rows, config::key_rows>(
            scores, opaque(shared_address(memory->q) + first_row * line_bytes),
            shared_address(memory->kv[keys]));
        if (!config::has_softcap && plan.records != NULL)
            multiply<__nv_bfloat16>(
                scores, ones,
                describe_octets(shared_address(memory->notes[notes.index].octet),
                                sizeof(bias_octet)));
        wgmma_commit_group();
    }

    /* This lane's two of the 16 channels of a row that is 1 in those of a bias's parts. */
    __device__ static inline uint32_t ones_of_bias(void) {
        const int channel = threadIdx.x % 4 * 2;
        return element_type<__nv_bfloat16>::pack(channel < bias_parts ? 1 : 0,
                                                 channel + 1 < bias_parts ? 1 : 0);
    }

    /* out += weights * the values in a buffer, begun. */
    template <int keys = config::key_rows> __device__ inline void begin_out(int values) {
        wgmma_fence();
        begin_ab<element, config::key_rows, keys / step_k>(out, weights,
                                                           shared_address(memory->kv[values]));
        wgmma_commit_group();
    }

    /* -inf where a row does not keep a key, in the 16 keys of which some row does not keep all. */
    template <int held>
    __device__ inline void mask(const block_notes<config> *note, float (&scores)[held]) {
        const uint32_t cuts = *(const uint32_t *)note->cuts;
        if (cuts == 0)
            return;
#pragma unroll
        for (int i = 0; i < held; i += 8) {
            const int keys = 2 * i, group = keys / config::group_keys;
            if ((cuts >> (group * 8 + keys % config::group_keys / 16) & 1) == 0)
                continue;
            const int4 four = *(const int4 *)&note->spans[2 * i + threadIdx.x % 4 * 4];
            const int32_t spans[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const int32_t p = position[k / 2 % 2], span = spans[k / 4 * 2 + k % 2];
                const bool kept = (int16_t)span <= p && p < span >> 16;
                scores[i + k] = kept ? scores[i + k] : -INFINITY;
            }
        }
    }

    /* Scores to logits, as exponents of 2, where there is a softcap. */
    template <int held>
    __device__ inline void soften(const forward_plan &plan, const block_notes<config> *note,
                                  float (&scores)[held]) {
        const float cap = plan.softcap * log2_e;
#pragma unroll
        for (int i = 0; i < held; i += 8) {
            const float4 b = *(const float4 *)&note->bias[2 * i + threadIdx.x % 4 * 4];
#pragma unroll
            for (int k = 0; k < 8; k++) {
                const float low = k < 4 ? b.x : b.z, high = k < 4 ? b.y : b.w;
                scores[i + k] =
                    fmaf(cap, tanh_of(scores[i + k] * softcap_scale), k % 2 == 0 ? low : high);
            }
        }
    }

    /* `next`: weights of the block whose scores these are. True where its logits exceed the rows'
     * maxima, so that out must be rescaled; the first block of a tile always does. */
    template <int held>
    __device__ inline bool weigh(const forward_plan &plan, bool is_first, float (&scores)[held],
                                 uint32_t (&next)[held / 8][4], float (&rescale)[2]) {
        const block_notes<config> *const note = &memory->notes[notes.index];
        const float unit = config::has_softcap ? 1 : plan.scale * log2_e;
        if constexpr (config::has_softcap)
            soften(plan, note, scores);
        mask(note, scores); // after the bias: -inf + inf is NaN
        mbarrier_arrive(&memory->notes_empty[notes.index]);
        notes.advance();
        if (!is_first && softmax.weigh<element, true>(scores, unit, next))
            return false;
#pragma unroll
        for (int i = 0; i < held; i++)
            scores[i] = __fmul_rn(scores[i], unit); // not fused with what follows
        softmax.raise(scores, rescale);
        softmax.weigh<element, false>(scores, 1, next);
        return true;
    }

    /* Copies, as out may not be multiplied from the registers that the next weights are computed
     * in meanwhile. */
    template <int steps> __device__ inline void set_weights(const uint32_t (&next)[steps][4]) {
#pragma unroll
        for (int i = 0; i < steps * 4; i++)
            weights[i / 4][i % 4] = mov_b32(next[i / 4][i % 4]);
    }

    __device__ inline void rescale_out(const float (&rescale)[2]) {
#pragma unroll
        for (int i = 0; i < out_held; i++)
            out[i] *= rescale[i / 2 % 2];
    }

    /* The first of this thread's rows of a kv head; the other is the eighth after it. */
    __device__ inline int32_t first_row_of(const row_tile &tile) const {
        const int32_t warp = threadIdx.x % warpgroup_threads / 32;
        return tile.first_row + index * config::warpgroup_rows + warp * 16 + threadIdx.x % 32 / 4;
    }

    __device__ inline void begin_tile(const forward_plan &plan, int32_t tile_index) {
        const row_tile tile = tile_at<config>(plan, order, tile_index);
#pragma unroll
        for (int i = 0; i < 2; i++)
            position[i] =
                row_position(plan, (first_row_of(tile) + 8 * i) / plan.group) - tile.first;
        softmax = row_softmax();
#pragma unroll
        for (int i = 0; i < out_held; i++)
            out[i] = 0;
    }

    /* After a block's scores: its keys are free, and q after the last block's. */
    __device__ inline void release_scored(int keys, bool is_last) {
        release(&memory->kv_empty[keys]);
        if (is_last)
            mbarrier_arrive(&memory->q_empty);
    }

    __device__ inline void attend_first(const forward_plan &plan, bool is_last) {
        float scores[scores_held], rescale[2];
        block_weights next;
        wait_rows();
        begin_scores(plan, scores, kv.index);
        wgmma_wait_group<0>();
        release_scored(kv.index, is_last);
        kv.advance();
        weigh(plan, true, scores, next, rescale);
        set_weights(next);
    }

    /* Scores of the next block of keys_held keys, and out of the block before it under this one's
     * softmax; the other consumer's softmax is under both. */
    template <int keys_held = config::key_rows>
    __device__ inline void attend_next(const forward_plan &plan, bool is_last) {
        float scores[keys_held / 2], rescale[2];
        uint32_t next[keys_held / step_k][4];
        const int keys = kv.index;
        kv.advance();
        const int values = kv.index;
        wait_rows();
        kv.advance();
        bar_sync(1 + index, 2 * warpgroup_threads); // this one's turn
        begin_scores(plan, scores, keys);
        begin_out(values);
        bar_arrive(2 - index, 2 * warpgroup_threads); // the other's turn
        wgmma_wait_group<1>();
        release_scored(keys, is_last);
        if (weigh(plan, false, scores, next, rescale)) {
            wgmma_wait_group<0>();
            rescale_out(rescale);
        }
        wgmma_wait_group<0>();
        release(&memory->kv_empty[values]);
        set_weights(next);
    }

    /* Out of the last block. */
    template <int keys> __device__ inline void attend_last(void) {
        wait_rows();
        begin_out<keys>(kv.index);
        wgmma_wait_group<0>();
        release(&memory->kv_empty[kv.index]);
        kv.advance();
    }

    __device__ inline void finish_tile(const forward_plan &plan, int32_t tile_index);

    __device__ inline void run(const forward_plan &plan) {
        if (index == 1)
            bar_arrive(1, 2 * warpgroup_threads); // consumer 0 begins
        for (;;) {
            wait(&memory->q_full, q.parity);
            fence_proxy_async();
            q.advance();
            const tile_notes note = memory->tile;
            if (note.index < 0)
                return;
            begin_tile(plan, note.index);
            attend_first(plan, note.blocks == 1);
            const bool is_short =
                config::short_keys < config::key_rows && note.is_short && note.blocks > 1;
            const int32_t whole = is_short ? note.blocks - 1 : note.blocks;
            for (int32_t block = 1; block < whole; block++)
                attend_next(plan, block == note.blocks - 1);
            if (is_short) {
                attend_next<config::short_keys>(plan, true);
                attend_last<config::short_keys>();
            } else {
                attend_last<config::key_rows>();
            }
            // there are no registers to keep a tile in: it is found anew
            finish_tile(plan, opaque(note.index));
        }
    }
};

/* Divides by the sums and writes out and lse. Empty rows are 0, not 0 * NaN. */
template <class config>
__device__ inline void consumer<config>::finish_tile(const forward_plan &plan, int32_t tile_index) {
    constexpr int span = 32; // channels that a quad writes at once: 8 a lane
    const int lane = threadIdx.x % 4;
    const row_tile tile = tile_at<config>(plan, order, tile_index);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t row = first_row_of(tile) + 8 * i, query = row / plan.group;
        const int32_t h = tile.g * plan.group + row % plan.group;
        const bool is_there = query < plan.q_len;
        const float sum = quad_sum(softmax.sum[i]);
        const float inverse = sum == 0 ? 0 : 1 / sum;
        if (plan.lse != NULL && is_there && lane == 0)
            plan.lse[tile.b * plan.lse_batch + h * plan.lse_head + query] =
                (softmax.greatest[i] + log2f(sum)) * ln_2;
        element *const to = (element *)plan.out.data + tile.b * plan.out.batch +
                            query * plan.out.row + h * plan.out.head;
#pragma unroll
        for (int c = 0; c < config::channels; c += span) {
            uint32_t words[4];
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const float *const pair = &out[(c / 8 + n) * 4 + 2 * i];
                words[n] = element_type<element>::pack(sum == 0 ? 0 : pair[0] * inverse,
                                                       sum == 0 ? 0 : pair[1] * inverse);
            }
            transpose_quad(words);
            const int channel = c + 8 * lane;
            if (is_there && channel < plan.head_dim)
                *(uint4 *)(to + channel) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

#endif
