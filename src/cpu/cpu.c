/* CPU features, and the rows that they allow. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE // syscall()
#endif
#include "cpu/cpu.h"

#include "core/signatures.h"
#include "cpu/isa/isa.h"
#include "cpu/parallel.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

const kernel_table *const fdma_cpu_tables[] = {
#if defined(FDMA_HAVE_AVX512)
    &fdma_cpu_avx512,
#endif
#if defined(FDMA_HAVE_AMX)
    &fdma_cpu_amx_vectors,
    &fdma_cpu_amx,
#endif
#if defined(FDMA_HAVE_AVX512BF16)
    &fdma_cpu_avx512bf16_vectors,
    &fdma_cpu_avx512bf16,
#endif
#if defined(FDMA_HAVE_AVX2)
    &fdma_cpu_avx2,
#endif
#if defined(FDMA_HAVE_NEON)
    &fdma_cpu_neon,
#endif
#if defined(FDMA_HAVE_NEONBF16)
    &fdma_cpu_neonbf16_vectors,
    &fdma_cpu_neonbf16,
#endif
    // not the last table: why a kernel that could run refuses is the better answer to "cpu"
    &fdma_cpu_absent,
    &fdma_cpu_scalar,
    NULL,
};

#if defined(__x86_64__)

#include <cpuid.h>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

#define FEATURE(name) {#name, __builtin_cpu_supports(#name) != 0}

typedef struct feature {
    const char *name;
    bool found;
} feature;

enum { feature_count = 11 };

/* What compilers do not know of, asked once: cpuid takes microseconds in a virtual machine. */
enum { unknown, found_it, missed_it };

static bool ask_once(_Atomic int *state, bool (*ask)(void)) {
    if (*state == unknown)
        *state = ask() ? found_it : missed_it;
    return *state == found_it;
}

static bool ask_f16c(void) {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) && __builtin_cpu_supports("avx");
}

static bool ask_amx(void) {
    enum { bit_amx_bf16 = 1 << 22, bit_amx_tile = 1 << 24 };
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & bit_amx_bf16) && (d & bit_amx_tile);
}

/* Linux lets a process use AMX's tiles when it has asked for them; that makes its signal frames
 * larger, so that it is asked for only where the kernel may be used. */
static bool ask_tile_permission(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { request_permission = 0x1023, tile_data = 18 };
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return false;
#endif
}

static bool has_f16c(void) {
    static _Atomic int state = unknown;
    return ask_once(&state, ask_f16c);
}

static bool has_amx(void) {
    static _Atomic int state = unknown;
    return ask_once(&state, ask_amx);
}

static bool has_tile_permission(void) {
    static _Atomic int state = unknown;
    return ask_once(&state, ask_tile_permission);
}

static void find_features(feature *features) {
    __builtin_cpu_init();
    const feature found[feature_count] = {
        FEATURE(avx2),     FEATURE(fma),        {"f16c", has_f16c()}, FEATURE(bmi),
        FEATURE(bmi2),     FEATURE(avx512f),    FEATURE(avx512bw),    FEATURE(avx512dq),
        FEATURE(avx512vl), FEATURE(avx512bf16), {"amx", has_amx()},
    };
    memcpy(features, found, sizeof found);
}

/* The first of the first `count` features that this CPU lacks. */
static const char *first_missing(int count) {
    feature features[feature_count];
    find_features(features);
    for (int i = 0; i < count; i++)
        if (!features[i].found)
            return features[i].name;
    return NULL;
}

const char *fdma_missing_avx2(void) { return first_missing(5); }

const char *fdma_missing_avx512(void) { return first_missing(9); }

/* The compiler of this build may have known less than the CPU. */
const char *fdma_missing_avx512bf16(void) {
#if !defined(FDMA_HAVE_AVX512BF16)
    return "a build with avx512bf16";
#endif
    return first_missing(10);
}

const char *fdma_missing_amx(void) {
#if !defined(FDMA_HAVE_AMX)
    return "a build with amx";
#endif
    const char *const missing = first_missing(11);
    return missing == NULL && !has_tile_permission() ? "the system's permission for amx" : missing;
}

/* Intel's vdpbf16ps does half as much a cycle as its float32 multiply-adds, AMD's twice as much. */
static bool ask_fast_pairs(void) {
    unsigned a, b, c, d;
    return fdma_missing_avx512bf16() == NULL && __get_cpuid(0, &a, &b, &c, &d) &&
           b != signature_INTEL_ebx;
}

static bool has_fast_pairs(void) {
    static _Atomic int state = unknown;
    return ask_once(&state, ask_fast_pairs);
}

static bool has_faster_pairs(void) { return has_fast_pairs() || fdma_missing_amx() == NULL; }

static void list_features(char *text, size_t size) {
    feature features[feature_count];
    size_t used = 0;
    find_features(features);
    for (int i = 0; i < feature_count; i++) {
        if (!features[i].found)
            continue;
        used +=
            (size_t)snprintf(text + used, size - used, "%s%s", used ? " " : "", features[i].name);
    }
}

static void name_cpu(char *text, size_t size) {
    unsigned words[13] = {0}; // a 0 at the end
    for (unsigned leaf = 0; leaf < 3; leaf++)
        __get_cpuid(0x80000002 + leaf, &words[4 * leaf], &words[4 * leaf + 1], &words[4 * leaf + 2],
                    &words[4 * leaf + 3]);
    const char *name = (const char *)words;
    snprintf(text, size, "%.*s", (int)sizeof words, name + strspn(name, " "));
}

#elif defined(__aarch64__)

#if defined(__linux__)
#include <sys/auxv.h>
#endif

static bool has_bf16(void) {
    enum { hwcap2_bf16 = 1 << 14 }; // older headers have no name for it
#if defined(__linux__)
    return getauxval(AT_HWCAP2) & hwcap2_bf16;
#else
    return false;
#endif
}

const char *fdma_missing_neon(void) { return NULL; }

/* The compiler of this build may have known less than the CPU. */
const char *fdma_missing_neonbf16(void) {
#if !defined(FDMA_HAVE_NEONBF16)
    return "a build with neonbf16";
#endif
    return has_bf16() ? NULL : "bf16";
}

static bool has_faster_pairs(void) { return fdma_missing_neonbf16() == NULL; }

static void list_features(char *text, size_t size) {
    snprintf(text, size, "neon%s", has_bf16() ? " bf16" : "");
}

/* Who made the CPU, and which of theirs it is: numbers, as in /proc/cpuinfo, which has no names. */
static void name_cpu(char *text, size_t size) {
    enum { has_cpuid = 1 << 11 }; // HWCAP_CPUID: Linux lets programs read MIDR_EL1
    uint64_t midr = 0;
#if defined(__linux__)
    if (getauxval(AT_HWCAP) & has_cpuid)
        __asm__("mrs %0, midr_el1" : "=r"(midr));
#endif
    snprintf(text, size, "aarch64");
    if (midr != 0)
        snprintf(text, size, "aarch64, implementer 0x%02x, part 0x%03x, revision r%up%u",
                 (unsigned)(midr >> 24 & 0xff), (unsigned)(midr >> 4 & 0xfff),
                 (unsigned)(midr >> 20 & 0xf), (unsigned)(midr & 0xf));
}

#else

static bool has_faster_pairs(void) { return false; }

static void list_features(char *text, size_t size) { snprintf(text, size, "none"); }

static void name_cpu(char *text, size_t size) { snprintf(text, size, "CPU"); }

#endif

const char *fdma_missing_scalar(void) { return NULL; }

static bool is_wide(const fdma_tensor *tensor) {
    return is_present(tensor) && tensor->dtype == FDMA_FLOAT64;
}

/* The CPU kernels compute in float32. */
const char *fdma_refuses_wide(const fdma_problem *problem) {
    const tensor_table table = fdma_tensors[problem->operation];
    for (size_t t = 0; t < table.count; t++)
        if (is_wide(tensor_at(problem, table.entries[t].member)))
            return "float64 tensors, supported: float32, float16, bfloat16";
    return NULL;
}

const char *fdma_refuses_singles(const fdma_problem *problem) {
    const char *const reason = fdma_refuses_wide(problem);
    return reason == NULL && problem->dtype != FDMA_BFLOAT16 ? "types other than bfloat16" : reason;
}

/* Takes all that float32 holds, but leaves to others what they do faster, unless forced by more
 * than the backend's name. */
const char *fdma_refuses_slow(const fdma_problem *problem) {
    const char *const kernel = problem->exec.kernel;
    const bool forced = kernel && strchr(kernel, '/');
    if (!forced && fdma_refuses_singles(problem) == NULL && has_faster_pairs())
        return "bfloat16, for which there is a faster kernel";
    return fdma_refuses_wide(problem);
}

/* Decode keeps the sums of all rows of a kv head side by side: for more rows, tiles are faster. */
const char *fdma_refuses_decode(const fdma_problem *problem) {
    enum { most_rows = 16 };
    return problem->q_len * problem->group > most_rows
               ? "more than 16 rows (queries times q_heads / kv_heads) of a kv head"
               : fdma_refuses_wide(problem);
}

/* Decode of the points that attend in bfloat16 only. */
const char *fdma_refuses_decode_singles(const fdma_problem *problem) {
    const char *const reason = fdma_refuses_singles(problem);
    return reason != NULL ? reason : fdma_refuses_decode(problem);
}

fdma_status fdma_describe_cpu(fdma_device_info *info) {
    list_features(info->features, sizeof info->features);
    name_cpu(info->name, sizeof info->name);
    info->cores = fdma_usable_cpus();
    info->reserved = 0;
    return FDMA_OK;
}
