/* Rotary embedding: its checks, the frequencies of a table, and the row of the table by which a
 * row of x is rotated. */
#pragma once

#include "core/integers.h"
#include "core/problem.h"

/* Checks the table's shape, the options, and that the call's tensors go together. */
fdma_status fdma_check_rotary(const fdma_problem *problem);

/* Checks that the table has the positions of a call: without reading memory, unless it is the
 * host's and `depth` is check_all. */
fdma_status fdma_check_positions(const fdma_problem *problem, check_depth depth);

enum { most_pairs = 128 }; /* pairs of channels that a table has angles for, at most */

/* Inverse frequencies, in radians for each position: high[d] + low[d]. */
typedef struct rotary_frequencies {
    double high[most_pairs], low[most_pairs];
} rotary_frequencies;

/* The powers of the problem's base, with about a hundred bits. */
void fdma_find_frequencies(const fdma_problem *problem, rotary_frequencies *frequencies);

/* The position of row n of a table that is made. */
static inline int32_t table_position(const fdma_problem *problem, int64_t n) {
    const int32_t *const positions = (const int32_t *)problem->positions.data;
    return positions != NULL ? positions[n] : (int32_t)(problem->rotation.first + n);
}

/* The angle of a position within 2^31, less whole turns: within pi, or just beyond. The product has
 * the bits of two doubles, and so has 2 pi. The first subtraction is exact: both numbers are
 * multiples of 2^-50, and they differ by little more than pi. */
INTEGER_FUNCTION double rotary_angle(double position, double high, double low) {
    const double turn = 0x1.921fb54442d18p+2, rest = 0x1.1a62633145c07p-52; // 2 pi = turn + rest
    const double product = position * high;
    const double error = fma(position, high, -product) + position * low;
    const double turns = rint(product / turn);
    return fma(-turns, turn, product) + (error - turns * rest);
}

/* The row of the table for row i of sequence b. */
static inline int64_t rotary_row(const fdma_problem *problem, int64_t b, int64_t i) {
    const fdma_tensor *const positions = &problem->positions;
    const int64_t first = problem->rotation.first;
    if (is_present(positions))
        return ((const int32_t *)positions->data)[b * positions->stride[0] + i] - first;
    return problem->rotation.offset - first + i - sequence_at(problem, i).first;
}

/* True if the rows of head h are rotated. */
static inline bool is_rotated_head(const fdma_problem *problem, int64_t h) {
    return h < problem->q_heads - problem->rotation.nope_heads;
}

/* The rotation of x alone; a rotation of k, in the place of x. */
fdma_problem fdma_rotation_of_q(const fdma_problem *both);
fdma_problem fdma_rotation_of_k(const fdma_problem *both);

static inline int64_t rotary_dim(const fdma_problem *problem) { return problem->rotary.shape[1]; }
