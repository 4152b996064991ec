// test_plan_validate.cpp - plan.cpp: which setups are supported, on any device and on a GPU, and what the
// errors say about the others.
#include <doctest/doctest.h>

#include "../plan.h"
#include "../ranks.h"
#include "help/program.h"

using namespace coat;
using namespace coat::test;

TEST_CASE("why_unsupported: moment formats without a GPU kernel are rejected, the others accepted") {
    for (const OptimizerFormat& optimizer : optimizers()) CHECK(why_unsupported(optimizer).empty());
    OptimizerFormat mixed = find_row(optimizers(), "coat", "");
    mixed.v = Format::F16;
    CHECK(why_unsupported(mixed) ==
          "--optimizer coat has fp16 moments in groups of 128, which only the CPU supports; use --optimizer "
          "fp8lm, or --device cpu.");
    OptimizerFormat per_tensor = find_row(optimizers(), "fp8lm", "");
    for (Format f : {Format::F32, Format::BF16, Format::F16, Format::E4M3, Format::E5M2}) {
        per_tensor.m = per_tensor.v = f;
        CHECK(why_unsupported(per_tensor).empty());
    }
    per_tensor.expand = true;
    CHECK(why_unsupported(per_tensor).find("--optimizer fp8lm has one scale per tensor with expansion") == 0);
    OptimizerFormat flushing = find_row(optimizers(), "fp8", "");
    flushing.keep_positive = false;
    CHECK(why_unsupported(flushing).find("--optimizer fp8 rounds small second moments") == 0);
}

TEST_CASE("why_unsupported: scaling that a GPU's GEMMs do not support is rejected; Hopper supports all") {
    for (const Recipe& r : recipes()) {
        const std::string name = r.name;
        CHECK(why_unsupported(r).empty());
        for (int capability : {89, 100, 120})
            CHECK(why_unsupported(r, capability).empty() == (name != "rowwise" && name != "deepseek"));
        CHECK(why_unsupported(recipe_on_gpu(r, false), 80).empty());
    }
    Recipe blocks_4x4 = find_row(recipes(), "coat", "");
    blocks_4x4.nonlinear = {Format::E4M3, {4, 4}};
    CHECK(why_unsupported(blocks_4x4, 90) ==
          "--recipe coat saves e4m3 4x4 tensors with compute dtype bf16, which only the CPU supports; save "
          "e4m3 1x16 with compute dtype bf16, or the compute dtype, or use --device cpu.");
    Recipe groups = find_row(recipes(), "fp32", "");
    groups.nonlinear = Q_GROUP;
    CHECK(why_unsupported(groups, 90).find("--recipe fp32 saves e4m3 1x16 tensors with compute dtype fp32") ==
          0);
    CHECK(why_unsupported(find_row(recipes(), "rowwise", ""), 89) ==
          "--recipe rowwise has e4m3 row operands, which need a GPU of compute capability 9.0, but this one "
          "has 8.9; use --recipe colossal, or --device cpu.");
}

TEST_CASE("plan: formats for which there is no GPU kernel are rejected with a remedy") {
    auto rejected = [](const char* name, const std::string& reason, auto change) {
        Recipe r = find_row(recipes(), name, "");
        change(r);
        const std::string sentence = why_unsupported(r);
        CAPTURE(reason);
        CAPTURE(sentence);
        CHECK(sentence.find(std::string("--recipe ") + name + " ") == 0);
        CHECK(contains(sentence, reason));
        CHECK(sentence.find("--device cpu.") == sentence.size() - 13);
    };
    rejected("fp32", "e4m3 tensor operands with compute dtype fp32",
             [](Recipe& r) { r.x = r.w = Q_E4M3, r.g = Q_E5M2; });
    rejected("coat", "operands with compute dtype fp32", [](Recipe& r) { r.compute = Format::F32; });
    rejected("coat", "saves e5m2 1x16 tensors", [](Recipe& r) { r.nonlinear.format = Format::E5M2; });
    rejected("coat", "saves e4m3 tensor tensors", [](Recipe& r) { r.attention = Q_E4M3; });
    rejected("bf16", "saves fp32 tensors with compute dtype bf16", [](Recipe& r) { r.nonlinear = Q_F32; });
    rejected("fp32", "saves e4m3 1x16 tensors", [](Recipe& r) { r.attention = Q_GROUP; });
    for (const Quant& q : {Q_E4M3, Q_E5M2}) {  // inputs and gradients may be either
        Recipe r = find_row(recipes(), "coat", "");
        r.x = q;
        CHECK(why_unsupported(r).empty());
        r.x = Q_E4M3, r.g = q;
        CHECK(why_unsupported(r).empty());
    }
}

TEST_CASE("validate: heads x head size is bounded, not only each factor") {
    ModelConfig c = find_row(models(), "gpt2", "");
    c.NH = c.NKV = 1 << 12, c.head_size = 256;
    CHECK_NOTHROW(validate(c));
    c.NH = c.NKV = 1 << 15;  // the rows of a weight would exceed the blocks of a grid
    CHECK_THROWS_AS(validate(c), Error);
}

TEST_CASE("validate: a weight of a linear layer that one kernel launch cannot read is rejected with a cure") {
    Setup s{find_row(models(), "llama-2-7b", ""), find_row(recipes(), "coat", ""),
            find_row(optimizers(), "coat", ""), 1, 16};
    s.config.C = 1 << 14, s.config.NH = s.config.NKV = 128;
    s.config.F = 32752;  // gate_up has 16 rows fewer than 65,536
    CHECK_NOTHROW(validate(s));
    s.config.F = 32768;
    check_error([&] { validate(s); }, "llama-2-7b has 1073741824 elements in layers.0.gate_up",
                "at least --ranks 2");
    s.ranks = 2;  // a rank keeps half of it
    CHECK_NOTHROW(validate(s));
    s.config.F = 1 << 16;
    check_error([&] { validate(s); }, "2147483648", "at least --ranks 3");
    s.recipe = find_row(recipes(), "fp32", "");  // needs no amax of weights
    CHECK_NOTHROW(validate(s));
}

TEST_CASE("validate: as many micro-batches a step as one rank could resume") {
    Setup s{find_row(models(), "llama-tiny", ""), find_row(recipes(), "coat", ""),
            find_row(optimizers(), "coat", ""), 1, 16};
    s.config.V = 256, s.ranks = 2, s.accumulate = 1 << 19;
    CHECK_NOTHROW(validate(s));
    s.accumulate++;
    check_error([&] { validate(s); }, "--accumulate 524289 on 2 ranks", "use a smaller --accumulate");
}

TEST_CASE("validate: a recipe whose GEMMs Hopper does not support is rejected in one sentence") {
    auto why = [](const Recipe& r) {
        const Setup s{find_row(models(), "gpt2", ""), r, find_row(optimizers(), "fp32", ""), 1, 128};
        return error_of([&] { validate(s); });
    };
    auto row = [](const char* name) { return find_row(recipes(), name, ""); };
    for (const Recipe& r : recipes()) CHECK(why(r) == "");
    const Quant e5m2_vector{Format::E5M2, PER_1x128};
    std::vector<std::pair<Recipe, std::string>> rejected;
    auto change = [&](const char* name, const std::string& reason, auto what) {
        rejected.push_back({row(name), reason});
        what(rejected.back().first);
    };
    change("deepseek", "fprop with operands e4m3 128x128 and e4m3 128x128",
           [](Recipe& r) { r.x = Q_128x128; });
    change("deepseek", "dgrad with operands e4m3 128x128 and e4m3 128x128",
           [](Recipe& r) { r.g = Q_128x128; });
    change("deepseek", "two E5M2", [&](Recipe& r) { r.x = r.g = e5m2_vector; });
    change("colossal", "two E5M2", [](Recipe& r) { r.w = Q_E5M2; });
    for (int gemm = 0; gemm < 3; gemm++)
        change("deepseek", "need exact accumulation", [&](Recipe& r) { r.sums.fast[gemm] = true; });
    change("rowwise", "delayed scaling needs one scale per tensor",
           [](Recipe& r) { r.scaling = Scaling::Delayed; });
    change("rowwise", "row by row", [](Recipe& r) { r.w = Q_E4M3; });
    change("colossal", "fprop with operands e4m3 tensor and e4m3 1x16", [](Recipe& r) {
        r.w = {Format::E4M3, PER_GROUP};
    });
    change("colossal", "FP32 scales", [](Recipe& r) { r.x.scale_format = Format::BF16; });
    change("colossal", "both operands must be FP8", [](Recipe& r) { r.g = Q_BF16; });
    change("te", "use 1 step or more", [](Recipe& r) { r.history = 0; });
    for (const auto& [recipe, reason] : rejected) {
        const std::string sentence = why(recipe);
        CAPTURE(reason);
        CAPTURE(sentence);
        CHECK(contains(sentence, reason));
        CHECK(sentence.find(std::string("Recipe ") + recipe.name) == 0);
        CHECK((!sentence.empty() && sentence.back() == '.'));
    }
    Recipe e5m2 = row("deepseek");  // not in the table, but supported by Hopper
    e5m2.g = e5m2_vector;
    CHECK(why(e5m2) == "");
}

TEST_CASE("why_unsupported: says why a GPU cannot be used, and what to do") {
    const GpuFound good{13000, 13000, false, "", 1, 90, true};
    CHECK(why_unsupported(good).empty());
    auto message = [&](auto change) {
        GpuFound found = good;
        change(found);
        return why_unsupported(found);
    };
    const std::pair<std::string, const char*> cases[] = {
        {message([](GpuFound& f) { f.driver = 0; }), "no NVIDIA driver was found: install one"},
        {message([](GpuFound& f) { f.driver = 12040, f.driver_too_old = true; }),
         "supports CUDA 12.4, but this program needs 13.0: update the driver"},
        {message([](GpuFound& f) { f.error = "unknown error"; }),
         "CUDA does not start (unknown error): check nvidia-smi"},
        {message([](GpuFound& f) { f.gpus = 0; }), "no NVIDIA GPU was found: check"},
        {message([](GpuFound& f) { f.capability = 75; }),
         "compute capability 7.5, but BF16 needs 8.0: use a newer one, or --device cpu"},
        {message([](GpuFound& f) { f.capability = 100, f.kernels_fit = false; }),
         "compute capability 10.0: run make clean, then make GPU_ARCH=100a"},
        {message([](GpuFound& f) { f.capability = 86, f.kernels_fit = false; }), "make GPU_ARCH=86"},
    };
    for (const auto& [sentence, expected] : cases) {
        INFO(sentence);
        CHECK(contains(sentence, expected));
    }
    // As an old driver reports it.
    CHECK(contains(why_unsupported({12040, 13000, true, "", 0, 0, false}), "update the driver"));
}
