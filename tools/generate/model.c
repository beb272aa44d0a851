/* See generate/model.h. */
#include "generate/model.h"

#include "common/arrays.h"
#include "common/json_tree.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { NAME_SIZE = 96, FULL_NAME_SIZE = 112, PATH_SIZE = 4096 };

typedef struct reader {
    model *it;
    message_line message;
} reader;

/* columns is 0 for a vector. */
static const safetensors_entry *find_entry(const reader *from, const char *name, int64_t rows,
                                           int64_t columns, const uint8_t **bytes) {
    const int64_t rank = columns > 0 ? 2 : 1, shape[] = {rows, columns};
    const safetensors_entry *const entry = find_weights(&from->it->weights, name, bytes);
    if (entry == NULL) {
        refuse(from->message, "tensor '%s': is missing", name);
        return NULL;
    }
    if (entry->rank != rank) {
        refuse(from->message, "tensor '%s': rank is %" PRId64 ", want %" PRId64, name, entry->rank,
               rank);
        return NULL;
    }
    for (int axis = 0; axis < rank; axis++)
        if (entry->shape[axis] != shape[axis]) {
            refuse(from->message, "tensor '%s': axis %d has %" PRId64 " element%s, want %" PRId64,
                   name, axis, entry->shape[axis], entry->shape[axis] == 1 ? "" : "s", shape[axis]);
            return NULL;
        }
    return entry;
}

/* A copy as float32. */
static float *widen(const uint8_t *bytes, fdma_dtype dtype, int64_t count) {
    float *const values = allocate((size_t)count * sizeof *values);
    for (int64_t n = 0; n < count; n++) {
        uint8_t one[4];
        const size_t size = dtype_bytes(dtype);
        memcpy(one, bytes + (size_t)n * size, size);
        values[n] = (float)load_element(one, dtype, 0);
    }
    return values;
}

static bool find_dtype(const reader *from, const safetensors_entry *entry, fdma_dtype *dtype) {
    static const char *const names[] = {"F32", "F16", "BF16"};
    static const fdma_dtype dtypes[] = {FDMA_FLOAT32, FDMA_FLOAT16, FDMA_BFLOAT16};
    for (int n = 0; n < 3; n++)
        if (strcmp(names[n], entry->dtype) == 0) {
            *dtype = dtypes[n];
            return true;
        }
    return refuse(from->message, "tensor '%s': dtype is %s, want F32, BF16 or F16", entry->name,
                  entry->dtype);
}

/* Numbers that are not finite have an exponent of ones. */
static bool check_finite(const reader *from, const char *name, const matrix *w) {
    const int64_t count = w->rows * w->columns;
    uint32_t most = 0;
    if (w->is_bfloat16) {
        for (int64_t n = 0; n < count; n++) {
            uint16_t bits;
            memcpy(&bits, (const char *)w->data + n * 2, sizeof bits);
            const uint32_t wide = (uint32_t)(bits & 0x7fff) << 16;
            most = wide > most ? wide : most;
        }
    } else {
        for (int64_t n = 0; n < count; n++) {
            uint32_t bits;
            memcpy(&bits, (const char *)w->data + n * 4, sizeof bits);
            bits &= 0x7fffffff;
            most = bits > most ? bits : most;
        }
    }
    if (most >= 0x7f800000)
        return refuse(from->message, "tensor '%s': has NaN or infinity, want finite numbers", name);
    return true;
}

static bool read_matrix(const reader *from, const char *name, int64_t rows, int64_t columns,
                        matrix *w) {
    const uint8_t *bytes = NULL;
    fdma_dtype dtype = FDMA_FLOAT32;
    const safetensors_entry *const entry = find_entry(from, name, rows, columns, &bytes);
    if (entry == NULL || !find_dtype(from, entry, &dtype))
        return false;
    *w = (matrix){.data = bytes, .rows = rows, .columns = columns};
    w->is_bfloat16 = dtype == FDMA_BFLOAT16;
    if (dtype == FDMA_FLOAT16)
        w->data = w->owned = widen(bytes, dtype, rows * columns);
    from->it->bytes += rows * columns * (w->is_bfloat16 ? 2 : 4);
    return check_finite(from, name, w);
}

/* As float32, whatever it is in the file; columns is 0 for a vector. */
static bool read_floats(const reader *from, const char *name, int64_t rows, int64_t columns,
                        float **values) {
    const uint8_t *bytes = NULL;
    fdma_dtype dtype = FDMA_FLOAT32;
    const safetensors_entry *const entry = find_entry(from, name, rows, columns, &bytes);
    if (entry == NULL || !find_dtype(from, entry, &dtype))
        return false;
    const int64_t count = rows * (columns > 0 ? columns : 1);
    *values = widen(bytes, dtype, count);
    from->it->bytes += count * 4;
    return check_finite(from, name, &(matrix){.data = *values, .rows = 1, .columns = count});
}

static bool read_linear(const reader *from, const char *name, int64_t rows, int64_t columns,
                        bool has_bias, matrix *w) {
    char full[FULL_NAME_SIZE];
    snprintf(full, sizeof full, "%s.weight", name);
    if (!read_matrix(from, full, rows, columns, w))
        return false;
    snprintf(full, sizeof full, "%s.bias", name);
    return !has_bias || read_floats(from, full, rows, 0, &w->bias);
}

static bool read_layer(const reader *from, int64_t n) {
    const config *const sizes = &from->it->config;
    layer *const one = &from->it->layer[n];
    const int64_t width = sizes->hidden_size, inner = sizes->intermediate_size;
    const int64_t q_width = sizes->q_heads * sizes->head_dim;
    const int64_t kv_width = sizes->kv_heads * sizes->head_dim;
    const bool attention_bias = sizes->attention_bias, mlp_bias = sizes->mlp_bias;
    const struct {
        const char *name;
        int64_t rows, columns;
        bool has_bias;
        matrix *w;
    } linears[] = {
        {"self_attn.q_proj", q_width, width, attention_bias, &one->q_proj},
        {"self_attn.k_proj", kv_width, width, attention_bias, &one->k_proj},
        {"self_attn.v_proj", kv_width, width, attention_bias, &one->v_proj},
        {"self_attn.o_proj", width, q_width, attention_bias, &one->o_proj},
        {"mlp.gate_proj", inner, width, mlp_bias, &one->gate_proj},
        {"mlp.up_proj", inner, width, mlp_bias, &one->up_proj},
        {"mlp.down_proj", width, inner, mlp_bias, &one->down_proj},
    };
    const struct {
        const char *name;
        bool is_wanted;
        int64_t rows, columns;
        float **values;
    } floats[] = {
        {"input_layernorm.weight", true, width, 0, &one->attention_norm},
        {"input_residual", true, width, 0, &one->attention_residual},
        {"post_attention_layernorm.weight", true, width, 0, &one->mlp_norm},
        {"post_attention_residual", true, width, 0, &one->mlp_residual},
        {"self_attn.q_norm.weight", true, sizes->head_dim, 0, &one->q_norm},
        {"self_attn.k_norm.weight", true, sizes->head_dim, 0, &one->k_norm},
        {"self_attn.A", true, sizes->kv_heads, 0, &one->a},
        {"self_attn.dt_proj.weight", true, sizes->kv_heads, kv_width, &one->dt_proj},
        {"self_attn.dt_proj.bias", attention_bias, sizes->kv_heads, 0, &one->dt_bias},
    };
    char name[NAME_SIZE];
    for (size_t m = 0; m < sizeof linears / sizeof linears[0]; m++) {
        snprintf(name, sizeof name, "model.layers.%" PRId64 ".%s", n, linears[m].name);
        if (!read_linear(from, name, linears[m].rows, linears[m].columns, linears[m].has_bias,
                         linears[m].w))
            return false;
    }
    for (size_t f = 0; f < sizeof floats / sizeof floats[0]; f++) {
        snprintf(name, sizeof name, "model.layers.%" PRId64 ".%s", n, floats[f].name);
        if (floats[f].is_wanted &&
            !read_floats(from, name, floats[f].rows, floats[f].columns, floats[f].values))
            return false;
    }
    return true;
}

/* Doge-320M and Doge-*-Instruct have no norms of queries and keys, and scores of each query head.
 * transformers does not read them either. Source: huggingface/transformers, issue 38573 */
static bool check_form(const reader *from) {
    const uint8_t *bytes;
    if (find_weights(&from->it->weights, "model.layers.0.self_attn.dt_proj.weight", &bytes) ==
            NULL ||
        find_weights(&from->it->weights, "model.layers.0.self_attn.q_norm.weight", &bytes) != NULL)
        return true;
    return refuse(from->message,
                  "has no 'q_norm', as Doge-320M and Doge-*-Instruct, want the form of "
                  "DogeForCausalLM in transformers");
}

static bool read_tensors(const reader *from) {
    model *const it = from->it;
    const int64_t width = it->config.hidden_size, vocab_size = it->config.vocab_size;
    it->layer = allocate((size_t)it->config.layers * sizeof *it->layer);
    const uint8_t *bytes;
    if (!check_form(from) ||
        !read_matrix(from, "model.embed_tokens.weight", vocab_size, width, &it->embedding) ||
        !read_floats(from, "model.norm.weight", width, 0, &it->norm))
        return false;
    if (it->config.is_tied && find_weights(&it->weights, "lm_head.weight", &bytes) == NULL) {
        it->head = it->embedding;
        it->head.owned = NULL;
    } else if (!read_matrix(from, "lm_head.weight", vocab_size, width, &it->head)) {
        return false;
    }
    for (int64_t n = 0; n < it->config.layers; n++)
        if (!read_layer(from, n))
            return false;
    return true;
}

int read_model(const char *folder, model *it, char *message, size_t message_size) {
    const reader from = {it, {message, message_size}};
    char path[PATH_SIZE], reason[SAFETENSORS_MESSAGE];
    *it = (model){0};
    snprintf(path, sizeof path, "%s/config.json", folder);
    if (read_config(path, &it->config, reason, sizeof reason) != 0) {
        refuse(from.message, "config.json: %s", reason);
        return -1;
    }
    if (open_weights(folder, &it->weights, message, message_size) != 0)
        return -1;
    return read_tensors(&from) ? 0 : -1;
}

void free_model(model *it) {
    for (int64_t n = 0; it->layer != NULL && n < it->config.layers; n++) {
        layer *const one = &it->layer[n];
        matrix *const matrices[] = {&one->q_proj,    &one->k_proj,  &one->v_proj,   &one->o_proj,
                                    &one->gate_proj, &one->up_proj, &one->down_proj};
        float *const floats[] = {one->attention_norm,
                                 one->attention_residual,
                                 one->mlp_norm,
                                 one->mlp_residual,
                                 one->q_norm,
                                 one->k_norm,
                                 one->dt_proj,
                                 one->dt_bias,
                                 one->a};
        for (size_t m = 0; m < sizeof matrices / sizeof matrices[0]; m++)
            free_matrix(matrices[m]);
        for (size_t f = 0; f < sizeof floats / sizeof floats[0]; f++)
            free(floats[f]);
    }
    free_matrix(&it->embedding);
    free_matrix(&it->head);
    free(it->norm);
    free(it->layer);
    close_weights(&it->weights);
}
