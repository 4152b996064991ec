// reference/operators.cpp - 4. Operators, forward and backward. dX is the gradient of X. The matrix
// multiplication is in reference/matmul.cpp: it has to be fast, and the rest can be understood without it.
#include "operators.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "arrays.h"

namespace coat::reference {

// The mean of a row x (C), and rstd = 1 / sqrt(variance + eps). For RMSNorm the mean is taken as 0, so
// rstd is 1 / sqrt(mean(x^2) + eps).
template <class Real> struct RowStatistics { Real mean, rstd; };
template <class Real>
static RowStatistics<Real> row_statistics(bool rms, double eps, int64_t C, const Real* x) {
    Real mean = 0, sum_of_squares = 0;
    if (!rms) {
#pragma omp simd reduction(+ : mean)
        for (int64_t c = 0; c < C; c++) mean += x[c];
        mean /= Real(C);
    }
#pragma omp simd reduction(+ : sum_of_squares)
    for (int64_t c = 0; c < C; c++) sum_of_squares += (x[c] - mean) * (x[c] - mean);
    return {.mean = mean, .rstd = 1 / std::sqrt(sum_of_squares / Real(C) + Real(eps))};
}

// RMSNorm or LayerNorm of each row of x (N, C). RMSNorm has mean = 0 and no bias:
//   xhat = (x - mean) * rstd
//   y = xhat * weight + bias
template <class Real>
void norm_forward(bool rms, double eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                  const Real* bias, Real* y) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        const auto [mean, rstd] = row_statistics(rms, eps, C, x + n * C);
        for (int64_t c = 0; c < C; c++)
            y[n * C + c] = (x[n * C + c] - mean) * rstd * weight[c] + (bias ? bias[c] : Real(0));
    }
}

// The backward pass of norm_forward(). With d = dy * weight:
//   dx = (d - mean(d) - xhat * mean(d * xhat)) * rstd
//   dweight += sum(dy * xhat),  dbias += sum(dy)
// mean() is over the C elements of a row; RMSNorm has no mean(d). sum() is over the N rows.
template <class Real>
void norm_backward(bool rms, double eps, int64_t N, int64_t C, const Real* x, const Real* weight,
                   const Real* dy, Real* dx, Real* dweight, Real* dbias) {
    std::vector<RowStatistics<Real>> statistics(N);  // of each row
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        statistics[n] = row_statistics(rms, eps, C, x + n * C);
        const auto [mean, rstd] = statistics[n];
        Real sum_d = 0, sum_d_xhat = 0;
#pragma omp simd reduction(+ : sum_d, sum_d_xhat)
        for (int64_t c = 0; c < C; c++) {
            const Real d = dy[n * C + c] * weight[c];
            sum_d += d;
            sum_d_xhat += d * (x[n * C + c] - mean) * rstd;
        }
        const Real mean_d = rms ? Real(0) : sum_d / Real(C);
        const Real mean_d_xhat = sum_d_xhat / Real(C);
        for (int64_t c = 0; c < C; c++) {
            const Real xhat = (x[n * C + c] - mean) * rstd;
            dx[n * C + c] = (dy[n * C + c] * weight[c] - mean_d - xhat * mean_d_xhat) * rstd;
        }
    }
    const int64_t width = 64;  // a thread sums 64 columns, so every sum runs over the rows in order
#pragma omp parallel for
    for (int64_t first = 0; first < C; first += width)
        for (int64_t n = 0; n < N; n++)
            for (int64_t c = first; c < std::min(C, first + width); c++) {
                dweight[c] += dy[n * C + c] * (x[n * C + c] - statistics[n].mean) * statistics[n].rstd;
                if (dbias) dbias[c] += dy[n * C + c];
            }
}

// RMSNorm of each head of q and of k (Qwen3). A head is a row of norm_forward(), with HS columns.
template <class Real>
void qk_norms_forward(const ModelConfig& config, int64_t N, const Real* weight, Real* qkv) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        Real* const queries = qkv + n * config.qkv_cols();
        Real* const keys = queries + config.q_cols();
        norm_forward<Real>(/*rms=*/true, config.norm_eps, config.NH, config.HS(), queries, weight,
                           /*bias=*/nullptr, queries);
        norm_forward<Real>(/*rms=*/true, config.norm_eps, config.NKV, config.HS(), keys, weight + config.HS(),
                           /*bias=*/nullptr, keys);
    }
}

// The backward pass of qk_norms_forward(): dqkv is overwritten, and dweight is added to.
template <class Real>
void qk_norms_backward(const ModelConfig& config, int64_t N, const Real* qkv, const Real* weight, Real* dqkv,
                       Real* dweight) {
    // The query heads or the key heads of one token. heads_at: where they begin in qkv and dqkv. weight_at:
    // where their norm's weight begins in weight and dweight.
    auto backward_of_heads = [&](int64_t heads, int64_t heads_at, int64_t weight_at) {
        Real* const dx = dqkv + heads_at;
        const std::vector<Real> dy(dx, dx + heads * config.HS());
        norm_backward<Real>(/*rms=*/true, config.norm_eps, heads, config.HS(), qkv + heads_at,
                            weight + weight_at, dy.data(), dx, dweight + weight_at, /*dbias=*/nullptr);
    };
    for (int64_t n = 0; n < N; n++) {  // one after the other, so that every sum runs over the rows in order
        const int64_t queries_at = n * config.qkv_cols();
        backward_of_heads(config.NH, queries_at, 0);
        backward_of_heads(config.NKV, queries_at + config.q_cols(), config.HS());
    }
}

template <class Real> static Real sigmoid(Real x) { return 1 / (1 + std::exp(-x)); }

// gelu(x) = x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
constexpr double GELU_SCALE = 0.79788456080286536, GELU_CUBE = 0.044715;

template <class Real> static Real tanh_of_gelu(Real x) {
    return std::tanh(Real(GELU_SCALE) * (x + Real(GELU_CUBE) * x * x * x));
}

// The activation function. If gated, act = silu(gate) * up with silu(a) = a * sigmoid(a); else
// act = gelu(gate_up).
template <class Real>
void activation_forward(bool gated, int64_t N, int64_t F, const Real* gate_up, Real* act) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            const int64_t gate_at = (gated ? 2 : 1) * n * F + f;  // of gate, or of GELU's input
            const int64_t up_at = gate_at + F;
            const Real a = gate_up[gate_at];
            if (gated) act[n * F + f] = a * sigmoid(a) * gate_up[up_at];
            else act[n * F + f] = Real(0.5) * a * (1 + tanh_of_gelu(a));
        }
}

// The backward pass of activation_forward():
//   gated:  dup = dact silu(gate)               silu(a) = a s,  s = sigmoid(a)
//           dgate = dact up silu'(gate)         silu'(a) = s (1 + a (1 - s))
//   else:   dgate_up = dact gelu'(gate_up)      gelu'(a) = (1 + t + a t') / 2,  t = the tanh in gelu(a)
//                                               t' = (1 - t^2) sqrt(2 / pi) (1 + 3 * 0.044715 a^2)
template <class Real>
void activation_backward(bool gated, int64_t N, int64_t F, const Real* gate_up, const Real* dact,
                         Real* dgate_up) {
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++)
        for (int64_t f = 0; f < F; f++) {
            const int64_t gate_at = (gated ? 2 : 1) * n * F + f;  // of gate, or of GELU's input
            const int64_t up_at = gate_at + F;
            const Real d = dact[n * F + f], a = gate_up[gate_at];
            if (gated) {
                const Real s = sigmoid(a);
                dgate_up[up_at] = d * a * s;
                dgate_up[gate_at] = d * gate_up[up_at] * s * (1 + a * (1 - s));
            } else {
                // The limit keeps a * a finite. Where it acts, 1 - t * t is 0, and 0 * infinity would be NaN.
                const Real square = std::min(a * a, Real(1000));
                const Real t = tanh_of_gelu(a);
                const Real slope = Real(GELU_SCALE) * (1 + 3 * Real(GELU_CUBE) * square);
                dgate_up[gate_at] = d * Real(0.5) * (1 + t + a * (1 - t * t) * slope);
            }
        }
}

// The frequency f_i = theta^(-2i / HS) of pair i, in radians per position, scaled as the model wants
// (RopeScaling in common/architecture.h). Llama 3's formula is apply_scaling in Meta's llama-models and
// _compute_llama3_parameters in transformers, Hugging Face's library.
double rope_frequency(const ModelConfig& config, int64_t i) {
    const RopeScaling& scaling = config.rope_scaling;
    const double f = std::pow(double(config.rope_theta), -2.0 * double(i) / double(config.HS()));
    if (scaling.type == RopeScaling::Default) return f;
    const double wavelength = 2 * 3.14159265358979323846 / f;  // the positions of a whole turn
    const double turns = double(scaling.original_positions) / wavelength;
    const double low = scaling.low_freq_factor, high = scaling.high_freq_factor;
    if (turns < low) return f / scaling.factor;
    if (turns > high) return f;
    const double smooth = (turns - low) / (high - low);  // from 0 to 1
    return (1 - smooth) * f / scaling.factor + smooth * f;
}

// RoPE: rotates each pair (x_i, x_(i + HS/2)) of a head at position t by the angle t f_i. The heads of q and
// of k are rotated, v is not.
template <class Real> void rope(const ModelConfig& config, int64_t B, int64_t T, Real* qkv, bool inverse) {
    const int64_t half = config.HS() / 2;
#pragma omp parallel for
    for (int64_t t = 0; t < T; t++)
        for (int64_t i = 0; i < half; i++) {
            const double angle = double(t) * rope_frequency(config, i);
            const Real cosine = Real(std::cos(angle)), sine = Real(std::sin(inverse ? -angle : angle));
            for (int64_t b = 0; b < B; b++)
                for (int64_t head = 0; head < config.NH + config.NKV; head++) {
                    Real* x = qkv + (b * T + t) * config.qkv_cols() + head * config.HS() + i;
                    const Real first = x[0], second = x[half];
                    x[0] = first * cosine - second * sine;
                    x[half] = second * cosine + first * sine;
                }
        }
}

// sum_i a_i b_i of two vectors (n).
template <class Real> static Real dot(const Real* a, const Real* b, int64_t n) {
    Real sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

// y += factor x, both (n).
template <class Real> void add_scaled(int64_t n, Real factor, const Real* x, Real* y) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] += factor * x[i];
}

// out[j] = factor * (x . column j) for the first n columns of `matrix` (HS, T). The sum is over HS, but the
// inner loop runs over j, because that loop vectorizes.
template <class Real>
static void dot_products(int64_t HS, int64_t T, const Real* x, const std::vector<Real>& matrix, int64_t n,
                         Real factor, Real* out) {
    std::fill(out, out + n, Real(0));
    for (int64_t d = 0; d < HS; d++) add_scaled(n, x[d] * factor, matrix.data() + d * T, out);
}

// Causal attention: query t reads the keys and values j <= t,
//   p_j = softmax_j(q . k_j / sqrt(HS)),  out = sum_j p_j v_j.
// The largest score is subtracted from all scores. The softmax stays the same, and exp cannot overflow.
template <class Real>
void attention_forward(const ModelConfig& config, int64_t B, int64_t T, const Real* qkv, Real* out,
                       Real* lse) {
    const int64_t HS = config.HS(), NH = config.NH;
    const int64_t stride = config.qkv_cols();  // elements from one token to the next
    const Real score_factor = 1 / std::sqrt(Real(HS));
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t head = 0; head < NH; head++) {
            const int64_t kv_head = head / (NH / config.NKV);
            // Queries, keys and values: (T, HS) each, with rows that are `stride` elements apart.
            const Real* queries = qkv + b * T * stride + head * HS;
            const Real* keys = qkv + b * T * stride + config.q_cols() + kv_head * HS;
            const Real* values = keys + config.kv_cols();
            const auto keys_transposed = transposed(keys, T, HS, stride);
            std::vector<Real> scores(T), p(T);
            for (int64_t t = 0; t < T; t++) {
                dot_products(HS, T, queries + t * stride, keys_transposed, t + 1, score_factor,
                             scores.data());
                const Real max_score = *std::max_element(scores.begin(), scores.begin() + t + 1);
                Real sum = 0;
                for (int64_t j = 0; j <= t; j++) {
                    p[j] = std::exp(scores[j] - max_score);
                    sum += p[j];
                }
                lse[(b * NH + head) * T + t] = max_score + std::log(sum);
                Real* y = out + ((b * T + t) * NH + head) * HS;
                std::fill(y, y + HS, Real(0));
                for (int64_t j = 0; j <= t; j++) add_scaled(HS, p[j] / sum, values + j * stride, y);
            }
        }
}

// The backward pass of attention_forward(). p is computed again from the saved log-sum-exp:
//   p_j = exp(q . k_j / sqrt(HS) - lse)
//   dp_j = dout . v_j,  ds_j = p_j (dp_j - dout . out) / sqrt(HS)
//   dv_j += p_j dout,  dq += ds_j k_j,  dk_j += ds_j q
// One thread computes all query heads that share a key/value head, so the sums dk and dv have a fixed order.
template <class Real>
void attention_backward(const ModelConfig& config, int64_t B, int64_t T, const Real* qkv, const Real* out,
                        const Real* lse, const Real* dout, Real* dqkv) {
    const int64_t HS = config.HS(), NH = config.NH;
    const int64_t queries_per_kv_head = NH / config.NKV;
    const int64_t stride = config.qkv_cols();  // elements from one token to the next
    const Real score_factor = 1 / std::sqrt(Real(HS));
    std::fill(dqkv, dqkv + B * T * stride, Real(0));
#pragma omp parallel for collapse(2)
    for (int64_t b = 0; b < B; b++)
        for (int64_t kv_head = 0; kv_head < config.NKV; kv_head++) {
            // Where the keys and values of this head begin in qkv, and the gradients of both in dqkv. Each is
            // (T, HS), with rows that are `stride` elements apart.
            const int64_t keys_at = b * T * stride + config.q_cols() + kv_head * HS;
            const int64_t values_at = keys_at + config.kv_cols();
            const Real* k = qkv + keys_at;
            Real *dk = dqkv + keys_at, *dv = dqkv + values_at;
            const auto keys_transposed = transposed(k, T, HS, stride);
            const auto values_transposed = transposed(qkv + values_at, T, HS, stride);
            std::vector<Real> scores(T), p(T), dp(T), ds(T);
            const int64_t first_head = kv_head * queries_per_kv_head;  // of its query heads
            for (int64_t head = first_head; head < first_head + queries_per_kv_head; head++)
                for (int64_t t = 0; t < T; t++) {
                    const int64_t query_at = (b * T + t) * stride + head * HS;
                    const int64_t output_at = ((b * T + t) * NH + head) * HS;
                    const Real *q = qkv + query_at, *dout_t = dout + output_at;
                    Real* dq = dqkv + query_at;
                    const Real lse_t = lse[(b * NH + head) * T + t];
                    const Real dout_out = dot(dout_t, out + output_at, HS);  // dout . out
                    dot_products(HS, T, q, keys_transposed, t + 1, score_factor, scores.data());
                    dot_products(HS, T, dout_t, values_transposed, t + 1, Real(1), dp.data());
                    for (int64_t j = 0; j <= t; j++) p[j] = std::exp(scores[j] - lse_t);
                    for (int64_t j = 0; j <= t; j++) ds[j] = p[j] * (dp[j] - dout_out) * score_factor;
                    for (int64_t j = 0; j <= t; j++) {
                        add_scaled(HS, p[j], dout_t, dv + j * stride);
                        add_scaled(HS, ds[j], q, dk + j * stride);
                        add_scaled(HS, ds[j], k + j * stride, dq);
                    }
                }
        }
}

// The loss and its gradient, which replaces the logits:
//   loss = log(sum_v exp(logit_v)) - logit_target,  dlogit_v = softmax(logits)_v - (v == target)
// Loss and gradient are 0 if a target is not scored (NO_TARGET). The gradient is multiplied by `loss_weight`.
template <class Real>
double cross_entropy_forward_and_backward(int64_t N, int64_t V, int64_t padded_V, Real* logits,
                                          const int32_t* targets, Real loss_weight) {
    std::vector<double> losses(N);
#pragma omp parallel for
    for (int64_t n = 0; n < N; n++) {
        Real* row = logits + n * padded_V;
        if (targets[n] == NO_TARGET) {
            std::fill(row, row + padded_V, Real(0));
            continue;
        }
        const Real max_logit = *std::max_element(row, row + V);
        const Real target_logit = row[targets[n]];
        Real sum = 0;
        for (int64_t v = 0; v < V; v++) {
            row[v] = std::exp(row[v] - max_logit);
            sum += row[v];
        }
        losses[n] = double(std::log(sum) + max_logit - target_logit);
        for (int64_t v = 0; v < V; v++) row[v] *= loss_weight / sum;
        row[targets[n]] -= loss_weight;
        std::fill(row + V, row + padded_V, Real(0));
    }
    return std::accumulate(losses.begin(), losses.end(), 0.0);
}

// ===========================================================================================================
// Templates

// The compiler generates the code of a template only where it is told to. Here it is told so for the callers
// in other files.
// clang-format off
#define INSTANTIATE(Real)                                                                                    \
    template void norm_forward(bool, double, int64_t, int64_t, const Real*, const Real*, const Real*,        \
                               Real*);                                                                       \
    template void norm_backward(bool, double, int64_t, int64_t, const Real*, const Real*, const Real*,       \
                                Real*, Real*, Real*);                                                        \
    template void qk_norms_forward(const ModelConfig&, int64_t, const Real*, Real*);                         \
    template void qk_norms_backward(const ModelConfig&, int64_t, const Real*, const Real*, Real*, Real*);    \
    template void activation_forward(bool, int64_t, int64_t, const Real*, Real*);                            \
    template void activation_backward(bool, int64_t, int64_t, const Real*, const Real*, Real*);              \
    template void rope(const ModelConfig&, int64_t, int64_t, Real*, bool);                                   \
    template void attention_forward(const ModelConfig&, int64_t, int64_t, const Real*, Real*, Real*);        \
    template void attention_backward(const ModelConfig&, int64_t, int64_t, const Real*, const Real*,         \
                                     const Real*, const Real*, Real*);                                       \
    template double cross_entropy_forward_and_backward(int64_t, int64_t, int64_t, Real*, const int32_t*,     \
                                                       Real);                                                \
    template void add_scaled(int64_t, Real, const Real*, Real*);
// clang-format on
INSTANTIATE(float)
INSTANTIATE(double)

}  // namespace coat::reference
