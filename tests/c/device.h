/* device.h - a CUDA device for the C tests: allocates tensors on it between guard bytes, and makes
 * calls.
 *
 * Blocks live until device_free_all(), which checks the guards. A table of tests ends in
 * device_test_run(): on a machine without a device it says so for each test, and passes. */
#pragma once

#include "problem.h"

#include <cuda_runtime_api.h>

enum {
    device_number = 1,   /* exec.device: the first CUDA device */
    device_blocks = 512, /* at once */
    device_guard = 4096, /* bytes before and after a block; keeps its alignment */
};

typedef struct device_block {
    unsigned char *base;
    size_t size;
} device_block;

static struct {
    device_block block[device_blocks];
    int blocks;
} device_state;

/* Exits: after a failure of the device itself no test can go on. */
static inline void device_must(cudaError_t status, const char *what) {
    if (status != cudaSuccess) {
        printf("[%s] %s: %s\n", test_state.context, what, cudaGetErrorString(status));
        exit(1);
    }
}

/* Waits until all previous work is done, and checks that none of it faulted. */
static inline void device_wait(void) { device_must(cudaDeviceSynchronize(), "a kernel"); }

static inline size_t device_free_bytes(void) {
    size_t free_bytes = 0, all = 0;
    device_must(cudaMemGetInfo(&free_bytes, &all), "cudaMemGetInfo");
    return free_bytes;
}

/* Allocates memory filled with guard bytes, between guards. */
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

static inline void device_free_after(int kept) {
    while (device_state.blocks > kept) {
        const device_block block = device_state.block[--device_state.blocks];
        device_check_guard(block.base);
        device_check_guard(block.base + device_guard + block.size);
        device_must(cudaFree(block.base), "cudaFree");
    }
}

static inline void device_free_all(void) { device_free_after(0); }

/* Allocates memory without guards; prints a line and returns NULL if the device has too little. */
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

static inline void device_free_both(void) {
    device_free_all();
    test_free_all();
}

/* Bytes from a tensor's first element to its last, for any strides. */
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

/* Copies a tensor to the device; an absent tensor stays absent. */
static inline fdma_tensor device_tensor(fdma_tensor host) {
    fdma_tensor copy = host;
    if (host.rank > 0) {
        copy.data = device_alloc(device_extent(host));
        device_write(copy, host);
    }
    return copy;
}

static inline void device_clear(fdma_tensor tensor) {
    device_must(cudaMemset(tensor.data, test_guard_byte, device_extent(tensor)), "cudaMemset");
}

/* Waits for all previous work. */
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

/* Checks that an output is still full of guard bytes. */
static inline void device_check_unwritten(fdma_tensor tensor) {
    const fdma_tensor found = device_read(tensor);
    for (size_t at = 0; at < bytes_of(found); at++)
        if (!CHECK_INT(((const unsigned char *)found.data)[at], test_guard_byte))
            return;
}

static inline void device_exec(fdma_exec *exec, size_t bytes) {
    exec->workspace = device_alloc(bytes);
    exec->workspace_size = bytes;
    device_must(cudaMemset(exec->workspace, test_backend.fill, bytes), "cudaMemset");
}

/* ---- calls ---- */

/* Copies a call, with copies of its tensors on the device, including the bytes between their rows
 * and the contents of outputs. */
static inline void device_copy_call(call *there, const call *here) {
    const tensor_table table = fdma_tensors[here->operation];
    call_copy(there, here);
    for (size_t t = 0; t < table.count; t++) {
        fdma_tensor *const tensor = call_tensor(there, &table.entries[t]);
        *tensor = device_tensor(*tensor);
    }
    set_call_device(there->operation, &there->args, device_number);
}

/* Gives a call on the device workspace of exactly the size that it asks for. */
static inline fdma_status device_give_workspace(call *there) {
    size_t bytes = 0;
    FDMA_TRY(operations[there->operation].workspace(&there->args, &bytes));
    device_exec(call_exec(there), bytes);
    return FDMA_OK;
}

/* Does not wait. */
static inline fdma_status device_run_call(call *there) {
    FDMA_TRY(device_give_workspace(there));
    return operations[there->operation].call(&there->args);
}

/* Waits for all previous work, then copies the outputs to tensors of the same layout on the
 * host. */
static inline void device_read_outputs(call *here, call *there) {
    const tensor_table table = fdma_tensors[here->operation];
    device_wait();
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++)
        if (is_output(entry) && call_tensor(here, entry)->rank > 0)
            device_read_into(*call_tensor(here, entry), *call_tensor(there, entry));
}

static inline void device_fetch(call *here, call *there) {
    const tensor_table table = fdma_tensors[there->operation];
    call_copy(here, there);
    device_wait();
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++)
        if (is_output(entry) && call_tensor(here, entry)->rank > 0)
            *call_tensor(here, entry) = device_read(*call_tensor(there, entry));
}

/* Copies the contents of a host call's outputs to the outputs of the same call on the device. */
static inline void device_write_outputs(call *there, call *here) {
    const tensor_table table = fdma_tensors[there->operation];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++)
        if (is_output(entry) && call_tensor(here, entry)->rank > 0)
            device_write(*call_tensor(there, entry), *call_tensor(here, entry));
}

static inline void device_clear_outputs(call *there) {
    const tensor_table table = fdma_tensors[there->operation];
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++)
        if (is_output(entry) && call_tensor(there, entry)->rank > 0)
            device_clear(*call_tensor(there, entry));
}

static inline void device_check_outputs_unwritten(call *there) {
    const tensor_table table = fdma_tensors[there->operation];
    device_wait();
    for (const tensor_entry *entry = table.entries; entry < table.entries + table.count; entry++)
        if (is_output(entry) && call_tensor(there, entry)->rank > 0)
            device_check_unwritten(*call_tensor(there, entry));
}

static inline fdma_status device_run(fdma_operation operation, void *args) {
    const int kept = device_state.blocks;
    fdma_selection *const selection = selection_of(operation, args);
    call here, there;
    call_of(&here, operation, args);
    device_copy_call(&there, &here);
    const fdma_status status = device_run_call(&there);
    device_read_outputs(&here, &there);
    if (selection != NULL) {
        selection->window = there.selection.window;
        selection->recent = there.selection.recent;
        selection->sinks = there.selection.sinks;
        selection->gap = there.selection.gap;
        selection->kv_len = there.selection.kv_len;
        selection->scope = there.selection.scope;
    }
    device_free_after(kept);
    return status;
}

/* Its tensors and its selection are on the host. */
static inline problem device_small_problem(fdma_dtype dtype) {
    problem x = SIZES(2, 300, 700, 8, 2, 64, 50, 1);
    x.dtype = dtype;
    problem_fill(&x, 5);
    problem_select(&x);
    return x;
}

/* Makes run_forward() and the like, and the lists of kernels, use the device. */
static inline int device_test_run(const test_entry *tests, int count) {
    test_backend.run = device_run;
    test_backend.fill = 0xff;
    if (fdma_device_count() > 1)
        return test_run(tests, count);
    for (int i = 0; i < count; i++)
        printf("skip %s: no CUDA device\n", tests[i].name);
    return 0;
}
