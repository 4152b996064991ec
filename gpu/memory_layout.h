// gpu/memory_layout.h - how the memory of a GPU is divided: what this rank owns of each parameter, the
// buckets, the sizes of buffers, and where gradients begin. All of this follows from the settings of the
// run, so a program without CUDA knows it too, for --plan. gpu/memory_map.h then
// draws the memory.
//
// Parameters and their gradients lie in the order of forward. A bucket is a few parameters that are
// neighbours in this order, and whose gradients backward completes at the same time:
//   - the embeddings;
//   - the parameters of a linear layer, and of the norm before it if there is one;
//   - the final norm, and the head if it is not tied.
// Backward goes from the last bucket to the first one.
//
// With several GPUs each of them is a rank, which owns a shard of every matrix. Shards lie in the rank's
// order (adamw.h).
#pragma once
#include "../common/ranks.h"

namespace coat {

// The model of a GPU takes one allocation (gpu/memory_map.h), in which every tensor is aligned to this.
inline constexpr int64_t GPU_ALIGNMENT = 256;

// -----------------------------------------------------------------------------------------------------------
// Parameters and buckets

// The part of a parameter that this rank owns (with one rank, the whole), and where it is in the rank's
// order.
struct ShardPlace {
    Range owned;                           // elements of the parameter: owned() of common/ranks.h
    int64_t rank_offset;                   // elements before it in the rank's order
    int64_t shard_units_before_parameter;  // shard units of all earlier parameters, whoever owns them
};
// The table by parameter. One more entry says where the last parameter ends.
std::vector<ShardPlace> shard_places(const RunSettings& s);

// The parameters [first_param, end_param) of a bucket, and where they are in the flat order (adamw.h), in
// elements.
struct BucketRange {
    size_t first_param, end_param;
    int64_t flat_offset, elements;
};
std::vector<BucketRange> bucket_ranges(const std::vector<Param>& params);  // by bucket

// How many linear layers a model with these parameters has: one for each parameter with is_linear_weight.
int64_t count_linear_layers(const std::vector<Param>& params);

// -----------------------------------------------------------------------------------------------------------
// Activations and the head

inline constexpr int64_t FP8_GEMM_MULTIPLE = 16;  // the rows of an FP8 GEMM are a multiple of 16
// The rows for which a saved tensor has memory: the tokens of a micro-batch, rounded up. (In runs whose GEMMs
// are in FP8 rounding changes nothing, because B * T is a multiple of 16: linear_formats() in
// common/recipes.h.)
inline int64_t padded_tokens(const RunSettings& s) { return round_up(s.B * s.T, FP8_GEMM_MULTIPLE); }
// What a layer saves for backward: where each tensor begins, by SavedKind, in bytes from the first of them.
// One more entry says where the last one ends.
std::vector<int64_t> saved_tensor_offsets(const RunSettings& s);
int64_t saved_layer_bytes(const RunSettings& s);  // the bytes of all that a layer saves
// The bytes from the first saved activation to the first gradient (drawing: gpu/memory_map.h).
int64_t gradients_offset(const RunSettings& s);

// Logits are computed for this many tokens at a time.
inline constexpr int64_t HEAD_SLICE_TOKENS = 4096;
// Whether the slices of a micro-batch add to the gradient of the head's weight in FP32, so that their sum is
// rounded once. The rule is that at most four gradients are added to a BF16 sum in a step. For example,
// 8 x 2048 tokens are 4 slices, which add to this gradient 4 times. So in a step of one micro-batch the sum
// may be in BF16. (gradient_format() of common/model.h has the same rule, but counts one addition for a
// micro-batch. To the gradient of a tied embedding the embedding adds, too.)
inline bool head_sum_in_fp32(const RunSettings& s) {
    const int64_t slices = ceil_div(s.B * s.T, HEAD_SLICE_TOKENS);
    const int64_t additions = micro_batches_of_step(s) * (slices + s.config.tied);
    return gradient_format(s) == Format::BF16 && slices > 1 && additions > 4;
}

// -----------------------------------------------------------------------------------------------------------
// Other runs (this can wait): --gradients none and several GPUs

// The sizes of the buffers of gradients. Runs with --gradients none and runs with several GPUs have such
// buffers (gpu/memory_map.cpp). The bucket of a tied embedding has a buffer of its own, because the head adds
// to this gradient at the beginning of backward, and the embedding at the end.
struct GradientBufferSizes {
    int64_t largest = 0;    // elements of the largest of the other buckets
    int64_t embedding = 0;  // elements of the bucket of a tied embedding; 0 if nothing is tied
};
GradientBufferSizes gradient_buffer_sizes(const RunSettings& s);

// What a rank receives of the others at a time: gradients, and weights. With one rank both numbers are 0. A
// gather unit is a part of the model whose weights the ranks gather at a time: the embeddings, a linear
// layer, or the head (gpu/sharding.h).
struct ReceivedBytes {
    int64_t gradients = 0;  // the most bytes that it receives of a bucket's gradients
    int64_t weights = 0;    // the most bytes that the gathered matrices of a gather unit take
};
ReceivedBytes received_bytes(const RunSettings& s);
// The bytes from the beginning of a gathered matrix to that of the next one.
inline int64_t gathered_bytes(const RunSettings& s, const Param& p) {
    return round_up(p.padded_size() * format_info(s.recipe.compute_format).bytes, GPU_ALIGNMENT);
}

// The bytes of page tables that CUDA's driver needs. A GPU maps the allocations of the other ranks of its
// machine, at most seven, and page tables take 8 bytes for each 4 KiB of them (measured on two and four
// H100). allocated: the bytes that this rank has allocated; the others have allocated about as many.
inline int64_t page_table_bytes(int64_t ranks, int64_t allocated) {
    return (std::min<int64_t>(ranks, 8) - 1) * (allocated / 512);
}

}  // namespace coat
