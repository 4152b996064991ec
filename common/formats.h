// common/formats.h - the words of the paper (COAT, arXiv 2410.19313) that the CPU reference and the GPU
// implementation share: number formats, which elements share a scale, how a matrix is stored, and what the
// GEMMs of a linear layer sum over.
//
// All files use these words:
//   FMAX, FMIN      a format's largest and its smallest positive value
//   code            a stored element: encode() rounds a value to a code, decode() gives the value of a code
//   amax            the largest |x| of some elements
//   scale block     the elements of a matrix that share a scale, rows x cols of them
//   scale           s = amax / FMAX of a scale block. An element x is stored as code = encode(x / s), and is
//                   read back as decode(code) * s. (Instead of dividing by s, CPU and GPU multiply by 1 / s,
//                   rounded to FP32)
//   group           a scale block of 1x16 in activations: 16 neighbouring features of one token. The word
//                   `group` alone never means a moment group
//   group scaling   the paper's way to find the amax of a whole tensor, in two stages. In spite of its name,
//                   it gives the tensor one scale (compute_amax() in reference/quantize.cpp)
//   moment group    128 consecutive elements of an optimizer moment
//   max, k          what a moment group stores besides its codes: max is its amax, and k is the exponent of
//                   dynamic range expansion. Without expansion there is no k, and the scale is max / FMAX
//   operand         an input of a GEMM. x, w and g, the operands of linear layers, are quantized
//   compute format  BF16, or FP32 in the recipe fp32: what linear layers return, and what attention and the
//                   head compute with. (Residual sums are FP32, and so is what the norms and the activation
//                   function of a layer return)
//   residual stream what goes from layer to layer. Each half of a layer adds its output to it. The sum is
//                   FP32, and its two readers round it: the next sum to the compute format, and a norm to the
//                   format in which the norm's input is saved
//   master          the exact FP32 value of a weight, which updates add to
//   micro-batch     the sequences that go through the model together. A step adds up the gradients of one or
//                   more micro-batches
//   heads           those of attention: NH query heads and NKV key/value heads
//   the head        the model's last matrix, from hidden states to logits, where the text is not about
//                   attention
//
// All matrices are row-major. The weight of a linear layer is (out, in). Sizes have these letters:
//   B  sequences in a micro-batch         L    transformer layers         F  feed-forward size
//   T  tokens in a sequence               C    hidden size                V  vocabulary size
//   N  tokens in a micro-batch, B * T     NH   query heads                HS  size of a head
//                                         NKV  key/value heads
#pragma once
#include <cfloat>
#include <cstdint>
#include <iterator>
#include <string>

#include "text.h"

// Marks a function that both the CPU and a GPU's kernels call.
#ifdef __CUDACC__
#define COAT_HD __host__ __device__
#else
#define COAT_HD
#endif

namespace coat {

struct Range {  // consecutive elements of an array
    int64_t first, count;
};

COAT_HD inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// -----------------------------------------------------------------------------------------------------------
// Formats. Every format has a sign, an exponent and a mantissa. E4M3 and E5M2 are the FP8 formats of the OCP
// specification, in its saturating mode; E4M3 has no infinity.

enum class Format : uint8_t { FP32, BF16, E4M3, E5M2 };

struct FormatInfo {
    const char* name;   // in flags and print-outs
    int bytes;          // of an element
    int mantissa_bits;  // a normal value has a relative rounding error of at most 2^-(mantissa_bits + 1)
    int bias;           // a normal value is 2^(exponent field - bias) (1 + mantissa / 2^mantissa_bits)
    float fmax;         // FMAX, the largest finite value
    float fmin;         // FMIN, the smallest positive value, which is subnormal
};

// FORMATS has a row for each Format, in the same order.
// clang-format off
inline constexpr FormatInfo FORMATS[] = {
    {.name = "fp32", .bytes = 4, .mantissa_bits = 23, .bias = 127, .fmax = FLT_MAX, .fmin = 0x1p-149f},
    {.name = "bf16", .bytes = 2, .mantissa_bits = 7, .bias = 127, .fmax = 0x1.fep127f, .fmin = 0x1p-133f},
    {.name = "e4m3", .bytes = 1, .mantissa_bits = 3, .bias = 7, .fmax = 448.0f, .fmin = 0x1p-9f},
    {.name = "e5m2", .bytes = 1, .mantissa_bits = 2, .bias = 15, .fmax = 57344.0f, .fmin = 0x1p-16f},
};
// clang-format on

constexpr const FormatInfo& format_info(Format f) { return FORMATS[int(f)]; }
COAT_HD constexpr bool is_fp8(Format f) { return f == Format::E4M3 || f == Format::E5M2; }

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

// -----------------------------------------------------------------------------------------------------------
// How a matrix is stored: the format of its elements and, in FP8, its scale blocks and the format of the
// scales. Formats other than FP8 have no scales, and the granularity PER_TENSOR.

struct TensorFormat {
    Format element_format;
    Granularity granularity = PER_TENSOR;
    Format scale_format = Format::FP32;

    constexpr bool operator==(const TensorFormat&) const = default;
    bool is_fp8() const { return coat::is_fp8(element_format); }
    // The scales of a (rows, cols) matrix are a row-major matrix, with one element for each scale block. It
    // has so many rows and columns:
    int64_t rows_of_scales(int64_t rows) const {
        return granularity.rows ? ceil_div(rows, granularity.rows) : 1;
    }
    int64_t cols_of_scales(int64_t cols) const {
        return granularity.cols ? ceil_div(cols, granularity.cols) : 1;
    }
    int64_t scale_count(int64_t rows, int64_t cols) const {
        return is_fp8() ? rows_of_scales(rows) * cols_of_scales(cols) : 0;
    }
    int64_t bytes_without_scales(int64_t rows, int64_t cols) const {
        return rows * cols * format_info(element_format).bytes;
    }
    int64_t bytes(int64_t rows, int64_t cols) const {  // with the scales
        return bytes_without_scales(rows, cols) + scale_count(rows, cols) * format_info(scale_format).bytes;
    }
    std::string text() const {  // "e4m3 1x16", "e4m3 row", "e5m2 tensor", "bf16"
        const std::string name = format_info(element_format).name;
        if (!is_fp8()) return name;
        if (granularity == PER_TENSOR) return name + " tensor";
        if (granularity == PER_ROW) return name + " row";
        return concat(name, " ", granularity.rows, "x", granularity.cols);
    }
};
// Without scales:
inline constexpr TensorFormat PLAIN_FP32{.element_format = Format::FP32};
inline constexpr TensorFormat PLAIN_BF16{.element_format = Format::BF16};
// With scales, by granularity. (The scales of groups are BF16: 2 bytes for 16 codes of 1 byte are 12.5% more
// memory. FP32 scales would be 25%.)
inline constexpr TensorFormat E4M3_PER_TENSOR{.element_format = Format::E4M3};
inline constexpr TensorFormat E5M2_PER_TENSOR{.element_format = Format::E5M2};
inline constexpr TensorFormat E4M3_PER_1x16{
    .element_format = Format::E4M3, .granularity = PER_1x16, .scale_format = Format::BF16};
inline constexpr TensorFormat E4M3_PER_ROW{.element_format = Format::E4M3, .granularity = PER_ROW};
inline constexpr TensorFormat E4M3_PER_1x128{.element_format = Format::E4M3, .granularity = PER_1x128};
inline constexpr TensorFormat E4M3_PER_128x128{.element_format = Format::E4M3, .granularity = PER_128x128};

// -----------------------------------------------------------------------------------------------------------
// The GEMMs of a linear layer
//
// A linear layer has the input x (N, in), the weight w (out, in), and the gradient g (N, out) of its output.
// Each of its three GEMMs sums over a different dimension. In an operand this sum goes along a row (NumPy's
// axis=1) or along a column (axis=0):
//   fprop  y  = x w^T   sums over input features    along rows of x      along rows of w
//   dgrad  dx = g w     sums over output features   along rows of g      along columns of w
//   wgrad  dw = g^T x   sums over tokens            along columns of g   along columns of x
//
// A Hopper GPU's FP8 GEMM wants the dimension that it sums over contiguous in memory. So where the sum goes
// along columns, it reads codes that were stored transposed. All dimensions of an FP8 GEMM are multiples of
// 16 (FP8_GEMM_MULTIPLE).
//
// A GEMM adds up products of codes, and multiplies the sum by the scales. So it has to stop wherever a scale
// changes. With groups of 1x16 it would stop after every 16 products, and the tensor cores would mostly wait.
// Therefore no GEMM reads groups. In the direction of the sum, a scale block of an operand has at least 128
// elements, so the sum stops rarely. The recipes have blocks of 128, whole rows, and the whole tensor (as in
// coat).
//
// (The rest of this comment can wait: with one scale for the whole tensor, as in coat, the direction makes no
// difference.) The granularity of an operand is stated for GEMMs that sum along its rows. If a GEMM sums
// along the columns of an operand, it reads the transpose, and the granularity is that of the transpose. For
// example, x with the granularity 1x128 has these scale blocks:
//   in fprop, which sums along the rows of x (N, in):       128 features of one token
//   in wgrad, which sums along the rows of x^T (in, N):     128 tokens of one feature

inline constexpr int64_t FP8_GEMM_MULTIPLE = 16;

enum class SumAlong : uint8_t { Row, Column };

// The operands of the three GEMMs: input, weight and gradient.
enum class OperandKind : uint8_t { X, W, G };
inline constexpr OperandKind LINEAR_OPERANDS[] = {OperandKind::X, OperandKind::W, OperandKind::G};
inline constexpr int OPERAND_COUNT = int(std::size(LINEAR_OPERANDS));

}  // namespace coat
