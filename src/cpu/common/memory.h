/* Rows and elements of the caller's tensors, and arrays in the caller's workspace. */
#pragma once

#include "core/element.h"
#include "core/integers.h"
#include "core/kernel.h"
#include "cpu/simd/simd.h"

static inline float *take_floats(fdma_arena *arena, int64_t count) {
    return fdma_arena_take(arena, (size_t)count * sizeof(float));
}

static inline int32_t *take_ints(fdma_arena *arena, int64_t count) {
    return fdma_arena_take(arena, (size_t)count * sizeof(int32_t));
}

static inline uint32_t *take_codes(fdma_arena *arena, int64_t count) {
    return fdma_arena_take(arena, (size_t)count * sizeof(uint32_t));
}

/* The scratch memory of one thread; every thread has `size` bytes. */
static inline fdma_arena scratch_of_thread(uint8_t *scratch, size_t size, int32_t thread) {
    return (fdma_arena){.base = scratch + (size_t)thread * size};
}

static inline float *float_at(const fdma_tensor *tensor, int64_t x0, int64_t x1, int64_t x2) {
    return (float *)tensor->data + offset_of(tensor, x0, x1, x2);
}

/* The elements from `offset` on, in any dtype. */
static inline void *row_at(const fdma_tensor *tensor, int64_t offset) {
    return (uint8_t *)tensor->data + offset * (int64_t)fdma_dtype_size(tensor->dtype);
}

/* The channels at [b, n, head] of a tensor shaped as q or as k. */
static inline void *head_row(const fdma_tensor *tensor, int64_t b, int64_t n, int64_t head) {
    return row_at(tensor, offset_of(tensor, b, n, head));
}

static inline void *key_row(const fdma_problem *problem, const fdma_tensor *own,
                            const fdma_tensor *carried, int64_t b, int64_t j, int64_t g) {
    const key_storage storage = storage_of_key(problem, own, carried, j);
    return head_row(storage.tensor, b, storage.index, g);
}

/* The element of key j in a tensor shaped as bias. */
static inline float *key_float(const fdma_problem *problem, const fdma_tensor *own,
                               const fdma_tensor *carried, int64_t b, int64_t g, int64_t j) {
    const key_storage storage = storage_of_key(problem, own, carried, j);
    return float_at(storage.tensor, b, g, storage.index);
}

/* dt_bias of a kv head; 0 without it. */
static inline float dt_bias_of(const fdma_problem *problem, int64_t g) {
    return is_present(&problem->dt_bias) ? (float)fdma_load(&problem->dt_bias, g) : 0;
}

/* key_valid of sequence b, or NULL. */
static inline const uint8_t *valid_keys(const fdma_problem *problem, int64_t b) {
    const fdma_tensor *const valid = &problem->key_valid;
    if (!is_present(valid) || problem->kv_len == 0)
        return NULL;
    return (const uint8_t *)valid->data + b * valid->stride[0];
}

static inline int64_t slots_of(const fdma_problem *problem) {
    return min(problem->slots, problem->kv_len);
}

/* The keys that a query attends to, at most. */
static inline int64_t keys_of_query(const fdma_problem *problem) {
    return problem->selected ? slots_of(problem) : problem->kv_len;
}

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

INLINE void clear_vectors(vf *x, int from, int end) {
    UNROLL
    for (int m = from; m < end; m++)
        x[m] = vf_set(0);
}

INLINE void load_vectors(vf *x, const float *p, int from, int end) {
    UNROLL
    for (int m = from; m < end; m++)
        x[m] = vf_load(p + m * vf_width);
}

INLINE void store_vectors(float *p, const vf *x, int from, int end) {
    UNROLL
    for (int m = from; m < end; m++)
        vf_store(p + m * vf_width, x[m]);
}

INLINE void add_vectors(float *p, const vf *x, int from, int end) {
    UNROLL
    for (int m = from; m < end; m++)
        vf_store(p + m * vf_width, vf_add(vf_load(p + m * vf_width), x[m]));
}

/* sums += word * lanes */
INLINE void add_product(vf *sums, const float *word, const vf *lanes, int from, int end) {
    const vf_word factor = vf_load_word(word);
    UNROLL
    for (int m = from; m < end; m++)
        sums[m] = vf_dot(factor, lanes[m], sums[m]);
}
