// model.cu - the whole training step on the GPU: Llama and GPT-2, forward, backward and update, in the precision flow of any recipe.
//
// It mirrors reference.cpp's Network and Reference, with the kernels of coat.cuh, attention.cuh and gemm.cuh. Three rules:
//   - Everything lies in one allocation, laid out by plan.cpp. Nothing is allocated after start-up; within a step the host never waits.
//   - Saved for backward is what coat.h's saved_per_layer() says; what elementwise work can compute again goes straight into the operands
//     (FP8 codes, transposed where a weight's gradient wants them) of the product at hand.
//   - The residual stream's buffer holds its gradient on the way back, and spent activations make room for gradients (plan.h).
#include <algorithm>
#include <cstdio>
#include <functional>

#include "gpu/attention.cuh"
#include "gpu/gemm.cuh"
#include "plan.h"

namespace coat {
namespace {

using namespace gpu;

// ---------------------------------------------------------------------------------------------------------------------
// What CUDA hands out, given back at the end

class Stream {
public:
    Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "Creating a CUDA stream failed"); }
    ~Stream() { cudaStreamDestroy(stream_); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;
    operator cudaStream_t() const { return stream_; }
    void wait() const { check(cudaStreamSynchronize(stream_), "The GPU failed"); }

private:
    cudaStream_t stream_ = nullptr;
};

class Arena {
public:
    Arena(const Setup& s, const GpuFacts& facts) : layout(gpu_layout(s, facts)) {
        check(cudaMalloc(&base_, layout.total), "Allocating the GPU's memory failed");
    }
    ~Arena() { cudaFree(base_); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    const GpuLayout layout;
    uint8_t* at(int64_t offset) const { return base_ + offset; }
    template <class T = void>
    T* work(Work w) const {
        return reinterpret_cast<T*>(base_ + place(w).offset);
    }
    const Place& place(Work w) const { return layout.work[static_cast<int>(w)]; }

private:
    uint8_t* base_ = nullptr;
};

// Work that is launched again and again with the same arguments: recorded the first time, so that hundreds of kernels then start as one.
class Recording {
public:
    Recording() = default;
    ~Recording() {
        if (graph_) cudaGraphExecDestroy(graph_);  // of none it would leave an error behind, for whoever asks next
    }
    Recording(const Recording&) = delete;
    Recording& operator=(const Recording&) = delete;

    template <class Work>
    void run(cudaStream_t s, Work work) {
        if (!graph_) record(s, work);
        check(cudaGraphLaunch(graph_, s), "Launching a CUDA graph failed");
    }

private:
    cudaGraphExec_t graph_ = nullptr;

    struct Capture {  // ends with its scope, also where an exception leaves it
        const cudaStream_t stream;
        bool open = true;
        cudaGraph_t graph = nullptr;

        explicit Capture(cudaStream_t s) : stream(s) {
            check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "Recording a CUDA graph failed");
        }
        ~Capture() {
            if (open) cudaStreamEndCapture(stream, &graph), cudaGetLastError();  // an exception is on its way already
            if (graph) cudaGraphDestroy(graph);
        }
        void end() {
            open = false;
            check(cudaStreamEndCapture(stream, &graph), "Recording a CUDA graph failed");
        }
    };

    template <class Work>
    void record(cudaStream_t s, Work work) {
        Capture capture(s);
        work();
        capture.end();
        check(cudaGraphInstantiate(&graph_, capture.graph, 0), "Making a CUDA graph failed");
    }
};

template <class T>
class Pinned {
public:
    explicit Pinned(int64_t n) { check(cudaMallocHost(&data_, n * sizeof(T)), "Allocating pinned memory failed"); }
    ~Pinned() { cudaFreeHost(data_); }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;
    T* get() const { return data_; }
    T* operator->() const { return data_; }

private:
    T* data_ = nullptr;
};

void clear(void* p, int64_t bytes, cudaStream_t s) { check(cudaMemsetAsync(p, 0, bytes, s), "Clearing memory failed"); }
void copy(void* to, const void* from, int64_t bytes, cudaStream_t s) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, s), "Copying memory failed");
}

// What a step finds out, on the device.
struct Outcome {
    double loss;
    GradientState gradients;
    uint32_t without_scale;  // operands that have no delayed scale yet
};
struct Results {
    Outcome outcome;
    double checked_loss;  // NaN if FP8 codes have hidden a number that is not finite
    QuantStats stats[static_cast<int>(Kind::Count)];
    double partials[GRADIENT_PARTIALS];
};

// The rows [first, first + n) of a view that is in compute dtype, in groups or of one scale, or all rows of any.
View rows(const View& v, int64_t first, int64_t n) {
    uint8_t* scales = static_cast<uint8_t*>(v.scales);
    const bool grouped = v.quant.fp8() && v.quant.granularity.rows == 1;
    return {static_cast<uint8_t*>(v.codes) + v.quant.code_bytes(first, v.cols),
            grouped ? scales + first * v.quant.scale_cols(v.cols) * info(v.quant.scale).bytes : v.scales, n, v.cols, v.quant};
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights, gradients and moments, by parameter

constexpr int64_t LINEARS = 4;  // of a layer

class State {
public:
    const Setup& setup;
    const std::vector<Param> params;
    const std::vector<BucketRange> buckets;
    const Quant stream, gradient_quant;
    bool some_without_scale = false;  // operands may lack their delayed scale: they are scaled just in time

    State(const Setup& s, const Arena& arena, cudaStream_t cuda)
        : setup(s), params(parameters(s.config)), buckets(bucket_ranges(params)), stream{s.recipe.compute}, gradient_quant{gradient_format(s)},
          arena_(arena), cuda_(cuda),
          weights_{arena.at(arena.layout.weights.offset), remainders(), stream.format} {
        std::vector<Segment> table;
        for (size_t i = 0; i < params.size(); i++) table.push_back(segment(i));
        copy(segments(), table.data(), static_cast<int64_t>(table.size() * sizeof(Segment)), cuda_);
        check(cudaStreamSynchronize(cuda_), "Copying the table of parameters failed");
        static_assert(sizeof(Segment) <= 128, "plan.cpp counts 128 bytes a parameter");
    }

    size_t index(const std::string& name) const {
        for (size_t i = 0; i < params.size(); i++)
            if (params[i].name == name) return i;
        throw Error("The model has no parameter " + name + ".");
    }
    View weight(size_t i) const {
        return in_stream(static_cast<uint8_t*>(weights_.values) + params[i].offset * info(stream.format).bytes, params[i]);
    }
    View gradient(size_t i) const {
        return {arena_.at(arena_.layout.gradients[i]), nullptr, params[i].rows, params[i].cols, gradient_quant};
    }
    // Of the weights, by parameter; and behind them those of the layers' operands, four linear layers each.
    TensorScale* scale(size_t i) const { return arena_.work<TensorScale>(Work::Scales) + i; }
    TensorScale* operand_scales(int64_t layer, LinearOperand o) const {
        return scale(params.size()) + (static_cast<int>(o) * setup.config.L + layer) * LINEARS;
    }
    int64_t operand_scales() const { return OPERANDS * LINEARS * setup.config.L; }
    bool delayed() const { return setup.recipe.scaling == Scaling::Delayed; }

    // Moments start at zero: max 0 of every group, and k 1 as an all-zero group has it.
    void initialize() {
        const GpuLayout& at = arena_.layout;
        clear(arena_.at(at.moments.offset), at.moments.bytes + at.scales.bytes, cuda_);
        clear(arena_.at(at.delayed.offset), at.delayed.bytes, cuda_);
        clear(scale(0), (static_cast<int64_t>(params.size()) + operand_scales()) * static_cast<int64_t>(sizeof(TensorScale)), cuda_);
        expect_missing_scales();
        const std::vector<float> ones(static_cast<size_t>(most_groups()), 1.0f);
        for (size_t i = 0; i < params.size(); i++) {
            gpu::initialize(weights_, params[i], i, live_elements(setup.config, params[i]), setup.seed, cuda_);
            refresh_scale(i);
            for (const MomentView& m : {moment(i, false), moment(i, true)})
                if (m.k) copy(m.k, ones.data(), params[i].groups() * 4, cuda_);
        }
        check(cudaStreamSynchronize(cuda_), "Initializing the weights failed");
    }

    // A step's amaxes: none so far; and what they make of the next step's scales.
    void forget_amaxes() {
        check(cudaMemset2DAsync(&scale(params.size())->amax, sizeof(TensorScale), 0, sizeof(float), operand_scales(), cuda_),
              "Clearing amaxes failed");
    }
    void expect_missing_scales() { some_without_scale = delayed() && linear_formats(setup).x.fp8(); }
    void end_delayed_step(Results* results) {
        for (LinearOperand o : {LinearOperand::X, LinearOperand::W, LinearOperand::G})
            gpu::end_delayed_step(operand_scales(0, o), LINEARS * setup.config.L, history(0, o), setup.recipe.history, setup.recipe.margin,
                                  quant_of(setup.recipe, o).format, &results->outcome.gradients, &results->outcome.without_scale, cuda_);
    }

    void update(const AdamW& a, Results* results) { update({0, params.size(), 0, total()}, a, {a.clip}, results); }
    void update_bucket(int64_t bucket, const AdamW& a, Results* results) { update(buckets[bucket], a, {a.clip, norm_correction_at(a, bucket)}, results); }

    void measure(const BucketRange& bucket, QuantStats* stats) const {
        for (size_t i = bucket.first; i < bucket.last; i++)
            measure_moments(setup.optimizer, segment(i), gradient(i).codes, gradient_quant.format, stats + static_cast<int>(Kind::Moment1),
                            stats + static_cast<int>(Kind::Moment2), cuda_);
    }
    void expansion_factors(QuantReport& report) const {
        for (size_t i = 0; i < params.size(); i++) {
            append(moment(i, false).k, params[i].groups(), report.k_m);
            append(moment(i, true).k, params[i].groups(), report.k_v);
        }
    }

    void read(const std::string& name, void* out) const {
        const auto [i, suffix] = parse(name);
        if (suffix == ".gradient" && setup.keep_gradients) return read_gradient(i, static_cast<float*>(out));
        if (is_master(suffix)) return read_half(i, suffix == ".remainder", static_cast<uint16_t*>(out));
        const auto [data, bytes] = find(name, i, suffix);
        copy(out, data, bytes, cuda_);
        check(cudaStreamSynchronize(cuda_), "Reading a tensor failed");
    }

    void write(const std::string& name, const void* in) {
        const auto [i, suffix] = parse(name);
        if (is_master(suffix)) {
            write_half(i, suffix == ".remainder", static_cast<const uint16_t*>(in));
        } else {
            const auto [data, bytes] = find(name, i, suffix);
            copy(data, in, bytes, cuda_);
        }
        expect_missing_scales();
        refresh_scale(i);
        check(cudaStreamSynchronize(cuda_), "Writing a tensor failed");
    }

private:
    const Arena& arena_;
    cudaStream_t cuda_;
    Weights weights_;

    int64_t total() const { return params.back().offset + params.back().padded_size(); }  // elements of the flat order
    int16_t* remainders() const {
        return arena_.layout.remainder.bytes ? reinterpret_cast<int16_t*>(arena_.at(arena_.layout.remainder.offset)) : nullptr;
    }
    Segment* segments() const { return arena_.work<Segment>(Work::Segments); }
    View in_stream(uint8_t* data, const Param& p) const { return {data, nullptr, p.rows, p.cols, stream}; }

    void update(const BucketRange& which, const AdamW& a, const Clipping& clip, Results* results) {
        const int64_t n = static_cast<int64_t>(which.last - which.first);
        GradientState* state = &results->outcome.gradients;
        const void* gradients = gradient(which.first).codes;
        gradient_norm(gradients, gradient_quant.format, which.elements, &results->checked_loss, clip, state, results->partials, cuda_);
        clear(scale(which.first), n * static_cast<int64_t>(sizeof(TensorScale)), cuda_);
        gpu::adamw(a, setup.optimizer, segments() + which.first, static_cast<int>(n), {which.offset, which.elements}, weights_,
                   rounding_key(setup.seed, a.step), gradients, gradient_quant.format, state, cuda_);
    }
    int64_t most_groups() const {
        int64_t most = 0;
        for (const Param& p : params) most = std::max(most, p.groups());
        return most;
    }

    MomentView moment(size_t i, bool second) const {
        const MomentPlace& at = second ? arena_.layout.v[i] : arena_.layout.m[i];
        const Format format = params[i].moment(second ? setup.optimizer.v : setup.optimizer.m);
        auto floats = [&](int64_t offset) { return reinterpret_cast<float*>(arena_.at(offset)); };
        if (!is_scaled(format)) return {arena_.at(at.codes), nullptr, nullptr, format};
        return {arena_.at(at.codes), floats(at.max), setup.optimizer.expands(format) ? floats(at.k) : nullptr, format};
    }
    Segment segment(size_t i) const {
        const Param& p = params[i];
        return {p.offset, p.size(), moment(i, false), moment(i, true), p.role.decay, p.role.linear ? scale(i) : nullptr};
    }

    // The linear layers' order is that of their buckets, which follow the embedding's.
    float* history(int64_t linear, LinearOperand o) const {
        float* all = reinterpret_cast<float*>(arena_.at(arena_.layout.delayed.offset));
        return all + (static_cast<int>(o) * setup.config.L * LINEARS + linear) * setup.recipe.history;
    }

    // What the optimizer leaves behind, for weights that came from elsewhere.
    void refresh_scale(size_t i) {
        if (!params[i].role.linear) return;
        clear(scale(i), sizeof(TensorScale), cuda_);
        amax(stored(weight(i)), scale(i), cuda_);
    }

    void append(const float* values, int64_t n, std::vector<float>& to) const {
        if (!values) return;
        to.resize(to.size() + n);
        copy(to.data() + to.size() - n, values, n * 4, cuda_);
        check(cudaStreamSynchronize(cuda_), "Reading the moments failed");
    }

    // "layers.0.qkv.m.max" -> (number of "layers.0.qkv", ".m.max")
    std::pair<size_t, std::string> parse(const std::string& name) const {
        const size_t i = param_of(params, name);
        return {i, name.substr(params[i].name.size())};
    }

    // Tensors that lie in memory as they are read and written.
    std::pair<void*, int64_t> find(const std::string& name, size_t i, const std::string& suffix) const {
        const Param& p = params[i];
        const MomentView m = moment(i, false), v = moment(i, true);
        const int64_t m_scales = setup.optimizer.scales(m.format, p.size()) * 4, v_scales = setup.optimizer.scales(v.format, p.size()) * 4;
        const struct {
            const char* suffix;
            void* data;
            int64_t bytes;
        } table[] = {
            {"", weight(i).codes, p.size() * 2},
            {".remainder", weights_.remainder ? weights_.remainder + p.offset : nullptr, p.size() * 2},
            {".m", m.codes, p.size() * info(m.format).bytes}, {".m.max", m.max, m_scales}, {".m.k", m.k, m_scales},
            {".v", v.codes, p.size() * info(v.format).bytes}, {".v.max", v.max, v_scales}, {".v.k", v.k, v_scales},
        };
        for (const auto& row : table)
            if (suffix == row.suffix && row.data) return {row.data, row.bytes};
        for (LinearOperand o : {LinearOperand::X, LinearOperand::W, LinearOperand::G}) {
            if (!delayed() || !p.role.linear) continue;
            const std::string of = OPERAND_NAMES[static_cast<int>(o)];
            const int64_t linear = p.bucket - 1;
            if (suffix == of + ".history") return {history(linear, o), int64_t(setup.recipe.history) * 4};
            if (suffix == of + ".scale") return {&operand_scales(0, o)[linear].delayed, 4};
        }
        throw Error("The model has no tensor " + name + ".");
    }

    // The fp32 recipe holds masters alone; files have them as BF16 and remainder. Between steps the GEMMs' scratch is free.
    static constexpr int64_t PIECE = 1 << 21;
    bool is_master(const std::string& suffix) const { return stream.format == Format::F32 && (suffix.empty() || suffix == ".remainder"); }
    float* piece() const { return arena_.work<float>(Work::GemmScratch); }
    uint16_t* piece_weights() const { return reinterpret_cast<uint16_t*>(piece() + PIECE); }
    int16_t* piece_remainders() const { return reinterpret_cast<int16_t*>(piece() + PIECE) + PIECE; }
    float* master(size_t i) const { return static_cast<float*>(weight(i).codes); }

    void read_half(size_t i, bool remainder, uint16_t* out) const {
        for (int64_t first = 0; first < params[i].size(); first += PIECE) {
            const int64_t n = std::min(PIECE, params[i].size() - first);
            split_master(master(i) + first, piece_weights(), piece_remainders(), n, cuda_);
            copy(out + first, remainder ? static_cast<void*>(piece_remainders()) : piece_weights(), n * 2, cuda_);
            check(cudaStreamSynchronize(cuda_), "Reading a tensor failed");
        }
    }
    void write_half(size_t i, bool remainder, const uint16_t* in) {
        for (int64_t first = 0; first < params[i].size(); first += PIECE) {
            const int64_t n = std::min(PIECE, params[i].size() - first);
            split_master(master(i) + first, piece_weights(), piece_remainders(), n, cuda_);
            copy(remainder ? static_cast<void*>(piece_remainders()) : piece_weights(), in + first, n * 2, cuda_);
            join_master(piece_weights(), piece_remainders(), master(i) + first, n, cuda_);
            check(cudaStreamSynchronize(cuda_), "Writing a tensor failed");
        }
    }
    void read_gradient(size_t i, float* out) const {
        const View g = gradient(i);
        const int64_t step = std::max<int64_t>(1, 2 * PIECE / g.cols);
        for (int64_t first = 0; first < g.rows; first += step) {
            const int64_t n = std::min(step, g.rows - first);
            dequantize(rows(g, first, n), {piece(), nullptr, n, g.cols, Q_F32}, cuda_);
            copy(out + first * g.cols, piece(), n * g.cols * 4, cuda_);
            check(cudaStreamSynchronize(cuda_), "Reading a gradient failed");
        }
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Layers: what they are made of

struct Vector {  // a weight or a bias; nulls where the architecture has none
    const void* values = nullptr;
    View gradient{};
};
struct NormLayer {
    Vector weight, bias;
};
struct Linear {
    View weight, gradient;  // (out, in)
    Vector bias;
    TensorScale* scale;     // of the FP8 weight
    uint8_t* kept;          // FP8 codes with their scales, and behind them the transposed ones; null unless they are made once a step
};
enum LayerScale { X_QKV, X_OUT, X_UP, X_DOWN, W_QKV, W_OUT, W_UP, W_DOWN, G_QKV, G_OUT, G_UP, G_DOWN };  // by LinearOperand and linear layer
using Sums = std::vector<std::pair<void*, int64_t>>;  // gradients that are added to: ranges to clear before a step's first micro-batch
struct Layer {
    NormLayer norm1, norm2;
    Linear qkv, out, up, down;
    View norm1_input, qkv_saved, attention, lse, norm2_input, up_saved, norm1_output, norm2_output, hidden;  // saved_per_layer(); else empty
    TensorScale* scales[OPERANDS];
    int64_t first_bucket;  // of the four: qkv, out, up, down
};

struct Batch {  // on the device
    const int32_t *tokens, *targets;
    int64_t B, T;
    const int32_t* order = nullptr;  // for backward
    const EmbeddingChunk* chunks = nullptr;
    int64_t number_of_chunks = 0;
};

class Network {
public:
    QuantStats* stats = nullptr;  // one per Kind, on the device; null: not measured
    std::function<void(int64_t bucket)> bucket_done;  // called as soon as backward has a bucket's gradients and is done with its weights

    Network(const Setup& s, const GpuFacts& facts, const Arena& arena, State& state, Gemms& gemms, cudaStream_t cuda)
        : config_(s.config), recipe_(s.recipe), quant_(linear_formats(s)), arena_(arena), state_(state), gemms_(gemms), cuda_(cuda),
          groups_(recipe_.nonlinear.fp8()), keeps_weights_(facts.cache_fp8_weights), embedding_(state.index("embedding")),
          head_(state.index(config_.tied ? "embedding" : "head")), positions_(config_.arch.rope ? embedding_ : state.index("positions")) {
        uint8_t* kept = keeps_weights_ ? arena.work<uint8_t>(Work::CachedWeights) : nullptr;
        for (int64_t l = 0; l < config_.L; l++) layers_.push_back(make_layer(l, kept));
        final_norm_ = make_norm("final_norm");
        for (const BucketRange& bucket : state_.buckets) sums_.push_back(make_sums(bucket));
        if (config_.arch.rope) rope_table(config_, s.T, arena.work<float2>(Work::RopeTable), cuda_);
        require_places(s);
    }

    // Hidden states before the final norm, in x_; with the final norm's statistics.
    void forward(const Batch& batch) {
        begin(batch);
        const Norm first = norm_of(layers_[0].norm1, layers_[0].norm1_input);
        const View positions = config_.arch.rope ? View{} : state_.weight(positions_);
        embedding_forward(batch.tokens, state_.weight(embedding_), positions, T_, apart(first), first, amax_slot(layers_[0], X_QKV),
                          stats_of(Kind::NormInput), cuda_);
        x_ = goes_on(first);
        for (int64_t l = 0; l < config_.L; l++) block_forward(l);
    }

    // Weights have changed: FP8 copies that are kept are made anew. Before whatever follows.
    void prepare() {
        if (keeps_weights_ && (!kept_are_valid_ || stats)) keep_weights();
    }

    // Adds the micro-batch's mean loss to *loss.
    void evaluate(const Batch& batch, double* loss) {
        forward(batch);
        head(batch, 1.0 / static_cast<double>(N_), false, loss);
    }

    // Adds the micro-batch's mean loss over `accumulate` to *loss, its gradients to the gradients, or puts them in their place if it is the first of
    // a step: all but those of the embeddings, which have to follow.
    void forward_and_backward(const Batch& batch, int64_t accumulate, bool first, double* loss) {
        first_ = first;
        keeps_outputs_ = !state_.setup.recompute;
        forward(batch);
        head(batch, 1.0 / static_cast<double>(N_ * accumulate), true, loss);
        for (int64_t l = config_.L; l-- > 0;) block_backward(l);
        keeps_outputs_ = false;
    }
    void embedding_backward(const Batch& batch, bool first) {
        take_shape(batch);  // a recording leaves no trace of its own
        first_ = first;
        begin_bucket(0);
        gpu::embedding_backward(residual_gradient(), batch.order, batch.chunks, batch.number_of_chunks, state_.gradient(embedding_),
                                arena_.work<float>(Work::EmbeddingPartials), cuda_);
        if (!config_.arch.rope) positions_backward(residual_gradient(), T_, state_.gradient(positions_), cuda_);
        end_bucket(0);
    }

    // Logits (1, padded_V) of one token's hidden state
    View token_logits(int64_t token) { return head_logits(token, 1); }

    int64_t scales() const { return static_cast<int64_t>(state_.params.size()) + state_.operand_scales(); }

    // Delayed scaling: before a step, or a pass of its own, and after a step. Weights that are kept have to be quantized within it, which wants
    // their amaxes.
    void begin_delayed() {
        if (!state_.delayed()) return;
        state_.forget_amaxes();
        kept_are_valid_ = false;
    }
    void end_delayed_step(Results* results) {
        if (state_.delayed()) state_.end_delayed_step(results);
    }

    void weights_changed() { kept_are_valid_ = false; }

private:
    const ModelConfig& config_;
    const Recipe& recipe_;
    const LinearFormats quant_;  // of every linear layer
    const Arena& arena_;
    State& state_;
    Gemms& gemms_;
    cudaStream_t cuda_;
    const bool groups_, keeps_weights_;
    const size_t embedding_, head_, positions_;  // parameters; positions_ where the architecture has them
    bool kept_are_valid_ = false, first_ = true, keeps_outputs_ = false;
    std::vector<Layer> layers_;
    NormLayer final_norm_;
    std::vector<Sums> sums_;  // by bucket
    int64_t B_ = 0, T_ = 0, N_ = 0;
    View x_{};  // the residual stream, (N, C)

    // --- Construction ---------------------------------------------------------------------------------------------------
    Vector make_vector(const std::string& name, bool exists) const {
        if (!exists) return {};
        const size_t i = state_.index(name);
        return {state_.weight(i).codes, state_.gradient(i)};
    }
    NormLayer make_norm(const std::string& name) const {
        return {make_vector(name + ".weight", true), make_vector(name + ".bias", !config_.arch.rms)};
    }
    Linear make_linear(const std::string& name, uint8_t*& kept, TensorScale* delayed) const {
        const size_t i = state_.index(name);
        TensorScale* scale = state_.delayed() ? delayed : state_.scale(i);
        const Linear w{state_.weight(i), state_.gradient(i), make_vector(name + ".bias", config_.arch.bias), scale, kept};
        const Quant& q = quant_.w;
        if (kept) kept += q.operand_bytes(w.weight.rows, w.weight.cols) + q.operand_bytes(w.weight.cols, w.weight.rows);
        return w;
    }
    View make_saved(int64_t l, Saved which) const {
        const std::vector<SavedTensor> table = saved_per_layer(state_.setup);
        for (size_t i = 0; i < table.size(); i++) {
            if (table[i].which != which) continue;
            const int64_t N = arena_.layout.tokens, cols = table[i].cols;
            uint8_t* codes = arena_.at(arena_.layout.saved.offset + l * arena_.layout.layer_bytes + arena_.layout.saved_codes[i].offset);
            return {codes, codes + table[i].quant.code_bytes(N, cols), N, cols, table[i].quant};  // of a transposed one nothing but the codes is read
        }
        return {};
    }
    Layer make_layer(int64_t l, uint8_t*& kept) const {
        const std::string name = "layers." + std::to_string(l) + ".";
        auto saved = [&](Saved which) { return make_saved(l, which); };
        auto scales = [&](LinearOperand o) { return state_.operand_scales(l, o); };
        TensorScale* w = scales(LinearOperand::W);
        return {make_norm(name + "norm1"), make_norm(name + "norm2"),
                make_linear(name + "qkv", kept, w), make_linear(name + "attention_out", kept, w + 1),
                make_linear(name + "gate_up", kept, w + 2), make_linear(name + "down", kept, w + 3),
                saved(Saved::Norm1Input), saved(Saved::Qkv), saved(Saved::Attention), saved(Saved::LogSumExp), saved(Saved::Norm2Input),
                saved(Saved::GateUp), saved(Saved::Norm1Output), saved(Saved::Norm2Output), saved(Saved::ActivationOutput),
                {scales(LinearOperand::X), w, scales(LinearOperand::G)}, state_.params[state_.index(name + "qkv")].bucket};
    }
    // What kernels add to: all but the gradients of products; and a tied embedding has the head's part already.
    Sums make_sums(const BucketRange& bucket) const {
        Sums sums;
        for (size_t i = bucket.first; i < bucket.last; i++) {
            const bool product = state_.params[i].role.linear || i == head_;
            if (product) continue;
            uint8_t* data = static_cast<uint8_t*>(state_.gradient(i).codes);
            const int64_t bytes = state_.params[i].padded_size() * info(state_.gradient_quant.format).bytes;
            const bool neighbour = !sums.empty() && static_cast<uint8_t*>(sums.back().first) + sums.back().second == data;
            if (neighbour) sums.back().second += bytes;
            else sums.push_back({data, bytes});
        }
        return sums;
    }
    // plan.cpp works out what these kernels need; it must not be less than what they say.
    void require_places(const Setup& s) const {
        const AttentionShape shape = attention_shape(config_, s.B, s.T, recipe_.compute);
        if (static_cast<int64_t>(attention_workspace(shape)) > arena_.place(Work::Attention).bytes ||
            static_cast<int64_t>(norm_backward_workspace(config_.C)) > arena_.place(Work::NormPartials).bytes)
            throw Error("The memory plan has less room for attention or norms than their kernels ask for; mend work_rows() in plan.cpp.");
    }

    // --- Small things -----------------------------------------------------------------------------------------------------
    QuantStats* stats_of(Kind k) const { return stats ? stats + static_cast<int>(k) : nullptr; }
    TensorScale* slot(const Layer& layer, LayerScale which) const { return layer.scales[which / LINEARS] + which % LINEARS; }
    // Where the amax is left of an operand that is about to be quantized with it; null where it is not FP8, or where quantize() finds what it needs.
    TensorScale* amax_slot(const Layer& layer, LayerScale which) const {
        return just_in_time() ? slot(layer, which) : nullptr;
    }
    bool just_in_time() const {
        return quant_.x.fp8() && quant_.x.granularity == PER_TENSOR && (!state_.delayed() || state_.some_without_scale);
    }

    View cut(View v) const { return v.rows = N_, v; }  // to the rows of this batch
    View all_rows(View v) const { return v.rows = gemm_rows(v.rows), v; }  // that a GEMM reads or writes
    View compute_view(void* data, int64_t n, int64_t cols) const { return {data, nullptr, n, cols, Quant{recipe_.compute}}; }
    View compute_view(Work w, int64_t cols) const { return compute_view(arena_.work(w), N_, cols); }
    View residual() const { return compute_view(Work::Residual, config_.C); }
    View final_input() const { return compute_view(arena_.at(arena_.layout.final_norm_input.offset), N_, config_.C); }
    View residual_gradient() const { return final_input(); }  // backward needs the final norm's input only once, to write this

    Norm norm_of(const NormLayer& n, const View& in) const {
        return {cut(in), n.weight.values, n.bias.values, arena_.work<float2>(Work::NormStatistics), config_.arch.rms, config_.norm_eps};
    }
    // Where the stream goes on beside a norm's input; none where the norm reads the very same numbers.
    View apart(const Norm& next) const { return next.in.quant.fp8() ? residual() : View{}; }
    View goes_on(const Norm& next) const { return next.in.quant.fp8() ? residual() : next.in; }
    Rope rope() const { return {arena_.work<float2>(Work::RopeTable), T_, config_.HS(), config_.q_cols() + config_.kv_cols()}; }
    AttentionShape attention() const { return attention_shape(config_, B_, T_, recipe_.compute); }

    void take_shape(const Batch& batch) { B_ = batch.B, T_ = batch.T, N_ = B_ * T_; }
    void begin(const Batch& batch) {
        take_shape(batch);
        if (!state_.delayed()) state_.forget_amaxes();
    }

    void begin_bucket(int64_t bucket) const {
        if (!first_) return;
        for (const auto& [data, bytes] : sums_[bucket]) clear(data, bytes, cuda_);
    }
    void end_bucket(int64_t bucket) const {
        if (bucket_done) bucket_done(bucket);
    }

    // --- Operands of products -----------------------------------------------------------------------------------------
    // x quantized just in time with the amax in `scale`, to either orientation or both. What is stored in the wanted format already is
    // used where it lies.
    Operand operand(const Lazy& x, const Quant& q, void* codes, void* transposed, TensorScale* scale, Kind kind) {
        if (x.rule == Rule::Stored && !q.fp8() && !x.a.quant.fp8()) return {x.a};
        const Operand out = operand_at(q.fp8() ? gemm_rows(x.rows) : x.rows, x.cols, q, codes, transposed, scale);
        quantize(x, out, stats_of(kind), cuda_);
        return out;
    }
    // A prompt's tokens may be no multiple of 16, which FP8 GEMMs need. They read and write a few more rows, whose
    // values are undefined and never used.
    int64_t gemm_rows(int64_t n) const { return quant_.x.fp8() ? round_up(n, 16) : n; }
    // One scale a tensor is in its slot; those of rows, vectors and squares lie right behind the codes.
    Operand operand_at(int64_t rows, int64_t cols, const Quant& q, void* codes, void* transposed, TensorScale* slot) const {
        if (q.granularity == PER_TENSOR) return {{codes, slot, rows, cols, q}, transposed};
        auto behind = [&](void* p) { return p ? static_cast<uint8_t*>(p) + q.code_bytes(rows, cols) : nullptr; };
        return {{codes, behind(codes), rows, cols, q}, transposed, behind(transposed), slot};
    }
    // kept: where backward finds it again, as its product wants it: FP8 codes transposed; empty where it is computed again.
    Operand activation_operand(const Lazy& x, const Quant& q, TensorScale* scale, Gemm use, const View& kept) {
        void* place = arena_.work(x.rule == Rule::Activation ? Work::Hidden : Work::Operand);
        if (!kept.codes || !keeps_outputs_) {
            const bool transposed = q.fp8() && use == Gemm::Wgrad;
            return operand(x, q, transposed ? nullptr : place, transposed ? place : nullptr, scale, Kind::LinearInput);
        }
        if (use == Gemm::Fprop) return operand(x, q, q.fp8() ? place : kept.codes, q.fp8() ? kept.codes : nullptr, scale, Kind::LinearInput);
        return operand_at(x.rows, x.cols, q, kept.codes, kept.codes, scale);
    }
    Operand weight_operand(const Linear& w, const Quant& q, Gemm use) {
        if (q.fp8() && w.kept) return kept_operand(w, q);
        void* place = arena_.work(Work::Weight);
        const bool transposed = use == Gemm::Dgrad;
        take_weight_amax(w);
        return operand(stored(w.weight), q, transposed ? nullptr : place, transposed ? place : nullptr, w.scale, Kind::Weight);
    }
    Operand kept_operand(const Linear& w, const Quant& q) const {
        const int64_t rows = w.weight.rows, cols = w.weight.cols;
        return operand_at(rows, cols, q, w.kept, w.kept + q.operand_bytes(rows, cols), w.scale);
    }
    void keep_weights() {
        for (const Layer& layer : layers_)
            for (const Linear* w : {&layer.qkv, &layer.out, &layer.up, &layer.down}) {
                take_weight_amax(*w);
                quantize(stored(w->weight), kept_operand(*w, quant_.w), stats_of(Kind::Weight), cuda_);
            }
        kept_are_valid_ = true;
    }
    // The optimizer leaves a weight's amax where scales are just in time, but not where they are delayed.
    void take_weight_amax(const Linear& w) { take_amax(stored(w.weight), state_.delayed() && just_in_time() ? w.scale : nullptr); }

    // --- Linear layers: each of the three products, and the bias -----------------------------------------------------
    void linear_forward(const Linear& w, const Lazy& x, TensorScale* scale, const View& kept, const View& y) {
        const Operand x8 = activation_operand(x, quant_.x, scale, Gemm::Fprop, kept);
        gemms_.run(Gemm::Fprop, x8, weight_operand(w, quant_.w, Gemm::Fprop), all_rows(y), false, w.bias.values, cuda_);
    }
    void dgrad(const Linear& w, const Operand& g8, const View& dx) {
        gemms_.run(Gemm::Dgrad, g8, weight_operand(w, quant_.w, Gemm::Dgrad), dx, false, nullptr, cuda_);
    }
    void wgrad(const Linear& w, const Operand& g8, const Lazy& x, TensorScale* scale, const View& kept) {
        const Operand x8 = activation_operand(x, quant_.x, scale, Gemm::Wgrad, kept);
        gemms_.run(Gemm::Wgrad, g8, x8, w.gradient, !first_, nullptr, cuda_);
    }
    // The gradient of w's output as its products want it, and what it adds to the bias's. `amax`: where it is still wanted. FP8 codes need it
    // first, and the pass over a bias's sums leaves it; other numbers are cheaper to add up when they have been computed.
    Operand output_gradient(const Linear& w, const Lazy& g, void* codes, TensorScale* scale, TensorScale* amax) {
        const Quant q = quant_.g;
        if (q.fp8()) bias_gradient(w, g, Format::F32, amax);
        const Operand g8 = operand(g, q, codes, q.fp8() ? arena_.work(Work::GradientTransposed) : nullptr, scale, Kind::Gradient);
        if (!q.fp8()) bias_gradient(w, stored(g8.view), recipe_.compute, nullptr);
        return g8;
    }
    // Of the gradient as the products see it, but for FP8's rounding. Leaves its amax in `scale` if not null.
    void bias_gradient(const Linear& w, const Lazy& g, Format rounding, TensorScale* scale) {
        if (!w.bias.values) return take_amax(g, scale);
        column_sums(g, rounding, w.bias.gradient, arena_.work<float>(Work::ColumnPartials), scale, cuda_);
    }
    void take_amax(const Lazy& x, TensorScale* scale) {
        if (scale) amax(x, scale, cuda_);
    }

    // --- One block --------------------------------------------------------------------------------------------------
    // x += branch; what the next norm reads goes to its input, and that norm's amax to `scale`.
    void residual_forward(const View& branch, const Norm& next, TensorScale* scale) {
        residual_add(x_, branch, apart(next), next, scale, stats_of(Kind::NormInput), cuda_);
        x_ = goes_on(next);
    }

    void block_forward(int64_t l) {
        const Layer& layer = layers_[l];
        const Norm norm1 = norm_of(layer.norm1, layer.norm1_input), norm2 = norm_of(layer.norm2, layer.norm2_input);
        const View qkv = attention_view(layer.qkv_saved, Work::Qkv), o = attention_view(layer.attention, Work::AttentionOutput);
        const View branch = compute_view(Work::Branch, config_.C);

        linear_forward(layer.qkv, norm(norm1), slot(layer, X_QKV), layer.norm1_output, qkv);
        if (config_.arch.rope) rope_forward(rope(), qkv, cuda_);
        keep_attention(qkv, layer.qkv_saved);
        attention_forward(attention(), qkv.codes, o.codes, static_cast<float*>(layer.lse.codes), cuda_);
        keep_attention(o, layer.attention);
        const Lazy out = stored(cut(layer.attention));
        take_amax(out, amax_slot(layer, X_OUT));
        linear_forward(layer.out, out, slot(layer, X_OUT), View{}, branch);
        residual_forward(branch, norm2, amax_slot(layer, X_UP));

        up_forward(layer, norm(norm2));
        linear_forward(layer.down, activation(config_.arch.gated, cut(layer.up_saved)), slot(layer, X_DOWN), layer.hidden, branch);
        const bool last = l + 1 == config_.L;
        residual_forward(branch, last ? norm_of(final_norm_, final_input()) : norm_of(layers_[l + 1].norm1, layers_[l + 1].norm1_input),
                         last ? nullptr : amax_slot(layers_[l + 1], X_QKV));
    }

    // Attention computes in compute dtype. Where what it reads and writes is saved in groups, it computes with what those hold, so that the saved
    // log-sum-exp belongs to what backward reads.
    View attention_view(const View& saved, Work work) const { return saved.quant.fp8() ? compute_view(work, saved.cols) : cut(saved); }
    void keep_attention(const View& x, const View& saved) {
        if (saved.quant.fp8()) quantize_and_dequantize(x, cut(saved), stats_of(Kind::Attention), cuda_);
    }
    View recall_attention(const View& saved, Work work) {
        const View x = attention_view(saved, work);
        if (saved.quant.fp8()) dequantize(cut(saved), x, cuda_);
        return x;
    }

    // The widest tensor of a layer is saved in groups; in compute dtype it exists for UP_TOKENS tokens at a time.
    // Leaves the amax of the activation behind.
    void up_forward(const Layer& layer, const Lazy& x) {
        const View up = cut(layer.up_saved);
        if (!groups_) {
            linear_forward(layer.up, x, slot(layer, X_UP), layer.norm2_output, up);
            return take_amax(activation(config_.arch.gated, up), amax_slot(layer, X_DOWN));
        }
        const Operand x8 = activation_operand(x, quant_.x, slot(layer, X_UP), Gemm::Fprop, layer.norm2_output);
        const Operand w8 = weight_operand(layer.up, quant_.w, Gemm::Fprop);
        const int64_t step = quant_.x.granularity == PER_TENSOR ? UP_TOKENS : N_;  // vectors' scales lie as the product of all rows wants them
        for (int64_t first = 0; first < N_; first += step) {
            const int64_t n = std::min(step, N_ - first);
            const View u = compute_view(arena_.work(Work::Up), n, up.cols);
            gemms_.run(Gemm::Fprop, {rows(x8.view, first, gemm_rows(n))}, w8, all_rows(u), false, layer.up.bias.values, cuda_);
            quantize_gate_up(config_.arch.gated, u, rows(up, first, n), amax_slot(layer, X_DOWN), stats_of(Kind::ActivationInput), cuda_);
        }
    }

    // The residual gradient passes the block. A norm's backward leaves behind the statistics with which its output, wgrad's operand,
    // is made again, and the amax of the gradient that it hands on.
    void block_backward(int64_t l) {
        const Layer& layer = layers_[l];
        down_backward(layer);
        up_backward(layer);
        out_backward(layer);
        qkv_backward(layer, l > 0 ? amax_slot(layers_[l - 1], G_DOWN) : nullptr);
    }

    // Each of a layer's four buckets: its linear layer, and what lies between that and the one before. g is the gradient of the residual stream.
    void down_backward(const Layer& layer) {
        begin_bucket(layer.first_bucket + 3);
        const View g = residual_gradient();
        const Operand g8 = output_gradient(layer.down, stored(g), arena_.work(Work::Gradient), slot(layer, G_DOWN), nullptr);
        wgrad(layer.down, g8, activation(config_.arch.gated, cut(layer.up_saved)), slot(layer, X_DOWN), layer.hidden);
        dgrad(layer.down, g8, compute_view(Work::HiddenGradient, config_.F));
        end_bucket(layer.first_bucket + 3);
    }

    void up_backward(const Layer& layer) {
        begin_bucket(layer.first_bucket + 2);
        const View up = cut(layer.up_saved), dh = compute_view(Work::HiddenGradient, config_.F), dx = compute_view(Work::Branch, config_.C);
        const Lazy du = activation_backward(config_.arch.gated, up, dh);
        const Quant& q = quant_.g;
        const bool one_scale = q.granularity == PER_TENSOR, in_place = one_scale && info(q.format).bytes == info(up.quant.format).bytes;
        // In place each element's codes go where it was saved.
        void* const place = in_place ? up.codes : arena_.work(Work::Gradient);
        const Operand du8 = output_gradient(layer.up, du, place, slot(layer, G_UP), amax_slot(layer, G_UP));
        dgrad(layer.up, du8, dx);
        const Norm norm2 = norm_of(layer.norm2, layer.norm2_input);
        residual_backward(norm2, layer.norm2, dx, amax_slot(layer, G_OUT));
        wgrad(layer.up, du8, norm(norm2), slot(layer, X_UP), layer.norm2_output);
        end_bucket(layer.first_bucket + 2);
    }

    void out_backward(const Layer& layer) {
        begin_bucket(layer.first_bucket + 1);
        const View g = residual_gradient();
        const Operand g8 = output_gradient(layer.out, stored(g), arena_.work(Work::Gradient), slot(layer, G_OUT), nullptr);
        wgrad(layer.out, g8, stored(cut(layer.attention)), slot(layer, X_OUT), View{});
        dgrad(layer.out, g8, compute_view(Work::Branch, config_.q_cols()));
        end_bucket(layer.first_bucket + 1);
    }

    void qkv_backward(const Layer& layer, TensorScale* next_scale) {
        begin_bucket(layer.first_bucket);
        const View qkv = recall_attention(layer.qkv_saved, Work::Qkv), o = recall_attention(layer.attention, Work::AttentionOutput);
        const View do_ = compute_view(Work::Branch, config_.q_cols()), dx = compute_view(Work::Branch, config_.C);
        // The feed-forward half is done with; plan.cpp says whether its input's place is large enough for dqkv.
        const bool in_place = arena_.place(Work::QkvGradient).bytes == 0;
        const View dqkv = compute_view(in_place ? layer.up_saved.codes : arena_.work(Work::QkvGradient), N_, config_.qkv_cols());
        attention_backward(attention(), qkv.codes, o.codes, static_cast<const float*>(layer.lse.codes), do_.codes, dqkv.codes,
                           arena_.work(Work::Attention), cuda_);
        const Lazy rotated = config_.arch.rope ? rope_backward(rope(), dqkv) : stored(dqkv);
        const Operand dqkv8 = output_gradient(layer.qkv, rotated, arena_.work(Work::Gradient), slot(layer, G_QKV), amax_slot(layer, G_QKV));
        dgrad(layer.qkv, dqkv8, dx);
        const Norm norm1 = norm_of(layer.norm1, layer.norm1_input);
        residual_backward(norm1, layer.norm1, dx, next_scale);
        wgrad(layer.qkv, dqkv8, norm(norm1), slot(layer, X_QKV), layer.norm1_output);
        end_bucket(layer.first_bucket);
    }

    void residual_backward(const Norm& n, const NormLayer& layer, const View& dy, TensorScale* scale) {
        norm_backward(n, dy, residual_gradient(), residual_gradient(), scale, layer.weight.gradient, layer.bias.gradient,
                      arena_.work<float>(Work::NormPartials), cuda_);
    }

    View head_sum(View gradient) const {
        if (!head_sum_apart(gradient.quant.format, N_)) return gradient;
        return {arena_.work(Work::HeadGradient), nullptr, gradient.rows, gradient.cols, Q_F32};
    }

    // --- The ends -----------------------------------------------------------------------------------------------------
    Operand final_norm_output(int64_t first, int64_t n) {
        Norm part = norm_of(final_norm_, final_input());
        part.in = rows(part.in, first, n);
        part.stats += first;
        return operand(norm(part), Quant{recipe_.compute}, arena_.work(Work::FinalNorm), nullptr, nullptr, Kind::LinearInput);
    }
    View head_logits(int64_t first, int64_t n) {
        const View logits = compute_view(arena_.work(Work::Logits), n, config_.padded_V());
        gemms_.run(Gemm::Fprop, final_norm_output(first, n), {state_.weight(head_)}, logits, false, nullptr, cuda_);
        return logits;
    }

    // Logits, which become their gradients, exist for HEAD_TOKENS tokens at a time. `sum` of their products goes on where the gradient is.
    void head(const Batch& batch, double scale, bool backward, double* loss) {
        const View dy = compute_view(Work::Branch, config_.C);
        const View gradient = state_.gradient(head_), sum = head_sum(gradient);
        float* losses = arena_.work<float>(Work::Losses);
        const bool apart = sum.codes != gradient.codes;
        if (backward && apart && !first_) dequantize(gradient, sum, cuda_);
        for (int64_t first = 0; first < N_; first += HEAD_TOKENS) {
            const int64_t n = std::min(HEAD_TOKENS, N_ - first);
            const View logits = head_logits(first, n);
            cross_entropy(logits, config_.V, batch.targets + first, backward ? static_cast<float>(scale) : 0.0f, losses + first, cuda_);
            if (!backward) continue;
            const View y = compute_view(arena_.work(Work::FinalNorm), n, config_.C);
            gemms_.run(Gemm::Wgrad, {logits}, {y}, sum, !(first_ && first == 0), nullptr, cuda_);
            gemms_.run(Gemm::Dgrad, {logits}, {state_.weight(head_)}, rows(dy, first, n), false, nullptr, cuda_);
        }
        loss_sum(losses, N_, scale, loss, cuda_);
        if (!backward) return;
        if (apart) quantize(stored(sum), {gradient}, nullptr, cuda_);
        const int64_t bucket = static_cast<int64_t>(state_.buckets.size()) - 1;
        begin_bucket(bucket);
        norm_backward(norm_of(final_norm_, final_input()), dy, View{}, residual_gradient(), amax_slot(layers_.back(), G_DOWN),
                      final_norm_.weight.gradient, final_norm_.bias.gradient, arena_.work<float>(Work::NormPartials), cuda_);
        end_bucket(bucket);
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The Model that train.cpp drives

class Gpu : public Model {
public:
    Gpu(const Setup& s, const GpuFacts& facts)
        : setup_(s), arena_(setup_, facts), gemms_(arena_.work(Work::GemmScratch), s.recipe.fast_accumulation),
          state_(setup_, arena_, stream_), network_(setup_, facts, arena_, state_, gemms_, stream_), tokens_(batch_tokens()),
          targets_(batch_tokens()), order_(batch_tokens()), chunks_(batch_tokens()), outcome_(1), norms_(buckets()) {
        static_assert(sizeof(Results) <= 16 << 10 && Gemms::SCRATCH <= 32 << 20 && sizeof(TensorScale) == 16 && OPERANDS * LINEARS == 12 &&
                      sizeof(EmbeddingChunk) == 16 && COLUMN_PARTIALS == 128, "as work_rows() in plan.cpp counts them");
        start();
        warm_up();
        start();
    }

    StepResult step(const int32_t* tokens, const int32_t* targets, const AdamW& adamw) override {
        check_and_pin(tokens, targets, batch_tokens());
        clear_outcome();
        network_.begin_delayed();
        network_.prepare();
        const Hooks hooks{network_};
        if (!setup_.keep_gradients)
            network_.bucket_done = [&](int64_t bucket) {
                check_loss();
                state_.update_bucket(bucket, adamw, results());
                copy(&norms_.get()[bucket], &results()->outcome.gradients.norm, sizeof(double), stream_);
            };
        for (int64_t a = 0; a < setup_.accumulate; a++) {
            run(a, setup_.accumulate);
            if (setup_.keep_gradients) check_loss();
        }
        if (setup_.keep_gradients) state_.update(adamw, results());
        network_.end_delayed_step(results());
        network_.weights_changed();
        const Outcome& outcome = finish();
        const bool skipped = outcome.gradients.skip != 0;
        if (!skipped && outcome.without_scale == 0) state_.some_without_scale = false;
        return {outcome.loss, outcome.gradients.norm, skipped, norm_correction()};
    }

    double evaluate(const int32_t* tokens, const int32_t* targets) override {
        check_and_pin(tokens, targets, setup_.B * setup_.T);
        upload(0, setup_.B * setup_.T);
        clear_outcome();
        network_.begin_delayed();
        network_.prepare();
        network_.evaluate(device_batch(), &results()->outcome.loss);
        checked_loss(state_.scale(0), network_.scales(), &results()->outcome.loss, &results()->outcome.loss, stream_);
        return finish().loss;
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        check_and_pin(tokens, tokens, n);
        upload(0, n);
        network_.begin_delayed();
        network_.prepare();
        network_.forward({device_tokens(), device_targets(), 1, n});
        const View row = network_.token_logits(n - 1), wide{arena_.work(Work::GemmScratch), nullptr, 1, row.cols, Q_F32};
        dequantize(row, wide, stream_);
        copy(logits, wide.codes, setup_.config.V * 4, stream_);
        stream_.wait();
    }

    QuantReport quantization(const int32_t* tokens, const int32_t* targets) override {
        QuantReport report;
        check_and_pin(tokens, targets, setup_.B * setup_.T);
        clear(results()->stats, sizeof(results()->stats), stream_);
        clear_outcome();
        const Hooks hooks{network_};
        network_.stats = results()->stats;
        network_.begin_delayed();
        network_.prepare();
        network_.bucket_done = [&](int64_t bucket) { state_.measure(state_.buckets[bucket], results()->stats); };
        run(0, 1);
        state_.expansion_factors(report);
        copy(report.kinds, results()->stats, sizeof(report.kinds), stream_);
        stream_.wait();
        std::sort(report.k_m.begin(), report.k_m.end());
        std::sort(report.k_v.begin(), report.k_v.end());
        return report;
    }

    // Gradients are those of the last step until the next forward pass.
    void read(const std::string& name, void* out) override { state_.read(name, out); }
    void write(const std::string& name, const void* in) override {
        state_.write(name, in);
        network_.weights_changed();
    }
    const Setup& setup() const override { return setup_; }

private:
    struct Hooks {  // what one call asks of the network, taken back at its end, also by an exception
        Network& network;
        ~Hooks() { network.stats = nullptr, network.bucket_done = nullptr; }
    };

    const Setup setup_;
    Stream stream_;
    Arena arena_;
    Gemms gemms_;
    State state_;
    Network network_;
    Pinned<int32_t> tokens_, targets_, order_;
    Pinned<EmbeddingChunk> chunks_;
    Pinned<Outcome> outcome_;
    Pinned<double> norms_;  // by bucket, of its gradients and all later ones'
    Recording first_micro_batch_, later_micro_batch_;
    bool tuning_ = false;

    int64_t buckets() const { return static_cast<int64_t>(state_.buckets.size()); }
    std::vector<double> norm_correction() const {
        if (setup_.keep_gradients) return {};
        return norm_corrections_of({norms_.get(), norms_.get() + buckets()});
    }
    int64_t batch_tokens() const { return setup_.accumulate * setup_.B * setup_.T; }
    Results* results() const { return arena_.work<Results>(Work::Results); }
    int32_t* device_tokens() const { return arena_.work<int32_t>(Work::Tokens); }
    int32_t* device_targets() const { return arena_.work<int32_t>(Work::Targets); }

    void start() {
        clear(results(), sizeof(Results), stream_);
        state_.initialize();
        network_.weights_changed();
    }

    // Two steps on made-up tokens, before the weights are set for good. In the first every product picks its algorithm, on numbers like the real
    // ones, and CUDA loads every kernel; the second is recorded.
    void warm_up() {
        std::vector<int32_t> tokens(batch_tokens());
        const uint64_t V = static_cast<uint64_t>(setup_.config.V);
        for (size_t i = 0; i < tokens.size(); i++) tokens[i] = static_cast<int32_t>(i * 2654435761u % V);
        gemms_.tune(tuning_ = true);
        step(tokens.data(), tokens.data(), {1, 0.0f});
        gemms_.tune(tuning_ = false);
        step(tokens.data(), tokens.data(), {2, 0.0f});
    }

    void check_and_pin(const int32_t* tokens, const int32_t* targets, int64_t n) {
        for (int64_t i = 0; i < n; i++)
            if (tokens[i] < 0 || tokens[i] >= setup_.config.V || targets[i] < 0 || targets[i] >= setup_.config.V)
                throw Error("A token lies outside the vocabulary of " + std::to_string(setup_.config.V) +
                            "; choose --data and --model that belong together.");
        std::copy(tokens, tokens + n, tokens_.get());
        std::copy(targets, targets + n, targets_.get());
    }
    void upload(int64_t first, int64_t n) {
        copy(device_tokens(), tokens_.get() + first, n * 4, stream_);
        copy(device_targets(), targets_.get() + first, n * 4, stream_);
    }

    // One micro-batch of what is pinned. It is a recording where every launch is like the last one's: not while products are being tuned or
    // quantization is measured, nor with updates on the way, whose numbers change, nor
    // as long as an operand may lack its delayed scale. The host works out the order of the tokens meanwhile.
    void run(int64_t micro_batch, int64_t accumulate) {
        const int64_t N = setup_.B * setup_.T;
        const bool first = micro_batch == 0;
        upload(micro_batch * N, N);
        auto work = [&] { network_.forward_and_backward(device_batch(), accumulate, first, &results()->outcome.loss); };
        if (network_.stats || network_.bucket_done || tuning_ || state_.some_without_scale) work();
        else (first ? first_micro_batch_ : later_micro_batch_).run(stream_, work);
        network_.embedding_backward(upload_order(micro_batch), first);
    }

    Batch device_batch() const { return {device_tokens(), device_targets(), setup_.B, setup_.T}; }

    // The rows of equal tokens, for the embedding's gradient.
    Batch upload_order(int64_t micro_batch) {
        Batch batch = device_batch();
        const int64_t N = batch.B * batch.T, first = micro_batch * N;
        const EmbeddingOrder order = embedding_order(tokens_.get() + first, N, setup_.config.V);
        batch.order = arena_.work<int32_t>(Work::EmbeddingOrder), batch.chunks = arena_.work<EmbeddingChunk>(Work::EmbeddingChunks);
        batch.number_of_chunks = static_cast<int64_t>(order.chunks.size());
        std::copy(order.order.begin(), order.order.end(), order_.get() + first);
        std::copy(order.chunks.begin(), order.chunks.end(), chunks_.get() + first);
        copy(arena_.work(Work::EmbeddingOrder), order_.get() + first, N * 4, stream_);
        copy(arena_.work(Work::EmbeddingChunks), chunks_.get() + first,
             batch.number_of_chunks * static_cast<int64_t>(sizeof(EmbeddingChunk)), stream_);
        return batch;
    }

    void clear_outcome() {
        clear(&results()->outcome, sizeof(Outcome), stream_);
        clear(&results()->checked_loss, sizeof(double), stream_);
    }
    void check_loss() {
        checked_loss(state_.scale(0), network_.scales(), &results()->outcome.loss, &results()->checked_loss, stream_);
    }

    const Outcome& finish() {
        copy(outcome_.get(), &results()->outcome, sizeof(Outcome), stream_);
        stream_.wait();
        return *outcome_.get();
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Whether and how a GPU can do it

int attribute(cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, 0), "Asking for the GPU's properties failed");
    return value;
}
int capability() { return 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor); }

// What CUDA and cuBLAS load when kernels are first launched.
constexpr int64_t LOADED_LATER = 256 << 20;

bool fits(const Setup& s, const GpuFacts& facts, int64_t free) { return gpu_layout(s, facts).total + LOADED_LATER <= free; }

int64_t largest_batch(Setup s, const GpuFacts& facts, int64_t free) {
    int64_t fitting = 0, too_large = s.B;
    while (too_large - fitting > 1) {
        s.B = (fitting + too_large) / 2;
        (fits(s, facts, free) ? fitting : too_large) = s.B;
    }
    return fitting;
}

void require_memory(const Setup& s, const GpuFacts& facts, int64_t free) {
    if (fits(s, facts, free)) return;
    const int64_t batch = largest_batch(s, facts, free);
    throw Error("This run needs " + std::to_string((gpu_layout(s, facts).total + LOADED_LATER) >> 20) + " MiB of GPU memory, but " +
                std::to_string(free >> 20) + " MiB are free; " +
                (batch ? "the largest --batch that fits is " + std::to_string(batch)
                       : "not even --batch 1 fits: choose a smaller --model or --seq") + ".");
}

GpuFacts facts_for(const Setup& s) {
    GpuFacts facts;
    facts.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "Asking for the GPU's memory failed");
    require_memory(s, facts, static_cast<int64_t>(free));
    facts.cache_fp8_weights = s.accumulate > 1 && linear_formats(s).w.fp8();
    facts.cache_fp8_weights = facts.cache_fp8_weights && fits(s, facts, static_cast<int64_t>(free));
    return facts;
}

Setup on_this_gpu(Setup s) {
    const bool fp8_gemm = capability() >= FP8_CAPABILITY;
    if (!fp8_gemm && s.recipe.x.fp8())
        std::fprintf(stderr,
                     "This GPU has no FP8 matrix products, which begin with compute capability 8.9: linear layers run in %s, on FP8 storage.\n",
                     info(s.recipe.compute).name);
    s.recipe = recipe_on_gpu(s.recipe, fp8_gemm);
    return s;
}

void require_kernels(const Setup& s) {
    for (const std::string& reason : {why_unsupported(s.optimizer), why_unsupported(s.recipe, capability())})
        if (!reason.empty()) throw Error(reason);
}

}  // namespace
}  // namespace coat

std::string coat::why_no_gpu() {
    GpuFound found{};
    cudaDriverGetVersion(&found.driver);
    cudaRuntimeGetVersion(&found.runtime);
    const cudaError_t error = cudaGetDeviceCount(&found.gpus);
    cudaGetLastError();  // forget it: this is a question
    found.driver_too_old = error == cudaErrorInsufficientDriver;
    if (error == cudaErrorNoDevice) found.gpus = 0;
    else if (error != cudaSuccess) found.error = cudaGetErrorString(error);
    const bool usable = found.driver > 0 && error == cudaSuccess && found.gpus > 0;
    if (usable) found.capability = capability(), found.kernels_fit = kernels_fit();
    return why_unsupported(found);
}

std::unique_ptr<coat::Model> coat::make_gpu(const Setup& setup) {
    const std::string missing = why_no_gpu();
    if (!missing.empty()) throw Error("--device gpu cannot be used: " + missing + ".");
    gpu::check(cudaSetDevice(0), "Choosing the GPU failed");
    const Setup here = on_this_gpu(setup);
    require_kernels(here);
    return std::make_unique<Gpu>(here, facts_for(here));
}
