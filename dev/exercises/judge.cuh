// judge.cuh - runs the kernel of an exercise on the GPU, as a function of arrays on the CPU.
#pragma once
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "judge.h"

// An array of the CPU, copied to the GPU, and back when the kernel has ended.
template <class T> class OnGpu {
public:
    OnGpu(T* host, size_t n) : host_(host), bytes_(n * sizeof(T)) {
        cudaMalloc(&data_, bytes_);
        cudaMemcpy(data_, host, bytes_, cudaMemcpyHostToDevice);
    }
    OnGpu(const OnGpu&) = delete;
    ~OnGpu() { cudaFree(data_); }
    T* get() const { return static_cast<T*>(data_); }
    void back() const { cudaMemcpy(host_, data_, bytes_, cudaMemcpyDeviceToHost); }

private:
    T* host_;
    size_t bytes_;
    void* data_ = nullptr;
};

inline void require_gpu() {
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0)
        throw std::runtime_error("there is no GPU here that CUDA can use. Exercises 1 to 10 need none.");
}
inline void require_end_of_kernel() {
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess)
        throw std::runtime_error(std::string("the kernel failed: ") + cudaGetErrorString(error) +
                                 ". Does a thread read or write outside an array?");
}

using QuantizeTranspose = void(int, int, float, const float*, uint8_t*, uint8_t*);
inline auto on_gpu(QuantizeTranspose* kernel) {
    return [kernel](int rows, int cols, float inverse, const float* x, uint8_t* codes, uint8_t* transposed) {
        require_gpu();
        const size_t n = size_t(rows) * cols;
        const OnGpu<float> x_gpu(const_cast<float*>(x), n);
        const OnGpu<uint8_t> codes_gpu(codes, n), transposed_gpu(transposed, n);
        const dim3 blocks((cols + 31) / 32, (rows + 31) / 32), threads(32, 8);
        kernel<<<blocks, threads>>>(rows, cols, inverse, x_gpu.get(), codes_gpu.get(), transposed_gpu.get());
        require_end_of_kernel();
        codes_gpu.back(), transposed_gpu.back();
    };
}

using AdamW = void(Step, int, const float*, float*, Moment, Moment);
inline auto on_gpu(AdamW* kernel) {
    return [kernel](const Step& s, int n, const float* g, float* w, Moment m, Moment v) {
        require_gpu();
        const size_t groups = (n + 127) / 128;
        const OnGpu<float> g_gpu(const_cast<float*>(g), n), w_gpu(w, n), m_max(m.max, groups),
            m_k(m.k, groups), v_max(v.max, groups), v_k(v.k, groups);
        const OnGpu<uint8_t> m_codes(m.codes, n), v_codes(v.codes, n);
        kernel<<<unsigned(groups), 128>>>(s, n, g_gpu.get(), w_gpu.get(),
                                          {m_codes.get(), m_max.get(), m_k.get()},
                                          {v_codes.get(), v_max.get(), v_k.get()});
        require_end_of_kernel();
        w_gpu.back(), m_codes.back(), m_max.back(), m_k.back(), v_codes.back(), v_max.back(), v_k.back();
    };
}
