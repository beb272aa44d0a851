/* Replaces the toolkit's header of this name when the kernels of src/cuda are compiled as C++ for
 * the CPU: defines what CUDA C++ adds to C++. The compiler's option -include puts it before each
 * source. See emulator.h. */
#pragma once

#include_next <cuda_runtime.h>

#include "emulator.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <math.h>
#include <string.h>

#define __CUDACC__ 1      // for our own headers; the toolkit's headers were read without it
#define __CUDA_ARCH__ 900 // as __CUDACC__

#undef __device__
#undef __global__
#undef __host__
#undef __shared__
#undef __constant__
#undef __forceinline__
#undef __noinline__
#undef __launch_bounds__
#define __device__
#define __global__
#define __host__
#define __constant__
#define __shared__ thread_local // a block runs on one OS thread
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)

/* ---- arithmetic ---- */

#undef min
#undef max

template <typename T> static inline T min(T a, T b) { return b < a ? b : a; }
template <typename T> static inline T max(T a, T b) { return a < b ? b : a; }
static inline int64_t min(int64_t a, int b) { return b < a ? b : a; }
static inline int64_t max(int64_t a, int b) { return a < b ? b : a; }
static inline int64_t min(int a, int64_t b) { return b < a ? b : a; }
static inline int64_t max(int a, int64_t b) { return a < b ? b : a; }
static inline uint32_t min(uint32_t a, int b) { return min(a, (uint32_t)b); }
static inline uint32_t max(uint32_t a, int b) { return max(a, (uint32_t)b); }
static inline uint32_t min(int a, uint32_t b) { return min((uint32_t)a, b); }
static inline uint32_t max(int a, uint32_t b) { return max((uint32_t)a, b); }

template <typename to, typename from> static inline to same_bits(from x) {
    static_assert(sizeof(to) == sizeof(from), "");
    to y;
    memcpy(&y, &x, sizeof y);
    return y;
}

static inline int __float_as_int(float x) { return same_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
static inline float __int_as_float(int x) { return same_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return same_bits<float>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
static inline float __fmul_rn(float a, float b) {
    volatile float product = a * b; // volatile: not contracted
    return product;
}
static inline float __fdividef(float a, float b) { return a / b; }
static inline void sincospi(double x, double *sine, double *cosine) {
    *sine = sin(M_PI * x);
    *cosine = cos(M_PI * x);
}
template <typename T> static inline T __ldcg(const T *at) { return *at; }

static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    const uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (int i = 0; i < 4; i++)
        result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return result;
}

static inline unsigned __vcmpeq2(unsigned a, unsigned b) {
    const unsigned differs = a ^ b;
    return ((differs & 0xffff) == 0 ? 0xffffu : 0) | ((differs >> 16) == 0 ? 0xffff0000u : 0);
}

/* ---- atomics ---- */

template <typename T, typename operation> static inline T update(T *at, operation next) {
    T before;
    __atomic_load(at, &before, __ATOMIC_RELAXED);
    for (T after = next(before);
         !__atomic_compare_exchange(at, &before, &after, true, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);)
        after = next(before);
    return before;
}

template <typename T, typename U> static inline T atomicAdd(T *at, U x) {
    return update(at, [x](T before) { return (T)(before + (T)x); });
}
template <typename T, typename U> static inline T atomicMax(T *at, U x) {
    return update(at, [x](T before) { return before < (T)x ? (T)x : before; });
}
template <typename T, typename U> static inline T atomicMin(T *at, U x) {
    return update(at, [x](T before) { return (T)x < before ? (T)x : before; });
}

/* ---- a warp and a block ---- */

template <typename T> struct shuffled {
    T value, received;
    uint32_t from;
};

template <typename T> static inline T shuffle(uint32_t mask, T value, uint32_t from) {
    shuffled<T> mine = {value, value, from};
    emulated_collective(mask, &mine, [](void *const *lanes, uint32_t) {
        for (int lane = 0; lane < 32; lane++)
            if (lanes[lane] != NULL) {
                shuffled<T> *const to = (shuffled<T> *)lanes[lane];
                if (lanes[to->from % 32] != NULL)
                    to->received = ((shuffled<T> *)lanes[to->from % 32])->value;
            }
    });
    return mine.received;
}

static inline uint32_t own_lane() { return emulated_thread->lane; }
template <typename T> static inline T __shfl_sync(uint32_t mask, T value, int from) {
    return shuffle(mask, value, (uint32_t)from % 32);
}
template <typename T> static inline T __shfl_sync(uint32_t mask, T value, int from, int width) {
    const uint32_t first = own_lane() / (uint32_t)width * (uint32_t)width;
    return shuffle(mask, value, first + (uint32_t)from % (uint32_t)width);
}
template <typename T>
static inline T __shfl_xor_sync(uint32_t mask, T value, int lanes, int width = 32) {
    const uint32_t from = own_lane() ^ (uint32_t)lanes;
    return shuffle(mask, value,
                   from / (uint32_t)width > own_lane() / (uint32_t)width ? own_lane() : from);
}
template <typename T>
static inline T __shfl_up_sync(uint32_t mask, T value, unsigned lanes, int width = 32) {
    const uint32_t inside = own_lane() % (uint32_t)width;
    return shuffle(mask, value, inside < lanes ? own_lane() : own_lane() - lanes);
}
template <typename T>
static inline T __shfl_down_sync(uint32_t mask, T value, unsigned lanes, int width = 32) {
    const uint32_t inside = own_lane() % (uint32_t)width;
    return shuffle(mask, value,
                   inside + lanes >= (uint32_t)width ? own_lane() : own_lane() + lanes);
}

/* Combines the values of all lanes. Every lane gets the result. */
template <typename T, typename operation>
static inline T reduce(uint32_t mask, T value, operation) {
    T mine = value;
    emulated_collective(mask, &mine, [](void *const *lanes, uint32_t) {
        T all = {};
        bool first = true;
        for (int lane = 0; lane < 32; lane++)
            if (lanes[lane] != NULL) {
                const T x = *(T *)lanes[lane];
                all = first ? x : operation::combine(all, x);
                first = false;
            }
        for (int lane = 0; lane < 32; lane++)
            if (lanes[lane] != NULL)
                *(T *)lanes[lane] = all;
    });
    return mine;
}

struct sum_of {
    template <typename T> static T combine(T a, T b) { return a + b; }
};
struct least_of {
    template <typename T> static T combine(T a, T b) { return min(a, b); }
};
struct most_of {
    template <typename T> static T combine(T a, T b) { return max(a, b); }
};
struct union_of {
    static uint32_t combine(uint32_t a, uint32_t b) { return a | b; }
};

template <typename T> static inline T __reduce_add_sync(uint32_t mask, T value) {
    return reduce(mask, value, sum_of());
}
template <typename T> static inline T __reduce_min_sync(uint32_t mask, T value) {
    return reduce(mask, value, least_of());
}
template <typename T> static inline T __reduce_max_sync(uint32_t mask, T value) {
    return reduce(mask, value, most_of());
}
static inline uint32_t __ballot_sync(uint32_t mask, bool set) {
    return reduce(mask, set ? 1u << own_lane() : 0u, union_of());
}
static inline bool __any_sync(uint32_t mask, bool set) { return __ballot_sync(mask, set) != 0; }
static inline bool __all_sync(uint32_t mask, bool set) { return __ballot_sync(mask, !set) == 0; }
static inline void __syncwarp(uint32_t mask = ~0u) {
    emulated_collective(mask, NULL, [](void *const *, uint32_t) {});
}

static inline void __syncthreads() { emulated_barrier(0, 0, true, false); }
static inline int __syncthreads_or(int predicate) {
    return emulated_barrier(0, 0, true, predicate != 0).any;
}
static inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

[[noreturn]] static inline void __trap() { emulated_fail("__trap()"); }
static inline long long clock64() {
    emulated_poll();
    return 0;
}

/* ---- launches ---- */

template <typename... Params, typename... Args>
static inline cudaError_t emulated_launch_kernel(const cudaLaunchConfig_t *config,
                                                 void (*kernel)(Params...), Args &&...args) {
    const std::function<void()> grid = [=] { kernel(args...); };
    return emulated_launch(config, &grid);
}
#define cudaLaunchKernelEx emulated_launch_kernel
