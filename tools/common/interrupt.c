/* See common/interrupt.h. */
#define _XOPEN_SOURCE 700

#include "common/interrupt.h"

#include <signal.h>
#include <stdio.h>

static volatile sig_atomic_t received; // the signal's number

static void remember(int number) { received = number; }

void heed_interrupts(void) {
    static const int heeded[] = {SIGINT, SIGTERM};
    for (size_t s = 0; s < sizeof heeded / sizeof heeded[0]; s++) {
        struct sigaction action = {.sa_handler = SIG_DFL};
        sigaction(heeded[s], NULL, &action);
        if (action.sa_handler == SIG_IGN) // as a shell sets it for what runs in the background
            continue;
        action = (struct sigaction){.sa_handler = remember, .sa_flags = (int)SA_RESETHAND};
        sigemptyset(&action.sa_mask);
        sigaction(heeded[s], &action, NULL);
    }
}

bool interrupted(void) { return received != 0; }

void die_interrupted(void) {
    fflush(stdout);
    signal(received, SIG_DFL);
    raise(received);
}
