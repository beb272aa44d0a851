/* Loads a library, runs a call of libfdma on several threads and unloads the library, 20 times, as
 * a host of plug-ins does. The threads of the pool must survive that, because they sleep in
 * the library's code.
 *   unload LIBRARY */
#define _POSIX_C_SOURCE 200809L

#include "fdma.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { times = 20, len = 256, heads = 4, dim = 64, elements = len * heads * dim };

static float q[elements], out[elements];

static void *find(void *library, const char *name) {
    void *const found = dlsym(library, name);
    if (found == NULL) {
        printf("%s: not found\n", name);
        exit(1);
    }
    return found;
}

/* Attention on four threads; q is all 1, so out is. */
static int attend(void *library) {
    fdma_status (*workspace)(const fdma_forward_args *, size_t *);
    fdma_status (*forward)(const fdma_forward_args *);
    *(void **)&workspace = find(library, "fdma_forward_workspace");
    *(void **)&forward = find(library, "fdma_forward");
    fdma_forward_args args = {.size = sizeof args, .causal = 1, .exec.threads = 4};
    const fdma_tensor shape = {.dtype = FDMA_FLOAT32,
                               .rank = 4,
                               .shape = {1, len, heads, dim},
                               .stride = {elements, heads * dim, dim, 1}};
    args.q = args.k = args.v = args.out = shape;
    args.q.data = args.k.data = args.v.data = q;
    args.out.data = out;
    if (workspace(&args, &args.exec.workspace_size) != FDMA_OK)
        return 1;
    args.exec.workspace = malloc(args.exec.workspace_size);
    const fdma_status status = forward(&args);
    free(args.exec.workspace);
    return status != FDMA_OK || fabsf(out[elements - 1] - 1) > 1e-5F;
}

int main(int count, char **arguments) {
    const struct timespec pause = {.tv_nsec = 2000000}; // threads run and fall asleep
    for (int n = 0; n < elements; n++)
        q[n] = 1;
    for (int n = 0; n < times; n++) {
        void *const library = count == 2 ? dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL) : NULL;
        if (library == NULL || attend(library) != 0) {
            printf("load %d: failed: %s\n", n, library == NULL ? dlerror() : "wrong result");
            return 1;
        }
        dlclose(library);
        nanosleep(&pause, NULL);
    }
    puts("passed");
    return 0;
}
