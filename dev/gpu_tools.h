// gpu_tools.h - an array in device memory, which the bench, the ladders and the tests have; and the clock of
// the bench and the ladders.
#pragma once
#include <algorithm>
#include <functional>
#include <vector>

#include "../coat.h"
#include "../gpu/handles.h"
#include "../gpu/parameter_kernels.h"

namespace coat::dev {

// An array of n elements, and GUARD bytes after it. At first all bytes are 0xFF. So an element that no kernel
// has written is NaN, in every format that is used here; and a kernel that writes too far changes the guard.
template <class T> class Buffer {
public:
    explicit Buffer(size_t n) : size(n) {
        gpu::check(cudaMalloc(&data_, n * sizeof(T) + GUARD), "Allocating GPU memory failed");
        gpu::check(cudaMemset(data_, 0xFF, n * sizeof(T) + GUARD), "Filling GPU memory failed");
    }
    explicit Buffer(const std::vector<T>& host) : Buffer(host.size()) { write(host); }
    ~Buffer() { cudaFree(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    const size_t size;
    T* get() const { return data_; }
    void fill(int byte) { gpu::check(cudaMemset(data_, byte, size * sizeof(T)), "Clearing failed"); }
    void poison() { fill(0xFF); }
    void write(const std::vector<T>& host) {
        if (host.size() > size) throw Error("The array in GPU memory is too small.");
        gpu::check(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice),
                   "Copying failed");
    }
    std::vector<T> read() const {
        std::vector<T> host(size);
        gpu::check(cudaMemcpy(host.data(), data_, size * sizeof(T), cudaMemcpyDeviceToHost),
                   "Copying failed");
        return host;
    }
    bool guard_is_unchanged() const {
        uint8_t guard[GUARD] = {};
        cudaMemcpy(guard, data_ + size, GUARD, cudaMemcpyDeviceToHost);
        return std::all_of(guard, guard + GUARD, [](uint8_t byte) { return byte == 0xFF; });
    }

private:
    static constexpr size_t GUARD = 256;
    T* data_ = nullptr;
};

// Fills the L2 cache with other data, of four times its size. They are only read, so the cache then contains
// nothing that must be written back.
inline void flush_cache() {
    constexpr int64_t COLS = 1024;
    static const int64_t rows = 2 * int64_t{gpu::device_attribute(cudaDevAttrL2CacheSize)} / COLS;
    static const Buffer<uint16_t> other(std::vector<uint16_t>(size_t(rows * COLS)));  // BF16: zeros
    static const Buffer<gpu::TensorScale> scale(1);
    gpu::compute_amax(gpu::lazy_stored({other.get(), rows, COLS, PLAIN_BF16}), &scale.get()->amax, nullptr);
}

// The median time of run(), which launches work on the GPU and does not wait for it. prepare() comes before
// each run, and is not timed.
inline double median_seconds(
    const std::function<void()>& run, const std::function<void()>& prepare = [] {}) {
    constexpr int REPEATS = 21;
    gpu::UniqueHandle<cudaEvent_t, cudaEventDestroy> starts[REPEATS], stops[REPEATS];
    run();
    for (int i = 0; i < REPEATS; i++) {
        gpu::check(cudaEventCreate(&starts[i].handle), "Creating an event failed");
        gpu::check(cudaEventCreate(&stops[i].handle), "Creating an event failed");
        prepare();
        flush_cache();
        gpu::check(cudaEventRecord(starts[i].handle), "Recording an event failed");
        run();
        gpu::check(cudaEventRecord(stops[i].handle), "Recording an event failed");
    }
    gpu::check(cudaDeviceSynchronize(), "A timed operation failed");
    std::vector<float> ms(REPEATS);
    for (int i = 0; i < REPEATS; i++)
        gpu::check(cudaEventElapsedTime(&ms[i], starts[i].handle, stops[i].handle),
                   "Reading an event failed");
    std::nth_element(ms.begin(), ms.begin() + REPEATS / 2, ms.end());
    return ms[REPEATS / 2] * 1e-3;
}

}  // namespace coat::dev
