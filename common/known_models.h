// common/known_models.h - the models that --model knows by name, and the limits that the shape of a model
// has.
#pragma once
#include <algorithm>

#include "architecture.h"

namespace coat {

// -----------------------------------------------------------------------------------------------------------
// The known models

inline const std::vector<ModelConfig>& known_models() {
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

// -----------------------------------------------------------------------------------------------------------
// Limits

// Error if the shape is not supported. Nothing is allocated before this check.
inline void require_supported(const ModelConfig& config) {
    auto unsupported_unless = [&](bool ok, const auto&... what) {
        if (!ok) throw Error("Model ", config.name, " is not supported: ", what..., ".");
    };
    // With these limits a model has fewer than 2^49 parameters, and no number of bytes overflows. A row of
    // FP32 logits fits the workspace of a GPU's GEMMs, and a row of the hidden size fits the kernels of
    // gpu/norm.cuh.
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
    // FP8 GEMMs need a multiple of 16, and no group of 16 may have elements of both q and k.
    constexpr int64_t multiple = std::max<int64_t>(FP8_GEMM_MULTIPLE, PER_1x16.cols);
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
