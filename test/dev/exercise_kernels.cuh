// exercise_kernels.cuh - solutions of exercises 13 and 14, and typical mistakes, as kernels: on a GPU for
// exercises_gpu.cu, on the CPU for exercises_on_cpu.cpp.
#pragma once
#include "../../dev/exercises/judge.cuh"

namespace {

__device__ float value_of(uint8_t code) {
    __nv_fp8_e4m3 x;
    x.__x = code;
    return float(x);
}
__device__ uint8_t code_of(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }

// --- 13

enum class Transpose {
    Right,
    LeavesOutCutTiles,
    RowsOfCols,
    TilesStay,
    // These are compared on the CPU alone: on a GPU what they do is not defined.
    NoBarrier,
    SomeEndBeforeTheBarrier,
    PastTheEnd
};

template <Transpose HOW>
__global__ void transpose(int rows, int cols, float inverse, const float* x, uint8_t* codes, uint8_t* out) {
    __shared__ uint8_t tile[32][36];
    const int r0 = int(blockIdx.y) * 32, c0 = int(blockIdx.x) * 32, tx = int(threadIdx.x);
    if (HOW == Transpose::LeavesOutCutTiles && (r0 + 32 > rows || c0 + 32 > cols)) return;
    if (HOW == Transpose::SomeEndBeforeTheBarrier && c0 + tx >= cols) return;
    for (int ty = int(threadIdx.y); ty < 32; ty += 8) {
        const int r = r0 + ty, c = c0 + tx;
        const bool inside = r < rows && c < cols;
        if (HOW == Transpose::PastTheEnd && !inside) codes[rows * cols] = 1;
        if (inside) codes[r * cols + c] = tile[ty][tx] = code_of(x[r * cols + c] * inverse);
    }
    if (HOW != Transpose::NoBarrier) __syncthreads();
    for (int ty = int(threadIdx.y); ty < 32; ty += 8) {
        const int r = r0 + tx, c = c0 + ty;
        const int at = HOW == Transpose::RowsOfCols  ? c * cols + r
                       : HOW == Transpose::TilesStay ? (r0 + ty) * rows + c0 + tx
                                                     : c * rows + r;
        if (r < rows && c < cols && at < rows * cols) out[at] = tile[tx][ty];
    }
}

// --- 14

enum class Reduction { InSharedMemory, WithShuffles, NoBarrierInRounds, NoBarrierAfterIt };

// The largest of a number from each of the block's 128 threads.
template <Reduction HOW> __device__ float largest_of_block(float x) {
    __shared__ float all[128];
    if (HOW == Reduction::WithShuffles)
        for (int d = 1; d < 32; d *= 2) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, d));
    all[threadIdx.x] = x;
    __syncthreads();
    for (unsigned half = 64; half > 0; half /= 2) {
        if (threadIdx.x < half) all[threadIdx.x] = fmaxf(all[threadIdx.x], all[threadIdx.x + half]);
        if (HOW != Reduction::NoBarrierInRounds) __syncthreads();
    }
    const float largest = all[0];
    if (HOW != Reduction::NoBarrierAfterIt) __syncthreads();
    return largest;
}

__device__ float load(const Moment& m, int i) {
    const float y = value_of(m.codes[i]), max = m.max[i / 128], k = m.k[i / 128];
    if (y == 0 || max == 0) return 0;
    const float root = exp2f((log2f(fabsf(y)) - log2f(448.0f)) / (2 * k));
    return copysignf(max * root * root, y);
}

template <Reduction HOW> __device__ void store(const Moment& m, int n, float x) {
    const int i = int(blockIdx.x) * 128 + int(threadIdx.x);
    const float magnitude = i < n ? fabsf(x) : 0;
    const float max = largest_of_block<HOW>(magnitude);
    const float min_magnitude = -largest_of_block<HOW>(magnitude == 0 ? -INFINITY : -magnitude);
    const float ratio = log2f(max) - log2f(min_magnitude), range = log2f(448 * 512.0f);
    float k = ratio * 64 > range ? fmaxf(rintf(256 * range / ratio) / 256, 1.0f / 16) : 64;
    if (max == 0) k = 1;
    if (threadIdx.x == 0) {
        m.max[blockIdx.x] = max;
        m.k[blockIdx.x] = k;
    }
    if (i >= n) return;
    const float y = 448 * exp2f(k * (log2f(magnitude) - log2f(max)));
    m.codes[i] = code_of(x == 0 ? 0 : copysignf(y, x));
}

template <Reduction HOW> __global__ void adamw(Step s, int n, const float* g, float* w, Moment m, Moment v) {
    const int i = int(blockIdx.x) * 128 + int(threadIdx.x);
    float new_m = 0, new_v = 0;
    if (i < n) {
        new_m = s.beta1 * load(m, i) + (1 - s.beta1) * g[i];
        new_v = s.beta2 * load(v, i) + (1 - s.beta2) * g[i] * g[i];
        w[i] -= s.lr * (new_m / s.bias1 / (sqrtf(new_v / s.bias2) + s.eps) + s.decay * w[i]);
    }
    store<HOW>(m, n, new_m);
    store<HOW>(v, n, new_v);
}

void transposes(const char* sentence, judge::Transpose* kernel) {
    coat::test::says(sentence, [=] { return judge::quantize_transpose(launched(kernel)); });
}
void updates(const char* sentence, void (*kernel)(Step, int, const float*, float*, Moment, Moment)) {
    coat::test::says(sentence, [=] { return judge::adamw(launched(kernel), 14); });
}

// What the judge says of the kernels in the files of the exercises, which are empty, of typical mistakes, and
// of solutions.
void judge_kernels(judge::Transpose* exercise_13,
                   void (*exercise_14)(Step, int, const float*, float*, Moment, Moment)) {
    if (!coat::test::exercises_are_solved()) {
        transposes("nothing is computed yet", exercise_13);
        updates("nothing is computed yet", exercise_14);
    }
    transposes("about matrices with cut tiles:", transpose<Transpose::LeavesOutCutTiles>);
    transposes("about oblong matrices:", transpose<Transpose::RowsOfCols>);
    transposes("The transpose is wrong", transpose<Transpose::TilesStay>);
    transposes("exercise 13: passed, ", transpose<Transpose::Right>);
    updates("exercise 14: passed, ", adamw<Reduction::InSharedMemory>);
    updates("exercise 14: passed, ", adamw<Reduction::WithShuffles>);
}

}  // namespace
