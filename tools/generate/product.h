/* Products with the weights of linear layers, on some threads. */
#pragma once

#include "generate/threads.h"

#include <stdbool.h>
#include <stdint.h>

typedef struct matrix {
    const void *data; /* [rows, columns], of any alignment: a row for each output of the layer */
    float *bias;      /* [rows], or NULL */
    void *owned;      /* what free_matrix() frees with the bias; NULL for data of a mapped file */
    int64_t rows, columns;
    bool is_bfloat16; /* else float32 */
} matrix;

/*! multiply() - y[i, r] = bias[r] + sum over c of x[i, c] * w[r, c], for x [len, columns] and y
 *  [len, rows]. One row of x costs a read of the weights; many rows are computed in tiles. The sums
 *  of a row of y do not depend on the threads. */
void multiply(crew *threads, const matrix *w, const float *x, int64_t len, float *y);

/*! read_row() - row r as float32, without the bias. */
void read_row(const matrix *w, int64_t r, float *row);

void free_matrix(matrix *w);
