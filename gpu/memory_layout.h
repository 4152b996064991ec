// gpu/memory_layout.h - how the memory of a GPU is divided: what this rank owns of each parameter, the
// buckets, the sizes of buffers, and where gradients begin. All of this follows from the settings of the run,
// so a program without CUDA knows it too, for --plan. gpu/operators.h explains the words bucket, flat order
// and rank's order. A module is a part of the model whose weights several ranks gather at a time: the
// embeddings, a linear layer, or the head (gpu/sharding.h).
#pragma once
#include "../model.h"

namespace coat {

// The model of a GPU takes one allocation (gpu/state.h), in which every tensor is aligned to this.
inline constexpr int64_t GPU_ALIGNMENT = 256;

// -----------------------------------------------------------------------------------------------------------
// Parameters

// The part of a parameter that this rank owns, and where it is in the rank's order.
struct ShardPlace {
    Range owned;                     // elements of the parameter: owned() of model.h
    int64_t rank_offset;             // elements before it in the rank's order
    int64_t units_before_parameter;  // shard units of all earlier parameters, whoever owns them
};
// The table by parameter. One more entry follows, where the last parameter ends.
std::vector<ShardPlace> shard_places(const Setup& s);

// The parameters [first_param, end_param) of a bucket, and where they are in the flat order, in elements.
struct BucketRange {
    size_t first_param, end_param;
    int64_t flat_offset, elements;
};
std::vector<BucketRange> bucket_ranges(const std::vector<Param>& params);  // by bucket

// Sizes of the buffers into which backward writes gradients, where these are not the sums themselves.
struct GradientBufferSizes {
    int64_t largest = 0;  // elements of the largest bucket; the bucket of a tied embedding does not count
    // Elements of the bucket of a tied embedding; 0 if nothing is tied. Its gradients have a place of their
    // own, because the head adds to them at the beginning of backward, and the embedding at the end.
    int64_t embedding = 0;
};
GradientBufferSizes gradient_buffer_sizes(const Setup& s);

// With several ranks: the most bytes that a rank receives of a bucket's gradients, and the most that the
// gathered matrices of a module take (gpu/sharding.h). With one rank both are 0.
struct ReceivedBytes {
    int64_t gradients = 0, weights = 0;
};
ReceivedBytes received_bytes(const Setup& s);
// The bytes from the beginning of a gathered matrix to that of the next one.
inline int64_t gathered_bytes(const Setup& s, const Param& p) {
    return round_up(p.padded_size() * info(s.recipe.compute).bytes, GPU_ALIGNMENT);
}

// -----------------------------------------------------------------------------------------------------------
// Activations and the head

inline constexpr int64_t FP8_GEMM_MULTIPLE = 16;  // the rows of an FP8 GEMM are a multiple of this
// Rows of saved tensors: the tokens of a micro-batch, rounded up. (Where GEMMs are FP8, B * T is a multiple
// already: formats.h, linear_formats().)
inline int64_t padded_tokens(const Setup& s) { return round_up(s.B * s.T, FP8_GEMM_MULTIPLE); }
int64_t saved_layer_bytes(const Setup& s);  // the bytes of what a layer saves for backward
// The bytes from the first saved activation to the first gradient (drawn above MemoryMap in gpu/state.h).
int64_t gradients_offset(const Setup& s);

// The logits do not exist for all tokens at once.
inline constexpr int64_t HEAD_SLICE_TOKENS = 4096;
// gradient_format() (model.h) has the rule that at most four gradients are added to a BF16 sum in a step. But
// a micro-batch adds to the head's gradient once for each slice of HEAD_SLICE_TOKENS, and a tied embedding
// adds once more. Where these would be more than four additions in a step, the slices of a micro-batch are
// added in FP32, and their sum is rounded once.
inline bool head_sum_in_fp32(const Setup& s) {
    const int64_t slices = ceil_div(s.B * s.T, HEAD_SLICE_TOKENS), additions = slices + s.config.tied;
    return gradient_format(s) == Format::BF16 && slices > 1 && micro_batches_of_step(s) * additions > 4;
}

// -----------------------------------------------------------------------------------------------------------
// What the driver needs

// The bytes of page tables with which a GPU maps the allocations of the other ranks of its machine, at most
// seven: 8 bytes for each 4 KiB, as measured on two and four H100. allocated: the bytes that this rank has
// allocated; the others have allocated about as many.
inline int64_t page_table_bytes(int64_t ranks, int64_t allocated) {
    return (std::min<int64_t>(ranks, 8) - 1) * (allocated / 512);
}

}  // namespace coat
