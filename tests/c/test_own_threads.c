/* test_own_threads.c - exec.parallel: calls run on the caller's threads have the bits that they
 * have in the library's pool, however the caller runs the tasks. */
#include "calls.h"

#include <pthread.h>
#include <stdatomic.h>

enum { threads_asked = 5 };

static _Atomic int failures; /* on threads of the tests' own, where there is no CHECK() */

/* A pool of the caller, and what the library has asked it for. */
typedef struct own_pool {
    int calls;     /* of `run` */
    int64_t count; /* the most tasks of a call */
} own_pool;

static void note_call(void *context, int64_t count) {
    own_pool *const pool = context;
    if (pool == NULL)
        return;
    pool->calls++;
    pool->count = count > pool->count ? count : pool->count;
}

static void run_in_turn(void *context, int64_t count, fdma_task task, void *task_context) {
    note_call(context, count);
    for (int64_t index = 0; index < count; index++)
        task(task_context, index);
}

static void run_the_last(void *context, int64_t count, fdma_task task, void *task_context) {
    note_call(context, count);
    task(task_context, count - 1);
}

static void run_none(void *context, int64_t count, fdma_task task, void *task_context) {
    (void)task, (void)task_context;
    note_call(context, count);
}

/* A mistake of the caller, which must not let two tasks share scratch memory. */
static void run_again_and_again(void *context, int64_t count, fdma_task task, void *task_context) {
    for (int round = 0; round < 3; round++)
        run_in_turn(context, count, task, task_context);
}

typedef struct thread_work {
    fdma_task task;
    void *context;
    int64_t index;
} thread_work;

static void *run_one(void *given) {
    const thread_work *const work = given;
    work->task(work->context, work->index);
    return NULL;
}

/* Each task on a thread of its own, the last one first. */
static void run_on_new_threads(void *context, int64_t count, fdma_task task, void *task_context) {
    pthread_t threads[threads_asked];
    thread_work work[threads_asked];
    note_call(context, count);
    failures += count > threads_asked;
    count = count < threads_asked ? count : threads_asked;
    for (int64_t n = count - 1; n >= 0; n--) {
        work[n] = (thread_work){task, task_context, n};
        failures += pthread_create(&threads[n], NULL, run_one, &work[n]) != 0;
    }
    for (int64_t n = 0; n < count; n++)
        failures += pthread_join(threads[n], NULL) != 0;
}

static const fdma_run_tasks ways[] = {run_in_turn, run_the_last, run_none, run_again_and_again,
                                      run_on_new_threads};

/* ---- single calls ---- */

static const fdma_operation tested[] = {
    operation_score,          operation_select,    operation_forward,        operation_backward,
    operation_score_backward, operation_merge,     operation_probabilities,  operation_rotary_table,
    operation_rotate,         operation_attention, operation_rotate_backward};

/* A call that is work for several threads with every kernel of the CPU. */
static void make_call(call *x, fdma_operation operation) {
    const int64_t kv_len = operation == operation_select ? 30000 : 1200;
    const call_sizes n = {
        .batch = 2, .q_len = 600, .kv_len = kv_len, .q_heads = 4, .kv_heads = 2, .head_dim = 64};
    uint64_t state = 31;
    *x = (call){.operation = operation};
    if (operation == operation_select)
        x->args.select = (fdma_select_args){.window = 100, .recent = 30};
    if (operation == operation_forward)
        x->args.forward = (fdma_forward_args){.causal = 1};
    if (operation == operation_backward)
        x->args.backward = (fdma_backward_args){.causal = 1};
    if (operation == operation_probabilities)
        x->args.probabilities = (fdma_probabilities_args){.causal = 1};
    if (operation == operation_rotary_table)
        x->args.rotary_table = (fdma_rotary_table_args){.base = 10000};
    if (operation == operation_attention)
        x->args.attention = (fdma_attention_args){.window = 100, .causal = 1};
    call_make(x, &n, FDMA_FLOAT32, true);
    call_alloc(x, &state);
    if (is_attending(operation) && operation != operation_attention)
        call_select(x, 100, FDMA_SCOPE_CAUSAL, &state);
    call_exec(x)->threads = threads_asked;
}

static void run_copy(call *to, const call *from, const fdma_parallel *parallel) {
    call_copy(to, from);
    call_own_outputs(to);
    call_exec(to)->parallel = parallel;
    CHECK_OK(call_run(to));
}

static void results_do_not_depend_on_whose_threads(void) {
    for (int i = 0; i < TEST_COUNT(tested); i++) {
        call original, want, actual;
        make_call(&original, tested[i]);
        run_copy(&want, &original, NULL);
        for (int way = 0; way < TEST_COUNT(ways); way++) {
            own_pool pool = {0};
            const fdma_parallel parallel = {sizeof parallel, ways[way], &pool};
            test_context("%s, way %d", operations[tested[i]].name, way);
            run_copy(&actual, &original, &parallel);
            check_same_outputs(&actual, &want);
            CHECK_INT(failures, 0);
            CHECK(pool.calls > 0 && pool.count > 1 && pool.count <= threads_asked);
        }
        test_free_all();
    }
}

/* One thread is the caller's: there is nothing to share. */
static void one_thread_needs_no_pool(void) {
    own_pool pool = {0};
    const fdma_parallel parallel = {sizeof parallel, run_in_turn, &pool};
    call original, actual;
    make_call(&original, operation_forward);
    call_exec(&original)->threads = 1;
    run_copy(&actual, &original, &parallel);
    CHECK_INT(pool.calls, 0);
}

/* ---- a cache ---- */

enum { prompt_len = 1500, cache_rows = 1200, steps = 3 };

static void run_with(fdma_operation operation, void *args, const fdma_parallel *parallel) {
    exec_of(operation, args)->threads = threads_asked;
    exec_of(operation, args)->parallel = parallel;
    CHECK_OK(run_operation(operation, args));
}

static fdma_tensor random_rows(int64_t len, int64_t heads, uint64_t *state) {
    const fdma_tensor rows = new_tensor(FDMA_FLOAT32, 1, len, heads, 128);
    fill_random(rows, state, 1);
    return rows;
}

static fdma_tensor random_score(int64_t heads, int64_t len, uint64_t *state) {
    const fdma_tensor score = new_tensor(FDMA_FLOAT32, 1, heads, len, -1);
    fill_random(score, state, 1);
    return score;
}

static fdma_cache served_cache(int64_t kv_heads) {
    fdma_cache cache = {.sequences = 2,
                        .kv_heads = kv_heads,
                        .head_dim = 128,
                        .window = cache_rows,
                        .dtype = FDMA_FLOAT32};
    size_t bytes = 0;
    CHECK_OK(fdma_cache_bytes(&cache, &bytes));
    CHECK_OK(fdma_cache_init(&cache, memset(test_alloc(bytes), 0, bytes)));
    return cache;
}

static fdma_tensor without_batch(fdma_tensor tensor) {
    return fdma_dense_tensor(tensor.data, tensor.dtype, tensor.rank - 1, tensor.shape + 1);
}

/* The next tokens of the second sequence: the cache shows what they did. */
static void prefill_second(const fdma_cache *cache, const fdma_parallel *parallel,
                           uint64_t *state) {
    const int64_t heads = cache->kv_heads;
    static const int32_t starts[] = {0, 150}, index[] = {1};
    fdma_prefill_args args = {.size = sizeof args,
                              .cache = *cache,
                              .q = without_batch(random_rows(150, 2 * heads, state)),
                              .k = without_batch(random_rows(150, heads, state)),
                              .v = without_batch(random_rows(150, heads, state)),
                              .score = without_batch(random_score(heads, 150, state)),
                              .out =
                                  without_batch(new_tensor(FDMA_FLOAT32, 1, 150, 2 * heads, 128)),
                              .starts = starts,
                              .index = index,
                              .requests = 1};
    run_with(operation_prefill, &args, parallel);
}

/* Stores a prompt, copies it, goes on with the copy, and decodes some tokens of the first sequence.
 * Returns the results of these, and the cache. */
static fdma_tensor serve(fdma_cache *cache, const fdma_parallel *parallel) {
    const int64_t heads = cache->kv_heads;
    uint64_t state = 8;
    const fdma_tensor out = new_tensor(FDMA_FLOAT32, steps, 1, 2 * heads, 128);
    const own_pool *const pool = parallel != NULL ? parallel->context : NULL;
    const fdma_tensor score = random_score(heads, prompt_len, &state);
    fdma_selection selection = selection_for(score);
    fdma_select_args select = {
        .size = sizeof select, .score = score, .selection = &selection, .window = cache_rows};
    run_with(operation_select, &select, parallel);
    int32_t first[] = {0}, second[] = {1};
    const fdma_tensor index = fdma_tensor_1d(first, FDMA_INT32, 1);
    fdma_cache_store_args store = {.size = sizeof store,
                                   .cache = *cache,
                                   .index = index,
                                   .k = random_rows(prompt_len, heads, &state),
                                   .v = random_rows(prompt_len, heads, &state),
                                   .score = score,
                                   .selection = &selection};
    run_with(operation_cache_store, &store, parallel);
    fdma_cache_copy_args copy = {.size = sizeof copy,
                                 .cache = *cache,
                                 .from = index,
                                 .to = fdma_tensor_1d(second, FDMA_INT32, 1)};
    run_with(operation_cache_copy, &copy, parallel);
    prefill_second(cache, parallel, &state);
    for (int64_t n = 0; n < steps; n++) {
        fdma_decode_args decode = {.size = sizeof decode,
                                   .cache = *cache,
                                   .index = index,
                                   .q = random_rows(1, 2 * heads, &state),
                                   .k = random_rows(1, heads, &state),
                                   .v = random_rows(1, heads, &state),
                                   .score = random_score(heads, 1, &state)};
        decode.out = fdma_tensor_4d((float *)out.data + n * out.stride[0], FDMA_FLOAT32, 1, 1,
                                    2 * heads, 128);
        const int calls = pool != NULL ? pool->calls : 0;
        run_with(operation_decode, &decode, parallel);
        CHECK(pool == NULL || pool->calls > calls);
    }
    return out;
}

/* Heads share threads, or there is one head, whose keys do. */
static void a_cache_is_the_same(void) {
    for (int64_t heads = 1; heads <= 6; heads += 5) {
        fdma_cache want_cache = served_cache(heads);
        const fdma_tensor want = serve(&want_cache, NULL);
        for (int way = 0; way < TEST_COUNT(ways); way++) {
            own_pool pool = {0};
            const fdma_parallel parallel = {sizeof parallel, ways[way], &pool};
            fdma_cache cache = served_cache(heads);
            size_t bytes = 0;
            test_context("%lld heads, way %d", (long long)heads, way);
            const fdma_tensor out = serve(&cache, &parallel);
            CHECK(same_tensor(out, want) && pool.calls > 0);
            CHECK_OK(fdma_cache_bytes(&cache, &bytes));
            CHECK(same_tensor(cache.k, want_cache.k) && same_tensor(cache.v, want_cache.v));
            CHECK(same_tensor(cache.table.position, want_cache.table.position));
            CHECK(same_tensor(cache.table.seen, want_cache.table.seen));
        }
        test_free_all();
    }
}

/* ---- calls within calls ---- */

/* The caller's pool runs two requests at once, and each of them uses the pool. */
typedef struct requests {
    call calls[2];
} requests;

static void run_request(void *context, int64_t index) {
    call *const x = &((requests *)context)->calls[index];
    failures += operations[x->operation].call(&x->args) != FDMA_OK;
}

static void requests_share_a_pool(void) {
    const fdma_parallel parallel = {sizeof parallel, run_on_new_threads, NULL};
    requests both;
    call original, want;
    make_call(&original, operation_attention);
    run_copy(&want, &original, NULL);
    for (int n = 0; n < 2; n++) {
        size_t bytes = 0;
        call *const x = &both.calls[n];
        call_copy(x, &original);
        call_own_outputs(x);
        call_exec(x)->parallel = &parallel;
        CHECK_OK(fdma_attention_workspace(&x->args.attention, &bytes));
        exec_alloc(call_exec(x), bytes);
    }
    run_on_new_threads(NULL, 2, run_request, &both);
    CHECK_INT(failures, 0);
    for (int n = 0; n < 2; n++)
        check_same_outputs(&both.calls[n], &want);
    test_free_all();
}

/* A pool that makes a call of its own before it runs the tasks. */
static void call_and_run(void *context, int64_t count, fdma_task task, void *task_context) {
    call *const x = context;
    CHECK_OK(operations[x->operation].call(&x->args));
    run_in_turn(NULL, count, task, task_context);
}

static void a_pool_may_make_calls(void) {
    call original, want, inner, actual;
    make_call(&original, operation_forward);
    run_copy(&want, &original, NULL);
    run_copy(&inner, &original, NULL);
    const fdma_parallel parallel = {sizeof parallel, call_and_run, &inner};
    run_copy(&actual, &original, &parallel);
    check_same_outputs(&actual, &want);
    check_same_outputs(&inner, &want);
    test_free_all();
}

static const test_entry tests[] = {
    TEST(results_do_not_depend_on_whose_threads),
    TEST(one_thread_needs_no_pool),
    TEST(a_cache_is_the_same),
    TEST(requests_share_a_pool),
    TEST(a_pool_may_make_calls),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
