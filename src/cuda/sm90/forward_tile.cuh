/* What the parties of sm90's forward kernel share: its shapes, its shared memory, its row tiles. */
#ifndef FDMA_CUDA_SM90_FORWARD_TILE_CUH
#define FDMA_CUDA_SM90_FORWARD_TILE_CUH

#include "cuda/device/gather.cuh"
#include "cuda/device/plan.cuh"
#include "cuda/device/ring.cuh"

static constexpr int warpgroup_threads = 128;
static constexpr int warpgroup_warps = 4;

/* element: of q, k, v and out. most_channels: head_dim, rounded up to a shape that is built. */
template <typename element_, int most_channels> struct forward_config {
    using element = element_;
    static constexpr int channels = most_channels;
    static constexpr int panels = channels / panel_channels;
    static constexpr int row_bytes = panels * line_bytes;
    static constexpr int consumers = 2;                     // warpgroups that multiply
    static constexpr int warpgroup_rows = 64;               // of a wgmma
    static constexpr int rows = consumers * warpgroup_rows; // (query, head of the group) pairs
    // registers: scores and out take (key_rows + channels) / 2 of a consumer's, weights key_rows / 4
    static constexpr int key_rows = channels > 128 ? 64 : 128;
    static constexpr int q_buffers = channels > 128 ? 1 : 2; // of a tile's rows
    static constexpr int buffers = channels > 64 ? 4 : 8;    // of k or v
    static constexpr int notes = 3; // blocks of keys whose records are at hand
    static constexpr int threads = (consumers + 1) * warpgroup_threads;
    static constexpr int producer_registers = 40, consumer_registers = 232;
    static constexpr int group_keys = key_rows / warpgroup_warps; // that a producer's warp loads
};

/* How the keys of a group are cut inside a tile. */
enum cut { cut_none = 0, cut_expiry = 1, cut_causal = 2 };

/* What a tile's rows need to know of a block of keys. */
template <class config> struct alignas(16) block_notes {
    float bias[config::key_rows / 2][2][2]; // of key pairs, for each of a thread's two rows
    int32_t expiry[config::key_rows], key[config::key_rows];
    uint8_t cuts[warpgroup_warps]; // of each group of keys, both kinds or-ed
};

/* A tile as the producer hands it on. */
struct tile_notes {
    int32_t index;  // of all tiles; -1: there are no more
    int32_t blocks; // of keys, at least 1
};

template <class config> struct forward_memory {
    alignas(1024) uint8_t q[config::q_buffers][config::rows * config::row_bytes];
    alignas(1024) uint8_t kv[config::buffers][config::key_rows * config::row_bytes];
    block_notes<config> notes[config::notes];
    tile_notes tiles[config::q_buffers];
    uint64_t q_full[config::q_buffers], q_empty[config::q_buffers];
    uint64_t kv_full[config::buffers], kv_empty[config::buffers];
    uint64_t notes_full[config::notes], notes_empty[config::notes];
};

/* `rows` consecutive rows of one kv head: row r is query r / group of head r % group. */
struct row_tile {
    int32_t b, g;
    int32_t first_row, end_row; // of this kv head's
    int32_t query;              // of first_row
    int32_t first, last;        // positions of its first and its last row; 0 where not causal
};

/* Logits, as exponents of 2, are scores times this; with softcap, softened scores. */
__device__ static inline float score_unit(const forward_plan &plan) {
    const float log2_e = 1.44269504088896340736f;
    return plan.softcap == 0 ? plan.scale * log2_e : log2_e;
}

__device__ static inline int32_t row_position(const forward_plan &plan, int32_t query) {
    return plan.causal ? query + plan.kv_len - plan.q_len : 0;
}

/* In what order a call's tiles are done: from the last, heaviest, position on, a few heads at a
 * time, whose keys L2 holds together. */
struct tile_order {
    int32_t tiles;    // of a head
    int32_t heads;    // batch * kv_heads
    int32_t together; // heads
};

/* Tile `index` in this order, below tiles * heads. */
template <class config>
__device__ static inline row_tile tile_at(const forward_plan &plan, const tile_order &order,
                                          int32_t index) {
    const int32_t first_head = index / (order.tiles * order.together) * order.together;
    const int32_t place = index - first_head * order.tiles;
    const int32_t together = min(order.together, order.heads - first_head);
    const int32_t head = first_head + place % together;
    row_tile tile;
    tile.b = head / plan.kv_heads;
    tile.g = head % plan.kv_heads;
    tile.first_row = (order.tiles - 1 - place / together) * config::rows;
    tile.end_row = min(tile.first_row + config::rows, plan.q_len * plan.group);
    tile.query = tile.first_row / plan.group;
    tile.first = row_position(plan, tile.query);
    tile.last = row_position(plan, (tile.end_row - 1) / plan.group);
    return tile;
}

#endif
