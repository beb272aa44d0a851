/* The producer of sm90's backward kernel: a warpgroup that loads the queries of each step, and the
 * keys of each generation. Each of its threads watches the key of one slot. */
#pragma once

#include "cuda/backward/sm90/tile.cuh"

static constexpr int32_t past_end = -2; // in place of a slot's key after the last query block

/* The consumers leave few registers, so what can be found again is not kept. */
template <class config> struct backward_producer {
    static constexpr int barrier = 1; // of the producer's warps
    static constexpr int32_t no_keys = -1;

    backward_memory<config> *memory;
    int32_t step;        // since the start of the kernel
    int32_t generation;  // of the keys that are in shared memory, or are the next to be loaded
    int32_t steps_ahead; // steps loaded since keys began to wait for room, or no_keys

    __device__ int32_t own_slot(void) const { return threadIdx.x % warpgroup_threads; }

    __device__ int32_t key_in_block(const backward_plan &plan, const backward_pass &pass,
                                    int32_t query_block) const {
        const backward_work &work = memory->work;
        const int32_t slot = own_slot();
        if (query_block >= work.end)
            return past_end;
        return slot < config::slots
                   ? slot_key<config>(plan, work, query_block, work.first_slot + slot)
                   : -1;
    }

    /* The key of this thread's slot in a generation. */
    __device__ int32_t key_in_generation(int32_t which) const {
        return own_slot() < config::slots ? memory->slots[which % slots_buffers][own_slot()].key
                                          : -1;
    }

    /* Hands the slot records of the next generation to the consumers. */
    __device__ void publish_slots(const backward_plan &plan, const backward_pass &pass,
                                  int32_t key) {
        const forward_plan &forward = plan.forward;
        const backward_work &work = memory->work;
        slot_record own = {key, INT32_MIN, 0, {0}};
        if (key >= 0) {
            const key_record record =
                forward.records == NULL
                    ? key_record{INT32_MAX, 0}
                    : forward.records[(int64_t)work.head * forward.kv_len + key];
            own.expiry = record.expiry;
            own.bias = record.bias;
            if (config::is_listed)
                own.boundary = 0;
            else if (plan.partitions > 1 && !config::is_diagonal)
                own.boundary =
                    boundary_of(plan, work.head, work.partition, work.first_slot + own_slot(), key);
            else if (!forward.causal)
                own.from = forward.by_position ? forward.sequences.ranges[key].x : INT32_MIN;
        }
        if (own_slot() < config::slots)
            memory->slots[generation % slots_buffers][own_slot()] = own;
        if (config::drops && own_slot() < config::slots)
            memory->key_code[generation % slots_buffers][own_slot()] =
                key_code_of(forward, work.b, work.g, key);
        if (threadIdx.x == 0)
            memory->is_over = key == past_end;
        mbarrier_arrive(&memory->slots_ready);
    }

    /* Loads rows of k and v, or zeros if `from` is negative. By a whole warp. */
    __device__ void load_row(const backward_plan &plan, const head_view &from_k,
                             const head_view &from_v, int32_t slot, int32_t from) {
        constexpr int vecs = config::channels * 2 / vec_bytes; // of a row
        const forward_plan &forward = plan.forward;
        const backward_work &work = memory->work;
        const uint32_t k = shared_address(memory->k), v = shared_address(memory->v);
#pragma unroll 1
        for (int n = threadIdx.x % 32; n < 2 * vecs; n += 32) {
            const int vec = n % vecs, inside = vec % line_lanes;
            const head_view &view = n < vecs ? from_k : from_v;
            const int64_t row = work.b * view.batch + work.g * view.head + max(from, 0) * view.row;
            const bool is_there = from >= 0 && vec * vec_channels < forward.head_dim;
            const uint32_t panel = vec / line_lanes * config::slots * line_bytes;
            cp_async_16((n < vecs ? k : v) + panel + swizzled(slot, inside),
                        (const char *)view.data + (is_there ? 2 * row + vec * vec_bytes : 0),
                        is_there ? vec_bytes : 0);
        }
    }

    /* Loads k and v of one key, or zeros if there is none. */
    __device__ void load_key(const backward_plan &plan, int32_t slot, int32_t key) {
        const forward_plan &forward = plan.forward;
        if ((uint32_t)key < (uint32_t)forward.carried_len)
            load_row(plan, forward.k_carried, forward.v_carried, slot, key);
        else
            load_row(plan, forward.k, forward.v, slot, key - forward.carried_len);
    }

    /* Loads the new keys of a generation once the consumers have released the old ones. */
    __device__ void load_keys(const backward_plan &plan) {
        const int32_t current = opaque(generation);
        wait(&memory->keys_free, current & 1);
        const int32_t key = key_in_generation(current);
        const bool is_new = current == 0 || key != key_in_generation(current - 1);
        uint32_t left = __ballot_sync(~0u, is_new && own_slot() < config::slots);
        for (; left != 0; left &= left - 1) {
            const int lane = __ffs(left) - 1;
            load_key(plan, own_slot() / 32 * 32 + lane, __shfl_sync(~0u, key, lane));
        }
        cp_async_mbarrier_arrive_noinc(&memory->keys_ready);
        steps_ahead = no_keys;
    }

    __device__ void load_rows(const backward_plan &plan, const head_view &view, int32_t h,
                              int32_t tile, uint32_t block) {
        constexpr int warp_rows = config::q_rows / warpgroup_warps;
        const int32_t warp = threadIdx.x / 32;
        const int32_t query = tile * config::q_rows + warp * warp_rows + threadIdx.x % warp_rows;
        gather_rows<config::q_rows, config::panels, warp_rows, 2>(
            block, warp * warp_rows, rows_of(view, memory->work.b, h), (uint32_t)(2 * view.row),
            query < plan.forward.q_len ? (uint32_t)query : no_row, plan.forward.head_dim);
    }

    /* Words of the mask, of 32 entries of a block each. A warp has some of them, for 32 of the 64
     * queries of a step, and each of its threads those of one query. */
    static constexpr int entry_words = config::slots / 32; // of a block
    static constexpr int own_words = 2 * entry_words / warpgroup_warps;

    /* Word n of the block that begins with entry `first`: which entries a query of head h keeps. */
    __device__ static uint32_t mask_word(const forward_plan &plan, const tile_list &list, int32_t h,
                                         int32_t tile, int32_t first, int n) {
        const int32_t query = tile * config::q_rows + n / entry_words * 32 + threadIdx.x % 32;
        const uint32_t *const bits = kept_bits(plan, list, first / list_queries, h, query);
        return bits[first % list_queries / 32 + n % entry_words];
    }

    /* Writes which queries keep each of the entries of word n. */
    __device__ void write_mask(uint32_t bits, int n, int32_t stage) {
        uint2 &to = memory->mask[stage][n % entry_words * 32 + threadIdx.x % 32];
        (n / entry_words == 0 ? to.x : to.y) = transpose_bits(bits);
    }

    /* Reads this thread's words of a block. */
    __device__ void read_mask(const backward_plan &plan, int32_t h, int32_t tile, int32_t block,
                              uint32_t (&words)[own_words]) const {
        const tile_list list = kept_list_of(plan, memory->work);
        for (int x = 0; x < own_words; x++)
            words[x] = mask_word(plan.forward, list, h, tile, block * config::slots,
                                 threadIdx.x / 32 + x * warpgroup_warps);
    }

    /* Reads and writes them one by one, for lack of registers. */
    __device__ void copy_mask(const backward_plan &plan, int32_t h, int32_t tile, int32_t block,
                              int32_t stage) {
        const tile_list list = kept_list_of(plan, memory->work);
        const int32_t first = block * config::slots;
#pragma unroll
        for (int n = threadIdx.x / 32; n < 2 * entry_words; n += warpgroup_warps)
            write_mask(mask_word(plan.forward, list, h, tile, first, n), n, stage);
    }

    /* Writes dropout's codes of the pairs of positions in a step. By a whole warp. */
    __device__ void write_codes(const backward_plan &plan, int32_t h, int32_t tile, int32_t stage) {
        const int32_t first = query_position(plan.forward, memory->work.b, tile * config::q_rows);
        const int32_t pairs = config::q_rows / 2 + (first % 2 != 0);
#pragma unroll 1
        for (int32_t n = threadIdx.x; n < pairs; n += 32)
            memory->pair_code[stage][n] =
                row_code_of(plan.forward, memory->work.b, h, first + 2 * n);
    }

    /* Whether a step of the diagonal pass is the last one that adds to dq of a tile. Keys that
     * arrive later than all of its queries do not count. By the first thread. */
    __device__ bool writes_dq(int32_t tile, int32_t block) const {
        constexpr int tiles = list_queries / config::q_rows;
        const int32_t seen = (block % config::diagonal_blocks + 1) * config::slots;
        return config::is_diagonal &&
               (memory->is_last_of_queries || seen >= (tile % tiles + 1) * config::q_rows);
    }

    /* Loads q, dout, lse and delta of 64 queries of head h. block: of entries, in the listed
     * pass. */
    __device__ void load_step(const backward_plan &plan, const backward_pass &pass, int32_t h,
                              int32_t tile, int32_t block, bool is_last, bool ends_block) {
        const int32_t stage = step % config::stages, n = threadIdx.x % config::q_rows;
        uint32_t ahead[own_words];
        if constexpr (config::reads_mask_ahead)
            read_mask(plan, h, tile, block, ahead);
        wait(&memory->step_free[stage], step / config::stages % 2 ^ 1);
        load_rows(plan, plan.forward.q, h, tile, shared_address(memory->q[stage]));
        load_rows(plan, plan.dout, h, tile, shared_address(memory->dout[stage]));
        for (int x = 0; config::reads_mask_ahead && x < own_words; x++)
            write_mask(ahead[x], threadIdx.x / 32 + x * warpgroup_warps, stage);
        if constexpr (config::is_listed && !config::reads_mask_ahead)
            copy_mask(plan, h, tile, block, stage);
        const int32_t head = memory->work.b * plan.forward.q_heads + h;
        const int64_t row = (int64_t)head * plan.rows + tile * config::q_rows + n;
        const bool is_lse = threadIdx.x < config::q_rows;
        cp_async_4(shared_address(is_lse ? memory->lse[stage] : memory->delta[stage]) + 4 * n,
                   (is_lse ? plan.row_lse : plan.row_delta) + row);
        if (threadIdx.x == 0) {
            const int32_t first =
                query_position(plan.forward, memory->work.b, tile * config::q_rows);
            const uint32_t order = pass.dq_semaphore == NULL
                                       ? 0
                                       : dq_order(plan, pass, tile * config::q_rows / list_queries);
            memory->header[stage] = {head * pass.tiles + tile,
                                     plan.forward.by_position ? first : 0,
                                     order,
                                     (int16_t)(generation % slots_buffers),
                                     is_last,
                                     first % 2 != 0,
                                     writes_dq(tile, block),
                                     h,
                                     tile};
        }
        cp_async_mbarrier_arrive_noinc(&memory->step_ready[stage]);
        if (config::drops && threadIdx.x < 32)
            write_codes(plan, h, tile, stage);
        __syncwarp(); // before the first lane arrives for all of them
        if (threadIdx.x % 32 == 0 && threadIdx.x / 32 < config::step_writers)
            mbarrier_arrive(&memory->step_ready[stage]);
        step++;
        if (steps_ahead != no_keys && (++steps_ahead == config::stages - 1 || ends_block))
            load_keys(plan);
    }

    /* How many slot blocks add to dq of a query block before this one does. Where lists roll, all
     * lower slot blocks do: lower slots become visible no later, and a slot block visits every
     * query block from its first one on, even if the selection is corrupt. slot_block is returned
     * in two places because returning it in one spills a register. */
    __device__ uint32_t dq_order(const backward_plan &plan, const backward_pass &pass,
                                 int32_t query_block) const {
        const backward_work &work = memory->work;
        if (plan.is_rolling)
            return work.slot_block;
        const int32_t visible = min(visible_slots(plan, work, query_block), plan.slots);
        const int32_t active = (visible + config::slots - 1) / config::slots;
        return active - 1 - work.slot_block;
    }

    /* The end of the queries of a block that may see a key of the slots: where a packed sequence
     * begins in the first half, none of the second half does in the slot pass. */
    __device__ static int32_t end_of_queries(const backward_plan &plan, const backward_pass &pass,
                                             int32_t query_block) {
        const forward_plan &forward = plan.forward;
        const int32_t first = query_block * list_queries, middle = first + config::q_rows;
        if (forward.sequences.ranges == NULL || !plan.is_rolling || config::is_diagonal ||
            config::is_listed || middle >= forward.q_len)
            return forward.q_len;
        return forward.sequences.ranges[middle].x > first ? middle : forward.q_len;
    }

    /* Whether no query of a tile sees a key of the diagonal pass's slots: the n-th key to arrive
     * inside a query block arrives after the first n queries, or later. */
    __device__ static bool sees_none(int32_t tile, int32_t block) {
        constexpr int tiles = list_queries / config::q_rows;
        return config::is_diagonal && block % config::diagonal_blocks * config::slots >=
                                          (tile % tiles + 1) * config::q_rows;
    }

    /* Loads the steps of a query block, or of the listed pass's for a block of entries. True if a
     * slot changes its key after it, or nothing follows. */
    __device__ bool load_query_block(const backward_plan &plan, const backward_pass &pass,
                                     int32_t block) {
        constexpr int tiles = list_queries / config::q_rows;
        const int32_t query_block = config::is_listed     ? memory->work.list
                                    : config::is_diagonal ? block / config::diagonal_blocks
                                                          : block;
        const int32_t group = plan.forward.group;
        bool changes = false;
#pragma unroll 1
        for (int32_t n = 0; n < group * tiles; n++) {
            const int32_t tile = opaque(query_block) * tiles + n % tiles;
            const int32_t end = end_of_queries(plan, pass, opaque(query_block));
            const bool is_tail = (tile + 1) * config::q_rows >= end;
            if (tile * config::q_rows >= end || (sees_none(tile, block) && !is_tail))
                continue; // but a block has at least one step
            const bool ends = n / tiles == group - 1 && (n % tiles == tiles - 1 || is_tail);
            if (ends)
                changes =
                    bar_red_or(barrier, warpgroup_threads,
                               memory->next[own_slot()] != key_in_generation(opaque(generation)));
            load_step(plan, pass, memory->work.g * group + n / tiles, tile, block, changes, ends);
        }
        return changes;
    }

    /* The next query block to visit, or in the diagonal pass the next slot block of it. Where a
     * packed sequence has ended, those follow in which no query sees a slot of this block. */
    __device__ int32_t block_after(const backward_plan &plan, const backward_pass &pass,
                                   int32_t query_block) const {
        if (config::is_listed)
            return min(query_block + pass.list_splits, memory->work.end);
        if (config::is_diagonal) {
            constexpr int blocks = config::diagonal_blocks;
            const int32_t next = query_block + 1;
            const bool stays = next % blocks != 0 && count_arrivals(plan, memory->work.head,
                                                                    query_block / blocks) >
                                                         next % blocks * config::slots;
            return stays ? next : (query_block + blocks) / blocks * blocks;
        }
        const bool skips = plan.is_rolling && plan.forward.sequences.ranges != NULL;
        return skips ? find_query_block<config>(plan, memory->work, query_block + 1)
                     : query_block + 1;
    }

    __device__ void run(const backward_plan &plan, const backward_pass &pass) {
        int32_t query_block =
            config::is_listed     ? memory->work.query_block - pass.list_splits
            : config::is_diagonal ? memory->work.query_block - 1
                                  : find_query_block<config>(plan, memory->work,
                                                             memory->work.query_block) -
                                        1;
        step = 0;
        generation = -1;
        steps_ahead = no_keys;
        // the first round only finds the first generation
        for (;; query_block = block_after(plan, pass, query_block)) {
            const int32_t next_block = block_after(plan, pass, query_block);
            if (config::is_diagonal && threadIdx.x == 0)
                memory->is_last_of_queries = next_block % config::diagonal_blocks == 0;
            const bool is_fixed = generation >= 0 && !plan.is_rolling && !config::is_listed &&
                                  next_block < memory->work.end;
            const int32_t next =
                is_fixed ? key_in_generation(generation) : key_in_block(plan, pass, next_block);
            memory->next[own_slot()] = next;
            if (generation >= 0 && !load_query_block(plan, pass, query_block))
                continue;
            generation++;
            publish_slots(plan, pass, memory->next[own_slot()]);
            if (memory->next[own_slot()] == past_end)
                return;
            // the first keys are loaded after one step, as no others must be released
            steps_ahead = generation == 0 ? config::stages - 2 : 0;
        }
    }
};
