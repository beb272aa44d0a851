/* `fdma attend`: attention on the tensors of a file, dense and selected, and what selecting costs.
 */
#include "attend/attend.h"

#include "commands.h"
#include "common/device.h"
#include "common/options.h"
#include "common/output.h"
#include "common/safetensors.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

static const char *const scope_words[] = {"causal", "global", NULL}; // from FDMA_SCOPE_CAUSAL on
static const char *const bias_words[] = {"exp", "linear", "none", NULL}; // fdma_bias_form
static const char *const dtype_words[] = {"f32", "f16", "bf16", NULL};   // fdma_dtype - 1

static const option_row rows[] = {
    {"--window", "N", "keys that a query keeps", NULL, offsetof(attend_options, window),
     OPTION_COUNT, 1},
    {"--causal", NULL, "a query sees only the keys up to its own position", NULL,
     offsetof(attend_options, causal), OPTION_FLAG, 0},
    {"--scope", "S",
     "causal: each query ranks the keys up to its own (default with --causal);\n"
     "global: one ranking for all queries (default without)",
     scope_words, offsetof(attend_options, scope), OPTION_CHOICE, 0},
    {"--bias", "B",
     "what a key's score z adds to its logits: none, linear (z) or\n"
     "exp (exp(z), the default)",
     bias_words, offsetof(attend_options, bias), OPTION_CHOICE, 0},
    {"--scale", "X", "factor of the logits (default 1 / sqrt(head_dim))", NULL,
     offsetof(attend_options, scale), OPTION_NUMBER, 0},
    {"--softcap", "X", "c: logits become c * tanh(logit / c) (default 0: off)", NULL,
     offsetof(attend_options, softcap), OPTION_NUMBER, 0},
    {"--dtype", "D", "f32, f16 or bf16: converts q, k and v (default: as in the file)", dtype_words,
     offsetof(attend_options, dtype), OPTION_CHOICE, 0},
    {"--kernel", "NAME", "a kernel of `fdma info`, or the beginning of its name up to a '/'", NULL,
     offsetof(attend_options, kernel), OPTION_TEXT, 0},
    {"--device", "D",
     "cpu (default), cuda, or the device of that number; the reference stays\n"
     "on the CPU",
     NULL, offsetof(attend_options, where), OPTION_TEXT, 0},
    {"--threads", "N", "CPU threads (default: as many as OpenMP would use)", NULL,
     offsetof(attend_options, threads), OPTION_COUNT, 0},
    {"--out", "FILE", "write `out` and `lse` of the selected attention, as safetensors", NULL,
     offsetof(attend_options, out), OPTION_TEXT, 0},
    {"--json", NULL, "print one JSON object instead of the report", NULL,
     offsetof(attend_options, json), OPTION_FLAG, 0},
};

static const command_line command = {
    .name = "fdma attend",
    .about = "Runs attention over all keys and over the N best, and shows what that changes.",
    .more = "FILE holds q [batch, q_len, q_heads, head_dim], k and v [batch, kv_len, kv_heads,\n"
            "head_dim], and either score [batch, kv_heads, kv_len] or dt_proj [kv_heads,\n"
            "kv_heads * head_dim] and a [kv_heads]; floating point; other tensors are ignored.\n"
            "\n"
            "Times are medians of up to 25 runs. The difference from the reference is taken\n"
            "on sampled queries where the input is long; the report says so.\n",
    .operand = "FILE.safetensors",
    .operand_offset = offsetof(attend_options, file),
    .operand_required = 1,
    .row_count = sizeof rows / sizeof rows[0],
    .rows = rows,
};

static int complain(const char *path) {
    fprintf(stderr, "fdma attend: %s: cannot be written: %s\n", path, strerror(errno));
    return EXIT_FAILED;
}

static int write_results(const char *path, const attend_results *results) {
    static const char *const names[] = {"out", "lse"};
    const fdma_tensor tensors[] = {results->out, results->lse};
    output_file output;
    if (open_output(path, &output))
        return complain(path);
    if (safetensors_write(output.stream, 2, names, tensors)) {
        abandon_output(&output);
        return complain(path);
    }
    return commit_output(&output) ? complain(path) : EXIT_DONE;
}

static int attend(const attend_options *options, attend_inputs *inputs, attend_results *results) {
    attend_summary summary = {0};
    int code = read_inputs(options, inputs);
    if (!code)
        code = run_attention(options, inputs, results);
    if (!code)
        code = compare_with_reference(options, inputs, results, &summary.difference);
    if (!code && options->out)
        code = write_results(options->out, results);
    if (code)
        return code;
    summary.mass = measure_mass(results);
    summary.keys = count_kept_keys(options, results);
    if (options->json)
        print_json_report(options, inputs, results, &summary);
    else
        print_report(options, inputs, results, &summary);
    return EXIT_DONE;
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

int attend_main(int argc, char **argv) {
    attend_options options = {.scope = -1, .bias = FDMA_BIAS_EXP, .dtype = -1};
    const int read = read_options(&command, argc, argv, &options);
    if (read != OPTIONS_READ)
        return read;
    if (options.scope < 0)
        options.scope = options.causal ? FDMA_SCOPE_CAUSAL : FDMA_SCOPE_GLOBAL;
    else
        options.scope += FDMA_SCOPE_CAUSAL; // the words begin with that one
    if (options.scope == FDMA_SCOPE_CAUSAL && !options.causal) {
        fprintf(stderr, "fdma attend: --scope causal wants --causal\n");
        return EXIT_USAGE;
    }
    if (options.threads > INT32_MAX) {
        fprintf(stderr, "fdma attend: --threads is above %d\n", INT32_MAX);
        return EXIT_USAGE;
    }
    options.device = find_device(command.name, options.where);
    if (options.device < 0)
        return EXIT_USAGE;
    attend_inputs inputs = {0};
    attend_results results = {0};
    const int code = attend(&options, &inputs, &results);
    free_tensors(&inputs, &results);
    return code;
}
