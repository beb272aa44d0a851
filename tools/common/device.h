/* Where a subcommand's tensors are and its calls run: the CPU, or a CUDA device of a build that has
 * the backend. Numbers are those of fdma_exec.device. */
#ifndef FDMA_TOOLS_COMMON_DEVICE_H
#define FDMA_TOOLS_COMMON_DEVICE_H

#include "fdma.h"

/*! find_device() - the device that an option's words mean: NULL or "cpu", "cuda" (the first), or a
 *  number. Returns -1 after a line on stderr where there is no such device. */
int32_t find_device(const char *command, const char *words);

/*! why_no_device() - why there is no CUDA device: the driver's words. */
const char *why_no_device(void);

/*! runs_on() - whether a kernel of that name works on `device`. */
int runs_on(const char *kernel, int32_t device);

/* Everything below exits with EXIT_FAILED, after a line on stderr, where the device fails. */

/*! device_allocate() - zeroed memory of the device, or of the CPU. Free with device_free(). */
void *device_allocate(int32_t device, size_t bytes);
void device_free(int32_t device, void *memory);

/*! device_copy() - waits; either side may be the CPU's memory or the device's. */
void device_copy(int32_t device, void *to, const void *from, size_t bytes);

/*! device_copy_of() - a tensor on the device with this one's elements, shape and strides, in memory
 *  of its own; the tensor itself where it is absent or the device is the CPU. */
fdma_tensor device_copy_of(int32_t device, const fdma_tensor *tensor);

/*! device_fetch() - the elements of device_copy_of(host), back to `host`. */
void device_fetch(int32_t device, const fdma_tensor *host, const fdma_tensor *copy);

/*! device_release() - frees what device_copy_of() made. */
void device_release(int32_t device, const fdma_tensor *copy);

/*! device_wait() - until every call so far is done. */
void device_wait(int32_t device);

/*! start_clock(), stop_clock() - milliseconds of the calls in between: of the device by its events,
 *  of the CPU by the clock. One clock at a time. */
void start_clock(int32_t device);
double stop_clock(int32_t device);

/*! time_copy() - milliseconds of a copy within the device; NaN on the CPU. */
double time_copy(int32_t device, void *to, const void *from, size_t bytes);

#endif /* FDMA_TOOLS_COMMON_DEVICE_H */
