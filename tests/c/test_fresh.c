/* test_fresh.c - the initial contents of workspace and outputs do not change the results, and
 * outputs are written to the last byte. One time in three the memory comes from malloc() unchanged,
 * so that valgrind sees reads of unwritten bytes (tools/gates/run.sh). */
#include "operation_cases.h"

enum { as_it_is = -1 };
static const int fills[] = {0x00, 0xff, as_it_is}; /* 0xff: NaN in every type */

static void *filled(size_t size, int fill) {
    void *const data = malloc(size > 0 ? size : 1);
    if (data == NULL) {
        printf("out of memory\n");
        exit(1);
    }
    if (fill != as_it_is)
        memset(data, fill, size);
    return data;
}

/* score_backward adds to dv. */
static bool keeps_content(const call *x, const tensor_entry *entry) {
    return x->operation == operation_score_backward && strcmp(entry->name, "dv") == 0;
}

static void run_filled(call *x, const call *original, int fill) {
    const tensor_table table = fdma_tensors[original->operation];
    fdma_exec *const exec = call_exec(x);
    call_copy(x, original);
    for (size_t t = 0; t < table.count; t++) {
        fdma_tensor *const tensor = call_tensor(x, &table.entries[t]);
        if (is_output(&table.entries[t]) && tensor->rank > 0) {
            const void *const held = tensor->data;
            tensor->data = filled(bytes_of(*tensor), fill);
            if (keeps_content(x, &table.entries[t]))
                memcpy(tensor->data, held, bytes_of(*tensor));
        }
    }
    exec->threads = 1;
    CHECK_OK(operations[x->operation].workspace(&x->args, &exec->workspace_size));
    exec->workspace = filled(exec->workspace_size, fill);
    CHECK_OK(operations[x->operation].call(&x->args));
    free(exec->workspace);
}

static void check_fills(const call *original) {
    const tensor_table table = fdma_tensors[original->operation];
    call runs[TEST_COUNT(fills)];
    for (int f = 0; f < TEST_COUNT(fills); f++) {
        runs[f].operation = original->operation;
        run_filled(&runs[f], original, fills[f]);
    }
    for (size_t t = 0; t < table.count; t++) {
        const fdma_tensor first = *call_tensor(&runs[0], &table.entries[t]);
        for (int f = TEST_COUNT(fills) - 1; f >= 0 && is_output(&table.entries[t]); f--) {
            const fdma_tensor tensor = *call_tensor(&runs[f], &table.entries[t]);
            CHECK(same_tensor(tensor, first));
            free(tensor.data);
        }
    }
}

/* Steps through the cases: all of them take too long under valgrind. */
static void contents_do_not_show(void) { check_operations(3, 7, check_fills); }

static const test_entry tests[] = {TEST(contents_do_not_show)};

int main(void) { return test_run(tests, TEST_COUNT(tests)); }
