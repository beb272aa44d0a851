/* The CPU backend: its kernels, and what the CPU is. */
#ifndef FDMA_CPU_CPU_H
#define FDMA_CPU_CPU_H

#include "core/kernel.h"

extern const kernel_table *const fdma_cpu_tables[];

fdma_status fdma_describe_cpu(fdma_device_info *info);

#endif
