// gpu/cuda.cuh - what CUDA hands out, given back when its owner ends: streams, pinned memory, recorded
// graphs.
#pragma once
#include "tensor.cuh"

namespace coat::gpu {

// A handle of CUDA's that `destroy` gives back. (Given back when null, it would leave an error behind.)
template <class T, cudaError_t (*destroy)(T)>
class Owned {
public:
    Owned() = default;
    ~Owned() {
        if (handle_) destroy(handle_);
    }
    Owned(const Owned&) = delete;
    Owned& operator=(const Owned&) = delete;

protected:
    T handle_ = nullptr;
};

class Stream : Owned<cudaStream_t, cudaStreamDestroy> {
public:
    Stream() {
        check(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "Creating a CUDA stream failed");
    }
    operator cudaStream_t() const { return handle_; }
    void wait() const { check(cudaStreamSynchronize(handle_), "The GPU failed"); }
};

// A point in a stream that another stream can wait for.
class Event : Owned<cudaEvent_t, cudaEventDestroy> {
public:
    Event() {
        check(cudaEventCreateWithFlags(&handle_, cudaEventDisableTiming), "Creating a CUDA event failed");
    }
    void record(cudaStream_t s) { check(cudaEventRecord(handle_, s), "Recording a CUDA event failed"); }
    // What is launched on s from now on waits for the point; not at all if none has been recorded.
    void make_wait(cudaStream_t s) const {
        check(cudaStreamWaitEvent(s, handle_, 0), "Waiting for a CUDA event failed");
    }
};

// Work that is launched again and again with the same arguments. It is recorded as a CUDA graph the first
// time; after that, hundreds of kernels start as one.
class CudaGraph : Owned<cudaGraphExec_t, cudaGraphExecDestroy> {
public:
    template <class Work>
    void run(cudaStream_t s, Work work) {
        if (!handle_) record(s, work);
        check(cudaGraphLaunch(handle_, s), "Launching a CUDA graph failed");
    }

private:
    struct Capture : Owned<cudaGraph_t, cudaGraphDestroy> {  // ends also when an exception leaves its scope
        const cudaStream_t stream;
        bool open = true;

        explicit Capture(cudaStream_t s) : stream(s) {
            check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                  "Recording a CUDA graph failed");
        }
        ~Capture() {
            if (!open) return;
            cudaStreamEndCapture(stream, &handle_);
            cudaGetLastError();  // an exception is on its way already
        }
        cudaGraph_t end() {
            open = false;
            check(cudaStreamEndCapture(stream, &handle_), "Recording a CUDA graph failed");
            return handle_;
        }
    };

    template <class Work>
    void record(cudaStream_t s, Work work) {
        Capture capture(s);
        work();
        check(cudaGraphInstantiate(&handle_, capture.end(), 0), "Making a CUDA graph failed");
    }
};

// Host memory that the GPU can copy from and to without waiting.
template <class T>
class Pinned {
public:
    explicit Pinned(int64_t n) {
        T* p = nullptr;
        check(cudaMallocHost(&p, n * sizeof(T)), "Allocating pinned memory failed");
        data_.reset(p);
    }
    T* get() const { return data_.get(); }
    T* operator->() const { return data_.get(); }

private:
    struct Free {
        void operator()(T* p) const { cudaFreeHost(p); }
    };
    std::unique_ptr<T, Free> data_;
};

inline void clear(void* p, int64_t bytes, cudaStream_t s) {
    check(cudaMemsetAsync(p, 0, bytes, s), "Clearing memory failed");
}
inline void copy(void* to, const void* from, int64_t bytes, cudaStream_t s) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, s), "Copying memory failed");
}

}  // namespace coat::gpu
