// model.cu - one training step on the GPU: Llama and GPT-2, forward and backward, in any recipe.
//
// It mirrors the CPU reference (reference.cpp) with the kernels of coat.cuh, adamw.cuh and gpu/. Read
// Network::block_forward() and block_backward() first: they follow the table that --plan prints. There are
// three rules:
//   - Everything is in one allocation (gpu/arena.cuh): a step takes memory where it uses it. Within a pass
//     the host does not wait for the GPU.
//   - Saved for backward is what coat.h's saved_per_layer() lists. What can be recomputed elementwise is
//     recomputed on the way into the next GEMM's operand.
//   - Memory is reused. The gradient of the residual stream takes the place of the final norm's input.
//     Gradients of weights take the place of saved activations that backward no longer needs (plan.h).
//
// The parts, each of which uses those before it:
//   Device       settings, memory and stream of this GPU                              (gpu/state.cuh)
//   Peers        the other GPUs                                                       (gpu/peers.cuh)
//   State        weights, gradients, scales and moments, by parameter; the update     (gpu/state.cuh)
//   Exchange     which gradients and weights travel between GPUs, and when            (gpu/exchange.cuh)
//   LinearLayer  its GEMMs, and the operands that they read                           (gpu/linear.cuh)
//   GpuModel     the Model that train.cpp drives: steps, micro-batches and buckets    (gpu/gpu_model.cuh)
//   Network      forward and backward of one micro-batch, block by block in the order of the --plan print-out
#include "gpu/attention.cuh"
#include "gpu/gpu_model.cuh"
#include "gpu/report.cuh"

namespace coat {
namespace {

using namespace gpu;

struct Block {
    size_t norm1, norm2;  // parameters: the weights; the bias of a LayerNorm follows its weight
    size_t qk_norm;       // Qwen3's
    LinearLayer qkv, attention_out, gate_up, down;
    View saved[6]{};  // by Saved (coat.h, saved_per_layer)
};

class Network final : public GpuModel {
public:
    Network(const Setup& s, int64_t bytes, bool cache_weights) : GpuModel(s, bytes, cache_weights) {
        blocks_.reserve(static_cast<size_t>(config_.L));
        for (int64_t l = 0; l < config_.L; l++) blocks_.push_back(make_block(l));
        if (rotary_) rope_table(config_, setup_.T, rope_table_, cuda_);
    }

private:
    const bool rotary_ = config_.arch.rope, gated_ = config_.arch.gated, qk_norm_ = config_.arch.qk_norm;
    // The gradient of gate and up replaces the saved gate and up, which nobody reads later, if both take the
    // same bytes a value (FP8 codes over FP8 groups, or both in the compute dtype) and there are no scales of
    // blocks, which would lie on those of the groups. Later, either way, dqkv lies there if it fits.
    const bool gate_up_in_place_ =
        info(linear_.formats.g.format).bytes == info(recipe_.nonlinear.format).bytes &&
        recipe_.x.granularity == PER_TENSOR;
    const bool qkv_in_place_ = Quant{recipe_.compute}.bytes(16, config_.qkv_cols()) <=
                               recipe_.nonlinear.bytes(16, config_.gate_up_cols());
    // Numbers of parameters.
    const size_t embedding_ = state_.number("embedding"), final_norm_ = state_.number("final_norm.weight");
    std::vector<Block> blocks_;
    // Memory that is used in every phase of a step: the final norm's input, then the gradient of the residual
    // stream; sums and statistics of norms; losses.
    void* const final_input_ = arena_.take(gpu_tokens(setup_) * config_.C * info(recipe_.compute).bytes);
    float* const norm_partials_ = arena_.take<float>(norm_backward_workspace(config_.C) / sizeof(float));
    float2* const norm_statistics_ = arena_.take<float2>(gpu_tokens(setup_));
    float* const losses_ = arena_.take<float>(setup_.B * setup_.T);
    float2* const rope_table_ = arena_.take<float2>(rotary_ ? setup_.T * config_.HS() / 2 : 0);
    void* residual_ = nullptr;  // the residual stream, where inputs of norms are saved in groups

    // --- The passes, as gpu_model.cuh calls them
    void pass(bool backward) override {
        forward();
        head_and_loss(backward);
        for (int64_t l = config_.L; backward && l-- > 0;) block_backward(l);
    }
    // The embedding and all blocks, up to the input of the final norm.
    void forward() {
        const Arena::Scope scope(arena_);
        if (recipe_.nonlinear.fp8()) residual_ = compute_view(N_, config_.C).data;
        if (!state_.delayed_scaling()) state_.clear_amaxes();
        exchange_.make_ready(0, 1);
        // embedding; it saves the input of the first norm 1
        const View positions = rotary_ ? View{} : state_.weight(state_.number("positions"));
        residual_forward(state_.weight(embedding_), positions, norm1_of(blocks_[0]), blocks_[0].qkv.x_amax(),
                         tokens_);
        for (int64_t l = 0; l < config_.L; l++) block_forward(l);
    }
    void embedding_backward(int64_t tokens) override {
        begin_bucket(0);
        gpu::embedding_backward(residual_gradient(), order_, token_rows_, tokens, state_.gradient(embedding_),
                                cuda_);
        if (!rotary_)
            gpu::embedding_backward(residual_gradient(), nullptr, nullptr, T_,
                                    state_.gradient(state_.number("positions")), cuda_);
        end_bucket(0);
    }
    void last_logits(void* logits) override {
        forward();
        exchange_.make_ready(exchange_.head_stage(), Exchange::NONE);
        const Arena::Scope scope(arena_);
        const View last = logits_of(N_ - 1, compute_view(1, config_.C));
        convert(last, {logits, nullptr, 1, last.cols, FP32}, cuda_);
    }
    void make_cached_weights() override {
        for (Block& b : blocks_)
            for (LinearLayer* layer : {&b.qkv, &b.attention_out, &b.gate_up, &b.down})
                layer->make_cached_weight();
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
            if (rotary_ && !qk_norm_) rope(angles(), qkv, false, nullptr, cuda_);
            save_attention(qkv, saved_qkv);
            // attention: causal, within each sequence of T tokens -> (N, q_cols)
            attention_forward(attention(), attention_input(b, qkv).data, out.data, log_sum_exp(b), cuda_);
            save_attention(out, saved_out);
            // attention output projection: (N, q_cols) -> (N, C)
            b.attention_out.measure_x_amax(stored(saved_out));
            const View branch = compute_view(N_, config_.C);
            b.attention_out.forward(stored(saved_out), branch);
            // residual add; it saves the input of norm 2
            residual_forward(stream_at(norm1), branch, norm2, b.gate_up.x_amax());
        }
        const Arena::Scope scope(arena_);
        // norm 2; gate and up projection, saved as the recipe says (coat: in groups): (N, C) -> (N, 2F), or
        // (N, F) for GPT-2
        const View gate_up = gate_up_forward(b, norm(as_forward_reads(norm2)));
        // SiLU(gate) x up, or GELU, computed from what was saved, or (coat-saved) from the BF16 values that
        // the groups were made of; down projection: (N, F) -> (N, C)
        const View branch = compute_view(N_, config_.C);
        b.down.forward(activation(gated_, gate_up), branch);
        // residual add; it saves the input of the next block's norm 1, or of the final norm
        residual_forward(stream_at(norm2), branch, next ? norm1_of(*next) : final_norm(),
                         next ? next->qkv.x_amax() : nullptr);
    }

    // The gradient of the residual stream, g, goes through the block in place. norm_backward() leaves behind
    // what the next lines need: the amax of the gradient that it writes; and the statistics with which the
    // norm's output, an operand of wgrad, is recomputed. All norms share one buffer of statistics, so wgrad
    // comes before the next norm.
    void block_backward(int64_t l) {
        Block& b = blocks_[l];
        const Norm norm1 = norm1_of(b), norm2 = norm2_of(b);
        const View g = residual_gradient(), gate_up = saved(b, Saved::GateUp),
                   saved_out = saved(b, Saved::Attention);
        {
            // The gradient of gate and up (N, 2F) is stored only as an operand. It may overwrite the saved
            // gate and up: a thread loads its elements before it stores their codes
            const Arena::Scope scope(arena_);
            const Operand dgate_up = b.gate_up.take_gradient(N_, gate_up_in_place_ ? gate_up.data : nullptr);
            {
                // down projection: wgrad, then dgrad: dact (N, F), the gradient of the activation's output
                const Arena::Scope scope(arena_);
                begin_bucket(b.down.bucket());
                const Operand g8 = b.down.gradient_operand(stored(g), nullptr);
                b.down.wgrad(g8, activation(gated_, gate_up));
                const View dact = compute_view(N_, config_.F);
                b.down.dgrad(g8, dact);
                end_bucket(b.down.bucket());
                // activation
                begin_bucket(b.gate_up.bucket());
                b.gate_up.gradient_operand(activation_backward(gated_, gate_up, dact), b.gate_up.g_amax(),
                                           &dgate_up);
            }
            // gate and up projection, dgrad; norm 2; wgrad
            dgrad_and_norm(b.gate_up, dgate_up, norm2, b.norm2, b.attention_out.g_amax());
            b.gate_up.wgrad(dgate_up, norm(norm2));
            end_bucket(b.gate_up.bucket());
        }
        // The memory of gate and up is free now: dqkv lies there if it fits
        const Arena::Scope scope(arena_);
        const View dqkv = qkv_in_place_ ? compute_at(gate_up.data, N_, config_.qkv_cols())
                                        : compute_view(N_, config_.qkv_cols());
        {
            const Arena::Scope scope(arena_);
            const View dout = compute_view(N_, config_.q_cols());
            // attention output projection: wgrad, then dgrad
            begin_bucket(b.attention_out.bucket());
            {
                const Arena::Scope scope(arena_);
                const Operand g8 = b.attention_out.gradient_operand(stored(g), nullptr);
                b.attention_out.wgrad(g8, stored(saved_out));
                b.attention_out.dgrad(g8, dout);
            }
            end_bucket(b.attention_out.bucket());
            // attention
            begin_bucket(b.qkv.bucket());
            const View qkv = load_attention(saved(b, Saved::Qkv)), out = load_attention(saved_out);
            void* const workspace = arena_.take(static_cast<int64_t>(attention_workspace(attention())));
            attention_backward(attention(), attention_input(b, qkv).data, out.data, log_sum_exp(b), dout.data,
                               dqkv.data, workspace, cuda_);
            // rotary positions; norm of each head of q and k
            if (rotary_) rope(angles(), dqkv, true, qk_norm_ ? nullptr : b.qkv.g_amax(), cuda_);
            if (qk_norm_)
                head_norm_backward(head_norm(b), qkv, dqkv, state_.gradient(b.qk_norm),
                                   arena_.take<float>(COLUMN_PARTIALS * angles().rotated_cols), cuda_);
        }
        // q, k, v projection, dgrad; norm 1; wgrad
        const Operand g8 =
            b.qkv.gradient_operand(stored(dqkv), rotary_ && !qk_norm_ ? nullptr : b.qkv.g_amax());
        dgrad_and_norm(b.qkv, g8, norm1, b.norm1, l > 0 ? blocks_[l - 1].down.g_amax() : nullptr);
        b.qkv.wgrad(g8, norm(norm1));
        end_bucket(b.qkv.bucket());
    }

    // g8 -> dx -> the gradient of the norm's input, which is added to that of the residual stream.
    void dgrad_and_norm(LinearLayer& layer, const Operand& g8, const Norm& n, size_t weight,
                        AmaxAndScale* g_amax) {
        const Arena::Scope scope(arena_);
        const View dx = compute_view(N_, config_.C);
        layer.dgrad(g8, dx);
        residual_backward(n, weight, dx, residual_gradient(), g_amax);
    }

    // The widest tensor of a layer. If it is saved in groups, its BF16 form exists until then, or as long as
    // the activation reads it (coat-saved). While it goes to groups, the amax of the activation's output is
    // taken. Returns what the activation reads.
    View gate_up_forward(Block& b, const Lazy& x) {
        const View gate_up = saved(b, Saved::GateUp);
        if (!gate_up.quant.fp8()) {
            b.gate_up.forward(x, gate_up);
            b.down.measure_x_amax(activation(gated_, gate_up));
            return gate_up;
        }
        const bool reads_groups = recipe_.forward_reads_groups;
        const View kept = reads_groups ? View{} : compute_view(N_, gate_up.cols);
        const Arena::Scope scope(arena_);
        const View values = reads_groups ? compute_view(N_, gate_up.cols) : kept;
        b.gate_up.forward(x, values);
        quantize_groups(values, gate_up, false, {b.down.x_amax(), gated_, reads_groups},
                        state_.stats_of(ReportKind::ActivationInput), cuda_);
        return reads_groups ? gate_up : kept;
    }

    // --- Residual stream and attention
    // The residual stream (N, C) at a norm, as residual_add reads and writes it: residual_, in the compute
    // dtype, if the norm's input is saved in groups; otherwise that input itself.
    View stream_at(const Norm& n) const {
        return n.in.quant.fp8() ? compute_at(residual_, N_, config_.C) : n.in;
    }
    // Whether the forward pass computes the norm from what is saved, and the norm as it computes it.
    bool reads_saved(const Norm& n) const { return recipe_.forward_reads_groups || !n.in.quant.fp8(); }
    Norm as_forward_reads(Norm n) const {
        if (!reads_saved(n)) n.in = stream_at(n);
        return n;
    }
    // x + branch, or of the embedding x[token] + branch[position], is saved as the input of `next`; the amax
    // of that norm's output goes to y_amax.
    void residual_forward(const View& x, const View& branch, const Norm& next, AmaxAndScale* y_amax,
                          const int32_t* tokens = nullptr) {
        const View stream = next.in.quant.fp8() ? stream_at(next) : View{};
        residual_add(x, branch, stream, next, reads_saved(next), y_amax, cuda_, tokens, T_);
        if (stream.data) measure(stored(stream), {next.in}, state_.stats_of(ReportKind::NormInput), cuda_);
    }
    // residual_gradient() = g_in + the gradient of the norm's input. In a block g_in is the same memory; at
    // the head, where the residual stream ends, it is no tensor.
    void residual_backward(const Norm& n, size_t weight, const View& dy, const View& g_in,
                           AmaxAndScale* g_amax) {
        norm_backward(n, dy, g_in, residual_gradient(), g_amax, state_.gradient(weight),
                      n.rms ? View{} : state_.gradient(weight + 1), norm_partials_, cuda_);
    }

    // Attention computes in the compute dtype. Where its inputs and output are saved in groups, it computes
    // with what the groups hold: so the saved log-sum-exp belongs to what backward reads.
    View attention_view(const View& saved) {
        return saved.quant.fp8() ? compute_view(N_, saved.cols) : saved;
    }
    void save_attention(const View& x, const View& saved) {
        if (saved.quant.fp8())
            quantize_groups(x, saved, true, {}, state_.stats_of(ReportKind::Attention), cuda_);
    }
    View load_attention(const View& saved) {
        const View x = attention_view(saved);
        if (saved.quant.fp8()) convert(saved, x, cuda_);
        return x;
    }

    // q, k, v as attention reads them. Qwen3 saves them before the norms of their heads.
    View attention_input(const Block& b, const View& qkv) {
        if (!qk_norm_) return qkv;
        const View x = compute_view(N_, qkv.cols);
        copy(x.data, qkv.data, qkv.quant.bytes(N_, qkv.cols), cuda_);
        head_norm_forward(head_norm(b), x, cuda_);
        rope(angles(), x, false, nullptr, cuda_);
        return x;
    }

    // --- Head
    // The logits (n, padded_V) of the tokens from `first` on; y (n, C) becomes the final norm's output.
    View logits_of(int64_t first, const View& y) {
        const View logits = compute_view(y.rows, config_.padded_V());
        Norm of_part = final_norm();
        of_part.in = rows(of_part.in, first, y.rows);
        of_part.stats += first;
        quantize(norm(of_part), {y}, state_.stats_of(ReportKind::LinearInput), cuda_);
        gemms_.run(Gemm::Fprop, {y}, {state_.weight(head_weight_)}, logits, false, nullptr, cuda_);
        return logits;
    }
    // In backward also the gradient of the final norm's input. Logits exist for HEAD_TOKENS tokens at a time;
    // their gradients take their place. The head's gradient is summed in FP32 where a BF16 sum would be
    // rounded too often (plan.h, head_sum_apart).
    void head_and_loss(bool backward) {
        const Arena::Scope scope(arena_);
        const View gradient = state_.gradient(head_weight_);
        const View dy = backward ? compute_view(N_, config_.C) : View{};
        const bool in_fp32 = backward && head_sum_apart(setup_);
        View sum = gradient;
        if (in_fp32) sum.data = arena_.take<float>(sum.rows * sum.cols), sum.quant = FP32;
        const int64_t head_stage = exchange_.head_stage();
        exchange_.make_ready(head_stage, backward ? head_stage - 1 : Exchange::NONE);
        if (backward) exchange_.wait_for_bucket(state_.params[head_weight_].bucket);
        if (in_fp32 && !linear_.assigns) convert(gradient, sum, cuda_);  // BF16 to FP32
        for (int64_t first = 0; first < N_; first += HEAD_TOKENS) {
            const Arena::Scope scope(arena_);
            const int64_t n = std::min(HEAD_TOKENS, N_ - first);
            const View y = compute_view(n, config_.C), logits = logits_of(first, y);
            cross_entropy(logits, config_.V, targets_ + first,
                          backward ? &device_.results->loss_scale : nullptr, losses_ + first, cuda_);
            if (!backward) continue;
            gemms_.run(Gemm::Wgrad, {logits}, {y}, sum, !(linear_.assigns && first == 0), nullptr, cuda_);
            gemms_.run(Gemm::Dgrad, {logits}, {state_.weight(head_weight_)}, rows(dy, first, n), false,
                       nullptr, cuda_);
        }
        loss_sum(losses_, N_, &device_.results->loss_scale, &device_.results->outcome.loss, cuda_);
        if (!backward) return;
        if (in_fp32) convert(sum, gradient, cuda_);  // FP32 to BF16
        begin_bucket(head_stage);  // clears gradients of the final norm; a GEMM has written the head's
        residual_backward(final_norm(), final_norm_, dy, View{}, blocks_.back().down.g_amax());
        end_bucket(head_stage);
    }

    // --- Views
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
        const void* const bias = rms ? nullptr : state_.weight(weight + 1).data;
        return {in, state_.weight(weight).data, bias, norm_statistics_, rms, config_.norm_eps};
    }
    Norm norm1_of(const Block& b) const { return norm_of(b.norm1, saved(b, Saved::Norm1Input)); }
    Norm norm2_of(const Block& b) const { return norm_of(b.norm2, saved(b, Saved::Norm2Input)); }
    Norm final_norm() const { return norm_of(final_norm_, final_input()); }
    Rope angles() const { return {rope_table_, T_, config_.HS(), config_.q_cols() + config_.kv_cols()}; }
    HeadNorm head_norm(const Block& b) const {
        return {state_.weight(b.qk_norm).data, config_.norm_eps, config_.HS(), config_.q_cols(),
                config_.kv_cols()};
    }
    AttentionShape attention() const { return attention_shape(config_, B_, T_, recipe_.compute); }

    Block make_block(int64_t l) {
        const int64_t N = gpu_tokens(setup_);
        auto number = [&](const char* of) { return state_.number(concat("layers.", l, ".", of)); };
        auto linear = [&](const char* of) { return LinearLayer(linear_, number(of)); };
        Block b{number("norm1.weight"), number("norm2.weight"),  qk_norm_ ? number("qk_norm.weight") : 0,
                linear("qkv"),          linear("attention_out"), linear("gate_up"),
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
    return std::make_unique<Network>(s, bytes, cache_weights);
}

int64_t arena_bytes(const Setup& s, bool cache_weights) {
    Setup alone = s;
    alone.processes = nullptr;  // the ranks do not meet in a dry run
    return Network(alone, 0, cache_weights).dry_step();
}

}  // namespace coat
