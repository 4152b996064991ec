// model.h - tiny models, text for them to learn, and PROPERTY: a test of models on the CPU and on the GPU.
#pragma once
#include <cmath>

#include "../../gpu/gpu_model.h"
#include "../../reference/operators.h"
#include "../../reference/optimizer.h"
#include "../../common/state_tensors.h"
#include "files.h"
#include "random.h"

namespace coat::test {

using Maker = std::unique_ptr<Model> (*)(const RunSettings&);

// PROPERTY("name") { ... make(settings) ... } is two tests with one body: "cpu: name", in which make is
// make_reference_model, and "gpu: name", in which it is make_gpu_model; that one is skipped where no GPU is
// found. To add a property of models, copy a short one of test/model.cpp: a Training makes a model from a
// settings, and trains it on text that it can learn.
#define GPU_MODEL_TEST(name) TEST_CASE("gpu: " name* doctest::skip(!select_gpu().empty()))
#define PROPERTY_NAMED(name, body)                          \
    static void body(Maker make);                           \
    TEST_CASE("cpu: " name) { body(make_reference_model); } \
    GPU_MODEL_TEST(name) { body(make_gpu_model); }          \
    static void body(Maker make)
#define PROPERTY(name) PROPERTY_NAMED(name, DOCTEST_ANONYMOUS(property_))

inline ModelConfig tiny_config(const Architecture& arch, bool tied) {
    const int64_t NKV = arch.rope ? 2 : 4;  // grouped queries if the architecture has them
    ModelConfig c{.name = std::string("test-") + arch.name,
                  .arch = arch,
                  .L = 2,
                  .C = 64,
                  .NH = 4,
                  .NKV = NKV,
                  .F = 176,
                  .V = 50,
                  .max_T = 64,
                  .tied = tied};
    // Of a head's 8 frequencies one is kept, one is interpolated, and the others are divided.
    if (arch.rope && arch.qkv_bias)
        c.rope_scaling = {.type = RopeScaling::Llama3,
                          .factor = 8,
                          .low_freq_factor = 0.5f,
                          .high_freq_factor = 2,
                          .original_positions = 16};
    if (arch.qk_norms) c.head_size = 32;
    return c;
}
// Attention on a GPU's tensor cores needs heads of 64. Two query heads share a key/value head.
inline ModelConfig wide_heads(bool tied) {
    return {.name = "test-wide",
            .arch = LLAMA,
            .L = 2,
            .C = 256,
            .NH = 4,
            .NKV = 2,
            .F = 352,
            .V = 130,
            .max_T = 128,
            .tied = tied};
}

// The settings with the memory modes that `flags` names: "attention", "master" and "gradients" are the flags of
// ./train with their smaller choice; "lean" is all three.
inline RunSettings with_modes(RunSettings s, const std::string& flags) {
    auto has = [&](const char* word) {
        return flags.find(word) != flags.npos || flags.find("lean") != flags.npos;
    };
    if (has("attention")) s.recipe.saved_attention = E4M3_PER_1x16;
    s.keep_masters = !has("master");
    s.keep_gradients = !has("gradients");
    return s;
}
// The settings that some words name: a recipe, then memory modes, then "moments" and an optimizer. For example
// "coat", "coat master gradients", "bf16 lean" or "fp32 moments fp8". Without an optimizer it is that of the
// recipe; only bf16 has BF16 moments (in ./train they are FP32).
inline RunSettings settings_of(const std::string& words, const ModelConfig& config = tiny_config(LLAMA, true),
                               int64_t B = 4, int64_t T = 16, int64_t accumulate = 1) {
    const std::string name = words.substr(0, words.find(' '));
    const std::string before_optimizer = " moments ";
    const size_t at = words.find(before_optimizer);
    const Recipe& recipe = find_row(recipes(), name, "recipe");
    std::string optimizer = name == "bf16" ? "bf16" : recipe.default_optimizer;
    if (at != words.npos) optimizer = words.substr(at + before_optimizer.size());
    const RunSettings s{.config = config,
                        .recipe = recipe,
                        .optimizer = find_row(optimizers(), optimizer, "optimizer"),
                        .B = B,
                        .T = T,
                        .micro_batches_per_rank = accumulate};
    return with_modes(s, words.substr(0, at));
}
inline bool supported(const RunSettings& s) {
    return error_of([&] { require_supported(s); }).empty();
}

// The settings that a property is checked for: every recipe with two architectures, every choice of memory,
// every optimizer, and some random ones.
inline std::vector<RunSettings> all_settings(Random& rng, int64_t random = cases(4, 2)) {
    std::vector<RunSettings> all;
    const std::vector<ModelConfig> configs = {tiny_config(LLAMA, false), tiny_config(GPT2, true),
                                              tiny_config(QWEN3, false), tiny_config(LLAMA, true),
                                              tiny_config(QWEN2, false)};
    for (const Recipe& r : recipes())
        for (int arch : {0, 1}) all.push_back(settings_of(r.name, configs[arch]));
    for (const char* words : {"coat master", "coat attention", "coat gradients", "bf16 lean", "te gradients"})
        all.push_back(settings_of(words));
    for (const char* words : {"fp32", "coat lean", "te"}) all.push_back(settings_of(words, configs[2]));
    for (const OptimizerFormats& o : optimizers())
        all.push_back(settings_of(concat("coat moments ", o.name)));
    auto any = [&](const auto& table) { return table[rng.below(int64_t(table.size()))]; };
    while (random > 0) {
        const ModelConfig config = any(configs);
        const int64_t B = 1 + rng.below(5), T = 1 + rng.below(40);
        RunSettings s = settings_of(any(recipes()).name, config, B, T, 1 + rng.below(6));
        s.optimizer = any(optimizers());
        s.keep_masters = rng.below(2);
        s.keep_gradients = rng.below(2);
        if (rng.below(2)) s.recipe.saved_attention = E4M3_PER_1x16;
        if (!supported(s)) continue;
        all.push_back(s);
        random--;
    }
    return all;
}
inline std::string text(const RunSettings& s) {
    return concat(s.config.name, s.config.tied ? " tied, " : " untied, ", s.recipe.name, ", moments ",
                  s.optimizer.name, ", ", s.micro_batches_per_rank, "x", s.B, "x", s.T,
                  s.recipe.saved_attention.is_fp8() ? ", attention groups" : "",
                  s.keep_masters ? "" : ", master none", s.keep_gradients ? "" : ", gradients none");
}
#define FOR_ALL_SETTINGS(s, list)     \
    for (const RunSettings& s : list) \
        if (INFO(text(s)); true)

// Endless random text that a model can learn. Each token is followed by one of four tokens, with
// probabilities 1/2, 1/4, 1/8 and 1/8. Its entropy is 1.75 bits = 1.21 nats a token.
class Text {
public:
    Text(uint64_t seed, int64_t V) : rng_(seed), V_(V) {
        Random table(17);
        for (int64_t i = 0; i < 4 * V; i++) successors_.push_back(int32_t(table.below(V)));
    }
    // Gives tokens and targets of n sequences of length T.
    void next(int64_t n, int64_t T, Tokens* tokens, Tokens* targets) {
        tokens->clear();
        targets->clear();
        for (int64_t s = 0; s < n; s++) {
            int32_t token = int32_t(rng_.below(V_));
            for (int64_t t = 0; t < T; t++) {
                tokens->push_back(token);
                const int64_t draw = rng_.below(8), which = draw < 4 ? 0 : draw < 6 ? 1 : draw - 4;
                targets->push_back(token = successors_[size_t(4 * token + which)]);
            }
        }
    }

private:
    Random rng_;
    int64_t V_;
    Tokens successors_;
};

// Leaves a third of the targets of even micro-batches of n, a sixth of odd ones, and none of every fourth.
inline void mask_unevenly(Tokens* targets, int64_t n) {
    for (size_t i = 0; i < targets->size(); i++) {
        const int64_t micro_batch = int64_t(i) / n, each = micro_batch % 2 ? 6 : 3;
        if (micro_batch % 4 == 3 || int64_t(i) % each) (*targets)[i] = NO_TARGET;
    }
}

template <class Value> std::vector<Value> read_as(Model& model, const std::string& name, int64_t n) {
    std::vector<Value> x(n);
    model.read(name, x.data());
    return x;
}
inline void write_weights(Model& model, const std::string& name, const Floats& x) {
    std::vector<uint16_t> upper(x.size());
    std::vector<int16_t> lower(x.size());
    for (size_t i = 0; i < x.size(); i++) reference::split_master(x[i], &upper[i], &lower[i]);
    model.write(name, upper.data());
    if (model.settings().keep_masters) model.write(name + ".remainder", lower.data());
}
inline Floats gradient(Model& model, const Param& p) {
    return read_as<float>(model, p.name + ".gradient", p.size());
}
inline std::vector<Floats> gradients_of(Model& model) {
    std::vector<Floats> all;
    for (const Param& p : parameters(model.settings().config)) all.push_back(gradient(model, p));
    return all;
}

inline std::vector<StateTensor> state_tensors(const RunSettings& s) {
    std::vector<StateTensor> all = weight_tensors(s.config);
    for (const StateTensor& t : tensors_besides_weights(s)) all.push_back(t);
    return all;
}
// The state of a model, by tensor: what this rank keeps of it.
using Snapshot = std::map<std::string, std::vector<uint8_t>>;
inline Snapshot snapshot(Model& model) {
    Snapshot bytes;
    for (const StateTensor& t : state_tensors(model.settings()))
        bytes[t.name] = read_as<uint8_t>(model, t.name, owned(model.settings(), t).count * t.bytes);
    return bytes;
}
inline void restore(Model& model, const Snapshot& bytes) {
    for (const auto& [name, values] : bytes) model.write(name, values.data());
}
template <class Value> std::vector<Value> values_of(const Snapshot& state, const std::string& name) {
    const std::vector<uint8_t>& bytes = state.at(name);
    std::vector<Value> x(bytes.size() / sizeof(Value));
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(x.data()));  // also none
    return x;
}

// Changes n weights in a snapshot, from element `first` on (-1: all that follow). Their remainders become 0.
template <class Change>
void change_weights(Snapshot& state, const std::string& name, int64_t first, int64_t n, Change change) {
    auto weights = values_of<uint16_t>(state, name);
    if (n < 0) n = int64_t(weights.size()) - first;
    for (auto w = weights.begin() + first; w < weights.begin() + first + n; w++)
        *w = reference::to_bf16(change(reference::from_bf16(*w)));
    const auto* bytes = reinterpret_cast<const uint8_t*>(weights.data());
    state.at(name).assign(bytes, bytes + 2 * weights.size());
    if (state.count(name + ".remainder"))
        std::fill_n(state.at(name + ".remainder").begin() + 2 * first, 2 * n, uint8_t(0));
}
inline void set_weights(Snapshot& state, const std::string& name, float value, int64_t first = 0,
                        int64_t n = -1) {
    change_weights(state, name, first, n, [=](float) { return value; });
}

// A model and the text that it is trained on. step() trains on the next batch, again() on the same one once
// more.
struct Training {
    std::unique_ptr<Model> model;
    Text text;
    Tokens tokens, targets;
    AdamWOptions adamw{.update_number = 0, .lr = 3e-3f};

    Training(Maker make, const RunSettings& settings) : model(make(settings)), text(1, settings.config.V) {
        if (!settings.keep_gradients) adamw.clip = 0;
    }
    const RunSettings& settings() const { return model->settings(); }
    std::vector<Param> params() const { return parameters(settings().config); }
    void next() {
        text.next(settings().micro_batches_per_rank * settings().B, settings().T, &tokens, &targets);
    }
    StepResult step() {
        next();
        return again();
    }
    StepResult again() {  // with the same batch
        adamw.update_number++;
        return model->step(tokens.data(), targets.data(), adamw);
    }
    Doubles losses(int64_t steps) {
        Doubles all;
        for (int64_t i = 0; i < steps; i++) {
            const StepResult r = step();
            REQUIRE((!r.skipped && std::isfinite(r.grad_norm)));
            all.push_back(r.loss);
        }
        return all;
    }
    double validation_loss() { return model->validation_loss(tokens.data(), targets.data()); }
    Floats next_logits(int64_t n) {
        Floats logits(size_t(settings().config.V));
        model->next_logits(tokens.data(), n, logits.data());
        return logits;
    }
    QuantReport report() { return model->measure_quantization(tokens.data(), targets.data()); }
};

inline double mean(const Doubles& x) { return std::accumulate(x.begin(), x.end(), 0.0) / double(x.size()); }

// The relative error between two FP32 implementations that sum in different orders. The longest path through
// the network has about 10 sums of up to max(F, C) terms for each layer and direction. Rounding errors are
// random, so a sum of n terms has an error of sqrt(n) roundings. Both sides round, hence the factor 2.
inline double fp32_bound(const ModelConfig& c) {
    return 2 * 0x1p-24 * 10 * 2 * double(c.L) * std::sqrt(double(std::max(c.F, c.C)));
}

}  // namespace coat::test
