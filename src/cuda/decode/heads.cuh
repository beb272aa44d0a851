/* The second of the two kernels of fdma_decode() on 9.0, for a call of many heads: a thread block
 * attends for a whole (b, g), and then for the next one. Every warp has a pipeline of its own. It
 * continues from one (b, g) to the next, so memory is read while results are merged. */
#pragma once

#include "cuda/decode/evict.cuh"
#include "cuda/mma/attention.cuh"

enum { head_keys = 16 }; // of a warp's key block

/* wide: one thread block per multiprocessor, for calls with at most one head for each of them. */
template <typename type, int tiles, bool wide, bool paged> struct heads_config {
    using element = type;
    static constexpr int head_dim = FDMA_HEAD_DIM;
    static constexpr bool in_pages = paged; // the rows of the cache are in pages
    static constexpr int row_tiles = tiles;
    static constexpr int rows = row_tiles * mma_rows;
    static constexpr int keys = head_keys;      // of a warp's key block
    static constexpr int blocks = wide ? 1 : 2; // thread blocks on a multiprocessor
    static constexpr bool is_small =
        head_dim <= 64 && row_tiles == 1; // small in registers and shared memory
    static constexpr int warps = (head_dim <= 128 ? 4 : 2) * (wide || is_small ? 2 : 1);
    static constexpr int threads = warps * warp_lanes;
};

/* One key block of a warp. load_keys() fills expiry with the positions of the rows.
 * prepare_entries() replaces these by expiries, and scales bias. */
template <typename config> struct heads_stage {
    using element = typename config::element;
    alignas(128) element k[config::keys * config::head_dim];
    alignas(128) element v[config::keys * config::head_dim];
    alignas(8) int32_t expiry[config::keys]; // positions at first
    alignas(8) float bias[config::keys];
};

/* The output of place_tokens() for the tokens of a (b, g). */
struct placed_tokens {
    int32_t slot[most_new_tokens], expiry[most_new_tokens];
    float score[most_new_tokens];
};

/* A warp's partial result, lane by lane. */
template <typename config> struct partial_rows {
    static constexpr int rows = row_state<config>::rows;
    float4 out[config::row_tiles][config::head_dim / 8][warp_lanes];
    float max[rows][warp_lanes], sum[rows][warp_lanes];
};

/* Work of a thread block: a tile of query rows of one (b, g), and the number of its key blocks. The
 * blocks of the cache come first, then the blocks of new tokens. head >= batch * kv_heads: no work
 * is left. */
struct heads_item {
    row_range range;
    int32_t head; // b * kv_heads + g
    int32_t sequence, tokens;
    int32_t blocks;
};

template <typename config> struct heads_memory {
    alignas(128) typename config::element q[config::rows * config::head_dim];
    heads_stage<config> stages[config::warps][2];
    partial_rows<config> partials[config::warps / 2];
    // of this item and of the next one
    heads_item items[2];
    placed_tokens tokens[2];
    alignas(8) int32_t token[most_new_tokens]; // 0, 1, ...
    int32_t position[config::rows];
};

__device__ static int32_t row_blocks(const decode_plan &cached) {
    return (cached.rows + head_keys - 1) / head_keys;
}

__device__ static heads_item item_of(const forward_plan &plan, const decode_plan &cached,
                                     int32_t head, int32_t first) {
    heads_item item = {row_range_of(plan, head, first), head};
    if (head >= plan.batch * plan.kv_heads)
        return item;
    item.sequence = sequence_of(cached, item.range.b);
    item.tokens = item.sequence >= 0 ? tokens_of(cached, item.range.b) : 0;
    if (item.tokens > 0 && item.range.total > 0)
        item.blocks = row_blocks(cached) + (item.tokens + head_keys - 1) / head_keys;
    return item;
}

template <typename config>
__device__ static heads_item next_item(const forward_plan &plan, const decode_plan &cached,
                                       const heads_item &item) {
    const int32_t first = item.range.first + config::rows;
    return first < item.range.total ? item_of(plan, cached, item.head, first)
                                    : item_of(plan, cached, item.head + gridDim.x, 0);
}

/* The key block that a warp copies next and, with pages, the page of this lane's row, or -1. */
struct heads_cursor {
    heads_item item;
    int32_t block;
    int32_t page;
};

/* The row of a lane, if its key block belongs to the cache. */
__device__ static int32_t own_row(const heads_cursor &cursor) {
    return cursor.block * head_keys + threadIdx.x % head_keys;
}

/* Finds the page before the key block is copied, because the page number is read from memory
 * too. */
__device__ static void find_page(const decode_plan &cached, heads_cursor &cursor) {
    const int32_t row = own_row(cursor);
    const bool is_row = cursor.block < cursor.item.blocks && row < cached.rows;
    cursor.page = is_row ? page_of(cached.pages, cursor.item.sequence, row) : -1;
}

/* Advances to an item that has key blocks for this warp, if the cursor has none left. */
template <typename config>
__device__ static void skip_items(const forward_plan &plan, const decode_plan &cached,
                                  heads_cursor &cursor) {
    while (cursor.block >= cursor.item.blocks && cursor.item.head < plan.batch * plan.kv_heads) {
        cursor.item = next_item<config>(plan, cached, cursor.item);
        cursor.block = threadIdx.x / warp_lanes;
    }
    if (config::in_pages)
        find_page(cached, cursor);
}

template <typename config>
__device__ static void go_on(const forward_plan &plan, const decode_plan &cached,
                             heads_cursor &cursor) {
    cursor.block += config::warps;
    skip_items<config>(plan, cached, cursor);
}

/* Starts copying k or v of the cursor's key block, if there is one. */
template <typename config>
__device__ static void copy_block_rows(char *to, const forward_plan &plan, const head_view &rows,
                                       const head_view &tokens, const decode_plan &cached,
                                       const heads_cursor &cursor, bool aligned) {
    const heads_item &item = cursor.item;
    if (cursor.block >= item.blocks)
        return;
    const bool is_new = cursor.block >= row_blocks(cached);
    if (config::in_pages && !is_new) {
        copy_rows_of_pages<config>(to, source_of(rows, 0, item.range.g, plan.head_dim, aligned),
                                   2 * rows.batch,
                                   {cursor.page, row_of_page(cached.pages, own_row(cursor))});
        return;
    }
    const row_source source =
        source_of(is_new ? tokens : rows, is_new ? item.range.b : item.sequence, item.range.g,
                  plan.head_dim, aligned);
    const int32_t first = (cursor.block - (is_new ? row_blocks(cached) : 0)) * config::keys;
    const int32_t count = (is_new ? item.tokens : cached.rows) - first;
    copy_block<config, config::row_tiles == 1>(to, source, first, count);
}

/* Starts copying k of the cursor's key block, and the positions and biases of its rows. Rows of
 * missing pages have no key. */
template <typename config>
__device__ static void load_keys(heads_stage<config> &stage, const forward_plan &plan,
                                 const decode_plan &cached, const heads_cursor &cursor,
                                 bool aligned) {
    const heads_item &item = cursor.item;
    copy_block_rows<config>((char *)stage.k, plan, cached.k, plan.k, cached, cursor, aligned);
    const int entry = threadIdx.x % config::keys;
    const int32_t row = cursor.block * config::keys + entry;
    if (cursor.block < min(row_blocks(cached), item.blocks) && row < cached.rows) {
        const int32_t sequence = item.sequence, g = item.range.g;
        if (threadIdx.x % warp_lanes < config::keys && config::in_pages && cursor.page < 0)
            stage.expiry[entry] = -1;
        else if (threadIdx.x % warp_lanes < config::keys)
            cp_async_4(shared_address(&stage.expiry[entry]), cached.position.at(sequence, g) + row);
        else if (cached.bias.data != NULL)
            cp_async_4(shared_address(&stage.bias[entry]), cached.bias.at(sequence, g) + row);
    }
    cp_async_commit_group();
}

template <typename config>
__device__ static void load_values(heads_stage<config> &stage, const forward_plan &plan,
                                   const decode_plan &cached, const heads_cursor &cursor,
                                   bool aligned) {
    copy_block_rows<config>((char *)stage.v, plan, cached.v, plan.v, cached, cursor, aligned);
    cp_async_commit_group();
}

/* Starts loading q of an item, and the tokens of its (b, g). */
template <typename config>
__device__ static void load_item(heads_memory<config> &shared, placed_tokens &tokens,
                                 const forward_plan &plan, const decode_plan &cached,
                                 const heads_item &item, bool aligned) {
    if (item.tokens > 0) {
        write_positions<config::rows>(shared.position, plan, item.range, plan.kv_len);
        load_queries<config, 1, config::threads>((char *)shared.q, plan.q, plan, item.range,
                                                 aligned);
        const int64_t first = (int64_t)item.head * cached.new_len;
        const float *const score = cached.new_score.at(item.range.b, item.range.g);
        for (int32_t token = threadIdx.x; token < item.tokens; token += config::threads) {
            cp_async_4(shared_address(&tokens.slot[token]), cached.slot + first + token);
            cp_async_4(shared_address(&tokens.expiry[token]), cached.expiry + first + token);
            cp_async_4(shared_address(&tokens.score[token]), score + token);
        }
    }
    cp_async_commit_group();
}

/* Sets expiry and bias of a key block. The first token that takes a row evicts its key. Bit n of
 * the result is set if no row of the tile keeps entry n. */
template <typename config>
__device__ static uint32_t prepare_entries(heads_stage<config> &stage, const placed_tokens &tokens,
                                           const decode_plan &cached, const heads_item &item,
                                           int32_t block, int32_t first_position) {
    const int lane = threadIdx.x % warp_lanes, entry = lane % config::keys;
    const int32_t count = item.tokens;
    int32_t expiry = -1;
    float bias = 0;
    if (block < row_blocks(cached)) {
        const int32_t row = block * config::keys + entry;
        if (row < cached.rows && stage.expiry[entry] >= 0)
            expiry = INT32_MAX;
        for (int32_t token = lane / config::keys; token < count; token += warp_lanes / config::keys)
            expiry = tokens.slot[token] == row ? min(expiry, token) : expiry;
        expiry = min(expiry, __shfl_xor_sync(~0u, expiry, config::keys));
        bias = cached.bias.data != NULL ? stage.bias[entry] : 0;
    } else {
        const int32_t token = (block - row_blocks(cached)) * config::keys + entry;
        if (token < count) {
            expiry = tokens.expiry[token];
            bias = bias_of(cached.bias_form, tokens.score[token]);
        }
    }
    __syncwarp(); // every lane has read the stage
    if (lane < config::keys) {
        stage.expiry[entry] = expiry;
        stage.bias[entry] = bias * log2_e;
    }
    __syncwarp();
    return __ballot_sync(~0u, expiry <= first_position) & ((1u << config::keys) - 1);
}

/* Clears v of some entries. Their weight is 0, but 0 times the memory's contents may be NaN. */
template <typename config>
__device__ static void clear_values(typename config::element *v, uint32_t entries) {
    for (uint32_t left = entries; left != 0; left &= left - 1)
        for (int d = threadIdx.x % warp_lanes; d < config::head_dim; d += warp_lanes)
            v[(__ffs(left) - 1) * config::head_dim + d] = (typename config::element)0.0f;
    __syncwarp();
}

/* A warp's key blocks for the rows of an item. As soon as k or v of a stage has been read, it is
 * loaded for the cursor's key block. `stage` is 0 or 1. */
template <typename config>
__device__ static void attend_item(heads_memory<config> &shared, int turn, row_state<config> &state,
                                   const forward_plan &plan, const decode_plan &cached,
                                   heads_cursor &cursor, int &stage, bool aligned) {
    const heads_item &item = shared.items[turn];
    const placed_tokens &tokens = shared.tokens[turn];
    const int warp = threadIdx.x / warp_lanes;
    const logit_params logits = logit_params_of(plan);
    for (int32_t block = warp; block < item.blocks; block += config::warps) {
        heads_stage<config> &own = shared.stages[warp][stage];
        const bool is_new = block >= row_blocks(cached);
        const int32_t *const token =
            shared.token + (is_new ? (block - row_blocks(cached)) * config::keys : 0);
        float s[config::row_tiles][config::keys / 8][4];
        cp_async_wait_group<3>();
        __syncwarp(); // k has arrived
        const uint32_t unkept =
            prepare_entries(own, tokens, cached, item, block, shared.position[0]);
        mma_abt<config>(s, down_first<config::head_dim>(shared.q),
                        right_first<config::head_dim>(own.k)); // S = Q K^T
        find_logits<config>(s, own.bias, logits);
        mask_logits<config>(s, own.expiry, token, shared.position, is_new);
        __syncwarp(); // every lane has read k
        load_keys(own, plan, cached, cursor, aligned);
        weigh(s, state); // P = exp2(S - row_max)
        cp_async_wait_group<3>();
        __syncwarp(); // v has arrived
        clear_values<config>(own.v, unkept);
        mma_ab<config>(state.out, s, down_first<config::head_dim>(own.v)); // O += P V
        __syncwarp();                                                      // every lane has read v
        load_values(own, plan, cached, cursor, aligned);
        go_on<config>(plan, cached, cursor);
        stage ^= 1;
    }
}

template <typename config>
__device__ static void write_partial(partial_rows<config> &to, const row_state<config> &state) {
    const int lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (int t = 0; t < config::row_tiles; t++)
#pragma unroll
        for (int d = 0; d < config::head_dim / 8; d++)
            to.out[t][d][lane] = *(const float4 *)state.out[t][d];
#pragma unroll
    for (int r = 0; r < row_state<config>::rows; r++) {
        to.max[r][lane] = state.row_max[r];
        to.sum[r][lane] = state.row_sum[r];
    }
}

template <typename config>
__device__ static void add_partial(row_state<config> &state, const partial_rows<config> &from) {
    const int lane = threadIdx.x % warp_lanes;
    float own[row_state<config>::rows], other[row_state<config>::rows];
#pragma unroll
    for (int r = 0; r < row_state<config>::rows; r++) {
        const float max = from.max[r][lane], sum = from.sum[r][lane];
        const float most = fmaxf(state.row_max[r], max);
        own[r] = state.row_sum[r] == 0 ? 0 : ex2_approx(state.row_max[r] - most);
        other[r] = sum == 0 ? 0 : ex2_approx(max - most);
        state.row_max[r] = most;
        state.row_sum[r] = own[r] * state.row_sum[r] + other[r] * sum;
    }
#pragma unroll
    for (int t = 0; t < config::row_tiles; t++)
#pragma unroll
        for (int d = 0; d < config::head_dim / 8; d++) {
            const float4 more = from.out[t][d][lane];
            const float x[4] = {more.x, more.y, more.z, more.w};
#pragma unroll
            for (int n = 0; n < 4; n++) { // not 0 * x: out of an empty partial may be NaN
                const int r = 2 * t + n / 2;
                state.out[t][d][n] = (own[r] == 0 ? 0 : own[r] * state.out[t][d][n]) +
                                     (other[r] == 0 ? 0 : other[r] * x[n]);
            }
        }
}

template <typename config>
__device__ static void write_rows(const forward_plan &plan, const heads_item &item,
                                  const row_state<config> &state) {
    using element = typename config::element;
    const int lane = threadIdx.x % warp_lanes;
#pragma unroll
    for (int r = 0; r < row_state<config>::rows; r++) {
        const int32_t row = item.range.first + lane / 4 * row_state<config>::rows + r;
        if (row >= item.range.total)
            continue;
        const bool has_token = row_position(plan, item.range, plan.kv_len, row) < item.tokens;
        const float sum = has_token ? state.row_sum[r] : 0;
        const float sink = has_token ? sink_of_row(plan, item.range, row) : -INFINITY;
        const row_result result = result_of(state.row_max[r], sum, sink);
        element *const to = (element *)plan.out.data + row_offset(plan.out, plan, item.range, row);
#pragma unroll
        for (int d = 0; d < config::head_dim / 8; d++)
#pragma unroll
            for (int x = 0; x < 2; x++) {
                const int channel = d * 8 + lane % 4 * 2 + x;
                const float out = state.out[r / 2][d][r % 2 * 2 + x];
                if (channel < plan.head_dim)
                    to[channel] = (element)(result.scale == 0 ? 0 : out * result.scale);
            }
        if (lane % 4 == 0 && plan.lse.data != NULL)
            *lse_at(plan, item.range, row) = result.lse;
    }
}

/* Merges the partial results of the warps, which have read q and their stages, and writes them.
 * Meanwhile the next item is loaded. */
template <typename config>
__device__ static void finish_item(heads_memory<config> &shared, int turn, row_state<config> &state,
                                   const forward_plan &plan, const decode_plan &cached,
                                   bool aligned) {
    constexpr int half = config::warps / 2;
    const int warp = threadIdx.x / warp_lanes;
#pragma unroll
    for (int r = 0; r < row_state<config>::rows; r++)
        state.row_sum[r] = quad_sum(state.row_sum[r]);
    if (warp >= half)
        write_partial(shared.partials[warp - half], state);
    __syncthreads(); // q is no longer read
    load_item(shared, shared.tokens[turn ^ 1], plan, cached, shared.items[turn ^ 1], aligned);
    if (warp < half)
        add_partial(state, shared.partials[warp]);
#pragma unroll 1
    for (int left = half / 2; left > 0; left /= 2) {
        if (warp >= left && warp < 2 * left)
            write_partial(shared.partials[warp], state);
        __syncthreads();
        if (warp < left)
            add_partial(state, shared.partials[warp + left]);
    }
    if (warp == 0)
        write_rows(plan, shared.items[turn], state);
}

/* Writes the committed tokens to their rows of the cache, unless a committed token evicts them. */
__device__ static void commit_tokens(const placed_tokens &tokens, const forward_plan &plan,
                                     const decode_plan &cached, const heads_item &item) {
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    const decode_stream stream = cached.streams[item.head];
    for (int32_t token = warp; token < stream.committed; token += blockDim.x / warp_lanes)
        if (tokens.slot[token] >= 0 && tokens.expiry[token] >= stream.committed)
            store_token(plan, cached, stream, item.range.b, item.range.g, token, tokens.slot[token],
                        {lane, warp_lanes});
    if (item.range.g == 0 && threadIdx.x == 0 && stream.tokens > 0)
        cached.seen[stream.sequence] = token_position(stream, stream.committed);
}

template <typename config>
static __global__ void __launch_bounds__(config::threads, config::blocks)
    attend_heads(const __grid_constant__ forward_plan plan,
                 const __grid_constant__ decode_plan cached, const bool aligned) {
    heads_memory<config> &shared = shared_memory<heads_memory<config>>();
    const int warp = threadIdx.x / warp_lanes;
    for (int token = threadIdx.x; token < most_new_tokens; token += config::threads)
        shared.token[token] = token;
    heads_cursor cursor = {item_of(plan, cached, blockIdx.x, 0), warp};
    if (threadIdx.x == 0)
        shared.items[0] = cursor.item;
    skip_items<config>(plan, cached, cursor);
    // no kernel before place_tokens() is still running, so the cache is as the last call left it
    for (int n = 0; n < 2; n++) {
        load_keys(shared.stages[warp][n], plan, cached, cursor, aligned);
        load_values(shared.stages[warp][n], plan, cached, cursor, aligned);
        go_on<config>(plan, cached, cursor);
    }
    griddepcontrol_wait(); // for place_tokens()
    griddepcontrol_launch_dependents();
    __syncthreads();
    load_item(shared, shared.tokens[0], plan, cached, shared.items[0], aligned);
    for (int turn = 0, stage = 0;; turn ^= 1) {
        const heads_item &item = shared.items[turn], &next = shared.items[turn ^ 1];
        row_state<config> state;
        clear_rows(state);
        cp_async_wait_group<0>();
        __syncthreads(); // the item, its q and its tokens have arrived
        if (item.head >= plan.batch * plan.kv_heads)
            return;
        if (threadIdx.x == 0)
            shared.items[turn ^ 1] = next_item<config>(plan, cached, item);
        attend_item(shared, turn, state, plan, cached, cursor, stage, aligned);
        finish_item(shared, turn, state, plan, cached, aligned);
        if (next.head != item.head)
            commit_tokens(shared.tokens[turn], plan, cached, item);
    }
}
