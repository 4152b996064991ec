// gpu/column_sums.cu - the column sums of a tensor: the gradients of biases and of the weights of norms
// (interface: gpu/column_sums.h).
#include "column_sums.cuh"

namespace coat::gpu {

// Stage one: partial sums. Block y of a column of tiles adds up the tiles y, y + COLUMN_PARTIALS, and so on.
// A thread adds up its own rows of these tiles. Then store_column_sums() (gpu/column_sums.cuh) adds the sums
// of the threads. The block also finds the amax.
template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS, COLUMN_BLOCKS_PER_SM)
    add_column_sums_kernel(Producer producer, int64_t rows, float* partials, float* x_amax_out) {
    constexpr int PLANES = Producer::PLANES;
    __shared__ ColumnSums columns;
    ChunkValues sum[PLANES] = {};
    float largest = 0;
    for (int64_t tile = blockIdx.y; tile * TILE < rows; tile += COLUMN_PARTIALS)
        for_each_row(producer, TilePlace(tile), rows, [&](int, const ChunkValues(&v)[PLANES], bool live) {
            for (int p = 0; p < PLANES; p++)
                for (int j = 0; j < CHUNK; j++) {
                    if (live) sum[p][j] += v[p][j];
                    largest = larger_magnitude(largest, v[p][j]);
                }
        });
    if (x_amax_out) update_amax_by_warp(x_amax_out, magnitude_bits(largest));
    store_column_sums(producer, sum, columns, partials);
}

// Stage two: the partial sums are added up, in a fixed order. A block has 32 columns. Thread (x, y) adds the
// rows y, y + 16, y + 32, ... of column x of the partial sums. Then the 16 sums of a column are added.
// blockIdx.y is 0 for `gradient`, and 1 for `second`.
constexpr int REDUCE_ROWS = 16;
static __global__ void __launch_bounds__(32 * REDUCE_ROWS)
    reduce_partials_kernel(const float* partials, int64_t rows, int64_t cols, Bf16OrFp32 gradient,
                           Bf16OrFp32 second) {
    __shared__ float sums[REDUCE_ROWS][32];
    const int64_t col = static_cast<int64_t>(blockIdx.x) * 32 + threadIdx.x;
    const float* const column = partials + blockIdx.y * rows * cols + col;
    float sum = 0;
    if (col < cols)  // then the loop
#pragma unroll 8
        for (int64_t i = threadIdx.y; i < rows; i += REDUCE_ROWS) sum += column[i * cols];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || col >= cols) return;
    float total = 0;
    for (int i = 0; i < REDUCE_ROWS; i++) total += sums[i][threadIdx.x];
    (blockIdx.y == 0 ? gradient : second).with([&](auto sum_so_far) {
        const float before = sum_so_far.data[col];
        sum_so_far.data[col] = static_cast<typename decltype(sum_so_far)::ComputeElement>(before + total);
    });
}

void reduce_partials(const float* partials, int64_t rows, const TensorRef& gradient, cudaStream_t stream,
                     const TensorRef& second) {
    const int64_t n = gradient.rows * gradient.cols;
    launch("reduce_partials", reduce_partials_kernel, dim3(block_count(n, 32), second.data ? 2 : 1),
           dim3(32, REDUCE_ROWS), /*shared_bytes=*/0, stream, partials, rows, n, bf16_or_fp32(gradient),
           bf16_or_fp32(second));
}

void add_column_sums(const LazyTensor& x, const TensorRef& gradient, float* workspace, float* x_amax_out,
                     cudaStream_t stream) {
    with_producer(x, [&](auto producer) {
        launch("add_column_sums", add_column_sums_kernel<decltype(producer)>, column_grid(producer.width),
               TILE_THREADS, /*shared_bytes=*/0, stream, producer, x.rows, workspace, x_amax_out);
    });
    reduce_partials(workspace, COLUMN_PARTIALS, gradient, stream);
}

}  // namespace coat::gpu
