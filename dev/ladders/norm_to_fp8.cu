// norm_to_fp8.cu - a ladder of five kernels: RMSNorm, from saved FP8 groups (E4M3 1x16, BF16 scales) to the
// FP8 operand of a linear layer (E4M3, per-tensor scaling).
//
// The amax of a tensor must be known before its first code can be written, so there are two passes. The
// question is how many bytes each pass moves. Kernel 5 is the one that trains (coat.cu). In training its
// first pass is part of the residual addition before it, which has the row at hand.
//
//   make build/ladder_norm_to_fp8 && build/ladder_norm_to_fp8
//
// 1  One kernel per operator: dequantize, norm (one thread per row), amax, quantize. The FP32 tensors between
//    them cost about 25 bytes per element, and the threads of a warp read addresses that are a row apart.
// 2  One block per row: dequantization and the sum of squares in one kernel, with coalesced accesses. The
//    normalized row is still stored in FP32.
// 3  The normalized row is not stored. Pass one stores 1 / rms of every row and the amax. Pass two computes
//    the same values again and writes codes. It moves a third of the bytes but is hardly faster, since
//    accesses of one byte make it bound by instructions.
// 4  Eight elements per thread, and the row stays in registers from the sum of squares to the amax.
// 5  The kernels that train: also LayerNorm, rows of any length, statistics with the same bits as in
// backward,
//    and a transposed output if needed. Pass one is residual_add, which here adds zeros and makes the groups.
//    That is more work than kernel 4's, and more bytes than the last line below counts.
//
// H200, 16384 x 4096; copy bandwidth 4.28 TB/s:   kernel                    1     2     3     4     5
//                                                 us                     2426   414   395   116   133
//                                                 % of copy bandwidth      2%   12%   13%   44%   38%
//
// What was tried on the kernels around it, microseconds (and % of copy bandwidth), Llama-2-7B and GPT-2:
//   norm backward    one block per row                                            177 (63%)   123 (68%)
//                    one block per row, both sums of RMSNorm in one reduction     134 (84%)   120 (70%)
//   residual add     one block per row                                            119 (94%)    93 (90%)
//                    one barrier for each team of warps                           140 (80%)   110 (76%)
//                    one barrier of the block for each sum                        118 (95%)    92 (91%)
//   cross-entropy    the row is read twice                                                    150 (64%)
//                    it stays in shared memory; no check of bounds inside          77 (79%)   133 (72%)
//
// Codes are compared with the CPU reference. A value that differs in the last bits of FP32 may round to a
// neighbouring code. Minimum traffic per element: 1.125 bytes in, twice, and 1 byte out.
#include "ladder.h"

using namespace ladder;

namespace {

struct Tensors {
    int64_t rows, cols;
    const uint8_t* in;       // (rows, cols) codes
    const uint16_t* scales;  // (rows, cols / 16)
    const bf16* weight;      // (cols)
    float *x, *y, *inverse;  // intermediate: (rows, cols), (rows, cols), 1 / rms (rows)
    gpu::AmaxAndScale* scale;
    uint8_t* codes;  // (rows, cols)
};
constexpr float EPS = 1e-5f, FMAX = 448.0f;
constexpr unsigned THREADS = 256;

__device__ float decode(uint8_t code) {
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}
__device__ uint8_t encode(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
__device__ float bf16_bits(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
// No -0
__device__ float normalized(float x, float inverse, bf16 weight) {
    return x * inverse * __bfloat162float(weight) + 0.0f;
}
__device__ float input(const Tensors& t, int64_t i) { return decode(t.in[i]) * bf16_bits(t.scales[i / 16]); }
__device__ void update_amax_once(gpu::AmaxAndScale* scale, float x) {
    atomicMax(reinterpret_cast<uint32_t*>(&scale->amax), __float_as_uint(fabsf(x)));
}
__device__ float inverse_scale(const gpu::AmaxAndScale* scale) {
    return __frcp_rn(__fdiv_rn(scale->amax, FMAX));
}

__device__ float block_sum(float x) {
    __shared__ float warps[32];
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xFFFFFFFFu, x, lanes);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (unsigned w = 0; w < blockDim.x / 32; w++) x += warps[w];
    return x;
}
__device__ void update_amax(gpu::AmaxAndScale* scale, float top) {
    const uint32_t bits = __reduce_max_sync(0xFFFFFFFFu, __float_as_uint(top));
    if (threadIdx.x % 32 == 0 && bits > __float_as_uint(*static_cast<volatile float*>(&scale->amax)))
        update_amax_once(scale, __uint_as_float(bits));
}

// --- 1: one kernel per operator ----------------------------------------------------------------------------

__global__ void dequantize_kernel1(Tensors t) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < t.rows * t.cols) t.x[i] = input(t, i);
}
__global__ void norm_kernel1(Tensors t) {  // one thread per row
    const int64_t row = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (row >= t.rows) return;
    float sum = 0;
    for (int64_t c = 0; c < t.cols; c++) sum += t.x[row * t.cols + c] * t.x[row * t.cols + c];
    const float rms = sqrtf(sum / float(t.cols) + EPS);
    for (int64_t c = 0; c < t.cols; c++)
        t.y[row * t.cols + c] = normalized(t.x[row * t.cols + c], 1 / rms, t.weight[c]);
}
__global__ void amax_kernel1(Tensors t) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    update_amax(t.scale, i < t.rows * t.cols ? fabsf(t.y[i]) : 0.0f);
}
__global__ void quantize_kernel1(Tensors t) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < t.rows * t.cols) t.codes[i] = encode(t.y[i] * inverse_scale(t.scale));
}

// --- 2 and 3: one block per row; the normalized row is stored, or computed again ---------------------------

template <bool STORED> __global__ void rows_kernel3(Tensors t) {
    const int64_t first = blockIdx.x * t.cols;
    float sum = 0, top = 0;
    for (int64_t c = threadIdx.x; c < t.cols; c += blockDim.x)
        sum += input(t, first + c) * input(t, first + c);
    const float inverse = 1.0f / sqrtf(block_sum(sum) / float(t.cols) + EPS);
    for (int64_t c = threadIdx.x; c < t.cols; c += blockDim.x) {
        const float y = normalized(input(t, first + c), inverse, t.weight[c]);
        if (STORED) t.y[first + c] = y;
        top = fmaxf(top, fabsf(y));
    }
    if (threadIdx.x == 0) t.inverse[blockIdx.x] = inverse;
    update_amax(t.scale, top);
}
__global__ void quantize_kernel3(Tensors t) {  // grid (cols / 256, rows)
    const int64_t col = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, i = blockIdx.y * t.cols + col;
    if (col < t.cols)
        t.codes[i] =
            encode(normalized(input(t, i), t.inverse[blockIdx.y], t.weight[col]) * inverse_scale(t.scale));
}

// --- 4: eight elements per thread --------------------------------------------------------------------------

constexpr int CHUNK = 8, CHUNKS = 2;  // so a block of 256 threads holds a row of up to 4096 elements

__device__ void load8(const Tensors& t, int64_t i, float (&x)[CHUNK]) {
    const uint2 raw = *reinterpret_cast<const uint2*>(t.in + i);
    const float scale = bf16_bits(t.scales[i / 16]);
    for (int j = 0; j < CHUNK; j++) x[j] = decode(reinterpret_cast<const uint8_t*>(&raw)[j]) * scale;
}
__device__ void normalize8(const Tensors& t, int64_t col, float inverse, float (&x)[CHUNK]) {
    const uint4 raw = *reinterpret_cast<const uint4*>(t.weight + col);
    for (int j = 0; j < CHUNK; j++) x[j] = normalized(x[j], inverse, reinterpret_cast<const bf16*>(&raw)[j]);
}
__global__ void __launch_bounds__(THREADS) rows_kernel4(Tensors t) {
    float x[CHUNKS][CHUNK] = {}, sum = 0, top = 0;
    auto column = [&](int c) { return int64_t(c * THREADS + threadIdx.x) * CHUNK; };
    for (int c = 0; c < CHUNKS; c++)
        if (column(c) < t.cols) load8(t, blockIdx.x * t.cols + column(c), x[c]);
    for (const auto& chunk : x)
        for (float value : chunk) sum += value * value;
    const float inverse = rsqrtf(block_sum(sum) / float(t.cols) + EPS);
    for (int c = 0; c < CHUNKS; c++) {
        if (column(c) < t.cols) normalize8(t, column(c), inverse, x[c]);
        for (float value : x[c]) top = fmaxf(top, fabsf(value));
    }
    if (threadIdx.x == 0) t.inverse[blockIdx.x] = inverse;
    update_amax(t.scale, top);
}
__global__ void quantize_kernel4(Tensors t) {  // grid (cols / 8 / 256, rows)
    const int64_t col = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * CHUNK,
                  i = blockIdx.y * t.cols + col;
    if (col >= t.cols) return;
    float x[CHUNK];
    load8(t, i, x);
    normalize8(t, col, t.inverse[blockIdx.y], x);
    const float inverse = inverse_scale(t.scale);
    uint2 codes;
    for (int j = 0; j < CHUNK; j++) reinterpret_cast<uint8_t*>(&codes)[j] = encode(x[j] * inverse);
    *reinterpret_cast<uint2*>(t.codes + i) = codes;
}

// --- The ladder --------------------------------------------------------------------------------------------

class Case {
public:
    Case(int64_t rows, int64_t cols)
        : x_(random_bf16(rows * cols, 2.0f)), weight_(random_bf16(cols, 1.0f, 2)), device_x_(x_),
          zeros_(rows * cols), device_weight_(weight_), scales_(rows * cols / 16), in_(rows * cols),
          codes_(rows * cols), x32_(rows * cols), y32_(rows * cols), inverse_(rows), stats_(rows),
          scale_(1), norm_{{in_.get(), scales_.get(), rows, cols, E4M3_GROUP},
                           weight_on_device(),
                           nullptr,
                           stats_.get(),
                           true,
                           EPS},
          t_{rows,       cols,       in_.get(),      scales_.get(), weight_on_device(),
             x32_.get(), y32_.get(), inverse_.get(), scale_.get(),  codes_.get()} {
        gpu::quantize(gpu::stored({device_x_.get(), nullptr, rows, cols, BF16}), {norm_.in}, nullptr,
                      nullptr);
        zeros_.fill(0);
    }
    void run(int kernel) {
        const unsigned rows = static_cast<unsigned>(t_.rows), cols = static_cast<unsigned>(t_.cols),
                       elements = static_cast<unsigned>(ceil_div(t_.rows * t_.cols, THREADS));
        scale_.fill(0);
        switch (kernel) {
            case 1:
                dequantize_kernel1<<<elements, THREADS>>>(t_);
                norm_kernel1<<<(rows + 63) / 64, 64>>>(t_);
                amax_kernel1<<<elements, THREADS>>>(t_);
                quantize_kernel1<<<elements, THREADS>>>(t_);
                break;
            case 2:
                rows_kernel3<true><<<rows, THREADS>>>(t_);
                quantize_kernel1<<<elements, THREADS>>>(t_);
                break;
            case 3:
                rows_kernel3<false><<<rows, THREADS>>>(t_);
                quantize_kernel3<<<dim3((cols + THREADS - 1) / THREADS, rows), THREADS>>>(t_);
                break;
            case 4:
                rows_kernel4<<<rows, THREADS>>>(t_);
                quantize_kernel4<<<dim3((cols / CHUNK + THREADS - 1) / THREADS, rows), THREADS>>>(t_);
                break;
            case 5:
                // x + 0: the groups, the statistics and the amax, as residual_add leaves them in training.
                gpu::residual_add(x_view(device_x_), x_view(zeros_), {}, norm_, true, scale_.get(), nullptr);
                gpu::quantize(gpu::norm(norm_), {{t_.codes, t_.scale, t_.rows, t_.cols, E4M3_TENSOR}},
                              nullptr, nullptr);
                break;
        }
        gpu::check(cudaGetLastError(), "Launching a kernel failed");
    }
    // How many codes differ from the reference, and how many by more than one. Codes are ordered like
    // magnitudes.
    std::pair<int64_t, int64_t> wrong_codes(int kernel) {
        const int64_t rows = t_.rows, cols = t_.cols;
        std::vector<float> x, weight, y(rows * cols);
        for (uint16_t b : x_) x.push_back(reference::from_bf16(b));
        for (uint16_t b : weight_) weight.push_back(reference::from_bf16(b));
        x = reference::dequantize(reference::quantize(x.data(), rows, cols, E4M3_GROUP));
        reference::norm_forward<float>(true, EPS, rows, cols, x.data(), weight.data(), nullptr, y.data());
        const std::vector<uint8_t> expected = reference::quantize(y.data(), rows, cols, E4M3_TENSOR).codes;
        codes_.poison();
        run(kernel);
        const std::vector<uint8_t> codes = codes_.read();
        int64_t differ = 0, far = 0;
        for (int64_t i = 0; i < rows * cols; i++)
            differ += codes[i] != expected[i], far += std::abs(codes[i] - expected[i]) > 1;
        return {differ, far};
    }

private:
    const std::vector<uint16_t> x_, weight_;
    Buffer<uint16_t> device_x_, zeros_, device_weight_, scales_;
    Buffer<uint8_t> in_, codes_;
    Buffer<float> x32_, y32_, inverse_;
    Buffer<float2> stats_;
    Buffer<gpu::AmaxAndScale> scale_;
    const gpu::Norm norm_;
    const Tensors t_;

    gpu::View x_view(const Buffer<uint16_t>& x) const { return {x.get(), nullptr, t_.rows, t_.cols, BF16}; }
    const bf16* weight_on_device() const { return reinterpret_cast<const bf16*>(device_weight_.get()); }
};

}  // namespace

int main() try {
    Case small(301, 1040), large(16384, 4096);
    const double copy = copy_rate(), bytes = 3.25 * 16384 * 4096;
    printf("RMSNorm, E4M3 1x16 to E4M3 tensor, 16384 x 4096; copy bandwidth %.2f TB/s\n", copy * 1e-12);
    printf("kernel  of 313040 codes: differ, by more than 1      us     TB/s   of copy\n");
    bool wrong = false;
    for (int kernel = 1; kernel <= 5; kernel++) {
        const auto [differ, far] = small.wrong_codes(kernel);
        const float ms = milliseconds(20, [&] { large.run(kernel); });
        printf("%d       %23lld %14lld %9.1f   %5.2f   %4.0f%%\n", kernel, static_cast<long long>(differ),
               static_cast<long long>(far), ms * 1e3, bytes / ms * 1e-9, 100 * bytes / ms * 1e3 / copy);
        wrong = wrong || far > 0;
    }
    return wrong;
} catch (const Error& e) {
    fprintf(stderr, "%s\n", e.what());
    return 1;
}
