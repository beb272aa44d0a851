/* The CPU backend: its kernels, and a description of the CPU. */
#pragma once

#include "core/kernel.h"

extern const kernel_backend fdma_cpu_backend;

fdma_status fdma_describe_cpu(fdma_device_info *info);
