/* The output of sm90's backward kernel: dk, dv and dbias of a key that leaves its slot, which is
 * the epilogue of a generation, and dq of a step, which is added to the sums of all slot blocks, or
 * written if nothing more is added. A separate kernel makes dq from those sums. */
#pragma once

#include "cuda/backward/sm90/backward.cuh"
#include "cuda/device/softmax.cuh"

template <typename element> __device__ static uint32_t add_pairs(uint32_t x, uint32_t y) {
    const float2 a = unpack<element>(x), b = unpack<element>(y);
    return element_type<element>::pack(a.x + b.x, a.y + b.y);
}

template <typename element>
__device__ static uint4 add_words(uint4 old, const uint32_t (&words)[4]) {
    return make_uint4(add_pairs<element>(old.x, words[0]), add_pairs<element>(old.y, words[1]),
                      add_pairs<element>(old.z, words[2]), add_pairs<element>(old.w, words[3]));
}

/* The dk or dv of one slot, which the four lanes of a quad hold. */
struct gradient_row {
    int32_t key, boundary;
    int32_t slot;    // in the slot block
    int32_t channel; // the first of the quad's channels
    bool is_written;
};

/* Writes row i of a thread's sums, times factor, to a row of 16-bit elements, or adds them to it.
 * By a whole warp. */
template <typename element, int registers>
__device__ static void write_row(element *to, int32_t channels, bool is_written, bool adds, int i,
                                 float factor, const float (&sums)[registers]) {
#pragma unroll
    for (int n = 0; n < 2 * registers / quad_channels; n++) {
        // opaque: the compiler would keep the results of the comparisons, and run out of predicates
        const int channel = opaque(n * quad_channels + 8 * (threadIdx.x % 4));
        uint32_t words[4];
#pragma unroll
        for (int k = 0; k < 4; k++) {
            const int at = (n * quad_channels / 8 + k) * 4 + 2 * i;
            words[k] = element_type<element>::pack(sums[at] * factor, sums[at + 1] * factor);
        }
        transpose_quad(words);
        if (!is_written || channel >= channels)
            continue;
        if (adds)
            red_add_x8(to + channel, words);
        else
            *(uint4 *)(to + channel) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* Adds row i of a thread's sums, times factor, to a row of float32. */
template <int registers>
__device__ static void add_sums(float *to, int32_t head_dim, int i, float factor,
                                const float (&sums)[registers]) {
#pragma unroll
    for (int c = 0; c < registers; c += 4) {
        const int channel = opaque(2 * c + 2 * (threadIdx.x % 4)), at = c + 2 * i;
        if (channel < head_dim)
            red_add_v2(to + channel, sums[at] * factor, sums[at + 1] * factor);
    }
}

template <class config> __device__ static float dv_factor(const backward_plan &plan) {
    return config::drops ? plan.forward.dropout_scale : 1;
}

/* Writes row i of a thread's dk and dv, unless they go to a boundary. */
template <class config, int registers>
__device__ static void write_sums(const backward_plan &plan, const backward_work &work,
                                  const gradient_row &row, int i, const float (&dk)[registers],
                                  const float (&dv)[registers]) {
    using element = typename config::element;
    const int32_t channels = plan.forward.head_dim - row.channel;
    const bool is_own = row.is_written && row.boundary == 0;
    const bool adds = plan.accumulate || config::is_diagonal;
    const int32_t key = max(row.key, 0);
    element *const dk_row = dk_of_key<element>(plan, work.b, work.g, key) + row.channel;
    element *const dv_row = dv_of_key<element>(plan, work.b, work.g, key) + row.channel;
    write_row(dk_row, channels, is_own, adds, i, plan.forward.scale, dk);
    write_row(dv_row, channels, is_own, adds, i, dv_factor<config>(plan), dv);
}

/* Writes the row's dbias, and adds the row's sums to its boundary, if it has one. */
template <class config, int registers>
__device__ static void write_rest(const backward_plan &plan, const backward_work &work,
                                  const gradient_row &row, int i, float dbias,
                                  const float (&dk)[registers], const float (&dv)[registers]) {
    // one lane of the quad, and one consumer, writes dbias
    const bool is_first = threadIdx.x % 4 == 0 && row.channel == 0;
    if (!row.is_written)
        return;
    if (!config::is_diagonal && row.boundary > 0) {
        const int32_t head_dim = plan.forward.head_dim;
        const int64_t at = boundary_row(plan, work.head, row.boundary, work.first_slot + row.slot);
        if (is_first)
            atomicAdd(&plan.boundary.dbias[at], dbias);
        const int64_t to = at * head_dim + row.channel;
        add_sums(plan.boundary.dk + to, head_dim - row.channel, i, plan.forward.scale, dk);
        add_sums(plan.boundary.dv + to, head_dim - row.channel, i, dv_factor<config>(plan), dv);
    } else if (plan.dbias.data != NULL && is_first) {
        float *const to = dbias_of_key(plan, work.b, work.g, row.key);
        *to = config::is_diagonal || adds_dbias(plan, row.key) ? *to + dbias : dbias;
    }
}

template <int registers>
__device__ static void add_row(float *to, int i, const float (&sums)[registers]) {
#pragma unroll
    for (int c = 2 * i; c < registers; c += 8)
        red_add_v4(to + 2 * c + threadIdx.x % 4 * 4 - 4 * i, sums[c], sums[c + 1], sums[c + 4],
                   sums[c + 5]);
}

/* Adds row i of a thread's dk, dv and dbias to key_sums and to dbias, in the listed pass. */
template <class config, int registers>
__device__ static void add_to_key_sums(const backward_plan &plan, const backward_work &work,
                                       const gradient_row &row, int i, float dbias,
                                       const float (&dk)[registers], const float (&dv)[registers]) {
    if (!row.is_written)
        return;
    const int64_t at = (int64_t)work.head * plan.forward.kv_len + row.key;
    float *const to = plan.key_sums + at * (2 * config::channels) + row.channel;
    add_row(to, i, dk);
    add_row(to + config::channels, i, dv);
    if (plan.dbias.data != NULL && threadIdx.x % 4 == 0 && row.channel == 0)
        atomicAdd(dbias_of_key(plan, work.b, work.g, row.key), dbias);
}

/* Writes dq of tile `head_tile` of 64 queries of (b, h), for the 32 channels from c on. The sums
 * are laid out as accumulators. By a warpgroup. */
template <class config>
__device__ static void write_dq_columns(const backward_plan &plan, int32_t b, int32_t h,
                                        int32_t head_tile, int c, const float4 (&sums)[4]) {
    using element = typename config::element;
    const forward_plan &forward = plan.forward;
    const int32_t thread = threadIdx.x % warpgroup_threads;
    const int channel = c + 8 * (thread % 4);
    element *const rows = (element *)plan.dq.data + b * plan.dq.batch + h * plan.dq.head;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t query = head_tile * q_tile_rows + thread / 32 * 16 + thread % 32 / 4 + 8 * i;
        uint32_t words[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            words[n] = element_type<element>::pack((i ? sums[n].z : sums[n].x) * forward.scale,
                                                   (i ? sums[n].w : sums[n].y) * forward.scale);
        transpose_quad(words);
        if (query >= forward.q_len || channel >= forward.head_dim)
            continue;
        uint4 *const to = (uint4 *)(rows + query * plan.dq.row + channel);
        *to = plan.accumulate ? add_words<element>(*to, words)
                              : make_uint4(words[0], words[1], words[2], words[3]);
    }
}

/* Adds the dq of a consumer to dq_sum, or writes it if nothing more is added. */
template <class config> struct dq_adder {
    using dq_tile = float[config::dq_registers];

    backward_memory<config> *memory;
    int32_t index; // of the consumer

    /* Adds the sums in dq_sum to these channels of dq, and writes them. The thread itself made the
     * additions of this pass, and the slot pass is complete. is_loaded: `from` is in
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

    /* write_last_dq() if the sums are loaded to shared memory. */
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
     * has begun. The wait for the previous operation to read its rows is short, because it was
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
                cp_async_bulk_wait_group<1>(); // dq of the previous step has been added
                mbarrier_arrive(&memory->dq_added);
            }
        }
    }

    /* add_bulk() by each thread, from its registers. */
    static __device__ void add_vectors(const dq_tile &dq, float *to) {
        constexpr int stored = config::stored_registers;
#pragma unroll
        for (int i = 0; i < config::dq_registers; i += 4) {
            float *const sums = to + i / stored * (warpgroup_warps * stored * 32);
            red_add_v4(sums + i % stored * 32, dq[i], dq[i + 1], dq[i + 2], dq[i + 3]);
        }
    }

    /* Adds dq of this consumer's tile to sums that no other thread block has: the first step of the
     * tile stores them, and the last one writes dq instead. */
    __device__ void add_own(const backward_plan &plan, const backward_pass &pass, int32_t step,
                            const dq_tile &dq) const {
        constexpr int stored = config::stored_registers, block = warpgroup_warps * stored * 32;
        const step_header &header = memory->header[opaque(step) % config::stages];
        const int32_t thread = opaque(threadIdx.x) % warpgroup_threads;
        const int own_tile = config::is_long ? index : 0, first = config::is_long ? 0 : index;
        float *const to =
            dq_sum_of<config>(pass, header.tile + own_tile, first, thread / 32) + thread % 32 * 4;
        if (!header.writes_dq && !header.is_first) {
            add_vectors(dq, to);
            return;
        }
#pragma unroll
        for (int i = 0; i < config::dq_registers; i += 16) {
            float4 *const sums = (float4 *)(to + i / stored * block + i % stored * 32);
            float4 four[4];
#pragma unroll
            for (int k = 0; k < 4; k++)
                four[k] = header.is_first ? make_float4(0, 0, 0, 0) : __ldcg(sums + 32 * k);
#pragma unroll
            for (int k = 0; k < 4; k++) {
                const float *const own = &dq[i + 4 * k];
                four[k] = make_float4(four[k].x + own[0], four[k].y + own[1], four[k].z + own[2],
                                      four[k].w + own[3]);
                if (!header.writes_dq)
                    sums[32 * k] = four[k];
            }
            if (header.writes_dq)
                write_dq_columns<config>(plan, memory->work.b, header.h,
                                         header.head_tile + own_tile,
                                         first * config::dq_channels + 2 * i, four);
        }
    }

    /* Adds the n-th product of dq of this consumer to dq_sum, or writes it if nothing more is added
     * to it. */
    __device__ void add(const backward_plan &plan, const backward_pass &pass, int32_t step,
                        const step_header &header, const dq_tile &dq, int n = 0) {
        if constexpr (config::may_own_dq)
            if (pass.owns_dq) {
                add_own(plan, pass, step, dq);
                return;
            }
        const int32_t thread = opaque(threadIdx.x) % warpgroup_threads;
        // in the long form a consumer has all channels of one tile
        const int32_t tile = header.tile + (config::is_long ? index : 0);
        const int first = config::is_long ? 0 : index * config::dq_products + n;
        float *const to = dq_sum_of<config>(pass, tile, first, thread / 32);
        float *const own = to + thread % 32 * 4;
        if (config::loads_dq && header.writes_dq && header.is_first) {
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

/* Writes dq from dq_sum, if no diagonal pass does. A thread block takes a tile of 64 queries. */
template <class config>
static __global__ void __launch_bounds__(warpgroup_threads)
    write_dq(const __grid_constant__ backward_plan plan,
             const __grid_constant__ backward_pass pass) {
    const int32_t tile = blockIdx.x, head = tile / pass.tiles;
#pragma unroll
    for (int c = 0; c < config::channels; c += quad_channels) {
        const float4 *const sums = (const float4 *)dq_sum_of<config>(
            pass, tile, c / config::stored_columns, threadIdx.x / 32);
        float4 four[4];
#pragma unroll
        for (int n = 0; n < 4; n++)
            four[n] = sums[(c % config::stored_columns / 8 + n) * 32 + threadIdx.x % 32];
        write_dq_columns<config>(plan, head / plan.forward.q_heads, head % plan.forward.q_heads,
                                 tile % pass.tiles, c, four);
    }
}
