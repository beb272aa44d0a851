/* The consumers of sm90's backward kernel: two warpgroups of 64 slots each. For each step they
 * compute
 *   S^T = K Q^T, dP^T = V dO^T, P = 2^(S - lse), dS = P (dP - delta), dV += P^T dO, dK += dS^T Q
 * with keys as rows, so that P and dS go from registers into the next products. From the dS of all
 * slots in shared memory each consumer makes half of dQ = dS K: half of the channels, or in the
 * long form one of the two tiles.
 *
 * P and dS stay in registers. A lane has two rows, which are slots, and the columns 8n and 8n + 1
 * after its first one, which are queries. The file has
 *
 *   weights   P from S, and dS from P and dP
 *   masks     clear the weights of pairs that are not kept
 *   dropout   marks the weights of pairs that are dropped; core/dropout.h has the codes
 *   consumer  the products of a step, the steps of a generation, the epilogue of a generation
 *
 * Source: FlashAttention-3, arXiv:2407.08608, for the roles. */
#pragma once

#include <type_traits>

#include "cuda/backward/sm90/gradients.cuh"
#include "cuda/backward/sm90/pairs.cuh"

/* The part of a step's array that belongs to its t-th tile. */
template <int tiles, typename item, int n> __device__ static auto &of_tile(item (&all)[n], int t) {
    using own = item[n / tiles];
    return (own &)all[t * (n / tiles)];
}

/* Reads a lane's columns of lse or delta: every fourth pair. */
template <int n> __device__ static void read_columns(const float2 *from, float2 (&to)[n]) {
#pragma unroll
    for (int i = 0; i < n; i++)
        to[i] = from[4 * i];
}

/* The inputs of the weights of a thread's rows in a generation. */
struct row_inputs {
    int2 kept[2]; // positions x <= p < y keep the key
    float bias[2];
};

/* True if some query of a step does not keep a key of the warp's rows because of its position. */
template <int queries> __device__ static bool is_cut(const int2 (&kept)[2], int32_t first) {
    const int32_t last = first + queries - 1;
    return __any_sync(~0u, max(kept[0].x, kept[1].x) > first || min(kept[0].y, kept[1].y) <= last);
}

template <typename element, int n>
__device__ static void pack_products(const float (&p)[n], uint32_t (&packed)[n / 8][4]) {
#pragma unroll
    for (int i = 0; i < n; i += 2)
        packed[i / 8][i / 2 % 4] = element_type<element>::pack(p[i], p[i + 1]);
}

/* Replaces S by P = 2^(S - lse). */
template <int n>
__device__ static void weigh_products(float unit, const float (&bias)[2],
                                      const float2 (&lse)[n / 4], float (&s)[n]) {
#pragma unroll
    for (int i = 0; i < n; i += 2) {
        const float2 column = lse[i / 4];
        const float b = bias[i / 2 % 2];
        s[i] = ex2_approx(fmaf(s[i], unit, b - column.x));
        s[i + 1] = ex2_approx(fmaf(s[i + 1], unit, b - column.y));
    }
}

/* P with softcap, and P times the derivative of softcap in `sloped`. To save registers, both are
 * kept only as pairs of 16 bits, and lse is read from shared memory. */
template <class config, class pair_type, int n>
__device__ static void weigh_softcapped(float unit, float softcap_scale, const float (&bias)[2],
                                        const pair_type &pairs, const float2 *lse,
                                        const float (&s)[n], uint32_t (&weights)[n / 8][4],
                                        uint32_t (&sloped)[n / 8][4]) {
    using element = typename config::element;
#pragma unroll
    for (int i = 0; i < n; i += 2) {
        if (i % 8 == 0)
            __syncwarp(); // so that lse is not loaded all at once, which takes too many registers
        const float2 column = lse[i / 4 * 4];
        float p[2], slope[2];
#pragma unroll
        for (int k = 0; k < 2; k++) {
            const float t = tanh_of(s[i + k] * softcap_scale);
            const float base = bias[i / 2 % 2] - (k ? column.y : column.x);
            p[k] = ex2_approx(fmaf(t, unit, config::has_pairs ? base + pairs.scaled(i + k) : base));
            slope[k] = 1 - t * t;
        }
        weights[i / 8][i / 2 % 4] = element_type<element>::pack(p[0], p[1]);
        sloped[i / 8][i / 2 % 4] = element_type<element>::pack(p[0] * slope[0], p[1] * slope[1]);
    }
}

/* dS = P (dP - delta), from P in float32. Its sums over the columns are added to `sums`. With
 * attn_bias dS also replaces dP, in float32. */
template <class config, int n>
__device__ static void differentiate_products(const float2 (&delta)[n / 4], float (&dp)[n],
                                              const float (&p)[n], uint32_t (&ds)[n / 8][4],
                                              float (&sums)[2]) {
    using element = typename config::element;
#pragma unroll
    for (int i = 0; i < n; i += 2) {
        const float2 column = delta[i / 4];
        const float low = p[i] * (dp[i] - column.x), high = p[i + 1] * (dp[i + 1] - column.y);
        sums[i / 2 % 2] += low + high;
        ds[i / 8][i / 2 % 4] = element_type<element>::pack(low, high);
        if constexpr (config::has_pairs)
            dp[i] = low, dp[i + 1] = high;
    }
}

/* differentiate_products() from P in pairs. masked: where P is 0, dS is 0 even if dP is NaN. With
 * dropout dP is 0 where the sign of P is set, and otherwise multiplied by `factor`. */
template <class config, bool masked, int n>
__device__ static void differentiate_pairs(float factor, const float2 (&delta)[n / 4],
                                           float (&dp)[n], const uint32_t (&weights)[n / 8][4],
                                           const uint32_t (&sloped)[n / 8][4],
                                           uint32_t (&ds)[n / 8][4], float (&sums)[2]) {
    using element = typename config::element;
#pragma unroll
    for (int i = 0; i < n; i += 2) {
        const float2 column = delta[i / 4];
        float2 p = unpack<element>(weights[i / 8][i / 2 % 4]);
        float low = dp[i] - column.x, high = dp[i + 1] - column.y;
        if constexpr (config::drops) {
            low = fmaf(signbit(p.x) ? 0 : dp[i], factor, -column.x);
            high = fmaf(signbit(p.y) ? 0 : dp[i + 1], factor, -column.y);
            p = make_float2(fabsf(p.x), fabsf(p.y));
        }
        float2 both =
            make_float2(masked && p.x == 0 ? 0 : p.x * low, masked && p.y == 0 ? 0 : p.y * high);
        sums[i / 2 % 2] += both.x + both.y;
        if constexpr (config::has_pairs)
            dp[i] = both.x, dp[i + 1] = both.y;
        if constexpr (config::has_softcap) {
            const float2 slope = unpack<element>(sloped[i / 8][i / 2 % 4]);
            both = make_float2(masked && p.x == 0 ? 0 : slope.x * low,
                               masked && p.y == 0 ? 0 : slope.y * high);
        }
        ds[i / 8][i / 2 % 4] = element_type<element>::pack(both.x, both.y);
    }
}

/* The positions x <= p < y at which the key of a slot is kept. */
template <class config>
__device__ static int2 kept_positions(const backward_plan &plan, const slot_record &slot) {
    const bool arrives = config::is_diagonal || !plan.is_rolling;
    const int32_t from = plan.forward.causal ? slot.key : slot.from;
    return make_int2(arrives ? from : INT32_MIN, slot.expiry);
}

/* Bits of the 32 positions from `begin` on, set for those in a range. */
__device__ static uint32_t bits_of_range(const int2 &range, int32_t begin) {
    return low_bits((uint32_t)max(range.y, begin) - begin) &
           ~low_bits((uint32_t)max(range.x, begin) - begin);
}

/* Clears the elements that are not kept in row `row` of a lane, in the k-th 32 columns. Bit c of
 * `bits` is set if column c is kept, counted from the lane's first column. The lane has columns 8n
 * and 8n + 1 for each n, which are the two lowest bits of byte n. Shifted to the sign of the byte,
 * each becomes half a pair. */
template <int steps>
__device__ static void mask_columns(uint32_t bits, int k, int row, uint32_t (&packed)[steps][4]) {
#pragma unroll
    for (int n = 0; n < 4; n++)
        packed[2 * k + n / 2][n % 2 * 2 + row] &= prmt(bits << 7, bits << 6, 0xcc88 + n * 0x1111);
}

/* Clears the pairs of queries whose positions do not keep their key. first: position of the lane's
 * first column. */
template <int steps>
__device__ static void mask_pairs(int32_t first, const int2 (&kept)[2],
                                  uint32_t (&packed)[steps][4]) {
#pragma unroll
    for (int k = 0; k < steps / 2; k++)
#pragma unroll
        for (int row = 0; row < 2; row++)
            mask_columns(bits_of_range(kept[row], first + 32 * k), k, row, packed);
}

/* mask_pairs() by attn_mask. words: bits of 32 columns of each row, from the lane's first column
 * on. */
template <int steps>
__device__ static void mask_pairs(const uint32_t (&words)[steps / 2][2],
                                  uint32_t (&packed)[steps][4]) {
#pragma unroll
    for (int k = 0; k < steps / 2; k++)
#pragma unroll
        for (int row = 0; row < 2; row++)
            mask_columns(words[k][row], k, row, packed);
}

/* True if a pair is dropped, by the upper or the lower half of dropout_mix() of its codes, given
 * dropout_product(). limit: the threshold times 2^16. */
__device__ static bool drops_upper(uint32_t product, uint32_t limit) { return product < limit; }

__device__ static bool drops_lower(uint32_t product, uint32_t limit) {
    return (product ^ product << 16) < limit;
}

/* Sets the signs of the weights of dropped pairs; weights are never negative. queries: codes of the
 * positions of the lane's columns. Two columns share one if the first is even; otherwise the second
 * column has the code after it. keys: codes of the lane's two rows. */
template <bool is_odd, int steps>
__device__ static void mark_dropped(const row_code *queries, const uint32_t (&keys)[2],
                                    uint32_t threshold, uint32_t (&weights)[steps][4]) {
    const uint32_t limit = threshold << 16;
#pragma unroll
    for (int n = 0; n < 2 * steps; n++)
#pragma unroll
        for (int row = 0; row < 2; row++) {
            uint32_t &pair = weights[n / 2][n % 2 * 2 + row];
            const uint32_t first = dropout_product(queries[4 * n], keys[row]);
            const uint32_t second = is_odd ? dropout_product(queries[4 * n + 1], keys[row]) : first;
            if (is_odd ? drops_upper(first, limit) : drops_lower(first, limit))
                pair |= 0x8000;
            if (is_odd ? drops_lower(second, limit) : drops_upper(second, limit))
                pair |= 0x80000000;
        }
}

/* mark_dropped() for a step. row: the slot of a thread's first row; its second row is eight slots
 * later. query: the warpgroup's first query in the step. */
template <class config, int steps>
__device__ static void
mark_dropped(const backward_plan &plan, const backward_memory<config> &memory, int32_t stage,
             int32_t buffer, int32_t row, int32_t query, uint32_t (&weights)[steps][4]) {
    const step_header &header = memory.header[stage];
    const uint32_t *const slots = &memory.key_code[buffer][row];
    const uint32_t keys[2] = {slots[0], slots[8]}, threshold = plan.forward.dropout.threshold;
    const row_code *const queries = &memory.pair_code[stage][query / 2 + threadIdx.x % 4];
    if (header.is_odd)
        mark_dropped<true>(queries, keys, threshold, weights);
    else
        mark_dropped<false>(queries, keys, threshold, weights);
}

/* The weights that are not dropped: with dropout, 0 where the sign is set. */
template <bool drops, int steps>
__device__ static void clear_dropped(const uint32_t (&weights)[steps][4],
                                     uint32_t (&kept)[steps][4]) {
#pragma unroll
    for (int i = 0; i < 4 * steps; i++) {
        const uint32_t pair = weights[i / 4][i % 4];
        kept[i / 4][i % 4] = drops ? pair & ~prmt(pair, 0, 0xbb99) : pair;
    }
}

__device__ static void sync_consumer(int32_t index) {
    bar_sync(consumer_barrier + index, warpgroup_threads);
}

template <class config> struct backward_consumer {
    using element = typename config::element;
    static constexpr int product_registers = config::own_queries / 2; // of 64 slots
    static constexpr int sum_registers = config::own_channels / 2;    // of dk, of dv
    // softcap leaves no registers for dP while P is computed
    static constexpr bool overlaps_dp = !config::has_softcap;
    // S is added to attn_bias, which is loaded under the last products of the step before. With
    // softcap it is loaded before S is issued, and added later.
    static constexpr bool adds_s = config::has_pairs && !config::has_softcap;
    // P stays in float32 until dS has been computed, if nothing else needs it in pairs
    static constexpr bool keeps_p =
        !config::has_softcap && !config::drops && !config::is_listed && !config::is_wide;

    using products = float[product_registers];
    using pairs = uint32_t[config::own_queries / wgmma_k][4]; // 16-bit pairs, as wgmma takes them
    static constexpr int tiles = config::q_tiles;
    using tile_products = float[product_registers / tiles];
    using tile_pairs = uint32_t[config::own_queries / wgmma_k / tiles][4];
    // lse or delta of a lane's queries in a tile: two tiles need too many registers
    using columns = float2[product_registers / tiles / 4];
    using dq_tile = float[config::dq_registers];
    using step_pairs =
        std::conditional_t<config::has_pairs, pair_biases<product_registers>, no_pair_biases>;

    /* The inputs of the weights of a step, beside the scores and row_inputs. */
    struct step_inputs {
        int32_t first; // position of this consumer's first query
        columns lse;   // read later with softcap, to save registers
    };

    backward_memory<config> *memory;
    float softcap_scale;
    int32_t index; // of the consumer
    int32_t generation;
    bool meets_empty; // see meets_empty_rows()
    float dbias[2];   // of this thread's rows
    float dk[sum_registers], dv[sum_registers];

    __device__ int32_t first_slot(void) const {
        return config::is_wide ? 0 : index * config::warpgroup_slots;
    }

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
        if (meets_empty)
            clear_empty(stage_of(step));
    }

    /* True if some query that this thread block may load is an empty row; the same in all warps. */
    __device__ bool meets_empty_rows(const backward_plan &plan) const {
        static_assert(list_queries == sizeof(uint32_t) * empty_rows, "a word has a list's rows");
        const backward_work &work = memory->work;
        const int32_t words = plan.rows / list_queries,
                      block_words = plan.forward.block_queries / list_queries;
        int32_t block = work.query_block, end = work.end;
        if (config::is_listed) {
            block = work.list;
            end = block + 1;
        } else if (config::is_diagonal) {
            block /= config::diagonal_blocks;
            end /= config::diagonal_blocks;
        }
        end = min(end * block_words, words);
        const uint32_t *from =
            (const uint32_t *)plan.empty_blocks + (int64_t)work.head * plan.forward.group * words;
        uint32_t found = 0;
#pragma unroll 1
        for (int32_t h = 0; h < plan.forward.group; h++, from += words)
#pragma unroll 4
            for (int32_t n = block * block_words + threadIdx.x % 32; n < end; n += 32)
                found |= from[n];
        return __any_sync(~0u, found != 0);
    }

    /* Clears q and dout of empty rows. These have no gradient, but their contents may not be
     * finite, and 0 * NaN is NaN. Each consumer does so before it reads them, and all write the
     * same zeros. */
    __device__ void clear_empty(int32_t stage) {
        constexpr int vecs = config::q_rows * config::row_bytes / 16, line_vecs = line_bytes / 16;
        const float *const lse = memory->lse[stage];
        bool some = false;
#pragma unroll
        for (int from = 0; from < config::q_rows; from += 32)
            some |= lse[from + threadIdx.x % 32] == INFINITY;
        if (!__any_sync(~0u, some)) // the same in every warp
            return;
#pragma unroll 1
        for (int n = threadIdx.x % warpgroup_threads; n < vecs; n += warpgroup_threads)
            if (lse[n / line_vecs % config::q_rows] == INFINITY) {
                ((uint4 *)memory->q[stage])[n] = make_uint4(0, 0, 0, 0);
                ((uint4 *)memory->dout[stage])[n] = make_uint4(0, 0, 0, 0);
            }
        fence_proxy_async();
        sync_consumer(index);
    }

    /* Issues d = keys queries^T for rows of k or v and a step's q or dout. adds: d += instead. */
    template <bool adds = false>
    __device__ void issue_product(products &d, const uint8_t *keys, const uint8_t *queries) {
        const uint32_t a = opaque(shared_address(keys) + first_slot() * line_bytes);
        const uint32_t b = shared_address(queries) + first_query() * line_bytes;
        wgmma_fence();
        issue_abt<element, config::channels, config::slots, config::q_rows, adds>(d, a, b);
        wgmma_commit_group();
    }

    /* Issues S. biases: what it is added to, if adds_s, or added to it later. */
    __device__ void issue_s(const backward_plan &plan, const backward_pass &pass, products &s,
                            int32_t step, step_pairs &biases) {
        if constexpr (config::has_softcap)
            load_pairs(plan, step, biases);
        if constexpr (adds_s) {
            biases.template scale<element>(plan.forward.pair_bias, pass.pair_factor);
#pragma unroll
            for (int i = 0; i < product_registers; i++)
                s[i] = biases.scaled(i);
        }
        issue_product<adds_s>(s, memory->k, memory->q[stage_of(step)]);
    }

    __device__ void issue_dp(products &dp, int32_t step) {
        issue_product(dp, memory->v, memory->dout[stage_of(step)]);
    }

    /* This lane's columns in lse or delta of a step, from tile t of the step on. */
    __device__ const float2 *own_columns(const float *row, int t = 0) const {
        return (const float2 *)(row + first_query() + t * q_tile_rows) + threadIdx.x % 4;
    }

    static __device__ int32_t own_column(const step_inputs &inputs) {
        return inputs.first + threadIdx.x % 4 * 2;
    }

    __device__ void read_rows(const backward_plan &plan, row_inputs &to) const {
        const slot_record *const slots = &memory->slots[generation % slots_buffers][own_row()];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const slot_record row = slots[8 * i];
            to.kept[i] = kept_positions<config>(plan, row);
            to.bias[i] = row.bias;
        }
    }

    __device__ void read_inputs(int32_t step, step_inputs &to) const {
        to.first = memory->header[stage_of(step)].first + first_query();
        if (config::reads_ahead)
            read_columns(own_columns(memory->lse[stage_of(step)]), to.lse);
    }

    /* The elements of this lane's pairs of a step, in attn_bias or its gradient. */
    __device__ pair_elements elements_in(const backward_plan &plan, const pair_view &pairs,
                                         int32_t step) const {
        const step_header &header = memory->header[stage_of(step)];
        const slot_record *const slots = &memory->slots[generation % slots_buffers][own_row()];
        const int32_t keys[2] = {slots[0].key, slots[8].key};
        const int32_t query = header.head_tile * q_tile_rows + first_query() + threadIdx.x % 4 * 2;
        return find_elements<element>(plan.forward, pairs, memory->work.b, header.h, query, keys);
    }

    /* Starts to load attn_bias of a step, if there is one. */
    __device__ void load_pairs(const backward_plan &plan, int32_t step, step_pairs &to) const {
        if constexpr (config::has_pairs)
            to.load(plan.forward.pair_bias, elements_in(plan, plan.forward.pair_bias, step));
    }

    /* Starts to load attn_bias of the first step of a generation, or of the next one. If there is
     * none, the old biases are replaced all the same, so that they need no registers until then. */
    __device__ void load_pairs_ahead(const backward_plan &plan, int32_t step, bool is_there,
                                     step_pairs &to) const {
        if constexpr (adds_s) {
            to = {};
            if (!is_there)
                return;
            wait(&memory->step_ready[stage_of(step)], step / config::stages % 2);
            load_pairs(plan, step, to);
        }
    }

    /* Writes the gradient of attn_bias, if it is wanted. */
    __device__ void write_pairs(const backward_plan &plan, int32_t step, const products &ds) const {
        if constexpr (config::has_pairs)
            if (plan.dpairs.data != NULL)
                put_gradients<element>(plan, elements_in(plan, plan.dpairs, step), ds);
    }

    /* Clears the weights of a step that attn_mask masks. True if there are any in the warp. */
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

    /* P = 2^(S - lse) of a step. True if some entry of the warp may be masked. If P stays in
     * float32 it takes the registers of S, and is not masked yet. Otherwise it is in pairs: 0 where
     * the query does not keep the key, and with its sign set where dropout drops the pair; with
     * softcap also P times the derivative of softcap, in `sloped`. */
    __device__ bool weigh(const backward_plan &plan, int32_t step, const row_inputs &rows,
                          step_inputs &inputs, step_pairs &biases, products &s, pairs &weights,
                          pairs &sloped) const {
        if constexpr (config::has_softcap) {
            if constexpr (config::has_pairs)
                biases.template scale<element>(plan.forward.pair_bias, log2_e);
            weigh_softcapped<config>(plan.forward.softcap * log2_e, softcap_scale, rows.bias,
                                     biases, own_columns(memory->lse[stage_of(step)]), s, weights,
                                     sloped);
        } else {
#pragma unroll
            for (int t = 0; t < tiles; t++) {
                if (!config::reads_ahead || t > 0)
                    read_columns(own_columns(memory->lse[stage_of(step)], t), inputs.lse);
                weigh_products(plan.forward.scale * log2_e, rows.bias, inputs.lse,
                               of_tile<tiles>(s, t));
            }
            if (!keeps_p)
                pack_products<element>(s, weights);
        }
        bool is_masked;
        if constexpr (config::is_listed) {
            is_masked = apply_mask(stage_of(step), weights, sloped);
        } else {
            is_masked = is_cut<config::own_queries>(rows.kept, inputs.first);
            if (is_masked && !keeps_p)
                mask_pairs(own_column(inputs), rows.kept, weights);
            if (is_masked && config::has_softcap)
                mask_pairs(own_column(inputs), rows.kept, sloped);
        }
        if constexpr (config::drops)
            mark_dropped(plan, *memory, opaque(stage_of(step)), generation % slots_buffers,
                         own_row(), first_query(), weights);
        return is_masked;
    }

    /* dS of a step, and P in pairs if it was in float32. delta: of the first tile. */
    template <bool masked>
    __device__ void differentiate(const backward_plan &plan, int32_t step, const row_inputs &rows,
                                  const step_inputs &inputs, columns &delta, products &dp,
                                  const products &p, pairs &weights, const pairs &sloped, pairs &ds,
                                  float (&sums)[2]) const {
#pragma unroll
        for (int t = 0; t < tiles; t++) {
            const tile_products &own_p = of_tile<tiles>(p, t);
            tile_products &own_dp = of_tile<tiles>(dp, t);
            tile_pairs &own_weights = of_tile<tiles>(weights, t), &own_ds = of_tile<tiles>(ds, t);
            if (t > 0)
                read_columns(own_columns(memory->delta[stage_of(step)], t), delta);
            if (keeps_p && !masked)
                differentiate_products<config>(delta, own_dp, own_p, own_ds, sums);
            if (keeps_p)
                pack_products<element>(own_p, own_weights);
            if (keeps_p && masked)
                mask_pairs(own_column(inputs) + t * q_tile_rows, rows.kept, own_weights);
            if (!keeps_p || masked)
                differentiate_pairs<config, masked>(plan.forward.dropout_scale, delta, own_dp,
                                                    own_weights, of_tile<tiles>(sloped, t), own_ds,
                                                    sums);
        }
    }

    __device__ void differentiate(const backward_plan &plan, int32_t step, bool is_masked,
                                  const row_inputs &rows, const step_inputs &inputs, columns &delta,
                                  products &dp, const products &p, pairs &weights,
                                  const pairs &sloped, pairs &ds) {
        float sums[2] = {0, 0};
        if (is_masked || config::has_softcap) // with softcap, a second path spills registers
            differentiate<true>(plan, step, rows, inputs, delta, dp, p, weights, sloped, ds, sums);
        else
            differentiate<false>(plan, step, rows, inputs, delta, dp, p, weights, sloped, ds, sums);
        add_dbias(sums);
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

    /* Returns dbias of row i up to this generation, in the first lane of the quad, and restarts
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

    /* Writes P or dS to shared memory as [slot][query], where both consumers read it: a panel for
     * every 64 queries. */
    __device__ void store_pairs(const uint8_t *block, const pairs &packed) {
        constexpr int panel_steps = q_tile_rows / wgmma_k;
        const int thread = opaque(threadIdx.x) % warpgroup_threads, lane = thread % 32;
        const int row = first_slot() + thread / 32 * 16 + lane % 16;
        const uint32_t to = shared_address(block) + swizzled(row, first_query() / 8 + lane / 16);
#pragma unroll
        for (int j = 0; j < config::own_queries / wgmma_k; j++)
            stmatrix_x4((to ^ j % panel_steps * 2 * vec_bytes) +
                            j / panel_steps * config::slots * line_bytes,
                        packed[j]);
    }

    __device__ const uint8_t *ds_block(int32_t step) const {
        return memory->ds[step % config::ds_buffers][0];
    }

    /* Waits until all consumers have stored their P or dS. */
    static __device__ void sync_stores(void) {
        fence_proxy_async();
        bar_sync(all_barrier, config::consumers * warpgroup_threads);
    }

    /* Issues the n-th product dQ = dS K of this consumer. */
    __device__ void issue_dq(dq_tile &dq, int32_t step, int n = 0) {
        const int channel =
            config::is_long ? 0 : index * config::dq_channels + n * config::dq_columns;
        const uint8_t *const ds =
            ds_block(step) + (config::is_long ? index * config::slots * line_bytes : 0);
        const uint32_t keys = shared_address(memory->k) +
                              channel / panel_channels * config::slots * line_bytes +
                              channel % panel_channels * 2;
        wgmma_fence();
        issue_atb<element, config::slots, config::slots / wgmma_k>(dq, shared_address(ds),
                                                                   opaque(keys));
        wgmma_commit_group();
    }

    /* Issues sums += A rows, with A from registers. */
    __device__ void issue_sums(float (&sums)[sum_registers], const pairs &a, const uint8_t *rows) {
        wgmma_fence();
        issue_ab<element, config::q_rows, config::q_rows / wgmma_k>(sums, a, shared_address(rows));
        wgmma_commit_group();
    }

    /* issue_sums() in the wide form, with A in shared memory, for this consumer's channels. */
    __device__ void issue_sums(float (&sums)[sum_registers], const uint8_t *a,
                               const uint8_t *rows) {
        const int panel = index * config::own_channels / panel_channels;
        wgmma_fence();
        issue_ab<element, config::q_rows, config::q_rows / wgmma_k>(
            sums, opaque(shared_address(a)),
            shared_address(rows) + panel * config::q_rows * line_bytes);
        wgmma_commit_group();
    }

    /* Adds dq of a step. Its first channels have been multiplied already. */
    __device__ void add_dq(const backward_plan &plan, const backward_pass &pass, int32_t step,
                           const step_header &header, dq_tile &dq) {
        adder().add(plan, pass, step, header, dq);
#pragma unroll 1
        for (int n = 1; n < config::dq_products; n++) {
            issue_dq(dq, step, n);
            wgmma_wait_group<0>();
            adder().add(plan, pass, step, header, dq, n);
        }
    }

    /* Multiplies dV, dQ and dK of a step from P and dS. dQ is added while dK is multiplied, and the
     * biases of the next step are loaded meanwhile: with 128 channels once dQ has left its
     * registers. */
    __device__ void multiply(const backward_plan &plan, const backward_pass &pass, int32_t step,
                             const step_header &header, const pairs &weights, const pairs &ds,
                             step_pairs &biases) {
        const bool is_late = config::channels == 128;
        pairs kept;
        dq_tile dq;
        if (!is_late)
            load_pairs_ahead(plan, step + 1, !header.is_last, biases);
        if (config::is_narrow) // one buffer: until all warps have read dS of the previous step
            sync_consumer(index);
        store_pairs(ds_block(step), ds);
        clear_dropped<config::drops>(weights, kept);
        issue_sums(dv, kept, memory->dout[stage_of(step)]);
        sync_stores();
        issue_dq(dq, step);
        issue_sums(dk, ds, memory->q[stage_of(step)]);
        wgmma_wait_group<1>(); // for dV and dQ
        hold(kept);
        add_dq(plan, pass, step, header, dq);
        if (is_late && !config::drops)
            load_pairs_ahead(plan, step + 1, !header.is_last, biases);
        wgmma_wait_group<0>();
        hold(ds);
        if (is_late && config::drops)
            load_pairs_ahead(plan, step + 1, !header.is_last, biases);
    }

    /* The steps of a generation from `now` on. Returns the first step of the next one. dP is
     * multiplied while P is computed. With reads_ahead, lse and delta are read before the waits for
     * the products, because reads of shared memory are slow while wgmma reads it too. */
    __device__ int32_t run_generation(const backward_plan &plan, const backward_pass &pass,
                                      int32_t now) {
        row_inputs rows;
        step_pairs biases;
        read_rows(plan, rows);
        load_pairs_ahead(plan, now, true, biases);
        for (;; now++) {
            products s, dp;
            pairs weights, sloped, ds;
            step_inputs inputs;
            columns delta;
            wait_step(now);
            read_inputs(now, inputs);
            issue_s(plan, pass, s, now, biases);
            if (overlaps_dp)
                issue_dp(dp, now);
            wgmma_wait_group<overlaps_dp>(); // for S
            const bool is_masked = weigh(plan, now, rows, inputs, biases, s, weights, sloped);
            if (!overlaps_dp)
                issue_dp(dp, now);
            if (config::reads_ahead)
                read_columns(own_columns(memory->delta[stage_of(now)]), delta);
            wgmma_wait_group<0>();
            if (!config::reads_ahead)
                read_columns(own_columns(memory->delta[stage_of(now)]), delta);
            differentiate(plan, now, is_masked, rows, inputs, delta, dp, s, weights, sloped, ds);
            write_pairs(plan, now, dp);
            const step_header header = memory->header[stage_of(now)];
            multiply(plan, pass, now, header, weights, ds, biases);
            release(&memory->step_free[stage_of(now)]);
            if (header.is_last)
                return now + 1;
        }
    }

    /* run_generation() in the wide form, where the consumers share P and dS. */
    __device__ int32_t run_wide_generation(const backward_plan &plan, const backward_pass &pass,
                                           int32_t now) {
        row_inputs rows;
        step_pairs biases;
        read_rows(plan, rows);
        load_pairs_ahead(plan, now, true, biases);
        for (bool is_last = false; !is_last; now++) {
            products s, dp;
            pairs weights, kept, sloped, ds;
            step_inputs inputs;
            columns delta;
            wait_step(now);
            read_inputs(now, inputs);
            issue_s(plan, pass, s, now, biases);
            issue_dp(dp, now);
            const step_header header = memory->header[stage_of(now)];
            is_last = header.is_last;
            wgmma_wait_group<1>(); // for S
            const bool is_masked = weigh(plan, now, rows, inputs, biases, s, weights, sloped);
            clear_dropped<config::drops>(weights, kept);
            store_pairs(memory->p, kept);
            read_columns(own_columns(memory->delta[stage_of(now)]), delta);
            wgmma_wait_group<0>();
            differentiate(plan, now, is_masked, rows, inputs, delta, dp, s, weights, sloped, ds);
            write_pairs(plan, now, dp);
            load_pairs_ahead(plan, now + 1, !is_last, biases);
            store_pairs(ds_block(now), ds);
            sync_stores();
            multiply_wide(plan, pass, now, header);
            release(&memory->step_free[stage_of(now)]);
            // until both consumers have read P and dS
            bar_sync(all_barrier, config::consumers * warpgroup_threads);
        }
        return now;
    }

    __device__ void multiply_wide(const backward_plan &plan, const backward_pass &pass,
                                  int32_t step, const step_header &header) {
        dq_tile dq;
        issue_dq(dq, step);
        issue_sums(dv, memory->p, memory->dout[stage_of(step)]);
        wgmma_wait_group<1>();
        adder().add(plan, pass, step, header, dq);
        issue_dq(dq, step, 1);
        issue_sums(dk, ds_block(step), memory->q[stage_of(step)]);
        wgmma_wait_group<1>();
        adder().add(plan, pass, step, header, dq, 1);
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
        meets_empty = meets_empty_rows(plan);
        for (generation = 0; take_slots(plan, pass); generation++) {
            wait(&memory->keys_ready, generation & 1);
            fence_proxy_async();
            if constexpr (config::is_wide)
                step = run_wide_generation(plan, pass, step);
            else
                step = run_generation(plan, pass, step);
        }
        if (!config::stages_dq || threadIdx.x % 32 != 0)
            return;
        if (pass.dq_semaphore == NULL) {
            cp_async_bulk_wait_group_read(); // reads of shared memory must end before the block
                                             // does
        } else {
            cp_async_bulk_wait_group<0>();
            mbarrier_arrive(&memory->all_dq_added);
        }
    }
};
