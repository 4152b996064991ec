// judge.cuh - launched(kernel) is the kernel of an exercise as a function of arrays on the CPU. With nvcc the
// GPU runs it, which is here; without, the CPU, which is in kernel_on_cpu.h.
#pragma once
#ifndef __CUDACC__
#include "kernel_on_cpu.h"
#else
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <string>

#include "judge.h"

// Arrays of the CPU, copied to the GPU for a kernel, and back when it has ended.
class OnGpu {
public:
    template <class T> T* operator()(const T* host, size_t n) {
        arrays_.push_back({const_cast<T*>(host), nullptr, n * sizeof(T)});
        cudaMalloc(&arrays_.back().gpu, n * sizeof(T));
        cudaMemcpy(arrays_.back().gpu, host, n * sizeof(T), cudaMemcpyHostToDevice);
        return static_cast<T*>(arrays_.back().gpu);
    }
    ~OnGpu() {
        int gpus = 0;
        const bool none = cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0;
        const cudaError_t error = cudaDeviceSynchronize();
        if (none)
            judge::failure =
                "there is no GPU here that CUDA can use. Add NVCC= O=build/cpu to the command: "
                "then the CPU runs your kernel.";
        else if (error != cudaSuccess)
            judge::failure = std::string("the kernel failed: ") + cudaGetErrorString(error) +
                             ". Does a thread read or write outside an array?";
        for (const Array& a : arrays_) {
            if (error == cudaSuccess) cudaMemcpy(a.host, a.gpu, a.bytes, cudaMemcpyDeviceToHost);
            cudaFree(a.gpu);
        }
    }

private:
    struct Array {
        void *host, *gpu;
        size_t bytes;
    };
    std::vector<Array> arrays_;
};

inline auto launched(judge::Transpose* kernel) {
    return [kernel](int rows, int cols, float inverse, const float* x, uint8_t* codes, uint8_t* transposed) {
        OnGpu gpu;
        const size_t n = size_t(rows) * cols;
        kernel<<<dim3((cols + 31) / 32, (rows + 31) / 32), dim3(32, 8)>>>(rows, cols, inverse, gpu(x, n),
                                                                          gpu(codes, n), gpu(transposed, n));
    };
}

inline auto launched(void (*kernel)(Step, int, const float*, float*, Moment, Moment)) {
    return [kernel](const Step& s, int n, const float* g, float* w, const Moment& m, const Moment& v) {
        OnGpu gpu;
        const size_t groups = (n + 127) / 128;
        auto moment = [&](Moment m) { return Moment{gpu(m.codes, n), gpu(m.max, groups), gpu(m.k, groups)}; };
        kernel<<<unsigned(groups), 128>>>(s, n, gpu(g, n), gpu(w, n), moment(m), moment(v));
    };
}
#endif
