// plan.cpp (tests) - what is known of a run before it starts: program/plan.h, gpu/gpu_model.h,
// gpu/memory_layout.h and gpu/extra_buffers.h.
#include "../gpu/extra_buffers.h"
#include "../program/plan.h"
#include "help/model.h"

using namespace coat;
using namespace coat::test;

static const ModelConfig& LLAMA_7B = find_row(known_models(), "llama-2-7b", "");

TEST_CASE("bucket_ranges: buckets are contiguous; only the embedding's bucket may have two matrices") {
    for (const Architecture& arch : {LLAMA, GPT2})
        for (bool tied : {true, false}) {
            const std::vector<Param> params = parameters(tiny_config(arch, tied));
            size_t next = 0;
            int64_t offset = 0;
            std::string matrices;  // how many each bucket has
            for (const BucketRange& bucket : bucket_ranges(params)) {
                CHECK((bucket.first_param == next && bucket.flat_offset == offset));
                CHECK(params[next].bucket == int64_t(matrices.size()));
                char count = '0';
                for (; next < bucket.end_param; next++) count += params[next].rows > 1;
                matrices += count;
                offset += bucket.elements;
            }
            CHECK(matrices == concat(arch.rope ? "1" : "2", "11111111", tied ? "0" : "1"));
            CHECK(
                (next == params.size() && offset == params.back().flat_offset + params.back().padded_size()));
        }
}

TEST_CASE("memory plan: delayed scaling adds its state; FP8 only in linear layers saves no activations") {
    for (const char* recipe : {"te", "colossal", "tensorwise", "rowwise", "deepseek"}) {
        const RunSettings s = settings_of(recipe, LLAMA_7B, 8, 2048), bf16 = bf16_baseline(s);
        // Of three operands of four linear layers, 1024 amaxes and a scale.
        const int64_t state = s.recipe.scale_source == ScaleSource::Delayed ? 32 * 4 * 3 * (1024 + 1) * 4 : 0;
        CHECK(total_bytes(memory_plan(s)) - total_bytes(memory_plan(bf16)) == state);
        CHECK(total_bytes(memory_plan(s), Category::Activations) ==
              8 * 2048 * (32 * saved_bytes_per_token_and_layer(s) + 2 * 4096));  // and the final norm's input
    }
}

TEST_CASE("memory plan: bytes of a parameter in each recipe and mode and optimizer by rank") {
    // Bytes of weights, with the rest of their masters, of gradients, and of the optimizer
    const std::tuple<const char*, double, double, double> rows[] = {
        {"fp32", 4, 4, 8},
        {"bf16 moments fp32", 4, 2, 8},
        {"coat", 4, 2, 2 + 16.0 / 128},  // max and k of the moment groups of two moments
        {"coat master", 2, 2, 2 + 16.0 / 128},
        {"bf16 moments fp8", 4, 2, 2 + 8.0 / 128},
        {"bf16 moments bf16", 4, 2, 4}};
    for (const auto& [run, weights, gradients, optimizer] : rows)
        for (const int64_t ranks : {1, 4}) {
            INFO(std::string(run), " ", ranks);
            RunSettings s = settings_of(run, LLAMA_7B, 1, 64);
            s.ranks = ranks;
            s.rank = ranks - 1;
            const std::vector<MemoryRow> plan = memory_plan(s);
            auto each = [&](Category c) {
                return double(total_bytes(plan, c)) * double(ranks) / double(parameter_count(s.config));
            };
            CHECK(each(Category::Weights) == doctest::Approx(weights).epsilon(1e-3));
            CHECK(each(Category::Gradients) == doctest::Approx(gradients).epsilon(1e-3));
            CHECK(each(Category::Optimizer) == doctest::Approx(optimizer).epsilon(1e-3));
        }
}

TEST_CASE("memory plan: each memory mode changes only its own rows by the stated size") {
    for (const ModelConfig& model : known_models())
        for (const char* recipe : {"bf16", "coat"}) {
            RunSettings s = settings_of(concat(recipe, " moments coat"), model, 3, 48);
            if (s.config.V == 0) s.config.V = 256;
            const ModelConfig& c = s.config;
            const int64_t qkv_and_output = c.qkv_cols() + c.q_cols();
            int64_t weights = 0, elements = 0, largest = 0, embedding = 0;
            for (const Param& p : parameters(c)) weights += p.size();
            for (const BucketRange& b : bucket_ranges(parameters(c))) {
                elements += b.elements;
                if (b.first_param == 0 && c.tied) embedding = b.elements;  // it lives from the head on
                else largest = std::max(largest, b.elements);
            }
            for (const auto& [mode, category, bytes] :
                 {std::tuple{"attention", Category::Activations,
                             3 * c.L * (48 * 2 * qkv_and_output - E4M3_PER_1x16.bytes(48, qkv_and_output))},
                  {"master", Category::Weights, 2 * weights},
                  {"gradients", Category::Gradients, 2 * (elements - largest - embedding)}}) {
                const RunSettings other = with_modes(s, mode), baseline = bf16_baseline(other);
                INFO(text(other));
                const std::vector<MemoryRow> by_default = memory_plan(s), plan = memory_plan(other);
                CHECK(total_bytes(by_default, category) - total_bytes(plan, category) == bytes);
                CHECK(total_bytes(by_default) - total_bytes(plan) == bytes);
                CHECK(total_bytes(memory_plan(baseline)) == total_bytes(memory_plan(bf16_baseline(s))));
            }
        }
}

TEST_CASE("precision plan: says what each memory mode changes and which linear layers cannot run in FP8") {
    // Rows of Llama-2-7B in which operator, reads, writes and saves have this part.
    for (const auto& [flags, T, part, rows] :
         {std::tuple{"coat", 64, "attention|e4m3 1x16|e4m3 1x16", 0},
          {"coat attention", 64, "attention|e4m3 1x16|e4m3 1x16", 1},
          {"coat", 64, "rotary positions|bf16|bf16|q, k, v bf16", 1},
          {"coat attention", 64, "rotary positions|bf16|e4m3 1x16|q, k, v e4m3 1x16", 1},
          {"coat attention", 64, "attention log-sum-exp fp32", 1},
          {"coat", 64, "bf16, stochastic", 0},
          {"coat master", 64, "bf16, stochastic", 1},
          {"coat", 64, "bf16 + 16 bits = fp32|bf16 + 16 bits = fp32", 1},
          {"coat", 64, "residual add (last layer: bf16)|bf16|bf16 and e4m3 1x16", 1},
          {"coat", 64, "norms (final norm: bf16)|e4m3 1x16, bf16", 1},
          {"bf16", 64, "last layer", 0},
          {"coat", 64, "falls back", 0},
          {"coat", 65, "falls back", 6},  // four linear layers, and dgrad and wgrad of their backward
          {"coat", 65, "falls back)|e", 0}}) {
        INFO(std::string(flags), " ", T, " ", std::string(part));
        int found = 0;
        for (const auto& [of_step, operators] : precision_plan(settings_of(flags, LLAMA_7B, 1, T)))
            for (const Operator& o : operators)
                found += contains(o.name + "|" + o.reads + "|" + o.writes + "|" + o.saves, part);
        CHECK(found == rows);
    }
}

TEST_CASE("precision plan: backward reads gradients and each moment is stored as its own format says") {
    RunSettings s = settings_of("coat", LLAMA_7B, 1, 64);
    s.optimizer.v_format = Format::E5M2;  // so that the two moments have different formats
    const LinearFormats linear = linear_formats(s);
    REQUIRE(linear.g.text() != linear.x.text());
    const std::vector<PrecisionPart> plan = precision_plan(s);
    const std::vector<Operator>&backward = plan.at(3).second, &update = plan.at(4).second;
    CHECK(backward.at(0).name == "linear layers, dgrad");
    CHECK(backward.at(0).reads == linear.g.text());
    CHECK(backward.at(1).reads == linear.g.text() + " x " + linear.x.text());
    REQUIRE(s.optimizer.m_format != s.optimizer.v_format);
    CHECK(update.at(1).reads == format_info(s.optimizer.m_format).name);
    CHECK(update.at(2).reads == format_info(s.optimizer.v_format).name);
}

// The table of operators is written by hand. What it can be compared with are the lists that a step follows.
TEST_CASE("precision plan: a layer saves what saved_per_layer() lists and has a projection for each weight") {
    for (const Recipe& recipe : recipes())
        for (const Architecture& arch : {LLAMA, QWEN3, GPT2}) {
            const RunSettings s = settings_of(recipe.name, tiny_config(arch, arch.other_biases), 1, 32);
            if (!supported(s)) continue;
            INFO(text(s));
            const LinearFormats linear = linear_formats(s);
            int64_t projections = 0;
            std::string saves;
            const std::vector<PrecisionPart> plan = precision_plan(s);
            for (const Operator& o : plan[1].second) {  // of a layer, in forward
                if (o.saves != "-") saves += (saves.empty() ? "" : "; ") + o.saves;
                if (!contains(o.name, "projection")) continue;
                projections++;
                CHECK((o.reads == linear.x.text() && o.weights == linear.w.text()));
            }
            std::string expected;
            for (const SavedFormat& t : saved_per_layer(s.config, s.recipe))
                expected += concat(expected.empty() ? "" : "; ", t.name, " ", t.format.text());
            CHECK(saves == expected);
            const std::vector<Param> params = parameters(s.config);
            CHECK(projections == std::count_if(params.begin(), params.end(), [](const Param& p) {
                      return p.is_linear_weight() && p.layer == 0;
                  }));
        }
}

// Plays a step of training through, in the order of model.cu, with gradients that begin so many bytes after
// the first saved activation. Returns whether no layer's activations meet gradients while they are needed.
static bool activations_stay_whole(const RunSettings& s, int64_t offset) {
    const std::vector<Param> params = parameters(s.config);
    const std::vector<ParamPlace> places = param_places(s);
    const int64_t gradient_bytes = format_info(gradient_format(s)).bytes, layer_bytes = saved_layer_bytes(s);
    std::vector<Range> gradients;  // bytes that were written in this step
    auto write_gradients = [&](const auto& chosen) {
        for (size_t i = 0; i < params.size(); i++)
            if (chosen(params[i]))
                gradients.push_back({offset + places[i].memory_offset * gradient_bytes,
                                     places[i].owned.count * gradient_bytes});
    };
    auto layer_is_whole = [&](int64_t layer) {
        const int64_t first = layer * layer_bytes, end = first + layer_bytes;
        for (const Range& g : gradients)
            if (g.first < end && first < g.first + g.count) return false;
        return true;
    };
    auto written_last = [&](const Param& p) {
        return p.name == "positions" || (p.name == "embedding" && !s.config.tied);
    };
    for (int64_t micro_batch = 0; micro_batch < s.micro_batches_per_rank; micro_batch++) {
        for (int64_t layer = 0; layer < s.config.L; layer++)  // forward may not write over sums of gradients
            if (!layer_is_whole(layer)) return false;
        write_gradients([&](const Param& p) { return p.layer < 0 && !written_last(p); });
        for (int64_t layer = s.config.L - 1; layer >= 0; layer--) {
            write_gradients([&](const Param& p) { return p.layer == layer; });
            // It is read until the last of its gradients is written.
            if (!layer_is_whole(layer)) return false;
        }
        write_gradients(written_last);
    }
    return true;
}

TEST_CASE("gradients_offset: the lowest at which no gradient is written over activations that are needed") {
    for (const ModelConfig& model : known_models())
        for (const char* recipe : {"fp32", "bf16", "coat", "deepseek"})
            // Few tokens: gradients take more than the activations of a layer; many: less.
            for (const auto& [T, accumulate] : {std::pair{72, 1}, {2048, 1}, {72, 2}})
                for (const auto& [rank, ranks] : {std::pair{0, 1}, {0, 2}, {1, 2}}) {
                    RunSettings s{.config = model,
                                  .recipe = find_row(recipes(), recipe, ""),
                                  .optimizer = find_row(optimizers(), "coat", ""),
                                  .B = 2,
                                  .T = T,
                                  .micro_batches_per_rank = accumulate,
                                  .rank = rank,
                                  .ranks = ranks};
                    if (s.config.V == 0) s.config.V = 256;
                    INFO(model.name, " ", std::string(recipe), " ", T, " ", accumulate, " ", rank);
                    const int64_t offset = gradients_offset(s);
                    REQUIRE(activations_stay_whole(s, offset));
                    REQUIRE((offset == 0 || !activations_stay_whole(s, offset - GPU_ALIGNMENT)));
                }
}

// A rank receives of each other rank the gradients of its part of a bucket, and the parts of matrices that it
// does not own (gpu/sharding.cpp).
TEST_CASE("received_bytes: what other ranks write fits; a model of whole units fills it") {
    for (const ModelConfig& model : {tiny_config(LLAMA, true), tiny_config(GPT2, false), LLAMA_7B})
        for (const int64_t ranks : {2, 3, 4, 8})
            for (const int64_t accumulate : {1, 5}) {
                RunSettings s = settings_of("coat", model, 1, 64, accumulate);
                s.ranks = ranks;
                INFO(model.name, " ", ranks, " ", accumulate);
                const int64_t bytes_per_gradient = format_info(gradient_format(s)).bytes;
                const int64_t bytes_per_weight = format_info(s.recipe.compute_format).bytes;
                const std::vector<Param> params = parameters(s.config);
                const ReceivedBytes room = received_bytes(s);
                int64_t most_gradients = 0;
                for (const BucketRange& bucket : bucket_ranges(params))
                    for (int64_t rank = 0; rank < ranks; rank++) {
                        int64_t gradients = 0, matrices = 0;
                        for (size_t i = bucket.first_param; i < bucket.end_param; i++) {
                            const Range part = owned(params[i], rank, ranks);
                            gradients += (ranks - 1) * padded_count(part) * bytes_per_gradient;
                            if (params[i].is_vector()) continue;
                            const int64_t end = (part.first + padded_count(part)) * bytes_per_weight;
                            CHECK(matrices + end <= room.matrices);
                            matrices += gathered_bytes(s, params[i]);
                            CHECK(end <= gathered_bytes(s, params[i]));
                        }
                        most_gradients = std::max(most_gradients, gradients);
                    }
                CHECK(most_gradients <= room.gradients);
                if (model.name == LLAMA_7B.name) CHECK(most_gradients == room.gradients);
            }
}

TEST_CASE("head_sum_in_fp32: a BF16 gradient of the head is rounded at most four times") {
    const std::tuple<int64_t, int64_t, int64_t, bool, bool> cases[] = {
        {8, 1, 1, false, false}, {10, 1, 1, false, true},  // a piece of 2 x 2048 tokens is one rounding
        {6, 1, 1, true, false},  {8, 1, 1, true, true},    // and the embedding's gradient one more
        {4, 2, 1, false, false}, {4, 3, 1, false, true},  {4, 4, 1, false, true}, {4, 1, 2, false, false},
        {4, 1, 4, false, true},  {2, 4, 1, false, false}, {4, 5, 1, false, false}};  // all gradients are FP32
    for (const auto& [batch, accumulate, ranks, tied, in_fp32] : cases) {
        INFO(batch, " ", accumulate, " ", ranks, " ", tied);
        RunSettings s = settings_of("bf16", LLAMA_7B, batch, 2048, accumulate);
        s.config.tied = tied;
        s.ranks = ranks;
        CHECK(head_sum_in_fp32(s) == in_fp32);
    }
}

TEST_CASE("validate: a run at each limit is accepted and one beyond it refused by the name of the flag") {
    struct Row {
        const char* run;
        int64_t T, B, accumulate, ranks;
        const char* refused = "";
    };
    ModelConfig c = tiny_config(LLAMA, true);
    c.max_T = 256;
    c.sliding_window = 200;
    for (const auto& [run, T, B, accumulate, ranks, refused] :
         {Row{"coat", 200, 1, 9, 9},
          {"coat", 201, 1, 1, 1, "use at most --seq 200."},
          {"coat", 128, 65535, 1, 1},
          {"coat", 129, 65535, 1, 1, "--batch 65535"},
          {"coat", 1, 65536, 1, 1, "--batch 65536"},
          {"fp32 attention", 16, 1, 1, 1, "--attention groups needs BF16"},
          {"fp32 master", 16, 1, 1, 1, "--master none needs BF16"},
          {"coat gradients", 16, 9, 1, 1},
          {"coat gradients", 16, 9, 1, 2, "--gradients none needs more memory"},
          {"coat gradients", 16, 1, 2, 1, "use --accumulate 1"}}) {
        INFO(std::string(run), " ", T, " ", B, " ", accumulate, " ", ranks);
        RunSettings s = settings_of(run, c, B, T, accumulate);
        s.ranks = ranks;
        const std::string error = error_of([&] { require_supported(s); });
        CHECK(contains(error, refused));
        CHECK(error.empty() == (*refused == 0));
    }
    c.NH = c.NKV = 1 << 13;
    c.head_size = 128;  // the product is bounded, not only each factor
    CHECK_NOTHROW(require_supported(c));
    c.NH = c.NKV = 1 << 14;
    CHECK_THROWS_AS(require_supported(c), Error);
}

TEST_CASE("recipe_text: says why linear layers do not run in FP8") {
    for (const auto& [recipe, capability, T, says] : {std::tuple{"coat", 80, 64, "this GPU has no FP8 GEMMs"},
                                                      {"te", 86, 64, "this GPU has no FP8 GEMMs"},
                                                      {"deepseek", 86, 65, "this GPU has no FP8 GEMMs"},
                                                      {"coat", 89, 64, ""},
                                                      {"coat", 90, 65, "is no multiple of 16"},
                                                      {"bf16", 80, 65, ""}}) {
        INFO(std::string(recipe), " ", capability, " ", T);
        RunSettings s = settings_of(recipe, LLAMA_7B, 1, T);
        s.recipe = recipe_on_gpu(s.recipe, capability);
        const std::string text = recipe_text(s);
        CHECK(contains(text, concat(recipe, ": ", s.recipe.about)));
        CHECK(contains(text, says));
        CHECK(contains(text, "run in BF16") == (*says != 0));
    }
}

TEST_CASE("gpu_fit_text: on which GPUs a run fits; of an incomplete figure only where it does not") {
    CHECK(gpu_fit_text(78'800'000'000, true) ==
          "On a GPU: 78.8 GB. Fits: 80 GB (H100), 141 GB (H200). Too small: 24 GB (RTX 4090), 40 GB (A100), "
          "48 GB "
          "(L40S).");
    CHECK(gpu_fit_text(300'000'000'000, true)
              .ends_with("300.0 GB. Too small: 24 GB (RTX 4090), 40 GB (A100), 48 GB "
                         "(L40S), 80 GB (H100), 141 GB (H200)."));
    // nvidia-smi reports 24564 MiB of an RTX 4090.
    CHECK(contains(gpu_fit_text(24564LL << 20, true), "Fits: 24 GB (RTX 4090), 40"));
    CHECK(contains(gpu_fit_text((24564LL << 20) + 1, true), "Too small: 24 GB (RTX 4090)."));
    const std::string incomplete = gpu_fit_text(30'000'000'000, false);
    CHECK(incomplete.starts_with("On a GPU: more than 30.0 GB."));
    CHECK((contains(incomplete, "nvcc") && contains(incomplete, "Too small: 24 GB (RTX 4090).")));
    CHECK(!contains(incomplete, "Fits"));
}

TEST_CASE("gpu_memory_plan: with or without CUDA gradients that lie on activations count once") {
    const RunSettings s = settings_of("coat", LLAMA_7B, 8, 2048);
    int64_t overlap = 0, working = 0;
    for (const MemoryRow& row : gpu_memory_plan(s)) {
        if (row.name == "gradients stored over activations") overlap = row.bytes;
        if (row.name == "operands, one layer's gradients, logits") working = row.bytes;
    }
    CHECK(overlap < -10'000'000'000);
    CHECK((working > 0) == built_with_cuda());
    CHECK(total_bytes(gpu_memory_plan(s)) == total_bytes(memory_plan(s)) + overlap + working + GPU_CONTEXT);
}

TEST_CASE("recipe_on_gpu: FP8 where the GPU has it; rows and blocks and other groups are refused elsewhere") {
    const std::tuple<const char*, int, const char*> rows[] = {
        {"coat", 80, "bf16"},        {"coat", 86, "bf16"},           {"coat", 89, "e4m3 tensor"},
        {"te", 120, "e4m3 tensor"},  {"rowwise", 86, "bf16"},        {"rowwise", 89, ""},
        {"rowwise", 90, "e4m3 row"}, {"deepseek", 90, "e4m3 1x128"}, {"deepseek", 100, ""}};
    for (const auto& [name, capability, x] : rows) {
        INFO(std::string(name), " ", capability);
        std::string ours;
        error_of([&, recipe = name, on = capability] {
            ours = recipe_on_gpu(find_row(recipes(), recipe, ""), on).x.text();
        });
        CHECK(ours == x);
    }
    // The recipe nearest to those of rows and blocks, among those that such a GPU can run
    check_error(error_of([] { recipe_on_gpu(find_row(recipes(), "rowwise", ""), 89); }),
                "use --recipe tensorwise");
    CHECK(recipe_on_gpu(find_row(recipes(), "tensorwise", ""), 89).x == E4M3_PER_TENSOR);
    for (TensorFormat Recipe::*saved : {&Recipe::saved_inputs, &Recipe::saved_attention}) {
        Recipe r = find_row(recipes(), "coat", "--recipe");
        (r.*saved) = {Format::E4M3, {1, 32}, Format::BF16};
        CHECK_THROWS_AS(recipe_on_gpu(r, 90), Error);
    }
}

TEST_CASE("should_cache_weights: FP8 weights that several micro-batches of one rank read") {
    const std::tuple<const char*, int, int, bool> rows[] = {
        {"coat", 2, 1, true}, {"coat", 1, 1, false}, {"coat", 2, 2, false}, {"bf16", 2, 1, false}};
    for (const auto& [recipe, micro_batches, ranks, caches] : rows) {
        INFO(std::string(recipe), " ", micro_batches, " ", ranks);
        RunSettings s = settings_of(recipe, LLAMA_7B, 1, 64, micro_batches);
        s.ranks = ranks;
        CHECK(should_cache_weights(s) == caches);
    }
}

TEST_CASE("flags_that_save_memory: those that this run can have and does not have yet") {
    const std::tuple<const char*, int, int, const char*> rows[] = {
        // The run, its ranks, its micro-batches, and the flags
        {"coat", 1, 1, "--master none, --attention groups, --gradients none --clip 0"},
        {"coat", 1, 2, "--master none, --attention groups"},
        {"coat", 2, 1, "--master none, --attention groups"},
        {"coat master", 1, 1, "--attention groups, --gradients none --clip 0"},
        {"coat master", 2, 1, "--attention groups"},
        {"coat attention", 2, 1, "--master none"},
        {"coat attention", 1, 1, "--master none, --gradients none --clip 0"},
        {"coat gradients", 1, 1, "--master none, --attention groups"},
        {"fp32", 1, 1, "--gradients none --clip 0"},
        {"coat lean", 1, 1, ""}};
    for (const auto& [run, ranks, micro_batches, flags] : rows) {
        INFO(std::string(run), " ", ranks, " ", micro_batches);
        RunSettings s = settings_of(run, LLAMA_7B, 8, 2048, micro_batches);
        s.ranks = ranks;
        CHECK(flags_that_save_memory(s) == flags);
    }
}

TEST_CASE("recipe_on_gpu: operands that no GEMM multiplies are refused in a sentence that shows them") {
    constexpr TensorFormat E4M3_32{.element_format = Format::E4M3, .granularity = {1, 32}};
    struct Row {
        TensorFormat x, w, g;
        bool refused;
    };
    for (const auto& [x, w, g, refused] : {Row{E4M3_PER_TENSOR, E4M3_PER_TENSOR, E5M2_PER_TENSOR, false},
                                           {E5M2_PER_TENSOR, E4M3_PER_TENSOR, E4M3_PER_TENSOR, false},
                                           {E4M3_PER_1x128, E4M3_PER_1x128, E4M3_PER_1x128, false},
                                           {E4M3_PER_128x128, E4M3_PER_1x128, E4M3_PER_1x128, false},
                                           {E4M3_PER_TENSOR, E4M3_PER_ROW, E4M3_PER_TENSOR, true},
                                           {E4M3_PER_TENSOR, E4M3_PER_TENSOR, E4M3_PER_1x128, true},
                                           {E4M3_PER_ROW, E4M3_PER_ROW, E4M3_PER_128x128, true},
                                           {E4M3_PER_128x128, E4M3_PER_128x128, E4M3_PER_1x128, true},
                                           {E4M3_32, E4M3_32, E4M3_32, true},
                                           {E5M2_PER_TENSOR, E4M3_PER_TENSOR, E5M2_PER_TENSOR, true},
                                           {PLAIN_BF16, E4M3_PER_TENSOR, E4M3_PER_TENSOR, true},
                                           {E4M3_PER_TENSOR, E4M3_PER_TENSOR, PLAIN_BF16, true}}) {
        Recipe r = find_row(recipes(), "coat", "--recipe");
        r.x = x;
        r.w = w;
        r.g = g;
        INFO(x.text(), " ", w.text(), " ", g.text());
        const std::string error = error_of([&] { recipe_on_gpu(r, 90); });
        CHECK(!error.empty() == refused);
        if (refused)
            check_error(error, concat("has x in ", x.text(), ", w in ", w.text(), " and g in ", g.text()));
    }
}
