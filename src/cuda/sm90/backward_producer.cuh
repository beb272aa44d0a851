/* The producer of sm90's backward kernel: a warpgroup that brings queries step by step, and keys
 * where slots change them. Each thread watches over one slot. */
#ifndef FDMA_CUDA_SM90_BACKWARD_PRODUCER_CUH
#define FDMA_CUDA_SM90_BACKWARD_PRODUCER_CUH

#include "cuda/sm90/backward_tile.cuh"

static constexpr int32_t beyond = -2; // what follows a stretch's last epoch: no key, and no slot

template <class config> struct backward_producer {
    static constexpr int barrier = 1; // of the producer's warps

    backward_memory<config> *memory;
    ring_place<config::stages> step;
    int32_t segment; // of the keys in shared memory, or about to come there
    int32_t key;     // of this thread's slot
    bool is_new;     // it is not in shared memory yet
    bool is_pending; // some slot's is not
    int32_t ahead;   // steps that were loaded since

    __device__ inline int32_t own_slot(void) const { return threadIdx.x % warpgroup_threads; }

    __device__ inline int32_t key_at(const backward_plan &plan, const backward_pass &pass,
                                     int32_t epoch) const {
        const int32_t slot = own_slot();
        if (epoch >= memory->item.end)
            return beyond;
        return slot < config::slots ? find_key(plan, pass, memory->item.head, epoch, memory->item.first_slot + slot)
                                    : -1;
    }

    /* What consumers must know of the next segment. */
    __device__ inline void publish(const backward_plan &plan, const backward_pass &pass) {
        const forward_plan &forward = plan.forward;
        slot_record own = {key, INT32_MIN, 0, 0};
        if (key >= 0) {
            const key_record record =
                forward.records == NULL
                    ? key_record{INT32_MAX, 0}
                    : forward.records[(int64_t)memory->item.head * forward.kv_len + key];
            own.expiry = record.expiry;
            own.bias = record.bias;
            if (plan.parts > 1 && !pass.is_diagonal)
                own.border =
                    border_of(plan, memory->item.head, memory->item.part, memory->item.first_slot + own_slot(), key);
        }
        if (own_slot() < config::slots)
            memory->slots[segment % 2][own_slot()] = own;
        if (threadIdx.x == 0)
            memory->is_over = key == beyond;
        mbarrier_arrive(&memory->slots_full);
    }

    /* One key's k and v, a warp together; no key: zeros. */
    __device__ inline void load_key(const backward_plan &plan, int32_t slot, int32_t key) {
        constexpr int chunks = config::channels * 2 / chunk_bytes;
        const forward_plan &forward = plan.forward;
        const uint32_t k = shared_address(memory->k), v = shared_address(memory->v);
        for (int n = threadIdx.x % 32; n < 2 * chunks; n += 32) {
            const int chunk = n % chunks, inside = chunk % line_lanes;
            const head_view &view = n < chunks ? forward.k : forward.v;
            const int64_t row = memory->item.b * view.batch + memory->item.g * view.head + max(key, 0) * view.row;
            const bool is_there = key >= 0 && chunk * (chunk_bytes / 2) < forward.head_dim;
            const uint32_t panel = chunk / line_lanes * config::slots * line_bytes;
            cp_async_16((n < chunks ? k : v) + panel + swizzled(slot, inside),
                        (const char *)view.data + (is_there ? 2 * row + chunk * chunk_bytes : 0),
                        is_there ? chunk_bytes : 0);
        }
    }

    /* The keys that are new, where the old ones are needed no more. */
    __device__ inline void load_keys(const backward_plan &plan) {
        wait(&memory->keys_empty, (segment & 1) ^ 1);
        uint32_t left = __ballot_sync(~0u, is_new && own_slot() < config::slots);
        for (; left != 0; left &= left - 1) {
            const int lane = __ffs(left) - 1;
            load_key(plan, own_slot() / 32 * 32 + lane, __shfl_sync(~0u, key, lane));
        }
        cp_async_mbarrier_arrive_noinc(&memory->keys_full);
        is_pending = false;
    }

    __device__ inline void load_rows(const backward_plan &plan, const head_view &view, int32_t h,
                                     int32_t tile, uint8_t *block) {
        constexpr int warp_rows = config::q_rows / warpgroup_warps;
        const int32_t warp = threadIdx.x / 32;
        const int32_t query = tile * config::q_rows + warp * warp_rows + threadIdx.x % warp_rows;
        const char *const rows =
            (const char *)view.data + 2 * (memory->item.b * view.batch + h * view.head);
        gather_rows<config::q_rows, config::panels, warp_rows>(
            shared_address(block), warp * warp_rows, rows, (uint32_t)(2 * view.row),
            query < plan.forward.q_len ? (uint32_t)query : no_row, plan.forward.head_dim);
    }

    /* 64 queries of head h, their dout, lse and delta. */
    __device__ inline void load_step(const backward_plan &plan, const backward_pass &pass,
                                     int32_t h, int32_t tile, uint32_t turn, bool is_last) {
        const int32_t stage = step.index, n = threadIdx.x % config::q_rows;
        const int64_t row = memory->item.b * plan.forward.q_heads + h;
        const int64_t at = row * plan.rows + tile * config::q_rows + n;
        const forward_plan &forward = plan.forward;
        wait(&memory->step_empty[stage], step.parity ^ 1);
        load_rows(plan, forward.q, h, tile, memory->q[stage]);
        load_rows(plan, plan.dout, h, tile, memory->dout[stage]);
        if (threadIdx.x < config::q_rows)
            cp_async_4(shared_address(&memory->lse[stage][n]), &plan.row_lse[at]);
        else
            cp_async_4(shared_address(&memory->delta[stage][n]), &plan.row_delta[at]);
        if (threadIdx.x == 0) {
            const int32_t position = tile * config::q_rows + forward.kv_len - forward.q_len;
            memory->notes[stage] = {(int32_t)(row * pass.tiles) + tile,
                                    forward.causal ? position : 0, turn, is_last};
            mbarrier_arrive(&memory->step_full[stage]);
        }
        cp_async_mbarrier_arrive_noinc(&memory->step_full[stage]);
        step.advance();
        ahead++;
        if (is_pending && ahead == config::stages - 1)
            load_keys(plan);
    }

    /* Which of the blocks that add to an epoch's dq this one is. */
    __device__ inline uint32_t turn_of(const backward_plan &plan, const backward_pass &pass,
                                       int32_t epoch) const {
        if (pass.tickets == NULL)
            return 0;
        const int32_t visible = min(visible_slots(plan, memory->item.head, epoch), plan.slots);
        const int32_t active = (visible + config::slots - 1) / config::slots;
        if (pass.is_diagonal)
            return active + memory->item.block;
        return plan.is_rolling ? memory->item.block : active - 1 - memory->item.block;
    }

    /* The steps of an epoch; true: after it some slot has another key, or nothing follows. */
    __device__ inline bool load_epoch(const backward_plan &plan, const backward_pass &pass,
                                      int32_t epoch, int32_t next) {
        constexpr int tiles = list_queries / config::q_rows;
        const int32_t group = plan.forward.group, first = epoch * tiles;
        const bool is_short = (first + 1) * config::q_rows >= plan.forward.q_len;
        const int32_t each = is_short ? 1 : tiles, steps = group * each;
        const uint32_t turn = turn_of(plan, pass, epoch);
        bool changes = false;
        for (int32_t n = 0; n < steps; n++) {
            if (n == steps - 1)
                changes = bar_red_or(barrier, warpgroup_threads, next != key);
            load_step(plan, pass, memory->item.g * group + n / each, first + n % each, turn, changes);
        }
        return changes;
    }

    __device__ inline void run(const backward_plan &plan, const backward_pass &pass) {
        segment = 0;
        ahead = 0;
        is_new = true;
        int32_t epoch =
            pass.is_diagonal ? memory->item.epoch : first_epoch(plan, memory->item);
        key = key_at(plan, pass, epoch);
        publish(plan, pass);
        if (epoch >= memory->item.end)
            return;
        load_keys(plan);
        for (; epoch < memory->item.end; epoch++) {
            const int32_t next =
                plan.is_rolling || epoch + 1 == memory->item.end ? key_at(plan, pass, epoch + 1) : key;
            const bool changes = load_epoch(plan, pass, epoch, next);
            if (is_pending)
                load_keys(plan);
            if (!changes)
                continue;
            is_new = next != key;
            key = next;
            segment++;
            is_pending = true;
            ahead = 0;
            publish(plan, pass);
        }
    }
};

#endif
