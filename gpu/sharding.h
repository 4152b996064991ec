// gpu/sharding.h - where a step finds weights and gradients, and what the other GPUs of a run do. Sharding is
// the interface that a step calls. It has two implementations:
//
//   Unsharded       below, for one GPU: weight() and gradient_to_write() return what ParameterState has, and
//                   the other functions do nothing. This is enough for all that follows.
//   Zero3Sharding   in gpu/sharding.cpp, for several GPUs (step by step: dev/WALK2.md). It gathers weights,
//                   reduces gradients and exchanges small values.
#pragma once
#include "parameter_state.h"
#include "transport.h"

namespace coat::gpu {

enum class Direction : uint8_t { Forward, Backward };

class Sharding {
public:
    explicit Sharding(ParameterState& parameter_state) : parameter_state_(parameter_state) {}
    virtual ~Sharding() = default;

    // The whole weight that is parameter i, (rows, cols). With several ranks a matrix must have been
    // gathered, and is FP8 codes if it has travelled as codes.
    virtual TensorRef weight(size_t i) const = 0;
    // Where backward writes the gradient of parameter i: the whole of it, (rows, cols).
    virtual TensorRef gradient_to_write(size_t i) const = 0;

    // The comments of the other functions can wait: with one GPU they do nothing.

    // --- Weights, which are gathered by gather unit: the embeddings, each linear layer, the head, counted in
    // the order of forward
    static constexpr int64_t EMBEDDING_GATHER_UNIT = 0;
    static int64_t gather_unit_of(int64_t linear_layer) { return linear_layer + 1; }
    int64_t head_gather_unit() const { return gather_unit_of(parameter_state_.linear_layer_count()); }
    // To be called before the launch of what reads the weights of a gather unit. Makes the computation's
    // stream wait until these weights are gathered, and begins to gather those of the next gather unit: in
    // forward the gather unit after this one, in backward the gather unit before it.
    virtual void gather_weights(int64_t gather_unit, Direction direction) = 0;
    // To be called after the weights have changed, or before the scale of their codes changes: what was
    // gathered before is gathered again when it is needed.
    virtual void forget_gathered_weights() = 0;
    // To be called after the weights have changed. Each rank has updated a part of a weight. The largest of
    // the amaxes of the parts becomes the amax of the weight, from which the scale of its codes follows.
    // (With delayed scaling the same is done for the operands of the step.)
    virtual void combine_amaxes_of_ranks() = 0;

    // --- Gradients, which are sent by bucket (adamw.h)
    // Makes the computation's stream wait until the gradients of a bucket may be written to their places.
    virtual void wait_for_gradient_buffer(int64_t bucket) = 0;
    // To be called when backward has launched all that writes the gradients of a bucket in one micro-batch.
    // Adds the gradients of all ranks to the sums of the step, each on the rank that owns it. The first
    // micro-batch begins the sums.
    virtual void reduce_gradients(int64_t bucket, bool first_micro_batch) = 0;
    // Whether reduce_gradients() must send and add, because the sums of a step lie apart from what backward
    // writes. False with one rank: there gradient_to_write() is the sum, to which the next micro-batch adds.
    virtual bool sends_gradients() const = 0;
    // Makes the computation's stream wait for all transfers that were launched so far.
    virtual void wait_for_transfers() = 0;

    // --- Small values
    // rows (ranks, bytes): every rank has filled its own row; afterwards every rank has all rows.
    virtual void all_gather(void* rows, int64_t bytes) = 0;
    // What quantizing weights loses, on all ranks together. mine: what it loses on this one.
    virtual QuantStats sum_weight_quant_stats(const QuantStats& mine) const = 0;

protected:
    ParameterState& parameter_state_;
};

// A run on one GPU, in which nothing travels.
class Unsharded : public Sharding {
public:
    using Sharding::Sharding;

    TensorRef weight(size_t i) const override { return parameter_state_.whole_weight(i); }
    TensorRef gradient_to_write(size_t i) const override { return parameter_state_.whole_gradient(i); }

    void gather_weights(int64_t, Direction) override {}
    void forget_gathered_weights() override {}
    void combine_amaxes_of_ranks() override {}
    void wait_for_gradient_buffer(int64_t) override {}
    void reduce_gradients(int64_t, bool) override {}
    bool sends_gradients() const override { return false; }
    void wait_for_transfers() override {}
    void all_gather(void*, int64_t) override {}
    QuantStats sum_weight_quant_stats(const QuantStats& mine) const override { return mine; }
};

// -----------------------------------------------------------------------------------------------------------
// The rest can wait: several GPUs. Zero3Sharding promises:
//
//   gradients   after a bucket's backward: each rank sends to every other rank the gradients that the
//               receiver owns. The receiver adds them in the order of the ranks, in FP32, and rounds once.
//   weights     while one gather unit computes, the matrices of the gather unit that comes next are gathered,
//               in another buffer.
//
// So R ranks with a micro-batch each get the same bits as one GPU with R micro-batches, if two things hold:
// sums are in FP32, and a micro-batch adds to each gradient once. (It adds more often to a tied embedding,
// and to the head if there are many tokens.) How bytes travel has a file of its own, gpu/transport.h.

// The sharding of a run. transport: null with one rank, and in a dry run, in which nothing travels.
std::unique_ptr<Sharding> make_sharding(const GpuContext& context, const MemoryMap& memory,
                                        ParameterState& parameter_state, const ScaleTable& scale_table,
                                        std::shared_ptr<Transport> transport);

}  // namespace coat::gpu
