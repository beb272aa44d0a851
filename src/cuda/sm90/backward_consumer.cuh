/* The consumers of sm90's backward kernel: warpgroups of 64 slots each. Of a step they make
 *   S' = K Q', dP' = V dO', P = 2^(S - lse), dS = P (dP - delta), dv += P' dO, dk += dS' Q
 * with keys as rows, so that P and dS go from registers into the products that follow; and, from
 * all slots' dS in shared memory, half the channels each of dq = dS K.
 * Source: FlashAttention-3, arXiv:2407.08608, for the order of products. */
#ifndef FDMA_CUDA_SM90_BACKWARD_CONSUMER_CUH
#define FDMA_CUDA_SM90_BACKWARD_CONSUMER_CUH

#include "cuda/sm90/backward_rows.cuh"

template <class config> struct backward_consumer {
    using element = typename config::element;
    static constexpr int held = config::q_rows / 2; // of a step's 64 x 64
    static constexpr int sums_held = config::channels / 2;
    static constexpr int barrier = 2; // of both; 3 and 4 of each

    using pairs = uint32_t[config::q_rows / step_k][4]; // as wgmma takes them

    backward_memory<config> *memory;
    float softcap_scale;
    int32_t index; // of the consumer
    int32_t step;  // of all segments
    int32_t segment;
    float dbias[2]; // of this thread's rows
    float dk[sums_held], dv[sums_held];

    __device__ inline int32_t first_row(void) const {
        return index * config::warpgroup_slots + threadIdx.x % warpgroup_threads / 32 * 16;
    }

    /* The first of this thread's rows; the other is the eighth after it. */
    __device__ inline int32_t own_row(void) const { return first_row() + threadIdx.x % 32 / 4; }

    __device__ inline void release(uint64_t *barrier) {
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive(barrier);
    }

    __device__ inline void wait_step(void) {
        wait(&memory->step_full[step % config::stages], step / config::stages % 2);
        fence_proxy_async(); // cp.async writes as threads do, wgmma reads as TMA does
    }

    /* Rows of k or v times a step's rows of q or dout, begun. */
    __device__ inline void begin_product(float (&d)[held], const uint8_t *keys,
                                         const uint8_t *queries) {
        wgmma_fence();
        begin_abt<element, config::channels, config::slots, config::q_rows>(
            d, opaque(shared_address(keys) + index * config::warpgroup_slots * line_bytes),
            shared_address(queries));
        wgmma_commit_group();
    }

    /* Of this lane's columns. */
    __device__ inline const float2 *columns_of(const float *row) const {
        return (const float2 *)row + threadIdx.x % 4;
    }

    /* The positions at which a slot's key is kept. */
    __device__ static inline int2 span_of(const backward_plan &plan, const backward_pass &pass,
                                          const slot_record &slot) {
        const bool arrives = plan.forward.causal && (pass.is_diagonal || !plan.is_rolling);
        return make_int2(arrives ? slot.key : INT32_MIN, slot.expiry);
    }

    /* Weights, in pairs, where a query keeps its key, else 0. */
    __device__ static inline void cut_pairs(int32_t own, const int2 (&span)[2], pairs &packed) {
#pragma unroll
        for (int i = 0; i < held; i += 2) {
            const int32_t position = own + i / 4 * 8, row = i / 2 % 2;
            const bool low = span[row].x <= position && position < span[row].y;
            const bool high = span[row].x <= position + 1 && position + 1 < span[row].y;
            packed[i / 8][i / 2 % 4] &= (low ? 0xffffu : 0) | (high ? 0xffff0000u : 0);
        }
    }

    __device__ static inline void cut(int32_t own, const int2 (&span)[2], float (&p)[held]) {
#pragma unroll
        for (int i = 0; i < held; i++) {
            const int32_t position = own + i / 4 * 8 + i % 2, row = i / 2 % 2;
            p[i] = span[row].x <= position && position < span[row].y ? p[i] : 0;
        }
    }

    __device__ static inline void pack(const float (&x)[held], pairs &packed) {
#pragma unroll
        for (int i = 0; i < held; i += 2)
            packed[i / 8][i / 2 % 4] = element_type<element>::pack(x[i], x[i + 1]);
    }

    /* Scores to weights. With softcap their slopes times weights go to `sloped`, and the scores
     * are needed no more: there are no registers for all of them. */
    __device__ inline void weigh(const backward_plan &plan, const backward_pass &pass,
                                 int32_t stage, float (&s)[held], pairs &weights,
                                 pairs &sloped) const {
        const float2 *const lse = columns_of(memory->lse[stage]);
        const step_note note = memory->notes[stage];
        const slot_record *const slots = &memory->slots[note.slots][own_row()];
        const slot_record rows[2] = {slots[0], slots[8]};
        const int2 span[2] = {span_of(plan, pass, rows[0]), span_of(plan, pass, rows[1])};
        const float bias[2] = {rows[0].bias, rows[1].bias};
        const int32_t last = note.first + config::q_rows - 1;
        const int32_t own = note.first + threadIdx.x % 4 * 2;
        const bool is_cut =
            max(span[0].x, span[1].x) > note.first || min(span[0].y, span[1].y) <= last;
        if constexpr (config::has_softcap) {
            weigh_softly(plan, bias, lse, s, weights, sloped);
            if (__any_sync(~0u, is_cut)) {
                cut_pairs(own, span, weights);
                cut_pairs(own, span, sloped);
            }
        } else {
            const float unit = plan.forward.scale * log2_e;
#pragma unroll
            for (int i = 0; i < held; i += 4) {
                const float2 column = lse[i];
#pragma unroll
                for (int k = 0; k < 4; k++)
                    s[i + k] = ex2_approx(
                        fmaf(s[i + k], unit, bias[k / 2] - (k % 2 ? column.y : column.x)));
            }
            if (__any_sync(~0u, is_cut))
                cut(own, span, s);
            pack(s, weights);
        }
    }

    __device__ inline void weigh_softly(const backward_plan &plan, const float (&bias)[2],
                                        const float2 *lse, const float (&s)[held], pairs &weights,
                                        pairs &sloped) const {
        const float unit = plan.forward.softcap * log2_e;
#pragma unroll
        for (int i = 0; i < held; i += 2) {
            if (i % 8 == 0)
                __syncwarp(); // not all of lse at once: there are no registers for it
            const float2 column = lse[i / 4 * 4];
            float p[2], slope[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const float t = tanh_of(s[i + k] * softcap_scale);
                p[k] = ex2_approx(fmaf(t, unit, bias[i / 2 % 2] - (k ? column.y : column.x)));
                slope[k] = 1 - t * t;
            }
            weights[i / 8][i / 2 % 4] = element_type<element>::pack(p[0], p[1]);
            sloped[i / 8][i / 2 % 4] =
                element_type<element>::pack(p[0] * slope[0], p[1] * slope[1]);
        }
    }

    /* Weights to the gradients of scores, and their sums to that of bias. */
    __device__ inline void differentiate(int32_t stage, const float (&dp)[held],
                                         const pairs &weights, const pairs &sloped,
                                         const float (&p)[held], pairs &ds) {
        const float2 *const delta = columns_of(memory->delta[stage]);
        float sums[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < held; i += 2) {
            const float2 column = delta[i / 4 * 4];
            const float low = dp[i] - column.x, high = dp[i + 1] - column.y;
            float2 both;
            if constexpr (config::has_softcap) {
                const float2 weight = unpack<element>(weights[i / 8][i / 2 % 4]);
                const float2 slope = unpack<element>(sloped[i / 8][i / 2 % 4]);
                sums[i / 2 % 2] += weight.x * low + weight.y * high;
                both = make_float2(slope.x * low, slope.y * high);
            } else {
                both = make_float2(p[i] * low, p[i + 1] * high);
                sums[i / 2 % 2] += both.x + both.y;
            }
            ds[i / 8][i / 2 % 4] = element_type<element>::pack(both.x, both.y);
        }
        add_dbias(sums);
    }

    /* With softcap there are no registers for a segment's sums. */
    __device__ inline void add_dbias(const float (&sums)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (config::has_softcap) {
                const float sum = quad_sum(sums[i]);
                if (threadIdx.x % 4 == 0)
                    memory->dbias[own_row() + 8 * i] += sum;
            } else {
                dbias[i] += sums[i];
            }
        }
    }

    /* What row i's segments have summed, of the quad's first lane; and from 0 on where it
     * changes. */
    __device__ inline float take_dbias(int i, bool changes) {
        float sum = 0;
        if constexpr (config::has_softcap) {
            float *const place = &memory->dbias[own_row() + 8 * i];
            if (threadIdx.x % 4 == 0 && changes) {
                sum = *place;
                *place = 0;
            }
        } else {
            sum = quad_sum(dbias[i]);
            dbias[i] = changes ? 0 : dbias[i];
        }
        return sum;
    }

    /* For both consumers to read. */
    __device__ inline void store_ds(const pairs &packed) {
        const int lane = threadIdx.x % 32;
        const uint32_t to =
            shared_address(memory->ds[step % 2]) + swizzled(first_row() + lane % 16, lane / 16);
#pragma unroll
        for (int j = 0; j < config::q_rows / step_k; j++)
            stmatrix_x4(to ^ j * 2 * chunk_bytes, packed[j]);
        fence_proxy_async();
        bar_sync(barrier, config::consumers * warpgroup_threads);
    }

    /* This consumer's channels of dq, begun. */
    __device__ inline void begin_dq(float (&dq)[config::dq_held]) {
        const int channel = index * (config::channels / config::consumers);
        const uint32_t keys = shared_address(memory->k) +
                              channel / panel_channels * config::slots * line_bytes +
                              channel % panel_channels * 2;
        wgmma_fence();
        begin_atb<element, config::slots, config::slots / step_k>(
            dq, shared_address(memory->ds[step % 2]), opaque(keys));
        wgmma_commit_group();
    }

    /* dv += weights * a step's dout, begun. */
    __device__ inline void begin_dv(const pairs &weights, int32_t stage) {
        wgmma_fence();
        begin_ab<element, config::q_rows, config::q_rows / step_k>(
            dv, weights, shared_address(memory->dout[stage]));
        wgmma_commit_group();
    }

    /* dk += dS * a step's q, begun; from shared memory, as it goes on under the next step. */
    __device__ inline void begin_dk(int32_t stage) {
        const uint32_t ds =
            shared_address(memory->ds[step % 2]) + index * config::warpgroup_slots * line_bytes;
        wgmma_fence();
        begin_ab<element, config::q_rows, config::q_rows / step_k>(
            dk, opaque(ds), shared_address(memory->q[stage]));
        wgmma_commit_group();
    }

    __device__ inline void hand_on_ticket(const backward_pass &pass) {
        if (memory->owed[index] < 0)
            return;
        __threadfence(); // sums of a step ago: they have long arrived
        bar_sync(barrier + 1 + index, warpgroup_threads);
        if (threadIdx.x % warpgroup_threads == 0)
            st_release_gpu(&pass.tickets[memory->owed[index]], memory->owed_turn[index] + 1);
    }

    __device__ inline void await_turn(const backward_pass &pass, int32_t ticket, uint32_t turn) {
        hand_on_ticket(pass);
        if (threadIdx.x % warpgroup_threads == 0) {
            while (ld_acquire_gpu(&pass.tickets[ticket]) != turn) {
            }
            memory->owed[index] = ticket;
            memory->owed_turn[index] = turn;
        }
        bar_sync(barrier + 1 + index, warpgroup_threads);
    }

    __device__ inline void add_dq(const backward_pass &pass, int32_t stage,
                                  const float (&dq)[config::dq_held]) {
        const step_note note = memory->notes[stage];
        const int32_t part = note.tile * config::consumers + index;
        float *const to = pass.dq + (int64_t)part * (config::dq_held * warpgroup_threads) +
                          opaque(threadIdx.x) % warpgroup_threads * 4;
        if (pass.tickets != NULL)
            await_turn(pass, part, note.turn);
#pragma unroll
        for (int i = 0; i < config::dq_held; i += 4)
            red_add_v4(to + i * warpgroup_threads, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }

    /* Nothing, added to dk: so that a product runs wherever a step begins, as ptxas wants it. */
    __device__ inline void begin_nothing(void) {
        const uint32_t none[4] = {0, 0, 0, 0};
        wgmma_fence();
        multiply<element>(dk, none, describe_matrix(shared_address(memory->zeros), 0));
        wgmma_commit_group();
    }

    /* The steps of a segment. What dk gets of one is multiplied under the next one's first
     * products. */
    __device__ inline void run_segment(const backward_plan &plan, const backward_pass &pass) {
        const int32_t first = step;
        bool is_last = false;
        begin_nothing();
        while (!is_last) {
            float s[held], dp[held], dq[config::dq_held];
            pairs weights, sloped, ds;
            const int32_t stage = step % config::stages;
            wait_step();
            begin_product(s, memory->k, memory->q[stage]);
            if (!config::has_softcap) { // with it there are no registers for it yet
                begin_product(dp, memory->v, memory->dout[stage]);
                wgmma_wait_group<1>();
            } else {
                wgmma_wait_group<0>();
            }
            if (step != first)
                release(&memory->step_empty[(step - 1) % config::stages]);
            is_last = memory->notes[stage].is_last;
            weigh(plan, pass, stage, s, weights, sloped);
            if (config::has_softcap)
                begin_product(dp, memory->v, memory->dout[stage]);
            wgmma_wait_group<0>();
            begin_dv(weights, stage);
            differentiate(stage, dp, weights, sloped, s, ds);
            store_ds(ds);
            begin_dq(dq);
            begin_dk(stage);
            wgmma_wait_group<1>();
            add_dq(pass, stage, dq);
            step++;
        }
        wgmma_wait_group<0>();
        release(&memory->step_empty[(step - 1) % config::stages]);
    }

    /* Takes over the next segment's slots, and writes the gradients of keys that leave; false:
     * there is none. */
    __device__ inline bool take_slots(const backward_plan &plan, const backward_pass &pass) {
        wait(&memory->slots_full, segment & 1);
        const bool is_over = memory->is_over;
        __syncwarp(); // all lanes have read it
        release(&memory->keys_empty);
#pragma unroll
        for (int i = 0; i < 2; i++)
            change_row(plan, pass, i);
        return !is_over;
    }

    /* Of row i of this thread. */
    __device__ inline void change_row(const backward_plan &plan, const backward_pass &pass, int i) {
        const int32_t slot = own_row() + 8 * i;
        const int32_t next = memory->slots[segment % kept_segments][slot].key;
        const slot_record leaving = segment == 0
                                        ? slot_record{-1, 0, 0, 0}
                                        : memory->slots[(segment - 1) % kept_segments][slot];
        const bool changes = segment == 0 || next != leaving.key;
        if (!__any_sync(~0u, changes))
            return;
        const float dbias = take_dbias(i, changes);
        const key_row row = {leaving.key, leaving.border, slot, changes && leaving.key >= 0};
        if (__any_sync(~0u, row.is_written)) {
            write_sums<element>(plan, pass, memory->item, row, i, dk, dv);
            write_rest(plan, pass, memory->item, row, i, dbias, dk, dv);
        }
#pragma unroll
        for (int c = 2 * i; c < sums_held; c += 4) {
            dk[c] = changes ? 0 : dk[c];
            dk[c + 1] = changes ? 0 : dk[c + 1];
            dv[c] = changes ? 0 : dv[c];
            dv[c + 1] = changes ? 0 : dv[c + 1];
        }
    }

    __device__ inline void run(const backward_plan &plan, const backward_pass &pass) {
        step = 0;
        for (segment = 0; take_slots(plan, pass); segment++) {
            wait(&memory->keys_full, segment & 1);
            fence_proxy_async();
            run_segment(plan, pass);
        }
        if (pass.tickets != NULL)
            hand_on_ticket(pass);
    }
};

#endif
