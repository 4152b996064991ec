// reference/quantize.h - 2. Quantizers (paper, preliminaries and section 5).
#pragma once
#include <optional>
#include <vector>

#include "../common/quant_errors.h"
#include "rounding.h"

namespace coat::reference {

// A matrix (rows, cols), stored as its TensorFormat says (common/formats.h). In FP8 an element is a code, and
// value() is the value of the code times its scale. In FP32 and BF16 there are no scales.
struct StoredMatrix {
    std::vector<uint8_t> elements;  // rows * cols elements of format.element_format
    std::vector<uint8_t> scales;    // one for each scale block, of format.scale_format
    int64_t rows = 0, cols = 0;
    TensorFormat format{.element_format = Format::FP32};
    // In FP8: the amax of the values that were quantized; infinity if one was NaN. In other formats: 0.
    float amax = 0;

    // The number of rows and of columns of a scale block.
    int64_t block_rows() const { return format.granularity.rows ? format.granularity.rows : rows; }
    int64_t block_cols() const { return format.granularity.cols ? format.granularity.cols : cols; }
    float scale(int64_t row, int64_t col) const;
    float value(int64_t row, int64_t col) const;
};

// The scale of a scale block with this amax.
float scale_of(const TensorFormat& format, float amax);
float compute_amax(const float* x, int64_t n);  // the amax of n values; infinity if one is NaN

// (This can wait: a step of coat needs neither.) What a quantizer may be given besides a matrix.
struct QuantizeOptions {
    QuantStats* stats = nullptr;  // where the errors are added if the format is FP8; null: nowhere
    // With delayed scaling, whose granularity is PER_TENSOR: the scale, in place of that of the amax.
    std::optional<float> scale{};
};

// Stores x (rows, cols) as `format` says. (In FP32 and BF16 nothing is quantized: the values are only
// rounded.)
StoredMatrix quantize(const float* x, int64_t rows, int64_t cols, const TensorFormat& format,
                      const QuantizeOptions& options = {});
std::vector<float> dequantize(const StoredMatrix& stored);  // (rows, cols)

// A matrix (rows, cols) as a GEMM reads it.
struct GemmOperand {
    std::vector<float> values;  // quantized, and decoded again
    float amax;                 // StoredMatrix::amax
};
// sum_along: whether the GEMM sums along the rows of x, as fprop does, or along its columns, as wgrad does
// (the end of common/formats.h).
GemmOperand gemm_operand(const std::vector<float>& x, int64_t rows, int64_t cols, const TensorFormat& format,
                         SumAlong sum_along, const QuantizeOptions& options = {});

// Adds the error of one value to statistics.
void add_error(QuantStats& stats, float x, float dequantized);

// --- Delayed scaling (this can wait: only the recipe te needs it) ---
// The scale of one operand of a linear layer comes from earlier steps (common/recipes.h, ScaleSource). It is
// known before the tensor is, so values beyond FMAX * scale saturate.
struct DelayedScale {
    // The amaxes of the last recipe.history_steps steps, the newest first; 0 for steps before the first. The
    // vector is empty if this operand has no delayed scaling.
    std::vector<float> history;
    float scale = 0;  // the scale in the current step, from the history; 0: the history has no amax yet
    float amax = 0;   // the largest amax of the current step so far, over its micro-batches
    // Raises `amax` to that of a tensor of the current step. Returns the scale to quantize this tensor with,
    // which is `scale`. If the history has no amax yet, the returned scale comes from `amax`.
    float raise_amax_and_get_scale(const TensorFormat& format, float tensor_amax);
    // After a step: `amax` replaces the oldest of the history, and the scale of the next step is
    // max(history) / FMAX. If max(history) is 0 or not finite, the scale stays as it is.
    void update_history_and_scale(Format f);
};

}  // namespace coat::reference
