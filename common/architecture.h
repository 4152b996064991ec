// common/architecture.h - what a model consists of: its shape, the tensors that a transformer layer saves for
// backward, and its parameters. (It uses the words of formats.h, and the tables of recipes.h.)
#pragma once
#include <algorithm>
#include <cmath>

#include "recipes.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// The shape of a model

struct Architecture {
    const char* name;                // Hugging Face's model_type
    const char* transformers_class;  // its class in transformers, Hugging Face's library
    bool rms = false;                // norms are RMSNorm; else LayerNorm with a bias
    bool rope = false;               // positions are rotations of q and k (RoPE); else learned vectors
    bool gated = false;              // the activation function is SiLU(gate) * up; else GELU in its tanh form
    bool qkv_bias = false;           // the linear layer of q, k and v has a bias
    bool other_biases = false;       // the other linear layers have a bias
    bool qk_norms = false;           // each head of q and of k passes an RMSNorm before RoPE
};
// clang-format off
inline constexpr Architecture LLAMA{
    .name = "llama", .transformers_class = "LlamaForCausalLM", .rms = true, .rope = true, .gated = true};
inline constexpr Architecture MISTRAL{
    .name = "mistral", .transformers_class = "MistralForCausalLM", .rms = true, .rope = true, .gated = true};
inline constexpr Architecture QWEN2{
    .name = "qwen2", .transformers_class = "Qwen2ForCausalLM", .rms = true, .rope = true, .gated = true,
    .qkv_bias = true};
inline constexpr Architecture QWEN3{
    .name = "qwen3", .transformers_class = "Qwen3ForCausalLM", .rms = true, .rope = true, .gated = true,
    .qk_norms = true};
inline constexpr Architecture GPT2{
    .name = "gpt2", .transformers_class = "GPT2LMHeadModel", .qkv_bias = true, .other_biases = true};
// clang-format on

// (This struct can wait: Llama 3.1 and 3.2 need it.) RoPE rotates pair i of a head at position t by the angle
// t f_i, with f_i = theta^(-2i / HS). A model may scale f_i, so that it can read longer texts than in its
// first training. The members have the names of config.json.
struct RopeScaling {
    // Llama3 looks at the turns of pair i within original_positions:
    //   fewer than low_freq_factor    f_i is divided by `factor`
    //   more than high_freq_factor    f_i stays as it is
    //   between                       f_i is interpolated between the two
    enum Type : uint8_t { Default, Llama3 } type = Default;
    float factor = 1, low_freq_factor = 1, high_freq_factor = 4;
    int64_t original_positions = 8192;
};

struct ModelConfig {
    std::string name;
    Architecture arch;
    // Sizes; formats.h says what the letters mean.
    int64_t L, C, NH, NKV, F;
    int64_t V;      // in known_models(), 0 means: the vocabulary size of the data
    int64_t max_T;  // the number of positions
    bool tied;      // the weight of the head is the embedding
    float norm_eps = 1e-5f, rope_theta = 10000.0f;
    int64_t head_size = 0;  // 0: C / NH
    // (The last two members can wait.) A token attends only to the last `sliding_window` positions; 0: to
    // all. Windows are not implemented, so --seq is at most the window. Then the window makes no difference.
    RopeScaling rope_scaling{};
    int64_t sliding_window = 0;

    int64_t HS() const { return head_size ? head_size : C / NH; }
    int64_t q_cols() const { return NH * HS(); }
    int64_t kv_cols() const { return NKV * HS(); }
    int64_t qkv_cols() const { return q_cols() + 2 * kv_cols(); }    // [q | k | v], each head by head
    int64_t gate_up_cols() const { return arch.gated ? 2 * F : F; }  // [gate | up], or the input of GELU
    int64_t padded_V() const { return round_up(V, 64); }  // rows of the embedding; rows from V on stay zero
    // The longest --seq.
    int64_t longest_sequence() const { return sliding_window ? std::min(sliding_window, max_T) : max_T; }
};

// -----------------------------------------------------------------------------------------------------------
// What a transformer layer saves for backward (paper, table 2). The passes of a layer are layer_forward() and
// layer_backward() of reference/network.h on the CPU, and model.cu on a GPU.

// The saved tensors, in the order of the rows of saved_per_layer(). Backward needs the outputs of norms and
// of the activation function, too. It computes them again from the saved inputs, which costs little. It also
// computes the probabilities of attention again, as exp(score - log-sum-exp): for this the log-sum-exp of the
// scores is saved.
enum class SavedKind : uint8_t { Norm1Input, Qkv, AttentionOutput, LogSumExp, Norm2Input, GateUp };
inline constexpr int SAVED_KIND_COUNT = int(SavedKind::GateUp) + 1;

// How a saved tensor (N, cols) is stored. The log-sum-exp is (B, NH, T): here it counts as (N, NH).
struct SavedFormat {
    SavedKind kind;
    const char* name;
    int64_t cols;
    TensorFormat format;

    int64_t bytes(int64_t N) const { return format.bytes(N, cols); }
};

inline std::vector<SavedFormat> saved_per_layer(const ModelConfig& config, const Recipe& r) {
    // clang-format off
    return {
        {.kind = SavedKind::Norm1Input, .name = "norm 1 input", .cols = config.C, .format = r.saved_inputs},
        {.kind = SavedKind::Qkv, .name = "q, k, v", .cols = config.qkv_cols(), .format = r.saved_attention},
        {.kind = SavedKind::AttentionOutput, .name = "attention output", .cols = config.q_cols(),
         .format = r.saved_attention},
        {.kind = SavedKind::LogSumExp, .name = "attention log-sum-exp", .cols = config.NH,
         .format = PLAIN_FP32},
        {.kind = SavedKind::Norm2Input, .name = "norm 2 input", .cols = config.C, .format = r.saved_inputs},
        {.kind = SavedKind::GateUp, .name = config.arch.gated ? "gate, up" : "GELU input",
         .cols = config.gate_up_cols(), .format = r.saved_inputs},
    };
    // clang-format on
}

// -----------------------------------------------------------------------------------------------------------
// Parameters: one table, in the order of the forward pass.

// What a parameter is.
//   NormWeight     the weight of a norm
//   LinearWeight   the weight of a linear layer inside a transformer layer. GEMMs with it read operands in
//                  the formats Recipe::x, w and g. (The head is outside the layers, and its GEMMs are in the
//                  compute format.)
//   Bias           the bias of a norm or of a linear layer
enum class Role : uint8_t { Embedding, Positions, NormWeight, LinearWeight, Bias, Head };

struct Param {
    std::string name;  // "layers.3.qkv", "layers.3.qkv.bias", "embedding", ...
    Role role;
    int64_t rows, cols;  // a vector of n elements is (1, n)
    // The standard deviation of the random initial values; 0: they are 0, or 1 if starts_at_one().
    float init_std;
    int64_t layer;  // the number of its layer, counted from 0; -1: it belongs to no layer
    // (flat_offset and bucket can wait.) The flat order has the elements of all parameters one after the
    // other, and each parameter is padded to a multiple of 128 elements. flat_offset is the place of the
    // first element in the flat order. A GPU's backward writes gradients in this order, and stochastic
    // rounding chooses the random bits of an element by its place.
    int64_t flat_offset;
    // A bucket is a set of parameters whose gradients backward completes at the same time. This is its
    // number, in the order of the forward pass.
    int64_t bucket;

    // Weights of norms and biases are vectors, and all other parameters are matrices.
    bool is_vector() const { return role == Role::NormWeight || role == Role::Bias; }
    bool is_linear_weight() const { return role == Role::LinearWeight; }
    bool starts_at_one() const { return role == Role::NormWeight; }  // its initial values are 1
    bool decays() const { return !is_vector(); }                     // weight decay applies to it
    int64_t size() const { return rows * cols; }
    int64_t padded_size() const { return round_up(size(), MOMENT_GROUP_SIZE); }
    // The format in which this parameter's first or second moments are stored. optimizer_format is
    // OptimizerFormats::m_format or v_format. (The embedding, positions and the head are never quantized, but
    // their moments are.)
    Format moment_format(Format optimizer_format) const {
        return is_vector() ? Format::FP32 : optimizer_format;
    }
};

// The table of parameters while it is built. Each function appends to it.
struct ParamTable {
    const ModelConfig& config;
    std::vector<Param> params{};
    int64_t bucket = 0, layer = -1;  // of the parameters that are appended next

    void add(const std::string& name, Role role, int64_t rows, int64_t cols, float init_std) {
        const int64_t offset = params.empty() ? 0 : params.back().flat_offset + params.back().padded_size();
        params.push_back({.name = name,
                          .role = role,
                          .rows = rows,
                          .cols = cols,
                          .init_std = init_std,
                          .layer = layer,
                          .flat_offset = offset,
                          .bucket = bucket});
    }
    void add_norm(const std::string& name) {
        add(name + ".weight", Role::NormWeight, 1, config.C, 0);
        if (!config.arch.rms) add(name + ".bias", Role::Bias, 1, config.C, 0);
    }
    void add_linear(const std::string& name, int64_t out, int64_t in, float init_std, bool bias) {
        add(name, Role::LinearWeight, out, in, init_std);
        if (bias) add(name + ".bias", Role::Bias, 1, out, 0);
    }
};

inline std::vector<Param> parameters(const ModelConfig& config) {
    ParamTable table{.config = config};
    // As in GPT-2, the two matrices of each layer whose outputs are added to the residual stream have smaller
    // initial weights.
    const float init_std = 0.02f, residual_std = init_std / std::sqrt(2.0f * config.L);
    table.add("embedding", Role::Embedding, config.padded_V(), config.C, init_std);
    if (!config.arch.rope) table.add("positions", Role::Positions, config.max_T, config.C, init_std);
    for (int64_t layer = 0; layer < config.L; layer++) {
        table.layer = layer;
        const std::string prefix = concat("layers.", layer, ".");
        // Each of the four buckets of a layer has a linear layer. The buckets of qkv and of gate_up have the
        // norm before it, too. The bucket of qkv also has Qwen3's norms of heads, qk_norms.
        table.bucket++;
        table.add_norm(prefix + "norm1");
        table.add_linear(prefix + "qkv", config.qkv_cols(), config.C, init_std, config.arch.qkv_bias);
        if (config.arch.qk_norms)  // [of q | of k]
            table.add(prefix + "qk_norm.weight", Role::NormWeight, 1, 2 * config.HS(), 0);
        table.bucket++;
        // The output projection, which reads attention's output. (Hugging Face's Llama calls it o_proj.)
        table.add_linear(prefix + "attention_out", config.C, config.q_cols(), residual_std,
                         config.arch.other_biases);
        table.bucket++;
        table.add_norm(prefix + "norm2");
        table.add_linear(prefix + "gate_up", config.gate_up_cols(), config.C, init_std,
                         config.arch.other_biases);
        table.bucket++;
        table.add_linear(prefix + "down", config.C, config.F, residual_std, config.arch.other_biases);
    }
    table.layer = -1;
    table.bucket++;
    table.add_norm("final_norm");
    if (!config.tied) table.add("head", Role::Head, config.padded_V(), config.C, init_std);
    return table.params;
}

// The number of elements of p that are not padding. The embedding and the head have padded_V rows. Their rows
// from V on are padding, and stay zero.
inline int64_t used_elements(const ModelConfig& config, const Param& p) {
    const bool has_padding = p.role == Role::Embedding || p.role == Role::Head;
    return has_padding ? config.V * p.cols : p.size();
}

// The number of elements of all parameters, without padding.
inline int64_t parameter_count(const ModelConfig& config) {
    int64_t n = 0;
    for (const Param& p : parameters(config)) n += used_elements(config, p);
    return n;
}

}  // namespace coat
