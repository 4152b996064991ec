// step.h - what the CPU and the GPU must agree on in a step, besides formats. The sections have the order of
// the parts of reference.cpp that use them, so a section can wait for its part:
//   1   stochastic rounding    round_stochastically()
//   2   QuantStats             quantize(). (QuantReport can wait for model.h)
//   3   AdamWOptions           adamw_constants()
//   4   NO_TARGET              cross_entropy_forward_and_backward()
#pragma once
#include "formats.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// Stochastic rounding of weights to BF16, if they have no FP32 master. (This section can wait.)

// 64 bits that look random, from a number. Nearby numbers give unrelated bits.
COAT_HD inline uint64_t mixed_bits(uint64_t number) {
    uint64_t z = number * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 32)) * 0x94D049BB133111EBull;
    return z ^ (z >> 29);
}
// A rounding is bf16 = (bits of the FP32 value + 16 random bits) >> 16. Its expected value is the FP32 value.
// So an update of less than half the spacing of BF16 values is not lost: it counts on average.
//
// The elements of all parameters have one order, the flat order (architecture.h, Param::flat_offset). This
// returns the random bits of its elements 4 quad to 4 quad + 3. The lowest 16 bits are for element 4 quad.
COAT_HD inline uint64_t rounding_bits(uint64_t key, uint64_t quad) { return mixed_bits(key + quad); }
// The key of one step. attempt: the number of the step, counting skipped ones. The lower 32 bits of the key
// are 0. In a model of at most 2^34 elements `quad` is below 2^32, so key + quad has the key's upper 32 bits.
// Two steps hardly ever have the same ones (on average 5 pairs in 200,000 steps).
inline uint64_t rounding_key(uint64_t seed, int64_t attempt) {
    return mixed_bits(seed * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(attempt)) << 32;
}

// -----------------------------------------------------------------------------------------------------------
// The statistics of quantization errors, by kind of tensor (QuantReport)

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

struct QuantReport {
    QuantStats kinds[static_cast<int>(ReportKind::Count)];
    std::vector<float> k_m, k_v;   // k of every moment group, of first and of second moments
    bool part_of_moments = false;  // only some of the moments of large parameters were measured
};

// -----------------------------------------------------------------------------------------------------------
// The settings of AdamW

// What a step of AdamW is given besides parameters and gradients.
struct AdamWOptions {
    int64_t step;  // the number of this update, for the bias correction: from 1, without skipped steps
    float lr, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
    // The largest norm that all gradients together may have; 0: no clipping.
    float clip = 1.0f;
    // How many steps before this one were skipped. step + skipped_steps is the `attempt` of rounding_key().
    int64_t skipped_steps = 0;
};

// -----------------------------------------------------------------------------------------------------------
// Targets of the loss

// A target that does not count, for example a token of a user's question: its loss and its gradient are 0.
// The loss of a step is the mean over the targets that count, in all micro-batches of all ranks. (A rank is
// one of the processes of a run: model.h.)
inline constexpr int32_t NO_TARGET = -1;

}  // namespace coat
