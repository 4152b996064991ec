// gpu/memory_layout.h - how the memory of a GPU is divided: what this rank owns of each parameter, the
// buckets, the sizes of buffers, and where gradients begin. All of this follows from the settings of the
// run, so a program without CUDA knows it too, for --plan. The words bucket, flat order and rank's order are
// those of adamw.h. The map of the memory is drawn in gpu/memory_map.h: read it first.
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

// The parameters [first_param, end_param) of a bucket, and where they are in the flat order, in elements.
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
// Rows of saved tensors: the tokens of a micro-batch, rounded up. (If GEMMs are in FP8, B * T is a multiple
// of 16 already: linear_formats() in common/recipes.h.)
inline int64_t padded_tokens(const RunSettings& s) { return round_up(s.B * s.T, FP8_GEMM_MULTIPLE); }
int64_t saved_layer_bytes(const RunSettings& s);  // the bytes of what a layer saves for backward
// The bytes from the first saved activation to the first gradient (drawing: gpu/memory_map.h).
int64_t gradients_offset(const RunSettings& s);

// The logits exist for so many tokens at a time.
inline constexpr int64_t HEAD_SLICE_TOKENS = 4096;
// Whether the slices of a micro-batch add to the gradient of the head's weight in FP32, so that their sum is
// rounded once. The rule is that at most four gradients are added to a BF16 sum in a step. gradient_format()
// (common/model.h) counts one addition for all slices of a micro-batch. If there are several slices, their
// additions are counted here: each slice adds once, and a tied embedding once more.
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
