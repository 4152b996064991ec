// model_checks.h - properties of a whole model that the tests check on the CPU reference and on the GPU.
#pragma once
#include <array>

#include "tiny.h"

namespace coat::test {

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

inline std::vector<std::vector<float>> gradients_of(Model& model) {
    std::vector<std::vector<float>> all;
    for (const Param& p : parameters(model.setup().config))
        all.push_back(read_as<float>(model, p.name + ".gradient", p.size()));
    return all;
}

// What the report must measure of the moments: the errors of storing those that a step makes of the moments
// in `state` and of the gradients that the report left in the model. In [0] are the first moments, in [1] the
// second ones.
inline std::array<QuantStats, 2> errors_of_moments(Model& model, const Snapshot& state) {
    const OptimizerFormat& o = model.setup().optimizer;
    std::array<QuantStats, 2> stats;
    for (const Param& p : parameters(model.setup().config)) {
        if (!p.role.fp8_state) continue;
        std::array<reference::Moment, 2> moments;
        std::array<std::vector<float>, 2> x;
        for (size_t v : {0, 1}) {
            const std::string name = p.name + (v ? ".v" : ".m");
            moments[v].init(v ? o.v : o.m, o.expand, p.size(), o.group);
            moments[v].codes = state.at(name);
            for (auto [suffix, to] : {std::pair{".max", &moments[v].max}, {".k", &moments[v].k}})
                if (!to->empty()) std::memcpy(to->data(), state.at(name + suffix).data(), to->size() * 4);
            x[v].resize(size_t(p.size()));
            moments[v].load(x[v].data());
        }
        std::vector<float> weight(size_t(p.size()));
        const auto gradient = read_as<float>(model, p.name + ".gradient", p.size());
        reference::adamw(reference::adamw_factors({1, 0.0f}, false, 0), p.size(), gradient.data(),
                         weight.data(), x[0].data(), x[1].data());
        for (size_t v : {0, 1}) moments[v].store(x[v].data(), v && o.keep_positive, &stats[v]);
    }
    return stats;
}

// A masked loss is the mean of the losses of the targets that count, each measured alone. The gradients are
// those of that loss: exactly 0 for a token that no counted target follows, and the same bits whatever the
// sequences without a counted target contain. Without any counted target a step changes nothing.
inline void check_masked_targets(std::unique_ptr<Model> (*make)(const Setup&), const std::string& recipe,
                                 const Architecture& arch) {
    constexpr int64_t B = 3, T = 16, COUNTED = 5;  // targets 0 to 4 of the first sequence count
    const ModelConfig config = tiny_config(arch, false);
    Training training(tiny_setup(config, recipe, optimizer_of(recipe), B, T));
    training.model = make(training.model->setup());
    Model& model = *training.model;
    losses(training, 1);
    std::vector<int32_t> tokens(B * T), targets(B * T, NO_TARGET);
    for (size_t i = 0; i < tokens.size(); i++) tokens[i] = int32_t(i < COUNTED ? i : 10 + i % 20);
    for (size_t i = 0; i < COUNTED; i++) targets[i] = int32_t(3 * i + 1);
    const std::vector<int32_t> none(targets.size(), NO_TARGET);
    double sum = 0;
    for (size_t i = 0; i < COUNTED; i++) {
        std::vector<int32_t> one = none;
        one[i] = targets[i];
        sum += model.evaluate(tokens.data(), one.data());
    }
    INFO(recipe, " ", std::string(arch.name));
    CHECK(model.evaluate(tokens.data(), targets.data()) == doctest::Approx(sum / COUNTED).epsilon(1e-12));
    const Snapshot before = snapshot(model);
    const StepResult result = model.step(tokens.data(), targets.data(), AdamW{2, 0.0f});
    CHECK(result.loss == doctest::Approx(sum / COUNTED).epsilon(1e-12));
    CHECK(result.targets == COUNTED);
    const auto gradients = gradients_of(model);
    int64_t wrong = 0;  // in the gradient of the embedding (V, C)
    for (int64_t token = 0; token < config.V; token++) {
        const float* row = &gradients[0][size_t(token * config.C)];
        const bool zero = std::all_of(row, row + config.C, [](float g) { return g == 0; });
        wrong += zero != (token >= COUNTED);
    }
    CHECK(wrong == 0);
    if (recipe == "fp32" || recipe == "bf16") {  // in FP8, scales depend on all tokens
        restore(model, before);
        for (size_t i = T; i < tokens.size(); i++) tokens[i] = int32_t(i % 7);
        model.step(tokens.data(), targets.data(), AdamW{2, 0.0f});
        CHECK((gradients_of(model) == gradients));
    }
    const Snapshot kept = snapshot(model);
    const StepResult empty = model.step(tokens.data(), none.data(), AdamW{3, 1.0f});
    CHECK((empty.skipped && empty.targets == 0 && empty.loss == 0 && empty.grad_norm == 0));
    CHECK((snapshot(model) == kept));
    CHECK(model.evaluate(tokens.data(), none.data()) == 0);
}

// Micro-batches with uneven masks, one of them without a target that counts, equal one larger batch.
inline void check_uneven_masks(std::unique_ptr<Model> (*make)(const Setup&), const std::string& recipe,
                               double bound) {
    Setup setup = tiny_setup(tiny_config(LLAMA, true), recipe, optimizer_of(recipe), 8, 16);
    const std::unique_ptr<Model> large = make(setup);
    setup.B /= 4, setup.accumulate = 4;
    const std::unique_ptr<Model> small = make(setup);
    std::vector<int32_t> tokens, targets;
    Text(1, setup.config.V).next(8, 16, &tokens, &targets);
    mask_unevenly(&targets, setup.B * setup.T);
    const StepResult one = large->step(tokens.data(), targets.data(), AdamW{1, 0.0f}),
                     four = small->step(tokens.data(), targets.data(), AdamW{1, 0.0f});
    CHECK(four.targets == counted_targets(targets.data(), int64_t(targets.size())));
    CHECK(std::fabs(four.loss - one.loss) <= bound * one.loss);
    const auto a = gradients_of(*large), b = gradients_of(*small);
    for (size_t p = 0; p < a.size(); p++) {
        INFO(recipe, " ", parameters(setup.config)[p].name);
        CHECK(relative_error(b[p], a[p]) <= bound);
    }
}

// Gradients that are summed over 64 micro-batches, of equal and of different terms, against the sum in
// double. They may differ by one rounding to the format of the gradients. The gradient of one micro-batch is
// measured with a step of eight copies of it. All factors are powers of two, so they change no bit of a term.
inline void check_sums(std::unique_ptr<Model> (*make)(const Setup&), Setup setup) {
    constexpr int64_t MANY = 64, COPIES = 8;
    setup.B = 1, setup.T = 16, setup.accumulate = MANY;
    const std::vector<Param> params = parameters(setup.config);
    Training sum(setup), one(setup);
    sum.model = make(setup);
    setup.accumulate = COPIES;
    one.model = make(setup);
    sum.adamw.lr = one.adamw.lr = 0;
    for (const bool equal : {true, false}) {
        sum.text.next(MANY, setup.T, &sum.tokens, &sum.targets);
        for (std::vector<int32_t>* x : {&sum.tokens, &sum.targets})
            for (size_t i = 0; equal && i < x->size(); i++) (*x)[i] = (*x)[i % size_t(setup.T)];
        REQUIRE(!sum.model->step(sum.tokens.data(), sum.targets.data(), AdamW{1, 0.0f}).skipped);
        std::vector<std::vector<double>> expected, sizes;
        for (const Param& p : params)
            expected.emplace_back(size_t(p.size())), sizes.emplace_back(size_t(p.size()));
        for (int64_t a = 0; a < (equal ? 1 : MANY); a++) {
            std::vector<int32_t> tokens, targets;
            for (int64_t i = 0; i < COPIES * setup.T; i++) {
                tokens.push_back(sum.tokens[size_t(a * setup.T + i % setup.T)]);
                targets.push_back(sum.targets[size_t(a * setup.T + i % setup.T)]);
            }
            REQUIRE(!one.model->step(tokens.data(), targets.data(), AdamW{1, 0.0f}).skipped);
            const auto term = gradients_of(*one.model);
            for (size_t p = 0; p < params.size(); p++)
                for (size_t i = 0; i < term[p].size(); i++) {
                    expected[p][i] += double(term[p][i]) / (equal ? 1 : MANY);
                    sizes[p][i] += std::fabs(double(term[p][i])) / (equal ? 1 : MANY);
                }
        }
        const auto got = gradients_of(*sum.model);
        const double half_step = std::ldexp(1.0, -info(setup.recipe.compute).mantissa - 1);
        for (size_t p = 0; p < params.size(); p++) {
            int64_t bad = 0;
            double most = 0;
            for (size_t i = 0; i < got[p].size(); i++) {
                // FP32: each of up to 2 (64 + 8) additions rounds a partial sum.
                const double bound = half_step * std::fabs(expected[p][i]) +
                                     2 * (MANY + COPIES) * 0x1p-24 * sizes[p][i] + 1e-37;
                bad += !(std::fabs(got[p][i] - expected[p][i]) <= bound);
                most = std::max(most, std::fabs(double(got[p][i])));
            }
            INFO(std::string(setup.recipe.name), " ", setup.config.name, " ", params[p].name,
                 equal ? ", equal terms" : "");
            CHECK(bad == 0);
            CHECK(most > 0);
        }
    }
}

// With --gradients none, the gradient of one weight is not finite, and it reaches no other gradient. The
// weight's bucket and all later ones of the step must not change; earlier ones are updated.
//
// In layer 1 of Llama the up weights are 0, so the feed-forward half adds 0 and passes no gradient back. The
// gradient of up is the product of the gradient of the activation, which is large (down times 2^66), and of
// the norm output, which is large too (norm weight times 2^90). The gate weights are divided by 2^90, so that
// the gates stay as they are.
inline void check_hidden_gradient(Training& training) {
    const Setup& setup = training.model->setup();
    const ModelConfig& c = setup.config;
    losses(training, 1);
    Snapshot state = snapshot(*training.model);
    auto scale = [&](const char* name, int64_t first, int64_t n, float factor) {
        change_weights(state, name, first, n, [=](float w) { return w * factor; });
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
    const int64_t bucket = params[param_of(params, "layers.1.gate_up")].bucket;
    for (const StateTensor& t : state_tensors(setup)) {
        const Param& p = params[t.param];
        INFO(std::string(setup.recipe.name), " ", t.name);
        if (p.bucket <= bucket) CHECK((after.at(t.name) == state.at(t.name)));
        else if (t.name == p.name + ".m" && p.name != "layers.1.down")
            CHECK((after.at(t.name) != state.at(t.name)));
    }
}

// Delayed scaling without a history scales just in time. Evaluation, the next token and the first step are
// bit-identical to a recipe that always scales just in time.
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

// next_logits gives the logits that the loss is computed from, for any length of the prompt. A batch is
// sixteen copies of the prompt. Another target of the last token changes the loss by the difference of two
// logits.
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
        const double moved = (zero - loss(v)) * T, expected = double(logits[size_t(v)]) - double(logits[0]);
        worst = std::max(worst, std::fabs(moved - expected));
    }
    INFO(recipe, " ", std::string(arch.name), ": off by ", worst);
    CHECK(worst <= tolerance);
}

// If the tokens of a micro-batch are no multiple of 16, linear layers run in BF16 for the whole run, whatever
// the length of a prompt.
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

// Evaluation detects values that are not finite although FP8 codes saturate: an infinite weight, or an
// infinite operand after an infinite norm weight.
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

// Parameters of every kind: the embedding, linear layers and norms.
inline constexpr const char* POISONED[] = {"embedding", "layers.0.qkv", "layers.1.down",
                                           "layers.0.norm2.weight", "final_norm.weight"};

// A step with a weight that is not finite changes nothing. Training continues once the weight is finite
// again.
inline void check_poisoned_weight(Training& training, const std::string& name, float poison) {
    losses(training, 1);
    const Snapshot good = snapshot(*training.model);
    Snapshot bad = good;
    const uint16_t bits = reference::to_bf16(poison);
    for (size_t i = 0; i < 50; i++)
        // 50 weights; of the embedding, those of the first tokens.
        std::memcpy(bad[name].data() + 2 * i, &bits, 2);
    restore(*training.model, bad);
    CHECK(training.step().skipped);
    CHECK((snapshot(*training.model) == bad));
    restore(*training.model, good);
    training.adamw.step--;
    CHECK(!training.step().skipped);
    CHECK((snapshot(*training.model) != good));
}

// The gradient of a gate is about 2^80. Every format of gradients can represent it, but its square exceeds
// FP32. Without clipping the step changes nothing. With clipping it is taken, and the optimizer state stays
// finite.
inline void check_huge_gradients(Training& training) {
    losses(training, 1);
    const Snapshot state = write_huge_gate_gradient(*training.model, 0x1p50f, 0x1p40f);
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
