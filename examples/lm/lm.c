/* A byte-level language model in plain C: it reads a safetensors file, generates text with a cache
 * of bounded size, and computes the loss of a text as PyTorch does. model.h says which models.
 *
 *     build/examples/lm MODEL.safetensors --prompt "def read_lines(path):" --bytes 500
 *     build/examples/lm MODEL.safetensors --remember 7000 --prompt-file FILE
 *     build/examples/lm MODEL.safetensors --loss FILE --length 8192
 *     build/examples/lm MODEL.safetensors --steady 100500
 *
 * CMake builds it where cJSON is found. convert.py writes model files, reference.py computes the
 * same loss with PyTorch. Exit status: 0 done; 1 output could not be written; 2 bad usage or a bad
 * file. */
#define _POSIX_C_SOURCE 200809L

#include "model.h"
#include "run.h"
#include "sample.h"

#include "commands.h"
#include "common/arrays.h"
#include "common/json_tree.h"
#include "common/options.h"
#include "common/progress.h"
#include "common/random.h"
#include "common/text.h"
#include "common/timing.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { MESSAGE_SIZE = 256 };
enum { MOST_THREADS = 1024 };
enum { PIECE = 512 };                             // bytes of a prompt that pass at a time
enum { FIRST_CENTRE = 1000, TIMED_BYTES = 1000 }; // of --steady
enum { KEY = 3, VALUE = 3, ROWS = 4 };            // of --remember: letters, and rows of the table

typedef struct lm_options {
    const char *file, *prompt, *prompt_file, *loss_file;
    double temperature, top_p, min_p;
    int64_t bytes, seed, remember, length, steady, threads;
} lm_options;

typedef struct bytes {
    uint8_t *data;
    int64_t count;
} bytes;

static const option option_table[] = {
    {"--prompt", "TEXT", "the text to go on with (default: the beginning of a Python function)",
     NULL, offsetof(lm_options, prompt), OPTION_TEXT, false},
    {"--prompt-file", "FILE", "a file with the text to go on with", NULL,
     offsetof(lm_options, prompt_file), OPTION_TEXT, false},
    {"--bytes", "N", "how many bytes to generate (default 500)", NULL, offsetof(lm_options, bytes),
     OPTION_COUNT, false},
    {"--temperature", "T", "divides the logits; 0: always the likeliest byte (default 0.8)", NULL,
     offsetof(lm_options, temperature), OPTION_NUMBER, false},
    {"--top-p", "P", "draw from the likeliest bytes that have this probability (default 1)", NULL,
     offsetof(lm_options, top_p), OPTION_NUMBER, false},
    {"--min-p", "P", "leave out bytes below this fraction of the likeliest (default 0.05)", NULL,
     offsetof(lm_options, min_p), OPTION_NUMBER, false},
    {"--seed", "N", "of the random numbers (default 1)", NULL, offsetof(lm_options, seed),
     OPTION_COUNT, false},
    {"--remember", "N",
     "print instead how the model answers a question after up to N bytes of\n"
     "the prompt file, and how it answers with the newest keys alone",
     NULL, offsetof(lm_options, remember), OPTION_POSITIVE, false},
    {"--loss", "FILE", "print the loss of this text instead, in bits per byte", NULL,
     offsetof(lm_options, loss_file), OPTION_TEXT, false},
    {"--length", "N", "cut the text of --loss into pieces of N bytes (default 8192)", NULL,
     offsetof(lm_options, length), OPTION_POSITIVE, false},
    {"--steady", "N",
     "generate N bytes, and print instead the median time of a byte around\n"
     "positions 1,000, 10,000, ..., in turn with another sequence around\n"
     "1,000, and the memory",
     NULL, offsetof(lm_options, steady), OPTION_POSITIVE, false},
    {"--threads", "N",
     "threads, at most (default: 1 to generate, where products are small;\n"
     "for prompts and --loss OMP_NUM_THREADS, or one per core)",
     NULL, offsetof(lm_options, threads), OPTION_COUNT, false},
};

static const command_line command = {
    .name = "lm",
    .about = "Generates text with a byte-level language model, in a cache of bounded size.",
    .more =
        "The prompt and the text go to standard output as they come, and two lines with speed and\n"
        "memory to standard error at the end. At a temperature above 0 the text does not repeat\n"
        "itself for long.\n",
    .operand = "MODEL.safetensors",
    .operand_offset = offsetof(lm_options, file),
    .operand_required = true,
    .option_count = sizeof option_table / sizeof option_table[0],
    .options = option_table,
};

/* ---- input ---- */

static int read_bytes(const char *path, bytes *text) {
    char reason[MESSAGE_SIZE];
    size_t count = 0;
    text->data = (uint8_t *)read_file(path, &count, reason, sizeof reason);
    text->count = (int64_t)count;
    if (text->data == NULL)
        print_error("lm: %s: %s", path, reason);
    return text->data != NULL ? 0 : -1;
}

static int read_prompt(const lm_options *options, bytes *prompt) {
    if (options->prompt_file != NULL)
        return read_bytes(options->prompt_file, prompt);
    const char *const text = options->prompt != NULL ? options->prompt : "def median(values):\n";
    prompt->count = (int64_t)strlen(text);
    prompt->data = allocate((size_t)prompt->count);
    memcpy(prompt->data, text, (size_t)prompt->count);
    return 0;
}

/* ---- generating ---- */

static byte_sampling sampling_of(const lm_options *options) {
    return (byte_sampling){.by = {.temperature = options->temperature,
                                  .top_p = options->top_p,
                                  .min_p = options->min_p,
                                  .random = (uint64_t)options->seed}};
}

/* The prompt enters the caches; instead of an empty one a newline does. */
static void prefill(run_state *state, const bytes *prompt) {
    static const uint8_t newline = '\n';
    if (prompt->count > 0)
        run_next(state, prompt->data, prompt->count);
    else
        run_next(state, &newline, 1);
}

static void print_memory(FILE *stream, const run_state *state) {
    const model *const of = state->of;
    const double of_key = 2.0 * sizeof(float) * (double)(of->kv_heads * of->head_dim);
    fprintf(stream, "%lld bytes read; caches %.1f MB; all keys would take %.1f MB\n",
            (long long)state->seen, (double)state->cache_bytes / 1e6,
            (double)(state->seen * of->layers) * of_key / 1e6);
}

static int generate(const model *of, const lm_options *options) {
    bytes prompt = {0};
    if (read_prompt(options, &prompt) != 0) {
        free(prompt.data);
        return EXIT_USAGE;
    }
    run_state state =
        new_state(of, PIECE, prompt.count + 1 + options->bytes, (int)options->threads);
    byte_sampling how = sampling_of(options);
    fwrite(prompt.data, 1, (size_t)prompt.count, stdout);
    fflush(stdout);
    prefill(&state, &prompt);
    const double begin = now_ms();
    for (int64_t n = 0; n < options->bytes; n++) {
        const uint8_t byte = choose_byte(state.logits, &how);
        putchar(byte);
        fflush(stdout);
        run_next(&state, &byte, 1);
    }
    const double seconds = (now_ms() - begin) / 1e3;
    fprintf(stderr, "\n%lld bytes in %.2f s: %.0f bytes/s; weights %.1f MB; threads: %d\n",
            (long long)options->bytes, seconds, (double)options->bytes / fmax(seconds, 1e-9),
            (double)of->bytes / 1e6, state.byte_threads);
    print_memory(stderr, &state);
    free_state(&state);
    free(prompt.data);
    return ferror(stdout) != 0 ? EXIT_FAILED : EXIT_DONE;
}

/* ---- remembering ---- */

/* The same model with A = 0: all its scores are equal, and of equal scores the newest keys rank
 * first. */
static model without_scores(const model *of) {
    model made = *of;
    made.layer = allocate((size_t)of->layers * sizeof *made.layer);
    for (int64_t n = 0; n < of->layers; n++) {
        made.layer[n] = of->layer[n];
        made.layer[n].a = allocate((size_t)of->kv_heads * sizeof *made.layer[n].a);
    }
    return made;
}

static void free_without_scores(const model *made) {
    for (int64_t n = 0; n < made->layers; n++)
        free(made->layer[n].a);
    free(made->layer);
}

/* The model reads "{KEYVAL}", `distance` bytes of the text, and "<KEY". The answer is a string of
 * the VALUE likeliest bytes that follow. */
static void ask(run_state *state, const char *pair, const uint8_t *text, int64_t distance,
                char *answer) {
    uint8_t around[KEY + VALUE + 2];
    around[0] = '{', around[KEY + VALUE + 1] = '}';
    memcpy(around + 1, pair, KEY + VALUE);
    empty_caches(state);
    run_next(state, around, KEY + VALUE + 2);
    run_next(state, text, distance);
    around[0] = '<';
    run_next(state, around, KEY + 1);
    for (int n = 0; n < VALUE; n++) {
        const uint8_t byte = choose_byte(state->logits, &(byte_sampling){.count = 0});
        answer[n] = (char)(isprint(byte) ? byte : '?');
        run_next(state, &byte, 1);
    }
}

/* Prints the table. The distance of a pair grows from row to row. */
static void print_answers(run_state states[2], const lm_options *options, const uint8_t *text) {
    static const int parts[ROWS] = {16, 4, 2, 1};
    uint64_t random = (uint64_t)options->seed;
    printf("In each row the model reads {KEYVAL}, a distance in bytes of %s,\n"
           "and <KEY, and writes what follows; the answer is VAL.\n"
           "%9s %10s %8s %11s %13s\n",
           options->prompt_file, "distance", "pair", "answer", "kept here", "newest only");
    for (int row = 0; row < ROWS; row++) {
        char pair[KEY + VALUE + 1] = {0}, found[2][VALUE + 1] = {{0}};
        for (int n = 0; n < KEY + VALUE; n++)
            pair[n] = (char)('A' + random_bits(&random) % 26);
        const int64_t distance = options->remember / parts[row];
        show_progress("row %d of %d", row + 1, ROWS);
        for (int n = 0; n < 2; n++)
            ask(&states[n], pair, text, distance, found[n]);
        clear_progress();
        printf("%9lld   {%s} %8s %11s %13s\n", (long long)distance, pair, pair + KEY, found[0],
               found[1]);
        fflush(stdout);
    }
    print_memory(stdout, &states[0]);
}

static int show_memory(const model *of, const lm_options *options) {
    bytes text = {0};
    int status = EXIT_USAGE;
    if (read_bytes(options->prompt_file, &text) != 0) {
        free(text.data);
        return status;
    }
    if (of->layer[0].window == FDMA_WINDOW_ALL)
        print_error("lm: --remember: is given, but the queries of %s keep all keys", options->file);
    else if (text.count < options->remember)
        print_error("lm: --remember: is %lld, want at most %lld, the bytes of %s",
                    (long long)options->remember, (long long)text.count, options->prompt_file);
    else
        status = EXIT_DONE;
    if (status == EXIT_DONE) {
        const model newest = without_scores(of);
        run_state states[2] = {new_state(of, PIECE, 1, (int)options->threads),
                               new_state(&newest, PIECE, 1, (int)options->threads)};
        print_answers(states, options, text.data);
        for (int n = 0; n < 2; n++)
            free_state(&states[n]);
        free_without_scores(&newest);
    }
    free(text.data);
    return status == EXIT_DONE && ferror(stdout) != 0 ? EXIT_FAILED : status;
}

/* ---- time and memory of a byte ---- */

typedef struct sequence {
    run_state state;
    byte_sampling how;
    double times[TIMED_BYTES]; // milliseconds of a byte
} sequence;

/* Generates one more byte; returns the milliseconds that it took. */
static double write_byte(sequence *it) {
    const double begin = now_ms();
    const uint8_t byte = choose_byte(it->state.logits, &it->how);
    run_next(&it->state, &byte, 1);
    return now_ms() - begin;
}

static void go_on(sequence *it, int64_t end) {
    enum { PROGRESS_BYTES = 1000 };
    while (it->state.seen < end) {
        write_byte(it);
        if (it->state.seen % PROGRESS_BYTES == 0)
            show_progress("byte %lld of %lld", (long long)it->state.seen, (long long)end);
    }
}

static int ascending(const void *left, const void *right) {
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

static double median_time(sequence *it) {
    qsort(it->times, TIMED_BYTES, sizeof it->times[0], ascending);
    return it->times[TIMED_BYTES / 2];
}

/* The largest number of bytes of memory that the process has had so far. */
static double peak_memory(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return 1024 * (double)used.ru_maxrss; // Linux counts kB
}

/* Takes the times of the bytes around position `centre` of one sequence, in turn with the bytes
 * around FIRST_CENTRE of another, so that both are measured on the same machine in the same use. */
static void measure_around(int64_t centre, sequence *late, sequence *early) {
    empty_caches(&early->state);
    prefill(&early->state, &(bytes){0});
    go_on(late, centre - TIMED_BYTES / 2);
    go_on(early, FIRST_CENTRE - TIMED_BYTES / 2);
    clear_progress();
    for (int n = 0; n < TIMED_BYTES; n++) {
        late->times[n] = write_byte(late);
        early->times[n] = write_byte(early);
    }
    const double time = median_time(late), early_time = median_time(early);
    printf("%9lld %18.1f %12.1f %7.3f %10.2f %15.2f\n", (long long)centre, 1e3 * time,
           1e3 * early_time, time / early_time, (double)late->state.cache_bytes / 1e6,
           peak_memory() / 1e6);
    fflush(stdout);
}

static int measure_steadiness(const model *of, const lm_options *options) {
    sequence both[2];
    for (int n = 0; n < 2; n++) {
        both[n].state = new_state(of, 1, options->steady + 1, (int)options->threads);
        both[n].how = sampling_of(options);
        prefill(&both[n].state, &(bytes){0});
    }
    printf(" position  microseconds/byte  at %d    ratio  cache, MB  peak memory, MB\n",
           FIRST_CENTRE);
    for (int64_t centre = FIRST_CENTRE; centre + TIMED_BYTES / 2 <= options->steady; centre *= 10)
        measure_around(centre, &both[0], &both[1]);
    for (int n = 0; n < 2; n++)
        free_state(&both[n].state);
    return ferror(stdout) != 0 ? EXIT_FAILED : EXIT_DONE;
}

/* ---- loss ---- */

/* -log2 of the probability that the logits give to the byte. */
static double bits_of(const float *logits, uint8_t byte) {
    float most = logits[0];
    for (int n = 1; n < BYTE_VALUES; n++)
        most = fmaxf(most, logits[n]);
    double sum = 0;
    for (int n = 0; n < BYTE_VALUES; n++)
        sum += exp((double)logits[n] - (double)most);
    return (log(sum) + (double)most - (double)logits[byte]) / log(2);
}

/* Piece n has the bytes from n * length on, at most `length`, and predicts the bytes that follow
 * each of them, so every byte of the text but the first is predicted once. */
static int measure_loss(const model *of, const lm_options *options) {
    bytes text = {0};
    int status = EXIT_USAGE;
    if (read_bytes(options->loss_file, &text) == 0 && text.count < 2)
        print_error("lm: %s: has %lld byte%s, want 2 or more", options->loss_file,
                    (long long)text.count, text.count == 1 ? "" : "s");
    else if (text.data != NULL && text.count >= 2)
        status = EXIT_DONE;
    const int64_t inputs = text.count - 1;
    if (status == EXIT_DONE) {
        run_state state = new_state(of, options->length < inputs ? options->length : inputs, 0,
                                    (int)options->threads);
        double bits = 0;
        for (int64_t first = 0; first < inputs; first += state.capacity) {
            const int64_t left = inputs - first;
            const int64_t len = left < state.capacity ? left : state.capacity;
            show_progress("byte %lld of %lld", (long long)first, (long long)inputs);
            run_text(&state, text.data + first, len);
            for (int64_t i = 0; i < len; i++)
                bits += bits_of(state.logits + i * BYTE_VALUES, text.data[first + i + 1]);
        }
        clear_progress();
        printf("%.6f bits per byte: %lld bytes in pieces of %lld\n", bits / (double)inputs,
               (long long)inputs, (long long)options->length);
        free_state(&state);
    }
    free(text.data);
    return status == EXIT_DONE && ferror(stdout) != 0 ? EXIT_FAILED : status;
}

static int check_options(const lm_options *options) {
    const char *wrong = NULL;
    if (options->top_p > 1)
        wrong = "--top-p: is above 1, want a probability";
    else if (options->min_p > 1)
        wrong = "--min-p: is above 1, want a fraction";
    else if (options->prompt != NULL && options->prompt_file != NULL)
        wrong = "--prompt-file: is given, want only one of it and --prompt";
    else if (options->loss_file != NULL && options->steady > 0)
        wrong = "--steady: is given, want only one of it and --loss";
    else if (options->remember > 0 && (options->loss_file != NULL || options->steady > 0))
        wrong = "--remember: is given, want only one of it, --loss and --steady";
    else if (options->remember > 0 && options->prompt_file == NULL)
        wrong = "--remember: is given, want a text too, by --prompt-file";
    else if (options->steady > 0 && options->steady < FIRST_CENTRE + TIMED_BYTES / 2)
        wrong = "--steady: is below 1500, want bytes around position 1,000";
    else if (options->bytes > INT32_MAX / 2 || options->steady > INT32_MAX / 2)
        wrong = "--bytes or --steady: is above 1073741823, want less";
    else if (options->threads > MOST_THREADS)
        wrong = "--threads: is above 1024, want less";
    if (wrong != NULL)
        print_error("lm: %s", wrong);
    return wrong != NULL ? EXIT_USAGE : EXIT_DONE;
}

int main(int argc, char **argv) {
    lm_options options = {
        .bytes = 500, .temperature = 0.8, .top_p = 1, .min_p = 0.05, .seed = 1, .length = 8192};
    int status = read_options(&command, argc, argv, &options);
    if (status != OPTIONS_READ)
        return status;
    status = check_options(&options);
    if (status != EXIT_DONE)
        return status;
    model of;
    char message[MESSAGE_SIZE];
    if (read_model(options.file, &of, message, sizeof message) != 0) {
        print_error("lm: %s: %s", options.file, message);
        status = EXIT_USAGE;
    } else if (options.loss_file != NULL) {
        status = measure_loss(&of, &options);
    } else if (options.remember > 0) {
        status = show_memory(&of, &options);
    } else if (options.steady > 0) {
        status = measure_steadiness(&of, &options);
    } else {
        status = generate(&of, &options);
    }
    free_model(&of);
    return status;
}
