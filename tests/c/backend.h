/* backend.h - runs the tests of a program on kernels of the CPU or, if its argument is "cuda", on
 * kernels of a device. tests/CMakeLists.txt lists the programs that have both. */
#pragma once

#if defined(FDMA_HAVE_CUDA)
#include "device.h"
#else
#include "calls.h"
#endif

static inline int test_run_backend(int argc, char **argv, const test_entry *tests, int count) {
#if defined(FDMA_HAVE_CUDA)
    if (argc > 1 && strcmp(argv[1], "cuda") == 0)
        return device_test_run(tests, count);
#endif
    if (argc > 1)
        printf("%s is not tested: this build has the CPU alone\n", argv[1]);
    return argc > 1 || test_run(tests, count);
}
