// memory_modes.cpp - the memory modes of the CPU reference (--attention, --master,
// --gradients): what each changes, and that it changes nothing else.
#include <doctest/doctest.h>

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

TEST_CASE("bucket_ranges: buckets are contiguous; only the embedding's bucket may have two matrices") {
    for (const Architecture& arch : {LLAMA, GPT2})
        for (bool tied : {true, false}) {
            const ModelConfig c = tiny_config(arch, tied);
            const std::vector<Param> params = parameters(c);
            const std::vector<BucketRange> buckets = bucket_ranges(params);
            CHECK(int64_t(buckets.size()) == 4 * c.L + 2);
            size_t next = 0;
            int64_t offset = 0;
            for (size_t b = 0; b < buckets.size(); b++) {
                CHECK(buckets[b].first == next);
                CHECK(buckets[b].offset == offset);
                int matrices = 0;
                for (next = buckets[b].first; next < buckets[b].last; next++) {
                    CHECK(params[next].bucket == int64_t(b));
                    matrices += params[next].rows > 1;
                }
                CHECK(matrices == (b == 0 && !arch.rope ? 2 : b + 1 == buckets.size() && tied ? 0 : 1));
                offset += buckets[b].elements;
            }
            CHECK(next == params.size());
            CHECK(offset == params.back().offset + params.back().padded_size());
        }
}

TEST_CASE("memory modes: each learns the text as the default does") {
    // The mean loss of the last steps is within 0.03 nats. Another rounding alone changes runs this short by
    // 0.01.
    const size_t steps = static_cast<size_t>(count(60, 8)), tail = steps / 4;
    for (const Architecture& arch : {LLAMA, GPT2}) {
        const Setup setup = setup_of("coat", arch, 4, 32);
        std::vector<std::pair<std::string, Setup>> runs = {{"default", setup},
                                                           {"lean", with_mode(setup, "lean")}};
        if (arch.rope)
            for (const char* flag : {"attention", "master", "gradients"})
                runs.push_back({flag, with_mode(setup, flag)});
        double by_default = 0;
        for (const auto& [name, of] : runs) {
            Training training(of);
            const std::vector<double> loss = losses(training, int64_t(steps));
            const double last = mean(loss, steps - tail, steps);
            if (name == "default") by_default = last;
            INFO(std::string(arch.name), " ", name, ": from ", loss[0], " to ", last, ", default ",
                 by_default);
            CHECK(last < loss[0]);
            if (quick()) continue;
            CHECK(last < loss[0] - 1.5);
            CHECK(std::fabs(last - by_default) < 0.03);
        }
    }
}

TEST_CASE("--gradients none: bit-identical to kept gradients") {
    for (const char* recipe : RECIPES)
        for (const ModelConfig& config :
             {tiny_config(LLAMA, true), tiny_config(LLAMA, false), tiny_config(GPT2, true)}) {
            Setup setup = tiny_setup(config, recipe, optimizer_of(recipe), 4, 16);
            setup.master = recipe != std::string("coat");  // both cases
            if (setup.recipe.compute == Format::BF16) setup = with_mode(setup, "attention");
            Training kept(setup), dropped(with_mode(setup, "gradients"));
            kept.adamw.clip = 0;
            INFO(config.name, " ", std::string(recipe));
            for (int i = 0; i < 3; i++) {
                const StepResult a = kept.step(), b = dropped.step();
                CHECK(a.loss == b.loss);
                // The same sum of doubles in another order.
                CHECK(a.grad_norm == doctest::Approx(b.grad_norm).epsilon(1e-12));
                CHECK((snapshot(*kept.model) == snapshot(*dropped.model)));
            }
            std::vector<float> gradient(size_t(config.C));
            CHECK_THROWS_AS(dropped.model->read("final_norm.weight.gradient", gradient.data()), Error);
            CHECK_THROWS_AS(kept.model->write("final_norm.weight.gradient", gradient.data()), Error);
            // The report computes every gradient once, with the same result.
            const QuantReport x = kept.model->quantization(kept.tokens.data(), kept.targets.data());
            const QuantReport y = dropped.model->quantization(dropped.tokens.data(), dropped.targets.data());
            for (int kind = 0; kind < static_cast<int>(Kind::Count); kind++)
                CHECK((x.kinds[kind].noise == y.kinds[kind].noise &&
                       x.kinds[kind].elements == y.kinds[kind].elements));
            CHECK((x.k_m == y.k_m && x.k_v == y.k_v));
        }
}

TEST_CASE("--gradients none: a gradient that is not finite skips its bucket and all later ones only") {
    // The gradient of a gate in layer 1 is the gradient of its output (2^-20 or more) times 2^100 times
    // 2^120: infinite.
    for (const char* recipe : RECIPES) {
        Training training(with_mode(setup_of(recipe), "gradients"));
        const ModelConfig& c = training.model->setup().config;
        losses(training, 1);
        write_huge_gate_gradient(*training.model, 0x1p100f, 0x1p120f);
        const Snapshot state = snapshot(*training.model);
        const StepResult r = training.step();
        CHECK(r.skipped);
        CHECK(std::isfinite(r.loss));
        if (recipe != std::string("coat"))
            CHECK(!std::isfinite(r.grad_norm));  // in E5M2 the gradient saturates, but the check detects it
        const Snapshot after = snapshot(*training.model);
        const std::vector<Param> params = parameters(c);
        const int64_t bucket = params[param_of(params, "layers.1.down")].bucket;
        // Where the gradient is 0, a moment only decays: in FP8 groups its codes and k stay, and max changes.
        const char* moment = is_scaled(training.model->setup().optimizer.m) ? ".m.max" : ".m";
        for (const StateTensor& t : state_tensors(training.model->setup())) {
            const Param& p = params[t.param];
            INFO(std::string(recipe), " ", t.name);
            if (p.bucket < bucket) CHECK((after.at(t.name) == state.at(t.name)));
            else if (t.name == p.name + moment) CHECK((after.at(t.name) != state.at(t.name)));
        }
    }
}

TEST_CASE("--gradients none: after a gradient that is not finite no later bucket is updated") {
    for (const char* recipe : RECIPES) {
        Training training(with_mode(setup_of(recipe), "gradients"));
        check_hidden_gradient(training);
    }
}

TEST_CASE("memory modes: a weight that is not finite skips every bucket, and training continues") {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    for (const Architecture& arch : {LLAMA, GPT2})
        for (const char* name : POISONED)
            for (float poison : {nan, inf}) {
                Training training(with_mode(setup_of("coat", arch), "lean"));
                INFO(std::string(arch.name), " ", std::string(name), " ", poison);
                check_poisoned_weight(training, name, poison);
            }
}

TEST_CASE("--master none: weights are BF16 without remainder, and updates are rounded stochastically") {
    for (const Architecture& arch : {LLAMA, GPT2}) {
        const Setup setup = setup_of("bf16", arch);
        Training with(setup), without(with_mode(setup, "master"));
        const std::vector<Param> params = parameters(setup.config);
        for (const Param& p : params) {
            CHECK(read_as<uint16_t>(*with.model, p.name, p.size()) ==
                  read_as<uint16_t>(*without.model, p.name, p.size()));
            std::vector<int16_t> remainder(size_t(p.size()));
            CHECK_THROWS_AS(without.model->read(p.name + ".remainder", remainder.data()), Error);
            CHECK_THROWS_AS(without.model->write(p.name + ".remainder", remainder.data()), Error);
            // Now both start from the same weights.
            with.model->write(p.name + ".remainder", remainder.data());
        }
        without.adamw.skipped = 2;
        CHECK(losses(with, 1) == losses(without, 1));
        const uint64_t key = rounding_key(setup.seed, 1 + 2);
        // How many are rounded away from zero: each with the probability of the part that is cut off.
        double up = 0, expected = 0, variance = 0;
        for (const Param& p : params) {
            const auto weight = read_as<uint16_t>(*with.model, p.name, p.size()),
                       rounded = read_as<uint16_t>(*without.model, p.name, p.size());
            const auto remainder = read_as<int16_t>(*with.model, p.name + ".remainder", p.size());
            for (int64_t e = 0; e < p.size(); e++) {
                const uint32_t exact = bits_of(join_master(weight[size_t(e)], remainder[size_t(e)]));
                const int64_t at = p.offset + e;
                const uint32_t random =
                    uint32_t(rounding_bits(key, uint64_t(at / 4)) >> (16 * (at % 4))) & 0xFFFF;
                REQUIRE(rounded[size_t(e)] == uint16_t((exact + random) >> 16));
                const double p = (exact & 0xFFFF) * 0x1p-16;
                expected += p, variance += p * (1 - p);
                up += rounded[size_t(e)] != uint16_t(exact >> 16);
            }
        }
        CHECK(std::fabs(up - expected) <= 5 * std::sqrt(variance));
    }
}
