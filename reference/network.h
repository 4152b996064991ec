// reference/network.h - 5. The precision flow of a micro-batch (paper, section 5): which tensor has which
// format. The center of this file is layer_forward() and layer_backward().
//
// These are the formats of the recipe coat:
//   tensor                                  format                     who reads it in this format
//   x, w and g of a linear layer            E4M3, g E5M2;              its GEMMs
//                                           one scale for the tensor
//   norm1_input, norm2_input, gate_up       E4M3; a scale for each     norms and the activation function, in
//                                           1x16 group                 both passes
//   residual sums                           FP32                       the norm's quantizer. (The next sum
//                                                                      reads them rounded to BF16)
//   outputs of norms 1 and 2 and of the     FP32                       the quantizer of a linear layer
//     activation function, dgate_up
//   dnorm1_input, dnorm2_input              FP32                       the sum that makes the next dresidual
//   log-sum-exp of attention                FP32                       attention, backward
//   gradients of weights                    BF16 (FP32 if more than    the optimizer
//                                           four are summed)
//   all others                              BF16                       whatever comes next
//
// The CPU passes the FP32 residual sum on, and each of its two readers rounds it. A GPU rounds it to both
// formats at once, and stores these two. Wherever a quantizer reads FP32, one kernel of a GPU computes the
// FP32 values and quantizes them, so they are not stored.
//
// Backward computes the outputs of norms and of the activation function again, from the saved inputs. Forward
// has computed with the same saved values, so backward takes each derivative at the values of forward. The
// derivative of rounding is taken as 1.
#pragma once
#include <array>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "../common/model.h"
#include "operators.h"
#include "quantize.h"

namespace coat::reference {

// The forward and backward pass of one micro-batch. Every tensor is a vector of values, row-major. It has N
// rows unless its comment says otherwise. From top to bottom:
//   data
//   a whole pass
//   small functions
//   one transformer layer
//   the parts of a layer: saving for backward, attention, linear layers, norms, the activation function
//   the embedding and the head
//   what can wait: functions for other models, recipes and flags
class Network {
public:
    using Tensor = std::vector<float>;

    const RunSettings settings;
    const std::vector<Param> params = parameters(settings.config);
    std::vector<Tensor> param_values;  // by parameter (rows, cols), in the compute format
    std::vector<Tensor> gradients;     // by parameter (rows, cols), in gradient_format()
    bool all_finite = true;  // whether the loss and all tensors that were quantized to FP8 were finite so far
    // (The last two members can wait.) One element for each MeasuredKind; null: errors are not measured.
    QuantStats* stats_by_kind = nullptr;
    // By parameter and OperandKind: for recipes with delayed scaling.
    std::vector<std::array<DelayedScale, OPERAND_COUNT>> delayed_scales;

    explicit Network(const RunSettings& s) : settings(s) {
        for (size_t i = 0; i < params.size(); i++) {
            param_index_[params[i].name] = i;
            param_values.emplace_back(params[i].size());
            gradients.emplace_back(params[i].size());
        }
        prepare_delayed_scales();
    }

    // --- A whole pass ---

    // Forgets what was seen in earlier tensors: all_finite, and the amaxes of delayed scaling. It is called
    // before a step, and before a pass outside of a step.
    void forget_earlier_tensors() {
        all_finite = true;
        for (auto& operands : delayed_scales)
            for (DelayedScale& d : operands) d.amax = 0;
    }

    // Forward and the loss; then, if `backward`, the backward pass. tokens, targets: (B, T). Returns the sum
    // of the losses. Backward adds the gradients of loss_weight * (sum of the losses) to `gradients`. With
    // loss_weight = 1 / (number of scored targets of the step), all micro-batches of the step together give
    // the gradients of the mean loss.
    double run_micro_batch(const int32_t* tokens, const int32_t* targets, double loss_weight, bool backward) {
        begin_pass(settings.B, settings.T);
        const Tensor x = embedding_and_layers_forward(tokens);  // (N, C)
        const Tensor y = rounded(apply_norm("final_norm", x));  // (N, C)
        // At first these are the logits. The loss function overwrites them with their gradients. (Evaluation
        // needs only the loss, but the gradients cost little.)
        Tensor dlogits = head_forward(y);  // (N, padded_V)
        const double loss = cross_entropy_forward_and_backward(N(), config_.V, config_.padded_V(),
                                                               dlogits.data(), targets, float(loss_weight));
        all_finite = all_finite && std::isfinite(loss);
        if (!backward) return loss;

        const Tensor dy = head_backward(y, rounded(dlogits));
        Tensor dresidual = rounded(apply_norm_backward("final_norm", x, dy));
        for (int64_t l = config_.L; l-- > 0;) dresidual = layer_backward(l, dresidual);
        embedding_backward(tokens, dresidual);
        return loss;
    }

    // The logits (padded_V) of the token that follows n tokens.
    Tensor next_logits(const int32_t* tokens, int64_t n) {
        begin_pass(/*B=*/1, /*T=*/n);
        const Tensor x = embedding_and_layers_forward(tokens);
        const Tensor last(x.end() - config_.C, x.end());
        return head_forward(rounded(apply_norm("final_norm", last)));
    }

    // Where the errors of a kind of tensor are added; null: they are not measured.
    QuantStats* stats_of(MeasuredKind kind) const {
        return stats_by_kind ? stats_by_kind + int(kind) : nullptr;
    }

private:
    const ModelConfig& config_ = settings.config;
    const Recipe& recipe_ = settings.recipe;
    const LinearFormats formats_ = linear_formats(settings);
    std::map<std::string, size_t> param_index_;  // by name: the index of the parameter in params

    // What a layer saves for backward (paper, table 2): by SavedKind, the tensors of saved_per_layer() in
    // common/architecture.h.
    using enum SavedKind;  // Norm1Input, Qkv, ...
    using SavedLayer = std::array<StoredMatrix, SAVED_KIND_COUNT>;
    const std::vector<SavedFormat> saved_formats_ = saved_per_layer(config_, recipe_);

    // Of the current pass: B sequences of T tokens, and what each layer has saved.
    int64_t B_ = 0, T_ = 0;
    std::vector<SavedLayer> saved_layers_;

    void begin_pass(int64_t B, int64_t T) {
        B_ = B;
        T_ = T;
        saved_layers_.clear();
        saved_layers_.resize(config_.L);
    }
    int64_t N() const { return B_ * T_; }

    // tokens (B, T) -> input of the final norm (N, C)
    Tensor embedding_and_layers_forward(const int32_t* tokens) {
        Tensor residual = embedding_forward(tokens);
        for (int64_t l = 0; l < config_.L; l++) residual = layer_forward(l, residual);
        return rounded(residual);
    }

    // --- Small functions that the others use ---

    const Tensor& parameter(const std::string& name) const { return param_values[param_index_.at(name)]; }
    // How the names of the parameters of layer l begin.
    static std::string prefix_of(int64_t l) { return "layers." + std::to_string(l) + "."; }
    std::string head_name() const { return config_.tied ? "embedding" : "head"; }

    static int64_t rows_of(const Tensor& x, int64_t cols) { return int64_t(x.size()) / cols; }

    // To the compute format.
    Tensor rounded(Tensor x) const {
        for (float& v : x) v = round_to(recipe_.compute_format, v);
        return x;
    }

    static Tensor add(Tensor x, const Tensor& y) {
        add_scaled(int64_t(x.size()), 1.0f, y.data(), x.data());
        return x;
    }

    // Adds to the gradient of a parameter, and rounds the sum.
    void add_gradient(const std::string& name, const Tensor& contribution) {
        Tensor& gradient = gradients[param_index_.at(name)];
        gradient = add(gradient, contribution);
        const Format format = gradient_format(settings);
        for (float& v : gradient) v = round_to(format, v);
    }

    // a (m, k) b (k, n) -> (m, n), in FP32
    static Tensor multiply(int64_t m, int64_t n, int64_t k, MatrixView<float> a, MatrixView<float> b) {
        Tensor product(m * n);
        matmul(m, n, k, a, b, product.data());
        return product;
    }

    // --- One transformer layer. ./train --plan prints its operators and formats, in this order ---

    // Layer l: the residual stream before the layer (N, C) -> after the layer (N, C). Both are residual sums
    // in FP32. (Before layer 0 the stream is the embedding.) Core attention is attention without its two
    // linear layers, qkv and attention_out.
    //
    // The ends of lines say what is quantized in coat. What is saved for backward is E4M3 in groups of 1x16,
    // or BF16. The operands of a linear layer, here x and w, have one scale each.
    Tensor layer_forward(int64_t l, const Tensor& residual_sum) {
        const std::string prefix = prefix_of(l);
        const Tensor norm1_input = quantize_and_save(l, Norm1Input, residual_sum);  // saved: E4M3 1x16
        const Tensor norm1_output = apply_norm(prefix + "norm1", norm1_input);
        const Tensor qkv = linear_forward(prefix + "qkv", norm1_output);  // x, w: E4M3
        const Tensor attention_output = core_attention_forward(l, qkv);   // saved, like q, k and v: BF16
        const Tensor attention_branch =
            linear_forward(prefix + "attention_out", attention_output);  // x, w: E4M3
        const Tensor sum_after_attention = add(rounded(residual_sum), attention_branch);

        const Tensor norm2_input = quantize_and_save(l, Norm2Input, sum_after_attention);  // saved: E4M3 1x16
        const Tensor norm2_output = apply_norm(prefix + "norm2", norm2_input);
        const Tensor unquantized_gate_up = linear_forward(prefix + "gate_up", norm2_output);  // x, w: E4M3
        const Tensor gate_up = quantize_and_save(l, GateUp, unquantized_gate_up);  // saved: E4M3 1x16
        const Tensor act = apply_activation(gate_up);
        const Tensor mlp_branch = linear_forward(prefix + "down", act);  // x, w: E4M3
        return add(rounded(sum_after_attention), mlp_branch);
    }

    // Layer l: the gradient of the residual stream after the layer (N, C) -> before the layer (N, C). Where a
    // branch leaves the stream, two gradients are added: one comes along the stream, one through the branch.
    // The operators come in the opposite order of forward. The operand g of a linear layer is the gradient of
    // its output: dresidual, dgate_up, dresidual, dqkv.
    Tensor layer_backward(int64_t l, Tensor dresidual) {
        const std::string prefix = prefix_of(l);
        const Tensor gate_up = load_saved(l, GateUp);
        const Tensor act = apply_activation(gate_up);
        const Tensor dact = linear_backward(prefix + "down", act, dresidual);  // x, w: E4M3; g: E5M2
        const Tensor dgate_up = apply_activation_backward(gate_up, dact);
        const Tensor norm2_input = load_saved(l, Norm2Input);
        const Tensor norm2_output = apply_norm(prefix + "norm2", norm2_input);
        const Tensor dnorm2_output =
            linear_backward(prefix + "gate_up", norm2_output, dgate_up);  // x, w: E4M3; g: E5M2
        const Tensor dnorm2_input = apply_norm_backward(prefix + "norm2", norm2_input, dnorm2_output);
        dresidual = rounded(add(dresidual, dnorm2_input));

        const Tensor attention_output = load_saved(l, AttentionOutput);
        const Tensor dattention_output =
            linear_backward(prefix + "attention_out", attention_output, dresidual);  // x, w: E4M3; g: E5M2
        const Tensor dqkv = core_attention_backward(l, attention_output, dattention_output);
        const Tensor norm1_input = load_saved(l, Norm1Input);
        const Tensor norm1_output = apply_norm(prefix + "norm1", norm1_input);
        const Tensor dnorm1_output =
            linear_backward(prefix + "qkv", norm1_output, dqkv);  // x, w: E4M3; g: E5M2
        const Tensor dnorm1_input = apply_norm_backward(prefix + "norm1", norm1_input, dnorm1_output);
        return rounded(add(dresidual, dnorm1_input));
    }

    // --- What a layer saves for backward ---

    // Saves x (N, cols) for backward, in the format of saved_per_layer().
    void save(int64_t l, SavedKind kind, const Tensor& x) {
        const SavedFormat& t = saved_formats_[int(kind)];
        StoredMatrix& saved = saved_layers_[l][int(kind)];
        saved = quantize(x.data(), rows_of(x, t.cols), t.cols, t.format,
                         {.stats = stats_of(measured_kind(kind))});
        check_finite(saved.amax);
    }
    Tensor load_saved(int64_t l, SavedKind kind) const { return dequantize(saved_layers_[l][int(kind)]); }
    // Quantizes x (N, cols) to the format in which it is saved, and saves it. Returns the values that
    // backward will load: forward goes on with them. (In FP32 and BF16 the values are only rounded.)
    Tensor quantize_and_save(int64_t l, SavedKind kind, const Tensor& x) {
        save(l, kind, x);
        return load_saved(l, kind);
    }

    // FP8 codes saturate, so they hide an infinity. Therefore this is called with the amax of every tensor
    // that is quantized to FP8.
    void check_finite(float amax) { all_finite = all_finite && std::isfinite(amax); }

    // --- Core attention, and RoPE ---
    //
    // In Llama RoPE comes before q, k and v are saved: rotates_before_saving() is true. Attention reads what
    // is saved. (Other models can wait: the end of this class.)

    // qkv (N, qkv_cols), as the projection gives it -> attention's output (N, q_cols). Attention reads q, k
    // and v as backward will load them, because the log-sum-exp has to belong to the loaded values.
    Tensor core_attention_forward(int64_t l, const Tensor& qkv) {
        save(l, Qkv, rotates_before_saving() ? rotated(qkv) : qkv);
        const Tensor attention_input = load_attention_input(l);
        Tensor output(N() * config_.q_cols()), log_sum_exp(N() * config_.NH);
        attention_forward(config_, B_, T_, attention_input.data(), output.data(), log_sum_exp.data());
        save(l, LogSumExp, log_sum_exp);
        return quantize_and_save(l, AttentionOutput, rounded(output));
    }

    // output (N, q_cols), attention's output as it was saved, and its gradient doutput -> dqkv (N, qkv_cols),
    // the gradient of what the projection gives. (Without --attention groups rounding `output` changes
    // nothing.)
    Tensor core_attention_backward(int64_t l, const Tensor& output, const Tensor& doutput) {
        const Tensor attention_input = load_attention_input(l);
        const Tensor log_sum_exp = load_saved(l, LogSumExp);
        Tensor dqkv(attention_input.size());
        attention_backward(config_, B_, T_, attention_input.data(), rounded(output).data(),
                           log_sum_exp.data(), doutput.data(), dqkv.data());
        dqkv = rounded(dqkv);
        if (config_.arch.rope) dqkv = rotated(dqkv, /*inverse=*/true);
        if (config_.arch.qk_norms) dqkv = apply_qk_norms_backward(l, dqkv);  // not in Llama
        return dqkv;
    }

    // q, k and v (N, qkv_cols) of a layer, as attention reads them. In Llama they are what was saved.
    Tensor load_attention_input(int64_t l) const {
        const Tensor qkv = rounded(load_saved(l, Qkv));  // (without --attention groups it is rounded already)
        return config_.arch.qk_norms ? rotated(apply_qk_norms(l, qkv)) : qkv;
    }

    // RoPE. In backward it rotates the gradient the other way (inverse = true). qkv: (N, qkv_cols)
    Tensor rotated(Tensor qkv, bool inverse = false) const {
        rope(config_, B_, T_, qkv.data(), inverse);
        return rounded(qkv);
    }

    // --- Linear layers: the operands are quantized, the GEMM computes in FP32, its result is rounded ---
    //
    // x_operand, w_operand, dgrad_g and wgrad_g are what the GEMMs read: FP32 values. If the format of an
    // operand is FP8, each of its values is a code times a scale.

    // A linear layer, found by its name.
    struct Linear {
        const Tensor& w;  // (out, in)
        int64_t in, out;
        size_t weight_index;  // of w in params; delayed scaling finds the layer's scales by it
    };
    Linear find_linear(const std::string& name) const {
        const size_t i = param_index_.at(name);
        return {.w = param_values[i], .in = params[i].cols, .out = params[i].rows, .weight_index = i};
    }

    // x (N, in) -> y (N, out)
    Tensor linear_forward(const std::string& name, const Tensor& x) {
        const Linear linear = find_linear(name);
        const int64_t in = linear.in, out = linear.out;
        const Tensor x_operand = make_operand(OperandKind::X, linear, x, SumAlong::Row);
        const Tensor w_operand = make_operand(OperandKind::W, linear, linear.w, SumAlong::Row);
        // fprop: y = x w^T
        Tensor y = multiply(N(), out, in, matrix_view(x_operand, in), transposed_view(w_operand, in));
        add_bias_if_any(name, y);
        return rounded(y);
    }

    // x (N, in), g (N, out) -> dx (N, in), where g is the gradient of the layer's output. Adds to the
    // gradient of the weight, and to that of the bias if there is one.
    Tensor linear_backward(const std::string& name, const Tensor& x, const Tensor& g) {
        const Linear linear = find_linear(name);
        const int64_t in = linear.in, out = linear.out;
        const Tensor x_operand = make_operand(OperandKind::X, linear, x, SumAlong::Column);
        const Tensor w_operand = make_operand(OperandKind::W, linear, linear.w, SumAlong::Column);
        const Tensor dgrad_g = make_operand(OperandKind::G, linear, g, SumAlong::Row);
        const Tensor wgrad_g = make_wgrad_g(linear, g, dgrad_g);  // in coat: dgrad_g
        // dgrad: dx = g w
        const Tensor dx = multiply(N(), in, out, matrix_view(dgrad_g, out), matrix_view(w_operand, in));
        // wgrad: dw = g^T x
        const Tensor dw = multiply(out, in, N(), transposed_view(wgrad_g, out), matrix_view(x_operand, in));
        add_gradient(name, dw);
        add_bias_gradient_if_any(name, g);
        return rounded(dx);
    }

    // x, w or g of a linear layer, as a GEMM reads it: quantized and decoded again. sum_along: whether the
    // GEMM sums along rows or columns of the tensor. (In coat, with one scale for the whole tensor, this
    // makes no difference, and there are no options.)
    Tensor make_operand(OperandKind kind, const Linear& linear, const Tensor& tensor, SumAlong sum_along) {
        const int64_t cols = kind == OperandKind::G ? linear.out : linear.in;
        const GemmOperand operand =
            gemm_operand(tensor, rows_of(tensor, cols), cols, format_of(formats_, kind), sum_along,
                         operand_options(kind, linear, tensor));
        check_finite(operand.amax);
        return operand.values;
    }

    // --- Norms and the activation function ---

    // x (rows, C) -> the norm's output (rows, C), in FP32.
    Tensor apply_norm(const std::string& name, const Tensor& x) const {
        const int64_t C = config_.C;
        const float* bias = config_.arch.rms ? nullptr : parameter(name + ".bias").data();
        Tensor y(x.size());
        norm_forward(config_.arch.rms, config_.norm_eps, rows_of(x, C), C, x.data(),
                     parameter(name + ".weight").data(), bias, y.data());
        return y;
    }

    // x, dy (N, C) -> dx (N, C), in FP32. Adds to the gradients of the norm's weight and bias.
    Tensor apply_norm_backward(const std::string& name, const Tensor& x, const Tensor& dy) {
        const int64_t C = config_.C;
        Tensor dx(x.size()), dweight(C), dbias(C);
        norm_backward(config_.arch.rms, config_.norm_eps, rows_of(x, C), C, x.data(),
                      parameter(name + ".weight").data(), dy.data(), dx.data(), dweight.data(), dbias.data());
        add_gradient(name + ".weight", dweight);
        if (!config_.arch.rms) add_gradient(name + ".bias", dbias);
        return dx;
    }

    // gate_up (N, gate_up_cols) -> act (N, F), in FP32.
    Tensor apply_activation(const Tensor& gate_up) const {
        Tensor act(N() * config_.F);
        activation_forward(config_.arch.gated, N(), config_.F, gate_up.data(), act.data());
        return act;
    }

    // gate_up (N, gate_up_cols), dact (N, F) -> dgate_up (N, gate_up_cols), in FP32.
    Tensor apply_activation_backward(const Tensor& gate_up, const Tensor& dact) const {
        Tensor dgate_up(gate_up.size());
        activation_backward(config_.arch.gated, N(), config_.F, gate_up.data(), dact.data(), dgate_up.data());
        return dgate_up;
    }

    // --- Embedding and head. As in the paper, they are not quantized ---

    // tokens (B, T) -> the residual stream before layer 0 (N, C):
    //   residual[n] = embedding[token n]                         with RoPE
    //   residual[n] = embedding[token n] + positions[n mod T]    with learned positions
    Tensor embedding_forward(const int32_t* tokens) const {
        const int64_t C = config_.C;
        Tensor residual(N() * C);
        for (int64_t n = 0; n < N(); n++) {
            std::copy_n(&parameter("embedding")[tokens[n] * C], C, &residual[n * C]);
            if (!config_.arch.rope)
                add_scaled(C, 1.0f, &parameter("positions")[n % T_ * C], &residual[n * C]);
        }
        return residual;
    }

    // Adds to the gradients of the embedding and of the learned positions. dresidual: (N, C).
    //   dembedding[token] = sum of dresidual[n] over all n with this token
    //   dpositions[t]     = sum of dresidual[n] over all n with n mod T = t
    void embedding_backward(const int32_t* tokens, const Tensor& dresidual) {
        const int64_t C = config_.C;
        const bool positions = !config_.arch.rope;
        Tensor dembedding(config_.padded_V() * C), dpositions(positions ? config_.max_T * C : 0);
        for (int64_t n = 0; n < N(); n++) {
            add_scaled(C, 1.0f, &dresidual[n * C], &dembedding[tokens[n] * C]);
            if (positions) add_scaled(C, 1.0f, &dresidual[n * C], &dpositions[n % T_ * C]);
        }
        add_gradient("embedding", dembedding);
        if (positions) add_gradient("positions", dpositions);
    }

    // y (rows, C) -> logits (rows, padded_V)
    Tensor head_forward(const Tensor& y) const {
        const int64_t C = config_.C, padded_V = config_.padded_V();
        const Tensor& w = parameter(head_name());  // (padded_V, C)
        return rounded(multiply(rows_of(y, C), padded_V, C, matrix_view(y, C), transposed_view(w, C)));
    }

    // y (N, C), dlogits (N, padded_V) -> dy (N, C). Adds to the gradient of the head.
    Tensor head_backward(const Tensor& y, const Tensor& dlogits) {
        const int64_t C = config_.C, padded_V = config_.padded_V();
        const Tensor& w = parameter(head_name());  // (padded_V, C)
        add_gradient(head_name(),
                     multiply(padded_V, C, N(), transposed_view(dlogits, padded_V), matrix_view(y, C)));
        return rounded(multiply(N(), C, padded_V, matrix_view(dlogits, padded_V), matrix_view(w, C)));
    }

    // =======================================================================================================
    // What can wait: functions for other models, recipes and flags
    //
    // --- Attention in other models, and with --attention groups ---
    //
    //   Llama, Mistral, Qwen2   projection -> RoPE -> saved -> attention
    //   Qwen3                   projection -> saved -> norms of heads -> RoPE -> attention
    //   GPT-2                   projection -> saved -> attention
    //
    // The backward pass of a norm needs the norm's input, so Qwen3 saves q, k and v before the norms. The
    // backward pass of RoPE needs no values, so the other models save q and k as attention reads them.
    //
    // With --attention groups q, k, v and attention's output are saved as codes. A code times its scale is an
    // FP32 value. Attention reads these values rounded to the compute format. The linear layer attention_out
    // reads them as they are.

    bool rotates_before_saving() const { return config_.arch.rope && !config_.arch.qk_norms; }

    // The norms of heads in Qwen3: q, k and v (N, qkv_cols) as they were saved -> the input of RoPE.
    Tensor apply_qk_norms(int64_t l, Tensor qkv) const {
        qk_norms_forward(config_, N(), parameter(prefix_of(l) + "qk_norm.weight").data(), qkv.data());
        return rounded(qkv);
    }

    // dqkv (N, qkv_cols), the gradient of the output of these norms -> of their input. Adds to the gradient
    // of their weight.
    Tensor apply_qk_norms_backward(int64_t l, Tensor dqkv) {
        const std::string name = prefix_of(l) + "qk_norm.weight";
        const Tensor qkv = rounded(load_saved(l, Qkv));
        Tensor dweight(2 * config_.HS());
        qk_norms_backward(config_, N(), qkv.data(), parameter(name).data(), dqkv.data(), dweight.data());
        add_gradient(name, dweight);
        return rounded(dqkv);
    }

    // --- Biases of linear layers ---

    // Only GPT-2 has biases and, for q, k and v, Qwen2.
    bool has_bias(const std::string& linear) const { return param_index_.count(linear + ".bias"); }

    // y (N, out): adds the bias to each row.
    void add_bias_if_any(const std::string& linear, Tensor& y) const {
        if (!has_bias(linear)) return;
        const Tensor& bias = parameter(linear + ".bias");
        const int64_t out = int64_t(bias.size());
        for (int64_t n = 0; n < rows_of(y, out); n++) add_scaled(out, 1.0f, bias.data(), &y[n * out]);
    }

    // The gradient of a bias (out) is the sum of g (N, out) over the tokens. A GPU has g in memory in the
    // compute format, or in FP8. The FP8 values have larger errors, so FP8 recipes sum the FP32 values of g.
    void add_bias_gradient_if_any(const std::string& linear, const Tensor& g) {
        if (!has_bias(linear)) return;
        const Tensor to_sum = formats_.g.is_fp8() ? g : rounded(g);
        const int64_t out = int64_t(parameter(linear + ".bias").size());
        Tensor dbias(out);
        for (int64_t n = 0; n < rows_of(g, out); n++) add_scaled(out, 1.0f, &to_sum[n * out], dbias.data());
        add_gradient(linear + ".bias", dbias);
    }

    // --- Scale blocks that differ from those of the transpose (the recipes rowwise and deepseek) ---
    //
    // Each operand is read by two GEMMs. One of them sums along the operand's rows. The other one sums along
    // its columns; on a GPU it reads the transpose, because Hopper's FP8 GEMM needs the elements that it adds
    // up to be neighbours in memory. In these recipes the two GEMMs need different codes:
    //
    //   operand   summed along   summed along  codes are made
    //             rows by        columns by
    //   x         fprop          wgrad         in forward for fprop, and in backward for wgrad, because the
    //                                          codes of fprop are not kept
    //   w         fprop          dgrad         for each GEMM. A GPU may keep them for a whole step
    //   g         dgrad          wgrad         once, if g^T has the same scale blocks as g; else for each
    //                                          GEMM
    //
    // make_wgrad_g() returns g (N, out) as wgrad reads it. dgrad_g: g as dgrad reads it. If g^T has the same
    // scale blocks as g, both are the same. Else g is quantized once more, in scale blocks along the tokens.
    Tensor make_wgrad_g(const Linear& linear, const Tensor& g, const Tensor& dgrad_g) {
        if (formats_.g.granularity.transpose_has_same_blocks()) return dgrad_g;
        return make_operand(OperandKind::G, linear, g, SumAlong::Column);
    }

    // --- The options of an operand: the measurement of errors, and delayed scaling (the recipe te) ---

    QuantizeOptions operand_options(OperandKind kind, const Linear& linear, const Tensor& operand) {
        return {.stats = stats_of(measured_kind(kind)), .scale = delayed_scale_if_any(kind, linear, operand)};
    }

    // The scale of a GEMM operand, from earlier steps. Other recipes have none, so quantize() takes the scale
    // from the operand's amax.
    std::optional<float> delayed_scale_if_any(OperandKind kind, const Linear& linear, const Tensor& operand) {
        const TensorFormat& format = format_of(formats_, kind);
        if (recipe_.scale_source != ScaleSource::Delayed || !format.is_fp8()) return {};
        const float amax = compute_amax(operand.data(), int64_t(operand.size()));
        return delayed_scales[linear.weight_index][int(kind)].raise_amax_and_get_scale(format, amax);
    }
    void prepare_delayed_scales() {
        delayed_scales.resize(params.size());
        for (size_t i = 0; i < params.size(); i++) {
            if (!params[i].is_linear_weight() || recipe_.scale_source != ScaleSource::Delayed) continue;
            for (DelayedScale& d : delayed_scales[i]) d.history.resize(recipe_.history_steps);
        }
    }
};

}  // namespace coat::reference
