/* `fdma generate`: the tokens of a model of transformers, one by one. */
#include "fdma.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/json.h"
#include "common/json_tree.h"
#include "common/options.h"
#include "common/output.h"
#include "common/safetensors.h"
#include "common/sample.h"
#include "common/text.h"
#include "common/timing.h"
#include "generate/bench.h"
#include "generate/run.h"
#include "generate/text.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct generate_options {
    const char *folder, *prompt, *prompt_file, *ids, *logits;
    int64_t tokens, top_k, seed, threads;
    double temperature, top_p, min_p;
    bool bench, json;
} generate_options;

static const option option_table[] = {
    {"--prompt", "TEXT", "the text to go on with", NULL, offsetof(generate_options, prompt),
     OPTION_TEXT, false},
    {"--prompt-file", "FILE", "a file with the text to go on with", NULL,
     offsetof(generate_options, prompt_file), OPTION_FILE, false},
    {"--ids", "IDS", "the tokens to go on with, as numbers with commas: 1,20,300", NULL,
     offsetof(generate_options, ids), OPTION_TEXT, false},
    {"--max-tokens", "N", "how many tokens to write at most (default 100)", NULL,
     offsetof(generate_options, tokens), OPTION_POSITIVE, false},
    {"--temperature", "T", "divides the logits; 0: always the likeliest token (default 0)", NULL,
     offsetof(generate_options, temperature), OPTION_NUMBER, false},
    {"--top-k", "K", "draw from the K likeliest tokens; 0: from all (default 0)", NULL,
     offsetof(generate_options, top_k), OPTION_COUNT, false},
    {"--top-p", "P", "draw from the likeliest tokens that have this probability (default 1)", NULL,
     offsetof(generate_options, top_p), OPTION_NUMBER, false},
    {"--min-p", "P", "leave out tokens below this fraction of the likeliest (default 0)", NULL,
     offsetof(generate_options, min_p), OPTION_NUMBER, false},
    {"--seed", "N", "of the random numbers (default 1)", NULL, offsetof(generate_options, seed),
     OPTION_COUNT, false},
    {"--threads", "N", "CPU threads, at most (default: one per core)", NULL,
     offsetof(generate_options, threads), OPTION_POSITIVE, false},
    {"--logits", "FILE", "write the logits of each token written, as safetensors", NULL,
     offsetof(generate_options, logits), OPTION_FILE, false},
    {"--bench", NULL,
     "time a token beside a plain read of the weights, and products of a\n"
     "prompt beside OpenBLAS",
     NULL, offsetof(generate_options, bench), OPTION_FLAG, false},
    {"--json", NULL, "print one JSON object instead, when all tokens are there", NULL,
     offsetof(generate_options, json), OPTION_FLAG, false},
};

const command_line generate_command = {
    .name = "fdma generate",
    .about = "Continues a prompt with a Doge model, in memory that does not grow with the text.",
    .more =
        "DIR has config.json, tokenizer.json, and model.safetensors or shards with their index,\n"
        "as transformers writes them. Give one of --prompt, --prompt-file and --ids; with --ids "
        "the\n"
        "tokens are written as numbers, too. It runs on the CPU.\n",
    .operand = "DIR",
    .operand_offset = offsetof(generate_options, folder),
    .operand_required = true,
    .option_count = sizeof option_table / sizeof option_table[0],
    .options = option_table,
};

static bool is_end(const model *of, int32_t id) {
    for (int n = 0; n < of->config.end_count; n++)
        if (of->config.ends[n] == id)
            return true;
    return false;
}

typedef struct times {
    double prompt_ms, tokens_ms; /* of the prompt; of the tokens after the first */
} times;

/* A token on standard output, as far as it completes characters. */
static void write_token(const text *it, token_text *words, int32_t id) {
    if (it->by == NULL) {
        printf("%s%" PRId32, it->tokens.count > it->prompt + 1 ? "," : "", id);
    } else {
        decode_token(words, id);
        fwrite(words->text, 1, words->count, stdout);
    }
    fflush(stdout);
}

static void end_output(const text *it, token_text *words) {
    if (it->by != NULL) {
        decode_end(words);
        fwrite(words->text, 1, words->count, stdout);
    }
    printf("\n");
    fflush(stdout); // before the report on standard error
}

/* The logits of each token that is written go to `logits`, unless it is NULL. */
static times write_tokens(const generate_options *options, run_state *state, text *it,
                          float *logits) {
    const model *const of = state->of;
    const size_t row = (size_t)of->config.vocab_size;
    sampling how = {options->temperature, options->top_k, options->top_p, options->min_p,
                    (uint64_t)options->seed};
    token_text words = {.by = it->by};
    const double start = now_ms();
    run_tokens(state, it->tokens.ids, it->tokens.count);
    const double middle = now_ms();
    for (int64_t n = 0; n < options->tokens; n++) {
        const int32_t id = choose_token(state->logits, of->config.vocab_size, &how);
        if (logits != NULL)
            memcpy(logits + (size_t)n * row, state->logits, row * sizeof *logits);
        add_token(&it->tokens, id);
        if (!options->json)
            write_token(it, &words, id);
        if (is_end(of, id) || n + 1 == options->tokens)
            break;
        run_tokens(state, &id, 1);
    }
    const double end = now_ms();
    if (!options->json)
        end_output(it, &words);
    free_token_text(&words);
    return (times){middle - start, end - middle};
}

static int save_logits(const char *path, output_file *output, const run_state *state,
                       const text *it, float *logits) {
    const fdma_tensor tensor = fdma_tensor_2d(logits, FDMA_FLOAT32, it->tokens.count - it->prompt,
                                              state->of->config.vocab_size);
    const char *const name = "logits";
    if (safetensors_write(output->stream, 1, &name, &tensor) == 0 && commit_output(output) == 0)
        return EXIT_DONE;
    print_error("fdma generate: %s cannot be written: %s", path, strerror(errno));
    abandon_output(output);
    return EXIT_FAILED;
}

typedef struct named_number {
    const char *name;
    double value;
} named_number;

static void print_numbers(int count, const named_number *numbers) {
    for (int n = 0; n < count; n++) {
        printf(", \"%s\": ", numbers[n].name);
        json_number(stdout, numbers[n].value);
    }
}

static void print_bench(const bench_result *bench) {
    fprintf(stderr, "a token: %.4g ms; a plain read of its weights: %.4g ms, %.2f of it\n",
            bench->token_ms, bench->read_ms, bench->read_ms / bench->token_ms);
    fprintf(stderr, "%d tokens of a prompt: %.4g ms; their products: %.4g ms; ", PIECE,
            bench->piece_ms, bench->products_ms);
    if (isnan(bench->blas_ms))
        fprintf(stderr, "libopenblas.so.0, to compare with, is not found\n");
    else
        fprintf(stderr, "by OpenBLAS for %s: %.4g ms, %.2f of it\n", bench->blas_core,
                bench->blas_ms, bench->blas_ms / bench->products_ms);
}

static void report(const generate_options *options, run_state *state, const text *it, times took) {
    const int64_t more = it->tokens.count - it->prompt - 1;
    const double weights_mb = (double)state->of->bytes * 1e-6;
    const double cache_mb = (double)state->cache_bytes * 1e-6;
    const double prompt_rate = (double)it->prompt / took.prompt_ms * 1e3;
    const double rate = more > 0 ? (double)more / took.tokens_ms * 1e3 : 0;
    const bench_result bench = options->bench ? bench_tokens(state) : (bench_result){0};
    if (!options->json) {
        fprintf(stderr,
                "prompt: %" PRId64 " token%s, %.4g tokens/s; written: %" PRId64
                " token%s, %.4g tokens/s; weights %.4g MB, cache %.4g MB, threads: %d\n",
                it->prompt, it->prompt == 1 ? "" : "s", prompt_rate, more + 1, more == 0 ? "" : "s",
                rate, weights_mb, cache_mb, state->thread_count);
        if (options->bench)
            print_bench(&bench);
        return;
    }
    printf("{\"tokens\": [");
    for (int64_t n = it->prompt; n < it->tokens.count; n++)
        printf("%s%" PRId32, n > it->prompt ? ", " : "", it->tokens.ids[n]);
    printf("]");
    if (it->by != NULL) {
        size_t count;
        char *const words = written_words(it, &count);
        printf(", \"text\": ");
        json_text(stdout, words, count);
        free(words);
    }
    printf(", \"prompt\": %" PRId64, it->prompt);
    print_numbers(4, (const named_number[]){{"prompt_tokens_per_s", prompt_rate},
                                            {"tokens_per_s", rate},
                                            {"weights_mb", weights_mb},
                                            {"cache_mb", cache_mb}});
    printf(", \"threads\": %d", state->thread_count);
    if (options->bench) {
        print_numbers(5, (const named_number[]){{"token_ms", bench.token_ms},
                                                {"read_ms", bench.read_ms},
                                                {"piece_ms", bench.piece_ms},
                                                {"products_ms", bench.products_ms},
                                                {"blas_ms", bench.blas_ms}});
        printf(", \"blas_core\": ");
        json_string(stdout, bench.blas_core);
    }
    printf("}\n");
}

static int generate(const generate_options *options, const model *of, text *it) {
    output_file output = {0};
    if (options->logits != NULL && open_output(options->logits, &output) != 0) {
        print_error("fdma generate: --logits: %s: %s", options->logits, strerror(errno));
        return EXIT_USAGE;
    }
    run_state state = new_state(of, (int)options->threads);
    const size_t logit_bytes =
        (size_t)options->tokens * (size_t)of->config.vocab_size * sizeof(float);
    float *const logits = options->logits != NULL ? allocate(logit_bytes) : NULL;
    const times took = write_tokens(options, &state, it, logits);
    const int code =
        logits != NULL ? save_logits(options->logits, &output, &state, it, logits) : EXIT_DONE;
    if (code == EXIT_DONE)
        report(options, &state, it, took);
    free(logits);
    free_state(&state);
    return code;
}

static const char *find_wrong_option(const generate_options *options) {
    enum { MOST_TOKENS = 1 << 26, MOST_THREADS = 1024 };
    const int prompts =
        (options->prompt != NULL) + (options->prompt_file != NULL) + (options->ids != NULL);
    if (prompts != 1)
        return "want one of --prompt, --prompt-file and --ids";
    if (options->top_p > 1)
        return "--top-p: is above 1, want a probability";
    if (options->min_p > 1)
        return "--min-p: is above 1, want a fraction";
    if (options->tokens > MOST_TOKENS)
        return "--max-tokens: is above 67108864, want less";
    if (options->threads > MOST_THREADS)
        return "--threads: is above 1024, want less";
    return NULL;
}

static bool read_prompt(const generate_options *options, const model *of, text *it, char *message,
                        size_t message_size) {
    const int64_t vocab_size = of->config.vocab_size;
    if (options->ids != NULL)
        return read_ids(it, options->ids, vocab_size, message, message_size);
    if (options->prompt != NULL)
        return read_words(it, options->folder, options->prompt, strlen(options->prompt), vocab_size,
                          message, message_size);
    size_t count;
    char reason[SAFETENSORS_MESSAGE];
    char *const words = read_file(options->prompt_file, &count, reason, sizeof reason);
    if (words == NULL)
        snprintf(message, message_size, "--prompt-file: %s: %s", options->prompt_file, reason);
    const bool is_read = words != NULL && read_words(it, options->folder, words, count, vocab_size,
                                                     message, message_size);
    free(words);
    return is_read;
}

int generate_main(int argc, char **argv) {
    const long cores = sysconf(_SC_NPROCESSORS_ONLN);
    generate_options options = {
        .tokens = 100, .top_p = 1, .seed = 1, .threads = cores > 0 ? cores : 1};
    const int read = read_options(&generate_command, argc, argv, &options);
    if (read != OPTIONS_READ)
        return read;
    const char *const wrong = find_wrong_option(&options);
    if (wrong != NULL) {
        print_error("fdma generate: %s", wrong);
        return EXIT_USAGE;
    }
    model of;
    text it = {0};
    char message[SAFETENSORS_MESSAGE * 8];
    int code = EXIT_USAGE;
    if (read_model(options.folder, &of, message, sizeof message) != 0)
        print_error("fdma generate: %s: %s", options.folder, message);
    else if (!read_prompt(&options, &of, &it, message, sizeof message))
        print_error("fdma generate: %s", message);
    else
        code = generate(&options, &of, &it);
    free_text(&it);
    free_model(&of);
    return code;
}
