// gpu/scale_table.h - the class ScaleTable, where linear layers find the scales of their operands, and the
// amaxes from which the scales follow.
#pragma once
#include "memory_map.h"

namespace coat::gpu {

// The table of scales, on the device. An entry, a TensorScale (gpu/tensors.h), has an amax and the scale that
// follows from it. The struct is named TensorScale for the scale, which GEMMs read. Most kernels use its
// other field, amax. Each linear layer has three entries, one for each of its operands. The entries of all
// weights come first:
//
//   w of each linear layer | x of each linear layer | g of each linear layer
//
// So the amaxes of all x and g are neighbours, and one call clears them.
//
// The amax of w changes when the weight does: the update finds it. The amaxes of x and g are found in each
// micro-batch. (With delayed scaling all three are found whenever an operand is made.)
class ScaleTable {
public:
    ScaleTable(const GpuContext& context, const MemoryMap& memory);

    const int64_t linear_layer_count;

    int64_t entry_count() const { return entry_count_; }
    TensorScale* entries() const { return entries_; }
    TensorScale* entry(OperandKind o, int64_t linear_layer) const {
        return entries_ + index_of(o, linear_layer);
    }

    // Clears the whole table, for a run that begins.
    void clear();
    // Clears the amaxes of all x and g, before a micro-batch finds new ones.
    void clear_x_and_g_amaxes() const { clear_amaxes(/*first=*/index_of(OperandKind::X, 0)); }

    // --- Delayed scaling, in the recipe te (this can wait). Scales follow from histories of amaxes, which
    // checkpoints have.
    bool delayed() const { return settings_.recipe.scale_source == ScaleSource::Delayed; }
    float* history(OperandKind o, int64_t linear_layer) const {
        return histories_ + index_of(o, linear_layer) * settings_.recipe.history_steps;
    }
    // Clears all amaxes, before a step finds new ones.
    void clear_all_amaxes() const { clear_amaxes(/*first=*/0); }
    // True at the start of a run with delayed scaling, until a step that was not skipped has found an amax
    // for every operand. While it is true, an operand whose history is empty is scaled just in time.
    bool any_empty_history = false;
    // To be called after a step that was not skipped, with the number of histories that it found empty.
    void note_empty_histories(uint32_t empty_histories) {
        if (empty_histories == 0) any_empty_history = false;
    }
    // To be called after the state has been initialized or written: histories may be empty now.
    void expect_empty_histories();
    // To be called after the update. Adds the amaxes of the step to the histories, computes the scales of the
    // next step from the histories, and counts the empty histories in `outcome`, which is on the device. (If
    // linear layers are not in FP8, this function does nothing.)
    void update_histories(StepOutcome* outcome) const;

private:
    const RunSettings& settings_;
    const cudaStream_t stream_;
    TensorScale* const entries_;
    const int64_t entry_count_;
    float* const histories_;

    // The index of an operand in the table, which has w before x and g.
    int64_t index_of(OperandKind o, int64_t linear_layer) const {
        if (o == OperandKind::W) return linear_layer;
        const int64_t parts_before = o == OperandKind::X ? 1 : 2;
        return parts_before * linear_layer_count + linear_layer;
    }
    void clear_amaxes(int64_t first) const;  // of the entries from number `first` on
    void clear_histories();
};

}  // namespace coat::gpu
