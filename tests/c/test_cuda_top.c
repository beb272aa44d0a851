/* test_cuda_top.c - selection for the last positions alone, on a CUDA device. It lists exactly the
 * keys that the CPU keeps there, in ascending order, with the CPU's expiry and with their bias, and
 * writes nothing else. A fused call of few queries gives the same out, lse, score and bias whether
 * it asks for its selection or not. */
#include "core/adapter.h" // before device.h, whose types have names of parameters there

#include "device.h"
#include "scores.h"

#include "core/operations.h"
#include "cuda/cuda.h"

static const char kernel_name[] = "cuda/sm90/top";

enum { most_positions = 16 };

static const fdma_kernel *find_kernel(void) {
    for (const kernel_table *const *table = fdma_cuda_backend.tables; *table != NULL; table++)
        for (int32_t i = 0; i < (*table)->count; i++)
            if (strcmp((*table)->kernels[i].name, kernel_name) == 0)
                return &(*table)->kernels[i];
    return NULL;
}

/* ---- a selection ---- */

/* A key of last_keys; see key_record. */
typedef struct record {
    int32_t expiry;
    float bias;
} record;

/* Forward uses a bias as an exponent of 2. */
static float exponent_of(float bias) { return 1.44269504088896340736f * bias; }

static bool is_same(float a, float b) { return a == b || (isnan(a) && isnan(b)); }

/* A tensor on the device, full of guard bytes. */
static fdma_tensor new_on_device(int64_t n0, int64_t n1, int64_t n2, int64_t n3) {
    fdma_tensor tensor = fdma_tensor_4d(NULL, FDMA_INT32, n0, n1, n2, n3);
    tensor.data = device_alloc(bytes_of(tensor));
    return tensor;
}

/* Runs the kernel on a selection for the last positions. Returns true if the kernel takes it. */
static bool select_last(const fdma_select_args *on_cpu, fdma_tensor bias, int64_t positions,
                        fdma_last_keys *found) {
    const fdma_kernel *const kernel = find_kernel();
    const adapted_kernel adapted = {kernel, fdma_cuda_backend.adapters};
    const int64_t *const n = on_cpu->score.shape;
    const int kept = device_state.blocks;
    int before;
    fdma_problem call_problem;
    call here, there;
    call_of(&here, operation_select, on_cpu);
    here.args.select.exec = (fdma_exec){.device = device_number};
    device_copy_call(&there, &here);
    CHECK_OK(fdma_check_call(operation_select, &there.args, check_shapes, &call_problem));
    const int64_t most = call_problem.slots < n[2] ? call_problem.slots + positions - 1 : n[2];
    call_problem.fused.last_positions = positions;
    call_problem.expiry = call_problem.slot = (fdma_tensor){0}; // last_keys replaces them
    call_problem.bias = device_tensor(bias);
    call_problem.fused.last_keys = (fdma_last_keys){
        .list = new_on_device(n[0], n[1], most, 1),
        .count = new_on_device(n[0], n[1], 2, 1),
        .record = new_on_device(n[0], n[1], n[2], 2),
    };
    const bool taken = kernel->refuses(&call_problem) == NULL;
    if (taken) {
        device_exec(&call_problem.exec, fdma_adapted_workspace(&adapted, &call_problem, check_all));
        CHECK_OK(fdma_enter_cuda(&call_problem.exec, &before));
        CHECK_OK(fdma_run_adapted(&adapted, &call_problem));
        fdma_leave_cuda(&call_problem.exec, before);
        device_wait();
        found->list = device_read(call_problem.fused.last_keys.list);
        found->count = device_read(call_problem.fused.last_keys.count);
        found->record = device_read(call_problem.fused.last_keys.record);
    }
    device_free_after(kept);
    return taken;
}

/* True if some query from position `first` on keeps key j. */
static bool is_wanted(int32_t expiry, int32_t j, int32_t first) {
    return expiry > (j > first ? j : first);
}

/* The output of the kernel for one segment. */
typedef struct segment {
    const int32_t *list, *count;
    const record *records;
} segment;

static segment segment_at(const fdma_last_keys *found, int64_t row) {
    return (segment){
        (const int32_t *)found->list.data + row * found->list.shape[2],
        (const int32_t *)found->count.data + row * 2,
        (const record *)found->record.data + row * found->record.shape[2],
    };
}

/* Records of other keys are full of guard bytes. */
static bool check_unlisted(record found) {
    record guard;
    memset(&guard, test_guard_byte, sizeof guard);
    return CHECK_INT(found.expiry, guard.expiry) && CHECK_INT(memcmp(&found, &guard, 8), 0);
}

static void check_row(const fdma_select_args *want, const float *bias, const segment *found,
                      int64_t row, int64_t positions) {
    const int64_t kv_len = want->score.shape[2], b = row / want->score.shape[1];
    const int32_t *const expiry = (const int32_t *)want->selection->expiry.data + row * kv_len;
    const int32_t *const used = want->kv_used.data;
    const int32_t end = used != NULL ? used[b] : (int32_t)kv_len;
    const int32_t first = end > positions ? end - (int32_t)positions : 0;
    int32_t listed = 0, live = 0;
    for (int32_t j = 0; j < kv_len; j++) {
        if (!is_wanted(expiry[j], j, first)) {
            if (!check_unlisted(found->records[j]))
                return;
            continue;
        }
        if (!CHECK(listed < found->count[1]) || !CHECK_INT(found->list[listed++], j))
            return;
        live += j <= first;
        CHECK_INT(found->records[j].expiry, expiry[j] == end ? INT32_MAX : expiry[j]);
        CHECK(is_same(found->records[j].bias,
                      bias == NULL ? 0 : exponent_of(bias[row * kv_len + j])));
    }
    CHECK_INT(found->count[0], live);
    CHECK_INT(found->count[1], listed);
}

/* Selects on the CPU and on the device. Returns true if the kernel takes the call. */
static bool check_last(fdma_select_args *args, int64_t positions) {
    const int64_t *const n = args->score.shape;
    const bool has_bias = positions % 2 == 0; // the scores serve as a bias
    fdma_last_keys found;
    test_context("batch %d, kv_heads %d, kv_len %d, window %d, recent %d, sinks %d%s%s, %d last",
                 (int)n[0], (int)n[1], (int)n[2], (int)args->window, (int)args->recent,
                 (int)args->sinks, args->key_valid.rank > 0 ? ", padding" : "",
                 args->kv_used.rank > 0 ? ", kv_used" : "", (int)positions);
    CHECK_OK(run_select(args));
    if (!select_last(args, has_bias ? args->score : (fdma_tensor){0}, positions, &found))
        return false;
    for (int64_t row = 0; row < n[0] * n[1]; row++) {
        const segment here = segment_at(&found, row);
        check_row(args, has_bias ? args->score.data : NULL, &here, row, positions);
    }
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

/* Each kind alone, with so many blocks that a cluster has its fewest and its most. */
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

/* ---- refused calls ---- */

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

/* With q = 0 all kept keys have the same weight, and v has few bits, so every sum is exact: out and
 * lse depend only on the set of kept keys, not on their order. */
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

/* A call that asks for its selection, with the options of `args`. */
static void make_whole(call *whole, const fdma_attention_args *args, fdma_dtype dtype,
                       uint64_t *state) {
    const int64_t q_len = 1 + random_below(state, most_positions);
    const call_sizes n = {.batch = 1 + random_below(state, 2),
                          .q_len = q_len,
                          .kv_len = q_len + random_below(state, random_below(state, 3) ? 700 : 20),
                          .q_heads = 4,
                          .kv_heads = 2,
                          .head_dim = 64};
    *whole = (call){.operation = operation_attention, .args.attention = *args};
    fdma_attention_args *const own = &whole->args.attention;
    own->causal = 1;
    own->window = 1 + random_below(state, n.kv_len);
    own->recent = random_below(state, 2) * 3;
    own->sinks = random_below(state, 3) ? 0 : own->window / 2;
    call_make(whole, &n, dtype, true);
    own->key_valid = own->sink_logit = (fdma_tensor){0};
    if (args->bias_form == FDMA_BIAS_NONE)
        own->bias = (fdma_tensor){0};
    call_alloc(whole, state);
    if (own->recent == 0 && random_below(state, 2))
        own->key_valid = new_padding(n.batch, n.kv_len, state);
    if (random_below(state, 2))
        own->kv_used = new_used(n.batch, n.kv_len, state);
    test_context("batch %d, q_len %d, kv_len %d, window %d, recent %d%s%s, bias %d", (int)n.batch,
                 (int)n.q_len, (int)n.kv_len, (int)own->window, (int)own->recent,
                 own->key_valid.rank > 0 ? ", padding" : "",
                 own->kv_used.rank > 0 ? ", kv_used" : "", (int)own->bias_form);
}

/* Runs a call that asks for its selection and, in `bare`, one that does not. */
static void run_both(call *whole, call *bare) {
    call_copy(bare, whole);
    call_drop_selection(bare);
    call_own_outputs(bare);
    CHECK(strcmp(name_of_select(bare), kernel_name) == 0);
    CHECK(strcmp(name_of_select(whole), kernel_name) != 0);
    CHECK_OK(device_run(operation_attention, &whole->args));
    CHECK_OK(device_run(operation_attention, &bare->args));
    CHECK(same_tensor(bare->args.attention.score, whole->args.attention.score));
    CHECK(same_tensor(bare->args.attention.bias, whole->args.attention.bias));
}

static void fused_calls(void) {
    uint64_t state = 77;
    for (int i = 0; i < test_repeats(300) && test_state.failures < test_reports; i++) {
        const fdma_attention_args args = {.bias_form = FDMA_BIAS_NONE};
        call whole, bare;
        make_whole(&whole, &args, FDMA_BFLOAT16, &state);
        fill_exact(&whole, &state);
        run_both(&whole, &bare);
        CHECK(same_tensor(bare.args.attention.out, whole.args.attention.out));
        CHECK(same_tensor(bare.args.attention.lse, whole.args.attention.lse));
        device_free_both();
    }
}

static void check_near(fdma_tensor actual, fdma_tensor want, double tolerance) {
    for (int64_t n = 0; n < count_of(want); n++)
        if (!CHECK_NEAR(load_double(actual.data, actual.dtype, n),
                        load_double(want.data, want.dtype, n), tolerance))
            return;
}

/* The two calls list their keys in different orders, so sums differ by rounding. Dropout is left to
 * kernels that do not split the keys. */
static void fused_calls_with_other_options(void) {
    static const fdma_bias_form forms[] = {FDMA_BIAS_EXP, FDMA_BIAS_LINEAR, FDMA_BIAS_NONE};
    uint64_t state = 78;
    for (int i = 0; i < test_repeats(300) && test_state.failures < test_reports; i++) {
        const fdma_attention_args args = {.bias_form = forms[i % TEST_COUNT(forms)],
                                          .softcap = i % 2 * 3,
                                          .dropout = i / 2 % 2 * 0.25,
                                          .seed = 5};
        call whole, bare;
        make_whole(&whole, &args, i % 5 == 0 ? FDMA_FLOAT16 : FDMA_BFLOAT16, &state);
        run_both(&whole, &bare);
        check_near(bare.args.attention.out, whole.args.attention.out, 0.02);
        check_near(bare.args.attention.lse, whole.args.attention.lse, 1e-3);
        device_free_both();
    }
}

static const test_entry tests[] = {
    TEST(random_selections),
    TEST(kinds_in_clusters_of_every_size),
    TEST(refuses_what_it_does_not_know),
    TEST(fused_calls),
    TEST(fused_calls_with_other_options),
};

int main(void) {
    const char *const missing = find_kernel()->missing();
    if (missing != NULL)
        printf("skipped %s: this machine lacks %s\n", kernel_name, missing);
    return missing != NULL ? 0 : device_test_run(tests, TEST_COUNT(tests));
}
