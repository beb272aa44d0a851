/* fdma_select() of one sequence with one kv head, as a WebAssembly module for the page
 * docs/selection.md. The page writes scores, calls select_keys() and reads expiries and slots. The
 * module has 32-bit pointers: every size is bounded here. */
#include <fdma.h>

enum { most_keys = 512, most_workspace = 1 << 18 };

static float scores[most_keys];
static int32_t expiries[most_keys], slots[most_keys];
static uint8_t workspace[most_workspace];

float *score_address(void) { return scores; }

int32_t *expiry_address(void) { return expiries; }

int32_t *slot_address(void) { return slots; }

/* The status of fdma_select(); FDMA_INVALID_ARGUMENT, too, for more than most_keys keys. */
int32_t select_keys(int32_t keys, int32_t window, int32_t recent, int32_t sinks) {
    if (keys < 0 || keys > most_keys)
        return FDMA_INVALID_ARGUMENT;
    fdma_selection selection = {.size = sizeof selection};
    selection.expiry = fdma_tensor_3d(expiries, FDMA_INT32, 1, 1, keys);
    selection.slot = fdma_tensor_3d(slots, FDMA_INT32, 1, 1, keys);
    fdma_select_args args = {.size = sizeof args, .selection = &selection};
    args.score = fdma_tensor_3d(scores, FDMA_FLOAT32, 1, 1, keys);
    args.window = window;
    args.recent = recent;
    args.sinks = sinks;
    args.exec.workspace = workspace;
    args.exec.workspace_size = sizeof workspace;
    return fdma_select(&args);
}
