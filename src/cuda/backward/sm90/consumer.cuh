/* The consumers of sm90's backward kernel: warpgroups of 64 slots each. Of a step they make
 *   S' = K Q', dP' = V dO', P = 2^(S - lse), dS = P (dP - delta), dv += P' dO, dk += dS' Q
 * with keys as rows, so that P goes from registers into the product that follows; and, from all
 * slots' dS in shared memory, half the channels each of dq = dS K.
 * Source: FlashAttention-3, arXiv:2407.08608, for the roles. */
#ifndef FDMA_CUDA_BACKWARD_SM90_CONSUMER_CUH
#define FDMA_CUDA_BACKWARD_SM90_CONSUMER_CUH

#include "cuda/backward/sm90/rows.cuh"

template <class config> struct backward_consumer {
    using element = typename config::element;
    static constexpr int held = config::own_queries / 2; // of 64 slots
    static constexpr int sums_held = config::own_channels / 2;
    static constexpr int barrier = 2; // of both; 3 and 4 of each
    // with softcap there are no registers to hold dq while the next step's weights are computed
    static constexpr bool adds_dq_first = config::has_softcap;

    using pairs = uint32_t[config::own_queries / step_k][4]; // as wgmma takes them

    backward_memory<config> *memory;
    float softcap_scale;
    int32_t index; // of the consumer
    int32_t segment;
    float dbias[2]; // of this thread's rows
    float dk[sums_held], dv[sums_held];

    /* Of the block: this consumer's first slot, and of a step its first query. */
    __device__ inline int32_t first_slot(void) const {
        return config::is_wide ? 0 : index * config::warpgroup_slots;
    }
    __device__ inline int32_t first_query(void) const {
        return config::is_wide ? index * config::own_queries : 0;
    }

    /* The first of this thread's rows; the other is the eighth after it. */
    __device__ inline int32_t own_row(void) const {
        return first_slot() + threadIdx.x % warpgroup_threads / 32 * 16 + threadIdx.x % 32 / 4;
    }

    __device__ inline void release(uint64_t *barrier) {
        if (threadIdx.x % 32 == 0)
            mbarrier_arrive(barrier);
    }

    static __device__ inline int32_t stage_of(int32_t step) { return step % config::stages; }

    __device__ inline void wait_step(int32_t step) {
        wait(&memory->step_full[stage_of(step)], step / config::stages % 2);
        fence_proxy_async(); // cp.async writes as threads do, wgmma reads as TMA
                             // does
    }

    /* Rows of k or v times a step's rows of q or dout, begun. */
    __device__ inline void begin_product(float (&d)[held], const uint8_t *keys,
                                         const uint8_t *queries) {
        wgmma_fence();
        begin_abt<element, config::channels, config::slots, config::q_rows>(
            d, opaque(shared_address(keys) + first_slot() * line_bytes),
            shared_address(queries) + first_query() * line_bytes);
        wgmma_commit_group();
    }

    __device__ inline void issue_scores(float (&s)[held], int32_t step) {
        begin_product(s, memory->k, memory->q[stage_of(step)]);
    }

    __device__ inline void issue_dp(float (&dp)[held], int32_t step) {
        begin_product(dp, memory->v, memory->dout[stage_of(step)]);
    }

    /* Of this lane's columns. */
    __device__ inline const float2 *columns_of(const float *row) const {
        return (const float2 *)(row + first_query()) + threadIdx.x % 4;
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

    /* Scores to weights; with softcap also to weights times its slope. Only in pairs: there are no
     * registers for more. True: the warp has cut some. */
    __device__ inline bool weigh(const backward_plan &plan, const backward_pass &pass,
                                 int32_t stage, const float (&s)[held], pairs &weights,
                                 pairs &sloped) const {
        const float2 *const lse = columns_of(memory->lse[stage]);
        const step_note note = memory->notes[stage];
        const slot_record *const slots = &memory->slots[note.slots][own_row()];
        const slot_record rows[2] = {slots[0], slots[8]};
        const int2 span[2] = {span_of(plan, pass, rows[0]), span_of(plan, pass, rows[1])};
        const float bias[2] = {rows[0].bias, rows[1].bias};
        const int32_t first = note.first + first_query(), last = first + config::own_queries - 1;
        const int32_t own = first + threadIdx.x % 4 * 2;
        const bool is_cut = max(span[0].x, span[1].x) > first || min(span[0].y, span[1].y) <= last;
        if constexpr (config::has_softcap)
            weigh_softly(plan, bias, lse, s, weights, sloped);
        else
            weigh_plainly(plan, bias, lse, s, weights);
        const bool cuts = __any_sync(~0u, is_cut);
        if (cuts) {
            cut_pairs(own, span, weights);
            if (config::has_softcap)
                cut_pairs(own, span, sloped);
        }
        return cuts;
    }

    __device__ inline void weigh_plainly(const backward_plan &plan, const float (&bias)[2],
                                         const float2 *lse, const float (&s)[held],
                                         pairs &weights) const {
        const float unit = plan.forward.scale * log2_e;
#pragma unroll
        for (int i = 0; i < held; i += 2) {
            const float2 column = lse[i / 4 * 4];
            const float b = bias[i / 2 % 2];
            weights[i / 8][i / 2 % 4] =
                element_type<element>::pack(ex2_approx(fmaf(s[i], unit, b - column.x)),
                                            ex2_approx(fmaf(s[i + 1], unit, b - column.y)));
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

    /* Weights to the gradients of scores, and their sums to that of bias. cuts: what is cut stays 0
     * whatever it is multiplied with, NaN too. */
    template <bool cuts>
    __device__ inline void differentiate(int32_t stage, const float (&dp)[held],
                                         const pairs &weights, const pairs &sloped, pairs &ds) {
        const float2 *const delta = columns_of(memory->delta[stage]);
        float sums[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < held; i += 2) {
            const float2 column = delta[i / 4 * 4];
            const float low = dp[i] - column.x, high = dp[i + 1] - column.y;
            const float2 p = unpack<element>(weights[i / 8][i / 2 % 4]);
            float2 both =
                make_float2(cuts && p.x == 0 ? 0 : p.x * low, cuts && p.y == 0 ? 0 : p.y * high);
            sums[i / 2 % 2] += both.x + both.y;
            if constexpr (config::has_softcap) {
                const float2 slope = unpack<element>(sloped[i / 8][i / 2 % 4]);
                both = make_float2(cuts && p.x == 0 ? 0 : slope.x * low,
                                   cuts && p.y == 0 ? 0 : slope.y * high);
            }
            ds[i / 8][i / 2 % 4] = element_type<element>::pack(both.x, both.y);
        }
        add_dbias(sums);
    }

    __device__ inline void add_dbias(const float (&sums)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (config::shares_dbias) {
                const float sum = quad_sum(sums[i]);
                if (threadIdx.x % 4 == 0)
                    memory->dbias[segment % 2][index][own_row() + 8 * i] += sum;
            } else {
                dbias[i] += sums[i];
            }
        }
    }

    /* What row i has up to this segment, of the quad's first lane; and from 0 on where it
     * changes. */
    __device__ inline float take_dbias(int i, bool changes) {
        if constexpr (config::shares_dbias) {
            const int32_t row = own_row() + 8 * i, past = (segment + 1) % 2;
            if (threadIdx.x % 4 != 0 || (config::is_wide && index > 0))
                return 0;
            float *const sums[] = {&memory->dbias[past][0][row], &memory->dbias[past][1][row]};
            const float sum = (segment == 0 ? 0 : memory->dbias_before[row]) + *sums[0] + *sums[1];
            *sums[0] = *sums[1] = 0;
            memory->dbias_before[row] = changes ? 0 : sum;
            return sum;
        } else {
            const float sum = quad_sum(dbias[i]);
            dbias[i] = changes ? 0 : dbias[i];
            return sum;
        }
    }

    /* To where both consumers read it: [slot][query]. */
    __device__ inline void store_pairs(const uint8_t *block, const pairs &packed) {
        const int thread = opaque(threadIdx.x) % warpgroup_threads, lane = thread % 32;
        const int row = first_slot() + thread / 32 * 16 + lane % 16;
        const uint32_t to = shared_address(block) + swizzled(row, first_query() / 8 + lane / 16);
#pragma unroll
        for (int j = 0; j < config::own_queries / step_k; j++)
            stmatrix_x4(to ^ j * 2 * chunk_bytes, packed[j]);
    }

    __device__ inline const uint8_t *ds_block(int32_t step) const {
        return memory->ds[step % config::ds_buffers];
    }

    __device__ inline void store_ds(int32_t step, const pairs &packed) {
        store_pairs(ds_block(step), packed);
        fence_proxy_async();
        bar_sync(barrier + 1 + index, warpgroup_threads);
        if (threadIdx.x % warpgroup_threads == 0)
            mbarrier_arrive(&memory->ds_full[step % 2]);
    }

    /* Until all slots' dS are there. */
    __device__ inline void wait_ds(int32_t step) { wait(&memory->ds_full[step % 2], step / 2 % 2); }

    /* Some of this consumer's channels of dq, begun. */
    __device__ inline void issue_dq(float (&dq)[config::dq_held], int32_t step, int part = 0) {
        const int channel = index * config::dq_channels + part * config::dq_span;
        const uint32_t keys = shared_address(memory->k) +
                              channel / panel_channels * config::slots * line_bytes +
                              channel % panel_channels * 2;
        wgmma_fence();
        begin_atb<element, config::slots, config::slots / step_k>(
            dq, shared_address(ds_block(step)), opaque(keys));
        wgmma_commit_group();
    }

    /* dv += P dout, begun. */
    __device__ inline void issue_dv(const pairs &weights, int32_t step) {
        wgmma_fence();
        begin_ab<element, config::q_rows, config::q_rows / step_k>(
            dv, weights, shared_address(memory->dout[stage_of(step)]));
        wgmma_commit_group();
    }

    /* dk += dS * a step's q, or dv += weights * its dout, begun; from shared memory. */
    __device__ inline void begin_sums(float (&sums)[sums_held], const uint8_t *block,
                                      const uint8_t *queries) {
        const int panel = config::is_wide ? index * config::own_channels / panel_channels : 0;
        wgmma_fence();
        begin_ab<element, config::q_rows, config::q_rows / step_k>(
            sums, opaque(shared_address(block) + first_slot() * line_bytes),
            shared_address(queries) + panel * config::q_rows * line_bytes);
        wgmma_commit_group();
    }

    __device__ inline void issue_dk(int32_t step) {
        begin_sums(dk, ds_block(step), memory->q[stage_of(step)]);
    }

    __device__ inline void issue_wide_dv(int32_t step) {
        begin_sums(dv, memory->weights, memory->dout[stage_of(step)]);
    }

    /* Of the step before, if there is one. */
    __device__ inline void hand_on_ticket(const backward_pass &pass) {
        fence_acq_rel_gpu(); // its sums have long arrived
        bar_sync(barrier + 1 + index, warpgroup_threads);
        if (threadIdx.x % warpgroup_threads == 0 && memory->owed[index] >= 0)
            st_relaxed_gpu(&pass.tickets[memory->owed[index]], memory->owed_turn[index] + 1);
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
                                  const float (&dq)[config::dq_held], int which = 0) {
        constexpr int parts = config::dq_channels / config::dq_span;
        const step_note note = memory->notes[stage];
        const int32_t part = note.tile * config::consumers + index;
        float *const to = pass.dq +
                          ((int64_t)part * parts + which) * (config::dq_held * warpgroup_threads) +
                          opaque(threadIdx.x) % warpgroup_threads * 4;
        if (pass.tickets != NULL && which == 0)
            await_turn(pass, part, note.turn);
#pragma unroll
        for (int i = 0; i < config::dq_held; i += 4)
            red_add_v4(to + i * warpgroup_threads, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }

    /* dS of a step, from its weights and dP. */
    __device__ inline void differentiate(bool cuts, int32_t step, const float (&dp)[held],
                                         const pairs &weights, const pairs &sloped, pairs &ds) {
        if (cuts || config::has_softcap) // with softcap the path without cuts would spill
            differentiate<true>(stage_of(step), dp, weights, sloped, ds);
        else
            differentiate<false>(stage_of(step), dp, weights, sloped, ds);
    }

    __device__ inline void finish_dq(const backward_pass &pass, int32_t step,
                                     const float (&dq)[config::dq_held]) {
        wgmma_wait_group<0>();
        add_dq(pass, stage_of(step), dq);
    }

    /* The steps of a segment from `now` on; returns the step after its last. dq needs both
     * consumers' dS. It is multiplied together with the next step's scores, so that neither
     * consumer waits for the other. */
    __device__ inline int32_t run_segment(const backward_plan &plan, const backward_pass &pass,
                                          int32_t now) {
        float s[held], dp[held], dq[config::dq_held];
        pairs weights, sloped, ds;
        wait_step(now);
        issue_scores(s, now);
        wgmma_wait_group<0>();
        bool cuts = weigh(plan, pass, stage_of(now), s, weights, sloped);
        for (;; now++) {
            const int32_t next = now + 1;
            issue_dp(dp, now);
            issue_dv(weights, now);
            wgmma_wait_group<0>();
            differentiate(cuts, now, dp, weights, sloped, ds);
            store_ds(now, ds);
            issue_dk(now);
            if (memory->notes[stage_of(now)].is_last)
                break;
            wait_step(next);
            issue_scores(s, next);
            wait_ds(now);
            issue_dq(dq, now);
            wgmma_wait_group<1>(); // dk of this step and scores of the next; dq may go on
            if (adds_dq_first)
                finish_dq(pass, now, dq);
            cuts = weigh(plan, pass, stage_of(next), s, weights, sloped);
            if (!adds_dq_first)
                finish_dq(pass, now, dq);
            release(&memory->step_empty[stage_of(now)]);
        }
        wait_ds(now);
        issue_dq(dq, now);
        finish_dq(pass, now, dq);
        release(&memory->step_empty[stage_of(now)]);
        return now + 1;
    }

    /* The same where the consumers share queries and channels: they keep step with each other. */
    __device__ inline int32_t run_wide_segment(const backward_plan &plan, const backward_pass &pass,
                                               int32_t now) {
        for (bool is_last = false; !is_last; now++) {
            float s[held], dp[held];
            pairs weights, sloped, ds;
            wait_step(now);
            issue_scores(s, now);
            issue_dp(dp, now);
            wgmma_wait_group<1>();
            is_last = memory->notes[stage_of(now)].is_last;
            const bool cuts = weigh(plan, pass, stage_of(now), s, weights, sloped);
            store_pairs(memory->weights, weights);
            wgmma_wait_group<0>();
            differentiate(cuts, now, dp, weights, sloped, ds);
            store_ds(now, ds);
            wait_ds(now);
            multiply_wide(pass, now);
            release(&memory->step_empty[stage_of(now)]);
            bar_sync(barrier, config::consumers * warpgroup_threads); // both have read dS and P
        }
        return now;
    }

    __device__ inline void multiply_wide(const backward_pass &pass, int32_t now) {
        float dq[config::dq_held];
        issue_dq(dq, now);
        issue_wide_dv(now);
        wgmma_wait_group<1>();
        add_dq(pass, stage_of(now), dq);
        issue_dq(dq, now, 1);
        issue_dk(now);
        wgmma_wait_group<1>();
        add_dq(pass, stage_of(now), dq, 1);
        wgmma_wait_group<0>();
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
        const float dbias = take_dbias(i, changes);
        if (!__any_sync(~0u, changes))
            return;
        const key_row row = {leaving.key, leaving.border, slot,
                             config::is_wide ? index * config::own_channels : 0,
                             changes && leaving.key >= 0};
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
        int32_t step = 0; // of all segments
        for (segment = 0; take_slots(plan, pass); segment++) {
            wait(&memory->keys_full, segment & 1);
            fence_proxy_async();
            if constexpr (config::is_wide)
                step = run_wide_segment(plan, pass, step);
            else
                step = run_segment(plan, pass, step);
        }
        if (pass.tickets != NULL)
            hand_on_ticket(pass);
    }
};

#endif
