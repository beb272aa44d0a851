/* What a fuzzer offers: libFuzzer calls it with inputs of its own, replay.c with kept ones. */
#ifndef FDMA_TESTS_FUZZ_H
#define FDMA_TESTS_FUZZ_H

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

#endif
