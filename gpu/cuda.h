// gpu/cuda.h - CUDA for the host: how its errors are reported, what the program asks about the GPU, and how
// work is put on a stream. (gpu/handles.h makes streams, and has what else the host needs of CUDA.)
//
// A dry run finds out how much memory a training step takes. It runs the same code, but needs no GPU: its
// stream is DRY_RUN, and what is given to unless_dry_run() is then not called.
#pragma once
#include <cuda_runtime.h>

#include <map>
#include <string>

#include "../common/text.h"

namespace coat::gpu {

// -----------------------------------------------------------------------------------------------------------
// Errors

// Throws Error("<what>: <CUDA's reason>.") and clears the error, so that a later launch is not blamed for it.
inline void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();
    throw Error(what, ": ", cudaGetErrorString(error), ".");
}
inline void require(bool ok, const char* what) {
    if (!ok) throw Error("The GPU code was called wrongly: ", what, ".");
}

// -----------------------------------------------------------------------------------------------------------
// Properties of the GPU

// Returns a property of the GPU in use. Without a GPU, where only a dry run is possible, it returns
// without_gpu: the value of an H100 or H200, or 0 if a dry run does not need the property.
inline int device_attribute(cudaDeviceAttr which, int without_gpu = 0) {
    int device = 0, value = 0;
    if (cudaGetDevice(&device) != cudaSuccess) {
        cudaGetLastError();
        return without_gpu;
    }
    check(cudaDeviceGetAttribute(&value, which, device), "Asking for the GPU's properties failed");
    return value;
}
// The number of multiprocessors. (In names a multiprocessor is an SM.)
inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount, /*without_gpu=*/132); }
// cudaSuccess if this GPU can run the program's kernels, else the reason why it cannot
// (gpu/kernel_status.cu).
cudaError_t kernel_status();

// -----------------------------------------------------------------------------------------------------------
// Work on a stream

// What takes the place of a stream in a dry run.
inline const cudaStream_t DRY_RUN = reinterpret_cast<cudaStream_t>(-1);

// For tests: how often unless_dry_run(), below, was called in a dry run, by the name of the work. Null
// means that nothing is counted.
inline std::map<std::string, int64_t>* dry_run_counts = nullptr;

// Calls f(), which puts work of this name on the stream, or waits for the stream. In a dry run f() is not
// called, only counted.
template <class Function> void unless_dry_run(cudaStream_t stream, const char* name, Function f) {
    if (stream != DRY_RUN) f();
    else if (dry_run_counts) (*dry_run_counts)[name]++;
}

inline void clear_async(void* p, int64_t bytes, cudaStream_t stream) {
    unless_dry_run(stream, "clear",
                   [&] { check(cudaMemsetAsync(p, 0, bytes, stream), "Clearing memory failed"); });
}
inline void copy_async(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
    unless_dry_run(stream, "copy", [&] {
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "Copying memory failed");
    });
}

}  // namespace coat::gpu
