// reference/operators.h - 4. Operators, forward and backward: matrix multiplication, norm, activation, RoPE,
// attention, cross entropy.
//
// All pointers are to row-major arrays, with shapes such as (rows, cols). dX is the gradient of X. Backward
// functions add to the gradients of parameters, and overwrite all other gradients. The template parameter
// Real is float. (Only tests compute in double.)
#pragma once
#include <vector>

#include "../common/architecture.h"
#include "../common/step.h"

namespace coat::reference {

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

// RMSNorm if `rms`, else LayerNorm. x, y, dy, dx: (N, C). weight, bias, dweight, dbias: (C). RMSNorm has no
// bias: `bias` is null, and dbias may be null.
template <class Real>
void norm_forward(bool rms, double eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                  const Real* bias, Real* y);
template <class Real>
void norm_backward(bool rms, double eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                   const Real* dy, Real* dx, Real* dweight, Real* dbias);

// (These two can wait: only Qwen3 needs them.) RMSNorm of each head of q and of k in qkv (N, qkv_cols), in
// place. weight, dweight: (2 HS), [of q | of k]. In backward qkv has the inputs of the norms, and dqkv, the
// gradient of their outputs, becomes the gradient of their inputs.
template <class Real>
void qk_norms_forward(const ModelConfig& config, int64_t N, const Real* weight, Real* qkv);
template <class Real>
void qk_norms_backward(const ModelConfig& config, int64_t N, const Real* qkv, const Real* weight, Real* dqkv,
                       Real* dweight);

// The activation function: SiLU(gate) * up if `gated`, else GELU. gate_up, dgate_up: (N, 2F) = [gate | up] if
// gated, else (N, F). act, dact: (N, F).
template <class Real>
void activation_forward(bool gated, int64_t N, int64_t F, const Real* gate_up, Real* act);
template <class Real>
void activation_backward(bool gated, int64_t N, int64_t F, const Real* gate_up, const Real* dact,
                         Real* dgate_up);

// RoPE rotates q and k of qkv (B, T, qkv_cols) in place. A pair is (i, i + HS/2), as in Hugging Face. The
// backward pass rotates the gradients by the opposite angle (inverse = true).
template <class Real> void rope(const ModelConfig& config, int64_t B, int64_t T, Real* qkv, bool inverse);
// The angle by which pair i, 0 <= i < HS / 2, turns from one position to the next, in radians.
double rope_frequency(const ModelConfig& config, int64_t i);

// Causal attention. qkv, dqkv: (B, T, qkv_cols). out, dout: (B, T, NH * HS). lse: (B, NH, T), the log-sum-exp
// of the scaled scores.
template <class Real>
void attention_forward(const ModelConfig& config, int64_t B, int64_t T, const Real* qkv, Real* out,
                       Real* lse);
template <class Real>
void attention_backward(const ModelConfig& config, int64_t B, int64_t T, const Real* qkv, const Real* out,
                        const Real* lse, const Real* dout, Real* dqkv);

// Returns the sum of the losses of N tokens, in nats. logits (N, padded_V) are overwritten by the
// gradients of loss_weight * (the sum). Columns from V on are padding. targets: (N).
template <class Real>
double cross_entropy_forward_and_backward(int64_t N, int64_t V, int64_t padded_V, Real* logits,
                                          const int32_t* targets, Real loss_weight);

// y += factor x, both (n).
template <class Real> void add_scaled(int64_t n, Real factor, const Real* x, Real* y);

}  // namespace coat::reference
