// architecture.h - the models: their shapes, the tensors that a transformer layer saves for backward, the
// parameters, random numbers, and the table of models. It uses the words of formats.h. The last two sections
// can wait: random numbers, and the models with their limits.
#pragma once
#include "formats.h"

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
    bool qk_norm = false;            // each head of q and of k passes an RMSNorm before RoPE
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
    .qk_norm = true};
inline constexpr Architecture GPT2{
    .name = "gpt2", .transformers_class = "GPT2LMHeadModel", .qkv_bias = true, .other_biases = true};
// clang-format on

// RoPE rotates pair i of a head at position t by the angle t f_i, with f_i = theta^(-2i / HS). A model may
// scale f_i, so that it can read longer texts than in its first training. The names are those of config.json.
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
    int64_t L, C, NH, NKV, F;
    int64_t V;      // in models(), 0 means: the vocabulary size of the data
    int64_t max_T;  // the number of positions
    bool tied;      // the weight of the head is the embedding
    float norm_eps = 1e-5f, rope_theta = 10000.0f;
    int64_t head_size = 0;  // 0: C / NH
    RopeScaling rope_scaling{};
    // A token attends only to the last `sliding_window` positions; 0: to all. Windows are not implemented. So
    // --seq is at most the window (longest_sequence()), and the window makes no difference.
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
// layer_backward() of reference_model.cpp, and model.cu on the GPU. ./train --plan prints the formats of
// their operators.

// The saved tensors, in the order of the rows of saved_per_layer(). Backward also needs the outputs of norms
// and of the activation function. It computes these outputs again from the saved inputs, which costs little.
enum class SavedKind : uint8_t { Norm1Input, Qkv, AttentionOutput, LogSumExp, Norm2Input, GateUp };

// A saved tensor (N, cols). The log-sum-exp has the shape (B, NH, T), which is N * NH elements: its `cols` is
// NH.
struct SavedTensor {
    SavedKind kind;
    const char* name;
    int64_t cols;
    Storage storage;

    int64_t bytes(int64_t N) const { return storage.bytes(N, cols); }
};

inline std::vector<SavedTensor> saved_per_layer(const ModelConfig& config, const Recipe& r) {
    // clang-format off
    return {
        {.kind = SavedKind::Norm1Input, .name = "norm 1 input", .cols = config.C, .storage = r.saved_inputs},
        {.kind = SavedKind::Qkv, .name = "q, k, v", .cols = config.qkv_cols(), .storage = r.saved_attention},
        {.kind = SavedKind::AttentionOutput, .name = "attention output", .cols = config.q_cols(),
         .storage = r.saved_attention},
        {.kind = SavedKind::LogSumExp, .name = "attention log-sum-exp", .cols = config.NH,
         .storage = PLAIN_FP32},
        {.kind = SavedKind::Norm2Input, .name = "norm 2 input", .cols = config.C, .storage = r.saved_inputs},
        {.kind = SavedKind::GateUp, .name = config.arch.gated ? "gate, up" : "GELU input",
         .cols = config.gate_up_cols(), .storage = r.saved_inputs},
    };
    // clang-format on
}

// -----------------------------------------------------------------------------------------------------------
// Parameters: one table, in the order of the forward pass.

struct Role {
    bool decays = false;  // weight decay applies
    // Its moments have the formats Optimizer::m and v. The moments of other roles are in FP32.
    bool moments_follow_optimizer = false;
    // It is the weight of a linear layer whose GEMMs read quantized operands (Recipe::x, w and g). The weight
    // of the head is not: the GEMMs of the head are in the compute dtype.
    bool quantized_linear = false;
    bool starts_at_one = false;  // its initial values are 1
};
// The embedding, learned positions and the head: no GEMM reads them quantized, but their moments are.
inline constexpr Role EMBEDDING_OR_HEAD{.decays = true, .moments_follow_optimizer = true};
inline constexpr Role QUANTIZED_LINEAR{
    .decays = true, .moments_follow_optimizer = true, .quantized_linear = true};
inline constexpr Role NORM_WEIGHT{.starts_at_one = true};
inline constexpr Role BIAS{};

struct Param {
    std::string name;  // "layers.3.qkv", "layers.3.qkv.bias", "embedding", ...
    Role role;
    int64_t rows, cols;  // a vector of n elements is (1, n)
    // Unless role.starts_at_one: the standard deviation of the random initial values. If it is 0, they are 0.
    float init_std;
    // (flat_offset and bucket can wait.) The flat order has the elements of all parameters one after the
    // other, with each parameter padded to a multiple of 128 elements. This is the place of the first element
    // in the flat order. A GPU stores gradients in the flat order, and stochastic rounding takes the random
    // bits of an element by its place.
    int64_t flat_offset;
    // A bucket is the parameters whose gradients backward completes at the same time. This is the number of
    // the parameter's bucket, in the order of the forward pass.
    int64_t bucket;
    int64_t layer;  // the number of its layer, counted from 0; -1: it belongs to no layer

    bool is_vector() const { return rows == 1; }
    int64_t size() const { return rows * cols; }
    int64_t padded_size() const { return round_up(size(), MOMENT_GROUP_SIZE); }
    // The format in which this parameter's first or second moments are stored. of_optimizer: the optimizer's
    // format for these moments, Optimizer::m or Optimizer::v.
    Format moment_format(Format of_optimizer) const {
        return role.moments_follow_optimizer ? of_optimizer : Format::FP32;
    }
};

// The table of parameters while it is built. Each function appends to it.
struct ParamTable {
    const ModelConfig& config;
    std::vector<Param> params{};
    int64_t bucket = 0, layer = -1;  // of the parameters that are appended next

    void add(const std::string& name, const Role& role, int64_t rows, int64_t cols, float init_std) {
        const int64_t offset = params.empty() ? 0 : params.back().flat_offset + params.back().padded_size();
        params.push_back({.name = name,
                          .role = role,
                          .rows = rows,
                          .cols = cols,
                          .init_std = init_std,
                          .flat_offset = offset,
                          .bucket = bucket,
                          .layer = layer});
    }
    void add_norm(const std::string& name) {
        add(name + ".weight", NORM_WEIGHT, 1, config.C, 0);
        if (!config.arch.rms) add(name + ".bias", BIAS, 1, config.C, 0);
    }
    void add_linear(const std::string& name, int64_t out, int64_t in, float init_std, bool bias) {
        add(name, QUANTIZED_LINEAR, out, in, init_std);
        if (bias) add(name + ".bias", BIAS, 1, out, 0);
    }
};

inline std::vector<Param> parameters(const ModelConfig& config) {
    ParamTable table{.config = config};
    // As in GPT-2, two matrices of each layer have smaller initial weights: those whose outputs are added to
    // the residual stream.
    const float init_std = 0.02f, residual_std = init_std / std::sqrt(2.0f * config.L);
    table.add("embedding", EMBEDDING_OR_HEAD, config.padded_V(), config.C, init_std);
    if (!config.arch.rope) table.add("positions", EMBEDDING_OR_HEAD, config.max_T, config.C, init_std);
    for (int64_t layer = 0; layer < config.L; layer++) {
        table.layer = layer;
        const std::string prefix = concat("layers.", layer, ".");
        // Each of the four buckets of a layer has a linear layer. The buckets of qkv and of gate_up also have
        // the norm before it, and that of qkv has Qwen3's norms of heads, qk_norm, too.
        table.bucket++;
        table.add_norm(prefix + "norm1");
        table.add_linear(prefix + "qkv", config.qkv_cols(), config.C, init_std, config.arch.qkv_bias);
        if (config.arch.qk_norm)  // [of q | of k]
            table.add(prefix + "qk_norm.weight", NORM_WEIGHT, 1, 2 * config.HS(), 0);
        table.bucket++;
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
    if (!config.tied) table.add("head", EMBEDDING_OR_HEAD, config.padded_V(), config.C, init_std);
    return table.params;
}

// The number of elements of p that are not padding. The embedding and the head have padded_V rows. Their rows
// from V on are padding, and stay zero.
inline int64_t used_elements(const ModelConfig& config, const Param& p) {
    return p.name == "embedding" || p.name == "head" ? config.V * p.cols : p.size();
}

inline int64_t parameter_count(const ModelConfig& config) {  // elements, without padding rows
    int64_t n = 0;
    for (const Param& p : parameters(config)) n += used_elements(config, p);
    return n;
}

// -----------------------------------------------------------------------------------------------------------
// Random numbers: initial values, and the rounding of weights without an FP32 master (this section can wait)

// A random value with the standard deviation init_std, for element i of parameter number `param`. The sum of
// four uniform integers of 16 bits is nearly a normal variate.
COAT_HD inline float random_weight(uint64_t seed, uint64_t param, uint64_t i, float init_std) {
    uint64_t z = seed * 0x9E3779B97F4A7C15ull + (param << 40) + i;  // after splitmix64, mixed once more
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z = (z ^ (z >> 31)) * 0xBF58476D1CE4E5B9ull;
    z ^= z >> 32;
    const uint64_t sum = (z & 0xFFFF) + ((z >> 16) & 0xFFFF) + ((z >> 32) & 0xFFFF) + (z >> 48);
    // A sum of four uniform values from 0 to 1 has the variance 4/12, so the standard deviation 1 / sqrt(3).
    return float(int64_t(sum) - 2 * 65535) * (init_std * (1.7320508f / 65536.0f));
}

// The initial value of element i of parameter number `param`:
//   1        in the weights of norms
//   0        in biases, whose init_std is 0, and in padding, which begins at element `used`
//   random   in all other elements
COAT_HD inline float initial_value(float init_std, bool starts_at_one, int64_t used, uint64_t seed,
                                   uint64_t param, int64_t i) {
    if (starts_at_one) return 1.0f;
    if (init_std == 0 || i >= used) return 0.0f;
    return random_weight(seed, param, static_cast<uint64_t>(i), init_std);
}

// 64 bits that look random, from a number. Nearby numbers give unrelated bits.
COAT_HD inline uint64_t mixed_bits(uint64_t number) {
    uint64_t z = number * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 32)) * 0x94D049BB133111EBull;
    return z ^ (z >> 29);
}

// Stochastic rounding to BF16: bf16 = (bits of the FP32 value + 16 random bits) >> 16. The expected value of
// bf16 is the FP32 value. So an update of less than half the spacing of BF16 values is not lost: it counts on
// average.
//
// rounding_bits() returns the random bits of elements 4 * quad to 4 * quad + 3 of the flat order
// (Param::flat_offset). The lowest 16 bits are for element 4 * quad. key: rounding_key() of the step.
COAT_HD inline uint64_t rounding_bits(uint64_t key, uint64_t quad) { return mixed_bits(key + quad); }
// step_number: the number of the step, counting skipped ones.
//
// The lower 32 bits of the key are 0. In a model of at most 2^34 elements `quad` is below 2^32, so key + quad
// has the upper 32 bits of the key. Two steps hardly ever have the same upper 32 bits (on average 5 pairs in
// 200,000 steps).
inline uint64_t rounding_key(uint64_t seed, int64_t step_number) {
    return mixed_bits(seed * 0x9E3779B97F4A7C15ull + static_cast<uint64_t>(step_number)) << 32;
}

// -----------------------------------------------------------------------------------------------------------
// The models by name, and the limits of models (this section can wait)

inline const std::vector<ModelConfig>& models() {
    constexpr RopeScaling LLAMA3_BY_8{.type = RopeScaling::Llama3, .factor = 8};
    constexpr RopeScaling LLAMA3_BY_32{.type = RopeScaling::Llama3, .factor = 32};
    // clang-format off
    static const std::vector<ModelConfig> table = {
        {.name = "llama-tiny", .arch = LLAMA, .L = 4, .C = 128, .NH = 4, .NKV = 2, .F = 352,
         .V = 0, .max_T = 256, .tied = true},
        {.name = "gpt2-tiny", .arch = GPT2, .L = 4, .C = 128, .NH = 4, .NKV = 4, .F = 512,
         .V = 0, .max_T = 256, .tied = true},
        {.name = "llama-30m", .arch = LLAMA, .L = 8, .C = 512, .NH = 8, .NKV = 4, .F = 1408,
         .V = 0, .max_T = 1024, .tied = true},
        {.name = "gpt2", .arch = GPT2, .L = 12, .C = 768, .NH = 12, .NKV = 12, .F = 3072,
         .V = 50257, .max_T = 1024, .tied = true},
        {.name = "gpt2-medium", .arch = GPT2, .L = 24, .C = 1024, .NH = 16, .NKV = 16, .F = 4096,
         .V = 50257, .max_T = 1024, .tied = true},
        {.name = "gpt2-large", .arch = GPT2, .L = 36, .C = 1280, .NH = 20, .NKV = 20, .F = 5120,
         .V = 50257, .max_T = 1024, .tied = true},
        {.name = "gpt2-xl", .arch = GPT2, .L = 48, .C = 1600, .NH = 25, .NKV = 25, .F = 6400,
         .V = 50257, .max_T = 1024, .tied = true},
        {.name = "tinyllama-1.1b", .arch = LLAMA, .L = 22, .C = 2048, .NH = 32, .NKV = 4, .F = 5632,
         .V = 32000, .max_T = 2048, .tied = false},
        {.name = "llama-2-7b", .arch = LLAMA, .L = 32, .C = 4096, .NH = 32, .NKV = 32, .F = 11008,
         .V = 32000, .max_T = 4096, .tied = false},
        {.name = "llama-2-13b", .arch = LLAMA, .L = 40, .C = 5120, .NH = 40, .NKV = 40, .F = 13824,
         .V = 32000, .max_T = 4096, .tied = false},
        {.name = "llama-3-8b", .arch = LLAMA, .L = 32, .C = 4096, .NH = 32, .NKV = 8, .F = 14336,
         .V = 128256, .max_T = 8192, .tied = false, .rope_theta = 5e5f},
        {.name = "llama-30b", .arch = LLAMA, .L = 60, .C = 6656, .NH = 52, .NKV = 52, .F = 17920,
         .V = 32000, .max_T = 2048, .tied = false},
        {.name = "llama-3.2-1b", .arch = LLAMA, .L = 16, .C = 2048, .NH = 32, .NKV = 8, .F = 8192,
         .V = 128256, .max_T = 131072, .tied = true, .rope_theta = 5e5f, .rope_scaling = LLAMA3_BY_32},
        {.name = "llama-3.2-3b", .arch = LLAMA, .L = 28, .C = 3072, .NH = 24, .NKV = 8, .F = 8192,
         .V = 128256, .max_T = 131072, .tied = true, .rope_theta = 5e5f, .rope_scaling = LLAMA3_BY_32},
        {.name = "llama-3.1-8b", .arch = LLAMA, .L = 32, .C = 4096, .NH = 32, .NKV = 8, .F = 14336,
         .V = 128256, .max_T = 131072, .tied = false, .rope_theta = 5e5f, .rope_scaling = LLAMA3_BY_8},
        {.name = "mistral-7b", .arch = MISTRAL, .L = 32, .C = 4096, .NH = 32, .NKV = 8, .F = 14336,
         .V = 32768, .max_T = 32768, .tied = false, .rope_theta = 1e6f},  // v0.3
        {.name = "qwen2.5-0.5b", .arch = QWEN2, .L = 24, .C = 896, .NH = 14, .NKV = 2, .F = 4864,
         .V = 151936, .max_T = 32768, .tied = true, .norm_eps = 1e-6f, .rope_theta = 1e6f},
        {.name = "qwen2.5-7b", .arch = QWEN2, .L = 28, .C = 3584, .NH = 28, .NKV = 4, .F = 18944,
         .V = 152064, .max_T = 131072, .tied = false, .norm_eps = 1e-6f, .rope_theta = 1e6f},
        {.name = "qwen3-0.6b", .arch = QWEN3, .L = 28, .C = 1024, .NH = 16, .NKV = 8, .F = 3072,
         .V = 151936, .max_T = 40960, .tied = true, .norm_eps = 1e-6f, .rope_theta = 1e6f, .head_size = 128},
        {.name = "qwen3-1.7b", .arch = QWEN3, .L = 28, .C = 2048, .NH = 16, .NKV = 8, .F = 6144,
         .V = 151936, .max_T = 40960, .tied = true, .norm_eps = 1e-6f, .rope_theta = 1e6f, .head_size = 128},
        {.name = "qwen3-8b", .arch = QWEN3, .L = 36, .C = 4096, .NH = 32, .NKV = 8, .F = 12288,
         .V = 151936, .max_T = 40960, .tied = false, .norm_eps = 1e-6f, .rope_theta = 1e6f, .head_size = 128},
    };
    // clang-format on
    return table;
}

// Error if the shape is not supported. Nothing is allocated before this check.
inline void require_supported(const ModelConfig& config) {
    auto unsupported_unless = [&](bool ok, const auto&... what) {
        if (!ok) throw Error("Model ", config.name, " is not supported: ", what..., ".");
    };
    // With these limits a model has fewer than 2^49 parameters, and no number of bytes overflows. A row of
    // FP32 logits fits the workspace of a GPU's GEMMs, and a row of the hidden size fits the kernels of
    // gpu/norm.cu.
    const struct {
        const char* name;
        int64_t value, limit;
    } sizes[] = {{.name = "number of layers", .value = config.L, .limit = 1 << 12},
                 {.name = "hidden size", .value = config.C, .limit = 1 << 14},
                 {.name = "number of heads", .value = config.NH, .limit = 1 << 15},
                 {.name = "number of key/value heads", .value = config.NKV, .limit = 1 << 15},
                 {.name = "feed-forward size", .value = config.F, .limit = 1 << 20},
                 {.name = "vocabulary", .value = config.V, .limit = 1 << 22},
                 {.name = "number of positions", .value = config.max_T, .limit = 1 << 21}};
    for (const auto& [name, value, limit] : sizes)
        unsupported_unless(value > 0 && value <= limit, "its ", name, " is ", value, ", not from 1 to ",
                           limit);
    // Dimensions of FP8 GEMMs are multiples of 16, and no group may have elements of both q and k.
    constexpr int64_t multiple = std::max(16, PER_1x16.cols);
    unsupported_unless(config.C % multiple == 0 && config.F % multiple == 0, "hidden size ", config.C,
                       " and feed-forward size ", config.F, " must be multiples of ", multiple,
                       ", as FP8 GEMMs and groups need");
    unsupported_unless(config.head_size || config.C % config.NH == 0,
                       "hidden size must be a multiple of the number of heads");
    unsupported_unless(config.HS() % 8 == 0 && config.HS() <= 128, "head size ", config.HS(),
                       " must be a multiple of 8 up to 128");
    unsupported_unless(config.q_cols() <= 1 << 20, "heads x head size is ", config.q_cols(),
                       ", above the limit of ", 1 << 20);
    unsupported_unless(config.q_cols() % multiple == 0 && config.kv_cols() % multiple == 0,
                       "heads x head size must be a multiple of ", multiple,
                       ", as FP8 GEMMs and groups need");
    unsupported_unless(config.NH % config.NKV == 0, "query heads must be a multiple of key/value heads");
}

}  // namespace coat
