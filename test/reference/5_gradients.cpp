// 5_gradients.cpp - gradients of the whole model in reference/network.h: in double beside finite differences,
// those of fp32 beside double, those of the other recipes beside fp32.
#include "../help/model.h"
#include "../help/network_in_double.h"
#include "../help/oracle.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

static std::vector<ModelConfig> configs() {
    const RopeScaling scaled{.type = RopeScaling::Llama3,
                             .factor = 4,
                             .low_freq_factor = 1,
                             .high_freq_factor = 2,
                             .original_positions = 8};
    // clang-format off
    return {
        {.name = "Llama, untied, grouped queries", .arch = LLAMA, .L = 2, .C = 32, .NH = 4, .NKV = 2, .F = 48,
         .V = 11, .max_T = 16, .tied = false},
        {.name = "Llama, tied, one key head, head size", .arch = LLAMA, .L = 2, .C = 16, .NH = 2, .NKV = 1,
         .F = 16, .V = 11, .max_T = 16, .tied = true, .norm_eps = 1e-3f, .rope_theta = 100, .head_size = 16},
        {.name = "Qwen3, tied, grouped queries, head size", .arch = QWEN3, .L = 2, .C = 16, .NH = 4, .NKV = 2,
         .F = 32, .V = 11, .max_T = 16, .tied = true, .norm_eps = 1e-3f, .rope_theta = 100, .head_size = 8},
        {.name = "GPT-2, tied", .arch = GPT2, .L = 2, .C = 16, .NH = 2, .NKV = 2, .F = 32,
         .V = 11, .max_T = 16, .tied = true},
        {.name = "Qwen2, untied, scaled frequencies", .arch = QWEN2, .L = 2, .C = 32, .NH = 4, .NKV = 2,
         .F = 48, .V = 11, .max_T = 16, .tied = false, .rope_theta = 100, .rope_scaling = scaled}};
    // clang-format on
}

// Weights of norms around 1, others around 0, large enough for every part of the model to matter (size 0: as
// new models have them, but with biases). Padding of the vocabulary is zero. All are values of the format.
static std::vector<Doubles> random_weights(const ModelConfig& c, Random& rng, Format f, double size) {
    std::vector<Doubles> weights;
    for (const Param& p : parameters(c)) {
        Doubles w = rng.normals<double>(p.size(), size ? size : p.init_std > 0 ? double(p.init_std) : 0.02);
        for (double& v : w) v = double(round_to(f, float(v + (p.starts_at_one() ? 1 : 0))));
        std::fill(w.begin() + used_elements(c, p), w.end(), 0.0);
        weights.push_back(w);
    }
    return weights;
}

namespace {

// Loss and gradients of one step of a recipe's model with the given weights.
struct GradientRun {
    std::vector<Floats> gradients;
    double loss;
};

}  // namespace

static GradientRun step_with(const RunSettings& settings, const std::vector<Doubles>& weights,
                             const Tokens& tokens, const Tokens& targets) {
    const std::unique_ptr<Model> model = make_reference_model(settings);
    const std::vector<Param> params = parameters(settings.config);
    for (size_t p = 0; p < params.size(); p++)
        write_weights(*model, params[p].name, {weights[p].begin(), weights[p].end()});
    // Delayed scales need a step before. With a learning rate of 0 it changes nothing else.
    if (settings.recipe.scale_source == ScaleSource::Delayed)
        model->step(tokens.data(), targets.data(), AdamWOptions{.update_number = 1, .lr = 0});
    const StepResult result =
        model->step(tokens.data(), targets.data(), AdamWOptions{.update_number = 1, .lr = 1e-3f});
    return {gradients_of(*model), result.loss};
}

TEST_CASE("loss_in_double: gradients of every parameter match finite differences") {
    SEEDED_RANDOM(rng);
    const int64_t B = 2, T = 5;
    const double h = 1e-5;
    for (const ModelConfig& c : configs()) {
        require_supported(c);
        std::vector<Doubles> weights = random_weights(c, rng, Format::FP32, 0.3), gradients;
        Tokens tokens, targets;
        Text(rng.bits(), c.V).next(B, T, &tokens, &targets);
        loss_in_double(c, B, T, weights, tokens.data(), targets.data(), &gradients);
        const std::vector<Param> params = parameters(c);
        REQUIRE(gradients.size() == params.size());
        for (size_t p = 0; p < params.size(); p++) {
            INFO(c.name, ": ", params[p].name);
            REQUIRE(int64_t(gradients[p].size()) == params[p].size());
            CHECK(norm(gradients[p]) > 0);
            auto loss = [&](const Doubles& w) {
                std::vector<Doubles> changed = weights;
                changed[p] = w;
                return loss_in_double(c, B, T, changed, tokens.data(), targets.data(), nullptr);
            };
            const int64_t used = used_elements(c, params[p]);
            for (int64_t i = used; i < params[p].size(); i++) REQUIRE(gradients[p][size_t(i)] == 0);
            for (int repeat = 0; repeat < 2; repeat++) {  // a random direction: all entries at once
                Doubles d = rng.normals<double>(params[p].size());
                std::fill(d.begin() + used, d.end(), 0.0);
                const double length = norm(d);
                double expected = 0;
                Doubles ahead = weights[p], behind = ahead;
                for (size_t i = 0; i < d.size(); i++) {
                    d[i] /= length;
                    expected += gradients[p][i] * d[i];
                    ahead[i] += h * d[i], behind[i] -= h * d[i];
                }
                // The error is about h^2 |f'''| / 6 and 2^-53 |f| / h = 1e-11: third derivatives up to 1000.
                CHECK(std::fabs((loss(ahead) - loss(behind)) / (2 * h) - expected) <=
                      1e-7 * std::max(1.0, norm(gradients[p])));
            }
        }
    }
}

TEST_CASE("gradients: fp32 is the gradient in double; bf16 and FP8 differ by the rounding of their formats") {
    // Every rounding on the way to a gradient adds an independent relative error with the rms of its format.
    // In a GEMM the errors of both operands add as the root of the sum of their squares. No gradient depends
    // on all roundings, and residual connections dilute them, so this is an upper bound. The longest way
    // through a layer has these:
    //  bf16       forward 4 weights and 12 activations; backward 8
    //  coat       those of bf16; forward 11 of E4M3 (2 norm inputs, activation input, 4 linear inputs, 4
    //             weights); backward 4 of E5M2
    //  attention  4 of E4M3 (q, k, v and the output) in groups
    //  others     those of bf16; in each of 4 linear layers x and w forward, g and w (or x) backward. With
    //             scales per row, w has other codes in each GEMM, so its two roundings count separately
    SEEDED_RANDOM(rng);
    const double e4m3 = rms_error(Format::E4M3), e5m2 = rms_error(Format::E5M2);
    for (const Architecture& arch : {LLAMA, QWEN2, QWEN3, GPT2}) {
        const ModelConfig c = tiny_config(arch, true);
        const int64_t B = 5, T = 32;  // 160 tokens: blocks of 128 with a tail
        Tokens tokens, targets;
        Text(rng.bits(), c.V).next(B, T, &tokens, &targets);
        // fp32 is tested with weights that need all bits of FP32. The other recipes start with weights that
        // BF16 holds exactly. So their compute weights equal their masters: `start` is both.
        const std::vector<Doubles> master = random_weights(c, rng, Format::FP32, 0),
                                   start = random_weights(c, rng, Format::BF16, 0);
        const GradientRun fp32 = step_with(settings_of("fp32", c, B, T), master, tokens, targets);
        std::vector<Doubles> in_double;
        const double loss = loss_in_double(c, B, T, master, tokens.data(), targets.data(), &in_double);
        CHECK(fp32.loss == doctest::Approx(loss).epsilon(fp32_bound(c)));
        for (size_t p = 0; p < in_double.size(); p++) {
            INFO(std::string(arch.name), " fp32 ", parameters(c)[p].name);
            CHECK(relative_error(fp32.gradients[p], in_double[p]) <= fp32_bound(c));
        }

        auto run = [&](const std::string& words) {
            return step_with(settings_of(words, c, B, T), start, tokens, targets);
        };
        const GradientRun exact = run("fp32"), bf16 = run("bf16");
        const double bound_bf16 = std::sqrt(24.0 * double(c.L)) * rms_error(Format::BF16);
        std::vector<GradientRun> runs;
        std::vector<std::string> words_of_runs;
        for (const char* words :
             {"bf16", "bf16 attention", "coat", "coat attention", "te", "colossal", "rowwise", "deepseek"}) {
            const Recipe r = settings_of(words).recipe;
            const bool fp8 = r.x.is_fp8(), attention = r.saved_attention.is_fp8();
            double squares = attention ? 4 * e4m3 * e4m3 : 0;
            if (r.saved_inputs.is_fp8()) squares += 11 * e4m3 * e4m3 + 4 * e5m2 * e5m2;
            else if (fp8) squares += 4 * (3 * e4m3 * e4m3 + std::pow(rms_error(r.g.element_format), 2));
            const double bound = std::sqrt(double(c.L) * squares) + bound_bf16;
            runs.push_back(run(words));
            words_of_runs.push_back(words);
            CHECK(std::fabs(runs.back().loss - exact.loss) <= bound * exact.loss);
            const std::vector<Param> params = parameters(c);
            for (size_t p = 0; p < params.size(); p++) {
                const double error = relative_error(runs.back().gradients[p], exact.gradients[p]);
                INFO(std::string(arch.name), " ", words, " ", params[p].name, ": ", error, " (", bound, ")");
                CHECK(error > 0);
                CHECK(error <= bound);
                if (fp8) CHECK(error > relative_error(bf16.gradients[p], exact.gradients[p]));
                const bool of_groups = attention && params[p].name.find("attention_out") != std::string::npos;
                // FP8 is in use. Groups of 16 lose less than tensors: at least 0.46 of E4M3's error.
                if (params[p].is_linear_weight() && (fp8 || of_groups)) CHECK(error > e4m3 / (fp8 ? 2 : 3));
            }
            // te ran the step twice, so its delayed scales equal the just-in-time scales of colossal.
            for (size_t other = 0; other + 1 < runs.size(); other++) {
                const bool equal = words_of_runs[other] == "te" && words_of_runs.back() == "colossal";
                CHECK((runs[other].gradients == runs.back().gradients) == equal);
            }
        }
    }
}
