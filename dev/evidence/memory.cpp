// memory.cpp - saved activations by operator, as the paper counts them (table 2), from the table of saved
// tensors that the CPU reference and the GPU implementation use.
//
//   build/evidence_memory [MODEL [BATCH [SEQ]]] > memory.json      default: llama-2-7b, 8 x 2048 tokens
//
// The unit U is a BF16 tensor of the hidden size: 2BTC bytes. Each recipe has two rows: one that saves the
// outputs of norms and activation functions, and one that recomputes them in backward. timing.cu measures the
// same on a GPU.
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "../../plan.h"

namespace {

using namespace coat;
using Json = nlohmann::ordered_json;

// The paper's columns. It counts the output of attention with the linear layer that reads it.
const char* column(Saved which) {
    switch (which) {
        case Saved::Norm1Input: case Saved::Norm2Input: return "norm";
        case Saved::GateUp: return "activation function";
        case Saved::Qkv: case Saved::LogSumExp: return "attention";
        case Saved::Attention:
        case Saved::Norm1Output:
        case Saved::Norm2Output:
        case Saved::ActivationOutput: return "linear";
    }
    throw std::logic_error("a saved tensor has no column");
}

Json row(const Setup& s, const std::string& name, double unit) {
    const int64_t tokens = s.B * s.T;
    Json tensors = Json::array();
    std::map<std::string, double> columns;
    double total = 0;
    for (const SavedTensor& t : saved_per_layer(s)) {
        const double share = static_cast<double>(t.bytes(tokens)) / unit;
        columns[column(t.which)] += share, total += share;
        tensors.push_back({{"name", t.name}, {"format", t.quant.text()}, {"U", share}});
    }
    return {{"name", name},   {"recompute", s.recompute}, {"U", columns},
            {"total", total}, {"bytes", total * unit},    {"tensors", tensors}};
}

Json report(const std::string& model, int64_t B, int64_t T) {
    const ModelConfig config = find_row(models(), model, "MODEL");
    const double unit = 2.0 * static_cast<double>(B * T * config.C);
    Json rows = Json::array();
    for (const Recipe& recipe : recipes()) {
        if (recipe.compute == Format::F32) continue;
        std::vector<Recipe> variants = {recipe};
        if (recipe.nonlinear.fp8()) {  // only such recipes support --attention groups
            variants.push_back(recipe);
            variants.back().attention = Q_GROUP;
        }
        for (const Recipe& variant : variants)
            for (const bool recompute : {false, true}) {
                Setup s{config, variant, find_row(optimizers(), "coat", "OPTIMIZER"), B, T};
                s.recompute = recompute;
                validate(s);
                rows.push_back(row(
                    s, std::string(recipe.name) + (variant.attention.fp8() ? ", attention in groups" : ""),
                    unit));
            }
    }
    return {{"model", model}, {"batch", B}, {"seq", T}, {"unit_bytes", unit}, {"rows", rows}};
}

}  // namespace

int main(int argc, char** argv) {
    try {
        auto number = [&](int i, int64_t otherwise) { return argc > i ? std::stoll(argv[i]) : otherwise; };
        std::cout << report(argc > 1 ? argv[1] : "llama-2-7b", number(2, 8), number(3, 2048)).dump(1) << "\n";
    } catch (const std::exception& e) {
        std::cerr << e.what() << "\n";
        return 1;
    }
}
