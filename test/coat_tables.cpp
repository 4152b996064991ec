// coat_tables.cpp - the tables of recipes and models in coat.h, row by row: a changed row fails here.
#include <doctest/doctest.h>

#include <sstream>

#include "../architecture.h"

using namespace coat;

TEST_CASE("recipes: each row of the table is the published method") {
    auto row = [](const Recipe& r) {
        std::string text = concat(r.name, ": ", info(r.compute).name);
        for (const Storage& q : {r.x, r.w, r.g, r.nonlinear, r.attention}) text += ", " + q.text();
        text += r.scaling == Scaling::Delayed ? "; delayed; " : "; ";
        for (bool fast : r.fast_accumulation) text += fast ? "fast " : "exact ";
        return text + r.optimizer + (r.forward_reads_groups ? "" : ", forward reads values");
    };
    const std::string tensors = "bf16, e4m3 tensor, e4m3 tensor, e5m2 tensor, bf16, bf16; ";
    // Compute dtype, x, w, g, nonlinear, attention; delayed scaling; sums of fprop, dgrad and wgrad; moments
    const std::string expected[] = {
        "fp32: fp32, fp32, fp32, fp32, fp32, fp32; exact exact exact fp32",
        "bf16: bf16, bf16, bf16, bf16, bf16, bf16; exact exact exact fp32",
        "coat: bf16, e4m3 tensor, e4m3 tensor, e5m2 tensor, e4m3 1x16, bf16; fast exact exact coat",
        "coat-saved: bf16, e4m3 tensor, e4m3 tensor, e4m3 tensor, e4m3 1x16, bf16; "
        "fast exact exact coat, forward reads values",
        "te: " + tensors + "delayed; fast exact exact fp32",
        "colossal: " + tensors + "fast fast fast fp32",
        "tensorwise: " + tensors + "fast exact exact fp32",
        "rowwise: bf16, e4m3 row, e4m3 row, e4m3 row, bf16, bf16; fast exact exact fp32",
        "deepseek: bf16, e4m3 1x128, e4m3 128x128, e4m3 1x128, bf16, bf16; exact exact exact fp32"};
    REQUIRE(recipes().size() == std::size(expected));
    for (size_t i = 0; i < recipes().size(); i++) {
        const Recipe& r = recipes()[i];
        CHECK(row(r) == expected[i]);
        CHECK(r.history == 1024);
        for (const Storage& operand : {r.x, r.w, r.g}) CHECK(operand.scale_format == Format::FP32);
        CHECK(r.nonlinear.scale_format == (r.nonlinear.fp8() ? Format::BF16 : Format::FP32));
    }
}

TEST_CASE("models: each row of the table has the published shape and number of parameters") {
    auto row = [](const ModelConfig& c) {
        std::ostringstream text;
        text << c.name << ": " << c.arch.name;
        for (int64_t n : {c.L, c.C, c.NH, c.NKV, c.F, c.V, c.max_T}) text << " " << n;
        text << (c.tied ? " tied " : " untied ") << c.norm_eps << " " << c.rope_theta;
        if (c.head_size) text << ", heads of " << c.head_size;
        if (c.sliding_window) text << ", window " << c.sliding_window;
        if (const RopeScaling& r = c.rope_scaling; r.type == RopeScaling::Llama3)
            text << ", x" << r.factor << " " << r.low_freq_factor << " " << r.high_freq_factor << " "
                 << r.original_positions;
        return text.str();
    };
    // Layers, hidden size, heads, key/value heads, feed-forward size, vocabulary, positions; epsilon and
    // theta; RoPE scaling of type llama3. The number of parameters; 0: not published
    const std::pair<std::string, int64_t> expected[] = {
        {"llama-tiny: llama 4 128 4 2 352 0 256 tied 1e-05 10000", 0},
        {"gpt2-tiny: gpt2 4 128 4 4 512 0 256 tied 1e-05 10000", 0},
        {"llama-30m: llama 8 512 8 4 1408 0 1024 tied 1e-05 10000", 0},
        {"gpt2: gpt2 12 768 12 12 3072 50257 1024 tied 1e-05 10000", 124439808},
        {"gpt2-medium: gpt2 24 1024 16 16 4096 50257 1024 tied 1e-05 10000", 354823168},
        {"gpt2-large: gpt2 36 1280 20 20 5120 50257 1024 tied 1e-05 10000", 774030080},
        {"gpt2-xl: gpt2 48 1600 25 25 6400 50257 1024 tied 1e-05 10000", 1557611200},
        {"tinyllama-1.1b: llama 22 2048 32 4 5632 32000 2048 untied 1e-05 10000", 1100048384},
        {"llama-2-7b: llama 32 4096 32 32 11008 32000 4096 untied 1e-05 10000", 6738415616},
        {"llama-2-13b: llama 40 5120 40 40 13824 32000 4096 untied 1e-05 10000", 13015864320},
        {"llama-3-8b: llama 32 4096 32 8 14336 128256 8192 untied 1e-05 500000", 8030261248},
        {"llama-30b: llama 60 6656 52 52 17920 32000 2048 untied 1e-05 10000", 32528943616},
        {"llama-3.2-1b: llama 16 2048 32 8 8192 128256 131072 tied 1e-05 500000, x32 1 4 8192", 1235814400},
        {"llama-3.2-3b: llama 28 3072 24 8 8192 128256 131072 tied 1e-05 500000, x32 1 4 8192", 3212749824},
        {"llama-3.1-8b: llama 32 4096 32 8 14336 128256 131072 untied 1e-05 500000, x8 1 4 8192", 8030261248},
        {"mistral-7b: mistral 32 4096 32 8 14336 32768 32768 untied 1e-05 1e+06", 7248023552},
        {"qwen2.5-0.5b: qwen2 24 896 14 2 4864 151936 32768 tied 1e-06 1e+06", 494032768},
        {"qwen2.5-7b: qwen2 28 3584 28 4 18944 152064 131072 untied 1e-06 1e+06", 7615616512},
        {"qwen3-0.6b: qwen3 28 1024 16 8 3072 151936 40960 tied 1e-06 1e+06, heads of 128", 596049920},
        {"qwen3-1.7b: qwen3 28 2048 16 8 6144 151936 40960 tied 1e-06 1e+06, heads of 128", 1720574976},
        {"qwen3-8b: qwen3 36 4096 32 8 12288 151936 40960 untied 1e-06 1e+06, heads of 128", 8190735360}};
    REQUIRE(models().size() == std::size(expected));
    for (size_t i = 0; i < models().size(); i++) {
        CHECK(row(models()[i]) == expected[i].first);
        if (expected[i].second) CHECK(parameter_count(models()[i]) == expected[i].second);
        for (const Param& p : parameters(models()[i])) {  // as GPT-2's: smaller before a residual add
            const bool adds = is_one_of("down attention_out", p.name.substr(p.name.rfind('.') + 1));
            if (p.rows > 1) CHECK(p.init_std == (adds ? 0.02f / std::sqrt(2.0f * models()[i].L) : 0.02f));
        }
    }
}
