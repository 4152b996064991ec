// 13 - On a GPU: quantize a matrix, and its transpose (lesson 5; about 60 minutes)
//
// Backward needs codes in both orders: Hopper's FP8 GEMMs read both operands along the reduction. Write
//   codes[r * cols + c] = transposed[c * rows + r] = encode(x[r * cols + c] * inverse_scale)
//
// A block of 32 x 8 threads does a tile of 32 x 32: tile blockIdx.x of the columns, blockIdx.y of the rows.
// Neighbouring threads use neighbouring addresses: keep codes in shared memory, write both results by rows.
//
// Watch for:
//   Tiles at the right and at the bottom are cut off: rows and cols are no multiples of 32.
//   All threads of a block must have written the tile before one reads it: __syncthreads(), by all of them.
//
// __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3) is the code of x.
#include "judge.cuh"

__global__ void quantize_transpose(int rows, int cols, float inverse_scale, const float* x, uint8_t* codes,
                                   uint8_t* transposed) {
    // your code
}

int main() { return judge::quantize_transpose(on_gpu(quantize_transpose)); }
