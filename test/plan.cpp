// plan.cpp - plan.cpp: the precision plan, the memory plan, and the learning rate.
#include <doctest/doctest.h>

#include <algorithm>

#include "../data/safetensors.h"
#include "help/files.h"
#include "help/model.h"

using namespace coat;
using namespace coat::test;

TEST_CASE("learning_rate: warms up, decays to a tenth along a cosine, and stays within its bounds") {
    const double peak = 3e-3;
    CHECK(learning_rate(peak, 20, 300, 0) == static_cast<float>(peak / 20));
    CHECK(learning_rate(peak, 20, 300, 19) == static_cast<float>(peak));
    CHECK(learning_rate(peak, 20, 300, 20) == static_cast<float>(peak));
    CHECK(learning_rate(peak, 20, 300, 300) == doctest::Approx(peak / 10));
    for (int64_t step = 21; step < 400; step++) {
        CHECK(learning_rate(peak, 20, 300, step) <= learning_rate(peak, 20, 300, step - 1));
        CHECK(learning_rate(peak, 20, 300, step) >= static_cast<float>(peak / 10 * (1 - 1e-6)));
    }
    CHECK(learning_rate(peak, 0, 1, 0) == static_cast<float>(peak));
    CHECK(learning_rate(peak, 500, 300, 299) == static_cast<float>(peak * 300 / 500));  // ends in the warm-up
    CHECK(learning_rate(peak, 0, 100, 50) == doctest::Approx(peak * 0.55));
}

TEST_CASE("bucket_ranges: buckets are contiguous; only the embedding's bucket may have two matrices") {
    for (const Architecture& arch : {LLAMA, GPT2})
        for (bool tied : {true, false}) {
            const ModelConfig c = tiny_config(arch, tied);
            const std::vector<Param> params = parameters(c);
            const std::vector<BucketRange> buckets = bucket_ranges(params);
            CHECK(int64_t(buckets.size()) == 4 * c.L + 2);
            size_t next = 0;
            int64_t offset = 0;
            for (size_t b = 0; b < buckets.size(); b++) {
                CHECK((buckets[b].first == next && buckets[b].offset == offset));
                int matrices = 0;
                for (; next < buckets[b].last; next++) matrices += params[next].rows > 1;
                CHECK(params[next - 1].bucket == int64_t(b));
                CHECK(matrices == (b == 0 && !arch.rope ? 2 : b + 1 == buckets.size() && tied ? 0 : 1));
                offset += buckets[b].elements;
            }
            CHECK((next == params.size() && offset == params.back().offset + params.back().padded_size()));
        }
}

TEST_CASE("memory plan: delayed scaling adds its state; FP8 only in linear layers saves no activations") {
    Setup te = setup_of("te", find_row(models(), "llama-2-7b", ""), 8, 2048);
    int64_t bytes = 0;
    for (const StateTensor& t : scaling_tensors(te.config, te.recipe)) bytes += t.total_bytes();
    CHECK(bytes == 32 * 4 * 3 * (1024 + 1) * 4);
    CHECK(total_bytes(memory_plan(te), Category::Weights) -
              total_bytes(memory_plan(bf16_baseline(te)), Category::Weights) ==
          bytes);
    for (const char* recipe : {"te", "colossal", "tensorwise", "rowwise", "deepseek"}) {
        te.recipe = find_row(recipes(), recipe, "");
        CHECK(saved_bytes_per_token_and_layer(te) == saved_bytes_per_token_and_layer(bf16_baseline(te)));
    }
}

TEST_CASE("memory plan: bytes of a parameter in each recipe, mode and optimizer, divided among the ranks") {
    struct {
        const char* run;
        double weights, gradients, optimizer;  // weights with the rest of their masters
    } const rows[] = {{"fp32", 4, 4, 8},
                      {"bf16 moments fp32", 4, 2, 8},
                      {"coat", 4, 2, 2 + 16.0 / 128},  // max and k of the groups of two moments
                      {"coat master", 2, 2, 2 + 16.0 / 128},
                      {"bf16 moments fp8", 4, 2, 2 + 8.0 / 128},
                      {"bf16 moments fp8lm", 4, 2, 3},
                      {"bf16 moments bf16", 4, 2, 4}};
    for (const auto& [run, weights, gradients, optimizer] : rows)
        for (const int64_t ranks : {1, 4}) {
            INFO(std::string(run), " ", ranks);
            Setup s = setup_of(run, find_row(models(), "llama-2-7b", ""), 1, 64);
            s.ranks = ranks, s.rank = ranks - 1;
            const std::vector<MemoryRow> plan = memory_plan(s);
            auto each = [&](Category c) {
                return double(total_bytes(plan, c)) * double(ranks) / double(parameter_count(s.config));
            };
            CHECK(each(Category::Weights) == doctest::Approx(weights).epsilon(1e-3));
            CHECK(each(Category::Gradients) == doctest::Approx(gradients).epsilon(1e-3));
            CHECK(each(Category::Optimizer) == doctest::Approx(optimizer).epsilon(1e-3));
        }
}

TEST_CASE("memory plan: each memory mode changes only its own rows, by the stated size") {
    for (const ModelConfig& model : models())
        for (const char* recipe : {"bf16", "coat"}) {
            CAPTURE(model.name);
            CAPTURE(recipe);
            Setup s = setup_of(concat(recipe, " moments coat"), model, 3, 48);
            if (s.config.V == 0) s.config.V = 256;
            const ModelConfig& c = s.config;
            const std::vector<MemoryRow> by_default = memory_plan(s);
            const std::vector<BucketRange> buckets = bucket_ranges(parameters(c));
            int64_t weights = 0, elements = 0, largest = 0;
            for (const Param& p : parameters(c)) weights += p.size();
            for (const BucketRange& b : buckets) {
                elements += b.elements;
                if (b.first > 0 || !c.tied) largest = std::max(largest, b.elements);
            }
            if (c.tied) largest += buckets[0].elements;  // that of a tied embedding lives from the head on
            const Quant wide = s.recipe.attention;
            const int64_t attention =
                (wide.bytes(48, c.qkv_cols() + c.q_cols()) - Q_GROUP.bytes(48, c.qkv_cols() + c.q_cols())) *
                3 * c.L;
            for (const auto& [mode, category, bytes] :
                 {std::tuple{"attention", Category::Activations, attention},
                  {"master", Category::Weights, 2 * weights},
                  {"gradients", Category::Gradients, 2 * (elements - largest)}}) {
                CAPTURE(mode);
                const Setup other = with_modes(s, mode);
                const std::vector<MemoryRow> plan = memory_plan(other);
                CHECK(total_bytes(by_default, category) - total_bytes(plan, category) == bytes);
                CHECK(total_bytes(by_default) - total_bytes(plan) == bytes);
                // The BF16 baseline does not change.
                CHECK(total_bytes(memory_plan(bf16_baseline(other))) ==
                      total_bytes(memory_plan(bf16_baseline(s))));
            }
        }
}

TEST_CASE("precision plan: says what each memory mode changes, and which linear layers cannot run in FP8") {
    // Rows of Llama-2-7B in which operator, reads, writes and saves have this part.
    for (const auto& [flags, T, part, rows] :
         {std::tuple{"coat", 64, "attention|e4m3 1x16|e4m3 1x16", 0},
          {"coat attention", 64, "attention|e4m3 1x16|e4m3 1x16", 1},
          {"coat", 64, "rotary positions|bf16|bf16|q, k, v bf16", 1},
          {"coat attention", 64, "rotary positions|bf16|e4m3 1x16|q, k, v e4m3 1x16", 1},
          {"coat", 64, "bf16, stochastic", 0},
          {"coat master", 64, "bf16, stochastic", 1},
          {"coat", 64, "bf16 + 16 bits = fp32|bf16 + 16 bits = fp32", 1},
          {"coat", 64, "falls back", 0},
          {"coat", 65, "falls back", 6},  // four linear layers, and dgrad and wgrad of their backward
          {"coat", 65, "falls back)|e", 0}}) {
        INFO(std::string(flags), " ", T, " ", std::string(part));
        int found = 0;
        for (const auto& [of_step, operators] :
             precision_plan(setup_of(flags, find_row(models(), "llama-2-7b", ""), 1, T)))
            for (const Operator& o : operators)
                found += contains(o.name + "|" + o.reads + "|" + o.writes + "|" + o.saves, part);
        CHECK(found == rows);
    }
}

TEST_CASE("gradients_offset: no gradient is written where saved activations are still needed") {
    for (const ModelConfig& model : models())
        for (const Recipe& recipe : recipes())
            // Few tokens: gradients take more than the activations of a layer; many: less.
            for (const auto& [T, accumulate] : {std::pair{72, 1}, {2048, 1}, {72, 2}})
                for (const auto& [rank, ranks] : {std::pair{0, 1}, {0, 2}, {1, 2}}) {
                    Setup s{model, recipe, find_row(optimizers(), recipe.optimizer, ""), 2, T, accumulate};
                    if (s.config.V == 0) s.config.V = 256;
                    s.rank = rank, s.ranks = ranks;
                    INFO(model.name, " ", std::string(recipe.name), " ", T, " ", accumulate, " ", rank);
                    const std::vector<Param> params = parameters(s.config);
                    const std::vector<ShardPlace> shards = shard_places(s);
                    const int64_t begin = gradients_offset(s), layer_bytes = saved_layer_bytes(s);
                    for (size_t i = 0; i < params.size(); i++) {
                        const Param& p = params[i];
                        const int64_t first = begin + shards[i].at * info(gradient_format(s)).bytes;
                        const bool layer = p.name.compare(0, 7, "layers.") == 0;
                        const bool last = p.name == "positions" || (p.name == "embedding" && !s.config.tied);
                        // When p's gradient is written, the activations of this many layers are still needed.
                        const int64_t needed = layer  ? std::stoll(p.name.substr(7)) + 1
                                               : last ? 0
                                                      : s.config.L;
                        REQUIRE(first >= (accumulate > 1 ? s.config.L : needed) * layer_bytes);
                    }
                }
}

TEST_CASE("head_sum_apart: a BF16 gradient of the head is rounded at most four times") {
    struct {
        int64_t batch, accumulate, ranks;
        bool tied, in_fp32;
    } const cases[] = {
        {8, 1, 1, false, false}, {10, 1, 1, false, true},  // a piece of 2 x 2048 tokens is one rounding
        {6, 1, 1, true, false},  {8, 1, 1, true, true},    // and the embedding's gradient one more
        {4, 2, 1, false, false}, {4, 3, 1, false, true},  {4, 4, 1, false, true},  {4, 1, 2, false, false},
        {4, 1, 4, false, true},  {2, 4, 1, false, false}, {4, 5, 1, false, false},  // all gradients are FP32
    };
    for (const auto& [batch, accumulate, ranks, tied, in_fp32] : cases) {
        INFO(batch, " ", accumulate, " ", ranks, " ", tied);
        Setup s = setup_of("bf16", find_row(models(), "llama-2-7b", ""), batch, 2048, accumulate);
        s.config.tied = tied, s.ranks = ranks;
        CHECK(head_sum_apart(s) == in_fp32);
    }
}

TEST_CASE("validate: a run at each limit is accepted, and one beyond it refused by the name of the flag") {
    struct Row {
        const char* run;
        int64_t T, B, accumulate, ranks;
        const char* refused = "";
    };
    ModelConfig c = tiny_config(LLAMA, true);
    c.max_T = 256, c.window = 200;
    for (const auto& [run, T, B, accumulate, ranks, refused] :
         {Row{"coat", 200, 1, 9, 9},
          {"coat", 201, 1, 1, 1, "use at most --seq 200."},
          {"coat", 128, 65535, 1, 1},
          {"coat", 129, 65535, 1, 1, "--batch 65535"},
          {"coat", 1, 65536, 1, 1, "--batch 65536"},
          {"fp32 attention", 16, 1, 1, 1, "--attention groups"},
          {"fp32 master", 16, 1, 1, 1, "--master none"},
          {"coat gradients", 16, 9, 1, 9},
          {"coat gradients", 16, 1, 2, 1, "use --accumulate 1"},
          {"coat moments fp8lm", 16, 9, 9, 1},
          {"coat moments fp8lm", 16, 1, 1, 2, "--optimizer fp8lm"}}) {
        INFO(std::string(run), " ", T, " ", B, " ", accumulate, " ", ranks);
        Setup s = setup_of(run, c, B, T, accumulate);
        s.ranks = ranks;
        const std::string error = error_of([&] { validate(s); });
        CHECK(contains(error, refused));
        CHECK(error.empty() == (*refused == 0));
    }
    c.NH = c.NKV = 1 << 13, c.head_size = 128;  // the product is bounded, not only each factor
    CHECK_NOTHROW(validate(c));
    c.NH = c.NKV = 1 << 14;
    CHECK_THROWS_AS(validate(c), Error);
}

TEST_CASE("flops_per_token: GEMMs, the head and causal attention; peak_tflops by the name of the GPU") {
    // Llama-2-7B: 4 C^2 + 3 C F weights in each of 32 layers, and the head; attention over 2048 tokens.
    const ModelConfig& llama = find_row(models(), "llama-2-7b", "--model");
    const double weights = 32 * (4 * 4096.0 * 4096 + 3 * 4096.0 * 11008) + 32000 * 4096.0;
    CHECK(flops_per_token(llama, 2048) == 6 * weights + 6 * 32 * 2048 * 4096.0);
    // GPT-2: the head is the embedding, and positions are looked up.
    const ModelConfig& gpt2 = find_row(models(), "gpt2", "--model");
    CHECK(flops_per_token(gpt2, 1024) == 6 * (12 * 12 * 768.0 * 768 + 50257 * 768.0) + 6 * 12 * 1024 * 768.0);
    CHECK((peak_tflops("NVIDIA H100 80GB HBM3", true) == 1979 &&
           peak_tflops("NVIDIA GH200 480GB", false) == 989));
    CHECK((peak_tflops("NVIDIA H100 PCIe", false) == 756 &&
           peak_tflops("NVIDIA GeForce RTX 4090", true) == 330));
    CHECK(peak_tflops("NVIDIA A100-SXM4-80GB", false) == 0);
}

TEST_CASE(
    "recipe_on_gpu: FP8 GEMMs where the GPU has them; rows, blocks and other groups are refused elsewhere") {
    const std::tuple<const char*, int, const char*> rows[] = {
        {"coat", 80, "bf16"},        {"coat", 86, "bf16"},           {"coat", 89, "e4m3 tensor"},
        {"te", 120, "e4m3 tensor"},  {"rowwise", 86, "bf16"},        {"rowwise", 89, ""},
        {"rowwise", 90, "e4m3 row"}, {"deepseek", 90, "e4m3 1x128"}, {"deepseek", 100, ""}};
    for (const auto& [name, capability, x] : rows) {
        INFO(std::string(name), " ", capability);
        std::string ours;
        try {
            ours = recipe_on_gpu(find_row(recipes(), name, "--recipe"), capability).x.text();
        } catch (const Error&) {
        }
        CHECK(ours == x);
    }
    for (Quant Recipe::*saved : {&Recipe::nonlinear, &Recipe::attention}) {
        Recipe r = find_row(recipes(), "coat", "--recipe");
        (r.*saved) = {Format::E4M3, {1, 32}, Format::BF16};
        CHECK_THROWS_AS(recipe_on_gpu(r, 90), Error);
    }
}
