/* `fdma bench`: the time of each kernel, and how much of the machine it uses. */
#define _POSIX_C_SOURCE 200809L

#include "bench/job.h"

#include "commands.h"
#include "common/device.h"
#include "common/json.h"
#include "common/machine.h"
#include "common/nearest.h"
#include "common/options.h"
#include "common/output.h"
#include "common/progress.h"
#include "common/text.h"

#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct bench_options {
    const char *filter; /* NULL: every case */
    const char *json;   /* NULL: no file */
    const char *kernel; /* NULL: the dispatched one */
    const char *where;  /* value of --device; NULL: the CPU */
    int64_t threads;
    bool all, list;
    int32_t device; /* fdma_exec.device */
} bench_options;

static const option option_table[] = {
    {"--json", "FILE",
     "also write the figures to FILE, one JSON object per line, as they come:\n"
     "FILE is valid at any time, also if the program is stopped",
     NULL, offsetof(bench_options, json), OPTION_FILE, false},
    {"--threads", "N", "CPU threads (default 1)", NULL, offsetof(bench_options, threads),
     OPTION_COUNT, false},
    {"--device", "D", "cpu (default), cuda, or a number; devices have cases of their own",
     device_words, offsetof(bench_options, where), OPTION_TEXT, false},
    {"--kernel", "NAME", "run this kernel instead of the one that would be dispatched", NULL,
     offsetof(bench_options, kernel), OPTION_TEXT, false},
    {"--all", NULL, "run every available kernel; the reference only with --kernel reference", NULL,
     offsetof(bench_options, all), OPTION_FLAG, false},
    {"--list", NULL, "print the names of the cases, and run none", NULL,
     offsetof(bench_options, list), OPTION_FLAG, false},
};

const command_line bench_command = {
    .name = "fdma bench",
    .about = "Times the cases whose names contain FILTER, or match it if it has *, ? or [.",
    .more =
        "Cases are causal, with batch 1 and one head unless /h32g8 (query and kv heads)\n"
        "follows; d is head_dim, n the length, w the window.\n"
        "A selected forward includes the selection; decode and tiny are one query, over many or\n"
        "a few keys, without it. backward does not include the forward call.\n"
        "\n"
        "ms        median of at least 5 runs\n"
        "spread    (90th percentile - 10th percentile) / median\n"
        "GFLOP/s   useful operations: 4 * head_dim for each head, query and key that the query\n"
        "          keeps; backward has 2.5 times as many\n"
        "of peak   GFLOP/s / those of a loop of multiply-adds in registers, with the kernel's\n"
        "          instruction set and number of threads, run in turn with the case\n"
        "ns/key    select: time per key and kv head\n"
        "of read   time of a plain read of the kept k and v (score: of v; rotate: of what it\n"
        "          reads, but it also writes), run in turn with the case / ms; on a device half\n"
        "          the time of a copy\n",
    .operand = "FILTER",
    .operand_offset = offsetof(bench_options, filter),
    .option_count = sizeof option_table / sizeof option_table[0],
    .options = option_table,
};

static bool matches(const bench_case *item, const char *filter) {
    char name[BENCH_NAME];
    bench_case_name(item, name);
    if (filter == NULL)
        return true;
    return strpbrk(filter, "*?[") != NULL ? fnmatch(filter, name, 0) == 0
                                          : strstr(name, filter) != NULL;
}

static void write_json(FILE *stream, const char *name, const char *kernel,
                       const bench_options *options, const bench_figures *figures) {
    const struct {
        const char *field;
        double value;
    } numbers[] = {
        {"ms", figures->ms},
        {"spread", figures->spread},
        {"useful_gflops", figures->useful_gflops},
        {"of_peak", figures->of_peak},
        {"ns_per_key", figures->ns_per_key},
    };
    fprintf(stream, "{\"case\": \"%s\", \"kernel\": \"%s\"", name, kernel);
    if (options->device == 0)
        fprintf(stream, ", \"threads\": %" PRId64, options->threads);
    for (size_t n = 0; n < sizeof numbers / sizeof numbers[0]; n++) {
        fprintf(stream, ", \"%s\": ", numbers[n].field);
        json_number(stream, numbers[n].value);
    }
    if (!isnan(figures->of_read)) {
        fputs(", \"of_read\": ", stream);
        json_number(stream, figures->of_read);
    }
    fputs("}\n", stream);
}

static void print_cell(const char *format, double number) {
    char cell[32] = "";
    if (!isnan(number))
        snprintf(cell, sizeof cell, format, number);
    printf(" %8s", cell);
}

static void print_figures(const char *name, const char *kernel, const bench_figures *figures) {
    printf("%-52s %-*s %10.*f", name, kernel_width(), kernel, figures->ms < 0.1 ? 6 : 3,
           figures->ms);
    print_cell("%.3f", figures->spread);
    print_cell("%.1f", figures->useful_gflops);
    print_cell("%.3f", figures->of_peak);
    print_cell("%.2f", figures->ns_per_key);
    print_cell("%.3f", figures->of_read);
    printf("\n");
    fflush(stdout);
}

static int refuse(const char *path) {
    print_error("fdma bench: %s: cannot be written: %s", path, strerror(errno));
    return EXIT_FAILED;
}

/* The file gets its name with its first row. */
static int add_row(output_file *json, const char *name, const char *kernel,
                   const bench_options *options, const bench_figures *figures) {
    write_json(json->stream, name, kernel, options, figures);
    return publish_output(json) != 0 ? refuse(options->json) : EXIT_DONE;
}

/* A kernel that refuses the case is an error; with --all it is left out. */
static int bench_one(const bench_options *options, const bench_case *item, const char *kernel,
                     output_file *json) {
    char name[BENCH_NAME];
    int code = EXIT_DONE;
    bench_figures figures;
    bench_case_name(item, name);
    show_progress("%s %s ...", name, kernel != NULL ? kernel : "");
    const bench_target target = {kernel, options->device, (int)options->threads};
    bench_job *job = open_job(item, &target);
    const fdma_status status = job != NULL ? measure_job(item, job, &figures) : FDMA_UNSUPPORTED;
    clear_progress();
    if (job == NULL && options->all)
        return EXIT_DONE;
    if (status != FDMA_OK) {
        print_error("fdma bench: %s: %s", name, fdma_last_error());
    } else {
        print_figures(name, job->kernel, &figures);
        if (json != NULL)
            code = add_row(json, name, job->kernel, options, &figures);
    }
    if (job != NULL)
        close_job(job);
    return status != FDMA_OK ? EXIT_USAGE : code;
}

/* Runs the case on every available kernel except the reference, which would take hours. */
static int bench_every_kernel(const bench_options *options, const bench_case *item,
                              output_file *json) {
    for (int32_t index = 0; index < fdma_kernel_count(); index++) {
        fdma_kernel_info kernel = {.size = sizeof kernel};
        if (fdma_describe_kernel(index, &kernel) != FDMA_OK || kernel.missing != NULL ||
            !runs_on(kernel.name, options->device) ||
            strcmp(kernel.operation, bench_case_operation(item)) != 0 ||
            strncmp(kernel.name, "reference", strlen("reference")) == 0)
            continue;
        const int code = bench_one(options, item, kernel.name, json);
        if (code != EXIT_DONE)
            return code;
    }
    return EXIT_DONE;
}

static int bench_cases(const bench_options *options, output_file *json) {
    int code = EXIT_DONE;
    printf("%-52s %-*s %10s %8s %8s %8s %8s %8s\n", "case", kernel_width(), "kernel", "ms",
           "spread", "GFLOP/s", "of peak", "ns/key", "of read");
    for (int64_t index = 0; index < bench_case_count(options->device) && code == EXIT_DONE;
         index++) {
        const bench_case *item = bench_case_at(options->device, index);
        if (!matches(item, options->filter))
            continue;
        code = options->all ? bench_every_kernel(options, item, json)
                            : bench_one(options, item, options->kernel, json);
    }
    return code;
}

static int bench_to_file(const bench_options *options, const machine_info *machine) {
    output_file output;
    if (open_output(options->json, &output) != 0)
        return refuse(options->json);
    write_machine_json(output.stream, machine);
    const int code = bench_cases(options, &output);
    if (output.stream != NULL && code != EXIT_DONE)
        abandon_output(&output);
    else if (output.stream != NULL && commit_output(&output) != 0)
        return refuse(options->json);
    return code;
}

static int refuse_filter(const bench_options *options) {
    char names[2][BENCH_NAME]; // the nearest one, and one that is tried
    int nearest_at = 0;
    nearest_name nearest = {.typed = options->filter};
    for (int64_t index = 0; index < bench_case_count(options->device); index++) {
        char *const name = names[1 - nearest_at];
        bench_case_name(bench_case_at(options->device, index), name);
        offer_name(&nearest, name, true);
        if (nearest.name == name)
            nearest_at = 1 - nearest_at;
    }
    print_unknown("fdma bench: no case matches", options->filter, nearest.name,
                  "fdma bench --list prints their names");
    return EXIT_USAGE;
}

static int count_matches(const bench_options *options, bool print) {
    int count = 0;
    for (int64_t index = 0; index < bench_case_count(options->device); index++) {
        char name[BENCH_NAME];
        const bench_case *item = bench_case_at(options->device, index);
        if (!matches(item, options->filter))
            continue;
        bench_case_name(item, name);
        if (print)
            printf("%s\n", name);
        count++;
    }
    return count;
}

static int check_options(const bench_options *options) {
    enum { THREAD_LIMIT = 1024 };
    if (options->threads < 1 || options->threads > THREAD_LIMIT) {
        print_error("fdma bench: --threads is %" PRId64 ", want 1 to %d", options->threads,
                    THREAD_LIMIT);
        return EXIT_USAGE;
    }
    if (options->all && options->kernel != NULL) {
        print_error("fdma bench: --all and --kernel exclude each other");
        return EXIT_USAGE;
    }
    if (!check_kernel(bench_command.name, options->kernel))
        return EXIT_USAGE;
    return count_matches(options, options->list) > 0 ? EXIT_DONE : refuse_filter(options);
}

int bench_main(int argc, char **argv) {
    bench_options options = {.threads = 1};
    const int read = read_options(&bench_command, argc, argv, &options);
    if (read != OPTIONS_READ)
        return read;
    options.device = find_device(bench_command.name, options.where);
    const int code = options.device < 0 ? EXIT_USAGE : check_options(&options);
    if (code != EXIT_DONE || options.list)
        return code;
    machine_info machine;
    find_machine(&machine, options.device);
    print_machine(&machine, (int)options.threads);
    return options.json != NULL ? bench_to_file(&options, &machine) : bench_cases(&options, NULL);
}
