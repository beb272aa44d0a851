/* The device of a subcommand's tensors and calls: the CPU, or a CUDA device if the backend is
 * built. Devices are numbered as in fdma_exec.device. */
#pragma once

#include "fdma.h"

#include <stdbool.h>

/*! device_words - values of --device, NULL last; a number is one, too. */
extern const char *const device_words[];

/*! find_device() - the device that the value of --device means: NULL or "cpu", "cuda" (the first),
 *  or a number. Returns -1 after a line on stderr if there is no such device. */
int32_t find_device(const char *command, const char *text);

/*! why_no_device() - why there is no CUDA device, as the driver says it. */
const char *why_no_device(void);

/*! runs_on() - whether the kernel of that name is one of `device`. */
bool runs_on(const char *kernel, int32_t device);

/*! selects_kernel() - whether `kernel` is that name, or the beginning of it up to a '/'. */
bool selects_kernel(const char *kernel, const char *name);

/*! check_kernel() - whether a value of --kernel selects kernels of this build. True for NULL, and
 *  for kernels of CUDA, for which the library says what is missing. Else prints a line on
 *  stderr. */
bool check_kernel(const char *command, const char *kernel);

/*! kernel_width() - the length of the longest kernel name, the width of columns of such names. */
int kernel_width(void);

/* If the device fails, everything below exits with EXIT_FAILED after a line on stderr. */

/*! device_allocate() - zeroed memory of the device, or of the CPU. Free with device_free(). */
void *device_allocate(int32_t device, size_t bytes);
void device_free(int32_t device, void *memory);

/*! device_copy() - copies between host memory and the device, or within either, and waits. */
void device_copy(int32_t device, void *to, const void *from, size_t bytes);

/*! device_copy_of() - a copy on the device, with the same shape and strides; the tensor itself if
 *  it is absent or the device is the CPU. */
fdma_tensor device_copy_of(int32_t device, const fdma_tensor *tensor);

/*! device_fetch() - copies the elements of device_copy_of(host) back to `host`. */
void device_fetch(int32_t device, const fdma_tensor *host, const fdma_tensor *copy);

/*! device_release() - frees what device_copy_of() returned. */
void device_release(int32_t device, const fdma_tensor *copy);

/*! device_wait() - waits until all calls so far are done. */
void device_wait(int32_t device);

/*! start_clock(), stop_clock() - milliseconds of the calls in between: by events on a device, by
 *  the clock on the CPU. One measurement at a time. */
void start_clock(int32_t device);
double stop_clock(int32_t device);

/*! time_copy() - milliseconds of a copy within the device; NaN on the CPU. */
double time_copy(int32_t device, void *to, const void *from, size_t bytes);
