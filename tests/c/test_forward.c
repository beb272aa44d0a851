/* test_forward.c - properties of attention that hold for all numbers, by every kernel: the keys
 * that a query depends on; that threads, batch, time, addresses and keys that no query keeps do not
 * change a bit; and that few rows over many keys lose no small terms and no large logits. */
#if defined(__linux__)
#define _GNU_SOURCE /* MAP_NORESERVE */
#include <sys/mman.h>
#endif

#include "backend.h"
#include "cases.h"

/* Large enough for several tiles of queries and blocks of keys; some heads share keys. */
static const problem window_20 = SIZES(2, 190, 230, 4, 2, 40, 20, 1);
static const problem window_50 = SIZES(2, 190, 230, 4, 2, 40, 50, 1);
static const problem window_230 = SIZES(2, 190, 230, 4, 2, 40, 230, 1); // all keys
static const problem dense = SIZES(2, 190, 230, 4, 2, 40, -1, 1);

/* Few rows over so many keys that several threads are worth waking, and work on one row. */
static const problem few_rows[] = {
    SIZES(2, 1, 3001, 3, 3, 64, -1, 1), SIZES(2, 1, 3001, 3, 3, 64, 1600, 1),
    SIZES(2, 4, 3001, 3, 3, 64, -1, 1), SIZES(2, 4, 3001, 3, 3, 64, 1600, 1)};

/* ---- independence of threads, batch and time ---- */

static void threads_do_not_show(problem *x, const char *kernel) {
    static const int32_t threads[] = {2, 1, 3, 7, 0};
    const int count = is_reference(kernel) ? 1 : TEST_COUNT(threads); // it has one path
    const attended one = problem_attend(x, kernel, 1);
    for (int t = 0; t < count; t++)
        check_same_results(problem_attend(x, kernel, threads[t]), one);
}

/* 0 * inf spoils the same rows for every number of threads and every batch size. */
static void infinite_values_do_not_tell_threads(const char *kernel) {
    if (is_reference(kernel))
        return; /* it is slow and has one path */
    problem x = SIZES(2, 1100, 1100, 1, 1, 8, -1, 1);
    x.dtype = FDMA_FLOAT32;
    problem_fill(&x, 12);
    ((float *)x.v.data)[128 * 8] = INFINITY;
    const attended one = problem_attend(&x, kernel, 1);
    check_same_results(problem_attend(&x, kernel, 2), one);
    check_same_results(problem_attend(&x, kernel, 16), one);
    const problem alone = problem_sequence(&x, 0);
    const attended first = problem_attend(&alone, kernel, 1);
    CHECK_BYTES(first.out.data, one.out.data, bytes_of(first.out));
}

static void batch_does_not_show(problem *x, const char *kernel) {
    const attended all = problem_attend(x, kernel, 2);
    for (int64_t b = 0; b < x->batch; b++) {
        const problem alone = problem_sequence(x, b);
        const attended got = problem_attend(&alone, kernel, 1);
        const attended want = {sequence_of(all.out, b), sequence_of(all.lse, b)};
        check_same_results(got, want);
    }
}

static void slots_are_optional(problem *x, const char *kernel) {
    const attended with = problem_attend(x, kernel, 1);
    x->selection.slot = (fdma_tensor){0};
    check_same_results(problem_attend(x, kernel, 1), with);
}

static void lse_is_optional(problem *x, const char *kernel) {
    const attended with = problem_attend(x, kernel, 1);
    fdma_forward_args args = problem_args(x, kernel);
    args.lse = (fdma_tensor){0};
    CHECK_OK(run_forward(&args));
    CHECK_BYTES(args.out.data, with.out.data, bytes_of(with.out));
}

/* ---- a query depends on the keys that it keeps, and on no other ---- */

static void a_wide_window_is_dense(problem *x, const char *kernel) {
    problem all = *x;
    all.window = -1;
    check_close_results(x, problem_attend(x, kernel, 1), problem_attend(&all, kernel, 1));
}

static void evicted_keys_do_not_matter(problem *x, const char *kernel) {
    const attended before = problem_attend(x, kernel, 1);
    CHECK(poison_unread(x, NAN) > 0 || x->window < 0);
    check_same_results(problem_attend(x, kernel, 1), before);
}

/* Each key contributes to exactly the queries that keep it: with v = 1 for one key and 0 for the
 * others, out is that key's probability. */
static void each_query_sees_its_keys(problem *x, const char *kernel) {
    const int64_t group = x->q_heads / x->kv_heads;
    static const int64_t watched[] = {0, 64, 100, 128, 229};
    for (int w = 0; w < TEST_COUNT(watched); w++) {
        const int64_t j = watched[w];
        memset(x->v.data, 0, bytes_of(x->v));
        for (int64_t b = 0; b < x->batch; b++) {
            spoil_key(x->v, b, j, 0, 1);
            spoil_key(x->v, b, j, 1, 1);
        }
        const attended got = problem_attend(x, kernel, 1);
        for (int64_t row = 0; row < x->batch * x->q_len * x->q_heads; row++) {
            const int64_t h = row % x->q_heads, i = row / x->q_heads % x->q_len;
            const int64_t b = row / x->q_heads / x->q_len;
            const double weight = load_double(got.out.data, x->dtype, row * x->head_dim);
            CHECK_INT(weight > 0, problem_keeps(x, b, h / group, i, j));
        }
    }
}

static void few_rows_are_the_references(void) {
    for (int n = 0; n < TEST_COUNT(few_rows) * test_dtype_count; n++) {
        const int size = n / test_dtype_count, type = n % test_dtype_count;
        if (is_left_out(size, type))
            continue;
        const problem x = new_problem(&few_rows[size], test_dtypes[type], 1);
        const attended want = problem_attend(&x, "reference", 1);
        const kernel_list kernels = kernels_for("forward", x.dtype);
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            test_context("%s %s, few rows %d", kernels.name[kernel], dtype_name(x.dtype), size);
            check_close_results(&x, problem_attend(&x, kernels.name[kernel], 1), want);
        }
        test_free_all();
    }
}

/* ---- options ---- */

static void scale_multiplies_logits(problem *x, const char *kernel) {
    const attended by_default = problem_attend(x, kernel, 1);
    x->scale = 1 / sqrt((double)x->head_dim);
    check_same_results(problem_attend(x, kernel, 1), by_default);

    x->scale = 1;
    const attended plain = problem_attend(x, kernel, 1);
    for (int64_t i = 0; i < count_of(x->q); i++) {
        const double value = load_double(x->q.data, x->dtype, i);
        store_float(x->q.data, x->dtype, i, (float)(4 * value));
    }
    x->scale = 0.25;
    check_same_results(problem_attend(x, kernel, 1), plain);
}

/* Logits are at most c, so two weights of one row differ at most by a factor of exp(2 c). */
static void softcap_bounds_logits(problem *x, const char *kernel) {
    x->bias = (fdma_tensor){0};
    x->scale = 100;
    static const double caps[] = {0x1p-20, 1e-39, 1e-320}; /* the last are subnormal numbers */
    for (int c = 0; c < TEST_COUNT(caps); c++) {
        x->softcap = caps[c];
        const attended flat = problem_attend(x, kernel, 1);
        for (int64_t i = 0; i < count_of(flat.lse); i++) {
            const int64_t p = i % x->q_len + x->kv_len - x->q_len;
            const double kept = (double)(p + 1 < x->window ? p + 1 : x->window);
            CHECK_NEAR((double)((const float *)flat.lse.data)[i], log(kept), 0x1p-19);
        }
    }
}

/* A damaged selection gives wrong numbers. The guards and the sanitizers check the rest. */
static void check_damaged(problem *x, const char *kernel) {
    const int step = is_reference(kernel) ? corruption_count + 1 /* it is slow */
                     : test_divisor() > 1
                         ? corruption_count - 1 /* every kind of both, not every pair */
                         : 1;
    uint64_t state = 11;
    for (int how = 0; how < corruption_count * corruption_count; how += step) {
        corrupt(x->selection.expiry, (corruption)(how / corruption_count), &state);
        corrupt(x->selection.slot, (corruption)(how % corruption_count), &state);
        problem_attend(x, kernel, 2);
    }
}

/* Runs in every dtype even if other tests leave some out: the sanitizers find most here. */
static void damaged_selections_do_no_harm(void) {
    for (int type = first_dtype(); type < test_dtype_count; type++)
        for_each_problem_of_type("forward", &window_50, 7, type, check_damaged);
}

/* ---- addresses ---- */

static const problem views = SIZES(2, 70, 90, 4, 2, 40, 25, 1);

/* A view of [batch, heads, len, head_dim]. */
static void heads_before_length(problem *x, const char *kernel) {
    const attended plain = problem_attend(x, kernel, 1);
    fdma_forward_args args = problem_args(x, kernel);
    args.q = heads_first(x->q);
    args.k = heads_first(x->k);
    args.v = heads_first(x->v);
    args.out = heads_first(args.out);
    CHECK_OK(run_forward(&args));
    check_same_results((attended){gathered(args.out), args.lse}, plain);
}

static fdma_tensor off_by_one(fdma_tensor like) {
    const int64_t row = like.shape[3] + 3, heads = like.shape[2] * row + 1;
    const int64_t stride[4] = {like.shape[1] * heads + 5, heads, row, 1};
    const size_t size = dtype_size(like.dtype);
    char *base = test_alloc_guarded((size_t)(like.shape[0] * stride[0] + 1) * size);
    return placed(like, base + size, stride);
}

static fdma_tensor off_by_one_word(fdma_tensor like) {
    const size_t size = dtype_size(like.dtype);
    char *base = test_alloc_guarded(bytes_of(like) + size);
    return placed(like, base + size, like.stride);
}

static void aligned_to_one_element(problem *x, const char *kernel) {
    const attended plain = problem_attend(x, kernel, 1);
    problem odd = *x;
    odd.selection.expiry = off_by_one_word(x->selection.expiry);
    odd.selection.slot = off_by_one_word(x->selection.slot);
    fdma_forward_args args = problem_args(&odd, kernel);
    args.q = off_by_one(x->q);
    args.k = off_by_one(x->k);
    args.v = off_by_one(x->v);
    args.bias = off_by_one_word(x->bias);
    args.out = off_by_one(args.out);
    args.lse = off_by_one_word(args.lse);
    size_t bytes = 0;
    CHECK_OK(fdma_forward_workspace(&args, &bytes));
    for (size_t shift = 0; shift < 4; shift++) {
        args.exec.workspace = (char *)test_alloc_guarded(bytes + shift) + shift;
        args.exec.workspace_size = bytes;
        CHECK_OK(fdma_forward(&args));
        check_same_results((attended){gathered(args.out), args.lse}, plain);
    }
}

static void out_within_a_packed_buffer(problem *x, const char *kernel) {
    // out is a slice of a packed buffer, and the other slices do not change
    const attended plain = problem_attend(x, kernel, 1);
    const fdma_tensor packed = new_output(x->dtype, x->batch, x->q_len, x->q_heads + 3, 40);
    fdma_forward_args args = problem_args(x, kernel);
    const size_t size = dtype_size(x->dtype);
    args.out = packed;
    args.out.shape[2] = x->q_heads;
    args.out.data = (char *)packed.data + 40 * size; /* one head before, two after */
    CHECK_OK(run_forward(&args));
    check_same_results((attended){gathered(args.out), args.lse}, plain);

    uint8_t untouched[8];
    memset(untouched, test_guard_byte, sizeof untouched);
    for (int64_t i = 0; i < count_of(packed); i++) {
        const int64_t head = i / 40 % (x->q_heads + 3);
        if (head < 1 || head > x->q_heads)
            CHECK_BYTES((char *)packed.data + (size_t)i * size, untouched, size);
    }
}

static void repeated_axes(problem *x, const char *kernel) {
    problem repeated = *x;
    repeated.k.stride[0] = repeated.v.stride[0] = 0; /* the batch shares its keys */
    repeated.q.stride[2] = 0;                        /* all heads have the same query */
    repeated.bias.stride[0] = repeated.bias.stride[1] = 0;
    problem copied = repeated;
    copied.q = gathered(repeated.q);
    copied.k = gathered(repeated.k);
    copied.v = gathered(repeated.v);
    copied.bias = gathered(repeated.bias);
    check_same_results(problem_attend(&repeated, kernel, 1), problem_attend(&copied, kernel, 1));
}

static void axes_of_length_one(problem *x, const char *kernel) {
    problem single = problem_sequence(x, 0);
    const attended plain = problem_attend(&single, kernel, 1);
    single.q.stride[0] = -7;
    single.k.stride[0] = INT64_MAX;
    single.v.stride[0] = 0;
    single.bias.stride[0] = INT64_MIN;
    single.selection.expiry.stride[0] = -1;
    fdma_forward_args args = problem_args(&single, kernel);
    args.out.stride[0] = 0;
    args.lse.stride[0] = INT64_MAX;
    CHECK_OK(run_forward(&args));
    check_same_results((attended){args.out, args.lse}, plain);
}

/* ---- offsets beyond 32 bits ---- */

#if defined(__linux__)
/* Two sequences, more than 2^31 elements apart. Only pages that are touched exist. */
static void offsets_beyond_32_bits(problem *x, const char *kernel) {
    const int64_t apart = (INT64_C(1) << 32) + 64;
    const size_t size = dtype_size(x->dtype), bytes = (size_t)(apart + (1 << 20)) * size;
    const attended plain = problem_attend(x, kernel, 1);
    fdma_forward_args args = problem_args(x, kernel);
    fdma_tensor *const far[] = {&args.q, &args.k, &args.v, &args.out};
    void *pages[4];
    int mapped = 0;
    for (; mapped < TEST_COUNT(far); mapped++) {
        pages[mapped] = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (pages[mapped] == MAP_FAILED) {
            printf("skipped: %zu bytes of address space are not to be had\n", bytes);
            break;
        }
        const int64_t *near = far[mapped]->stride;
        const int64_t stride[4] = {apart, near[1], near[2], near[3]};
        *far[mapped] = placed(*far[mapped], pages[mapped], stride);
    }
    if (mapped == TEST_COUNT(far)) {
        CHECK_OK(run_forward(&args));
        check_same_results((attended){gathered(args.out), args.lse}, plain);
    }
    while (mapped-- > 0)
        munmap(pages[mapped], bytes);
}

#endif

static void rows_of_dt_proj_apart(const char *kernel, fdma_dtype dtype) {
    static const call_sizes n = {.batch = 1, .kv_len = 40, .kv_heads = 2, .head_dim = 24};
    static const int64_t stride[4] = {2 * 24 + 5, 1};
    call plain = {.operation = operation_score, .args.score = {.exec = {.kernel = kernel}}}, apart;
    uint64_t state = 9;
    call_make(&plain, &n, dtype, true);
    call_alloc(&plain, &state);
    call_copy(&apart, &plain);
    call_own_outputs(&apart);
    apart.args.score.dt_proj =
        placed(plain.args.score.dt_proj,
               test_alloc_guarded((size_t)(2 * stride[0]) * dtype_size(dtype)), stride);
    CHECK_OK(call_run(&plain));
    CHECK_OK(call_run(&apart));
    check_same_outputs(&apart, &plain);
}

/* ---- few rows ---- */

/* Only without a selection does one row read keys in the order of memory; the bits are the same. */
static void a_selection_of_all_keys_is_dense(void) {
    static const problem whole_window = SIZES(2, 1, 3001, 3, 3, 64, 3001, 1);
    const kernel_list kernels = kernels_of("forward");
    for (int dtype = 0; dtype < test_dtype_count; dtype++) {
        const problem all = new_problem(&whole_window, test_dtypes[dtype], 3);
        problem without = all;
        without.window = -1;
        for (int kernel = 0; kernel < kernels.count; kernel++) {
            const char *const name = kernels.name[kernel];
            test_context("%s %s", name, dtype_name(all.dtype));
            if (strstr(name, "/decode") != NULL)
                check_same_results(problem_attend(&without, name, 2),
                                   problem_attend(&all, name, 2));
        }
        test_free_all();
    }
}

/* One query and `kv_len` keys of 8 channels. The logits are the biases. */
static problem long_problem(int64_t kv_len) {
    const problem sizes = SIZES(1, 1, kv_len, 1, 1, 8, -1, 1);
    const problem x = new_problem(&sizes, FDMA_FLOAT32, 0);
    memset(x.q.data, 0, bytes_of(x.q));
    return x;
}

/* v is 2^24 for the first key and 1 for the others, with equal weights. Ones added one by one to
 * 2^24 would be lost, like the keys of a long split in a single running sum. */
static void small_values_count(const char *kernel) {
    enum { keys = 481 };
    const problem x = long_problem(keys);
    memset(x.bias.data, 0, bytes_of(x.bias));
    for (int64_t n = 0; n < 8 * keys; n++)
        ((float *)x.v.data)[n] = n < 8 ? 0x1p24F : 1;
    const attended got = problem_attend(&x, kernel, 1);
    const double want = (0x1p24 + keys - 1) / keys;
    CHECK_NEAR((double)*(float *)got.out.data, want, 120.0 / keys); /* for tiles: a key block */
}

/* The first key has weight 1, the others 2^-24 each. */
static void small_weights_count(const char *kernel) {
    enum { keys = 481 };
    const problem x = long_problem(keys);
    for (int64_t n = 0; n < keys; n++)
        ((float *)x.bias.data)[n] = n == 0 ? 0 : -24 * 0.693147181F;
    const attended got = problem_attend(&x, kernel, 1);
    CHECK_NEAR((double)*(float *)got.lse.data, log1p((keys - 1) * 0x1p-24), 2.5e-6);
}

/* Keys of even numbers have v = 1 and one logit, the others v = 2 and the same or the opposite. */
static void check_large_logits(const problem *x, const char *kernel, double logit, bool equal) {
    const attended got = problem_attend(x, kernel, 1);
    for (int64_t i = 0; i < x->q_len; i++) {
        const double twos = equal || logit < 0 ? (double)((i + 1) / 2) : 0;
        const double ones = equal || logit > 0 || i == 0 ? (double)(i / 2 + 1) : 0;
        const double lse = equal || logit > 0 || i == 0 ? logit : -logit;
        for (int64_t c = 0; c < x->head_dim; c++)
            CHECK_NEAR(load_double(got.out.data, x->dtype, i * x->head_dim + c),
                       (ones + 2 * twos) / (ones + twos), problem_out_tolerance(x));
        CHECK_NEAR(load_double(got.lse.data, got.lse.dtype, i) / lse, 1, 4 * (double)FLT_EPSILON);
    }
}

/* The largest logits that fdma_forward() promises to take, from biases and from products. */
static void largest_logits_are_finite(const char *kernel, fdma_dtype dtype) {
    const problem sizes = SIZES(1, 40, 40, 1, 1, 64, -1, 1);
    const float largest = is_device_kernel(kernel) ? 3e38F / 8 : 2e38F;
    problem x = new_problem(&sizes, dtype, 0);
    if (!problem_is_taken(&x, kernel))
        return;
    for (int64_t n = 0; n < count_of(x.v); n++)
        store_float(x.v.data, dtype, n, n / x.head_dim % 2 == 0 ? 1 : 2);
    for (int kind = 0; kind < 4; kind++) {
        const float logit = kind % 2 == 0 ? largest : -largest;
        test_context("%s %s, kind %d", kernel, dtype_name(dtype), kind);
        memset(x.q.data, 0, bytes_of(x.q));
        for (int64_t n = 0; n < count_of(x.bias); n++)
            store_float(x.bias.data, x.bias.dtype, n, kind < 2 || n % 2 == 0 ? logit : -logit);
        check_large_logits(&x, kernel, (double)logit, kind < 2);
    }
    if (dtype == FDMA_FLOAT16)
        return; // its products are small
    memset(x.bias.data, 0, bytes_of(x.bias));
    for (int64_t n = 0; n < count_of(x.q); n++)
        store_float(x.q.data, dtype, n, 0x1.8p60F);
    for (int64_t n = 0; n < count_of(x.k); n++)
        store_float(x.k.data, dtype, n, 0x1.8p60F);
    test_context("%s %s, products", kernel, dtype_name(dtype));
    check_large_logits(&x, kernel, 0x1.2p127 / 8, true); // 64 * 1.5^2 * 2^120, times the scale
}

/* The name of a point forces its decode kernel for few rows and its tile kernel for more. The name
 * of each of the two forces it, but decode for few rows only. */
static void each_kernel_can_be_forced(void) {
    static const problem more_rows = SIZES(2, 17, 3001, 3, 3, 64, -1, 1);
    const problem few = new_problem(&few_rows[0], FDMA_FLOAT32, 1);
    const problem many = new_problem(&more_rows, FDMA_FLOAT32, 1);
    static const struct {
        const char *forced, *few, *many;
    } names[] = {
        {"cpu/scalar", "cpu/scalar/decode", "cpu/scalar/tile"},
        {"cpu/scalar/tile", "cpu/scalar/tile", "cpu/scalar/tile"},
        {"cpu/scalar/decode", "cpu/scalar/decode", NULL},
    };
    for (int n = 0; n < TEST_COUNT(names); n++) {
        const fdma_forward_args args[] = {problem_args(&few, names[n].forced),
                                          problem_args(&many, names[n].forced)};
        const char *picked = NULL;
        test_context("%s", names[n].forced);
        CHECK_OK(fdma_forward_kernel(&args[0], &picked));
        CHECK(strcmp(picked, names[n].few) == 0);
        if (names[n].many != NULL) {
            CHECK_OK(fdma_forward_kernel(&args[1], &picked));
            CHECK(strcmp(picked, names[n].many) == 0);
        } else {
            CHECK_INT(fdma_forward_kernel(&args[1], &picked), FDMA_UNSUPPORTED);
            CHECK_WORD(fdma_last_error(), "16 rows");
        }
        check_close_results(&few, problem_attend(&few, names[n].forced, 2),
                            problem_attend(&few, "reference", 1));
    }
}

/* ---- keys that no query of a call keeps are not read ---- */

/* NaN and infinities in k, v and bias of every key that is never kept, has expired before the first
 * query, or is not valid. */
static void every_type_has_poison(void) {
    for (int type = 0; type < test_dtype_count; type++) {
        const fdma_dtype dtype = test_dtypes[type];
        void *const data = test_alloc(3 * dtype_size(dtype));
        test_context("%s", dtype_name(dtype));
        store_float(data, dtype, 0, NAN);
        store_float(data, dtype, 1, INFINITY);
        store_float(data, dtype, 2, -INFINITY);
        CHECK(isnan(load_double(data, dtype, 0)));
        CHECK(load_double(data, dtype, 1) == (double)INFINITY);
        CHECK(load_double(data, dtype, 2) == -(double)INFINITY);
    }
}

static void check_unread(problem *x, const char *kernel) {
    static const float poisons[] = {NAN, INFINITY, -INFINITY};
    const attended clean = problem_attend(x, kernel, 1);
    for (int64_t i = 0; i < count_of(clean.lse); i++)
        CHECK(!isnan(((const float *)clean.lse.data)[i]));
    for (int p = 0; p < TEST_COUNT(poisons); p++) {
        CHECK(poison_unread(x, poisons[p]) > 0); /* else the test shows nothing */
        check_same_results(problem_attend(x, kernel, 1), clean);
    }
}

static void unread_keys_do_not_show(const char *kernel, fdma_dtype dtype) {
    for (int s = 0; s < TEST_COUNT(unread_cases); s++) {
        problem x = unread_problem(unread_cases[s], dtype);
        test_context("%s %s, %s", kernel, dtype_name(dtype), unread_cases[s]);
        if (problem_is_taken(&x, kernel))
            check_unread(&x, kernel);
    }
}

/* The same poison in one key that is read changes the results. */
static void read_keys_show(const char *kernel, fdma_dtype dtype) {
    problem x = unread_problem(unread_cases[0], dtype);
    if (!problem_is_taken(&x, kernel))
        return;
    const attended clean = problem_attend(&x, kernel, 1);
    int64_t j = 0;
    while (j < x.kv_len && !is_read(&x, 0, 0, j))
        j++;
    if (CHECK(j < x.kv_len)) {
        spoil_key(x.v, 0, j, 0, NAN);
        CHECK(!same_tensor(problem_attend(&x, kernel, 1).out, clean.out));
    }
}

static const test_entry tests[] = {
    EACH_KERNEL_ONCE("forward", infinite_values_do_not_tell_threads),
    EACH_PROBLEM(threads_do_not_show, window_50, 7),
    EACH_PROBLEM(threads_do_not_show, dense, 7),
    EACH_SIZE(threads_do_not_show, few_rows),
    EACH_PROBLEM(batch_does_not_show, window_50, 7),
    EACH_SIZE(batch_does_not_show, few_rows),
    EACH_PROBLEM(slots_are_optional, window_50, 7),
    EACH_PROBLEM(lse_is_optional, window_50, 7),
    EACH_PROBLEM(a_wide_window_is_dense, window_230, 7),
    EACH_PROBLEM(evicted_keys_do_not_matter, window_20, 7),
    EACH_SIZE(evicted_keys_do_not_matter, few_rows),
    EACH_PROBLEM(each_query_sees_its_keys, window_20, 7),
    EACH_PROBLEM(each_query_sees_its_keys, dense, 7),
    TEST(few_rows_are_the_references),
    EACH_PROBLEM(scale_multiplies_logits, window_50, 7),
    EACH_PROBLEM(softcap_bounds_logits, window_50, 7),
    TEST(damaged_selections_do_no_harm),
    EACH_KERNEL("score", rows_of_dt_proj_apart),
    EACH_PROBLEM(heads_before_length, views, 31),
    EACH_SIZE(heads_before_length, few_rows),
    EACH_PROBLEM(aligned_to_one_element, views, 31),
    EACH_PROBLEM(out_within_a_packed_buffer, views, 31),
    EACH_PROBLEM(repeated_axes, views, 31),
    EACH_PROBLEM(axes_of_length_one, views, 31),
#if defined(__linux__)
    EACH_PROBLEM(offsets_beyond_32_bits, views, 31),
#endif
    EACH_KERNEL_ONCE("forward", small_values_count),
    EACH_KERNEL_ONCE("forward", small_weights_count),
    EACH_KERNEL("forward", largest_logits_are_finite),
    TEST(each_kernel_can_be_forced),
    TEST(a_selection_of_all_keys_is_dense),
    TEST(every_type_has_poison),
    EACH_KERNEL("forward", unread_keys_do_not_show),
    EACH_KERNEL("forward", read_keys_show),
};

static const test_entry device_tests[] = {
    EACH_KERNEL("forward", largest_logits_are_finite),
    TEST(every_type_has_poison),
    EACH_KERNEL("forward", unread_keys_do_not_show),
    EACH_KERNEL("forward", read_keys_show),
};

int main(int argc, char **argv) {
    return argc > 1 ? test_run_backend(argc, argv, device_tests, TEST_COUNT(device_tests))
                    : test_run(tests, TEST_COUNT(tests));
}
