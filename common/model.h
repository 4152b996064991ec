// common/model.h - a training run: its settings, and the interface Model, which program/train.cpp drives.
// reference/model.cpp implements it on the CPU and model.cu on the GPU, independently, so that each checks
// the other.
#pragma once
#include <memory>

#include "known_models.h"
#include "quant_errors.h"
#include "step.h"

namespace coat {

class Communicator;  // how the ranks of a run exchange values (ranks.h)

// -----------------------------------------------------------------------------------------------------------
// The settings of a training run. A run has one or more ranks: processes with a GPU each, or with a part of
// the CPU. Every rank has its own micro-batches.

struct RunSettings {
    ModelConfig config;
    Recipe recipe;
    OptimizerFormats optimizer;
    int64_t B, T;                        // a micro-batch has B sequences of T tokens
    int64_t micro_batches_per_rank = 1;  // micro-batches of a step on each rank
    uint64_t seed = 1;
    // (The other members can wait.)
    //
    // Whether weights have FP32 masters. If not (--master none), the BF16 weights are rounded stochastically.
    bool keep_masters = true;
    // Whether the gradients of a whole step exist at the same time. If not (--gradients none), a GPU updates
    // parameters within backward, as soon as their gradients are complete.
    bool keep_gradients = true;
    int64_t rank = 0, ranks = 1;
    Communicator* communicator = nullptr;  // how ranks exchange values; null with one rank, and for a plan
};

// The micro-batches of a step on all ranks together.
inline int64_t micro_batches_of_step(const RunSettings& s) { return s.micro_batches_per_rank * s.ranks; }

inline LinearFormats linear_formats(const RunSettings& s) { return linear_formats(s.recipe, s.B * s.T); }

// The format in which gradients are summed over the micro-batches of a step. All parameters have the same
// format: the compute format if no sum has more than four gradients, else FP32. (Every addition to a BF16 sum
// rounds it, so its error grows with the number of gradients.) A micro-batch adds one gradient to the sum of
// a parameter. It adds two to the sum of an embedding that is also the head. For example, in a model with
// such an embedding:
//   2 micro-batches   4 gradients   BF16
//   3 micro-batches   6 gradients   FP32
// The micro-batches of all ranks count, so the format does not depend on the number of ranks. (On a GPU the
// sum of the head has a rule of its own: head_sum_in_fp32() in gpu/memory_layout.h.)
inline Format gradient_format(const RunSettings& s) {
    return micro_batches_of_step(s) * (s.config.tied ? 2 : 1) > 4 ? Format::FP32 : s.recipe.compute_format;
}

// (These checks can wait.) An Error if a run with these settings is not supported. The CPU has the limits of
// GPUs, too.
inline void require_supported(const RunSettings& s) {
    require_supported(s.config);
    if (s.T > s.config.longest_sequence())
        throw Error("--seq ", s.T, " is too long for ", s.config.name, "; use at most --seq ",
                    s.config.longest_sequence(), ".");
    // The second dimension of a GPU's grid counts sequences or tiles of 128 tokens, and has at most 65,535.
    if (s.B > 65535 || s.B * s.T > 128 * 65535)
        throw Error("--batch ", s.B, " with --seq ", s.T,
                    " is too large; use a smaller --batch and more --accumulate.");
    const bool groups = s.recipe.saved_attention.is_fp8();
    if (s.recipe.compute_format == Format::FP32 && (groups || !s.keep_masters))
        throw Error(groups ? "--attention groups" : "--master none", " needs BF16, but --recipe ",
                    s.recipe.name, " computes in FP32; leave it out, or choose --recipe coat.");
    if (!s.keep_gradients && s.micro_batches_per_rank > 1)
        throw Error("--gradients none cannot add up micro-batches; use --accumulate 1 and a larger --batch.");
    if (!s.keep_gradients && s.ranks > 1)
        throw Error(
            "--gradients none needs more memory, not less, if there are several ranks; leave it out.");
}

// -----------------------------------------------------------------------------------------------------------
// Model: the weights, gradients, moments and activations of one training run on one device.

// Tokens are in [0, V), targets in [0, V) or NO_TARGET; the caller has checked this. An unknown name of a
// tensor is an Error.
//
// With several ranks, every rank calls step(), validation_loss(), next_logits(), measure_quantization() and
// write() at the same time.
class Model {
public:
    virtual ~Model() = default;
    // One training step: forward, backward and update. tokens and targets: (micro_batches_per_rank, B, T), of
    // this rank. The result is that of all ranks.
    virtual StepResult step(const int32_t* tokens, const int32_t* targets, const AdamWOptions& options) = 0;
    // The mean loss of one micro-batch (B, T) of this rank, in nats per token, without gradients. It is 0 if
    // no target is scored, and NaN if the loss or a tensor that was quantized to FP8 was not finite.
    virtual double validation_loss(const int32_t* tokens, const int32_t* targets) = 0;
    // The logits (V) of the token that follows the first n, 1 <= n <= T.
    virtual void next_logits(const int32_t* tokens, int64_t n, float* logits) = 0;
    // Measures the errors of every quantization in forward and backward of one micro-batch (B, T). Nothing is
    // updated. The errors of moments are those that an update by these gradients would cause.
    virtual QuantReport measure_quantization(const int32_t* tokens, const int32_t* targets) = 0;
    // read() copies a tensor of the run's state (state_tensors.h) to `out`. write() copies it from `in`. Both
    // copy only the elements that this rank owns (ranks.h). With keep_gradients, read() also knows
    // "<param>.gradient" (FP32), the gradient of the last step, until the next forward pass.
    virtual void read(const std::string& name, void* out) = 0;
    virtual void write(const std::string& name, const void* in) = 0;
    virtual const RunSettings& settings() const = 0;
};

// On the CPU (reference/model.cpp). gpu/gpu_model.h has make_gpu_model().
std::unique_ptr<Model> make_reference_model(const RunSettings& settings);

}  // namespace coat
