// model.h - a training run: its settings, and the interface Model, which program/train.cpp drives.
// reference_model.cpp implements it on the CPU and model.cu on the GPU, independently, so that each checks
// the other. The sections after Model can wait: they matter with several ranks, or to a checkpoint. They say
// what a rank owns, how ranks exchange values, and how the tensors of a run are called.
#pragma once
#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <type_traits>

#include "architecture.h"
#include "step.h"

namespace coat {

class Communicator;  // how the ranks of a run exchange values: below

// -----------------------------------------------------------------------------------------------------------
// The settings of a training run. A run has one or more ranks: processes with a GPU each, or with a part of
// the CPU. Every rank has its own micro-batches.

struct Setup {
    ModelConfig config;
    Recipe recipe;
    Optimizer optimizer;
    int64_t B, T;                        // a micro-batch has B sequences of T tokens
    int64_t micro_batches_per_rank = 1;  // micro-batches of a step on each rank
    uint64_t seed = 1;
    // Whether weights have FP32 masters. If not (--master none), the BF16 weights are rounded stochastically.
    bool keep_masters = true;
    // Whether the gradients of a whole step exist at the same time. If not (--gradients none), a GPU updates
    // parameters within backward, as soon as their gradients are complete.
    bool keep_gradients = true;
    int64_t rank = 0, ranks = 1;
    Communicator* communicator = nullptr;  // how ranks exchange values; null with one rank, and for a plan
};

// The micro-batches of a step on all ranks together.
inline int64_t micro_batches_of_step(const Setup& s) { return s.micro_batches_per_rank * s.ranks; }

inline LinearFormats linear_formats(const Setup& s) { return linear_formats(s.recipe, s.B * s.T); }

// Error if a run with these settings is not supported. The CPU has the limits of GPUs, too.
inline void require_supported(const Setup& s) {
    require_supported(s.config);
    if (s.T > s.config.longest_sequence())
        throw Error("--seq ", s.T, " is too long for ", s.config.name, "; use at most --seq ",
                    s.config.longest_sequence(), ".");
    // The second dimension of a GPU's grid counts sequences or tiles of 128 tokens, and has at most 65,535.
    if (s.B > 65535 || s.B * s.T > 128 * 65535)
        throw Error("--batch ", s.B, " with --seq ", s.T,
                    " is too large; use a smaller --batch and more --accumulate.");
    const bool groups = s.recipe.saved_attention.fp8();
    if (s.recipe.compute == Format::FP32 && (groups || !s.keep_masters))
        throw Error(groups ? "--attention groups" : "--master none", " needs BF16, but --recipe ",
                    s.recipe.name, " computes in FP32; leave it out, or choose --recipe coat.");
    if (!s.keep_gradients && s.micro_batches_per_rank > 1)
        throw Error("--gradients none cannot add up micro-batches; use --accumulate 1 and a larger --batch.");
    if (!s.keep_gradients && s.ranks > 1)
        throw Error(
            "--gradients none needs more memory, not less, if there are several ranks; leave it out.");
    if (s.ranks > 1 && s.optimizer.per_tensor)
        throw Error("--optimizer ", s.optimizer.name,
                    " has one scale for a whole tensor, but each rank holds only a part of it; "
                    "use one rank, or another --optimizer.");
}

// The format in which gradients are summed over the micro-batches of a step. All parameters have the same
// format: the compute dtype if no sum has more than four gradients, else FP32, because every addition to a
// BF16 sum rounds it. A micro-batch adds one gradient to the sum of a parameter. It adds two to the sum of an
// embedding that is also the head. For example, in a model with such an embedding:
//   2 micro-batches   4 gradients   BF16
//   3 micro-batches   6 gradients   FP32
// The micro-batches of all ranks count, so the format does not depend on the number of ranks. (On a GPU the
// sum of the head has a rule of its own: head_sum_in_fp32() in gpu/memory_layout.h.)
inline Format gradient_format(const Setup& s) {
    return micro_batches_of_step(s) * (s.config.tied ? 2 : 1) > 4 ? Format::FP32 : s.recipe.compute;
}

// -----------------------------------------------------------------------------------------------------------
// Model: the weights, gradients, moments and activations of one training run on one device.

struct StepResult {
    double loss;       // nats per token: the mean over all targets of the step that count
    double grad_norm;  // of all gradients, before clipping
    // Whether the step was abandoned, for one of these reasons:
    //   - the loss, a gradient or a tensor that was quantized to FP8 was not finite;
    //   - the norm after clipping was 2^62 or more;
    //   - no target counts.
    // In all three cases nothing was updated. (With --gradients none a GPU may have updated a part of the
    // parameters before it noticed the reason.)
    bool skipped;
    int64_t target_count = 0;  // targets that count, in all micro-batches of all ranks
};

// The errors of quantization in one micro-batch, and k of the moments.
struct QuantReport {
    QuantStats kinds[static_cast<int>(ReportKind::Count)];
    std::vector<float> k_m, k_v;        // k of every moment group, of first and of second moments
    bool moments_were_sampled = false;  // of large parameters only some moments were measured
};

// The number of targets that count.
inline int64_t counted_targets(const int32_t* targets, int64_t n) {
    return n - std::count(targets, targets + n, NO_TARGET);
}
// The number by which the sum of the losses of n targets is divided to give their mean: at least 1.
inline double divisor_of_mean(const int32_t* targets, int64_t n) {
    return static_cast<double>(std::max<int64_t>(1, counted_targets(targets, n)));
}

// Tokens are in [0, V), targets in [0, V) or NO_TARGET; the caller has checked this. An unknown name of a
// tensor is an Error.
//
// With several ranks, every rank calls step(), evaluate(), next_logits(), measure_quantization() and write()
// at the same time.
class Model {
public:
    virtual ~Model() = default;
    // One training step: forward, backward and update. tokens and targets: (micro_batches_per_rank, B, T), of
    // this rank. The result is that of all ranks.
    virtual StepResult step(const int32_t* tokens, const int32_t* targets, const AdamWOptions& options) = 0;
    // The mean loss of one micro-batch (B, T) of this rank, in nats per token, without gradients. It is 0 if
    // no target counts, and NaN if the loss or a tensor that was quantized to FP8 was not finite.
    virtual double evaluate(const int32_t* tokens, const int32_t* targets) = 0;
    // The logits (V) of the token that follows the first n, 1 <= n <= T.
    virtual void next_logits(const int32_t* tokens, int64_t n, float* logits) = 0;
    // Measures the errors of every quantization in forward and backward of one micro-batch (B, T), and those
    // of the moments that an update with the default betas would store. k_m and k_v belong to the moments
    // that are stored now. Nothing is updated.
    virtual QuantReport measure_quantization(const int32_t* tokens, const int32_t* targets) = 0;
    // read() copies a tensor of weight_tensors() or tensors_besides_weights() to `out`. write() copies it
    // from `in`. Both copy only the elements that this rank owns (owned()). With keep_gradients, read() also
    // knows "<param>.gradient" (FP32), the gradient of the last step, until the next forward pass.
    virtual void read(const std::string& name, void* out) = 0;
    virtual void write(const std::string& name, const void* in) = 0;
    virtual const Setup& setup() const = 0;
};

// On the CPU (reference_model.cpp).
std::unique_ptr<Model> make_reference_model(const Setup& setup);
// After this call the allocator of this process returns no memory to the system. Every step on the CPU
// allocates the same temporary tensors: a third of the time would go into fresh pages.
void keep_freed_memory();
// The following are in gpu/make_gpu_model.cpp or, in a program that is built without CUDA, in
// gpu/no_cuda.cpp.
// On a GPU. It is an Error if this machine has no GPU that can run it.
std::unique_ptr<Model> make_gpu_model(const Setup& setup);
bool built_with_cuda();
// Why GPU number `gpu` cannot be used, and what to do; empty if it can be used.
std::string why_no_gpu(int gpu = 0);
// The compute capability of the GPU that why_no_gpu() was asked for: 90 is 9.0. 0 in a program without CUDA.
int gpu_capability();

// -----------------------------------------------------------------------------------------------------------
// What a rank owns. (With one rank it is everything.)
//   a matrix   is divided among the ranks, as in ZeRO-3. A rank updates the weights, masters and moments of
//              its part. On a GPU a rank stores nothing but its part, and gathers a whole matrix just before
//              the matrix is used. On the CPU every rank has all weights, and after each update it sends the
//              weights of its part to the others
//   a vector   is small: every rank owns the whole vector, and computes the same update

// A matrix is cut only at multiples of SHARD_UNIT elements.
//   - So no moment group is cut.
//   - Sums over a matrix are the same for any number of ranks, because each shard unit is summed first.
//   - If a matrix has fewer shard units than there are ranks, some ranks own nothing of it.
inline constexpr int64_t SHARD_UNIT = 64 * MOMENT_GROUP_SIZE;

struct Range {  // consecutive elements
    int64_t first, count;
};

// The elements of a parameter that a rank owns.
inline Range owned(const Param& p, int64_t rank, int64_t ranks) {
    if (p.is_vector()) return {.first = 0, .count = p.size()};
    const int64_t units = ceil_div(p.size(), SHARD_UNIT);
    const int64_t begin = std::min(p.size(), (units * rank / ranks) * SHARD_UNIT);
    const int64_t end = std::min(p.size(), (units * (rank + 1) / ranks) * SHARD_UNIT);
    return {.first = begin, .count = end - begin};
}
inline Range owned(const Setup& s, const Param& p) { return owned(p, s.rank, s.ranks); }
// The number of elements with the padding that completes the last moment group.
inline int64_t padded_count(const Range& r) { return round_up(r.count, MOMENT_GROUP_SIZE); }

// -----------------------------------------------------------------------------------------------------------
// How the ranks of a run exchange small values, and notice that one has ended. A model and a checkpoint use
// this interface; program/ implements it.

using Bytes = std::vector<uint8_t>;

class Communicator {
public:
    virtual ~Communicator() = default;
    virtual int local_rank() const = 0;  // this rank's number among those of its machine
    // Whether the ranks are threads of one process, as in tests, and share its addresses.
    bool ranks_are_threads = false;

    // Every rank calls this at the same time. It returns what the ranks have given, by rank, on every rank. A
    // Value is a number or a struct; or a vector or string, which may have another length on each rank.
    template <class Value> std::vector<Value> all_gather(const Value& mine);
    // As all_gather(), for bytes. If `on_all` is false, rank 0 alone gets the bytes.
    virtual std::vector<Bytes> gather(const Bytes& mine, bool on_all) = 0;

    // Waits until done() is true; done() may sleep for some milliseconds. If another rank ends meanwhile, so
    // does this process.
    virtual void wait_until(const std::function<bool()>& done) = 0;
    // Ends all ranks with exit code 1, after rank 0 has printed this sentence once.
    [[noreturn]] virtual void fail(const std::string& sentence) = 0;
};

template <class Value> std::vector<Value> Communicator::all_gather(const Value& mine) {
    std::vector<Value> all;
    if constexpr (std::is_trivially_copyable_v<Value>) {
        for (const std::vector<Value>& theirs : all_gather(std::vector<Value>{mine}))
            all.push_back(theirs[0]);
    } else {
        const auto* bytes = reinterpret_cast<const uint8_t*>(mine.data());
        for (const Bytes& theirs : gather(Bytes(bytes, bytes + mine.size() * sizeof(mine[0])), true)) {
            all.emplace_back(theirs.size() / sizeof(mine[0]), typename Value::value_type{});
            if (!theirs.empty()) std::memcpy(&all.back()[0], theirs.data(), theirs.size());
        }
    }
    return all;
}

// -----------------------------------------------------------------------------------------------------------
// State: all tensors that a run needs to resume, by name. CPU and GPU have the same tensors. (This section
// can wait: the names are for checkpoints.)

struct StateTensor {
    // The weight has the name of its parameter. The other tensors of the parameter have this name and a
    // suffix: ".remainder", ".m", ".v", ".m.max", ".m.k", ".x.scale", ...
    std::string name;
    const char* dtype;  // its name in safetensors files
    int bytes;          // of an element
    std::vector<int64_t> shape;
    Param param;
    // How many consecutive elements of the parameter share one element of this tensor; ALL: all elements. For
    // example, the 128 elements of a moment group share the max of their moment scaling.
    int64_t shared_by = 1;
    static constexpr int64_t ALL = 0;

    int64_t size() const {
        return std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>());
    }
    int64_t total_bytes() const { return size() * bytes; }
};

// Only a mistake in the code that calls Model::read() or write() leads here.
[[noreturn]] inline void throw_no_such_tensor(const std::string& name) {
    throw Error("The model has no tensor ", name, ".");
}

// The index of the parameter that a state tensor belongs to: of "layers.0.qkv" for "layers.0.qkv.m.max". Of
// all names of parameters, that of this parameter is the longest prefix of the tensor's name. The table has
// "layers.0.qkv.bias" after "layers.0.qkv", so the last match is the longest.
inline size_t param_index_of(const std::vector<Param>& params, const std::string& tensor) {
    size_t best = params.size();
    for (size_t i = 0; i < params.size(); i++)
        if ((tensor + ".").starts_with(params[i].name + ".")) best = i;
    if (best == params.size()) throw_no_such_tensor(tensor);
    return best;
}

inline std::vector<StateTensor> weight_tensors(const ModelConfig& config) {
    std::vector<StateTensor> table;
    for (const Param& p : parameters(config))
        table.push_back({.name = p.name, .dtype = "BF16", .bytes = 2, .shape = {p.rows, p.cols}, .param = p});
    return table;
}

// What follows the weight's name in the names of the operand's state tensors.
inline const char* suffix_of(OperandKind o) {
    if (o == OperandKind::X) return ".x";
    return o == OperandKind::W ? ".w" : ".g";
}

// The state of delayed scaling (formats.h, Scaling), for each operand of a linear layer: the amaxes of the
// last steps, the newest first, and the scale of the next step. All are 0 before the first step.
inline std::vector<StateTensor> delayed_scaling_tensors(const ModelConfig& config, const Recipe& r) {
    std::vector<StateTensor> table;
    auto add = [&](const Param& p, const std::string& suffix, int64_t size) {
        table.push_back({.name = p.name + suffix,
                         .dtype = "F32",
                         .bytes = 4,
                         .shape = {size},
                         .param = p,
                         .shared_by = StateTensor::ALL});
    };
    for (const Param& p : parameters(config)) {
        if (r.scaling != Scaling::Delayed || !p.role.quantized_linear) continue;
        for (OperandKind o : LINEAR_OPERANDS) {
            add(p, concat(suffix_of(o), ".history"), r.history_steps);
            add(p, concat(suffix_of(o), ".scale"), 1);
        }
    }
    return table;
}

// The remainders of the masters, the moments with their moment scalings, and the state of delayed scaling. A
// BF16 weight and its signed 16-bit remainder are the FP32 master (reference.cpp, split_master).
inline std::vector<StateTensor> tensors_besides_weights(const Setup& s) {
    std::vector<StateTensor> table;
    for (const Param& p : parameters(s.config)) {
        auto add = [&](const std::string& suffix, const char* dtype, int bytes, std::vector<int64_t> shape,
                       int64_t shared_by) {
            table.push_back({.name = p.name + suffix,
                             .dtype = dtype,
                             .bytes = bytes,
                             .shape = std::move(shape),
                             .param = p,
                             .shared_by = shared_by});
        };
        if (s.keep_masters) add(".remainder", "I16", 2, {p.rows, p.cols}, 1);
        for (const auto& [moment, wanted] :
             {std::pair<std::string, Format>{".m", s.optimizer.m}, {".v", s.optimizer.v}}) {
            const Format f = p.moment_format(wanted);
            const int64_t moment_groups = s.optimizer.moment_group_count(f, p.size());
            const int64_t shared_by = s.optimizer.per_tensor ? StateTensor::ALL : MOMENT_GROUP_SIZE;
            add(moment, info(f).safetensors_dtype, info(f).bytes, {p.rows, p.cols}, 1);
            if (moment_groups) add(moment + ".max", "F32", 4, {moment_groups}, shared_by);
            if (s.optimizer.uses_expansion(f)) add(moment + ".k", "F32", 4, {moment_groups}, shared_by);
        }
    }
    for (const StateTensor& t : delayed_scaling_tensors(s.config, s.recipe)) table.push_back(t);
    return table;
}

// The elements of a state tensor that this rank owns: those that belong to its part of the parameter. Every
// rank owns a value that all elements of a parameter share. Model::read() and write() pass the owned
// elements.
inline Range owned(const Setup& s, const StateTensor& t) {
    if (t.shared_by == StateTensor::ALL) return {.first = 0, .count = t.size()};
    const Range part = owned(s, t.param);
    const int64_t first = ceil_div(part.first, t.shared_by);
    const int64_t end = ceil_div(part.first + part.count, t.shared_by);
    return {.first = first, .count = end - first};
}

}  // namespace coat
