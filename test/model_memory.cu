// model_memory.cu - GPU memory of a run: the dry run, the total, and errors if memory or a GPU is missing.
#include <ctime>
#include <cuda_runtime.h>

#include "../gpu/gemm.h"
#include "../gpu/parameter_tensors.h"
#include "../program/plan.h"
#include "help/files.h"
#include "help/model.h"

using namespace coat;
using namespace coat::test;

namespace coat::test {
int number_of_gpus() {  // for help/ranks.h
    int n = 0;
    return cudaGetDeviceCount(&n) == cudaSuccess ? n : 0;
}
static int64_t free_memory() {
    size_t free = 0, total = 0;
    gpu::check(cudaMemGetInfo(&free, &total), "Asking for the GPU's memory failed");
    return int64_t(free);
}
}  // namespace coat::test

GPU_MODEL_TEST("check: a CUDA error is reported once") {
    void* none = nullptr;
    CHECK_THROWS_AS(gpu::check(cudaMalloc(&none, size_t(1) << 60), "Allocating an exabyte failed"), Error);
    CHECK(cudaGetLastError() == cudaSuccess);
}

TEST_CASE("Arena: allocations are aligned and follow each other; a Scope gives back what is in it") {
    gpu::Arena arena(0);  // a dry run
    CHECK(arena.allocate(0) == arena.begin());
    CHECK(arena.allocate<float>(1) == static_cast<void*>(arena.begin()));
    uint8_t* const second = arena.allocate(GPU_ALIGNMENT + 1);
    CHECK(second == arena.begin() + GPU_ALIGNMENT);
    uint8_t* third = nullptr;
    {
        const gpu::Arena::Scope scope(arena);
        third = arena.allocate(10 * GPU_ALIGNMENT);
        CHECK(third == second + 2 * GPU_ALIGNMENT);
        {
            const gpu::Arena::Scope inner(arena);
            arena.allocate(5);
        }
        CHECK(arena.allocate(5) == third + 10 * GPU_ALIGNMENT);  // where the inner scope had its 5 bytes
    }
    CHECK(arena.allocate(1) == third);
    CHECK(arena.peak() == 14 * GPU_ALIGNMENT);  // at the end of the scope, though less is in use now
}

TEST_CASE("Arena: a Scope that ended early gives back nothing of what was allocated after it") {
    gpu::Arena arena(0);
    uint8_t *first = nullptr, *later = nullptr;
    {
        gpu::Arena::Scope scope(arena);
        first = arena.allocate(1);
        scope.end();
        later = arena.allocate(1);
    }
    CHECK(later == first);
    CHECK(arena.allocate(1) == later + GPU_ALIGNMENT);
}

GPU_MODEL_TEST("memory plan: equals what the driver reports within 2%") {
    // CUDA loads kernels at their first use: here, with one step of a small model of each recipe.
    const std::vector<const char*> runs = {"bf16", "coat lean", "te", "rowwise", "deepseek"};
    for (const char* run : runs) Training(make_gpu_model, settings_of(run, wide_heads(true), 2, 64)).step();
    ModelConfig config = find_row(known_models(), "llama-30m", "--model");
    config.V = 256;
    for (const char* run : runs) {
        const RunSettings settings = settings_of(run, config, 64, 1024);
        const int64_t before = free_memory();
        Training gpu(make_gpu_model, settings);
        gpu.losses(1);
        const double planned = double(total_bytes(gpu_memory_plan(settings)) - GPU_CONTEXT);
        const double used = double(before - free_memory());
        MESSAGE(std::string(run), ": planned ", planned / 1e6, " MB, used ", used / 1e6, " MB");
        CHECK(std::fabs(used - planned) <= 0.02 * planned);
    }
}

GPU_MODEL_TEST("make_gpu_model: too little memory is an error before any step") {
    const RunSettings settings =
        settings_of("coat", find_row(known_models(), "llama-2-7b", "--model"), 1 << 11, 2048);
    const std::string message = error_of([&] { make_gpu_model(settings); });
    INFO(message);
    CHECK(contains(message, "needs"));
    CHECK(contains(message, "free"));
}

TEST_CASE("make_gpu_model: one sentence says why where no GPU can be used" *
          doctest::skip(select_gpu().empty())) {
    const std::string why = select_gpu();
    CHECK(why.find(": ") != std::string::npos);
    const std::string message = error_of([] { make_gpu_model(settings_of("coat")); });
    CHECK(message == "--device gpu cannot be used: " + why + ".");
}

// Every recipe and mode, with one and with two micro-batches, and with several ranks.
template <class Check> void for_all_settings(Check check) {
    for (const Recipe& recipe : recipes())
        for (const Architecture& arch : {LLAMA, QWEN3, GPT2})
            for (const std::string flags : {"", " attention", " master", " gradients", " lean"}) {
                RunSettings settings =
                    settings_of(recipe.name + flags, tiny_config(arch, arch.other_biases), 3, 20);
                if (!supported(settings)) continue;
                INFO(text(settings));
                check(settings);
                settings.T = 48;  // the tokens of a micro-batch are a multiple of 16
                check(settings);
                settings.micro_batches_per_rank = 2;
                if (settings.keep_gradients) check(settings);
            }
}

TEST_CASE("arena_bytes: a dry run needs no GPU and the plan shows what operators need only while they run") {
    for_all_settings([](RunSettings settings) {
        for (const int64_t ranks : {1, 2, 5}) {
            settings.ranks = ranks;
            settings.rank = ranks - 1;
            if (!supported(settings)) continue;
            const std::vector<MemoryRow> plan = gpu_memory_plan(settings);
            const int64_t bytes = arena_bytes(settings, should_cache_weights(settings));
            CHECK(total_bytes(plan) == bytes + GPU_CONTEXT + page_table_bytes(ranks, bytes));
            // At least cuBLASLt's scratch, and the logits.
            const int64_t logits = settings.B * settings.T * settings.config.padded_V() * 2;
            CHECK(total_bytes(plan, Category::Workspace) > int64_t(gpu::CublasGemms::SCRATCH_BYTES) + logits);
        }
    });
}

// The bytes of what lasts for the run, by the row of --plan to which they belong. A tensor ends where the
// next one begins: `begins` has where each begins, with its row; "": in no row of its own.
static std::map<std::string, int64_t> allocated_bytes(const RunSettings& s) {
    gpu::GpuContext context(s, 0);  // a dry run
    const gpu::MemoryMap m = gpu::allocate_memory(context);
    std::map<const void*, std::string> begins{{m.owned_weights.values, "weights"},
                                              {m.adamw_params, ""},
                                              {m.scale_entries, ""},
                                              {m.histories, "histories and delayed scales"},
                                              {m.moments_begin, ""},
                                              {m.saved_activations, "activations"},
                                              {m.tokens, ""},
                                              {m.final_norm_input_or_dresidual, "final norm input"},
                                              {m.norm_backward_workspace, ""}};
    if (m.owned_weights.remainders) begins[m.owned_weights.remainders] = "remainder of the FP32 masters";
    auto name_moments = [&](const std::vector<gpu::MomentRef>& moments, const std::string& name) {
        for (const gpu::MomentRef& moment : moments) {
            begins[moment.data] = name;
            if (moment.max) begins[moment.max] = "max and k of moments";
            if (moment.k) begins[moment.k] = "max and k of moments";
        }
    };
    name_moments(m.first_moments, "first moments");
    name_moments(m.second_moments, "second moments");
    if (!s.keep_gradients || s.ranks > 1) {
        // The gradients of one micro-batch. In a run of several ranks they are working memory
        const void* const first =
            std::min_element(m.gradients_by_bucket.begin(), m.gradients_by_bucket.end())[0];
        begins[first] = s.keep_gradients ? "" : "gradients";
    }
    std::map<std::string, int64_t> bytes;
    for (auto at = begins.begin(); std::next(at) != begins.end(); at++)
        bytes[at->second] +=
            static_cast<const uint8_t*>(std::next(at)->first) - static_cast<const uint8_t*>(at->first);
    return bytes;
}

// --plan counts these bytes without a GPU, because it also runs in programs that were built without nvcc.
static void check_rows_of_plan(const RunSettings& s) {
    std::map<std::string, int64_t> allocated = allocated_bytes(s);
    // The delayed scales are among all scales, which have no row
    for (const StateTensor& t : delayed_scaling_tensors(s.config, s.recipe))
        if (t.name.ends_with(".scale")) allocated["histories and delayed scales"] += t.total_bytes();
    std::map<std::string, int64_t> planned;
    for (const MemoryRow& row : gpu_memory_plan(s)) {
        if (row.category == Category::Workspace) continue;
        std::string name = "activations";  // and gradients, which lie over them
        for (const auto& [other, bytes] : allocated)
            if (!other.empty() && row.name.starts_with(other)) name = other;
        planned[name] += row.bytes;
    }
    // More is allocated to align tensors, and for what ranks cannot share evenly
    const int64_t most_tensors = 4 * std::ssize(parameters(s.config));
    for (const auto& [name, bytes] : planned) {
        INFO(name);
        CHECK(allocated[name] >= bytes);
        CHECK(allocated[name] <= bytes + bytes / 1000 + most_tensors * GPU_ALIGNMENT);
    }
}

TEST_CASE("gpu_memory_plan: each row has the bytes that the GPU takes for it") {
    for (const char* model : {"llama-30m", "gpt2", "qwen3-0.6b"})
        for (const Recipe& recipe : recipes())
            for (const std::string flags : {"", " attention", " master", " gradients", " lean"})
                for (const int64_t ranks : {1, 3}) {
                    RunSettings s =
                        settings_of(recipe.name + flags, find_row(known_models(), model, "--model"), 2, 1024);
                    s.ranks = ranks;
                    s.rank = ranks - 1;
                    if (!supported(s)) continue;
                    INFO(text(s), ", ", ranks, " ranks");
                    check_rows_of_plan(s);
                }
}

// Of this process: other programs on the same machine do not count.
static double processor_seconds() { return double(std::clock()) / CLOCKS_PER_SEC; }

TEST_CASE("arena_bytes: a model of 4096 layers takes seconds and not minutes") {
    RunSettings s = settings_of("coat", tiny_config(LLAMA, true), 1, 16);
    s.config.L = 4096;
    s.config.C = s.config.F = 64;
    s.config.NH = s.config.NKV = 4;
    require_supported(s);
    const double before = processor_seconds();
    CHECK(arena_bytes(s, false) > total_bytes(memory_plan(s)));
    CHECK(processor_seconds() - before < 20);
}

TEST_CASE("arena_bytes: the host's work for 4096 ranks grows with their number and not with its square") {
    RunSettings s = settings_of("coat", find_row(known_models(), "llama-2-7b", "--model"), 1, 2048);
    s.ranks = 4096;
    const double before = processor_seconds();
    CHECK(arena_bytes(s, false) > 0);
    CHECK(processor_seconds() - before < 20);
}

TEST_CASE("arena_bytes: a matrix of more than 2^30 elements fits the grids of kernels") {
    RunSettings s = settings_of("coat", find_row(known_models(), "llama-2-7b", "--model"), 1, 2048);
    s.config.L = 1;
    s.config.NH = s.config.NKV = 128;
    s.config.C = 1 << 14;
    s.config.F = 3 << 15;  // gate and up have 3 * 2^30 elements
    for (const int64_t ranks : {1, 2}) {
        s.ranks = ranks;
        s.rank = ranks - 1;
        require_supported(s);
        CHECK(arena_bytes(s, false) > s.config.F * s.config.C);
    }
}

GPU_MODEL_TEST("arena_bytes: is exactly what a model needs in every recipe and mode") {
    for_all_settings([](const RunSettings& settings) {
        const bool cached = should_cache_weights(settings);
        const int64_t bytes = arena_bytes(settings, cached);
        Training t(make_reference_model, settings);
        t.model = make_gpu_model_of_size(settings, bytes - GPU_ALIGNMENT, cached);
        CHECK_THROWS_AS(t.step(), Error);
        t.model = make_gpu_model_of_size(settings, bytes, cached);
        CHECK(std::isfinite(t.step().loss));
        CHECK(std::isfinite(t.validation_loss()));
        t.next_logits(1);
        t.next_logits(settings.T);
        CHECK_NOTHROW(t.report());
    });
}
