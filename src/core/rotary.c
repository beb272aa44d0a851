/* The checks of a rotary embedding, and the frequencies of its table. */
#include "core/rotary.h"

#include "core/element.h"
#include "core/error.h"

fdma_status fdma_check_rotary(const fdma_problem *problem) {
    const int64_t dim = rotary_dim(problem), rows = problem->rotary.shape[0];
    const int64_t positions = INT64_C(1) << 31;
    FDMA_REQUIRE(rows <= positions, FDMA_INVALID_ARGUMENT,
                 "rotary: axis 0 has %lld elements, want at most %lld", (long long)rows,
                 (long long)positions);
    FDMA_REQUIRE(problem->rotation.first >= 0 && problem->rotation.first <= positions - rows,
                 FDMA_INVALID_ARGUMENT, "first: is %lld, want 0 to %lld with the rows of rotary",
                 (long long)problem->rotation.first, (long long)(positions - rows));
    if (problem->operation == operation_rotary_table) {
        FDMA_REQUIRE(dim >= 2 && dim <= 2 * most_pairs && dim % 2 == 0, FDMA_INVALID_ARGUMENT,
                     "rotary: axis 1 has %s, want an even number from 2 to %d",
                     fdma_count_text(dim, "element").text, 2 * most_pairs);
        FDMA_REQUIRE(problem->rotation.first == 0 || !is_present(&problem->positions),
                     FDMA_INVALID_ARGUMENT, "first: is %lld, want 0 with positions",
                     (long long)problem->rotation.first);
        return FDMA_OK;
    }
    FDMA_REQUIRE(dim >= 2 && dim <= problem->head_dim && dim % 2 == 0, FDMA_INVALID_ARGUMENT,
                 "rotary: axis 1 has %lld elements, want an even number from 2 to head_dim, %lld",
                 (long long)dim, (long long)problem->head_dim);
    FDMA_REQUIRE(problem->rotation.nope_heads >= 0 &&
                     problem->rotation.nope_heads <= problem->q_heads,
                 FDMA_INVALID_ARGUMENT, "nope_heads: is %lld, want 0 to heads, %lld",
                 (long long)problem->rotation.nope_heads, (long long)problem->q_heads);
    FDMA_REQUIRE(problem->rotation.k_nope_heads >= 0 &&
                     problem->rotation.k_nope_heads <= problem->kv_heads,
                 FDMA_INVALID_ARGUMENT, "k_nope_heads: is %lld, want 0 to kv_heads, %lld",
                 (long long)problem->rotation.k_nope_heads, (long long)problem->kv_heads);
    if (!is_present(&problem->positions))
        return FDMA_OK;
    FDMA_REQUIRE(!is_present(&problem->starts), FDMA_INVALID_ARGUMENT,
                 "starts: is given, want none with positions");
    FDMA_REQUIRE(problem->rotation.offset == 0, FDMA_INVALID_ARGUMENT,
                 "offset: is %lld, want 0 with positions", (long long)problem->rotation.offset);
    return FDMA_OK;
}

/* Checks `positions`, which is in host memory. */
static fdma_status check_every_position(const fdma_problem *problem) {
    const fdma_tensor *const positions = &problem->positions;
    const int64_t first = problem->rotation.first, last = first + problem->rotary.shape[0] - 1;
    for (int64_t b = 0; b < positions->shape[0]; b++) {
        const int32_t *const row = int_at(positions, b, 0, 0);
        for (int64_t i = 0; i < positions->shape[1]; i++)
            FDMA_REQUIRE(row[i] >= first && row[i] <= last, FDMA_INVALID_ARGUMENT,
                         "positions: element [%lld, %lld] is %d, want %lld to %lld, the positions "
                         "of rotary",
                         (long long)b, (long long)i, row[i], (long long)first, (long long)last);
    }
    return FDMA_OK;
}

/* Rows of the longest sequence of `starts`, which is in host memory. Rows after the last sequence
 * have the position of a first row. */
static int64_t longest_sequence(const fdma_problem *problem) {
    const int32_t *const starts = problem->starts.data;
    int64_t longest = min(problem->q_len, 1);
    for (int64_t n = 0; n + 1 < problem->starts.shape[0]; n++)
        longest = max(longest, starts[n + 1] - starts[n]);
    return longest;
}

fdma_status fdma_check_positions(const fdma_problem *problem, check_depth depth) {
    const rotary_options *const options = &problem->rotation;
    const bool readable = depth == check_all && problem->exec.device == FDMA_CPU;
    const bool packed = is_present(&problem->starts);
    if (is_present(&problem->positions))
        return readable && problem->q_len > 0 ? check_every_position(problem) : FDMA_OK;
    FDMA_REQUIRE(options->offset >= options->first, FDMA_INVALID_ARGUMENT,
                 "offset: is %lld, want first, %lld, or more", (long long)options->offset,
                 (long long)options->first);
    if (packed && !readable)
        return FDMA_OK;
    const int64_t rows = packed ? longest_sequence(problem) : problem->q_len;
    const int64_t want = rows > 0 ? options->offset - options->first + rows : 0;
    FDMA_REQUIRE(problem->rotary.shape[0] >= want, FDMA_INVALID_ARGUMENT,
                 "rotary: axis 0 has %s, want %lld or more: the last position is %lld",
                 fdma_count_text(problem->rotary.shape[0], "element").text, (long long)want,
                 (long long)(options->first + want - 1));
    return FDMA_OK;
}

/* ---- the rotations of a call ---- */

fdma_problem fdma_rotation_of_q(const fdma_problem *both) {
    const fdma_tensor absent = {0};
    fdma_problem one = *both;
    one.k = one.dk = one.k_out = one.dk_out = one.k_weight = one.dk_weight = absent;
    one.kv_heads = one.rotation.k_nope_heads = 0;
    return one;
}

fdma_problem fdma_rotation_of_k(const fdma_problem *both) {
    fdma_problem one = fdma_rotation_of_q(both);
    one.x = both->k;
    one.out = both->k_out;
    one.dout = both->dk_out;
    one.dx = both->dk;
    one.weight = both->k_weight;
    one.dweight = both->dk_weight;
    one.q_heads = both->kv_heads;
    one.rotation.nope_heads = both->rotation.k_nope_heads;
    return one;
}

/* ---- frequencies ---- */

/* A number as the sum of two doubles; the second is less than the last bit of the first. */
typedef struct long_number {
    double high, low;
} long_number;

static long_number multiply(long_number a, long_number b) {
    const double product = a.high * b.high;
    const double rest = fma(a.high, b.high, -product) + (a.high * b.low + a.low * b.high);
    const double high = product + rest;
    return (long_number){high, rest - (high - product)};
}

static long_number power(long_number a, int64_t exponent) {
    long_number result = {1, 0};
    for (int64_t n = 0; n < exponent; n++)
        result = multiply(result, a);
    return result;
}

/* base^(-1 / pairs). A step of Newton's doubles the bits of pow(). */
static long_number ratio_of(double base, int64_t pairs) {
    const long_number near = {pow(base, -1 / (double)pairs), 0};
    const long_number one = multiply(power(near, pairs), (long_number){base, 0});
    const double excess = (one.high - 1 + one.low) / (double)pairs;
    return multiply(near, (long_number){1, -excess});
}

void fdma_find_frequencies(const fdma_problem *problem, rotary_frequencies *frequencies) {
    const int64_t pairs = rotary_dim(problem) / 2;
    const bool given = is_present(&problem->inv_freq);
    const long_number ratio = given ? (long_number){0, 0} : ratio_of(problem->rotation.base, pairs);
    long_number next = {1, 0};
    for (int64_t d = 0; d < pairs; d++) {
        frequencies->high[d] = given ? fdma_load(&problem->inv_freq, d) : next.high;
        frequencies->low[d] = given ? 0 : next.low;
        next = multiply(next, ratio);
    }
}
