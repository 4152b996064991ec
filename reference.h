// reference.h - the operators of COAT's training step on the CPU: their arguments, results and shapes. Their
// code is in reference.cpp, with equations, special cases and reasons. (matmul() is in reference_matmul.cpp,
// and loss_in_double() in reference_model.cpp.) So read a part of this file, then the part of reference.cpp
// with the same number. The training step that is made of these operators is in reference_model.cpp.
//
// All pointers are to row-major arrays, with shapes such as (rows, cols). The template parameter Real is
// float. It is double only where tests compare gradients with finite differences: that is the only reason for
// the templates of part 4.
#pragma once
#include <optional>

#include "architecture.h"
#include "quant_errors.h"
#include "random.h"
#include "step.h"

namespace coat::reference {

// In parts 1 to 3 loops over fewer elements run on one thread: starting the others would take longer.
inline constexpr int64_t MIN_PARALLEL_ELEMENTS = 1 << 14;

// --- 1. Formats: rounding is to nearest, ties to even; NaN stays NaN ---
uint16_t encode(Format f, float x);     // FP32 to FP8 or FP16; saturates, never infinity
float decode(Format f, uint16_t code);  // FP8 or FP16 to FP32
uint16_t to_bf16(float x);              // the bits; overflows to infinity
float from_bf16(uint16_t bits);
float round_to(Format f, float x);  // x as the nearest value of f, which is FP32 or BF16

// An FP32 master weight -> a BF16 weight and a signed 16-bit remainder, and back.
void split_master(float master, uint16_t* weight, int16_t* remainder);
float join_master(uint16_t weight, int16_t remainder);
// For weights without masters: x rounded to BF16 at random, as its bits. The random bits are
// rounding_bits() of `key`, for element i of the flat order of all parameters (Param::flat_offset).
uint16_t round_stochastically(float x, uint64_t key, int64_t i);

// --- 2. Quantizers (paper, preliminaries and section 5) ---
// A matrix (rows, cols), stored as its TensorFormat says (formats.h). In FP8 an element is a code, and
// value() is the value of the code times its scale. In FP32 and BF16 there are no scales.
struct StoredMatrix {
    std::vector<uint8_t> elements;  // rows * cols elements of format.element_format
    std::vector<uint8_t> scales;    // one for each scale block, of format.scale_format
    int64_t rows = 0, cols = 0;
    TensorFormat format{.element_format = Format::FP32};

    // The number of rows and of columns of a scale block.
    int64_t block_rows() const { return format.granularity.rows ? format.granularity.rows : rows; }
    int64_t block_cols() const { return format.granularity.cols ? format.granularity.cols : cols; }
    float scale(int64_t row, int64_t col) const;
    float value(int64_t row, int64_t col) const;
};

float scale_of(const TensorFormat& format, float amax);  // the scale of a scale block with this amax
float compute_amax(const float* x, int64_t n);           // the amax of n values

// Stores x (rows, cols) as `format` says.
//   stats   null, or where the errors are added if the format is FP8
//   scale   for PER_TENSOR only: the scale to use in place of the just-in-time scale
StoredMatrix quantize(const float* x, int64_t rows, int64_t cols, const TensorFormat& format,
                      QuantStats* stats = nullptr, std::optional<float> scale = {});
std::vector<float> dequantize(const StoredMatrix& stored);  // (rows, cols)

// x (rows, cols) as a GEMM reads it: quantized, and decoded again. stats, scale: as for quantize().
//   sum_along   whether the GEMM sums along the rows of x, as fprop does, or along its columns, as wgrad does
//               (the end of formats.h)
std::vector<float> gemm_operand(const std::vector<float>& x, int64_t rows, int64_t cols,
                                const TensorFormat& format, SumAlong sum_along, QuantStats* stats = nullptr,
                                std::optional<float> scale = {});

// --- 3. FP8 optimizer with dynamic range expansion (paper, section 4) ---
// The format f of the next three functions is E4M3 or E5M2.

// k of a moment group. max_magnitude, min_magnitude: the largest |x| of the moment group, and the smallest
// one that is not 0.
float expansion_exponent(Format f, float max_magnitude, float min_magnitude);
// x expanded. The result has the sign of x, and at most the magnitude FMAX.
float expand(Format f, float x, float max_magnitude, float k);
// The inverse of expand(). The result has the sign of y, and at most the magnitude max_magnitude.
float contract(Format f, float y, float max_magnitude, float k);

// One moment (n) of one parameter, in any format. The elements of a moment group share a moment scaling (max,
// k). The last moment group may be short. A moment group of zeros has max = 0 and k = 1. x' is the value that
// is read back:
//   with expansion:  code = encode(expand(x)),  x' = contract(decode(code))
//   else:            code = encode(x / s),      x' = decode(code) * s,       with s = scale_of(max), and no k
// FP32 and BF16 moments have no moment scalings, and their elements are values.
struct Moment {
    Format format = Format::FP32;
    bool expanded = false;
    int64_t n = 0;
    bool one_moment_group = false;  // all n elements are one moment group
    std::vector<uint8_t> elements;  // n elements of format
    std::vector<float> max;         // of each moment group; empty if the format is not scaled
    std::vector<float> k;           // of each moment group; empty without expansion

    // A moment of `count` zeros. f: Param::moment_format().
    void init(const OptimizerFormats& optimizer, Format f, int64_t count);
    void load(float* x) const;  // the values that are read back; x: (n)
    // Stores x (n). stats: null, or where the errors are added if the format is scaled.
    void store(const float* x, bool is_second_moment, QuantStats* stats = nullptr);

    int64_t moment_group_size() const {
        return one_moment_group ? std::max<int64_t>(n, 1) : MOMENT_GROUP_SIZE;
    }

private:
    float value(int64_t i) const;
    void store_moment_group(int64_t moment_group, int64_t first, int64_t end, const float* x,
                            bool is_second_moment);
};

struct AdamWConstants {
    float lr, beta1, beta2;
    float one_minus_beta1, one_minus_beta2;
    float eps;
    float decay;                                    // weight decay, 0 where it does not apply
    float bias_correction1, bias_correction2_sqrt;  // 1 - beta1^t and sqrt(1 - beta2^t)
    float clip_factor;                              // below 1 if the gradients are clipped
};
// The number by which clipping multiplies the gradients. grad_norm: the norm of all gradients, before
// clipping.
float clip_factor(const AdamWOptions& options, double grad_norm);
// The constants of one step for one parameter. decays: Role::decays of the parameter.
AdamWConstants adamw_constants(const AdamWOptions& options, bool decays, double grad_norm);
// One step of AdamW. gradient, master, m, v: (n)
void adamw(const AdamWConstants& constants, int64_t n, const float* gradient, float* master, float* m,
           float* v);

// --- 4. Operators, forward and backward ---
// Backward functions add to the gradients of parameters, and overwrite all others. dX is the gradient of X.

// An operand of matmul(). Its element (row, col) is data[row * row_stride + col * col_stride], so a transpose
// costs nothing.
template <class Real> struct MatrixView {
    const Real* data;
    int64_t row_stride, col_stride;
};
// A row-major matrix with `cols` columns, and its transpose.
template <class Real> MatrixView<Real> matrix_view(const std::vector<Real>& x, int64_t cols) {
    return {.data = x.data(), .row_stride = cols, .col_stride = 1};
}
template <class Real> MatrixView<Real> transposed_view(const std::vector<Real>& x, int64_t cols) {
    return {.data = x.data(), .row_stride = 1, .col_stride = cols};
}
// c (m, n) += a (m, k) b (k, n). c is row-major.
template <class Real>
void matmul(int64_t m, int64_t n, int64_t k, MatrixView<Real> a, MatrixView<Real> b, Real* c);

// x, y, dy, dx: (N, C). weight, bias, dweight, dbias: (C).
// RMSNorm if rms, else LayerNorm. For RMSNorm bias is null, and dbias may be null.
template <class Real>
void norm_forward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                  const Real* bias, Real* y);
template <class Real>
void norm_backward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                   const Real* dy, Real* dx, Real* dweight, Real* dbias);

// RMSNorm of each head of q and of k in qkv (N, qkv_cols), in place. weight, dweight: (2 HS), [of q | of k].
// Backward: qkv are the inputs of the norms; dqkv, the gradient of their outputs, becomes the gradient of
// their inputs.
template <class Real>
void qk_norms_forward(const ModelConfig& config, int64_t N, const Real* weight, Real* qkv);
template <class Real>
void qk_norms_backward(const ModelConfig& config, int64_t N, const Real* qkv, const Real* weight, Real* dqkv,
                       Real* dweight);

// gate_up, dgate_up: (N, 2F) = [gate | up] if gated, else (N, F). act, dact: (N, F).
template <class Real>
void activation_forward(bool gated, int64_t N, int64_t F, const Real* gate_up, Real* act);
template <class Real>
void activation_backward(bool gated, int64_t N, int64_t F, const Real* gate_up, const Real* dact,
                         Real* dgate_up);

// Rotates q and k of qkv (B, T, qkv_cols) in place. Pairs are (i, i + HS/2), as in Hugging Face. The backward
// pass rotates the gradients by the opposite angle (inverse = true).
double rope_frequency(const ModelConfig& config, int64_t i);  // of pair i, 0 <= i < HS / 2
template <class Real> void rope(const ModelConfig& config, int64_t B, int64_t T, Real* qkv, bool inverse);

// Causal attention. qkv, dqkv: (B, T, qkv_cols). out, dout: (B, T, NH * HS). lse: (B, NH, T), the log-sum-exp
// of the scaled scores.
template <class Real>
void attention_forward(const ModelConfig& config, int64_t B, int64_t T, const Real* qkv, Real* out,
                       Real* lse);
template <class Real>
void attention_backward(const ModelConfig& config, int64_t B, int64_t T, const Real* qkv, const Real* out,
                        const Real* lse, const Real* dout, Real* dqkv);

// Returns the sum of the losses of N tokens, in nats. logits (N, V_stride) become the gradients of
// loss_weight times this sum. Columns from V on are padding. targets: (N).
template <class Real>
double cross_entropy_forward_and_backward(int64_t N, int64_t V, int64_t V_stride, Real* logits,
                                          const int32_t* targets, Real loss_weight);

// y += factor x, both (n).
template <class Real> void add_scaled(int64_t n, Real factor, const Real* x, Real* y);

// --- Delayed scaling. This can wait: only the recipe te needs it ---
// The scale of one operand of a linear layer comes from earlier steps (recipes.h, ScaleSource). It is known
// before the tensor is, so values beyond FMAX * scale saturate.
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

// --- For tests (in reference_model.cpp): forward and backward of the whole model in double ---
// The mean loss of one micro-batch in the recipe fp32. If `gradients` is not null, it gets the gradients
// of this loss, by parameter.
double loss_in_double(const ModelConfig& config, int64_t B, int64_t T,
                      const std::vector<std::vector<double>>& param_values, const int32_t* tokens,
                      const int32_t* targets, std::vector<std::vector<double>>* gradients);

}  // namespace coat::reference
