/* What the parties of sm90's forward kernel share: its shapes, its shared memory, its row tiles. */
#ifndef FDMA_CUDA_FORWARD_SM90_TILE_CUH
#define FDMA_CUDA_FORWARD_SM90_TILE_CUH

#include "cuda/device/gather.cuh"
#include "cuda/device/ring.cuh"
#include "cuda/device/softmax.cuh"
#include "cuda/plan/plan.cuh"

static constexpr int warpgroup_threads = 128;
static constexpr int warpgroup_warps = 4;

/* element: of q, k, v and out. most_channels: head_dim, rounded up to a shape that is built.
 * softcap: whether there is one; its code in the loop costs those without it 7%. */
template <typename element_, int most_channels, bool softcap> struct forward_config {
    using element = element_;
    static constexpr bool has_softcap = softcap;
    static constexpr int channels = most_channels;
    static constexpr int panels = channels / panel_channels;
    static constexpr int row_bytes = panels * line_bytes;
    static constexpr int consumers = 2;                     // warpgroups that multiply
    static constexpr int warpgroup_rows = 64;               // of a wgmma
    static constexpr int rows = consumers * warpgroup_rows; // (query, head of the group) pairs
    // keys of a block: of a consumer's registers scores and out take (key_rows + channels) / 2,
    // weights, twice, key_rows / 2
    static constexpr int key_rows = channels > 128 ? 64 : 128;
    static constexpr int short_keys = key_rows == 128 ? 64 : key_rows; // of a tile's last block
    static constexpr int buffers = channels > 128 ? 5 : channels > 64 ? 6 : 12; // what fits
    static constexpr int notes = 2; // blocks of keys of which there are notes
    static constexpr int threads = (consumers + 1) * warpgroup_threads;
    // 40 make the producer wait for registers that its copies still read from: 10% of the time;
    // softening scores takes the rest
    static constexpr bool is_tight = has_softcap && channels != 128;
    static constexpr int producer_registers = is_tight ? 40 : 56;
    static constexpr int consumer_registers = is_tight ? 232 : 224;
    static constexpr int group_keys = key_rows / warpgroup_warps; // that a producer's warp loads
};

/* Where a key is kept, in positions since the tile's first: from <= p < end. */
struct key_span {
    int16_t from, end;
};

static constexpr int16_t never = INT16_MAX;

static constexpr int octet_keys = 8; // of a core matrix of wgmma, 16 bytes
static constexpr int bias_parts = 3; // of 8 bits: a float32

/* Biases of eight keys as a matrix that is multiplied by ones: bfloat16 numbers, the sum of whose
 * `parts` is bias / scale. wgmma wants 16 rows; the rest, of which it takes none, are the octets
 * that follow, so that nothing here may be inf or NaN, as 0 * inf is not 0. */
struct bias_octet {
    __nv_bfloat16 parts[bias_parts][octet_keys];
};

/* What a tile's rows need to know of a block of keys. */
template <class config> struct alignas(16) block_notes {
    static constexpr int octets = config::key_rows / octet_keys;
    union {
        bias_octet octet[octets + 2]; // the last ones are 0
        float bias[config::key_rows]; // if softcap: times log2(e), in the order of note_place()
    };
    key_span spans[config::key_rows]; // in the order of note_place()
    // of each warp of the producer, a bit for 16 keys: whether some row does not keep all of them
    uint8_t cuts[warpgroup_warps];
};

/* Of 16 columns the four that a thread's accumulators are of stand side by side: 2 q, 2 q + 1,
 * 2 q + 8 and 2 q + 9 for lane q of a quad. */
__device__ static inline int32_t note_place(int32_t column) {
    const int32_t inside = column % 16;
    return column - inside + inside % 8 / 2 * 4 + inside / 8 * 2 + inside % 2;
}

/* A tile as the producer hands it on. */
struct tile_notes {
    int32_t index;  // of all tiles; -1: there are no more
    int32_t blocks; // of keys, at least 1
    bool is_short;  // the last has no more than short_keys
};

/* Notes stand before kv: compute-sanitizer holds the matrix of biases for 4 KB, as most are. */
template <class config> struct forward_memory {
    alignas(1024) uint8_t q[config::rows * config::row_bytes];
    block_notes<config> notes[config::notes];
    tile_notes tile;
    uint64_t q_full, q_empty;
    uint64_t kv_full[config::buffers], kv_empty[config::buffers];
    uint64_t notes_full[config::notes], notes_empty[config::notes];
    alignas(1024) uint8_t kv[config::buffers][config::key_rows * config::row_bytes];
    static constexpr int most_bytes = 227 * 1024; // of a block's shared memory on 9.0
};

/* `rows` consecutive rows of one kv head: row r is query r / group of head r % group. */
struct row_tile {
    int32_t b, g;
    int32_t first_row, end_row; // of this kv head's
    int32_t query;              // of first_row
    int32_t first, last;        // positions of its first and its last row; 0 where not causal
};

/* Of a query; 0 where all see the same keys. */
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

/* Tile `index` in this order, below tiles * heads. From position to position the heads come in
 * another order: to one block of threads would else always fall the same, and they differ in what
 * their softmax costs. */
template <class config>
__device__ static inline row_tile tile_at(const forward_plan &plan, const tile_order &order,
                                          int32_t index) {
    const int32_t first_head = index / (order.tiles * order.together) * order.together;
    const int32_t place = index - first_head * order.tiles;
    const int32_t together = min(order.together, order.heads - first_head);
    const int32_t turn = place / together;
    const int32_t head = first_head + (place + turn + turn / together) % together;
    row_tile tile;
    tile.b = head / plan.kv_heads;
    tile.g = head % plan.kv_heads;
    tile.first_row = (order.tiles - 1 - turn) * config::rows;
    tile.end_row = min(tile.first_row + config::rows, plan.q_len * plan.group);
    tile.query = tile.first_row / plan.group;
    tile.first = row_position(plan, tile.query);
    tile.last = row_position(plan, (tile.end_row - 1) / plan.group);
    return tile;
}

#endif
