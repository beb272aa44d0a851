/* Included before everything else where the library is compiled for 32-bit WebAssembly, which
 * src/core/tensor.h refuses: workspace sizes could overflow there. selection.c bounds all sizes of
 * its calls, and nothing else in the library reads these macros. */
#pragma once

#include <stdint.h>

#undef SIZE_MAX
#undef UINTPTR_MAX
#define SIZE_MAX UINT64_MAX
#define UINTPTR_MAX UINT64_MAX
