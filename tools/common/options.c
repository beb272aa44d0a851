/* See common/options.h. Options are "--name value" or "--name=value"; there is at most one operand,
 * and "--" precedes one that begins with a dash and has more characters. */
#include "common/options.h"

#include "commands.h"
#include "common/nearest.h"
#include "common/text.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int refuse_unknown(const command_line *command, const char *typed) {
    nearest_name nearest = {.typed = typed};
    for (int o = 0; o < command->option_count; o++)
        offer_name(&nearest, command->options[o].name, false);
    if (nearest.name != NULL)
        print_error("%s: no option %s; did you mean %s?", command->name, typed, nearest.name);
    else
        print_error("%s: no option %s; see %s --help", command->name, typed, command->name);
    return EXIT_USAGE;
}

/* The index of `text` among `words`; -1 after a line on stderr that lists them. */
static int find_choice(const command_line *command, const char *name, const char *const *words,
                       const char *text) {
    char list[256] = "";
    size_t used = 0;
    for (int i = 0; words[i] != NULL; i++) {
        if (strcmp(words[i], text) == 0)
            return i;
        used += (size_t)snprintf(list + used, sizeof list - used, "%s %s", used > 0 ? "," : "",
                                 words[i]);
    }
    print_error("%s: %s is '%s', want one of%s", command->name, name, text, list);
    return -1;
}

static int store_value(const command_line *command, const option *known, const char *text,
                       void *values) {
    void *const field = (char *)values + known->offset;
    char *end = NULL;
    const char *want = NULL;
    errno = 0;
    if (known->kind == OPTION_FILE && text[0] == '\0') {
        want = "the name of a file";
    } else if (known->kind == OPTION_TEXT || known->kind == OPTION_FILE) {
        memcpy(field, &text, sizeof text);
    } else if (known->kind == OPTION_CHOICE) {
        const int found = find_choice(command, known->name, known->choices, text);
        if (found < 0)
            return EXIT_USAGE;
        *(int *)field = found;
    } else if (known->kind == OPTION_COUNT || known->kind == OPTION_POSITIVE) {
        const bool positive = known->kind == OPTION_POSITIVE;
        const long long number = strtoll(text, &end, 10);
        if (end == text || *end != '\0' || errno != 0 || number < positive)
            want = positive ? "a whole number, 1 or more" : "a whole number, 0 or more";
        else
            *(int64_t *)field = number;
    } else {
        const double number = strtod(text, &end);
        const bool positive = known->kind == OPTION_FACTOR;
        if (end == text || *end != '\0' || !isfinite(number) || number < 0 ||
            (positive && number == 0))
            want = positive ? "a finite number above 0" : "a finite number, 0 or more";
        else
            *(double *)field = number;
    }
    if (want == NULL)
        return OPTIONS_READ;
    print_error("%s: %s is '%s', want %s", command->name, known->name, text, want);
    return EXIT_USAGE;
}

static void print_option(const char *name, const char *value, const char *help) {
    enum { HELP_COLUMN = 24 };
    const int used = printf("  %s%s%s", name, value != NULL ? " " : "", value != NULL ? value : "");
    printf("%*s", used < HELP_COLUMN ? HELP_COLUMN - used : 1, "");
    for (; *help != '\0'; help++) {
        putchar(*help);
        if (*help == '\n')
            printf("%*s", HELP_COLUMN, "");
    }
    putchar('\n');
}

void print_synopsis(const command_line *command) {
    printf("%s", command->name);
    if (command->operand != NULL)
        printf(command->operand_required ? " %s" : " [%s]", command->operand);
    for (int o = 0; o < command->option_count; o++) {
        const option *known = &command->options[o];
        if (known->required)
            printf(" %s %s", known->name, known->value);
    }
    if (command->option_count > 0)
        printf(" [options]");
}

static void print_help(const command_line *command) {
    printf("usage: ");
    print_synopsis(command);
    printf("\n\n%s\n\n", command->about);
    for (int o = 0; o < command->option_count; o++)
        print_option(command->options[o].name, command->options[o].value, command->options[o].help);
    print_option("-h, --help", NULL, "print this help and exit");
    if (command->more != NULL)
        printf("\n%s", command->more);
}

static const option *find_option(const command_line *command, const char *name, size_t length) {
    for (int o = 0; o < command->option_count; o++) {
        const char *known = command->options[o].name;
        if (strlen(known) == length && memcmp(known, name, length) == 0)
            return &command->options[o];
    }
    return NULL;
}

/* Reads the option at argv[*at] and its value; leaves *at on the last argument that it used. */
static int read_option(const command_line *command, int argc, char **argv, int *at, void *values) {
    const char *typed = argv[*at];
    const char *equals = strchr(typed, '=');
    const option *known =
        find_option(command, typed, equals != NULL ? (size_t)(equals - typed) : strlen(typed));
    if (known == NULL)
        return refuse_unknown(command, typed);
    if (known->kind == OPTION_FLAG) {
        if (equals != NULL) {
            print_error("%s: %s takes no value", command->name, known->name);
            return EXIT_USAGE;
        }
        *(bool *)((char *)values + known->offset) = true;
        return OPTIONS_READ;
    }
    if (equals != NULL)
        return store_value(command, known, equals + 1, values);
    if (*at + 1 == argc) {
        print_error("%s: %s wants a value: %s", command->name, known->name, known->value);
        return EXIT_USAGE;
    }
    *at += 1;
    return store_value(command, known, argv[*at], values);
}

static bool was_given(const char *name, int argc, char **argv) {
    const size_t length = strlen(name);
    for (int at = 1; at < argc; at++)
        if (strncmp(argv[at], name, length) == 0 &&
            (argv[at][length] == '\0' || argv[at][length] == '='))
            return true;
    return false;
}

static int check_required(const command_line *command, bool operand_given, int argc, char **argv) {
    if (command->operand_required && !operand_given) {
        print_error("%s: %s is missing; see %s --help", command->name, command->operand,
                    command->name);
        return EXIT_USAGE;
    }
    if (command->unless != NULL && was_given(command->unless, argc, argv))
        return OPTIONS_READ;
    for (int o = 0; o < command->option_count; o++) {
        const option *known = &command->options[o];
        if (known->required && !was_given(known->name, argc, argv)) {
            print_error("%s: %s %s is missing; see %s --help", command->name, known->name,
                        known->value, command->name);
            return EXIT_USAGE;
        }
    }
    return OPTIONS_READ;
}

bool is_help(const char *argument) {
    return strcmp(argument, "-h") == 0 || strcmp(argument, "--help") == 0;
}

int read_options(const command_line *command, int argc, char **argv, void *values) {
    bool operand_given = false, options_end = false;
    for (int at = 1; at < argc; at++) {
        if (!options_end && is_help(argv[at])) {
            print_help(command);
            return EXIT_DONE;
        }
        if (!options_end && strcmp(argv[at], "--") == 0) {
            options_end = true;
        } else if (!options_end && argv[at][0] == '-' && argv[at][1] != '\0') {
            const int read = read_option(command, argc, argv, &at, values);
            if (read != OPTIONS_READ)
                return read;
        } else if (command->operand != NULL && !operand_given) {
            if (command->operand_choices != NULL &&
                find_choice(command, command->operand, command->operand_choices, argv[at]) < 0)
                return EXIT_USAGE;
            if (command->operand_required && argv[at][0] == '\0') {
                print_error("%s: %s is '', want a name", command->name, command->operand);
                return EXIT_USAGE;
            }
            memcpy((char *)values + command->operand_offset, &argv[at], sizeof argv[at]);
            operand_given = true;
        } else {
            print_error("%s: '%s' is one argument too many", command->name, argv[at]);
            return EXIT_USAGE;
        }
    }
    return check_required(command, operand_given, argc, argv);
}
