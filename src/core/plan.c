/* The choice of a kernel row, and the workspace arena. */
#include "core/plan.h"

#include "core/error.h"

#include <stdio.h>
#include <string.h>

const char *fdma_operation_name(fdma_operation operation) {
    static const char *const names[] = {
        [operation_score] = "score",       [operation_select] = "select",
        [operation_lists] = "lists",       [operation_forward] = "forward",
        [operation_backward] = "backward", [operation_score_backward] = "score_backward",
        [operation_merge] = "merge",       [operation_merge_backward] = "merge_backward",
    };
    return names[operation];
}

const fdma_kernel *fdma_row_at(const kernel_backend *backends, int32_t index) {
    if (index < 0)
        return NULL;
    for (; *backends != NULL; backends++) {
        for (const kernel_table *const *table = *backends; *table != NULL; table++) {
            if (index < (*table)->count)
                return &(*table)->rows[index];
            index -= (*table)->count;
        }
    }
    return NULL;
}

/* "cpu/avx2" begins with "cpu" and with "cpu/avx2", not with "cpu/avx". */
static bool begins_with(const char *path, const char *beginning) {
    const size_t length = strlen(beginning);
    return strncmp(path, beginning, length) == 0 && (path[length] == '/' || path[length] == '\0');
}

/* A forced name stands for every row below it; rows without variants serve every variant's name,
 * so that one name can force a whole fdma_attention(). */
static bool is_meant(const fdma_kernel *row, const char *name) {
    return begins_with(row->name, name) || begins_with(name, row->name);
}

static bool is_known(const kernel_backend *backends, const char *name) {
    const fdma_kernel *row;
    for (int32_t i = 0; (row = fdma_row_at(backends, i)) != NULL; i++)
        if (begins_with(row->name, name))
            return true;
    return false;
}

static fdma_status fail_unknown(const kernel_backend *backends, const char *name) {
    char names[400] = "";
    size_t used = 0;
    const char *previous = "";
    const fdma_kernel *row;
    for (int32_t i = 0; (row = fdma_row_at(backends, i)) != NULL; i++) {
        if (strcmp(row->name, previous) == 0)
            continue;
        const int wrote =
            snprintf(names + used, sizeof names - used, "%s%s", used ? ", " : "", row->name);
        if (wrote < 0 || (size_t)wrote >= sizeof names - used)
            break;
        used += (size_t)wrote;
        previous = row->name;
    }
    return fdma_fail(FDMA_UNSUPPORTED, "exec.kernel: no kernel is named %.64s, there are %s", name,
                     names);
}

/* Why `row`, the last that was meant, does not do it; NULL: no row was meant. */
static fdma_status fail_pick(const fdma_kernel *row, const fdma_problem *problem) {
    const bool is_lists = problem->operation == operation_lists;
    const char *const verb = is_lists ? "list" : fdma_operation_name(problem->operation);
    const char *const name = problem->exec.kernel ? problem->exec.kernel : "any";
    FDMA_REQUIRE(row != NULL, FDMA_UNSUPPORTED,
                 "exec.kernel: is %.64s, which does not %s on exec.device %d", name, verb,
                 problem->exec.device);
    const char *const missing = row->missing();
    FDMA_REQUIRE(missing == NULL, FDMA_UNSUPPORTED,
                 "exec.kernel: %s needs %s, which this machine lacks", row->name, missing);
    return fdma_fail(FDMA_UNSUPPORTED, "exec.kernel: %s does not %s with %s", row->name, verb,
                     row->refuses(problem));
}

fdma_status fdma_pick_row(const kernel_backend *backends, const fdma_problem *problem,
                          const fdma_kernel **picked) {
    const char *const name = problem->exec.kernel;
    const bool on_device = problem->exec.device != 0;
    const fdma_kernel *row, *last = NULL;
    if (name != NULL && !is_known(backends, name))
        return fail_unknown(backends, name);
    for (int32_t i = 0; (row = fdma_row_at(backends, i)) != NULL; i++) {
        if (row->operation != problem->operation || row->on_device != on_device ||
            (name && !is_meant(row, name)))
            continue;
        last = row;
        if (row->missing() == NULL && row->refuses(problem) == NULL) {
            *picked = row;
            return FDMA_OK;
        }
    }
    return fail_pick(last, problem);
}

fdma_arena fdma_arena_of(const fdma_problem *problem) {
    const uintptr_t address = (uintptr_t)problem->exec.workspace;
    const uintptr_t aligned = (address + arena_alignment - 1) & ~(uintptr_t)(arena_alignment - 1);
    return (fdma_arena){.base = (uint8_t *)aligned};
}

void *fdma_arena_take(fdma_arena *arena, size_t bytes) {
    // of sizes that are refused later it may lie beyond all memory: no pointer may be counted there
    void *const piece = arena->base ? (void *)((uintptr_t)arena->base + arena->used) : NULL;
    arena->used += (bytes + arena_alignment - 1) & ~(size_t)(arena_alignment - 1);
    return piece;
}

size_t fdma_arena_size(const fdma_arena *arena) {
    return arena->used ? arena->used + arena_alignment - 1 : 0;
}
