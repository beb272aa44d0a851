/* The command line, read by tables: a subcommand is a table of const rows, and one parser fills the
 * subcommand's struct of values, prints its help and words its complaints. */
#ifndef FDMA_TOOLS_COMMON_OPTIONS_H
#define FDMA_TOOLS_COMMON_OPTIONS_H

#include <stddef.h>
#include <stdint.h>

typedef enum option_kind {
    OPTION_FLAG,   /* int: 1 where given */
    OPTION_COUNT,  /* int64_t >= 0 */
    OPTION_NUMBER, /* double, finite and >= 0 */
    OPTION_TEXT,   /* const char *, borrowed from argv */
    OPTION_CHOICE, /* int: the index of the word in choices */
} option_kind;

typedef struct option_row {
    const char *name;           /* with its dashes */
    const char *value;          /* what help calls the value; NULL for a flag */
    const char *help;           /* may hold newlines */
    const char *const *choices; /* OPTION_CHOICE: the words, NULL last */
    size_t offset;              /* of the value in the struct that is filled */
    option_kind kind;
    int required;
} option_row;

typedef struct command_line {
    const char *name;      /* "fdma attend" */
    const char *about;     /* a sentence */
    const char *more;      /* printed below the options; may be NULL */
    const char *operand;   /* what help calls the one operand; NULL: none is taken */
    size_t operand_offset; /* of a const char * */
    int operand_required;
    int row_count;
    const option_row *rows;
} command_line;

enum { OPTIONS_READ = -1 };

/*! read_options() - fills `values` from argv[1] on; values of options not given are left alone.
 *  Returns OPTIONS_READ to go on, else the exit code: EXIT_DONE where help was printed, EXIT_USAGE
 *  where one line on stderr says what is wrong. */
int read_options(const command_line *command, int argc, char **argv, void *values);

#endif /* FDMA_TOOLS_COMMON_OPTIONS_H */
