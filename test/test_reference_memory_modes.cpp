// test_reference_memory_modes.cpp - the modes that save memory, on the CPU reference: what each changes, and
// that it changes nothing else.
#include <doctest/doctest.h>

#include "../plan.h"
#include "../reference.h"
#include "oracle.h"
#include "random.h"
#include "setups.h"
#include "tiny.h"

using namespace coat;
using namespace coat::test;
using namespace coat::reference;
using namespace coat::test::setups;

TEST_CASE(
    "bucket_ranges: the parameters of a gradient bucket are adjacent, and only the embedding's bucket has "
    "two matrices") {
    for (const Architecture& arch : {LLAMA, GPT2})
        for (bool tied : {true, false}) {
            const ModelConfig c = tiny_config(arch, tied);
            const std::vector<Param> params = parameters(c);
            const std::vector<BucketRange> buckets = bucket_ranges(params);
            CHECK(int64_t(buckets.size()) == 4 * c.L + 2);
            size_t next = 0;
            int64_t offset = 0;
            for (size_t u = 0; u < buckets.size(); u++) {
                CHECK(buckets[u].first == next);
                CHECK(buckets[u].offset == offset);
                int matrices = 0;
                for (next = buckets[u].first; next < buckets[u].last; next++) {
                    CHECK(params[next].bucket == int64_t(u));
                    matrices += params[next].rows > 1;
                }
                CHECK(matrices == (u == 0 && !arch.rope ? 2 : u + 1 == buckets.size() && tied ? 0 : 1));
                offset += buckets[u].elements;
            }
            CHECK(next == params.size());
            CHECK(offset == params.back().offset + params.back().padded_size());
        }
}

TEST_CASE("memory modes: each learns the text as the default does") {
    // The mean of the last steps is within 0.03 nats: runs as short as these differ by 0.01 for no other
    // reason than another rounding.
    const size_t steps = static_cast<size_t>(count(60, 8)), tail = steps / 4;
    for (const Architecture& arch : {LLAMA, GPT2}) {
        const Setup setup = setup_of("coat", arch, 4, 32);
        std::vector<std::pair<std::string, Setup>> runs = {{"usual", setup},
                                                           {"lean", with_mode(setup, "lean")}};
        if (arch.rope)
            for (const char* flag : {"attention", "master", "gradients"})
                runs.push_back({flag, with_mode(setup, flag)});
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

TEST_CASE("--gradients none: bit-identical to kept gradients where the same norm clips, or none") {
    for (const char* recipe : RECIPES)
        for (const ModelConfig& config :
             {tiny_config(LLAMA, true), tiny_config(LLAMA, false), tiny_config(GPT2, true)})
            for (float clip : {0.0f, 0.5f}) {
                Setup setup = tiny_setup(config, recipe, optimizer_of(recipe), 4, 16);
                setup.master = recipe != std::string("coat");  // with and without
                if (setup.recipe.compute == Format::BF16) setup = with_mode(setup, "attention");
                Training kept(setup), spent(with_mode(setup, "gradients"));
                kept.adamw.clip = spent.adamw.clip = clip;
                INFO(config.name, " ", std::string(recipe), " ", clip);
                for (int i = 0; i < 3; i++) {
                    const StepResult a = kept.step();
                    const Snapshot before = snapshot(*spent.model);
                    spent.step();  // from which it knows how this very step's norm grows
                    restore(*spent.model, before);
                    const StepResult b =
                        spent.model->step(spent.tokens.data(), spent.targets.data(), spent.adamw);
                    CHECK(a.grad_norm > 0.5);
                    CHECK(a.loss == b.loss);
                    CHECK(a.grad_norm ==
                          doctest::Approx(b.grad_norm).epsilon(1e-12));  // a sum of doubles in another order
                    CHECK((snapshot(*kept.model) == snapshot(*spent.model)));
                }
                std::vector<float> gradient(size_t(config.C));
                CHECK_THROWS_AS(spent.model->read("final_norm.weight.gradient", gradient.data()), Error);
                // The report needs every gradient once; it measures the same.
                const QuantReport x = kept.model->quantization(kept.tokens.data(), kept.targets.data());
                const QuantReport y = spent.model->quantization(spent.tokens.data(), spent.targets.data());
                for (int kind = 0; kind < static_cast<int>(Kind::Count); kind++)
                    CHECK((x.kinds[kind].noise == y.kinds[kind].noise &&
                           x.kinds[kind].elements == y.kinds[kind].elements));
                CHECK((x.k_m == y.k_m && x.k_v == y.k_v));
            }
}

TEST_CASE(
    "--gradients none: clips by the norm of all buckets so far times the norm correction, and reports the "
    "correction") {
    for (double most : {0.0, 1e-3, 1.0, 8.0}) {
        Training kept(setup_of("fp32")), spent(with_mode(setup_of("fp32"), "gradients"));
        const std::vector<Param> params = parameters(kept.model->setup().config);
        kept.adamw.clip = 0;
        for (int64_t bucket = 0; most > 0 && bucket <= params.back().bucket; bucket++)
            spent.adamw.norm_correction.push_back(most * double(bucket + 1));
        const double total = kept.step().grad_norm;
        const std::vector<double> said = spent.adamw.norm_correction,
                                  norm_correction = spent.step().norm_correction;
        double squares = 0;
        for (size_t end = params.size(); end > 0;) {
            size_t first = end - 1;
            while (first > 0 && params[first - 1].bucket == params[end - 1].bucket) first--;
            std::vector<std::vector<float>> gradients;
            for (size_t i = first; i < end; i++) {
                gradients.push_back(
                    read_as<float>(*kept.model, params[i].name + ".gradient", params[i].size()));
                squares += norm(gradients.back()) * norm(gradients.back());
            }
            const size_t bucket = size_t(params[first].bucket);
            CHECK(norm_correction.at(bucket) == doctest::Approx(total / std::sqrt(squares)).epsilon(1e-6));
            const double by = std::sqrt(squares) * (said.empty() ? 1 : said[bucket]),
                         factor = by > 1 ? 1 / by : 1;
            for (size_t i = first; i < end;
                 i++) {  // m = (1 - beta1) times the clipped gradient after the first step
                std::vector<float> expected = gradients[i - first];
                for (float& g : expected) g *= static_cast<float>(0.1 * factor);
                INFO(params[i].name, " ", most);
                CHECK(relative_error(read_as<float>(*spent.model, params[i].name + ".m", params[i].size()),
                                     expected) <= 1e-6);
            }
            end = first;
        }
        CHECK(total > 1);  // so that something was clipped
    }
}

TEST_CASE("--gradients none: a first step at learning rate 0 reports its norm and changes nothing") {
    for (const char* recipe : RECIPES)
        for (const OptimizerFormat& optimizer : optimizers())
            for (bool master : {true, false}) {
                Setup setup = setup_of(recipe);
                setup.optimizer = optimizer, setup.master = master;
                if (!master && setup.recipe.compute != Format::BF16) continue;
                Training kept(setup), spent(with_mode(setup, "gradients"));
                const Snapshot before = snapshot(*spent.model);
                const StepResult step = kept.step();
                spent.adamw.lr = 0;
                spent.adamw.norm_correction.assign(parameters(setup.config).back().bucket + 1,
                                                   std::numeric_limits<double>::infinity());
                const StepResult measured = spent.step();
                INFO(std::string(recipe), " ", std::string(optimizer.name), " ", master);
                CHECK(measured.grad_norm == doctest::Approx(step.grad_norm).epsilon(1e-12));
                CHECK_FALSE(measured.skipped);
                CHECK((snapshot(*spent.model) == before));
            }
}

TEST_CASE(
    "--gradients none: a gradient that is not finite skips its bucket and all later ones; earlier ones are "
    "updated") {
    // Layer 1's gates are 0, so its feed-forward half adds 0 whatever stands before and behind: W_up 2^100,
    // W_down 2^120. Backward, the gradient of a gate is that of the stream (2^-20 or more) times both:
    // infinite.
    for (const char* recipe : RECIPES) {
        Training training(with_mode(setup_of(recipe), "gradients"));
        const ModelConfig& c = training.model->setup().config;
        losses(training, 1);
        Snapshot state = snapshot(*training.model);
        auto fill = [&](const std::string& name, int64_t first, int64_t n, float value) {
            const uint16_t bits = to_bf16(value);
            for (int64_t i = first; i < first + n; i++) std::memcpy(state.at(name).data() + 2 * i, &bits, 2);
            if (state.count(name + ".remainder"))
                std::fill_n(state.at(name + ".remainder").begin() + 2 * first, 2 * n, uint8_t(0));
        };
        fill("layers.1.gate_up", 0, c.F * c.C, 0.0f);
        fill("layers.1.gate_up", c.F * c.C, c.F * c.C, 0x1p100f);
        fill("layers.1.down", 0, c.C * c.F, 0x1p120f);
        fill("layers.1.down", 0, c.C * c.F / 2,
             -0x1p119f);  // else the sum over a row of the gradient might cancel
        restore(*training.model, state);
        state = snapshot(*training.model);
        const StepResult r = training.step();
        CHECK(r.skipped);
        CHECK(std::isfinite(r.loss));
        if (recipe != std::string("coat"))
            CHECK(!std::isfinite(r.grad_norm));  // E5M2 hides it from the gradient, but not from the check
        const Snapshot after = snapshot(*training.model);
        const std::vector<Param> params = parameters(c);
        const int64_t turn = params[param_of(params, "layers.1.down")].bucket;
        for (const StateTensor& t : state_tensors(training.model->setup())) {
            const Param& p = params[t.param];
            INFO(std::string(recipe), " ", t.name);
            if (p.bucket < turn) CHECK((after.at(t.name) == state.at(t.name)));
            else if (t.name == p.name + ".m") CHECK((after.at(t.name) != state.at(t.name)));
        }
    }
}

TEST_CASE("--gradients none: after a gradient that is not finite no later bucket is updated") {
    for (const char* recipe : RECIPES) {
        Training training(with_mode(setup_of(recipe), "gradients"));
        check_hidden_gradient(training);
    }
}

TEST_CASE(
    "memory modes: with all of them, a weight that is not finite skips every bucket, and training "
    "continues") {
    const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
    for (const Architecture& arch : {LLAMA, GPT2})
        for (const char* name :
             {"embedding", "layers.0.qkv", "layers.1.down", "layers.0.norm2.weight", "final_norm.weight"})
            for (float poison : {nan, inf}) {
                Training training(with_mode(setup_of("coat", arch), "lean"));
                INFO(std::string(arch.name), " ", std::string(name), " ", poison);
                check_poisoned_weight(training, name, poison);
            }
}

TEST_CASE(
    "--master none: initial weights are rounded to BF16, there is no remainder, and updates are rounded "
    "stochastically") {
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
            with.model->write(p.name + ".remainder",
                              remainder.data());  // from here on both start from the same numbers
        }
        CHECK(losses(with, 1) == losses(without, 1));
        const uint64_t key = rounding_key(setup.seed, 1);
        double up = 0, expected = 0,
               variance =
                   0;  // how many are rounded away from zero: each with the probability of what is cut off
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
