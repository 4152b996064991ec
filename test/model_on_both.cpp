// model_on_both.cpp - the model on the GPU against the CPU reference: one step of any settings, training, and
// runs that stop on one and go on on the other.
//
// Both round in the same places, but they sum in different orders, and tensor cores use BF16 probabilities in
// attention. So some values round in the other direction. In fp32 the difference is the error of FP32 sums;
// in other recipes it is bounded by the recipe's own error, the distance of its gradient from fp32's.
#include "../gpu/memory_layout.h"
#include "help/model.h"

using namespace coat;
using namespace coat::test;

// Two implementations that round independently differ by sqrt(2) of the recipe's error. The factor 1.5 allows
// for the scatter of an error that is measured on a vector of only 64 values.
constexpr double TWO_IMPLEMENTATIONS = 1.5 * 1.4142135623730951;

// 25 steps of both; returns by how much the GPU's loss fell. Small differences grow, most where moments have
// codes: in fp32 as much as those of `others`, the reference with slightly different learning rates; in the
// other recipes to the run-to-run variation, of a batch and in the mean.
static double compare_losses(Training& gpu, Training& cpu, std::vector<Training>& others) {
    const RunSettings& s = cpu.settings();
    const Doubles a = gpu.losses(25), b = cpu.losses(25);
    const bool fp8 = s.recipe.x.is_fp8() || s.recipe.saved_attention.is_fp8() ||
                     is_fp8(s.optimizer.m_format) || !s.keep_masters;
    const auto [single, average] = fp8 ? std::pair{0.06, 0.02} : std::pair{0.03, 0.01};
    double largest = 0;
    for (Training& other : others) largest = std::max(largest, relative_error(other.losses(25), b));
    if (!others.empty()) CHECK(relative_error(a, b) <= 4 * largest);
    for (size_t i = 0; i < a.size(); i++) CHECK(std::fabs(a[i] - b[i]) <= single);
    CHECK(std::fabs(mean(a) - mean(b)) <= average);
    return a.front() - a.back();
}

// Logits of a prompt of any length: 24 roundings to BF16, and in FP8 recipes 11 to E4M3 in each layer.
static void check_logits(Random& rng, Training& gpu, Training& cpu) {
    const RunSettings& s = gpu.settings();
    const double bf16 = std::sqrt(24.0 * 2) * 0x1p-9, fp8 = bf16 + std::sqrt(22 / 3.0) * 0x1p-4;
    const bool codes =
        s.recipe.x.is_fp8() || s.recipe.saved_inputs.is_fp8() || s.recipe.saved_attention.is_fp8();
    const double bound = s.recipe.compute_format == Format::FP32 ? fp32_bound(s.config) : codes ? fp8 : bf16;
    for (int64_t n : {int64_t(1), 1 + rng.below(s.T), s.T})
        CHECK(relative_error(gpu.next_logits(n), cpu.next_logits(n)) <= bound);
}

// Both reports measure the same tensors. A few values that round differently change the sum of squared errors
// little: 1 dB is a quarter of it. (Those of moments: model.cpp.)
static void check_reports(const QuantReport& a, const QuantReport& b) {
    for (int kind = 0; kind < int(MeasuredKind::Moment1); kind++) {
        const QuantStats &of_gpu = a.stats_by_kind[kind], &of_cpu = b.stats_by_kind[kind];
        INFO(std::string(MEASURED_KIND_NAMES[kind]), ": ", of_gpu.snr_db(), " and ", of_cpu.snr_db(), " dB");
        CHECK(of_gpu.elements == of_cpu.elements);
        if (of_gpu.elements > 0) CHECK(std::fabs(of_gpu.snr_db() - of_cpu.snr_db()) <= 1);
    }
    CHECK(a.k_m == b.k_m);
    CHECK(a.k_v == b.k_v);
}

// One step without an update, with random biases and norm weights: loss, gradients, logits and report.
static void check_step(Random& rng, const RunSettings& s) {
    INFO(text(s));
    RunSettings in_fp32 = s;
    in_fp32.recipe = find_row(recipes(), "fp32", "recipe");
    in_fp32.keep_masters = in_fp32.keep_gradients = true;
    Training gpu(make_gpu_model, s), cpu(make_reference_model, s), exact(make_reference_model, in_fp32);
    // fp32 computes with master weights, other recipes with these rounded to BF16: both are equal here.
    for (const Param& p : parameters(s.config)) {
        Floats values;
        for (uint16_t w : read_as<uint16_t>(*cpu.model, p.name, p.size())) {
            const float other = float((p.starts_at_one() ? 1 : 0) + 0.05 * rng.normal());
            values.push_back(p.init_std == 0 ? reference::round_to(Format::BF16, other)
                                             : reference::from_bf16(w));
        }
        for (Training* t : {&gpu, &cpu, &exact}) write_weights(*t->model, p.name, values);
    }
    for (Training* t : {&gpu, &cpu, &exact}) t->adamw.lr = 0, t->adamw.clip = 0;
    if (s.recipe.scale_source == ScaleSource::Delayed) {  // the first step uses just-in-time scales
        for (Training* t : {&gpu, &cpu, &exact}) t->step();
        for (const StateTensor& t : delayed_scaling_tensors(s.config, s.recipe))
            if (linear_formats(s).x.is_fp8())  // the largest element differs by one or two roundings to FP8
                CHECK(relative_error(read_as<float>(*gpu.model, t.name, t.size()),
                                     read_as<float>(*cpu.model, t.name, t.size())) <= 0.25);
        restore(*cpu.model, snapshot(*gpu.model));
    }
    const StepResult on_gpu = gpu.step(), on_cpu = cpu.step(), of_fp32 = exact.step();
    auto bound = [&](double own) {  // BF16's rounding is always allowed
        return s.recipe.compute_format == Format::FP32 ? fp32_bound(s.config)
                                                       : TWO_IMPLEMENTATIONS * own + 0x1p-9;
    };
    CHECK(!on_gpu.skipped);
    CHECK(on_gpu.scored_target_count == on_cpu.scored_target_count);
    CHECK(std::fabs(on_gpu.loss - on_cpu.loss) <=
          on_cpu.loss * bound(std::fabs(on_cpu.loss - of_fp32.loss) / on_cpu.loss));
    for (const Param& p : parameters(s.config)) {
        if (!s.keep_gradients) continue;
        const Floats got = gradient(*gpu.model, p), wanted = gradient(*cpu.model, p),
                     in_fp32 = gradient(*exact.model, p);
        // Both are relative to FP32's gradient: the recipe's may have a sum that nearly cancels.
        const double size = norm(in_fp32), error = relative_error(got, wanted) * norm(wanted) / size,
                     own = relative_error(wanted, in_fp32);
        INFO(p.name, ": differs by ", error, ", the recipe itself by ", own);
        CHECK(norm(wanted) > 0);
        CHECK(error <= bound(own));
    }
    restore(*cpu.model, snapshot(*gpu.model));
    check_logits(rng, gpu, cpu);
    if (s.micro_batches_per_rank == 1) check_reports(gpu.report(), cpu.report());
}

GPU_MODEL_TEST("step: loss and gradients and logits and report against the reference for any settings") {
    SEEDED_RANDOM(rng);
    for (const RunSettings& s : all_settings(rng, cases(40, 2))) check_step(rng, s);
    for (const Recipe& r : recipes()) {  // attention on tensor cores; fallback to the compute format
        for (bool tied : {true, false}) check_step(rng, settings_of(r.name, wide_heads(tied), 2, 80));
        for (const Architecture& arch : {QWEN2, QWEN3, GPT2})
            check_step(rng, settings_of(r.name, tiny_config(arch, true), 3, 7));
        for (int64_t accumulate : {3, 8})  // gradients in the compute format, and in FP32
            check_step(rng, settings_of(r.name, tiny_config(QWEN2, false), 2, 16, accumulate));
    }
    ModelConfig wide = wide_heads(false);
    check_step(rng, settings_of("coat attention", wide, 2, 80));
    wide.arch = QWEN3;
    wide.head_size = 128;
    for (const char* words : {"coat attention", "bf16"}) check_step(rng, settings_of(words, wide, 2, 80));
}

GPU_MODEL_TEST("step: recipes that no row of the table has") {
    SEEDED_RANDOM(rng);
    const std::tuple<const char*, TensorFormat, TensorFormat, TensorFormat, TensorFormat> rows[] = {
        {"te", E4M3_PER_TENSOR, E4M3_PER_TENSOR, E5M2_PER_TENSOR,
         E4M3_PER_1x16},  // groups beside other operands
        {"rowwise", E4M3_PER_ROW, E4M3_PER_ROW, E4M3_PER_ROW, E4M3_PER_1x16},
        {"deepseek", E4M3_PER_1x128, E4M3_PER_128x128, E4M3_PER_1x128, E4M3_PER_1x16},
        {"deepseek", E4M3_PER_1x128, E4M3_PER_1x128, E4M3_PER_1x128, PLAIN_BF16},  // other operands
        {"deepseek", E4M3_PER_128x128, E4M3_PER_1x128, E4M3_PER_1x128, PLAIN_BF16},
        {"coat", E5M2_PER_TENSOR, E4M3_PER_TENSOR, E4M3_PER_TENSOR, E4M3_PER_1x16},
        {"coat", PLAIN_BF16, PLAIN_BF16, PLAIN_BF16, E4M3_PER_1x16}};
    for (const auto& [recipe, x, w, g, saved_inputs] : rows)
        for (const Architecture& arch : {LLAMA, GPT2}) {
            RunSettings s = settings_of(recipe, tiny_config(arch, true), 4, 16, 1 + rng.below(2));
            s.recipe.x = x;
            s.recipe.w = w;
            s.recipe.g = g;
            s.recipe.saved_inputs = saved_inputs;
            check_step(rng, s);
        }
}

GPU_MODEL_TEST("step: batches that are cut into chunks for the head") {
    constexpr int64_t B = 262, T = 64;
    static_assert(B * T > 4 * HEAD_SLICE_TOKENS && B * T % HEAD_SLICE_TOKENS != 0);
    SEEDED_RANDOM(rng);
    const ModelConfig untied = tiny_config(LLAMA, false);
    REQUIRE(head_sum_in_fp32(settings_of("bf16", untied, B, T)));
    for (const char* recipe : {"bf16", "coat"}) check_step(rng, settings_of(recipe, untied, B, T));
    check_step(rng, settings_of("coat", tiny_config(LLAMA, true), B, T, 2));

    // All sequences are equal, and so are all slices of the head's gradient. Their roundings to BF16 then add
    // up in one direction: after 16 additions to 0.72%, after four to 0.21%. Eight micro-batches have FP32
    // gradients; they divide by twice as many targets, which changes no bit of a term.
    std::vector<Floats> gradients;
    for (int64_t accumulate : {4, 8}) {
        Training t(make_gpu_model, settings_of("bf16", untied, 256, T, accumulate));
        t.text.next(1, T, &t.tokens, &t.targets);
        for (auto* x : {&t.tokens, &t.targets})
            for (int64_t i = T; i < 256 * accumulate * T; i++) x->push_back((*x)[size_t(i - T)]);
        t.again();
        gradients.push_back(gradient(*t.model, t.params()[param_index_of(t.params(), "head")]));
    }
    CHECK(relative_error(gradients[0], gradients[1]) > 0);
    CHECK(relative_error(gradients[0], gradients[1]) <= 0x1p-8);
}

GPU_MODEL_TEST("training: losses follow the reference's also after a run has changed to the other device") {
    SEEDED_RANDOM(rng);
    std::vector<RunSettings> list = all_settings(rng);
    for (const char* words : {"te lean moments fp8", "coat lean"}) list.push_back(settings_of(words));
    FOR_ALL_SETTINGS(listed, list) {
        RunSettings s = listed;
        s.B = 8;
        s.T = 32;
        s.micro_batches_per_rank = 1;
        Training gpu(make_gpu_model, s), cpu(make_reference_model, s);
        std::vector<Training> others;  // 2^-17: the error of a gradient in FP32
        for (float change : s.recipe.compute_format == Format::FP32 ? Floats{-1, -0.5f, 0.5f, 1} : Floats()) {
            others.emplace_back(make_reference_model, s);
            others.back().adamw.lr *= 1 + 0x1p-17f * change;
        }
        CHECK(compare_losses(gpu, cpu, others) > 0.5);
        std::swap(gpu.model, cpu.model);  // each goes on with the state of the other
        const Snapshot of_gpu = snapshot(*cpu.model), of_cpu = snapshot(*gpu.model);
        restore(*gpu.model, of_gpu);
        restore(*cpu.model, of_cpu);
        CHECK(snapshot(*gpu.model) == of_gpu);
        CHECK(snapshot(*cpu.model) == of_cpu);
        compare_losses(gpu, cpu, others);
    }
}
