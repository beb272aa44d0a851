/* The vocabulary of avx512, for test_vocabulary.c. */
#include "cpu/simd/avx512.h"

#include "words.h"

const vocabulary vocabulary_avx512 = VOCABULARY_WORDS;
