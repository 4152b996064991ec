// gpu/handles.h - objects of CUDA that the host makes and destroys: allocations, streams and recorded graphs.
#pragma once
#include "cuda.h"

namespace coat::gpu {

// What CUDA gives for an object that it has made, such as a pointer to an allocation. The destructor calls
// `destroy`, if the handle is not null. (For most objects destroying null is an error, which CUDA keeps until
// the next launch of a kernel reports it.)
template <class Handle, cudaError_t (*destroy)(Handle)> struct UniqueHandle {
    Handle handle = nullptr;

    UniqueHandle() = default;
    ~UniqueHandle() {
        if (handle) destroy(handle);
    }
    UniqueHandle(const UniqueHandle&) = delete;
    UniqueHandle& operator=(const UniqueHandle&) = delete;
};

// A stream: the GPU runs what is put on it, one thing after the other.
class Stream : UniqueHandle<cudaStream_t, cudaStreamDestroy> {
public:
    explicit Stream(bool dry_run) {
        if (!dry_run)
            check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "Creating a CUDA stream failed");
    }
    operator cudaStream_t() const { return handle ? handle : DRY_RUN; }
};

// Work that is launched again and again with the same arguments. The first run() calls work(), and records
// what work() launches as a CUDA graph: hundreds of kernels, which then start as one. Every run(), also the
// first one, launches the graph. So the host goes through work() once. What the host must do each time, such
// as copying tokens, stands outside of work(). (A dry run must not call run(): it has no stream to record.)
class CudaGraph : UniqueHandle<cudaGraphExec_t, cudaGraphExecDestroy> {
public:
    template <class Work> void run(cudaStream_t stream, Work work) {
        if (!handle) {
            UniqueHandle<cudaGraph_t, cudaGraphDestroy> graph;
            constexpr char RECORDING[] = "Recording a CUDA graph failed";
            check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), RECORDING);
            work();
            check(cudaStreamEndCapture(stream, &graph.handle), RECORDING);
            check(cudaGraphInstantiate(&handle, graph.handle, 0), RECORDING);
        }
        check(cudaGraphLaunch(handle, stream), "Launching a CUDA graph failed");
    }
};

}  // namespace coat::gpu
