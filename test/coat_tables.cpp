// coat_tables.cpp - the tables of recipes and models in coat.h and model.h, row by row. A changed row
// fails here.
#include <doctest/doctest.h>

#include "../coat.h"

using namespace coat;

TEST_CASE("recipes: each row of the table is the published method") {
    auto row = [](const Recipe& r) {
        std::string text = info(r.compute).name;
        for (const Quant& q : {r.x, r.w, r.g, r.nonlinear, r.attention}) text += ", " + q.text();
        text += r.scaling == Scaling::Delayed ? "; delayed; " : "; just in time; ";
        for (bool fast : r.fast) text += fast ? "fast " : "exact ";
        return text + r.optimizer + (r.forward_reads_groups ? "" : ", forward reads values");
    };
    const std::string tensors = "bf16, e4m3 tensor, e4m3 tensor, e5m2 tensor, bf16, bf16; ";
    // Compute dtype, x, w, g, nonlinear, attention; scaling; sums of fprop, dgrad and wgrad; moments
    const std::pair<std::string, std::string> expected[] = {
        {"fp32", "fp32, fp32, fp32, fp32, fp32, fp32; just in time; exact exact exact fp32"},
        {"bf16", "bf16, bf16, bf16, bf16, bf16, bf16; just in time; exact exact exact fp32"},
        {"coat",
         "bf16, e4m3 tensor, e4m3 tensor, e5m2 tensor, e4m3 1x16, bf16; just in time; fast exact exact coat"},
        {"coat-saved",
         "bf16, e4m3 tensor, e4m3 tensor, e4m3 tensor, e4m3 1x16, bf16; just in time; fast exact exact coat, "
         "forward reads values"},
        {"te", tensors + "delayed; fast exact exact fp32"},
        {"colossal", tensors + "just in time; fast fast fast fp32"},
        {"tensorwise", tensors + "just in time; fast exact exact fp32"},
        {"rowwise", "bf16, e4m3 row, e4m3 row, e4m3 row, bf16, bf16; just in time; fast exact exact fp32"},
        {"deepseek",
         "bf16, e4m3 1x128, e4m3 128x128, e4m3 1x128, bf16, bf16; "
         "just in time; exact exact exact fp32"}};
    REQUIRE(recipes().size() == std::size(expected));
    for (size_t i = 0; i < recipes().size(); i++) {
        const Recipe& r = recipes()[i];
        CHECK((r.name == expected[i].first && r.history == 1024));
        CHECK(row(r) == expected[i].second);
        for (const Quant& operand : {r.x, r.w, r.g}) CHECK(operand.scale_format == Format::F32);
        CHECK(r.nonlinear.scale_format == (r.nonlinear.fp8() ? Format::BF16 : Format::F32));
    }
}

TEST_CASE("models: each row of the table has the published shape and number of parameters") {
    struct Shape {
        const char *name, *arch;
        int64_t L, C, NH, NKV, F, V, max_T;
        bool tied;
        float norm_eps, rope_theta;
        int64_t count;     // 0: not published
        float factor = 0;  // of RoPE scaling of type llama3; 0: no scaling
    };
    const std::vector<Shape> expected = {
        {"llama-tiny", "llama", 4, 128, 4, 2, 352, 0, 256, true, 1e-5f, 1e4f, 0},
        {"gpt2-tiny", "gpt2", 4, 128, 4, 4, 512, 0, 256, true, 1e-5f, 1e4f, 0},
        {"llama-30m", "llama", 8, 512, 8, 4, 1408, 0, 1024, true, 1e-5f, 1e4f, 0},
        {"gpt2", "gpt2", 12, 768, 12, 12, 3072, 50257, 1024, true, 1e-5f, 1e4f, 124439808},
        {"gpt2-medium", "gpt2", 24, 1024, 16, 16, 4096, 50257, 1024, true, 1e-5f, 1e4f, 354823168},
        {"gpt2-large", "gpt2", 36, 1280, 20, 20, 5120, 50257, 1024, true, 1e-5f, 1e4f, 774030080},
        {"gpt2-xl", "gpt2", 48, 1600, 25, 25, 6400, 50257, 1024, true, 1e-5f, 1e4f, 1557611200},
        {"tinyllama-1.1b", "llama", 22, 2048, 32, 4, 5632, 32000, 2048, false, 1e-5f, 1e4f, 1100048384},
        {"llama-2-7b", "llama", 32, 4096, 32, 32, 11008, 32000, 4096, false, 1e-5f, 1e4f, 6738415616},
        {"llama-2-13b", "llama", 40, 5120, 40, 40, 13824, 32000, 4096, false, 1e-5f, 1e4f, 13015864320},
        {"llama-3-8b", "llama", 32, 4096, 32, 8, 14336, 128256, 8192, false, 1e-5f, 5e5f, 8030261248},
        {"llama-30b", "llama", 60, 6656, 52, 52, 17920, 32000, 2048, false, 1e-5f, 1e4f, 32528943616},
        {"llama-3.2-1b", "llama", 16, 2048, 32, 8, 8192, 128256, 131072, true, 1e-5f, 5e5f, 1235814400, 32},
        {"llama-3.2-3b", "llama", 28, 3072, 24, 8, 8192, 128256, 131072, true, 1e-5f, 5e5f, 3212749824, 32},
        {"llama-3.1-8b", "llama", 32, 4096, 32, 8, 14336, 128256, 131072, false, 1e-5f, 5e5f, 8030261248, 8},
        {"mistral-7b", "mistral", 32, 4096, 32, 8, 14336, 32768, 32768, false, 1e-5f, 1e6f, 7248023552},
        {"qwen2.5-0.5b", "qwen2", 24, 896, 14, 2, 4864, 151936, 32768, true, 1e-6f, 1e6f, 494032768},
        {"qwen2.5-7b", "qwen2", 28, 3584, 28, 4, 18944, 152064, 131072, false, 1e-6f, 1e6f, 7615616512},
        {"qwen3-0.6b", "qwen3", 28, 1024, 16, 8, 3072, 151936, 40960, true, 1e-6f, 1e6f, 596049920},
        {"qwen3-1.7b", "qwen3", 28, 2048, 16, 8, 6144, 151936, 40960, true, 1e-6f, 1e6f, 1720574976},
        {"qwen3-8b", "qwen3", 36, 4096, 32, 8, 12288, 151936, 40960, false, 1e-6f, 1e6f, 8190735360},
    };
    REQUIRE(models().size() == expected.size());
    for (size_t i = 0; i < expected.size(); i++) {
        const ModelConfig& c = models()[i];
        const Shape& s = expected[i];
        CAPTURE(s.name);
        CHECK((c.name == s.name && std::string(c.arch.name) == s.arch && c.window == 0));
        CHECK(
            std::vector<int64_t>{c.L, c.C, c.NH, c.NKV, c.F, c.V, c.max_T, c.tied, c.head_size} ==
            std::vector<int64_t>{s.L, s.C, s.NH, s.NKV, s.F, s.V, s.max_T, s.tied, c.arch.qk_norm ? 128 : 0});
        CHECK((c.norm_eps == s.norm_eps && c.rope_theta == s.rope_theta));
        const RopeScaling& r = c.rope_scaling;
        CHECK((r.type == RopeScaling::Llama3) == (s.factor > 0));
        if (s.factor > 0)
            CHECK(std::tuple(r.factor, r.low_freq_factor, r.high_freq_factor, r.original_positions) ==
                  std::tuple(s.factor, 1, 4, 8192));
        if (s.count) CHECK(parameter_count(c) == s.count);
    }
}
