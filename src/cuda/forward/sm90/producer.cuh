/* The producer of sm90's forward kernel: a warpgroup that gathers q, k and v of tile after tile
 * into shared memory, with a note for the consumers on each block of keys. */
#ifndef FDMA_CUDA_FORWARD_SM90_PRODUCER_CUH
#define FDMA_CUDA_FORWARD_SM90_PRODUCER_CUH

#include "cuda/forward/sm90/tile.cuh"

static constexpr int32_t no_key = (int32_t)no_row;

/* The keys of one tile. */
struct key_source {
    const int32_t *list; // NULL: entry j is key j
    const key_record *records;
    const char *k, *v;
    int32_t entries;
};

/* How many entries of the list, or keys, some row of the tile may see. */
__device__ static int32_t count_entries(const forward_plan &plan, const row_tile &tile,
                                        int32_t list) {
    if (plan.count == NULL)
        return plan.causal ? min(plan.kv_len, tile.last + 1) : plan.kv_len;
    const int2 count = plan.count[(int64_t)(tile.b * plan.kv_heads + tile.g) * plan.lists + list];
    if (!plan.causal)
        return count.y;
    // at most one key arrives at a position
    return min(count.y, count.x + tile.last - row_position(plan, list * list_queries));
}

/* Where the rows of a kv head, or of its group's first query head, begin. */
__device__ static const char *rows_of(const head_view &view, int32_t b, int32_t head) {
    return (const char *)view.data + 2 * (b * view.batch + head * view.head);
}

__device__ static key_source keys_of(const forward_plan &plan, const row_tile &tile) {
    const int32_t head = tile.b * plan.kv_heads + tile.g;
    const int32_t list = plan.causal ? tile.query / list_queries : 0;
    key_source keys;
    keys.list =
        plan.list == NULL ? NULL : plan.list + head * plan.list_head + list * plan.list_tile;
    keys.records = plan.records == NULL ? NULL : plan.records + (int64_t)head * plan.kv_len;
    keys.k = rows_of(plan.k, tile.b, tile.g);
    keys.v = rows_of(plan.v, tile.b, tile.g);
    keys.entries = count_entries(plan, tile, list);
    return keys;
}

/* Of a key that no row of the tile keeps: its bias keeps it out, at no cost, where an expiry would
 * need a cut. */
__device__ static inline key_record no_record(void) { return {INT32_MAX, -INFINITY}; }

/* What is not finite is thrice the largest number instead, which their sum makes inf. NaN is inf
 * then: as the bias of a key that is kept, either makes NaN. */
__device__ static inline void write_bias(bias_octet *octet, int32_t place, float bias) {
    const bool is_finite = fabsf(bias) <= FLT_MAX;
    float rest = is_finite ? bias : bias < 0 ? -FLT_MAX : FLT_MAX;
#pragma unroll
    for (int part = 0; part < bias_parts; part++) {
        const __nv_bfloat16 upper = from_float_toward_zero<__nv_bfloat16>(rest);
        octet->parts[part][place] = upper;
        rest -= is_finite ? to_float(upper) : 0;
    }
}

/* What a lane knows of the key that it looks after in a block. */
struct own_key {
    int32_t key; // no_key: there is none to read
    key_record record;
};

/* The producer's warpgroup, between blocks. */
template <class config> struct producer {
    forward_memory<config> *memory;
    tile_order order;
    ring_place<config::buffers> kv;
    ring_place<config::notes> notes;
    ring_place<1> q;
    int32_t warp, own_row; // the row of a block whose key this lane looks after

    __device__ inline int32_t fetch_entry(const forward_plan &plan, const key_source &keys,
                                          int32_t block) const {
        const int32_t i = block * config::key_rows + own_row;
        if (i >= keys.entries)
            return no_key;
        const int32_t entry = keys.list == NULL ? i : keys.list[i];
        return is_key(entry, plan.kv_len) ? entry : no_key;
    }

    __device__ inline key_record fetch_record(const key_source &keys, int32_t key) const {
        if (keys.records == NULL)
            return {key == no_key ? INT32_MIN : INT32_MAX, 0};
        return key == no_key ? no_record() : keys.records[key];
    }

    /* Rows of k or of v into the next buffer. */
    __device__ inline void load_rows(const forward_plan &plan, const head_view &view,
                                     const char *rows, int32_t key) {
        wait(&memory->kv_empty[kv.index], kv.parity ^ 1);
        gather_rows<config::key_rows, config::panels, config::group_keys>(
            shared_address(memory->kv[kv.index]), warp * config::group_keys, rows,
            (uint32_t)(2 * view.row), (uint32_t)key, plan.head_dim);
        cp_async_mbarrier_arrive_noinc(&memory->kv_full[kv.index]);
        kv.advance();
    }

    /* A key that all rows of the tile have outlived is not read. */
    __device__ static inline void bury(const row_tile &tile, own_key *own) {
        if (own->key != no_key && own->record.expiry <= tile.first)
            *own = {no_key, no_record()};
    }

    /* A key's positions are cut to the tile's, and those past it are `never`. */
    __device__ static inline key_span span_of(const forward_plan &plan, const row_tile &tile,
                                              const own_key &own) {
        const int32_t end = own.record.expiry;
        const int32_t from = plan.causal ? own.key : tile.first;
        return {(int16_t)(from > tile.last ? never : max(from, tile.first) - tile.first),
                (int16_t)(end > tile.last ? never : max(end, tile.first) - tile.first)};
    }

    __device__ inline void write_notes(const forward_plan &plan, const row_tile &tile,
                                       const own_key &own) {
        wait(&memory->notes_empty[notes.index], notes.parity ^ 1);
        block_notes<config> *const note = &memory->notes[notes.index];
        const int32_t place = note_place(own_row);
        if constexpr (config::has_softcap)
            note->bias[place] = own.record.bias;
        else
            write_bias(&note->octet[own_row / octet_keys], own_row % octet_keys,
                       own.record.bias * (1 / (plan.scale * log2_e)));
        note->spans[place] = span_of(plan, tile, own);
        const bool arrives = plan.causal && own.key > tile.first;
        const uint32_t cut = __ballot_sync(~0u, arrives || own.record.expiry <= tile.last);
        if (threadIdx.x % 32 == 0)
            note->cuts[warp] = (cut & 0xffff) != 0 | (cut >> 16 != 0) << 1;
        fence_proxy_async(); // wgmma reads biases
        mbarrier_arrive(&memory->notes_full[notes.index]);
        notes.advance();
    }

    __device__ inline void load_queries(const forward_plan &plan, const row_tile &tile,
                                        tile_notes note) {
        constexpr int warp_rows = config::rows / warpgroup_warps;
        const int32_t row = tile.first_row + warp * warp_rows + threadIdx.x % 32;
        const int64_t own = row / plan.group * plan.q.row + row % plan.group * plan.q.head;
        wait(&memory->q_empty, q.parity ^ 1);
        gather_rows<config::rows, config::panels, warp_rows>(
            shared_address(memory->q), warp * warp_rows,
            rows_of(plan.q, tile.b, tile.g * plan.group), chunk_bytes,
            row < tile.end_row ? (uint32_t)(own / (chunk_bytes / 2)) : no_row, plan.head_dim);
        hand_on(note);
    }

    /* The tile itself, after its queries if it has any. */
    __device__ inline void hand_on(tile_notes note) {
        if (threadIdx.x == 0) {
            memory->tile = note;
            mbarrier_arrive(&memory->q_full);
        }
        cp_async_mbarrier_arrive_noinc(&memory->q_full);
        q.advance();
    }

    /* Keys run a block ahead of values, entries of the list two blocks, records one. */
    __device__ inline void load_tile(const forward_plan &plan, int32_t index) {
        const row_tile tile = tile_at<config>(plan, order, index);
        const key_source keys = keys_of(plan, tile);
        const int32_t blocks = max(1, (keys.entries + config::key_rows - 1) / config::key_rows);
        const int32_t rest = keys.entries - (blocks - 1) * config::key_rows;
        int32_t before = no_key, next = fetch_entry(plan, keys, 1);
        own_key own = {fetch_entry(plan, keys, 0)};
        own.record = fetch_record(keys, own.key);
        for (int32_t block = 0; block < blocks; block++) {
            const key_record next_record = fetch_record(keys, next);
            const int32_t after = fetch_entry(plan, keys, block + 2);
            if (plan.causal)
                bury(tile, &own);
            load_rows(plan, plan.k, keys.k, own.key);
            if (block == 0)
                load_queries(plan, tile, {index, blocks, rest <= config::short_keys});
            else
                load_rows(plan, plan.v, keys.v, before);
            write_notes(plan, tile, own);
            before = own.key;
            own = {next, next_record};
            next = after;
        }
        load_rows(plan, plan.v, keys.v, before);
    }

    /* The tiles of this block of threads: there and back over the grid, so that everyone gets
     * heavy and light ones. */
    __device__ inline void run(const forward_plan &plan) {
        const int32_t grid = gridDim.x, all = order.tiles * order.heads;
        for (int32_t turn = 0; turn * grid < all; turn++) {
            const int32_t place = turn % 2 == 0 ? blockIdx.x : grid - 1 - blockIdx.x;
            if (turn * grid + place < all)
                load_tile(plan, turn * grid + place);
        }
        wait(&memory->q_empty, q.parity ^ 1);
        hand_on({-1, 0, false});
    }
};

#endif
