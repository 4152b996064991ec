// exercises_gpu.cu - exercises 11 and 12: what the judge says of an empty kernel, of typical mistakes (12 has
// the judge of 7, exercises.cpp), and of a solution; and, without a GPU, that it says so in a sentence.
#include "../../dev/exercises/judge.cuh"

#include "../help/exercises.h"
#include "../help/gpu.h"

namespace e11 {
#include "../../dev/exercises/11-quantize-transpose.cu"
}
namespace e12 {
#include "../../dev/exercises/12-adamw.cu"
}

using namespace coat::test;

namespace {

enum class Transpose { Right, LeavesOutCutTiles, RowsOfCols, TilesStay };

template <Transpose HOW>
__global__ void transpose(int rows, int cols, float inverse_scale, const float* x, uint8_t* codes,
                          uint8_t* transposed) {
    __shared__ uint8_t tile[32][36];
    const int r0 = int(blockIdx.y) * 32, c0 = int(blockIdx.x) * 32, tx = int(threadIdx.x);
    if (HOW == Transpose::LeavesOutCutTiles && (r0 + 32 > rows || c0 + 32 > cols)) return;
    for (int ty = int(threadIdx.y); ty < 32; ty += 8) {
        const int r = r0 + ty, c = c0 + tx;
        if (r < rows && c < cols)
            codes[r * cols + c] = tile[ty][tx] = e12::encode(x[r * cols + c] * inverse_scale);
    }
    __syncthreads();
    for (int ty = int(threadIdx.y); ty < 32; ty += 8) {
        const int r = r0 + tx, c = c0 + ty;
        const int at = HOW == Transpose::RowsOfCols  ? c * cols + r
                       : HOW == Transpose::TilesStay ? (r0 + ty) * rows + c0 + tx
                                                     : c * rows + r;
        if (r < rows && c < cols && at < rows * cols) transposed[at] = tile[tx][ty];
    }
}

__device__ float load(const Moment& m, int i) {
    const float y = e12::decode(m.codes[i]), max = m.max[i / 128], k = m.k[i / 128];
    if (y == 0 || max == 0) return 0;
    const float root = exp2f((log2f(fabsf(y)) - log2f(448.0f)) / (2 * k));
    return copysignf(max * root * root, y);
}

// Stores the moment x of every thread of a block; threads without a parameter have i = -1.
__device__ void store(const Moment& m, int i, float x) {
    __shared__ float largest[128], smallest[128];
    const int t = int(threadIdx.x), group = int(blockIdx.x);
    const float magnitude = fabsf(x);
    __syncthreads();  // all threads have read the old max and k, and the arrays of the other moment
    largest[t] = i >= 0 ? magnitude : 0;
    smallest[t] = i >= 0 && x != 0 ? magnitude : INFINITY;
    for (int half = 64; half > 0; half /= 2) {
        __syncthreads();
        if (t < half) {
            largest[t] = fmaxf(largest[t], largest[t + half]);
            smallest[t] = fminf(smallest[t], smallest[t + half]);
        }
    }
    __syncthreads();
    const float max = largest[0], ratio = log2f(max) - log2f(smallest[0]), range = log2f(448 * 512.0f);
    float k = ratio * 64 > range ? fmaxf(rintf(256 * range / ratio) / 256, 1.0f / 16) : 64;
    if (max == 0) k = 1;
    if (t == 0) m.max[group] = max, m.k[group] = k;
    const float y = x == 0 ? 0 : copysignf(448 * exp2f(k * (log2f(magnitude) - log2f(max))), x);
    if (i >= 0) m.codes[i] = e12::encode(y);
    __syncthreads();  // max and k are written
}

__global__ void adamw(Step s, int n, const float* g, float* w, Moment m, Moment v) {
    const int at = int(blockIdx.x * 128 + threadIdx.x), i = at < n ? at : -1;
    float new_m = 0, new_v = 0;
    if (i >= 0) {
        new_m = s.beta1 * load(m, i) + (1 - s.beta1) * g[i];
        new_v = s.beta2 * load(v, i) + (1 - s.beta2) * g[i] * g[i];
    }
    store(m, i, new_m), store(v, i, new_v);
    if (i >= 0) w[i] -= s.lr * (new_m / s.bias1 / (sqrtf(new_v / s.bias2) + s.eps) + s.decay * w[i]);
}

void transposes(const char* sentence, judge::Transpose* kernel) {
    says(sentence, [=] { return judge::quantize_transpose(on_gpu(kernel)); });
}
void updates(const char* sentence, void (*kernel)(Step, int, const float*, float*, Moment, Moment)) {
    says(sentence, [=] { return judge::adamw(on_gpu(kernel), 12); });
}

}  // namespace

TEST_CASE("exercises 11 and 12: without a GPU the judge says so in a sentence" *
          doctest::skip(gpu_available())) {
    transposes("exercise 11: there is no GPU here that CUDA can use.", e11::quantize_transpose);
    updates("exercise 12: there is no GPU here that CUDA can use.", e12::adamw);
}

GPU_TEST_CASE("exercises 11 and 12: an empty kernel, typical mistakes, and a solution") {
    if (!exercises_are_solved()) {
        transposes("nothing is computed yet", e11::quantize_transpose);
        updates("nothing is computed yet", e12::adamw);
    }
    transposes("about matrices with cut tiles:", transpose<Transpose::LeavesOutCutTiles>);
    transposes("about oblong matrices:", transpose<Transpose::RowsOfCols>);
    transposes("The transpose is wrong", transpose<Transpose::TilesStay>);
    transposes("exercise 11: passed, ", transpose<Transpose::Right>);
    updates("exercise 12: passed, ", adamw);
}
