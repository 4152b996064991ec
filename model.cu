// model.cu - one training step on the GPU: Llama and GPT-2, forward, backward and update, in any recipe.
//
// It mirrors the CPU reference (reference.cpp) with the kernels of coat.cuh, adamw.cuh and gpu/. Read
// Network::block_forward() and block_backward() first: they follow the table that --plan prints. There are
// three rules:
//   - Everything is in one allocation, laid out by plan.cpp. Nothing is allocated after the start, and within
//     a step the host never waits for the GPU.
//   - Saved for backward is what coat.h's saved_per_layer() lists. What can be recomputed elementwise is
//     recomputed on the way into the next GEMM's operand.
//   - Memory is reused. The gradient of the residual stream takes the place of the final norm's input.
//     Gradients of weights take the place of saved activations that backward no longer needs (plan.h).
#include <algorithm>
#include <cstdio>
#include <functional>

#include "adamw.cuh"
#include "coat.cuh"
#include "gpu/attention.cuh"
#include "gpu/cuda.cuh"
#include "gpu/gemm.cuh"
#include "gpu/layers.cuh"
#include "plan.h"

namespace coat {
namespace {

using namespace gpu;

// One allocation for everything, laid out by plan.cpp.
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

// What a step finds out, on the device until the step ends.
struct Outcome {
    double loss;
    GradientState gradients;
    uint32_t without_scale;  // operands whose history of amaxes is still empty
};
struct Results {
    Outcome outcome;
    double checked_loss;  // NaN if FP8 codes have hidden a value that is not finite
    QuantStats stats[static_cast<int>(Kind::Count)];
    double partials[GRADIENT_PARTIALS];
};

// The rows [first, first + n) of a view that is dense, in groups or per tensor.
View rows(const View& v, int64_t first, int64_t n) {
    uint8_t* scales = static_cast<uint8_t*>(v.scales);
    const bool grouped = v.quant.fp8() && v.quant.granularity.rows == 1;
    return {static_cast<uint8_t*>(v.codes) + v.quant.code_bytes(first, v.cols),
            grouped ? scales + first * v.quant.scale_cols(v.cols) * info(v.quant.scale).bytes : v.scales, n,
            v.cols, v.quant};
}

// ---------------------------------------------------------------------------------------------------------------------
// Weights, gradients and moments, by parameter

constexpr int64_t LINEARS = 4;  // linear layers of a block: qkv, attention_out, gate_up, down

class State {
public:
    const Setup& setup;
    const std::vector<Param> params;
    const std::vector<BucketRange> buckets;
    const Quant compute, gradient_quant;
    // Delayed scaling: some operand may have an empty history, and is scaled just in time.
    bool some_without_scale = false;

    State(const Setup& s, const Arena& arena, cudaStream_t cuda)
        : setup(s), params(parameters(s.config)),
          buckets(bucket_ranges(params)), compute{s.recipe.compute}, gradient_quant{gradient_format(s)},
          arena_(arena),
          cuda_(cuda), weights_{arena.at(arena.layout.weights.offset), remainders(), compute.format} {
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
        return dense_view(
            static_cast<uint8_t*>(weights_.values) + params[i].offset * info(compute.format).bytes,
            params[i]);
    }
    View gradient(size_t i) const {
        return {arena_.at(arena_.layout.gradients[i]), nullptr, params[i].rows, params[i].cols,
                gradient_quant};
    }
    // One TensorScale for each parameter; behind them those of the operands of the linear layers, four layers
    // a block.
    TensorScale* scale(size_t i) const { return arena_.work<TensorScale>(Work::Scales) + i; }
    TensorScale* operand_scales(int64_t layer, LinearOperand o) const {
        return scale(params.size()) + (static_cast<int>(o) * setup.config.L + layer) * LINEARS;
    }
    int64_t operand_scales() const { return OPERANDS * LINEARS * setup.config.L; }
    bool delayed() const { return setup.recipe.scaling == Scaling::Delayed; }

    // Weights as coat.h's initial() gives them. Moments are zero: max = 0 and k = 1 in every group.
    void initialize() {
        const GpuLayout& at = arena_.layout;
        clear(arena_.at(at.moments.offset), at.moments.bytes + at.scales.bytes, cuda_);
        clear(arena_.at(at.delayed.offset), at.delayed.bytes, cuda_);
        clear(scale(0),
              (static_cast<int64_t>(params.size()) + operand_scales()) *
                  static_cast<int64_t>(sizeof(TensorScale)),
              cuda_);
        expect_missing_scales();
        const std::vector<float> ones(static_cast<size_t>(most_groups()), 1.0f);
        for (size_t i = 0; i < params.size(); i++) {
            gpu::initialize(weights_, params[i], i, live_elements(setup.config, params[i]), setup.seed,
                            cuda_);
            refresh_scale(i);
            for (const MomentView& m : {moment(i, false), moment(i, true)})
                if (m.k) copy(m.k, ones.data(), params[i].groups() * 4, cuda_);
        }
        check(cudaStreamSynchronize(cuda_), "Initializing the weights failed");
    }

    // Delayed scaling: amaxes at the start of a step, and the next step's scales at its end.
    void clear_amaxes() {
        check(cudaMemset2DAsync(&scale(params.size())->amax, sizeof(TensorScale), 0, sizeof(float),
                                operand_scales(), cuda_),
              "Clearing amaxes failed");
    }
    void expect_missing_scales() { some_without_scale = delayed() && linear_formats(setup).x.fp8(); }
    void end_delayed_step(Results* results) {
        for (LinearOperand o : {LinearOperand::X, LinearOperand::W, LinearOperand::G})
            gpu::end_delayed_step(operand_scales(0, o), LINEARS * setup.config.L, history(0, o),
                                  setup.recipe.history, setup.recipe.margin, quant_of(setup.recipe, o).format,
                                  &results->outcome.gradients.skip, &results->outcome.without_scale, cuda_);
    }

    void update(const AdamW& a, Results* results) {
        update({0, params.size(), 0, total()}, a, {a.clip}, results);
    }
    void update_bucket(int64_t bucket, const AdamW& a, Results* results) {
        update(buckets[bucket], a, {a.clip, norm_correction_at(a, bucket)}, results);
    }

    void measure(const BucketRange& bucket, QuantStats* stats) const {
        for (size_t i = bucket.first; i < bucket.last; i++)
            measure_moments(setup.optimizer, segments() + i, params[i].size(), weights_, gradient(i).codes,
                            gradient_quant.format, params[i].offset, stats + static_cast<int>(Kind::Moment1),
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

    // Elements of the flat order.
    int64_t total() const { return params.back().offset + params.back().padded_size(); }
    int16_t* remainders() const {
        return arena_.layout.remainder.bytes
                   ? reinterpret_cast<int16_t*>(arena_.at(arena_.layout.remainder.offset))
                   : nullptr;
    }
    Segment* segments() const { return arena_.work<Segment>(Work::Segments); }
    View dense_view(uint8_t* data, const Param& p) const { return {data, nullptr, p.rows, p.cols, compute}; }

    void update(const BucketRange& which, const AdamW& a, const Clipping& clip, Results* results) {
        const int64_t n = static_cast<int64_t>(which.last - which.first);
        GradientState* state = &results->outcome.gradients;
        const void* gradients = gradient(which.first).codes;
        gradient_norm(gradients, gradient_quant.format, which.elements, &results->checked_loss, clip, state,
                      results->partials, cuda_);
        clear(scale(which.first), n * static_cast<int64_t>(sizeof(TensorScale)), cuda_);
        gpu::adamw(a, setup.optimizer, segments() + which.first, static_cast<int>(n),
                   {which.offset, which.elements}, weights_, rounding_key(setup.seed, a.step), gradients,
                   gradient_quant.format, state, cuda_);
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
        return {arena_.at(at.codes), floats(at.max), setup.optimizer.expands(format) ? floats(at.k) : nullptr,
                format};
    }
    Segment segment(size_t i) const {
        const Param& p = params[i];
        return {p.offset,        p.size(),     moment(i, false),
                moment(i, true), p.role.decay, p.role.linear ? scale(i) : nullptr};
    }

    // Linear layer number `linear` has bucket linear + 1: bucket 0 is the embedding's.
    float* history(int64_t linear, LinearOperand o) const {
        float* all = reinterpret_cast<float*>(arena_.at(arena_.layout.delayed.offset));
        return all + (static_cast<int>(o) * setup.config.L * LINEARS + linear) * setup.recipe.history;
    }

    // For weights that were written: the amax that the optimizer leaves for those that it updates.
    void refresh_scale(size_t i) {
        if (!params[i].role.linear) return;
        clear(scale(i), sizeof(TensorScale), cuda_);
        if (compute.format != Format::F32) amax(stored(weight(i)), scale(i), cuda_);
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

    // Where a tensor is, for those that are stored as read() and write() pass them.
    std::pair<void*, int64_t> find(const std::string& name, size_t i, const std::string& suffix) const {
        const Param& p = params[i];
        const MomentView m = moment(i, false), v = moment(i, true);
        const int64_t m_scales = setup.optimizer.scales(m.format, p.size()) * 4,
                      v_scales = setup.optimizer.scales(v.format, p.size()) * 4;
        const struct {
            const char* suffix;
            void* data;
            int64_t bytes;
        } table[] = {
            {"", weight(i).codes, p.size() * 2},
            {".remainder", weights_.remainder ? weights_.remainder + p.offset : nullptr, p.size() * 2},
            {".m", m.codes, p.size() * info(m.format).bytes},
            {".m.max", m.max, m_scales},
            {".m.k", m.k, m_scales},
            {".v", v.codes, p.size() * info(v.format).bytes},
            {".v.max", v.max, v_scales},
            {".v.k", v.k, v_scales},
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

    // The fp32 recipe stores FP32 masters. Files have them as BF16 and remainder: they are converted piece by
    // piece in the scratch of the GEMMs, which is free between steps.
    static constexpr int64_t PIECE = 1 << 21;
    bool is_master(const std::string& suffix) const {
        return compute.format == Format::F32 && (suffix.empty() || suffix == ".remainder");
    }
    float* piece() const { return arena_.work<float>(Work::GemmScratch); }
    uint16_t* piece_weights() const { return reinterpret_cast<uint16_t*>(piece() + PIECE); }
    int16_t* piece_remainders() const { return reinterpret_cast<int16_t*>(piece() + PIECE) + PIECE; }
    float* master(size_t i) const { return static_cast<float*>(weight(i).codes); }

    void read_half(size_t i, bool remainder, uint16_t* out) const {
        for (int64_t first = 0; first < params[i].size(); first += PIECE) {
            const int64_t n = std::min(PIECE, params[i].size() - first);
            split_master(master(i) + first, piece_weights(), piece_remainders(), n, cuda_);
            copy(out + first, remainder ? static_cast<void*>(piece_remainders()) : piece_weights(), n * 2,
                 cuda_);
            check(cudaStreamSynchronize(cuda_), "Reading a tensor failed");
        }
    }
    void write_half(size_t i, bool remainder, const uint16_t* in) {
        for (int64_t first = 0; first < params[i].size(); first += PIECE) {
            const int64_t n = std::min(PIECE, params[i].size() - first);
            split_master(master(i) + first, piece_weights(), piece_remainders(), n, cuda_);
            copy(remainder ? static_cast<void*>(piece_remainders()) : piece_weights(), in + first, n * 2,
                 cuda_);
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
// The network: one micro-batch forward and backward, in the order of the --plan print-out

struct Vector {  // a norm weight or a bias; nulls where the architecture has none
    const void* values = nullptr;
    View gradient{};
};
struct NormLayer {
    Vector weight, bias;
};
// A linear layer y = x w^T + bias, and the scales of the operands of its three GEMMs.
struct Linear {
    View weight, gradient;   // (out, in)
    Vector bias;             // (out)
    TensorScale *x, *w, *g;  // of the input, the weight, and the gradient of the output
    uint8_t* cached_weight;  // FP8 codes and scales, then the transposed ones; null: made when needed
    View saved_x{};          // with --recompute off: the input as an operand; else empty
};
struct Layer {
    NormLayer norm1, norm2;
    Linear qkv, attention_out, gate_up, down;
    // As in coat.h, saved_per_layer().
    View saved_norm1_input, saved_qkv, saved_attention, saved_lse, saved_norm2_input, saved_gate_up;
    int64_t bucket;  // of qkv; those of attention_out, gate_up and down follow
};

struct Batch {  // on the device
    const int32_t *tokens, *targets;
    int64_t B, T;
    const int32_t* order = nullptr;  // the last three for backward: embedding_order()
    const EmbeddingChunk* chunks = nullptr;
    int64_t number_of_chunks = 0;
};

class Network {
public:
    QuantStats* stats = nullptr;  // one per Kind, on the device; null: not measured
    // Called as soon as backward has a bucket's gradients and no longer needs its weights.
    std::function<void(int64_t bucket)> bucket_done;

    Network(const Setup& s, const GpuFacts& facts, const Arena& arena, State& state, Gemms& gemms,
            cudaStream_t cuda)
        : config_(s.config), recipe_(s.recipe), formats_(linear_formats(s)), arena_(arena), state_(state),
          gemms_(gemms), cuda_(cuda), caches_weights_(facts.cache_fp8_weights),
          embedding_(state.index("embedding")), head_(state.index(config_.tied ? "embedding" : "head")),
          positions_(config_.arch.rope ? embedding_ : state.index("positions")) {
        uint8_t* cache = caches_weights_ ? arena.work<uint8_t>(Work::CachedWeights) : nullptr;
        for (int64_t l = 0; l < config_.L; l++) layers_.push_back(make_layer(l, cache));
        final_norm_ = make_norm("final_norm");
        if (config_.arch.rope) rope_table(config_, s.T, arena.work<float2>(Work::RopeTable), cuda_);
        const AttentionShape shape = attention_shape(config_, s.B, s.T, recipe_.compute);
        if (static_cast<int64_t>(attention_workspace(shape)) > arena_.place(Work::AttentionScratch).bytes ||
            static_cast<int64_t>(norm_backward_workspace(config_.C)) > arena_.place(Work::NormPartials).bytes)
            throw Error(
                "The memory plan has less room for attention or norms than their kernels need; correct "
                "work_rows() in plan.cpp.");
    }

    // Hidden states before the final norm, in residual_; and the final norm's statistics.
    void forward(const Batch& batch) {
        set_shape(batch);
        if (!state_.delayed()) state_.clear_amaxes();
        const Norm norm1 = norm_of(layers_[0].norm1, layers_[0].saved_norm1_input);
        const View positions = config_.arch.rope ? View{} : state_.weight(positions_);
        gpu::embedding_forward(batch.tokens, state_.weight(embedding_), positions, T_, residual_after(norm1),
                               norm1, needs_amax(layers_[0].qkv.x), cuda_);
        finish_residual(norm1);
        for (int64_t l = 0; l < config_.L; l++) block_forward(l);
    }

    // The FP8 copies of the weights, if they are cached and not up to date. Comes before anything that uses
    // them.
    void prepare() {
        if (!caches_weights_ || (cache_is_valid_ && !stats)) return;
        for (const Layer& b : layers_)
            for (const Linear* w : {&b.qkv, &b.attention_out, &b.gate_up, &b.down}) {
                take_weight_amax(*w);
                quantize(stored(w->weight), cached_operand(*w), stats_of(Kind::Weight), cuda_);
            }
        cache_is_valid_ = true;
    }

    // *loss += the mean loss of the micro-batch.
    void evaluate(const Batch& batch, double* loss) {
        forward(batch);
        head(batch, 1.0 / static_cast<double>(N_), false, loss);
    }

    // *loss += the mean loss of the micro-batch / accumulate. Its gradients are added, or assigned if it is
    // the first of a step: all but those of the embeddings, which follow in embedding_backward().
    void forward_and_backward(const Batch& batch, int64_t accumulate, bool first, double* loss) {
        first_ = first;
        saves_outputs_ = !state_.setup.recompute;
        forward(batch);
        head(batch, 1.0 / static_cast<double>(N_ * accumulate), true, loss);
        for (int64_t l = config_.L; l-- > 0;) block_backward(l);
        saves_outputs_ = false;
    }
    void embedding_backward(const Batch& batch, bool first) {
        set_shape(batch);  // forward may have been a recording, which leaves nothing here
        first_ = first;
        begin_bucket(0);
        gpu::embedding_backward(residual_gradient(), batch.order, batch.chunks, batch.number_of_chunks,
                                state_.gradient(embedding_), arena_.work<float>(Work::EmbeddingPartials),
                                cuda_);
        if (!config_.arch.rope)
            positions_backward(residual_gradient(), T_, state_.gradient(positions_), cuda_);
        end_bucket(0);
    }

    View token_logits(int64_t token) { return head_logits(token, 1); }  // (1, padded_V)

    int64_t scales() const { return static_cast<int64_t>(state_.params.size()) + state_.operand_scales(); }

    // Delayed scaling: before a step, or before a pass of its own, and after a step. Cached weights are
    // quantized within the step, because that takes their amaxes.
    void begin_delayed() {
        if (!state_.delayed()) return;
        state_.clear_amaxes();
        cache_is_valid_ = false;
    }
    void end_delayed_step(Results* results) {
        if (state_.delayed()) state_.end_delayed_step(results);
    }

    void weights_changed() { cache_is_valid_ = false; }

private:
    const ModelConfig& config_;
    const Recipe& recipe_;
    const LinearFormats formats_;  // of the operands of every linear layer
    const Arena& arena_;
    State& state_;
    Gemms& gemms_;
    cudaStream_t cuda_;
    const bool caches_weights_;
    // Parameters; positions_ only where the architecture has them.
    const size_t embedding_, head_, positions_;
    bool cache_is_valid_ = false, first_ = true, saves_outputs_ = false;
    std::vector<Layer> layers_;
    NormLayer final_norm_;
    int64_t B_ = 0, T_ = 0, N_ = 0;
    View residual_{};  // the residual stream as the next residual_add reads it, (N, C)

    // --- One block: each comment is a row of the --plan print-out
    void block_forward(int64_t l) {
        const Layer& b = layers_[l];
        const bool last = l + 1 == config_.L;
        const Norm norm1 = norm_of(b.norm1, b.saved_norm1_input),
                   norm2 = norm_of(b.norm2, b.saved_norm2_input);
        const Norm next = last ? norm_of(final_norm_, final_input())
                               : norm_of(layers_[l + 1].norm1, layers_[l + 1].saved_norm1_input);
        const View qkv = attention_view(b.saved_qkv, Work::Qkv),
                   out = attention_view(b.saved_attention, Work::AttentionOutput);
        const View saved_out = of_batch(b.saved_attention), gate_up = of_batch(b.saved_gate_up);
        const View branch = compute_view(Work::Branch, config_.C);

        linear_forward(b.qkv, norm(norm1), qkv);                               // norm 1; q, k, v projection
        if (config_.arch.rope) rope_forward(rope(), qkv, cuda_);               // rotary positions
        save_attention(qkv, b.saved_qkv);
        attention_forward(attention(), qkv.codes, out.codes, static_cast<float*>(b.saved_lse.codes), cuda_);
        save_attention(out, b.saved_attention);
        take_amax(stored(saved_out), needs_amax(b.attention_out.x));
        linear_forward(b.attention_out, stored(saved_out), branch);            // attention output projection
        residual_forward(branch, norm2, needs_amax(b.gate_up.x));              // residual add

        gate_up_forward(b, norm(norm2));                                       // norm 2; gate and up projection
        // SiLU(gate) x up; down projection; residual add
        linear_forward(b.down, activation(config_.arch.gated, gate_up), branch);
        residual_forward(branch, next, last ? nullptr : needs_amax(layers_[l + 1].qkv.x));
    }

    // The gradient of the residual stream goes through the block in place. norm_backward() leaves behind what
    // the next lines need: the statistics with which the norm's output, an operand of wgrad, is recomputed;
    // and the amax of the gradient that it writes.
    void block_backward(int64_t l) {
        const Layer& b = layers_[l];
        const Norm norm1 = norm_of(b.norm1, b.saved_norm1_input),
                   norm2 = norm_of(b.norm2, b.saved_norm2_input);
        const View g = residual_gradient(), gate_up = of_batch(b.saved_gate_up),
                   dx = compute_view(Work::Branch, config_.C);

        begin_bucket(b.bucket + 3);  // down projection
        // The gradient of the activation's output.
        const View dact = compute_view(Work::ActivationGradient, config_.F);
        Operand g8 = output_gradient(b.down, stored(g), arena_.work(Work::GradientOperand), nullptr);
        wgrad(b.down, g8, activation(config_.arch.gated, gate_up));
        dgrad(b.down, g8, dact);
        end_bucket(b.bucket + 3);

        begin_bucket(b.bucket + 2);  // activation; gate and up projection; norm 2
        const Lazy dgate_up = activation_backward(config_.arch.gated, gate_up, dact);
        // Codes as large as the saved elements take their place.
        const bool in_place = formats_.g.granularity == PER_TENSOR &&
                              info(formats_.g.format).bytes == info(gate_up.quant.format).bytes;
        g8 = output_gradient(b.gate_up, dgate_up, in_place ? gate_up.codes : arena_.work(Work::GradientOperand),
                             needs_amax(b.gate_up.g));
        dgrad(b.gate_up, g8, dx);
        residual_backward(norm2, b.norm2, dx, needs_amax(b.attention_out.g));
        wgrad(b.gate_up, g8, norm(norm2));
        end_bucket(b.bucket + 2);

        begin_bucket(b.bucket + 1);  // attention output projection
        const View dout = compute_view(Work::Branch, config_.q_cols());
        g8 = output_gradient(b.attention_out, stored(g), arena_.work(Work::GradientOperand), nullptr);
        wgrad(b.attention_out, g8, stored(of_batch(b.saved_attention)));
        dgrad(b.attention_out, g8, dout);
        end_bucket(b.bucket + 1);

        begin_bucket(b.bucket);  // attention; rotary positions; q, k, v projection; norm 1
        const View qkv = load_attention(b.saved_qkv, Work::Qkv),
                   out = load_attention(b.saved_attention, Work::AttentionOutput);
        // The saved gate and up are no longer needed; plan.cpp decides whether dqkv fits in their place.
        const bool reuse = arena_.place(Work::QkvGradient).bytes == 0;
        const View dqkv = compute_view(reuse ? b.saved_gate_up.codes : arena_.work(Work::QkvGradient), N_,
                                       config_.qkv_cols());
        attention_backward(attention(), qkv.codes, out.codes, static_cast<const float*>(b.saved_lse.codes),
                           dout.codes, dqkv.codes, arena_.work(Work::AttentionScratch), cuda_);
        const bool rotated = config_.arch.rope;
        if (rotated) rope_backward(rope(), dqkv, needs_amax(b.qkv.g), cuda_);
        g8 = output_gradient(b.qkv, stored(dqkv), arena_.work(Work::GradientOperand),
                             rotated ? nullptr : needs_amax(b.qkv.g));
        dgrad(b.qkv, g8, dx);
        residual_backward(norm1, b.norm1, dx, l > 0 ? needs_amax(layers_[l - 1].down.g) : nullptr);
        wgrad(b.qkv, g8, norm(norm1));
        end_bucket(b.bucket);
    }

    // --- The three GEMMs of a linear layer
    void linear_forward(const Linear& w, const Lazy& x, const View& y) {
        gemms_.run(Gemm::Fprop, input(w, x, Gemm::Fprop), weight(w, Gemm::Fprop), gemm_rows(y), false,
                   w.bias.values, cuda_);
    }
    void dgrad(const Linear& w, const Operand& g8, const View& dx) {
        gemms_.run(Gemm::Dgrad, g8, weight(w, Gemm::Dgrad), dx, false, nullptr, cuda_);
    }
    void wgrad(const Linear& w, const Operand& g8, const Lazy& x) {
        gemms_.run(Gemm::Wgrad, g8, input(w, x, Gemm::Wgrad), w.gradient, !first_, nullptr, cuda_);
    }

    // The widest tensor of a layer is saved in groups. In the compute dtype it exists for GATE_UP_TOKENS tokens at
    // a time. While it goes to groups, the amax of the activation's output is taken.
    void gate_up_forward(const Layer& b, const Lazy& x) {
        const View gate_up = of_batch(b.saved_gate_up);
        TensorScale* const act = needs_amax(b.down.x);
        if (!gate_up.quant.fp8()) {
            linear_forward(b.gate_up, x, gate_up);
            return take_amax(activation(config_.arch.gated, gate_up), act);
        }
        const Operand x8 = input(b.gate_up, x, Gemm::Fprop), w8 = weight(b.gate_up, Gemm::Fprop);
        // 1x128 scales are laid out for the GEMM of all rows: no part of them can be used alone.
        const int64_t step = formats_.x.granularity == PER_TENSOR ? GATE_UP_TOKENS : N_;
        for (int64_t first = 0; first < N_; first += step) {
            const View part = compute_view(arena_.work(Work::GateUp), std::min(step, N_ - first), gate_up.cols);
            gemms_.run(Gemm::Fprop, {rows(x8.view, first, gemm_rows(part).rows)}, w8, gemm_rows(part), false,
                       b.gate_up.bias.values, cuda_);
            quantize_gate_up(config_.arch.gated, part, rows(gate_up, first, part.rows), act,
                             stats_of(Kind::ActivationInput), cuda_);
        }
    }

    // --- Operands: a tensor in the format that a GEMM reads
    // A dense tensor that is stored in the wanted format is used in place. FP8 codes go to `codes` and,
    // transposed, to `transposed`; either may be null.
    Operand operand(const Lazy& x, const Quant& q, void* codes, void* transposed, TensorScale* scale,
                    Kind kind) {
        if (x.op == LazyOp::Stored && !q.fp8() && !x.a.quant.fp8()) return {x.a};
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
            return p ? static_cast<uint8_t*>(p) + q.code_bytes(rows, cols) : nullptr;
        };
        return {{codes, behind(codes), rows, cols, q}, transposed, behind(transposed), scale};
    }
    // FP8 GEMMs want a multiple of 16 rows, which a prompt may not have: they read and write a few rows more,
    // whose values are undefined and never used.
    View gemm_rows(View v) const { return v.rows = formats_.x.fp8() ? round_up(v.rows, 16) : v.rows, v; }

    // The input of a linear layer: fprop reduces over its columns, wgrad over its rows. With --recompute off
    // the forward pass saves what wgrad will read: FP8 codes transposed, or dense values.
    Operand input(const Linear& w, const Lazy& x, Gemm use) {
        const Quant& q = formats_.x;
        void* const place = arena_.work(x.op == LazyOp::Activation ? Work::ActivationOperand : Work::InputOperand);
        void* const saved = saves_outputs_ ? w.saved_x.codes : nullptr;
        if (saved && use == Gemm::Wgrad) return describe(x.rows, x.cols, q, saved, saved, w.x);
        if (saved)
            return operand(x, q, q.fp8() ? place : saved, q.fp8() ? saved : nullptr, w.x, Kind::LinearInput);
        const bool transposed = q.fp8() && use == Gemm::Wgrad;
        return operand(x, q, transposed ? nullptr : place, transposed ? place : nullptr, w.x,
                       Kind::LinearInput);
    }
    // The weight: fprop reduces over its columns, dgrad over its rows.
    Operand weight(const Linear& w, Gemm use) {
        if (formats_.w.fp8() && w.cached_weight) return cached_operand(w);
        void* const place = arena_.work(Work::WeightOperand);
        take_weight_amax(w);
        return operand(stored(w.weight), formats_.w, use == Gemm::Dgrad ? nullptr : place,
                       use == Gemm::Dgrad ? place : nullptr, w.w, Kind::Weight);
    }
    Operand cached_operand(const Linear& w) const {
        const int64_t rows = w.weight.rows, cols = w.weight.cols;
        return describe(rows, cols, formats_.w, w.cached_weight,
                        w.cached_weight + formats_.w.operand_bytes(rows, cols), w.w);
    }
    // The gradient of the output, for dgrad (which reduces over its columns) and wgrad (over its rows); and
    // the gradient of the bias. amax: where the amax is still to be taken; null if it has been. A bias sums
    // the unrounded gradient of an FP8 operand, in a pass that takes the amax too; it sums the stored values
    // of any other.
    Operand output_gradient(const Linear& w, const Lazy& g, void* codes, TensorScale* amax) {
        const Quant& q = formats_.g;
        if (q.fp8() && w.bias.values) bias_gradient(w, g, Format::F32, amax);
        else take_amax(g, amax);
        const Operand g8 = operand(g, q, codes, q.fp8() ? arena_.work(Work::GradientOperandTransposed) : nullptr,
                                   w.g, Kind::Gradient);
        if (!q.fp8() && w.bias.values) bias_gradient(w, stored(g8.view), recipe_.compute, nullptr);
        return g8;
    }
    void bias_gradient(const Linear& w, const Lazy& g, Format rounding, TensorScale* amax) {
        column_sums(g, rounding, w.bias.gradient, arena_.work<float>(Work::ColumnPartials), amax, cuda_);
    }

    // --- Amaxes: who takes them
    // Per-tensor scaling just in time needs the amax before the codes: the kernel that produces the tensor
    // takes it. Delayed scaling needs that only while a history is empty. Null: nobody has to take this amax.
    TensorScale* needs_amax(TensorScale* scale) const {
        const bool just_in_time = !state_.delayed() || state_.some_without_scale;
        return formats_.x.fp8() && formats_.x.granularity == PER_TENSOR && just_in_time ? scale : nullptr;
    }
    void take_amax(const Lazy& x, TensorScale* scale) const {
        if (scale) amax(x, scale, cuda_);
    }
    // The optimizer leaves the amax of a weight, but not where scaling is delayed.
    void take_weight_amax(const Linear& w) const {
        take_amax(stored(w.weight), state_.delayed() ? needs_amax(w.w) : nullptr);
    }

    // --- Residual stream and attention
    // residual += branch. The next norm's input is saved; the amax of its output goes to y_amax.
    void residual_forward(const View& branch, const Norm& next, TensorScale* y_amax) {
        residual_add(residual_, branch, residual_after(next), next, y_amax, cuda_);
        finish_residual(next);
    }
    void finish_residual(const Norm& next) {
        const bool groups = next.in.quant.fp8();
        residual_ = groups ? residual_after(next) : next.in;
        if (groups) measure_groups(stored(residual_), stats_of(Kind::NormInput), cuda_);
    }
    // Beside a norm input in groups, the residual stream goes on in the compute dtype; otherwise the two are
    // one tensor.
    View residual_after(const Norm& next) const {
        return next.in.quant.fp8() ? compute_view(Work::Residual, config_.C) : View{};
    }
    void residual_backward(const Norm& n, const NormLayer& layer, const View& dy, TensorScale* g_amax) {
        norm_backward(n, dy, residual_gradient(), residual_gradient(), g_amax, layer.weight.gradient,
                      layer.bias.gradient, arena_.work<float>(Work::NormPartials), cuda_);
    }

    // Attention computes in the compute dtype. Where its inputs and output are saved in groups, it computes
    // with what the groups hold: so the saved log-sum-exp belongs to what backward reads.
    View attention_view(const View& saved, Work work) const {
        return saved.quant.fp8() ? compute_view(work, saved.cols) : of_batch(saved);
    }
    void save_attention(const View& x, const View& saved) {
        if (saved.quant.fp8()) quantize_and_dequantize(x, of_batch(saved), stats_of(Kind::Attention), cuda_);
    }
    View load_attention(const View& saved, Work work) {
        const View x = attention_view(saved, work);
        if (saved.quant.fp8()) dequantize(of_batch(saved), x, cuda_);
        return x;
    }

    // --- Head
    // Logits (n, padded_V) of the tokens from `first` on.
    View head_logits(int64_t first, int64_t n) {
        const View logits = compute_view(arena_.work(Work::Logits), n, config_.padded_V());
        Norm part = norm_of(final_norm_, final_input());
        part.in = rows(part.in, first, n);
        part.stats += first;
        const Quant dense{recipe_.compute};
        const Operand y =
            operand(norm(part), dense, arena_.work(Work::FinalNorm), nullptr, nullptr, Kind::LinearInput);
        gemms_.run(Gemm::Fprop, y, {state_.weight(head_)}, logits, false, nullptr, cuda_);
        return logits;
    }
    // Loss, and in backward the gradient of the final norm's input. Logits exist for HEAD_TOKENS tokens at a
    // time; their gradients take their place. The head's gradient is summed in FP32 where a BF16 sum would be
    // rounded too often (plan.h, head_sum_apart).
    void head(const Batch& batch, double scale, bool backward, double* loss) {
        const View dy = compute_view(Work::Branch, config_.C), gradient = state_.gradient(head_);
        const bool in_fp32 = head_sum_apart(gradient.quant.format, N_);
        const View sum =
            in_fp32 ? View{arena_.work(Work::HeadGradient), nullptr, gradient.rows, gradient.cols, Q_F32}
                    : gradient;
        float* losses = arena_.work<float>(Work::Losses);
        if (backward && in_fp32 && !first_) dequantize(gradient, sum, cuda_);
        for (int64_t first = 0; first < N_; first += HEAD_TOKENS) {
            const int64_t n = std::min(HEAD_TOKENS, N_ - first);
            const View logits = head_logits(first, n),
                       y = compute_view(arena_.work(Work::FinalNorm), n, config_.C);
            cross_entropy(logits, config_.V, batch.targets + first,
                          backward ? static_cast<float>(scale) : 0.0f, losses + first, cuda_);
            if (!backward) continue;
            gemms_.run(Gemm::Wgrad, {logits}, {y}, sum, !(first_ && first == 0), nullptr, cuda_);
            gemms_.run(Gemm::Dgrad, {logits}, {state_.weight(head_)}, rows(dy, first, n), false, nullptr,
                       cuda_);
        }
        loss_sum(losses, N_, scale, loss, cuda_);
        if (!backward) return;
        if (in_fp32) quantize(stored(sum), {gradient}, nullptr, cuda_);
        const int64_t bucket = static_cast<int64_t>(state_.buckets.size()) - 1;
        begin_bucket(bucket);
        norm_backward(norm_of(final_norm_, final_input()), dy, View{}, residual_gradient(),
                      needs_amax(layers_.back().down.g), final_norm_.weight.gradient,
                      final_norm_.bias.gradient, arena_.work<float>(Work::NormPartials), cuda_);
        end_bucket(bucket);
    }

    // --- Views
    void set_shape(const Batch& batch) { B_ = batch.B, T_ = batch.T, N_ = B_ * T_; }
    View of_batch(View saved) const { return saved.rows = N_, saved; }
    View compute_view(void* data, int64_t n, int64_t cols) const {
        return {data, nullptr, n, cols, Quant{recipe_.compute}};
    }
    View compute_view(Work w, int64_t cols) const { return compute_view(arena_.work(w), N_, cols); }
    View final_input() const {
        return compute_view(arena_.at(arena_.layout.final_norm_input.offset), N_, config_.C);
    }
    // Backward reads the final norm's input once, to write this over it.
    View residual_gradient() const { return final_input(); }
    Norm norm_of(const NormLayer& n, const View& in) const {
        float2* stats_of_rows = arena_.work<float2>(Work::NormStatistics);
        return {of_batch(in),  n.weight.values,  n.bias.values,
                stats_of_rows, config_.arch.rms, config_.norm_eps};
    }
    Rope rope() const {
        return {arena_.work<float2>(Work::RopeTable), T_, config_.HS(), config_.q_cols() + config_.kv_cols()};
    }
    AttentionShape attention() const { return attention_shape(config_, B_, T_, recipe_.compute); }
    QuantStats* stats_of(Kind k) const { return stats ? stats + static_cast<int>(k) : nullptr; }

    // --- Buckets
    // A step's first micro-batch assigns gradients. GEMMs do so by themselves; all other kernels add, so
    // their gradients are cleared. A tied embedding has the head's part already.
    void begin_bucket(int64_t number) const {
        const BucketRange& bucket = state_.buckets[number];
        for (size_t i = bucket.first; first_ && i < bucket.last; i++) {
            const Param& p = state_.params[i];
            if (!p.role.linear && i != head_)
                clear(state_.gradient(i).codes, p.padded_size() * info(state_.gradient_quant.format).bytes,
                      cuda_);
        }
    }
    void end_bucket(int64_t number) const {
        if (bucket_done) bucket_done(number);
    }

    // --- Construction
    Vector make_vector(const std::string& name) const {
        const size_t i = state_.index(name);
        return {state_.weight(i).codes, state_.gradient(i)};
    }
    NormLayer make_norm(const std::string& name) const {
        return {make_vector(name + ".weight"), config_.arch.rms ? Vector{} : make_vector(name + ".bias")};
    }
    Linear make_linear(const std::string& name, int64_t l, int which, uint8_t*& cache,
                       const View& saved_x) const {
        const size_t i = state_.index(name);
        auto scale = [&](LinearOperand o) { return state_.operand_scales(l, o) + which; };
        const Linear w{state_.weight(i),
                       state_.gradient(i),
                       config_.arch.bias ? make_vector(name + ".bias") : Vector{},
                       scale(LinearOperand::X),
                       state_.delayed() ? scale(LinearOperand::W) : state_.scale(i),
                       scale(LinearOperand::G),
                       cache,
                       saved_x};
        const int64_t out = w.weight.rows, in = w.weight.cols;
        if (cache) cache += formats_.w.operand_bytes(out, in) + formats_.w.operand_bytes(in, out);
        return w;
    }
    Layer make_layer(int64_t l, uint8_t*& cache) const {
        const std::string name = "layers." + std::to_string(l) + ".";
        const std::vector<SavedTensor> table = saved_per_layer(state_.setup);
        auto saved = [&](Saved which) -> View {
            for (size_t i = 0; i < table.size(); i++) {
                if (table[i].which != which) continue;
                const int64_t N = arena_.layout.tokens, cols = table[i].cols;
                const int64_t offset = l * arena_.layout.layer_bytes + arena_.layout.saved_codes[i].offset;
                uint8_t* codes = arena_.at(arena_.layout.saved.offset + offset);
                return {codes, codes + table[i].quant.code_bytes(N, cols), N, cols, table[i].quant};
            }
            return {};
        };
        return {make_norm(name + "norm1"),
                make_norm(name + "norm2"),
                make_linear(name + "qkv", l, 0, cache, saved(Saved::Norm1Output)),
                make_linear(name + "attention_out", l, 1, cache, View{}),
                make_linear(name + "gate_up", l, 2, cache, saved(Saved::Norm2Output)),
                make_linear(name + "down", l, 3, cache, saved(Saved::ActivationOutput)),
                saved(Saved::Norm1Input),
                saved(Saved::Qkv),
                saved(Saved::Attention),
                saved(Saved::LogSumExp),
                saved(Saved::Norm2Input),
                saved(Saved::GateUp),
                state_.params[state_.index(name + "qkv")].bucket};
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// The Model that train.cpp drives

class Gpu : public Model {
public:
    Gpu(const Setup& s, const GpuFacts& facts)
        : setup_(s), arena_(setup_, facts),
          gemms_(arena_.work(Work::GemmScratch), s.recipe.fast_accumulation), state_(setup_, arena_, stream_),
          network_(setup_, facts, arena_, state_, gemms_, stream_), tokens_(batch_tokens()),
          targets_(batch_tokens()), order_(batch_tokens()), chunks_(batch_tokens()), outcome_(1),
          norms_(buckets()) {
        static_assert(sizeof(Results) <= 16 << 10 && Gemms::SCRATCH <= 32 << 20 &&
                          sizeof(TensorScale) == 16 && OPERANDS * LINEARS == 12 &&
                          sizeof(EmbeddingChunk) == 16 && COLUMN_PARTIALS == 128,
                      "as work_rows() in plan.cpp counts them");
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
        checked_loss(state_.scale(0), network_.scales(), &results()->outcome.loss, &results()->outcome.loss,
                     stream_);
        return finish().loss;
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        check_and_pin(tokens, tokens, n);
        upload(0, n);
        network_.begin_delayed();
        network_.prepare();
        network_.forward({device_tokens(), device_targets(), 1, n});
        const View row = network_.token_logits(n - 1),
                   wide{arena_.work(Work::GemmScratch), nullptr, 1, row.cols, Q_F32};
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
        network_.bucket_done = [&](int64_t bucket) {
            state_.measure(state_.buckets[bucket], results()->stats);
        };
        run(0, 1);
        state_.expansion_factors(report);
        copy(report.kinds, results()->stats, sizeof(report.kinds), stream_);
        stream_.wait();
        std::sort(report.k_m.begin(), report.k_m.end());
        std::sort(report.k_v.begin(), report.k_v.end());
        return report;
    }

    // Gradients can be read from the end of a step to the next forward pass.
    void read(const std::string& name, void* out) override { state_.read(name, out); }
    void write(const std::string& name, const void* in) override {
        state_.write(name, in);
        network_.weights_changed();
    }
    const Setup& setup() const override { return setup_; }

private:
    struct Hooks {  // takes back what one call has set in the network, also after an exception
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
    Pinned<double> norms_;  // by bucket: norm of its gradients and those of all later buckets
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

    // Two steps on made-up tokens, before the weights are set for good. In the first, CUDA loads every kernel
    // and each GEMM chooses its algorithm, on values like the real ones. The second is recorded.
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
            if (tokens[i] < 0 || tokens[i] >= setup_.config.V || targets[i] < 0 ||
                targets[i] >= setup_.config.V)
                throw Error("A token lies outside the vocabulary of " + std::to_string(setup_.config.V) +
                            "; choose --data and --model that belong together.");
        std::copy(tokens, tokens + n, tokens_.get());
        std::copy(targets, targets + n, targets_.get());
    }
    void upload(int64_t first, int64_t n) {
        copy(device_tokens(), tokens_.get() + first, n * 4, stream_);
        copy(device_targets(), targets_.get() + first, n * 4, stream_);
    }

    // One micro-batch of the pinned tokens. It is a recording unless a launch may differ from the last one:
    // while GEMMs are tuned or quantization is measured, when buckets are updated on the way, and as long as
    // an operand may lack its delayed scale. Meanwhile the host sorts the tokens for the embedding's
    // gradient.
    void run(int64_t micro_batch, int64_t accumulate) {
        const int64_t N = setup_.B * setup_.T;
        const bool first = micro_batch == 0;
        upload(micro_batch * N, N);
        auto work = [&] {
            network_.forward_and_backward(device_batch(), accumulate, first, &results()->outcome.loss);
        };
        if (network_.stats || network_.bucket_done || tuning_ || state_.some_without_scale) work();
        else (first ? first_micro_batch_ : later_micro_batch_).run(stream_, work);
        network_.embedding_backward(upload_order(micro_batch), first);
    }

    Batch device_batch() const { return {device_tokens(), device_targets(), setup_.B, setup_.T}; }

    Batch upload_order(int64_t micro_batch) {
        Batch batch = device_batch();
        const int64_t N = batch.B * batch.T, first = micro_batch * N;
        const EmbeddingOrder order = embedding_order(tokens_.get() + first, N, setup_.config.V);
        batch.order = arena_.work<int32_t>(Work::EmbeddingOrder),
        batch.chunks = arena_.work<EmbeddingChunk>(Work::EmbeddingChunks);
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
        checked_loss(state_.scale(0), network_.scales(), &results()->outcome.loss, &results()->checked_loss,
                     stream_);
    }

    const Outcome& finish() {
        copy(outcome_.get(), &results()->outcome, sizeof(Outcome), stream_);
        stream_.wait();
        return *outcome_.get();
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Whether this GPU can run a setup

int attribute(cudaDeviceAttr which) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, 0), "Asking for the GPU's properties failed");
    return value;
}
int capability() {
    return 10 * attribute(cudaDevAttrComputeCapabilityMajor) + attribute(cudaDevAttrComputeCapabilityMinor);
}

// Device memory that CUDA and cuBLAS take when kernels are first launched.
constexpr int64_t LOADED_LATER = 256 << 20;

bool fits(const Setup& s, const GpuFacts& facts, int64_t free) {
    return gpu_layout(s, facts).total + LOADED_LATER <= free;
}

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
    throw Error("This run needs " + std::to_string((gpu_layout(s, facts).total + LOADED_LATER) >> 20) +
                " MiB of GPU memory, but " + std::to_string(free >> 20) + " MiB are free; " +
                (batch ? "the largest --batch that fits is " + std::to_string(batch)
                       : "not even --batch 1 fits: choose a smaller --model or --seq") +
                ".");
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
                     "This GPU has no FP8 matrix products, which begin with compute capability 8.9: linear "
                     "layers run in %s, on FP8 storage.\n",
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
    cudaGetLastError();  // clear it: nothing has failed
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
