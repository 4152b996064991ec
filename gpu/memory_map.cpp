// gpu/memory_map.cpp - the allocation of what lasts for a run (gpu/memory_map.h).
#include "memory_map.h"

#include "gemm.h"
#include "layers.h"
#include "norm.h"

namespace coat::gpu {

// Allocates the moments of what this rank owns. (If a moment has one scale per tensor, there is room for two:
// while the update encodes with the new scale, the old one still decodes.)
static void allocate_moments(MemoryMap& map, GpuContext& context, const std::vector<ShardPlace>& places) {
    Arena& arena = context.arena;
    const OptimizerFormats& o = context.settings.optimizer;
    const int64_t maxima = o.one_scale ? 2 : 1;
    map.moments_begin = arena.allocate(0);  // the place of the next allocation
    auto allocate = [&](Format f, const Range& owned) {
        const int64_t moment_groups = o.moment_group_count(f, owned.count);
        MomentRef moment{.data = arena.allocate(padded_count(owned) * format_info(f).bytes),
                         .max = nullptr,
                         .k = nullptr,
                         .format = f};
        if (is_scaled(f)) moment.max = arena.allocate<float>(moment_groups * maxima);
        if (o.uses_expansion(f)) moment.k = arena.allocate<float>(moment_groups);
        return moment;
    };
    for (size_t i = 0; i < context.params.size(); i++) {
        const Param& p = context.params[i];
        map.first_moments.push_back(allocate(p.moment_format(o.m_format), places[i].owned));
        map.second_moments.push_back(allocate(p.moment_format(o.v_format), places[i].owned));
    }
    map.moments_bytes = arena.allocate(0) - static_cast<uint8_t*>(map.moments_begin);
}

// Buffers of gradients, for --gradients none and for several ranks: one that all buckets use in turn, or two,
// for even and odd buckets; and one for the bucket of a tied embedding. Returns the buffer of each bucket.
static std::vector<uint8_t*> allocate_gradient_buffers(const RunSettings& s, Arena& arena, size_t buckets,
                                                       bool two) {
    const GradientBufferSizes elements = gradient_buffer_sizes(s);
    const int64_t element_bytes = format_info(gradient_format(s)).bytes;
    uint8_t* const even = arena.allocate(elements.largest * element_bytes);
    uint8_t* const odd = two ? arena.allocate(elements.largest * element_bytes) : even;
    std::vector<uint8_t*> by_bucket(buckets);
    for (size_t b = 0; b < buckets; b++) by_bucket[b] = b % 2 ? odd : even;
    if (s.config.tied) by_bucket[0] = arena.allocate(elements.embedding * element_bytes);
    return by_bucket;
}

// Allocates the saved activations and the gradients, as in the drawing of gpu/memory_map.h.
//
// Where gradients lie in other runs (this can wait):
//   several micro-batches a rank   all gradients lie after the activations, because their sums outlive the
//                                  next forward
//   a tied embedding               all gradients lie after the activations: the gradient of the embedding is
//                                  the first of them, but the head writes to it before all others
//   --gradients none               there is one buffer, which all buckets use in turn: a bucket is updated as
//                                  soon as its gradients are complete
//   several ranks                  the place that holds the gradients of a run with one rank holds this
//                                  rank's part of the sums of the step. Backward writes to two buffers, one
//                                  for even and one for odd buckets: while one bucket travels, the next is
//                                  computed
//
// If there are buffers, the gradient of a tied embedding has one of its own, because the head writes it
// before all others.
static void allocate_activations_and_gradients(MemoryMap& map, GpuContext& context,
                                               const std::vector<ShardPlace>& places) {
    const RunSettings& s = context.settings;
    Arena& arena = context.arena;
    const std::vector<BucketRange> buckets = bucket_ranges(context.params);
    const int64_t activation_bytes = s.config.L * saved_layer_bytes(s);
    if (!s.keep_gradients) {
        // --gradients none: the update reads a bucket where backward has written it
        map.saved_activations = arena.allocate(activation_bytes);
        map.gradients_to_write = allocate_gradient_buffers(s, arena, buckets.size(), /*two=*/false);
        map.owned_gradient_sums = map.gradients_to_write;
        return;
    }
    // The sums of a step lie over the activations or after them, as gradients_offset() says
    const int64_t offset = gradients_offset(s);
    const int64_t element_bytes = format_info(gradient_format(s)).bytes;
    map.saved_activations =
        arena.allocate(std::max(activation_bytes, offset + places.back().rank_offset * element_bytes));
    for (const BucketRange& bucket : buckets)
        map.owned_gradient_sums.push_back(map.saved_activations + offset +
                                          places[bucket.first_param].rank_offset * element_bytes);
    if (s.ranks == 1) map.gradients_to_write = map.owned_gradient_sums;
    else map.gradients_to_write = allocate_gradient_buffers(s, arena, buckets.size(), /*two=*/true);
}

MemoryMap allocate_memory(GpuContext& context) {
    const RunSettings& s = context.settings;
    Arena& arena = context.arena;
    const ModelConfig& config = s.config;
    const std::vector<ShardPlace> places = shard_places(s);
    const int64_t owned_elements = places.back().rank_offset;
    const int64_t compute_bytes = format_info(s.recipe.compute_format).bytes;
    const int64_t param_count = int64_t(context.params.size());
    const int64_t linear_layers = count_linear_layers(context.params);
    const bool delayed = s.recipe.scale_source == ScaleSource::Delayed;
    const bool several = s.ranks > 1;

    // The order of these statements is the order in memory
    MemoryMap map{};
    map.scale_table_size = OPERAND_COUNT * linear_layers;
    map.step_exchange = arena.allocate<StepExchange>(1);
    map.gemm_scratch = arena.allocate(CublasGemms::SCRATCH);

    const ReceivedBytes received = received_bytes(s);
    map.loss_and_squares = arena.allocate<double>(s.ranks * (1 + places.back().shard_units_before_parameter));
    map.received.flags = arena.allocate<uint32_t>(several ? 2 * s.ranks : 0);
    map.received.gradients = arena.allocate(received.gradients);
    for (uint8_t*& buffer : map.received.weights) buffer = arena.allocate(received.weights);
    map.received.scale_tables = arena.allocate<TensorScale>(several ? s.ranks * map.scale_table_size : 0);

    map.weights.values = arena.allocate(owned_elements * compute_bytes);
    map.weights.format = s.recipe.compute_format;
    if (s.keep_masters && s.recipe.compute_format != Format::FP32)
        map.weights.remainders = arena.allocate<int16_t>(owned_elements);
    map.shards = arena.allocate<Shard>(param_count);
    map.scale_table = arena.allocate<TensorScale>(map.scale_table_size);
    map.histories = arena.allocate<float>(delayed ? map.scale_table_size * s.recipe.history_steps : 0);
    allocate_moments(map, context, places);
    allocate_activations_and_gradients(map, context, places);

    const int64_t tokens = s.B * s.T;
    map.tokens = arena.allocate<int32_t>(tokens);
    map.targets = arena.allocate<int32_t>(tokens);
    map.row_order = arena.allocate<int32_t>(tokens);
    map.token_rows = arena.allocate<TokenRows>(tokens);
    map.final_norm_input_or_dresidual = arena.allocate(padded_tokens(s) * config.C * compute_bytes);
    map.norm_backward_workspace = arena.allocate<float>(norm_backward_workspace_floats(config.C));
    map.row_statistics = arena.allocate<RowStatistics>(padded_tokens(s));
    map.losses = arena.allocate<float>(tokens);
    map.rope_table = arena.allocate<float2>(config.arch.rope ? s.T * config.HS() / 2 : 0);
    return map;
}

}  // namespace coat::gpu
