// model_training.cu - training on the GPU against the CPU reference: losses, determinism, resume,
// evaluation, next-token logits and the quantization report.
#include <cmath>
#include <map>
#include <string>

#include "../gpu/attention.cuh"
#include "../gpu/gemm.cuh"
#include "../program/plan.h"
#include "help/gpu.h"
#include "help/gpu_models.h"
#include "help/model_checks.h"
#include "help/random.h"
#include "help/tiny.h"

using namespace coat;
using namespace coat::test;
using namespace coat::test::gpu_models;

GPU_TEST_CASE("check: a CUDA error is reported once") {
    void* none = nullptr;
    CHECK_THROWS_AS(gpu::check(cudaMalloc(&none, size_t(1) << 60), "Allocating an exabyte failed"), Error);
    CHECK(cudaGetLastError() == cudaSuccess);
}

GPU_TEST_CASE("step: gradients of 64 micro-batches are their sum within one rounding") {
    for (const char* recipe : {"bf16", "coat", "coat-saved", "rowwise", "deepseek"})
        for (const ModelConfig& config : {tiny_config(LLAMA, false), tiny_config(GPT2, true)})
            check_sums(make_gpu, tiny_setup(config, recipe, "fp32"));
}

// All sequences are equal, and so are all pieces of the head's gradient. Their roundings to BF16 then add up
// in one direction: after 16 additions to 0.72%, after four to 0.21%. Eight micro-batches have FP32
// gradients; they divide by twice as many targets, which changes no bit of a term.
GPU_TEST_CASE("step: the head's gradient is rounded to BF16 at most four times") {
    Setup setup = setup_of("bf16", LLAMA, false, 256, 64);
    const Param head = parameters(setup.config)[param_of(parameters(setup.config), "head")];
    std::vector<Floats> gradients;
    for (int64_t accumulate : {4, 8}) {
        setup.accumulate = accumulate;
        Training training = training_on(make_gpu, setup);
        training.text.next(1, setup.T, &training.tokens, &training.targets);
        for (std::vector<int32_t>* x : {&training.tokens, &training.targets}) {
            x->resize(size_t(accumulate * setup.B * setup.T));
            for (size_t i = size_t(setup.T); i < x->size(); i++) (*x)[i] = (*x)[i - size_t(setup.T)];
        }
        training.model->step(training.tokens.data(), training.targets.data(), AdamW{1, 0.0f});
        gradients.push_back(gradient(*training.model, head));
    }
    CHECK(relative_error(gradients[0], gradients[1]) > 0);
    CHECK(relative_error(gradients[0], gradients[1]) <= 0x1p-8);
}

GPU_TEST_CASE(
    "step, evaluate and next_logits: operands without a history of amaxes are scaled just in time") {
    for (const Architecture& arch : {LLAMA, GPT2}) check_first_scales(make_gpu, arch);
}

GPU_TEST_CASE("step: delayed scales of the first steps equal the reference's") {
    for (const Architecture& arch : {LLAMA, QWEN2, GPT2})
        for (int64_t accumulate : {1, 2}) {
            Setup setup = setup_of("te", arch);
            setup.accumulate = accumulate;
            Training gpu = training_on(make_gpu, setup), cpu = training_on(make_reference, setup);
            gpu.adamw.lr = cpu.adamw.lr = 0;
            for (int i = 0; i < 3; i++) CHECK(std::fabs(gpu.step().loss - cpu.step().loss) <= 0.02);
            for (const StateTensor& t : scaling_tensors(setup.config, setup.recipe)) {
                const Floats a = read_as<float>(*gpu.model, t.name, t.size());
                const Floats b = read_as<float>(*cpu.model, t.name, t.size());
                INFO(t.name, " ", accumulate);
                CHECK(b[0] > 0);
                // The largest element may differ by one or two roundings to FP8.
                CHECK(relative_error(a, b) <= 0.25);
            }
        }
}

GPU_TEST_CASE("next_logits: amaxes are those of the prompt, for any length") {
    // evaluate and next_logits use GEMMs of different shapes, which may sum in different orders: a few
    // roundings of BF16 or FP8.
    for (const char* recipe : {"bf16", "coat", "coat-saved", "te", "colossal", "rowwise", "deepseek"})
        for (const Architecture& arch : {LLAMA, GPT2}) check_prompt(make_gpu, recipe, arch, 0.1);
}

GPU_TEST_CASE("next_logits: falls back to BF16 if the training batch does, for any length") {
    for (const char* recipe : {"te", "colossal", "rowwise", "deepseek"}) check_fallback(make_gpu, recipe);
}

GPU_TEST_CASE("evaluate: detects a value that is not finite although its FP8 code saturates") {
    for (const char* recipe : {"te", "colossal", "coat", "coat-saved", "rowwise", "bf16"}) {
        Training training = training_on(make_gpu, setup_of(recipe));
        check_infinite_evaluation(training);
    }
}

GPU_TEST_CASE("step: with --gradients none, after a gradient that is not finite no later bucket is updated") {
    for (const char* recipe : {"fp32", "bf16", "coat"}) {
        Training training = training_on(make_gpu, with_mode(setup_of(recipe), "gradients"));
        check_hidden_gradient(training);
    }
}

GPU_TEST_CASE("step: targets that do not count have loss and gradient 0, and are not in the mean") {
    for (const Architecture& arch : {LLAMA, GPT2})
        for (const char* recipe : RECIPES) check_masked_targets(make_gpu, recipe, arch);
}

GPU_TEST_CASE("step: micro-batches with uneven masks equal one larger batch within rounding") {
    check_uneven_masks(make_gpu, "fp32", fp32_bound(tiny_config(LLAMA, true)));
    check_uneven_masks(make_gpu, "bf16", 0x1p-8 / std::sqrt(3.0) * 2);
}

GPU_TEST_CASE("training: losses of 50 steps follow the reference's") {
    // In fp32 small differences of the gradients grow during training. 0.001 nats is a hundredth of what one
    // step changes the loss by. In the other recipes the difference is run-to-run variation: about 0.03 nats
    // for a single batch of 256 tokens in bf16, and 0.01 in the mean.
    using Band = std::pair<double, double>;  // largest difference of a single step, and of the mean
    const Band fp32{1e-3, 1e-4}, bf16{0.03, 0.01}, fp8{0.06, 0.02};
    std::vector<Setup> setups;
    for (const Architecture& arch : {LLAMA, GPT2}) {
        for (const char* recipe : RECIPES) setups.push_back(setup_of(recipe, arch, true, 8, 32));
        for (const char* mode : MODES) setups.push_back(with_mode(setup_of("coat", arch, true, 8, 32), mode));
        setups.push_back(with_optimizer(setup_of("coat", arch, true, 8, 32), "fp8lm"));
        setups.push_back(with_mode(with_optimizer(setup_of("te", arch, true, 8, 32), "fp8lm"), "lean"));
    }
    for (const char* recipe : {"bf16", "coat"}) setups.push_back(setup_of(recipe, QWEN2, false, 8, 32));
    for (const Setup& setup : setups) {
        const std::string recipe = setup.recipe.name;
        Training gpu = training_on(make_gpu, setup), cpu = training_on(make_reference, setup);
        const Doubles a = losses(gpu, 50), b = losses(cpu, 50);
        const auto [single, average] = recipe == "fp32" ? fp32 : recipe == "bf16" ? bf16 : fp8;
        double worst = 0;
        for (size_t i = 0; i < a.size(); i++) worst = std::max(worst, std::fabs(a[i] - b[i]));
        std::string mode = setup.recipe.attention.fp8() ? " attention in groups" : "";
        if (!setup.master) mode += " no master";
        if (!setup.keep_gradients) mode += " no gradients";
        if (setup.optimizer.group == 0) mode += " fp8lm";
        MESSAGE(std::string(setup.config.arch.name), " ", recipe, mode, ": loss ", a.front(), " to ",
                a.back(), ", reference to ", b.back(), ", largest difference ", worst);
        CHECK(worst <= single);
        CHECK(std::fabs(mean(a, 0, 50) - mean(b, 0, 50)) <= average);
        CHECK(a.back() < a.front() - 1);
    }
}

GPU_TEST_CASE("training: llama-tiny has the reference's loss within 0.02 nats") {
    ModelConfig config = find_row(models(), "llama-tiny", "--model");
    config.V = 256;
    for (const char* recipe : {"bf16", "coat"}) {
        const Setup setup = tiny_setup(config, recipe, optimizer_of(recipe), 4, 128);
        Training gpu = training_on(make_gpu, setup), cpu = training_on(make_reference, setup);
        const int64_t steps = count(100, 4);
        const Doubles a = losses(gpu, steps), b = losses(cpu, steps);
        const size_t n = a.size(), tail = n / 4;
        MESSAGE(std::string(recipe), ": last quarter ", mean(a, n - tail, n), " and ", mean(b, n - tail, n));
        CHECK(std::fabs(mean(a, n - tail, n) - mean(b, n - tail, n)) <= 0.02);
        CHECK(a.back() < a.front());
    }
}

GPU_TEST_CASE("training: two runs are bit-identical") {
    std::vector<Setup> setups;
    for (const ModelConfig& config : {tiny_config(LLAMA, false), tiny_config(GPT2, true), wide_heads(true)}) {
        for (const char* recipe : RECIPES)
            setups.push_back(tiny_setup(config, recipe, optimizer_of(recipe), 4, 48));
        for (const char* optimizer : {"coat", "fp8lm"})
            setups.push_back(with_mode(tiny_setup(config, "coat", optimizer, 4, 48), "lean"));
    }
    for (const Setup& setup : setups) {
        Training a = training_on(make_gpu, setup), b = training_on(make_gpu, setup);
        INFO(setup.config.name, " ", std::string(setup.recipe.name), setup.master ? "" : " lean");
        CHECK(losses(a, 5) == losses(b, 5));
        CHECK((snapshot(*a.model) == snapshot(*b.model)));
    }
}

GPU_TEST_CASE("training: stop and resume is bit-identical, in every recipe and every optimizer") {
    std::vector<Setup> setups;
    for (const Architecture& arch : {LLAMA, GPT2}) {
        for (const char* recipe : RECIPES) setups.push_back(setup_of(recipe, arch));
        for (const char* mode : MODES) setups.push_back(with_mode(setup_of("coat", arch), mode));
        setups.push_back(with_mode(setup_of("te", arch), "gradients"));
        setups.push_back(setup_of("te", arch));
        setups.back().accumulate = 2;
    }
    for (const OptimizerFormat& optimizer : optimizers()) {
        setups.push_back(setup_of("coat"));
        setups.back().optimizer = optimizer;
        setups.push_back(setup_of("fp32"));
        setups.back().optimizer = optimizer;
    }
    for (Setup setup : setups) {
        Training first = training_on(make_gpu, setup);
        losses(first, 4);
        // The initial weights of the resumed run must not matter. (Stochastic rounding of weights uses the
        // seed too.)
        if (setup.master) setup.seed = 99;
        Training resumed = training_on(make_gpu, setup);
        restore(*resumed.model, snapshot(*first.model));
        resumed.text = first.text;
        resumed.adamw = first.adamw;
        INFO(std::string(setup.config.arch.name), " ", std::string(setup.recipe.name), " ",
             std::string(setup.optimizer.name));
        CHECK((snapshot(*resumed.model) == snapshot(*first.model)));
        CHECK(losses(resumed, 4) == losses(first, 4));
        CHECK((snapshot(*resumed.model) == snapshot(*first.model)));
    }
}

GPU_TEST_CASE("training: a run that stops on the GPU resumes on the reference, and the other way round") {
    std::vector<std::string> runs(std::begin(RECIPES), std::end(RECIPES));
    for (const char* also : {"lean", "fp8lm"}) runs.push_back(also);
    for (const std::string& recipe : runs)
        for (const bool on_gpu : {true, false}) {
            const Maker from = on_gpu ? make_gpu : make_reference, to = on_gpu ? make_reference : make_gpu;
            // "lean" and "fp8lm" are a memory mode and an optimizer for the recipe coat.
            const bool of_coat = recipe == "lean" || recipe == "fp8lm";
            Setup setup = with_mode(setup_of(of_coat ? "coat" : recipe, LLAMA, true, 8, 32), recipe);
            if (recipe == "fp8lm") setup = with_optimizer(setup, recipe);
            Training first = training_on(from, setup), second = training_on(to, setup, 2);
            losses(first, 10);
            const Snapshot state = snapshot(*first.model);
            restore(*second.model, state);
            INFO(recipe, on_gpu ? " from the GPU" : " to the GPU");
            CHECK((snapshot(*second.model) == state));
            second.text = first.text, second.adamw = first.adamw;
            const Doubles a = losses(first, 10), b = losses(second, 10);
            // The limit of the test of 50 steps.
            for (size_t i = 0; i < a.size(); i++) CHECK(std::fabs(a[i] - b[i]) <= 0.06);
            CHECK(std::fabs(a[0] - b[0]) <= 0.02);
        }
}

GPU_TEST_CASE("step: accumulated micro-batches equal one larger batch within rounding") {
    // As on the CPU: the gradient of each micro-batch is rounded to the compute dtype, and their sum is
    // rounded again.
    const std::map<std::string, double> bounds = {{"fp32", 0x1p-24 * 40 * 16},
                                                  {"bf16", 0x1p-8 / std::sqrt(3.0) * 2}};
    for (const auto& row : bounds)
        for (const Architecture& arch : {LLAMA, GPT2}) {
            const std::string recipe = row.first;
            const double bound = row.second;
            Setup setup = setup_of(recipe, arch);
            Training large = training_on(make_gpu, setup);
            setup.B /= 4, setup.accumulate = 4;
            Training small = training_on(make_gpu, setup);
            const double a = losses(large, 1)[0], b = losses(small, 1)[0];
            CHECK(std::fabs(a - b) <= bound * a);
            for (const Param& p : parameters(setup.config)) {
                INFO(recipe, " ", std::string(arch.name), " ", p.name);
                CHECK(relative_error(gradient(*small.model, p), gradient(*large.model, p)) <= bound);
            }
        }
}

GPU_TEST_CASE(
    "step: a gradient whose square exceeds FP32 skips the step unless clipped, with every optimizer") {
    for (const char* recipe : {"fp32", "bf16", "coat"})
        for (const OptimizerFormat& optimizer : optimizers()) {
            Training training = training_on(make_gpu, with_optimizer(setup_of(recipe), optimizer.name));
            INFO(std::string(recipe), " ", std::string(optimizer.name));
            check_huge_gradients(training);
        }
}

GPU_TEST_CASE("next_logits: equal the reference's, for any length") {
    for (const char* recipe : RECIPES)
        for (const Architecture& arch : {LLAMA, QWEN2, GPT2}) {
            // With B = 1 the linear layers fall back to BF16. With B = 8 they are FP8, and the prompt's rows
            // are padded.
            for (int64_t B : {1, 8}) {
                const Setup setup = setup_of(recipe, arch, true, B, 50);
                Training gpu = training_on(make_gpu, setup), cpu = training_on(make_reference, setup);
                losses(gpu, 5);
                restore(*cpu.model, snapshot(*gpu.model));
                const size_t V = static_cast<size_t>(setup.config.V);
                // Relative to the size of the logits: 24 roundings to BF16, and in FP8 recipes 11 to E4M3 in
                // each layer.
                const double bf16 = std::sqrt(24.0 * 2) * 0x1p-9;
                const double fp8 = bf16 + std::sqrt(11.0 * 2) * 0x1p-4 / std::sqrt(3.0);
                const bool fp32 = setup.recipe.compute == Format::F32;
                const double bound = fp32 ? fp32_bound(setup.config) : setup.recipe.x.fp8() ? fp8 : bf16;
                for (int64_t n : {1, 15, 16, 17, 33, 50}) {
                    Floats a(V), b(V);
                    gpu.model->next_logits(gpu.tokens.data(), n, a.data());
                    cpu.model->next_logits(gpu.tokens.data(), n, b.data());
                    INFO(std::string(recipe), " ", std::string(arch.name), " ", n);
                    CHECK(relative_error(a, b) <= bound);
                }
            }
        }
}

GPU_TEST_CASE("quantization: the report measures what the reference's measures") {
    // Both measure the same tensors. A few values that round differently change the sum of squared errors
    // little. 1 dB is a quarter of that sum. This does not hold for moments made of the gradients of two
    // devices: a few second moments are most of the sum. So the errors of the moments are compared with those
    // that the reference makes with the GPU's own state and gradients. A GPU's powers round otherwise, which
    // may change a code by one.
    std::vector<Setup> setups = {setup_of("coat", LLAMA, true, 4, 32)};
    setups.push_back(with_mode(setups[0], "lean"));
    setups.push_back(with_optimizer(setups[0], "fp8lm"));
    for (const char* recipe : {"te", "rowwise", "deepseek"})
        setups.push_back(with_optimizer(setup_of(recipe, LLAMA, true, 4, 32), "coat"));
    for (const Setup& setup : setups) {
        const bool groups = setup.recipe.nonlinear.fp8(), delayed = setup.recipe.scaling == Scaling::Delayed;
        Training gpu = training_on(make_gpu, setup), cpu = training_on(make_reference, setup);
        losses(gpu, 20);
        const Snapshot before = snapshot(*gpu.model);
        restore(*cpu.model, before);
        const QuantReport a = gpu.model->quantization(gpu.tokens.data(), gpu.targets.data());
        const QuantReport b = cpu.model->quantization(gpu.tokens.data(), gpu.targets.data());
        CHECK((snapshot(*gpu.model) == before));
        Setup that_keeps = setup;  // gradients are the same bits with --gradients none, but not kept
        that_keeps.keep_gradients = true;
        Training kept = training_on(make_gpu, that_keeps);
        restore(*kept.model, before);
        kept.model->quantization(gpu.tokens.data(), gpu.targets.data());
        const auto moments = errors_of_moments(*kept.model, before);
        for (int kind = 0; kind < static_cast<int>(Kind::Count); kind++) {
            const bool moment = kind >= static_cast<int>(Kind::Moment1);
            const QuantStats &on_gpu = a.kinds[kind],
                             &on_cpu =
                                 moment ? moments[kind == static_cast<int>(Kind::Moment2)] : b.kinds[kind];
            INFO(std::string(setup.recipe.name), " ", std::string(KIND_NAMES[kind]), ": ", on_gpu.snr_db(),
                 " and ", on_cpu.snr_db(), " dB");
            CHECK(on_gpu.elements == on_cpu.elements);
            const Kind k = static_cast<Kind>(kind);
            bool quantized = true;
            if (k == Kind::Attention) quantized = setup.recipe.attention.fp8();
            if (k == Kind::NormInput || k == Kind::ActivationInput) quantized = groups;
            CHECK((on_gpu.elements > 0) == quantized);
            if (on_gpu.elements > 0)
                CHECK(std::fabs(on_gpu.snr_db() - on_cpu.snr_db()) <= (moment ? 0.2 : 1));
            if (moment) CHECK(std::fabs(on_gpu.signal - on_cpu.signal) <= 1e-4 * on_cpu.signal);
            if (!delayed) CHECK(on_gpu.saturated == 0);
        }
        CHECK(a.k_m == b.k_m);
        CHECK(a.k_v == b.k_v);
    }
}
