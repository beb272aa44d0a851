/* The parser behind options.h: "--name value" and "--name=value", one optional operand, "--" before
 * an operand that begins with a dash. */
#include "common/options.h"

#include "commands.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_MAX_LENGTH = 31, NEAR_MISS = 3 };

/* Levenshtein distance, for "did you mean"; `name` has at most NAME_MAX_LENGTH characters. */
static size_t edit_distance(const char *typed, const char *name) {
    size_t row[NAME_MAX_LENGTH + 1];
    const size_t length = strlen(name);
    for (size_t i = 0; i <= length; i++)
        row[i] = i;
    for (size_t t = 1; typed[t - 1]; t++) {
        size_t diagonal = row[0];
        row[0] = t;
        for (size_t i = 1; i <= length; i++) {
            const size_t replaced = diagonal + (typed[t - 1] != name[i - 1]);
            diagonal = row[i];
            row[i] = row[i - 1] < row[i] ? row[i - 1] + 1 : row[i] + 1;
            if (replaced < row[i])
                row[i] = replaced;
        }
    }
    return row[length];
}

static const char *nearest_name(const command_line *command, const char *typed) {
    const char *best = NULL;
    size_t best_distance = NEAR_MISS;
    for (int r = 0; r < command->row_count; r++) {
        const size_t distance = edit_distance(typed, command->rows[r].name);
        if (distance < best_distance) {
            best_distance = distance;
            best = command->rows[r].name;
        }
    }
    return best;
}

static int complain_unknown(const command_line *command, const char *typed) {
    const char *near = nearest_name(command, typed);
    if (near)
        fprintf(stderr, "%s: no option %s; did you mean %s?\n", command->name, typed, near);
    else
        fprintf(stderr, "%s: no option %s; see %s --help\n", command->name, typed, command->name);
    return EXIT_USAGE;
}

static int store_choice(const command_line *command, const option_row *row, const char *text,
                        int *index) {
    for (int i = 0; row->choices[i]; i++) {
        if (strcmp(row->choices[i], text) == 0) {
            *index = i;
            return OPTIONS_READ;
        }
    }
    fprintf(stderr, "%s: %s is '%s', want one of", command->name, row->name, text);
    for (int i = 0; row->choices[i]; i++)
        fprintf(stderr, " %s", row->choices[i]);
    fputc('\n', stderr);
    return EXIT_USAGE;
}

static int store_value(const command_line *command, const option_row *row, const char *text,
                       void *values) {
    char *const field = (char *)values + row->offset;
    char *end = NULL;
    const char *want = NULL;
    errno = 0;
    if (row->kind == OPTION_TEXT) {
        memcpy(field, &text, sizeof text);
    } else if (row->kind == OPTION_CHOICE) {
        return store_choice(command, row, text, (int *)(void *)field);
    } else if (row->kind == OPTION_COUNT) {
        const long long number = strtoll(text, &end, 10);
        if (end == text || *end || errno || number < 0)
            want = "a whole number, 0 or more";
        else
            *(int64_t *)(void *)field = number;
    } else {
        const double number = strtod(text, &end);
        if (end == text || *end || !isfinite(number) || number < 0)
            want = "a finite number, 0 or more";
        else
            *(double *)(void *)field = number;
    }
    if (!want)
        return OPTIONS_READ;
    fprintf(stderr, "%s: %s is '%s', want %s\n", command->name, row->name, text, want);
    return EXIT_USAGE;
}

static void print_row(const char *name, const char *value, const char *help) {
    enum { HELP_COLUMN = 24 };
    const int used = printf("  %s%s%s", name, value ? " " : "", value ? value : "");
    printf("%*s", used < HELP_COLUMN ? HELP_COLUMN - used : 1, "");
    for (; *help; help++) {
        putchar(*help);
        if (*help == '\n')
            printf("%*s", HELP_COLUMN, "");
    }
    putchar('\n');
}

static void print_help(const command_line *command) {
    printf("usage: %s", command->name);
    if (command->operand)
        printf(command->operand_required ? " %s" : " [%s]", command->operand);
    for (int r = 0; r < command->row_count; r++) {
        const option_row *row = &command->rows[r];
        if (row->required)
            printf(" %s %s", row->name, row->value);
    }
    printf(" [options]\n\n%s\n\n", command->about);
    for (int r = 0; r < command->row_count; r++)
        print_row(command->rows[r].name, command->rows[r].value, command->rows[r].help);
    print_row("--help", NULL, "print this");
    if (command->more)
        printf("\n%s", command->more);
}

static const option_row *find_row(const command_line *command, const char *name, size_t length) {
    for (int r = 0; r < command->row_count; r++) {
        const char *known = command->rows[r].name;
        if (strlen(known) == length && memcmp(known, name, length) == 0)
            return &command->rows[r];
    }
    return NULL;
}

/* Reads the option at argv[*at], and its value; leaves *at on the last argument that it used. */
static int read_option(const command_line *command, int argc, char **argv, int *at, void *values) {
    const char *typed = argv[*at];
    const char *equals = strchr(typed, '=');
    const option_row *row =
        find_row(command, typed, equals ? (size_t)(equals - typed) : strlen(typed));
    if (!row)
        return complain_unknown(command, typed);
    if (row->kind == OPTION_FLAG) {
        if (equals) {
            fprintf(stderr, "%s: %s takes no value\n", command->name, row->name);
            return EXIT_USAGE;
        }
        *(int *)(void *)((char *)values + row->offset) = 1;
        return OPTIONS_READ;
    }
    if (equals)
        return store_value(command, row, equals + 1, values);
    if (*at + 1 == argc) {
        fprintf(stderr, "%s: %s wants a value: %s\n", command->name, row->name, row->value);
        return EXIT_USAGE;
    }
    *at += 1;
    return store_value(command, row, argv[*at], values);
}

static int was_given(const option_row *row, int argc, char **argv) {
    const size_t length = strlen(row->name);
    for (int at = 1; at < argc; at++) {
        if (strncmp(argv[at], row->name, length) == 0 &&
            (argv[at][length] == '\0' || argv[at][length] == '='))
            return 1;
    }
    return 0;
}

static int complain_missing(const command_line *command, int operand_given, int argc, char **argv) {
    if (command->operand_required && !operand_given) {
        fprintf(stderr, "%s: %s is missing; see %s --help\n", command->name, command->operand,
                command->name);
        return EXIT_USAGE;
    }
    for (int r = 0; r < command->row_count; r++) {
        const option_row *row = &command->rows[r];
        if (row->required && !was_given(row, argc, argv)) {
            fprintf(stderr, "%s: %s %s is missing; see %s --help\n", command->name, row->name,
                    row->value, command->name);
            return EXIT_USAGE;
        }
    }
    return OPTIONS_READ;
}

int read_options(const command_line *command, int argc, char **argv, void *values) {
    int operand_given = 0;
    int options_end = 0;
    for (int at = 1; at < argc; at++) {
        if (!options_end && strcmp(argv[at], "--help") == 0) {
            print_help(command);
            return EXIT_DONE;
        }
        if (!options_end && strcmp(argv[at], "--") == 0) {
            options_end = 1;
        } else if (!options_end && argv[at][0] == '-') {
            const int read = read_option(command, argc, argv, &at, values);
            if (read != OPTIONS_READ)
                return read;
        } else if (command->operand && !operand_given) {
            memcpy((char *)values + command->operand_offset, &argv[at], sizeof argv[at]);
            operand_given = 1;
        } else {
            fprintf(stderr, "%s: '%s' is one argument too many\n", command->name, argv[at]);
            return EXIT_USAGE;
        }
    }
    return complain_missing(command, operand_given, argc, argv);
}
