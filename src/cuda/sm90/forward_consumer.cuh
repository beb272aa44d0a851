/* The consumers of sm90's forward kernel: warpgroups of 64 rows each that turn blocks of keys into
 * out and lse. While one weighs its scores the other has the tensor cores.
 * Source: FlashAttention-3, arXiv:2407.08608, sections 3.1 and 3.2. */
#ifndef FDMA_CUDA_SM90_FORWARD_CONSUMER_CUH
#define FDMA_CUDA_SM90_FORWARD_CONSUMER_CUH

#include "cuda/device/softmax.cuh"
#include "cuda/sm90/forward_tile.cuh"

/* What a thread's two rows are. */
struct row_pair {
    int32_t b, g;
    int32_t row[2];      // of the kv head
    int32_t position[2]; // 0 where not causal
};

/* One of the consumers, between blocks. */
template <class config> struct consumer {
    using element = typename config::element;
    static constexpr int scores_held = config::key_rows / 2, out_held = config::channels / 2;

    forward_memory<config> *memory;
    tile_order order;
    ring_place<config::buffers> kv;
    ring_place<config::notes> notes;
    ring_place<config::q_buffers> q, next_q;
    int32_t index;       // of the consumer
    int32_t blocks_left; // of the tile, whose scores are to be computed
    row_pair rows;
    row_softmax softmax;
    float out[out_held];
    uint32_t weights[config::key_rows / step_k][4];

    __device__ inline void wait_rows(void) {
        wait(&memory->kv_full[kv.index], kv.parity);
        fence_proxy_async(); // cp.async writes as threads do, wgmma reads as TMA does
    }

    /* A warp at a time: barriers count warps. */
    __device__ inline void release(uint64_t *barrier) {
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive(barrier);
    }

    /* Scores of the next block, begun. */
    __device__ inline void begin_scores(float (&scores)[scores_held], bool has_bias) {
        const uint32_t first_row = index * config::warpgroup_rows;
        begin_abt<element, config::channels, config::rows>(
            scores, shared_address(memory->q[q.index]) + first_row * line_bytes,
            shared_address(memory->kv[kv.index]), has_bias);
        wgmma_commit_group();
    }

    __device__ inline void begin_out(void) {
        wgmma_fence();
        begin_ab<element, config::key_rows>(out, weights, shared_address(memory->kv[kv.index]));
        wgmma_commit_group();
    }

    /* The column of the block that accumulator 4 n is in; of 4 n + 1: the next. */
    __device__ inline int32_t column_of(int n) const { return 8 * n + 2 * (threadIdx.x % 4); }

    /* Biases of the next block, for its scores to be added to. */
    __device__ inline void load_bias(float (&scores)[scores_held]) {
        const block_notes<config> *const note = &memory->notes[notes.index];
#pragma unroll
        for (int n = 0; n < scores_held / 4; n++) {
            const float4 bias = *(const float4 *)note->bias[column_of(n) / 2];
            scores[4 * n] = bias.x;
            scores[4 * n + 1] = bias.y;
            scores[4 * n + 2] = bias.z;
            scores[4 * n + 3] = bias.w;
        }
    }

    /* scores become c * tanh(scale * scores / c) + bias. */
    __device__ inline void soften_scores(const forward_plan &plan, float (&scores)[scores_held]) {
        const block_notes<config> *const note = &memory->notes[notes.index];
#pragma unroll
        for (int i = 0; i < scores_held; i++)
            scores[i] = soften(plan.scale * scores[i], plan.softcap) +
                        note->bias[column_of(i / 4) / 2][0][i % 2];
    }

    /* -inf where a row does not keep a key, in the groups of keys that a row may not keep. */
    __device__ inline void mask(float (&scores)[scores_held]) {
        const block_notes<config> *const note = &memory->notes[notes.index];
        const uint32_t cuts = *(const uint32_t *)note->cuts;
        constexpr int group_tiles = config::group_keys / 8;
#pragma unroll
        for (int group = 0; group < warpgroup_warps; group++) {
            const uint32_t cut = cuts >> 8 * group;
            if ((cut & (cut_expiry | cut_causal)) == 0)
                continue;
#pragma unroll
            for (int n = group * group_tiles; n < (group + 1) * group_tiles; n++) {
                const int2 expiry = *(const int2 *)&note->expiry[column_of(n)];
                const int2 key = *(const int2 *)&note->key[column_of(n)];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int32_t p = rows.position[i / 2], j = i % 2 == 0 ? key.x : key.y;
                    const int32_t end = i % 2 == 0 ? expiry.x : expiry.y;
                    const bool kept = p < end && (j <= p || (cut & cut_causal) == 0);
                    scores[4 * n + i] = kept ? scores[4 * n + i] : -INFINITY;
                }
            }
        }
    }

    /* Weights of a block whose scores are there; true where out must be rescaled. */
    __device__ inline bool weigh(const forward_plan &plan, float (&scores)[scores_held],
                                 float (&rescale)[2]) {
        const float unit = score_unit(plan);
        if (plan.softcap != 0)
            soften_scores(plan, scores);
        mask(scores);
        release(&memory->notes_empty[notes.index]);
        notes.advance();
        const bool raised = softmax.raise(scores, unit, rescale);
        softmax.weigh(scores, unit);
        return raised;
    }

    __device__ inline void pack(const float (&scores)[scores_held]) {
#pragma unroll
        for (int i = 0; i < scores_held / 2; i++)
            weights[i / 4][i % 4] = element_type<element>::pack(scores[2 * i], scores[2 * i + 1]);
    }

    __device__ inline void rescale_out(const float (&rescale)[2]) {
#pragma unroll
        for (int i = 0; i < out_held; i++)
            out[i] *= rescale[i / 2 % 2];
    }

    /* The next tile's rows; false where there are no more tiles. */
    __device__ inline bool take_tile(const forward_plan &plan) {
        q = next_q;
        wait(&memory->q_full[q.index], q.parity);
        fence_proxy_async();
        next_q.advance();
        const tile_notes note = memory->tiles[q.index];
        if (note.index < 0)
            return false;
        const row_tile tile = tile_at<config>(plan, order, note.index);
        const int32_t warp = threadIdx.x / 32 % warpgroup_warps;
        const int32_t first = tile.first_row + index * config::warpgroup_rows + warp * 16;
        rows.b = tile.b;
        rows.g = tile.g;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            rows.row[i] = first + threadIdx.x % 32 / 4 + 8 * i;
            rows.position[i] = row_position(plan, rows.row[i] / plan.group);
        }
        blocks_left = note.blocks;
        return true;
    }

    __device__ inline void clear_out(void) {
#pragma unroll
        for (int i = 0; i < out_held; i++)
            out[i] = 0;
    }

    /* After scores: their keys are free, and so is q after the last block's. */
    __device__ inline void release_scored(int keys) {
        release(&memory->kv_empty[keys]);
        blocks_left--;
        if (blocks_left == 0)
            release(&memory->q_empty[q.index]);
    }

    __device__ inline void attend_first(const forward_plan &plan) {
        float scores[scores_held], rescale[2];
        const bool has_bias = plan.records != NULL && plan.softcap == 0;
        wait(&memory->notes_full[notes.index], notes.parity);
        if (has_bias)
            load_bias(scores);
        wait_rows();
        begin_scores(scores, has_bias);
        wgmma_wait_group<0>();
        release_scored(kv.index);
        kv.advance();
        clear_out();
        weigh(plan, scores, rescale);
        pack(scores);
    }

    /* Scores of the next block, out of the one before it; the other consumer weighs meanwhile.
     * `done`: rows of the tile that the one before it ends; NULL: it does not. */
    __device__ inline void attend_next(const forward_plan &plan, bool ends, const row_pair &done) {
        float scores[scores_held], rescale[2];
        const bool has_bias = plan.records != NULL && plan.softcap == 0;
        const int keys = kv.index;
        wait(&memory->notes_full[notes.index], notes.parity);
        if (has_bias)
            load_bias(scores);
        wait_rows();
        bar_sync(1 + index, 2 * warpgroup_threads); // this one's turn
        begin_scores(scores, has_bias);
        kv.advance();
        const int values = kv.index;
        wait_rows();
        begin_out();
        kv.advance();
        bar_arrive(2 - index, 2 * warpgroup_threads); // the other's turn
        wgmma_wait_group<1>();
        release_scored(keys);
        const row_softmax before = softmax;
        if (ends)
            softmax = row_softmax();
        const bool raised = weigh(plan, scores, rescale);
        if (ends) {
            wgmma_wait_group<0>();
            finish_tile(plan, done, before);
            clear_out();
        } else if (raised) {
            wgmma_wait_group<0>();
            rescale_out(rescale);
        }
        wgmma_wait_group<0>();
        release(&memory->kv_empty[values]);
        pack(scores);
    }

    __device__ inline void attend_last(void) {
        wait_rows();
        begin_out();
        wgmma_wait_group<0>();
    }

    __device__ inline void finish_tile(const forward_plan &plan, const row_pair &done,
                                       const row_softmax &softmax);

    __device__ inline void run(const forward_plan &plan) {
        if (index == 1)
            bar_arrive(1, 2 * warpgroup_threads); // consumer 0 begins
        take_tile(plan);
        attend_first(plan);
        for (;;) {
            const row_pair done = rows;
            const bool ends = blocks_left == 0;
            if (ends && !take_tile(plan))
                break;
            attend_next(plan, ends, done);
        }
        attend_last();
        finish_tile(plan, rows, softmax);
    }
};

/* words[i] of lane l of a quad becomes words[l] of lane i. */
__device__ static inline void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if ((i & bit) != 0)
                continue;
            const uint32_t sent = upper ? words[i] : words[i | bit];
            const uint32_t got = __shfl_xor_sync(~0u, sent, bit);
            words[i] = upper ? got : words[i];
            words[i | bit] = upper ? words[i | bit] : got;
        }
    }
}

/* Divides by the sums and writes out and lse. Empty rows are 0, not 0 * NaN. */
template <class config>
__device__ inline void consumer<config>::finish_tile(const forward_plan &plan, const row_pair &done,
                                                     const row_softmax &softmax) {
    constexpr int span = 32; // channels that a quad writes at once: 8 a lane
    const int lane = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t query = done.row[i] / plan.group;
        const int32_t h = done.g * plan.group + done.row[i] % plan.group;
        const bool is_there = query < plan.q_len;
        const float sum = quad_sum(softmax.sum[i]);
        const float inverse = sum == 0 ? 0 : 1 / sum;
        if (plan.lse != NULL && is_there && lane == 0)
            plan.lse[done.b * plan.lse_batch + h * plan.lse_head + query] =
                (softmax.greatest[i] + log2f(sum)) * ln_2;
        element *const to = (element *)plan.out.data + done.b * plan.out.batch +
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
