// reference/network.h - 5. The precision flow of a micro-batch (paper, section 5): which tensor has which
// format. The center of this file is layer_forward() and layer_backward().
//
// These are the formats of the recipe coat:
//   GEMM operands of linear layers   E4M3, gradients E5M2; one scale for the tensor
//   inputs of norms 1 and 2 and of   E4M3, with a scale for each 1x16 group of a token. They are saved for
//     the activation function          backward
//   residual sums                    FP32, see below
//   log-sum-exp of attention         FP32
//   gradient of a norm's input       FP32, until it is added to the gradient of the residual stream
//   gradients of weights             BF16; FP32 if more than four are summed (gradient_format())
//   all other results of operators   BF16: results of linear layers, RoPE, attention, the final norm, the
//                                    embedding and the head
//
// A residual sum has two readers. The next sum reads it rounded to BF16, and the norm reads it in E4M3
// groups. Here the FP32 sum is passed on, and each reader rounds or quantizes it. A GPU stores it in both
// formats, and the FP32 sum exists only inside the kernel that computes it.
//
// Some tensors are quantized from FP32. On a GPU one kernel computes the FP32 values and quantizes them:
//   residual sums                           residual_sum and sum_after_attention in layer_forward()
//   outputs of norms                        apply_norm()
//   output of the activation function       apply_activation()
//   gradient of the activation's input      dgate_up in layer_backward()
// All other tensors are rounded to BF16 before they are quantized.
//
// Backward computes the outputs of norms and of the activation function again, from the saved inputs. Forward
// has computed with the same saved values, so backward takes each derivative at the values of forward. The
// derivative of rounding is taken as 1.
#pragma once
#include <array>
#include <map>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "../common/model.h"
#include "operators.h"
#include "quantize.h"

namespace coat::reference {

// The sizes of a micro-batch: B sequences of T tokens.
struct MicroBatchShape {
    int64_t B, T;
    int64_t N() const { return B * T; }
};

// The forward and backward pass of one micro-batch. Every tensor is a vector of values, row-major. It has N
// rows unless its comment says otherwise. From top to bottom:
//   data and small functions
//   a whole pass
//   one transformer layer
//   the parts of a layer: saving for backward, linear layers, norms, the activation function, RoPE
//   the embedding and the head
//   what can wait: only biases and other recipes than coat need it
template <class Real> class Network {
public:
    // Whether this network rounds values at all: to the compute format, and to FP8 for GEMMs and for saving,
    // as the recipe says. (In the recipe fp32 nothing changes, because all formats are FP32.) In double,
    // which only tests use, nothing is rounded, and what is saved for backward is the tensor itself.
    static constexpr bool ROUNDS = std::is_same_v<Real, float>;
    using Tensor = std::vector<Real>;

    const RunSettings settings;
    const std::vector<Param> params = parameters(settings.config);
    std::vector<Tensor> param_values;  // by parameter (rows, cols), in the compute format
    std::vector<Tensor> gradients;     // by parameter (rows, cols), in gradient_format()
    bool all_finite = true;  // whether the loss and all tensors that were quantized to FP8 were finite so far
    // One element for each MeasuredTensor; null: errors are not measured.
    QuantStats* stats_by_kind = nullptr;
    // By parameter and OperandKind; for recipes with delayed scaling only (this can wait).
    std::vector<std::array<DelayedScale, OPERAND_COUNT>> delayed_scales;

private:
    const ModelConfig& config_ = settings.config;
    const Recipe& recipe_ = settings.recipe;
    const LinearFormats formats_ = linear_formats(settings);
    std::map<std::string, size_t> param_index_;  // by name: the index of the parameter in params

    // What a layer saves for backward (paper, table 2): the tensors of saved_per_layer() in
    // common/architecture.h.
    using SavedActivation = std::conditional_t<ROUNDS, StoredMatrix, Tensor>;
    struct SavedLayer {
        SavedActivation norm1_input, norm2_input;  // (N, C)
        SavedActivation qkv;                       // (N, qkv_cols)
        SavedActivation attended;                  // attention's output (N, q_cols)
        SavedActivation gate_up;                   // (N, gate_up_cols)
        Tensor lse;                                // attention's log-sum-exp (B, NH, T)
    };
    std::vector<SavedLayer> saved_layers_;  // of the current pass

public:
    explicit Network(const RunSettings& s) : settings(s) {
        for (size_t i = 0; i < params.size(); i++) {
            param_index_[params[i].name] = i;
            param_values.emplace_back(params[i].size());
            gradients.emplace_back(params[i].size());
        }
        prepare_delayed_scales();
    }

    // Forgets what was observed of earlier tensors. It is called before a step, and before a forward pass on
    // its own.
    void reset_all_finite_and_amaxes() {
        all_finite = true;
        for (auto& operands : delayed_scales)
            for (DelayedScale& d : operands) d.amax = 0;
    }

    QuantStats* stats_of(MeasuredTensor k) const { return stats_by_kind ? stats_by_kind + int(k) : nullptr; }

private:
    // --- Small functions that the others use ---

    const Tensor& values_of(const std::string& name) const { return param_values[param_index_.at(name)]; }
    std::string head_name() const { return config_.tied ? "embedding" : "head"; }

    static int64_t rows_of(const Tensor& x, int64_t cols) { return int64_t(x.size()) / cols; }

    // x, rounded to the compute format.
    Tensor rounded(Tensor x) const {
        for (Real& v : x)
            if constexpr (ROUNDS) v = round_to(recipe_.compute_format, v);
        return x;
    }

    static Tensor add(Tensor x, const Tensor& y) {
        add_scaled(int64_t(x.size()), Real(1), y.data(), x.data());
        return x;
    }

    // Adds to the gradient of a parameter, and rounds the sum.
    void add_gradient(const std::string& name, const Tensor& contribution) {
        Tensor& gradient = gradients[param_index_.at(name)];
        gradient = add(gradient, contribution);
        if constexpr (ROUNDS) {
            const Format format = gradient_format(settings);
            for (Real& v : gradient) v = round_to(format, v);
        }
    }

    // a (m, k) b (k, n) -> (m, n), in FP32
    static Tensor multiply(int64_t m, int64_t n, int64_t k, MatrixView<Real> a, MatrixView<Real> b) {
        Tensor product(m * n);
        matmul(m, n, k, a, b, product.data());
        return product;
    }

public:
    // --- A whole pass ---

    // Forward and the loss; then, if `backward`, the backward pass. tokens, targets: (B, T). Returns the sum
    // of the losses. Backward adds to `gradients` those of loss_weight * (sum of the losses). With
    // loss_weight = 1 / (targets of the step that count), all micro-batches of the step together give the
    // gradients of the mean loss.
    double run_micro_batch(const int32_t* tokens, const int32_t* targets, double loss_weight, bool backward) {
        const MicroBatchShape shape{.B = settings.B, .T = settings.T};
        const Tensor x = embedding_and_layers_forward(shape, tokens);  // (N, C)
        const Tensor y = rounded(apply_norm("final_norm", x));         // (N, C)
        Tensor logits = head_forward(y);                               // (N, padded_V)
        // The gradients of the logits replace the logits. (Evaluation needs only the loss, but the gradients
        // cost little.)
        const double loss = cross_entropy_forward_and_backward(shape.N(), config_.V, config_.padded_V(),
                                                               logits.data(), targets, Real(loss_weight));
        all_finite = all_finite && std::isfinite(loss);
        if (!backward) return loss;

        const Tensor dlogits = rounded(logits);
        const Tensor dy = head_backward(y, dlogits);
        Tensor dresidual = rounded(apply_norm_backward("final_norm", x, dy));
        for (int64_t l = config_.L; l-- > 0;) dresidual = layer_backward(shape, l, dresidual);
        embedding_backward(shape, tokens, dresidual);
        return loss;
    }

    // The logits (padded_V) of the token that follows n tokens.
    Tensor next_logits(const int32_t* tokens, int64_t n) {
        const Tensor x = embedding_and_layers_forward({.B = 1, .T = n}, tokens);
        const Tensor last(x.end() - config_.C, x.end());
        return head_forward(rounded(apply_norm("final_norm", last)));
    }

private:
    // tokens (B, T) -> input of the final norm (N, C)
    Tensor embedding_and_layers_forward(const MicroBatchShape& shape, const int32_t* tokens) {
        saved_layers_.clear();
        Tensor residual = embedding_forward(shape, tokens);
        for (int64_t l = 0; l < config_.L; l++) residual = layer_forward(shape, l, residual);
        return rounded(residual);
    }

    // --- One transformer layer. ./train --plan prints its operators and formats, in this order ---

    // Layer l: the residual stream before the layer (N, C) -> after the layer (N, C). Both are residual sums
    // in FP32. (Before layer 0 the stream is the embedding.)
    Tensor layer_forward(const MicroBatchShape& shape, int64_t l, const Tensor& residual_sum) {
        const std::string prefix = "layers." + std::to_string(l) + ".";
        SavedLayer& saved = saved_layers_.emplace_back();

        // Residual sum -> norm 1 input, saved in groups. Norm 1 reads the groups.
        saved.norm1_input =
            save_for_backward(residual_sum, config_.C, recipe_.saved_inputs, MeasuredTensor::NormInput);

        // Norm 1 -> q, k, v -> RoPE, which is in qkv_to_save()
        const Tensor norm1_output = apply_norm(prefix + "norm1", load_saved(saved.norm1_input));
        const Tensor projected = linear_forward(prefix + "qkv", norm1_output);
        saved.qkv = save_for_backward(qkv_to_save(shape, projected), config_.qkv_cols(),
                                      recipe_.saved_attention, MeasuredTensor::QkvAndOutput);

        // Attention reads q, k and v as backward will load them, because the log-sum-exp has to belong to the
        // loaded values.
        const Tensor qkv = qkv_for_attention(shape, prefix, load_saved_for_attention(saved.qkv));
        Tensor attended(shape.N() * config_.q_cols());
        saved.lse.resize(shape.N() * config_.NH);
        attention_forward(config_, shape.B, shape.T, qkv.data(), attended.data(), saved.lse.data());
        saved.attended = save_for_backward(rounded(attended), config_.q_cols(), recipe_.saved_attention,
                                           MeasuredTensor::QkvAndOutput);

        // The linear layer attention_out -> residual sum -> norm 2 input
        const Tensor branch = linear_forward(prefix + "attention_out", load_saved(saved.attended));
        const Tensor sum_after_attention = add(rounded(residual_sum), branch);
        saved.norm2_input = save_for_backward(sum_after_attention, config_.C, recipe_.saved_inputs,
                                              MeasuredTensor::NormInput);

        // Norm 2 -> gate and up
        const Tensor norm2_output = apply_norm(prefix + "norm2", load_saved(saved.norm2_input));
        const Tensor gate_up = linear_forward(prefix + "gate_up", norm2_output);
        saved.gate_up = save_for_backward(gate_up, config_.gate_up_cols(), recipe_.saved_inputs,
                                          MeasuredTensor::ActivationInput);

        // SiLU(gate) * up -> down -> residual sum
        const Tensor act = apply_activation(load_saved(saved.gate_up));
        return add(rounded(sum_after_attention), linear_forward(prefix + "down", act));
    }

    // Layer l: the gradient of the residual stream after the layer (N, C) -> before the layer (N, C). Where a
    // branch leaves the stream, two gradients are added: one comes along the stream, one through the branch.
    // dX is the gradient of X. The operators come in the opposite order of forward.
    Tensor layer_backward(const MicroBatchShape& shape, int64_t l, Tensor dresidual) {
        const std::string prefix = "layers." + std::to_string(l) + ".";
        const SavedLayer& saved = saved_layers_[l];

        // Backward through down, whose input SiLU(gate) * up is computed again
        const Tensor gate_up = load_saved(saved.gate_up);
        const Tensor dact = linear_backward(prefix + "down", apply_activation(gate_up), dresidual);

        // Backward through SiLU(gate) * up, the linear layer gate_up, and norm 2
        const Tensor dgate_up = apply_activation_backward(gate_up, dact);
        const Tensor norm2_input = load_saved(saved.norm2_input);
        const Tensor norm2_output = apply_norm(prefix + "norm2", norm2_input);
        const Tensor dnorm2_output = linear_backward(prefix + "gate_up", norm2_output, dgate_up);
        dresidual =
            rounded(add(dresidual, apply_norm_backward(prefix + "norm2", norm2_input, dnorm2_output)));

        // Backward through the linear layer attention_out
        const Tensor dattended =
            linear_backward(prefix + "attention_out", load_saved(saved.attended), dresidual);

        // Backward through attention and RoPE
        const Tensor attended = load_saved_for_attention(saved.attended);
        const Tensor saved_qkv = load_saved_for_attention(saved.qkv);
        const Tensor qkv = qkv_for_attention(shape, prefix, saved_qkv);
        Tensor dqkv(qkv.size());
        attention_backward(config_, shape.B, shape.T, qkv.data(), attended.data(), saved.lse.data(),
                           dattended.data(), dqkv.data());
        dqkv = qkv_backward(shape, prefix, saved_qkv, rounded(dqkv));

        // Backward through the linear layer qkv, and norm 1
        const Tensor norm1_input = load_saved(saved.norm1_input);
        const Tensor norm1_output = apply_norm(prefix + "norm1", norm1_input);
        const Tensor dnorm1_output = linear_backward(prefix + "qkv", norm1_output, dqkv);
        return rounded(add(dresidual, apply_norm_backward(prefix + "norm1", norm1_input, dnorm1_output)));
    }

    // --- What a layer saves for backward ---

    // Saves x (N, cols) for backward, stored as `format` says. load_saved() gives the stored values.
    SavedActivation save_for_backward(const Tensor& x, int64_t cols, const TensorFormat& format,
                                      MeasuredTensor kind) {
        if constexpr (!ROUNDS) return x;
        else {
            note_amax(amax_if_fp8(x, format));
            return quantize(x.data(), rows_of(x, cols), cols, format, stats_of(kind));
        }
    }
    static Tensor load_saved(const SavedActivation& saved) {
        if constexpr (!ROUNDS) return saved;
        else return dequantize(saved);
    }
    // A saved tensor as attention reads it: its values, rounded to the compute format. Usually q, k, v and
    // attention's output are saved in the compute format, so rounding changes nothing. With --attention
    // groups they are saved as codes, and a code times its scale is an FP32 value. Attention reads this value
    // rounded; the linear layer attention_out reads it as it is.
    Tensor load_saved_for_attention(const SavedActivation& saved) const { return rounded(load_saved(saved)); }

    static float amax_if_fp8(const Tensor& x, const TensorFormat& format) {  // else 0
        return format.is_fp8() ? compute_amax(x.data(), int64_t(x.size())) : 0;
    }
    // FP8 codes saturate, which hides an infinity. So `all_finite` remembers whether the amax of each tensor
    // that is quantized to FP8 was finite. (Only scales of whole tensors need this: scale_of() says why. With
    // smaller scale blocks it does no harm.)
    void note_amax(float amax) { all_finite = all_finite && std::isfinite(amax); }

    // --- Linear layers: the operands are quantized, the GEMM computes in FP32, its result is rounded ---
    //
    // x_operand, w_operand and g_operand are what the GEMMs read: FP32 values. If the format of an operand is
    // FP8, each of its values is a code times a scale.

    // x (N, in) -> y (N, out)
    Tensor linear_forward(const std::string& name, const Tensor& x) {
        const size_t weight_index = param_index_.at(name);
        const Tensor& w = param_values[weight_index];
        const int64_t in = params[weight_index].cols, out = params[weight_index].rows, N = rows_of(x, in);
        const Tensor x_operand = make_operand(OperandKind::X, weight_index, x, in, SumAlong::Row);
        const Tensor w_operand = make_operand(OperandKind::W, weight_index, w, in, SumAlong::Row);
        // fprop: y = x w^T
        Tensor y = multiply(N, out, in, matrix_view(x_operand, in), transposed_view(w_operand, in));
        add_bias_if_any(name, y);
        return rounded(y);
    }

    // x (N, in), g (N, out) -> dx (N, in), where g is the gradient of the layer's output. Adds to the
    // gradient of the weight, and to that of the bias if there is one.
    Tensor linear_backward(const std::string& name, const Tensor& x, const Tensor& g) {
        const size_t weight_index = param_index_.at(name);
        const Tensor& w = param_values[weight_index];
        const int64_t in = params[weight_index].cols, out = params[weight_index].rows, N = rows_of(x, in);
        const Tensor x_operand = make_operand(OperandKind::X, weight_index, x, in, SumAlong::Column);
        const Tensor w_operand = make_operand(OperandKind::W, weight_index, w, in, SumAlong::Column);
        const Tensor g_operand = make_operand(OperandKind::G, weight_index, g, out, SumAlong::Row);
        // dgrad: dx = g w
        const Tensor dx = multiply(N, in, out, matrix_view(g_operand, out), matrix_view(w_operand, in));
        // wgrad: dw = g^T x. In coat it reads the same g_operand as dgrad.
        const Tensor wgrad_g_operand = make_wgrad_g_operand(weight_index, g, g_operand);
        const Tensor dw =
            multiply(out, in, N, transposed_view(wgrad_g_operand, out), matrix_view(x_operand, in));
        add_gradient(name, dw);
        add_bias_gradient_if_any(name, g, g_operand);
        return rounded(dx);
    }

    // x, w or g of a linear layer, as a GEMM reads it: quantized and decoded again. tensor: (rows, cols).
    // weight_index: of the layer's weight in params. sum_along: whether the GEMM sums along rows or columns
    // of the tensor. (In coat, with one scale for the whole tensor, this makes no difference.)
    Tensor make_operand(OperandKind kind, size_t weight_index, const Tensor& tensor, int64_t cols,
                        SumAlong sum_along) {
        if constexpr (!ROUNDS) return tensor;
        else {
            const TensorFormat& format = format_of(formats_, kind);
            const float amax = amax_if_fp8(tensor, format);
            note_amax(amax);
            return gemm_operand(tensor, rows_of(tensor, cols), cols, format, sum_along,
                                stats_of(measured_tensor(kind)),
                                delayed_scale_if_any(kind, weight_index, amax));
        }
    }

    // --- Norms and the activation function ---

    // x (rows, C) -> the norm's output (rows, C), in FP32.
    Tensor apply_norm(const std::string& name, const Tensor& x) const {
        const int64_t C = config_.C;
        const Real* bias = config_.arch.rms ? nullptr : values_of(name + ".bias").data();
        Tensor y(x.size());
        norm_forward<Real>(config_.arch.rms, Real(config_.norm_eps), rows_of(x, C), C, x.data(),
                           values_of(name + ".weight").data(), bias, y.data());
        return y;
    }

    // x, dy (N, C) -> dx (N, C), in FP32. Adds to the gradients of the norm's weight and bias.
    Tensor apply_norm_backward(const std::string& name, const Tensor& x, const Tensor& dy) {
        const int64_t C = config_.C;
        Tensor dx(x.size()), dweight(C), dbias(C);
        norm_backward<Real>(config_.arch.rms, Real(config_.norm_eps), rows_of(x, C), C, x.data(),
                            values_of(name + ".weight").data(), dy.data(), dx.data(), dweight.data(),
                            dbias.data());
        add_gradient(name + ".weight", dweight);
        if (!config_.arch.rms) add_gradient(name + ".bias", dbias);
        return dx;
    }

    // gate_up (N, gate_up_cols) -> act (N, F), in FP32.
    Tensor apply_activation(const Tensor& gate_up) const {
        const int64_t N = rows_of(gate_up, config_.gate_up_cols());
        Tensor act(N * config_.F);
        activation_forward<Real>(config_.arch.gated, N, config_.F, gate_up.data(), act.data());
        return act;
    }

    // gate_up (N, gate_up_cols), dact (N, F) -> dgate_up (N, gate_up_cols), in FP32.
    Tensor apply_activation_backward(const Tensor& gate_up, const Tensor& dact) const {
        Tensor dgate_up(gate_up.size());
        activation_backward<Real>(config_.arch.gated, rows_of(dact, config_.F), config_.F, gate_up.data(),
                                  dact.data(), dgate_up.data());
        return dgate_up;
    }

    // --- RoPE, and Qwen3's norms of heads, between the q, k, v projection and attention ---
    //
    //   Llama, Mistral, Qwen2   projection -> RoPE -> saved -> attention
    //   Qwen3                   projection -> saved -> norms of heads -> RoPE -> attention
    //   GPT-2                   projection -> saved -> attention
    //
    // The backward pass of a norm needs the norm's input, so Qwen3 saves q, k and v before the norms. The
    // backward pass of RoPE needs no values, so the other models save q and k as attention reads them. (On
    // the GPU: core_attention_forward(), make_attention_input() and core_attention_backward() of model.cu.)

    // q, k and v (N, qkv_cols) as the projection gives them -> as they are saved, in the compute format.
    Tensor qkv_to_save(const MicroBatchShape& shape, Tensor qkv) const {
        const bool rotates = config_.arch.rope && !config_.arch.qk_norms;
        if (rotates) rope(config_, shape.B, shape.T, qkv.data(), /*inverse=*/false);
        return rounded(qkv);
    }
    // q, k and v (N, qkv_cols) as they were saved -> as attention reads them.
    Tensor qkv_for_attention(const MicroBatchShape& shape, const std::string& prefix, Tensor qkv) const {
        if (!config_.arch.qk_norms) return qkv;
        qk_norms_forward(config_, shape.N(), values_of(prefix + "qk_norm.weight").data(), qkv.data());
        qkv = rounded(qkv);
        rope(config_, shape.B, shape.T, qkv.data(), /*inverse=*/false);
        return rounded(qkv);
    }
    // The backward pass of RoPE and of qk_norms: dqkv (N, qkv_cols), the gradient of what attention
    // reads -> the gradient of what the projection gives. saved_qkv: q, k and v as they were saved. Adds to
    // the gradient of the weight of Qwen3's norms.
    Tensor qkv_backward(const MicroBatchShape& shape, const std::string& prefix, const Tensor& saved_qkv,
                        Tensor dqkv) {
        if (config_.arch.rope) {
            rope(config_, shape.B, shape.T, dqkv.data(), /*inverse=*/true);
            dqkv = rounded(dqkv);
        }
        if (config_.arch.qk_norms) {
            const std::string name = prefix + "qk_norm.weight";
            Tensor dweight(2 * config_.HS());
            qk_norms_backward(config_, shape.N(), saved_qkv.data(), values_of(name).data(), dqkv.data(),
                              dweight.data());
            add_gradient(name, dweight);
            dqkv = rounded(dqkv);
        }
        return dqkv;
    }

    // --- Embedding and head. As in the paper, they are not quantized ---

    // tokens (B, T) -> the residual stream before layer 0 (N, C):
    //   residual[n] = embedding[token n]                         with RoPE
    //   residual[n] = embedding[token n] + positions[n mod T]    with learned positions
    Tensor embedding_forward(const MicroBatchShape& shape, const int32_t* tokens) const {
        const int64_t C = config_.C;
        Tensor residual(shape.N() * C);
        for (int64_t n = 0; n < shape.N(); n++) {
            std::copy_n(&values_of("embedding")[tokens[n] * C], C, &residual[n * C]);
            if (!config_.arch.rope)
                add_scaled(C, Real(1), &values_of("positions")[n % shape.T * C], &residual[n * C]);
        }
        return residual;
    }

    // Adds to the gradients of the embedding and of the learned positions. dresidual: (N, C).
    //   dembedding[token] = sum of dresidual[n] over all n with this token
    //   dpositions[t]     = sum of dresidual[n] over all n with n mod T = t
    void embedding_backward(const MicroBatchShape& shape, const int32_t* tokens, const Tensor& dresidual) {
        const int64_t C = config_.C;
        const bool positions = !config_.arch.rope;
        Tensor dembedding(config_.padded_V() * C), dpositions(positions ? config_.max_T * C : 0);
        for (int64_t n = 0; n < shape.N(); n++) {
            add_scaled(C, Real(1), &dresidual[n * C], &dembedding[tokens[n] * C]);
            if (positions) add_scaled(C, Real(1), &dresidual[n * C], &dpositions[n % shape.T * C]);
        }
        add_gradient("embedding", dembedding);
        if (positions) add_gradient("positions", dpositions);
    }

    // y (rows, C) -> logits (rows, padded_V)
    Tensor head_forward(const Tensor& y) const {
        const int64_t C = config_.C, padded_V = config_.padded_V();
        const Tensor& w = values_of(head_name());  // (padded_V, C)
        return rounded(multiply(rows_of(y, C), padded_V, C, matrix_view(y, C), transposed_view(w, C)));
    }

    // y (N, C), dlogits (N, padded_V) -> dy (N, C). Adds to the gradient of the head.
    Tensor head_backward(const Tensor& y, const Tensor& dlogits) {
        const int64_t C = config_.C, padded_V = config_.padded_V(), N = rows_of(y, C);
        const Tensor& w = values_of(head_name());  // (padded_V, C)
        add_gradient(head_name(),
                     multiply(padded_V, C, N, transposed_view(dlogits, padded_V), matrix_view(y, C)));
        return rounded(multiply(N, C, padded_V, matrix_view(dlogits, padded_V), matrix_view(w, C)));
    }

    // =======================================================================================================
    // What can wait: only biases and other recipes than coat need it
    //
    // --- Biases of linear layers ---

    // The linear layers of Llama and Mistral have no biases.
    bool has_bias(const std::string& linear) const { return param_index_.count(linear + ".bias"); }

    // y (N, out): adds the bias to each row.
    void add_bias_if_any(const std::string& linear, Tensor& y) const {
        if (!has_bias(linear)) return;
        const Tensor& bias = values_of(linear + ".bias");
        const int64_t out = int64_t(bias.size());
        for (int64_t n = 0; n < rows_of(y, out); n++) add_scaled(out, Real(1), bias.data(), &y[n * out]);
    }

    // The gradient of a bias (out) is the sum of g (N, out) over the tokens. In FP8 recipes g itself is
    // summed, because the FP8 values of g_operand have larger errors. In other recipes g_operand is summed: g
    // rounded to the compute format, as a GPU has it in memory.
    void add_bias_gradient_if_any(const std::string& linear, const Tensor& g, const Tensor& g_operand) {
        if (!has_bias(linear)) return;
        const Tensor& to_sum = formats_.g.is_fp8() ? g : g_operand;
        const int64_t out = int64_t(values_of(linear + ".bias").size());
        Tensor dbias(out);
        for (int64_t n = 0; n < rows_of(g, out); n++)
            add_scaled(out, Real(1), &to_sum[n * out], dbias.data());
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
    // make_wgrad_g_operand() returns g (N, out) as wgrad reads it. g_operand: g as dgrad reads it. If g^T has
    // the same scale blocks as g, this is g_operand. Else g is quantized once more, in scale blocks along the
    // tokens.
    Tensor make_wgrad_g_operand(size_t weight_index, const Tensor& g, const Tensor& g_operand) {
        if (formats_.g.granularity.transpose_has_same_blocks()) return g_operand;
        return make_operand(OperandKind::G, weight_index, g, params[weight_index].rows, SumAlong::Column);
    }

    // --- Delayed scaling (the recipe te) ---

    // The scale of a GEMM operand, from earlier steps. Other recipes have none, so quantize() takes the scale
    // from the operand's amax. amax: of the operand.
    std::optional<float> delayed_scale_if_any(OperandKind kind, size_t weight_index, float amax) {
        const TensorFormat& format = format_of(formats_, kind);
        if (recipe_.scale_source != ScaleSource::Delayed || !format.is_fp8()) return {};
        return delayed_scales[weight_index][int(kind)].raise_amax_and_get_scale(format, amax);
    }
    void prepare_delayed_scales() {
        delayed_scales.resize(params.size());
        for (size_t i = 0; i < params.size(); i++) {
            if (!params[i].is_linear_weight() || recipe_.scale_source != ScaleSource::Delayed) continue;
            for (DelayedScale& d : delayed_scales[i]) d.history.resize(recipe_.history_steps);
        }
    }
};

// For tests: forward and backward of the whole model in double (reference/model.cpp). The mean loss of one
// micro-batch in the recipe fp32. If `gradients` is not null, it gets the gradients of this loss, by
// parameter.
double loss_in_double(const ModelConfig& config, int64_t B, int64_t T,
                      const std::vector<std::vector<double>>& param_values, const int32_t* tokens,
                      const int32_t* targets, std::vector<std::vector<double>>* gradients);

}  // namespace coat::reference
