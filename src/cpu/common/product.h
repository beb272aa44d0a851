/* The products of the point of the build matrix that is being compiled. */
#pragma once

#if defined(FDMA_POINT_AMX)
#include "cpu/common/product_amx.h"
#else
#include "cpu/common/product_vectors.h"
#endif
