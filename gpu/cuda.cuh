// gpu/cuda.cuh - what CUDA hands out, given back when its owner ends: streams, pinned memory, recorded
// graphs.
#pragma once
#include "tensor.cuh"

namespace coat::gpu {

class Stream {
public:
    Stream() {
        check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "Creating a CUDA stream failed");
    }
    ~Stream() { cudaStreamDestroy(stream_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    operator cudaStream_t() const { return stream_; }
    void wait() const { check(cudaStreamSynchronize(stream_), "The GPU failed"); }

private:
    cudaStream_t stream_ = nullptr;
};

// A point in a stream that another stream can wait for.
class Event {
public:
    Event() {
        check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "Creating a CUDA event failed");
    }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    void record(cudaStream_t s) { check(cudaEventRecord(event_, s), "Recording a CUDA event failed"); }
    // What is launched on s from now on waits for the point; not at all if none has been recorded.
    void make_wait(cudaStream_t s) const {
        check(cudaStreamWaitEvent(s, event_, 0), "Waiting for a CUDA event failed");
    }

private:
    cudaEvent_t event_ = nullptr;
};

// Work that is launched again and again with the same arguments. It is recorded as a CUDA graph the first
// time; after that, hundreds of kernels start as one.
class Recording {
public:
    Recording() = default;
    ~Recording() {
        if (graph_) cudaGraphExecDestroy(graph_);  // of a null graph it would leave an error behind
    }
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

    template <class Work>
    void run(cudaStream_t s, Work work) {
        if (!graph_) record(s, work);
        check(cudaGraphLaunch(graph_, s), "Launching a CUDA graph failed");
    }

private:
    cudaGraphExec_t graph_ = nullptr;

    struct Capture {  // ends with its scope, also when an exception leaves it
        const cudaStream_t stream;
        bool open = true;
        cudaGraph_t graph = nullptr;

        explicit Capture(cudaStream_t s) : stream(s) {
            check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                  "Recording a CUDA graph failed");
        }
        ~Capture() {
            if (open)
                cudaStreamEndCapture(stream, &graph),
                    cudaGetLastError();  // an exception is on its way already
            if (graph) cudaGraphDestroy(graph);
        }
        void end() {
            open = false;
            check(cudaStreamEndCapture(stream, &graph), "Recording a CUDA graph failed");
        }
    };

    template <class Work>
    void record(cudaStream_t s, Work work) {
        Capture capture(s);
        work();
        capture.end();
        check(cudaGraphInstantiate(&graph_, capture.graph, 0), "Making a CUDA graph failed");
    }
};

// Host memory that the GPU can copy from and to without waiting.
template <class T>
class Pinned {
public:
    explicit Pinned(int64_t n) {
        check(cudaMallocHost(&data_, n * sizeof(T)), "Allocating pinned memory failed");
    }
    ~Pinned() { cudaFreeHost(data_); }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;
    T* get() const { return data_; }
    T* operator->() const { return data_; }

private:
    T* data_ = nullptr;
};

inline void clear(void* p, int64_t bytes, cudaStream_t s) {
    check(cudaMemsetAsync(p, 0, bytes, s), "Clearing memory failed");
}
inline void copy(void* to, const void* from, int64_t bytes, cudaStream_t s) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, s), "Copying memory failed");
}

}  // namespace coat::gpu
