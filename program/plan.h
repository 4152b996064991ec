// plan.h - what is known of a run before it starts: learning rates, the format of every tensor, the bytes of
// every category (the paper's table of memory, for any model).
#pragma once
#include "../gpu/plan.h"

namespace coat {

// The steps of warm-up that a run makes. A warm-up that is longer than the run would end below the peak; it
// is shortened to a tenth of the run.
int64_t warmup_steps(int64_t warmup, int64_t steps);
// The learning rate of one step, counted from 0: linear warm-up to the peak, then half a cosine to a tenth of
// it.
float learning_rate(double peak, int64_t warmup, int64_t steps, int64_t step);

// Floating-point operations of training on a token: 6 for each weight of a GEMM (the head has one, looking up
// the embedding has none); and in each layer 6 T for each element of q: two products with T / 2 keys.
double flops_per_token(const ModelConfig& c, int64_t T);

// Error if a run is refused, on every device, also where only GPUs have the limit. Allocates nothing.
void validate(const Setup& s);

// The precision flow (paper section 5): formats of what operators read, write and save for backward.
struct Operator {
    std::string name, reads, weights, writes, saves = "-";  // as --plan prints them
};
using PrecisionPart = std::pair<std::string, std::vector<Operator>>;  // of a step: "backward", "update", ...
std::vector<PrecisionPart> precision_plan(const Setup& s);

// The memory of a run. The workspace is what operators need only while they run (one layer's FP8 operands,
// logits, partial sums): on a GPU, gpu_memory_plan() adds its rows.
enum class Category : uint8_t { Weights, Gradients, Optimizer, Activations, Workspace, All };

struct MemoryRow {
    Category category;
    std::string name;
    int64_t bytes;
    const char* per;  // "parameter", "token", ...: the bytes are also printed per one of these
    int64_t count;    // how many of these there are
    double of_one() const { return double(bytes) / count; }
};
std::vector<MemoryRow> memory_plan(const Setup& s);

int64_t total_bytes(const std::vector<MemoryRow>& plan, Category category = Category::All);
double saved_bytes_per_token_and_layer(const Setup& s);  // without the final norm's input

// The run that the plan is compared with: recipe bf16, FP32 moments and masters, all gradients kept.
Setup bf16_baseline(Setup s);

// -----------------------------------------------------------------------------------------------------------
// One GPU

// CUDA, cuBLASLt and the loaded kernels, measured on an H200 with CUDA 13.0.
inline constexpr int64_t GPU_CONTEXT = int64_t(533) << 20;
// memory_plan() with the rows that a GPU adds; the total has GPU_CONTEXT, page_tables() and the allocation.
// In a program without CUDA the working memory is not in it: knows_working_memory() is false.
std::vector<MemoryRow> gpu_memory_plan(const Setup& s);
bool knows_working_memory(const Setup& s);

// -----------------------------------------------------------------------------------------------------------
// Text

std::string grouped(int64_t n);                           // 6738415616 is "6,738,415,616"
std::string counted(int64_t n, const std::string& what);  // "1 rank", "2 ranks", "2 micro-batches"

// What the recipe is, and why its linear layers do not run in FP8, if they do not. s.recipe is as
// recipe_on_gpu() returns it.
std::string recipe_text(const Setup& s);

// "On a GPU: 78.8 GB. Fits: 80 GB (H100), ... Too small: 24 GB (RTX 4090), ...". complete: the bytes are all
// that the run needs.
std::string gpu_fit_text(int64_t bytes, bool complete);

// gpu: the run is to be on a GPU, so that the table has the rows of one.
void print_plan(const Setup& s, bool gpu);

}  // namespace coat
