/* A Doge model, read from a folder as transformers writes it.
 *
 *     x = embed_tokens[token]
 *     each layer:  x = input_residual * x + o_proj(attention(norm(x)))
 *                  x = post_attention_residual * x + down(silu(gate(norm(x))) * up(norm(x)))
 *     logits = lm_head(norm(x))
 *
 * Queries and keys are normalized in each head, and then have rotary position embeddings. Keys have
 * the scores and biases of fdma_score(). Weights are float32, bfloat16, or float16, which becomes
 * float32. */
#pragma once

#include "generate/config.h"
#include "generate/product.h"
#include "generate/weights.h"

typedef struct layer {
    float *attention_norm, *attention_residual, *mlp_norm, *mlp_residual; /* [hidden_size] */
    float *q_norm, *k_norm;                                               /* [head_dim] */
    float *dt_proj, *dt_bias, *a; /* as in fdma_score(); dt_bias is NULL in models without biases */
    matrix q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj;
} layer;

typedef struct model {
    config config;
    weights weights; /* mapped while the model is used */
    matrix embedding, head;
    float *norm; /* [hidden_size] */
    layer *layer;
    int64_t bytes; /* of all weights that a token reads, and of the embedding */
} model;

/*! read_model() - reads config.json and the weights of a folder, and checks all of them.
 *  Returns 0; or -1 with one line in `message`, which names the file */
int read_model(const char *folder, model *it, char *message, size_t message_size);

/*! free_model() - frees a model, also one that was read in part. */
void free_model(model *it);
