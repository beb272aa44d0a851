/* `fdma bench`: how fast, and how much of the machine that is. */
#define _POSIX_C_SOURCE 200809L

#include "bench/bench.h"

#include "commands.h"
#include "common/device.h"
#include "common/json.h"
#include "common/machine.h"
#include "common/options.h"
#include "common/output.h"

#include <errno.h>
#include <fnmatch.h>
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct bench_options {
    const char *filter; /* NULL: every case */
    const char *json;   /* NULL: no file */
    const char *kernel; /* NULL: the dispatched one */
    const char *where;  /* NULL: the CPU */
    int64_t threads;
    int all;
    int32_t device; /* what `where` means */
} bench_options;

static const option_row rows[] = {
    {"--json", "FILE", "also write the figures, one JSON object a line", NULL,
     offsetof(bench_options, json), OPTION_TEXT, 0},
    {"--threads", "N", "CPU threads (default 1)", NULL, offsetof(bench_options, threads),
     OPTION_COUNT, 0},
    {"--device", "D", "cpu (default), cuda, or the device of that number, which has its own cases",
     NULL, offsetof(bench_options, where), OPTION_TEXT, 0},
    {"--kernel", "NAME", "this kernel instead of the one that would be dispatched", NULL,
     offsetof(bench_options, kernel), OPTION_TEXT, 0},
    {"--all", NULL, "every kernel that runs here; the reference only by --kernel reference", NULL,
     offsetof(bench_options, all), OPTION_FLAG, 0},
};

static const command_line command = {
    .name = "fdma bench",
    .about = "Times cases whose name holds FILTER, or matches it where it has * or ?.",
    .more =
        "Cases are causal, batch 1, with one head unless /h32g8 (query and kv heads) follows;\n"
        "d head_dim, n length, w window. A selected forward counts its selection too. row is\n"
        "one query, whose selection is not counted, and tiny is one of a few keys. backward is\n"
        "of a forward call and its selection that are there.\n"
        "\n"
        "ms        median of at least 5 runs\n"
        "spread    (90th percentile - 10th percentile) / median\n"
        "GFLOP/s   useful ones: 4 * head_dim for each query, head and key that it keeps; backward\n"
        "          2.5 times as many\n"
        "of peak   their share of a loop of multiply-adds in registers, of the kernel's\n"
        "          instruction set and on as many threads, run in turn with the case\n"
        "ns/key    selection and lists, a key and kv head\n"
        "of read   time of a plain read of k and v (scores: of v), of the kept keys' size, run\n"
        "          in turn with the case, as a share of the case's; on a device half of the\n"
        "          time of a copy\n"
        "of fwd    lists: their share of a forward call over the same selection (d128, run\n"
        "          in turn with the case); t is how many queries share a list\n",
    .operand = "FILTER",
    .operand_offset = offsetof(bench_options, filter),
    .row_count = sizeof rows / sizeof rows[0],
    .rows = rows,
};

static int matches(const bench_case *row, const char *filter) {
    char name[BENCH_NAME];
    bench_case_name(row, name);
    if (!filter)
        return 1;
    return strpbrk(filter, "*?[") ? fnmatch(filter, name, 0) == 0 : strstr(name, filter) != NULL;
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
    if (!options->device)
        fprintf(stream, ", \"threads\": %" PRId64, options->threads);
    for (size_t n = 0; n < sizeof numbers / sizeof numbers[0]; n++) {
        fprintf(stream, ", \"%s\": ", numbers[n].field);
        json_number(stream, numbers[n].value);
    }
    if (!isnan(figures->of_read)) {
        fputs(", \"of_read\": ", stream);
        json_number(stream, figures->of_read);
    }
    if (!isnan(figures->of_forward)) {
        fputs(", \"of_forward\": ", stream);
        json_number(stream, figures->of_forward);
    }
    fputs("}\n", stream);
}

static void print_cell(const char *format, double number) {
    char cell[32] = "";
    if (!isnan(number))
        snprintf(cell, sizeof cell, format, number);
    printf(" %8s", cell);
}

static void print_row(const char *name, const char *kernel, const bench_figures *figures) {
    printf("%-52s %-14s %10.*f", name, kernel, figures->ms < 0.1 ? 6 : 3, figures->ms);
    print_cell("%.3f", figures->spread);
    print_cell("%.1f", figures->useful_gflops);
    print_cell("%.3f", figures->of_peak);
    print_cell("%.2f", figures->ns_per_key);
    print_cell("%.3f", figures->of_read);
    print_cell("%.4f", figures->of_forward);
    printf("\n");
    fflush(stdout);
}

/* One line that the next one overwrites; only where a person is watching. */
static void show_progress(const char *name, const char *kernel) {
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r%-44s %-12s ...", name, kernel ? kernel : "");
}

static void clear_progress(void) {
    if (isatty(STDERR_FILENO))
        fprintf(stderr, "\r%64s\r", "");
}

/* Where the kernel does not take the case, that is said, or with --all left out. */
static int bench_one(const bench_options *options, const bench_case *row, const char *kernel,
                     FILE *json) {
    char name[BENCH_NAME];
    bench_figures figures;
    bench_case_name(row, name);
    show_progress(name, kernel);
    const bench_place place = {kernel, options->device, (int)options->threads};
    bench_job *job = open_job(row, &place);
    const fdma_status status = job ? measure_job(row, job, &figures) : FDMA_UNSUPPORTED;
    clear_progress();
    if (!job && options->all)
        return EXIT_DONE;
    if (status) {
        fprintf(stderr, "fdma bench: %s: %s\n", name, fdma_last_error());
    } else {
        print_row(name, job_kernel(job), &figures);
        if (json)
            write_json(json, name, job_kernel(job), options, &figures);
    }
    if (job)
        close_job(job);
    return status ? EXIT_USAGE : EXIT_DONE;
}

/* The case on every kernel of this machine but the reference, which would take hours. */
static int bench_every_kernel(const bench_options *options, const bench_case *row, FILE *json) {
    for (int32_t index = 0; index < fdma_kernel_count(); index++) {
        fdma_kernel_info kernel = {.size = sizeof kernel};
        if (fdma_describe_kernel(index, &kernel) || kernel.missing ||
            !runs_on(kernel.name, options->device) ||
            strcmp(kernel.operation, bench_case_operation(row)) != 0 ||
            strcmp(kernel.name, "reference") == 0)
            continue;
        const int code = bench_one(options, row, kernel.name, json);
        if (code)
            return code;
    }
    return EXIT_DONE;
}

static int bench_cases(const bench_options *options, FILE *json) {
    int code = EXIT_DONE;
    printf("%-52s %-14s %10s %8s %8s %8s %8s %8s %8s\n", "case", "kernel", "ms", "spread",
           "GFLOP/s", "of peak", "ns/key", "of read", "of fwd");
    for (int64_t index = 0; index < bench_case_count(options->device) && !code; index++) {
        const bench_case *row = bench_case_at(options->device, index);
        if (!matches(row, options->filter))
            continue;
        code = options->all ? bench_every_kernel(options, row, json)
                            : bench_one(options, row, options->kernel, json);
    }
    return code;
}

static int complain(const char *path) {
    fprintf(stderr, "fdma bench: %s: cannot be written: %s\n", path, strerror(errno));
    return EXIT_FAILED;
}

static int bench_to_file(const bench_options *options, const machine_facts *machine) {
    output_file output;
    if (open_output(options->json, &output))
        return complain(options->json);
    write_machine_json(output.stream, machine);
    const int code = bench_cases(options, output.stream);
    if (code)
        abandon_output(&output);
    else if (commit_output(&output))
        return complain(options->json);
    return code;
}

static int check_options(const bench_options *options) {
    enum { THREAD_LIMIT = 1024 };
    if (options->threads < 1 || options->threads > THREAD_LIMIT) {
        fprintf(stderr, "fdma bench: --threads is %" PRId64 ", want 1 to %d\n", options->threads,
                THREAD_LIMIT);
        return EXIT_USAGE;
    }
    if (options->all && options->kernel) {
        fprintf(stderr, "fdma bench: --all and --kernel exclude each other\n");
        return EXIT_USAGE;
    }
    for (int64_t index = 0; index < bench_case_count(options->device); index++) {
        if (matches(bench_case_at(options->device, index), options->filter))
            return EXIT_DONE;
    }
    fprintf(stderr, "fdma bench: no case matches '%s'\n", options->filter);
    return EXIT_USAGE;
}

int bench_main(int argc, char **argv) {
    bench_options options = {.threads = 1};
    const int read = read_options(&command, argc, argv, &options);
    if (read != OPTIONS_READ)
        return read;
    options.device = find_device(command.name, options.where);
    const int code = options.device < 0 ? EXIT_USAGE : check_options(&options);
    if (code)
        return code;
    machine_facts machine;
    find_machine(&machine, options.device);
    print_machine(&machine, (int)options.threads);
    return options.json ? bench_to_file(&options, &machine) : bench_cases(&options, NULL);
}
