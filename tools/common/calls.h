/* The library's calls through pointers to their argument structs, for tables of operations. */
#pragma once

#include "fdma.h"

#include <stddef.h>

typedef struct library_call {
    size_t size, exec; /* of the argument struct, and offset in it */
    fdma_status (*workspace)(const void *args, size_t *bytes);
    fdma_status (*run)(const void *args);
} library_call;

/* Defines the functions of CALL_OF(name), which is a library_call. */
#define DEFINE_CALL(name)                                                                          \
    static fdma_status workspace_of_##name(const void *args, size_t *bytes) {                      \
        return fdma_##name##_workspace(args, bytes);                                               \
    }                                                                                              \
    static fdma_status run_##name(const void *args) { return fdma_##name(args); }
#define CALL_OF(name)                                                                              \
    {sizeof(fdma_##name##_args), offsetof(fdma_##name##_args, exec), workspace_of_##name,          \
     run_##name}

/*! exec_of() - the field exec of an argument struct. */
static inline fdma_exec *exec_of(const library_call *of, void *args) {
    return (fdma_exec *)((char *)args + of->exec);
}
