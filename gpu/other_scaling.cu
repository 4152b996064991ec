// gpu/other_scaling.cu - scales and codes of GEMM operands in the recipes that COAT is compared with: te,
// rowwise and deepseek. The quantizers work like that of coat.cu, which part 4 there explains. Only the
// scales are different.
#include "other_scaling.h"

#include "column_sums.cuh"
#include "other_scaling.cuh"
#include "quant_report.h"
#include "quantize.cuh"

namespace coat::gpu {

// ===========================================================================================================
// 1. Scales per row (torchao's rowwise), and in blocks of 1x128 and 128x128 (DeepSeek-V3)
//
// A scale block is a row, or 1x128 or 128x128 elements. Row-major and transposed codes each have scales of
// their own. As with one scale per tensor there are two passes. The first finds the amaxes of all scale
// blocks, and stores each where its scale will be. The second computes the codes. The kernels of both passes
// need more than the 64 registers a thread that TILE_BLOCKS_PER_SM would leave, so a multiprocessor has two
// thread blocks.

constexpr int LOG_128 = 7, ALL = 62;  // a shift by ALL makes 0 of every row or column
static_assert(TILE_SIDE == 1 << LOG_128);
ScaleGrid scale_grid(const Operand& out, bool transposed) {
    const TensorRef& t = out.tensor;
    const Granularity& g = t.format.granularity;
    const void* const codes = transposed ? out.transposed : t.data;
    float* const scales = transposed ? out.transposed_block_scales : out.block_scales;
    const int64_t N = transposed ? t.cols : t.rows, K = transposed ? t.rows : t.cols;
    const bool square = g == PER_128x128;
    // N and K are the sides of the codes, K being the one along which the GEMM sums. For each: log2 of the
    // length of a scale block, and the distance from the scale of a scale block to that of the next. With one
    // scale per row, every column lies in scale block 0 of its row.
    const int shift_n = square ? LOG_128 : 0, shift_k = g == PER_ROW ? ALL : LOG_128;
    const int64_t step_n = square ? round_up(t.format.cols_of_scales(K), 4) : 1, step_k = square ? 1 : N;
    // The rows of the tensor are counted along N, or (transposed) along K.
    return {.scales = codes ? scales : nullptr,
            .row_shift = transposed ? shift_k : shift_n,
            .col_shift = transposed ? shift_n : shift_k,
            .down = transposed ? step_k : step_n,
            .across = transposed ? step_n : step_k,
            .count = block_scale_count(t.format, N, K)};
}

// *amax = max(*amax, the value with these bits). One atomicMax serves all lanes of a warp that have the same
// scale block: mostly those with neighbouring columns.
static __device__ void update_block_amax(float* amax, uint32_t largest_bits) {
    const uint32_t lanes = __match_any_sync(__activemask(), reinterpret_cast<unsigned long long>(amax));
    largest_bits = __reduce_max_sync(lanes, largest_bits);
    if (threadIdx.x % 32 == unsigned(__ffs(lanes) - 1)) raise_amax(amax, largest_bits);
}

// The first pass: the amaxes of the scale blocks of row-major codes, and those of transposed codes. Where
// codes are not wanted, the scales of their grid are null. The 128 rows that a tile has of a column lie in
// one scale block of the transposed codes. So the maxima that the threads have of a column are combined
// first.
template <class Producer>
static __global__ void __launch_bounds__(TILE_THREADS, 2)
    compute_block_amaxes_kernel(Producer producer, ScaleGrid row_major_grid, ScaleGrid transposed_grid) {
    constexpr int PLANES = Producer::PLANES;
    __shared__ uint32_t columns[SIDE_THREADS][TILE_SIDE + 1];
    const ThreadTile thread_tile(blockIdx.y);
    uint32_t largest_of_columns[PLANES][CHUNK_SIZE] = {};
    for_each_row(producer, thread_tile, [&](int i, const ChunkValues(&v)[PLANES], bool live) {
        for (int p = 0; p < PLANES; p++) {
            uint32_t largest_bits = 0;
            for (int j = 0; j < CHUNK_SIZE; j++) {
                // A row outside the tensor is a copy of one inside, so it changes no maximum.
                const uint32_t bits = magnitude_bits(v[p][j]);
                largest_bits = max(largest_bits, bits);
                largest_of_columns[p][j] = max(largest_of_columns[p][j], bits);
            }
            if (row_major_grid.scales && live)
                update_block_amax(
                    row_major_grid.address(thread_tile.row + i, p * producer.plane_cols + thread_tile.col),
                    largest_bits);
        }
    });
    if (!transposed_grid.scales) return;
    combine_columns(
        producer, thread_tile, largest_of_columns, columns, [](uint32_t a, uint32_t b) { return max(a, b); },
        [&](int64_t col, uint32_t largest_bits) {
            raise_amax(transposed_grid.address(int64_t(blockIdx.y) * TILE_SIDE, col), largest_bits);
        });
}

// Amaxes become scales in place. A scale block with a value that is not finite gets the scale NaN, so that no
// code hides this value. amax_to_raise is the amax of the whole tensor.
static __global__ void convert_amaxes_to_scales_kernel(float* scales, int64_t n, float fmax,
                                                       float* amax_to_raise) {
    const int64_t i = thread_of_grid();
    const float amax = i < n ? scales[i] : 0.0f;
    if (i < n) scales[i] = amax < INFINITY ? scale_of(fmax, amax) : __uint_as_float(NAN_BITS);
    raise_amax_by_warp(amax_to_raise, magnitude_bits(amax));
}

// Computes the scales that the codes of x need: of row-major codes, of transposed codes, or of both, as `out`
// says. The amax of the tensor is updated.
static void compute_block_scales(const LazyTensor& x, const Operand& out, cudaStream_t stream) {
    const ScaleGrid grids[2] = {scale_grid(out, /*transposed=*/false), scale_grid(out, /*transposed=*/true)};
    for (const ScaleGrid& g : grids)
        if (g.scales) clear_async(g.scales, g.count * int64_t(sizeof(float)), stream);
    with_producer_of_bf16_or_groups(x, [&](auto producer) {
        launch("compute_block_amaxes", compute_block_amaxes_kernel<decltype(producer)>,
               tile_grid(producer.rows, producer.plane_cols), TILE_THREADS, /*shared_bytes=*/0, stream,
               producer, grids[0], grids[1]);
    });
    for (const ScaleGrid& g : grids)
        if (g.scales)
            launch("convert_amaxes_to_scales", convert_amaxes_to_scales_kernel, block_count(g.count, 256),
                   256, /*shared_bytes=*/0, stream, g.scales, g.count,
                   format_info(out.tensor.format.element_format).fmax, &out.tensor.tensor_scale->amax);
}

// The codes of encode<FORMAT>() in device.cuh, in a format that the kernel learns when it runs.
static __device__ uint2 encode(bool e5m2, const ChunkValues& v, float inverse_scale) {
    if (e5m2) return encode<Format::E5M2>(v, inverse_scale);
    return encode<Format::E4M3>(v, inverse_scale);
}

// The second pass: codes with a scale for each row or block. row_major or transposed may be null.
template <class Producer, bool TRANSPOSED>
static __global__ void __launch_bounds__(TILE_THREADS, 2)
    quantize_in_blocks_kernel(Producer producer, ScaleGrid row_major_grid, ScaleGrid transposed_grid,
                              bool e5m2, uint8_t* row_major, uint8_t* transposed) {
    constexpr int PLANES = Producer::PLANES;
    const ThreadTile thread_tile(blockIdx.y);
    // For the transposed codes: 1 / scale of each of the thread's columns.
    const int64_t first_row = int64_t(blockIdx.y) * TILE_SIDE;
    ChunkValues inverse_of_columns[PLANES] = {};
    if (TRANSPOSED && thread_tile.inside(producer.rows, producer.plane_cols))
        for (int p = 0; p < PLANES; p++)
            for (int j = 0; j < CHUNK_SIZE; j++) {
                const int64_t col = p * producer.plane_cols + thread_tile.col + j;
                inverse_of_columns[p][j] = __frcp_rn(*transposed_grid.address(first_row, col));
            }
    quantize_tile<TRANSPOSED>(
        producer, blockIdx.y, row_major, transposed,
        [&](int row, int plane, const ChunkValues& v, bool live) {
            ChunkCodes chunk{};
            if (live && row_major) {
                const float inverse_of_row = __frcp_rn(*row_major_grid.address(
                    thread_tile.row + row, plane * producer.plane_cols + thread_tile.col));
                chunk.row_major = encode(e5m2, v, inverse_of_row);
            }
            if (TRANSPOSED) {
                ChunkValues scaled;
                for (int j = 0; j < CHUNK_SIZE; j++)
                    scaled[j] = __fmul_rn(v[j], inverse_of_columns[plane][j]);
                chunk.transposed = encode(e5m2, scaled, 1.0f);
            }
            return chunk;
        });
}

void quantize_in_blocks(const LazyTensor& x, const Operand& out, QuantStats* quant_stats,
                        cudaStream_t stream) {
    compute_block_scales(x, out, stream);
    measure_quant_errors(x, out, quant_stats, stream);  // before the codes, which may overwrite x
    with_producer_of_bf16_or_groups(x, [&](auto producer) {
        using P = decltype(producer);
        auto kernel = quantize_in_blocks_kernel<P, /*TRANSPOSED=*/false>;
        if (out.transposed) kernel = quantize_in_blocks_kernel<P, /*TRANSPOSED=*/true>;
        launch("quantize_in_blocks", kernel, tile_grid(producer.rows, producer.plane_cols), TILE_THREADS,
               /*shared_bytes=*/0, stream, producer, scale_grid(out, /*transposed=*/false),
               scale_grid(out, /*transposed=*/true), out.tensor.format.element_format == Format::E5M2,
               static_cast<uint8_t*>(out.tensor.data), static_cast<uint8_t*>(out.transposed));
    });
}

// ===========================================================================================================
// 2. Delayed scaling (te): the scale is known before the values are; their amax is for later steps

// The kernel of quantize_delayed(). While the history is empty, the scale follows just in time from the amax,
// which another kernel has found. Later the scale is that of the history, and this kernel finds the amax.
template <class Producer, bool TRANSPOSED>
static __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS_PER_SM)
    quantize_delayed_kernel(Producer producer, TensorScale* tensor_scale, float fmax, bool e5m2,
                            uint8_t* row_major, uint8_t* transposed) {
    const bool delayed = tensor_scale->delayed_scale > 0;
    const float just_in_time = scale_of(fmax, tensor_scale->amax);
    const float scale = delayed ? tensor_scale->delayed_scale : just_in_time;
    const float inverse_scale = __frcp_rn(scale);
    float largest = 0;
    quantize_tile<TRANSPOSED>(producer, blockIdx.y, row_major, transposed,
                              [&](int /*row*/, int /*plane*/, const ChunkValues& v, bool live) {
                                  // The values of a row that is not live may be wrong: see for_each_row().
                                  if (live) largest = larger_magnitude(largest, v);
                                  return same_in_both(encode(e5m2, v, inverse_scale));
                              });
    if (delayed) raise_amax_by_warp(&tensor_scale->amax, magnitude_bits(largest));
    if (threadIdx.x == 0 && blockIdx.x == 0 && blockIdx.y == 0) tensor_scale->scale = scale;
}

void quantize_delayed(const LazyTensor& x, const Operand& out, QuantStats* quant_stats, cudaStream_t stream) {
    const Format fp8 = out.tensor.format.element_format;
    measure_quant_errors(x, out, quant_stats, stream);  // before the codes, which may overwrite x
    with_producer_of_bf16_or_groups(x, [&](auto producer) {
        using P = decltype(producer);
        auto kernel = quantize_delayed_kernel<P, /*TRANSPOSED=*/false>;
        if (out.transposed) kernel = quantize_delayed_kernel<P, /*TRANSPOSED=*/true>;
        launch("quantize_delayed", kernel, tile_grid(producer.rows, producer.plane_cols), TILE_THREADS,
               /*shared_bytes=*/0, stream, producer, out.tensor.tensor_scale, format_info(fp8).fmax,
               fp8 == Format::E5M2, static_cast<uint8_t*>(out.tensor.data),
               static_cast<uint8_t*>(out.transposed));
    });
}

// A thread has the history of one tensor. It moves each amax on by one entry, beginning at the end.
constexpr int HISTORY_THREADS = 32;
static __global__ void update_delayed_scales_kernel(TensorScale* scales, int64_t n, float* histories,
                                                    int length, float fmax, const uint32_t* skipped,
                                                    uint32_t* empty) {
    const int64_t i = thread_of_grid();
    if (i >= n || *skipped) return;
    TensorScale& entry = scales[i];
    float* const history = histories + i * length;
    uint32_t largest_bits = 0;
    for (int j = length - 1; j >= 0; j--) {
        history[j] = j == 0 ? entry.amax : history[j - 1];
        largest_bits = max(largest_bits, magnitude_bits(history[j]));
    }
    const float largest = __uint_as_float(largest_bits);
    if (largest > 0 && largest < INFINITY) entry.delayed_scale = scale_of(fmax, largest);
    // (entry.scale is for a rank that owns no part of this weight and receives its codes.)
    if (entry.delayed_scale > 0) entry.scale = entry.delayed_scale;
    else atomicAdd(empty, 1u);
}

void update_delayed_scales(const DelayedScales& delayed, const uint32_t* skipped, uint32_t* empty,
                           cudaStream_t stream) {
    launch("update_delayed_scales", update_delayed_scales_kernel, block_count(delayed.n, HISTORY_THREADS),
           HISTORY_THREADS, /*shared_bytes=*/0, stream, delayed.scales, delayed.n, delayed.histories,
           delayed.length, format_info(delayed.fp8).fmax, skipped, empty);
}

}  // namespace coat::gpu
