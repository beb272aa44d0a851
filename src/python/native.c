/* flash_dmattn._native: makes direct calls.
 *
 * python/flash_dmattn/_repeat.py explains direct calls, and plans one for each layout. This module
 * finds the planned calls, and makes them. It knows nothing of PyTorch except the Python functions
 * that it is given, and of libfdma only two kinds of addresses: the function, and the words of its
 * argument struct that change from call to call. It is built against the stable ABI of Python
 * 3.8. */
#include "call.h"

enum {
    INTERFACE = 7, /* version of the interface with _repeat.py */
    WATCHERS = 3,
    STATES = 3,
    KEY_ITEMS = 3 + STATES,
    CODE_BITS = 2,
    ARGUMENTS_MAX = 64 / CODE_BITS,
};

enum {
    LEVEL,
    NATIVE,
    TO_SAVE,
    MATERIALIZE_GRADS,
    NON_DIFFERENTIABLE,
    CALL,
    MEMORY,
    DIRECT,
    SHAPE,
    NAME_COUNT,
};
static const char *const name_texts[NAME_COUNT] = {
    [LEVEL] = "_current_level", /* in torch.autograd.forward_ad */
    [NATIVE] = "native",        /* in a DirectCall */
    [TO_SAVE] = "to_save",      /* in the context of a Function, as the next three */
    [MATERIALIZE_GRADS] = "materialize_grads",
    [NON_DIFFERENTIABLE] = "non_differentiable",
    [CALL] = "call",
    [MEMORY] = "memory", /* in _call.py: the Memory of a thread */
    [DIRECT] = "direct", /* in a Memory: lists of DirectCalls by their keys */
    [SHAPE] = "shape",   /* of a tensor */
};

/* Objects are borrowed from `plan`, except the type and the names. */
typedef struct module_state {
    PyObject *plan; /* the arguments of configure(), NULL before it */
    PyTypeObject *call_type;
    PyObject *names[NAME_COUNT];  /* names of attributes */
    PyObject *watchers[WATCHERS]; /* functions: true where something watches operators */
    PyObject *hooks;              /* function: the hooks for saved tensors, or None */
    PyObject *states[STATES];     /* functions: parts of a key */
    PyObject *forward_ad, *calls; /* dicts of torch.autograd.forward_ad and _call.py */
    PyObject *tensor_type, *parameter_type;
} module_state;

/* ---- what calls depend on beside the layouts of tensors ---- */

/* Returns 1 if something needs the dispatcher that no guard notices: a mode, the profiler, or
 * forward mode, in which tensors have tangents. Hooks for saved tensors are left to apply().
 * Returns 0 if not, or -1 with an exception. */
static int find_watcher(const module_state *state) {
    for (int index = 0; index < WATCHERS; index++) {
        const int truth = is_true(PyObject_CallObject(state->watchers[index], NULL));
        if (truth != 0)
            return truth;
    }
    PyObject *level = PyDict_GetItemWithError(state->forward_ad, state->names[LEVEL]);
    if (level == NULL) /* the forward mode of this PyTorch is not known here */
        return PyErr_Occurred() ? -1 : 1;
    return PyLong_AsLong(level) >= 0 ? 1 : PyErr_Occurred() ? -1 : 0;
}

static int has_hooks(const module_state *state) {
    if (state->hooks == Py_None)
        return 0;
    return is_true(PyObject_CallFunctionObjArgs(state->hooks, Py_False, NULL));
}

/* Tells equal arguments of different meaning apart, such as 1, 1.0 and True, and a tensor, whose
 * type and layout a guard looks at, from None. Returns -1 for an option that is not None, bool,
 * str, int or float: calls with such an option are not remembered. */
static int code_of(PyObject *argument, int is_tensor) {
    const PyTypeObject *type = Py_TYPE(argument);
    if (is_tensor)
        return argument != Py_None;
    if (argument == Py_None || type == &PyBool_Type || type == &PyUnicode_Type)
        return 0;
    return type == &PyLong_Type ? 1 : type == &PyFloat_Type ? 2 : -1;
}

/* The codes of all arguments in one number. Returns NULL without an exception if there are too many
 * arguments or one has no code. */
static PyObject *make_codes(PyObject *arguments, Py_ssize_t tensors) {
    const Py_ssize_t count = PyTuple_Size(arguments);
    uint64_t codes = 0;
    if (count > ARGUMENTS_MAX)
        return NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        const int code = code_of(PyTuple_GetItem(arguments, index), index < tensors);
        if (code < 0)
            return NULL;
        codes = codes << CODE_BITS | (uint64_t)code;
    }
    return PyLong_FromUnsignedLongLong(codes);
}

/* The key of make_key(head, arguments, count). Returns NULL without an exception if these arguments
 * have no key, and NULL with an exception after an error. */
static PyObject *build_key(const module_state *state, PyObject *head, PyObject *arguments,
                           Py_ssize_t tensors) {
    PyObject *codes = make_codes(arguments, tensors);
    PyObject *key = codes == NULL ? NULL : PyTuple_New(KEY_ITEMS);
    if (key == NULL) {
        Py_XDECREF(codes);
        return NULL;
    }
    Py_ssize_t at = 0;
    put(key, &at, head);
    PyTuple_SetItem(key, at++, codes);
    PyTuple_SetItem(key, at++, PyTuple_GetSlice(arguments, tensors, PyTuple_Size(arguments)));
    for (int index = 0; index < STATES && !PyErr_Occurred(); index++)
        PyTuple_SetItem(key, at++, PyObject_CallObject(state->states[index], NULL));
    if (PyErr_Occurred())
        Py_CLEAR(key);
    return key;
}

/* Returns 1, or 0 with an exception. */
static int is_configured(const module_state *state) {
    if (state->plan == NULL)
        PyErr_SetString(PyExc_RuntimeError, "configure() has to be called first");
    return state->plan != NULL;
}

/* Reads (head, arguments, count). Returns 1, or 0 with an exception. */
static int parse_known(const module_state *state, PyObject *args, PyObject **head,
                       PyObject **arguments, Py_ssize_t *tensors) {
    return is_configured(state) &&
           PyArg_ParseTuple(args, "OO!n", head, &PyTuple_Type, arguments, tensors);
}

/* The list of calls that a key has in the memory of this thread. Returns NULL without an exception
 * if it has none, and NULL with an exception after an error. */
static PyObject *find_calls(const module_state *state, PyObject *key) {
    PyObject *memory = PyDict_GetItemWithError(state->calls, state->names[MEMORY]);
    PyObject *known = memory == NULL ? NULL : PyObject_GetAttr(memory, state->names[DIRECT]);
    PyObject *calls = known == NULL ? NULL : PyDict_GetItemWithError(known, key);
    Py_XINCREF(calls);
    Py_XDECREF(known);
    return calls;
}

/* ---- calls ---- */

static PyObject *not_implemented(void) {
    Py_INCREF(Py_NotImplemented);
    return Py_NotImplemented;
}

static call *find_native(const module_state *state, PyObject *owner) {
    PyObject *native = PyObject_GetAttr(owner, state->names[NATIVE]);
    if (native != NULL && Py_TYPE(native) != state->call_type) {
        PyErr_SetString(PyExc_TypeError, "native: is no Call");
        Py_CLEAR(native);
    }
    return (call *)native;
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

/* Function.apply(owner, *given), unless hooks for saved tensors want to see what is saved. */
static PyObject *apply(const module_state *state, const call *self, PyObject *owner,
                       PyObject *given) {
    const int is_hooked = has_hooks(state);
    if (is_hooked != 0)
        return is_hooked < 0 ? NULL : not_implemented();
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

/* The results of the call of `owner`; NotImplemented if the arguments do not fit it. */
static PyObject *try_call(const module_state *state, PyObject *owner, PyObject *arguments) {
    call *self = find_native(state, owner);
    PyObject *given = self == NULL ? NULL : pick_given(self, arguments), *returned = NULL;
    uint64_t addresses[TENSORS_MAX];
    const int does_fit = given == NULL ? -1 : fits(self, given, addresses);
    if (does_fit == 0)
        returned = not_implemented();
    else if (does_fit > 0 && self->apply != Py_None)
        returned = apply(state, self, owner, given);
    else if (does_fit > 0)
        returned = take_results(self, run(self, addresses));
    Py_XDECREF(given);
    Py_XDECREF(self);
    return returned;
}

static PyObject *repeat_known(const module_state *state, PyObject *head, PyObject *arguments,
                              Py_ssize_t tensors) {
    PyObject *key = build_key(state, head, arguments, tensors);
    const int watched = key == NULL ? 1 : find_watcher(state);
    PyObject *calls = watched == 0 ? find_calls(state, key) : NULL;
    PyObject *returned = PyErr_Occurred() ? NULL : not_implemented();
    for (Py_ssize_t index = 0;
         calls != NULL && returned == Py_NotImplemented && index < PyList_Size(calls); index++) {
        PyObject *owner = PyList_GetItem(calls, index);
        Py_INCREF(owner);
        Py_DECREF(returned);
        returned = try_call(state, owner, arguments);
        Py_DECREF(owner);
    }
    Py_XDECREF(calls);
    Py_XDECREF(key);
    return returned;
}

static PyObject *repeat(PyObject *module, PyObject *args) {
    const module_state *state = PyModule_GetState(module);
    PyObject *head, *arguments;
    Py_ssize_t tensors;
    if (!parse_known(state, args, &head, &arguments, &tensors))
        return NULL;
    return repeat_known(state, head, arguments, tensors);
}

/* ---- operators ---- */

/* The items of the tuple that the function of bypass() holds. */
enum { MODULE, OPERATOR, OTHERWISE, TENSORS, KEY_AT };

/* The shape of an argument; NULL without an exception if it is no plain tensor or if lengths are
 * symbols. */
static PyObject *shape_of(const module_state *state, PyObject *arguments, Py_ssize_t at) {
    PyObject *tensor = at < PyTuple_Size(arguments) ? PyTuple_GetItem(arguments, at) : NULL;
    const PyObject *type = tensor == NULL ? NULL : (PyObject *)Py_TYPE(tensor);
    if (type == NULL || (type != state->tensor_type && type != state->parameter_type))
        return NULL;
    PyObject *shape = PyObject_GetAttr(tensor, state->names[SHAPE]);
    if (shape == NULL || PyObject_Hash(shape) == -1) {
        PyErr_Clear();
        Py_CLEAR(shape);
    }
    return shape;
}

/* The head of an operator's calls: with the shapes of its first tensor and its keys, so that few
 * guards are tried if many lengths alternate. NULL without an exception if there is none. */
static PyObject *head_of(const module_state *state, PyObject *self, PyObject *arguments) {
    const Py_ssize_t key_at = PyLong_AsSsize_t(PyTuple_GetItem(self, KEY_AT));
    PyObject *first = shape_of(state, arguments, 0), *keys = NULL, *head = NULL;
    if (first != NULL)
        keys = shape_of(state, arguments, key_at);
    if (keys != NULL)
        head = PyTuple_Pack(3, PyTuple_GetItem(self, OPERATOR), first, keys);
    Py_XDECREF(first);
    Py_XDECREF(keys);
    return head;
}

static PyObject *call_operator(PyObject *self, PyObject *arguments, PyObject *keywords) {
    const module_state *state = PyModule_GetState(PyTuple_GetItem(self, MODULE));
    const int has_keywords = keywords != NULL && PyDict_Size(keywords) > 0;
    PyObject *head = has_keywords ? NULL : head_of(state, self, arguments), *returned = NULL;
    if (head != NULL) {
        const Py_ssize_t tensors = PyLong_AsSsize_t(PyTuple_GetItem(self, TENSORS));
        returned = repeat_known(state, head, arguments, tensors);
        Py_DECREF(head);
    }
    if (returned == Py_NotImplemented)
        Py_CLEAR(returned);
    if (returned == NULL && !PyErr_Occurred())
        returned = PyObject_Call(PyTuple_GetItem(self, OTHERWISE), arguments, keywords);
    return returned;
}

static PyObject *bypass(PyObject *module, PyObject *args) {
    static PyMethodDef definition = {"operator", (PyCFunction)(void (*)(void))call_operator,
                                     METH_VARARGS | METH_KEYWORDS,
                                     "Repeats a call that is remembered, or makes it otherwise."};
    PyObject *operator, *otherwise;
    Py_ssize_t tensors, key_at;
    if (!is_configured(PyModule_GetState(module)) ||
        !PyArg_ParseTuple(args, "OOnn", &operator, &otherwise, &tensors, &key_at))
        return NULL;
    PyObject *self = Py_BuildValue("(OOOnn)", module, operator, otherwise, tensors, key_at);
    PyObject *function = self == NULL ? NULL : PyCFunction_NewEx(&definition, self, NULL);
    Py_XDECREF(self);
    return function;
}

static PyObject *is_watched(PyObject *module, PyObject *none) {
    (void)none;
    const int watched = find_watcher(PyModule_GetState(module));
    return watched < 0 ? NULL : PyBool_FromLong(watched);
}

static PyObject *make_key(PyObject *module, PyObject *args) {
    const module_state *state = PyModule_GetState(module);
    PyObject *head, *arguments;
    Py_ssize_t tensors;
    if (!parse_known(state, args, &head, &arguments, &tensors))
        return NULL;
    PyObject *key = build_key(state, head, arguments, tensors);
    if (key == NULL && !PyErr_Occurred())
        Py_RETURN_NONE;
    return key;
}

/* The tuple of objects that autograd saves, from the arguments (ctx, owner, *given) and the
 * outputs. */
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

/* Sets the fields of ctx that save_for_backward(), set_materialize_grads(False) and
 * mark_non_differentiable() set, and the call. */
static int fill_context(const module_state *state, const call *self, PyObject *args,
                        PyObject *outputs) {
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
    PyObject *outputs = NULL, *returned = NULL;
    uint64_t addresses[TENSORS_MAX];
    if (given != NULL && find_addresses(self, given, addresses) == 0)
        outputs = run(self, addresses);
    if (outputs != NULL && fill_context(state, self, args, outputs) == 0)
        returned = take_results(self, outputs);
    else
        Py_XDECREF(outputs);
    Py_XDECREF(given);
    Py_DECREF(self);
    return returned;
}

static PyObject *configure(PyObject *module, PyObject *args) {
    module_state *state = PyModule_GetState(module);
    PyObject **watchers = state->watchers, **states = state->states;
    if (state->plan != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "configure: was called before");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "(OOO)O(OOO)O!O!(OO)", &watchers[0], &watchers[1], &watchers[2],
                          &state->hooks, &states[0], &states[1], &states[2], &PyDict_Type,
                          &state->forward_ad, &PyDict_Type, &state->calls, &state->tensor_type,
                          &state->parameter_type))
        return NULL;
    Py_INCREF(args);
    state->plan = args;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"configure", configure, METH_VARARGS,
     "configure(watchers, hooks, states, vars(forward_ad), vars(_call), types of tensors)"},
    {"is_watched", is_watched, METH_NOARGS,
     "Whether something needs the dispatcher that no guard notices, but for hooks."},
    {"make_key", make_key, METH_VARARGS,
     "make_key(head, arguments, count): what tells the calls of a function, `head`, apart, beside "
     "the layouts of the first `count` arguments, which are tensors or None; None for options that "
     "no call is remembered for. Options that are equal, such as 1 and True, count as different."},
    {"repeat", repeat, METH_VARARGS,
     "repeat(head, arguments, count): the results of a call that is remembered; NotImplemented if "
     "none fits, or something is_watched()."},
    {"bypass", bypass, METH_VARARGS,
     "bypass(operator, otherwise, count, key_at): a function that repeats a remembered call whose "
     "head is (operator, arguments[0].shape, arguments[key_at].shape), or calls otherwise()."},
    {"record", record, METH_VARARGS,
     "record(ctx, call, *given): the forward() of Recorded in autograd.py."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,          .m_name = "flash_dmattn._native",
    .m_doc = "Makes direct calls.", .m_size = sizeof(module_state),
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
        Py_INCREF(type); /* for the module, beside the one of its state */
        failed = PyModule_AddObject(module, "Call", type) < 0;
        if (failed)
            Py_DECREF(type);
    }
    if (type == NULL || failed)
        Py_CLEAR(module);
    return module;
}
