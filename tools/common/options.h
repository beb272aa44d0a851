/* Command lines, described by tables. A subcommand has a table of options; one parser fills the
 * subcommand's struct of values, prints its help and reports what is wrong. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum option_kind {
    OPTION_FLAG,     /* bool: true if given */
    OPTION_COUNT,    /* int64_t >= 0 */
    OPTION_POSITIVE, /* int64_t >= 1 */
    OPTION_NUMBER,   /* double, finite and >= 0 */
    OPTION_FACTOR,   /* double, finite and > 0 */
    OPTION_TEXT,     /* const char *, borrowed from argv */
    OPTION_FILE,     /* the same; not empty */
    OPTION_CHOICE,   /* int: the index of the word in choices */
} option_kind;

typedef struct option {
    const char *name;           /* with its dashes */
    const char *value;          /* the value's name in the help text; NULL for a flag */
    const char *help;           /* may contain newlines */
    const char *const *choices; /* OPTION_CHOICE: the words, NULL last; OPTION_TEXT: some of them */
    size_t offset;              /* offset of the value in the struct that is filled */
    option_kind kind;
    bool required;
} option;

typedef struct command_line {
    const char *name;      /* "fdma attend" */
    const char *about;     /* a sentence */
    const char *more;      /* printed below the options; may be NULL */
    const char *operand;   /* the operand's name in the help text; NULL: there is none */
    size_t operand_offset; /* offset of a const char * */
    bool operand_required;
    const char *const *operand_choices; /* its words, NULL last; NULL: any text */
    const char *unless; /* a flag with which no option is required; NULL: there is none */
    int option_count;
    const option *options;
} command_line;

enum { OPTIONS_READ = -1 };

/*! is_help() - whether the argument is -h or --help. */
bool is_help(const char *argument);

/*! print_synopsis() - prints "fdma attend FILE --window N [options]". */
void print_synopsis(const command_line *command);

/*! read_options() - fills `values` from argv[1] on; values of options that are not given keep what
 *  they hold.
 *  Returns OPTIONS_READ to go on, or the exit code: EXIT_DONE after printing the help text,
 *  EXIT_USAGE after one line on stderr that says what is wrong */
int read_options(const command_line *command, int argc, char **argv, void *values);
