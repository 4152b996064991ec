// exercises_gpu.cu - exercises 13 and 14: what the judge says of an empty kernel, of typical mistakes (14 has
// the judge of 7, exercises.cpp), and of a solution; and, without a GPU, that it says so in a sentence.
#include "../../dev/exercises/judge.cuh"

#include "../help/exercises.h"
#include "../help/gpu.h"

namespace e13 {
#include "../../dev/exercises/13-quantize-transpose.cu"
}
namespace e14 {
#include "../../dev/exercises/14-adamw.cu"
}

using namespace coat::test;

namespace {

enum class Transpose { Right, LeavesOutCutTiles, RowsOfCols, TilesStay };

template <Transpose HOW>
__global__ void transpose(int rows, int cols, float inverse, const float* x, uint8_t* codes, uint8_t* out) {
    __shared__ uint8_t tile[32][36];
    const int r0 = int(blockIdx.y) * 32, c0 = int(blockIdx.x) * 32, tx = int(threadIdx.x);
    if (HOW == Transpose::LeavesOutCutTiles && (r0 + 32 > rows || c0 + 32 > cols)) return;
    for (int ty = int(threadIdx.y); ty < 32; ty += 8) {
        const int r = r0 + ty, c = c0 + tx;
        if (r < rows && c < cols) codes[r * cols + c] = tile[ty][tx] = e14::encode(x[r * cols + c] * inverse);
    }
    __syncthreads();
    for (int ty = int(threadIdx.y); ty < 32; ty += 8) {
        const int r = r0 + tx, c = c0 + ty;
        const int at = HOW == Transpose::RowsOfCols  ? c * cols + r
                       : HOW == Transpose::TilesStay ? (r0 + ty) * rows + c0 + tx
                                                     : c * rows + r;
        if (r < rows && c < cols && at < rows * cols) out[at] = tile[tx][ty];
    }
}

__device__ float load(const Moment& m, int i) {
    const float y = e14::decode(m.codes[i]), max = m.max[i / 128], k = m.k[i / 128];
    if (y == 0 || max == 0) return 0;
    const float root = exp2f((log2f(fabsf(y)) - log2f(448.0f)) / (2 * k));
    return copysignf(max * root * root, y);
}

// Stores the moments x of a group, which ends before parameter n.
__device__ void store(const Moment& m, int n, const float* x) {
    const int first = int(blockIdx.x) * 128, count = min(n - first, 128);
    float max = 0, min_nonzero = INFINITY;
    for (int i = 0; i < count; i++) {
        max = fmaxf(max, fabsf(x[i]));
        if (x[i] != 0) min_nonzero = fminf(min_nonzero, fabsf(x[i]));
    }
    const float ratio = log2f(max) - log2f(min_nonzero), range = log2f(448 * 512.0f);
    float k = ratio * 64 > range ? fmaxf(rintf(256 * range / ratio) / 256, 1.0f / 16) : 64;
    if (max == 0) k = 1;
    m.max[blockIdx.x] = max, m.k[blockIdx.x] = k;
    for (int i = 0; i < count; i++) {
        const float y = 448 * exp2f(k * (log2f(fabsf(x[i])) - log2f(max)));
        m.codes[first + i] = e14::encode(x[i] == 0 ? 0 : copysignf(y, x[i]));
    }
}

// One thread updates a group: slow, and short.
__global__ void adamw(Step s, int n, const float* g, float* w, Moment m, Moment v) {
    if (threadIdx.x != 0) return;
    float new_m[128], new_v[128];
    for (int j = 0, i = int(blockIdx.x) * 128; j < 128 && i < n; j++, i++) {
        new_m[j] = s.beta1 * load(m, i) + (1 - s.beta1) * g[i];
        new_v[j] = s.beta2 * load(v, i) + (1 - s.beta2) * g[i] * g[i];
        w[i] -= s.lr * (new_m[j] / s.bias1 / (sqrtf(new_v[j] / s.bias2) + s.eps) + s.decay * w[i]);
    }
    store(m, n, new_m), store(v, n, new_v);
}

void transposes(const char* sentence, judge::Transpose* kernel) {
    says(sentence, [=] { return judge::quantize_transpose(on_gpu(kernel)); });
}
void updates(const char* sentence, void (*kernel)(Step, int, const float*, float*, Moment, Moment)) {
    says(sentence, [=] { return judge::adamw(on_gpu(kernel), 14); });
}

}  // namespace

TEST_CASE("exercises 13 and 14: without a GPU the judge says so" * doctest::skip(gpu_available())) {
    transposes("exercise 13: there is no GPU here that CUDA can use.", e13::quantize_transpose);
    updates("exercise 14: there is no GPU here that CUDA can use.", e14::adamw);
}

GPU_TEST_CASE("exercises 13 and 14: an empty kernel and typical mistakes and a solution") {
    if (!exercises_are_solved()) {
        transposes("nothing is computed yet", e13::quantize_transpose);
        updates("nothing is computed yet", e14::adamw);
    }
    transposes("about matrices with cut tiles:", transpose<Transpose::LeavesOutCutTiles>);
    transposes("about oblong matrices:", transpose<Transpose::RowsOfCols>);
    transposes("The transpose is wrong", transpose<Transpose::TilesStay>);
    transposes("exercise 13: passed, ", transpose<Transpose::Right>);
    updates("exercise 14: passed, ", adamw);
}
