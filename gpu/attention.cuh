// attention.cuh - causal attention on the GPU, forward and backward, flash style: no T x T matrix is ever stored.
//
// For each sequence and query head, with k and v of the key/value head that the query head belongs to (NH / NKV query heads share one):
//   s = q k^T / sqrt(HS), positions after the query's own masked;  p = softmax(s);  out = p v.
// Three tellings of it, chosen by the shape and the GPU: plain CUDA cores (fp32, and head sizes other than 64 and 128), tensor
// cores as every GPU since Ampere has them (mma.sync), and Hopper's own (wgmma and TMA, attention_sm90.cu). All accumulate in FP32 and
// add in a fixed order: the same input gives the same bits.
#pragma once
#include <cuda_runtime.h>

#include "../coat.h"

namespace coat {

struct AttentionShape {
    int64_t B, T;         // any
    int64_t NH, NKV, HS;  // NH a multiple of NKV; HS a multiple of 8 up to 256
    Format format;        // of qkv, out and their gradients: F32 or BF16

    int64_t qkv_cols() const { return (NH + 2 * NKV) * HS; }
};

inline AttentionShape attention_shape(const ModelConfig& c, int64_t B, int64_t T, Format stream) {
    return {B, T, c.NH, c.NKV, c.HS(), stream};
}

// Which telling; Best is the fastest that the shape and the GPU allow, the others are there for tests and benchmarks.
enum class AttentionKernel { Best, Simple, TensorCores, Hopper };

// qkv: (B, T, (NH + 2 NKV) HS), columns [q heads | k heads | v heads]. out: (B, T, NH HS).
// lse: (B, NH, T) FP32, the natural logarithm of the sum of exp(s): what backward needs to make p again. Pointers are 16-byte aligned.
void attention_forward(const AttentionShape& shape, const void* qkv, void* out, float* lse, cudaStream_t stream,
                       AttentionKernel kernel = AttentionKernel::Best);

// dout: like out. dqkv: like qkv; every element is written. workspace: attention_workspace(shape) bytes, contents before and after do not matter.
void attention_backward(const AttentionShape& shape, const void* qkv, const void* out, const float* lse, const void* dout, void* dqkv,
                        void* workspace, cudaStream_t stream, AttentionKernel kernel = AttentionKernel::Best);
size_t attention_workspace(const AttentionShape& shape);

// What softmax is made of in both files: a row of an accumulator lies in a quad of lanes.
inline __device__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
inline __device__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
inline __device__ float exp2_fast(float x) {  // relative error 2^-22; results below 2^-126 are zero
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

}  // namespace coat
