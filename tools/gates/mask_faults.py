"""The faults of attn_mask and attn_bias that mutate.py plants; see faults.py."""

from __future__ import annotations

from fault import Fault
from faults import ERRORS

# fmt: off
MASKS = [
    Fault("masks of any number of heads", "src/core/",
          "length == want || length == problem->kv_heads || length == 1", "true",
          ERRORS),
    Fault("the mask of a kv head for its first query head alone", "src/core/",
          "problem->q_heads ? h : h / problem->group", "problem->q_heads ? h : 0",
          ("test_masks", "test_mask_gradients")),
    Fault("numbers of a mask that are below 0, or NaN, are set", "src/core/",
          "return bits != 0 && bits <= infinity;", "return bits != 0;",
          ("test_masks",)),
    Fault("dattn_bias of the last problem that was cut alone", "src/core/",
          "whole.add_dattn_bias = true;", "",
          ("test_mask_gradients",)),
    Fault("the reference does not know masks", "src/core/",
          "return !is_present(mask) ||", "return true ||",
          ("check group/", "check window/", "test_masks")),
    Fault("the last words of a scan are not read", "src/cpu/common/",
          "word < scanned_words; word++)", "word < scanned_words - 1; word++)",
          ("test_masks",)),
    Fault("keys that have expired are kept by their mask", "src/cpu/common/",
          "column & lowest_bits(end_lane - word * word_bits)", "column",
          ("test_masks", "test_mask_gradients")),
    Fault("a mask that some lanes break keeps all", "src/cpu/common/",
          ".masked = every != all", ".masked = some != all",
          ("test_masks", "test_mask_gradients")),
    Fault("dS of every group in place of the first", "src/cpu/backward/",
          "store_pair_ds(s, tile, group->first, from);", "store_pair_ds(s, tile, 0, from);",
          ("test_mask_gradients",)),
    Fault("kv heads that share dattn_bias do not take turns", "src/cpu/backward/",
          "return joins_heads(problem) ? 1 : problem->kv_heads;", "return problem->kv_heads;",
          ("test_mask_gradients",)),
    Fault("lists without a mask are taken", "src/core/",
          "!is_present(&problem->mask_lists) || is_present(&problem->attn_mask)", "true",
          ("test_mask_lists",)),
]
