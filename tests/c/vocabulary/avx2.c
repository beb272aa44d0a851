/* The vocabulary of avx2, for test_vocabulary.c. */
#include "cpu/simd/avx2.h"

#include "words.h"

const vocabulary vocabulary_avx2 = VOCABULARY_WORDS;
