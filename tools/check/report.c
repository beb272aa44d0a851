/* See check/report.h. */
#include "check/report.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/device.h"
#include "common/progress.h"

#include <stdio.h>
#include <string.h>

void check_count(check_tally *tally, const check_problem *problem, fdma_status status,
                 const check_error *error) {
    const char *test = problem->test->name, *dtype = dtype_name(problem->dtype);
    if (status == FDMA_UNSUPPORTED) {
        tally->refused[problem->dtype]++;
        return;
    }
    const bool passed = status == FDMA_OK && error->ratio <= 1;
    tally->taken[problem->dtype]++;
    tally->passed += passed;
    tally->failed += !passed;
    tally->compared += error->compared;
    if (!(error->ratio <= tally->worst)) {
        tally->worst = error->ratio;
        tally->worst_case = test;
        tally->worst_dtype = problem->dtype;
    }
    if (passed)
        return;
    clear_progress();
    printf("FAILED %s %s %s %s: ", tally->info.name, tally->info.operation, test, dtype);
    if (status != FDMA_OK)
        printf("%s: %s\n", fdma_status_name(status), fdma_last_error());
    else
        printf("the error of %s is %.3g times the tolerance\n", error->tensor, error->ratio);
}

void check_say(const char *line) {
    fputs(line, stdout);
    fflush(stdout);
}

void check_report_family(const char *name, int cases, const check_tally *tallies, int count,
                         double seconds) {
    int passed = 0, failed = 0;
    for (int i = 0; i < count; i++) {
        passed += tallies[i].passed;
        failed += tallies[i].failed;
    }
    printf("%-10.*s %3d cases in %6.1f s; so far %d passed, %d failed\n", (int)strcspn(name, "/"),
           name, cases, seconds, passed, failed);
    fflush(stdout);
}

/* A kernel of the CPU takes all cases of a dtype or none: one that refuses some is at fault. Decode
 * kernels take few queries only. */
static bool refuses_some(const check_tally *tally) {
    if (!runs_on(tally->info.name, 0) || strstr(tally->info.name, "/decode") != NULL)
        return false;
    for (int dtype = 0; dtype <= FDMA_UINT8; dtype++)
        if (tally->taken[dtype] > 0 && tally->refused[dtype] > 0)
            return true;
    return false;
}

static void print_tally(const check_tally *tally) {
    printf("%-*s %-15s ", kernel_width(), tally->info.name, tally->info.operation);
    if (tally->info.missing != NULL)
        printf("skipped: this machine lacks %s\n", tally->info.missing);
    else if (check_find_operation(tally->info.operation) == NULL)
        printf("FAILED: fdma check does not know this operation\n");
    else if (refuses_some(tally))
        printf("FAILED: refuses some cases of a dtype and takes others\n");
    else if (tally->compared == 0)
        printf("%4d cases   nothing was compared\n", tally->passed + tally->failed);
    else if (tally->worst_case == NULL)
        printf("%4d cases   equal\n", tally->passed + tally->failed);
    else
        printf("%4d cases   worst error %.2f of the tolerance (%s %s)\n",
               tally->passed + tally->failed, tally->worst, tally->worst_case,
               dtype_name(tally->worst_dtype));
}

/* All kernels together take all cases of an operation and a dtype, or none. Returns the number of
 * pairs that break this rule. */
static int report_coverage(const check_coverage *coverage) {
    int failed = 0;
    for (int operation = 0; operation < check_operation_count; operation++) {
        for (int dtype = 0; dtype <= FDMA_UINT8; dtype++) {
            const int left = coverage->left[operation][dtype];
            if (coverage->taken[operation][dtype] == 0 || left == 0)
                continue;
            printf("FAILED %s %s: no kernel takes %d of the cases\n",
                   check_operations[operation].name, dtype_name((fdma_dtype)dtype), left);
            failed++;
        }
    }
    return failed;
}

int check_report(const check_tally *tallies, int count, const check_coverage *coverage) {
    int passed = 0, failed = coverage != NULL ? report_coverage(coverage) : 0;
    int64_t compared = 0;
    printf("\n");
    for (int i = 0; i < count; i++) {
        const check_tally *tally = &tallies[i];
        const bool unknown = check_find_operation(tally->info.operation) == NULL;
        print_tally(tally);
        passed += tally->passed;
        failed += tally->failed + refuses_some(tally) + unknown;
        compared += tally->compared;
    }
    if (compared == 0)
        printf("nothing was compared\n");
    printf("%d passed, %d failed\n", passed, failed);
    return failed > 0 || compared == 0 ? EXIT_FAILED : EXIT_DONE;
}
