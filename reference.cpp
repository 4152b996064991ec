// reference.cpp - COAT (arXiv 2410.19313) on the CPU, loop by loop, as the paper says it. Read this file first.
//
// In the order in which each needs the one before: formats, quantizers and group scaling (paper section 5), the FP8 optimizer with dynamic
// range expansion (4), the operators of the precision flow (5), and then the whole training step for Llama and GPT-2 in any recipe of
// coat.h. It is short and obvious first (only products and quantizers are also written for speed), it knows nothing of the GPU, and every
// GPU kernel is tested against it. It is also a real backend: ./train uses it where there is no GPU.
//
// One rule for every loop that runs in parallel: an element of an output is made by one thread in one fixed order, so the bits
// do not depend on the number of threads.
#include "reference.h"

#include <malloc.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <map>

namespace coat::reference {

// =====================================================================================================================
// Formats (the paper's preliminaries)

namespace {

template <class To, class From>
To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// The fields of FP8 and FP16. All have a sign, exponent and mantissa like FP32's; E4M3 gives its top exponent to numbers.
struct Fields {
    int mantissa, bias;
    uint32_t max_code, nan_code;
};
constexpr Fields fields(Format f) {
    return f == Format::E4M3 ? Fields{3, 7, 0x7E, 0x7F} : f == Format::E5M2 ? Fields{2, 15, 0x7B, 0x7F} : Fields{10, 15, 0x7BFF, 0x7E00};
}

// Rounds |x| to the nearest code, ties to even. A normal result comes from FP32's own bits: adding half a unit of the
// last kept place (less one where that place is even) carries into the exponent just as rounding should. A subnormal result
// comes from FP32 addition: 1.5 * 2^(23 + e) + x leaves x in units of 2^e, rounded to nearest even by the adder.
template <Format F>
inline uint32_t encode_magnitude(uint32_t bits) {
    constexpr Fields f = fields(F);
    constexpr int drop = 23 - f.mantissa;
    constexpr uint32_t smallest_normal = static_cast<uint32_t>(127 + 1 - f.bias) << 23;
    constexpr uint32_t rebias = static_cast<uint32_t>(127 - f.bias) << 23;
    const uint32_t normal = (bits - rebias + ((1u << (drop - 1)) - 1) + (bits >> drop & 1)) >> drop;
    constexpr float adder = 1.5f * static_cast<float>(1 << 23) * info(F).min;
    const uint32_t subnormal = bits_as<uint32_t>(bits_as<float>(bits) + adder) - bits_as<uint32_t>(adder);
    const uint32_t code = bits < smallest_normal ? subnormal : normal;
    return bits > 0x7F800000u ? f.nan_code : std::min(code, f.max_code);
}

template <Format F>
inline uint8_t encode_as(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    return static_cast<uint8_t>((bits >> 24 & 0x80u) | encode_magnitude<F>(bits & 0x7FFFFFFFu));
}

float decode_slowly(Format f, uint8_t code) {
    const Fields field = fields(f);
    const int magnitude = code & 0x7F, exponent = magnitude >> field.mantissa, mantissa = magnitude & ((1 << field.mantissa) - 1);
    if (magnitude > static_cast<int>(field.max_code)) {
        const bool infinite = f == Format::E5M2 && mantissa == 0;  // E5M2 has infinities; no cast makes one
        return (code & 0x80 ? -1.0f : 1.0f) * (infinite ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN());
    }
    const int whole = exponent ? (1 << field.mantissa) + mantissa : mantissa;
    const float value = std::ldexp(static_cast<float>(whole), std::max(exponent, 1) - field.bias - field.mantissa);
    return code & 0x80 ? -value : value;
}

// All 256 values of a format.
const float* decode_table(Format f) {
    static const auto tables = [] {
        std::vector<float> t(512);
        for (int i = 0; i < 512; i++) t[i] = decode_slowly(i < 256 ? Format::E4M3 : Format::E5M2, static_cast<uint8_t>(i));
        return t;
    }();
    return tables.data() + (f == Format::E5M2 ? 256 : 0);
}

}  // namespace

uint8_t encode(Format fp8, float x) { return fp8 == Format::E4M3 ? encode_as<Format::E4M3>(x) : encode_as<Format::E5M2>(x); }
float decode(Format fp8, uint8_t code) { return decode_table(fp8)[code]; }

uint16_t to_f16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    return static_cast<uint16_t>((bits >> 16 & 0x8000u) | encode_magnitude<Format::F16>(bits & 0x7FFFFFFFu));
}

// FP16's fields in FP32's places make a number whose exponent is short of the difference of the biases: 2^112, which multiplies exactly.
float from_f16(uint16_t code) {
    const uint32_t magnitude = code & 0x7FFFu;
    const float value = magnitude < 0x7C00u ? bits_as<float>(magnitude << 13) * 0x1p112f : bits_as<float>(0x7F800000u | (magnitude & 0x3FFu) << 13);
    return code & 0x8000u ? -value : value;
}

uint16_t to_bf16(float x) {
    const uint32_t bits = bits_as<uint32_t>(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);  // NaN stays NaN
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

uint16_t to_bf16_up(float x) { return static_cast<uint16_t>((bits_as<uint32_t>(x) + 0xFFFFu) >> 16); }

float from_bf16(uint16_t bits) { return bits_as<float>(static_cast<uint32_t>(bits) << 16); }

float round_to(Format f, float x) { return f == Format::BF16 ? from_bf16(to_bf16(x)) : x; }

void split_master(float master, uint16_t* weight, int16_t* remainder) {
    const uint32_t bits = bits_as<uint32_t>(master);
    *weight = static_cast<uint16_t>((bits + 0x8000u) >> 16);
    *remainder = static_cast<int16_t>(bits & 0xFFFFu);
}

float join_master(uint16_t weight, int16_t remainder) {
    return bits_as<float>((static_cast<uint32_t>(weight) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder)));
}

// A magnitude whose low half is r of 65536 carries into the upper half for r of the 65536 random numbers: up with probability r / 65536.
uint16_t round_stochastically(float x, uint64_t key, int64_t i) {
    const uint64_t random = rounding_bits(key, static_cast<uint64_t>(i) / 4) >> (16 * (i % 4)) & 0xFFFF;
    return static_cast<uint16_t>((bits_as<uint32_t>(x) + static_cast<uint32_t>(random)) >> 16);
}

// =====================================================================================================================
// Quantizers (paper section 5)

float scale_of(const Quant& q, float amax) {
    if (!std::isfinite(amax)) return q.granularity == PER_TENSOR ? 1.0f : std::numeric_limits<float>::quiet_NaN();
    if (amax == 0) return 1.0f;
    const float s = std::max(amax / info(q.format).max, std::numeric_limits<float>::min());  // so that 1 / s is finite
    return q.scale == Format::BF16 ? from_bf16(to_bf16_up(s)) : s;
}

namespace {

// A magnitude's bits order like the magnitude itself, with NaN above infinity, so no comparison can lose a NaN.
inline uint32_t magnitude_bits(float x) { return bits_as<uint32_t>(x) & 0x7FFFFFFFu; }

uint32_t amax_bits(const float* x, int64_t n) {
    uint32_t top = 0;
    for (int64_t i = 0; i < n; i++) top = std::max(top, magnitude_bits(x[i]));
    return top;
}

float amax_value(uint32_t bits) { return bits_as<float>(std::min(bits, 0x7F800000u)); }

}  // namespace

float amax(const float* x, int64_t n) {
    constexpr int64_t group = 16;  // group scaling: stage one; wide chunks of groups only serve the threads
    constexpr int64_t chunk = 1024 * group;
    uint32_t top = 0;
#pragma omp parallel for reduction(max : top) if (n > 4 * chunk)
    for (int64_t first = 0; first < n; first += chunk) {
        uint32_t groups[chunk / group] = {};
        const int64_t last = std::min(n, first + chunk);
        for (int64_t g = first; g < last; g += group) groups[(g - first) / group] = amax_bits(x + g, std::min(group, last - g));
        for (uint32_t g : groups) top = std::max(top, g);  // stage two
    }
    return amax_value(top);
}

float Quantized::scale(int64_t r, int64_t c) const {
    if (!quant.fp8()) return 1.0f;
    const Granularity g = quant.granularity;
    const int64_t i = (g.rows ? r / g.rows : 0) * quant.scale_cols(cols) + (g.cols ? c / g.cols : 0);
    if (quant.scale == Format::BF16) return from_bf16(reinterpret_cast<const uint16_t*>(scales.data())[i]);
    return reinterpret_cast<const float*>(scales.data())[i];
}

float Quantized::value(int64_t r, int64_t c) const {
    const int64_t i = r * cols + c;
    switch (quant.format) {
        case Format::F32: return reinterpret_cast<const float*>(codes.data())[i];
        case Format::BF16: return from_bf16(reinterpret_cast<const uint16_t*>(codes.data())[i]);
        default: return decode(quant.format, codes[i]) * scale(r, c);
    }
}

namespace {

void store_scale(Quantized& q, int64_t i, float s) {
    if (q.quant.scale == Format::BF16)
        reinterpret_cast<uint16_t*>(q.scales.data())[i] = to_bf16_up(s);  // exact: scale_of has rounded it
    else
        reinterpret_cast<float*>(q.scales.data())[i] = s;
}

// How one kind of tensor came through its quantization.
void add_stats(QuantStats& s, Format f, const float* x, const uint8_t* codes, float scale, int64_t n) {
    for (int64_t i = 0; i < n; i++) {
        const double error = static_cast<double>(x[i]) - static_cast<double>(decode(f, codes[i]) * scale);
        s.signal += static_cast<double>(x[i]) * x[i];
        s.noise += error * error;
        s.flushed += x[i] != 0 && (codes[i] & 0x7F) == 0;
        // What lies half a step beyond the largest code still rounds to it; counted is from 1/32 (E4M3) or 1/16 (E5M2) of it on, a little below.
        s.saturated += std::abs(x[i]) > info(f).max * scale * (1 + std::ldexp(1.0f, -info(f).mantissa - 2));
    }
    s.elements += n;
}

template <Format F>
void encode_run(const float* x, int64_t n, float inverse, uint8_t* codes) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) codes[i] = encode_as<F>(x[i] * inverse);
}

// Codes of one block of rows x cols elements: its amax, its scale (unless one is given), its codes.
void quantize_block(Quantized& q, const float* x, int64_t r0, int64_t r1, int64_t c0, int64_t c1, int64_t index, QuantStats* stats,
                    const float* scale) {
    const int64_t width = c1 - c0;
    const bool whole = width == q.cols && r1 - r0 > 1;  // rows follow each other without a gap: one long run
    uint32_t top = 0;
    for (int64_t r = r0; !whole && r < r1; r++) top = std::max(top, amax_bits(x + r * q.cols + c0, width));
    const float s = scale ? *scale : scale_of(q.quant, whole ? amax(x + r0 * q.cols, (r1 - r0) * width) : amax_value(top));
    store_scale(q, index, s);
    const float inverse = 1.0f / s;
    const int64_t run = 1 << 14;  // elements that one thread encodes at a time
    const int64_t rows = whole ? 1 : r1 - r0, length = whole ? (r1 - r0) * width : width;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t first = (r0 + r) * q.cols + c0;
        const auto encoder = q.quant.format == Format::E4M3 ? encode_run<Format::E4M3> : encode_run<Format::E5M2>;
        if (length <= run) {  // a parallel region, even of one thread, takes longer than a group
            encoder(x + first, length, inverse, q.codes.data() + first);
        } else {
#pragma omp parallel for
            for (int64_t i = 0; i < length; i += run) encoder(x + first + i, std::min(run, length - i), inverse, q.codes.data() + first + i);
        }
        if (stats) add_stats(*stats, q.quant.format, x + first, q.codes.data() + first, s, length);
    }
}

}  // namespace

Quantized quantize(const float* x, int64_t rows, int64_t cols, const Quant& quant, QuantStats* stats, const float* scale) {
    Quantized q;
    q.rows = rows, q.cols = cols, q.quant = quant;
    q.codes.resize(quant.code_bytes(rows, cols));
    q.scales.resize(quant.scales(rows, cols) * info(quant.scale).bytes);
    if (quant.format == Format::F32) {
        std::memcpy(q.codes.data(), x, q.codes.size());
    } else if (quant.format == Format::BF16) {
        uint16_t* out = reinterpret_cast<uint16_t*>(q.codes.data());
#pragma omp parallel for if (rows * cols > 1 << 16)
        for (int64_t i = 0; i < rows * cols; i++) out[i] = to_bf16(x[i]);
    } else {
        const int64_t block_rows = quant.granularity.rows ? quant.granularity.rows : std::max<int64_t>(rows, 1);
        const int64_t block_cols = quant.granularity.cols ? quant.granularity.cols : std::max<int64_t>(cols, 1);
        const int64_t down = quant.scale_rows(rows), across = quant.scale_cols(cols);
#pragma omp parallel for if (!stats && down > 1 && rows * cols > 1 << 14)
        for (int64_t i = 0; i < down; i++)
            for (int64_t j = 0; j < across; j++)
                quantize_block(q, x, i * block_rows, std::min(rows, (i + 1) * block_rows), j * block_cols,
                               std::min(cols, (j + 1) * block_cols), i * across + j, stats, scale);
    }
    return q;
}

std::vector<float> dequantize(const Quantized& q) {
    std::vector<float> x(q.rows * q.cols);
    const int64_t block = q.quant.fp8() && q.quant.granularity.cols ? q.quant.granularity.cols : std::max<int64_t>(q.cols, 1);
#pragma omp parallel for if (q.rows * q.cols > 1 << 14)
    for (int64_t r = 0; r < q.rows; r++)
        for (int64_t c0 = 0; c0 < q.cols; c0 += block) {
            const int64_t c1 = std::min(q.cols, c0 + block);
            if (!q.quant.fp8()) {
                for (int64_t c = c0; c < c1; c++) x[r * q.cols + c] = q.value(r, c);
                continue;
            }
            const float s = q.scale(r, c0);
            const float* table = decode_table(q.quant.format);
            const uint8_t* codes = q.codes.data() + r * q.cols;
            for (int64_t c = c0; c < c1; c++) x[r * q.cols + c] = table[codes[c]] * s;
        }
    return x;
}

namespace {

std::vector<float> transposed(const std::vector<float>& x, int64_t rows, int64_t cols) {
    std::vector<float> y(x.size());
#pragma omp parallel for if (rows * cols > 1 << 14)
    for (int64_t c = 0; c < cols; c++)
        for (int64_t r = 0; r < rows; r++) y[c * rows + r] = x[r * cols + c];
    return y;
}

}  // namespace

std::vector<float> operand(const std::vector<float>& x, int64_t rows, int64_t cols, const Quant& q, ReduceOver which, QuantStats* stats,
                           const float* scale) {
    if (which == ReduceOver::Columns || q.granularity.symmetric()) return dequantize(quantize(x.data(), rows, cols, q, stats, scale));
    return transposed(dequantize(quantize(transposed(x, rows, cols).data(), cols, rows, q, stats, scale)), cols, rows);
}

void DelayedScale::end_step(Format fp8, int margin) {
    std::rotate(history.begin(), history.end() - 1, history.end());
    history.front() = amax;
    amax = 0;
    const float top = *std::max_element(history.begin(), history.end(), [](float a, float b) { return magnitude_bits(a) < magnitude_bits(b); });
    const float wanted = std::ldexp(top, margin);
    if (std::isfinite(wanted) && wanted > 0) scale = scale_of({fp8}, wanted);
}

// =====================================================================================================================
// FP8 optimizer with dynamic range expansion (paper section 4)

float expansion_factor(Format fp8, float max, float min_nonzero) {
    const float k_max = 64.0f;
    const float log_range = std::log2(info(fp8).max) - std::log2(info(fp8).min);  // of the format
    const float log_ratio = std::log2(max) - std::log2(min_nonzero);              // of the group (paper eq. 4: k = log_R_X R_fp8)
    if (!(log_ratio * k_max > log_range)) return k_max;                           // nearly equal magnitudes
    return std::max(std::floor(16.0f * log_range / log_ratio) / 16.0f, 1.0f / 16.0f);
}

namespace {

// code = sign(x) encode(FMAX (|x| / max)^k)
uint8_t encode_expanded(Format fp8, float x, float max, float k) {
    const float expanded = info(fp8).max * std::exp2(k * (std::log2(std::abs(x)) - std::log2(max)));
    const uint8_t sign = std::signbit(x) ? 0x80 : 0;
    return x == 0 ? 0 : static_cast<uint8_t>(encode(fp8, expanded) | sign);
}

// value = sign max (|code| / FMAX)^(1/k)
float decode_expanded(Format fp8, uint8_t code, float max, float k) {
    const float c = decode(fp8, code);
    if (c == 0 || max == 0) return 0.0f;
    // The power's root, twice: in a group wider than FP32's exponents the power underflows where its product with max does not.
    // What lies below FP32 altogether stays its smallest number: a second moment that is not zero never becomes zero.
    const float root = std::exp2((std::log2(std::abs(c)) - std::log2(info(fp8).max)) / (2 * k));
    return std::copysign(std::max(max * root * root, std::numeric_limits<float>::denorm_min()), c);
}

// Code i of a moment: FP8 has bytes, FP16 pairs of them.
uint16_t code_at(Format f, const uint8_t* codes, int64_t i) {
    return f == Format::F16 ? reinterpret_cast<const uint16_t*>(codes)[i] : codes[i];
}
void put_code(Format f, uint8_t* codes, int64_t i, uint16_t code) {
    if (f == Format::F16) reinterpret_cast<uint16_t*>(codes)[i] = code;
    else codes[i] = static_cast<uint8_t>(code);
}

float decode_one(Format f, bool expand, uint16_t code, float max, float k) {
    if (expand) return decode_expanded(f, static_cast<uint8_t>(code), max, k);
    const float value = f == Format::F16 ? from_f16(code) : decode(f, static_cast<uint8_t>(code));
    return max == 0 ? 0.0f : value * scale_of(Quant{f}, max);
}

// What n elements share.
void fit(Format f, bool expand, const float* x, int64_t n, float* max, float* k) {
    float largest = 0, smallest = std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < n; i++) {
        const float a = std::abs(x[i]);
        largest = std::max(largest, a);
        if (a > 0) smallest = std::min(smallest, a);
    }
    *max = largest;
    if (expand) *k = largest > 0 ? expansion_factor(f, largest, smallest) : 1.0f;
}

void encode_all(Format f, bool expand, bool keep_positive, const float* x, int64_t n, uint8_t* codes, float max, float k, QuantStats* stats) {
    const float inverse = 1.0f / scale_of(Quant{f}, max);
    for (int64_t i = 0; i < n; i++) {
        const float scaled = x[i] * inverse;
        const uint16_t code = expand ? encode_expanded(f, x[i], max, k) : f == Format::F16 ? to_f16(scaled) : encode(f, scaled);
        put_code(f, codes, i, keep_positive && x[i] > 0 && code == 0 ? 1 : code);
    }
    if (!stats) return;
    const uint16_t sign = f == Format::F16 ? 0x8000 : 0x80;
    for (int64_t i = 0; i < n; i++) {
        const uint16_t code = code_at(f, codes, i);
        const double error = static_cast<double>(x[i]) - static_cast<double>(decode_one(f, expand, code, max, k));
        stats->signal += static_cast<double>(x[i]) * x[i];
        stats->noise += error * error;
        stats->flushed += x[i] != 0 && (code | sign) == sign;
    }
    stats->elements += n;
}

}  // namespace

void encode_moment(Format f, bool expand, bool keep_positive, const float* x, int64_t n, uint8_t* codes, float* max, float* k,
                   QuantStats* stats) {
    for (int64_t g = 0; g * MOMENT_GROUP < n; g++) {
        const int64_t first = g * MOMENT_GROUP, size = std::min<int64_t>(MOMENT_GROUP, n - first);
        fit(f, expand, x + first, size, max + g, expand ? k + g : nullptr);
        encode_all(f, expand, keep_positive, x + first, size, codes + first * info(f).bytes, max[g], expand ? k[g] : 1.0f, stats);
    }
}

void decode_moment(Format f, bool expand, const uint8_t* codes, const float* max, const float* k, int64_t n, float* x) {
    for (int64_t i = 0; i < n; i++) {
        const int64_t g = i / MOMENT_GROUP;
        x[i] = decode_one(f, expand, code_at(f, codes, i), max[g], expand ? k[g] : 1.0f);
    }
}

void Moment::init(Format f, bool expansion, int64_t n, Granularity g) {
    format = f;
    granularity = g;
    expand = expansion && is_fp8(f);
    codes.assign(n * info(f).bytes, 0);
    if (is_scaled(f)) max.assign(Quant{f, g}.scale_cols(n), 0.0f);
    if (expand) k.assign(max.size(), 1.0f);
}

void Moment::load(int64_t first, int64_t n, float* x) const {
    const uint8_t* from = codes.data() + first * info(format).bytes;
    if (format == Format::F32) {
        std::memcpy(x, from, n * 4);
    } else if (format == Format::BF16) {
        for (int64_t i = 0; i < n; i++) x[i] = from_bf16(reinterpret_cast<const uint16_t*>(from)[i]);
    } else if (granularity == PER_TENSOR) {
        for (int64_t i = 0; i < n; i++) x[i] = decode_one(format, expand, code_at(format, from, i), max[0], expand ? k[0] : 1.0f);
    } else {
        const int64_t g = first / MOMENT_GROUP;
        decode_moment(format, expand, from, max.data() + g, expand ? k.data() + g : nullptr, n, x);
    }
}

void Moment::fit_tensor(int64_t n, const float* x) {
    if (is_scaled(format) && granularity == PER_TENSOR) fit(format, expand, x, n, max.data(), k.data());
}

void Moment::store(int64_t first, int64_t n, const float* x, bool keep_positive, QuantStats* stats) {
    uint8_t* to = codes.data() + first * info(format).bytes;
    if (format == Format::F32) {
        std::memcpy(to, x, n * 4);
    } else if (format == Format::BF16) {
        for (int64_t i = 0; i < n; i++) reinterpret_cast<uint16_t*>(to)[i] = to_bf16(x[i]);
    } else if (granularity == PER_TENSOR) {
        encode_all(format, expand, keep_positive, x, n, to, max[0], expand ? k[0] : 1.0f, stats);
    } else {
        const int64_t g = first / MOMENT_GROUP;
        encode_moment(format, expand, keep_positive, x, n, to, max.data() + g, expand ? k.data() + g : nullptr, stats);
    }
}

AdamWFactors adamw_factors(const AdamW& a, bool decays, double grad_norm) {
    const double bias1 = 1 - std::pow(static_cast<double>(a.beta1), static_cast<double>(a.step));
    const double bias2 = 1 - std::pow(static_cast<double>(a.beta2), static_cast<double>(a.step));
    const double shrink = a.clip > 0 && grad_norm > a.clip ? a.clip / grad_norm : 1.0;
    return {a.lr, a.beta1, a.beta2, 1 - a.beta1, 1 - a.beta2, a.eps, decays ? a.weight_decay : 0.0f,
            static_cast<float>(bias1), static_cast<float>(std::sqrt(bias2)), static_cast<float>(shrink)};
}

void adamw(const AdamWFactors& f, int64_t n, const float* gradient, float* master, float* m, float* v) {
    for (int64_t i = 0; i < n; i++) {
        const float g = gradient[i] * f.gradient_scale;
        m[i] = f.beta1 * m[i] + f.one_minus_beta1 * g;
        v[i] = f.beta2 * v[i] + f.one_minus_beta2 * (g * g);
        const float update = m[i] / f.bias1 / (std::sqrt(v[i]) / f.bias2_root + f.eps);
        master[i] -= f.lr * (update + f.decay * master[i]);
    }
}

// =====================================================================================================================
// Matrix product: the three GEMMs of a linear layer (fprop, dgrad, wgrad) differ in strides only

namespace {

// C is made in tiles of MR x NR that live in registers while k runs; A and B are first copied so that the k loop reads
// straight through memory. KC keeps a copied block in the caches. All are multiples the compiler can turn into vectors by itself.
constexpr int MR = 6, NR = 16;
constexpr int64_t KC = 512;

// data (extent, depth) by strides -> panels of `width` lines: panel[k][i], zero beyond the extent
template <int width, class Real>
void pack(const Real* data, int64_t line, int64_t step, int64_t extent, int64_t depth, std::vector<Real>& panels) {
    panels.resize(ceil_div(extent, width) * width * depth);
#pragma omp parallel for if (extent * depth > 1 << 14)
    for (int64_t p = 0; p < ceil_div(extent, width); p++) {
        Real* out = panels.data() + p * width * depth;
        const int64_t live = std::min<int64_t>(width, extent - p * width);
        for (int64_t k = 0; k < depth; k++)
            for (int64_t i = 0; i < width; i++) out[k * width + i] = i < live ? data[(p * width + i) * line + k * step] : Real(0);
    }
}

template <class Real>
void tile(int64_t depth, const Real* a, const Real* b, Real (&out)[MR][NR]) {
    Real sum[MR][NR] = {};
    for (int64_t k = 0; k < depth; k++)
        for (int i = 0; i < MR; i++) {
#pragma omp simd
            for (int j = 0; j < NR; j++) sum[i][j] += a[k * MR + i] * b[k * NR + j];
        }
    for (int i = 0; i < MR; i++)
        for (int j = 0; j < NR; j++) out[i][j] = sum[i][j];
}

}  // namespace

template <class Real>
void matmul(int64_t M, int64_t N, int64_t K, Matrix<Real> A, Matrix<Real> B, Real* C, bool accumulate) {
    if (!accumulate) std::fill(C, C + M * N, Real(0));
    std::vector<Real> a, b;
    const int64_t down = ceil_div(M, MR), across = ceil_div(N, NR);
    for (int64_t k0 = 0; k0 < K; k0 += KC) {
        const int64_t depth = std::min(KC, K - k0);
        pack<MR>(A.data + k0 * A.col, A.row, A.col, M, depth, a);
        pack<NR>(B.data + k0 * B.row, B.col, B.row, N, depth, b);
#pragma omp parallel for collapse(2) if (M * N * depth > 1 << 16)
        for (int64_t j = 0; j < across; j++)
            for (int64_t i = 0; i < down; i++) {
                Real out[MR][NR];
                tile(depth, a.data() + i * MR * depth, b.data() + j * NR * depth, out);
                const int64_t rows = std::min<int64_t>(MR, M - i * MR), cols = std::min<int64_t>(NR, N - j * NR);
                for (int64_t r = 0; r < rows; r++)
                    for (int64_t c = 0; c < cols; c++) C[(i * MR + r) * N + j * NR + c] += out[r][c];
            }
    }
}

// =====================================================================================================================
// Operators of the precision flow

namespace {

template <class Real>
Real dot(const Real* a, const Real* b, int64_t n) {
    Real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

template <class Real>
struct RowStatistics {
    Real mean, inverse_deviation;  // RMSNorm: mean 0, and one over the root mean square
};

template <class Real>
RowStatistics<Real> row_statistics(bool rms, Real eps, int64_t C, const Real* x) {
    Real mean = 0, square = 0;
    if (!rms) {
#pragma omp simd reduction(+ : mean)
        for (int64_t c = 0; c < C; c++) mean += x[c];
        mean /= static_cast<Real>(C);
    }
#pragma omp simd reduction(+ : square)
    for (int64_t c = 0; c < C; c++) square += (x[c] - mean) * (x[c] - mean);
    return {mean, 1 / std::sqrt(square / static_cast<Real>(C) + eps)};
}

}  // namespace

template <class Real>
void norm_forward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight, const Real* bias, Real* y) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        const auto s = row_statistics(rms, eps, C, x + n * C);
        for (int64_t c = 0; c < C; c++)
            y[n * C + c] = (x[n * C + c] - s.mean) * s.inverse_deviation * weight[c] + (bias ? bias[c] : Real(0));
    }
}

// With x^ = (x - mean) / deviation and d = dy * weight:  dx = (d - mean(d) - x^ mean(d x^)) / deviation; RMSNorm has no mean(d).
template <class Real>
void norm_backward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight, const Real* dy, Real* dx, Real* dweight,
                   Real* dbias) {
    std::vector<RowStatistics<Real>> rows(N);
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        const auto s = rows[n] = row_statistics(rms, eps, C, x + n * C);
        Real mean_d = 0, mean_dx = 0;
#pragma omp simd reduction(+ : mean_d, mean_dx)
        for (int64_t c = 0; c < C; c++) {
            const Real d = dy[n * C + c] * weight[c];
            mean_d += d;
            mean_dx += d * (x[n * C + c] - s.mean) * s.inverse_deviation;
        }
        mean_d = rms ? Real(0) : mean_d / static_cast<Real>(C);
        mean_dx /= static_cast<Real>(C);
        for (int64_t c = 0; c < C; c++) {
            const Real normal = (x[n * C + c] - s.mean) * s.inverse_deviation;
            dx[n * C + c] = (dy[n * C + c] * weight[c] - mean_d - normal * mean_dx) * s.inverse_deviation;
        }
    }
    const int64_t block = 64;  // columns of one thread, so that every sum runs over the rows in order
#pragma omp parallel for
    for (int64_t c0 = 0; c0 < C; c0 += block)
        for (int64_t n = 0; n < N; n++)
            for (int64_t c = c0; c < std::min(C, c0 + block); c++) {
                dweight[c] += dy[n * C + c] * (x[n * C + c] - rows[n].mean) * rows[n].inverse_deviation;
                if (dbias) dbias[c] += dy[n * C + c];
            }
}

namespace {

template <class Real>
Real sigmoid(Real x) { return 1 / (1 + std::exp(-x)); }

constexpr double GELU_SCALE = 0.79788456080286536, GELU_CUBE = 0.044715;  // sqrt(2 / pi), and GPT-2's tanh form

template <class Real>
Real tanh_of_gelu(Real x) { return std::tanh(static_cast<Real>(GELU_SCALE) * (x + static_cast<Real>(GELU_CUBE) * x * x * x)); }

}  // namespace

template <class Real>
void activation_forward(bool gated, int64_t N, int64_t F, const Real* up, Real* h) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            const Real a = up[gated ? n * 2 * F + f : n * F + f];
            h[n * F + f] = gated ? a * sigmoid(a) * up[n * 2 * F + F + f] : Real(0.5) * a * (1 + tanh_of_gelu(a));
        }
}

template <class Real>
void activation_backward(bool gated, int64_t N, int64_t F, const Real* up, const Real* dh, Real* dup) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            const Real d = dh[n * F + f];
            if (gated) {
                const int64_t gate = n * 2 * F + f, lift = gate + F;
                const Real a = up[gate], s = sigmoid(a);
                dup[lift] = d * a * s;
                dup[gate] = d * up[lift] * s * (1 + a * (1 - s));
            } else {
                const Real a = up[n * F + f], t = tanh_of_gelu(a);
                const Real square = std::min(a * a, Real(1000));  // beyond, t is 1 or -1, and 0 x infinity would be NaN
                const Real slope = static_cast<Real>(GELU_SCALE) * (1 + 3 * static_cast<Real>(GELU_CUBE) * square);
                dup[n * F + f] = d * Real(0.5) * (1 + t + a * (1 - t * t) * slope);
            }
        }
}

template <class Real>
void rope(const ModelConfig& c, int64_t B, int64_t T, Real* qkv, bool inverse) {
    const int64_t half = c.HS() / 2;
    std::vector<Real> cosine(T * half), sine(T * half);
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < half; i++) {
            const double frequency = std::pow(static_cast<double>(c.rope_theta), -2.0 * static_cast<double>(i) / static_cast<double>(c.HS()));
            const double angle = static_cast<double>(t) * frequency;
            cosine[t * half + i] = static_cast<Real>(std::cos(angle));
            sine[t * half + i] = static_cast<Real>(inverse ? -std::sin(angle) : std::sin(angle));
        }
#pragma omp parallel for
    for (int64_t n = 0; n < B * T; n++)
        for (int64_t head = 0; head < c.NH + c.NKV; head++) {  // q's heads, then k's; v is not rotated
            Real* x = qkv + n * c.qkv_cols() + head * c.HS();
            const Real *cs = cosine.data() + n % T * half, *sn = sine.data() + n % T * half;
            for (int64_t i = 0; i < half; i++) {
                const Real a = x[i], b = x[i + half];
                x[i] = a * cs[i] - b * sn[i];
                x[i + half] = b * cs[i] + a * sn[i];
            }
        }
}

namespace {

// Where one (sequence, head) finds its rows in qkv.
template <class Real>
struct HeadRows {
    const Real *q, *k, *v;
    int64_t stride;
};
template <class Real>
HeadRows<Real> head_rows(const ModelConfig& c, int64_t T, const Real* qkv, int64_t b, int64_t head) {
    const Real* base = qkv + b * T * c.qkv_cols();
    const int64_t kv = head / (c.NH / c.NKV) * c.HS();
    return {base + head * c.HS(), base + c.q_cols() + kv, base + c.q_cols() + c.kv_cols() + kv, c.qkv_cols()};
}

// (T, HS) rows -> (HS, T), so that a query meets all keys in one straight loop
template <class Real>
std::vector<Real> transposed_rows(const Real* rows, int64_t stride, int64_t T, int64_t HS) {
    std::vector<Real> out(HS * T);
    for (int64_t t = 0; t < T; t++)
        for (int64_t d = 0; d < HS; d++) out[d * T + t] = rows[t * stride + d];
    return out;
}

// out[j] = scale * sum_d x[d] columns[d][j] for j < n
template <class Real>
void against_all(const Real* x, const std::vector<Real>& columns, int64_t T, int64_t HS, int64_t n, Real scale, Real* out) {
    std::fill(out, out + n, Real(0));
    for (int64_t d = 0; d < HS; d++) {
        const Real xd = x[d] * scale;
        const Real* column = columns.data() + d * T;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) out[j] += xd * column[j];
    }
}

template <class Real>
void add_scaled(int64_t n, Real scale, const Real* x, Real* y) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] += scale * x[i];
}

}  // namespace

template <class Real>
void attention_forward(const ModelConfig& c, int64_t B, int64_t T, const Real* qkv, Real* out, Real* lse) {
    const int64_t HS = c.HS(), NH = c.NH;
    const Real scale = 1 / std::sqrt(static_cast<Real>(HS));
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t head = 0; head < NH; head++) {
            const auto rows = head_rows(c, T, qkv, b, head);
            const auto keys = transposed_rows(rows.k, rows.stride, T, HS);
            std::vector<Real> p(T);
            for (int64_t t = 0; t < T; t++) {
                against_all(rows.q + t * rows.stride, keys, T, HS, t + 1, scale, p.data());
                const Real top = *std::max_element(p.begin(), p.begin() + t + 1);
                Real sum = 0;
                for (int64_t j = 0; j <= t; j++) sum += p[j] = std::exp(p[j] - top);
                lse[(b * NH + head) * T + t] = top + std::log(sum);
                Real* y = out + (b * T + t) * NH * HS + head * HS;
                std::fill(y, y + HS, Real(0));
                for (int64_t j = 0; j <= t; j++) add_scaled(HS, p[j] / sum, rows.v + j * rows.stride, y);
            }
        }
}

// p again from the saved log-sum-exp; then dv_j += p_j dout, ds_j = p_j (dout . v_j - dout . out), dq += ds_j k_j, dk_j += ds_j q.
template <class Real>
void attention_backward(const ModelConfig& c, int64_t B, int64_t T, const Real* qkv, const Real* out, const Real* lse, const Real* dout,
                        Real* dqkv) {
    const int64_t HS = c.HS(), NH = c.NH, group = NH / c.NKV;
    const Real scale = 1 / std::sqrt(static_cast<Real>(HS));
    std::fill(dqkv, dqkv + B * T * c.qkv_cols(), Real(0));
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t kv = 0; kv < c.NKV; kv++)  // one thread for all query heads that share a key/value head: their sums are ordered
            for (int64_t head = kv * group; head < (kv + 1) * group; head++) {
                const auto rows = head_rows(c, T, qkv, b, head);
                const auto grads = head_rows(c, T, static_cast<const Real*>(dqkv), b, head);
                Real *dq = const_cast<Real*>(grads.q), *dk = const_cast<Real*>(grads.k), *dv = const_cast<Real*>(grads.v);
                const auto keys = transposed_rows(rows.k, rows.stride, T, HS), values = transposed_rows(rows.v, rows.stride, T, HS);
                std::vector<Real> p(T), ds(T);
                for (int64_t t = 0; t < T; t++) {
                    const Real* q = rows.q + t * rows.stride;
                    const Real *y = out + (b * T + t) * NH * HS + head * HS, *dy = dout + (b * T + t) * NH * HS + head * HS;
                    const Real norm = lse[(b * NH + head) * T + t], dy_y = dot(dy, y, HS);
                    against_all(q, keys, T, HS, t + 1, scale, p.data());
                    against_all(dy, values, T, HS, t + 1, Real(1), ds.data());
                    for (int64_t j = 0; j <= t; j++) p[j] = std::exp(p[j] - norm);
                    for (int64_t j = 0; j <= t; j++) ds[j] = p[j] * (ds[j] - dy_y) * scale;
                    for (int64_t j = 0; j <= t; j++) {
                        add_scaled(HS, p[j], dy, dv + j * rows.stride);
                        add_scaled(HS, ds[j], q, dk + j * rows.stride);
                        add_scaled(HS, ds[j], rows.k + j * rows.stride, dq + t * rows.stride);
                    }
                }
            }
}

template <class Real>
double cross_entropy(int64_t N, int64_t V, int64_t V_stride, Real* logits, const int32_t* targets, Real scale) {
    std::vector<double> losses(N);
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        Real* row = logits + n * V_stride;
        const Real top = *std::max_element(row, row + V), target = row[targets[n]];
        Real sum = 0;
        for (int64_t v = 0; v < V; v++) sum += row[v] = std::exp(row[v] - top);
        losses[n] = static_cast<double>(std::log(sum) + top - target);
        for (int64_t v = 0; v < V; v++) row[v] *= scale / sum;
        row[targets[n]] -= scale;
        std::fill(row + V, row + V_stride, Real(0));
    }
    double total = 0;
    for (double loss : losses) total += loss;
    return total;
}

#define INSTANTIATE(Real)                                                                                                          \
    template void matmul(int64_t, int64_t, int64_t, Matrix<Real>, Matrix<Real>, Real*, bool);                                      \
    template void norm_forward(bool, Real, int64_t, int64_t, const Real*, const Real*, const Real*, Real*);                        \
    template void norm_backward(bool, Real, int64_t, int64_t, const Real*, const Real*, const Real*, Real*, Real*, Real*);         \
    template void activation_forward(bool, int64_t, int64_t, const Real*, Real*);                                                  \
    template void activation_backward(bool, int64_t, int64_t, const Real*, const Real*, Real*);                                    \
    template void rope(const ModelConfig&, int64_t, int64_t, Real*, bool);                                                         \
    template void attention_forward(const ModelConfig&, int64_t, int64_t, const Real*, Real*, Real*);                              \
    template void attention_backward(const ModelConfig&, int64_t, int64_t, const Real*, const Real*, const Real*, const Real*, Real*); \
    template double cross_entropy(int64_t, int64_t, int64_t, Real*, const int32_t*, Real);
INSTANTIATE(float)
INSTANTIATE(double)
#undef INSTANTIATE

// =====================================================================================================================
// The whole step: the precision flow (paper section 5)

namespace {

// What a recipe does to a tensor. In double nothing is rounded: that is the fp32 recipe under finite differences.
Quantized keep(const std::vector<float>& x, int64_t rows, int64_t cols, const Quant& q, QuantStats* stats) {
    return quantize(x.data(), rows, cols, q, stats);
}
std::vector<float> recall(const Quantized& q) { return dequantize(q); }
std::vector<double> keep(const std::vector<double>& x, int64_t, int64_t, const Quant&, QuantStats*) { return x; }
std::vector<double> recall(const std::vector<double>& x) { return x; }
std::vector<double> operand(const std::vector<double>& x, int64_t, int64_t, const Quant&, ReduceOver, QuantStats*, const float*) { return x; }

template <class Real>
using Kept = std::conditional_t<std::is_same_v<Real, float>, Quantized, std::vector<double>>;

template <class Real>
struct SavedLayer {  // coat.h's saved_per_layer()
    Kept<Real> norm1_input, qkv, attention, norm2_input, up;
    std::vector<Real> lse;
};

template <class Real>
class Network {
public:
    using Tensor = std::vector<Real>;
    const ModelConfig config;
    const Recipe recipe;
    const std::vector<Param> params;
    std::vector<Tensor> weights, gradients;  // by parameter; values of the compute dtype and of gradient_format(). A gradient may be empty until it
                                             // is added to
    QuantStats* stats = nullptr;             // one per Kind; null: not measured
    std::vector<std::array<DelayedScale, OPERANDS>> delayed;  // by parameter; of linear layers, where the recipe delays its scales
    bool finite = true;                      // no loss, and no tensor that went to FP8, had a NaN or an infinity, which a code would hide
    std::function<void(int64_t bucket)> bucket_done;  // called as soon as backward has a bucket's gradients and is done with its weights

    explicit Network(const Setup& s)
        : config(s.config), recipe(s.recipe), params(parameters(config)), gradients(params.size()), quant_(linear_formats(s)),
          gradient_(gradient_format(s)) {
        for (size_t i = 0; i < params.size(); i++) index_[params[i].name] = i;
        for (const Param& p : params) weights.emplace_back(p.size());
        delayed.resize(params.size());
        for (const StateTensor& t : scaling_tensors(config, recipe))
            for (DelayedScale& d : delayed[t.param]) d.history.resize(recipe.history);
    }

    // What the amaxes of this step make of the next one's scales.
    void end_delayed_step() {
        for (auto& operands : delayed)
            for (int o = 0; o < OPERANDS; o++)
                if (!operands[o].history.empty()) operands[o].end_step(quant_of(recipe, static_cast<LinearOperand>(o)).format, recipe.margin);
    }
    // Before a step, or a pass of its own: nothing is known of its amaxes.
    void begin() {
        finite = true;
        for (auto& operands : delayed)
            for (DelayedScale& d : operands) d.amax = 0;
    }

    size_t index(const std::string& name) const { return index_.at(name); }

    // Hidden states before the final norm, (N, C). What backward needs stays in saved_.
    Tensor forward(const int32_t* tokens, int64_t B, int64_t T) {
        B_ = B, T_ = T, N_ = B * T;
        saved_.clear();
        Tensor sum = embed(tokens);
        for (int64_t l = 0; l < config.L; l++) sum = block_forward(l, sum);
        return rounded(sum);
    }

    // Sum of the losses of the micro-batch; gradients of that sum times scale are added if scale is not 0.
    double run(const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T, double scale) {
        const Tensor x = forward(tokens, B, T);
        const Tensor y = rounded(norm("final_norm", x));
        Tensor logits = head_logits(y, N_);
        const double loss = cross_entropy(N_, config.V, config.padded_V(), logits.data(), targets, static_cast<Real>(scale));
        finite = finite && std::isfinite(loss);
        if (scale == 0) return loss;
        Tensor g = head_backward(x, y, rounded(logits));
        for (int64_t l = config.L; l-- > 0;) g = block_backward(l, g);
        embed_backward(tokens, g);
        return loss;
    }

    // (rows, padded_V) in compute dtype; the head is not quantized
    Tensor head_logits(const Tensor& y, int64_t rows) {
        Tensor logits(rows * config.padded_V());
        matmul<Real>(rows, config.padded_V(), config.C, {y.data(), config.C, 1}, {weights[head()].data(), 1, config.C}, logits.data());
        return rounded(logits);
    }

    Tensor norm(const std::string& name, const Tensor& x) const {  // FP32
        Tensor y(x.size());
        norm_forward<Real>(config.arch.rms, eps(), static_cast<int64_t>(x.size()) / config.C, config.C, x.data(),
                           weights[index(name + ".weight")].data(), config.arch.rms ? nullptr : weights[index(name + ".bias")].data(), y.data());
        return y;
    }

    Tensor rounded(Tensor x) const { return rounded(std::move(x), recipe.compute); }

private:
    const LinearFormats quant_;  // of every linear layer
    const Format gradient_;
    std::map<std::string, size_t> index_;
    std::vector<SavedLayer<Real>> saved_;
    int64_t B_ = 0, T_ = 0, N_ = 0;

    Real eps() const { return static_cast<Real>(config.norm_eps); }
    size_t head() const { return index(config.tied ? "embedding" : "head"); }
    std::string layer(int64_t l) const { return "layers." + std::to_string(l) + "."; }
    QuantStats* stats_of(Kind k) const { return stats ? stats + static_cast<int>(k) : nullptr; }
    static Tensor rounded(Tensor x, Format f) {
        if constexpr (std::is_same_v<Real, float>)
            for (float& v : x) v = round_to(f, v);
        return x;
    }

    // What goes to FP8 is checked, since a code would hide a NaN or an infinity. Returns its amax.
    float checked_amax(const Tensor& x) {
        if constexpr (std::is_same_v<Real, float>) {
            const float top = amax(x.data(), static_cast<int64_t>(x.size()));
            finite = finite && std::isfinite(top);
            return top;
        }
        return 0;
    }

    // Held as the recipe says.
    Kept<Real> hold(const Tensor& x, int64_t rows, int64_t cols, const Quant& q, Kind kind) {
        if (q.fp8()) checked_amax(x);
        return keep(x, rows, cols, q, stats_of(kind));
    }

    // --- Residual pair: the stream goes on in compute dtype, the next norm reads the quantized input -------------------
    Kept<Real> norm_input(const Tensor& sum) { return hold(sum, N_, config.C, recipe.nonlinear, Kind::NormInput); }

    static Tensor added(const Tensor& x, const Tensor& y) {
        Tensor sum(x.size());
        for (size_t i = 0; i < x.size(); i++) sum[i] = x[i] + y[i];
        return sum;
    }

    // --- Linear layers: quantized as each product sees it, multiplied, rounded ----------------------------------------
    Tensor linear_operand(LinearOperand which, size_t linear, const Tensor& x, int64_t cols, const Quant& q, ReduceOver contracts) {
        constexpr Kind KINDS[] = {Kind::LinearInput, Kind::Weight, Kind::Gradient};
        const int i = static_cast<int>(which);
        const float top = q.fp8() ? checked_amax(x) : 0;
        const bool delays = recipe.scaling == Scaling::Delayed && q.fp8();
        float scale = 0;
        if (delays) {
            DelayedScale& d = delayed[linear][i];
            d.amax = std::max(d.amax, top);
            scale = d.scale > 0 ? d.scale : scale_of(q, d.amax);
        }
        return operand(x, static_cast<int64_t>(x.size()) / cols, cols, q, contracts, stats_of(KINDS[i]), delays ? &scale : nullptr);
    }

    Tensor linear_forward(const std::string& name, const Tensor& x) {  // x (N, in) FP32 -> (N, out) stream
        const Param& w = params[index(name)];
        const LinearFormats& q = quant_;
        const size_t i = index(name);
        const Tensor x8 = linear_operand(LinearOperand::X, i, x, w.cols, q.x, ReduceOver::Columns);
        const Tensor w8 = linear_operand(LinearOperand::W, i, weights[i], w.cols, q.w, ReduceOver::Columns);
        Tensor y(N_ * w.rows);
        matmul<Real>(N_, w.rows, w.cols, {x8.data(), w.cols, 1}, {w8.data(), 1, w.cols}, y.data());
        if (config.arch.bias) {
            const Tensor& bias = weights[index(name + ".bias")];
            for (int64_t n = 0; n < N_; n++)
                for (int64_t o = 0; o < w.rows; o++) y[n * w.rows + o] += bias[o];
        }
        return rounded(y);
    }

    Tensor linear_backward(const std::string& name, const Tensor& x, const Tensor& dy) {  // dy (N, out) -> dx (N, in) stream
        const Param& w = params[index(name)];
        const LinearFormats& q = quant_;
        const size_t i = index(name);
        const Tensor x8 = linear_operand(LinearOperand::X, i, x, w.cols, q.x, ReduceOver::Rows);
        const Tensor w8 = linear_operand(LinearOperand::W, i, weights[i], w.cols, q.w, ReduceOver::Rows);
        Tensor g8 = linear_operand(LinearOperand::G, i, dy, w.rows, q.g, ReduceOver::Columns), dx(N_ * w.cols), dw(w.size());
        matmul<Real>(N_, w.cols, w.rows, {g8.data(), w.rows, 1}, {w8.data(), w.cols, 1}, dx.data());  // dgrad
        if (!q.g.granularity.symmetric()) g8 = linear_operand(LinearOperand::G, i, dy, w.rows, q.g, ReduceOver::Rows);
        matmul<Real>(w.rows, w.cols, N_, {g8.data(), 1, w.rows}, {x8.data(), w.cols, 1}, dw.data());  // wgrad
        add_gradient(i, dw);
        // A bias adds up the gradient as the products read it, but for the rounding to FP8.
        if (config.arch.bias) add_gradient(index(name + ".bias"), column_sums(q.g.fp8() ? dy : g8, w.rows));
        return rounded(dx);
    }

    Tensor column_sums(const Tensor& x, int64_t cols) const {
        Tensor sums(cols);
        for (int64_t n = 0; n < N_; n++)
            for (int64_t c = 0; c < cols; c++) sums[c] += x[n * cols + c];
        return sums;
    }

    void add_gradient(size_t i, const Tensor& contribution) {
        gradients[i].resize(contribution.size());  // with zeros, where nothing was
        gradients[i] = rounded(added(gradients[i], contribution), gradient_);
    }

    void bucket_done_of(const std::string& name) const {
        if (bucket_done) bucket_done(params[index(name)].bucket);
    }

    // --- Embedding ----------------------------------------------------------------------------------------------------
    Tensor embed(const int32_t* tokens) const {
        const int64_t C = config.C;
        Tensor sum(N_ * C);
        for (int64_t n = 0; n < N_; n++)
            for (int64_t c = 0; c < C; c++) {
                sum[n * C + c] = weights[index("embedding")][tokens[n] * C + c];
                if (!config.arch.rope) sum[n * C + c] += weights[index("positions")][n % T_ * C + c];
            }
        return sum;
    }

    void embed_backward(const int32_t* tokens, const Tensor& g) {
        scatter("embedding", g, [&](int64_t n) { return static_cast<int64_t>(tokens[n]); });
        if (!config.arch.rope) scatter("positions", g, [&](int64_t n) { return n % T_; });
        bucket_done_of("embedding");
    }

    template <class Row>
    void scatter(const std::string& name, const Tensor& g, Row row) {
        Tensor sums(params[index(name)].size());
        for (int64_t n = 0; n < N_; n++) add_scaled(config.C, Real(1), g.data() + n * config.C, sums.data() + row(n) * config.C);
        add_gradient(index(name), sums);
    }

    // --- Head: logits' gradients -> hidden states' gradients --------------------------------------------------------
    Tensor head_backward(const Tensor& x, const Tensor& y, const Tensor& dlogits) {
        const int64_t V = config.padded_V(), C = config.C;
        Tensor dhead(V * C), dy(N_ * C);
        matmul<Real>(V, C, N_, {dlogits.data(), 1, V}, {y.data(), C, 1}, dhead.data());
        matmul<Real>(N_, C, V, {dlogits.data(), V, 1}, {weights[head()].data(), C, 1}, dy.data());
        add_gradient(head(), dhead);
        const Tensor dx = norm_gradient("final_norm", x, rounded(dy));
        bucket_done_of("final_norm.weight");
        return rounded(dx);
    }

    Tensor norm_gradient(const std::string& name, const Tensor& x, const Tensor& dy) {  // FP32
        Tensor dx(x.size()), dweight(config.C), dbias(config.arch.rms ? 0 : config.C);
        norm_backward<Real>(config.arch.rms, eps(), N_, config.C, x.data(), weights[index(name + ".weight")].data(), dy.data(), dx.data(),
                            dweight.data(), config.arch.rms ? nullptr : dbias.data());
        add_gradient(index(name + ".weight"), dweight);
        if (!config.arch.rms) add_gradient(index(name + ".bias"), dbias);
        return dx;
    }

    // --- One block --------------------------------------------------------------------------------------------------
    Tensor activation(const Tensor& up) const {
        Tensor h(N_ * config.F);
        activation_forward<Real>(config.arch.gated, N_, config.F, up.data(), h.data());
        return h;
    }

    Tensor block_forward(int64_t l, const Tensor& sum) {  // sum (N, C) FP32 -> the next sum
        const std::string name = layer(l);
        SavedLayer<Real> s;
        s.norm1_input = norm_input(sum);
        Tensor qkv = linear_forward(name + "qkv", norm(name + "norm1", recall(s.norm1_input)));
        if (config.arch.rope) rope(config, B_, T_, qkv.data(), false);
        s.qkv = hold(rounded(qkv), N_, config.qkv_cols(), recipe.attention, Kind::Attention);
        qkv = rounded(recall(s.qkv));  // what backward will read too, so that the log-sum-exp belongs to it
        Tensor attention(N_ * config.q_cols());
        s.lse.resize(N_ * config.NH);
        attention_forward(config, B_, T_, qkv.data(), attention.data(), s.lse.data());
        s.attention = hold(rounded(attention), N_, config.q_cols(), recipe.attention, Kind::Attention);
        const Tensor middle = added(rounded(sum), linear_forward(name + "attention_out", recall(s.attention)));

        s.norm2_input = norm_input(middle);
        const Tensor up = linear_forward(name + "gate_up", norm(name + "norm2", recall(s.norm2_input)));
        s.up = hold(up, N_, config.gate_up_cols(), recipe.nonlinear, Kind::ActivationInput);
        const Tensor next = added(rounded(middle), linear_forward(name + "down", activation(recall(s.up))));
        saved_.push_back(std::move(s));
        return next;
    }

    // g (N, C): gradient of the residual stream after the block -> before it. Norms, activations and the operands of wgrad
    // are computed again from what was saved.
    Tensor block_backward(int64_t l, Tensor g) {
        const std::string name = layer(l);
        const SavedLayer<Real>& s = saved_[l];
        const Tensor up = recall(s.up), norm2_input = recall(s.norm2_input), norm1_input = recall(s.norm1_input);

        const Tensor dh = linear_backward(name + "down", activation(up), g);
        bucket_done_of(name + "down");
        Tensor dup(up.size());
        activation_backward<Real>(config.arch.gated, N_, config.F, up.data(), dh.data(), dup.data());
        const Tensor dnorm2 = linear_backward(name + "gate_up", norm(name + "norm2", norm2_input), dup);
        g = rounded(added(g, norm_gradient(name + "norm2", norm2_input, dnorm2)));
        bucket_done_of(name + "gate_up");

        const Tensor dattention = linear_backward(name + "attention_out", recall(s.attention), g);
        bucket_done_of(name + "attention_out");
        const Tensor attention = rounded(recall(s.attention)), qkv = rounded(recall(s.qkv));  // attention computes in the compute dtype
        Tensor dqkv(qkv.size());
        attention_backward(config, B_, T_, qkv.data(), attention.data(), s.lse.data(), dattention.data(), dqkv.data());
        dqkv = rounded(dqkv);
        if (config.arch.rope) rope(config, B_, T_, dqkv.data(), true), dqkv = rounded(dqkv);
        const Tensor dnorm1 = linear_backward(name + "qkv", norm(name + "norm1", norm1_input), dqkv);
        g = rounded(added(g, norm_gradient(name + "norm1", norm1_input, dnorm1)));
        bucket_done_of(name + "qkv");
        return g;
    }
};

// =====================================================================================================================
// The Model that train.cpp drives

class Reference : public Model {
public:
    explicit Reference(const Setup& setup) : setup_(setup), network_(setup) {
        const auto& params = network_.params;
        for (size_t i = 0; i < params.size(); i++) {
            const Param& p = params[i];
            State s{std::vector<uint16_t>(p.size()), std::vector<int16_t>(setup.master ? p.size() : 0), {}, {}};
            const OptimizerFormat& o = setup.optimizer;
            s.m.init(p.moment(o.m), o.expand, p.size(), o.granularity);
            s.v.init(p.moment(o.v), o.expand, p.size(), o.granularity);
            const int64_t live = live_elements(setup.config, p);
            for (int64_t e = 0; e < p.size(); e++) {
                int16_t remainder;
                split_master(initial(p.init_std, p.role.weight, live, setup.seed, i, e), &s.weight[e], &remainder);
                if (setup.master) s.remainder[e] = remainder;
            }
            states_.push_back(std::move(s));
            refresh(i);
        }
        clear_gradients();
    }

    StepResult step(const int32_t* tokens, const int32_t* targets, const AdamW& adamw) override {
        check(tokens, setup_.accumulate * setup_.B * setup_.T);
        check(targets, setup_.accumulate * setup_.B * setup_.T);
        clear_gradients();
        network_.begin();
        const int64_t N = setup_.B * setup_.T;
        double loss = 0, squares = 0;  // of the gradients, so far
        bool skipped = false;
        auto update_if_finite = [&](const Range& which, double norm_correction) {
            const double here = squares_of(which);
            squares += here;
            const double norm = std::sqrt(squares) * norm_correction, scale = adamw_factors(adamw, false, norm).gradient_scale;
            // The square of a scaled gradient is below 2^124, so a second moment of any format can represent it. NaN fails this too.
            skipped = skipped || !network_.finite || !(std::sqrt(here) * scale < 0x1p62);
            if (!skipped) update(which, adamw, norm);
        };
        std::vector<double> norms;  // by bucket, of its gradients and all later ones'
        if (!setup_.keep_gradients) {
            norms.resize(network_.params.back().bucket + 1);
            network_.bucket_done = [&](int64_t bucket) {
                update_if_finite(parameters_of(bucket), norm_correction_at(adamw, bucket));
                release_gradients(parameters_of(bucket));
                norms[bucket] = std::sqrt(squares);
            };
        }
        for (int64_t a = 0; a < setup_.accumulate; a++)
            loss += network_.run(tokens + a * N, targets + a * N, setup_.B, setup_.T, 1.0 / static_cast<double>(N * setup_.accumulate));
        network_.bucket_done = nullptr;
        if (setup_.keep_gradients) update_if_finite({0, states_.size()}, 1);
        if (!skipped) network_.end_delayed_step();
        return {loss / static_cast<double>(N * setup_.accumulate), std::sqrt(squares), skipped, norms.empty() ? norms : norm_corrections_of(norms)};
    }

    double evaluate(const int32_t* tokens, const int32_t* targets) override {
        check(tokens, setup_.B * setup_.T);
        check(targets, setup_.B * setup_.T);
        network_.begin();
        const double loss = network_.run(tokens, targets, setup_.B, setup_.T, 0) / static_cast<double>(setup_.B * setup_.T);
        return network_.finite ? loss : std::numeric_limits<double>::quiet_NaN();
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        check(tokens, n);
        network_.begin();
        const auto x = network_.forward(tokens, 1, n);
        const int64_t C = setup_.config.C;
        const std::vector<float> last(x.begin() + (n - 1) * C, x.begin() + n * C);
        const auto row = network_.head_logits(network_.rounded(network_.norm("final_norm", last)), 1);
        std::copy(row.begin(), row.begin() + setup_.config.V, logits);
    }

    QuantReport quantization(const int32_t* tokens, const int32_t* targets) override {
        check(tokens, setup_.B * setup_.T);
        check(targets, setup_.B * setup_.T);
        QuantReport report;
        network_.stats = report.kinds;
        network_.begin();
        clear_gradients();
        network_.bucket_done = [&](int64_t bucket) {
            const Range which = parameters_of(bucket);
            for (size_t i = which.first; i < which.last; i++) measure_moments(i, report);
            if (!setup_.keep_gradients) release_gradients(which);
        };
        network_.run(tokens, targets, setup_.B, setup_.T, 1.0 / static_cast<double>(setup_.B * setup_.T));
        network_.stats = nullptr, network_.bucket_done = nullptr;
        std::sort(report.k_m.begin(), report.k_m.end());
        std::sort(report.k_v.begin(), report.k_v.end());
        return report;
    }

    void read(const std::string& name, void* out) override {
        const auto [data, bytes] = find(name);
        std::memcpy(out, data, bytes);
    }

    void write(const std::string& name, const void* in) override {
        const auto [data, bytes] = find(name);
        std::memcpy(data, in, bytes);
        refresh(param_of(network_.params, name));
    }

    const Setup& setup() const override { return setup_; }

private:
    struct State {  // of one parameter
        std::vector<uint16_t> weight;
        std::vector<int16_t> remainder;  // empty where there is no master
        Moment m, v;
    };
    struct Range {  // parameters [first, last)
        size_t first, last;
    };
    static constexpr int64_t CHUNK = 32 * MOMENT_GROUP;  // elements that one thread updates at a time

    Setup setup_;
    Network<float> network_;
    std::vector<State> states_;

    void check(const int32_t* tokens, int64_t n) const {
        if (std::any_of(tokens, tokens + n, [&](int32_t t) { return t < 0 || t >= setup_.config.V; }))
            throw Error("A token lies outside the vocabulary of " + std::to_string(setup_.config.V) +
                        "; choose --data and --model that belong together.");
    }

    // The weights that the network computes with, in the compute dtype.
    void refresh(size_t i) {
        const State& s = states_[i];
        for (size_t e = 0; e < s.weight.size(); e++)
            network_.weights[i][e] = setup_.recipe.compute == Format::F32 ? join_master(s.weight[e], s.remainder[e]) : from_bf16(s.weight[e]);
    }

    Range parameters_of(int64_t bucket) const {  // they follow one another
        const auto& params = network_.params;
        auto number = [&](int64_t u) {
            return std::lower_bound(params.begin(), params.end(), u, [](const Param& p, int64_t wanted) { return p.bucket < wanted; }) - params.begin();
        };
        return {static_cast<size_t>(number(bucket)), static_cast<size_t>(number(bucket + 1))};
    }

    void clear_gradients() {
        if (!setup_.keep_gradients) return;  // each begins when backward comes to it
        for (size_t i = 0; i < states_.size(); i++) network_.gradients[i].assign(network_.params[i].size(), 0.0f);
    }
    void release_gradients(const Range& which) {
        for (size_t i = which.first; i < which.last; i++) std::vector<float>().swap(network_.gradients[i]);
    }

    double squares_of(const Range& which) const {
        double sum = 0;
        for (size_t i = which.first; i < which.last; i++)
            for (float x : network_.gradients[i]) sum += static_cast<double>(x) * x;
        return sum;
    }

    // Updated moments wait in FP32 until all of a tensor's are there: its largest may be what a scale is made from.
    void update(const Range& which, const AdamW& adamw, double norm) {
        const uint64_t key = rounding_key(setup_.seed, adamw.step);
        for (size_t i = which.first; i < which.last; i++) {
            const AdamWFactors f = adamw_factors(adamw, network_.params[i].role.decay, norm);
            const int64_t size = network_.params[i].size();
            State& s = states_[i];
            std::vector<float> m(size), v(size);
#pragma omp parallel for
            for (int64_t first = 0; first < size; first += CHUNK) update_chunk(i, f, key, first, std::min(CHUNK, size - first), &m[first], &v[first]);
            s.m.fit_tensor(size, m.data());
            s.v.fit_tensor(size, v.data());
#pragma omp parallel for
            for (int64_t first = 0; first < size; first += CHUNK) {
                s.m.store(first, std::min(CHUNK, size - first), &m[first], false);
                s.v.store(first, std::min(CHUNK, size - first), &v[first], setup_.optimizer.keep_positive);
            }
            refresh(i);
        }
    }

    void update_chunk(size_t i, const AdamWFactors& f, uint64_t key, int64_t first, int64_t n, float* m, float* v) {
        State& s = states_[i];
        float master[CHUNK];
        for (int64_t e = 0; e < n; e++)
            master[e] = setup_.master ? join_master(s.weight[first + e], s.remainder[first + e]) : from_bf16(s.weight[first + e]);
        s.m.load(first, n, m);
        s.v.load(first, n, v);
        adamw(f, n, network_.gradients[i].data() + first, master, m, v);
        for (int64_t e = 0; e < n; e++)
            if (setup_.master) split_master(master[e], &s.weight[first + e], &s.remainder[first + e]);
            else s.weight[first + e] = round_stochastically(master[e], key, network_.params[i].offset + first + e);
    }

    // What the moments that the gradient at hand leads to would lose; and the expansion factors in use.
    void measure_moments(size_t i, QuantReport& report) const {
        const State& s = states_[i];
        const int64_t size = network_.params[i].size();
        const AdamWFactors f = adamw_factors({1, 0.0f}, false, 0);
        std::vector<float> unused(size), m(size), v(size);
        s.m.load(0, size, m.data());
        s.v.load(0, size, v.data());
        adamw(f, size, network_.gradients[i].data(), unused.data(), m.data(), v.data());
        Moment m_after = s.m, v_after = s.v;
        m_after.fit_tensor(size, m.data());
        v_after.fit_tensor(size, v.data());
        m_after.store(0, size, m.data(), false, &report.kinds[static_cast<int>(Kind::Moment1)]);
        v_after.store(0, size, v.data(), setup_.optimizer.keep_positive, &report.kinds[static_cast<int>(Kind::Moment2)]);
        report.k_m.insert(report.k_m.end(), s.m.k.begin(), s.m.k.end());
        report.k_v.insert(report.k_v.end(), s.v.k.begin(), s.v.k.end());
    }

    std::pair<void*, size_t> find(const std::string& name) {
        const size_t i = param_of(network_.params, name);
        State& s = states_[i];
        auto bytes_of = [](auto& v) { return std::pair<void*, size_t>(v.data(), v.size() * sizeof(v[0])); };
        const std::string suffix = name.substr(network_.params[i].name.size());
        if (suffix.empty()) return bytes_of(s.weight);
        if (suffix == ".remainder" && setup_.master) return bytes_of(s.remainder);
        if (suffix == ".gradient" && setup_.keep_gradients) return bytes_of(network_.gradients[i]);
        if (suffix == ".m") return bytes_of(s.m.codes);
        if (suffix == ".v") return bytes_of(s.v.codes);
        if (suffix == ".m.max") return bytes_of(s.m.max);
        if (suffix == ".m.k") return bytes_of(s.m.k);
        if (suffix == ".v.max") return bytes_of(s.v.max);
        if (suffix == ".v.k") return bytes_of(s.v.k);
        for (int o = 0; o < OPERANDS; o++) {
            DelayedScale& d = network_.delayed[i][o];
            if (d.history.empty()) continue;
            if (suffix == std::string(OPERAND_NAMES[o]) + ".history") return bytes_of(d.history);
            if (suffix == std::string(OPERAND_NAMES[o]) + ".scale") return {&d.scale, sizeof d.scale};
        }
        throw Error("The model has no tensor " + name + ".");
    }
};

}  // namespace

double loss_in_double(const ModelConfig& c, int64_t B, int64_t T, const std::vector<std::vector<double>>& weights, const int32_t* tokens,
                      const int32_t* targets, std::vector<std::vector<double>>* gradients) {
    Network<double> network({c, find_row(recipes(), "fp32", "--recipe"), find_row(optimizers(), "fp32", "--optimizer"), B, T});
    network.weights = weights;
    const double scale = 1.0 / static_cast<double>(B * T);
    const double loss = network.run(tokens, targets, B, T, gradients ? scale : 0) * scale;
    if (gradients) *gradients = network.gradients;
    return loss;
}

}  // namespace coat::reference

std::unique_ptr<coat::Model> coat::make_reference(const Setup& setup) {
    // A step makes the same temporary tensors again and again: kept by the allocator, they need no fresh pages (a third of the time).
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    mallopt(M_TRIM_THRESHOLD, 2147483647);
    return std::make_unique<reference::Reference>(setup);
}
