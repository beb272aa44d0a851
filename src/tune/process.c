/* The tuning of the process. Calls read it without a lock: a tuning is complete before a pointer to
 * it is stored, and is neither changed nor freed afterwards. A tuning that was replaced is kept,
 * and found again if it returns, so that memory grows only with different tunings. */
#include "core/error.h"
#include "cpu/parallel.h"
#include "tune/tune.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const fdma_tuning none;

static _Atomic(fdma_tuning *) newest;          // all tunings, linked by `older`
static _Atomic(const fdma_tuning *) current;   // NULL: FDMA_TUNING was not read yet
static _Thread_local const fdma_tuning *tried; // by fdma_try_tuning()

static bool is_same(const fdma_tuning *a, const fdma_tuning *b) {
    bool same = a->count == b->count;
    for (int32_t n = 0; same && n < a->count; n++)
        same = strcmp(a->entries[n].line, b->entries[n].line) == 0;
    return same;
}

/* Takes over a tuning. Returns the one to use from now on: a known one that is equal, or this
 * one. */
static const fdma_tuning *keep(fdma_tuning *made) {
    fdma_tuning *first = newest;
    const fdma_tuning *known = made->count > 0 ? first : &none;
    while (known != NULL && !is_same(known, made))
        known = known->older;
    if (known != NULL) {
        free(made);
        return known;
    }
    do
        made->older = first;
    while (!atomic_compare_exchange_weak(&newest, &first, made));
    return made;
}

/* Two threads may run this at once: both read the file, and one of them stores its result. The
 * message of this thread's last failing call is preserved. */
static const fdma_tuning *read_file_of_environment(void) {
    char before[512], why[512];
    const char *const path = getenv("FDMA_TUNING");
    const fdma_tuning *found = &none, *unread = NULL;
    fdma_tuning *made;
    bool refused = false;
    snprintf(before, sizeof before, "%s", fdma_last_error());
    if (path != NULL && path[0] != '\0') {
        refused = fdma_read_tuning(path, &made) != FDMA_OK;
        found = refused ? &none : keep(made);
    }
    snprintf(why, sizeof why, "%s", fdma_last_error());
    if (refused)
        fdma_fail(FDMA_OK, "%s", before);
    if (!atomic_compare_exchange_strong(&current, &unread, found))
        return unread; // the result of the other thread
    if (refused)
        fprintf(stderr, "fdma: FDMA_TUNING is ignored: %s\n", why);
    return found;
}

/* Defers cancellation: a thread that is cancelled here would leave the file open. */
static const fdma_tuning *read_environment(void) {
    const int before = fdma_defer_cancellation();
    const fdma_tuning *const found = read_file_of_environment();
    fdma_allow_cancellation(before);
    return found;
}

const fdma_tuning *fdma_current_tuning(void) {
    if (tried != NULL)
        return tried;
    const fdma_tuning *const known = current;
    return known != NULL ? known : read_environment();
}

void fdma_try_tuning(const fdma_tuning *tuning) { tried = tuning; }

fdma_status fdma_put_entry(const tuning_entry *entry) {
    const fdma_tuning *old = fdma_current_tuning(), *now;
    do {
        fdma_tuning *made;
        FDMA_TRY(fdma_new_tuning(old->count + 1, &made));
        for (int32_t n = 0; n < old->count; n++)
            if (fdma_find_entry(old, &entry->calls) != &old->entries[n])
                made->entries[made->count++] = old->entries[n];
        if (fdma_has_choice(&entry->choice))
            made->entries[made->count++] = *entry;
        const bool fits = made->count <= most_entries;
        if (!fits)
            free(made);
        FDMA_REQUIRE(fits, FDMA_INVALID_ARGUMENT,
                     "tuning: has %d entries, want room for one more: at most %d", (int)old->count,
                     (int)most_entries);
        now = keep(made);
    } while (!atomic_compare_exchange_weak(&current, &old, now));
    return FDMA_OK;
}

fdma_status fdma_tuning_load(const char *path) {
    fdma_tuning *made = NULL;
    if (path != NULL)
        FDMA_TRY(fdma_read_tuning(path, &made));
    current = made != NULL ? keep(made) : &none;
    return FDMA_OK;
}

fdma_status fdma_tuning_save(const char *path) {
    FDMA_REQUIRE(path != NULL, FDMA_INVALID_ARGUMENT, "path: is NULL, want the name of a file");
    return fdma_write_tuning(path, fdma_current_tuning());
}

const char *fdma_tuning_line(int32_t index) {
    const fdma_tuning *const tuning = fdma_current_tuning();
    return index >= 0 && index < tuning->count ? tuning->entries[index].line : NULL;
}
