/* device.h - a CUDA device for the C tests: tensors on it between guard bytes, and calls.
 *
 * What is made here lives until device_free_all(), which looks at the guards. A table of tests ends
 * in device_test_run(): where the machine has no device it says so for each test, and passes. */
#ifndef DEVICE_H
#define DEVICE_H

#include "problem.h"

#include <cuda_runtime_api.h>

enum {
    device_number = 1,   /* exec.device: the first CUDA device */
    device_blocks = 512, /* alive at once */
    device_guard = 4096, /* bytes before and after a block; keeps its alignment */
};

typedef struct device_block {
    unsigned char *base;
    size_t size;
} device_block;

static struct {
    device_block block[device_blocks];
    int blocks;
    unsigned char fill; /* of workspace before a call; a test may change it */
} device_state = {.fill = 0xff};

/* A failure of the device itself leaves nothing to go on with. */
static inline void device_must(cudaError_t status, const char *what) {
    if (status != cudaSuccess) {
        printf("[%s] %s: %s\n", test_state.context, what, cudaGetErrorString(status));
        exit(1);
    }
}

/* Everything so far is done, and did not fault. */
static inline void device_wait(void) { device_must(cudaDeviceSynchronize(), "a kernel"); }

static inline size_t device_free_bytes(void) {
    size_t free_bytes = 0, all = 0;
    device_must(cudaMemGetInfo(&free_bytes, &all), "cudaMemGetInfo");
    return free_bytes;
}

/* Memory between guards, all of it guard bytes. */
static inline void *device_alloc(size_t size) {
    unsigned char *base = NULL;
    const size_t total = size + 2 * (size_t)device_guard;
    CHECK(device_state.blocks < device_blocks);
    device_must(cudaMalloc((void **)&base, total), "cudaMalloc");
    device_must(cudaMemset(base, test_guard_byte, total), "cudaMemset");
    device_state.block[device_state.blocks++] = (device_block){base, size};
    return base + device_guard;
}

static inline void device_check_guard(const unsigned char *at) {
    unsigned char found[device_guard], want[device_guard];
    memset(want, test_guard_byte, sizeof want);
    device_must(cudaMemcpy(found, at, sizeof found, cudaMemcpyDeviceToHost), "cudaMemcpy");
    CHECK_BYTES(found, want, sizeof want);
}

static inline void device_free_all(void) {
    for (int i = 0; i < device_state.blocks; i++) {
        const device_block block = device_state.block[i];
        device_check_guard(block.base);
        device_check_guard(block.base + device_guard + block.size);
        device_must(cudaFree(block.base), "cudaFree");
    }
    device_state.blocks = 0;
}

/* Memory without guards; NULL, and a line, where the device has not so much. */
static inline char *device_large(size_t bytes) {
    void *memory = NULL;
    if (device_free_bytes() < bytes + ((size_t)1 << 29)) {
        printf("skipped: the device has no %zu bytes\n", bytes);
        CHECK(bytes > 0);
        return NULL;
    }
    device_must(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
}

/* What is on the device and the host alike, at the end of a case. */
static inline void device_free_both(void) {
    device_free_all();
    test_free_all();
}

/* Bytes from a tensor's first element to its last, whatever the strides. */
static inline size_t device_extent(fdma_tensor tensor) {
    int64_t last = 0;
    for (int axis = 0; axis < tensor.rank; axis++) {
        if (tensor.shape[axis] == 0)
            return 0;
        last += (tensor.shape[axis] - 1) * tensor.stride[axis];
    }
    return tensor.rank > 0 ? (size_t)(last + 1) * dtype_size(tensor.dtype) : 0;
}

static inline void device_write(fdma_tensor to, fdma_tensor from) {
    device_must(cudaMemcpy(to.data, from.data, device_extent(from), cudaMemcpyHostToDevice),
                "a copy to the device");
}

/* A copy on the device; what is absent stays so. */
static inline fdma_tensor device_tensor(fdma_tensor host) {
    fdma_tensor copy = host;
    if (host.rank > 0) {
        copy.data = device_alloc(device_extent(host));
        device_write(copy, host);
    }
    return copy;
}

/* Room on the device for what `like` is, full of guard bytes. */
static inline fdma_tensor device_output(fdma_tensor like) {
    if (like.rank > 0)
        like.data = device_alloc(device_extent(like));
    return like;
}

/* Fills an output with guard bytes again. */
static inline void device_clear(fdma_tensor tensor) {
    device_must(cudaMemset(tensor.data, test_guard_byte, device_extent(tensor)), "cudaMemset");
}

/* Waits for everything before. */
static inline void device_read_into(fdma_tensor host, fdma_tensor tensor) {
    device_must(cudaMemcpy(host.data, tensor.data, device_extent(tensor), cudaMemcpyDeviceToHost),
                "a copy from the device");
}

static inline fdma_tensor device_read(fdma_tensor tensor) {
    fdma_tensor copy = tensor;
    copy.data = test_alloc(device_extent(tensor));
    device_read_into(copy, tensor);
    return copy;
}

/* An output must still be full of guard bytes. */
static inline void device_check_unwritten(fdma_tensor tensor) {
    const fdma_tensor found = device_read(tensor);
    for (size_t at = 0; at < bytes_of(found); at++)
        if (!CHECK_INT(((const unsigned char *)found.data)[at], test_guard_byte))
            return;
}

static inline void device_exec(fdma_exec *exec, size_t bytes) {
    exec->workspace = device_alloc(bytes);
    exec->workspace_size = bytes;
    device_must(cudaMemset(exec->workspace, device_state.fill, bytes), "cudaMemset");
}

/* Defines device_run_forward() and the like: they call on the device with workspace of exactly the
 * size that the operation asks for, and do not wait. */
#define DEFINE_DEVICE_OPERATION(name)                                                              \
    static inline fdma_status device_run_##name(fdma_##name##_args *args) {                        \
        args->exec.device = device_number;                                                         \
        return run_operation(&name##_calls, args, device_exec);                                    \
    }

DEFINE_DEVICE_OPERATION(score)
DEFINE_DEVICE_OPERATION(select)
DEFINE_DEVICE_OPERATION(lists)
DEFINE_DEVICE_OPERATION(forward)
DEFINE_DEVICE_OPERATION(attention)
DEFINE_DEVICE_OPERATION(backward)
DEFINE_DEVICE_OPERATION(score_backward)

/* The calls between these two become a graph. */

static inline void device_begin_capture(fdma_exec *exec, cudaStream_t stream) {
    exec->stream = stream;
    device_must(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "begin capture");
}

static inline cudaGraphExec_t device_end_capture(fdma_exec *exec) {
    cudaGraph_t graph;
    cudaGraphExec_t replayed;
    device_must(cudaStreamEndCapture(exec->stream, &graph), "end capture");
    device_must(cudaGraphInstantiate(&replayed, graph, 0), "instantiate");
    device_must(cudaGraphDestroy(graph), "destroy");
    exec->stream = NULL;
    return replayed;
}

/* On the host, with its selection. */
static inline problem device_small_problem(fdma_dtype dtype) {
    problem x = {.batch = 2,
                 .q_len = 300,
                 .kv_len = 700,
                 .q_heads = 8,
                 .kv_heads = 2,
                 .head_dim = 64,
                 .window = 50,
                 .scope = FDMA_SCOPE_CAUSAL,
                 .causal = 1,
                 .dtype = dtype};
    problem_fill(&x, 5);
    problem_select(&x);
    return x;
}

/* A problem with its tensors and its selection on the device. */
static inline problem device_problem(const problem *x) {
    problem copy = *x;
    copy.q = device_tensor(x->q);
    copy.k = device_tensor(x->k);
    copy.v = device_tensor(x->v);
    copy.score = device_tensor(x->score);
    copy.bias = device_tensor(x->bias);
    copy.key_valid = device_tensor(x->key_valid);
    copy.selection.expiry = device_tensor(x->selection.expiry);
    copy.selection.slot = device_tensor(x->selection.slot);
    return copy;
}

/* problem_args() of a problem on the device, with outputs there. */
static inline fdma_forward_args device_args(const problem *x, const char *kernel) {
    fdma_forward_args args = problem_args(x, kernel);
    args.out = device_output(args.out);
    args.lse = device_output(args.lse);
    args.exec = (fdma_exec){.kernel = kernel, .device = device_number};
    return args;
}

static inline attended device_read_results(const fdma_forward_args *args) {
    device_wait();
    return (attended){.out = device_read(args->out), .lse = device_read(args->lse)};
}

/* The results of a problem on the device, on the host. */
static inline attended device_attend(const problem *x, const char *kernel) {
    fdma_forward_args args = device_args(x, kernel);
    CHECK_OK(device_run_forward(&args));
    return device_read_results(&args);
}

/* Whether a row takes this problem. */
static inline int device_takes(const problem *x, const char *kernel) {
    fdma_forward_args args = problem_args(x, kernel);
    size_t bytes;
    args.exec.device = device_number;
    const fdma_status status = fdma_forward_workspace(&args, &bytes);
    CHECK(status == FDMA_OK || status == FDMA_UNSUPPORTED);
    return status == FDMA_OK;
}

/* The names of one operation's rows that this machine's devices run. */
static inline kernel_list device_kernels(const char *operation) {
    kernel_list list = {.count = 0};
    for (int32_t i = 0; i < fdma_kernel_count() && list.count < kernel_limit; i++) {
        fdma_kernel_info info = {.size = sizeof info};
        CHECK_INT(fdma_describe_kernel(i, &info), FDMA_OK);
        if (is_device_kernel(info.name) && strcmp(info.operation, operation) == 0) {
            if (info.missing != NULL)
                printf("skipped %s %s: needs %s\n", info.name, operation, info.missing);
            else
                list.name[list.count++] = info.name;
        }
    }
    CHECK(list.count > 0);
    return list;
}

/* The types that rows attend in. */
static const fdma_dtype device_dtypes[] = {FDMA_FLOAT16, FDMA_BFLOAT16};
enum { device_dtype_count = 2 };

static inline int device_test_run(const test_entry *tests, int count) {
    if (fdma_device_count() > 1)
        return test_run(tests, count);
    for (int i = 0; i < count; i++)
        printf("skip %s: no CUDA device\n", tests[i].name);
    return 0;
}

#endif /* DEVICE_H */
