// reference.cpp - COAT (arXiv 2410.19313) on the CPU, loop by loop: the whole training step. Read coat.h
// first, and this file beside the paper. It knows nothing of the GPU, whose kernels are tested against it;
// ./train uses it where there is no GPU. Each section needs only those before it:
//   1. Formats            FP8, FP16 and BF16: from FP32 to codes and back           (the preliminaries)
//   2. Quantizers         scales, granularity, group scaling                        (section 5)
//   3. FP8 optimizer      dynamic range expansion, AdamW                            (section 4)
//   4. Operators          matmul, norm, activation, RoPE, attention, cross entropy
//   5. Precision flow     which tensor has which format: block_forward, block_backward  (section 5)
//   6. Model              one step: forward, backward, clipping, update
//
// One thread computes an element of an output, in a fixed order, so the result is the same for any number of
// threads. (Only maxima are taken over threads: they are the same in any order.)
#include "reference.h"

#include "program/ranks.h"

#include <malloc.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <map>

namespace coat::reference {

using Floats = std::vector<float>;

// ===========================================================================================================
// 1. Formats (the paper's preliminaries)
//
// FP8 and FP16 have a sign, an exponent and a mantissa of M bits. FP32 has more bits and a larger bias.
//   normal:     value = 2^(exponent - bias) (1 + mantissa / 2^M)        exponent > 0
//   subnormal:  value = 2^(1 - bias) mantissa / 2^M                     exponent = 0

template <class To, class From> static To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

static int exponent_bias(Format f) { return f == Format::E4M3 ? 7 : 15; }
static uint32_t sign_bit(Format f) { return f == Format::F16 ? 0x8000 : 0x80; }

// Rounds x to the nearest code, ties to even. Values beyond the largest saturate. Codes from 2^e to 2^(e+1)
// are 2^(e - M) apart, with M mantissa bits; for subnormals e is 1 - bias. In E4M3, M is 3 and the bias 7:
//   x       e    steps of 2^(e - 3)   rounded   code: steps + ((e + bias - 1) << 3)
//   1.1     0    8.8                  9         9 + (6 << 3) = 0x39, which is 1.125
//   1.99    0    15.92                16        16 + (6 << 3) = 0x40, which is 2
//   2^-9   -6    1                    1         1 + (0 << 3) = 0x01, a subnormal
// The steps of a normal value begin with a binary 1, which adds one to the field of the exponent, e + bias.
// So the field starts with one less. In the second row the same carry gives the next exponent.
uint16_t encode(Format f, float x) {
    const int M = info(f).mantissa, bias = exponent_bias(f);
    const float magnitude = std::min(info(f).max, std::abs(x));
    const int e = std::max(int(bits_as<uint32_t>(magnitude) >> 23) - 127, 1 - bias);
    const float steps = magnitude * bits_as<float>(uint32_t(127 + M - e) << 23);  // |x| / 2^(e - M)
    const uint32_t code = uint32_t(int(std::nearbyint(steps))) + (uint32_t(e + bias - 1) << M);
    const uint32_t nan = f == Format::F16 ? 0x7E00 : 0x7F;
    return uint16_t((std::isnan(x) ? nan : code) | (bits_as<uint32_t>(x) >> 31) * sign_bit(f));
}

// FP32 has the same fields at other places and with another bias. E4M3 has no infinity: its largest exponent
// has values, too, and only the code above the largest value is NaN.
float decode(Format f, uint16_t code) {
    const int M = info(f).mantissa;
    const uint32_t magnitude = code & (sign_bit(f) - 1);
    const uint32_t bits = magnitude << (23 - M);  // where FP32 has exponent and mantissa
    float value = bits_as<float>(bits + (uint32_t(127 - exponent_bias(f)) << 23));
    if (magnitude >> M == 0) value = float(magnitude) * info(f).min;      // subnormal
    if (value > info(f).max) value = bits_as<float>(bits | 0x7F800000u);  // infinity or NaN
    return code & sign_bit(f) ? -value : value;
}

// BF16 is the upper half of FP32, so rounding is an addition to the lower half.
uint16_t to_bf16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t(bits >> 16 | 0x40u);  // NaN stays NaN
    return uint16_t((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t bits) { return bits_as<float>(uint32_t(bits) << 16); }
float round_to(Format f, float x) { return f == Format::BF16 ? from_bf16(to_bf16(x)) : x; }

// Reads or writes element i of an array of any format.
static float get(Format f, const uint8_t* codes, int64_t i) {
    if (f == Format::F32) return reinterpret_cast<const float*>(codes)[i];
    const uint16_t code = info(f).bytes == 1 ? codes[i] : reinterpret_cast<const uint16_t*>(codes)[i];
    return f == Format::BF16 ? from_bf16(code) : decode(f, code);
}
static void put(Format f, uint8_t* codes, int64_t i, float x) {
    if (f == Format::F32) reinterpret_cast<float*>(codes)[i] = x;
    else if (info(f).bytes == 1) codes[i] = uint8_t(encode(f, x));
    else reinterpret_cast<uint16_t*>(codes)[i] = f == Format::BF16 ? to_bf16(x) : encode(f, x);
}

void split_master(float master, uint16_t* weight, int16_t* remainder) {
    const uint32_t bits = bits_as<uint32_t>(master);
    *weight = uint16_t((bits + 0x8000u) >> 16);
    *remainder = int16_t(bits & 0xFFFFu);
}
float join_master(uint16_t weight, int16_t remainder) {
    return bits_as<float>((uint32_t(weight) << 16) + uint32_t(int32_t(remainder)));  // with its sign
}

// With r in the lower half of x, r of the 65536 random integers carry: rounds up with probability r / 65536.
uint16_t round_stochastically(float x, uint64_t key, int64_t i) {
    const uint64_t random = rounding_bits(key, uint64_t(i) / 4) >> (16 * (i % 4)) & 0xFFFF;
    return uint16_t((bits_as<uint32_t>(x) + uint32_t(random)) >> 16);
}

// ===========================================================================================================
// 2. Quantizers (paper section 5)
//
// A block of elements shares a scale s = amax / FMAX, where amax is the block's largest |x| and FMAX the
// format's largest value. Then code = encode(x / s) and x = decode(code) s. The granularity says which
// elements form a block. (CPU and GPU do not divide by s: they multiply by 1 / s, rounded to FP32.)

// A scale that is stored in BF16 is rounded to the nearest. In E4M3 amax / s is then at most
// 449.75 = 448 (1 + 2^-8), which still rounds to 448, as all below 464 do. If amax is not finite, a block's
// scale is NaN, and so is every value that is decoded with it; for a whole tensor the step is skipped.
float scale_of(const Quant& q, float amax) {
    if (!std::isfinite(amax)) return q.granularity == PER_TENSOR ? 1.0f : NAN;
    if (amax == 0) return 1.0f;
    const float s = std::max(amax / info(q.format).max, 0x1p-126f);  // so that 1 / s is finite
    return round_to(q.scale_format, s);
}

// The largest |x| of a group; infinity if one is NaN. The bits of |x| have the order of the magnitudes, and
// NaN above infinity: a maximum of floats could lose a NaN.
static float group_amax(const float* x, int64_t n) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) largest = std::max(largest, bits_as<uint32_t>(x[i]) & 0x7FFFFFFFu);
    return bits_as<float>(std::min(largest, 0x7F800000u));
}

// Group scaling (section 5.2): stage one takes the maxima of groups, stage two the maximum of these: the
// per-tensor amax. On a GPU this mostly needs no pass of its own: a kernel that has the values in registers
// takes their maximum.
float amax(const float* x, int64_t n) {
    float largest = 0;
#pragma omp parallel for reduction(max : largest) if (n > 1 << 16)
    for (int64_t first = 0; first < n; first += PER_GROUP.cols)
        largest = std::max(largest, group_amax(x + first, std::min<int64_t>(PER_GROUP.cols, n - first)));
    return largest;
}

float Quantized::scale(int64_t r, int64_t c) const {
    if (!quant.fp8()) return 1.0f;
    return get(quant.scale_format, scales.data(),
               r / block_rows() * quant.scale_cols(cols) + c / block_cols());
}
float Quantized::value(int64_t r, int64_t c) const {
    return get(quant.format, codes.data(), r * cols + c) * scale(r, c);
}

static void add_stats(QuantStats& s, float x, float dequantized) {
    const double error = double(x) - double(dequantized);
    s.signal += double(x) * x;
    s.noise += error * error;
    s.flushed += x != 0 && dequantized == 0;
    s.elements++;
}

Quantized quantize(const float* x, int64_t rows, int64_t cols, const Quant& quant, QuantStats* stats,
                   const float* scale) {
    Quantized q{{}, {}, rows, cols, quant};
    q.codes.resize(quant.code_bytes(rows, cols));
    q.scales.resize(quant.scales(rows, cols) * info(quant.scale_format).bytes);
    const int64_t height = q.block_rows(), width = q.block_cols();
    const int64_t across = quant.scale_cols(cols), blocks = scale ? 0 : quant.scales(rows, cols);
    if (scale && quant.fp8()) put(quant.scale_format, q.scales.data(), 0, *scale);
#pragma omp parallel for if (blocks > 1 && rows * cols > 1 << 14)
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t r0 = b / across * height, c0 = b % across * width;
        float largest = 0;
        for (int64_t r = r0; r < std::min(rows, r0 + height); r++)
            largest = std::max(largest, group_amax(x + r * cols + c0, std::min(width, cols - c0)));
        put(quant.scale_format, q.scales.data(), b, scale_of(quant, largest));
    }
    const Format format = quant.format;
#pragma omp parallel for if (rows * cols > 1 << 14)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c0 = 0; c0 < cols; c0 += width) {
            const float inverse = 1.0f / q.scale(r, c0);
            const int64_t first = r * cols + c0, last = first + std::min(width, cols - c0);
#pragma omp simd
            for (int64_t i = first; i < last; i++) put(format, q.codes.data(), i, x[i] * inverse);
        }
    // Values up to half a step above FMAX still round to it. We count those beyond 7/8 of it.
    const float beyond = info(quant.format).max * (1 + std::ldexp(0.25f, -info(quant.format).mantissa));
    for (int64_t i = 0; stats && quant.fp8() && i < rows * cols; i++) {
        add_stats(*stats, x[i], q.value(i / cols, i % cols));
        stats->saturated += std::abs(x[i]) > beyond * q.scale(i / cols, i % cols);
    }
    return q;
}

Floats dequantize(const Quantized& q) {
    Floats x(q.rows * q.cols);
    const int64_t width = q.block_cols();
    float values[256] = {};  // of the codes of FP8
    for (uint16_t code = 0; q.quant.fp8() && code < 256; code++) values[code] = decode(q.quant.format, code);
#pragma omp parallel for if (q.rows * q.cols > 1 << 14)
    for (int64_t r = 0; r < q.rows; r++)
        for (int64_t c0 = 0; c0 < q.cols; c0 += width) {
            const float s = q.scale(r, c0);
            const int64_t first = r * q.cols + c0, last = first + std::min(width, q.cols - c0);
            for (int64_t i = first; i < last; i++)
                x[i] = q.quant.fp8() ? values[q.codes[i]] * s : get(q.quant.format, q.codes.data(), i);
        }
    return x;
}

// Copies a matrix (rows, depth) to panels of `width` rows, panel[k][row], with zeros beyond the last row.
template <class Real>
static std::vector<Real> pack(int64_t width, const Real* x, int64_t row, int64_t col, int64_t rows,
                              int64_t depth) {
    std::vector<Real> panels(round_up(rows, width) * depth);
#pragma omp parallel for collapse(2) if (rows * depth > 1 << 14)
    for (int64_t r0 = 0; r0 < rows; r0 += width)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t r = r0; r < std::min(rows, r0 + width); r++)
                panels[r0 * depth + k * width + r - r0] = x[r * row + k * col];
    return panels;
}

// (rows, cols) -> (cols, rows), which is one panel; rows of x begin `stride` elements apart
template <class Real>
static std::vector<Real> transposed(const Real* x, int64_t rows, int64_t cols, int64_t stride) {
    return pack(rows, x, stride, 1, rows, cols);
}

// Tensor cores multiply codes and scale the result. Here the GEMM is in FP32: its operands are the decoded
// values. The columns of a granularity run along the reduction (coat.h, Recipe), so for a reduction over rows
// the transpose is quantized, unless its blocks are those of x.
Floats operand(const Floats& x, int64_t rows, int64_t cols, const Quant& q, ReduceOver which,
               QuantStats* stats, const float* scale) {
    if (which == ReduceOver::Columns || q.granularity.symmetric())
        return dequantize(quantize(x.data(), rows, cols, q, stats, scale));
    const Floats transpose = transposed(x.data(), rows, cols, cols);
    const Quantized quantized = quantize(transpose.data(), cols, rows, q, stats, scale);
    return transposed(dequantize(quantized).data(), cols, rows, rows);
}

void DelayedScale::end_step(Format fp8) {
    std::rotate(history.begin(), history.end() - 1, history.end());  // forgets the oldest
    history.front() = amax;
    amax = 0;
    const float largest = reference::amax(history.data(), int64_t(history.size()));
    if (std::isfinite(largest) && largest > 0) scale = scale_of({fp8}, largest);
}

// ===========================================================================================================
// 3. FP8 optimizer with dynamic range expansion (paper section 4)
//
// A format's dynamic range is R = FMAX / FMIN, its largest over its smallest positive value: 448 / 2^-9 =
// 229,376 for E4M3. A group X of 128 moments has R_X = max|X| / min|X| (the smallest that is not zero),
// often below 1,000; the group uses a part of E4M3's codes only. Section 4.2 stretches the group to the
// range of the format before quantization, and contracts it afterwards:
//   expand:    f(x) = sign(x) |x|^k           k = log(R) / log(R_X), so that R_f(X) = R      (equation 4)
//   quantize:  code = encode(f(x) / s)        s = f(max) / FMAX
//   contract:  x = f^-1(decode(code) s)
// f(x) / s = sign(x) FMAX (|x| / max)^k, so that the codes, max and k are all that a group stores.

// k is rounded to a multiple of 1/256: the GPU's logarithms differ in their last bits, and k still agrees in
// nearly all groups. The released code rounds down to 1/16, which costs precision (dev/WALK.md, section 7).
// In a group of equal magnitudes log R_X is 0 and any k is exact: every code is FMAX, and contract gives max.
float expansion_factor(Format fp8, float max, float min_nonzero) {
    const float k_max = 64.0f;
    const float log_range = std::log2(info(fp8).max) - std::log2(info(fp8).min);  // log R
    const float log_ratio = std::log2(max) - std::log2(min_nonzero);              // log R_X
    if (!(log_ratio * k_max > log_range)) return k_max;                           // nearly equal magnitudes
    return std::max(std::rint(256.0f * log_range / log_ratio) / 256.0f, 1.0f / 16.0f);
}

// sign(x) FMAX (|x| / max)^k, in logarithms, because |x| / max alone may underflow.
float expand(Format fp8, float x, float max, float k) {
    if (x == 0) return 0.0f;
    return std::copysign(info(fp8).max * std::exp2(k * (std::log2(std::abs(x)) - std::log2(max))), x);
}

// sign(y) max (|y| / FMAX)^(1/k). In a group with a very large range the power underflows in FP32, although
// its product with max does not. So max is multiplied twice by the square root of the power. The result is at
// least the smallest positive value: a second moment that is not zero must not become zero.
float contract(Format fp8, float y, float max, float k) {
    if (y == 0 || max == 0) return 0.0f;
    const float root = std::exp2((std::log2(std::abs(y)) - std::log2(info(fp8).max)) / (2 * k));
    return std::copysign(std::max(max * root * root, 0x1p-149f), y);
}

void Moment::init(Format f, bool expansion, int64_t count, int64_t group) {
    format = f;
    n = count;
    group_size = group;
    expands = expansion && is_fp8(f);
    codes.assign(n * info(f).bytes, 0);
    max.assign(!is_scaled(f) ? 0 : group_size ? ceil_div(n, group_size) : 1, 0.0f);
    k.assign(expands ? max.size() : 0, 1.0f);
}

float Moment::value(int64_t i) const {
    const float y = get(format, codes.data(), i);
    if (!is_scaled(format)) return y;
    const int64_t g = group_size ? i / group_size : 0;
    if (expands) return contract(format, y, max[g], k[g]);
    return max[g] == 0 ? 0.0f : y * scale_of({format}, max[g]);
}

void Moment::load(float* x) const {
#pragma omp parallel for if (n > 1 << 14)
    for (int64_t i = 0; i < n; i++) x[i] = value(i);
}

void Moment::store(const float* x, bool second, QuantStats* stats) {
    const bool scaled = is_scaled(format);
    const int64_t size = group_size ? group_size : std::max<int64_t>(n, 1);  // of a group
#pragma omp parallel for if (n > 1 << 14)
    for (int64_t first = 0; first < n; first += size) {
        const int64_t g = first / size, last = std::min(n, first + size);
        float largest = 0, smallest = INFINITY;  // of the magnitudes that are not zero
        for (int64_t i = first; i < last; i++) {
            largest = std::max(largest, std::abs(x[i]));
            if (x[i] != 0) smallest = std::min(smallest, std::abs(x[i]));
        }
        if (scaled) max[g] = largest;
        if (expands) k[g] = largest > 0 ? expansion_factor(format, largest, smallest) : 1.0f;
        const float inverse = scaled ? 1.0f / scale_of({format}, largest) : 1.0f;
        for (int64_t i = first; i < last; i++) {
            const float y = expands ? expand(format, x[i], max[g], k[g]) : x[i] * inverse;
            put(format, codes.data(), i, y);
            if (scaled && second && group_size && x[i] > 0 && get(format, codes.data(), i) == 0)
                put(format, codes.data(), i, info(format).min);
        }
    }
    for (int64_t i = 0; stats && scaled && i < n; i++) add_stats(*stats, x[i], value(i));
}

// The powers of beta are computed in double; bias2_root is sqrt(1 - b2^t).
AdamWFactors adamw_factors(const AdamW& a, bool decays, double grad_norm) {
    const float decay = decays ? a.weight_decay : 0.0f,
                bias1 = float(1 - std::pow(double(a.beta1), double(a.step))),
                bias2_root = float(std::sqrt(1 - std::pow(double(a.beta2), double(a.step)))),
                shrink = a.clip > 0 && grad_norm > a.clip ? float(a.clip / grad_norm) : 1.0f;
    return {a.lr, a.beta1, a.beta2, 1 - a.beta1, 1 - a.beta2, a.eps, decay, bias1, bias2_root, shrink};
}

// m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr (m^ / (sqrt(v^) + eps) + decay w)
// with m^ = m / (1 - b1^t) and v^ = v / (1 - b2^t). Weight decay is decoupled and eps is outside the root, as
// in torch.optim.AdamW. g is the clipped gradient. The weight is updated before m and v are quantized.
void adamw(const AdamWFactors& f, int64_t n, const float* gradient, float* master, float* m, float* v) {
#pragma omp parallel for if (n > 1 << 14)
    for (int64_t i = 0; i < n; i++) {
        const float g = gradient[i] * f.gradient_scale;
        m[i] = f.beta1 * m[i] + f.one_minus_beta1 * g;
        v[i] = f.beta2 * v[i] + f.one_minus_beta2 * (g * g);
        const float update = m[i] / f.bias1 / (std::sqrt(v[i]) / f.bias2_root + f.eps);
        master[i] -= f.lr * (update + f.decay * master[i]);
    }
}

// ===========================================================================================================
// 4. Operators

constexpr int64_t MR = 6, NR = 16, KC = 512;  // matmul's tile, and its block of K

// C is computed in tiles of 6 x 16 elements that stay in registers while k runs. A and B are packed, so that
// the loop over k reads memory in order, and in blocks of 512 k, so that a block stays in the caches.
template <class Real> void matmul(int64_t M, int64_t N, int64_t K, Matrix<Real> A, Matrix<Real> B, Real* C) {
    for (int64_t k0 = 0; k0 < K; k0 += KC) {
        const int64_t depth = std::min(KC, K - k0);
        const auto a = pack(MR, A.data + k0 * A.col, A.row, A.col, M, depth);
        const auto b = pack(NR, B.data + k0 * B.row, B.col, B.row, N, depth);
#pragma omp parallel for collapse(2) if (M * N * depth > 1 << 16)
        for (int64_t j = 0; j < N; j += NR)
            for (int64_t i = 0; i < M; i += MR) {
                const Real *pa = a.data() + i * depth, *pb = b.data() + j * depth;
                Real sum[MR][NR] = {}, tile[MR][NR];
                for (int64_t k = 0; k < depth; k++, pa += MR, pb += NR)
                    for (int r = 0; r < MR; r++) {
#pragma omp simd
                        for (int c = 0; c < NR; c++) sum[r][c] += pa[r] * pb[c];
                    }
                // A copy in loops with constant bounds: otherwise the compiler would keep sum in memory.
                for (int r = 0; r < MR; r++)
                    for (int c = 0; c < NR; c++) tile[r][c] = sum[r][c];
                for (int64_t r = 0; r < std::min(MR, M - i); r++)
                    for (int64_t c = 0; c < std::min(NR, N - j); c++) C[(i + r) * N + j + c] += tile[r][c];
            }
    }
}

// Of a row: its mean, and rstd = 1 / sqrt(variance + eps). RMSNorm: mean 0, so that rstd = 1 / rms(x).
template <class Real>
static std::pair<Real, Real> mean_and_rstd(bool rms, Real eps, int64_t C, const Real* x) {
    Real mean = 0, square = 0;
    if (!rms) {
#pragma omp simd reduction(+ : mean)
        for (int64_t c = 0; c < C; c++) mean += x[c];
        mean /= Real(C);
    }
#pragma omp simd reduction(+ : square)
    for (int64_t c = 0; c < C; c++) square += (x[c] - mean) * (x[c] - mean);
    return {mean, 1 / std::sqrt(square / Real(C) + eps)};
}

// y = x^ weight + bias with x^ = (x - mean) rstd
template <class Real>
void norm_forward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                  const Real* bias, Real* y) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        const auto [mean, rstd] = mean_and_rstd(rms, eps, C, x + n * C);
        for (int64_t c = 0; c < C; c++)
            y[n * C + c] = (x[n * C + c] - mean) * rstd * weight[c] + (bias ? bias[c] : Real(0));
    }
}

// With d = dy weight:  dx = (d - mean(d) - x^ mean(d x^)) rstd,  dweight = sum(dy x^),  dbias = sum(dy).
// RMSNorm has no mean(d).
template <class Real>
void norm_backward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                   const Real* dy, Real* dx, Real* dweight, Real* dbias) {
    std::vector<std::pair<Real, Real>> rows(N);
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        const auto [mean, rstd] = rows[n] = mean_and_rstd(rms, eps, C, x + n * C);
        Real mean_d = 0, mean_dx = 0;
#pragma omp simd reduction(+ : mean_d, mean_dx)
        for (int64_t c = 0; c < C; c++) {
            const Real d = dy[n * C + c] * weight[c];
            mean_d += d;
            mean_dx += d * (x[n * C + c] - mean) * rstd;
        }
        mean_d = rms ? Real(0) : mean_d / Real(C);
        mean_dx /= Real(C);
        for (int64_t c = 0; c < C; c++) {
            const Real normal = (x[n * C + c] - mean) * rstd;
            dx[n * C + c] = (dy[n * C + c] * weight[c] - mean_d - normal * mean_dx) * rstd;
        }
    }
    const int64_t block = 64;  // columns of one thread, so that every sum runs over the rows in order
#pragma omp parallel for
    for (int64_t c0 = 0; c0 < C; c0 += block)
        for (int64_t n = 0; n < N; n++)
            for (int64_t c = c0; c < std::min(C, c0 + block); c++) {
                dweight[c] += dy[n * C + c] * (x[n * C + c] - rows[n].first) * rows[n].second;
                if (dbias) dbias[c] += dy[n * C + c];
            }
}

// Qwen3: a head is a row of norm_forward(), with HS columns.
template <class Real> void head_norm_forward(const ModelConfig& c, int64_t N, const Real* weight, Real* qkv) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        Real *q = qkv + n * c.qkv_cols(), *k = q + c.q_cols();
        norm_forward<Real>(true, Real(c.norm_eps), c.NH, c.HS(), q, weight, nullptr, q);
        norm_forward<Real>(true, Real(c.norm_eps), c.NKV, c.HS(), k, weight + c.HS(), nullptr, k);
    }
}
template <class Real>
void head_norm_backward(const ModelConfig& c, int64_t N, const Real* qkv, const Real* weight, Real* dqkv,
                        Real* dweight) {
    for (int64_t n = 0; n < N; n++)  // one after the other, so that every sum runs over the rows in order
        for (const bool k : {false, true}) {
            const int64_t at = n * c.qkv_cols() + (k ? c.q_cols() : 0), of = k ? c.HS() : 0;
            const std::vector<Real> dy(dqkv + at, dqkv + at + (k ? c.kv_cols() : c.q_cols()));
            norm_backward<Real>(true, Real(c.norm_eps), k ? c.NKV : c.NH, c.HS(), qkv + at, weight + of,
                                dy.data(), dqkv + at, dweight + of, nullptr);
        }
}

template <class Real> static Real sigmoid(Real x) { return 1 / (1 + std::exp(-x)); }

// gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
constexpr double GELU_SCALE = 0.79788456080286536, GELU_CUBE = 0.044715;

template <class Real> static Real tanh_of_gelu(Real x) {
    return std::tanh(Real(GELU_SCALE) * (x + Real(GELU_CUBE) * x * x * x));
}

// silu(gate) up with silu(a) = a sigmoid(a); or gelu
template <class Real>
void activation_forward(bool gated, int64_t N, int64_t F, const Real* gate_up, Real* act) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            const Real *x = gate_up + (gated ? 2 : 1) * n * F + f, a = *x;  // up is x[F]
            act[n * F + f] = gated ? a * sigmoid(a) * x[F] : Real(0.5) * a * (1 + tanh_of_gelu(a));
        }
}

// dup = dact silu(gate),  dgate = dact up silu'(gate)  with  silu'(a) = s (1 + a (1 - s)),  s = sigmoid(a)
template <class Real>
void activation_backward(bool gated, int64_t N, int64_t F, const Real* gate_up, const Real* dact,
                         Real* dgate_up) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            const int64_t at = (gated ? 2 : 1) * n * F + f;
            const Real d = dact[n * F + f], a = gate_up[at];
            if (gated) {
                const Real s = sigmoid(a);
                dgate_up[at + F] = d * a * s;
                dgate_up[at] = d * gate_up[at + F] * s * (1 + a * (1 - s));
            } else {
                const Real t = tanh_of_gelu(a), square = std::min(a * a, Real(1000));  // 0 * infinity is NaN
                const Real slope = Real(GELU_SCALE) * (1 + 3 * Real(GELU_CUBE) * square);
                dgate_up[at] = d * Real(0.5) * (1 + t + a * (1 - t * t) * slope);
            }
        }
}

// f_i = theta^(-2i / HS), scaled as the model wants (coat.h, RopeScaling). The formula of llama3 is
// apply_scaling in Meta's llama-models and _compute_llama3_parameters in transformers.
double rope_frequency(const ModelConfig& c, int64_t i) {
    const RopeScaling& s = c.rope_scaling;
    const double f = std::pow(double(c.rope_theta), -2.0 * double(i) / double(c.HS()));
    if (s.type == RopeScaling::Default) return f;
    const double wavelength = 2 * 3.14159265358979323846 / f, original = double(s.original_positions);
    if (wavelength > original / s.low_freq_factor) return f / s.factor;
    if (wavelength < original / s.high_freq_factor) return f;
    const double low = s.low_freq_factor, high = s.high_freq_factor;
    const double smooth = (original / wavelength - low) / (high - low);
    return (1 - smooth) * f / s.factor + smooth * f;
}

// Rotates (x_i, x_(i + HS/2)) at position t by the angle t f_i: the heads of q, then those of k, but not v.
template <class Real> void rope(const ModelConfig& c, int64_t B, int64_t T, Real* qkv, bool inverse) {
    const int64_t half = c.HS() / 2;
#pragma omp parallel for
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < half; i++) {
            const double angle = double(t) * rope_frequency(c, i);
            const Real cosine = Real(std::cos(angle)), sine = Real(std::sin(inverse ? -angle : angle));
            for (int64_t b = 0; b < B; b++)
                for (int64_t head = 0; head < c.NH + c.NKV; head++) {
                    Real* x = qkv + (b * T + t) * c.qkv_cols() + head * c.HS() + i;
                    const Real first = x[0], second = x[half];
                    x[0] = first * cosine - second * sine;
                    x[half] = second * cosine + first * sine;
                }
        }
}

template <class Real> static Real dot(const Real* a, const Real* b, int64_t n) {
    Real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

template <class Real> static void add_scaled(int64_t n, Real scale, const Real* x, Real* y) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] += scale * x[i];
}

// out[j] = scale * x . k_j for j < n, with the vectors k_j as columns (HS, T): out[j] is a sum over d, but
// the inner loop is over j, which vectorizes.
template <class Real>
static void dot_products(const Real* x, const std::vector<Real>& columns, int64_t T, int64_t n, Real scale,
                         Real* out) {
    std::fill(out, out + n, Real(0));
    for (size_t d = 0; d < columns.size() / T; d++) add_scaled(n, x[d] * scale, columns.data() + d * T, out);
}

// Query t reads keys j <= t:  p_j = softmax(q . k_j / sqrt(HS)),  out = sum_j p_j v_j. The largest score is
// subtracted from all, which does not change the softmax, so that exp cannot overflow.
template <class Real>
void attention_forward(const ModelConfig& c, int64_t B, int64_t T, const Real* qkv, Real* out, Real* lse) {
    const int64_t HS = c.HS(), NH = c.NH, row = c.qkv_cols();
    const Real scale = 1 / std::sqrt(Real(HS));
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t head = 0; head < NH; head++) {
            const Real* q = qkv + b * T * row + head * HS;  // of query t: q + t * row; k and v likewise
            const Real* k = qkv + b * T * row + c.q_cols() + head / (NH / c.NKV) * HS;
            const Real* v = k + c.kv_cols();
            const auto keys = transposed(k, T, HS, row);  // so that the loop over keys is the innermost
            std::vector<Real> p(T);
            for (int64_t t = 0; t < T; t++) {
                dot_products(q + t * row, keys, T, t + 1, scale, p.data());
                const Real largest = *std::max_element(p.begin(), p.begin() + t + 1);
                Real sum = 0;
                for (int64_t j = 0; j <= t; j++) sum += p[j] = std::exp(p[j] - largest);
                lse[(b * NH + head) * T + t] = largest + std::log(sum);
                Real* y = out + ((b * T + t) * NH + head) * HS;
                std::fill(y, y + HS, Real(0));
                for (int64_t j = 0; j <= t; j++) add_scaled(HS, p[j] / sum, v + j * row, y);
            }
        }
}

// p is computed again from the saved log-sum-exp: p_j = exp(q . k_j / sqrt(HS) - lse). Then
//   dv_j += p_j dout,  ds_j = p_j (dout . v_j - dout . out) / sqrt(HS),  dq += ds_j k_j,  dk_j += ds_j q.
// One thread has all query heads that share a key/value head, so that sums have a fixed order.
template <class Real>
void attention_backward(const ModelConfig& c, int64_t B, int64_t T, const Real* qkv, const Real* out,
                        const Real* lse, const Real* dout, Real* dqkv) {
    const int64_t HS = c.HS(), NH = c.NH, group = NH / c.NKV, row = c.qkv_cols();
    const Real scale = 1 / std::sqrt(Real(HS));
    std::fill(dqkv, dqkv + B * T * row, Real(0));
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t kv = 0; kv < c.NKV; kv++) {
            // Where the key and the value of position 0 begin in a row, and in its gradient.
            const int64_t key = b * T * row + c.q_cols() + kv * HS, value = key + c.kv_cols();
            const auto keys = transposed(qkv + key, T, HS, row), values = transposed(qkv + value, T, HS, row);
            std::vector<Real> p(T), ds(T);
            for (int64_t head = kv * group; head < (kv + 1) * group; head++)
                for (int64_t t = 0; t < T; t++) {
                    const int64_t query = (b * T + t) * row + head * HS, y = ((b * T + t) * NH + head) * HS;
                    const Real *q = qkv + query, *dy = dout + y;
                    const Real log_sum = lse[(b * NH + head) * T + t], dy_y = dot(dy, out + y, HS);
                    dot_products(q, keys, T, t + 1, scale, p.data());
                    dot_products(dy, values, T, t + 1, Real(1), ds.data());
                    for (int64_t j = 0; j <= t; j++) p[j] = std::exp(p[j] - log_sum);
                    for (int64_t j = 0; j <= t; j++) ds[j] = p[j] * (ds[j] - dy_y) * scale;
                    for (int64_t j = 0; j <= t; j++) {
                        add_scaled(HS, p[j], dy, dqkv + value + j * row);
                        add_scaled(HS, ds[j], q, dqkv + key + j * row);
                        add_scaled(HS, ds[j], qkv + key + j * row, dqkv + query);
                    }
                }
        }
}

// loss = log(sum_v exp(logit_v)) - logit_target;  its gradient is softmax(logits) - (v == target). Both are 0
// where no target counts.
template <class Real>
double cross_entropy(int64_t N, int64_t V, int64_t V_stride, Real* logits, const int32_t* targets,
                     Real scale) {
    std::vector<double> losses(N);
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        Real* row = logits + n * V_stride;
        if (targets[n] == NO_TARGET) {
            std::fill(row, row + V_stride, Real(0));
            continue;
        }
        const Real largest = *std::max_element(row, row + V), target = row[targets[n]];
        Real sum = 0;
        for (int64_t v = 0; v < V; v++) sum += row[v] = std::exp(row[v] - largest);
        losses[n] = double(std::log(sum) + largest - target);
        for (int64_t v = 0; v < V; v++) row[v] *= scale / sum;
        row[targets[n]] -= scale;
        std::fill(row + V, row + V_stride, Real(0));
    }
    return std::accumulate(losses.begin(), losses.end(), 0.0);
}

// The compiler generates a template only where it is used. These uses are for the callers in other files.
template <class Real> auto instantiate() {
    return std::make_tuple(matmul<Real>, norm_forward<Real>, norm_backward<Real>, rope<Real>,
                           head_norm_forward<Real>, head_norm_backward<Real>, activation_forward<Real>,
                           activation_backward<Real>, attention_forward<Real>, attention_backward<Real>,
                           cross_entropy<Real>);
}
template auto instantiate<float>();
template auto instantiate<double>();

// ===========================================================================================================
// 5. The precision flow (paper section 5): which tensor has which format
//
// Every tensor that is stored is in the recipe's compute dtype (BF16) or quantized, but for attention's
// log-sum-exp and sums of many gradients (gradient_format), which are FP32. Four results are quantized from
// FP32, without rounding to BF16 first: the residual sum, the outputs of norms, the activation's output, and
// the gradient of its input. In the recipe coat:
//   GEMM operands                 FP8 with per-tensor scales: activations and weights E4M3, gradients E5M2
//   inputs of norms 1 and 2 and   E4M3 with a scale for each 1x16 group of a token; saved for backward
//     of the activation
//   all other tensors             BF16: attention, residual stream, final norm, embedding, head
// Backward computes the outputs of norms and of the activation again, from the saved inputs. Both passes read
// the same quantized values, so that the gradient is that of the computed loss. (Not in coat-saved: see
// as_forward_reads().)

namespace {

template <class Real> class Network {
    // In double nothing is rounded or quantized: then what is saved for backward is the tensor itself.
    static constexpr bool QUANTIZES = std::is_same_v<Real, float>;
    using SavedActivation = std::conditional_t<QUANTIZES, Quantized, std::vector<Real>>;

public:
    using Tensor = std::vector<Real>;
    const Setup setup_;
    const ModelConfig& config = setup_.config;
    const Recipe& recipe = setup_.recipe;
    const std::vector<Param> params = parameters(config);
    std::vector<Tensor> weights, gradients;  // by parameter, in the compute dtype and in gradient_format()
    // By parameter; without a history unless the recipe delays.
    std::vector<std::array<DelayedScale, OPERANDS>> delayed_scales;
    QuantStats* stats = nullptr;  // one for each ReportKind; null: not measured
    bool finite = true;           // so far, every loss and every tensor that was quantized to FP8

    explicit Network(const Setup& s) : setup_(s), delayed_scales(params.size()) {
        for (const Param& p : params) {
            index_[p.name] = weights.size();
            weights.emplace_back(p.size());
            gradients.emplace_back(p.size());
            if (p.role.linear && recipe.scaling == Scaling::Delayed)
                for (DelayedScale& d : delayed_scales[index_[p.name]]) d.history.resize(recipe.history);
        }
    }

    QuantStats* stats_of(ReportKind k) const { return stats ? stats + int(k) : nullptr; }

    // Before a step, or a forward pass on its own.
    void begin() {
        finite = true;
        for (auto& operands : delayed_scales)
            for (DelayedScale& d : operands) d.amax = 0;
    }

    // tokens (B, T) -> input of the final norm (N, C). The embedding is not quantized, as in the paper:
    // residual[n] = embedding[token n] (+ positions[n mod T]).
    Tensor forward(const int32_t* tokens, int64_t B, int64_t T) {
        B_ = B, T_ = T, N_ = B * T;
        saved_.clear();
        const int64_t C = config.C;
        Tensor residual(N_ * C);
        for (int64_t n = 0; n < N_; n++) {
            std::copy_n(&weight("embedding")[tokens[n] * C], C, &residual[n * C]);
            if (!config.arch.rope) add_scaled(C, Real(1), &weight("positions")[n % T * C], &residual[n * C]);
        }
        for (int64_t l = 0; l < config.L; l++) residual = block_forward(l, residual);
        return rounded(residual);
    }

    // Returns the sum of the losses. If loss_scale is not 0, adds the gradients of that sum times loss_scale.
    double run(const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T, double loss_scale) {
        const int64_t V = config.padded_V(), C = config.C;
        const Tensor x = forward(tokens, B, T), y = rounded(norm("final_norm", x));
        Tensor logits = head_forward(y);
        const double loss = cross_entropy(N_, config.V, V, logits.data(), targets, Real(loss_scale));
        finite = finite && std::isfinite(loss);
        if (loss_scale == 0) return loss;

        // Head -> final norm -> blocks, last to first
        const Tensor dlogits = rounded(logits);  // cross_entropy has replaced the logits by their gradients
        Tensor dhead(V * C), dy(N_ * C);
        matmul<Real>(V, C, N_, {dlogits.data(), 1, V}, {y.data(), C, 1}, dhead.data());
        matmul<Real>(N_, C, V, {dlogits.data(), V, 1}, {weight(head()).data(), C, 1}, dy.data());
        add_gradient(head(), dhead);
        Tensor dresidual = rounded(norm_gradient("final_norm", x, rounded(dy)));
        for (int64_t l = config.L; l-- > 0;) dresidual = block_backward(l, dresidual);

        // Embedding: a row has the sum over all places of its token, or of its position
        Tensor dembedding(V * C), dpositions(config.arch.rope ? 0 : config.max_T * C);
        for (int64_t n = 0; n < N_; n++) {
            add_scaled(C, Real(1), &dresidual[n * C], &dembedding[tokens[n] * C]);
            if (!config.arch.rope) add_scaled(C, Real(1), &dresidual[n * C], &dpositions[n % T * C]);
        }
        add_gradient("embedding", dembedding);
        if (!config.arch.rope) add_gradient("positions", dpositions);
        return loss;
    }

    // y (rows, C) -> logits (rows, padded_V). The head is not quantized.
    Tensor head_forward(const Tensor& y) const {
        const int64_t rows = int64_t(y.size()) / config.C, V = config.padded_V(), C = config.C;
        Tensor logits(rows * V);
        matmul<Real>(rows, V, C, {y.data(), C, 1}, {weight(head()).data(), 1, C}, logits.data());
        return rounded(logits);
    }

    Tensor norm(const std::string& name, const Tensor& x) const {  // (rows, C), FP32
        const int64_t C = config.C, rows = int64_t(x.size()) / C;
        const Real* bias = config.arch.rms ? nullptr : weight(name + ".bias").data();
        Tensor y(x.size());
        norm_forward<Real>(config.arch.rms, Real(config.norm_eps), rows, C, x.data(),
                           weight(name + ".weight").data(), bias, y.data());
        return y;
    }

    Tensor rounded(Tensor x) const {  // to the compute dtype
        for (Real& v : x)
            if constexpr (QUANTIZES) v = round_to(recipe.compute, v);
        return x;
    }

private:
    // What a layer saves for backward (paper table 2; coat.h, saved_per_layer()).
    struct SavedLayer {
        SavedActivation norm1_input, qkv, attention, norm2_input, gate_up;
        Tensor lse;
    };

    const LinearFormats formats_ = linear_formats(setup_);
    std::map<std::string, size_t> index_;
    std::vector<SavedLayer> saved_;
    int64_t B_ = 0, T_ = 0, N_ = 0;

    bool has_bias(const std::string& linear) const { return index_.count(linear + ".bias"); }
    const Tensor& weight(const std::string& name) const { return weights[index_.at(name)]; }
    std::string head() const { return config.tied ? "embedding" : "head"; }

    static Tensor sum(Tensor x, const Tensor& y) {
        add_scaled(int64_t(x.size()), Real(1), y.data(), x.data());
        return x;
    }
    void add_gradient(const std::string& name, const Tensor& contribution) {
        Tensor& gradient = gradients[index_.at(name)];
        gradient = sum(gradient, contribution);
        if (gradient_format(setup_) == recipe.compute) gradient = rounded(gradient);
    }

    // An FP8 code saturates and so hides an infinity: every tensor is checked before it is quantized to FP8.
    float checked_amax(const Floats& x) {
        const float largest = amax(x.data(), int64_t(x.size()));
        finite = finite && std::isfinite(largest);
        return largest;
    }

    // Save for backward, as the recipe says: quantize x (N, cols). load() dequantizes what was saved.
    SavedActivation save(const Tensor& x, int64_t cols, const Quant& q, ReportKind kind) {
        if constexpr (!QUANTIZES) return x;
        else {
            if (q.fp8()) checked_amax(x);
            return quantize(x.data(), N_, cols, q, stats_of(kind));
        }
    }
    // What a norm or an activation function reads in the forward pass (coat.h, forward_reads_groups).
    Tensor as_forward_reads(const Tensor& x, const SavedActivation& saved) const {
        return recipe.forward_reads_groups ? load(saved) : rounded(x);
    }
    static Tensor load(const SavedActivation& saved) {
        if constexpr (!QUANTIZES) return saved;
        else return dequantize(saved);
    }

    // --- Linear layers: quantize the operands along the reduction, GEMM, round to the compute dtype ---

    // x (rows, cols), an operand of the GEMMs of parameter i, as these read it. The scale of a whole tensor
    // is made here: just in time from the amax of x, or delayed. quantize() makes those of smaller blocks.
    Tensor linear_operand(LinearOperand which, size_t i, const Tensor& x, int64_t cols, ReduceOver over) {
        if constexpr (!QUANTIZES) return x;
        else {
            constexpr ReportKind KINDS[] = {ReportKind::LinearInput, ReportKind::Weight,
                                            ReportKind::Gradient};
            const Quant quants[] = {formats_.x, formats_.w, formats_.g}, &q = quants[int(which)];
            const float largest = q.fp8() ? checked_amax(x) : 0;
            float scale = scale_of(q, largest);
            if (recipe.scaling == Scaling::Delayed && q.fp8()) {
                DelayedScale& d = delayed_scales[i][int(which)];
                d.amax = std::max(d.amax, largest);
                scale = d.scale > 0 ? d.scale : scale_of(q, d.amax);
            }
            return operand(x, int64_t(x.size()) / cols, cols, q, over, stats_of(KINDS[int(which)]),
                           q.granularity == PER_TENSOR ? &scale : nullptr);
        }
    }

    // x (N, in) -> y (N, out). x8, w8 and g8 are quantized and decoded again: FP32 values that FP8 can hold.
    Tensor linear_forward(const std::string& name, const Tensor& x) {
        const size_t i = index_.at(name);
        const int64_t in = params[i].cols, out = params[i].rows;
        const Tensor x8 = linear_operand(LinearOperand::X, i, x, in, ReduceOver::Columns);
        const Tensor w8 = linear_operand(LinearOperand::W, i, weights[i], in, ReduceOver::Columns);
        Tensor y(N_ * out);
        matmul<Real>(N_, out, in, {x8.data(), in, 1}, {w8.data(), 1, in}, y.data());  // fprop: y = x w^T
        if (has_bias(name))
            for (int64_t n = 0; n < N_; n++)
                add_scaled(out, Real(1), weight(name + ".bias").data(), &y[n * out]);
        return rounded(y);
    }

    // dy (N, out) -> dx (N, in); adds to the gradients of the weight and the bias
    Tensor linear_backward(const std::string& name, const Tensor& x, const Tensor& dy) {
        const size_t i = index_.at(name);
        const int64_t in = params[i].cols, out = params[i].rows;
        const Tensor x8 = linear_operand(LinearOperand::X, i, x, in, ReduceOver::Rows);
        const Tensor w8 = linear_operand(LinearOperand::W, i, weights[i], in, ReduceOver::Rows);
        Tensor g8 = linear_operand(LinearOperand::G, i, dy, out, ReduceOver::Columns);
        Tensor dx(N_ * in), dw(out * in);
        matmul<Real>(N_, in, out, {g8.data(), out, 1}, {w8.data(), in, 1}, dx.data());  // dgrad: dx = g w
        if (!formats_.g.granularity.symmetric())  // its blocks run along the reduction: over tokens now
            g8 = linear_operand(LinearOperand::G, i, dy, out, ReduceOver::Rows);
        matmul<Real>(out, in, N_, {g8.data(), 1, out}, {x8.data(), in, 1}, dw.data());  // wgrad: dw = g^T x
        add_gradient(name, dw);
        if (has_bias(name)) {  // sums g; with FP8 GEMMs dy itself, which is more precise than its codes
            Tensor dbias(out);
            const Tensor& g = formats_.g.fp8() ? dy : g8;
            for (int64_t n = 0; n < N_; n++) add_scaled(out, Real(1), &g[n * out], dbias.data());
            add_gradient(name + ".bias", dbias);
        }
        return rounded(dx);
    }

    Tensor norm_gradient(const std::string& name, const Tensor& x, const Tensor& dy) {  // dx, FP32
        Tensor dx(x.size()), dweight(config.C), dbias(config.C);
        norm_backward<Real>(config.arch.rms, Real(config.norm_eps), N_, config.C, x.data(),
                            weight(name + ".weight").data(), dy.data(), dx.data(), dweight.data(),
                            dbias.data());
        add_gradient(name + ".weight", dweight);
        if (!config.arch.rms) add_gradient(name + ".bias", dbias);
        return dx;
    }

    Tensor activation(const Tensor& gate_up) const {
        Tensor act(N_ * config.F);
        activation_forward<Real>(config.arch.gated, N_, config.F, gate_up.data(), act.data());
        return act;
    }

    // q, k, v as attention reads them. Qwen3 saves them before the norms of their heads and RoPE.
    Tensor attention_input(const std::string& layer, Tensor qkv) const {
        if (!config.arch.qk_norm) return qkv;
        head_norm_forward(config, N_, weight(layer + "qk_norm.weight").data(), qkv.data());
        qkv = rounded(qkv);
        rope(config, B_, T_, qkv.data(), false);
        return rounded(qkv);
    }

    // --- One transformer block: the rows of the table that ./train --plan prints, in its order ---

    // residual (N, C) -> the same after the block: the residual stream plus the output of the last branch, in
    // FP32. The norm's input is quantized from this sum; the stream goes on as the sum rounded to BF16.
    Tensor block_forward(int64_t l, const Tensor& residual) {
        const std::string layer = "layers." + std::to_string(l) + ".";
        SavedLayer& s = saved_.emplace_back();

        // Residual sum -> norm 1 input, saved in groups. The norm reads these, or (coat-saved) the BF16 sum
        s.norm1_input = save(residual, config.C, recipe.nonlinear, ReportKind::NormInput);

        // Norm 1 -> qkv -> RoPE
        const Tensor norm1 = norm(layer + "norm1", as_forward_reads(residual, s.norm1_input));
        Tensor qkv = linear_forward(layer + "qkv", norm1);
        if (config.arch.rope && !config.arch.qk_norm) rope(config, B_, T_, qkv.data(), false);
        s.qkv = save(rounded(qkv), config.qkv_cols(), recipe.attention, ReportKind::Attention);

        // Attention reads q, k, v as backward will load them, so that the log-sum-exp belongs to them. What
        // groups hold is FP32; attention computes in BF16
        qkv = attention_input(layer, rounded(load(s.qkv)));
        Tensor attention(N_ * config.q_cols());
        s.lse.resize(N_ * config.NH);
        attention_forward(config, B_, T_, qkv.data(), attention.data(), s.lse.data());
        s.attention = save(rounded(attention), config.q_cols(), recipe.attention, ReportKind::Attention);

        // Attention out -> residual sum -> norm 2 input
        const Tensor attention_out = linear_forward(layer + "attention_out", load(s.attention));
        const Tensor residual2 = sum(rounded(residual), attention_out);
        s.norm2_input = save(residual2, config.C, recipe.nonlinear, ReportKind::NormInput);

        // Norm 2 -> gate and up
        const Tensor norm2 = norm(layer + "norm2", as_forward_reads(residual2, s.norm2_input));
        const Tensor gate_up = linear_forward(layer + "gate_up", norm2);
        s.gate_up = save(gate_up, config.gate_up_cols(), recipe.nonlinear, ReportKind::ActivationInput);

        // SiLU(gate) x up -> down -> residual sum
        const Tensor act = activation(as_forward_reads(gate_up, s.gate_up));
        return sum(rounded(residual2), linear_forward(layer + "down", act));
    }

    // dresidual (N, C): gradient of the residual stream after the block -> before the block. It reaches the
    // input of a branch twice: along the stream, and through the branch. dX is the gradient of X.
    Tensor block_backward(int64_t l, Tensor dresidual) {
        const std::string layer = "layers." + std::to_string(l) + ".";
        const SavedLayer& s = saved_[l];

        // Down; act = SiLU(gate) x up is computed again
        const Tensor gate_up = load(s.gate_up);
        const Tensor dact = linear_backward(layer + "down", activation(gate_up), dresidual);

        // SiLU(gate) x up -> gate and up -> norm 2 -> residual gradient
        Tensor dgate_up(gate_up.size());
        const bool gated = config.arch.gated;
        activation_backward<Real>(gated, N_, config.F, gate_up.data(), dact.data(), dgate_up.data());
        const Tensor norm2_input = load(s.norm2_input);
        const Tensor norm2 = norm(layer + "norm2", norm2_input);
        const Tensor dnorm2 = linear_backward(layer + "gate_up", norm2, dgate_up);
        dresidual = rounded(sum(dresidual, norm_gradient(layer + "norm2", norm2_input, dnorm2)));

        // Attention out
        const Tensor dattention = linear_backward(layer + "attention_out", load(s.attention), dresidual);

        // Attention -> RoPE, in the compute dtype
        const Tensor attention = rounded(load(s.attention)), qkv = rounded(load(s.qkv));
        Tensor dqkv(qkv.size());
        attention_backward(config, B_, T_, attention_input(layer, qkv).data(), attention.data(), s.lse.data(),
                           dattention.data(), dqkv.data());
        dqkv = rounded(dqkv);
        if (config.arch.rope) rope(config, B_, T_, dqkv.data(), true), dqkv = rounded(dqkv);
        if (config.arch.qk_norm) {
            const std::string name = layer + "qk_norm.weight";
            Tensor dweight(2 * config.HS());
            head_norm_backward(config, N_, qkv.data(), weight(name).data(), dqkv.data(), dweight.data());
            add_gradient(name, dweight);
            dqkv = rounded(dqkv);
        }

        // qkv -> norm 1 -> residual gradient
        const Tensor norm1_input = load(s.norm1_input);
        const Tensor norm1 = norm(layer + "norm1", norm1_input);
        const Tensor dnorm1 = linear_backward(layer + "qkv", norm1, dqkv);
        return rounded(sum(dresidual, norm_gradient(layer + "norm1", norm1_input, dnorm1)));
    }
};

// ===========================================================================================================
// 6. The Model that train.cpp drives: weights, moments, and one training step
//
// Every rank has all weights and the sums of all gradients. It updates the part of the state that it owns.

class Reference : public Model, Network<float> {
public:
    explicit Reference(const Setup& setup) : Network(setup), states_(params.size()), sums_(params.size()) {
        for (size_t i = 0; i < states_.size(); i++) {
            const Param& p = params[i];
            const OptimizerFormat& o = setup.optimizer;
            const int64_t used = used_elements(setup.config, p), kept = owned(setup, p).count;
            ParamState& s = states_[i];
            s.m.init(p.moment(o.m), o.expand, kept, o.group_size);
            s.v.init(p.moment(o.v), o.expand, kept, o.group_size);
            s.weight.resize(p.size()), s.remainder.resize(p.size());
            for (int64_t e = 0; e < p.size(); e++) {
                const float first = initial(p.init_std, p.role.ones, used, setup.seed, i, e);
                split_master(first, &s.weight[e], &s.remainder[e]);
                if (!setup.master) s.remainder[e] = 0;
                weights[i][e] = weight_of(s, e);
            }
        }
    }

    StepResult step(const int32_t* tokens, const int32_t* targets, const AdamW& adamw) override {
        const int64_t N = setup_.B * setup_.T, accumulate = setup_.accumulate;
        begin();
        int64_t counted = 0;
        for (int64_t theirs : all_gather(counted_targets(targets, accumulate * N))) counted += theirs;
        if (counted == 0) return {0, 0, true};
        std::vector<double> losses;  // by micro-batch
        for (int64_t a = 0; a < accumulate; a++) {
            if (a == 0 || setup_.processes) clear_gradients();  // several ranks have their sums in sums_
            losses.push_back(run(tokens + a * N, targets + a * N, setup_.B, setup_.T, 1.0 / double(counted)));
            if (setup_.processes) sum_over_ranks(a == 0);
        }
        if (setup_.processes) gradients.swap(sums_);
        double loss = 0;  // added in the order of the micro-batches: a of rank r is number a * ranks + r
        const auto of_ranks = all_gather(losses);
        for (int64_t a = 0; a < accumulate; a++)
            for (const auto& of_rank : of_ranks) loss += of_rank[a];

        const double norm = gradient_norm(), scale = adamw_factors(adamw, false, norm).gradient_scale;
        for (char theirs : all_gather(char(finite))) finite = finite && theirs;  // on every rank
        // Below 2^62, the square of a clipped gradient fits every format of v. NaN fails, too.
        const bool skipped = !finite || !(norm * scale < 0x1p62);
        const uint64_t key = rounding_key(setup_.seed, adamw.step + adamw.skipped);
        for (size_t i = 0; i < params.size() && !skipped; i++) {
            update(states_[i], i, adamw_factors(adamw, params[i].role.decay, norm), key);
            refresh(i);
        }
        if (!skipped) end_delayed_step();
        return {loss / double(counted), norm, skipped, counted};
    }

    double evaluate(const int32_t* tokens, const int32_t* targets) override {
        const int64_t N = setup_.B * setup_.T;
        begin();
        const double loss = run(tokens, targets, setup_.B, setup_.T, 0) / divisor_of_mean(targets, N);
        return finite ? loss : NAN;
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        begin();
        const auto x = forward(tokens, 1, n);
        const Floats last(x.end() - config.C, x.end());
        const auto row = head_forward(rounded(norm("final_norm", last)));
        std::copy(row.begin(), row.begin() + config.V, logits);
    }

    QuantReport quantization(const int32_t* tokens, const int32_t* targets) override {
        const int64_t N = setup_.B * setup_.T;
        begin();
        clear_gradients();
        QuantReport report;
        stats = report.kinds;
        run(tokens, targets, setup_.B, setup_.T, 1.0 / divisor_of_mean(targets, N));
        // The expansion factors are those of the moments stored now. The errors are those of the moments that
        // a step with these gradients would store: it runs with lr = 0 and a copy of the state.
        for (size_t i = 0; i < params.size(); i++) {
            ParamState s = states_[i];
            report.k_m.insert(report.k_m.end(), s.m.k.begin(), s.m.k.end());
            report.k_v.insert(report.k_v.end(), s.v.k.begin(), s.v.k.end());
            update(s, i, adamw_factors({1, 0.0f}, false, 0), 0);
        }
        stats = nullptr;
        return report;
    }

    void read(const std::string& name, void* out) override {
        const auto [data, bytes] = find(name);
        if (bytes) std::memcpy(out, data, bytes);
    }
    void write(const std::string& name, const void* in) override {
        const auto [data, bytes] = find(name, true);
        if (bytes) std::memcpy(data, in, bytes);
        refresh(param_of(params, name));
    }

    const Setup& setup() const override { return setup_; }

private:
    // One parameter: moments of the elements that this rank owns. Only their weights are kept up to date.
    struct ParamState {
        std::vector<uint16_t> weight;
        std::vector<int16_t> remainder;  // 0 without a master
        Moment m, v;
    };

    std::vector<ParamState> states_;
    std::vector<Floats> sums_;  // with several ranks: of gradients, by parameter

    // What the network computes with: the BF16 weight, or the master if the compute dtype is FP32.
    float weight_of(const ParamState& s, int64_t e) const {
        const bool bf16 = recipe.compute == Format::BF16;
        return bf16 ? from_bf16(s.weight[e]) : join_master(s.weight[e], s.remainder[e]);
    }

    void clear_gradients() {
        for (size_t i = 0; i < params.size(); i++) gradients[i].assign(params[i].size(), 0.0f);
    }

    // A value, or a vector of values, of all ranks in their order.
    template <class T> std::vector<T> all_gather(const T& mine) const {
        return setup_.processes ? setup_.processes->all_gather(mine) : std::vector<T>{mine};
    }

    // After every micro-batch, in FP32 and in the order of the ranks: sum = round(sum + g_0 + g_1 + ...).
    void sum_over_ranks(bool first) {
        for (size_t i = 0; i < params.size(); i++) {
            Floats& sum = sums_[i];
            if (first) sum.assign(params[i].size(), 0.0f);
            const std::vector<Floats> of_ranks = all_gather(gradients[i]);
            for (size_t e = 0; e < sum.size(); e++) {
                for (const Floats& gradient : of_ranks) sum[e] += gradient[e];
                sum[e] = round_to(gradient_format(setup_), sum[e]);
            }
        }
    }

    // The squares are summed within shard units, then over these: the same bits for any number of ranks.
    double gradient_norm() const {
        double sum = 0;
        for (const Floats& gradient : gradients)
            for (size_t first = 0; first < gradient.size(); first += SHARD_UNIT) {
                double unit = 0;
                for (size_t e = first; e < std::min<size_t>(gradient.size(), first + SHARD_UNIT); e++)
                    unit += double(gradient[e]) * gradient[e];
                sum += unit;
            }
        return std::sqrt(sum);
    }

    // After an update or write(), each rank has changed its part of the weights: they exchange these.
    void refresh(size_t i) {
        const ParamState& s = states_[i];
        const Range kept = owned(setup_, params[i]);
        Floats mine(kept.count);
        for (int64_t e = 0; e < kept.count; e++) mine[e] = weight_of(s, kept.first + e);
        auto to = weights[i].begin();
        for (const Floats& part : params[i].rows > 1 ? all_gather(mine) : std::vector<Floats>{mine})
            to = std::copy(part.begin(), part.end(), to);
    }

    // Delayed scaling: the amax of an operand is the largest of all ranks. It gives the next step's scale.
    // Linear layers without FP8 take no amaxes: then histories and scales stay as they are.
    void end_delayed_step() {
        if (!linear_formats(setup_).x.fp8()) return;
        for (auto& operands : delayed_scales)
            for (int o = 0; o < OPERANDS; o++) {
                DelayedScale& d = operands[o];
                if (d.history.empty()) continue;  // not a linear layer, or just-in-time scaling
                for (float theirs : all_gather(d.amax)) d.amax = std::max(d.amax, theirs);
                d.end_step(quant_of(recipe, LinearOperand(o)).format);
            }
    }

    // Dequantizes the moments, runs AdamW in FP32, and quantizes them again. s: of parameter i, or a copy.
    void update(ParamState& s, size_t i, const AdamWFactors& f, uint64_t key) const {
        const auto [first, n] = owned(setup_, params[i]);
        Floats master(n), m(n), v(n);
        for (int64_t e = 0; e < n; e++) master[e] = join_master(s.weight[first + e], s.remainder[first + e]);
        s.m.load(m.data());
        s.v.load(v.data());
        adamw(f, n, gradients[i].data() + first, master.data(), m.data(), v.data());
        s.m.store(m.data(), false, stats_of(ReportKind::Moment1));
        s.v.store(v.data(), true, stats_of(ReportKind::Moment2));
        for (int64_t e = 0, at = first; e < n; e++, at++)
            if (setup_.master) split_master(master[e], &s.weight[at], &s.remainder[at]);
            else s.weight[at] = round_stochastically(master[e], key, params[i].offset + at);
    }

    // Where this rank's part of a tensor begins, and its bytes. Gradients are not written.
    std::pair<void*, size_t> find(const std::string& name, bool to_write = false) {
        using Place = std::pair<void*, size_t>;
        auto part = [](auto& v, Range s) { return Place(v.data() + s.first, s.count * sizeof(v[0])); };
        auto whole = [&](auto& v) { return part(v, {0, int64_t(v.size())}); };
        const size_t i = param_of(params, name);
        const Range own = owned(setup_, params[i]);
        ParamState& s = states_[i];
        std::map<std::string, Place> places = {{"", part(s.weight, own)},  {".m", whole(s.m.codes)},
                                               {".m.max", whole(s.m.max)}, {".m.k", whole(s.m.k)},
                                               {".v", whole(s.v.codes)},   {".v.max", whole(s.v.max)},
                                               {".v.k", whole(s.v.k)}};
        if (setup_.master) places[".remainder"] = part(s.remainder, own);
        if (setup_.keep_gradients && !to_write) places[".gradient"] = part(gradients[i], own);
        for (int o = 0; o < OPERANDS && !delayed_scales[i][o].history.empty(); o++) {
            DelayedScale& d = delayed_scales[i][o];
            places[OPERAND_NAMES[o] + std::string(".history")] = whole(d.history);
            places[OPERAND_NAMES[o] + std::string(".scale")] = {&d.scale, sizeof d.scale};
        }
        const auto place = places.find(name.substr(params[i].name.size()));
        if (place == places.end()) throw Error("The model has no tensor " + name + ".");
        return place->second;
    }
};

}  // namespace

double loss_in_double(const ModelConfig& c, int64_t B, int64_t T,
                      const std::vector<std::vector<double>>& weights, const int32_t* tokens,
                      const int32_t* targets, std::vector<std::vector<double>>* gradients) {
    const Recipe& recipe = find_row(recipes(), "fp32", "--recipe");
    Network<double> network({c, recipe, find_row(optimizers(), "fp32", "--optimizer"), B, T});
    network.weights = weights;
    const double scale = 1.0 / divisor_of_mean(targets, B * T);
    const double loss = network.run(tokens, targets, B, T, gradients ? scale : 0) * scale;
    if (gradients) *gradients = network.gradients;
    return loss;
}

}  // namespace coat::reference

std::unique_ptr<coat::Model> coat::make_reference(const Setup& setup) {
    // Every step allocates the same temporary tensors. The allocator must not return their memory to the
    // system, or a third of the time goes into fresh pages.
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 2147483647);
    return std::make_unique<reference::Reference>(setup);
}
