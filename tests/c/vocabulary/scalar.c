/* The vocabulary of scalar, for test_vocabulary.c. */
#include "cpu/common/math.h"

#include "words.h"

const vocabulary vocabulary_scalar = VOCABULARY;
