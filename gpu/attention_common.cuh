// attention_common.cuh - what attention.cu and attention_sm90.cu share: dot products, and the online softmax
// on the registers of a tensor core; then the entry points of the Hopper kernels, which attention.cu calls.
#pragma once
#include "attention.cuh"
#include "tensor.cuh"

namespace coat::flash {

using namespace gpu;

constexpr int WARP = 32;

struct Dims {
    int T, NH, NKV, HS;
    float scale;                                                // 1 / sqrt(HS)
    __host__ __device__ int group() const { return NH / NKV; }  // query heads that share a key/value head
};
inline Dims dims(const AttentionShape& s) {
    return {int(s.T), int(s.NH), int(s.NKV), int(s.HS), 1.0f / std::sqrt(float(s.HS))};
}

inline __device__ float2 load_shared2(uint32_t address) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(address));
    return x;
}

// sum + the dot product of two chunks of eight elements
template <class Real>
__device__ float dot(const typename Dense<Real>::Raw& a, const typename Dense<Real>::Raw& b, float sum = 0) {
    Values x, y;
    const Dense<Real> convert{};
    convert.values(a, x);
    convert.values(b, y);
    for (int i = 0; i < CHUNK; i++) sum += x[i] * y[i];
    return sum;
}

// A tensor core spreads its output (16 rows, 2 R columns) over the registers of a warp. Lane l holds,
// at index i, the element of row l / 4 + (i & 2) * 4 and column i / 4 * 8 + l % 4 * 2 + (i & 1). So a
// quad of lanes (four neighbours) holds two rows, 8 apart, and a sum over a row is a sum over a quad.
// mma.sync and wgmma share this layout.
inline __device__ int fragment_col() { return threadIdx.x % 4 * 2; }
inline __device__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
inline __device__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// Causal mask: the score of a key after the query becomes -infinity. `ahead` is the tile's first key
// minus this thread's first query.
template <int R> __device__ void mask(float (&s)[R], int ahead) {
#pragma unroll
    for (int i = 0; i < R; i++)
        if (ahead + i / 4 * 8 + fragment_col() + i % 2 > i / 2 % 2 * 8) s[i] = -INFINITY;
}

// Online softmax of one more tile of keys. The scores s become p = exp(s / sqrt(HS) - max), where max
// is the row's maximum so far. Sums that were made with the old maximum must be multiplied by
// `shrink`; `sum` already is. `scale` is log2(e) / sqrt(HS), because the GPU has an instruction for
// powers of two only. In a row with only masked scores so far, max is -infinity and p is 0.
template <int R>
__device__ void softmax(float (&s)[R], float (&max)[2], float (&sum)[2], float (&shrink)[2], float scale) {
    float top[2] = {max[0], max[1]}, base[2];
#pragma unroll
    for (int i = 0; i < R; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        top[r] = quad_max(top[r]);
        base[r] = top[r] == -INFINITY ? 0.0f : top[r] * scale;
        shrink[r] = fast_exp2(max[r] * scale - base[r]);
        max[r] = top[r];
        sum[r] *= shrink[r];
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        s[i] = fast_exp2(s[i] * scale - base[i / 2 % 2]);
        sum[i / 2 % 2] += s[i];
    }
}

}  // namespace coat::flash

// As in attention.cuh. The caller checks that the GPU is a Hopper GPU, the format BF16 and the head
// size 64 or 128.
namespace coat::sm90 {

void attention_forward(const AttentionShape& shape, const void* qkv, void* out, float* lse,
                       cudaStream_t stream);
void attention_backward(const AttentionShape& shape, const void* qkv, const void* out, const float* lse,
                        const void* dout, void* dqkv, void* workspace, cudaStream_t stream);
size_t attention_workspace(const AttentionShape& shape);

}  // namespace coat::sm90
