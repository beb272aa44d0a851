/* See peak.h. Each loop keeps as many independent sums as hide the latency of its instruction (4
 * cycles, 2 a cycle) and as fit into the registers. Sums tend to 1: no overflow, no denormals. */
#include "peak.h"

#include "timing.h"

#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static volatile const float shrink = 0.75F; // read at run time, so that nothing is precomputed
static volatile const float shift = 0.25F;

/* Four lanes, which every 64-bit machine has, multiplied and added as the compiler will. */
typedef float lanes4 __attribute__((vector_size(16)));

static float baseline_round(int64_t rounds) {
    enum { SUMS = 12 };
    const lanes4 factor = {shrink, shrink, shrink, shrink};
    const lanes4 term = {shift, shift, shift, shift};
    lanes4 sums[SUMS];
    for (int s = 0; s < SUMS; s++)
        sums[s] = factor + (float)s;
    for (int64_t round = 0; round < rounds; round++) {
        for (int s = 0; s < SUMS; s++)
            sums[s] = sums[s] * factor + term;
    }
    lanes4 total = term;
    for (int s = 0; s < SUMS; s++)
        total += sums[s];
    return total[0] + total[1] + total[2] + total[3];
}

#if defined(__x86_64__)

__attribute__((target("avx2,fma"))) static float avx2_round(int64_t rounds) {
    enum { SUMS = 12 };
    const __m256 factor = _mm256_set1_ps(shrink);
    const __m256 term = _mm256_set1_ps(shift);
    __m256 sums[SUMS];
    for (int s = 0; s < SUMS; s++)
        sums[s] = _mm256_set1_ps((float)s);
    for (int64_t round = 0; round < rounds; round++) {
        for (int s = 0; s < SUMS; s++)
            sums[s] = _mm256_fmadd_ps(sums[s], factor, term);
    }
    __m256 total = term;
    for (int s = 0; s < SUMS; s++)
        total = _mm256_add_ps(total, sums[s]);
    return _mm256_cvtss_f32(total);
}

__attribute__((target("avx512f"))) static float avx512_round(int64_t rounds) {
    enum { SUMS = 16 };
    const __m512 factor = _mm512_set1_ps(shrink);
    const __m512 term = _mm512_set1_ps(shift);
    __m512 sums[SUMS];
    for (int s = 0; s < SUMS; s++)
        sums[s] = _mm512_set1_ps((float)s);
    for (int64_t round = 0; round < rounds; round++) {
        for (int s = 0; s < SUMS; s++)
            sums[s] = _mm512_fmadd_ps(sums[s], factor, term);
    }
    __m512 total = term;
    for (int s = 0; s < SUMS; s++)
        total = _mm512_add_ps(total, sums[s]);
    return _mm512_cvtss_f32(total);
}

/* Dot products of pairs: 32 multiply-adds an instruction. Its sums grow until they are so large
 * that another term is rounded away. */
__attribute__((target("avx512f,avx512bf16"))) static float avx512bf16_round(int64_t rounds) {
    enum { SUMS = 16 };
    const __m512bh left = _mm512_cvtne2ps_pbh(_mm512_set1_ps(shrink), _mm512_set1_ps(shrink));
    const __m512bh right = _mm512_cvtne2ps_pbh(_mm512_set1_ps(shift), _mm512_set1_ps(-shift));
    __m512 sums[SUMS];
    for (int s = 0; s < SUMS; s++)
        sums[s] = _mm512_set1_ps((float)s);
    for (int64_t round = 0; round < rounds; round++) {
        for (int s = 0; s < SUMS; s++)
            sums[s] = _mm512_dpbf16_ps(sums[s], left, right);
    }
    __m512 total = _mm512_set1_ps(shift);
    for (int s = 0; s < SUMS; s++)
        total = _mm512_add_ps(total, sums[s]);
    return _mm512_cvtss_f32(total);
}

#elif defined(__aarch64__)

#if defined(__clang__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16") // or gcc stores every sum in every round
#endif

/* Some of these CPUs start 4 a cycle. The instruction adds to what it overwrites: the sums grow, as
 * those of dot products do. */
static float neon_round(int64_t rounds) {
    enum { SUMS = 16 };
    const float32x4_t factor = vdupq_n_f32(shrink);
    const float32x4_t term = vdupq_n_f32(shift);
    float32x4_t sums[SUMS];
    UNROLL
    for (int s = 0; s < SUMS; s++)
        sums[s] = vdupq_n_f32((float)s);
    for (int64_t round = 0; round < rounds; round++) {
        UNROLL
        for (int s = 0; s < SUMS; s++)
            sums[s] = vfmaq_f32(sums[s], factor, term);
    }
    float32x4_t total = term;
    UNROLL
    for (int s = 0; s < SUMS; s++)
        total = vaddq_f32(total, sums[s]);
    return vaddvq_f32(total);
}

#endif

static const struct {
    const char *kernel;
    float (*run)(int64_t rounds);
    double flops; // sums * lanes * 2, twice that for pairs
} loops[] = {
#if defined(__x86_64__)
    {"cpu/avx512bf16", avx512bf16_round, 16 * 16 * 4},
    {"cpu/avx512", avx512_round, 16 * 16 * 2},
    {"cpu/avx2", avx2_round, 12 * 8 * 2},
#elif defined(__aarch64__)
    {"cpu/neon", neon_round, 16 * 4 * 2},
#endif
    {"cpu/scalar", baseline_round, 12 * 4 * 2},
};

double measure_peak(const peak_loop *peak) {
    static volatile float sink; // somebody wants the sums
    float total = 0;
    const double start = now_ms();
#ifdef _OPENMP
#pragma omp parallel for num_threads(peak->threads) schedule(static, 1) reduction(+ : total)
#endif
    for (int thread = 0; thread < peak->threads; thread++)
        total += peak->run(peak->rounds);
    const double ms = now_ms() - start;
    sink = total;
    (void)sink;
    return peak->flops * (double)peak->rounds * peak->threads / (ms * 1e6);
}

int prepare_peak(const char *kernel, int threads, peak_loop *peak) {
    enum { FIRST_ROUNDS = 100000, WANTED_MS = 20 };
    for (size_t l = 0; l < sizeof loops / sizeof loops[0]; l++) {
        if (strcmp(loops[l].kernel, kernel) != 0)
            continue;
        *peak = (peak_loop){loops[l].run, loops[l].flops, FIRST_ROUNDS, threads};
        measure_peak(peak); // the clock and the threads come up
        const double gflops = measure_peak(peak);
        peak->rounds = (int64_t)(gflops / threads * 1e6 * WANTED_MS / peak->flops) + 1;
        return 0;
    }
    return -1;
}
