/* test_kernels.c - the list of kernels, how a name forces one, and what the library reports about
 * itself and its devices. */
#define _POSIX_C_SOURCE 200112L /* unsetenv */

#include "right_call.h"

#include "core/kernel.h"
#include "cpu/cpu.h"
#include "cuda/cuda.h"
#include "reference/reference.h"

static int is_operation(const char *name) {
    for (int o = 0; o < operation_attention; o++)
        if (strcmp(name, operations[o].name) == 0)
            return 1;
    return 0;
}

static void every_kernel_is_described(void) {
    const int32_t count = fdma_kernel_count();
    CHECK(count > 0);
    for (int32_t i = 0; i < count; i++) {
        fdma_kernel_info info = {.size = sizeof info};
        CHECK_OK(fdma_describe_kernel(i, &info));
        CHECK(strcmp(info.name, fdma_kernel_name(i)) == 0);
        CHECK(is_operation(info.operation));
        CHECK(info.missing == NULL || strlen(info.missing) > 0);
        for (int32_t other = 0; other < i; other++) { /* no row twice */
            fdma_kernel_info earlier = {.size = sizeof earlier};
            CHECK_OK(fdma_describe_kernel(other, &earlier));
            CHECK(strcmp(earlier.name, info.name) != 0 ||
                  strcmp(earlier.operation, info.operation) != 0);
        }
    }
}

/* These two kernels run anywhere and take every call. */
static void plain_kernels_are_always_there(void) {
    static const char *const names[] = {"cpu/scalar", "reference"};
    for (int o = 0; o < operation_attention; o++) {
        const kernel_list kernels = kernels_of(operations[o].name);
        for (int n = 0; n < TEST_COUNT(names); n++) {
            int found = 0;
            for (int i = 0; i < kernels.count; i++)
                found += strcmp(kernels.name[i], names[n]) == 0;
            test_context("%s %s", names[n], operations[o].name);
            CHECK_INT(found, 1);
        }
    }
}

static void indices_out_of_range(void) {
    fdma_kernel_info info = {.size = sizeof info};
    CHECK(fdma_kernel_name(fdma_kernel_count()) == NULL);
    CHECK(fdma_kernel_name(-1) == NULL);
    CHECK_INT(fdma_describe_kernel(fdma_kernel_count(), &info), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "index");
    CHECK_INT(fdma_describe_kernel(-1, &info), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_describe_kernel(0, NULL), FDMA_INVALID_ARGUMENT);
    info.size = 0;
    CHECK_INT(fdma_describe_kernel(0, &info), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "size");
}

/* Checks the kernel that would run: `forward_want` for few queries, `want` for other operations. */
static void check_picked(const char *forced, const char *want, const char *forward_want) {
    static const fdma_operation asked[] = {operation_score, operation_select, operation_forward};
    for (int i = 0; i < TEST_COUNT(asked); i++) {
        call *const x = right_call(asked[i], true);
        const char *name = NULL;
        call_exec(x)->kernel = forced;
        if (asked[i] == operation_forward) // with a mask it would be a tile kernel: see below
            x->args.forward.attn_mask = x->args.forward.attn_bias = (fdma_tensor){0};
        CHECK_OK(operations[asked[i]].kernel(&x->args, &name));
        CHECK(name != NULL &&
              strcmp(name, asked[i] == operation_forward ? forward_want : want) == 0);
    }
}

/* The name of a point forces decode for few rows. Each name of a forward kernel forces that kernel,
 * and its point for the other operations. */
static void names_force_kernels(void) {
    const kernel_list kernels = kernels_of("score");
    for (int i = 0; i < kernels.count; i++) {
        const char *const point = kernels.name[i];
        test_context("%s", point);
        if (strcmp(point, "reference") == 0) {
            check_picked(point, point, point);
            continue;
        }
        char tile[64], decode[64];
        snprintf(tile, sizeof tile, "%s/tile", point);
        snprintf(decode, sizeof decode, "%s/decode", point);
        if (operation_takes("forward", tile, FDMA_FLOAT32)) {
            check_picked(point, point, decode);
            check_picked(decode, point, decode);
            check_picked(tile, point, tile);
        }
    }
}

/* A mask or a bias of pairs sends a call with few rows to the tile kernel. */
static void decode_leaves_masks_to_tiles(void) {
    static const expectation want = {FDMA_UNSUPPORTED, {"attn_mask and attn_bias"}, 0};
    const kernel_list kernels = kernels_of("score");
    for (int n = 0; n < 2 * kernels.count; n++) {
        const char *const point = kernels.name[n / 2], *name = NULL;
        call *const x = right_call(operation_forward, true);
        fdma_forward_args *const args = &x->args.forward;
        char tile[64], decode[64];
        test_context("%s", point);
        snprintf(tile, sizeof tile, "%s/tile", point);
        snprintf(decode, sizeof decode, "%s/decode", point);
        *(n % 2 == 0 ? &args->attn_mask : &args->attn_bias) = (fdma_tensor){0};
        if (strcmp(point, "reference") == 0 || !operation_takes("forward", tile, FDMA_FLOAT32))
            continue;
        args->exec.kernel = point;
        CHECK_OK(fdma_forward_kernel(args, &name));
        CHECK(name != NULL && strcmp(name, tile) == 0);
        args->exec.kernel = decode;
        check_rejected(x, &want);
    }
}

/* The beginning of a name picks the first kernel that applies, and so does no name at all. So only
 * its whole name picks the plain evaluation "reference/float32". */
static void prefixes_force_backends(void) {
    const kernel_list kernels = kernels_of("score");
    char decode[64];
    snprintf(decode, sizeof decode, "%s/decode", kernels.name[0]);
    CHECK(strncmp(kernels.name[0], "cpu/", 4) == 0);
    check_picked("cpu", kernels.name[0], decode);
    check_picked(NULL, kernels.name[0], decode);
}

static void check_refused(const char *kernel) {
    static const expectation want = {FDMA_UNSUPPORTED, {"kernel"}, 0};
    call *const x = right_call(operation_select, true);
    test_context("kernel \"%s\"", kernel);
    call_exec(x)->kernel = kernel;
    check_rejected(x, &want);
}

/* The beginning of a name counts only up to a '/'. The message lists the names that exist. */
static void unknown_names_are_refused(void) {
    static const char *const names[] = {"cp",  "cpu/scala", "cpu/scalar/x", "cpu/",
                                        "CPU", "",          "gpu"};
    for (int n = 0; n < TEST_COUNT(names); n++) {
        check_refused(names[n]);
        CHECK_WORD(fdma_last_error(), "cpu/scalar");
        CHECK_WORD(fdma_last_error(), "reference");
    }
}

#if defined(__x86_64__)
static const char *const foreign_kernel = "cpu/neon";
#else
static const char *const foreign_kernel = "cpu/avx2";
#endif

static void foreign_kernels_are_refused(void) {
    check_refused(foreign_kernel);
    CHECK_WORD(fdma_last_error(), foreign_kernel);
}

static void missing_features_are_named(void) {
    int lacking = 0;
    for (int32_t i = 0; i < fdma_kernel_count(); i++) {
        fdma_kernel_info info = {.size = sizeof info};
        CHECK_OK(fdma_describe_kernel(i, &info));
        if (info.missing != NULL && strcmp(info.operation, "select") == 0 &&
            !is_device_kernel(info.name)) {
            check_refused(info.name);
            CHECK_WORD(fdma_last_error(), info.name);
            CHECK_WORD(fdma_last_error(), info.missing);
            lacking++;
        }
    }
    printf("%d kernels that this machine lacks\n", lacking);
}

/* ---- traits of kernels ---- */

static bool writes_last_keys(const kernel_backend *backend) {
    const kernel_backend *const alone[] = {backend, NULL};
    const fdma_kernel *kernel;
    bool found = false;
    for (int32_t i = 0; (kernel = fdma_kernel_at(alone, i)) != NULL; i++) {
        const bool writes = has_trait(kernel, trait_writes_last_keys);
        CHECK(!writes || kernel->operation == operation_select);
        found |= writes;
    }
    return found;
}

static void backends_know_their_kernels(void) {
    CHECK_INT(writes_last_keys(&fdma_cuda_backend), fdma_cuda_backend.writes_last_keys);
    CHECK_INT(writes_last_keys(&fdma_cpu_backend), fdma_cpu_backend.writes_last_keys);
    CHECK_INT(writes_last_keys(&fdma_reference_backend), fdma_reference_backend.writes_last_keys);
}

/* ---- the choice among rows, on made-up machines ---- */

static const char *lacks_nothing(void) { return NULL; }
static const char *lacks_avx9(void) { return "avx9"; }
static const char *takes_all(const fdma_problem *problem) {
    (void)problem;
    return NULL;
}
static const char *takes_one_query(const fdma_problem *problem) {
    return problem->q_len == 1 ? NULL : "many queries";
}

static const char *takes_no_singles(const fdma_problem *problem) {
    return problem->dtype == FDMA_FLOAT32 ? "float32 tensors; cast them to bfloat16" : NULL;
}

static const fdma_kernel made_up[] = {
    {"cpu/sse9/one", operation_forward, lacks_avx9, takes_one_query, NULL, NULL, false, 0},
    {"cpu/sse9", operation_forward, lacks_avx9, takes_all, NULL, NULL, false, 0},
    {"cpu/any/one", operation_forward, lacks_nothing, takes_one_query, NULL, NULL, false, 0},
    {"cpu/any", operation_forward, lacks_nothing, takes_all, NULL, NULL, false, 0},
    {"cpu/any", operation_score, lacks_nothing, takes_all, NULL, NULL, false, 0},
    {"cuda/sm1/d8", operation_backward, lacks_nothing, takes_no_singles, NULL, NULL, true, 0},
    {"cuda/sm1/d9", operation_backward, lacks_nothing, takes_no_singles, NULL, NULL, true, 0},
    {"cuda/sm1/d8", operation_merge, lacks_nothing, takes_no_singles, NULL, NULL, true, 0},
    {"cuda/sm1/d9", operation_merge, lacks_nothing, takes_one_query, NULL, NULL, true, 0},
};
static const kernel_table made_up_table = {made_up, TEST_COUNT(made_up)};
static const kernel_table *const made_up_tables[] = {&made_up_table, NULL};
static const kernel_backend made_up_backend = {.tables = made_up_tables};
static const kernel_backend *const made_up_backends[] = {&made_up_backend, NULL};

static const struct {
    const char *kernel; /* forced */
    fdma_operation operation;
    int64_t q_len;
    const char *picked;  /* NULL: FDMA_UNSUPPORTED */
    const char *message; /* then the whole message */
} choices[] = {
    {NULL, operation_forward, 1, "cpu/any/one", NULL},
    {NULL, operation_forward, 2, "cpu/any", NULL},
    {"cpu", operation_forward, 2, "cpu/any", NULL},
    {"cpu/any", operation_forward, 1, "cpu/any/one", NULL},
    {"cpu/any/one", operation_forward, 1, "cpu/any/one", NULL},
    {"cpu/any/one", operation_score, 2, "cpu/any", NULL},
    {"cpu/any/one", operation_forward, 2, NULL,
     "forward (float32, head_dim 8) on the CPU: exec.kernel cpu/any/one does not support many "
     "queries"},
    {"cpu/sse9", operation_forward, 2, NULL,
     "forward (float32, head_dim 8) on the CPU: exec.kernel cpu/sse9 needs avx9, which this "
     "machine does not have"},
    {"cpu/sse9", operation_score, 2, NULL,
     "score (float32, head_dim 8) on the CPU: exec.kernel cpu/sse9 has no kernel for "
     "this call"},
    {"cpu/sse", operation_forward, 1, NULL,
     "exec.kernel: no kernel name begins with cpu/sse, want one of cpu/sse9, cpu/any, cuda/sm1"},
    {"\x1b[31m\xff\n", operation_forward, 1, NULL,
     "exec.kernel: no kernel name begins with \\x1b[31m\\xff\\x0a, want one of cpu/sse9, "
     "cpu/any, cuda/sm1"},
    {NULL, operation_backward, 2, NULL,
     "backward (float32, head_dim 8) on FDMA_CUDA(2): the library does not support float32 "
     "tensors; cast them to bfloat16"},
    {NULL, operation_merge, 2, NULL,
     "merge (float32, head_dim 8) on FDMA_CUDA(2): cuda/sm1/d8 does not support float32 tensors; "
     "cast them to bfloat16; cuda/sm1/d9 does not support many queries"},
    {"cuda/sm1/d9", operation_backward, 2, NULL,
     "backward (float32, head_dim 8) on FDMA_CUDA(2): exec.kernel cuda/sm1/d9 does not support "
     "float32 tensors; cast them to bfloat16"},
};

static void kernels_are_chosen_by_what_runs_here(void) {
    for (int i = 0; i < TEST_COUNT(choices); i++) {
        const fdma_operation operation = choices[i].operation;
        const bool on_device = operation == operation_backward || operation == operation_merge;
        const fdma_problem problem = {
            .operation = operation,
            .dtype = FDMA_FLOAT32,
            .head_dim = 8,
            .q_len = choices[i].q_len,
            .exec = {.kernel = choices[i].kernel, .device = on_device ? FDMA_CUDA(2) : FDMA_CPU}};
        const fdma_kernel *kernel = NULL;
        const fdma_status status = fdma_choose_kernel(made_up_backends, &problem, &kernel);
        test_context("choice %d", i);
        if (choices[i].picked != NULL) {
            CHECK_INT(status, FDMA_OK);
            CHECK(kernel != NULL && strcmp(kernel->name, choices[i].picked) == 0);
        } else {
            CHECK_INT(status, FDMA_UNSUPPORTED);
            CHECK(kernel == NULL);
            test_context("choice %d: %s", i, fdma_last_error());
            CHECK(strcmp(fdma_last_error(), choices[i].message) == 0);
        }
    }
}

/* The device does not report a feature that a kernel says it lacks. */
static void features_and_kernels_agree(void) {
    fdma_device_info device = {.size = sizeof device};
    CHECK_OK(fdma_describe_device(0, &device));
    for (int32_t i = 0; i < fdma_kernel_count(); i++) {
        fdma_kernel_info info = {.size = sizeof info};
        CHECK_OK(fdma_describe_kernel(i, &info));
        CHECK(info.missing == NULL || !test_has_word(device.features, info.missing));
    }
}

/* Only the reference takes float64, and it is picked without being named. */
static void only_the_reference_takes_float64(void) {
    fdma_forward_args args = {.size = sizeof args,
                              .q = new_tensor(FDMA_FLOAT64, 1, 3, 1, 8),
                              .k = new_tensor(FDMA_FLOAT64, 1, 3, 1, 8),
                              .v = new_tensor(FDMA_FLOAT64, 1, 3, 1, 8),
                              .out = new_output(FDMA_FLOAT64, 1, 3, 1, 8),
                              .lse = new_output(FDMA_FLOAT64, 1, 1, 3, -1)};
    args.exec.kernel = "reference";
    CHECK_OK(run_forward(&args));
    args.exec = (fdma_exec){.kernel = "cpu"};
    CHECK_INT(run_forward(&args), FDMA_UNSUPPORTED);
    CHECK_WORD(fdma_last_error(), "float64");
    args.exec = (fdma_exec){.kernel = "reference/float32"};
    CHECK_INT(run_forward(&args), FDMA_UNSUPPORTED);
    CHECK_WORD(fdma_last_error(), "float64");
}

static void the_library_says_what_it_is(void) {
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", FDMA_VERSION_MAJOR, FDMA_VERSION_MINOR,
             FDMA_VERSION_PATCH);
    CHECK(strcmp(fdma_version(), version) == 0);
    CHECK(strcmp(fdma_status_name(FDMA_OK), "FDMA_OK") == 0);
    CHECK(strcmp(fdma_status_name(FDMA_INVALID_ARGUMENT), "FDMA_INVALID_ARGUMENT") == 0);
    CHECK(strcmp(fdma_status_name(FDMA_UNSUPPORTED), "FDMA_UNSUPPORTED") == 0);
    CHECK(strcmp(fdma_status_name(FDMA_WORKSPACE_TOO_SMALL), "FDMA_WORKSPACE_TOO_SMALL") == 0);
    CHECK(strcmp(fdma_status_name(FDMA_CUDA_ERROR), "FDMA_CUDA_ERROR") == 0);
    CHECK(fdma_status_name((fdma_status)99) != NULL);
}

static void devices_are_described(void) {
    fdma_device_info info = {.size = sizeof info};
    CHECK(fdma_device_count() >= 1);
    CHECK_OK(fdma_describe_device(0, &info));
    CHECK(memchr(info.name, '\0', sizeof info.name) != NULL && info.name[0] != '\0');
    CHECK(memchr(info.features, '\0', sizeof info.features) != NULL);
    CHECK(info.cores >= 1);
    CHECK_INT(fdma_describe_device(fdma_device_count(), &info), FDMA_INVALID_ARGUMENT);
    CHECK_WORD(fdma_last_error(), "device");
    CHECK_INT(fdma_describe_device(-1, &info), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_describe_device(0, NULL), FDMA_INVALID_ARGUMENT);
    info.size = 0;
    CHECK_INT(fdma_describe_device(0, &info), FDMA_INVALID_ARGUMENT);
}

/* One device more than there are. The build and the machine decide who is asked; the CPU works
 * on. */
static void absent_devices_are_refused(void) {
    const int32_t absent = fdma_device_count();
#if defined(FDMA_HAVE_CUDA)
    const fdma_status want = absent > 1 ? FDMA_INVALID_ARGUMENT : FDMA_CUDA_ERROR;
#else
    const fdma_status want = FDMA_UNSUPPORTED;
#endif
    const expectation refusal = {want, {"exec.device"}, 0};
    call *const x = right_call(operation_forward, true);
    call_exec(x)->device = absent;
    check_rejected(x, &refusal);
    call_exec(x)->device = 0;
    memset(right.memory, 0, right.bytes);
    CHECK_OK(fdma_forward(&x->args.forward));
}

static void fused_calls_name_their_kernels(void) {
    fdma_attention_kernels names = {.size = sizeof names};
    fdma_attention_args *const args = &right_call(operation_attention, true)->args.attention;
    args->exec.kernel = "cpu/scalar";
    CHECK_OK(fdma_attention_kernel(args, &names));
    CHECK(strncmp(names.score, "cpu/scalar", 10) == 0);
    CHECK(strncmp(names.select, "cpu/scalar", 10) == 0);
    CHECK(strncmp(names.forward, "cpu/scalar", 10) == 0);
    CHECK_INT(names.size, sizeof names);
    names.size--;
    CHECK_INT(fdma_attention_kernel(args, &names), FDMA_INVALID_ARGUMENT);
    CHECK_INT(fdma_attention_kernel(args, NULL), FDMA_INVALID_ARGUMENT);
}

static void fused_gradients_name_their_kernels(void) {
    fdma_attention_backward_kernels names = {.size = sizeof names};
    fdma_attention_backward_args *const args =
        &right_call(operation_attention_backward, true)->args.attention_backward;
    args->exec.kernel = "reference";
    CHECK_OK(fdma_attention_backward_kernel(args, &names));
    CHECK(names.score == NULL && names.score_backward != NULL);
    args->bias = (fdma_tensor){0}; /* the call then computes it again */
    CHECK_OK(fdma_attention_backward_kernel(args, &names));
    CHECK(strcmp(names.score, "reference") == 0);
    CHECK(strcmp(names.backward, "reference") == 0);
    CHECK(strcmp(names.score_backward, "reference") == 0);
    args->dt_proj = args->a = args->ddt_proj = args->da = (fdma_tensor){0};
    args->dt_bias = args->ddt_bias = (fdma_tensor){0};
    args->bias_form = FDMA_BIAS_NONE;
    CHECK_OK(fdma_attention_backward_kernel(args, &names));
    CHECK(names.score == NULL && names.backward != NULL && names.score_backward == NULL);
}

static void check_same_view(fdma_tensor tensor, int32_t rank) {
    static const int64_t shape[] = {2, 3, 4, 5};
    const fdma_tensor want = fdma_dense_tensor(tensor.data, FDMA_INT32, rank, shape);
    CHECK_BYTES(&tensor, &want, sizeof want);
}

static void constructors_are_dense(void) {
    int32_t data[120];
    check_same_view(fdma_tensor_1d(data, FDMA_INT32, 2), 1);
    check_same_view(fdma_tensor_2d(data, FDMA_INT32, 2, 3), 2);
    check_same_view(fdma_tensor_3d(data, FDMA_INT32, 2, 3, 4), 3);
    check_same_view(fdma_tensor_4d(data, FDMA_INT32, 2, 3, 4, 5), 4);
}

static void dense_tensors_are_dense(void) {
    float data[24];
    const int64_t shape[] = {2, 3, 4};
    const fdma_tensor tensor = fdma_dense_tensor(data, FDMA_FLOAT32, 3, shape);
    CHECK(tensor.data == data);
    CHECK_INT(tensor.rank, 3);
    CHECK_INT(tensor.dtype, FDMA_FLOAT32);
    CHECK_BYTES(tensor.shape, shape, sizeof shape);
    CHECK_INT(tensor.stride[0], 12);
    CHECK_INT(tensor.stride[1], 4);
    CHECK_INT(tensor.stride[2], 1);
}

/* Runs first, before any call fails. */
static void no_message_before_a_failure(void) { CHECK_BYTES(fdma_last_error(), "", 1); }

static const test_entry tests[] = {
    TEST(no_message_before_a_failure),
    TEST(every_kernel_is_described),
    TEST(plain_kernels_are_always_there),
    TEST(indices_out_of_range),
    TEST(names_force_kernels),
    TEST(decode_leaves_masks_to_tiles),
    TEST(prefixes_force_backends),
    TEST(unknown_names_are_refused),
    TEST(foreign_kernels_are_refused),
    TEST(missing_features_are_named),
    TEST(backends_know_their_kernels),
    TEST(kernels_are_chosen_by_what_runs_here),
    TEST(features_and_kernels_agree),
    TEST(only_the_reference_takes_float64),
    TEST(the_library_says_what_it_is),
    TEST(devices_are_described),
    TEST(absent_devices_are_refused),
    TEST(fused_calls_name_their_kernels),
    TEST(fused_gradients_name_their_kernels),
    TEST(constructors_are_dense),
    TEST(dense_tensors_are_dense),
};

int main(void) {
    unsetenv("FDMA_TEST_KERNELS"); /* the test covers the list of all kernels */
    return test_run(tests, TEST_COUNT(tests));
}
