/* test_cuda_top.c - selection for the last positions alone, on a CUDA device: at these positions
 * every key has the expiry that the CPU gives it, slots are handed from each key to the one that
 * evicts it, and a fused call of few queries gives the same out and lse whether it asks for its
 * selection or not. */
#include "device.h"
#include "scores.h"

#include "core/kernel.h"
#include "cuda/cuda.h"

static const char kernel_name[] = "cuda/sm90/top";

enum { most_positions = 16 };

static const fdma_kernel *find_kernel(void) {
    for (const kernel_table *const *table = fdma_cuda_tables; *table != NULL; table++)
        for (int32_t i = 0; i < (*table)->count; i++)
            if (strcmp((*table)->kernels[i].name, kernel_name) == 0)
                return &(*table)->kernels[i];
    return NULL;
}

/* ---- a selection ---- */

/* Runs the kernel on a selection for the last positions; returns whether it takes that. */
static bool select_last(const fdma_select_args *on_cpu, int64_t positions, fdma_selection *found) {
    const fdma_kernel *const kernel = find_kernel();
    const int kept = device_state.blocks;
    fdma_problem problem;
    call here, there;
    call_of(&here, operation_select, on_cpu);
    here.selection.expiry = found->expiry;
    here.selection.slot = found->slot;
    here.args.select.exec = (fdma_exec){.device = device_number};
    device_copy_call(&there, &here);
    CHECK_OK(fdma_check_call(operation_select, &there.args, check_shapes, &problem));
    problem.last_positions = positions;
    const bool taken = kernel->refuses(&problem) == NULL;
    if (taken) {
        device_exec(&problem.exec, fdma_cuda_workspace(kernel, &problem));
        CHECK_OK(fdma_run_cuda(fdma_cuda_run_kernel, kernel, &problem));
        device_read_outputs(&here, &there);
    }
    device_free_after(kept);
    return taken;
}

/* The expiry of a key where only the positions from `first` on count. */
static int32_t last_expiry(int32_t expiry, int32_t j, int32_t first) {
    return expiry > (j > first ? j : first) ? expiry : j;
}

/* Slots of live keys differ, and the key that arrives takes the slot of the one that leaves. */
static void check_slots(const int32_t *expiry, const int32_t *slot, int32_t first, int32_t end,
                        int64_t slots) {
    int32_t *const owner = test_alloc((size_t)(slots + 1) * sizeof *owner);
    memset(owner, 0xff, (size_t)(slots + 1) * sizeof *owner);
    for (int32_t j = 0; j < end; j++) {
        int32_t left = -1;
        for (int32_t r = 0; r < j && j > first; r++)
            left = expiry[r] == j ? slot[r] : left;
        if (left >= 0)
            owner[left] = -1;
        if (expiry[j] == j) {
            CHECK_INT(slot[j], -1);
            continue;
        }
        if (!CHECK(slot[j] >= 0 && slot[j] < slots))
            return;
        CHECK_INT(owner[slot[j]], -1);
        CHECK(left < 0 || left == slot[j]);
        owner[slot[j]] = j;
    }
}

static void check_row(const fdma_select_args *want, const fdma_selection *found, int64_t row,
                      int64_t positions) {
    const int64_t kv_len = want->score.shape[2], b = row / want->score.shape[1];
    const int32_t *const cpu = (const int32_t *)want->selection->expiry.data + row * kv_len;
    const int32_t *const expiry = (const int32_t *)found->expiry.data + row * kv_len;
    const int32_t *const slot = (const int32_t *)found->slot.data + row * kv_len;
    const int32_t *const used = want->kv_used.data;
    const int32_t end = used != NULL ? used[b] : (int32_t)kv_len;
    const int32_t first = end > positions ? end - (int32_t)positions : 0;
    const int64_t most = want->recent < kv_len ? want->window + want->recent : kv_len;
    for (int32_t j = 0; j < kv_len; j++)
        if (!CHECK_INT(expiry[j], last_expiry(cpu[j], j, first)))
            return;
    for (int32_t j = end; j < kv_len; j++)
        CHECK_INT(slot[j], -1);
    check_slots(expiry, slot, first, end, most < kv_len ? most : kv_len);
}

/* Selects on the CPU and on the device. Returns whether the kernel takes the call. */
static bool check_last(fdma_select_args *args, int64_t positions) {
    const int64_t *const n = args->score.shape;
    fdma_selection found = selection_for(args->score);
    test_context("batch %d, kv_heads %d, kv_len %d, window %d, recent %d, sinks %d%s%s, %d last",
                 (int)n[0], (int)n[1], (int)n[2], (int)args->window, (int)args->recent,
                 (int)args->sinks, args->key_valid.rank > 0 ? ", padding" : "",
                 args->kv_used.rank > 0 ? ", kv_used" : "", (int)positions);
    CHECK_OK(run_select(args));
    if (!select_last(args, positions, &found))
        return false;
    for (int64_t row = 0; row < n[0] * n[1]; row++)
        check_row(args, &found, row, positions);
    return true;
}

static fdma_tensor new_used(int64_t batch, int64_t kv_len, uint64_t *state) {
    const fdma_tensor used = new_tensor(FDMA_INT32, batch, -1, -1, -1);
    for (int64_t b = 0; b < batch; b++) {
        const int64_t some[] = {0, 1, random_below(state, kv_len + 1), kv_len};
        ((int32_t *)used.data)[b] = (int32_t)some[random_below(state, TEST_COUNT(some))];
    }
    return used;
}

static void check_random_case(uint64_t *state) {
    static const int64_t longest[] = {3, 20, 300, 1500, 5000, 9000};
    const int64_t most = longest[random_below(state, TEST_COUNT(longest))];
    const int64_t batch = 1 + random_below(state, 2), kv_len = 1 + random_below(state, most);
    const int64_t window = 1 + random_below(state, random_below(state, 4) ? kv_len / 3 + 2 : most);
    const fdma_tensor score = new_tensor(FDMA_FLOAT32, batch, 2, kv_len, -1);
    fdma_selection selection = selection_for(score);
    fdma_select_args args = {.size = sizeof args,
                             .score = score,
                             .selection = &selection,
                             .window = window,
                             .sinks = random_below(state, 3) ? 0 : random_below(state, window + 1),
                             .scope = FDMA_SCOPE_CAUSAL,
                             .exec = {.kernel = "cpu", .threads = 1}};
    fill_kinds(score, 1 + random_below(state, 200), state);
    const bool has_recent = random_below(state, 3) == 0;
    if (has_recent) // with padding the kernel refuses these
        args.recent = 1 + random_below(state, random_below(state, 2) ? 20 : kv_len + 2);
    if (!has_recent && random_below(state, 3) == 0)
        args.key_valid = new_padding(batch, kv_len, state);
    if (!has_recent && random_below(state, 3) == 0)
        args.kv_used = new_used(batch, kv_len, state);
    CHECK(check_last(&args, 1 + random_below(state, most_positions)));
}

static void random_selections(void) {
    uint64_t state = 31;
    for (int i = 0; i < test_repeats(1000) && test_state.failures < test_reports; i++) {
        check_random_case(&state);
        device_free_both();
    }
}

/* Of each kind alone, in so many blocks that a cluster has its fewest and its most. */
static void kinds_in_clusters_of_every_size(void) {
    static const int64_t lengths[] = {4096, 4097, 32768, 70001, 131072};
    for (int n = 0; n < TEST_COUNT(lengths); n++) {
        for (int kind = n > 2 && test_divisor() > 1 ? kind_count - 1 : 0; kind < kind_count;
             kind++) {
            uint64_t state = (uint64_t)(100 * n + kind);
            const fdma_tensor score = new_tensor(FDMA_FLOAT32, 1, 1, lengths[n], -1);
            fdma_selection selection = selection_for(score);
            fdma_select_args args = {.size = sizeof args,
                                     .score = score,
                                     .selection = &selection,
                                     .window = kind % 2 ? 777 : 1 + lengths[n] / 3,
                                     .recent = kind % 3 == 0 ? 5 : 0,
                                     .sinks = kind % 4 == 0 ? 4 : 0,
                                     .scope = FDMA_SCOPE_CAUSAL,
                                     .exec = {.kernel = "cpu"}};
            fill_kind(score, (score_kind)kind, &state);
            CHECK(check_last(&args, kind % 5 == 0 ? most_positions : 1));
            device_free_both();
        }
    }
}

/* ---- what it does not take ---- */

static void refuses_what_it_does_not_know(void) {
    const fdma_tensor score = new_tensor(FDMA_FLOAT32, 1, 1, 500, -1);
    uint64_t state = 4;
    fdma_selection selection = selection_for(score);
    fdma_select_args args = {.size = sizeof args,
                             .score = score,
                             .selection = &selection,
                             .window = 20,
                             .scope = FDMA_SCOPE_CAUSAL,
                             .exec = {.kernel = "cpu"}};
    fill_kind(score, kind_iid, &state);
    CHECK(check_last(&args, most_positions));
    CHECK(!check_last(&args, 0));
    CHECK(!check_last(&args, most_positions + 1));
    args.gap = 0.5;
    CHECK(!check_last(&args, 1));
    args.gap = 0;
    args.recent = 3;
    CHECK(check_last(&args, 1));
    args.key_valid = new_padding(1, 500, &state);
    CHECK(!check_last(&args, 1));
    args.recent = 0;
    CHECK(check_last(&args, 1));
    args.scope = FDMA_SCOPE_GLOBAL;
    CHECK(!check_last(&args, 1));
    device_free_both();
}

/* ---- fused calls ---- */

/* Queries of 0 give all kept keys the same weight, and v has few bits: so every sum is exact, and
 * out and lse depend only on which keys are kept, not on their order. */
static void fill_exact(call *x, uint64_t *state) {
    const fdma_attention_args *const args = &x->args.attention;
    memset(args->q.data, 0, bytes_of(args->q));
    for (int64_t n = 0; n < count_of(args->v); n++)
        store_float(args->v.data, args->v.dtype, n, (float)random_below(state, 4));
    if (random_below(state, 4) == 0) // all scores are 0
        memset(args->a.data, 0, bytes_of(args->a));
}

static const char *name_of_select(call *x) {
    fdma_attention_kernels names = {.size = sizeof names};
    call_exec(x)->device = device_number;
    CHECK_OK(fdma_attention_kernel(&x->args.attention, &names));
    call_exec(x)->device = FDMA_CPU;
    return names.select != NULL ? names.select : "none";
}

static void check_fused_case(uint64_t *state) {
    const int64_t q_len = 1 + random_below(state, most_positions);
    const call_sizes n = {.batch = 1 + random_below(state, 2),
                          .q_len = q_len,
                          .kv_len = q_len + random_below(state, random_below(state, 3) ? 700 : 20),
                          .q_heads = 4,
                          .kv_heads = 2,
                          .head_dim = 64};
    const int64_t window = 1 + random_below(state, n.kv_len);
    call bare, whole = {.operation = operation_attention,
                        .args.attention = {.window = window,
                                           .recent = random_below(state, 2) * 3,
                                           .sinks = random_below(state, 3) ? 0 : window / 2,
                                           .bias_form = FDMA_BIAS_NONE,
                                           .causal = 1}};
    call_make(&whole, &n, FDMA_BFLOAT16, true);
    whole.args.attention.bias = whole.args.attention.key_valid = (fdma_tensor){0};
    whole.args.attention.sink_logit = (fdma_tensor){0};
    call_alloc(&whole, state);
    fill_exact(&whole, state);
    if (whole.args.attention.recent == 0 && random_below(state, 2))
        whole.args.attention.key_valid = new_padding(n.batch, n.kv_len, state);
    if (whole.args.attention.recent == 0 && random_below(state, 2))
        whole.args.attention.kv_used = new_used(n.batch, n.kv_len, state);
    call_copy(&bare, &whole);
    call_drop_selection(&bare);
    call_own_outputs(&bare);
    test_context("batch %d, q_len %d, kv_len %d, window %d, recent %d%s%s", (int)n.batch,
                 (int)n.q_len, (int)n.kv_len, (int)window, (int)whole.args.attention.recent,
                 whole.args.attention.key_valid.rank > 0 ? ", padding" : "",
                 whole.args.attention.kv_used.rank > 0 ? ", kv_used" : "");
    CHECK(strcmp(name_of_select(&bare), kernel_name) == 0);
    CHECK(strcmp(name_of_select(&whole), kernel_name) != 0);
    CHECK_OK(device_run(operation_attention, &whole.args));
    CHECK_OK(device_run(operation_attention, &bare.args));
    CHECK(same_tensor(bare.args.attention.out, whole.args.attention.out));
    CHECK(same_tensor(bare.args.attention.lse, whole.args.attention.lse));
    CHECK(same_tensor(bare.args.attention.score, whole.args.attention.score));
}

static void fused_calls(void) {
    uint64_t state = 77;
    for (int i = 0; i < test_repeats(300) && test_state.failures < test_reports; i++) {
        check_fused_case(&state);
        device_free_both();
    }
}

static const test_entry tests[] = {
    TEST(random_selections),
    TEST(kinds_in_clusters_of_every_size),
    TEST(refuses_what_it_does_not_know),
    TEST(fused_calls),
};

int main(void) {
    const char *const missing = find_kernel()->missing();
    if (missing != NULL)
        printf("skipped %s: this machine lacks %s\n", kernel_name, missing);
    return missing != NULL ? 0 : device_test_run(tests, TEST_COUNT(tests));
}
