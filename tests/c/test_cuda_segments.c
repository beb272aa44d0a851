/* test_cuda_segments.c - selection on a CUDA device, of so many segments (a batch and a kv head) of
 * such lengths that every number of keys a thread and of blocks a segment is met; rows with gaps
 * between them, with slots and without: bit for bit what the CPU selects. */
#include "device.h"

enum { gap = 3 }; /* elements between two rows, which nobody touches */

static const struct {
    int64_t batch, kv_heads, kv_len, window;
} cases[] = {
    {1, 1, 1, 1},        {1, 1, 1000, 64},    {2, 1, 4097, 700},   {1, 8, 8192, 2048},
    {2, 4, 16384, 999},  {4, 8, 8192, 2048},  {8, 8, 4096, 1024},  {1, 8, 32768, 2048},
    {4, 8, 16000, 31},   {2, 8, 32768, 1024}, {1, 8, 65536, 2048}, {16, 16, 700, 100},
    {4, 8, 32768, 2048}, {3, 8, 33000, 77},
};

/* Contiguous but for the gap; outputs are full of guard bytes. */
static fdma_tensor new_rows(fdma_dtype dtype, int index) {
    fdma_tensor rows =
        new_output(dtype, cases[index].batch, cases[index].kv_heads, cases[index].kv_len + gap, -1);
    rows.shape[2] = cases[index].kv_len;
    return rows;
}

/* Stretches of random numbers, of few values, rising ones and falling ones. */
static void fill_rows(fdma_tensor rows, uint64_t *state) {
    int64_t kind = 0;
    for (int64_t row = 0; row < rows.shape[0] * rows.shape[1]; row++) {
        for (int64_t j = 0; j < rows.shape[2]; j++) {
            if (random_below(state, 2000) == 0)
                kind = random_below(state, 4);
            ((float *)rows.data)[row * rows.stride[1] + j] = kind == 0   ? random_float(state)
                                                             : kind == 1 ? (float)(j % 3)
                                                             : kind == 2 ? (float)j
                                                                         : (float)-j;
        }
    }
}

static fdma_select_args new_select(int index, fdma_scope scope, fdma_selection *selection) {
    uint64_t state = (uint64_t)index;
    fdma_select_args args = {
        .size = sizeof args,
        .score = new_rows(FDMA_FLOAT32, index),
        .selection = selection,
        .window = cases[index].window,
        .scope = scope,
        .exec = {.kernel = "cpu"},
    };
    *selection = (fdma_selection){
        .size = sizeof *selection,
        .expiry = new_rows(FDMA_INT32, index),
        .slot = new_rows(FDMA_INT32, index),
    };
    fill_rows(args.score, &state);
    CHECK_OK(run_select(&args));
    return args;
}

/* Gaps and all. */
static void check_rows(fdma_tensor on_device, fdma_tensor on_cpu) {
    CHECK_BYTES(device_read(on_device).data, on_cpu.data, device_extent(on_cpu));
}

static void check_as_cpu(const fdma_select_args *on_cpu, const char *kernel, int with_slots) {
    fdma_selection selection = *on_cpu->selection;
    fdma_select_args args = *on_cpu;
    args.score = device_tensor(on_cpu->score);
    args.selection = &selection;
    args.exec = (fdma_exec){.kernel = kernel};
    selection.expiry = device_output(selection.expiry);
    selection.slot = with_slots ? device_output(selection.slot) : (fdma_tensor){0};
    CHECK_OK(device_run_select(&args));
    device_wait();
    check_rows(selection.expiry, on_cpu->selection->expiry);
    if (with_slots)
        check_rows(selection.slot, on_cpu->selection->slot);
}

static void check_cases(const char *kernel, int with_slots) {
    for (int index = 0; index < TEST_COUNT(cases); index++) {
        for (int scope = FDMA_SCOPE_CAUSAL; scope <= FDMA_SCOPE_GLOBAL; scope++) {
            fdma_selection selection;
            test_context("%s: case %d, scope %d, slots %d", kernel ? kernel : "any", index, scope,
                         with_slots);
            const fdma_select_args args = new_select(index, (fdma_scope)scope, &selection);
            check_as_cpu(&args, kernel, with_slots);
            device_free_both();
        }
    }
}

static void each_kernel(void) {
    const kernel_list kernels = device_kernels("select");
    for (int kernel = 0; kernel < kernels.count; kernel++) {
        check_cases(kernels.name[kernel], 1);
        check_cases(kernels.name[kernel], 0);
    }
}

static void whichever_is_picked(void) { check_cases(NULL, 1); }

static const test_entry tests[] = {
    TEST(each_kernel),
    TEST(whichever_is_picked),
};

int main(void) { return device_test_run(tests, TEST_COUNT(tests)); }
