/* Includes the products of the compiled point of the build matrix. */
#pragma once

#if defined(FDMA_POINT_AMX)
#include "cpu/common/product_amx.h"
#else
#include "cpu/common/product_vectors.h"
#endif
