// coat.h - the quantizers of section 5 of the paper on the GPU (kernels: coat.cu). The rules of gpu/tensors.h
// hold here.
//
// Two kinds of tensors are stored in FP8:
//
//   inputs of norms and of activations   E4M3 codes, with a BF16 scale for each 1x16 group. They are saved
//                                        for backward
//   operands of GEMMs                    E4M3 or E5M2 codes, with one scale for the tensor. They are stored
//                                        row-major, transposed, or both, as the GEMMs read them (Operand in
//                                        gpu/tensors.h)
//
// The scale of an operand follows from its amax, so the amax has to be known before any code is made. Usually
// an earlier kernel has found it (part 1 of coat.cu). If not, quantizing takes two passes over x:
// compute_amax() and then quantize_operand().
//
// Each of these functions reads a tensor x:
//
//   function                      what x is                   what the function writes
//   compute_amax()                a LazyTensor, see below     the amax of x
//   quantize_operand()            a LazyTensor, see below     FP8 codes
//   write_values()                a LazyTensor                values in BF16 or FP32
//   write_operand()               a LazyTensor                codes or values: it calls one of these two
//   quantize_activation_input()   gate and up, in BF16        groups, and the amax of the activation's output
//   quantize_to_groups()          a tensor in BF16            groups; with write_back also x
//
// The LazyTensor of the first two is computed from tensors in BF16 or in groups, not from FP32.
//
// Three rules hold for those that write a tensor:
//   - Row-major output may overwrite x.input, the stored tensor from which x is computed, if both have the
//     same shape and the same bytes per element. For example the codes of dgate_up may overwrite the groups
//     of gate_up. (A thread loads its elements before it stores what it makes of them in the same place.)
//   - Row-major output may have more rows than x, as for a prompt of any length (gpu/linear.cpp): an FP8 GEMM
//     wants a multiple of 16. The other rows keep what they hold. (Transposed output has one column for each
//     row of x, and no more.)
//   - What quantizing loses is added to *quant_stats, for the report (gpu/quant_report.h). Without a report
//     quant_stats is null.
#pragma once
#include "common/quant_errors.h"
#include "gpu/tensors.h"

namespace coat::gpu {

// Raises *x_amax_to_raise to the largest |x|, if that is larger. The caller clears the amaxes of activations
// and gradients before every micro-batch; adamw() clears those of weights.
void compute_amax(const LazyTensor& x, float* x_amax_to_raise, cudaStream_t stream);

// Computes x and writes its FP8 codes, the operand of a GEMM: row-major, transposed, or both, whichever
// pointers of `out` are not null. The scale is computed from out.tensor.tensor_scale->amax.
void quantize_operand(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream);

// Computes x and stores its values in out, in FP32, or rounded to BF16.
void write_values(const LazyTensor& x, const TensorRef& out, cudaStream_t stream);

// Computes x and writes it as a GEMM of the recipe reads it: by quantize_operand() if out is FP8, else by
// write_values().
void write_operand(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream);

// Stores the input x of an activation in 1x16 groups. x is [gate | up] (N, 2F) if the activation is gated,
// else (N, F). The activation's output will be an operand of the next GEMM. Its amax is found in the same
// pass, from values that are computed as the GEMM's quantizer will compute them: from the groups. If
// activation_amax_to_raise is null, as where the GEMM reads BF16, no such values are computed.
void quantize_activation_input(bool gated, const TensorRef& x, const TensorRef& groups,
                               float* activation_amax_to_raise, QuantStats* quant_stats, cudaStream_t stream);
// Stores x (BF16) in 1x16 groups. (This can wait: with `write_back`, x becomes what the groups hold, rounded
// to BF16. The flag --attention groups needs this: attention then computes with the values that backward will
// read.)
void quantize_to_groups(const TensorRef& x, const TensorRef& groups, bool write_back, QuantStats* quant_stats,
                        cudaStream_t stream);

}  // namespace coat::gpu
