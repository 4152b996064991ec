// reference/optimizer.h - 3. FP8 optimizer with dynamic range expansion (paper, section 4).
#pragma once
#include "../common/architecture.h"
#include "../common/step.h"
#include "quantize.h"

namespace coat::reference {

// The format f of the next three functions is E4M3 or E5M2.

// k of a moment group. max_magnitude is its max, the largest |x|. min_magnitude is the smallest |x| that is
// not 0.
float expansion_exponent(Format f, float max_magnitude, float min_magnitude);
// x expanded. The result has the sign of x, and at most the magnitude FMAX.
float expand(Format f, float x, float max_magnitude, float k);
// The inverse of expand(). The result has the sign of y, and at most the magnitude max_magnitude.
float contract(Format f, float y, float max_magnitude, float k);

// One moment (n) of one parameter, in any format. The elements of a moment group share max and k. The
// last moment group may be short. A moment group of zeros has max = 0 and k = 1. x' is the value that is read
// back:
//   with expansion:  code = encode(expand(x)),  x' = contract(decode(code))
//   else:            code = encode(x / s),      x' = decode(code) * s,       with s = scale_of(max), and no k
// FP32 and BF16 moments have no moment groups, and their elements are values.
struct Moment {
    Format format = Format::FP32;
    bool uses_expansion = false;
    int64_t n = 0;
    bool is_second_moment = false;      // v, which must not become zero (store_with_scale() in optimizer.cpp)
    std::vector<uint8_t> elements;      // n elements of format
    std::vector<float> max_magnitudes;  // max of each moment group; empty if there are none
    std::vector<float> expansion_exponents;  // k of each moment group; empty without expansion

    Moment() = default;
    // A moment of `count` zeros. f: Param::moment_format().
    Moment(const OptimizerFormats& optimizer, Format f, int64_t count, bool second_moment);
    void load(float* x) const;  // the values that are read back; x: (n)
    // Stores x (n). stats: null, or where the errors are added if the format is FP8.
    void store(const float* x, QuantStats* stats = nullptr);

private:
    float value(int64_t i) const;
    // Of the moment group that begins with element `first`.
    int64_t end_of_moment_group(int64_t first) const { return std::min(n, first + MOMENT_GROUP_SIZE); }
    void store_moment_group(int64_t first, const float* x);
    void store_expanded(int64_t first, const float* x, float max_magnitude);
    void store_with_scale(int64_t first, const float* x, float max_magnitude);
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
float compute_clip_factor(const AdamWOptions& options, double grad_norm);
// The constants of one step for one parameter. decays: Param::decays() of the parameter.
AdamWConstants adamw_constants(const AdamWOptions& options, bool decays, float clip_factor);
// One step of AdamW. gradient, master, m, v: (n)
void adamw(const AdamWConstants& constants, int64_t n, const float* gradient, float* master, float* m,
           float* v);

}  // namespace coat::reference
