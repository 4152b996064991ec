// attention_sm90.cuh - what attention.cu knows of the kernels for Hopper. The caller checks that the GPU is one, that the format is BF16
// and that the head size is 64 or 128.
#pragma once
#include "attention.cuh"

namespace coat::sm90 {

// For attention.cu too. Clears the error, which the next launch would report as its own.
inline void check(cudaError_t e, const char* what) {
    if (e == cudaSuccess) return;
    cudaGetLastError();
    throw Error(std::string("CUDA failed in ") + what + ": " + cudaGetErrorString(e) + ".");
}

void attention_forward(const AttentionShape& shape, const void* qkv, void* out, float* lse, cudaStream_t stream);
void attention_backward(const AttentionShape& shape, const void* qkv, const void* out, const float* lse, const void* dout, void* dqkv,
                        void* workspace, cudaStream_t stream);
size_t attention_workspace(const AttentionShape& shape);

}  // namespace coat::sm90
