// coat.h - the vocabulary of COAT (arXiv 2410.19313) that the CPU reference and the GPU implementation share:
// number formats, granularities, recipes, and formats of moments.
//
// All matrices are row-major; a weight is (out, in).
#pragma once
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "error.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// Formats (the paper's preliminaries). FP8 as in the OCP specification: casts saturate, E4M3 has no infinity.
// FP16 is a format of moments only.

enum class Format : uint8_t { F32, BF16, F16, E4M3, E5M2 };

struct FormatInfo {
    const char* name;         // on the command line and in tables
    const char* safetensors;  // in checkpoints
    int bytes;
    int mantissa;             // mantissa bits: a normal value has a relative error up to 2^-(mantissa+1)
    float max;                // largest finite value: FMAX in the scale s = amax / FMAX
    float min;                // smallest positive value (subnormal)
};

inline constexpr FormatInfo FORMATS[] = {
    {"fp32", "F32",     4, 23, 3.40282347e+38f, 1.40129846e-45f},
    {"bf16", "BF16",    2, 7,  3.38953139e+38f, 9.18354962e-41f},
    {"fp16", "F16",     2, 10, 65504.0f,        0x1p-24f},
    {"e4m3", "F8_E4M3", 1, 3,  448.0f,          0x1p-9f},
    {"e5m2", "F8_E5M2", 1, 2,  57344.0f,        0x1p-16f},
};

constexpr const FormatInfo& info(Format f) { return FORMATS[static_cast<int>(f)]; }
constexpr bool is_fp8(Format f) { return info(f).bytes == 1; }
constexpr bool is_scaled(Format f) { return is_fp8(f) || f == Format::F16; }  // its small range needs a scale

// -----------------------------------------------------------------------------------------------------------
// Granularity: one scale serves a block of rows x cols elements; 0 means all of them (paper section 5).
// Blocks at the end of a row or column may be smaller.

struct Granularity {
    int rows, cols;
    constexpr bool operator==(const Granularity& o) const { return rows == o.rows && cols == o.cols; }
    constexpr bool symmetric() const { return rows == cols; }  // the same for the transpose
};
inline constexpr Granularity PER_TENSOR{0, 0};
inline constexpr Granularity PER_ROW{1, 0}, PER_1x128{1, 128}, PER_128x128{128, 128};  // GEMM operands
inline constexpr Granularity PER_GROUP{1, 16};  // along the hidden dimension, within a token (figure 4a)

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// How one kind of tensor is stored: its format, the block that shares a scale, and the format of the scales.
struct Quant {
    Format format;
    Granularity granularity = PER_TENSOR;
    Format scale_format = Format::F32;

    constexpr bool operator==(const Quant& o) const {
        return format == o.format && granularity == o.granularity && scale_format == o.scale_format;
    }
    bool fp8() const { return is_fp8(format); }
    // The scales of a (rows, cols) tensor form a (scale_rows, scale_cols) matrix.
    int64_t scale_rows(int64_t rows) const { return granularity.rows ? ceil_div(rows, granularity.rows) : 1; }
    int64_t scale_cols(int64_t cols) const { return granularity.cols ? ceil_div(cols, granularity.cols) : 1; }
    int64_t scales(int64_t rows, int64_t cols) const {
        return fp8() ? scale_rows(rows) * scale_cols(cols) : 0;
    }
    int64_t code_bytes(int64_t rows, int64_t cols) const { return rows * cols * info(format).bytes; }
    int64_t bytes(int64_t rows, int64_t cols) const {
        return code_bytes(rows, cols) + scales(rows, cols) * info(scale_format).bytes;
    }
    // The scales of a GEMM operand as Hopper reads them: rows of 128x128 scales are padded to a multiple of
    // 4, which scales() does not count. A per-tensor scale is stored elsewhere.
    int64_t operand_scales(int64_t rows, int64_t cols) const {
        if (!fp8() || granularity == PER_TENSOR) return 0;
        const int64_t across = scale_cols(cols);
        return scale_rows(rows) * (granularity == PER_128x128 ? round_up(across, 4) : across);
    }
    int64_t operand_bytes(int64_t rows, int64_t cols) const {
        return code_bytes(rows, cols) + operand_scales(rows, cols) * info(scale_format).bytes;
    }
    std::string text() const {  // "e4m3 1x16", "e4m3 row", "e5m2 tensor", "bf16"
        if (!fp8()) return info(format).name;
        auto side = [](int n) { return n ? std::to_string(n) : std::string("all"); };
        const std::string sides = side(granularity.rows) + "x" + side(granularity.cols);
        const bool tensor = granularity == PER_TENSOR, row = granularity == PER_ROW;
        const bool usual = scale_format == (granularity == PER_GROUP ? Format::BF16 : Format::F32);
        return info(format).name + (" " + (tensor ? "tensor" : row ? "row" : sides)) +
               (usual ? "" : concat(" with ", info(scale_format).name, " scales"));
    }
};

// -----------------------------------------------------------------------------------------------------------
// Recipes: which format and granularity each kind of tensor has. A recipe is a row of a table: code asks for
// a column, never for a recipe's name. plan.cpp rejects on every device what Hopper's GEMMs cannot do
// (validate), and on a GPU what GPUs lack (why_unsupported).
//
// Each GEMM of a linear layer (input x, weight w, gradient g of the output) reduces over another dimension:
//   fprop  y = x w^T    over input features:  columns of x, columns of w
//   dgrad  dx = g w     over output features: columns of g, rows of w
//   wgrad  dw = g^T x   over tokens:          rows of g, rows of x
// A scale may vary along the reduction only in whole blocks. So the columns of a granularity run along the
// reduction, and an operand that is reduced over its rows is transposed before it is quantized. For example
// with 1x128, 128 features of a token share a scale of x in fprop, and 128 tokens in wgrad: x is quantized
// twice. Per-tensor and 128x128 scales are the same for a matrix and its transpose.

enum class Scaling : uint8_t { JustInTime, Delayed };  // from the tensor's own amax, or from earlier ones

// Hopper's FP8 tensor cores accumulate in about 14 bits. Exact accumulation moves the sums to FP32 at
// intervals, which takes longer.
struct Accumulation {
    bool fast[3];  // of fprop, dgrad and wgrad
};

struct Recipe {
    const char* name;
    Format compute;       // compute dtype: residual stream, attention, GEMM outputs, head; also gradients of
                          // weights, unless many are summed (model.h, gradient_format)
    Quant x, w, g;        // GEMM operands: activations, weights, gradients of outputs
    Quant nonlinear;      // inputs of norms 1 and 2 and of activations, as they are saved for backward
    Quant attention;      // q, k, v and the output of attention, also saved: the compute dtype, or groups
    Scaling scaling;      // of x, w and g
    Accumulation sums;    // precision of the sums in its FP8 GEMMs
    const char* about;
    const char* optimizer = "fp32";  // the row of optimizers() that is the default
    // Norms and activation functions read `nonlinear` tensors. Backward reads the groups that were saved. The
    // forward pass reads the same groups, as in the paper, or the values that they were made of (coat-saved):
    // then the operand x of wgrad differs a little from that of fprop (dev/WALK.md).
    bool forward_reads_groups = true;
    // Delayed scaling: steps in the history of amaxes; the scale is multiplied by 2^margin, as headroom.
    int history = 1024, margin = 0;
};

inline constexpr Quant Q_F32{Format::F32}, Q_BF16{Format::BF16};
inline constexpr Quant Q_E4M3{Format::E4M3}, Q_E5M2{Format::E5M2};
inline constexpr Quant Q_GROUP{Format::E4M3, PER_GROUP, Format::BF16};
inline constexpr Quant Q_ROW{Format::E4M3, PER_ROW};
inline constexpr Quant Q_1x128{Format::E4M3, PER_1x128}, Q_128x128{Format::E4M3, PER_128x128};

inline const std::vector<Recipe>& recipes() {
    constexpr Scaling JIT = Scaling::JustInTime, DELAYED = Scaling::Delayed;
    constexpr Accumulation FORWARD{{true, false, false}}, EXACT{}, FAST{{true, true, true}};
    static const std::vector<Recipe> table = {
        // name, compute dtype, x, w, g, nonlinear, attention, scaling, sums, about, optimizer,
        // forward_reads_groups
        {"fp32", Format::F32, Q_F32, Q_F32, Q_F32, Q_F32, Q_F32, JIT, EXACT,
         "everything in FP32, to compare the others with"},
        {"bf16", Format::BF16, Q_BF16, Q_BF16, Q_BF16, Q_BF16, Q_BF16, JIT, EXACT,
         "BF16 tensors, FP32 accumulation"},
        {"coat", Format::BF16, Q_E4M3, Q_E4M3, Q_E5M2, Q_GROUP, Q_BF16, JIT, FORWARD,
         "mixed-granularity FP8 flow: per-tensor GEMMs, 1x16 groups elsewhere (paper section 5)", "coat"},
        {"coat-saved", Format::BF16, Q_E4M3, Q_E4M3, Q_E4M3, Q_GROUP, Q_BF16, JIT, FORWARD,
         "coat with E4M3 gradients, and with groups that only backward reads", "coat", false},
        {"te", Format::BF16, Q_E4M3, Q_E4M3, Q_E5M2, Q_BF16, Q_BF16, DELAYED, FORWARD,
         "FP8 GEMMs with delayed per-tensor scaling (TransformerEngine)"},
        {"colossal", Format::BF16, Q_E4M3, Q_E4M3, Q_E5M2, Q_BF16, Q_BF16, JIT, FAST,
         "FP8 GEMMs with just-in-time per-tensor scaling and fast accumulation (Colossal-AI)"},
        {"tensorwise", Format::BF16, Q_E4M3, Q_E4M3, Q_E5M2, Q_BF16, Q_BF16, JIT, FORWARD,
         "FP8 GEMMs with just-in-time per-tensor scaling (torchao's tensorwise)"},
        // torchao's rowwise also rounds scales up to powers of two, and accumulates fast in all GEMMs.
        {"rowwise", Format::BF16, Q_ROW, Q_ROW, Q_ROW, Q_BF16, Q_BF16, JIT, FORWARD,
         "FP8 GEMMs with just-in-time per-row scaling, not rounded to powers of two"},
        {"deepseek", Format::BF16, Q_1x128, Q_128x128, Q_1x128, Q_BF16, Q_BF16, JIT, EXACT,
         "FP8 GEMMs with 1x128 scales of x and g and 128x128 scales of w (DeepSeek-V3)"},
    };
    return table;
}

// The optimizer's moments (paper section 4). FP8 moments have one scale for a group of 128 consecutive
// elements, or one for the tensor (MS-AMP's FP8-LM, arXiv 2310.18313).
inline constexpr int MOMENT_GROUP = 128;

struct OptimizerFormat {
    const char* name;
    Format m, v;
    bool expand;  // dynamic range expansion, for FP8 moments
    const char* about;
    int64_t group = MOMENT_GROUP;  // elements that share a scale; 0: all of the tensor
    bool keep_positive = true;     // no positive second moment is rounded to zero

    bool expands(Format f) const { return expand && is_fp8(f); }
    int64_t scales(Format f, int64_t n) const {  // of n elements
        return !is_scaled(f) ? 0 : group ? ceil_div(n, group) : 1;
    }
};

inline const std::vector<OptimizerFormat>& optimizers() {
    static const std::vector<OptimizerFormat> table = {
        {"coat", Format::E4M3, Format::E4M3, true, "FP8 moments with dynamic range expansion"},
        {"coat-e5m2", Format::E4M3, Format::E5M2, true, "the same with second moments in E5M2"},
        {"fp8", Format::E4M3, Format::E4M3, false, "FP8 moments with per-group scaling, no expansion"},
        {"fp8lm", Format::E4M3, Format::F16, false, "E4M3 and FP16 moments with per-tensor scaling (FP8-LM)",
         0, false},
        {"bf16", Format::BF16, Format::BF16, false, "BF16 moments"},
        {"fp32", Format::F32, Format::F32, false, "FP32 moments"},
    };
    return table;
}

// The row of a table that has this name; an Error lists the names.
template <class Table>
const auto& find_row(const Table& table, std::string_view name, const char* flag) {
    std::string known;
    for (const auto& row : table) {
        if (name == row.name) return row;
        known += (known.empty() ? "" : ", ") + std::string(row.name);
    }
    throw Error(flag + (" " + escaped(std::string(name))) + " is not known; choose one of " + known + ".");
}

// -----------------------------------------------------------------------------------------------------------
// Quantization error, by kind of tensor.

struct QuantStats {
    double signal = 0, noise = 0;  // sums of x^2 and of (x - dequantized x)^2
    int64_t elements = 0;
    int64_t saturated = 0;  // |x| clearly above the largest value of the format times the scale
    int64_t flushed = 0;    // x was not zero and became zero
    double snr_db() const { return 10 * std::log10(signal / noise); }  // signal-to-quantization-noise ratio
    QuantStats& operator+=(const QuantStats& o) {
        signal += o.signal, noise += o.noise;
        elements += o.elements, saturated += o.saturated, flushed += o.flushed;
        return *this;
    }
};

enum class Kind : uint8_t {
    NormInput, Attention, ActivationInput, LinearInput, Weight, Gradient, Moment1, Moment2, Count
};
inline constexpr const char* KIND_NAMES[] = {
    "norm inputs", "q, k, v, output", "activation inputs", "linear inputs",
    "weights", "gradients", "first moments", "second moments"};

struct QuantReport {
    QuantStats kinds[static_cast<int>(Kind::Count)];
    std::vector<float> k_m, k_v;  // expansion factors of all groups, sorted
};

}  // namespace coat
