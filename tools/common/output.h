/* Output files that are there whole or not at all. */
#ifndef FDMA_TOOLS_COMMON_OUTPUT_H
#define FDMA_TOOLS_COMMON_OUTPUT_H

#include <stdio.h>

typedef struct output_file {
    FILE *stream;
    char *path;      /* where the file belongs, symbolic links followed */
    char *temporary; /* its name until then, in the same directory; NULL: a device or pipe, written
                        as it stands */
} output_file;

/*! open_output() - opens a temporary file beside `path`.
 *  Returns 0, or -1 with errno set. */
int open_output(const char *path, output_file *output);

/*! commit_output() - brings the file to the disk and gives it its name.
 *  Returns 0; or -1 with errno set: then what stood at `path` still stands there. */
int commit_output(output_file *output);

/*! abandon_output() - removes the temporary file; leaves errno alone. */
void abandon_output(output_file *output);

#endif /* FDMA_TOOLS_COMMON_OUTPUT_H */
