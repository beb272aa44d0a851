/* `fdma generate`: tokens of a model of transformers, one by one. */
#include "fdma.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/json.h"
#include "common/options.h"
#include "common/output.h"
#include "common/safetensors.h"
#include "common/text.h"
#include "common/timing.h"
#include "generate/bench.h"
#include "generate/run.h"

#include <errno.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct generate_options {
    const char *folder, *ids, *logits;
    int64_t tokens, threads;
    bool bench, json;
} generate_options;

static const option option_table[] = {
    {"--ids", "IDS", "the tokens of the prompt, as numbers with commas: 1,20,300", NULL,
     offsetof(generate_options, ids), OPTION_TEXT, true},
    {"--tokens", "N", "how many tokens to write at most (default 100)", NULL,
     offsetof(generate_options, tokens), OPTION_POSITIVE, false},
    {"--threads", "N", "CPU threads, at most (default: one per core)", NULL,
     offsetof(generate_options, threads), OPTION_POSITIVE, false},
    {"--logits", "FILE", "write the logits of each token written, as safetensors", NULL,
     offsetof(generate_options, logits), OPTION_TEXT, false},
    {"--bench", NULL, "time a token, and beside it a plain read of the weights", NULL,
     offsetof(generate_options, bench), OPTION_FLAG, false},
    {"--json", NULL, "print one JSON object instead, when all tokens are there", NULL,
     offsetof(generate_options, json), OPTION_FLAG, false},
};

const command_line generate_command = {
    .name = "fdma generate",
    .about =
        "Continues a prompt with the likeliest tokens of a Doge model, in memory that does not\n"
        "grow with the text.",
    .more =
        "DIR has config.json and model.safetensors, or shards with their index, as transformers\n"
        "writes them. Tokens are numbers: tokenizer.json is not read. It runs on the CPU.\n",
    .operand = "DIR",
    .operand_offset = offsetof(generate_options, folder),
    .operand_required = true,
    .option_count = sizeof option_table / sizeof option_table[0],
    .options = option_table,
};

typedef struct text {
    int32_t *tokens; /* the prompt's first */
    int64_t prompt, count;
} text;

/* Reads "1,20,300". Returns false after an error. */
static bool read_ids(const generate_options *options, const model *of, text *it) {
    const int64_t vocab_size = of->config.vocab_size;
    it->tokens =
        allocate((strlen(options->ids) / 2 + 2 + (size_t)options->tokens) * sizeof *it->tokens);
    const char *at = options->ids;
    do {
        char *end;
        errno = 0;
        const long long id = strtoll(at, &end, 10);
        if (end == at || (*end != ',' && *end != '\0') || errno != 0 || id < 0 ||
            id >= vocab_size) {
            print_error("fdma generate: --ids: token %" PRId64 " is '%.*s', want 0 to %" PRId64,
                        it->count, (int)strcspn(at, ","), at, vocab_size - 1);
            return false;
        }
        it->tokens[it->count++] = (int32_t)id;
        at = end + 1;
    } while (at[-1] == ',');
    it->prompt = it->count;
    return true;
}

static int32_t likeliest(const model *of, const float *logits) {
    int32_t best = 0;
    for (int32_t id = 1; id < of->config.vocab_size; id++)
        if (logits[id] > logits[best])
            best = id;
    return best;
}

static bool is_end(const model *of, int32_t id) {
    for (int n = 0; n < of->config.end_count; n++)
        if (of->config.ends[n] == id)
            return true;
    return false;
}

typedef struct times {
    double prompt_ms, tokens_ms; /* of the prompt; of the tokens after the first */
} times;

/* The logits of each token that is written go to `logits`, unless it is NULL. */
static times write_tokens(const generate_options *options, run_state *state, text *it,
                          float *logits) {
    const model *const of = state->of;
    const size_t row = (size_t)of->config.vocab_size;
    const double start = now_ms();
    run_tokens(state, it->tokens, it->count);
    const double middle = now_ms();
    for (int64_t n = 0; n < options->tokens; n++) {
        const int32_t id = likeliest(of, state->logits);
        if (logits != NULL)
            memcpy(logits + (size_t)n * row, state->logits, row * sizeof *logits);
        if (!options->json) {
            printf("%s%" PRId32, n > 0 ? "," : "", id);
            fflush(stdout);
        }
        it->tokens[it->count++] = id;
        if (is_end(of, id) || n + 1 == options->tokens)
            break;
        run_tokens(state, &id, 1);
    }
    if (!options->json) {
        printf("\n");
        fflush(stdout); // before the report on standard error
    }
    return (times){middle - start, now_ms() - middle};
}

static int save_logits(const char *path, const run_state *state, const text *it, float *logits) {
    const fdma_tensor tensor =
        fdma_tensor_2d(logits, FDMA_FLOAT32, it->count - it->prompt, state->of->config.vocab_size);
    const char *const name = "logits";
    output_file output;
    if (open_output(path, &output) != 0) {
        print_error("fdma generate: --logits: %s: %s", path, strerror(errno));
        return EXIT_USAGE;
    }
    if (safetensors_write(output.stream, 1, &name, &tensor) != 0 || commit_output(&output) != 0) {
        print_error("fdma generate: %s cannot be written: %s", path, strerror(errno));
        abandon_output(&output);
        return EXIT_FAILED;
    }
    return EXIT_DONE;
}

static void report(const generate_options *options, run_state *state, const text *it, times took) {
    const int64_t more = it->count - it->prompt - 1;
    const double weights_mb = (double)state->of->bytes * 1e-6;
    const double cache_mb = (double)state->cache_bytes * 1e-6;
    const double prompt_rate = (double)it->prompt / took.prompt_ms * 1e3;
    const double rate = more > 0 ? (double)more / took.tokens_ms * 1e3 : 0;
    const bench_result bench = options->bench ? bench_tokens(state) : (bench_result){0};
    if (!options->json) {
        fprintf(stderr,
                "prompt: %" PRId64 " tokens, %.4g tokens/s; written: %" PRId64
                " tokens, %.4g tokens/s; weights %.4g MB, cache %.4g MB, %d threads\n",
                it->prompt, prompt_rate, more + 1, rate, weights_mb, cache_mb, state->thread_count);
        if (options->bench)
            fprintf(stderr, "a token: %.4g ms; a plain read of its weights: %.4g ms, %.2f of it\n",
                    bench.token_ms, bench.read_ms, bench.read_ms / bench.token_ms);
        return;
    }
    printf("{\"tokens\": [");
    for (int64_t n = it->prompt; n < it->count; n++)
        printf("%s%" PRId32, n > it->prompt ? ", " : "", it->tokens[n]);
    printf("], \"prompt\": %" PRId64 ", \"prompt_tokens_per_s\": ", it->prompt);
    json_number(stdout, prompt_rate);
    printf(", \"tokens_per_s\": ");
    json_number(stdout, rate);
    printf(", \"weights_mb\": ");
    json_number(stdout, weights_mb);
    printf(", \"cache_mb\": ");
    json_number(stdout, cache_mb);
    printf(", \"threads\": %d", state->thread_count);
    if (options->bench) {
        printf(", \"token_ms\": ");
        json_number(stdout, bench.token_ms);
        printf(", \"read_ms\": ");
        json_number(stdout, bench.read_ms);
    }
    printf("}\n");
}

static int generate(const generate_options *options, const model *of, text *it) {
    run_state state = new_state(of, (int)options->threads);
    const size_t logit_bytes =
        (size_t)options->tokens * (size_t)of->config.vocab_size * sizeof(float);
    float *const logits = options->logits != NULL ? allocate(logit_bytes) : NULL;
    const times took = write_tokens(options, &state, it, logits);
    const int code = logits != NULL ? save_logits(options->logits, &state, it, logits) : EXIT_DONE;
    if (code == EXIT_DONE)
        report(options, &state, it, took);
    free(logits);
    free_state(&state);
    return code;
}

int generate_main(int argc, char **argv) {
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    generate_options options = {.tokens = 100, .threads = cores > 0 ? cores : 1};
    const int read = read_options(&generate_command, argc, argv, &options);
    if (read != OPTIONS_READ)
        return read;
    enum { MOST_TOKENS = 1 << 26, MOST_THREADS = 1024 };
    if (options.tokens > MOST_TOKENS || options.threads > MOST_THREADS) {
        print_error("fdma generate: want at most %d tokens and %d threads", MOST_TOKENS,
                    MOST_THREADS);
        return EXIT_USAGE;
    }
    model of;
    text it = {0};
    char message[SAFETENSORS_MESSAGE * 2];
    int code = EXIT_USAGE;
    if (read_model(options.folder, &of, message, sizeof message) != 0)
        print_error("fdma generate: %s: %s", options.folder, message);
    else if (read_ids(&options, &of, &it))
        code = generate(&options, &of, &it);
    free(it.tokens);
    free_model(&of);
    return code;
}
