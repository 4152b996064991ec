// gpu/norm.cuh - residual add and norm (norm.cu): the pair of the paper's section 5, which leaves a norm's
// input in 1x16 groups, and for the next GEMM the amax of its output.
//
// All tensors are in the compute dtype (BF16 or FP32) unless a comment says otherwise; all views of a call
// have the same one. Rows are tokens; columns are a multiple of 16. Parameter gradients are added to, in
// their own format (BF16 or FP32). No function allocates or waits; all launch on the given CUDA stream.
#pragma once
#include "tensor.cuh"

namespace coat::gpu {

// sum = x + branch; x_out = round(sum); next.in = sum, quantized in groups or rounded. x_out may be x, and it
// is no tensor where next.in holds the same values. Leaves next.stats and, if y_amax is not null, the amax of
// the norm's output there. They belong to next.in, or to x_out if the forward pass reads that
// (coat.h, forward_reads_groups).
void residual_add(const View& x, const View& branch, const View& x_out, const Norm& next, bool reads_saved,
                  AmaxAndScale* y_amax, cudaStream_t s, const int32_t* tokens = nullptr, int64_t T = 1);
// The same with sum = embedding[token] (+ positions[row % T], if that is a tensor).
inline void embedding_forward(const int32_t* tokens, const View& embedding, const View& positions, int64_t T,
                              const View& x_out, const Norm& next, bool reads_saved, AmaxAndScale* y_amax,
                              cudaStream_t s) {
    residual_add(embedding, positions, x_out, next, reads_saved, y_amax, s, tokens, T);
}

// g_out = round(g_in + dx), where dy is the gradient of the norm's output and dx that of its input; all (N,
// C). g_in may be no tensor, g_out may be g_in. Leaves n.stats again and, if g_amax is not null, the amax of
// g_out. dweight, dbias (C) are added to; dbias is no tensor for RMSNorm. Workspace:
// norm_backward_workspace(C) bytes.
size_t norm_backward_workspace(int64_t C);
void norm_backward(const Norm& n, const View& dy, const View& g_in, const View& g_out, AmaxAndScale* g_amax,
                   const View& dweight, const View& dbias, float* workspace, cudaStream_t s);

}  // namespace coat::gpu
