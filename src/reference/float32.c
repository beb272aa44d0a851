/* The kernels "reference/float32": the plain evaluation; see reference/kernels.h. */
#define FDMA_REFERENCE_FLOAT32
#include "reference/kernels.h"

static const fdma_kernel kernels[] = {REAL_KERNELS};

const kernel_table fdma_reference_float32 = {kernels, sizeof kernels / sizeof kernels[0]};
