/* The words of pairs in neon_bf16_pairs.h, for test_pairs.c. */
#include "cpu/simd/neon.h"
#include "cpu/simd/neon_bf16_pairs.h"

#include "pairs.h"

const pair_vocabulary vocabulary_neonbf16 = VOCABULARY_PAIRS;
