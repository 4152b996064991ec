// 14 - A kernel: AdamW with FP8 moments, a block for each moment group (lesson 9; about 90 minutes)
//
// Without nvcc the CPU runs your kernel, a thread after another, and the judge sees whether its results are
// right. "CUDA on one page", dev/ladders/README.md, has the words.
//
// This is exercise 7 with a block of 128 threads for each moment group: thread t of block b has parameter
// i = 128 b + t, and all threads of the block share max[b] and k[b] of each moment. max and k depend on the
// magnitudes of all threads: find the largest and the smallest in shared memory.
//
// Watch for:
//   Threads beyond n have no parameter, but take part in every __syncthreads().
//   Read the old max[b] and k[b] before one thread overwrites them.
//   Zeros do not count in the smallest magnitude. A moment group of zeros has max = 0, k = 1 and codes 0.
//
// decode(code) and encode(x) are below; use log2f, exp2f, rintf, copysignf for the formulas of exercise 6.
#include "judge.cuh"

__device__ float decode(uint8_t code) {
    __nv_fp8_e4m3 x;
    x.__x = code;
    return float(x);
}
__device__ uint8_t encode(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

__global__ void adamw(Step s, int n, const float* g, float* w, Moment m, Moment v) {
    // your code
}

int main() { return judge::adamw(launched(adamw), 14); }
