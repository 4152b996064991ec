// gpu/parameter_tensors.cpp - the class ParameterTensors (gpu/parameter_tensors.h).
#include "parameter_tensors.h"

#include "../common/state_tensors.h"
#include "quant_report.h"

namespace coat::gpu {

ParameterTensors::ParameterTensors(const GpuContext& context, const MemoryMap& memory,
                                   const ScaleTable& scale_table)
    : settings(context.settings), params(context.params), buckets(bucket_ranges(params)),
      places(param_places(settings)), format_of_weights{settings.recipe.compute_format},
      format_of_gradients(TensorFormat{gradient_format(settings)}),
      bytes_per_weight(format_info(format_of_weights.element_format).bytes),
      bytes_per_gradient(format_info(format_of_gradients.element_format).bytes), context_(context),
      memory_(memory), scale_table_(scale_table), stream_(context.stream) {
    int64_t linear_layers = 0;
    for (size_t i = 0; i < params.size(); i++) {
        linear_layer_indices_.push_back(params[i].is_linear_weight() ? linear_layers++ : -1);
        indices_[params[i].name] = i;
    }
    list_weights_and_gradients();
    upload_adamw_params();
}

size_t ParameterTensors::param_index(const std::string& name) const {
    const auto found = indices_.find(name);
    if (found == indices_.end()) throw_no_such_tensor(name);
    return found->second;
}
// In the table of parameters a bias follows right after its weight.
std::optional<size_t> ParameterTensors::bias_index(size_t weight_index) const {
    const size_t next = weight_index + 1;
    if (next == params.size() || params[next].role != Role::Bias) return std::nullopt;
    return next;
}

void ParameterTensors::list_weights_and_gradients() {
    for (size_t i = 0; i < params.size(); i++) {
        const Param& p = params[i];
        const bool owns_all_of_it = settings.ranks == 1 || p.is_vector();
        weights.push_back({.data = owns_all_of_it ? owned_weight_data(i) : nullptr,
                           .rows = p.rows,
                           .cols = p.cols,
                           .format = format_of_weights});
        const int64_t elements_before = p.flat_offset - buckets[p.bucket].flat_offset;
        gradients.push_back(
            {.data = memory_.gradients_by_bucket[p.bucket] + elements_before * bytes_per_gradient,
             .rows = p.rows,
             .cols = p.cols,
             .format = format_of_gradients});
    }
}

void ParameterTensors::upload_adamw_params() {
    std::vector<AdamWParam> table;
    int64_t bundles = 0;
    for (size_t i = 0; i < params.size(); i++) {
        const Param& p = params[i];
        const ParamPlace& place = places[i];
        table.push_back({.memory_offset = place.memory_offset,
                         .size = place.owned.count,
                         .m = memory_.first_moments[i],
                         .v = memory_.second_moments[i],
                         .decays = p.decays(),
                         .weight_amax = weight_amax(i),
                         .bundles_before = bundles,
                         .first_unit = place.units_before + place.owned.first / UNIT_SIZE,
                         .flat_offset = p.flat_offset + place.owned.first});
        bundles += ceil_div(place.owned.count, BUNDLE_SIZE);
    }
    copy_async(memory_.adamw_params, table.data(), int64_t(table.size() * sizeof(AdamWParam)), stream_);
    // `table` must stay until the copy is complete
    context_.wait("Copying the table of parameters failed");
}

float* ParameterTensors::weight_amax(size_t i) const {
    if (!params[i].is_linear_weight() || scale_table_.delayed()) return nullptr;
    return &scale_table_.entry(OperandKind::W, linear_layer_index(i))->amax;
}

TensorRef ParameterTensors::owned_weight(size_t i) const {
    if (settings.ranks == 1) return weights[i];
    constexpr int64_t COLS = 256;
    return {.data = owned_weight_data(i),
            .rows = places[i].owned.count / COLS,
            .cols = COLS,
            .format = format_of_weights};
}

uint8_t* ParameterTensors::owned_gradient_sum(size_t i) const {
    const int64_t bucket = params[i].bucket;
    const int64_t in_bucket = places[i].memory_offset - places[buckets[bucket].first_param].memory_offset;
    return memory_.gradient_sums_by_bucket[bucket] + in_bucket * bytes_per_gradient;
}

ParamsToUpdate ParameterTensors::params_of_buckets(int64_t first_bucket, int64_t end_bucket) const {
    const size_t first_param = buckets[first_bucket].first_param;
    const size_t end_param = buckets[end_bucket - 1].end_param;
    const int64_t begin = places[first_param].memory_offset, end = places[end_param].memory_offset;
    return {.table = memory_.adamw_params + first_param,
            .count = int(end_param - first_param),
            .elements = {.first = begin, .count = end - begin},
            .gradients = owned_gradient_sum(first_param),
            .gradient_format = format_of_gradients.element_format};
}
Range ParameterTensors::units_of_buckets(int64_t first_bucket, int64_t end_bucket) const {
    const int64_t begin = places[buckets[first_bucket].first_param].units_before;
    const int64_t end = places[buckets[end_bucket - 1].end_param].units_before;
    return {.first = begin, .count = end - begin};
}

// -----------------------------------------------------------------------------------------------------------
// The rest can wait: the quantization report

// measure_moment_errors() of gpu/quant_report.h waits with plain CUDA calls, which would never return if the
// stream waits for a rank that has ended. context_.wait() notices such a rank, so it is called first.
void ParameterTensors::measure_moment_errors_of(int64_t bucket, QuantReport& report) const {
    context_.wait();
    for (size_t i = buckets[bucket].first_param; i < buckets[bucket].end_param; i++) {
        const Range& owned = places[i].owned;
        const uint8_t* const gradient = static_cast<const uint8_t*>(gradients[i].data);
        measure_moment_errors(settings.optimizer, memory_.first_moments[i], memory_.second_moments[i],
                              gradient + owned.first * bytes_per_gradient, format_of_gradients.element_format,
                              owned.count, report, stream_);
    }
}

std::vector<float> ParameterTensors::expansion_exponents(const std::vector<MomentRef>& moments) const {
    std::vector<float> all;
    for (size_t i = 0; i < params.size(); i++) {
        const float* const k = moments[i].k;
        if (!k) continue;
        const size_t before = all.size();
        const int64_t moment_groups = moment_group_count(moments[i].format, places[i].owned.count);
        all.resize(before + size_t(moment_groups));
        context_.copy_to_host(all.data() + before, k, moment_groups * int64_t(sizeof(float)));
    }
    return all;
}

}  // namespace coat::gpu
