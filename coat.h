// coat.h - the quantizers of section 5 of the paper on the GPU (kernels: coat.cu). The rules of gpu/tensors.h
// hold here.
//
// Scaling per tensor takes two passes, compute_amax() and quantize_operand(). A kernel that has the values at
// hand anyway updates the amax itself, which saves the first pass. Each of these functions reads a tensor x:
//
//   function                      what x is                        what the function writes
//   compute_amax()                a LazyTensor of BF16 or groups   the amax of x
//   quantize_operand()            a LazyTensor of BF16 or groups   FP8 codes
//   store_values()                any LazyTensor                   values in BF16 or FP32
//   write_operand()               any LazyTensor; if the operand   FP8 codes, or values in BF16 or FP32
//                                 is in FP8, of BF16 or groups
//   quantize_activation_input()   gate and up, in BF16             groups, and the amax of the activation's
//                                                                  output
//   quantize_groups()             a tensor in BF16                 groups
//
// "Of BF16 or groups" means that x is computed from tensors in BF16 or in groups, not in FP32.
//
// Three rules hold for all of them:
//   - Row-major output may overwrite x.input, the stored tensor from which x is computed, if both have the
//     same bytes per element. For example the codes of dgate_up may overwrite the groups of gate_up. (A
//     thread loads its elements before it stores what it makes of them.)
//   - The output may have more rows than x. The other rows keep what they hold.
//   - What quantizing loses is added to *quant_stats, for the report (gpu/quant_report.h). It may be null.
#pragma once
#include "gpu/tensors.h"

namespace coat::gpu {

// *x_amax_out = max(*x_amax_out, |x|). The caller clears the amaxes of activations and gradients
// before every micro-batch; adamw() clears those of weights.
void compute_amax(const LazyTensor& x, float* x_amax_out, cudaStream_t stream);

// Computes x and writes its FP8 codes, the operand of a GEMM: row-major, transposed, or both, whichever
// pointers of `out` are not null. The scale is computed from out.tensor.tensor_scale->amax.
void quantize_operand(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream);

// Computes x and stores its values in out, in FP32, or rounded to BF16.
void store_values(const LazyTensor& x, const TensorRef& out, cudaStream_t stream);

// Computes x and writes it as a GEMM of the recipe reads it: by quantize_operand() if out is FP8, else by
// store_values().
void write_operand(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream);

// Stores the input x of an activation in 1x16 groups: [gate | up] (N, 2F) if it is gated, else (N, F). In the
// same pass it finds the amax of the activation's output, as it is computed from the groups: this output
// becomes an operand of the next GEMM.
void quantize_activation_input(bool gated, const TensorRef& x, const TensorRef& groups,
                               float* activation_amax_out, QuantStats* quant_stats, cudaStream_t stream);
// Stores x (BF16) in 1x16 groups. With `write_back`, x becomes what the groups hold, rounded to BF16. The
// flag --attention groups needs this: attention then computes with the values that backward will read.
void quantize_groups(const TensorRef& x, const TensorRef& groups, bool write_back, QuantStats* quant_stats,
                     cudaStream_t stream);

// For linear layers with a bias (this can wait). Does what add_column_sums() and write_operand() do, with the
// same bits. It needs only one pass over x where that is possible (coat.cu, part 5).
void write_operand_and_add_column_sums(const LazyTensor& x, const Operand& out, const TensorRef& gradient,
                                       float* workspace, QuantStats* quant_stats, cudaStream_t stream);

}  // namespace coat::gpu
