// gpu/scale_table.h - the class ScaleTable, where linear layers find the scales of their operands, and the
// amaxes from which the scales follow.
#pragma once
#include "memory_map.h"

namespace coat::gpu {

// The table of scales, on the device. An entry, a TensorScale (gpu/tensors.h), has an amax and the scale that
// follows from it. There is an entry for
//
//   each parameter | the operand x of each linear layer | the operand w of each | the operand g of each
//
// The amax of a weight is in the entry of the parameter, where the update leaves it. With delayed scaling it
// is in the entry of the operand w. of_weight() knows which. The entries of other parameters are not used.
class ScaleTable {
public:
    ScaleTable(const GpuContext& context, const MemoryMap& memory);

    const int64_t param_count;
    const int64_t linear_layer_count;

    int64_t count() const { return count_; }
    TensorScale* all() const { return entries_; }
    TensorScale* of_parameter(size_t i) const { return entries_ + i; }
    TensorScale* of_operand(OperandKind o, int64_t linear_layer) const {
        return entries_ + param_count + index_of(o, linear_layer);
    }
    // The entry that a linear layer uses for its weight, parameter i.
    TensorScale* of_weight(size_t i, int64_t linear_layer) const {
        return delayed() ? of_operand(OperandKind::W, linear_layer) : of_parameter(i);
    }

    // Clears the whole table, for a run that begins.
    void clear();
    // Clears the amaxes of operands: before each micro-batch, or before each step if scaling is delayed. (The
    // amaxes of parameters stay.)
    void clear_operand_amaxes() const;

    // --- Delayed scaling, in the recipe te (this can wait). Scales follow from histories of amaxes, which
    // checkpoints have.
    bool delayed() const { return settings_.recipe.scale_source == ScaleSource::Delayed; }
    float* history(OperandKind o, int64_t linear_layer) const {
        return histories_ + index_of(o, linear_layer) * settings_.recipe.history_steps;
    }
    // Whether a history of amaxes may still be empty. An operand whose history is empty is scaled just in
    // time. After a step that has found no empty history and was not skipped, this is false. Without delayed
    // scaling it is always false.
    bool any_empty_history = false;
    // To be called after the state has been initialized or written: histories may be empty now.
    void expect_empty_histories();
    // The amaxes of the step enter the histories, from which the scales of the next step follow, and the
    // empty histories are counted in outcome, which is on the device. Without delayed scaling, and if linear
    // layers are not in FP8, this does nothing.
    void update_histories(StepOutcome* outcome) const;

private:
    const RunSettings& settings_;
    const cudaStream_t stream_;
    TensorScale* const entries_;
    const int64_t count_;  // of the entries
    float* const histories_;

    // The place of an operand among the operands of all linear layers.
    int64_t index_of(OperandKind o, int64_t linear_layer) const {
        return int(o) * linear_layer_count + linear_layer;
    }
};

}  // namespace coat::gpu
