// quantize_transpose.cu - a ladder of five kernels: quantize a BF16 matrix to FP8 with per-tensor scaling,
// and write the codes both row-major and transposed.
//
// Training does this to every gradient. FP8 GEMMs on Hopper reduce over contiguous elements only: dgrad reads
// the codes row-major, and wgrad reads them transposed. The amax is already known. Kernel 1 is the simplest;
// kernel 5 is the one that trains (coat.cu).
//
//   make build/ladder_quantize_transpose && build/ladder_quantize_transpose
//
// 1  Two kernels, one thread per element. In the transpose, the threads of a warp write single bytes to
//    different rows, and each byte costs a memory sector of 32 bytes.
// 2  The transpose goes through a tile in shared memory, so that reads and writes are both contiguous. Each
//    row of the tile has one extra byte, so that a column falls into different banks. Codes are still read
//    back from memory.
// 3  One kernel: each code goes to memory and into the tile at once. This removes a quarter of the memory
//    traffic.
// 4  Eight elements per thread: loads of 16 bytes instead of 2 and stores of 8 bytes instead of 1, with
//    several in flight. Shared memory is still accessed byte by byte.
// 5  8 x 8 elements per thread: bytes are transposed in registers (prmt). Shared memory is written in units
// of
//    4 bytes and read in units of 16, without bank conflicts. Transposed rows are stored with 16 bytes per
//    thread, 128 bytes per row.
//
// H200, 16384 x 4096; copy bandwidth 4.26 TB/s:   kernel                    1     2     3    4    5
//                                                 us                     1209   314   203   76   70
//                                                 % of copy bandwidth      5%   20%   31%  83%  91%
//
// What the other kernels with the plan of kernel 5 gained, microseconds (and % of copy bandwidth):
//   1  as first written     2  no conditional loads, offsets of 32 bits, a kernel for each format
//   3  four blocks on a multiprocessor, and at most 32 bytes a row for four rows at once
//                                                                1            2            3
//   7B norm: to e4m3                                       64 (52%)     43 (78%)     42 (79%)
//   7B q, k, v backward: to e5m2, and transposed          273 (69%)    253 (75%)    230 (82%)
//   7B SiLU x up backward: amax                           265 (68%)    179 (101%)   173 (104%)
//   GPT-2 GELU: to e4m3, transposed                       204 (49%)    157 (64%)    139 (72%)
// Branches at run time (E4M3 or E5M2, transposed or not, BF16 or FP32) cost nothing that can be seen.
//
// The codes must equal those of the CPU reference, byte for byte. Minimum traffic per element: 2 bytes in, 1
// + 1 out.
#include "ladder.h"

using namespace ladder;

namespace {

struct Matrix {
    int64_t rows, cols;
    const bf16* x;                // (rows, cols)
    gpu::AmaxAndScale* scale;     // contains the amax
    uint8_t *codes, *transposed;  // (rows, cols), (cols, rows)
};

// FMAX of E5M2
__device__ float inverse_scale(const Matrix& m) { return __frcp_rn(__fdiv_rn(m.scale->amax, 57344.0f)); }
__device__ uint8_t encode(bf16 x, float inverse) {
    return __nv_cvt_float_to_fp8(__bfloat162float(x) * inverse, __NV_SATFINITE, __NV_E5M2);
}

// --- 1: one thread per element -----------------------------------------------------------------------------

__global__ void quantize_kernel1(Matrix m) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < m.rows * m.cols) m.codes[i] = encode(m.x[i], inverse_scale(m));
}
__global__ void transpose_kernel1(Matrix m) {
    const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < m.rows * m.cols) m.transposed[i % m.cols * m.rows + i / m.cols] = m.codes[i];
}

// --- 2 and 3: a tile of 32 x 32 in shared memory -----------------------------------------------------------

constexpr int SIDE = 32, TALL = 8;  // a block of 32 x 8 threads

template <bool FUSED> __global__ void kernel3(Matrix m) {  // grid (cols / 32, rows / 32)
    __shared__ uint8_t tile[SIDE][SIDE + 1];
    const float inverse = inverse_scale(m);
    for (int y = threadIdx.y; y < SIDE; y += TALL) {
        const int64_t row = int64_t(blockIdx.y) * SIDE + y, col = int64_t(blockIdx.x) * SIDE + threadIdx.x;
        if (row >= m.rows || col >= m.cols) continue;
        const uint8_t code = FUSED ? encode(m.x[row * m.cols + col], inverse) : m.codes[row * m.cols + col];
        if (FUSED) m.codes[row * m.cols + col] = code;
        tile[y][threadIdx.x] = code;
    }
    __syncthreads();
    for (int y = threadIdx.y; y < SIDE; y += TALL) {
        const int64_t row = int64_t(blockIdx.y) * SIDE + threadIdx.x, col = int64_t(blockIdx.x) * SIDE + y;
        if (row < m.rows && col < m.cols) m.transposed[col * m.rows + row] = tile[threadIdx.x][y];
    }
}

// --- 4: eight elements per thread, a tile of 64 x 64, 256 threads ------------------------------------------

__global__ void kernel4(Matrix m) {  // rows and cols are multiples of 8
    constexpr int T = 64, CHUNKS = T / 8;
    __shared__ uint8_t tile[T][T + 4];
    const float inverse = inverse_scale(m);
    const int64_t row0 = int64_t(blockIdx.y) * T, col0 = int64_t(blockIdx.x) * T;
    for (int i = threadIdx.x; i < T * CHUNKS; i += blockDim.x) {
        const int y = i / CHUNKS, x = i % CHUNKS * 8;
        if (row0 + y >= m.rows || col0 + x >= m.cols) continue;
        const uint4 raw = *reinterpret_cast<const uint4*>(m.x + (row0 + y) * m.cols + col0 + x);
        const bf16* eight = reinterpret_cast<const bf16*>(&raw);
        uint2 codes;
        for (int j = 0; j < 8; j++)
            reinterpret_cast<uint8_t*>(&codes)[j] = tile[y][x + j] = encode(eight[j], inverse);
        *reinterpret_cast<uint2*>(m.codes + (row0 + y) * m.cols + col0 + x) = codes;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < T * CHUNKS; i += blockDim.x) {
        const int x = i / CHUNKS, y = i % CHUNKS * 8;
        if (row0 + y >= m.rows || col0 + x >= m.cols) continue;
        uint2 codes;
        for (int j = 0; j < 8; j++) reinterpret_cast<uint8_t*>(&codes)[j] = tile[y + j][x];
        *reinterpret_cast<uint2*>(m.transposed + (col0 + x) * m.rows + row0 + y) = codes;
    }
}

// --- The ladder --------------------------------------------------------------------------------------------

void run(int kernel, const Matrix& m) {
    const unsigned elements = static_cast<unsigned>(ceil_div(m.rows * m.cols, 256));
    auto tiles = [&](int64_t side) {
        return dim3(static_cast<unsigned>(ceil_div(m.cols, side)),
                    static_cast<unsigned>(ceil_div(m.rows, side)));
    };
    const gpu::View x{const_cast<bf16*>(m.x), nullptr, m.rows, m.cols, BF16};
    switch (kernel) {
        case 1:
            quantize_kernel1<<<elements, 256>>>(m);
            transpose_kernel1<<<elements, 256>>>(m);
            break;
        case 2:
            quantize_kernel1<<<elements, 256>>>(m);
            kernel3<false><<<tiles(SIDE), dim3(SIDE, TALL)>>>(m);
            break;
        case 3: kernel3<true><<<tiles(SIDE), dim3(SIDE, TALL)>>>(m); break;
        case 4: kernel4<<<tiles(64), 256>>>(m); break;
        case 5:
            gpu::quantize(gpu::stored(x), {{m.codes, m.scale, m.rows, m.cols, E5M2_TENSOR}, m.transposed},
                          nullptr, nullptr);
            break;
    }
    gpu::check(cudaGetLastError(), "Launching a kernel failed");
}

class Case {
public:
    Case(int64_t rows, int64_t cols)
        : bits_(random_bf16(static_cast<size_t>(rows * cols), 3.0f)), x_(bits_), codes_(bits_.size()),
          transposed_(bits_.size()),
          scale_(1), m{rows,         cols,         reinterpret_cast<bf16*>(x_.get()),
                       scale_.get(), codes_.get(), transposed_.get()} {
        scale_.fill(0);
        gpu::amax(gpu::stored({x_.get(), nullptr, rows, cols, BF16}), scale_.get(), nullptr);
    }
    int64_t wrong_codes(int kernel) {  // against the reference
        std::vector<float> values;
        for (uint16_t b : bits_) values.push_back(reference::from_bf16(b));
        const std::vector<uint8_t> expected =
            reference::quantize(values.data(), m.rows, m.cols, E5M2_TENSOR).codes;
        codes_.poison();
        transposed_.poison();
        run(kernel, m);
        const std::vector<uint8_t> codes = codes_.read(), transposed = transposed_.read();
        int64_t wrong = 0;
        for (int64_t r = 0; r < m.rows; r++)
            for (int64_t c = 0; c < m.cols; c++)
                wrong += (codes[r * m.cols + c] != expected[r * m.cols + c]) +
                         (transposed[c * m.rows + r] != expected[r * m.cols + c]);
        return wrong;
    }

private:
    std::vector<uint16_t> bits_;
    Buffer<uint16_t> x_;
    Buffer<uint8_t> codes_, transposed_;
    Buffer<gpu::AmaxAndScale> scale_;

public:
    const Matrix m;
};

}  // namespace

int main() try {
    Case small(200, 304), large(16384, 4096);
    const double copy = copy_rate(), bytes = 4.0 * 16384 * 4096;
    printf(
        "quantize to E5M2 and transpose, 16384 x 4096; copy bandwidth %.2f TB/s\nkernel  wrong codes    us   "
        "   TB/s   of copy\n",
        copy * 1e-12);
    int64_t wrong = 0;
    for (int kernel = 1; kernel <= 5; kernel++) {
        const int64_t here = small.wrong_codes(kernel);
        const float ms = milliseconds(20, [&] { run(kernel, large.m); });
        printf("%d       %-12lld %8.1f  %6.2f   %4.0f%%\n", kernel, static_cast<long long>(here), ms * 1e3,
               bytes / ms * 1e-9, 100 * bytes / ms * 1e3 / copy);
        wrong += here;
    }
    return wrong != 0;
} catch (const Error& e) {
    fprintf(stderr, "%s\n", e.what());
    return 1;
}
