/* The order in which slot blocks add to dq of a tile, for a deterministic result. The steps of a
 * thread block take turns with those of others: a turn begins when all slot blocks before this one
 * have added their dq of the step's queries, and ends when this one has added its own. Each tile
 * has a semaphore that counts the turns that have ended. One thread of the producer keeps the
 * order, so that the consumers, which add dq, wait only if their turn has not begun. */
#pragma once

#include "cuda/backward/sm90/tile.cuh"

template <class config> struct dq_turns {
    backward_memory<config> *memory;

    /* Begins the turn of the step before, and stores that of `step`, which is being loaded. */
    __device__ void advance(const backward_pass &pass, int32_t step, const dq_turn &turn) {
        if (step > 0)
            begin(pass, step - 1);
        memory->turns[step % most_turns] = turn;
    }

    /* Begins and ends the turn of the last step of all. */
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
     * of the step before. With stages_dq the turn begins first, because the bulk operations of the
     * step before are over only when those of this one are issued; otherwise the other turn ends
     * first. Either way all consumers have passed the wait for one turn before the next begins.
     * Bulk operations of two thread blocks need no fence between them: a thread issues its own once
     * it knows that the others are over. */
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
            wait(&memory->dq_added, step & 1); // of the step before; this one's is being added
            if (step > 0)
                end(pass, step - 1, false);
        }
    }

    /* Waits until the consumers have ended a step, and so have added its dq from registers. */
    __device__ void wait_multiplied(int32_t step) {
        wait(&memory->step_free[step % config::stages], step / config::stages % 2);
    }

    /* Ends two turns at a time, the second of which is that of `step`, or a single one if it is the
     * last of all. The fence is slow, as it waits for writes of the whole multiprocessor. With more
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

    /* Counts the turn of a step in its tile's semaphore. */
    __device__ void count(const backward_pass &pass, int32_t step) {
        const dq_turn turn = memory->turns[step % most_turns];
        st_relaxed_gpu(&pass.dq_semaphore[turn.tile], turn.order + 1);
    }
};
