/* Tests whether two tensors share elements. The test is exact for separate buffers and for
 * interleaved slices of one packed buffer (q, k, v of one projection). Elsewhere it may report an
 * overlap where there is none, but it never misses one. */
#include "core/overlap.h"

#include "core/error.h"

/* The range of bytes that a tensor touches. With a period above 0, `first` is taken modulo the
 * period, and an axis whose stride is a multiple of it adds nothing: the range stands for itself
 * and for its repetitions every `period` bytes. */
typedef struct byte_range {
    int64_t first;
    int64_t end;
} byte_range;

static byte_range range_modulo(const fdma_tensor *tensor, int64_t period) {
    const int64_t size = (int64_t)fdma_dtype_size(tensor->dtype);
    const int64_t address = (int64_t)(uintptr_t)tensor->data;
    const int64_t first = period ? address % period : address;
    int64_t reach = size;
    for (int axis = 0; axis < tensor->rank; axis++) {
        if (tensor->shape[axis] == 1)
            continue; // its stride is arbitrary
        const int64_t stride = tensor->stride[axis] * size;
        if (period == 0 || stride % period != 0)
            reach += (tensor->shape[axis] - 1) * stride;
    }
    return (byte_range){first, first + reach};
}

static bool are_apart(byte_range a, byte_range b) { return a.end <= b.first || b.end <= a.first; }

/* Both ranges repeat every `period` bytes: they are apart if they are apart in the same period and
 * in neighboring ones. */
static bool are_apart_modulo(const fdma_tensor *a, const fdma_tensor *b, int64_t period) {
    const byte_range range_a = range_modulo(a, period);
    const byte_range range_b = range_modulo(b, period);
    if (range_a.end - range_a.first > period || range_b.end - range_b.first > period)
        return false;
    // Shift each range back by one period, not forward: forward it might go past INT64_MAX.
    const byte_range last_a = {range_a.first - period, range_a.end - period};
    const byte_range last_b = {range_b.first - period, range_b.end - period};
    return are_apart(range_a, range_b) && are_apart(last_a, range_b) && are_apart(range_a, last_b);
}

static bool may_overlap(const fdma_tensor *a, const fdma_tensor *b) {
    if (is_empty(a) || is_empty(b) || are_apart(range_modulo(a, 0), range_modulo(b, 0)))
        return false;
    const int64_t size = (int64_t)fdma_dtype_size(a->dtype);
    for (int axis = 0; axis < a->rank; axis++)
        if (a->shape[axis] > 1 && a->stride[axis] > 0 &&
            are_apart_modulo(a, b, a->stride[axis] * size))
            return false;
    return true;
}

static fdma_tensor workspace_of(const fdma_exec *exec) {
    const int64_t most = INT64_MAX - (int64_t)(uintptr_t)exec->workspace;
    const bool fits = exec->workspace_size < (size_t)most;
    return fdma_tensor_1d(exec->workspace, FDMA_UINT8, fits ? (int64_t)exec->workspace_size : most);
}

fdma_status fdma_check_overlaps(const named_tensor *tensors, size_t count, const fdma_exec *exec) {
    const fdma_tensor workspace = workspace_of(exec);
    for (size_t i = 0; i < count; i++) {
        FDMA_REQUIRE(!may_overlap(tensors[i].tensor, &workspace), FDMA_INVALID_ARGUMENT,
                     "exec.workspace: shares memory with %s, want memory of its own",
                     tensors[i].name);
        for (size_t other = 0; other < count && tensors[i].output; other++) {
            const bool is_new_pair = other != i && !(tensors[other].output && other < i);
            FDMA_REQUIRE(!is_new_pair || !may_overlap(tensors[i].tensor, tensors[other].tensor),
                         FDMA_INVALID_ARGUMENT,
                         "%s: shares elements with %s, want memory of its own", tensors[i].name,
                         tensors[other].name);
        }
    }
    return FDMA_OK;
}
