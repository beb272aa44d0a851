/* The vocabulary of avx2, for test_vocabulary.c. */
#define FDMA_POINT_AVX2

#include "cpu/common/math.h"

#include "words.h"

const vocabulary vocabulary_avx2 = VOCABULARY;
