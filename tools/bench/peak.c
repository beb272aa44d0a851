/* See bench/peak.h. Each loop keeps as many independent sums as hide the latency of its instruction
 * (4 cycles, 2 per cycle) and fit the registers. The sums approach 1: there are no overflows and no
 * denormals. */
#include "bench/peak.h"

#include "common/timing.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

static volatile const float shrink = 0.75F; // volatile: the compiler must not know the sums
static volatile const float shift = 0.25F;

/* Four lanes, which every 64-bit machine has; the compiler chooses the instructions. */
typedef float lanes4 __attribute__((vector_size(16)));

static float baseline_round(int64_t rounds) {
    enum { SUMS = 12 };
    const lanes4 factor = {shrink, shrink, shrink, shrink};
    const lanes4 term = {shift, shift, shift, shift};
    lanes4 sums[SUMS];
    for (int s = 0; s < SUMS; s++)
        sums[s] = factor + (float)s;
    for (int64_t round = 0; round < rounds; round++)
        for (int s = 0; s < SUMS; s++)
            sums[s] = sums[s] * factor + term;
    lanes4 total = term;
    for (int s = 0; s < SUMS; s++)
        total += sums[s];
    return total[0] + total[1] + total[2] + total[3];
}

/* Bytes read in one step, a few cache lines. What remains at the end is too little to matter. */
enum { READ_STEP = 512 };

static uint64_t baseline_read(const void *bytes, size_t count) {
    typedef uint64_t words2 __attribute__((vector_size(16), aligned(4), may_alias));
    enum { SUMS = 8, EACH = 16 };
    words2 sums[SUMS] = {{0}};
    for (size_t at = 0; at + READ_STEP <= count; at += READ_STEP)
        for (size_t x = 0; x < READ_STEP / EACH; x++)
            sums[x % SUMS] ^= *(const words2 *)((const char *)bytes + at + x * EACH);
    words2 total = {0};
    for (int s = 0; s < SUMS; s++)
        total ^= sums[s];
    return total[0] ^ total[1];
}

#if defined(__x86_64__)

__attribute__((target("avx2"))) static uint64_t avx2_read(const void *bytes, size_t count) {
    enum { SUMS = 8, EACH = 32 };
    __m256i sums[SUMS];
    for (int s = 0; s < SUMS; s++)
        sums[s] = _mm256_setzero_si256();
    for (size_t at = 0; at + READ_STEP <= count; at += READ_STEP) {
        for (size_t x = 0; x < READ_STEP / EACH; x++) {
            const void *from = (const char *)bytes + at + x * EACH;
            sums[x % SUMS] = _mm256_xor_si256(sums[x % SUMS], _mm256_loadu_si256(from));
        }
    }
    __m256i total = _mm256_setzero_si256();
    for (int s = 0; s < SUMS; s++)
        total = _mm256_xor_si256(total, sums[s]);
    return (uint64_t)_mm256_extract_epi64(total, 0);
}

__attribute__((target("avx512f"))) static uint64_t avx512_read(const void *bytes, size_t count) {
    enum { SUMS = 8, EACH = 64 };
    __m512i sums[SUMS];
    for (int s = 0; s < SUMS; s++)
        sums[s] = _mm512_setzero_si512();
    for (size_t at = 0; at + READ_STEP <= count; at += READ_STEP) {
        for (size_t x = 0; x < SUMS; x++) {
            const void *from = (const char *)bytes + at + x * EACH;
            sums[x] = _mm512_xor_si512(sums[x], _mm512_loadu_si512(from));
        }
    }
    for (int s = 1; s < SUMS; s++)
        sums[0] = _mm512_xor_si512(sums[0], sums[s]);
    return (uint64_t)_mm512_reduce_add_epi64(sums[0]);
}

__attribute__((target("avx2,fma"))) static float avx2_round(int64_t rounds) {
    enum { SUMS = 12 };
    const __m256 factor = _mm256_set1_ps(shrink);
    const __m256 term = _mm256_set1_ps(shift);
    __m256 sums[SUMS];
    for (int s = 0; s < SUMS; s++)
        sums[s] = _mm256_set1_ps((float)s);
    for (int64_t round = 0; round < rounds; round++)
        for (int s = 0; s < SUMS; s++)
            sums[s] = _mm256_fmadd_ps(sums[s], factor, term);
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
    for (int64_t round = 0; round < rounds; round++)
        for (int s = 0; s < SUMS; s++)
            sums[s] = _mm512_fmadd_ps(sums[s], factor, term);
    __m512 total = term;
    for (int s = 0; s < SUMS; s++)
        total = _mm512_add_ps(total, sums[s]);
    return _mm512_cvtss_f32(total);
}

/* Products of tiles: 16 x 16 sums of 32 multiply-adds. The library has asked the operating system
 * for permission. */
__attribute__((target("avx512f,amx-tile,amx-bf16"))) static float amx_round(int64_t rounds) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    float sums[16 * 16];
    for (int tile = 0; tile < 8; tile++) {
        shape.row_bytes[tile] = 64;
        shape.rows[tile] = 16;
    }
    _tile_loadconfig(&shape);
    for (int64_t round = 0; round < rounds; round++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_release();
    return sums[0];
}

/* Dot products of pairs: 32 multiply-adds per instruction. Sums grow until further terms are
 * rounded away. */
__attribute__((target("avx512f,avx512bf16"))) static float avx512bf16_round(int64_t rounds) {
    enum { SUMS = 16 };
    const __m512bh left = _mm512_cvtne2ps_pbh(_mm512_set1_ps(shrink), _mm512_set1_ps(shrink));
    const __m512bh right = _mm512_cvtne2ps_pbh(_mm512_set1_ps(shift), _mm512_set1_ps(-shift));
    __m512 sums[SUMS];
    for (int s = 0; s < SUMS; s++)
        sums[s] = _mm512_set1_ps((float)s);
    for (int64_t round = 0; round < rounds; round++)
        for (int s = 0; s < SUMS; s++)
            sums[s] = _mm512_dpbf16_ps(sums[s], left, right);
    __m512 total = _mm512_set1_ps(shift);
    for (int s = 0; s < SUMS; s++)
        total = _mm512_add_ps(total, sums[s]);
    return _mm512_cvtss_f32(total);
}

#elif defined(__aarch64__)

#if defined(__clang__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 16") // without it gcc stores every sum in every round
#endif

/* Some of these CPUs start 4 per cycle. The instruction adds to its destination, so that sums grow
 * as those of dot products do. */
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

#if !defined(__clang__) // older versions declare these functions for whole files only
/* Dot products of pairs: 8 multiply-adds per instruction. */
__attribute__((target("arch=armv8.2-a+bf16"))) static float neonbf16_round(int64_t rounds) {
    enum { SUMS = 16 };
    const bfloat16x4_t left = vcvt_bf16_f32(vdupq_n_f32(shrink));
    const bfloat16x4_t right = vcvt_bf16_f32(vdupq_n_f32(shift));
    const bfloat16x8_t factor = vcombine_bf16(left, left), term = vcombine_bf16(right, right);
    float32x4_t sums[SUMS];
    UNROLL
    for (int s = 0; s < SUMS; s++)
        sums[s] = vdupq_n_f32((float)s);
    for (int64_t round = 0; round < rounds; round++) {
        UNROLL
        for (int s = 0; s < SUMS; s++)
            sums[s] = vbfdotq_f32(sums[s], factor, term);
    }
    float32x4_t total = vdupq_n_f32(shift);
    UNROLL
    for (int s = 0; s < SUMS; s++)
        total = vaddq_f32(total, sums[s]);
    return vaddvq_f32(total);
}
#endif

#endif

static const struct {
    const char *kernel;
    float (*run)(int64_t rounds);
    uint64_t (*read)(const void *bytes, size_t count);
    double flops; // sums * lanes * 2, twice that for pairs
} loops[] = {
#if defined(__x86_64__)
    {"cpu/amx", amx_round, avx512_read, 4 * 16 * 16 * 32 * 2},
    {"cpu/avx512bf16", avx512bf16_round, avx512_read, 16 * 16 * 4},
    {"cpu/avx512", avx512_round, avx512_read, 16 * 16 * 2},
    {"cpu/avx2", avx2_round, avx2_read, 12 * 8 * 2},
#elif defined(__aarch64__)
    {"cpu/neon", neon_round, baseline_read, 16 * 4 * 2},
#if !defined(__clang__)
    {"cpu/neonbf16", neonbf16_round, baseline_read, 16 * 4 * 4},
#endif
#endif
    {"cpu/scalar", baseline_round, baseline_read, 12 * 4 * 2},
};

/* The work of one thread: the loop, or the reading of its bytes if they are not NULL. */
typedef struct thread_work {
    const peak_loop *peak;
    const char *bytes;
    size_t count;
} thread_work;

static void *run_work(void *data) {
    static _Thread_local volatile float sum_sink; // every result is used
    static _Thread_local volatile uint64_t bits_sink;
    const thread_work *const work = data;
    if (work->bytes == NULL)
        sum_sink = work->peak->run(work->peak->rounds);
    else
        bits_sink = work->peak->read(work->bytes, work->count);
    (void)sum_sink, (void)bits_sink;
    return NULL;
}

/* Milliseconds until all threads are done. The caller does the work of thread 0, and of those that
 * cannot be created. */
static double time_threads(const peak_loop *peak, const void *bytes, size_t count) {
    enum { MOST_THREADS = 1024 };
    pthread_t threads[MOST_THREADS];
    bool started[MOST_THREADS];
    thread_work works[MOST_THREADS];
    const int used = peak->threads < MOST_THREADS ? peak->threads : MOST_THREADS;
    const size_t each = count / (size_t)used;
    const double start = now_ms();
    for (int t = 0; t < used; t++) {
        const char *const from = bytes == NULL ? NULL : (const char *)bytes + (size_t)t * each;
        works[t] = (thread_work){peak, from, each};
        started[t] = t > 0 && pthread_create(&threads[t], NULL, run_work, &works[t]) == 0;
    }
    for (int t = 0; t < used; t++)
        if (!started[t])
            run_work(&works[t]);
    for (int t = 0; t < used; t++)
        if (started[t])
            pthread_join(threads[t], NULL);
    return now_ms() - start;
}

double measure_peak(const peak_loop *peak) {
    const double ms = time_threads(peak, NULL, 0);
    return peak->flops * (double)peak->rounds * peak->threads / (ms * 1e6);
}

double measure_read(const peak_loop *peak, const void *bytes, size_t count) {
    return time_threads(peak, bytes, count);
}

int prepare_peak(const char *kernel, int threads, peak_loop *peak) {
    enum { FIRST_ROUNDS = 100000, WANTED_MS = 20 };
    for (size_t l = 0; l < sizeof loops / sizeof loops[0]; l++) {
        const size_t length = strlen(loops[l].kernel);
        if (strncmp(loops[l].kernel, kernel, length) != 0 ||
            (kernel[length] != '/' && kernel[length] != '\0'))
            continue;
        *peak = (peak_loop){loops[l].run, loops[l].read, loops[l].flops, FIRST_ROUNDS, threads};
        measure_peak(peak); // warms up the clock and the threads
        const double gflops = measure_peak(peak);
        peak->rounds = (int64_t)(gflops / threads * 1e6 * WANTED_MS / peak->flops) + 1;
        return 0;
    }
    return -1;
}
