// model.cu - one training step on the GPU, from the first token to the last update, of any model
// (common/known_models.h) in any recipe (common/recipes.h), with the kernels of coat.cu, adamw.cu and gpu/.
// It mirrors the reference in reference/network.h and reference/model.cpp. There are two classes:
//
//   1. Network    forward and backward of a micro-batch, and the update
//   2. GpuModel   a step, and what else one asks of a model
//
// This is a step:
//
//   GpuModel::step()
//     begin_step_or_evaluation()          clears what the last step has found out
//     run_micro_batch()                   for each micro-batch of the step
//       Network::begin_micro_batch()      copies tokens and targets to the GPU
//       forward_and_backward()
//         forward()
//           embed_and_save()              the embedding, where the residual stream begins
//           for each layer:
//             attention_half_forward()    norm 1 -> q, k, v -> attention -> output projection -> residual sum
//             mlp_half_forward()          norm 2 -> gate, up -> activation -> down projection -> residual sum
//         head_forward_and_backward()     final norm -> logits -> loss; gradients of these, in opposite order
//         for each layer, from the last to the first:
//           mlp_half_backward()           the gradients of mlp_half_forward(), in opposite order
//           attention_half_backward()     the gradients of attention_half_forward(), in opposite order
//       add_embedding_gradients()         from the gradient of the residual stream
//     Network::note_loss_or_nan()         after each micro-batch: the loss; or NaN, if an amax shows infinity
//                                         or NaN
//     update_parameters()
//       Network::update_buckets()
//         compute_gradient_squares()      of all gradients, for their norm
//         update_gradient_state()         the norm; what clipping multiplies by; whether the step is skipped
//         adamw()                         new moments and weights, and the amaxes of the new weights
//     fetch_outcome()                     the loss and the norm of the gradients
//
// For example, these are the operators that run in mlp_half_forward() in coat. Each launches a kernel. A GEMM
// and the two operators before it are a linear layer: its function fprop() (gpu/linear.cpp) makes the codes
// of its input and of its weight, and calls the GEMM.
//
// There are N tokens; C is the hidden size, and F the width of gate and of up. The residual sum in the
// attention half has saved the input of norm 2, and found its row statistics (of an RMSNorm: 1 / rms of each
// row) and the amax of its output. The last update has found the amaxes of the weights. (In the reference
// each half first saves the input of its norm. Here the half before has saved it, in residual_add().)
//
//   operator                      reads                          writes
//   quantize_operand()            input of norm 2 (N, C), in     codes of the output of norm 2
//                                 groups; its row statistics;
//                                 the weight of norm 2
//   quantize_operand()            weight of gate and up, BF16    its codes
//   GEMM                          both codes                     gate and up (N, 2F), BF16
//   quantize_activation_input()   gate and up                    groups of gate and up, which are saved; the
//                                                                amax of the activation's output
//   quantize_operand()            gate and up, in groups         codes of the activation's output (N, F)
//   quantize_operand()            weight of down, BF16           its codes
//   GEMM                          both codes                     branch (N, C), BF16
//   residual_add()                residual stream, branch        their sum, in BF16 for the next sum, and in
//                                                                groups for the next norm; that norm's row
//                                                                statistics, and the amax of its output.
//                                                                (After the last layer: in BF16 for the
//                                                                final norm, and its row statistics)
//
// The quantizers are in coat.cu, residual_add() is in gpu/norm.cu, and the GEMM is a call of cuBLASLt
// (gpu/gemm.cpp). fprop() calls write_operand() of coat.cu, which calls quantize_operand().
//
// Here the overview ends: come back to this file when you have read the files above it in the table of
// README.md.
//
// -----------------------------------------------------------------------------------------------------------
// How to read the two classes
//
// Each class begins with its data. Its functions follow in the order of the list above: first what a step
// calls, then the parts of it. (The section on buckets stands before the head, whose backward pass is the
// first that needs it.) Behind these functions stand small ones that they use, such as weight() and
// saved_tensor(). Where no blank line is between two functions, they belong together: mostly the second is a
// part of the first. What can wait is at the end of the class: what other models and recipes need,
// evaluations and prompts. The step itself is in the second class: GpuModel::step(), which can be read first.
//
// Most conditions are for other runs than this one: Llama-2-7B in coat, 8 x 2048 tokens, one GPU, no further
// flags. In a first reading follow that run. These names have the following values in it, so most of the
// conditions can be skipped:
//
//   name                             where it is          value in that run
//   keep_gradients                   RunSettings          true
//   micro_batches_per_rank, ranks    RunSettings          1
//   communicator                     RunSettings          null
//   quant_stats, quant_report        GpuContext           null: nothing is measured
//   quant_stats_of()                 GpuContext           null
//   bias_index()                     ParameterTensors     nothing, for all weights
//   delayed(), any_empty_history     ScaleTable           false
//   sends_gradients()                Sharding             false
//   is_first                         MicroBatch           true, because a step has one micro-batch
//   options_of_update_in_backward    MicroBatch           nothing
//   rotary_                          Network              true: RoPE
//   gated_                           Network              true: the activation is SiLU(gate) x up
//   qk_norms_                        Network              false
//   saves_inputs_in_groups_          Network              true
//   saves_groups()                   ResidualNorm         true; of the final norm false
//   saves_attention_in_groups_       Network              false
//   saves_what_attention_reads_      Network              true
//   saved_tensor_or_buffer()         Network              the saved tensor
//   head_sum_in_fp32_                Network              false
//   overwrites_gradients()           Network              true
//   bias_gradient_if_any()           Network              no tensor
//   dgate_up_replaces_gate_up(),     Network              true
//     dqkv_replaces_gate_up()
//   finish_bucket()                  Network              does nothing
//   caches_weights()                 Network              false
//   repeats_launches()               GpuModel             true from the second step on
//
// The other functions of Sharding do nothing with one GPU: gather_weights(), wait_for_gradient_buffer(), ...
#include "coat.h"
#include "common/random.h"
#include "gpu/attention.h"
#include "gpu/column_sums.h"
#include "gpu/gpu_model.h"  // declares the two functions at the end of this file
#include "gpu/gradient_norm.h"
#include "gpu/layers.h"
#include "gpu/linear.h"
#include "gpu/named_memory.h"
#include "gpu/norm.h"
#include "gpu/parameter_tensors.h"
#include "gpu/quant_report.h"
#include "gpu/sharding.h"

namespace coat {
namespace {

using namespace gpu;

// -----------------------------------------------------------------------------------------------------------
// Three rules of memory
//
//   1. What lasts for the run is allocated at its beginning (gpu/memory_map.h). What a step needs besides is
//      allocated where it is used, and given back when the Arena::Scope around it ends.
//   2. Outputs of norms and of activation functions are not stored. A LazyTensor (gpu/tensors.h) says what
//      such an output is computed from, and the kernel that makes a GEMM's operand computes it. What is saved
//      for backward is listed by saved_per_layer() in common/architecture.h.
//   3. Some tensors replace each other in one place. This table shows what is there, from left to right in
//      the order of a step. "-" means that the place is not touched:
//
//        place                 forward             head                  backward, layer by layer
//        final_norm_input()    the input of the    the gradient of       the gradient of the residual stream:
//                              final norm          this input            dresidual()
//        gate and up of a      gate and up         -                     the row-major codes of dgate_up;
//        layer                                                           then dqkv
//        activations of later  what forward saves  -                     gradients of weights, in most runs
//        layers                                                          (gpu/memory_layout.h)
//        logits                -                   logits, then their    -
//                                                  gradients
//
//      (dgate_up and dqkv have this place in coat. dgate_up_replaces_gate_up() and dqkv_replaces_gate_up()
//      say where they do not fit.)

// A layer of the transformer.
struct Layer {
    // The weights of the norms, as indices into ParameterTensors::params (gpu/parameter_tensors.h).
    size_t norm1_weight_index, norm2_weight_index;
    // Only Qwen3 has norms of the heads of q and k: qk_norms.
    std::optional<size_t> qk_norms_weight_index = std::nullopt;
    // The weights of these are "layers.l.qkv", "layers.l.attention_out", ...
    LinearLayer qkv_proj, attention_out_proj, gate_up_proj, down_proj;
    // By SavedKind (common/architecture.h), with the rows of a micro-batch.
    std::vector<TensorRef> saved_tensors = {};
};

// B sequences of T tokens: a micro-batch of a step or of an evaluation, or a prompt.
struct MicroBatch {
    int64_t B, T;
    int64_t N = B * T;  // tokens

    // The rest is for backward.
    bool is_first = true;  // of the step, on this rank
    // The settings of the update, if finish_bucket() does it (--gradients none).
    std::optional<AdamWOptions> options_of_update_in_backward = std::nullopt;
};

constexpr int64_t INT32_BYTES = sizeof(int32_t);

// ===========================================================================================================
// 1. Forward and backward of a micro-batch, and the update
//
// GpuModel, below, calls begin_micro_batch(), forward_and_backward(), add_embedding_gradients(),
// note_loss_or_nan() and update_buckets(). All functions are public, so that they can stand in the order of a
// step.

class Network {
    // Each member may use the members above it.
    GpuContext& context_;  // this rank's GPU: settings, stream and arena
    const RunSettings& settings_ = context_.settings;
    const ModelConfig& config_ = settings_.config;
    const Recipe& recipe_ = settings_.recipe;
    const cudaStream_t stream_ = context_.stream;
    Arena& arena_ = context_.arena;
    const MemoryMap& memory_;  // where everything is that lasts for the run
    ScaleTable& scale_table_;
    ParameterTensors& parameter_tensors_;
    Sharding& sharding_;  // the other GPUs
    CublasGemms gemms_{memory_.gemm_scratch, recipe_.fast_accumulation};
    SharedByLinearLayers shared_by_linear_layers_;
    std::vector<Layer> layers_;               // made by make_layer()
    MicroBatch micro_batch_{.B = 0, .T = 0};  // what is computed now: see begin_micro_batch()

    // Weights, as indices into ParameterTensors::params. A tied head has the index of the embedding.
    const size_t embedding_index_ = parameter_tensors_.param_index("embedding");
    const size_t final_norm_weight_index_ = parameter_tensors_.param_index("final_norm.weight");
    const size_t head_index_ = parameter_tensors_.param_index(config_.tied ? "embedding" : "head");

    // What kind of model it is.
    const bool rotary_ = config_.arch.rope;        // RoPE; GPT-2 has learned positions
    const bool gated_ = config_.arch.gated;        // SiLU(gate) x up; GPT-2 has GELU
    const bool qk_norms_ = config_.arch.qk_norms;  // Qwen3 has norms of the heads of q and k
    // Whether the inputs of norms and of activation functions are saved in FP8 groups.
    const bool saves_inputs_in_groups_ = recipe_.saved_inputs.is_fp8();
    // Whether q, k, v and the output of attention are, too (--attention groups).
    const bool saves_attention_in_groups_ = recipe_.saved_attention.is_fp8();
    // Whether attention reads q, k, v as they are saved, and its output is saved as attention writes it.
    const bool saves_what_attention_reads_ = !qk_norms_ && !saves_attention_in_groups_;
    // Whether the slices of the head add to its gradient in FP32 (gpu/memory_layout.h).
    const bool head_sum_in_fp32_ = head_sum_in_fp32(settings_);

    // What add_embedding_gradients() copies to the GPU. It must stay until the host waits for the GPU again.
    EmbeddingOrder embedding_order_;

public:
    // -------------------------------------------------------------------------------------------------------
    // A micro-batch

    // From now on this is the micro-batch that is computed. Its tokens and targets (B, T) are copied to the
    // GPU, as soon as the micro-batch before has run. targets: null for a prompt.
    void begin_micro_batch(const MicroBatch& micro_batch, const int32_t* tokens, const int32_t* targets) {
        micro_batch_ = micro_batch;
        const int64_t bytes = micro_batch.N * INT32_BYTES;
        context_.wait_then_start_copy_to_gpu(memory_.tokens, tokens, bytes);
        if (targets) context_.wait_then_start_copy_to_gpu(memory_.targets, targets, bytes);
    }

    // Adds the losses to StepOutcome::loss, and computes all gradients but those that follow in
    // add_embedding_gradients().
    void forward_and_backward() {
        forward();
        head_forward_and_backward();
        for (int64_t l = config_.L - 1; l >= 0; l--) {
            mlp_half_backward(l);
            attention_half_backward(l);
        }
    }

    // -------------------------------------------------------------------------------------------------------
    // Forward. (A table in gpu/linear.h says which of these functions finds the amax of which operand.)

    // The embedding and all layers, up to the input of the final norm.
    void forward() {
        const Arena::Scope scope(arena_);
        // Each micro-batch has its own amaxes. (With delayed scaling begin_delayed_scaling() clears them)
        if (!scale_table_.delayed()) scale_table_.clear_x_and_g_amaxes();
        TensorRef residual = embed_and_save(norm1_of(0));
        for (int64_t l = 0; l < config_.L; l++) {
            residual = attention_half_forward(l, residual);
            residual = mlp_half_forward(l, residual);
        }
    }

    // A norm of the residual stream, between two linear layers.
    struct ResidualNorm {
        Norm norm;            // as kernels are given it; norm.input is what was saved
        size_t weight_index;  // the index of the norm's weight in ParameterTensors::params
        // The linear layer whose output was added to the residual stream last. In backward this linear layer
        // reads the gradient that the norm computes. Null for the first norm 1, before which comes the
        // embedding.
        LinearLayer* linear_before;
        // The linear layer that reads the output. Null for the final norm: the head reads it, unquantized.
        LinearLayer* linear_after;

        // Whether the input is saved in groups. That of the final norm never is.
        bool saves_groups() const { return norm.input.format.is_fp8(); }
        float* output_amax_to_raise() const {
            return linear_after ? linear_after->amax_to_raise(OperandKind::X) : nullptr;
        }
        float* dresidual_amax_to_raise() const {
            return linear_before ? linear_before->amax_to_raise(OperandKind::G) : nullptr;
        }
    };

    // The residual stream is (N, C). Each sum in it is saved as the input of the norm that reads the stream
    // next. If that input is in groups, the sum is also stored in BF16, for the next sum. The two functions
    // that make a sum, embed_and_save() and add_branch_and_save(), return it in the compute format.

    // The embedding: a row of the weight for each token, and in GPT-2 a row for its position. The memory of
    // the BF16 sum is given back at the end of the caller's Scope.
    TensorRef embed_and_save(const ResidualNorm& first_norm) {
        sharding_.gather_weights(Sharding::EMBEDDING_WEIGHT_SET, Direction::Forward);
        const TensorRef positions =
            rotary_ ? TensorRef{} : weight(parameter_tensors_.param_index("positions"));
        const TensorRef plain_sum =
            first_norm.saves_groups() ? allocate_tensor(micro_batch_.N, config_.C) : TensorRef{};
        embed(weight(embedding_index_), positions, memory_.tokens, micro_batch_.T, first_norm.norm, plain_sum,
              first_norm.output_amax_to_raise(), stream_);
        if (context_.quant_stats) measure_norm_input_errors(plain_sum, first_norm);
        return first_norm.saves_groups() ? plain_sum : first_norm.norm.input;
    }

    // The first half of layer l. Takes the residual stream, and returns the new one.
    TensorRef attention_half_forward(int64_t l, const TensorRef& residual) {
        const Arena::Scope scope(arena_);
        Layer& layer = layers_[l];
        // norm 1; q, k, v projection: (N, C) -> (N, q_cols + 2 kv_cols). lazy_norm() computes nothing yet:
        // fprop() computes x while it makes the codes of x
        const LazyTensor x = lazy_norm(norm1_of(l).norm);
        const TensorRef qkv = saved_tensor_or_buffer(layer, SavedKind::Qkv);
        layer.qkv_proj.fprop(x, qkv);
        // attention with rotary positions -> (N, q_cols)
        core_attention_forward(layer, qkv);
        // attention output projection: (N, q_cols) -> (N, C)
        const TensorRef branch = allocate_tensor(micro_batch_.N, config_.C);
        const TensorRef attention_output = saved_tensor(layer, SavedKind::AttentionOutput);
        layer.attention_out_proj.fprop(lazy_load(attention_output), branch);
        // residual sum, which saves the input of norm 2
        return add_branch_and_save(residual, branch, norm2_of(l));
    }
    // Causal attention within each sequence of T tokens. Its output (N, q_cols) is saved. qkv is what the
    // projection has written: the saved tensor, in which q and k are rotated in place.
    void core_attention_forward(const Layer& layer, const TensorRef& qkv) {
        if (!saves_what_attention_reads_) return core_attention_forward_of_other_runs(layer, qkv);
        rotate_in_place(qkv);
        const TensorRef output = saved_tensor(layer, SavedKind::AttentionOutput);
        attention_forward(attention_shape_of_micro_batch(), qkv.data, output.data, saved_log_sum_exp(layer),
                          layer.attention_out_proj.amax_to_raise(OperandKind::X), stream_);
    }
    // RoPE of q and k. (GPT-2 has learned positions instead.)
    void rotate_in_place(const TensorRef& qkv) {
        if (rotary_)
            rope(rope_of_micro_batch(), qkv, /*inverse=*/false, /*qkv_amax_to_raise=*/nullptr, stream_);
    }

    // The second half of layer l (table of its operators: at the top of this file). Takes the residual
    // stream, and returns the new one.
    TensorRef mlp_half_forward(int64_t l, const TensorRef& residual) {
        const Arena::Scope scope(arena_);
        Layer& layer = layers_[l];
        const TensorRef saved_gate_up = saved_tensor(layer, SavedKind::GateUp);
        // norm 2; gate and up projection: (N, C) -> (N, 2F), or (N, F) for GPT-2. Again fprop() computes x
        const LazyTensor x = lazy_norm(norm2_of(l).norm);
        // Each branch of the `if` saves gate and up
        if (saves_inputs_in_groups_) {
            // The projection's output is the widest tensor of a layer. It exists only until its groups are
            // saved
            const Arena::Scope until_saved_gate_up(arena_);
            const TensorRef gate_up_bf16 = allocate_tensor(micro_batch_.N, saved_gate_up.cols);
            layer.gate_up_proj.fprop(x, gate_up_bf16);
            quantize_activation_input(gated_, gate_up_bf16, saved_gate_up,
                                      layer.down_proj.amax_to_raise(OperandKind::X),
                                      context_.quant_stats_of(MeasuredKind::ActivationInput), stream_);
        } else {
            // Recipes that save no groups: the projection's output is saved as it is
            layer.gate_up_proj.fprop(x, saved_gate_up);
        }
        // activation, which fprop() computes, and down projection: (N, F) -> (N, C)
        const TensorRef branch = allocate_tensor(micro_batch_.N, config_.C);
        layer.down_proj.fprop(lazy_activation(gated_, saved_gate_up), branch);
        // residual sum, which saves the input of the next norm
        return add_branch_and_save(residual, branch, norm_after_layer(l));
    }

    // The residual sum at the end of half a layer: adds `branch` to the residual stream, saves the sum as the
    // input of the norm `next`, and returns it. The sum in BF16, if there is one, replaces `residual`.
    TensorRef add_branch_and_save(const TensorRef& residual, const TensorRef& branch,
                                  const ResidualNorm& next) {
        const TensorRef plain_sum = next.saves_groups() ? residual : TensorRef{};
        residual_add(residual, branch, next.norm, plain_sum, next.output_amax_to_raise(), stream_);
        if (context_.quant_stats) measure_norm_input_errors(plain_sum, next);
        return next.saves_groups() ? plain_sum : next.norm.input;
    }

    // -------------------------------------------------------------------------------------------------------
    // Buckets (gpu/memory_layout.h). The kernels that add to the gradients of a bucket are launched between
    // begin_bucket() and finish_bucket(), and the next bucket begins after that. There is one exception: the
    // GEMMs of the head write its gradient before its bucket begins. (A tied head is in the bucket of the
    // embedding, which begins at the end of backward.)
    //
    // (With one GPU and no further flags finish_bucket() has nothing to do, because the gradients are where
    // the update reads them.)
    //
    // How gradients begin in a step, in its first micro-batch:
    //
    //   gradient of                       how it begins
    //   the weight of a linear layer      its wgrad overwrites it
    //   the weight of the head, even if   the wgrad of the first slice of tokens overwrites it
    //   that is a tied embedding
    //   a norm, a bias, an untied         begin_bucket() clears it, because the kernels of these add to
    //   embedding, positions              gradients

    void begin_bucket(int64_t bucket) {
        sharding_.wait_for_gradient_buffer(bucket);
        if (overwrites_gradients()) clear_gradients_that_no_gemm_writes(bucket);
    }
    // Does what the last row of the table says.
    void clear_gradients_that_no_gemm_writes(int64_t bucket) const {
        const BucketRange& range = parameter_tensors_.buckets[bucket];
        for (size_t i = range.first_param; i < range.end_param; i++) {
            const Param& p = parameter_tensors_.params[i];
            if (!p.is_linear_weight() && i != head_index_)
                clear_async(gradient(i).data, p.padded_size() * parameter_tensors_.bytes_per_gradient,
                            stream_);
        }
    }

    // -------------------------------------------------------------------------------------------------------
    // Head and loss. The logits of all tokens would be the largest tensor of a step. So they are computed for
    // a slice of HEAD_SLICE_TOKENS tokens at a time.

    // The loss; the gradient of the head's weight; and the gradient of the residual stream at the final norm.
    void head_forward_and_backward() {
        const Arena::Scope scope(arena_);
        const TensorRef dnorm_output = allocate_tensor(micro_batch_.N, config_.C);
        // (Several ranks: the direction says whose weights are gathered next, here those of the last layer)
        sharding_.gather_weights(sharding_.head_weight_set(), Direction::Backward);
        sharding_.wait_for_gradient_buffer(parameter_tensors_.params[head_index_].bucket);
        // (If head_sum_in_fp32_, dweight is a temporary FP32 sum, which is rounded at the end)
        const TensorRef dweight = head_sum_in_fp32_ ? make_head_gradient_in_fp32() : gradient(head_index_);
        for (int64_t first = 0; first < micro_batch_.N; first += HEAD_SLICE_TOKENS)
            head_slice_forward_and_backward(first, dnorm_output, dweight);
        add_losses_to_outcome();
        if (head_sum_in_fp32_) write_values(lazy_load(dweight), gradient(head_index_), stream_);
        // final norm: the gradient of the residual stream begins here. The gradient of an untied head, which
        // is in the same bucket, is complete
        const int64_t bucket = parameter_tensors_.params[final_norm_weight_index_].bucket;
        begin_bucket(bucket);
        residual_norm_backward(final_norm(), dnorm_output, /*dresidual_in=*/TensorRef{});
        finish_bucket(bucket);
    }
    // For the tokens of a slice, from number `first` on: computes the losses and their rows of dnorm_output,
    // and adds to dweight, the gradient of the head's weight.
    void head_slice_forward_and_backward(int64_t first, const TensorRef& dnorm_output,
                                         const TensorRef& dweight) {
        const Arena::Scope scope(arena_);
        const auto [norm_output, logits] = make_norm_output_and_logits(first, tokens_in_slice(first));
        cross_entropy_forward_and_backward(logits, config_.V, memory_.targets + first,
                                           &memory_.step_exchange->loss_weight, memory_.losses + first,
                                           stream_);
        const TensorRef& dlogits = logits;  // the gradients have taken the place of the logits
        const bool overwrite = overwrites_gradients() && first == 0;
        // The head is not quantized: the operands of its GEMMs are the tensors themselves
        const Operand g{dlogits}, w{weight(head_index_)}, x{norm_output};
        gemms_.run(GemmKind::Wgrad, g, x, dweight, stream_, {.overwrite = overwrite});
        gemms_.run(GemmKind::Dgrad, g, w, row_slice(dnorm_output, first, norm_output.rows), stream_);
    }

    struct HeadOutput {
        TensorRef norm_output;  // (n, C) of the final norm
        TensorRef logits;       // (n, padded_V)
    };
    // Computes the output of the final norm and the logits of n tokens, from number `first` on.
    HeadOutput make_norm_output_and_logits(int64_t first, int64_t n) {
        const HeadOutput out{.norm_output = allocate_tensor(n, config_.C),
                             .logits = allocate_tensor(n, config_.padded_V())};
        Norm norm_of_slice = final_norm().norm;
        norm_of_slice.input = row_slice(norm_of_slice.input, first, n);
        norm_of_slice.row_statistics += first;
        write_values(lazy_norm(norm_of_slice), out.norm_output, stream_);
        const Operand x{out.norm_output}, w{weight(head_index_)};
        gemms_.run(GemmKind::Fprop, x, w, out.logits, stream_);
        return out;
    }
    int64_t tokens_in_slice(int64_t first) const {
        return std::min(HEAD_SLICE_TOKENS, micro_batch_.N - first);
    }

    // StepOutcome::loss += the sum of the losses * StepExchange::loss_weight.
    void add_losses_to_outcome() {
        add_loss_sum(memory_.losses, micro_batch_.N, &memory_.step_exchange->loss_weight,
                     &memory_.outcome_on_gpu()->loss, stream_);
    }

    // -------------------------------------------------------------------------------------------------------
    // Backward. dX is the gradient of X. The gradient of a linear layer's output is g, and g_operand is what
    // the GEMMs of this linear layer read in place of g.
    //
    // The gradient of the residual stream, dresidual(), stays in one place: each norm adds its part there.

    // From the gradient of the residual stream after layer l to that before norm 2 of this layer. This is
    // what is on the stack, from one operator to the next. In brackets is what a linear layer allocates for
    // one GEMM. Of dgate_up_operand only the transposed codes are on the stack in coat: the row-major codes
    // take the place of gate_up.
    //
    //   on the stack                                                     what runs, and what it computes
    //   dgate_up_operand | g_operand of down_proj | [x_operand]          wgrad of down_proj
    //   dgate_up_operand | g_operand of down_proj | dact | [w_operand]   dgrad of down_proj: dact
    //   dgate_up_operand | g_operand of down_proj | dact                 activation: the amax of dgate_up
    //   dgate_up_operand | g_operand of down_proj | dact                 activation: dgate_up_operand
    //   dgate_up_operand | dnorm_output | [w_operand]                    dgrad of gate_up_proj: dnorm_output
    //   dgate_up_operand | dnorm_output                                  norm 2: dresidual()
    //   dgate_up_operand | [x_operand]                                   wgrad of gate_up_proj
    //
    // There are two kinds of Scopes here. `scope` ends with the function. A Scope with the name until_x holds
    // what is needed until x is computed. If that is in the middle of a function, end() ends the Scope there:
    // until_dgate_up. What must outlive a Scope is allocated before the Scope begins: dgate_up_operand.
    void mlp_half_backward(int64_t l) {
        const Arena::Scope scope(arena_);
        Layer& layer = layers_[l];
        const TensorRef saved_gate_up = saved_tensor(layer, SavedKind::GateUp);
        // dgate_up (N, 2F), the gradient of gate and up, exists only as an operand. It is computed from dact
        // and outlives dact, so its memory is allocated first. Its row-major elements need no memory if they
        // replace gate and up
        const Operand dgate_up_operand = layer.gate_up_proj.allocate_g_operand(
            micro_batch_.N, dgate_up_replaces_gate_up() ? saved_gate_up.data : nullptr);
        Arena::Scope until_dgate_up(arena_);  // for the down projection's g_operand, and dact
        // down projection: wgrad and dgrad -> dact (N, F), the gradient of the activation's output. wgrad
        // comes first, so that its x_operand is given back before dact is allocated: both are (N, F), as wide
        // as no other tensor here
        begin_bucket(layer.down_proj.bucket());
        const Operand g_operand = layer.down_proj.make_g_operand(lazy_load(dresidual()));
        layer.down_proj.wgrad(g_operand, lazy_activation(gated_, saved_gate_up), overwrites_gradients());
        const TensorRef dact = allocate_tensor(micro_batch_.N, config_.F);
        layer.down_proj.dgrad(g_operand, dact);
        finish_bucket(layer.down_proj.bucket());
        // activation. (The bucket begins before it, because in GPT-2 write_g_operand() adds to dbias)
        begin_bucket(layer.gate_up_proj.bucket());
        layer.gate_up_proj.write_g_operand(lazy_activation_backward(gated_, saved_gate_up, dact),
                                           dgate_up_operand);
        until_dgate_up.end();
        // gate and up projection, norm 2
        linear_and_norm_backward(norm2_of(l), dgate_up_operand);
        finish_bucket(layer.gate_up_proj.bucket());
    }
    // Whether the row-major elements of dgate_up take the place of the saved gate and up (rule 3 above).
    // An element must have as many bytes as one of gate and up, so that the kernel may write over its input.
    // In coat both are FP8 codes. (There must be one scale for the tensor, because there is no room for
    // scales of rows or blocks.)
    bool dgate_up_replaces_gate_up() const {
        const TensorFormat& g = shared_by_linear_layers_.formats.g;
        const bool same_bytes =
            format_info(g.element_format).bytes == format_info(recipe_.saved_inputs.element_format).bytes;
        return same_bytes && g.granularity == PER_TENSOR;
    }

    // From the gradient of the residual stream before norm 2 of layer l to that before norm 1.
    void attention_half_backward(int64_t l) {
        const Arena::Scope scope(arena_);
        Layer& layer = layers_[l];
        void* const place_of_gate_up = saved_tensor(layer, SavedKind::GateUp).data;
        // dqkv replaces the layer's gate and up, which are not needed any more, if it fits there
        const TensorRef dqkv = dqkv_replaces_gate_up()
                                   ? tensor_at(place_of_gate_up, micro_batch_.N, config_.qkv_cols())
                                   : allocate_tensor(micro_batch_.N, config_.qkv_cols());
        Arena::Scope until_dqkv(arena_);  // for what dqkv is computed from
        // attention output projection: wgrad and dgrad -> dattention_output (N, q_cols)
        const TensorRef dattention_output = allocate_tensor(micro_batch_.N, config_.q_cols());
        begin_bucket(layer.attention_out_proj.bucket());
        attention_out_proj_backward(layer, dattention_output);
        finish_bucket(layer.attention_out_proj.bucket());
        // attention with rotary positions. (The bucket begins before it, because in Qwen3 the gradient of
        // qk_norms is in this bucket)
        begin_bucket(layer.qkv_proj.bucket());
        core_attention_backward(layer, dattention_output, dqkv);
        until_dqkv.end();
        // q, k, v projection, norm 1
        const Operand g_operand = layer.qkv_proj.make_g_operand(lazy_load(dqkv));
        linear_and_norm_backward(norm1_of(l), g_operand);
        finish_bucket(layer.qkv_proj.bucket());
    }
    // Whether dqkv takes the place of the saved gate and up (rule 3 above). A row of dqkv must fit into the
    // bytes of a row of gate and up, codes and scales together. (In Llama-2-7B a row of dqkv has 24,576
    // bytes. A row of gate and up has 22,016 bytes of codes and 2,752 bytes of scales.)
    bool dqkv_replaces_gate_up() const {
        return TensorFormat{recipe_.compute_format}.bytes(1, config_.qkv_cols()) <=
               recipe_.saved_inputs.bytes(1, config_.gate_up_cols());
    }
    // The backward pass of the output projection. Here the caller has allocated dattention_output, which is
    // narrower than dact. So g_operand is given back at the end, before attention takes memory.
    void attention_out_proj_backward(Layer& layer, const TensorRef& dattention_output) {
        const Arena::Scope scope(arena_);
        const Operand g_operand = layer.attention_out_proj.make_g_operand(lazy_load(dresidual()));
        const TensorRef attention_output = saved_tensor(layer, SavedKind::AttentionOutput);
        layer.attention_out_proj.wgrad(g_operand, lazy_load(attention_output), overwrites_gradients());
        layer.attention_out_proj.dgrad(g_operand, dattention_output);
    }
    // dattention_output -> dqkv, the gradient of what the q, k, v projection has written.
    void core_attention_backward(Layer& layer, const TensorRef& dattention_output, const TensorRef& dqkv) {
        const Arena::Scope scope(arena_);
        const AttentionShape shape = attention_shape_of_micro_batch();
        const AttentionBackward tensors{.qkv = saved_tensor(layer, SavedKind::Qkv).data,
                                        .out = saved_tensor(layer, SavedKind::AttentionOutput).data,
                                        .lse = saved_log_sum_exp(layer),
                                        .dout = dattention_output.data,
                                        .dqkv = dqkv.data,
                                        .workspace = arena_.allocate(attention_workspace_bytes(shape)),
                                        .rope_table = rotary_ ? memory_.rope_table : nullptr,
                                        .dqkv_amax_to_raise = layer.qkv_proj.amax_to_raise(OperandKind::G)};
        if (saves_what_attention_reads_) attention_backward(shape, tensors, stream_);
        else core_attention_backward_of_other_runs(layer, tensors, dqkv);
    }

    // The backward pass of a norm, and of the linear layer that reads the norm's output. dgrad computes the
    // gradient of the norm's output; the norm's backward pass reads this gradient; wgrad reads the output.
    void linear_and_norm_backward(const ResidualNorm& residual_norm, const Operand& g_operand) {
        Arena::Scope until_dresidual(arena_);  // for dnorm_output
        const TensorRef dnorm_output = allocate_tensor(micro_batch_.N, config_.C);
        residual_norm.linear_after->dgrad(g_operand, dnorm_output);
        residual_norm_backward(residual_norm, dnorm_output, /*dresidual_in=*/dresidual());
        until_dresidual.end();
        // lazy_norm() reads the row statistics that the norm's backward pass has just written
        residual_norm.linear_after->wgrad(g_operand, lazy_norm(residual_norm.norm), overwrites_gradients());
    }
    // The backward pass of a norm of the residual stream: dresidual() = dresidual_in + the gradient of the
    // norm's input.
    //   dnorm_output   the gradient of the norm's output
    //   dresidual_in   dresidual(); no tensor at the head, where the residual stream ends
    void residual_norm_backward(const ResidualNorm& residual_norm, const TensorRef& dnorm_output,
                                const TensorRef& dresidual_in) {
        norm_backward(residual_norm.norm,
                      {.dnorm_output = dnorm_output,
                       .dresidual_in = dresidual_in,
                       .dresidual_out = dresidual(),
                       .dresidual_amax_to_raise = residual_norm.dresidual_amax_to_raise(),
                       .dweight = gradient(residual_norm.weight_index),
                       .dbias = bias_gradient_if_any(residual_norm.weight_index)},
                      memory_.norm_backward_workspace, stream_);
    }

    // The gradient of the embedding, and in GPT-2 of the positions. Rows of dresidual() that belong to the
    // same token are added in a fixed order, for which the host sorts the tokens while the GPU computes.
    void add_embedding_gradients(const int32_t* tokens) {
        embedding_order_ = embedding_order(tokens, micro_batch_.N);
        const int64_t distinct_tokens = int64_t(embedding_order_.token_rows.size());
        context_.wait_then_start_copy_to_gpu(memory_.row_order, embedding_order_.row_order.data(),
                                             micro_batch_.N * INT32_BYTES);
        context_.wait_then_start_copy_to_gpu(memory_.token_rows, embedding_order_.token_rows.data(),
                                             distinct_tokens * int64_t(sizeof(TokenRows)));
        const int64_t bucket = parameter_tensors_.params[embedding_index_].bucket;
        begin_bucket(bucket);
        embedding_backward(dresidual(),
                           {.row_order = memory_.row_order,
                            .token_rows = memory_.token_rows,
                            .count = distinct_tokens,
                            .frequent_count = embedding_order_.frequent_count},
                           gradient(embedding_index_), stream_);
        if (!rotary_)
            positions_backward(dresidual(), micro_batch_.T,
                               gradient(parameter_tensors_.param_index("positions")), stream_);
        finish_bucket(bucket);
    }

    // Writes StepOutcome::loss_or_nan (gpu/memory_map.h says what it is for).
    void note_loss_or_nan() {
        StepOutcome* const outcome_on_gpu = memory_.outcome_on_gpu();
        write_loss_or_nan(scale_table_.entries(), scale_table_.entry_count(), &outcome_on_gpu->loss,
                          &outcome_on_gpu->loss_or_nan, stream_);
    }

    // -------------------------------------------------------------------------------------------------------
    // The update

    // Updates the parameters of the buckets [first_bucket, end_bucket), which are all buckets. Their
    // gradients are complete, and loss_or_nan is written. (With --gradients none finish_bucket() updates one
    // bucket at a time.)
    //
    // Clipping needs the norm of all gradients, so their squares come first. (With several ranks each
    // computes a row of loss_and_squares, from what it owns, and gets those of the others.)
    void update_buckets(const AdamWOptions& options, int64_t first_bucket, int64_t end_bucket) {
        const ParamsToUpdate params = parameter_tensors_.params_of_buckets(first_bucket, end_bucket);
        const Range units = parameter_tensors_.units_of_buckets(first_bucket, end_bucket);
        StepOutcome* const outcome_on_gpu = memory_.outcome_on_gpu();
        GradientState* const gradient_state = &outcome_on_gpu->gradient_state;
        double* const loss_and_squares = memory_.loss_and_squares;
        const int64_t row_size = 1 + units.count;
        double* const own_row = loss_and_squares + settings_.rank * row_size;

        compute_gradient_squares(params, units, &outcome_on_gpu->loss_or_nan, own_row, stream_);
        sharding_.all_gather(loss_and_squares, row_size * int64_t(sizeof(double)));
        update_gradient_state(loss_and_squares, units.count, settings_.ranks, options.clip, gradient_state,
                              stream_);
        adamw(options, settings_.optimizer, params, memory_.owned_weights,
              rounding_key(settings_.seed, options.update_number), gradient_state, stream_);
    }

    // -------------------------------------------------------------------------------------------------------
    // Small functions that the others use: where tensors are, and the norms with their inputs

    // The weight of the parameter with this index, as forward and backward read it; and its gradient, where
    // backward writes it.
    const TensorRef& weight(size_t i) const { return parameter_tensors_.weights[i]; }
    const TensorRef& gradient(size_t i) const { return parameter_tensors_.gradients[i]; }
    // The gradient of the bias that belongs to this weight; no tensor if there is no bias.
    TensorRef bias_gradient_if_any(size_t weight_index) const {
        const std::optional<size_t> bias_index = parameter_tensors_.bias_index(weight_index);
        return bias_index ? gradient(*bias_index) : TensorRef{};
    }
    // Whether GEMMs overwrite gradients: in the first micro-batch. In later ones they add to the gradients.
    // (With several ranks they always overwrite: backward writes to a buffer, from which the gradients are
    // sent, and the sums of the step lie elsewhere.)
    bool overwrites_gradients() const { return micro_batch_.is_first || sharding_.sends_gradients(); }

    // A tensor (n, cols) in the compute format, in memory that is allocated now. There is memory for a
    // multiple of 16 rows, because an FP8 GEMM writes so many.
    TensorRef allocate_tensor(int64_t n, int64_t cols) {
        const int64_t elements = round_up(n, FP8_GEMM_MULTIPLE) * cols;
        return tensor_at(arena_.allocate(elements * format_info(recipe_.compute_format).bytes), n, cols);
    }
    TensorRef tensor_at(void* data, int64_t n, int64_t cols) const {
        return {.data = data, .rows = n, .cols = cols, .format = {recipe_.compute_format}};
    }

    // What a layer has saved, or is to save: the rows of this micro-batch.
    TensorRef saved_tensor(const Layer& layer, SavedKind kind) const {
        TensorRef tensor = layer.saved_tensors[size_t(kind)];
        tensor.rows = micro_batch_.N;
        return tensor;
    }

    // The residual stream (N, C) after the last layer, which is the input of the final norm. The backward
    // pass of this norm overwrites it with the gradient of the residual stream, dresidual(). The further
    // norms, in backward's order, add their parts to dresidual() in place.
    TensorRef final_norm_input() const {
        return tensor_at(memory_.final_norm_input_or_dresidual, micro_batch_.N, config_.C);
    }
    TensorRef dresidual() const { return final_norm_input(); }

    // A norm with this weight and this input, as kernels are given it.
    Norm norm_of(size_t weight_index, const TensorRef& input) const {
        const std::optional<size_t> bias_index = parameter_tensors_.bias_index(weight_index);
        return {.input = input,
                .weight = weight(weight_index).data,
                .bias = bias_index ? weight(*bias_index).data : nullptr,
                .row_statistics = memory_.row_statistics,
                .rms = config_.arch.rms,
                .eps = config_.norm_eps};
    }

    // The norms of the residual stream. norm1_of(l) and norm2_of(l) are those of layer l.
    ResidualNorm norm1_of(int64_t l) {
        Layer& layer = layers_[l];
        return {.norm = norm_of(layer.norm1_weight_index, saved_tensor(layer, SavedKind::Norm1Input)),
                .weight_index = layer.norm1_weight_index,
                .linear_before = l > 0 ? &layers_[l - 1].down_proj : nullptr,
                .linear_after = &layer.qkv_proj};
    }
    ResidualNorm norm2_of(int64_t l) {
        Layer& layer = layers_[l];
        return {.norm = norm_of(layer.norm2_weight_index, saved_tensor(layer, SavedKind::Norm2Input)),
                .weight_index = layer.norm2_weight_index,
                .linear_before = &layer.attention_out_proj,
                .linear_after = &layer.gate_up_proj};
    }
    ResidualNorm final_norm() {
        return {.norm = norm_of(final_norm_weight_index_, final_norm_input()),
                .weight_index = final_norm_weight_index_,
                .linear_before = &layers_.back().down_proj,
                .linear_after = nullptr};
    }
    // The norm that reads the residual stream after layer l.
    ResidualNorm norm_after_layer(int64_t l) { return l + 1 < config_.L ? norm1_of(l + 1) : final_norm(); }

    // Arguments of the kernels of attention, in forward and in backward.
    float* saved_log_sum_exp(const Layer& layer) const {
        return static_cast<float*>(saved_tensor(layer, SavedKind::LogSumExp).data);
    }
    Rope rope_of_micro_batch() const {
        return {.table = memory_.rope_table,
                .T = micro_batch_.T,
                .HS = config_.HS(),
                .rotated_cols = config_.q_cols() + config_.kv_cols()};
    }
    AttentionShape attention_shape_of_micro_batch() const {
        return attention_shape(config_, micro_batch_.B, micro_batch_.T, recipe_.compute_format);
    }

    // -------------------------------------------------------------------------------------------------------
    // How a Network is made: its layers

    Network(GpuContext& context, const MemoryMap& memory, ScaleTable& scale_table,
            ParameterTensors& parameter_tensors, Sharding& sharding, bool cache_weights)
        : context_(context), memory_(memory), scale_table_(scale_table),
          parameter_tensors_(parameter_tensors),
          sharding_(sharding), shared_by_linear_layers_{.gpu_context = context,
                                                        .parameter_tensors = parameter_tensors,
                                                        .scale_table = scale_table,
                                                        .sharding = sharding,
                                                        .gemms = gemms_,
                                                        .caches_weights = cache_weights} {
        layers_.reserve(size_t(config_.L));
        for (int64_t l = 0; l < config_.L; l++) layers_.push_back(make_layer(l));
        if (rotary_) fill_rope_table(config_, settings_.T, memory_.rope_table, stream_);
    }

    // Layer l: the indices of its parameters, its linear layers, and the places of what it saves.
    //
    // gate_up_proj finds the amax of its g by an extra pass (gpu/linear.h says why). Other runs have further
    // extra passes: down_proj, if gate and up are not saved in groups; attention_out_proj with --attention
    // groups, because its x is then what the groups hold; and qkv_proj in Qwen3, where qk_norms_backward()
    // changes dqkv after attention_backward().
    Layer make_layer(int64_t l) {
        const int64_t N = settings_.B * settings_.T;
        auto index = [&](const char* param) {
            return parameter_tensors_.param_index(concat("layers.", l, ".", param));
        };
        auto linear = [&](const char* weight, ExtraAmaxPasses extra_amax_passes) {
            return LinearLayer(shared_by_linear_layers_, index(weight), extra_amax_passes);
        };
        Layer layer{.norm1_weight_index = index("norm1.weight"),
                    .norm2_weight_index = index("norm2.weight"),
                    .qkv_proj = linear("qkv", {.over_g = qk_norms_}),
                    .attention_out_proj = linear("attention_out", {.over_x = saves_attention_in_groups_}),
                    .gate_up_proj = linear("gate_up", {.over_g = true}),
                    .down_proj = linear("down", {.over_x = !saves_inputs_in_groups_})};
        if (qk_norms_) layer.qk_norms_weight_index = index("qk_norm.weight");
        uint8_t* const memory_of_layer = memory_.saved_activations + l * saved_layer_bytes(settings_);
        const std::vector<int64_t> offsets = saved_tensor_offsets(settings_);
        for (const SavedFormat& saved : saved_per_layer(config_, recipe_)) {
            uint8_t* const data = memory_of_layer + offsets[size_t(saved.kind)];
            TensorRef tensor{.data = data, .rows = N, .cols = saved.cols, .format = saved.format};
            // The scales of groups lie right after the codes
            if (saved.format.is_fp8())
                tensor.group_scales =
                    reinterpret_cast<uint16_t*>(data + saved.format.bytes_without_scales(N, saved.cols));
            layer.saved_tensors.push_back(tensor);
        }
        return layer;
    }

    // -------------------------------------------------------------------------------------------------------
    // The rest of this class can wait. The end of a bucket: several ranks, --gradients none, the report

    // To be called when everything is launched that adds to the gradients of the bucket in this micro-batch,
    // or that reads the weights of the bucket.
    void finish_bucket(int64_t bucket) {
        // Several ranks: each rank sends the gradients to the ranks that own them, which add them up
        if (sharding_.sends_gradients() && !context_.quant_report)
            sharding_.reduce_gradients(bucket, micro_batch_.is_first);
        // --gradients none: the weights of the bucket are updated
        if (micro_batch_.options_of_update_in_backward) {
            note_loss_or_nan();
            update_buckets(*micro_batch_.options_of_update_in_backward, bucket, bucket + 1);
        }
        // measure_quantization(): what storing the moments would lose is measured
        if (context_.quant_report)
            parameter_tensors_.measure_moment_errors_of(bucket, *context_.quant_report);
    }

    // -------------------------------------------------------------------------------------------------------
    // The gradient of the head, summed in FP32

    // The tensor to which the slices add the gradient of the head's weight.
    TensorRef make_head_gradient_in_fp32() {
        const TensorRef& dweight = gradient(head_index_);
        const TensorRef fp32_sum{.data = arena_.allocate<float>(dweight.rows * dweight.cols),
                                 .rows = dweight.rows,
                                 .cols = dweight.cols,
                                 .format = PLAIN_FP32};
        // A later micro-batch begins the sum with the gradient of the earlier ones
        if (!overwrites_gradients()) write_values(lazy_load(dweight), fp32_sum, stream_);
        return fp32_sum;
    }

    // -------------------------------------------------------------------------------------------------------
    // q, k, v and the output of attention: --attention groups, and Qwen3. What these functions allocate is
    // given back at the end of the caller's Scope.

    // Qwen3 has qk_norms before RoPE: norms of the heads of q and k. Their backward pass needs their inputs.
    // So q, k, v are saved as the projection writes them. In other models RoPE comes before they are saved.
    void core_attention_forward_of_other_runs(const Layer& layer, const TensorRef& qkv) {
        if (!qk_norms_) rotate_in_place(qkv);
        save_groups_if_any(layer, SavedKind::Qkv, qkv);
        const TensorRef output = saved_tensor_or_buffer(layer, SavedKind::AttentionOutput);
        const TensorRef qkv_for_attention = make_attention_input(layer, qkv);
        attention_forward(attention_shape_of_micro_batch(), qkv_for_attention.data, output.data,
                          saved_log_sum_exp(layer), layer.attention_out_proj.amax_to_raise(OperandKind::X),
                          stream_);
        save_groups_if_any(layer, SavedKind::AttentionOutput, output);
    }
    // tensors: what attention_backward() is given, except for the inputs that are made here.
    void core_attention_backward_of_other_runs(const Layer& layer, AttentionBackward tensors,
                                               const TensorRef& dqkv) {
        const TensorRef qkv = load_saved(layer, SavedKind::Qkv);
        const TensorRef output = load_saved(layer, SavedKind::AttentionOutput);
        tensors.qkv = make_attention_input(layer, qkv).data;
        tensors.out = output.data;
        attention_backward(attention_shape_of_micro_batch(), tensors, stream_);
        if (qk_norms_) qk_norms_backward_in_place(layer, qkv, dqkv);
    }

    // Where forward writes a tensor that the layer is to save: the saved tensor itself. With --attention
    // groups: a buffer in the compute format, which save_groups_if_any() saves in groups.
    TensorRef saved_tensor_or_buffer(const Layer& layer, SavedKind kind) {
        const TensorRef saved = saved_tensor(layer, kind);
        return saves_attention_in_groups_ ? allocate_tensor(saved.rows, saved.cols) : saved;
    }
    // With --attention groups: saves the buffer in groups, and then writes to it what the groups hold. So
    // forward reads what backward will read, and the saved log-sum-exp fits both.
    void save_groups_if_any(const Layer& layer, SavedKind kind, const TensorRef& buffer) {
        if (saves_attention_in_groups_)
            quantize_to_groups(buffer, saved_tensor(layer, kind), /*write_back=*/true,
                               context_.quant_stats_of(MeasuredKind::QkvAndOutput), stream_);
    }
    // Where backward reads what the layer has saved: the saved tensor itself. With --attention groups: a
    // buffer, to which the values of the groups are written.
    TensorRef load_saved(const Layer& layer, SavedKind kind) {
        const TensorRef loaded = saved_tensor_or_buffer(layer, kind);
        if (saves_attention_in_groups_) write_values(lazy_load(saved_tensor(layer, kind)), loaded, stream_);
        return loaded;
    }

    // What attention reads: qkv. Qwen3: a copy, normed and rotated, which is made in forward and again in
    // backward.
    TensorRef make_attention_input(const Layer& layer, const TensorRef& qkv) {
        if (!qk_norms_) return qkv;
        const TensorRef normed_and_rotated = allocate_tensor(micro_batch_.N, qkv.cols);
        qk_norms_and_rope(qk_norms_of(layer), rope_of_micro_batch(), qkv, normed_and_rotated, stream_);
        return normed_and_rotated;
    }
    QkNorms qk_norms_of(const Layer& layer) const {
        return {.weight = weight(*layer.qk_norms_weight_index).data,
                .eps = config_.norm_eps,
                .HS = config_.HS(),
                .q_cols = config_.q_cols(),
                .k_cols = config_.kv_cols()};
    }
    // dqkv, on entry the gradient of the outputs of qk_norms, becomes that of their inputs.
    void qk_norms_backward_in_place(const Layer& layer, const TensorRef& qkv, const TensorRef& dqkv) {
        const QkNorms norms = qk_norms_of(layer);
        float* const partials = arena_.allocate<float>(COLUMN_PARTIALS * (norms.q_cols + norms.k_cols));
        qk_norms_backward(norms, qkv, dqkv, gradient(*layer.qk_norms_weight_index), partials, stream_);
    }

    // -------------------------------------------------------------------------------------------------------
    // The quantization report

    // The groups of a norm's input were made of the sum in FP32. Their error is measured against the sum in
    // BF16.
    void measure_norm_input_errors(const TensorRef& plain_sum, const ResidualNorm& next) {
        if (next.saves_groups())
            measure_quant_errors(lazy_load(plain_sum), Operand{.tensor = next.norm.input},
                                 context_.quant_stats_of(MeasuredKind::NormInput), stream_);
    }

    // -------------------------------------------------------------------------------------------------------
    // Evaluations and prompts: what follows forward() where no gradients are wanted

    // Adds the losses to StepOutcome::loss.
    void loss_without_gradients() {
        const Arena::Scope scope(arena_);
        sharding_.gather_weights(sharding_.head_weight_set(), Direction::Forward);
        for (int64_t first = 0; first < micro_batch_.N; first += HEAD_SLICE_TOKENS) {
            const Arena::Scope slice_scope(arena_);
            const TensorRef logits = make_norm_output_and_logits(first, tokens_in_slice(first)).logits;
            cross_entropy_forward(logits, config_.V, memory_.targets + first, memory_.losses + first,
                                  stream_);
        }
        add_losses_to_outcome();
    }
    // The logits (V) of the last token, in FP32, on the GPU. They are in the scratch memory of GEMMs, which
    // is free between GEMMs.
    const float* last_logits() {
        const Arena::Scope scope(arena_);
        sharding_.gather_weights(sharding_.head_weight_set(), Direction::Forward);
        const TensorRef logits = make_norm_output_and_logits(/*first=*/micro_batch_.N - 1, /*n=*/1).logits;
        const TensorRef fp32_logits{
            .data = gemms_.scratch, .rows = 1, .cols = logits.cols, .format = PLAIN_FP32};
        write_values(lazy_load(logits), fp32_logits, stream_);
        return static_cast<const float*>(fp32_logits.data);
    }

    // -------------------------------------------------------------------------------------------------------
    // Weights in a cache

    // Whether the FP8 codes of all weights are made once per step.
    bool caches_weights() const { return shared_by_linear_layers_.caches_weights; }
    // Makes the FP8 codes of all weights.
    void write_cached_w_operands() {
        for (Layer& layer : layers_)
            for (LinearLayer* linear_layer :
                 {&layer.qkv_proj, &layer.attention_out_proj, &layer.gate_up_proj, &layer.down_proj})
                linear_layer->write_cached_w_operand();
    }
};

// ===========================================================================================================
// 2. A step, and what else one asks of a model

class GpuModel final : public Model {
    // Network explains the members that it has under the same name.
    GpuContext context_;
    const RunSettings& settings_ = context_.settings;
    const cudaStream_t stream_ = context_.stream;
    const MemoryMap memory_ = allocate_memory(context_);
    ScaleTable scale_table_{context_, memory_};
    ParameterTensors parameter_tensors_{context_, memory_, scale_table_};
    // The tensors of all these members by name, for checkpoints.
    NamedMemory named_memory_{context_, memory_, parameter_tensors_, scale_table_};
    const std::unique_ptr<Sharding> sharding_;
    Network network_;

    // What begin_step_or_evaluation() copies to the GPU. It must stay until the host waits for the GPU again.
    double loss_weight_ = 0;

    // Network::forward_and_backward(), recorded: for the first micro-batch of a step, which overwrites
    // gradients, and for later ones, which add to gradients.
    CudaGraph first_micro_batch_graph_, later_micro_batch_graph_;
    bool first_step_done_ = false;

    bool cached_weights_are_valid_ = false;  // if weights are cached: whether their codes are up to date

public:
    // bytes: the size of the allocation, or DRY_RUN_BYTES.
    GpuModel(const RunSettings& s, int64_t bytes, bool cache_weights, std::shared_ptr<Transport> transport)
        : context_(s, bytes),
          sharding_(make_sharding(context_, memory_, parameter_tensors_, scale_table_, std::move(transport))),
          network_(context_, memory_, scale_table_, parameter_tensors_, *sharding_, cache_weights) {
        named_memory_.initialize();
        clear_async(memory_.step_exchange, sizeof(StepExchange), stream_);
        after_weight_change();
    }

    // -------------------------------------------------------------------------------------------------------
    // A step

    // Forward and backward of each micro-batch, then the update.
    StepResult step(const int32_t* tokens, const int32_t* targets, const AdamWOptions& options) override {
        const int64_t scored_target_count = sum_over_ranks(count_scored_targets(targets, tokens_of_rank()));
        if (scored_target_count == 0) return {.loss = 0, .grad_norm = 0, .skipped = true};
        begin_step_or_evaluation(double(scored_target_count));
        for (int64_t i = 0; i < settings_.micro_batches_per_rank; i++) {
            MicroBatch micro_batch{.B = settings_.B, .T = settings_.T, .is_first = i == 0};
            if (!settings_.keep_gradients) micro_batch.options_of_update_in_backward = options;
            run_micro_batch(micro_batch, tokens + i * micro_batch.N, targets + i * micro_batch.N);
            // The next micro-batch clears the amaxes, so they are looked at now
            if (settings_.keep_gradients) network_.note_loss_or_nan();
        }
        update_parameters(options);
        const StepOutcome outcome = fetch_outcome();
        const bool skipped = outcome.gradient_state.skip != 0;
        first_step_done_ = true;
        if (scale_table_.delayed() && !skipped) scale_table_.note_empty_histories(outcome.empty_histories);
        // The loss that is returned is outcome.loss, not loss_or_nan, because `skipped` says whether an amax
        // was not finite. (An evaluation has no such field, so validation_loss() returns loss_or_nan.)
        return {.loss = sum_over_ranks(outcome.loss),
                .grad_norm = outcome.gradient_state.norm,
                .skipped = skipped,
                .scored_target_count = scored_target_count};
    }

    int64_t tokens_of_rank() const { return settings_.micro_batches_per_rank * settings_.B * settings_.T; }
    // The sum of the values of all ranks. With one rank it is `mine`.
    template <class Value> Value sum_over_ranks(const Value& mine) const {
        if (!settings_.communicator) return mine;
        Value sum{};
        for (const Value& theirs : settings_.communicator->all_gather(mine)) sum += theirs;
        return sum;
    }

    // A step and each kind of evaluation call this before their first micro-batch. Copies 1 / divisor to the
    // GPU, and clears the StepOutcome. (If weights are cached, also makes their FP8 codes.)
    //   divisor   of the mean loss: the number of scored targets, at least 1
    //   report    the quantization report that is to be filled; null if nothing is measured
    void begin_step_or_evaluation(double divisor, QuantReport* report = nullptr) {
        loss_weight_ = 1.0 / divisor;
        context_.wait_then_start_copy_to_gpu(&memory_.step_exchange->loss_weight, &loss_weight_,
                                             sizeof(double));
        clear_async(memory_.outcome_on_gpu(), sizeof(StepOutcome), stream_);
        context_.quant_report = report;
        context_.quant_stats = report ? memory_.step_exchange->quant_stats : nullptr;
        if (scale_table_.delayed()) begin_delayed_scaling();
        if (network_.caches_weights()) update_cached_weights();
    }

    // Forward and backward of one micro-batch. The gradient of the embedding is outside of what a CUDA graph
    // replays, because its launch depends on the tokens.
    void run_micro_batch(const MicroBatch& micro_batch, const int32_t* tokens, const int32_t* targets) {
        network_.begin_micro_batch(micro_batch, tokens, targets);
        CudaGraph& graph = micro_batch.is_first ? first_micro_batch_graph_ : later_micro_batch_graph_;
        if (repeats_launches(micro_batch)) graph.run(stream_, [&] { network_.forward_and_backward(); });
        else network_.forward_and_backward();
        network_.add_embedding_gradients(tokens);
    }

    // Updates all parameters. (With --gradients none backward has updated them: Network::finish_bucket())
    void update_parameters(const AdamWOptions& options) {
        const int64_t bucket_count = int64_t(parameter_tensors_.buckets.size());
        sharding_->wait_for_transfers();
        if (settings_.keep_gradients)
            network_.update_buckets(options, /*first_bucket=*/0, /*end_bucket=*/bucket_count);
        after_weight_change();
        if (scale_table_.delayed()) scale_table_.update_histories(memory_.outcome_on_gpu());
    }
    // What was made of the old weights is not valid any more. Then ranks agree on the amaxes of the new
    // weights. (With one rank, and without a cache of weights, nothing is to be done.)
    void after_weight_change() {
        cached_weights_are_valid_ = false;
        sharding_->forget_gathered_weights();
        sharding_->combine_amaxes_of_ranks();
    }

    // Waits until the step has run, and returns what it has found out.
    StepOutcome fetch_outcome() const {
        StepOutcome outcome{};
        context_.copy_to_host(&outcome, memory_.outcome_on_gpu(), sizeof outcome);
        return outcome;
    }

    // -------------------------------------------------------------------------------------------------------
    // The rest of this class can wait. CUDA graphs, weights in a cache, delayed scaling

    // Whether all launches are the same as in the last step, with the same arguments, so that a CUDA graph
    // can replay them.
    bool repeats_launches(const MicroBatch& micro_batch) const {
        // A dry run (gpu/cuda.h) has no stream that could be recorded
        if (stream_ == DRY_RUN) return false;
        // The first step loads kernels and chooses the algorithms of GEMMs
        if (!first_step_done_) return false;
        // Errors of quantizing are measured by other kernels
        if (context_.quant_report) return false;
        // Gradients of a bucket are sent to other GPUs, or its weights are updated, within backward
        if (sharding_->sends_gradients() || micro_batch.options_of_update_in_backward) return false;
        // Delayed scaling: as long as a history may be empty, amaxes are computed that are not needed later
        return !scale_table_.any_empty_history;
    }

    // Makes the FP8 codes of all weights, unless they are up to date. While quantization is measured, the
    // codes are made in any case, because making them measures their errors.
    void update_cached_weights() {
        if (cached_weights_are_valid_ && !context_.quant_stats) return;
        network_.write_cached_w_operands();
        cached_weights_are_valid_ = true;
    }
    // Delayed scaling (te): this step collects the amaxes of all operands for the histories.
    void begin_delayed_scaling() {
        scale_table_.clear_all_amaxes();
        cached_weights_are_valid_ = false;     // they are made again, which computes their amaxes
        sharding_->forget_gathered_weights();  // these are FP8 codes, whose scales change
    }

    // -------------------------------------------------------------------------------------------------------
    // What else one asks of a model (common/model.h)

    double validation_loss(const int32_t* tokens, const int32_t* targets) override {
        const MicroBatch micro_batch{.B = settings_.B, .T = settings_.T};
        begin_step_or_evaluation(divisor_of_mean(targets, micro_batch.N));
        network_.begin_micro_batch(micro_batch, tokens, targets);
        network_.forward();
        network_.loss_without_gradients();
        network_.note_loss_or_nan();
        return fetch_outcome().loss_or_nan;
    }

    void next_logits(const int32_t* tokens, int64_t n, float* logits) override {
        begin_step_or_evaluation(1);
        network_.begin_micro_batch({.B = 1, .T = n}, tokens, /*targets=*/nullptr);
        network_.forward();
        context_.copy_to_host(logits, network_.last_logits(), settings_.config.V * int64_t(sizeof(float)));
    }

    QuantReport measure_quantization(const int32_t* tokens, const int32_t* targets) override {
        QuantStats* const quant_stats = memory_.step_exchange->quant_stats;
        QuantReport report{};
        const MicroBatch micro_batch{.B = settings_.B, .T = settings_.T};
        clear_async(quant_stats, sizeof(StepExchange::quant_stats), stream_);
        begin_step_or_evaluation(divisor_of_mean(targets, micro_batch.N), &report);
        run_micro_batch(micro_batch, tokens, targets);
        sharding_->wait_for_transfers();
        context_.copy_to_host(report.stats_by_kind, quant_stats, sizeof(StepExchange::quant_stats));
        report.k_m = parameter_tensors_.expansion_exponents(memory_.first_moments);
        report.k_v = parameter_tensors_.expansion_exponents(memory_.second_moments);
        // With several ranks, each may have quantized a part of the weights
        QuantStats& weights = report.stats_by_kind[int(MeasuredKind::Weight)];
        weights = sharding_->sum_weight_quant_stats(weights);
        context_.quant_report = nullptr;
        context_.quant_stats = nullptr;
        return report;
    }

    void read(const std::string& name, void* out) override {
        sharding_->wait_for_transfers();
        context_.wait();
        named_memory_.read(name, out);
    }
    void write(const std::string& name, const void* in) override {
        sharding_->wait_for_transfers();
        context_.wait();
        named_memory_.write(name, in);
        after_weight_change();
    }
    const RunSettings& settings() const override { return settings_; }

    // For a dry run only: runs a step, and returns the bytes that the whole allocation needs, for what lasts
    // and for what a step allocates besides.
    int64_t dry_step() {
        const std::vector<int32_t> tokens(tokens_of_rank());
        step(tokens.data(), tokens.data(), {.update_number = 1, .lr = 0.0f});
        return context_.arena.peak();
    }
};

}  // namespace

std::unique_ptr<Model> make_gpu_model_of_size(const RunSettings& s, int64_t bytes, bool cache_weights,
                                              std::shared_ptr<Transport> transport) {
    return std::make_unique<GpuModel>(s, bytes, cache_weights, std::move(transport));
}

int64_t arena_bytes(const RunSettings& s, bool cache_weights) {
    RunSettings without_communicator = s;
    without_communicator.communicator = nullptr;  // the ranks do not meet in a dry run
    return GpuModel(without_communicator, DRY_RUN_BYTES, cache_weights, nullptr).dry_step();
}

}  // namespace coat
