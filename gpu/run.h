// gpu/run.h - what one GPU keeps of a training run, for the host: the one allocation (Arena) and what lies
// where in it (Memory), the stream of the computation (Device), the scales of FP8 operands (Scales), and by
// parameter weights, gradients and moments with their update (Parameters).
//
// The part of the other GPUs is behind one interface, Exchange. With one GPU its functions do nothing.
//
// From gpu/cuda.h come streams, and the dry run that finds out how much memory a run needs. From gpu/plan.h
// come tables of what this GPU owns: ShardPlace, by parameter, and BucketRange, by bucket.
#pragma once
#include <map>
#include <memory>
#include <optional>

#include "cuda.h"
#include "operators.h"
#include "plan.h"

namespace coat::gpu {

class Exchange;

// -----------------------------------------------------------------------------------------------------------
// Memory

// The allocation, from which memory is taken as from a stack: a Scope gives back at its end what was taken in
// it. A step takes the same in the same order every time, so its addresses stay, also those that CUDA graphs
// hold. How much a run needs is found out by a dry run (gpu/cuda.h), whose addresses are never used.
class Arena {
public:
    explicit Arena(int64_t bytes);  // of the allocation; 0: a dry run
    uint8_t* begin() const { return memory_; }

    template <class T = uint8_t> T* take(int64_t count) {
        return reinterpret_cast<T*>(take_bytes(count * static_cast<int64_t>(sizeof(T))));
    }
    int64_t most() const { return most_; }  // bytes in use at one time, so far

    class Scope {
    public:
        explicit Scope(Arena& arena) : arena_(arena) {}
        ~Scope() {
            if (!ended_) end();
        }
        Scope(const Scope&) = delete;
        // Ends the scope before its block does: what is taken from now on may take the same memory.
        void end() {
            arena_.used_ = used_;
            ended_ = true;
        }

    private:
        Arena& arena_;
        const int64_t used_ = arena_.used_;  // when it began
        bool ended_ = false;
    };

private:
    Owned<void*, cudaFree> allocated_;
    uint8_t* memory_ = reinterpret_cast<uint8_t*>(1 << 30);
    const int64_t limit_;
    int64_t used_ = 0, most_ = 0;

    uint8_t* take_bytes(int64_t bytes);
};

// What a step finds out, on the device until the step ends. It is cleared before.
struct Outcome {
    double loss;          // the sum of the losses * Results::loss_scale
    double checked_loss;  // the same, or NaN if FP8 codes have hidden a value that is not finite
    GradientState gradients;
    uint32_t empty_histories;  // delayed scaling: operands that have had no amax yet
};
struct Results {
    Outcome outcome;
    double loss_scale;  // one over the number of targets that count; from the host
    QuantStats quantization[static_cast<int>(ReportKind::Moment1)];  // of all kinds before the moments
};

// Where everything is that lasts for the run. take_memory() in run.cpp draws it.
struct Memory {
    Results* results;
    void* gemm_scratch;  // Gemms::SCRATCH bytes

    // Several ranks: what others write here. It has the same address, counted from the beginning, on all.
    uint32_t* flags;                // two for each rank
    uint8_t* received_gradients;    // of a bucket
    uint8_t* gathered_weights[2];   // the matrices of an even and of an odd stage
    double* squares;                // (ranks, 1 + shard units): sums of squares of gradients
    AmaxAndScale* scales_of_ranks;  // (ranks, number of scales)

    // What this rank owns, in the order of ShardPlace
    Weights weights;
    Segment* segments;                   // AdamW's table of parameters
    AmaxAndScale* scales;                // see Scales
    float* histories;                    // of amaxes: (operands, linear layers, Recipe::history)
    std::vector<MomentView> moments[2];  // the first and the second, by parameter
    void* moments_begin;
    int64_t moments_bytes;  // of all moments and their scales

    uint8_t* saved;                       // activations: layers of saved_layer_bytes() each
    std::vector<uint8_t*> gradient_sums;  // by bucket: what the update reads
    std::vector<uint8_t*> gradients;      // by bucket: what backward writes; with one rank the same

    // Of the pass that runs, for N tokens
    int32_t *tokens, *targets;
    int32_t* token_order;   // the embedding's gradient: row numbers, sorted by token,
    TokenRows* token_rows;  // and the rows of each token among these
    void* residual;         // (N, C): the final norm's input; then the gradient of the residual stream
    float* norm_partials;   // norm_backward_workspace() bytes
    RowStatistics* norm_statistics;  // (N) of the norm that was computed last
    float* losses;                   // (N)
    float2* rope_table;              // (T, HS / 2) {cos, sin}
};

// The settings, the stream of the computation and the allocation.
struct Device {
    const Setup setup;
    const Stream stream;
    Arena arena;
    // While quantization is measured: what has been found out, by ReportKind, on the device; else null.
    QuantStats* quantization_errors = nullptr;

    // bytes: as for the Arena.
    Device(const Setup& s, int64_t bytes) : setup(s), stream(bytes == 0), arena(bytes) {}

    // What the computation waits for may come from another rank: if that has ended, so does this process.
    void wait(const char* what = "The GPU failed") const;
    // Copies between the host and this GPU. CUDA may wait for all that runs before it copies, and would not
    // notice that a rank has ended for which that waits: so wait() comes first. What send() reads must stay
    // until the next wait(); fetch() returns when the copy is there.
    void send(void* to_gpu, const void* from_host, int64_t bytes) const;
    void fetch(void* to_host, const void* from_gpu, int64_t bytes) const;

    QuantStats* statistics(ReportKind kind) const {
        return quantization_errors ? quantization_errors + static_cast<int>(kind) : nullptr;
    }
};

// Takes what lasts for the run.
Memory take_memory(Device& device);

// A view in pieces that each fit a grid of tiles: it has at most 65,535 tiles of 128 rows.
std::vector<View> pieces_for_grids(const View& v);

// -----------------------------------------------------------------------------------------------------------
// The scales of FP8 operands, and the amaxes from which they follow. They are one array:
//
//   one for each parameter | one for the x of each linear layer | w of each | g of each
//
// A parameter's is that of its weights, whose amax an update leaves there. With delayed scaling, where scales
// come from a history of amaxes, a linear layer's weight uses that of the operand w in its place.

class Scales {
public:
    Scales(const Device& device, const Memory& memory);

    const int64_t parameter_count, linear_layer_count;
    // Whether a history of amaxes may still be empty. Then operands are scaled just in time.
    bool any_empty_history = false;

    int64_t count() const { return parameter_count + OPERANDS * linear_layer_count; }
    AmaxAndScale* all() const { return scales_; }
    AmaxAndScale* of_parameter(size_t i) const { return scales_ + i; }
    AmaxAndScale* of_operand(LinearOperand o, int64_t linear_layer) const {
        return scales_ + parameter_count + number_of(o, linear_layer);
    }
    // Of the weight, parameter i, as a linear layer uses it.
    AmaxAndScale* of_weight(size_t i, int64_t linear_layer) const {
        return delayed() ? of_operand(LinearOperand::W, linear_layer) : of_parameter(i);
    }
    float* history(LinearOperand o, int64_t linear_layer) const {
        return histories_ + number_of(o, linear_layer) * setup_.recipe.history;
    }
    bool delayed() const { return setup_.recipe.scaling == Scaling::Delayed; }

    // Clears the amaxes of operands: before each micro-batch if scaling is just in time, and before each step
    // if it is delayed. (The amaxes of parameters stay.)
    void clear_operands() const;
    // After the state has been set or written: histories may be empty now.
    void expect_empty_histories();
    // Delayed scaling: the amaxes of the step enter the histories. Linear layers without FP8 take no amaxes:
    // then histories and scales stay as they are.
    void end_step(Outcome& outcome) const;

private:
    const Setup& setup_;
    const cudaStream_t stream_;
    AmaxAndScale* const scales_;
    float* const histories_;

    // Of an operand, among those of all linear layers.
    int64_t number_of(LinearOperand o, int64_t linear_layer) const {
        return static_cast<int>(o) * linear_layer_count + linear_layer;
    }
};

// -----------------------------------------------------------------------------------------------------------
// Weights, gradients and moments, by parameter. A parameter is known by its number: its place in params, the
// table of coat.h, in the order of forward.

class Parameters {
public:
    Parameters(const Device& device, const Memory& memory, Scales& scales);

    const Setup& setup;
    const std::vector<Param> params;
    const std::vector<BucketRange> buckets;
    const std::vector<ShardPlace> shards;  // by parameter: what this rank owns; and one where the last ends
    const Quant weight_quant, gradient_quant;
    const int64_t weight_bytes, gradient_bytes;  // of one element

    // The number of the parameter with this name.
    size_t index(const std::string& param) const { return find(param).param; }
    // The bias that belongs to the weight of a linear layer or of a norm, if there is one.
    std::optional<size_t> bias_of(size_t weight) const;
    // The number of the linear layer whose weight this is, in the order of forward; -1 for any other.
    int64_t linear_layer(size_t i) const { return linear_layers_[i]; }
    int64_t linear_layer_count() const { return scales_.linear_layer_count; }

    // The weights of parameter i that this rank owns; with one rank, and of a vector, all of them.
    uint8_t* owned_weights(size_t i) const {
        return static_cast<uint8_t*>(memory_.weights.values) + shards[i].at * weight_bytes;
    }
    View weight(size_t i) const {
        return {owned_weights(i), nullptr, params[i].rows, params[i].cols, weight_quant};
    }
    // As a view they have MOMENT_GROUP columns, because they need not be whole rows.
    View owned_weight(size_t i) const {
        return {owned_weights(i), nullptr, shards[i].own.count / MOMENT_GROUP, MOMENT_GROUP, weight_quant};
    }
    // The gradients that the update reads, of the elements that this rank owns.
    uint8_t* gradient_sums(size_t i) const;
    View gradient(size_t i) const {
        return {gradient_sums(i), nullptr, params[i].rows, params[i].cols, gradient_quant};
    }

    // Updates the weights of the buckets [first, last), whose gradients are complete, and leaves the amaxes
    // of the new ones. Nothing is updated if something in the step was not finite.
    void update(const AdamW& a, int64_t first, int64_t last, Exchange& exchange);

    // For the quantization report: the error of storing the moments of a bucket, and all expansion factors.
    void measure_moments_of(int64_t bucket, const Exchange& exchange, QuantReport& report) const;
    std::vector<float> expansion_factors(bool second) const;

    // A tensor of the state, or a gradient, by name, as Model::read() and write() pass it.
    void read(const std::string& name, void* out) const;
    void write(const std::string& name, const void* in);

private:
    struct StateEntry {
        size_t param;  // that it belongs to
        void* data;
        int64_t bytes;
    };
    const Device& device_;
    const Memory& memory_;
    Scales& scales_;
    const cudaStream_t stream_;
    std::vector<int64_t> linear_layers_;         // by parameter: linear_layer()
    std::map<std::string, StateEntry> entries_;  // by name

    void note_state();
    void note_delayed_scales(size_t i);
    void initialize();
    int64_t groups(size_t i) const { return ceil_div(shards[i].own.count, MOMENT_GROUP); }
    void refresh_amax(size_t i);
    const StateEntry& find(const std::string& name) const;
    void transfer(const std::string& name, void* out, const void* in) const;
    void transfer_half(size_t i, bool remainder, uint16_t* out, const uint16_t* in) const;
    void read_gradient(size_t i, float* out) const;
};

// -----------------------------------------------------------------------------------------------------------
// What the other GPUs of a run add to a step: gpu/ranks.h. This class is that of a run on one GPU, where
// weights and gradients are those of Parameters, and nothing travels.
//
// A stage is what reads weights at one time: the embeddings, a linear layer, or the head.

enum class Pass : uint8_t { Forward, Backward };

class Exchange {
public:
    explicit Exchange(Parameters& parameters) : parameters_(parameters) {}
    virtual ~Exchange() = default;

    static constexpr int64_t EMBEDDING_STAGE = 0;
    static int64_t stage_of(int64_t linear_layer) { return linear_layer + 1; }
    int64_t head_stage() const { return stage_of(parameters_.linear_layer_count()); }

    // --- Weights
    // Before the computation launches what reads the weights of a stage: makes it wait until they are
    // gathered. The pass says which stage comes next.
    virtual void gather_weights(int64_t /*stage*/, Pass) {}
    // A parameter's weights, whole: as they are stored, or as FP8 codes. A matrix must have been gathered.
    virtual View weight(size_t i) const { return parameters_.weight(i); }
    // To be called after an update, or after weights have been written.
    virtual void weights_changed() {}
    // To be called when codes of weights are to have another scale.
    virtual void scales_changed() {}

    // --- Gradients
    // Where backward writes a parameter's gradient, whole.
    virtual View gradient(size_t i) const { return parameters_.gradient(i); }
    // Makes the computation wait until the gradients of a bucket may be written there.
    virtual void wait_for_gradient_buffer(int64_t /*bucket*/) {}
    // After backward has launched all that writes the gradients of a bucket in one micro-batch: adds those of
    // all ranks to the sums of the step, each on the rank that owns it. The first micro-batch begins the
    // sums.
    virtual void reduce_gradients(int64_t /*bucket*/, bool /*first_micro_batch*/) {}
    // Whether reduce_gradients() does that. With one rank it does nothing: there the gradients are the sums,
    // to which the next micro-batch adds.
    virtual bool reduces_gradients() const { return false; }
    // Makes the computation wait for all that travels.
    virtual void wait_for_transfers() {}

    // --- Small values
    // blocks (ranks, bytes): every rank has filled its own; afterwards all are filled.
    virtual void all_gather(void* /*blocks*/, int64_t /*bytes*/) {}
    // What quantizing weights loses: of all ranks, where each has quantized a part of them.
    virtual QuantStats weight_statistics(const QuantStats& mine) const { return mine; }

protected:
    Parameters& parameters_;
};

}  // namespace coat::gpu
