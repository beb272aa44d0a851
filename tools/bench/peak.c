/* See bench/peak.h. peak_loops.h makes the loops of each point. A loop has as many sums as hide the
 * latency of its instruction (4 cycles, 2 per cycle) and fit the registers. */
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

/* Bytes read in one step, a few cache lines. The rest at the end is too small to matter. */
enum { READ_STEP = 512, READ_SUMS = 8 };

#if defined(__clang__)
#define UNROLL
#else
#define UNROLL _Pragma("GCC unroll 32") // without it gcc stores every sum in every round
#endif

/* Four lanes, which every 64-bit machine has; the compiler chooses the instructions. */
#define NAME(word) baseline_##word
#define TARGET
#define BYTES 16
#define SUMS 12
#define MULTIPLY_ADD(sum, factor, term) ((sum) * (factor) + (term))
#include "bench/peak_loops.h"

#if defined(__x86_64__)

#define NAME(word) avx2_##word
#define TARGET __attribute__((target("avx2,fma")))
#define BYTES 32
#define SUMS 12
#define MULTIPLY_ADD(sum, factor, term) _mm256_fmadd_ps(sum, factor, term)
#include "bench/peak_loops.h"

#define NAME(word) avx512_##word
#define TARGET __attribute__((target("avx512f")))
#define BYTES 64
#define SUMS 16
#define MULTIPLY_ADD(sum, factor, term) _mm512_fmadd_ps(sum, factor, term)
#include "bench/peak_loops.h"

#if defined(FDMA_HAVE_AVX512BF16)
/* Dot products of pairs: 32 multiply-adds per instruction. Taken as a pair of bfloat16, `shrink` is
 * itself and 0, and so is `shift`. */
#define NAME(word) avx512bf16_##word
#define TARGET __attribute__((target("avx512f,avx512bf16")))
#define BYTES 64
#define SUMS 16
#define MULTIPLY_ADD(sum, factor, term) _mm512_dpbf16_ps(sum, (__m512bh)(factor), (__m512bh)(term))
#include "bench/peak_loops.h"
#endif

#if defined(FDMA_HAVE_AMX)
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
#endif

#elif defined(__aarch64__)

/* Some of these CPUs start 4 per cycle. The instruction adds to its destination. */
#define NAME(word) neon_##word
#define TARGET
#define BYTES 16
#define SUMS 16
#define MULTIPLY_ADD(sum, factor, term) vfmaq_f32(sum, factor, term)
#include "bench/peak_loops.h"

// Older versions of clang declare these functions for whole files only.
#if defined(FDMA_HAVE_NEONBF16) && !defined(__clang__)
/* Dot products of pairs: 8 multiply-adds per instruction. */
#define NAME(word) neonbf16_##word
#define TARGET __attribute__((target("arch=armv8.2-a+bf16")))
#define BYTES 16
#define SUMS 16
#define MULTIPLY_ADD(sum, factor, term)                                                            \
    vbfdotq_f32(sum, vreinterpretq_bf16_f32(factor), vreinterpretq_bf16_f32(term))
#include "bench/peak_loops.h"
#endif

#endif

static const struct {
    const char *kernel;
    float (*run)(int64_t rounds);
    uint64_t (*read)(const void *bytes, size_t count);
    double flops; // sums * lanes * 2, twice that for pairs
} loops[] = {
#if defined(__x86_64__)
#if defined(FDMA_HAVE_AMX)
    {"cpu/amx", amx_round, avx512_read, 4 * 16 * 16 * 32 * 2},
#endif
#if defined(FDMA_HAVE_AVX512BF16)
    {"cpu/avx512bf16", avx512bf16_round, avx512bf16_read, 16 * 16 * 4},
#endif
    {"cpu/avx512", avx512_round, avx512_read, 16 * 16 * 2},
    {"cpu/avx2", avx2_round, avx2_read, 12 * 8 * 2},
#elif defined(__aarch64__)
    {"cpu/neon", neon_round, neon_read, 16 * 4 * 2},
#if defined(FDMA_HAVE_NEONBF16) && !defined(__clang__)
    {"cpu/neonbf16", neonbf16_round, neonbf16_read, 16 * 4 * 4},
#endif
#endif
    {"cpu/scalar", baseline_round, baseline_read, 12 * 4 * 2},
};

/* The work of one thread: the loop, or reading its bytes if they are not NULL. */
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

/* Milliseconds until all threads are done. The caller does the work of thread 0, and of threads
 * that cannot be created. */
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
