/* The words of pairs in bf16_pairs.h, for test_pairs.c. */
#include "cpu/simd/avx512.h"
#include "cpu/simd/bf16_pairs.h"

#include "pairs.h"

const pair_vocabulary vocabulary_avx512bf16 = VOCABULARY_PAIRS;
