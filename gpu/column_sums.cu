// gpu/column_sums.cu - the column sums of a tensor: the gradients of biases and of the weights of norms
// (interface: gpu/column_sums.h).
//
//   1. partial sums are added up
//   2. partial sums of a tensor, for biases (this can wait)
//   3. partial sums of an operand while its codes are made, for biases (this can wait)
#include "../coat.h"
#include "column_sums.cuh"
#include "quant_report.h"
#include "quantize.cuh"

namespace coat::gpu {

// ===========================================================================================================
// 1. Partial sums are added up

// The partial sums are added up in a fixed order. A thread block has 32 columns. Thread (x, y) adds the rows
// y, y + 16, y + 32, ... of column x of the partial sums. Then the 16 sums of a column are added. blockIdx.y
// is 0 for `gradient`, and 1 for `second_gradient`.
constexpr int REDUCE_COLS = 32, REDUCE_ROWS = 16, REDUCE_THREADS = REDUCE_COLS * REDUCE_ROWS;
static __global__ void __launch_bounds__(REDUCE_THREADS)
    reduce_partials_kernel(const float* partials, int64_t rows, int64_t cols, Bf16OrFp32View gradient,
                           Bf16OrFp32View second_gradient) {
    __shared__ float sums[REDUCE_ROWS][REDUCE_COLS];
    const int64_t col = int64_t(blockIdx.x) * REDUCE_COLS + threadIdx.x;
    const float* const column = partials + blockIdx.y * rows * cols + col;
    float sum = 0;
    if (col < cols) {
#pragma unroll 8
        for (int64_t i = threadIdx.y; i < rows; i += REDUCE_ROWS) sum += column[i * cols];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || col >= cols) return;
    float total = 0;
    for (int i = 0; i < REDUCE_ROWS; i++) total += sums[i][threadIdx.x];
    (blockIdx.y == 0 ? gradient : second_gradient).with([&](auto view) {
        const float old_value = view.data[col];
        view.data[col] = static_cast<typename decltype(view)::ComputeElement>(old_value + total);
    });
}

void reduce_partials(const float* partials, int64_t rows, const TensorRef& gradient, cudaStream_t stream,
                     const TensorRef& second_gradient) {
    const int64_t n = gradient.rows * gradient.cols;
    launch("reduce_partials", reduce_partials_kernel,
           dim3(block_count(n, REDUCE_COLS), second_gradient.data ? 2 : 1), dim3(REDUCE_COLS, REDUCE_ROWS),
           /*shared_bytes=*/0, stream, partials, rows, n, bf16_or_fp32(gradient),
           bf16_or_fp32(second_gradient));
}

// ===========================================================================================================
// 2. Partial sums of a tensor

// A column of tiles has COLUMN_PARTIALS thread blocks. Block y adds up the tiles y, y + COLUMN_PARTIALS, and
// so on: a thread adds up its own rows of these tiles, and then store_column_sums() (gpu/column_sums.cuh)
// adds the sums of the threads. The block also finds the amax.
template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS, COLUMN_BLOCKS_PER_SM)
    add_column_sums_kernel(Producer producer, float* partials, float* x_amax_to_raise) {
    constexpr int PLANES = Producer::PLANES;
    __shared__ ColumnSums columns;
    ChunkValues sum[PLANES] = {};
    float largest = 0;
    for (int64_t tile_row = blockIdx.y; tile_row * TILE_SIDE < producer.rows; tile_row += COLUMN_PARTIALS)
        for_each_row(producer, ThreadTile(tile_row), [&](int, const ChunkValues(&v)[PLANES], bool live) {
            for (int p = 0; p < PLANES; p++)
                for (int j = 0; j < CHUNK_SIZE; j++) {
                    if (live) sum[p][j] += v[p][j];
                    largest = larger_magnitude(largest, v[p][j]);
                }
        });
    if (x_amax_to_raise) raise_amax_by_warp(x_amax_to_raise, magnitude_bits(largest));
    store_column_sums(producer, sum, columns, partials);
}

void add_column_sums(const LazyTensor& x, const TensorRef& gradient, float* workspace, float* x_amax_to_raise,
                     cudaStream_t stream) {
    with_producer(x, [&](auto producer) {
        launch("add_column_sums", add_column_sums_kernel<decltype(producer)>,
               column_grid(producer.plane_cols), TILE_THREADS, /*shared_bytes=*/0, stream, producer,
               workspace, x_amax_to_raise);
    });
    reduce_partials(workspace, COLUMN_PARTIALS, gradient, stream);
}

// ===========================================================================================================
// 3. Partial sums of an operand while its codes are made

// Makes the codes of quantize_operand_kernel() (part 4 of coat.cu) and the column sums in one pass. A thread
// block has the tiles that it has in add_column_sums_kernel(), and ends with store_column_sums() as there. So
// the sums have the same bits.
template <class Producer, Format FORMAT>
static __global__ void __launch_bounds__(TILE_THREADS, COLUMN_BLOCKS_PER_SM)
    write_operand_and_add_column_sums_kernel(Producer producer, TensorScale* tensor_scale, uint8_t* row_major,
                                             uint8_t* transposed, float* partials) {
    __shared__ ColumnSums columns;
    const float scale = scale_of(FMAX<FORMAT>, tensor_scale->amax);
    const float inverse_scale = __frcp_rn(scale);
    ChunkValues sum[Producer::PLANES] = {};
    for (int64_t tile_row = blockIdx.y; tile_row * TILE_SIDE < producer.rows; tile_row += COLUMN_PARTIALS) {
        __syncthreads();  // all codes of the tile before have left shared memory
        quantize_tile<true>(producer, tile_row, row_major, transposed,
                            [&](int /*row*/, int plane, const ChunkValues& v, bool live) {
                                if (live) {
                                    for (int j = 0; j < CHUNK_SIZE; j++) sum[plane][j] += v[j];
                                }
                                return same_in_both(encode<FORMAT>(v, inverse_scale));
                            });
    }
    store_column_sums(producer, sum, columns, partials);
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) tensor_scale->scale = scale;
}

// One pass is enough if x is stored in BF16 and is quantized in both forms, with one scale for the tensor.
// This is so for the gradients of COAT's residual stream. Otherwise there are two passes.
void write_operand_and_add_column_sums(const LazyTensor& x, const Operand& out, const TensorRef& gradient,
                                       float* workspace, QuantStats* quant_stats, cudaStream_t stream) {
    const TensorFormat& format = out.tensor.format;
    const bool per_tensor = format.is_fp8() && format.granularity == PER_TENSOR && !out.delayed;
    const bool both_forms = out.tensor.data && out.transposed;
    const bool one_pass = x.op == LazyOp::Load && x.input.format == PLAIN_BF16 && per_tensor && both_forms;
    if (!one_pass) {
        add_column_sums(x, gradient, workspace, nullptr, stream);
        return write_operand(x, out, quant_stats, stream);
    }
    measure_quant_errors(x, out, quant_stats, stream);
    using P = LazyProducer<LazyOp::Load, PlainView<bf16>>;
    auto kernel = write_operand_and_add_column_sums_kernel<P, Format::E4M3>;
    if (format.element_format == Format::E5M2)
        kernel = write_operand_and_add_column_sums_kernel<P, Format::E5M2>;
    launch("write_operand_and_add_column_sums", kernel, column_grid(x.cols), TILE_THREADS, /*shared_bytes=*/0,
           stream, P(x, plain_view<bf16>(x.input.data)), out.tensor.tensor_scale,
           static_cast<uint8_t*>(out.tensor.data), static_cast<uint8_t*>(out.transposed), workspace);
    reduce_partials(workspace, COLUMN_PARTIALS, gradient, stream);
}

}  // namespace coat::gpu
