// tiny.h - models small enough to train many times in a test, text for them to learn, and what is asked of a
// model wherever it runs.
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

inline Setup tiny_setup(const ModelConfig& config, const std::string& recipe, const std::string& optimizer,
                        int64_t B = 8, int64_t T = 32) {
    return {config, find_row(recipes(), recipe, "recipe"), find_row(optimizers(), optimizer, "optimizer"), B,
            T};
}

inline const char* optimizer_of(const std::string& recipe) {
    return recipe == "coat" ? "coat" : recipe == "bf16" ? "bf16" : "fp32";
}

// The second choice of --flag (plan.h); "lean": of all that change the numbers.
inline Setup with_mode(Setup s, const std::string& flag) {
    for (const MemoryMode& mode : memory_modes())
        if (flag == mode.flag || (flag == "lean" && mode.changes_numbers)) mode.choose(s, false);
    return s;
}

// Endless text with something to learn: each token draws the next from four that follow it, the first of them
// half of the time. Its entropy is 1.75 bits = 1.21 nats a token.
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

    explicit Training(const Setup& setup, uint64_t seed = 1)
        : model(make_reference(setup)), text(seed, setup.config.V) {}
    StepResult step() {
        const Setup& s = model->setup();
        text.next(s.accumulate * s.B, s.T, &tokens, &targets);
        adamw.step++;
        const StepResult result = model->step(tokens.data(), targets.data(), adamw);
        if (!result.skipped) adamw.norm_correction = result.norm_correction;
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
    training.text.next(training.model->setup().B, training.model->setup().T, &training.tokens,
                       &training.targets);
    const Snapshot before = snapshot(*training.model);
    const double loss = training.model->evaluate(training.tokens.data(), training.targets.data());
    CHECK((snapshot(*training.model) == before));
    CHECK(training.model->evaluate(training.tokens.data(), training.targets.data()) == loss);
    training.adamw.step++;
    CHECK(training.model->step(training.tokens.data(), training.targets.data(), training.adamw).loss == loss);
}

// Gradients of 64 micro-batches that are added up, against the sum in double of each one's: equal terms, and
// terms that differ. They are off by one rounding of each sum to the format that gradients are kept in. One
// micro-batch's is measured with a step of eight copies of it. All factors are powers of two, which change no
// bit of a term.
inline void check_sums(std::unique_ptr<Model> (*make)(const Setup&), Setup setup) {
    constexpr int64_t MANY = 64, COPIES = 8;
    setup.B = 1, setup.T = 16, setup.accumulate = MANY;
    const std::vector<Param> params = parameters(setup.config);
    Training sum(setup), one(setup);
    sum.model = make(setup);
    setup.accumulate = COPIES;
    one.model = make(setup);
    sum.adamw.lr = one.adamw.lr = 0;
    auto gradients = [&](Training& t) {
        std::vector<std::vector<float>> all;
        for (const Param& p : params) all.push_back(read_as<float>(*t.model, p.name + ".gradient", p.size()));
        return all;
    };
    for (const bool equal : {true, false}) {
        sum.text.next(MANY, setup.T, &sum.tokens, &sum.targets);
        for (std::vector<int32_t>* x : {&sum.tokens, &sum.targets})
            for (size_t i = 0; equal && i < x->size(); i++) (*x)[i] = (*x)[i % size_t(setup.T)];
        REQUIRE(!sum.model->step(sum.tokens.data(), sum.targets.data(), AdamW{1, 0.0f}).skipped);
        std::vector<std::vector<double>> wanted, sizes;
        for (const Param& p : params)
            wanted.emplace_back(size_t(p.size())), sizes.emplace_back(size_t(p.size()));
        for (int64_t a = 0; a < (equal ? 1 : MANY); a++) {
            std::vector<int32_t> tokens, targets;
            for (int64_t i = 0; i < COPIES * setup.T; i++) {
                tokens.push_back(sum.tokens[size_t(a * setup.T + i % setup.T)]);
                targets.push_back(sum.targets[size_t(a * setup.T + i % setup.T)]);
            }
            REQUIRE(!one.model->step(tokens.data(), targets.data(), AdamW{1, 0.0f}).skipped);
            const auto term = gradients(one);
            for (size_t p = 0; p < params.size(); p++)
                for (size_t i = 0; i < term[p].size(); i++) {
                    wanted[p][i] += double(term[p][i]) / (equal ? 1 : MANY);
                    sizes[p][i] += std::fabs(double(term[p][i])) / (equal ? 1 : MANY);
                }
        }
        const auto got = gradients(sum);
        const double half_unit = std::ldexp(1.0, -info(setup.recipe.compute).mantissa - 1);
        for (size_t p = 0; p < params.size(); p++) {
            int64_t bad = 0;
            double most = 0;
            for (size_t i = 0; i < got[p].size(); i++) {
                // FP32: each of up to 2 (64 + 8) additions rounds a partial sum.
                const double bound =
                    half_unit * std::fabs(wanted[p][i]) + 2 * (MANY + COPIES) * 0x1p-24 * sizes[p][i] + 1e-37;
                bad += !(std::fabs(got[p][i] - wanted[p][i]) <= bound);
                most = std::max(most, std::fabs(double(got[p][i])));
            }
            INFO(std::string(setup.recipe.name), " ", setup.config.name, " ", params[p].name,
                 equal ? ", equal terms" : "");
            CHECK(bad == 0);
            CHECK(most > 0);
        }
    }
}

// Where no gradients are kept, one weight's gradient alone is not finite, which flows nowhere: its bucket and
// all later ones of the step stay as they are, and earlier ones are updated. Llama's layer 1: the rows of
// `up` are 0, so that the feed-forward half adds 0 and hands nothing back. Their own gradient is that of what
// `down` (times 2^66) reads, times the norm's output (a norm weight of 2^90, which the rows of `gate` make
// good).
inline void check_hidden_gradient(Training& training) {
    const Setup& setup = training.model->setup();
    const ModelConfig& c = setup.config;
    losses(training, 1);
    Snapshot state = snapshot(*training.model);
    auto scale = [&](const std::string& name, int64_t first, int64_t n, float factor) {
        for (int64_t i = first; i < first + n; i++) {
            uint16_t bits;
            std::memcpy(&bits, state.at(name).data() + 2 * i, 2);
            bits = reference::to_bf16(reference::from_bf16(bits) * factor);
            std::memcpy(state.at(name).data() + 2 * i, &bits, 2);
        }
        if (state.count(name + ".remainder"))
            std::fill_n(state.at(name + ".remainder").begin() + 2 * first, 2 * n, uint8_t(0));
    };
    scale("layers.1.norm2.weight", 0, c.C, 0x1p90f);
    scale("layers.1.gate_up", 0, c.F * c.C, 0x1p-90f);
    scale("layers.1.gate_up", c.F * c.C, c.F * c.C, 0.0f);
    scale("layers.1.down", 0, c.C * c.F, 0x1p66f);
    restore(*training.model, state);
    state = snapshot(*training.model);
    const StepResult r = training.step();
    CHECK(r.skipped);
    CHECK(std::isfinite(r.loss));
    CHECK(!std::isfinite(r.grad_norm));
    const Snapshot after = snapshot(*training.model);
    const std::vector<Param> params = parameters(c);
    const int64_t turn = params[param_of(params, "layers.1.gate_up")].bucket;
    for (const StateTensor& t : state_tensors(setup)) {
        const Param& p = params[t.param];
        INFO(std::string(setup.recipe.name), " ", t.name);
        if (p.bucket <= turn) CHECK((after.at(t.name) == state.at(t.name)));
        else if (t.name == p.name + ".m" && p.name != "layers.1.down")
            CHECK((after.at(t.name) != state.at(t.name)));
    }
}

// With no history yet, delayed scales are just-in-time ones: evaluation, the next token and the first step
// have the bits of the recipe that always scales just in time.
inline void check_first_scales(std::unique_ptr<Model> (*make)(const Setup&), const Architecture& arch) {
    const Setup te = tiny_setup(tiny_config(arch, true), "te", "fp32", 4, 16);
    Setup just_in_time = te;
    just_in_time.recipe.scaling = Scaling::JustInTime;
    Training a(te), b(just_in_time);
    a.model = make(te), b.model = make(just_in_time);
    a.text.next(4, 16, &a.tokens, &a.targets);
    auto scales = [&] {
        std::vector<float> all;
        for (const StateTensor& t : scaling_tensors(te.config, te.recipe))
            if (t.size() == 1) all.push_back(read_as<float>(*a.model, t.name, 1)[0]);
        return all;
    };
    for (float scale : scales()) CHECK(scale == 0);
    const double loss = a.model->evaluate(a.tokens.data(), a.targets.data());
    CHECK(loss == b.model->evaluate(a.tokens.data(), a.targets.data()));
    std::vector<float> x(size_t(te.config.V)), y = x;
    for (int64_t n : {3, 16}) {
        a.model->next_logits(a.tokens.data(), n, x.data());
        b.model->next_logits(a.tokens.data(), n, y.data());
        CHECK(x == y);
    }
    const StepResult first = a.model->step(a.tokens.data(), a.targets.data(), AdamW{1, 0.0f});
    CHECK(first.loss == loss);
    CHECK(b.model->step(a.tokens.data(), a.targets.data(), AdamW{1, 0.0f}).grad_norm == first.grad_norm);
    for (const Param& p : parameters(te.config)) {
        INFO(p.name);
        const std::string name = p.name + ".gradient";
        CHECK(read_as<float>(*a.model, name, p.size()) == read_as<float>(*b.model, name, p.size()));
    }
    for (float scale : scales()) CHECK(scale > 0);
}

// The logits of a prompt are those that the loss is made of, whatever its length. Sixteen copies of the
// prompt are a batch; with another target of the last token the loss moves by the difference of two logits.
inline void check_prompt(std::unique_ptr<Model> (*make)(const Setup&), const std::string& recipe,
                         const Architecture& arch, double tolerance) {
    constexpr int64_t B = 16, T = 5;
    Training training(tiny_setup(tiny_config(arch, true), recipe, optimizer_of(recipe), B, T));
    training.model = make(training.model->setup());
    losses(training, 3);
    const int64_t V = training.model->setup().config.V;
    std::vector<int32_t> tokens(training.tokens.begin(), training.tokens.begin() + T),
        targets(training.targets.begin(), training.targets.begin() + T);
    std::vector<int32_t> many;
    for (int64_t b = 0; b < B; b++) many.insert(many.end(), tokens.begin(), tokens.end());
    auto loss = [&](int32_t last) {
        targets[T - 1] = last;
        std::vector<int32_t> all;
        for (int64_t b = 0; b < B; b++) all.insert(all.end(), targets.begin(), targets.end());
        return training.model->evaluate(many.data(), all.data());
    };
    std::vector<float> logits(static_cast<size_t>(V));
    training.model->next_logits(tokens.data(), T, logits.data());
    const double zero = loss(0);
    double worst = 0;
    for (int32_t v = 1; v < V; v++) {
        const double moved = (zero - loss(v)) * T, wanted = double(logits[size_t(v)]) - double(logits[0]);
        worst = std::max(worst, std::fabs(moved - wanted));
    }
    INFO(recipe, " ", std::string(arch.name), ": off by ", worst);
    CHECK(worst <= tolerance);
}

// Where a micro-batch's tokens are no multiple of 16, linear layers run in BF16 for the whole run, whatever a
// prompt's length.
inline void check_fallback(std::unique_ptr<Model> (*make)(const Setup&), const std::string& recipe) {
    std::vector<std::vector<float>> logits;
    for (const std::string& r : {recipe, std::string("bf16")}) {
        const Setup setup = tiny_setup(tiny_config(LLAMA, true), r, "fp32", 1, 50);
        Training training(setup);
        training.model = make(setup);
        losses(training, 1);
        logits.emplace_back(size_t(setup.config.V));
        training.model->next_logits(training.tokens.data(), 16, logits.back().data());
    }
    INFO(recipe);
    CHECK(logits[0] == logits[1]);
}

// Evaluation sees what an FP8 code hides: an infinite weight, or an infinite operand behind an infinite norm
// weight.
inline void check_infinite_evaluation(Training& training) {
    losses(training, 2);
    const Snapshot good = snapshot(*training.model);
    for (const char* name : {"layers.0.qkv", "layers.1.down", "layers.0.norm2.weight"}) {
        Snapshot bad = good;
        const uint16_t infinity = 0x7F80;
        std::memcpy(bad[name].data(), &infinity, 2);
        restore(*training.model, bad);
        INFO(std::string(training.model->setup().recipe.name), " ", std::string(name));
        CHECK(!std::isfinite(training.model->evaluate(training.tokens.data(), training.targets.data())));
        restore(*training.model, good);
        CHECK(std::isfinite(training.model->evaluate(training.tokens.data(), training.targets.data())));
    }
}

// A step with a weight that is not finite changes nothing, and training goes on once the weight is good
// again.
inline void check_poisoned_weight(Training& training, const std::string& name, float poison) {
    losses(training, 1);
    const Snapshot good = snapshot(*training.model);
    Snapshot bad = good;
    const uint16_t bits = reference::to_bf16(poison);
    for (size_t i = 0; i < 50; i++)
        std::memcpy(bad[name].data() + 2 * i, &bits,
                    2);  // of the embedding: of every row of the first tokens
    restore(*training.model, bad);
    CHECK(training.step().skipped);
    CHECK((snapshot(*training.model) == bad));
    restore(*training.model, good);
    training.adamw.step--;
    CHECK(!training.step().skipped);
    CHECK((snapshot(*training.model) != good));
}

// Layer 1's gates are 0, so its feed-forward half adds 0 whatever W_up and W_down are. Backward, the gradient
// of a gate is a product of both: about 2^80, which every format of a gradient can represent, but whose
// square is beyond FP32. Not clipped, the step changes nothing; clipped, it is taken, and the optimizer's
// state stays finite.
inline void check_huge_gradients(Training& training) {
    const ModelConfig& c = training.model->setup().config;
    losses(training, 1);
    Snapshot state = snapshot(*training.model);
    auto fill = [&](const std::string& name, int64_t first, int64_t n, float value) {
        const uint16_t bits = reference::to_bf16(value);
        for (int64_t i = first; i < first + n; i++) std::memcpy(state.at(name).data() + 2 * i, &bits, 2);
        if (state.count(name + ".remainder"))
            std::fill_n(state.at(name + ".remainder").begin() + 2 * first, 2 * n, uint8_t(0));
    };
    fill("layers.1.gate_up", 0, c.F * c.C, 0.0f);
    fill("layers.1.gate_up", c.F * c.C, c.F * c.C, 0x1p50f);
    fill("layers.1.down", 0, c.C * c.F, 0x1p40f);
    fill("layers.1.down", 0, c.C * c.F / 2,
         -0x1p39f);  // else the sum over a row of the gradient might cancel
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
