/* Choices that were measured to be faster on this machine than the rules of the kernels, for
 * classes of similar calls. A tuning never changes once a call can see it. src/tune/ makes
 * tunings. */
#pragma once

#include "core/problem.h"

enum {
    tuning_name = 32,  /* bytes of a kernel's name */
    tuning_line = 256, /* bytes of an entry as a line of a file */
};

/* Calls that share a choice. The batch and the number of threads are left out, so that results
 * depend on neither. */
typedef struct tuning_class {
    fdma_operation operation; /* forward or backward */
    fdma_dtype dtype;
    int64_t causal, head_dim;
    int64_t rows; /* q_len * group rows of a kv head; rounded to a power of 2, as the two below */
    int64_t keys; /* kv_len */
    int64_t kept; /* keys that a query keeps, at most */
} tuning_class;

/* Empty and 0: the rules decide. */
typedef struct tuning_choice {
    char kernel[tuning_name];
    int64_t tile_rows;   /* rows of a tile, rounded up to whole blocks of lanes */
    int64_t split_keys;  /* keys of a split, in the kernels of forward for few rows */
    int64_t thread_work; /* microseconds, as the kernels estimate them, for which a thread pays */
} tuning_choice;

typedef struct tuning_entry {
    tuning_class calls;
    tuning_choice choice;
    char line[tuning_line]; /* both as text */
} tuning_entry;

typedef struct fdma_tuning {
    struct fdma_tuning *older; /* src/tune/ keeps all of them */
    int32_t count;
    tuning_entry entries[];
} fdma_tuning;

/* The power of 2 that is nearest to n; 0 for 0. */
int64_t fdma_nearest_power(int64_t n);

/* The class of a problem. Calls of a class without an entry follow the rules. */
tuning_class fdma_class_of(const fdma_problem *problem);

const tuning_entry *fdma_find_entry(const fdma_tuning *tuning, const tuning_class *calls);

/* The tuned choice for a problem. The rules decide for problems without a tuning, and for what was
 * not measured (a kernel that the caller forces, masks, attn_bias, dropout). */
const tuning_choice *fdma_tuned(const fdma_problem *problem);
