// model.cpp - properties of a whole model, on the CPU and on the GPU; model_on_both.cpp compares the two.
#include <omp.h>

#include "../data/safetensors.h"
#include "help/model.h"

using namespace coat;
using namespace coat::test;

static bool bf16_value(float x) { return reference::round_to(Format::BF16, x) == x; }

static Floats masters(const Snapshot& state, const std::string& name) {
    const auto weights = values_of<uint16_t>(state, name);
    std::vector<int16_t> rest(weights.size());
    if (state.count(name + ".remainder")) rest = values_of<int16_t>(state, name + ".remainder");
    Floats x;
    for (size_t i = 0; i < weights.size(); i++) x.push_back(reference::join_master(weights[i], rest[i]));
    return x;
}

static reference::Moment moment_of(const RunSettings& s, const Param& p, const Snapshot& state, bool second) {
    const std::string name = p.name + (second ? ".v" : ".m");
    reference::Moment moment(
        s.optimizer, p.moment_format(second ? s.optimizer.v_format : s.optimizer.m_format), p.size(), second);
    moment.elements = state.at(name);
    if (!moment.max_magnitudes.empty()) moment.max_magnitudes = values_of<float>(state, name + ".max");
    if (!moment.expansion_exponents.empty())
        moment.expansion_exponents = values_of<float>(state, name + ".k");
    return moment;
}

namespace {

// What the reference's AdamW makes of a parameter in a snapshot, with the gradient that the model has.
struct Update {
    Floats master, x[2];  // the values of both moments
    reference::Moment moments[2];

    Update(Model& model, const Snapshot& before, const Param& p, const AdamWOptions& a, double grad_norm)
        : master(masters(before, p.name)) {
        for (int v : {0, 1}) {
            moments[v] = moment_of(model.settings(), p, before, v);
            x[v].resize(master.size());
            moments[v].load(x[v].data());
        }
        const float clip_factor = reference::compute_clip_factor(a, grad_norm);
        reference::adamw(reference::adamw_constants(a, p.decays(), clip_factor), p.size(),
                         gradient(model, p).data(), master.data(), x[0].data(), x[1].data());
    }
    void store(int v, QuantStats* stats = nullptr) { moments[v].store(x[v].data(), stats); }
};

}  // namespace

PROPERTY("first weights and remainders follow the table of parameters; moments and scales are zero") {
    for (const char* words : {"coat", "te", "bf16 master", "fp32"})
        for (const Architecture& arch : {LLAMA, QWEN2, GPT2}) {
            RunSettings s = settings_of(words, tiny_config(arch, false));
            s.seed = 3;
            INFO(text(s));
            const Snapshot state = snapshot(*make(s));
            uint64_t index = 0;
            for (const Param& p : parameters(s.config)) {
                const int64_t used = used_elements(s.config, p);
                Floats first;
                for (int64_t i = 0; i < p.size(); i++) {
                    first.push_back(initial_value(p.init_std, p.starts_at_one(), used, s.seed, index, i));
                    if (!s.keep_masters) first.back() = reference::round_to(Format::BF16, first.back());
                }
                CHECK_MESSAGE((masters(state, p.name) == first), p.name);
                index++;
            }
            for (const StateTensor& t : tensors_besides_weights(s)) {
                INFO(t.name);
                if (t.name.ends_with(".k")) CHECK(values_of<float>(state, t.name) == Floats(t.size(), 1.0f));
                else if (!t.name.ends_with(".remainder")) CHECK(norm(state.at(t.name)) == 0);
            }
        }
}

// The gradients of a step, read back, and the state before it give the state after it: the reference's AdamW
// with the factors of each parameter's role, the norm of all gradients, the keys of stochastic rounding, and
// one store of each moment. A GPU's powers and sums differ in the last bits, which may change a code by one.
PROPERTY("a step is AdamW of its gradients: decay by role; clipping by the whole norm; rounding; moments") {
    SEEDED_RANDOM(rng);
    const bool exact = make == make_reference_model;
    FOR_ALL_SETTINGS(s, all_settings(rng)) {
        if (!s.keep_gradients) continue;
        Training t(make, s);
        t.adamw.clip = rng.below(2) ? 0.3f : 0;
        t.adamw.weight_decay = 2;
        // A first step has second moments below the smallest code, if they are not expanded.
        if (s.optimizer.expansion || !s.recipe.saved_inputs.is_fp8()) t.losses(2);
        const Snapshot before = snapshot(*t.model);
        const StepResult r = t.step();
        const Snapshot after = snapshot(*t.model);
        double squares = 0;
        for (const Floats& g : gradients_of(*t.model)) squares += norm(g) * norm(g);
        CHECK(r.grad_norm == doctest::Approx(std::sqrt(squares)).epsilon(exact ? 1e-12 : 1e-6));
        for (const Param& p : t.params()) {
            INFO(p.name);
            Update update(*t.model, before, p, t.adamw, r.grad_norm);
            const Floats& w = update.master;
            const Floats old = masters(before, p.name), got = masters(after, p.name);
            const uint64_t key = rounding_key(s.seed, t.adamw.update_number);
            int64_t used = used_elements(s.config, p), wrong = 0, padding = 0;
            for (size_t i = 0; i < w.size(); i++) {
                const auto rounded = reference::round_stochastically(w[i], key, p.flat_offset + int64_t(i));
                const float wanted = s.keep_masters ? w[i] : reference::from_bf16(rounded),
                            size = std::fabs(w[i]);
                const float bound = 1e-3f * (t.adamw.lr + std::fabs(w[i] - old[i])) + 0x1p-22f * size;
                wrong += !(std::fabs(got[i] - wanted) <= (exact || !s.keep_masters ? 0 : bound));
                padding += int64_t(i) >= used && got[i] != 0;
            }
            CHECK(wrong <= (exact || s.keep_masters ? 0 : std::max<int64_t>(1, p.size() / 100)));
            CHECK(padding == 0);
            for (int v : {0, 1}) {
                update.store(v);
                const reference::Moment stored = moment_of(s, p, after, v), &expected = update.moments[v];
                if (exact)
                    CHECK((stored.elements == expected.elements &&
                           stored.max_magnitudes == expected.max_magnitudes));
                Floats a(w.size()), b(w.size());
                stored.load(a.data());
                expected.load(b.data());
                CHECK(relative_error(a, b) <= (exact ? 0 : 0.05));
            }
        }
    }
}

// The first weights of a run that resumes must not matter. Without a master, rounding uses the seed.
PROPERTY("the same bits every time with any number of threads and after a resume; seeds differ") {
    SEEDED_RANDOM(rng);
    const int threads = omp_get_max_threads();
    std::vector<RunSettings> list = all_settings(rng);
    list.push_back(settings_of("coat", wide_heads(true), 2, 48));
    FOR_ALL_SETTINGS(s, list) {
        RunSettings other = s;
        other.seed = 99;
        Training whole(make, s), again(make, s), resumed(make, s.keep_masters ? other : s);
        const Doubles losses = whole.losses(2);
        CHECK(Training(make, other).losses(1)[0] != losses[0]);
        const Snapshot state = snapshot(*whole.model);
        restore(*resumed.model, state);
        resumed.text = whole.text;
        resumed.adamw = whole.adamw;
        resumed.tokens = whole.tokens;
        resumed.targets = whole.targets;
        CHECK(resumed.validation_loss() == resumed.validation_loss());
        resumed.next_logits(s.T);
        resumed.report();
        CHECK((snapshot(*resumed.model) == state));  // evaluating, sampling and reporting change nothing
        const Doubles rest = whole.losses(2);
        omp_set_num_threads(1);
        CHECK(again.losses(2) == losses);
        CHECK(again.losses(2) == rest);
        omp_set_num_threads(3);
        CHECK(resumed.losses(2) == rest);
        omp_set_num_threads(threads);
        for (const Training* t : {&again, &resumed}) CHECK((snapshot(*t->model) == snapshot(*whole.model)));
    }
}

PROPERTY(
    "validation_loss gives the loss of a step; next_logits gives the logits of the loss for any prompt") {
    SEEDED_RANDOM(rng);
    std::vector<RunSettings> list = all_settings(rng);
    for (const Recipe& recipe : recipes())
        for (int64_t T : {5, 16}) list.push_back(settings_of(recipe.name, tiny_config(LLAMA, true), 16, T));
    FOR_ALL_SETTINGS(s, list) {
        if (s.micro_batches_per_rank > 1) continue;
        Training t(make, s);
        t.losses(2);
        t.next();
        const double loss = t.validation_loss();
        CHECK(t.again().loss == loss);
        // A batch of copies of a prompt. Another target of its last token changes the loss by the difference
        // of two logits. Scales of FP8 operands are those of all tokens, so there the prompt is a whole
        // sequence. A GPU's GEMMs of different shapes may sum in different orders: a few roundings.
        const bool fp8 = linear_formats(s).x.is_fp8();
        const int64_t n = fp8 ? s.T : 1 + rng.below(s.T);
        for (size_t i = 0; i < t.tokens.size(); i++) t.tokens[i] = t.tokens[i % size_t(s.T)];
        const Floats logits = t.next_logits(n);
        auto loss_of = [&](int32_t target) {
            std::fill(t.targets.begin(), t.targets.end(), NO_TARGET);
            for (int64_t b = 0; b < s.B; b++) t.targets[size_t(b * s.T + n - 1)] = target;
            return t.validation_loss();
        };
        const double zero = loss_of(0), tolerance = make == make_reference_model ? 1e-4 : 0.1;
        for (int32_t v : {1, 7, int32_t(s.config.V - 1)})
            CHECK(std::fabs(zero - loss_of(v) - double(logits[size_t(v)] - logits[0])) <= tolerance);
    }
}

PROPERTY("in coat the forward pass reads the groups that are saved for backward") {
    Training t(make, settings_of("coat"));
    t.next();
    RunSettings without = t.settings();
    without.recipe.saved_inputs = PLAIN_BF16;
    CHECK(t.validation_loss() != make(without)->validation_loss(t.tokens.data(), t.targets.data()));
}

PROPERTY("a run whose tokens are no multiple of 16 has linear layers in BF16 also for a prompt of 16") {
    auto logits = [&](const char* words) {
        Training t(make, settings_of(words, tiny_config(LLAMA, true), 1, 50));
        t.losses(1);
        return t.next_logits(16);
    };
    for (const Recipe& recipe : recipes())
        if (recipe.x.is_fp8() && !recipe.saved_inputs.is_fp8())
            CHECK_MESSAGE(logits(recipe.name) == logits("bf16 moments fp32"), std::string(recipe.name));
}

// The outputs of attention and of the feed-forward half are their biases, because their weights are 0. Biases
// below half a step of BF16 change no element of the stream, one by one; in FP32 they do. They also change
// groups, which are made of the FP32 sum: that shows if the branch that reads these groups has its weights.
PROPERTY("the residual stream is rounded to BF16 after each branch; groups are made of the sum in FP32") {
    const std::string linears[] = {"layers.0.attention_out", "layers.0.down", "layers.1.attention_out",
                                   "layers.1.down"};
    for (const Recipe& recipe : recipes())
        for (int reader : {-1, 1, 2}) {  // none; norm 2 of layer 0; norm 1 of layer 1
            Training t(make, settings_of(recipe.name, tiny_config(GPT2, true)));
            INFO(text(t.settings()), ", reader ", reader);
            t.next();
            Snapshot state = snapshot(*t.model);
            Random rng(1);  // values in [1, 2) have steps of 2^-7
            change_weights(state, "embedding", 0, 50 * 64,
                           [&](float) { return 1 + float(rng.below(128)) * 0x1p-7f; });
            set_weights(state, "positions", 0);
            double losses[2];
            for (bool biased : {false, true}) {
                for (int linear = 0; linear < 4; linear++) {
                    if (linear != reader) set_weights(state, linears[linear], 0);
                    // Only some columns: else a LayerNorm takes the biases out again.
                    if (reader < 0 || linear == reader - 1)
                        set_weights(state, linears[linear] + ".bias", biased ? 0.4f * 0x1p-7f : 0, 32);
                }
                restore(*t.model, state);
                losses[biased] = t.validation_loss();
            }
            const bool reads_sum = reader > 0 && recipe.saved_inputs.is_fp8();
            CHECK((losses[0] == losses[1]) == (recipe.compute_format == Format::BF16 && !reads_sum));
        }
}

// The sums are FP32, but only one token has a gradient, so they show the values that backward hands on. In
// wgrad an operand with a scale for each feature, or 128 tokens of a feature, holds the one gradient of a
// feature without an error: dw = g^T x has the ratios of the bias's gradient, which is g. With rotary
// positions it is the second token, as the first is not rotated: of it alone are the gradients of q.
PROPERTY("backward hands on BF16 values; wgrad reads g quantized over tokens; biases sum g itself") {
    for (const Recipe& recipe : recipes())
        for (const Architecture& arch : {GPT2, QWEN2}) {
            Training t(make, settings_of(recipe.name, tiny_config(arch, false), 1, 16, 5));
            const RunSettings& s = t.settings();
            if (s.recipe.compute_format != Format::BF16) continue;
            INFO(text(s));
            const bool fp8 = s.recipe.x.is_fp8();
            const Granularity& of_g = s.recipe.g.granularity;
            const bool same_codes = of_g.transpose_has_same_blocks();  // for dgrad and wgrad
            t.losses(1);
            t.step();
            for (size_t i = 0; i < t.targets.size(); i++)
                if (i != size_t(arch.rope)) t.targets[i] = NO_TARGET;
            Snapshot state = snapshot(*t.model);
            set_weights(state, "final_norm.weight", 0, 0, 1);  // the first input of the head is the bias, 1
            if (!arch.rope) set_weights(state, "final_norm.bias", 1, 0, 1);
            restore(*t.model, state);
            REQUIRE(!t.again().skipped);
            const std::vector<Param> params = t.params();
            for (size_t i = 0; i < params.size(); i++) {
                const Param& p = params[i];
                if (arch.rope && p.name != "layers.1.qkv" && p.name != "layers.1.qkv.bias") continue;
                Floats g = gradient(*t.model, p);
                if (arch.rope) g.resize(size_t(s.config.q_cols() * (p.rows > 1 ? p.cols : 1)));
                INFO(p.name);
                // The gradient of the activation's input is quantized from FP32, and a bias sums that.
                const bool sums_fp32 = fp8 && p.name.ends_with("gate_up.bias"), head = p.name == "head";
                int64_t wrong = 0;
                for (size_t e = 0; e < g.size(); e += head ? size_t(p.cols) : 1) wrong += !bf16_value(g[e]);
                if (p.name.ends_with(".bias") || p.name == "embedding" || head)
                    CHECK(((wrong > 0) == sums_fp32 && norm(g) > 0));
                if (!fp8 || !p.is_linear_weight()) continue;
                const Floats bias = gradient(*t.model, params[i + 1]);
                // The column of dw with the largest gradient, beside the bias.
                size_t at = 0;
                for (size_t e = 0; e < g.size(); e++) at = std::fabs(g[e]) > std::fabs(g[at]) ? e : at;
                const size_t cols = size_t(p.cols), row = at / cols;
                double worst = 0;
                for (size_t r = 0; r < g.size() / cols; r++)
                    worst = std::max(worst, std::fabs(double(g[r * cols + at % cols]) / g[at] -
                                                      double(bias[r]) / bias[row]));
                CHECK((worst > 0x1p-10) == same_codes);
                if (!same_codes) CHECK(worst < 1e-5);
            }
        }
}

PROPERTY(
    "targets that are not scored have loss and gradient 0 and are not in the mean; none changes nothing") {
    constexpr int64_t B = 3, T = 16, COUNTED = 5;  // targets 0 to 4 of the first sequence count
    for (const Recipe& recipe : recipes())
        for (const Architecture& arch : {LLAMA, GPT2}) {
            Training t(make, settings_of(recipe.name, tiny_config(arch, false), B, T));
            INFO(text(t.settings()));
            t.losses(1);
            const ModelConfig& c = t.settings().config;
            const Tokens none(B * T, NO_TARGET);
            Tokens targets = none;
            for (size_t i = 0; i < B * T; i++) t.tokens[i] = int32_t(i < COUNTED ? i : 10 + i % 20);
            for (size_t i = 0; i < COUNTED; i++) targets[i] = int32_t(3 * i + 1);
            double sum = 0;  // of the losses of each, measured alone
            for (size_t i = 0; i < COUNTED; i++) {
                t.targets = none;
                t.targets[i] = targets[i];
                sum += t.validation_loss();
            }
            t.targets = targets;
            CHECK(t.validation_loss() == doctest::Approx(sum / COUNTED).epsilon(1e-12));
            t.adamw.lr = 0;
            const StepResult r = t.again();
            CHECK(r.scored_target_count == COUNTED);
            CHECK(r.loss == doctest::Approx(sum / COUNTED).epsilon(1e-12));
            const auto gradients = gradients_of(*t.model);
            for (int64_t token = 0; token < c.V; token++) {  // rows of the gradient of the embedding
                const auto row = gradients[0].begin() + token * c.C;
                REQUIRE((std::count(row, row + c.C, 0.0f) == c.C) == (token >= COUNTED));
            }
            if (!t.settings().recipe.x.is_fp8()) {  // in FP8, scales depend on all tokens
                for (size_t i = T; i < B * T; i++) t.tokens[i] = int32_t(i % 7);
                t.again();
                CHECK((gradients_of(*t.model) == gradients));
            }
            t.targets = none;
            t.adamw.lr = 1;
            const Snapshot kept = snapshot(*t.model);
            const StepResult empty = t.again();
            CHECK(empty.skipped);
            CHECK(empty.scored_target_count == 0);
            CHECK(empty.loss == 0);
            CHECK(empty.grad_norm == 0);
            CHECK((snapshot(*t.model) == kept));
            CHECK(t.validation_loss() == 0);
        }
}

// Sums over 16 micro-batches, of equal and of different terms, against the sum in double: they may differ by
// one rounding to the format of the gradients. The gradient of one micro-batch is measured by a step in which
// only its targets count. All factors are powers of two, so they change no bit of a term.
PROPERTY("gradients of 16 micro-batches are their sum within one rounding; BF16 is for at most 4 additions") {
    constexpr int64_t MANY = 16, T = 16;
    std::vector<std::pair<const char*, ModelConfig>> runs = {{"bf16", tiny_config(LLAMA, false)},
                                                             {"coat", tiny_config(GPT2, true)}};
    if (make == make_gpu_model)  // its GEMMs add; the reference has one way to add for all recipes
        for (const char* recipe : {"bf16", "coat", "rowwise", "deepseek"})
            for (bool tied : {true, false}) runs.push_back({recipe, tiny_config(tied ? GPT2 : LLAMA, tied)});
    for (const auto& [recipe, config] : runs)
        for (const bool equal : {true, false}) {
            Training t(make, settings_of(recipe, config, 1, T, MANY));
            t.adamw.lr = 0;
            t.next();
            for (auto* x : {&t.tokens, &t.targets})
                for (size_t i = 0; equal && i < x->size(); i++) (*x)[i] = (*x)[i % T];
            const double loss = t.again().loss;
            const auto got = gradients_of(*t.model);
            const Tokens targets = t.targets;
            double losses = 0;
            std::vector<std::vector<Floats>> terms;  // by micro-batch and parameter
            for (int64_t a = 0; a < MANY; a++) {
                std::fill(t.targets.begin(), t.targets.end(), NO_TARGET);
                std::copy_n(&targets[size_t(a * T)], T, &t.targets[size_t(a * T)]);
                losses += t.again().loss;
                terms.push_back(gradients_of(*t.model));
            }
            CHECK(loss == doctest::Approx(losses / MANY).epsilon(1e-12));
            const double half_step =
                std::ldexp(1.0, -format_info(t.settings().recipe.compute_format).mantissa_bits - 1);
            for (size_t p = 0; p < got.size(); p++) {
                int64_t bad = 0;
                for (size_t i = 0; i < got[p].size(); i++) {
                    double sum = 0, size = 0;
                    for (const auto& term : terms) {
                        sum += double(term[p][i]) / MANY;
                        size += std::fabs(double(term[p][i])) / MANY;
                    }
                    // In FP32, each of up to 2 MANY additions and 16 sums rounds.
                    const double in_fp32 = (2 * MANY + 16) * 0x1p-24 * size + 1e-37;
                    bad += !(std::fabs(got[p][i] - sum) <= half_step * std::fabs(sum) + in_fp32);
                }
                INFO(text(t.settings()), " ", t.params()[p].name, equal ? ", equal terms" : "");
                CHECK(bad == 0);
                CHECK(norm(got[p]) > 0);
            }
        }
    for (const auto& [tied, accumulate] : {std::pair{false, 4}, {false, 5}, {true, 2}, {true, 3}}) {
        Training t(make, settings_of("bf16", tiny_config(LLAMA, tied), 2, 16, accumulate));
        t.step();
        bool in_bf16 = true;
        for (const Floats& g : gradients_of(*t.model)) in_bf16 &= std::all_of(g.begin(), g.end(), bf16_value);
        INFO(tied, " ", accumulate);
        CHECK(in_bf16 == (accumulate * (tied ? 2 : 1) <= 4));
    }
}

PROPERTY("a weight that is not finite: the step changes nothing; evaluation tells and training continues") {
    std::vector<std::string> runs = {"coat lean", "bf16 lean"};
    for (const Recipe& recipe : recipes()) runs.push_back(recipe.name);
    const std::pair<const char*, float> poisons[] = {
        {"embedding", NAN},        {"layers.0.qkv", INFINITY},  {"layers.0.norm2.weight", INFINITY},
        {"layers.1.gate_up", NAN}, {"layers.1.down", INFINITY}, {"final_norm.weight", NAN}};
    for (const std::string& run : runs)
        for (const Architecture& arch : {LLAMA, GPT2}) {
            Training t(make, settings_of(run, tiny_config(arch, true)));
            t.losses(1);
            const Snapshot good = snapshot(*t.model);
            for (const auto& [name, poison] : poisons) {
                INFO(text(t.settings()), " ", std::string(name), " ", poison);
                Snapshot bad = good;
                set_weights(bad, name, poison, 0, 50);  // of the embedding, those of the first tokens
                restore(*t.model, bad);
                std::fill(t.tokens.begin(), t.tokens.end(), 0);
                CHECK(!std::isfinite(t.validation_loss()));  // although FP8 codes saturate
                CHECK(t.again().skipped);
                CHECK((snapshot(*t.model) == bad));
                restore(*t.model, good);
                CHECK(!t.step().skipped);
                CHECK((snapshot(*t.model) != good));
            }
        }
}

// In layer 1 of Llama the output of the feed-forward half becomes 0, and the gradient of gate_up large:
//   huge        gates 0, so that act = 0; up and down such that a gate has 2^80: any format of gradients can
//               represent it, but its square exceeds FP32. `down` has two values: a sum must not cancel
//   infinite    the same with larger ones; later buckets of backward have such gradients, too
//   hidden      ups 0, so that earlier layers have finite gradients; the norm's output and wgrad are large
enum class Large { Huge, Infinite, Hidden };
static Snapshot make_large(Training& t, Large kind) {
    t.losses(1);
    Snapshot state = snapshot(*t.model);
    const int64_t half = t.settings().config.F * t.settings().config.C;  // of gate_up: the gates
    if (kind == Large::Hidden) {
        auto scale = [&](const char* name, float factor) {
            change_weights(state, name, 0, -1, [=](float w) { return w * factor; });
        };
        scale("layers.1.norm2.weight", 0x1p90f);
        scale("layers.1.gate_up", 0x1p-90f);  // the gates stay as they are
        set_weights(state, "layers.1.gate_up", 0, half);
        scale("layers.1.down", 0x1p66f);
    } else {
        const bool huge = kind == Large::Huge;
        const float up = huge ? 0x1p50f : 0x1p100f, down = huge ? 0x1p40f : 0x1p120f;
        set_weights(state, "layers.1.gate_up", 0, 0, half);
        set_weights(state, "layers.1.gate_up", up, half, half);
        set_weights(state, "layers.1.down", -down / 2, 0, half / 2);
        set_weights(state, "layers.1.down", down, half / 2);
    }
    restore(*t.model, state);
    return state;
}

PROPERTY("a gradient whose square exceeds FP32 is taken only if it is clipped with every optimizer") {
    for (const char* recipe : {"fp32", "bf16", "coat"})
        for (const OptimizerFormats& o : optimizers()) {
            Training t(make, settings_of(concat(recipe, " moments ", o.name)));
            INFO(text(t.settings()));
            const Snapshot state = make_large(t, Large::Huge);
            t.adamw.clip = 0;
            const StepResult r = t.step();
            CHECK(r.skipped);
            CHECK(std::isfinite(r.loss));
            CHECK(r.grad_norm >= 0x1p62);
            CHECK(r.grad_norm < INFINITY);
            CHECK((snapshot(*t.model) == state));
            t.adamw.clip = 1;
            t.adamw.update_number--;
            CHECK(!t.again().skipped);
            CHECK((snapshot(*t.model) != state));
            for (const StateTensor& tensor : state_tensors(t.settings()))
                if (tensor.dtype == std::string("F32"))
                    for (float v : read_as<float>(*t.model, tensor.name, tensor.size()))
                        REQUIRE(std::isfinite(v));
        }
}

PROPERTY("--gradients none: a gradient that is not finite stops its bucket and all later ones") {
    for (const char* recipe : {"fp32", "bf16", "coat"})
        for (Large kind : {Large::Infinite, Large::Hidden}) {
            Training t(make, settings_of(std::string(recipe) + " gradients"));
            INFO(text(t.settings()), kind == Large::Hidden ? ", hidden" : "");
            const Snapshot state = make_large(t, kind);
            const StepResult r = t.step();
            CHECK(r.skipped);
            CHECK(std::isfinite(r.loss));
            // In E5M2 the infinite gradient saturates, but the check of amaxes detects it.
            if (kind == Large::Hidden || t.settings().recipe.g != E5M2_PER_TENSOR)
                CHECK(!std::isfinite(r.grad_norm));
            const Snapshot after = snapshot(*t.model);
            const std::vector<Param> params = t.params();
            const int64_t bucket = params[param_index_of(params, "layers.1.gate_up")].bucket;
            // A GPU has updated earlier buckets. With gradient 0, codes and k of FP8 moments stay.
            const char* moment = is_fp8(t.settings().optimizer.m_format) ? ".m.max" : ".m";
            for (const StateTensor& tensor : state_tensors(t.settings())) {
                const Param& p = tensor.param;
                INFO(tensor.name);
                const bool same = after.at(tensor.name) == state.at(tensor.name);
                if (make == make_reference_model || p.bucket <= bucket) CHECK(same);
                else if (tensor.name == p.name + (p.is_vector() ? ".m" : moment)) CHECK(!same);
            }
        }
}

PROPERTY("--gradients none has the bits of kept gradients that are not clipped and the same report") {
    SEEDED_RANDOM(rng);
    std::vector<RunSettings> list = all_settings(rng);
    list.push_back(settings_of("coat", wide_heads(true), 2, 48));
    FOR_ALL_SETTINGS(listed, list) {
        RunSettings s = listed;
        s.keep_gradients = true;
        s.micro_batches_per_rank = 1;
        RunSettings none = s;
        none.keep_gradients = false;
        Training kept(make, s), dropped(make, none);
        kept.adamw.clip = 0;
        for (int i = 0; i < 2; i++) {
            const StepResult a = kept.step(), b = dropped.step();
            CHECK(a.loss == b.loss);
            CHECK(a.grad_norm > 0.1);
            CHECK(a.grad_norm == doctest::Approx(b.grad_norm).epsilon(1e-12));  // added in another order
            CHECK((snapshot(*kept.model) == snapshot(*dropped.model)));
        }
        const QuantReport x = kept.report(), y = dropped.report();
        for (int k = 0; k < int(MeasuredKind::Count); k++)
            CHECK((x.stats_by_kind[k].elements == y.stats_by_kind[k].elements &&
                   x.stats_by_kind[k].noise == doctest::Approx(y.stats_by_kind[k].noise).epsilon(1e-9)));
        CHECK(x.k_m == y.k_m);
        CHECK(x.k_v == y.k_v);
        CHECK_THROWS_AS(gradient(*dropped.model, kept.params().back()), Error);
    }
}

// With several micro-batches the scale is that of the largest amax so far: the same if all are equal.
PROPERTY("delayed scaling: an operand without a history is scaled just in time") {
    for (const auto& [arch, accumulate, equal] :
         {std::tuple{LLAMA, 1, true}, {GPT2, 1, true}, {LLAMA, 3, true}, {LLAMA, 3, false}}) {
        const RunSettings te = settings_of("te", tiny_config(arch, true), 4, 16, accumulate);
        RunSettings just_in_time = te;
        just_in_time.recipe.scale_source = ScaleSource::JustInTime;
        Training a(make, te), b(make, just_in_time);
        a.next();
        for (auto* x : {&a.tokens, &a.targets})
            for (size_t i = 64; equal && i < x->size(); i++) (*x)[i] = (*x)[i - 64];
        b.tokens = a.tokens;
        b.targets = a.targets;
        a.adamw.lr = b.adamw.lr = 0;
        CHECK(a.validation_loss() == b.validation_loss());
        CHECK(a.next_logits(3) == b.next_logits(3));
        const StepResult x = a.again(), y = b.again();
        CHECK((x.loss == y.loss) == equal);
        CHECK((gradients_of(*a.model) == gradients_of(*b.model)) == equal);
        for (const StateTensor& t : delayed_scaling_tensors(te.config, te.recipe))
            CHECK(read_as<float>(*a.model, t.name, t.size())[0] > 0);
    }
    // Zeros have no scale: layers.0.down's weight gets its own with its first values, in the second step.
    Training t(make, settings_of("te", tiny_config(LLAMA, true), 4, 16));
    Snapshot zeros = snapshot(*t.model);
    change_weights(zeros, "layers.0.down", 0, -1, [](float) { return 0.0f; });
    restore(*t.model, zeros);
    for (const bool has_scale : {false, true}) {
        t.step();
        CHECK((read_as<float>(*t.model, "layers.0.down.w.scale", 1)[0] > 0) == has_scale);
    }
}

// Another GPU, or a number of tokens that is no multiple of 16, may continue a run with FP8.
PROPERTY("delayed scaling: linear layers without FP8 leave histories and scales as they are") {
    std::vector<RunSettings> list = {settings_of("te", tiny_config(LLAMA, true), 3, 5), settings_of("te")};
    list[1].recipe = recipe_on_gpu(list[1].recipe, 80);
    FOR_ALL_SETTINGS(s, list) {
        REQUIRE(!linear_formats(s).x.is_fp8());
        Training t(make, s);
        Snapshot before;
        for (const StateTensor& tensor : delayed_scaling_tensors(s.config, s.recipe)) {
            const Floats values(size_t(tensor.size()), tensor.name.ends_with(".scale") ? 0.5f : 3.0f);
            t.model->write(tensor.name, values.data());
            before[tensor.name] = read_as<uint8_t>(*t.model, tensor.name, tensor.total_bytes());
        }
        CHECK(!t.step().skipped);
        for (const auto& [name, bytes] : before)
            CHECK_MESSAGE(read_as<uint8_t>(*t.model, name, int64_t(bytes.size())) == bytes, name);
    }
}

PROPERTY("delayed scaling: amaxes of micro-batches and of four steps; what doubles saturates for one step") {
    RunSettings s = settings_of("te", tiny_config(LLAMA, true), 4, 16, 2);
    s.recipe.history_steps = 4;
    Training t(make, s);
    t.adamw.lr = 0;
    t.step();
    const Snapshot before = snapshot(*t.model);  // with scales: they do not change during a step
    t.next();
    const Tokens tokens = t.tokens, targets = t.targets;
    Snapshot after[3];  // of steps with the first micro-batch twice, with the second twice, with both
    for (int run = 0; run < 3; run++) {
        for (size_t i = 0; i < tokens.size(); i++) {
            const size_t from = run == 2 ? i : i % 64 + size_t(64 * run);
            t.tokens[i] = tokens[from];
            t.targets[i] = targets[from];
        }
        restore(*t.model, before);
        t.again();
        after[run] = snapshot(*t.model);
    }
    for (const Param& p : t.params())
        for (OperandKind o : LINEAR_OPERANDS) {
            if (!p.is_linear_weight()) continue;
            const std::string operand = p.name + suffix_of(o);
            INFO(operand);
            auto newest = [&](const Snapshot& state) {
                return values_of<float>(state, operand + ".history")[0];
            };
            const float now = std::max(newest(after[0]), newest(after[1])), last = newest(before);
            CHECK(values_of<float>(after[2], operand + ".history") == Floats{now, last, 0, 0});
            const float fmax = format_info(format_of(linear_formats(s), o).element_format).fmax;
            CHECK(values_of<float>(after[2], operand + ".scale")[0] == std::max(now, last) / fmax);
        }
    auto saturated = [&] { return t.report().stats_by_kind[int(MeasuredKind::Weight)].saturated; };
    CHECK(saturated() == 0);
    change_weights(after[2], "layers.0.down", 0, -1, [](float w) { return 2 * w; });
    restore(*t.model, after[2]);
    CHECK(saturated() > 0);
    CHECK(!t.step().skipped);  // saturated values are finite
    CHECK(saturated() == 0);
}

// Of the moments, the report measures what a step with the report's gradients would store.
PROPERTY("the report measures each kind of tensor that the recipe quantizes and the moments of a step") {
    SEEDED_RANDOM(rng);
    std::vector<RunSettings> list = all_settings(rng);
    list.push_back(settings_of("coat attention moments fp8"));
    const bool exact = make == make_reference_model;  // a GPU's powers may change a code by one
    FOR_ALL_SETTINGS(listed, list) {
        RunSettings s = listed;
        s.keep_gradients = true;
        s.micro_batches_per_rank = 1;
        Training t(make, s);
        t.losses(3);
        const Snapshot state = snapshot(*t.model);
        const QuantReport report = t.report();
        const LinearFormats q = linear_formats(s);
        const Format group = s.recipe.saved_inputs.element_format,
                     attention = s.recipe.saved_attention.element_format;
        const Format of[] = {group,
                             attention,
                             group,
                             q.x.element_format,
                             q.w.element_format,
                             q.g.element_format,
                             s.optimizer.m_format,
                             s.optimizer.v_format};
        for (int kind = 0; kind < int(MeasuredKind::Count); kind++) {
            const QuantStats& stats = report.stats_by_kind[kind];
            INFO(std::string(MEASURED_KIND_NAMES[kind]), ": ", stats.snr_db(), " dB of ", stats.elements);
            CHECK((stats.elements > 0) == is_fp8(of[kind]));
            if (stats.elements == 0) continue;
            if (s.recipe.scale_source == ScaleSource::JustInTime) CHECK(stats.saturated == 0);
            if (kind >= int(MeasuredKind::Moment1)) {
                QuantStats expected;
                for (const Param& p : t.params())
                    if (!p.is_vector())
                        Update(*t.model, state, p, {1, 0.0f}, 0)
                            .store(kind == int(MeasuredKind::Moment2), &expected);
                CHECK(stats.elements == expected.elements);
                if (exact) CHECK(stats.flushed == expected.flushed);
                CHECK(stats.signal == doctest::Approx(expected.signal).epsilon(exact ? 1e-12 : 1e-4));
                CHECK(stats.noise == doctest::Approx(expected.noise).epsilon(exact ? 1e-12 : 0.05));
            } else {  // half a step of E4M3 is an rms of 2^-4 / sqrt(3), which is 28.8 dB; of E5M2 22.8 dB
                CHECK(stats.snr_db() > (of[kind] == Format::E5M2 ? 22.8 : 28.8));
                CHECK(stats.snr_db() < 60);
                CHECK(stats.flushed <= stats.elements / 10);
            }
        }
        for (const auto& [k, end] : {std::pair{&report.k_m, ".m.k"}, {&report.k_v, ".v.k"}}) {
            Floats all;
            for (const Param& p : t.params())
                if (state.count(p.name + end))
                    for (float x : values_of<float>(state, p.name + end)) all.push_back(x);
            CHECK(*k == all);
        }
    }
}

PROPERTY("training learns the text in every recipe and memory mode and optimizer as bf16 does") {
    // The entropy of the text is 1.21 nats a token; a model that has learnt nothing has log 50 = 3.91.
    for (const auto& [arch, steps] : {std::pair{LLAMA, cases(70, 10)}, {GPT2, cases(60, 10)}}) {
        std::vector<std::string> runs = {"bf16", "fp32", "coat", "coat lean"};
        for (const char* more : {"te", "colossal", "rowwise", "deepseek", "coat moments fp8"})
            if (arch.rope) runs.push_back(more);
        double of_bf16 = 0;
        for (const std::string& run : runs) {
            Training t(make, settings_of(run, tiny_config(arch, true), 4, 32));
            const Doubles loss = t.losses(steps);
            const double last = mean({loss.begin() + steps * 3 / 4, loss.end()});
            if (run == "bf16") of_bf16 = last;
            INFO(std::string(arch.name), " ", run, ": from ", loss[0], " to ", last, ", bf16 to ", of_bf16);
            CHECK(std::fabs(loss[0] - std::log(50.0)) < 0.1);
            CHECK(last < loss[0] - (quick() ? 0 : 1.5));
            CHECK(std::fabs(last - of_bf16) < 0.03);  // another rounding alone changes so short a run by 0.01
        }
    }
}
