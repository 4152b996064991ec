// gpu/attention_common.cuh - what attention.cu and attention_sm90.cu share: the online softmax of scores that
// lie in registers as a tensor core leaves them, and the kernel that prepares backward.
#pragma once
#include "attention.h"
#include "device.cuh"

namespace coat::flash {

using namespace gpu;

constexpr int WARP = 32;

struct Dims {
    int T, NH, NKV, HS;
    float scale;  // 1 / sqrt(HS)
    Dims(const AttentionShape& s)
        : T(int(s.T)), NH(int(s.NH)), NKV(int(s.NKV)), HS(int(s.HS)), scale(1.0f / std::sqrt(float(s.HS))) {}
    __device__ int heads_per_kv() const { return NH / NKV; }  // the query heads of a key/value head
};

// The value of type V that lies at an address in shared memory. Such addresses have 32 bits.
template <class V> __device__ V& shared(uint32_t address) {
    return *static_cast<V*>(__cvta_shared_to_generic(address));
}

// The address of the shared memory that the launch asked for, rounded up to a multiple of `alignment`.
inline __device__ uint32_t dynamic_shared_memory(uint32_t alignment) {
    extern __shared__ uint8_t all[];
    return (uint32_t(__cvta_generic_to_shared(all)) + alignment - 1) & ~(alignment - 1);
}

// A tensor core spreads its output (16 rows, 2 R columns) over the registers of a warp. Lane l holds in
// register i of R the element of row l / 4 + (i & 2) * 4 and column i / 4 * 8 + l % 4 * 2 + (i & 1). So a
// quad of lanes (four neighbours) holds two rows, 8 apart, and a sum over a row is a sum over a quad.
// mma.sync and wgmma share this layout. Below, r = 0 and 1 are the two rows of a lane. fragment_col() is the
// first column that a lane holds. quad_max() and quad_sum() combine the lanes of a quad.
inline __device__ int fragment_col() { return threadIdx.x % 4 * 2; }
inline __device__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
inline __device__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// The causal mask: the score of a key after the query becomes -infinity. `ahead` is the tile's first key
// minus this thread's first query.
template <int R> __device__ void mask(float (&s)[R], int ahead) {
#pragma unroll
    for (int i = 0; i < R; i++)
        if (ahead + i / 4 * 8 + fragment_col() + i % 2 > i / 2 % 2 * 8) s[i] = -INFINITY;
}

// The online softmax of one more tile of keys. The scores s become p = exp((s - max) / sqrt(HS)), where max
// is the row's largest score so far. Sums that were made with an older max must be multiplied by `shrink`;
// that is done here for `sum`, the sum of p over the lane's columns. `scale` is log2(e) / sqrt(HS), because
// the GPU has an instruction for powers of two only. In a row with only masked scores so far, max is
// -infinity and p is 0.
template <int R>
__device__ void softmax(float (&s)[R], float (&max)[2], float (&sum)[2], float (&shrink)[2], float scale) {
    float top[2] = {max[0], max[1]}, base[2];
    for (int i = 0; i < R; i++) top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    for (int r = 0; r < 2; r++) {
        top[r] = quad_max(top[r]);
        base[r] = top[r] == -INFINITY ? 0.0f : top[r] * scale;
        shrink[r] = fast_exp2(max[r] * scale - base[r]);
        max[r] = top[r];
        sum[r] *= shrink[r];
    }
    for (int i = 0; i < R; i++) {
        s[i] = fast_exp2(s[i] * scale - base[i / 2 % 2]);
        sum[i / 2 % 2] += s[i];
    }
}

// What backward needs of each query beside its row of q, in FP32: lse / ln 2 (infinity past T, so that p is
// zero there), and delta = rowsum(dout * out). They lie at the start of the workspace, by tiles of `queries`
// queries: (B, NH, tiles, 2, queries).
struct QueryStatistics {
    float* data;
    int tiles;  // of a head
    QueryStatistics(const AttentionShape& s, int queries, void* workspace)
        : data(static_cast<float*>(workspace)), tiles(int(ceil_div(s.T, queries))) {}
    int64_t all_tiles(const AttentionShape& s) const { return s.B * s.NH * tiles; }
    dim3 grid(const AttentionShape& s) const { return dim3(unsigned(s.NH), unsigned(tiles), unsigned(s.B)); }
};

// The first kernel of a backward pass: it computes the QueryStatistics. COLS / 8 neighbouring threads share a
// row, and all loads of a thread are in flight together. The kernel also sets `counters` integers to zero, at
// most one for each thread. The grid is (NH, tiles, B).
constexpr int PREPARE_THREADS = 256;
template <class Real, int COLS, int QUERIES>
__global__ void __launch_bounds__(PREPARE_THREADS)
    attention_prepare_kernel(Dims d, QueryStatistics statistics, const void* out, const void* dout,
                             const float* lse, int* counter, int64_t counters) {
    constexpr int LANES = COLS / CHUNK_SIZE, STEP = PREPARE_THREADS / LANES, ROWS = QUERIES / STEP;
    const int h = blockIdx.x, lane = threadIdx.x % LANES, first = threadIdx.x / LANES;
    const int64_t b = blockIdx.z, head = b * d.NH + h, tile = head * statistics.tiles + blockIdx.y;
    const int64_t number = tile * PREPARE_THREADS + threadIdx.x;
    if (number < counters) counter[number] = 0;
    typename PlainView<Real>::StoredChunk o[ROWS], g[ROWS];
    for (int i = 0; i < ROWS; i++) {
        const int t = blockIdx.y * QUERIES + first + i * STEP;
        const int64_t element = ((b * d.T + t) * d.NH + h) * d.HS + lane * CHUNK_SIZE;
        const bool live = t < d.T && lane * CHUNK_SIZE < d.HS;
        o[i] = live ? plain_view<Real>(out).load(element) : typename PlainView<Real>::StoredChunk{};
        g[i] = live ? plain_view<Real>(dout).load(element) : typename PlainView<Real>::StoredChunk{};
    }
    float* const stats = statistics.data + tile * 2 * QUERIES;
    for (int i = 0; i < ROWS; i++) {
        const int row = first + i * STEP, t = blockIdx.y * QUERIES + row;
        ChunkValues x, y;
        PlainView<Real>::unpack(o[i], x);
        PlainView<Real>::unpack(g[i], y);
        float delta = 0;
        for (int j = 0; j < CHUNK_SIZE; j++) delta += x[j] * y[j];
        for (int j = LANES / 2; j > 0; j /= 2) delta += __shfl_xor_sync(ALL_LANES, delta, j);
        if (lane != 0) continue;
        stats[row] = t < d.T ? lse[head * d.T + t] * LOG2_E : INFINITY;
        stats[QUERIES + row] = delta;
    }
}

}  // namespace coat::flash
