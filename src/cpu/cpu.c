/* CPU features, and the rows that they allow. */
#include "cpu/cpu.h"

#include "cpu/isa/isa.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

const kernel_table *const fdma_cpu_tables[] = {
#if defined(FDMA_HAVE_AVX512)
    &fdma_cpu_avx512,
#endif
#if defined(FDMA_HAVE_AVX512BF16)
    &fdma_cpu_avx512bf16,
#endif
#if defined(FDMA_HAVE_AVX2)
    &fdma_cpu_avx2,
#endif
    &fdma_cpu_scalar,     NULL,
};

#if defined(__x86_64__)

#include <cpuid.h>

#define FEATURE(name) {#name, __builtin_cpu_supports(#name) != 0}

typedef struct feature {
    const char *name;
    bool found;
} feature;

enum { feature_count = 10 };

/* Asked once: cpuid takes microseconds in a virtual machine. Compilers cache the other features. */
static bool has_f16c(void) {
    enum { unknown, found, missing };
    static _Atomic int state = unknown;
    if (state == unknown) {
        unsigned a, b, c, d;
        const bool has = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
        state = has && __builtin_cpu_supports("avx") ? found : missing;
    }
    return state == found;
}

static void find_features(feature *features) {
    __builtin_cpu_init();
    const feature found[feature_count] = {
        FEATURE(avx2),     FEATURE(fma),        {"f16c", has_f16c()}, FEATURE(bmi),
        FEATURE(bmi2),     FEATURE(avx512f),    FEATURE(avx512bw),    FEATURE(avx512dq),
        FEATURE(avx512vl), FEATURE(avx512bf16),
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

const char *fdma_missing_avx512bf16(void) { return first_missing(10); }

/* Intel's vdpbf16ps does half as much a cycle as its float32 multiply-adds, AMD's twice as much. */
static bool has_fast_pairs(void) {
    unsigned a, b, c, d;
    return fdma_missing_avx512bf16() == NULL && __get_cpuid(0, &a, &b, &c, &d) &&
           b != signature_INTEL_ebx;
}

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
    unsigned words[12] = {0};
    for (unsigned leaf = 0; leaf < 3; leaf++)
        __get_cpuid(0x80000002 + leaf, &words[4 * leaf], &words[4 * leaf + 1], &words[4 * leaf + 2],
                    &words[4 * leaf + 3]);
    const char *name = (const char *)words;
    snprintf(text, size, "%.*s", (int)sizeof words, name + strspn(name, " "));
}

#else

static void list_features(char *text, size_t size) { snprintf(text, size, "none"); }

static void name_cpu(char *text, size_t size) { snprintf(text, size, "CPU"); }

#endif

const char *fdma_missing_scalar(void) { return NULL; }

static bool is_wide(const fdma_tensor *tensor) {
    return is_present(tensor) && tensor->dtype == FDMA_FLOAT64;
}

/* The CPU kernels compute in float32. */
const char *fdma_refuses_wide(const fdma_problem *problem) {
    const fdma_tensor *const tensors[] = {&problem->q,   &problem->v,     &problem->bias,
                                          &problem->lse, &problem->score, &problem->dt_proj,
                                          &problem->a};
    for (size_t i = 0; i < sizeof tensors / sizeof tensors[0]; i++)
        if (is_wide(tensors[i]))
            return "float64 tensors, supported: float32, float16, bfloat16";
    return NULL;
}

#if defined(__x86_64__)

const char *fdma_refuses_avx512(const fdma_problem *problem) {
    const char *const kernel = problem->exec.kernel;
    const bool forced = kernel && strchr(kernel, '/'); // by more than the backend's name
    if (problem->dtype == FDMA_BFLOAT16 && !forced && has_fast_pairs())
        return "bfloat16, for which cpu/avx512bf16 is faster";
    return fdma_refuses_wide(problem);
}

const char *fdma_refuses_singles(const fdma_problem *problem) {
    return problem->dtype != FDMA_BFLOAT16 ? "other types than bfloat16" : NULL;
}

#endif

fdma_status fdma_describe_cpu(fdma_device_info *info) {
    list_features(info->features, sizeof info->features);
    name_cpu(info->name, sizeof info->name);
    info->cores = (int32_t)sysconf(_SC_NPROCESSORS_ONLN);
    info->reserved = 0;
    return FDMA_OK;
}
