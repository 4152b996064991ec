// gpu_tools.h - what the bench and the ladders share: arrays in device memory, and the clock.
#pragma once
#include <algorithm>
#include <functional>
#include <vector>

#include "../coat.h"
#include "../gpu/handles.h"
#include "device_buffer.h"

namespace coat::dev {

template <class T> using Buffer = DeviceBuffer<T>;

// Fills the L2 cache with other data, of four times its size. They are only read, so the cache then contains
// nothing that must be written back.
inline void flush_cache() {
    constexpr int64_t COLS = 1024;
    static const int64_t rows = 2 * int64_t{gpu::device_attribute(cudaDevAttrL2CacheSize)} / COLS;
    static const Buffer<uint16_t> other(std::vector<uint16_t>(size_t(rows * COLS)));  // BF16: zeros
    static const Buffer<gpu::TensorScale> scale(1);
    gpu::compute_amax(gpu::lazy_load({other.get(), rows, COLS, PLAIN_BF16}), &scale.get()->amax, nullptr);
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
