// gpu/state.h - what one GPU keeps of a training run, for the host: the map of its memory (MemoryMap), the
// allocation and the stream of the computation (GpuContext), the amaxes and scales of operands (AmaxTable),
// and by parameter weights, gradients and moments with their update (Parameters). What the other GPUs of a
// run do has an interface of its own, Sharding (gpu/sharding.h). How a checkpoint reads and writes all of
// this is in gpu/state_tensors.h.
//
// N is the number of tokens of the pass that runs: B * T, or the length of a prompt. What else is used of
// other files:
//
//   gpu/cuda.h           the stream, and the dry run that finds out how much memory a run needs
//   gpu/arena.h          Arena, the allocation
//   gpu/operators.h      what is in the memory: AmaxAndScale, RowStatistics, Weights, Shard, MomentRef and
//                        GradientState; and the words shard, bucket and rank's order
//   gpu/layers.h         TokenRows, for the gradient of the embedding
//   gpu/memory_layout.h  two tables: ShardPlace, by parameter, and BucketRange, by bucket; and
//                        gradients_offset()
//
// With one rank, a shard is a whole parameter, and the rank's order is the order of the parameters. What is
// said of other ranks can wait.
#pragma once
#include <map>
#include <memory>
#include <optional>

#include "arena.h"
#include "cuda.h"
#include "layers.h"
#include "memory_layout.h"
#include "parameter_kernels.h"

namespace coat::gpu {

class Sharding;

// -----------------------------------------------------------------------------------------------------------
// Memory

// What a step finds out, on the device. The host clears it before the step and fetches it at the end.
struct StepOutcome {
    double loss;         // the sum of the losses so far, times Scalars::loss_weight
    double loss_or_nan;  // `loss`; or NaN, if FP8 codes have hidden a value that is not finite
    GradientState gradient_state;
    uint32_t empty_histories;  // delayed scaling: how many operands have had no amax yet
};
// The few numbers that the host and the GPU exchange in a step, on the device.
struct Scalars {
    StepOutcome outcome;
    // From the host: 1 / the number of targets that count, because the loss of a step is a mean.
    double loss_weight;
    // The errors of quantization, while they are measured: one for each ReportKind that comes before moments.
    QuantStats quant_stats[int(ReportKind::Moment1)];
};

// Where everything is that lasts for the run. In the allocation, from its beginning:
//
//   scalars | cuBLASLt's scratch | sums of squares and [what else other ranks write] |
//   weights | remainders of masters | AdamW's table | amax table | histories | moments |
//   saved activations and gradients | tokens, targets, token order | dresidual |
//   norms' sums and statistics | losses | cos, sin | [FP8 weights, if they are cached]
//
// After that comes what a step allocates where it uses it (Arena::Scope): the operands of one linear layer,
// gradients of activations, logits.
//
// Gradients of weights. Backward writes them where the update reads them. Usually they lie over the saved
// activations:
//
//     forward writes the layers from left to right, backward needs them from right to left
//   +---------+---------+-- ... --+-----------+
//   | layer 0 | layer 1 |         | layer L-1 |  activations
//   +---------+---------+-- ... --+-----------+
//             | embedding | layer 0 | layer 1 | ... | layer L-1 | head |  gradients
//             +-----------+---------+---------+-----+-----------+------+
//             ^ gradients_offset()
//
// The gradients begin as far left as possible. Two conditions limit this: the gradients of layer l begin
// after the activations of the layers 0 to l, which backward still needs when it writes these gradients; and
// those of the head begin after all activations.
//
// In other runs:
//   several micro-batches a rank   all gradients lie after the activations, because their sums outlive the
//                                  next forward
//   a tied embedding               all gradients lie after the activations: the gradient of the embedding is
//                                  the first of them, but the head writes to it before all others
//   --gradients none               there is one buffer, which all buckets use in turn: a bucket is updated as
//                                  soon as its gradients are complete
//   several ranks                  where gradients lie with one rank, the sums of the step lie, of what this
//                                  rank owns. Backward writes to two buffers, one for even and one for odd
//                                  buckets: while one bucket travels, the next is computed
// If there are buffers, the gradient of a tied embedding has one of its own, because the head writes it
// before all others.
struct MemoryMap {
    Scalars* scalars;
    StepOutcome* outcome() const { return &scalars->outcome; }  // on the device
    void* gemm_scratch;                                         // CublasGemms::SCRATCH bytes

    // For the norm of gradients, (ranks, 1 + shard units): the row of a rank has the rank's loss, and then
    // the sums of squares of what the rank owns.
    double* loss_and_squares;
    // What else other ranks write here, if there are several. (They find these places and loss_and_squares,
    // because on all ranks they are equally far from the beginning of the allocation.)
    struct Received {
        uint32_t* flags;       // two for each rank (gpu/transport.h)
        uint8_t* gradients;    // the other ranks' gradients of the part of a bucket that this rank owns
        uint8_t* weights[2];   // the matrices of an even module, and of an odd one
        AmaxAndScale* amaxes;  // (ranks, amax_count): the tables of all ranks
    } received;

    // What this rank owns, in the rank's order
    Weights weights;
    Shard* shards;                                         // AdamW's table of parameters
    std::vector<MomentRef> first_moments, second_moments;  // by parameter
    void* moments_begin;    // where all moments and their moment scalings begin
    int64_t moments_bytes;  // how many bytes they take together

    // See AmaxTable
    AmaxAndScale* amax_table;  // (amax_count)
    int64_t amax_count;
    float* histories;  // (operands, linear layers, Recipe::history_steps): with delayed scaling

    uint8_t* saved_activations;                 // L layers of saved_layer_bytes() each
    std::vector<uint8_t*> owned_gradient_sums;  // by bucket: what the update reads
    std::vector<uint8_t*> gradients_to_write;   // by bucket: what backward writes; with one rank the same

    // For the pass that runs, which has at most as many tokens as a micro-batch
    int32_t *tokens, *targets;  // (N)
    int32_t* token_order;       // (N) for the embedding's gradient: row numbers, sorted by token
    TokenRows* token_rows;      // (N at most) for each token that occurs: its rows in token_order
    void* dresidual;            // (N, C) the gradient of the residual stream; before, the final norm's input
    float* norm_partials;       // norm_backward_workspace_floats()
    RowStatistics* norm_statistics;  // (N) the row statistics of the norm that ran last
    float* losses;                   // (N)

    float2* rope_table;  // (T, HS / 2) {cos, sin}, for the whole run
};

// This rank's GPU: the settings of the run, the table of its parameters (architecture.h), the stream of the
// computation and the allocation.
struct GpuContext {
    const Setup setup;
    const std::vector<Param> params = parameters(setup.config);
    const Stream stream;
    Arena arena;
    // While quantization is measured, what it has lost so far. Otherwise both are null.
    QuantStats* quant_stats = nullptr;    // on the device, by ReportKind, of all but moments
    QuantReport* quant_report = nullptr;  // on the host: of moments

    // bytes: the size of the allocation; 0: a dry run, in which the stream is DRY_RUN.
    GpuContext(const Setup& s, int64_t bytes) : setup(s), stream(bytes == 0), arena(bytes) {}

    // Waits until the stream has run all that was put on it. what: how the Error begins if something has
    // failed. (With several ranks: if another rank has ended, this process ends too.)
    void wait(const char* what = "The GPU failed") const;
    // Copies between the host and this GPU. Both functions first call wait().
    // wait_then_start_copy_to_gpu() only starts its copy, so what it reads must stay until the next wait().
    // copy_to_host() returns when its copy is complete.
    void wait_then_start_copy_to_gpu(void* to_gpu, const void* from_host, int64_t bytes) const;
    void copy_to_host(void* to_host, const void* from_gpu, int64_t bytes) const;

    QuantStats* quant_stats_of(ReportKind kind) const {
        return quant_stats ? quant_stats + int(kind) : nullptr;
    }
};

// Allocates what lasts for the run.
MemoryMap allocate_memory(GpuContext& context);

// -----------------------------------------------------------------------------------------------------------
// The amaxes of the weights and operands of linear layers: a table on the device. An entry has an amax, and
// the scale that follows from this amax (AmaxAndScale). The table has an entry for
//
//   each parameter | the operand x of each linear layer | the operand w of each | the operand g of each
//
// The amax of a linear layer's weight is in the entry of this parameter, where the update leaves it. Only the
// weights of linear layers have amaxes: the entries of other parameters are not used.
//
// With delayed scaling (te), scales follow from histories of amaxes. Then the amax of a weight is in the
// entry of the operand w, which is not used otherwise.

class AmaxTable {
public:
    AmaxTable(const GpuContext& context, const MemoryMap& memory);

    const int64_t param_count;
    const int64_t linear_layer_count;
    // Delayed scaling: whether a history of amaxes may still be empty. An operand whose history is empty is
    // scaled just in time. After a step that has found no empty history and was not skipped, this is false.
    bool any_empty_history = false;

    int64_t count() const { return count_; }
    AmaxAndScale* all() const { return entries_; }
    AmaxAndScale* of_parameter(size_t i) const { return entries_ + i; }
    AmaxAndScale* of_operand(OperandKind o, int64_t linear_layer) const {
        return entries_ + param_count + index_of(o, linear_layer);
    }
    // The entry that a linear layer uses for its weight, parameter i.
    AmaxAndScale* of_weight(size_t i, int64_t linear_layer) const {
        return delayed() ? of_operand(OperandKind::W, linear_layer) : of_parameter(i);
    }
    float* history(OperandKind o, int64_t linear_layer) const {
        return histories_ + index_of(o, linear_layer) * setup_.recipe.history_steps;
    }
    bool delayed() const { return setup_.recipe.scale_source == ScaleSource::Delayed; }

    // Clears amaxes, scales and histories, for a run that begins.
    void clear();
    // Clears the amaxes of operands: before each micro-batch, or before each step if scaling is delayed. (The
    // amaxes of parameters stay.)
    void clear_operand_amaxes() const;
    // To be called after the state has been initialized or written: histories may be empty now.
    void expect_empty_histories();
    // Delayed scaling: the amaxes of the step enter the histories, from which the scales of the next step
    // follow, and the empty histories are counted in outcome, which is on the device. In other runs, and if
    // linear layers are not in FP8, this does nothing.
    void update_histories(StepOutcome* outcome) const;

private:
    const Setup& setup_;
    const cudaStream_t stream_;
    AmaxAndScale* const entries_;
    const int64_t count_;  // of the entries
    float* const histories_;

    // The place of an operand among the operands of all linear layers.
    int64_t index_of(OperandKind o, int64_t linear_layer) const {
        return int(o) * linear_layer_count + linear_layer;
    }
};

// -----------------------------------------------------------------------------------------------------------
// Weights, gradients and moments, by parameter. `i` is the index of a parameter in params, which is the table
// of architecture.h, in the order of forward. The class has three jobs:
//   - It gives a new run its first values.
//   - It finds what belongs to a parameter: index(), owned_weight(), owned_gradient_sum(), ...
//   - It updates parameters: update().

class Parameters {
public:
    // Gives all weights, moments and scales the values that a new run begins with, on the GPU. A run that
    // continues then overwrites them (gpu/state_tensors.h).
    Parameters(const GpuContext& context, const MemoryMap& memory, AmaxTable& amax_table);

    const Setup& setup;
    const std::vector<Param>& params;
    const std::vector<BucketRange> buckets;
    // By parameter: what this rank owns, and where. One more entry says where the last parameter ends.
    const std::vector<ShardPlace> places;
    const TensorFormat format_of_weights, format_of_gradients;
    const int64_t weight_bytes, gradient_bytes;  // the bytes of one element

    // The index of the parameter with this name.
    size_t index(const std::string& name) const;
    // The bias that belongs to the weight of a linear layer or of a norm, if there is one.
    std::optional<size_t> bias_index(size_t weight_index) const;
    // The number, in the order of forward, of the linear layer whose weight is parameter i; -1 if there is
    // none.
    int64_t linear_layer_index(size_t i) const { return linear_layer_indices_[i]; }
    int64_t linear_layer_count() const { return amax_table_.linear_layer_count; }

    // Where the weights of this rank's part of parameter i begin.
    uint8_t* owned_weight_data(size_t i) const {
        return static_cast<uint8_t*>(memory_.weights.values) + places[i].rank_offset * weight_bytes;
    }
    // The whole parameter, (rows, cols). With several ranks only for a vector: of a matrix this rank owns a
    // part, and Sharding::weight() has the whole.
    TensorRef whole_weight(size_t i) const {
        return {owned_weight_data(i), params[i].rows, params[i].cols, format_of_weights};
    }
    // What this rank owns of the weight of a linear layer. With several ranks that may not be whole rows, so
    // the tensor has MOMENT_GROUP_SIZE columns. (The size of such a part is a multiple of MOMENT_GROUP_SIZE.
    // Other parameters have other sizes: of these the last elements would be missing.)
    TensorRef owned_weight(size_t i) const {
        return {owned_weight_data(i), places[i].owned.count / MOMENT_GROUP_SIZE, MOMENT_GROUP_SIZE,
                format_of_weights};
    }
    // The sums of the gradients of this rank's part of parameter i, which the update reads.
    uint8_t* owned_gradient_sum(size_t i) const;
    // The whole gradient, (rows, cols). With several ranks only for a vector, as whole_weight().
    TensorRef whole_gradient(size_t i) const {
        return {owned_gradient_sum(i), params[i].rows, params[i].cols, format_of_gradients};
    }

    // Updates the buckets [first_bucket, end_bucket), whose gradients are complete. StepOutcome::loss_or_nan
    // must have been written. The function
    //   - computes the norm of the gradients, for which several ranks exchange sums of squares;
    //   - decides whether the step is skipped (GradientState);
    //   - if it is not skipped, runs AdamW, which leaves the amaxes of the new weights.
    void update(const AdamWOptions& options, int64_t first_bucket, int64_t end_bucket, Sharding& sharding);
    // Computes the amax of the weight that is parameter i, after other values than those of update() were
    // written to it.
    void compute_weight_amax(size_t i) const;

    // For the quantization report: the errors of storing the moments of a bucket; and the expansion exponents
    // of all moment groups of `moments`, which are MemoryMap::first_moments or second_moments.
    void measure_moment_errors_of(int64_t bucket, const Sharding& sharding, QuantReport& report) const;
    std::vector<float> expansion_exponents(const std::vector<MomentRef>& moments) const;

private:
    const GpuContext& context_;
    const MemoryMap& memory_;
    AmaxTable& amax_table_;
    const cudaStream_t stream_;
    std::vector<int64_t> linear_layer_indices_;  // by parameter
    std::map<std::string, size_t> indices_;      // of parameters, by name

    void upload_shard_table();
    void initialize_state();
    int64_t moment_groups(size_t i) const { return ceil_div(places[i].owned.count, MOMENT_GROUP_SIZE); }
};

// The tensor v as slices of rows, each of which fits one launch: a grid has at most 65,535 tiles of 128 rows.
// (Parameters::owned_weight() may have more, because its rows are short.)
std::vector<TensorRef> slices_for_grids(const TensorRef& v);

}  // namespace coat::gpu
