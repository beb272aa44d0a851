/* Threads that share the work of a product. */
#pragma once

#include "fdma.h"

typedef struct crew crew;

typedef void (*crew_task)(void *of, int part, int parts);

/*! new_crew() - `count` threads, the caller's among them. */
crew *new_crew(int count);
void free_crew(crew *it);
int crew_size(const crew *it);

/*! run_crew() - runs task(of, part, parts) for each part from 0 on, in any of the threads, and
 *  waits for all. There are a few parts for each thread. */
void run_crew(crew *it, crew_task task, void *of);

/*! run_tasks() - an fdma_run_tasks whose context is a crew. */
void run_tasks(void *threads, int64_t count, fdma_task task, void *task_context);
