// gpu/memory_map.cpp - the allocation of what lasts for a run (gpu/memory_map.h).
#include "memory_map.h"

#include "amax_table.h"  // for count_linear_layers()
#include "gemm.h"
#include "norm.h"

namespace coat::gpu {

// Allocates the moments of what this rank owns. (If a moment has one scale per tensor, there is room for two:
// while the update encodes with the new scale, the old one still decodes.)
static void allocate_moments(MemoryMap& m, GpuContext& context, const std::vector<ShardPlace>& places) {
    Arena& arena = context.arena;
    const OptimizerFormats& o = context.settings.optimizer;
    const int64_t maxima = o.one_moment_group ? 2 : 1;
    m.moments_begin = arena.allocate(0);
    auto allocate = [&](Format f, const Range& owned) {
        const int64_t moment_groups = o.moment_scaling_count(f, owned.count);
        MomentRef moment{.data = arena.allocate(padded_count(owned) * format_info(f).bytes),
                         .max = nullptr,
                         .k = nullptr,
                         .format = f};
        if (moments_need_scaling(f)) moment.max = arena.allocate<float>(moment_groups * maxima);
        if (o.uses_expansion(f)) moment.k = arena.allocate<float>(moment_groups);
        return moment;
    };
    for (size_t i = 0; i < context.params.size(); i++) {
        const Param& p = context.params[i];
        m.first_moments.push_back(allocate(p.moment_format(o.m_format), places[i].owned));
        m.second_moments.push_back(allocate(p.moment_format(o.v_format), places[i].owned));
    }
    m.moments_bytes = arena.allocate(0) - static_cast<uint8_t*>(m.moments_begin);
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

// Where gradients lie: the drawing above MemoryMap, and the list below it (gpu/memory_map.h).
static void allocate_activations_and_gradients(MemoryMap& m, GpuContext& context,
                                               const std::vector<ShardPlace>& places) {
    const RunSettings& s = context.settings;
    Arena& arena = context.arena;
    const std::vector<BucketRange> buckets = bucket_ranges(context.params);
    const int64_t activation_bytes = s.config.L * saved_layer_bytes(s);
    if (!s.keep_gradients) {
        // --gradients none: the update reads a bucket where backward has written it
        m.saved_activations = arena.allocate(activation_bytes);
        m.gradients_to_write = allocate_gradient_buffers(s, arena, buckets.size(), /*two=*/false);
        m.owned_gradient_sums = m.gradients_to_write;
        return;
    }
    // The sums of a step lie over the activations or after them, as gradients_offset() says
    const int64_t offset = gradients_offset(s), element_bytes = format_info(gradient_format(s)).bytes;
    m.saved_activations =
        arena.allocate(std::max(activation_bytes, offset + places.back().rank_offset * element_bytes));
    for (const BucketRange& bucket : buckets)
        m.owned_gradient_sums.push_back(m.saved_activations + offset +
                                        places[bucket.first_param].rank_offset * element_bytes);
    if (s.ranks == 1) m.gradients_to_write = m.owned_gradient_sums;
    else m.gradients_to_write = allocate_gradient_buffers(s, arena, buckets.size(), /*two=*/true);
}

MemoryMap allocate_memory(GpuContext& context) {
    const RunSettings& s = context.settings;
    Arena& arena = context.arena;
    const ModelConfig& config = s.config;
    const std::vector<ShardPlace> places = shard_places(s);
    const int64_t owned = places.back().rank_offset,
                  compute_bytes = format_info(s.recipe.compute_format).bytes;
    const int64_t param_count = int64_t(context.params.size());
    const int64_t linear_layers = count_linear_layers(context.params);
    const bool delayed = s.recipe.scale_source == ScaleSource::Delayed, several = s.ranks > 1;

    MemoryMap m{};
    m.amax_count = param_count + OPERAND_COUNT * linear_layers;
    m.step_exchange = arena.allocate<StepExchange>(1);
    m.gemm_scratch = arena.allocate(CublasGemms::SCRATCH);

    const ReceivedBytes received = received_bytes(s);
    m.loss_and_squares = arena.allocate<double>(s.ranks * (1 + places.back().units_before_parameter));
    m.received.flags = arena.allocate<uint32_t>(several ? 2 * s.ranks : 0);
    m.received.gradients = arena.allocate(received.gradients);
    for (uint8_t*& buffer : m.received.weights) buffer = arena.allocate(received.weights);
    m.received.amaxes = arena.allocate<TensorScale>(several ? s.ranks * m.amax_count : 0);

    m.weights.values = arena.allocate(owned * compute_bytes);
    m.weights.format = s.recipe.compute_format;
    if (s.keep_masters && s.recipe.compute_format != Format::FP32)
        m.weights.remainders = arena.allocate<int16_t>(owned);
    m.shards = arena.allocate<Shard>(param_count);
    m.amax_table = arena.allocate<TensorScale>(m.amax_count);
    m.histories = arena.allocate<float>(delayed ? OPERAND_COUNT * linear_layers * s.recipe.history_steps : 0);
    allocate_moments(m, context, places);
    allocate_activations_and_gradients(m, context, places);

    const int64_t tokens = s.B * s.T;
    m.tokens = arena.allocate<int32_t>(tokens);
    m.targets = arena.allocate<int32_t>(tokens);
    m.token_order = arena.allocate<int32_t>(tokens);
    m.token_rows = arena.allocate<TokenRows>(tokens);
    m.dresidual = arena.allocate(padded_tokens(s) * config.C * compute_bytes);
    m.norm_partials = arena.allocate<float>(norm_backward_workspace_floats(config.C));
    m.norm_statistics = arena.allocate<RowStatistics>(padded_tokens(s));
    m.losses = arena.allocate<float>(tokens);
    m.rope_table = arena.allocate<float2>(config.arch.rope ? s.T * config.HS() / 2 : 0);
    return m;
}

}  // namespace coat::gpu
