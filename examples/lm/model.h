/* A byte-level language model, read from a safetensors file.
 *
 *     x = embedding[byte]
 *     each layer:  x += o_proj(attention(rmsnorm(x)));  x += contract(relu(expand(rmsnorm(x)))^2)
 *     logits = head(rmsnorm(x))
 *
 * No layer has a bias. The queries and keys of attention have rotary position embeddings, except in
 * NoPE heads. fdma_score() gives the scores of keys. Tensors have the names of PyTorch's
 * state_dict:
 *
 *     embedding.weight, head.weight                   [256, width]
 *     norm.weight                                     [width]
 *     blocks.N.attention_norm.weight, .norm.weight    [width]
 *     blocks.N.attention.q_proj.weight                [q_heads * head_dim, width]
 *     blocks.N.attention.k_proj.weight, .v_proj       [kv_heads * head_dim, width]
 *     blocks.N.attention.o_proj.weight                [width, q_heads * head_dim]
 *     blocks.N.attention.q_norm.weight, .k_norm       [head_dim]
 *     blocks.N.attention.dt_proj.weight               [kv_heads, kv_heads * head_dim]
 *     blocks.N.attention.A                            [kv_heads]
 *     blocks.N.expand.weight, blocks.N.contract       [4 * width, width], [width, 4 * width]
 *
 * They are F32 or BF16; a matrix may also be I8, with its row scales, F32 [rows], in NAME.scale.
 * The metadata has, as text: layers, width, q_heads, kv_heads, head_dim, recent, sinks, bias_form
 * ("exp", "linear" or "none"), rotary_base, norm_eps, and window, which is "all" for attention to
 * all keys. Such a model has the bias_form "none", no dt_proj and no A.
 *
 * Five more entries are optional. `qk_norm` is 0 or 1. If it is 1, each head of the queries, also
 * a NoPE head, becomes rmsnorm(head) with the weight q_norm, before any rotary position embedding,
 * and each head of the keys likewise with the weight k_norm. If it is 0 or absent, queries and keys
 * are not normalized, and the file has no q_norm and no k_norm.
 *
 * `nope` has a number for each layer, as in "0 0 2 0", or is empty. It says how many kv heads, the
 * last ones, are NoPE heads, together with the query heads of their groups. Only the first
 * `nope_rotary_dim` channels of a NoPE head (0 if it is absent) have a rotary position embedding.
 * Its angles are the same as in a head whose head_dim is nope_rotary_dim.
 *
 * `nope_window` is the window of the layers that have NoPE heads, and `nope_recent` the number of
 * their newest keys; without them, these layers are as the others. Both are checked but have no
 * effect where no layer has NoPE heads, and are refused where window is "all". Neither window may
 * be less than sinks. */
#pragma once

#include "fdma.h"
#include "matrix.h"

#include <stdbool.h>
#include <stddef.h>

enum { BYTE_VALUES = 256, EXPANSION = 4 };

typedef struct layer {
    float *attention_norm, *norm; /* [width] */
    float *q_norm, *k_norm;       /* [head_dim]; NULL in a model without qk_norm */
    matrix q_proj, k_proj, v_proj, o_proj, expand, contract;
    float *dt_proj, *a; /* zeros in a model that attends to all keys */
    int64_t nope_heads; /* the number of NoPE heads among the kv heads, the last ones */
    int64_t window;     /* FDMA_WINDOW_ALL: attention to all keys, here and in all other layers */
    int64_t recent;     /* the number of newest keys */
} layer;

typedef struct model {
    int64_t layers, width, q_heads, kv_heads, head_dim;
    int64_t sinks; /* the same in every layer */
    fdma_bias_form bias_form;
    double rotary_base, norm_eps;
    bool qk_norm;            /* whether each head of queries and keys is normalized */
    int64_t nope_rotary_dim; /* channels of a NoPE head that are rotated, the first ones */
    matrix embedding, head;
    float *norm; /* [width] */
    layer *layer;
    size_t bytes; /* bytes of all weights */
} model;

/*! read_model() - reads and checks the file.
 *  Returns 0; or -1 with one line in `message`, which names the tensor or value that is wrong */
int read_model(const char *path, model *it, char *message, size_t message_size);

/*! free_model() - frees the weights of a model, also of one that was read in part. */
void free_model(model *it);
