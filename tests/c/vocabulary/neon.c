/* The vocabulary of neon, for test_vocabulary.c. */
#include "cpu/simd/neon.h"

#include "words.h"

const vocabulary vocabulary_neon = VOCABULARY_WORDS;
