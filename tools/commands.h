/* The subcommands of the `fdma` command. Each is given its own name as argv[0] and returns the exit
 * code: 0 done; 1 a check failed, or output could not be written; 2 bad usage or bad input. */
#pragma once

#include "common/options.h"

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

#define EXIT_STATUS_TEXT                                                                           \
    "0 done; 1 a check failed, or output could not be written;\n2 bad usage or bad input.\n"

typedef struct subcommand {
    const char *name;
    int (*main)(int argc, char **argv);
    const command_line *line;
    const char *about; /* a line, without a full stop */
} subcommand;

extern const subcommand subcommands[]; /* the last one has no name */

int attend_main(int argc, char **argv);
int bench_main(int argc, char **argv);
int check_main(int argc, char **argv);
int completion_main(int argc, char **argv);
int generate_main(int argc, char **argv);
int info_main(int argc, char **argv);
int man_main(int argc, char **argv);

extern const command_line attend_command, bench_command, check_command, completion_command,
    generate_command, info_command, man_command;
