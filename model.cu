// model.cu - one training step on the GPU: Llama and GPT-2, forward, backward and update, in any recipe.
//
// It mirrors the CPU reference (reference.cpp) with the kernels of coat.cuh, adamw.cuh and gpu/. Read
// GpuModel::block_forward() and block_backward() first: they follow the table that --plan prints. There are
// three rules:
//   - Everything is in one allocation, laid out by plan.cpp. Nothing is allocated after the start, and within
//     a step the host never waits for the GPU.
//   - Saved for backward is what model.h's saved_per_layer() lists. What can be recomputed elementwise is
//     recomputed on the way into the next GEMM's operand.
//   - Memory is reused. The gradient of the residual stream takes the place of the final norm's input.
//     Gradients of weights take the place of saved activations that backward no longer needs (plan.h).
//
// The parts, each of which uses those before it:
//   Device    settings, memory and stream of this GPU
//   Peers     the other GPUs
//   State     weights, gradients, scales and moments, by parameter; the update
//   Exchange  which gradients and weights travel between GPUs, and when
//   GpuModel  the Model that train.cpp drives: a step, its micro-batches, and their blocks
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "adamw.cuh"
#include "coat.cuh"
#include "gpu/attention.cuh"
#include "gpu/comm.cuh"
#include "gpu/cuda.cuh"
#include "gpu/gemm.cuh"
#include "gpu/layers.cuh"
#include "plan.h"
#include "ranks.h"

namespace coat {
namespace {

using namespace gpu;

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
    QuantStats stats[static_cast<int>(Kind::Count)];
};

// One allocation for everything, laid out by plan.cpp, and the stream on which all kernels run.
class Device {
public:
    const Setup setup;
    const GpuLayout layout;
    const Stream stream;

    Device(const Setup& s, const GpuFacts& facts) : setup(s), layout(gpu_layout(s, facts)) {
        check(cudaMalloc(&base_, layout.total), "Allocating the GPU's memory failed");
    }
    ~Device() { cudaFree(base_); }

    uint8_t* at(int64_t offset) const { return base_ + offset; }
    const Place& place(Work w) const { return layout.work[static_cast<int>(w)]; }
    template <class T = void>
    T* work(Work w) const {
        return reinterpret_cast<T*>(at(place(w).offset));
    }
    Results* results() const { return work<Results>(Work::Results); }
    void wait(const char* what) const { check(cudaStreamSynchronize(stream), what); }

private:
    uint8_t* base_ = nullptr;
};

// The rows [first, first + n) of a view that is dense, in groups or per tensor.
View rows(const View& v, int64_t first, int64_t n) {
    uint8_t* scales = static_cast<uint8_t*>(v.scales);
    const bool grouped = v.quant.fp8() && v.quant.granularity.rows == 1;
    if (grouped) scales += first * v.quant.scale_cols(v.cols) * info(v.quant.scale_format).bytes;
    return {static_cast<uint8_t*>(v.codes) + v.quant.code_bytes(first, v.cols), scales, n, v.cols, v.quant};
}

// -----------------------------------------------------------------------------------------------------------
// The other GPUs of the run. What travels does so on a stream of its own, beside the computation.

class Peers {
public:
    explicit Peers(const Device& device)
        : rank(device.setup.rank), count(device.setup.ranks), compute_(device.stream),
          comm_(count > 1 ? connect_gpus(*device.setup.group, device.at(0)) : nullptr) {}

    const int64_t rank, count;

    bool several() const { return count > 1; }
    // What a rank owns of a parameter (model.h, slice_of), and its elements with padding.
    Slice own(const Param& p, int64_t r) const { return slice_of(p.size(), r, count); }
    int64_t padded(const Param& p, int64_t r) const { return coat::padded(own(p, r)); }

    cudaStream_t stream() const { return stream_; }
    // What is launched on stream() from now on runs after what the computation has launched so far.
    void wait_for_compute() { now_.record(compute_), now_.make_wait(stream_); }
    // And the other way round.
    void make_compute_wait() {
        if (several()) then_.record(stream_), then_.make_wait(compute_);
    }
    // The key of an exchange: its topic, and a number within the topic. The same key stands for the same
    // addresses every time.
    enum class Topic : int64_t { Gradients, Sums, Weights, Vectors, Gather, Amaxes, Squares };
    void exchange(Topic topic, int64_t number, const std::vector<Transfer>& transfers) {
        comm_->exchange(static_cast<int64_t>(topic) << 32 | number, transfers, stream_);
    }

    // blocks (count, bytes): every rank has filled its own; afterwards all are filled. The computation
    // waits for it.
    void all_gather(Topic topic, int64_t number, void* blocks, int64_t bytes) {
        if (!several()) return;
        uint8_t* const all = static_cast<uint8_t*>(blocks);
        std::vector<Transfer> transfers;
        for (int64_t r = 0; r < count; r++)
            if (r != rank) transfers.push_back({r, all + rank * bytes, bytes, all + r * bytes, bytes});
        wait_for_compute();
        exchange(topic, number, transfers);
        make_compute_wait();
    }
    // whole has p.padded_size() elements of `each` bytes, of which this rank has what it owns, at `mine`.
    // Adds the transfers that complete it on every rank.
    void add_gather(const Param& p, int64_t each, const void* mine, uint8_t* whole,
                    std::vector<Transfer>& transfers) const {
        for (int64_t r = 0; r < count; r++)
            if (r != rank)
                transfers.push_back({r, mine, padded(p, rank) * each, whole + own(p, r).first * each,
                                     padded(p, r) * each});
    }

private:
    const cudaStream_t compute_;
    Stream stream_;
    Event now_, then_;
    std::unique_ptr<Comm> comm_;
};

// -----------------------------------------------------------------------------------------------------------
// Weights, gradients and moments, by parameter

constexpr int64_t LINEARS = 4;  // linear layers of a block: qkv, attention_out, gate_up, down
constexpr LinearOperand LINEAR_OPERANDS[] = {LinearOperand::X, LinearOperand::W, LinearOperand::G};

class State {
public:
    const Setup& setup;
    const std::vector<Param> params;
    const std::vector<BucketRange> buckets;
    const std::vector<ShardPlace>& shards;
    const Quant compute, gradient_quant;
    const int64_t weight_bytes, gradient_bytes;  // of one element
    // --shard all: the matrices that are whole at the moment. Exchange::gather() fills them.
    std::vector<View> gathered;
    // Delayed scaling: some operand may have an empty history, and is scaled just in time.
    bool some_without_history = false;

    State(const Device& device, Peers& peers)
        : setup(device.setup), params(parameters(setup.config)), buckets(bucket_ranges(params)),
          shards(device.layout.shards), compute{setup.recipe.compute}, gradient_quant{gradient_format(setup)},
          weight_bytes(info(compute.format).bytes), gradient_bytes(info(gradient_quant.format).bytes),
          gathered(params.size()), device_(device), peers_(peers), cuda_(device.stream),
          weights_{device.at(device.layout.weights.offset), remainders(), compute.format} {
        std::vector<Segment> table;
        for (size_t i = 0; i < params.size(); i++) table.push_back(segment(i));
        copy(segments(), table.data(), static_cast<int64_t>(table.size() * sizeof(Segment)), cuda_);
        device_.wait("Copying the table of parameters failed");
        static_assert(sizeof(Segment) <= 128, "plan.cpp counts 128 bytes a parameter");
    }

    View weight(size_t i) const {
        if (setup.shard == Shard::All && peers_.several() && params[i].rows > 1) return gathered[i];
        return {kept_weights(i), nullptr, params[i].rows, params[i].cols, compute};
    }
    // The weights of a parameter that this rank keeps. As a view they have MOMENT_GROUP columns, because a
    // slice need not be whole rows.
    uint8_t* kept_weights(size_t i) const {
        return static_cast<uint8_t*>(weights_.values) + shards[i].weight_at * weight_bytes;
    }
    View weight_slice(size_t i) const {
        return {kept_weights(i), nullptr, shards[i].weight.count / MOMENT_GROUP, MOMENT_GROUP, compute};
    }
    View gradient(size_t i) const {
        return {gradient_from(i, 0), nullptr, params[i].rows, params[i].cols, gradient_quant};
    }
    uint8_t* gradient_from(size_t i, int64_t element) const {
        return device_.at(device_.layout.gradients[i]) + element * gradient_bytes;
    }
    // The gradients that this rank's update reads (model.h, kept_state()): with several ranks, their sums.
    uint8_t* gradient_sums(size_t i) const {
        const int64_t bucket = params[i].bucket;
        const int64_t in_bucket = shards[i].state_at - shards[buckets[bucket].first].state_at;
        return device_.at(device_.layout.sums[bucket]) + in_bucket * gradient_bytes;
    }
    // One TensorScale for each parameter; behind them those of the operands of the linear layers, four linear
    // layers in each block.
    TensorScale* scale(size_t i) const { return device_.work<TensorScale>(Work::Scales) + i; }
    TensorScale* operand_scales(int64_t layer, LinearOperand o) const {
        return scale(params.size()) + (static_cast<int>(o) * setup.config.L + layer) * LINEARS;
    }
    // Of the weight of a linear layer. Linear layer number n has bucket n + 1: bucket 0 is the embedding's.
    TensorScale* weight_scale(size_t i) const {
        return delayed() ? operand_scales(0, LinearOperand::W) + params[i].bucket - 1 : scale(i);
    }
    int64_t number_of_operand_scales() const { return OPERANDS * LINEARS * setup.config.L; }
    int64_t number_of_scales() const {
        return static_cast<int64_t>(params.size()) + number_of_operand_scales();
    }
    bool delayed() const { return setup.recipe.scaling == Scaling::Delayed; }

    // Weights as model.h's initial() gives them. Moments are zero: max = 0 and k = 1 in every group.
    void initialize() {
        const GpuLayout& at = device_.layout;
        clear(device_.at(at.moments.offset), at.moments.bytes + at.scales.bytes, cuda_);
        clear(device_.at(at.delayed.offset), at.delayed.bytes, cuda_);
        clear(scale(0), number_of_scales() * static_cast<int64_t>(sizeof(TensorScale)), cuda_);
        expect_missing_histories();
        int64_t most_groups = 0;
        for (const Param& p : params) most_groups = std::max(most_groups, p.groups());
        const std::vector<float> ones(static_cast<size_t>(most_groups), 1.0f);
        for (size_t i = 0; i < params.size(); i++) {
            gpu::initialize(weights_, params[i], shards[i], i, live_elements(setup.config, params[i]),
                            setup.seed, cuda_);
            refresh_scale(i);
            for (const MomentView& m : {moment(i, false), moment(i, true)})
                if (m.k) copy(m.k, ones.data(), groups(i) * 4, cuda_);
        }
        device_.wait("Initializing the weights failed");
    }

    // Clears the amaxes of inputs and gradients, and with delayed scaling those of weights: before each
    // micro-batch if scaling is just in time, and before each step if it is delayed. (Just in time, the amax
    // of a weight is in scale(i) and stays.)
    void clear_amaxes() {
        check(cudaMemset2DAsync(&scale(params.size())->amax, sizeof(TensorScale), 0, sizeof(float),
                                number_of_operand_scales(), cuda_),
              "Clearing amaxes failed");
    }
    void expect_missing_histories() { some_without_history = delayed() && linear_formats(setup).x.fp8(); }
    void end_delayed_step() {
        if (!delayed()) return;
        Outcome& outcome = device_.results()->outcome;
        for (LinearOperand o : LINEAR_OPERANDS)
            gpu::end_delayed_step(operand_scales(0, o), LINEARS * setup.config.L, history(0, o),
                                  setup.recipe.history, setup.recipe.margin, quant_of(setup.recipe, o).format,
                                  &outcome.gradients.skip, &outcome.without_history, cuda_);
    }

    // Updates a bucket whose gradients are complete, or all parameters: the norm of their gradients, then
    // AdamW, which leaves the amaxes of the new weights.
    static constexpr int64_t ALL_BUCKETS = -1;
    void update(const AdamW& a, int64_t bucket = ALL_BUCKETS) {
        const bool whole_step = bucket == ALL_BUCKETS;
        const size_t begin = whole_step ? 0 : buckets[bucket].first,
                     end = whole_step ? params.size() : buckets[bucket].last;
        const int n = static_cast<int>(end - begin);
        const ShardPlace &first = shards[begin], &last = shards[end - 1];
        const Range range{first.state_at, last.state_at + padded(last.state) - first.state_at};
        const int64_t shard_chunks =
            last.shard_chunk + ceil_div(params[end - 1].size(), SHARD_CHUNK) - first.shard_chunk;
        // Where all ranks have all gradients, they share the work.
        const Share share = setup.shard == Shard::None ? Share{peers_.rank, peers_.count} : Share{};
        Results* const results = device_.results();
        GradientState* const state = &results->outcome.gradients;
        const void* const gradients = gradient_sums(begin);
        double* const squares = device_.work<double>(Work::GradientSquares);
        gradient_squares(segments() + begin, n, gradients, gradient_quant.format, range.first,
                         first.shard_chunk, shard_chunks, share, &results->checked_loss,
                         squares + peers_.rank * (1 + shard_chunks), cuda_);
        peers_.all_gather(Peers::Topic::Squares, params[begin].bucket, squares,
                          (1 + shard_chunks) * static_cast<int64_t>(sizeof(double)));
        gradient_norm(squares, shard_chunks, peers_.count,
                      {a.clip, whole_step ? 1 : norm_correction_at(a, bucket)}, state, cuda_);
        gpu::adamw(a, setup.optimizer, segments() + begin, n, range, weights_,
                   rounding_key(setup.seed, a.step), gradients, gradient_quant.format, state, cuda_);
    }

    // The amaxes of all ranks become one: of the weights, of which each has updated a part, and with delayed
    // scaling those of a step. Also gives codes of weights their scale, for ranks that own none of them.
    void combine_amaxes() {
        if (!peers_.several()) return;
        const int64_t n = delayed() ? number_of_scales() : static_cast<int64_t>(params.size());
        const int64_t bytes = n * static_cast<int64_t>(sizeof(TensorScale));
        TensorScale* const all = device_.work<TensorScale>(Work::RankScales);
        copy(all + peers_.rank * n, scale(0), bytes, cuda_);
        peers_.all_gather(Peers::Topic::Amaxes, 0, all, bytes);
        gpu::combine_amaxes(scale(0), all, n, peers_.count, setup.recipe.w, cuda_);
    }

    // For the quantization report: the error of storing the moments of a bucket.
    void measure(int64_t bucket) const {
        QuantStats* const stats = device_.results()->stats;
        for (size_t i = buckets[bucket].first; i < buckets[bucket].last; i++) {
            const Slice& slice = shards[i].state;
            measure_moments(setup.optimizer, segments() + i, slice.count, weights_,
                            gradient_from(i, slice.first), gradient_quant.format, shards[i].state_at,
                            stats + static_cast<int>(Kind::Moment1), stats + static_cast<int>(Kind::Moment2),
                            cuda_);
        }
    }
    // All expansion factors, sorted, also for the report.
    std::vector<float> expansion_factors(bool second) const {
        std::vector<float> all;
        for (size_t i = 0; i < params.size(); i++) {
            const float* const k = moment(i, second).k;
            if (!k) continue;
            const size_t before = all.size();
            all.resize(before + groups(i));
            copy(all.data() + before, k, groups(i) * 4, cuda_);
            device_.wait("Reading the moments failed");
        }
        std::sort(all.begin(), all.end());
        return all;
    }

    // What model.h's Model::read() and write() do.
    void read(const std::string& name, void* out) const {
        const auto [i, suffix] = parse(name);
        if (suffix == ".gradient" && setup.keep_gradients) return read_gradient(i, static_cast<float*>(out));
        if (is_master(suffix)) return copy_half(i, suffix == ".remainder", out, nullptr);
        const auto [data, bytes] = find(name, i, suffix);
        copy(out, data, bytes, cuda_);
        device_.wait("Reading a tensor failed");
    }
    void write(const std::string& name, const void* in) {
        const auto [i, suffix] = parse(name);
        if (is_master(suffix)) {
            copy_half(i, suffix == ".remainder", nullptr, in);
        } else {
            const auto [data, bytes] = find(name, i, suffix);
            copy(data, in, bytes, cuda_);
        }
        expect_missing_histories();
        refresh_scale(i);
        device_.wait("Writing a tensor failed");
    }

private:
    const Device& device_;
    Peers& peers_;
    const cudaStream_t cuda_;
    const Weights weights_;

    int64_t groups(size_t i) const { return ceil_div(shards[i].state.count, MOMENT_GROUP); }
    int16_t* remainders() const {
        const bool beside = setup.master && compute.format != Format::F32;
        return beside ? reinterpret_cast<int16_t*>(device_.at(device_.layout.remainder.offset)) : nullptr;
    }
    MomentView moment(size_t i, bool second) const {
        const MomentPlace& at = second ? device_.layout.v[i] : device_.layout.m[i];
        const Format format = params[i].moment(second ? setup.optimizer.v : setup.optimizer.m);
        auto floats = [&](bool any, int64_t offset) {
            return any ? reinterpret_cast<float*>(device_.at(offset)) : nullptr;
        };
        return {device_.at(at.codes), floats(is_scaled(format), at.max),
                floats(setup.optimizer.expands(format), at.k), format};
    }
    Segment* segments() const { return device_.work<Segment>(Work::Segments); }
    Segment segment(size_t i) const {
        const Param& p = params[i];
        const ShardPlace& at = shards[i];
        // From what is kept of a master to the same element among the weights.
        const int64_t skipped = at.state.first - at.weight.first;
        return {at.state_at, at.state.count, moment(i, false), moment(i, true), p.role.decay,
                p.role.linear ? scale(i) : nullptr, at.weight_at + skipped - at.state_at,
                p.offset + at.state.first - at.state_at, at.shard_chunk + at.state.first / SHARD_CHUNK};
    }
    float* history(int64_t linear, LinearOperand o) const {
        float* all = reinterpret_cast<float*>(device_.at(device_.layout.delayed.offset));
        return all + (static_cast<int>(o) * setup.config.L * LINEARS + linear) * setup.recipe.history;
    }

    // For weights that were written: the amax that the optimizer leaves for those that it updates.
    void refresh_scale(size_t i) {
        if (!params[i].role.linear) return;
        clear(scale(i), sizeof(TensorScale), cuda_);
        if (compute.format != Format::F32) amax(stored(weight_slice(i)), scale(i), cuda_);
    }

    // "layers.0.qkv.m.max" -> (number of "layers.0.qkv", ".m.max")
    std::pair<size_t, std::string> parse(const std::string& name) const {
        const size_t i = param_of(params, name);
        return {i, name.substr(params[i].name.size())};
    }
    // Where a tensor is, for those that are stored as read() and write() pass them.
    std::pair<void*, int64_t> find(const std::string& name, size_t i, const std::string& suffix) const {
        const int64_t kept = shards[i].state.count;
        if (suffix.empty()) return {kept_weights(i), shards[i].weight.count * 2};
        if (suffix == ".remainder" && weights_.remainder)
            return {weights_.remainder + shards[i].state_at, kept * 2};
        for (const bool second : {false, true}) {
            const MomentView m = moment(i, second);
            const std::string of = second ? ".v" : ".m";
            const int64_t scales = setup.optimizer.scales(m.format, kept);
            if (suffix == of) return {m.codes, kept * info(m.format).bytes};
            if (suffix == of + ".max" && m.max) return {m.max, scales * 4};
            if (suffix == of + ".k" && m.k) return {m.k, scales * 4};
        }
        for (LinearOperand o : LINEAR_OPERANDS) {
            if (!delayed() || !params[i].role.linear) continue;
            const std::string of = OPERAND_NAMES[static_cast<int>(o)];
            const int64_t linear = params[i].bucket - 1;
            if (suffix == of + ".history") return {history(linear, o), int64_t(setup.recipe.history) * 4};
            if (suffix == of + ".scale") return {&operand_scales(0, o)[linear].delayed, 4};
        }
        throw Error("The model has no tensor " + name + ".");
    }

    // The fp32 recipe stores FP32 masters. Files have them as BF16 and remainder: they are converted piece by
    // piece in the scratch of the GEMMs, which is free between steps.
    static constexpr int64_t PIECE = 1 << 21;
    float* piece() const { return device_.work<float>(Work::GemmScratch); }
    bool is_master(const std::string& suffix) const {
        return compute.format == Format::F32 && (suffix.empty() || suffix == ".remainder");
    }
    // Copies one half of the masters to `out`, or replaces it by `in`. What is kept of weights and of
    // remainders are parts of one FP32 array.
    void copy_half(size_t i, bool remainder, void* out, const void* in) const {
        const ShardPlace& at = shards[i];
        const int64_t skipped = remainder ? at.state.first - at.weight.first : 0,
                      count = (remainder ? at.state : at.weight).count;
        float* const masters = reinterpret_cast<float*>(kept_weights(i)) + skipped;
        uint16_t* const weights = reinterpret_cast<uint16_t*>(piece() + PIECE);
        int16_t* const remainders = reinterpret_cast<int16_t*>(weights) + PIECE;
        void* const half = remainder ? static_cast<void*>(remainders) : weights;
        for (int64_t first = 0; first < count; first += PIECE) {
            const int64_t n = std::min(PIECE, count - first);
            split_master(masters + first, weights, remainders, n, cuda_);
            if (out) {
                copy(static_cast<uint16_t*>(out) + first, half, n * 2, cuda_);
            } else {
                copy(half, static_cast<const uint16_t*>(in) + first, n * 2, cuda_);
                join_master(weights, remainders, masters + first, n, cuda_);
            }
            device_.wait("Converting a tensor failed");
        }
    }
    void read_gradient(size_t i, float* out) const {
        constexpr int64_t COLS = 16;  // every parameter has a multiple of 16 elements
        const View g{gradient_sums(i), nullptr, shards[i].state.count / COLS, COLS, gradient_quant};
        for (int64_t first = 0; first < g.rows; first += 2 * PIECE / COLS) {
            const int64_t n = std::min(2 * PIECE / COLS, g.rows - first);
            dequantize(rows(g, first, n), {piece(), nullptr, n, COLS, Q_F32}, cuda_);
            copy(out + first * COLS, piece(), n * COLS * 4, cuda_);
            device_.wait("Reading a gradient failed");
        }
    }
};

// -----------------------------------------------------------------------------------------------------------
// What travels between the GPUs of a run, and when. dev/WALK.md tells the same step by step.
//
//   gradients   after a bucket's backward: each rank sends every other rank what that one owns of them. What
//               it receives it adds in the order of the ranks, in FP32, and rounds once. So the sum has the
//               bits of one GPU that adds up as many micro-batches, if sums are FP32.
//   weights     --shard optimizer: after the update, each rank sends what it has updated.
//               --shard all: before a stage (plan.h, weight_stages) computes, its matrices are gathered into
//               one of two buffers, while the stage before still computes with the other.

class Exchange {
public:
    Exchange(const Device& device, State& state, Peers& peers)
        : device_(device), setup_(device.setup), state_(state), peers_(peers),
          stages_(weight_stages(setup_.config)), ready_(stages_.size()) {}

    // --- Gradients
    // Make the computation wait until the gradients of a bucket (of all buckets) have been sent, and their
    // place may be written again.
    void wait_for_bucket(int64_t bucket) const { sent_[place_of(bucket)].make_wait(device_.stream); }
    void wait_for_buckets() const {
        for (const Event& e : sent_) e.make_wait(device_.stream);
    }
    // The computation has launched all that writes a bucket's gradients of one micro-batch. Each rank gets
    // the gradients of what it owns from all others, and adds them to its sums. The last micro-batch of a
    // step makes the sums whole on every rank, unless they are sharded. first, last: micro-batch of the step.
    void add_bucket(int64_t bucket, bool first, bool last) {
        const BucketRange& b = state_.buckets[bucket];
        const int64_t each = state_.gradient_bytes;
        const bool every_rank_keeps_sums = setup_.shard == Shard::None;
        // By parameter, then by rank.
        uint8_t* const received = device_.work<uint8_t>(Work::ReceivedGradients);
        std::vector<Transfer> parts, sums;
        uint8_t* to = received;
        for (size_t i = b.first; i < b.last; i++)
            for (int64_t r = 0; r < peers_.count; r++) {
                const Param& p = state_.params[i];
                if (r == peers_.rank) continue;
                const int64_t mine = peers_.padded(p, peers_.rank) * each;
                parts.push_back({r, owned_gradient(i, r), peers_.padded(p, r) * each, to, mine});
                to += mine;
            }
        peers_.wait_for_compute();
        peers_.exchange(Peers::Topic::Gradients, bucket, parts);
        const uint8_t* from = received;
        for (size_t i = b.first; i < b.last; i++) {
            const Param& p = state_.params[i];
            const int64_t mine = peers_.padded(p, peers_.rank);
            uint8_t* const whole = state_.gradient_sums(i);
            uint8_t* const sum =
                whole + (every_rank_keeps_sums ? peers_.own(p, peers_.rank).first * each : 0);
            add_gradients(sum, first, owned_gradient(i, peers_.rank), from, state_.gradient_quant.format,
                          mine, {peers_.rank, peers_.count}, peers_.stream());
            from += (peers_.count - 1) * mine * each;
            if (every_rank_keeps_sums && last) peers_.add_gather(p, each, sum, whole, sums);
        }
        if (!sums.empty()) peers_.exchange(Peers::Topic::Sums, bucket, sums);
        sent_[place_of(bucket)].record(peers_.stream());
    }

    // --- Weights
    // After an update, or after weights have been written. send: what this rank owns goes to the others.
    void weights_changed(bool send) {
        forget_gathered();
        if (!peers_.several()) return;
        state_.combine_amaxes();
        if (setup_.shard == Shard::None || !send) return;
        // Sends parameters that every rank keeps whole, and of which each has updated a part.
        auto complete = [&](Peers::Topic topic, int64_t number, const std::vector<size_t>& params) {
            const int64_t each = state_.weight_bytes;
            std::vector<Transfer> transfers;
            for (size_t i : params) {
                const Param& p = state_.params[i];
                uint8_t* const whole = state_.kept_weights(i);
                peers_.add_gather(p, each, whole + peers_.own(p, peers_.rank).first * each, whole, transfers);
            }
            peers_.exchange(topic, number, transfers);
        };
        std::vector<size_t> vectors;
        for (size_t i = 0; i < state_.params.size(); i++)
            if (state_.params[i].rows == 1) vectors.push_back(i);
        peers_.wait_for_compute();
        complete(Peers::Topic::Vectors, 0, vectors);
        if (setup_.shard == Shard::All) return peers_.make_compute_wait();
        for (size_t stage = 0; stage < stages_.size(); stage++) {
            const bool sent_already = setup_.config.tied && static_cast<int64_t>(stage) == head();
            if (!sent_already) complete(Peers::Topic::Weights, static_cast<int64_t>(stage), stages_[stage]);
            ready_[stage].record(peers_.stream());
        }
    }
    // The computation is about to launch what reads the weights of a stage. Makes it wait until they are
    // there, and begins to gather the stage that comes next (NONE: nothing).
    static constexpr int64_t NONE = -1;
    void use(int64_t stage, int64_t next, QuantStats* stats) {
        if (!peers_.several()) return;
        ready_[stage].make_wait(device_.stream);
        if (setup_.shard != Shard::All) return;
        if (in_buffer_[current_] != stage) {
            current_ = !current_;
            if (in_buffer_[current_] != stage) gather(stage, current_, stats);
        }
        gathered_[current_].make_wait(device_.stream);
        if (next != NONE && in_buffer_[!current_] != next) gather(next, !current_, stats);
    }
    void use_all() {
        for (const Event& e : ready_) e.make_wait(device_.stream);
    }
    int64_t head() const { return static_cast<int64_t>(stages_.size()) - 1; }
    void forget_gathered() { in_buffer_[0] = in_buffer_[1] = NONE; }

private:
    const Device& device_;
    const Setup& setup_;
    State& state_;
    Peers& peers_;
    const std::vector<std::vector<size_t>> stages_;
    std::vector<Event> ready_;     // by stage, with --shard optimizer: its weights are whole
    Event sent_[3];                // by place of gradients: it may be written again
    Event gathered_[2];            // by buffer
    int64_t in_buffer_[2] = {NONE, NONE};  // the stage in it
    bool current_ = false;         // the buffer that was used last

    // Gradients of one micro-batch, what `rank` owns.
    const uint8_t* owned_gradient(size_t i, int64_t rank) const {
        return state_.gradient_from(i, peers_.own(state_.params[i], rank).first);
    }
    int place_of(int64_t bucket) const {  // as plan.cpp's place_bucket_gradients()
        return bucket == 0 && setup_.config.tied ? 2 : static_cast<int>(bucket % 2);
    }

    // Gathers the matrices of a stage into a buffer: as FP8 codes, which each rank makes of its part with the
    // scale of the whole, or as they are.
    void gather(int64_t stage, bool buffer, QuantStats* stats) {
        const int64_t size = device_.place(Work::GatheredWeights).bytes / 2;
        uint8_t* to = device_.work<uint8_t>(Work::GatheredWeights) + buffer * size;
        const bool as_codes = gathers_codes(setup_) && !state_.some_without_history;
        std::vector<Transfer> transfers;
        peers_.wait_for_compute();
        for (size_t i : stages_[stage]) {
            const Param& p = state_.params[i];
            const bool codes = as_codes && p.role.linear;
            const Quant quant = codes ? setup_.recipe.w : state_.compute;
            TensorScale* const scale = codes ? state_.weight_scale(i) : nullptr;
            const int64_t each = info(quant.format).bytes;
            const Slice own = peers_.own(p, peers_.rank);
            uint8_t* const mine = to + own.first * each;
            const View slice = state_.weight_slice(i);
            const View part{mine, scale, slice.rows, slice.cols, quant};
            if (!codes) copy(mine, slice.codes, own.count * each, peers_.stream());
            else quantize(stored(slice), {part}, stats, peers_.stream());
            peers_.add_gather(p, each, mine, to, transfers);
            state_.gathered[i] = {to, scale, p.rows, p.cols, quant};
            to += round_up(p.padded_size() * each, GPU_ALIGNMENT);
        }
        peers_.exchange(Peers::Topic::Gather, 4 * stage + 2 * as_codes + buffer, transfers);
        gathered_[buffer].record(peers_.stream());
        in_buffer_[buffer] = stage;
    }
};

// -----------------------------------------------------------------------------------------------------------
// The Model that train.cpp drives: steps, micro-batches, and blocks in the order of the --plan print-out

// A linear layer y = x w^T + bias, and the scales of the operands of its three GEMMs. The bias (out) is the
// parameter that follows the weight.
struct Linear {
    size_t param;            // number of the weight (out, in)
    bool biased;
    int64_t bucket;          // of its gradients; also the stage in which its weight is gathered (plan.h)
    TensorScale *x_scale, *w_scale, *g_scale;  // of the input, the weight, and the gradient of the output
    uint8_t* cached_weight;  // FP8 codes and scales, then the transposed ones; null: made when needed
    void* saved_x;           // with --recompute off: the input as an operand; else null
};
struct Block {
    View saved[9];        // by Saved (model.h, saved_per_layer); empty where nothing is saved
    size_t norm1, norm2;  // parameters: the weights; the bias of a LayerNorm follows its weight
    Linear qkv, attention_out, gate_up, down;
};

class GpuModel : public Model {
public:
    GpuModel(const Setup& s, const GpuFacts& facts)
        : device_(s, facts), gemms_(device_.work(Work::GemmScratch), recipe_.fast_accumulation),
          peers_(device_), state_(device_, peers_), exchange_(device_, state_, peers_),
          caches_weights_(facts.cache_fp8_weights), embedding_(param("embedding")),
          head_(param(config_.tied ? "embedding" : "head")), final_norm_(param("final_norm.weight")),
          positions_(config_.arch.rope ? embedding_ : param("positions")), tokens_(step_tokens()),
          targets_(step_tokens()), order_(step_tokens()), chunks_(step_tokens()), outcome_(1),
          norms_(buckets()), loss_scale_(1) {
        static_assert(sizeof(Results) <= 16 << 10 && Gemms::SCRATCH <= 32 << 20 &&
                          sizeof(TensorScale) == 16 && OPERANDS * LINEARS == 12 &&
                          sizeof(EmbeddingChunk) == 16 && COLUMN_PARTIALS == 128,
                      "as work_rows() in plan.cpp counts them");
        uint8_t* cache = caches_weights_ ? device_.work<uint8_t>(Work::CachedWeights) : nullptr;
        for (int64_t l = 0; l < config_.L; l++) blocks_.push_back(make_block(l, cache));
        set_shape(setup_.B, setup_.T);
        auto lacks_room = [&](Work w, size_t bytes) {
            return static_cast<int64_t>(bytes) > device_.place(w).bytes;
        };
        if (lacks_room(Work::AttentionScratch, attention_workspace(attention())) ||
            lacks_room(Work::NormPartials, norm_backward_workspace(config_.C)))
            throw Error(
                "The memory plan has less room for attention or norms than their kernels need; correct "
                "work_rows() in plan.cpp.");
        if (config_.arch.rope) rope_table(config_, setup_.T, device_.work<float2>(Work::RopeTable), cuda_);
        start();
        warm_up();
        start();
    }

    StepResult step(const int32_t* tokens, const int32_t* targets, const AdamW& adamw) override {
        check_and_pin(tokens, targets, step_tokens());
        const int64_t counted = sum_of_ranks(counted_targets(targets, step_tokens()));
        if (counted == 0) return {0, 0, true};
        begin(static_cast<double>(counted));
        adamw_ = &adamw;
        for (int64_t i = 0; i < setup_.accumulate; i++) {
            run(i);
            if (setup_.keep_gradients) check_loss(&results()->checked_loss);
        }
        peers_.make_compute_wait();
        if (setup_.keep_gradients) state_.update(adamw);
        weights_changed(true);
        state_.end_delayed_step();
        const Outcome& outcome = finish();
        const bool skipped = outcome.gradients.skip != 0;
        if (!skipped && outcome.without_history == 0) state_.some_without_history = false;
        std::vector<double> correction;
        if (!setup_.keep_gradients)
            correction = norm_corrections_of({norms_.get(), norms_.get() + buckets()});
        return {sum_of_ranks(outcome.loss), outcome.gradients.norm, skipped, correction, counted};
    }

    double evaluate(const int32_t* tokens, const int32_t* targets) override {
        check_and_pin(tokens, targets, batch_tokens());
        upload(0, batch_tokens());
        begin(divisor_of_mean(targets, batch_tokens()));
        forward(setup_.B, setup_.T);
        head(false);
        check_loss(&results()->outcome.loss);
        return finish().loss;
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        check_and_pin(tokens, tokens, n);
        upload(0, n);
        begin(1);
        forward(1, n);
        exchange_.use(exchange_.head(), Exchange::NONE, nullptr);
        const View row = head_logits(n - 1, 1),
                   wide{device_.work(Work::GemmScratch), nullptr, 1, row.cols, Q_F32};
        dequantize(row, wide, cuda_);
        copy(logits, wide.codes, config_.V * 4, cuda_);
        device_.stream.wait();
    }

    QuantReport quantization(const int32_t* tokens, const int32_t* targets) override {
        QuantReport report;
        check_and_pin(tokens, targets, batch_tokens());
        clear(results()->stats, sizeof(results()->stats), cuda_);
        begin(divisor_of_mean(targets, batch_tokens()), results()->stats);
        run(0);
        peers_.make_compute_wait();
        report.k_m = state_.expansion_factors(false);
        report.k_v = state_.expansion_factors(true);
        copy(report.kinds, results()->stats, sizeof(report.kinds), cuda_);
        device_.stream.wait();
        // Where weights travel as codes, each rank has measured those that it made.
        QuantStats& weights = report.kinds[static_cast<int>(Kind::Weight)];
        if (setup_.shard == Shard::All && gathers_codes(setup_)) weights = sum_of_ranks(weights);
        return report;
    }

    // Gradients can be read from the end of a step to the next forward pass.
    void read(const std::string& name, void* out) override {
        peers_.make_compute_wait();
        state_.read(name, out);
    }
    void write(const std::string& name, const void* in) override {
        peers_.make_compute_wait();
        state_.write(name, in);
        // In the fp32 recipe a remainder is the lower half of the FP32 weight. Only its owner has written it,
        // so the weights must be sent again.
        weights_changed(recipe_.compute == Format::F32 && name.find(".remainder") != name.npos);
    }
    const Setup& setup() const override { return setup_; }

private:
    const Device device_;
    const Setup& setup_ = device_.setup;
    const ModelConfig& config_ = setup_.config;
    const Recipe& recipe_ = setup_.recipe;
    const LinearFormats formats_ = linear_formats(setup_);  // of the operands of every linear layer
    const cudaStream_t cuda_ = device_.stream;
    Gemms gemms_;
    Peers peers_;
    State state_;
    Exchange exchange_;

    const bool caches_weights_;
    bool cache_is_valid_ = false;
    // Parameters; positions_ only where the architecture has them.
    const size_t embedding_, head_, final_norm_, positions_;
    std::vector<Block> blocks_;

    // Of the pass that runs: its shape, what is measured, and which micro-batch of which step it is.
    int64_t B_ = 0, T_ = 0, N_ = 0;
    QuantStats* stats_ = nullptr;  // one per Kind, on the device; null: not measured
    int64_t micro_batch_ = 0;
    const AdamW* adamw_ = nullptr;  // of a step, while it runs
    bool saves_outputs_ = false;    // --recompute off, in a pass that backward follows

    Pinned<int32_t> tokens_, targets_, order_;
    Pinned<EmbeddingChunk> chunks_;
    Pinned<Outcome> outcome_;
    Pinned<double> norms_;  // by bucket: norm of its gradients and those of all later buckets
    Pinned<double> loss_scale_;
    CudaGraph first_micro_batch_, later_micro_batch_;
    bool tuning_ = false;

    int64_t buckets() const { return static_cast<int64_t>(state_.buckets.size()); }
    int64_t batch_tokens() const { return setup_.B * setup_.T; }
    int64_t step_tokens() const { return setup_.accumulate * batch_tokens(); }
    Results* results() const { return device_.results(); }

    void start() {
        peers_.make_compute_wait();
        clear(results(), sizeof(Results), cuda_);
        state_.initialize();
        weights_changed(false);
    }
    // Two steps on made-up tokens, before the weights are set for good. In the first, CUDA loads every kernel
    // and each GEMM chooses its algorithm, on values like the real ones. The second is recorded.
    void warm_up() {
        std::vector<int32_t> tokens(step_tokens());
        const uint64_t V = static_cast<uint64_t>(config_.V);
        for (size_t i = 0; i < tokens.size(); i++) tokens[i] = static_cast<int32_t>(i * 2654435761u % V);
        gemms_.tune(tuning_ = true);
        step(tokens.data(), tokens.data(), {1, 0.0f});
        gemms_.tune(tuning_ = false);
        step(tokens.data(), tokens.data(), {2, 0.0f});
    }

    template <class T>
    T sum_of_ranks(const T& mine) const {
        if (!peers_.several()) return mine;
        T sum{};
        for (const T& theirs : setup_.group->all_gather(mine)) sum += theirs;
        return sum;
    }

    // --- Before a pass
    void check_and_pin(const int32_t* tokens, const int32_t* targets, int64_t n) {
        for (int64_t i = 0; i < n; i++)
            if (tokens[i] < 0 || tokens[i] >= config_.V || targets[i] < NO_TARGET || targets[i] >= config_.V)
                throw Error("A token lies outside the vocabulary of " + std::to_string(config_.V) +
                            "; choose --data and --model that belong together.");
        std::copy(tokens, tokens + n, tokens_.get());
        std::copy(targets, targets + n, targets_.get());
    }
    void upload(int64_t first, int64_t n) {
        copy(device_.work(Work::Tokens), tokens_.get() + first, n * 4, cuda_);
        copy(device_.work(Work::Targets), targets_.get() + first, n * 4, cuda_);
    }
    // Before a step, or a pass of its own, over `counted` targets. Makes the FP8 copies of the weights, if
    // they are cached and not up to date. With delayed scaling that takes their amaxes of the step.
    void begin(double counted, QuantStats* stats = nullptr) {
        *loss_scale_.get() = 1.0 / counted;
        copy(&results()->loss_scale, loss_scale_.get(), sizeof(double), cuda_);
        clear(&results()->outcome, sizeof(Outcome), cuda_);
        clear(&results()->checked_loss, sizeof(double), cuda_);
        stats_ = stats;
        if (state_.delayed()) {
            state_.clear_amaxes();
            cache_is_valid_ = false;
            exchange_.forget_gathered();
        }
        if (!caches_weights_ || (cache_is_valid_ && !stats)) return;
        exchange_.use_all();
        for (const Block& b : blocks_)
            for (const Linear* w : {&b.qkv, &b.attention_out, &b.gate_up, &b.down}) {
                take_weight_amax(*w);
                quantize(stored(state_.weight(w->param)), cached_operand(*w), stats_of(Kind::Weight), cuda_);
            }
        cache_is_valid_ = true;
    }
    void weights_changed(bool send) {  // send: as in Exchange
        cache_is_valid_ = false;
        exchange_.weights_changed(send);
    }

    // --- One micro-batch of the pinned tokens
    // Forward and backward are replayed from a CUDA graph, unless a launch may differ from the last one:
    // while GEMMs are tuned or quantization is measured, when buckets are sent or updated on the way, and
    // while an operand may lack its delayed scale. Meanwhile the host sorts the tokens for the gradient of
    // the embedding.
    void run(int64_t micro_batch) {
        micro_batch_ = micro_batch;
        set_shape(setup_.B, setup_.T);
        upload(micro_batch * N_, N_);
        const bool buckets_travel = peers_.several() || !setup_.keep_gradients;
        auto work = [&] { forward_and_backward(); };
        if (tuning_ || stats_ || buckets_travel || state_.some_without_history) work();
        else (assigns() ? first_micro_batch_ : later_micro_batch_).run(cuda_, work);
        embedding_backward();
    }
    // Whether gradients are assigned, not added: by the first micro-batch of a step. Several ranks sum what
    // each micro-batch gives right away, so every one assigns.
    bool assigns() const { return micro_batch_ == 0 || peers_.several(); }

    // Runs the embedding and all blocks. Leaves the final norm's input in final_input(), and its statistics.
    void forward(int64_t B, int64_t T) {
        set_shape(B, T);
        if (!state_.delayed()) state_.clear_amaxes();
        const Norm norm1 = norm1_of(blocks_[0]);
        exchange_.use(0, 1, nullptr);
        const View positions = config_.arch.rope ? View{} : state_.weight(positions_);
        embedding_forward(device_.work<int32_t>(Work::Tokens), state_.weight(embedding_), positions, T_,
                          residual_out(norm1), norm1, reads_saved(norm1),
                          amax_target(blocks_[0].qkv.x_scale), cuda_);
        measure_norm_input(norm1);
        for (int64_t l = 0; l < config_.L; l++) block_forward(l);
    }
    // Computes all gradients but those of the embeddings.
    void forward_and_backward() {
        saves_outputs_ = !setup_.recompute;
        forward(setup_.B, setup_.T);
        head(true);
        for (int64_t l = config_.L; l-- > 0;) block_backward(l);
        saves_outputs_ = false;
    }
    void embedding_backward() {
        const int64_t first = micro_batch_ * N_;
        const EmbeddingOrder order = embedding_order(tokens_.get() + first, N_, config_.V);
        const int64_t chunks = static_cast<int64_t>(order.chunks.size());
        int32_t* const device_order = device_.work<int32_t>(Work::EmbeddingOrder);
        EmbeddingChunk* const device_chunks = device_.work<EmbeddingChunk>(Work::EmbeddingChunks);
        std::copy(order.order.begin(), order.order.end(), order_.get() + first);
        std::copy(order.chunks.begin(), order.chunks.end(), chunks_.get() + first);
        copy(device_order, order_.get() + first, N_ * 4, cuda_);
        copy(device_chunks, chunks_.get() + first, chunks * int64_t(sizeof(EmbeddingChunk)), cuda_);
        begin_bucket(0);
        gpu::embedding_backward(residual_gradient(), device_order, device_chunks, chunks,
                                state_.gradient(embedding_), device_.work<float>(Work::EmbeddingPartials),
                                cuda_);
        if (!config_.arch.rope)
            positions_backward(residual_gradient(), T_, state_.gradient(positions_), cuda_);
        end_bucket(0);
    }

    // Where assigns(), GEMMs write gradients and do not add. All other kernels add, so their gradients are
    // cleared first. A tied embedding has the head's part already.
    void begin_bucket(int64_t number) const {
        exchange_.wait_for_bucket(number);
        const BucketRange& bucket = state_.buckets[number];
        for (size_t i = bucket.first; assigns() && i < bucket.last; i++) {
            const Param& p = state_.params[i];
            if (!p.role.linear && i != head_)
                clear(state_.gradient(i).codes, p.padded_size() * state_.gradient_bytes, cuda_);
        }
    }
    // Backward has a bucket's gradients and no longer needs its weights: the gradients are sent, and with
    // --gradients none the weights are updated.
    void end_bucket(int64_t bucket) {
        if (stats_) return state_.measure(bucket);
        const bool last = micro_batch_ + 1 == setup_.accumulate;
        if (peers_.several()) exchange_.add_bucket(bucket, micro_batch_ == 0, last);
        if (setup_.keep_gradients) return;
        peers_.make_compute_wait();
        check_loss(&results()->checked_loss);
        state_.update(*adamw_, bucket);
        copy(&norms_.get()[bucket], &results()->outcome.gradients.norm, sizeof(double), cuda_);
    }

    // *checked = the loss so far, or NaN if an FP8 code hides a value that is not finite.
    void check_loss(double* checked) {
        checked_loss(state_.scale(0), state_.number_of_scales(), &results()->outcome.loss, checked, cuda_);
    }
    const Outcome& finish() {
        copy(outcome_.get(), &results()->outcome, sizeof(Outcome), cuda_);
        device_.stream.wait();
        return *outcome_.get();
    }

    // --- One block: the comments are the rows of the --plan print-out, and its phases of backward
    void block_forward(int64_t l) {
        const Block& b = blocks_[l];
        const bool last = l + 1 == config_.L, gated = config_.arch.gated;
        const Norm norm1 = norm1_of(b), norm2 = norm2_of(b),
                   next = last ? final_norm() : norm1_of(blocks_[l + 1]);
        const View saved_qkv = saved(b, Saved::Qkv), saved_out = saved(b, Saved::Attention),
                   gate_up = saved(b, Saved::GateUp), branch = compute_view(Work::Branch, config_.C),
                   qkv = attention_view(saved_qkv, Work::Qkv),
                   out = attention_view(saved_out, Work::AttentionOutput);

        // norm 1; q, k, v projection: (N, C) -> (N, q_cols + 2 kv_cols). The norm is computed from its saved
        // input (in coat-saved from the residual stream) while its codes are made.
        linear_forward(b.qkv, norm(read(norm1)), qkv);
        // rotary positions
        if (config_.arch.rope) rope_forward(rope(), qkv, cuda_);
        save_attention(qkv, saved_qkv);
        // attention: causal, within each sequence of T tokens -> (N, q_cols)
        attention_forward(attention(), qkv.codes, out.codes, log_sum_exp(b), cuda_);
        save_attention(out, saved_out);
        take_amax(stored(saved_out), amax_target(b.attention_out.x_scale));
        // attention output projection: (N, q_cols) -> (N, C)
        linear_forward(b.attention_out, stored(saved_out), branch);
        // residual add; it saves the input of norm 2
        residual_forward(norm1, branch, norm2, amax_target(b.gate_up.x_scale));

        // norm 2; gate and up projection, saved as the recipe says (coat: in groups): (N, C) -> (N, 2F), or
        // (N, F) for GPT-2
        gate_up_forward(b, norm(read(norm2)), gate_up);
        // SiLU(gate) x up, or GELU, computed from what was saved, or from what was quantized then; down
        // projection: (N, F) -> (N, C)
        const bool from_saved = recipe_.forward_reads_saved || !gate_up.quant.fp8();
        const View input = from_saved ? gate_up : compute_view(Work::GateUp, gate_up.cols);
        linear_forward(b.down, activation(gated, input), branch);
        // residual add; it saves the input of the next block's norm 1, or of the final norm
        residual_forward(norm2, branch, next, last ? nullptr : amax_target(blocks_[l + 1].qkv.x_scale));
    }

    // The gradient of the residual stream goes through the block in place. norm_backward() leaves behind what
    // the next lines need: the amax of the gradient that it writes; and the statistics with which the norm's
    // output, an operand of wgrad, is recomputed. All norms share one buffer of statistics, so wgrad follows.
    void block_backward(int64_t l) {
        const Block& b = blocks_[l];
        const bool gated = config_.arch.gated, rotated = config_.arch.rope;
        const Norm norm1 = norm1_of(b), norm2 = norm2_of(b);
        const View g = residual_gradient(), gate_up = saved(b, Saved::GateUp),
                   saved_out = saved(b, Saved::Attention), dx = compute_view(Work::Branch, config_.C);

        // down projection: wgrad, then dgrad: dact (N, F), the gradient of the activation's output
        begin_bucket(b.down.bucket);
        Operand g8 = gradient_operand(b.down, stored(g), nullptr);
        wgrad(b.down, g8, activation(gated, gate_up));
        const View dact = compute_view(Work::ActivationGradient, config_.F);
        dgrad(b.down, g8, dact);
        end_bucket(b.down.bucket);

        // activation: its gradient (N, 2F) is stored only as an operand. In place, it overwrites the saved
        // gate and up, which nobody reads later: a thread loads its elements before it stores their codes
        begin_bucket(b.gate_up.bucket);
        const bool in_place = gate_up_gradient_in_place(setup_);
        g8 = gradient_operand(b.gate_up, activation_backward(gated, gate_up, dact),
                              amax_target(b.gate_up.g_scale), in_place ? gate_up.codes : nullptr);
        // gate and up projection, dgrad; norm 2
        dgrad(b.gate_up, g8, dx);
        residual_backward(norm2, b.norm2, dx, g, amax_target(b.attention_out.g_scale));
        // gate and up projection, wgrad: after norm 2, whose statistics recompute the norm's output
        wgrad(b.gate_up, g8, norm(norm2));
        end_bucket(b.gate_up.bucket);

        // attention output projection: wgrad, then dgrad
        begin_bucket(b.attention_out.bucket);
        g8 = gradient_operand(b.attention_out, stored(g), nullptr);
        wgrad(b.attention_out, g8, stored(saved_out));
        const View dout = compute_view(Work::Branch, config_.q_cols());
        dgrad(b.attention_out, g8, dout);
        end_bucket(b.attention_out.bucket);

        // attention; the memory of gate and up is free now. If dqkv fits there, the plan gives it no place of
        // its own (0 bytes)
        begin_bucket(b.qkv.bucket);
        const View qkv = load_attention(saved(b, Saved::Qkv), Work::Qkv),
                   out = load_attention(saved_out, Work::AttentionOutput);
        const bool reuse = device_.place(Work::QkvGradient).bytes == 0;
        const View dqkv = compute_view(reuse ? gate_up.codes : device_.work(Work::QkvGradient), N_,
                                       config_.qkv_cols());
        attention_backward(attention(), qkv.codes, out.codes, log_sum_exp(b), dout.codes, dqkv.codes,
                           device_.work(Work::AttentionScratch), cuda_);
        // rotary positions
        TensorScale* const dqkv_amax = amax_target(b.qkv.g_scale);
        if (rotated) rope_backward(rope(), dqkv, dqkv_amax, cuda_);
        // q, k, v projection, dgrad; norm 1
        g8 = gradient_operand(b.qkv, stored(dqkv), rotated ? nullptr : dqkv_amax);
        dgrad(b.qkv, g8, dx);
        residual_backward(norm1, b.norm1, dx, g, l > 0 ? amax_target(blocks_[l - 1].down.g_scale) : nullptr);
        // q, k, v projection, wgrad: after norm 1
        wgrad(b.qkv, g8, norm(norm1));
        end_bucket(b.qkv.bucket);
    }

    // --- The three GEMMs of a linear layer. x8, w8 and g8 are operands as the GEMM reads them: FP8 codes, or
    // BF16 and FP32 in recipes without FP8.
    void linear_forward(const Linear& w, const Lazy& x, const View& y) {
        const Operand x8 = input_operand(w, x, Gemm::Fprop), w8 = weight_operand(w, Gemm::Fprop);
        gemms_.run(Gemm::Fprop, x8, w8, gemm_rows(y), false, bias(w), cuda_);
    }
    void dgrad(const Linear& w, const Operand& g8, const View& dx) {
        gemms_.run(Gemm::Dgrad, g8, weight_operand(w, Gemm::Dgrad), dx, false, nullptr, cuda_);
    }
    void wgrad(const Linear& w, const Operand& g8, const Lazy& x) {
        gemms_.run(Gemm::Wgrad, g8, input_operand(w, x, Gemm::Wgrad), state_.gradient(w.param), !assigns(),
                   nullptr, cuda_);
    }

    // The widest tensor of a layer. If it is saved in groups, its BF16 form exists for `step` tokens at a
    // time, or for all of them if the activation reads it (coat-saved). While it goes to groups, the amax of
    // the activation's output is taken.
    void gate_up_forward(const Block& b, const Lazy& x, const View& gate_up) {
        const bool gated = config_.arch.gated;
        TensorScale* const act = amax_target(b.down.x_scale);
        if (!gate_up.quant.fp8()) {
            linear_forward(b.gate_up, x, gate_up);
            return take_amax(activation(gated, gate_up), act);
        }
        const Operand x8 = input_operand(b.gate_up, x, Gemm::Fprop),
                      w8 = weight_operand(b.gate_up, Gemm::Fprop);
        // 1x128 scales are laid out for the GEMM of all rows: no part of them can be used alone.
        const int64_t step = formats_.x.granularity == PER_TENSOR ? GATE_UP_TOKENS : N_;
        const View whole = compute_view(Work::GateUp, gate_up.cols);  // all of it if the activation reads it
        for (int64_t first = 0; first < N_; first += step) {
            const int64_t n = std::min(step, N_ - first);
            const View part = rows(whole, recipe_.forward_reads_saved ? 0 : first, n);
            gemms_.run(Gemm::Fprop, {rows(x8.view, first, gemm_rows(part).rows)}, w8, gemm_rows(part), false,
                       bias(b.gate_up), cuda_);
            quantize_gate_up(gated, part, rows(gate_up, first, n), recipe_.forward_reads_saved, act,
                             stats_of(Kind::ActivationInput), cuda_);
        }
    }

    // --- Operands: a tensor in the format that a GEMM reads
    // These functions launch the kernels that make it. A dense tensor that is stored in the wanted format is
    // used in place. FP8 codes go to `codes` and, transposed, to `transposed`; either may be null.
    Operand make_operand(const Lazy& x, const Quant& q, void* codes, void* transposed, TensorScale* scale,
                         Kind kind) {
        if (x.op == LazyOp::Stored && !q.fp8() && !x.input.quant.fp8()) return {x.input};
        const Operand out = describe(q.fp8() && !transposed ? round_up(x.rows, 16) : x.rows, x.cols, q, codes,
                                     transposed, scale);
        quantize(x, out, stats_of(kind), cuda_);
        return out;
    }
    // A per-tensor scale is in its TensorScale; other scales lie right behind the codes.
    static Operand describe(int64_t rows, int64_t cols, const Quant& q, void* codes, void* transposed,
                            TensorScale* scale) {
        if (q.granularity == PER_TENSOR) return {{codes, scale, rows, cols, q}, transposed};
        auto behind = [&](void* p) {
            return p ? static_cast<uint8_t*>(p) + q.operand_code_bytes(rows, cols) : nullptr;
        };
        return {{codes, behind(codes), rows, cols, q}, transposed, behind(transposed), scale};
    }
    // FP8 GEMMs want a multiple of 16 rows, which a prompt may not have: they read and write a few rows more,
    // whose values are undefined and never used.
    View gemm_rows(View v) const { return v.rows = formats_.x.fp8() ? round_up(v.rows, 16) : v.rows, v; }

    // The input of a linear layer: fprop reduces over its columns, wgrad over its rows. With --recompute off
    // the forward pass saves what wgrad will read: FP8 codes transposed, or dense values.
    Operand input_operand(const Linear& w, const Lazy& x, Gemm use) {
        const Quant& q = formats_.x;
        void* const kept = saves_outputs_ ? w.saved_x : nullptr;
        if (kept && use == Gemm::Wgrad) return describe(x.rows, x.cols, q, kept, kept, w.x_scale);
        const bool of_down = x.op == LazyOp::Activation;
        void* codes = device_.work(of_down ? Work::ActivationOperand : Work::InputOperand);
        void* transposed = nullptr;
        if (kept) (q.fp8() ? transposed : codes) = kept;
        else if (q.fp8() && use == Gemm::Wgrad) std::swap(codes, transposed);
        return make_operand(x, q, codes, transposed, w.x_scale, Kind::LinearInput);
    }
    // The weight: fprop reduces over its columns, dgrad over its rows.
    Operand weight_operand(const Linear& w, Gemm use) {
        if (formats_.w.fp8() && w.cached_weight) return cached_operand(w);
        const int64_t next_in_backward = w.bucket > 1 ? w.bucket - 1 : Exchange::NONE;
        const int64_t next = use == Gemm::Dgrad ? next_in_backward : w.bucket + 1;
        exchange_.use(w.bucket, next, stats_of(Kind::Weight));
        void* codes = device_.work(Work::WeightOperand);
        void* transposed = nullptr;
        const View whole = state_.weight(w.param);
        if (whole.quant.fp8() && use != Gemm::Dgrad) return {whole};  // gathered as codes
        if (use == Gemm::Dgrad) std::swap(codes, transposed);
        if (whole.quant.fp8()) {
            transpose_codes(whole, transposed, cuda_);
            return describe(whole.rows, whole.cols, whole.quant, nullptr, transposed, w.w_scale);
        }
        take_weight_amax(w);
        return make_operand(stored(whole), formats_.w, codes, transposed, w.w_scale, Kind::Weight);
    }
    Operand cached_operand(const Linear& w) const {
        const int64_t rows = state_.params[w.param].rows, cols = state_.params[w.param].cols;
        return describe(rows, cols, formats_.w, w.cached_weight,
                        w.cached_weight + formats_.w.operand_bytes(rows, cols), w.w_scale);
    }
    // The gradient of the output, for dgrad (which reduces over its columns) and wgrad (over its rows); and
    // the gradient of the bias. amax: where the amax is still to be taken; null if it has been. A bias sums
    // the unrounded gradient of an FP8 operand, in a pass that takes the amax too; it sums the stored values
    // of any other. place: of the codes, if they do not go to Work::GradientOperand.
    Operand gradient_operand(const Linear& w, const Lazy& g, TensorScale* amax, void* place = nullptr) {
        const bool fp8 = formats_.g.fp8();
        void* const codes = place ? place : device_.work(Work::GradientOperand);
        void* const transposed = fp8 ? device_.work(Work::GradientOperandTransposed) : nullptr;
        auto bias_gradient = [&](const Lazy& g, Format rounding, TensorScale* amax) {
            column_sums(g, rounding, state_.gradient(w.param + 1), device_.work<float>(Work::ColumnPartials),
                        amax, cuda_);
        };
        if (fp8 && w.biased) bias_gradient(g, Format::F32, amax);
        else take_amax(g, amax);
        const Operand g8 = make_operand(g, formats_.g, codes, transposed, w.g_scale, Kind::Gradient);
        if (!fp8 && w.biased) bias_gradient(stored(g8.view), recipe_.compute, nullptr);
        return g8;
    }

    // --- Amaxes: who takes them
    // Where the producer of a tensor must put its amax; null if nobody needs it. Per-tensor scaling just in
    // time needs the amax before the codes. Delayed scaling needs it only while a history is empty. The
    // operands x, w and g are all per tensor, or none is (GEMM_SCALES in plan.cpp).
    TensorScale* amax_target(TensorScale* scale) const {
        const bool just_in_time = !state_.delayed() || state_.some_without_history;
        return formats_.x.fp8() && formats_.x.granularity == PER_TENSOR && just_in_time ? scale : nullptr;
    }
    void take_amax(const Lazy& x, TensorScale* scale) const {
        if (scale) amax(x, scale, cuda_);
    }
    // adamw() leaves the amax of a weight in scale(param). Delayed scaling reads another TensorScale, so it
    // takes the amax here.
    void take_weight_amax(const Linear& w) const {
        if (state_.delayed()) take_amax(stored(state_.weight(w.param)), amax_target(w.w_scale));
    }

    // --- Residual stream and attention
    // The residual stream as the next residual_add reads it, (N, C), by the norm beside it: in the compute
    // dtype where the norm's input is in groups; otherwise the two are one tensor.
    View residual(const Norm& n) const {
        return n.in.quant.fp8() ? compute_view(Work::Residual, config_.C) : n.in;
    }
    // Whether the forward pass computes the norm from what is saved, and the norm as it computes it.
    bool reads_saved(const Norm& n) const { return recipe_.forward_reads_saved || !n.in.quant.fp8(); }
    Norm read(Norm n) const {
        if (!reads_saved(n)) n.in = residual(n);
        return n;
    }
    View residual_out(const Norm& n) const { return n.in.quant.fp8() ? residual(n) : View{}; }
    // The input of `next` is saved; the amax of its output goes to y_amax.
    void residual_forward(const Norm& before, const View& branch, const Norm& next, TensorScale* y_amax) {
        residual_add(residual(before), branch, residual_out(next), next, reads_saved(next), y_amax, cuda_);
        measure_norm_input(next);
    }
    void measure_norm_input(const Norm& n) const {
        if (n.in.quant.fp8()) measure_groups(stored(residual(n)), stats_of(Kind::NormInput), cuda_);
    }
    // g += the gradient of the norm's input; g is no tensor at the head, where the residual stream ends.
    void residual_backward(const Norm& n, size_t weight, const View& dy, const View& g, TensorScale* g_amax) {
        norm_backward(n, dy, g, residual_gradient(), g_amax, state_.gradient(weight),
                      n.rms ? View{} : state_.gradient(weight + 1), device_.work<float>(Work::NormPartials),
                      cuda_);
    }

    // Attention computes in the compute dtype. Where its inputs and output are saved in groups, it computes
    // with what the groups hold: so the saved log-sum-exp belongs to what backward reads.
    View attention_view(const View& saved, Work work) const {
        return saved.quant.fp8() ? compute_view(work, saved.cols) : saved;
    }
    void save_attention(const View& x, const View& saved) {
        if (saved.quant.fp8()) quantize_and_dequantize(x, saved, stats_of(Kind::Attention), cuda_);
    }
    View load_attention(const View& saved, Work work) {
        const View x = attention_view(saved, work);
        if (saved.quant.fp8()) dequantize(saved, x, cuda_);
        return x;
    }

    // --- Head
    // Logits (n, padded_V) of the tokens from `first` on.
    View head_logits(int64_t first, int64_t n) {
        const View logits = compute_view(device_.work(Work::Logits), n, config_.padded_V());
        Norm part = final_norm();
        part.in = rows(part.in, first, n);
        part.stats += first;
        const Operand y = make_operand(norm(part), Quant{recipe_.compute}, device_.work(Work::FinalNorm),
                                       nullptr, nullptr, Kind::LinearInput);
        gemms_.run(Gemm::Fprop, y, {state_.weight(head_)}, logits, false, nullptr, cuda_);
        return logits;
    }
    // Results::outcome.loss += the sum of the micro-batch's losses * Results::loss_scale; and in backward the
    // gradient of the final norm's input. Logits exist for HEAD_TOKENS tokens at a time; their gradients
    // take their place. The head's gradient is summed in FP32 where a BF16 sum would be rounded too often
    // (plan.h, head_sum_apart).
    void head(bool backward) {
        const View dy = compute_view(Work::Branch, config_.C), gradient = state_.gradient(head_);
        const bool in_fp32 = head_sum_apart(gradient.quant.format, N_);
        const View wide{device_.work(Work::HeadGradient), nullptr, gradient.rows, gradient.cols, Q_F32},
            sum = in_fp32 ? wide : gradient;
        const int32_t* const targets = device_.work<int32_t>(Work::Targets);
        float* const losses = device_.work<float>(Work::Losses);
        exchange_.use(exchange_.head(), backward ? exchange_.head() - 1 : Exchange::NONE,
                      stats_of(Kind::Weight));
        if (backward) exchange_.wait_for_buckets();
        if (backward && in_fp32 && !assigns()) dequantize(gradient, sum, cuda_);  // BF16 to FP32
        for (int64_t first = 0; first < N_; first += HEAD_TOKENS) {
            const int64_t n = std::min(HEAD_TOKENS, N_ - first);
            const View logits = head_logits(first, n),
                       y = compute_view(device_.work(Work::FinalNorm), n, config_.C);
            cross_entropy(logits, config_.V, targets + first, backward ? &results()->loss_scale : nullptr,
                          losses + first, cuda_);
            if (!backward) continue;
            gemms_.run(Gemm::Wgrad, {logits}, {y}, sum, !(assigns() && first == 0), nullptr, cuda_);
            gemms_.run(Gemm::Dgrad, {logits}, {state_.weight(head_)}, rows(dy, first, n), false, nullptr,
                       cuda_);
        }
        loss_sum(losses, N_, &results()->loss_scale, &results()->outcome.loss, cuda_);
        if (!backward) return;
        if (in_fp32) quantize(stored(sum), {gradient}, nullptr, cuda_);  // FP32 to BF16
        begin_bucket(buckets() - 1);  // clears gradients of the final norm; a GEMM has written the head's
        residual_backward(final_norm(), final_norm_, dy, View{}, amax_target(blocks_.back().down.g_scale));
        end_bucket(buckets() - 1);
    }

    // --- Views
    void set_shape(int64_t B, int64_t T) { B_ = B, T_ = T, N_ = B * T; }
    View saved(const Block& b, Saved which) const {  // the rows of this batch
        const View& v = b.saved[static_cast<int>(which)];
        return {v.codes, v.scales, N_, v.cols, v.quant};
    }
    float* log_sum_exp(const Block& b) const {
        return static_cast<float*>(saved(b, Saved::LogSumExp).codes);
    }
    View compute_view(void* data, int64_t n, int64_t cols) const {
        return {data, nullptr, n, cols, Quant{recipe_.compute}};
    }
    View compute_view(Work w, int64_t cols) const { return compute_view(device_.work(w), N_, cols); }
    View final_input() const {
        return compute_view(device_.at(device_.layout.final_norm_input.offset), N_, config_.C);
    }
    // Backward reads the final norm's input once, to write this over it.
    View residual_gradient() const { return final_input(); }
    Norm norm_of(size_t weight, const View& in) const {
        const bool rms = config_.arch.rms;
        return {in, state_.weight(weight).codes, rms ? nullptr : state_.weight(weight + 1).codes,
                device_.work<float2>(Work::NormStatistics), rms, config_.norm_eps};
    }
    Norm norm1_of(const Block& b) const { return norm_of(b.norm1, saved(b, Saved::Norm1Input)); }
    Norm norm2_of(const Block& b) const { return norm_of(b.norm2, saved(b, Saved::Norm2Input)); }
    Norm final_norm() const { return norm_of(final_norm_, final_input()); }
    const void* bias(const Linear& w) const {
        return w.biased ? state_.weight(w.param + 1).codes : nullptr;
    }
    Rope rope() const {
        return {device_.work<float2>(Work::RopeTable), T_, config_.HS(),
                config_.q_cols() + config_.kv_cols()};
    }
    AttentionShape attention() const { return attention_shape(config_, B_, T_, recipe_.compute); }
    QuantStats* stats_of(Kind k) const { return stats_ ? stats_ + static_cast<int>(k) : nullptr; }

    // --- Construction
    size_t param(const std::string& name) const { return param_of(state_.params, name); }
    // cache: where the FP8 weights of its linear layers may lie, or null; moved on for the next block.
    Block make_block(int64_t l, uint8_t*& cache) const {
        Block b{};
        const GpuLayout& layout = device_.layout;
        const std::vector<SavedTensor> table = saved_per_layer(setup_);
        for (size_t i = 0; i < table.size(); i++) {
            const int64_t N = layout.tokens, cols = table[i].cols,
                          offset = l * layout.layer_bytes + layout.saved_codes[i].offset;
            uint8_t* const codes = device_.at(layout.saved.offset + offset);
            b.saved[static_cast<int>(table[i].which)] = {codes, codes + table[i].quant.code_bytes(N, cols), N,
                                                         cols, table[i].quant};
        }
        const std::string name = "layers." + std::to_string(l) + ".";
        int64_t linears = 0;
        auto linear = [&](const char* of, void* saved_x) -> Linear {
            const size_t i = param(name + of);
            const int64_t out = state_.params[i].rows, in = state_.params[i].cols, number = linears++;
            uint8_t* const cached = cache;
            if (cache) cache += formats_.w.operand_bytes(out, in) + formats_.w.operand_bytes(in, out);
            return {i, number == 0 ? config_.arch.qkv_bias : config_.arch.bias, state_.params[i].bucket,
                    state_.operand_scales(l, LinearOperand::X) + number, state_.weight_scale(i),
                    state_.operand_scales(l, LinearOperand::G) + number, cached, saved_x};
        };
        b.norm1 = param(name + "norm1.weight"), b.norm2 = param(name + "norm2.weight");
        b.qkv = linear("qkv", b.saved[static_cast<int>(Saved::Norm1Output)].codes);
        b.attention_out = linear("attention_out", nullptr);
        b.gate_up = linear("gate_up", b.saved[static_cast<int>(Saved::Norm2Output)].codes);
        b.down = linear("down", b.saved[static_cast<int>(Saved::ActivationOutput)].codes);
        return b;
    }
};

// -----------------------------------------------------------------------------------------------------------
// Whether this GPU can run a setup

int capability() {
    return 10 * device_attribute(cudaDevAttrComputeCapabilityMajor) +
           device_attribute(cudaDevAttrComputeCapabilityMinor);
}

// Device memory that CUDA and cuBLAS take when kernels are first launched.
constexpr int64_t LOADED_LATER = 256 << 20;

int64_t needed_memory(const Setup& s, const GpuFacts& facts) {
    const int64_t allocated = gpu_layout(s, facts).total;
    return allocated + LOADED_LATER + page_tables(s.ranks, allocated);
}

void require_memory(const Setup& s, const GpuFacts& facts, int64_t free) {
    if (needed_memory(s, facts) <= free) return;
    Setup smaller = s;
    int64_t fitting = 0, too_large = s.B;  // --batch
    while (too_large - fitting > 1) {
        smaller.B = (fitting + too_large) / 2;
        (needed_memory(smaller, facts) <= free ? fitting : too_large) = smaller.B;
    }
    throw Error("This run needs " + std::to_string(needed_memory(s, facts) >> 20) +
                " MiB of GPU memory, but " + std::to_string(free >> 20) + " MiB are free; " +
                (fitting ? "the largest --batch that fits is " + std::to_string(fitting)
                         : "not even --batch 1 fits: choose a smaller --model or --seq") +
                ".");
}

GpuFacts facts_for(const Setup& s) {
    GpuFacts facts;
    facts.multiprocessors = multiprocessors();
    size_t free_bytes = 0, total = 0;
    check(cudaMemGetInfo(&free_bytes, &total), "Asking for the GPU's memory failed");
    const int64_t free = static_cast<int64_t>(free_bytes);
    require_memory(s, facts, free);
    facts.cache_fp8_weights = caches_weights(s);
    if (needed_memory(s, facts) > free) facts.cache_fp8_weights = false;
    return facts;
}

// The setup as this GPU runs it. Error if a kernel for it is missing.
Setup on_this_gpu(Setup s) {
    const bool fp8_gemm = capability() >= FP8_CAPABILITY;
    if (!fp8_gemm && s.recipe.x.fp8())
        std::fprintf(stderr,
                     "This GPU has no FP8 GEMMs, which begin with compute capability 8.9: linear "
                     "layers run in %s, on FP8 storage.\n",
                     info(s.recipe.compute).name);
    s.recipe = recipe_on_gpu(s.recipe, fp8_gemm);
    for (const std::string& reason : {why_unsupported(s.optimizer), why_unsupported(s.recipe, capability())})
        if (!reason.empty()) throw Error(reason);
    return s;
}

}  // namespace
}  // namespace coat

std::string coat::why_no_gpu(int gpu) {
    GpuFound found{};
    cudaDriverGetVersion(&found.driver);
    cudaRuntimeGetVersion(&found.runtime);
    const cudaError_t error = cudaGetDeviceCount(&found.gpus);
    cudaGetLastError();  // clear it: nothing has failed
    found.driver_too_old = error == cudaErrorInsufficientDriver;
    if (error == cudaErrorNoDevice) found.gpus = 0;
    else if (error != cudaSuccess) found.error = cudaGetErrorString(error);
    const bool usable = found.driver > 0 && error == cudaSuccess && found.gpus > 0;
    if (usable) cudaSetDevice(std::min(gpu, found.gpus - 1));  // another would get a context, too
    if (usable) found.capability = capability(), found.kernels_fit = kernels_fit();
    return why_unsupported(found);
}

std::unique_ptr<coat::Model> coat::make_gpu(const Setup& setup) {
    int local = setup.group ? setup.group->local() : 0;
    const std::string missing = why_no_gpu(local);
    if (!missing.empty()) throw Error("--device gpu cannot be used: " + missing + ".");
    int gpus = 0;
    gpu::check(cudaGetDeviceCount(&gpus), "Counting the GPUs failed");
    if (std::getenv("COAT_SHARE_GPU")) local %= gpus;  // slow: for tests of several ranks on one GPU
    if (local >= gpus)
        throw Error("Rank " + std::to_string(setup.rank) + " needs a GPU of its own, but it sees only " +
                    std::to_string(gpus) + "; use at most --ranks " + std::to_string(gpus) +
                    ", or let the launcher show every process all GPUs (CUDA_VISIBLE_DEVICES).");
    gpu::check(cudaSetDevice(local), "Choosing the GPU failed");
    for (int theirs : setup.group ? setup.group->all_gather(capability()) : std::vector<int>())
        if (theirs != capability())
            throw Error("The GPUs of the ranks differ in compute capability; use GPUs of one kind.");
    const Setup here = on_this_gpu(setup);
    return std::make_unique<GpuModel>(here, facts_for(here));
}
