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
    ring_place<config::stages> step;
    int32_t index;  // of the consumer
    int32_t parity; // of steps, for ds
    int32_t owed;   // the ticket that is to be handed on, now that sums are on their way; -1: none
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
        wait(&memory->step_full[step.index], step.parity);
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

    /* Weights where a query keeps its key, else 0. */
    __device__ static inline void cut(int32_t first, const int2 (&span)[2], float (&p)[held]) {
        const int32_t last = first + config::q_rows - 1;
        const bool is_cut = max(span[0].x, span[1].x) > first || min(span[0].y, span[1].y) <= last;
        if (!__any_sync(~0u, is_cut))
            return;
        const int32_t own = first + threadIdx.x % 4 * 2;
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

    /* Scores to weights. With softcap to weights times its slope, `packed` without. */
    __device__ inline void weigh(const backward_plan &plan, const backward_pass &pass,
                                 int32_t stage, float (&s)[held], pairs &packed) const {
        const float2 *const lse = columns_of(memory->lse[stage]);
        const int32_t first = memory->notes[stage].first;
        const slot_record *const slots = &memory->slots[segment % kept_segments][own_row()];
        const slot_record rows[2] = {slots[0], slots[8]};
        const int2 span[2] = {span_of(plan, pass, rows[0]), span_of(plan, pass, rows[1])};
        const float bias[2] = {rows[0].bias, rows[1].bias};
        const float unit = plan.forward.scale * log2_e;
        if constexpr (config::has_softcap) {
            weigh_softly(plan, first, span, bias, lse, s, packed);
        } else {
#pragma unroll
            for (int i = 0; i < held; i += 4) {
                const float2 column = lse[i];
#pragma unroll
                for (int k = 0; k < 4; k++)
                    s[i + k] = ex2_approx(
                        fmaf(s[i + k], unit, bias[k / 2] - (k % 2 ? column.y : column.x)));
            }
            cut(first, span, s);
            pack(s, packed);
        }
    }

    __device__ inline void weigh_softly(const backward_plan &plan, int32_t first,
                                        const int2 (&span)[2], const float (&bias)[2],
                                        const float2 *lse, float (&s)[held], pairs &packed) const {
        const int32_t own = first + threadIdx.x % 4 * 2;
        const float unit = plan.forward.softcap * log2_e;
#pragma unroll
        for (int i = 0; i < held; i += 2) {
            const float2 column = lse[i / 4 * 4];
            const int32_t row = i / 2 % 2, position = own + i / 4 * 8;
            float p[2];
#pragma unroll
            for (int k = 0; k < 2; k++) {
                const float t = tanh_of(s[i + k] * softcap_scale);
                const float logit = fmaf(t, unit, bias[row] - (k ? column.y : column.x));
                const bool is_kept = span[row].x <= position + k && position + k < span[row].y;
                p[k] = is_kept ? ex2_approx(logit) : 0;
                s[i + k] = p[k] * (1 - t * t);
            }
            packed[i / 8][i / 2 % 4] = element_type<element>::pack(p[0], p[1]);
        }
    }

    /* Weights to the gradients of scores, and their sums to that of bias. */
    __device__ inline void differentiate(int32_t stage, const float (&dp)[held],
                                         const pairs &weights, float (&s)[held], pairs &packed) {
        const float2 *const delta = columns_of(memory->delta[stage]);
#pragma unroll
        for (int i = 0; i < held; i += 2) {
            const float2 column = delta[i / 4 * 4];
            const float low = dp[i] - column.x, high = dp[i + 1] - column.y;
            if constexpr (config::has_softcap) { // there are no registers for weights and slopes
                const float2 p = unpack<element>(weights[i / 8][i / 2 % 4]);
                dbias[i / 2 % 2] += p.x * low + p.y * high;
            }
            s[i] *= low;
            s[i + 1] *= high;
            if constexpr (!config::has_softcap)
                dbias[i / 2 % 2] += s[i] + s[i + 1];
        }
        pack(s, packed);
    }

    /* For both consumers to read. */
    __device__ inline void store_ds(const pairs &packed) {
        const int lane = threadIdx.x % 32;
        const uint32_t to =
            shared_address(memory->ds[parity]) + swizzled(first_row() + lane % 16, lane / 16);
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
            dq, shared_address(memory->ds[parity]), opaque(keys));
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
            shared_address(memory->ds[parity]) + index * config::warpgroup_slots * line_bytes;
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
                          threadIdx.x % warpgroup_threads * 4;
        if (pass.tickets != NULL)
            await_turn(pass, part, note.turn);
#pragma unroll
        for (int i = 0; i < config::dq_held; i += 4)
            red_add_v4(to + i * warpgroup_threads, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
    }

    /* A step; true: the last of its segment. What dk gets of it is multiplied on, under the next
     * step's first products. */
    template <bool is_first>
    __device__ inline bool run_step(const backward_plan &plan, const backward_pass &pass) {
        float s[held], dp[held], dq[config::dq_held];
        pairs weights, ds;
        const int32_t stage = step.index;
        wait_step();
        begin_product(s, memory->k, memory->q[stage]);
        if (!config::has_softcap) { // with it there are no registers for it yet
            begin_product(dp, memory->v, memory->dout[stage]);
            wgmma_wait_group<1>();
        } else {
            wgmma_wait_group<0>();
        }
        if (!is_first)
            release(&memory->step_empty[stage == 0 ? config::stages - 1 : stage - 1]);
        const bool is_last = memory->notes[stage].is_last;
        weigh(plan, pass, stage, s, weights);
        if (config::has_softcap)
            begin_product(dp, memory->v, memory->dout[stage]);
        wgmma_wait_group<0>();
        begin_dv(weights, stage);
        differentiate(stage, dp, weights, s, ds);
        store_ds(ds);
        begin_dq(dq);
        begin_dk(stage);
        wgmma_wait_group<1>();
        add_dq(pass, stage, dq);
        parity ^= 1;
        step.advance();
        return is_last;
    }

    __device__ inline void run_segment(const backward_plan &plan, const backward_pass &pass) {
        bool is_last = run_step<true>(plan, pass);
        while (!is_last)
            is_last = run_step<false>(plan, pass);
        wgmma_wait_group<0>();
        release(&memory->step_empty[step.index == 0 ? config::stages - 1 : step.index - 1]);
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
        const key_row row = {leaving.key, leaving.border, slot, changes && leaving.key >= 0};
        if (__any_sync(~0u, row.is_written)) {
            write_sums<element>(plan, pass, memory->item, row, i, dk, dv);
            write_dbias(plan, pass, memory->item, row, quad_sum(dbias[i]));
        }
        dbias[i] = changes ? 0 : dbias[i];
#pragma unroll
        for (int c = 2 * i; c < sums_held; c += 4) {
            dk[c] = changes ? 0 : dk[c];
            dk[c + 1] = changes ? 0 : dk[c + 1];
            dv[c] = changes ? 0 : dv[c];
            dv[c + 1] = changes ? 0 : dv[c + 1];
        }
    }

    __device__ inline void run(const backward_plan &plan, const backward_pass &pass) {
        parity = 0;
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
