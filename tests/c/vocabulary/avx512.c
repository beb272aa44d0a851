/* The vocabulary of avx512, for test_vocabulary.c. */
#define FDMA_POINT_AVX512

#include "cpu/common/math.h"

#include "words.h"

const vocabulary vocabulary_avx512 = VOCABULARY;
