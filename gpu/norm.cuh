// gpu/norm.cuh - what the kernels of norms share: how threads share out rows, sums over a row, and the
// statistics of a row.
//
// How threads share out rows. A team, one warp or several, holds a row in registers. A thread block has one
// team or several: threadIdx.y is the number of a team in its block, threadIdx.x that of a thread in its
// team.
#pragma once
#include "lazy_tensor.cuh"
#include "norm.h"

namespace coat::gpu {

constexpr int MAX_CHUNKS_PER_THREAD = 4;  // of a row
constexpr int MAX_WARPS_PER_TEAM = 16;

// The shape of a thread block for rows of C columns. A team has as few warps as can hold a row.
// (MAX_WARPS_PER_TEAM of them hold 2^14 columns; require_supported() in common/known_models.h allows no
// more.) A block has four teams of one warp, or two of two warps, or one larger team.
inline dim3 block_shape(int64_t C) {
    const int64_t warps = ceil_div(C, 32 * CHUNK_SIZE * MAX_CHUNKS_PER_THREAD);
    return {unsigned(32 * warps), unsigned(std::max<int64_t>(1, 4 / warps))};
}
// The first column of chunk c (0, 1, 2 or 3) of this thread. Neighbouring threads have neighbouring chunks.
inline __device__ uint32_t first_column_of_chunk(int c) {
    return (c * blockDim.x + threadIdx.x) * CHUNK_SIZE;
}

// The sum over a row: x[i] becomes the sum of x[i] over all threads of the team. The order of additions is
// fixed, and all threads get the same bits. All threads of the block call it, because it synchronizes them.
// (COUNT is 1, or 2 where two sums are taken at once.)
//
// The sums of a team's warps pass through a buffer in shared memory. There are two, 0 and 1, and the caller
// says which one to use. If a kernel takes one sum, as for RMSNorm in forward, either will do. Two calls that
// follow each other, as for the mean and the variance of LayerNorm, use different buffers, because some
// thread may still be reading the buffer of the first call when another thread writes its part of the second.
// A third call may use the buffer of the first again: at the __syncthreads() of the second, all threads have
// read it. (Sums with COUNT 2 have two buffers of their own.)
constexpr int SUM_BUFFERS = 2;
template <int COUNT> __device__ void sum_over_row(float (&x)[COUNT], int buffer) {
    __shared__ float buffers[SUM_BUFFERS][COUNT][MAX_WARPS_PER_TEAM];
    float(&parts)[COUNT][MAX_WARPS_PER_TEAM] = buffers[buffer];
    for (int i = 0; i < COUNT; i++) x[i] = sum_of_warp(x[i]);
    const int warps = blockDim.x / 32, first_warp = threadIdx.y * warps;
    if (warps == 1) return;
    if (threadIdx.x % 32 == 0)
        for (int i = 0; i < COUNT; i++) parts[i][first_warp + threadIdx.x / 32] = x[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        x[i] = 0;
        for (int w = 0; w < warps; w++) x[i] += parts[i][first_warp + w];
    }
}
// The same for a single sum, which is returned.
inline __device__ float sum_over_row(float x, int buffer) {
    float sum[1] = {x};
    sum_over_row(sum, buffer);
    return sum[0];
}

// rstd = 1 / sqrt(variance + eps), where the variance is sum_of_squares / C.
inline __device__ float rstd_of(float sum_of_squares, int64_t C, float eps) {
    const float variance = __fdiv_rn(sum_of_squares, float(C));
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(variance, eps)));
}

// The statistics of a row. x: the thread's chunks of the row; a chunk past the end of the row is zeros.
//
// The backward pass (gpu/norm_backward.cu) adds in the same order, so it gets the same bits.
inline __device__ RowStatistics compute_row_statistics(const ChunkValues (&x)[MAX_CHUNKS_PER_THREAD],
                                                       int64_t C, bool rms, float eps) {
    float sum = 0;
    if (!rms) {
        for (int c = 0; c < MAX_CHUNKS_PER_THREAD; c++)
            for (int j = 0; j < CHUNK_SIZE; j++) sum += x[c][j];
        sum = sum_over_row(sum, /*buffer=*/0);
    }
    const float mean = __fdiv_rn(sum, float(C));
    float squares = 0;
    for (int c = 0; c < MAX_CHUNKS_PER_THREAD; c++)
        for (int j = 0; j < CHUNK_SIZE; j++) {
            // Past the end of a row x is 0, but x - mean is not (LayerNorm).
            const float deviation = first_column_of_chunk(c) < C ? __fsub_rn(x[c][j], mean) : 0.0f;
            squares = __fmaf_rn(deviation, deviation, squares);
        }
    return {.mean = mean, .rstd = rstd_of(sum_over_row(squares, /*buffer=*/1), C, eps)};
}

}  // namespace coat::gpu
