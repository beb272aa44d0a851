/* What a fuzzer offers: libFuzzer calls it with inputs of its own, replay.c with kept ones. */
#pragma once

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);
