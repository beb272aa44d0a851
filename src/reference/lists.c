/* The list of each tile, found by testing every key. */
#include "reference/reference.h"

/* NULL where there are no elements. */
static int32_t *ints_at(const fdma_tensor *tensor, int64_t b, int64_t g, int64_t t) {
    return tensor->data ? (int32_t *)tensor->data + offset_of(tensor, b, g, t) : NULL;
}

/* Number of entries for the keys that are live at a position: their number or, if slots may be
 * empty, one more than the last slot in use. */
static int32_t count_entries(const fdma_problem *problem, int64_t b, int64_t g, int64_t position) {
    const int32_t *const slot = ints_at(&problem->slot, b, g, 0);
    const int64_t most = position < problem->slots ? position + 1 : problem->slots;
    int32_t live = 0, used = 0;
    for (int64_t j = 0; j <= position; j++) {
        if (!is_kept(problem, b, g, j, position))
            continue;
        live += live < problem->slots;
        used = slot[j] >= used && slot[j] < most ? slot[j] + 1 : used;
    }
    return problem->gap > 0 ? used : live;
}

/* Lists the keys of tile t: first the keys that are live at its first position, by slot, then the
 * keys that arrive later. If expiry and slot contradict each other, entries stay within the list
 * and within kv_len. */
static void list_tile(const fdma_problem *problem, int64_t b, int64_t g, int64_t t) {
    const int32_t *const slot = ints_at(&problem->slot, b, g, 0);
    int32_t *const list = ints_at(&problem->list, b, g, t);
    int32_t *const count = ints_at(&problem->count, b, g, t);
    const tile_span span = span_of(problem, t);
    const int32_t live = count_entries(problem, b, g, span.first);
    for (int32_t n = 0; n < live; n++)
        list[n] = problem->gap > 0 ? -1 : 0;
    for (int64_t j = 0; j <= span.first; j++)
        if (is_kept(problem, b, g, j, span.first) && slot[j] >= 0 && slot[j] < live)
            list[slot[j]] = (int32_t)j;
    int32_t used = live;
    for (int64_t j = span.first < 0 ? 0 : span.first + 1; j <= span.last; j++)
        if (is_kept(problem, b, g, j, j))
            list[used++] = (int32_t)j;
    count[0] = live;
    count[1] = used;
}

fdma_status fdma_reference_lists(const fdma_problem *problem) {
    for (int64_t b = 0; b < problem->batch; b++)
        for (int64_t g = 0; g < problem->kv_heads; g++)
            for (int64_t t = 0; t < count_tiles(problem); t++)
                list_tile(problem, b, g, t);
    return FDMA_OK;
}
