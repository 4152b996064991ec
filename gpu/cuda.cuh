// gpu/cuda.cuh - what CUDA hands out, given back when its owner ends: streams, events and recorded graphs;
// and functions of libraries.
#pragma once
#include <dlfcn.h>

#include "tensor.cuh"

namespace coat::gpu {

// A handle of CUDA's that `destroy` gives back. (Given back when null, it would leave an error behind.)
template <class T, cudaError_t (*destroy)(T)> struct Owned {
    T handle = nullptr;

    Owned() = default;
    ~Owned() {
        if (handle) destroy(handle);
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;
};

class Stream : Owned<cudaStream_t, cudaStreamDestroy> {
public:
    explicit Stream(bool dry_run) {
        if (!dry_run)
            check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "Creating a CUDA stream failed");
    }
    operator cudaStream_t() const { return handle ? handle : DRY_RUN; }
};

// A point in a stream that another stream can wait for.
class Event : Owned<cudaEvent_t, cudaEventDestroy> {
public:
    void record(cudaStream_t s) {
        if (s == DRY_RUN) return;
        if (!handle)
            check(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming), "Creating a CUDA event failed");
        check(cudaEventRecord(handle, s), "Recording a CUDA event failed");
    }
    // What is launched on s from now on waits for the point; not at all if none has been recorded.
    void make_wait(cudaStream_t s) const {
        if (handle) check(cudaStreamWaitEvent(s, handle, 0), "Waiting for a CUDA event failed");
    }
};

// Work that is launched again and again with the same arguments. It is recorded as a CUDA graph the first
// time; after that, hundreds of kernels start as one.
class CudaGraph : Owned<cudaGraphExec_t, cudaGraphExecDestroy> {
public:
    template <class Work> void run(cudaStream_t s, Work work) {
        if (!handle) {
            Owned<cudaGraph_t, cudaGraphDestroy> graph;
            constexpr char RECORDING[] = "Recording a CUDA graph failed";
            check(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal), RECORDING);
            work();
            check(cudaStreamEndCapture(s, &graph.handle), RECORDING);
            check(cudaGraphInstantiate(&handle, graph.handle, 0), RECORDING);
        }
        check(cudaGraphLaunch(handle, s), "Launching a CUDA graph failed");
    }
};

// A function of type F in a library, which is loaded if it was not before. cure: what helps if it is missing.
template <class F> F* library_function(const std::string& library, const char* name, const char* cure) {
    void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    void* const function = loaded ? dlsym(loaded, name) : nullptr;
    if (!function) throw Error(library, " with ", name, " was not found; ", cure, ".");
    return reinterpret_cast<F*>(function);
}
constexpr char DRIVER[] = "libcuda.so.1", UPDATE[] = "install a newer driver";

inline void clear(void* p, int64_t bytes, cudaStream_t s) {
    if (s != DRY_RUN) check(cudaMemsetAsync(p, 0, bytes, s), "Clearing memory failed");
}
inline void copy(void* to, const void* from, int64_t bytes, cudaStream_t s) {
    if (s == DRY_RUN) return;
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, s), "Copying memory failed");
}

}  // namespace coat::gpu
