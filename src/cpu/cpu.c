/* The features of this CPU, and the kernels that they allow. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE // syscall()
#endif
#include "cpu/cpu.h"

#include "core/adapter.h"
#include "core/signatures.h"
#include "cpu/isa/isa.h"
#include "cpu/parallel.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

static const kernel_table *const tables[] = {
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
    // not the last table: the reason why a runnable kernel refuses is the better answer to "cpu"
    &fdma_cpu_absent,
    &fdma_cpu_scalar,
    NULL,
};

const kernel_backend fdma_cpu_backend = {.tables = tables, .adapters = fdma_host_adapters};

#if defined(__x86_64__)

#include <cpuid.h>

#if defined(__linux__)
#include <sys/syscall.h>
#endif

enum { eax, ebx, ecx, edx };                   // registers of a leaf of cpuid
enum { ymm = 0x6, zmm = 0xe6, tmm = 0x60000 }; // bits of XCR0: the system saves these registers

typedef struct cpu_feature {
    const char *name;
    uint32_t leaf, subleaf; // of cpuid
    int reg;
    uint32_t bits;
    uint32_t saved; // bits of XCR0
} cpu_feature;

/* Each kernel needs the first features of this list; its `missing` has their number. cpuid is asked
 * directly: not every compiler has the variables of __builtin_cpu_supports(), or all names. */
static const cpu_feature features[] = {
    {"avx2", 7, 0, ebx, 1U << 5, ymm},
    {"fma", 1, 0, ecx, 1U << 12, ymm},
    {"f16c", 1, 0, ecx, 1U << 29, ymm},
    {"bmi", 7, 0, ebx, 1U << 3, 0},
    {"bmi2", 7, 0, ebx, 1U << 8, 0},
    {"avx512f", 7, 0, ebx, 1U << 16, zmm},
    {"avx512bw", 7, 0, ebx, 1U << 30, zmm},
    {"avx512dq", 7, 0, ebx, 1U << 17, zmm},
    {"avx512vl", 7, 0, ebx, 1U << 31, zmm},
    {"avx512bf16", 7, 1, eax, 1U << 5, zmm},
    {"amx", 7, 0, edx, 1U << 22 | 1U << 24, tmm}, // amx_bf16 and amx_tile
};

enum {
    feature_count = sizeof features / sizeof features[0],
    made_by_intel = 1 << 30, // beside the bits of the features
    is_known = 1 << 29,
};

/* The low half of XCR0, 0 where the system does not use it. */
static uint32_t saved_registers(void) {
    enum { osxsave = 1 << 27 };
    unsigned words[4], low, high;
    if (!__get_cpuid(1, &words[eax], &words[ebx], &words[ecx], &words[edx]) ||
        !(words[ecx] & osxsave))
        return 0;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static uint32_t ask_cpu(void) {
    const uint32_t saved = saved_registers();
    unsigned words[4];
    const bool intel = __get_cpuid(0, &words[eax], &words[ebx], &words[ecx], &words[edx]) &&
                       words[ebx] == signature_INTEL_ebx;
    uint32_t bits = is_known | (intel ? made_by_intel : 0);
    for (int n = 0; n < feature_count; n++) {
        const cpu_feature *const f = &features[n];
        if (__get_cpuid_count(f->leaf, f->subleaf, &words[eax], &words[ebx], &words[ecx],
                              &words[edx]) &&
            (words[f->reg] & f->bits) == f->bits && (saved & f->saved) == f->saved)
            bits |= 1U << n;
    }
    return bits;
}

/* Bit n is set if this CPU has feature n. Asked once, because cpuid takes microseconds in a virtual
 * machine. */
static uint32_t cpu_bits(void) {
    static _Atomic uint32_t known;
    if (known == 0)
        known = ask_cpu();
    return known;
}

static const char *first_missing(int count) {
    const uint32_t missing = ~cpu_bits() & ((1U << count) - 1);
    return missing != 0 ? features[__builtin_ctz(missing)].name : NULL;
}

const char *fdma_missing_avx2(void) { return first_missing(5); }

const char *fdma_missing_avx512(void) { return first_missing(9); }

/* The compiler of this build may not have supported it, even if the CPU does. */
const char *fdma_missing_avx512bf16(void) {
#if !defined(FDMA_HAVE_AVX512BF16)
    return "a build with avx512bf16";
#endif
    return first_missing(10);
}

/* Linux lets a process use AMX's tiles once it has asked for them. That enlarges its signal frames,
 * so it asks only if the kernels could run. */
static bool has_tile_permission(void) {
    enum { unknown, granted, denied, request_permission = 0x1023, tile_data = 18 };
    static _Atomic int state = unknown;
#if defined(__linux__) && defined(SYS_arch_prctl)
    if (state == unknown)
        state = syscall(SYS_arch_prctl, request_permission, tile_data) == 0 ? granted : denied;
#endif
    return state == granted;
}

const char *fdma_missing_amx(void) {
#if !defined(FDMA_HAVE_AMX)
    return "a build with amx";
#endif
    const char *const missing = first_missing(feature_count);
    return missing == NULL && !has_tile_permission() ? "the system's permission for amx" : missing;
}

/* Per cycle, vdpbf16ps does half as many multiply-adds as float32 instructions on Intel, and twice
 * as many on AMD. */
static bool has_faster_pairs(void) {
    return (fdma_missing_avx512bf16() == NULL && (cpu_bits() & made_by_intel) == 0) ||
           fdma_missing_amx() == NULL;
}

static void list_features(char *text, size_t size) {
    size_t used = 0;
    *text = '\0';
    for (int n = 0; n < feature_count; n++)
        if (cpu_bits() >> n & 1)
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? " " : "",
                                     features[n].name);
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

/* The compiler of this build may not have supported it, even if the CPU does. */
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

/* The CPU's maker and model as the numbers in /proc/cpuinfo: there are no names. */
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

const char *fdma_refuses_wide(const fdma_problem *problem) {
    if (is_present(&problem->attn_mask) && problem->attn_mask.dtype != FDMA_UINT8)
        return "attn_mask of numbers; supported: uint8";
    const tensor_table table = fdma_tensors[problem->operation];
    for (size_t t = 0; t < table.count; t++) {
        const fdma_tensor *const tensor = tensor_at(problem, table.entries[t].member);
        if (is_present(tensor) && tensor->dtype == FDMA_FLOAT64)
            return "float64 tensors; supported: float32, float16, bfloat16";
    }
    return NULL;
}

/* inv_freq of a rotary table may be float64. */
const char *fdma_refuses_wide_table(const fdma_problem *problem) {
    return problem->rotary.dtype == FDMA_FLOAT64 ? "a float64 rotary; supported: float32" : NULL;
}

const char *fdma_refuses_singles(const fdma_problem *problem) {
    const char *const reason = fdma_refuses_wide(problem);
    return reason == NULL && problem->dtype != FDMA_BFLOAT16 ? "dtypes other than bfloat16"
                                                             : reason;
}

/* Leaves bfloat16 to kernels that are faster at it, unless exec.kernel names more than the
 * backend. */
const char *fdma_refuses_slow(const fdma_problem *problem) {
    const char *const kernel = problem->exec.kernel;
    const bool forced = kernel && strchr(kernel, '/');
    if (!forced && fdma_refuses_singles(problem) == NULL && has_faster_pairs())
        return "bfloat16, for which there is a faster kernel";
    return fdma_refuses_wide(problem);
}

/* Decode keeps the sums of all rows of a kv head side by side. For more rows, tiles are faster. */
const char *fdma_refuses_decode(const fdma_problem *problem) {
    enum { most_rows = 16 };
    if (problem->dropout.threshold != 0)
        return "dropout";
    if (is_present(&problem->attn_mask) || is_present(&problem->attn_bias))
        return "attn_mask and attn_bias";
    return problem->q_len * problem->group > most_rows
               ? "more than 16 rows (queries times q_heads / kv_heads) of a kv head"
               : fdma_refuses_wide(problem);
}

const char *fdma_refuses_slow_decode(const fdma_problem *problem) {
    const char *const reason = fdma_refuses_slow(problem);
    return reason != NULL ? reason : fdma_refuses_decode(problem);
}

/* Decode at points that attend in bfloat16 only. */
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
