// common/recipes.h - the tables of recipes and of optimizers: in which format, and with which scale blocks,
// each kind of tensor is stored. A run has one recipe and one optimizer. (formats.h explains the words.)
#pragma once
#include <array>
#include <vector>

#include "formats.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// Recipes: how each kind of tensor is stored (paper, section 5). A recipe is a row of a table. Other code
// looks at the columns of a row, never at its name.

// Where the scale of a whole tensor comes from.
//   JustInTime   from the tensor's own amax
//   Delayed      (All of this can wait: only the recipe te needs it.) From the largest amax of the last
//                Recipe::history_steps steps. In the first step there is no history, so each micro-batch uses
//                the largest amax of the step so far, its own included
enum class ScaleSource : uint8_t { JustInTime, Delayed };

// (This can wait: the CPU always sums in FP32.) Whether a GPU's fprop, dgrad and wgrad have fast
// accumulation: the whole sum of a GEMM stays in the FP8 tensor cores, which on Hopper keep about 14 bits of
// it. Without fast accumulation partial sums are added up in FP32, and the GEMM takes longer.
using FastAccumulation = std::array<bool, 3>;
inline constexpr FastAccumulation FAST_IN_NO_GEMM{false, false, false};
inline constexpr FastAccumulation FAST_IN_FPROP{true, false, false};
inline constexpr FastAccumulation FAST_IN_ALL_GEMMS{true, true, true};

struct Recipe {
    const char* name;
    // The compute format: the format of the residual stream (as the next sum reads it), attention, GEMM
    // outputs, the head, and gradients of weights. (If a step adds up more than four gradients of a weight,
    // the sums are FP32: gradient_format() of model.h.)
    Format compute_format = Format::BF16;
    // The operands of a linear layer's GEMMs: its input x, its weight w, and the gradient g of its output.
    TensorFormat x = PLAIN_BF16, w = PLAIN_BF16, g = PLAIN_BF16;
    // How the inputs of norms 1 and 2 and of the activation function are saved for backward. Forward, too,
    // computes with the saved values.
    TensorFormat saved_inputs = PLAIN_BF16;
    // How q, k, v and attention's output are saved for backward. All recipes save them in the compute format;
    // the flag --attention groups changes this to groups.
    TensorFormat saved_attention = PLAIN_BF16;
    ScaleSource scale_source = ScaleSource::JustInTime;  // of x, w and g
    FastAccumulation fast_accumulation = FAST_IN_NO_GEMM;
    const char* default_optimizer = "fp32";  // a row of optimizers()
    int history_steps = 1024;                // the steps whose amaxes delayed scaling remembers
    const char* about = "";                  // a line of --help
};

// The row `coat` has every column that it uses. Other rows leave out what is as in the struct above.
inline const std::vector<Recipe>& recipes() {
    // clang-format off
    static const std::vector<Recipe> table = {
        {.name = "fp32", .compute_format = Format::FP32, .x = PLAIN_FP32, .w = PLAIN_FP32, .g = PLAIN_FP32,
         .saved_inputs = PLAIN_FP32, .saved_attention = PLAIN_FP32,
         .about = "everything in FP32, to compare the others with"},
        {.name = "bf16",
         .about = "BF16 tensors; GEMMs sum in FP32"},
        {.name = "coat", .compute_format = Format::BF16,
         .x = E4M3_PER_TENSOR, .w = E4M3_PER_TENSOR, .g = E5M2_PER_TENSOR,
         .saved_inputs = E4M3_PER_1x16, .saved_attention = PLAIN_BF16,
         .scale_source = ScaleSource::JustInTime, .fast_accumulation = FAST_IN_FPROP,
         .default_optimizer = "coat",
         .about = "FP8 GEMMs, one scale per tensor; norm and activation inputs saved in FP8 groups of 16"},
        {.name = "te", .x = E4M3_PER_TENSOR, .w = E4M3_PER_TENSOR, .g = E5M2_PER_TENSOR,
         .scale_source = ScaleSource::Delayed,
         .fast_accumulation = FAST_IN_FPROP,
         .about = "FP8 GEMMs, one scale per tensor, taken from earlier steps (TransformerEngine)"},
        {.name = "colossal", .x = E4M3_PER_TENSOR, .w = E4M3_PER_TENSOR, .g = E5M2_PER_TENSOR,
         .fast_accumulation = FAST_IN_ALL_GEMMS,
         .about = "FP8 GEMMs, one scale per tensor; all sums keep about 14 bits on a GPU (Colossal-AI)"},
        {.name = "tensorwise", .x = E4M3_PER_TENSOR, .w = E4M3_PER_TENSOR, .g = E5M2_PER_TENSOR,
         .fast_accumulation = FAST_IN_FPROP,
         .about = "FP8 GEMMs, one scale per tensor (torchao's tensorwise)"},
        // torchao's rowwise also rounds scales up to powers of two, and accumulates fast in all GEMMs.
        {.name = "rowwise", .x = E4M3_PER_ROW, .w = E4M3_PER_ROW, .g = E4M3_PER_ROW,
         .fast_accumulation = FAST_IN_FPROP,
         .about = "FP8 GEMMs, one scale per row, not rounded to powers of two"},
        {.name = "deepseek", .x = E4M3_PER_1x128, .w = E4M3_PER_128x128, .g = E4M3_PER_1x128,
         .about = "FP8 GEMMs, one scale per 1x128 block (weights: per 128x128 block; DeepSeek-V3)"},
    };
    // clang-format on
    return table;
}

// The formats of the operands of a linear layer's GEMMs. (The fallback can wait: the dimensions of an FP8
// GEMM are multiples of 16. If the number of tokens N is not, all linear layers of the run fall back to the
// compute format.)
struct LinearFormats {
    TensorFormat x, w, g;
    bool fallback;
};
inline LinearFormats linear_formats(const Recipe& r, int64_t N) {
    const TensorFormat plain{.element_format = r.compute_format};
    if (N % FP8_GEMM_MULTIPLE != 0 && r.x.is_fp8())
        return {.x = plain, .w = plain, .g = plain, .fallback = true};
    return {.x = r.x, .w = r.w, .g = r.g, .fallback = false};
}

inline const TensorFormat& format_of(const LinearFormats& formats, OperandKind o) {
    if (o == OperandKind::X) return formats.x;
    return o == OperandKind::W ? formats.w : formats.g;
}

// -----------------------------------------------------------------------------------------------------------
// Optimizers: how AdamW's moments are stored between steps (paper, section 4). Moments in FP8 are divided
// into moment groups of 128 elements, each with its max.

inline constexpr int MOMENT_GROUP_SIZE = 128;

// How the moments of AdamW are stored: a row of optimizers().
struct OptimizerFormats {
    const char* name;
    Format m_format, v_format;  // of first and of second moments
    bool expansion = false;     // dynamic range expansion of FP8 moments
    const char* about = "";     // a line of --help

    // The format f of a moment is m_format or v_format; or FP32, for the weights of norms and for biases
    // (Param::moment_format()).
    bool uses_expansion(Format f) const { return expansion && is_fp8(f); }
    // (This function can wait: only the GPU calls it.) Whether the m and v of a matrix are FP8 codes in
    // moment groups. In every row of the table either both are, or neither is.
    bool has_fp8_moment_groups() const { return is_fp8(m_format) && is_fp8(v_format); }
};

// The number of moment groups of n elements of a moment in format f.
constexpr int64_t moment_group_count(Format f, int64_t n) {
    return is_fp8(f) ? ceil_div(n, MOMENT_GROUP_SIZE) : 0;
}

inline const std::vector<OptimizerFormats>& optimizers() {
    // clang-format off
    static const std::vector<OptimizerFormats> table = {
        {.name = "coat", .m_format = Format::E4M3, .v_format = Format::E4M3, .expansion = true,
         .about = "FP8 moments with dynamic range expansion (paper, section 4)"},
        {.name = "fp8", .m_format = Format::E4M3, .v_format = Format::E4M3,
         .about = "FP8 moments, one scale per moment group of 128, not expanded"},
        {.name = "bf16", .m_format = Format::BF16, .v_format = Format::BF16,
         .about = "BF16 moments"},
        {.name = "fp32", .m_format = Format::FP32, .v_format = Format::FP32,
         .about = "FP32 moments"},
    };
    // clang-format on
    return table;
}

}  // namespace coat
