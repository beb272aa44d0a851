/* flash_dmattn._native: direct calls that are made again, in C.
 *
 * python/flash_dmattn/_direct.py says what a direct call is, makes the first one of each layout and
 * can make the others too; this module takes a fraction of the time for them. It knows nothing of
 * PyTorch but the Python functions that it is given, and of libfdma only addresses: those of the
 * function and of the words of its argument struct that change from call to call. It is built
 * against the stable ABI of Python 3.8. */
#include "call.h"

enum {
    INTERFACE = 1, /* of _extension.py: what Python and C expect of each other */
    WATCHERS_MAX = 8,
    STATES_MAX = 8,
    CODE_BITS = 2,
    ARGUMENTS_MAX = 64 / CODE_BITS,
};

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

/* Tells equal arguments of different meaning apart, such as 1, 1.0 and True, and a tensor, whose
 * type and layout a guard looks at, from None. -1 for an option of a type that no key has. */
static int code_of(PyObject *argument, int is_tensor) {
    const PyTypeObject *type = Py_TYPE(argument);
    if (is_tensor)
        return argument != Py_None;
    if (argument == Py_None || type == &PyBool_Type || type == &PyUnicode_Type)
        return 0;
    return type == &PyLong_Type ? 1 : type == &PyFloat_Type ? 2 : -1;
}

/* Fill a key from item `at` on with the states and `tunings`. */
static int put_states(const module_state *state, PyObject *key, Py_ssize_t at, PyObject *grad_mode,
                      PyObject *tunings) {
    put(key, &at, grad_mode);
    for (Py_ssize_t index = 1; index < state->state_count; index++) {
        PyObject *value = PyObject_CallObject(state->states[index], NULL);
        if (value == NULL)
            return -1;
        PyTuple_SetItem(key, at++, value);
    }
    put(key, &at, tunings);
    return 0;
}

/* What makes a key: see make_key() of _direct.py. */
typedef struct key_parts {
    PyObject *head, *arguments, *tunings;
    Py_ssize_t tensors;
} key_parts;

/* A key: the head, the codes of all arguments, options and states. NULL without an exception if
 * there is none for such arguments. */
static PyObject *build_key(const module_state *state, const key_parts *parts, PyObject *grad_mode) {
    const Py_ssize_t count = PyTuple_Size(parts->arguments), options = count - parts->tensors;
    if (parts->tensors < 0 || options < 0 || count > ARGUMENTS_MAX)
        return NULL;
    uint64_t codes = 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        const int code = code_of(PyTuple_GetItem(parts->arguments, index), index < parts->tensors);
        if (code < 0)
            return NULL;
        codes = codes << CODE_BITS | (uint64_t)code;
    }
    PyObject *key = PyTuple_New(2 + options + state->state_count + 1);
    PyObject *number = PyLong_FromUnsignedLongLong(codes);
    if (key != NULL && number != NULL) {
        Py_ssize_t at = 0;
        put(key, &at, parts->head);
        put(key, &at, number);
        for (Py_ssize_t index = parts->tensors; index < count; index++)
            put(key, &at, PyTuple_GetItem(parts->arguments, index));
        if (put_states(state, key, at, grad_mode, parts->tunings) < 0)
            Py_CLEAR(key);
    } else {
        Py_CLEAR(key);
    }
    Py_XDECREF(number);
    return key;
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
    uint64_t addresses[TENSORS_MAX];
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

/* The list of calls that a key has in `known`; NULL if there is none, perhaps without an exception. */
static PyObject *find_calls(PyObject *known, PyObject *owned_key) {
    PyObject *calls = owned_key == NULL ? NULL : PyDict_GetItemWithError(known, owned_key);
    Py_XINCREF(calls);
    Py_XDECREF(owned_key);
    return calls;
}

static PyObject *repeat(PyObject *module, PyObject *args) {
    const module_state *state = PyModule_GetState(module);
    key_parts parts;
    PyObject *known;
    if (!is_configured(state) ||
        !PyArg_ParseTuple(args, "OOO!nO", &known, &parts.head, &PyTuple_Type, &parts.arguments,
                          &parts.tensors, &parts.tunings))
        return NULL;
    PyObject *grad_mode = PyObject_CallObject(state->states[0], NULL);
    const int watched = grad_mode == NULL ? -1 : is_watched(state, grad_mode);
    PyObject *key = watched == 0 ? build_key(state, &parts, grad_mode) : NULL;
    Py_XDECREF(grad_mode);
    PyObject *calls = find_calls(known, key);
    if (calls == NULL)
        return PyErr_Occurred() ? NULL : not_implemented();
    PyObject *returned = try_calls(state, calls, parts.arguments);
    Py_DECREF(calls);
    return returned;
}

static PyObject *make_key(PyObject *module, PyObject *args) {
    const module_state *state = PyModule_GetState(module);
    key_parts parts;
    if (!is_configured(state) ||
        !PyArg_ParseTuple(args, "OO!nO", &parts.head, &PyTuple_Type, &parts.arguments,
                          &parts.tensors, &parts.tunings))
        return NULL;
    PyObject *grad_mode = PyObject_CallObject(state->states[0], NULL);
    PyObject *key = grad_mode == NULL ? NULL : build_key(state, &parts, grad_mode);
    Py_XDECREF(grad_mode);
    if (key == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return key;
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
    uint64_t addresses[TENSORS_MAX];
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
    {"make_key", make_key, METH_VARARGS,
     "make_key(head, arguments, count, tunings): make_key() of _direct.py, of another form; None "
     "for arguments without one."},
    {"record", record, METH_VARARGS,
     "record(ctx, call, *given): Recorded.forward() of autograd.py."},
    {NULL, NULL, 0, NULL},
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
    PyObject *type = failed ? NULL : make_call_type();
    state->call_type = (PyTypeObject *)type;
    if (type != NULL) {
        Py_INCREF(type); /* for the module, beside that of its state */
        failed = PyModule_AddObject(module, "Call", type) < 0;
    }
    if (type == NULL || failed)
        Py_CLEAR(module);
    return module;
}
