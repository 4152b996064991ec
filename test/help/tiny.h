// tiny.h - models that are small enough to train many times in a test, and text for them to learn.
#pragma once
#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "../../program/plan.h"
#include "../../reference.h"
#include "random.h"

namespace coat::test {

inline ModelConfig tiny_config(const Architecture& arch, bool tied) {
    const int64_t NKV = arch.rope ? 2 : 4;  // grouped queries if the architecture has them
    ModelConfig c{std::string("test-") + arch.name, arch, 2, 64, 4, NKV, 176, 50, 64, tied};
    // Of a head's 8 frequencies one is kept, one is interpolated, and the others are divided.
    if (arch.rope && arch.qkv_bias) c.rope_scaling = {RopeScaling::Llama3, 8, 0.5f, 2, 16};
    return c;
}

inline Setup tiny_setup(const ModelConfig& config, const std::string& recipe, const std::string& optimizer,
                        int64_t B = 8, int64_t T = 32) {
    return {config, find_row(recipes(), recipe, "recipe"), find_row(optimizers(), optimizer, "optimizer"), B,
            T};
}

inline const char* optimizer_of(const std::string& recipe) {
    return recipe == "coat" ? "coat" : recipe == "bf16" ? "bf16" : "fp32";
}

// The setup with the choice of --attention, --master or --gradients that saves memory; "lean": of all three.
inline const std::vector<std::string> MEMORY_MODES = {"attention", "master", "gradients"};
inline Setup with_mode(Setup s, const std::string& flag) {
    if (flag == "attention" || flag == "lean") s.recipe.attention = Q_GROUP;
    if (flag == "master" || flag == "lean") s.master = false;
    if (flag == "gradients" || flag == "lean") s.keep_gradients = false;
    return s;
}

// Endless random text that a model can learn. Each token is followed by one of four tokens, with
// probabilities 1/2, 1/4, 1/8 and 1/8. Its entropy is 1.75 bits = 1.21 nats a token.
class Text {
public:
    Text(uint64_t seed, int64_t V) : rng_(seed), V_(V) {
        Random table(17);
        for (int64_t i = 0; i < 4 * V; i++) successors_.push_back(static_cast<int32_t>(table.below(V)));
    }
    // Gives tokens and targets of n sequences of length T.
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

// Leaves a third of the targets of even micro-batches of n, a sixth of odd ones, and none of every fourth.
inline void mask_unevenly(std::vector<int32_t>* targets, int64_t n) {
    for (size_t i = 0; i < targets->size(); i++) {
        const int64_t micro_batch = int64_t(i) / n, each = micro_batch % 2 ? 6 : 3;
        if (micro_batch % 4 == 3 || int64_t(i) % each) (*targets)[i] = NO_TARGET;
    }
}

// A model and the text that it is trained on.
struct Training {
    std::unique_ptr<Model> model;
    Text text;
    std::vector<int32_t> tokens, targets;
    AdamW adamw{0, 3e-3f};

    explicit Training(const Setup& setup, uint64_t seed = 1)
        : model(make_reference(setup)), text(seed, setup.config.V) {
        if (!setup.keep_gradients) adamw.clip = 0;
    }
    StepResult step() {
        const Setup& s = model->setup();
        text.next(s.accumulate * s.B, s.T, &tokens, &targets);
        adamw.step++;
        return model->step(tokens.data(), targets.data(), adamw);
    }
};

template <class Value> std::vector<Value> read_as(Model& model, const std::string& name, int64_t n) {
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

// Changes n weights of a parameter in a snapshot, from element `first` on. Their remainders become 0.
template <class Change>
void change_weights(Snapshot& state, const std::string& name, int64_t first, int64_t n, Change change) {
    for (int64_t i = first; i < first + n; i++) {
        uint16_t bits;
        std::memcpy(&bits, state.at(name).data() + 2 * i, 2);
        bits = reference::to_bf16(change(reference::from_bf16(bits)));
        std::memcpy(state.at(name).data() + 2 * i, &bits, 2);
    }
    if (state.count(name + ".remainder"))
        std::fill_n(state.at(name + ".remainder").begin() + 2 * first, 2 * n, uint8_t(0));
}

// Writes a snapshot in which layer 1's gates are 0 and its up and down weights huge. Forward, the
// feed-forward half adds 0. Backward, the gradient of a gate is a product of dy, up and down, and so huge.
inline Snapshot write_huge_gate_gradient(Model& model, float up, float down) {
    const ModelConfig& c = model.setup().config;
    Snapshot state = snapshot(model);
    auto fill = [&](const char* name, int64_t first, int64_t n, float value) {
        change_weights(state, name, first, n, [=](float) { return value; });
    };
    fill("layers.1.gate_up", 0, c.F * c.C, 0.0f);
    fill("layers.1.gate_up", c.F * c.C, c.F * c.C, up);
    fill("layers.1.down", 0, c.C * c.F / 2, -down / 2);  // two values: the sum over a row must not cancel
    fill("layers.1.down", c.C * c.F / 2, c.C * c.F - c.C * c.F / 2, down);
    restore(model, state);
    return state;
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

}  // namespace coat::test
