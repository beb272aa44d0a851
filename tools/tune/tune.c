/* `fdma tune`: measures the fastest choices on this machine, and keeps them in a file. */
#define _POSIX_C_SOURCE 200809L

#include "fdma.h"

#include "commands.h"
#include "common/options.h"
#include "common/text.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

typedef struct tune_options {
    const char *file; /* NULL: the answer is printed only */
    int64_t batch, queries, keys, heads, kv_heads, head_dim, window, threads;
    double seconds;
    int dtype; /* an index of dtype_names */
    bool dense, global, backward;
} tune_options;

static const char *const dtype_names[] = {"bf16", "f16", "f32", NULL};
static const fdma_dtype dtypes[] = {FDMA_BFLOAT16, FDMA_FLOAT16, FDMA_FLOAT32};

static const option option_table[] = {
    {"--file", "FILE", "add the answer to FILE, which is made if it is not there", NULL,
     offsetof(tune_options, file), OPTION_TEXT, false},
    {"--dtype", "T", "bf16 (default), f16 or f32", dtype_names, offsetof(tune_options, dtype),
     OPTION_CHOICE, false},
    {"--batch", "N", "sequences (default 1)", NULL, offsetof(tune_options, batch), OPTION_POSITIVE,
     false},
    {"--queries", "N", "queries of each (default: as many as keys)", NULL,
     offsetof(tune_options, queries), OPTION_POSITIVE, false},
    {"--keys", "N", "keys of each (default 4096)", NULL, offsetof(tune_options, keys),
     OPTION_POSITIVE, false},
    {"--heads", "N", "query heads (default 8)", NULL, offsetof(tune_options, heads),
     OPTION_POSITIVE, false},
    {"--kv-heads", "N", "key and value heads (default: as many as query heads)", NULL,
     offsetof(tune_options, kv_heads), OPTION_POSITIVE, false},
    {"--head-dim", "N", "elements of a head (default 128)", NULL, offsetof(tune_options, head_dim),
     OPTION_POSITIVE, false},
    {"--window", "N", "keys that a query keeps (default 1024)", NULL,
     offsetof(tune_options, window), OPTION_POSITIVE, false},
    {"--dense", NULL, "without a selection: a query keeps all keys", NULL,
     offsetof(tune_options, dense), OPTION_FLAG, false},
    {"--global", NULL, "without a causal mask", NULL, offsetof(tune_options, global), OPTION_FLAG,
     false},
    {"--backward", NULL, "measure backward too", NULL, offsetof(tune_options, backward),
     OPTION_FLAG, false},
    {"--threads", "N", "CPU threads (default: all)", NULL, offsetof(tune_options, threads),
     OPTION_COUNT, false},
    {"--seconds", "S", "that each operation may take, about (default 3)", NULL,
     offsetof(tune_options, seconds), OPTION_NUMBER, false},
};

static const command_line command = {
    .name = "fdma tune",
    .about =
        "Measures which kernels, tiles, splits and numbers of threads are fastest on this CPU\n"
        "for calls of a shape, and keeps what is at least 3 % faster than the rules.",
    .more =
        "Programs follow the file if the environment variable FDMA_TUNING names it; so does this\n"
        "command. Calls of similar shapes share an entry; fdma.h, \"Tuning\", says which. Nothing\n"
        "else should run meanwhile.\n"
        "\n"
        "ms       median time of a call under the choice\n"
        "ratio    median of that time / the time by the rules, run in turn\n",
    .option_count = sizeof option_table / sizeof option_table[0],
    .options = option_table,
};

static void print_trial(void *context, const fdma_tune_trial *trial) {
    (void)context;
    printf("%-9s %10.3f %7.3f  %s%s (%s)\n", trial->operation, 1e3 * trial->seconds, trial->ratio,
           trial->final ? "keeps " : "", trial->choice, trial->kernel);
    fflush(stdout);
}

static int refuse_call(void) {
    print_error("fdma tune: %s", fdma_last_error());
    return EXIT_USAGE;
}

static fdma_tune_args shape_of(const tune_options *options) {
    return (fdma_tune_args){
        .size = sizeof(fdma_tune_args),
        .dtype = dtypes[options->dtype],
        .causal = !options->global,
        .batch = options->batch,
        .q_len = options->queries > 0 ? options->queries : options->keys,
        .kv_len = options->keys,
        .q_heads = options->heads,
        .kv_heads = options->kv_heads > 0 ? options->kv_heads : options->heads,
        .head_dim = options->head_dim,
        .window = options->dense ? FDMA_WINDOW_ALL : options->window,
        .backward = options->backward,
        .threads = (int32_t)options->threads,
        .seconds = options->seconds,
        .report = print_trial,
    };
}

/* Loads the file, so that its entries stay in it. */
static fdma_status load_file(const char *path) {
    const bool is_new = path == NULL || access(path, F_OK) != 0;
    return fdma_tuning_load(is_new ? NULL : path);
}

static void print_lines(void) {
    const char *line;
    printf("\n%s\n", fdma_tuning_line(0) != NULL ? "tuning" : "no tuning: the rules are as fast");
    for (int32_t n = 0; (line = fdma_tuning_line(n)) != NULL; n++)
        printf("  %s\n", line);
}

int tune_main(int argc, char **argv) {
    tune_options options = {.batch = 1, .keys = 4096, .heads = 8, .head_dim = 128, .window = 1024};
    const int read = read_options(&command, argc, argv, &options);
    if (read != OPTIONS_READ)
        return read;
    if (options.threads > INT32_MAX) {
        print_error("fdma tune: --threads is %" PRId64 ", want at most %d", options.threads,
                    INT32_MAX);
        return EXIT_USAGE;
    }
    const fdma_tune_args shape = shape_of(&options);
    if (load_file(options.file) != FDMA_OK)
        return refuse_call();
    printf("operation         ms   ratio  choice (kernel)\n");
    fflush(stdout);
    if (fdma_tune(&shape) != FDMA_OK)
        return refuse_call();
    print_lines();
    if (options.file != NULL && fdma_tuning_save(options.file) != FDMA_OK) {
        print_error("fdma tune: %s", fdma_last_error());
        return EXIT_FAILED;
    }
    return EXIT_DONE;
}
