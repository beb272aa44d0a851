/* The CPU backend: its kernels, and what the CPU is. */
#pragma once

#include "core/kernel.h"

extern const kernel_table *const fdma_cpu_tables[];

fdma_status fdma_describe_cpu(fdma_device_info *info);
