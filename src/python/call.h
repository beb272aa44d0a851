/* A direct call in C: flash_dmattn._native.Call. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

enum {
    INPUTS_MAX = 32,
    OUTPUTS_MAX = 16,
    TARGETS_MAX = 64,
    STEPS_MAX = 3,
    TENSORS_MAX = INPUTS_MAX + OUTPUTS_MAX,
};

typedef int library_function(const void *args); /* fdma_status of fdma.h */

/* A word of an argument struct, which gets the address of a tensor plus an offset in bytes.
 * Tensors are numbered inputs first, then outputs. */
typedef struct target {
    uint64_t *word;
    Py_ssize_t tensor;
    uint64_t offset;
} target;

typedef struct input {
    Py_ssize_t at;      /* among the arguments */
    uint64_t alignment; /* its address modulo ALIGNMENT */
} input;

typedef struct output {
    PyObject *like; /* arguments of the allocator */
    int is_cleared;
} output;

/* A call of the C library. The addresses belong to a Prepared call of _call.py. */
typedef struct step {
    library_function *function;
    const void *args;
    PyObject *fail; /* function: raises the error of a status */
    uint64_t *stream_word;
    int32_t *trusted; /* fdma_exec.trusted: PyTorch knows each tensor's device, so only the current
                         device must be compared; NULL on the CPU */
} step;

/* Other objects are borrowed from `plan`, the arguments that the call was made from. Its Prepared
 * calls are among these. */
typedef struct call {
    PyObject_HEAD PyObject *plan;
    PyObject *guard;     /* function: true if tensors have the layout */
    PyObject *apply;     /* of the autograd.Function that records the call, or None */
    PyObject *allocate;  /* function: a new tensor on the current device */
    PyObject *elsewhere; /* the same on the call's device, where it is not the current one */
    PyObject *device;    /* its number, or None for the CPU */
    PyObject *current;   /* function: the number of the current device */
    PyObject *stream;    /* function: the current stream of a device */
    PyObject *kept;      /* what autograd saves: numbers of tensors */
    PyObject *data_ptr;  /* function: the address of a tensor */
    PyObject *is_nested; /* owned: the name of a tensor's attribute */
    PyObject *tensor_type, *parameter_type;
    void *(*read_address)(PyObject *tensor); /* data_ptr as PyTorch has it in C++, or NULL */
    Py_ssize_t input_count, output_count, target_count, step_count;
    Py_ssize_t return_count; /* of the outputs, the first ones; a workspace ends with the call */
    input inputs[INPUTS_MAX];
    output outputs[OUTPUTS_MAX];
    target targets[TARGETS_MAX];
    step steps[STEPS_MAX]; /* one after the other */
} call;

/* The type Call, or NULL with an exception. */
PyObject *make_call_type(void);

/* Add an object to a tuple that is being filled. */
void put(PyObject *tuple, Py_ssize_t *at, PyObject *borrowed);

/* The truth of an object, which is released: 1, 0, or -1 with an exception. */
int is_true(PyObject *owned);

/* Write the addresses of the inputs `given`. Returns 0, or -1 with an exception. */
int find_addresses(const call *self, PyObject *given, uint64_t *addresses);

/* Returns 1 and writes the addresses if the call can be made for the inputs `given`, 0 if not, -1
 * with an exception. */
int fits(const call *self, PyObject *given, uint64_t *addresses);

/* Make the call for inputs at addresses[0] to addresses[input_count - 1]; there is room for all
 * tensors. Returns all outputs, or NULL with an exception. */
PyObject *run(const call *self, uint64_t addresses[TENSORS_MAX]);

/* Makes the caller's results of the outputs, which are released: several, the only one, or None.
 * NULL for NULL. */
PyObject *take_results(const call *self, PyObject *outputs);
