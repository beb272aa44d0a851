/* Slots handed down along chains of keys, for segments of any length.
 *
 * The keys of a segment that get a slot are numbered in ascending order of position. The first
 * `slots` of them, in packed sequences of each sequence, take the slot of their number. Each later
 * key takes over the slot of its parent, a key of lower number. There are two uses:
 *
 *     sm80/select.cu  numbers the keys that are ever kept (kept_index); the parent of a key is the
 *                     key that it evicts
 *     rules.cu        numbers all valid keys; the parent is the key that leaves as this one arrives
 *
 * Inside a block each chain is halved until one step is left. From block to block it takes at most
 * one step per earlier block, of two dependent reads. There are usually far fewer steps: once a
 * parent has been moved towards the slot, later keys skip those steps. */
#pragma once

#include "cuda/select/select.cuh"

/* [segments][kv_len], by number. */
struct chain_space {
    uint32_t *parent; // then the slot, with the bit is_slot
    uint32_t *root;   // the first key of the chain that the same block handles
};

struct slot_chains {
    chain_space space;
    const uint32_t *position; // [segments / sharing][kv_len], by number; NULL: equal to the number
    const uint32_t *number;   // [segments / sharing][kv_len], at the first position of each packed
                              // sequence: numbered keys before it; NULL: all keys are numbered
    const uint32_t *count;    // [segments / sharing]: keys that get a slot; NULL: all keys of
                              // sequences
    uint32_t segments;
    uint32_t sharing; // consecutive segments that share position and count
    uint32_t slots;
};

/* Writes the slots of all numbered keys. The caller gives parent[n] for every key n that is not
 * among the first. */
fdma_status fdma_cuda_hand_down_slots(const fdma_problem *problem, const select_call &call,
                                      const slot_chains &chains);
