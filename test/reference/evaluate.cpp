// evaluate.cpp - what a Model of the CPU reference reports without training: evaluate,
// next_logits and the report on quantization.
#include <doctest/doctest.h>

#include <algorithm>

#include "../../reference.h"
#include "../help/model_checks.h"
#include "../help/setups.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;
using namespace coat::test::setups;

TEST_CASE("evaluate: gives the loss of a step's forward pass and changes nothing") {
    for (const Architecture& arch : {LLAMA, GPT2})
        for (const char* recipe : {"fp32", "bf16", "coat", "te", "deepseek", "lean"}) {
            Training training(recipe == std::string("lean") ? with_mode(setup_of("coat", arch), "lean")
                                                            : setup_of(recipe, arch));
            check_evaluate(training);
        }
}

TEST_CASE("evaluate: detects a value that is not finite although its FP8 code saturates") {
    for (const char* recipe : {"te", "colossal", "coat", "bf16"}) {
        Training training(setup_of(recipe));
        check_infinite_evaluation(training);
    }
}

TEST_CASE("next_logits: amaxes are those of the prompt, for any length") {
    for (const char* recipe : {"bf16", "coat", "te", "colossal"})
        for (const Architecture& arch : {LLAMA, GPT2}) check_prompt(make_reference, recipe, arch, 1e-4);
}

TEST_CASE("next_logits: falls back to BF16 where a training batch does, for any length") {
    for (const char* recipe : {"te", "colossal", "rowwise", "deepseek"})
        check_fallback(make_reference, recipe);
}

TEST_CASE("next_logits: equal the logits of the loss, for any length") {
    // The loss of a single sequence is the mean over its tokens, each predicted by next_logits of the tokens
    // before.
    for (const Architecture& arch : {LLAMA, QWEN2, GPT2}) {
        Setup setup = tiny_setup(tiny_config(arch, true), "fp32", "fp32", 1, 16);
        Training training(setup);
        losses(training, 10);
        training.text.next(1, 16, &training.tokens, &training.targets);
        double total = 0;
        for (int64_t n = 1; n <= 16; n++) {
            std::vector<float> logits(static_cast<size_t>(setup.config.V));
            training.model->next_logits(training.tokens.data(), n, logits.data());
            double sum = 0;
            for (float l : logits) sum += std::exp(double(l));
            total += std::log(sum) - double(logits[size_t(training.targets[size_t(n - 1)])]);
        }
        CHECK(training.model->evaluate(training.tokens.data(), training.targets.data()) ==
              doctest::Approx(total / 16).epsilon(1e-5));
    }
}

TEST_CASE("evaluate: where only backward reads groups, the loss is that of a recipe without groups") {
    for (const char* name : {"coat", "coat-saved"}) {
        Training training(setup_of(name));
        training.text.next(4, 32, &training.tokens, &training.targets);
        Setup without_groups = training.model->setup();
        without_groups.recipe.nonlinear = Q_BF16;
        const std::unique_ptr<Model> other = make_reference(without_groups);
        auto loss = [&](Model& model) {
            return model.evaluate(training.tokens.data(), training.targets.data());
        };
        CHECK((loss(*training.model) == loss(*other)) ==
              !training.model->setup().recipe.forward_reads_groups);
    }
}

TEST_CASE("quantization: the report measures every kind of tensor and changes nothing") {
    // A uniform relative error of half a step of E4M3 has an rms of 2^-4 / sqrt(3), which is 28.8 dB; of E5M2
    // 22.8 dB. With per-tensor scales small elements have larger relative errors, but little weight in the
    // sum. Second moments have k above 1, and smaller errors.
    Training training(with_mode(setup_of("coat"), "lean"));
    losses(training, count(20, 2));
    const Snapshot before = snapshot(*training.model);
    const QuantReport report = training.model->quantization(training.tokens.data(), training.targets.data());
    CHECK((snapshot(*training.model) == before));
    for (int kind = 0; kind < static_cast<int>(Kind::Count); kind++) {
        const QuantStats& s = report.kinds[kind];
        INFO(std::string(KIND_NAMES[kind]), ": ", s.snr_db(), " dB of ", s.elements);
        CHECK(s.elements > 0);
        CHECK(s.saturated == 0);
        CHECK(s.snr_db() > (kind == static_cast<int>(Kind::Gradient) ? 22.8 : 28.8));
        CHECK(s.snr_db() < 60);
        CHECK(s.flushed <= s.elements / 20);
    }
    int64_t groups = 0;
    for (const Param& p : parameters(training.model->setup().config))
        groups += is_fp8(p.moment(Format::E4M3)) ? p.groups() : 0;
    for (const std::vector<float>* k : {&report.k_m, &report.k_v}) {
        CHECK(int64_t(k->size()) == groups);
        CHECK(std::is_sorted(k->begin(), k->end()));
        CHECK((k->front() >= 1.0f / 16 && k->back() <= 64));
    }
    Training usual(setup_of("coat"));
    usual.step();
    const QuantReport without = usual.model->quantization(usual.tokens.data(), usual.targets.data());
    for (int kind = 0; kind < static_cast<int>(Kind::Count); kind++)
        CHECK((without.kinds[kind].elements == 0) == (kind == static_cast<int>(Kind::Attention)));
    Training plain(setup_of("fp32"));
    plain.step();
    const QuantReport none = plain.model->quantization(plain.tokens.data(), plain.targets.data());
    for (const QuantStats& s : none.kinds) CHECK((s.elements == 0 && s.noise == 0));
}

TEST_CASE("quantization: of the moments, the report measures what the next step would store") {
    for (const OptimizerFormat& optimizer : optimizers()) {
        Setup setup = setup_of("coat");
        setup.optimizer = optimizer;
        Training training(setup);
        losses(training, 5);
        Model& model = *training.model;
        const QuantReport report = model.quantization(training.tokens.data(), training.targets.data());
        const auto expected = errors_of_moments(model, snapshot(model));
        for (size_t v : {0, 1}) {
            const QuantStats& got = report.kinds[static_cast<size_t>(Kind::Moment1) + v];
            INFO(std::string(optimizer.name), " ", v);
            CHECK((got.elements == expected[v].elements && got.flushed == expected[v].flushed));
            CHECK(std::fabs(got.signal - expected[v].signal) <= 1e-12 * expected[v].signal);
            CHECK(std::fabs(got.noise - expected[v].noise) <= 1e-12 * expected[v].noise);
        }
    }
}

TEST_CASE("fp8lm optimizer: trains, saves its scale in the state, and reports what is flushed") {
    const Setup setup = tiny_setup(tiny_config(LLAMA, true), "bf16", "fp8lm");
    Training training(setup), exact(tiny_setup(tiny_config(LLAMA, true), "bf16", "fp32"));
    double loss = 0, expected = 0, first = 0;
    for (int64_t i = 0; i < count(60, 10); i++) {
        loss = training.step().loss, expected = exact.step().loss;
        if (i == 0) first = loss;
    }
    CHECK(std::fabs(loss - expected) < 0.02 * expected);
    CHECK(loss < first);
    const int64_t n = 64 * 64;
    const std::string name = "layers.0.attention_out";
    const float max = read_as<float>(*training.model, name + ".v.max", 1)[0];
    const std::vector<uint16_t> v = read_as<uint16_t>(*training.model, name + ".v", n);
    const uint16_t top = *std::max_element(v.begin(), v.end());
    CHECK(top == 0x7BFF);  // the largest element has the largest code
    CHECK(max > 0);
    const QuantReport report = training.model->quantization(training.tokens.data(), training.targets.data());
    const QuantStats& m = report.kinds[static_cast<int>(Kind::Moment1)];
    const QuantStats& second = report.kinds[static_cast<int>(Kind::Moment2)];
    int64_t elements = 0;
    for (const Param& p : parameters(setup.config)) elements += p.role.fp8_state ? p.size() : 0;
    CHECK((m.elements == elements && second.elements == elements));
    CHECK(m.flushed > 0);  // E4M3 per tensor reaches 2^-18 of the largest value
    CHECK(second.flushed < m.flushed);
    CHECK(second.snr_db() > m.snr_db());
    CHECK((report.k_m.empty() && report.k_v.empty()));
}
