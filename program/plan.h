// program/plan.h - what is known of a run before it starts, as --plan prints it: the format of every tensor,
// and the bytes of every kind of memory (the paper's table of memory, for any model).
#pragma once
#include "../gpu/gpu_model.h"
#include "../gpu/memory_layout.h"

namespace coat {

// The precision flow (paper, section 5): the formats of what an operator reads, of its weights, of what it
// writes, and of what it saves for backward, as --plan prints them.
struct Operator {
    std::string name;
    std::string reads = "-";
    std::string weights = "-";
    std::string writes = "-";
    std::string saves = "-";
};
// A part of a step with its title: "backward", "update", ...
using PrecisionPart = std::pair<std::string, std::vector<Operator>>;
std::vector<PrecisionPart> precision_plan(const RunSettings& s);

// The kinds of memory of a run. The workspace is what operators need only while they run (one layer's FP8
// operands, logits, partial sums). It has rows only in gpu_memory_plan().
enum class Category : uint8_t { Weights, Gradients, Optimizer, Activations, Workspace, All };

struct MemoryRow {
    Category category;
    std::string name;
    int64_t bytes;
    const char* per;  // the item: "parameter", "token", ...; "": the memory has no items
    int64_t count;    // how many items there are
};
std::vector<MemoryRow> memory_plan(const RunSettings& s);

int64_t total_bytes(const std::vector<MemoryRow>& plan, Category category = Category::All);
// On the CPU a run has these bytes besides memory_plan(): weights and gradients in FP32, with which the CPU
// computes.
int64_t cpu_copies_bytes(const RunSettings& s);
double saved_bytes_per_token_and_layer(const RunSettings& s);  // without the final norm's input

// The run that the plan is compared with: recipe bf16, FP32 moments and masters, all gradients kept.
RunSettings bf16_baseline(RunSettings s);

// -----------------------------------------------------------------------------------------------------------
// One GPU

// The bytes of CUDA, cuBLASLt and the loaded kernels, measured on an H200 with CUDA 13.0.
inline constexpr int64_t GPU_CONTEXT = int64_t(533) << 20;
// memory_plan() with the rows that a GPU adds: the total is all that the run takes on a GPU. The total has
// the workspace only if built_with_cuda(): a program without CUDA does not know the size of the workspace.
std::vector<MemoryRow> gpu_memory_plan(const RunSettings& s);

// -----------------------------------------------------------------------------------------------------------
// Text

// What the recipe is, and why its linear layers do not run in FP8, if they do not. s.recipe is as
// recipe_on_gpu() returns it.
std::string recipe_text(const RunSettings& s);

// "On a GPU: 78.8 GB. Fits: 80 GB (H100), ... Too small: 24 GB (RTX 4090), ...". `complete` says that the
// bytes are all that the run needs.
std::string gpu_fit_text(int64_t bytes, bool complete);

// Prints the formats and the memory of a run; with the rows that a GPU adds if the run is to be `on_gpu`.
void print_plan(const RunSettings& s, bool on_gpu);

}  // namespace coat
