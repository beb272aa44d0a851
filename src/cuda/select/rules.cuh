/* The rules `sinks`, `recent` and `gap` of a selection, applied before and after the selection by
 * score, which has two implementations (select.cuh).
 *
 * sinks: the first `sinks` valid keys of a sequence are sorted above all others. Without padding
 * they end at position `sinks`. With padding find_sinks finds their end before keys are sorted, or,
 * where sequences are packed, count_valid and number_keys number all keys.
 *
 * recent: a key competes by score only once `recent` valid keys have followed it. So the selection
 * by score comes first, and each key that leaves it leaves `recent` valid keys later:
 *
 *     count_valid, number_keys  number the valid keys of each sequence. Without padding the number
 *                               of a key is its position
 *     move_expiries             moves each expiry by `recent` valid keys. The key that leaves the
 *                               selection by score when valid key n arrives (maybe n itself) now
 *                               leaves when valid key n + recent arrives, and is its parent
 *     hand_down_slots           see below: the first window + recent valid keys take free
 *                               slots, each later one takes the slot of its parent
 *     hand_down_in_block        the last two in one launch, for up to 8,192 keys
 *
 * gap: a key also leaves once its score is more than `gap` below the best so far, unless it is a
 * sink or among the `recent` newest. This comes last:
 *
 *     find_tile_best, find_best  the best score of the valid keys of a sequence up to each position
 *     keep_near_best             finds by binary search among these the first position at which the
 *                                score of a key is too low */
#pragma once

#include "cuda/select/select.cuh"

/* Slots handed down along chains of keys, for segments of any length.
 *
 * The keys of a segment that get a slot are numbered in ascending order of position. The first
 * `slots` of them, in packed sequences of each sequence, take the slot of their number. Each later
 * key takes over the slot of its parent, a key of lower number. There are two uses:
 *
 *     sm80.cu   numbers the keys that are ever kept (kept_index); the parent of a key is the key
 *               that it evicts
 *     rules.cu  numbers all valid keys; the parent is the key that leaves as this one arrives
 *
 * Inside a block each chain is halved until one step is left. From block to block it takes at most
 * one step per earlier block, of two dependent reads. There are usually far fewer steps: once a
 * parent has been moved towards the slot, later keys skip those steps. If a block has the whole
 * segment, it writes the slots at once. */

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

/* Arrays in the workspace. Those that a call does not need are NULL. */
struct rules_space {
    uint32_t *sink_end;   // [batch]: the first position past the sinks
    uint32_t *number;     // [batch][kv_len], by position: the number of each valid key; in packed
                          // sequences the valid keys before each position
    uint32_t *position;   // [batch][kv_len], by number
    uint32_t *count;      // [batch]: valid keys, in packed sequences of all sequences
    uint32_t *tile_count; // [batch][tiles]: valid keys of each tile
    uint32_t tiles;       // of a sequence, number_tile keys each
    float *best;          // [segments][kv_len]: the best score up to each position
    uint64_t *tile_best;  // [segments][best_tiles]: the best score up to the end of each tile, as a
                          // placed_order
    uint32_t best_tiles;  // of a segment, number_tile keys each
};

rules_space fdma_cuda_lay_out_rules(const fdma_problem *problem, fdma_arena *arena);

/* Sets call->sink_end and call->number. With padding and sinks one of them points into the
 * workspace, and the device writes it. Call this before the selection by score, with the same
 * `call`. */
fdma_status fdma_cuda_find_sinks(const fdma_problem *problem, const rules_space &rules,
                                 select_call *call);

/* Applies the rule `recent`, if the call has it, to the selection by score. chains: scratch for the
 * slots, if these are wanted. */
fdma_status fdma_cuda_keep_recent(const fdma_problem *problem, const rules_space &rules,
                                  const chain_space &chains, const select_call &by_score);

/* Applies the rule `gap`, if the call has it, to the result of fdma_cuda_keep_recent(). */
fdma_status fdma_cuda_keep_near_best(const fdma_problem *problem, const rules_space &rules,
                                     const select_call &by_score);
