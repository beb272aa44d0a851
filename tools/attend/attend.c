/* `fdma attend`: attention on the tensors of a file, over all keys and over the best of them, and
 * the changes by the selection. */
#include "attend/attend.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/device.h"
#include "common/options.h"
#include "common/output.h"
#include "common/safetensors.h"
#include "common/text.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static const char *const scope_words[] = {"causal", "global", NULL}; // from FDMA_SCOPE_CAUSAL on
static const char *const bias_words[] = {"exp", "linear", "none", NULL}; // fdma_bias_form
static const char *const layout_words[] = {"blhd", "bhld", NULL};        // attend_layout
static const char *const dtype_words[] = {"f32", "f16", "bf16", NULL};   // fdma_dtype - 1

static const option option_table[] = {
    {"--window", "N", "how many keys each query keeps, 1 or more", NULL,
     offsetof(attend_options, window), OPTION_POSITIVE, true},
    {"--recent", "N", "how many of the newest keys each query keeps beside these (default 0)", NULL,
     offsetof(attend_options, recent), OPTION_COUNT, false},
    {"--sinks", "N", "how many of the first keys outrank all others (default 0)", NULL,
     offsetof(attend_options, sinks), OPTION_COUNT, false},
    {"--causal", NULL, "a query sees only the keys up to its own position", NULL,
     offsetof(attend_options, causal), OPTION_FLAG, false},
    {"--scope", "S",
     "causal: each query ranks the keys up to its own (default with --causal);\n"
     "global: one ranking for all queries (default without)",
     scope_words, offsetof(attend_options, scope), OPTION_CHOICE, false},
    {"--bias", "B",
     "what is added to a key's logits: exp (exp(z) of its score z, the\n"
     "default), linear (z) or none",
     bias_words, offsetof(attend_options, bias), OPTION_CHOICE, false},
    {"--scale", "X", "multiplies the logits, above 0 (default 1 / sqrt(head_dim))", NULL,
     offsetof(attend_options, scale), OPTION_FACTOR, false},
    {"--softcap", "X", "replaces a logit s by X * tanh(s / X) (default 0: off)", NULL,
     offsetof(attend_options, softcap), OPTION_NUMBER, false},
    {"--dtype", "D", "f32, f16 or bf16: q, k and v are converted (default: as in the file)",
     dtype_words, offsetof(attend_options, dtype), OPTION_CHOICE, false},
    {"--layout", "L",
     "of q, k and v in FILE, and of out: blhd is [batch, len, heads, head_dim]\n"
     "(default), bhld [batch, heads, len, head_dim]",
     layout_words, offsetof(attend_options, layout), OPTION_CHOICE, false},
    {"--q", "NAME", "the name of q in FILE (default q)", NULL,
     offsetof(attend_options, names[ATTEND_Q]), OPTION_TEXT, false},
    {"--k", "NAME", "of k", NULL, offsetof(attend_options, names[ATTEND_K]), OPTION_TEXT, false},
    {"--v", "NAME", "of v", NULL, offsetof(attend_options, names[ATTEND_V]), OPTION_TEXT, false},
    {"--score", "NAME", "of score", NULL, offsetof(attend_options, names[ATTEND_SCORE]),
     OPTION_TEXT, false},
    {"--dt-proj", "NAME", "of dt_proj, which is then taken even if there is a score", NULL,
     offsetof(attend_options, names[ATTEND_DT_PROJ]), OPTION_TEXT, false},
    {"--a", "NAME", "of a", NULL, offsetof(attend_options, names[ATTEND_A]), OPTION_TEXT, false},
    {"--list", NULL, "print the names, dtypes and shapes of FILE's tensors, and run nothing", NULL,
     offsetof(attend_options, list), OPTION_FLAG, false},
    {"--kernel", "NAME", "a kernel that fdma info lists, or its name up to a '/'", NULL,
     offsetof(attend_options, kernel), OPTION_TEXT, false},
    {"--device", "D",
     "where to run: cpu (default), cuda, or a number; the reference always\n"
     "runs on the CPU",
     device_words, offsetof(attend_options, where), OPTION_TEXT, false},
    {"--decode", "N",
     "also decode the last N positions one by one, after a prefill of the\n"
     "others; the exit status is 1 if they differ from the whole sequence",
     NULL, offsetof(attend_options, decode), OPTION_COUNT, false},
    {"--threads", "N", "CPU threads, at most (default: OMP_NUM_THREADS, or one per core)", NULL,
     offsetof(attend_options, threads), OPTION_COUNT, false},
    {"--out", "FILE", "write out and lse of the attention over the kept keys, as safetensors", NULL,
     offsetof(attend_options, out), OPTION_FILE, false},
    {"--json", NULL, "print one JSON object instead of the report", NULL,
     offsetof(attend_options, json), OPTION_FLAG, false},
};

const command_line attend_command = {
    .name = "fdma attend",
    .about = "Runs attention over all keys and over the N best, and shows the difference.",
    .more =
        "FILE holds q [batch, q_len, q_heads, head_dim], k and v [batch, kv_len, kv_heads,\n"
        "head_dim], and either score [batch, kv_heads, kv_len] or dt_proj [kv_heads,\n"
        "kv_heads * head_dim] and a [kv_heads], all floating point; other tensors are ignored.\n"
        "Of a file that has both, score is taken. tools/capture.py writes such a file from a\n"
        "layer of a model.\n"
        "\n"
        "Dense and selected attention run in turn, up to 25 times. For long inputs only some\n"
        "queries are compared with the reference; the report says how many. If FILE of --out is "
        "the file or\n"
        "pipe that standard output goes to, the report goes to standard error.\n",
    .operand = "FILE.safetensors",
    .operand_offset = offsetof(attend_options, file),
    .operand_required = true,
    .unless = "--list",
    .option_count = sizeof option_table / sizeof option_table[0],
    .options = option_table,
};

static int refuse(const char *path) {
    print_error("fdma attend: %s: cannot be written: %s", path, strerror(errno));
    return EXIT_FAILED;
}

static int write_results(const char *path, output_file *output, const attend_results *results,
                         int layout) {
    static const char *const names[] = {"out", "lse"};
    const bool swapped = layout == LAYOUT_BHLD;
    const fdma_tensor out = swapped ? swap_axes(&results->out) : results->out;
    const fdma_tensor tensors[] = {out, results->lse};
    bool failed = safetensors_write(output->stream, 2, names, tensors) != 0;
    if (failed)
        abandon_output(output);
    failed = failed || commit_output(output) != 0;
    const int code = failed ? refuse(path) : EXIT_DONE;
    if (swapped)
        free(out.data);
    return code;
}

static int attend(const attend_options *options, attend_inputs *inputs, attend_results *results) {
    attend_summary summary = {0};
    output_file output = {0};
    const bool shared = options->out != NULL && is_standard_output(options->out);
    FILE *const stream = shared ? stderr : stdout; // of the report
    int code = read_inputs(options, inputs);
    if (code == EXIT_DONE && options->out != NULL && open_output(options->out, &output) != 0)
        code = refuse(options->out);
    if (code == EXIT_DONE)
        code = run_attention(options, inputs, results);
    if (code == EXIT_DONE)
        code = compare_with_reference(options, inputs, results, &summary.difference);
    if (code == EXIT_DONE && options->decode > 0)
        code = decode_tokens(options, inputs, results, &summary.decoded);
    if (code == EXIT_DONE && options->out != NULL)
        code = write_results(options->out, &output, results, options->layout);
    if (code != EXIT_DONE)
        return code;
    summary.mass = measure_mass(results);
    summary.keys = count_kept_keys(options, results);
    if (options->json)
        print_json_report(stream, options, inputs, results, &summary);
    else
        print_report(stream, options, inputs, results, &summary);
    if (summary.decoded.difference <= summary.decoded.allowed)
        return EXIT_DONE;
    print_error("fdma attend: %s: decode: out differs by %.2g, want at most %.2g", options->file,
                summary.decoded.difference, summary.decoded.allowed);
    return EXIT_FAILED;
}

static void free_tensors(attend_inputs *inputs, attend_results *results) {
    const fdma_tensor owned[] = {
        inputs->q,
        inputs->k,
        inputs->v,
        inputs->score,
        inputs->dt_proj,
        inputs->a,
        results->score,
        results->bias,
        results->out,
        results->lse,
        results->dense_out,
        results->dense_lse,
        results->selection.expiry,
        results->selection.slot,
    };
    for (size_t t = 0; t < sizeof owned / sizeof owned[0]; t++)
        free(owned[t].data);
}

static int check_options(const attend_options *options) {
    const char *const *names = options->names;
    if (options->scope == FDMA_SCOPE_CAUSAL && !options->causal)
        print_error("fdma attend: --scope is 'causal', want --causal with it");
    else if (options->threads > INT32_MAX)
        print_error("fdma attend: --threads is %" PRId64 ", want 0 to %d", options->threads,
                    INT32_MAX);
    else if (names[ATTEND_SCORE] != NULL &&
             (names[ATTEND_DT_PROJ] != NULL || names[ATTEND_A] != NULL))
        print_error("fdma attend: --score excludes --dt-proj and --a");
    else if (check_kernel(attend_command.name, options->kernel))
        return EXIT_DONE;
    return EXIT_USAGE;
}

int attend_main(int argc, char **argv) {
    attend_options options = {.scope = -1, .bias = FDMA_BIAS_EXP, .dtype = -1};
    const int read = read_options(&attend_command, argc, argv, &options);
    if (read != OPTIONS_READ)
        return read;
    if (options.list)
        return list_tensors(&options);
    if (options.scope < 0)
        options.scope = options.causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
    else
        options.scope += FDMA_SCOPE_CAUSAL; // the words begin with that one
    if (check_options(&options) != EXIT_DONE)
        return EXIT_USAGE;
    if (options.out != NULL && is_same_file(options.out, options.file)) {
        print_error("fdma attend: --out is '%s', which is the input, want another file",
                    options.out);
        return EXIT_USAGE;
    }
    options.device = find_device(attend_command.name, options.where);
    if (options.device < 0)
        return EXIT_USAGE;
    attend_inputs inputs = {0};
    attend_results results = {0};
    const int code = attend(&options, &inputs, &results);
    free_tensors(&inputs, &results);
    return code;
}
