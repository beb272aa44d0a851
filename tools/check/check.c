/* check.c - `fdma check`: every kernel row of this machine over the case list and all types,
 * against the reference in float64. */
#include "check/check.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/device.h"
#include "common/options.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const check_case cases[] = {
#define CASE(name, batch, q_len, kv_len, q_heads, kv_heads, head_dim, window, mask, bias_form,     \
             softcap, scores, layout, padding)                                                     \
    {name,     batch,           q_len,           kv_len,           q_heads,                        \
     kv_heads, head_dim,        window,          MASK_##mask,      FDMA_BIAS_##bias_form,          \
     softcap,  SCORES_##scores, LAYOUT_##layout, PADDING_##padding},
#include "cases.def"
#undef CASE
};

static const fdma_dtype dtypes[] = {FDMA_FLOAT32, FDMA_FLOAT16, FDMA_BFLOAT16};

enum {
    case_count = sizeof cases / sizeof cases[0],
    dtype_count = sizeof dtypes / sizeof dtypes[0],
    row_limit = 64,
};

/* A kernel row and what has become of it. */
typedef struct check_row {
    fdma_kernel_info info;
    int passed, failed;
    int taken[FDMA_UINT8 + 1], refused[FDMA_UINT8 + 1]; /* cases of a type */
    int64_t compared;                                   /* elements */
    double worst;                                       /* excess of the worst case */
    const char *worst_case;
    fdma_dtype worst_dtype;
} check_row;

typedef struct check_options {
    const char *kernel; /* NULL: all */
    const char *filter; /* NULL: all */
    const char *device; /* NULL: the CPU */
} check_options;

/* Rows that were asked for a case, and those that took it. */
typedef struct case_takers {
    int asked[check_operation_count], took[check_operation_count];
} case_takers;

static const check_operation *find_operation(const char *name) {
    for (int i = 0; i < check_operation_count; i++) {
        if (strcmp(check_operations[i].name, name) == 0) {
            return &check_operations[i];
        }
    }
    return NULL;
}

/* The reference is the oracle again, from other types and back, and slow: of its gradients one type
 * is enough. */
static int is_repetition(const check_row *row, const check_problem *problem) {
    return strcmp(row->info.name, "reference") == 0 &&
           strcmp(row->info.operation, "backward") == 0 && problem->dtype != FDMA_FLOAT32;
}

static void judge_row(check_row *row, const check_problem *problem, case_takers *takers) {
    const check_operation *operation = find_operation(row->info.operation);
    if (row->info.missing != NULL || operation == NULL || !operation->concerns(problem) ||
        is_repetition(row, problem)) {
        return;
    }
    takers->asked[operation - check_operations]++;
    check_verdict verdict = {.excess = (double)INFINITY, .tensor = ""};
    const fdma_status status = operation->judge(problem, row->info.name, &verdict);
    if (status == FDMA_UNSUPPORTED) {
        row->refused[problem->dtype]++;
        return;
    }
    takers->took[operation - check_operations]++;
    row->taken[problem->dtype]++;
    const int passed = status == FDMA_OK && verdict.excess <= 1;
    row->passed += passed;
    row->failed += !passed;
    row->compared += verdict.compared;
    if (!(verdict.excess <= row->worst)) {
        row->worst = verdict.excess;
        row->worst_case = problem->test->name;
        row->worst_dtype = problem->dtype;
    }
    if (!passed) {
        printf("FAILED %s %s %s %s: ", row->info.name, row->info.operation, problem->test->name,
               dtype_name(problem->dtype));
        if (status != FDMA_OK) {
            printf("%s: %s\n", fdma_status_name(status), fdma_last_error());
        } else {
            printf("error of %s is %.3g times the tolerance\n", verdict.tensor, verdict.excess);
        }
    }
}

/* Does `kernel` name this row: all of its name, or the beginning up to a '/'? */
static int is_named(const char *kernel, const char *name) {
    const size_t length = strlen(kernel);
    return strncmp(kernel, name, length) == 0 && (name[length] == '\0' || name[length] == '/');
}

/* The device's rows. */
static int find_rows(const char *kernel, int32_t device, check_row rows[row_limit]) {
    int count = 0;
    for (int32_t i = 0; i < fdma_kernel_count() && count < row_limit; i++) {
        check_row row = {.info = {.size = sizeof row.info}};
        if (fdma_describe_kernel(i, &row.info) == FDMA_OK && runs_on(row.info.name, device) &&
            (kernel == NULL || is_named(kernel, row.info.name))) {
            rows[count++] = row;
        }
    }
    return count;
}

/* On the CPU a kernel takes a type or does not: one that refuses some cases of a type has a fault.
 * Decode is for few rows only. */
static int refuses_some(const check_row *row) {
    if (!runs_on(row->info.name, 0) || strstr(row->info.name, "/decode") != NULL) {
        return 0;
    }
    for (size_t i = 0; i < dtype_count; i++) {
        if (row->taken[dtypes[i]] > 0 && row->refused[dtypes[i]] > 0) {
            return 1;
        }
    }
    return 0;
}

/* Cases of an operation and a type that some row took, and those that none did. */
typedef struct case_counts {
    int taken[check_operation_count][FDMA_UINT8 + 1], left[check_operation_count][FDMA_UINT8 + 1];
} case_counts;

static void count_case(case_counts *counts, const case_takers *takers, fdma_dtype dtype) {
    for (int operation = 0; operation < check_operation_count; operation++) {
        counts->taken[operation][dtype] += takers->took[operation] > 0;
        counts->left[operation][dtype] +=
            takers->asked[operation] > 0 && takers->took[operation] == 0;
    }
}

/* All rows together take a type or do not. Returns how often that does not hold. */
static int report_left(const case_counts *counts) {
    int failed = 0;
    for (int i = 0; i < check_operation_count * dtype_count; i++) {
        const int operation = i / dtype_count;
        const fdma_dtype dtype = dtypes[i % dtype_count];
        const int left = counts->left[operation][dtype];
        if (counts->taken[operation][dtype] > 0 && left > 0) {
            printf("FAILED %s %s: no kernel takes %d of the cases\n",
                   check_operations[operation].name, dtype_name(dtype), left);
            failed++;
        }
    }
    return failed;
}

static void report_row(const check_row *row) {
    printf("%-14s %-14s ", row->info.name, row->info.operation);
    if (row->info.missing != NULL) {
        printf("skipped: this machine lacks %s\n", row->info.missing);
    } else if (find_operation(row->info.operation) == NULL) {
        printf("FAILED: there is no check of this operation\n");
    } else if (refuses_some(row)) {
        printf("FAILED: refuses some cases of a type that it takes\n");
    } else if (row->worst_case == NULL) {
        printf("%4d cases   %s\n", row->passed + row->failed,
               row->compared > 0 ? "equal" : "nothing compared");
    } else {
        printf("%4d cases   worst error %.2f of the tolerance (%s %s)\n", row->passed + row->failed,
               row->worst, row->worst_case, dtype_name(row->worst_dtype));
    }
}

/* `left`: the faults of all rows together. */
static int report(const check_row *rows, int count, int left) {
    int passed = 0, failed = left;
    int64_t compared = 0;
    for (int i = 0; i < count; i++) {
        report_row(&rows[i]);
        passed += rows[i].passed;
        failed += rows[i].failed + refuses_some(&rows[i]) +
                  (find_operation(rows[i].info.operation) == NULL);
        compared += rows[i].compared;
    }
    if (compared == 0) {
        printf("nothing was compared\n");
    }
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0 || compared == 0 ? EXIT_FAILED : EXIT_DONE;
}

static int walk(const check_options *options, int32_t device, check_row *rows, int count) {
    case_counts counts = {0};
    for (int i = 0; i < case_count * dtype_count; i++) {
        const check_case *test = &cases[i / dtype_count];
        if (options->filter != NULL && strstr(test->name, options->filter) == NULL) {
            continue;
        }
        check_problem problem;
        if (check_problem_make(&problem, test, dtypes[i % dtype_count], device) != FDMA_OK) {
            printf("the reference cannot do %s: %s\n", test->name, fdma_last_error());
            return EXIT_FAILED;
        }
        case_takers takers = {0};
        for (int row = 0; row < count; row++) {
            judge_row(&rows[row], &problem, &takers);
        }
        count_case(&counts, &takers, problem.dtype);
        check_free_all();
    }
    return report(rows, count, options->kernel == NULL ? report_left(&counts) : 0);
}

int check_main(int argc, char **argv) {
    static const option_row rows_of_options[] = {
        {.name = "--kernel",
         .value = "NAME",
         .help = "only this kernel, or those whose name begins with NAME/",
         .offset = offsetof(check_options, kernel),
         .kind = OPTION_TEXT},
        {.name = "--device",
         .value = "D",
         .help = "the kernels of cpu (default), cuda, or the device of that number",
         .offset = offsetof(check_options, device),
         .kind = OPTION_TEXT},
    };
    static const command_line command = {
        .name = "fdma check",
        .about = "Every kernel of this machine against the reference in float64, over many cases.",
        .more = "FILTER: only cases whose name contains it, such as padding or head-dim/64.\n"
                "An error may be twice that of a plain evaluation in the same type, and one\n"
                "rounding step; selections must be equal. Exit status: 0 if all passed, else 1.\n",
        .operand = "FILTER",
        .operand_offset = offsetof(check_options, filter),
        .row_count = sizeof rows_of_options / sizeof rows_of_options[0],
        .rows = rows_of_options,
    };
    check_options options = {0};
    const int read = read_options(&command, argc, argv, &options);
    if (read != OPTIONS_READ) {
        return read;
    }
    const int32_t device = find_device(command.name, options.device);
    if (device < 0) {
        return EXIT_USAGE;
    }
    static check_row rows[row_limit];
    const int count = find_rows(options.kernel, device, rows);
    if (count == 0) {
        fprintf(stderr,
                "fdma check: --kernel is '%s', want one of device %d that fdma info lists\n",
                options.kernel != NULL ? options.kernel : "", device);
        return EXIT_USAGE;
    }
    return walk(&options, device, rows, count);
}
