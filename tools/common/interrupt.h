/* Ctrl-C and SIGTERM, for a subcommand that reports what it has found before it ends. */
#pragma once

#include <stdbool.h>

/*! heed_interrupts() - from now on the first SIGINT or SIGTERM only makes interrupted() true; the
 *  second ends the program at once. */
void heed_interrupts(void);
bool interrupted(void);

/*! die_interrupted() - flushes standard output and ends the program by that signal, so that a shell
 *  sees its status. */
void die_interrupted(void);
