"""The operators flash_dmattn::*, each declared once, by a schema.

Everything else follows from the names in the schema: the tensors and options, the fields of the C
struct, the results, the fake kernel, and (in autograd.py) the gradients. _arguments.py has the
shape, the dtype and the field of the C struct for each name. fdma.h says what the arguments mean,
and which are refused.

Schemas list the tensors first, then the options, then `backend`. Tensor(a!) is a tensor that the
call writes to. An option that is not in the argument struct of the C function belongs to the
selection (`window`, `recent`, `sinks`, `scope`), is kept for the backward operator
(`deterministic`) or says how a result is made (`dim`, `wide`).

torch.compile keeps graphs on disk by the names and arguments of their operators, not by their
results. So an operator that returns other results than before gets another name.

A differentiable operator is registered twice: `name_no_grad` is the C call alone, and `name` adds
its gradient as a kernel of the Autograd key. torch.library.custom_op would do both at once, but its
autograd takes longer than a small call itself: it reads the schema anew for every argument.
"""

from __future__ import annotations

import re
from typing import Any, Callable

import torch

from . import _arguments, _call, _repeat, _types
from ._arguments import NO_TANGENTS, check_same_device
from ._call import Operation, make_mask_lists, unpack
from ._library import backend_for

# The operators of this copy of the package: one that is loaded under another name has its own.
NAMESPACE = __name__.rpartition(".")[0].replace(".", "_")
LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")
REGISTERED = getattr(torch.ops, NAMESPACE)


class Operator:
    """An operator of torch.library over one function of the C library: op(*arguments).

    `special` has fields of its Operation that are not in the schema: `cleared` and `fixed`."""

    is_one_call = True  # of the C function, with results of known sizes

    def __init__(self, schema: str, function: str, **special: tuple[Any, ...]) -> None:
        name, _, signature = schema.partition("(")
        inputs, _, results = signature.partition(") -> ")
        pairs = [argument.split(" ") for argument in inputs.split(", ")]
        names = [argument for _, argument in pairs]
        count = sum(kind.startswith("Tensor") for kind, _ in pairs)
        assert names[-1] == "backend", schema
        assert all(kind.startswith("Tensor") for kind, _ in pairs[:count]), schema
        self.schema = schema
        self.count = count  # number of tensors, which come first
        self.arguments = tuple(names)
        self.kinds = _types.kinds_in_schema(pairs)
        self.operation = Operation(
            name=name,
            function=function,
            tensors=tuple(names[:count]),
            options=tuple(names[count:-1]),
            results=tuple(re.findall(r"Tensor (\w+)", results)),
            mutated=tuple(name for kind, name in pairs if kind.endswith("!)")),
            **special,
        )
        self.key_at = names.index("key") if "key" in names else 0  # has the number of keys
        self.op = self.register("")
        self.transformed: Any = None
        # Set by autograd.py if the operator has a gradient: plans the record of a direct call.
        self.plan_record: Callable[..., Any] | None = None

    @property
    def name(self) -> str:
        return self.operation.name

    def register(self, suffix: str) -> Callable[..., Any]:
        """Register the operator under its name plus `suffix`, with kernels that make the C call."""
        name = self.name + suffix
        LIBRARY.define(self.schema.replace(self.name, name, 1), tags=torch.Tag.pt2_compliant_tag)
        op = getattr(REGISTERED, name).default
        _repeat.bypass_dispatcher(self, op)
        for device in _arguments.DEVICES:
            LIBRARY.impl(name, self.run, device.upper())
        torch.library.register_fake(f"{NAMESPACE}::{name}", self.fake, lib=LIBRARY)
        return op

    def differentiate(
        self, setup_context: Callable[..., None], backward: Callable[..., Any]
    ) -> None:
        """Register the gradient: `setup_context` and `backward` of torch.autograd.Function."""
        count = self.count
        call_alone = self.register("_no_grad")

        def forward(ctx: Any, *inputs: Any) -> Any:
            output = call_alone(*inputs)
            setup_context(ctx, inputs, output)
            return output

        members: dict[str, Any] = {
            "forward": staticmethod(forward),
            "backward": staticmethod(backward),
        }
        function: Any = type(f"{self.name}_function", (torch.autograd.Function,), members)

        def kernel(*inputs: Any) -> Any:
            if torch.is_grad_enabled():
                for tensor in inputs[:count]:
                    if tensor is not None and tensor.requires_grad:
                        return function.apply(*inputs)
            return call_alone(*inputs)

        def refuse_tangents(ctx: Any, *tangents: Any) -> None:
            raise NotImplementedError(NO_TANGENTS.format(self.name))

        LIBRARY.impl(self.name, kernel, "Autograd")
        members = {
            "forward": staticmethod(call_alone),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
            "jvp": staticmethod(refuse_tangents),
            "generate_vmap_rule": True,
        }
        self.transformed = type(f"{self.name}_transformed", (torch.autograd.Function,), members)

    def __call__(self, *arguments: Any) -> Any:
        """Make the call. In eager mode it avoids the dispatcher."""
        if not torch.compiler.is_compiling():
            results = _repeat.repeat(self, arguments, self.count)
            if results is NotImplemented:
                self.check_types(arguments)
                known = (self, arguments, self.count)
                results = _repeat.begin(self, arguments, len(self.operation.results), known)
            if results is not NotImplemented:
                return results
        return self.dispatch(*arguments)

    def check_types(self, arguments: tuple[Any, ...]) -> None:
        """Check the types of arguments that no earlier call has checked.

        Raises:
            TypeError: an argument has another type than in the schema.
            ValueError: an int does not fit int64.
            NotImplementedError: a tensor is sparse or nested.
        """
        for (name, kind), value in zip(self.kinds, arguments):
            if name in _arguments.CHOICES:
                _arguments.choose(name, value)
            elif kind.types == (int,):
                _arguments.check_int(self.shown(name), value)
            elif type(value) not in kind.types and not kind.fits(value):
                raise _types.refusal(self.shown(name), value, kind.wanted)
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and (value.layout is not torch.strided or value.is_nested):
                is_strided = value.layout is torch.strided
                layout = "nested" if is_strided else str(value.layout).replace("torch.", "")
                message = f"{self.shown(name)}: layout is {layout}, want a dense tensor"
                raise NotImplementedError(message)

    def shown(self, name: str) -> str:
        """The name of an argument in messages. Rules come with a selection or a cache."""
        if name in ("window", "recent", "sinks"):
            for given, owner in (("expiry", "selection"), ("cache_key", "cache")):
                if given in self.arguments:
                    return f"{owner}.{name}"
        return _arguments.SHOWN.get(name, name)

    def dispatch(self, *arguments: Any) -> Any:
        """Call the operator. Under a transform of torch.func, such as grad(), call a Function that
        the transform can see into; its apply() takes longer."""
        if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
            return self.op(*arguments)
        return (
            self.op(*arguments) if self.transformed is None else self.transformed.apply(*arguments)
        )

    def refuse_gradients(self, message: str) -> None:
        """Give the operator a backward that only raises, so that it runs in grad mode too."""

        def refuse(ctx: Any, *gradients: Any) -> None:
            raise NotImplementedError(message)

        self.differentiate(lambda ctx, inputs, output: None, refuse)

    def settle(self, *arguments: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], str | None]:
        """Tensors, options and the backend for the C call."""
        count = self.count
        return arguments[:count], arguments[count:-1], arguments[-1]

    def run(self, *arguments: Any) -> Any:
        """The kernel: makes one C call."""
        return _call.call(self, arguments)

    def fake(self, *arguments: Any) -> Any:
        """The fake kernel: allocates the results."""
        if _call.memory.workspaces is not None:
            _call.memory.workspaces.ask(self.operation, *self.settle(*arguments))
        given = dict(zip(self.arguments, arguments))
        tensors = {name: given[name] for name in self.operation.tensors}
        check_same_device(tensors)
        sizes = _arguments.bind_sizes(tensors)
        results = []
        for name in self.operation.results:
            shape, dtype = _arguments.result_like(name, tensors, sizes, given)
            results.append(arguments[0].new_empty(shape, dtype=dtype))
        return unpack(tuple(results))


class BackwardOperator(Operator):
    """The gradients of another operator. It is not differentiable itself."""

    def __init__(
        self,
        schema: str,
        function: str,
        forward: Operator,
        *steps: str,
        **special: tuple[Any, ...],
    ) -> None:
        super().__init__(schema, function, **special)
        self.steps = steps  # operations of the C call that must have a kernel named `backend`
        options = self.operation.options
        self.deterministic = options.index("deterministic") if "deterministic" in options else None
        # The backward runs in grad mode under create_graph=True.
        self.refuse_gradients(
            f"flash_dmattn.{forward.name}: second derivatives are not implemented"
        )

    def settle(self, *arguments: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], str | None]:
        tensors, options, backend = super().settle(*arguments)
        if self.deterministic is not None and torch.are_deterministic_algorithms_enabled():
            # Read here, not when a graph is traced, so that compiled graphs follow the switch.
            at = self.deterministic
            options = (*options[:at], True, *options[at + 1 :])
        return tensors, options, backend_for(backend, *self.steps)


class MaskListsOperator(Operator):
    """The lists of a mask. The C library computes their size in bytes."""

    is_one_call = False

    def run(self, *arguments: Any) -> torch.Tensor:
        count = self.count
        given = dict(zip(self.operation.tensors, arguments))
        given["value"] = given["key"]  # not read
        options = dict(zip(self.operation.options, arguments[count:-1]))
        return make_mask_lists(ATTENTION.operation, given, options, arguments[-1])

    def fake(self, *arguments: Any) -> torch.Tensor:
        on_cpu = arguments[0].device.type == "cpu"
        size = 0 if on_cpu else torch.library.get_ctx().new_dynamic_size()
        return arguments[0].new_empty((size,), dtype=torch.uint8)


class ProbabilitiesOperator(Operator):
    """The probabilities of a finished attention. Its kernel may have a name that no kernel of
    probabilities has."""

    def settle(self, *arguments: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], str | None]:
        return super().settle(*arguments[:-1], backend_for(arguments[-1], "probabilities"))

    def without_gradients(self, *arguments: Any) -> torch.Tensor:
        return self.op(*(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments))


SCORE = Operator(
    "score(Tensor value, Tensor dt_proj, Tensor a_coef, Tensor? dt_bias, "
    "Tensor? key_valid, Tensor? kv_used, str bias_form, str? backend) "
    "-> (Tensor score, Tensor bias)",
    "score",
)
SELECT = Operator(
    "select(Tensor score, Tensor? key_valid, Tensor? starts, Tensor? kv_used, "
    "SymInt window, SymInt recent, "
    "SymInt sinks, str scope, float gap, str? backend) -> (Tensor expiry, Tensor slot)",
    "select",
)
# Dense if expiry is None.
ATTENTION = Operator(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? key_valid, "
    "Tensor? starts, Tensor? kv_used, Tensor? sink_logit, Tensor? rng_state, "
    "Tensor? attn_mask, Tensor? attn_bias, Tensor? mask_lists, "
    "Tensor? expiry, Tensor? slot, SymInt window, SymInt recent, SymInt sinks, "
    "str scope, bool causal, float softmax_scale, float softcap, float dropout_p, "
    "bool deterministic, "
    "str? backend) -> (Tensor out, Tensor lse)",
    "forward",
)
# The same with carried keys, in causal scope: see "Streams" in fdma.h.
SELECT_CARRIED = Operator(
    "select_carried(Tensor score, Tensor? key_valid, Tensor score_in, Tensor position_in, "
    "Tensor seen_in, SymInt window, SymInt recent, SymInt sinks, str scope, str? backend) "
    "-> (Tensor expiry_all, Tensor slot_all)",
    "select",
)
CARRIED_ATTENTION = Operator(
    "carried_attention(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor key_carried, "
    "Tensor value_carried, Tensor? bias_carried, Tensor? sink_logit, Tensor expiry_all, "
    "Tensor slot_all, SymInt window, SymInt recent, SymInt sinks, str scope, bool causal, "
    "float softmax_scale, float softcap, bool deterministic, str? backend) "
    "-> (Tensor out, Tensor lse)",
    "forward",
)
FUSED_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor dt_proj, Tensor a_coef, Tensor? dt_bias, "
    "Tensor? key_valid, Tensor? starts, Tensor? kv_used, Tensor? sink_logit, Tensor? rng_state, "
    "SymInt keep_window_size, SymInt recent, SymInt sinks, str scope, str bias_form, bool causal, "
    "float softmax_scale, float softcap, float dropout_p, float gap"
)
FUSED = Operator(
    f"flash_dma_attention({FUSED_INPUTS}, bool deterministic, str? backend) "
    "-> (Tensor out, Tensor lse, Tensor score, Tensor bias, Tensor expiry, Tensor slot)",
    "attention",
)
# For calls that need neither gradients nor lse: it returns out alone, and the other results stay in
# the workspace.
FUSED_OUT = Operator(f"flash_dma_output({FUSED_INPUTS}, str? backend) -> Tensor out", "attention")
MASK_LISTS = MaskListsOperator(
    "mask_lists(Tensor query, Tensor key, Tensor? key_valid, Tensor? starts, Tensor? kv_used, "
    "Tensor attn_mask, Tensor? expiry, Tensor? slot, SymInt window, SymInt recent, SymInt sinks, "
    "str scope, bool causal, str? backend) -> Tensor mask_lists",
    "forward",
)
PROBABILITIES = ProbabilitiesOperator(
    "probabilities(Tensor query, Tensor key, Tensor? bias, Tensor? key_valid, Tensor? starts, "
    "Tensor? kv_used, Tensor? rng_state, Tensor? attn_mask, Tensor? attn_bias, "
    "Tensor? expiry, Tensor? slot, Tensor lse, SymInt window, SymInt recent, "
    "SymInt sinks, str scope, bool causal, float softmax_scale, float softcap, "
    "float dropout_p, str? backend) "
    "-> Tensor probability",
    "probabilities",
)
MERGE = Operator(
    "merge(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, str? backend) "
    "-> (Tensor out, Tensor lse)",
    "merge",
)
SCORE_BACKWARD = BackwardOperator(
    "score_backward(Tensor dbias, Tensor value, Tensor dt_proj, Tensor a_coef, Tensor? dt_bias, "
    "Tensor? key_valid, Tensor? kv_used, str bias_form, str? backend) -> (Tensor dvalue, "
    "Tensor ddt_proj, Tensor da_coef, Tensor ddt_bias)",
    "score_backward",
    SCORE,
    "score_backward",
    cleared=("dvalue",),
)
# The same, added to a given dvalue.
SCORE_BACKWARD_ADDED = BackwardOperator(
    "score_backward_added(Tensor dbias, Tensor value, Tensor dt_proj, Tensor a_coef, "
    "Tensor? dt_bias, Tensor? key_valid, Tensor? kv_used, Tensor(a!) dvalue, str bias_form, "
    "str? backend) -> (Tensor ddt_proj, Tensor da_coef, Tensor ddt_bias)",
    "score_backward",
    SCORE,
    "score_backward",
)
ATTENTION_BACKWARD = BackwardOperator(
    "attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor query, "
    "Tensor key, Tensor value, Tensor? bias, Tensor? key_valid, Tensor? starts, Tensor? kv_used, "
    "Tensor? sink_logit, Tensor? rng_state, Tensor? attn_mask, Tensor? attn_bias, "
    "Tensor? mask_lists, Tensor? expiry, "
    "Tensor? slot, SymInt window, SymInt recent, SymInt sinks, str scope, bool causal, "
    "float softmax_scale, float softcap, float dropout_p, bool deterministic, "
    "bool wants_dbias, bool wants_dattn_bias, str? backend) "
    "-> (Tensor dquery, Tensor dkey, Tensor dvalue, "
    "Tensor dbias, Tensor dsink_logit, Tensor dattn_bias)",
    "backward",
    ATTENTION,
    "backward",
)
CARRIED_ATTENTION_BACKWARD = BackwardOperator(
    "carried_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor query, "
    "Tensor key, Tensor value, Tensor? bias, Tensor key_carried, Tensor value_carried, "
    "Tensor? bias_carried, Tensor? sink_logit, Tensor expiry_all, Tensor slot_all, "
    "SymInt window, SymInt recent, SymInt sinks, str scope, bool causal, float softmax_scale, "
    "float softcap, bool deterministic, bool wants_dbias, bool wants_dbias_carried, "
    "str? backend) -> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor dbias, "
    "Tensor dkey_carried, Tensor dvalue_carried, Tensor dbias_carried, Tensor dsink_logit)",
    "backward",
    CARRIED_ATTENTION,
    "backward",
)
FUSED_BACKWARD = BackwardOperator(
    "flash_dma_attention_backward(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, "
    "Tensor query, Tensor key, Tensor value, Tensor dt_proj, Tensor a_coef, Tensor? dt_bias, "
    "Tensor? bias, Tensor? key_valid, Tensor? starts, Tensor? kv_used, Tensor? sink_logit, "
    "Tensor? rng_state, "
    "Tensor expiry, Tensor slot, "
    "SymInt keep_window_size, SymInt recent, SymInt sinks, str scope, str bias_form, "
    "bool causal, float softmax_scale, float softcap, float dropout_p, bool deterministic, "
    "str? backend) "
    "-> (Tensor dquery, Tensor dkey, Tensor dvalue, Tensor ddt_proj, Tensor da_coef, "
    "Tensor ddt_bias, Tensor dsink_logit)",
    "attention_backward",
    FUSED,
    "backward",
    "score_backward",
)
MERGE_BACKWARD = BackwardOperator(
    "merge_backward(Tensor dout, Tensor? dlse, Tensor out_a, Tensor lse_a, Tensor out_b, "
    "Tensor lse_b, str? backend) -> (Tensor dout_a, Tensor dlse_a, Tensor dout_b, Tensor dlse_b)",
    "merge_backward",
    MERGE,
    "merge_backward",
)
DECODE = Operator(
    "decode(Tensor query, Tensor key, Tensor value, Tensor? dt_proj, Tensor? a_coef, "
    "Tensor? dt_bias, Tensor? score, Tensor? index, Tensor? n_tokens, Tensor? commit, "
    "Tensor? sink_logit, "
    "Tensor(a!) cache_key, Tensor(b!) cache_value, Tensor(c!) cache_bias, Tensor(d!) cache_score, "
    "Tensor(e!) cache_position, Tensor(f!) cache_seen, Tensor? cache_page_table, SymInt window, "
    "SymInt recent, SymInt sinks, bool batch_invariant, str bias_form, float softmax_scale, "
    "float softcap, str? backend) -> (Tensor out, Tensor lse)",
    "decode",
)
# The keys of a stream's next piece; without carried keys, of its first piece.
PREFILL = Operator(
    "prefill(Tensor query, Tensor key, Tensor value, Tensor dt_proj, Tensor a_coef, "
    "Tensor? dt_bias, Tensor? key_valid, Tensor? sink_logit, Tensor? score_in, "
    "Tensor? position_in, Tensor? seen_in, Tensor? key_carried, Tensor? value_carried, "
    "Tensor? bias_carried, SymInt window, SymInt recent, SymInt sinks, str bias_form, "
    "float softmax_scale, float softcap, str? backend) -> (Tensor out, Tensor score, "
    "Tensor expiry_all, Tensor slot_all)",
    "attention",
    fixed=(("causal", True),),
)
CACHE_STORE = Operator(
    "cache_store(Tensor key, Tensor value, Tensor score, Tensor? index, Tensor expiry_all, "
    "Tensor slot_all, Tensor(a!) cache_key, Tensor(b!) cache_value, Tensor(c!) cache_bias, "
    "Tensor(d!) cache_score, Tensor(e!) cache_position, Tensor(f!) cache_seen, "
    "Tensor? cache_page_table, SymInt window, SymInt recent, SymInt sinks, str bias_form, "
    "str? backend) -> ()",
    "cache_store",
    fixed=(("scope", "causal"),),  # of the selection: a cache has only this scope
)
CACHE_COPY = Operator(
    "cache_copy(Tensor(a!) cache_key, Tensor(b!) cache_value, Tensor(c!) cache_bias, "
    "Tensor(d!) cache_score, Tensor(e!) cache_position, Tensor(f!) cache_seen, "
    "Tensor? cache_page_table, Tensor copy_from, Tensor copy_to, SymInt window, SymInt recent, "
    "SymInt sinks, str? backend) -> ()",
    "cache_copy",
)
ROTARY_TABLE = Operator(
    "rotary_table(Tensor row_positions, Tensor? inv_freq, SymInt dim, float base, float factor, "
    "bool wide, str? backend) -> Tensor rotary",
    "rotary_table",
)
ROTATE = Operator(
    "rotate(Tensor x, Tensor? weight, Tensor rotary, Tensor? positions, Tensor? starts, float eps, "
    "SymInt first, SymInt offset, SymInt nope_heads, bool interleaved, str? backend) "
    "-> Tensor rotated",
    "rotate",
)
ROTATE_BACKWARD = BackwardOperator(
    "rotate_backward(Tensor drotated, Tensor? x, Tensor? weight, Tensor rotary, "
    "Tensor? positions, Tensor? starts, float eps, SymInt first, SymInt offset, "
    "SymInt nope_heads, bool interleaved, bool wants_dweight, str? backend) "
    "-> (Tensor dx, Tensor dweight)",
    "rotate_backward",
    ROTATE,
    "rotate_backward",
)
for _operator in (DECODE, PREFILL, CACHE_STORE, CACHE_COPY):
    _operator.refuse_gradients(
        f"flash_dmattn: {_operator.name} has no gradient, call it within torch.no_grad()"
    )

from . import autograd  # noqa: E402, F401 (registers the gradients)
