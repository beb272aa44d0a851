/* flash_dmattn._native: direct calls that are made again, in C.
 *
 * python/flash_dmattn/_direct.py says what a direct call is, makes the first one of each layout and
 * can make the others too; this module takes a fraction of the time for them. It knows nothing of
 * PyTorch but the Python functions that it is given, and of libfdma only addresses: those of the
 * function and of the words of its argument struct that change from call to call. It is built
 * against the stable ABI of Python 3.8. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* Changes with what _direct.py and this file expect of each other. */
enum { INTERFACE = 1 };

enum {
    INPUTS_MAX = 32,
    OUTPUTS_MAX = 16,
    WATCHERS_MAX = 8,
    STATES_MAX = 8,
    ALIGNMENT = 16, /* bytes, as in _call.py: which kernels take a tensor may depend on it */
};

typedef int library_function(const void *args); /* fdma_status of fdma.h */

/* ---- what calls depend on beside their arguments ---- */

enum { LEVEL, NATIVE, TO_SAVE, MATERIALIZE_GRADS, NON_DIFFERENTIABLE, CALL, NAME_COUNT };
static const char *const name_texts[NAME_COUNT] = {
    [LEVEL] = "_current_level",
    [NATIVE] = "native", /* of a DirectCall */
    [TO_SAVE] = "to_save",
    [MATERIALIZE_GRADS] = "materialize_grads",
    [NON_DIFFERENTIABLE] = "non_differentiable",
    [CALL] = "call",
};

/* Objects are borrowed from `plan`, but for the type and the names. */
typedef struct module_state {
    PyObject *plan; /* the arguments of configure(), NULL before it */
    PyTypeObject *call_type;
    PyObject *watchers[WATCHERS_MAX]; /* functions: true where something watches operators */
    PyObject *states[STATES_MAX];     /* functions: a part of the key; the first is grad mode */
    PyObject *hooks;                  /* function: the hooks for saved tensors, or None */
    PyObject *forward_ad;             /* the dict of torch.autograd.forward_ad */
    PyObject *names[NAME_COUNT];      /* of attributes */
    Py_ssize_t watcher_count, state_count;
} module_state;

static int is_true(PyObject *owned) {
    if (owned == NULL)
        return -1;
    const int truth = PyObject_IsTrue(owned);
    Py_DECREF(owned);
    return truth;
}

static int is_in_forward_mode(const module_state *state) {
    PyObject *level = PyDict_GetItemWithError(state->forward_ad, state->names[LEVEL]);
    if (level == NULL)
        return PyErr_Occurred() ? -1 : 0;
    const long number = PyLong_AsLong(level);
    return number == -1 && PyErr_Occurred() ? -1 : number >= 0;
}

/* is_watched() of _direct.py: 1, 0, or -1 with an exception. */
static int is_watched(const module_state *state, PyObject *grad_mode) {
    for (Py_ssize_t index = 0; index < state->watcher_count; index++) {
        const int truth = is_true(PyObject_CallObject(state->watchers[index], NULL));
        if (truth != 0)
            return truth;
    }
    if (state->hooks != Py_None && grad_mode == Py_True) {
        const int truth = is_true(PyObject_CallFunctionObjArgs(state->hooks, Py_False, NULL));
        if (truth != 0)
            return truth;
    }
    return is_in_forward_mode(state);
}

static PyObject *not_implemented(void) {
    Py_INCREF(Py_NotImplemented);
    return Py_NotImplemented;
}

static void put(PyObject *tuple, Py_ssize_t *at, PyObject *borrowed) {
    Py_INCREF(borrowed);
    PyTuple_SetItem(tuple, (*at)++, borrowed);
}

/* make_key() of _direct.py, which it equals: the head, the types of the tensors, options and their
 * types, and settings, the last of which is `tunings`. */
static PyObject *make_key(const module_state *state, PyObject *head, PyObject *arguments,
                          Py_ssize_t tensors, PyObject *tunings, PyObject *grad_mode) {
    const Py_ssize_t count = PyTuple_Size(arguments);
    PyObject *key = PyTuple_New(1 + tensors + 2 * (count - tensors) + state->state_count + 1);
    if (key == NULL)
        return NULL;
    Py_ssize_t at = 0;
    put(key, &at, head);
    for (Py_ssize_t index = 0; index < tensors; index++)
        put(key, &at, (PyObject *)Py_TYPE(PyTuple_GetItem(arguments, index)));
    for (Py_ssize_t index = tensors; index < count; index++)
        put(key, &at, PyTuple_GetItem(arguments, index));
    for (Py_ssize_t index = tensors; index < count; index++)
        put(key, &at, (PyObject *)Py_TYPE(PyTuple_GetItem(arguments, index)));
    put(key, &at, grad_mode);
    for (Py_ssize_t index = 1; index < state->state_count; index++) {
        PyObject *value = PyObject_CallObject(state->states[index], NULL);
        if (value == NULL) {
            Py_DECREF(key);
            return NULL;
        }
        PyTuple_SetItem(key, at++, value);
    }
    put(key, &at, tunings);
    return key;
}

/* ---- a call ---- */

typedef struct input {
    Py_ssize_t at;      /* among the arguments */
    uint64_t *word;     /* of the argument struct: its address */
    uint64_t alignment; /* its address modulo ALIGNMENT */
} input;

typedef struct output {
    PyObject *like; /* arguments of the allocator */
    uint64_t *word; /* NULL for an output that the C function does not write */
    int is_cleared;
} output;

/* flash_dmattn._native.Call. Objects are borrowed from `plan`, the arguments that it was made from.
 * The addresses are those of a Prepared call, which is one of them. */
typedef struct call {
    PyObject_HEAD PyObject *plan;
    PyObject *guard;     /* function: whether tensors have the layout */
    PyObject *data_ptr;  /* function: the address of a tensor */
    PyObject *apply;     /* of the autograd.Function that records the call, or None */
    PyObject *fail;      /* function: raises what a status stands for */
    PyObject *allocate;  /* function: a new tensor on the current device */
    PyObject *elsewhere; /* the same on the call's device, where it is not the current one */
    PyObject *device;    /* its number, or None for the CPU */
    PyObject *current;   /* function: the number of the current device */
    PyObject *stream;    /* function: the current stream of a device */
    PyObject *kept;      /* what autograd saves: indices into inputs, then outputs */
    uint64_t *stream_word;
    library_function *function;
    const void *args;
    Py_ssize_t input_count, output_count;
    Py_ssize_t return_count; /* of the outputs, the first ones; a workspace ends with the call */
    input inputs[INPUTS_MAX];
    output outputs[OUTPUTS_MAX];
} call;

static void *pointer_of(unsigned long long address) { return (void *)(uintptr_t)address; }

static int parse_inputs(call *self, PyObject *inputs) {
    self->input_count = PyTuple_Size(inputs);
    if (self->input_count > INPUTS_MAX) {
        PyErr_SetString(PyExc_ValueError, "inputs: are too many");
        return -1;
    }
    for (Py_ssize_t index = 0; index < self->input_count; index++) {
        Py_ssize_t at;
        unsigned long long word, alignment;
        if (!PyArg_ParseTuple(PyTuple_GetItem(inputs, index), "nKK", &at, &word, &alignment))
            return -1;
        self->inputs[index] = (input){at, pointer_of(word), alignment};
    }
    return 0;
}

static int parse_outputs(call *self, PyObject *outputs) {
    self->output_count = PyTuple_Size(outputs);
    if (self->output_count > OUTPUTS_MAX) {
        PyErr_SetString(PyExc_ValueError, "outputs: are too many");
        return -1;
    }
    for (Py_ssize_t index = 0; index < self->output_count; index++) {
        output *one = &self->outputs[index];
        unsigned long long word;
        PyObject *item = PyTuple_GetItem(outputs, index);
        if (!PyArg_ParseTuple(item, "O!Kp", &PyTuple_Type, &one->like, &word, &one->is_cleared))
            return -1;
        one->word = pointer_of(word);
    }
    return 0;
}

static PyObject *new_call(PyTypeObject *type, PyObject *args, PyObject *keywords) {
    PyObject *inputs, *outputs, *prepared;
    unsigned long long function, struct_address, stream_word;
    (void)keywords;
    call *self = (call *)PyType_GenericAlloc(type, 0);
    if (self == NULL)
        return NULL;
    Py_INCREF(args);
    self->plan = args;
    if (!PyArg_ParseTuple(args, "OKKOOOO(OO)(OOOK)O!O!nO!", &prepared, &function, &struct_address,
                          &self->guard, &self->data_ptr, &self->apply, &self->fail, &self->allocate,
                          &self->elsewhere, &self->device, &self->current, &self->stream,
                          &stream_word, &PyTuple_Type, &inputs, &PyTuple_Type, &outputs,
                          &self->return_count, &PyTuple_Type, &self->kept) ||
        parse_inputs(self, inputs) < 0 || parse_outputs(self, outputs) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    /* fdma_status is an int, and the argument struct's type does not change how it is passed. */
    self->function = (library_function *)(uintptr_t)function;
    self->args = pointer_of(struct_address);
    self->stream_word = pointer_of(stream_word);
    return (PyObject *)self;
}

static void free_call(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    Py_XDECREF(((call *)object)->plan);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}

static int read_number(PyObject *owned, uint64_t *number) {
    if (owned == NULL)
        return -1;
    *number = PyLong_AsUnsignedLongLong(owned);
    Py_DECREF(owned);
    return *number == UINT64_MAX && PyErr_Occurred() ? -1 : 0;
}

static int find_address(const call *self, PyObject *tensor, uint64_t *address) {
    return read_number(PyObject_CallFunctionObjArgs(self->data_ptr, tensor, NULL), address);
}

static int find_addresses(const call *self, PyObject *given, uint64_t *addresses) {
    for (Py_ssize_t index = 0; index < self->input_count; index++)
        if (find_address(self, PyTuple_GetItem(given, index), &addresses[index]) < 0)
            return -1;
    return 0;
}

/* Whether the call can be made for the tensors `given`, and their addresses: 1, 0, or -1 with an
 * exception. */
static int fits(const call *self, PyObject *given, uint64_t *addresses) {
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

/* The allocator to use, borrowed. On a device also the current stream of it. */
static PyObject *choose_allocator(const call *self, uint64_t *stream) {
    if (self->device == Py_None)
        return self->allocate;
    PyObject *found = PyObject_CallFunctionObjArgs(self->stream, self->device, NULL);
    PyObject *current =
        read_number(found, stream) < 0 ? NULL : PyObject_CallObject(self->current, NULL);
    if (current == NULL)
        return NULL;
    const int is_current = PyObject_RichCompareBool(current, self->device, Py_EQ);
    Py_DECREF(current);
    return is_current < 0 ? NULL : is_current ? self->allocate : self->elsewhere;
}

static PyObject *make_outputs(const call *self, PyObject *allocate, uint64_t *addresses) {
    PyObject *outputs = PyTuple_New(self->output_count);
    for (Py_ssize_t index = 0; outputs != NULL && index < self->output_count; index++) {
        const output *one = &self->outputs[index];
        PyObject *tensor = PyObject_CallObject(allocate, one->like);
        if (tensor != NULL)
            PyTuple_SetItem(outputs, index, tensor);
        PyObject *cleared = NULL;
        if (tensor == NULL || find_address(self, tensor, &addresses[index]) < 0 ||
            (one->is_cleared && (cleared = PyObject_CallMethod(tensor, "zero_", NULL)) == NULL))
            Py_CLEAR(outputs);
        Py_XDECREF(cleared);
    }
    return outputs;
}

/* Make the call for inputs at these addresses. Returns all outputs. The argument struct is written
 * at the end, when no code of Python runs that might make the same call in between. */
static PyObject *run(const call *self, const uint64_t *addresses) {
    uint64_t own[OUTPUTS_MAX], stream = 0;
    PyObject *allocate = choose_allocator(self, &stream);
    PyObject *outputs = allocate == NULL ? NULL : make_outputs(self, allocate, own);
    if (outputs == NULL)
        return NULL;
    for (Py_ssize_t index = 0; index < self->input_count; index++)
        *self->inputs[index].word = addresses[index];
    for (Py_ssize_t index = 0; index < self->output_count; index++)
        if (self->outputs[index].word != NULL)
            *self->outputs[index].word = own[index];
    if (self->stream_word != NULL)
        *self->stream_word = stream;
    int status;
    Py_BEGIN_ALLOW_THREADS;
    status = self->function(self->args);
    Py_END_ALLOW_THREADS;
    if (status == 0)
        return outputs;
    Py_DECREF(outputs);
    PyObject *none = PyObject_CallFunction(self->fail, "i", status);
    if (none != NULL) {
        Py_DECREF(none);
        PyErr_Format(PyExc_RuntimeError, "the call failed with status %d", status);
    }
    return NULL;
}

/* What the call returns: several results, or the only one, or None. Takes `outputs`. */
static PyObject *unpack(const call *self, PyObject *outputs) {
    PyObject *returned = NULL;
    if (self->return_count > 1 && self->return_count == self->output_count)
        return outputs;
    if (self->return_count > 1) {
        returned = PyTuple_GetSlice(outputs, 0, self->return_count);
    } else {
        returned = self->return_count == 1 ? PyTuple_GetItem(outputs, 0) : Py_None;
        Py_INCREF(returned);
    }
    Py_DECREF(outputs);
    return returned;
}

/* ---- functions of the module ---- */

/* Function.apply(owner, *given) */
static PyObject *apply(const call *self, PyObject *owner, PyObject *given) {
    PyObject *args = PyTuple_New(1 + self->input_count);
    if (args == NULL)
        return NULL;
    Py_ssize_t at = 0;
    put(args, &at, owner);
    for (Py_ssize_t index = 0; index < self->input_count; index++)
        put(args, &at, PyTuple_GetItem(given, index));
    PyObject *returned = PyObject_CallObject(self->apply, args);
    Py_DECREF(args);
    return returned;
}

static PyObject *pick_given(const call *self, PyObject *arguments) {
    PyObject *given = PyTuple_New(self->input_count);
    Py_ssize_t at = 0;
    while (given != NULL && at < self->input_count) {
        PyObject *tensor = PyTuple_GetItem(arguments, self->inputs[at].at);
        if (tensor != NULL)
            put(given, &at, tensor);
        else
            Py_CLEAR(given);
    }
    return given;
}

/* The results of the call `self` of `owner`; NotImplemented if the tensors do not fit it. */
static PyObject *try_call(const call *self, PyObject *owner, PyObject *arguments) {
    PyObject *given = pick_given(self, arguments);
    if (given == NULL)
        return NULL;
    uint64_t addresses[INPUTS_MAX];
    const int does_fit = fits(self, given, addresses);
    PyObject *returned = NULL;
    if (does_fit == 0) {
        returned = not_implemented();
    } else if (does_fit > 0 && self->apply != Py_None) {
        returned = apply(self, owner, given);
    } else if (does_fit > 0) {
        PyObject *outputs = run(self, addresses);
        returned = outputs == NULL ? NULL : unpack(self, outputs);
    }
    Py_DECREF(given);
    return returned;
}

/* The list of calls that are known by the key of the arguments; NULL without an exception if there
 * are none, or if an option has no hash. */
static PyObject *find_calls(const module_state *state, PyObject *args, PyObject *grad_mode) {
    PyObject *known, *head, *arguments, *tunings;
    Py_ssize_t tensors;
    if (!PyArg_ParseTuple(args, "O!OO!nO", &PyDict_Type, &known, &head, &PyTuple_Type, &arguments,
                          &tensors, &tunings))
        return NULL;
    if (tensors < 0 || tensors > PyTuple_Size(arguments)) {
        PyErr_Format(PyExc_ValueError, "count: is %zd, want 0 to the arguments", tensors);
        return NULL;
    }
    PyObject *key = make_key(state, head, arguments, tensors, tunings, grad_mode);
    if (key == NULL)
        return NULL;
    PyObject *calls = PyDict_GetItemWithError(known, key);
    Py_XINCREF(calls);
    Py_DECREF(key);
    if (calls == NULL && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_TypeError))
        PyErr_Clear();
    return calls;
}

/* The Call of a DirectCall. */
static call *find_native(const module_state *state, PyObject *owner) {
    PyObject *native = PyObject_GetAttr(owner, state->names[NATIVE]);
    if (native != NULL && Py_TYPE(native) != state->call_type) {
        PyErr_SetString(PyExc_TypeError, "native: is no Call");
        Py_CLEAR(native);
    }
    return (call *)native;
}

/* The results of the first of the calls that the arguments fit. */
static PyObject *try_calls(const module_state *state, PyObject *calls, PyObject *arguments) {
    for (Py_ssize_t index = 0; index < PyList_Size(calls); index++) {
        PyObject *owner = PyList_GetItem(calls, index);
        Py_INCREF(owner);
        call *native = find_native(state, owner);
        PyObject *returned = native == NULL ? NULL : try_call(native, owner, arguments);
        Py_XDECREF(native);
        Py_DECREF(owner);
        if (returned == NULL)
            return NULL;
        if (returned != Py_NotImplemented)
            return returned;
        Py_DECREF(returned);
    }
    return not_implemented();
}

static int is_configured(const module_state *state) {
    if (state->plan == NULL)
        PyErr_SetString(PyExc_RuntimeError, "configure() has to be called first");
    return state->plan != NULL;
}

static PyObject *repeat(PyObject *module, PyObject *args) {
    const module_state *state = PyModule_GetState(module);
    if (!is_configured(state))
        return NULL;
    PyObject *grad_mode = PyObject_CallObject(state->states[0], NULL);
    const int watched = grad_mode == NULL ? -1 : is_watched(state, grad_mode);
    PyObject *calls = watched == 0 ? find_calls(state, args, grad_mode) : NULL;
    Py_XDECREF(grad_mode);
    if (calls == NULL)
        return PyErr_Occurred() ? NULL : not_implemented();
    PyObject *returned = try_calls(state, calls, PyTuple_GetItem(args, 2));
    Py_DECREF(calls);
    return returned;
}

/* The tuple of what autograd saves, of the arguments (ctx, owner, *given) and the outputs. */
static PyObject *pick_kept(const call *self, PyObject *args, PyObject *outputs) {
    const Py_ssize_t count = PyTuple_Size(self->kept);
    PyObject *kept = PyTuple_New(count);
    Py_ssize_t index = 0;
    while (kept != NULL && index < count) {
        const Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GetItem(self->kept, index));
        PyObject *tensor = at < self->input_count
                               ? PyTuple_GetItem(args, 2 + at)
                               : PyTuple_GetItem(outputs, at - self->input_count);
        if (tensor != NULL)
            put(kept, &index, tensor);
        else
            Py_CLEAR(kept);
    }
    return kept;
}

/* What ctx.save_for_backward(), set_materialize_grads(False) and mark_non_differentiable() note. */
static int note(const module_state *state, const call *self, PyObject *args, PyObject *outputs) {
    PyObject *ctx = PyTuple_GetItem(args, 0), *kept = pick_kept(self, args, outputs);
    int failed = kept == NULL || PyObject_SetAttr(ctx, state->names[TO_SAVE], kept) < 0 ||
                 PyObject_SetAttr(ctx, state->names[MATERIALIZE_GRADS], Py_False) < 0 ||
                 PyObject_SetAttr(ctx, state->names[CALL], PyTuple_GetItem(args, 1)) < 0;
    Py_XDECREF(kept);
    if (!failed && self->return_count > 2) { /* only the first two have gradients, out and lse */
        PyObject *others = PyTuple_GetSlice(outputs, 2, self->return_count);
        failed =
            others == NULL || PyObject_SetAttr(ctx, state->names[NON_DIFFERENTIABLE], others) < 0;
        Py_XDECREF(others);
    }
    return failed ? -1 : 0;
}

static PyObject *record(PyObject *module, PyObject *args) {
    const module_state *state = PyModule_GetState(module);
    if (PyTuple_Size(args) < 2) {
        PyErr_SetString(PyExc_TypeError, "record: wants a context and a direct call");
        return NULL;
    }
    call *self = find_native(state, PyTuple_GetItem(args, 1));
    if (self == NULL)
        return NULL;
    PyObject *given = PyTuple_GetSlice(args, 2, 2 + self->input_count);
    uint64_t addresses[INPUTS_MAX];
    PyObject *outputs = NULL, *returned = NULL;
    if (given != NULL && find_addresses(self, given, addresses) == 0)
        outputs = run(self, addresses);
    if (outputs != NULL && note(state, self, args, outputs) == 0)
        returned = unpack(self, outputs);
    else
        Py_XDECREF(outputs);
    Py_XDECREF(given);
    Py_DECREF(self);
    return returned;
}

static int take_functions(PyObject *tuple, PyObject **functions, Py_ssize_t most,
                          Py_ssize_t *count) {
    *count = PyTuple_Size(tuple);
    if (*count < 1 || *count > most) {
        PyErr_SetString(PyExc_ValueError, "functions: are none or too many");
        return -1;
    }
    for (Py_ssize_t index = 0; index < *count; index++)
        functions[index] = PyTuple_GetItem(tuple, index);
    return 0;
}

static PyObject *configure(PyObject *module, PyObject *args) {
    module_state *state = PyModule_GetState(module);
    PyObject *watchers, *states;
    if (state->plan != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "configure: was called before");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!OO!O!", &PyTuple_Type, &watchers, &state->hooks, &PyTuple_Type,
                          &states, &PyDict_Type, &state->forward_ad) ||
        take_functions(watchers, state->watchers, WATCHERS_MAX, &state->watcher_count) < 0 ||
        take_functions(states, state->states, STATES_MAX, &state->state_count) < 0)
        return NULL;
    Py_INCREF(args);
    state->plan = args;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"configure", configure, METH_VARARGS,
     "configure(watchers, hooks, states, forward_ad): give the module PyTorch's functions."},
    {"repeat", repeat, METH_VARARGS,
     "repeat(known, head, arguments, count, tunings): repeat() of _direct.py, whose calls `known` "
     "has by their keys."},
    {"record", record, METH_VARARGS,
     "record(ctx, call, *given): Recorded.forward() of autograd.py."},
    {NULL, NULL, 0, NULL},
};

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

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "flash_dmattn._native",
    .m_doc = "Direct calls that are made again.",
    .m_size = sizeof(module_state),
    .m_methods = functions,
};

__attribute__((visibility("default"))) PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    module_state *state = PyModule_GetState(module);
    int failed = PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) < 0;
    for (int index = 0; index < NAME_COUNT && !failed; index++) {
        state->names[index] = PyUnicode_InternFromString(name_texts[index]);
        failed = state->names[index] == NULL;
    }
    PyObject *type = failed ? NULL : PyType_FromSpec(&call_spec);
    state->call_type = (PyTypeObject *)type;
    if (type != NULL) {
        Py_INCREF(type); /* for the module, beside that of its state */
        failed = PyModule_AddObject(module, "Call", type) < 0;
    }
    if (type == NULL || failed)
        Py_CLEAR(module);
    return module;
}
