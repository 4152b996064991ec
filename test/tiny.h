// tiny.h - models small enough to train many times in a test, and text for them to learn.
#pragma once
#include <memory>
#include <string>
#include <vector>

#include "../coat.h"
#include "random.h"

namespace coat::test {

inline ModelConfig tiny_config(const Architecture& arch, bool tied) {
    const int64_t NKV = arch.rope ? 2 : 4;  // grouped queries where the architecture has them
    return {std::string("test-") + arch.name, arch, 2, 64, 4, NKV, 176, 50, 64, tied};
}

inline Setup tiny_setup(const ModelConfig& config, const std::string& recipe, const std::string& optimizer, int64_t B = 8, int64_t T = 32) {
    return {config, find_row(recipes(), recipe, "recipe"), find_row(optimizers(), optimizer, "optimizer"), B, T};
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
        if (!result.skipped) adamw.last_norm = result.grad_norm;
        return result;
    }
};

template <class Value>
std::vector<Value> read_as(Model& model, const std::string& name, int64_t n) {
    std::vector<Value> x(static_cast<size_t>(n));
    model.read(name, x.data());
    return x;
}

}  // namespace coat::test
