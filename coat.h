// coat.h - the vocabulary of COAT (arXiv 2410.19313) that the CPU reference and the GPU implementation share:
// number formats, granularities, recipes, formats of moments; model shapes, the block, and its parameters.
//
// All matrices are row-major; a weight is (out, in). Letters: B sequences of T tokens, N = B*T; L layers, C
// hidden size, NH query heads, NKV key/value heads, HS head size, F feed-forward size, V vocabulary.
#pragma once
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "error.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// Formats. FP8 is that of the OCP specification: casts saturate, and E4M3 has no infinity. FP16 is for
// moments only.

enum class Format : uint8_t { F32, BF16, F16, E4M3, E5M2 };

struct FormatInfo {
    const char* name;         // on the command line and in tables
    const char* safetensors;  // in checkpoints
    int bytes;
    int mantissa;  // bits: a normal value has a relative rounding error of at most 2^-(mantissa+1)
    float max;     // largest finite value: FMAX in the scale s = amax / FMAX
    float min;     // smallest positive value (subnormal)
};

// clang-format off
inline constexpr FormatInfo FORMATS[] = {
    {"fp32", "F32",     4, 23, 3.40282347e+38f, 1.40129846e-45f},
    {"bf16", "BF16",    2, 7,  3.38953139e+38f, 9.18354962e-41f},
    {"fp16", "F16",     2, 10, 65504.0f,        0x1p-24f},
    {"e4m3", "F8_E4M3", 1, 3,  448.0f,          0x1p-9f},
    {"e5m2", "F8_E5M2", 1, 2,  57344.0f,        0x1p-16f},
};
// clang-format on

constexpr const FormatInfo& info(Format f) { return FORMATS[static_cast<int>(f)]; }
constexpr bool is_fp8(Format f) { return f == Format::E4M3 || f == Format::E5M2; }
constexpr bool is_scaled(Format f) { return f != Format::F32 && f != Format::BF16; }  // of a small range

// -----------------------------------------------------------------------------------------------------------
// Granularity: one scale serves a block of rows x cols elements; 0 means all of them (paper section 5).
// Blocks at the end of a row or column may be smaller.

struct Granularity {
    int rows, cols;
    constexpr bool operator==(const Granularity& o) const { return rows == o.rows && cols == o.cols; }
    constexpr bool symmetric() const { return rows == cols; }  // the same for the transpose
};
inline constexpr Granularity PER_TENSOR{0, 0};
inline constexpr Granularity PER_ROW{1, 0}, PER_1x128{1, 128}, PER_128x128{128, 128};  // GEMM operands
inline constexpr Granularity PER_GROUP{1, 16};  // along the hidden dimension, within a token (figure 4a)

inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// How one kind of tensor is stored: its format, the block that shares a scale, and the format of the scales.
struct Quant {
    Format format;
    Granularity granularity = PER_TENSOR;
    Format scale_format = Format::F32;

    constexpr bool operator==(const Quant& o) const {
        return format == o.format && granularity == o.granularity && scale_format == o.scale_format;
    }
    bool fp8() const { return is_fp8(format); }
    // The scales of a (rows, cols) tensor form a (scale_rows, scale_cols) matrix.
    int64_t scale_rows(int64_t rows) const { return granularity.rows ? ceil_div(rows, granularity.rows) : 1; }
    int64_t scale_cols(int64_t cols) const { return granularity.cols ? ceil_div(cols, granularity.cols) : 1; }
    int64_t scales(int64_t rows, int64_t cols) const {
        return fp8() ? scale_rows(rows) * scale_cols(cols) : 0;
    }
    int64_t code_bytes(int64_t rows, int64_t cols) const { return rows * cols * info(format).bytes; }
    int64_t bytes(int64_t rows, int64_t cols) const {
        return code_bytes(rows, cols) + scales(rows, cols) * info(scale_format).bytes;
    }
    // As Hopper reads a GEMM operand: rows of 128x128 scales are padded to a multiple of 4.
    int64_t operand_scales(int64_t rows, int64_t cols) const {
        if (!fp8() || granularity == PER_TENSOR) return 0;
        return scale_rows(rows) * round_up(scale_cols(cols), granularity == PER_128x128 ? 4 : 1);
    }
    int64_t operand_bytes(int64_t rows, int64_t cols) const {
        return code_bytes(rows, cols) + operand_scales(rows, cols) * info(scale_format).bytes;
    }
    std::string text() const {  // "e4m3 1x16", "e4m3 row", "e5m2 tensor", "bf16"
        const std::string name = info(format).name;
        if (!fp8()) return name;
        if (granularity == PER_TENSOR) return name + " tensor";
        if (granularity == PER_ROW) return name + " row";
        return concat(name, " ", granularity.rows, "x", granularity.cols);
    }
};

// -----------------------------------------------------------------------------------------------------------
// Recipes: which format and granularity each kind of tensor has. A recipe is a row of a table: code asks for
// a column, never for a recipe's name.
//
// Each GEMM of a linear layer (input x, weight w, gradient g of the output) reduces over another dimension:
//   fprop  y = x w^T    over input features:  columns of x, columns of w
//   dgrad  dx = g w     over output features: columns of g, rows of w
//   wgrad  dw = g^T x   over tokens:          rows of g, rows of x
// A scale may vary along the reduction only in whole blocks. So the columns of a granularity run along the
// reduction, and an operand that is reduced over its rows is transposed before it is quantized. For example
// with 1x128, 128 features of a token share a scale of x in fprop, and 128 tokens in wgrad: x is quantized
// twice. Per-tensor and 128x128 scales are the same for a matrix and its transpose.

enum class Scaling : uint8_t { JustInTime, Delayed };  // from the tensor's own amax, or from earlier ones

struct Recipe {
    const char* name;
    Format compute;   // compute dtype: residual stream, attention, GEMM outputs, head; also gradients of
                      // weights, unless many are summed (model.h, gradient_format)
    Quant x, w, g;    // GEMM operands: activations, weights, gradients of outputs
    Quant nonlinear;  // inputs of norms 1 and 2 and of activations, as they are saved for backward
    Quant attention;  // q, k, v and the output of attention, also saved: the compute dtype, or groups
    Scaling scaling;  // of x, w and g
    // Whether fprop, dgrad and wgrad accumulate in the about 14 bits of Hopper's FP8 tensor cores. Exact
    // accumulation moves the sums to FP32 at intervals, which takes longer.
    std::array<bool, 3> fast;
    const char* about;
    const char* optimizer = "fp32";  // the row of optimizers() that is the default
    // Norms and activation functions read `nonlinear` tensors. Backward reads the groups that were saved. The
    // forward pass reads the same groups, as in the paper, or the values that they were made of (coat-saved):
    // then the operand x of wgrad differs a little from that of fprop (dev/WALK.md).
    bool forward_reads_groups = true;
    int history = 1024;  // delayed scaling: steps in the history of amaxes
};

inline constexpr Quant Q_F32{Format::F32}, Q_BF16{Format::BF16};
inline constexpr Quant Q_E4M3{Format::E4M3}, Q_E5M2{Format::E5M2};
inline constexpr Quant Q_GROUP{Format::E4M3, PER_GROUP, Format::BF16};
inline constexpr Quant Q_ROW{Format::E4M3, PER_ROW};
inline constexpr Quant Q_1x128{Format::E4M3, PER_1x128}, Q_128x128{Format::E4M3, PER_128x128};

inline const std::vector<Recipe>& recipes() {
    constexpr Scaling JIT = Scaling::JustInTime, DELAYED = Scaling::Delayed;
    constexpr std::array FPROP{true, false, false}, EXACT{false, false, false}, FAST{true, true, true};
    static const std::vector<Recipe> table = {
        // name, compute dtype, x, w, g, nonlinear, attention, scaling, fast, about, optimizer,
        // forward_reads_groups
        {"fp32", Format::F32, Q_F32, Q_F32, Q_F32, Q_F32, Q_F32, JIT, EXACT,
         "everything in FP32, to compare the others with"},
        {"bf16", Format::BF16, Q_BF16, Q_BF16, Q_BF16, Q_BF16, Q_BF16, JIT, EXACT,
         "BF16 tensors, FP32 accumulation"},
        {"coat", Format::BF16, Q_E4M3, Q_E4M3, Q_E5M2, Q_GROUP, Q_BF16, JIT, FPROP,
         "mixed-granularity FP8 flow: per-tensor GEMMs, 1x16 groups elsewhere (paper section 5)", "coat"},
        {"coat-saved", Format::BF16, Q_E4M3, Q_E4M3, Q_E4M3, Q_GROUP, Q_BF16, JIT, FPROP,
         "coat with E4M3 gradients, and with groups that only backward reads", "coat", false},
        {"te", Format::BF16, Q_E4M3, Q_E4M3, Q_E5M2, Q_BF16, Q_BF16, DELAYED, FPROP,
         "FP8 GEMMs with delayed per-tensor scaling (TransformerEngine)"},
        {"colossal", Format::BF16, Q_E4M3, Q_E4M3, Q_E5M2, Q_BF16, Q_BF16, JIT, FAST,
         "FP8 GEMMs with just-in-time per-tensor scaling and fast accumulation (Colossal-AI)"},
        {"tensorwise", Format::BF16, Q_E4M3, Q_E4M3, Q_E5M2, Q_BF16, Q_BF16, JIT, FPROP,
         "FP8 GEMMs with just-in-time per-tensor scaling (torchao's tensorwise)"},
        // torchao's rowwise also rounds scales up to powers of two, and accumulates fast in all GEMMs.
        {"rowwise", Format::BF16, Q_ROW, Q_ROW, Q_ROW, Q_BF16, Q_BF16, JIT, FPROP,
         "FP8 GEMMs with just-in-time per-row scaling, not rounded to powers of two"},
        {"deepseek", Format::BF16, Q_1x128, Q_128x128, Q_1x128, Q_BF16, Q_BF16, JIT, EXACT,
         "FP8 GEMMs with 1x128 scales of x and g and 128x128 scales of w (DeepSeek-V3)"},
    };
    return table;
}

// The optimizer's moments (paper section 4). FP8 moments have one scale for a group of 128 consecutive
// elements, or one for the tensor (MS-AMP's FP8-LM, arXiv 2310.18313).
inline constexpr int MOMENT_GROUP = 128;

struct OptimizerFormat {
    const char* name;
    Format m, v;
    bool expand;  // dynamic range expansion, for FP8 moments
    const char* about;
    int64_t group = MOMENT_GROUP;  // elements that share a scale; 0: all of the tensor

    bool expands(Format f) const { return expand && is_fp8(f); }
    int64_t scales(Format f, int64_t n) const {  // of n elements
        return !is_scaled(f) ? 0 : group ? ceil_div(n, group) : 1;
    }
};

inline const std::vector<OptimizerFormat>& optimizers() {
    static const std::vector<OptimizerFormat> table = {
        {"coat", Format::E4M3, Format::E4M3, true, "FP8 moments with dynamic range expansion"},
        {"coat-e5m2", Format::E4M3, Format::E5M2, true, "the same with second moments in E5M2"},
        {"fp8", Format::E4M3, Format::E4M3, false, "FP8 moments with per-group scaling, no expansion"},
        {"fp8lm", Format::E4M3, Format::F16, false, "E4M3 and FP16 moments with per-tensor scaling (FP8-LM)",
         0},
        {"bf16", Format::BF16, Format::BF16, false, "BF16 moments"},
        {"fp32", Format::F32, Format::F32, false, "FP32 moments"},
    };
    return table;
}

// The row of a table that has this name; an Error lists the names.
template <class Table> const auto& find_row(const Table& table, std::string_view name, const char* flag) {
    std::string known;
    for (const auto& row : table) {
        if (name == row.name) return row;
        known += (known.empty() ? "" : ", ") + std::string(row.name);
    }
    throw Error(flag, " ", name, " is not known; choose one of ", known, ".");
}

// -----------------------------------------------------------------------------------------------------------
// Models

struct Architecture {
    const char *name, *causal_lm;  // Hugging Face's model_type, and its class in transformers
    bool rms;                      // RMSNorm; else LayerNorm with a bias
    bool rope;                     // rotary positions; else learned ones
    bool gated;                    // SiLU(gate) * up; else GELU (tanh form)
    bool qkv_bias;                 // the linear layer of q, k and v has a bias
    bool bias;                     // the other linear layers have one
    bool qk_norm = false;          // RMSNorm of each head of q and of k, before RoPE
};
inline constexpr Architecture LLAMA{"llama", "LlamaForCausalLM", true, true, true, false, false};
inline constexpr Architecture MISTRAL{"mistral", "MistralForCausalLM", true, true, true, false, false};
inline constexpr Architecture QWEN2{"qwen2", "Qwen2ForCausalLM", true, true, true, true, false};
inline constexpr Architecture QWEN3{"qwen3", "Qwen3ForCausalLM", true, true, true, false, false, true};
inline constexpr Architecture GPT2{"gpt2", "GPT2LMHeadModel", false, false, false, true, true};

// RoPE rotates pair i of a head at position t by the angle t f_i, f_i = theta^(-2i / HS). A model may scale
// f_i, to read longer texts than it was first trained on. The names are those of config.json.
struct RopeScaling {
    // Llama3: f_i with fewer than low_freq_factor rotations in the original positions are divided by the
    // factor, those with more than high_freq_factor are kept, and the values between are interpolated.
    enum Type : uint8_t { Default, Llama3 } type = Default;
    float factor = 1, low_freq_factor = 1, high_freq_factor = 4;
    int64_t original_positions = 8192;
};

struct ModelConfig {
    std::string name;
    Architecture arch;
    int64_t L, C, NH, NKV, F, V;  // V = 0: as many as the data has
    int64_t max_T;                // positions
    bool tied;                    // the head is the embedding
    float norm_eps = 1e-5f, rope_theta = 10000.0f;
    int64_t head_size = 0;  // 0: C / NH
    RopeScaling rope_scaling{};
    int64_t window = 0;  // a token attends to the last `window` positions; 0: to all before it

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
        // clang-format off
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
        {"qwen3-0.6b",     QWEN3,   28, 1024, 16, 8,  3072,  151936, 40960, true, 1e-6f, 1e6f, 128},
        {"qwen3-1.7b",     QWEN3,   28, 2048, 16, 8,  6144,  151936, 40960, true, 1e-6f, 1e6f, 128},
        {"qwen3-8b",       QWEN3,   36, 4096, 32, 8,  12288, 151936, 40960, false, 1e-6f, 1e6f, 128},
        // clang-format on
    };
    return table;
}

// Throws Error if the shape is not supported, before anything is allocated.
inline void validate(const ModelConfig& c) {
    auto require = [&](bool ok, const auto&... what) {
        if (!ok) throw Error("Model ", c.name, " is not supported: ", what..., ".");
    };
    // With these limits a model has fewer than 2^49 parameters, so that no number of bytes overflows, and a
    // row of FP32 logits fits a GPU's GEMM workspace.
    // clang-format off
    const std::tuple<const char*, int64_t, int64_t> sizes[] = {
        {"number of layers", c.L, 1 << 12}, {"hidden size", c.C, 1 << 14}, {"number of heads", c.NH, 1 << 15},
        {"number of key/value heads", c.NKV, 1 << 15}, {"feed-forward size", c.F, 1 << 20},
        {"vocabulary", c.V, 1 << 22}, {"number of positions", c.max_T, 1 << 21}};
    // clang-format on
    for (const auto& [name, value, limit] : sizes)
        require(value > 0 && value <= limit, "its ", name, " is ", value, ", not from 1 to ", limit);
    constexpr int64_t side = std::max(16, PER_GROUP.cols);  // FP8 GEMMs need 16; no group may span q and k
    require(c.C % side == 0 && c.F % side == 0, "hidden size ", c.C, " and feed-forward size ", c.F,
            " must be multiples of ", side, ", as FP8 GEMMs and groups need");
    require(c.head_size || c.C % c.NH == 0, "hidden size must be a multiple of the number of heads");
    require(c.HS() % 8 == 0 && c.HS() <= 128, "head size ", c.HS(), " must be a multiple of 8 up to 128");
    require(c.q_cols() <= 1 << 20, "heads x head size is ", c.q_cols(), ", above the limit of ", 1 << 20);
    require(c.q_cols() % side == 0 && c.kv_cols() % side == 0, "heads x head size must be a multiple of ",
            side, ", as FP8 GEMMs and groups need");
    require(c.NH % c.NKV == 0, "query heads must be a multiple of key/value heads");
}

// -----------------------------------------------------------------------------------------------------------
// The block. Its forward and backward passes are block_forward() and block_backward() of reference.cpp and
// model.cu; ./train --plan prints the formats of its operators (plan.cpp, precision_plan).

// The operands of a linear layer's GEMMs. Hopper's FP8 GEMMs need every dimension to be a multiple of 16. If
// the N tokens of a micro-batch are not, all linear layers of the run use the compute dtype.
struct LinearFormats {
    Quant x, w, g;
    bool fallback;
};
inline LinearFormats linear_formats(const Recipe& r, int64_t N) {
    if (N % 16 == 0 || !r.x.fp8()) return {r.x, r.w, r.g, false};
    return {Quant{r.compute}, Quant{r.compute}, Quant{r.compute}, true};
}

// Saved for backward (paper table 2): what cheap elementwise work cannot compute from another saved tensor.
enum class Saved : uint8_t { Norm1Input, Qkv, Attention, LogSumExp, Norm2Input, GateUp };
struct SavedTensor {
    Saved which;
    const char* name;
    int64_t cols;  // elements per token
    Quant quant;

    int64_t bytes(int64_t tokens) const { return quant.bytes(tokens, cols); }
};

inline std::vector<SavedTensor> saved_per_layer(const ModelConfig& c, const Recipe& r) {  // by Saved
    return {{Saved::Norm1Input, "norm 1 input", c.C, r.nonlinear},
            {Saved::Qkv, "q, k, v", c.qkv_cols(), r.attention},
            {Saved::Attention, "attention output", c.q_cols(), r.attention},
            {Saved::LogSumExp, "attention log-sum-exp", c.NH, Q_F32},
            {Saved::Norm2Input, "norm 2 input", c.C, r.nonlinear},
            {Saved::GateUp, c.arch.gated ? "gate, up" : "GELU input", c.gate_up_cols(), r.nonlinear}};
}

// -----------------------------------------------------------------------------------------------------------
// Parameters: one table in the order of the forward pass. What follows from a parameter's role is a column.

struct Role {
    bool decay;      // weight decay applies
    bool fp8_state;  // moments in the optimizer's formats; else in FP32
    bool linear;     // weight of a linear layer, quantized as the recipe says
    bool ones;       // weight of a norm: starts at 1; others start random, or at 0 if init_std is 0
};
inline constexpr Role EMBEDDING{true, true, false, false};  // also positions and the head
inline constexpr Role LINEAR{true, true, true, false};
inline constexpr Role NORM_WEIGHT{false, false, false, true};
inline constexpr Role BIAS{false, false, false, false};

struct Param {
    std::string name;  // "layers.3.qkv", "layers.3.qkv.bias", "embedding", ...
    Role role;
    int64_t rows, cols;  // (out, in); a vector is (1, n)
    float init_std;
    int64_t offset;  // in the flat order of all parameters; a multiple of MOMENT_GROUP
    int64_t bucket;  // in the order of forward; its gradients are complete at the same time

    int64_t size() const { return rows * cols; }
    int64_t padded_size() const { return round_up(size(), MOMENT_GROUP); }
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
        const std::string layer = concat("layers.", l, ".");
        bucket++;  // a linear layer, with the norm before it
        norm(layer + "norm1");
        linear(layer + "qkv", c.qkv_cols(), c.C, std, c.arch.qkv_bias);
        if (c.arch.qk_norm) add(layer + "qk_norm.weight", NORM_WEIGHT, 1, 2 * c.HS(), 0);  // [of q | of k]
        bucket++;
        linear(layer + "attention_out", c.C, c.q_cols(), residual_std, c.arch.bias);
        bucket++;
        norm(layer + "norm2");
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

// -----------------------------------------------------------------------------------------------------------
// Quantization error, by kind of tensor.

struct QuantStats {
    double signal = 0, noise = 0;  // sums of x^2 and of (x - dequantized x)^2
    int64_t elements = 0;
    int64_t saturated = 0;  // |x| clearly above the largest value of the format times the scale
    int64_t flushed = 0;    // x was not zero and became zero
    double snr_db() const { return 10 * std::log10(signal / noise); }  // signal-to-quantization-noise ratio
    QuantStats& operator+=(const QuantStats& o) {
        signal += o.signal, noise += o.noise;
        elements += o.elements, saturated += o.saturated, flushed += o.flushed;
        return *this;
    }
};

// clang-format off
enum class Kind : uint8_t {
    NormInput, Attention, ActivationInput, LinearInput, Weight, Gradient, Moment1, Moment2, Count
};
inline constexpr const char* KIND_NAMES[] = {
    "norm inputs", "q, k, v, output", "activation inputs", "linear inputs",
    "weights", "gradients", "first moments", "second moments"};
// clang-format on

struct QuantReport {
    QuantStats kinds[static_cast<int>(Kind::Count)];
    std::vector<float> k_m, k_v;   // expansion factors of all groups
    bool part_of_moments = false;  // of large parameters, only a part of the moments was measured
};

}  // namespace coat
