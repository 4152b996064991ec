// bench.cu (tests) - dev/bench_operators.h beside model.cu: what its operators launch, each as often as it
// says, is what a step launches. Both run without a GPU: in a dry run (gpu/cuda.h).
#include <set>

#include "../../dev/bench_operators.h"
#include "../help/model.h"

using namespace coat;
using namespace coat::dev;
using namespace coat::test;

using Counts = std::map<std::string, int64_t>;

// What run() puts on the stream DRY_RUN.
static Counts counts_of(const std::function<void()>& run) {
    Counts counts;
    gpu::dry_run_counts = &counts;
    run();
    gpu::dry_run_counts = nullptr;
    return counts;
}

static Counts counts_of_step(const RunSettings& s) {
    const std::unique_ptr<Model> model = make_gpu_model_of_size(s, 0, should_cache_weights(s), nullptr);
    const int64_t n = s.B * s.T;
    Tokens tokens;
    for (int64_t i = 0; i < s.micro_batches_per_rank; i++)
        for (const int32_t token : made_up_tokens(n, s.config.V)) tokens.push_back(token);
    return counts_of([&] { model->step(tokens.data(), tokens.data(), {1, 1e-4f}); });
}

static Counts counts_of_operators(const RunSettings& s) {
    std::map<std::string, double> sums;
    const Measure count = [&](const StepOperator& o, const std::function<void()>& run) {
        for (const auto& [name, times] : counts_of(run)) sums[name] += o.count * double(times);
    };
    float amax = 0;
    StepOperators(s, gpu::DRY_RUN, &amax, count);
    Counts counts;
    for (const auto& [name, sum] : sums) counts[name] = std::llround(sum);
    return counts;
}

TEST_CASE("bench: its operators launch what a step of model.cu launches") {
    // What the bench leaves out: small launches, and what only the first step does.
    const std::set<std::string> left_out = {
        "add_loss_sum",          "clear", "clear_weight_amaxes", "copy", "fill_rope_table", "record an event",
        "update_delayed_scales", "wait",  "write_loss_or_nan"};
    for (const char* model : {"tinyllama-1.1b", "gpt2", "qwen2.5-0.5b", "qwen3-0.6b"})
        for (const Recipe& recipe : recipes())
            for (const int micro_batches : {1, 2}) {
                RunSettings s =
                    settings_of(recipe.name, find_row(known_models(), model, ""), 8, 1024, micro_batches);
                s.recipe = recipe_on_gpu(recipe, 90);
                INFO(std::string(model), " ", std::string(recipe.name), " ", micro_batches);
                const Counts step = counts_of_step(s), bench = counts_of_operators(s);
                std::set<std::string> names;
                for (const Counts& counts : {step, bench})
                    for (const auto& [name, n] : counts) names.insert(name);
                for (const std::string& name : names) {
                    // Until the histories of delayed scaling have an amax, a step computes it.
                    const bool of_first_step =
                        name == "compute_amax" && recipe.scale_source == ScaleSource::Delayed;
                    if (left_out.count(name) || of_first_step) continue;
                    const auto count = [&](const Counts& c) { return c.count(name) ? c.at(name) : 0; };
                    CHECK_MESSAGE(count(bench) == count(step), name);
                }
            }
}
