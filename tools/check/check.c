/* `fdma check`: every kernel of a device, over the cases of tests/cases.def in every dtype, against
 * the kernel "reference" in float64. */
#include "check/case.h"
#include "check/evaluate.h"
#include "check/operations.h"
#include "check/problem.h"
#include "check/report.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/device.h"
#include "common/interrupt.h"
#include "common/nearest.h"
#include "common/options.h"
#include "common/progress.h"
#include "common/text.h"
#include "common/timing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const fdma_dtype dtypes[] = {FDMA_FLOAT32, FDMA_FLOAT16, FDMA_BFLOAT16};

enum { dtype_count = sizeof dtypes / sizeof dtypes[0] };

typedef struct check_options {
    const char *kernel; /* NULL: all */
    const char *filter; /* NULL: every case */
    const char *device; /* NULL: the CPU */
    bool one_dtype;     /* each case in one dtype, in turn */
    bool list;          /* names only */
} check_options;

static bool matches(const check_case *test, const char *filter) {
    return filter == NULL || strstr(test->name, filter) != NULL;
}

/* Fills the tallies of the device's kernels. There are at most fdma_kernel_count(). */
static int find_kernels(const char *kernel, int32_t device, check_tally *tallies) {
    int count = 0;
    for (int32_t i = 0; i < fdma_kernel_count(); i++) {
        check_tally tally = {.info = {.size = sizeof tally.info}};
        if (fdma_describe_kernel(i, &tally.info) == FDMA_OK && runs_on(tally.info.name, device) &&
            (kernel == NULL || selects_kernel(kernel, tally.info.name)))
            tallies[count++] = tally;
    }
    return count;
}

/* The gradients of the reference are slow, and are compared with themselves, so that one dtype
 * suffices. */
static bool is_repetition(const check_tally *tally, const check_problem *problem) {
    return selects_kernel("reference", tally->info.name) &&
           strcmp(tally->info.operation, "backward") == 0 && problem->dtype != FDMA_FLOAT32;
}

static void check_kernels(const check_problem *problem, check_tally *tallies, int count,
                          check_coverage *coverage) {
    bool asked[check_operation_count] = {false}, took[check_operation_count] = {false};
    for (int i = 0; i < count && !interrupted(); i++) {
        check_tally *tally = &tallies[i];
        const check_operation *operation = check_find_operation(tally->info.operation);
        if (tally->info.missing != NULL || operation == NULL || !operation->applies(problem) ||
            is_repetition(tally, problem))
            continue;
        check_error error = {.ratio = (double)INFINITY, .tensor = ""};
        const fdma_status status = check_judge(problem, operation, tally->info.name, &error);
        check_count(tally, problem, status, &error);
        asked[operation - check_operations] = true;
        took[operation - check_operations] |= status != FDMA_UNSUPPORTED;
    }
    for (int i = 0; i < check_operation_count; i++) {
        coverage->taken[i][problem->dtype] += took[i];
        coverage->left[i][problem->dtype] += asked[i] && !took[i];
    }
}

static int check_one(const check_case *test, fdma_dtype dtype, int32_t device, check_tally *tallies,
                     int count, check_coverage *coverage) {
    check_problem problem;
    check_make_inputs(&problem, test, dtype, device);
    if (check_evaluate(&problem, tallies, count) != FDMA_OK) {
        clear_progress();
        print_error("fdma check: the reference refuses %s %s: %s", test->name, dtype_name(dtype),
                    fdma_last_error());
        return EXIT_FAILED;
    }
    check_kernels(&problem, tallies, count, coverage);
    check_free_all();
    return EXIT_DONE;
}

static bool same_family(const check_case *a, const check_case *b) {
    const size_t length = strcspn(a->name, "/");
    return length == strcspn(b->name, "/") && strncmp(a->name, b->name, length) == 0;
}

static bool is_first_of_family(int index) {
    for (int i = 0; i < index; i++)
        if (same_family(check_case_at(i), check_case_at(index)))
            return false;
    return true;
}

/* True if the case runs with the family of case `first`, in that dtype. */
static bool belongs(const check_options *options, int first, int index, int type) {
    return same_family(check_case_at(first), check_case_at(index)) &&
           matches(check_case_at(index), options->filter) &&
           (!options->one_dtype || type == index % dtype_count);
}

static int family_size(const check_options *options, int first) {
    int size = 0;
    for (int i = first * dtype_count; i < check_case_count() * dtype_count; i++)
        size += belongs(options, first, i / dtype_count, i % dtype_count);
    return size;
}

/* Checks the family of case `first`, and prints a line about it. */
static int check_family(const check_options *options, int32_t device, int first,
                        check_tally *tallies, int count, check_coverage *coverage) {
    const double start = now_ms();
    const int size = family_size(options, first);
    int done = 0;
    for (int i = first * dtype_count; done < size; i++) {
        const check_case *test = check_case_at(i / dtype_count);
        const fdma_dtype dtype = dtypes[i % dtype_count];
        if (!belongs(options, first, i / dtype_count, i % dtype_count))
            continue;
        show_progress("%d of %d  %s %s", ++done, size, test->name, dtype_name(dtype));
        const int code = check_one(test, dtype, device, tallies, count, coverage);
        if (code != EXIT_DONE || interrupted())
            return code;
    }
    clear_progress();
    if (size > 0)
        check_report_family(check_case_at(first)->name, size, tallies, count,
                            1e-3 * (now_ms() - start));
    return EXIT_DONE;
}

static int check_cases(const check_options *options, int32_t device, check_tally *tallies,
                       int count) {
    check_coverage coverage = {0};
    int code = EXIT_DONE;
    heed_interrupts();
    if (options->filter == NULL && options->kernel == NULL && !options->one_dtype)
        check_say("All cases take 3 to 10 minutes: FILTER, --one-dtype and --kernel check less.\n");
    for (int i = 0; i < check_case_count() && code == EXIT_DONE && !interrupted(); i++)
        if (is_first_of_family(i))
            code = check_family(options, device, i, tallies, count, &coverage);
    if (code != EXIT_DONE)
        return code;
    clear_progress();
    if (interrupted())
        printf("stopped: not all cases were checked\n");
    code =
        check_report(tallies, count, options->kernel == NULL && !interrupted() ? &coverage : NULL);
    if (interrupted())
        die_interrupted();
    return code;
}

/* Counts the matching cases; prints their names if wanted. */
static int count_matches(const check_options *options) {
    int count = 0;
    for (int i = 0; i < check_case_count(); i++) {
        if (!matches(check_case_at(i), options->filter))
            continue;
        if (options->list)
            printf("%s\n", check_case_at(i)->name);
        count++;
    }
    return count;
}

static int refuse_filter(const char *filter) {
    nearest_name nearest = {.typed = filter};
    for (int i = 0; i < check_case_count(); i++)
        offer_name(&nearest, check_case_at(i)->name, true);
    print_unknown("fdma check: no case matches", filter, nearest.name,
                  "fdma check --list prints their names");
    return EXIT_USAGE;
}

static const option option_table[] = {
    {.name = "--kernel",
     .value = "NAME",
     .help = "only this kernel, or those whose names begin with NAME/",
     .offset = offsetof(check_options, kernel),
     .kind = OPTION_TEXT},
    {.name = "--device",
     .value = "D",
     .help = "the device whose kernels are checked: cpu (default), cuda, or a number",
     .choices = device_words,
     .offset = offsetof(check_options, device),
     .kind = OPTION_TEXT},
    {.name = "--one-dtype",
     .help = "each case in one dtype, in turn: a third of the time",
     .offset = offsetof(check_options, one_dtype),
     .kind = OPTION_FLAG},
    {.name = "--list",
     .help = "print the names of the cases, and run none",
     .offset = offsetof(check_options, list),
     .kind = OPTION_FLAG},
};

const command_line check_command = {
    .name = "fdma check",
    .about = "Checks every kernel of this machine against the reference, over many cases.",
    .more = "FILTER selects the cases whose names contain it, such as padding or head-dim/64.\n"
            "A line says how each family of cases, such as padding, went and how long it took;\n"
            "then there is a line for each kernel. All cases take 3 to 10 minutes,\n"
            "with --one-dtype a third of it. Ctrl-C ends with the results so far.\n"
            "The reference computes in float64. A kernel passes if its error is at most twice\n"
            "that of a plain evaluation in the same dtype, plus one rounding step; selections\n"
            "must be equal. Exit status: 0 if all passed, else 1.\n",
    .operand = "FILTER",
    .operand_offset = offsetof(check_options, filter),
    .option_count = sizeof option_table / sizeof option_table[0],
    .options = option_table,
};

int check_main(int argc, char **argv) {
    check_options options = {0};
    const int read = read_options(&check_command, argc, argv, &options);
    if (read != OPTIONS_READ)
        return read;
    const int32_t device = find_device(check_command.name, options.device);
    if (device < 0 || !check_kernel(check_command.name, options.kernel))
        return EXIT_USAGE;
    if (count_matches(&options) == 0)
        return refuse_filter(options.filter);
    if (options.list)
        return EXIT_DONE;
    check_tally *tallies = allocate((size_t)fdma_kernel_count() * sizeof *tallies);
    const int count = find_kernels(options.kernel, device, tallies);
    int code = EXIT_USAGE;
    if (count > 0)
        code = check_cases(&options, device, tallies, count);
    else
        print_error("fdma check: --kernel is '%s', want a kernel of device %d that fdma info lists",
                    options.kernel != NULL ? options.kernel : "", device);
    free(tallies);
    return code;
}
