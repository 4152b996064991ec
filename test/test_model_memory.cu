// test_model_memory.cu - the memory plan of the GPU: its layout and its total, and the errors when memory or
// a GPU is missing.
#include <cmath>
#include <string>

#include "../gpu/attention.cuh"
#include "../gpu/gemm.cuh"
#include "../gpu/layers.cuh"
#include "../plan.h"
#include "gpu.h"
#include "gpu_models.h"
#include "random.h"
#include "tiny.h"

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
        const GpuFacts facts{gpu::multiprocessors()};
        const double planned = double(total_bytes(gpu_memory_plan(setup, facts)) - GPU_CONTEXT);
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
    CHECK(gpu_layout(setup, GpuFacts{}).total <= int64_t(free));
    setup.B++;
    CHECK(gpu_layout(setup, GpuFacts{}).total + (int64_t(512) << 20) > int64_t(free));
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

TEST_CASE(
    "gpu_layout: live buffers do not overlap, gradients spare saved activations, and the plan adds up") {
    for (const char* recipe : RECIPES)
        for (const ModelConfig& model : models())
            for (const auto& choice :
                 {std::pair{1, ""}, std::pair{2, ""}, std::pair{1, "lean"}}) {
                const int accumulate = choice.first;
                ModelConfig config = model;
                if (config.V == 0) config.V = 256;
                Setup setup = tiny_setup(config, recipe, optimizer_of(recipe), 2,
                                         std::min<int64_t>(config.max_T, 1000));
                setup.accumulate = accumulate;
                if (setup.recipe.compute == Format::BF16) setup = with_mode(setup, choice.second);
                GpuFacts facts;
                facts.cache_fp8_weights = accumulate > 1;
                if (gpu_available()) facts.multiprocessors = gpu::multiprocessors();
                const GpuLayout layout = gpu_layout(setup, facts);
                INFO(config.name, " ", std::string(recipe), " ", accumulate);
                CHECK(total_bytes(gpu_memory_plan(setup, facts)) == layout.total + GPU_CONTEXT);
                const AttentionShape shape = attention_shape(config, setup.B, setup.T, setup.recipe.compute);
                const int64_t attention = static_cast<int64_t>(attention_workspace(shape));
                CHECK(layout.work[static_cast<int>(Work::AttentionScratch)].bytes ==
                      round_up(attention, GPU_ALIGNMENT));
                if (gpu_available())  // the workspace of norms depends on the number of multiprocessors
                    CHECK(layout.work[static_cast<int>(Work::NormPartials)].bytes >=
                          static_cast<int64_t>(gpu::norm_backward_workspace(config.C)));
                for (int i = 0; i < static_cast<int>(Work::Count); i++) {
                    const Place& a = layout.work[i];
                    CHECK(a.offset % GPU_ALIGNMENT == 0);
                    CHECK(a.offset >= layout.final_norm_input.offset + layout.final_norm_input.bytes);
                    CHECK(a.offset + a.bytes <= layout.total);
                    for (int j = 0; j < i; j++) {
                        const Place& b = layout.work[j];
                        // Buffers up to CachedWeights are live during the whole step. Later ones may share
                        // memory.
                        if (j > static_cast<int>(Work::CachedWeights)) continue;
                        if (a.bytes == 0 || b.bytes == 0) continue;
                        CHECK((a.offset + a.bytes <= b.offset || b.offset + b.bytes <= a.offset));
                    }
                }
                if (!setup.keep_gradients) continue;
                const std::vector<Param> params = parameters(config);
                for (size_t i = 0; i < params.size(); i++) {
                    const Param& p = params[i];
                    const int64_t first = layout.gradients[i];  // byte
                    const bool layer = p.name.compare(0, 7, "layers.") == 0;
                    const bool last = p.name == "positions" || (p.name == "embedding" && !config.tied);
                    // When p's gradient is written, the activations of this many layers are still needed.
                    const int64_t needed = layer ? std::stoll(p.name.substr(7)) + 1 : last ? 0 : config.L;
                    const int64_t layers = accumulate > 1 ? config.L : needed;
                    CHECK(first >= layout.saved.offset + layers * layout.layer_bytes);
                }
            }
}
