// model.h - what a training run is made of, on the CPU and on a GPU: model shapes, parameters, ranks,
// optimizer state, saved activations, and the Model that train.cpp drives.
//
// reference.cpp implements Model on the CPU and model.cu on the GPU, independently, so that a test that
// compares the two can fail. Arithmetic is here only where both must have the same bits: first weights, and
// the random bits of stochastic rounding.
//
// Letters: B sequences of T tokens, N = B*T; L layers, C hidden size, NH query heads, NKV key/value heads, HS
// head size, F feed-forward size, V vocabulary.
#pragma once
#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>

#include "coat.h"

#ifdef __CUDACC__
#define COAT_HD __host__ __device__
#else
#define COAT_HD
#endif

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// Models

struct Architecture {
    const char* name;  // Hugging Face's model_type
    bool rms;          // RMSNorm; else LayerNorm with a bias
    bool rope;         // rotary positions; else learned ones
    bool gated;        // SiLU(gate) * up; else GELU (tanh form)
    bool qkv_bias;     // the linear layer of q, k and v has a bias
    bool bias;         // the other linear layers have one
};
inline constexpr Architecture LLAMA{"llama", true, true, true, false, false};
inline constexpr Architecture MISTRAL{"mistral", true, true, true, false, false};
inline constexpr Architecture QWEN2{"qwen2", true, true, true, true, false};  // and Qwen2.5
inline constexpr Architecture GPT2{"gpt2", false, false, false, true, true};

// RoPE rotates pair i of a head at position t by the angle t f_i, f_i = theta^(-2i / HS). A model may scale
// f_i, to read longer texts than it was first trained on. The names are those of config.json.
struct RopeScaling {
    // Linear: all f_i are divided by the factor. Llama3 (Llama 3.1 and later): f_i with fewer than
    // low_freq_factor rotations in the original positions are divided, those with more than high_freq_factor
    // are kept, and the values between are interpolated.
    enum Type : uint8_t { Default, Linear, Llama3 } type = Default;
    float factor = 1, low_freq_factor = 1, high_freq_factor = 4;
    int64_t original_positions = 8192;
};
inline constexpr const char* ROPE_TYPES[] = {"default", "linear", "llama3"};  // by RopeScaling::Type

struct ModelConfig {
    std::string name;
    Architecture arch;
    int64_t L, C, NH, NKV, F, V;  // V = 0: as many as the data has
    int64_t max_T;                // positions
    bool tied;                    // the head is the embedding
    float norm_eps = 1e-5f, rope_theta = 10000.0f;
    int64_t head_size = 0;        // 0: C / NH
    RopeScaling rope_scaling{};
    int64_t window = 0;           // a token attends to the last `window` positions; 0: to all before it

    int64_t HS() const { return head_size ? head_size : C / NH; }
    int64_t q_cols() const { return NH * HS(); }
    int64_t kv_cols() const { return NKV * HS(); }
    int64_t qkv_cols() const { return q_cols() + 2 * kv_cols(); }    // [q | k | v], each head by head
    int64_t gate_up_cols() const { return arch.gated ? 2 * F : F; }  // [gate | up], or the input of GELU
    int64_t padded_V() const { return round_up(V, 64); }  // rows of the embedding; those from V on stay zero
    // The longest sequence: attention within a window is not implemented.
    int64_t longest() const { return window ? std::min(window, max_T) : max_T; }
};

inline const std::vector<ModelConfig>& models() {
    constexpr RopeScaling BY_8{RopeScaling::Llama3, 8}, BY_32{RopeScaling::Llama3, 32};
    static const std::vector<ModelConfig> table = {
        //                          L   C     NH  NKV F      V       max_T tied
        {"llama-tiny",     LLAMA,   4,  128,  4,  2,  352,   0,      256,  true},
        {"gpt2-tiny",      GPT2,    4,  128,  4,  4,  512,   0,      256,  true},
        {"llama-30m",      LLAMA,   8,  512,  8,  4,  1408,  0,      1024, true},
        {"gpt2",           GPT2,    12, 768,  12, 12, 3072,  50257,  1024, true},
        {"gpt2-medium",    GPT2,    24, 1024, 16, 16, 4096,  50257,  1024, true},
        {"gpt2-large",     GPT2,    36, 1280, 20, 20, 5120,  50257,  1024, true},
        {"gpt2-xl",        GPT2,    48, 1600, 25, 25, 6400,  50257,  1024, true},
        {"tinyllama-1.1b", LLAMA,   22, 2048, 32, 4,  5632,  32000,  2048, false},
        {"llama-2-7b",     LLAMA,   32, 4096, 32, 32, 11008, 32000,  4096, false},
        {"llama-2-13b",    LLAMA,   40, 5120, 40, 40, 13824, 32000,  4096, false},
        {"llama-3-8b",     LLAMA,   32, 4096, 32, 8,  14336, 128256, 8192, false, 1e-5f, 500000.0f},
        {"llama-30b",      LLAMA,   60, 6656, 52, 52, 17920, 32000,  2048, false},
        {"llama-3.2-1b",   LLAMA,   16, 2048, 32, 8,  8192,  128256, 131072, true, 1e-5f, 5e5f, 0, BY_32},
        {"llama-3.2-3b",   LLAMA,   28, 3072, 24, 8,  8192,  128256, 131072, true, 1e-5f, 5e5f, 0, BY_32},
        {"llama-3.1-8b",   LLAMA,   32, 4096, 32, 8,  14336, 128256, 131072, false, 1e-5f, 5e5f, 0, BY_8},
        {"mistral-7b",     MISTRAL, 32, 4096, 32, 8,  14336, 32768,  32768, false, 1e-5f, 1e6f},  // v0.3
        {"qwen2.5-0.5b",   QWEN2,   24, 896,  14, 2,  4864,  151936, 32768, true, 1e-6f, 1e6f},
        {"qwen2.5-7b",     QWEN2,   28, 3584, 28, 4,  18944, 152064, 131072, false, 1e-6f, 1e6f},
    };
    return table;
}

inline constexpr int64_t MAX_VOCABULARY = 1 << 22;  // a row of FP32 logits fits a GPU's GEMM workspace

// Throws Error if the shape is not supported, before anything is allocated.
inline void validate(const ModelConfig& c) {
    auto require = [&](bool ok, const auto&... what) {
        if (!ok) throw Error("Model ", c.name, " is not supported: ", what..., ".");
    };
    // With these limits a model has fewer than 2^49 parameters, so that no number of bytes overflows.
    const struct { const char* name; int64_t value, limit; } sizes[] = {
        {"number of layers", c.L, 1 << 12}, {"hidden size", c.C, 1 << 14}, {"number of heads", c.NH, 1 << 15},
        {"number of key/value heads", c.NKV, 1 << 15}, {"feed-forward size", c.F, 1 << 20},
        {"vocabulary", c.V, MAX_VOCABULARY}, {"number of positions", c.max_T, 1 << 21}};
    for (const auto& [name, value, limit] : sizes)
        require(value > 0 && value <= limit, "its ", name, " is ", value, ", not from 1 to ", limit);
    constexpr int64_t side = std::max(16, PER_GROUP.cols);  // FP8 GEMMs need 16; no group may span q and k
    require(c.C % side == 0 && c.F % side == 0, "hidden size ", c.C, " and feed-forward size ", c.F,
            " must be multiples of ", side, ", as FP8 GEMMs and groups need");
    require(c.head_size || c.C % c.NH == 0, "hidden size must be a multiple of the number of heads");
    require(c.HS() % 8 == 0 && c.HS() <= 256, "head size ", c.HS(), " must be a multiple of 8 up to 256");
    require(c.q_cols() <= 1 << 20, "heads x head size is ", c.q_cols(), ", above the limit of ", 1 << 20);
    require(c.q_cols() % side == 0 && c.kv_cols() % side == 0,
            "heads x head size must be a multiple of ", side, ", as FP8 GEMMs and groups need");
    require(c.NH % c.NKV == 0, "query heads must be a multiple of key/value heads");
}

// -----------------------------------------------------------------------------------------------------------
// Parameters: one table in the order of the forward pass. What follows from a parameter's role is a column.

struct Role {
    bool decay;      // weight decay applies
    bool fp8_state;  // moments in the optimizer's formats; else in FP32
    bool linear;     // weight of a linear layer, quantized as the recipe says
    bool weight;     // weight of a norm: starts at 1; others start random, or at 0 if init_std is 0
};
inline constexpr Role EMBEDDING{true, true, false, false};  // also positions and the head
inline constexpr Role LINEAR{true, true, true, false};
inline constexpr Role NORM_WEIGHT{false, false, false, true};
inline constexpr Role BIAS{false, false, false, false};

struct Param {
    std::string name;    // "layers.3.qkv", "layers.3.qkv.bias", "embedding", ...
    Role role;
    int64_t rows, cols;  // (out, in); a vector is (1, n)
    float init_std;
    int64_t offset;      // in the flat order of all parameters; a multiple of MOMENT_GROUP
    int64_t bucket;      // in the order of forward; its gradients are complete at the same time

    int64_t size() const { return rows * cols; }
    int64_t padded_size() const { return round_up(size(), MOMENT_GROUP); }
    int64_t groups() const { return ceil_div(size(), MOMENT_GROUP); }
    Format moment(Format wanted) const { return role.fp8_state ? wanted : Format::F32; }
};

inline std::vector<Param> parameters(const ModelConfig& c) {
    std::vector<Param> table;
    int64_t offset = 0, bucket = 0;
    auto add = [&](const std::string& name, const Role& role, int64_t rows, int64_t cols, float std) {
        table.push_back({name, role, rows, cols, std, offset, bucket});
        offset += table.back().padded_size();
    };
    auto norm = [&](const std::string& name) {
        add(name + ".weight", NORM_WEIGHT, 1, c.C, 0);
        if (!c.arch.rms) add(name + ".bias", BIAS, 1, c.C, 0);
    };
    auto linear = [&](const std::string& name, int64_t out, int64_t in, float std, bool bias) {
        add(name, LINEAR, out, in, std);
        if (bias) add(name + ".bias", BIAS, 1, out, 0);
    };
    const float std = 0.02f, residual_std = std / std::sqrt(2.0f * c.L);  // GPT-2's initialisation
    add("embedding", EMBEDDING, c.padded_V(), c.C, std);
    if (!c.arch.rope) add("positions", EMBEDDING, c.max_T, c.C, std);
    for (int64_t l = 0; l < c.L; l++) {
        const std::string layer = "layers." + std::to_string(l) + ".";
        bucket++;
        norm(layer + "norm1");
        linear(layer + "qkv", c.qkv_cols(), c.C, std, c.arch.qkv_bias);  // rows [q | k | v]
        bucket++;
        linear(layer + "attention_out", c.C, c.q_cols(), residual_std, c.arch.bias);
        bucket++;
        norm(layer + "norm2");
        // Rows [gate | up], or the input of GELU.
        linear(layer + "gate_up", c.gate_up_cols(), c.C, std, c.arch.bias);
        bucket++;
        linear(layer + "down", c.C, c.F, residual_std, c.arch.bias);
    }
    bucket++;
    norm("final_norm");
    if (!c.tied) add("head", EMBEDDING, c.padded_V(), c.C, std);
    return table;
}

// Elements of p before the padding of the vocabulary, which stays zero.
inline int64_t used_elements(const ModelConfig& c, const Param& p) {
    return p.name == "embedding" || p.name == "head" ? c.V * p.cols : p.size();
}

inline int64_t parameter_count(const ModelConfig& c) {  // without the padding rows of the vocabulary
    int64_t n = 0;
    for (const Param& p : parameters(c)) n += used_elements(c, p);
    return n;
}

// A random first value with standard deviation std, with the same bits on the CPU and the GPU: the sum of
// four uniform integers approximates a normal variate without a logarithm.
COAT_HD inline float init_value(uint64_t seed, uint64_t param, uint64_t i, float std) {
    uint64_t z = seed * 0x9E3779B97F4A7C15ull + (param << 40) + i;  // after splitmix64, mixed once more
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    z = (z ^ (z >> 31)) * 0xBF58476D1CE4E5B9ull;
    z ^= z >> 32;
    const uint64_t sum = (z & 0xFFFF) + (z >> 16 & 0xFFFF) + (z >> 32 & 0xFFFF) + (z >> 48);
    return float(int64_t(sum) - 2 * 65535) * (std * (1.7320508f / 65536.0f));  // variance 1/3
}

// Stochastic rounding of a weight to BF16 (without a master): bf16 = (FP32 bits + 16 random bits) >> 16, so
// that the expected value is the FP32 value, and updates below half a step count on average.
// rounding_bits(key, q) are those of elements 4q .. 4q+3 of the flat order, from the lowest 16 bits on.
COAT_HD inline uint64_t rounding_bits(uint64_t key, uint64_t q) {
    uint64_t z = (key + q) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 32)) * 0x94D049BB133111EBull;
    return z ^ (z >> 29);
}
inline uint64_t rounding_key(uint64_t seed, int64_t step) {  // AdamW::step
    return rounding_bits(seed * 0x9E3779B97F4A7C15ull, static_cast<uint64_t>(step)) << 32;
}

// The first value of element i of parameter number `index`. Padding of the vocabulary is 0.
COAT_HD inline float initial(float std, bool weight, int64_t used, uint64_t seed, uint64_t index, int64_t i) {
    if (weight) return 1.0f;
    return std == 0 || i >= used ? 0.0f : init_value(seed, index, static_cast<uint64_t>(i), std);
}

// -----------------------------------------------------------------------------------------------------------
// One training run. It has one or more ranks: processes with a GPU each, or with a part of the CPU.

class ProcessGroup;  // ranks.h: the processes of a run, and how they exchange bytes

struct Setup {
    ModelConfig config;
    Recipe recipe;
    OptimizerFormat optimizer;
    int64_t B, T;            // one micro-batch
    int64_t accumulate = 1;  // micro-batches a step, on each rank
    uint64_t seed = 1;
    bool master = true;          // FP32 master weights; else BF16 weights only, rounded stochastically
    bool keep_gradients = true;  // update after backward; else update and free each bucket during backward
    int64_t rank = 0, ranks = 1;
    ProcessGroup* processes = nullptr;  // of `ranks` processes; null if there is one, or for a plan
};

inline int64_t micro_batches(const Setup& s) { return s.accumulate * s.ranks; }  // of a step, on all ranks

// The elements of a parameter that a rank owns: all ranks send it their gradients of these, it adds them, and
// it alone has their master weights and moments and updates them. They are whole shard units, so that no
// group of moments is cut and so that sums over shard units are the same for any number of ranks. A parameter
// that is smaller than a shard unit belongs to the last rank.
inline constexpr int64_t SHARD_UNIT = 64 * MOMENT_GROUP;
struct Slice {
    int64_t first, count;  // consecutive elements
};
inline Slice slice_of(int64_t size, int64_t rank, int64_t ranks) {
    const int64_t units = ceil_div(size, SHARD_UNIT);
    const int64_t begin = std::min(size, units * rank / ranks * SHARD_UNIT),
                  end = std::min(size, units * (rank + 1) / ranks * SHARD_UNIT);
    return {begin, end - begin};
}
inline int64_t padded(const Slice& s) { return round_up(s.count, MOMENT_GROUP); }
inline Slice owned(const Setup& s, const Param& p) { return slice_of(p.size(), s.rank, s.ranks); }
// The weights that a rank keeps in memory: of matrices those that it owns, and they are gathered just before
// they are used (as ZeRO-3). Vectors are kept whole by every rank: they are small, and most kernels need one.
inline Slice kept_weight(const Setup& s, const Param& p) {
    return p.rows > 1 ? owned(s, p) : Slice{0, p.size()};
}

// The format in which gradients are accumulated. Adding to a BF16 sum rounds it, so BF16 is used for up to
// four additions: one for each micro-batch, or two if the head is also the embedding. More are summed in
// FP32. The micro-batches of all ranks count, so that the number of ranks does not change the format. What
// the ranks computed of one micro-batch each is added in FP32 and then rounded once.
inline Format gradient_format(const Setup& s) {
    return micro_batches(s) * (s.config.tied ? 2 : 1) > 4 ? Format::F32 : s.recipe.compute;
}

// -----------------------------------------------------------------------------------------------------------
// State: all tensors that a run needs to resume, by name. The CPU and the GPU read and write the same
// tensors, so that a run may stop on one and resume on the other.

struct StateTensor {
    std::string name;  // "layers.0.qkv" (weight), or with a suffix: .remainder .m .v .m.max .m.k .x.scale ...
    const char* dtype;  // safetensors' name
    int bytes;          // of one element
    std::vector<int64_t> shape;
    size_t param;     // index into parameters()
    int64_t per = 1;  // how many elements of the parameter share one here (128 share a .max); 0: all

    int64_t size() const {
        return std::accumulate(shape.begin(), shape.end(), int64_t(1), std::multiplies<>());
    }
    int64_t total_bytes() const { return size() * bytes; }
};

// "layers.0.qkv.m.max" -> index of "layers.0.qkv", the longest parameter name that begins the tensor's name.
inline size_t param_of(const std::vector<Param>& params, const std::string& tensor) {
    size_t best = params.size();  // a bias follows its weight, so the last match is the longest
    for (size_t i = 0; i < params.size(); i++)
        if ((tensor + ".").compare(0, params[i].name.size() + 1, params[i].name + ".") == 0) best = i;
    if (best == params.size()) throw Error("The model has no tensor " + tensor + ".");
    return best;
}

inline std::vector<StateTensor> weight_tensors(const ModelConfig& c) {
    std::vector<StateTensor> table;
    const std::vector<Param> params = parameters(c);
    for (size_t i = 0; i < params.size(); i++)
        table.push_back({params[i].name, "BF16", 2, {params[i].rows, params[i].cols}, i});
    return table;
}

// Delayed scaling, for each operand of each linear layer: the amaxes of the last steps, the newest first, and
// the scale of the next step. The scale is 0 as long as the history is empty: then the operand is scaled just
// in time.
enum class LinearOperand : uint8_t { X, W, G };
inline constexpr int OPERANDS = 3;
inline constexpr const char* OPERAND_NAMES[] = {".x", ".w", ".g"};
inline const Quant& quant_of(const Recipe& r, LinearOperand o) {
    return o == LinearOperand::X ? r.x : o == LinearOperand::W ? r.w : r.g;
}

inline std::vector<StateTensor> scaling_tensors(const ModelConfig& c, const Recipe& r) {
    std::vector<StateTensor> table;
    if (r.scaling != Scaling::Delayed) return table;
    const std::vector<Param> params = parameters(c);
    for (size_t i = 0; i < params.size(); i++)
        for (int o = 0; params[i].role.linear && o < OPERANDS; o++) {
            table.push_back({params[i].name + OPERAND_NAMES[o] + ".history", "F32", 4, {r.history}, i, 0});
            table.push_back({params[i].name + OPERAND_NAMES[o] + ".scale", "F32", 4, {1}, i, 0});
        }
    return table;
}

// The state besides the weights: remainders of the masters, moments, delayed scales. A BF16 weight and its
// signed 16-bit remainder are the FP32 master: bits = (bf16 << 16) + remainder.
inline std::vector<StateTensor> optimizer_tensors(const Setup& s) {
    std::vector<StateTensor> table;
    const std::vector<Param> params = parameters(s.config);
    for (size_t i = 0; i < params.size(); i++) {
        const Param& p = params[i];
        if (s.master) table.push_back({p.name + ".remainder", "I16", 2, {p.rows, p.cols}, i});
        for (const auto& [moment, wanted] : {std::pair{".m", s.optimizer.m}, {".v", s.optimizer.v}}) {
            const Format f = p.moment(wanted);
            const int64_t scales = s.optimizer.scales(f, p.size()), per = s.optimizer.group;
            table.push_back({p.name + moment, info(f).safetensors, info(f).bytes, {p.rows, p.cols}, i});
            if (scales) table.push_back({p.name + moment + ".max", "F32", 4, {scales}, i, per});
            if (s.optimizer.expands(f)) table.push_back({p.name + moment + ".k", "F32", 4, {scales}, i, per});
        }
    }
    for (const StateTensor& t : scaling_tensors(s.config, s.recipe)) table.push_back(t);
    return table;
}

// The elements of a tensor that this rank keeps; Model::read() and write() pass these. Those of all ranks,
// one after the other, are the whole tensor, unless every rank keeps all of it.
inline Slice kept(const Setup& s, const StateTensor& t) {
    const Param p = parameters(s.config).at(t.param);
    if (t.per == 0) return {0, t.size()};
    const Slice of = t.name == p.name ? kept_weight(s, p) : owned(s, p);
    const int64_t first = ceil_div(of.first, t.per);
    return {first, ceil_div(of.first + of.count, t.per) - first};
}

// -----------------------------------------------------------------------------------------------------------
// What a layer saves for backward (paper table 2): the tensors that cheap elementwise work cannot compute
// from another saved tensor.

// The operands of a linear layer's GEMMs. Hopper's FP8 GEMMs need every dimension to be a multiple of 16.
// Weights comply (validate). If the tokens of a micro-batch do not, all linear layers of the run use the
// compute dtype.
struct LinearFormats {
    Quant x, w, g;
    bool fallback;
};
inline LinearFormats linear_formats(const Setup& s) {
    const Recipe& r = s.recipe;
    if (s.B * s.T % 16 == 0 || !r.x.fp8()) return {r.x, r.w, r.g, false};
    return {Quant{r.compute}, Quant{r.compute}, Quant{r.compute}, true};
}

enum class Saved : uint8_t { Norm1Input, Qkv, Attention, LogSumExp, Norm2Input, GateUp };
struct SavedTensor {
    Saved which;
    const char* name;
    int64_t cols;  // elements per token
    Quant quant;

    int64_t bytes(int64_t tokens) const { return quant.bytes(tokens, cols); }
};

inline std::vector<SavedTensor> saved_per_layer(const Setup& s) {
    const ModelConfig& c = s.config;
    const Recipe& r = s.recipe;
    return {
        {Saved::Norm1Input, "norm 1 input", c.C, r.nonlinear},
        {Saved::Qkv, "q, k, v", c.qkv_cols(), r.attention},
        {Saved::Attention, "attention output", c.q_cols(), r.attention},
        {Saved::LogSumExp, "attention log-sum-exp", c.NH, Q_F32},
        {Saved::Norm2Input, "norm 2 input", c.C, r.nonlinear},
        {Saved::GateUp, c.arch.gated ? "gate, up" : "GELU input", c.gate_up_cols(), r.nonlinear},
    };
}

// -----------------------------------------------------------------------------------------------------------
// Model: the weights, gradients, moments and activations of one training run on one device. train.cpp, data/
// and most tests see no other interface; reference.cpp and model.cu implement it.

struct AdamW {    // the arguments of one step
    int64_t step;  // counts from 1, for the bias correction
    float lr, beta1 = 0.9f, beta2 = 0.95f, eps = 1e-8f, weight_decay = 0.1f;
    // Largest global norm of the gradients; 0: no clipping. Without keep_gradients it is 0, because a bucket
    // is updated before the norm of all gradients is known.
    float clip = 1.0f;
    // Steps before this one that were skipped. Without keep_gradients they may have updated buckets, so
    // stochastic rounding counts them too: else it would use their random bits again.
    int64_t skipped = 0;
};

struct StepResult {
    double loss;       // nats per token, mean over all targets of the step that count
    double grad_norm;  // before clipping
    // Nothing was updated, because the loss, a gradient or a tensor that was quantized to FP8 was not finite,
    // a clipped norm was 2^62 or more, or no target counts. Without keep_gradients, buckets that were updated
    // before that stay updated.
    bool skipped;
    int64_t targets = 0;  // that count, in all micro-batches of all ranks
};

// A target that does not count, say a token of a user's question: its loss and its gradient are 0. The loss
// is the mean over all targets of the step that count, also those of other micro-batches and ranks. A mean of
// the means of micro-batches would give a token more weight where few others count.
inline constexpr int32_t NO_TARGET = -1;
inline int64_t counted_targets(const int32_t* targets, int64_t n) {
    return n - std::count(targets, targets + n, NO_TARGET);
}
// Error unless tokens are in [0, V), and targets are in [0, V) or NO_TARGET.
inline void require_tokens(const ModelConfig& c, const int32_t* tokens, const int32_t* targets, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        if (tokens[i] < 0 || tokens[i] >= c.V || targets[i] < NO_TARGET || targets[i] >= c.V)
            throw Error("A token lies outside the vocabulary of ", c.V,
                        "; choose --data and --model that belong together.");
}
// What the mean loss of one micro-batch divides by.
inline double divisor_of_mean(const int32_t* targets, int64_t n) {
    return static_cast<double>(std::max<int64_t>(1, counted_targets(targets, n)));
}

// Tokens are in [0, V), and targets are in [0, V) or NO_TARGET; every function throws Error if they are not,
// or if a tensor name is unknown. Every rank calls step(), evaluate(), next_logits(), quantization() and
// write() at the same time; step() and evaluate() with its own tokens. The result of step() is that of all
// ranks.
class Model {
public:
    virtual ~Model() = default;
    // Forward, backward and update. tokens and targets: (accumulate, B, T).
    virtual StepResult step(const int32_t* tokens, const int32_t* targets, const AdamW& adamw) = 0;
    // Mean loss of one micro-batch (B, T) without gradients, 0 if no target counts; NaN if a tensor that was
    // quantized to FP8 was not finite.
    virtual double evaluate(const int32_t* tokens, const int32_t* targets) = 0;
    // Logits (V) of the token that follows these n, 1 <= n <= T.
    virtual void next_logits(const int32_t* tokens, int64_t n, float* logits) = 0;
    // Measures every quantization in forward and backward of one micro-batch, without an update.
    virtual QuantReport quantization(const int32_t* tokens, const int32_t* targets) = 0;
    // What this rank keeps (kept()) of a tensor of weight_tensors() or optimizer_tensors(), contiguous.
    // "<param>.gradient" (FP32) is the gradient of the last step, as owned(), until the next forward
    // pass; it is read-only and exists only with keep_gradients.
    virtual void read(const std::string& name, void* out) = 0;
    virtual void write(const std::string& name, const void* in) = 0;
    virtual const Setup& setup() const = 0;
};

std::unique_ptr<Model> make_reference(const Setup& setup);  // reference.cpp: the CPU
std::unique_ptr<Model> make_gpu(const Setup& setup);        // gpu/this_gpu.cu; Error if no GPU can run it
// gpu/this_gpu.cu; empty if this GPU can be used, else the reason and what to do. It starts no other GPU.
std::string why_no_gpu(int gpu = 0);

}  // namespace coat
