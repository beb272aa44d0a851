/* test_math.c - compares the elementary functions of src/cpu/common/math.h, in every vocabulary
 * that this machine can run, with double precision. */
#include "vocabulary/each.h"

typedef struct function_case {
    const char *name;
    void (*function)(float *, const float *);
    double (*exact)(double);
    float first, last; /* the range of arguments */
    double error;      /* the relative error that math.h promises */
} function_case;

static void check_function(const vocabulary *x, const function_case *f) {
    enum { samples = 200000 };
    int wrong = 0;
    for (int n = 0; n < samples; n += x->width) {
        float from[lanes], to[lanes];
        for (int i = 0; i < x->width; i++)
            from[i] = f->first + (f->last - f->first) * (float)(n + i) / (samples + lanes);
        f->function(to, from);
        for (int i = 0; i < x->width; i++) {
            const double exact = f->exact((double)from[i]);
            wrong += !(fabs((double)to[i] - exact) <= f->error * fabs(exact));
        }
    }
    test_context("%s of %d lanes", f->name, x->width);
    CHECK_INT(wrong, 0);
}

static void check_functions(const vocabulary *x) {
    const function_case functions[] = {
        {"exp2_of", x->exp2, exp2, -125, 127.9F, 2e-7},
        {"exp_of", x->exp, exp, -87, 88, 2.5e-7},
        {"log1p_of", x->log1p, log1p, 1e-6F, 1, 2.5e-7},
        {"tanh_of", x->tanh, tanh, 1e-6F, 12, 2.5e-7},
    };
    for (int f = 0; f < TEST_COUNT(functions); f++)
        check_function(x, &functions[f]);
}

static void functions_are_as_near_as_promised(void) { on_each(check_functions); }

static const test_entry tests[] = {TEST(functions_are_as_near_as_promised)};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
