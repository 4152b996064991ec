// gpu/column_sums.h - column sums, for the gradients of biases and of the weights of norms (kernels:
// gpu/column_sums.cu). The rules of gpu/tensors.h hold here.
//
// Column sums are taken in two stages. First, each thread block adds up a part of the rows, and writes its
// partial sums to a row of the workspace. Then the partial sums are added up.
#pragma once
#include "../common/quant_errors.h"
#include "tensors.h"

namespace coat::gpu {

// The second stage. gradient (n) += the sum of the rows of partials (rows, n). second_gradient (n) may be no
// tensor. If it is one, its partials (rows, n) lie after those of the first.
void reduce_partials(const float* partials, int64_t rows, const TensorRef& gradient, cudaStream_t stream,
                     const TensorRef& second_gradient = {});

// --- For linear layers with a bias (this can wait) ---

// The number of partial sums that add_column_sums() takes of a column.
inline constexpr int COLUMN_PARTIALS = 128;

// Both stages: gradient (cols) += the column sums of x. The same pass finds the amax of x.
// workspace: (COLUMN_PARTIALS, cols) floats.
void add_column_sums(const LazyTensor& x, const TensorRef& gradient, float* workspace, float* x_amax_to_raise,
                     cudaStream_t stream);

// Does what add_column_sums() and write_operand() (coat.h) do, with the same bits. Where it can, it reads x
// only once. The arguments are those of the two functions.
void write_operand_and_add_column_sums(const LazyTensor& x, const Operand& out, const TensorRef& gradient,
                                       float* workspace, QuantStats* quant_stats, cudaStream_t stream);

}  // namespace coat::gpu
