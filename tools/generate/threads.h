/* Threads that share the work of a product. */
#pragma once

#include "fdma.h"

typedef struct crew crew;

typedef void (*crew_task)(void *of, int index, int count);

/*! new_crew() - `count` threads, the caller's among them. */
crew *new_crew(int count);
void free_crew(crew *it);
int crew_size(const crew *it);

/*! run_crew() - runs task(of, n, crew_size()) for n from 0 on, each in a thread, and waits for
 *  all. */
void run_crew(crew *it, crew_task task, void *of);

/*! run_tasks() - an fdma_run_tasks whose context is a crew. */
void run_tasks(void *threads, int64_t count, fdma_task task, void *task_context);
