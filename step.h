// step.h - what a training step is given besides tokens and weights, and what is measured of its
// quantization: types that operators and models share, on the CPU and on the GPU.
#pragma once
#include "formats.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// Targets of the loss

// A target that does not count, for example a token of a user's question: its loss and its gradient are 0.
// The loss of a step is the mean over the targets that count, in all micro-batches of all ranks. (A rank is
// one of the processes of a run: model.h.)
inline constexpr int32_t NO_TARGET = -1;

// -----------------------------------------------------------------------------------------------------------
// The settings of AdamW

// What a step of AdamW is given besides parameters and gradients.
struct AdamWOptions {
    int64_t update_number;  // from 1, not counting skipped steps; for the bias correction
    float lr, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
    // The largest norm that all gradients together may have; 0: no clipping.
    float clip = 1.0f;
    // How many steps before this one were skipped. Weights without a master are rounded with random bits that
    // depend on the number of the step, which is update_number + skipped_steps (rounding_key(), in
    // architecture.h).
    int64_t skipped_steps = 0;
};

// -----------------------------------------------------------------------------------------------------------
// The statistics of quantization errors. (This section can wait: it is for the print-out after a run.)

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

// The kinds of tensors that the statistics tell apart. Attention: q, k, v and attention's output.
// clang-format off
enum class ReportKind : uint8_t {
    NormInput, Attention, ActivationInput, LinearInput, Weight, Gradient, Moment1, Moment2, Count
};
inline constexpr const char* REPORT_KIND_NAMES[] = {
    "norm inputs", "q, k, v, output", "activation inputs", "linear inputs",
    "weights", "gradients", "first moments", "second moments"};
// clang-format on

// The kind of a linear layer's operand.
inline ReportKind report_kind(OperandKind o) {
    if (o == OperandKind::X) return ReportKind::LinearInput;
    return o == OperandKind::W ? ReportKind::Weight : ReportKind::Gradient;
}

}  // namespace coat
