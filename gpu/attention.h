// gpu/attention.h - causal attention on the GPU, forward and backward, as flash attention: no T x T matrix is
// ever stored.
//
// For each sequence and query head, with k and v of its key/value head (NH / NKV query heads share one):
//   s = q k^T / sqrt(HS), where keys after the query are masked;   p = softmax(s);   out = p v.
// There are two implementations. attention.cu is for any GPU from Ampere on: BF16 on tensor cores through
// mma.sync, FP32 on CUDA cores. attention_sm90.cu uses Hopper's instructions wgmma and TMA, for BF16 and head
// sizes of 64 and 128. Both accumulate in FP32 and sum in a fixed order, so the same input always gives the
// same bits.
//
// Tensors are pointers with an AttentionShape: a TensorRef (gpu/tensors.h) would say how many rows there
// are, but not which of them belong to a sequence, nor which columns to a head.
#pragma once
#include <cuda_runtime.h>

#include "../common/architecture.h"
#include "tensors.h"

namespace coat::gpu {

struct AttentionShape {
    int64_t B, T;         // sequences, and tokens of a sequence: any numbers
    int64_t NH, NKV, HS;  // query heads, key/value heads, head size. NH is a multiple of NKV; HS is a
                          // multiple of 8, up to 128
    Format format;        // FP32 or BF16: of qkv, out and their gradients

    int64_t qkv_cols() const { return (NH + 2 * NKV) * HS; }
};

inline AttentionShape attention_shape(const ModelConfig& config, int64_t B, int64_t T, Format format) {
    return {B, T, config.NH, config.NKV, config.HS(), format};
}

// Computes attention.
//   qkv                 (B, T, (NH + 2 NKV) HS), with columns [q heads | k heads | v heads]
//   out                 (B, T, NH HS)
//   lse                 (B, NH, T) in FP32, the log-sum-exp: the natural logarithm of the sum of exp(s) over
//                       the keys. Backward recomputes p from it
//   out_amax_to_raise   null if nobody needs the amax of out, as in FP32
// Pointers are 16-byte aligned. A shape that no implementation supports is an Error.
void attention_forward(const AttentionShape& shape, const void* qkv, void* out, float* lse,
                       float* out_amax_to_raise, cudaStream_t stream);

// Where backward finds its inputs and leaves its results.
struct AttentionBackward {
    const void* qkv;  // qkv, out and lse are what forward has read and written
    const void* out;
    const float* lse;
    const void* dout;  // (B, T, NH HS), the gradient of out
    // The gradient of qkv, in the same shape; every element is written. With a rope_table, dq and dk are the
    // gradients of q and k before RoPE. attention_backward() then does what rope() with `inverse` would do
    // with its results, with the same bits: dq and dk are rounded to `format`, rotated, and rounded again.
    void* dqkv;
    void* workspace;            // attention_workspace_bytes(shape) bytes of temporary memory
    const float2* rope_table;   // see Rope (gpu/layers.h); null if q and k were not rotated
    float* dqkv_amax_to_raise;  // null if nobody needs the amax of dqkv, as in FP32
};
void attention_backward(const AttentionShape& shape, const AttentionBackward& tensors, cudaStream_t stream);
int64_t attention_workspace_bytes(const AttentionShape& shape);

// (This can wait.) An implementation, for one format and range of head sizes. The functions above choose one
// of them and call it; tests and the ladder (dev/ladders/attention.cu) call each.
struct AttentionKernels {
    void (*forward)(const AttentionShape&, const void* qkv, void* out, float* lse, float* out_amax_to_raise,
                    cudaStream_t);
    void (*backward)(const AttentionShape&, const AttentionBackward&, cudaStream_t);
    int64_t (*workspace_bytes)(const AttentionShape&);
};
AttentionKernels any_gpu_attention(const AttentionShape& shape);  // attention.cu
AttentionKernels hopper_attention(const AttentionShape& shape);   // attention_sm90.cu: BF16, HS 64 or 128

}  // namespace coat::gpu
