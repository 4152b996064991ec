// reference/optimizer.cpp - 3. FP8 optimizer with dynamic range expansion (paper, section 4).
//
// The dynamic range of a format is its largest over its smallest positive value, R = FMAX / FMIN. For E4M3 R
// is 448 / 2^-9 = 229,376. The dynamic range of a moment group X is R_X = max|X| / min|X|, where min|X|
// leaves out zeros. R_X is often below 1,000, so the moment group uses only a part of E4M3's codes.
// Therefore the paper (section 4.2, equation 4) stretches the moment group to the dynamic range of the
// format before it is quantized, and contracts it afterwards. With max = max|X| and min = min|X|:
//   expand:    y = sign(x) FMAX (|x| / max)^k          k = log(R) / log(R_X)
//   quantize:  code = encode(y)
//   contract:  x' = sign(y') max (|y'| / FMAX)^(1/k)   y' = decode(code)
// So max becomes FMAX, and min becomes FMAX / R_X^k = FMAX / R = FMIN. (The paper first expands x to
// f(x) = sign(x) |x|^k, and then divides f(x) by the scale f(max) / FMAX. That is y.) If R_X is above R, k is
// below 1: the moment group is compressed instead, and loses a little precision.
//
// A moment group stores its codes, and max and k in FP32: these are 8 bytes for 128 codes. In code max and
// min are called max_magnitude and min_magnitude.
#include "optimizer.h"

#include <algorithm>

#include "arrays.h"

namespace coat::reference {

// k = log(R) / log(R_X), rounded to a multiple of 1/256, and limited to [1/16, 64].
//   - Rounding: logarithms of CPU and GPU differ in their last bits. After rounding, most k are the same on
//     both. (The released code rounds down to a multiple of 1/16, which costs precision.)
//   - The upper limit: if all magnitudes are equal, log(R_X) is 0. Then any k is exact, because all codes are
//     those of FMAX or -FMAX, and contract() gives max or -max. So k is 64. (It is also 64 where R_X is below
//     1.21.)
//   - The lower limit: the widest R_X of FP32, 2^277, has just this k in E4M3. So it changes no k.
float expansion_exponent(Format f, float max_magnitude, float min_magnitude) {
    const float k_min = 1.0f / 16.0f, k_max = 64.0f;
    const float log_R = std::log2(format_info(f).fmax) - std::log2(format_info(f).fmin);
    const float log_R_X = std::log2(max_magnitude) - std::log2(min_magnitude);
    if (log_R_X * k_max <= log_R) return k_max;  // also for log R_X = 0
    return std::max(std::rint(256.0f * log_R / log_R_X) / 256.0f, k_min);
}

// y = sign(x) FMAX (|x| / max)^k. The power is computed with logarithms, because |x| / max may underflow.
float expand(Format f, float x, float max_magnitude, float k) {
    if (x == 0) return 0.0f;
    const float power = std::exp2(k * (std::log2(std::abs(x)) - std::log2(max_magnitude)));
    return std::copysign(format_info(f).fmax * power, x);
}

// The inverse of expand(), for a decoded y: x = sign(y) max ratio, where ratio = (|y| / FMAX)^(1/k) is
// |x| / max. If R_X is very large, the ratio underflows in FP32, although max * ratio does not. So max is
// multiplied twice by the square root of the ratio. |x| is at least the smallest positive FP32 value: a
// second moment that is not zero must not become zero.
float contract(Format f, float y, float max_magnitude, float k) {
    if (y == 0) return 0.0f;
    const float log2_of_power = std::log2(std::abs(y)) - std::log2(format_info(f).fmax);  // power = ratio^k
    const float sqrt_of_ratio = std::exp2(log2_of_power / (2 * k));
    return std::copysign(std::max(max_magnitude * sqrt_of_ratio * sqrt_of_ratio, 0x1p-149f), y);
}

// Without expansion: the scale of a moment group. Moments are finite, because a step with gradients that are
// too large is skipped.
static float moment_scale(Format f, float max_magnitude) {
    return scale_of(TensorFormat{.element_format = f}, max_magnitude);
}

Moment::Moment(const OptimizerFormats& optimizer, Format f, int64_t count, bool second_moment)
    : format(f), uses_expansion(optimizer.uses_expansion(f)), n(count), is_second_moment(second_moment),
      elements(count * format_info(f).bytes), max_magnitudes(moment_group_count(f, count)),
      expansion_exponents(uses_expansion ? moment_group_count(f, count) : 0, 1.0f) {}

// Element i, decoded.
float Moment::value(int64_t i) const {
    const float y = read_element(format, elements.data(), i);
    if (!is_fp8(format)) return y;
    const int64_t moment_group = i / MOMENT_GROUP_SIZE;
    const float max_magnitude = max_magnitudes[moment_group];
    if (uses_expansion) return contract(format, y, max_magnitude, expansion_exponents[moment_group]);
    return y * moment_scale(format, max_magnitude);
}

void Moment::load(float* x) const {
#pragma omp parallel for if (n > MIN_PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < n; i++) x[i] = value(i);
}

// Stores x (n): by moment groups if the format is FP8, else as values.
void Moment::store(const float* x, QuantStats* stats) {
    if (!is_fp8(format)) {
#pragma omp parallel for if (n > MIN_PARALLEL_ELEMENTS)
        for (int64_t i = 0; i < n; i++) write_element(format, elements.data(), i, x[i]);
        return;
    }
#pragma omp parallel for if (n > MIN_PARALLEL_ELEMENTS)
    for (int64_t first = 0; first < n; first += MOMENT_GROUP_SIZE) store_moment_group(first, x);
    if (!stats) return;
    for (int64_t i = 0; i < n; i++) add_error(*stats, x[i], value(i));
}

// Stores the moment group that begins with element `first`.
void Moment::store_moment_group(int64_t first, const float* x) {
    float max_magnitude = 0;
    for (int64_t i = first; i < end_of_moment_group(first); i++)
        max_magnitude = std::max(max_magnitude, std::abs(x[i]));
    max_magnitudes[first / MOMENT_GROUP_SIZE] = max_magnitude;
    if (uses_expansion) store_expanded(first, x, max_magnitude);
    else store_with_scale(first, x, max_magnitude);
}

// The k and the codes of a moment group, with expansion.
//
// A second moment that became zero would make the next update explode, because the update divides by
// sqrt(v) + eps. But no value becomes zero here. The smallest magnitude is expanded to FMAX R_X^(-k), which
// is FMIN if k is exact. k is rounded up by at most 1/512, and R_X is at most 2^277. So the smallest
// magnitude becomes at least FMIN R_X^(-1/512) = 0.69 FMIN, and is rounded to FMIN.
void Moment::store_expanded(int64_t first, const float* x, float max_magnitude) {
    const int64_t end = end_of_moment_group(first);
    float min_magnitude = INFINITY;  // leaving out zeros
    for (int64_t i = first; i < end; i++)
        if (x[i] != 0) min_magnitude = std::min(min_magnitude, std::abs(x[i]));
    const bool all_zeros = max_magnitude == 0;
    const float k = all_zeros ? 1.0f : expansion_exponent(format, max_magnitude, min_magnitude);
    expansion_exponents[first / MOMENT_GROUP_SIZE] = k;
    for (int64_t i = first; i < end; i++)
        write_element(format, elements.data(), i, expand(format, x[i], max_magnitude, k));
}

// (This can wait: only the optimizer `fp8` needs it.) The codes of a moment group without expansion. A
// positive second moment gets at least the smallest positive code, that of FMIN.
void Moment::store_with_scale(int64_t first, const float* x, float max_magnitude) {
    const float reciprocal = 1.0f / moment_scale(format, max_magnitude);
    for (int64_t i = first; i < end_of_moment_group(first); i++) {
        write_element(format, elements.data(), i, x[i] * reciprocal);
        const bool became_zero = x[i] > 0 && read_element(format, elements.data(), i) == 0;
        if (is_second_moment && became_zero)
            write_element(format, elements.data(), i, format_info(format).fmin);
    }
}

float compute_clip_factor(const AdamWOptions& options, double grad_norm) {
    const bool clips = options.clip > 0 && grad_norm > options.clip;
    return clips ? float(options.clip / grad_norm) : 1.0f;
}

// Powers of beta are computed in double.
AdamWConstants adamw_constants(const AdamWOptions& options, bool decays, float clip_factor) {
    const double t = double(options.update_number);
    return {.lr = options.lr,
            .beta1 = options.beta1,
            .beta2 = options.beta2,
            .one_minus_beta1 = 1 - options.beta1,
            .one_minus_beta2 = 1 - options.beta2,
            .eps = options.eps,
            .decay = decays ? options.weight_decay : 0.0f,
            .bias_correction1 = float(1 - std::pow(double(options.beta1), t)),
            .bias_correction2_sqrt = float(std::sqrt(1 - std::pow(double(options.beta2), t))),
            .clip_factor = clip_factor};
}

// One AdamW step in FP32, with the clipped gradient g:
//   m = b1 m + (1 - b1) g          m_hat = m / (1 - b1^t)
//   v = b2 v + (1 - b2) g^2        v_hat = v / (1 - b2^t)
//   w = w - lr (m_hat / (sqrt(v_hat) + eps) + decay w)
// Weight decay is decoupled, and eps is outside the root, as in torch.optim.AdamW. The weight is updated with
// the m and v that are not quantized yet.
void adamw(const AdamWConstants& constants, int64_t n, const float* gradient, float* master, float* m,
           float* v) {
#pragma omp parallel for if (n > MIN_PARALLEL_ELEMENTS)
    for (int64_t i = 0; i < n; i++) {
        const float g = gradient[i] * constants.clip_factor;
        m[i] = constants.beta1 * m[i] + constants.one_minus_beta1 * g;
        v[i] = constants.beta2 * v[i] + constants.one_minus_beta2 * (g * g);
        const float m_hat = m[i] / constants.bias_correction1;
        const float v_hat_sqrt = std::sqrt(v[i]) / constants.bias_correction2_sqrt;
        const float update = m_hat / (v_hat_sqrt + constants.eps);
        master[i] -= constants.lr * (update + constants.decay * master[i]);
    }
}

}  // namespace coat::reference
