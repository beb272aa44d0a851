/* test.h - what the C tests are written with: checks, a table of tests, one closing line.
 *
 *     static void adds(void) { CHECK_INT(1 + 1, 2); }
 *     static const test_entry tests[] = {TEST(adds)};
 *     int main(void) { return test_run(tests, TEST_COUNT(tests)); }
 *
 * calls.h and problem.h have entries for properties of every kernel: EACH_KERNEL, EACH_PROBLEM.
 * A test that checks nothing fails. Every comparison of numbers is written so that NaN fails.
 */
#pragma once

#include "fdma.h"

#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct problem;    /* see problem.h */
struct vocabulary; /* see vocabulary/vocabulary.h */

/* A test: a function, or a property that `run_each` checks with every kernel of an operation. */
typedef struct test_entry {
    const char *name;
    void (*run)(void);
    void (*run_each)(const struct test_entry *test); /* if not NULL, in place of `run` */
    const char *operation;
    void (*each_kernel)(const char *kernel, fdma_dtype dtype);
    void (*each_kernel_once)(const char *kernel);
    void (*each_problem)(struct problem *x, const char *kernel);
    void (*each_vocabulary)(const struct vocabulary *words);
    const struct problem *sizes;
    int count; /* of sizes */
    uint64_t seed;
} test_entry;

#define TEST(function) {.name = #function, .run = function}
#define TEST_COUNT(table) ((int)(sizeof(table) / sizeof(table)[0]))

enum {
    test_reports = 8,    /* failures printed for one test; later ones are only counted */
    test_blocks = 65536, /* buffers alive at once */
    test_guard = 64,     /* bytes before and after a guarded buffer */
};
static const unsigned char test_guard_byte = 0xa5;

typedef struct test_block {
    unsigned char *base;
    size_t size;
    int guarded;
} test_block;

/* The running test. */
static struct {
    long checks;
    long failures;
    char context[256];
    test_block block[test_blocks];
    int blocks;
    int index; /* in the table of tests */
} test_state;

/* test_divisor() - FDMA_TEST_DIVISOR, the divisor of the number of random cases; 1 by default.
 * tools/gates/run.sh sets it for builds and emulators that are slow. */
static inline int test_divisor(void) {
    const char *const variable = getenv("FDMA_TEST_DIVISOR");
    const int value = variable != NULL ? atoi(variable) : 1;
    return value > 1 ? value : 1;
}

/* test_repeats() - how many of `count` random cases are tested. The cases alternate between kinds,
 * so a quarter of them must still include each kind. */
static inline int test_repeats(int count) { return (count + test_divisor() - 1) / test_divisor(); }

/* test_step() - the step through a list of cases: `sparse` in the slowest samples. */
static inline int test_step(int sparse) { return test_divisor() > 8 ? sparse : 1; }

/* test_context() - sets the words that precede later failures: the kernel and the case. */
__attribute__((format(printf, 1, 2))) static inline void test_context(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(test_state.context, sizeof test_state.context, format, list);
    va_end(list);
}

__attribute__((format(printf, 3, 4))) static inline void test_fail(const char *file, int line,
                                                                   const char *format, ...) {
    if (test_state.failures++ >= test_reports)
        return;
    va_list list;
    va_start(list, format);
    printf("%s:%d: ", file, line);
    if (test_state.context[0] != '\0')
        printf("[%s] ", test_state.context);
    vprintf(format, list);
    printf("\n");
    va_end(list);
}

static inline int test_true(int holds, const char *file, int line, const char *text) {
    test_state.checks++;
    if (!holds)
        test_fail(file, line, "%s", text);
    return holds;
}

static inline int test_int(long long actual, long long want, const char *file, int line,
                           const char *text) {
    test_state.checks++;
    if (actual != want)
        test_fail(file, line, "%s is %lld, want %lld", text, actual, want);
    return actual == want;
}

/* Infinities are near only to themselves, NaN to nothing; an infinite tolerance never passes. */
static inline int test_near(double actual, double want, double tolerance, const char *file,
                            int line, const char *text) {
    test_state.checks++;
    const int near =
        isinf(want) ? actual == want : fabs(actual - want) <= tolerance && tolerance < INFINITY;
    if (!near)
        test_fail(file, line, "%s is %.9g, want %.9g within %.3g", text, actual, want, tolerance);
    return near;
}

static inline int test_bytes(const void *actual, const void *want, size_t size, const char *file,
                             int line, const char *text) {
    const unsigned char *a = actual, *b = want;
    test_state.checks++;
    for (size_t i = 0; i < size; i++) {
        if (a[i] != b[i]) {
            test_fail(file, line, "%s: byte %zu of %zu is %02x, want %02x", text, i, size, a[i],
                      b[i]);
            return 0;
        }
    }
    return 1;
}

static inline int test_is_word_char(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static inline int test_has_word(const char *text, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = strstr(text, word); at != NULL; at = strstr(at + 1, word)) {
        const int begins = at == text || !test_is_word_char(at[-1]) || !test_is_word_char(word[0]);
        if (begins && !test_is_word_char(at[length]))
            return 1;
    }
    return 0;
}

static inline int test_word(const char *text, const char *word, const char *file, int line) {
    test_state.checks++;
    const int found = test_has_word(text, word);
    if (!found)
        test_fail(file, line, "\"%s\" does not say \"%s\"", text, word);
    return found;
}

#define CHECK(holds) test_true((holds) != 0, __FILE__, __LINE__, #holds)
#define CHECK_INT(actual, want)                                                                    \
    test_int((long long)(actual), (long long)(want), __FILE__, __LINE__, #actual)
#define CHECK_NEAR(actual, want, tolerance)                                                        \
    test_near(actual, want, tolerance, __FILE__, __LINE__, #actual)
#define CHECK_BYTES(actual, want, size) test_bytes(actual, want, size, __FILE__, __LINE__, #actual)
#define CHECK_WORD(text, word) test_word(text, word, __FILE__, __LINE__)

static inline void *test_keep(size_t size, int guarded) {
    const size_t total = guarded ? size + 2 * test_guard : size;
    unsigned char *base = malloc(total > 0 ? total : 1);
    if (base == NULL || test_state.blocks == test_blocks) {
        printf("out of memory\n");
        exit(1);
    }
    memset(base, guarded ? test_guard_byte : 0, total);
    test_state.block[test_state.blocks++] =
        (test_block){.base = base, .size = size, .guarded = guarded};
    return guarded ? base + test_guard : base;
}

/* test_alloc() - zeroed memory that lives until test_free_all(), at the latest until the test's
 * end. It has exactly the requested size, so that a sanitizer sees every access beyond it. */
static inline void *test_alloc(size_t size) { return test_keep(size, 0); }

/* test_alloc_guarded() - as test_alloc(), between guard bytes that test_free_all() checks. */
static inline void *test_alloc_guarded(size_t size) { return test_keep(size, 1); }

/* Frees the buffers that were allocated when there were more than `kept`. */
static inline void test_free_after(int kept) {
    unsigned char guard[test_guard];
    memset(guard, test_guard_byte, sizeof guard);
    while (test_state.blocks > kept) {
        const test_block block = test_state.block[--test_state.blocks];
        if (block.guarded) {
            CHECK_BYTES(block.base, guard, sizeof guard);
            CHECK_BYTES(block.base + test_guard + block.size, guard, sizeof guard);
        }
        free(block.base);
    }
}

static inline void test_free_all(void) { test_free_after(0); }

static inline int test_one(const test_entry *test) {
    test_state.checks = 0;
    test_state.failures = 0;
    test_state.context[0] = '\0';
    if (test->run_each != NULL)
        test->run_each(test);
    else
        test->run();
    test_free_all();
    if (test_state.checks == 0) {
        printf("%s: checked nothing\n", test->name);
        return 0;
    }
    if (test_state.failures > 0) {
        printf("%s: %ld of %ld checks failed\n", test->name, test_state.failures,
               test_state.checks);
    }
    return test_state.failures == 0;
}

/* test_run() - runs the table and prints "N passed, N failed"; returns main()'s exit status. */
static inline int test_run(const test_entry *tests, int count) {
    int failed = 0;
    for (int i = 0; i < count; i++) {
        test_state.index = i;
        failed += !test_one(&tests[i]);
        fflush(stdout);
    }
    printf("%d passed, %d failed\n", count - failed, failed);
    return failed > 0 || count == 0;
}
