// gpu/plan.h - what is known of a run on a GPU before it starts, without CUDA: how its memory is divided, and
// which recipes a GPU can run.
#pragma once
#include "../model.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// The model on a GPU, and its memory: one allocation (gpu/run.h), in which every tensor is aligned to this.

inline constexpr int64_t GPU_ALIGNMENT = 256;

namespace gpu {
class Transport;  // gpu/ranks.h: how GPUs send each other bytes
}
// The model on a GPU (model.cu), in an allocation of so many bytes. cache_weights: all FP8 weights are made
// once per step; else when needed. transport: to the other ranks. make_gpu() of model.h first asks what the
// GPU supports.
std::unique_ptr<Model> gpu_model(const Setup& s, int64_t bytes, bool cache_weights,
                                 std::shared_ptr<gpu::Transport> transport = nullptr);
// The bytes that it needs, by a dry run of its step, which needs no GPU; 0 in a program without CUDA.
int64_t arena_bytes(const Setup& s, bool cache_weights);
// Whether it pays off to make all FP8 weights once per step, if memory allows.
bool caches_weights(const Setup& s);

// A GPU maps what the other ranks of its machine have allocated, at most seven. The page tables have 8 bytes
// for each 4 KiB, as measured on two and four H100. All ranks allocate about the same.
inline int64_t page_tables(int64_t ranks, int64_t allocated) {
    return (std::min<int64_t>(ranks, 8) - 1) * (allocated / 512);
}

// -----------------------------------------------------------------------------------------------------------
// Parameters

// Where a rank has its part of a parameter, in elements: among its weights, and likewise among its masters,
// moments and sums of gradients. Each has the parts of all parameters one after the other, padded to whole
// groups of moments. With one rank that is the flat order.
struct ShardPlace {
    Range own;           // owned()
    int64_t at;          // of its first element
    int64_t shard_unit;  // number of the parameter's first shard unit among those of all parameters
};
std::vector<ShardPlace> shard_places(const Setup& s);  // by parameter; and one where the last one ends

// The parameters [first, last) of a bucket (Param::bucket), and their elements in the flat order.
struct BucketRange {
    size_t first, last;
    int64_t offset, elements;
};
std::vector<BucketRange> bucket_ranges(const std::vector<Param>& params);  // by bucket
// Elements of the largest bucket, and of a tied embedding's, to whose gradient the head adds first.
struct BucketElements {
    int64_t largest = 0, embedding = 0;
};
BucketElements bucket_elements(const Setup& s);

// Several ranks: the most bytes that a rank receives of a bucket's gradients, and that the matrices of a
// stage take when they are gathered (gpu/ranks.h). With one rank both are 0.
struct ReceivedBytes {
    int64_t gradients = 0, weights = 0;
};
ReceivedBytes received_bytes(const Setup& s);
// The bytes between a gathered matrix and the next one.
inline int64_t gathered_bytes(const Setup& s, const Param& p) {
    return round_up(p.padded_size() * info(s.recipe.compute).bytes, GPU_ALIGNMENT);
}

// -----------------------------------------------------------------------------------------------------------
// Activations and the head

inline constexpr int64_t FP8_GEMM_MULTIPLE = 16;  // FP8 GEMMs need a multiple of so many rows
// Rows of saved tensors: those of a micro-batch, rounded up.
inline int64_t gpu_tokens(const Setup& s) { return round_up(s.B * s.T, FP8_GEMM_MULTIPLE); }
int64_t saved_layer_bytes(const Setup& s);  // of what a layer saves for backward
// The offset of the first gradient from the first saved activation. With one micro-batch per step, a layer's
// gradients may lie where later layers' activations were: those are not needed when gradients are written.
int64_t gradients_offset(const Setup& s);

// The logits do not exist for all tokens at once.
inline constexpr int64_t HEAD_TOKENS = 4096;
// A micro-batch adds to the head's gradient once for each piece of HEAD_TOKENS; a tied embedding adds once
// more. If these additions would round a BF16 sum more than four times in a step, the pieces of a micro-batch
// are added in FP32, and their sum is rounded once. One piece is one rounding either way.
inline bool head_sum_in_fp32(const Setup& s) {
    const int64_t pieces = ceil_div(s.B * s.T, HEAD_TOKENS), additions = pieces + s.config.tied;
    return gradient_format(s) == Format::BF16 && pieces > 1 && micro_batches(s) * additions > 4;
}

// -----------------------------------------------------------------------------------------------------------

// The recipe as a GPU of this compute capability (90 is 9.0) runs it (table: dev/README.md), or an Error.
Recipe recipe_on_gpu(const Recipe& r, int capability);

std::string gigabytes(int64_t bytes);  // of 10^9 bytes, without the unit: "78.8", "0.021"

}  // namespace coat
