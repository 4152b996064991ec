// gpu/named_memory.cpp - what a GPU keeps of a run, by name (gpu/named_memory.h).
#include "named_memory.h"

#include <cstring>

#include "../coat.h"
#include "../common/state_tensors.h"
#include "initialize.h"

namespace coat::gpu {

constexpr int64_t FLOAT_BYTES = sizeof(float);
constexpr int64_t HALF_BYTES = sizeof(uint16_t);  // of a half of a master

NamedMemory::NamedMemory(const GpuContext& context, const MemoryMap& memory,
                         const ParameterTensors& parameter_tensors, ScaleTable& scale_table)
    : context_(context), memory_(memory), parameter_tensors_(parameter_tensors), scale_table_(scale_table) {
    list_tensors();
}

void NamedMemory::list_tensors() {
    const RunSettings& s = context_.settings;
    const bool fp32_masters = parameter_tensors_.format_of_weights.element_format == Format::FP32;
    for (size_t i = 0; i < parameter_tensors_.params.size(); i++) {
        const Param& p = parameter_tensors_.params[i];
        const ParamPlace& place = parameter_tensors_.places[i];
        const int64_t count = place.owned.count;
        int16_t* const remainder = memory_.owned_weights.remainders
                                       ? memory_.owned_weights.remainders + place.memory_offset
                                       : nullptr;
        entries_[p.name] = {.param_index = i,
                            .data = parameter_tensors_.owned_weight_data(i),
                            .bytes = count * HALF_BYTES,
                            .half = fp32_masters ? HalfOfMaster::Rounded : HalfOfMaster::None};
        if (s.keep_masters)
            entries_[p.name + ".remainder"] = {
                .param_index = i,
                .data = remainder,
                .bytes = count * HALF_BYTES,
                .half = fp32_masters ? HalfOfMaster::Remainder : HalfOfMaster::None};
        auto list_moment = [&](const std::string& of, const MomentRef& moment) {
            const int64_t moment_groups = moment_group_count(moment.format, count);
            entries_[of] = {i, moment.data, count * format_info(moment.format).bytes};
            if (moment.max) entries_[of + ".max"] = {i, moment.max, moment_groups * FLOAT_BYTES};
            if (moment.k) entries_[of + ".k"] = {i, moment.k, moment_groups * FLOAT_BYTES};
        };
        list_moment(p.name + ".m", memory_.first_moments[i]);
        list_moment(p.name + ".v", memory_.second_moments[i]);
        if (scale_table_.delayed() && p.is_linear_weight()) list_delayed_scales(i);
    }
}
void NamedMemory::list_delayed_scales(size_t i) {
    const int64_t layer = parameter_tensors_.linear_layer_index(i);
    for (OperandKind o : LINEAR_OPERANDS) {
        const std::string of = parameter_tensors_.params[i].name + suffix_of(o);
        const int64_t history_bytes = context_.settings.recipe.history_steps * FLOAT_BYTES;
        entries_[of + ".history"] = {i, scale_table_.history(o, layer), history_bytes};
        entries_[of + ".scale"] = {i, &scale_table_.entry(o, layer)->delayed_scale, FLOAT_BYTES};
    }
}

// The first values are:
//   weights   initial_value() of common/random.h; and their amaxes
//   moments   zero, which means max = 0 and k = 1 in every moment group
//   scales    none, and empty histories
void NamedMemory::initialize() {
    const std::vector<Param>& params = parameter_tensors_.params;
    scale_table_.clear();
    clear_async(memory_.moments_begin, memory_.moments_bytes, context_.stream);
    int64_t most_moment_groups = 0;
    for (const Param& p : params)
        most_moment_groups = std::max(most_moment_groups, p.padded_size() / MOMENT_GROUP_SIZE);
    const std::vector<float> ones(most_moment_groups, 1.0f);
    for (size_t i = 0; i < params.size(); i++) {
        const ParamPlace& place = parameter_tensors_.places[i];
        const InitializeArguments arguments{.owned = place.owned,
                                            .param_index = i,
                                            .used = used_elements(context_.settings.config, params[i]),
                                            .seed = context_.settings.seed};
        gpu::initialize(memory_.owned_weights, place.memory_offset, params[i], arguments, context_.stream);
        compute_weight_amax(i);
        for (const MomentRef& moment : {memory_.first_moments[i], memory_.second_moments[i]}) {
            const int64_t moment_groups = moment_group_count(moment.format, place.owned.count);
            if (moment.k) copy_async(moment.k, ones.data(), moment_groups * FLOAT_BYTES, context_.stream);
        }
    }
    // `ones` must stay until the copies are complete
    context_.wait("Initializing the weights failed");
}

// Computes the amax of the weight that is parameter i: in a new run, and after a checkpoint was read.
// (Later, adamw() finds the amax of the weights that it writes. With delayed scaling, and for what is no
// weight of a linear layer, this function does nothing.)
void NamedMemory::compute_weight_amax(size_t i) const {
    float* const amax = parameter_tensors_.weight_amax(i);
    if (!amax) return;
    clear_async(amax, sizeof(float), context_.stream);
    // FP32 weights are not quantized, so they need no amax
    if (parameter_tensors_.format_of_weights.element_format == Format::FP32) return;
    compute_amax(lazy_load(parameter_tensors_.owned_weight(i)), amax, context_.stream);
}

const NamedMemory::Entry& NamedMemory::find(const std::string& name) const {
    const auto found = entries_.find(name);
    if (found == entries_.end()) throw_no_such_tensor(name);
    return found->second;
}

void NamedMemory::read(const std::string& name, void* out) const {
    const std::string param = name.substr(0, name.rfind('.'));
    if (context_.settings.keep_gradients && name == param + ".gradient")
        return read_gradient(parameter_tensors_.param_index(param), static_cast<float*>(out));
    const Entry& entry = find(name);
    if (entry.half == HalfOfMaster::None) context_.copy_to_host(out, entry.data, entry.bytes);
    else read_half_of_masters(entry, static_cast<uint16_t*>(out));
}

void NamedMemory::write(const std::string& name, const void* in) {
    const Entry& entry = find(name);
    if (entry.half == HalfOfMaster::None) context_.wait_then_start_copy_to_gpu(entry.data, in, entry.bytes);
    else write_half_of_masters(entry, static_cast<const uint16_t*>(in));
    scale_table_.expect_empty_histories();
    compute_weight_amax(entry.param_index);
    context_.wait("Writing a tensor failed");
}

// The bits of this rank's part of the masters of parameter i.
std::vector<uint32_t> NamedMemory::read_masters(size_t i) const {
    const int64_t count = parameter_tensors_.places[i].owned.count;
    std::vector<uint32_t> bits(count);
    context_.copy_to_host(bits.data(), parameter_tensors_.owned_weight_data(i), count * FLOAT_BYTES);
    return bits;
}
static uint32_t rounded_half(uint32_t master) { return (master + 0x8000u) >> 16; }
static uint32_t remainder_half(uint32_t master) { return master & 0xFFFFu; }
// The inverse of the two. The remainder is signed: a negative one means that the weight was rounded up.
static uint32_t master_of(uint32_t rounded, uint32_t remainder) {
    return (rounded << 16) + uint32_t(int16_t(remainder));
}
void NamedMemory::read_half_of_masters(const Entry& entry, uint16_t* out) const {
    const bool remainder = entry.half == HalfOfMaster::Remainder;
    const std::vector<uint32_t> masters = read_masters(entry.param_index);
    for (size_t e = 0; e < masters.size(); e++)
        out[e] = uint16_t(remainder ? remainder_half(masters[e]) : rounded_half(masters[e]));
}
void NamedMemory::write_half_of_masters(const Entry& entry, const uint16_t* in) const {
    const bool remainder = entry.half == HalfOfMaster::Remainder;
    std::vector<uint32_t> masters = read_masters(entry.param_index);
    for (size_t e = 0; e < masters.size(); e++)
        masters[e] = remainder ? master_of(rounded_half(masters[e]), in[e])
                               : master_of(in[e], remainder_half(masters[e]));
    context_.wait_then_start_copy_to_gpu(parameter_tensors_.owned_weight_data(entry.param_index),
                                         masters.data(), int64_t(masters.size() * sizeof(uint32_t)));
    context_.wait("Writing a tensor failed");
}

// Reads the gradients of this rank's part as FP32. A BF16 value is the upper half of an FP32 one.
void NamedMemory::read_gradient(size_t i, float* out) const {
    const int64_t count = parameter_tensors_.places[i].owned.count,
                  bytes = parameter_tensors_.bytes_per_gradient;
    std::vector<uint8_t> raw(count * bytes);
    context_.copy_to_host(raw.data(), parameter_tensors_.owned_gradient_sum(i), count * bytes);
    std::fill_n(out, count, 0.0f);
    for (int64_t e = 0; e < count; e++)
        std::memcpy(reinterpret_cast<uint8_t*>(&out[e]) + FLOAT_BYTES - bytes, &raw[size_t(e * bytes)],
                    size_t(bytes));
}

}  // namespace coat::gpu
