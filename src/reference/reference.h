/* The reference backend: the specification, in double precision and plain loops. */
#ifndef FDMA_REFERENCE_REFERENCE_H
#define FDMA_REFERENCE_REFERENCE_H

#include "core/kernel.h"

extern const kernel_table *const fdma_reference_tables[];

#endif
