/* The interface of a fuzzer: libFuzzer calls it with its own inputs, replay.c with stored ones. */
#pragma once

#include <stddef.h>
#include <stdint.h>

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);
