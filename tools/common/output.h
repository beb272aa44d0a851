/* Output files that are complete or not there at all; or that grow, and are valid at any time. */
#pragma once

#include <stdbool.h>
#include <stdio.h>

typedef struct output_file {
    FILE *stream;
    char *path;      /* the file's final name, with symbolic links resolved */
    char *temporary; /* its name until it is complete or published, in the same directory; NULL
                        for a device or a pipe, which is written directly */
} output_file;

/*! open_output() - opens a temporary file beside `path`, or `path` itself if that is a device or a
 *  pipe. One output at a time. A program that ends early, also by SIGINT, SIGTERM or SIGHUP,
 *  removes the temporary file.
 *  Returns 0, or -1 with errno set */
int open_output(const char *path, output_file *output);

/*! publish_output() - gives the file its final name now: it holds what is written so far, and
 *  what follows is added, up to the last publish_output(), also if the program ends early.
 *  Returns 0; or -1 with errno set, as commit_output() */
int publish_output(output_file *output);

/*! commit_output() - brings the file to the disk and gives it its final name.
 *  Returns 0; or -1 with errno set, and what was at `path` is still there */
int commit_output(output_file *output);

/*! abandon_output() - removes the temporary file, if there is one. Keeps errno. */
void abandon_output(output_file *output);

/*! is_same_file() - whether both names lead to one file that exists, also through links. */
bool is_same_file(const char *path, const char *other);

/*! is_standard_output() - whether `path` names the file or pipe that standard output goes to. */
bool is_standard_output(const char *path);
