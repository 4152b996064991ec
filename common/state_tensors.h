// common/state_tensors.h - the state of a run: all tensors that it needs to resume, by name. CPU and GPU have
// the same tensors. Model::read() and write() copy them, and a checkpoint consists of them.
#pragma once
#include <functional>
#include <numeric>

#include "ranks.h"

namespace coat {

struct StateTensor {
    // The weight has the name of its parameter. The other tensors of the parameter have this name and a
    // suffix: ".remainder", ".m", ".v", ".m.max", ".m.k", ".x.scale", ...
    std::string name;
    const char* dtype;  // its name in safetensors files
    int bytes;          // of an element
    std::vector<int64_t> shape;
    Param param;
    // How many consecutive elements of the parameter share one element of this tensor; ALL: all elements. For
    // example, the 128 elements of a moment group share one max.
    int64_t shared_by = 1;
    static constexpr int64_t ALL = 0;

    int64_t size() const {
        return std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>());
    }
    int64_t total_bytes() const { return size() * bytes; }
};

// The name of a format in safetensors files.
inline const char* safetensors_dtype(Format f) {
    switch (f) {
        case Format::FP32: return "F32";
        case Format::BF16: return "BF16";
        case Format::E4M3: return "F8_E4M3";
        case Format::E5M2: return "F8_E5M2";
    }
    return "";
}

// Only a mistake in the code that calls Model::read() or write() leads here.
[[noreturn]] inline void throw_no_such_tensor(const std::string& name) {
    throw Error("The model has no tensor ", name, ".");
}

// The index of the parameter that a state tensor belongs to: of "layers.0.qkv" for "layers.0.qkv.m.max". Of
// all names of parameters, that of this parameter is the longest prefix of the tensor's name. The table has
// "layers.0.qkv.bias" after "layers.0.qkv", so the last match is the longest.
inline size_t param_index_of(const std::vector<Param>& params, const std::string& tensor) {
    size_t best = params.size();
    for (size_t i = 0; i < params.size(); i++)
        if ((tensor + ".").starts_with(params[i].name + ".")) best = i;
    if (best == params.size()) throw_no_such_tensor(tensor);
    return best;
}

inline std::vector<StateTensor> weight_tensors(const ModelConfig& config) {
    std::vector<StateTensor> table;
    for (const Param& p : parameters(config))
        table.push_back({.name = p.name, .dtype = "BF16", .bytes = 2, .shape = {p.rows, p.cols}, .param = p});
    return table;
}

// What follows the weight's name in the names of the operand's state tensors.
inline const char* suffix_of(OperandKind o) {
    if (o == OperandKind::X) return ".x";
    return o == OperandKind::W ? ".w" : ".g";
}

// The state of delayed scaling (recipes.h, ScaleSource), for each operand of a linear layer: the amaxes of
// the last steps, the newest first, and the scale of the next step. All are 0 before the first step.
inline std::vector<StateTensor> delayed_scaling_tensors(const ModelConfig& config, const Recipe& r) {
    std::vector<StateTensor> table;
    auto add = [&](const Param& p, const std::string& suffix, int64_t size) {
        table.push_back({.name = p.name + suffix,
                         .dtype = "F32",
                         .bytes = 4,
                         .shape = {size},
                         .param = p,
                         .shared_by = StateTensor::ALL});
    };
    for (const Param& p : parameters(config)) {
        if (r.scale_source != ScaleSource::Delayed || !p.is_linear_weight()) continue;
        for (OperandKind o : LINEAR_OPERANDS) {
            add(p, concat(suffix_of(o), ".history"), r.history_steps);
            add(p, concat(suffix_of(o), ".scale"), 1);
        }
    }
    return table;
}

// The remainders of the masters, the moments with their max and k, and the state of delayed scaling. A BF16
// weight and its signed 16-bit remainder are the FP32 master (reference/rounding.h, split_master).
inline std::vector<StateTensor> tensors_besides_weights(const RunSettings& s) {
    std::vector<StateTensor> table;
    for (const Param& p : parameters(s.config)) {
        auto add = [&](const std::string& suffix, const char* dtype, int bytes, std::vector<int64_t> shape,
                       int64_t shared_by) {
            table.push_back({.name = p.name + suffix,
                             .dtype = dtype,
                             .bytes = bytes,
                             .shape = std::move(shape),
                             .param = p,
                             .shared_by = shared_by});
        };
        if (s.keep_masters) add(".remainder", "I16", 2, {p.rows, p.cols}, 1);
        for (const auto& [moment, wanted] :
             {std::pair<std::string, Format>{".m", s.optimizer.m_format}, {".v", s.optimizer.v_format}}) {
            const Format f = p.moment_format(wanted);
            const int64_t moment_groups = moment_group_count(f, p.size());
            add(moment, safetensors_dtype(f), format_info(f).bytes, {p.rows, p.cols}, 1);
            if (moment_groups) add(moment + ".max", "F32", 4, {moment_groups}, MOMENT_GROUP_SIZE);
            if (s.optimizer.uses_expansion(f))
                add(moment + ".k", "F32", 4, {moment_groups}, MOMENT_GROUP_SIZE);
        }
    }
    for (const StateTensor& t : delayed_scaling_tensors(s.config, s.recipe)) table.push_back(t);
    return table;
}

// The elements of a state tensor that this rank owns: those that belong to its part of the parameter. Every
// rank owns a value that all elements of a parameter share. Model::read() and write() pass the owned
// elements.
inline Range owned(const RunSettings& s, const StateTensor& t) {
    if (t.shared_by == StateTensor::ALL) return {.first = 0, .count = t.size()};
    const Range part = owned(s, t.param);
    const int64_t first = ceil_div(part.first, t.shared_by);
    const int64_t end = ceil_div(part.first + part.count, t.shared_by);
    return {.first = first, .count = end - first};
}

}  // namespace coat
