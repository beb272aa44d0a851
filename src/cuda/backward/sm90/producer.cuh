/* The producer of sm90's backward kernel: a warpgroup that brings queries step by step, and keys
 * where slots change them. Each thread watches over one slot. */
#ifndef FDMA_CUDA_BACKWARD_SM90_PRODUCER_CUH
#define FDMA_CUDA_BACKWARD_SM90_PRODUCER_CUH

#include "cuda/backward/sm90/tile.cuh"

static constexpr int32_t beyond = -2; // what follows a stretch's last epoch: no key, and no slot

/* Few registers are left beside the consumers': what can be found again is not kept. */
template <class config> struct backward_producer {
    static constexpr int barrier = 1; // of the producer's warps
    static constexpr int32_t nothing_waits = -1;

    backward_memory<config> *memory;
    int32_t step;    // of all segments
    int32_t segment; // of the keys in shared memory, or about to come there
    int32_t ahead;   // steps loaded while a segment's keys wait for room; or nothing_waits

    __device__ inline int32_t own_slot(void) const { return threadIdx.x % warpgroup_threads; }

    __device__ inline int32_t key_at(const backward_plan &plan, const backward_pass &pass,
                                     int32_t epoch) const {
        const backward_item &item = memory->item;
        const int32_t slot = own_slot();
        if (epoch >= item.end)
            return beyond;
        return slot < config::slots ? find_key(plan, pass, item.head, epoch, item.first_slot + slot)
                                    : -1;
    }

    /* The key of this thread's slot in a segment. */
    __device__ inline int32_t key_of_segment(int32_t which) const {
        return own_slot() < config::slots ? memory->slots[which % kept_segments][own_slot()].key
                                          : -1;
    }

    /* What consumers must know of the next segment. */
    __device__ inline void publish(const backward_plan &plan, const backward_pass &pass,
                                   int32_t key) {
        const forward_plan &forward = plan.forward;
        const backward_item &item = memory->item;
        slot_record own = {key, INT32_MIN, 0, 0};
        if (key >= 0) {
            const key_record record =
                forward.records == NULL
                    ? key_record{INT32_MAX, 0}
                    : forward.records[(int64_t)item.head * forward.kv_len + key];
            own.expiry = record.expiry;
            own.bias = record.bias;
            if (plan.partitions > 1 && !pass.is_diagonal)
                own.border =
                    boundary_of(plan, item.head, item.part, item.first_slot + own_slot(), key);
        }
        if (own_slot() < config::slots)
            memory->slots[segment % kept_segments][own_slot()] = own;
        if (threadIdx.x == 0)
            memory->is_over = key == beyond;
        mbarrier_arrive(&memory->slots_full);
    }

    /* One key's k and v, a warp together; no key: zeros. */
    __device__ inline void load_key(const backward_plan &plan, int32_t slot, int32_t key) {
        constexpr int chunks = config::channels * 2 / chunk_bytes;
        const forward_plan &forward = plan.forward;
        const backward_item &item = memory->item;
        const uint32_t k = shared_address(memory->k), v = shared_address(memory->v);
#pragma unroll 1
        for (int n = threadIdx.x % 32; n < 2 * chunks; n += 32) {
            const int chunk = n % chunks, inside = chunk % line_lanes;
            const head_view &view = n < chunks ? forward.k : forward.v;
            const int64_t row = item.b * view.batch + item.g * view.head + max(key, 0) * view.row;
            const bool is_there = key >= 0 && chunk * (chunk_bytes / 2) < forward.head_dim;
            const uint32_t panel = chunk / line_lanes * config::slots * line_bytes;
            cp_async_16((n < chunks ? k : v) + panel + swizzled(slot, inside),
                        (const char *)view.data + (is_there ? 2 * row + chunk * chunk_bytes : 0),
                        is_there ? chunk_bytes : 0);
        }
    }

    /* The keys of a segment that are new, where the old ones are needed no more. */
    __device__ inline void load_keys(const backward_plan &plan) {
        const int32_t current = opaque(segment);
        wait(&memory->keys_empty, current & 1);
        const int32_t key = key_of_segment(current);
        const bool is_new = current == 0 || key != key_of_segment(current - 1);
        uint32_t left = __ballot_sync(~0u, is_new && own_slot() < config::slots);
        for (; left != 0; left &= left - 1) {
            const int lane = __ffs(left) - 1;
            load_key(plan, own_slot() / 32 * 32 + lane, __shfl_sync(~0u, key, lane));
        }
        cp_async_mbarrier_arrive_noinc(&memory->keys_full);
        ahead = nothing_waits;
    }

    __device__ inline void load_rows(const backward_plan &plan, const head_view &view, int32_t h,
                                     int32_t tile, uint32_t block) {
        constexpr int warp_rows = config::q_rows / warpgroup_warps;
        const int32_t warp = threadIdx.x / 32;
        const int32_t query = tile * config::q_rows + warp * warp_rows + threadIdx.x % warp_rows;
        const char *const rows =
            (const char *)view.data + 2 * (memory->item.b * view.batch + h * view.head);
        gather_rows<config::q_rows, config::panels, warp_rows, 2>(
            block, warp * warp_rows, rows, (uint32_t)(2 * view.row),
            query < plan.forward.q_len ? (uint32_t)query : no_row, plan.forward.head_dim);
    }

    /* 64 queries of head h, their dout, lse and delta. */
    __device__ inline void load_step(const backward_plan &plan, const backward_pass &pass,
                                     int32_t h, int32_t tile, bool is_last, bool ends_epoch) {
        const int32_t stage = step % config::stages, n = threadIdx.x % config::q_rows;
        wait(&memory->step_empty[stage], step / config::stages % 2 ^ 1);
        load_rows(plan, plan.forward.q, h, tile, shared_address(memory->q[stage]));
        load_rows(plan, plan.dout, h, tile, shared_address(memory->dout[stage]));
        const int32_t row = memory->item.b * plan.forward.q_heads + h;
        const int64_t at = (int64_t)row * plan.rows + tile * config::q_rows + n;
        const bool is_lse = threadIdx.x < config::q_rows;
        cp_async_4(shared_address(is_lse ? memory->lse[stage] : memory->delta[stage]) + 4 * n,
                   (is_lse ? plan.row_lse : plan.row_delta) + at);
        if (threadIdx.x == 0) {
            const int32_t first = tile * config::q_rows + plan.forward.kv_len - plan.forward.q_len;
            const uint32_t turn = pass.tickets == NULL
                                      ? 0
                                      : turn_of(plan, pass, tile * config::q_rows / list_queries);
            memory->notes[stage] = {row * pass.tiles + tile, plan.forward.causal ? first : 0, turn,
                                    (int16_t)(segment % kept_segments), is_last};
            mbarrier_arrive(&memory->step_full[stage]);
        }
        cp_async_mbarrier_arrive_noinc(&memory->step_full[stage]);
        step++;
        if (ahead != nothing_waits && (++ahead == config::stages - 1 || ends_epoch))
            load_keys(plan);
    }

    /* Which of the blocks of a pass that add to an epoch's dq this one is. Where lists roll, one
     * that has begun by an epoch has those before it begun too, whatever a selection says. (Said
     * for each pass by itself: said once, it takes a register too many.) */
    __device__ inline uint32_t turn_of(const backward_plan &plan, const backward_pass &pass,
                                       int32_t epoch) const {
        const backward_item &item = memory->item;
        if (plan.is_rolling && !pass.is_diagonal)
            return item.block;
        const int32_t visible = min(visible_slots(plan, item.head, epoch), plan.slots);
        const int32_t active = (visible + config::slots - 1) / config::slots;
        return pass.is_diagonal ? item.block : active - 1 - item.block;
    }

    /* The steps of an epoch; true: after it some slot has another key, or nothing follows. */
    __device__ inline bool load_epoch(const backward_plan &plan, const backward_pass &pass,
                                      int32_t epoch) {
        constexpr int tiles = list_queries / config::q_rows;
        const int32_t group = plan.forward.group;
        bool changes = false;
#pragma unroll 1
        for (int32_t n = 0; n < group * tiles; n++) {
            const int32_t tile = opaque(epoch) * tiles + n % tiles;
            if (tile * config::q_rows >= plan.forward.q_len)
                continue;
            const bool is_tail = (tile + 1) * config::q_rows >= plan.forward.q_len;
            const bool ends = n / tiles == group - 1 && (n % tiles == tiles - 1 || is_tail);
            if (ends)
                changes = bar_red_or(barrier, warpgroup_threads,
                                     memory->next[own_slot()] != key_of_segment(opaque(segment)));
            load_step(plan, pass, memory->item.g * group + n / tiles, tile, changes, ends);
        }
        return changes;
    }

    __device__ inline void run(const backward_plan &plan, const backward_pass &pass) {
        int32_t epoch = first_epoch(plan, pass, memory->item);
        step = 0;
        segment = -1;
        ahead = nothing_waits;
        for (epoch--;; epoch++) { // from before the first
            const bool is_fixed = segment >= 0 && !plan.is_rolling && epoch + 1 < memory->item.end;
            const int32_t next = is_fixed ? key_of_segment(segment) : key_at(plan, pass, epoch + 1);
            memory->next[own_slot()] = next;
            if (segment >= 0 && !load_epoch(plan, pass, epoch))
                continue;
            segment++;
            publish(plan, pass, memory->next[own_slot()]);
            if (epoch + 1 >= memory->item.end)
                return;
            ahead = segment == 0 ? config::stages - 2 : 0; // the first keys after one step
        }
    }
};

#endif
