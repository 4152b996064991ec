// gpu/norm.h - the residual stream and norms (kernels: gpu/norm.cu and gpu/norm_backward.cu). The rules of
// gpu/tensors.h hold here.
//
// A layer has two halves, attention and MLP. What a half adds to the residual stream is its branch: the
// output of its last linear layer.
#pragma once
#include "tensors.h"

namespace coat::gpu {

// --- Forward ---

// residual_add() and embed() make a sum in FP32: the new residual stream. A norm reads it, and so does the
// next sum. In coat it is therefore stored twice: in groups for the norm, and in BF16 for the next sum. The
// last sum, which only the final norm reads, is stored once, in BF16. (In other recipes every sum is stored
// once, for both, in the compute format: plain_sum is no tensor.)
//
// The output of the norm is not stored. The kernel that makes the operand of the next GEMM computes it again
// (quantize_operand() in coat.h). It needs the row statistics of the norm, and for the scale the amax of the
// whole output. The kernel of the sum has whole rows in registers, so it finds both, from the sum as the norm
// will read it: rounded.
//
// `norm` is the norm that reads the sum; its weight, bias, rms and eps are given. This is what the two
// functions write:
//
//                               norms 1 and 2 in coat           final norm
//   norm.input                  the sum, in groups              the sum, in BF16
//   norm.row_statistics         those of norm.input             those of norm.input
//   plain_sum                   the sum, in BF16                no tensor: nothing is written
//   norm_output_amax_to_raise   the amax of the norm's output   null: the output is not quantized

// Adds a branch to the residual stream: x + branch, both (N, C). plain_sum may be the memory of x or branch.
void residual_add(const TensorRef& x, const TensorRef& branch, const Norm& norm, const TensorRef& plain_sum,
                  float* norm_output_amax_to_raise, cudaStream_t stream);
// The embedding, where the residual stream begins: row r is embedding[tokens[r]] + positions[r % T].
//   tokens      (N)
//   positions   the learned positions (max_T, C), or no tensor
void embed(const TensorRef& embedding, const TensorRef& positions, const int32_t* tokens, int64_t T,
           const Norm& norm, const TensorRef& plain_sum, float* norm_output_amax_to_raise,
           cudaStream_t stream);

// --- Backward (this can wait until you come to gpu/norm_backward.cu) ---

// What the backward pass of a norm is given besides the norm.
struct NormBackwardTensors {
    // It reads:
    TensorRef dnorm_output;  // (N, C) the gradient of the norm's output
    TensorRef dresidual_in;  // (N, C) the gradient of the residual stream, or no tensor
    // It writes:
    TensorRef dresidual_out;         // (N, C) dresidual_in + the gradient of the norm's input, rounded
    float* dresidual_amax_to_raise;  // the amax of dresidual_out
    // It adds to:
    TensorRef dweight, dbias;  // (C); dbias is no tensor for RMSNorm
};
// The backward pass of a norm, and of the residual sum before it. dresidual_out may be the memory of
// dresidual_in, or of n.input if that is in the compute format. workspace:
// norm_backward_workspace_floats(n.input.cols) floats.
//
// The function also writes the row statistics of the norm again. Afterwards lazy_norm(n) may be read, until
// another norm writes its row statistics to the same memory or n.input is overwritten.
void norm_backward(const Norm& n, const NormBackwardTensors& tensors, float* workspace, cudaStream_t stream);
int64_t norm_backward_workspace_floats(int64_t C);

}  // namespace coat::gpu
