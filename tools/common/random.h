/* Pseudorandom numbers, the same on every machine. */
#pragma once

#include <stdint.h>

/*! random_bits() - the next 64 bits; every value of `state` is a valid seed.
 *  Source  Steele, Lea, Flood: Fast splittable pseudorandom number generators (SplitMix64) */
uint64_t random_bits(uint64_t *state);

/*! random_normal() - the next number of a normal distribution with mean 0 and variance 1.
 *  Source  Box, Muller: A note on the generation of random normal deviates */
double random_normal(uint64_t *state);
