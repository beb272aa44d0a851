/* See common/random.h. */
#include "common/random.h"

#include <math.h>

uint64_t random_bits(uint64_t *state) {
    uint64_t bits = *state += 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    return bits ^ bits >> 31;
}

double random_normal(uint64_t *state) {
    const double two_pi = 6.283185307179586;
    const uint64_t bits = random_bits(state);
    const double radius_uniform =
        ((double)(bits >> 32) + 0.5) * 0x1p-32; // never 0, whose log is infinite
    const double angle_uniform = (double)(bits & 0xffffffffu) * 0x1p-32;
    return sqrt(-2 * log(radius_uniform)) * cos(two_pi * angle_uniform);
}
