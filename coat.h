// coat.h - the vocabulary that the CPU reference and the GPU implementation of COAT (arXiv 2410.19313) share.
// The first half is number formats, what shares a scale, recipes, optimizers and quantization errors: the
// words of the paper. The second half, from the line "Models" on, is the shapes of models, the tensors that
// a transformer layer saves for backward, and the parameters.
//
// clang-format off
// These words are used in all files:
//   FMAX, FMIN      a format's largest and its smallest positive value
//   code            a stored element: encode() rounds a value to a code, decode() gives the value of a code
//   amax            the largest |x| of some elements
//   scale block     the elements of a matrix that share a scale, rows x cols of them
//   scale           s = amax / FMAX of a scale block. An element x is stored as code = encode(x / s), and its
//                   value is decode(code) s
//   group           of activations: a scale block of 1x16, which is 16 neighbouring features of one token
//   moment group    128 consecutive elements of an optimizer moment, or the whole moment of a parameter
//   moment scaling  (max, k), which a moment group has in place of a scale: max is its amax, and k is the
//                   exponent of dynamic range expansion. Without expansion the scale is max / FMAX
// clang-format on
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
#include <string>
#include <string_view>
#include <vector>

#include "text.h"

// Before a function that both the CPU and a GPU's kernels call.
#ifdef __CUDACC__
#define COAT_HD __host__ __device__
#else
#define COAT_HD
#endif

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// Formats. Every format has a sign, an exponent and a mantissa. FP8 is that of the OCP specification: casts
// saturate, and E4M3 has no infinity. FP16 is used for moments only.

enum class Format : uint8_t { FP32, BF16, FP16, E4M3, E5M2 };

struct FormatInfo {
    const char* name;         // in flags and print-outs
    const char* safetensors;  // in safetensors files
    int bytes;                // of an element
    int mantissa;  // bits: a normal value has a relative rounding error of at most 2^-(mantissa + 1)
    float max;     // FMAX, the largest finite value
    float min;     // FMIN, the smallest positive value, which is subnormal
};

// The rows have the order of Format.
// clang-format off
inline constexpr FormatInfo FORMATS[] = {
    {.name = "fp32", .safetensors = "F32", .bytes = 4, .mantissa = 23, .max = FLT_MAX, .min = 0x1p-149f},
    {.name = "bf16", .safetensors = "BF16", .bytes = 2, .mantissa = 7, .max = 0x1.fep127f, .min = 0x1p-133f},
    {.name = "fp16", .safetensors = "F16", .bytes = 2, .mantissa = 10, .max = 65504.0f, .min = 0x1p-24f},
    {.name = "e4m3", .safetensors = "F8_E4M3", .bytes = 1, .mantissa = 3, .max = 448.0f, .min = 0x1p-9f},
    {.name = "e5m2", .safetensors = "F8_E5M2", .bytes = 1, .mantissa = 2, .max = 57344.0f, .min = 0x1p-16f},
};
// clang-format on

constexpr const FormatInfo& info(Format f) { return FORMATS[static_cast<int>(f)]; }
constexpr bool is_fp8(Format f) { return f == Format::E4M3 || f == Format::E5M2; }
// Whether moments in this format have moment scalings. Unscaled moments would not fit the range of FP8 and
// FP16.
constexpr bool moments_need_scaling(Format f) { return f != Format::FP32 && f != Format::BF16; }

// -----------------------------------------------------------------------------------------------------------
// Granularity: the size of a matrix's scale blocks, rows x cols elements. The size 0 means all rows or all
// columns. Scale blocks at the end of a row or column may be smaller.

struct Granularity {
    int rows, cols;
    constexpr bool operator==(const Granularity&) const = default;
    // Whether the transpose of a matrix has the same scale blocks.
    constexpr bool symmetric() const { return rows == cols; }
};
inline constexpr Granularity PER_TENSOR{.rows = 0, .cols = 0};
inline constexpr Granularity PER_ROW{.rows = 1, .cols = 0};
inline constexpr Granularity PER_1x128{.rows = 1, .cols = 128};
inline constexpr Granularity PER_128x128{.rows = 128, .cols = 128};
// The paper's groups (figure 4a).
inline constexpr Granularity PER_GROUP{.rows = 1, .cols = 16};

COAT_HD inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// How a matrix is stored: the format of its elements and, in FP8, its scale blocks and the format of the
// scales. The scales of a (rows, cols) matrix form a row-major (scale_rows, scale_cols) matrix.
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
    int64_t code_bytes(int64_t rows, int64_t cols) const { return rows * cols * info(format).bytes; }
    int64_t bytes(int64_t rows, int64_t cols) const {  // of the codes and the scales
        return code_bytes(rows, cols) + scale_count(rows, cols) * info(scale_format).bytes;
    }
    // The scales in memory of a GPU's GEMM operand. A per-tensor scale lies elsewhere, beside its amax.
    // Hopper reads rows of 128x128 scales that are padded to a multiple of 4.
    int64_t operand_scale_count(int64_t rows, int64_t cols) const {
        if (!fp8() || granularity == PER_TENSOR) return 0;
        return scale_rows(rows) * round_up(scale_cols(cols), granularity == PER_128x128 ? 4 : 1);
    }
    int64_t operand_bytes(int64_t rows, int64_t cols) const {
        return code_bytes(rows, cols) + operand_scale_count(rows, cols) * info(scale_format).bytes;
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
inline constexpr Storage FP32{.format = Format::FP32};
inline constexpr Storage BF16{.format = Format::BF16};
// With scales, by granularity:
inline constexpr Storage E4M3_TENSOR{.format = Format::E4M3};
inline constexpr Storage E5M2_TENSOR{.format = Format::E5M2};
inline constexpr Storage E4M3_GROUP{
    .format = Format::E4M3, .granularity = PER_GROUP, .scale_format = Format::BF16};
inline constexpr Storage E4M3_ROW{.format = Format::E4M3, .granularity = PER_ROW};
inline constexpr Storage E4M3_1x128{.format = Format::E4M3, .granularity = PER_1x128};
inline constexpr Storage E4M3_128x128{.format = Format::E4M3, .granularity = PER_128x128};

// -----------------------------------------------------------------------------------------------------------
// Recipes: how each kind of tensor is stored (section 5). A recipe is a row of a table. Code asks for a
// column and never for the name of a recipe.
//
// A linear layer has the input x (N, in), the weight w (out, in), and the gradient g (N, out) of its output.
// Each of its three GEMMs reduces over another dimension:
//   fprop  y = x w^T    over input features:  columns of x, columns of w
//   dgrad  dx = g w     over output features: columns of g, rows of w
//   wgrad  dw = g^T x   over tokens:          rows of g, rows of x
// A GEMM multiplies codes. It sums the products of one scale block along the reduction, and multiplies this
// sum by the scales. So scale blocks must be long along the reduction.
// In this table, Granularity is written for the matrix as the GEMM reads it: cols runs along the reduction.
// x (N, in) is read as x by fprop and as x^T by wgrad. With 1x128 blocks these are different blocks, so x is
// quantized twice. With per-tensor or 128x128 blocks they are the same: once.

// Just-in-time scales come from the tensor's own amax, delayed scales from the amaxes of earlier steps.
enum class Scaling : uint8_t { JustInTime, Delayed };

// For fprop, dgrad and wgrad: whether the GEMM accumulates in Hopper's FP8 tensor cores, which keep about 14
// bits. Otherwise the sums move to FP32 at intervals, which takes longer.
using FastAccumulation = std::array<bool, 3>;
inline constexpr FastAccumulation IN_NO_GEMM{false, false, false};
inline constexpr FastAccumulation IN_FPROP{true, false, false};
inline constexpr FastAccumulation IN_ALL_GEMMS{true, true, true};

struct Recipe {
    const char* name;
    // The compute dtype: that of the residual stream, attention, GEMM outputs and the head. Gradients of
    // weights have it too, unless many are summed (model.h, gradient_format).
    Format compute = Format::BF16;
    // GEMM operands of linear layers: activations, weights, and gradients of outputs.
    Storage x = BF16, w = BF16, g = BF16;
    // The inputs of norms 1 and 2 and of the activation function, as they are saved for backward.
    Storage nonlinear = BF16;
    // q, k, v and attention's output, as they are saved: in the compute dtype or in groups. No row of the
    // table sets groups: the flag --attention groups does.
    Storage attention = BF16;
    Scaling scaling = Scaling::JustInTime;  // of x, w and g
    FastAccumulation fast_accumulation = IN_NO_GEMM;
    const char* optimizer = "fp32";  // the row of optimizers() that is the default
    // Whether forward computes with the saved groups of `nonlinear` tensors, as in the paper. If not
    // (coat-saved), forward uses the values before they were quantized. Backward uses the groups in both
    // cases: so in coat-saved the x of fprop and the x of wgrad differ a little.
    bool forward_reads_groups = true;
    int history = 1024;      // steps whose amaxes delayed scaling remembers
    const char* about = "";  // a line of --help
};

inline const std::vector<Recipe>& recipes() {
    // clang-format off
    static const std::vector<Recipe> table = {
        {.name = "fp32", .compute = Format::FP32, .x = FP32, .w = FP32, .g = FP32,
         .nonlinear = FP32, .attention = FP32,
         .about = "everything in FP32, to compare the others with"},
        {.name = "bf16",
         .about = "BF16 tensors; GEMMs sum in FP32"},
        {.name = "coat", .x = E4M3_TENSOR, .w = E4M3_TENSOR, .g = E5M2_TENSOR, .nonlinear = E4M3_GROUP,
         .fast_accumulation = IN_FPROP, .optimizer = "coat",
         .about = "FP8 GEMMs, one scale per tensor; saved activations in FP8, one scale per 16 values"},
        {.name = "coat-saved", .x = E4M3_TENSOR, .w = E4M3_TENSOR, .g = E4M3_TENSOR, .nonlinear = E4M3_GROUP,
         .fast_accumulation = IN_FPROP, .optimizer = "coat", .forward_reads_groups = false,
         .about = "as coat, with E4M3 gradients; only backward reads the saved FP8 activations"},
        {.name = "te", .x = E4M3_TENSOR, .w = E4M3_TENSOR, .g = E5M2_TENSOR, .scaling = Scaling::Delayed,
         .fast_accumulation = IN_FPROP,
         .about = "FP8 GEMMs, one scale per tensor, taken from earlier steps (TransformerEngine)"},
        {.name = "colossal", .x = E4M3_TENSOR, .w = E4M3_TENSOR, .g = E5M2_TENSOR,
         .fast_accumulation = IN_ALL_GEMMS,
         .about = "FP8 GEMMs, one scale per tensor; all sums keep about 14 bits on a GPU (Colossal-AI)"},
        {.name = "tensorwise", .x = E4M3_TENSOR, .w = E4M3_TENSOR, .g = E5M2_TENSOR,
         .fast_accumulation = IN_FPROP,
         .about = "FP8 GEMMs, one scale per tensor (torchao's tensorwise)"},
        // torchao's rowwise also rounds scales up to powers of two, and accumulates fast in all GEMMs.
        {.name = "rowwise", .x = E4M3_ROW, .w = E4M3_ROW, .g = E4M3_ROW,
         .fast_accumulation = IN_FPROP,
         .about = "FP8 GEMMs, one scale per row, not rounded to powers of two"},
        {.name = "deepseek", .x = E4M3_1x128, .w = E4M3_128x128, .g = E4M3_1x128,
         .about = "FP8 GEMMs, one scale per 1x128 block, of weights per 128x128 (DeepSeek-V3)"},
    };
    // clang-format on
    return table;
}

// The formats of the operands of a linear layer's GEMMs. Hopper's FP8 GEMMs need every dimension to be a
// multiple of 16. If the N tokens of a micro-batch are not, all linear layers of the run fall back to the
// compute dtype.
struct LinearFormats {
    Storage x, w, g;
    bool fallback;
};
inline LinearFormats linear_formats(const Recipe& r, int64_t N) {
    const Storage plain{.format = r.compute};
    if (N % 16 != 0 && r.x.fp8()) return {.x = plain, .w = plain, .g = plain, .fallback = true};
    return {.x = r.x, .w = r.w, .g = r.g, .fallback = false};
}

// -----------------------------------------------------------------------------------------------------------
// Optimizers: how AdamW's moments are stored between steps (section 4). Moments in FP8 and FP16 have a moment
// scaling for each moment group: for 128 elements, or for the whole parameter (MS-AMP's FP8-LM, arXiv
// 2310.18313).

inline constexpr int MOMENT_GROUP = 128;

// The number of moment groups, and so of moment scalings, of n elements of a moment in format f. A format
// that is not scaled has none.
constexpr int64_t moment_group_count(Format f, bool per_tensor, int64_t n) {
    if (!moments_need_scaling(f)) return 0;
    return per_tensor ? 1 : ceil_div(n, MOMENT_GROUP);
}

struct OptimizerFormat {
    const char* name;
    Format m, v;              // of first and of second moments
    bool expansion = false;   // dynamic range expansion of FP8 moments
    bool per_tensor = false;  // the whole parameter is one moment group; else 128 elements are
    const char* about = "";   // a line of --help

    bool uses_expansion(Format f) const { return expansion && is_fp8(f); }
    int64_t moment_group_count(Format f, int64_t n) const {
        return coat::moment_group_count(f, per_tensor, n);
    }
    // Whether m and v are FP8 codes in moment groups of 128, for which adamw.cu has a kernel. In every row of
    // the table both are, or neither.
    bool fp8_moment_groups() const { return !per_tensor && is_fp8(m) && is_fp8(v); }
};

inline const std::vector<OptimizerFormat>& optimizers() {
    // clang-format off
    static const std::vector<OptimizerFormat> table = {
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

// The row of a table that has this name. An unknown name is an Error that lists the known ones; `flag` is the
// flag that gave it.
template <class Table> const auto& find_row(const Table& table, std::string_view name, const char* flag) {
    std::string known;
    for (const auto& row : table) {
        if (name == row.name) return row;
        known += (known.empty() ? "" : ", ") + std::string(row.name);
    }
    throw Error(flag, " ", name, " is not known; choose one of ", known, ".");
}

// -----------------------------------------------------------------------------------------------------------
// Quantization errors, by kind of tensor.

struct QuantStats {
    double signal = 0, noise = 0;  // sums of x^2 and of (x - dequantized x)^2
    int64_t elements = 0;
    int64_t saturated = 0;  // elements with |x| clearly above the largest value of the format times the scale
    int64_t flushed = 0;    // elements that were not zero and became zero

    double snr_db() const { return 10 * std::log10(signal / noise); }  // signal-to-noise ratio in dB
    QuantStats& operator+=(const QuantStats& o) {
        signal += o.signal;
        noise += o.noise;
        elements += o.elements;
        saturated += o.saturated;
        flushed += o.flushed;
        return *this;
    }
};

// clang-format off
// Attention: the four tensors that Recipe::attention is the format of.
enum class ReportKind : uint8_t {
    NormInput, Attention, ActivationInput, LinearInput, Weight, Gradient, Moment1, Moment2, Count
};
inline constexpr const char* REPORT_KIND_NAMES[] = {
    "norm inputs", "q, k, v, output", "activation inputs", "linear inputs",
    "weights", "gradients", "first moments", "second moments"};
// clang-format on

struct QuantReport {
    QuantStats kinds[static_cast<int>(ReportKind::Count)];
    std::vector<float> k_m, k_v;   // k of all moment scalings, of the first and of the second moments
    bool part_of_moments = false;  // of large parameters, only a part of the moments was measured
};

// ===========================================================================================================
// Models
//
// The words of the paper end here. What follows are the models that it is applied to.

struct Architecture {
    const char* name;       // Hugging Face's model_type
    const char* causal_lm;  // its class in transformers
    bool rms = false;       // norms are RMSNorm; else LayerNorm with a bias
    bool rope = false;      // positions are rotations of q and k (RoPE); else learned vectors
    bool gated = false;     // the activation function is SiLU(gate) * up; else GELU in its tanh form
    bool qkv_bias = false;  // the linear layer of q, k and v has a bias
    bool bias = false;      // the other linear layers have one
    bool qk_norm = false;   // each head of q and of k passes an RMSNorm before RoPE
};
// clang-format off
inline constexpr Architecture LLAMA{
    .name = "llama", .causal_lm = "LlamaForCausalLM", .rms = true, .rope = true, .gated = true};
inline constexpr Architecture MISTRAL{
    .name = "mistral", .causal_lm = "MistralForCausalLM", .rms = true, .rope = true, .gated = true};
inline constexpr Architecture QWEN2{
    .name = "qwen2", .causal_lm = "Qwen2ForCausalLM", .rms = true, .rope = true, .gated = true,
    .qkv_bias = true};
inline constexpr Architecture QWEN3{
    .name = "qwen3", .causal_lm = "Qwen3ForCausalLM", .rms = true, .rope = true, .gated = true,
    .qk_norm = true};
inline constexpr Architecture GPT2{
    .name = "gpt2", .causal_lm = "GPT2LMHeadModel", .qkv_bias = true, .bias = true};
// clang-format on

// RoPE rotates pair i of a head at position t by the angle t f_i, with f_i = theta^(-2i / HS). A model may
// scale f_i, so that it can read longer texts than those of its first training. Names are from config.json.
struct RopeScaling {
    // Llama3 counts the rotations of pair i in the original positions. With fewer than low_freq_factor, f_i
    // is divided by the factor. With more than high_freq_factor it stays. Between, it is interpolated.
    enum Type : uint8_t { Default, Llama3 } type = Default;
    float factor = 1, low_freq_factor = 1, high_freq_factor = 4;
    int64_t original_positions = 8192;
};

struct ModelConfig {
    std::string name;
    Architecture arch;
    int64_t L, C, NH, NKV, F;
    int64_t V;      // 0 in models(): as many as the data has
    int64_t max_T;  // positions
    bool tied;      // the head is the embedding
    float norm_eps = 1e-5f, rope_theta = 10000.0f;
    int64_t head_size = 0;  // 0: C / NH
    RopeScaling rope_scaling{};
    int64_t window = 0;  // a token attends to the last `window` positions; 0: to all before it

    int64_t HS() const { return head_size ? head_size : C / NH; }
    int64_t q_cols() const { return NH * HS(); }
    int64_t kv_cols() const { return NKV * HS(); }
    int64_t qkv_cols() const { return q_cols() + 2 * kv_cols(); }    // [q | k | v], each head by head
    int64_t gate_up_cols() const { return arch.gated ? 2 * F : F; }  // [gate | up], or the input of GELU
    int64_t padded_V() const { return round_up(V, 64); }  // rows of the embedding; those from V on stay zero
    // In tokens. A window limits it, because attention within a window is not implemented.
    int64_t longest_sequence() const { return window ? std::min(window, max_T) : max_T; }
};

inline const std::vector<ModelConfig>& models() {
    constexpr RopeScaling LLAMA3_BY_8{.type = RopeScaling::Llama3, .factor = 8};
    constexpr RopeScaling LLAMA3_BY_32{.type = RopeScaling::Llama3, .factor = 32};
    // clang-format off
    static const std::vector<ModelConfig> table = {
        {.name = "llama-tiny", .arch = LLAMA, .L = 4, .C = 128, .NH = 4, .NKV = 2, .F = 352,
         .V = 0, .max_T = 256, .tied = true},
        {.name = "gpt2-tiny", .arch = GPT2, .L = 4, .C = 128, .NH = 4, .NKV = 4, .F = 512,
         .V = 0, .max_T = 256, .tied = true},
        {.name = "llama-30m", .arch = LLAMA, .L = 8, .C = 512, .NH = 8, .NKV = 4, .F = 1408,
         .V = 0, .max_T = 1024, .tied = true},
        {.name = "gpt2", .arch = GPT2, .L = 12, .C = 768, .NH = 12, .NKV = 12, .F = 3072,
         .V = 50257, .max_T = 1024, .tied = true},
        {.name = "gpt2-medium", .arch = GPT2, .L = 24, .C = 1024, .NH = 16, .NKV = 16, .F = 4096,
         .V = 50257, .max_T = 1024, .tied = true},
        {.name = "gpt2-large", .arch = GPT2, .L = 36, .C = 1280, .NH = 20, .NKV = 20, .F = 5120,
         .V = 50257, .max_T = 1024, .tied = true},
        {.name = "gpt2-xl", .arch = GPT2, .L = 48, .C = 1600, .NH = 25, .NKV = 25, .F = 6400,
         .V = 50257, .max_T = 1024, .tied = true},
        {.name = "tinyllama-1.1b", .arch = LLAMA, .L = 22, .C = 2048, .NH = 32, .NKV = 4, .F = 5632,
         .V = 32000, .max_T = 2048, .tied = false},
        {.name = "llama-2-7b", .arch = LLAMA, .L = 32, .C = 4096, .NH = 32, .NKV = 32, .F = 11008,
         .V = 32000, .max_T = 4096, .tied = false},
        {.name = "llama-2-13b", .arch = LLAMA, .L = 40, .C = 5120, .NH = 40, .NKV = 40, .F = 13824,
         .V = 32000, .max_T = 4096, .tied = false},
        {.name = "llama-3-8b", .arch = LLAMA, .L = 32, .C = 4096, .NH = 32, .NKV = 8, .F = 14336,
         .V = 128256, .max_T = 8192, .tied = false, .rope_theta = 5e5f},
        {.name = "llama-30b", .arch = LLAMA, .L = 60, .C = 6656, .NH = 52, .NKV = 52, .F = 17920,
         .V = 32000, .max_T = 2048, .tied = false},
        {.name = "llama-3.2-1b", .arch = LLAMA, .L = 16, .C = 2048, .NH = 32, .NKV = 8, .F = 8192,
         .V = 128256, .max_T = 131072, .tied = true, .rope_theta = 5e5f, .rope_scaling = LLAMA3_BY_32},
        {.name = "llama-3.2-3b", .arch = LLAMA, .L = 28, .C = 3072, .NH = 24, .NKV = 8, .F = 8192,
         .V = 128256, .max_T = 131072, .tied = true, .rope_theta = 5e5f, .rope_scaling = LLAMA3_BY_32},
        {.name = "llama-3.1-8b", .arch = LLAMA, .L = 32, .C = 4096, .NH = 32, .NKV = 8, .F = 14336,
         .V = 128256, .max_T = 131072, .tied = false, .rope_theta = 5e5f, .rope_scaling = LLAMA3_BY_8},
        {.name = "mistral-7b", .arch = MISTRAL, .L = 32, .C = 4096, .NH = 32, .NKV = 8, .F = 14336,
         .V = 32768, .max_T = 32768, .tied = false, .rope_theta = 1e6f},  // v0.3
        {.name = "qwen2.5-0.5b", .arch = QWEN2, .L = 24, .C = 896, .NH = 14, .NKV = 2, .F = 4864,
         .V = 151936, .max_T = 32768, .tied = true, .norm_eps = 1e-6f, .rope_theta = 1e6f},
        {.name = "qwen2.5-7b", .arch = QWEN2, .L = 28, .C = 3584, .NH = 28, .NKV = 4, .F = 18944,
         .V = 152064, .max_T = 131072, .tied = false, .norm_eps = 1e-6f, .rope_theta = 1e6f},
        {.name = "qwen3-0.6b", .arch = QWEN3, .L = 28, .C = 1024, .NH = 16, .NKV = 8, .F = 3072,
         .V = 151936, .max_T = 40960, .tied = true, .norm_eps = 1e-6f, .rope_theta = 1e6f, .head_size = 128},
        {.name = "qwen3-1.7b", .arch = QWEN3, .L = 28, .C = 2048, .NH = 16, .NKV = 8, .F = 6144,
         .V = 151936, .max_T = 40960, .tied = true, .norm_eps = 1e-6f, .rope_theta = 1e6f, .head_size = 128},
        {.name = "qwen3-8b", .arch = QWEN3, .L = 36, .C = 4096, .NH = 32, .NKV = 8, .F = 12288,
         .V = 151936, .max_T = 40960, .tied = false, .norm_eps = 1e-6f, .rope_theta = 1e6f, .head_size = 128},
    };
    // clang-format on
    return table;
}

// Throws Error if the shape is not supported, before anything is allocated.
inline void validate(const ModelConfig& c) {
    auto require = [&](bool ok, const auto&... what) {
        if (!ok) throw Error("Model ", c.name, " is not supported: ", what..., ".");
    };
    // With these limits a model has fewer than 2^49 parameters, so that no number of bytes overflows. A row
    // of FP32 logits fits a GPU's GEMM workspace, and a row of the hidden size the kernels of gpu/norm.cu.
    const struct {
        const char* name;
        int64_t value, limit;
    } sizes[] = {{.name = "number of layers", .value = c.L, .limit = 1 << 12},
                 {.name = "hidden size", .value = c.C, .limit = 1 << 14},
                 {.name = "number of heads", .value = c.NH, .limit = 1 << 15},
                 {.name = "number of key/value heads", .value = c.NKV, .limit = 1 << 15},
                 {.name = "feed-forward size", .value = c.F, .limit = 1 << 20},
                 {.name = "vocabulary", .value = c.V, .limit = 1 << 22},
                 {.name = "number of positions", .value = c.max_T, .limit = 1 << 21}};
    for (const auto& [name, value, limit] : sizes)
        require(value > 0 && value <= limit, "its ", name, " is ", value, ", not from 1 to ", limit);
    // Dimensions of FP8 GEMMs are multiples of 16, and no group may hold elements of both q and k.
    constexpr int64_t multiple = std::max(16, PER_GROUP.cols);
    require(c.C % multiple == 0 && c.F % multiple == 0, "hidden size ", c.C, " and feed-forward size ", c.F,
            " must be multiples of ", multiple, ", as FP8 GEMMs and groups need");
    require(c.head_size || c.C % c.NH == 0, "hidden size must be a multiple of the number of heads");
    require(c.HS() % 8 == 0 && c.HS() <= 128, "head size ", c.HS(), " must be a multiple of 8 up to 128");
    require(c.q_cols() <= 1 << 20, "heads x head size is ", c.q_cols(), ", above the limit of ", 1 << 20);
    require(c.q_cols() % multiple == 0 && c.kv_cols() % multiple == 0,
            "heads x head size must be a multiple of ", multiple, ", as FP8 GEMMs and groups need");
    require(c.NH % c.NKV == 0, "query heads must be a multiple of key/value heads");
}

// -----------------------------------------------------------------------------------------------------------
// What a transformer layer saves for backward (table 2). Its passes are layer_forward() and layer_backward()
// of reference_model.cpp, and model.cu on the GPU. ./train --plan prints the formats of its operators.

// The saved tensors, in the order of the rows of saved_per_layer(). Backward also needs the outputs of norms
// and of the activation function. These are not saved: backward computes them again from their saved inputs,
// which costs little.
enum class Saved : uint8_t { Norm1Input, Qkv, AttentionOutput, LogSumExp, Norm2Input, GateUp };

// It has N * cols elements, in the shape (N, cols). The log-sum-exp alone has the shape (B, NH, T).
struct SavedTensor {
    Saved which;
    const char* name;
    int64_t cols;
    Storage storage;

    int64_t bytes(int64_t N) const { return storage.bytes(N, cols); }
};

inline std::vector<SavedTensor> saved_per_layer(const ModelConfig& c, const Recipe& r) {
    // clang-format off
    return {
        {.which = Saved::Norm1Input, .name = "norm 1 input", .cols = c.C, .storage = r.nonlinear},
        {.which = Saved::Qkv, .name = "q, k, v", .cols = c.qkv_cols(), .storage = r.attention},
        {.which = Saved::AttentionOutput, .name = "attention output", .cols = c.q_cols(),
         .storage = r.attention},
        {.which = Saved::LogSumExp, .name = "attention log-sum-exp", .cols = c.NH, .storage = FP32},
        {.which = Saved::Norm2Input, .name = "norm 2 input", .cols = c.C, .storage = r.nonlinear},
        {.which = Saved::GateUp, .name = c.arch.gated ? "gate, up" : "GELU input", .cols = c.gate_up_cols(),
         .storage = r.nonlinear},
    };
    // clang-format on
}

// -----------------------------------------------------------------------------------------------------------
// Parameters: one table, in the order of the forward pass.

struct Role {
    bool decay = false;                        // weight decay applies
    bool moments_in_optimizer_format = false;  // else its moments are in FP32
    bool linear = false;  // it is the weight of a linear layer, which the recipe quantizes
    bool ones = false;    // it starts at 1; else at random values, or at 0 (init_std)
};
// EMBEDDING is also the role of learned positions and of the head.
inline constexpr Role EMBEDDING{.decay = true, .moments_in_optimizer_format = true};
inline constexpr Role LINEAR{.decay = true, .moments_in_optimizer_format = true, .linear = true};
inline constexpr Role NORM_WEIGHT{.ones = true};
inline constexpr Role BIAS{};

struct Param {
    std::string name;  // "layers.3.qkv", "layers.3.qkv.bias", "embedding", ...
    Role role;
    int64_t rows, cols;  // a vector of n elements is (1, n)
    float init_std;      // standard deviation of the first values; 0: they are 0, or 1 by the role
    // Elements before it in the flat order of all parameters, where each is padded to a multiple of 128.
    int64_t offset;
    // A bucket is the parameters whose gradients backward completes at the same time. Buckets are counted in
    // the order of the forward pass.
    int64_t bucket;
    int64_t layer;  // the layer that it belongs to, counted from 0; -1: none

    int64_t size() const { return rows * cols; }
    int64_t padded_size() const { return round_up(size(), MOMENT_GROUP); }
    // The format of its first or second moments, where `of_optimizer` is the optimizer's.
    Format moment_format(Format of_optimizer) const {
        return role.moments_in_optimizer_format ? of_optimizer : Format::FP32;
    }
};

// The table while it is built. Each function appends to it.
struct ParamTable {
    const ModelConfig& c;
    std::vector<Param> params{};
    int64_t bucket = 0, layer = -1;  // of what is appended next

    void add(const std::string& name, const Role& role, int64_t rows, int64_t cols, float init_std) {
        const int64_t offset = params.empty() ? 0 : params.back().offset + params.back().padded_size();
        params.push_back({.name = name,
                          .role = role,
                          .rows = rows,
                          .cols = cols,
                          .init_std = init_std,
                          .offset = offset,
                          .bucket = bucket,
                          .layer = layer});
    }
    void add_norm(const std::string& name) {
        add(name + ".weight", NORM_WEIGHT, 1, c.C, 0);
        if (!c.arch.rms) add(name + ".bias", BIAS, 1, c.C, 0);
    }
    void add_linear(const std::string& name, int64_t out, int64_t in, float init_std, bool bias) {
        add(name, LINEAR, out, in, init_std);
        if (bias) add(name + ".bias", BIAS, 1, out, 0);
    }
};

inline std::vector<Param> parameters(const ModelConfig& c) {
    ParamTable table{.c = c};
    // GPT-2's first weights: those that add to the residual stream, twice a layer, are smaller.
    const float init_std = 0.02f, residual_std = init_std / std::sqrt(2.0f * c.L);
    table.add("embedding", EMBEDDING, c.padded_V(), c.C, init_std);
    if (!c.arch.rope) table.add("positions", EMBEDDING, c.max_T, c.C, init_std);
    for (int64_t layer = 0; layer < c.L; layer++) {
        table.layer = layer;
        const std::string of = concat("layers.", layer, ".");
        table.bucket++;  // each bucket of a layer is a linear layer and the norm before it
        table.add_norm(of + "norm1");
        table.add_linear(of + "qkv", c.qkv_cols(), c.C, init_std, c.arch.qkv_bias);
        if (c.arch.qk_norm) table.add(of + "qk_norm.weight", NORM_WEIGHT, 1, 2 * c.HS(), 0);  // [of q | of k]
        table.bucket++;
        table.add_linear(of + "attention_out", c.C, c.q_cols(), residual_std, c.arch.bias);
        table.bucket++;
        table.add_norm(of + "norm2");
        table.add_linear(of + "gate_up", c.gate_up_cols(), c.C, init_std, c.arch.bias);
        table.bucket++;
        table.add_linear(of + "down", c.C, c.F, residual_std, c.arch.bias);
    }
    table.layer = -1;
    table.bucket++;
    table.add_norm("final_norm");
    if (!c.tied) table.add("head", EMBEDDING, c.padded_V(), c.C, init_std);
    return table.params;
}

// The elements of p that belong to the vocabulary. Behind them are padding rows, which stay zero.
inline int64_t used_elements(const ModelConfig& c, const Param& p) {
    return p.name == "embedding" || p.name == "head" ? c.V * p.cols : p.size();
}

inline int64_t parameter_count(const ModelConfig& c) {  // without padding rows
    int64_t n = 0;
    for (const Param& p : parameters(c)) n += used_elements(c, p);
    return n;
}

}  // namespace coat
