// model_memory.cu - the memory of a run on the GPU: the dry run that finds it, its total, and the errors
// when memory or a GPU is missing.
#include <chrono>
#include <cmath>
#include <string>

#include "../gpu/gemm.cuh"
#include "../program/plan.h"
#include "help/gpu.h"
#include "help/gpu_models.h"
#include "help/random.h"
#include "help/tiny.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::gpu_models;

GPU_TEST_CASE("memory plan: equals what the driver reports, within 2%") {
    // CUDA loads kernels at their first use. One step of a small model of each recipe loads them before
    // memory is measured.
    for (const char* recipe : {"bf16", "coat", "coat-saved", "te", "rowwise", "deepseek"}) {
        Training small =
            training_on(make_gpu, tiny_setup(wide_heads(true), recipe, optimizer_of(recipe), 2, 64));
        losses(small, 1);
    }
    ModelConfig config = find_row(models(), "llama-30m", "--model");
    config.V = 256;
    for (const char* recipe : {"bf16", "coat", "coat-saved", "te", "rowwise", "deepseek"}) {
        const char* mode = recipe == std::string("coat") ? "lean" : "";
        const Setup setup = with_mode(tiny_setup(config, recipe, optimizer_of(recipe), 64, 1024), mode);
        size_t before = 0, after = 0, total = 0;
        succeeded(cudaMemGetInfo(&before, &total));
        Training gpu = training_on(make_gpu, setup);
        losses(gpu, 1);
        succeeded(cudaMemGetInfo(&after, &total));
        const double planned = double(total_bytes(gpu_memory_plan(setup)) - GPU_CONTEXT);
        const double used = double(before - after);
        MESSAGE(std::string(recipe), ": planned ", planned / 1e6, " MB, used ", used / 1e6, " MB");
        CHECK(std::fabs(used - planned) <= 0.02 * planned);
    }
}

GPU_TEST_CASE("make_gpu: too little memory is an error before any step, with the largest batch that fits") {
    Setup setup = tiny_setup(find_row(models(), "llama-2-7b", "--model"), "coat", "coat", 1 << 11, 2048);
    setup.config.V = 32000;
    std::string message;
    try {
        make_gpu(setup);
    } catch (const Error& error) {
        message = error.what();
    }
    INFO(message);
    CHECK(message.find("needs") != std::string::npos);
    CHECK(message.find("free") != std::string::npos);
    const size_t at = message.find("fits is ");
    if (at == std::string::npos) {
        CHECK(message.find("not even --batch 1 fits") != std::string::npos);
        return;
    }
    size_t free = 0, total = 0;
    succeeded(cudaMemGetInfo(&free, &total));
    setup.B = std::stoll(message.substr(at + 8));
    CHECK(arena_bytes(setup, false) <= int64_t(free));
    setup.B++;
    CHECK(arena_bytes(setup, false) + (int64_t(512) << 20) > int64_t(free));
}

TEST_CASE("make_gpu: where no GPU can be used, one sentence says why" * doctest::skip(gpu_available())) {
    const std::string why = why_no_gpu();
    CHECK(why.find(": ") != std::string::npos);
    std::string message;
    try {
        make_gpu(setup_of("coat"));
    } catch (const Error& error) {
        message = error.what();
    }
    CHECK(message == "--device gpu cannot be used: " + why + ".");
}

// Every recipe and mode, with one and with two micro-batches, and with several ranks.
template <class Check> void for_every_setup(Check check) {
    for (const char* recipe : RECIPES)
        for (const Architecture& arch : {LLAMA, QWEN2, GPT2})
            for (const char* mode : {"", "attention", "master", "gradients", "lean"}) {
                Setup setup = setup_of(recipe, arch, arch.bias, 3, 20);
                const bool any_recipe = !*mode || mode == std::string("gradients");
                if (setup.recipe.compute == Format::F32 && !any_recipe) continue;
                setup = with_mode(setup, mode);
                INFO(std::string(recipe), " ", std::string(arch.name), " ", std::string(mode));
                check(setup);
                setup.T = 48;  // the tokens of a micro-batch are a multiple of 16
                check(setup);
                setup.accumulate = 2;
                if (setup.keep_gradients) check(setup);
            }
}

TEST_CASE("arena_bytes: a dry run needs no GPU, and the plan shows what operators need only while they run") {
    for_every_setup([](Setup setup) {
        for (const int64_t ranks : {1, 2, 5}) {
            if (ranks > 1 && setup.optimizer.group == 0) continue;
            setup.ranks = ranks, setup.rank = ranks - 1;
            const std::vector<MemoryRow> plan = gpu_memory_plan(setup);
            const int64_t bytes = arena_bytes(setup, caches_weights(setup));
            CHECK(total_bytes(plan) == bytes + GPU_CONTEXT + page_tables(ranks, bytes));
            // At least cuBLASLt's scratch, and the logits.
            const int64_t logits = setup.B * setup.T * setup.config.padded_V() * 2;
            CHECK(total_bytes(plan, Category::Workspace) > int64_t(gpu::Gemms::SCRATCH) + logits);
        }
    });
}

TEST_CASE("arena_bytes: a model of 4096 layers takes seconds, not minutes") {
    Setup s = setup_of("coat", LLAMA, true, 1, 16);
    s.config.L = 4096;
    s.config.C = s.config.F = 64, s.config.NH = s.config.NKV = 4;
    validate(s);
    const auto before = std::chrono::steady_clock::now();
    CHECK(arena_bytes(s, false) > total_bytes(memory_plan(s)));
    CHECK(std::chrono::steady_clock::now() - before < std::chrono::seconds(20));
}

GPU_TEST_CASE("arena_bytes: is exactly what a model needs, in every recipe and mode") {
    for_every_setup([](const Setup& setup) {
        const bool cached = caches_weights(setup);
        const int64_t bytes = arena_bytes(setup, cached);
        CHECK_THROWS_AS(gpu_model(setup, bytes - GPU_ALIGNMENT, cached), Error);
        Training training(setup);
        training.model = gpu_model(setup, bytes, cached);
        CHECK(std::isfinite(training.step().loss));
        const int32_t *tokens = training.tokens.data(), *targets = training.targets.data();
        CHECK(std::isfinite(training.model->evaluate(tokens, targets)));
        Floats logits(static_cast<size_t>(setup.config.V));
        for (const int64_t n : {int64_t(1), setup.T}) training.model->next_logits(tokens, n, logits.data());
        CHECK(training.model->quantization(tokens, targets).kinds[0].elements >= 0);
    });
}
