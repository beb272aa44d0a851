/* The keys that a tile of rows visits. */
#ifndef FDMA_CUDA_FORWARD_SM80_WALK_CUH
#define FDMA_CUDA_FORWARD_SM80_WALK_CUH

#include "cuda/forward/sm80/rows.cuh"

struct key_walk {
    const int32_t *list;       // NULL: 0, 1, 2, ...
    const key_record *records; // by key; NULL: kept by all, no bias
    int32_t entries;
    int32_t kv_len;
};

/* The end of what a tile visits of its list: arrivals are different keys, ascending, and some of
 * them may be absent, so that those up to `last` are not more than the positions up to there. */
__device__ static inline int32_t end_of_list(const forward_plan &plan, int2 count, int32_t t,
                                             int32_t last) {
    const int64_t size = plan.list_tile > 0 ? plan.list_tile : plan.list_head;
    const int32_t all = (int32_t)min((int64_t)max(count.y, 0), size);
    const int32_t whole = min(max(count.x, 0), all);
    const int32_t list_position = t * list_queries + plan.kv_len - plan.q_len;
    const int32_t seen = max(last - max(list_position, -1), 0);
    return plan.causal ? whole + min(all - whole, seen) : all;
}

/* The walk of a tile of `rows` rows. */
__device__ static inline key_walk start_walk(const forward_plan &plan, const row_place &place,
                                             int32_t rows) {
    const int64_t head = (int64_t)place.b * plan.kv_heads + place.g;
    const int32_t last = position_of(plan, place, place.first + rows - 1);
    const int32_t t = plan.lists == 1 ? 0 : place.first / plan.group / list_queries;
    key_walk walk = {};
    walk.kv_len = plan.kv_len;
    walk.records = plan.records ? plan.records + head * plan.kv_len : nullptr;
    walk.list = plan.list ? plan.list + head * plan.list_head + t * plan.list_tile : nullptr;
    if (plan.causal && last < 0)
        return walk;
    if (plan.count == nullptr)
        walk.entries = plan.causal ? min(last + 1, plan.kv_len) : plan.kv_len;
    else
        walk.entries = end_of_list(plan, plan.count[head * plan.lists + t], t, last);
    return walk;
}

/* What a tile works from; in shared memory, to keep it out of the registers. */
struct tile_work {
    row_place place;
    key_walk walk;
    row_source k, v;
    logit_form form;
};

__device__ static inline tile_work start_work(const forward_plan &plan, const row_place &place,
                                              int32_t rows, bool aligned) {
    return {place, start_walk(plan, place, rows),
            source_of(plan.k, place.b, place.g, plan.head_dim, aligned),
            source_of(plan.v, place.b, place.g, plan.head_dim, aligned), form_of(plan)};
}

/* A key, or what is_key() says no to. */
__device__ static inline int32_t entry_at(const key_walk &walk, int32_t n) {
    if (n >= walk.entries)
        return -1;
    return walk.list ? walk.list[n] : n;
}

/* What an entry brings: its key's record, or that all rows keep it, or none. */
template <int keys>
__device__ static inline void fetch_fact(key_facts<keys> &facts, int column, const key_walk &walk,
                                         int32_t entry) {
    const bool there = is_key(entry, walk.kv_len);
    if (there && walk.records != nullptr) {
        cp_async_4(shared_address(&facts.bias[column]), &walk.records[entry].bias);
        cp_async_4(shared_address(&facts.expiry[column]), &walk.records[entry].expiry);
    } else {
        facts.bias[column] = 0;
        facts.expiry[column] = there ? INT32_MAX : INT32_MIN;
    }
}

/* Starts copying rows of k or v of a block of keys; zeros where there is no key, so that what is
 * not read multiplies as 0. */
template <typename config>
__device__ static inline void load_block(char *to, const int32_t *keys, const row_source &source,
                                         int32_t kv_len) {
    using layout = row_layout<config::head_dim>;
    constexpr int copiers = layout::copiers, step = config::threads / copiers;
    static_assert(step % 8 == 0, "a lane's rows are turned alike");
    const uint32_t thread = opaque(threadIdx.x);
    const int first = thread / copiers, lane = thread % copiers;
    if (!source.aligned) {
#pragma unroll 1
        for (int n = first; n < config::keys; n += step) {
            const bool there = is_key(keys[n], kv_len);
            copy_row_slowly<config::head_dim>(to, n, row_at(source, there ? keys[n] : 0),
                                              source.chunks, there);
        }
        return;
    }
    const row_source from = source; // whose fields are not read again after each copy
    const uint32_t at = shared_address(to) + layout::offset(first, lane);
    int32_t key[config::keys / step];
#pragma unroll
    for (int n = 0; n < config::keys / step; n++)
        key[n] = keys[first + n * step];
#pragma unroll
    for (int n = 0; n < config::keys / step; n++) {
        const bool there = is_key(key[n], kv_len);
        const char *const row = row_at(from, there ? key[n] : 0) + lane * chunk_bytes;
#pragma unroll
        for (int x = 0; x < layout::chunks; x += copiers)
            cp_async_16(at + n * step * layout::row_bytes + x * chunk_bytes, row + x * chunk_bytes,
                        there && x + lane < from.chunks ? chunk_bytes : 0);
    }
}

/* The entry of block n that this thread lists. */
template <typename config>
__device__ static inline int32_t own_entry(const key_walk &walk, int32_t n) {
    const int32_t column = threadIdx.x;
    return column < config::keys ? entry_at(walk, n * config::keys + column) : -1;
}

#endif
