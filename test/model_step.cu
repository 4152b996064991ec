// model_step.cu - one training step of the model on the GPU: its loss and gradients against the CPU
// reference.
//
// Both implementations of a recipe round in the same places, but they sum in different orders, and tensor
// cores use BF16 probabilities in attention. So some values round in the other direction. In fp32 the
// difference is the error of FP32 sums. In the other recipes it is bounded by the recipe's own error: the
// distance of the reference's gradient from fp32's.
#include <cmath>
#include <cstring>
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

namespace {

// The error of a gradient is a sum of many random roundings. Two implementations that round independently
// differ by sqrt(2) of it. The factor 1.5 allows for the scatter of an error that is measured on a vector of
// only 64 values.
constexpr double TWO_IMPLEMENTATIONS = 1.5 * 1.4142135623730951;

// Checks loss, gradients and gradient norm of one step of `setup`, with random biases and norm weights.
void check_step(const Setup& setup) {
    Setup exact_setup = setup;
    exact_setup.recipe = find_row(recipes(), "fp32", "recipe");
    const std::vector<Param> params = parameters(setup.config);
    Training gpu = training_on(make_gpu, setup), cpu = training_on(make_reference, setup);
    Training exact = training_on(make_reference, exact_setup);
    // Biases start at 0 and norm weights at 1. Give them random values, the same in all three models.
    FRESH_RANDOM(rng);
    for (const Param& p : params) {
        if (p.init_std > 0) continue;
        std::vector<uint16_t> values;
        for (int64_t i = 0; i < p.size(); i++)
            values.push_back(reference::to_bf16(float((p.role.weight ? 1 : 0) + 0.05 * rng.normal())));
        for (Training* t : {&gpu, &cpu, &exact}) t->model->write(p.name, values.data());
    }
    // The fp32 recipe computes with the master weights, the others with these rounded to BF16. Remainders of
    // 0 make both equal.
    for (const Param& p : params) {
        const std::vector<int16_t> zero(static_cast<size_t>(p.size()), 0);
        for (Training* t : {&gpu, &cpu, &exact}) t->model->write(p.name + ".remainder", zero.data());
    }
    for (Training* t : {&gpu, &cpu, &exact}) t->adamw.lr = 0;
    if (setup.recipe.scaling == Scaling::Delayed) {  // the first step uses just-in-time scales
        for (Training* t : {&gpu, &cpu, &exact}) t->step();
        restore(*cpu.model, snapshot(*gpu.model));
    }
    const StepResult on_gpu = gpu.step(), on_cpu = cpu.step(), in_fp32 = exact.step();
    const bool fp32 = setup.recipe.compute == Format::F32;
    const std::string batch =
        std::to_string(setup.B) + "x" + std::to_string(setup.T) + "x" + std::to_string(setup.accumulate);
    const std::string what =
        setup.config.name + (setup.config.tied ? " tied " : " untied ") + setup.recipe.name + " " + batch;
    INFO(what);
    CHECK(!on_gpu.skipped);
    const double small = fp32_bound(setup.config);
    // The loss is a mean over tokens, so the recipe's error may be small by chance. BF16's rounding error is
    // always allowed.
    const double own_error = std::fabs(on_cpu.loss - in_fp32.loss);
    const double loss_bound =
        fp32 ? small * on_cpu.loss : TWO_IMPLEMENTATIONS * own_error + 0x1p-9 * on_cpu.loss;
    CHECK(std::fabs(on_gpu.loss - on_cpu.loss) <= loss_bound);
    double sum_of_squares = 0, worst = 0;
    for (const Param& p : params) {
        const Floats got = gradient(*gpu.model, p), wanted = gradient(*cpu.model, p);
        const double error = relative_error(got, wanted);
        const double own = relative_error(wanted, gradient(*exact.model, p));  // of the recipe
        const double bound = fp32 ? small : TWO_IMPLEMENTATIONS * own + 0x1p-9;
        INFO(p.name, ": differs by ", error, ", the recipe itself by ", own);
        CHECK(norm(wanted) > 0);
        CHECK(error <= bound);
        sum_of_squares += norm(got) * norm(got);
        worst = std::max(worst, error / bound);
    }
    MESSAGE(what, ": worst gradient at ", worst, " of its bound; loss ", on_gpu.loss, " and ", on_cpu.loss);
    CHECK(on_gpu.grad_norm == doctest::Approx(std::sqrt(sum_of_squares)).epsilon(1e-6));
}

}  // namespace

GPU_TEST_CASE("step: loss and every gradient against the reference") {
    for (const char* recipe : RECIPES) {
        for (bool tied : {true, false}) check_step(setup_of(recipe, LLAMA, tied));
        check_step(setup_of(recipe, GPT2, true));
        check_step(setup_of(recipe, QWEN2, true));
        for (bool tied : {true, false})
            check_step(tiny_setup(wide_heads(tied), recipe, optimizer_of(recipe), 2, 80));
        Setup accumulating = setup_of(recipe, LLAMA, false, 2, 16);
        for (int64_t accumulate : {3, 8}) {  // gradients are in the compute dtype with 3, and in FP32 with 8
            accumulating.accumulate = accumulate;
            check_step(accumulating);
        }
        Setup gpt2 = setup_of(recipe, GPT2, true, 2, 16);
        gpt2.accumulate = 3;  // the gradient of the tied embedding is in FP32
        check_step(gpt2);
        Setup qwen2 = setup_of(recipe, QWEN2, false, 2, 16);
        qwen2.accumulate = 3;
        check_step(qwen2);
    }
}

namespace {

// A custom recipe: one of the table's, with norm and activation inputs in another format.
Setup custom(const std::string& recipe, const Architecture& arch, const Quant& nonlinear) {
    Setup s = setup_of(recipe, arch);
    s.recipe.nonlinear = nonlinear;
    return s;
}

}  // namespace

GPU_TEST_CASE(
    "step: custom recipes with FP8 groups and per-row, 1x128 or delayed scaling; 1x128 for both operands") {
    for (const Architecture& arch : {LLAMA, GPT2}) {
        for (const char* recipe : {"te", "rowwise", "deepseek"}) check_step(custom(recipe, arch, Q_GROUP));
        Setup both_1x128 = custom("deepseek", arch, Q_BF16);
        both_1x128.recipe.w = Q_1x128;
        check_step(both_1x128);
        Setup swapped = custom("deepseek", arch, Q_BF16);
        swapped.recipe.x = Q_128x128, swapped.recipe.w = Q_1x128;
        check_step(swapped);
        Setup inputs = setup_of("coat", arch);  // the formats of inputs and gradients exchanged
        inputs.recipe.x = Q_E5M2, inputs.recipe.g = Q_E4M3;
        check_step(inputs);
        Setup cached = setup_of("coat", arch);  // FP8 weights that two micro-batches use
        cached.accumulate = 2;
        check_step(cached);
    }
}

GPU_TEST_CASE("step: attention saved in FP8 groups; coat with FP8 storage and BF16 GEMMs") {
    for (const Architecture& arch : {LLAMA, QWEN2, GPT2}) {
        check_step(with_mode(setup_of("coat", arch), "attention"));
        check_step(with_mode(setup_of("coat", arch, true, 3, 7), "attention"));
        Setup bf16_gemms = setup_of("coat", arch);
        bf16_gemms.recipe = recipe_on_gpu(bf16_gemms.recipe, false);
        check_step(bf16_gemms);
    }
    check_step(with_mode(tiny_setup(wide_heads(false), "coat", "coat", 2, 80), "attention"));
}

GPU_TEST_CASE("step: --gradients none changes no bits where nothing is clipped") {
    for (const char* recipe : RECIPES)
        for (const ModelConfig& config :
             {tiny_config(LLAMA, false), tiny_config(LLAMA, true), tiny_config(GPT2, true),
              tiny_config(QWEN2, false), wide_heads(true)}) {
            const Setup setup = tiny_setup(config, recipe, optimizer_of(recipe), 4, 48);
            Training kept = training_on(make_gpu, setup);
            Training none = training_on(make_gpu, with_mode(setup, "gradients"));
            kept.adamw.clip = none.adamw.clip = 0;
            INFO(config.name, " ", std::string(recipe));
            for (int i = 0; i < 4; i++) {
                const StepResult a = kept.step(), b = none.step();
                CHECK(a.loss == b.loss);
                // The same sum of doubles in another order.
                CHECK(a.grad_norm == doctest::Approx(b.grad_norm).epsilon(1e-12));
            }
            CHECK((snapshot(*kept.model) == snapshot(*none.model)));
            Floats gradient(static_cast<size_t>(config.C));
            CHECK_THROWS_AS(none.model->read("final_norm.weight.gradient", gradient.data()), Error);
        }
}

GPU_TEST_CASE("step: tokens that are no multiple of 16 make linear layers fall back to BF16") {
    for (const char* recipe : RECIPES)
        for (const Architecture& arch : {LLAMA, QWEN2, GPT2}) check_step(setup_of(recipe, arch, true, 3, 7));
}

GPU_TEST_CASE("step: batches cut into chunks for the head and the feed-forward input") {
    constexpr int64_t B = 262, T = 64;
    static_assert(B * T > GATE_UP_TOKENS && B * T % HEAD_TOKENS != 0);
    REQUIRE(head_sum_apart(setup_of("bf16", LLAMA, false, B, T)));
    for (const char* recipe : {"bf16", "coat"}) check_step(setup_of(recipe, LLAMA, false, B, T));
    Setup accumulating = setup_of("coat", LLAMA, true, B, T);
    accumulating.accumulate = 2;
    check_step(accumulating);
}

GPU_TEST_CASE("make_gpu: initial weights equal the reference's bit for bit") {
    for (const char* recipe : RECIPES)
        for (const Architecture& arch : {LLAMA, QWEN2, GPT2}) {
            const Setup setup = setup_of(recipe, arch);
            Training gpu = training_on(make_gpu, setup), cpu = training_on(make_reference, setup);
            CHECK((snapshot(*gpu.model) == snapshot(*cpu.model)));
        }
}

GPU_TEST_CASE("step: skipped steps give stochastic rounding new random bits, and change nothing else") {
    const Setup setup = with_mode(setup_of("bf16"), "master");
    Training early = training_on(make_gpu, setup), late = training_on(make_gpu, setup);
    late.adamw.skipped = 1;
    early.step(), late.step();
    const Snapshot a = snapshot(*early.model), b = snapshot(*late.model);
    CHECK((a.at("layers.0.qkv.m") == b.at("layers.0.qkv.m")));
    CHECK((a.at("layers.0.qkv") != b.at("layers.0.qkv")));
}

GPU_TEST_CASE("step: a loss or gradient that is not finite changes nothing, and training continues") {
    for (const char* recipe : {"fp32", "bf16", "coat", "lean", "te", "rowwise", "deepseek"})
        for (const char* name :
             {"embedding", "layers.0.qkv", "layers.1.down", "layers.0.norm2.weight", "final_norm.weight"})
            for (float poison : {NAN, INFINITY}) {
                const bool lean = !std::strcmp(recipe, "lean");
                const Setup setup = lean ? with_mode(setup_of("coat"), recipe) : setup_of(recipe);
                Training training = training_on(make_gpu, setup);
                INFO(std::string(recipe), " ", std::string(name), " ", poison);
                check_poisoned_weight(training, name, poison);
            }
}

// The first step moves a weight by the learning rate times g / (|g| + eps), so by at most the learning rate.
// Weight decay moves it further, and with a factor of 8 by far more than rounding does.
GPU_TEST_CASE("step: weight decay acts on matrices, not on norm weights and biases") {
    for (const char* recipe : {"fp32", "coat"})
        for (const Architecture& arch : {LLAMA, GPT2, QWEN2}) {
            Training t = training_on(make_gpu, setup_of(recipe, arch));
            t.adamw.weight_decay = 8;
            auto masters = [&](const Param& p) {
                const auto weights = read_as<uint16_t>(*t.model, p.name, p.size());
                const auto remainders = read_as<int16_t>(*t.model, p.name + ".remainder", p.size());
                Floats x;
                for (size_t i = 0; i < weights.size(); i++)
                    x.push_back(reference::join_master(weights[i], remainders[i]));
                return x;
            };
            std::vector<Floats> before;
            const std::vector<Param> params = parameters(t.model->setup().config);
            for (const Param& p : params) {  // norm weights and biases of 1: decay would move all of them
                const std::vector<uint16_t> ones(size_t(p.size()), reference::to_bf16(1));
                if (!p.role.decay) t.model->write(p.name, ones.data());
                before.push_back(masters(p));
            }
            CHECK(!t.step().skipped);
            for (size_t i = 0; i < params.size(); i++) {
                const Floats after = masters(params[i]);
                float furthest = 0;
                for (size_t e = 0; e < after.size(); e++)
                    furthest = std::max(furthest, std::fabs(after[e] - before[i][e]) / t.adamw.lr);
                INFO(t.model->setup().config.name, " ", recipe, " ", params[i].name, ": ", furthest);
                CHECK((furthest > 1.01f) == params[i].role.decay);
            }
        }
}

GPU_TEST_CASE("evaluate: gives the loss of a step's forward pass and changes nothing") {
    for (const Architecture& arch : {LLAMA, GPT2})
        for (const char* recipe : RECIPES) {
            Training training = training_on(make_gpu, setup_of(recipe, arch));
            check_evaluate(training);
        }
}
