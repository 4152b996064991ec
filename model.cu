// model.cu - one training step on the GPU, from the first token to the last update, of any model and recipe
// of coat.h, with the kernels of coat.cu, adamw.cu and gpu/. It mirrors the reference in reference_model.cpp.
//
// A step, in the order of this file:
//
//   step()
//     begin_step_or_evaluation()     clears what the step will find out, and sends 1 / the number of targets
//     run_micro_batch()              for each micro-batch of the step
//       forward_and_backward()
//         forward()                  the embedding; then for each layer:
//           attention_block_forward()  norm 1 -> q, k, v -> attention -> output projection -> residual sum
//           mlp_block_forward()        norm 2 -> gate, up -> activation -> down projection -> residual sum
//         loss_and_head_backward()   final norm -> logits -> loss; gradients of these, in the opposite order
//         for each layer, from the last to the first:
//           mlp_block_backward()       the gradients of mlp_block_forward(), in the opposite order
//           attention_block_backward() those of attention_block_forward(), in the opposite order
//       backward_of_embedding()      the gradient of the embedding
//     Parameters::update()           AdamW (gpu/state.cpp)
//
// Linear layers have their own file, gpu/linear.h. The section before forward() says where each tensor lies.
// After the step come the other things that one asks of a model, and at the end what all of these use: how
// layers are made, and the arguments of kernels.
//
// Two rules:
//   - Memory is one allocation, the arena (gpu/state.h; state.cpp has the map). What lasts is taken at the
//     beginning. What a step needs besides is taken where it is used, and given back when the Arena::Scope
//     ends in which it was taken.
//   - What is saved for backward is the list saved_per_layer() in architecture.h. Outputs of norms and
//     activation functions are not in it: they are never stored. A LazyTensor (gpu/operators.h) says what
//     they are computed from, and the kernel that makes the operand of the next GEMM computes them.
//
// The amaxes of the FP8 operands x, w and g of linear layers (gpu/linear.h). If a tensor has one scale, and
// scaling is just in time, its amax must be known before its codes are made. Often an earlier kernel has the
// values at hand: it is given x_amax_out() or g_amax_out() of the linear layer that will read the tensor, and
// leaves the amax there. If no kernel does, a pass over the tensor computes the amax just before it is
// quantized. (In recipes that need no amaxes both functions return null.)
//
//   operand           what it is                 who computes its amax
//
//   in forward
//   qkv.x             output of norm 1           add_to_residual() before the layer
//   attention_out.x   output of attention        attention_forward(); if the output is saved in groups, a
//                                                pass over these: compute_x_amax_if_needed()
//   gate_up.x         output of norm 2           add_to_residual() in attention_block_forward()
//   down.x            output of the activation   quantize_activation_input(), where it saves gate and up in
//                                                groups; else a pass: compute_x_amax_if_needed()
//   each w            the weight                 the last update; with delayed scaling a pass
//
//   in backward
//   down.g            dresidual() at the end     norm_backward() of norm 1 of layer l + 1, or of the final
//                     of the layer               norm: backward comes from there
//   gate_up.g         dgate_up                   a pass in write_g8_and_dbias()
//   attention_out.g   dresidual() before norm 2  norm_backward() of norm 2
//   qkv.g             dqkv                       attention_backward(); but in Qwen3, where
//                                                head_norm_backward() changes dqkv after it, a pass in
//                                                make_g8_and_dbias()
//
//   When operands are quantized: forward quantizes x and w, for fprop. Backward quantizes g once, for dgrad
//   and wgrad, and w for dgrad. It also quantizes x a second time, for wgrad. This x is what was saved, or is
//   computed again from it; its scale still comes from the amax that forward has left.
#include "gpu/attention.h"
#include "gpu/linear.h"
#include "gpu/operators.h"
#include "gpu/sharding.h"
#include "gpu/state.h"

namespace coat {
namespace {

using namespace gpu;

// A layer of the transformer.
struct Layer {
    // The weights of its norms, as indices into Parameters::params (gpu/state.h).
    size_t norm1_index, norm2_index;
    std::optional<size_t> head_norm_index;  // Qwen3 has norms of the heads of q and k
    LinearLayer qkv_proj, o_proj, gate_up_proj, down_proj;
    std::vector<TensorRef> saved_tensors;  // by Saved (architecture.h), with the rows of a whole micro-batch
};

constexpr int64_t INT32_BYTES = sizeof(int32_t);

class GpuModel final : public Model {
    // -------------------------------------------------------------------------------------------------------
    // What a model consists of. Each member may use those above it.

    Device device_;  // this rank's GPU: settings, stream and arena
    const Setup& setup_ = device_.setup;
    const ModelConfig& config_ = setup_.config;
    const Recipe& recipe_ = setup_.recipe;
    const cudaStream_t stream_ = device_.stream;
    Arena& arena_ = device_.arena;
    const Memory memory_ = allocate_memory(device_);    // where everything is that lasts for the run
    Scales scales_{device_, memory_};                   // of FP8 operands
    Parameters parameters_{device_, memory_, scales_};  // weights, gradients and moments that this rank owns
    const std::unique_ptr<Sharding> sharding_;          // whole weights and gradients, also of other ranks
    Gemms gemms_{memory_.gemm_scratch, recipe_.fast_accumulation};
    LinearContext linear_context_;  // what the linear layers share
    std::vector<Layer> layers_;

    // Weights, as indices into Parameters::params. A tied head has the index of the embedding.
    const size_t embedding_index_ = parameters_.index("embedding");
    const size_t final_norm_index_ = parameters_.index("final_norm.weight");
    const size_t head_index_ = parameters_.index(config_.tied ? "embedding" : "head");

    // What kind of model it is: with RoPE (GPT-2 has learned positions); with SiLU(gate) x up (GPT-2 has
    // GELU); with norms of the heads of q and k (Qwen3).
    const bool rotary_ = config_.arch.rope;
    const bool gated_ = config_.arch.gated;
    const bool head_norms_ = config_.arch.qk_norm;

    // In backward, two gradients may take the place of the layer's saved gate and up.
    //
    // First dgate_up, the gradient of gate and up, as an operand, which is computed from gate and up. It may
    // overwrite them under two conditions. Both hold in coat and in recipes without FP8:
    // 1. An element of the operand has as many bytes as a saved one, because a thread writes only where it
    //    has read (gpu/operators.h, quantize()).
    // 2. The operand is per tensor. Other operands have scales behind their codes (gpu/linear.cpp,
    //    allocate_operand()), where the scales of the saved groups lie. (In every recipe x, w and g are per
    //    tensor together, or none is: so the test of x is one of g.)
    const bool dgate_up_in_place_ =
        info(linear_context_.formats.g.format).bytes == info(recipe_.saved_inputs.format).bytes &&
        recipe_.x.granularity == PER_TENSOR;
    // Later dqkv, if its rows are not longer than those of gate and up. Nobody reads dgate_up then.
    const bool dqkv_in_place_ = Storage{recipe_.compute}.bytes(1, config_.qkv_cols()) <=
                                recipe_.saved_inputs.bytes(1, config_.gate_up_cols());

    // The step that runs. These three are read at the bottom of its calls, in finish_bucket().
    AdamWOptions adamw_;       // the settings of its update: a copy, set by step()
    int64_t micro_batch_ = 0;  // the index of its micro-batch that runs, set by run_micro_batch()
    QuantReport report_;       // what has been measured so far; measure_quantization() empties it first
    // The pass that runs has B sequences of T tokens, N = B * T tokens in all. load_batch() sets these.
    int64_t B_ = 0, T_ = 0, N_ = 0;
    // The residual stream (N, C) in the compute dtype, during forward, in recipes that save the inputs of
    // norms in groups. In other recipes the saved inputs are the residual stream (residual_at()).
    TensorRef residual_buffer_{};

    // wait_and_copy_to_gpu() copies from these, so they must stay until the host waits for the GPU again.
    double loss_weight_ = 0;
    EmbeddingOrder embedding_order_;

    // forward_and_backward(), recorded: for the first micro-batch of a step, and for later ones, which add to
    // gradients where the first one overwrites them.
    CudaGraph first_micro_batch_, later_micro_batch_;
    bool first_step_done_ = false;
    bool cached_weights_are_valid_ = false;

public:
    // bytes: of the allocation; 0: a dry run, whose addresses are never used.
    GpuModel(const Setup& s, int64_t bytes, bool cache_weights, std::shared_ptr<Transport> transport)
        : device_(s, bytes),
          sharding_(make_sharding(device_, memory_, parameters_, scales_, std::move(transport))),
          linear_context_{.device = device_,
                          .parameters = parameters_,
                          .scales = scales_,
                          .sharding = *sharding_,
                          .gemms = gemms_,
                          .caches_weights = cache_weights} {
        clear(memory_.scalars, sizeof(Scalars), stream_);
        after_weight_change();
        layers_.reserve(static_cast<size_t>(config_.L));
        for (int64_t l = 0; l < config_.L; l++) layers_.push_back(make_layer(l));
        if (rotary_) fill_rope_table(config_, setup_.T, memory_.rope_table, stream_);
    }

    // -------------------------------------------------------------------------------------------------------
    // A step

    // Forward and backward of each micro-batch, then the update. (With --gradients none,
    // finish_bucket() updates the weights within backward.)
    StepResult step(const int32_t* tokens, const int32_t* targets, const AdamWOptions& adamw) override {
        const int64_t counted = sum_of_ranks(counted_targets(targets, step_tokens()));
        if (counted == 0) return {.loss = 0, .grad_norm = 0, .skipped = true};
        adamw_ = adamw;
        begin_step_or_evaluation(static_cast<double>(counted));
        for (int64_t i = 0; i < setup_.micro_batches_per_rank; i++) {
            run_micro_batch(i, tokens + i * batch_tokens(), targets + i * batch_tokens());
            // The amaxes tell whether codes hide infinity or NaN, and the next micro-batch clears them
            if (setup_.keep_gradients) store_loss_or_nan(&outcome()->loss_or_nan);
        }
        sharding_->wait_for_transfers();
        if (setup_.keep_gradients)
            parameters_.update(adamw, 0, static_cast<int64_t>(parameters_.buckets.size()), *sharding_);
        after_weight_change();
        scales_.update_from_histories(outcome());  // for delayed scaling

        const StepOutcome found = fetch_outcome();  // waits until the step has run
        const bool skipped = found.gradients.skip != 0;
        if (!skipped && found.empty_histories == 0) scales_.any_empty_history = false;
        first_step_done_ = true;
        return {.loss = sum_of_ranks(found.loss),
                .grad_norm = found.gradients.norm,
                .skipped = skipped,
                .target_count = counted};
    }

private:
    // Begins a step, or one of evaluate(), next_logits() and measure_quantization(). targets: the number of
    // targets that count. quant_stats: by ReportKind, where quantization errors are added up; null: they are
    // not measured.
    void begin_step_or_evaluation(double targets, QuantStats* quant_stats = nullptr) {
        loss_weight_ = 1.0 / targets;
        device_.wait_and_copy_to_gpu(&memory_.scalars->loss_weight, &loss_weight_, sizeof(double));
        clear(outcome(), sizeof(StepOutcome), stream_);
        device_.quant_stats = quant_stats;
        if (scales_.delayed()) begin_delayed_scaling();
        if (linear_context_.caches_weights) make_cached_weights();
    }
    // Delayed scaling: this step takes the amaxes of all operands for the histories.
    void begin_delayed_scaling() {
        scales_.clear_operand_amaxes();
        cached_weights_are_valid_ = false;     // they are made again, which takes their amaxes
        sharding_->forget_gathered_weights();  // they are FP8 codes, whose scales change
    }
    // Makes the FP8 copies of all weights, unless they are up to date. While quantization is measured they
    // are made in any case, because that measures their errors.
    void make_cached_weights() {
        if (cached_weights_are_valid_ && !device_.quant_stats) return;
        for (Layer& layer : layers_)
            for (LinearLayer* linear :
                 {&layer.qkv_proj, &layer.o_proj, &layer.gate_up_proj, &layer.down_proj})
                linear->make_cached_w8();
        cached_weights_are_valid_ = true;
    }
    void after_weight_change() {
        cached_weights_are_valid_ = false;
        sharding_->forget_gathered_weights();
        sharding_->combine_amaxes_of_ranks();
    }

    // Forward and backward of one micro-batch. The gradient of the embedding comes last, outside of what a
    // CUDA graph replays: its launch depends on the tokens.
    void run_micro_batch(int64_t index, const int32_t* tokens, const int32_t* targets) {
        micro_batch_ = index;
        // With several ranks every micro-batch overwrites gradients: they are sent, and their sums lie
        // elsewhere
        linear_context_.overwrites_gradients = index == 0 || sharding_->sends_gradients();
        load_batch(tokens, targets, setup_.B, setup_.T);
        CudaGraph& graph = linear_context_.overwrites_gradients ? first_micro_batch_ : later_micro_batch_;
        if (repeats_launches()) graph.run(stream_, [&] { forward_and_backward(); });
        else forward_and_backward();
        backward_of_embedding(tokens);
    }
    // Whether all launches are the same as in the last step, with the same arguments, so that a CUDA graph
    // can replay them.
    bool repeats_launches() const {
        // The first step loads kernels and chooses the algorithms of GEMMs
        if (!first_step_done_) return false;
        // Errors of quantizing are measured by other kernels
        if (device_.quant_stats) return false;
        // Gradients of a bucket are sent to other GPUs, or its weights are updated, within backward
        if (sharding_->sends_gradients() || !setup_.keep_gradients) return false;
        // As long as an operand may lack its delayed scale, amaxes are computed that are not needed later
        return !scales_.any_empty_history;
    }
    // Copies B sequences of T tokens to the GPU, and sets the sizes of the pass that follows.
    // wait_and_copy_to_gpu() waits until the pass before has run.
    void load_batch(const int32_t* tokens, const int32_t* targets, int64_t B, int64_t T) {
        B_ = B;
        T_ = T;
        N_ = B * T;
        device_.wait_and_copy_to_gpu(memory_.tokens, tokens, N_ * INT32_BYTES);
        device_.wait_and_copy_to_gpu(memory_.targets, targets, N_ * INT32_BYTES);
    }

    // Adds the losses to outcome()->loss, and computes all gradients but the embedding's.
    void forward_and_backward() {
        forward();
        loss_and_head_backward();
        for (int64_t l = config_.L - 1; l >= 0; l--) {
            mlp_block_backward(layers_[l]);
            attention_block_backward(layers_[l], l > 0 ? layers_[l - 1].down_proj.g_amax_out() : nullptr);
        }
    }

    // -------------------------------------------------------------------------------------------------------
    // Where tensors are: what layers save, the norms, the residual stream, and q, k, v

    // (n, cols) in the compute dtype, in memory that is taken now: for as many rows as an FP8 GEMM may write.
    TensorRef allocate_tensor(int64_t n, int64_t cols) {
        const int64_t elements = round_up(n, FP8_GEMM_MULTIPLE) * cols;
        return tensor_at(arena_.allocate(elements * info(recipe_.compute).bytes), n, cols);
    }
    TensorRef tensor_at(void* data, int64_t n, int64_t cols) const {
        return {.data = data, .scales = nullptr, .rows = n, .cols = cols, .storage = {recipe_.compute}};
    }

    // What a layer has saved, or is to save: the rows of this pass.
    TensorRef saved_tensor(const Layer& layer, Saved which) const {
        TensorRef v = layer.saved_tensors[static_cast<size_t>(which)];
        v.rows = N_;
        return v;
    }
    float* saved_log_sum_exp(const Layer& layer) const {
        return static_cast<float*>(saved_tensor(layer, Saved::LogSumExp).data);
    }

    // A norm of the residual stream, and the linear layer that reads its output.
    struct ResidualNorm {
        Norm norm;            // as kernels are given it; norm.in is its saved input
        size_t weight_index;  // index of the parameter
        LinearLayer* reader;  // null for the final norm, which the head reads: it is not quantized

        TensorScale* output_amax_out() const { return reader ? reader->x_amax_out() : nullptr; }
    };
    ResidualNorm norm1_of(Layer& l) const {
        return {.norm = norm_args(l.norm1_index, saved_tensor(l, Saved::Norm1Input)),
                .weight_index = l.norm1_index,
                .reader = &l.qkv_proj};
    }
    ResidualNorm norm2_of(Layer& l) const {
        return {.norm = norm_args(l.norm2_index, saved_tensor(l, Saved::Norm2Input)),
                .weight_index = l.norm2_index,
                .reader = &l.gate_up_proj};
    }
    ResidualNorm final_norm() const {
        return {.norm = norm_args(final_norm_index_, final_norm_input()),
                .weight_index = final_norm_index_,
                .reader = nullptr};
    }
    Norm norm_args(size_t weight_index, const TensorRef& in) const {
        const std::optional<size_t> bias_index = parameters_.bias_index(weight_index);
        return {.in = in,
                .weight = sharding_->gathered_weight(weight_index).data,
                .bias = bias_index ? sharding_->gathered_weight(*bias_index).data : nullptr,
                .row_statistics = memory_.norm_statistics,
                .rms = config_.arch.rms,
                .eps = config_.norm_eps};
    }

    // The residual stream (N, C) as it is before a norm, in the compute dtype: the norm's saved input, or, if
    // that is in groups, in the buffer.
    TensorRef residual_at(const ResidualNorm& n) const {
        return n.norm.in.storage.fp8() ? residual_buffer_ : n.norm.in;
    }
    // The output of a norm as the forward pass computes it: from the saved input, or, if that is in groups
    // which only backward is to read (coat-saved), from the residual stream.
    LazyTensor norm_output_in_forward(const ResidualNorm& n) const {
        Norm read = n.norm;
        if (!forward_reads_saved(n)) read.in = residual_at(n);
        return lazy_norm(read);
    }
    bool forward_reads_saved(const ResidualNorm& n) const {
        return recipe_.forward_reads_saved || !n.norm.in.storage.fp8();
    }
    // The gradient of the residual stream (N, C) in the compute dtype, in backward. It has the memory of
    // final_norm_input(): norm_backward() of the final norm overwrites its input with this gradient.
    TensorRef dresidual() const { return tensor_at(memory_.dresidual, N_, config_.C); }
    // The saved input of the final norm (N, C): the residual stream behind the last layer.
    TensorRef final_norm_input() const { return tensor_at(memory_.dresidual, N_, config_.C); }

    // Attention reads and writes tensors in the compute dtype: the saved q, k, v and output themselves, or,
    // if these are saved in groups, a buffer for each. Before a buffer is read, save_and_reload() rounds its
    // values to what the groups hold: so the saved log-sum-exp fits what backward will read.
    TensorRef attention_buffer(const TensorRef& saved) {
        return saved.storage.fp8() ? allocate_tensor(N_, saved.cols) : saved;
    }
    // Saves x. Afterwards x holds what was saved. (If x is `saved` itself, there is nothing to do.)
    void save_and_reload(const TensorRef& x, const TensorRef& saved) {
        if (!saved.storage.fp8()) return;
        quantize_groups(x, saved, /*write_back=*/true, device_.quant_stats_of(ReportKind::Attention),
                        stream_);
    }
    TensorRef load_saved(const TensorRef& saved) {
        const TensorRef x = attention_buffer(saved);
        if (saved.storage.fp8()) convert(saved, x, stream_);
        return x;
    }
    // RoPE, in forward, comes right behind the q, k, v projection, and q and k are saved with it. But in
    // Qwen3 norms of the heads come first, whose backward needs their inputs: there q, k, v are saved as the
    // projection writes them, and attention_input() does norms and RoPE, in backward again.
    bool rope_at_projection() const { return rotary_ && !head_norms_; }
    // q, k, v as attention reads them. qkv: as they are saved.
    TensorRef attention_input(const Layer& layer, const TensorRef& qkv) {
        if (!head_norms_) return qkv;
        const TensorRef x = allocate_tensor(N_, qkv.cols);
        head_norm_and_rope(head_norm(layer), rope_args(), qkv, x, stream_);
        return x;
    }

    // -------------------------------------------------------------------------------------------------------
    // Forward

    // The embedding and all layers, up to the input of the final norm.
    void forward() {
        const Arena::Scope scope(arena_);
        if (recipe_.saved_inputs.fp8()) residual_buffer_ = allocate_tensor(N_, config_.C);
        // If scaling is just in time, the amaxes of each micro-batch are its own
        if (!scales_.delayed()) scales_.clear_operand_amaxes();
        // embedding; it saves the input of the first norm 1
        sharding_->gather_weights(Sharding::EMBEDDING_STAGE, Direction::Forward);
        const TensorRef positions =
            rotary_ ? TensorRef{} : sharding_->gathered_weight(parameters_.index("positions"));
        add_to_residual(sharding_->gathered_weight(embedding_index_), positions, norm1_of(layers_[0]),
                        memory_.tokens);
        for (int64_t l = 0; l < config_.L; l++) {
            attention_block_forward(layers_[l]);
            mlp_block_forward(layers_[l], l + 1 < config_.L ? norm1_of(layers_[l + 1]) : final_norm());
        }
    }

    // The first half of a layer. attention_forward() (gpu/attention.h), which is called in the middle, is
    // attention alone.
    void attention_block_forward(Layer& layer) {
        const Arena::Scope scope(arena_);
        const ResidualNorm norm1 = norm1_of(layer);
        const TensorRef saved_qkv = saved_tensor(layer, Saved::Qkv),
                        saved_out = saved_tensor(layer, Saved::AttentionOutput);
        const TensorRef qkv = attention_buffer(saved_qkv), out = attention_buffer(saved_out);
        // norm 1; q, k, v projection: (N, C) -> (N, q_cols + 2 kv_cols). The norm is computed while its codes
        // are made
        layer.qkv_proj.fprop(norm_output_in_forward(norm1), qkv);
        // rotary positions. (In Qwen3 they come behind norms of the heads: attention_input())
        if (rope_at_projection()) rope(rope_args(), qkv, /*inverse=*/false, /*amax_out=*/nullptr, stream_);
        save_and_reload(qkv, saved_qkv);
        // attention: causal, within each sequence of T tokens -> (N, q_cols)
        const bool out_in_groups = saved_out.storage.fp8();
        attention_forward(attention_shape_of_pass(), attention_input(layer, qkv).data, out.data,
                          saved_log_sum_exp(layer), out_in_groups ? nullptr : layer.o_proj.x_amax_out(),
                          stream_);
        save_and_reload(out, saved_out);
        // attention output projection: (N, q_cols) -> (N, C)
        if (out_in_groups) layer.o_proj.compute_x_amax_if_needed(stored(saved_out));
        const TensorRef branch = allocate_tensor(N_, config_.C);
        layer.o_proj.fprop(stored(saved_out), branch);
        // residual sum; it saves the input of norm 2
        add_to_residual(residual_at(norm1), branch, norm2_of(layer));
    }

    // The second half of a layer. next: the norm that reads the residual stream after this layer.
    void mlp_block_forward(Layer& layer, const ResidualNorm& next) {
        const Arena::Scope scope(arena_);
        const ResidualNorm norm2 = norm2_of(layer);
        const LazyTensor x = norm_output_in_forward(norm2);
        const TensorRef saved_gate_up = saved_tensor(layer, Saved::GateUp);
        // norm 2; gate and up projection: (N, C) -> (N, 2F), or (N, F) for GPT-2. Each of the three branches
        // computes gate and up, saves them, and leaves the amax of the activation's output
        TensorRef gate_up = saved_gate_up;  // as the activation is to read them
        if (!saved_gate_up.storage.fp8()) {
            // The projection writes what is saved
            layer.gate_up_proj.fprop(x, gate_up);
            layer.down_proj.compute_x_amax_if_needed(lazy_activation(gated_, gate_up));
        } else if (recipe_.forward_reads_saved) {
            // The projection's output is the widest tensor of a layer: it exists until its groups are saved
            const Arena::Scope until_saved(arena_);
            const TensorRef values = allocate_tensor(N_, gate_up.cols);
            layer.gate_up_proj.fprop(x, values);
            save_gate_up_in_groups(layer, values);
        } else {
            // Only backward is to read the groups (coat-saved): the output stays until this block ends
            gate_up = allocate_tensor(N_, gate_up.cols);
            layer.gate_up_proj.fprop(x, gate_up);
            save_gate_up_in_groups(layer, gate_up);
        }
        // SiLU(gate) x up, or GELU, computed while its codes are made; down projection: (N, F) -> (N, C)
        const TensorRef branch = allocate_tensor(N_, config_.C);
        layer.down_proj.fprop(lazy_activation(gated_, gate_up), branch);
        // residual sum; it saves the input of the next norm
        add_to_residual(residual_at(norm2), branch, next);
    }
    // Saves gate and up (N, 2F), and leaves the amax of the activation's output: of the output that is
    // computed from the groups if forward reads them, else from the values.
    void save_gate_up_in_groups(const Layer& layer, const TensorRef& values) {
        quantize_activation_input(gated_, values, saved_tensor(layer, Saved::GateUp),
                                  recipe_.forward_reads_saved, layer.down_proj.x_amax_out(),
                                  device_.quant_stats_of(ReportKind::ActivationInput), stream_);
    }

    // The new residual stream, x + branch: saves it as the input of the next norm, and leaves the amax of
    // that norm's output. With tokens (of the embedding) it is x[token] + branch[position].
    void add_to_residual(const TensorRef& x, const TensorRef& branch, const ResidualNorm& next,
                         const int32_t* tokens = nullptr) {
        const TensorRef& saved_in = next.norm.in;
        const TensorRef x_out = saved_in.storage.fp8() ? residual_buffer_ : TensorRef{};
        residual_add(x, branch, x_out, next.norm, forward_reads_saved(next), next.output_amax_out(), stream_,
                     tokens, T_);
        // The groups are made of the sum in FP32; the error is measured against the sum in BF16, which is
        // stored
        if (x_out.data)
            add_quant_errors(stored(x_out), {saved_in}, device_.quant_stats_of(ReportKind::NormInput),
                             stream_);
    }

    // -------------------------------------------------------------------------------------------------------
    // Head and loss. The logits of all tokens would be the largest tensor of a step: they exist for a slice
    // of HEAD_SLICE_TOKENS tokens at a time.

    void loss_without_gradients() {
        const Arena::Scope scope(arena_);
        sharding_->gather_weights(sharding_->head_stage(), Direction::Forward);
        for (int64_t first = 0; first < N_; first += HEAD_SLICE_TOKENS) {
            const Arena::Scope slice(arena_);
            const TensorRef y = allocate_tensor(slice_tokens(first), config_.C);
            const TensorRef logits = compute_logits(first, /*out*/ y);
            cross_entropy_forward(logits, config_.V, memory_.targets + first, memory_.losses + first,
                                  stream_);
        }
        add_up_losses();
    }

    // The loss; the gradient of the head's weight; and the gradient of the residual stream at the final norm.
    void loss_and_head_backward() {
        const Arena::Scope scope(arena_);
        const TensorRef dweight = sharding_->gradient_to_write(head_index_);
        const TensorRef dy = allocate_tensor(N_, config_.C);  // y: the final norm's output
        // Where BF16 would be rounded too often, the slices add to an FP32 sum (gpu/layout.h)
        const bool in_fp32 = head_sum_in_fp32(setup_);
        TensorRef sum = dweight;
        if (in_fp32) {
            sum.data = arena_.allocate<float>(sum.rows * sum.cols);
            sum.storage = FP32;
        }
        // Direction::Backward, because the stage that comes next is the last layer's, on the way back
        sharding_->gather_weights(sharding_->head_stage(), Direction::Backward);
        // The GEMMs of the slices write this gradient earlier than begin_bucket() would wait for its place
        sharding_->wait_for_gradient_buffer(parameters_.params[head_index_].bucket);
        // Earlier micro-batches have added to the gradient: the sum begins with what they left
        if (in_fp32 && !linear_context_.overwrites_gradients) convert(dweight, sum, stream_);
        for (int64_t first = 0; first < N_; first += HEAD_SLICE_TOKENS) head_slice_backward(first, dy, sum);
        add_up_losses();
        if (in_fp32) convert(sum, dweight, stream_);
        // final norm. If the head is not tied, it shares this bucket, and its gradient is complete.
        // begin_bucket() clears the gradients to which kernels add; finish_bucket() has them reduced
        const int64_t bucket = parameters_.params[final_norm_index_].bucket;
        begin_bucket(bucket);
        backward_of_norm(final_norm(), dy, /*g_in=*/TensorRef{}, layers_.back().down_proj.g_amax_out());
        finish_bucket(bucket);
    }
    // For the tokens of a slice, from number `first` on: computes the losses and dy, and adds to dweight, the
    // gradient of the head's weight.
    void head_slice_backward(int64_t first, const TensorRef& dy, const TensorRef& dweight) {
        const Arena::Scope scope(arena_);
        const TensorRef y = allocate_tensor(slice_tokens(first), config_.C);
        const TensorRef logits = compute_logits(first, /*out*/ y);
        cross_entropy(logits, config_.V, memory_.targets + first, &memory_.scalars->loss_weight,
                      memory_.losses + first, stream_);
        const TensorRef& dlogits = logits;  // cross_entropy() has replaced the logits by their gradients
        const bool overwrites = linear_context_.overwrites_gradients && first == 0;
        gemms_.run(Gemm::Wgrad, {dlogits}, {y}, dweight, stream_, {.accumulate = !overwrites});
        gemms_.run(Gemm::Dgrad, {dlogits}, {sharding_->gathered_weight(head_index_)},
                   row_slice(dy, first, y.rows), stream_);
    }

    // Computes and returns the logits (n, padded_V) of n tokens, from number `first` on. y (n, C) becomes the
    // final norm's output.
    TensorRef compute_logits(int64_t first, const TensorRef& y) {
        const TensorRef logits = allocate_tensor(y.rows, config_.padded_V());
        Norm slice = final_norm().norm;
        slice.in = row_slice(slice.in, first, y.rows);
        slice.row_statistics += first;
        // y = the norm in the compute dtype, in which the head is in all recipes
        store_values(lazy_norm(slice), y, stream_);
        gemms_.run(Gemm::Fprop, {y}, {sharding_->gathered_weight(head_index_)}, logits, stream_);
        return logits;
    }
    int64_t slice_tokens(int64_t first) const { return std::min(HEAD_SLICE_TOKENS, N_ - first); }

    // outcome()->loss += the sum of the losses * Scalars::loss_weight.
    void add_up_losses() {
        add_loss_sum(memory_.losses, N_, &memory_.scalars->loss_weight, &outcome()->loss, stream_);
    }
    // *loss_or_nan = the loss so far; or NaN, if FP8 codes hide infinity or NaN: then the update skips the
    // step.
    void store_loss_or_nan(double* loss_or_nan) {
        write_loss_or_nan(scales_.all(), scales_.count(), &outcome()->loss, loss_or_nan, stream_);
    }

    // -------------------------------------------------------------------------------------------------------
    // Backward. dX is the gradient of X. The gradient of a linear layer's output is g, and g8 as an operand.
    //
    // The gradient of the residual stream, dresidual(), goes through the layers in place: each norm adds its
    // part. Between two norms it is the g of the linear layer to which backward comes next.
    // The argument dresidual_amax_out is where the norm leaves its amax for that linear layer.
    //
    // Gradients of parameters are computed by bucket. begin_bucket() clears those to which kernels add.
    // finish_bucket() sends them to the ranks that own them, and with --gradients none updates the weights.
    // (Both are at the end of this section.)
    //
    // Memory is given back as early as possible, which can be in the middle of a bucket: there a Scope is
    // ended by end(). What must outlive a Scope is taken before it, because memory is a stack.

    // From the gradient of the residual stream behind a layer to that before norm 2.
    void mlp_block_backward(Layer& layer) {
        const Arena::Scope scope(arena_);
        const TensorRef gate_up = saved_tensor(layer, Saved::GateUp);
        // dgate_up (N, 2F), the gradient of gate and up, exists only as an operand. It is computed from dact
        // and outlives it, so its memory is taken first
        const Operand dgate_up =
            layer.gate_up_proj.allocate_g8(N_, dgate_up_in_place_ ? gate_up.data : nullptr);
        Arena::Scope until_dgate_up(arena_);  // for the g8 of the down projection, and for dact
        // down projection: wgrad and dgrad -> dact (N, F), the gradient of the activation's output
        begin_bucket(layer.down_proj.bucket());
        const TensorRef dact = down_proj_backward(layer, gate_up);
        finish_bucket(layer.down_proj.bucket());

        begin_bucket(layer.gate_up_proj.bucket());
        // activation
        layer.gate_up_proj.write_g8_and_dbias(lazy_activation_backward(gated_, gate_up, dact),
                                              LinearLayer::AmaxIs::Unknown, dgate_up);
        until_dgate_up.end();
        // gate and up projection, norm 2
        linear_and_norm_backward(norm2_of(layer), dgate_up, layer.o_proj.g_amax_out());
        finish_bucket(layer.gate_up_proj.bucket());
    }
    // Returns dact, in memory that it takes in the caller's scope.
    TensorRef down_proj_backward(Layer& layer, const TensorRef& gate_up) {
        const Operand g8 = layer.down_proj.make_g8_and_dbias(stored(dresidual()), LinearLayer::AmaxIs::Known);
        layer.down_proj.wgrad(g8, lazy_activation(gated_, gate_up));
        const TensorRef dact = allocate_tensor(N_, config_.F);
        layer.down_proj.dgrad(g8, dact);
        return dact;
    }

    // From the gradient of the residual stream before norm 2 to that before norm 1. dresidual_amax_out: where
    // the amax of the latter goes: g_amax_out() of the down projection of the layer before; null at the first
    // layer.
    void attention_block_backward(Layer& layer, TensorScale* dresidual_amax_out) {
        const Arena::Scope scope(arena_);
        void* const gate_up = saved_tensor(layer, Saved::GateUp).data;
        const TensorRef dqkv = dqkv_in_place_ ? tensor_at(gate_up, N_, config_.qkv_cols())
                                              : allocate_tensor(N_, config_.qkv_cols());
        Arena::Scope until_dqkv(arena_);  // for what dqkv is computed from: dout, q, k, v, ...
        // attention output projection: wgrad and dgrad -> dout (N, q_cols), where attention's output is out
        const TensorRef dout = allocate_tensor(N_, config_.q_cols());
        begin_bucket(layer.o_proj.bucket());
        o_proj_backward(layer, dout);
        finish_bucket(layer.o_proj.bucket());

        begin_bucket(layer.qkv_proj.bucket());
        // attention with rotary positions, norms of heads
        core_attention_backward(layer, dout, dqkv);
        until_dqkv.end();
        // q, k, v projection, norm 1
        const auto amax_is = head_norms_ ? LinearLayer::AmaxIs::Unknown : LinearLayer::AmaxIs::Known;
        const Operand g8 = layer.qkv_proj.make_g8_and_dbias(stored(dqkv), amax_is);
        linear_and_norm_backward(norm1_of(layer), g8, dresidual_amax_out);
        finish_bucket(layer.qkv_proj.bucket());
    }
    void o_proj_backward(Layer& layer, const TensorRef& dout) {
        const Arena::Scope scope(arena_);
        const Operand g8 = layer.o_proj.make_g8_and_dbias(stored(dresidual()), LinearLayer::AmaxIs::Known);
        layer.o_proj.wgrad(g8, stored(saved_tensor(layer, Saved::AttentionOutput)));
        layer.o_proj.dgrad(g8, dout);
    }
    // dout -> dqkv, the gradient of what the q, k, v projection has written; with its amax, unless norms of
    // heads follow, which change it.
    void core_attention_backward(Layer& layer, const TensorRef& dout, const TensorRef& dqkv) {
        const TensorRef qkv = load_saved(saved_tensor(layer, Saved::Qkv));
        const TensorRef out = load_saved(saved_tensor(layer, Saved::AttentionOutput));
        void* const workspace =
            arena_.allocate(static_cast<int64_t>(attention_workspace(attention_shape_of_pass())));
        attention_backward(attention_shape_of_pass(),
                           {.qkv = attention_input(layer, qkv).data,
                            .out = out.data,
                            .lse = saved_log_sum_exp(layer),
                            .dout = dout.data,
                            .dqkv = dqkv.data,
                            .workspace = workspace,
                            .rope_table = rotary_ ? memory_.rope_table : nullptr,
                            .dqkv_amax_out = head_norms_ ? nullptr : layer.qkv_proj.g_amax_out()},
                           stream_);
        if (!head_norms_) return;
        const HeadNorm norms = head_norm(layer);
        float* const partials = arena_.allocate<float>(COLUMN_PARTIALS * (norms.q_cols + norms.k_cols));
        head_norm_backward(norms, qkv, dqkv, sharding_->gradient_to_write(*layer.head_norm_index), partials,
                           stream_);
    }

    // A norm and the linear layer that reads its output. dgrad computes dx, the gradient of the norm's
    // output, from g8. backward_of_norm() adds the gradient of the norm's input to dresidual(). wgrad
    // computes the norm's output again, from row statistics that norm_backward() has written. All norms write
    // theirs to the same place: so wgrad is here, before another norm.
    void linear_and_norm_backward(const ResidualNorm& n, const Operand& g8, TensorScale* dresidual_amax_out) {
        Arena::Scope until_dresidual(arena_);  // for dx
        const TensorRef dx = allocate_tensor(N_, config_.C);
        n.reader->dgrad(g8, dx);
        backward_of_norm(n, dx, /*g_in=*/dresidual(), dresidual_amax_out);
        until_dresidual.end();
        n.reader->wgrad(g8, lazy_norm(n.norm));
    }
    // dresidual() = g_in + the gradient of the norm's input. dy: the gradient of the norm's output. g_in:
    // dresidual(), too; no tensor at the head, where the residual stream ends.
    void backward_of_norm(const ResidualNorm& n, const TensorRef& dy, const TensorRef& g_in,
                          TensorScale* dresidual_amax_out) {
        const TensorRef dweight = sharding_->gradient_to_write(n.weight_index);
        TensorRef dbias{};
        if (const std::optional<size_t> bias_index = parameters_.bias_index(n.weight_index))
            dbias = sharding_->gradient_to_write(*bias_index);
        norm_backward(n.norm, dy, g_in, /*g_out=*/dresidual(), dresidual_amax_out, dweight, dbias,
                      memory_.norm_partials, stream_);
    }

    // The gradient of the embedding. Rows of dresidual() that belong to the same token are added in a fixed
    // order, for which the host sorts the tokens while the GPU computes. Then wait_and_copy_to_gpu() waits
    // for the GPU.
    void backward_of_embedding(const int32_t* tokens) {
        embedding_order_ = embedding_order(tokens, N_);
        const int64_t distinct = static_cast<int64_t>(embedding_order_.tokens.size());
        device_.wait_and_copy_to_gpu(memory_.token_order, embedding_order_.order.data(), N_ * INT32_BYTES);
        device_.wait_and_copy_to_gpu(memory_.token_rows, embedding_order_.tokens.data(),
                                     distinct * static_cast<int64_t>(sizeof(TokenRows)));
        const int64_t bucket = parameters_.params[embedding_index_].bucket;
        begin_bucket(bucket);
        embedding_backward(dresidual(), memory_.token_order, memory_.token_rows, distinct,
                           embedding_order_.frequent, sharding_->gradient_to_write(embedding_index_),
                           stream_);
        if (!rotary_)
            positions_backward(dresidual(), T_, sharding_->gradient_to_write(parameters_.index("positions")),
                               stream_);
        finish_bucket(bucket);
    }

    // To be called before the first kernel that adds to the gradients of a bucket (gpu/layout.h).
    void begin_bucket(int64_t bucket) {
        sharding_->wait_for_gradient_buffer(bucket);
        if (linear_context_.overwrites_gradients) clear_added_gradients(bucket);
    }
    // To be called when all is launched that adds to the gradients of a bucket in this micro-batch, or reads
    // its weights.
    void finish_bucket(int64_t bucket) {
        if (device_.quant_stats) {
            // These gradients serve only to measure what storing the moments would lose
            parameters_.add_moment_quant_errors_of(bucket, *sharding_, report_);
            return;
        }
        sharding_->reduce_gradients(bucket, /*first_micro_batch=*/micro_batch_ == 0);
        if (!setup_.keep_gradients) update_bucket(bucket);
    }
    // With --gradients none: updates the weights of a bucket as soon as their gradients are complete.
    void update_bucket(int64_t bucket) {
        store_loss_or_nan(&outcome()->loss_or_nan);
        parameters_.update(adamw_, bucket, bucket + 1, *sharding_);
    }
    // When GEMMs overwrite gradients, the kernels of norms, biases and embeddings still add to theirs: so
    // these begin at zero. The gradient of the head's weight does not: a GEMM has written it before, also if
    // the weight is a tied embedding.
    void clear_added_gradients(int64_t bucket) const {
        const BucketRange& range = parameters_.buckets[bucket];
        for (size_t i = range.first; i < range.last; i++) {
            const Param& p = parameters_.params[i];
            if (!p.role.linear && i != head_index_)
                clear(sharding_->gradient_to_write(i).data, p.padded_size() * parameters_.gradient_bytes,
                      stream_);
        }
    }

    // -------------------------------------------------------------------------------------------------------
    // What else one asks of a model (model.h)

public:
    double evaluate(const int32_t* tokens, const int32_t* targets) override {
        begin_step_or_evaluation(divisor_of_mean(targets, batch_tokens()));
        load_batch(tokens, targets, setup_.B, setup_.T);
        forward();
        loss_without_gradients();
        store_loss_or_nan(&outcome()->loss);
        return fetch_outcome().loss;
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        begin_step_or_evaluation(1);
        load_batch(tokens, tokens, /*B=*/1, /*T=*/n);
        forward();
        sharding_->gather_weights(sharding_->head_stage(), Direction::Forward);
        const Arena::Scope scope(arena_);
        const TensorRef last = compute_logits(n - 1, allocate_tensor(1, config_.C));
        void* const in_fp32 = gemms_.scratch;  // it has room for a row of logits
        convert(last, {in_fp32, nullptr, 1, last.cols, FP32}, stream_);
        device_.copy_to_host(logits, in_fp32, config_.V * info(Format::FP32).bytes);
    }

    QuantReport measure_quantization(const int32_t* tokens, const int32_t* targets) override {
        QuantStats* const quant_stats = memory_.scalars->quant_stats;
        report_ = {};
        clear(quant_stats, sizeof(Scalars::quant_stats), stream_);
        begin_step_or_evaluation(divisor_of_mean(targets, batch_tokens()), quant_stats);
        run_micro_batch(0, tokens, targets);
        sharding_->wait_for_transfers();
        device_.copy_to_host(report_.kinds, quant_stats, sizeof(Scalars::quant_stats));
        report_.k_m = parameters_.expansion_factors(/*second=*/false);
        report_.k_v = parameters_.expansion_factors(/*second=*/true);
        // With several ranks, each may have quantized a part of the weights
        QuantStats& weights = report_.kinds[static_cast<int>(ReportKind::Weight)];
        weights = sharding_->weight_quant_stats(weights);
        return report_;
    }

    void read(const std::string& name, void* out) override {
        sharding_->wait_for_transfers();
        device_.wait();
        parameters_.read(name, out);
    }
    void write(const std::string& name, const void* in) override {
        sharding_->wait_for_transfers();
        device_.wait();
        parameters_.write(name, in);
        after_weight_change();
    }
    const Setup& setup() const override { return setup_; }

    // Runs a step, if this is a dry run. Returns the bytes that the whole allocation needs: for what lasts,
    // and for what a step takes besides.
    int64_t dry_step() {
        const std::vector<int32_t> tokens(static_cast<size_t>(step_tokens()));
        step(tokens.data(), tokens.data(), {.step = 1, .lr = 0.0f});
        return arena_.peak();
    }

private:
    // -------------------------------------------------------------------------------------------------------
    // Layers

    // Layer l: its parameters, its linear layers, and the places of what it saves.
    Layer make_layer(int64_t l) {
        const int64_t N = padded_tokens(setup_);
        auto index = [&](const char* of) { return parameters_.index(concat("layers.", l, ".", of)); };
        auto linear = [&](const char* of) { return LinearLayer(linear_context_, index(of)); };
        Layer layer{.norm1_index = index("norm1.weight"),
                    .norm2_index = index("norm2.weight"),
                    .head_norm_index = {},
                    .qkv_proj = linear("qkv"),
                    .o_proj = linear("attention_out"),
                    .gate_up_proj = linear("gate_up"),
                    .down_proj = linear("down"),
                    .saved_tensors = {}};
        if (head_norms_) layer.head_norm_index = index("qk_norm.weight");
        uint8_t* here = memory_.saved_activations + l * saved_layer_bytes(setup_);
        for (const SavedTensor& t : saved_per_layer(setup_)) {
            uint8_t* const scales = here + t.storage.code_bytes(N, t.cols);
            layer.saved_tensors.push_back({here, scales, N, t.cols, t.storage});
            here += round_up(t.bytes(N), GPU_ALIGNMENT);
        }
        return layer;
    }
    // -------------------------------------------------------------------------------------------------------
    // Arguments of kernels

    HeadNorm head_norm(const Layer& layer) const {
        return {.weight = sharding_->gathered_weight(*layer.head_norm_index).data,
                .eps = config_.norm_eps,
                .HS = config_.HS(),
                .q_cols = config_.q_cols(),
                .k_cols = config_.kv_cols()};
    }
    Rope rope_args() const {
        return {.table = memory_.rope_table,
                .T = T_,
                .HS = config_.HS(),
                .rotated_cols = config_.q_cols() + config_.kv_cols()};
    }
    AttentionShape attention_shape_of_pass() const {
        return attention_shape(config_, B_, T_, recipe_.compute);
    }

    // -------------------------------------------------------------------------------------------------------
    // Small values, of the host and on the device

    int64_t batch_tokens() const { return setup_.B * setup_.T; }  // of a micro-batch
    int64_t step_tokens() const { return setup_.micro_batches_per_rank * batch_tokens(); }

    StepOutcome* outcome() const { return &memory_.scalars->outcome; }  // on the device
    StepOutcome fetch_outcome() const {
        StepOutcome found{};
        device_.copy_to_host(&found, outcome(), sizeof found);
        return found;
    }

    template <class Value> Value sum_of_ranks(const Value& mine) const {
        if (!setup_.communicator) return mine;
        Value sum{};
        for (const Value& theirs : setup_.communicator->all_gather(mine)) sum += theirs;
        return sum;
    }
};

}  // namespace

std::unique_ptr<Model> gpu_model(const Setup& s, int64_t bytes, bool cache_weights,
                                 std::shared_ptr<Transport> transport) {
    return std::make_unique<GpuModel>(s, bytes, cache_weights, std::move(transport));
}

int64_t arena_bytes(const Setup& s, bool cache_weights) {
    Setup alone = s;
    alone.communicator = nullptr;  // the ranks do not meet in a dry run
    return GpuModel(alone, 0, cache_weights, nullptr).dry_step();
}

}  // namespace coat
