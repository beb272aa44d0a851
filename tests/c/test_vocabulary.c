/* test_vocabulary.c - every word of src/cpu/simd, in every vocabulary that this machine can run, on
 * ordinary and special numbers. It equals plain C bit by bit, or is near double precision if the
 * word is free to round. src/cpu/simd/scalar.h defines each word. */
#define _GNU_SOURCE /* mmap */

#include "fence.h"

#include "vocabulary/each.h"

#include <fenv.h>

static void vocabularies_are_named(void) {
    for (int i = 0; i < TEST_COUNT(vocabularies); i++) {
        const char *const missing = vocabularies[i].missing();
        if (missing != NULL) {
            printf("skipped the words of %s: this machine lacks %s\n", vocabularies[i].name,
                   missing);
        } else {
            CHECK(vocabularies[i].words->width >= 1 && vocabularies[i].words->width <= lanes);
        }
    }
}

/* ---- at the edges of memory ---- */

/* Loads and stores work with memory aligned to one element, and touch nothing around it. */
static void check_copies(const vocabulary *x) {
    uint64_t state = 1;
    float values[lanes];
    const int64_t shape[] = {x->width};
    for (int edge = 0; edge < fence_edges; edge++) {
        fill_any(values, &state);
        const fdma_tensor like = fdma_dense_tensor(values, FDMA_FLOAT32, 1, shape);
        const fdma_tensor from = fence_input(like, (fence_edge)edge);
        const fdma_tensor to = fence_output(like, (fence_edge)edge);
        memset(to.data, 0, bytes_of(to));
        x->copy(to.data, from.data);
        CHECK(same_tensor(to, from));
        x->set(to.data, values[0]);
        for (int i = 0; i < x->width; i++)
            check_lane("vf_set", i, ((const float *)to.data)[i], values[0]);
        fence_free_all();
    }
}

static void loads_and_stores(void) { on_each(check_copies); }

/* Loads and stores `count` elements of a dtype in memory of exactly that size. */
static void check_first(const vocabulary *x, fdma_dtype dtype, int64_t count, fence_edge edge) {
    uint64_t state = (uint64_t)count;
    float values[lanes];
    const int64_t shape[] = {count};
    fdma_tensor like = fdma_dense_tensor(NULL, dtype, 1, shape);
    like.data = test_alloc(bytes_of(like));
    fill_random(like, &state, 4);
    const fdma_tensor from = fence_input(like, edge), to = fence_output(like, edge);
    memset(values, 0x11, sizeof values);
    memset(to.data, 0, bytes_of(to));
    if (dtype == FDMA_FLOAT32) {
        x->load_first(values, from.data, count);
        x->copy_first(to.data, values, count);
    } else if (dtype == FDMA_FLOAT16) {
        x->load_f16(values, from.data, count);
        x->store_f16(to.data, values, count);
    } else {
        x->load_bf16(values, from.data, count);
        x->store_bf16(to.data, values, count);
    }
    CHECK(same_tensor(to, from)); /* to float32 and back changes nothing */
    for (int i = 0; i < x->width; i++) {
        const double want = i < count ? load_double(like.data, dtype, i) : 0;
        check_lane("the first lanes", i, values[i], (float)want);
    }
    fence_free_all();
}

/* Rows are multiples of 8 channels; vocabularies of up to 8 lanes rely on that. */
static void check_firsts(const vocabulary *x) {
    static const fdma_dtype dtypes[] = {FDMA_FLOAT32, FDMA_FLOAT16, FDMA_BFLOAT16};
    for (int type = 0; type < TEST_COUNT(dtypes); type++) {
        for (int edge = 0; edge < fence_edges; edge++) {
            for (int64_t count = 8; count < x->width; count += 8)
                check_first(x, dtypes[type], count, (fence_edge)edge);
            check_first(x, dtypes[type], x->width, (fence_edge)edge);
        }
    }
}

static void first_lanes(void) { on_each(check_firsts); }

/* ---- types ---- */

/* The nearest number of a 16-bit type, ties to even, by arithmetic on doubles. */
static uint16_t nearest16(float x, int fraction_bits, int least_exponent) {
    const long infinite = (3L - 2 * least_exponent) << fraction_bits;
    const long sign = signbit(x) ? 0x8000 : 0;
    const double size = fabs((double)x);
    long bits = infinite;
    if (isfinite(x)) {
        int exponent;
        frexp(size, &exponent); /* size < 2^exponent */
        exponent = exponent - 1 > least_exponent && size > 0 ? exponent - 1 : least_exponent;
        bits = (long)nearbyint(ldexp(size, fraction_bits - exponent)) +
               ((long)(exponent - least_exponent) << fraction_bits);
    }
    return (uint16_t)(sign | (bits < infinite ? bits : infinite));
}

/* Stores `width` numbers, with and without subnormals: only float32's subnormals may be lost. */
static void check_stores(const vocabulary *x, fdma_dtype dtype, const float *from) {
    const int half = dtype == FDMA_FLOAT16;
    for (int flush = 0; flush < 2; flush++) {
        uint16_t to[lanes];
        const uint32_t old = flush ? x->flush_subnormals() : 0;
        (half ? x->store_f16 : x->store_bf16)(to, from, x->width);
        if (flush)
            x->restore_modes(old);
        for (int i = 0; i < x->width; i++) {
            const int lost = flush && fabsf(from[i]) < FLT_MIN;
            const uint16_t want = nearest16(from[i], half ? 10 : 7, half ? -14 : -126);
            const int same = isnan(from[i]) ? isnan(load_double(to, dtype, i)) : to[i] == want;
            if (!CHECK(same || lost)) {
                printf("    %a to %s: is %04x, want %04x\n", (double)from[i], dtype_name(dtype),
                       to[i], want);
            }
        }
    }
}

/* Every number of the type, the midpoint between it and the next, and the floats beside that. */
static void check_all_stores(const vocabulary *x, fdma_dtype dtype) {
    float from[lanes];
    int count = 0;
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const uint16_t pair[2] = {(uint16_t)bits, (uint16_t)(bits + 1)};
        const double number = load_double(pair, dtype, 0), next = load_double(pair, dtype, 1);
        const float middle = (float)(isfinite(number) && isfinite(next) && (bits & 0x7fff) != 0x7fff
                                         ? (number + next) / 2
                                         : number);
        const float each[] = {(float)number, middle, nextafterf(middle, INFINITY),
                              nextafterf(middle, -INFINITY)};
        for (int i = 0; i < TEST_COUNT(each); i++) {
            from[count++] = each[i];
            if (count == x->width) {
                check_stores(x, dtype, from);
                count = 0;
            }
        }
    }
    uint64_t state = 3;
    for (int round = 0; round < rounds; round++) {
        fill_any(from, &state);
        check_stores(x, dtype, from);
    }
}

static void check_all_loads(const vocabulary *x, fdma_dtype dtype) {
    for (uint32_t first = 0; first < 0x10000; first += (uint32_t)x->width) {
        uint16_t from[lanes];
        float to[lanes];
        for (int i = 0; i < x->width; i++)
            from[i] = (uint16_t)(first + (uint32_t)i);
        (dtype == FDMA_FLOAT16 ? x->load_f16 : x->load_bf16)(to, from, x->width);
        for (int i = 0; i < x->width; i++)
            check_lane(dtype_name(dtype), i, to[i], (float)load_double(from, dtype, i));
    }
}

static void check_float16(const vocabulary *x) {
    check_all_loads(x, FDMA_FLOAT16);
    check_all_stores(x, FDMA_FLOAT16);
}

static void check_bfloat16(const vocabulary *x) {
    check_all_loads(x, FDMA_BFLOAT16);
    check_all_stores(x, FDMA_BFLOAT16);
}

static void float16_is_exact(void) { on_each(check_float16); }
static void bfloat16_is_exact(void) { on_each(check_bfloat16); }

/* ---- arithmetic ---- */

static float plain_add(float a, float b) { return a + b; }
static float plain_sub(float a, float b) { return a - b; }
static float plain_mul(float a, float b) { return a * b; }
static float plain_div(float a, float b) { return a / b; }
static float plain_max(float a, float b) { return a > b ? a : b; }
static float plain_copy_sign(float size, float sign) {
    return bits_to_float((float_to_bits(size) & 0x7fffffff) | (float_to_bits(sign) & 0x80000000));
}

static void check_pairs(const vocabulary *x) {
    const struct {
        const char *name;
        void (*word)(float *, const float *, const float *);
        float (*plain)(float, float);
    } words[] = {
        {"vf_add", x->add, plain_add}, {"vf_sub", x->sub, plain_sub},
        {"vf_mul", x->mul, plain_mul}, {"vf_div", x->div, plain_div},
        {"vf_max", x->max, plain_max}, {"vf_copy_sign", x->copy_sign, plain_copy_sign},
    };
    uint64_t state = 5;
    for (int round = 0; round < rounds; round++) {
        float a[lanes], b[lanes], to[lanes];
        fill_any(a, &state);
        fill_any(b, &state);
        for (int w = 0; w < TEST_COUNT(words); w++) {
            words[w].word(to, a, b);
            for (int i = 0; i < x->width; i++)
                check_lane(words[w].name, i, to[i], words[w].plain(a[i], b[i]));
        }
        x->abs(to, a);
        for (int i = 0; i < x->width; i++)
            check_lane("vf_abs", i, to[i], plain_copy_sign(a[i], 1));
    }
}

static void operations_are_exact(void) { on_each(check_pairs); }

/* A fused result is rounded once; otherwise the product is rounded first. */
static void check_fused(const vocabulary *x) {
    uint64_t state = 7;
    for (int round = 0; round < rounds; round++) {
        float a[lanes], b[lanes], c[lanes], to[lanes];
        fill_any(a, &state);
        fill_any(b, &state);
        fill_any(c, &state);
        x->fma(to, a, b, c);
        for (int i = 0; i < x->width; i++) {
            const volatile float product = a[i] * b[i]; /* volatile: no compiler may fuse it */
            if (!is_same(to[i], product + c[i]))
                check_lane("vf_fma", i, to[i], fmaf(a[i], b[i], c[i]));
        }
    }
    CHECK(1);
}

/* The products are far from subnormal numbers, so that their rounding errors are numbers too. */
static void check_rounding_errors(const vocabulary *x) {
    uint64_t state = 9;
    for (int round = 0; round < rounds; round++) {
        float a[lanes], b[lanes], product[lanes], to[lanes];
        for (int i = 0; i < lanes; i++) {
            a[i] = random_float(&state);
            b[i] = 100 * random_float(&state);
            product[i] = a[i] * b[i];
        }
        x->rounding_error(to, a, b, product);
        for (int i = 0; i < x->width; i++) {
            const double error = (double)a[i] * (double)b[i] - (double)product[i];
            check_lane("vf_rounding_error", i, to[i], (float)error);
        }
    }
}

static void rounding_errors_are_exact(void) { on_each(check_rounding_errors); }

static void products_are_summed(void) { on_each(check_fused); }

static void check_sums(const vocabulary *x) {
    uint64_t state = 11;
    for (int round = 0; round < rounds; round++) {
        float whole[lanes], any[lanes];
        double sum = 0, exact = 0, size = 0;
        for (int i = 0; i < x->width; i++) {
            whole[i] = (float)random_below(&state, 2001) - 1000;
            any[i] = random_float(&state);
            exact += (double)whole[i];
            sum += (double)any[i];
            size += fabs((double)any[i]);
        }
        CHECK_NEAR((double)x->sum(whole), exact, 0);
        CHECK_NEAR((double)x->sum(any), sum, (x->width - 1) * size * (double)FLT_EPSILON / 2);
        const int lane = (int)random_below(&state, x->width);
        whole[lane] = round % 2 ? INFINITY : -INFINITY;
        CHECK(x->sum(whole) == whole[lane]);
        whole[lane] = NAN;
        CHECK(isnan(x->sum(whole)));
    }
}

static void lanes_are_summed(void) { on_each(check_sums); }

/* ---- comparisons and lanes ---- */

static void check_greater(const vocabulary *x) {
    uint64_t state = 13;
    for (int round = 0; round < rounds; round++) {
        float a[lanes], b[lanes], yes[lanes], no[lanes], to[lanes];
        fill_any(a, &state);
        fill_any(b, &state);
        fill_any(yes, &state);
        fill_any(no, &state);
        int any = 0;
        for (int i = 0; i < x->width; i++) {
            a[i] = round % 3 == 0 && !isnan(b[i]) ? b[i] : a[i]; /* b is nowhere greater */
            any |= a[i] > b[i];
        }
        CHECK_INT(x->any_greater(a, b), any);
        x->pick_greater(to, a, b, yes, no);
        for (int i = 0; i < x->width; i++)
            check_lane("vf_pick_greater", i, to[i], a[i] > b[i] ? yes[i] : no[i]);
    }
    for (int lane = 0; lane < x->width; lane++) { /* one lane alone counts */
        float a[lanes] = {0};
        const float b[lanes] = {0};
        CHECK(!x->any_greater(a, b));
        a[lane] = 0x1p-100F;
        CHECK(x->any_greater(a, b));
        a[lane] = NAN;
        CHECK(!x->any_greater(a, b) && !x->any_greater(b, a));
    }
}

static void comparisons_are_exact(void) { on_each(check_greater); }

static void check_range(const vocabulary *x, int32_t first, int32_t end) {
    uint64_t state = 17;
    float from[lanes], to[lanes];
    fill_any(from, &state);
    x->keep(to, from, first, end);
    for (int i = 0; i < x->width; i++)
        check_lane("vf_keep", i, to[i], i >= first && i < end ? from[i] : -INFINITY);
}

static void check_ranges(const vocabulary *x) {
    static const int32_t far[] = {INT32_MIN, INT32_MIN + 1, -1000, 1000, INT32_MAX};
    const int32_t beyond = x->width + 2;
    for (int32_t first = -2; first <= beyond; first++) {
        for (int32_t end = -2; end <= beyond; end++)
            check_range(x, first, end);
        for (int f = 0; f < TEST_COUNT(far); f++) {
            check_range(x, first, far[f]);
            check_range(x, far[f], first);
            check_range(x, far[f], far[TEST_COUNT(far) - 1 - f]);
        }
    }
}

static void ranges_of_lanes_are_kept(void) { on_each(check_ranges); }

static void check_transposed(const vocabulary *x) {
    static float from[lanes * lanes], to[lanes * lanes];
    uint64_t state = 19;
    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < x->width * x->width; i++)
            to[i] = from[i] = round == 0 ? (float)i : any_float(&state);
        x->transpose(to);
        for (int i = 0; i < x->width * x->width; i++)
            check_lane("vf_transpose", i, to[i], from[i % x->width * x->width + i / x->width]);
    }
}

static void rows_become_columns(void) { on_each(check_transposed); }

/* ---- powers of 2 ---- */

/* 2^x as the kernels compute it, with the C library's 2^f in place of their polynomial. */
static void powers_of(const vocabulary *x, float *to, const float *from) {
    float fraction[lanes], power[lanes];
    x->fraction(fraction, from);
    for (int i = 0; i < x->width; i++) {
        CHECK(isnan(from[i]) ? isnan(fraction[i]) : fraction[i] >= 0 && fraction[i] <= 1);
        power[i] = (float)exp2((double)fraction[i]);
    }
    x->scale2(to, power, from);
}

/* 2^f is rounded once, by half of FLT_EPSILON at most. The fraction of a number just below a whole
 * one is rounded by up to 2^-25. Scaling is exact. */
static void check_power(float actual, float x) {
    const double want = exp2((double)x);
    if (isnan(x))
        CHECK(isnan(actual));
    else if (x >= 128)
        CHECK(actual == INFINITY);
    else if (x < -126)
        CHECK(actual == 0 || fabs((double)actual - want) <= want * (double)FLT_EPSILON + 0x1p-149);
    else
        CHECK_NEAR((double)actual, want, want * (double)FLT_EPSILON);
}

static void check_powers(const vocabulary *x) {
    uint64_t state = 23;
    for (int round = 0; round < rounds; round++) {
        float from[lanes], to[lanes];
        fill_any(from, &state);
        for (int i = 0; i < x->width; i++)
            from[i] = i % 3 ? from[i] : 140 * random_float(&state);
        powers_of(x, to, from);
        for (int i = 0; i < x->width; i++)
            check_power(to[i], from[i]);
    }
    for (int n = -126; n < 128; n++) { /* whole powers, and the same with an exact remainder */
        float whole[lanes], rest[lanes], to[lanes], sized[lanes];
        for (int i = 0; i < lanes; i++) {
            whole[i] = (float)n;
            rest[i] = (float)n + 0.75F;
            sized[i] = 1.5F;
        }
        powers_of(x, to, whole);
        check_lane("2^n", n, to[x->width - 1], ldexpf(1, n));
        x->scale2(to, sized, rest);
        check_lane("vf_scale2", n, to[x->width - 1], ldexpf(1.5F, n));
    }
}

static void powers_of_two(void) { on_each(check_powers); }

/* ---- subnormal numbers ---- */

/* While subnormals are flushed they may count as 0; afterwards they are kept as before. */
static void check_flushed(const vocabulary *x) {
    float small[lanes], factor[lanes], tiny[lanes], up[lanes], to[lanes];
    for (int i = 0; i < lanes; i++) {
        small[i] = FLT_MIN;
        factor[i] = 0.5F;
        tiny[i] = 0x1p-140F;
        up[i] = 0x1p30F;
    }
    for (int round = 0; round < 2; round++) {
        float half[lanes], scaled[lanes];
        const uint32_t old = x->flush_subnormals();
        x->mul(half, small, factor);
        x->mul(scaled, tiny, up);
        x->restore_modes(old);
        for (int i = 0; i < x->width; i++) {
            CHECK(half[i] == 0 || half[i] == 0x1p-127F);
            CHECK(scaled[i] == 0 || scaled[i] == 0x1p-110F);
        }
        x->mul(to, small, factor);
        for (int i = 0; i < x->width; i++)
            check_lane("restore_modes", i, to[i], 0x1p-127F);
        x->mul(to, tiny, up);
        check_lane("restore_modes", 0, to[0], 0x1p-110F);
    }
}

/* With any rounding direction of the caller, both words round to nearest, and one keeps
 * subnormals. */
static void check_modes(const vocabulary *x) {
    float one[lanes], third[lanes], small[lanes], factor[lanes], to[lanes];
    for (int i = 0; i < lanes; i++) {
        one[i] = 1;
        third[i] = 3;
        small[i] = FLT_MIN;
        factor[i] = 0.5F;
    }
    uint32_t (*const modes[])(void) = {x->keep_subnormals, x->flush_subnormals};
    for (int mode = 0; mode < TEST_COUNT(modes); mode++) {
        float before[lanes], quotient[lanes], half[lanes];
        fesetround(FE_DOWNWARD);
        x->div(before, one, third);
        const uint32_t old = modes[mode]();
        x->div(quotient, one, third);
        x->mul(half, small, factor);
        x->restore_modes(old);
        x->div(to, one, third);
        fesetround(FE_TONEAREST);
        check_lane("quotient after", 0, to[0], before[0]);
        for (int i = 0; i < x->width && x->width > 1; i++) {
            check_lane("quotient", i, quotient[i], 1 / 3.0F);
            CHECK(mode == 1 || half[i] == 0x1p-127F);
        }
    }
}

static void callers_modes_do_not_show(void) { on_each(check_modes); }

static void flushing_is_undone(void) { on_each(check_flushed); }

static const test_entry tests[] = {
    TEST(vocabularies_are_named),    TEST(loads_and_stores),    TEST(first_lanes),
    TEST(float16_is_exact),          TEST(bfloat16_is_exact),   TEST(operations_are_exact),
    TEST(products_are_summed),       TEST(lanes_are_summed),    TEST(comparisons_are_exact),
    TEST(ranges_of_lanes_are_kept),  TEST(rows_become_columns), TEST(powers_of_two),
    TEST(rounding_errors_are_exact), TEST(flushing_is_undone),  TEST(callers_modes_do_not_show),
};

int main(void) {
    fence_watch();
    return test_run(tests, TEST_COUNT(tests));
}
