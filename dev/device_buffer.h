// device_buffer.h - an array in device memory, for the tests, the bench and the ladders.
#pragma once
#include <algorithm>
#include <vector>

#include "../gpu/cuda.h"

namespace coat::dev {

// An array of n elements, and GUARD bytes after it. At first all bytes are 0xFF. So an element that no kernel
// has written is NaN, in every format that is used here; and a kernel that writes too far changes the guard.
template <class T> class DeviceBuffer {
public:
    explicit DeviceBuffer(size_t n) : size(n) {
        gpu::check(cudaMalloc(&data_, n * sizeof(T) + GUARD), "Allocating GPU memory failed");
        gpu::check(cudaMemset(data_, 0xFF, n * sizeof(T) + GUARD), "Filling GPU memory failed");
    }
    explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size()) { write(host); }
    ~DeviceBuffer() { cudaFree(data_); }
    DeviceBuffer(const DeviceBuffer&) = delete;
    DeviceBuffer& operator=(const DeviceBuffer&) = delete;

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

}  // namespace coat::dev
