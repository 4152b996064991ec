// test_training.cpp - whole training runs on the CPU: they learn, they repeat to the bit, they resume to the bit; then the modes that save
// memory: what they change, and that they change nothing else.
#include <doctest/doctest.h>
#include <omp.h>

#include <algorithm>
#include <map>

#include "../plan.h"
#include "../reference.h"
#include "oracle.h"
#include "random.h"
#include "tiny.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;

namespace {

constexpr const char* RECIPES[] = {"fp32", "bf16", "coat"};
std::vector<std::string> all_recipes() {
    std::vector<std::string> names;
    for (const Recipe& r : recipes()) names.push_back(r.name);
    return names;
}
Setup setup_of(const std::string& recipe, const Architecture& arch = LLAMA, int64_t B = 4, int64_t T = 16) {
    return tiny_setup(tiny_config(arch, true), recipe, optimizer_of(recipe), B, T);
}

}  // namespace

TEST_CASE("training: 300 steps in fp32, bf16 and coat from one seed learn the text and stay within a band") {
    // The text's entropy is 1.21 nats a token; a model that knows nothing has log 50 = 3.91. The band is about the mean of the last
    // 50 steps: 0.01 nats, half of what the project promises of its main job (measured: 0.001). GPT-2 takes a shorter run.
    for (const auto& [arch, full] : {std::pair{LLAMA, 300}, std::pair{GPT2, 150}}) {
        const size_t steps = static_cast<size_t>(count(full, 8));
        std::map<std::string, double> last;
        for (const char* recipe : RECIPES) {
            Training training(setup_of(recipe, arch, 8, 32));
            const std::vector<double> loss = losses(training, int64_t(steps));
            INFO(std::string(arch.name), " ", std::string(recipe), ": from ", loss[0], " to ", loss.back());
            CHECK(std::fabs(loss[0] - std::log(50.0)) < 0.1);
            CHECK(mean(loss, steps - 3, steps) < loss[0]);
            if (quick()) continue;
            last[recipe] = mean(loss, steps - 50, steps);
            CHECK(last[recipe] < 1.6);
            CHECK(last[recipe] > 1.1);
            for (size_t i = 100; i < steps; i += 50) CHECK(mean(loss, i, i + 50) < mean(loss, i - 50, i) + 0.02);  // no late rise
        }
        if (quick()) continue;
        INFO(std::string(arch.name), ": fp32 ", last["fp32"], ", bf16 ", last["bf16"], ", coat ", last["coat"]);
        CHECK(std::fabs(last["bf16"] - last["fp32"]) < 0.01);
        CHECK(std::fabs(last["coat"] - last["fp32"]) < 0.01);
    }
}

TEST_CASE("training: recipes whose linear layers alone are FP8 learn as bf16 does") {
    // A shorter run than above; the band is the promise of the main job, 0.02 nats about the mean of the last 20 steps.
    for (const Architecture& arch : {LLAMA, GPT2}) {
        const size_t steps = static_cast<size_t>(count(80, 8));
        std::map<std::string, double> last;
        for (const char* recipe : {"bf16", "te", "colossal", "rowwise", "deepseek"}) {
            Training training(setup_of(recipe, arch));
            const std::vector<double> loss = losses(training, int64_t(steps));
            last[recipe] = mean(loss, steps - steps / 4, steps);
            INFO(std::string(arch.name), " ", std::string(recipe), ": from ", loss[0], " to ", last[recipe], ", bf16 to ", last["bf16"]);
            CHECK(last[recipe] < loss[0]);
            if (!quick()) CHECK(last[recipe] < loss[0] - 1);
            if (!quick()) CHECK(std::fabs(last[recipe] - last["bf16"]) < 0.02);
        }
    }
}

namespace {

float one(Model& model, const std::string& name) { return read_as<float>(model, name, 1)[0]; }

// A run with delayed scales, of a history of so many steps, that changes nothing but those.
Training delayed_run(int history, int margin = 0, int64_t accumulate = 1) {
    Setup setup = setup_of("te");
    setup.recipe.history = history, setup.recipe.margin = margin, setup.accumulate = accumulate;
    Training training(setup);
    training.adamw.lr = 0;
    return training;
}

// layers.0.down by a power of two
void scale_weight(Model& model, float factor) {
    const std::string name = "layers.0.down";
    const int64_t n = 64 * 176;
    auto weight = read_as<uint16_t>(model, name, n);
    for (uint16_t& w : weight) w = to_bf16(factor * from_bf16(w));
    model.write(name, weight.data());
}

int64_t saturated(Training& t, Kind kind) {
    return t.model->quantization(t.tokens.data(), t.targets.data()).kinds[static_cast<int>(kind)].saturated;
}

}  // namespace

TEST_CASE("delayed scaling: the scale is the history's maximum over the largest code, kept where that is 0 or not finite") {
    FRESH_RANDOM(rng);
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (Format f : {Format::E4M3, Format::E5M2})
        for (int margin : {0, 1, 3})
            for (size_t length : {1u, 3u, 16u}) {
                DelayedScale d;
                d.history.resize(length);
                std::vector<float> seen;
                float wanted = 0;
                for (int step = 0; step < 60; step++) {
                    const int64_t draw = rng.below(12);
                    d.amax = draw == 0 ? inf : draw == 1 ? nan : draw < 5 ? 0.0f : float(std::exp(5 * rng.normal()));
                    seen.insert(seen.begin(), d.amax);
                    float top = 0;
                    bool finite = true;
                    for (size_t i = 0; i < std::min(length, seen.size()); i++) {
                        top = std::max(top, seen[i]);
                        finite = finite && std::isfinite(seen[i]);
                    }
                    if (finite && top > 0) wanted = top * float(1 << margin) / info(f).max;
                    d.end_step(f, margin);
                    REQUIRE(d.scale == wanted);
                    REQUIRE(d.amax == 0);
                    for (size_t i = 0; i < std::min(length, seen.size()); i++) REQUIRE(bits_of(d.history[i]) == bits_of(seen[i]));
                }
            }
}

TEST_CASE("delayed scaling: a step's amax is the largest of its micro-batches, and there is no scale before the first step") {
    Training both = delayed_run(4, 0, 2), first = delayed_run(4), second = delayed_run(4), before = delayed_run(4);
    for (const StateTensor& t : scaling_tensors(both.model->setup().config, both.model->setup().recipe))
        if (t.size() == 1) CHECK(one(*both.model, t.name) == 0.0f);
    before.step();
    const Snapshot state = snapshot(*before.model);  // with scales, which the step does not change on its way
    for (Training* t : {&both, &first, &second}) restore(*t->model, state);
    both.step(), first.step();
    second.text = first.text;
    second.step();
    int compared = 0;
    for (const Param& p : parameters(both.model->setup().config))
        for (const char* operand : OPERAND_NAMES) {
            if (!p.role.linear) continue;
            // With two micro-batches gradients are half as large; that of the last layer's output, which comes from the head, exactly.
            if (operand == std::string(".g") && p.name != "layers.1.down") continue;
            const float factor = operand == std::string(".g") ? 0.5f : 1.0f;
            const std::string name = p.name + operand + ".history";
            INFO(name);
            const auto history = read_as<float>(*both.model, name, 4);
            CHECK(history[0] == factor * std::max(read_as<float>(*first.model, name, 4)[0], read_as<float>(*second.model, name, 4)[0]));
            CHECK(history[0] > 0);
            CHECK(history[1] == read_as<float>(*before.model, name, 4)[0]);
            CHECK((history[2] == 0 && history[3] == 0));
            const float fmax = info(operand == std::string(".g") ? Format::E5M2 : Format::E4M3).max;
            CHECK(one(*both.model, p.name + operand + ".scale") == std::max(history[0], history[1]) / fmax);
            compared++;
        }
    CHECK(compared == 2 * 4 * 2 + 1);
}

TEST_CASE("delayed scaling: an operand without a history is scaled just in time, in evaluation, for the next token and in the first step") {
    for (const Architecture& arch : {LLAMA, GPT2}) check_first_scales(make_reference, arch);
}

TEST_CASE("delayed scaling: a tensor that doubles saturates for one step, one that shrinks keeps its scale until the history forgets") {
    for (int margin : {0, 1}) {
        Training training = delayed_run(3, margin);
        training.step();
        const std::string name = "layers.0.down.w.scale";
        const float before = one(*training.model, name);
        CHECK(saturated(training, Kind::Weight) == 0);
        scale_weight(*training.model, 2);
        CHECK((saturated(training, Kind::Weight) > 0) == (margin == 0));  // a power of two to spare is enough
        CHECK(one(*training.model, name) == before);                      // a report changes nothing
        CHECK(!training.step().skipped);                                  // what saturates is finite
        CHECK(one(*training.model, name) == 2 * before);
        CHECK(saturated(training, Kind::Weight) == 0);
        scale_weight(*training.model, 0.5f);
        for (float wanted : {2 * before, 2 * before, before}) {
            training.step();
            CHECK(one(*training.model, name) == wanted);
        }
        // A tensor of zeros: once the history has nothing else, the scale stays.
        scale_weight(*training.model, 0);
        for (int i = 0; i < 5; i++) training.step();
        CHECK(one(*training.model, name) == before);
        CHECK(read_as<float>(*training.model, "layers.0.down.w.history", 3) == std::vector<float>(3, 0.0f));
    }
}

TEST_CASE("training: the start is the table's, BF16 weight and remainder together, moments zero") {
    const Setup setup = setup_of("coat");
    const std::unique_ptr<Model> model = make_reference(setup);
    const std::vector<Param> params = parameters(setup.config);
    for (size_t p = 0; p < params.size(); p++) {
        const int64_t n = params[p].size(), live = live_elements(setup.config, params[p]);
        const auto weight = read_as<uint16_t>(*model, params[p].name, n);
        const auto remainder = read_as<int16_t>(*model, params[p].name + ".remainder", n);
        for (int64_t i = 0; i < n; i++)
            REQUIRE(join_master(weight[size_t(i)], remainder[size_t(i)]) ==
                    initial(params[p].init_std, params[p].role.gain, live, setup.seed, p, i));
    }
    const Snapshot state = snapshot(*model);
    for (const StateTensor& t : optimizer_tensors(setup)) {
        const std::string suffix = t.name.substr(params[t.param].name.size());
        if (suffix == ".remainder" || suffix == ".m.k" || suffix == ".v.k") continue;
        const std::vector<uint8_t>& bytes = state.at(t.name);
        CHECK(std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == 0; }));
    }
}

TEST_CASE("training: two runs have the same bits, whatever the number of threads") {
    const int threads = omp_get_max_threads();
    for (const Architecture& arch : {LLAMA, GPT2}) {
        std::vector<Setup> setups;
        for (const std::string& recipe : all_recipes()) setups.push_back(setup_of(recipe, arch));
        setups.push_back(with_mode(setup_of("coat", arch), "lean"));
        for (const Setup& setup : setups) {
            std::vector<Snapshot> ends;
            std::vector<std::vector<double>> loss;
            for (int n : {threads, 1, 3, threads}) {
                omp_set_num_threads(n);
                Training training(setup);
                loss.push_back(losses(training, count(4, 2)));
                ends.push_back(snapshot(*training.model));
            }
            omp_set_num_threads(threads);
            INFO(std::string(arch.name), " ", std::string(setup.recipe.name), setup.master ? "" : " lean");
            for (size_t i = 1; i < ends.size(); i++) {
                CHECK(loss[i] == loss[0]);
                CHECK((ends[i] == ends[0]));
            }
        }
    }
}

TEST_CASE("training: another seed gives another start and the same text another run") {
    Setup setup = setup_of("coat");
    Training a(setup);
    setup.seed = 2;
    Training b(setup);
    CHECK(losses(a, 1) != losses(b, 1));
}

TEST_CASE("training: stop and resume is bit-identical, in every recipe and every optimizer") {
    std::vector<Setup> setups;
    for (const Architecture& arch : {LLAMA, GPT2})
        for (const std::string& recipe : all_recipes()) setups.push_back(setup_of(recipe, arch));
    for (const OptimizerFormat& optimizer : optimizers()) {
        setups.push_back(setup_of("coat"));
        setups.back().optimizer = optimizer;
    }
    for (const Architecture& arch : {LLAMA, GPT2}) {
        setups.push_back(with_mode(setup_of("coat", arch), "lean"));
        for (const MemoryMode& mode : memory_modes()) setups.push_back(with_mode(setup_of("bf16", arch), mode.flag));
    }
    for (Setup setup : setups) {
        Training whole(setup);
        losses(whole, count(4, 2));
        if (setup.master) setup.seed = 99;  // what the second run starts from must not matter; but stochastic rounding draws from it too
        Training resumed(setup);
        restore(*resumed.model, snapshot(*whole.model));
        resumed.text = whole.text;
        resumed.adamw = whole.adamw;
        INFO(std::string(setup.config.arch.name), " ", std::string(setup.recipe.name), " ", std::string(setup.optimizer.name));
        CHECK((snapshot(*resumed.model) == snapshot(*whole.model)));
        CHECK(losses(resumed, count(4, 2)) == losses(whole, count(4, 2)));
        CHECK((snapshot(*resumed.model) == snapshot(*whole.model)));
    }
}

TEST_CASE("training: accumulated micro-batches equal one larger batch within rounding") {
    // Same tokens, another order of the same sums. fp32: N terms, each rounded by 2^-24, through 2 L layers. bf16: each
    // micro-batch's part is rounded to 8 bits on its way, with the rms of 2^-8 / sqrt(3), and once more in the sum.
    const std::map<std::string, double> bounds = {{"fp32", 0x1p-24 * 40 * 16}, {"bf16", 0x1p-8 / std::sqrt(3.0) * 2}};
    for (const auto& [recipe, bound] : bounds) {
        Setup setup = setup_of(recipe);
        Training large(setup);
        setup.B /= 4, setup.accumulate = 4;
        Training small(setup);
        const double a = losses(large, 1)[0], b = losses(small, 1)[0];
        CHECK(large.tokens == small.tokens);
        CHECK(std::fabs(a - b) <= bound * a);
        for (const Param& p : parameters(setup.config)) {
            INFO(recipe, " ", p.name);
            const auto one = read_as<float>(*large.model, p.name + ".gradient", p.size());
            const auto four = read_as<float>(*small.model, p.name + ".gradient", p.size());
            CHECK(relative_error(four, one) <= bound);
        }
    }
}

TEST_CASE("training: gradients of 64 micro-batches are their sum within one rounding") {
    for (const char* recipe : {"bf16", "coat"})
        for (const ModelConfig& config : {tiny_config(LLAMA, false), tiny_config(GPT2, true)})
            check_sums(make_reference, tiny_setup(config, recipe, "fp32"));
}

TEST_CASE("training: a BF16 gradient is rounded at most four times; where more terms are added up it is kept in FP32") {
    for (const bool tied : {true, false})
        for (int64_t accumulate : {1, 2, 3, 4, 5}) {
            Setup setup = tiny_setup(tiny_config(LLAMA, tied), "bf16", "bf16", 2, 16);
            setup.accumulate = accumulate;
            Training training(setup);
            training.step();
            int64_t beyond_bf16 = 0;
            for (const Param& p : parameters(setup.config))
                for (float g : read_as<float>(*training.model, p.name + ".gradient", p.size())) beyond_bf16 += round_to(Format::BF16, g) != g;
            INFO(tied, " ", accumulate);
            CHECK((beyond_bf16 > 0) == (accumulate * (tied ? 2 : 1) > 4));
            const std::vector<MemoryRow> plan = memory_plan(setup);
            const bool fp32 = std::any_of(plan.begin(), plan.end(), [](const MemoryRow& row) { return row.name == "gradients (fp32)"; });
            CHECK(fp32 == (beyond_bf16 > 0));
        }
}

TEST_CASE("training: a step whose loss or gradient is not finite changes nothing, and training goes on after it") {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    for (const Architecture& arch : {LLAMA, GPT2})
        for (const std::string& recipe : all_recipes())
            for (const char* name : {"embedding", "layers.0.qkv", "layers.1.down", "layers.0.norm2.gain", "final_norm.gain"})
                for (float poison : {nan, inf}) {
                    Training training(setup_of(recipe, arch));
                    INFO(std::string(arch.name), " ", recipe, " ", std::string(name), " ", poison);
                    check_poisoned_weight(training, name, poison);
                    if (quick()) break;
                }
}

TEST_CASE("training: evaluate is the forward pass of a step and changes nothing") {
    for (const Architecture& arch : {LLAMA, GPT2})
        for (const char* recipe : {"fp32", "bf16", "coat", "te", "deepseek", "lean"}) {
            Training training(recipe == std::string("lean") ? with_mode(setup_of("coat", arch), "lean") : setup_of(recipe, arch));
            check_evaluate(training);
        }
}

TEST_CASE("training: evaluation sees a number that is not finite, which an FP8 code hides") {
    for (const char* recipe : {"te", "colossal", "coat", "bf16"}) {
        Training training(setup_of(recipe));
        check_infinite_evaluation(training);
    }
}

TEST_CASE("training: a prompt's amaxes are its own, whatever its length") {
    for (const char* recipe : {"bf16", "coat", "te", "colossal"})
        for (const Architecture& arch : {LLAMA, GPT2}) check_prompt(make_reference, recipe, arch, 1e-4);
}

TEST_CASE("training: where a batch falls back to BF16, prompts of any length do") {
    for (const char* recipe : {"te", "colossal", "rowwise", "deepseek"}) check_fallback(make_reference, recipe);
}

TEST_CASE("training: the next token's logits are those of the loss, for any length") {
    // A single sequence: the loss of T tokens is T times the mean, so two lengths' losses differ by the last token's.
    for (const Architecture& arch : {LLAMA, GPT2}) {
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
        CHECK(training.model->evaluate(training.tokens.data(), training.targets.data()) == doctest::Approx(total / 16).epsilon(1e-5));
    }
}

TEST_CASE("training: clipping bounds the gradient, and 0 turns it off") {
    for (float clip : {0.0f, 1e-3f}) {
        Training training(setup_of("fp32"));
        training.adamw.clip = clip;
        training.adamw.weight_decay = 0;
        const StepResult r = training.step();
        CHECK(r.grad_norm > 0.1);
        double square = 0;  // m = (1 - beta1) times the clipped gradient after the first step
        for (const Param& p : parameters(training.model->setup().config)) {
            const double m = norm(read_as<float>(*training.model, p.name + ".m", p.size()));
            square += m * m;
        }
        const double wanted = 0.1 * (clip > 0 ? double(clip) : r.grad_norm);
        CHECK(std::sqrt(square) == doctest::Approx(wanted).epsilon(1e-5));
    }
}

TEST_CASE("training: a gradient whose square is beyond FP32 skips the step unless it is clipped, with every optimizer") {
    for (const char* recipe : RECIPES)
        for (const OptimizerFormat& optimizer : optimizers()) {
            Setup setup = setup_of(recipe);
            setup.optimizer = optimizer;
            Training training(setup);
            INFO(std::string(recipe), " ", std::string(optimizer.name));
            check_huge_gradients(training);
        }
}

TEST_CASE("training: norms and biases keep FP32 moments and do not decay, the vocabulary's padding stays zero") {
    for (const Architecture& arch : {LLAMA, GPT2}) {
        Training training(setup_of("coat", arch));
        losses(training, 3);
        const ModelConfig& c = training.model->setup().config;
        for (const Param& p : parameters(c)) {
            const auto weight = read_as<uint16_t>(*training.model, p.name, p.size());
            for (int64_t i = live_elements(c, p); i < p.size(); i++) REQUIRE(weight[size_t(i)] == 0);
        }
        // Gradients that are skipped leave decay alone to tell: a learning rate with weight decay on a gain, against none.
        Training with(setup_of("fp32", arch)), without(setup_of("fp32", arch));
        without.adamw.weight_decay = 0;
        with.step(), without.step();
        for (const Param& p : parameters(c)) {
            const auto a = read_as<uint16_t>(*with.model, p.name, p.size()), b = read_as<uint16_t>(*without.model, p.name, p.size());
            const auto low_a = read_as<int16_t>(*with.model, p.name + ".remainder", p.size()),
                       low_b = read_as<int16_t>(*without.model, p.name + ".remainder", p.size());
            INFO(p.name);
            CHECK((a == b && low_a == low_b) == !p.role.decay);
        }
    }
}

TEST_CASE("training: the report measures every kind of tensor and changes nothing") {
    // A uniform relative error of half a step of E4M3 is 2^-4 / sqrt(3): 28.8 dB; E5M2's 22.8. Small elements under a per-tensor
    // scale do worse relative to themselves but weigh little; second moments have k above 1 and do better.
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
    for (const Param& p : parameters(training.model->setup().config)) groups += is_fp8(p.moment(Format::E4M3)) ? p.groups() : 0;
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

// ---------------------------------------------------------------------------------------------------------------------
// The modes that save memory

TEST_CASE("modes: a unit's parameters follow one another, from the embedding up, and no unit but the embedding's has more than one matrix") {
    for (const Architecture& arch : {LLAMA, GPT2})
        for (bool tied : {true, false}) {
            const ModelConfig c = tiny_config(arch, tied);
            const std::vector<Param> params = parameters(c);
            const std::vector<UnitRange> units = unit_ranges(params);
            CHECK(int64_t(units.size()) == 4 * c.L + 2);
            size_t next = 0;
            int64_t offset = 0;
            for (size_t u = 0; u < units.size(); u++) {
                CHECK(units[u].first == next);
                CHECK(units[u].offset == offset);
                int matrices = 0;
                for (next = units[u].first; next < units[u].last; next++) {
                    CHECK(params[next].unit == int64_t(u));
                    matrices += params[next].rows > 1;
                }
                CHECK(matrices == (u == 0 && !arch.rope ? 2 : u + 1 == units.size() && tied ? 0 : 1));
                offset += units[u].elements;
            }
            CHECK(next == params.size());
            CHECK(offset == params.back().offset + params.back().padded_size());
        }
}

TEST_CASE("modes: each learns the text as the usual run does") {
    // The mean of the last steps is within 0.03 nats: runs as short as these differ by 0.01 for no other reason than another rounding.
    const size_t steps = static_cast<size_t>(count(60, 8)), tail = steps / 4;
    for (const Architecture& arch : {LLAMA, GPT2}) {
        const Setup setup = setup_of("coat", arch, 4, 32);
        std::vector<std::pair<std::string, Setup>> runs = {{"usual", setup}, {"lean", with_mode(setup, "lean")}};
        if (arch.rope)
            for (const char* flag : {"attention", "master", "gradients"}) runs.push_back({flag, with_mode(setup, flag)});
        double usual = 0;
        for (const auto& [name, of] : runs) {
            Training training(of);
            const std::vector<double> loss = losses(training, int64_t(steps));
            const double last = mean(loss, steps - tail, steps);
            if (name == "usual") usual = last;
            INFO(std::string(arch.name), " ", name, ": from ", loss[0], " to ", last, ", usually ", usual);
            CHECK(last < loss[0]);
            if (quick()) continue;
            CHECK(last < loss[0] - 1.5);
            CHECK(std::fabs(last - usual) < 0.03);
        }
    }
}

TEST_CASE("modes: gradients spent as they come leave the bits of kept ones where the same norm clips, or none") {
    for (const char* recipe : RECIPES)
        for (const ModelConfig& config : {tiny_config(LLAMA, true), tiny_config(LLAMA, false), tiny_config(GPT2, true)})
            for (float clip : {0.0f, 0.5f}) {
                Setup setup = tiny_setup(config, recipe, optimizer_of(recipe), 4, 16);
                setup.master = recipe != std::string("coat");  // with and without
                if (setup.recipe.stream == Format::BF16) setup = with_mode(setup, "attention");
                Training kept(setup), spent(with_mode(setup, "gradients"));
                kept.adamw.clip = spent.adamw.clip = clip;
                INFO(config.name, " ", std::string(recipe), " ", clip);
                for (int i = 0; i < 3; i++) {
                    const StepResult a = kept.step();
                    const Snapshot before = snapshot(*spent.model);
                    spent.step();  // from which it knows how this very step's norm grows
                    restore(*spent.model, before);
                    const StepResult b = spent.model->step(spent.tokens.data(), spent.targets.data(), spent.adamw);
                    CHECK(a.grad_norm > 0.5);
                    CHECK(a.loss == b.loss);
                    CHECK(a.grad_norm == doctest::Approx(b.grad_norm).epsilon(1e-12));  // a sum of doubles in another order
                    CHECK((snapshot(*kept.model) == snapshot(*spent.model)));
                }
                std::vector<float> gradient(size_t(config.C));
                CHECK_THROWS_AS(spent.model->read("final_norm.gain.gradient", gradient.data()), Error);
                // The report needs every gradient once; it measures the same.
                const QuantReport x = kept.model->quantization(kept.tokens.data(), kept.targets.data());
                const QuantReport y = spent.model->quantization(spent.tokens.data(), spent.targets.data());
                for (int kind = 0; kind < static_cast<int>(Kind::Count); kind++)
                    CHECK((x.kinds[kind].noise == y.kinds[kind].noise && x.kinds[kind].elements == y.kinds[kind].elements));
                CHECK((x.k_m == y.k_m && x.k_v == y.k_v));
            }
}

TEST_CASE("modes: where no gradients are kept, the norm of all units so far clips, times what it is said to grow by; and how it grew is told") {
    for (double most : {0.0, 1e-3, 1.0, 8.0}) {
        Training kept(setup_of("fp32")), spent(with_mode(setup_of("fp32"), "gradients"));
        const std::vector<Param> params = parameters(kept.model->setup().config);
        kept.adamw.clip = 0;
        for (int64_t unit = 0; most > 0 && unit <= params.back().unit; unit++) spent.adamw.growth.push_back(most * double(unit + 1));
        const double total = kept.step().grad_norm;
        const std::vector<double> said = spent.adamw.growth, growth = spent.step().growth;
        double squares = 0;
        for (size_t end = params.size(); end > 0;) {
            size_t first = end - 1;
            while (first > 0 && params[first - 1].unit == params[end - 1].unit) first--;
            std::vector<std::vector<float>> gradients;
            for (size_t i = first; i < end; i++) {
                gradients.push_back(read_as<float>(*kept.model, params[i].name + ".gradient", params[i].size()));
                squares += norm(gradients.back()) * norm(gradients.back());
            }
            const size_t unit = size_t(params[first].unit);
            CHECK(growth.at(unit) == doctest::Approx(total / std::sqrt(squares)).epsilon(1e-6));
            const double by = std::sqrt(squares) * (said.empty() ? 1 : said[unit]), factor = by > 1 ? 1 / by : 1;
            for (size_t i = first; i < end; i++) {  // m = (1 - beta1) times the clipped gradient after the first step
                std::vector<float> expected = gradients[i - first];
                for (float& g : expected) g *= static_cast<float>(0.1 * factor);
                INFO(params[i].name, " ", most);
                CHECK(relative_error(read_as<float>(*spent.model, params[i].name + ".m", params[i].size()), expected) <= 1e-6);
            }
            end = first;
        }
        CHECK(total > 1);  // so that something was clipped
    }
}

TEST_CASE("modes: a first step that is clipped to nothing, at a learning rate of 0, tells its norm and changes nothing") {
    for (const char* recipe : RECIPES)
        for (const OptimizerFormat& optimizer : optimizers())
            for (bool master : {true, false}) {
                Setup setup = setup_of(recipe);
                setup.optimizer = optimizer, setup.master = master;
                if (!master && setup.recipe.stream != Format::BF16) continue;
                Training kept(setup), spent(with_mode(setup, "gradients"));
                const Snapshot before = snapshot(*spent.model);
                const StepResult step = kept.step();
                spent.adamw.lr = 0;
                spent.adamw.growth.assign(parameters(setup.config).back().unit + 1, std::numeric_limits<double>::infinity());
                const StepResult measured = spent.step();
                INFO(std::string(recipe), " ", std::string(optimizer.name), " ", master);
                CHECK(measured.grad_norm == doctest::Approx(step.grad_norm).epsilon(1e-12));
                CHECK_FALSE(measured.skipped);
                CHECK((snapshot(*spent.model) == before));
            }
}

TEST_CASE("modes: a gradient that is not finite skips its unit and all later ones; what came before is updated") {
    // Layer 1's gates are 0, so its feed-forward half adds 0 whatever stands before and behind: W_up 2^100, W_down 2^120. Backward, the gradient
    // of a gate is that of the stream (2^-20 or more) times both: infinite.
    for (const char* recipe : RECIPES) {
        Training training(with_mode(setup_of(recipe), "gradients"));
        const ModelConfig& c = training.model->setup().config;
        losses(training, 1);
        Snapshot state = snapshot(*training.model);
        auto fill = [&](const std::string& name, int64_t first, int64_t n, float value) {
            const uint16_t bits = to_bf16(value);
            for (int64_t i = first; i < first + n; i++) std::memcpy(state.at(name).data() + 2 * i, &bits, 2);
            if (state.count(name + ".remainder")) std::fill_n(state.at(name + ".remainder").begin() + 2 * first, 2 * n, uint8_t(0));
        };
        fill("layers.1.up", 0, c.F * c.C, 0.0f);
        fill("layers.1.up", c.F * c.C, c.F * c.C, 0x1p100f);
        fill("layers.1.down", 0, c.C * c.F, 0x1p120f);
        fill("layers.1.down", 0, c.C * c.F / 2, -0x1p119f);  // else the sum over a row of the gradient might cancel
        restore(*training.model, state);
        state = snapshot(*training.model);
        const StepResult r = training.step();
        CHECK(r.skipped);
        CHECK(std::isfinite(r.loss));
        if (recipe != std::string("coat")) CHECK(!std::isfinite(r.grad_norm));  // E5M2 hides it from the gradient, but not from the check
        const Snapshot after = snapshot(*training.model);
        const std::vector<Param> params = parameters(c);
        const int64_t turn = params[param_of(params, "layers.1.down")].unit;
        for (const StateTensor& t : state_tensors(training.model->setup())) {
            const Param& p = params[t.param];
            INFO(std::string(recipe), " ", t.name);
            if (p.unit < turn) CHECK((after.at(t.name) == state.at(t.name)));
            else if (t.name == p.name + ".m") CHECK((after.at(t.name) != state.at(t.name)));
        }
    }
}

TEST_CASE("modes: once one gradient is not finite no later bucket is updated, even where it flows nowhere") {
    for (const char* recipe : RECIPES) {
        Training training(with_mode(setup_of(recipe), "gradients"));
        check_hidden_gradient(training);
    }
}

TEST_CASE("modes: a poisoned weight skips every unit of the step in the lean mode, and training goes on after it") {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    for (const Architecture& arch : {LLAMA, GPT2})
        for (const char* name : {"embedding", "layers.0.qkv", "layers.1.down", "layers.0.norm2.gain", "final_norm.gain"})
            for (float poison : {nan, inf}) {
                Training training(with_mode(setup_of("coat", arch), "lean"));
                INFO(std::string(arch.name), " ", std::string(name), " ", poison);
                check_poisoned_weight(training, name, poison);
            }
}

TEST_CASE("modes: without a master the start is the nearest BF16, there is no remainder, and an update is rounded by the table's rule") {
    for (const Architecture& arch : {LLAMA, GPT2}) {
        const Setup setup = setup_of("bf16", arch);
        Training with(setup), without(with_mode(setup, "master"));
        const std::vector<Param> params = parameters(setup.config);
        for (const Param& p : params) {
            CHECK(read_as<uint16_t>(*with.model, p.name, p.size()) == read_as<uint16_t>(*without.model, p.name, p.size()));
            std::vector<int16_t> remainder(size_t(p.size()));
            CHECK_THROWS_AS(without.model->read(p.name + ".remainder", remainder.data()), Error);
            CHECK_THROWS_AS(without.model->write(p.name + ".remainder", remainder.data()), Error);
            with.model->write(p.name + ".remainder", remainder.data());  // from here on both start from the same numbers
        }
        CHECK(losses(with, 1) == losses(without, 1));
        const uint64_t key = rounding_key(setup.seed, 1);
        double up = 0, expected = 0, variance = 0;  // how many are rounded away from zero: each with the probability of what is cut off
        for (const Param& p : params) {
            const auto weight = read_as<uint16_t>(*with.model, p.name, p.size()), rounded = read_as<uint16_t>(*without.model, p.name, p.size());
            const auto remainder = read_as<int16_t>(*with.model, p.name + ".remainder", p.size());
            for (int64_t e = 0; e < p.size(); e++) {
                const uint32_t exact = bits_of(join_master(weight[size_t(e)], remainder[size_t(e)]));
                const int64_t at = p.offset + e;
                const uint32_t random = uint32_t(rounding_bits(key, uint64_t(at / 4)) >> (16 * (at % 4))) & 0xFFFF;
                REQUIRE(rounded[size_t(e)] == uint16_t((exact + random) >> 16));
                const double p = (exact & 0xFFFF) * 0x1p-16;
                expected += p, variance += p * (1 - p);
                up += rounded[size_t(e)] != uint16_t(exact >> 16);
            }
        }
        CHECK(std::fabs(up - expected) <= 5 * std::sqrt(variance));
    }
}
