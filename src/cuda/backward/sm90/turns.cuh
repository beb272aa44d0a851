/* The order in which slot blocks add to dq of a tile, for a deterministic result. The steps of a
 * thread block take turns with those of others: a turn begins when all slot blocks before this one
 * have added their dq of the step's queries, and ends when this one has added its own. Each tile
 * has a semaphore that counts the turns that have ended. One thread of the producer keeps the
 * order, so that the consumers, which add dq, wait only if their turn has not begun. */
#pragma once

#include "cuda/backward/sm90/tile.cuh"

template <class config> struct dq_turns {
    backward_memory<config> *memory;

    /* Takes the turn of the step before, and stores that of a step, which is being loaded. */
    __device__ void take(const backward_pass &pass, int32_t step, const dq_turn &turn) {
        if (step > 0)
            begin(pass, step - 1);
        memory->turns[step % most_turns] = turn;
    }

    /* Takes the turn of the last of all steps. */
    __device__ void take_last(const backward_pass &pass, int32_t steps) {
        if (steps == 0)
            return;
        begin(pass, steps - 1);
        wait_added(steps - 1);
        end(pass, steps - 1, true);
    }

  private:
    /* Lets the consumers add dq of a step, after the slot blocks before this one, and ends the turn
     * of the step before. In either order no turn begins before all consumers know of the one
     * before it. */
    __device__ void begin(const backward_pass &pass, int32_t step) {
        const dq_turn turn = memory->turns[step % most_turns];
        if (!config::stages_dq && step > 0) {
            wait_added(step - 1);
            end(pass, step - 1, false);
        }
        while (ld_acquire_gpu(&pass.dq_semaphore[turn.tile]) != turn.order) {
        }
        mbarrier_arrive(&memory->turn_begun);
        if (config::stages_dq) {
            wait_added(step - 1);
            if (step > 0)
                end(pass, step - 1, false);
        }
    }

    /* Waits until dq of a step has been added, and with stages_dq until that of the next one is
     * being added. */
    __device__ void wait_added(int32_t step) {
        if constexpr (config::stages_dq)
            wait(&memory->dq_added, (step + 1) & 1);
        else
            wait(&memory->step_free[step % config::stages], step / config::stages % 2);
    }

    /* Ends two turns at a time, the second of which is that of `step`, or a single one if it is the
     * last of all. The fence waits for much that the multiprocessor has written. But with more
     * turns at a time the slot blocks of a head would be so far apart that what they read leaves
     * the L2 cache. */
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
