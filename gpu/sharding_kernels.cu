// gpu/sharding_kernels.cu - kernels for several GPUs (gpu/sharding_kernels.h).
#include "sharding_kernels.h"
#include "quantize.cuh"

namespace coat::gpu {

constexpr int THREADS = 256;  // threads of a block

// A thread adds the gradients of a chunk, in the order of the ranks.
static __global__ void __launch_bounds__(THREADS)
    add_gradients_kernel(Bf16OrFp32View sum, bool overwrite, Bf16OrFp32View mine, Bf16OrFp32View received,
                         int64_t n, int64_t rank, int64_t ranks) {
    const int64_t i = thread_of_grid() * CHUNK_SIZE;
    if (i >= n) return;
    ChunkValues total = {};
    if (!overwrite) sum.load_values(i, total);
    for (int64_t r = 0; r < ranks; r++) {
        ChunkValues v;
        if (r == rank) mine.load_values(i, v);
        else received.load_values((r < rank ? r : r - 1) * n + i, v);
        for (int j = 0; j < CHUNK_SIZE; j++) total[j] += v[j];
    }
    sum.store(i, total, true);
}

void add_gradients(void* sum, bool overwrite, const GradientsOfRanks& g, cudaStream_t stream) {
    launch("add_gradients", add_gradients_kernel, block_count(g.n / CHUNK_SIZE, THREADS), THREADS,
           /*shared_bytes=*/0, stream, bf16_or_fp32(sum, g.format), overwrite, bf16_or_fp32(g.mine, g.format),
           bf16_or_fp32(g.received, g.format), g.n, g.rank, g.ranks);
}

// A thread has the amaxes that all ranks have found for one weight.
static __global__ void combine_amaxes_kernel(TensorScale* mine, const TensorScale* entries_of_ranks,
                                             int64_t n, int64_t ranks, float fmax) {
    const int64_t i = thread_of_grid();
    if (i >= n) return;
    uint32_t largest_bits = 0;
    for (int64_t r = 0; r < ranks; r++)
        largest_bits = max(largest_bits, magnitude_bits(entries_of_ranks[r * n + i].amax));
    TensorScale& combined = mine[i];
    combined.amax = __uint_as_float(largest_bits);
    combined.scale = combined.delayed_scale > 0 ? combined.delayed_scale : scale_of(fmax, combined.amax);
}

void combine_amaxes(TensorScale* mine, const TensorScale* entries_of_ranks, int64_t n, int64_t ranks,
                    Format fp8, cudaStream_t stream) {
    launch("combine_amaxes", combine_amaxes_kernel, block_count(n, 128), 128, /*shared_bytes=*/0, stream,
           mine, entries_of_ranks, n, ranks, format_info(fp8).fmax);
}

// Transposes the codes of a tile of a weight. (They have arrived from other ranks row-major, and dgrad reads
// them transposed.)
static __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS_PER_SM)
    transpose_codes_kernel(const uint8_t* row_major, int64_t rows, int64_t cols, uint8_t* transposed) {
    __shared__ __align__(16) TransposeTile tiles[1];
    const ThreadTile thread_tile(blockIdx.y);
    uint2 loaded[THREAD_ROWS / 4][4] = {};
    for (int i = 0; i < THREAD_ROWS; i++)
        if (thread_tile.row + i < rows && thread_tile.col < cols)
            loaded[i / 4][i % 4] =
                *reinterpret_cast<const uint2*>(row_major + (thread_tile.row + i) * cols + thread_tile.col);
    for (int h = 0; h < THREAD_ROWS / 4; h++) tiles[0].write(thread_tile, h, loaded[h]);
    store_transposed(tiles, blockIdx.y, rows, cols, transposed);
}

void transpose_codes(const TensorRef& codes, void* transposed, cudaStream_t stream) {
    launch("transpose_codes", transpose_codes_kernel, tile_grid(codes.rows, codes.cols), TILE_THREADS,
           /*shared_bytes=*/0, stream, static_cast<const uint8_t*>(codes.data), codes.rows, codes.cols,
           static_cast<uint8_t*>(transposed));
}

}  // namespace coat::gpu
