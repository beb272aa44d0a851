/* The rows of select. */
#ifndef FDMA_CPU_SELECT_SELECT_H
#define FDMA_CPU_SELECT_SELECT_H

#include "cpu/select/chunks.h"

static select_context plan_select(const fdma_problem *problem) {
    return cut_chunks(problem, count_chunks(problem));
}

static size_t select_workspace(const fdma_problem *problem) {
    select_context select = plan_select(problem);
    const fdma_arena arena = place_select(&select);
    return fdma_arena_size(&arena);
}

static fdma_status run_select(const fdma_problem *problem) {
    select_context select = plan_select(problem);
    place_select(&select);
    select_chunks(&select);
    return FDMA_OK;
}

#endif
