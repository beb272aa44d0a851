/* test_vocabulary.c - every word of src/cpu/simd, in every vocabulary that this machine can run, on
 * ordinary and special numbers. It equals plain C bit by bit, or is near double precision if the
 * word is free to round. src/cpu/simd/scalar.h defines each word. Also the elementary functions of
 * src/cpu/common/math.h, and the words of bfloat16 pairs. */
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
static void loads_and_stores(const vocabulary *x) {
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
static void first_lanes(const vocabulary *x) {
    static const fdma_dtype dtypes[] = {FDMA_FLOAT32, FDMA_FLOAT16, FDMA_BFLOAT16};
    for (int type = 0; type < TEST_COUNT(dtypes); type++) {
        for (int edge = 0; edge < fence_edges; edge++) {
            for (int64_t count = 8; count < x->width; count += 8)
                check_first(x, dtypes[type], count, (fence_edge)edge);
            check_first(x, dtypes[type], x->width, (fence_edge)edge);
        }
    }
}

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

static void float16_is_exact(const vocabulary *x) {
    check_all_loads(x, FDMA_FLOAT16);
    check_all_stores(x, FDMA_FLOAT16);
}

static void bfloat16_is_exact(const vocabulary *x) {
    check_all_loads(x, FDMA_BFLOAT16);
    check_all_stores(x, FDMA_BFLOAT16);
}

/* ---- arithmetic ---- */

static float plain_add(float a, float b) { return a + b; }
static float plain_sub(float a, float b) { return a - b; }
static float plain_mul(float a, float b) { return a * b; }
static float plain_div(float a, float b) { return a / b; }
static float plain_max(float a, float b) { return a > b ? a : b; }
static float plain_copy_sign(float size, float sign) {
    return bits_to_float((float_to_bits(size) & 0x7fffffff) | (float_to_bits(sign) & 0x80000000));
}

static void operations_are_exact(const vocabulary *x) {
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

/* A fused result is rounded once; otherwise the product is rounded first. */
static void products_are_summed(const vocabulary *x) {
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
static void rounding_errors_are_exact(const vocabulary *x) {
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

static void lanes_are_summed(const vocabulary *x) {
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

/* ---- comparisons and lanes ---- */

static void comparisons_are_exact(const vocabulary *x) {
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

static void check_range(const vocabulary *x, int32_t first, int32_t end) {
    uint64_t state = 17;
    float from[lanes], to[lanes];
    fill_any(from, &state);
    x->keep(to, from, first, end);
    for (int i = 0; i < x->width; i++)
        check_lane("vf_keep", i, to[i], i >= first && i < end ? from[i] : -INFINITY);
}

static void ranges_of_lanes_are_kept(const vocabulary *x) {
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

static void rows_become_columns(const vocabulary *x) {
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

static void powers_of_two(const vocabulary *x) {
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

/* ---- subnormal numbers ---- */

/* While subnormals are flushed they may count as 0; afterwards they are kept as before. */
static void flushing_is_undone(const vocabulary *x) {
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
static void callers_modes_do_not_show(const vocabulary *x) {
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

/* ---- whole rows and masks ---- */

static void even_and_odd_channels_are_told_apart(const vocabulary *x) {
    for (uint32_t first = 0; first < 0x10000; first += (uint32_t)x->width) {
        uint16_t from[2 * lanes];
        float even[lanes], odd[lanes];
        for (int i = 0; i < x->width; i++) {
            from[2 * i] = (uint16_t)(first + (uint32_t)i);
            from[2 * i + 1] = (uint16_t)~from[2 * i];
        }
        x->load_even_odd_bf16(even, odd, from);
        for (int i = 0; i < x->width; i++) {
            check_lane("even", i, even[i], (float)load_double(from, FDMA_BFLOAT16, 2 * i));
            check_lane("odd", i, odd[i], (float)load_double(from, FDMA_BFLOAT16, 2 * i + 1));
        }
    }
}

/* The sum of each row is in its own lane, and near the sum in double precision. */
static void rows_are_summed(const vocabulary *x) {
    static float rows[lanes * lanes];
    uint64_t state = 12;
    for (int round = 0; round < 100; round++) {
        float to[lanes];
        for (int i = 0; i < x->width * x->width; i++)
            rows[i] = random_float(&state);
        x->sum_each(to, rows);
        for (int i = 0; i < x->width; i++) {
            double sum = 0, size = 0;
            for (int n = 0; n < x->width; n++) {
                sum += (double)rows[i * x->width + n];
                size += fabs((double)rows[i * x->width + n]);
            }
            CHECK_NEAR((double)to[i], sum, (x->width - 1) * size * (double)FLT_EPSILON / 2);
        }
    }
}

static void keep_bits_keeps_lanes(const vocabulary *x) {
    uint64_t state = 19;
    float from[lanes], to[lanes];
    fill_any(from, &state);
    for (int n = 0; n < 100; n++) {
        const uint32_t bits = n < 2 ? -(uint32_t)n : (uint32_t)random_bits(&state);
        x->keep_bits(to, from, bits);
        for (int i = 0; i < x->width; i++)
            check_lane("vf_keep_bits", i, to[i], bits >> i & 1 ? from[i] : -INFINITY);
    }
}

/* One nonzero byte, random bytes, and an address of any alignment. */
static void bytes_become_bits(const vocabulary *x) {
    uint64_t state = 21;
    uint8_t bytes[80] = {0};
    for (int n = 0; n < 64; n++) {
        bytes[3 + n] = (uint8_t)(1 << n % 8);
        CHECK(x->nonzero_bytes(bytes + 3) == UINT64_C(1) << n);
        bytes[3 + n] = 0;
    }
    for (int round = 0; round < 100; round++) {
        uint64_t want = 0;
        for (int n = 0; n < 64; n++) {
            bytes[round % 16 + n] = random_bits(&state) % 3 == 0 ? (uint8_t)random_bits(&state) : 0;
            want |= (uint64_t)(bytes[round % 16 + n] != 0) << n;
        }
        CHECK(x->nonzero_bytes(bytes + round % 16) == want);
    }
}

/* ---- elementary functions ---- */

typedef struct function_case {
    const char *name;
    void (*function)(float *, const float *);
    double (*exact)(double);
    float first, last; /* the range of arguments */
    double error;      /* the relative error that math.h promises */
} function_case;

static void check_function(const vocabulary *x, const function_case *f) {
    enum { samples = 200000 };
    int wrong = 0;
    for (int n = 0; n < samples; n += x->width) {
        float from[lanes], to[lanes];
        for (int i = 0; i < x->width; i++)
            from[i] = f->first + (f->last - f->first) * (float)(n + i) / (samples + lanes);
        f->function(to, from);
        for (int i = 0; i < x->width; i++) {
            const double exact = f->exact((double)from[i]);
            wrong += !(fabs((double)to[i] - exact) <= f->error * fabs(exact));
        }
    }
    test_context("%s of %d lanes", f->name, x->width);
    CHECK_INT(wrong, 0);
}

static void functions_are_as_near_as_promised(const vocabulary *x) {
    const function_case functions[] = {
        {"exp2_of", x->exp2, exp2, -125, 127.9F, 2e-7},
        {"exp_of", x->exp, exp, -87, 88, 2.5e-7},
        {"log1p_of", x->log1p, log1p, 1e-6F, 1, 2.5e-7},
        {"tanh_of", x->tanh, tanh, 1e-6F, 12, 2.5e-7},
    };
    for (int f = 0; f < TEST_COUNT(functions); f++)
        check_function(x, &functions[f]);
}

/* ---- bfloat16 pairs ---- */

/* The pair vocabularies of this build's architecture. */
#if defined(FDMA_HAVE_AVX512BF16)
static const pair_vocabulary *const pairs = &vocabulary_avx512bf16;
static const char *missing_pairs(void) { return fdma_missing_avx512bf16(); }
#elif defined(FDMA_HAVE_NEONBF16)
static const pair_vocabulary *const pairs = &vocabulary_neonbf16;
static const char *missing_pairs(void) { return fdma_missing_neonbf16(); }
#else
static const pair_vocabulary *const pairs = NULL;
static const char *missing_pairs(void) { return "a build with kernels of bfloat16 pairs"; }
#endif

/* Rounds to the nearest even; subnormal numbers, before or after, become 0. */
static uint32_t rounded(float x) {
    const uint32_t bits = float_to_bits(x), sign = bits & 0x80000000;
    if (isnan(x))
        return bits >> 16 | 0x40;
    if (fabsf(x) < FLT_MIN)
        return sign >> 16;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static void check_bits(const char *word, int lane, float actual, uint32_t want) {
    if (!CHECK(float_to_bits(actual) == want))
        printf("    %s, lane %d: is %08x, want %08x\n", word, lane, float_to_bits(actual), want);
}

static void halves_are_rounded_and_told_apart(void) {
    const pair_vocabulary *x = pairs;
    uint64_t state = 5;
    for (int round = 0; round < rounds; round++) {
        float even[lanes], odd[lanes], word[lanes], low[lanes], high[lanes];
        fill_any(even, &state);
        fill_any(odd, &state);
        x->join(word, even, odd);
        x->even(low, word);
        x->odd(high, word);
        for (int i = 0; i < x->width; i++) {
            check_bits("vf_join", i, word[i], rounded(odd[i]) << 16 | rounded(even[i]));
            check_bits("vf_even", i, low[i], rounded(even[i]) << 16);
            check_bits("vf_odd", i, high[i], rounded(odd[i]) << 16);
        }
    }
}

/* The nearest bfloat16 of a number that is not negative; of two, either. */
static void check_weight(int lane, float x, uint32_t half) {
    const bool tie = (float_to_bits(x) & 0xffff) == 0x8000;
    if (isnan(x))
        return; // the sum of the weights is NaN
    if (x < FLT_MIN)
        CHECK(half <= rounded(FLT_MIN));
    else if (!CHECK(half == rounded(x) || (tie && half == (float_to_bits(x) + 0x8000) >> 16)))
        printf("    vf_join_weights, lane %d: %g becomes %04x\n", lane, (double)x, half);
}

static void weights_are_rounded(void) {
    const pair_vocabulary *x = pairs;
    uint64_t state = 9;
    for (int round = 0; round < rounds; round++) {
        float even[lanes], odd[lanes], word[lanes];
        fill_any(even, &state);
        fill_any(odd, &state);
        for (int i = 0; i < lanes; i++) {
            even[i] = fabsf(even[i]);
            odd[i] = fabsf(odd[i]);
        }
        x->join_weights(word, even, odd);
        for (int i = 0; i < x->width; i++) {
            check_weight(i, even[i], float_to_bits(word[i]) & 0xffff);
            check_weight(i, odd[i], float_to_bits(word[i]) >> 16);
        }
    }
}

/* The words convert adjacent numbers, and write nothing beyond them. */
static void terms_are_rounded(void) {
    const pair_vocabulary *x = pairs;
    uint64_t state = 8;
    for (int round = 0; round < rounds; round++) {
        float from[lanes], words[lanes];
        fill_any(from, &state);
        for (int i = 0; i < lanes; i++)
            words[i] = 1;
        x->store_terms(words, from);
        for (int i = 0; i < x->width / 2; i++) {
            check_bits("vf_store_terms", i, words[i],
                       rounded(from[2 * i + 1]) << 16 | rounded(from[2 * i]));
        }
        CHECK(words[x->width / 2] == 1);
    }
}

/* Rows are multiples of 8 channels: a longer vector may end with fewer, or lie past the end. */
static void rows_are_paired(void) {
    const pair_vocabulary *x = pairs;
    uint64_t state = 6;
    for (int64_t count = x->width < 8 ? x->width : 0; count <= x->width; count += 8) {
        uint16_t *even = test_alloc((size_t)count * 2), *odd = test_alloc((size_t)count * 2);
        float word[lanes];
        for (int64_t i = 0; i < count; i++) {
            even[i] = (uint16_t)random_bits(&state);
            odd[i] = (uint16_t)random_bits(&state);
        }
        x->load_pairs(word, even, odd, count);
        for (int i = 0; i < x->width; i++) {
            check_bits("vf_load_pairs", i, word[i],
                       i < count ? (uint32_t)odd[i] << 16 | even[i] : 0);
        }
        test_free_all();
    }
}

static void channels_of_two_rows_are_paired(void) {
    const pair_vocabulary *x = pairs;
    uint64_t state = 9;
    for (int round = 0; round < rounds; round++) {
        uint16_t first[2 * lanes], second[2 * lanes];
        float even[lanes], odd[lanes];
        for (int i = 0; i < 2 * lanes; i++) {
            first[i] = (uint16_t)random_bits(&state);
            second[i] = (uint16_t)random_bits(&state);
        }
        x->load_even_odd_pairs(even, odd, first, second);
        for (int i = 0; i < x->width; i++) {
            check_bits("even", i, even[i], (uint32_t)second[2 * i] << 16 | first[2 * i]);
            check_bits("odd", i, odd[i], (uint32_t)second[2 * i + 1] << 16 | first[2 * i + 1]);
        }
    }
}

/* Products of bfloat16 are exact in double precision. Each of the two additions is off by less than
 * a unit in the last place of its sum, with any rounding direction. */
static void dots_are_sums_of_products(void) {
    const pair_vocabulary *x = pairs;
    uint64_t state = 7;
    for (int round = 0; round < rounds; round++) {
        float term[4][lanes], a[lanes], b[lanes], sum[lanes], to[lanes];
        for (int i = 0; i < lanes; i++) {
            for (int p = 0; p < 4; p++)
                term[p][i] = bits_to_float(rounded(8 * random_float(&state)) << 16);
            sum[i] = 100 * random_float(&state);
        }
        x->join(a, term[0], term[1]);
        x->join(b, term[2], term[3]);
        x->dot(to, a, b, sum); /* the first word of a, every word of b */
        for (int i = 0; i < x->width; i++) {
            const double even = (double)term[0][0] * (double)term[2][i];
            const double odd = (double)term[1][0] * (double)term[3][i];
            const double size = fabs(even) + fabs(odd) + fabs((double)sum[i]);
            const double step = (double)FLT_EPSILON;
            CHECK_NEAR((double)to[i], (double)sum[i] + even + odd, (2 + step) * step * size);
        }
        x->dot_lanes(to, a, b, sum); /* every word of both */
        for (int i = 0; i < x->width; i++) {
            const double even = (double)term[0][i] * (double)term[2][i];
            const double odd = (double)term[1][i] * (double)term[3][i];
            const double size = fabs(even) + fabs(odd) + fabs((double)sum[i]);
            const double step = (double)FLT_EPSILON;
            CHECK_NEAR((double)to[i], (double)sum[i] + even + odd, (2 + step) * step * size);
        }
    }
}

static void dots_of_special_numbers(void) {
    static const struct {
        float even, odd, sum, want; /* of even * 1 + odd * 2^20 + sum */
    } cases[] = {
        {0x1p-130F, 0x1p-130F, 0x1p-130F, 0}, /* subnormal numbers count as 0 */
        {0x1p-126F, 0, -0x1p-127F, 0x1p-126F},
        {INFINITY, 1, 1, INFINITY},
        {1, -INFINITY, 1, -INFINITY},
        {INFINITY, -INFINITY, 1, NAN},
        {1, 1, -INFINITY, -INFINITY},
        {INFINITY, 1, -INFINITY, NAN},
        {1, NAN, 1, NAN},
        {1, 1, NAN, NAN},
        {0, 0x1p127F, 0, INFINITY},        /* an infinite product */
        {0x1p127F, 0, 0x1p127F, INFINITY}, /* an infinite sum */
    };
    const pair_vocabulary *x = pairs;
    float one[lanes], factor[lanes], b[lanes];
    for (int i = 0; i < lanes; i++) {
        one[i] = 1;
        factor[i] = 0x1p20F;
    }
    x->join(b, one, factor);
    for (int c = 0; c < TEST_COUNT(cases); c++) {
        float a[lanes], sum[lanes], to[lanes];
        for (int i = 0; i < lanes; i++) { /* as words: conversion loses subnormal numbers */
            a[i] = bits_to_float((float_to_bits(cases[c].odd) & 0xffff0000) |
                                 float_to_bits(cases[c].even) >> 16);
            sum[i] = cases[c].sum;
        }
        x->dot(to, a, b, sum);
        for (int i = 0; i < x->width; i++)
            check_lane("vf_dot", i, to[i], cases[c].want);
    }
}

static const test_entry tests[] = {
    TEST(vocabularies_are_named),
    EACH_VOCABULARY(loads_and_stores),
    EACH_VOCABULARY(first_lanes),
    EACH_VOCABULARY(float16_is_exact),
    EACH_VOCABULARY(bfloat16_is_exact),
    EACH_VOCABULARY(operations_are_exact),
    EACH_VOCABULARY(products_are_summed),
    EACH_VOCABULARY(lanes_are_summed),
    EACH_VOCABULARY(comparisons_are_exact),
    EACH_VOCABULARY(ranges_of_lanes_are_kept),
    EACH_VOCABULARY(rows_become_columns),
    EACH_VOCABULARY(powers_of_two),
    EACH_VOCABULARY(rounding_errors_are_exact),
    EACH_VOCABULARY(flushing_is_undone),
    EACH_VOCABULARY(callers_modes_do_not_show),
    EACH_VOCABULARY(even_and_odd_channels_are_told_apart),
    EACH_VOCABULARY(rows_are_summed),
    EACH_VOCABULARY(keep_bits_keeps_lanes),
    EACH_VOCABULARY(bytes_become_bits),
    EACH_VOCABULARY(functions_are_as_near_as_promised),
};

static const test_entry pair_tests[] = {
    TEST(halves_are_rounded_and_told_apart),
    TEST(weights_are_rounded),
    TEST(terms_are_rounded),
    TEST(rows_are_paired),
    TEST(dots_are_sums_of_products),
    TEST(dots_of_special_numbers),
    TEST(channels_of_two_rows_are_paired),
};

int main(void) {
    fence_watch();
    const int failed = test_run(tests, TEST_COUNT(tests));
    if (missing_pairs() != NULL) {
        printf("skipped the words of pairs: this machine lacks %s\n", missing_pairs());
        return failed;
    }
    return test_run(pair_tests, TEST_COUNT(pair_tests)) || failed;
}
