// reference.cpp - COAT (arXiv 2410.19313) on the CPU, loop by loop: the operators of a training step. Read
// formats.h first, and this file beside the paper. It knows nothing of the GPU, whose kernels are tested
// against it; ./train uses it if there is no GPU. Each part needs only the parts before it:
//   1. Formats         FP8, FP16 and BF16: from FP32 to codes and back       (paper, preliminaries)
//   2. Quantizers      scales                                                (paper, preliminaries)
//                      granularity                                           (paper, section 5.1)
//                      group scaling: the amax of a tensor in two stages     (paper, section 5.2)
//   3. FP8 optimizer   dynamic range expansion, AdamW                        (paper, section 4)
//   4. Operators       norm, activation, RoPE, attention, cross entropy
// The matrix multiplication is in reference_matmul.cpp: it has to be fast, and the rest can be understood
// without it. reference_model.cpp makes a training step of all these.
//
// Each element of an output is computed by one thread, in a fixed order. So the result is the same for any
// number of threads. (Only a maximum is taken over threads, because its order does not matter.)
#include "reference.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <numeric>

namespace coat::reference {

using Floats = std::vector<float>;

// ===========================================================================================================
// 1. Formats (paper, preliminaries)
//
// FP8 and FP16 have a sign, an exponent and a mantissa of M bits. FP32 is built alike, with more bits and a
// larger bias.
//   normal:     value = 2^(exponent - bias) (1 + mantissa / 2^M)        exponent > 0
//   subnormal:  value = 2^(1 - bias) mantissa / 2^M                     exponent = 0

static int exponent_bias(Format f) { return f == Format::E4M3 ? 7 : 15; }
static uint32_t sign_bit(Format f) { return f == Format::FP16 ? 0x8000 : 0x80; }
// 2^e as an FP32 value, from -126 to 127: e + 127 is the exponent field, and the mantissa is 0.
static float power_of_two(int e) { return std::bit_cast<float>(uint32_t(127 + e) << 23); }

// The code of the FP8 or FP16 value that is nearest to x. Of two values that are equally near, it is the one
// with an even mantissa. A value beyond FMAX becomes FMAX.
//
// Values from 2^e to 2^(e+1) are 2^(e - M) apart, with M mantissa bits. So |x| is counted in steps of
// 2^(e - M). A normal value has 2^M + mantissa steps, and its exponent field is e + bias:
//   code = mantissa + ((e + bias) << M) = steps + ((e + bias - 1) << M)
// For subnormals e is 1 - bias. So the second term is 0, and the code is the number of steps. In E4M3 M is 3
// and the bias 7:
//   x       e    steps of 2^(e - 3)   rounded   code
//   1.1     0    8.8                  9         9 + (6 << 3) = 0x39, which is 1.125
//   1.99    0    15.92                16        16 + (6 << 3) = 0x40, which is 2
//   2^-9   -6    1                    1         1 + (0 << 3) = 0x01, a subnormal
// In the second row rounding gives 2^(M + 1) steps. The sum then has the exponent field of the next power of
// two and the mantissa 0, as it should.
uint16_t encode(Format f, float x) {
    const int M = info(f).mantissa_bits;
    const int bias = exponent_bias(f);
    // If x is NaN, std::min() returns fmax: NaN is not less. The code of NaN is chosen below.
    const float magnitude = std::min(info(f).fmax, std::abs(x));
    const int e = std::max(int(std::bit_cast<uint32_t>(magnitude) >> 23) - 127, 1 - bias);
    const float steps = magnitude * power_of_two(M - e);  // |x| / 2^(e - M)
    const uint32_t code = uint32_t(int(std::nearbyint(steps))) + (uint32_t(e + bias - 1) << M);
    const uint32_t nan = f == Format::FP16 ? 0x7E00 : 0x7F;
    const uint32_t sign = (std::bit_cast<uint32_t>(x) >> 31) * sign_bit(f);
    return uint16_t((std::isnan(x) ? nan : code) | sign);
}

// The value of a code of FP8 or FP16. The fields of the code are moved to where FP32 has them, and the
// difference of the two biases is added to the exponent field. A code above that of FMAX gets the largest
// exponent field of FP32, which means infinity if the mantissa is 0, and NaN otherwise. In E4M3 only one code
// lies above that of FMAX. Its mantissa is 7, so it is NaN: E4M3 has no infinity.
float decode(Format f, uint16_t code) {
    const int M = info(f).mantissa_bits;
    const uint32_t magnitude = code & (sign_bit(f) - 1);
    const uint32_t bits = magnitude << (23 - M);  // exponent and mantissa where FP32 has them
    float value = std::bit_cast<float>(bits + (uint32_t(127 - exponent_bias(f)) << 23));
    if (magnitude >> M == 0) value = float(magnitude) * info(f).fmin;            // subnormal
    if (value > info(f).fmax) value = std::bit_cast<float>(bits | 0x7F800000u);  // infinity or NaN
    return code & sign_bit(f) ? -value : value;
}

// The bits of x rounded to the nearest BF16 value, ties to even. BF16 is the upper half of FP32. Adding
// 0x7FFF, plus 1 if the upper half is odd, carries into the upper half exactly when rounding goes up.
uint16_t to_bf16(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return uint16_t(bits >> 16 | 0x40u);  // NaN stays NaN
    return uint16_t((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}
float from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
// In FP32 x stays as it is. FP8 and FP16 need a scale: quantize() and Moment::store() round to them.
float round_to(Format f, float x) {
    if (f == Format::BF16) return from_bf16(to_bf16(x));
    assert(f == Format::FP32);
    return x;
}

// Element i of an array in any format, as an FP32 value.
static float read_element(Format f, const uint8_t* elements, int64_t i) {
    if (f == Format::FP32) return reinterpret_cast<const float*>(elements)[i];
    const uint16_t code = info(f).bytes == 1 ? elements[i] : reinterpret_cast<const uint16_t*>(elements)[i];
    return f == Format::BF16 ? from_bf16(code) : decode(f, code);
}
// Rounds x to the format and stores it as element i.
static void write_element(Format f, uint8_t* elements, int64_t i, float x) {
    if (f == Format::FP32) reinterpret_cast<float*>(elements)[i] = x;
    else if (info(f).bytes == 1) elements[i] = uint8_t(encode(f, x));
    else reinterpret_cast<uint16_t*>(elements)[i] = f == Format::BF16 ? to_bf16(x) : encode(f, x);
}

// An FP32 master weight as a BF16 weight and a signed 16-bit remainder: master = (weight << 16) + remainder,
// in bits. The weight is the nearest BF16 value. If two values are equally near, it is the larger one in
// magnitude: with the smaller one the remainder would be +32768, which does not fit. If the weight is larger
// in magnitude than the master, the remainder is negative. For example, the master 0x3F8D9000 is the weight
// 0x3F8E and the remainder -0x7000.
void split_master(float master, uint16_t* weight, int16_t* remainder) {
    const uint32_t bits = std::bit_cast<uint32_t>(master);
    *weight = uint16_t((bits + 0x8000u) >> 16);
    *remainder = int16_t(bits & 0xFFFFu);
}
float join_master(uint16_t weight, int16_t remainder) {
    return std::bit_cast<float>((uint32_t(weight) << 16) + uint32_t(int32_t(remainder)));  // with its sign
}

// x rounded to BF16, up or down at random. A random integer of 16 bits is added to the bits of x, and the
// upper half of the sum is the result. If the lower half of x is r, then r of the 65536 integers make the
// sum carry into the upper half. So x is rounded up in magnitude with probability r / 65536.
uint16_t round_stochastically(float x, uint64_t key, int64_t i) {
    const uint64_t random = (rounding_bits(key, uint64_t(i) / 4) >> (16 * (i % 4))) & 0xFFFF;
    return uint16_t((std::bit_cast<uint32_t>(x) + uint32_t(random)) >> 16);
}

// ===========================================================================================================
// 2. Quantizers (paper, preliminaries; granularity: paper, section 5.1; group scaling: paper, section 5.2)
//
// For each scale block of a matrix (formats.h says what these words mean):
//   s = amax / FMAX,   code = encode(x / s),   x' = decode(code) * s
// x' is the value that is read back.

// The scale of a scale block with this amax; 1 for a block of zeros.
//
// The scales of groups are BF16, so one may be rounded down. Then amax / s is above 448, but at most
// 448 (1 + 2^-8) = 449.75. Values there are 32 apart, so 448 is the nearest one: saturating gives the value
// that rounding would give.
//
// If amax is not finite, the step must be skipped. Codes do not show it, because they saturate. What shows it
// depends on the granularity:
//   group, row, block   The scale is NaN. So the values that share it are read back as NaN, and NaN reaches
//                       the loss or a gradient.
//   whole tensor        The scale is 1, and the caller checks the amax itself (note_whether_finite() in
//                       reference_model.cpp). With delayed scaling, too, the caller must check: a scale that
//                       comes from earlier steps does not show this amax.
float scale_of(const TensorFormat& format, float amax) {
    if (!std::isfinite(amax)) return format.granularity == PER_TENSOR ? 1.0f : NAN;
    if (amax == 0) return 1.0f;
    const float s = std::max(amax / info(format.element_format).fmax, 0x1p-126f);  // so that 1 / s is finite
    return round_to(format.scale_format, s);
}

// The amax of n neighbours; infinity if one is NaN. A maximum of floats could lose a NaN, so bits are
// compared. The bits of |x| have the order of the magnitudes, with NaN above infinity.
static float amax_of_neighbours(const float* x, int64_t n) {
    uint32_t amax_bits = 0;
    for (int64_t i = 0; i < n; i++)
        amax_bits = std::max(amax_bits, std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFu);
    return std::bit_cast<float>(std::min(amax_bits, 0x7F800000u));
}

// The amax of a whole tensor. The paper's group scaling (section 5.2) takes it in two stages: first the amax
// of every 16 neighbours, then the largest of these amaxes. (In spite of its name, the tensor gets one scale,
// not one for each group.) A GPU mostly needs no pass over the tensor for the amax, because the kernel that
// computes the values has them in registers.
float compute_amax(const float* x, int64_t n) {
    float amax = 0;
#pragma omp parallel for reduction(max : amax) if (n > MIN_PARALLEL_ELEMENTS)
    for (int64_t first = 0; first < n; first += PER_1x16.cols) {
        const int64_t count = std::min<int64_t>(PER_1x16.cols, n - first);
        amax = std::max(amax, amax_of_neighbours(x + first, count));
    }
    return amax;
}

// The scale of the scale block that contains (row, col). Scales are a row-major matrix with one element for
// each scale block.
float StoredMatrix::scale(int64_t row, int64_t col) const {
    if (!format.fp8()) return 1.0f;
    const int64_t scale_row = row / block_rows(), scale_col = col / block_cols();
    const int64_t block = scale_row * format.scale_cols(cols) + scale_col;
    return read_element(format.scale_format, scales.data(), block);
}
float StoredMatrix::value(int64_t row, int64_t col) const {
    return read_element(format.element_format, elements.data(), row * cols + col) * scale(row, col);
}

// Adds the error of one value to statistics. (NaN is not counted as flushed, because |NaN| > 0 is false.)
static void add_error(QuantStats& stats, float x, float dequantized) {
    const double error = double(x) - double(dequantized);
    stats.signal += double(x) * x;
    stats.noise += error * error;
    stats.flushed += std::abs(x) > 0 && dequantized == 0;
    stats.elements++;
}

// Sets stored.scales to the just-in-time scales of x (rows, cols), from the amaxes of its scale blocks. (The
// scale of a whole tensor comes from compute_amax(), which uses all threads.)
static void compute_scales(const float* x, StoredMatrix& stored) {
    const TensorFormat& format = stored.format;
    const int64_t blocks = format.scale_count(stored.rows, stored.cols);
    const int64_t scale_cols = format.scale_cols(stored.cols);
#pragma omp parallel for if (blocks > 1 && stored.rows * stored.cols > MIN_PARALLEL_ELEMENTS)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first_row = block / scale_cols * stored.block_rows();
        const int64_t first_col = block % scale_cols * stored.block_cols();
        const int64_t end_row = std::min(stored.rows, first_row + stored.block_rows());
        const int64_t width = std::min(stored.block_cols(), stored.cols - first_col);
        float amax = 0;
        for (int64_t row = first_row; row < end_row; row++)
            amax = std::max(amax, amax_of_neighbours(x + row * stored.cols + first_col, width));
        write_element(format.scale_format, stored.scales.data(), block, scale_of(format, amax));
    }
}

// Each row of a matrix consists of parts that lie in one scale block. For each part, this calls
// convert(first, end, scale). The part has the elements from first to end - 1.
template <class Convert> static void for_each_row_part(const StoredMatrix& stored, const Convert& convert) {
    const int64_t width = stored.block_cols();
#pragma omp parallel for if (stored.rows * stored.cols > MIN_PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < stored.rows; row++)
        for (int64_t col = 0; col < stored.cols; col += width) {
            const int64_t first = row * stored.cols + col;
            convert(first, first + std::min(width, stored.cols - col), stored.scale(row, col));
        }
}

// Sets stored.elements: encode(x / s) for all elements of x (rows, cols). In FP32 and BF16 s is 1, and an
// element is x rounded to the format.
static void compute_codes(const float* x, StoredMatrix& stored) {
    const Format format = stored.format.element_format;
    uint8_t* const elements = stored.elements.data();
    for_each_row_part(stored, [&](int64_t first, int64_t end, float s) {
        const float reciprocal = 1.0f / s;
#pragma omp simd
        for (int64_t i = first; i < end; i++) write_element(format, elements, i, x[i] * reciprocal);
    });
}

// Adds the errors of all elements of x (rows, cols) to statistics. A value is saturated if it lies above
// FMAX s by more than half the spacing of values at FMAX. In E4M3 the spacing at 448 is 32:
//   |x| up to 464 s   is rounded to 448 s, as any value is rounded to its neighbour
//   |x| beyond 464 s  is saturated
static void measure_quant_errors(const float* x, const StoredMatrix& stored, QuantStats& stats) {
    const FormatInfo& f = info(stored.format.element_format);
    const float half_spacing = std::ldexp(0.5f, std::ilogb(f.fmax) - f.mantissa_bits);  // at FMAX
    for (int64_t i = 0; i < stored.rows * stored.cols; i++) {
        const int64_t row = i / stored.cols, col = i % stored.cols;
        add_error(stats, x[i], stored.value(row, col));
        stats.saturated += std::abs(x[i]) > (f.fmax + half_spacing) * stored.scale(row, col);
    }
}

// First the scales of all scale blocks, then all elements.
StoredMatrix quantize(const float* x, int64_t rows, int64_t cols, const TensorFormat& format,
                      QuantStats* stats, std::optional<float> scale) {
    StoredMatrix stored{.elements = {}, .scales = {}, .rows = rows, .cols = cols, .format = format};
    stored.elements.resize(format.bytes_without_scales(rows, cols));
    stored.scales.resize(format.scale_count(rows, cols) * info(format.scale_format).bytes);
    if (format.fp8() && format.granularity == PER_TENSOR) {
        const float s = scale ? *scale : scale_of(format, compute_amax(x, rows * cols));
        write_element(format.scale_format, stored.scales.data(), 0, s);
    } else if (format.fp8()) {
        compute_scales(x, stored);
    }
    compute_codes(x, stored);
    if (stats && format.fp8()) measure_quant_errors(x, stored, *stats);
    return stored;
}

// x' = decode(code) * s for all elements. In FP32 and BF16 elements are values.
Floats dequantize(const StoredMatrix& stored) {
    Floats x(stored.rows * stored.cols);
    if (!stored.format.fp8()) {
#pragma omp parallel for if (stored.rows * stored.cols > MIN_PARALLEL_ELEMENTS)
        for (int64_t i = 0; i < stored.rows * stored.cols; i++)
            x[i] = read_element(stored.format.element_format, stored.elements.data(), i);
        return x;
    }
    float values[256];  // by code
    for (uint16_t code = 0; code < 256; code++) values[code] = decode(stored.format.element_format, code);
    for_each_row_part(stored, [&](int64_t first, int64_t end, float s) {
        for (int64_t i = first; i < end; i++) x[i] = values[stored.elements[i]] * s;
    });
    return x;
}

// The transpose (cols, rows) of x (rows, cols), whose rows begin `stride` elements apart.
template <class Real>
static std::vector<Real> transposed(const Real* x, int64_t rows, int64_t cols, int64_t stride) {
    std::vector<Real> transpose(rows * cols);
#pragma omp parallel for if (rows * cols > MIN_PARALLEL_ELEMENTS)
    for (int64_t col = 0; col < cols; col++)
        for (int64_t row = 0; row < rows; row++) transpose[col * rows + row] = x[row * stride + col];
    return transpose;
}

// A GPU's tensor cores multiply codes, and scale the sum of the products. Here the GEMM is in FP32 and reads
// decoded values. (This is called fake quantization.)
//
// If the GEMM sums along the columns of x, the granularity is that of the transpose (the end of formats.h).
// So the transpose is quantized. If it has the same scale blocks as x, quantizing x itself gives the same
// values.
Floats gemm_operand(const Floats& x, int64_t rows, int64_t cols, const TensorFormat& format,
                    SumAlong sum_along, QuantStats* stats, std::optional<float> scale) {
    if (sum_along == SumAlong::Row || format.granularity.transpose_has_same_blocks())
        return dequantize(quantize(x.data(), rows, cols, format, stats, scale));
    const Floats transpose = transposed(x.data(), rows, cols, cols);
    const StoredMatrix quantized = quantize(transpose.data(), cols, rows, format, stats, scale);
    return transposed(dequantize(quantized).data(), cols, rows, rows);
}

// ===========================================================================================================
// 3. FP8 optimizer with dynamic range expansion (paper, section 4)
//
// The dynamic range of a format is its largest over its smallest positive value, R = FMAX / FMIN. For E4M3 R
// is 448 / 2^-9 = 229,376. The dynamic range of a moment group X is R_X = max|X| / min|X|, where min|X|
// leaves out zeros. R_X is often below 1,000, so the moment group uses only a part of E4M3's codes.
// Therefore the paper (section 4.2, equation 4) stretches the moment group to the dynamic range of the
// format before it is quantized, and contracts it afterwards. Let E be the expansion (f in the paper):
//   expand:    E(x) = sign(x) |x|^k           k = log(R) / log(R_X), so that E(X) has the range R
//   quantize:  code = encode(E(x) / s)        s = E(max) / FMAX
//   contract:  x = E^-1(decode(code) * s)
// Here max is max|X|. Since E(x) / s = sign(x) FMAX (|x| / max)^k, nothing is stored but the codes and the
// moment scaling (max, k). If R_X is above R, k is below 1: the moment group is compressed instead, and
// loses a little precision.

// k = log(R) / log(R_X), rounded to a multiple of 1/256, and limited to [1/16, 64].
//   - Rounding: logarithms of CPU and GPU differ in their last bits. After rounding, most k are the same on
//     both. (The released code rounds down to a multiple of 1/16, which costs precision.)
//   - The upper limit: if all magnitudes are equal, log(R_X) is 0. Any k is exact then, because all codes are
//     those of FMAX or -FMAX, and contract() gives max or -max. 64 is taken.
//   - The lower limit never changes k: the widest R_X of FP32 is 2^277, and its k in E4M3 is 16/256.
float expansion_exponent(Format f, float max_magnitude, float min_magnitude) {
    const float k_min = 1.0f / 16.0f, k_max = 64.0f;
    const float log_R = std::log2(info(f).fmax) - std::log2(info(f).fmin);
    const float log_R_X = std::log2(max_magnitude) - std::log2(min_magnitude);
    if (log_R_X * k_max <= log_R) return k_max;  // also for log R_X = 0
    return std::max(std::rint(256.0f * log_R / log_R_X) / 256.0f, k_min);
}

// The expanded value, sign(x) FMAX (|x| / max)^k, which encode() rounds to a code. The power is computed with
// logarithms, because |x| / max may underflow.
float expand(Format f, float x, float max_magnitude, float k) {
    if (x == 0) return 0.0f;
    const float power = std::exp2(k * (std::log2(std::abs(x)) - std::log2(max_magnitude)));
    return std::copysign(info(f).fmax * power, x);
}

// The inverse of expand(): x = sign(y) max (|y| / FMAX)^(1/k) for a decoded y. If R_X is very large, the
// power underflows in FP32, although the product of max and the power does not. So max is multiplied twice by
// the square root of the power. |x| is at least the smallest positive FP32 value: a second moment that is not
// zero must not become zero.
float contract(Format f, float y, float max_magnitude, float k) {
    if (y == 0 || max_magnitude == 0) return 0.0f;
    const float root = std::exp2((std::log2(std::abs(y)) - std::log2(info(f).fmax)) / (2 * k));
    return std::copysign(std::max(max_magnitude * root * root, 0x1p-149f), y);
}

// Without expansion: the scale of a moment group. Moments are finite, because a step with gradients that are
// too large is skipped. (An infinity would not be noticed: scale_of() would return 1.)
static float moment_scale(Format f, float max_magnitude) {
    return scale_of(TensorFormat{.element_format = f}, max_magnitude);
}

void Moment::init(const OptimizerFormats& optimizer, Format f, int64_t count) {
    format = f;
    expanded = optimizer.uses_expansion(f);
    n = count;
    one_moment_group = optimizer.one_moment_group;
    const int64_t moment_groups = optimizer.moment_scaling_count(f, n);
    elements.assign(n * info(f).bytes, 0);
    max.assign(moment_groups, 0.0f);
    k.assign(expanded ? moment_groups : 0, 1.0f);
}

// Element i, decoded.
float Moment::value(int64_t i) const {
    const float y = read_element(format, elements.data(), i);
    if (!moments_need_scaling(format)) return y;
    const int64_t moment_group = i / moment_group_size();
    const float max_magnitude = max[moment_group];
    if (expanded) return contract(format, y, max_magnitude, k[moment_group]);
    return max_magnitude == 0 ? 0.0f : y * moment_scale(format, max_magnitude);
}

void Moment::load(float* x) const {
#pragma omp parallel for if (n > MIN_PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < n; i++) x[i] = value(i);
}

// Stores the elements from first to end - 1, which form one moment group: first the moment scaling, then the
// codes.
//
// A second moment that became zero would make the next update explode, because the update divides by
// sqrt(v) + eps. So a positive second moment gets at least the smallest positive code, that of FMIN. Without
// expansion this is needed. With expansion it never happens: the smallest magnitude is expanded to
// FMAX R_X^(-k), which is FMIN if k is exact. k is rounded up by at most 1/512, and R_X is at most 2^277. So
// the smallest magnitude becomes at least FMIN R_X^(-1/512) = 0.69 FMIN, and is rounded to FMIN.
void Moment::store_moment_group(int64_t moment_group, int64_t first, int64_t end, const float* x,
                                bool is_second_moment) {
    float max_magnitude = 0, min_magnitude = INFINITY;  // min_magnitude leaves out zeros
    for (int64_t i = first; i < end; i++) {
        max_magnitude = std::max(max_magnitude, std::abs(x[i]));
        if (x[i] != 0) min_magnitude = std::min(min_magnitude, std::abs(x[i]));
    }
    max[moment_group] = max_magnitude;
    if (expanded) {
        const bool all_zeros = max_magnitude == 0;
        const float k_of_moment_group =
            all_zeros ? 1.0f : expansion_exponent(format, max_magnitude, min_magnitude);
        k[moment_group] = k_of_moment_group;
        for (int64_t i = first; i < end; i++)
            write_element(format, elements.data(), i, expand(format, x[i], max_magnitude, k_of_moment_group));
    } else {
        const float reciprocal = 1.0f / moment_scale(format, max_magnitude);
        for (int64_t i = first; i < end; i++) write_element(format, elements.data(), i, x[i] * reciprocal);
    }
    if (!is_second_moment) return;
    // In fp8lm a whole parameter is one moment group, and second moments are FP16. Only values below about
    // 2^-41 of the largest become zero there, and they may stay zero.
    if (one_moment_group) return;
    for (int64_t i = first; i < end; i++) {
        const bool became_zero = x[i] > 0 && read_element(format, elements.data(), i) == 0;
        if (became_zero) write_element(format, elements.data(), i, info(format).fmin);
    }
}

// Stores x (n) by moment groups. Formats that are not scaled have no moment groups.
void Moment::store(const float* x, bool is_second_moment, QuantStats* stats) {
    if (!moments_need_scaling(format)) {
#pragma omp parallel for if (n > MIN_PARALLEL_ELEMENTS)
        for (int64_t i = 0; i < n; i++) write_element(format, elements.data(), i, x[i]);
        return;
    }
    const int64_t size = moment_group_size();
#pragma omp parallel for if (n > MIN_PARALLEL_ELEMENTS)
    for (int64_t first = 0; first < n; first += size)
        store_moment_group(first / size, first, std::min(n, first + size), x, is_second_moment);
    if (!stats) return;
    for (int64_t i = 0; i < n; i++) add_error(*stats, x[i], value(i));
}

float clip_factor(const AdamWOptions& options, double grad_norm) {
    const bool clips = options.clip > 0 && grad_norm > options.clip;
    return clips ? float(options.clip / grad_norm) : 1.0f;
}

// The constants of one AdamW step. Powers of beta are computed in double.
AdamWConstants adamw_constants(const AdamWOptions& options, bool decays, double grad_norm) {
    const double t = double(options.update_number);
    return {.lr = options.lr,
            .beta1 = options.beta1,
            .beta2 = options.beta2,
            .one_minus_beta1 = 1 - options.beta1,
            .one_minus_beta2 = 1 - options.beta2,
            .eps = options.eps,
            .decay = decays ? options.weight_decay : 0.0f,
            .bias_correction1 = float(1 - std::pow(double(options.beta1), t)),
            .bias_correction2_sqrt = float(std::sqrt(1 - std::pow(double(options.beta2), t))),
            .clip_factor = clip_factor(options, grad_norm)};
}

// One AdamW step in FP32, with the clipped gradient g:
//   m = b1 m + (1 - b1) g          m_hat = m / (1 - b1^t)
//   v = b2 v + (1 - b2) g^2        v_hat = v / (1 - b2^t)
//   w = w - lr (m_hat / (sqrt(v_hat) + eps) + decay w)
// Weight decay is decoupled, and eps is outside the root, as in torch.optim.AdamW. The weight is updated with
// the m and v that are not quantized yet.
void adamw(const AdamWConstants& constants, int64_t n, const float* gradient, float* master, float* m,
           float* v) {
#pragma omp parallel for if (n > MIN_PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < n; i++) {
        const float g = gradient[i] * constants.clip_factor;
        m[i] = constants.beta1 * m[i] + constants.one_minus_beta1 * g;
        v[i] = constants.beta2 * v[i] + constants.one_minus_beta2 * (g * g);
        const float m_hat = m[i] / constants.bias_correction1;
        const float v_hat_sqrt = std::sqrt(v[i]) / constants.bias_correction2_sqrt;
        const float update = m_hat / (v_hat_sqrt + constants.eps);
        master[i] -= constants.lr * (update + constants.decay * master[i]);
    }
}

// ===========================================================================================================
// 4. Operators, forward and backward. dX is the gradient of the loss with respect to X.

// The mean of a row x (C), and rstd = 1 / sqrt(variance + eps). For RMSNorm the mean is taken as 0, so
// rstd is 1 / sqrt(mean(x^2) + eps).
template <class Real> struct RowStatistics { Real mean, rstd; };
template <class Real>
static RowStatistics<Real> row_statistics(bool rms, Real eps, int64_t C, const Real* x) {
    Real mean = 0, sum_of_squares = 0;
    if (!rms) {
#pragma omp simd reduction(+ : mean)
        for (int64_t c = 0; c < C; c++) mean += x[c];
        mean /= Real(C);
    }
#pragma omp simd reduction(+ : sum_of_squares)
    for (int64_t c = 0; c < C; c++) sum_of_squares += (x[c] - mean) * (x[c] - mean);
    return {.mean = mean, .rstd = 1 / std::sqrt(sum_of_squares / Real(C) + eps)};
}

// RMSNorm or LayerNorm of each row of x (N, C). RMSNorm has mean = 0 and no bias:
//   xhat = (x - mean) * rstd
//   y = xhat * weight + bias
template <class Real>
void norm_forward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                  const Real* bias, Real* y) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        const auto [mean, rstd] = row_statistics(rms, eps, C, x + n * C);
        for (int64_t c = 0; c < C; c++)
            y[n * C + c] = (x[n * C + c] - mean) * rstd * weight[c] + (bias ? bias[c] : Real(0));
    }
}

// The backward pass of norm_forward(). With d = dy * weight:
//   dx = (d - mean(d) - xhat * mean(d * xhat)) * rstd
//   dweight += sum(dy * xhat),  dbias += sum(dy)
// mean() is over the C elements of a row; RMSNorm has no mean(d). sum() is over the N rows.
template <class Real>
void norm_backward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                   const Real* dy, Real* dx, Real* dweight, Real* dbias) {
    std::vector<RowStatistics<Real>> statistics(N);  // of each row
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        statistics[n] = row_statistics(rms, eps, C, x + n * C);
        const auto [mean, rstd] = statistics[n];
        Real sum_d = 0, sum_d_xhat = 0;
#pragma omp simd reduction(+ : sum_d, sum_d_xhat)
        for (int64_t c = 0; c < C; c++) {
            const Real d = dy[n * C + c] * weight[c];
            sum_d += d;
            sum_d_xhat += d * (x[n * C + c] - mean) * rstd;
        }
        const Real mean_d = rms ? Real(0) : sum_d / Real(C);
        const Real mean_d_xhat = sum_d_xhat / Real(C);
        for (int64_t c = 0; c < C; c++) {
            const Real xhat = (x[n * C + c] - mean) * rstd;
            dx[n * C + c] = (dy[n * C + c] * weight[c] - mean_d - xhat * mean_d_xhat) * rstd;
        }
    }
    const int64_t width = 64;  // a thread sums 64 columns, so every sum runs over the rows in order
#pragma omp parallel for
    for (int64_t first = 0; first < C; first += width)
        for (int64_t n = 0; n < N; n++)
            for (int64_t c = first; c < std::min(C, first + width); c++) {
                dweight[c] += dy[n * C + c] * (x[n * C + c] - statistics[n].mean) * statistics[n].rstd;
                if (dbias) dbias[c] += dy[n * C + c];
            }
}

// RMSNorm of each head of q and of k (Qwen3). A head is a row of norm_forward(), with HS columns.
template <class Real>
void qk_norms_forward(const ModelConfig& config, int64_t N, const Real* weight, Real* qkv) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        Real* const queries = qkv + n * config.qkv_cols();
        Real* const keys = queries + config.q_cols();
        norm_forward<Real>(/*rms=*/true, Real(config.norm_eps), config.NH, config.HS(), queries, weight,
                           /*bias=*/nullptr, queries);
        norm_forward<Real>(/*rms=*/true, Real(config.norm_eps), config.NKV, config.HS(), keys,
                           weight + config.HS(), /*bias=*/nullptr, keys);
    }
}

// The backward pass of qk_norms_forward(): dqkv is overwritten, and dweight is added to.
template <class Real>
void qk_norms_backward(const ModelConfig& config, int64_t N, const Real* qkv, const Real* weight, Real* dqkv,
                       Real* dweight) {
    // The query heads or the key heads of one token. heads_at: where they begin in qkv and dqkv. weight_at:
    // where their norm's weight begins in weight and dweight.
    auto backward_of_heads = [&](int64_t heads, int64_t heads_at, int64_t weight_at) {
        Real* const dx = dqkv + heads_at;
        const std::vector<Real> dy(dx, dx + heads * config.HS());
        norm_backward<Real>(/*rms=*/true, Real(config.norm_eps), heads, config.HS(), qkv + heads_at,
                            weight + weight_at, dy.data(), dx, dweight + weight_at, /*dbias=*/nullptr);
    };
    for (int64_t n = 0; n < N; n++) {  // one after the other, so that every sum runs over the rows in order
        const int64_t queries_at = n * config.qkv_cols();
        backward_of_heads(config.NH, queries_at, 0);
        backward_of_heads(config.NKV, queries_at + config.q_cols(), config.HS());
    }
}

template <class Real> static Real sigmoid(Real x) { return 1 / (1 + std::exp(-x)); }

// gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
constexpr double GELU_SCALE = 0.79788456080286536, GELU_CUBE = 0.044715;

template <class Real> static Real tanh_of_gelu(Real x) {
    return std::tanh(Real(GELU_SCALE) * (x + Real(GELU_CUBE) * x * x * x));
}

// The activation function. Gated: act = silu(gate) * up with silu(a) = a * sigmoid(a). Else act =
// gelu(gate_up).
template <class Real>
void activation_forward(bool gated, int64_t N, int64_t F, const Real* gate_up, Real* act) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            const int64_t gate_at = (gated ? 2 : 1) * n * F + f;  // of gate, or of GELU's input
            const int64_t up_at = gate_at + F;
            const Real a = gate_up[gate_at];
            if (gated) act[n * F + f] = a * sigmoid(a) * gate_up[up_at];
            else act[n * F + f] = Real(0.5) * a * (1 + tanh_of_gelu(a));
        }
}

// The backward pass of activation_forward():
//   gated:  dup = dact silu(gate)               silu(a) = a s,  s = sigmoid(a)
//           dgate = dact up silu'(gate)         silu'(a) = s (1 + a (1 - s))
//   else:   dgate_up = dact gelu'(gate_up)      gelu'(a) = (1 + t + a t') / 2,  t = the tanh in gelu(a)
//                                               t' = (1 - t^2) sqrt(2 / pi) (1 + 3 * 0.044715 a^2)
template <class Real>
void activation_backward(bool gated, int64_t N, int64_t F, const Real* gate_up, const Real* dact,
                         Real* dgate_up) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            const int64_t gate_at = (gated ? 2 : 1) * n * F + f;  // of gate, or of GELU's input
            const int64_t up_at = gate_at + F;
            const Real d = dact[n * F + f], a = gate_up[gate_at];
            if (gated) {
                const Real s = sigmoid(a);
                dgate_up[up_at] = d * a * s;
                dgate_up[gate_at] = d * gate_up[up_at] * s * (1 + a * (1 - s));
            } else {
                // The limit keeps a * a finite. Where it acts, 1 - t * t is 0, and 0 * infinity would be NaN.
                const Real square = std::min(a * a, Real(1000));
                const Real t = tanh_of_gelu(a);
                const Real slope = Real(GELU_SCALE) * (1 + 3 * Real(GELU_CUBE) * square);
                dgate_up[gate_at] = d * Real(0.5) * (1 + t + a * (1 - t * t) * slope);
            }
        }
}

// The frequency f_i = theta^(-2i / HS) of pair i, in radians per position, scaled as the model wants
// (RopeScaling in architecture.h). Llama 3's formula is apply_scaling in Meta's llama-models and
// _compute_llama3_parameters in transformers, Hugging Face's library.
double rope_frequency(const ModelConfig& config, int64_t i) {
    const RopeScaling& scaling = config.rope_scaling;
    const double f = std::pow(double(config.rope_theta), -2.0 * double(i) / double(config.HS()));
    if (scaling.type == RopeScaling::Default) return f;
    const double wavelength = 2 * 3.14159265358979323846 / f;  // the positions of a whole turn
    const double turns = double(scaling.original_positions) / wavelength;
    const double low = scaling.low_freq_factor, high = scaling.high_freq_factor;
    if (turns < low) return f / scaling.factor;
    if (turns > high) return f;
    const double smooth = (turns - low) / (high - low);  // from 0 to 1
    return (1 - smooth) * f / scaling.factor + smooth * f;
}

// RoPE: rotates each pair (x_i, x_(i + HS/2)) of a head at position t by the angle t f_i. The heads of q and
// of k are rotated, v is not.
template <class Real> void rope(const ModelConfig& config, int64_t B, int64_t T, Real* qkv, bool inverse) {
    const int64_t half = config.HS() / 2;
#pragma omp parallel for
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < half; i++) {
            const double angle = double(t) * rope_frequency(config, i);
            const Real cosine = Real(std::cos(angle)), sine = Real(std::sin(inverse ? -angle : angle));
            for (int64_t b = 0; b < B; b++)
                for (int64_t head = 0; head < config.NH + config.NKV; head++) {
                    Real* x = qkv + (b * T + t) * config.qkv_cols() + head * config.HS() + i;
                    const Real first = x[0], second = x[half];
                    x[0] = first * cosine - second * sine;
                    x[half] = second * cosine + first * sine;
                }
        }
}

// sum_i a_i b_i of two vectors (n).
template <class Real> static Real dot(const Real* a, const Real* b, int64_t n) {
    Real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// y += factor x, both (n).
template <class Real> void add_scaled(int64_t n, Real factor, const Real* x, Real* y) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] += factor * x[i];
}

// out[j] = factor * (x . column j) for the first n columns of `matrix` (HS, T). The sum is over HS, but the
// inner loop runs over j, because that loop vectorizes.
template <class Real>
static void dot_products(int64_t HS, int64_t T, const Real* x, const std::vector<Real>& matrix, int64_t n,
                         Real factor, Real* out) {
    std::fill(out, out + n, Real(0));
    for (int64_t d = 0; d < HS; d++) add_scaled(n, x[d] * factor, matrix.data() + d * T, out);
}

// Causal attention: query t reads the keys and values j <= t,
//   p_j = softmax_j(q . k_j / sqrt(HS)),  out = sum_j p_j v_j.
// The largest score is subtracted from all scores. The softmax stays the same, and exp cannot overflow.
template <class Real>
void attention_forward(const ModelConfig& config, int64_t B, int64_t T, const Real* qkv, Real* out,
                       Real* lse) {
    const int64_t HS = config.HS(), NH = config.NH;
    const int64_t stride = config.qkv_cols();  // elements from one token to the next
    const Real score_factor = 1 / std::sqrt(Real(HS));
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t head = 0; head < NH; head++) {
            const int64_t kv_head = head / (NH / config.NKV);
            // Queries, keys and values: (T, HS) each, with rows that are `stride` elements apart.
            const Real* queries = qkv + b * T * stride + head * HS;
            const Real* keys = qkv + b * T * stride + config.q_cols() + kv_head * HS;
            const Real* values = keys + config.kv_cols();
            const auto keys_transposed = transposed(keys, T, HS, stride);
            std::vector<Real> scores(T), p(T);
            for (int64_t t = 0; t < T; t++) {
                dot_products(HS, T, queries + t * stride, keys_transposed, t + 1, score_factor,
                             scores.data());
                const Real max_score = *std::max_element(scores.begin(), scores.begin() + t + 1);
                Real sum = 0;
                for (int64_t j = 0; j <= t; j++) {
                    p[j] = std::exp(scores[j] - max_score);
                    sum += p[j];
                }
                lse[(b * NH + head) * T + t] = max_score + std::log(sum);
                Real* y = out + ((b * T + t) * NH + head) * HS;
                std::fill(y, y + HS, Real(0));
                for (int64_t j = 0; j <= t; j++) add_scaled(HS, p[j] / sum, values + j * stride, y);
            }
        }
}

// The backward pass of attention_forward(). p is computed again from the saved log-sum-exp:
//   p_j = exp(q . k_j / sqrt(HS) - lse)
//   dp_j = dout . v_j,  ds_j = p_j (dp_j - dout . out) / sqrt(HS)
//   dv_j += p_j dout,  dq += ds_j k_j,  dk_j += ds_j q
// One thread computes all query heads that share a key/value head, so the sums dk and dv have a fixed order.
template <class Real>
void attention_backward(const ModelConfig& config, int64_t B, int64_t T, const Real* qkv, const Real* out,
                        const Real* lse, const Real* dout, Real* dqkv) {
    const int64_t HS = config.HS(), NH = config.NH;
    const int64_t queries_per_kv_head = NH / config.NKV;
    const int64_t stride = config.qkv_cols();  // elements from one token to the next
    const Real score_factor = 1 / std::sqrt(Real(HS));
    std::fill(dqkv, dqkv + B * T * stride, Real(0));
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t kv_head = 0; kv_head < config.NKV; kv_head++) {
            // Where the keys and values of this head begin in qkv, and the gradients of both in dqkv. Each is
            // (T, HS), with rows that are `stride` elements apart.
            const int64_t keys_at = b * T * stride + config.q_cols() + kv_head * HS;
            const int64_t values_at = keys_at + config.kv_cols();
            const Real* k = qkv + keys_at;
            Real *dk = dqkv + keys_at, *dv = dqkv + values_at;
            const auto keys_transposed = transposed(k, T, HS, stride);
            const auto values_transposed = transposed(qkv + values_at, T, HS, stride);
            std::vector<Real> scores(T), p(T), dp(T), ds(T);
            const int64_t first_head = kv_head * queries_per_kv_head;  // of its query heads
            for (int64_t head = first_head; head < first_head + queries_per_kv_head; head++)
                for (int64_t t = 0; t < T; t++) {
                    const int64_t query_at = (b * T + t) * stride + head * HS;
                    const int64_t output_at = ((b * T + t) * NH + head) * HS;
                    const Real *q = qkv + query_at, *dout_t = dout + output_at;
                    Real* dq = dqkv + query_at;
                    const Real lse_t = lse[(b * NH + head) * T + t];
                    const Real dout_out = dot(dout_t, out + output_at, HS);  // dout . out
                    dot_products(HS, T, q, keys_transposed, t + 1, score_factor, scores.data());
                    dot_products(HS, T, dout_t, values_transposed, t + 1, Real(1), dp.data());
                    for (int64_t j = 0; j <= t; j++) p[j] = std::exp(scores[j] - lse_t);
                    for (int64_t j = 0; j <= t; j++) ds[j] = p[j] * (dp[j] - dout_out) * score_factor;
                    for (int64_t j = 0; j <= t; j++) {
                        add_scaled(HS, p[j], dout_t, dv + j * stride);
                        add_scaled(HS, ds[j], q, dk + j * stride);
                        add_scaled(HS, ds[j], k + j * stride, dq);
                    }
                }
        }
}

// The loss and its gradient, which replaces the logits:
//   loss = log(sum_v exp(logit_v)) - logit_target,  dlogit_v = softmax(logits)_v - (v == target)
// Loss and gradient are 0 if a target does not count. The gradient is multiplied by `loss_weight`.
template <class Real>
double cross_entropy_forward_and_backward(int64_t N, int64_t V, int64_t V_stride, Real* logits,
                                          const int32_t* targets, Real loss_weight) {
    std::vector<double> losses(N);
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        Real* row = logits + n * V_stride;
        if (targets[n] == NO_TARGET) {
            std::fill(row, row + V_stride, Real(0));
            continue;
        }
        const Real max_logit = *std::max_element(row, row + V);
        const Real target_logit = row[targets[n]];
        Real sum = 0;
        for (int64_t v = 0; v < V; v++) {
            row[v] = std::exp(row[v] - max_logit);
            sum += row[v];
        }
        losses[n] = double(std::log(sum) + max_logit - target_logit);
        for (int64_t v = 0; v < V; v++) row[v] *= loss_weight / sum;
        row[targets[n]] -= loss_weight;
        std::fill(row + V, row + V_stride, Real(0));
    }
    return std::accumulate(losses.begin(), losses.end(), 0.0);
}

// ===========================================================================================================
// Delayed scaling (the recipe te)

float DelayedScale::raise_amax_and_get_scale(const TensorFormat& format, float tensor_amax) {
    amax = std::max(amax, tensor_amax);
    return scale > 0 ? scale : scale_of(format, amax);
}

void DelayedScale::update_history_and_scale(Format f) {
    // The amaxes move by one place. The oldest comes to the front, where the new amax overwrites it.
    std::rotate(history.begin(), history.end() - 1, history.end());
    history.front() = amax;
    amax = 0;
    const float amax_of_history = compute_amax(history.data(), int64_t(history.size()));
    if (std::isfinite(amax_of_history) && amax_of_history > 0)
        scale = scale_of(TensorFormat{.element_format = f}, amax_of_history);
}

// ===========================================================================================================
// Templates

// The compiler generates the code of a template only where it is told to. Here it is, for the callers in
// other files.
// clang-format off
#define INSTANTIATE(Real)                                                                                   \
    template void norm_forward(bool, Real, int64_t, int64_t, const Real*, const Real*, const Real*, Real*); \
    template void norm_backward(bool, Real, int64_t, int64_t, const Real*, const Real*, const Real*, Real*, \
                                Real*, Real*);                                                              \
    template void qk_norms_forward(const ModelConfig&, int64_t, const Real*, Real*);                         \
    template void qk_norms_backward(const ModelConfig&, int64_t, const Real*, const Real*, Real*, Real*);    \
    template void activation_forward(bool, int64_t, int64_t, const Real*, Real*);                           \
    template void activation_backward(bool, int64_t, int64_t, const Real*, const Real*, Real*);             \
    template void rope(const ModelConfig&, int64_t, int64_t, Real*, bool);                                  \
    template void attention_forward(const ModelConfig&, int64_t, int64_t, const Real*, Real*, Real*);       \
    template void attention_backward(const ModelConfig&, int64_t, int64_t, const Real*, const Real*,        \
                                     const Real*, const Real*, Real*);                                      \
    template double cross_entropy_forward_and_backward(int64_t, int64_t, int64_t, Real*, const int32_t*,    \
                                                       Real);                                               \
    template void add_scaled(int64_t, Real, const Real*, Real*);
// clang-format on
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace coat::reference
