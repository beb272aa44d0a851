/* test_modes.c - the caller's floating-point modes do not show in the results of a CPU kernel:
 * neither its rounding direction nor its traps, on any number of threads. */
#define _GNU_SOURCE /* feenableexcept */

#include "gradient.h"

#include <fenv.h>

enum { output_limit = 5 };

typedef void (*call_with)(const gradient_problem *p, const char *kernel, int32_t threads,
                          fdma_tensor *outputs);

/* Large enough for several threads. The default scale, 1 / sqrt(40), has to be rounded. */
static gradient_problem a_problem(fdma_dtype dtype) {
    problem x = {.batch = 1,
                 .q_len = 200,
                 .kv_len = 600,
                 .q_heads = 4,
                 .kv_heads = 2,
                 .head_dim = 40,
                 .window = 100,
                 .scope = FDMA_SCOPE_CAUSAL,
                 .causal = 1,
                 .dtype = dtype};
    problem_fill(&x, 31);
    problem_select(&x);
    return gradient_of(&x, 1);
}

static void call_forward(const gradient_problem *p, const char *kernel, int32_t threads,
                         fdma_tensor *outputs) {
    fdma_forward_args args = problem_args(&p->x, kernel);
    args.exec.threads = threads;
    CHECK_OK(run_forward(&args));
    outputs[0] = args.out;
    outputs[1] = args.lse;
}

static void call_backward(const gradient_problem *p, const char *kernel, int32_t threads,
                          fdma_tensor *outputs) {
    const gradients all = gradient_run(p, kernel, threads);
    const fdma_tensor each[] = {all.dq, all.dk, all.dv, all.dbias};
    memcpy(outputs, each, sizeof each);
}

static fdma_tensor random_like(fdma_dtype dtype, int64_t n0, int64_t n1, uint64_t seed) {
    const fdma_tensor tensor = new_tensor(dtype, n0, n1, -1, -1);
    fill_random(tensor, &seed, 1);
    return tensor;
}

static void call_score(const gradient_problem *p, const char *kernel, int32_t threads,
                       fdma_tensor *outputs) {
    const problem *const x = &p->x;
    fdma_score_args args = {
        .size = sizeof args,
        .v = x->v,
        .dt_proj = random_like(x->dtype, x->kv_heads, x->kv_heads * x->head_dim, 5),
        .a = random_like(x->dtype, x->kv_heads, -1, 6),
        .score = new_output(FDMA_FLOAT32, x->batch, x->kv_heads, x->kv_len, -1),
        .bias = new_output(FDMA_FLOAT32, x->batch, x->kv_heads, x->kv_len, -1),
        .exec = {.kernel = kernel, .threads = threads},
    };
    CHECK_OK(run_score(&args));
    outputs[0] = args.score;
    outputs[1] = args.bias;
}

static void call_score_backward(const gradient_problem *p, const char *kernel, int32_t threads,
                                fdma_tensor *outputs) {
    const problem *const x = &p->x;
    fdma_score_backward_args args = {
        .size = sizeof args,
        .dbias = x->bias,
        .v = x->v,
        .dt_proj = random_like(x->dtype, x->kv_heads, x->kv_heads * x->head_dim, 5),
        .a = random_like(x->dtype, x->kv_heads, -1, 6),
        .dv = copy_tensor(x->k), /* added to */
        .ddt_proj = new_output(x->dtype, x->kv_heads, x->kv_heads * x->head_dim, -1, -1),
        .da = new_output(x->dtype, x->kv_heads, -1, -1, -1),
        .exec = {.kernel = kernel, .threads = threads},
    };
    CHECK_OK(run_score_backward(&args));
    outputs[0] = args.dv;
    outputs[1] = args.ddt_proj;
    outputs[2] = args.da;
}

static void call_in_modes(call_with call, const gradient_problem *p, const char *kernel,
                          int32_t threads, fdma_tensor *outputs) {
    fesetround(FE_UPWARD);
#if defined(__GLIBC__)
    feenableexcept(FE_DIVBYZERO | FE_INVALID | FE_OVERFLOW | FE_UNDERFLOW);
#endif
    call(p, kernel, threads, outputs);
#if defined(__GLIBC__)
    fedisableexcept(FE_ALL_EXCEPT);
#endif
    CHECK_INT(fegetround(), FE_UPWARD);
    fesetround(FE_TONEAREST);
}

static void check_modes_with(const char *operation, call_with call) {
    for (int type = 0; type < problem_dtype_count; type++) {
        const kernel_list kernels = kernels_for(operation, problem_dtypes[type]);
        const gradient_problem p = a_problem(problem_dtypes[type]);
        for (int n = 0; n < kernels.count; n++) {
            fdma_tensor want[output_limit] = {{0}};
            if (strcmp(kernels.name[n], "reference") == 0)
                continue;
            test_context("%s %s %s", kernels.name[n], operation, dtype_name(problem_dtypes[type]));
            call(&p, kernels.name[n], 1, want);
            for (int32_t threads = 1; threads <= 2; threads++) {
                fdma_tensor actual[output_limit] = {{0}};
                call_in_modes(call, &p, kernels.name[n], threads, actual);
                for (int t = 0; t < output_limit && want[t].rank > 0; t++)
                    CHECK_BYTES(actual[t].data, want[t].data, bytes_of(want[t]));
            }
        }
        test_free_all();
    }
}

static void forward_has_its_own(void) { check_modes_with("forward", call_forward); }
static void backward_has_its_own(void) { check_modes_with("backward", call_backward); }
static void score_has_its_own(void) { check_modes_with("score", call_score); }
static void score_backward_has_its_own(void) {
    check_modes_with("score_backward", call_score_backward);
}

static const test_entry tests[] = {
    TEST(forward_has_its_own),
    TEST(backward_has_its_own),
    TEST(score_has_its_own),
    TEST(score_backward_has_its_own),
};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
