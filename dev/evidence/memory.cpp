// memory.cpp - saved activations by operator, as the paper counts them (table 2), from the table of saved
// tensors that the CPU reference and the GPU implementation use.
//
//   build/evidence_memory [MODEL [BATCH [SEQ]]]      default: llama-2-7b, 8 x 2048 tokens; prints JSON
//
// The unit U is a BF16 tensor of the hidden size: 2BTC bytes.
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
        case Saved::Attention: return "linear";
    }
    throw std::logic_error("a saved tensor has no column");
}

Json row(const Setup& s, const std::string& name, double unit) {
    const int64_t tokens = s.B * s.T;
    std::map<std::string, double> columns;
    double total = 0;
    for (const SavedTensor& t : saved_per_layer(s)) {
        const double share = static_cast<double>(t.bytes(tokens)) / unit;
        columns[column(t.which)] += share;
        total += share;
    }
    return {{"name", name}, {"U", columns}, {"total", total}};
}

Json report(const std::string& model, int64_t B, int64_t T) {
    const ModelConfig config = find_row(models(), model, "MODEL");
    const double unit = 2.0 * static_cast<double>(B * T * config.C);
    Json rows = Json::array();
    for (const char* name : {"bf16", "te", "coat"}) {
        const Recipe& recipe = find_row(recipes(), name, "--recipe");
        std::vector<Recipe> variants = {recipe};
        if (recipe.nonlinear.fp8()) {  // only such recipes support --attention groups
            variants.push_back(recipe);
            variants.back().attention = Q_GROUP;
        }
        for (const Recipe& variant : variants) {
            const Setup s{config, variant, find_row(optimizers(), "coat", "OPTIMIZER"), B, T};
            validate(s);
            const char* const groups = variant.attention.fp8() ? ", attention in groups" : "";
            rows.push_back(row(s, concat(recipe.name, groups), unit));
        }
    }
    return {{"model", model}, {"rows", rows}};
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
