// tiny.h - models small enough to train many times in a test, text for them to learn, and what is asked of a model wherever it runs.
#pragma once
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../plan.h"
#include "../reference.h"
#include "random.h"

namespace coat::test {

inline ModelConfig tiny_config(const Architecture& arch, bool tied) {
    const int64_t NKV = arch.rope ? 2 : 4;  // grouped queries where the architecture has them
    return {std::string("test-") + arch.name, arch, 2, 64, 4, NKV, 176, 50, 64, tied};
}

inline Setup tiny_setup(const ModelConfig& config, const std::string& recipe, const std::string& optimizer, int64_t B = 8, int64_t T = 32) {
    return {config, find_row(recipes(), recipe, "recipe"), find_row(optimizers(), optimizer, "optimizer"), B, T};
}

inline const char* optimizer_of(const std::string& recipe) { return recipe == "coat" ? "coat" : recipe == "bf16" ? "bf16" : "fp32"; }

// The second choice of --flag (plan.h); "lean": of all that change the numbers.
inline Setup with_mode(Setup s, const std::string& flag) {
    for (const MemoryMode& mode : memory_modes())
        if (flag == mode.flag || (flag == "lean" && mode.changes_numbers)) mode.choose(s, false);
    return s;
}

// Endless text with something to learn: each token draws the next from four that follow it, the first of them half of the time.
// Its entropy is 1.75 bits = 1.21 nats a token.
class Text {
public:
    Text(uint64_t seed, int64_t V) : rng_(seed), V_(V) {
        Random table(17);
        for (int64_t i = 0; i < 4 * V; i++) successors_.push_back(static_cast<int32_t>(table.below(V)));
    }
    // tokens and targets of n sequences of T
    void next(int64_t n, int64_t T, std::vector<int32_t>* tokens, std::vector<int32_t>* targets) {
        tokens->clear(), targets->clear();
        for (int64_t s = 0; s < n; s++) {
            int32_t token = static_cast<int32_t>(rng_.below(V_));
            for (int64_t t = 0; t < T; t++) {
                tokens->push_back(token);
                token = follow(token);
                targets->push_back(token);
            }
        }
    }

private:
    int32_t follow(int32_t token) {
        const int64_t draw = rng_.below(8), which = draw < 4 ? 0 : draw < 6 ? 1 : draw - 4;
        return successors_[static_cast<size_t>(4 * token + which)];
    }
    Random rng_;
    int64_t V_;
    std::vector<int32_t> successors_;
};

// A model with the text it learns from.
struct Training {
    std::unique_ptr<Model> model;
    Text text;
    std::vector<int32_t> tokens, targets;
    AdamW adamw{0, 3e-3f};

    explicit Training(const Setup& setup, uint64_t seed = 1) : model(make_reference(setup)), text(seed, setup.config.V) {}
    StepResult step() {
        const Setup& s = model->setup();
        text.next(s.accumulate * s.B, s.T, &tokens, &targets);
        adamw.step++;
        const StepResult result = model->step(tokens.data(), targets.data(), adamw);
        if (!result.skipped) adamw.growth = result.growth;
        return result;
    }
};

template <class Value>
std::vector<Value> read_as(Model& model, const std::string& name, int64_t n) {
    std::vector<Value> x(static_cast<size_t>(n));
    model.read(name, x.data());
    return x;
}

inline std::vector<StateTensor> state_tensors(const Setup& s) {
    std::vector<StateTensor> all = weight_tensors(s.config);
    for (const StateTensor& t : optimizer_tensors(s)) all.push_back(t);
    return all;
}

using Snapshot = std::map<std::string, std::vector<uint8_t>>;
inline Snapshot snapshot(Model& model) {
    Snapshot bytes;
    for (const StateTensor& t : state_tensors(model.setup())) {
        bytes[t.name].resize(static_cast<size_t>(t.total_bytes()));
        model.read(t.name, bytes[t.name].data());
    }
    return bytes;
}
inline void restore(Model& model, const Snapshot& bytes) {
    for (const auto& [name, values] : bytes) model.write(name, values.data());
}

inline std::vector<double> losses(Training& training, int64_t steps) {
    std::vector<double> result;
    for (int64_t i = 0; i < steps; i++) {
        const StepResult r = training.step();
        REQUIRE(!r.skipped);
        REQUIRE(std::isfinite(r.grad_norm));
        result.push_back(r.loss);
    }
    return result;
}

inline double mean(const std::vector<double>& x, size_t first, size_t last) {
    double sum = 0;
    for (size_t i = first; i < last; i++) sum += x[i];
    return sum / double(last - first);
}

// evaluate() is the forward pass of a step and changes nothing.
inline void check_evaluate(Training& training) {
    losses(training, 2);
    training.text.next(training.model->setup().B, training.model->setup().T, &training.tokens, &training.targets);
    const Snapshot before = snapshot(*training.model);
    const double loss = training.model->evaluate(training.tokens.data(), training.targets.data());
    CHECK((snapshot(*training.model) == before));
    CHECK(training.model->evaluate(training.tokens.data(), training.targets.data()) == loss);
    training.adamw.step++;
    CHECK(training.model->step(training.tokens.data(), training.targets.data(), training.adamw).loss == loss);
}

// A step with a weight that is not finite changes nothing, and training goes on once the weight is good again.
inline void check_poisoned_weight(Training& training, const std::string& name, float poison) {
    losses(training, 1);
    const Snapshot good = snapshot(*training.model);
    Snapshot bad = good;
    const uint16_t bits = reference::to_bf16(poison);
    for (size_t i = 0; i < 50; i++) std::memcpy(bad[name].data() + 2 * i, &bits, 2);  // of the embedding: of every row of the first tokens
    restore(*training.model, bad);
    CHECK(training.step().skipped);
    CHECK((snapshot(*training.model) == bad));
    restore(*training.model, good);
    training.adamw.step--;
    CHECK(!training.step().skipped);
    CHECK((snapshot(*training.model) != good));
}

// Layer 1's gates are 0, so its feed-forward half adds 0 whatever W_up and W_down are. Backward, the gradient of a gate is a product of both:
// about 2^80, which every format of a gradient can represent, but whose square is beyond FP32. Not clipped, the step changes nothing; clipped, it
// is taken, and the optimizer's state stays finite.
inline void check_huge_gradients(Training& training) {
    const ModelConfig& c = training.model->setup().config;
    losses(training, 1);
    Snapshot state = snapshot(*training.model);
    auto fill = [&](const std::string& name, int64_t first, int64_t n, float value) {
        const uint16_t bits = reference::to_bf16(value);
        for (int64_t i = first; i < first + n; i++) std::memcpy(state.at(name).data() + 2 * i, &bits, 2);
        if (state.count(name + ".remainder")) std::fill_n(state.at(name + ".remainder").begin() + 2 * first, 2 * n, uint8_t(0));
    };
    fill("layers.1.up", 0, c.F * c.C, 0.0f);
    fill("layers.1.up", c.F * c.C, c.F * c.C, 0x1p50f);
    fill("layers.1.down", 0, c.C * c.F, 0x1p40f);
    fill("layers.1.down", 0, c.C * c.F / 2, -0x1p39f);  // else the sum over a row of the gradient might cancel
    restore(*training.model, state);
    training.adamw.clip = 0;
    const StepResult huge = training.step();
    CHECK(huge.grad_norm >= 0x1p62);
    CHECK(std::isfinite(huge.grad_norm));
    CHECK(huge.skipped);
    CHECK((snapshot(*training.model) == state));
    training.adamw.clip = 1;
    training.adamw.step--;
    CHECK(!training.step().skipped);
    const Snapshot after = snapshot(*training.model);
    CHECK((after != state));
    for (const StateTensor& t : state_tensors(training.model->setup())) {
        if (t.dtype != std::string("F32")) continue;
        int64_t finite = 0;
        for (float v : read_as<float>(*training.model, t.name, t.size())) finite += std::isfinite(v);
        INFO(t.name);
        CHECK(finite == t.size());
    }
}

}  // namespace coat::test
