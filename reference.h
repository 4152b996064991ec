// reference.h - the COAT training step on the CPU, operator by operator, in the paper's order (reference.cpp).
//
// These are the functions that every GPU kernel is compared with. Each is one sentence of the method; none knows the GPU.
// Real is float; double only for gradients against finite differences (fp32 recipe).
#pragma once
#include "coat.h"

namespace coat::reference {

// --- Formats: round to nearest even, saturate to the largest finite value, NaN stays NaN -----------------------------
uint8_t encode(Format fp8, float x);
float decode(Format fp8, uint8_t code);
uint16_t to_f16(float x);        // as FP8: 65504 is the largest, and no cast makes an infinity
float from_f16(uint16_t code);
uint16_t to_bf16(float x);       // nearest even; overflows to infinity
uint16_t to_bf16_up(float x);    // smallest BF16 >= x, x >= 0: how a scale is stored, so that no code saturates
float from_bf16(uint16_t bits);
float round_to(Format f, float x);  // x as F32 or BF16 holds it

// Exact FP32 master from a BF16 weight and a signed 16-bit remainder: bits = (weight << 16) + remainder, modulo 2^32.
// The weight is the master rounded to nearest, ties away from zero so that the remainder fits.
void split_master(float master, uint16_t* weight, int16_t* remainder);
float join_master(uint16_t weight, int16_t remainder);

// A weight without a master: element i of the flat order, rounded to BF16 so that the expected value is x (coat.h, rounding_bits).
uint16_t round_stochastically(float x, uint64_t key, int64_t i);

// --- Quantizers (paper section 5) ----------------------------------------------------------------------------------
// A QuantizedView that owns its memory. F32 and BF16 hold values themselves and have no scales.
struct Quantized {
    std::vector<uint8_t> codes, scales;
    int64_t rows = 0, cols = 0;
    Quant quant{Format::F32};
    QuantizedView view() { return {codes.data(), scales.data(), rows, cols, quant}; }
    float scale(int64_t r, int64_t c) const;  // of the block that holds (r, c)
    float value(int64_t r, int64_t c) const;
};

// The scale of a block whose largest magnitude is amax: s = amax / FMAX, at least 2^-126, rounded up where it is stored in
// BF16; amax = 0 gives 1. Not finite: 1 for a whole tensor, whose amax is looked at; NaN for a block, so that nothing hides it.
// Codes are made with inverse = 1 / s in FP32: code = encode(x * inverse).
float scale_of(const Quant& q, float amax);

// amax of n values, NaN and infinity included (as infinity). In two stages (group scaling, paper section 5): maxima of 1xG groups, then
// the maximum of those; the same number as in one stage, since a maximum does not round.
float amax(const float* x, int64_t n);

// Just-in-time quantization of x (rows, cols). stats, if given, is added to. A scale, if given, is taken for the whole tensor instead of the one
// that its amax asks for; what lies beyond it saturates.
Quantized quantize(const float* x, int64_t rows, int64_t cols, const Quant& q, QuantStats* stats = nullptr, const float* scale = nullptr);
std::vector<float> dequantize(const Quantized& q);  // (rows, cols)

// Values of x (rows, cols) as an operand of a product that contracts its columns, or its rows: then the transpose is what is quantized.
enum class ReduceOver : uint8_t { Columns, Rows };
std::vector<float> operand(const std::vector<float>& x, int64_t rows, int64_t cols, const Quant& q, ReduceOver which, QuantStats* stats = nullptr,
                           const float* scale = nullptr);

// Delayed scaling (TransformerEngine's) of one operand of a linear layer: its scale is fixed within a step and comes from the amaxes of the steps
// before, s = max(history) 2^margin / FMAX; it stays as it was where that maximum is 0 or not finite. As long as there
// has been none, the operand is scaled just in time, by its largest amax of the step so far.
struct DelayedScale {
    std::vector<float> history;  // amaxes of the last steps, the newest first; 0: no step yet
    float scale = 0;             // 0: there is none yet
    float amax = 0;              // of the step at hand, over its micro-batches
    void end_step(Format fp8, int margin);  // the step's amax into the history, the next one's scale out of it
};

// --- FP8 optimizer (paper section 4) -------------------------------------------------------------------------------
// Moments of n consecutive elements, in groups of MOMENT_GROUP; the last may be short. codes (n), and one (max, k) a group, k null without expansion:
//   code = sign(x) encode(FMAX (|x|/max)^k)      value = sign max (|code|/FMAX)^(1/k)
// k = floor(16 log_ratio(FMAX / FMIN)) / 16 with ratio = max / smallest non-zero magnitude, clamped to [1/16, 64] (paper
// eq. 4; the released code's 1/16 steps). Without expansion k = 1 and an element that would flush to zero keeps the smallest code
// in a second moment (keep_positive), since a zero there would make the update explode. An all-zero group is max = 0, k = 1.
// FP16 moments are two bytes a code and have no expansion.
float expansion_factor(Format fp8, float max, float min_nonzero);
void encode_moment(Format f, bool expand, bool keep_positive, const float* x, int64_t n, uint8_t* codes, float* max, float* k,
                   QuantStats* stats = nullptr);
void decode_moment(Format f, bool expand, const uint8_t* codes, const float* max, const float* k, int64_t n, float* x);

// One parameter's optimizer state. Where one scale serves the whole tensor (FP8-LM), the same formula has the tensor for a group.
struct Moment {
    Format format = Format::F32;
    Granularity granularity = PER_MOMENT_GROUP;
    bool expand = false;
    std::vector<uint8_t> codes;   // n elements of format
    std::vector<float> max, k;    // one a group, or one, where the format is scaled
    void init(Format f, bool expansion, int64_t n, Granularity g = PER_MOMENT_GROUP);  // all zero
    void load(int64_t first, int64_t n, float* x) const;  // first is a multiple of MOMENT_GROUP
    void fit_tensor(int64_t n, const float* x);  // comes before store(): the one scale of all n elements; nothing where groups have theirs
    void store(int64_t first, int64_t n, const float* x, bool keep_positive, QuantStats* stats = nullptr);
};

// AdamW with decoupled weight decay, eps outside the root, in FP32 (torch.optim.AdamW's arithmetic):
//   m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  w -= lr (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)
// where g = gradient * gradient_scale. The weight moves with the unrounded moments.
// Powers of beta and clipping (gradient_scale = min(1, clip / norm)) are worked out in double. The GPU has its own (coat.cu, Factors).
struct AdamWFactors {
    float lr, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, decay, bias1, bias2_root, gradient_scale;
};
// Of one step and parameter; decays: whether weight decay applies; grad_norm: of the whole gradient, before clipping.
AdamWFactors adamw_factors(const AdamW& a, bool decays, double grad_norm);
void adamw(const AdamWFactors& f, int64_t n, const float* gradient, float* master, float* m, float* v);

// --- Operators of the precision flow, forward and backward ----------------------------------------------------------
// x, y: (N, C) row-major unless said otherwise. Backward functions add (+=) to parameter gradients and assign the rest.

// C (M, N) = A (M, K) B (K, N) (+ C if accumulate). An operand is given by its strides, so a transpose costs nothing.
template <class Real> struct Matrix { const Real* data; int64_t row, col; };
template <class Real>
void matmul(int64_t M, int64_t N, int64_t K, Matrix<Real> A, Matrix<Real> B, Real* C, bool accumulate = false);

template <class Real>  // RMSNorm: y = x / rms(x) * weight. LayerNorm: y = (x - mean) / std * weight + bias.
void norm_forward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight, const Real* bias, Real* y);
template <class Real>  // bias and dbias are null for RMSNorm
void norm_backward(bool rms, Real eps, int64_t N, int64_t C, const Real* x, const Real* weight, const Real* dy, Real* dx, Real* dweight, Real* dbias);

template <class Real>  // h (N, F) = silu(gate) * up with up (N, 2F) = [gate | up]; or gelu(up), GPT-2's with tanh, with up (N, F)
void activation_forward(bool gated, int64_t N, int64_t F, const Real* up, Real* h);
template <class Real>
void activation_backward(bool gated, int64_t N, int64_t F, const Real* up, const Real* dh, Real* dup);

template <class Real>  // rotates q and k of qkv (B, T, qkv_cols) in place; pairs are (i, i + HS/2), as in Hugging Face. inverse: backward
void rope(const ModelConfig& c, int64_t B, int64_t T, Real* qkv, bool inverse);

template <class Real>  // causal; qkv (B, T, qkv_cols), out (B, T, NH*HS), lse (B, NH, T) = log-sum-exp of the scaled scores
void attention_forward(const ModelConfig& c, int64_t B, int64_t T, const Real* qkv, Real* out, Real* lse);
template <class Real>
void attention_backward(const ModelConfig& c, int64_t B, int64_t T, const Real* qkv, const Real* out, const Real* lse, const Real* dout, Real* dqkv);

template <class Real>  // logits (N, V_stride), of which V are live, become their gradients of sum(loss) * scale; returns sum(loss)
double cross_entropy(int64_t N, int64_t V, int64_t V_stride, Real* logits, const int32_t* targets, Real scale);

// --- The whole step ----------------------------------------------------------------------------------------------
// The fp32 recipe in double, for finite differences: loss of one micro-batch, and its gradient in gradients[param] (rows*cols) if not null.
double loss_in_double(const ModelConfig& c, int64_t B, int64_t T, const std::vector<std::vector<double>>& weights,
                      const int32_t* tokens, const int32_t* targets, std::vector<std::vector<double>>* gradients);

}  // namespace coat::reference
