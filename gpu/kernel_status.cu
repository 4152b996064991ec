// gpu/kernel_status.cu - whether this GPU can run the program's kernels, which are compiled for GPUs of one
// kind (interface: gpu/cuda.h).
#include "cuda.h"

namespace coat::gpu {

// What CUDA says of this kernel holds for all: they are compiled with the same flags.
static __global__ void empty_kernel() {}

cudaError_t kernel_status() {
    cudaFuncAttributes unused;
    const cudaError_t error = cudaFuncGetAttributes(&unused, empty_kernel);
    cudaGetLastError();
    return error;
}

}  // namespace coat::gpu
