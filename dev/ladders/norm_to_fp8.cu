// norm_to_fp8.cu - a ladder: RMSNorm, from saved FP8 groups (E4M3 1x16, BF16 scales) to the FP8 operand of a
// linear layer (E4M3, one scale for the tensor). Each rung makes one change to the rung before it. Its text
// says what changes and why, which numbers were counted, and asks you to predict. The answer to each rung is
// at the end of this file: what limits it, what we predicted, what was measured, and why. `make read` shows
// each answer, folded, below its question. The words of CUDA are explained in README.md, in this folder.
//
//   make build/ladder_norm_to_fp8 && build/ladder_norm_to_fp8                    all rungs
//   build/ladder_norm_to_fp8 5                         rung 5 alone, for instance under a profiler
//
// The program prints the time of each rung for a matrix of 16384 x 4096. Codes are compared with the CPU
// reference: a value that differs in the last bits of FP32 may round to a neighbouring code.
//
// What is computed. 16 neighbouring elements of a row are a *group*, which shares a scale. Four steps:
//
//   dequantize   x = the value of its code, times the scale of its group
//   norm         y = x / rms * weight, where rms is the root of the mean of the row's squares (plus 1e-5)
//   amax         the largest |y| of the whole matrix
//   quantize     the code nearest to y / scale, where scale = amax / 448
//
// The amax must be known before the first code can be written, so there are two passes over the input. The
// question is how many bytes each pass moves.
//
// What limits a rung. An H200 has 132 multiprocessors at about 1.8 GHz. For these 67 million elements
//
//   memory           1.125 bytes in (a code, and 1/16 of a scale), twice, and 1 out, at about 4.27 TB/s,
//                    the rate of a copy                                                            51 us
//   instructions     a multiprocessor starts (issues) 4 a clock, each for 32 lanes:   2.2 us for each that
//                    every element takes. Within 51 us there is room for 23
//   latency          what a load asks for arrives about 0.8 us later. Where each of the 2,048 threads of a
//                    multiprocessor has one element on its way: 200 us for all elements. With two on their
//                    way 100 us, and so on. What is in a cache arrives sooner
//
// To do the sums again: 16384 x 4096 x 3.25 bytes / 4.27e12 = 51 us; 16384 x 4096 / (132 x 4 x 32 x 1.8e9) =
// 2.2 us; 16384 x 4096 / (132 x 2,048) x 0.8 = 200 us. A byte of each element takes 51 / 3.25 = 15.7 us, and
// where a thread loads n elements at once, latency is 200 / n. Kernels that follow each other do not
// overlap, so each of them has its own limit, and their times add up. (README.md says how far the clock may
// differ.)
//
// How many instructions a rung has was counted in its machine code, which cuobjdump -sass
// build/ladder_norm_to_fp8 prints (that of nvcc 12.9; the measured program was built by 13.0): one follows a
// thread from the first line of a kernel to EXIT, along the branches that nearly every thread takes, counts
// a loop as often as it runs, and divides by the elements of the thread.
#include "../../gpu/device.cuh"
#include "neighbours.h"
#include "norm_to_fp8_data.h"

using namespace ladder;

namespace {

// A kernel is given Tensors t (norm_to_fp8_data.h):
//   t.in                     the codes of the input (rows, cols)
//   t.scales                 the scales of its groups (rows, cols / 16)
//   t.weight                 the weight of the norm (cols)
//   t.codes                  the result (rows, cols)
//   t.tensor_scale->amax   the amax of y; at the start it is 0
//   t.x, t.y                 the dequantized and the normalized values (rows, cols), in FP32. Rungs 1 and 2
//                            store both, rung 3 only t.y
//   t.inverse                1 / rms (rows), which rungs 4 to 6 store

constexpr float FMAX = 448.0f;
constexpr unsigned THREADS = 256;  // of a block

// How many blocks it takes if each has this many elements.
unsigned blocks_with(const Tensors& t, int64_t elements) {
    return unsigned(ceil_div(t.rows * t.cols, elements));
}
// The grid if each block has this many elements of a row.
dim3 parts_of_rows(const Tensors& t, int64_t elements) {
    return dim3(unsigned(ceil_div(t.cols, elements)), unsigned(t.rows));
}
unsigned rows_of(const Tensors& t) { return unsigned(t.rows); }

__device__ float decode(uint8_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}
__device__ uint8_t encode(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
__device__ float from_bf16(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
__device__ float input(const Tensors& t, int64_t i) { return decode(t.in[i]) * from_bf16(t.scales[i / 16]); }
__device__ float normalized(float x, float inverse, bf16 weight) {
    return x * inverse * __bfloat162float(weight) + 0.0f;  // the 0 turns -0 into 0
}
__device__ float inverse_rms(float sum_of_squares, int64_t cols) {
    return 1.0f / sqrtf(sum_of_squares / float(cols) + EPS);
}
__device__ float inverse_scale(const Tensors& t) { return __frcp_rn(__fdiv_rn(t.tensor_scale->amax, FMAX)); }
// The number of a thread among all threads that are launched, counted along x.
__device__ int64_t thread_of_grid() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }

// ===========================================================================================================
// Rung 1: a kernel for each operator, a thread for a row
//
// Dequantize, norm, amax, quantize, as a framework would run them one by one. Between them lie tensors in
// FP32. In the norm the lanes of a warp read elements that are a row, 16 KB, apart:
//
//   x       row  0   byte 0 - 3   lane 0           one load: 32 sectors of 32 bytes, of which 4 are used
//           row  1   byte 0 - 3   lane 1
//           ...
//           row 31   byte 0 - 3   lane 31
//
// The other 28 bytes of a sector are used by the next seven loads, if it is still in the cache then.
//
// Counted: 144 instructions for an element, in four kernels, and 22 bytes: 1.125 + 4 to dequantize, 4 + 4 for
// the norm, 4 for the amax, and 4 + 1 to quantize. 16,384 rows are 16,384 threads of the norm, 124 for each
// multiprocessor, which has room for 2,048. Each walks over 4,096 elements twice, and a load takes up to 0.8
// us.
//
// raise_amax_by_warp (gpu/device.cuh) takes the largest magnitude of the 32 lanes, and one lane of the warp
// raises the amax in memory to it (atomicMax). magnitude_bits are the bits of |y|, which have the order of
// the magnitudes.
//
// Loads: dequantize, amax and quantize load one element a thread. In its first walk over a row, the norm
// loads four elements at once. In its second it loads one at a time: for all that the compiler knows, the
// store of y could change the next x.
//
// Predict: what do bytes, instructions and latency take, and which of these decides?
__global__ void dequantize(Tensors t) {
    const int64_t i = thread_of_grid();
    if (i < t.rows * t.cols) t.x[i] = input(t, i);
}
__global__ void norm_by_thread(Tensors t) {
    const int64_t row = thread_of_grid();
    if (row >= t.rows) return;
    const float* x = t.x + row * t.cols;
    float sum = 0;
    for (int64_t c = 0; c < t.cols; c++) sum += x[c] * x[c];
    const float inverse = inverse_rms(sum, t.cols);
    for (int64_t c = 0; c < t.cols; c++) t.y[row * t.cols + c] = normalized(x[c], inverse, t.weight[c]);
}
__global__ void amax(Tensors t) {
    const int64_t i = thread_of_grid();
    const float y = i < t.rows * t.cols ? t.y[i] : 0.0f;
    gpu::raise_amax_by_warp(&t.tensor_scale->amax, gpu::magnitude_bits(y));
}
__global__ void quantize(Tensors t) {
    const int64_t i = thread_of_grid();
    if (i < t.rows * t.cols) t.codes[i] = encode(t.y[i] * inverse_scale(t));
}
void launch_rung1(const Tensors& t) {
    dequantize<<<blocks_with(t, THREADS), THREADS>>>(t);
    norm_by_thread<<<(rows_of(t) + 63) / 64, 64>>>(t);
    amax<<<blocks_with(t, THREADS), THREADS>>>(t);
    quantize<<<blocks_with(t, THREADS), THREADS>>>(t);
}

// ===========================================================================================================
// Rung 2: a block for a row
//
// What changes: the norm. The 256 threads of a block share a row, and neighbours read neighbours:
//
//   x, one row       byte   0 - 3   4 - 7   ...   124 - 127       one load: 4 sectors, all of them used
//   lane                      0       1              31
//
// The sum of squares goes through shuffles within a warp, then through shared memory between the eight warps.
//
// Counted: about 160 instructions for an element, and 22 bytes as before. For the sum a thread loads its 16
// elements at once, and in its second walk one at a time; these come from the cache.
//
// Predict: the time of the four kernels together. Does each of them have the same limit?
__device__ float sum_of_block(float x) {
    __shared__ float warps[THREADS / 32];
    x = gpu::sum_of_warp(x);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (float sum : warps) x += sum;
    return x;
}
__global__ void norm_by_block(Tensors t) {
    const float* x = t.x + blockIdx.x * t.cols;
    float sum = 0;
    for (int64_t c = threadIdx.x; c < t.cols; c += THREADS) sum += x[c] * x[c];
    const float inverse = inverse_rms(sum_of_block(sum), t.cols);
    for (int64_t c = threadIdx.x; c < t.cols; c += THREADS)
        t.y[blockIdx.x * t.cols + c] = normalized(x[c], inverse, t.weight[c]);
}
void launch_rung2(const Tensors& t) {
    dequantize<<<blocks_with(t, THREADS), THREADS>>>(t);
    norm_by_block<<<rows_of(t), THREADS>>>(t);
    amax<<<blocks_with(t, THREADS), THREADS>>>(t);
    quantize<<<blocks_with(t, THREADS), THREADS>>>(t);
}

// ===========================================================================================================
// Rung 3: dequantization, norm and amax in one kernel
//
// What changes: the block of a row dequantizes it itself, and takes the amax of what it stores. A thread
// keeps the largest magnitude of its elements, so that a warp asks for the amax once, and no longer for each
// 32 elements. The block reads its row twice, but the second read comes from the cache: it is 4.6 KB of
// codes and scales.
//
// Counted: 97 instructions for an element, and 10.125 bytes: 1.125 + 4 in the first pass, 4 + 1 in the
// second. For the sum a thread loads four elements at once, and in its second walk one at a time.
//
// Predict: the time.

// Rungs 3 and 4. STORES_Y: y goes to memory, as in rung 3; else 1 / rms does.
template <bool STORES_Y> __global__ void first_pass(Tensors t) {
    const int64_t first = blockIdx.x * t.cols;
    float sum = 0;
    for (int64_t c = threadIdx.x; c < t.cols; c += THREADS) {
        const float x = input(t, first + c);
        sum += x * x;
    }
    const float inverse = inverse_rms(sum_of_block(sum), t.cols);
    float top = 0;
    for (int64_t c = threadIdx.x; c < t.cols; c += THREADS) {
        const float y = normalized(input(t, first + c), inverse, t.weight[c]);
        if (STORES_Y) t.y[first + c] = y;
        top = gpu::larger_magnitude(top, y);
    }
    gpu::raise_amax_by_warp(&t.tensor_scale->amax, gpu::magnitude_bits(top));
    if (!STORES_Y && threadIdx.x == 0) t.inverse[blockIdx.x] = inverse;
}
void launch_rung3(const Tensors& t) {
    first_pass<true><<<rows_of(t), THREADS>>>(t);
    quantize<<<blocks_with(t, THREADS), THREADS>>>(t);
}

// ===========================================================================================================
// Rung 4: the normalized row is not stored
//
// What changes: pass one stores nothing but 1 / rms of each row and the amax. Pass two computes the same
// values again from the codes, with the same operations and so with the same bits, and writes the new codes.
//
//             first pass                     second pass             bytes an element, with scales
//   rung 3    code -> y in FP32, and amax    y in FP32 -> code       1.125 + 4  and  4 + 1       10.125
//   rung 4    code -> amax                   code -> code            1.125      and  1.125 + 1    3.25
//
// Counted: 116 instructions for an element, more than in rung 3, because dequantizing is done three times:
// twice in the first pass, for the sum of squares and for the amax, and once in the second. Codes are loaded
// one byte at a time, with their own address and their own scale each. Now that nothing is stored in between,
// both walks of the first pass load four elements at once; in the second pass a thread has one.
//
// Predict: a third of the bytes. A third of the time?
__global__ void second_pass(Tensors t) {  // grid (cols / 256, rows)
    const int64_t col = thread_of_grid();
    if (col >= t.cols) return;
    const int64_t i = blockIdx.y * t.cols + col;
    const float y = normalized(input(t, i), t.inverse[blockIdx.y], t.weight[col]);
    t.codes[i] = encode(y * inverse_scale(t));
}
void launch_rung4(const Tensors& t) {
    first_pass<false><<<rows_of(t), THREADS>>>(t);
    second_pass<<<parts_of_rows(t, THREADS), THREADS>>>(t);
}

// ===========================================================================================================
// Rung 5: eight elements a thread
//
// What changes: a thread loads 8 codes with one instruction, and one scale for them: half a group. It stores
// 8 codes with one.
//
//   codes            bytes  0 - 7   8 - 15   16 - 23   24 - 31   ...       a load of a warp: 256 bytes
//   lane                      0       1         2         3
//   scales           group        0                   1           ...      two lanes read the same
//
// Counted: 43 instructions for an element. A thread has eight elements on their way.
//
// Predict: the time.
constexpr int CHUNK_SIZE = 8;
constexpr int CHUNKS = 2;  // of a thread: a block of 256 threads has a row of up to 4,096 elements

__device__ void load8(const Tensors& t, int64_t i, float (&x)[CHUNK_SIZE]) {
    // Neighbours (neighbours.h): CHUNK_SIZE neighbouring elements in registers. load() and store() move them
    // with one instruction.
    const Neighbours<uint8_t, CHUNK_SIZE> codes = Neighbours<uint8_t, CHUNK_SIZE>::load(t.in + i);
    const float scale = from_bf16(t.scales[i / 16]);
    for (int j = 0; j < CHUNK_SIZE; j++) x[j] = decode(codes[j]) * scale;
}
__device__ void normalize8(const Tensors& t, int64_t col, float inverse, float (&x)[CHUNK_SIZE]) {
    const Neighbours<bf16, CHUNK_SIZE> weight = Neighbours<bf16, CHUNK_SIZE>::load(t.weight + col);
    for (int j = 0; j < CHUNK_SIZE; j++) x[j] = normalized(x[j], inverse, weight[j]);
}
// Rungs 5 and 6. KEPT: x stays in registers from the sum of squares to the amax.
template <bool KEPT> __global__ void __launch_bounds__(THREADS) first_pass8(Tensors t) {
    const int64_t first = blockIdx.x * t.cols;
    float x[CHUNKS][CHUNK_SIZE] = {};
    float sum = 0;
    for (int c = 0; c < CHUNKS; c++) {
        const int64_t col = (c * THREADS + threadIdx.x) * CHUNK_SIZE;
        if (col < t.cols) load8(t, first + col, x[c]);
        for (float value : x[c]) sum += value * value;
    }
    const float inverse = inverse_rms(sum_of_block(sum), t.cols);
    float top = 0;
    for (int c = 0; c < CHUNKS; c++) {
        const int64_t col = (c * THREADS + threadIdx.x) * CHUNK_SIZE;
        if (col >= t.cols) continue;
        if (!KEPT) load8(t, first + col, x[c]);
        normalize8(t, col, inverse, x[c]);
        top = gpu::larger_magnitude(top, x[c]);
    }
    gpu::raise_amax_by_warp(&t.tensor_scale->amax, gpu::magnitude_bits(top));
    if (threadIdx.x == 0) t.inverse[blockIdx.x] = inverse;
}
__global__ void second_pass8(Tensors t) {  // grid (cols / 8 / 256, rows)
    const int64_t col = thread_of_grid() * CHUNK_SIZE;
    if (col >= t.cols) return;
    const int64_t i = blockIdx.y * t.cols + col;
    float x[CHUNK_SIZE];
    load8(t, i, x);
    normalize8(t, col, t.inverse[blockIdx.y], x);
    const Neighbours<uint8_t, CHUNK_SIZE> codes{gpu::encode<Format::E4M3>(x, inverse_scale(t))};
    codes.store(t.codes + i);
}
void launch_rung5(const Tensors& t) {
    first_pass8<false><<<rows_of(t), THREADS>>>(t);
    second_pass8<<<parts_of_rows(t, THREADS * CHUNK_SIZE), THREADS>>>(t);
}

// ===========================================================================================================
// Rung 6: a row stays in registers
//
// What changes: first_pass8<true>. A thread keeps its 16 elements in FP32 from the sum of squares to the
// amax. It dequantizes them once in pass one, not twice. For that a row must fit into a block: 256 threads x
// 16 elements.
//
// Counted: 37 instructions for an element. Within a block nothing is in flight between the barrier of the sum
// and the end; other blocks of the multiprocessor must fill that time.
//
// Row 7 of the table that the program prints is what trains. There pass one is part of the residual addition
// that comes before it, which has the row at hand. It also adds, makes the groups, takes rows of any length,
// and knows LayerNorm.
//
// Predict: how much faster than rung 5?
void launch_rung6(const Tensors& t) {
    first_pass8<true><<<rows_of(t), THREADS>>>(t);
    second_pass8<<<parts_of_rows(t, THREADS * CHUNK_SIZE), THREADS>>>(t);
}

// ===========================================================================================================
// Your rung
//
// Cover rungs 4 to 6, and write kernels that do all of it in a third of the time of rung 3. Launch them in
// launch_my_kernels(): you may call every function above, and use every tensor. At the start
// t.tensor_scale->amax is 0.
//
//   make build/ladder_norm_to_fp8 && build/ladder_norm_to_fp8 3 8
//
// compares them with the reference and measures them beside rung 3. Hints stand at the end of this file.
[[maybe_unused]] __global__ void my_kernel([[maybe_unused]] Tensors t) {}

void launch_my_kernels([[maybe_unused]] const Tensors& t) {
    // my_kernel<<<blocks, threads>>>(t);
}

}  // namespace

int main(int argc, char** argv) {
    return climb_norm_to_fp8(argc, argv,
                             {{"a kernel for each operator, a thread for a row", launch_rung1},
                              {"a block for a row", launch_rung2},
                              {"dequantization, norm and amax in one kernel", launch_rung3},
                              {"the normalized row is not stored", launch_rung4},
                              {"eight elements a thread", launch_rung5},
                              {"a row stays in registers", launch_rung6},
                              {"norm.cu and coat.cu, which train", AS_IN_TRAINING},
                              {"my_kernel", launch_my_kernels}});
}

// ===========================================================================================================
// Hints for your rung
//
// Read one, and try it, before you read the next.
//
// 1. Which tensor of rung 3 has the most bytes? What is the least that pass two must know of pass one?
// 2. Then count instructions, not bytes. Which of them does a thread do once, however many elements it has?
// 3. How many elements share a scale? How many does a thread need so that it loads each scale once?
// 4. What does pass one of rung 4 compute twice, and where could it stay in between?
// 5. Beyond rung 6: a thread could have a whole group, 16 codes in one load. Does each thread need the
//    division in inverse_scale()?

// ===========================================================================================================
// Measured on an H200
//
// For a matrix of 16384 x 4096. The last column says how many codes of the small matrix are neighbours of the
// reference's code.
//
//   rung                                                           us  % of copy  speed-up  codes
//    1  a kernel for each operator, a thread for a row          2489.4         2%         -  2 by one
//    2  a block for a row                                       1191.1         4%     2.09x  equal
//    3  dequantization, norm and amax in one kernel              348.8        15%     3.41x  equal
//    4  the normalized row is not stored                         332.7        15%     1.05x  equal
//    5  eight elements a thread                                  116.7        44%     2.85x  equal
//    6  a row stays in registers                                 109.6        47%     1.06x  equal
//    7  norm.cu and coat.cu, which train                         132.8        39%     0.83x  equal

// ===========================================================================================================
// Answer to rung 1
//
//   limits      latency 200 + (820 + 410 or more) + 200 + 200 us, memory 22 x 15.7 = 350 us, instructions
//               144 x 2.2 = 320 us
//   predicted   several times 350 us, by latency
//   measured    2,489 us
//
// The norm: 16,384 threads run at once, and each waits 4,096 / 4 times 0.8 us in its first walk, 820 us. In
// its second walk a load is from memory if its sector has left the cache: 410 us if this is so for one of
// eight, 3,280 us if it is so for all. Then the other three kernels: a load for each element. Together it is
// at least 200 + 820 + 410 + 200 + 200 = 1,830 us. (To time each kernel alone, run it under nsys.)

// ===========================================================================================================
// Answer to rung 2
//
//   limits      latency 200 + (200 / 16 + up to 200) + 200 + 200 us, memory 350 us, instructions 160 x 2.2 =
//               350 us
//   predicted   450 to 550 us
//   measured    1,191 us
//
// We had counted bytes and instructions, and nothing else. Three of the four kernels have one load for each
// element, so latency alone is 600 to 800 us. What is left is not explained. One suspect is the amax: its 2.1
// million warps, one for each 32 elements, first load their elements, and then all ask for the same word in
// memory.

// ===========================================================================================================
// Answer to rung 3
//
//   limits      latency (200 / 4 + up to 200) + 200 us, instructions 97 x 2.2 = 210 us, memory 10.125 x 15.7
//               = 160 us
//   predicted   250 to 400 us
//   measured    349 us
//
// Two kernels are gone, and with them 400 us of latency, and a warp asks for the amax once for 512 elements.
// The second kernel, which loads y and stores a code, may well be half of this rung: one like it takes 177
// us in quantize_transpose.cu.

// ===========================================================================================================
// Answer to rung 4
//
//   limits      latency 200 / 4 + up to 200 / 4 + 200 us, instructions 116 x 2.2 = 255 us, memory 51 us
//   predicted   no faster than rung 3
//   measured    333 us, 5% faster
//
// This is the lesson of this ladder: fewer bytes help only where bytes are the limit. Latency of the second
// pass is as before, one element a thread, and there are more instructions. But the rung prepares rung 5.

// ===========================================================================================================
// Answer to rung 5
//
//   limits      instructions 43 x 2.2 = 95 us, latency 200 / 8 + up to 25 + 25 us, memory 51 us
//   predicted   120 to 150 us
//   measured    117 us, 2.9 times as fast as rung 4
//
// What a thread does once is shared by eight elements: addresses, 1 / rms, the scale of its half group. And
// eight elements wait together.

// ===========================================================================================================
// Answer to rung 6
//
//   limits      instructions 37 x 2.2 = 81 us, latency 25 + 25 us, memory 51 us
//   predicted   10% faster than rung 5
//   measured    110 us, 6% faster
//
// Six instructions less for an element. What trains takes 133 us, for it also adds and makes the groups.
