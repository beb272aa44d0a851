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

enum { MOST_PRODUCTS = 3 };

/*! multiply() - for each of up to MOST_PRODUCTS matrices w with the same number of columns:
 *  y[i, r] = bias[r] + sum over c of x[i, c] * w[r, c], for x [len, columns] and y [len, rows]. One
 *  row of x costs a read of the weights; many rows are computed in tiles. The threads meet once,
 *  after all of them. The sums of a row of y do not depend on the threads. */
void multiply(crew *threads, int count, const matrix *const *w, const float *x, int64_t len,
              float *const *y);

/*! read_row() - row r as float32, without the bias. */
void read_row(const matrix *w, int64_t r, float *row);

void free_matrix(matrix *w);
