/* The choice of a kernel, and the workspace arena. */
#include "core/kernel.h"

#include "core/error.h"
#include "core/operations.h"

#include <stdio.h>
#include <string.h>

const fdma_kernel *fdma_kernel_at(const kernel_backend *const *backends, int32_t index) {
    if (index < 0)
        return NULL;
    for (; *backends != NULL; backends++) {
        for (const kernel_table *const *table = (*backends)->tables; *table != NULL; table++) {
            if (index < (*table)->count)
                return &(*table)->kernels[index];
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

/* How a forced name selects kernels of an operation. */
typedef enum name_match {
    match_below, /* the kernel's name is the forced name, or begins with it and a '/' */
    match_above, /* the forced name begins with the kernel's name and a '/' */
} name_match;

/* "cpu/avx512/decode" selects a kernel of forward by match_below and, because score has no kernel
 * of that name, score's "cpu/avx512" by match_above: one name can force a whole fused call. */
static bool is_selected(const fdma_kernel *kernel, const fdma_problem *problem, name_match match) {
    const char *const forced = problem->exec.kernel;
    if (kernel->operation != problem->operation ||
        kernel->on_device != (problem->exec.device != FDMA_CPU))
        return false;
    return forced == NULL || (match == match_below ? begins_with(kernel->name, forced)
                                                   : begins_with(forced, kernel->name));
}

static name_match match_of(const kernel_backend *const *backends, const fdma_problem *problem) {
    const fdma_kernel *kernel;
    for (int32_t i = 0; (kernel = fdma_kernel_at(backends, i)) != NULL; i++)
        if (problem->exec.kernel == NULL || is_selected(kernel, problem, match_below))
            return match_below;
    return match_above;
}

static bool is_known(const kernel_backend *const *backends, const char *name) {
    const fdma_kernel *kernel;
    for (int32_t i = 0; (kernel = fdma_kernel_at(backends, i)) != NULL; i++)
        if (begins_with(kernel->name, name))
            return true;
    return false;
}

/* The length of the first two parts of a kernel's name: "cpu/avx2" of "cpu/avx2/decode". */
static int prefix_length(const char *name) {
    const char *const slash = strchr(name, '/');
    return (int)(slash == NULL ? strlen(name)
                               : (size_t)(slash - name) + 1 + strcspn(slash + 1, "/"));
}

static fdma_status fail_unknown(const kernel_backend *const *backends, const char *name) {
    char names[400] = "";
    size_t used = 0;
    const char *previous = "";
    const fdma_kernel *kernel;
    for (int32_t i = 0; (kernel = fdma_kernel_at(backends, i)) != NULL; i++) {
        const int length = prefix_length(kernel->name);
        if (length == prefix_length(previous) &&
            strncmp(kernel->name, previous, (size_t)length) == 0)
            continue;
        const int wrote = snprintf(names + used, sizeof names - used, "%s%.*s",
                                   used != 0 ? ", " : "", length, kernel->name);
        if (wrote < 0 || (size_t)wrote >= sizeof names - used)
            break;
        used += (size_t)wrote;
        previous = kernel->name;
    }
    return fdma_fail(FDMA_UNSUPPORTED, "exec.kernel: no kernel name begins with %s, want one of %s",
                     fdma_quote(name).text, names);
}

/* Distinct reasons why kernels refuse a call. */
typedef struct refusal_list {
    char text[320]; /* "cuda/sm90/d64 does not support A; cuda/sm80/d64 does not support B" */
    size_t used;
    const char *first; /* reason */
    bool several;
} refusal_list;

static void add_refusal(refusal_list *list, const char *name, const char *verb,
                        const char *reason) {
    if (strstr(list->text, reason) != NULL)
        return;
    const int wrote = snprintf(list->text + list->used, sizeof list->text - list->used,
                               "%s%s %s %s", list->used > 0 ? "; " : "", name, verb, reason);
    const size_t left = sizeof list->text - list->used - 1;
    list->used += wrote < 0 ? 0 : (size_t)wrote < left ? (size_t)wrote : left;
    list->several = list->first != NULL;
    list->first = list->first != NULL ? list->first : reason;
}

/* True if a selected kernel runs on this machine. Messages then leave out the kernels that do
 * not. */
static bool is_any_usable(const kernel_backend *const *backends, const fdma_problem *problem,
                          name_match match) {
    const fdma_kernel *kernel;
    for (int32_t i = 0; (kernel = fdma_kernel_at(backends, i)) != NULL; i++)
        if (is_selected(kernel, problem, match) && kernel->missing() == NULL)
            return true;
    return false;
}

/* "forward (bfloat16, head_dim 64) on FDMA_CUDA(0)" */
typedef struct call_text {
    char text[112];
} call_text;

static call_text describe_call(const fdma_problem *problem) {
    call_text call;
    char head_dim[40] = "";
    if (problem->head_dim > 0)
        snprintf(head_dim, sizeof head_dim, ", head_dim %lld", (long long)problem->head_dim);
    snprintf(call.text, sizeof call.text, "%s (%s%s) on %s",
             fdma_operation_name(problem->operation), fdma_dtype_name(problem->dtype), head_dim,
             fdma_device_text(problem->exec.device).text);
    return call;
}

/* Reports what the library lacks for this call. Names exec.kernel if the caller has set it. */
static fdma_status fail_choice(const kernel_backend *const *backends, const fdma_problem *problem,
                               name_match match) {
    const bool usable = is_any_usable(backends, problem, match);
    const char *const verb = usable ? "does not support" : "needs";
    const char *const end = usable ? "" : ", which this machine does not have";
    const call_text call = describe_call(problem);
    const char *const forced = problem->exec.kernel;
    char subject[300] = "the library";
    refusal_list list = {.used = 0};
    const fdma_kernel *kernel;
    for (int32_t i = 0; (kernel = fdma_kernel_at(backends, i)) != NULL; i++) {
        if (!is_selected(kernel, problem, match) || (usable && kernel->missing() != NULL))
            continue;
        add_refusal(&list, kernel->name, verb,
                    usable ? kernel->refuses(problem) : kernel->missing());
    }
    if (forced != NULL)
        snprintf(subject, sizeof subject, "exec.kernel %s", fdma_quote(forced).text);
    FDMA_REQUIRE(list.first != NULL, FDMA_UNSUPPORTED, "%s: %s has no kernel for this call",
                 call.text, subject);
    if (list.several)
        return fdma_fail(FDMA_UNSUPPORTED, "%s: %s%s%s%s", call.text, forced ? subject : "",
                         forced ? ": " : "", list.text, end);
    return fdma_fail(FDMA_UNSUPPORTED, "%s: %s %s %s%s", call.text, subject, verb, list.first, end);
}

/* The first selected kernel that runs here and takes the problem; NULL if none does. */
static const fdma_kernel *find_first(const kernel_backend *const *backends,
                                     const fdma_problem *problem, name_match match) {
    for (; *backends != NULL; backends++)
        for (const kernel_table *const *table = (*backends)->tables; *table != NULL; table++)
            for (const fdma_kernel *kernel = (*table)->kernels;
                 kernel < (*table)->kernels + (*table)->count; kernel++)
                if (is_selected(kernel, problem, match) && kernel->missing() == NULL &&
                    kernel->refuses(problem) == NULL)
                    return kernel;
    return NULL;
}

fdma_status fdma_choose_kernel(const kernel_backend *const *backends, const fdma_problem *problem,
                               const fdma_kernel **picked) {
    const char *const forced = problem->exec.kernel;
    if (forced != NULL && !is_known(backends, forced))
        return fail_unknown(backends, forced);
    const name_match match = match_of(backends, problem);
    *picked = find_first(backends, problem, match);
    return *picked != NULL ? FDMA_OK : fail_choice(backends, problem, match);
}

fdma_arena fdma_arena_at(const void *memory) {
    const uintptr_t address = (uintptr_t)memory;
    const uintptr_t aligned = (address + arena_alignment - 1) & ~(uintptr_t)(arena_alignment - 1);
    return (fdma_arena){.base = (uint8_t *)aligned};
}

fdma_arena fdma_arena_of(const fdma_problem *problem) {
    return fdma_arena_at(problem->exec.workspace);
}

void *fdma_arena_take(fdma_arena *arena, size_t bytes) {
    // An integer, because a size that is refused only later may lead outside of the workspace,
    // where pointer arithmetic is undefined.
    void *const piece = arena->base ? (void *)((uintptr_t)arena->base + arena->used) : NULL;
    arena->used += (bytes + arena_alignment - 1) & ~(size_t)(arena_alignment - 1);
    return piece;
}

void fdma_set_aside(fdma_exec *exec, const fdma_arena *arena) {
    if (arena->base == NULL || arena->used == 0)
        return;
    // an integer, not a pointer, for the reason given in fdma_arena_take()
    const uintptr_t rest = (uintptr_t)arena->base + arena->used;
    const size_t taken = (size_t)(rest - (uintptr_t)exec->workspace);
    exec->workspace = (void *)rest;
    exec->workspace_size = exec->workspace_size > taken ? exec->workspace_size - taken : 0;
}

size_t fdma_arena_size(const fdma_arena *arena) {
    return arena->used ? arena->used + arena_alignment - 1 : 0;
}
