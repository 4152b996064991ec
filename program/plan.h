// plan.h - what is known of a run before it starts: learning rates, the format of every tensor, the bytes of
// every category (the paper's table of memory, for any model), and how a GPU's memory is divided.
#pragma once
#include "../model.h"

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
// One GPU. All tensors lie in one allocation (gpu/arena.cuh).

inline constexpr int64_t GPU_ALIGNMENT = 256;
// CUDA, cuBLASLt and the loaded kernels, measured on an H200 with CUDA 13.0.
inline constexpr int64_t GPU_CONTEXT = int64_t(533) << 20;
// A GPU maps what the other ranks of its machine have allocated, at most seven. The page tables have 8 bytes
// for each 4 KiB, as measured on two and four H100. All ranks allocate about the same.
inline int64_t page_tables(int64_t ranks, int64_t allocated) {
    return (std::min<int64_t>(ranks, 8) - 1) * (allocated / 512);
}

// Where a rank has its part of a parameter, in elements: among its weights, and likewise among its masters,
// moments and sums of gradients. Each has the parts of all parameters one after the other, padded to whole
// groups of moments. With one rank that is the flat order.
struct ShardPlace {
    Range own;           // owned()
    int64_t at;          // of its first element
    int64_t shard_unit;  // number of the parameter's first shard unit among those of all parameters
};

// The model on a GPU (model.cu), in an allocation of so many bytes. cache_weights: all FP8 weights are made
// once per step; else when needed. make_gpu() of model.h first asks what the GPU supports (gpu/this_gpu.cu).
std::unique_ptr<Model> gpu_model(const Setup& s, int64_t bytes, bool cache_weights);
// The bytes that it needs, by a dry run of its step, which needs no GPU; 0 in a program without CUDA.
int64_t arena_bytes(const Setup& s, bool cache_weights);

std::vector<ShardPlace> shard_places(const Setup& s);  // by parameter; and one where the last one ends
// Elements of the largest bucket, and of a tied embedding's, to whose gradient the head adds first.
struct BucketElements {
    int64_t largest = 0, embedding = 0;
};
BucketElements bucket_elements(const Setup& s);
// Rows of saved tensors: those of a micro-batch, rounded up, because FP8 GEMMs need a multiple of 16.
inline int64_t gpu_tokens(const Setup& s) { return round_up(s.B * s.T, 16); }
int64_t saved_layer_bytes(const Setup& s);  // of what a layer saves for backward
// The offset of the first gradient from the first saved activation. With one micro-batch per step, a layer's
// gradients may lie where later layers' activations were: those are not needed when gradients are written.
int64_t gradients_offset(const Setup& s);

// The parameters [first, last) of a bucket (Param::bucket), and their elements in the flat order.
struct BucketRange {
    size_t first, last;
    int64_t offset, elements;
};
std::vector<BucketRange> bucket_ranges(const std::vector<Param>& params);  // by bucket

// Whether it pays off to make all FP8 weights once per step, if memory allows (gpu/this_gpu.cu).
bool caches_weights(const Setup& s);
// memory_plan() with the rows that a GPU adds; the total has GPU_CONTEXT, page_tables() and the allocation.
std::vector<MemoryRow> gpu_memory_plan(const Setup& s);

// The recipe as a GPU of this compute capability (90 is 9.0) runs it (table: dev/README.md), or an Error.
Recipe recipe_on_gpu(const Recipe& r, int capability);
// The logits do not exist for all tokens at once.
inline constexpr int64_t HEAD_TOKENS = 4096;
// A micro-batch adds to the head's gradient once for each piece of HEAD_TOKENS; a tied embedding adds once
// more. If these additions would round a BF16 sum more than four times in a step, the pieces of a micro-batch
// are added in FP32, and their sum is rounded once. One piece is one rounding either way.
inline bool head_sum_apart(const Setup& s) {
    const int64_t pieces = ceil_div(s.B * s.T, HEAD_TOKENS), additions = pieces + s.config.tied;
    return gradient_format(s) == Format::BF16 && pieces > 1 && micro_batches(s) * additions > 4;
}

// -----------------------------------------------------------------------------------------------------------
// Text

std::string grouped(int64_t n);                           // 6738415616 is "6,738,415,616"
std::string gigabytes(int64_t bytes);                     // of 10^9 bytes, without the unit: "78.8", "0.021"
std::string counted(int64_t n, const std::string& what);  // "1 rank", "2 ranks", "2 micro-batches"

// What the recipe is, and why its linear layers do not run in FP8, if they do not. s.recipe is as
// recipe_on_gpu() returns it.
std::string recipe_text(const Setup& s);

void print_plan(const Setup& s);

}  // namespace coat
