/* test_cuda_runtime.c - counts the requests to the CUDA runtime when a small call is repeated. The
 * host time of such a call is mostly its requests, so more of them are a regression. The linker
 * replaces the runtime's functions by the functions __wrap_... below. */
#include "device.h"

#include "cuda/devices.h"

typedef enum request {
    request_launch,
    request_memset,
    request_pointer,   /* asks whose memory a pointer is */
    request_attribute, /* allows a kernel more shared memory, or larger clusters */
    request_device,    /* asks for the current device, or sets it */
    request_count,
} request;

static const char *const request_names[request_count] = {"launches", "memsets", "pointers",
                                                         "attributes", "devices"};

static int counts[request_count];
static const cudaError_t *answer; /* not NULL: the functions below return it, and do nothing */

#define COUNTED(kind, name, parameters, ...)                                                       \
    cudaError_t __real_##name parameters;                                                          \
    cudaError_t __wrap_##name parameters;                                                          \
    cudaError_t __wrap_##name parameters {                                                         \
        counts[request_##kind]++;                                                                  \
        return answer != NULL ? *answer : __real_##name(__VA_ARGS__);                              \
    }

#ifdef FDMA_EMULATED
COUNTED(launch, emulated_launch, (const void *config, const void *kernel), config, kernel)
#else
COUNTED(launch, cudaLaunchKernelExC,
        (const cudaLaunchConfig_t *config, const void *kernel, void **args), config, kernel, args)
#endif
COUNTED(memset, cudaMemsetAsync, (void *to, int byte, size_t count, cudaStream_t stream), to, byte,
        count, stream)
COUNTED(pointer, cudaPointerGetAttributes,
        (struct cudaPointerAttributes * found, const void *pointer), found, pointer)
COUNTED(attribute, cudaFuncSetAttribute,
        (const void *kernel, enum cudaFuncAttribute attribute, int value), kernel, attribute, value)
COUNTED(device, cudaGetDevice, (int *device), device)
COUNTED(device, cudaSetDevice, (int device), device)

/* ---- the calls ---- */

static const call_sizes few = {
    .batch = 1, .q_len = 8, .kv_len = 8, .q_heads = 4, .kv_heads = 2, .head_dim = 16};
static const call_sizes more = {
    .batch = 1, .q_len = 512, .kv_len = 512, .q_heads = 4, .kv_heads = 2, .head_dim = 128};

/* Gives the tensors without data zeroed memory of the device, and gives the call workspace. */
static void give_memory(call *x) {
    const tensor_table table = fdma_tensors[x->operation];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++) {
        fdma_tensor *const tensor = call_tensor(x, entry);
        if (tensor->rank == 0 || tensor->data != NULL)
            continue;
        tensor->data = device_alloc(bytes_of(*tensor));
        device_must(cudaMemset(tensor->data, 0, bytes_of(*tensor)), "cudaMemset");
    }
    call_exec(x)->device = device_number;
    CHECK_OK(device_give_workspace(x));
}

/* A fused call for out alone, or with all outputs that gradients need. */
static void make_attention(call *x, const call_sizes *n, bool is_recorded) {
    *x = (call){.operation = operation_attention, .args.attention = {.window = 4, .causal = 1}};
    call_make(x, n, FDMA_BFLOAT16, false);
    if (is_recorded) {
        fdma_attention_args *const args = &x->args.attention;
        args->lse = fdma_tensor_3d(NULL, FDMA_FLOAT32, n->batch, n->q_heads, n->q_len);
        args->bias = fdma_tensor_3d(NULL, FDMA_FLOAT32, n->batch, n->kv_heads, n->kv_len);
        x->selection.slot = fdma_tensor_3d(NULL, FDMA_INT32, n->batch, n->kv_heads, n->kv_len);
    } else {
        call_drop_selection(x);
    }
    give_memory(x);
}

static void make_backward(call *x, const call_sizes *n) {
    call forward;
    make_attention(&forward, n, true);
    CHECK_OK(operations[forward.operation].call(&forward.args));
    *x =
        (call){.operation = operation_attention_backward, .args.attention_backward = {.causal = 1}};
    call_make(x, n, FDMA_BFLOAT16, false);
    call_take_inputs(x, &forward);
    fdma_attention_backward_args *const args = &x->args.attention_backward;
    args->out = forward.args.attention.out;
    args->lse = forward.args.attention.lse;
    args->bias = forward.args.attention.bias;
    x->selection = forward.selection;
    give_memory(x);
}

typedef enum call_kind { call_attention, call_recorded, call_backward } call_kind;

/* The requests of a call on compute capability 9.0. Backward has one launch more on others. A
 * trusted call asks nothing about pointers and devices. */
static const struct {
    const char *name;
    call_kind kind;
    const call_sizes *sizes;
    int most[request_count];
} cases[] = {
    {"attention, few keys", call_attention, &few, {3, 0, 7, 0, 1}},
    {"attention, more keys", call_attention, &more, {3, 0, 7, 0, 1}},
    {"recorded, few keys", call_recorded, &few, {3, 0, 11, 0, 1}},
    {"recorded, more keys", call_recorded, &more, {3, 0, 11, 0, 1}},
    {"backward, few keys", call_backward, &few, {9, 0, 17, 0, 1}},
    {"backward, more keys", call_backward, &more, {10, 0, 17, 0, 1}},
};

static void make(call *x, call_kind kind, const call_sizes *sizes) {
    if (kind == call_backward)
        make_backward(x, sizes);
    else
        make_attention(x, sizes, kind == call_recorded);
}

static void check_counts(call *x, const char *name, const int *most) {
    const bool trusted = call_exec(x)->trusted != 0;
    const bool has_one_more = x->operation == operation_attention_backward &&
                              fdma_cuda_device(device_number)->capability != 90;
    memset(counts, 0, sizeof counts);
    CHECK_OK(operations[x->operation].call(&x->args));
    for (int r = 0; r < request_count; r++) {
        const bool is_question = r == request_pointer || r == request_device;
        const int more_launches = r == request_launch && has_one_more;
        const int limit = trusted && is_question ? 0 : most[r] + more_launches;
        test_context("%s%s: %d %s, want at most %d", name, trusted ? ", trusted" : "", counts[r],
                     request_names[r], limit);
        CHECK(counts[r] <= limit);
    }
    CHECK(counts[request_launch] > 0);
}

static void repeated_calls_ask_little(void) {
    for (int i = 0; i < TEST_COUNT(cases); i++) {
        call x;
        make(&x, cases[i].kind, cases[i].sizes);
        CHECK_OK(operations[x.operation].call(&x.args)); /* the first call asks more */
        check_counts(&x, cases[i].name, cases[i].most);
        call_exec(&x)->trusted = 1;
        check_counts(&x, cases[i].name, cases[i].most);
        device_free_both();
    }
}

/* ---- permissions ---- */

/* These functions are not kernels, so the runtime must not see them. */
static void permissions_are_asked_for_once(void) {
    enum { first = 1, second = 2, many = 5000 };
    static const char functions[many * 16];
    static const cudaError_t yes = cudaSuccess, no = cudaErrorInvalidValue;
    const struct {
        size_t function, bytes;
        int32_t device;
        int asked; /* so far */
    } steps[] = {
        {0, 70000, first, 1},  {0, 70000, first, 1},  {0, 60000, first, 1},  {0, 80000, first, 2},
        {0, 70000, first, 2},  {0, 70000, second, 3}, {16, 70000, first, 4}, {0, 80000, first, 4},
        {0, 70000, second, 4}, {16, 90000, first, 5}, {16, 90000, first, 5},
    };
    memset(counts, 0, sizeof counts);
    answer = &no;
    CHECK_INT(fdma_permit_shared("call", functions, first, 70000), FDMA_CUDA_ERROR);
    counts[request_attribute] = 0;
    answer = &yes;
    for (int i = 0; i < TEST_COUNT(steps); i++) {
        test_context("step %d", i);
        CHECK_OK(fdma_permit_shared("call", functions + steps[i].function, steps[i].device,
                                    steps[i].bytes));
        CHECK_INT(counts[request_attribute], steps[i].asked);
    }
    CHECK_OK(fdma_permit_large_clusters("call", functions, first));
    CHECK_OK(fdma_permit_large_clusters("call", functions, first));
    CHECK_INT(counts[request_attribute], 6);
    for (int i = 2; i < many; i++) { /* more than the library remembers */
        counts[request_attribute] = 0;
        CHECK_OK(fdma_permit_shared("call", functions + 16 * i, first, 70000));
        CHECK_INT(counts[request_attribute], 1);
    }
    answer = NULL;
}

static const test_entry tests[] = {
    TEST(repeated_calls_ask_little),
    TEST(permissions_are_asked_for_once), /* last: leaves no room for others */
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
