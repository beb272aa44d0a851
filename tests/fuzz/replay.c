/* Runs a fuzzer's function on the files of a directory: inputs that once failed, and seeds. */
#define _POSIX_C_SOURCE 200809L // opendir()
#include "fuzz.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

enum { max_input = 1 << 20, max_path = 4096 };

static int replay(const char *path) {
    FILE *const file = fopen(path, "rb");
    uint8_t *bytes = malloc(max_input);
    if (file == NULL || bytes == NULL) {
        fprintf(stderr, "%s: cannot be read\n", path);
        exit(1);
    }
    const size_t count = fread(bytes, 1, max_input, file);
    fclose(file);
    /* Exactly as large as the input, so that a sanitizer sees a read beyond it. */
    uint8_t *const exact = realloc(bytes, count > 0 ? count : 1);
    if (exact != NULL)
        bytes = exact;
    printf("%s\n", path);
    fflush(stdout);
    LLVMFuzzerTestOneInput(bytes, count);
    free(bytes);
    return 1;
}

int main(int argc, char **argv) {
    int count = 0;
    for (int i = 1; i < argc; i++) {
        DIR *const directory = opendir(argv[i]);
        if (directory == NULL) {
            count += replay(argv[i]);
            continue;
        }
        for (const struct dirent *entry; (entry = readdir(directory)) != NULL;) {
            char path[max_path];
            snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
            if (entry->d_name[0] != '.')
                count += replay(path);
        }
        closedir(directory);
    }
    printf("%d inputs\n", count);
    return count > 0 ? 0 : 1;
}
