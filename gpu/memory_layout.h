// gpu/memory_layout.h - how the memory of a GPU is divided: parameters, buckets, what a layer saves, and
// where gradients begin. All of this follows from the settings of the run, so a program without CUDA knows
// it, too, for --plan. gpu/memory_map.h then allocates the memory.
//
// Parameters and their gradients lie in the order of forward. A bucket is a few parameters that are
// neighbours in this order, and whose gradients backward completes at the same time:
//   - the embeddings;
//   - the parameters of a linear layer, and of the norm before it if there is one;
//   - the final norm, and the head if it is not tied.
// Backward goes from the last bucket to the first one.
//
// A unit is UNIT_SIZE = 8192 elements of a parameter, or fewer at its end. The squares of gradients are first
// summed by unit. (This can wait: with several GPUs matrices are cut between units, so the sums are the same
// for any number of GPUs.)
//
// With several GPUs each of them is a rank, which owns a part of each matrix. What a rank owns has its own
// names, of which the first two stand in ParamPlace, below. With one GPU, which owns everything, each of them
// says the same as another name:
//
//   what a rank owns      with one GPU
//   owned                 all elements of the parameter
//   memory_offset         Param::flat_offset
#pragma once
#include "../common/ranks.h"

namespace coat {

// The model of a GPU takes one allocation (gpu/memory_map.h), in which every tensor is aligned to this.
inline constexpr int64_t GPU_ALIGNMENT = 256;

// -----------------------------------------------------------------------------------------------------------
// Parameters and buckets

// Where a parameter is in memory order (adamw.h), and what this rank owns of it: with one GPU, all elements.
struct ParamPlace {
    Range owned;            // elements of the parameter: owned() of common/ranks.h
    int64_t memory_offset;  // elements before it in memory order
    int64_t units_before;   // units of all earlier parameters
};
// The table by parameter. One more entry says where the last parameter ends.
std::vector<ParamPlace> param_places(const RunSettings& s);

// The parameters [first_param, end_param) of a bucket, and where they are in the flat order
// (Param::flat_offset), in elements.
struct BucketRange {
    size_t first_param, end_param;
    int64_t flat_offset, elements;
};
std::vector<BucketRange> bucket_ranges(const std::vector<Param>& params);  // by bucket

// -----------------------------------------------------------------------------------------------------------
// Activations and gradients

// What a layer saves for backward: where each tensor begins, by SavedKind, in bytes from the first of them.
// One more entry says where the last one ends.
std::vector<int64_t> saved_tensor_offsets(const RunSettings& s);
int64_t saved_layer_bytes(const RunSettings& s);  // the bytes of all that a layer saves

// The bytes from the first saved activation to the first gradient of a weight.
//
// Gradients lie over saved activations that are not needed any more. Forward writes the activations of the
// layers from left to right, and backward needs them from right to left. Backward also writes the gradients
// from right to left. The drawing, which is not to scale, shows Llama-2-7B with 8 x 2048 tokens. The
// activations of a layer take 1.1 GB, and its gradients 0.4 GB:
//
//   0 GB                                 22.3 GB                      35.1 GB
//   +---------+---------+-------------+----------+---------+----------+
//   | layer 0 | layer 1 |     ...     | layer 20 |   ...   | layer 31 |  activations
//   +---------+---------+-------------+----------+---------+----------+
//                                        +-----------+---------+------+----------+------------+------+
//                                        | embedding | layer 0 | ...  | layer 31 | final norm | head |
//                                        +-----------+---------+------+----------+------------+------+
//                                        ^ gradients_offset()         ^ the end of all activations, where
//                                                                       the gradients of layer 31 begin
//
// The gradients begin as far left as possible. There are these conditions:
//   - The gradients of layer l begin no earlier than where the activations of layer l end. Backward still
//     needs the activations of the layers 0 to l when it writes these gradients.
//   - The gradients of the final norm and of the head begin no earlier than where all activations end.
//   - The gradient of the embedding may begin anywhere, because backward writes it last.
// In the drawing layer 31 decides. Its gradients cannot begin before the end of all activations, and the
// gradients of all earlier layers lie before its own.
//
// (This can wait: gpu/memory_map.cpp says where gradients lie with several micro-batches in a step, with a
// tied head, with --gradients none, and with several ranks.)
int64_t gradients_offset(const RunSettings& s);

// -----------------------------------------------------------------------------------------------------------
// The head

// Logits are computed for this many tokens at a time: a slice.
inline constexpr int64_t HEAD_SLICE_TOKENS = 4096;
// (This can wait: in a step of 8 x 2048 tokens on one GPU the answer is no.) Whether the slices of a
// micro-batch add to the gradient of the head's weight in FP32, so that their sum is rounded once.
//
// At most four gradients are added to a BF16 sum in a step. gradient_format() of common/model.h, which
// chooses the format of all gradients, counts each micro-batch as one addition. Here each slice of each
// micro-batch counts as one. So does the embedding in each micro-batch, if the head is tied to it. For
// example, 8 x 2048 tokens are 4 slices. A step of one such micro-batch sums in BF16, and a step of two in
// FP32.
inline bool head_sum_in_fp32(const RunSettings& s) {
    const int64_t slices = ceil_div(s.B * s.T, HEAD_SLICE_TOKENS);
    const int64_t additions = micro_batches_of_step(s) * (slices + s.config.tied);
    return gradient_format(s) == Format::BF16 && slices > 1 && additions > 4;
}

}  // namespace coat
