// memory.cpp - saved activations by operator, as the paper counts them (table 2), from the table of saved
// tensors that the CPU reference and the GPU implementation use. It prints JSON, for dev/results.py.
//
//   build/evidence_memory
//
// The unit U is a BF16 tensor of the hidden size: 2BTC bytes. The shape is that of Llama-2-7B.
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>

#include "../../program/plan.h"

namespace {

using namespace coat;
using Json = nlohmann::ordered_json;

// The paper's columns. It counts the output of attention with the linear layer that reads it.
const char* column(Saved which) {
    switch (which) {
        case Saved::Norm1Input:
        case Saved::Norm2Input: return "norm";
        case Saved::GateUp: return "activation function";
        case Saved::Qkv:
        case Saved::LogSumExp: return "attention";
        case Saved::Attention: return "linear";
    }
    throw std::logic_error("a saved tensor has no column");
}

Json row(const char* recipe, const Quant& attention, const std::string& name) {
    Setup s{find_row(models(), "llama-2-7b", "--model"), find_row(recipes(), recipe, "--recipe"),
            find_row(optimizers(), "coat", "--optimizer"), 8, 2048};
    s.recipe.attention = attention;
    validate(s);
    std::map<std::string, double> columns;
    double total = 0;
    for (const SavedTensor& t : saved_per_layer(s)) {
        const double share = double(t.bytes(s.B * s.T)) / double(2 * s.B * s.T * s.config.C);
        columns[column(t.which)] += share;
        total += share;
    }
    return {{"name", name}, {"U", columns}, {"total", total}};
}

}  // namespace

int main() {
    const Json rows{row("bf16", Q_BF16, "bf16"), row("te", Q_BF16, "te"), row("coat", Q_BF16, "coat"),
                    row("coat", Q_GROUP, "coat, attention in groups")};
    std::cout << Json{{"rows", rows}}.dump(1) << "\n";
}
