// gpu/amax_table.h - the class AmaxTable, where linear layers find the amaxes and scales of their operands.
#pragma once
#include "memory_map.h"

namespace coat::gpu {

// The amaxes of the weights and operands of linear layers: a table on the device. An entry has an amax, and
// the scale that follows from this amax (TensorScale). The table has an entry for
//
//   each parameter | the operand x of each linear layer | the operand w of each | the operand g of each
//
// A weight of a linear layer is a parameter. Its amax is in the entry of that parameter, where the update
// leaves it. The entries of other parameters are not used.
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
    TensorScale* all() const { return entries_; }
    TensorScale* of_parameter(size_t i) const { return entries_ + i; }
    TensorScale* of_operand(OperandKind o, int64_t linear_layer) const {
        return entries_ + param_count + index_of(o, linear_layer);
    }
    // The entry that a linear layer uses for its weight, parameter i.
    TensorScale* of_weight(size_t i, int64_t linear_layer) const {
        return delayed() ? of_operand(OperandKind::W, linear_layer) : of_parameter(i);
    }
    float* history(OperandKind o, int64_t linear_layer) const {
        return histories_ + index_of(o, linear_layer) * settings_.recipe.history_steps;
    }
    bool delayed() const { return settings_.recipe.scale_source == ScaleSource::Delayed; }

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

// How many linear layers have operands in the table: one for each parameter with is_linear_weight.
int64_t count_linear_layers(const std::vector<Param>& params);

}  // namespace coat::gpu
