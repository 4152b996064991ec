// gpu/attention.h - causal attention on the GPU, forward and backward, as flash attention: no T x T
// matrix is ever stored.
//
// For each sequence and query head, with k and v of its key/value head (NH / NKV query heads share one):
//   s = q k^T / sqrt(HS), keys after the query masked;   p = softmax(s);   out = p v.
// There are two implementations: one for any GPU from Ampere on (BF16 on tensor cores through mma.sync, FP32
// on CUDA cores), and one with Hopper's instructions (wgmma and TMA, attention_sm90.cu; BF16, head sizes 64,
// 128). Both accumulate in FP32 and sum in a fixed order, so the same input always gives the same bits.
#pragma once
#include <cuda_runtime.h>

#include "../model.h"

namespace coat {

struct AttentionShape {
    int64_t B, T;         // sequences and tokens per sequence; any
    int64_t NH, NKV, HS;  // NH is a multiple of NKV; HS is a multiple of 8, up to 128
    Format format;        // of qkv, out and their gradients: F32 or BF16

    int64_t qkv_cols() const { return (NH + 2 * NKV) * HS; }
};

inline AttentionShape attention_shape(const ModelConfig& c, int64_t B, int64_t T, Format format) {
    return {B, T, c.NH, c.NKV, c.HS(), format};
}

// qkv: (B, T, (NH + 2 NKV) HS), columns [q heads | k heads | v heads]. out: (B, T, NH HS). lse: (B, NH, T)
// FP32, the log-sum-exp: the natural logarithm of the sum of exp(s) over keys. Backward recomputes p from it.
// Pointers are 16-byte aligned. A shape that no implementation supports is an Error.
void attention_forward(const AttentionShape& shape, const void* qkv, void* out, float* lse,
                       cudaStream_t stream);

// dout: like out. dqkv: like qkv; every element is written. workspace: attention_workspace(shape)
// bytes of temporary memory.
void attention_backward(const AttentionShape& shape, const void* qkv, const void* out, const float* lse,
                        const void* dout, void* dqkv, void* workspace, cudaStream_t stream);
size_t attention_workspace(const AttentionShape& shape);

// An implementation, for one format and range of head sizes: the functions above call one. Tests and the
// ladder (dev/ladders/attention.cu) call each.
struct AttentionKernels {
    void (*forward)(const AttentionShape&, const void* qkv, void* out, float* lse, cudaStream_t);
    void (*backward)(const AttentionShape&, const void* qkv, const void* out, const float* lse,
                     const void* dout, void* dqkv, void* workspace, cudaStream_t);
    size_t (*workspace)(const AttentionShape&);
};
AttentionKernels any_gpu_attention(const AttentionShape& shape);  // attention.cu
AttentionKernels hopper_attention(const AttentionShape& shape);   // attention_sm90.cu: BF16, HS 64 or 128

}  // namespace coat
