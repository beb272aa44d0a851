/* The products of the point of the build matrix that is being compiled. */
#ifndef FDMA_CPU_COMMON_PRODUCT_H
#define FDMA_CPU_COMMON_PRODUCT_H

#if defined(FDMA_POINT_AMX)
#include "cpu/common/product_amx.h"
#else
#include "cpu/common/product_vectors.h"
#endif

#endif
