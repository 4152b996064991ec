// gpu/state.cuh - what a GPU keeps of a training run: its memory and stream (Device); and by parameter the
// weights, gradients, scales and moments, with their update (State).
#pragma once
#include <cstring>
#include <map>

#include "adamw.cuh"
#include "coat.cuh"
#include "plan.h"
#include "arena.cuh"
#include "peers.cuh"
#include "report.cuh"

namespace coat::gpu {

// What a step finds out, on the device until the step ends.
struct Outcome {
    double loss;
    GradientState gradients;
    uint32_t without_history;  // operands whose history of amaxes is still empty
};
struct Results {
    Outcome outcome;
    double checked_loss;  // NaN if FP8 codes have hidden a value that is not finite
    double loss_scale;    // one over the targets that count; from the host
    QuantStats stats[static_cast<int>(ReportKind::Moment1)];  // of all kinds before the moments
};

// The memory of everything, and the stream of the computation.
struct Device {
    const Setup setup;
    const Stream stream;
    Arena arena;
    Results* const results = arena.take<Results>(1);

    // bytes: as for the Arena.
    Device(const Setup& s, int64_t bytes) : setup(s), stream(bytes == 0), arena(bytes) {}
    // What runs may need what another rank sends: if that has ended, so does this process.
    void wait(const char* what = "The GPU failed") const {
        enqueue(stream, [&] {
            if (setup.processes)
                setup.processes->wait_until([&] { return cudaStreamQuery(stream) != cudaErrorNotReady; });
            check(cudaStreamSynchronize(stream), what);
        });
    }
    // Copies between the host and this GPU. CUDA may wait for all that runs before it copies, and would not
    // notice that a rank has ended for which that waits: so wait() comes first. What send() reads must stay
    // until the next wait(); fetch() returns when the copy is there.
    void send(void* to_gpu, const void* from_host, int64_t bytes) const {
        wait();
        copy(to_gpu, from_host, bytes, stream);
    }
    void fetch(void* to_host, const void* from_gpu, int64_t bytes) const {
        wait();
        copy(to_host, from_gpu, bytes, stream);
        wait();
    }
};

// A grid has at most 65,535 tiles of 128 rows: a view that has more rows, in parts that have not.
inline std::vector<View> pieces_for_grids(const View& v) {
    constexpr int64_t MOST_ROWS = 65535 * 128;
    std::vector<View> pieces;
    for (int64_t first = 0; first < v.rows; first += MOST_ROWS) {
        pieces.push_back(rows(v, first, std::min(MOST_ROWS, v.rows - first)));
        pieces.back().scales = v.scales;
    }
    return pieces;
}

// -----------------------------------------------------------------------------------------------------------
// Weights, gradients and moments, by parameter

constexpr LinearOperand LINEAR_OPERANDS[] = {LinearOperand::X, LinearOperand::W, LinearOperand::G};

class State {
    Device& device_;
    Peers& peers_;
    const cudaStream_t cuda_ = device_.stream;

public:
    const Setup& setup = device_.setup;
    const std::vector<Param> params = parameters(setup.config);
    const std::vector<BucketRange> buckets = bucket_ranges(params);
    const std::vector<ShardPlace> shards = shard_places(setup);
    const Quant compute{setup.recipe.compute}, gradient_quant{gradient_format(setup)};
    const int64_t weight_bytes = info(compute.format).bytes;  // of one element
    const int64_t gradient_bytes = info(gradient_quant.format).bytes;
    const int64_t linears = 4 * setup.config.L;  // of each block: qkv, attention_out, gate_up, down
    const int64_t scale_count = static_cast<int64_t>(params.size()) + OPERANDS * linears;  // see scale()
    // Several ranks: the matrices that are whole at the moment. Exchange::gather() fills them.
    std::vector<View> gathered = std::vector<View>(params.size());
    // While quantization is measured: what has been found out, one for each ReportKind on the device; else
    // null.
    QuantStats* stats = nullptr;
    QuantStats* stats_of(ReportKind k) const { return stats ? stats + static_cast<int>(k) : nullptr; }
    // Delayed scaling: some operand may have an empty history, and is scaled just in time.
    bool some_without_history = false;

    State(Device& device, Peers& peers) : device_(device), peers_(peers) {
        take_moments();
        take_activations_and_gradients();
        initialize();
    }

    size_t number(const std::string& param) const { return find(param).param; }
    // What layer l saves for backward, saved_layer_bytes().
    uint8_t* saved(int64_t l) const { return saved_ + l * saved_layer_bytes(setup); }

    View weight(size_t i) const {
        if (peers_.several() && params[i].rows > 1) return gathered[i];
        return {kept_weights(i), nullptr, params[i].rows, params[i].cols, compute};
    }
    // The weights of a parameter that this rank owns; as a view they have MOMENT_GROUP columns, because they
    // need not be whole rows.
    uint8_t* kept_weights(size_t i) const {
        return static_cast<uint8_t*>(weights_.values) + shards[i].at * weight_bytes;
    }
    View owned_weight(size_t i) const {
        return {kept_weights(i), nullptr, shards[i].own.count / MOMENT_GROUP, MOMENT_GROUP, compute};
    }
    View gradient(size_t i) const {
        return {gradient_from(i, 0), nullptr, params[i].rows, params[i].cols, gradient_quant};
    }
    uint8_t* gradient_from(size_t i, int64_t element) const {
        const int64_t bucket = params[i].bucket;
        return gradients_[bucket] + (params[i].offset - buckets[bucket].offset + element) * gradient_bytes;
    }
    // The gradients that this rank's update reads: with several ranks, their sums.
    uint8_t* gradient_sums(size_t i) const {
        const int64_t bucket = params[i].bucket;
        const int64_t in_bucket = shards[i].at - shards[buckets[bucket].first].at;
        return sums_[bucket] + in_bucket * gradient_bytes;
    }
    // Of each parameter; behind them those of linear layers' operands (of weights for delayed scaling only).
    AmaxAndScale* scale(size_t i) const { return scales_ + i; }
    AmaxAndScale* operand_scales(LinearOperand o) const {
        return scale(params.size()) + static_cast<int>(o) * linears;
    }
    // Of the weight of a linear layer. Linear layer number n has bucket n + 1: bucket 0 is the embedding's.
    AmaxAndScale* weight_scale(size_t i) const {
        return delayed_scaling() ? operand_scales(LinearOperand::W) + params[i].bucket - 1 : scale(i);
    }
    bool delayed_scaling() const { return setup.recipe.scaling == Scaling::Delayed; }

    // Clears the amaxes of operands: before each micro-batch if scaling is just in time, and before each step
    // if it is delayed. (Just in time, the amax of a weight is in scale(i) and stays.)
    void clear_amaxes() {
        enqueue(cuda_, [&] {
            check(cudaMemset2DAsync(&scale(params.size())->amax, sizeof(AmaxAndScale), 0, sizeof(float),
                                    OPERANDS * linears, cuda_),
                  "Clearing amaxes failed");
        });
    }
    void expect_missing_histories() {
        some_without_history = delayed_scaling() && linear_formats(setup).x.fp8();
    }
    // Linear layers without FP8 take no amaxes: then histories and scales stay as they are.
    void end_delayed_step() {
        if (!delayed_scaling() || !linear_formats(setup).x.fp8()) return;
        Outcome& outcome = device_.results->outcome;
        for (LinearOperand o : LINEAR_OPERANDS)
            gpu::end_delayed_step(operand_scales(o), linears, history(0, o), setup.recipe.history,
                                  quant_of(setup.recipe, o).format, &outcome.gradients.skip,
                                  &outcome.without_history, cuda_);
    }

    // Updates the buckets [first, last), whose gradients are complete. AdamW leaves the new weights' amaxes.
    void update(const AdamW& a, int64_t first, int64_t last) {
        const size_t begin = buckets[first].first, end = buckets[last - 1].last;
        const int n = static_cast<int>(end - begin);
        const Range range{shards[begin].at, shards[end].at - shards[begin].at};
        const int64_t sums = 1 + shards[end].shard_unit - shards[begin].shard_unit;
        GradientState* const state = &device_.results->outcome.gradients;
        const void* const gradients = gradient_sums(begin);
        gradient_squares(segments_ + begin, n, gradients, gradient_quant.format, range.first,
                         shards[begin].shard_unit, sums - 1, &device_.results->checked_loss,
                         squares_ + peers_.rank * sums, cuda_);
        peers_.all_gather(squares_, sums * static_cast<int64_t>(sizeof(double)));
        gradient_norm(squares_, sums - 1, peers_.count, a.clip, state, cuda_);
        gpu::adamw(a, setup.optimizer, segments_ + begin, n, range, weights_,
                   rounding_key(setup.seed, a.step + a.skipped), gradients, gradient_quant.format, state,
                   cuda_);
    }

    // The amaxes of all ranks become one: of the weights, of which each has updated a part, and with delayed
    // scaling those of a step. The codes of weights get their scale.
    void combine_amaxes() {
        if (!peers_.several()) return;
        const int64_t n = delayed_scaling() ? scale_count : static_cast<int64_t>(params.size());
        const int64_t bytes = n * static_cast<int64_t>(sizeof(AmaxAndScale));
        AmaxAndScale* const all = scales_of_ranks_;
        copy(all + peers_.rank * n, scale(0), bytes, cuda_);
        peers_.all_gather(all, bytes);
        gpu::combine_amaxes(scale(0), all, n, peers_.count, setup.recipe.w.format, cuda_);
    }

    // For the quantization report: the error of storing the moments of a bucket. They are copied to the host,
    // as Device::fetch() does it.
    void measure(int64_t bucket, QuantReport& report) const {
        device_.wait();
        for (size_t i = buckets[bucket].first; i < buckets[bucket].last; i++) {
            const Range& slice = shards[i].own;
            measure_moments(setup.optimizer, moments_[0][i], moments_[1][i], gradient_from(i, slice.first),
                            gradient_quant.format, slice.count, report, cuda_);
        }
    }
    // All expansion factors, also for the report.
    std::vector<float> expansion_factors(bool second) const {
        std::vector<float> all;
        for (size_t i = 0; i < params.size(); i++) {
            const float* const k = moments_[second][i].k;
            if (!k) continue;
            const size_t before = all.size();
            all.resize(before + groups(i));
            device_.fetch(all.data() + before, k, groups(i) * 4);
        }
        return all;
    }

    void read(const std::string& name, void* out) const {
        const std::string param = name.substr(0, name.rfind('.'));
        if (setup.keep_gradients && name == param + ".gradient")
            read_gradient(number(param), static_cast<float*>(out));
        else transfer(name, out, nullptr);
    }
    void write(const std::string& name, const void* in) {
        transfer(name, nullptr, in);
        expect_missing_histories();
        refresh_scale(find(name).param);
        device_.wait("Writing a tensor failed");
    }

private:
    // What comes from other ranks is taken first (peers.cuh): sums of squares of gradients, and scales.
    double* const squares_ = device_.arena.take<double>(peers_.count * (1 + shards.back().shard_unit));
    AmaxAndScale* const scales_of_ranks_ =
        device_.arena.take<AmaxAndScale>(peers_.several() * peers_.count * scale_count);
    const bool has_remainders_ = setup.master && compute.format != Format::F32;
    const Weights weights_{device_.arena.take(shards.back().at * weight_bytes),
                           has_remainders_ ? device_.arena.take<int16_t>(shards.back().at) : nullptr,
                           compute.format};
    Segment* const segments_ = device_.arena.take<Segment>(params.size());  // AdamW's table of parameters
    // What begins as zeros, up to saved_: scales, the histories of delayed scaling, and by parameter the
    // first and second moments with their scales.
    AmaxAndScale* const scales_ = device_.arena.take<AmaxAndScale>(scale_count);
    float* const histories_ =
        device_.arena.take<float>(delayed_scaling() * OPERANDS * linears * setup.recipe.history);
    std::vector<MomentView> moments_[2];
    uint8_t* saved_ = nullptr;
    std::vector<uint8_t*> gradients_, sums_;  // by bucket: of a micro-batch; what the update reads
    // What read() and write() pass, by name: of which parameter it is, and where.
    struct Tensor {
        size_t param;
        void* data;
        int64_t bytes;
    };
    std::map<std::string, Tensor> tensors_;

    // Takes the moments, and notes where all tensors are.
    void take_moments() {
        const OptimizerFormat& o = setup.optimizer;
        Arena& arena = device_.arena;
        // One scale per tensor has two places: the old one decodes until all is encoded with the new one.
        const int64_t copies = o.group_size == 0 ? 2 : 1;
        for (size_t i = 0; i < params.size(); i++) {
            const std::string& name = params[i].name;
            const int64_t count = shards[i].own.count;
            tensors_[name] = {i, kept_weights(i), count * 2};
            int16_t* const remainder = weights_.remainder ? weights_.remainder + shards[i].at : nullptr;
            if (setup.master) tensors_[name + ".remainder"] = {i, remainder, count * 2};
            for (const bool second : {false, true}) {
                const Format f = params[i].moment(second ? o.v : o.m);
                const int64_t scales = o.scales(f, count), bytes = info(f).bytes;
                const std::string of = name + (second ? ".v" : ".m");
                MomentView m{arena.take(padded(shards[i].own) * bytes), nullptr, nullptr, f};
                tensors_[of] = {i, m.data, count * bytes};
                if (is_scaled(f))
                    tensors_[of + ".max"] = {i, m.max = arena.take<float>(scales * copies), scales * 4};
                if (o.expands(f)) tensors_[of + ".k"] = {i, m.k = arena.take<float>(scales), scales * 4};
                moments_[second].push_back(m);
            }
            for (LinearOperand operand : LINEAR_OPERANDS) {
                if (!delayed_scaling() || !params[i].role.linear) continue;
                const std::string of = name + OPERAND_NAMES[static_cast<int>(operand)];
                const int64_t linear = params[i].bucket - 1;
                tensors_[of + ".history"] = {i, history(linear, operand), setup.recipe.history * 4};
                tensors_[of + ".scale"] = {i, &operand_scales(operand)[linear].from_history, 4};
            }
        }
    }
    // Gradients that are kept may lie over saved activations (plan.h, gradients_offset). With several ranks
    // these are the sums, and the gradients of one micro-batch alternate by bucket between two places: those
    // of one bucket travel while the next are computed. Gradients that are not kept share one place. Those of
    // a tied embedding have their own, because the head writes them first.
    void take_activations_and_gradients() {
        Arena& arena = device_.arena;
        const int64_t each = gradient_bytes, saved = setup.config.L * saved_layer_bytes(setup);
        const bool several = peers_.several(), kept = setup.keep_gradients;
        const int64_t first = kept ? gradients_offset(setup) : 0;
        saved_ = arena.take(kept ? std::max(saved, first + shards.back().at * each) : saved);
        for (const BucketRange& b : buckets) sums_.push_back(saved_ + first + shards[b.first].at * each);
        gradients_ = sums_;
        if (kept && !several) return;
        const BucketElements e = bucket_elements(setup);
        uint8_t* const even = arena.take(e.largest * each);
        uint8_t* const odd = several ? arena.take(e.largest * each) : even;
        for (size_t b = 0; b < buckets.size(); b++) gradients_[b] = b % 2 ? odd : even;
        if (setup.config.tied) gradients_[0] = arena.take(e.embedding * each);
        if (!kept) sums_ = gradients_;
    }

    // Weights as model.h's initial() gives them. Moments are zero: max = 0 and k = 1 in every group.
    void initialize() {
        uint8_t* const zeros = reinterpret_cast<uint8_t*>(scales_);
        clear(zeros, saved_ - zeros, cuda_);
        expect_missing_histories();
        int64_t most_groups = 0;
        for (const Param& p : params) most_groups = std::max(most_groups, p.padded_size() / MOMENT_GROUP);
        const std::vector<float> ones(static_cast<size_t>(most_groups), 1.0f);
        std::vector<Segment> table;
        for (size_t i = 0; i < params.size(); i++) {
            const Param& p = params[i];
            const auto& [own, at, unit] = shards[i];
            gpu::initialize(weights_, p, shards[i], i, used_elements(setup.config, p), setup.seed, cuda_);
            refresh_scale(i);
            for (const MomentView& m : {moments_[0][i], moments_[1][i]})
                if (m.k) copy(m.k, ones.data(), groups(i) * 4, cuda_);
            table.push_back({at, own.count, moments_[0][i], moments_[1][i], p.role.decay,
                             p.role.linear ? scale(i) : nullptr, p.offset + own.first - at,
                             unit + own.first / SHARD_UNIT});
        }
        copy(segments_, table.data(), static_cast<int64_t>(table.size() * sizeof(Segment)), cuda_);
        device_.wait("Initializing the weights failed");
    }

    int64_t groups(size_t i) const { return ceil_div(shards[i].own.count, MOMENT_GROUP); }
    float* history(int64_t linear, LinearOperand o) const {
        return histories_ + (static_cast<int>(o) * linears + linear) * setup.recipe.history;
    }

    // For weights that were written: the amax that the optimizer leaves for those that it updates.
    void refresh_scale(size_t i) {
        if (!params[i].role.linear) return;
        clear(scale(i), sizeof(AmaxAndScale), cuda_);
        if (compute.format == Format::F32) return;
        for (const View& piece : pieces_for_grids(owned_weight(i))) amax(stored(piece), scale(i), cuda_);
    }

    const Tensor& find(const std::string& name) const {
        const auto found = tensors_.find(name);
        if (found == tensors_.end()) throw Error("The model has no tensor " + name + ".");
        return found->second;
    }
    // Copies a tensor to `out`, or replaces it by `in`.
    void transfer(const std::string& name, void* out, const void* in) const {
        const auto& [i, data, bytes] = find(name);
        const bool remainder = name == params[i].name + ".remainder";
        if (compute.format == Format::F32 && (remainder || name == params[i].name))
            return copy_half(i, remainder, static_cast<uint16_t*>(out), static_cast<const uint16_t*>(in));
        if (out) device_.fetch(out, data, bytes);
        else device_.send(data, in, bytes);
    }
    // The fp32 recipe stores FP32 masters. Files have them as BF16 weight and remainder.
    void copy_half(size_t i, bool remainder, uint16_t* out, const uint16_t* in) const {
        const int64_t count = shards[i].own.count;
        uint32_t* const masters = reinterpret_cast<uint32_t*>(kept_weights(i));
        std::vector<uint32_t> bits(static_cast<size_t>(count));
        device_.fetch(bits.data(), masters, count * 4);
        for (size_t e = 0; e < bits.size(); e++) {
            const uint32_t weight = (bits[e] + 0x8000u) >> 16, rest = bits[e] & 0xFFFFu;
            if (out) out[e] = static_cast<uint16_t>(remainder ? rest : weight);
            else if (remainder) bits[e] = (weight << 16) + static_cast<int16_t>(in[e]);
            else bits[e] = (uint32_t(in[e]) << 16) + static_cast<int16_t>(rest);
        }
        if (out) return;
        device_.send(masters, bits.data(), count * 4);
        device_.wait("Writing a tensor failed");
    }
    // As FP32, of which BF16 is the upper half.
    void read_gradient(size_t i, float* out) const {
        const int64_t n = shards[i].own.count, each = gradient_bytes;
        std::vector<uint8_t> raw(n * each);
        device_.fetch(raw.data(), gradient_sums(i), n * each);
        std::fill_n(out, n, 0.0f);
        for (int64_t e = 0; e < n; e++)
            std::memcpy(reinterpret_cast<uint8_t*>(&out[e]) + 4 - each, &raw[e * each], each);
    }
};

}  // namespace coat::gpu
