// gpu/memory_layout.cpp - how the memory of a GPU is divided (gpu/memory_layout.h).
#include "memory_layout.h"

namespace coat {

std::vector<ParamPlace> param_places(const RunSettings& s) {
    std::vector<ParamPlace> table;
    int64_t memory_offset = 0, units = 0;
    for (const Param& p : parameters(s.config)) {
        table.push_back({.owned = owned(s, p), .memory_offset = memory_offset, .units_before = units});
        memory_offset += padded_count(table.back().owned);
        units += ceil_div(p.size(), UNIT_SIZE);
    }
    table.push_back({.owned = {}, .memory_offset = memory_offset, .units_before = units});
    return table;
}

std::vector<BucketRange> bucket_ranges(const std::vector<Param>& params) {
    std::vector<BucketRange> table;
    for (size_t i = 0; i < params.size(); i++) {
        if (i == 0 || params[i].bucket != params[i - 1].bucket)
            table.push_back(
                {.first_param = i, .end_param = i, .flat_offset = params[i].flat_offset, .elements = 0});
        table.back().end_param = i + 1;
        table.back().elements += params[i].padded_size();
    }
    return table;
}

std::vector<int64_t> saved_tensor_offsets(const RunSettings& s) {
    std::vector<int64_t> offsets{0};
    for (const SavedFormat& t : saved_per_layer(s.config, s.recipe))
        offsets.push_back(offsets.back() + round_up(t.bytes(s.B * s.T), GPU_ALIGNMENT));
    return offsets;
}
int64_t saved_layer_bytes(const RunSettings& s) { return saved_tensor_offsets(s).back(); }

// How many layers' activations backward still needs when it begins to write the gradient of the parameter p:
//   of layer l                                 l + 1, the layers 0 to l
//   head and final norm; a tied embedding      all layers: their gradients are begun first
//   positions; an embedding that is not tied   none: their gradients are written last
static int64_t layers_alive(const ModelConfig& config, const Param& p) {
    if (p.layer >= 0) return p.layer + 1;
    const bool written_last = p.role == Role::Positions || (p.role == Role::Embedding && !config.tied);
    return written_last ? 0 : config.L;
}

int64_t gradients_offset(const RunSettings& s) {
    const ModelConfig& config = s.config;
    const int64_t layer_bytes = saved_layer_bytes(s);
    // The sums of several micro-batches must outlive the activations of the next one
    if (s.micro_batches_per_rank > 1) return config.L * layer_bytes;
    const std::vector<Param> params = parameters(config);
    const std::vector<ParamPlace> places = param_places(s);
    const int64_t bytes_per_gradient = format_info(gradient_format(s)).bytes;
    int64_t offset = 0;
    for (size_t i = 0; i < params.size(); i++) {
        // Gradient i begins at offset + memory_offset * bytes_per_gradient, which must be at least
        // needed_bytes
        const int64_t needed_bytes = layers_alive(config, params[i]) * layer_bytes;
        offset = std::max(offset, needed_bytes - places[i].memory_offset * bytes_per_gradient);
    }
    return round_up(offset, GPU_ALIGNMENT);
}

}  // namespace coat
