/* Attention of the domain "fdma": fdma_attention(). */
#include "ort/ort.h"

enum { DT_BIAS = ORT_SHARED_INPUTS, KEY_VALID, SINK_LOGIT };

OrtStatus *fdma_ort_attention(const ort_call *call) {
    const fdma_tensor *const inputs = call->inputs;
    const ort_attributes *const attributes = &call->attributes;
    fdma_attention_args args = {
        .size = sizeof args,
        .q = inputs[ORT_Q],
        .k = inputs[ORT_K],
        .v = inputs[ORT_V],
        .dt_proj = inputs[ORT_DT_PROJ],
        .a = inputs[ORT_A],
        .dt_bias = inputs[DT_BIAS],
        .key_valid = inputs[KEY_VALID],
        .sink_logit = inputs[SINK_LOGIT],
        .out = inputs[ORT_Q], // its shape and dtype
        .window = attributes->window,
        .recent = attributes->recent,
        .sinks = attributes->sinks,
        .scope = attributes->scope,
        .bias_form = attributes->bias_form,
        .scale = attributes->scale,
        .softcap = attributes->softcap,
        .causal = attributes->causal != 0,
    };
    args.out.data = NULL;
    ORT_TRY(fdma_ort_status(call->api, fdma_attention_workspace(&args, &args.exec.workspace_size)));
    ORT_TRY(fdma_ort_allocate_output(call, 0, &args.q, &args.out.data));
    ort_scratch scratch;
    ORT_TRY(fdma_ort_take_scratch(call, args.exec.workspace_size, &scratch));
    args.exec.workspace = scratch.memory;
    return fdma_ort_free_scratch(call, &scratch, fdma_ort_status(call->api, fdma_attention(&args)));
}
