// model.cu - one training step on the GPU: Llama and GPT-2, forward, backward and update, in any recipe.
//
// It mirrors the CPU reference (reference.cpp) with the kernels of coat.cuh, adamw.cuh and gpu/. Read
// GpuModel::block_forward() and block_backward() first: they follow the table that --plan prints. There are
// three rules:
//   - Everything is in one allocation, laid out by plan.cpp. Nothing is allocated after the start, and the
//     host waits for the GPU only at the end of a step.
//   - Saved for backward is what model.h's saved_per_layer() lists. What can be recomputed elementwise is
//     recomputed on the way into the next GEMM's operand.
//   - Memory is reused. The gradient of the residual stream takes the place of the final norm's input.
//     Gradients of weights take the place of saved activations that backward no longer needs (plan.h).
//
// The parts, each of which uses those before it:
//   Device    settings, memory and stream of this GPU                              (gpu/state.cuh)
//   Peers     the other GPUs                                                       (gpu/comm.cuh)
//   State     weights, gradients, scales and moments, by parameter; the update     (gpu/state.cuh)
//   Exchange  which gradients and weights travel between GPUs, and when            (gpu/exchange.cuh)
//   GpuModel  the Model that train.cpp drives: a step, its micro-batches, and their blocks in the order of
//             the --plan print-out
#include <algorithm>

#include "gpu/attention.cuh"
#include "gpu/exchange.cuh"
#include "gpu/gemm.cuh"
#include "gpu/layers.cuh"
#include "gpu/report.cuh"
#include "gpu/state.cuh"

namespace coat {
namespace {

using namespace gpu;

// A linear layer y = x w^T + bias, and the scales of the operands of its three GEMMs. The bias (out) is the
// parameter that follows the weight.
struct Linear {
    size_t param;            // number of the weight (out, in)
    bool biased;
    int64_t bucket;          // of its gradients; also the stage in which its weight is gathered (plan.h)
    AmaxAndScale *x_scale, *w_scale, *g_scale;  // of the input, the weight, and the gradient of the output
    uint8_t* cached_weight;  // FP8 codes and scales, then the transposed ones; null: made when needed
};
struct Block {
    View saved[6];        // by Saved (model.h, saved_per_layer)
    size_t norm1, norm2;  // parameters: the weights; the bias of a LayerNorm follows its weight
    Linear qkv, attention_out, gate_up, down;
};

class GpuModel : public Model {
public:
    GpuModel(const Setup& s, const GpuFacts& facts)
        : device_(s, facts), gemms_(device_.work(Work::GemmScratch), recipe_.sums.fast),
          peers_(setup_, device_.at(0), cuda_), state_(device_, peers_), exchange_(device_, state_, peers_),
          caches_weights_(facts.cache_fp8_weights), embedding_(param("embedding")),
          head_weight_(param(config_.tied ? "embedding" : "head")), final_norm_(param("final_norm.weight")),
          positions_(config_.arch.rope ? embedding_ : param("positions")), tokens_(step_tokens()),
          targets_(step_tokens()), order_(step_tokens()), runs_(step_tokens()), outcome_(1), loss_scale_(1) {
        static_assert(sizeof(Results) <= 16 << 10 && Gemms::SCRATCH <= 32 << 20 &&
                          sizeof(AmaxAndScale) == 16 && OPERANDS * LINEARS == 12 &&
                          sizeof(TokenRun) == 16 && COLUMN_PARTIALS == 128,
                      "as work_rows() in plan.cpp counts them");
        uint8_t* cache = caches_weights_ ? device_.work<uint8_t>(Work::CachedWeights) : nullptr;
        for (int64_t l = 0; l < config_.L; l++) blocks_.push_back(make_block(l, cache));
        set_shape(setup_.B, setup_.T);
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
        return {sum_of_ranks(outcome.loss), outcome.gradients.norm, skipped, counted};
    }

    double evaluate(const int32_t* tokens, const int32_t* targets) override {
        check_and_pin(tokens, targets, batch_tokens());
        upload(0, batch_tokens());
        begin(divisor_of_mean(targets, batch_tokens()));
        forward(setup_.B, setup_.T);
        head_and_loss(false);
        check_loss(&results()->outcome.loss);
        return finish().loss;
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        check_and_pin(tokens, tokens, n);
        upload(0, n);
        begin(1);
        forward(1, n);
        exchange_.make_ready(exchange_.head_stage(), Exchange::NONE, nullptr);
        const View row = head_logits(n - 1, 1),
                   wide{device_.work(Work::GemmScratch), nullptr, 1, row.cols, Q_F32};
        convert(row, wide, cuda_);
        copy(logits, wide.data, config_.V * 4, cuda_);
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
        if (exchange_.sends_codes()) weights = sum_of_ranks(weights);
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
    const size_t embedding_, head_weight_, final_norm_, positions_;
    std::vector<Block> blocks_;

    // Of the pass that runs: its shape, what is measured, and which micro-batch of which step it is.
    int64_t B_ = 0, T_ = 0, N_ = 0;
    QuantStats* stats_ = nullptr;  // one per Kind, on the device; null: not measured
    int64_t micro_batch_ = 0;
    const AdamW* adamw_ = nullptr;  // of a step, while it runs

    Pinned<int32_t> tokens_, targets_, order_;
    Pinned<TokenRun> runs_;
    Pinned<Outcome> outcome_;
    Pinned<double> loss_scale_;
    CudaGraph first_micro_batch_, later_micro_batch_;
    bool warming_up_ = false;

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
    // and each GEMM chooses its algorithm. The second is recorded.
    void warm_up() {
        std::vector<int32_t> tokens(step_tokens());
        const uint64_t V = static_cast<uint64_t>(config_.V);
        for (size_t i = 0; i < tokens.size(); i++) tokens[i] = static_cast<int32_t>(i * 2654435761u % V);
        warming_up_ = true;
        step(tokens.data(), tokens.data(), {1, 0.0f});
        warming_up_ = false;
        step(tokens.data(), tokens.data(), {2, 0.0f});
    }

    template <class T>
    T sum_of_ranks(const T& mine) const {
        if (!peers_.several()) return mine;
        T sum{};
        for (const T& theirs : setup_.processes->all_gather(mine)) sum += theirs;
        return sum;
    }

    // --- Before a pass
    void check_and_pin(const int32_t* tokens, const int32_t* targets, int64_t n) {
        require_tokens(config_, tokens, targets, n);
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
        if (state_.delayed_scaling()) {
            state_.clear_amaxes();
            cache_is_valid_ = false;
            exchange_.forget_gathered();
        }
        if (!caches_weights_ || (cache_is_valid_ && !stats)) return;
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
    // in the first step of all, while quantization is measured, when buckets are sent or updated on the way,
    // and while an operand may lack its delayed scale. Meanwhile the host sorts the tokens for the gradient
    // of the embedding.
    void run(int64_t micro_batch) {
        micro_batch_ = micro_batch;
        set_shape(setup_.B, setup_.T);
        upload(micro_batch * N_, N_);
        const bool buckets_travel = peers_.several() || !setup_.keep_gradients;
        auto work = [&] { forward_and_backward(); };
        if (warming_up_ || stats_ || buckets_travel || state_.some_without_history) work();
        else (assigns() ? first_micro_batch_ : later_micro_batch_).run(cuda_, work);
        embedding_backward();
    }
    // Whether gradients are assigned, not added: by the first micro-batch of a step. Several ranks sum what
    // each micro-batch gives right away, so every one assigns.
    bool assigns() const { return micro_batch_ == 0 || peers_.several(); }

    // Runs the embedding and all blocks. Leaves the final norm's input in final_input(), and its statistics.
    void forward(int64_t B, int64_t T) {
        set_shape(B, T);
        if (!state_.delayed_scaling()) state_.clear_amaxes();
        const Norm norm1 = norm1_of(blocks_[0]);
        exchange_.make_ready(0, 1, nullptr);
        const View positions = config_.arch.rope ? View{} : state_.weight(positions_);
        embedding_forward(device_.work<int32_t>(Work::Tokens), state_.weight(embedding_), positions, T_,
                          stream_to_write(norm1), norm1, reads_saved(norm1),
                          amax_if_needed(blocks_[0].qkv.x_scale), cuda_);
        measure_norm_input(norm1);
        for (int64_t l = 0; l < config_.L; l++) block_forward(l);
    }
    // Computes all gradients but those of the embeddings.
    void forward_and_backward() {
        forward(setup_.B, setup_.T);
        head_and_loss(true);
        for (int64_t l = config_.L; l-- > 0;) block_backward(l);
    }
    void embedding_backward() {
        const int64_t first = micro_batch_ * N_;
        const EmbeddingOrder order = embedding_order(tokens_.get() + first, N_, config_.V);
        const int64_t runs = static_cast<int64_t>(order.runs.size());
        int32_t* const device_order = device_.work<int32_t>(Work::EmbeddingOrder);
        TokenRun* const device_runs = device_.work<TokenRun>(Work::TokenRuns);
        std::copy(order.order.begin(), order.order.end(), order_.get() + first);
        std::copy(order.runs.begin(), order.runs.end(), runs_.get() + first);
        copy(device_order, order_.get() + first, N_ * 4, cuda_);
        copy(device_runs, runs_.get() + first, runs * int64_t(sizeof(TokenRun)), cuda_);
        begin_bucket(0);
        gpu::embedding_backward(residual_gradient(), device_order, device_runs, runs,
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
            if (!p.role.linear && i != head_weight_)
                clear(state_.gradient(i).data, p.padded_size() * state_.gradient_bytes, cuda_);
        }
    }
    // Backward has a bucket's gradients and no longer needs its weights: the gradients are sent, and with
    // --gradients none the weights are updated.
    void end_bucket(int64_t bucket) {
        if (stats_) return state_.measure(bucket);
        if (peers_.several()) exchange_.add_bucket(bucket, micro_batch_ == 0);
        if (setup_.keep_gradients) return;
        peers_.make_compute_wait();
        check_loss(&results()->checked_loss);
        state_.update(*adamw_, bucket);
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
        linear_forward(b.qkv, norm(as_forward_reads(norm1)), qkv);
        // rotary positions
        if (config_.arch.rope) rope_forward(rope(), qkv, cuda_);
        save_attention(qkv, saved_qkv);
        // attention: causal, within each sequence of T tokens -> (N, q_cols)
        attention_forward(attention(), qkv.data, out.data, log_sum_exp(b), cuda_);
        save_attention(out, saved_out);
        take_amax(stored(saved_out), amax_if_needed(b.attention_out.x_scale));
        // attention output projection: (N, q_cols) -> (N, C)
        linear_forward(b.attention_out, stored(saved_out), branch);
        // residual add; it saves the input of norm 2
        residual_forward(norm1, branch, norm2, amax_if_needed(b.gate_up.x_scale));

        // norm 2; gate and up projection, saved as the recipe says (coat: in groups): (N, C) -> (N, 2F), or
        // (N, F) for GPT-2
        gate_up_forward(b, norm(as_forward_reads(norm2)), gate_up);
        // SiLU(gate) x up, or GELU, computed from what was saved, or (coat-saved) from the BF16 values that
        // the groups were made of; down projection: (N, F) -> (N, C)
        const bool from_saved = recipe_.forward_reads_groups || !gate_up.quant.fp8();
        const View input = from_saved ? gate_up : compute_view(Work::GateUp, gate_up.cols);
        linear_forward(b.down, activation(gated, input), branch);
        // residual add; it saves the input of the next block's norm 1, or of the final norm
        residual_forward(norm2, branch, next, last ? nullptr : amax_if_needed(blocks_[l + 1].qkv.x_scale));
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
                              amax_if_needed(b.gate_up.g_scale), in_place ? gate_up.data : nullptr);
        // gate and up projection, dgrad; norm 2
        dgrad(b.gate_up, g8, dx);
        residual_backward(norm2, b.norm2, dx, g, amax_if_needed(b.attention_out.g_scale));
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
        const View dqkv = compute_view(reuse ? gate_up.data : device_.work(Work::QkvGradient), N_,
                                       config_.qkv_cols());
        attention_backward(attention(), qkv.data, out.data, log_sum_exp(b), dout.data, dqkv.data,
                           device_.work(Work::AttentionScratch), cuda_);
        // rotary positions
        AmaxAndScale* const dqkv_amax = amax_if_needed(b.qkv.g_scale);
        if (rotated) rope_backward(rope(), dqkv, dqkv_amax, cuda_);
        // q, k, v projection, dgrad; norm 1
        g8 = gradient_operand(b.qkv, stored(dqkv), rotated ? nullptr : dqkv_amax);
        dgrad(b.qkv, g8, dx);
        residual_backward(norm1, b.norm1, dx, g,
                          l > 0 ? amax_if_needed(blocks_[l - 1].down.g_scale) : nullptr);
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

    // The widest tensor of a layer. If it is saved in groups, its BF16 form exists for `at_once` tokens at a
    // time, or for all of them if the activation reads it (coat-saved). While it goes to groups, the amax of
    // the activation's output is taken.
    void gate_up_forward(const Block& b, const Lazy& x, const View& gate_up) {
        const bool gated = config_.arch.gated;
        AmaxAndScale* const act = amax_if_needed(b.down.x_scale);
        if (!gate_up.quant.fp8()) {
            linear_forward(b.gate_up, x, gate_up);
            return take_amax(activation(gated, gate_up), act);
        }
        const Operand x8 = input_operand(b.gate_up, x, Gemm::Fprop),
                      w8 = weight_operand(b.gate_up, Gemm::Fprop);
        // 1x128 scales are laid out for the GEMM of all rows: no part of them can be used alone.
        const int64_t at_once = formats_.x.granularity == PER_TENSOR ? GATE_UP_TOKENS : N_;
        const View whole = compute_view(Work::GateUp, gate_up.cols);  // all of it if the activation reads it
        for (int64_t first = 0; first < N_; first += at_once) {
            const int64_t n = std::min(at_once, N_ - first), place = recipe_.forward_reads_groups ? 0 : first;
            const View part = rows(whole, place, n);
            gemms_.run(Gemm::Fprop, {rows(x8.view, first, gemm_rows(part).rows)}, w8, gemm_rows(part), false,
                       bias(b.gate_up), cuda_);
            quantize_gate_up(gated, part, rows(gate_up, first, n), recipe_.forward_reads_groups, act,
                             stats_of(Kind::ActivationInput), cuda_);
        }
    }

    // --- Operands: a tensor in the format that a GEMM reads
    // These functions launch the kernels that make it. A dense tensor that is stored in the wanted format is
    // used in place. FP8 codes go to `codes` and, transposed, to `transposed`; either may be null.
    Operand make_operand(const Lazy& x, const Quant& q, void* codes, void* transposed, AmaxAndScale* scale,
                         Kind kind) {
        if (x.op == LazyOp::Stored && !q.fp8() && !x.input.quant.fp8()) return {x.input};
        const int64_t rows = q.fp8() && !transposed ? round_up(x.rows, 16) : x.rows;
        const Operand out = operand_at(rows, x.cols, q, codes, transposed, scale);
        quantize(x, out, stats_of(kind), cuda_);
        return out;
    }
    // A per-tensor scale is in its AmaxAndScale; other scales lie right behind the codes.
    static Operand operand_at(int64_t rows, int64_t cols, const Quant& q, void* codes, void* transposed,
                            AmaxAndScale* scale) {
        if (q.granularity == PER_TENSOR) return {{codes, scale, rows, cols, q}, transposed};
        auto behind = [&](void* p) {
            return p ? static_cast<uint8_t*>(p) + q.code_bytes(rows, cols) : nullptr;
        };
        return {{codes, behind(codes), rows, cols, q}, transposed, behind(transposed), scale};
    }
    // FP8 GEMMs want a multiple of 16 rows, which a prompt may not have: they read and write a few rows more,
    // whose values are undefined and never used.
    View gemm_rows(View v) const { return v.rows = formats_.x.fp8() ? round_up(v.rows, 16) : v.rows, v; }

    // The input of a linear layer: fprop reduces over its columns, wgrad over its rows.
    Operand input_operand(const Linear& w, const Lazy& x, Gemm use) {
        const Quant& q = formats_.x;
        void* const place =
            device_.work(x.op == LazyOp::Activation ? Work::ActivationOperand : Work::InputOperand);
        const bool transposed = q.fp8() && use == Gemm::Wgrad;
        return make_operand(x, q, transposed ? nullptr : place, transposed ? place : nullptr, w.x_scale,
                            Kind::LinearInput);
    }
    // The weight: fprop reduces over its columns, dgrad over its rows. It may be in the cache; it may have
    // been gathered from other GPUs as codes; otherwise its codes are made here.
    Operand weight_operand(const Linear& w, Gemm use) {
        if (formats_.w.fp8() && w.cached_weight) return cached_operand(w);
        const View whole = whole_weight(w, use);
        void* const place = device_.work(Work::WeightOperand);
        void *const codes = use == Gemm::Dgrad ? nullptr : place, *const transposed = codes ? nullptr : place;
        if (whole.quant.fp8() && codes) return {whole};
        if (whole.quant.fp8()) {
            transpose_codes(whole, transposed, cuda_);
            return operand_at(whole.rows, whole.cols, whole.quant, nullptr, transposed, w.w_scale);
        }
        take_weight_amax(w);
        return make_operand(stored(whole), formats_.w, codes, transposed, w.w_scale, Kind::Weight);
    }
    // Waits for the weight, if other GPUs send it, and asks for the one that this pass needs next.
    View whole_weight(const Linear& w, Gemm use) {
        const int64_t stage = w.bucket, next_in_backward = stage > 1 ? stage - 1 : Exchange::NONE;
        exchange_.make_ready(stage, use == Gemm::Dgrad ? next_in_backward : stage + 1,
                             stats_of(Kind::Weight));
        return state_.weight(w.param);
    }
    Operand cached_operand(const Linear& w) const {
        const int64_t rows = state_.params[w.param].rows, cols = state_.params[w.param].cols;
        return operand_at(rows, cols, formats_.w, w.cached_weight,
                        w.cached_weight + formats_.w.operand_bytes(rows, cols), w.w_scale);
    }
    // The gradient of the output, for dgrad (which reduces over its columns) and wgrad (over its rows); and
    // the gradient of the bias. amax: where the amax is still to be taken; null if it has been. A bias sums
    // the unrounded gradient of an FP8 operand, in a pass that takes the amax too; it sums the stored values
    // of any other. place: of the codes, if they do not go to Work::GradientOperand.
    Operand gradient_operand(const Linear& w, const Lazy& g, AmaxAndScale* amax, void* place = nullptr) {
        const bool fp8 = formats_.g.fp8();
        void* const codes = place ? place : device_.work(Work::GradientOperand);
        void* const transposed = fp8 ? device_.work(Work::GradientOperandTransposed) : nullptr;
        auto bias_gradient = [&](const Lazy& g, Format rounding, AmaxAndScale* amax) {
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
    AmaxAndScale* amax_if_needed(AmaxAndScale* scale) const {
        const bool just_in_time = !state_.delayed_scaling() || state_.some_without_history;
        return formats_.x.fp8() && formats_.x.granularity == PER_TENSOR && just_in_time ? scale : nullptr;
    }
    void take_amax(const Lazy& x, AmaxAndScale* scale) const {
        if (scale) amax(x, scale, cuda_);
    }
    // adamw() leaves the amax of a weight in scale(param). Delayed scaling reads another AmaxAndScale, so it
    // takes the amax here.
    void take_weight_amax(const Linear& w) const {
        if (state_.delayed_scaling()) take_amax(stored(state_.weight(w.param)), amax_if_needed(w.w_scale));
    }

    // --- Residual stream and attention
    // The residual stream as the next residual_add reads it, (N, C), by the norm beside it: in the compute
    // dtype where the norm's input is in groups; otherwise the two are one tensor.
    View stream_at(const Norm& n) const {
        return n.in.quant.fp8() ? compute_view(Work::Residual, config_.C) : n.in;
    }
    // Whether the forward pass computes the norm from what is saved, and the norm as it computes it.
    bool reads_saved(const Norm& n) const { return recipe_.forward_reads_groups || !n.in.quant.fp8(); }
    Norm as_forward_reads(Norm n) const {
        if (!reads_saved(n)) n.in = stream_at(n);
        return n;
    }
    View stream_to_write(const Norm& n) const { return n.in.quant.fp8() ? stream_at(n) : View{}; }
    // The input of `next` is saved; the amax of its output goes to y_amax.
    void residual_forward(const Norm& before, const View& branch, const Norm& next, AmaxAndScale* y_amax) {
        residual_add(stream_at(before), branch, stream_to_write(next), next, reads_saved(next), y_amax,
                     cuda_);
        measure_norm_input(next);
    }
    void measure_norm_input(const Norm& n) const {
        if (n.in.quant.fp8()) measure_groups(stored(stream_at(n)), stats_of(Kind::NormInput), cuda_);
    }
    // g += the gradient of the norm's input; g is no tensor at the head, where the residual stream ends.
    void residual_backward(const Norm& n, size_t weight, const View& dy, const View& g,
                           AmaxAndScale* g_amax) {
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
        if (saved.quant.fp8()) quantize_groups(x, saved, true, stats_of(Kind::Attention), cuda_);
    }
    View load_attention(const View& saved, Work work) {
        const View x = attention_view(saved, work);
        if (saved.quant.fp8()) convert(saved, x, cuda_);
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
        gemms_.run(Gemm::Fprop, y, {state_.weight(head_weight_)}, logits, false, nullptr, cuda_);
        return logits;
    }
    // Results::outcome.loss += the sum of the micro-batch's losses * Results::loss_scale; and in backward the
    // gradient of the final norm's input. Logits exist for HEAD_TOKENS tokens at a time; their gradients
    // take their place. The head's gradient is summed in FP32 where a BF16 sum would be rounded too often
    // (plan.h, head_sum_apart).
    void head_and_loss(bool backward) {
        const View dy = compute_view(Work::Branch, config_.C), gradient = state_.gradient(head_weight_);
        const bool in_fp32 = head_sum_apart(setup_);
        const View wide{device_.work(Work::HeadGradient), nullptr, gradient.rows, gradient.cols, Q_F32},
            sum = in_fp32 ? wide : gradient;
        const int32_t* const targets = device_.work<int32_t>(Work::Targets);
        float* const losses = device_.work<float>(Work::Losses);
        exchange_.make_ready(exchange_.head_stage(), backward ? exchange_.head_stage() - 1 : Exchange::NONE,
                      stats_of(Kind::Weight));
        if (backward) exchange_.wait_for_buckets();
        if (backward && in_fp32 && !assigns()) convert(gradient, sum, cuda_);  // BF16 to FP32
        for (int64_t first = 0; first < N_; first += HEAD_TOKENS) {
            const int64_t n = std::min(HEAD_TOKENS, N_ - first);
            const View logits = head_logits(first, n),
                       y = compute_view(device_.work(Work::FinalNorm), n, config_.C);
            cross_entropy(logits, config_.V, targets + first, backward ? &results()->loss_scale : nullptr,
                          losses + first, cuda_);
            if (!backward) continue;
            gemms_.run(Gemm::Wgrad, {logits}, {y}, sum, !(assigns() && first == 0), nullptr, cuda_);
            gemms_.run(Gemm::Dgrad, {logits}, {state_.weight(head_weight_)}, rows(dy, first, n), false,
                       nullptr, cuda_);
        }
        loss_sum(losses, N_, &results()->loss_scale, &results()->outcome.loss, cuda_);
        if (!backward) return;
        if (in_fp32) convert(sum, gradient, cuda_);  // FP32 to BF16
        begin_bucket(buckets() - 1);  // clears gradients of the final norm; a GEMM has written the head's
        residual_backward(final_norm(), final_norm_, dy, View{}, amax_if_needed(blocks_.back().down.g_scale));
        end_bucket(buckets() - 1);
    }

    // --- Views
    void set_shape(int64_t B, int64_t T) { B_ = B, T_ = T, N_ = B * T; }
    View saved(const Block& b, Saved which) const {  // the rows of this batch
        const View& v = b.saved[static_cast<int>(which)];
        return {v.data, v.scales, N_, v.cols, v.quant};
    }
    float* log_sum_exp(const Block& b) const {
        return static_cast<float*>(saved(b, Saved::LogSumExp).data);
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
        return {in, state_.weight(weight).data, rms ? nullptr : state_.weight(weight + 1).data,
                device_.work<float2>(Work::NormStatistics), rms, config_.norm_eps};
    }
    Norm norm1_of(const Block& b) const { return norm_of(b.norm1, saved(b, Saved::Norm1Input)); }
    Norm norm2_of(const Block& b) const { return norm_of(b.norm2, saved(b, Saved::Norm2Input)); }
    Norm final_norm() const { return norm_of(final_norm_, final_input()); }
    const void* bias(const Linear& w) const {
        return w.biased ? state_.weight(w.param + 1).data : nullptr;
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
                          offset = l * layout.layer_bytes + layout.saved_tensors[i].offset;
            uint8_t* const codes = device_.at(layout.saved.offset + offset);
            b.saved[static_cast<int>(table[i].which)] = {codes, codes + table[i].quant.code_bytes(N, cols), N,
                                                         cols, table[i].quant};
        }
        const std::string name = "layers." + std::to_string(l) + ".";
        int64_t linears = 0;
        auto linear = [&](const char* of) -> Linear {
            const size_t i = param(name + of);
            const int64_t out = state_.params[i].rows, in = state_.params[i].cols, number = linears++;
            uint8_t* const cached = cache;
            if (cache) cache += formats_.w.operand_bytes(out, in) + formats_.w.operand_bytes(in, out);
            const bool biased = number == 0 ? config_.arch.qkv_bias : config_.arch.bias;
            return {i, biased, state_.params[i].bucket, state_.operand_scales(l, LinearOperand::X) + number,
                    state_.weight_scale(i), state_.operand_scales(l, LinearOperand::G) + number, cached};
        };
        b.norm1 = param(name + "norm1.weight"), b.norm2 = param(name + "norm2.weight");
        b.qkv = linear("qkv"), b.attention_out = linear("attention_out");
        b.gate_up = linear("gate_up"), b.down = linear("down");
        return b;
    }
};

}  // namespace

std::unique_ptr<Model> gpu_model(const Setup& s, const GpuFacts& facts) {
    return std::make_unique<GpuModel>(s, facts);
}

}  // namespace coat
