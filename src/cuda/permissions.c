/* Permissions for kernels to use more of a device than every kernel may: shared memory, and
 * clusters of more than 8 blocks. A permission lasts until the device is reset, so the runtime is
 * asked for it once, and it is remembered here. The library does not support cudaDeviceReset()
 * within a process, which would also destroy the caller's memory. */
#include "core/error.h"
#include "cuda/devices.h"

#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdatomic.h>

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
