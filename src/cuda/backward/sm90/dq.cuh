/* Adds the dq that a consumer makes to the sums of all slot blocks, or writes it where nothing more
 * is added. */
#pragma once

#include "cuda/backward/sm90/rows.cuh"

// named barriers of the consumers: one of all, and one of each after it
static constexpr int all_barrier = 2;

__device__ static void sync_consumer(int32_t index) {
    bar_sync(all_barrier + 1 + index, warpgroup_threads);
}

template <class config> struct dq_adder {
    using dq_tile = float[config::dq_registers];

    backward_memory<config> *memory;
    int32_t index; // of the consumer

    /* Adds what dq_sum has of these channels of dq, and writes them. The thread itself has made
     * the additions of this pass, and those of the slot pass are over. is_loaded: `from` is in
     * shared memory, instead of dq_sum. */
    template <bool is_loaded>
    __device__ void write_last_dq(const backward_plan &plan, const step_header &header,
                                  const float *from, const dq_tile &dq, int n) {
        const int first = index * config::dq_channels + n * config::dq_columns;
#pragma unroll
        for (int i = 0; i < config::dq_registers; i += 16) {
            float4 four[4];
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float4 *const own = (const float4 *)(from + (i + 4 * k) * 32);
                four[k] = is_loaded ? *own : __ldcg(own);
            }
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float *const own = &dq[i + 4 * k];
                four[k] = make_float4(four[k].x + own[0], four[k].y + own[1], four[k].z + own[2],
                                      four[k].w + own[3]);
            }
            write_dq_columns<config>(plan, memory->work.b, header.h, header.head_tile,
                                     first + i / 16 * quad_channels, four);
        }
    }

    /* The same where the sums are loaded to shared memory. */
    __device__ void write_loaded_dq(const backward_plan &plan, const step_header &header,
                                    const dq_tile &dq, int n) {
        const int32_t thread = opaque(threadIdx.x) % warpgroup_threads;
        if (n == 0)
            wait(&memory->dq_ready, header.dq_phase);
        const float *const own = memory->dq[index * config::dq_products + n][thread / 32];
        write_last_dq<true>(plan, header, own + thread % 32 * 4, dq, n);
        if (n == config::dq_products - 1)
            release(&memory->dq_free);
    }

    /* Adds dq to dq_sum by a bulk operation of each warp; if is_ordered, once the turn of the step
     * has begun. The wait until the previous one has read its rows is short, because that was
     * issued a step ago. */
    __device__ void add_bulk(const dq_tile &dq, float *to, bool is_ordered, int32_t step) {
        const int32_t lane = threadIdx.x % 32;
        float *const own = memory->dq[index][threadIdx.x % warpgroup_threads / 32];
        if (lane == 0)
            cp_async_bulk_wait_group_read();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < config::dq_registers; i += 4)
            *(float4 *)(own + i * 32 + lane * 4) =
                make_float4(dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            if (is_ordered)
                wait(&memory->turn_begun, step & 1);
            cp_reduce_async_bulk_add(to, shared_address(own), config::dq_registers * 32 * 4);
            cp_async_bulk_commit_group();
            if (is_ordered) {
                cp_async_bulk_wait_group<1>(); // that of the step before has been added
                mbarrier_arrive(&memory->dq_added);
            }
        }
    }

    /* The same by each thread, from its registers. */
    static __device__ void add_vectors(const dq_tile &dq, float *to) {
        constexpr int stored = config::stored_registers;
#pragma unroll
        for (int i = 0; i < config::dq_registers; i += 4) {
            float *const sums = to + i / stored * (warpgroup_warps * stored * 32);
            red_add_v4(sums + i % stored * 32, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
        }
    }

    /* Adds the n-th product of dq of this consumer to dq_sum, or writes it if nothing more is added
     * to it. */
    __device__ void add(const backward_plan &plan, const backward_pass &pass, int32_t step,
                        const step_header &header, const dq_tile &dq, int n = 0) {
        const int32_t thread = opaque(threadIdx.x) % warpgroup_threads;
        // in the long form a consumer has all channels of one tile
        const int32_t tile = header.tile + (config::is_long ? index : 0);
        const int first = config::is_long ? 0 : index * config::dq_products + n;
        float *const to = dq_sum_of<config>(pass, tile, first, thread / 32);
        float *const own = to + thread % 32 * 4;
        if (config::loads_dq && header.is_only) {
            write_loaded_dq(plan, header, dq, n);
            return;
        }
        if (config::is_diagonal && header.writes_dq) {
            write_last_dq<false>(plan, header, own, dq, n);
            return;
        }
        const bool is_ordered = takes_turns<config>(pass);
        if (is_ordered && !config::stages_dq && n == 0)
            wait(&memory->turn_begun, step & 1);
        if constexpr (!config::stages_dq)
            add_vectors(dq, own);
        else
            add_bulk(dq, to, is_ordered, step);
    }
};
