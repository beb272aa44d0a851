/* The producer of sm90's backward kernel: a warpgroup that loads the queries of each step, and the
 * keys of each generation. Each of its threads tracks the key of one slot. `tile` is the first tile
 * of a step. */
#pragma once

#include "cuda/backward/sm90/backward.cuh"

static constexpr int32_t past_end = -2; // a slot's key after the last query block

/* The order in which slot blocks add to dq of a tile, for a deterministic result. The steps of a
 * thread block alternate with those of others: a turn begins when all slot blocks before this one
 * have added their dq of the step's queries, and ends when this one has added its own. Each tile
 * has a semaphore that counts the turns that have ended. One thread of the producer keeps the
 * order, so that the consumers, which add dq, wait only if their turn has not begun. */
template <class config> struct dq_turns {
    backward_memory<config> *memory;

    /* Begins the turn of the previous step, and stores the turn of `step`, which is being
     * loaded. */
    __device__ void advance(const backward_pass &pass, int32_t step, const dq_turn &turn) {
        if (step > 0)
            begin(pass, step - 1);
        memory->turns[step % most_turns] = turn;
    }

    __device__ void finish(const backward_pass &pass, int32_t steps) {
        if (steps == 0)
            return;
        begin(pass, steps - 1);
        if constexpr (config::stages_dq)
            wait(&memory->all_dq_added, 0);
        else
            wait_multiplied(steps - 1);
        end(pass, steps - 1, true);
    }

  private:
    /* Lets the consumers add dq of a step, after the slot blocks before this one, and ends the turn
     * of the previous step. With stages_dq the turn begins first, because the bulk operations of
     * the previous step are only known to be complete when those of this one are issued. Otherwise
     * the other turn ends first. Either way all consumers have passed the wait for one turn before
     * the next begins. Bulk operations of two thread blocks need no fence between them: a thread
     * issues its own once it knows that the others are complete. */
    __device__ void begin(const backward_pass &pass, int32_t step) {
        const dq_turn turn = memory->turns[step % most_turns];
        if (!config::stages_dq && step > 0) {
            wait_multiplied(step - 1);
            end(pass, step - 1, false);
        }
        while (ld_acquire_gpu(&pass.dq_semaphore[turn.tile]) != turn.order) {
        }
        mbarrier_arrive(&memory->turn_begun);
        if (config::stages_dq) {
            wait(&memory->dq_added, step & 1); // of the previous step; this one's is being added
            if (step > 0)
                end(pass, step - 1, false);
        }
    }

    /* Waits until the consumers have ended a step, and so have added its dq from registers. */
    __device__ void wait_multiplied(int32_t step) {
        wait(&memory->step_free[step % config::stages], step / config::stages % 2);
    }

    /* Ends turns in pairs, `step` - 1 and `step`, because the fence is slow: it waits for writes of
     * the whole multiprocessor. The last turn of all may be single. With more turns at a time the
     * slot blocks of a head would be so far apart that their common data leaves the L2 cache. */
    __device__ void end(const backward_pass &pass, int32_t step, bool is_last) {
        const bool is_second = step % 2 != 0;
        if (!is_second && !is_last)
            return;
        fence_release_gpu();
        if (is_second)
            count(pass, step - 1);
        count(pass, step);
    }

    __device__ void count(const backward_pass &pass, int32_t step) {
        const dq_turn turn = memory->turns[step % most_turns];
        st_relaxed_gpu(&pass.dq_semaphore[turn.tile], turn.order + 1);
    }
};

/* The consumers leave few registers, so values that can be computed again are not kept. */
template <class config> struct backward_producer {
    static constexpr int turn_thread = 3 * 32; // the thread that runs dq_turns

    backward_memory<config> *memory;
    int32_t generation; // of the keys in shared memory, or the next to be loaded

    __device__ int32_t own_slot(void) const { return opaque(threadIdx.x) % warpgroup_threads; }

    __device__ load_progress *progress(void) const {
        return &memory->progress[opaque(threadIdx.x) / 32];
    }

    /* The query blocks that the slot block of the next block visits. */
    __device__ const int2 &visits(void) const {
        return memory->visits[progress()->next.slot_block];
    }

    /* The first slot of that slot block. */
    __device__ int32_t first_slot(const backward_pass &pass) const {
        return (memory->work.slot_block + progress()->next.slot_block * pass.slot_blocks) *
               config::slots;
    }

    __device__ bool is_over(const backward_plan &plan, const backward_pass &pass,
                            const loaded_block &at) const {
        if (config::is_slot && pass.visits == descending)
            return at.block < visits().x;
        if (config::is_slot && pass.visits == by_head && at.head == plan.forward.group)
            return true;
        return at.block >= visits().y;
    }

    __device__ int32_t key_in_block(const backward_plan &plan, const backward_pass &pass,
                                    const loaded_block &at) const {
        const int32_t slot = own_slot();
        if (is_over(plan, pass, at))
            return past_end;
        return slot < config::slots ? slot_key(plan, *memory, at.block, first_slot(pass) + slot)
                                    : -1;
    }

    __device__ int32_t key_in_generation(int32_t which) const {
        return own_slot() < config::slots ? memory->slots[which % slots_buffers][own_slot()].key
                                          : -1;
    }

    __device__ void write_record(const backward_plan &plan, int32_t key, slot_record *to) {
        const forward_plan &forward = plan.forward;
        const backward_work &work = memory->work;
        to->key = key;
        to->boundary = 0;
        if (key < 0) {
            to->expiry = INT32_MIN;
            to->bias = 0;
            return;
        }
        const key_record record = forward.records == NULL
                                      ? key_record{INT32_MAX, 0}
                                      : forward.records[(int64_t)work.head * forward.kv_len + key];
        to->expiry = record.expiry;
        to->bias = record.bias;
        if (config::is_listed)
            return;
        if (plan.partitions > 1 && !config::is_diagonal)
            to->boundary =
                boundary_of(plan, work.head, work.partition, work.first_slot + own_slot(), key);
        else if (!forward.causal)
            to->from = forward.by_position ? forward.sequences.ranges[key].x : INT32_MIN;
    }

    __device__ void publish_slots(const backward_plan &plan, int32_t key) {
        const backward_work &work = memory->work;
        if (own_slot() < config::slots) {
            const int32_t buffer = generation % slots_buffers;
            write_record(plan, key, &memory->slots[buffer][own_slot()]);
            if (config::drops)
                memory->key_code[buffer][own_slot()] =
                    key_code_of(plan.forward, work.b, work.g, key);
        }
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

    __device__ void load_key(const backward_plan &plan, int32_t slot, int32_t key) {
        const forward_plan &forward = plan.forward;
        if ((uint32_t)key < (uint32_t)forward.carried_len)
            load_row(plan, forward.k_carried, forward.v_carried, slot, key);
        else
            load_row(plan, forward.k, forward.v, slot, key - forward.carried_len);
    }

    /* Loads the rows of k or of v of a warp's slots, and zeros if a slot has no key. By a whole
     * warp. */
    __device__ void load_rows(const backward_plan &plan, const head_view &view, const uint8_t *rows,
                              int32_t buffer) {
        constexpr int vecs = config::channels * 2 / vec_bytes, at_once = 32 / vecs; // rows
        constexpr int unrolled = config::channels > 64 ? 1 : 4; // with few registers
        const backward_work &work = memory->work;
        const int lane = opaque(threadIdx.x) % 32, vec = lane % vecs;
        const int32_t first = own_slot() / 32 * 32;
        const uint32_t to = shared_address(rows) + vec / line_lanes * config::slots * line_bytes;
        const char *const head =
            (const char *)view.data + 2 * (work.b * view.batch + work.g * view.head);
#pragma unroll unrolled
        for (int row = lane / vecs; row < 32; row += at_once) {
            const int32_t key = memory->slots[buffer][first + row].key;
            const bool is_there = key >= 0 && vec * vec_channels < plan.forward.head_dim;
            cp_async_16(to + swizzled(first + row, vec % line_lanes),
                        head + (is_there ? 2 * key * view.row + vec * vec_bytes : 0),
                        is_there ? vec_bytes : 0);
        }
    }

    /* Loads the new keys of a generation once the consumers have released the old ones. */
    __device__ void load_keys(const backward_plan &plan) {
        const forward_plan &forward = plan.forward;
        const int32_t current = opaque(generation);
        wait(&memory->keys_free, current & 1);
        if (config::is_slot && !plan.is_rolling && forward.carried_len == 0) {
            if (own_slot() < config::slots) {
                load_rows(plan, forward.k, memory->k, current % slots_buffers);
                load_rows(plan, forward.v, memory->v, current % slots_buffers);
            }
            cp_async_mbarrier_arrive_noinc(&memory->keys_ready);
            return;
        }
        const int32_t key = key_in_generation(current);
        const bool is_new = current == 0 || key != key_in_generation(current - 1);
        uint32_t left = __ballot_sync(~0u, is_new && own_slot() < config::slots);
        for (; left != 0; left &= left - 1) {
            const int lane = __ffs(left) - 1;
            load_key(plan, own_slot() / 32 * 32 + lane, __shfl_sync(~0u, key, lane));
        }
        cp_async_mbarrier_arrive_noinc(&memory->keys_ready);
    }

    /* Words of the mask, for 32 entries of a block each. A warp has some of them, for 32 of the 64
     * queries of a step, and each of its threads has the words of one query. */
    static constexpr int entry_words = config::slots / 32; // of a block
    static constexpr int own_words = 2 * entry_words / warpgroup_warps;

    /* Word n of the block that begins with entry `first`: bits of the entries that a query of head
     * h keeps. */
    __device__ static uint32_t mask_word(const forward_plan &plan, const tile_list &list, int32_t h,
                                         int32_t tile, int32_t first, int n) {
        const int32_t query = tile * q_tile_rows + n / entry_words * 32 + threadIdx.x % 32;
        const uint32_t *const bits = kept_bits(plan, list, first / list_queries, h, query);
        return bits[first % list_queries / 32 + n % entry_words];
    }

    /* Writes, for each entry of word n, bits of the queries that keep it. */
    __device__ void write_mask(uint32_t bits, int n, int32_t stage) {
        uint2 &to = memory->mask[stage][n % entry_words * 32 + threadIdx.x % 32];
        (n / entry_words == 0 ? to.x : to.y) = transpose_bits(bits);
    }

    __device__ void read_mask(const backward_plan &plan, int32_t h, int32_t tile, int32_t block,
                              uint32_t (&words)[own_words]) const {
        const tile_list &list = memory->kept_list;
        for (int x = 0; x < own_words; x++)
            words[x] = mask_word(plan.forward, list, h, tile, block * config::slots,
                                 threadIdx.x / 32 + x * warpgroup_warps);
    }

    /* Reads and writes the words one by one, to save registers. */
    __device__ void copy_mask(const backward_plan &plan, int32_t h, int32_t tile, int32_t block,
                              int32_t stage) {
        const tile_list &list = memory->kept_list;
        const int32_t first = block * config::slots;
#pragma unroll 1
        for (int n = threadIdx.x / 32; n < 2 * entry_words; n += warpgroup_warps)
            write_mask(mask_word(plan.forward, list, h, tile, first, n), n, stage);
    }

    /* Writes dropout's codes of the pairs of positions in a step. By a whole warp. */
    __device__ void write_codes(const backward_plan &plan, int32_t h, int32_t tile, int32_t stage) {
        const int32_t first = query_position(plan.forward, memory->work.b, tile * q_tile_rows);
        const int32_t pairs = config::q_rows / 2 + (first % 2 != 0);
#pragma unroll 1
        for (int32_t n = threadIdx.x % 32; n < pairs; n += 32)
            memory->pair_code[stage][n] =
                row_code_of(plan.forward, memory->work.b, h, first + 2 * n);
    }

    /* True if a step of the diagonal pass is the last one that adds to dq of a tile. Keys that
     * arrive later than all of its queries do not count. */
    __device__ bool writes_dq(const backward_plan &plan, int32_t tile) const {
        const int32_t next = progress()->next.block;
        return next % config::diagonal_blocks == 0 ||
               first_seeing(plan, next, progress()->next_key) >= end_in_block(plan, tile);
    }

    /* The first query of a query block, relative to its start, that may see a key of a slot block
     * of the diagonal pass. key: of the first slot. The n-th key to arrive inside the query block
     * arrives after the first n queries, or later. */
    __device__ int32_t first_seeing(const backward_plan &plan, int32_t block, int32_t key) const {
        const int32_t at_least = block % config::diagonal_blocks * config::slots;
        const int32_t query = query_block_of(block) * plan.forward.block_queries;
        return key < 0 ? at_least
                       : max(at_least, key - query_position(plan.forward, memory->work.b, query));
    }

    /* The end of a tile's queries in their query block. */
    __device__ static int32_t end_in_block(const backward_plan &plan, int32_t tile) {
        return (tile * q_tile_rows & (plan.forward.block_queries - 1)) + q_tile_rows;
    }

    /* True if no later slot block of this thread block visits the current query block. */
    __device__ bool is_last_visit(void) const {
        const loaded_block at = progress()->now;
#pragma unroll 1
        for (int32_t n = at.slot_block + 1; n < memory->work.slot_blocks; n++)
            if (at.block >= memory->visits[n].x && at.block < memory->visits[n].y)
                return false;
        return true;
    }

    /* Copies q and lse, or dout and delta, of a step's queries of head h. By one thread. */
    __device__ void copy_queries(const backward_plan &plan, const row_map &rows,
                                 const float *numbers, const uint8_t *to_rows,
                                 const float *to_numbers, int32_t h, int32_t tile,
                                 uint64_t *ready) {
        constexpr uint32_t number_bytes = config::q_rows * sizeof(float);
        const int32_t b = memory->work.b, first = tile * q_tile_rows;
        mbarrier_arrive_expect_tx(ready, config::q_rows * config::row_bytes + number_bytes);
#pragma unroll
        for (int n = 0; n < config::panels * config::q_tiles; n++) {
            const int panel = n / config::q_tiles, row = n % config::q_tiles * q_tile_rows;
            copy_box(shared_address(to_rows) + n * q_tile_rows * line_bytes, rows, b, first + row,
                     h, panel * panel_channels, ready);
        }
        const int64_t row = (int64_t)(b * plan.forward.q_heads + h) * plan.rows + first;
        cp_async_bulk(shared_address(to_numbers), numbers + row, number_bytes, ready);
    }

    /* Writes the header of a step. By one thread. */
    __device__ void write_header(const backward_plan &plan, const backward_pass &pass, int32_t h,
                                 int32_t tile, int32_t stage) {
        const int32_t first = query_position(plan.forward, memory->work.b, tile * q_tile_rows);
        const bool writes =
            config::is_diagonal ? writes_dq(plan, tile) : pass.owns_dq && is_last_visit();
        const bool is_first = config::is_diagonal
                                  ? progress()->now.block % config::diagonal_blocks == 0
                                  : pass.owns_dq && progress()->now.slot_block == 0;
        const int32_t head = memory->work.b * plan.forward.q_heads + h;
        memory->header[stage] = {head * pass.tiles + tile,
                                 plan.forward.by_position ? first : 0,
                                 progress()->changes != 0,
                                 first % 2 != 0,
                                 writes,
                                 is_first,
                                 progress()->dq_loads % 2 != 0,
                                 h,
                                 tile};
    }

    /* Loads the sums of dq for the step whose header has been written. By one thread. */
    __device__ void load_dq(const backward_pass &pass, const step_header &header) {
        constexpr uint32_t bytes = sizeof memory->dq;
        if (!header.writes_dq || !header.is_first)
            return;
        wait(&memory->dq_free, header.dq_phase ^ 1);
        mbarrier_arrive_expect_tx(&memory->dq_ready, bytes);
        cp_async_bulk(shared_address(memory->dq), dq_sum_of<config>(pass, header.tile, 0, 0), bytes,
                      &memory->dq_ready);
        progress()->dq_loads++;
    }

    /* The first lane of each of three warps loads one part of a step: q, dout, or the header. */
    __device__ void load_queries(const backward_plan &plan, const backward_pass &pass, int32_t h,
                                 int32_t tile, int32_t stage) {
        uint64_t *const ready = &memory->step_ready[stage];
        const int32_t warp = threadIdx.x / 32;
        if (threadIdx.x % 32 != 0)
            return;
        if (warp == 0) {
            copy_queries(plan, pass.q, plan.row_lse, memory->q[stage], memory->lse[stage], h, tile,
                         ready);
        } else if (warp == 1) {
            copy_queries(plan, pass.dout, plan.row_delta, memory->dout[stage], memory->delta[stage],
                         h, tile, ready);
        } else if (warp == 2) {
            write_header(plan, pass, h, tile, stage);
            mbarrier_arrive(ready);
            if constexpr (config::loads_dq)
                load_dq(pass, memory->header[stage]);
        }
    }

    /* Counts a step. True if keys that wait for room must be loaded after it. */
    __device__ bool count_step(bool ends_block) {
        const load_progress was = *progress();
        const bool waits = was.steps_ahead != no_keys;
        const bool loads_keys =
            waits && (was.steps_ahead + 1 == config::steps_before_keys || ends_block);
        __syncwarp(); // all lanes have read it
        progress()->step = was.step + 1;
        progress()->steps_ahead = waits && !loads_keys ? was.steps_ahead + 1 : no_keys;
        __syncwarp();
        return loads_keys;
    }

    __device__ void load_step(const backward_plan &plan, const backward_pass &pass, int32_t h,
                              int32_t tile, bool ends_block) {
        const int32_t step = progress()->step, stage = step % config::stages;
        const int32_t warp = threadIdx.x / 32;
        uint32_t ahead[own_words];
        if constexpr (config::reads_mask_ahead)
            read_mask(plan, h, tile, progress()->now.block, ahead);
        if (warp < config::step_loaders || config::step_writers > 0)
            wait(&memory->step_free[stage], step / config::stages % 2 ^ 1);
        load_queries(plan, pass, h, tile, stage);
        for (int x = 0; config::reads_mask_ahead && x < own_words; x++)
            write_mask(ahead[x], warp + x * warpgroup_warps, stage);
        if constexpr (config::is_listed && !config::reads_mask_ahead)
            copy_mask(plan, h, tile, progress()->now.block, stage);
        if (config::drops && warp == 3)
            write_codes(plan, h, tile, stage);
        if constexpr (config::step_writers > 0)
            if (config::is_listed || warp == 3)
                release(&memory->step_ready[stage]);
        if (takes_turns<config>(pass) && threadIdx.x == turn_thread)
            take_turn(plan, pass, h, tile);
        if (count_step(ends_block))
            load_keys(plan);
    }

    /* The number of slot blocks that add to dq of a query block before this one does: all lower
     * ones, because lower slots become visible no later, and a slot block visits every query block
     * from its first one on, even if the selection is corrupt. by_head, all higher ones that are
     * visible: with packed sequences lower ones may not be. */
    __device__ uint32_t dq_order(const backward_plan &plan, const backward_pass &pass,
                                 int32_t query_block) const {
        const backward_work &work = memory->work;
        if (pass.visits != by_head)
            return work.slot_block;
        const int32_t visible = min(visible_slots(plan, work, query_block), plan.slots);
        const int32_t active = (visible + config::slots - 1) / config::slots;
        return active - 1 - work.slot_block;
    }

    __device__ dq_turns<config> turns(void) const { return {memory}; }

    /* Records the turn of the step that is being loaded. By one thread. */
    __device__ void take_turn(const backward_plan &plan, const backward_pass &pass, int32_t h,
                              int32_t tile) {
        const int32_t head = memory->work.b * plan.forward.q_heads + h;
        const int32_t query_block = tile * q_tile_rows / plan.forward.block_queries;
        turns().advance(pass, progress()->step,
                        {head * pass.tiles + tile, dq_order(plan, pass, query_block)});
    }

    /* The end of the queries of a block that may see a key of the slots. In the slot pass of packed
     * sequences, if the sequence of the second tile's first query begins inside this block, no
     * query from there on sees a key of the slots. The long form does not check, because its steps
     * have both tiles. */
    __device__ static int32_t end_of_queries(const backward_plan &plan, const backward_pass &pass,
                                             int32_t query_block) {
        const forward_plan &forward = plan.forward;
        const int32_t first = query_block * forward.block_queries, middle = first + q_tile_rows;
        if (forward.sequences.ranges == NULL || !plan.is_rolling || !config::is_slot ||
            config::is_long || middle >= forward.q_len)
            return forward.q_len;
        return forward.sequences.ranges[middle].x > first ? middle : forward.q_len;
    }

    /* True if no query of a tile sees a key of the current slot block of the diagonal pass. The
     * first slot block of a query block takes a step for every tile, so that dq of each is
     * written. */
    __device__ bool sees_none(const backward_plan &plan, int32_t tile, int32_t block) const {
        if (!config::is_diagonal || block % config::diagonal_blocks == 0)
            return false;
        const int32_t key = memory->slots[generation % slots_buffers][0].key;
        return first_seeing(plan, block, key) >= end_in_block(plan, tile);
    }

    __device__ static int32_t heads_of_block(const backward_plan &plan, const backward_pass &pass) {
        return config::is_slot && pass.visits == by_head ? 1 : opaque(plan.forward.group);
    }

    __device__ int32_t query_block_of(int32_t block) const {
        return config::is_listed     ? memory->work.list
               : config::is_diagonal ? block / config::diagonal_blocks
                                     : block;
    }

    /* Loads the steps of the current block. True if a slot changes its key after it, or nothing
     * follows. */
    __device__ bool load_block(const backward_plan &plan, const backward_pass &pass) {
        // steps of a head in the block; blocks of the listed pass are not longer
        const int steps_log2 =
            config::is_listed ? 1 : 31 - __clz(plan.forward.block_queries / config::q_rows);
        const int32_t last_step = (1 << steps_log2) - 1;
        progress()->end = end_of_queries(plan, pass, query_block_of(progress()->now.block));
        progress()->changes = 0;
        __syncwarp();
#pragma unroll 1
        for (int32_t n = 0; n < heads_of_block(plan, pass) << steps_log2; n++) {
            const loaded_block at = progress()->now;
            const int32_t in_block = n & last_step, head = at.head + (n >> steps_log2);
            const int32_t tile =
                ((query_block_of(at.block) << steps_log2) + in_block) * config::q_tiles;
            const int32_t end = progress()->end;
            const bool is_tail = tile * q_tile_rows + config::q_rows >= end;
            if (tile * q_tile_rows >= end || (sees_none(plan, tile, at.block) && !is_tail))
                continue; // but the last tile has a step that ends the block
            const bool ends = n >> steps_log2 == heads_of_block(plan, pass) - 1 &&
                              (in_block == last_step || is_tail);
            if (ends)
                progress()->changes =
                    bar_red_or(producer_barrier, warpgroup_threads,
                               memory->next[own_slot()] != key_in_generation(opaque(generation)));
            load_step(plan, pass, memory->work.g * plan.forward.group + head, tile, ends);
        }
        __syncwarp();
        return progress()->changes != 0;
    }

    /* The next block to visit: in the diagonal pass another slot block of the query block, or the
     * first one of the next query block. Query blocks in which no query sees a slot of this block,
     * as may follow the end of a packed sequence, are skipped. */
    __device__ loaded_block block_after(const backward_plan &plan, const backward_pass &pass,
                                        const loaded_block &at) const {
        const int32_t next = at.block + 1;
        if (config::is_listed)
            return {min(at.block + pass.list_splits, memory->work.end), 0};
        if (config::is_diagonal) {
            constexpr int blocks = config::diagonal_blocks;
            const bool stays =
                next % blocks != 0 && count_arrivals(plan, memory->work.head, at.block / blocks) >
                                          next % blocks * config::slots;
            return {stays ? next : (at.block + blocks) / blocks * blocks, 0};
        }
        if (pass.visits == descending)
            return {at.block - 1, 0};
        if (pass.visits == by_head)
            return next < visits().y ? loaded_block{next, at.head, at.slot_block}
                                     : loaded_block{visits().x, at.head + 1, at.slot_block};
        const bool skips = plan.is_rolling && plan.forward.sequences.ranges != NULL;
        return {skips ? find_query_block(plan, memory->work, memory->work.first_slot, next,
                                         memory->work.end)
                      : next,
                0};
    }

    /* The key of this thread's slot in a block after the current one. */
    __device__ int32_t key_after(const backward_plan &plan, const backward_pass &pass,
                                 const loaded_block &at) const {
        const bool begins_slots = at.block == visits().x && at.head == 0;
        const bool is_fixed = generation >= 0 && !plan.is_rolling && !config::is_listed &&
                              !begins_slots && !is_over(plan, pass, at);
        return is_fixed ? key_in_generation(generation) : key_in_block(plan, pass, at);
    }

    __device__ void begin(const backward_plan &plan, const backward_pass &pass) {
        const int2 own = memory->visits[0];
        load_progress begun = {};
        begun.next.block = config::is_slot && pass.visits == descending
                               ? own.y
                               : own.x - (config::is_listed ? pass.list_splits : 1);
        begun.steps_ahead = no_keys;
        *progress() = begun;
        generation = -1;
    }

    /* Finds the next block to visit: of this slot block or, behind its last one, of the next slot
     * block that visits any. */
    __device__ void find_next(const backward_plan &plan, const backward_pass &pass) {
        progress()->next = block_after(plan, pass, progress()->now);
        __syncwarp();
        if (!config::is_slot || !is_over(plan, pass, progress()->next))
            return;
        int32_t n = progress()->next.slot_block + 1;
        __syncwarp(); // all lanes have read it
#pragma unroll 1
        for (; n < memory->work.slot_blocks; n++)
            if (memory->visits[n].x < memory->visits[n].y) {
                progress()->next = {memory->visits[n].x, 0, n};
                break;
            }
        __syncwarp();
    }

    /* Gives each warp the first key of the next block. The barrier also makes the slot records of
     * the current block, which sees_none() reads, visible to all warps. */
    __device__ void share_keys(void) {
        bar_sync(producer_barrier, warpgroup_threads);
        progress()->next_key = memory->next[0];
        __syncwarp();
    }

    __device__ void run(const backward_plan &plan, const backward_pass &pass) {
        begin(plan, pass);
        // the first round only finds the first generation
        for (;;) {
            __syncwarp();
            progress()->now = progress()->next;
            __syncwarp();
            find_next(plan, pass);
            memory->next[own_slot()] = key_after(plan, pass, progress()->next);
            if (config::is_diagonal)
                share_keys();
            if (generation >= 0 && !load_block(plan, pass))
                continue;
            generation++;
            publish_slots(plan, memory->next[own_slot()]);
            if (memory->next[own_slot()] == past_end)
                break;
            // the first keys are loaded after one step, because no others must be released
            progress()->steps_ahead = generation == 0 ? config::steps_before_keys - 1 : 0;
        }
        if (takes_turns<config>(pass) && threadIdx.x == turn_thread)
            turns().finish(pass, progress()->step);
    }
};
