/* test_modes.c - the caller's floating-point modes (rounding direction, traps) do not change the
 * results of a CPU kernel, on any number of threads. */
#define _GNU_SOURCE /* feenableexcept */

#include "calls.h"

#include <fenv.h>

static fdma_operation tested;

/* Large enough for several threads. The default scale, 1 / sqrt(40), has to be rounded. */
static void make_call(call *x, fdma_dtype dtype) {
    static const call_sizes n = {
        .batch = 1, .q_len = 200, .kv_len = 600, .q_heads = 4, .kv_heads = 2, .head_dim = 40};
    uint64_t state = 31;
    *x = (call){.operation = tested};
    if (tested == operation_forward)
        x->args.forward = (fdma_forward_args){.causal = 1};
    if (tested == operation_backward)
        x->args.backward = (fdma_backward_args){.causal = 1};
    call_make(x, &n, dtype, true);
    call_alloc(x, &state);
    if (operations[tested].selection != 0)
        call_select(x, 100, FDMA_SCOPE_CAUSAL, &state);
}

static void run_in_modes(call *x) {
    fesetround(FE_UPWARD);
#if defined(__GLIBC__)
    feenableexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW | FE_UNDERFLOW);
#endif
    CHECK_OK(call_run(x));
#if defined(__GLIBC__)
    fedisableexcept(FE_ALL_EXCEPT);
#endif
    CHECK_INT(fegetround(), FE_UPWARD);
    fesetround(FE_TONEAREST);
}

static void check_modes(const char *kernel, fdma_dtype dtype) {
    call original, want;
    if (strcmp(kernel, "reference") == 0)
        return;
    make_call(&original, dtype);
    call_exec(&original)->kernel = kernel;
    call_exec(&original)->threads = 1;
    call_copy(&want, &original);
    call_own_outputs(&want);
    CHECK_OK(call_run(&want));
    for (int32_t threads = 1; threads <= 2; threads++) {
        call actual;
        call_copy(&actual, &original);
        call_own_outputs(&actual);
        call_exec(&actual)->threads = threads;
        run_in_modes(&actual);
        check_same_outputs(&actual, &want);
    }
}

static void modes_are_the_kernels_own(void) {
    static const fdma_operation all[] = {operation_forward, operation_backward, operation_score,
                                         operation_score_backward};
    for (int i = 0; i < TEST_COUNT(all); i++) {
        tested = all[i];
        for_each_kernel(operations[tested].name, check_modes);
    }
}

static const test_entry tests[] = {TEST(modes_are_the_kernels_own)};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
