/* The tuning of the process, its file, and its measurement. */
#pragma once

#include "core/tuning.h"

enum { most_entries = 1024 }; /* entries of a tuning */

/* The tuning that calls of this thread follow, which may be empty; never NULL. The first call reads
 * the file that FDMA_TUNING names. It stays in memory until the process ends. */
const fdma_tuning *fdma_current_tuning(void);

/* Overrides the tuning for this thread. NULL restores the process's tuning. */
void fdma_try_tuning(const fdma_tuning *tuning);

/* Makes an empty tuning with room for `room` entries. */
fdma_status fdma_new_tuning(int32_t room, fdma_tuning **tuning);

/* Puts an entry into the tuning of the process, in place of an entry of its class. Without a choice
 * it only removes that entry. */
fdma_status fdma_put_entry(const tuning_entry *entry);

bool fdma_has_choice(const tuning_choice *choice);

void fdma_write_line(tuning_entry *entry);

/* Reads an entry from line `number` of a file. */
fdma_status fdma_read_line(const char *path, int number, const char *line, tuning_entry *entry);

/* Reads a file into a tuning that the caller frees. */
fdma_status fdma_read_tuning(const char *path, fdma_tuning **tuning);

fdma_status fdma_write_tuning(const char *path, const fdma_tuning *tuning);
