/* Common definitions for the producer and the consumers of sm90's backward kernel: the
 * configuration, shared memory with its barriers, and the work of a thread block.
 *
 * A thread block owns a slot block for a range of query blocks. k and v of the slots' keys stay in
 * shared memory, dk and dv in the consumers' registers, and the queries are streamed past, one or
 * two tiles of 64 queries of one head per step. At the start of a query block a slot may change its
 * key. Then a new generation of keys begins: the gradients of the keys that leave are written, and
 * the new keys take their rows. A generation also begins where a thread block that takes all slot
 * blocks of a head goes on to the next one. */
#pragma once

#include "cuda/device/gather.cuh"
#include "cuda/device/wgmma.cuh"
#include "cuda/plan/backward.cuh"

#include <cuda.h>

/* A tensor [batch, length, heads, head_dim] of 16-bit elements, copied in boxes of `rows` rows of
 * one head and panel_channels channels. Rows and channels past the end are 0. */
struct row_map {
    CUtensorMap map;
    bool has_batches, has_heads; // false: there is one, or it is repeated
};

/* Copies the box that begins with row `row` and channel `channel` of a head. */
__device__ static void copy_box(uint32_t shared, const row_map &rows, int32_t b, int32_t row,
                                int32_t head, int32_t channel, uint64_t *barrier) {
    cp_async_bulk_tensor(shared, &rows.map, channel, row, rows.has_heads ? head : 0,
                         rows.has_batches ? b : 0, barrier);
}

static constexpr int q_tile_rows = 64; // queries of one head in a tile

/* The passes. slot_pass takes the keys that are live at the first position of a query block, slot
 * by slot; diagonal_pass the keys that arrive inside one; listed_pass, in place of both with
 * attn_mask, the lists of kept keys. */
enum pass_kind { slot_pass, diagonal_pass, listed_pass };

/* element: of q, k, v and out. most_channels: head_dim, rounded up to a shape that is built. Two
 * consumers split the slots of a block between them, each step has 64 queries, and each consumer
 * makes dq of half of the channels. There are three exceptions:
 *   wide    with 256 channels, dk and dv of 64 slots fill the registers of both consumers, so they
 *           split the queries of a step and the channels instead
 *   narrow  in the diagonal pass, which rarely has more than 64 keys, a block has 64 slots and one
 *           consumer, and two blocks share a multiprocessor; softcap with 128 channels would leave
 *           it too few registers
 *   long    in the slot pass with 64 channels and without softcap, a step has two tiles, 128
 *           queries, because a step of one tile mostly waits for its products. Each consumer makes
 *           dq of one of the tiles, with all channels. With softcap or attn_bias there are too few
 *           registers. */
template <typename element_, int most_channels, bool softcap, bool drops_, bool pairs,
          pass_kind kind>
struct backward_config {
    using element = element_;
    static constexpr bool has_softcap = softcap, drops = drops_, has_pairs = pairs;
    static constexpr bool is_diagonal = kind == diagonal_pass, is_listed = kind == listed_pass;
    static constexpr bool is_slot = kind == slot_pass;
    static constexpr int channels = most_channels;
    static constexpr bool is_wide = channels > 128;
    static constexpr bool is_narrow = is_diagonal && channels <= 64;
    static constexpr int panels = channels / panel_channels;
    static constexpr int row_bytes = panels * line_bytes;
    static constexpr int consumers = is_narrow ? 1 : 2; // warpgroups
    static constexpr int warpgroup_slots = 64;
    static constexpr int slots = is_wide ? warpgroup_slots : consumers * warpgroup_slots;
    static constexpr bool is_long = is_slot && channels == 64 && !has_softcap && !has_pairs;
    static constexpr int q_tiles = is_long ? 2 : 1;      // of a step
    static constexpr int q_rows = q_tiles * q_tile_rows; // queries of a step
    static constexpr int own_queries = is_wide ? q_rows / consumers : q_rows;
    static constexpr int own_channels = is_wide ? channels / consumers : channels; // of dk and dv
    // dq_sum_of() stores dq in blocks of stored_columns channels, the same number in all passes,
    // because the narrow form has no registers for more. stored_registers: a lane's sums in a
    // block.
    static constexpr int stored_columns = channels > 64 ? 64 : 32;
    static constexpr int stored_registers = q_tile_rows * stored_columns / warpgroup_threads;
    // channels of dq that a consumer makes, in dq_products products of dq_columns channels each
    static constexpr int dq_channels = is_long ? channels : channels / consumers;
    static constexpr int dq_columns = is_long ? channels : stored_columns;
    static constexpr int dq_products = dq_channels / dq_columns;
    static constexpr int dq_registers = q_tile_rows * dq_columns / warpgroup_threads;
    // longer query blocks gain nothing with 64 channels, nor with 256
    static constexpr int most_queries = channels == 128 ? most_block_queries : list_queries;
    // most slot blocks of a query block in the diagonal pass, one after the other in a thread block
    static constexpr int diagonal_blocks = (most_queries - 1 + slots - 1) / slots;
    // dq is added to dq_sum from shared memory, except with 256 channels, where there is no room
    // for it, and with 64, where adding from registers is faster
    static constexpr bool stages_dq = channels == 128 && !is_diagonal;
    // a thread block may take all slot blocks of a head, and then writes dq
    static constexpr bool may_own_dq = is_slot && !is_wide && !has_pairs;
    // the diagonal pass, which writes dq, loads the sums of a step to shared memory
    static constexpr bool loads_dq = is_diagonal && !is_wide;
    // steps in flight
    static constexpr int stages = is_wide || is_narrow || stages_dq || loads_dq ? 2
                                  : channels > 64 || is_long                    ? 3
                                                                                : 4;
    // The keys of a generation are loaded after this many of its steps. With semaphores dq_turns
    // waits in the third step until the consumers have ended the first one, which needs the keys.
    static constexpr int steps_before_keys = stages > 2 ? 2 : 1;
    // of a thread block; with more of them, what they share leaves the L2 cache
    static constexpr int most_slot_blocks = !is_slot ? 1 : channels > 64 ? 8 : 16;
    static constexpr int ds_buffers = is_wide || is_narrow ? 1 : 2;
    static constexpr int threads = (consumers + 1) * warpgroup_threads;
    static constexpr int blocks = is_narrow ? 2 : 1; // of a multiprocessor
    // the producer reads the mask of a step before its stage is free, if it has the registers
    static constexpr bool reads_mask_ahead = is_listed && channels <= 64;
    // With 128 channels the consumers need 240 registers, which leaves 24 for the producer. With
    // dropout, in the diagonal pass and for steps of 128 queries the producer needs 40.
    static constexpr int producer_registers = is_wide                           ? 56
                                              : is_narrow                       ? 48
                                              : channels == 64 && !is_long      ? 104
                                              : drops || is_diagonal || is_long ? 40
                                                                                : 24;
    static constexpr int consumer_registers =
        is_narrow ? 256 - producer_registers : (504 - producer_registers) / 2;
    // lse and delta are read before the wait for the products that they are subtracted from
    static constexpr bool reads_ahead = !has_softcap && !(drops && channels == 128);
    // warps of the producer that load a step: q, dout and the header; and warps that write its mask
    // or codes
    static constexpr int step_loaders = 3;
    static constexpr int step_writers = is_listed ? warpgroup_warps : drops ? 1 : 0;
    // dbias is summed in shared memory with softcap, to save registers, and in the wide form, where
    // both consumers have sums of the same slots
    static constexpr bool dbias_in_shared = has_softcap || is_wide;
};

/* The order in which a thread block of the slot pass visits its query blocks. Thread blocks that
 * run side by side share queries and dq in the L2 cache, as long as they visit a query block at
 * nearly the same time. */
enum block_order {
    ascending,
    descending, // if slots change their keys, or if they do not but slot blocks add in order: all
                // see the last query block, and so begin with the same one. Also with attn_bias,
                // which the heads of a query block share
    by_head,    // otherwise: all query blocks of one query head, then of the next head
};

struct backward_pass {
    row_map q, dout;
    block_order visits;
    int32_t query_blocks;   // of a thread block of the diagonal pass, one after the other
    int32_t list_splits;    // thread blocks that share a list in the listed pass
    float *dq_sum;          // [batch * q_heads][tiles] of 64 queries; see dq_sum_of()
    bool owns_dq;           // all slot blocks of a head are one thread block's, which writes dq
    uint32_t *dq_semaphore; // of each tile: the number of slot blocks that have added to dq_sum; a
                            // step uses the semaphore of its first tile; NULL: they add in any
                            // order
    int32_t tiles;          // of a head
    int32_t slot_blocks;  // thread blocks for the slots of a head: the n-th one takes slot block n,
                          // then each slot block that is slot_blocks after the one before
    const int32_t *order; // of the blocks of a head; see order_blocks(); NULL: as in the grid
    int32_t head_group;   // heads whose blocks alternate, see work_in_group(); 0: none do
    float pair_factor;    // turns attn_bias into what S is added to
};

/* True if the thread blocks of a pass add to dq in turns, as deterministic calls do. */
template <class config> __device__ static bool takes_turns(const backward_pass &pass) {
    return config::is_slot && pass.dq_semaphore != NULL;
}

struct backward_work {
    int32_t head, b, g; // head: b * kv_heads + g
    int32_t slot_block, first_slot;
    int32_t slot_blocks; // slot_block and others, see backward_pass
    int32_t partition;
    int32_t query_block, end; // the range of query blocks; in the diagonal pass, of their slot
                              // blocks; in the listed pass, of blocks of a list's entries
    int32_t list;             // in the listed pass: the index of its list
};

struct alignas(16) slot_record {
    int32_t key; // -1: none
    int32_t expiry;
    float bias; // times log2(e)
    union {
        int32_t boundary; // where causal: the boundary that takes its sums, see boundary_of(); 0:
                          // none
        int32_t from;     // otherwise: the first position at which the key may be kept
    };
};

struct alignas(16) step_header {
    int32_t tile;   // the first tile of the step, among the tiles of all heads
    int32_t first;  // position of its first query; 0 if all queries see the same keys
    bool is_last;   // of its generation
    bool is_odd;    // the position of its first query is odd
    bool writes_dq; // it is the last step that adds to dq of its queries, and no kernel follows
    bool is_first;  // it is the first one; in the diagonal pass with writes_dq: the sums are loaded
                    // to shared memory
    bool dq_phase;  // if they are loaded: the parity of dq_ready to wait for
    int32_t h, head_tile; // of the tile
};

struct dq_turn {
    int32_t tile;   // the tile whose semaphore it uses
    uint32_t order; // slot blocks that add to dq_sum before this one
};

static constexpr int most_turns = 4; // a power of 2; at most three have not ended

// slot records of three generations: the one being written out, the current one, the next one
static constexpr int slots_buffers = 3;

struct loaded_block {
    int32_t block;      // a query block, or a slot block of the diagonal pass, or a part of a list
    int32_t head;       // by_head: in the group; otherwise 0
    int32_t slot_block; // the n-th one of this thread block
};

/* The progress of a warp of the producer, in shared memory because it has few registers. */
struct load_progress {
    loaded_block now, next;
    int32_t end;         // of the queries that may see a key of the slots, see end_of_queries()
    int32_t step;        // since the start of the kernel
    int32_t steps_ahead; // steps loaded since keys began to wait for room, or no_keys
    int32_t changes;     // 1: after this block a slot changes its key, or nothing follows
    // in the diagonal pass
    int32_t next_key; // of the first slot of the next block
    int32_t dq_loads; // loads of dq that the warp has issued
};

static constexpr int32_t no_keys = -1;

/* Shared memory, and its barriers. P: the 128 threads of the producer. C: the threads of both
 * consumers, or of the only one in the narrow form, in `warps` warps, 8 or 4.
 *
 * name          arrivals  who arrives                              who waits             phase
 * step_ready[i] loaders   P: lane 0 of warps 0 and 1, with the     C: before a step      use of
 *               + writers bytes that their copies add, and of warp                       stage i
 *                         2, when it has written the header; lane
 *                         0 of each warp that writes a mask or
 *                         codes, when it has
 * step_free[i]  warps     C: lane 0 of each warp, after a step     P: before it loads a  use of
 *                                                                  step; dq_turns        stage i
 * dq_ready      1         P: lane 0 of warp 2, with the bytes of   C: before it writes   loaded
 *                         the sums that it loads                   the loaded dq         sums
 * dq_free       warps     C: lane 0 of each warp, when it has read P: lane 0 of warp 2,  loaded
 *                         the sums                                 before it loads       sums
 * turn_begun    1         dq_turns: when the slot blocks before    C: before it adds dq  step
 *                         this one have added dq of the step
 * dq_added      warps     C: lane 0 of each warp, when it has      dq_turns              step
 *                         issued dq of the step, and dq of the
 *                         previous step has been added
 * all_dq_added  warps     C: lane 0 of each warp, when all its dq  dq_turns, at its end  once
 *                         has been added
 * slots_ready   128       P: each thread, when it has written the  C: before it takes    generation
 *                         record of its slot                       over the slots
 * keys_ready    128       P: each thread, when its copies of k and C: before the first   generation
 *                         v are complete                           step
 * keys_free     warps     C: lane 0 of each warp, when it takes    P: before it loads    generation
 *                         over the slots and has read the keys of  the new keys
 *                         the previous generation
 *
 * loaders and writers: step_loaders and step_writers. dq_turns is thread turn_thread of P in calls
 * whose slot blocks add to dq in order. Other calls do not use turn_begun, dq_added and
 * all_dq_added. The latter two are used only with stages_dq, where lane 0 of each warp waits for
 * turn_begun. Without it all of C does, and dq_turns waits for step_free. dq_ready and dq_free are
 * used only with loads_dq, for steps whose header has is_first and writes_dq. The last phase of
 * slots_ready comes with is_over. P waits for the opposite parity of step_free and dq_free, so that
 * its first waits pass at once.
 *
 * Named barriers, at which every thread that arrives also waits:
 *
 * number                arrivals  who         for what
 * 0                     all       all         once: mbarriers, work and dbias are initialised
 * producer_barrier      128       P           whether a slot changes its key after this block; in
 *                                             the diagonal pass also the first key of the next one
 * all_barrier           128, 256  C           dS of the step is stored; in the wide form also P,
 *                                             and once more when both have been read
 * consumer_barrier + n  128       consumer n  empty rows are cleared; in the narrow form also: dS
 *                                             of the previous step has been read */
template <class config> struct backward_memory {
    alignas(1024) uint8_t k[config::slots * config::row_bytes];
    alignas(1024) uint8_t v[config::slots * config::row_bytes];
    alignas(1024) uint8_t
        ds[config::ds_buffers][config::q_tiles][config::slots * line_bytes]; // [slot][query]
    // with stages_dq: dq of each warp, before it is added to dq_sum; with loads_dq: the sums loaded
    // from there; in the layout of dq_sum_of()
    static constexpr bool has_dq = config::stages_dq || config::loads_dq;
    alignas(128) float dq[has_dq ? config::channels / config::stored_columns : 1][warpgroup_warps]
                         [has_dq ? config::stored_registers * 32 : 4];
    alignas(1024) uint8_t p[config::is_wide ? config::slots * line_bytes : 16]; // [slot][query]
    alignas(1024) uint8_t q[config::stages][config::q_rows * config::row_bytes];
    alignas(1024) uint8_t dout[config::stages][config::q_rows * config::row_bytes];
    alignas(16) float lse[config::stages][config::q_rows];
    alignas(16) float delta[config::stages][config::q_rows];
    step_header header[config::stages];
    slot_record slots[slots_buffers][config::slots];
    // of attn_mask, for the queries of each step: bits of the queries that keep the key of each
    // slot
    uint2 mask[config::is_listed ? config::stages : 1][config::is_listed ? config::slots : 1];
    // dropout's codes: of the slots' keys, and of the pairs of positions in each step. An odd step
    // has half a pair at either end.
    uint32_t key_code[slots_buffers][config::drops ? config::slots : 1];
    row_code pair_code[config::stages][config::drops ? config::q_rows / 2 + 1 : 1];
    // sums of each consumer in this generation and the previous one, and the sums of older ones
    float dbias[2][config::consumers][config::slots], dbias_before[config::slots];
    int32_t next[warpgroup_threads]; // the key of each slot in the next query block
    load_progress progress[warpgroup_warps];
    backward_work work;
    int2 visits[config::most_slot_blocks]; // of each slot block: blocks x to y - 1
    tile_list kept_list;                   // of the listed pass
    dq_turn turns[most_turns];             // of the last steps
    int32_t is_over;                       // 1: no generation follows
    uint64_t step_ready[config::stages], step_free[config::stages];
    uint64_t dq_ready, dq_free;
    uint64_t turn_begun, dq_added, all_dq_added;
    uint64_t slots_ready, keys_ready, keys_free;
    // limit for a block on 9.0, where each block reserves 1 KB
    static constexpr int most_bytes = (228 / config::blocks - 1) * 1024;
};

template <class config> __device__ static void init_barriers(backward_memory<config> *memory) {
    const int warps = config::consumers * warpgroup_warps;
    for (int i = 0; i < config::stages; i++) {
        mbarrier_init(&memory->step_ready[i], config::step_loaders + config::step_writers);
        mbarrier_init(&memory->step_free[i], warps);
    }
    mbarrier_init(&memory->dq_ready, 1);
    mbarrier_init(&memory->dq_free, warps);
    mbarrier_init(&memory->turn_begun, 1);
    mbarrier_init(&memory->dq_added, warps);
    mbarrier_init(&memory->all_dq_added, warps);
    mbarrier_init(&memory->slots_ready, warpgroup_threads);
    mbarrier_init(&memory->keys_ready, warpgroup_threads);
    mbarrier_init(&memory->keys_free, warps);
    fence_mbarrier_init();
}

// named barriers; see backward_memory
static constexpr int producer_barrier = 1;
static constexpr int all_barrier = 2;
static constexpr int consumer_barrier = 3; // consumer 0; the next one is for consumer 1

/* The sums of dq of a tile for the n-th stored_columns channels, of one warp of the warpgroup that
 * makes them: its accumulators four by four, [stored_registers / 4][32 lanes][4]. */
template <class config>
__device__ static float *dq_sum_of(const backward_pass &pass, int32_t tile, int n, int32_t warp) {
    constexpr int per_tile = config::channels / config::stored_columns;
    const int64_t all = ((int64_t)tile * per_tile + n) * warpgroup_warps + warp;
    return pass.dq_sum + all * (config::stored_registers * 32);
}

/* The key of a list entry; -1: none. */
__device__ static int32_t key_of(const forward_plan &plan, int32_t entry) {
    return is_key(entry, plan.kv_len) ? entry : -1;
}

__device__ static tile_list kept_list_of(const backward_plan &plan, const backward_work &work) {
    return tile_list_of(plan.forward, work.b, work.g, work.list * list_queries, 0);
}

/* The expiry of the key of entry n of the list that all query blocks share. */
__device__ static int32_t entry_expiry(const forward_plan &plan, int32_t head, int32_t n) {
    const int32_t key = key_of(plan, list_entry(plan, head, 0, n));
    return key < 0 ? INT32_MIN : plan.records[(int64_t)head * plan.kv_len + key].expiry;
}

/* The key of a slot in a query block, or the slot-th key that arrives inside the block, or the key
 * of the slot-th entry in a block of a list; -1: none. */
template <class config>
__device__ static int32_t slot_key(const backward_plan &plan, const backward_memory<config> &memory,
                                   int32_t query_block, int32_t slot) {
    const forward_plan &forward = plan.forward;
    const int32_t head = memory.work.head;
    if (config::is_listed)
        return key_of(forward, entry_at(memory.kept_list, query_block * config::slots + slot));
    if (config::is_diagonal) {
        const int32_t t = query_block / config::diagonal_blocks;
        const int2 count = list_counts(plan, head, t);
        const int32_t n = count.x + query_block % config::diagonal_blocks * config::slots + slot;
        return n < count.y ? key_of(forward, list_entry(forward, head, t, n)) : -1;
    }
    if (plan.is_rolling)
        return key_of(forward, key_in_slot(plan, head, query_block, slot));
    if (slot >= shared_entries(forward, memory.work.b, head))
        return -1;
    return key_of(forward, forward.list == NULL ? slot : list_entry(forward, head, 0, slot));
}

/* The number of slots that some query of a block sees. Later blocks see no fewer, unless sequences
 * are packed and lists roll. */
__device__ static int32_t visible_slots(const backward_plan &plan, const backward_work &work,
                                        int32_t query_block) {
    const forward_plan &forward = plan.forward;
    const int32_t head = work.head;
    if (plan.is_rolling)
        return list_counts(plan, head, query_block).x;
    const int32_t queries = min(forward.q_len, (query_block + 1) * forward.block_queries);
    if (forward.sequences.ranges != NULL)
        return entries_seen(forward, head, queries - 1);
    if (!forward.causal)
        return plan.slots;
    if (forward.count != NULL)
        return forward.count[(int64_t)head * forward.lists + query_block].y;
    return max(0, query_position(forward, work.b, queries));
}

/* The first query block from `from` to `end` - 1 in which some query sees a slot from first_slot
 * on; otherwise `end`. By a whole warp. */
__device__ static int32_t find_query_block(const backward_plan &plan, const backward_work &work,
                                           int32_t first_slot, int32_t from, int32_t end) {
    for (int32_t base = from; base < end; base += 32) {
        const int32_t query_block = base + threadIdx.x % 32;
        int32_t slots = 0;
        if (query_block < end)
            slots = visible_slots(plan, work, query_block);
        const uint32_t mask = __ballot_sync(~0u, slots > first_slot);
        if (mask != 0)
            return base + __ffs(mask) - 1;
    }
    return end;
}

/* The end of the query blocks that a slot block visits: with slot_per_key the last ones are left
 * out if they keep none of its keys, unless slot blocks add to dq in a fixed order, see dq_order().
 * By a whole warp. */
template <class config>
__device__ static int32_t end_of_visits(const backward_plan &plan, const backward_pass &pass,
                                        const backward_work &work, int32_t first_slot) {
    const forward_plan &forward = plan.forward;
    int32_t expiry = INT32_MIN;
    if (!plan.slot_per_key || pass.dq_semaphore != NULL)
        return work.end;
    const int32_t end = min(first_slot + config::slots, shared_entries(forward, work.b, work.head));
    for (int32_t n = first_slot + threadIdx.x % 32; n < end; n += 32)
        expiry = max(expiry, entry_expiry(forward, work.head, n));
    expiry = __reduce_max_sync(~0u, expiry);
    const int32_t first_position = query_position(forward, work.b, 0);
    if (expiry <= first_position)
        return 0;
    const uint32_t queries = (uint32_t)expiry - (uint32_t)first_position;
    return min(work.end, (int32_t)((queries - 1) / list_queries + 1));
}

__device__ static int32_t count_arrivals(const backward_plan &plan, int32_t head, int32_t t) {
    const int2 count = list_counts(plan, head, t);
    return count.y - count.x;
}

/* The index in the unordered grid of the n-th block of a head in pass.order. */
__device__ static int32_t work_in_order(const backward_pass &pass, int32_t n, int32_t head,
                                        int32_t heads) {
    const int32_t entry = pass.order[n];
    const int32_t range = entry / pass.slot_blocks, slot_block = entry % pass.slot_blocks;
    return (range * heads + head) * pass.slot_blocks + slot_block;
}

/* work_in_order() for pass.head_group heads that alternate between their slot blocks. The first
 * slot blocks see the most queries, so no multiprocessor still has much to do when the others
 * end. */
__device__ static int32_t work_in_group(const backward_pass &pass, int32_t id, int32_t heads) {
    const int32_t group = id / (pass.head_group * pass.slot_blocks),
                  first = group * pass.head_group;
    const int32_t n = id - first * pass.slot_blocks, size = min(pass.head_group, heads - first);
    return (first + n % size) * pass.slot_blocks + n / size;
}

/* The slot blocks of one head are neighbours in the grid, because they read the same queries. A
 * block that waits for the dq of another one comes after it: see dq_order(). */
template <class config>
__device__ static backward_work find_work(const backward_plan &plan, const backward_pass &pass) {
    const int32_t heads = plan.forward.batch * plan.forward.kv_heads;
    int32_t id = blockIdx.x;
    if (pass.order != NULL)
        id = work_in_order(pass, id / heads, id % heads, heads);
    else if (pass.head_group > 0)
        id = work_in_group(pass, id, heads);
    const int32_t n = id / pass.slot_blocks, block = id % pass.slot_blocks;
    backward_work work;
    const bool is_reversed = pass.dq_semaphore != NULL && pass.visits == by_head;
    work.slot_block = is_reversed ? pass.slot_blocks - 1 - block : block;
    work.first_slot = work.slot_block * config::slots;
    work.slot_blocks = 1;
    if (config::is_slot)
        work.slot_blocks += (plan.slots / config::slots - 1 - work.slot_block) / pass.slot_blocks;
    work.head = config::is_listed ? id / pass.list_splits % heads : n % heads;
    work.b = work.head / plan.forward.kv_heads;
    work.g = work.head % plan.forward.kv_heads;
    const int32_t block_queries = plan.forward.block_queries;
    const int32_t range = n / heads, all = (plan.rows + block_queries - 1) / block_queries;
    const int32_t query_blocks = config::is_diagonal    ? pass.query_blocks
                                 : plan.partitions == 1 ? all
                                                        : plan.partition_lists;
    work.partition = config::is_diagonal ? 0 : range;
    work.query_block = range * query_blocks;
    work.end = min(work.query_block + query_blocks, all);
    if (config::is_diagonal) {
        work.query_block *= config::diagonal_blocks;
        work.end *= config::diagonal_blocks;
        return work;
    }
    if (config::is_listed) { // the last list first, because it has the most keys if causal
        work.list = all - 1 - id / pass.list_splits / heads;
        work.query_block = id % pass.list_splits;
        work.end = (kept_list_of(plan, work).entries + config::slots - 1) / (int32_t)config::slots;
        return work;
    }
    if (plan.forward.sequences.ranges != NULL && !plan.is_rolling) {
        const int32_t entries = shared_entries(plan.forward, work.b, work.head);
        const block_range seen = seeing_blocks(plan.forward, work.head, work.first_slot,
                                               min(work.first_slot + config::slots, entries));
        work.query_block = seen.first;
        work.end = seen.end;
    }
    return work;
}

/* Finds the query blocks that each slot block of the work visits. By all warps. */
template <class config>
__device__ static void find_visits(const backward_plan &plan, const backward_pass &pass,
                                   const backward_work &work, int2 *visits) {
    for (int32_t n = threadIdx.x / 32; n < work.slot_blocks; n += config::threads / 32) {
        const int32_t first_slot = work.first_slot + n * pass.slot_blocks * config::slots;
        const bool visits_all = !config::is_slot || (pass.owns_dq && n == 0);
        int32_t first = work.query_block, end = work.end;
        if (!visits_all) {
            end = end_of_visits<config>(plan, pass, work, first_slot);
            first = find_query_block(plan, work, first_slot, first, end);
        }
        if (threadIdx.x % 32 == 0)
            visits[n] = make_int2(first, end);
    }
}
