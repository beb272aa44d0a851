/* The subcommands of the `fdma` command. Each is given its own name as argv[0] and returns the exit
 * code: 0 done; 1 a check failed, or output could not be written; 2 bad usage or bad input. */
#pragma once

enum { EXIT_DONE = 0, EXIT_FAILED = 1, EXIT_USAGE = 2 };

int attend_main(int argc, char **argv);
int bench_main(int argc, char **argv);
int check_main(int argc, char **argv);
int info_main(int argc, char **argv);
