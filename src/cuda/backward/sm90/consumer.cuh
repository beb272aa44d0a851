/* The consumers of sm90's backward kernel: two warpgroups of 64 slots each. For each step they
 * compute
 *   S^T = K Q^T, dP^T = V dO^T, P = 2^(S - lse), dS = P (dP - delta), dV += P^T dO, dK += dS^T Q
 * with keys as rows, so that P goes from registers into the next product; and, from the dS of all
 * slots in shared memory, half of the channels each of dQ = dS K.
 * Source: FlashAttention-3, arXiv:2407.08608, for the roles. */
#pragma once

#include "cuda/backward/sm90/dq.cuh"
#include "cuda/backward/sm90/dropout.cuh"
#include "cuda/backward/sm90/mask.cuh"

template <class config> struct backward_consumer {
    using element = typename config::element;
    static constexpr int product_registers = config::own_queries / 2; // of 64 slots
    static constexpr int sum_registers = config::own_channels / 2;    // of dk, of dv
    // softcap leaves no registers to hold dq while the next step's weights are computed
    static constexpr bool adds_dq_first = config::has_softcap || config::is_narrow;

    using products = float[product_registers];
    using columns = float2[product_registers / 4];            // lse or delta of a lane's queries
    using pairs = uint32_t[config::own_queries / wgmma_k][4]; // 16-bit pairs, as wgmma takes them
    using dq_tile = float[config::dq_registers];

    /* What the weights of a step depend on, beside the scores. */
    struct step_inputs {
        int2 kept[2]; // of this thread's rows: the positions that keep the key
        float bias[2];
        int32_t first; // position of the first query
        columns lse;   // read later with softcap, for lack of registers
    };

    backward_memory<config> *memory;
    float softcap_scale;
    int32_t index; // of the consumer
    int32_t generation;
    float dbias[2]; // of this thread's rows
    float dk[sum_registers], dv[sum_registers];

    /* This consumer's first slot in the slot block. */
    __device__ int32_t first_slot(void) const {
        return config::is_wide ? 0 : index * config::warpgroup_slots;
    }

    /* This consumer's first query in a step. */
    __device__ int32_t first_query(void) const {
        return config::is_wide ? index * config::own_queries : 0;
    }

    /* The slot of this thread's first row; its second row is eight slots later. */
    __device__ int32_t own_row(void) const {
        return first_slot() + threadIdx.x % warpgroup_threads / 32 * 16 + threadIdx.x % 32 / 4;
    }

    static __device__ int32_t stage_of(int32_t step) { return step % config::stages; }

    __device__ dq_adder<config> adder(void) const { return {memory, index}; }

    __device__ void wait_step(int32_t step) {
        wait(&memory->step_ready[stage_of(step)], step / config::stages % 2);
    }

    /* Issues d = keys queries^T: the rows of k or v by those of a step's q or dout. */
    template <bool reuses = false>
    __device__ void issue_product(products &d, const uint8_t *keys, const uint8_t *queries) {
        const uint32_t a = opaque(shared_address(keys) + first_slot() * line_bytes);
        const uint32_t b = shared_address(queries) + first_query() * line_bytes;
        wgmma_fence();
        if constexpr (reuses)
            issue_abt_reusing<element, config::channels, config::slots, config::q_rows>(d, a, b);
        else
            issue_abt<element, config::channels, config::slots, config::q_rows>(d, a, b);
        wgmma_commit_group();
    }

    __device__ void issue_s(products &s, int32_t step) {
        issue_product(s, memory->k, memory->q[stage_of(step)]);
    }

    /* over_s: in the registers of S, so that dq keeps its own until it has been added. */
    template <bool over_s> __device__ void issue_dp(products &dp, int32_t step) {
        issue_product<over_s>(dp, memory->v, memory->dout[stage_of(step)]);
    }

    /* Where the columns of this lane begin in lse or delta of a step. */
    __device__ const float2 *own_columns(const float *row) const {
        return (const float2 *)(row + first_query()) + threadIdx.x % 4;
    }

    /* Reads what weigh() needs of a step, while its scores are multiplied. */
    __device__ void read_inputs(const backward_plan &plan, int32_t step, step_inputs &to) const {
        const slot_record *const slots = &memory->slots[generation % slots_buffers][own_row()];
        to.first = memory->header[stage_of(step)].first;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const slot_record row = slots[8 * i];
            to.kept[i] = kept_positions<config>(plan, row);
            to.bias[i] = row.bias;
        }
        if (config::reads_ahead)
            read_columns(own_columns(memory->lse[stage_of(step)]), to.lse);
    }

    /* Clears the weights of a step that attn_mask does not let through. True if there are any in
     * the warp. */
    __device__ bool apply_mask(int32_t stage, pairs &weights, pairs &sloped) const {
        uint32_t words[product_registers / 16][2], all = ~0u;
#pragma unroll
        for (int k = 0; k < product_registers / 16; k++)
#pragma unroll
            for (int row = 0; row < 2; row++) {
                const uint2 &both = memory->mask[stage][own_row() + 8 * row];
                const uint32_t word = k + first_query() / 32 == 0 ? both.x : both.y;
                all &= word;
                words[k][row] = word >> threadIdx.x % 4 * 2;
            }
        if (__all_sync(~0u, all == ~0u))
            return false;
        mask_pairs(words, weights);
        if (config::has_softcap)
            mask_pairs(words, sloped);
        return true;
    }

    /* P = 2^(S - lse) of a step, 0 where the query does not keep the key, and with its sign set
     * where dropout drops the pair. With softcap also P times the derivative of softcap, in
     * `sloped`. Both only in pairs, for lack of registers. True if some entry of the warp may be
     * masked. */
    __device__ bool weigh(const backward_plan &plan, int32_t step, step_inputs &inputs,
                          const products &s, pairs &weights, pairs &sloped) const {
        const int2(&kept)[2] = inputs.kept;
        const int32_t first = inputs.first + first_query(), last = first + config::own_queries - 1;
        const bool is_cut = max(kept[0].x, kept[1].x) > first || min(kept[0].y, kept[1].y) <= last;
        if constexpr (config::has_softcap)
            weigh_softcapped(plan, step, inputs.bias, s, weights, sloped);
        else
            weigh_plain(plan, step, inputs, s, weights);
        bool is_masked;
        if constexpr (config::is_listed) {
            is_masked = apply_mask(stage_of(step), weights, sloped);
        } else {
            is_masked = __any_sync(~0u, is_cut);
            if (is_masked) {
                mask_pairs(first + threadIdx.x % 4 * 2, kept, weights);
                if (config::has_softcap)
                    mask_pairs(first + threadIdx.x % 4 * 2, kept, sloped);
            }
        }
        if constexpr (config::drops)
            mark_dropped(plan, *memory, opaque(stage_of(step)), generation % slots_buffers,
                         own_row(), first_query(), weights);
        return is_masked;
    }

    __device__ void weigh_plain(const backward_plan &plan, int32_t step, step_inputs &inputs,
                                const products &s, pairs &weights) const {
        if (!config::reads_ahead)
            read_columns(own_columns(memory->lse[stage_of(step)]), inputs.lse);
        const float unit = plan.forward.scale * log2_e;
#pragma unroll
        for (int i = 0; i < product_registers; i += 2) {
            const float2 column = inputs.lse[i / 4];
            const float b = inputs.bias[i / 2 % 2];
            weights[i / 8][i / 2 % 4] =
                element_type<element>::pack(ex2_approx(fmaf(s[i], unit, b - column.x)),
                                            ex2_approx(fmaf(s[i + 1], unit, b - column.y)));
        }
    }

    __device__ void weigh_softcapped(const backward_plan &plan, int32_t step,
                                     const float (&bias)[2], const products &s, pairs &weights,
                                     pairs &sloped) const {
        const float unit = plan.forward.softcap * log2_e;
        const float2 *const lse = own_columns(memory->lse[stage_of(step)]);
#pragma unroll
        for (int i = 0; i < product_registers; i += 2) {
            if (i % 8 == 0)
                __syncwarp(); // so that lse is not loaded all at once: registers do not suffice
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

    /* dS = P (dP - delta) of a step; its sums go to dbias. masked: where P is 0, dS is 0 even if dP
     * is NaN. With dropout dP is 0 where the sign of P is set. */
    template <bool masked>
    __device__ void differentiate(const backward_plan &plan, const columns &delta,
                                  const products &dp, const pairs &weights, const pairs &sloped,
                                  pairs &ds) {
        float sums[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < product_registers; i += 2) {
            const float2 column = delta[i / 4];
            float2 p = unpack<element>(weights[i / 8][i / 2 % 4]);
            float low = dp[i] - column.x, high = dp[i + 1] - column.y;
            if constexpr (config::drops) {
                const float factor = plan.forward.dropout_scale;
                low = fmaf(signbit(p.x) ? 0 : dp[i], factor, -column.x);
                high = fmaf(signbit(p.y) ? 0 : dp[i + 1], factor, -column.y);
                p = make_float2(fabsf(p.x), fabsf(p.y));
            }
            float2 both = make_float2(masked && p.x == 0 ? 0 : p.x * low,
                                      masked && p.y == 0 ? 0 : p.y * high);
            sums[i / 2 % 2] += both.x + both.y;
            if constexpr (config::has_softcap) {
                const float2 slope = unpack<element>(sloped[i / 8][i / 2 % 4]);
                both = make_float2(masked && p.x == 0 ? 0 : slope.x * low,
                                   masked && p.y == 0 ? 0 : slope.y * high);
            }
            ds[i / 8][i / 2 % 4] = element_type<element>::pack(both.x, both.y);
        }
        add_dbias(sums);
    }

    __device__ void differentiate(const backward_plan &plan, bool is_masked, const columns &delta,
                                  const products &dp, const pairs &weights, const pairs &sloped,
                                  pairs &ds) {
        if (is_masked || config::has_softcap) // with softcap, a second path spills registers
            differentiate<true>(plan, delta, dp, weights, sloped, ds);
        else
            differentiate<false>(plan, delta, dp, weights, sloped, ds);
    }

    __device__ void add_dbias(const float (&sums)[2]) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (config::dbias_in_shared) {
                const float sum = quad_sum(sums[i]);
                if (threadIdx.x % 4 == 0)
                    memory->dbias[generation % 2][index][own_row() + 8 * i] += sum;
            } else {
                dbias[i] += sums[i];
            }
        }
    }

    /* Returns dbias of row i up to this generation, in the first lane of the quad, and starts again
     * from 0 if the slot's key changes. */
    __device__ float take_dbias(int i, bool changes) {
        if constexpr (config::dbias_in_shared) {
            const int32_t row = own_row() + 8 * i, past = (generation + 1) % 2;
            if (threadIdx.x % 4 != 0 || (config::is_wide && index > 0))
                return 0;
            float sum = generation == 0 ? 0 : memory->dbias_before[row];
#pragma unroll
            for (int i = 0; i < config::consumers; i++) {
                sum += memory->dbias[past][i][row];
                memory->dbias[past][i][row] = 0;
            }
            memory->dbias_before[row] = changes ? 0 : sum;
            return sum;
        } else {
            const float sum = quad_sum(dbias[i]);
            dbias[i] = changes ? 0 : dbias[i];
            return sum;
        }
    }

    /* Writes P or dS to shared memory as [slot][query], where both consumers read it. */
    __device__ void store_pairs(const uint8_t *block, const pairs &packed) {
        const int thread = opaque(threadIdx.x) % warpgroup_threads, lane = thread % 32;
        const int row = first_slot() + thread / 32 * 16 + lane % 16;
        const uint32_t to = shared_address(block) + swizzled(row, first_query() / 8 + lane / 16);
#pragma unroll
        for (int j = 0; j < config::own_queries / wgmma_k; j++)
            stmatrix_x4(to ^ j * 2 * vec_bytes, packed[j]);
    }

    __device__ const uint8_t *ds_block(int32_t step) const {
        return memory->ds[step % config::ds_buffers];
    }

    __device__ void store_ds(int32_t step, const pairs &ds) {
        if (config::is_narrow) // until all warps have read the dS before it
            sync_consumer(index);
        store_pairs(ds_block(step), ds);
        fence_proxy_async();
        sync_consumer(index);
        if (threadIdx.x % warpgroup_threads == 0)
            mbarrier_arrive(&memory->ds_ready[step % 2]);
    }

    /* Waits until both consumers have stored their dS. */
    __device__ void wait_ds(int32_t step) { wait(&memory->ds_ready[step % 2], step / 2 % 2); }

    /* Issues dQ = dS K for the n-th dq_columns channels of this consumer. */
    __device__ void issue_dq(dq_tile &dq, int32_t step, int n = 0) {
        const int channel = index * config::dq_channels + n * config::dq_columns;
        const uint32_t keys = shared_address(memory->k) +
                              channel / panel_channels * config::slots * line_bytes +
                              channel % panel_channels * 2;
        wgmma_fence();
        issue_atb<element, config::slots, config::slots / wgmma_k>(
            dq, shared_address(ds_block(step)), opaque(keys));
        wgmma_commit_group();
    }

    /* Issues dV += P^T dO, with P from registers. */
    __device__ void issue_dv(const pairs &weights, int32_t step) {
        wgmma_fence();
        issue_ab<element, config::q_rows, config::q_rows / wgmma_k>(
            dv, weights, shared_address(memory->dout[stage_of(step)]));
        wgmma_commit_group();
    }

    /* Issues sums += block rows, with P or dS from shared memory. */
    __device__ void issue_sums(float (&sums)[sum_registers], const uint8_t *block,
                               const uint8_t *rows) {
        const int panel = config::is_wide ? index * config::own_channels / panel_channels : 0;
        wgmma_fence();
        issue_ab<element, config::q_rows, config::q_rows / wgmma_k>(
            sums, opaque(shared_address(block) + first_slot() * line_bytes),
            shared_address(rows) + panel * config::q_rows * line_bytes);
        wgmma_commit_group();
    }

    __device__ void issue_dk(int32_t step) {
        issue_sums(dk, ds_block(step), memory->q[stage_of(step)]);
    }

    __device__ void issue_wide_dv(int32_t step) {
        issue_sums(dv, memory->p, memory->dout[stage_of(step)]);
    }

    /* Adds dq of a step, whose first channels have been issued. */
    __device__ void finish_dq(const backward_plan &plan, const backward_pass &pass, int32_t step,
                              const step_header &header, dq_tile &dq) {
        wgmma_wait_group<0>();
        adder().add(plan, pass, header, dq);
#pragma unroll 1
        for (int n = 1; n < config::dq_products; n++) {
            issue_dq(dq, step, n);
            wgmma_wait_group<0>();
            adder().add(plan, pass, header, dq, n);
        }
    }

    /* The steps of a generation from `now` on; returns the first step of the next one. dq needs the
     * dS of both consumers, so it is multiplied together with the next step's S: then neither
     * consumer has to wait for the other. What a product is combined with is read from shared
     * memory before the wait for it, as such reads take long while wgmma reads too. */
    __device__ int32_t run_generation(const backward_plan &plan, const backward_pass &pass,
                                      int32_t now) {
        products s;
        dq_tile dq;
        pairs weights, kept, sloped, ds;
        step_inputs inputs;
        wait_step(now);
        issue_s(s, now);
        read_inputs(plan, now, inputs);
        wgmma_wait_group<0>();
        bool is_masked = weigh(plan, now, inputs, s, weights, sloped);
        for (;; now++) {
            issue_dp<config::keeps_dq>(s, now);
            clear_dropped<config::drops>(weights, kept);
            issue_dv(kept, now);
            const step_header header = memory->header[stage_of(now)];
            columns delta;
            if (config::reads_ahead)
                read_columns(own_columns(memory->delta[stage_of(now)]), delta);
            wgmma_wait_group<0>();
            if (!config::reads_ahead)
                read_columns(own_columns(memory->delta[stage_of(now)]), delta);
            differentiate(plan, is_masked, delta, s, weights, sloped, ds);
            store_ds(now, ds);
            issue_dk(now);
            if (header.is_last) {
                wait_ds(now);
                issue_dq(dq, now);
                finish_dq(plan, pass, now, header, dq);
                release(&memory->step_free[stage_of(now)]);
                return now + 1;
            }
            const int32_t next = now + 1;
            wait_step(next);
            issue_s(s, next);
            wait_ds(now);
            issue_dq(dq, now);
            read_inputs(plan, next, inputs);
            wgmma_wait_group<1>(); // for dk and S, not for dq
            release(&memory->step_free[stage_of(now)]);
            if (adds_dq_first)
                finish_dq(plan, pass, now, header, dq);
            is_masked = weigh(plan, next, inputs, s, weights, sloped);
            if (!adds_dq_first)
                finish_dq(plan, pass, now, header, dq);
        }
    }

    /* The same in the wide form, where the consumers share P and dS and so keep step. */
    __device__ int32_t run_wide_generation(const backward_plan &plan, const backward_pass &pass,
                                           int32_t now) {
        for (bool is_last = false; !is_last; now++) {
            products s, dp;
            pairs weights, kept, sloped, ds;
            step_inputs inputs;
            columns delta;
            wait_step(now);
            issue_s(s, now);
            issue_dp<false>(dp, now);
            read_inputs(plan, now, inputs);
            const step_header header = memory->header[stage_of(now)];
            is_last = header.is_last;
            wgmma_wait_group<1>(); // for S
            const bool is_masked = weigh(plan, now, inputs, s, weights, sloped);
            clear_dropped<config::drops>(weights, kept);
            store_pairs(memory->p, kept);
            read_columns(own_columns(memory->delta[stage_of(now)]), delta);
            wgmma_wait_group<0>();
            differentiate(plan, is_masked, delta, dp, weights, sloped, ds);
            store_ds(now, ds);
            wait_ds(now);
            multiply_wide(plan, pass, now, header);
            release(&memory->step_free[stage_of(now)]);
            // until both consumers have read P and dS
            bar_sync(all_barrier, config::consumers * warpgroup_threads);
        }
        return now;
    }

    __device__ void multiply_wide(const backward_plan &plan, const backward_pass &pass, int32_t now,
                                  const step_header &header) {
        dq_tile dq;
        issue_dq(dq, now);
        issue_wide_dv(now);
        wgmma_wait_group<1>();
        adder().add(plan, pass, header, dq);
        issue_dq(dq, now, 1);
        issue_dk(now);
        wgmma_wait_group<1>();
        adder().add(plan, pass, header, dq, 1);
        wgmma_wait_group<0>();
    }

    /* Takes over the slots of the next generation, and writes the gradients of the keys that leave.
     * False if there is no next generation. */
    __device__ bool take_slots(const backward_plan &plan, const backward_pass &pass) {
        wait(&memory->slots_ready, generation & 1);
        const bool is_over = memory->is_over != 0;
        release(&memory->keys_free);
#pragma unroll
        for (int i = 0; i < 2; i++)
            change_row(plan, pass, i);
        return !is_over;
    }

    /* Writes the gradients of row i of this thread if its slot changes its key, and clears them. */
    __device__ void change_row(const backward_plan &plan, const backward_pass &pass, int i) {
        const int32_t slot = own_row() + 8 * i;
        const int32_t next = memory->slots[generation % slots_buffers][slot].key;
        const slot_record leaving = generation == 0
                                        ? slot_record{-1, 0, 0, {0}}
                                        : memory->slots[(generation - 1) % slots_buffers][slot];
        const bool changes = generation == 0 || next != leaving.key;
        const float dbias = take_dbias(i, changes);
        if (!__any_sync(~0u, changes))
            return;
        const gradient_row row = {leaving.key, plan.forward.causal ? leaving.boundary : 0, slot,
                                  config::is_wide ? index * config::own_channels : 0,
                                  changes && leaving.key >= 0};
        if (config::is_listed) {
            add_to_key_sums<config>(plan, memory->work, row, i, dbias, dk, dv);
        } else if (__any_sync(~0u, row.is_written)) {
            write_sums<config>(plan, memory->work, row, i, dk, dv);
            write_rest<config>(plan, memory->work, row, i, dbias, dk, dv);
        }
#pragma unroll
        for (int c = 2 * i; c < sum_registers; c += 4) {
            dk[c] = changes ? 0 : dk[c];
            dk[c + 1] = changes ? 0 : dk[c + 1];
            dv[c] = changes ? 0 : dv[c];
            dv[c + 1] = changes ? 0 : dv[c + 1];
        }
    }

    __device__ void run(const backward_plan &plan, const backward_pass &pass) {
        int32_t step = 0; // since the start of the kernel
        for (generation = 0; take_slots(plan, pass); generation++) {
            wait(&memory->keys_ready, generation & 1);
            fence_proxy_async();
            if constexpr (config::is_wide)
                step = run_wide_generation(plan, pass, step);
            else
                step = run_generation(plan, pass, step);
        }
        if (pass.dq_semaphore != NULL)
            adder().release_semaphore(pass);
        if (config::stages_dq && threadIdx.x % 32 == 0)
            cp_async_bulk_wait_group_read(); // of shared memory, before it is another block's
    }
};
