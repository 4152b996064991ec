// ladder.h - what the ladders share: device memory, random data and the clock.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <vector>

#include "../../gpu/adamw.cuh"
#include "../../reference.h"

namespace ladder {

using namespace coat;
using bf16 = __nv_bfloat16;

template <class T> class Buffer {
public:
    explicit Buffer(size_t n) : size(n) {
        gpu::check(cudaMalloc(&data_, n * sizeof(T)), "Allocating failed");
        poison();
    }
    explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) { write(host); }
    ~Buffer() { cudaFree(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    const size_t size;
    T* get() const { return data_; }
    void fill(int byte) { gpu::check(cudaMemset(data_, byte, size * sizeof(T)), "Clearing failed"); }
    void poison() { fill(0xFF); }  // NaN in every format that the ladders use
    void write(const std::vector<T>& host) {
        gpu::check(cudaMemcpy(data_, host.data(), size * sizeof(T), cudaMemcpyHostToDevice),
                   "Copying failed");
    }
    std::vector<T> read() const {
        std::vector<T> host(size);
        gpu::check(cudaMemcpy(host.data(), data_, size * sizeof(T), cudaMemcpyDeviceToHost),
                   "Copying failed");
        return host;
    }

private:
    T* data_ = nullptr;
};

inline std::vector<uint16_t> random_bf16(size_t n, float std, uint64_t seed = 1) {
    std::vector<uint16_t> x(n);
    for (size_t i = 0; i < n; i++) x[i] = reference::to_bf16(random_weight(seed, 0, i, std));
    return x;
}

// Median time in milliseconds. Before each run the L2 cache is filled with other data that needs no
// write-back.
template <class Run> float milliseconds(int repeats, Run run) {
    static Buffer<uint16_t> other(128 << 20);
    static Buffer<gpu::AmaxAndScale> scale(1);
    other.fill(0x3F);
    cudaEvent_t start, stop;
    gpu::check(cudaEventCreate(&start), "Creating an event failed");
    gpu::check(cudaEventCreate(&stop), "Creating an event failed");
    std::vector<float> times(static_cast<size_t>(repeats));
    run();
    for (float& ms : times) {
        // Reads all
        const int64_t rows = static_cast<int64_t>(other.size) / 1024;
        gpu::amax(gpu::stored({other.get(), nullptr, rows, 1024, BF16}), scale.get(), nullptr);
        gpu::check(cudaEventRecord(start), "Timing failed");
        run();
        gpu::check(cudaEventRecord(stop), "Timing failed");
        gpu::check(cudaEventSynchronize(stop), "Timing failed");
        gpu::check(cudaEventElapsedTime(&ms, start, stop), "Timing failed");
    }
    cudaEventDestroy(start);
    cudaEventDestroy(stop);
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

// Copy bandwidth within the device in bytes per second, reads plus writes.
inline double copy_rate() {
    Buffer<uint8_t> from(1 << 30), to(1 << 30);
    const float ms = milliseconds(20, [&] {
        gpu::check(cudaMemcpyAsync(to.get(), from.get(), from.size, cudaMemcpyDeviceToDevice),
                   "Copying failed");
    });
    return 2e3 * static_cast<double>(from.size) / ms;
}

}  // namespace ladder
