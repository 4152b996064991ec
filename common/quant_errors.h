// common/quant_errors.h - the statistics of quantization errors: by how much quantizing changes the values of
// each kind of tensor. They are printed after a run. Training does not use them.
#pragma once
#include <cmath>
#include <vector>

#include "architecture.h"

namespace coat {

struct QuantStats {
    double signal = 0, noise = 0;  // sums of x^2 and of (x - dequantized x)^2
    int64_t elements = 0;
    // Elements that are cut off: |x| / scale is above FMAX by more than half the spacing of values there.
    int64_t saturated = 0;
    int64_t flushed = 0;  // elements that were not zero and became zero

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

// The kinds of tensors that the statistics tell apart.
// clang-format off
enum class MeasuredKind : uint8_t {
    NormInput, QkvAndOutput, ActivationInput, LinearInput, Weight, Gradient, Moment1, Moment2, Count
};
inline constexpr const char* MEASURED_KIND_NAMES[] = {
    "norm inputs", "q, k, v, output", "activation inputs", "linear inputs",
    "weights", "gradients", "first moments", "second moments"};
// clang-format on

// The kind of a linear layer's operand.
inline MeasuredKind measured_kind(OperandKind o) {
    if (o == OperandKind::X) return MeasuredKind::LinearInput;
    return o == OperandKind::W ? MeasuredKind::Weight : MeasuredKind::Gradient;
}

// The kind of a tensor that is saved for backward. (The log-sum-exp is never quantized.)
inline MeasuredKind measured_kind(SavedKind kind) {
    if (kind == SavedKind::Norm1Input || kind == SavedKind::Norm2Input) return MeasuredKind::NormInput;
    return kind == SavedKind::GateUp ? MeasuredKind::ActivationInput : MeasuredKind::QkvAndOutput;
}

// The errors of quantization in one micro-batch, and k of the moments.
struct QuantReport {
    QuantStats stats_by_kind[int(MeasuredKind::Count)];  // one for each MeasuredKind
    std::vector<float> k_m, k_v;        // k of every moment group, of first and of second moments
    bool moments_were_sampled = false;  // of large parameters only some moments were measured
};

}  // namespace coat
