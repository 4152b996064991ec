// delayed_scaling.cpp - delayed scaling in reference.cpp: how the scale of an operand follows
// from the amaxes of earlier steps.
#include <doctest/doctest.h>

#include <algorithm>

#include "../../program/plan.h"
#include "../../reference.h"
#include "../help/model_checks.h"
#include "../help/oracle.h"
#include "../help/random.h"
#include "../help/setups.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;
using namespace coat::test::setups;

namespace {

float read_scale(Model& model, const std::string& name) { return read_as<float>(model, name, 1)[0]; }

// A run with delayed scaling and a history of so many steps. Its learning rate is 0, so that only scales
// change.
Training delayed_run(int history, int margin = 0, int64_t accumulate = 1) {
    Setup setup = setup_of("te");
    setup.recipe.history = history, setup.recipe.margin = margin, setup.accumulate = accumulate;
    Training training(setup);
    training.adamw.lr = 0;
    return training;
}

// Multiplies layers.0.down by a power of two.
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

TEST_CASE("end_step: the scale is the largest amax of the history / FMAX, unless that is 0 or not finite") {
    FRESH_RANDOM(rng);
    const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
    for (Format f : {Format::E4M3, Format::E5M2})
        for (int margin : {0, 1, 3})
            for (size_t length : {1u, 3u, 16u}) {
                DelayedScale d;
                d.history.resize(length);
                std::vector<float> seen;
                float expected = 0;
                for (int step = 0; step < 60; step++) {
                    const int64_t draw = rng.below(12);
                    d.amax = draw == 0   ? inf
                             : draw == 1 ? nan
                             : draw < 5  ? 0.0f
                                         : float(std::exp(5 * rng.normal()));
                    seen.insert(seen.begin(), d.amax);
                    float top = 0;
                    bool finite = true;
                    for (size_t i = 0; i < std::min(length, seen.size()); i++) {
                        top = std::max(top, seen[i]);
                        finite = finite && std::isfinite(seen[i]);
                    }
                    if (finite && top > 0) expected = top * float(1 << margin) / info(f).max;
                    d.end_step(f, margin);
                    REQUIRE(d.scale == expected);
                    REQUIRE(d.amax == 0);
                    for (size_t i = 0; i < std::min(length, seen.size()); i++)
                        REQUIRE(bits_of(d.history[i]) == bits_of(seen[i]));
                }
            }
}

TEST_CASE("delayed scaling: the amax of a step is the largest of its micro-batches") {
    Training both = delayed_run(4, 0, 2), first = delayed_run(4), second = delayed_run(4),
             before = delayed_run(4);
    for (const StateTensor& t : scaling_tensors(both.model->setup().config, both.model->setup().recipe))
        if (t.size() == 1) CHECK(read_scale(*both.model, t.name) == 0.0f);
    before.step();
    const Snapshot state = snapshot(*before.model);  // with scales: they do not change during a step
    for (Training* t : {&both, &first, &second}) restore(*t->model, state);
    both.step(), first.step();
    second.text = first.text;
    second.step();
    int compared = 0;
    for (const Param& p : parameters(both.model->setup().config))
        for (const char* operand : OPERAND_NAMES) {
            if (!p.role.linear) continue;
            // With two micro-batches each gradient is half as large. That is exact only for the output of the
            // last layer, whose gradient comes from the head.
            if (operand == std::string(".g") && p.name != "layers.1.down") continue;
            const float factor = operand == std::string(".g") ? 0.5f : 1.0f;
            const std::string name = p.name + operand + ".history";
            INFO(name);
            const auto history = read_as<float>(*both.model, name, 4);
            CHECK(history[0] == factor * std::max(read_as<float>(*first.model, name, 4)[0],
                                                  read_as<float>(*second.model, name, 4)[0]));
            CHECK(history[0] > 0);
            CHECK(history[1] == read_as<float>(*before.model, name, 4)[0]);
            CHECK((history[2] == 0 && history[3] == 0));
            const float fmax = info(operand == std::string(".g") ? Format::E5M2 : Format::E4M3).max;
            CHECK(read_scale(*both.model, p.name + operand + ".scale") ==
                  std::max(history[0], history[1]) / fmax);
            compared++;
        }
    CHECK(compared == 2 * 4 * 2 + 1);
}

TEST_CASE("delayed scaling: an operand without a history is scaled just in time") {
    for (const Architecture& arch : {LLAMA, GPT2}) check_first_scales(make_reference, arch);
}

TEST_CASE("delayed scaling: a doubled tensor saturates for one step; a smaller one keeps its scale") {
    for (int margin : {0, 1}) {
        Training training = delayed_run(3, margin);
        training.step();
        const std::string name = "layers.0.down.w.scale";
        const float before = read_scale(*training.model, name);
        CHECK(saturated(training, Kind::Weight) == 0);
        scale_weight(*training.model, 2);
        // A margin of one power of two is enough.
        CHECK((saturated(training, Kind::Weight) > 0) == (margin == 0));
        CHECK(read_scale(*training.model, name) == before);  // the report changes nothing
        CHECK(!training.step().skipped);                     // saturated values are finite
        CHECK(read_scale(*training.model, name) == 2 * before);
        CHECK(saturated(training, Kind::Weight) == 0);
        scale_weight(*training.model, 0.5f);
        for (float expected : {2 * before, 2 * before, before}) {
            training.step();
            CHECK(read_scale(*training.model, name) == expected);
        }
        // A tensor of zeros: once its history is all zeros, the scale no longer changes.
        scale_weight(*training.model, 0);
        for (int i = 0; i < 5; i++) training.step();
        CHECK(read_scale(*training.model, name) == before);
        CHECK(read_as<float>(*training.model, "layers.0.down.w.history", 3) == std::vector<float>(3, 0.0f));
    }
}
