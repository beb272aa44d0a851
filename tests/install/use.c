/* One query over two keys of equal logits: the mean of their values. */
#include <fdma.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

int main(void) {
    float q[8] = {0}, k[16] = {0}, v[16], out[8] = {0};
    size_t bytes;
    for (int d = 0; d < 8; d++) {
        v[d] = (float)d;
        v[8 + d] = (float)d + 3;
    }
    fdma_forward_args args = {
        .size = sizeof args,
        .q = fdma_tensor_4d(q, FDMA_FLOAT32, 1, 1, 1, 8),
        .k = fdma_tensor_4d(k, FDMA_FLOAT32, 1, 2, 1, 8),
        .v = fdma_tensor_4d(v, FDMA_FLOAT32, 1, 2, 1, 8),
        .out = fdma_tensor_4d(out, FDMA_FLOAT32, 1, 1, 1, 8),
    };
    if (fdma_forward_workspace(&args, &bytes) != FDMA_OK)
        puts(fdma_last_error());
    args.exec = (fdma_exec){.workspace = malloc(bytes), .workspace_size = bytes};
    if (fdma_forward(&args) != FDMA_OK)
        puts(fdma_last_error());
    free(args.exec.workspace);
    printf("fdma %s: out[7] = %g\n", fdma_version(), (double)out[7]);
    return fabsf(out[7] - 8.5f) < 1e-5f ? 0 : 1;
}
