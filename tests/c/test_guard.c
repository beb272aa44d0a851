/* test_guard.c - every kernel accesses its tensors and its workspace, and no byte outside. Each of
 * them lies between its own guard pages, and inputs are read-only. Their position in their pages
 * must not change the results. */
#define _GNU_SOURCE /* mmap */

#include "operation_cases.h"

#include "fence.h"

/* ---- the fences themselves ---- */

static void read_byte(void *at) { (void)*(volatile unsigned char *)at; }
static void write_byte(void *at) { *(volatile unsigned char *)at = 1; }

static void accesses_outside_are_seen(void) {
    const fence start = fence_new(24, 2, FENCE_START), end = fence_new(24, 2, FENCE_END);
    const fence off = fence_new(24, 2, FENCE_OFF);
    CHECK(fence_kills(read_byte, start.data - 1) && fence_kills(write_byte, start.data - 1));
    CHECK(fence_kills(read_byte, end.data + 24) && fence_kills(write_byte, end.data + 24));
    CHECK(fence_kills(read_byte, off.data - 3));
    CHECK_INT((uintptr_t)off.data % 4, 2);
    CHECK(!fence_kills(read_byte, start.data) && !fence_kills(read_byte, end.data + 23));
    CHECK(!fence_kills(write_byte, start.data) && !fence_kills(write_byte, end.data + 23));

    uint16_t values[5] = {0};
    const fdma_tensor tensor = fdma_tensor_1d(values, FDMA_FLOAT16, 5);
    CHECK(fence_kills(write_byte, fence_input(tensor, FENCE_END).data));
    CHECK(!fence_kills(write_byte, fence_output(tensor, FENCE_END).data));

    CHECK(fence_intact(off));
    off.data[-1] = 0;
    CHECK(!fence_intact(off));
    off.data[-1] = test_guard_byte;
    fence_free_all();
}

/* ---- calls in fenced memory ---- */

/* Moves the tensors of a call, and workspace of exactly the size that it asks for, into fences. */
static void fence_call(call *x, fence_edge edge) {
    const tensor_table table = fdma_tensors[x->operation];
    size_t bytes = 0;
    for (size_t t = 0; t < table.count; t++) {
        fdma_tensor *const tensor = call_tensor(x, &table.entries[t]);
        *tensor =
            is_output(&table.entries[t]) ? fence_output(*tensor, edge) : fence_input(*tensor, edge);
    }
    CHECK_OK(operations[x->operation].workspace(&x->args, &bytes));
    fence_workspace(call_exec(x), bytes, edge);
}

static void check_fenced(const call *original) {
    call want;
    call_copy(&want, original);
    call_own_outputs(&want);
    call_exec(&want)->threads = 1;
    CHECK_OK(call_run(&want));
    for (int edge = 0; edge < fence_edges; edge++) {
        call x;
        call_copy(&x, original);
        call_exec(&x)->threads = 1 + edge; /* each thread has scratch of its own */
        fence_call(&x, (fence_edge)edge);
        CHECK_OK(operations[x.operation].call(&x.args));
        check_same_outputs(&x, &want);
        fence_free_all();
    }
}

static void run_in_child(void *context) {
    const fdma_forward_args *const args = context;
    _exit(fdma_forward(args) != FDMA_OK);
}

/* With k moved by one row in either direction, the fences must stop every kernel. */
static void forward_outside_is_seen(void) {
    const kernel_list kernels = kernels_of("forward");
    for (int i = 0; i < kernels.count; i++) {
        const shape n = {5, 5, 1, 2, -1, 1, 24};
        const problem p = problem_of(&n, n.head_dim, FDMA_FLOAT32, false);
        const size_t row = (size_t)(p.kv_heads * p.head_dim) * sizeof(float);
        call x = forward_call(&p, kernels.name[i]);
        fdma_tensor *const k = &x.args.forward.k;
        test_context("%s forward", kernels.name[i]);
        fence_call(&x, FENCE_END);
        CHECK(!fence_kills(run_in_child, &x.args));
        k->data = (char *)k->data + row;
        CHECK(fence_kills(run_in_child, &x.args));
        k->data = (char *)fence_input(p.k, FENCE_START).data - row;
        CHECK(fence_kills(run_in_child, &x.args));
        fence_free_all();
        test_free_all();
    }
}

static void calls_stay_inside(void) { check_operations(1, 1, check_fenced); }

static const test_entry tests[] = {
    TEST(accesses_outside_are_seen),
    TEST(forward_outside_is_seen),
    TEST(calls_stay_inside),
};

int main(void) {
    fence_watch();
    return test_run(tests, TEST_COUNT(tests));
}
