// parameters.cu - first values of weights, and of the remainders of their FP32 masters; transposed codes of
// weights (interface: parameters.cuh).
//
// BF16 weight and 16-bit remainder make the FP32 master: bits = (weight << 16) + remainder.
#include "parameters.cuh"

#include "tiles.cuh"

namespace coat::gpu {
constexpr int SIMPLE_THREADS = 256;

// i counts from the slice's first element. The weight is the master rounded to nearest; ties go away from
// zero, so that the remainder fits.
static __global__ void initialize_kernel(Weights w, ShardPlace at, int64_t padded, float std, bool ones,
                                         int64_t used, uint64_t seed, uint64_t index) {
    const int64_t i = int64_t(blockIdx.x) * SIMPLE_THREADS + threadIdx.x;
    if (i >= padded) return;
    const float value = i < at.own.count ? initial(std, ones, used, seed, index, at.own.first + i) : 0.0f;
    const uint32_t bits = __float_as_uint(value);
    if (w.format == Format::F32) static_cast<float*>(w.values)[at.at + i] = value;
    else static_cast<uint16_t*>(w.values)[at.at + i] = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    if (w.remainder) w.remainder[at.at + i] = static_cast<int16_t>(bits & 0xFFFFu);
}

// Codes that exist already, transposed: of weights that were gathered from other GPUs as codes.
static __global__ void __launch_bounds__(TILE_THREADS, TILE_BLOCKS)
    transpose_codes_kernel(const uint8_t* codes, int64_t rows, int64_t cols, uint8_t* transposed) {
    __shared__ __align__(16) TransposeTile tiles[1];
    const TilePlace at;
    uint2 raw[ROWS / 4][4] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++)
        if (at.row + i < rows && at.col < cols)
            raw[i / 4][i % 4] = *reinterpret_cast<const uint2*>(codes + (at.row + i) * cols + at.col);
#pragma unroll
    for (int h = 0; h < ROWS / 4; h++) tiles[0].write(at, h, raw[h]);
    store_transposed(tiles, rows, cols, transposed);
}

void initialize(const Weights& w, const Param& p, const ShardPlace& at, uint64_t index, int64_t used,
                uint64_t seed, cudaStream_t s) {
    const int64_t n = padded(at.own);
    if (n > 0)
        launch("initialize", initialize_kernel, blocks(n, SIMPLE_THREADS), SIMPLE_THREADS, 0, s, w, at, n,
               p.init_std, p.role.weight, used, seed, index);
}

void transpose_codes(const View& codes, void* transposed, cudaStream_t s) {
    launch("transpose_codes", transpose_codes_kernel, tile_grid(codes.rows, codes.cols), TILE_THREADS, 0, s,
           static_cast<const uint8_t*>(codes.data), codes.rows, codes.cols,
           static_cast<uint8_t*>(transposed));
}

}  // namespace coat::gpu
