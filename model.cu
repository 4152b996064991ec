// model.cu - one training step on the GPU, from the first token to the last update: Llama and GPT-2 in any
// recipe, with the kernels of coat.cu, adamw.cu and gpu/. It mirrors the reference in reference_model.cpp.
//
// Read Network::step() first, and then on in the order in which a step runs: micro_batch(), forward(),
// head_and_loss(), layer_backward(), update. A layer's functions follow the table that --plan prints.
// LinearLayer stands before: its three GEMMs, and the operands that they read. There are three rules:
//   - Memory is one allocation (gpu/run.h; run.cpp has the map). What lasts is taken at the beginning. What a
//     step needs besides is taken where it is used, and given back by the function that took it
//     (Arena::Scope). Within a pass the host does not wait for the GPU.
//   - Saved for backward is what coat.h's saved_per_layer() lists. What can be computed again elementwise is
//     computed again on the way into the next GEMM's operand.
//   - An FP8 operand needs the amax of its tensor before its codes. Where the kernel that makes the tensor
//     can take it in passing, it is given the place (x_amax(), g_amax()); otherwise it is taken by a pass of
//     its own. A comment at each operand says who has taken it.
#include "gpu/attention.cuh"
#include "gpu/gemm.h"
#include "gpu/operators.h"
#include "gpu/ranks.h"
#include "gpu/run.h"

namespace coat {
namespace {

using namespace gpu;

// -----------------------------------------------------------------------------------------------------------
// A linear layer y = x w^T + bias

// What the linear layers of a model share.
struct LinearContext {
    Device& device;
    const Parameters& parameters;
    const Scales& scales;
    Exchange& exchange;
    Gemms& gemms;
    const bool caches_weights;  // FP8 weights are made once a step; else when they are needed
    const LinearFormats formats = linear_formats(device.setup);
    // Whether GEMMs write gradients of weights in this pass, as in a step's first micro-batch. Else they add.
    bool overwrites_gradients = true;
};

// x8, w8 and g8 are the input, the weight and the gradient of the output as a GEMM reads them: FP8 codes, or
// BF16 and FP32 in recipes without FP8. x8, and w8 unless it is cached, are made anew for each GEMM: backward
// needs them transposed, and keeping them takes memory. g8 serves two: the caller decides how long it lives.
class LinearLayer {
public:
    // param: number of the weight (out, in). A bias (out) is the parameter that follows it.
    LinearLayer(LinearContext& context, size_t param) : c_(context), param_(param) {}

    int64_t bucket() const { return weight().bucket; }  // of its gradients

    // Where producers of the input and of the output's gradient put their amaxes; null if nobody needs them.
    AmaxAndScale* x_amax() const { return if_needed(x_scale_); }
    AmaxAndScale* g_amax() const { return if_needed(g_scale_); }
    void take_x_amax(const Lazy& x) const { take_amax(x, x_amax()); }

    // y = x w^T + bias
    void forward(const Lazy& x, const View& y) {
        const Arena::Scope scope(arena());
        const Operand x8 = make_operand(x, ReportKind::LinearInput, false),
                      w8 = weight_operand(Pass::Forward);
        const void* const bias = biased_ ? c_.exchange.weight(param_ + 1).data : nullptr;
        c_.gemms.run(Gemm::Fprop, x8, w8, gemm_rows(y), false, bias, stream());
    }
    void dgrad(const Operand& g8, const View& dx) {
        const Arena::Scope scope(arena());
        c_.gemms.run(Gemm::Dgrad, g8, weight_operand(Pass::Backward), dx, false, nullptr, stream());
    }
    void wgrad(const Operand& g8, const Lazy& x) {
        const Arena::Scope scope(arena());
        const Operand x8 = make_operand(x, ReportKind::LinearInput, true);
        c_.gemms.run(Gemm::Wgrad, g8, x8, c_.exchange.gradient(param_), !c_.overwrites_gradients, nullptr,
                     stream());
    }

    // Memory for g8 (n, out), in the caller's scope. place: of the codes for dgrad, if they go elsewhere.
    Operand take_gradient(int64_t n, void* place = nullptr) {
        const Quant& q = c_.formats.g;
        return take_operand({.rows = n,
                             .cols = out_,
                             .quant = q,
                             .row_major = true,
                             .transposed = q.fp8(),
                             .scale = g_scale_,
                             .place = place});
    }
    // Whether the amax of g is in g_amax() already, or is to be taken by gradient_operand().
    enum class Amax : uint8_t { Known, Take };
    // g8, for dgrad (which reduces over its columns) and wgrad (over its rows), in memory that was taken for
    // it or is taken now; and the gradient of the bias. A bias sums the unrounded gradient of an FP8 operand,
    // in a pass that takes the amax too; it sums the stored values of any other.
    Operand gradient_operand(const Lazy& g, Amax amax, const Operand* taken = nullptr) {
        const bool fp8 = c_.formats.g.fp8(), in_place = !fp8 && stored_dense(g);
        const Operand g8 = in_place ? Operand{g.input} : taken ? *taken : take_gradient(g.rows);
        AmaxAndScale* const to_take = amax == Amax::Take ? g_amax() : nullptr;
        if (fp8 && biased_) bias_gradient(g, to_take);
        else take_amax(g, to_take);
        if (!in_place) quantize(g, g8, c_.device.statistics(ReportKind::Gradient), stream());
        if (!fp8 && biased_) bias_gradient(stored(g8.view), nullptr);
        return g8;
    }

    void make_cached_weight() {
        take_weight_amax();
        quantize(stored(c_.exchange.weight(param_)), cached_, c_.device.statistics(ReportKind::Weight),
                 stream());
    }

private:
    // What memory an operand needs.
    struct OperandMemory {
        int64_t rows, cols;
        Quant quant;
        bool row_major, transposed;  // which codes: one of these, or both
        AmaxAndScale* scale;
        void* place = nullptr;  // of the row-major codes, if they need no memory of their own
    };

    LinearContext& c_;
    const size_t param_;
    const int64_t number_ = c_.parameters.linear_layer(param_);  // among all linear layers
    const bool biased_ = c_.parameters.params[param_ + 1].name == weight().name + ".bias";
    const int64_t out_ = weight().rows, in_ = weight().cols;
    AmaxAndScale* const x_scale_ = c_.scales.of_operand(LinearOperand::X, number_);
    AmaxAndScale* const w_scale_ = c_.scales.of_weight(param_, number_);
    AmaxAndScale* const g_scale_ = c_.scales.of_operand(LinearOperand::G, number_);
    const Operand cached_ = c_.caches_weights ? take_weight(true, true) : Operand{};

    const Param& weight() const { return c_.parameters.params[param_]; }
    Arena& arena() const { return c_.device.arena; }
    cudaStream_t stream() const { return c_.device.stream; }

    // --- Operands
    // A dense tensor that is stored in the wanted format is used in place.
    static bool stored_dense(const Lazy& x) { return x.op == LazyOp::Stored && !x.input.quant.fp8(); }
    // A per-tensor scale is in its AmaxAndScale; other scales lie right behind the codes.
    Operand take_operand(const OperandMemory& m) const {
        const Quant& q = m.quant;
        void* codes = m.place;
        if (!codes && m.row_major) codes = arena().take(q.operand_bytes(m.rows, m.cols));
        void* const transposed = m.transposed ? arena().take(q.operand_bytes(m.cols, m.rows)) : nullptr;
        if (q.granularity == PER_TENSOR)
            return {.view = {codes, m.scale, m.rows, m.cols, q},
                    .transposed = transposed,
                    .delayed = c_.scales.delayed()};
        auto behind = [&](void* p) {
            return p ? static_cast<uint8_t*>(p) + q.code_bytes(m.rows, m.cols) : nullptr;
        };
        return {.view = {codes, behind(codes), m.rows, m.cols, q},
                .transposed = transposed,
                .transposed_scales = behind(transposed),
                .amax = m.scale};
    }
    Operand take_weight(bool row_major, bool transposed) const {
        return take_operand({.rows = out_,
                             .cols = in_,
                             .quant = c_.formats.w,
                             .row_major = row_major,
                             .transposed = transposed,
                             .scale = w_scale_});
    }
    // The input or the weight for a GEMM that reduces over its columns, or (over_rows) its rows.
    Operand make_operand(const Lazy& x, ReportKind kind, bool over_rows) {
        const bool input = kind == ReportKind::LinearInput;
        const Quant& q = input ? c_.formats.x : c_.formats.w;
        if (!q.fp8() && stored_dense(x)) return {x.input};
        const bool transposed = q.fp8() && over_rows;
        const Operand operand = take_operand({.rows = q.fp8() ? round_up(x.rows, 16) : x.rows,
                                              .cols = x.cols,
                                              .quant = q,
                                              .row_major = !transposed,
                                              .transposed = transposed,
                                              .scale = input ? x_scale_ : w_scale_});
        quantize(x, operand, c_.device.statistics(kind), stream());
        return operand;
    }
    // FP8 GEMMs want a multiple of 16 rows. What they read and write beyond those of a prompt is never used.
    View gemm_rows(View v) const {
        if (c_.formats.x.fp8()) v.rows = round_up(v.rows, 16);
        return v;
    }

    // The weight: fprop reduces over its columns, dgrad over its rows. It may be in the cache; it may have
    // been gathered from other GPUs as codes; otherwise its codes are made here.
    Operand weight_operand(Pass pass) {
        const bool over_rows = pass == Pass::Backward;
        const Quant& q = c_.formats.w;
        if (q.fp8() && c_.caches_weights) return cached_;
        c_.exchange.make_ready(Exchange::stage_of(number_), pass);
        const View whole = c_.exchange.weight(param_);
        if (whole.quant.fp8() && !over_rows) return {whole};
        if (whole.quant.fp8()) {
            const Operand operand = take_weight(false, true);
            transpose_codes(whole, operand.transposed, stream());
            return operand;
        }
        take_weight_amax();
        return make_operand(stored(whole), ReportKind::Weight, over_rows);
    }
    void bias_gradient(const Lazy& g, AmaxAndScale* amax) {
        const Arena::Scope scope(arena());
        float* const workspace = arena().take<float>(COLUMN_PARTIALS * g.cols);
        column_sums(g, c_.exchange.gradient(param_ + 1), workspace, amax, stream());
    }

    // --- Amaxes
    // Per-tensor scaling just in time needs the amax before the codes. Delayed scaling needs it only while a
    // history is empty. The operands x, w and g are all per tensor, or none is.
    AmaxAndScale* if_needed(AmaxAndScale* scale) const {
        const bool just_in_time = !c_.scales.delayed() || c_.scales.any_empty_history;
        const bool per_tensor = c_.formats.x.fp8() && c_.formats.x.granularity == PER_TENSOR;
        return per_tensor && just_in_time ? scale : nullptr;
    }
    void take_amax(const Lazy& x, AmaxAndScale* scale) const {
        if (scale) amax(x, scale, stream());
    }
    // adamw() leaves a weight's amax with the parameter. Delayed scaling reads that of the operand, and takes
    // it here.
    void take_weight_amax() const {
        if (c_.scales.delayed()) take_amax(stored(c_.exchange.weight(param_)), if_needed(w_scale_));
    }
};

// A layer of the transformer. The norms are numbers of parameters: the weight of each; the bias of a
// LayerNorm follows it.
struct Layer {
    size_t norm1, norm2;
    size_t head_norms;  // Qwen3: of each head of q and of k
    LinearLayer qkv, attention_out, gate_up, down;
    View saved[6]{};  // by Saved (coat.h, saved_per_layer)
};

// -----------------------------------------------------------------------------------------------------------
// The model

class Network final : public Model {
public:
    // bytes: of the allocation; 0: a dry run, whose addresses are never used.
    Network(const Setup& s, int64_t bytes, bool cache_weights, std::shared_ptr<Transport> transport)
        : device_(s, bytes), memory_(take_memory(device_)), scales_(device_, memory_),
          parameters_(device_, memory_, scales_),
          exchange_(make_exchange(device_, memory_, parameters_, scales_, std::move(transport))),
          gemms_(memory_.gemm_scratch, recipe_.fast_accumulation), linear_{.device = device_,
                                                                           .parameters = parameters_,
                                                                           .scales = scales_,
                                                                           .exchange = *exchange_,
                                                                           .gemms = gemms_,
                                                                           .caches_weights = cache_weights} {
        clear(memory_.results, sizeof(Results), stream_);
        weights_changed();
        layers_.reserve(static_cast<size_t>(config_.L));
        for (int64_t l = 0; l < config_.L; l++) layers_.push_back(make_layer(l));
        if (rotary_) rope_table(config_, setup_.T, memory_.rope_table, stream_);
    }

    // The bytes that a step takes, if this is a dry run.
    int64_t dry_step() {
        const std::vector<int32_t> tokens(static_cast<size_t>(step_tokens()));
        step(tokens.data(), tokens.data(), {.step = 1, .lr = 0.0f});
        return arena_.most();
    }

    // A training step: forward and backward of each micro-batch, then the update. (With --gradients none each
    // bucket of parameters is updated within backward.)
    StepResult step(const int32_t* tokens, const int32_t* targets, const AdamW& adamw) override {
        const int64_t counted = sum_of_ranks(counted_targets(targets, step_tokens()));
        if (counted == 0) return {.loss = 0, .grad_norm = 0, .skipped = true};
        begin(static_cast<double>(counted));
        adamw_ = &adamw;
        for (int64_t i = 0; i < setup_.accumulate; i++) {
            micro_batch(i, tokens + i * batch_tokens(), targets + i * batch_tokens());
            if (setup_.keep_gradients) check_loss(&outcome().checked_loss);
        }
        exchange_->finish();
        if (setup_.keep_gradients)
            parameters_.update(adamw, 0, static_cast<int64_t>(parameters_.buckets.size()), *exchange_);
        weights_changed();
        scales_.end_step(outcome());
        const Outcome found = fetch_outcome();
        first_step_done_ = true;
        const bool skipped = found.gradients.skip != 0;
        if (!skipped && found.empty_histories == 0) scales_.any_empty_history = false;
        return {.loss = sum_of_ranks(found.loss),
                .grad_norm = found.gradients.norm,
                .skipped = skipped,
                .targets = counted};
    }

    double evaluate(const int32_t* tokens, const int32_t* targets) override {
        begin(divisor_of_mean(targets, batch_tokens()));
        start_pass(tokens, targets, setup_.B, setup_.T);
        pass(false);
        check_loss(&outcome().loss);
        return fetch_outcome().loss;
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        begin(1);
        start_pass(tokens, tokens, 1, n);
        last_logits(gemms_.scratch);
        device_.fetch(logits, gemms_.scratch, config_.V * 4);
    }

    QuantReport quantization(const int32_t* tokens, const int32_t* targets) override {
        QuantStats* const found = memory_.results->quantization;
        report_ = {};
        clear(found, sizeof(Results::quantization), stream_);
        begin(divisor_of_mean(targets, batch_tokens()), found);
        micro_batch(0, tokens, targets);
        exchange_->finish();
        device_.fetch(report_.kinds, found, sizeof(Results::quantization));
        report_.k_m = parameters_.expansion_factors(false);
        report_.k_v = parameters_.expansion_factors(true);
        QuantStats& weights = report_.kinds[static_cast<int>(ReportKind::Weight)];
        weights = exchange_->weight_statistics(weights);
        return report_;
    }

    void read(const std::string& name, void* out) override {
        exchange_->finish();
        device_.wait();
        parameters_.read(name, out);
    }
    void write(const std::string& name, const void* in) override {
        exchange_->finish();
        device_.wait();
        parameters_.write(name, in);
        weights_changed();
    }
    const Setup& setup() const override { return setup_; }

private:
    Device device_;
    const Memory memory_;
    Scales scales_;
    Parameters parameters_;
    const std::unique_ptr<Exchange> exchange_;
    const Setup& setup_ = device_.setup;
    const ModelConfig& config_ = setup_.config;
    const Recipe& recipe_ = setup_.recipe;
    const cudaStream_t stream_ = device_.stream;
    Arena& arena_ = device_.arena;
    Gemms gemms_;
    LinearContext linear_;
    std::vector<Layer> layers_;
    const bool rotary_ = config_.arch.rope, gated_ = config_.arch.gated, qk_norm_ = config_.arch.qk_norm;
    // Numbers of parameters.
    const size_t embedding_ = parameters_.index("embedding");
    const size_t final_norm_ = parameters_.index("final_norm.weight");
    const size_t head_weight_ = parameters_.index(config_.tied ? "embedding" : "head");

    // The gradient of gate and up replaces the saved gate and up, which nobody reads later, if both take the
    // same bytes a value (FP8 codes over FP8 groups, or both in the compute dtype) and there are no scales of
    // blocks, which would lie on those of the groups. Later, either way, dqkv lies there if it fits.
    const bool gate_up_in_place_ =
        info(linear_.formats.g.format).bytes == info(recipe_.nonlinear.format).bytes &&
        recipe_.x.granularity == PER_TENSOR;
    const bool qkv_in_place_ = Quant{recipe_.compute}.bytes(16, config_.qkv_cols()) <=
                               recipe_.nonlinear.bytes(16, config_.gate_up_cols());

    // Of the pass that runs: B sequences of T tokens, N in all
    int64_t B_ = 0, T_ = 0, N_ = 0;
    void* stream_values_ = nullptr;  // the residual stream, where inputs of norms are saved in groups
    // Of the step that runs
    int64_t micro_batch_ = 0;
    const AdamW* adamw_ = nullptr;
    QuantReport report_;  // while quantization is measured
    // What the GPU may still read while the host goes on
    double loss_scale_ = 0;
    EmbeddingOrder embedding_order_;

    CudaGraph first_micro_batch_, later_micro_batch_;
    bool first_step_done_ = false, cache_is_valid_ = false;

    int64_t batch_tokens() const { return setup_.B * setup_.T; }
    int64_t step_tokens() const { return setup_.accumulate * batch_tokens(); }
    Outcome& outcome() const { return memory_.results->outcome; }  // on the device

    template <class Value> Value sum_of_ranks(const Value& mine) const {
        if (!setup_.processes) return mine;
        Value sum{};
        for (const Value& theirs : setup_.processes->all_gather(mine)) sum += theirs;
        return sum;
    }

    // -------------------------------------------------------------------------------------------------------
    // A step begins

    // Before a step, or a pass of its own, over `counted` targets. Makes the FP8 copies of the weights, if
    // they are cached and not up to date. With delayed scaling that takes their amaxes of the step.
    void begin(double counted, QuantStats* quantization = nullptr) {
        loss_scale_ = 1.0 / counted;
        device_.send(&memory_.results->loss_scale, &loss_scale_, sizeof(double));
        clear(&outcome(), sizeof(Outcome), stream_);
        device_.quantization = quantization;
        if (scales_.delayed()) {
            scales_.clear_operands();
            cache_is_valid_ = false;
            exchange_->scales_changed();
        }
        if (!linear_.caches_weights || (cache_is_valid_ && !quantization)) return;
        for (Layer& layer : layers_)
            for (LinearLayer* linear : {&layer.qkv, &layer.attention_out, &layer.gate_up, &layer.down})
                linear->make_cached_weight();
        cache_is_valid_ = true;
    }
    void weights_changed() {
        cache_is_valid_ = false;
        exchange_->weights_changed();
    }

    void start_pass(const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T) {
        B_ = B;
        T_ = T;
        N_ = B * T;
        device_.send(memory_.tokens, tokens, N_ * 4);
        device_.send(memory_.targets, targets, N_ * 4);
    }

    // Forward and backward are replayed from a CUDA graph, unless a launch may differ from the last one: in
    // the first step of all, which loads kernels and chooses the GEMMs' algorithms, while quantization is
    // measured, when buckets are sent or updated on the way, and while an operand may lack its delayed scale.
    // Meanwhile the host sorts the tokens for the gradient of the embedding.
    void micro_batch(int64_t number, const int32_t* tokens, const int32_t* targets) {
        micro_batch_ = number;
        linear_.overwrites_gradients = number == 0 || exchange_->takes_gradients();
        start_pass(tokens, targets, setup_.B, setup_.T);
        const bool by_bucket = exchange_->takes_gradients() || !setup_.keep_gradients;
        const bool replays =
            first_step_done_ && !device_.quantization && !by_bucket && !scales_.any_empty_history;
        CudaGraph& graph = linear_.overwrites_gradients ? first_micro_batch_ : later_micro_batch_;
        if (replays) graph.run(stream_, [&] { pass(true); });
        else pass(true);
        embedding_order_ = embedding_order(tokens, N_);
        const int64_t distinct = static_cast<int64_t>(embedding_order_.tokens.size());
        device_.send(memory_.token_order, embedding_order_.order.data(), N_ * 4);
        device_.send(memory_.token_rows, embedding_order_.tokens.data(),
                     distinct * static_cast<int64_t>(sizeof(TokenRows)));
        embedding_backward(distinct);
    }

    // outcome().loss += the sum of the losses * Results::loss_scale; and in backward all gradients but the
    // embeddings'.
    void pass(bool backward) {
        forward();
        head_and_loss(backward);
        if (!backward) return;
        for (int64_t l = config_.L; l-- > 0;) layer_backward(l);
    }

    // -------------------------------------------------------------------------------------------------------
    // Forward

    // The embedding and all layers, up to the input of the final norm.
    void forward() {
        const Arena::Scope scope(arena_);
        if (recipe_.nonlinear.fp8()) stream_values_ = take_view(N_, config_.C).data;
        if (!scales_.delayed()) scales_.clear_operands();
        exchange_->make_ready(Exchange::EMBEDDING_STAGE, Pass::Forward);
        // embedding; it saves the input of the first norm 1, and takes the amax of that norm's output
        const View positions = rotary_ ? View{} : exchange_->weight(parameters_.index("positions"));
        residual_forward(exchange_->weight(embedding_), positions, norm1_of(layers_[0]),
                         layers_[0].qkv.x_amax(), memory_.tokens);
        for (int64_t l = 0; l < config_.L; l++) {
            attention_forward(layers_[l]);
            mlp_forward(layers_[l], l + 1 < config_.L ? &layers_[l + 1] : nullptr);
        }
    }

    void attention_forward(Layer& layer) {
        const Arena::Scope scope(arena_);
        const Norm norm1 = norm1_of(layer), norm2 = norm2_of(layer);
        const View saved_qkv = saved(layer, Saved::Qkv), saved_out = saved(layer, Saved::Attention);
        const View qkv = attention_view(saved_qkv), out = attention_view(saved_out);
        // norm 1; q, k, v projection: (N, C) -> (N, q_cols + 2 kv_cols). The norm is computed from its saved
        // input (in coat-saved from the residual stream) while its codes are made. The residual add or the
        // embedding before it has taken the amax
        layer.qkv.forward(norm(as_forward_reads(norm1)), qkv);
        // rotary positions
        if (rotary_ && !qk_norm_) rope(angles(), qkv, false, nullptr, stream_);
        save_attention(qkv, saved_qkv);
        // attention: causal, within each sequence of T tokens -> (N, q_cols)
        coat::attention_forward(attention(), attention_input(layer, qkv).data, out.data, log_sum_exp(layer),
                                stream_);
        save_attention(out, saved_out);
        // attention output projection: (N, q_cols) -> (N, C). Nobody has taken the amax
        layer.attention_out.take_x_amax(stored(saved_out));
        const View branch = take_view(N_, config_.C);
        layer.attention_out.forward(stored(saved_out), branch);
        // residual add; it saves the input of norm 2, and takes the amax of the norm's output
        residual_forward(stream_at(norm1), branch, norm2, layer.gate_up.x_amax());
    }

    void mlp_forward(Layer& layer, Layer* next) {
        const Arena::Scope scope(arena_);
        const Norm norm2 = norm2_of(layer);
        // norm 2; gate and up projection, saved as the recipe says (coat: in groups): (N, C) -> (N, 2F), or
        // (N, F) for GPT-2. It takes the amax of the activation's output
        const View gate_up = gate_up_forward(layer, norm(as_forward_reads(norm2)));
        // SiLU(gate) x up, or GELU, computed from what was saved, or (coat-saved) from the BF16 values that
        // the groups were made of; down projection: (N, F) -> (N, C)
        const View branch = take_view(N_, config_.C);
        layer.down.forward(activation(gated_, gate_up), branch);
        // residual add; it saves the input of the next layer's norm 1, or of the final norm
        residual_forward(stream_at(norm2), branch, next ? norm1_of(*next) : final_norm(),
                         next ? next->qkv.x_amax() : nullptr);
    }

    // The widest tensor of a layer. If it is saved in groups, its BF16 form exists until then, or as long as
    // the activation reads it (coat-saved). While it goes to groups, the amax of the activation's output is
    // taken. Returns what the activation reads.
    View gate_up_forward(Layer& layer, const Lazy& x) {
        const View gate_up = saved(layer, Saved::GateUp);
        if (!gate_up.quant.fp8()) {
            layer.gate_up.forward(x, gate_up);
            layer.down.take_x_amax(activation(gated_, gate_up));
            return gate_up;
        }
        const bool reads_groups = recipe_.forward_reads_groups;
        const View kept = reads_groups ? View{} : take_view(N_, gate_up.cols);
        const Arena::Scope scope(arena_);
        const View values = reads_groups ? take_view(N_, gate_up.cols) : kept;
        layer.gate_up.forward(x, values);
        quantize_groups(values, gate_up, false, {layer.down.x_amax(), gated_, reads_groups},
                        device_.statistics(ReportKind::ActivationInput), stream_);
        return reads_groups ? gate_up : kept;
    }

    // x + branch, or of the embedding x[token] + branch[position], is saved as the input of `next`; the amax
    // of that norm's output goes to y_amax.
    void residual_forward(const View& x, const View& branch, const Norm& next, AmaxAndScale* y_amax,
                          const int32_t* tokens = nullptr) {
        const View stream = next.in.quant.fp8() ? stream_at(next) : View{};
        residual_add(x, branch, stream, next, reads_saved(next), y_amax, stream_, tokens, T_);
        if (stream.data)
            measure(stored(stream), {next.in}, device_.statistics(ReportKind::NormInput), stream_);
    }

    // -------------------------------------------------------------------------------------------------------
    // Head and loss

    // The logits (n, padded_V) of the tokens from `first` on; y (n, C) becomes the final norm's output.
    View logits_of(int64_t first, const View& y) {
        const View logits = take_view(y.rows, config_.padded_V());
        Norm of_part = final_norm();
        of_part.in = rows(of_part.in, first, y.rows);
        of_part.row_statistics += first;
        quantize(norm(of_part), {y}, device_.statistics(ReportKind::LinearInput), stream_);
        gemms_.run(Gemm::Fprop, {y}, {exchange_->weight(head_weight_)}, logits, false, nullptr, stream_);
        return logits;
    }

    void last_logits(void* logits) {  // of the last token, in FP32
        forward();
        exchange_->make_ready(exchange_->head_stage(), Pass::Forward);
        const Arena::Scope scope(arena_);
        const View last = logits_of(N_ - 1, take_view(1, config_.C));
        convert(last, {logits, nullptr, 1, last.cols, FP32}, stream_);
    }

    // In backward also the gradient of the final norm's input. Logits exist for HEAD_TOKENS tokens at a time;
    // their gradients take their place. The head's gradient is summed in FP32 where a BF16 sum would be
    // rounded too often (gpu/plan.h, head_sum_apart).
    void head_and_loss(bool backward) {
        const Arena::Scope scope(arena_);
        const View gradient = exchange_->gradient(head_weight_);
        const View dy = backward ? take_view(N_, config_.C) : View{};
        const bool in_fp32 = backward && head_sum_apart(setup_);
        View sum = gradient;
        if (in_fp32) {
            sum.data = arena_.take<float>(sum.rows * sum.cols);
            sum.quant = FP32;
        }
        exchange_->make_ready(exchange_->head_stage(), backward ? Pass::Backward : Pass::Forward);
        if (backward) exchange_->wait_for_place(parameters_.params[head_weight_].bucket);
        if (in_fp32 && !linear_.overwrites_gradients) convert(gradient, sum, stream_);  // BF16 to FP32
        for (int64_t first = 0; first < N_; first += HEAD_TOKENS)
            head_of_piece(first, std::min(HEAD_TOKENS, N_ - first), backward, dy, sum);
        loss_sum(memory_.losses, N_, &memory_.results->loss_scale, &outcome().loss, stream_);
        if (!backward) return;
        if (in_fp32) convert(sum, gradient, stream_);  // FP32 to BF16
        const int64_t bucket = parameters_.params[final_norm_].bucket;
        begin_bucket(bucket);  // clears gradients of the final norm; a GEMM has written the head's
        residual_backward(final_norm(), final_norm_, dy, View{}, layers_.back().down.g_amax());
        end_bucket(bucket);
    }

    // n tokens from `first` on: their losses and, in backward, dy of them; the head's gradient is added to
    // sum.
    void head_of_piece(int64_t first, int64_t n, bool backward, const View& dy, const View& sum) {
        const Arena::Scope scope(arena_);
        const View y = take_view(n, config_.C), logits = logits_of(first, y);
        cross_entropy(logits, config_.V, memory_.targets + first,
                      backward ? &memory_.results->loss_scale : nullptr, memory_.losses + first, stream_);
        if (!backward) return;
        const bool overwrites = linear_.overwrites_gradients && first == 0;
        gemms_.run(Gemm::Wgrad, {logits}, {y}, sum, !overwrites, nullptr, stream_);
        gemms_.run(Gemm::Dgrad, {logits}, {exchange_->weight(head_weight_)}, rows(dy, first, n), false,
                   nullptr, stream_);
    }

    // -------------------------------------------------------------------------------------------------------
    // Backward

    // The gradient of the residual stream, g, goes through the layer in place. The backward pass of each norm
    // takes the amax of the g that it writes: so it is known when the next linear layer's operand is made.
    void layer_backward(int64_t l) {
        mlp_backward(layers_[l]);
        attention_backward(layers_[l], l > 0 ? layers_[l - 1].down.g_amax() : nullptr);
    }

    void mlp_backward(Layer& layer) {
        const Arena::Scope scope(arena_);
        // The gradient of gate and up (N, 2F) is stored only as an operand. It may overwrite the saved gate
        // and up: a thread loads its elements before it stores their codes
        void* const place = gate_up_in_place_ ? saved(layer, Saved::GateUp).data : nullptr;
        const Operand dgate_up = layer.gate_up.take_gradient(N_, place);
        down_backward(layer, dgate_up);
        // gate and up projection, dgrad; norm 2; wgrad
        dgrad_norm_wgrad(layer.gate_up, dgate_up, norm2_of(layer), layer.norm2, layer.attention_out.g_amax());
        end_bucket(layer.gate_up.bucket());
    }

    // The down projection and the activation: from g to the operand dgate_up.
    void down_backward(Layer& layer, const Operand& dgate_up) {
        const Arena::Scope scope(arena_);
        const View gate_up = saved(layer, Saved::GateUp);
        // down projection: wgrad, then dgrad: dact (N, F), the gradient of the activation's output. The norm
        // above has taken the amax of g
        begin_bucket(layer.down.bucket());
        const Operand g8 = layer.down.gradient_operand(stored(residual_gradient()), LinearLayer::Amax::Known);
        layer.down.wgrad(g8, activation(gated_, gate_up));
        const View dact = take_view(N_, config_.F);
        layer.down.dgrad(g8, dact);
        end_bucket(layer.down.bucket());
        // activation. Nobody has taken the amax of its input's gradient
        begin_bucket(layer.gate_up.bucket());
        layer.gate_up.gradient_operand(activation_backward(gated_, gate_up, dact), LinearLayer::Amax::Take,
                                       &dgate_up);
    }

    void attention_backward(Layer& layer, AmaxAndScale* g_amax) {
        const Arena::Scope scope(arena_);
        // The memory of gate and up is free now: dqkv lies there if it fits
        void* const gate_up = saved(layer, Saved::GateUp).data;
        const View dqkv =
            qkv_in_place_ ? view_at(gate_up, N_, config_.qkv_cols()) : take_view(N_, config_.qkv_cols());
        attention_out_backward(layer, dqkv);
        // q, k, v projection, dgrad; norm 1; wgrad
        const LinearLayer::Amax amax = rope_takes_amax() ? LinearLayer::Amax::Known : LinearLayer::Amax::Take;
        const Operand g8 = layer.qkv.gradient_operand(stored(dqkv), amax);
        dgrad_norm_wgrad(layer.qkv, g8, norm1_of(layer), layer.norm1, g_amax);
        end_bucket(layer.qkv.bucket());
    }

    // The attention output projection and attention: from g to dqkv.
    void attention_out_backward(Layer& layer, const View& dqkv) {
        const Arena::Scope scope(arena_);
        const View saved_out = saved(layer, Saved::Attention), dout = take_view(N_, config_.q_cols());
        // attention output projection: wgrad, then dgrad. Norm 2 has taken the amax of g
        begin_bucket(layer.attention_out.bucket());
        wgrad_and_dgrad(layer.attention_out, stored(saved_out), dout);
        end_bucket(layer.attention_out.bucket());
        // attention
        begin_bucket(layer.qkv.bucket());
        const View qkv = load_attention(saved(layer, Saved::Qkv)), out = load_attention(saved_out);
        void* const workspace = arena_.take(static_cast<int64_t>(attention_workspace(attention())));
        coat::attention_backward(attention(), attention_input(layer, qkv).data, out.data, log_sum_exp(layer),
                                 dout.data, dqkv.data, workspace, stream_);
        // rotary positions; norm of each head of q and k
        AmaxAndScale* const amax = rope_takes_amax() ? layer.qkv.g_amax() : nullptr;
        if (rotary_) rope(angles(), dqkv, true, amax, stream_);
        if (!qk_norm_) return;
        float* const partials = arena_.take<float>(COLUMN_PARTIALS * angles().rotated_cols);
        head_norm_backward(head_norm(layer), qkv, dqkv, exchange_->gradient(layer.head_norms), partials,
                           stream_);
    }
    // From the gradient of the residual stream, whose amax is known.
    void wgrad_and_dgrad(LinearLayer& layer, const Lazy& x, const View& dx) {
        const Arena::Scope scope(arena_);
        const Operand g8 = layer.gradient_operand(stored(residual_gradient()), LinearLayer::Amax::Known);
        layer.wgrad(g8, x);
        layer.dgrad(g8, dx);
    }
    // rope() is the last to change dqkv, unless heads have norms. (GPT-2 has no rope().)
    bool rope_takes_amax() const { return rotary_ && !qk_norm_; }

    // A linear layer that reads a norm's output: g8 -> dx -> the gradient of the norm's input, which is added
    // to that of the residual stream; and the linear layer's wgrad. wgrad computes the norm's output again
    // from the statistics that the backward pass of the norm leaves. All norms share their memory: so wgrad
    // comes here, before another norm.
    void dgrad_norm_wgrad(LinearLayer& layer, const Operand& g8, const Norm& n, size_t norm_weight,
                          AmaxAndScale* g_amax) {
        {
            const Arena::Scope scope(arena_);
            const View dx = take_view(N_, config_.C);
            layer.dgrad(g8, dx);
            residual_backward(n, norm_weight, dx, residual_gradient(), g_amax);
        }
        layer.wgrad(g8, norm(n));
    }
    // residual_gradient() = g_in + the gradient of the norm's input. In a layer g_in is the same memory; at
    // the head, where the residual stream ends, it is no tensor.
    void residual_backward(const Norm& n, size_t weight, const View& dy, const View& g_in,
                           AmaxAndScale* g_amax) {
        const View dbias = n.rms ? View{} : exchange_->gradient(weight + 1);
        norm_backward(n, dy, g_in, residual_gradient(), g_amax, exchange_->gradient(weight), dbias,
                      memory_.norm_partials, stream_);
    }

    void embedding_backward(int64_t distinct_tokens) {
        begin_bucket(0);
        gpu::embedding_backward(residual_gradient(), memory_.token_order, memory_.token_rows, distinct_tokens,
                                exchange_->gradient(embedding_), stream_);
        if (!rotary_)
            gpu::embedding_backward(residual_gradient(), nullptr, nullptr, T_,
                                    exchange_->gradient(parameters_.index("positions")), stream_);
        end_bucket(0);
    }

    // -------------------------------------------------------------------------------------------------------
    // The gradients of a bucket, before and after backward computes them

    // Where GEMMs overwrite gradients, all other kernels still add theirs: so those are cleared first, of
    // norms, biases and embeddings. A tied embedding has the head's part already.
    void begin_bucket(int64_t number) const {
        exchange_->wait_for_place(number);
        if (!linear_.overwrites_gradients) return;
        const BucketRange& bucket = parameters_.buckets[number];
        for (size_t i = bucket.first; i < bucket.last; i++) {
            const Param& p = parameters_.params[i];
            if (!p.role.linear && i != head_weight_)
                clear(exchange_->gradient(i).data, p.padded_size() * parameters_.gradient_bytes, stream_);
        }
    }
    // Backward has a bucket's gradients and no longer needs its weights: the gradients are sent to the ranks
    // that own them, and with --gradients none the weights are updated.
    void end_bucket(int64_t bucket) {
        if (device_.quantization) return parameters_.measure_moments_of(bucket, *exchange_, report_);
        exchange_->take_gradients(bucket, micro_batch_ == 0);
        if (setup_.keep_gradients) return;
        check_loss(&outcome().checked_loss);
        parameters_.update(*adamw_, bucket, bucket + 1, *exchange_);
    }

    // -------------------------------------------------------------------------------------------------------
    // A step ends

    // *checked = the loss so far; NaN, so that the update skips the step, if a code hides infinity or NaN.
    void check_loss(double* checked) {
        checked_loss(scales_.all(), scales_.count(), &outcome().loss, checked, stream_);
    }
    Outcome fetch_outcome() const {
        Outcome found{};
        device_.fetch(&found, &outcome(), sizeof found);
        return found;
    }

    // -------------------------------------------------------------------------------------------------------
    // Residual stream and attention: what is saved, and what is read

    // The residual stream (N, C) at a norm, as residual_add reads and writes it: in the compute dtype, beside
    // the norm's input, if that is saved in groups; otherwise that input itself.
    View stream_at(const Norm& n) const {
        return n.in.quant.fp8() ? view_at(stream_values_, N_, config_.C) : n.in;
    }
    // Whether the forward pass computes the norm from what is saved, and the norm as it computes it.
    bool reads_saved(const Norm& n) const { return recipe_.forward_reads_groups || !n.in.quant.fp8(); }
    Norm as_forward_reads(Norm n) const {
        if (!reads_saved(n)) n.in = stream_at(n);
        return n;
    }

    // Attention computes in the compute dtype. Where its inputs and output are saved in groups, it computes
    // with what the groups hold: so the saved log-sum-exp belongs to what backward reads.
    View attention_view(const View& saved) { return saved.quant.fp8() ? take_view(N_, saved.cols) : saved; }
    void save_attention(const View& x, const View& saved) {
        if (saved.quant.fp8())
            quantize_groups(x, saved, true, {}, device_.statistics(ReportKind::Attention), stream_);
    }
    View load_attention(const View& saved) {
        const View x = attention_view(saved);
        if (saved.quant.fp8()) convert(saved, x, stream_);
        return x;
    }
    // q, k, v as attention reads them. Qwen3 saves them before the norms of their heads.
    View attention_input(const Layer& layer, const View& qkv) {
        if (!qk_norm_) return qkv;
        const View x = take_view(N_, qkv.cols);
        copy(x.data, qkv.data, qkv.quant.bytes(N_, qkv.cols), stream_);
        head_norm_forward(head_norm(layer), x, stream_);
        rope(angles(), x, false, nullptr, stream_);
        return x;
    }

    // -------------------------------------------------------------------------------------------------------
    // Views

    View saved(const Layer& layer, Saved which) const {  // the rows of this batch
        const View& v = layer.saved[static_cast<int>(which)];
        return {v.data, v.scales, N_, v.cols, v.quant};
    }
    float* log_sum_exp(const Layer& layer) const {
        return static_cast<float*>(saved(layer, Saved::LogSumExp).data);
    }
    // In the compute dtype, in memory that is taken now; FP8 GEMMs may write up to 15 rows more.
    View take_view(int64_t n, int64_t cols) {
        return view_at(arena_.take(round_up(n, 16) * cols * info(recipe_.compute).bytes), n, cols);
    }
    View view_at(void* data, int64_t n, int64_t cols) const {
        return {data, nullptr, n, cols, Quant{recipe_.compute}};
    }
    // Backward reads the final norm's input once, to write the gradient of the residual stream over it.
    View final_input() const { return view_at(memory_.residual, N_, config_.C); }
    View residual_gradient() const { return view_at(memory_.residual, N_, config_.C); }

    Norm norm_of(size_t weight, const View& in) const {
        const bool rms = config_.arch.rms;
        return {.in = in,
                .weight = exchange_->weight(weight).data,
                .bias = rms ? nullptr : exchange_->weight(weight + 1).data,
                .row_statistics = memory_.norm_statistics,
                .rms = rms,
                .eps = config_.norm_eps};
    }
    Norm norm1_of(const Layer& l) const { return norm_of(l.norm1, saved(l, Saved::Norm1Input)); }
    Norm norm2_of(const Layer& l) const { return norm_of(l.norm2, saved(l, Saved::Norm2Input)); }
    Norm final_norm() const { return norm_of(final_norm_, final_input()); }
    Rope angles() const {
        return {memory_.rope_table, T_, config_.HS(), config_.q_cols() + config_.kv_cols()};
    }
    HeadNorm head_norm(const Layer& layer) const {
        return {exchange_->weight(layer.head_norms).data, config_.norm_eps, config_.HS(), config_.q_cols(),
                config_.kv_cols()};
    }
    AttentionShape attention() const { return attention_shape(config_, B_, T_, recipe_.compute); }

    Layer make_layer(int64_t l) {
        const int64_t N = gpu_tokens(setup_);
        auto index = [&](const char* of) { return parameters_.index(concat("layers.", l, ".", of)); };
        auto linear = [&](const char* of) { return LinearLayer(linear_, index(of)); };
        Layer layer{.norm1 = index("norm1.weight"),
                    .norm2 = index("norm2.weight"),
                    .head_norms = qk_norm_ ? index("qk_norm.weight") : 0,
                    .qkv = linear("qkv"),
                    .attention_out = linear("attention_out"),
                    .gate_up = linear("gate_up"),
                    .down = linear("down")};
        uint8_t* here = memory_.saved + l * saved_layer_bytes(setup_);
        for (const SavedTensor& t : saved_per_layer(setup_)) {
            uint8_t* const scales = here + t.quant.code_bytes(N, t.cols);
            layer.saved[static_cast<int>(t.which)] = {here, scales, N, t.cols, t.quant};
            here += round_up(t.bytes(N), GPU_ALIGNMENT);
        }
        return layer;
    }
};

}  // namespace

std::unique_ptr<Model> gpu_model(const Setup& s, int64_t bytes, bool cache_weights,
                                 std::shared_ptr<Transport> transport) {
    return std::make_unique<Network>(s, bytes, cache_weights, std::move(transport));
}

int64_t arena_bytes(const Setup& s, bool cache_weights) {
    Setup alone = s;
    alone.processes = nullptr;  // the ranks do not meet in a dry run
    return Network(alone, 0, cache_weights, nullptr).dry_step();
}

}  // namespace coat
