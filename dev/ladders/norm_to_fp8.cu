// norm_to_fp8.cu - a ladder: RMSNorm, from saved FP8 groups (E4M3 1x16, BF16 scales) to the FP8 operand of a
// linear layer (E4M3, one scale for the tensor). Each rung makes one change to the rung before it. Its text
// says what changes and why, which numbers were counted, and asks you to predict. What limits each rung, our
// own predictions and the measured times are at the end of this file. The words of CUDA are explained in
// README.md, in this folder.
//
//   make build/ladder_norm_to_fp8 && build/ladder_norm_to_fp8                    all rungs
//   build/ladder_norm_to_fp8 5                         rung 5 alone, for instance under a profiler
//
// The program prints the time of each rung for a matrix of 16384 x 4096. Codes are compared with the CPU
// reference: a value that differs in the last bits of FP32 may round to a neighbouring code.
//
// The amax of a tensor must be known before its first code can be written, so there are two passes over the
// input. The question is how many bytes each pass moves.
//
// What limits a rung. An H200 has 132 multiprocessors at about 1.8 GHz. For these 67 million elements
//
//   memory           1.125 bytes in (a code, and 1/16 of a scale), twice, and 1 out, at about 4.27 TB/s,
//                    the rate of a copy                                                            51 us
//   instructions     a multiprocessor issues 4 a clock, each for 32 lanes:   2.2 us for each that every
//                    element takes. Within 51 us there is room for 23
//
// To do the sums again: 16384 x 4096 x 3.25 bytes / 4.27e12 = 51 us; 16384 x 4096 / (132 x 4 x 32 x 1.8e9) =
// 2.2 us. At 1.8 GHz a rung takes at least the larger of the two. (README.md says how far the clock may
// differ.)
//
// How many instructions a rung has was counted in its machine code, which cuobjdump -sass
// build/ladder_norm_to_fp8 prints (here that of nvcc 12.9): one follows a thread from the first line of a
// kernel to EXIT, along the branches that nearly every thread takes, counts a loop as often as it runs, and
// divides by the elements of the thread.
#include "ladder.h"

using namespace ladder;

namespace {

// What a kernel is given. cols is a multiple of 16.
struct Tensors {
    int64_t rows, cols;
    const uint8_t* in;        // (rows, cols) codes
    const uint16_t* scales;   // (rows, cols / 16) BF16
    const bf16* weight;       // (cols)
    float* x;                 // (rows, cols) the input, dequantized: for rungs 1 and 2
    float* y;                 // (rows, cols) the normalized values: for rungs 1 to 3
    float* inverse;           // (rows) 1 / rms: from rung 4 on
    gpu::TensorScale* scale;  // of the output; its amax is 0 at the start
    uint8_t* codes;           // (rows, cols) the output
};
constexpr float EPS = 1e-5f;
constexpr float FMAX = 448.0f;
constexpr unsigned THREADS = 256;

__device__ float decode(uint8_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}
__device__ uint8_t encode(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
__device__ float from_bf16(uint16_t bits) { return __uint_as_float(static_cast<uint32_t>(bits) << 16); }
__device__ float input(const Tensors& t, int64_t i) { return decode(t.in[i]) * from_bf16(t.scales[i / 16]); }
__device__ float normalized(float x, float inverse, bf16 weight) {
    return x * inverse * __bfloat162float(weight) + 0.0f;  // the 0 turns -0 into 0
}
__device__ float inverse_rms(float sum_of_squares, int64_t cols) {
    return 1.0f / sqrtf(sum_of_squares / static_cast<float>(cols) + EPS);
}
__device__ float inverse_scale(const Tensors& t) { return __frcp_rn(__fdiv_rn(t.scale->amax, FMAX)); }
__device__ int64_t thread_of_grid() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }

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
// Counted: 144 instructions for an element, in four kernels, and 22 bytes. 16,384 rows are 16,384 threads of
// the norm, 124 for each multiprocessor, which has room for 2,048. Each walks over 4,096 elements twice, and
// a load takes up to 0.8 us.
//
// Predict: what do bytes and instructions take, and is it one of these that decides?
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
    gpu::update_amax_by_warp(&t.scale->amax, gpu::magnitude_bits(y));
}
__global__ void quantize(Tensors t) {
    const int64_t i = thread_of_grid();
    if (i < t.rows * t.cols) t.codes[i] = encode(t.y[i] * inverse_scale(t));
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
// Counted: about 160 instructions for an element, and 22 bytes (1.125 + 4, 4 + 4, 4, 4 + 1) as before.
//
// Predict: the times of both resources. Four kernels follow each other: does each of them have the same
// limit?
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

// ===========================================================================================================
// Rung 3: dequantization, norm and amax in one kernel
//
// What changes: the block of a row dequantizes it itself, and takes the amax of what it stores. The second
// read of a row comes from the cache: it is 4.6 KB of codes and scales.
//
// Counted: 97 instructions for an element, and 10 bytes (1.125 + 4, 4 + 1).
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
    gpu::update_amax_by_warp(&t.scale->amax, gpu::magnitude_bits(top));
    if (!STORES_Y && threadIdx.x == 0) t.inverse[blockIdx.x] = inverse;
}

// ===========================================================================================================
// Rung 4: the normalized row is not stored
//
// What changes: pass one stores nothing but 1 / rms of each row and the amax. Pass two computes the same
// values again from the codes, with the same operations and so with the same bits, and writes the new codes.
//
//   rung 3     codes -> 4 bytes FP32 -> memory -> 4 bytes FP32 -> code       10 bytes an element
//   rung 4     codes -> amax,  codes -> code                                  3.25 bytes an element
//
// Counted: 116 instructions for an element, more than in rung 3, because dequantizing is done three times.
// Codes are loaded one byte at a time, with their own address and their own scale each.
//
// Predict: a third of the bytes. A third of the time?
__global__ void second_pass(Tensors t) {  // grid (cols / 256, rows)
    const int64_t col = thread_of_grid();
    if (col >= t.cols) return;
    const int64_t i = blockIdx.y * t.cols + col;
    const float y = normalized(input(t, i), t.inverse[blockIdx.y], t.weight[col]);
    t.codes[i] = encode(y * inverse_scale(t));
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
// Counted: 43 instructions for an element.
//
// Predict: the time.
constexpr int CHUNK = 8;
constexpr int CHUNKS = 2;  // of a thread: a block of 256 threads has a row of up to 4,096 elements

__device__ void load8(const Tensors& t, int64_t i, float (&x)[CHUNK]) {
    const Piece<uint8_t, CHUNK> codes = Piece<uint8_t, CHUNK>::load(t.in + i);
    const float scale = from_bf16(t.scales[i / 16]);
    for (int j = 0; j < CHUNK; j++) x[j] = decode(codes[j]) * scale;
}
__device__ void normalize8(const Tensors& t, int64_t col, float inverse, float (&x)[CHUNK]) {
    const Piece<bf16, CHUNK> weight = Piece<bf16, CHUNK>::load(t.weight + col);
    for (int j = 0; j < CHUNK; j++) x[j] = normalized(x[j], inverse, weight[j]);
}
// Rungs 5 and 6. KEPT: x stays in registers from the sum of squares to the amax.
template <bool KEPT> __global__ void __launch_bounds__(THREADS) first_pass8(Tensors t) {
    const int64_t first = blockIdx.x * t.cols;
    float x[CHUNKS][CHUNK] = {};
    float sum = 0;
    for (int c = 0; c < CHUNKS; c++) {
        const int64_t col = (c * THREADS + threadIdx.x) * CHUNK;
        if (col < t.cols) load8(t, first + col, x[c]);
        for (float value : x[c]) sum += value * value;
    }
    const float inverse = inverse_rms(sum_of_block(sum), t.cols);
    float top = 0;
    for (int c = 0; c < CHUNKS; c++) {
        const int64_t col = (c * THREADS + threadIdx.x) * CHUNK;
        if (col >= t.cols) continue;
        if (!KEPT) load8(t, first + col, x[c]);
        normalize8(t, col, inverse, x[c]);
        top = gpu::larger_magnitude(top, x[c]);
    }
    gpu::update_amax_by_warp(&t.scale->amax, gpu::magnitude_bits(top));
    if (threadIdx.x == 0) t.inverse[blockIdx.x] = inverse;
}
__global__ void second_pass8(Tensors t) {  // grid (cols / 8 / 256, rows)
    const int64_t col = thread_of_grid() * CHUNK;
    if (col >= t.cols) return;
    const int64_t i = blockIdx.y * t.cols + col;
    float x[CHUNK];
    load8(t, i, x);
    normalize8(t, col, t.inverse[blockIdx.y], x);
    const Piece<uint8_t, CHUNK> codes{gpu::encode<Format::E4M3>(x, inverse_scale(t))};
    codes.store(t.codes + i);
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
// Predict: how much faster than rung 5? In training, pass one is part of the residual addition that comes
// before it, which has the row at hand. The row of the table below this one is that: it also adds, makes the
// groups, takes rows of any length, and knows LayerNorm.

// ===========================================================================================================
// Your rung
//
// Cover rungs 4 to 6, and write kernels that do all of it in a third of the time of rung 3. Launch them in
// launch_my_kernels(): you may call every function above, and use every tensor. t.scale->amax is 0 at the
// start.
//
//   make build/ladder_norm_to_fp8 && build/ladder_norm_to_fp8 3 8
//
// compares them with the reference and measures them beside rung 3. Hints stand at the end of this file.
[[maybe_unused]] __global__ void my_kernel([[maybe_unused]] Tensors t) {}

void launch_my_kernels([[maybe_unused]] const Tensors& t) {
    // my_kernel<<<blocks, threads>>>(t);
}

// ===========================================================================================================
// The program: data, the comparison with the CPU reference, and the table

constexpr int FROM_TRAINING = 6, MINE = 7;
const std::vector<const char*> RUNGS = {"a kernel for each operator, a thread for a row",
                                        "a block for a row",
                                        "dequantization, norm and amax in one kernel",
                                        "the normalized row is not stored",
                                        "eight elements a thread",
                                        "a row stays in registers",
                                        "norm.cu and coat.cu, which train",
                                        "my_kernel"};

void launch(int rung, const Tensors& t) {
    const unsigned rows = static_cast<unsigned>(t.rows);
    const unsigned elements = static_cast<unsigned>(ceil_div(t.rows * t.cols, THREADS));
    const dim3 by_element(static_cast<unsigned>(ceil_div(t.cols, THREADS)), rows);
    const dim3 by_chunk(static_cast<unsigned>(ceil_div(t.cols, THREADS * CHUNK)), rows);
    switch (rung) {
        case 0:
            dequantize<<<elements, THREADS>>>(t);
            norm_by_thread<<<(rows + 63) / 64, 64>>>(t);
            amax<<<elements, THREADS>>>(t);
            quantize<<<elements, THREADS>>>(t);
            break;
        case 1:
            dequantize<<<elements, THREADS>>>(t);
            norm_by_block<<<rows, THREADS>>>(t);
            amax<<<elements, THREADS>>>(t);
            quantize<<<elements, THREADS>>>(t);
            break;
        case 2:
            first_pass<true><<<rows, THREADS>>>(t);
            quantize<<<elements, THREADS>>>(t);
            break;
        case 3:
            first_pass<false><<<rows, THREADS>>>(t);
            second_pass<<<by_element, THREADS>>>(t);
            break;
        case 4:
            first_pass8<false><<<rows, THREADS>>>(t);
            second_pass8<<<by_chunk, THREADS>>>(t);
            break;
        case 5:
            first_pass8<true><<<rows, THREADS>>>(t);
            second_pass8<<<by_chunk, THREADS>>>(t);
            break;
        case MINE: launch_my_kernels(t); break;
    }
}

class Case {
public:
    Case(int64_t rows, int64_t cols)
        : x_(random_bf16(rows * cols, 2.0f)), weight_(random_bf16(cols, 1.0f, 2)), device_x_(x_),
          zeros_(rows * cols), device_weight_(weight_), scales_(rows * cols / 16), in_(rows * cols),
          codes_(rows * cols), x32_(rows * cols), y32_(rows * cols), inverse_(rows), stats_(rows),
          scale_(1), norm_{{in_.get(), scales_.get(), rows, cols, E4M3_1x16},
                           weight_on_device(),
                           nullptr,
                           stats_.get(),
                           true,
                           EPS},
          t_{.rows = rows,
             .cols = cols,
             .in = in_.get(),
             .scales = scales_.get(),
             .weight = weight_on_device(),
             .x = x32_.get(),
             .y = y32_.get(),
             .inverse = inverse_.get(),
             .scale = scale_.get(),
             .codes = codes_.get()} {
        gpu::quantize(gpu::stored(view_of(device_x_)), {norm_.in}, nullptr, nullptr);
        zeros_.fill(0);
    }
    void run(int rung) {
        scale_.fill(0);
        if (rung == FROM_TRAINING) {
            // x + 0: the groups, the statistics and the amax, as residual_add leaves them in training.
            gpu::residual_add(
                view_of(device_x_), view_of(zeros_),
                {.x_out = {}, .next = norm_, .forward_reads_saved = true, .y_amax_out = scale_.get()},
                nullptr);
            gpu::quantize(gpu::lazy_norm(norm_), {{t_.codes, t_.scale, t_.rows, t_.cols, E4M3_TENSOR}},
                          nullptr, nullptr);
        } else launch(rung, t_);
        gpu::check(cudaGetLastError(), "Launching a kernel failed");
    }
    // Codes are ordered like magnitudes: neighbours differ by 1.
    Verdict against_reference(int rung) {
        const int64_t rows = t_.rows, cols = t_.cols;
        std::vector<float> x, weight, y(rows * cols);
        for (uint16_t b : x_) x.push_back(reference::from_bf16(b));
        for (uint16_t b : weight_) weight.push_back(reference::from_bf16(b));
        x = reference::dequantize(reference::quantize(x.data(), rows, cols, E4M3_1x16));
        reference::norm_forward<float>(true, EPS, rows, cols, x.data(), weight.data(), nullptr, y.data());
        const std::vector<uint8_t> expected = reference::quantize(y.data(), rows, cols, E4M3_TENSOR).codes;
        codes_.poison();
        const std::vector<uint8_t> before = codes_.read();
        run(rung);
        const std::vector<uint8_t> codes = codes_.read();
        if (codes == before) return {.right = true, .written = false, .text = ""};
        int64_t differ = 0, far = 0;
        for (int64_t i = 0; i < rows * cols; i++) {
            differ += codes[i] != expected[i];
            far += std::abs(codes[i] - expected[i]) > 1;
        }
        if (far > 0) return {.right = false, .written = true, .text = std::to_string(far) + " codes"};
        if (differ == 0) return {.right = true, .written = true, .text = "equal"};
        return {.right = true, .written = true, .text = std::to_string(differ) + " by one"};
    }

private:
    const std::vector<uint16_t> x_, weight_;
    Buffer<uint16_t> device_x_, zeros_, device_weight_, scales_;
    Buffer<uint8_t> in_, codes_;
    Buffer<float> x32_, y32_, inverse_;
    Buffer<gpu::RowStatistics> stats_;
    Buffer<gpu::TensorScale> scale_;
    const gpu::Norm norm_;
    const Tensors t_;

    gpu::TensorRef view_of(const Buffer<uint16_t>& x) const {
        return {x.get(), nullptr, static_cast<int64_t>(x_.size() / weight_.size()),
                static_cast<int64_t>(weight_.size()), PLAIN_BF16};
    }
    const bf16* weight_on_device() const { return reinterpret_cast<const bf16*>(device_weight_.get()); }
};

}  // namespace

int main(int argc, char** argv) try {
    // The small one's rows are no whole number of warps or chunks of a block.
    Case small(301, 1040), large(16384, 4096);
    printf("RMSNorm, E4M3 1x16 to E4M3 tensor, 16384 x 4096: ");
    return climb(
        RUNGS, copying(3.25 * 16384 * 4096), argc, argv,
        [&](int rung) { return small.against_reference(rung); }, [&](int rung) { large.run(rung); });
} catch (const Error& e) {
    fprintf(stderr, "%s\n", e.what());
    return 1;
}

// Hints for your rung. Read one, and try it, before you read the next.
//
// 1. Which tensor of rung 3 has the most bytes? What is the least that pass two must know of pass one?
// 2. Then count instructions, not bytes. Which of them does a thread do once, however many elements it has?
// 3. How many elements share a scale? How many does a thread need so that it loads each scale once?
// 4. What does pass one of rung 4 compute twice, and where could it stay in between?
// 5. Beyond rung 6: a thread could have a whole group, 16 codes in one load. Does each thread need the
//    division in inverse_scale()?

// ===========================================================================================================
// Measured on an H200, 16384 x 4096:
//
//   rung                                                           us  % of copy  speed-up  codes
//    1  a kernel for each operator, a thread for a row          2489.4         2%         -  2 by one
//    2  a block for a row                                       1191.1         4%     2.09x  equal
//    3  dequantization, norm and amax in one kernel              348.8        15%     3.41x  equal
//    4  the normalized row is not stored                         332.7        15%     1.05x  equal
//    5  eight elements a thread                                  116.7        44%     2.85x  equal
//    6  a row stays in registers                                 109.6        47%     1.06x  equal
//    7  norm.cu and coat.cu, which train                         132.8        39%     0.83x  equal
//
// What limits each rung, and what we predicted before it was measured:
//
//   rung   instructions   memory   predicted                      measured
//    1      320           350      several times 350, by latency  2,489
//    2      350           350      450 to 550                     1,191
//    3      210           160      250 to 400                       349
//    4      255            51      no faster than rung 3            333
//    5       95            51      120 to 150                       117
//    6       81            51      10% faster than rung 5           110     6% faster
//
// Rung 2 takes more than twice as long as predicted. Its times were those of all four kernels together, as
// if one could do its instructions while another moves its bytes. But kernels that follow each other do not
// overlap. And neither count sees that the kernel for the amax has 2.1 million warps, one for each 32
// elements, which all go to one address. In rung 3 a warp does that once for 512 elements: 842 us less, six
// times what bytes and instructions explain. (The kernels of rung 2 were not measured one by one: try it with
// nsys.)
//
// Rung 4 is the lesson of this ladder: fewer bytes help only where bytes are the limit. It prepares rung 5,
// in which the instructions of three elements fit where those of one were.
