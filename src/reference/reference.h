/* The reference backend: the specification in plain loops, in two precisions. */
#ifndef FDMA_REFERENCE_REFERENCE_H
#define FDMA_REFERENCE_REFERENCE_H

#include "core/kernel.h"

extern const kernel_table fdma_reference_float32;
extern const kernel_table *const fdma_reference_tables[];

#endif
