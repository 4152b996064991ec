// earlier_gpu.h - what all tests of the GPU need: whether there is a GPU, device memory with guard bytes, and
// the layout of scales.
//
// GPU_TEST_CASE("name") declares a test that needs a GPU. Its name begins with "gpu: "; without a GPU doctest
// skips it.
#pragma once
#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "../../reference.h"

namespace coat::test {
// Names of their own beside help/gpu.h, which replaces this file: the tests of AdamW in the new form
// (adamw.cu) have to pass with 20 seeds on a GPU before those that include this one go.
inline namespace earlier {

inline bool gpu_available() {
    static const bool available = [] {
        int n = 0;
        return cudaGetDeviceCount(&n) == cudaSuccess && n > 0;
    }();
    return available;
}

#define GPU_TEST_CASE(name) TEST_CASE("gpu: " name* doctest::skip(!coat::test::gpu_available()))

inline void succeeded(cudaError_t e) { REQUIRE_MESSAGE(e == cudaSuccess, cudaGetErrorString(e)); }

// An array in device memory. Its bytes start as 0xFF, which is NaN in every floating-point format used here,
// so a test notices an element that no kernel has written. Guard bytes follow the array; intact() checks that
// they are unchanged.
template <class T> class Buffer {
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
    void write(const std::vector<T>& host) {
        succeeded(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
    }
    std::vector<T> read() const {
        std::vector<T> host(n_);
        succeeded(cudaMemcpy(host.data(), data_, n_ * sizeof(T), cudaMemcpyDeviceToHost));
        return host;
    }
    bool intact() const {
        std::vector<uint8_t> guard(GUARD);
        const uint8_t* end = static_cast<const uint8_t*>(data_) + n_ * sizeof(T);
        succeeded(cudaMemcpy(guard.data(), end, GUARD, cudaMemcpyDeviceToHost));
        return std::all_of(guard.begin(), guard.end(), [](uint8_t b) { return b == 0xFF; });
    }

private:
    static constexpr size_t GUARD = 256;
    int64_t n_;
    void* data_ = nullptr;
};

template <class T> bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T> std::vector<T> transposed(const std::vector<T>& x, int64_t rows, int64_t cols) {
    std::vector<T> t(x.size());
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) t[c * rows + r] = x[r * cols + c];
    return t;
}

// Per-row, 1x128 and 128x128 scales in the layout that cuBLASLt expects (its manual: "Outer Vector Scaling",
// "128-element 1D and 128x128 2D Block Scaling"). 1x128 scales are transposed: neighbours belong to
// neighbouring rows. Each row of 128x128 scales is padded to a multiple of four; the kernels fill the padding
// with 1.
inline std::vector<float> scales_for_gemm(const reference::Quantized& q) {
    const float* from = reinterpret_cast<const float*>(q.scales.data());
    const int64_t rows = q.quant.scale_rows(q.rows), cols = q.quant.scale_cols(q.cols);
    if (q.quant.granularity == PER_ROW) return std::vector<float>(from, from + rows);
    const bool transpose = q.quant.granularity.rows == 1;  // 1x128 and 1x32
    const int64_t padded = transpose ? cols : round_up(cols, 4);
    std::vector<float> to(static_cast<size_t>(rows * padded), 1.0f);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            to[static_cast<size_t>(transpose ? c * rows + r : r * padded + c)] = from[r * cols + c];
    return to;
}

}  // namespace earlier
}  // namespace coat::test
