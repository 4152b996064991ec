// gpus.cpp - the tables "Which GPU" of dev/README.md, from the functions that decide it when a run starts.
//
//   make build/evidence_gpus && build/evidence_gpus        writes them into dev/README.md; needs nvcc, no GPU
#include <fstream>
#include <iostream>
#include <sstream>

#include "../../program/plan.h"

namespace {

using namespace coat;

const char* const START = "<!-- gpus: make build/evidence_gpus && build/evidence_gpus -->\n";
const char* const END = "<!-- end -->\n";

// How linear layers run; recipes that run alike share a row. An older GPU than 8.0 is refused
// (gpu/run.cpp).
std::string recipes_by_capability() {
    std::vector<std::pair<std::string, std::string>> rows;  // names, cells
    for (const Recipe& r : recipes()) {
        std::string cells;
        for (int capability : {80, 86, 89, 90, 100, 120}) try {
                const Recipe ours = recipe_on_gpu(r, capability);
                cells += ours.x.fp8() ? " FP8 |" : ours.compute == Format::F32 ? " FP32 |" : " BF16 |";
            } catch (const Error&) {
                cells += " error |";
            }
        if (rows.empty() || rows.back().second != cells) rows.push_back({"", cells});
        rows.back().first += concat(rows.back().first.empty() ? "`" : ", `", r.name, "`");
    }
    std::string table =
        "| GEMMs of `--recipe` | 8.0 | 8.6 | 8.9 | 9.0 | 10.0 | 12.0 |\n|---|---|---|---|---|---|---|\n";
    for (const auto& [names, cells] : rows) table += "| " + names + " |" + cells + "\n";
    return table;
}

// With --batch 1 --seq 2048, as --plan says. The leanest flags are --attention groups --master none
// --gradients none --clip 0.
std::string models_by_gpu() {
    struct Gpu {
        const char* name;
        int64_t mib;  // as nvidia-smi reports it
    };
    const Gpu gpus[] = {{"24 GB (RTX 4090)", 24564},
                        {"40 GB (A100)", 40960},
                        {"48 GB (L40S)", 46068},
                        {"80 GB (H100)", 81559},
                        {"141 GB (H200)", 143771}};
    std::string table = "| model | GB, default flags | GB, leanest flags |", line = "|---|---|---|";
    for (const Gpu& gpu : gpus) table += concat(" ", gpu.name, " |"), line += "---|";
    table += "\n" + line + "\n";
    for (const char* name : {"tinyllama-1.1b", "llama-2-7b", "llama-3.1-8b", "llama-2-13b", "llama-30b"}) {
        const ModelConfig& model = find_row(models(), name, "");
        Setup s{model, find_row(recipes(), "coat", ""), find_row(optimizers(), "coat", ""), 1, 2048};
        const int64_t by_default = total_bytes(gpu_memory_plan(s));
        s.recipe.attention = E4M3_GROUP, s.master = s.keep_gradients = false;
        const int64_t leanest = total_bytes(gpu_memory_plan(s));
        char gb[64];
        std::snprintf(gb, sizeof gb, "` | %.1f | %.1f |", double(by_default) / 1e9, double(leanest) / 1e9);
        table += "| `" + model.name + gb;
        for (const Gpu& gpu : gpus)
            table += by_default <= gpu.mib << 20 ? " yes |"
                     : leanest <= gpu.mib << 20  ? " leanest |"
                                                 : " no |";
        table += "\n";
    }
    return table;
}

bool knows_gpus() {  // built with nvcc
    return arena_bytes({find_row(models(), "gpt2", ""), recipes()[0], optimizers()[0], 1, 16}, false) > 0;
}

}  // namespace

int main() {
    const char* const path = "dev/README.md";
    std::stringstream page;
    page << std::ifstream(path).rdbuf();
    const std::string text = page.str();
    const size_t start = text.find(START), end = text.find(END, start);
    if (end == std::string::npos || !knows_gpus()) {
        std::cerr << "This needs the lines <!-- gpus --> and <!-- end --> in " << path
                  << ", and a build with nvcc.\n";
        return 1;
    }
    std::ofstream(path) << text.substr(0, start) << START << recipes_by_capability() << "\n"
                        << models_by_gpu() << text.substr(end);
    return 0;
}
