/* Weights of a linear layer as the model file has them, and products with them. */
#pragma once

#include <stdint.h>

enum { MOST_COLUMNS = 1 << 14, ROWS_MULTIPLE = 8 };

typedef enum matrix_kind { MATRIX_FLOAT32, MATRIX_BFLOAT16, MATRIX_INT8 } matrix_kind;

/* [rows, columns]: a row for each output of the layer, a column for each input. */
typedef struct matrix {
    void *data;
    float *scale;          /* MATRIX_INT8: [rows], the factor of a row's integers; else NULL */
    int64_t rows, columns; /* rows: a multiple of 4; columns: at most MOST_COLUMNS */
    matrix_kind kind;
} matrix;

/*! multiply_rows(), multiply_text() - y[i, r] = sum over c of x[i, c] * w[r, c], for x [len,
 *  columns] and y [len, rows], on `threads` threads if the program is built with OpenMP.
 *
 *  multiply_rows() is for the next bytes of a text. The sums of a row have the same bits whatever
 *  the other rows are, so that the scores of equal bytes tie, whether they came in a prompt or one
 *  by one. For weights of 8 bits x is rounded to 16 bits, relative to the largest element of its
 *  row; if one is not finite, the row of y is NaN.
 *
 *  multiply_text() is for whole texts, and has float32 sums for all weights. Its x and y have room
 *  for the next multiple of ROWS_MULTIPLE rows. */
void multiply_rows(const matrix *w, const float *x, int64_t len, float *y, int threads);
void multiply_text(const matrix *w, const float *x, int64_t len, float *y, int threads);

/*! widen_row() - row r as float32. */
void widen_row(const matrix *w, int64_t r, float *row);
