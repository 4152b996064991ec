// gpu.h - what tests of the GPU share: whether there is one, and poisoned device memory.
//
// A test case on the GPU is GPU_TEST_CASE("name"): its name begins with "gpu: ", and where there is no GPU it is skipped by name.
#pragma once
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "../reference.h"

namespace coat::test {

inline bool gpu_available() {
    static const bool available = [] {
        int n = 0;
        return cudaGetDeviceCount(&n) == cudaSuccess && n > 0;
    }();
    return available;
}

#define GPU_TEST_CASE(name) TEST_CASE("gpu: " name* doctest::skip(!coat::test::gpu_available()))

inline void succeeded(cudaError_t e) { REQUIRE_MESSAGE(e == cudaSuccess, cudaGetErrorString(e)); }

// Device memory. Fresh memory is all ones, NaN in every format here: an element that nobody writes is found. Behind it lie guard
// bytes, which nobody may write: intact() checks them.
template <class T>
class Buffer {
public:
    explicit Buffer(int64_t n) : n_(n) {
        succeeded(cudaMalloc(&data_, n * sizeof(T) + GUARD));
        succeeded(cudaMemset(data_, 0xFF, n * sizeof(T) + GUARD));
    }
    explicit Buffer(const std::vector<T>& host) : Buffer(static_cast<int64_t>(host.size())) { write(host); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { cudaFree(data_); }

    T* get() const { return static_cast<T*>(data_); }
    void zero() { succeeded(cudaMemset(data_, 0, n_ * sizeof(T))); }
    void write(const std::vector<T>& host) { succeeded(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice)); }
    std::vector<T> read() const {
        std::vector<T> host(n_);
        succeeded(cudaMemcpy(host.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
    bool intact() const {
        std::vector<uint8_t> guard(GUARD);
        succeeded(cudaMemcpy(guard.data(), static_cast<uint8_t*>(data_) + n_ * sizeof(T), GUARD, cudaMemcpyDeviceToHost));
        return std::all_of(guard.begin(), guard.end(), [](uint8_t b) { return b == 0xFF; });
    }

private:
    static constexpr size_t GUARD = 256;
    int64_t n_;
    void* data_ = nullptr;
};

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T>
std::vector<T> transposed(const std::vector<T>& x, int64_t rows, int64_t cols) {
    std::vector<T> t(x.size());
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) t[c * rows + r] = x[r * cols + c];
    return t;
}

// The scales of rows, vectors and squares as cuBLASLt reads them (its manual, "Outer Vector Scaling" and "128-element 1D and 128x128 2D Block
// Scaling"): vectors' with the rows next to each other, and a row of squares' padded to a multiple of four, with 1, as the kernels leave it.
inline std::vector<float> scales_for_products(const reference::Quantized& q) {
    const float* from = reinterpret_cast<const float*>(q.scales.data());
    const int64_t down = q.quant.scale_rows(q.rows), across = q.quant.scale_cols(q.cols);
    if (q.quant.granularity == PER_ROW) return std::vector<float>(from, from + down);
    const bool vectors = q.quant.granularity == PER_1x128;
    const int64_t padded = vectors ? across : round_up(across, 4);
    std::vector<float> to(static_cast<size_t>(down * padded), 1.0f);
    for (int64_t r = 0; r < down; r++)
        for (int64_t c = 0; c < across; c++) to[static_cast<size_t>(vectors ? c * down + r : r * padded + c)] = from[r * across + c];
    return to;
}

}  // namespace coat::test
