// gpu/cuda.h - CUDA for the host: errors, streams, events and recorded graphs, what is put on a stream, and
// functions of libraries that are found at run time.
//
// A dry run finds out how much memory a training step takes. It runs the same code, but needs no GPU, because
// its stream is DRY_RUN: enqueue(), through which nearly all work is put on a stream, then does nothing.
#pragma once
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <map>
#include <string>

#include "../common/text.h"

namespace coat::gpu {

// -----------------------------------------------------------------------------------------------------------
// Errors, and properties of the GPU

// Throws Error("<what>: <CUDA's reason>.") and clears the error, so that a later launch is not blamed for it.
inline void check(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();
    throw Error(what, ": ", cudaGetErrorString(error), ".");
}
inline void require(bool ok, const char* what) {
    if (!ok) throw Error("The GPU code was called wrongly: ", what, ".");
}

// Returns a property of the GPU in use. Without a GPU, where only a dry run is possible, it returns
// without_gpu. Where a dry run needs the property, without_gpu is its value on an H100 or an H200.
inline int device_attribute(cudaDeviceAttr which, int without_gpu = 0) {
    int device = 0, value = 0;
    if (cudaGetDevice(&device) != cudaSuccess) {
        cudaGetLastError();
        return without_gpu;
    }
    check(cudaDeviceGetAttribute(&value, which, device), "Asking for the GPU's properties failed");
    return value;
}
inline int multiprocessors() { return device_attribute(cudaDevAttrMultiProcessorCount, /*without_gpu=*/132); }
// cudaSuccess if this GPU can run the program's kernels, else the reason why it cannot.
cudaError_t kernel_status();

// -----------------------------------------------------------------------------------------------------------
// Streams

// What takes the place of a stream in a dry run.
inline const cudaStream_t DRY_RUN = reinterpret_cast<cudaStream_t>(-1);

// How often each kind of work would have been put on a stream in a dry run, by its name. It is null, and
// nothing is counted, unless a test asks for it.
inline std::map<std::string, int64_t>* dry_run_counts = nullptr;

// Calls put_work(), which puts work of this name on the stream. In a dry run it is not called, only counted.
template <class PutWork> void enqueue(cudaStream_t stream, const char* name, PutWork put_work) {
    if (stream != DRY_RUN) put_work();
    else if (dry_run_counts) (*dry_run_counts)[name]++;
}

inline void clear_async(void* p, int64_t bytes, cudaStream_t stream) {
    enqueue(stream, "clear", [&] { check(cudaMemsetAsync(p, 0, bytes, stream), "Clearing memory failed"); });
}
inline void copy_async(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
    enqueue(stream, "copy", [&] {
        check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "Copying memory failed");
    });
}

// A handle of CUDA's. The destructor calls `destroy`, if the handle is not null. (Destroying null would be an
// error, which CUDA would keep until the next launch of a kernel reports it.)
template <class Handle, cudaError_t (*destroy)(Handle)> struct UniqueHandle {
    Handle handle = nullptr;

    UniqueHandle() = default;
    ~UniqueHandle() {
        if (handle) destroy(handle);
    }
    UniqueHandle(const UniqueHandle&) = delete;
    UniqueHandle& operator=(const UniqueHandle&) = delete;
};

class Stream : UniqueHandle<cudaStream_t, cudaStreamDestroy> {
public:
    explicit Stream(bool dry_run) {
        if (!dry_run)
            check(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "Creating a CUDA stream failed");
    }
    operator cudaStream_t() const { return handle ? handle : DRY_RUN; }
};

// A point in a stream that another stream can wait for.
class Event : UniqueHandle<cudaEvent_t, cudaEventDestroy> {
public:
    void record(cudaStream_t stream) {
        enqueue(stream, "record an event", [&] {
            if (!handle)
                check(cudaEventCreateWithFlags(&handle, cudaEventDisableTiming),
                      "Creating a CUDA event failed");
            check(cudaEventRecord(handle, stream), "Recording a CUDA event failed");
        });
    }
    // What is put on the stream from now on waits for the point. If none has been recorded, nothing waits.
    void make_wait(cudaStream_t stream) const {
        if (handle) check(cudaStreamWaitEvent(stream, handle, 0), "Waiting for a CUDA event failed");
    }
};

// Work that is launched again and again with the same arguments. The first run() calls work(), and records
// what work() launches as a CUDA graph: hundreds of kernels, which then start as one. Every run(), the first
// one too, launches the graph. A dry run does not call run(), because it has no stream to record.
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

// -----------------------------------------------------------------------------------------------------------
// Libraries that the program does not need in order to start

// A function of type F in a library, which is loaded if it was not before. cure: what helps if it is missing.
template <class F> F* library_function(const std::string& library, const char* name, const char* cure) {
    void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    void* const function = loaded ? dlsym(loaded, name) : nullptr;
    if (!function) throw Error(library, " with ", name, " was not found; ", cure, ".");
    return reinterpret_cast<F*>(function);
}
// The library of the CUDA driver, and the cure for a function that it lacks.
inline constexpr char DRIVER[] = "libcuda.so.1", CURE_OLD_DRIVER[] = "install a newer driver";

}  // namespace coat::gpu
