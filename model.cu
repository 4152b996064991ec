// model.cu - one training step on the GPU: Llama and GPT-2, forward, backward and update, in any recipe.
//
// It mirrors the CPU reference (reference.cpp) with the kernels of coat.cuh, adamw.cuh and gpu/. Read
// GpuModel::block_forward() and block_backward() first: they follow the table that --plan prints. There are
// three rules:
//   - Everything is in one allocation (gpu/arena.cuh): a step takes memory where it uses it. Nothing is
//     allocated after the start, and the host waits for the GPU only at the end of a step.
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
//   LinearLayer  its GEMMs, and the operands that they read                        (gpu/linear.cuh)
//   GpuModel  the Model that train.cpp drives: a step, its micro-batches, and their blocks in the order of
//             the --plan print-out
#include <algorithm>

#include "gpu/attention.cuh"
#include "gpu/layers.cuh"
#include "gpu/linear.cuh"
#include "gpu/norm.cuh"
#include "gpu/report.cuh"

namespace coat {
namespace {

using namespace gpu;

struct Block {
    View saved[6];        // by Saved (model.h, saved_per_layer)
    size_t norm1, norm2;  // parameters: the weights; the bias of a LayerNorm follows its weight
    LinearLayer qkv, attention_out, gate_up, down;
};

class GpuModel : public Model {
public:
    // bytes: of the allocation; 0: a dry run, which goes through a micro-batch and an update, and launches
    // nothing.
    GpuModel(const Setup& s, int64_t bytes, bool cache_weights)
        : device_(s, bytes), gemms_(arena_.take(Gemms::SCRATCH), recipe_.sums.fast),
          peers_(setup_, device_.memory, cuda_), state_(device_, peers_),
          exchange_(device_, state_, peers_), linear_{device_, state_, exchange_, gemms_,
                                                      linear_formats(setup_)},
          caches_weights_(cache_weights), embedding_(state_.number("embedding")),
          head_weight_(state_.number(config_.tied ? "embedding" : "head")),
          final_norm_(state_.number("final_norm.weight")),
          positions_(config_.arch.rope ? embedding_ : state_.number("positions")),
          final_input_(arena_.take(gpu_tokens(setup_) * config_.C * info(recipe_.compute).bytes)),
          norm_partials_(arena_.take<float>(norm_backward_workspace(config_.C) / sizeof(float))),
          norm_statistics_(arena_.take<float2>(gpu_tokens(setup_))),
          device_tokens_(arena_.take<int32_t>(batch_tokens())),
          device_targets_(arena_.take<int32_t>(batch_tokens())),
          device_order_(arena_.take<int32_t>(batch_tokens())),
          device_runs_(arena_.take<TokenRun>(batch_tokens())), losses_(arena_.take<float>(batch_tokens())),
          rope_table_(arena_.take<float2>(config_.arch.rope ? setup_.T * config_.HS() / 2 : 0)),
          tokens_(pinned_tokens(), dry_run()), targets_(pinned_tokens(), dry_run()),
          order_(pinned_tokens(), dry_run()), runs_(pinned_tokens(), dry_run()), outcome_(1, dry_run()),
          loss_scale_(1, dry_run()) {
        blocks_.reserve(static_cast<size_t>(config_.L));
        for (int64_t l = 0; l < config_.L; l++) blocks_.push_back(make_block(l));
        set_shape(setup_.B, setup_.T);
        if (config_.arch.rope) rope_table(config_, setup_.T, rope_table_, cuda_);
        start();
        if (dry_run()) dry_step();
        else warm_up(), start();
    }
    int64_t most_memory() const { return arena_.most(); }

    StepResult step(const int32_t* tokens, const int32_t* targets, const AdamW& adamw) override {
        check_and_pin(tokens, targets, step_tokens());
        const int64_t counted = sum_of_ranks(counted_targets(targets, step_tokens()));
        if (counted == 0) return {0, 0, true};
        begin(static_cast<double>(counted));
        adamw_ = &adamw;
        for (int64_t i = 0; i < setup_.accumulate; i++) {
            run(i);
            if (setup_.keep_gradients) check_loss(&device_.results->checked_loss);
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
        check_loss(&device_.results->outcome.loss);
        return finish().loss;
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        check_and_pin(tokens, tokens, n);
        upload(0, n);
        begin(1);
        forward(1, n);
        exchange_.make_ready(exchange_.head_stage(), Exchange::NONE, nullptr);
        const Arena::Scope scope(arena_);
        const View row = head_part(n - 1, 1).logits, wide{gemms_.scratch(), nullptr, 1, row.cols, Q_F32};
        convert(row, wide, cuda_);
        copy(logits, wide.data, config_.V * 4, cuda_);
        device_.wait();
    }

    QuantReport quantization(const int32_t* tokens, const int32_t* targets) override {
        report_ = {};
        check_and_pin(tokens, targets, batch_tokens());
        clear(device_.results->stats, sizeof(device_.results->stats), cuda_);
        begin(divisor_of_mean(targets, batch_tokens()), device_.results->stats);
        run(0);
        peers_.make_compute_wait();
        report_.k_m = state_.expansion_factors(false);
        report_.k_v = state_.expansion_factors(true);
        copy(report_.kinds, device_.results->stats, sizeof(device_.results->stats), cuda_);
        device_.wait();
        // Where weights travel as codes, each rank has measured those that it made.
        QuantStats& weights = report_.kinds[static_cast<int>(Kind::Weight)];
        if (exchange_.sends_codes()) weights = sum_of_ranks(weights);
        return report_;
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
    Device device_;
    Arena& arena_ = device_.arena;
    const Setup& setup_ = device_.setup;
    const ModelConfig& config_ = setup_.config;
    const Recipe& recipe_ = setup_.recipe;
    const cudaStream_t cuda_ = device_.stream;
    Gemms gemms_;
    Peers peers_;
    State state_;
    Exchange exchange_;
    LinearContext linear_;

    QuantReport report_;  // while quantization is measured

    const bool caches_weights_;
    bool cache_is_valid_ = false;
    // Parameters; positions_ only where the architecture has them.
    const size_t embedding_, head_weight_, final_norm_, positions_;
    std::vector<Block> blocks_;
    // Memory that is used in every phase of a step: the final norm's input, then the gradient of the residual
    // stream; sums and statistics of norms; a micro-batch.
    uint8_t* const final_input_;
    float* const norm_partials_;
    float2* const norm_statistics_;
    int32_t *const device_tokens_, *const device_targets_, *const device_order_;
    TokenRun* const device_runs_;
    float* const losses_;
    float2* const rope_table_;
    // The gate_up gradient's codes replace the saved gate and up (plan.h).
    const bool gated_ = config_.arch.gated, in_place_ = gate_up_gradient_in_place(setup_);

    // Of the pass that runs: its shape, and which micro-batch of which step it is.
    int64_t B_ = 0, T_ = 0, N_ = 0;
    void* residual_ = nullptr;  // the residual stream of a forward pass whose norms read groups
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
    bool dry_run() const { return cuda_ == DRY_RUN; }
    int64_t pinned_tokens() const { return dry_run() ? batch_tokens() : step_tokens(); }

    void start() {
        peers_.make_compute_wait();
        clear(device_.results, sizeof(Results), cuda_);
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

    void dry_step() {
        const AdamW adamw{1, 0.0f};
        adamw_ = &adamw;
        begin(1);
        run(0);
        if (setup_.keep_gradients) state_.update(adamw);
    }

    template <class T> T sum_of_ranks(const T& mine) const {
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
        copy(device_tokens_, tokens_.get() + first, n * 4, cuda_);
        copy(device_targets_, targets_.get() + first, n * 4, cuda_);
    }
    // Before a step, or a pass of its own, over `counted` targets. Makes the FP8 copies of the weights, if
    // they are cached and not up to date. With delayed scaling that takes their amaxes of the step.
    void begin(double counted, QuantStats* stats = nullptr) {
        *loss_scale_.get() = 1.0 / counted;
        copy(&device_.results->loss_scale, loss_scale_.get(), sizeof(double), cuda_);
        clear(&device_.results->outcome, sizeof(Outcome), cuda_);
        clear(&device_.results->checked_loss, sizeof(double), cuda_);
        linear_.stats = stats;
        if (state_.delayed_scaling()) {
            state_.clear_amaxes();
            cache_is_valid_ = false;
            exchange_.forget_gathered();
        }
        if (!caches_weights_ || (cache_is_valid_ && !stats)) return;
        for (Block& b : blocks_)
            for (LinearLayer* layer : {&b.qkv, &b.attention_out, &b.gate_up, &b.down})
                layer->make_cached_weight();
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
        linear_.assigns = assigns();
        set_shape(setup_.B, setup_.T);
        upload(micro_batch * N_, N_);
        const bool buckets_travel = peers_.several() || !setup_.keep_gradients;
        auto work = [&] { forward_and_backward(); };
        if (warming_up_ || linear_.stats || buckets_travel || state_.some_without_history) work();
        else (assigns() ? first_micro_batch_ : later_micro_batch_).run(cuda_, work);
        embedding_backward();
    }
    // Whether gradients are assigned, not added: by the first micro-batch of a step. Several ranks sum what
    // each micro-batch gives right away, so every one assigns.
    bool assigns() const { return micro_batch_ == 0 || peers_.several(); }

    // Runs the embedding and all blocks. Leaves the final norm's input in final_input(), and its statistics.
    void forward(int64_t B, int64_t T) {
        set_shape(B, T);
        const Arena::Scope scope(arena_);
        if (recipe_.nonlinear.fp8()) residual_ = compute_view(N_, config_.C).data;
        if (!state_.delayed_scaling()) state_.clear_amaxes();
        const Norm norm1 = norm1_of(blocks_[0]);
        exchange_.make_ready(0, 1, nullptr);
        const View positions = config_.arch.rope ? View{} : state_.weight(positions_);
        embedding_forward(device_tokens_, state_.weight(embedding_), positions, T_, stream_to_write(norm1),
                          norm1, reads_saved(norm1), blocks_[0].qkv.x_amax(), cuda_);
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
        const Arena::Scope scope(arena_);
        std::copy(order.order.begin(), order.order.end(), order_.get() + first);
        std::copy(order.runs.begin(), order.runs.end(), runs_.get() + first);
        copy(device_order_, order_.get() + first, N_ * 4, cuda_);
        copy(device_runs_, runs_.get() + first, runs * int64_t(sizeof(TokenRun)), cuda_);
        begin_bucket(0);
        gpu::embedding_backward(residual_gradient(), device_order_, device_runs_, runs,
                                state_.gradient(embedding_), arena_.take<float>(N_ * config_.C), cuda_);
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
        if (linear_.stats) return state_.measure(bucket, report_);
        if (peers_.several()) exchange_.add_bucket(bucket, micro_batch_ == 0);
        if (setup_.keep_gradients) return;
        peers_.make_compute_wait();
        check_loss(&device_.results->checked_loss);
        state_.update(*adamw_, bucket);
    }

    // *checked = the loss so far, or NaN if an FP8 code hides a value that is not finite.
    void check_loss(double* checked) {
        checked_loss(state_.scale(0), state_.number_of_scales(), &device_.results->outcome.loss, checked,
                     cuda_);
    }
    const Outcome& finish() {
        copy(outcome_.get(), &device_.results->outcome, sizeof(Outcome), cuda_);
        device_.wait();
        return *outcome_.get();
    }

    // --- One block: the comments are the rows of the --plan print-out
    void block_forward(int64_t l) {
        Block& b = blocks_[l];
        Block* const next = l + 1 < config_.L ? &blocks_[l + 1] : nullptr;
        const Norm norm1 = norm1_of(b), norm2 = norm2_of(b);
        {
            const Arena::Scope scope(arena_);
            const View saved_qkv = saved(b, Saved::Qkv), saved_out = saved(b, Saved::Attention),
                       qkv = attention_view(saved_qkv), out = attention_view(saved_out);
            // norm 1; q, k, v projection: (N, C) -> (N, q_cols + 2 kv_cols). The norm is computed from its
            // saved input (in coat-saved from the residual stream) while its codes are made
            b.qkv.forward(norm(as_forward_reads(norm1)), qkv);
            // rotary positions
            if (config_.arch.rope) rope_forward(rope(), qkv, cuda_);
            save_attention(qkv, saved_qkv);
            // attention: causal, within each sequence of T tokens -> (N, q_cols)
            attention_forward(attention(), qkv.data, out.data, log_sum_exp(b), cuda_);
            save_attention(out, saved_out);
            // attention output projection: (N, q_cols) -> (N, C)
            b.attention_out.take_x_amax(stored(saved_out));
            const View branch = compute_view(N_, config_.C);
            b.attention_out.forward(stored(saved_out), branch);
            // residual add; it saves the input of norm 2
            residual_forward(norm1, branch, norm2, b.gate_up.x_amax());
        }
        const Arena::Scope scope(arena_);
        const View branch = compute_view(N_, config_.C);
        // norm 2; gate and up projection, saved as the recipe says (coat: in groups): (N, C) -> (N, 2F), or
        // (N, F) for GPT-2
        const View gate_up = gate_up_forward(b, norm(as_forward_reads(norm2)));
        // SiLU(gate) x up, or GELU, computed from what was saved, or (coat-saved) from the BF16 values that
        // the groups were made of; down projection: (N, F) -> (N, C)
        b.down.forward(activation(gated_, gate_up), branch);
        // residual add; it saves the input of the next block's norm 1, or of the final norm
        residual_forward(norm2, branch, next ? norm1_of(*next) : final_norm(),
                         next ? next->qkv.x_amax() : nullptr);
    }

    // The gradient of the residual stream, g, goes through the block in place. norm_backward() leaves behind
    // what the next lines need: the amax of the gradient that it writes; and the statistics with which the
    // norm's output, an operand of wgrad, is recomputed. All norms share one buffer of statistics, so wgrad
    // follows.
    void block_backward(int64_t l) {
        Block& b = blocks_[l];
        const Norm norm1 = norm1_of(b), norm2 = norm2_of(b);
        const View g = residual_gradient(), gate_up = saved(b, Saved::GateUp),
                   saved_out = saved(b, Saved::Attention);
        {
            // The gradient of gate and up (N, 2F) is stored only as an operand. In place, it overwrites the
            // saved gate and up, which nobody reads later: a thread loads its elements before it stores their
            // codes
            const Arena::Scope scope(arena_);
            const Operand dgate_up = b.gate_up.take_gradient(N_, in_place_ ? gate_up.data : nullptr);
            {
                // down projection: wgrad, then dgrad: dact (N, F), the gradient of the activation's output
                const Arena::Scope scope(arena_);
                begin_bucket(b.down.bucket);
                const Operand g8 = b.down.gradient_operand(stored(g), nullptr);
                b.down.wgrad(g8, activation(gated_, gate_up));
                const View dact = compute_view(N_, config_.F);
                b.down.dgrad(g8, dact);
                end_bucket(b.down.bucket);
                // activation
                begin_bucket(b.gate_up.bucket);
                b.gate_up.gradient_operand(activation_backward(gated_, gate_up, dact), b.gate_up.g_amax(),
                                           &dgate_up);
            }
            // gate and up projection, dgrad; norm 2; wgrad
            dgrad_and_norm(b.gate_up, dgate_up, norm2, b.norm2, b.attention_out.g_amax());
            b.gate_up.wgrad(dgate_up, norm(norm2));
            end_bucket(b.gate_up.bucket);
        }
        // The memory of gate and up is free now: dqkv lies there if it fits
        const Arena::Scope scope(arena_);
        const View dqkv = qkv_gradient_in_place(setup_) ? compute_at(gate_up.data, N_, config_.qkv_cols())
                                                        : compute_view(N_, config_.qkv_cols());
        {
            const Arena::Scope scope(arena_);
            const View dout = compute_view(N_, config_.q_cols());
            // attention output projection: wgrad, then dgrad
            begin_bucket(b.attention_out.bucket);
            {
                const Arena::Scope scope(arena_);
                const Operand g8 = b.attention_out.gradient_operand(stored(g), nullptr);
                b.attention_out.wgrad(g8, stored(saved_out));
                b.attention_out.dgrad(g8, dout);
            }
            end_bucket(b.attention_out.bucket);
            // attention
            begin_bucket(b.qkv.bucket);
            const View qkv = load_attention(saved(b, Saved::Qkv)), out = load_attention(saved_out);
            void* const workspace = arena_.take(static_cast<int64_t>(attention_workspace(attention())));
            attention_backward(attention(), qkv.data, out.data, log_sum_exp(b), dout.data, dqkv.data,
                               workspace, cuda_);
        }
        // rotary positions
        const bool rotated = config_.arch.rope;
        if (rotated) rope_backward(rope(), dqkv, b.qkv.g_amax(), cuda_);
        // q, k, v projection, dgrad; norm 1; wgrad
        const Operand g8 = b.qkv.gradient_operand(stored(dqkv), rotated ? nullptr : b.qkv.g_amax());
        dgrad_and_norm(b.qkv, g8, norm1, b.norm1, l > 0 ? blocks_[l - 1].down.g_amax() : nullptr);
        b.qkv.wgrad(g8, norm(norm1));
        end_bucket(b.qkv.bucket);
    }

    // g8 -> dx -> the gradient of the norm's input, which is added to that of the residual stream.
    void dgrad_and_norm(LinearLayer& layer, const Operand& g8, const Norm& n, size_t weight,
                        AmaxAndScale* g_amax) {
        const Arena::Scope scope(arena_);
        const View dx = compute_view(N_, config_.C);
        layer.dgrad(g8, dx);
        residual_backward(n, weight, dx, residual_gradient(), g_amax);
    }

    // The widest tensor of a layer. If it is saved in groups, its BF16 form exists for `at_once` tokens at a
    // time, or for all of them if the activation reads it (coat-saved). While it goes to groups, the amax of
    // the activation's output is taken. Returns what the activation reads.
    View gate_up_forward(Block& b, const Lazy& x) {
        const View gate_up = saved(b, Saved::GateUp);
        if (!gate_up.quant.fp8()) {
            b.gate_up.forward(x, gate_up);
            b.down.take_x_amax(activation(gated_, gate_up));
            return gate_up;
        }
        // 1x128 scales are laid out for the GEMM of all rows: no part of them can be used alone.
        const int64_t at_once = linear_.formats.x.granularity == PER_TENSOR ? GATE_UP_TOKENS : N_;
        const bool reads_groups = recipe_.forward_reads_groups;
        const View whole = reads_groups ? View{} : compute_view(N_, gate_up.cols);
        const Arena::Scope scope(arena_);
        const View one = reads_groups ? compute_view(std::min(at_once, N_), gate_up.cols) : View{};
        b.gate_up.forward_in_parts(
            x, at_once,
            [&](int64_t first, int64_t n) { return reads_groups ? rows(one, 0, n) : rows(whole, first, n); },
            [&](int64_t first, const View& part) {
                quantize_gate_up(gated_, part, rows(gate_up, first, part.rows), reads_groups, b.down.x_amax(),
                                 stats_of(Kind::ActivationInput), cuda_);
            });
        return reads_groups ? gate_up : whole;
    }

    // --- Residual stream and attention
    // The residual stream as the next residual_add reads it, (N, C), by the norm beside it: in the compute
    // dtype where the norm's input is in groups; otherwise the two are one tensor.
    View stream_at(const Norm& n) const {
        return n.in.quant.fp8() ? compute_at(residual_, N_, config_.C) : n.in;
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
                      n.rms ? View{} : state_.gradient(weight + 1), norm_partials_, cuda_);
    }

    // Attention computes in the compute dtype. Where its inputs and output are saved in groups, it computes
    // with what the groups hold: so the saved log-sum-exp belongs to what backward reads.
    View attention_view(const View& saved) {
        return saved.quant.fp8() ? compute_view(N_, saved.cols) : saved;
    }
    void save_attention(const View& x, const View& saved) {
        if (saved.quant.fp8()) quantize_groups(x, saved, true, stats_of(Kind::Attention), cuda_);
    }
    View load_attention(const View& saved) {
        const View x = attention_view(saved);
        if (saved.quant.fp8()) convert(saved, x, cuda_);
        return x;
    }

    // --- Head
    // The final norm's output and the logits (n, padded_V) of the tokens from `first` on.
    struct HeadPart {
        View y, logits;
    };
    HeadPart head_part(int64_t first, int64_t n) {
        const HeadPart part{compute_view(n, config_.C), compute_view(n, config_.padded_V())};
        Norm of_part = final_norm();
        of_part.in = rows(of_part.in, first, n);
        of_part.stats += first;
        quantize(norm(of_part), {part.y}, stats_of(Kind::LinearInput), cuda_);
        gemms_.run(Gemm::Fprop, {part.y}, {state_.weight(head_weight_)}, part.logits, false, nullptr, cuda_);
        return part;
    }
    // Results::outcome.loss += the sum of the micro-batch's losses * Results::loss_scale; and in backward the
    // gradient of the final norm's input. Logits exist for HEAD_TOKENS tokens at a time; their gradients
    // take their place. The head's gradient is summed in FP32 where a BF16 sum would be rounded too often
    // (plan.h, head_sum_apart).
    void head_and_loss(bool backward) {
        const Arena::Scope scope(arena_);
        const View gradient = state_.gradient(head_weight_);
        const View dy = backward ? compute_view(N_, config_.C) : View{};
        const bool in_fp32 = backward && head_sum_apart(setup_);
        const int64_t elements = gradient.rows * gradient.cols;
        View sum = gradient;
        if (in_fp32) sum.data = arena_.take<float>(elements), sum.quant = Q_F32;
        exchange_.make_ready(exchange_.head_stage(), backward ? exchange_.head_stage() - 1 : Exchange::NONE,
                             stats_of(Kind::Weight));
        if (backward) exchange_.wait_for_buckets();
        if (in_fp32 && !assigns()) convert(gradient, sum, cuda_);  // BF16 to FP32
        for (int64_t first = 0; first < N_; first += HEAD_TOKENS) {
            const Arena::Scope scope(arena_);
            const int64_t n = std::min(HEAD_TOKENS, N_ - first);
            const HeadPart part = head_part(first, n);
            cross_entropy(part.logits, config_.V, device_targets_ + first,
                          backward ? &device_.results->loss_scale : nullptr, losses_ + first, cuda_);
            if (!backward) continue;
            gemms_.run(Gemm::Wgrad, {part.logits}, {part.y}, sum, !(assigns() && first == 0), nullptr, cuda_);
            gemms_.run(Gemm::Dgrad, {part.logits}, {state_.weight(head_weight_)}, rows(dy, first, n), false,
                       nullptr, cuda_);
        }
        loss_sum(losses_, N_, &device_.results->loss_scale, &device_.results->outcome.loss, cuda_);
        if (!backward) return;
        if (in_fp32) convert(sum, gradient, cuda_);  // FP32 to BF16
        begin_bucket(buckets() - 1);  // clears gradients of the final norm; a GEMM has written the head's
        residual_backward(final_norm(), final_norm_, dy, View{}, blocks_.back().down.g_amax());
        end_bucket(buckets() - 1);
    }

    // --- Views
    void set_shape(int64_t B, int64_t T) { B_ = B, T_ = T, N_ = B * T; }
    View saved(const Block& b, Saved which) const {  // the rows of this batch
        const View& v = b.saved[static_cast<int>(which)];
        return {v.data, v.scales, N_, v.cols, v.quant};
    }
    float* log_sum_exp(const Block& b) const { return static_cast<float*>(saved(b, Saved::LogSumExp).data); }
    // In the compute dtype, in memory that is taken now; FP8 GEMMs may write up to 15 rows more.
    View compute_view(int64_t n, int64_t cols) {
        return compute_at(arena_.take(round_up(n, 16) * cols * info(recipe_.compute).bytes), n, cols);
    }
    View compute_at(void* data, int64_t n, int64_t cols) const {
        return {data, nullptr, n, cols, Quant{recipe_.compute}};
    }
    View final_input() const { return compute_at(final_input_, N_, config_.C); }
    // Backward reads the final norm's input once, to write this over it.
    View residual_gradient() const { return final_input(); }
    Norm norm_of(size_t weight, const View& in) const {
        const bool rms = config_.arch.rms;
        return {in,
                state_.weight(weight).data,
                rms ? nullptr : state_.weight(weight + 1).data,
                norm_statistics_,
                rms,
                config_.norm_eps};
    }
    Norm norm1_of(const Block& b) const { return norm_of(b.norm1, saved(b, Saved::Norm1Input)); }
    Norm norm2_of(const Block& b) const { return norm_of(b.norm2, saved(b, Saved::Norm2Input)); }
    Norm final_norm() const { return norm_of(final_norm_, final_input()); }
    Rope rope() const { return {rope_table_, T_, config_.HS(), config_.q_cols() + config_.kv_cols()}; }
    AttentionShape attention() const { return attention_shape(config_, B_, T_, recipe_.compute); }
    QuantStats* stats_of(Kind k) const { return linear_.stats_of(k); }

    // --- Construction
    Block make_block(int64_t l) {
        const int64_t N = gpu_tokens(setup_);
        const std::string name = "layers." + std::to_string(l) + ".";
        int64_t number = 0;
        auto linear = [&](const char* of) {
            const size_t i = state_.number(name + of);
            const Param& p = state_.params[i];
            const Quant& w = linear_.formats.w;
            const int64_t bytes = w.operand_bytes(p.rows, p.cols) + w.operand_bytes(p.cols, p.rows);
            const bool biased = number == 0 ? config_.arch.qkv_bias : config_.arch.bias;
            uint8_t* const cached = caches_weights_ ? arena_.take(bytes) : nullptr;
            return LinearLayer(linear_, i, l, number++, biased, cached);
        };
        Block b{{},
                state_.number(name + "norm1.weight"),
                state_.number(name + "norm2.weight"),
                linear("qkv"),
                linear("attention_out"),
                linear("gate_up"),
                linear("down")};
        uint8_t* here = state_.saved(l);
        for (const SavedTensor& t : saved_per_layer(setup_)) {
            uint8_t* const scales = here + t.quant.code_bytes(N, t.cols);
            b.saved[static_cast<int>(t.which)] = {here, scales, N, t.cols, t.quant};
            here += round_up(t.bytes(N), GPU_ALIGNMENT);
        }
        return b;
    }
};

}  // namespace

std::unique_ptr<Model> gpu_model(const Setup& s, int64_t bytes, bool cache_weights) {
    return std::make_unique<GpuModel>(s, bytes, cache_weights);
}

int64_t arena_bytes(const Setup& s, bool cache_weights) {
    Setup alone = s;
    alone.processes = nullptr;  // the ranks do not meet in a dry run
    return GpuModel(alone, 0, cache_weights).most_memory();
}

}  // namespace coat
