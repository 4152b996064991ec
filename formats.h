// formats.h - the words of the paper that the CPU reference and the GPU implementation of COAT (arXiv
// 2410.19313) share: number formats, which elements share a scale, recipes and optimizers.
//
// These words are used in all files:
//   FMAX, FMIN      a format's largest and its smallest positive value
//   code            a stored element: encode() rounds a value to a code, decode() gives the value of a code
//   amax            the largest |x| of some elements
//   scale block     the elements of a matrix that share a scale, rows x cols of them
//   scale           s = amax / FMAX of a scale block. An element x is stored as code = encode(x / s). Its
//                   value is decode(code) * s. (CPU and GPU multiply by 1 / s, rounded to FP32, instead of
//                   dividing by s)
//   group           of activations: a scale block of 1x16, which is 16 neighbouring features of one token.
//                   The word `group` alone never means a moment group
//   moment group    128 consecutive elements of an optimizer moment, or the whole moment of a parameter
//   moment scaling  the numbers (max, k) that are stored for a moment group: max is the amax of the moment
//                   group, and k is the exponent of dynamic range expansion. Without expansion there is no k,
//                   and the scale is max / FMAX
//   micro-batch     the sequences that go through the model together. A step adds up the gradients of one or
//                   more micro-batches
//   heads           of attention: NH query heads and NKV key/value heads
//   the head        where the text is not about attention: the model's last matrix, from hidden states to
//                   logits
//
// All matrices are row-major. The weight of a linear layer is (out, in). Sizes have these letters:
//   B  sequences in a micro-batch         L    transformer layers         F  feed-forward size
//   T  tokens in a sequence               C    hidden size                V  vocabulary size
//   N  tokens in a micro-batch, B * T     NH   query heads                HS  size of a head
//                                         NKV  key/value heads
#pragma once
#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "text.h"

// Marks a function that both the CPU and a GPU's kernels call.
#ifdef __CUDACC__
#define COAT_HD __host__ __device__
#else
#define COAT_HD
#endif

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// Formats. Every format has a sign, an exponent and a mantissa. E4M3 and E5M2 are the FP8 formats of the OCP
// specification, in its saturating mode; E4M3 has no infinity. FP16 is used for moments only.

enum class Format : uint8_t { FP32, BF16, FP16, E4M3, E5M2 };

struct FormatInfo {
    const char* name;               // in flags and print-outs
    const char* safetensors_dtype;  // in safetensors files
    int bytes;                      // of an element
    int mantissa_bits;  // a normal value has a relative rounding error of at most 2^-(mantissa_bits + 1)
    float fmax;         // FMAX, the largest finite value
    float fmin;         // FMIN, the smallest positive value, which is subnormal
};

// The rows have the order of Format.
// clang-format off
inline constexpr FormatInfo FORMATS[] = {
    {.name = "fp32", .safetensors_dtype = "F32", .bytes = 4, .mantissa_bits = 23,
     .fmax = FLT_MAX, .fmin = 0x1p-149f},
    {.name = "bf16", .safetensors_dtype = "BF16", .bytes = 2, .mantissa_bits = 7,
     .fmax = 0x1.fep127f, .fmin = 0x1p-133f},
    {.name = "fp16", .safetensors_dtype = "F16", .bytes = 2, .mantissa_bits = 10,
     .fmax = 65504.0f, .fmin = 0x1p-24f},
    {.name = "e4m3", .safetensors_dtype = "F8_E4M3", .bytes = 1, .mantissa_bits = 3,
     .fmax = 448.0f, .fmin = 0x1p-9f},
    {.name = "e5m2", .safetensors_dtype = "F8_E5M2", .bytes = 1, .mantissa_bits = 2,
     .fmax = 57344.0f, .fmin = 0x1p-16f},
};
// clang-format on

constexpr const FormatInfo& info(Format f) { return FORMATS[static_cast<int>(f)]; }
constexpr bool is_fp8(Format f) { return f == Format::E4M3 || f == Format::E5M2; }
// Whether moments in this format have moment scalings. FP8 and FP16 do: their range is too small for moments
// without a scale.
COAT_HD constexpr bool moments_need_scaling(Format f) { return f != Format::FP32 && f != Format::BF16; }

// -----------------------------------------------------------------------------------------------------------
// Granularity: the size of a matrix's scale blocks, rows x cols elements. The size 0 means all rows or all
// columns. Scale blocks at the end of a row or column may be smaller.

struct Granularity {
    int rows, cols;
    constexpr bool operator==(const Granularity&) const = default;
    // Whether a matrix and its transpose are cut into the same scale blocks: true for a whole tensor and for
    // 128x128, false for a row and for 1x128. With the same scale blocks, they have the same codes.
    constexpr bool transpose_has_same_blocks() const { return rows == cols; }
};
inline constexpr Granularity PER_TENSOR{.rows = 0, .cols = 0};
inline constexpr Granularity PER_ROW{.rows = 1, .cols = 0};
inline constexpr Granularity PER_1x128{.rows = 1, .cols = 128};
inline constexpr Granularity PER_128x128{.rows = 128, .cols = 128};
// The groups of activations (paper, figure 4a).
inline constexpr Granularity PER_1x16{.rows = 1, .cols = 16};

COAT_HD inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// How a matrix is stored: the format of its elements and, in FP8, its scale blocks and the format of the
// scales. The scales of a (rows, cols) matrix form a row-major (scale_rows, scale_cols) matrix. Formats other
// than FP8 have no scales, and the granularity PER_TENSOR.
struct Storage {
    Format format;
    Granularity granularity = PER_TENSOR;
    Format scale_format = Format::FP32;

    constexpr bool operator==(const Storage&) const = default;
    bool fp8() const { return is_fp8(format); }
    int64_t scale_rows(int64_t rows) const { return granularity.rows ? ceil_div(rows, granularity.rows) : 1; }
    int64_t scale_cols(int64_t cols) const { return granularity.cols ? ceil_div(cols, granularity.cols) : 1; }
    int64_t scale_count(int64_t rows, int64_t cols) const {
        return fp8() ? scale_rows(rows) * scale_cols(cols) : 0;
    }
    int64_t bytes_without_scales(int64_t rows, int64_t cols) const {
        return rows * cols * info(format).bytes;
    }
    int64_t bytes(int64_t rows, int64_t cols) const {  // with the scales
        return bytes_without_scales(rows, cols) + scale_count(rows, cols) * info(scale_format).bytes;
    }
    std::string text() const {  // "e4m3 1x16", "e4m3 row", "e5m2 tensor", "bf16"
        const std::string name = info(format).name;
        if (!fp8()) return name;
        if (granularity == PER_TENSOR) return name + " tensor";
        if (granularity == PER_ROW) return name + " row";
        return concat(name, " ", granularity.rows, "x", granularity.cols);
    }
};
// Without scales:
inline constexpr Storage PLAIN_FP32{.format = Format::FP32};
inline constexpr Storage PLAIN_BF16{.format = Format::BF16};
// With scales, by granularity:
inline constexpr Storage E4M3_TENSOR{.format = Format::E4M3};
inline constexpr Storage E5M2_TENSOR{.format = Format::E5M2};
inline constexpr Storage E4M3_1x16{
    .format = Format::E4M3, .granularity = PER_1x16, .scale_format = Format::BF16};
inline constexpr Storage E4M3_ROW{.format = Format::E4M3, .granularity = PER_ROW};
inline constexpr Storage E4M3_1x128{.format = Format::E4M3, .granularity = PER_1x128};
inline constexpr Storage E4M3_128x128{.format = Format::E4M3, .granularity = PER_128x128};

// -----------------------------------------------------------------------------------------------------------
// Recipes: how each kind of tensor is stored (paper, section 5). A recipe is a row of a table. Code asks for
// a column and never for the name of a recipe.
//
// A linear layer has the input x (N, in), the weight w (out, in), and the gradient g (N, out) of its output.
// Each of its three GEMMs sums over another dimension. A sum over columns goes along a row: it is NumPy's
// axis=1. A sum over rows goes along a column: axis=0.
//   fprop  y  = x w^T   over input features:  columns of x, columns of w
//   dgrad  dx = g w     over output features: columns of g, rows of w
//   wgrad  dw = g^T x   over tokens:          rows of g, rows of x
//
// A GEMM adds up products of codes, and multiplies the sum by the scales. So it has to stop wherever a scale
// changes. With groups of 1x16 this would be after every 16 products, and the tensor cores would mostly wait.
// Therefore no GEMM reads groups: scale blocks of its operands are 128 elements long in the direction of the
// sum, or a whole row, or the whole tensor.
//
// The granularities of x, w and g in recipes(), below, are those of a matrix whose columns are summed over. A
// GEMM that sums over rows reads the transpose. In the recipes rowwise and deepseek the transpose may have
// other scale blocks: g_for_wgrad() in reference_model.cpp says more.

// Where the scale of a whole tensor comes from.
//   JustInTime   from the tensor's own amax
//   Delayed      from the largest amax of the last Recipe::history_steps steps. In the first step there is no
//                history: each micro-batch uses the largest amax of the step so far, its own included
enum class Scaling : uint8_t { JustInTime, Delayed };

// Fast accumulation, for fprop, dgrad and wgrad: whether the whole sum of a GEMM stays in the FP8 tensor
// cores of a Hopper GPU. They keep about 14 bits of the sum. Without fast accumulation partial sums are added
// up in FP32, and the GEMM takes longer. The CPU reference always sums in FP32.
using FastAccumulation = std::array<bool, 3>;
inline constexpr FastAccumulation FAST_IN_NO_GEMM{false, false, false};
inline constexpr FastAccumulation FAST_IN_FPROP{true, false, false};
inline constexpr FastAccumulation FAST_IN_ALL_GEMMS{true, true, true};

struct Recipe {
    const char* name;
    // The compute dtype: the format of the residual stream, attention, GEMM outputs and the head. Gradients
    // of weights are in the compute dtype, too, unless more than four are summed (model.h, gradient_format).
    Format compute = Format::BF16;
    // GEMM operands of linear layers: activations, weights, and gradients of outputs.
    Storage x = PLAIN_BF16, w = PLAIN_BF16, g = PLAIN_BF16;
    // How the inputs of norms 1 and 2 and of the activation function are saved for backward. Forward, too,
    // computes with the saved values.
    Storage saved_inputs = PLAIN_BF16;
    // How q, k, v and attention's output are saved for backward: in the compute dtype or in groups. No row of
    // the table sets groups: the flag --attention groups does.
    Storage saved_attention = PLAIN_BF16;
    Scaling scaling = Scaling::JustInTime;  // of x, w and g
    FastAccumulation fast_accumulation = FAST_IN_NO_GEMM;
    const char* default_optimizer = "fp32";  // a row of optimizers()
    int history_steps = 1024;                // the number of steps whose amaxes delayed scaling remembers
    const char* about = "";                  // a line of --help
};

inline const std::vector<Recipe>& recipes() {
    // clang-format off
    static const std::vector<Recipe> table = {
        {.name = "fp32", .compute = Format::FP32, .x = PLAIN_FP32, .w = PLAIN_FP32, .g = PLAIN_FP32,
         .saved_inputs = PLAIN_FP32, .saved_attention = PLAIN_FP32,
         .about = "everything in FP32, to compare the others with"},
        {.name = "bf16",
         .about = "BF16 tensors; GEMMs sum in FP32"},
        {.name = "coat", .x = E4M3_TENSOR, .w = E4M3_TENSOR, .g = E5M2_TENSOR,
         .saved_inputs = E4M3_1x16, .fast_accumulation = FAST_IN_FPROP, .default_optimizer = "coat",
         .about = "FP8 GEMMs, one scale per tensor; saved activations in FP8, one scale per 16 values"},
        {.name = "te", .x = E4M3_TENSOR, .w = E4M3_TENSOR, .g = E5M2_TENSOR, .scaling = Scaling::Delayed,
         .fast_accumulation = FAST_IN_FPROP,
         .about = "FP8 GEMMs, one scale per tensor, taken from earlier steps (TransformerEngine)"},
        {.name = "colossal", .x = E4M3_TENSOR, .w = E4M3_TENSOR, .g = E5M2_TENSOR,
         .fast_accumulation = FAST_IN_ALL_GEMMS,
         .about = "FP8 GEMMs, one scale per tensor; all sums keep about 14 bits on a GPU (Colossal-AI)"},
        {.name = "tensorwise", .x = E4M3_TENSOR, .w = E4M3_TENSOR, .g = E5M2_TENSOR,
         .fast_accumulation = FAST_IN_FPROP,
         .about = "FP8 GEMMs, one scale per tensor (torchao's tensorwise)"},
        // torchao's rowwise also rounds scales up to powers of two, and accumulates fast in all GEMMs.
        {.name = "rowwise", .x = E4M3_ROW, .w = E4M3_ROW, .g = E4M3_ROW,
         .fast_accumulation = FAST_IN_FPROP,
         .about = "FP8 GEMMs, one scale per row, not rounded to powers of two"},
        {.name = "deepseek", .x = E4M3_1x128, .w = E4M3_128x128, .g = E4M3_1x128,
         .about = "FP8 GEMMs, one scale per 1x128 block, of weights per 128x128 (DeepSeek-V3)"},
    };
    // clang-format on
    return table;
}

// The formats of the operands of a linear layer's GEMMs. Hopper's FP8 GEMMs need every dimension to be a
// multiple of 16. If the number of tokens N is not, all linear layers of the run fall back to the compute
// dtype.
struct LinearFormats {
    Storage x, w, g;
    bool fallback;
};
inline LinearFormats linear_formats(const Recipe& r, int64_t N) {
    const Storage plain{.format = r.compute};
    if (N % 16 != 0 && r.x.fp8()) return {.x = plain, .w = plain, .g = plain, .fallback = true};
    return {.x = r.x, .w = r.w, .g = r.g, .fallback = false};
}

// The operands of a linear layer's GEMMs: the input x, the weight w, and the gradient g of the output.
enum class OperandKind : uint8_t { X, W, G };
inline constexpr OperandKind LINEAR_OPERANDS[] = {OperandKind::X, OperandKind::W, OperandKind::G};
inline constexpr int OPERAND_COUNT = static_cast<int>(std::size(LINEAR_OPERANDS));

// How the operand is stored. formats is a Recipe or LinearFormats.
template <class Formats> const Storage& storage_of(const Formats& formats, OperandKind o) {
    if (o == OperandKind::X) return formats.x;
    return o == OperandKind::W ? formats.w : formats.g;
}

// -----------------------------------------------------------------------------------------------------------
// Optimizers: how AdamW's moments are stored between steps (paper, section 4). Moments in FP8 and FP16 have a
// moment scaling for each moment group. A moment group is 128 elements or, in MS-AMP's FP8-LM (arXiv
// 2310.18313), a whole parameter.

inline constexpr int MOMENT_GROUP_SIZE = 128;

// A row of optimizers(): how the moments of AdamW are stored. The optimizer is AdamW in every row.
struct Optimizer {
    const char* name;
    Format m, v;              // of first and of second moments
    bool expansion = false;   // dynamic range expansion of FP8 moments
    bool per_tensor = false;  // the whole parameter is one moment group; else 128 elements are
    const char* about = "";   // a line of --help

    bool uses_expansion(Format f) const { return expansion && is_fp8(f); }
    // The number of moment scalings of n elements of a moment in format f: one for each moment group; 0 if
    // the format is not scaled.
    int64_t moment_group_count(Format f, int64_t n) const {
        if (!moments_need_scaling(f)) return 0;
        return per_tensor ? 1 : ceil_div(n, MOMENT_GROUP_SIZE);
    }
    // Whether m and v are FP8 codes in moment groups of 128: adamw.cu has a kernel for such moments. In every
    // row of the table either both are stored like this, or neither is.
    bool has_fp8_moment_groups() const { return !per_tensor && is_fp8(m) && is_fp8(v); }
};

inline const std::vector<Optimizer>& optimizers() {
    // clang-format off
    static const std::vector<Optimizer> table = {
        {.name = "coat", .m = Format::E4M3, .v = Format::E4M3, .expansion = true,
         .about = "FP8 moments with dynamic range expansion (paper, section 4)"},
        {.name = "coat-e5m2", .m = Format::E4M3, .v = Format::E5M2, .expansion = true,
         .about = "as coat, with second moments in E5M2"},
        {.name = "fp8", .m = Format::E4M3, .v = Format::E4M3,
         .about = "FP8 moments, one scale per moment group of 128, not expanded"},
        {.name = "fp8lm", .m = Format::E4M3, .v = Format::FP16, .per_tensor = true,
         .about = "E4M3 and FP16 moments, one scale per tensor (FP8-LM)"},
        {.name = "bf16", .m = Format::BF16, .v = Format::BF16,
         .about = "BF16 moments"},
        {.name = "fp32", .m = Format::FP32, .v = Format::FP32,
         .about = "FP32 moments"},
    };
    // clang-format on
    return table;
}

// -----------------------------------------------------------------------------------------------------------
// Tables by name

// The row of a table that has this name, or null.
template <class Table> const auto* find_row_or_null(const Table& table, std::string_view name) {
    const auto has_name = [&](const auto& row) { return name == row.name; };
    const auto row = std::find_if(std::begin(table), std::end(table), has_name);
    return row == std::end(table) ? nullptr : &*row;
}

// The row of a table that has this name. An unknown name is an Error that lists the known ones; `flag` is the
// flag that gave it.
template <class Table> const auto& find_row(const Table& table, std::string_view name, const char* flag) {
    if (const auto* row = find_row_or_null(table, name)) return *row;
    std::string known;
    for (const auto& row : table) known += (known.empty() ? "" : ", ") + std::string(row.name);
    throw Error(flag, " ", name, " is not known; choose one of ", known, ".");
}

}  // namespace coat
