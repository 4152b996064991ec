// gpu/memory_map.cpp - the allocation of what lasts for a run (gpu/memory_map.h).
#include "memory_map.h"

#include "gemm.h"
#include "norm.h"

namespace coat::gpu {

// These serve runs on several GPUs and with --gradients none. They stand at the end of this file, and can
// wait.
static void allocate_places_of_received(MemoryMap& map, GpuContext& context);
static void allocate_activations_and_one_buffer(MemoryMap& map, GpuContext& context);
static std::vector<uint8_t*> allocate_gradient_buffers(GpuContext& context, bool two);

// Allocates the moments of what this rank owns.
static void allocate_moments(MemoryMap& map, GpuContext& context, const std::vector<ParamPlace>& places) {
    Arena& arena = context.arena;
    const OptimizerFormats& o = context.settings.optimizer;
    map.moments_begin = arena.allocate(0);  // the place of the next allocation
    auto allocate = [&](Format f, const Range& elements) {
        const int64_t moment_groups = moment_group_count(f, elements.count);
        MomentRef moment{.data = arena.allocate(padded_count(elements) * format_info(f).bytes),
                         .max = nullptr,
                         .k = nullptr,
                         .format = f};
        if (is_fp8(f)) moment.max = arena.allocate<float>(moment_groups);
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

// Allocates the saved activations and the gradients, as in the drawing of gpu/memory_layout.h.
static void allocate_activations_and_gradients(MemoryMap& map, GpuContext& context,
                                               const std::vector<ParamPlace>& places) {
    const RunSettings& s = context.settings;
    if (!s.keep_gradients) return allocate_activations_and_one_buffer(map, context);
    const int64_t activation_bytes = s.config.L * saved_layer_bytes(s);
    const int64_t bytes_per_gradient = format_info(gradient_format(s)).bytes;
    const int64_t offset = gradients_offset(s);
    const int64_t end_of_gradients = offset + places.back().memory_offset * bytes_per_gradient;
    map.saved_activations = context.arena.allocate(std::max(activation_bytes, end_of_gradients));
    for (const BucketRange& bucket : bucket_ranges(context.params))
        map.gradient_sums_by_bucket.push_back(map.saved_activations + offset +
                                              places[bucket.first_param].memory_offset * bytes_per_gradient);
    map.gradients_by_bucket =
        s.ranks == 1 ? map.gradient_sums_by_bucket : allocate_gradient_buffers(context, /*two=*/true);
}

MemoryMap allocate_memory(GpuContext& context) {
    const RunSettings& s = context.settings;
    Arena& arena = context.arena;
    const ModelConfig& config = s.config;
    const std::vector<ParamPlace> places = param_places(s);
    const int64_t owned_elements = places.back().memory_offset;
    const int64_t bytes_per_value = format_info(s.recipe.compute_format).bytes;
    const int64_t param_count = int64_t(context.params.size());
    const int64_t linear_layers = std::count_if(context.params.begin(), context.params.end(),
                                                [](const Param& p) { return p.is_linear_weight(); });
    const bool delayed = s.recipe.scale_source == ScaleSource::Delayed;

    // The order of these statements is the order in memory
    MemoryMap map{};
    map.scale_entry_count = OPERAND_COUNT * linear_layers;
    map.step_exchange = arena.allocate<StepExchange>(1);
    map.gemm_scratch = arena.allocate(CublasGemms::SCRATCH_BYTES);
    map.loss_and_squares = arena.allocate<double>(s.ranks * (1 + places.back().units_before));
    if (s.ranks > 1) allocate_places_of_received(map, context);

    map.owned_weights.values = arena.allocate(owned_elements * bytes_per_value);
    map.owned_weights.format = s.recipe.compute_format;
    if (s.keep_masters && s.recipe.compute_format != Format::FP32)
        map.owned_weights.remainders = arena.allocate<int16_t>(owned_elements);
    map.adamw_params = arena.allocate<AdamWParam>(param_count);
    map.scale_entries = arena.allocate<TensorScale>(map.scale_entry_count);
    map.histories = arena.allocate<float>(delayed ? map.scale_entry_count * s.recipe.history_steps : 0);
    allocate_moments(map, context, places);
    allocate_activations_and_gradients(map, context, places);

    const int64_t tokens = s.B * s.T;
    map.tokens = arena.allocate<int32_t>(tokens);
    map.targets = arena.allocate<int32_t>(tokens);
    map.row_order = arena.allocate<int32_t>(tokens);
    map.token_rows = arena.allocate<TokenRows>(tokens);
    map.final_norm_input_or_dresidual = arena.allocate(tokens * config.C * bytes_per_value);
    map.norm_backward_workspace = arena.allocate<float>(norm_backward_workspace_floats(config.C));
    map.row_statistics = arena.allocate<RowStatistics>(tokens);
    map.losses = arena.allocate<float>(tokens);
    map.rope_table = arena.allocate<float2>(config.arch.rope ? s.T * config.HS() / 2 : 0);
    return map;
}

// -----------------------------------------------------------------------------------------------------------
// Several GPUs, and --gradients none (this can wait)
//
// Where gradients lie in other runs than that of the drawing:
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

// Returns the buffer of each bucket: one that all buckets use in turn, or `two`, for even and for odd
// buckets. The bucket of a tied embedding has one of its own.
static std::vector<uint8_t*> allocate_gradient_buffers(GpuContext& context, bool two) {
    const RunSettings& s = context.settings;
    const GradientBufferSizes elements = gradient_buffer_sizes(s);
    const int64_t bytes_per_gradient = format_info(gradient_format(s)).bytes;
    auto allocate = [&](int64_t n) { return context.arena.allocate(n * bytes_per_gradient); };
    uint8_t* const even = allocate(elements.largest);
    uint8_t* const odd = two ? allocate(elements.largest) : even;
    std::vector<uint8_t*> by_bucket(bucket_ranges(context.params).size());
    for (size_t b = 0; b < by_bucket.size(); b++) by_bucket[b] = b % 2 ? odd : even;
    if (s.config.tied) by_bucket[0] = allocate(elements.embedding);
    return by_bucket;
}

// --gradients none: the update reads a bucket where backward has written it.
static void allocate_activations_and_one_buffer(MemoryMap& map, GpuContext& context) {
    const RunSettings& s = context.settings;
    map.saved_activations = context.arena.allocate(s.config.L * saved_layer_bytes(s));
    map.gradients_by_bucket = allocate_gradient_buffers(context, /*two=*/false);
    map.gradient_sums_by_bucket = map.gradients_by_bucket;
}

static void allocate_places_of_received(MemoryMap& map, GpuContext& context) {
    Arena& arena = context.arena;
    const int64_t ranks = context.settings.ranks;
    const ReceivedBytes bytes = received_bytes(context.settings);
    map.received.flags = arena.allocate<uint32_t>(2 * ranks);
    map.received.gradients = arena.allocate(bytes.gradients);
    for (uint8_t*& buffer : map.received.matrices) buffer = arena.allocate(bytes.matrices);
    map.received.scale_tables = arena.allocate<TensorScale>(ranks * map.scale_entry_count);
}

}  // namespace coat::gpu
