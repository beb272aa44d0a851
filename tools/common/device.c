/* See common/device.h. */
#include "common/device.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/nearest.h"
#include "common/text.h"
#include "common/timing.h"

#include <errno.h>
#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const device_words[] = {"cpu", "cuda", NULL};

#ifdef FDMA_HAVE_CUDA
#include <cuda_runtime_api.h>

static void must(cudaError_t status, const char *what) {
    if (status != cudaSuccess) {
        print_error("fdma: %s: %s", what, cudaGetErrorString(status));
        exit(EXIT_FAILED);
    }
}

const char *why_no_device(void) {
    fdma_device_info info = {.size = sizeof info};
    return fdma_describe_device(1, &info) == FDMA_OK ? "no device" : fdma_last_error();
}

static void use(int32_t device) { must(cudaSetDevice(device - 1), "cudaSetDevice"); }

static void *allocate_on_device(size_t bytes) {
    void *memory = NULL;
    must(cudaMalloc(&memory, bytes > 0 ? bytes : 1), "cudaMalloc");
    must(cudaMemset(memory, 0, bytes), "cudaMemset");
    return memory;
}

static void free_on_device(void *memory) { must(cudaFree(memory), "cudaFree"); }

static void copy_on_device(void *to, const void *from, size_t bytes) {
    must(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "cudaMemcpy");
}

static void wait_for_device(void) { must(cudaDeviceSynchronize(), "a kernel"); }

static cudaEvent_t events[2]; /* the start and the end of a measurement */

static void mark(int which) {
    if (events[which] == NULL)
        must(cudaEventCreate(&events[which]), "cudaEventCreate");
    must(cudaEventRecord(events[which], NULL), "cudaEventRecord");
}

static double elapsed_on_device(void) {
    float ms = 0;
    must(cudaEventSynchronize(events[1]), "a kernel");
    must(cudaEventElapsedTime(&ms, events[0], events[1]), "cudaEventElapsedTime");
    return (double)ms;
}

#else

const char *why_no_device(void) { return "fdma is built without CUDA"; }

/* Never called: find_device() returns the CPU only. */
static void use(int32_t device) { (void)device; }
static void *allocate_on_device(size_t bytes) { return allocate(bytes); }
static void free_on_device(void *memory) { free(memory); }
static void copy_on_device(void *to, const void *from, size_t bytes) { memcpy(to, from, bytes); }
static void wait_for_device(void) {}
static void mark(int which) { (void)which; }
static double elapsed_on_device(void) { return (double)NAN; }

#endif

int32_t find_device(const char *command, const char *text) {
    char *end = NULL;
    const int32_t count = fdma_device_count();
    if (text == NULL || strcmp(text, "cpu") == 0)
        return 0;
    errno = 0;
    const long number = strcmp(text, "cuda") == 0 ? 1 : strtol(text, &end, 10);
    if (errno != 0 || (end != NULL && (end == text || *end != '\0')) || number < 0) {
        print_error("%s: --device is '%s', want cpu, cuda or a number", command, text);
        return -1;
    }
    if (number < count) {
        if (number > 0)
            use((int32_t)number);
        return (int32_t)number;
    }
    if (count == 1)
        print_error("%s: --device is '%s': %s", command, text, why_no_device());
    else
        print_error("%s: --device is '%s', want 0 to %d", command, text, count - 1);
    return -1;
}

bool runs_on(const char *kernel, int32_t device) {
    return (strncmp(kernel, "cuda/", 5) == 0) == (device > 0);
}

bool selects_kernel(const char *kernel, const char *name) {
    const size_t length = strlen(kernel);
    return strncmp(kernel, name, length) == 0 && (name[length] == '\0' || name[length] == '/');
}

bool check_kernel(const char *command, const char *kernel) {
    if (kernel == NULL || selects_kernel("cuda", kernel))
        return true;
    nearest_name nearest = {.typed = kernel};
    for (int32_t index = 0; index < fdma_kernel_count(); index++) {
        if (selects_kernel(kernel, fdma_kernel_name(index)))
            return true;
        offer_name(&nearest, fdma_kernel_name(index), true);
    }
    if (nearest.name != NULL)
        print_error("%s: --kernel is '%s'; did you mean '%s'?", command, kernel, nearest.name);
    else
        print_error("%s: --kernel is '%s', want a kernel that fdma info lists", command, kernel);
    return false;
}

int kernel_width(void) {
    size_t longest = 0;
    for (int32_t index = 0; index < fdma_kernel_count(); index++) {
        const size_t length = strlen(fdma_kernel_name(index));
        longest = length > longest ? length : longest;
    }
    return (int)longest;
}

void *device_allocate(int32_t device, size_t bytes) {
    return device > 0 ? allocate_on_device(bytes) : allocate(bytes);
}

void device_free(int32_t device, void *memory) {
    if (device > 0)
        free_on_device(memory);
    else
        free(memory);
}

void device_copy(int32_t device, void *to, const void *from, size_t bytes) {
    if (bytes == 0)
        return;
    if (device > 0)
        copy_on_device(to, from, bytes);
    else
        memcpy(to, from, bytes);
}

/* Bytes from the first element to the end of the last. */
static size_t extent(const fdma_tensor *tensor) {
    int64_t last = 0;
    for (int axis = 0; axis < tensor->rank; axis++)
        last += (tensor->shape[axis] - 1) * tensor->stride[axis];
    return element_count(tensor) > 0 ? (size_t)(last + 1) * dtype_bytes(tensor->dtype) : 0;
}

fdma_tensor device_copy_of(int32_t device, const fdma_tensor *tensor) {
    fdma_tensor copy = *tensor;
    if (device > 0 && tensor->rank > 0) {
        copy.data = device_allocate(device, extent(tensor));
        device_copy(device, copy.data, tensor->data, extent(tensor));
    }
    return copy;
}

void device_fetch(int32_t device, const fdma_tensor *host, const fdma_tensor *copy) {
    if (device > 0 && host->rank > 0)
        device_copy(device, host->data, copy->data, extent(host));
}

void device_release(int32_t device, const fdma_tensor *copy) {
    if (device > 0 && copy->rank > 0)
        device_free(device, copy->data);
}

void device_wait(int32_t device) {
    if (device > 0)
        wait_for_device();
}

/* Start of a measurement on the CPU. */
static double started_ms;

void start_clock(int32_t device) {
    if (device > 0)
        mark(0);
    else
        started_ms = now_ms();
}

double stop_clock(int32_t device) {
    if (device == 0)
        return now_ms() - started_ms;
    mark(1);
    return elapsed_on_device();
}

double time_copy(int32_t device, void *to, const void *from, size_t bytes) {
    if (device == 0)
        return (double)NAN;
    start_clock(device);
    device_copy(device, to, from, bytes);
    return stop_clock(device);
}
