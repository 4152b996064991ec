// reference/quantize.cpp - 2. Quantizers:
//   scales                                                (paper, preliminaries)
//   granularity                                           (paper, section 5.1)
//   group scaling: the amax of a tensor in two stages     (paper, section 5.2)
//
// For each scale block of a matrix (common/formats.h says what these words mean):
//   s = amax / FMAX,   code = encode(x / s),   x' = decode(code) * s
// x' is the value that is read back.
#include "quantize.h"

#include <algorithm>
#include <bit>

#include "arrays.h"

namespace coat::reference {

using Floats = std::vector<float>;

// A scale block of zeros has the scale 1.
//
// The scales of groups are BF16, so one may be rounded down. Then amax / s is above 448, but at most
// 448 (1 + 2^-8) = 449.75. Values there are 32 apart, so 448 is the nearest one: saturating gives the value
// that rounding would give.
//
// If amax is not finite, the step will be skipped. With one scale for the tensor its amax shows this, so the
// scale does not matter: it is 1. With smaller scale blocks a GPU does not know the amax of the tensor. There
// the scale is NaN, so what is read back is NaN, and reaches the loss or a gradient.
float scale_of(const TensorFormat& format, float amax) {
    if (!std::isfinite(amax)) return format.granularity == PER_TENSOR ? 1.0f : NAN;
    if (amax == 0) return 1.0f;
    const float s =
        std::max(amax / format_info(format.element_format).fmax, 0x1p-126f);  // so that 1 / s is finite
    return round_to(format.scale_format, s);
}

// The amax of n neighbours; infinity if one is NaN. A maximum of floats could lose a NaN, so bits are
// compared. The bits of |x| have the order of the magnitudes, with NaN above infinity.
static float amax_of(const float* x, int64_t n) {
    uint32_t amax_bits = 0;
    for (int64_t i = 0; i < n; i++)
        amax_bits = std::max(amax_bits, std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFu);
    return std::bit_cast<float>(std::min(amax_bits, 0x7F800000u));
}

// The amax of a whole tensor. The paper's group scaling (section 5.2) takes it in two stages: first the amax
// of every 16 neighbours, then the largest of these amaxes. Here amax_of() is the first stage, and the
// maximum over its results is the second. A single loop over the tensor would give the same amax: the stages
// matter on a GPU, where many threads share the work. (A GPU mostly needs no pass over the tensor for the
// amax, because the kernel that computes the values has them in registers.)
float compute_amax(const float* x, int64_t n) {
    float amax = 0;
#pragma omp parallel for reduction(max : amax) if (n > MIN_PARALLEL_ELEMENTS)
    for (int64_t first = 0; first < n; first += PER_1x16.cols) {
        const int64_t count = std::min<int64_t>(PER_1x16.cols, n - first);
        amax = std::max(amax, amax_of(x + first, count));
    }
    return amax;
}

// The scale of the scale block that contains (row, col). Scales are a row-major matrix with one element for
// each scale block.
float StoredMatrix::scale(int64_t row, int64_t col) const {
    if (!format.is_fp8()) return 1.0f;
    const int64_t scale_row = row / block_rows(), scale_col = col / block_cols();
    const int64_t block = scale_row * format.cols_of_scales(cols) + scale_col;
    return read_element(format.scale_format, scales.data(), block);
}
float StoredMatrix::value(int64_t row, int64_t col) const {
    return read_element(format.element_format, elements.data(), row * cols + col) * scale(row, col);
}

// (NaN is not counted as flushed, because |NaN| > 0 is false.)
void add_error(QuantStats& stats, float x, float dequantized) {
    const double error = double(x) - double(dequantized);
    stats.signal += double(x) * x;
    stats.noise += error * error;
    stats.flushed += std::abs(x) > 0 && dequantized == 0;
    stats.elements++;
}

// Sets stored.scales to the scales of x (rows, cols), from the amaxes of its scale blocks, and stored.amax to
// the largest of these amaxes.
static void compute_scales_of_blocks(const float* x, StoredMatrix& stored) {
    const TensorFormat& format = stored.format;
    const int64_t blocks = format.scale_count(stored.rows, stored.cols);
    const int64_t scale_cols = format.cols_of_scales(stored.cols);
    float amax_of_all = 0;
#pragma omp parallel for reduction(max : amax_of_all) if (stored.rows * stored.cols > MIN_PARALLEL_ELEMENTS)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t first_row = block / scale_cols * stored.block_rows();
        const int64_t first_col = block % scale_cols * stored.block_cols();
        const int64_t end_row = std::min(stored.rows, first_row + stored.block_rows());
        const int64_t width = std::min(stored.block_cols(), stored.cols - first_col);
        float amax = 0;
        for (int64_t row = first_row; row < end_row; row++)
            amax = std::max(amax, amax_of(x + row * stored.cols + first_col, width));
        write_element(format.scale_format, stored.scales.data(), block, scale_of(format, amax));
        amax_of_all = std::max(amax_of_all, amax);
    }
    stored.amax = amax_of_all;
}
// The same with one scale for the whole tensor. It is a function of its own for two reasons: all threads find
// the one amax together, and the scale may be given (QuantizeOptions::scale).
static void compute_scale_of_tensor(const float* x, StoredMatrix& stored, std::optional<float> given) {
    stored.amax = compute_amax(x, stored.rows * stored.cols);
    const float s = given ? *given : scale_of(stored.format, stored.amax);
    write_element(stored.format.scale_format, stored.scales.data(), 0, s);
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
// FMAX s by more than half the spacing of values there. In E4M3 the spacing at 448 is 32:
//   |x| up to 464 s   is rounded to 448 s, as any value is rounded to its neighbour
//   |x| beyond 464 s  is saturated
static void measure_quant_errors(const float* x, const StoredMatrix& stored, QuantStats& stats) {
    const FormatInfo& f = format_info(stored.format.element_format);
    const float half_spacing = std::ldexp(0.5f, std::ilogb(f.fmax) - f.mantissa_bits);  // at FMAX
    for (int64_t i = 0; i < stored.rows * stored.cols; i++) {
        const int64_t row = i / stored.cols, col = i % stored.cols;
        add_error(stats, x[i], stored.value(row, col));
        stats.saturated += std::abs(x[i]) > (f.fmax + half_spacing) * stored.scale(row, col);
    }
}

StoredMatrix quantize(const float* x, int64_t rows, int64_t cols, const TensorFormat& format,
                      const QuantizeOptions& options) {
    StoredMatrix stored{.elements = {}, .scales = {}, .rows = rows, .cols = cols, .format = format};
    stored.elements.resize(format.bytes_without_scales(rows, cols));
    stored.scales.resize(format.scale_count(rows, cols) * format_info(format.scale_format).bytes);
    if (format.is_fp8()) {
        if (format.granularity == PER_TENSOR) compute_scale_of_tensor(x, stored, options.scale);
        else compute_scales_of_blocks(x, stored);
    }
    compute_codes(x, stored);
    if (options.stats && format.is_fp8()) measure_quant_errors(x, stored, *options.stats);
    return stored;
}

// x' = decode(code) * s for all elements. In FP32 and BF16 elements are values.
Floats dequantize(const StoredMatrix& stored) {
    Floats x(stored.rows * stored.cols);
    if (!stored.format.is_fp8()) {
#pragma omp parallel for if (stored.rows * stored.cols > MIN_PARALLEL_ELEMENTS)
        for (int64_t i = 0; i < stored.rows * stored.cols; i++)
            x[i] = read_element(stored.format.element_format, stored.elements.data(), i);
        return x;
    }
    float values[256];  // of each code: decode() would take longer
    for (uint16_t code = 0; code < 256; code++) values[code] = decode(stored.format.element_format, code);
    for_each_row_part(stored, [&](int64_t first, int64_t end, float s) {
        for (int64_t i = first; i < end; i++) x[i] = values[stored.elements[i]] * s;
    });
    return x;
}

// A GPU's tensor cores multiply codes, and scale the sum of the products. Here the GEMM is in FP32 and reads
// decoded values, which gives the same sum up to rounding. (This is called fake quantization.)
//
// If the GEMM sums along the columns of x, the granularity is that of the transpose (the end of
// common/formats.h), so the transpose is quantized. If the transpose has the same scale blocks as x,
// quantizing x itself gives the same values.
GemmOperand gemm_operand(const Floats& x, int64_t rows, int64_t cols, const TensorFormat& format,
                         SumAlong sum_along, const QuantizeOptions& options) {
    if (sum_along == SumAlong::Row || format.granularity.transpose_has_same_blocks()) {
        const StoredMatrix stored = quantize(x.data(), rows, cols, format, options);
        return {.values = dequantize(stored), .amax = stored.amax};
    }
    const Floats transpose = transposed(x.data(), rows, cols, cols);
    const StoredMatrix stored = quantize(transpose.data(), cols, rows, format, options);
    return {.values = transposed(dequantize(stored).data(), cols, rows, rows), .amax = stored.amax};
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

}  // namespace coat::reference
