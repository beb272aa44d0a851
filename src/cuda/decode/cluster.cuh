/* The second of the two kernels of fdma_decode() on 9.0, for a call of few heads: a cluster of 8, 4
 * or 2 thread blocks takes one (b, g), so that about every multiprocessor has one block. Each block
 * has an equal partition of the cache's rows, and the last block also has the new tokens. A block
 * sends each row of its partial result to the block that merges the row. Once it has read its
 * partition, it writes the committed tokens that have a row there.
 *
 *   barrier          arrivals      who arrives                who waits
 *   of the cluster   all threads   all threads, at first      all, before a row is sent
 *   received         1, and bytes  thread 0; rows that come   all, before they merge */
#pragma once

#include "cuda/decode/evict.cuh"
#include "cuda/device/gather.cuh"
#include "cuda/mma/attention.cuh"

enum {
    most_ranks = 8,       // thread blocks of a cluster
    most_rank_rows = 5120 // of a partition, as many as fit in shared memory
};

template <typename type, int tiles, bool paged> struct cluster_config {
    using element = type;
    static constexpr int head_dim = FDMA_HEAD_DIM;
    static constexpr bool in_pages = paged; // the rows of the cache are in pages
    static constexpr int row_tiles = tiles;
    // 5: as many as fit in shared memory; 9: with 2,048 rows and a block of new tokens, no warp of
    // eight thread blocks has more than two key blocks; 8: as many as fit in registers
    static constexpr int warps = head_dim > 128 ? 5 : row_tiles == 1 ? 9 : 8;
    static constexpr int rows = row_tiles * mma_rows;
    static constexpr int keys = 16; // of a warp's key block
    static constexpr int threads = warps * warp_lanes;
};

/* One thread block's partition of a call. Shared memory holds it to save registers. */
struct cluster_partition {
    int32_t b, g, rank, ranks;
    int32_t sequence;             // of the cache
    int32_t first_row, rows;      // of the cache
    int32_t token_entry, entries; // the entry of token 0, and the end
    row_source k, v;              // of the cache: of the sequence, or of page 0
    row_source new_k, new_v;
};

template <typename config> struct cluster_stage {
    using element = typename config::element;
    alignas(128) element k[config::keys * config::head_dim];
    alignas(128) element v[config::keys * config::head_dim];
};

/* Keys of a partition: 16 of its rows, or of the tokens. */
struct cluster_keys {
    alignas(16) float bias[16];
    alignas(16) int32_t expiry[16];
};

template <typename config> struct cluster_memory {
    alignas(128) typename config::element q[config::rows * config::head_dim];
    union {
        cluster_stage<config> stages[config::warps][2];
        float out[config::warps][config::rows][config::head_dim]; // in the epilogue
    };
    alignas(16) int32_t token[most_new_tokens]; // 0, 1, ...
    float max[config::warps][config::rows], sum[config::warps][config::rows];
    // of the rows that this block merges, one after the other: the partial results of all blocks
    alignas(16) float part[config::rows][config::head_dim];
    float2 part_sum[config::rows]; // row_max, row_sum
    uint64_t received;
    int32_t position[config::rows];
    cluster_partition partition;
    int32_t slot[most_new_tokens];
    // of the entries: the rows of this partition, then the tokens, from a multiple of 16 on
    cluster_keys keys[];

    __device__ float &bias(int32_t entry) { return keys[entry / 16].bias[entry % 16]; }
    __device__ int32_t &expiry(int32_t entry) { return keys[entry / 16].expiry[entry % 16]; }
    __device__ int32_t expiry(int32_t entry) const { return keys[entry / 16].expiry[entry % 16]; }
};

/* The rows of a partition; the last ones have fewer. */
static __host__ __device__ int32_t rows_of_rank(int32_t rows, int32_t ranks) {
    return (rows + ranks * 16 - 1) / (ranks * 16) * 16;
}

/* Shared memory for a partition of so many rows. */
template <typename config> static constexpr size_t cluster_bytes(int32_t rows) {
    return sizeof(cluster_memory<config>) +
           (size_t)(rows + most_new_tokens) / 16 * sizeof(cluster_keys);
}

template <typename config>
__device__ static cluster_partition
partition_of(const forward_plan &plan, const decode_plan &cached, int32_t ranks, bool aligned) {
    const int32_t head = blockIdx.x / ranks, rank = blockIdx.x % ranks;
    const int32_t b = head / plan.kv_heads, g = head % plan.kv_heads;
    const int32_t size = rows_of_rank(cached.rows, ranks);
    const int32_t sequence = sequence_of(cached, b);
    cluster_partition partition = {b, g, rank, ranks, max(sequence, 0)};
    partition.first_row = min(rank * size, cached.rows);
    partition.rows = min(size, cached.rows - partition.first_row);
    partition.token_entry = (partition.rows + 15) / 16 * 16;
    partition.entries = rank == ranks - 1 ? partition.token_entry + cached.new_len : partition.rows;
    const int32_t first = config::in_pages ? 0 : partition.sequence;
    partition.k = source_of(cached.k, first, g, plan.head_dim, aligned);
    partition.v = source_of(cached.v, first, g, plan.head_dim, aligned);
    partition.new_k = source_of(plan.k, b, g, plan.head_dim, aligned);
    partition.new_v = source_of(plan.v, b, g, plan.head_dim, aligned);
    return partition;
}

/* The indices of this lane's row in the key block from entry `from` on, if rows are in pages. */
template <typename config>
__device__ static row_indices own_indices(const cluster_partition &partition,
                                          const decode_plan &cached, int32_t from) {
    const int32_t entry = from + threadIdx.x % config::keys;
    return config::in_pages && entry < partition.rows
               ? indices_of(cached.pages, partition.sequence, partition.first_row + entry)
               : no_row_indices();
}

/* Starts copying k or v of a warp's key block, which begins with entry `from`. `own` is its
 * own_indices(). */
template <typename config>
__device__ static void copy_entries(char *to, const cluster_partition &partition,
                                    const row_source &rows, const row_source &tokens, int32_t from,
                                    const head_view &cache, const row_indices &own) {
    const bool is_new = from >= partition.token_entry;
    if (from >= partition.entries)
        return;
    if (config::in_pages && !is_new) {
        copy_rows_of_pages<config>(to, rows, 2 * cache.batch, own);
        return;
    }
    const row_source source = is_new ? tokens : rows;
    const int32_t first = is_new ? from - partition.token_entry : partition.first_row + from;
    copy_block<config, true>(to, source, first,
                             (is_new ? partition.entries : partition.rows) - from);
}

template <typename config>
__device__ static void load_keys(cluster_stage<config> &stage, const cluster_partition &partition,
                                 const decode_plan &cached, int32_t from, const row_indices &own) {
    copy_entries<config>((char *)stage.k, partition, partition.k, partition.new_k, from, cached.k,
                         own);
    cp_async_commit_group();
}

template <typename config>
__device__ static void load_values(cluster_stage<config> &stage, const cluster_partition &partition,
                                   const decode_plan &cached, int32_t from,
                                   const row_indices &own) {
    copy_entries<config>((char *)stage.v, partition, partition.v, partition.new_v, from, cached.v,
                         own);
    cp_async_commit_group();
}

/* Starts loading q of a tile of rows, then the first two key blocks of each warp. */
template <typename config>
__device__ static void begin_tile(cluster_memory<config> &shared, const forward_plan &plan,
                                  const decode_plan &cached, const cluster_partition &partition,
                                  const row_range &range, bool aligned) {
    constexpr int step = config::warps * config::keys;
    const int warp = threadIdx.x / warp_lanes;
    write_positions<config::rows>(shared.position, plan, range, plan.kv_len);
    load_queries<config, 1, config::threads>((char *)shared.q, plan.q, plan, range, aligned);
    cp_async_commit_group();
    for (int n = 0; n < 2; n++) {
        const int32_t from = warp * config::keys + n * step;
        const row_indices own = own_indices<config>(partition, cached, from);
        load_keys(shared.stages[warp][n], partition, cached, from, own);
        load_values(shared.stages[warp][n], partition, cached, from, own);
    }
}

/* Loads positions and biases of the partition's rows. Rows of missing pages have no key. */
template <typename config>
__device__ static void load_rows(cluster_memory<config> &shared, const decode_plan &cached) {
    const cluster_partition &partition = shared.partition;
    const int32_t *const position =
        cached.position.at(partition.sequence, partition.g) + partition.first_row;
    const float *const bias =
        cached.bias.data == NULL
            ? NULL
            : cached.bias.at(partition.sequence, partition.g) + partition.first_row;
    for (int32_t entry = threadIdx.x; entry < partition.token_entry; entry += config::threads) {
        const bool is_there = entry < partition.rows;
        const int32_t p = is_there ? position[entry] : -1;
        const float x = is_there && bias != NULL ? bias[entry] : 0;
        const bool is_missing =
            config::in_pages && is_there &&
            indices_of(cached.pages, partition.sequence, partition.first_row + entry).first < 0;
        shared.expiry(entry) = p >= 0 && !is_missing ? INT32_MAX : -1;
        shared.bias(entry) = x * log2_e;
    }
    for (int32_t token = threadIdx.x; token < most_new_tokens; token += config::threads) {
        shared.token[token] = token;
        shared.expiry(partition.token_entry + token) = -1;
        shared.bias(partition.token_entry + token) = 0;
    }
}

/* Loads the tokens and their slots. The first token that takes a row evicts its key. */
template <typename config>
__device__ static void load_tokens(cluster_memory<config> &shared, const decode_plan &cached,
                                   const decode_stream &stream) {
    const cluster_partition &partition = shared.partition;
    const int64_t head = (int64_t)partition.b * cached.kv_heads + partition.g;
    const int32_t token = threadIdx.x, entry = partition.token_entry + token;
    if (token >= cached.new_len)
        return;
    // all loads before the first use
    const int32_t slot = cached.slot[head * cached.new_len + token];
    const int32_t expiry = cached.expiry[head * cached.new_len + token];
    const float score = cached.new_score.at(partition.b, partition.g)[token];
    if (token >= stream.tokens)
        return;
    shared.slot[token] = slot;
    shared.expiry(entry) = expiry;
    shared.bias(entry) = bias_of(cached.bias_form, score) * log2_e;
    if (slot >= partition.first_row && slot < partition.first_row + partition.rows)
        atomicMin(&shared.expiry(slot - partition.first_row), token);
}

/* Clears v of entries that no row of the tile keeps. Their weight is 0, but 0 times the memory's
 * contents may be NaN. */
template <typename config>
__device__ static void clear_unkept(typename config::element *v, const int32_t *expiry,
                                    int32_t first_position) {
    const int lane = threadIdx.x % warp_lanes;
    const bool is_unkept = expiry[lane % config::keys] <= first_position;
    const uint32_t unkept = __ballot_sync(~0u, is_unkept) & 0xffff;
    for (uint32_t left = unkept; left != 0; left &= left - 1)
        for (int d = lane; d < config::head_dim; d += warp_lanes)
            v[(__ffs(left) - 1) * config::head_dim + d] = (typename config::element)0.0f;
    __syncwarp();
}

/* Q K^T of the first two key blocks of a warp, before it is known which keys are evicted. */
template <typename config> struct first_products {
    static constexpr bool are_early = config::row_tiles == 1; // as registers allow
    float s[2][config::row_tiles][config::keys / 8][4];
};

template <typename config>
__device__ static void multiply_first(first_products<config> &products,
                                      const cluster_memory<config> &shared) {
    const int warp = threadIdx.x / warp_lanes;
#pragma unroll
    for (int n = 0; n < 2 && products.are_early; n++) {
        if ((warp + n * config::warps) * config::keys >= shared.partition.entries)
            return;
        cp_async_wait_group<3>(); // V, K and V follow; then V
        if (n == 1)
            cp_async_wait_group<1>();
        __syncwarp(); // k has arrived
        mma_abt<config>(products.s[n], down_first<config::head_dim>(shared.q),
                        right_first<config::head_dim>(shared.stages[warp][n].k));
    }
}

/* A warp's key blocks for the rows of a tile. As soon as k or v of a stage has been read, it is
 * loaded again for the block two steps later. */
template <typename config>
__device__ static void attend_partition(cluster_memory<config> &shared, row_state<config> &state,
                                        const first_products<config> &products,
                                        const cluster_partition &partition,
                                        const decode_plan &cached, const logit_params &logits) {
    constexpr int step = config::warps * config::keys;
    const int warp = threadIdx.x / warp_lanes;
    for (int n = 0, from = warp * config::keys; from < partition.entries; n ^= 1, from += step) {
        cluster_stage<config> &stage = shared.stages[warp][n];
        const cluster_keys &keys = shared.keys[from / 16];
        const bool is_new = from >= partition.token_entry;
        const int32_t *const token = shared.token + (is_new ? from - partition.token_entry : 0);
        const int32_t later = from + 2 * step;
        const row_indices own = own_indices<config>(partition, cached, later);
        float s[config::row_tiles][config::keys / 8][4];
        cp_async_wait_group<3>();
        __syncwarp(); // k has arrived
        if (!products.are_early || from >= 2 * step)
            mma_abt<config>(s, down_first<config::head_dim>(shared.q),
                            right_first<config::head_dim>(stage.k)); // S = Q K^T
        else
#pragma unroll
            for (int x = 0; x < config::row_tiles * config::keys / 2; x++)
                (&s[0][0][0])[x] =
                    n == 0 ? (&products.s[0][0][0][0])[x] : (&products.s[1][0][0][0])[x];
        find_logits<config>(s, keys.bias, logits);
        mask_logits<config>(s, keys.expiry, token, shared.position, is_new);
        __syncwarp(); // every lane has read k
        load_keys(stage, partition, cached, later, own);
        weigh(s, state); // P = exp2(S - row_max)
        cp_async_wait_group<3>();
        __syncwarp(); // v has arrived
        clear_unkept<config>(stage.v, keys.expiry, shared.position[0]);
        mma_ab<config>(state.out, s, down_first<config::head_dim>(stage.v)); // O += P V
        __syncwarp(); // every lane has read v
        load_values(stage, partition, cached, later, own);
    }
    cp_async_wait_group<0>();
}

/* The number of a tile's rows that a block merges: every ranks-th one. */
__device__ static int32_t own_rows(const cluster_partition &partition, int32_t rows) {
    return (rows - partition.rank + partition.ranks - 1) / partition.ranks;
}

/* With one thread: makes `received` wait for the rows that this block merges. */
template <typename config>
__device__ static void expect_rows(cluster_memory<config> &shared, int32_t rows) {
    constexpr int32_t row_bytes = config::head_dim * (int)sizeof(float) + (int)sizeof(float2);
    const cluster_partition &partition = shared.partition;
    mbarrier_arrive_expect_tx(&shared.received,
                              own_rows(partition, rows) * partition.ranks * row_bytes);
}

/* Sends the partial result of this block's partition, row by row, to the blocks that merge it. */
template <typename config>
__device__ static void send_rows(cluster_memory<config> &shared, const row_state<config> &state,
                                 int32_t rows) {
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    const int32_t rank = shared.partition.rank, ranks = shared.partition.ranks;
    __syncthreads(); // no warp reads its stages any more
    stage_rows(shared, state, rows);
    __syncthreads();
    for (int r = warp; r < rows; r += config::warps) {
        const merged_warps<config> merged(shared, r);
        const int32_t to = r % ranks, at = r / ranks * ranks + rank;
        const uint32_t received = mapa(shared_address(&shared.received), to);
        for (int d = lane * 4; d < config::head_dim; d += warp_lanes * 4)
            st_async(mapa(shared_address(&shared.part[at][d]), to),
                     make_float4(merged.out(shared, r, d), merged.out(shared, r, d + 1),
                                 merged.out(shared, r, d + 2), merged.out(shared, r, d + 3)),
                     received);
        if (lane == 0)
            st_async(mapa(shared_address(&shared.part_sum[at]), to),
                     make_float2(merged.row_max, merged.row_sum), received);
    }
}

/* Merges row n of this block's rows, which is row r of the tile, with one warp, and writes it. */
template <typename config>
__device__ static void merge_row(const cluster_memory<config> &shared, const forward_plan &plan,
                                 const row_range &range, int32_t n, int32_t r) {
    using element = typename config::element;
    const int32_t ranks = shared.partition.ranks, row = range.first + r;
    const int lane = threadIdx.x % warp_lanes;
    const float (*const part)[config::head_dim] = shared.part + n * ranks;
    const float2 own = shared.part_sum[n * ranks + lane % ranks];
    float most = own.x;
    for (int other = 1; other < ranks; other *= 2)
        most = fmaxf(most, __shfl_xor_sync(~0u, most, other));
    const float weight = own.y == 0 ? 0 : ex2_approx(own.x - most);
    float sum = weight == 0 ? 0 : weight * own.y;
    for (int other = 1; other < ranks; other *= 2)
        sum += __shfl_xor_sync(~0u, sum, other);
    const row_result result = result_of(most, sum, sink_of_row(plan, range, row));
    element *const to = (element *)plan.out.data + row_offset(plan.out, plan, range, row);
    for (int first = 0; first < plan.head_dim; first += warp_lanes * 4) {
        const int d = first + lane * 4;
        float4 out = {};
        for (int rank = 0; rank < ranks; rank++) {
            const float factor = __shfl_sync(~0u, weight, rank);
            if (factor == 0 || d >= plan.head_dim)
                continue; // not 0 * x: out of an empty partition may be NaN
            const float4 x = *(const float4 *)&part[rank][d];
            out.x += factor * x.x;
            out.y += factor * x.y;
            out.z += factor * x.z;
            out.w += factor * x.w;
        }
        if (d >= plan.head_dim)
            continue;
        to[d] = (element)(result.scale == 0 ? 0 : out.x * result.scale);
        to[d + 1] = (element)(result.scale == 0 ? 0 : out.y * result.scale);
        to[d + 2] = (element)(result.scale == 0 ? 0 : out.z * result.scale);
        to[d + 3] = (element)(result.scale == 0 ? 0 : out.w * result.scale);
    }
    if (lane == 0 && plan.lse.data != NULL)
        *lse_at(plan, range, row) = result.lse;
}

template <typename config>
__device__ static void write_tile(const cluster_memory<config> &shared, const forward_plan &plan,
                                  const row_range &range, int32_t rows, int32_t tokens) {
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    const cluster_partition &partition = shared.partition;
    for (int n = warp; n < own_rows(partition, rows); n += config::warps) {
        const int32_t r = partition.rank + n * partition.ranks;
        if (row_position(plan, range, plan.kv_len, range.first + r) < tokens)
            merge_row(shared, plan, range, n, r);
        else
            write_empty_row<typename config::element>(plan, range, range.first + r,
                                                      {lane, warp_lanes});
    }
}

/* Writes the committed tokens whose rows are in this block's partition, with a warp for each,
 * unless a committed token evicts them. */
template <typename config>
__device__ static void commit_tokens(const cluster_memory<config> &shared, const forward_plan &plan,
                                     const decode_plan &cached, const decode_stream &stream) {
    const cluster_partition &partition = shared.partition;
    const int warp = threadIdx.x / warp_lanes, lane = threadIdx.x % warp_lanes;
    for (int32_t token = warp; token < stream.committed; token += config::warps) {
        const int32_t row = shared.slot[token];
        if (row >= partition.first_row && row < partition.first_row + partition.rows &&
            shared.expiry(partition.token_entry + token) >= stream.committed)
            store_token(plan, cached, stream, partition.b, partition.g, token, row,
                        {lane, warp_lanes});
    }
}

template <typename config>
static __global__ void __launch_bounds__(config::threads, 1)
    attend_cluster(const __grid_constant__ forward_plan plan,
                   const __grid_constant__ decode_plan cached, const int32_t ranks,
                   const bool aligned) {
    cluster_memory<config> &shared = shared_memory<cluster_memory<config>>();
    const cluster_partition &partition = shared.partition;
    const int32_t total = plan.q_len * plan.group;
    if (threadIdx.x == 0) {
        shared.partition = partition_of<config>(plan, cached, ranks, aligned);
        mbarrier_init(&shared.received, 1);
        fence_mbarrier_init();
        expect_rows(shared, min(config::rows, total));
    }
    __syncthreads();
    barrier_cluster_arrive();
    decode_stream stream;
    for (row_range range = {partition.b, partition.g, 0, total};;) {
        const int32_t rows = min(config::rows, total - range.first);
        first_products<config> products;
        row_state<config> rows_of_tile;
        // no kernel before place_tokens() runs any more: the cache is as the last call left it
        begin_tile(shared, plan, cached, partition, range, aligned);
        if (range.first == 0)
            load_rows(shared, cached);
        cp_async_wait_group<4>();
        __syncthreads(); // all of q has arrived, and positions and biases of the rows
        multiply_first(products, shared);
        if (range.first == 0) {
            griddepcontrol_wait(); // for place_tokens()
            griddepcontrol_launch_dependents();
            stream = cached.streams[partition.b * plan.kv_heads + partition.g];
            load_tokens(shared, cached, stream);
            __syncthreads();
        }
        clear_rows(rows_of_tile);
        if (stream.tokens > 0)
            attend_partition(shared, rows_of_tile, products, partition, cached,
                             logit_params_of(plan));
        cp_async_wait_group<0>();
        barrier_cluster_wait(); // every block can receive rows
        send_rows(shared, rows_of_tile, rows);
        wait(&shared.received, range.first / config::rows % 2);
        write_tile(shared, plan, range, rows, stream.tokens);
        range.first += config::rows;
        if (range.first >= total)
            break;
        if (threadIdx.x == 0)
            expect_rows(shared, min(config::rows, total - range.first));
        barrier_cluster_arrive();
        __syncthreads(); // no warp reads q or its partial result any more
    }
    __syncthreads(); // every warp has read the cache
    commit_tokens(shared, plan, cached, stream);
    if (partition.g == 0 && partition.rank == 0 && threadIdx.x == 0 && stream.tokens > 0)
        cached.seen[stream.sequence] = token_position(stream, stream.committed);
}
