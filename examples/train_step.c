/* One training step of one attention layer in plain C, its gradients checked against finite
 * differences.
 *
 * The layer: q, k, v = x Wq, x Wk, x Wv; scores of the keys from v, dt_proj and a; attention of
 * each query over its `window` best keys. Loss: half the squared distance of out from a target. The
 * step is one of gradient descent, after which the loss must be smaller.
 *
 *     cc -std=c11 -Iinclude examples/train_step.c -Lbuild -lfdma -Wl,-rpath,$PWD/build -lm \
 *        -o train_step
 *     ./train_step
 *
 * Exit status: 0; 1 where a gradient or the step is wrong; 2 bad usage. */
#include "fdma.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { len = 128, width = 48, q_heads = 4, kv_heads = 2, head_dim = 16, window = 24 };
enum { q_width = q_heads * head_dim, kv_width = kv_heads * head_dim, parameter_count = 5 };

/* A learned matrix [rows, columns], with its gradient. */
typedef struct parameter {
    const char *name;
    int64_t rows, columns;
    float *value, *gradient;
} parameter;

typedef struct layer {
    parameter wq, wk, wv, dt_proj, a;
    float *x, *target;                 /* [len, width], [len, q_width] */
    float *q, *k, *v, *out, *lse;      /* of one sequence */
    float *dq, *dk, *dv, *dout, *bias; /* bias [kv_heads, len] */
    int32_t *expiry, *slot;            /* [kv_heads, len] */
    fdma_selection selection;
} layer;

static void *allocate(int64_t count, size_t size) {
    void *const data = calloc((size_t)count, size);
    if (data == NULL) {
        fprintf(stderr, "train_step: out of memory\n");
        exit(1);
    }
    return data;
}

static float *floats(int64_t count) { return allocate(count, sizeof(float)); }

static void demand(fdma_status status) {
    if (status != FDMA_OK) {
        fprintf(stderr, "train_step: %s: %s\n", fdma_status_name(status), fdma_last_error());
        exit(1);
    }
}

/* Repeatable numbers in [-1, 1): the high bits of a linear congruential generator. */
static float next_random(void) {
    static uint64_t state = 1;
    state = state * 6364136223846793005U + 1442695040888963407U;
    return (float)(state >> 40) * 0x1p-23F - 1;
}

static float *random_floats(int64_t count, float size) {
    float *const data = floats(count);
    for (int64_t i = 0; i < count; i++)
        data[i] = size * next_random();
    return data;
}

static parameter new_parameter(const char *name, int64_t rows, int64_t columns, float size) {
    return (parameter){name, rows, columns, random_floats(rows * columns, size),
                       floats(rows * columns)};
}

static fdma_tensor heads_of(float *data, int64_t heads) {
    return fdma_tensor_4d(data, FDMA_FLOAT32, 1, len, heads, head_dim);
}

static fdma_tensor rows_of(void *data, fdma_dtype dtype, int64_t heads) {
    return fdma_tensor_3d(data, dtype, 1, heads, len);
}

static fdma_tensor tensor_of(float *data, const parameter *shape) {
    return shape->rows == 1 ? fdma_tensor_1d(data, FDMA_FLOAT32, shape->columns)
                            : fdma_tensor_2d(data, FDMA_FLOAT32, shape->rows, shape->columns);
}

static layer new_layer(void) {
    const float size = 1.7F / sqrtf((float)width);
    layer it = {
        .wq = new_parameter("wq", width, q_width, size),
        .wk = new_parameter("wk", width, kv_width, size),
        .wv = new_parameter("wv", width, kv_width, size),
        .dt_proj = new_parameter("dt_proj", kv_heads, kv_width, 0.5F),
        .a = new_parameter("a", 1, kv_heads, 1),
        .x = random_floats((int64_t)len * width, 1),
        .target = random_floats((int64_t)len * q_width, 1),
        .q = floats((int64_t)len * q_width),
        .k = floats((int64_t)len * kv_width),
        .v = floats((int64_t)len * kv_width),
        .out = floats((int64_t)len * q_width),
        .lse = floats((int64_t)q_heads * len),
        .dq = floats((int64_t)len * q_width),
        .dk = floats((int64_t)len * kv_width),
        .dv = floats((int64_t)len * kv_width),
        .dout = floats((int64_t)len * q_width),
        .bias = floats((int64_t)kv_heads * len),
        .expiry = allocate((int64_t)kv_heads * len, sizeof(int32_t)),
        .slot = allocate((int64_t)kv_heads * len, sizeof(int32_t)),
    };
    it.selection = (fdma_selection){
        .size = sizeof it.selection,
        .expiry = rows_of(it.expiry, FDMA_INT32, kv_heads),
        .slot = rows_of(it.slot, FDMA_INT32, kv_heads),
    };
    return it;
}

static void free_layer(layer *it) {
    parameter *const all[parameter_count] = {&it->wq, &it->wk, &it->wv, &it->dt_proj, &it->a};
    for (int n = 0; n < parameter_count; n++) {
        free(all[n]->value);
        free(all[n]->gradient);
    }
    void *const rest[] = {it->x,  it->target, it->q,  it->k,    it->v,      it->out,  it->lse,
                          it->dq, it->dk,     it->dv, it->dout, it->expiry, it->slot, it->bias};
    for (size_t n = 0; n < sizeof rest / sizeof rest[0]; n++)
        free(rest[n]);
}

/* y = x W */
static void project(const float *x, const parameter *w, float *y) {
    for (int64_t i = 0; i < len; i++)
        for (int64_t c = 0; c < w->columns; c++) {
            double sum = 0;
            for (int64_t r = 0; r < w->rows; r++)
                sum += (double)(x[i * w->rows + r] * w->value[r * w->columns + c]);
            y[i * w->columns + c] = (float)sum;
        }
}

/* dW = x^T dy */
static void project_backward(const float *x, const float *dy, parameter *w) {
    for (int64_t r = 0; r < w->rows; r++)
        for (int64_t c = 0; c < w->columns; c++) {
            double sum = 0;
            for (int64_t i = 0; i < len; i++)
                sum += (double)(x[i * w->rows + r] * dy[i * w->columns + c]);
            w->gradient[r * w->columns + c] = (float)sum;
        }
}

static void project_all(layer *it) {
    project(it->x, &it->wq, it->q);
    project(it->x, &it->wk, it->k);
    project(it->x, &it->wv, it->v);
}

/* Half the squared distance from the target; fills in its gradient dout. */
static double loss_of(layer *it) {
    double sum = 0;
    for (int64_t i = 0; i < (int64_t)len * q_width; i++) {
        const double off = (double)it->out[i] - (double)it->target[i];
        it->dout[i] = (float)off;
        sum += off * off / 2;
    }
    return sum;
}

/* The whole layer, selecting anew. */
static double forward(layer *it) {
    project_all(it);
    fdma_attention_args args = {
        .size = sizeof args,
        .q = heads_of(it->q, q_heads),
        .k = heads_of(it->k, kv_heads),
        .v = heads_of(it->v, kv_heads),
        .dt_proj = tensor_of(it->dt_proj.value, &it->dt_proj),
        .a = tensor_of(it->a.value, &it->a),
        .out = heads_of(it->out, q_heads),
        .lse = rows_of(it->lse, FDMA_FLOAT32, q_heads),
        .selection = &it->selection,
        .window = window,
        .causal = 1,
    };
    demand(fdma_attention_workspace(&args, &args.exec.workspace_size));
    args.exec.workspace = allocate((int64_t)args.exec.workspace_size, 1);
    demand(fdma_attention(&args));
    free(args.exec.workspace);
    return loss_of(it);
}

/* The loss with the selection held fixed: gradients are derivatives of this function. */
static double forward_as_selected(layer *it) {
    project_all(it);
    fdma_score_args score = {
        .size = sizeof score,
        .v = heads_of(it->v, kv_heads),
        .dt_proj = tensor_of(it->dt_proj.value, &it->dt_proj),
        .a = tensor_of(it->a.value, &it->a),
        .bias = rows_of(it->bias, FDMA_FLOAT32, kv_heads),
    };
    fdma_forward_args args = {
        .size = sizeof args,
        .q = heads_of(it->q, q_heads),
        .k = heads_of(it->k, kv_heads),
        .v = score.v,
        .bias = score.bias,
        .out = heads_of(it->out, q_heads),
        .selection = &it->selection,
        .causal = 1,
    };
    demand(fdma_score_workspace(&score, &score.exec.workspace_size));
    score.exec.workspace = allocate((int64_t)score.exec.workspace_size + 1, 1);
    demand(fdma_score(&score));
    demand(fdma_forward_workspace(&args, &args.exec.workspace_size));
    args.exec.workspace = allocate((int64_t)args.exec.workspace_size + 1, 1);
    demand(fdma_forward(&args));
    free(score.exec.workspace);
    free(args.exec.workspace);
    return loss_of(it);
}

static void backward(layer *it) {
    fdma_attention_backward_args args = {
        .size = sizeof args,
        .dout = heads_of(it->dout, q_heads),
        .out = heads_of(it->out, q_heads),
        .lse = rows_of(it->lse, FDMA_FLOAT32, q_heads),
        .q = heads_of(it->q, q_heads),
        .k = heads_of(it->k, kv_heads),
        .v = heads_of(it->v, kv_heads),
        .dt_proj = tensor_of(it->dt_proj.value, &it->dt_proj),
        .a = tensor_of(it->a.value, &it->a),
        .dq = heads_of(it->dq, q_heads),
        .dk = heads_of(it->dk, kv_heads),
        .dv = heads_of(it->dv, kv_heads),
        .ddt_proj = tensor_of(it->dt_proj.gradient, &it->dt_proj),
        .da = tensor_of(it->a.gradient, &it->a),
        .selection = &it->selection,
        .causal = 1,
    };
    demand(fdma_attention_backward_workspace(&args, &args.exec.workspace_size));
    args.exec.workspace = allocate((int64_t)args.exec.workspace_size, 1);
    demand(fdma_attention_backward(&args));
    free(args.exec.workspace);
    project_backward(it->x, it->dq, &it->wq);
    project_backward(it->x, it->dk, &it->wk);
    project_backward(it->x, it->dv, &it->wv);
}

static void move(parameter *p, const float *direction, double step) {
    for (int64_t i = 0; i < p->rows * p->columns; i++)
        p->value[i] += (float)(step * (double)direction[i]);
}

/* The slope of the loss along its gradient by central differences, divided by the slope that the
 * gradient predicts: 1, except for curvature and rounding. */
static double slope_ratio(layer *it, parameter *p) {
    const int64_t count = p->rows * p->columns;
    double squares = 0;
    for (int64_t i = 0; i < count; i++)
        squares += (double)p->gradient[i] * (double)p->gradient[i];
    const double step = 5e-3 / sqrt(squares);
    float *const kept = floats(count);
    memcpy(kept, p->value, (size_t)count * sizeof *kept);
    move(p, p->gradient, step);
    const double above = forward_as_selected(it);
    memcpy(p->value, kept, (size_t)count * sizeof *kept);
    move(p, p->gradient, -step);
    const double below = forward_as_selected(it);
    memcpy(p->value, kept, (size_t)count * sizeof *kept);
    free(kept);
    return (above - below) / (2 * step) / squares;
}

int main(int argc, char **argv) {
    const double tolerance = 0.01;
    if (argc > 1) { // there are no arguments
        const int help = strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0;
        fprintf(help ? stdout : stderr, "usage: train_step\n");
        return help ? 0 : 2;
    }
    layer it = new_layer();
    parameter *const all[parameter_count] = {&it.wq, &it.wk, &it.wv, &it.dt_proj, &it.a};
    int wrong = 0;
    const double before = forward(&it);
    backward(&it);
    for (int n = 0; n < parameter_count; n++) {
        const double ratio = slope_ratio(&it, all[n]);
        const int right = fabs(ratio - 1) < tolerance; // NaN is wrong
        printf("%-8s slope by differences / by gradient: %.4f%s\n", all[n]->name, ratio,
               right ? "" : "  WRONG");
        wrong += !right;
    }
    for (int n = 0; n < parameter_count; n++)
        move(all[n], all[n]->gradient, -0.01);
    const double after = forward(&it);
    printf("loss before the step %.2f, after %.2f\n", before, after);
    free_layer(&it);
    return wrong > 0 || !(after < before);
}
