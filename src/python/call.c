/* The type Call: it checks tensors and makes a call that Python has prepared. */
#include "call.h"

enum { ALIGNMENT = 16 }; /* bytes, as in _call.py: which kernels take a tensor may depend on it */

/* ---- from Python ---- */

static void *pointer_of(unsigned long long address) { return (void *)(uintptr_t)address; }

/* The size of a tuple of at most `most` items, or -1 with an exception. */
static Py_ssize_t size_of(PyObject *tuple, Py_ssize_t most, const char *name) {
    const Py_ssize_t count = PyTuple_Size(tuple);
    if (count <= most)
        return count;
    PyErr_Format(PyExc_ValueError, "%s: are %zd, want at most %zd", name, count, most);
    return -1;
}

static int parse_tensors(call *self, PyObject *inputs, PyObject *outputs) {
    self->input_count = size_of(inputs, INPUTS_MAX, "inputs");
    self->output_count = size_of(outputs, OUTPUTS_MAX, "outputs");
    for (Py_ssize_t index = 0; index < self->input_count; index++) {
        Py_ssize_t at;
        unsigned long long alignment;
        if (!PyArg_ParseTuple(PyTuple_GetItem(inputs, index), "nK", &at, &alignment))
            return -1;
        self->inputs[index] = (input){at, alignment};
    }
    for (Py_ssize_t index = 0; index < self->output_count; index++) {
        output *one = &self->outputs[index];
        if (!PyArg_ParseTuple(PyTuple_GetItem(outputs, index), "O!p", &PyTuple_Type, &one->like,
                              &one->is_cleared))
            return -1;
    }
    return self->input_count < 0 || self->output_count < 0 ? -1 : 0;
}

static int parse_targets(call *self, PyObject *targets) {
    self->target_count = size_of(targets, TARGETS_MAX, "targets");
    for (Py_ssize_t index = 0; index < self->target_count; index++) {
        Py_ssize_t tensor;
        unsigned long long word, offset;
        if (!PyArg_ParseTuple(PyTuple_GetItem(targets, index), "KnK", &word, &tensor, &offset))
            return -1;
        if (tensor < 0 || tensor >= self->input_count + self->output_count) {
            PyErr_Format(PyExc_ValueError, "targets: %zd is the number of no tensor", tensor);
            return -1;
        }
        self->targets[index] = (target){pointer_of(word), tensor, offset};
    }
    return self->target_count < 0 ? -1 : 0;
}

static int parse_steps(call *self, PyObject *steps) {
    self->step_count = size_of(steps, STEPS_MAX, "steps");
    for (Py_ssize_t index = 0; index < self->step_count; index++) {
        step *one = &self->steps[index];
        unsigned long long function, args, stream_word, trusted;
        if (!PyArg_ParseTuple(PyTuple_GetItem(steps, index), "KKOKK", &function, &args, &one->fail,
                              &stream_word, &trusted))
            return -1;
        /* fdma_status is an int, and all argument structs are passed by address. */
        one->function = (library_function *)(uintptr_t)function;
        one->args = pointer_of(args);
        one->stream_word = pointer_of(stream_word);
        one->trusted = pointer_of(trusted);
    }
    return self->step_count < 0 ? -1 : 0;
}

/* (prepared, steps, guard, apply, (allocate, elsewhere), (device, current, stream), (data_ptr,
 * read_address, tensor_type, parameter_type), inputs, outputs, targets, return_count, kept), with a
 * step of (function, args, fail, stream_word, trusted): see make_native() of _repeat.py. */
static PyObject *new_call(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *inputs, *outputs, *targets, *steps, *prepared;
    unsigned long long read_address;
    (void)keywords;
    call *self = (call *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(args);
    self->plan = args;
    if (!PyArg_ParseTuple(args, "OO!OO(OO)(OOO)(OKOO)O!O!O!nO!", &prepared, &PyTuple_Type, &steps,
                          &self->guard, &self->apply, &self->allocate, &self->elsewhere,
                          &self->device, &self->current, &self->stream, &self->data_ptr,
                          &read_address, &self->tensor_type, &self->parameter_type, &PyTuple_Type,
                          &inputs, &PyTuple_Type, &outputs, &PyTuple_Type, &targets,
                          &self->return_count, &PyTuple_Type, &self->kept) ||
        parse_tensors(self, inputs, outputs) < 0 || parse_targets(self, targets) < 0 ||
        parse_steps(self, steps) < 0 ||
        (self->is_nested = PyUnicode_InternFromString("is_nested")) == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    self->read_address = (void *(*)(PyObject *))(uintptr_t)read_address;
    return (PyObject *)self;
}

static void free_call(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((call *)object)->plan);
    Py_XDECREF(((call *)object)->is_nested);
    const freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static PyType_Slot call_slots[] = {
    {Py_tp_new, (void *)new_call},
    {Py_tp_dealloc, (void *)free_call},
    {Py_tp_doc, (void *)"What repeat() and record() need of a direct call."},
    {0, NULL},
};

static PyType_Spec call_spec = {
    .name = "flash_dmattn._native.Call",
    .basicsize = sizeof(call),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = call_slots,
};

PyObject *make_call_type(void) { return PyType_FromSpec(&call_spec); }

/* ---- addresses ---- */

void put(PyObject *tuple, Py_ssize_t *at, PyObject *borrowed) {
    Py_INCREF(borrowed);
    PyTuple_SetItem(tuple, (*at)++, borrowed);
}

int is_true(PyObject *owned) {
    if (owned == NULL)
        return -1;
    const int truth = owned == Py_True ? 1 : owned == Py_False ? 0 : PyObject_IsTrue(owned);
    Py_DECREF(owned);
    return truth;
}

static int read_number(PyObject *owned, uint64_t *number) {
    if (owned == NULL)
        return -1;
    *number = PyLong_AsUnsignedLongLong(owned);
    Py_DECREF(owned);
    return *number == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int is_tensor(const call *self, PyObject *object) {
    const PyObject *type = (PyObject *)Py_TYPE(object);
    return type == self->tensor_type || type == self->parameter_type;
}

static int find_address(const call *self, PyObject *tensor, uint64_t *address) {
    /* PyTorch's function in C++ throws for other types. */
    if (self->read_address == NULL || !is_tensor(self, tensor))
        return read_number(PyObject_CallFunctionObjArgs(self->data_ptr, tensor, NULL), address);
    *address = (uintptr_t)self->read_address(tensor);
    return 0;
}

int find_addresses(const call *self, PyObject *given, uint64_t *addresses) {
    for (Py_ssize_t index = 0; index < self->input_count; index++) {
        PyObject *tensor = PyTuple_GetItem(given, index);
        if (tensor == NULL || find_address(self, tensor, &addresses[index]) < 0)
            return -1;
    }
    return 0;
}

/* Returns 1 if a tensor has no strides, for which the guard would throw an exception of C++, 0 if
 * not, -1 with an exception set. */
static int has_nested(const call *self, PyObject *given) {
    int truth = 0;
    for (Py_ssize_t index = 0; index < self->input_count && truth == 0; index++) {
        PyObject *one = PyTuple_GetItem(given, index);
        if (one == NULL || is_tensor(self, one))
            truth = one == NULL ? -1 : is_true(PyObject_GetAttr(one, self->is_nested));
    }
    return truth;
}

int fits(const call *self, PyObject *given, uint64_t *addresses) {
    const int nested = has_nested(self, given);
    if (nested != 0)
        return nested < 0 ? -1 : 0;
    const int truth = is_true(PyObject_CallObject(self->guard, given));
    if (truth <= 0)
        return truth;
    if (find_addresses(self, given, addresses) < 0)
        return -1;
    for (Py_ssize_t index = 0; index < self->input_count; index++)
        if (addresses[index] % ALIGNMENT != self->inputs[index].alignment)
            return 0;
    return 1;
}

/* ---- the call ---- */

/* Returns 1 if the call's device is the current one or the CPU, 0 if not, -1 with an exception set.
 * On a device it also writes that device's current stream. */
static int is_device_current(const call *self, uint64_t *stream) {
    if (self->device == Py_None)
        return 1;
    PyObject *found = PyObject_CallFunctionObjArgs(self->stream, self->device, NULL);
    if (read_number(found, stream) < 0)
        return -1;
    PyObject *current = PyObject_CallObject(self->current, NULL);
    if (current == NULL)
        return -1;
    const int is_current = PyObject_RichCompareBool(current, self->device, Py_EQ);
    Py_DECREF(current);
    return is_current;
}

static PyObject *make_outputs(const call *self, PyObject *allocate, uint64_t *addresses) {
    PyObject *outputs = PyTuple_New(self->output_count);
    for (Py_ssize_t index = 0; outputs != NULL && index < self->output_count; index++) {
        const output *one = &self->outputs[index];
        PyObject *tensor = PyObject_CallObject(allocate, one->like), *cleared = NULL;
        if (tensor != NULL)
            PyTuple_SetItem(outputs, index, tensor); /* takes the reference */
        if (tensor == NULL || find_address(self, tensor, &addresses[index]) < 0 ||
            (one->is_cleared && (cleared = PyObject_CallMethod(tensor, "zero_", NULL)) == NULL))
            Py_CLEAR(outputs);
        Py_XDECREF(cleared);
    }
    return outputs;
}

PyObject *run(const call *self, uint64_t addresses[TENSORS_MAX]) {
    uint64_t stream = 0;
    const int is_current = is_device_current(self, &stream);
    if (is_current < 0)
        return NULL;
    PyObject *allocate = is_current ? self->allocate : self->elsewhere;
    PyObject *outputs = make_outputs(self, allocate, addresses + self->input_count);
    if (outputs == NULL)
        return NULL;
    /* From here on no code of Python runs that might make the same call in between. */
    for (Py_ssize_t index = 0; index < self->target_count; index++) {
        const target *one = &self->targets[index];
        *one->word = addresses[one->tensor] + one->offset;
    }
    int status = 0;
    Py_ssize_t taken = 0;
    for (Py_ssize_t index = 0; index < self->step_count; index++) {
        if (self->steps[index].stream_word != NULL)
            *self->steps[index].stream_word = stream;
        if (self->steps[index].trusted != NULL)
            *self->steps[index].trusted = is_current;
    }
    Py_BEGIN_ALLOW_THREADS;
    for (; taken < self->step_count && status == 0; taken++)
        status = self->steps[taken].function(self->steps[taken].args);
    Py_END_ALLOW_THREADS;
    if (status == 0)
        return outputs;
    Py_DECREF(outputs);
    PyObject *none = PyObject_CallFunction(self->steps[taken - 1].fail, "i", status);
    if (none != NULL) {
        Py_DECREF(none);
        PyErr_Format(PyExc_RuntimeError, "the call failed with status %d", status);
    }
    return NULL;
}

PyObject *take_results(const call *self, PyObject *outputs) {
    PyObject *returned;
    if (outputs == NULL)
        return NULL;
    if (self->return_count > 1) {
        returned = PyTuple_GetSlice(outputs, 0, self->return_count);
    } else {
        returned = self->return_count == 1 ? PyTuple_GetItem(outputs, 0) : Py_None;
        Py_XINCREF(returned);
    }
    Py_DECREF(outputs);
    return returned;
}
