// gpu/state.cpp - what one GPU keeps of a training run (gpu/state.h): its memory, amaxes and parameters.
#include "state.h"

#include "../random.h"
#include "../state_tensors.h"
#include "gemm.h"
#include "other_scaling.h"
#include "quant_report.h"
#include "sharding.h"

namespace coat::gpu {

// -----------------------------------------------------------------------------------------------------------
// Memory

void GpuContext::wait(const char* what) const {
    enqueue(stream, [&] {
        if (setup.communicator)
            setup.communicator->wait_until([&] { return cudaStreamQuery(stream) != cudaErrorNotReady; });
        check(cudaStreamSynchronize(stream), what);
    });
}
void GpuContext::wait_then_start_copy_to_gpu(void* to_gpu, const void* from_host, int64_t bytes) const {
    wait();
    copy_async(to_gpu, from_host, bytes, stream);
}
void GpuContext::copy_to_host(void* to_host, const void* from_gpu, int64_t bytes) const {
    wait();
    copy_async(to_host, from_gpu, bytes, stream);
    wait();
}

// Allocates the moments of what this rank owns. (If a moment has one scale per tensor, there is room for two:
// while the update encodes with the new scale, the old one still decodes.)
static void allocate_moments(MemoryMap& m, GpuContext& context, const std::vector<ShardPlace>& places) {
    Arena& arena = context.arena;
    const OptimizerFormats& o = context.setup.optimizer;
    const int64_t maxima = o.one_moment_group ? 2 : 1;
    m.moments_begin = arena.allocate(0);
    auto allocate = [&](Format f, const Range& owned) {
        const int64_t moment_groups = o.moment_group_count(f, owned.count);
        MomentRef moment{.data = arena.allocate(padded_count(owned) * info(f).bytes),
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
static std::vector<uint8_t*> allocate_gradient_buffers(const Setup& s, Arena& arena, size_t buckets,
                                                       bool two) {
    const GradientBufferSizes elements = gradient_buffer_sizes(s);
    const int64_t element_bytes = info(gradient_format(s)).bytes;
    uint8_t* const even = arena.allocate(elements.largest * element_bytes);
    uint8_t* const odd = two ? arena.allocate(elements.largest * element_bytes) : even;
    std::vector<uint8_t*> by_bucket(buckets);
    for (size_t b = 0; b < buckets; b++) by_bucket[b] = b % 2 ? odd : even;
    if (s.config.tied) by_bucket[0] = arena.allocate(elements.embedding * element_bytes);
    return by_bucket;
}

// The places of gradients are a table above MemoryMap (gpu/state.h).
static void allocate_activations_and_gradients(MemoryMap& m, GpuContext& context,
                                               const std::vector<ShardPlace>& places) {
    const Setup& s = context.setup;
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
    const int64_t offset = gradients_offset(s), element_bytes = info(gradient_format(s)).bytes;
    m.saved_activations =
        arena.allocate(std::max(activation_bytes, offset + places.back().rank_offset * element_bytes));
    for (const BucketRange& bucket : buckets)
        m.owned_gradient_sums.push_back(m.saved_activations + offset +
                                        places[bucket.first_param].rank_offset * element_bytes);
    if (s.ranks == 1) m.gradients_to_write = m.owned_gradient_sums;
    else m.gradients_to_write = allocate_gradient_buffers(s, arena, buckets.size(), /*two=*/true);
}

static int64_t count_linear_layers(const std::vector<Param>& params) {
    return std::count_if(params.begin(), params.end(), [](const Param& p) { return p.role.layer_linear; });
}

MemoryMap allocate_memory(GpuContext& context) {
    const Setup& s = context.setup;
    Arena& arena = context.arena;
    const ModelConfig& config = s.config;
    const std::vector<ShardPlace> places = shard_places(s);
    const int64_t owned = places.back().rank_offset, compute_bytes = info(s.recipe.compute_format).bytes;
    const int64_t param_count = int64_t(context.params.size());
    const int64_t linear_layers = count_linear_layers(context.params);
    const bool delayed = s.recipe.scale_source == ScaleSource::Delayed, several = s.ranks > 1;

    MemoryMap m{};
    m.amax_count = param_count + OPERAND_COUNT * linear_layers;
    m.scalars = arena.allocate<Scalars>(1);
    m.gemm_scratch = arena.allocate(CublasGemms::SCRATCH);

    const ReceivedBytes received = received_bytes(s);
    m.loss_and_squares = arena.allocate<double>(s.ranks * (1 + places.back().units_before_parameter));
    m.received.flags = arena.allocate<uint32_t>(several ? 2 * s.ranks : 0);
    m.received.gradients = arena.allocate(received.gradients);
    for (uint8_t*& module : m.received.weights) module = arena.allocate(received.weights);
    m.received.amaxes = arena.allocate<AmaxAndScale>(several ? s.ranks * m.amax_count : 0);

    m.weights.values = arena.allocate(owned * compute_bytes);
    m.weights.format = s.recipe.compute_format;
    if (s.keep_masters && s.recipe.compute_format != Format::FP32)
        m.weights.remainders = arena.allocate<int16_t>(owned);
    m.shards = arena.allocate<Shard>(param_count);
    m.amax_table = arena.allocate<AmaxAndScale>(m.amax_count);
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

// -----------------------------------------------------------------------------------------------------------
// AmaxTable

AmaxTable::AmaxTable(const GpuContext& context, const MemoryMap& memory)
    : param_count(int64_t(context.params.size())), linear_layer_count(count_linear_layers(context.params)),
      setup_(context.setup), stream_(context.stream), entries_(memory.amax_table), count_(memory.amax_count),
      histories_(memory.histories) {}

void AmaxTable::clear() {
    clear_async(entries_, count_ * int64_t(sizeof(AmaxAndScale)), stream_);
    if (delayed())
        clear_async(histories_, OPERAND_COUNT * linear_layer_count * setup_.recipe.history_steps * 4,
                    stream_);
    expect_empty_histories();
}

// The entries are cleared as rows of a matrix, of which `amax` is a column: the scales beside it stay.
void AmaxTable::clear_operand_amaxes() const {
    enqueue(stream_, [&] {
        check(cudaMemset2DAsync(&entries_[param_count].amax, sizeof(AmaxAndScale), 0, sizeof(float),
                                OPERAND_COUNT * linear_layer_count, stream_),
              "Clearing amaxes failed");
    });
}

void AmaxTable::expect_empty_histories() { any_empty_history = delayed() && linear_formats(setup_).x.fp8(); }

void AmaxTable::update_histories(StepOutcome* outcome) const {
    if (!delayed() || !linear_formats(setup_).x.fp8()) return;
    for (OperandKind o : LINEAR_OPERANDS)
        update_delayed_scales({.scales = of_operand(o, 0),
                               .histories = history(o, 0),
                               .n = linear_layer_count,
                               .length = setup_.recipe.history_steps,
                               .fp8 = format_of(setup_.recipe, o).element_format},
                              &outcome->gradient_state.skip, &outcome->empty_histories, stream_);
}

// -----------------------------------------------------------------------------------------------------------
// Parameters

Parameters::Parameters(const GpuContext& context, const MemoryMap& memory, AmaxTable& amax_table)
    : setup(context.setup), params(context.params), buckets(bucket_ranges(params)),
      places(shard_places(setup)), format_of_weights{setup.recipe.compute_format},
      format_of_gradients(TensorFormat{gradient_format(setup)}),
      weight_bytes(info(format_of_weights.element_format).bytes),
      gradient_bytes(info(format_of_gradients.element_format).bytes), context_(context), memory_(memory),
      amax_table_(amax_table), stream_(context.stream) {
    int64_t linear_layers = 0;
    for (size_t i = 0; i < params.size(); i++) {
        linear_layer_indices_.push_back(params[i].role.layer_linear ? linear_layers++ : -1);
        indices_[params[i].name] = i;
    }
    upload_shard_table();
    initialize_state();
}

size_t Parameters::index(const std::string& name) const {
    const auto found = indices_.find(name);
    if (found == indices_.end()) throw_no_such_tensor(name);
    return found->second;
}
// In the table of parameters a bias follows right after its weight.
std::optional<size_t> Parameters::bias_index(size_t weight_index) const {
    const size_t next = weight_index + 1;
    if (next == params.size() || !params[next].name.ends_with(".bias")) return std::nullopt;
    return next;
}

// Fills memory_.shards, AdamW's table of parameters.
void Parameters::upload_shard_table() {
    std::vector<Shard> table;
    for (size_t i = 0; i < params.size(); i++) {
        const Param& p = params[i];
        const auto& [owned, rank_offset, units_before_parameter] = places[i];
        table.push_back({.rank_offset = rank_offset,
                         .size = owned.count,
                         .m = memory_.first_moments[i],
                         .v = memory_.second_moments[i],
                         .decays = p.role.decays,
                         .amax_out = p.role.layer_linear ? amax_table_.of_parameter(i) : nullptr,
                         .flat_minus_rank_offset = p.flat_offset + owned.first - rank_offset,
                         .units_before_shard = units_before_parameter + owned.first / SHARD_UNIT});
    }
    copy_async(memory_.shards, table.data(), int64_t(table.size() * sizeof(Shard)), stream_);
    context_.wait("Copying the table of parameters failed");
}

// Gives the state of a new run its values:
//   weights   initial_value() of random.h; and their amaxes
//   moments   zero, which means max = 0 and k = 1 in every moment group
//   scales    none, and empty histories
void Parameters::initialize_state() {
    amax_table_.clear();
    clear_async(memory_.moments_begin, memory_.moments_bytes, stream_);
    int64_t most_moment_groups = 0;
    for (const Param& p : params)
        most_moment_groups = std::max(most_moment_groups, p.padded_size() / MOMENT_GROUP_SIZE);
    const std::vector<float> ones(most_moment_groups, 1.0f);
    for (size_t i = 0; i < params.size(); i++) {
        const InitializeArguments arguments{.owned = places[i].owned,
                                            .param_index = i,
                                            .used = used_elements(setup.config, params[i]),
                                            .seed = setup.seed};
        initialize(memory_.weights, places[i].rank_offset, params[i], arguments, stream_);
        compute_weight_amax(i);
        for (float* const k : {memory_.first_moments[i].k, memory_.second_moments[i].k})
            if (k) copy_async(k, ones.data(), moment_groups(i) * 4, stream_);
    }
    context_.wait("Initializing the weights failed");
}

uint8_t* Parameters::owned_gradient_sum(size_t i) const {
    const int64_t bucket = params[i].bucket;
    const int64_t in_bucket = places[i].rank_offset - places[buckets[bucket].first_param].rank_offset;
    return memory_.owned_gradient_sums[bucket] + in_bucket * gradient_bytes;
}

// Clipping needs the norm of all gradients, whose squares are added up by shard unit. With several ranks,
// each rank adds up the squares of what it owns. It sends 1 + units.count numbers: its loss, then these sums.
void Parameters::update(const AdamWOptions& options, int64_t first_bucket, int64_t end_bucket,
                        Sharding& sharding) {
    const size_t first_param = buckets[first_bucket].first_param;
    const size_t end_param = buckets[end_bucket - 1].end_param;
    const ShardPlace &from = places[first_param], &to = places[end_param];
    const ShardsToUpdate gradients{
        .shards = memory_.shards + first_param,
        .count = int(end_param - first_param),
        .elements = {.first = from.rank_offset, .count = to.rank_offset - from.rank_offset},
        .gradients = owned_gradient_sum(first_param),
        .format = format_of_gradients.element_format};
    const Range units{.first = from.units_before_parameter,
                      .count = to.units_before_parameter - from.units_before_parameter};
    StepOutcome* const outcome = memory_.outcome();  // on the device
    GradientState* const state = &outcome->gradient_state;

    double* const all_sums = memory_.loss_and_squares;
    double* const own_sums = all_sums + setup.rank * (1 + units.count);
    compute_gradient_squares(gradients, units, &outcome->loss_or_nan, own_sums, stream_);
    sharding.all_gather(all_sums, (1 + units.count) * int64_t(sizeof(double)));
    update_gradient_state(all_sums, units.count, setup.ranks, options.clip, state, stream_);
    adamw(options, setup.optimizer, gradients, memory_.weights,
          rounding_key(setup.seed, options.update_number + options.skipped_steps), state, stream_);
}

// measure_moment_errors() copies the moments to the host, without context_: it would not notice that
// another rank has ended, for which the stream may wait. So context_.wait() comes first.
void Parameters::measure_moment_errors_of(int64_t bucket, const Sharding& sharding,
                                          QuantReport& report) const {
    context_.wait();
    for (size_t i = buckets[bucket].first_param; i < buckets[bucket].end_param; i++) {
        const Range& owned = places[i].owned;
        const uint8_t* const gradient = static_cast<const uint8_t*>(sharding.gradient_to_write(i).data);
        measure_moment_errors(setup.optimizer, memory_.first_moments[i], memory_.second_moments[i],
                              gradient + owned.first * gradient_bytes, format_of_gradients.element_format,
                              owned.count, report, stream_);
    }
}

std::vector<float> Parameters::expansion_exponents(const std::vector<MomentRef>& moments) const {
    std::vector<float> all;
    for (size_t i = 0; i < params.size(); i++) {
        const float* const k = moments[i].k;
        if (!k) continue;
        const size_t before = all.size();
        all.resize(before + size_t(moment_groups(i)));
        context_.copy_to_host(all.data() + before, k, moment_groups(i) * 4);
    }
    return all;
}

void Parameters::compute_weight_amax(size_t i) const {
    if (!params[i].role.layer_linear) return;
    AmaxAndScale* const amax_out = amax_table_.of_parameter(i);
    clear_async(amax_out, sizeof(AmaxAndScale), stream_);
    if (format_of_weights.element_format == Format::FP32) return;
    for (const TensorRef& slice : slices_for_grids(owned_weight(i)))
        compute_amax(lazy_stored(slice), amax_out, stream_);
}

std::vector<TensorRef> slices_for_grids(const TensorRef& v) {
    constexpr int64_t MOST_ROWS = 65535 * 128;
    std::vector<TensorRef> slices;
    for (int64_t first = 0; first < v.rows; first += MOST_ROWS)
        slices.push_back(row_slice(v, first, std::min(MOST_ROWS, v.rows - first)));
    return slices;
}

}  // namespace coat::gpu
