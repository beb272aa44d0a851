/* The vocabulary of neon, for test_vocabulary.c. */
#define FDMA_POINT_NEON

#include "cpu/common/math.h"

#include "words.h"

const vocabulary vocabulary_neon = VOCABULARY;
