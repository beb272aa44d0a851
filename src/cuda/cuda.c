/* The devices of this machine, the kernels that they can run, and the device of a pointer. */
#include "cuda/cuda.h"

#include "core/adapter.h"
#include "core/error.h"
#include "core/signatures.h"
#include "cuda/devices.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#define DECLARE(table) extern const kernel_table table;
#define LIST(table) &table,

FDMA_CUDA_TABLES(DECLARE)

static const kernel_table *const tables[] = {FDMA_CUDA_TABLES(LIST) NULL};

static const kernel_adapter *const adapters[] = {
    &fdma_cuda_used_adapter,
    &fdma_cuda_stream_adapter,
    NULL,
};

const kernel_backend fdma_cuda_backend = {
    .tables = tables,
    .adapters = adapters,
    .scores_tokens = true,
    .writes_last_keys = true,
};

enum { most_devices = 64 }; /* devices that the library describes; calls on others are refused */

/* Filled in by the first call that needs it, because the query starts the driver: that takes a
 * tenth of a second, and the process must not fork() afterwards. */
static struct machine {
    cudaError_t status;
    int32_t count;
    cuda_device devices[most_devices];
} machine;

static pthread_once_t machine_once = PTHREAD_ONCE_INIT;

static cudaError_t ask_device(int32_t index, cuda_device *device) {
    int32_t major = 0, minor = 0;
    const struct {
        enum cudaDeviceAttr attribute;
        int32_t *value;
    } wanted[] = {
        {cudaDevAttrComputeCapabilityMajor, &major},
        {cudaDevAttrComputeCapabilityMinor, &minor},
        {cudaDevAttrMultiProcessorCount, &device->multiprocessors},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, &device->shared_bytes},
    };
    cudaError_t status = cudaSuccess;
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0] && status == cudaSuccess; i++)
        status = cudaDeviceGetAttribute(wanted[i].value, wanted[i].attribute, index);
    device->capability = 10 * major + minor;
    return status;
}

static void ask_machine(void) {
    int count = 0;
    machine.status = cudaGetDeviceCount(&count);
    for (int i = 0; i < count && i < most_devices && machine.status == cudaSuccess; i++)
        machine.status = ask_device(i, &machine.devices[i]);
    machine.count = machine.status == cudaSuccess ? count : 0;
}

static const struct machine *this_machine(void) {
    pthread_once(&machine_once, ask_machine);
    return &machine;
}

int32_t fdma_cuda_count(void) { return this_machine()->count; }

const cuda_device *fdma_cuda_device(int32_t device) { return &this_machine()->devices[device - 1]; }

static bool has_capability(int32_t least, int32_t most) {
    const struct machine *const here = this_machine();
    for (int32_t i = 0; i < here->count && i < most_devices; i++)
        if (here->devices[i].capability >= least && here->devices[i].capability <= most)
            return true;
    return false;
}

static bool is_capable(const fdma_problem *problem, int32_t least, int32_t most) {
    const int32_t capability = fdma_cuda_device(problem->exec.device)->capability;
    return capability >= least && capability <= most;
}

const char *fdma_missing_sm80(void) {
    return has_capability(80, INT32_MAX) ? NULL : "a device of compute capability 8.0 or later";
}

const char *fdma_missing_sm90(void) {
    return has_capability(90, INT32_MAX) ? NULL : "a device of compute capability 9.0 or later";
}

const char *fdma_missing_sm90a(void) {
    return has_capability(90, 90) ? NULL : "a device of exactly compute capability 9.0";
}

const char *fdma_refuses_before_sm80(const fdma_problem *problem) {
    return is_capable(problem, 80, INT32_MAX) ? NULL : "a device before compute capability 8.0";
}

const char *fdma_refuses_before_sm90(const fdma_problem *problem) {
    return is_capable(problem, 90, INT32_MAX) ? NULL : "a device before compute capability 9.0";
}

const char *fdma_refuses_all_but_sm90a(const fdma_problem *problem) {
    return is_capable(problem, 90, 90) ? NULL : "a device that is not of compute capability 9.0";
}

static fdma_status fail_driver(const char *what, cudaError_t status) {
    int driver = 0; // 1000 * major + 10 * minor; 0: there is none
    if (status == cudaErrorInsufficientDriver && cudaDriverGetVersion(&driver) == cudaSuccess) {
        FDMA_REQUIRE(driver > 0, FDMA_CUDA_ERROR,
                     "%s: no NVIDIA driver is found, want one for CUDA %d.%d or later", what,
                     CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
        return fdma_fail(FDMA_CUDA_ERROR,
                         "%s: the NVIDIA driver is for CUDA %d.%d, want one for CUDA %d.%d or "
                         "later, with which this library is built",
                         what, driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
                         CUDART_VERSION % 1000 / 10);
    }
    return fdma_fail(FDMA_CUDA_ERROR, "%s: %s", what, cudaGetErrorString(status));
}

static fdma_status check_there(const char *name, int32_t device) {
    const struct machine *const here = this_machine();
    if (here->status != cudaSuccess && here->status != cudaErrorNoDevice)
        return fail_driver(name, here->status);
    FDMA_REQUIRE(here->count > 0, FDMA_CUDA_ERROR, "%s: is %s, %s", name,
                 fdma_device_text(device).text, cudaGetErrorString(cudaErrorNoDevice));
    FDMA_REQUIRE(device <= here->count, FDMA_INVALID_ARGUMENT,
                 "%s: is %s, want at most %s, the last here", name, fdma_device_text(device).text,
                 fdma_device_text(here->count).text);
    FDMA_REQUIRE(device <= most_devices, FDMA_UNSUPPORTED,
                 "%s: is %s, want at most %s: the library knows the first %d devices of a machine",
                 name, fdma_device_text(device).text, fdma_device_text(most_devices).text,
                 most_devices);
    return FDMA_OK;
}

fdma_status fdma_describe_cuda(int32_t device, fdma_device_info *info) {
    struct cudaDeviceProp properties;
    FDMA_TRY(check_there("device", device));
    const cudaError_t status = cudaGetDeviceProperties(&properties, device - 1);
    if (status != cudaSuccess)
        return fail_driver("device", status);
    const int32_t capability = fdma_cuda_device(device)->capability;
    snprintf(info->name, sizeof info->name, "%.*s", (int)sizeof info->name - 1, properties.name);
    snprintf(info->features, sizeof info->features, "sm_%d", capability);
    info->cores = fdma_cuda_device(device)->multiprocessors;
    info->reserved = 0;
    return FDMA_OK;
}

static bool is_of_device(const struct cudaPointerAttributes *found) {
    return found->type != cudaMemoryTypeUnregistered && found->devicePointer != NULL;
}

/* Queries a pointer in a thread that has a context. In a thread that has not used the device yet,
 * such as PyTorch's for gradients, the driver knows no pointer. Setting the device gives the thread
 * a context; if it does not, a query of the stream does, which a capture allows. */
static cudaError_t ask_with_context(const void *pointer, const fdma_exec *exec,
                                    struct cudaPointerAttributes *found) {
    enum cudaStreamCaptureStatus capture;
    int before = exec->device - 1;
    cudaError_t status = cudaGetDevice(&before);
    if (status == cudaSuccess)
        status = cudaSetDevice(exec->device - 1);
    if (status == cudaSuccess &&
        cudaStreamIsCapturing((cudaStream_t)exec->stream, &capture) != cudaSuccess)
        cudaGetLastError(); // the default stream may not be queried while another stream captures
    if (status == cudaSuccess)
        status = cudaPointerGetAttributes(found, pointer);
    if (before != exec->device - 1)
        cudaSetDevice(before);
    return status;
}

/* Checks that a pointer is memory of exec.device, or pinned or managed memory, which every device
 * can access. */
static fdma_status check_pointer(const char *name, const void *pointer, const fdma_exec *exec) {
    const int32_t device = exec->device;
    struct cudaPointerAttributes found;
    if (pointer == NULL)
        return FDMA_OK;
    cudaError_t status = cudaPointerGetAttributes(&found, pointer);
    if (status == cudaSuccess && !is_of_device(&found))
        status = ask_with_context(pointer, exec, &found);
    if (status != cudaSuccess)
        return fail_driver(name, status);
    FDMA_REQUIRE(is_of_device(&found), FDMA_INVALID_ARGUMENT,
                 "%s: is memory of the CPU, want memory of exec.device, %s", name,
                 fdma_device_text(device).text);
    FDMA_REQUIRE(found.type != cudaMemoryTypeDevice || found.device == device - 1,
                 FDMA_INVALID_ARGUMENT, "%s: is memory of %s, want memory of exec.device, %s", name,
                 fdma_device_text(FDMA_CUDA(found.device)).text, fdma_device_text(device).text);
    return FDMA_OK;
}

static fdma_status check_pointers(const fdma_problem *problem) {
    const tensor_table table = fdma_tensors[problem->operation];
    for (size_t t = 0; t < table.count; t++) {
        const tensor_entry *const entry = &table.entries[t];
        const fdma_tensor *const tensor = tensor_at(problem, entry->member);
        FDMA_TRY(check_pointer(entry->name, tensor->data, &problem->exec));
    }
    return check_pointer("exec.workspace", problem->exec.workspace, &problem->exec);
}

fdma_status fdma_check_cuda(const fdma_problem *problem, check_depth depth) {
    FDMA_TRY(check_there("exec.device", problem->exec.device));
    return depth == check_all && !problem->exec.trusted ? check_pointers(problem) : FDMA_OK;
}

/* Sets a device, and stores the caller's device in `before`. */
static fdma_status set_device(const char *name, int32_t device, int *before) {
    *before = device - 1;
    cudaError_t status = cudaGetDevice(before);
    if (status == cudaSuccess && *before != device - 1)
        status = cudaSetDevice(device - 1);
    return status == cudaSuccess ? FDMA_OK : fail_driver(name, status);
}

static void restore_device(int32_t device, int before) {
    if (before != device - 1)
        cudaSetDevice(before);
}

fdma_status fdma_enter_cuda(const fdma_exec *exec, int *before) {
    *before = exec->device - 1;
    return exec->trusted ? FDMA_OK : set_device("exec.device", exec->device, before);
}

void fdma_leave_cuda(const fdma_exec *exec, int before) { restore_device(exec->device, before); }

fdma_status fdma_fill_cuda(int32_t device, void *data, int byte, size_t bytes) {
    const fdma_exec exec = {.device = device};
    int before;
    FDMA_TRY(check_there("cache: its device", device));
    FDMA_TRY(check_pointer("cache", data, &exec));
    FDMA_TRY(set_device("cache: its device", device, &before));
    cudaError_t status = cudaMemset(data, byte, bytes);
    if (status == cudaSuccess)
        status = cudaStreamSynchronize(NULL);
    restore_device(device, before);
    return status == cudaSuccess ? FDMA_OK : fail_driver("cache", status);
}

/* Entries are written under the lock, `kernel` last, and read without it. */
typedef struct permission {
    _Atomic(const void *) kernel; // NULL: the entry is free
    _Atomic int32_t value;        // the value that has been set; 0: none
    int32_t device;
    enum cudaFuncAttribute attribute;
} permission;

/* A hash table with linear probing. If all permission_tries entries of a permission are taken, it
 * is not remembered, and the runtime is asked each time. */
enum { permission_count = 1024, permission_tries = 16 };
static permission permissions[permission_count];
static pthread_mutex_t permissions_lock = PTHREAD_MUTEX_INITIALIZER;

/* Returns the entry of a permission. If it has none: NULL, or with `claims` a free entry for it, if
 * there is one. */
static permission *find_entry(const void *kernel, int32_t device, enum cudaFuncAttribute attribute,
                              bool claims) {
    const uintptr_t hash = ((uintptr_t)kernel >> 4) + (uintptr_t)device * 31 + (uintptr_t)attribute;
    for (uintptr_t n = hash; n < hash + permission_tries; n++) {
        permission *const entry = &permissions[n % permission_count];
        const void *const owner = atomic_load_explicit(&entry->kernel, memory_order_acquire);
        if (owner == NULL)
            return claims ? entry : NULL;
        if (owner == kernel && entry->device == device && entry->attribute == attribute)
            return entry;
    }
    return NULL;
}

/* Sets the attribute, unless another thread has just set it. The caller holds the lock, so that a
 * smaller value never follows a larger one. */
static cudaError_t set_attribute(const void *kernel, int32_t device,
                                 enum cudaFuncAttribute attribute, int32_t value) {
    permission *const entry = find_entry(kernel, device, attribute, true);
    if (entry != NULL && atomic_load(&entry->value) >= value)
        return cudaSuccess;
    const cudaError_t status = cudaFuncSetAttribute(kernel, attribute, value);
    if (status != cudaSuccess || entry == NULL)
        return status;
    if (atomic_load(&entry->kernel) == NULL) { // otherwise other threads read these
        entry->device = device;
        entry->attribute = attribute;
    }
    atomic_store(&entry->value, value);
    atomic_store_explicit(&entry->kernel, kernel, memory_order_release);
    return cudaSuccess;
}

/* Raises the attribute of a kernel to at least `value` on the device, which is current. */
static fdma_status permit(const char *what, const void *kernel, int32_t device,
                          enum cudaFuncAttribute attribute, int32_t value) {
    const permission *const entry = find_entry(kernel, device, attribute, false);
    if (entry != NULL && atomic_load(&entry->value) >= value)
        return FDMA_OK;
    pthread_mutex_lock(&permissions_lock);
    const cudaError_t status = set_attribute(kernel, device, attribute, value);
    pthread_mutex_unlock(&permissions_lock);
    FDMA_REQUIRE(status == cudaSuccess, FDMA_CUDA_ERROR, "%s: %s", what,
                 cudaGetErrorString(status));
    return FDMA_OK;
}

fdma_status fdma_permit_shared(const char *what, const void *kernel, int32_t device, size_t bytes) {
    return permit(what, kernel, device, cudaFuncAttributeMaxDynamicSharedMemorySize,
                  (int32_t)bytes);
}

fdma_status fdma_permit_large_clusters(const char *what, const void *kernel, int32_t device) {
    return permit(what, kernel, device, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}
