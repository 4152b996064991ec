// reference.h - the COAT training step on the CPU: every operator that reference.cpp implements.
//
// Here are shapes, units and special cases; the equations and their reasons are in reference.cpp. The
// template parameter Real is float; it is double only where tests compare gradients with finite differences.
#pragma once
#include "model.h"

namespace coat::reference {

// --- Formats: NaN stays NaN; rounding is to nearest, ties to even ---
uint16_t encode(Format f, float x);  // to FP8 or FP16: saturates, never infinity
float decode(Format f, uint16_t code);
uint16_t to_bf16(float x);  // overflows to infinity
float from_bf16(uint16_t bits);
float round_to(Format f, float x);  // x rounded to F32 or BF16

// An FP32 master weight as a BF16 weight and a signed 16-bit remainder: bits = (weight << 16) + remainder,
// modulo 2^32. The weight is the master rounded to nearest, ties away from zero, so that the remainder fits.
void split_master(float master, uint16_t* weight, int16_t* remainder);
float join_master(uint16_t weight, int16_t remainder);
// A weight without a master: element i of the flat order, rounded stochastically (model.h, rounding_bits).
uint16_t round_stochastically(float x, uint64_t key, int64_t i);

// --- Quantizers (paper section 5) ---
// A tensor (rows, cols): value(r, c) = codes(r, c) * the scale of its block. In F32 and BF16 the codes are
// the values, and there are no scales.
struct Quantized {
    std::vector<uint8_t> codes, scales;
    int64_t rows = 0, cols = 0;
    Quant quant{Format::F32};
    // The elements of a block share a scale. A granularity of 0 means all rows or columns.
    int64_t block_rows() const { return quant.granularity.rows ? quant.granularity.rows : rows; }
    int64_t block_cols() const { return quant.granularity.cols ? quant.granularity.cols : cols; }
    float scale(int64_t r, int64_t c) const;  // of the block that contains (r, c)
    float value(int64_t r, int64_t c) const;
};

float scale_of(const Quant& q, float amax);  // of a block, from its largest magnitude
float amax(const float* x, int64_t n);       // largest |x|; infinity if one is NaN

// Quantizes x (rows, cols) with just-in-time scales. If q is FP8 and stats is not null, adds the errors to
// *stats. A given scale is that of the whole tensor; values beyond FMAX times it saturate.
Quantized quantize(const float* x, int64_t rows, int64_t cols, const Quant& q, QuantStats* stats = nullptr,
                   const float* scale = nullptr);
std::vector<float> dequantize(const Quantized& q);  // (rows, cols)

// x (rows, cols) quantized and dequantized, for a GEMM that reduces over its columns or over its rows.
enum class ReduceOver : uint8_t { Columns, Rows };
std::vector<float> operand(const std::vector<float>& x, int64_t rows, int64_t cols, const Quant& q,
                           ReduceOver which, QuantStats* stats = nullptr, const float* scale = nullptr);

// Delayed scaling of one operand of a linear layer: a step's scale comes from the amaxes of earlier steps or,
// before there is one, from the largest amax of the step so far.
struct DelayedScale {
    std::vector<float> history;  // amaxes of the last steps, the newest first; 0: no step; empty: not delayed
    float scale = 0;             // 0: none yet
    float amax = 0;              // of the current step, over its micro-batches
    // Moves amax to the history; then s = max(history) / FMAX, unless that is 0 or not finite.
    void end_step(Format fp8);
};

// --- FP8 optimizer with dynamic range expansion (paper section 4) ---
// Equation 4's k for a group of magnitudes from min_nonzero to max: a multiple of 1/256 in [1/16, 64].
float expansion_factor(Format fp8, float max, float min_nonzero);
float expand(Format fp8, float x, float max, float k);    // sign(x) FMAX (|x| / max)^k
float contract(Format fp8, float y, float max, float k);  // its inverse: sign(y) max (|y| / FMAX)^(1/k)

// One moment of one parameter, in any format. `group_size` consecutive elements share (max, k); the last
// group may be short. FP8-LM has a single group, the whole tensor. A group of zeros has max = 0 and k = 1.
//   expanded:  code = encode(expand(x)),  x = contract(decode(code))
//   else:      code = encode(x / s),      x = decode(code) s,         with s = scale_of(max), and no k
struct Moment {
    Format format = Format::F32;
    bool expands = false;
    int64_t n = 0, group_size = MOMENT_GROUP;  // group_size 0: all n elements
    std::vector<uint8_t> codes;           // n elements of format
    std::vector<float> max, k;            // one for each group; empty if the format has no scales
    void init(Format f, bool expansion, int64_t count, int64_t group_size = MOMENT_GROUP);  // all zero
    void load(float* x) const;
    // A positive second moment in groups gets at least the smallest code: a zero makes the update explode.
    void store(const float* x, bool second, QuantStats* stats = nullptr);

private:
    float value(int64_t i) const;
};

struct AdamWFactors {
    float lr, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, decay, bias1, bias2_root, gradient_scale;
};
// grad_norm: of all gradients, unclipped.
AdamWFactors adamw_factors(const AdamW& a, bool decays, double grad_norm);
void adamw(const AdamWFactors& f, int64_t n, const float* gradient, float* master, float* m, float* v);

// --- Operators, forward and backward ---
// x, y: (N, C) row-major unless said otherwise. Backward adds to parameter gradients and overwrites the rest.

// C (M, N) += A (M, K) B (K, N). Element (r, c) is data[r * row + c * col], so a transpose costs nothing.
template <class Real> struct Matrix {
    const Real* data;
    int64_t row, col;
};
template <class Real> void matmul(int64_t M, int64_t N, int64_t K, Matrix<Real> A, Matrix<Real> B, Real* C);

// RMSNorm: y = x / rms(x) * weight; bias is null, and dbias may be.
// LayerNorm: y = (x - mean) / std * weight + bias.
template <class Real>
void norm_forward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                  const Real* bias, Real* y);
template <class Real>
void norm_backward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                   const Real* dy, Real* dx, Real* dweight, Real* dbias);

// RMSNorm of each head of q and of k in qkv (N, qkv_cols), in place; weight [of q | of k], (2 HS). Backward:
// dqkv, in place, from that of the outputs, and dweight; qkv is the input of the norms.
template <class Real> void head_norm_forward(const ModelConfig& c, int64_t N, const Real* weight, Real* qkv);
template <class Real>
void head_norm_backward(const ModelConfig& c, int64_t N, const Real* qkv, const Real* weight, Real* dqkv,
                        Real* dweight);

// gated: gate_up (N, 2F) = [gate | up], act (N, F) = silu(gate) * up. Else act = gelu(gate_up), both (N, F).
template <class Real>
void activation_forward(bool gated, int64_t N, int64_t F, const Real* gate_up, Real* act);
template <class Real>
void activation_backward(bool gated, int64_t N, int64_t F, const Real* gate_up, const Real* dact,
                         Real* dgate_up);

// Rotates q and k of qkv (B, T, qkv_cols) in place. Pairs are (i, i + HS/2), as in Hugging Face. Backward
// rotates by the opposite angle: inverse.
double rope_frequency(const ModelConfig& c, int64_t i);  // of pair i, 0 <= i < HS / 2
template <class Real> void rope(const ModelConfig& c, int64_t B, int64_t T, Real* qkv, bool inverse);

// Causal; qkv (B, T, qkv_cols), out (B, T, NH*HS), lse (B, NH, T): log-sum-exp of the scaled scores.
template <class Real>
void attention_forward(const ModelConfig& c, int64_t B, int64_t T, const Real* qkv, Real* out, Real* lse);
template <class Real>
void attention_backward(const ModelConfig& c, int64_t B, int64_t T, const Real* qkv, const Real* out,
                        const Real* lse, const Real* dout, Real* dqkv);

// Returns sum(loss) in nats. logits (N, V_stride) become the gradients of sum(loss) * scale; columns from V
// on are padding.
template <class Real>
double cross_entropy(int64_t N, int64_t V, int64_t V_stride, Real* logits, const int32_t* targets,
                     Real scale);

// --- The whole step in double ---
// Mean loss of one micro-batch in the recipe fp32, and its gradients by parameter if the pointer is not null.
double loss_in_double(const ModelConfig& c, int64_t B, int64_t T,
                      const std::vector<std::vector<double>>& weights, const int32_t* tokens,
                      const int32_t* targets, std::vector<std::vector<double>>* gradients);

}  // namespace coat::reference
