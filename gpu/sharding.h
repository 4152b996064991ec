// gpu/sharding.h - the class Sharding: what a step asks of the other GPUs of a run. This file can wait: with
// one GPU there are no others, and the functions of this class do nothing.
//
// With several GPUs each rank owns a shard of every matrix (common/ranks.h). Then the step calls a
// Zero3Sharding, which overrides every virtual function (gpu/sharding.cpp; step by step: dev/WALK2.md). It
// gathers weights, reduces gradients and exchanges small values. The comments say what it does.
#pragma once
#include "parameter_tensors.h"
#include "transport.h"

namespace coat::gpu {

enum class Direction : uint8_t { Forward, Backward };

class Sharding {
public:
    explicit Sharding(int64_t linear_layers) : linear_layers_(linear_layers) {}
    virtual ~Sharding() = default;

    // --- Weights. A weight set is the matrices that are gathered together: those of the embeddings, of one
    // linear layer, or of the head. Weight sets are counted in the order of forward
    static constexpr int64_t EMBEDDING_WEIGHT_SET = 0;
    static int64_t weight_set_of(int64_t linear_layer) { return linear_layer + 1; }
    int64_t head_weight_set() const { return weight_set_of(linear_layers_); }
    // To be called before the launch of what reads a weight set. Makes the computation's stream wait until
    // these weights are gathered, writes their addresses and formats to ParameterTensors::weights, and begins
    // to gather the next weight set: in forward the one after this, in backward the one before it.
    virtual void gather_weights(int64_t /*weight_set*/, Direction) {}
    // To be called after the weights have changed, or before the scale of their codes changes: what was
    // gathered before is gathered again when it is needed.
    virtual void forget_gathered_weights() {}
    // To be called after the weights have changed. Each rank has updated a part of a weight. The largest of
    // the amaxes of the parts becomes the amax of the weight, from which the scale of its codes follows.
    // (With delayed scaling the same is done for the operands of the step.)
    virtual void combine_amaxes_of_ranks() {}

    // --- Gradients, which are sent by bucket (gpu/memory_layout.h)
    // Makes the computation's stream wait until the gradients of a bucket may be written to their places.
    virtual void wait_for_gradient_buffer(int64_t /*bucket*/) {}
    // To be called when backward has launched all that writes the gradients of a bucket in one micro-batch.
    // Adds the gradients of all ranks to the sums of the step, each on the rank that owns it. The first
    // micro-batch begins the sums.
    virtual void reduce_gradients(int64_t /*bucket*/, bool /*first_micro_batch*/) {}
    // True with several ranks: backward writes the gradients of a micro-batch to a buffer, from which
    // reduce_gradients() sends them and adds them to the sums of the step. With one rank backward itself adds
    // to these sums.
    virtual bool sends_gradients() const { return false; }
    // Makes the computation's stream wait for all transfers that were launched so far.
    virtual void wait_for_transfers() {}

    // --- Small values
    // rows (ranks, bytes): every rank has filled its own row; afterwards every rank has all rows.
    virtual void all_gather(void* /*rows*/, int64_t /*bytes*/) {}
    // What quantizing weights loses, on all ranks together. mine: what it loses on this one.
    virtual QuantStats sum_weight_quant_stats(const QuantStats& mine) const { return mine; }

private:
    const int64_t linear_layers_;  // of the model
};

// -----------------------------------------------------------------------------------------------------------
// Several GPUs. Zero3Sharding promises:
//
//   gradients   after a bucket's backward: each rank sends to every other rank the gradients that the
//               receiver owns. The receiver adds them in the order of the ranks, in FP32, and rounds once.
//   weights     while one weight set is computed with, the next one is gathered in another buffer.
//
// So R ranks with a micro-batch each get the same bits as one GPU with R micro-batches, if two things hold:
// sums are in FP32, and a micro-batch adds to each gradient once. (It adds more often to a tied embedding,
// and to the head if there are many tokens.) How bytes travel has a file of its own, gpu/transport.h.

// The sharding of a run. transport: null with one rank, and in a dry run, in which nothing travels.
std::unique_ptr<Sharding> make_sharding(const GpuContext& context, const MemoryMap& memory,
                                        ParameterTensors& parameter_tensors, const ScaleTable& scale_table,
                                        std::shared_ptr<Transport> transport);

}  // namespace coat::gpu
