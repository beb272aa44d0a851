/* Slots handed down along chains of keys, for segments of any length.
 *
 * The keys of a segment that get a slot have numbers, in ascending order of position. The first
 * `slots` of them take the slot of their number. Each later one takes over the slot of its parent,
 * a key of lower number. Two uses:
 *
 *     the selection by score (sm80/select.cu)  numbers are kept_index; the parent is the key that
 *                                              this one evicts
 *     the rule `recent` (rules.cu)             all valid keys of a sequence are numbered; the parent
 *                                              is the key that leaves as this one arrives
 *
 * A chain of n keys that a block handles is halved log2(n) times. From block to block its head walks
 * at most once through each earlier block, two dependent loads each. The way is usually far shorter,
 * since the heads that it meets walk too: if all of them run at once, each step doubles it. */
#pragma once

#include "cuda/select/select.cuh"

/* [segments][kv_len], by number. */
struct chain_space {
    uint32_t *parent; // then the slot
    uint32_t *head;   // the first key of the chain that the same block handles
};

struct slot_chains {
    chain_space space;
    const uint32_t *position; // [segments / sharing][kv_len], by number; NULL: equal to the number
    const uint32_t *count;    // [segments / sharing]: keys that get a slot; NULL: kv_len
    uint32_t segments;
    uint32_t sharing; // so many consecutive segments share position and count
    uint32_t slots;
};

/* Writes the slots of all keys that have a number. parent[n] must be given for n >= slots. */
fdma_status fdma_cuda_hand_down_slots(const fdma_problem *problem, const select_call &call,
                                      const slot_chains &chains);
