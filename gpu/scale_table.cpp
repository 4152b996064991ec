// gpu/scale_table.cpp - the class ScaleTable (gpu/scale_table.h).
#include "scale_table.h"

#include "other_scaling.h"

namespace coat::gpu {

ScaleTable::ScaleTable(const GpuContext& context, const MemoryMap& memory)
    : linear_layer_count(memory.scale_entry_count / OPERAND_COUNT), settings_(context.settings),
      stream_(context.stream), entries_(memory.scale_entries), entry_count_(memory.scale_entry_count),
      histories_(memory.histories) {}

void ScaleTable::clear() {
    clear_async(entries_, entry_count_ * int64_t(sizeof(TensorScale)), stream_);
    if (delayed()) clear_histories();
}

// Strided: of each entry, which has 16 bytes, only `amax` is cleared.
void ScaleTable::clear_amaxes(int64_t first) const {
    unless_dry_run(stream_, "clear", [&] {
        check(cudaMemset2DAsync(&entries_[first].amax, sizeof(TensorScale), 0, sizeof(float),
                                entry_count_ - first, stream_),
              "Clearing amaxes failed");
    });
}

// -----------------------------------------------------------------------------------------------------------
// Delayed scaling (this can wait)

void ScaleTable::clear_histories() {
    clear_async(histories_, entry_count_ * settings_.recipe.history_steps * int64_t(sizeof(float)), stream_);
    expect_empty_histories();
}

void ScaleTable::expect_empty_histories() {
    any_empty_history = delayed() && linear_formats(settings_).x.is_fp8();
}

void ScaleTable::update_histories(StepOutcome* outcome) const {
    if (!linear_formats(settings_).x.is_fp8()) return;
    for (OperandKind o : LINEAR_OPERANDS)
        update_delayed_scales({.scales = entry(o, 0),
                               .histories = history(o, 0),
                               .n = linear_layer_count,
                               .length = settings_.recipe.history_steps,
                               .fp8 = format_of(linear_formats(settings_), o).element_format},
                              &outcome->gradient_state.skip, &outcome->empty_histories, stream_);
}

}  // namespace coat::gpu
