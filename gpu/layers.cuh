// gpu/layers.cuh - what kernels of gpu/layers.cu share with others: the rotation of RoPE, with
// attention_sm90.cu, and a sum over a block, with gradient_norm.cu.
#pragma once
#include "device.cuh"

namespace coat::gpu {

// RoPE: rotates the point (x, y) by the angle that has this sine and cosine.
inline __device__ void rotate(float& x, float& y, float cosine, float sine) {
    const float old_x = x;
    x = __fmaf_rn(old_x, cosine, __fmul_rn(y, -sine));
    y = __fmaf_rn(y, cosine, __fmul_rn(old_x, sine));
}

// The sum of x over the threads of a block. The order of additions is fixed, and all threads get the same
// bits. A kernel calls it only once: in a second call some threads would write `parts` while others still
// read the result of the first.
template <int THREADS> __device__ double sum_of_block(double x) {
    __shared__ double parts[THREADS];
    parts[threadIdx.x] = x;
    for (int n = THREADS / 2; n > 0; n /= 2) {
        __syncthreads();
        if (threadIdx.x < n) parts[threadIdx.x] += parts[threadIdx.x + n];
    }
    __syncthreads();
    return parts[0];
}

}  // namespace coat::gpu
